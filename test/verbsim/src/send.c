/* The send and the receive queue: posting, waiting, completing. */
#include "verbsim.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void complete(struct qp *q, const struct ibv_send_wr *wr, uint32_t seq, int status, uint32_t byte_len)
{
	if (!status && !((wr->send_flags | q->signal_all) & IBV_SEND_SIGNALED))
		return;
	struct ibv_wc wc = {
		.wr_id = wr->wr_id, .status = (enum ibv_wc_status)status, .opcode = wc_opcode(wr->opcode), .byte_len = byte_len,
		.qp_num = q->v.qp_num,
	};
	if (unlikely(!cq_push(&((struct cq *)q->v.send_cq)->view, &wc, false, 1, seq)))
		store(&q->rec->state, IBV_QPS_ERR);
}

/* ---- work requests that wait ---- */

struct waiting {
	struct ibv_send_wr wr;
	uint64_t due;      /* not to run before */
	uint64_t deadline; /* of why */
	int why;           /* WAIT_ */
	uint32_t seq;
	bool forced;       /* to fail */
	struct ibv_sge sge[];
	/* then inline data */
};

uint32_t waiters, progress_count;
static uint32_t waiters_lock;
static struct qp *waiter_list;

static struct waiting *waiting_at(const struct qp *q, uint32_t i)
{
	return (void *)(q->waiting + (i & q->wait_mask) * q->wait_stride);
}

static bool has_waiting(const struct qp *q) { return q->wait_head != q->wait_tail; }

