/* What the loops share: the watch that ends them, work request chains, completions, latency samples. */
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
};

static inline uint64_t rb_watch_ns(const struct rb_watch *w)
{
	return w->start_ns + (uint64_t)((double)(rb_ticks() - w->start_ticks) * w->ns_per_tick);
}

int rb_watch_look(struct rb_watch *w, int idle);

/* After an empty poll. */
static inline int rb_idle(struct rb_watch *w)
{
	if (__builtin_expect(++w->spins % RB_LOOK_EVERY, 1))
		return 0;
	return rb_watch_look(w, 1);
}

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
/* Keeps the first completion in error; flushes that follow are counted apart. */
void rb_wc_error(struct rb_run *r, const struct ibv_wc *wc);
void rb_verb_error(struct rb_run *r, enum rb_call call, int err);

/* A chain of n linked work requests of QP qp, the last one signaled if asked. wr and sge have n elements. */
void rb_chain(const struct rb_ep *e, int qp, struct ibv_send_wr *wr, struct ibv_sge *sge, int n, uint64_t size, int signaled);

/* Where the next receive of QP qp lands: any message of the session fits. */
struct ibv_sge rb_receive_sge(struct rb_ep *e, int qp);

/* Latency samples: ticks into the endpoint's scratch, and from there into the histogram when it is full. */
void rb_samples_flush(struct rb_ep *e, struct rb_run *r, uint64_t n);

static inline unsigned rb_hist_index(uint64_t v)
{
	unsigned bucket = 64u - (unsigned)__builtin_clzll(v | (RB_HIST_SUB - 1)) - 11u;

	return ((bucket + 1) << RB_HIST_HALF_BITS) + (unsigned)(v >> bucket) - RB_HIST_SUB / 2;
}

#endif
