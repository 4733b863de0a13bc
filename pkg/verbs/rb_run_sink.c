/* Bandwidth and message rate, the end that receives: keeps receives posted, counts what arrives. */
#include "rb_run.h"

#include <arpa/inet.h>
#include <stdlib.h>

/* The last 4096 numbers up to the highest seen: which of them came. */
struct seen {
	uint32_t top;
	int any;
	uint64_t bits[64];
};

enum { WINDOW = 64 * 64 };

static inline uint64_t *word_of(struct seen *s, uint32_t n) { return &s->bits[n / 64 % 64]; }

/* Whether a message is the first with its number. */
static int first_seen(struct seen *s, uint32_t n, struct rb_run *r)
{
	uint64_t bit = UINT64_C(1) << n % 64;
	int32_t ahead = (int32_t)(n - s->top);

	if (!s->any || ahead > 0) {
		uint32_t gap = s->any ? (uint32_t)ahead : WINDOW;

		/* What the window moves over is not seen yet. */
		for (uint32_t i = 1; i <= gap && i <= WINDOW; i++)
			*word_of(s, n - gap + i) &= ~(UINT64_C(1) << (n - gap + i) % 64);
		s->any = 1;
		s->top = n;
	} else {
		if (ahead == 0 || ahead <= -WINDOW || (*word_of(s, n) & bit)) {
			r->duplicates++;
			return 0;
		}
		r->reordered++;
	}
	*word_of(s, n) |= bit;
	return 1;
}

struct sink {
	struct rb_ep *e;
	struct seen *seen; /* per QP, where messages are numbered and may come twice */
	int batch;
	uint64_t grh;
};

static int check(struct sink *s, int q, const struct ibv_wc *wc, struct rb_run *r)
{
	struct rb_ep *e = s->e;
	/* Over RC messages arrive in their order; a number that they have says the same. What is written lands where that says, what
	 * is sent in the receive that it took. */
	uint64_t nth = e->state[q].rx_done, number = wc->wc_flags & IBV_WC_WITH_IMM ? ntohl(wc->imm_data) : nth;
	const uint8_t *p = e->a.op == RB_WRITE_IMM ? rb_written_buf(e, q, number) : rb_receive_buf(e, q, nth);

	return rb_pattern_check(p, r->size, 0, q, number, r);
}

/* Nonzero ends the loop. */
static inline int arrival(struct sink *s, const struct ibv_wc *wc, struct rb_run *r)
{
	struct rb_ep *e = s->e;
	int q = (int)wc->wr_id, err;
	struct rb_qp_state *st = &e->state[q];

	if (__builtin_expect(s->seen && wc->byte_len - s->grh != r->size, 0)) {
		r->late++; /* of another size, that is of the run before */
	} else if (!s->seen || first_seen(&s->seen[q], ntohl(wc->imm_data), r)) {
		r->received++;
		r->bytes_received += wc->byte_len - s->grh;
	}
	if (__builtin_expect(r->verify, 0) && check(s, q, wc, r))
		return 1;
	st->rx_done++;
	if (--st->rx_posted <= e->a.rx_depth - s->batch && (err = rb_post_receives(e, q, s->batch))) {
		rb_verb_error(r, RB_CALL_POST_RECV, err);
		return 1;
	}
	return 0;
}

void rb_run_bw_sink(struct rb_ep *e, struct rb_run *r, struct rb_ctl *ctl)
{
	const struct rb_lane *lane = &e->lane[r->lane];
	struct sink s = {
		.e = e, .batch = e->a.rx_depth / 2 < RB_RX_BATCH ? e->a.rx_depth / 2 : RB_RX_BATCH, .grh = e->a.transport == RB_UD ? RB_GRH_BYTES : 0,
	};
	struct rb_stamps st = rb_stamps_for(r, ctl, 64);
	struct rb_watch w;

	if (s.batch < 1)
		s.batch = 1;
	if (e->a.transport == RB_UD) {
		s.seen = calloc((size_t)e->qps, sizeof *s.seen);
		if (!s.seen) {
			rb_verb_error(r, RB_CALL_NONE, ENOMEM);
			return;
		}
	}
	r->responds = 1;
	rb_start(r, &w, ctl);
	rb_watch_cqs(&w, e, 1);
	for (;;) {
		struct ibv_wc wc[RB_POLL_BATCH];
		int seen = 0;

		for (int c = lane->cq; c < lane->cq + lane->cqs; c++) {
			int n = ibv_poll_cq(e->rcq[c], RB_POLL_BATCH, wc);

			if (__builtin_expect(n < 0, 0)) {
				rb_verb_error(r, RB_CALL_POLL, -n);
				goto out;
			}
			for (int i = 0; i < n; i++) {
				if (__builtin_expect(wc[i].status != IBV_WC_SUCCESS, 0))
					rb_wc_error(r, &wc[i]);
				else if (arrival(&s, &wc[i], r))
					goto out;
			}
			seen += n;
		}
		if (__builtin_expect(r->end != RB_END_DONE, 0))
			break;
		if (seen) {
			rb_progress(&w);
			if (rb_stamp_due(&st, r->received))
				rb_stamp(&w, &st, r->received);
			if (rb_busy(&w))
				break;
			continue;
		}
		if (!st.idle) { /* the end of a burst is where the last message was */
			rb_stamp(&w, &st, r->received);
			st.idle = 1;
		}
		if (r->received >= atomic_load_explicit(&ctl->expect, memory_order_relaxed) || rb_idle(&w))
			break;
	}
out:
	rb_finish(r);
	if (r->received && r->last_done != r->received)
		rb_stamp(&w, &st, r->received);
	r->completed = r->received;
	free(s.seen);
}
