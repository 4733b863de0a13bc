/* The thread of the UD echo. A turn looks at completions, answers questions, takes samples, sends what is due; when there is
 * nothing to do it sleeps until a datagram comes or the next one is due.
 *
 * Stamps. By software: from just before a ping is posted to when its answer is seen, less what the responder says passed between
 * its seeing the question and posting the answer, and the wait for a CPU when the question woke it. By hardware: between the completions of ping and answer, less the same at the
 * responder. A responder learns when its answer left only afterwards, so it tells that in its next two answers; the initiator
 * asks again for the last ones. Nothing is sent that was not asked for. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* ppoll */
#endif
#include "rb_ping.h"
#include "rb_clock.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BATCH = 32, GRH = 40, MAX_CLOSINGS = 3 };
#define CLOSING UINT64_C(0xffffffff) /* the index of a ping that is no sample */

/* A completion, from either kind of CQ. */
struct seen {
	uint64_t wr_id, hw;
	uint32_t len, src_qp;
};

static void broken(struct rb_ping *p, enum rb_call call, int err)
{
	if (p->err)
		return;
	p->err = err;
	p->call = call;
}

static void failed(struct rb_ping *p, int status, uint32_t vendor)
{
	if (p->err)
		return;
	p->err = EIO;
	p->call = RB_CALL_NONE;
	p->wc_status = status;
	p->wc_vendor_err = vendor;
}

static int poll_stamped(struct rb_ping *p, struct ibv_cq_ex *ex, struct seen *s, int receives)
{
	struct ibv_poll_cq_attr a = { 0 };
	int n = 0, err = ibv_start_poll(ex, &a);

	if (err == ENOENT)
		return 0;
	while (err == 0) {
		if (ex->status != IBV_WC_SUCCESS) {
			failed(p, ex->status, ibv_wc_read_vendor_err(ex));
		} else {
			s[n] = (struct seen){ .wr_id = ex->wr_id, .hw = ibv_wc_read_completion_ts(ex) };
			if (receives) {
				s[n].len = ibv_wc_read_byte_len(ex);
				s[n].src_qp = ibv_wc_read_src_qp(ex);
			}
			if (s[n].hw == 0)
				p->hardware = 0; /* it was promised, and isn't there */
			n++;
		}
		if (n == BATCH || p->err)
			break;
		err = ibv_next_poll(ex);
	}
	ibv_end_poll(ex);
	if (err && err != ENOENT)
		broken(p, RB_CALL_POLL, err);
	return n;
}

static int poll_cq(struct rb_ping *p, struct rb_ping_cq *q, struct seen *s, int receives)
{
	struct ibv_wc wc[BATCH];
	int n, ok = 0;

	if (q->ex)
		return poll_stamped(p, q->ex, s, receives);
	n = ibv_poll_cq(q->cq, BATCH, wc);
	if (n < 0) {
		broken(p, RB_CALL_POLL, -n);
		return 0;
	}
	for (int i = 0; i < n; i++) {
		if (wc[i].status != IBV_WC_SUCCESS)
			failed(p, wc[i].status, wc[i].vendor_err);
		else
			s[ok++] = (struct seen){ .wr_id = wc[i].wr_id, .len = wc[i].byte_len, .src_qp = wc[i].src_qp };
	}
	return ok;
}

/* How long this thread has waited for a CPU, ever. Read at most once a turn. */
static uint64_t waited(struct rb_ping *p)
{
	char text[64];
	ssize_t n;

	if (p->waited_known || p->schedstat < 0)
		return p->waited_ns;
	n = pread(p->schedstat, text, sizeof text - 1, 0);
	if (n > 0) {
		char *end;

		text[n] = 0;
		strtoull(text, &end, 10); /* ns on a CPU */
		p->waited_ns = strtoull(end, NULL, 10);
	}
	p->waited_known = 1;
	return p->waited_ns;
}

static int allowed(struct rb_ping_bucket *b, uint64_t now)
{
	b->tokens += (double)(now - b->filled_ns) * 1e-9 * b->rate;
	if (b->tokens > b->burst || b->filled_ns == 0)
		b->tokens = b->burst;
	b->filled_ns = now;
	if (b->tokens < 1)
		return 0;
	b->tokens -= 1;
	return 1;
}

/* ---- sending ---- */

