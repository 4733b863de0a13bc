/* rdma_cm: the queue pairs stay the endpoint's own, on its PD and CQs. The CM only tells what to set them to, and carries
 * the handshake. All its calls are asynchronous; here one loop over poll() drives the IDs of a session, some at a time. */
#include "rb_cm.h"
#include "rb_clock.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* IDs of a session in the handshake at a time: each takes datagrams of the one CM queue pair that a port has. */
enum { WINDOW = 16 };

/* What an initiator sends along, so that a listener knows its own session's from a stranger's. At most 56 bytes fit. */
struct hello {
	uint8_t session[RB_CM_SESSION];
	uint32_t qp; /* which of the session's, network order */
};

struct rb_cm {
	struct rdma_event_channel *ch;
	int wake; /* eventfd: readable once stopped */
	struct rdma_cm_id *listener;
	struct rdma_cm_id **id; /* one a QP; NULL: not there yet */
	int n, started, up;
	uint8_t session[RB_CM_SESSION];
};

static int neg_errno(void) { return errno ? -errno : -EIO; }

int rb_cm_new(const uint8_t session[RB_CM_SESSION], struct rb_cm **out)
{
	struct rb_cm *cm = calloc(1, sizeof *cm);
	int err, flags;

	if (!cm)
		return -ENOMEM;
	memcpy(cm->session, session, sizeof cm->session);
	cm->wake = -1;
	errno = 0;
	cm->ch = rdma_create_event_channel();
	if (!cm->ch)
		goto fail;
	flags = fcntl(cm->ch->fd, F_GETFL);
	if (flags < 0 || fcntl(cm->ch->fd, F_SETFL, flags | O_NONBLOCK))
		goto fail;
	cm->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (cm->wake < 0)
		goto fail;
	*out = cm;
	return 0;
fail:
	err = neg_errno();
	rb_cm_free(cm);
	return err;
}

void rb_cm_stop(struct rb_cm *cm)
{
	uint64_t one = 1;
	ssize_t n = write(cm->wake, &one, sizeof one);

	(void)n; /* full means stopped many times */
}

void rb_cm_free(struct rb_cm *cm)
{
	/* Every event was acknowledged when it was taken, so none of these waits for one. */
	for (int i = 0; i < cm->n; i++)
		if (cm->id[i])
			rdma_destroy_id(cm->id[i]);
	if (cm->listener)
		rdma_destroy_id(cm->listener);
	if (cm->ch)
		rdma_destroy_event_channel(cm->ch);
	if (cm->wake >= 0)
		close(cm->wake);
	free(cm->id);
	free(cm);
}

static struct sockaddr *sock_addr(const struct rb_cm_addr *a, struct sockaddr_storage *s)
{
	memset(s, 0, sizeof *s);
	if (a->v4) {
		struct sockaddr_in *in = (struct sockaddr_in *)s;

		in->sin_family = AF_INET;
		in->sin_port = htons(a->port);
		memcpy(&in->sin_addr, a->ip, 4);
	} else {
		struct sockaddr_in6 *in = (struct sockaddr_in6 *)s;

		in->sin6_family = AF_INET6;
		in->sin6_port = htons(a->port);
		in->sin6_scope_id = a->scope;
		memcpy(&in->sin6_addr, a->ip, 16);
	}
	return (struct sockaddr *)s;
}

int rb_cm_owner(const struct rb_cm_addr *at, char device[IBV_SYSFS_NAME_MAX], int *port)
{
	struct sockaddr_storage s;
	struct rdma_event_channel *ch;
	struct rdma_cm_id *id;
	int err = 0;

	errno = 0;
	ch = rdma_create_event_channel();
	if (!ch)
		return neg_errno();
	if (rdma_create_id(ch, &id, NULL, RDMA_PS_TCP)) {
		err = neg_errno();
		rdma_destroy_event_channel(ch);
		return err;
	}
	if (rdma_bind_addr(id, sock_addr(at, &s))) {
		err = neg_errno();
	} else if (!id->verbs) {
		err = -ENODEV;
	} else {
		strncpy(device, id->verbs->device->name, IBV_SYSFS_NAME_MAX - 1);
		device[IBV_SYSFS_NAME_MAX - 1] = 0;
		*port = id->port_num;
	}
	rdma_destroy_id(id);
	rdma_destroy_event_channel(ch);
	return err;
}

