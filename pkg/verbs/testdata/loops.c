/* Drives the data path loops on a fake provider, for what hardware won't do on demand. Built and run by TestLoops under
 * the address and undefined-behaviour sanitizers. Prints one line a case; exits 1 if any failed. */
#include "../rb_run.h"
#include "../rb_memory.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_QPS = 64, CQ_LEN = 1 << 16, RING_HALF = 12 << 10, RING_REMOTE = 1 << 30 };

struct queue {
	struct ibv_wc wc[CQ_LEN];
	unsigned head, tail;
};

/* The device's books: it frees send queue slots only when a signaled completion that covers them is polled. */
static struct {
	struct queue sq, rq;
	int depth, out[MAX_QPS], rx[MAX_QPS];
	int group[MAX_QPS]; /* slots that the next signaled completion covers */
	uint64_t posts, delivered, recvs;
	/* knobs */
	int short_poll;
	unsigned enomem_every, partial_every;
	uint64_t fail_at, einval_at, poll_fail_at, polls;
	enum ibv_wc_status status;
	int failed, dead, slow_polls;
	uint8_t *echo_to;
	size_t echo_at;
	int echo_message;
	struct rb_ring ring; /* the next message must come from, and go to, the next slot of it */
	uint64_t slot[MAX_QPS], off_ring;
	uint8_t *ring_buf;
	unsigned drop_every; /* of answers */
	uint64_t sends, reads, counter, wrong_at; /* what an atomic works on, and the one that it gets wrong */
} dev;

static void push(struct queue *q, struct ibv_wc wc) { q->wc[q->tail++ % CQ_LEN] = wc; }

static int qp_index(const struct ibv_qp *qp) { return (int)qp->qp_num - 100; }

static int fake_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	int q = qp_index(qp);

	for (int n = 0; wr; wr = wr->next, n++) {
		dev.posts++;
		if (dev.out[q] >= dev.depth || (dev.enomem_every && dev.posts % dev.enomem_every == 0) ||
		    (dev.partial_every && n > 0 && dev.posts % dev.partial_every == 0)) {
			*bad = wr;
			return ENOMEM;
		}
		if (dev.posts == dev.einval_at) {
			*bad = wr;
			return EINVAL;
		}
		if (dev.ring.slots) {
			uint64_t at = dev.slot[q]++ % dev.ring.slots * dev.ring.step, half = (uint64_t)(2 * q) * RING_HALF;

			dev.off_ring += wr->sg_list->addr != (uintptr_t)dev.ring_buf + half + at || wr->wr.rdma.remote_addr != RING_REMOTE + half + RING_HALF + at;
		}
		dev.out[q]++;
		dev.group[q]++;
		if (dev.posts == dev.fail_at)
			dev.failed = 1;
		if (dev.failed) {
			push(&dev.sq, (struct ibv_wc){ .wr_id = wr->wr_id, .status = dev.failed == 1 ? dev.status : IBV_WC_WR_FLUSH_ERR, .vendor_err = 0x81 });
			dev.failed = 2;
			continue;
		}
		dev.delivered++;
		dev.reads += wr->opcode == IBV_WR_RDMA_READ;
		if (wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP) {
			uint64_t was = dev.counter + (dev.delivered == dev.wrong_at);

			memcpy((void *)(uintptr_t)wr->sg_list->addr, &was, 8);
			if (wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
				dev.counter += wr->wr.atomic.compare_add;
			else if (dev.counter == wr->wr.atomic.compare_add)
				dev.counter = wr->wr.atomic.swap;
		}
		if (wr->send_flags & IBV_SEND_SIGNALED) {
			push(&dev.sq, (struct ibv_wc){ .wr_id = wr->wr_id, .byte_len = (uint32_t)dev.group[q], .qp_num = qp->qp_num });
			dev.group[q] = 0;
		}
		if (dev.dead || (dev.drop_every && ++dev.sends % dev.drop_every == 0))
			continue;
		if (dev.echo_to)
			dev.echo_to[dev.echo_at] = *(uint8_t *)(uintptr_t)(wr->sg_list->addr + wr->sg_list->length - 1);
		if (dev.echo_message && dev.rx[q] > 0) {
			dev.rx[q]--;
			push(&dev.rq, (struct ibv_wc){ .wr_id = (uint64_t)q, .byte_len = wr->sg_list->length, .imm_data = wr->imm_data, .wc_flags = IBV_WC_WITH_IMM });
		}
	}
	return 0;
}

