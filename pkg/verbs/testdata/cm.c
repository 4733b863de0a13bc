/* Drives rb_cm.c on a scripted connection manager, whose functions stand in for librdmacm's. Built and run by TestCM under
 * the sanitizers: what a session leaves behind is a leak. */
#include "../rb_cm.h"
#include "../rb_clock.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_QPS = 40, MAX_EVENTS = 256 };
enum what { NOTHING, ADDR, ROUTE, CONNECT, ACCEPT, REQUESTS };

static int failures;

static void expect(int ok, const char *what, const char *why)
{
	if (ok)
		return;
	printf("FAIL %s: %s\n", what, why);
	failures++;
}

static struct {
	struct rdma_cm_event queue[MAX_EVENTS];
	uint8_t data[MAX_EVENTS][56];
	unsigned head, tail, unacked;
	int pipe[2];
	int ids, channels;
	enum rdma_cm_event_type last_answer;
	/* the script */
	int iwarp, other_device;
	enum what silent; /* this is never answered */
	enum what fails;  /* this is answered with `event` and `status` */
	int fails_at;     /* for this QP */
	enum rdma_cm_event_type event;
	int status;
	int qps, strangers;
	uint8_t session[RB_CM_SESSION];
	/* what was done */
	int state[MAX_QPS], rejected, accepted, established;
	uint32_t greeted[MAX_QPS];
} cm;

static struct ibv_device device = { .name = "fake0" }, other = { .name = "fake1" };
static struct ibv_context ctx = { .device = &device }, other_ctx = { .device = &other };

static void push(struct rdma_cm_id *id, enum rdma_cm_event_type type, int status, const void *data, uint8_t len)
{
	unsigned at = cm.tail++ % MAX_EVENTS;
	ssize_t n;

	cm.queue[at] = (struct rdma_cm_event){ .id = id, .event = type, .status = status };
	memset(cm.data[at], 0, sizeof cm.data[at]);
	if (len)
		memcpy(cm.data[at], data, len);
	cm.queue[at].param.conn.private_data = len ? cm.data[at] : NULL;
	cm.queue[at].param.conn.private_data_len = len;
	n = write(cm.pipe[1], "", 1);
	(void)n;
}

/* Answers a step as the script says. */
static int answer(struct rdma_cm_id *id, enum what step, enum rdma_cm_event_type good)
{
	int qp = (int)(uintptr_t)id->context;

	if (cm.silent == step)
		return 0;
	if (cm.fails == step && cm.fails_at == qp)
		push(id, cm.event, cm.status, NULL, 0);
	else
		push(id, good, 0, NULL, 0);
	return 0;
}

struct rdma_event_channel *rdma_create_event_channel(void)
{
	struct rdma_event_channel *ch = calloc(1, sizeof *ch);

	if (pipe(cm.pipe))
		abort();
	ch->fd = cm.pipe[0];
	cm.channels++;
	return ch;
}

void rdma_destroy_event_channel(struct rdma_event_channel *ch)
{
	close(cm.pipe[0]);
	close(cm.pipe[1]);
	free(ch);
	cm.channels--;
}

static struct rdma_cm_id *new_id(void *context)
{
	struct rdma_cm_id *id = calloc(1, sizeof *id);

	id->context = context;
	cm.ids++;
	return id;
}

int rdma_create_id(struct rdma_event_channel *ch, struct rdma_cm_id **id, void *context, enum rdma_port_space ps)
{
	(void)ch;
	(void)ps;
	*id = new_id(context);
	return 0;
}

int rdma_destroy_id(struct rdma_cm_id *id)
{
	expect(cm.unacked == 0, "destroy", "an event is not acknowledged: the real thing would wait for ever");
	free(id);
	cm.ids--;
	return 0;
}

static void place(struct rdma_cm_id *id)
{
	id->verbs = cm.other_device ? &other_ctx : &ctx;
	id->port_num = 1;
}

