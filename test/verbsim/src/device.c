#include "verbsim.h"

#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- devices ---- */

static struct ibv_device devices[MAX_DEVICE];
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int knobs_err;

static void make_devices(void)
{
	knobs_err = knobs_load();
	for (int i = 0; i < MAX_DEVICE; i++) {
		devices[i].node_type = IBV_NODE_CA;
		devices[i].transport_type = IBV_TRANSPORT_IB;
		snprintf(devices[i].name, sizeof devices[i].name, "sim%d", i);
		snprintf(devices[i].dev_name, sizeof devices[i].dev_name, "uverbs-sim%d", i);
	}
}

static int number_of(const struct ibv_device *d) { return (int)(d - devices); }

struct ibv_device **ibv_get_device_list(int *num)
{
	struct ibv_device **list;

	pthread_once(&once, make_devices);
	if (num)
		*num = 0;
	if (knobs_err) {
		errno = knobs_err;
		return NULL;
	}
	list = calloc(knobs.devices + 1, sizeof *list);
	if (!list)
		return NULL;
	for (unsigned i = 0; i < knobs.devices; i++)
		list[i] = &devices[knobs.device[i]];
	if (num)
		*num = (int)knobs.devices;
	return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }
const char *ibv_get_device_name(struct ibv_device *device) { return device->name; }
int ibv_get_device_index(struct ibv_device *device) { return (void)device, -1; }

/* The EUI-64 of MAC address 02:00:00:00:00:(1+n). */
__be64 ibv_get_device_guid(struct ibv_device *device)
{
	return htobe64(UINT64_C(0x000000fffe000001) + (uint64_t)number_of(device));
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct ctx *c = NULL;
	int err = fabric_start(), p[2];

	if (err) {
		errno = err == EAGAIN ? ENOMEM : err;
		return NULL;
	}
	c = calloc(1, sizeof *c);
	if (!c)
		return NULL;
	if (pipe2(p, O_CLOEXEC)) {
		err = errno;
		free(c);
		errno = err;
		return NULL;
	}
	c->device = number_of(device);
	c->async_write = p[1];
	c->v.device = device;
	c->v.cmd_fd = -1;
	c->v.async_fd = p[0];
	c->v.num_comp_vectors = 1;
	pthread_mutex_init(&c->v.mutex, NULL);
	c->v.ops.post_send = knobs.null_mode ? null_post_send : qp_post_send;
	c->v.ops.post_recv = knobs.null_mode ? null_post_recv : qp_post_recv;
	c->v.ops.poll_cq = knobs.null_mode ? null_poll : cq_poll;
	c->v.ops.req_notify_cq = knobs.null_mode ? null_notify : cq_notify;
	return &c->v;
}

int ibv_close_device(struct ibv_context *context)
{
	struct ctx *c = (struct ctx *)context;

	close(context->async_fd);
	close(c->async_write);
	pthread_mutex_destroy(&context->mutex);
	free(c);
	return 0;
}

/* ---- asynchronous events ---- */

void async_event(struct ibv_context *context, struct ibv_async_event *e)
{
	if (write(((struct ctx *)context)->async_write, e, sizeof *e) != sizeof *e)
		say("asynchronous event lost: %m");
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	return read(context->async_fd, event, sizeof *event) == sizeof *event ? 0 : -1;
}

void ibv_ack_async_event(struct ibv_async_event *event) { (void)event; }

/* ---- attributes ---- */

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *a)
{
	*a = (struct ibv_device_attr){
		.fw_ver = "verbsim", .node_guid = ibv_get_device_guid(context->device),
		.sys_image_guid = ibv_get_device_guid(context->device), .max_mr_size = HOME_OFFSET, .page_size_cap = PAGE,
		.max_qp = MAX_QP, .max_qp_wr = MAX_WR, .max_sge = MAX_SGE, .max_sge_rd = MAX_SGE,
		.max_cq = MAX_CQ, .max_cqe = MAX_CQE, .max_mr = MAX_MR, .max_pd = 1 << 16, .max_qp_rd_atom = MAX_RD_ATOMIC,
		.max_qp_init_rd_atom = MAX_RD_ATOMIC, .max_res_rd_atom = MAX_RD_ATOMIC * MAX_QP,
		.atomic_cap = knobs.no_rc ? IBV_ATOMIC_NONE : IBV_ATOMIC_GLOB, .max_ah = 1 << 16, .max_pkeys = 1, .phys_port_cnt = 1,
	};
	return 0;
}

