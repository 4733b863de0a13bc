#include "selftest.h"

#include <errno.h>
#include <poll.h>
#include <string.h>

static const struct way usual;
static const struct spec plain;

static void ops_move_data(void)
{
	struct end a, b;
	struct ibv_wc wc;

	pair_make(&a, &b, plain, (struct way){ .psn = 5, .peer_psn = 0xffffff });
	for (int i = 0; i < BUF; i++)
		a.buf[i] = (uint8_t)(i * 7);
	/* Every length near the special ones of the copy, at odd addresses. */
	for (uint32_t len = 0; len < 300; len++) {
		uint32_t at = 1000 + len % 13;

		memset(b.buf, 0xaa, 2000);
		CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf + len, len, AT(b, at), .id = len)) == 0);
		CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && wc.wr_id == len);
		CHECK(wc.opcode == IBV_WC_RDMA_WRITE && wc.qp_num == a.qp->qp_num);
		CHECK(memcmp(a.buf + len, b.buf + at, len) == 0 && b.buf[at - 1] == 0xaa && b.buf[at + len] == 0xaa);
	}
	CHECK(post(&a, REQ(IBV_WR_RDMA_READ, a.buf + 30000, 5000, AT(b, 500))) == 0);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RDMA_READ && wc.byte_len == 5000);
	CHECK(memcmp(a.buf + 30000, b.buf + 500, 5000) == 0);

	CHECK(post_recv(&b, b.buf + 8000, 100, 55) == 0);
	CHECK(post(&a, REQ(IBV_WR_SEND_WITH_IMM, a.buf, 100, .imm = 0x1234, .id = 9)) == 0);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && wc.opcode == IBV_WC_SEND && wc.wr_id == 9);
	CHECK(wait_wc(b.rcq, &wc) == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV && wc.wr_id == 55 && wc.byte_len == 100);
	CHECK(wc.wc_flags == IBV_WC_WITH_IMM && wc.imm_data == 0x1234 && wc.qp_num == b.qp->qp_num && wc.src_qp == a.qp->qp_num);
	CHECK(memcmp(a.buf, b.buf + 8000, 100) == 0);

	CHECK(post_recv(&b, NULL, 0, 56) == 0); /* a write with immediate needs no room in the receive */
	CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE_WITH_IMM, a.buf + 1, 64, AT(b, 0), .imm = 7)) == 0);
	CHECK(wait_wc(b.rcq, &wc) == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.wr_id == 56);
	CHECK(wc.byte_len == 64 && wc.imm_data == 7);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && memcmp(a.buf + 1, b.buf, 64) == 0);
	CHECK(none(a.scq) && none(a.rcq) && none(b.scq) && none(b.rcq));
	pair_free(&a, &b);
}

static void atomics_return_what_was(void)
{
	struct end a, b;
	struct ibv_wc wc;
	uint64_t *word, *result;

	pair_make(&a, &b, plain, usual);
	word = (uint64_t *)(void *)b.buf + 1;
	result = (uint64_t *)(void *)a.buf;
	*word = UINT64_MAX - 1;
	CHECK(post(&a, REQ(IBV_WR_ATOMIC_FETCH_AND_ADD, result, 8, AT(b, 8), .add = 5)) == 0);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && wc.opcode == IBV_WC_FETCH_ADD && *result == UINT64_MAX - 1 && *word == 3);
	CHECK(post(&a, REQ(IBV_WR_ATOMIC_CMP_AND_SWP, result, 8, AT(b, 8), .add = 4, .swap = 9)) == 0);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && wc.opcode == IBV_WC_COMP_SWAP && *result == 3 && *word == 3);
	CHECK(post(&a, REQ(IBV_WR_ATOMIC_CMP_AND_SWP, result, 8, AT(b, 8), .add = 3, .swap = 9)) == 0);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && *result == 3 && *word == 9);
	pair_free(&a, &b);
}