static int wait_in_line(struct qp *q, const struct ibv_send_wr *wr, uint64_t due, bool forced)
{
	bool first = !has_waiting(q);
	struct waiting *w;
	uint32_t slots = 1;

	while (slots < q->cap.max_send_wr)
		slots <<= 1;
	if (!q->waiting) {
		q->wait_stride = sizeof *w + q->cap.max_send_sge * sizeof *w->sge + ((q->cap.max_inline_data + 7u) & ~7u);
		q->wait_mask = slots - 1;
		q->waiting = calloc(slots, q->wait_stride);
		if (!q->waiting)
			return ENOMEM;
	}
	w = waiting_at(q, q->wait_tail);
	*w = (struct waiting){ .wr = *wr, .due = due, .seq = q->posted, .forced = forced };
	w->wr.next = NULL;
	w->wr.sg_list = w->sge;
	if (wr->send_flags & IBV_SEND_INLINE) {
		uint8_t *data = (uint8_t *)(w->sge + q->cap.max_send_sge), *at = data;

		for (int i = 0; i < wr->num_sge; i++) {
			memcpy(at, (void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
			at += wr->sg_list[i].length;
		}
		w->sge[0] = (struct ibv_sge){ .addr = (uintptr_t)data, .length = (uint32_t)(at - data) };
		w->wr.num_sge = 1;
	} else if (wr->num_sge) {
		memcpy(w->sge, wr->sg_list, (size_t)wr->num_sge * sizeof *w->sge);
	}
	q->wait_tail++;
	local_lock(&waiters_lock);
	if (!q->is_waiter) {
		q->is_waiter = true;
		q->next_waiter = waiter_list;
		waiter_list = q;
		__atomic_add_fetch(&waiters, 1, __ATOMIC_SEQ_CST);
	}
	local_unlock(&waiters_lock);
	if (first)
		keeper_wake(due ? due : now_ns() + RETRY_NS);
	return 0;
}

void qp_unwait(struct qp *q)
{
	local_lock(&waiters_lock);
	for (struct qp **at = &waiter_list; *at; at = &(*at)->next_waiter) {
		if (*at != q)
			continue;
		*at = q->next_waiter;
		__atomic_sub_fetch(&waiters, 1, __ATOMIC_RELAXED);
		break;
	}
	q->is_waiter = false;
	local_unlock(&waiters_lock);
}

void qp_forget(struct qp *q)
{
	q->wait_head = q->wait_tail;
	for (int i = 0; i < (q->v.qp_type == IBV_QPT_UD ? UD_LINKS : 1); i++) {
		link_drop(&q->link[i]);
		q->link[i].broken = false;
	}
}

void qp_fail(struct qp *q)
{
	shared_lock(&q->rec->rq_lock);
	flush_receives(q->rec, q->rq, &((struct cq *)q->v.recv_cq)->view, q->v.qp_num);
	shared_unlock(&q->rec->rq_lock);
	for (; has_waiting(q); q->wait_head++) {
		const struct waiting *w = waiting_at(q, q->wait_head);

		complete(q, &w->wr, w->seq, IBV_WC_WR_FLUSH_ERR, 0);
	}
}

/* The RNR timer's code in ns (InfiniBand specification, table 45). */
static uint64_t rnr_timer_ns(uint32_t code)
{
	static const uint32_t first[] = { 655360000, 10000, 20000, 30000 };

	return code < 4 ? first[code] : (uint64_t)(code % 2 ? 30000 : 20000) << (code / 2 - 1);
}

/* When a requester gives up. */
static uint64_t patience(const struct qp *q, int why)
{
	if (why == WAIT_RECEIVE && q->attr.rnr_retry < 7)
		return now_ns() + rnr_timer_ns(q->link->qp ? peek(&q->link->qp->min_rnr) : 0) * (q->attr.rnr_retry + 1u);
	if (why == WAIT_PEER && q->attr.timeout)
		return now_ns() + (UINT64_C(4096) << q->attr.timeout) * (q->attr.retry_cnt + 1u);
	return UINT64_MAX;
}

/* Runs what waits and can run; sq_lock is held. When to look again at the latest; UINT64_MAX: no matter when. */
static uint64_t run_waiting(struct qp *q)
{
	while (has_waiting(q)) {
		struct waiting *w = waiting_at(q, q->wait_head);
		uint32_t byte_len = 0;
		int status;

		if (load(&q->rec->state) == IBV_QPS_ERR) {
			qp_fail(q);
			break;
		}
		if (w->due && now_ns() < w->due)
			return w->due;
		status = w->forced ? IBV_WC_RETRY_EXC_ERR : execute(q, &w->wr, &byte_len);
		if (status < 0) {
			if (w->why != status) {
				w->why = status;
				w->deadline = patience(q, status);
			}
			if (w->deadline == UINT64_MAX || now_ns() < w->deadline)
				return w->deadline;
			status = status == WAIT_RECEIVE ? IBV_WC_RNR_RETRY_EXC_ERR : IBV_WC_RETRY_EXC_ERR;
		}
		q->wait_head++;
		complete(q, &w->wr, w->seq, status, byte_len);
		if (status)
			qp_fail(q);
	}
	return UINT64_MAX;
}

uint64_t progress(void)
{
	uint64_t next = UINT64_MAX;

	if (!local_trylock(&waiters_lock))
		return next; /* somebody is at it */
	__atomic_add_fetch(&progress_count, 1, __ATOMIC_RELAXED);
	for (struct qp **at = &waiter_list; *at;) {
		struct qp *q = *at;

		if (local_trylock(&q->sq_lock)) {
			uint64_t t = run_waiting(q);
			bool more = has_waiting(q);

			if (!more) {
				*at = q->next_waiter;
				q->is_waiter = false;
				__atomic_sub_fetch(&waiters, 1, __ATOMIC_RELAXED);
			}
			local_unlock(&q->sq_lock);
			if (!more)
				continue;
			if (t < next)
				next = t;
		}
		at = &q->next_waiter;
	}
	local_unlock(&waiters_lock);
	return next;
}

void send_after_fork(void)
{
	waiters = waiters_lock = 0;
	waiter_list = NULL;
}

/* ---- posting ---- */

static size_t message_len(const struct ibv_send_wr *wr)
{
	size_t n = 0;

	for (int i = 0; i < wr->num_sge; i++)
		n += wr->sg_list[i].length;
	return n;
}

/* When a message posted now has left the port and travelled. */
static uint64_t due_time(const struct qp *q, const struct ibv_send_wr *wr)
{
	static uint64_t busy_until[MAX_DEVICE];
	uint64_t t = now_ns();

	if (knobs.gbps > 0) {
		uint64_t *port = &busy_until[q->rec->dev % MAX_DEVICE], was = peek(port), start, end;

		do {
			start = was > t ? was : t;
			end = start + (uint64_t)((double)message_len(wr) * 8 / knobs.gbps);
		} while (!__atomic_compare_exchange_n(port, &was, end, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
		t = end;
	}
	return t + knobs.delay_ns;
}

static inline int check(const struct qp *q, const struct ibv_send_wr *wr)
{
	if (unlikely(check_op(q, wr) || (unsigned)wr->num_sge > q->cap.max_send_sge))
		return EINVAL;
	if (wr->send_flags & IBV_SEND_INLINE && message_len(wr) > q->cap.max_inline_data)
		return EINVAL;
	if (unlikely(q->v.qp_type == IBV_QPT_UD && !wr->wr.ud.ah))
		return EINVAL;
	if (unlikely(q->posted - load(&q->rec->sq_done) >= q->cap.max_send_wr))
		return ENOMEM;
	return 0;
}

static int post_one(struct qp *q, const struct ibv_send_wr *wr)
{
	static uint32_t requests;
	bool forced = nth(&requests, knobs.error_every);
	uint32_t byte_len = 0;
	int status, err = check(q, wr);

	if (unlikely(err))
		return err;
	q->posted++;
	if (unlikely(load(&q->rec->state) == IBV_QPS_ERR)) {
		complete(q, wr, q->posted, IBV_WC_WR_FLUSH_ERR, 0);
		return 0;
	}
	if (unlikely(knobs.delay_ns || knobs.gbps > 0)) {
		err = wait_in_line(q, wr, due_time(q, wr), forced);
	} else if (unlikely(has_waiting(q))) {
		err = wait_in_line(q, wr, 0, forced);
	} else {
		status = unlikely(forced) ? IBV_WC_RETRY_EXC_ERR : execute(q, wr, &byte_len);
		if (unlikely(status < 0)) {
			err = wait_in_line(q, wr, 0, false);
		} else {
			complete(q, wr, q->posted, status, byte_len);
			if (unlikely(status))
				qp_fail(q);
		}
	}
	if (unlikely(err))
		q->posted--;
	return err;
}

int qp_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	static uint32_t posts;
	struct qp *q = (struct qp *)qp;
	uint32_t state;
	int err = 0;

	local_lock(&q->sq_lock);
	state = load(&q->rec->state);
	if (unlikely(state != IBV_QPS_RTS && state != IBV_QPS_ERR))
		err = EINVAL;
	else if (nth(&posts, knobs.enomem_every))
		err = ENOMEM;
	else if (unlikely(has_waiting(q)))
		run_waiting(q);
	while (wr && !err) {
		err = post_one(q, wr);
		if (likely(!err))
			wr = wr->next;
	}
	local_unlock(&q->sq_lock);
	if (unlikely(err))
		*bad = wr;
	return err;
}

int qp_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct qp *q = (struct qp *)qp;
	struct qp_rec *r = q->rec;
	uint32_t tail;
	int err = 0;

	local_lock(&q->rq_plock);
	if (unlikely(load(&r->state) == IBV_QPS_RESET))
		err = EINVAL;
	tail = r->rq_tail;
	for (; wr && !err; wr = wr->next) {
		struct rqe *e = (void *)(q->rq + (size_t)(tail & r->rq_mask) * r->rq_stride);

		if (unlikely((unsigned)wr->num_sge > q->cap.max_recv_sge))
			err = EINVAL;
		else if (unlikely(tail - load(&r->rq_head) >= q->cap.max_recv_wr))
			err = ENOMEM;
		if (unlikely(err))
			break;
		e->wr_id = wr->wr_id;
		e->nsge = (uint32_t)wr->num_sge;
		for (int i = 0; i < wr->num_sge; i++)
			e->sge[i] = wr->sg_list[i];
		tail++;
	}
	__atomic_exchange_n(&r->rq_tail, tail, __ATOMIC_SEQ_CST); /* see flush_receives */
	local_unlock(&q->rq_plock);
	if (unlikely(load(&r->state) == IBV_QPS_ERR)) {
		shared_lock(&r->rq_lock);
		flush_receives(r, q->rq, &((struct cq *)qp->recv_cq)->view, qp->qp_num);
		shared_unlock(&r->rq_lock);
	}
	if (unlikely(err))
		*bad = wr;
	return err;
}
