#include "rb_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

struct ibv_context *rb_dev_context(struct rb_dev *d);

static int neg_errno(void) { return errno ? -errno : -EIO; }

static enum ibv_qp_type qp_type(enum rb_transport t)
{
	return t == RB_UD ? IBV_QPT_UD : t == RB_UC ? IBV_QPT_UC : IBV_QPT_RC;
}

unsigned rb_access_flags(const struct rb_ep_attr *a)
{
	int lands = !a->initiator || a->both_ways;

	switch (a->op) {
	case RB_WRITE:
		if (a->mixed && lands)
			return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
		/* fall through */
	case RB_WRITE_IMM: return IBV_ACCESS_LOCAL_WRITE | (lands ? IBV_ACCESS_REMOTE_WRITE : 0);
	case RB_READ: return IBV_ACCESS_LOCAL_WRITE | (lands ? IBV_ACCESS_REMOTE_READ : 0) |
		(a->iwarp && (a->initiator || a->both_ways) ? IBV_ACCESS_REMOTE_WRITE : 0);
	case RB_FETCH_ADD:
	case RB_CMP_SWAP: return IBV_ACCESS_LOCAL_WRITE | (lands ? IBV_ACCESS_REMOTE_ATOMIC : 0);
	default: return IBV_ACCESS_LOCAL_WRITE;
	}
}

static struct ibv_cq *create_cq(struct rb_ep *e, int entries, struct ibv_comp_channel *chan)
{
	errno = 0;
	return ibv_create_cq(e->ctx, entries, NULL, chan, 0);
}

/* A channel that can be read without waiting: the loops wait with a time limit. */
static struct ibv_comp_channel *create_channel(struct rb_ep *e)
{
	struct ibv_comp_channel *c;

	errno = 0;
	c = ibv_create_comp_channel(e->ctx);
	if (c && fcntl(c->fd, F_SETFL, fcntl(c->fd, F_GETFL) | O_NONBLOCK)) {
		ibv_destroy_comp_channel(c);
		return NULL;
	}
	return c;
}

/* Divides the QPs among the lanes, and a lane's send and receive completions over as many CQs as max_cqe asks for. An entry
 * for every work request, signaled or not: when a QP fails, each of them completes as flushed. */
static int create_cqs(struct rb_ep *e)
{
	int rx_depth = e->a.rx_depth > 0 ? e->a.rx_depth : 1, lanes = e->a.lanes;
	int per_qp = e->a.tx_depth > rx_depth ? e->a.tx_depth : rx_depth;
	int qps_per_cq = e->a.max_cqe / per_qp, qp = 0;

	if (qps_per_cq < 1)
		return -EINVAL;
	e->lane = calloc((size_t)lanes, sizeof *e->lane);
	e->scq = calloc((size_t)e->qps, sizeof *e->scq);
	e->rcq = calloc((size_t)e->qps, sizeof *e->rcq);
	if (!e->lane || !e->scq || !e->rcq)
		return -ENOMEM;
	for (int l = 0; l < lanes; l++) {
		struct rb_lane *lane = &e->lane[l];

		*lane = (struct rb_lane){ .qp = qp, .qps = e->qps / lanes + (l < e->qps % lanes), .cq = e->ncq };
		qp += lane->qps;
		if (e->a.events && !((lane->schan = create_channel(e)) && (lane->rchan = create_channel(e))))
			return neg_errno();
		for (int left = lane->qps; left > 0; left -= qps_per_cq) {
			int n = left < qps_per_cq ? left : qps_per_cq;

			/* Counted at once: what was created is freed, whatever fails next. */
			e->scq[e->ncq] = create_cq(e, e->a.tx_depth * n, lane->schan);
			if (!e->scq[e->ncq++])
				return neg_errno();
			e->rcq[e->ncq - 1] = create_cq(e, rx_depth * n, lane->rchan);
			if (!e->rcq[e->ncq - 1])
				return neg_errno();
			for (int i = lane->qp + lane->qps - left, end = i + n; i < end; i++)
				e->state[i].cq = e->ncq - 1;
			lane->cqs++;
		}
	}
	return 0;
}

