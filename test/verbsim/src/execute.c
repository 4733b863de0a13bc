/* What a work request does: the way to the peer, both ends' memory, the peer's receive and completion. */
#include "verbsim.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

enum kind { WRITE, SEND, READ, ATOMIC };

static const struct op {
	enum kind kind;
	bool imm;
	uint32_t transports; /* 1 << enum ibv_qp_type */
	uint32_t access;     /* of the remote memory */
} ops[] = {
#define RC (1u << IBV_QPT_RC)
#define UC (1u << IBV_QPT_UC)
#define UD (1u << IBV_QPT_UD)
	[IBV_WR_RDMA_WRITE] = { WRITE, false, RC | UC, IBV_ACCESS_REMOTE_WRITE },
	[IBV_WR_RDMA_WRITE_WITH_IMM] = { WRITE, true, RC | UC, IBV_ACCESS_REMOTE_WRITE },
	[IBV_WR_SEND] = { SEND, false, RC | UC | UD, 0 },
	[IBV_WR_SEND_WITH_IMM] = { SEND, true, RC | UC | UD, 0 },
	[IBV_WR_RDMA_READ] = { READ, false, RC, IBV_ACCESS_REMOTE_READ },
	[IBV_WR_ATOMIC_CMP_AND_SWP] = { ATOMIC, false, RC, IBV_ACCESS_REMOTE_ATOMIC },
	[IBV_WR_ATOMIC_FETCH_AND_ADD] = { ATOMIC, false, RC, IBV_ACCESS_REMOTE_ATOMIC },
#undef RC
#undef UC
#undef UD
};

int check_op(const struct qp *q, const struct ibv_send_wr *wr)
{
	if (unlikely((unsigned)wr->opcode >= sizeof ops / sizeof *ops || !(ops[wr->opcode].transports & 1u << q->v.qp_type)))
		return EINVAL;
	return wr->send_flags & IBV_SEND_INLINE && ops[wr->opcode].kind >= READ ? EINVAL : 0;
}

/* ---- bytes ---- */

struct span {
	uint8_t *p;
	size_t n;
};

/* The end of a message becomes visible last: programs poll its last byte. */
static inline void copy_last(uint8_t *d, const uint8_t *s, size_t n)
{
	if (n >= 8) {
		uint64_t end;

		memcpy(&end, s + n - 8, 8);
		if (n > 8)
			memcpy(d, s, n - 8);
		__atomic_thread_fence(__ATOMIC_RELEASE);
		memcpy(d + n - 8, &end, 8);
	} else if (n == 4) {
		memcpy(d, s, 4);
	} else if (n) {
		memcpy(d, s, n - 1);
		__atomic_thread_fence(__ATOMIC_RELEASE);
		d[n - 1] = s[n - 1];
	}
}

/* Both have at least n bytes; spans aren't empty. */
static void copy_spans(const struct span *d, const struct span *s, size_t n)
{
	for (size_t i = 0, j = 0; n;) {
		size_t k = d->n - i < s->n - j ? d->n - i : s->n - j;

		if (k >= n)
			return copy_last(d->p + i, s->p + j, n);
		memcpy(d->p + i, s->p + j, k);
		n -= k;
		i += k;
		j += k;
		if (i == d->n)
			d++, i = 0;
		if (j == s->n)
			s++, j = 0;
	}
}

/* ---- the way to the peer ---- */

enum { LINK_OK, LINK_GONE, LINK_NOT_READY };

void link_drop(struct link *l)
{
	if (l->peer)
		peer_put(l->peer);
	if (l->peer && l->recv_cq.event_fd >= 0)
		close(l->recv_cq.event_fd);
	*l = (struct link){ .broken = l->broken };
}

static bool reachable(uint32_t state) { return state == IBV_QPS_RTR || state == IBV_QPS_RTS; }

