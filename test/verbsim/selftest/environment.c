#include "selftest.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const struct way usual;
static const struct spec plain;

static int send_one(struct end *a, struct end *b)
{
	struct ibv_wc wc;

	CHECK(post(a, REQ(IBV_WR_RDMA_WRITE, a->buf, 64, AT(*b, 0))) == 0);
	return wait_wc(a->scq, &wc);
}

static void device_names(void)
{
	static const char *const want[] = { "sim2", "sim0", "sim63" };
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);

	MUST(list && n == 3 && !list[3]);
	for (int i = 0; i < 3; i++) {
		struct ibv_context *c;
		struct ibv_port_attr p;
		struct ibv_device_attr d;
		struct ibv_gid_entry e[4], one;
		union ibv_gid g;
		__be16 pkey;

		CHECK(strcmp(ibv_get_device_name(list[i]), want[i]) == 0);
		MUST(c = ibv_open_device(list[i]));
		CHECK(ibv_query_device(c, &d) == 0 && d.phys_port_cnt == 1 && d.node_guid == ibv_get_device_guid(list[i]));
		CHECK(ibv_query_port(c, 1, &p) == 0 && p.state == IBV_PORT_ACTIVE && p.link_layer == IBV_LINK_LAYER_ETHERNET);
		CHECK(ibv_query_port(c, 2, &p) == EINVAL);
		CHECK(ibv_query_gid_table(c, e, 4, 0) == 2);
		CHECK(ibv_query_gid(c, 1, 0, &g) == 0 && g.raw[0] == 0xfe && g.raw[1] == 0x80 && memcmp(&g, &e[0].gid, 16) == 0);
		CHECK(ibv_query_gid(c, 1, 1, &g) == 0 && g.raw[12] == 127);
		CHECK(g.raw[15] == 1 + atoi(want[i] + 3) && memcmp(&g, &e[1].gid, 16) == 0);
		CHECK(ibv_query_gid_ex(c, 1, 1, &one, 0) == 0 && one.gid_type == IBV_GID_TYPE_ROCE_V2);
		CHECK(one.gid_index == 1 && one.port_num == 1);
		CHECK(ibv_query_gid(c, 1, 2, &g) == -1);
		CHECK(ibv_query_pkey(c, 1, 0, &pkey) == 0 && pkey == htons(0xffff));
		CHECK(ibv_close_device(c) == 0);
	}
	ibv_free_device_list(list);
}

static void refused(void)
{
	int n = 5;

	CHECK(!ibv_get_device_list(&n) && errno == EINVAL && n == 0);
}

/* Never before the delay is over, while post returns at once; without the program polling, too. */
static void delay(void)
{
	struct end a, b;
	struct ibv_wc wc;
	double start;
	volatile uint8_t *seen;

	pair_make(&a, &b, plain, usual);
	start = seconds();
	CHECK(send_one(&a, &b) == IBV_WC_SUCCESS && seconds() - start >= 3e-3);
	seen = b.buf;
	a.buf[0] = 1;
	start = seconds();
	for (int i = 0; i < 8; i++) /* they travel together */
		CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1, AT(b, 0))) == 0);
	CHECK(*seen == 0);
	while (*seen == 0 && seconds() < start + 5)
		;
	CHECK(*seen == 1 && seconds() - start >= 3e-3);
	for (int i = 0; i < 8; i++)
		CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS);
	pair_free(&a, &b);
}

static void pace(void)
{
	struct end a, b;
	struct ibv_wc wc;
	double start;

	pair_make(&a, &b, plain, usual);
	start = seconds();
	for (int i = 0; i < 10; i++)
		CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 50000, AT(b, 0))) == 0);
	for (int i = 0; i < 10; i++)
		CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS);
	CHECK(seconds() - start >= 10 * 50000 * 8 / 1e9);
	pair_free(&a, &b);
}

static void error_every(void)
{
	struct end a, b;

	pair_make(&a, &b, plain, usual);
	for (int i = 1; i < 5; i++)
		CHECK(send_one(&a, &b) == IBV_WC_SUCCESS);
	CHECK(send_one(&a, &b) == IBV_WC_RETRY_EXC_ERR && qp_state(a.qp) == IBV_QPS_ERR);
	pair_free(&a, &b);
}