static int fake_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	(void)bad;
	for (; wr; wr = wr->next) {
		dev.rx[qp_index(qp)]++;
		dev.recvs++;
	}
	return 0;
}

static int fake_poll(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	struct queue *q = cq->cq_context;
	int got = 0;

	if (++dev.polls == dev.poll_fail_at)
		return -5;
	if (dev.slow_polls && dev.polls % (unsigned)dev.slow_polls)
		return 0;
	if (dev.short_poll && n > 1)
		n = 1;
	for (; got < n && q->head != q->tail; got++) {
		wc[got] = q->wc[q->head++ % CQ_LEN];
		if (q == &dev.sq && wc[got].status == IBV_WC_SUCCESS)
			dev.out[wc[got].wr_id] -= (int)wc[got].byte_len;
	}
	return got;
}

static struct ibv_context ctx = { .ops = { .post_send = fake_post_send, .post_recv = fake_post_recv, .poll_cq = fake_poll } };
static struct ibv_cq scq = { .context = &ctx, .cq_context = &dev.sq }, rcq = { .context = &ctx, .cq_context = &dev.rq };
static struct ibv_cq *scqs[] = { &scq }, *rcqs[] = { &rcq };
static struct ibv_qp qps[MAX_QPS];
static struct ibv_qp *qp_list[MAX_QPS];
static struct ibv_mr mr;
static struct rb_qp_state state[MAX_QPS];
static struct rb_lane lane;
static uint32_t qpn[MAX_QPS];
static uint64_t samples[1024];
static int64_t hist[RB_HIST_LEN];

static struct rb_ep endpoint(enum rb_op op, int n, int depth, int list, int mod)
{
	struct rb_ep e = {
		.ctx = &ctx, .mr = &mr, .qp = qp_list, .scq = scqs, .rcq = rcqs, .stride = 4096, .buf_len = (size_t)n * 8192, .qps = n, .ncq = 1,
		.remote_qpn = qpn, .state = state, .lane = &lane, .ring = { .slots = 1, .step = 4096 }, .rx_ring = { .slots = 1, .step = 4096 }, .samples = samples,
		.a = { .op = op, .qps = n, .lanes = 1, .tx_depth = depth, .rx_depth = 8, .cq_mod = mod, .post_list = list, .msg_max = 4096, .samples = 1024 },
		.c = { .stride = 4096 },
	};

	memset(&dev, 0, sizeof dev);
	memset(state, 0, sizeof state);
	lane = (struct rb_lane){ .qps = n, .cqs = 1 };
	memset(hist, 0, sizeof hist);
	dev.depth = depth;
	dev.status = IBV_WC_RETRY_EXC_ERR;
	e.buf = calloc(1, e.buf_len);
	for (int i = 0; i < n; i++) {
		qps[i] = (struct ibv_qp){ .context = &ctx, .qp_num = (uint32_t)(100 + i) };
		qp_list[i] = &qps[i];
	}
	return e;
}

static struct rb_run run_for(uint64_t iterations)
{
	return (struct rb_run){ .size = 64, .iterations = iterations, .deadline_ns = rb_now_ns() + UINT64_C(20000000000), .interval_ns = 10000000, .scale = 1 };
}

static int failures;

static void expect(int ok, const char *what, const char *why)
{
	if (!ok) {
		printf("FAIL %s: %s\n", what, why);
		failures++;
	}
}

