#include "selftest.h"

#include <errno.h>
#include <string.h>

static const struct spec ud = { .type = IBV_QPT_UD }, uc = { .type = IBV_QPT_UC };

static struct ibv_ah *ah_to(struct end *from, int index, union ibv_gid gid)
{
	struct ibv_ah_attr a = {
		.is_global = 1, .port_num = 1, .sl = 3,
		.grh = { .dgid = gid, .sgid_index = (uint8_t)index, .hop_limit = 9, .traffic_class = 0x68, .flow_label = 0x12345 },
	};

	return ibv_create_ah(from->pd, &a);
}

static uint32_t checksum(const uint8_t *ip)
{
	uint32_t sum = 0;

	for (int i = 0; i < 20; i += 2)
		sum += (uint32_t)ip[i] << 8 | ip[i + 1];
	return (sum & 0xffff) + (sum >> 16);
}

static void datagrams(void)
{
	static const uint8_t from[] = { 127, 0, 0, 1 }, to[] = { 127, 0, 0, 2 };
	struct spec second = ud;
	struct end a, b;
	struct ibv_wc wc;
	struct ibv_ah *ah, *back;
	union ibv_gid local_a, local_b;

	end_make(&a, ud);
	second.device = 1;
	end_make(&b, second);
	MUST(qp_up(a.qp, (struct way){ 0 }) == 0 && qp_up(b.qp, (struct way){ 0 }) == 0);
	MUST(ah = ah_to(&a, 1, gid_of(&b)));
	memcpy(a.buf, "udp", 4);
	struct req r = REQ(IBV_WR_SEND_WITH_IMM, a.buf, 4, .ah = ah, .qpn = b.qp->qp_num, .qkey = QKEY, .imm = 5);

	CHECK(post(&a, r) == 0 && wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && none(b.rcq)); /* no receive: lost */
	for (int i = 0; i < 8; i++)
		CHECK(post_recv(&b, b.buf + 1000 * i, 4096 + 40, (uint64_t)i) == 0);
	r.qkey++;
	CHECK(post(&a, r) == 0 && wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && none(b.rcq));
	r.qkey = 1u << 31; /* the high bit: the QP's own */
	CHECK(post(&a, r) == 0 && wait_wc(a.scq, &wc) == IBV_WC_SUCCESS);
	CHECK(wait_wc(b.rcq, &wc) == IBV_WC_SUCCESS && wc.byte_len == 44 && wc.src_qp == a.qp->qp_num && wc.sl == 3);
	CHECK(wc.wc_flags == (IBV_WC_GRH | IBV_WC_WITH_IMM) && wc.imm_data == 5 && memcmp(b.buf + 40, "udp", 4) == 0);
	/* The GRH of RoCE v2 over IPv4: 20 bytes, then the IPv4 header. */
	CHECK(b.buf[20] == 0x45 && b.buf[21] == 0x68 && b.buf[28] == 9 && b.buf[29] == 17 && checksum(b.buf + 20) == 0xffff);
	CHECK(memcmp(b.buf + 32, from, 4) == 0 && memcmp(b.buf + 36, to, 4) == 0);
	/* And the way back from it. */
	MUST(back = ibv_create_ah_from_wc(b.pd, &wc, (struct ibv_grh *)b.buf, 1));
	CHECK(post_recv(&a, a.buf + 100, 100, 9) == 0);
	CHECK(post(&b, REQ(IBV_WR_SEND, b.buf + 40, 4, .ah = back, .qpn = wc.src_qp, .qkey = QKEY)) == 0);
	CHECK(wait_wc(a.rcq, &wc) == IBV_WC_SUCCESS && wc.wr_id == 9 && memcmp(a.buf + 140, "udp", 4) == 0);
	ibv_destroy_ah(back);
	ibv_destroy_ah(ah);
	/* Over IPv6. */
	MUST(ibv_query_gid(a.ctx, 1, 0, &local_a) == 0 && ibv_query_gid(b.ctx, 1, 0, &local_b) == 0);
	MUST(r.ah = ah = ah_to(&a, 0, local_b));
	CHECK(post(&a, r) == 0 && wait_wc(b.rcq, &wc) == IBV_WC_SUCCESS && wc.wr_id == 1);
	struct ibv_grh *grh = (void *)(b.buf + 1000);
	CHECK(b.buf[1000] >> 4 == 6 && memcmp(&grh->sgid, &local_a, 16) == 0);
	CHECK(memcmp(&grh->dgid, &local_b, 16) == 0 && grh->hop_limit == 9);
	MUST(back = ibv_create_ah_from_wc(b.pd, &wc, grh, 1));
	ibv_destroy_ah(back);
	ibv_destroy_ah(ah);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS);
	/* To an address that is not the QP's device: lost. */
	MUST(r.ah = ah = ah_to(&a, 1, gid_of(&a)));
	CHECK(post(&a, r) == 0 && wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && none(b.rcq));
	ibv_destroy_ah(ah);
	/* The MTU is the limit; what has no room in the receive ends that QP. */
	MUST(r.ah = ah = ah_to(&a, 1, gid_of(&b)));
	r.len = 4096;
	CHECK(post(&a, r) == 0 && wait_wc(a.scq, &wc) == IBV_WC_SUCCESS);
	CHECK(wait_wc(b.rcq, &wc) == IBV_WC_SUCCESS && wc.byte_len == 4136);
	r.len = 4097;
	CHECK(post(&a, r) == 0 && wait_wc(a.scq, &wc) == IBV_WC_LOC_LEN_ERR && qp_state(a.qp) == IBV_QPS_ERR);
	ibv_destroy_ah(ah);
	CHECK(ah_to(&a, 2, gid_of(&b)) == NULL && errno == EINVAL);
	pair_free(&a, &b);
}

