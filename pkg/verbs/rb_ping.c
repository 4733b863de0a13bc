/* The control path of the UD echo: its objects, peers and jobs. */
#include "rb_ping.h"
#include "rb_clock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

struct ibv_context *rb_dev_context(struct rb_dev *d);

static int neg_errno(void) { return errno ? -errno : -EIO; }

void rb_ping_wake(struct rb_ping *p)
{
	uint64_t one = 1;
	ssize_t n = write(p->wake, &one, sizeof one);

	(void)n; /* EAGAIN: it is awake */
}

/* A CQ whose completions are stamped by the device, if it has a clock and says how fast that is; else a plain one. */
static int create_cq(struct rb_ping *p, struct rb_ping_cq *q, int cqe, struct ibv_comp_channel *channel)
{
	struct ibv_cq_init_attr_ex a = {
		.cqe = (uint32_t)cqe, .channel = channel,
		.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_SRC_QP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP,
	};

	if (p->hardware) {
		errno = 0;
		q->ex = ibv_create_cq_ex(p->ctx, &a);
		q->cq = q->ex ? ibv_cq_ex_to_cq(q->ex) : NULL;
		return q->ex ? 0 : neg_errno();
	}
	q->ex = NULL;
	errno = 0;
	q->cq = ibv_create_cq(p->ctx, cqe, NULL, channel, 0);
	return q->cq ? 0 : neg_errno();
}

static int create_cqs(struct rb_ping *p)
{
	struct ibv_device_attr_ex x;
	int err;

	memset(&x, 0, sizeof x);
	/* Only libibverbs' own contexts have the extended calls. */
	if (verbs_get_ctx(p->ctx) && ibv_query_device_ex(p->ctx, NULL, &x) == 0 && x.hca_core_clock && x.completion_timestamp_mask) {
		p->hardware = 1;
		p->hw_ns_per_tick = 1e6 / (double)x.hca_core_clock; /* kHz */
		p->hw_mask = x.completion_timestamp_mask;
		if (create_cq(p, &p->scq, RB_PING_SENDS, NULL) == 0) {
			if (create_cq(p, &p->rcq, RB_PING_RECVS, p->channel) == 0)
				return 0;
			ibv_destroy_cq(p->scq.cq);
			p->scq = (struct rb_ping_cq){ 0 };
		}
	}
	p->hardware = 0;
	err = create_cq(p, &p->scq, RB_PING_SENDS, NULL);
	return err ? err : create_cq(p, &p->rcq, RB_PING_RECVS, p->channel);
}

static int create_channel(struct rb_ping *p)
{
	int flags;

	errno = 0;
	p->channel = ibv_create_comp_channel(p->ctx);
	if (!p->channel)
		return neg_errno();
	flags = fcntl(p->channel->fd, F_GETFL);
	return flags < 0 || fcntl(p->channel->fd, F_SETFL, flags | O_NONBLOCK) < 0 ? neg_errno() : 0;
}

static int create_qp(struct rb_ping *p, const struct rb_ping_attr *a, struct rb_setup_error *why)
{
	struct ibv_qp_init_attr init = {
		.send_cq = p->scq.cq, .recv_cq = p->rcq.cq, .qp_type = IBV_QPT_UD, .sq_sig_all = 1,
		.cap = { .max_send_wr = RB_PING_SENDS, .max_recv_wr = RB_PING_RECVS, .max_send_sge = 2, .max_recv_sge = 2 },
	};
	struct ibv_qp_attr qa = { .qp_state = IBV_QPS_INIT, .port_num = a->port, .pkey_index = (uint16_t)a->pkey_index, .qkey = a->qkey };
	int err;

	why->step = RB_STEP_QP;
	errno = 0;
	p->qp = ibv_create_qp(p->pd, &init);
	if (!p->qp)
		return neg_errno();
	why->step = RB_STEP_INIT;
	err = ibv_modify_qp(p->qp, &qa, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
	if (err)
		return -err;
	why->step = RB_STEP_RTR;
	qa.qp_state = IBV_QPS_RTR;
	err = ibv_modify_qp(p->qp, &qa, IBV_QP_STATE);
	if (err)
		return -err;
	why->step = RB_STEP_RTS;
	qa = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS };
	return -ibv_modify_qp(p->qp, &qa, IBV_QP_STATE | IBV_QP_SQ_PSN);
}

int rb_ping_post_recv(struct rb_ping *p, int slot)
{
	struct ibv_recv_wr *bad;
	int err = ibv_post_recv(p->qp, &p->rwr[slot], &bad);

	return err > 0 ? err : -err;
}