/* Whatever the shape, every message posted completes, once. */
static void source_matrix(void)
{
	static const int nqps[] = { 1, 3, 16 }, depths[] = { 1, 7, 128 }, lists[] = { 1, 4, 16 }, mods[] = { 1, 2, 8 };
	static const uint64_t counts[] = { 1, 5, 100, 1013 };

	for (int i = 0; i < 3 * 3 * 3 * 3 * 4 * 4; i++) {
		int q = nqps[i % 3], depth = depths[i / 3 % 3], list = lists[i / 9 % 3], mod = list * mods[i / 27 % 3];
		uint64_t n = counts[i / 81 % 4], all = n * (uint64_t)q;
		struct rb_ctl *ctl = rb_ctl_new();
		struct rb_ep e;
		struct rb_run r = run_for(n);
		char what[128];

		if (mod > depth) {
			rb_ctl_free(ctl);
			continue;
		}
		e = endpoint(RB_WRITE, q, depth, list, mod);
		dev.short_poll = i / 324 % 2;
		dev.enomem_every = i / 648 % 2 ? 37 : 0;
		dev.partial_every = i / 648 % 2 ? 29 : 0;
		snprintf(what, sizeof what, "source qps %d depth %d list %d mod %d count %lu knobs %d", q, depth, list, mod, (unsigned long)n, i / 324);
		rb_run_bw_source(&e, &r, ctl);
		expect(r.end == RB_END_DONE, what, "did not end as done");
		expect(r.posted == all && r.completed == all && dev.delivered == all, what, "posted, completed and delivered differ");
		expect(dev.sq.head == dev.sq.tail, what, "completions left behind");
		expect(r.last_done <= all && r.first_done <= r.last_done && rb_ctl_done(ctl) == all, what, "stamps out of order");
		free(e.buf);
		rb_ctl_free(ctl);
	}
}

static void source_duration(void)
{
	struct rb_ctl *ctl = rb_ctl_new();
	struct rb_ep e = endpoint(RB_WRITE, 2, 128, 1, 64);
	struct rb_run r = run_for(0);

	r.duration_ns = 30000000;
	rb_run_bw_source(&e, &r, ctl);
	expect(r.end == RB_END_DONE && r.posted == r.completed && r.posted == dev.delivered, "duration", "messages left behind");
	expect(r.last_ns >= r.start_ns + r.duration_ns, "duration", "ended early");
	expect(r.max_rate >= r.min_rate && r.min_rate > 0, "duration", "no intervals");
	free(e.buf);
	rb_ctl_free(ctl);
}

static void source_errors(void)
{
	struct rb_ctl *ctl = rb_ctl_new();
	struct rb_ep e = endpoint(RB_WRITE, 1, 64, 1, 8);
	struct rb_run r = run_for(1000);

	dev.fail_at = 500;
	rb_run_bw_source(&e, &r, ctl);
	expect(r.end == RB_END_WC && r.wc_status == IBV_WC_RETRY_EXC_ERR && r.wc_vendor_err == 0x81, "error", "the first error was not kept");
	expect(r.flushed > 0 && r.posted == r.completed + r.flushed + 1 + 499 % 8, "error", "flushes were not told apart");
	free(e.buf);

	/* With another QP's flush ahead in the queue the error itself still wins. */
	e = endpoint(RB_WRITE, 1, 64, 1, 8);
	r = run_for(1000);
	push(&dev.sq, (struct ibv_wc){ .status = IBV_WC_WR_FLUSH_ERR });
	push(&dev.sq, (struct ibv_wc){ .status = IBV_WC_REM_ACCESS_ERR });
	rb_run_bw_source(&e, &r, ctl);
	expect(r.end == RB_END_WC && r.wc_status == IBV_WC_REM_ACCESS_ERR, "flush first", "the flush hid the error");
	free(e.buf);

	e = endpoint(RB_WRITE, 1, 64, 1, 8);
	r = run_for(1000);
	dev.einval_at = 77;
	rb_run_bw_source(&e, &r, ctl);
	expect(r.end == RB_END_ERRNO && r.err == EINVAL && r.call == RB_CALL_POST_SEND, "EINVAL", "the errno was lost");
	free(e.buf);

	e = endpoint(RB_WRITE, 1, 64, 1, 8);
	r = run_for(1000);
	dev.poll_fail_at = 3;
	rb_run_bw_source(&e, &r, ctl);
	expect(r.end == RB_END_ERRNO && r.err == 5 && r.call == RB_CALL_POLL, "poll", "a failed poll was taken for an empty one");
	free(e.buf);
	rb_ctl_free(ctl);
}