/* An event, without ties to the CM. */
struct event {
	enum rdma_cm_event_type type;
	struct rdma_cm_id *id;
	int status;
	int greets; /* hello is there */
	struct hello hello;
};

/* The next event: 0, or -errno. A stop or the deadline comes before whatever waits. */
static int next_event(struct rb_cm *cm, uint64_t deadline_ns, struct event *out)
{
	struct pollfd p[] = { { .fd = cm->wake, .events = POLLIN }, { .fd = cm->ch->fd, .events = POLLIN } };

	for (;;) {
		struct rdma_cm_event *ev;
		uint64_t now = rb_now_ns(), ms;

		if (now >= deadline_ns)
			return -ETIMEDOUT;
		ms = (deadline_ns - now) / 1000000 + 1;
		errno = 0;
		if (poll(p, 2, ms > INT_MAX ? INT_MAX : (int)ms) < 0) {
			if (errno == EINTR)
				continue;
			return neg_errno();
		}
		if (p[0].revents)
			return -ECANCELED;
		if (!p[1].revents)
			continue;
		if (rdma_get_cm_event(cm->ch, &ev)) {
			if (errno == EAGAIN || errno == EINTR)
				continue;
			return neg_errno();
		}
		*out = (struct event){ .type = ev->event, .id = ev->id, .status = ev->status };
		if (ev->event == RDMA_CM_EVENT_CONNECT_REQUEST && ev->param.conn.private_data &&
		    ev->param.conn.private_data_len >= sizeof out->hello) {
			memcpy(&out->hello, ev->param.conn.private_data, sizeof out->hello);
			out->greets = 1;
		}
		rdma_ack_cm_event(ev);
		return 0;
	}
}

/* The errno of an event that is no step forward; 0: it means nothing to us. */
static int trouble(const struct event *ev, struct rb_cm_error *why)
{
	switch (ev->type) {
	case RDMA_CM_EVENT_ADDR_ERROR:
	case RDMA_CM_EVENT_ROUTE_ERROR:
	case RDMA_CM_EVENT_UNREACHABLE: return ev->status < 0 ? ev->status : -EHOSTUNREACH;
	case RDMA_CM_EVENT_REJECTED:
		why->reason = ev->status > 0 ? ev->status : 0; /* of InfiniBand's list; iWARP has an errno */
		return -ECONNREFUSED;
	case RDMA_CM_EVENT_CONNECT_ERROR: return ev->status < 0 ? ev->status : -EIO;
	case RDMA_CM_EVENT_DISCONNECTED: return -ECONNRESET;
	case RDMA_CM_EVENT_DEVICE_REMOVAL: return -ENODEV;
	default: return 0;
	}
}

static int same_port(const struct rb_ep *e, const struct rdma_cm_id *id, struct rb_cm_error *why)
{
	const char *name = id->verbs ? id->verbs->device->name : "no RDMA device";

	if (id->verbs && strcmp(name, e->ctx->device->name) == 0 && id->port_num == e->a.port)
		return 1;
	why->step = RB_CM_DEVICE;
	strncpy(why->device, name, sizeof why->device - 1);
	why->port = id->port_num;
	return 0;
}

static int mtu_code(int bytes)
{
	int code = IBV_MTU_256;

	while (code < IBV_MTU_4096 && (128 << (code + 1)) <= bytes)
		code++;
	return code;
}

/* Moves a QP on with what the CM says, and with what the session says where that is the endpoint's to choose. */
static int to_state(struct rb_ep *e, int qp, struct rdma_cm_id *id, enum ibv_qp_state state)
{
	const struct rb_conn_attr *c = &e->c;
	struct ibv_qp_attr a = { .qp_state = state };
	int mask = 0, mtu = mtu_code(c->mtu);

	errno = 0;
	if (rdma_init_qp_attr(id, &a, &mask))
		return neg_errno();
	mask &= ~0x1e00000; /* bits of the kernel's own, which some kernels let through on RoCE */
	if (mask & IBV_QP_ACCESS_FLAGS)
		a.qp_access_flags = rb_access_flags(&e->a) & ~(unsigned)IBV_ACCESS_LOCAL_WRITE;
	if ((mask & IBV_QP_PATH_MTU) && mtu < (int)a.path_mtu)
		a.path_mtu = (enum ibv_mtu)mtu;
	if (mask & IBV_QP_AV) {
		if (c->sl)
			a.ah_attr.sl = (uint8_t)c->sl;
		if (a.ah_attr.is_global && c->traffic_class)
			a.ah_attr.grh.traffic_class = (uint8_t)c->traffic_class;
		if (a.ah_attr.is_global && c->flow_label)
			a.ah_attr.grh.flow_label = (uint32_t)c->flow_label;
	}
	a.max_dest_rd_atomic = (uint8_t)c->dest_rd_atom;
	a.max_rd_atomic = (uint8_t)c->rd_atom;
	a.min_rnr_timer = (uint8_t)c->min_rnr_timer;
	a.timeout = (uint8_t)c->timeout;
	a.retry_cnt = (uint8_t)c->retry;
	a.rnr_retry = (uint8_t)c->rnr_retry;
	/* iWARP leaves nothing to be set on the way to RTS. */
	return mask ? -ibv_modify_qp(e->qp[qp], &a, mask) : 0;
}

