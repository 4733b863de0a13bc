#include "verbsim.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- creation ---- */

static pthread_mutex_t index_lock = PTHREAD_MUTEX_INITIALIZER;

/* Numbers start anywhere and are not soon used again, as those of hardware: two ends that happen to have the same hide
 * mistakes. The place is taken by its type, so that it is set last. */
static int new_index(uint32_t type, uint32_t *index)
{
	static uint32_t cursor, seeded;
	int err = ENOMEM;

	pthread_mutex_lock(&index_lock);
	if (!seeded)
		cursor = (uint32_t)(now_ns() / 1000 + (uint64_t)getpid() * 37), seeded = 1;
	for (unsigned tries = 0; tries < MAX_QP && err; tries++) {
		struct qp_rec *r = &home->qp[*index = cursor++ & (MAX_QP - 1)];

		if (load(&r->type))
			continue;
		r->state = IBV_QPS_RESET;
		store(&r->epoch, r->epoch + 1);
		store(&r->type, type);
		err = 0;
	}
	pthread_mutex_unlock(&index_lock);
	return err;
}

static size_t rq_bytes(const struct qp_rec *r) { return ((size_t)r->rq_mask + 1) * r->rq_stride; }

static int check_init(const struct ibv_qp_init_attr *a)
{
	if (a->qp_type == IBV_QPT_RC && knobs.no_rc)
		return EOPNOTSUPP;
	if (a->qp_type != IBV_QPT_RC && a->qp_type != IBV_QPT_UC && a->qp_type != IBV_QPT_UD)
		return EOPNOTSUPP;
	if (a->srq)
		return EOPNOTSUPP;
	if (!a->send_cq || !a->recv_cq || a->cap.max_send_wr > MAX_WR || a->cap.max_recv_wr > MAX_WR ||
	    a->cap.max_send_sge > MAX_SGE || a->cap.max_recv_sge > MAX_SGE || a->cap.max_inline_data > MAX_INLINE)
		return EINVAL;
	return 0;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a)
{
	uint32_t index, ring, slots = 1, stride;
	struct qp *q;
	struct qp_rec *r;
	int err = check_init(a);

	if (err) {
		errno = err;
		return NULL;
	}
	if (a->cap.max_send_wr == 0)
		a->cap.max_send_wr = 1;
	if (a->cap.max_send_sge == 0)
		a->cap.max_send_sge = 1;
	while (slots < a->cap.max_recv_wr)
		slots <<= 1;
	stride = (uint32_t)sizeof(struct rqe) + (a->cap.max_recv_sge ? a->cap.max_recv_sge : 1) * (uint32_t)sizeof(struct ibv_sge);
	q = calloc(1, sizeof *q);
	if (!q)
		return NULL;
	q->link = calloc(a->qp_type == IBV_QPT_UD ? UD_LINKS : 1, sizeof *q->link);
	err = q->link ? ring_alloc((size_t)slots * stride, &ring) : ENOMEM;
	if (err)
		goto fail;
	err = new_index(a->qp_type, &index);
	if (err) {
		ring_free((size_t)slots * stride, ring);
		goto fail;
	}
	q->v = (struct ibv_qp){
		.context = pd->context, .qp_context = a->qp_context, .pd = pd, .send_cq = a->send_cq, .recv_cq = a->recv_cq,
		.handle = index, .qp_num = home->slot << 14 | index, .state = IBV_QPS_RESET, .qp_type = a->qp_type,
	};
	pthread_mutex_init(&q->v.mutex, NULL);
	pthread_cond_init(&q->v.cond, NULL);
	q->cap = a->cap;
	q->signal_all = a->sq_sig_all ? IBV_SEND_SIGNALED : 0;
	q->rq = ring_at(home, ring);
	r = q->rec = &home->qp[index];
	r->pd = pd->handle;
	r->dev = (uint32_t)((struct ctx *)pd->context)->device;
	r->recv_cq = a->recv_cq->handle;
	r->rq_ring = ring;
	r->rq_mask = slots - 1;
	r->rq_stride = stride;
	r->rq_head = r->rq_tail = r->sq_done = 0;
	r->access = r->qkey = r->dest = r->rq_psn = r->min_rnr = r->rd_atom = r->mtu = 0;
	__atomic_add_fetch(&((struct cq *)a->send_cq)->qps, 1, __ATOMIC_RELAXED);
	__atomic_add_fetch(&((struct cq *)a->recv_cq)->qps, 1, __ATOMIC_RELAXED);
	__atomic_add_fetch(&((struct pd *)pd)->children, 1, __ATOMIC_RELAXED);
	return &q->v;
fail:
	free(q->link);
	free(q);
	errno = err;
	return NULL;
}