/* A device that never completes: the loop's own deadline, its stall limit, and a stop from another thread. */
static void *stop_soon(void *ctl)
{
	usleep(20000);
	rb_ctl_stop(ctl);
	return NULL;
}

static void endings(void)
{
	static void (*const loops[])(struct rb_ep *, struct rb_run *, struct rb_ctl *) = {
		rb_run_bw_source, rb_run_bw_sink, rb_run_lat_operation, rb_run_lat_memory, rb_run_lat_message,
	};
	static const enum rb_op ops[] = { RB_WRITE, RB_SEND, RB_READ, RB_WRITE, RB_SEND };
	static const enum rb_end ends[] = { RB_END_DEADLINE, RB_END_STALLED, RB_END_STOPPED };

	for (int l = 0; l < 5; l++)
		for (int how = 0; how < 3; how++) {
			struct rb_ctl *ctl = rb_ctl_new();
			struct rb_ep e = endpoint(ops[l], 1, 4, 1, 1);
			struct rb_run r = run_for(100);
			pthread_t t;
			char what[64];

			snprintf(what, sizeof what, "loop %d ending %d", l, how);
			dev.dead = 1;
			dev.slow_polls = 1 << 30;
			r.hist = hist;
			if (how == 0)
				r.deadline_ns = rb_now_ns() + 20000000;
			if (how == 1)
				r.stall_ns = 20000000;
			if (how == 2)
				pthread_create(&t, NULL, stop_soon, ctl);
			loops[l](&e, &r, ctl);
			if (how == 2)
				pthread_join(t, NULL);
			expect(r.end == ends[how], what, "ended otherwise");
			expect(r.end_ns - r.start_ns < UINT64_C(5000000000), what, "took far too long");
			free(e.buf);
			rb_ctl_free(ctl);
		}
}

static uint64_t hist_sum(void)
{
	uint64_t n = 0;

	for (int i = 0; i < RB_HIST_LEN; i++)
		n += (uint64_t)hist[i];
	return n;
}

static void latency(void)
{
	static const uint64_t counts[] = { 1, 2, 1000, 70001 };

	for (int op = 0; op < 3; op++)
		for (int c = 0; c < 4; c++)
			for (int depth = 1; depth <= 16; depth += 5) {
				struct rb_ctl *ctl = rb_ctl_new();
				struct rb_ep e = endpoint(op == 0 ? RB_WRITE : op == 1 ? RB_READ : RB_SEND, 1, depth, 1, 1);
				char what[64];

				dev.echo_to = op == 0 ? rb_rx_buf(&e, 0) : NULL;
				dev.echo_at = 63;
				dev.echo_message = op == 2;
				snprintf(what, sizeof what, "latency op %d count %lu depth %d", op, (unsigned long)counts[c], depth);
				expect(rb_arm(&e, 64, 0) == 0, what, "not armed");
				/* Twice, as warm-up and timed part: the queue must not be short of what the first left unsignaled. */
				for (int pass = 0; pass < 2; pass++) {
					struct rb_run r = run_for(counts[c]);

					r.hist = hist;
					memset(hist, 0, sizeof hist);
					if (op == 0)
						rb_run_lat_memory(&e, &r, ctl);
					else if (op == 1)
						rb_run_lat_operation(&e, &r, ctl);
					else
						rb_run_lat_message(&e, &r, ctl);
					expect(r.end == RB_END_DONE, what, "did not end as done");
					expect(r.posted == counts[c] && r.completed == counts[c], what, "posted and completed differ");
					expect(r.lat_n == counts[c] && hist_sum() == counts[c], what, "samples were lost");
					expect((double)r.lat_min <= r.lat_mean + 1 && r.lat_mean <= (double)r.lat_max + 1, what, "min <= mean <= max does not hold");
				}
				free(e.buf);
				rb_ctl_free(ctl);
			}
}