int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *addr)
{
	if (addr->sa_family == AF_INET && ((struct sockaddr_in *)addr)->sin_addr.s_addr == htonl(0x0a090001))
		place(id);
	return 0;
}

__be16 rdma_get_src_port(struct rdma_cm_id *id)
{
	(void)id;
	return htons(4711);
}

static void request(const uint8_t *session, uint32_t qp, uint8_t len)
{
	uint8_t data[56] = { 0 };
	uint32_t be = htonl(qp);

	memcpy(data, session, RB_CM_SESSION);
	memcpy(data + RB_CM_SESSION, &be, sizeof be);
	push(new_id(NULL), RDMA_CM_EVENT_CONNECT_REQUEST, 0, data, len);
}

int rdma_listen(struct rdma_cm_id *id, int backlog)
{
	static const uint8_t wrong[RB_CM_SESSION] = { 9 };

	(void)id;
	(void)backlog;
	if (cm.silent == REQUESTS)
		return 0;
	for (int i = cm.qps - 1; i >= 0; i--) {
		if (i < cm.strangers) {
			request(wrong, (uint32_t)i, 56);
			request(cm.session, (uint32_t)cm.qps, 56);
			request(cm.session, UINT32_MAX, 56);
			request(cm.session, (uint32_t)i, 7);
			request(cm.session, (uint32_t)i, 0);
		}
		request(cm.session, (uint32_t)i, 56);
		if (i < cm.strangers)
			request(cm.session, (uint32_t)i, 56); /* once more */
	}
	return 0;
}

int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *src, struct sockaddr *dst, int ms)
{
	expect(ms > 0 && src->sa_family == AF_INET && ((struct sockaddr_in *)dst)->sin_port == htons(4711), "resolve", "bad arguments");
	place(id);
	return answer(id, ADDR, RDMA_CM_EVENT_ADDR_RESOLVED);
}

int rdma_resolve_route(struct rdma_cm_id *id, int ms)
{
	expect(ms > 0, "resolve", "no time for it");
	return answer(id, ROUTE, RDMA_CM_EVENT_ROUTE_RESOLVED);
}

int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *p)
{
	uint32_t qp;

	expect(p->private_data_len == RB_CM_SESSION + 4 && memcmp(p->private_data, cm.session, RB_CM_SESSION) == 0, "connect", "does not name its session");
	memcpy(&qp, (const uint8_t *)p->private_data + RB_CM_SESSION, 4);
	cm.greeted[ntohl(qp)]++;
	expect(p->qp_num == 100 + ntohl(qp), "connect", "another QP than it says");
	return answer(id, CONNECT, cm.iwarp ? RDMA_CM_EVENT_ESTABLISHED : RDMA_CM_EVENT_CONNECT_RESPONSE);
}

int rdma_establish(struct rdma_cm_id *id)
{
	(void)id;
	cm.established++;
	return 0;
}

int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *p)
{
	expect(p->qp_num == 100 + (uint32_t)(uintptr_t)id->context, "accept", "another QP than was asked for");
	cm.accepted++;
	return answer(id, ACCEPT, RDMA_CM_EVENT_ESTABLISHED);
}

int rdma_reject(struct rdma_cm_id *id, const void *data, uint8_t len)
{
	(void)id;
	(void)data;
	(void)len;
	cm.rejected++;
	return 0;
}

int rdma_get_cm_event(struct rdma_event_channel *ch, struct rdma_cm_event **out)
{
	char c;

	if (read(ch->fd, &c, 1) != 1)
		return -1;
	*out = &cm.queue[cm.head++ % MAX_EVENTS];
	cm.unacked++;
	return 0;
}

int rdma_ack_cm_event(struct rdma_cm_event *ev)
{
	if (ev->param.conn.private_data)
		memset((void *)(uintptr_t)ev->param.conn.private_data, 0xee, 56);
	memset(ev, 0xee, sizeof *ev);
	cm.unacked--;
	return 0;
}

