/* The C side of package verbs: control path in rb_device.c, rb_endpoint.c and rb_memory.c, data path in rb_run_*.c.
 *
 * Conventions: every function returns 0 or -errno. Sizes are bytes, times nanoseconds unless a name says
 * ticks. Objects that outlive a call are allocated here, never in Go memory. */
#ifndef RB_H
#define RB_H

#include <infiniband/verbs.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* ---- devices ---- */

struct rb_dev_info {
	char name[IBV_SYSFS_NAME_MAX];
	uint64_t id;        /* of this registration of the device; 0: not known */
	uint64_t node_guid; /* host order */
	int node_type;      /* enum ibv_node_type */
	int transport;      /* enum ibv_transport_type */
};

struct rb_caps {
	int max_qp, max_qp_wr, max_cq, max_cqe, max_sge;
	int max_rd_atom, max_init_rd_atom; /* as responder, as requester */
	int atomic_cap;                    /* enum ibv_atomic_cap */
	int ports;
	uint64_t max_mr_size;
	char fw_ver[64];
};

struct rb_port {
	int state, phys_state; /* enum ibv_port_state; IB spec PortPhysicalState */
	int link_layer;        /* IBV_LINK_LAYER_* */
	int active_mtu, max_mtu; /* bytes */
	int gid_len, pkey_len;
	int grh_required;
	uint32_t max_msg;
	uint16_t lid, sm_lid;
	double rate; /* Gb/s of the encoded link; 0: unknown */
};

enum { RB_GID_IB = 0, RB_GID_ROCE_V1 = 1, RB_GID_ROCE_V2 = 2, RB_GID_UNKNOWN = 3 };

struct rb_gid {
	uint8_t raw[16];
	int index, type;
	uint32_t ifindex; /* 0: none or not told */
};

struct rb_dev;

int rb_list(struct rb_dev_info *out, int cap, int *n);
int rb_open(const char *name, struct rb_dev **out);
int rb_close(struct rb_dev *d);
int rb_query_caps(struct rb_dev *d, struct rb_caps *out);
int rb_query_port(struct rb_dev *d, int port, struct rb_port *out);
/* Fills at most cap non-zero entries, in index order. */
int rb_query_gids(struct rb_dev *d, int port, struct rb_gid *out, int cap, int *n);
int rb_query_pkey(struct rb_dev *d, int port, int index, uint16_t *out);

/* ---- events ---- */

struct rb_event {
	int type; /* enum ibv_event_type */
	int port; /* 0: of the device, or of one of its objects */
};

struct ibv_context *rb_dev_context(struct rb_dev *d);
/* Makes the queue of asynchronous events non-blocking and returns a descriptor of its own to poll, or -errno. */
int rb_event_fd(struct rb_dev *d);
/* Takes one event off the queue and acknowledges it. -EAGAIN: there is none. */
int rb_event_get(struct rb_dev *d, struct rb_event *out);

/* ---- endpoints ---- */

enum rb_transport { RB_RC, RB_UC, RB_UD };
enum rb_op { RB_WRITE, RB_READ, RB_SEND, RB_WRITE_IMM, RB_FETCH_ADD, RB_CMP_SWAP };

/* What a QP remembers from one run to the next. */
struct rb_qp_state {
	int cq;            /* index of its send and its receive CQ */
	int rx_posted;     /* receives waiting */
	uint64_t rx_slot;  /* receives posted since creation: the next one's slot, modulo slots */
	uint64_t rx_done;  /* and completed */
	uint64_t sent;     /* messages since creation: the next one's number */
	uint64_t atomics;  /* operations since creation: what the peer's counter holds */
};

/* Where a setup step failed, for the message. */
enum rb_step {
	RB_STEP_NONE, RB_STEP_BUFFER, RB_STEP_PD, RB_STEP_MR, RB_STEP_CQ, RB_STEP_QP,
	RB_STEP_INIT, RB_STEP_RTR, RB_STEP_RTS, RB_STEP_AH, RB_STEP_RECV
};

