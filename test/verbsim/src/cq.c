#include "verbsim.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- pushing and polling ---- */

struct event { /* in a FIFO: written and read whole */
	uint32_t cq, generation;
};

static void fire(struct cq_view *v)
{
	struct event e = { (uint32_t)(v->rec - v->home->cq), v->rec->generation };
	char path[256];

	if (v->event_fd < 0) {
		channel_fifo(v->home->slot, v->rec->chan, path, sizeof path);
		v->event_fd = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
	}
	if (v->event_fd < 0 || write(v->event_fd, &e, sizeof e) != sizeof e)
		say("completion event lost: %m");
}

bool cq_push(struct cq_view *v, const struct ibv_wc *wc, bool solicited, uint32_t is_send, uint32_t sq_done)
{
	struct cq_rec *r = v->rec;
	bool wake = false;
	struct cqe *e;

	shared_lock(&r->lock);
	if (unlikely(r->tail - r->head_seen >= r->cap))
		r->head_seen = load(&r->head);
	if (unlikely(r->broken || r->tail - r->head_seen >= r->cap)) {
		if (!r->broken)
			say("a CQ of %u entries is overrun", r->cap);
		store(&r->broken, 1);
		shared_unlock(&r->lock);
		return false;
	}
	e = &v->ring[r->tail & r->mask];
	e->wc = *wc;
	e->is_send = is_send;
	e->sq_done = sq_done;
	store(&e->turn, r->tail + 1);
	r->tail++;
	if (unlikely(r->armed) && (r->armed == 1 || solicited || wc->status)) {
		r->armed = 0;
		wake = r->chan != 0;
	}
	shared_unlock(&r->lock);
	if (wake)
		fire(v);
	return true;
}

/* Nothing is left to poll: fine, unless completions were lost. */
static int drained(struct cq *c)
{
	struct cq_rec *r = c->view.rec;
	struct ibv_async_event e = { .element.cq = &c->v, .event_type = IBV_EVENT_CQ_ERR };

	if (likely(!load(&r->broken)))
		return 0;
	if (__atomic_exchange_n(&r->broken, 2, __ATOMIC_RELAXED) == 1)
		async_event(c->v.context, &e);
	return -EIO;
}

static inline struct cqe *next(struct cq *c, uint32_t head)
{
	struct cqe *e = &c->view.ring[head & c->view.rec->mask];

	return load(&e->turn) == head + 1 ? e : NULL;
}

int cq_poll(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	struct cq *c = (struct cq *)cq;
	struct cq_rec *r = c->view.rec;
	struct cqe *e;
	uint32_t head;
	int k = 0;

	if (unlikely(peek(&waiters)))
		progress();
	if (!next(c, peek(&r->head)))
		return drained(c);
	if (unlikely(knobs.short_poll) && n > 1)
		n = 1;
	local_lock(&c->lock);
	for (head = r->head; k < n && (e = next(c, head)); head++) {
		wc[k++] = e->wc;
		if (e->is_send)
			store(&home->qp[qpn_index(e->wc.qp_num)].sq_done, e->sq_done);
	}
	store(&r->head, head);
	local_unlock(&c->lock);
	return k;
}

int cq_notify(struct ibv_cq *cq, int solicited_only)
{
	struct cq_rec *r = ((struct cq *)cq)->view.rec;

	shared_lock(&r->lock); /* so that a push either comes before the poll that follows, or sees armed */
	if (!solicited_only)
		r->armed = 1;
	else if (!r->armed)
		r->armed = 2;
	shared_unlock(&r->lock);
	return 0;
}

/* Drops the completions of a QP that is reset or gone. */
void cq_purge(struct cq *c, uint32_t qpn)
{
	struct cq_rec *r = c->view.rec;
	uint32_t to;

	if (knobs.null_mode)
		return;
	local_lock(&c->lock);
	shared_lock(&r->lock);
	to = r->head;
	for (uint32_t from = r->head; from != r->tail; from++) {
		struct cqe *e = &c->view.ring[from & r->mask];

		if (e->wc.qp_num == qpn)
			continue;
		if (to != from) {
			c->view.ring[to & r->mask] = *e;
			store(&c->view.ring[to & r->mask].turn, to + 1);
		}
		to++;
	}
	for (uint32_t i = to; i != r->tail; i++)
		store(&c->view.ring[i & r->mask].turn, 0);
	r->tail = to;
	shared_unlock(&r->lock);
	local_unlock(&c->lock);
}

/* ---- completion queues ---- */

struct channel {
	struct ibv_comp_channel v; /* first */
	uint32_t id;
};

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static struct cq *cqs[MAX_CQ]; /* for the events */
static uint32_t generation, channels;

static size_t ring_bytes(uint32_t mask) { return ((size_t)mask + 1) * sizeof(struct cqe); }

