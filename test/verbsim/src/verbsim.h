/* verbsim: RDMA devices sim0, sim1, ... in user space, for unmodified programs under LD_PRELOAD. See ../README.md.
 *
 * A process that opens a device gets a home: one sparse file on tmpfs, mapped by its peers. It holds the records and
 * rings below at HOME_OFFSET, and each registered page at the offset that is its own virtual address. So a number (QPN,
 * memory key) leads to a record by arithmetic, and memory regions may overlap as they like.
 * A sender does all the work of a transfer: it copies into the peer's pages, takes the receive and pushes the peer's
 * completion. Whatever can't be done at once waits in the sender's queue.
 *
 *   fabric.c  homes, peers, shared locks       heap.c    rings              keeper.c   the provider's thread
 *   memory.c  memory regions                   cq.c      completions and their events
 *   qp.c      queue pairs and their states     send.c    posting, waiting   execute.c  what a work request does
 *   null.c    the data path of VERBSIM=null    knobs.c   the environment
 *   device.c  devices, ports, GIDs, address handles, protection domains, and what is not supported
 *
 * Lock order: send queue > receive queue > completion queue (consumer's, then producer's). */
#ifndef VERBSIM_H
#define VERBSIM_H

#pragma GCC visibility push(default)
#include <infiniband/verbs.h>
#pragma GCC visibility pop
#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#include <linux/futex.h>
#include <stdalign.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
	MAX_SLOT = 1024,      /* homes of a fabric; slot 0 is not used */
	MAX_QP = 1 << 14,     /* of a home, as the next two */
	MAX_CQ = 1 << 14,
	MAX_MR = 1 << 16,
	MAX_WR = 1 << 15,     /* of a queue */
	MAX_CQE = 1 << 22,
	MAX_SGE = 16,
	MAX_INLINE = 1024,
	MAX_RD_ATOMIC = 16,
	MAX_DEVICE = 64,
	GIDS = 2,             /* link-local; IPv4-mapped */
	MTU = 4096,
	GRH_BYTES = 40,
	PAGE = 4096,
	RETRY_NS = 500000,    /* between attempts of what waits, while the program sleeps */
};
#define MAX_MESSAGE (UINT32_C(1) << 31)
#define HOME_OFFSET ((uint64_t)1 << 47) /* user addresses end here */
#define HEAP_BYTES ((uint64_t)1 << 34)
#define MAGIC UINT32_C(0x76736d31)

#define load(p) __atomic_load_n(p, __ATOMIC_ACQUIRE)
#define peek(p) __atomic_load_n(p, __ATOMIC_RELAXED)
#define store(p, v) __atomic_store_n(p, v, __ATOMIC_RELEASE)
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

static inline void cpu_relax(void)
{
#if defined __x86_64__
	__builtin_ia32_pause();
#elif defined __aarch64__
	__asm__ volatile("yield");
#endif
}

/* ---- in shared memory ---- */

/* A memory region. */
struct mr_rec {
	alignas(64) uint32_t key; /* lkey and rkey: index << 16 | tag; 0: none here */
	uint32_t pd, access;
	uint64_t iova, addr, len; /* addr: the owner's virtual address, and the offset in its file */
};

/* The public part of a queue pair. */
struct qp_rec {
	alignas(64) uint32_t type;            /* enum ibv_qp_type; 0: none here */
	uint32_t state;                       /* enum ibv_qp_state */
	uint32_t epoch;                       /* changes on creation, RTR, RESET and destruction */
	uint32_t pd, access, qkey, dest, rq_psn, min_rnr, rd_atom, mtu, dev, recv_cq;
	uint32_t rq_ring, rq_mask, rq_stride; /* ring: page of the heap */
	alignas(64) uint32_t rq_lock, rq_head; /* held, written by who takes receives */
	alignas(64) uint32_t rq_tail;          /* written by the owner */
	alignas(64) uint32_t sq_done;          /* work requests whose slot is free again */
};

struct rqe {
	uint64_t wr_id;
	uint32_t nsge, pad;
	struct ibv_sge sge[];
};

struct cqe {
	alignas(64) struct ibv_wc wc;
	uint32_t turn;    /* position + 1 in the endless sequence of completions: tells a new entry from an old one */
	uint32_t sq_done; /* for qp_rec.sq_done */
	uint32_t is_send;
};

struct cq_rec {
	alignas(64) uint32_t ring, mask, cap, chan, generation; /* chan: completion channel; 0: none */
	alignas(64) uint32_t lock, tail, head_seen, armed, broken; /* producers'; armed: 1 any, 2 solicited */
	alignas(64) uint32_t head; /* the consumer's */
};

struct home {
	uint32_t magic, slot;
	/* A robust futex of the keeper thread: the kernel sets FUTEX_OWNER_DIED however the process ends. */
	struct robust_list robust;
	uint32_t life;
	uint32_t locker; /* by which this process holds shared locks: its slot, and what tells it from others that lived there */
	struct qp_rec qp[MAX_QP];
	struct cq_rec cq[MAX_CQ];
	struct mr_rec mr[MAX_MR];
	alignas(PAGE) uint8_t heap[HEAP_BYTES];
};