/* The responder's answers: as many as it was told to expect, and no more. */
static void pong(void)
{
	struct rb_ctl *ctl = rb_ctl_new();
	struct rb_ep e = endpoint(RB_SEND, 1, 16, 1, 1);
	struct rb_run r = run_for(0);

	rb_arm(&e, 64, 0);
	for (int i = 0; i < 5; i++) {
		dev.rx[0]--;
		push(&dev.rq, (struct ibv_wc){ .byte_len = 64 });
	}
	r.responds = 1;
	rb_ctl_expect(ctl, 5);
	rb_run_lat_message(&e, &r, ctl);
	expect(r.end == RB_END_DONE && r.completed == 5 && dev.delivered == 5, "pong", "did not answer just what came");
	expect(state[0].rx_posted == dev.rx[0] && state[0].rx_posted > 4, "pong", "receives were not replaced");
	free(e.buf);
	rb_ctl_free(ctl);
}

static void sink(void)
{
	struct rb_ctl *ctl = rb_ctl_new();
	struct rb_ep e = endpoint(RB_SEND, 3, 1, 1, 1);
	struct rb_run r = run_for(0);

	rb_arm(&e, 64, 0);
	for (int i = 0; i < 20; i++) {
		push(&dev.rq, (struct ibv_wc){ .wr_id = (uint64_t)(i % 3), .byte_len = 64 });
		dev.rx[i % 3]--;
	}
	rb_ctl_expect(ctl, 20);
	rb_run_bw_sink(&e, &r, ctl);
	expect(r.end == RB_END_DONE && r.received == 20 && r.bytes_received == 20 * 64, "sink", "messages were not counted");
	for (int q = 0; q < 3; q++)
		expect(state[q].rx_posted == dev.rx[q] && state[q].rx_posted > 0, "sink", "receives were not replaced");
	free(e.buf);

	/* Two of what was sent were lost: it ends all the same. */
	e = endpoint(RB_SEND, 1, 1, 1, 1);
	r = run_for(0);
	rb_arm(&e, 64, 0);
	push(&dev.rq, (struct ibv_wc){ .byte_len = 64 });
	dev.rx[0]--;
	rb_ctl_expect(ctl, 3);
	rb_run_bw_sink(&e, &r, ctl);
	expect(r.end == RB_END_DONE && r.received == 1, "lossy sink", "waited for what never came, or made it up");
	free(e.buf);
	rb_ctl_free(ctl);
}

/* The layout is HdrHistogram's: a value and its slot's range agree to 3 digits, slots never overlap. */
static void histogram(void)
{
	unsigned last = 0;

	for (uint64_t v = 1; v < RB_HIST_HIGHEST; v += v / 700 + 1) {
		unsigned i = rb_hist_index(v);

		expect(i >= last && i < RB_HIST_LEN, "histogram", "index out of order or range");
		last = i;
	}
	expect(rb_hist_index(2047) == 2047 && rb_hist_index(2048) == 2048 && rb_hist_index(4095) == 3071, "histogram", "slots are not HdrHistogram's");
}

/* Successive messages are in successive slots, at both ends, also where a full queue took a part of a list. */
static void ring(void)
{
	for (int knobs = 0; knobs < 2; knobs++)
		for (int list = 1; list <= 4; list++) {
			struct rb_ctl *ctl = rb_ctl_new();
			struct rb_ep e = endpoint(RB_WRITE, 3, 64, list, 4 * list);
			struct rb_run r = run_for(1013);
			char what[64];

			snprintf(what, sizeof what, "ring list %d knobs %d", list, knobs);
			free(e.buf);
			e.stride = e.c.stride = RING_HALF;
			e.buf_len = 6 * RING_HALF;
			e.buf = dev.ring_buf = calloc(1, e.buf_len);
			e.a.ring = 3 * RING_HALF;
			e.c.addr = RING_REMOTE;
			r.size = 100;
			dev.ring = e.ring = rb_ring_of(&e, r.size);
			dev.enomem_every = knobs ? 37 : 0;
			dev.partial_every = knobs ? 29 : 0;
			rb_run_bw_source(&e, &r, ctl);
			expect(r.end == RB_END_DONE && dev.delivered == 3 * 1013, what, "did not end as done");
			expect(dev.ring.slots == (RING_HALF - 4160) / 128 + 1, what, "wrong number of slots");
			expect(dev.off_ring == 0, what, "messages beside their slots");
			free(e.buf);
			rb_ctl_free(ctl);
		}
}

