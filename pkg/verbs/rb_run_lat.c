/* Latency. One stamp an iteration: a sample is the time from one post to the next, so nothing between two iterations
 * escapes it. Definitions are perftest's: one-sided ops give the whole operation, ping-pongs are scaled by one half.
 *
 * Sends are signaled once in a third of the queue: waiting for the own completion in each iteration would measure it too. */
#include "rb_run.h"

#include <string.h>

struct pinger {
	struct rb_ep *e;
	struct rb_run *r;
	struct rb_watch *w;
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	int every, until; /* one signaled send in `every` */
	int out;          /* signaled sends not yet seen completed: 0 or 1 before a post, at most 2 after */
};

static void pinger_init(struct pinger *p, struct rb_ep *e, struct rb_run *r, struct rb_watch *w)
{
	/* Unsignaled sends of the run before, plus two groups of this one, fit the queue. */
	int every = e->a.tx_depth / 3 > 0 ? e->a.tx_depth / 3 : 1;

	*p = (struct pinger){ .e = e, .r = r, .w = w, .every = every, .until = every };
	rb_chain(e, 0, &p->wr, &p->sge, 1, r->size, 0);
}

/* Looks once for send completions; nonzero ends the loop. */
static int reap(struct pinger *p)
{
	struct ibv_wc wc[RB_POLL_BATCH];
	int n = ibv_poll_cq(p->e->scq[0], RB_POLL_BATCH, wc);

	if (n < 0) {
		rb_verb_error(p->r, RB_CALL_POLL, -n);
		return 1;
	}
	for (int i = 0; i < n; i++) {
		if (wc[i].status != IBV_WC_SUCCESS)
			rb_wc_error(p->r, &wc[i]);
		else
			p->out--;
	}
	return p->r->end != RB_END_DONE;
}

/* Nonzero ends the loop. */
static inline int ping(struct pinger *p)
{
	struct ibv_send_wr *bad;
	int err;

	p->wr.send_flags &= ~(unsigned)IBV_SEND_SIGNALED;
	if (--p->until == 0) {
		/* The one before was answered long ago; its completion is there, or nearly. */
		while (p->out > 0)
			if (reap(p) || (p->out > 0 && rb_idle(p->w)))
				return 1;
		p->wr.send_flags |= IBV_SEND_SIGNALED;
		p->until = p->every;
		p->out++;
	}
	while (__builtin_expect((err = ibv_post_send(p->e->qp[0], &p->wr, &bad)) != 0, 0)) {
		if (err != ENOMEM) {
			rb_verb_error(p->r, RB_CALL_POST_SEND, err < 0 ? -err : err);
			return 1;
		}
		p->r->enomem++;
		if (reap(p) || rb_idle(p->w))
			return 1;
	}
	p->r->posted++;
	return 0;
}

/* Leaves no send of this run outstanding, so that the next one starts with an empty queue. */
static void settle(struct pinger *p)
{
	if (p->r->end != RB_END_DONE || p->r->posted == 0)
		return;
	while (p->out > 0)
		if (reap(p) || (p->out > 0 && rb_idle(p->w)))
			return;
}

struct sampler {
	uint64_t n, cap, last;
};

/* Takes a sample; a full scratch goes into the histogram, outside of any sample. */
static inline void sample(struct sampler *s, struct rb_ep *e, struct rb_run *r)
{
	uint64_t now = rb_ticks();

	e->samples[s->n++] = now - s->last;
	s->last = now;
	if (__builtin_expect(s->n == s->cap, 0)) {
		rb_samples_flush(e, r, s->n);
		s->n = 0;
		s->last = rb_ticks();
	}
}

static inline int more(const struct rb_watch *w, uint64_t i, uint64_t until)
{
	if (w->r->iterations)
		return i < w->r->iterations;
	return (i & 15) || rb_watch_ns(w) < until;
}

static uint64_t until_ns(const struct rb_run *r)
{
	return r->duration_ns ? r->start_ns + r->duration_ns : UINT64_MAX;
}

/* ---- read, atomics: post to completion ---- */

void rb_run_lat_operation(struct rb_ep *e, struct rb_run *r, struct rb_ctl *ctl)
{
	struct ibv_send_wr wr, *bad;
	struct ibv_sge sge;
	struct sampler s = { .cap = e->a.samples };
	struct rb_watch w;
	uint64_t until;

	rb_chain(e, 0, &wr, &sge, 1, r->size, 1);
	rb_start(r, &w, ctl);
	until = until_ns(r);
	s.last = rb_ticks();
	for (uint64_t i = 0; more(&w, i, until); i++) {
		struct ibv_wc wc;
		int n, err = ibv_post_send(e->qp[0], &wr, &bad);

		if (__builtin_expect(err, 0)) {
			rb_verb_error(r, RB_CALL_POST_SEND, err < 0 ? -err : err);
			break;
		}
		r->posted++;
		while ((n = ibv_poll_cq(e->scq[0], 1, &wc)) == 0)
			if (rb_idle(&w))
				goto out;
		if (__builtin_expect(n < 0, 0)) {
			rb_verb_error(r, RB_CALL_POLL, -n);
			break;
		}
		if (__builtin_expect(wc.status != IBV_WC_SUCCESS, 0)) {
			rb_wc_error(r, &wc);
			break;
		}
		rb_progress(&w);
		sample(&s, e, r);
		r->completed++;
		if (rb_busy(&w))
			break;
		atomic_store_explicit(&ctl->done, r->completed, memory_order_relaxed);
	}
out:
	rb_finish(r);
	rb_samples_flush(e, r, s.n);
}