/* Headers lie apart; what follows them is nobody's business and shares one place. */
static int prepare(struct rb_ping *p)
{
	for (int i = 0; i < RB_PING_RECVS; i++) {
		struct ibv_sge *s = &p->rsge[2 * i];

		s[0] = (struct ibv_sge){ .addr = (uintptr_t)rb_ping_rx(p, i), .length = 40 + RB_PING_HEADER, .lkey = p->mr->lkey };
		s[1] = (struct ibv_sge){ .addr = (uintptr_t)rb_ping_rest(p), .length = RB_PING_MAX - RB_PING_HEADER, .lkey = p->mr->lkey };
		p->rwr[i] = (struct ibv_recv_wr){ .wr_id = (uint64_t)i, .sg_list = s, .num_sge = 2 };
	}
	for (int i = 0; i < RB_PING_SENDS; i++)
		p->free_send[p->nfree++] = (uint16_t)i;
	for (int i = 0; i < RB_PING_RECVS; i++) {
		int err = rb_ping_post_recv(p, i);

		if (err)
			return -err;
	}
	return 0;
}

int rb_ping_new(struct rb_dev *d, const struct rb_ping_attr *a, struct rb_ping **out, struct rb_setup_error *why)
{
	struct rb_ping *p = calloc(1, sizeof *p);
	int err;

	*why = (struct rb_setup_error){ .step = RB_STEP_BUFFER };
	if (!p)
		return -ENOMEM;
	pthread_mutex_init(&p->lock, NULL);
	p->schedstat = p->done = -1;
	p->ctx = rb_dev_context(d);
	p->port = a->port;
	p->spin_ns = a->spin_ns;
	p->bucket = (struct rb_ping_bucket){ .rate = a->rate, .burst = a->burst, .tokens = a->burst };
	p->ns_per_tick = rb_clock_ns_per_tick();
	errno = 0;
	p->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (p->wake >= 0)
		p->done = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (p->done < 0) {
		err = neg_errno();
		goto fail;
	}
	err = -ENOMEM;
	p->rwr = calloc(RB_PING_RECVS, sizeof *p->rwr);
	p->rsge = calloc(RB_PING_RECVS * 2, sizeof *p->rsge);
	p->peer = calloc(RB_PING_PEERS, sizeof *p->peer);
	if (!p->rwr || !p->rsge || !p->peer)
		goto fail;
	p->buf_len = (size_t)RB_PING_SENDS * RB_PING_HEADER + (size_t)RB_PING_RECVS * RB_PING_SLOT + RB_PING_MAX;
	p->buf = mmap(NULL, p->buf_len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (p->buf == MAP_FAILED) {
		p->buf = NULL;
		goto fail;
	}
	why->step = RB_STEP_PD;
	errno = 0;
	p->pd = ibv_alloc_pd(p->ctx);
	if (!p->pd) {
		err = neg_errno();
		goto fail;
	}
	why->step = RB_STEP_MR;
	errno = 0;
	p->mr = ibv_reg_mr(p->pd, p->buf, p->buf_len, IBV_ACCESS_LOCAL_WRITE);
	if (!p->mr) {
		err = neg_errno();
		goto fail;
	}
	why->step = RB_STEP_CQ;
	err = create_channel(p);
	if (!err)
		err = create_cqs(p);
	if (err)
		goto fail;
	err = create_qp(p, a, why);
	if (err)
		goto fail;
	why->step = RB_STEP_RECV;
	err = prepare(p);
	if (err)
		goto fail;
	why->step = RB_STEP_NONE;
	*out = p;
	return 0;
fail:
	rb_ping_free(p);
	return err;
}

static void keep_first(int *first, int err)
{
	if (err && !*first)
		*first = err > 0 ? -err : neg_errno();
}

int rb_ping_free(struct rb_ping *p)
{
	int first = 0;

	if (p->qp)
		keep_first(&first, ibv_destroy_qp(p->qp));
	for (int i = 0; p->peer && i < RB_PING_PEERS; i++)
		if (p->peer[i].ah)
			keep_first(&first, ibv_destroy_ah(p->peer[i].ah));
	if (p->scq.cq)
		keep_first(&first, ibv_destroy_cq(p->scq.cq));
	if (p->rcq.cq)
		keep_first(&first, ibv_destroy_cq(p->rcq.cq));
	if (p->channel)
		keep_first(&first, ibv_destroy_comp_channel(p->channel));
	if (p->mr)
		keep_first(&first, ibv_dereg_mr(p->mr));
	if (p->pd)
		keep_first(&first, ibv_dealloc_pd(p->pd));
	if (p->buf)
		munmap(p->buf, p->buf_len);
	if (p->wake >= 0)
		close(p->wake);
	if (p->done >= 0)
		close(p->done);
	free(p->rwr);
	free(p->rsge);
	free(p->peer);
	pthread_mutex_destroy(&p->lock);
	free(p);
	return first;
}

void rb_ping_stop(struct rb_ping *p)
{
	atomic_store(&p->stop, 1);
	rb_ping_wake(p);
}

/* ---- peers ---- */

int rb_ping_add(struct rb_ping *p, const struct rb_ping_path *path, uint64_t *nonce, uint64_t random, double rate, double burst, int *id)
{
	struct ibv_ah_attr a = { .dlid = path->lid, .sl = (uint8_t)path->sl, .port_num = p->port };
	struct ibv_ah *ah;
	int err = -ENOSPC;

	if (path->gid_index >= 0) {
		a.is_global = 1;
		memcpy(a.grh.dgid.raw, path->gid, 16);
		a.grh.sgid_index = (uint8_t)path->gid_index;
		a.grh.hop_limit = (uint8_t)path->hop_limit;
		a.grh.traffic_class = (uint8_t)path->traffic_class;
		a.grh.flow_label = (uint32_t)path->flow_label;
	}
	errno = 0;
	ah = ibv_create_ah(p->pd, &a); /* may ask the network for the peer's address: not under the lock */
	if (!ah)
		return neg_errno();
	pthread_mutex_lock(&p->lock);
	for (int i = 0; i < RB_PING_PEERS; i++) {
		if (p->peer[i].ah)
			continue;
		p->peer[i] = (struct rb_ping_peer){ .ah = ah, .qpn = path->qpn, .qkey = path->qkey, .nonce = *nonce };
		if (*nonce == 0) {
			*nonce = (random | UINT64_C(1) << 63) & ~UINT64_C(0xffff);
			*nonce |= (uint64_t)i;
			p->peer[i].nonce = *nonce;
			p->peer[i].answers = 1;
			p->peer[i].bucket = (struct rb_ping_bucket){ .rate = rate, .burst = burst, .tokens = burst };
		}
		*id = i;
		err = 0;
		break;
	}
	pthread_mutex_unlock(&p->lock);
	if (err)
		ibv_destroy_ah(ah);
	return err;
}

void rb_ping_release(struct rb_ping *p, int id)
{
	struct ibv_ah *ah = p->peer[id].ah;

	memset(&p->peer[id], 0, sizeof p->peer[id]);
	p->dying--;
	ibv_destroy_ah(ah);
}

void rb_ping_remove(struct rb_ping *p, int id)
{
	pthread_mutex_lock(&p->lock);
	if (p->peer[id].ah && !p->peer[id].dying) {
		p->peer[id].dying = 1;
		p->peer[id].nonce = 0;
		p->dying++;
		if (p->peer[id].out == 0)
			rb_ping_release(p, id);
		else
			rb_ping_wake(p);
	}
	pthread_mutex_unlock(&p->lock);
}

/* ---- jobs ---- */

struct rb_ping_job *rb_ping_job_new(uint32_t count)
{
	struct rb_ping_job *j = calloc(1, sizeof *j + (size_t)count * sizeof j->shot[0]);

	if (j)
		j->count = count;
	return j;
}

int rb_ping_start(struct rb_ping *p, struct rb_ping_job *j)
{
	int i, err = 0;

	j->ns_per_tick = rb_clock_ns_per_tick();
	pthread_mutex_lock(&p->lock);
	p->ns_per_tick = j->ns_per_tick;
	for (i = 0; i < RB_PING_JOBS && p->job[i];)
		i++;
	if (i == RB_PING_JOBS) {
		err = -EBUSY;
	} else if (!p->peer[j->peer].ah || p->peer[j->peer].dying || p->err || atomic_load(&p->stop)) {
		err = -ESTALE;
	} else {
		if (++p->generation == 0) /* so that no sequence number is 0 */
			p->generation = 1;
		j->id = (uint64_t)p->generation << 48 | (uint64_t)i << 32;
		j->nonce = p->peer[j->peer].nonce;
		j->due_ns = rb_now_ns();
		p->job[i] = j;
		if (p->top <= i)
			p->top = i + 1;
	}
	pthread_mutex_unlock(&p->lock);
	if (!err)
		rb_ping_wake(p);
	return err;
}

void rb_ping_cancel(struct rb_ping *p, struct rb_ping_job *j)
{
	pthread_mutex_lock(&p->lock);
	for (int i = 0; i < p->top; i++)
		if (p->job[i] == j)
			p->job[i] = NULL;
	pthread_mutex_unlock(&p->lock);
}

void rb_ping_busy(struct rb_ping *p, int by) { atomic_fetch_add(&p->busy, (uint32_t)by); }

void rb_ping_totals(struct rb_ping *p, struct rb_ping_totals *out, int *hardware)
{
	pthread_mutex_lock(&p->lock);
	*out = p->totals;
	*hardware = p->hardware;
	pthread_mutex_unlock(&p->lock);
}