static int link_find(const struct qp *q, struct link *l, uint32_t qpn, int dev)
{
	bool connected = q->v.qp_type != IBV_QPT_UD, rc = q->v.qp_type == IBV_QPT_RC;
	uint32_t epoch, state, mtu;
	struct qp_rec *r;
	struct peer *p;

	if (rc && l->peer)
		l->broken = true;
	link_drop(l);
	if (l->broken)
		return LINK_GONE;
	p = peer_get(qpn_slot(qpn));
	if (!p)
		return LINK_GONE;
	r = &p->home->qp[qpn_index(qpn)];
	epoch = load(&r->epoch);
	state = load(&r->state);
	if (!load(&r->type) || state == IBV_QPS_ERR) {
		peer_put(p);
		return LINK_GONE;
	}
	mtu = r->mtu;
	*l = (struct link){
		.peer = p, .qp = r, .qpn = qpn, .epoch = epoch, .rq = ring_at(p->home, r->rq_ring),
		.max_len = !connected || mtu == q->rec->mtu ? MAX_MESSAGE : 128u << (mtu < q->rec->mtu ? mtu : q->rec->mtu),
		.recv_cq = { .rec = &p->home->cq[r->recv_cq % MAX_CQ], .home = p->home, .event_fd = -1 },
	};
	l->recv_cq.ring = ring_at(p->home, l->recv_cq.rec->ring);
	/* Not, or not yet, what a packet of ours must meet. Sequence numbers are compared at the start of a connection only. */
	if (!reachable(state) || r->type != (uint32_t)q->v.qp_type || dev != (int)r->dev ||
	    (connected && r->dest != q->v.qp_num) || (rc && r->rq_psn != (q->attr.sq_psn & 0xffffff)) || load(&r->epoch) != epoch) {
		link_drop(l);
		return LINK_NOT_READY;
	}
	return LINK_OK;
}

static inline int link_get(struct qp *q, const struct ibv_send_wr *wr, struct link **out)
{
	uint32_t qpn = q->attr.dest_qp_num;
	struct link *l = q->link;
	int dev = q->dest_dev;

	if (q->v.qp_type == IBV_QPT_UD) {
		qpn = wr->wr.ud.remote_qpn & 0xffffff;
		l += qpn % UD_LINKS;
		dev = ((struct ah *)wr->wr.ud.ah)->dest;
	}
	*out = l;
	if (likely(l->peer && l->qpn == qpn && (int)l->qp->dev == dev && load(&l->qp->epoch) == l->epoch &&
		   reachable(load(&l->qp->state)) && !home_dead(l->peer->home)))
		return LINK_OK;
	return link_find(q, l, qpn, dev);
}

/* ---- at the peer's end ---- */

/* Puts a QP, ours or a peer's, to ERR and flushes its receives; its rq_lock is held. The exchange orders this with
 * qp_post_recv: a receive is seen either here or by its poster. */
void flush_receives(struct qp_rec *r, uint8_t *rq, struct cq_view *cq, uint32_t qpn)
{
	__atomic_exchange_n(&r->state, IBV_QPS_ERR, __ATOMIC_SEQ_CST);
	while (load(&r->rq_tail) != r->rq_head) {
		const struct rqe *e = (void *)(rq + (size_t)(r->rq_head & r->rq_mask) * r->rq_stride);
		struct ibv_wc wc = { .wr_id = e->wr_id, .status = IBV_WC_WR_FLUSH_ERR, .opcode = IBV_WC_RECV, .qp_num = qpn };

		store(&r->rq_head, r->rq_head + 1);
		cq_push(cq, &wc, false, 0, 0);
	}
}

/* A violation found by the responder ends the connection for both. */
static void peer_fail(struct link *l)
{
	shared_lock(&l->qp->rq_lock);
	if (load(&l->qp->epoch) == l->epoch)
		flush_receives(l->qp, l->rq, &l->recv_cq, l->qpn);
	shared_unlock(&l->qp->rq_lock);
}

/* The spans of a receive that take len bytes. */
static enum ibv_wc_status scatter(struct link *l, const struct rqe *e, size_t len, struct span *out)
{
	size_t room = 0;

	for (uint32_t i = 0; i < e->nsge && i < MAX_SGE && room < len; i++) {
		const struct ibv_sge *g = &e->sge[i];

		if (g->length == 0)
			continue;
		out->n = g->length;
		out->p = remote_memory(l->peer, l->qp->pd, g->lkey, g->addr, g->length, IBV_ACCESS_LOCAL_WRITE);
		if (!out->p)
			return IBV_WC_LOC_PROT_ERR;
		room += g->length;
		out++;
	}
	return room < len ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS;
}

