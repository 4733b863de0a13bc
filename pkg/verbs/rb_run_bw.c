/* Bandwidth and message rate: the source keeps tx_depth messages in flight on every QP, the sink keeps receives posted.
 *
 * Both stamp the clock only where it costs nothing (after an empty poll, with large messages) or once in 32 polls, so
 * that a loop of a few nanoseconds a message stays one. Rates are taken between such stamps, never from the first post: the ramp-up and
 * the backlog at the end do not count. */
#include "rb_run.h"
#include "rb_memory.h"

#include <stdlib.h>
#include <string.h>

struct stamps {
	uint64_t int_ns, int_done; /* where the current interval began */
	unsigned polls, every; /* stamp once in `every` polls, a power of two */
	int idle;              /* the last poll was empty */
};

enum { LARGE_MESSAGE = 4096 };

static struct stamps stamps_for(const struct rb_run *r)
{
	return (struct stamps){ .every = r->size >= LARGE_MESSAGE ? 1 : 32, .idle = 1 };
}

static void stamp(const struct rb_watch *w, struct stamps *s, uint64_t done)
{
	struct rb_run *r = w->r;
	struct rb_ctl *ctl = w->ctl;
	uint64_t now = rb_watch_ns(w);

	atomic_store_explicit(&ctl->done, done, memory_order_relaxed);
	if (atomic_load_explicit(&ctl->mark, memory_order_relaxed)) {
		atomic_store_explicit(&ctl->mark, 0, memory_order_relaxed);
		r->first_ns = 0;
		r->min_rate = r->max_rate = 0;
	}
	if (!r->first_ns) {
		r->first_ns = s->int_ns = now;
		r->first_done = s->int_done = done;
	} else if (now - s->int_ns >= r->interval_ns) {
		double rate = (double)(done - s->int_done) * 1e9 / (double)(now - s->int_ns);

		if (r->min_rate == 0 || rate < r->min_rate)
			r->min_rate = rate;
		if (rate > r->max_rate)
			r->max_rate = rate;
		s->int_ns = now;
		s->int_done = done;
	}
	r->last_ns = now;
	r->last_done = done;
}

static inline int stamp_due(struct stamps *s)
{
	if (s->idle) {
		s->idle = 0;
		return 1;
	}
	return (++s->polls & (s->every - 1)) == 0;
}

/* ---- source ---- */

struct tx {
	struct ibv_qp *qp;
	struct ibv_send_wr *plain, *signaled; /* chains of `list` */
	uint64_t posted, completed, quota;
	uint64_t signaled_posted; /* posted, up to the last signaled one */
	int until_signal;         /* chains to post until the signaled one, itself included */
	int skip;                 /* of the next chain, what a full queue had accepted already */
	uint64_t slot, local, remote; /* of the ring: the next one, and where it begins */
};

struct source {
	struct tx *tx;
	struct ibv_send_wr *wr;
	struct ibv_sge *sge;
	int list, chains_per_signal;
	uint64_t depth;
	struct rb_ring ring;
};

static void source_free(struct source *s)
{
	free(s->tx);
	free(s->wr);
	free(s->sge);
}

static int source_init(struct source *s, const struct rb_ep *e, const struct rb_run *r)
{
	size_t list = (size_t)e->a.post_list, all = 2 * list * (size_t)e->qps;

	*s = (struct source){ .list = e->a.post_list, .chains_per_signal = e->a.cq_mod / e->a.post_list, .depth = (uint64_t)e->a.tx_depth,
			      .ring = rb_ring_of(e, r->size) };
	s->tx = calloc((size_t)e->qps, sizeof *s->tx);
	s->wr = calloc(all, sizeof *s->wr);
	s->sge = calloc(all, sizeof *s->sge);
	if (!s->tx || !s->wr || !s->sge) {
		source_free(s);
		return -ENOMEM;
	}
	for (int q = 0; q < e->qps; q++) {
		size_t at = 2 * list * (size_t)q;

		s->tx[q] = (struct tx){
			.qp = e->qp[q], .plain = &s->wr[at], .signaled = &s->wr[at + list],
			.quota = r->iterations ? r->iterations : UINT64_MAX, .until_signal = s->chains_per_signal,
		};
		rb_chain(e, q, s->tx[q].plain, &s->sge[at], s->list, r->size, 0);
		rb_chain(e, q, s->tx[q].signaled, &s->sge[at + list], s->list, r->size, 1);
		s->tx[q].local = s->sge[at].addr;
		s->tx[q].remote = e->a.op == RB_SEND ? 0 : s->wr[at].wr.rdma.remote_addr;
	}
	return 0;
}