int rdma_init_qp_attr(struct rdma_cm_id *id, struct ibv_qp_attr *a, int *mask)
{
	enum ibv_qp_state s = a->qp_state;

	(void)id;
	memset(a, 0, sizeof *a);
	a->qp_state = s;
	a->path_mtu = IBV_MTU_4096;
	a->ah_attr.is_global = 1;
	*mask = IBV_QP_STATE | 0x200000;
	if (s == IBV_QPS_INIT)
		*mask |= IBV_QP_ACCESS_FLAGS;
	else if (cm.iwarp)
		*mask = 0;
	else if (s == IBV_QPS_RTR)
		*mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_MIN_RNR_TIMER | IBV_QP_MAX_DEST_RD_ATOMIC;
	else
		*mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	return 0;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask)
{
	int i = (int)qp->qp_num - 100;

	expect(mask & IBV_QP_STATE && !(mask & 0x1e00000), "modify", "bad mask");
	expect((int)a->qp_state == cm.state[i] + 1, "modify", "a step left out, or twice");
	cm.state[i] = (int)a->qp_state;
	if (a->qp_state == IBV_QPS_INIT)
		expect(a->qp_access_flags == IBV_ACCESS_REMOTE_WRITE, "modify", "other rights than the op needs");
	if (a->qp_state == IBV_QPS_RTR)
		expect(a->path_mtu == IBV_MTU_1024 && a->ah_attr.grh.flow_label == 5 && a->ah_attr.grh.traffic_class == 104 && a->min_rnr_timer == 12,
		       "modify", "the session's path was not set");
	if (a->qp_state == IBV_QPS_RTS)
		expect(a->timeout == 14 && a->retry_cnt == 6 && a->rnr_retry == 7, "modify", "the session's timers were not set");
	return 0;
}

/* ---- the cases ---- */

static struct ibv_qp qps[MAX_QPS];
static struct ibv_qp *qp_list[MAX_QPS];
static struct rb_ep ep;
static const struct rb_conn_attr path = { .mtu = 1024, .flow_label = 5, .traffic_class = 104, .timeout = 14, .retry = 6, .rnr_retry = 7,
					  .min_rnr_timer = 12, .rd_atom = 1, .dest_rd_atom = 1 };
static const struct rb_cm_addr here = { .ip = { 10, 9, 0, 1 }, .v4 = 1, .port = 4711 };

static struct rb_cm *fresh(int n)
{
	struct rb_cm *c = NULL;
	int err;

	memset(&cm, 0, sizeof cm);
	for (int i = 0; i < RB_CM_SESSION; i++)
		cm.session[i] = (uint8_t)(i + 1);
	cm.qps = n;
	for (int i = 0; i < n; i++) {
		qps[i] = (struct ibv_qp){ .context = &ctx, .qp_num = (uint32_t)(100 + i) };
		qp_list[i] = &qps[i];
	}
	ep = (struct rb_ep){ .ctx = &ctx, .qp = qp_list, .qps = n, .a = { .op = RB_WRITE, .port = 1, .qps = n, .both_ways = 1 } };
	err = rb_cm_new(cm.session, &c);
	expect(err == 0, "new", "failed");
	return c;
}

static void done(struct rb_cm *c, const char *what)
{
	rb_cm_free(c);
	expect(cm.ids == 0, what, "IDs are left");
	expect(cm.channels == 0, what, "the channel is left");
	expect(cm.unacked == 0, what, "events are left unacknowledged");
}

static void all_up(const char *what, int n, int state)
{
	for (int i = 0; i < n; i++)
		expect(cm.state[i] == state, what, "a QP is not where it should be");
}

static uint64_t in_ms(uint64_t ms) { return rb_now_ns() + ms * 1000000; }

static void *stop_soon(void *c)
{
	usleep(30000);
	rb_cm_stop(c);
	return NULL;
}