static void lists_of_segments(void)
{
	struct end a, b;
	struct ibv_wc wc;
	struct ibv_send_wr *bad;
	struct ibv_recv_wr *bad_recv;

	pair_make(&a, &b, plain, usual);
	memcpy(a.buf, "abcdefgh", 8);
	struct ibv_sge from[] = { { (uintptr_t)a.buf, 3, a.mr->lkey }, { 0, 0, 0 }, { (uintptr_t)a.buf + 3, 5, a.mr->lkey } };
	struct ibv_sge to[] = { { (uintptr_t)b.buf, 2, b.mr->lkey }, { (uintptr_t)b.buf + 100, 20, b.mr->lkey } };
	struct ibv_recv_wr rr = { .sg_list = to, .num_sge = 2 };
	/* Three sends in one post, the last too long a list: two go out, bad points at it. */
	struct ibv_send_wr third = { .sg_list = from, .num_sge = 5, .opcode = IBV_WR_SEND };
	struct ibv_send_wr second = { .sg_list = from, .num_sge = 3, .opcode = IBV_WR_SEND,
					 .send_flags = IBV_SEND_SIGNALED, .wr_id = 2, .next = &third };
	struct ibv_send_wr first = { .sg_list = from, .num_sge = 3, .opcode = IBV_WR_SEND, .wr_id = 1, .next = &second };
	struct ibv_recv_wr r2 = rr;

	rr.next = &r2;
	CHECK(ibv_post_recv(b.qp, &rr, &bad_recv) == 0);
	CHECK(ibv_post_send(a.qp, &first, &bad) == EINVAL && bad == &third);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && wc.wr_id == 2 && none(a.scq));
	CHECK(wait_wc(b.rcq, &wc) == IBV_WC_SUCCESS && wc.byte_len == 8);
	CHECK(memcmp(b.buf, "ab", 2) == 0 && memcmp(b.buf + 100, "cdefgh", 6) == 0);
	CHECK(wait_wc(b.rcq, &wc) == IBV_WC_SUCCESS && none(b.rcq));
	/* Inline data may change as soon as it is posted, even if the send must wait; keys are not looked at. */
	CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 8, .lkey = 1, .flags = IBV_SEND_INLINE)) == 0);
	memset(a.buf, 0, 8);
	memset(b.buf, 0xff, 8);
	CHECK(none(a.scq));
	CHECK(post_recv(&b, b.buf, 8, 0) == 0);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && memcmp(b.buf, "abcdefgh", 8) == 0);
	CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 65, .flags = IBV_SEND_INLINE)) == EINVAL);
	CHECK(post(&a, REQ(IBV_WR_RDMA_READ, a.buf, 8, .flags = IBV_SEND_INLINE)) == EINVAL);
	CHECK(post(&a, REQ(IBV_WR_LOCAL_INV, a.buf, 8)) == EINVAL);
	pair_free(&a, &b);
}

