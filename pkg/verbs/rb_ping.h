/* The UD echo: one queue pair and one thread a port, for all peers, as initiator and as responder.
 *
 * Everything here is guarded by rb_ping.lock, which the thread gives up only while it sleeps or spins. Times are nanoseconds of
 * CLOCK_MONOTONIC unless a name says ticks (rb_ticks) or hw (the device's own clock). */
#ifndef RB_PING_H
#define RB_PING_H

#include "rb.h"

#include <pthread.h>

enum {
	RB_PING_HEADER = 64,  /* bytes; the smallest datagram */
	RB_PING_MAX = 4096,   /* the largest: the largest MTU there is, so that no datagram is too long for a receive */
	RB_PING_RECVS = 512,
	RB_PING_SENDS = 256,
	RB_PING_PEERS = 4096, /* at most 1 << 16: the low bits of a nonce are its place */
	RB_PING_JOBS = 256,
	RB_PING_TOLD = 32
};

/* ---- what is sent, in network byte order ---- */

#define RB_PING_MAGIC UINT32_C(0x7262456f)
enum { RB_PING_VERSION = 1, RB_PING_QUESTION = 1, RB_PING_ANSWER = 2 };
enum {
	RB_PING_HARDWARE = 1, /* answer: the true delay of this one comes with one of the next two */
	RB_PING_BUSY = 2      /* answer: a heavy probe is using the port */
};

struct rb_ping_earlier {
	uint64_t seq;
	uint32_t delay_ns;
} __attribute__((packed));

struct rb_ping_header {
	uint32_t magic;
	uint8_t version, type;
	uint16_t flags;
	uint64_t nonce;  /* the responder's, of the announcement */
	uint64_t seq;    /* the initiator's: what it is about */
	uint64_t stamp;  /* the initiator's, sent back as it came */
	uint64_t delay;  /* answer: ns from being woken by the question, or seeing it, to posting this, by software */
	struct rb_ping_earlier earlier[2]; /* answer: from the question's to the answer's completion, by the device's clock; seq 0: none */
} __attribute__((packed));

_Static_assert(sizeof(struct rb_ping_header) == RB_PING_HEADER, "the header has no holes");

/* ---- peers ---- */

struct rb_ping_path {
	int gid_index; /* ours; -1: no GRH */
	uint8_t gid[16];
	uint16_t lid;
	int sl, traffic_class, flow_label, hop_limit;
	uint32_t qpn, qkey;
};

struct rb_ping_bucket {
	double tokens, rate /* per second */, burst;
	uint64_t filled_ns;
};

struct rb_ping_told {
	uint64_t seq;
	uint32_t delay_ns;
	int times;
};

/* One direction to one peer: it is asked by us, or answered. */
struct rb_ping_peer {
	struct ibv_ah *ah; /* NULL: the place is free */
	uint32_t qpn, qkey;
	uint64_t nonce;    /* what its questions, or ours to it, must carry */
	int answers;       /* its questions are answered */
	int dying;         /* freed once nothing is under way */
	int out;           /* sends under way */
	struct rb_ping_bucket bucket;
	struct rb_ping_told told[RB_PING_TOLD]; /* delays by hardware that are to be told, oldest first */
	unsigned told_head, told_tail;
};

/* ---- jobs ---- */

enum rb_ping_state {
	RB_SHOT_UNSENT,
	RB_SHOT_OPEN,    /* no answer yet; at the end: lost */
	RB_SHOT_AWAIT,   /* answered; the responder's hardware stamps are to come */
	RB_SHOT_OK,
	/* Answered, but no sample: */
	RB_SHOT_LATE,
	RB_SHOT_STAMPS,  /* stamps that can't be, or never came */
	RB_SHOT_OWN,     /* this thread waited for a CPU meanwhile */
	RB_SHOT_BUSY     /* a heavy probe was using the peer's port */
};

struct rb_ping_shot {
	enum rb_ping_state state;
	uint64_t post_ticks, seen_ticks;
	uint64_t sent_hw, answered_hw;
	uint64_t waited_ns; /* of rb_ping.waited_ns, when posted */
	uint64_t rtt_ns, responder_ns, own_ns;
};

struct rb_ping_job {
	/* in */
	int peer;
	uint32_t size;  /* payload bytes, with the header */
	uint32_t count;
	uint64_t gap_ns, timeout_ns;
	uint64_t deadline_ns; /* absolute */
	uint64_t own_ns;      /* a sample during which this thread waited longer for a CPU, and a tenth of the sample, is none; 0: any */

	/* out */
	_Atomic int done;
	uint32_t sent;
	uint64_t duplicates, foreign; /* datagrams more than there should be, or not the peer's */
	int hardware;                 /* the samples are by the devices' clocks, at both ends */
	uint64_t first_ns, last_ns;   /* when the first was posted, and the end */

	/* running */
	uint64_t nonce;
	uint64_t id; /* of its sequence numbers: generation, place; the index follows */
	uint32_t open, await;
	uint64_t due_ns, sent_ns;
	int closings;
	uint64_t close_ns;
	double ns_per_tick;
	struct rb_ping_shot shot[];
};