struct rb_ep_attr {
	enum rb_transport transport;
	enum rb_op op;
	int initiator;
	int both_ways; /* the peer sends or writes back: ping-pong, bidirectional, reverse */
	int mixed;     /* write, with reads among them */
	int events;    /* completions are waited for on a channel, not polled for */
	uint8_t port;
	int pkey_index;
	int qps;
	int lanes;     /* threads: each has its share of the QPs, and CQs of its own */
	int tx_depth, rx_depth;
	int cq_mod, post_list;
	int inline_max; /* wanted; what the QP got is in rb_ep */
	uint64_t msg_max;
	uint32_t qkey; /* UD */
	int max_cqe;
	int by_cm;        /* the CM moves the QPs from RESET on */
	int iwarp;        /* found by rb_ep_create: there the data of a read is written to us */
	uint64_t samples; /* ticks kept before they go into the histogram; 0: no latency here */
	/* memory */
	uint64_t ring;  /* bytes that successive messages walk through, over all QPs; 0: each QP stays in one place */
	uint64_t slots; /* of a ring that it walks at most; 0: as many as fit */
	int huge_pages;
	int numa_node;  /* to prefer; negative: any */
	int relaxed;    /* relaxed ordering is wanted */
	int gpu;        /* CUDA's number of the GPU whose memory it is to be; negative: this host's */
};

enum rb_mem_kind { RB_MEM_PAGES, RB_MEM_TRANSPARENT, RB_MEM_HUGE, RB_MEM_GPU };

/* What an endpoint's buffer turned out to be. */
struct rb_mem {
	enum rb_mem_kind kind;
	int node;    /* of its first page; -1: not known */
	int relaxed; /* registered with relaxed ordering */
	void *map;   /* of this host, with map_len */
	size_t map_len;
	void *gpu_ctx; /* of a GPU */
	unsigned long long gpu_mem;
	int gpu_device, gpu_fd;
};

/* Where the messages of a run lie in a half of the buffer: one behind the other, and from the start again. */
struct rb_ring {
	uint64_t step;  /* bytes from one to the next: a multiple of a cache line, from 4 KiB on of 4 KiB */
	uint64_t slots; /* 0 or 1: all at the same place */
};

/* One end of a connection as the other end must know it. */
struct rb_conn_attr {
	int gid_index; /* ours; -1: no GRH */
	uint8_t gid[16];
	uint16_t lid;
	int mtu; /* bytes */
	int sl, traffic_class, flow_label, hop_limit;
	int timeout, retry, rnr_retry, min_rnr_timer;
	int rd_atom, dest_rd_atom;
	uint32_t qkey;
	uint64_t addr, stride; /* remote buffer, laid out as ours */
	uint32_t rkey;
};

/* The share of one thread: QPs and CQs [first, first + n). */
struct rb_lane {
	int qp, qps, cq, cqs;
	struct ibv_comp_channel *schan, *rchan; /* NULL: polled */
};

struct rb_ep {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_ah *ah;
	struct ibv_qp **qp;
	struct ibv_cq **scq, **rcq; /* ncq of each */
	struct rb_lane *lane;       /* a.lanes */
	uint8_t *buf;
	size_t buf_len, stride; /* stride: bytes of one QP's half */
	struct rb_mem mem;
	int qps, ncq;
	int inline_max; /* granted */
	struct rb_ep_attr a;
	struct rb_conn_attr c;
	uint32_t *remote_qpn;
	/* Running state of the data path: survives from one run of a session to the next. */
	struct rb_qp_state *state; /* per QP */
	struct rb_ring ring;    /* of messages of the size that the endpoint is armed for */
	struct rb_ring rx_ring; /* of receives: any message fits */
	uint64_t *samples;   /* a.samples of scratch, touched */
	uint8_t seq;         /* of the memory ping-pong */
	uint64_t answer_max; /* ticks; longest wait for an answer so far */
};

struct rb_setup_error {
	enum rb_step step;
	int qp; /* which */
};