/* Every error, what both ends see of it, and that it ends the connection. */
static void errors(void)
{
#define WRITE IBV_WR_RDMA_WRITE
#define READ IBV_WR_RDMA_READ
#define SEND IBV_WR_SEND
#define FAA IBV_WR_ATOMIC_FETCH_AND_ADD
	static const struct {
		const char *what;
		enum ibv_wr_opcode op;
		uint32_t len;
		int remote_at;           /* of the peer's buffer */
		int region;              /* which of the peer's: 0 all may, 1 read only, 2 of another PD, 3 no such key */
		int local_region;        /* of our own: 0 fine, 1 no such key, 2 of another PD, 3 not writable */
		int access, rd_atomic, mtu; /* of the peer's QP */
		int recv;                /* room in the peer's receive; 0: none posted */
		enum ibv_wc_status ours, theirs; /* theirs: of a receive */
	} c[] = {
		{ "beyond the region", WRITE, 2, BUF - 1, .ours = IBV_WC_REM_ACCESS_ERR, .theirs = IBV_WC_WR_FLUSH_ERR },
		{ "before the region", WRITE, 2, -1, .ours = IBV_WC_REM_ACCESS_ERR, .theirs = IBV_WC_WR_FLUSH_ERR },
		{ "read beyond", READ, 2, BUF - 1, .ours = IBV_WC_REM_ACCESS_ERR, .theirs = IBV_WC_WR_FLUSH_ERR },
		{ "write to read-only", WRITE, 2, 0, .region = 1, .ours = IBV_WC_REM_ACCESS_ERR, .theirs = IBV_WC_WR_FLUSH_ERR },
		{ "atomic on read-only", FAA, 8, 0, .region = 1, .ours = IBV_WC_REM_ACCESS_ERR, .theirs = IBV_WC_WR_FLUSH_ERR },
		{ "region of another PD", WRITE, 2, 0, .region = 2, .ours = IBV_WC_REM_ACCESS_ERR, .theirs = IBV_WC_WR_FLUSH_ERR },
		{ "no such rkey", WRITE, 2, 0, .region = 3, .ours = IBV_WC_REM_ACCESS_ERR, .theirs = IBV_WC_WR_FLUSH_ERR },
		{ "QP lets nobody write", WRITE, 2, 0, .access = IBV_ACCESS_REMOTE_READ, .ours = IBV_WC_REM_INV_REQ_ERR, .theirs = IBV_WC_WR_FLUSH_ERR },
		{ "no responder resources", READ, 2, 0, .rd_atomic = -1, .ours = IBV_WC_REM_INV_REQ_ERR, .theirs = IBV_WC_WR_FLUSH_ERR },
		{ "atomic not aligned", FAA, 8, 4, .ours = IBV_WC_REM_INV_REQ_ERR, .theirs = IBV_WC_WR_FLUSH_ERR },
		{ "packets of another MTU", WRITE, 2000, 0, .mtu = IBV_MTU_256, .ours = IBV_WC_REM_INV_REQ_ERR, .theirs = IBV_WC_WR_FLUSH_ERR },
		{ "send too long", SEND, 100, 0, .recv = 99, .ours = IBV_WC_REM_INV_REQ_ERR, .theirs = IBV_WC_LOC_LEN_ERR },
		{ "no such lkey", WRITE, 2, 0, .local_region = 1, .ours = IBV_WC_LOC_PROT_ERR },
		{ "lkey of another PD", WRITE, 2, 0, .local_region = 2, .ours = IBV_WC_LOC_PROT_ERR },
		{ "read into what can't be written", READ, 2, 0, .local_region = 3, .ours = IBV_WC_LOC_PROT_ERR },
		{ "atomic of another size", FAA, 4, 0, .ours = IBV_WC_LOC_LEN_ERR },
	};

	for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
		struct end a, b;
		struct ibv_wc wc;
		struct ibv_pd *other;
		struct ibv_mr *b_read, *b_other, *a_other, *a_read;
		struct way w = usual;
		int before = failures;

		end_make(&a, plain);
		end_make(&b, plain);
		w.qpn = b.qp->qp_num;
		w.gid = gid_of(&b);
		MUST(qp_up(a.qp, w) == 0);
		w.qpn = a.qp->qp_num;
		w.access = c[i].access;
		w.rd_atomic = c[i].rd_atomic;
		w.mtu = c[i].mtu;
		MUST(qp_up(b.qp, w) == 0);
		MUST(other = ibv_alloc_pd(a.ctx));
		MUST(b_read = ibv_reg_mr(b.pd, b.buf, BUF, IBV_ACCESS_REMOTE_READ));
		MUST(b_other = ibv_reg_mr(other, b.buf, BUF, ACCESS));
		MUST(a_other = ibv_reg_mr(other, a.buf, BUF, ACCESS));
		MUST(a_read = ibv_reg_mr(a.pd, a.buf, BUF, 0));
		b.buf[0] = b.buf[BUF - 1] = 42;
		a.buf[0] = a.buf[1] = 7;
		if (c[i].recv || c[i].theirs)
			CHECK(post_recv(&b, b.buf, (uint32_t)c[i].recv, 55) == 0);
		CHECK(post(&a, REQ(c[i].op, a.buf, c[i].len, .remote = (uintptr_t)b.buf + (uint64_t)c[i].remote_at, .id = 77,
			.rkey = (uint32_t[]){ b.mr->rkey, b_read->rkey, b_other->rkey, b.mr->rkey ^ 1 }[c[i].region],
			.lkey = (uint32_t[]){ a.mr->lkey, a.mr->lkey ^ 1, a_other->lkey, a_read->lkey }[c[i].local_region], .flags = UNSIGNALED)) == 0);
		CHECK(wait_wc(a.scq, &wc) == (int)c[i].ours && wc.wr_id == 77);
		CHECK(b.buf[0] == 42 && b.buf[BUF - 1] == 42);
		CHECK(qp_state(a.qp) == IBV_QPS_ERR);
		CHECK(post(&a, REQ(WRITE, a.buf, 2, AT(b, 0), .flags = UNSIGNALED, .id = 78)) == 0);
		CHECK(wait_wc(a.scq, &wc) == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 78);
		if (c[i].theirs) {
			CHECK(wait_wc(b.rcq, &wc) == (int)c[i].theirs && wc.wr_id == 55);
			CHECK(qp_state(b.qp) == IBV_QPS_ERR);
		} else {
			CHECK(none(b.rcq) && qp_state(b.qp) == IBV_QPS_RTS);
		}
		if (failures != before)
			fprintf(stderr, "  in: %s\n", c[i].what);
		ibv_dereg_mr(b_read);
		ibv_dereg_mr(b_other);
		ibv_dereg_mr(a_other);
		ibv_dereg_mr(a_read);
		ibv_dealloc_pd(other);
		pair_free(&a, &b);
	}
}