/* Posts the last n of a chain. Returns the messages accepted; fewer than n if the queue is full or a verb failed. */
static inline int post(struct source *s, struct tx *t, struct ibv_send_wr *chain, int n, struct rb_run *r)
{
	struct ibv_send_wr *from = &chain[s->list - n], *bad = NULL;
	int err;

	if (s->ring.slots > 1)
		rb_ring_place(&s->ring, t->slot, from, n, t->local, t->remote);
	err = ibv_post_send(t->qp, from, &bad);
	if (__builtin_expect(!err, 1)) {
		if (s->ring.slots > 1)
			t->slot = (t->slot + (uint64_t)n) % s->ring.slots;
		return n;
	}
	if (err == ENOMEM || err == -ENOMEM)
		r->enomem++;
	else
		rb_verb_error(r, RB_CALL_POST_SEND, err < 0 ? -err : err);
	n = bad ? (int)(bad - from) : 0;
	if (s->ring.slots > 1)
		t->slot = (t->slot + (uint64_t)n) % s->ring.slots;
	return n;
}

/* Fills one QP as far as depth and quota allow. Returns messages posted. */
static inline uint64_t fill(struct source *s, struct tx *t, struct rb_run *r)
{
	uint64_t room = s->depth - (t->posted - t->completed), left = t->quota - t->posted, before = t->posted;

	if (left < room)
		room = left;
	while (room) {
		/* The tail of a chain: after a partial post, or at the end of the quota. */
		uint64_t want = (uint64_t)(s->list - t->skip);
		int last = room == left && room <= want, n, got = 0;
		uint64_t many = 0;

		if (!last && room < want)
			break;
		if (last)
			want = room;
		/* The common case, free of all else: whole chains of one kind, up to where the kind changes. */
		if (!t->skip && !last) {
			int all_signaled = s->chains_per_signal == 1;
			struct ibv_send_wr *chain = all_signaled ? t->signaled : t->plain;
			uint64_t chains = (room - (room == left)) / (uint64_t)s->list;

			if (!all_signaled && chains > (uint64_t)(t->until_signal - 1))
				chains = (uint64_t)(t->until_signal - 1);
			for (; many < chains; many++) {
				got = post(s, t, chain, s->list, r);
				if (__builtin_expect(got != s->list, 0))
					break;
			}
			t->posted += many * (uint64_t)s->list;
			if (all_signaled)
				t->signaled_posted = t->posted;
			else
				t->until_signal -= (int)many;
			if (many < chains) {
				t->skip = got;
				t->posted += (uint64_t)got;
				break;
			}
		}
		if (many) {
			room -= many * (uint64_t)s->list;
			left -= many * (uint64_t)s->list;
			continue;
		}
		n = (int)want;
		got = post(s, t, last || t->until_signal == 1 ? t->signaled : t->plain, n, r);
		t->posted += (uint64_t)got;
		if (got != n) {
			t->skip += got;
			break;
		}
		t->skip = 0;
		room -= want;
		left -= want;
		if (last || t->until_signal == 1) {
			t->until_signal = s->chains_per_signal;
			t->signaled_posted = t->posted;
		} else {
			t->until_signal--;
		}
	}
	return t->posted - before;
}