static int create_qp(struct rb_ep *e, int i)
{
	int cq = e->state[i].cq;
	struct ibv_qp_init_attr init = {
		.send_cq = e->scq[cq], .recv_cq = e->rcq[cq], .qp_type = qp_type(e->a.transport),
		.cap = { .max_send_wr = (uint32_t)e->a.tx_depth, .max_recv_wr = (uint32_t)(e->a.rx_depth > 0 ? e->a.rx_depth : 1),
			 .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = (uint32_t)e->a.inline_max },
	};
	struct ibv_qp_init_attr got;
	struct ibv_qp_attr qa;

	/* Inline is asked for, stepped down while the device refuses, and read back: no table of devices. */
	for (;;) {
		errno = 0;
		e->qp[i] = ibv_create_qp(e->pd, &init);
		if (e->qp[i] || init.cap.max_inline_data == 0)
			break;
		init.cap.max_inline_data /= 2;
	}
	if (!e->qp[i])
		return neg_errno();
	memset(&got, 0, sizeof got);
	if (e->a.inline_max > 0 && ibv_query_qp(e->qp[i], &qa, IBV_QP_CAP, &got) == 0)
		e->inline_max = (int)got.cap.max_inline_data < e->a.inline_max ? (int)got.cap.max_inline_data : e->a.inline_max;
	else
		e->inline_max = 0;
	return 0;
}

static int qp_to_init(struct rb_ep *e, int i)
{
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_INIT, .port_num = e->a.port, .pkey_index = (uint16_t)e->a.pkey_index,
		.qp_access_flags = rb_access_flags(&e->a) & ~(unsigned)IBV_ACCESS_LOCAL_WRITE, .qkey = e->a.qkey,
	};
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;

	return -ibv_modify_qp(e->qp[i], &a, mask | (e->a.transport == RB_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS));
}

int rb_ep_create(struct rb_dev *d, const struct rb_ep_attr *a, struct rb_ep **out, struct rb_setup_error *why)
{
	struct rb_ep *e = calloc(1, sizeof *e);
	int err;

	*why = (struct rb_setup_error){ .step = RB_STEP_BUFFER };
	if (!e)
		return -ENOMEM;
	e->a = *a;
	e->ctx = rb_dev_context(d);
	e->a.iwarp = e->ctx->device->transport_type == IBV_TRANSPORT_IWARP;
	e->qps = a->qps;
	e->qp = calloc((size_t)a->qps, sizeof *e->qp);
	e->remote_qpn = calloc((size_t)a->qps, sizeof *e->remote_qpn);
	e->state = calloc((size_t)a->qps, sizeof *e->state);
	err = -ENOMEM;
	if (!e->qp || !e->remote_qpn || !e->state)
		goto fail;
	err = rb_mem_alloc(e);
	if (err)
		goto fail;
	if (a->samples) {
		err = -ENOMEM;
		e->samples = malloc(a->samples * sizeof *e->samples);
		if (!e->samples)
			goto fail;
		memset(e->samples, 1, a->samples * sizeof *e->samples); /* no page fault between two samples */
	}

	why->step = RB_STEP_PD;
	errno = 0;
	e->pd = ibv_alloc_pd(e->ctx);
	if (!e->pd) {
		err = neg_errno();
		goto fail;
	}
	why->step = RB_STEP_MR;
	err = rb_mem_register(e, rb_access_flags(&e->a));
	if (err)
		goto fail;
	why->step = RB_STEP_CQ;
	err = create_cqs(e);
	if (err)
		goto fail;
	for (int i = 0; i < e->qps; i++) {
		why->qp = i;
		why->step = RB_STEP_QP;
		err = create_qp(e, i);
		if (err)
			goto fail;
		why->step = RB_STEP_INIT;
		err = a->by_cm ? 0 : qp_to_init(e, i);
		if (err)
			goto fail;
	}
	why->step = RB_STEP_NONE;
	*out = e;
	return 0;
fail:
	rb_ep_destroy(e);
	return err;
}

static int mtu_code(int bytes)
{
	int code = IBV_MTU_256;

	while (code < IBV_MTU_4096 && (128 << (code + 1)) <= bytes)
		code++;
	return code;
}

static struct ibv_ah_attr ah_attr(const struct rb_ep *e)
{
	const struct rb_conn_attr *c = &e->c;
	struct ibv_ah_attr ah = { .dlid = c->lid, .sl = (uint8_t)c->sl, .port_num = e->a.port };

