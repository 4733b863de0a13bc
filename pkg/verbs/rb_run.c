#define _GNU_SOURCE /* RUSAGE_THREAD */
#include "rb_memory.h"
#include "rb_run.h"

#include <arpa/inet.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

/* ---- control ---- */

struct rb_ctl *rb_ctl_new(void)
{
	struct rb_ctl *c = aligned_alloc(64, sizeof *c);

	if (c) {
		memset(c, 0, sizeof *c);
		atomic_store(&c->expect, UINT64_MAX);
	}
	return c;
}

void rb_ctl_free(struct rb_ctl *c) { free(c); }
void rb_ctl_stop(struct rb_ctl *c) { atomic_store(&c->stop, 1); }
void rb_ctl_expect(struct rb_ctl *c, uint64_t n) { atomic_store(&c->expect, n); }
void rb_ctl_mark(struct rb_ctl *c) { atomic_fetch_add(&c->marks, 1); }

uint64_t rb_ctl_done(struct rb_ctl *c)
{
	uint64_t n = 0;

	for (int i = 0; i < RB_MAX_LANES; i++)
		n += atomic_load_explicit(&c->lane[i].done, memory_order_relaxed);
	return n;
}

/* ---- watch ---- */

/* What was lost won't come: after the sender's count is known, silence for so long ends a receiver. */
static const uint64_t grace_ns = 200000000;

int rb_watch_look(struct rb_watch *w, int idle)
{
	struct rb_run *r = w->r;
	uint64_t now = rb_watch_ns(w), expect;

	if (atomic_load_explicit(&w->ctl->stop, memory_order_relaxed)) {
		r->end = RB_END_STOPPED;
		return 1;
	}
	if (now >= r->deadline_ns) {
		r->end = RB_END_DEADLINE;
		return 1;
	}
	if (!idle)
		return 0;
	if (!w->idle_since)
		w->idle_since = now;
	else if (r->stall_ns && now - w->idle_since >= r->stall_ns) {
		r->end = RB_END_STALLED;
		return 1;
	}
	if (r->responds) {
		expect = atomic_load_explicit(&w->ctl->expect, memory_order_relaxed);
		if (expect != UINT64_MAX && (rb_ctl_done(w->ctl) >= expect || now - w->idle_since > grace_ns))
			return 1;
	}
	/* On a software device the packets are moved by this very CPU. */
	if (r->yield_ns && now - w->idle_since >= r->yield_ns)
		sched_yield();
	return 0;
}

/* Waits for a completion event, for 20 ms at most: a stop must be seen. The CQs are armed first and polled once more before
 * the wait: what completed in between raises no event. */
int rb_watch_wait(struct rb_watch *w)
{
	struct pollfd fd = { .fd = w->chan->fd, .events = POLLIN };
	struct ibv_cq *cq;
	void *ctx;

	w->spins = 0;
	if (!w->armed) {
		for (int i = 0; i < w->cqs; i++)
			ibv_req_notify_cq(w->cq[i], 0);
		w->armed = 1;
		return rb_watch_look(w, 1);
	}
	if (poll(&fd, 1, 20) > 0)
		while (ibv_get_cq_event(w->chan, &cq, &ctx) == 0) {
			ibv_ack_cq_events(cq, 1);
			w->armed = 0;
		}
	return rb_watch_look(w, 1);
}

void rb_watch_cqs(struct rb_watch *w, const struct rb_ep *e, int receives)
{
	const struct rb_lane *l = &e->lane[w->r->lane];

	w->chan = receives ? l->rchan : l->schan;
	w->cq = (receives ? e->rcq : e->scq) + l->cq;
	w->cqs = l->cqs;
	w->armed = 0;
}

static uint64_t thread_cpu_ns(void) { return rb_clock_ns(CLOCK_THREAD_CPUTIME_ID); }

uint64_t rb_preemptions(void)
{
	struct rusage u;

	return getrusage(RUSAGE_THREAD, &u) ? 0 : (uint64_t)u.ru_nivcsw;
}

void rb_start(struct rb_run *r, struct rb_watch *w, struct rb_ctl *ctl)
{
	*w = (struct rb_watch){ .r = r, .ctl = ctl, .ns_per_tick = rb_clock_ns_per_tick() };
	atomic_store_explicit(&ctl->lane[r->lane].done, 0, memory_order_relaxed);
	r->end = RB_END_DONE;
	r->preempted = rb_preemptions();
	r->cpu_ns = thread_cpu_ns();
	r->start_ns = w->start_ns = rb_now_ns();
	w->start_ticks = rb_ticks();
}

void rb_finish(struct rb_run *r)
{
	r->end_ns = rb_now_ns();
	r->cpu_ns = thread_cpu_ns() - r->cpu_ns;
	r->preempted = rb_preemptions() - r->preempted;
}

/* ---- what went wrong ---- */

