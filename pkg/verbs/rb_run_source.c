/* Bandwidth and message rate, the end that posts: tx_depth messages in flight on every QP of its lane.
 *
 * The loop exists twice: once for messages that are all alike, with work requests written beforehand, and once for those
 * that must be touched before each post (numbered, in the next slot, a read among writes, with a pattern) or held back (a rate). */
#include "rb_run.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

struct tx {
	struct ibv_qp *qp;
	int index;
	struct ibv_send_wr *plain, *signaled; /* chains of `list` */
	uint64_t posted, completed, quota;
	uint64_t signaled_posted; /* posted, up to the last signaled one */
	uint64_t first;           /* number of this run's first message on the QP */
	int until_signal;         /* chains to post until the signaled one, itself included */
	int skip;                 /* of the next chain, what a full queue had accepted already */
};

struct source {
	struct rb_ep *e;
	struct tx *tx;
	int qps;
	struct ibv_send_wr *wr;
	struct ibv_sge *sge;
	int list, chains_per_signal;
	uint64_t depth;
	/* Of the loop that touches: */
	int numbered;
	uint64_t allowed, all_posted; /* by the rate; UINT64_MAX: no limit */
	uint64_t pace_ns, paced;      /* since when, and what was allowed before that */
};

static void source_free(struct source *s)
{
	free(s->tx);
	free(s->wr);
	free(s->sge);
}

static int source_init(struct source *s, struct rb_ep *e, const struct rb_run *r)
{
	const struct rb_lane *lane = &e->lane[r->lane];
	size_t list = (size_t)e->a.post_list, all = 2 * list * (size_t)lane->qps;

	*s = (struct source){
		.e = e, .qps = lane->qps, .list = e->a.post_list, .chains_per_signal = e->a.cq_mod / e->a.post_list, .depth = (uint64_t)e->a.tx_depth,
		.numbered = rb_receives(e) && (e->a.transport != RB_RC || r->verify), .allowed = UINT64_MAX,
	};
	s->tx = calloc((size_t)lane->qps, sizeof *s->tx);
	s->wr = calloc(all, sizeof *s->wr);
	s->sge = calloc(all, sizeof *s->sge);
	if (!s->tx || !s->wr || !s->sge) {
		source_free(s);
		return -ENOMEM;
	}
	for (int i = 0; i < lane->qps; i++) {
		size_t at = 2 * list * (size_t)i;
		int q = lane->qp + i;

		s->tx[i] = (struct tx){
			.qp = e->qp[q], .index = q, .plain = &s->wr[at], .signaled = &s->wr[at + list], .first = e->state[q].sent,
			.quota = r->iterations ? r->iterations : UINT64_MAX, .until_signal = s->chains_per_signal,
		};
		rb_chain(e, q, s->tx[i].plain, &s->sge[at], s->list, r->size, 0);
		rb_chain(e, q, s->tx[i].signaled, &s->sge[at + list], s->list, r->size, 1);
	}
	return 0;
}

/* ---- what each message of its own needs ---- */

static inline int is_read(uint64_t n, const struct rb_run *r)
{
	uint64_t k = (uint64_t)r->read_permille;

	return (n + 1) * k / 1000 != n * k / 1000;
}

/* Makes n work requests those of the QP's next messages. A full queue that took some of them has them made again. */
static void touch(struct source *s, struct tx *t, struct ibv_send_wr *wr, int n, const struct rb_run *r)
{
	struct rb_ep *e = s->e;
	int atomic = rb_is_atomic(e);
	uint8_t *local = rb_local_buf(e, t->index);
	uint64_t remote = rb_remote_buf(e, t->index), slots = e->ring.slots;

	for (int i = 0; i < n; i++, wr++) {
		uint64_t message = t->first + t->posted + (uint64_t)i, at = message % slots * e->ring.step;
		uint8_t *p = local + at;

		wr->sg_list->addr = (uintptr_t)p;
		if (atomic) { /* all work on one counter, which grows by 1 with each */
			wr->wr.atomic.compare_add = e->a.op == RB_FETCH_ADD ? 1 : e->state[t->index].atomics + t->posted + (uint64_t)i;
			wr->wr.atomic.swap = wr->wr.atomic.compare_add + 1;
			continue;
		}
		if (e->a.transport != RB_UD)
			wr->wr.rdma.remote_addr = remote + at;
		if (s->numbered)
			wr->imm_data = htonl((uint32_t)message);
		if (e->a.mixed) {
			int read = is_read(message, r);

			wr->opcode = read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
			if (read) /* from the half that the peer sends from */
				wr->wr.rdma.remote_addr -= e->c.stride;
		}
		if (r->verify) {
			if (e->a.op == RB_READ)
				memset(p, 0xff, 8);
			else
				rb_pattern_fill(p, r->size, t->index, message);
		}
	}
}