/* A completion stands for all messages since the one before it: a whole group, or what the quota cut it to. */
static inline uint64_t complete(struct source *s, struct tx *t)
{
	uint64_t group = (uint64_t)(s->chains_per_signal * s->list), out = t->signaled_posted - t->completed;

	if (out < group)
		group = out;
	t->completed += group;
	return group;
}

/* Polls all CQs once. Returns completions seen, -1 on a verb failure; *done grows by messages. */
static inline int drain_cqs(struct rb_ep *e, struct source *s, struct rb_run *r, uint64_t *done)
{
	struct ibv_wc wc[RB_POLL_BATCH];
	int seen = 0;

	for (int c = 0; c < e->ncq; c++) {
		int n = ibv_poll_cq(e->scq[c], RB_POLL_BATCH, wc);

		if (__builtin_expect(n < 0, 0)) {
			rb_verb_error(r, RB_CALL_POLL, -n);
			return -1;
		}
		for (int i = 0; i < n; i++) {
			if (__builtin_expect(wc[i].status != IBV_WC_SUCCESS, 0)) {
				rb_wc_error(r, &wc[i]);
				continue;
			}
			*done += complete(s, &s->tx[wc[i].wr_id]);
		}
		seen += n;
	}
	return seen;
}

/* Ends the quota of every QP here, with a last signaled message where unsignaled ones are out. Returns messages still out. */
static uint64_t cut(struct rb_ep *e, struct source *s)
{
	uint64_t out = 0;

	for (int q = 0; q < e->qps; q++) {
		struct tx *t = &s->tx[q];

		t->quota = t->posted + (t->signaled_posted < t->posted || t->skip);
		out += t->quota - t->completed;
	}
	return out;
}

void rb_run_bw_source(struct rb_ep *e, struct rb_run *r, struct rb_ctl *ctl)
{
	struct source s;
	struct stamps st = stamps_for(r);
	struct rb_watch w;
	uint64_t done = 0, all = r->iterations ? r->iterations * (uint64_t)e->qps : UINT64_MAX, until;
	int err = source_init(&s, e, r), measuring = 1;

	if (err) {
		rb_verb_error(r, RB_CALL_NONE, -err);
		return;
	}
	rb_start(r, &w, ctl);
	until = r->iterations ? UINT64_MAX : r->start_ns + r->duration_ns;
	while (done < all) {
		int seen;

		for (int q = 0; q < e->qps; q++)
			fill(&s, &s.tx[q], r);
		seen = drain_cqs(e, &s, r, &done);
		if (__builtin_expect(r->end != RB_END_DONE, 0))
			break;
		if (seen) {
			rb_progress(&w);
			if (measuring && (stamp_due(&st) || done == all)) {
				stamp(&w, &st, done);
				if (r->last_ns >= until) {
					measuring = 0;
					all = done + cut(e, &s);
				}
			}
			if (rb_busy(&w))
				break;
		} else {
			st.idle = 1;
			if (rb_idle(&w))
				break;
			/* A link that went silent must not stretch the window. */
			if (measuring && until != UINT64_MAX && w.spins % RB_LOOK_EVERY == 0 && rb_watch_ns(&w) >= until) {
				measuring = 0;
				all = done + cut(e, &s);
			}
		}
	}
	rb_finish(r);
	/* What a failed QP flushes is counted, and may hold the error itself where another QP's flush came first. */
	while (r->end == RB_END_WC && drain_cqs(e, &s, r, &done) > 0)
		;
	for (int q = 0; q < e->qps; q++)
		r->posted += s.tx[q].posted;
	r->completed = done;
	atomic_store_explicit(&ctl->done, done, memory_order_relaxed);
	source_free(&s);
}

/* ---- sink ---- */

enum { RX_BATCH_MAX = 32 };

/* Once the sender's count is known, what has not come for this long was lost (UC, UD). */
static const uint64_t grace_ns = 200000000;