static void drop_every(void)
{
	struct end a, b;
	struct ibv_wc wc;
	int arrived = 0;

	pair_make(&a, &b, (struct spec){ .type = IBV_QPT_UC }, usual);
	for (int i = 0; i < 15; i++)
		CHECK(post_recv(&b, b.buf, 100, 0) == 0);
	for (int i = 0; i < 15; i++)
		CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 100)) == 0 && wait_wc(a.scq, &wc) == IBV_WC_SUCCESS);
	while (ibv_poll_cq(b.rcq, 1, &wc) == 1)
		arrived++;
	CHECK(arrived == 10);
	pair_free(&a, &b);
}

static void enomem_every(void)
{
	struct end a, b;
	int refusals = 0;

	pair_make(&a, &b, plain, usual);
	for (int i = 0; i < 12; i++)
		refusals += post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1, AT(b, 0))) == ENOMEM;
	CHECK(refusals == 4);
	pair_free(&a, &b);
}

static void short_poll(void)
{
	struct end a, b;
	struct ibv_wc wc[8];

	pair_make(&a, &b, plain, usual);
	for (int i = 0; i < 3; i++)
		CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1, AT(b, 0))) == 0);
	for (int i = 0; i < 3; i++)
		CHECK(ibv_poll_cq(a.scq, 8, wc) == 1);
	CHECK(none(a.scq));
	pair_free(&a, &b);
}

static void no_rc(void)
{
	struct end e;
	struct ibv_qp_init_attr a = { .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };

	end_make(&e, (struct spec){ .type = IBV_QPT_UD });
	a.send_cq = a.recv_cq = e.scq;
	CHECK(!ibv_create_qp(e.pd, &a) && errno == EOPNOTSUPP);
	a.qp_type = IBV_QPT_UC;
	a.srq = (struct ibv_srq *)&e;
	CHECK(!ibv_create_qp(e.pd, &a) && errno == EOPNOTSUPP);
	CHECK(!ibv_create_srq(e.pd, NULL) && errno == EOPNOTSUPP);
	end_free(&e);
}

static void null_mode(void)
{
	struct end a, b;
	struct ibv_wc wc;

	pair_make(&a, &b, plain, usual);
	a.buf[0] = 1;
	CHECK(send_one(&a, &b) == IBV_WC_SUCCESS && b.buf[0] == 0);
	CHECK(post(&a, REQ(IBV_WR_RDMA_READ, a.buf, 1, .id = 3, .flags = UNSIGNALED)) == 0);
	CHECK(post(&a, REQ(IBV_WR_RDMA_READ, a.buf, 1, .id = 4)) == 0);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && wc.wr_id == 4 && wc.opcode == IBV_WC_RDMA_READ);
	CHECK(wc.qp_num == a.qp->qp_num && none(a.scq));
	for (int i = 0; i < 32; i++)
		CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1)) == 0);
	CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1)) == ENOMEM);
	CHECK(!ibv_create_comp_channel(a.ctx) && errno == EOPNOTSUPP);
	pair_free(&a, &b);
}

const struct test knob_tests[] = {
	{ "knobs: device names", device_names, { "VERBSIM_DEVICES=sim2,sim0,sim63" } },
	{ "knobs: no devices refused", refused, { "VERBSIM_DEVICES=0" } },
	{ "knobs: bad device refused", refused, { "VERBSIM_DEVICES=sim64" } },
	{ "knobs: bad mode refused", refused, { "VERBSIM=other" } },
	{ "knobs: bad number refused", refused, { "VERBSIM_DELAY_NS=1us" } },
	{ "knobs: delay", delay, { "VERBSIM_DELAY_NS=3000000" } },
	{ "knobs: pace", pace, { "VERBSIM_GBPS=1" } },
	{ "knobs: error every 5th", error_every, { "VERBSIM_ERROR_EVERY=5" } },
	{ "knobs: drop every 3rd", drop_every, { "VERBSIM_DROP_EVERY=3" } },
	{ "knobs: ENOMEM every 3rd", enomem_every, { "VERBSIM_ENOMEM_EVERY=3" } },
	{ "knobs: short polls", short_poll, { "VERBSIM_SHORT_POLL=1" } },
	{ "knobs: no RC", no_rc, { "VERBSIM_NO_RC=1" } },
	{ "knobs: null mode", null_mode, { "VERBSIM=null" } },
	{ 0 },
};
