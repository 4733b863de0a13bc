/* Two UD echoes on a fake device with a network between them that loses, repeats, reorders, delays and forges, and with clocks of
 * its own. Built and run by TestPing under sanitizers. Prints one line a case; exits 1 if any failed. */
#define _GNU_SOURCE
#include "../rb_clock.h"
#include "../rb_ping.h"

#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* ---- the device ---- */

enum { NODES = 2, QUEUE = 1024 };

struct queue {
	struct ibv_wc wc[QUEUE];
	uint64_t hw[QUEUE];
	unsigned head, tail;
};

struct packet {
	uint8_t data[RB_PING_MAX];
	uint32_t len, src, dst;
};

static struct node {
	struct verbs_context vc;
	struct ibv_pd pd;
	struct ibv_mr mr;
	struct ibv_comp_channel channel;
	struct ibv_qp qp;
	struct ibv_cq_ex cq[2]; /* send, receive */
	struct queue q[2];
	int ncq, at[2], armed, ahs;
	struct ibv_recv_wr *recv[QUEUE];
	unsigned rhead, rtail;
	struct rb_ping *p;
	pthread_t thread;
} node[NODES];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
	int hardware, zero_stamps;
	int drop_every, repeat_every, swap_every, forge_every, bad_stamp_every;
	int mute;              /* nothing arrives */
	uint64_t send_delay_ns; /* of answers, from posting to the completion, by the clocks of the devices */
	int fail_sends;
	uint64_t count;
	struct packet held;
	int holding;
	uint64_t skew; /* of the second device's clock */
} knob;

static struct node *of_context(struct ibv_context *c) { return (struct node *)((char *)c - offsetof(struct node, vc.context)); }
static uint64_t clock_of(const struct node *n) { return (rb_now_ns() / 8 + (n == &node[1] ? knob.skew : 0)) & 0xffffffffffff; }

static void complete(struct node *n, int which, struct ibv_wc wc)
{
	struct queue *q = &n->q[which];

	/* What the second node sends leaves, and arrives, later than it was posted. */
	q->hw[q->tail % QUEUE] = knob.zero_stamps ? 0 : (clock_of(n) + ((n == &node[1]) == (which == 0) ? knob.send_delay_ns / 8 : 0)) & 0xffffffffffff;
	q->wc[q->tail++ % QUEUE] = wc;
	if (which == 1 && n->armed) {
		uint64_t one = 1;

		n->armed = 0;
		if (write(n->channel.fd, &one, sizeof one) != sizeof one)
			abort();
	}
}

static void arrive(const struct packet *k)
{
	for (int i = 0; i < NODES; i++) {
		struct node *n = &node[i];
		struct ibv_recv_wr *wr;
		uint32_t done = 0, len = k->len + 40;

		if (n->qp.qp_num != k->dst || n->rhead == n->rtail)
			continue;
		wr = n->recv[n->rhead++ % QUEUE];
		for (int s = 0; s < wr->num_sge && done < len; s++) {
			uint32_t m = wr->sg_list[s].length < len - done ? wr->sg_list[s].length : len - done, grh = done < 40 ? 40 : 0;

			if (s == 0) /* the rest is padding in memory that all datagrams share, and that nobody looks at */
				memcpy((uint8_t *)(uintptr_t)wr->sg_list[s].addr + grh, k->data + done + grh - 40, m - grh);
			done += m;
		}
		complete(n, 1, (struct ibv_wc){ .wr_id = wr->wr_id, .byte_len = len, .src_qp = k->src });
	}
}

static int fake_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct node *n = of_context(qp->context);
	struct packet k = { .src = qp->qp_num, .dst = wr->wr.ud.remote_qpn };
	struct rb_ping_header *h = (struct rb_ping_header *)k.data;

	(void)bad;
	for (int i = 0; i < wr->num_sge; i++) {
		if (i == 0)
			memcpy(k.data + k.len, (void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
		k.len += wr->sg_list[i].length;
	}
	pthread_mutex_lock(&lock);
	knob.count++;
#define EVERY(what) (knob.what && knob.count % (unsigned)knob.what == 0)
	if (knob.fail_sends) {
		complete(n, 0, (struct ibv_wc){ .wr_id = wr->wr_id, .status = IBV_WC_LOC_QP_OP_ERR, .vendor_err = 0x77 });
		pthread_mutex_unlock(&lock);
		return 0;
	}
	complete(n, 0, (struct ibv_wc){ .wr_id = wr->wr_id });
	if (h->type == RB_PING_ANSWER && EVERY(forge_every)) {
		struct packet forged = k;

		((struct rb_ping_header *)forged.data)->nonce ^= 1;
		arrive(&forged);
	}
	if (h->type == RB_PING_ANSWER && EVERY(bad_stamp_every))
		h->stamp ^= 1;
	if (!knob.mute && !EVERY(drop_every)) {
		if (EVERY(swap_every) && !knob.holding) {
			knob.held = k;
			knob.holding = 1;
		} else {
			arrive(&k);
			if (EVERY(repeat_every))
				arrive(&k);
			if (knob.holding)
				arrive(&knob.held);
			knob.holding = 0;
		}
	}
	pthread_mutex_unlock(&lock);
	return 0;
}

static int fake_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct node *n = of_context(qp->context);

	(void)bad;
	pthread_mutex_lock(&lock);
	n->recv[n->rtail++ % QUEUE] = wr;
	pthread_mutex_unlock(&lock);
	return 0;
}