/* Gives it a record. From here on an event that is still on its way to a predecessor may look at it. */
static int place(struct cq *c)
{
	pthread_mutex_lock(&table_lock);
	for (uint32_t i = 0; i < MAX_CQ; i++) {
		if (cqs[i])
			continue;
		cqs[i] = c;
		c->v.handle = i;
		c->view.rec = &home->cq[i];
		c->view.rec->generation = ++generation;
		pthread_mutex_unlock(&table_lock);
		return 0;
	}
	pthread_mutex_unlock(&table_lock);
	return ENOMEM;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
			     int comp_vector)
{
	struct cq *c;
	struct cq_rec *r;
	uint32_t slots = 1, ring;
	int err = ENOMEM;

	if (cqe < 1 || cqe > MAX_CQE || comp_vector < 0 || comp_vector >= context->num_comp_vectors) {
		errno = EINVAL;
		return NULL;
	}
	while (slots < (uint32_t)cqe)
		slots <<= 1;
	c = calloc(1, sizeof *c);
	if (!c)
		return NULL;
	c->v.context = context;
	c->v.channel = channel;
	c->v.cq_context = cq_context;
	c->v.cqe = cqe;
	c->null_mask = slots - 1;
	c->null_cap = (uint32_t)cqe;
	if (knobs.null_mode && !(c->null_ring = calloc(slots, sizeof *c->null_ring)))
		goto fail;
	err = ring_alloc(ring_bytes(slots - 1), &ring);
	if (err)
		goto fail;
	err = place(c);
	if (err) {
		ring_free(ring_bytes(slots - 1), ring);
		goto fail;
	}
	pthread_mutex_init(&c->v.mutex, NULL);
	pthread_cond_init(&c->v.cond, NULL);
	r = c->view.rec;
	c->view.ring = ring_at(home, ring);
	c->view.home = home;
	c->view.event_fd = channel ? channel->fd : -1;
	r->ring = ring;
	r->mask = slots - 1;
	r->cap = (uint32_t)cqe;
	r->chan = channel ? ((struct channel *)channel)->id : 0;
	r->tail = r->head = r->head_seen = r->armed = r->broken = 0;
	if (channel) {
		pthread_mutex_lock(&context->mutex);
		channel->refcnt++;
		pthread_mutex_unlock(&context->mutex);
	}
	return &c->v;
fail:
	free(c->null_ring);
	free(c);
	errno = err;
	return NULL;
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
	struct cq *c = (struct cq *)cq;
	struct cq_rec *r = c->view.rec;

	if (load(&c->qps))
		return EBUSY;
	pthread_mutex_lock(&table_lock);
	r->generation = 0; /* no more events */
	pthread_mutex_unlock(&table_lock);
	/* As libibverbs: not before every event that was got is acknowledged. */
	pthread_mutex_lock(&cq->mutex);
	while (cq->comp_events_completed != c->events)
		pthread_cond_wait(&cq->cond, &cq->mutex);
	pthread_mutex_unlock(&cq->mutex);
	if (cq->channel) {
		pthread_mutex_lock(&cq->context->mutex);
		cq->channel->refcnt--;
		pthread_mutex_unlock(&cq->context->mutex);
	}
	ring_free(ring_bytes(r->mask), r->ring);
	pthread_mutex_lock(&table_lock);
	cqs[cq->handle] = NULL;
	pthread_mutex_unlock(&table_lock);
	pthread_mutex_destroy(&cq->mutex);
	pthread_cond_destroy(&cq->cond);
	free(c->null_ring);
	free(c);
	return 0;
}

void cq_after_fork(void)
{
	memset(cqs, 0, sizeof cqs);
	pthread_mutex_init(&table_lock, NULL);
}

int ibv_resize_cq(struct ibv_cq *cq, int cqe)
{
	(void)cq, (void)cqe;
	return EOPNOTSUPP;
}

/* ---- events: a FIFO, as a peer can open that by its name ---- */

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	struct channel *h;
	char path[256];

	if (knobs.null_mode) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	h = calloc(1, sizeof *h);
	if (!h)
		return NULL;
	h->id = __atomic_add_fetch(&channels, 1, __ATOMIC_RELAXED);
	h->v.context = context;
	channel_fifo(home->slot, h->id, path, sizeof path);
	if (mkfifo(path, 0600) || (h->v.fd = open(path, O_RDWR | O_CLOEXEC)) < 0) {
		free(h);
		return NULL;
	}
	return &h->v;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
	char path[256];

	if (channel->refcnt)
		return EBUSY;
	channel_fifo(home->slot, ((struct channel *)channel)->id, path, sizeof path);
	unlink(path);
	close(channel->fd);
	free(channel);
	return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
	struct event e;

	for (;;) {
		struct cq *c;

		if (read(channel->fd, &e, sizeof e) != sizeof e)
			return -1;
		pthread_mutex_lock(&table_lock);
		c = e.cq < MAX_CQ ? cqs[e.cq] : NULL;
		if (c && c->view.rec->generation == e.generation)
			c->events++; /* else: it was destroyed meanwhile */
		else
			c = NULL;
		pthread_mutex_unlock(&table_lock);
		if (c) {
			*cq = &c->v;
			*cq_context = c->v.cq_context;
			return 0;
		}
	}
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned nevents)
{
	pthread_mutex_lock(&cq->mutex);
	cq->comp_events_completed += nevents;
	pthread_cond_signal(&cq->cond);
	pthread_mutex_unlock(&cq->mutex);
}
