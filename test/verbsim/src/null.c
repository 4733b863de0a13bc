/* The data path of VERBSIM=null: a send is complete when it is posted, nothing moves, nothing is received. As lean as a
 * data path can be, since what is measured over it is the program above. A CQ is for one thread at a time. */
#include "verbsim.h"

#include <errno.h>

static inline bool complete(struct cq *c, const struct ibv_send_wr *wr, uint32_t qpn)
{
	uint32_t tail = c->null_tail;
	struct null_cqe *e = &c->null_ring[tail & c->null_mask];

	if (unlikely(tail - c->null_head >= c->null_cap))
		return false;
	e->wr_id = wr->wr_id;
	e->qpn = qpn;
	e->opcode = wr->opcode;
	c->null_tail = tail + 1;
	return true;
}

int null_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	const struct qp *q = (struct qp *)qp;

	if (!((wr->send_flags | q->signal_all) & IBV_SEND_SIGNALED) && !wr->next)
		return 0; /* first, as most come here */
	for (; wr; wr = wr->next) {
		if (!((wr->send_flags | q->signal_all) & IBV_SEND_SIGNALED))
			continue;
		if (unlikely(!complete((struct cq *)qp->send_cq, wr, qp->qp_num))) {
			*bad = wr;
			return ENOMEM;
		}
	}
	return 0;
}

int null_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	(void)qp, (void)wr, (void)bad;
	return 0;
}

int null_poll(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	struct cq *c = (struct cq *)cq;
	int k = 0;

	for (; k < n && c->null_head != c->null_tail; k++) {
		const struct null_cqe *e = &c->null_ring[c->null_head++ & c->null_mask];

		wc[k].wr_id = e->wr_id;
		wc[k].status = IBV_WC_SUCCESS;
		wc[k].opcode = wc_opcode(e->opcode);
		wc[k].vendor_err = 0;
		wc[k].byte_len = 0;
		wc[k].qp_num = e->qpn;
		wc[k].wc_flags = 0;
	}
	return k;
}

int null_notify(struct ibv_cq *cq, int solicited_only)
{
	(void)cq, (void)solicited_only;
	return 0;
}