/* The inline of verbs.h, which zeroes *out first, passes a whole struct ibv_port_attr. */
int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *out)
{
	(void)context;
	if (port != 1)
		return EINVAL;
	*(struct ibv_port_attr *)out = (struct ibv_port_attr){
		.state = IBV_PORT_ACTIVE, .max_mtu = IBV_MTU_4096, .active_mtu = IBV_MTU_4096, .gid_tbl_len = GIDS,
		.max_msg_sz = MAX_MESSAGE, .pkey_tbl_len = 1, .max_vl_num = 1,
		.active_width = 2 /* 4x */, .active_speed = 64 /* HDR */, .phys_state = 5 /* LinkUp */,
		.link_layer = IBV_LINK_LAYER_ETHERNET,
	};
	return 0;
}

void device_gid(int device, int index, union ibv_gid *gid)
{
	memset(gid, 0, sizeof *gid);
	if (index == 0) {
		gid->global.subnet_prefix = htobe64(UINT64_C(0xfe80) << 48);
		gid->global.interface_id = ibv_get_device_guid(&devices[device]);
	} else {
		gid->raw[10] = gid->raw[11] = 0xff;
		gid->raw[12] = 127;
		gid->raw[15] = (uint8_t)(1 + device);
	}
}

int gid_device(const union ibv_gid *gid)
{
	int device = gid->raw[15] - 1;
	union ibv_gid own;

	for (int i = 0; i < GIDS && device >= 0 && device < MAX_DEVICE; i++) {
		device_gid(device, i, &own);
		if (memcmp(gid, &own, sizeof own) == 0)
			return device;
	}
	return -1;
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	if (port != 1 || index < 0 || index >= GIDS) {
		errno = EINVAL;
		return -1;
	}
	device_gid(((struct ctx *)context)->device, index, gid);
	return 0;
}

/* Behind the inlines ibv_query_gid_ex and ibv_query_gid_table. */
int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *e, uint32_t flags,
		      size_t size)
{
	if (flags || size < sizeof *e || port != 1 || index >= GIDS)
		return EINVAL;
	*e = (struct ibv_gid_entry){ .gid_index = index, .port_num = port, .gid_type = IBV_GID_TYPE_ROCE_V2 };
	device_gid(((struct ctx *)context)->device, (int)index, &e->gid);
	return 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *e, size_t max, uint32_t flags, size_t size)
{
	if (flags || size != sizeof *e || max < GIDS)
		return -EINVAL;
	for (uint32_t i = 0; i < GIDS; i++)
		_ibv_query_gid_ex(context, 1, i, &e[i], flags, size);
	return GIDS;
}

/* Private to rdma-core; ibv_devinfo asks. */
#pragma GCC visibility push(default)
int ibv_query_gid_type(struct ibv_context *context, uint8_t port, unsigned index, int *type);
#pragma GCC visibility pop
int ibv_query_gid_type(struct ibv_context *context, uint8_t port, unsigned index, int *type)
{
	(void)context, (void)port, (void)index;
	*type = 1; /* IBV_GID_TYPE_SYSFS_ROCE_V2 */
	return 0;
}

int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
	(void)context;
	if (port != 1 || index != 0) {
		errno = EINVAL;
		return -1;
	}
	*pkey = htons(0xffff);
	return 0;
}

int ibv_get_pkey_index(struct ibv_context *context, uint8_t port, __be16 pkey)
{
	(void)context;
	return port == 1 && pkey == htons(0xffff) ? 0 : -1;
}