int rb_ep_create(struct rb_dev *d, const struct rb_ep_attr *a, struct rb_ep **out, struct rb_setup_error *why);
int rb_ep_connect(struct rb_ep *e, const struct rb_conn_attr *c, const uint32_t *qpn, const uint32_t *psn_remote,
		  const uint32_t *psn_local, struct rb_setup_error *why);
/* What the peer may do to our memory, and no more. */
unsigned rb_access_flags(const struct rb_ep_attr *a);
/* Moves every QP to ERR so that nothing more is sent or accepted. */
void rb_ep_abort(struct rb_ep *e);
/* Frees all; continues past errors and returns the first. */
int rb_ep_destroy(struct rb_ep *e);

/* Bytes of one QP's half of the buffer, and of the whole as it is allocated. */
size_t rb_mem_stride(uint64_t msg_max, uint64_t ring, int qps);
size_t rb_mem_bytes(uint64_t msg_max, uint64_t ring, int qps, int huge);

static inline uint32_t rb_ep_qpn(const struct rb_ep *e, int i) { return e->qp[i]->qp_num; }
static inline uint32_t rb_ep_rkey(const struct rb_ep *e) { return e->mr->rkey; }
/* Each QP has two halves in the buffer: [2i] it sends from, [2i+1] the peer lands in. */
static inline uint8_t *rb_tx_buf(const struct rb_ep *e, int qp) { return e->buf + (size_t)(2 * qp) * e->stride; }
static inline uint8_t *rb_rx_buf(const struct rb_ep *e, int qp) { return e->buf + (size_t)(2 * qp + 1) * e->stride; }

/* ---- runs ---- */

enum { RB_MAX_LANES = 256 };

/* Shared with the Go side while a run is under way: one for what an end sends, one for what it receives. */
struct rb_ctl {
	_Atomic uint32_t stop;   /* sticky: end as soon as seen */
	_Atomic uint32_t marks;  /* rates: begin anew, the warm-up is over; counted, so that each lane sees it once */
	_Atomic uint64_t expect; /* receiver: end after this many messages; UINT64_MAX: not known yet */
	/* Messages completed so far, by lane, each on a cache line of its own. */
	struct {
		_Alignas(64) _Atomic uint64_t done;
	} lane[RB_MAX_LANES];
};

enum rb_end {
	RB_END_DONE,     /* all iterations, or the duration is over */
	RB_END_STOPPED,  /* rb_ctl.stop */
	RB_END_DEADLINE, /* the absolute deadline passed */
	RB_END_STALLED,  /* nothing completed for stall_ns */
	RB_END_WC,       /* a work completion in error: wc_* */
	RB_END_ERRNO,    /* a verb failed: err, call */
	RB_END_CORRUPT   /* a payload or an atomic's value was not what was sent: bad_* */
};

enum rb_call { RB_CALL_NONE, RB_CALL_POST_SEND, RB_CALL_POST_RECV, RB_CALL_POLL };

/* HdrHistogram's layout for 1 ns .. 2^37 ns (137 s) at 3 significant digits: 2048 sub-buckets.
 * Larger samples are counted in the last slot; max is true. */
enum { RB_HIST_SUB = 2048, RB_HIST_HALF_BITS = 10, RB_HIST_BUCKETS = 27, RB_HIST_LEN = (RB_HIST_BUCKETS + 1) * 1024 };
#define RB_HIST_HIGHEST ((UINT64_C(1) << 37) - 1)

/* A point of the curve of messages completed over time. */
struct rb_point {
	uint64_t ns; /* CLOCK_MONOTONIC */
	uint64_t done;
};

