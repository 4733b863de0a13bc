#include "rb_run.h"
#include "rb_memory.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

struct rb_ctl *rb_ctl_new(void)
{
	struct rb_ctl *c = calloc(1, sizeof *c);

	if (c)
		atomic_store(&c->expect, UINT64_MAX);
	return c;
}

void rb_ctl_free(struct rb_ctl *c) { free(c); }
void rb_ctl_stop(struct rb_ctl *c) { atomic_store(&c->stop, 1); }
void rb_ctl_expect(struct rb_ctl *c, uint64_t n) { atomic_store(&c->expect, n); }
void rb_ctl_mark(struct rb_ctl *c) { atomic_store(&c->mark, 1); }
uint64_t rb_ctl_done(struct rb_ctl *c) { return atomic_load_explicit(&c->done, memory_order_relaxed); }

int rb_watch_look(struct rb_watch *w, int idle)
{
	struct rb_run *r = w->r;
	uint64_t now = rb_watch_ns(w);

	if (atomic_load_explicit(&w->ctl->stop, memory_order_relaxed)) {
		r->end = RB_END_STOPPED;
		return 1;
	}
	if (now >= r->deadline_ns) {
		r->end = RB_END_DEADLINE;
		return 1;
	}
	if (!idle)
		return 0;
	if (r->responds && r->completed >= atomic_load_explicit(&w->ctl->expect, memory_order_relaxed))
		return 1;
	if (!w->idle_since) {
		w->idle_since = now;
	} else if (r->stall_ns && now - w->idle_since >= r->stall_ns) {
		r->end = RB_END_STALLED;
		return 1;
	}
	/* On a software device the packets are moved by this very CPU. */
	if (r->yield_ns && now - w->idle_since >= r->yield_ns)
		sched_yield();
	return 0;
}

static uint64_t thread_cpu_ns(void) { return rb_clock_ns(CLOCK_THREAD_CPUTIME_ID); }

void rb_start(struct rb_run *r, struct rb_watch *w, struct rb_ctl *ctl)
{
	*w = (struct rb_watch){ .r = r, .ctl = ctl, .ns_per_tick = rb_clock_ns_per_tick() };
	r->end = RB_END_DONE;
	r->cpu_ns = thread_cpu_ns();
	r->start_ns = w->start_ns = rb_now_ns();
	w->start_ticks = rb_ticks();
}

void rb_finish(struct rb_run *r)
{
	r->end_ns = rb_now_ns();
	r->cpu_ns = thread_cpu_ns() - r->cpu_ns;
}

void rb_wc_error(struct rb_run *r, const struct ibv_wc *wc)
{
	if (wc->status == IBV_WC_WR_FLUSH_ERR && r->end == RB_END_WC) {
		r->flushed++;
		return;
	}
	if (r->end == RB_END_WC && r->wc_status != IBV_WC_WR_FLUSH_ERR)
		return;
	r->end = RB_END_WC;
	r->wc_status = wc->status;
	r->wc_vendor_err = wc->vendor_err;
}

void rb_verb_error(struct rb_run *r, enum rb_call call, int err)
{
	if (r->end == RB_END_WC)
		return;
	r->end = RB_END_ERRNO;
	r->call = call;
	r->err = err;
}

static enum ibv_wr_opcode opcode(enum rb_op op)
{
	switch (op) {
	case RB_WRITE: return IBV_WR_RDMA_WRITE;
	case RB_WRITE_IMM: return IBV_WR_RDMA_WRITE_WITH_IMM;
	case RB_READ: return IBV_WR_RDMA_READ;
	case RB_FETCH_ADD: return IBV_WR_ATOMIC_FETCH_AND_ADD;
	case RB_CMP_SWAP: return IBV_WR_ATOMIC_CMP_AND_SWP;
	default: return IBV_WR_SEND;
	}
}