/* Sends the header in slot, filled up to size. */
static int post(struct rb_ping *p, int slot, int peer, uint32_t size)
{
	struct rb_ping_peer *to = &p->peer[peer];
	struct ibv_sge sge[2] = {
		{ .addr = (uintptr_t)rb_ping_tx(p, slot), .length = RB_PING_HEADER, .lkey = p->mr->lkey },
		{ .addr = (uintptr_t)rb_ping_rest(p), .length = size - RB_PING_HEADER, .lkey = p->mr->lkey },
	};
	struct ibv_send_wr wr = {
		.wr_id = (uint64_t)slot, .sg_list = sge, .num_sge = size > RB_PING_HEADER ? 2 : 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
	}, *bad;
	int err;

	wr.wr.ud.ah = to->ah;
	wr.wr.ud.remote_qpn = to->qpn;
	wr.wr.ud.remote_qkey = to->qkey;
	err = ibv_post_send(p->qp, &wr, &bad);
	if (err == 0) {
		to->out++;
		p->send[slot].peer = peer;
		return 0;
	}
	p->free_send[p->nfree++] = (uint16_t)slot;
	if (err != ENOMEM)
		broken(p, RB_CALL_POST_SEND, err < 0 ? -err : err);
	return -1;
}

/* Each delay is told twice, as long as they come one by one, so that the loss of an answer loses no other's. */
static void remember(struct rb_ping_peer *peer, uint64_t seq, uint64_t delay_ns)
{
	if (peer->told_tail - peer->told_head == RB_PING_TOLD)
		peer->told_head++;
	peer->told[peer->told_tail++ % RB_PING_TOLD] = (struct rb_ping_told){
		.seq = seq, .delay_ns = delay_ns < UINT32_MAX ? (uint32_t)delay_ns : UINT32_MAX,
	};
}

static void tell(struct rb_ping_peer *peer, struct rb_ping_header *a)
{
	unsigned n = peer->told_tail - peer->told_head;
	int often = n > 4 ? 1 : 2;

	for (unsigned i = 0; i < 2 && i < n; i++) {
		struct rb_ping_told *t = &peer->told[(peer->told_head + i) % RB_PING_TOLD];

		a->earlier[i].seq = htobe64(t->seq);
		a->earlier[i].delay_ns = htobe32(t->delay_ns);
		t->times++;
	}
	while (peer->told_head != peer->told_tail && peer->told[peer->told_head % RB_PING_TOLD].times >= often)
		peer->told_head++;
}

static uint64_t hw_ns(const struct rb_ping *p, uint64_t from, uint64_t to)
{
	return (uint64_t)((double)((to - from) & p->hw_mask) * p->hw_ns_per_tick);
}

static struct rb_ping_job *job_of(struct rb_ping *p, uint64_t seq)
{
	unsigned place = (unsigned)(seq >> 32) & 0xffff;
	struct rb_ping_job *j = place < RB_PING_JOBS ? p->job[place] : NULL;

	return j && j->id == (seq & ~UINT64_C(0xffffffff)) ? j : NULL;
}

static void reap(struct rb_ping *p)
{
	struct seen s[BATCH];
	int n;

	do {
		n = poll_cq(p, &p->scq, s, 0);
		for (int i = 0; i < n; i++) {
			struct rb_ping_send *x = &p->send[s[i].wr_id];
			struct rb_ping_peer *peer = &p->peer[x->peer];
			struct rb_ping_job *j;

			p->free_send[p->nfree++] = (uint16_t)s[i].wr_id;
			peer->out--;
			if (x->answer && p->hardware)
				remember(peer, x->seq, hw_ns(p, x->asked_hw, s[i].hw));
			if (!x->answer && (j = job_of(p, x->seq)) && (x->seq & CLOSING) != CLOSING)
				j->shot[x->seq & CLOSING].sent_hw = s[i].hw;
			if (peer->dying && peer->out == 0)
				rb_ping_release(p, x->peer);
		}
	} while (n == BATCH);
}