static void connects(void)
{
	static const int counts[] = { 1, 2, 16, 17, MAX_QPS };

	for (int i = 0; i < 10; i++) {
		int n = counts[i / 2], iwarp = i % 2;
		struct rb_cm *c = fresh(n);
		struct rb_cm_error why;
		char what[64];

		snprintf(what, sizeof what, "connect %d QPs, iWARP %d", n, iwarp);
		cm.iwarp = iwarp;
		expect(rb_cm_connect(c, &ep, &path, &here, &here, in_ms(5000), &why) == 0, what, "failed");
		all_up(what, n, iwarp ? IBV_QPS_INIT : IBV_QPS_RTS);
		expect(iwarp || cm.established == n, what, "peers that wait for the last word");
		for (int q = 0; q < n; q++)
			expect(cm.greeted[q] == 1, what, "a QP asked for twice, or never");
		done(c, what);
	}
}

static void connect_fails(void)
{
	static const struct {
		const char *what;
		enum what at;
		enum rdma_cm_event_type event;
		int status, want, reason;
		enum rb_cm_step step;
	} cases[] = {
		{ "no such address", ADDR, RDMA_CM_EVENT_ADDR_ERROR, -ENODEV, -ENODEV, 0, RB_CM_ADDRESS },
		{ "no such host", ADDR, RDMA_CM_EVENT_ADDR_ERROR, 0, -EHOSTUNREACH, 0, RB_CM_ADDRESS },
		{ "no route", ROUTE, RDMA_CM_EVENT_ROUTE_ERROR, -ETIMEDOUT, -ETIMEDOUT, 0, RB_CM_ROUTE },
		{ "nobody listens", CONNECT, RDMA_CM_EVENT_REJECTED, 8, -ECONNREFUSED, 8, RB_CM_CONNECT },
		{ "nobody listens, iWARP", CONNECT, RDMA_CM_EVENT_REJECTED, -ECONNREFUSED, -ECONNREFUSED, 0, RB_CM_CONNECT },
		{ "no answer", CONNECT, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT, -ETIMEDOUT, 0, RB_CM_CONNECT },
		{ "broken off", CONNECT, RDMA_CM_EVENT_DISCONNECTED, 0, -ECONNRESET, 0, RB_CM_CONNECT },
		{ "device gone", ROUTE, RDMA_CM_EVENT_DEVICE_REMOVAL, 0, -ENODEV, 0, RB_CM_CONNECT },
	};

	for (unsigned i = 0; i < sizeof cases / sizeof cases[0]; i++)
		for (int at = 0; at < 3; at += 2) {
			struct rb_cm *c = fresh(3);
			struct rb_cm_error why;
			int err;

			cm.fails = cases[i].at;
			cm.fails_at = at;
			cm.event = cases[i].event;
			cm.status = cases[i].status;
			err = rb_cm_connect(c, &ep, &path, &here, &here, in_ms(5000), &why);
			expect(err == cases[i].want, cases[i].what, "wrong error");
			expect(why.step == cases[i].step && why.qp == at && why.reason == cases[i].reason, cases[i].what, "does not say where");
			done(c, cases[i].what);
		}
}

/* Who does not answer, is waited for until the deadline, or until the session is over. */
static void silence(void)
{
	static const enum what steps[] = { ADDR, ROUTE, CONNECT, REQUESTS, ACCEPT };

	for (int i = 0; i < 10; i++) {
		enum what step = steps[i / 2];
		int stopped = i % 2, err;
		struct rb_cm *c = fresh(2);
		struct rb_cm_error why;
		uint64_t start = rb_now_ns(), deadline = in_ms(stopped ? 20000 : 50);
		uint16_t port = 0;
		pthread_t t;
		char what[64];

		snprintf(what, sizeof what, "silence at step %d, stopped %d", (int)step, stopped);
		cm.silent = step;
		if (stopped)
			pthread_create(&t, NULL, stop_soon, c);
		if (step == REQUESTS || step == ACCEPT) {
			expect(rb_cm_listen(c, &ep, &here, &port, &why) == 0 && port == 4711, what, "does not listen");
			err = rb_cm_accept(c, &ep, &path, deadline, &why);
		} else {
			err = rb_cm_connect(c, &ep, &path, &here, &here, deadline, &why);
		}
		expect(err == (stopped ? -ECANCELED : -ETIMEDOUT), what, "wrong error");
		expect(stopped || rb_now_ns() >= deadline, what, "gave up early");
		expect(rb_now_ns() - start < UINT64_C(15000000000), what, "waited much longer");
		if (stopped)
			pthread_join(t, NULL);
		done(c, what);
	}
}