static inline void *ring_at(struct home *h, uint32_t page) { return h->heap + (uint64_t)page * PAGE; }
static inline uint32_t qpn_slot(uint32_t qpn) { return qpn >> 14; }
static inline uint32_t qpn_index(uint32_t qpn) { return qpn & (MAX_QP - 1); }

/* ---- knobs.c ---- */

struct knobs {
	bool null_mode;
	unsigned devices;              /* how many; their numbers: */
	int device[MAX_DEVICE];
	uint64_t delay_ns;
	double gbps;                   /* 0: not paced */
	uint32_t error_every, drop_every, enomem_every; /* 0: never */
	bool short_poll, no_rc;
};
extern struct knobs knobs;

int knobs_load(void); /* 0, or EINVAL after a message */

/* Every Nth of a process. */
static inline bool nth(uint32_t *count, uint32_t every)
{
	return unlikely(every) && __atomic_add_fetch(count, 1, __ATOMIC_RELAXED) % every == 0;
}

void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
uint64_t now_ns(void);

/* ---- fabric.c ---- */

struct window { /* a peer's memory region as mapped here; replaced, never changed */
	uint32_t key;
	uint8_t *base; /* where mr_rec.addr is */
	void *map;
	size_t map_len;
	uint64_t retired_ns;
	struct window *next;
};

struct peer {
	struct home *home;
	int fd;
	int refs;
	struct window *win[MAX_MR];
};

extern struct home *home; /* ours; NULL before start */
extern int home_fd;

int fabric_start(void); /* makes our home; 0 or an errno */
struct peer *peer_get(uint32_t slot); /* NULL: nobody lives there */
void peer_put(struct peer *p);
int channel_fifo(uint32_t slot, uint32_t chan, char *path, size_t len); /* its name; as snprintf */
static inline bool home_dead(const struct home *h) { return !(load(&h->life) & FUTEX_TID_MASK); }

/* ---- keeper.c ---- */

int keeper_start(void);        /* 0 or an errno; home lives from then on */
void keeper_wake(uint64_t at); /* something waits in a send queue, and is to be looked at then */
void keeper_after_fork(void);  /* in the child: forgets what is its parent's, as the others of this name */

/* ---- heap.c ---- */

int ring_alloc(size_t bytes, uint32_t *page); /* zeroed; 0 or ENOMEM */
void ring_free(size_t bytes, uint32_t page);
void heap_after_fork(void);

/* ---- spinlocks; the rest of them is in fabric.c ---- */

/* A shared one names the process that holds it, so that it can be taken over from a dead one. */
void shared_lock_slow(uint32_t *l);
void local_lock_slow(uint32_t *l);

static inline void shared_lock(uint32_t *l)
{
	uint32_t free_ = 0;

	if (unlikely(!__atomic_compare_exchange_n(l, &free_, home->locker, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)))
		shared_lock_slow(l);
}
static inline void shared_unlock(uint32_t *l) { store(l, 0); }
static inline bool local_trylock(uint32_t *l) { return !__atomic_exchange_n(l, 1, __ATOMIC_ACQUIRE); }
static inline void local_lock(uint32_t *l)
{
	if (unlikely(!local_trylock(l)))
		local_lock_slow(l);
}
static inline void local_unlock(uint32_t *l) { store(l, 0); }

/* ---- memory.c ---- */

struct window *window_open(struct peer *p, uint32_t key); /* slow path of remote_memory */
void windows_close(struct peer *p);
void memory_after_fork(void);

static inline bool in_region(const struct mr_rec *m, uint64_t addr, uint64_t len)
{
	return addr >= m->iova && len <= m->len && addr - m->iova <= m->len - len;
}

/* Our own memory under a key, or NULL if the key doesn't allow it. */
static inline uint8_t *local_memory(uint32_t pd, uint32_t key, uint64_t addr, uint64_t len, uint32_t access)
{
	const struct mr_rec *m = &home->mr[key >> 16];

	if (unlikely(!key || load(&m->key) != key || m->pd != pd || (m->access & access) != access || !in_region(m, addr, len)))
		return NULL;
	return (uint8_t *)(uintptr_t)(m->addr + (addr - m->iova));
}

/* The same of a peer, in a window of ours. */
static inline uint8_t *remote_memory(struct peer *p, uint32_t pd, uint32_t key, uint64_t addr, uint64_t len, uint32_t access)
{
	const struct mr_rec *m = &p->home->mr[key >> 16];
	struct window *w = load(&p->win[key >> 16]);

	if (unlikely(!key || load(&m->key) != key || m->pd != pd || (m->access & access) != access || !in_region(m, addr, len)))
		return NULL;
	if (unlikely(!w || w->key != key) && !(w = window_open(p, key)))
		return NULL;
	addr -= m->iova;
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	return likely(peek(&m->key) == key) ? w->base + addr : NULL; /* else what was read may be of the record's next user */
}