static void many_peers(void)
{
	enum { N = 40 }; /* more than links are kept */
	struct end a, b[N];
	struct ibv_ah *ah;
	struct ibv_wc wc;

	end_make(&a, ud);
	MUST(qp_up(a.qp, (struct way){ 0 }) == 0);
	MUST(ah = ah_to(&a, 1, gid_of(&a)));
	for (int i = 0; i < N; i++) {
		end_make(&b[i], ud);
		MUST(qp_up(b[i].qp, (struct way){ 0 }) == 0);
	}
	for (int round = 0; round < 3; round++)
		for (int i = 0; i < N; i++) {
			a.buf[0] = (uint8_t)i;
			CHECK(post_recv(&b[i], b[i].buf, 100, 0) == 0);
			CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 1, .ah = ah, .qpn = b[i].qp->qp_num, .qkey = QKEY)) == 0);
			CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && wait_wc(b[i].rcq, &wc) == IBV_WC_SUCCESS && b[i].buf[40] == i);
		}
	ibv_destroy_ah(ah);
	for (int i = 0; i < N; i++)
		end_free(&b[i]);
	end_free(&a);
}

static void unreliable_connection(void)
{
	struct end a, b;
	struct ibv_wc wc;

	pair_make(&a, &b, uc, (struct way){ 0 });
	a.buf[0] = 1;
	struct req w = REQ(IBV_WR_RDMA_WRITE, a.buf, 1, AT(b, 0));

	CHECK(post(&a, w) == 0 && wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && b.buf[0] == 1);
	CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 1)) == 0 && wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && none(b.rcq)); /* lost */
	CHECK(post_recv(&b, b.buf + 10, 1, 3) == 0);
	CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 1)) == 0 && wait_wc(a.scq, &wc) == IBV_WC_SUCCESS);
	CHECK(wait_wc(b.rcq, &wc) == IBV_WC_SUCCESS && wc.wr_id == 3 && wc.byte_len == 1 && wc.wc_flags == 0 && b.buf[10] == 1);
	w.op = IBV_WR_RDMA_WRITE_WITH_IMM;
	CHECK(post_recv(&b, NULL, 0, 4) == 0 && post(&a, w) == 0);
	CHECK(wait_wc(b.rcq, &wc) == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS);
	/* The sender never learns of what the peer refuses. */
	w.op = IBV_WR_RDMA_WRITE;
	w.rkey ^= 1;
	b.buf[0] = 0;
	CHECK(post(&a, w) == 0 && wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && b.buf[0] == 0);
	CHECK(post(&a, REQ(IBV_WR_RDMA_READ, a.buf, 1)) == EINVAL);
	CHECK(post(&a, REQ(IBV_WR_ATOMIC_FETCH_AND_ADD, a.buf, 8)) == EINVAL);
	MUST(ibv_destroy_qp(b.qp) == 0);
	b.qp = NULL;
	CHECK(post(&a, w) == 0 && wait_wc(a.scq, &wc) == IBV_WC_SUCCESS);
	pair_free(&a, &b);
}

const struct test ud_tests[] = {
	{ "ud: datagrams", datagrams, { "VERBSIM_DEVICES=2" } },
	{ "ud: many peers", many_peers, { 0 } },
	{ "uc: ops and losses", unreliable_connection, { 0 } },
	{ 0 },
};