/* before_ns: what passed before it was seen, as far as is known. */
static void answer(struct rb_ping *p, const struct rb_ping_header *q, const struct seen *s, uint64_t seen_ticks, uint64_t before_ns)
{
	uint64_t nonce = be64toh(q->nonce);
	unsigned id = (unsigned)(nonce & 0xffff);
	struct rb_ping_peer *peer = &p->peer[id % RB_PING_PEERS];
	struct rb_ping_header *a;
	uint64_t now;
	int slot;

	if (id >= RB_PING_PEERS || !peer->ah || !peer->answers || peer->nonce != nonce || peer->qpn != s->src_qp) {
		p->totals.strangers++;
		return;
	}
	now = rb_now_ns();
	if (!allowed(&peer->bucket, now) || !allowed(&p->bucket, now)) {
		p->totals.limited++;
		return;
	}
	if (p->nfree == 0) {
		p->totals.full++;
		return;
	}
	slot = p->free_send[--p->nfree];
	p->send[slot] = (struct rb_ping_send){ .answer = 1, .seq = be64toh(q->seq), .asked_hw = s->hw };
	a = rb_ping_tx(p, slot);
	*a = (struct rb_ping_header){
		.magic = htobe32(RB_PING_MAGIC), .version = RB_PING_VERSION, .type = RB_PING_ANSWER, .nonce = q->nonce, .seq = q->seq, .stamp = q->stamp,
		.flags = htobe16((uint16_t)((p->hardware ? RB_PING_HARDWARE : 0) | (atomic_load_explicit(&p->busy, memory_order_relaxed) ? RB_PING_BUSY : 0))),
	};
	tell(peer, a);
	a->delay = htobe64(before_ns + (uint64_t)((double)(rb_ticks() - seen_ticks) * p->ns_per_tick));
	if (post(p, slot, (int)id, s->len - GRH) == 0)
		p->totals.answered++;
	else if (!p->err)
		p->totals.full++;
}

/* ---- samples ---- */

static void settle(struct rb_ping_job *j, struct rb_ping_shot *x, enum rb_ping_state state)
{
	if (x->state == RB_SHOT_OPEN)
		j->open--;
	else if (x->state == RB_SHOT_AWAIT)
		j->await--;
	x->state = state;
	if (state == RB_SHOT_AWAIT)
		j->await++;
}

static void sample(struct rb_ping_job *j, struct rb_ping_shot *x, uint64_t total_ns, uint64_t responder_ns)
{
	x->responder_ns = responder_ns;
	x->rtt_ns = total_ns - responder_ns;
	settle(j, x, responder_ns < total_ns ? RB_SHOT_OK : RB_SHOT_STAMPS);
}

/* What the responder's device stamped for an answer before this one. */
static void learn(struct rb_ping *p, const struct rb_ping_job *about, const struct rb_ping_earlier *e)
{
	uint64_t seq = be64toh(e->seq), index = seq & CLOSING, whole, total;
	struct rb_ping_job *j = seq ? job_of(p, seq) : NULL;
	struct rb_ping_shot *x;

	if (!j || j->peer != about->peer || index >= j->sent || j->shot[index].state != RB_SHOT_AWAIT)
		return;
	x = &j->shot[index];
	if (!p->hardware || !x->sent_hw || !x->answered_hw) {
		settle(j, x, RB_SHOT_STAMPS);
		return;
	}
	total = hw_ns(p, x->sent_hw, x->answered_hw);
	whole = (uint64_t)((double)(x->seen_ticks - x->post_ticks) * j->ns_per_tick);
	if (total > whole + whole / 64 + 1000) { /* neither clock is that far off */
		settle(j, x, RB_SHOT_STAMPS);
		return;
	}
	x->own_ns = whole > total ? whole - total : 0;
	j->hardware = 1;
	sample(j, x, total, be32toh(e->delay_ns));
}

static void accept_answer(struct rb_ping *p, const struct rb_ping_header *a, const struct seen *s, uint64_t seen_ticks)
{
	uint64_t seq = be64toh(a->seq), index = seq & CLOSING, total, delay;
	struct rb_ping_job *j = job_of(p, seq);
	unsigned flags = be16toh(a->flags);
	struct rb_ping_shot *x;
	uint32_t awaited;

	if (!j) {
		p->totals.stray++;
		return;
	}
	if (j->nonce != be64toh(a->nonce) || p->peer[j->peer].nonce != j->nonce || p->peer[j->peer].qpn != s->src_qp || (index != CLOSING && index >= j->sent)) {
		j->foreign++;
		return;
	}
	awaited = j->await;
	for (int i = 0; i < 2; i++)
		learn(p, j, &a->earlier[i]);
	if (index == CLOSING) {
		if (j->await < awaited) { /* there may be more where that came from */
			j->closings = 0;
			j->close_ns = 0;
		}
		return;
	}
	x = &j->shot[index];
	if (x->state != RB_SHOT_OPEN) {
		j->duplicates++;
		return;
	}
	x->seen_ticks = seen_ticks;
	total = (uint64_t)((double)(seen_ticks - x->post_ticks) * j->ns_per_tick);
	delay = be64toh(a->delay);
	x->own_ns = waited(p) - x->waited_ns;
	if (be64toh(a->stamp) != x->post_ticks) {
		settle(j, x, RB_SHOT_STAMPS);
	} else if (total > j->timeout_ns) {
		settle(j, x, RB_SHOT_LATE);
	} else if (flags & RB_PING_BUSY) {
		settle(j, x, RB_SHOT_BUSY);
	} else if (p->hardware && flags & RB_PING_HARDWARE) {
		x->answered_hw = s->hw;
		settle(j, x, RB_SHOT_AWAIT);
	} else if (j->own_ns && x->own_ns > j->own_ns && x->own_ns > total / 10) {
		settle(j, x, RB_SHOT_OWN);
	} else {
		sample(j, x, total, delay);
	}
}