/* Numbered arrivals: each counts once, whatever their order. */
static void numbered(void)
{
	static const uint32_t numbers[] = { 7, 8, 8, 10, 9, 7, 5000, 11, 5001, 4999 };
	struct rb_ctl *ctl = rb_ctl_new();
	struct rb_ep e = endpoint(RB_SEND, 1, 1, 1, 1);
	struct rb_run r = run_for(0);

	e.a.transport = RB_UD;
	e.a.rx_depth = 16;
	rb_arm(&e, 64, 0);
	for (unsigned i = 0; i < sizeof numbers / sizeof *numbers; i++)
		push(&dev.rq, (struct ibv_wc){ .byte_len = 104, .imm_data = htonl(numbers[i]), .wc_flags = IBV_WC_WITH_IMM });
	push(&dev.rq, (struct ibv_wc){ .byte_len = 50 }); /* of the run before, which had another size */
	rb_ctl_expect(ctl, 7);
	rb_run_bw_sink(&e, &r, ctl);
	/* 11 is out of the window by then: it can't be told from one that came before. */
	expect(r.end == RB_END_DONE && r.received == 7 && r.duplicates == 3 && r.reordered == 2, "numbered", "wrong counts");
	expect(r.bytes_received == 7 * 64 && r.late == 1, "numbered", "counted what is not of this run");
	free(e.buf);
	rb_ctl_free(ctl);
}

/* Pings that are lost are counted and not waited for, and an answer that comes late is not the next one's. */
static void lossy(void)
{
	struct rb_ctl *ctl = rb_ctl_new();
	struct rb_ep e = endpoint(RB_SEND, 1, 16, 1, 1);
	struct rb_run r = run_for(200);

	e.a.transport = RB_UC;
	e.a.rx_depth = 16;
	rb_arm(&e, 64, 0);
	dev.echo_message = 1;
	dev.drop_every = 60;
	push(&dev.rq, (struct ibv_wc){ .byte_len = 64, .imm_data = htonl(12345), .wc_flags = IBV_WC_WITH_IMM });
	dev.rx[0]--;
	r.hist = hist;
	rb_run_lat_message(&e, &r, ctl);
	expect(r.end == RB_END_DONE && r.posted == 200 && r.lost == 3 && r.completed == 197, "lossy", "wrong counts");
	expect(r.lat_n == 197 && hist_sum() == 197 && r.late == 1, "lossy", "samples of what was lost, or a late answer taken");
	free(e.buf);
	rb_ctl_free(ctl);
}

/* A rate is never exceeded, and reads are mixed in by their share. */
static void paced_and_mixed(void)
{
	for (int list = 1; list <= 4; list += 3) {
		struct rb_ctl *ctl = rb_ctl_new();
		struct rb_ep e = endpoint(RB_WRITE, 3, 64, list, list);
		struct rb_run r = run_for(0);

		r.rate = 1e5;
		r.duration_ns = 50000000;
		rb_run_bw_source(&e, &r, ctl);
		expect(r.end == RB_END_DONE && r.posted == r.completed, "paced", "messages left behind");
		expect((double)r.posted <= r.rate * (double)(r.end_ns - r.start_ns) / 1e9 + 2 * list, "paced", "faster than allowed");
		expect(r.posted > 1000, "paced", "hardly anything was sent");
		free(e.buf);

		e = endpoint(RB_WRITE, 2, 64, list, 4 * list);
		e.a.mixed = 1;
		r = run_for(1000);
		r.read_permille = 300;
		dev.partial_every = 29;
		rb_run_bw_source(&e, &r, ctl);
		expect(r.end == RB_END_DONE && dev.delivered == 2000 && dev.reads == 600, "mixed", "wrong share of reads");
		free(e.buf);
		rb_ctl_free(ctl);
	}
}

