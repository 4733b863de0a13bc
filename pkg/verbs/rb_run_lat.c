/* Latency. One stamp an iteration: a sample is the time from one post to the next, so nothing between two iterations
 * escapes it. Definitions are perftest's: one-sided ops give the whole operation, ping-pongs are scaled by one half.
 *
 * Sends are signaled once in a third of the queue: waiting for the own completion in each iteration would measure it too.
 *
 * Over UC and UD a message may be lost. Each ping then has a number, which its answer repeats; one that is not answered in
 * time counts as lost, and what arrives later for it is not taken for the answer to the next. */
#include "rb_run.h"

#include <arpa/inet.h>
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

/* Moves the ping to its slot, and gives it its pattern. */
static void dress(struct pinger *p, uint64_t message)
{
	struct rb_ep *e = p->e;
	uint64_t at = message % e->ring.slots * e->ring.step;

	p->sge.addr = (uintptr_t)rb_local_buf(e, 0) + at;
	if (e->a.transport != RB_UD)
		p->wr.wr.rdma.remote_addr = rb_remote_buf(e, 0) + at;
	if (p->r->verify)
		rb_pattern_fill((uint8_t *)(uintptr_t)p->sge.addr, p->r->size, 0, message);
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
	p->e->state[0].sent++;
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
	uint64_t odd, odds, preempted; /* ticks from which a sample is looked into, how many were, and what they showed */
	int yields;
};

static void sampler_init(struct sampler *s, const struct rb_ep *e, const struct rb_run *r)
{
	/* A thread that yields by design loses its CPU all the time: nothing could be told from it. */
	*s = (struct sampler){
		.cap = e->a.samples, .yields = r->yield_ns != 0, .preempted = rb_preemptions(),
		.odd = (uint64_t)(20000 / rb_clock_ns_per_tick()),
	};
}

/* A sample that took so long that the thread may have lost its CPU in it. */
static void look_into(struct sampler *s, struct rb_run *r)
{
	uint64_t now;

	if (s->yields) {
		s->odd = UINT64_MAX;
		return;
	}
	now = rb_preemptions();
	r->lat_hit += now != s->preempted;
	s->preempted = now;
	/* Where all samples are long, only those that stand out are worth a system call. */
	if (++s->odds > 64) {
		s->odds = 0;
		s->odd *= 2;
	}
	s->last = rb_ticks();
}

