#include "rb.h"

#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct rb_dev {
	struct ibv_context *ctx;
};

/* The endpoint code needs the context and nothing else. */
struct ibv_context *rb_dev_context(struct rb_dev *d) { return d->ctx; }

static int neg_errno(void) { return errno ? -errno : -EIO; }

/* The name as it is now: libibverbs keeps the one that the device had when this process first saw it. */
static void present_name(struct ibv_device *dev, char *out, size_t size)
{
	char path[sizeof "/sys/class/infiniband_verbs//ibdev" + IBV_SYSFS_NAME_MAX];
	FILE *f;

	snprintf(out, size, "%s", ibv_get_device_name(dev));
	snprintf(path, sizeof path, "/sys/class/infiniband_verbs/%.*s/ibdev", IBV_SYSFS_NAME_MAX - 1, dev->dev_name);
	f = fopen(path, "re");
	if (!f)
		return;
	char line[IBV_SYSFS_NAME_MAX];
	if (fgets(line, sizeof line, f)) {
		line[strcspn(line, "\n")] = 0;
		if (line[0])
			snprintf(out, size, "%s", line);
	}
	fclose(f);
}

/* sysfs gives every directory that it makes a number of its own. */
static uint64_t registration(struct ibv_device *dev)
{
	char path[sizeof "/sys/class/infiniband_verbs/" + IBV_SYSFS_NAME_MAX];
	struct stat st;

	snprintf(path, sizeof path, "/sys/class/infiniband_verbs/%.*s", IBV_SYSFS_NAME_MAX - 1, dev->dev_name);
	return stat(path, &st) ? 0 : (uint64_t)st.st_ino;
}

int rb_list(struct rb_dev_info *out, int cap, int *n)
{
	int have = 0;
	struct ibv_device **list;

	errno = 0;
	list = ibv_get_device_list(&have);
	if (!list)
		return neg_errno();
	*n = have < cap ? have : cap;
	for (int i = 0; i < *n; i++) {
		memset(&out[i], 0, sizeof out[i]);
		present_name(list[i], out[i].name, sizeof out[i].name);
		out[i].id = registration(list[i]);
		out[i].node_guid = be64toh(ibv_get_device_guid(list[i]));
		out[i].node_type = list[i]->node_type;
		out[i].transport = list[i]->transport_type;
	}
	ibv_free_device_list(list);
	return 0;
}

int rb_open(const char *name, struct rb_dev **out)
{
	int have = 0, err = -ENODEV;
	struct ibv_device **list;

	errno = 0;
	list = ibv_get_device_list(&have);
	if (!list)
		return neg_errno();
	for (int i = 0; i < have; i++) {
		struct rb_dev *d;
		char now[IBV_SYSFS_NAME_MAX];

		present_name(list[i], now, sizeof now);
		if (strcmp(now, name) != 0)
			continue;
		d = calloc(1, sizeof *d);
		if (!d) {
			err = -ENOMEM;
			break;
		}
		errno = 0;
		d->ctx = ibv_open_device(list[i]);
		if (!d->ctx) {
			err = neg_errno();
			free(d);
			break;
		}
		*out = d;
		err = 0;
		break;
	}
	ibv_free_device_list(list);
	return err;
}

int rb_close(struct rb_dev *d)
{
	int err = 0;

	errno = 0;
	if (ibv_close_device(d->ctx))
		err = neg_errno();
	free(d);
	return err;
}

int rb_query_caps(struct rb_dev *d, struct rb_caps *out)
{
	struct ibv_device_attr a;
	int err;

	memset(&a, 0, sizeof a);
	err = ibv_query_device(d->ctx, &a);
	if (err)
		return err < 0 ? neg_errno() : -err;
	*out = (struct rb_caps){
		.max_qp = a.max_qp, .max_qp_wr = a.max_qp_wr, .max_cq = a.max_cq, .max_cqe = a.max_cqe,
		.max_sge = a.max_sge, .max_rd_atom = a.max_qp_rd_atom, .max_init_rd_atom = a.max_qp_init_rd_atom,
		.atomic_cap = a.atomic_cap, .ports = a.phys_port_cnt, .max_mr_size = a.max_mr_size,
	};
	memcpy(out->fw_ver, a.fw_ver, sizeof out->fw_ver);
	out->fw_ver[sizeof out->fw_ver - 1] = 0;
	return 0;
}