/* Checks n messages of this end that completed: what a read brought, what an atomic fetched. */
static void check(struct source *s, struct tx *t, uint64_t n, struct rb_run *r)
{
	struct rb_ep *e = s->e;
	uint64_t slots = e->ring.slots;

	for (uint64_t i = 0; i < n; i++) {
		uint64_t message = t->first + t->completed + i, slot = message % slots;
		const uint8_t *p = rb_local_buf(e, t->index) + slot * e->ring.step;

		if (e->a.op == RB_READ) {
			if (rb_pattern_check(p, r->size, 0, t->index, slot, r))
				return;
		} else if (rb_is_atomic(e)) {
			uint64_t was, want = e->state[t->index].atomics + t->completed + i;

			memcpy(&was, p, 8);
			r->verified++;
			if (was != want) {
				rb_corrupt(r, t->index, message, 0, want, was);
				return;
			}
		}
	}
}

/* How many messages the rate allows by now. After a time in which nothing could be posted, what was missed is made up for,
 * but no more than 100 ms of it. */
static void pace(struct source *s, const struct rb_run *r, uint64_t now)
{
	const uint64_t most = 100000000;
	uint64_t due = s->paced + (uint64_t)((double)(now - s->pace_ns) * r->rate / 1e9);
	uint64_t burst = (uint64_t)(r->rate * (double)most / 1e9) + (uint64_t)s->list;

	if (due > s->all_posted + burst) {
		s->paced = due = s->all_posted + burst;
		s->pace_ns = now;
	}
	s->allowed = due + (uint64_t)s->list; /* a whole chain, or none would ever go */
}

/* Posts the last n of a chain. Returns the messages accepted; fewer than n if the queue is
 * full or a verb failed. */
static inline __attribute__((always_inline)) int post(struct source *s, struct tx *t, struct ibv_send_wr *chain, int n, struct rb_run *r,
						      const int touched)
{
	struct ibv_send_wr *from = &chain[s->list - n], *bad = NULL;
	int err;

	if (touched)
		touch(s, t, from, n, r);
	err = ibv_post_send(t->qp, from, &bad);

	if (__builtin_expect(!err, 1))
		return n;
	if (err == ENOMEM || err == -ENOMEM)
		r->enomem++;
	else
		rb_verb_error(r, RB_CALL_POST_SEND, err < 0 ? -err : err);
	return bad ? (int)(bad - from) : 0;
}