static int which_cq(const struct ibv_cq *cq) { return (int)(uintptr_t)cq->cq_context; }

static int fake_poll(struct ibv_cq *cq, int cap, struct ibv_wc *wc)
{
	struct queue *q = &of_context(cq->context)->q[which_cq(cq)];
	int got = 0;

	pthread_mutex_lock(&lock);
	for (; got < cap && q->head != q->tail; got++)
		wc[got] = q->wc[q->head++ % QUEUE];
	pthread_mutex_unlock(&lock);
	return got;
}

static int fake_notify(struct ibv_cq *cq, int solicited)
{
	(void)solicited;
	pthread_mutex_lock(&lock);
	of_context(cq->context)->armed = 1;
	pthread_mutex_unlock(&lock);
	return 0;
}

/* The extended CQ. */
static int ex_next(struct ibv_cq_ex *ex)
{
	struct node *n = of_context(ex->context);
	int w = which_cq(ibv_cq_ex_to_cq(ex)), err = ENOENT;
	struct queue *q = &n->q[w];

	pthread_mutex_lock(&lock);
	if (q->head != q->tail) {
		n->at[w] = (int)(q->head++ % QUEUE);
		ex->wr_id = q->wc[n->at[w]].wr_id;
		ex->status = q->wc[n->at[w]].status;
		err = 0;
	}
	pthread_mutex_unlock(&lock);
	return err;
}
static int ex_start(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *a) { return a->comp_mask ? EINVAL : ex_next(ex); }
static void ex_end(struct ibv_cq_ex *ex) { (void)ex; }
static struct ibv_wc *ex_wc(struct ibv_cq_ex *ex)
{
	int w = which_cq(ibv_cq_ex_to_cq(ex));

	return &of_context(ex->context)->q[w].wc[of_context(ex->context)->at[w]];
}
static uint32_t ex_len(struct ibv_cq_ex *ex) { return ex_wc(ex)->byte_len; }
static uint32_t ex_src(struct ibv_cq_ex *ex) { return ex_wc(ex)->src_qp; }
static uint32_t ex_vendor(struct ibv_cq_ex *ex) { return ex_wc(ex)->vendor_err; }
static uint64_t ex_stamp(struct ibv_cq_ex *ex)
{
	int w = which_cq(ibv_cq_ex_to_cq(ex));

	return of_context(ex->context)->q[w].hw[of_context(ex->context)->at[w]];
}

static struct ibv_cq *new_cq(struct node *n, int stamped)
{
	int w = n->ncq++;
	struct ibv_cq_ex *ex = &n->cq[w];

	*ex = (struct ibv_cq_ex){ .context = &n->vc.context, .cq_context = (void *)(uintptr_t)w };
	if (stamped) {
		ex->start_poll = ex_start;
		ex->next_poll = ex_next;
		ex->end_poll = ex_end;
		ex->read_byte_len = ex_len;
		ex->read_src_qp = ex_src;
		ex->read_vendor_err = ex_vendor;
		ex->read_completion_ts = ex_stamp;
	}
	return ibv_cq_ex_to_cq(ex);
}

static struct ibv_cq_ex *fake_create_cq_ex(struct ibv_context *c, struct ibv_cq_init_attr_ex *a)
{
	if (!knob.hardware || !(a->wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP)) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	return (struct ibv_cq_ex *)new_cq(of_context(c), 1);
}