/* Returns how many datagrams came. */
static int receive(struct rb_ping *p)
{
	struct seen s[BATCH];
	int n = poll_cq(p, &p->rcq, s, 1);
	uint64_t seen_ticks = rb_ticks(), before_ns = 0;

	/* What the thread waited for a CPU when one datagram woke it, that datagram waited too. Of several, who knows which. */
	if (n == 1 && p->rung && !p->hardware)
		before_ns = waited(p) - p->slept_wait_ns;
	p->rung = 0;
	for (int i = 0; i < n; i++) {
		const struct rb_ping_header *h = (const struct rb_ping_header *)(rb_ping_rx(p, (int)s[i].wr_id) + GRH);
		int err;

		if (s[i].len < GRH + RB_PING_HEADER || s[i].len > GRH + RB_PING_MAX || be32toh(h->magic) != RB_PING_MAGIC || h->version != RB_PING_VERSION)
			p->totals.strangers++;
		else if (h->type == RB_PING_QUESTION)
			answer(p, h, &s[i], seen_ticks, before_ns);
		else if (h->type == RB_PING_ANSWER)
			accept_answer(p, h, &s[i], seen_ticks);
		else
			p->totals.strangers++;
		err = rb_ping_post_recv(p, (int)s[i].wr_id);
		if (err)
			broken(p, RB_CALL_POST_RECV, err);
	}
	return n;
}

/* ---- jobs ---- */

/* Sends one ping of a job; nonzero: the queue is full, try again soon. */
static int ping(struct rb_ping *p, struct rb_ping_job *j, uint64_t index, uint64_t now)
{
	struct rb_ping_shot *x = index == CLOSING ? NULL : &j->shot[index];
	struct rb_ping_header *h;
	uint64_t ticks, waited_ns;
	int slot;

	if (p->nfree == 0)
		return -1;
	slot = p->free_send[--p->nfree];
	p->send[slot] = (struct rb_ping_send){ .seq = j->id | index };
	h = rb_ping_tx(p, slot);
	*h = (struct rb_ping_header){
		.magic = htobe32(RB_PING_MAGIC), .version = RB_PING_VERSION, .type = RB_PING_QUESTION, .nonce = htobe64(p->peer[j->peer].nonce),
		.seq = htobe64(j->id | index),
	};
	waited_ns = waited(p);
	ticks = rb_ticks();
	h->stamp = htobe64(ticks);
	if (post(p, slot, j->peer, j->size))
		return -1;
	p->totals.asked++;
	p->last_ping_ns = now;
	if (x) {
		x->post_ticks = ticks;
		x->waited_ns = waited_ns;
		x->state = RB_SHOT_OPEN;
		j->open++;
		if (j->sent++ == 0)
			j->first_ns = now;
		j->sent_ns = now;
	}
	return 0;
}

static void finish(struct rb_ping *p, int place, uint64_t now)
{
	struct rb_ping_job *j = p->job[place];
	uint64_t one = 1;
	ssize_t n;

	p->job[place] = NULL;
	while (p->top > 0 && !p->job[p->top - 1])
		p->top--;
	j->last_ns = now;
	atomic_store(&j->done, 1); /* not ours from here */
	n = write(p->done, &one, sizeof one);
	(void)n; /* EAGAIN: it will be read anyway */
}

enum { FULL_PAUSE_NS = 50000 };