void rb_wc_error(struct rb_run *r, const struct ibv_wc *wc)
{
	if (wc->status == IBV_WC_WR_FLUSH_ERR && r->end == RB_END_WC) {
		r->flushed++;
		return;
	}
	if (r->end == RB_END_WC && r->wc_status != IBV_WC_WR_FLUSH_ERR)
		return;
	r->end = RB_END_WC;
	r->wc_status = wc->status;
	r->wc_vendor_err = wc->vendor_err;
}

void rb_verb_error(struct rb_run *r, enum rb_call call, int err)
{
	if (r->end == RB_END_WC)
		return;
	r->end = RB_END_ERRNO;
	r->call = call;
	r->err = err;
}

void rb_corrupt(struct rb_run *r, int qp, uint64_t message, uint64_t at, uint64_t want, uint64_t got)
{
	if (r->end != RB_END_DONE)
		return;
	r->end = RB_END_CORRUPT;
	r->bad_qp = qp;
	r->bad_message = message;
	r->bad_at = at;
	r->bad_want = want;
	r->bad_got = got;
}

/* ---- work requests ---- */

static enum ibv_wr_opcode opcode(const struct rb_ep *e)
{
	switch (e->a.op) {
	case RB_WRITE: return IBV_WR_RDMA_WRITE;
	case RB_WRITE_IMM: return IBV_WR_RDMA_WRITE_WITH_IMM;
	case RB_READ: return IBV_WR_RDMA_READ;
	case RB_FETCH_ADD: return IBV_WR_ATOMIC_FETCH_AND_ADD;
	case RB_CMP_SWAP: return IBV_WR_ATOMIC_CMP_AND_SWP;
	/* Messages that may be lost carry a number, so that what arrives late or twice is known. */
	default: return e->a.transport == RB_RC ? IBV_WR_SEND : IBV_WR_SEND_WITH_IMM;
	}
}

/* A read lands where a write from the peer would. What an atomic fetched lands in the send half: the receive half is what the
 * peer's atomics work on. */
uint8_t *rb_local_buf(const struct rb_ep *e, int qp) { return e->a.op == RB_READ ? rb_rx_buf(e, qp) : rb_tx_buf(e, qp); }

uint64_t rb_remote_buf(const struct rb_ep *e, int qp)
{
	return e->c.addr + (uint64_t)(2 * qp + (e->a.op == RB_READ ? 0 : 1)) * e->c.stride;
}

void rb_chain(const struct rb_ep *e, int qp, struct ibv_send_wr *wr, struct ibv_sge *sge, int n, uint64_t size, int signaled)
{
	int takes = e->a.op != RB_READ && !rb_is_atomic(e) && !e->a.mixed;
	unsigned flags = takes && size <= (uint64_t)e->inline_max ? IBV_SEND_INLINE : 0;

	for (int i = 0; i < n; i++) {
		memset(&wr[i], 0, sizeof wr[i]);
		sge[i] = (struct ibv_sge){ .addr = (uintptr_t)rb_local_buf(e, qp), .length = (uint32_t)size, .lkey = e->mr->lkey };
		wr[i].wr_id = (uint64_t)qp;
		wr[i].next = i + 1 < n ? &wr[i + 1] : NULL;
		wr[i].sg_list = &sge[i];
		wr[i].num_sge = 1;
		wr[i].opcode = opcode(e);
		wr[i].send_flags = flags | (signaled && i + 1 == n ? IBV_SEND_SIGNALED : 0);
		if (e->a.transport == RB_UD) {
			wr[i].wr.ud.ah = e->ah;
			wr[i].wr.ud.remote_qpn = e->remote_qpn[qp];
			wr[i].wr.ud.remote_qkey = e->c.qkey;
		} else if (rb_is_atomic(e)) {
			wr[i].wr.atomic.remote_addr = rb_remote_buf(e, qp);
			wr[i].wr.atomic.rkey = e->c.rkey;
			wr[i].wr.atomic.compare_add = 1;
		} else {
			wr[i].wr.rdma.remote_addr = rb_remote_buf(e, qp);
			wr[i].wr.rdma.rkey = e->c.rkey;
		}
	}
}

static size_t grh(const struct rb_ep *e) { return e->a.transport == RB_UD ? RB_GRH_BYTES : 0; }

uint8_t *rb_receive_buf(const struct rb_ep *e, int qp, uint64_t n)
{
	return rb_rx_buf(e, qp) + n % e->rx_ring.slots * e->rx_ring.step + grh(e);
}