struct rb_run {
	/* in */
	int lane;
	uint64_t size;
	uint64_t iterations;  /* per QP; 0: until duration_ns is over, or told to stop */
	uint64_t duration_ns; /* 0 without iterations: until told to stop */
	uint64_t deadline_ns; /* CLOCK_MONOTONIC, absolute; always set */
	uint64_t stall_ns;    /* 0: no stall check (a responder waits as long as it must) */
	uint64_t interval_ns; /* of min/max bandwidth */
	int responds;         /* end, as done, once rb_ctl.expect messages were answered */
	uint64_t yield_ns;    /* idle for so long, the thread yields its CPU; 0: never */
	double scale;         /* of samples: 0.5 where half the round trip is the latency */
	double rate;          /* of the source: messages per second; 0: as fast as it goes */
	int read_permille;    /* of an endpoint that is mixed: reads in 1000 messages, the others write */
	int verify;           /* payloads carry a pattern, and are checked */
	int64_t *hist;        /* RB_HIST_LEN; where latency is measured */
	uint64_t *raw;        /* raw_cap samples in order, ns; may be NULL */
	uint64_t raw_cap;
	struct rb_point *series; /* series_cap, a power of two; when full, every second point goes */
	int series_cap;

	/* out */
	enum rb_end end;
	int err;
	enum rb_call call;
	int wc_status;
	uint32_t wc_vendor_err;
	int bad_qp;              /* of RB_END_CORRUPT: which QP, message and byte, */
	uint64_t bad_message, bad_at, bad_want, bad_got; /* and what was there */
	uint64_t flushed;     /* completions flushed after the first error */
	uint64_t posted, completed, received, bytes_received;
	uint64_t lost, late;  /* ping-pong over messages that may be lost: unanswered, answered too late */
	uint64_t duplicates, reordered; /* arrivals of numbered messages; duplicates are not in received */
	uint64_t verified;    /* messages whose payload was checked */
	uint64_t enomem;      /* posts refused by a full queue and repeated */
	uint64_t start_ns, end_ns;      /* CLOCK_MONOTONIC, of the timed loop */
	uint64_t first_ns, last_ns;     /* first and last time completions were seen ... */
	uint64_t first_done, last_done; /* ... and the messages completed by then */
	double min_rate, max_rate;      /* messages per second over intervals; 0: no whole interval */
	int series_n;
	uint64_t cpu_ns;                /* this thread, over the timed loop */
	uint64_t preempted;             /* times it lost its CPU meanwhile (getrusage: ru_nivcsw) */
	uint64_t lat_n, lat_min, lat_max;
	uint64_t lat_hit;               /* samples during which the thread lost its CPU */
	double lat_mean, lat_m2;
	uint64_t raw_n;
};

/* The initiator's loops, and the responder's where the op needs one. */
void rb_run_bw_source(struct rb_ep *e, struct rb_run *r, struct rb_ctl *ctl);
void rb_run_bw_sink(struct rb_ep *e, struct rb_run *r, struct rb_ctl *ctl);
void rb_run_lat_operation(struct rb_ep *e, struct rb_run *r, struct rb_ctl *ctl);
void rb_run_lat_memory(struct rb_ep *e, struct rb_run *r, struct rb_ctl *ctl);
void rb_run_lat_message(struct rb_ep *e, struct rb_run *r, struct rb_ctl *ctl);
/* Readies an end for runs at one size, before the peer may send: receives up to rx_depth on every QP, the byte that the
 * memory ping-pong polls, and, if payloads are verified, what the peer may read. */
int rb_arm(struct rb_ep *e, uint64_t size, int verify);
/* Checks what plain writes of a verified run left in every slot; for r: end, bad_*, verified. */
void rb_verify_slots(struct rb_ep *e, struct rb_run *r);

struct rb_ctl *rb_ctl_new(void);
void rb_ctl_free(struct rb_ctl *c);
void rb_ctl_stop(struct rb_ctl *c);
void rb_ctl_expect(struct rb_ctl *c, uint64_t n);
void rb_ctl_mark(struct rb_ctl *c);
uint64_t rb_ctl_done(struct rb_ctl *c);

/* Chooses the clock of the samples: the TSC if use_tsc (and there is one), else CLOCK_MONOTONIC_RAW. */
void rb_clock_init(int use_tsc);
double rb_clock_ns_per_tick(void);
/* Relative difference between the first calibration, of at least a second, and one over all the time since. */
double rb_clock_residual(void);

#endif