static int up_to(struct rb_ep *e, int qp, struct rdma_cm_id *id, enum ibv_qp_state from, enum ibv_qp_state to, struct rb_cm_error *why)
{
	int err = 0;

	for (int s = from; s <= (int)to && !err; s++)
		err = to_state(e, qp, id, (enum ibv_qp_state)s);
	if (err)
		why->step = RB_CM_QP;
	return err;
}

static struct rdma_conn_param conn_param(const struct rb_ep *e, int qp, const struct hello *h)
{
	return (struct rdma_conn_param){
		.private_data = h, .private_data_len = h ? sizeof *h : 0, .responder_resources = (uint8_t)e->c.dest_rd_atom,
		.initiator_depth = (uint8_t)e->c.rd_atom, .retry_count = (uint8_t)e->c.retry, .rnr_retry_count = (uint8_t)e->c.rnr_retry,
		.qp_num = e->qp[qp]->qp_num,
	};
}

static int begin(struct rb_cm *cm, struct rb_ep *e, struct rb_cm_error *why, enum rb_cm_step step)
{
	*why = (struct rb_cm_error){ .step = step };
	cm->id = calloc((size_t)e->qps, sizeof(struct rdma_cm_id *));
	if (!cm->id)
		return -ENOMEM;
	cm->n = e->qps;
	return 0;
}

/* ---- the responder ---- */

int rb_cm_listen(struct rb_cm *cm, struct rb_ep *e, const struct rb_cm_addr *at, uint16_t *port, struct rb_cm_error *why)
{
	struct sockaddr_storage s;
	int err = begin(cm, e, why, RB_CM_BIND);

	if (err)
		return err;
	errno = 0;
	if (rdma_create_id(cm->ch, &cm->listener, NULL, RDMA_PS_TCP)) {
		cm->listener = NULL;
		return neg_errno();
	}
	if (rdma_bind_addr(cm->listener, sock_addr(at, &s)))
		return neg_errno();
	if (!same_port(e, cm->listener, why))
		return -ENODEV;
	why->step = RB_CM_LISTEN;
	if (rdma_listen(cm->listener, e->qps + WINDOW))
		return neg_errno();
	*port = ntohs(rdma_get_src_port(cm->listener));
	return 0;
}

/* Answers a request for a connection. A stranger's is no error of the session. */
static int answer(struct rb_cm *cm, struct rb_ep *e, const struct event *ev, struct rb_cm_error *why)
{
	uint32_t qp = ntohl(ev->hello.qp);
	struct rdma_conn_param param;
	int err;

	if (!ev->greets || memcmp(ev->hello.session, cm->session, sizeof cm->session) || qp >= (uint32_t)cm->n || cm->id[qp]) {
		rdma_reject(ev->id, NULL, 0);
		rdma_destroy_id(ev->id);
		return 0;
	}
	cm->id[qp] = ev->id;
	ev->id->context = (void *)(uintptr_t)qp;
	why->qp = (int)qp;
	err = up_to(e, (int)qp, ev->id, IBV_QPS_INIT, IBV_QPS_RTS, why);
	if (err) {
		rdma_reject(ev->id, NULL, 0);
		return err;
	}
	param = conn_param(e, (int)qp, NULL);
	errno = 0;
	why->step = RB_CM_ACCEPT;
	return rdma_accept(ev->id, &param) ? neg_errno() : 0;
}