	if (c->gid_index >= 0) {
		ah.is_global = 1;
		memcpy(ah.grh.dgid.raw, c->gid, 16);
		ah.grh.sgid_index = (uint8_t)c->gid_index;
		ah.grh.hop_limit = (uint8_t)c->hop_limit;
		ah.grh.traffic_class = (uint8_t)c->traffic_class;
		ah.grh.flow_label = (uint32_t)c->flow_label;
	}
	return ah;
}

static int qp_to_rtr(struct rb_ep *e, int i, uint32_t qpn, uint32_t psn)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR };
	int mask = IBV_QP_STATE;

	if (e->a.transport != RB_UD) {
		a.path_mtu = (enum ibv_mtu)mtu_code(e->c.mtu);
		a.dest_qp_num = qpn;
		a.rq_psn = psn;
		a.ah_attr = ah_attr(e);
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	}
	if (e->a.transport == RB_RC) {
		a.max_dest_rd_atomic = (uint8_t)e->c.dest_rd_atom;
		a.min_rnr_timer = (uint8_t)e->c.min_rnr_timer;
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	}
	return -ibv_modify_qp(e->qp[i], &a, mask);
}

static int qp_to_rts(struct rb_ep *e, int i, uint32_t psn)
{
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_RTS, .sq_psn = psn, .timeout = (uint8_t)e->c.timeout, .retry_cnt = (uint8_t)e->c.retry,
		.rnr_retry = (uint8_t)e->c.rnr_retry, .max_rd_atomic = (uint8_t)e->c.rd_atom,
	};
	int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;

	if (e->a.transport == RB_RC)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	return -ibv_modify_qp(e->qp[i], &a, mask);
}

int rb_ep_connect(struct rb_ep *e, const struct rb_conn_attr *c, const uint32_t *qpn, const uint32_t *psn_remote,
		  const uint32_t *psn_local, struct rb_setup_error *why)
{
	int err;

	*why = (struct rb_setup_error){ .step = RB_STEP_AH };
	e->c = *c;
	if (e->a.transport == RB_UD) {
		struct ibv_ah_attr ah = ah_attr(e);

		errno = 0;
		e->ah = ibv_create_ah(e->pd, &ah);
		if (!e->ah)
			return neg_errno();
	}
	for (int i = 0; i < e->qps; i++) {
		why->qp = i;
		e->remote_qpn[i] = qpn[i];
		why->step = RB_STEP_RTR;
		err = qp_to_rtr(e, i, qpn[i], psn_remote[i]);
		if (err)
			return err;
		why->step = RB_STEP_RTS;
		err = qp_to_rts(e, i, psn_local[i]);
		if (err)
			return err;
	}
	why->step = RB_STEP_NONE;
	return 0;
}

void rb_ep_abort(struct rb_ep *e)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_ERR };

	for (int i = 0; i < e->qps; i++)
		if (e->qp[i])
			ibv_modify_qp(e->qp[i], &a, IBV_QP_STATE);
}

static void keep_first(int *first, int err)
{
	if (err && !*first)
		*first = err > 0 ? -err : neg_errno();
}

/* Reverse order of creation: a CQ can't go while a QP uses it, nor a PD while it has children. */
int rb_ep_destroy(struct rb_ep *e)
{
	int first = 0;

	for (int i = 0; e->qp && i < e->qps; i++)
		if (e->qp[i])
			keep_first(&first, ibv_destroy_qp(e->qp[i]));
	for (int i = 0; e->scq && i < e->ncq; i++)
		if (e->scq[i])
			keep_first(&first, ibv_destroy_cq(e->scq[i]));
	for (int i = 0; e->rcq && i < e->ncq; i++)
		if (e->rcq[i])
			keep_first(&first, ibv_destroy_cq(e->rcq[i]));
	for (int i = 0; e->lane && i < e->a.lanes; i++) {
		if (e->lane[i].schan)
			keep_first(&first, ibv_destroy_comp_channel(e->lane[i].schan));
		if (e->lane[i].rchan)
			keep_first(&first, ibv_destroy_comp_channel(e->lane[i].rchan));
	}
	if (e->ah)
		keep_first(&first, ibv_destroy_ah(e->ah));
	if (e->mr)
		keep_first(&first, ibv_dereg_mr(e->mr));
	if (e->pd)
		keep_first(&first, ibv_dealloc_pd(e->pd));
	rb_mem_free(e);
	free(e->qp);
	free(e->scq);
	free(e->rcq);
	free(e->remote_qpn);
	free(e->state);
	free(e->lane);
	free(e->samples);
	free(e);
	return first;
}