static int fake_query(struct ibv_context *c, const struct ibv_query_device_ex_input *in, struct ibv_device_attr_ex *a, size_t size)
{
	(void)c, (void)in, (void)size;
	a->hca_core_clock = 125000; /* kHz: 8 ns a tick */
	a->completion_timestamp_mask = 0xffffffffffff;
	return 0;
}

/* What libibverbs would do. */
struct ibv_context *rb_dev_context(struct rb_dev *d);
struct ibv_context *rb_dev_context(struct rb_dev *d) { return (struct ibv_context *)d; }
struct ibv_pd *ibv_alloc_pd(struct ibv_context *c) { return &of_context(c)->pd; }
int ibv_dealloc_pd(struct ibv_pd *pd) { return pd ? 0 : EINVAL; }
#undef ibv_reg_mr
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t len, int access)
{
	struct node *n = (struct node *)((char *)pd - offsetof(struct node, pd));

	n->mr.addr = addr;
	n->mr.length = len;
	return access == IBV_ACCESS_LOCAL_WRITE ? &n->mr : NULL;
}
int ibv_dereg_mr(struct ibv_mr *mr) { return mr ? 0 : EINVAL; }
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c)
{
	struct node *n = of_context(c);

	n->channel.fd = eventfd(0, 0);
	return &n->channel;
}
int ibv_destroy_comp_channel(struct ibv_comp_channel *ch) { return close(ch->fd); }
int ibv_get_cq_event(struct ibv_comp_channel *ch, struct ibv_cq **cq, void **context)
{
	struct node *n = (struct node *)((char *)ch - offsetof(struct node, channel));
	uint64_t v;

	*cq = ibv_cq_ex_to_cq(&n->cq[1]);
	*context = NULL;
	return read(ch->fd, &v, sizeof v) == sizeof v ? 0 : -1;
}
void ibv_ack_cq_events(struct ibv_cq *cq, unsigned n) { (void)cq, (void)n; }
struct ibv_cq *ibv_create_cq(struct ibv_context *c, int cqe, void *context, struct ibv_comp_channel *ch, int vector)
{
	(void)cqe, (void)context, (void)ch, (void)vector;
	return new_cq(of_context(c), 0);
}
int ibv_destroy_cq(struct ibv_cq *cq) { return cq ? 0 : EINVAL; }
struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a)
{
	struct node *n = (struct node *)((char *)pd - offsetof(struct node, pd));

	if (a->qp_type != IBV_QPT_UD)
		return NULL;
	n->qp = (struct ibv_qp){ .context = &n->vc.context, .qp_num = 100 + (uint32_t)(n - node) };
	return &n->qp;
}
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask) { return qp && a && mask ? 0 : EINVAL; }
int ibv_destroy_qp(struct ibv_qp *qp)
{
	qp->qp_num = 0;
	return 0;
}
struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *a)
{
	struct node *n = (struct node *)((char *)pd - offsetof(struct node, pd));

	(void)a;
	__atomic_add_fetch(&n->ahs, 1, __ATOMIC_RELAXED);
	return calloc(1, sizeof(struct ibv_ah));
}
static void forget_ah(struct node *n) { __atomic_sub_fetch(&n->ahs, 1, __ATOMIC_RELAXED); }
int ibv_destroy_ah(struct ibv_ah *ah)
{
	free(ah);
	forget_ah(&node[0]); /* only the sum is looked at */
	return 0;
}

/* ---- the cases ---- */

static const char *name;
static int bad;