static void receiver_not_ready(void)
{
	struct end a, b;
	struct ibv_wc wc;
	double start = seconds();

	pair_make(&a, &b, plain, (struct way){ .rnr_retry = 3 });
	CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 1, .id = 1)) == 0);
	CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1, AT(b, 0), .id = 2, .flags = UNSIGNALED)) == 0);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_RNR_RETRY_EXC_ERR && wc.wr_id == 1);
	CHECK(seconds() - start >= 4 * 10e-6);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 2 && none(a.scq));
	CHECK(qp_state(b.qp) == IBV_QPS_RTS);
	pair_free(&a, &b);
}

/* A receive whose memory the receiver may not write ends both QPs. */
static void bad_receive(void)
{
	struct end a, b;
	struct ibv_wc wc;
	struct ibv_mr *read_only;

	pair_make(&a, &b, plain, usual);
	MUST(read_only = ibv_reg_mr(b.pd, b.buf, BUF, 0));
	struct ibv_sge s = { (uintptr_t)b.buf, 10, read_only->lkey };
	struct ibv_recv_wr wr = { .sg_list = &s, .num_sge = 1 }, *bad;
	CHECK(ibv_post_recv(b.qp, &wr, &bad) == 0);
	CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 4)) == 0);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_REM_OP_ERR);
	CHECK(wait_wc(b.rcq, &wc) == IBV_WC_LOC_PROT_ERR);
	CHECK(qp_state(a.qp) == IBV_QPS_ERR && qp_state(b.qp) == IBV_QPS_ERR);
	ibv_dereg_mr(read_only);
	pair_free(&a, &b);
}

/* The peer's QP must exist, be ready, and be the one that this end thinks it is. */
static void peer_not_there(void)
{
	static const struct {
		const char *what;
		int gone, not_ready, wrong_psn, wrong_gid, in_error, to_third;
	} c[] = { { "gone", .gone = 1 }, { "not ready", .not_ready = 1 }, { "wrong PSN", .wrong_psn = 1 }, { "wrong GID", .wrong_gid = 1 },
		  { "in ERR", .in_error = 1 }, { "connected to another QP", .to_third = 1 } };

	for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
		struct end a, b;
		struct ibv_wc wc;
		struct way w = usual;
		int before = failures;

		end_make(&a, plain);
		end_make(&b, plain);
		w.gid = gid_of(&b);
		w.gid.raw[15] += (uint8_t)c[i].wrong_gid;
		w.qpn = b.qp->qp_num;
		MUST(qp_up(a.qp, w) == 0);
		w = (struct way){ .qpn = a.qp->qp_num + (uint32_t)c[i].to_third, .gid = gid_of(&a), .peer_psn = (uint32_t)c[i].wrong_psn };
		if (!c[i].not_ready)
			MUST(qp_up(b.qp, w) == 0);
		if (c[i].in_error)
			MUST(qp_to(b.qp, IBV_QPS_ERR) == 0);
		if (c[i].gone) {
			MUST(ibv_destroy_qp(b.qp) == 0);
			b.qp = NULL;
		}
		CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1, AT(b, 0))) == 0);
		CHECK(wait_wc(a.scq, &wc) == IBV_WC_RETRY_EXC_ERR && b.buf[0] == 0);
		if (failures != before)
			fprintf(stderr, "  in: %s\n", c[i].what);
		pair_free(&a, &b);
	}
}