struct sink {
	struct ibv_recv_wr wr[RX_BATCH_MAX];
	struct ibv_sge *sge; /* one a QP */
	struct ibv_sge slot[RX_BATCH_MAX]; /* or, on a ring, one a receive */
	int batch;
};

static int sink_repost(struct rb_ep *e, struct sink *s, int q, struct rb_run *r)
{
	struct ibv_recv_wr *bad = NULL;
	int err;

	for (int i = 0; i < s->batch; i++) {
		s->wr[i].sg_list = &s->sge[q];
		if (e->ring.slots > 1) {
			s->slot[i] = rb_receive_sge(e, q);
			s->wr[i].sg_list = &s->slot[i];
		}
		s->wr[i].wr_id = (uint64_t)q;
	}
	err = ibv_post_recv(e->qp[q], s->wr, &bad);
	if (err) {
		rb_verb_error(r, RB_CALL_POST_RECV, err < 0 ? -err : err);
		return -1;
	}
	e->rx_posted[q] += s->batch;
	return 0;
}

void rb_run_bw_sink(struct rb_ep *e, struct rb_run *r, struct rb_ctl *ctl)
{
	struct sink s = { .batch = e->a.rx_depth / 2 < RX_BATCH_MAX ? e->a.rx_depth / 2 : RX_BATCH_MAX };
	struct stamps st = stamps_for(r);
	struct rb_watch w;
	uint64_t grh = e->a.transport == RB_UD ? RB_GRH_BYTES : 0;

	if (s.batch < 1)
		s.batch = 1;
	s.sge = calloc((size_t)e->qps, sizeof *s.sge);
	if (!s.sge) {
		rb_verb_error(r, RB_CALL_NONE, ENOMEM);
		return;
	}
	for (int q = 0; q < e->qps; q++)
		s.sge[q] = rb_receive_sge(e, q);
	for (int i = 0; i < s.batch; i++)
		s.wr[i] = (struct ibv_recv_wr){ .next = i + 1 < s.batch ? &s.wr[i + 1] : NULL, .num_sge = 1 };

	rb_start(r, &w, ctl);
	while (r->received < atomic_load_explicit(&ctl->expect, memory_order_relaxed)) {
		struct ibv_wc wc[RB_POLL_BATCH];
		int seen = 0;

		for (int c = 0; c < e->ncq; c++) {
			int n = ibv_poll_cq(e->rcq[c], RB_POLL_BATCH, wc);

			if (__builtin_expect(n < 0, 0)) {
				rb_verb_error(r, RB_CALL_POLL, -n);
				goto out;
			}
			for (int i = 0; i < n; i++) {
				int q = (int)wc[i].wr_id;

				if (__builtin_expect(wc[i].status != IBV_WC_SUCCESS, 0)) {
					rb_wc_error(r, &wc[i]);
					continue;
				}
				r->received++;
				r->bytes_received += wc[i].byte_len - grh;
				if (--e->rx_posted[q] <= e->a.rx_depth - s.batch && sink_repost(e, &s, q, r))
					goto out;
			}
			seen += n;
		}
		if (__builtin_expect(r->end != RB_END_DONE, 0))
			break;
		if (seen) {
			rb_progress(&w);
			if (stamp_due(&st))
				stamp(&w, &st, r->received);
			if (rb_busy(&w))
				break;
			continue;
		}
		if (!st.idle) { /* the end of a burst is where the last message was */
			stamp(&w, &st, r->received);
			st.idle = 1;
		}
		if (rb_idle(&w))
			break;
		if (w.spins % RB_LOOK_EVERY == 0 && w.idle_since && atomic_load(&ctl->expect) != UINT64_MAX &&
		    rb_watch_ns(&w) - w.idle_since > grace_ns)
			break;
	}
out:
	rb_finish(r);
	if (r->received && r->last_done != r->received)
		stamp(&w, &st, r->received);
	r->completed = r->received;
	free(s.sge);
}
