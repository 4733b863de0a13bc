/* The self-test of verbsim, linked with it. Each case runs in a process of its own, on a fabric of its own. */
#include "selftest.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int failures;

void fatal(const char *file, int line, const char *what)
{
	fprintf(stderr, "%s:%d: %s (%s)\n", file, line, what, strerror(errno));
	_exit(3);
}

double seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* ---- ends ---- */

void end_make(struct end *e, struct spec s)
{
	int n = 0, depth = s.depth ? s.depth : 16, sges = s.sges ? s.sges : 4, cqe = s.cqe ? s.cqe : 2 * depth;
	struct ibv_device **list = ibv_get_device_list(&n);
	struct ibv_qp_init_attr a = {
		.qp_type = s.type ? s.type : IBV_QPT_RC, .sq_sig_all = s.signal_all,
		.cap = { (uint32_t)depth, (uint32_t)depth, (uint32_t)sges, (uint32_t)sges, s.inline_max ? (uint32_t)s.inline_max : 64 },
	};

	memset(e, 0, sizeof *e);
	MUST(list && n > s.device);
	MUST(e->ctx = ibv_open_device(list[s.device]));
	ibv_free_device_list(list);
	MUST(e->pd = ibv_alloc_pd(e->ctx));
	if (s.events)
		MUST(e->channel = ibv_create_comp_channel(e->ctx));
	MUST(e->scq = ibv_create_cq(e->ctx, cqe, e, e->channel, 0));
	MUST(e->rcq = ibv_create_cq(e->ctx, cqe, e, e->channel, 0));
	a.send_cq = e->scq;
	a.recv_cq = e->rcq;
	MUST(e->qp = ibv_create_qp(e->pd, &a));
	e->buf = mmap(NULL, BUF, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	MUST(e->buf != MAP_FAILED);
	MUST(e->mr = ibv_reg_mr(e->pd, e->buf, BUF, ACCESS));
}

void end_free(struct end *e)
{
	if (e->qp)
		CHECK(ibv_destroy_qp(e->qp) == 0);
	CHECK(ibv_destroy_cq(e->scq) == 0);
	CHECK(ibv_destroy_cq(e->rcq) == 0);
	if (e->channel)
		CHECK(ibv_destroy_comp_channel(e->channel) == 0);
	CHECK(ibv_dereg_mr(e->mr) == 0);
	CHECK(ibv_dealloc_pd(e->pd) == 0);
	CHECK(ibv_close_device(e->ctx) == 0);
	munmap(e->buf, BUF);
}

union ibv_gid gid_of(struct end *e)
{
	union ibv_gid g;

	MUST(ibv_query_gid(e->ctx, 1, 1, &g) == 0);
	return g;
}

int qp_up(struct ibv_qp *qp, struct way w)
{
	bool connected = qp->qp_type != IBV_QPT_UD, rc = qp->qp_type == IBV_QPT_RC;
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY,
		.qp_access_flags = (unsigned)(w.access ? w.access : ACCESS & ~IBV_ACCESS_LOCAL_WRITE),
	};
	int err = ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | (connected ? IBV_QP_ACCESS_FLAGS : IBV_QP_QKEY));

	if (err)
		return err;
	a = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR, .path_mtu = w.mtu ? (enum ibv_mtu)w.mtu : IBV_MTU_1024, .dest_qp_num = w.qpn, .rq_psn = w.peer_psn,
		.max_dest_rd_atomic = w.rd_atomic < 0 ? 0 : 4, .min_rnr_timer = 1,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = w.gid, .sgid_index = 1, .hop_limit = 64 } },
	};
	err = ibv_modify_qp(qp, &a, IBV_QP_STATE | (connected ? IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN : 0) |
			    (rc ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0));
	if (err)
		return err;
	a = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS, .sq_psn = w.psn, .retry_cnt = 1, .max_rd_atomic = 4,
		.timeout = (uint8_t)(w.timeout < 0 ? 0 : w.timeout ? w.timeout : 8), .rnr_retry = w.rnr_retry ? (uint8_t)w.rnr_retry : 7,
	};
	return ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN |
			     (rc ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0));
}

int qp_to(struct ibv_qp *qp, enum ibv_qp_state s)
{
	struct ibv_qp_attr a = { .qp_state = s };

	return ibv_modify_qp(qp, &a, IBV_QP_STATE);
}

enum ibv_qp_state qp_state(struct ibv_qp *qp)
{
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr i;

	MUST(ibv_query_qp(qp, &a, IBV_QP_STATE, &i) == 0);
	return a.qp_state;
}

void pair_make(struct end *a, struct end *b, struct spec s, struct way w)
{
	struct way back = w;

	end_make(a, s);
	end_make(b, s);
	w.qpn = b->qp->qp_num;
	w.gid = gid_of(b);
	back.qpn = a->qp->qp_num;
	back.gid = gid_of(a);
	back.psn = w.peer_psn;
	back.peer_psn = w.psn;
	MUST(qp_up(a->qp, w) == 0);
	MUST(qp_up(b->qp, back) == 0);
}

void pair_free(struct end *a, struct end *b)
{
	end_free(a);
	end_free(b);
}

/* ---- work ---- */