static void peer_becomes_ready(void)
{
	struct end a, b;
	struct ibv_wc wc;

	end_make(&a, plain);
	end_make(&b, plain);
	MUST(qp_up(a.qp, (struct way){ .qpn = b.qp->qp_num, .gid = gid_of(&b), .timeout = 20 }) == 0);
	a.buf[0] = 9;
	CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1, AT(b, 0))) == 0);
	CHECK(none(a.scq) && b.buf[0] == 0);
	MUST(qp_up(b.qp, (struct way){ .qpn = a.qp->qp_num, .gid = gid_of(&a) }) == 0);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && b.buf[0] == 9);
	pair_free(&a, &b);
}

/* timeout 0: the requester never gives up; the program must. */
static void no_timeout(void)
{
	struct end a, b;
	struct ibv_wc wc;
	double end;

	pair_make(&a, &b, plain, (struct way){ .timeout = -1 });
	MUST(ibv_destroy_qp(b.qp) == 0);
	b.qp = NULL;
	CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 1)) == 0);
	for (end = seconds() + 0.05; seconds() < end;)
		CHECK(none(a.scq));
	MUST(qp_to(a.qp, IBV_QPS_ERR) == 0);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_WR_FLUSH_ERR);
	pair_free(&a, &b);
}

static void reconnects(void)
{
	struct end a, b;
	struct ibv_wc wc;

	pair_make(&a, &b, plain, usual);
	CHECK(post_recv(&b, b.buf, 10, 1) == 0);
	CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1, AT(b, 0))) == 0);
	/* Left in the queues: a completion of a, a receive of b, a send of b. All is gone after RESET. */
	CHECK(post(&b, REQ(IBV_WR_SEND, b.buf, 1)) == 0);
	MUST(qp_to(a.qp, IBV_QPS_RESET) == 0 && qp_to(b.qp, IBV_QPS_RESET) == 0);
	CHECK(none(a.scq) && none(b.rcq) && none(b.scq));
	MUST(qp_up(a.qp, (struct way){ .qpn = b.qp->qp_num, .gid = gid_of(&b), .psn = 77 }) == 0);
	MUST(qp_up(b.qp, (struct way){ .qpn = a.qp->qp_num, .gid = gid_of(&a), .peer_psn = 77 }) == 0);
	CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 1)) == 0);
	CHECK(none(a.scq));
	CHECK(post_recv(&b, b.buf, 10, 2) == 0);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS);
	CHECK(wait_wc(b.rcq, &wc) == IBV_WC_SUCCESS && wc.wr_id == 2);
	/* One end alone: the other's connection is lost, and stays so. */
	MUST(qp_to(b.qp, IBV_QPS_RESET) == 0);
	MUST(qp_up(b.qp, (struct way){ .qpn = a.qp->qp_num, .gid = gid_of(&a), .peer_psn = 77 }) == 0);
	CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1, AT(b, 0))) == 0);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_RETRY_EXC_ERR);
	pair_free(&a, &b);
}