void rb_chain(const struct rb_ep *e, int qp, struct ibv_send_wr *wr, struct ibv_sge *sge, int n, uint64_t size, int signaled)
{
	int lands = e->a.op == RB_READ || e->a.op == RB_FETCH_ADD || e->a.op == RB_CMP_SWAP;
	/* The remote half: a read takes from the peer's send half, everything else lands in its receive half. */
	uint64_t remote = e->c.addr + (uint64_t)(2 * qp + (e->a.op == RB_READ ? 0 : 1)) * e->c.stride;
	unsigned flags = !lands && size <= (uint64_t)e->inline_max ? IBV_SEND_INLINE : 0;

	for (int i = 0; i < n; i++) {
		memset(&wr[i], 0, sizeof wr[i]);
		sge[i] = (struct ibv_sge){
			.addr = (uintptr_t)(lands ? rb_rx_buf(e, qp) : rb_tx_buf(e, qp)),
			.length = (uint32_t)size, .lkey = e->mr->lkey,
		};
		wr[i].wr_id = (uint64_t)qp;
		wr[i].next = i + 1 < n ? &wr[i + 1] : NULL;
		wr[i].sg_list = &sge[i];
		wr[i].num_sge = 1;
		wr[i].opcode = opcode(e->a.op);
		wr[i].send_flags = flags | (signaled && i + 1 == n ? IBV_SEND_SIGNALED : 0);
		if (e->a.transport == RB_UD) {
			wr[i].wr.ud.ah = e->ah;
			wr[i].wr.ud.remote_qpn = e->remote_qpn[qp];
			wr[i].wr.ud.remote_qkey = e->c.qkey;
		} else if (e->a.op == RB_FETCH_ADD || e->a.op == RB_CMP_SWAP) {
			wr[i].wr.atomic.remote_addr = remote;
			wr[i].wr.atomic.rkey = e->c.rkey;
			wr[i].wr.atomic.compare_add = e->a.op == RB_FETCH_ADD;
		} else {
			wr[i].wr.rdma.remote_addr = remote;
			wr[i].wr.rdma.rkey = e->c.rkey;
		}
	}
}

struct ibv_sge rb_receive_sge(struct rb_ep *e, int qp)
{
	uint64_t grh = e->a.transport == RB_UD ? RB_GRH_BYTES : 0, at = 0;

	if (e->ring.slots > 1) {
		at = e->rx_slot[qp] * e->ring.step;
		e->rx_slot[qp] = (e->rx_slot[qp] + 1) % e->ring.slots;
	}
	return (struct ibv_sge){ .addr = (uintptr_t)rb_rx_buf(e, qp) + at, .length = (uint32_t)(e->a.msg_max + grh), .lkey = e->mr->lkey };
}

int rb_arm(struct rb_ep *e, uint64_t size)
{
	/* Whatever another size left there is not the next sequence. Nobody polls a GPU's memory. */
	if (e->mem.kind != RB_MEM_GPU)
		rb_rx_buf(e, 0)[size - 1] = e->seq;
	e->ring = rb_ring_of(e, size);
	for (int q = 0; q < e->qps; q++) {
		if (e->rx_slot)
			e->rx_slot[q] = 0;
		for (; e->rx_posted[q] < e->a.rx_depth; e->rx_posted[q]++) {
			struct ibv_sge sge = rb_receive_sge(e, q);
			struct ibv_recv_wr wr = { .wr_id = (uint64_t)q, .sg_list = &sge, .num_sge = 1 }, *bad;
			int err = ibv_post_recv(e->qp[q], &wr, &bad);

			if (err)
				return err > 0 ? -err : err;
		}
	}
	return 0;
}

void rb_samples_flush(struct rb_ep *e, struct rb_run *r, uint64_t n)
{
	double k = rb_clock_ns_per_tick() * r->scale;

	for (uint64_t i = 0; i < n; i++) {
		double x = (double)e->samples[i] * k, d;
		uint64_t ns = (uint64_t)(x + 0.5);

		if (r->lat_n == 0 || ns < r->lat_min)
			r->lat_min = ns;
		if (ns > r->lat_max)
			r->lat_max = ns;
		r->lat_n++;
		d = x - r->lat_mean;
		r->lat_mean += d / (double)r->lat_n;
		r->lat_m2 += d * (x - r->lat_mean);
		r->hist[rb_hist_index(ns < RB_HIST_HIGHEST ? ns : RB_HIST_HIGHEST)]++;
	}
}