/* To RESET, and unreachable; rq_lock is held, so nobody is delivering. */
static void make_unreachable(struct qp *q)
{
	store(&q->rec->epoch, q->rec->epoch + 1);
	store(&q->rec->state, IBV_QPS_RESET);
	store(&q->rec->rq_head, q->rec->rq_tail);
}

/* A peer may put the QP to ERR at any moment. */
static int advance(struct qp *q, uint32_t from, uint32_t to)
{
	if (to == IBV_QPS_RTR)
		store(&q->rec->epoch, q->rec->epoch + 1);
	return __atomic_compare_exchange_n(&q->rec->state, &from, to, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED) ? 0 : EINVAL;
}

static void purge(struct qp *q)
{
	cq_purge((struct cq *)q->v.send_cq, q->v.qp_num);
	if (q->v.recv_cq != q->v.send_cq)
		cq_purge((struct cq *)q->v.recv_cq, q->v.qp_num);
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
	struct qp *q = (struct qp *)qp;
	size_t bytes = rq_bytes(q->rec);
	uint32_t ring = q->rec->rq_ring;

	qp_unwait(q);
	local_lock(&q->sq_lock);
	shared_lock(&q->rec->rq_lock);
	make_unreachable(q);
	shared_unlock(&q->rec->rq_lock);
	qp_forget(q);
	purge(q);
	ring_free(bytes, ring);
	store(&q->rec->type, 0);
	__atomic_sub_fetch(&((struct cq *)qp->send_cq)->qps, 1, __ATOMIC_RELAXED);
	__atomic_sub_fetch(&((struct cq *)qp->recv_cq)->qps, 1, __ATOMIC_RELAXED);
	__atomic_sub_fetch(&((struct pd *)qp->pd)->children, 1, __ATOMIC_RELAXED);
	pthread_mutex_destroy(&qp->mutex);
	pthread_cond_destroy(&qp->cond);
	free(q->waiting);
	free(q->link);
	free(q);
	return 0;
}

/* ---- states ---- */

/* What a transition must and may set, per transport: the kernel's table (ib_core's qp_state_table), less alternate paths. */
struct transition {
	enum ibv_qp_state from, to;
	int must[3], may[3]; /* RC, UC, UD */
};

#define P (IBV_QP_PKEY_INDEX | IBV_QP_PORT)
#define PATH (IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN)
#define ACCESS IBV_QP_ACCESS_FLAGS
static const struct transition transitions[] = {
	{ IBV_QPS_RESET, IBV_QPS_INIT, { P | ACCESS, P | ACCESS, P | IBV_QP_QKEY }, { 0, 0, 0 } },
	{ IBV_QPS_INIT, IBV_QPS_INIT, { 0, 0, 0 }, { P | ACCESS, P | ACCESS, P | IBV_QP_QKEY } },
	{ IBV_QPS_INIT, IBV_QPS_RTR, { PATH | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER, PATH, 0 },
	  { ACCESS | IBV_QP_PKEY_INDEX, ACCESS | IBV_QP_PKEY_INDEX, IBV_QP_PKEY_INDEX | IBV_QP_QKEY } },
	{ IBV_QPS_RTR, IBV_QPS_RTS,
	  { IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
	    IBV_QP_SQ_PSN, IBV_QP_SQ_PSN },
	  { ACCESS | IBV_QP_MIN_RNR_TIMER, ACCESS, IBV_QP_QKEY } },
	{ IBV_QPS_RTS, IBV_QPS_RTS, { 0, 0, 0 }, { ACCESS | IBV_QP_MIN_RNR_TIMER, ACCESS, IBV_QP_QKEY } },
};
#undef P
#undef PATH
#undef ACCESS

static int check_mask(enum ibv_qp_type type, enum ibv_qp_state from, enum ibv_qp_state to, int mask)
{
	int t = type == IBV_QPT_RC ? 0 : type == IBV_QPT_UC ? 1 : 2;

	mask &= ~(IBV_QP_STATE | IBV_QP_CUR_STATE);
	if (to == IBV_QPS_RESET || to == IBV_QPS_ERR)
		return mask ? EINVAL : 0;
	for (size_t i = 0; i < sizeof transitions / sizeof *transitions; i++) {
		const struct transition *s = &transitions[i];

		if (s->from == from && s->to == to)
			return (~mask & s->must[t]) || (mask & ~(s->must[t] | s->may[t])) ? EINVAL : 0;
	}
	return EINVAL;
}