int rb_cm_accept(struct rb_cm *cm, struct rb_ep *e, const struct rb_conn_attr *c, uint64_t deadline_ns, struct rb_cm_error *why)
{
	*why = (struct rb_cm_error){ .step = RB_CM_REQUEST };
	e->c = *c;
	while (cm->up < cm->n) {
		struct event ev;
		int err = next_event(cm, deadline_ns, &ev);

		if (err)
			return err;
		if (ev.type == RDMA_CM_EVENT_CONNECT_REQUEST) {
			err = answer(cm, e, &ev, why);
			if (err)
				return err;
			continue;
		}
		if (ev.id == cm->listener)
			why->qp = 0;
		else
			why->qp = (int)(uintptr_t)ev.id->context;
		why->step = RB_CM_ACCEPT;
		if (ev.type == RDMA_CM_EVENT_ESTABLISHED) {
			cm->up++;
			continue;
		}
		err = trouble(&ev, why);
		if (err)
			return err;
	}
	/* Nobody else is wanted. */
	rdma_destroy_id(cm->listener);
	cm->listener = NULL;
	return 0;
}

/* ---- the initiator ---- */

static int start(struct rb_cm *cm, int qp, const struct rb_cm_addr *from, const struct rb_cm_addr *to, int timeout_ms, struct rb_cm_error *why)
{
	struct sockaddr_storage src, dst;

	*why = (struct rb_cm_error){ .step = RB_CM_ADDRESS, .qp = qp };
	errno = 0;
	if (rdma_create_id(cm->ch, &cm->id[qp], (void *)(uintptr_t)qp, RDMA_PS_TCP)) {
		cm->id[qp] = NULL;
		return neg_errno();
	}
	return rdma_resolve_addr(cm->id[qp], sock_addr(from, &src), sock_addr(to, &dst), timeout_ms) ? neg_errno() : 0;
}

/* One step of one connection. */
static int advance(struct rb_cm *cm, struct rb_ep *e, const struct event *ev, int timeout_ms, struct rb_cm_error *why)
{
	int qp = (int)(uintptr_t)ev->id->context, err;
	struct hello hello = { .qp = htonl((uint32_t)qp) };
	struct rdma_conn_param param;

	why->qp = qp;
	errno = 0;
	switch (ev->type) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		if (!same_port(e, ev->id, why))
			return -ENODEV;
		why->step = RB_CM_ROUTE;
		return rdma_resolve_route(ev->id, timeout_ms) ? neg_errno() : 0;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		err = up_to(e, qp, ev->id, IBV_QPS_INIT, IBV_QPS_INIT, why);
		if (err)
			return err;
		memcpy(hello.session, cm->session, sizeof hello.session);
		param = conn_param(e, qp, &hello);
		why->step = RB_CM_CONNECT;
		return rdma_connect(ev->id, &param) ? neg_errno() : 0;
	case RDMA_CM_EVENT_CONNECT_RESPONSE:
		err = up_to(e, qp, ev->id, IBV_QPS_RTR, IBV_QPS_RTS, why);
		if (err)
			return err;
		why->step = RB_CM_CONNECT;
		if (rdma_establish(ev->id))
			return neg_errno();
		cm->up++;
		return 0;
	case RDMA_CM_EVENT_ESTABLISHED: /* iWARP: its driver moved the QP */
		cm->up++;
		return 0;
	case RDMA_CM_EVENT_ADDR_ERROR: why->step = RB_CM_ADDRESS; break;
	case RDMA_CM_EVENT_ROUTE_ERROR: why->step = RB_CM_ROUTE; break;
	default: why->step = RB_CM_CONNECT; break;
	}
	return trouble(ev, why);
}

int rb_cm_connect(struct rb_cm *cm, struct rb_ep *e, const struct rb_conn_attr *c, const struct rb_cm_addr *from,
		  const struct rb_cm_addr *to, uint64_t deadline_ns, struct rb_cm_error *why)
{
	int err = begin(cm, e, why, RB_CM_ADDRESS);

	if (err)
		return err;
	e->c = *c;
	while (cm->up < cm->n) {
		uint64_t now = rb_now_ns(), ms = now < deadline_ns ? (deadline_ns - now) / 1000000 + 1 : 1;
		int timeout_ms = ms > INT_MAX ? INT_MAX : (int)ms;
		struct event ev;

		if (cm->started < cm->n && cm->started - cm->up < WINDOW) {
			err = start(cm, cm->started++, from, to, timeout_ms, why);
			if (err)
				return err;
			continue;
		}
		err = next_event(cm, deadline_ns, &ev);
		if (err)
			return err;
		err = advance(cm, e, &ev, timeout_ms, why);
		if (err)
			return err;
	}
	return 0;
}