/* Takes a receive, fills it with src (nothing for a write with immediate) and completes it. */
static int deliver(struct qp *q, struct link *l, const struct ibv_send_wr *wr, const struct span *src, size_t len)
{
	const struct op *op = &ops[wr->opcode];
	bool ud = q->v.qp_type == IBV_QPT_UD;
	size_t total = len + (ud ? GRH_BYTES : 0);
	struct qp_rec *r = l->qp;
	struct span dst[MAX_SGE];
	const struct rqe *e;
	struct ibv_wc wc;

	shared_lock(&r->rq_lock);
	if (unlikely(load(&r->epoch) != l->epoch || !reachable(load(&r->state)))) {
		shared_unlock(&r->rq_lock);
		return WAIT_PEER; /* the next attempt finds out why */
	}
	if (load(&r->rq_tail) == r->rq_head) {
		shared_unlock(&r->rq_lock);
		return WAIT_RECEIVE;
	}
	e = (void *)(l->rq + (size_t)(r->rq_head & r->rq_mask) * r->rq_stride);
	wc = (struct ibv_wc){
		.wr_id = e->wr_id, .opcode = op->kind == SEND ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM, .byte_len = (uint32_t)total,
		.qp_num = l->qpn, .src_qp = q->v.qp_num, .imm_data = op->imm ? wr->imm_data : 0,
		.wc_flags = (op->imm ? IBV_WC_WITH_IMM : 0u) | (ud ? IBV_WC_GRH : 0u),
		.sl = ud ? ((struct ah *)wr->wr.ud.ah)->attr.sl : 0,
	};
	if (op->kind == SEND) {
		wc.status = scatter(l, e, total, dst);
		if (likely(wc.status == IBV_WC_SUCCESS))
			copy_spans(dst, src, total);
	}
	store(&r->rq_head, r->rq_head + 1);
	if (unlikely(!cq_push(&l->recv_cq, &wc, wr->send_flags & IBV_SEND_SOLICITED, 0, 0) || wc.status))
		flush_receives(r, l->rq, &l->recv_cq, l->qpn);
	shared_unlock(&r->rq_lock);
	switch (wc.status) {
	case IBV_WC_SUCCESS: return IBV_WC_SUCCESS;
	case IBV_WC_LOC_LEN_ERR: return IBV_WC_REM_INV_REQ_ERR;
	default: return IBV_WC_REM_OP_ERR;
	}
}

/* ---- one work request ---- */

/* Its local memory. */
static inline enum ibv_wc_status gather(const struct qp *q, const struct ibv_send_wr *wr, struct span *out, size_t *len)
{
	enum kind kind = ops[wr->opcode].kind;
	uint32_t access = kind == READ || kind == ATOMIC ? IBV_ACCESS_LOCAL_WRITE : 0;

	*len = 0;
	for (int i = 0; i < wr->num_sge; i++) {
		const struct ibv_sge *g = &wr->sg_list[i];

		if (g->length == 0)
			continue;
		out->n = g->length;
		out->p = wr->send_flags & IBV_SEND_INLINE ? (uint8_t *)(uintptr_t)g->addr :
							    local_memory(q->rec->pd, g->lkey, g->addr, g->length, access);
		if (unlikely(!out->p))
			return IBV_WC_LOC_PROT_ERR;
		*len += g->length;
		out++;
	}
	return IBV_WC_SUCCESS;
}

/* What the network header of a datagram leaves in front of its payload: an IPv6 header, or 20 bytes and an IPv4 header. */
static void make_grh(const struct ah *ah, size_t payload, uint8_t out[GRH_BYTES])
{
	enum { UDP = 17, TRANSPORT = 8 + 12 + 8 + 4 }; /* UDP, BTH, DETH, ICRC */
	const struct ibv_global_route *g = &ah->attr.grh;
	uint16_t len = htons((uint16_t)(TRANSPORT + payload));
	union ibv_gid source;

	device_gid(ah->source, g->sgid_index, &source);
	memset(out, 0, GRH_BYTES);
	if (g->sgid_index == 0) {
		uint32_t first = htonl(6u << 28 | (uint32_t)g->traffic_class << 20 | (g->flow_label & 0xfffff));

		memcpy(out, &first, 4);
		memcpy(out + 4, &len, 2);
		out[6] = UDP;
		out[7] = g->hop_limit;
		memcpy(out + 8, source.raw, 16);
		memcpy(out + 24, g->dgid.raw, 16);
	} else {
		uint8_t *ip = out + 20;
		uint32_t sum = 0;

		len = htons((uint16_t)(20 + TRANSPORT + payload));
		ip[0] = 0x45;
		ip[1] = g->traffic_class;
		memcpy(ip + 2, &len, 2);
		ip[6] = 0x40; /* don't fragment */
		ip[8] = g->hop_limit;
		ip[9] = UDP;
		memcpy(ip + 12, source.raw + 12, 4);
		memcpy(ip + 16, g->dgid.raw + 12, 4);
		for (int i = 0; i < 20; i += 2)
			sum += (uint32_t)ip[i] << 8 | ip[i + 1];
		sum = (sum & 0xffff) + (sum >> 16);
		sum = ~((sum & 0xffff) + (sum >> 16));
		ip[10] = (uint8_t)(sum >> 8);
		ip[11] = (uint8_t)sum;
	}
}