/* ---- cq.c ---- */

/* What is needed to push a completion, to a CQ of our own or a peer's. */
struct cq_view {
	struct cq_rec *rec;
	struct cqe *ring;
	struct home *home;
	int event_fd; /* -1: not opened yet */
};

struct null_cqe {
	uint64_t wr_id;
	uint32_t qpn, opcode;
};

struct cq {
	struct ibv_cq v; /* first; v.handle is the index */
	struct cq_view view;
	uint32_t lock;   /* consumers' */
	uint32_t qps;
	uint32_t events; /* got; under the table's lock */
	/* VERBSIM=null */
	struct null_cqe *null_ring;
	uint32_t null_mask, null_cap, null_head, null_tail;
};

/* False: the CQ is overrun, and broken from now on. */
bool cq_push(struct cq_view *v, const struct ibv_wc *wc, bool solicited, uint32_t is_send, uint32_t sq_done);
void cq_purge(struct cq *c, uint32_t qpn);
int cq_poll(struct ibv_cq *cq, int n, struct ibv_wc *wc);
int cq_notify(struct ibv_cq *cq, int solicited_only);
void cq_after_fork(void);

/* ---- qp.c, execute.c, send.c ---- */

/* The op of a work request is known to be supported. */
static inline enum ibv_wc_opcode wc_opcode(uint32_t op)
{
	static const uint8_t opcode[] = {
		[IBV_WR_RDMA_WRITE] = IBV_WC_RDMA_WRITE, [IBV_WR_RDMA_WRITE_WITH_IMM] = IBV_WC_RDMA_WRITE, [IBV_WR_SEND] = IBV_WC_SEND,
		[IBV_WR_SEND_WITH_IMM] = IBV_WC_SEND, [IBV_WR_RDMA_READ] = IBV_WC_RDMA_READ,
		[IBV_WR_ATOMIC_CMP_AND_SWP] = IBV_WC_COMP_SWAP, [IBV_WR_ATOMIC_FETCH_AND_ADD] = IBV_WC_FETCH_ADD, [7] = 0,
	};

	return opcode[op & 7];
}

/* The way to a QP of a peer, found when first needed. */
struct link {
	struct peer *peer;
	struct qp_rec *qp;
	uint32_t qpn, epoch;
	bool broken;      /* a connection, once up, is not found again */
	uint32_t max_len; /* longer messages have packets that this peer, with another MTU, refuses */
	uint8_t *rq;
	struct cq_view recv_cq;
};

enum { UD_LINKS = 16 };

struct qp {
	struct ibv_qp v; /* first */
	struct qp_rec *rec;
	uint32_t sq_lock, rq_plock;
	unsigned signal_all; /* IBV_SEND_SIGNALED or 0 */
	uint32_t posted; /* work requests ever */
	struct ibv_qp_cap cap;
	uint8_t *rq;
	struct ibv_qp_attr attr;
	int dest_dev;      /* whose GID the path leads to */
	struct link *link; /* one, or UD_LINKS */
	/* Work requests that wait, in order. */
	uint8_t *waiting;
	size_t wait_stride;
	uint32_t wait_mask, wait_head, wait_tail;
	struct qp *next_waiter;
	bool is_waiter;
};

struct ah {
	struct ibv_ah v; /* first */
	struct ibv_ah_attr attr;
	int source, dest; /* numbers of our device and the peer's; dest -1: nobody's address */
};

/* Runs a work request: a status of enum ibv_wc_status, or that it must wait, for: */
enum { WAIT_RECEIVE = -1, WAIT_PEER = -2 };
int execute(struct qp *q, const struct ibv_send_wr *wr, uint32_t *byte_len);
int check_op(const struct qp *q, const struct ibv_send_wr *wr); /* 0 or EINVAL */
void flush_receives(struct qp_rec *r, uint8_t *rq, struct cq_view *cq, uint32_t qpn);
void link_drop(struct link *l);

int qp_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int qp_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
void qp_fail(struct qp *q);    /* to ERR: all that is queued is flushed; sq_lock is held */
void qp_forget(struct qp *q);  /* drops what waits to be sent, and the links; sq_lock is held */
void qp_unwait(struct qp *q);  /* before its destruction */
extern uint32_t waiters;       /* QPs with work requests that wait */
uint64_t progress(void);       /* runs what waits and can run; when to look again at the latest */
extern uint32_t progress_count; /* how often that was done */
void send_after_fork(void);

/* ---- null.c ---- */

int null_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int null_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int null_poll(struct ibv_cq *cq, int n, struct ibv_wc *wc);
int null_notify(struct ibv_cq *cq, int solicited_only);

/* ---- device.c ---- */

struct ctx {
	struct ibv_context v; /* first */
	int device;           /* its number */
	int async_write;
};

struct pd {
	struct ibv_pd v;
	uint32_t children;
};

void device_gid(int device, int index, union ibv_gid *gid);
int gid_device(const union ibv_gid *gid); /* -1: none of ours */
void async_event(struct ibv_context *c, struct ibv_async_event *e);

#endif