/* Atomics follow one another on one counter; a value that does not fit is found. */
static void atomics(void)
{
	static const enum rb_op ops[] = { RB_FETCH_ADD, RB_CMP_SWAP };

	for (int i = 0; i < 2; i++)
		for (int latency = 0; latency < 2; latency++)
			for (uint64_t wrong = 0; wrong <= 200; wrong += 200) {
				struct rb_ctl *ctl = rb_ctl_new();
				struct rb_ep e = endpoint(ops[i], 1, 16, 1, latency ? 1 : 4);
				char what[64];

				snprintf(what, sizeof what, "atomic %d latency %d wrong %lu", i, latency, (unsigned long)wrong);
				for (int pass = 0; pass < 2; pass++) {
					struct rb_run r = run_for(100);

					r.size = 8;
					r.hist = hist;
					dev.wrong_at = pass ? wrong : 0;
					if (latency)
						rb_run_lat_operation(&e, &r, ctl);
					else
						rb_run_bw_source(&e, &r, ctl);
					if (pass && wrong) {
						expect(r.end == RB_END_CORRUPT && r.bad_want == 199 && r.bad_got == 200, what, "a wrong value went unseen");
						break;
					}
					expect(r.end == RB_END_DONE && r.completed == 100 && r.verified >= (latency ? 100 : 1), what, "not done, or not verified");
					expect(dev.counter == (uint64_t)(pass + 1) * 100, what, "not each took effect");
				}
				free(e.buf);
				rb_ctl_free(ctl);
			}
}

/* What arrives is compared to what was sent, byte for byte. */
static void verified(void)
{
	static const uint64_t sizes[] = { 8, 9, 64, 100, 4095 };

	for (int i = 0; i < 5; i++)
		for (int bad = 0; bad < 2; bad++) {
			struct rb_ctl *ctl = rb_ctl_new();
			struct rb_ep e = endpoint(RB_SEND, 1, 1, 1, 1);
			struct rb_run r = run_for(0);
			uint64_t size = sizes[i];

			free(e.buf);
			e.stride = e.c.stride = 5 * 4096;
			e.buf = calloc(1, 2 * e.stride);
			e.a.ring = 2 * e.stride;
			e.a.slots = 4;
			e.a.rx_depth = 4;
			rb_arm(&e, size, 1);
			for (uint64_t n = 0; n < 4; n++) {
				rb_pattern_fill(rb_receive_buf(&e, 0, n), size, 0, n);
				push(&dev.rq, (struct ibv_wc){ .byte_len = (uint32_t)size });
				dev.rx[0]--;
			}
			if (bad)
				rb_receive_buf(&e, 0, 2)[size - 1] ^= 0x10;
			r.size = size;
			r.verify = 1;
			rb_ctl_expect(ctl, 4);
			rb_run_bw_sink(&e, &r, ctl);
			expect(bad ? r.end == RB_END_CORRUPT && r.bad_message == 2 && r.bad_at == (size - 1) / 8 * 8 : r.end == RB_END_DONE && r.verified == 4,
			       "verified", bad ? "a wrong byte went unseen" : "what is right was refused");
			free(e.buf);
			rb_ctl_free(ctl);
		}
}

/* Each thread has its own QPs, and touches no other's. */
static void lanes(void)
{
	struct rb_lane two[] = { { .qps = 2, .cqs = 1 }, { .qp = 2, .qps = 1, .cqs = 1 } };
	struct rb_ctl *ctl = rb_ctl_new();
	struct rb_ep e = endpoint(RB_WRITE, 3, 16, 1, 4);

	e.lane = two;
	for (int l = 0; l < 2; l++) {
		struct rb_run r = run_for(100);

		r.lane = l;
		rb_run_bw_source(&e, &r, ctl);
		expect(r.end == RB_END_DONE && r.completed == (l ? 100 : 200), "lanes", "wrong count");
		expect(state[2].sent == (l ? 100 : 0) && state[0].sent == 100, "lanes", "another's QP was used");
	}
	expect(rb_ctl_done(ctl) == 300, "lanes", "wrong sum");
	free(e.buf);
	rb_ctl_free(ctl);
}

int main(void)
{
	rb_clock_init(0);
	source_matrix();
	source_duration();
	source_errors();
	endings();
	latency();
	pong();
	sink();
	histogram();
	ring();
	numbered();
	lossy();
	paced_and_mixed();
	atomics();
	verified();
	lanes();
	if (!failures)
		printf("all passed\n");
	return failures != 0;
}