/* Takes a sample; a full scratch goes into the histogram, outside of any sample. */
static inline void sample(struct sampler *s, struct rb_ep *e, struct rb_run *r)
{
	uint64_t now = rb_ticks(), d = now - s->last;

	e->samples[s->n++] = d;
	s->last = now;
	if (__builtin_expect(d > s->odd, 0))
		look_into(s, r);
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

/* Nonzero: what the operation brought is not what it should be. */
static int brought(struct rb_ep *e, struct rb_run *r)
{
	const uint8_t *p = rb_local_buf(e, 0);
	uint64_t was;

	if (!rb_is_atomic(e))
		return rb_pattern_check(p, r->size, 0, 0, 0, r);
	memcpy(&was, p, 8);
	r->verified++;
	if (was == e->state[0].atomics)
		return 0;
	rb_corrupt(r, 0, e->state[0].atomics, 0, e->state[0].atomics, was);
	return 1;
}

void rb_run_lat_operation(struct rb_ep *e, struct rb_run *r, struct rb_ctl *ctl)
{
	struct ibv_send_wr wr, *bad;
	struct ibv_sge sge;
	struct sampler s;
	struct rb_watch w;
	uint64_t until;
	int checked = r->verify || rb_is_atomic(e);

	rb_chain(e, 0, &wr, &sge, 1, r->size, 1);
	sampler_init(&s, e, r);
	rb_start(r, &w, ctl);
	rb_watch_cqs(&w, e, 0);
	until = until_ns(r);
	s.last = rb_ticks();
	for (uint64_t i = 0; more(&w, i, until); i++) {
		struct ibv_wc wc;
		int n, err;

		if (e->a.op == RB_CMP_SWAP) {
			wr.wr.atomic.compare_add = e->state[0].atomics;
			wr.wr.atomic.swap = e->state[0].atomics + 1;
		}
		err = ibv_post_send(e->qp[0], &wr, &bad);
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
		if (checked && brought(e, r))
			break;
		e->state[0].atomics++;
		r->completed++;
		if (rb_busy(&w))
			break;
		atomic_store_explicit(&ctl->lane[0].done, r->completed, memory_order_relaxed);
	}
out:
	rb_finish(r);
	rb_samples_flush(e, r, s.n);
}

/* ---- the wait for an answer ---- */

enum answer { ANSWERED, LOST, ENDED };

/* How long to wait for an answer that may not come: eight times the longest wait so far, at least 100 ms (a responder may lose
 * its CPU for a while), at most 500 ms: a run that is given up after 3 s of silence has then lost six messages in a row. */
static uint64_t patience(const struct rb_ep *e)
{
	const double k = rb_clock_ns_per_tick();
	uint64_t least = (uint64_t)(100000000 / k), most = (uint64_t)(500000000 / k), eight = 8 * e->answer_max;

	if (!e->answer_max || eight > most)
		return most;
	return eight < least ? least : eight;
}

static inline int may_lose(const struct rb_ep *e) { return e->a.transport != RB_RC; }

/* After an empty poll: whether this message is to be given up. */
static inline int given_up(const struct pinger *p, uint64_t since, uint64_t wait)
{
	return wait && (p->w->spins & 255) == 0 && rb_ticks() - since > wait;
}

/* ---- write: ping-pong seen by polling memory ---- */

/* Waits until the last byte of what the peer writes is seq; the responder, while it is not the last one it answered: over UC
 * some may be missing. The acquire orders it before whatever is read of the message afterwards. */
static inline enum answer wait_byte(struct pinger *p, const uint8_t *flag, uint8_t want, int changed, uint64_t wait, uint64_t since)
{
	while ((__atomic_load_n(flag, __ATOMIC_ACQUIRE) == want) == changed) {
		if (rb_idle(p->w))
			return ENDED;
		if (given_up(p, since, wait))
			return LOST;
		/* A dead path shows up as a completion in error, signaled or not. */
		if (rb_looked(p->w) && reap(p))
			return ENDED;
	}
	rb_progress(p->w);
	return ANSWERED;
}

void rb_run_lat_memory(struct rb_ep *e, struct rb_run *r, struct rb_ctl *ctl)
{
	const uint8_t *flag = rb_rx_buf(e, 0) + r->size - 1;
	uint8_t *out = rb_tx_buf(e, 0) + r->size - 1;
	struct sampler s;
	struct rb_watch w;
	struct pinger p;
	uint64_t until, wait = may_lose(e) && !r->responds ? patience(e) : 0;

	pinger_init(&p, e, r, &w);
	sampler_init(&s, e, r);
	rb_start(r, &w, ctl);
	until = r->responds ? UINT64_MAX : until_ns(r);
	s.last = rb_ticks();
	for (uint64_t i = 0; more(&w, i, until); i++) {
		uint8_t seq = (uint8_t)(e->seq + 1);

		if (r->responds) {
			if (wait_byte(&p, flag, e->seq, 1, 0, 0) == ENDED)
				break;
			seq = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
			r->received++;
			if (r->verify && rb_pattern_check(rb_rx_buf(e, 0), r->size, 1, 0, e->state[0].rx_done++, r))
				break;
		}
		if (r->verify)
			dress(&p, e->state[0].sent);
		*out = seq;
		if (ping(&p))
			break;
		e->seq = seq;
		if (!r->responds) {
			enum answer a = wait_byte(&p, flag, seq, 0, wait, s.last);

			if (a == ENDED)
				break;
			if (a == LOST) {
				r->lost++;
				s.last = rb_ticks();
				continue;
			}
			if (wait && rb_ticks() - s.last > e->answer_max)
				e->answer_max = rb_ticks() - s.last;
			sample(&s, e, r);
			if (r->verify && rb_pattern_check(rb_rx_buf(e, 0), r->size, 1, 0, e->state[0].rx_done++, r))
				break;
		}
		r->completed++;
		if (rb_busy(&w))
			break;
		atomic_store_explicit(&ctl->lane[0].done, r->completed, memory_order_relaxed);
	}
	settle(&p);
	rb_finish(r);
	if (!r->responds)
		rb_samples_flush(e, r, s.n);
}

/* ---- send, write-imm: ping-pong seen by receive completions ---- */

/* Waits for a message; over UC and UD the initiator for the one with its number. */
static inline enum answer wait_message(struct pinger *p, uint64_t wait, uint64_t since)
{
	struct rb_ep *e = p->e;
	struct ibv_wc wc;
	int n;

	for (;;) {
		while ((n = ibv_poll_cq(e->rcq[0], 1, &wc)) == 0) {
			if (rb_idle(p->w))
				return ENDED;
			if (given_up(p, since, wait))
				return LOST;
			if (rb_looked(p->w) && reap(p))
				return ENDED;
		}
		if (__builtin_expect(n < 0, 0)) {
			rb_verb_error(p->r, RB_CALL_POLL, -n);
			return ENDED;
		}
		if (__builtin_expect(wc.status != IBV_WC_SUCCESS, 0)) {
			/* A flushed receive is the echo of a send that failed: its own completion says why. */
			if (wc.status == IBV_WC_WR_FLUSH_ERR)
				reap(p);
			rb_wc_error(p->r, &wc);
			return ENDED;
		}
		rb_progress(p->w);
		e->state[0].rx_posted--;
		p->r->received++;
		if (p->r->verify) {
			uint64_t number = wc.wc_flags & IBV_WC_WITH_IMM ? ntohl(wc.imm_data) : e->state[0].rx_done;

			if (rb_pattern_check(e->a.op == RB_WRITE_IMM ? rb_written_buf(e, 0, number) : rb_receive_buf(e, 0, e->state[0].rx_done), p->r->size, 0, 0, number, p->r))
				return ENDED;
		}
		e->state[0].rx_done++;
		if (!may_lose(e))
			return ANSWERED;
		if (p->r->responds) {
			p->wr.imm_data = wc.imm_data;
			return ANSWERED;
		}
		if (wc.imm_data == p->wr.imm_data)
			return ANSWERED;
		p->r->late++;
	}
}

/* Receives are replaced half a queue at a time, and while the next message is under way. */
static inline int repost(struct pinger *p, int n)
{
	int err;

	if (__builtin_expect(p->e->state[0].rx_posted > p->e->a.rx_depth - n, 1))
		return 0;
	err = rb_post_receives(p->e, 0, n);
	if (__builtin_expect(err, 0)) {
		rb_verb_error(p->r, RB_CALL_POST_RECV, err);
		return 1;
	}
	return 0;
}

void rb_run_lat_message(struct rb_ep *e, struct rb_run *r, struct rb_ctl *ctl)
{
	int half = e->a.rx_depth / 2 < RB_RX_BATCH ? e->a.rx_depth / 2 : RB_RX_BATCH, numbered = may_lose(e) || r->verify;
	struct sampler s;
	struct rb_watch w;
	struct pinger p;
	uint64_t until, wait = may_lose(e) && !r->responds ? patience(e) : 0;

	if (half < 1)
		half = 1;
	pinger_init(&p, e, r, &w);
	sampler_init(&s, e, r);
	rb_start(r, &w, ctl);
	rb_watch_cqs(&w, e, 1);
	until = r->responds ? UINT64_MAX : until_ns(r);
	s.last = rb_ticks();
	for (uint64_t i = 0; more(&w, i, until); i++) {
		if (r->responds && wait_message(&p, 0, 0) == ENDED)
			break;
		if (numbered) {
			if (!r->responds || !may_lose(e))
				p.wr.imm_data = htonl((uint32_t)e->state[0].sent);
			if (r->verify)
				dress(&p, ntohl(p.wr.imm_data));
		}
		if (ping(&p))
			break;
		if (repost(&p, half))
			break;
		if (!r->responds) {
			enum answer a = wait_message(&p, wait, s.last);

			if (a == ENDED)
				break;
			if (a == LOST) {
				r->lost++;
				s.last = rb_ticks();
				continue;
			}
			if (wait && rb_ticks() - s.last > e->answer_max)
				e->answer_max = rb_ticks() - s.last;
			sample(&s, e, r);
		}
		r->completed++;
		if (rb_busy(&w))
			break;
		atomic_store_explicit(&ctl->lane[0].done, r->completed, memory_order_relaxed);
	}
	settle(&p);
	rb_finish(r);
	if (!r->responds)
		rb_samples_flush(e, r, s.n);
}