static void accepts(void)
{
	for (int strangers = 0; strangers < 3; strangers++) {
		struct rb_cm *c = fresh(5);
		struct rb_cm_error why;
		uint16_t port = 0;

		cm.strangers = strangers;
		expect(rb_cm_listen(c, &ep, &here, &port, &why) == 0 && port == 4711, "accept", "does not listen");
		expect(rb_cm_accept(c, &ep, &path, in_ms(5000), &why) == 0, "accept", "failed");
		all_up("accept", 5, IBV_QPS_RTS);
		expect(cm.accepted == 5, "accept", "not each QP once");
		/* The last stranger may find the door shut. */
		expect(cm.rejected >= 6 * strangers - 1 && cm.rejected <= 6 * strangers, "accept", "strangers were not turned away");
		expect(cm.ids <= 6, "accept", "strangers' IDs are kept");
		for (; cm.head != cm.tail; cm.head++) /* what nobody took was never handed out */
			if (cm.queue[cm.head % MAX_EVENTS].event == RDMA_CM_EVENT_CONNECT_REQUEST) {
				free(cm.queue[cm.head % MAX_EVENTS].id);
				cm.ids--;
			}
		done(c, "accept");
	}
}

static void accept_fails(void)
{
	struct rb_cm *c = fresh(3);
	struct rb_cm_error why;
	uint16_t port;

	cm.fails = ACCEPT;
	cm.fails_at = 1;
	cm.event = RDMA_CM_EVENT_UNREACHABLE;
	cm.status = -ETIMEDOUT;
	expect(rb_cm_listen(c, &ep, &here, &port, &why) == 0, "accept fails", "does not listen");
	expect(rb_cm_accept(c, &ep, &path, in_ms(5000), &why) == -ETIMEDOUT && why.step == RB_CM_ACCEPT && why.qp == 1, "accept fails", "wrong error");
	done(c, "accept fails");
}

static void other_port(void)
{
	struct rb_cm *c = fresh(1);
	struct rb_cm_error why;
	uint16_t port;

	cm.other_device = 1;
	expect(rb_cm_connect(c, &ep, &path, &here, &here, in_ms(5000), &why) == -ENODEV && why.step == RB_CM_DEVICE && strcmp(why.device, "fake1") == 0,
	       "another device", "connected by the wrong one");
	done(c, "another device");
	c = fresh(1);
	cm.other_device = 1;
	expect(rb_cm_listen(c, &ep, &here, &port, &why) == -ENODEV && why.step == RB_CM_DEVICE, "another device", "listens on the wrong one");
	done(c, "another device");
}

static void owner(void)
{
	static const struct rb_cm_addr nobody = { .ip = { 10, 0, 0, 1 }, .v4 = 1 };
	char name[IBV_SYSFS_NAME_MAX];
	int port = 0;

	memset(&cm, 0, sizeof cm);
	expect(rb_cm_owner(&here, name, &port) == 0 && strcmp(name, "fake0") == 0 && port == 1, "owner", "not found");
	expect(rb_cm_owner(&nobody, name, &port) == -ENODEV, "owner", "an address of no device has one");
	expect(cm.ids == 0 && cm.channels == 0, "owner", "something is left");
}

int main(void)
{
	connects();
	connect_fails();
	silence();
	accepts();
	accept_fails();
	other_port();
	owner();
	if (!failures)
		printf("all passed\n");
	return failures != 0;
}