/* Moves one job on. Returns when it wants to be looked at again; 0: it is over. */
static uint64_t advance(struct rb_ping *p, struct rb_ping_job *j, uint64_t now)
{
	uint64_t end, next = j->deadline_ns;

	if (now >= j->deadline_ns || p->peer[j->peer].nonce != j->nonce) /* the peer was removed; its place may be another's */
		return 0;
	if (j->sent < j->count) {
		if (now >= j->due_ns) {
			if (ping(p, j, j->sent, now))
				return now + FULL_PAUSE_NS;
			/* What was missed is not caught up on: a burst is another measurement. */
			j->due_ns = now - j->due_ns > j->gap_ns ? now + j->gap_ns : j->due_ns + j->gap_ns;
		}
		if (j->sent < j->count)
			return j->due_ns < next ? j->due_ns : next;
	}
	if (j->open == 0 && j->await == 0)
		return 0;
	end = j->sent_ns + j->timeout_ns;
	if (now >= end)
		return 0;
	if (j->await && j->closings < MAX_CLOSINGS && now >= j->close_ns && (j->open == 0 || now >= j->sent_ns + j->timeout_ns / 2)) {
		if (ping(p, j, CLOSING, now))
			return now + FULL_PAUSE_NS;
		j->closings++;
		j->close_ns = now + j->timeout_ns / 8;
	}
	if (j->await && j->closings < MAX_CLOSINGS) {
		uint64_t half = j->open ? j->sent_ns + j->timeout_ns / 2 : 0, at = j->close_ns > half ? j->close_ns : half;

		end = at < end ? at : end;
	}
	return end < next ? end : next;
}

/* Returns when the next job wants to be looked at. */
static uint64_t run_jobs(struct rb_ping *p, uint64_t now)
{
	uint64_t next = UINT64_MAX;

	for (int i = p->top - 1; i >= 0; i--) {
		uint64_t at;

		if (!p->job[i])
			continue;
		at = p->err ? 0 : advance(p, p->job[i], now);
		if (at == 0)
			finish(p, i, now);
		else if (at < next)
			next = at;
	}
	return next;
}

static int open_shots(const struct rb_ping *p)
{
	for (int i = 0; i < p->top; i++)
		if (p->job[i] && p->job[i]->open)
			return 1;
	return 0;
}

/* ---- the thread ---- */

static void drain_events(struct rb_ping *p)
{
	struct ibv_cq *cq;
	void *context;
	uint64_t n;
	ssize_t got = read(p->wake, &n, sizeof n);

	(void)got;
	while (ibv_get_cq_event(p->channel, &cq, &context) == 0)
		ibv_ack_cq_events(cq, 1);
}

/* A bell that was lost, as by a provider whose peer was restarted, must not make this end deaf. */
enum { LONGEST_SLEEP_NS = 100000000 };

/* Sleeps until something comes or the time has; the lock is free meanwhile. */
static void doze(struct rb_ping *p, uint64_t next)
{
	struct pollfd fds[2] = { { .fd = p->wake, .events = POLLIN }, { .fd = p->channel->fd, .events = POLLIN } };
	uint64_t now = rb_now_ns(), ns = next > now ? next - now : 0;
	struct timespec t;

	if (p->dying && ns > 10000000) /* for the completions that hold an address handle */
		ns = 10000000;
	if (ns > LONGEST_SLEEP_NS)
		ns = LONGEST_SLEEP_NS;
	t = (struct timespec){ .tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000) };
	p->totals.sleeps++;
	p->slept_wait_ns = waited(p);
	pthread_mutex_unlock(&p->lock);
	ppoll(fds, 2, &t, NULL); /* interrupted: the next turn sees to it */
	pthread_mutex_lock(&p->lock);
	p->rung = fds[1].revents && !fds[0].revents;
	if (fds[0].revents | fds[1].revents)
		drain_events(p);
}

void rb_ping_serve(struct rb_ping *p)
{
	p->schedstat = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
	pthread_mutex_lock(&p->lock);
	while (!atomic_load(&p->stop) && !p->err) {
		uint64_t now, next;
		int armed, came;

		p->totals.turns++;
		p->waited_known = 0;
		reap(p);
		came = receive(p);
		now = rb_now_ns();
		next = run_jobs(p, now);
		if (came || next <= now)
			continue;
		if (p->spin_ns && now - p->last_ping_ns < p->spin_ns && open_shots(p)) {
			pthread_mutex_unlock(&p->lock);
			rb_relax();
			pthread_mutex_lock(&p->lock);
			continue;
		}
		armed = ibv_req_notify_cq(p->rcq.cq, 0);
		if (armed) {
			broken(p, RB_CALL_POLL, armed < 0 ? -armed : armed);
			break;
		}
		if (receive(p) == 0 && !p->err) /* what came before it was armed rings no bell */
			doze(p, next);
		else
			drain_events(p); /* it may have rung: the next sleep is not to be ended by that */
	}
	if (!p->err)
		p->err = ECANCELED;
	run_jobs(p, rb_now_ns());
	pthread_mutex_unlock(&p->lock);
	if (p->schedstat >= 0)
		close(p->schedstat);
}