static int mtu_bytes(int mtu) { return mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 ? 128 << mtu : 0; }

/* active_width is a bit mask with one bit set, active_speed a code (IB spec vol. 1, 14.2.5.6). */
static double link_gbps(int width, int speed)
{
	double lanes = width == 1 ? 1 : width == 2 ? 4 : width == 4 ? 8 : width == 8 ? 12 : width == 16 ? 2 : 0;
	double lane = speed == 1 ? 2.5 : speed == 2 ? 5 : speed == 4 || speed == 8 ? 10 : speed == 16 ? 14 :
		      speed == 32 ? 25 : speed == 64 ? 50 : speed == 128 ? 100 : speed == 256 ? 200 : 0;

	return lanes * lane;
}

int rb_query_port(struct rb_dev *d, int port, struct rb_port *out)
{
	struct ibv_port_attr a;
	int err;

	memset(&a, 0, sizeof a);
	err = ibv_query_port(d->ctx, (uint8_t)port, &a);
	if (err)
		return err < 0 ? neg_errno() : -err;
	*out = (struct rb_port){
		.state = a.state, .phys_state = a.phys_state, .link_layer = a.link_layer,
		.active_mtu = mtu_bytes(a.active_mtu), .max_mtu = mtu_bytes(a.max_mtu),
		.gid_len = a.gid_tbl_len, .pkey_len = a.pkey_tbl_len,
		.grh_required = (a.flags & IBV_QPF_GRH_REQUIRED) != 0,
		.max_msg = a.max_msg_sz, .lid = a.lid, .sm_lid = a.sm_lid,
		.rate = link_gbps(a.active_width, a.active_speed),
	};
	return 0;
}

static int zero_gid(const uint8_t raw[16])
{
	static const uint8_t zero[16];

	return memcmp(raw, zero, 16) == 0;
}

static int gid_type(uint32_t t)
{
	switch (t) {
	case IBV_GID_TYPE_IB: return RB_GID_IB;
	case IBV_GID_TYPE_ROCE_V1: return RB_GID_ROCE_V1;
	case IBV_GID_TYPE_ROCE_V2: return RB_GID_ROCE_V2;
	default: return RB_GID_UNKNOWN;
	}
}

int rb_query_gids(struct rb_dev *d, int port, struct rb_gid *out, int cap, int *n)
{
	struct ibv_gid_entry *e;
	struct rb_port p;
	ssize_t have = -1;
	int err;

	*n = 0;
	e = calloc((size_t)cap, sizeof *e);
	if (!e)
		return -ENOMEM;
	/* One call for the table; it holds the used entries of every port. Only libibverbs' own contexts have what it needs. */
	if (verbs_get_ctx(d->ctx))
		have = ibv_query_gid_table(d->ctx, e, (size_t)cap, 0);
	for (ssize_t i = 0; i < have; i++) {
		if ((int)e[i].port_num != port || zero_gid(e[i].gid.raw))
			continue;
		memcpy(out[*n].raw, e[i].gid.raw, 16);
		out[*n].index = (int)e[i].gid_index;
		out[*n].type = gid_type(e[i].gid_type);
		out[*n].ifindex = e[i].ndev_ifindex;
		(*n)++;
	}
	free(e);
	if (have >= 0)
		return 0;
	/* A provider without that ioctl, or more entries than cap: the plain verb, type not told. */
	err = rb_query_port(d, port, &p);
	if (err)
		return err;
	for (int i = 0; i < p.gid_len && *n < cap; i++) {
		union ibv_gid g;

		memset(&g, 0, sizeof g);
		if (ibv_query_gid(d->ctx, (uint8_t)port, i, &g) || zero_gid(g.raw))
			continue;
		memcpy(out[*n].raw, g.raw, 16);
		out[*n].index = i;
		out[*n].type = RB_GID_UNKNOWN;
		out[*n].ifindex = 0;
		(*n)++;
	}
	return 0;
}

int rb_query_pkey(struct rb_dev *d, int port, int index, uint16_t *out)
{
	__be16 k = 0;

	errno = 0;
	if (ibv_query_pkey(d->ctx, (uint8_t)port, index, &k))
		return neg_errno();
	*out = ntohs(k);
	return 0;
}