static int check_values(const struct ibv_qp_attr *a, int mask)
{
	const struct ibv_ah_attr *ah = &a->ah_attr;

	if ((mask & IBV_QP_PORT && a->port_num != 1) || (mask & IBV_QP_PKEY_INDEX && a->pkey_index != 0) ||
	    (mask & IBV_QP_PATH_MTU && (a->path_mtu < IBV_MTU_256 || a->path_mtu > IBV_MTU_4096)) ||
	    (mask & IBV_QP_TIMEOUT && a->timeout > 31) || (mask & IBV_QP_RETRY_CNT && a->retry_cnt > 7) ||
	    (mask & IBV_QP_RNR_RETRY && a->rnr_retry > 7) || (mask & IBV_QP_MIN_RNR_TIMER && a->min_rnr_timer > 31) ||
	    (mask & IBV_QP_MAX_QP_RD_ATOMIC && a->max_rd_atomic > MAX_RD_ATOMIC) ||
	    (mask & IBV_QP_MAX_DEST_RD_ATOMIC && a->max_dest_rd_atomic > MAX_RD_ATOMIC))
		return EINVAL;
	/* On Ethernet a path has a GRH, always. */
	if (mask & IBV_QP_AV && (!ah->is_global || ah->port_num != 1 || ah->grh.sgid_index >= GIDS))
		return EINVAL;
	return 0;
}

static void take_values(struct qp *q, const struct ibv_qp_attr *a, int mask)
{
#define TAKE(bit, field) \
	if (mask & (bit)) \
		q->attr.field = a->field
	TAKE(IBV_QP_ACCESS_FLAGS, qp_access_flags);
	TAKE(IBV_QP_PKEY_INDEX, pkey_index);
	TAKE(IBV_QP_PORT, port_num);
	TAKE(IBV_QP_QKEY, qkey);
	TAKE(IBV_QP_AV, ah_attr);
	TAKE(IBV_QP_PATH_MTU, path_mtu);
	TAKE(IBV_QP_TIMEOUT, timeout);
	TAKE(IBV_QP_RETRY_CNT, retry_cnt);
	TAKE(IBV_QP_RNR_RETRY, rnr_retry);
	TAKE(IBV_QP_RQ_PSN, rq_psn);
	TAKE(IBV_QP_SQ_PSN, sq_psn);
	TAKE(IBV_QP_MAX_QP_RD_ATOMIC, max_rd_atomic);
	TAKE(IBV_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic);
	TAKE(IBV_QP_MIN_RNR_TIMER, min_rnr_timer);
	TAKE(IBV_QP_DEST_QPN, dest_qp_num);
#undef TAKE
	q->dest_dev = gid_device(&q->attr.ah_attr.grh.dgid);
	q->rec->access = q->attr.qp_access_flags;
	q->rec->qkey = q->attr.qkey;
	q->rec->dest = q->attr.dest_qp_num;
	q->rec->rq_psn = q->attr.rq_psn & 0xffffff;
	q->rec->min_rnr = q->attr.min_rnr_timer;
	q->rec->rd_atom = q->attr.max_dest_rd_atomic;
	q->rec->mtu = q->attr.path_mtu;
}

static void reset(struct qp *q)
{
	shared_lock(&q->rec->rq_lock);
	make_unreachable(q);
	shared_unlock(&q->rec->rq_lock);
	qp_forget(q);
	purge(q);
	store(&q->rec->sq_done, q->posted);
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask)
{
	struct qp *q = (struct qp *)qp;
	enum ibv_qp_state from, to;
	int err;

	local_lock(&q->sq_lock);
	from = load(&q->rec->state);
	to = mask & IBV_QP_STATE ? a->qp_state : from;
	err = mask & IBV_QP_CUR_STATE && a->cur_qp_state != from ? EINVAL : check_mask(qp->qp_type, from, to, mask);
	if (!err)
		err = check_values(a, mask);
	if (!err) {
		take_values(q, a, mask);
		if (to == IBV_QPS_RESET)
			reset(q);
		else if (to == IBV_QPS_ERR)
			qp_fail(q);
		else
			err = advance(q, from, to);
		qp->state = load(&q->rec->state);
	}
	local_unlock(&q->sq_lock);
	return err;
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask, struct ibv_qp_init_attr *init)
{
	struct qp *q = (struct qp *)qp;

	(void)mask; /* all is told, as providers do */
	local_lock(&q->sq_lock);
	*a = q->attr;
	a->qp_state = a->cur_qp_state = qp->state = load(&q->rec->state);
	a->cap = q->cap;
	local_unlock(&q->sq_lock);
	*init = (struct ibv_qp_init_attr){
		.qp_context = qp->qp_context, .send_cq = qp->send_cq, .recv_cq = qp->recv_cq, .cap = q->cap,
		.qp_type = qp->qp_type, .sq_sig_all = q->signal_all != 0,
	};
	return 0;
}