int post(struct end *e, struct req r)
{
	struct ibv_sge s = { (uintptr_t)r.at, r.len, r.lkey ? r.lkey : e->mr->lkey };
	struct ibv_send_wr wr = {
		.wr_id = r.id, .sg_list = &s, .num_sge = r.at != NULL, .opcode = r.op, .imm_data = r.imm,
		.send_flags = r.flags & UNSIGNALED ? r.flags & ~(unsigned)UNSIGNALED : r.flags | IBV_SEND_SIGNALED,
	}, *bad;

	if (r.op == IBV_WR_ATOMIC_FETCH_AND_ADD || r.op == IBV_WR_ATOMIC_CMP_AND_SWP) {
		wr.wr.atomic.remote_addr = r.remote;
		wr.wr.atomic.rkey = r.rkey;
		wr.wr.atomic.compare_add = r.add;
		wr.wr.atomic.swap = r.swap;
	} else if (e->qp->qp_type == IBV_QPT_UD) {
		wr.wr.ud.ah = r.ah;
		wr.wr.ud.remote_qpn = r.qpn;
		wr.wr.ud.remote_qkey = r.qkey;
	} else {
		wr.wr.rdma.remote_addr = r.remote;
		wr.wr.rdma.rkey = r.rkey;
	}
	return ibv_post_send(e->qp, &wr, &bad);
}

int post_recv(struct end *e, void *at, uint32_t len, uint64_t id)
{
	struct ibv_sge s = { (uintptr_t)at, len, e->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &s, .num_sge = at != NULL }, *bad;

	return ibv_post_recv(e->qp, &wr, &bad);
}

int wait_wc(struct ibv_cq *cq, struct ibv_wc *wc)
{
	double end = seconds() + 10;

	memset(wc, 0xee, sizeof *wc);
	do {
		int n = ibv_poll_cq(cq, 1, wc);

		if (n)
			return n < 0 ? -2 : (int)wc->status;
	} while (seconds() < end);
	return -1;
}

int none(struct ibv_cq *cq)
{
	struct ibv_wc wc;

	return ibv_poll_cq(cq, 1, &wc) == 0;
}

/* ---- processes ---- */

struct other other_start(void (*child)(int fd, const void *arg), const void *arg)
{
	int s[2];
	pid_t pid;

	MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, s) == 0);
	fflush(NULL);
	pid = fork();
	MUST(pid >= 0);
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(s[0]);
		failures = 0;
		child(s[1], arg);
		exit(failures != 0);
	}
	close(s[1]);
	return (struct other){ pid, s[0] };
}

void other_end(struct other o)
{
	int status;

	MUST(waitpid(o.pid, &status, 0) == o.pid);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	close(o.fd);
}

void tell(int fd, const void *p, size_t n) { MUST(write(fd, p, n) == (ssize_t)n); }

void hear(int fd, void *p, size_t n)
{
	for (size_t have = 0; have < n;) {
		ssize_t r = read(fd, (char *)p + have, n - have);

		MUST(r > 0);
		have += (size_t)r;
	}
}

struct remote meet(int fd, struct end *e, struct way w)
{
	struct remote me = { e->qp->qp_num, e->mr->rkey, (uintptr_t)e->buf, gid_of(e) }, you;
	char go = 0;

	tell(fd, &me, sizeof me);
	hear(fd, &you, sizeof you);
	w.qpn = you.qpn;
	w.gid = you.gid;
	MUST(qp_up(e->qp, w) == 0);
	tell(fd, &go, 1);
	hear(fd, &go, 1);
	return you;
}

/* ---- running ---- */

static void empty(const char *dir)
{
	DIR *d = opendir(dir);
	struct dirent *e;

	while (d && (e = readdir(d)))
		if (e->d_name[0] != '.') {
			fprintf(stderr, "left behind: %s/%s\n", dir, e->d_name);
			failures++;
			unlinkat(dirfd(d), e->d_name, 0);
		}
	if (d)
		closedir(d);
}

static bool run(const struct test *t)
{
	enum { LIMIT_S = 60 };
	char dir[] = "/dev/shm/verbsim-test.XXXXXX";
	double start = seconds();
	int status;
	pid_t pid;

	MUST(mkdtemp(dir));
	fflush(NULL);
	pid = fork();
	MUST(pid >= 0);
	if (pid == 0) {
		failures = 0;
		setenv("VERBSIM_DIR", dir, 1);
		for (size_t i = 0; i < sizeof t->env / sizeof *t->env && t->env[i]; i++)
			putenv((char *)(uintptr_t)t->env[i]);
		alarm(LIMIT_S);
		t->run();
		exit(failures != 0);
	}
	MUST(waitpid(pid, &status, 0) == pid);
	failures = 0;
	empty(dir);
	rmdir(dir);
	if (status == 0 && failures == 0) {
		printf("ok    %s (%.2f s)\n", t->name, seconds() - start);
		return true;
	}
	if (WIFSIGNALED(status))
		printf("FAIL  %s: signal %d%s\n", t->name, WTERMSIG(status), WTERMSIG(status) == SIGALRM ? ", as it did not end" : "");
	else
		printf("FAIL  %s: exit code %d\n", t->name, WEXITSTATUS(status));
	return false;
}

int main(int argc, char **argv)
{
	const struct test *all[] = { rc_tests, ud_tests, memory_tests, process_tests, knob_tests };
	int bad = 0, ran = 0;

	for (char **e = (char *[]){ "VERBSIM", "VERBSIM_DEVICES", "VERBSIM_DELAY_NS", "VERBSIM_GBPS", "VERBSIM_ERROR_EVERY",
				    "VERBSIM_DROP_EVERY", "VERBSIM_ENOMEM_EVERY", "VERBSIM_SHORT_POLL", "VERBSIM_NO_RC", NULL }; *e; e++)
		unsetenv(*e);
	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		for (const struct test *t = all[i]; t->name; t++) {
			if (argc > 1 && !strstr(t->name, argv[1]))
				continue;
			bad += !run(t);
			ran++;
		}
	printf("%d of %d cases failed\n", bad, ran);
	return bad || !ran;
}