/* ---- protection domains, address handles ---- */

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	static uint32_t serial;
	struct pd *p = calloc(1, sizeof *p);

	if (!p)
		return NULL;
	p->v.context = context;
	p->v.handle = __atomic_add_fetch(&serial, 1, __ATOMIC_RELAXED);
	return &p->v;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	if (load(&((struct pd *)pd)->children))
		return EBUSY;
	free(pd);
	return 0;
}

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	struct ah *a;

	if (!attr->is_global || attr->port_num != 1 || attr->grh.sgid_index >= GIDS) {
		errno = EINVAL;
		return NULL;
	}
	a = calloc(1, sizeof *a);
	if (!a)
		return NULL;
	a->v.context = pd->context;
	a->v.pd = pd;
	a->attr = *attr;
	a->source = ((struct ctx *)pd->context)->device;
	a->dest = gid_device(&attr->grh.dgid);
	__atomic_add_fetch(&((struct pd *)pd)->children, 1, __ATOMIC_RELAXED);
	return &a->v;
}

int ibv_destroy_ah(struct ibv_ah *ah)
{
	__atomic_sub_fetch(&((struct pd *)ah->pd)->children, 1, __ATOMIC_RELAXED);
	free(ah);
	return 0;
}

/* The way back to the sender of a datagram. */
int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port, struct ibv_wc *wc, struct ibv_grh *grh,
			struct ibv_ah_attr *attr)
{
	const uint8_t *raw = (const uint8_t *)grh;
	bool v4 = raw[0] >> 4 != 6;

	(void)context;
	memset(attr, 0, sizeof *attr);
	if (!(wc->wc_flags & IBV_WC_GRH)) {
		errno = EINVAL;
		return -1;
	}
	attr->is_global = 1;
	attr->port_num = port;
	attr->sl = wc->sl;
	attr->grh.hop_limit = 64;
	attr->grh.sgid_index = v4;
	if (v4) {
		attr->grh.dgid.raw[10] = attr->grh.dgid.raw[11] = 0xff;
		memcpy(attr->grh.dgid.raw + 12, raw + 20 + 12, 4);
		attr->grh.traffic_class = raw[20 + 1];
	} else {
		uint32_t first = ntohl(grh->version_tclass_flow);

		attr->grh.dgid = grh->sgid;
		attr->grh.traffic_class = (uint8_t)(first >> 20);
		attr->grh.flow_label = first & 0xfffff;
	}
	return 0;
}

struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh, uint8_t port)
{
	struct ibv_ah_attr attr;

	return ibv_init_ah_from_wc(pd->context, port, wc, grh, &attr) ? NULL : ibv_create_ah(pd, &attr);
}

/* ---- what these devices can't do; without these, libibverbs' own would look for a driver ---- */

static void *unsupported(void)
{
	errno = EOPNOTSUPP;
	return NULL;
}

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	(void)pd, (void)attr;
	return unsupported();
}

int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask)
{
	(void)srq, (void)attr, (void)mask;
	return EOPNOTSUPP;
}

int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr)
{
	(void)srq, (void)attr;
	return EOPNOTSUPP;
}

int ibv_destroy_srq(struct ibv_srq *srq)
{
	(void)srq;
	return EOPNOTSUPP;
}

int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	(void)qp, (void)gid, (void)lid;
	return EOPNOTSUPP;
}

int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	(void)qp, (void)gid, (void)lid;
	return EOPNOTSUPP;
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
	(void)qp;
	return NULL;
}

int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp, (void)ece;
	return EOPNOTSUPP;
}

int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp;
	memset(ece, 0, sizeof *ece);
	return EOPNOTSUPP;
}

int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags)
{
	(void)qp, (void)op, (void)flags;
	return 0;
}

struct ibv_context *ibv_import_device(int cmd_fd)
{
	(void)cmd_fd;
	return unsupported();
}

/* Nothing to do: a child has the pages too, shared. */
int ibv_fork_init(void) { return 0; }
enum ibv_fork_status ibv_is_fork_initialized(void) { return IBV_FORK_DISABLED; }