static void states(void)
{
	struct end e;
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_qp_init_attr init;
	struct ibv_wc wc;
	int init_mask = IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS;
	int rtr_mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;

	end_make(&e, plain);
	CHECK(post_recv(&e, e.buf, 1, 0) == EINVAL); /* not in RESET */
	CHECK(post(&e, REQ(IBV_WR_SEND, e.buf, 1)) == EINVAL);
	CHECK(qp_to(e.qp, IBV_QPS_RTR) == EINVAL && qp_to(e.qp, IBV_QPS_RTS) == EINVAL);
	CHECK(ibv_modify_qp(e.qp, &a, init_mask & ~IBV_QP_PORT) == EINVAL);
	CHECK(ibv_modify_qp(e.qp, &a, init_mask | IBV_QP_TIMEOUT) == EINVAL);
	a.port_num = 2;
	CHECK(ibv_modify_qp(e.qp, &a, init_mask) == EINVAL);
	a.port_num = 1;
	CHECK(ibv_modify_qp(e.qp, &a, init_mask) == 0 && qp_state(e.qp) == IBV_QPS_INIT);
	CHECK(post_recv(&e, e.buf, 1, 5) == 0);
	CHECK(post(&e, REQ(IBV_WR_SEND, e.buf, 1)) == EINVAL);
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .ah_attr = { .port_num = 1, .grh.sgid_index = 1 } };
	CHECK(ibv_modify_qp(e.qp, &a, rtr_mask) == EINVAL); /* Ethernet without GRH */
	a.ah_attr.is_global = 1;
	a.ah_attr.grh.sgid_index = 2;
	CHECK(ibv_modify_qp(e.qp, &a, rtr_mask) == EINVAL);
	a.ah_attr.grh.sgid_index = 1;
	a.path_mtu = 6;
	CHECK(ibv_modify_qp(e.qp, &a, rtr_mask) == EINVAL);
	a.path_mtu = IBV_MTU_4096;
	CHECK(ibv_modify_qp(e.qp, &a, rtr_mask) == 0 && qp_state(e.qp) == IBV_QPS_RTR);
	CHECK(post(&e, REQ(IBV_WR_SEND, e.buf, 1)) == EINVAL);
	MUST(ibv_query_qp(e.qp, &a, 0, &init) == 0);
	CHECK(a.path_mtu == IBV_MTU_4096 && init.cap.max_send_wr == 16 && init.cap.max_inline_data == 64 && init.send_cq == e.scq);
	CHECK(qp_to(e.qp, IBV_QPS_ERR) == 0);
	CHECK(wait_wc(e.rcq, &wc) == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 5);
	CHECK(post_recv(&e, e.buf, 1, 6) == 0 && wait_wc(e.rcq, &wc) == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 6);
	CHECK(post(&e, REQ(IBV_WR_SEND, e.buf, 1, .id = 7)) == 0 && wait_wc(e.scq, &wc) == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 7);
	CHECK(qp_to(e.qp, IBV_QPS_RTS) == EINVAL && qp_to(e.qp, IBV_QPS_RESET) == 0);
	CHECK(ibv_destroy_cq(e.scq) == EBUSY && ibv_dealloc_pd(e.pd) == EBUSY);
	end_free(&e);
}

static void queue_depth(void)
{
	struct end a, b;
	struct ibv_wc wc;
	int n = 0;

	pair_make(&a, &b, (struct spec){ .depth = 8 }, usual);
	/* Unsignaled work is not known to be done until a later completion is polled. */
	while (post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1, AT(b, 0), .flags = n < 7 ? UNSIGNALED : 0)) == 0)
		n++;
	CHECK(n == 8);
	CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1)) == ENOMEM);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && none(a.scq));
	for (n = 0; post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1, AT(b, 0), .flags = UNSIGNALED)) == 0;)
		n++;
	CHECK(n == 8);
	for (n = 0; post_recv(&b, b.buf, 1, 0) == 0;)
		n++;
	CHECK(n == 8 && post_recv(&b, b.buf, 1, 0) == ENOMEM);
	pair_free(&a, &b);
}

static void cq_overrun(void)
{
	struct end a, b;
	struct ibv_wc wc;
	struct ibv_async_event event;
	struct pollfd f;

	pair_make(&a, &b, (struct spec){ .depth = 8, .cqe = 3 }, usual);
	f = (struct pollfd){ .fd = a.ctx->async_fd, .events = POLLIN };
	for (int i = 0; i < 4; i++)
		CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1, AT(b, 0), .id = (uint64_t)i)) == 0);
	CHECK(qp_state(a.qp) == IBV_QPS_ERR);
	for (int i = 0; i < 3; i++)
		CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && wc.wr_id == (uint64_t)i);
	CHECK(poll(&f, 1, 0) == 0);
	CHECK(wait_wc(a.scq, &wc) == -2 && wait_wc(a.scq, &wc) == -2);
	CHECK(poll(&f, 1, 0) == 1 && ibv_get_async_event(a.ctx, &event) == 0);
	CHECK(event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == a.scq);
	ibv_ack_async_event(&event);
	CHECK(poll(&f, 1, 0) == 0);
	pair_free(&a, &b);
	/* Of a receiver: the sender's next message finds its QP in ERR. */
	pair_make(&a, &b, (struct spec){ .depth = 8, .cqe = 3 }, usual);
	for (int i = 0; i < 5; i++) {
		CHECK(post_recv(&b, b.buf, 8, 0) == 0);
		CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 8)) == 0);
		CHECK(wait_wc(a.scq, &wc) == (i < 4 ? IBV_WC_SUCCESS : IBV_WC_RETRY_EXC_ERR));
	}
	for (int i = 0; i < 3; i++)
		CHECK(wait_wc(b.rcq, &wc) == IBV_WC_SUCCESS);
	CHECK(wait_wc(b.rcq, &wc) == -2);
	pair_free(&a, &b);
}

