/* What the loops share: the watch that ends them, work request chains, completions, rates, latency samples, payloads. */
#ifndef RB_RUN_H
#define RB_RUN_H

#include "rb.h"
#include "rb_clock.h"

#include <errno.h>
#include <sched.h>

enum { RB_GRH_BYTES = 40, RB_POLL_BATCH = 16 };

/* An empty poll takes from 1 ns (of memory) to some 10 us (of a CQ, in an emulator), and a stop must be seen within 100 ms.
 * Seldom looks matter: in an emulator all CPUs share the lock of the one clock. */
enum { RB_LOOK_EVERY = 16384 };

/* Ends a loop on stop, deadline or stall. All turns but one in RB_LOOK_EVERY cost an increment. */
struct rb_watch {
	struct rb_run *r;
	struct rb_ctl *ctl;
	uint64_t idle_since; /* 0: not idle at the last look */
	unsigned spins, turns;
	/* CLOCK_MONOTONIC by ticks: half the price of the call, and in an emulator a tenth. */
	uint64_t start_ticks, start_ns;
	double ns_per_tick;
	/* Completion events. */
	struct ibv_comp_channel *chan; /* NULL: polled */
	struct ibv_cq **cq;
	int cqs, armed;
};

static inline uint64_t rb_watch_ns(const struct rb_watch *w)
{
	return w->start_ns + (uint64_t)((double)(rb_ticks() - w->start_ticks) * w->ns_per_tick);
}

int rb_watch_look(struct rb_watch *w, int idle);
int rb_watch_wait(struct rb_watch *w);

/* After an empty poll. */
static inline int rb_idle(struct rb_watch *w)
{
	if (__builtin_expect(++w->spins % RB_LOOK_EVERY && !w->chan, 1))
		return 0;
	return w->chan ? rb_watch_wait(w) : rb_watch_look(w, 1);
}

/* Whether the last rb_idle took a look around: time for what else is done seldom. */
static inline int rb_looked(const struct rb_watch *w) { return w->spins % RB_LOOK_EVERY == 0; }

/* After something completed. */
static inline void rb_progress(struct rb_watch *w)
{
	w->spins = 0;
	w->idle_since = 0;
}

/* In a loop that may never be idle. */
static inline int rb_busy(struct rb_watch *w)
{
	if (__builtin_expect(++w->turns & 255, 1))
		return 0;
	return rb_watch_look(w, 0);
}

void rb_start(struct rb_run *r, struct rb_watch *w, struct rb_ctl *ctl);
void rb_finish(struct rb_run *r);
/* Waits on events of the lane's send or receive CQs where the endpoint has them. */
void rb_watch_cqs(struct rb_watch *w, const struct rb_ep *e, int receives);
/* Times this thread lost its CPU against its will, since it began. */
uint64_t rb_preemptions(void);

/* Keeps the first completion in error; flushes that follow are counted apart. */
void rb_wc_error(struct rb_run *r, const struct ibv_wc *wc);
void rb_verb_error(struct rb_run *r, enum rb_call call, int err);
/* Keeps the first payload or value that was not what it should be. */
void rb_corrupt(struct rb_run *r, int qp, uint64_t message, uint64_t at, uint64_t want, uint64_t got);

static inline int rb_is_atomic(const struct rb_ep *e) { return e->a.op == RB_FETCH_ADD || e->a.op == RB_CMP_SWAP; }
static inline int rb_receives(const struct rb_ep *e) { return e->a.op == RB_SEND || e->a.op == RB_WRITE_IMM; }

/* ---- work requests ---- */

/* A chain of n linked work requests of QP qp in slot 0, the last one signaled if asked. wr and sge have n elements. */
void rb_chain(const struct rb_ep *e, int qp, struct ibv_send_wr *wr, struct ibv_sge *sge, int n, uint64_t size, int signaled);

/* Where this end's data is taken from, or lands, in slot 0; and the same of the peer. */
uint8_t *rb_local_buf(const struct rb_ep *e, int qp);
uint64_t rb_remote_buf(const struct rb_ep *e, int qp);

/* The payload of the nth receive. */
uint8_t *rb_receive_buf(const struct rb_ep *e, int qp, uint64_t n);
/* Where the peer's nth message is written to. */
static inline uint8_t *rb_written_buf(const struct rb_ep *e, int qp, uint64_t n) { return rb_rx_buf(e, qp) + n % e->ring.slots * e->ring.step; }

/* Posts n receives, at most RB_RX_BATCH, on a QP. Nonzero: it failed, and r says how. */
enum { RB_RX_BATCH = 32 };
int rb_post_receives(struct rb_ep *e, int qp, int n);

/* ---- rates ---- */

/* Stamps the clock only where it costs nothing, after an empty poll, or once in so many messages that a loop of a few
 * nanoseconds a message stays one (a stamp may take 100 ns), and so few that a loop that is never idle is looked at often
 * enough. Rates are taken between such stamps, never from the first post: the ramp-up and the backlog at the end do not count. */
struct rb_stamps {
	uint64_t int_ns, int_done;       /* where the current interval of min/max began */
	uint64_t point_ns, point_every;  /* the last point of the series, and their distance */
	uint64_t next, every;            /* messages: stamp when so many are done, and from then in so many */
	uint32_t marks;                  /* of rb_ctl, seen */
	int idle;                        /* the last poll was empty */
};

/* most: messages between two stamps, fewer if they are large. */
struct rb_stamps rb_stamps_for(const struct rb_run *r, const struct rb_ctl *ctl, uint64_t most);
void rb_stamp(const struct rb_watch *w, struct rb_stamps *s, uint64_t done);

static inline int rb_stamp_due(struct rb_stamps *s, uint64_t done)
{
	if (!s->idle && __builtin_expect(done < s->next, 1))
		return 0;
	s->idle = 0;
	s->next = done + s->every;
	return 1;
}

/* ---- latency samples ---- */

/* From the endpoint's scratch into the histogram. */
void rb_samples_flush(struct rb_ep *e, struct rb_run *r, uint64_t n);

static inline unsigned rb_hist_index(uint64_t v)
{
	unsigned bucket = 64u - (unsigned)__builtin_clzll(v | (RB_HIST_SUB - 1)) - 11u;

	return ((bucket + 1) << RB_HIST_HALF_BITS) + (unsigned)(v >> bucket) - RB_HIST_SUB / 2;
}

/* ---- payloads of verified runs ---- */

/* A message is its number on the QP (8 bytes), then words that follow from it and the QP. At least 8 bytes. */
void rb_pattern_fill(uint8_t *p, uint64_t size, int qp, uint64_t message);
/* Checks all but the last `except` bytes. Zero if it is as filled; else r says what is wrong. */
int rb_pattern_check(const uint8_t *p, uint64_t size, uint64_t except, int qp, uint64_t message, struct rb_run *r);

#endif