/* ---- write: ping-pong seen by polling memory ---- */

/* Waits until the last byte of what the peer writes is seq. Nonzero ends the loop. The acquire orders it before
 * whatever is read of the message afterwards. */
static inline int wait_byte(struct pinger *p, const uint8_t *flag, uint8_t seq)
{
	while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) != seq) {
		if (rb_idle(p->w))
			return 1;
		/* A dead path shows up as a completion in error, signaled or not. */
		if (p->w->spins % RB_LOOK_EVERY == 0 && reap(p))
			return 1;
	}
	rb_progress(p->w);
	return 0;
}

void rb_run_lat_memory(struct rb_ep *e, struct rb_run *r, struct rb_ctl *ctl)
{
	const uint8_t *flag = rb_rx_buf(e, 0) + r->size - 1;
	uint8_t *out = rb_tx_buf(e, 0) + r->size - 1;
	struct sampler s = { .cap = e->a.samples };
	struct rb_watch w;
	struct pinger p;
	uint64_t until;

	pinger_init(&p, e, r, &w);
	rb_start(r, &w, ctl);
	until = r->responds ? UINT64_MAX : until_ns(r);
	s.last = rb_ticks();
	for (uint64_t i = 0; more(&w, i, until); i++) {
		uint8_t seq = (uint8_t)(e->seq + 1);

		if (r->responds && wait_byte(&p, flag, seq)) /* the responder answers */
			break;
		*out = seq;
		if (ping(&p))
			break;
		if (!r->responds) {
			if (wait_byte(&p, flag, seq))
				break;
			sample(&s, e, r);
		}
		e->seq = seq;
		r->completed++;
		if (rb_busy(&w))
			break;
		atomic_store_explicit(&ctl->done, r->completed, memory_order_relaxed);
	}
	settle(&p);
	rb_finish(r);
	if (!r->responds)
		rb_samples_flush(e, r, s.n);
}

/* ---- send, write-imm: ping-pong seen by receive completions ---- */

enum { RECEIVES = 8 };

static inline int wait_message(struct pinger *p)
{
	struct ibv_wc wc;
	int n;

	while ((n = ibv_poll_cq(p->e->rcq[0], 1, &wc)) == 0) {
		if (rb_idle(p->w))
			return 1;
		if (p->w->spins % RB_LOOK_EVERY == 0 && reap(p))
			return 1;
	}
	if (__builtin_expect(n < 0, 0)) {
		rb_verb_error(p->r, RB_CALL_POLL, -n);
		return 1;
	}
	if (__builtin_expect(wc.status != IBV_WC_SUCCESS, 0)) {
		/* A flushed receive is the echo of a send that failed: its own completion says why. */
		if (wc.status == IBV_WC_WR_FLUSH_ERR)
			reap(p);
		rb_wc_error(p->r, &wc);
		return 1;
	}
	rb_progress(p->w);
	p->e->rx_posted[0]--;
	p->r->received++;
	return 0;
}

/* Receives are replaced half a queue at a time, and while the next message is under way. */
static inline int repost(struct pinger *p, struct ibv_recv_wr *chain, int n)
{
	struct ibv_recv_wr *bad;
	int err;

	if (__builtin_expect(p->e->rx_posted[0] > p->e->a.rx_depth - n, 1))
		return 0;
	err = ibv_post_recv(p->e->qp[0], chain, &bad);
	if (__builtin_expect(err, 0)) {
		rb_verb_error(p->r, RB_CALL_POST_RECV, err < 0 ? -err : err);
		return 1;
	}
	p->e->rx_posted[0] += n;
	return 0;
}

void rb_run_lat_message(struct rb_ep *e, struct rb_run *r, struct rb_ctl *ctl)
{
	struct ibv_sge sge = rb_receive_sge(e, 0);
	struct ibv_recv_wr chain[RECEIVES];
	int half = e->a.rx_depth / 2 < RECEIVES ? e->a.rx_depth / 2 : RECEIVES;
	struct sampler s = { .cap = e->a.samples };
	struct rb_watch w;
	struct pinger p;
	uint64_t until;

	if (half < 1)
		half = 1;
	for (int i = 0; i < half; i++)
		chain[i] = (struct ibv_recv_wr){ .sg_list = &sge, .num_sge = 1, .next = i + 1 < half ? &chain[i + 1] : NULL };
	pinger_init(&p, e, r, &w);
	rb_start(r, &w, ctl);
	until = r->responds ? UINT64_MAX : until_ns(r);
	s.last = rb_ticks();
	for (uint64_t i = 0; more(&w, i, until); i++) {
		if (r->responds && wait_message(&p))
			break;
		if (ping(&p))
			break;
		if (repost(&p, chain, half))
			break;
		if (!r->responds) {
			if (wait_message(&p))
				break;
			sample(&s, e, r);
		}
		r->completed++;
		if (rb_busy(&w))
			break;
		atomic_store_explicit(&ctl->done, r->completed, memory_order_relaxed);
	}
	settle(&p);
	rb_finish(r);
	if (!r->responds)
		rb_samples_flush(e, r, s.n);
}