static void destroyed_qp_leaves_no_completions(void)
{
	struct end a, b;
	struct ibv_wc wc;
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp *second;

	pair_make(&a, &b, (struct spec){ .depth = 8, .cqe = 8 }, usual);
	init.send_cq = init.recv_cq = a.scq;
	MUST(second = ibv_create_qp(a.pd, &init));
	MUST(qp_to(second, IBV_QPS_ERR) == 0);
	for (int i = 0; i < 3; i++) { /* interleaved */
		struct ibv_send_wr wr = { .opcode = IBV_WR_SEND }, *bad;

		CHECK(ibv_post_send(second, &wr, &bad) == 0);
		CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1, AT(b, 0), .id = (uint64_t)i)) == 0);
	}
	MUST(ibv_destroy_qp(second) == 0);
	for (int i = 0; i < 3; i++)
		CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && wc.wr_id == (uint64_t)i && wc.qp_num == a.qp->qp_num);
	CHECK(none(a.scq));
	for (int i = 0; i < 20; i++) { /* the ring is whole: more than once around */
		CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1, AT(b, 0), .id = (uint64_t)i)) == 0);
		CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && wc.wr_id == (uint64_t)i);
	}
	pair_free(&a, &b);
}

static void events(void)
{
	struct end a, b;
	struct ibv_wc wc;
	struct ibv_cq *cq;
	void *context;
	struct pollfd f;

	pair_make(&a, &b, (struct spec){ .events = true }, usual);
	f = (struct pollfd){ .fd = b.channel->fd, .events = POLLIN };
	for (int i = 0; i < 3; i++)
		CHECK(post_recv(&b, b.buf, 8, (uint64_t)i) == 0);
	CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 8)) == 0);
	CHECK(poll(&f, 1, 0) == 0); /* not armed */
	CHECK(ibv_req_notify_cq(b.rcq, 1) == 0);
	CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 8)) == 0);
	CHECK(poll(&f, 1, 0) == 0); /* not solicited */
	CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 8, .flags = IBV_SEND_SOLICITED)) == 0);
	CHECK(poll(&f, 1, 1000) == 1);
	CHECK(ibv_get_cq_event(b.channel, &cq, &context) == 0 && cq == b.rcq && context == &b);
	ibv_ack_cq_events(cq, 1);
	for (int i = 0; i < 3; i++)
		CHECK(wait_wc(b.rcq, &wc) == IBV_WC_SUCCESS);
	/* A program that sleeps on its channel while its send waits for a receive: the provider keeps trying. */
	CHECK(ibv_req_notify_cq(a.scq, 0) == 0);
	for (int i = 0; i < 3; i++)
		CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS);
	CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 8)) == 0);
	CHECK(post_recv(&b, b.buf, 8, 0) == 0);
	CHECK(ibv_get_cq_event(a.channel, &cq, &context) == 0 && cq == a.scq);
	CHECK(ibv_destroy_comp_channel(a.channel) == EBUSY);
	ibv_ack_cq_events(cq, 1);
	pair_free(&a, &b);
}

const struct test rc_tests[] = {
	{ "rc: ops move data", ops_move_data, { 0 } },
	{ "rc: atomics return what was", atomics_return_what_was, { 0 } },
	{ "rc: lists of segments, inline", lists_of_segments, { 0 } },
	{ "rc: errors", errors, { 0 } },
	{ "rc: receiver not ready", receiver_not_ready, { 0 } },
	{ "rc: bad receive", bad_receive, { 0 } },
	{ "rc: peer not there", peer_not_there, { 0 } },
	{ "rc: peer becomes ready", peer_becomes_ready, { 0 } },
	{ "rc: no timeout", no_timeout, { 0 } },
	{ "rc: reconnects", reconnects, { 0 } },
	{ "rc: states", states, { 0 } },
	{ "rc: queue depth", queue_depth, { 0 } },
	{ "rc: CQ overrun", cq_overrun, { 0 } },
	{ "rc: a destroyed QP leaves no completions", destroyed_qp_leaves_no_completions, { 0 } },
	{ "rc: events", events, { 0 } },
	{ 0 },
};