/* Fills one QP as far as depth and quota allow. Returns messages posted. */
static inline __attribute__((always_inline)) uint64_t fill(struct source *s, struct tx *t, struct rb_run *r, const int touched)
{
	uint64_t room = s->depth - (t->posted - t->completed), left = t->quota - t->posted, before = t->posted;

	if (left < room)
		room = left;
	if (touched && s->allowed != UINT64_MAX) {
		uint64_t may = s->allowed > s->all_posted ? s->allowed - s->all_posted : 0;

		if (may < room)
			room = may;
	}
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
		if (!touched && !t->skip && !last) {
			int all_signaled = s->chains_per_signal == 1;
			struct ibv_send_wr *chain = all_signaled ? t->signaled : t->plain;
			uint64_t chains = (room - (room == left)) / (uint64_t)s->list;

			if (!all_signaled && chains > (uint64_t)(t->until_signal - 1))
				chains = (uint64_t)(t->until_signal - 1);
			for (; many < chains; many++) {
				got = post(s, t, chain, s->list, r, 0);
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
		got = post(s, t, last || t->until_signal == 1 ? t->signaled : t->plain, n, r, touched);
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
static inline __attribute__((always_inline)) uint64_t complete(struct source *s, struct tx *t, struct rb_run *r, const int touched)
{
	uint64_t group = (uint64_t)(s->chains_per_signal * s->list), out = t->signaled_posted - t->completed;

	if (out < group)
		group = out;
	if (touched && r->verify)
		check(s, t, group, r);
	t->completed += group;
	return group;
}

/* Polls all CQs once. Returns completions seen, -1 on a verb failure; *done grows by messages. */
static inline __attribute__((always_inline)) int drain_cqs(struct source *s, struct rb_run *r, uint64_t *done, const int touched)
{
	const struct rb_lane *lane = &s->e->lane[r->lane];
	struct ibv_wc wc[RB_POLL_BATCH];
	int seen = 0;

	for (int c = lane->cq; c < lane->cq + lane->cqs; c++) {
		int n = ibv_poll_cq(s->e->scq[c], RB_POLL_BATCH, wc);

		if (__builtin_expect(n < 0, 0)) {
			rb_verb_error(r, RB_CALL_POLL, -n);
			return -1;
		}
		for (int i = 0; i < n; i++) {
			if (__builtin_expect(wc[i].status != IBV_WC_SUCCESS, 0)) {
				rb_wc_error(r, &wc[i]);
				continue;
			}
			*done += complete(s, &s->tx[wc[i].wr_id - (uint64_t)lane->qp], r, touched);
		}
		seen += n;
	}
	return seen;
}

/* Whether the time is over, or, for a run without a time or a count of its own, it was told that it is. */
static inline int enough(const struct rb_run *r, struct rb_ctl *ctl, uint64_t now)
{
	if (r->duration_ns)
		return now >= r->start_ns + r->duration_ns;
	return !r->iterations && atomic_load_explicit(&ctl->expect, memory_order_relaxed) != UINT64_MAX;
}

/* Ends the quota of every QP here, with a last signaled message where unsignaled ones are out. Returns messages still out. */
static uint64_t cut(struct source *s)
{
	uint64_t out = 0;

	for (int q = 0; q < s->qps; q++) {
		struct tx *t = &s->tx[q];

		t->quota = t->posted + (t->signaled_posted < t->posted || t->skip);
		out += t->quota - t->completed;
	}
	return out;
}

static inline __attribute__((always_inline)) void source_loop(struct source *s, struct rb_run *r, struct rb_ctl *ctl, const int touched)
{
	struct rb_stamps st = rb_stamps_for(r, ctl, 512);
	struct rb_watch w;
	uint64_t done = 0, all = r->iterations ? r->iterations * (uint64_t)s->qps : UINT64_MAX;
	int measuring = 1, turn = 0;

	rb_start(r, &w, ctl);
	rb_watch_cqs(&w, s->e, 0);
	s->pace_ns = r->start_ns;
	while (done < all) {
		int seen;

		if (touched && r->rate > 0) {
			pace(s, r, rb_watch_ns(&w));
			turn++; /* else the first QP would take all that is allowed */
		}
		for (int i = 0; i < s->qps; i++) {
			int q = touched ? (i + turn) % s->qps : i;
			uint64_t n = fill(s, &s->tx[q], r, touched);

			if (touched)
				s->all_posted += n;
		}
		seen = drain_cqs(s, r, &done, touched);
		if (__builtin_expect(r->end != RB_END_DONE, 0))
			break;
		if (seen) {
			rb_progress(&w);
			if (measuring && (rb_stamp_due(&st, done) || done == all)) {
				rb_stamp(&w, &st, done);
				if (enough(r, ctl, r->last_ns)) {
					measuring = 0;
					all = done + cut(s);
				}
			}
			if (rb_busy(&w))
				break;
		} else {
			st.idle = 1;
			if (touched && s->all_posted == done) { /* held back by the rate: no completion is due, nor an event */
				w.idle_since = 0;
				if (__builtin_expect(++w.spins % RB_LOOK_EVERY == 0, 0) && rb_watch_look(&w, 1))
					break;
			} else if (rb_idle(&w)) {
				break;
			}
			/* A link that went silent must not stretch the window. */
			if (measuring && rb_looked(&w) && enough(r, ctl, rb_watch_ns(&w))) {
				measuring = 0;
				all = done + cut(s);
			}
		}
	}
	rb_finish(r);
	/* What a failed QP flushes is counted, and may hold the error itself where another QP's flush came first. */
	while (r->end == RB_END_WC && drain_cqs(s, r, &done, 0) > 0)
		;
	r->completed = done;
	atomic_store_explicit(&ctl->lane[r->lane].done, done, memory_order_relaxed);
}

/* The last value an atomic fetched tells whether all of them took effect, one after the other. */
static void check_counters(struct source *s, struct rb_run *r)
{
	for (int i = 0; i < s->qps; i++) {
		struct tx *t = &s->tx[i];

		if (t->posted && t->completed == t->posted) {
			t->completed--;
			check(s, t, 1, r);
			t->completed++;
		}
	}
}

void rb_run_bw_source(struct rb_ep *e, struct rb_run *r, struct rb_ctl *ctl)
{
	struct source s;
	int err = source_init(&s, e, r);

	if (err) {
		rb_verb_error(r, RB_CALL_NONE, -err);
		return;
	}
	if (s.numbered || r->rate > 0 || r->verify || e->a.mixed || e->ring.slots > 1 || e->a.op == RB_CMP_SWAP)
		source_loop(&s, r, ctl, 1);
	else
		source_loop(&s, r, ctl, 0);
	if (rb_is_atomic(e) && r->end == RB_END_DONE)
		check_counters(&s, r);
	for (int i = 0; i < s.qps; i++) {
		r->posted += s.tx[i].posted;
		e->state[s.tx[i].index].sent += s.tx[i].posted;
		e->state[s.tx[i].index].atomics += s.tx[i].posted;
	}
	source_free(&s);
}