#define CHECK(cond, ...)                                  \
	do {                                              \
		if (!(cond)) {                            \
			printf("FAIL %s: %s: ", name, #cond); \
			printf(__VA_ARGS__);              \
			puts("");                         \
			bad = 1;                          \
		}                                         \
	} while (0)

static void *serve(void *p)
{
	rb_ping_serve(p);
	return NULL;
}

static int asks, answers; /* node 0's name of node 1, and the reverse */

static void begin(const char *what, double rate)
{
	struct rb_setup_error why;
	struct rb_ping_path path = { .gid_index = -1 };
	uint64_t nonce = 0;

	name = what;
	memset(node, 0, sizeof node);
	for (int i = 0; i < NODES; i++) {
		struct rb_ping_attr a = { .port = 1, .rate = 1e6, .burst = 1e5 };
		struct node *n = &node[i];

		n->vc.sz = sizeof n->vc;
		n->vc.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
		n->vc.context.ops.post_send = fake_post_send;
		n->vc.context.ops.post_recv = fake_post_recv;
		n->vc.context.ops.poll_cq = fake_poll;
		n->vc.context.ops.req_notify_cq = fake_notify;
		n->vc.create_cq_ex = fake_create_cq_ex;
		n->vc.query_device_ex = fake_query;
		n->pd.context = &n->vc.context;
		if (rb_ping_new((struct rb_dev *)&n->vc.context, &a, &n->p, &why)) {
			printf("FAIL %s: set-up, step %d\n", what, (int)why.step);
			exit(1);
		}
		CHECK(n->p->hardware == knob.hardware, "%d", n->p->hardware);
		if (pthread_create(&n->thread, NULL, serve, n->p))
			exit(1);
	}
	path.qpn = rb_ping_qpn(node[0].p);
	CHECK(rb_ping_add(node[1].p, &path, &nonce, 0x123456789abcdef, rate, rate < 1e6 ? 64 : 1e5, &answers) == 0, "the responder takes in no peer");
	path.qpn = rb_ping_qpn(node[1].p);
	CHECK(rb_ping_add(node[0].p, &path, &nonce, 0, 0, 0, &asks) == 0, "the initiator takes in no peer");
}

static void end(void)
{
	for (int i = 0; i < NODES; i++) {
		rb_ping_stop(node[i].p);
		pthread_join(node[i].thread, NULL);
		CHECK(rb_ping_free(node[i].p) == 0, "node %d is not freed", i);
	}
	CHECK(node[0].ahs + node[1].ahs == 0, "%d address handles are left", node[0].ahs + node[1].ahs);
	if (!bad)
		printf("ok   %s\n", name);
	memset(&knob, 0, sizeof knob);
}

struct sums {
	unsigned n[RB_SHOT_BUSY + 1];
	unsigned answered; /* samples, and what software stamps of a busy machine made impossible */
	uint64_t duplicates, foreign, rtt_max, responder_max, own_max;
	uint32_t sent;
	int hardware;
};

static struct rb_ping_job *start(uint32_t count, uint32_t size, uint64_t gap_ns, uint64_t timeout_ns)
{
	struct rb_ping_job *j = rb_ping_job_new(count);
	int err;

	j->peer = asks;
	j->size = size;
	j->gap_ns = gap_ns;
	j->timeout_ns = timeout_ns;
	j->deadline_ns = rb_now_ns() + 20000000000;
	err = rb_ping_start(node[0].p, j);
	CHECK(err == 0, "job not started: %d", err);
	return j;
}

static struct sums wait_for(struct rb_ping_job *j)
{
	struct sums s = { 0 };

	for (int i = 0; i < 30000 && !rb_ping_job_done(j); i++)
		usleep(1000);
	CHECK(rb_ping_job_done(j), "the job never ends");
	if (!rb_ping_job_done(j))
		exit(1);
	s.sent = j->sent;
	s.duplicates = j->duplicates;
	s.foreign = j->foreign;
	s.hardware = j->hardware;
	for (uint32_t i = 0; i < j->count; i++) {
		const struct rb_ping_shot *x = &j->shot[i];

		s.n[x->state]++;
		s.answered += x->state == RB_SHOT_OK || x->state == RB_SHOT_STAMPS;
		if (x->state != RB_SHOT_OK)
			continue;
		s.rtt_max = x->rtt_ns > s.rtt_max ? x->rtt_ns : s.rtt_max;
		s.responder_max = x->responder_ns > s.responder_max ? x->responder_ns : s.responder_max;
		s.own_max = x->own_ns > s.own_max ? x->own_ns : s.own_max;
	}
	free(j);
	return s;
}

/* Where nothing is lost a run ends with its last answer, however long that may take on a busy machine. */
enum { PATIENCE = 2000000000 };
static struct sums run(uint32_t count) { return wait_for(start(count, RB_PING_HEADER, 200000, PATIENCE)); }

static void clean(void)
{
	struct rb_ping_totals t;
	struct sums s;
	int hw;

	begin("software stamps", 1e6);
	s = run(200);
	CHECK(s.sent == 200 && s.answered == 200 && s.n[RB_SHOT_OK] > 180 && !s.hardware && !s.duplicates && !s.foreign, "%u sent, %u samples", s.sent, s.n[RB_SHOT_OK]);
	s = wait_for(start(20, RB_PING_MAX, 0, PATIENCE));
	CHECK(s.answered == 20, "%u samples of the largest", s.n[RB_SHOT_OK]);
	rb_ping_totals(node[1].p, &t, &hw);
	CHECK(t.answered == 220 && !hw, "%lu answered", (unsigned long)t.answered);
	end();
}

static void hardware(void)
{
	struct sums s;

	knob = (typeof(knob)){ .hardware = 1, .skew = 1 << 30, .send_delay_ns = 4000 };
	begin("hardware stamps", 1e6);
	s = run(200);
	CHECK(s.hardware && s.n[RB_SHOT_OK] == 200, "%u samples by hardware, %u without stamps", s.n[RB_SHOT_OK], s.n[RB_SHOT_STAMPS]);
	/* The fake's answer leaves 4 us after it was posted, which only its stamps know. */
	CHECK(s.responder_max >= 4000, "the responder's delay is %lu ns", (unsigned long)s.responder_max);
	CHECK(s.own_max > 0, "no delay of its own");
	end();

	knob = (typeof(knob)){ .hardware = 1, .skew = (UINT64_C(1) << 48) - 100000 };
	begin("a device clock that wraps", 1e6);
	s = run(100);
	CHECK(s.n[RB_SHOT_OK] == 100 && s.rtt_max < 20000000000, "%u samples, longest %lu ns", s.n[RB_SHOT_OK], (unsigned long)s.rtt_max);
	end();

	knob = (typeof(knob)){ .hardware = 1, .drop_every = 7 };
	begin("hardware stamps with loss", 1e6);
	s = run(100);
	CHECK(s.hardware && s.n[RB_SHOT_OPEN] > 5 && s.n[RB_SHOT_OK] > 50 && s.answered + s.n[RB_SHOT_AWAIT] + s.n[RB_SHOT_OPEN] == 100,
	      "%u samples, %u lost, %u without stamps", s.n[RB_SHOT_OK], s.n[RB_SHOT_OPEN], s.answered - s.n[RB_SHOT_OK] + s.n[RB_SHOT_AWAIT]);
	end();

	knob = (typeof(knob)){ .hardware = 1, .zero_stamps = 1 };
	begin("hardware that promised stamps and has none", 1e6);
	s = run(50);
	CHECK(!s.hardware && s.answered >= 49, "%u samples", s.n[RB_SHOT_OK]);
	end();
}

static void network(void)
{
	struct sums s;

	knob.drop_every = 10;
	begin("loss", 1e6);
	s = run(300);
	/* Each ping is two datagrams, of which the tenth is lost; a lost question has no answer. */
	CHECK(s.n[RB_SHOT_OPEN] > 50 && s.n[RB_SHOT_OPEN] < 65 && s.n[RB_SHOT_OPEN] + s.answered == 300, "%u lost", s.n[RB_SHOT_OPEN]);
	end();

	knob.repeat_every = 3;
	begin("duplicates", 1e6);
	s = run(300);
	CHECK(s.answered == 300 && s.duplicates > 100, "%u samples, %lu duplicates", s.n[RB_SHOT_OK], (unsigned long)s.duplicates);
	end();

	knob.swap_every = 5;
	begin("reordering", 1e6);
	s = run(301);
	CHECK(s.answered >= 300 && !s.duplicates, "%u samples", s.n[RB_SHOT_OK]);
	end();

	knob.forge_every = 3;
	begin("a wrong nonce", 1e6);
	s = run(100);
	CHECK(s.answered == 100 && s.foreign > 20, "%u samples, %lu foreign", s.n[RB_SHOT_OK], (unsigned long)s.foreign);
	end();

	knob.bad_stamp_every = 4;
	begin("a stamp that is not ours", 1e6);
	s = run(100);
	CHECK(s.n[RB_SHOT_STAMPS] > 20 && s.n[RB_SHOT_STAMPS] + s.n[RB_SHOT_OK] == 100, "%u with bad stamps", s.n[RB_SHOT_STAMPS]);
	end();
}

static void peers(void)
{
	struct rb_ping_totals t;
	struct sums s;
	uint64_t took;
	int hw;

	knob.mute = 1;
	begin("a dead peer", 1e6);
	took = rb_now_ns();
	s = run(10);
	took = rb_now_ns() - took;
	CHECK(s.n[RB_SHOT_OPEN] == 10 && took > PATIENCE, "%u lost after %lu ns", s.n[RB_SHOT_OPEN], (unsigned long)took);
	end();

	begin("a rate bound", 100);
	s = wait_for(start(500, RB_PING_HEADER, 1000, PATIENCE));
	rb_ping_totals(node[1].p, &t, &hw);
	CHECK(t.answered < 200 && t.limited > 300 && t.answered == s.answered, "%lu answered, %lu not", (unsigned long)t.answered, (unsigned long)t.limited);
	end();

	begin("a nonce that is not announced any more", 1e6);
	rb_ping_remove(node[1].p, answers);
	s = run(10);
	rb_ping_totals(node[1].p, &t, &hw);
	CHECK(s.n[RB_SHOT_OPEN] == 10 && t.answered == 0 && t.strangers == 10, "%lu answered", (unsigned long)t.answered);
	end();

	begin("a peer removed under a job", 1e6);
	{
		struct rb_ping_job *j = start(100000, RB_PING_HEADER, 1000000, 100000000);

		usleep(20000);
		rb_ping_remove(node[0].p, asks);
		s = wait_for(j);
		CHECK(s.sent < 100000, "%u sent", s.sent);
	}
	end();

	begin("a job cancelled", 1e6);
	{
		struct rb_ping_job *j = start(100000, RB_PING_HEADER, 100000, 100000000);

		usleep(20000);
		rb_ping_cancel(node[0].p, j);
		free(j);
		usleep(20000);
		s = run(10);
		CHECK(s.answered == 10, "%u samples after it", s.n[RB_SHOT_OK]);
	}
	end();

	begin("a heavy probe on the peer's port", 1e6);
	rb_ping_busy(node[1].p, 1);
	s = run(10);
	CHECK(s.n[RB_SHOT_BUSY] == 10, "%u busy", s.n[RB_SHOT_BUSY]);
	rb_ping_busy(node[1].p, -1);
	s = run(10);
	CHECK(s.answered == 10, "%u samples after it", s.n[RB_SHOT_OK]);
	end();

	begin("a device that fails", 1e6);
	knob.fail_sends = 1;
	s = run(10);
	pthread_join(node[0].thread, NULL);
	CHECK(node[0].p->err == EIO && node[0].p->wc_status == IBV_WC_LOC_QP_OP_ERR && node[0].p->wc_vendor_err == 0x77, "%d, status %d", node[0].p->err,
	      node[0].p->wc_status);
	CHECK(s.n[RB_SHOT_OK] == 0, "%u samples", s.n[RB_SHOT_OK]);
	node[0].thread = node[1].thread; /* joined once more below */
	{
		struct rb_ping_job *j = rb_ping_job_new(1);

		j->peer = asks;
		CHECK(rb_ping_start(node[0].p, j) == -ESTALE, "a job was taken by an ended thread");
		free(j);
	}
	rb_ping_stop(node[1].p);
	pthread_join(node[1].thread, NULL);
	rb_ping_free(node[0].p);
	rb_ping_free(node[1].p);
	CHECK(node[0].ahs + node[1].ahs == 0, "address handles are left");
	if (!bad)
		printf("ok   %s\n", name);
	memset(&knob, 0, sizeof knob);
}

static void many(void)
{
	struct rb_ping_job *j[RB_PING_JOBS], *more;
	struct sums s;

	knob.mute = 1;
	begin("as many jobs as there may be", 1e6);
	for (int i = 0; i < RB_PING_JOBS; i++)
		j[i] = start(1, RB_PING_HEADER, 0, PATIENCE);
	more = rb_ping_job_new(1);
	more->peer = asks;
	CHECK(rb_ping_start(node[0].p, more) == -EBUSY, "one more was taken");
	free(more);
	for (int i = 0; i < RB_PING_JOBS; i++) {
		s = wait_for(j[i]);
		CHECK(s.n[RB_SHOT_OPEN] == 1, "job %d: %u lost", i, s.n[RB_SHOT_OPEN]);
	}
	pthread_mutex_lock(&lock);
	knob.mute = 0;
	pthread_mutex_unlock(&lock);
	for (int i = 0; i < RB_PING_JOBS; i++) /* no more at a time than there are receives */
		j[i] = start(1, RB_PING_HEADER, 0, PATIENCE);
	for (int i = 0; i < RB_PING_JOBS; i++) {
		s = wait_for(j[i]);
		CHECK(s.answered == 1, "job %d: not answered", i);
	}
	end();
}

static void idle(void)
{
	struct rb_ping_totals a, b;
	int hw;

	begin("idleness", 1e6);
	run(1);
	usleep(20000);
	rb_ping_totals(node[0].p, &a, &hw);
	usleep(200000);
	rb_ping_totals(node[0].p, &b, &hw);
	CHECK(b.turns - a.turns <= 10, "%lu turns with nothing to do", (unsigned long)(b.turns - a.turns));
	end();
}

int main(void)
{
	rb_clock_init(0);
	clean();
	hardware();
	network();
	peers();
	many();
	idle();
	return bad;
}