/* On a transport without acknowledgements the sender never learns. */
static inline int unless_reliable(const struct qp *q, int status)
{
	return q->v.qp_type == IBV_QPT_RC ? status : IBV_WC_SUCCESS;
}

static void fetch_atomic(const struct ibv_send_wr *wr, uint64_t *at, const struct span *to)
{
	uint64_t old = wr->wr.atomic.compare_add;

	if (wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
		old = __atomic_fetch_add(at, old, __ATOMIC_SEQ_CST);
	else
		__atomic_compare_exchange_n(at, &old, wr->wr.atomic.swap, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	copy_spans(to, &(struct span){ (uint8_t *)&old, sizeof old }, sizeof old);
}

/* The one-sided part; for a write with immediate its first half. */
static inline int access_remote(struct qp *q, struct link *l, const struct ibv_send_wr *wr, const struct span *local,
				size_t len)
{
	const struct op *op = &ops[wr->opcode];
	bool atomic = op->kind == ATOMIC;
	uint64_t addr = atomic ? wr->wr.atomic.remote_addr : wr->wr.rdma.remote_addr;
	uint32_t key = atomic ? wr->wr.atomic.rkey : wr->wr.rdma.rkey;
	int status = IBV_WC_SUCCESS;
	struct span remote = { .n = len };

	if (len == 0)
		return IBV_WC_SUCCESS; /* checks no key, as the specification has it */
	if (unlikely(!(l->qp->access & op->access) || (op->kind >= READ && !l->qp->rd_atom) || (atomic && addr % 8)))
		status = IBV_WC_REM_INV_REQ_ERR;
	else if (!(remote.p = remote_memory(l->peer, l->qp->pd, key, addr, len, op->access)))
		status = IBV_WC_REM_ACCESS_ERR;
	if (unlikely(status)) {
		if (q->v.qp_type == IBV_QPT_RC)
			peer_fail(l);
		return unless_reliable(q, status);
	}
	switch (op->kind) {
	case WRITE: copy_spans(&remote, local, len); break;
	case READ: copy_spans(local, &remote, len); break;
	default: fetch_atomic(wr, (uint64_t *)(void *)remote.p, local); break;
	}
	return IBV_WC_SUCCESS;
}

int execute(struct qp *q, const struct ibv_send_wr *wr, uint32_t *byte_len)
{
	static uint32_t datagrams;
	const struct op *op = &ops[wr->opcode];
	bool ud = q->v.qp_type == IBV_QPT_UD;
	struct span local[MAX_SGE + 1]; /* the first is a GRH's */
	uint8_t grh[GRH_BYTES];
	struct link *l;
	size_t len;
	int status = gather(q, wr, local + 1, &len);

	if (unlikely(status))
		return status;
	if (unlikely(len > (ud ? MTU : MAX_MESSAGE) || (op->kind == ATOMIC && len != 8)))
		return IBV_WC_LOC_LEN_ERR;
	if (unlikely(op->kind >= READ && q->attr.max_rd_atomic == 0))
		return IBV_WC_LOC_QP_OP_ERR;
	*byte_len = (uint32_t)len;
	if (q->v.qp_type != IBV_QPT_RC && nth(&datagrams, knobs.drop_every))
		return IBV_WC_SUCCESS;
	status = link_get(q, wr, &l);
	if (unlikely(status != LINK_OK)) /* without a timeout the requester retries for ever */
		return unless_reliable(q, status == LINK_GONE && q->attr.timeout ? IBV_WC_RETRY_EXC_ERR : WAIT_PEER);
	if (unlikely(len > l->max_len)) {
		if (q->v.qp_type == IBV_QPT_RC)
			peer_fail(l);
		return unless_reliable(q, IBV_WC_REM_INV_REQ_ERR);
	}
	if (ud) {
		uint32_t qkey = wr->wr.ud.remote_qkey;

		if (peek(&l->qp->qkey) != (qkey >> 31 ? q->attr.qkey : qkey))
			return IBV_WC_SUCCESS;
		make_grh((struct ah *)wr->wr.ud.ah, len, grh);
		local[0] = (struct span){ grh, GRH_BYTES };
	}
	if (op->kind != SEND) {
		status = access_remote(q, l, wr, local + 1, len);
		if (status || !op->imm)
			return status;
	}
	status = deliver(q, l, wr, ud ? local : local + 1, len);
	return unlikely(status) ? unless_reliable(q, status) : status;
}
