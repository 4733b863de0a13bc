/* Connecting the queue pairs of an endpoint by rdma_cm. */
#ifndef RB_CM_H
#define RB_CM_H

#include "rb.h"

enum { RB_CM_SESSION = 16 };

struct rb_cm;

/* An IP address and port; scope is the interface of a link-local one. */
struct rb_cm_addr {
	uint8_t ip[16]; /* IPv4 in the first 4 bytes */
	int v4;
	uint16_t port; /* host order; 0: any */
	uint32_t scope;
};

enum rb_cm_step {
	RB_CM_OPEN, RB_CM_BIND, RB_CM_LISTEN, RB_CM_REQUEST, RB_CM_ACCEPT, RB_CM_ADDRESS, RB_CM_DEVICE, RB_CM_ROUTE, RB_CM_QP,
	RB_CM_CONNECT
};

/* Where it failed, for the message. */
struct rb_cm_error {
	enum rb_cm_step step;
	int qp;     /* which */
	int reason; /* of a rejection, as the CM gave it; 0: none */
	char device[IBV_SYSFS_NAME_MAX]; /* RB_CM_DEVICE: where the route leaves from instead */
	int port;
};

/* One of these for one session, at either end. What waits may be stopped from another thread. */
int rb_cm_new(const uint8_t session[RB_CM_SESSION], struct rb_cm **out);
void rb_cm_stop(struct rb_cm *cm);
/* Ends the connections. The queue pairs must be gone: iWARP keeps them for each other. */
void rb_cm_free(struct rb_cm *cm);

/* The device and port that an address of this host belongs to. -ENODEV: to none. */
int rb_cm_owner(const struct rb_cm_addr *at, char device[IBV_SYSFS_NAME_MAX], int *port);

/* Listens at the address, *port being what port it got; the address must be the endpoint's device's and port's. */
int rb_cm_listen(struct rb_cm *cm, struct rb_ep *e, const struct rb_cm_addr *at, uint16_t *port, struct rb_cm_error *why);
/* Both connect all QPs of an endpoint that has them in RESET and return with them in RTS; or -ETIMEDOUT at the deadline
 * (CLOCK_MONOTONIC), -ECANCELED when stopped, -ECONNREFUSED when the peer rejects. Of what comes to the listener only the
 * session's own counts; the rest is rejected. */
int rb_cm_accept(struct rb_cm *cm, struct rb_ep *e, const struct rb_conn_attr *c, uint64_t deadline_ns, struct rb_cm_error *why);
int rb_cm_connect(struct rb_cm *cm, struct rb_ep *e, const struct rb_conn_attr *c, const struct rb_cm_addr *from,
		  const struct rb_cm_addr *to, uint64_t deadline_ns, struct rb_cm_error *why);

#endif