int rb_post_receives(struct rb_ep *e, int qp, int n)
{
	struct ibv_recv_wr wr[RB_RX_BATCH], *bad;
	struct ibv_sge sge[RB_RX_BATCH];
	struct rb_qp_state *st = &e->state[qp];
	int err;

	for (int i = 0; i < n; i++) {
		sge[i] = (struct ibv_sge){
			.addr = (uintptr_t)rb_receive_buf(e, qp, st->rx_slot + (uint64_t)i) - grh(e), .length = (uint32_t)(e->a.msg_max + grh(e)),
			.lkey = e->mr->lkey,
		};
		wr[i] = (struct ibv_recv_wr){ .wr_id = (uint64_t)qp, .sg_list = &sge[i], .num_sge = 1, .next = i + 1 < n ? &wr[i + 1] : NULL };
	}
	err = ibv_post_recv(e->qp[qp], wr, &bad);
	if (err)
		return err > 0 ? err : -err;
	st->rx_slot += (uint64_t)n;
	st->rx_posted += n;
	return 0;
}

int rb_arm(struct rb_ep *e, uint64_t size, int verify)
{
	e->ring = rb_ring_of(e, size);
	e->rx_ring = rb_ring_of(e, e->a.msg_max);
	for (int q = 0; q < e->qps; q++) {
		struct rb_qp_state *st = &e->state[q];

		if (verify && !rb_is_atomic(e))
			for (uint64_t s = 0; s < e->ring.slots; s++) {
				memset(rb_rx_buf(e, q) + s * e->ring.step, 0xff, 8);
				rb_pattern_fill(rb_tx_buf(e, q) + s * e->ring.step, size, q, s);
			}
		while (st->rx_posted < e->a.rx_depth) {
			int left = e->a.rx_depth - st->rx_posted, err = rb_post_receives(e, q, left < RB_RX_BATCH ? left : RB_RX_BATCH);

			if (err)
				return -err;
		}
	}
	/* Whatever another size left there is not the next sequence of the memory ping-pong. Nobody polls a GPU's memory. */
	if (e->mem.kind != RB_MEM_GPU)
		rb_rx_buf(e, 0)[size - 1] = e->seq;
	return 0;
}

/* ---- rates ---- */

struct rb_stamps rb_stamps_for(const struct rb_run *r, const struct rb_ctl *ctl, uint64_t most)
{
	uint64_t every = (8 << 20) / r->size;

	if (every > most)
		every = most;
	return (struct rb_stamps){
		.every = every ? every : 1, .idle = 1, .point_every = r->interval_ns,
		.marks = atomic_load_explicit(&ctl->marks, memory_order_relaxed),
	};
}

static void add_point(struct rb_run *r, struct rb_stamps *s, uint64_t now, uint64_t done)
{
	if (r->series_n == r->series_cap) { /* half of them will do, twice as far apart */
		r->series_n /= 2;
		for (int i = 0; i < r->series_n; i++)
			r->series[i] = r->series[2 * i];
		s->point_every *= 2;
	}
	r->series[r->series_n++] = (struct rb_point){ now, done };
	s->point_ns = now;
}

void rb_stamp(const struct rb_watch *w, struct rb_stamps *s, uint64_t done)
{
	struct rb_run *r = w->r;
	struct rb_ctl *ctl = w->ctl;
	uint64_t now = rb_watch_ns(w);
	uint32_t marks = atomic_load_explicit(&ctl->marks, memory_order_relaxed);

	atomic_store_explicit(&ctl->lane[r->lane].done, done, memory_order_relaxed);
	if (marks != s->marks) {
		s->marks = marks;
		r->first_ns = 0;
		r->min_rate = r->max_rate = 0;
		r->series_n = 0;
		s->point_every = r->interval_ns;
	}
	if (!r->first_ns) {
		r->first_ns = s->int_ns = now;
		r->first_done = s->int_done = done;
		if (r->series_cap)
			add_point(r, s, now, done);
	} else if (now - s->int_ns >= r->interval_ns) {
		double rate = (double)(done - s->int_done) * 1e9 / (double)(now - s->int_ns);

		if (r->min_rate == 0 || rate < r->min_rate)
			r->min_rate = rate;
		if (rate > r->max_rate)
			r->max_rate = rate;
		s->int_ns = now;
		s->int_done = done;
		if (r->series_cap && now - s->point_ns >= s->point_every)
			add_point(r, s, now, done);
	}
	r->last_ns = now;
	r->last_done = done;
}

/* ---- latency samples ---- */

void rb_samples_flush(struct rb_ep *e, struct rb_run *r, uint64_t n)
{
	double k = rb_clock_ns_per_tick() * r->scale;

	for (uint64_t i = 0; i < n; i++) {
		double x = (double)e->samples[i] * k, d;
		uint64_t ns = (uint64_t)(x + 0.5);

		if (r->lat_n == 0 || ns < r->lat_min)
			r->lat_min = ns;
		if (ns > r->lat_max)
			r->lat_max = ns;
		r->lat_n++;
		d = x - r->lat_mean;
		r->lat_mean += d / (double)r->lat_n;
		r->lat_m2 += d * (x - r->lat_mean);
		r->hist[rb_hist_index(ns < RB_HIST_HIGHEST ? ns : RB_HIST_HIGHEST)]++;
		if (r->raw_n < r->raw_cap)
			r->raw[r->raw_n++] = ns;
	}
}