/* ---- the port ---- */

struct rb_ping_cq {
	struct ibv_cq *cq; /* of ex, if there is one */
	struct ibv_cq_ex *ex;
};

/* A send under way. */
struct rb_ping_send {
	int peer;
	int answer;
	uint64_t seq;
	uint64_t asked_hw;
};

struct rb_ping_totals {
	uint64_t asked, answered; /* datagrams sent, as initiator and as responder */
	uint64_t strangers;       /* questions that nobody announced, and what is no ping at all */
	uint64_t limited;         /* questions above the rate */
	uint64_t full;            /* questions that found the send queue full */
	uint64_t stray;           /* answers to no job under way */
	uint64_t turns, sleeps;
};

struct rb_ping {
	pthread_mutex_t lock;
	_Atomic uint32_t stop, busy;
	int wake, done; /* eventfds: for the thread, and from it */

	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_comp_channel *channel;
	struct rb_ping_cq scq, rcq;
	struct ibv_qp *qp;
	uint8_t *buf; /* send headers; receive slots; what follows a header, sent or received */
	size_t buf_len;
	uint8_t port;
	int hardware;
	double hw_ns_per_tick;
	uint64_t hw_mask;
	uint64_t spin_ns; /* after a ping, before the thread sleeps */

	struct ibv_recv_wr *rwr; /* RB_PING_RECVS */
	struct ibv_sge *rsge;    /* two of each */
	struct rb_ping_send send[RB_PING_SENDS];
	uint16_t free_send[RB_PING_SENDS];
	int nfree;
	struct rb_ping_peer *peer; /* RB_PING_PEERS */
	int dying;
	struct rb_ping_job *job[RB_PING_JOBS];
	int top; /* above the last place in use */
	uint16_t generation;
	struct rb_ping_bucket bucket; /* of all answers */

	double ns_per_tick;
	int schedstat;      /* -1: not told */
	uint64_t waited_ns; /* this thread, for a CPU, ever */
	int waited_known;   /* in this turn */
	uint64_t last_ping_ns;
	int rung;               /* this turn began because something came */
	uint64_t slept_wait_ns; /* waited_ns before that sleep */

	struct rb_ping_totals totals;
	/* Why the thread ended by itself. */
	int err;
	enum rb_call call;
	int wc_status;
	uint32_t wc_vendor_err;
};

struct rb_ping_attr {
	uint8_t port;
	int pkey_index;
	uint32_t qkey;
	uint64_t spin_ns;
	double rate, burst; /* answers per second, to all */
};

int rb_ping_new(struct rb_dev *d, const struct rb_ping_attr *a, struct rb_ping **out, struct rb_setup_error *why);
/* Serves until stopped, or until the device fails: then err or wc_status say how. Call it once, on a thread of its own. */
void rb_ping_serve(struct rb_ping *p);
void rb_ping_stop(struct rb_ping *p);
/* After rb_ping_serve has returned. */
int rb_ping_free(struct rb_ping *p);

static inline uint32_t rb_ping_qpn(const struct rb_ping *p) { return p->qp->qp_num; }

/* Takes in a peer. nonce 0: it is to be answered, at up to rate a second; a nonce is made out of `random` and returned. */
int rb_ping_add(struct rb_ping *p, const struct rb_ping_path *path, uint64_t *nonce, uint64_t random, double rate, double burst, int *id);
void rb_ping_remove(struct rb_ping *p, int id);

struct rb_ping_job *rb_ping_job_new(uint32_t count);
static inline struct rb_ping_shot *rb_ping_shots(struct rb_ping_job *j) { return j->shot; }
static inline int rb_ping_job_done(struct rb_ping_job *j) { return atomic_load(&j->done); }
/* The job is the thread's from here until it is done or cancelled. */
int rb_ping_start(struct rb_ping *p, struct rb_ping_job *j);
void rb_ping_cancel(struct rb_ping *p, struct rb_ping_job *j);
void rb_ping_busy(struct rb_ping *p, int by);
void rb_ping_totals(struct rb_ping *p, struct rb_ping_totals *out, int *hardware);

/* Between the two files. */
void rb_ping_wake(struct rb_ping *p);
int rb_ping_post_recv(struct rb_ping *p, int slot);
void rb_ping_release(struct rb_ping *p, int id); /* a dying peer with nothing under way */
static inline struct rb_ping_header *rb_ping_tx(const struct rb_ping *p, int slot)
{
	return (struct rb_ping_header *)(p->buf + (size_t)slot * RB_PING_HEADER);
}
enum { RB_PING_SLOT = 128 }; /* of a receive: the GRH's 40 bytes and a header */
static inline uint8_t *rb_ping_rx(const struct rb_ping *p, int slot)
{
	return p->buf + (size_t)RB_PING_SENDS * RB_PING_HEADER + (size_t)slot * RB_PING_SLOT;
}
static inline uint8_t *rb_ping_rest(const struct rb_ping *p) { return rb_ping_rx(p, RB_PING_RECVS); }

#endif
