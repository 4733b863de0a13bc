#include "selftest.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const struct way usual;
static const struct spec plain;

/* ---- a stream of numbered, varied messages, whole and in order, the receiver now and then behind ---- */

enum { MESSAGES = 20000, SLOTS = 16, SLOT = 2048 };

static uint32_t length_of(uint32_t i) { return 5 + i * 7919 % (SLOT - 5); } /* more than the number */

static void fill(uint8_t *p, uint32_t i)
{
	memcpy(p, &i, 4);
	for (uint32_t k = 4; k < length_of(i); k++)
		p[k] = (uint8_t)(i + k);
}

static bool filled(const uint8_t *p, uint32_t i)
{
	bool ok = memcmp(p, &i, 4) == 0;

	for (uint32_t k = 4; k < length_of(i); k++)
		ok &= p[k] == (uint8_t)(i + k);
	return ok;
}

static void stream_receiver(int fd, const void *arg)
{
	struct end e;
	struct ibv_wc wc;

	(void)arg;
	end_make(&e, plain);
	meet(fd, &e, usual);
	for (uint32_t i = 0; i < SLOTS / 2; i++)
		CHECK(post_recv(&e, e.buf + i * SLOT, SLOT, i) == 0);
	for (uint32_t i = 0; i < MESSAGES; i++) {
		MUST(wait_wc(e.rcq, &wc) == IBV_WC_SUCCESS);
		CHECK(wc.byte_len == length_of(i) && filled(e.buf + wc.wr_id * SLOT, i));
		if (i % 1000 == 0)
			usleep(2000);
		CHECK(post_recv(&e, e.buf + wc.wr_id * SLOT, SLOT, wc.wr_id) == 0);
	}
	tell(fd, "", 1);
	end_free(&e);
}

static void stream(void)
{
	struct other o = other_start(stream_receiver, NULL);
	struct end e;
	struct ibv_wc wc;
	uint32_t sent = 0, done = 0;
	char end;

	end_make(&e, plain);
	meet(o.fd, &e, usual);
	while (done < MESSAGES) {
		while (sent < MESSAGES && sent - done < SLOTS) {
			fill(e.buf + sent % SLOTS * SLOT, sent);
			MUST(post(&e, REQ(IBV_WR_SEND, e.buf + sent % SLOTS * SLOT, length_of(sent), .id = sent)) == 0);
			sent++;
		}
		MUST(wait_wc(e.scq, &wc) == IBV_WC_SUCCESS);
		CHECK(wc.wr_id == done);
		done++;
	}
	hear(o.fd, &end, 1);
	end_free(&e);
	other_end(o);
}

/* ---- ping-pong in memory: the last byte tells that the message is there ---- */

enum { ROUNDS = 3000 };

static void bounce(struct end *e, struct remote you, bool first)
{
	enum { IN = 32768 };
	struct ibv_wc wc;

	for (uint32_t i = 0; i < ROUNDS; i++) {
		uint32_t len = length_of(i);
		volatile uint8_t *last = e->buf + IN + len - 1;
		uint8_t mark = (uint8_t)(i + len - 1);
		double end = seconds() + 10;

		for (int k = first ? 0 : 1; k < (first ? 2 : 3); k++) {
			if (k == 1) { /* await */
				while (*last != mark && seconds() < end)
					sched_yield();
				__atomic_thread_fence(__ATOMIC_ACQUIRE);
				MUST(filled(e->buf + IN, i));
				memset(e->buf + IN, (uint8_t)~(i + 1 + length_of(i + 1) - 1), SLOT);
			} else {
				fill(e->buf, i);
				MUST(post(e, REQ(IBV_WR_RDMA_WRITE, e->buf, len, .remote = you.addr + IN, .rkey = you.rkey)) == 0);
				MUST(wait_wc(e->scq, &wc) == IBV_WC_SUCCESS);
			}
		}
	}
}

static void bounce_back(int fd, const void *arg)
{
	struct end e;
	char end;

	(void)arg;
	end_make(&e, plain);
	memset(e.buf, 0xff, BUF);
	bounce(&e, meet(fd, &e, usual), false);
	tell(fd, "", 1);
	hear(fd, &end, 1);
	end_free(&e);
}

static void ping_pong(void)
{
	struct other o = other_start(bounce_back, NULL);
	struct end e;
	char end;

	end_make(&e, plain);
	memset(e.buf, 0xff, BUF);
	bounce(&e, meet(o.fd, &e, usual), true);
	hear(o.fd, &end, 1);
	tell(o.fd, "", 1);
	end_free(&e);
	other_end(o);
}

/* ---- a peer that is killed ---- */

static void victim(int fd, const void *arg)
{
	struct end e;

	(void)arg;
	end_make(&e, plain);
	meet(fd, &e, usual);
	pause();
}

static void killed_peer(void)
{
	for (int waiting = 0; waiting < 2; waiting++) { /* a send may wait for a receive of it */
		struct other o = other_start(victim, NULL);
		struct end e;
		struct ibv_wc wc;
		struct remote you;
		int status;

		end_make(&e, plain);
		you = meet(o.fd, &e, (struct way){ .timeout = 14 });
		CHECK(post(&e, REQ(IBV_WR_RDMA_WRITE, e.buf, 8, .remote = you.addr, .rkey = you.rkey)) == 0);
		CHECK(wait_wc(e.scq, &wc) == IBV_WC_SUCCESS);
		CHECK(post_recv(&e, e.buf, 8, 5) == 0);
		if (waiting)
			CHECK(post(&e, REQ(IBV_WR_SEND, e.buf, 8, .id = 1)) == 0);
		kill(o.pid, SIGKILL);
		MUST(waitid(P_PID, (id_t)o.pid, &(siginfo_t){ 0 }, WEXITED | WNOWAIT) == 0); /* it stays a zombie */
		CHECK(post(&e, REQ(IBV_WR_RDMA_WRITE, e.buf, 8, .remote = you.addr, .rkey = you.rkey, .id = 2)) == 0);
		CHECK(wait_wc(e.scq, &wc) == IBV_WC_RETRY_EXC_ERR && wc.wr_id == (waiting ? 1 : 2));
		if (waiting)
			CHECK(wait_wc(e.scq, &wc) == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 2);
		CHECK(wait_wc(e.rcq, &wc) == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 5);
		waitpid(o.pid, &status, 0);
		close(o.fd);
		end_free(&e);
	}
}

/* ---- what the dead leave ---- */

static int files(void)
{
	DIR *d = opendir(getenv("VERBSIM_DIR"));
	struct dirent *e;
	int n = 0;

	while (d && (e = readdir(d)))
		n += e->d_name[0] != '.';
	if (d)
		closedir(d);
	return n;
}

static void with_events(int fd, const void *arg)
{
	struct end e;

	(void)arg;
	end_make(&e, (struct spec){ .events = true });
	tell(fd, "", 1);
	pause();
}

static void leave_properly(int fd, const void *arg)
{
	struct end e;

	(void)arg;
	end_make(&e, (struct spec){ .events = true });
	tell(fd, "", 1);
	exit(0); /* nothing closed */
}

static void files_of_the_dead(void)
{
	struct other o = other_start(with_events, NULL);
	char c;

	hear(o.fd, &c, 1);
	CHECK(files() == 2);
	kill(o.pid, SIGKILL);
	waitpid(o.pid, NULL, 0);
	close(o.fd);
	CHECK(files() == 2);
	o = other_start(leave_properly, NULL);
	hear(o.fd, &c, 1);
	other_end(o);
	CHECK(files() == 0);
}

/* ---- many QPs, one CQ ---- */

enum { QPS = 1024 };

static void many(int fd, bool sends)
{
	struct end e;
	static struct ibv_qp *qp[QPS];
	static uint32_t mine[QPS], theirs[QPS];
	struct ibv_qp_init_attr a = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct remote you;
	struct ibv_wc wc;
	uint32_t next[QPS] = { 0 };
	char c = 0;

	end_make(&e, (struct spec){ .cqe = QPS * 8 });
	you = meet(fd, &e, usual);
	a.send_cq = e.scq;
	a.recv_cq = e.rcq;
	for (int i = 0; i < QPS; i++) {
		MUST(qp[i] = ibv_create_qp(e.pd, &a));
		mine[i] = qp[i]->qp_num;
	}
	tell(fd, mine, sizeof mine);
	hear(fd, theirs, sizeof theirs);
	for (int i = 0; i < QPS; i++) {
		struct ibv_recv_wr wr = { .wr_id = (uint64_t)i }, *bad;

		MUST(qp_up(qp[i], (struct way){ .qpn = theirs[i], .gid = you.gid }) == 0);
		for (int k = 0; k < 4; k++)
			MUST(ibv_post_recv(qp[i], &wr, &bad) == 0);
	}
	tell(fd, &c, 1);
	hear(fd, &c, 1);
	for (int k = 0; k < 4 && sends; k++)
		for (int i = 0; i < QPS; i++) {
			struct ibv_send_wr wr = { .wr_id = (uint64_t)i, .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = (uint32_t)(i * 4 + k),
						  .send_flags = IBV_SEND_SIGNALED }, *bad;

			MUST(ibv_post_send(qp[i], &wr, &bad) == 0);
		}
	for (int n = 0; n < 4 * QPS; n++) {
		MUST(wait_wc(sends ? e.scq : e.rcq, &wc) == IBV_WC_SUCCESS);
		CHECK(wc.qp_num == mine[wc.wr_id]);
		if (!sends)
			CHECK(wc.imm_data == wc.wr_id * 4 + next[wc.wr_id]++ && wc.src_qp == theirs[wc.wr_id]);
	}
	tell(fd, &c, 1);
	hear(fd, &c, 1);
	for (int i = 0; i < QPS; i++)
		CHECK(ibv_destroy_qp(qp[i]) == 0);
	end_free(&e);
}

static void many_receive(int fd, const void *arg) { (void)arg, many(fd, false); }

static void many_qps(void)
{
	struct other o = other_start(many_receive, NULL);

	many(o.fd, true);
	other_end(o);
}

/* ---- atomics from two processes and several threads add up ---- */

enum { THREADS = 4, ADDS = 5000 };

struct adder {
	struct end e;
	struct remote to;
	int id;
};

static void *add(void *arg)
{
	struct adder *a = arg;
	struct ibv_wc wc;

	for (int i = 0; i < ADDS; i++) {
		MUST(post(&a->e, REQ(IBV_WR_ATOMIC_FETCH_AND_ADD, a->e.buf, 8, .remote = a->to.addr, .rkey = a->to.rkey, .add = 1)) == 0);
		MUST(wait_wc(a->e.scq, &wc) == IBV_WC_SUCCESS);
	}
	return NULL;
}

static void target(int fd, const void *arg)
{
	struct end e[THREADS];
	uint64_t *word = NULL;
	char c;

	(void)arg;
	for (int i = 0; i < THREADS; i++) {
		end_make(&e[i], plain);
		meet(fd, &e[i], usual);
	}
	word = (uint64_t *)(void *)e[0].buf;
	for (int i = 0; i < ADDS; i++) /* local atomics count too */
		__atomic_fetch_add(word, 1, __ATOMIC_RELAXED);
	hear(fd, &c, 1);
	CHECK(*word == ADDS);
	for (int i = 1; i < THREADS; i++)
		CHECK(*(uint64_t *)(void *)e[i].buf == ADDS);
	CHECK(*word == ADDS);
	for (int i = 0; i < THREADS; i++)
		end_free(&e[i]);
}

static void own_queues(void)
{
	struct other o = other_start(target, NULL);
	static struct adder a[THREADS];
	pthread_t t[THREADS];

	for (int i = 0; i < THREADS; i++) {
		end_make(&a[i].e, plain);
		a[i].to = meet(o.fd, &a[i].e, usual);
	}
	/* The first has the local adds for company, so it stays away. */
	for (int i = 1; i < THREADS; i++)
		MUST(pthread_create(&t[i], NULL, add, &a[i]) == 0);
	for (int i = 1; i < THREADS; i++)
		pthread_join(t[i], NULL);
	tell(o.fd, "", 1);
	for (int i = 0; i < THREADS; i++)
		end_free(&a[i].e);
	other_end(o);
}

/* ---- threads on one QP and one CQ ---- */

enum { SHARED_ADDS = 4000 };
static struct end near_end, far_end;
static uint32_t completions;

static void *share(void *arg)
{
	struct ibv_wc wc[4];

	(void)arg;
	for (int i = 0; i < SHARED_ADDS;) {
		int err = post(&near_end, REQ(IBV_WR_ATOMIC_FETCH_AND_ADD, near_end.buf, 8, AT(far_end, 0), .add = 1));
		int n = ibv_poll_cq(near_end.scq, 4, wc);

		MUST(err == 0 || err == ENOMEM);
		MUST(n >= 0);
		for (int k = 0; k < n; k++)
			MUST(wc[k].status == IBV_WC_SUCCESS);
		__atomic_add_fetch(&completions, (uint32_t)n, __ATOMIC_RELAXED);
		i += err == 0;
	}
	return NULL;
}

static void shared_queues(void)
{
	pthread_t t[THREADS];
	struct ibv_wc wc;

	pair_make(&near_end, &far_end, plain, usual);
	for (int i = 0; i < THREADS; i++)
		MUST(pthread_create(&t[i], NULL, share, NULL) == 0);
	for (int i = 0; i < THREADS; i++)
		pthread_join(t[i], NULL);
	while (completions < THREADS * SHARED_ADDS && wait_wc(near_end.scq, &wc) == IBV_WC_SUCCESS)
		completions++;
	CHECK(completions == THREADS * SHARED_ADDS && none(near_end.scq));
	CHECK(*(uint64_t *)(void *)far_end.buf == THREADS * SHARED_ADDS);
	pair_free(&near_end, &far_end);
}

/* ---- sessions come and go in both roles, as in a daemon ---- */

static void *sessions(void *arg)
{
	(void)arg;
	for (int i = 0; i < 60; i++) {
		struct end a, b;
		struct ibv_wc wc;

		pair_make(&a, &b, plain, usual);
		CHECK(post_recv(&b, b.buf, 100, 0) == 0);
		CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 100)) == 0);
		CHECK(wait_wc(b.rcq, &wc) == IBV_WC_SUCCESS && wait_wc(a.scq, &wc) == IBV_WC_SUCCESS);
		if (i % 3 == 0)
			CHECK(post(&a, REQ(IBV_WR_SEND, a.buf, 100)) == 0); /* abandoned while it waits */
		pair_free(&a, &b);
	}
	return NULL;
}

static void concurrent_sessions(void)
{
	pthread_t t[THREADS];

	for (int i = 0; i < THREADS; i++)
		MUST(pthread_create(&t[i], NULL, sessions, NULL) == 0);
	for (int i = 0; i < THREADS; i++)
		pthread_join(t[i], NULL);
}

/* The thread that opened the device may go: Go's do. */
static void *open_and_go(void *arg)
{
	pair_make(&near_end, &far_end, plain, usual);
	return arg;
}

static void opening_thread_ends(void)
{
	pthread_t t;
	struct ibv_wc wc;

	MUST(pthread_create(&t, NULL, open_and_go, NULL) == 0);
	pthread_join(t, NULL);
	CHECK(post(&near_end, REQ(IBV_WR_RDMA_WRITE, near_end.buf, 8, AT(far_end, 0))) == 0);
	CHECK(wait_wc(near_end.scq, &wc) == IBV_WC_SUCCESS);
	pair_free(&near_end, &far_end);
}

/* ---- events across processes ---- */

enum { WAKES = 50 };

static void sleeper(int fd, const void *arg)
{
	struct end e;
	struct ibv_cq *cq;
	struct ibv_wc wc;
	void *context;

	(void)arg;
	end_make(&e, (struct spec){ .events = true });
	meet(fd, &e, usual);
	MUST(ibv_req_notify_cq(e.rcq, 0) == 0);
	MUST(post_recv(&e, e.buf, 100, 1) == 0);
	for (int n = 0; n < WAKES;) { /* messages, as one event may stand for two */
		MUST(ibv_get_cq_event(e.channel, &cq, &context) == 0 && cq == e.rcq);
		ibv_ack_cq_events(cq, 1);
		MUST(ibv_req_notify_cq(cq, 0) == 0);
		for (; ibv_poll_cq(cq, 1, &wc) == 1; n++) {
			MUST(wc.status == IBV_WC_SUCCESS);
			MUST(post_recv(&e, e.buf, 100, 1) == 0);
			MUST(post(&e, REQ(IBV_WR_SEND, e.buf, 4)) == 0 && wait_wc(e.scq, &wc) == IBV_WC_SUCCESS);
		}
	}
	tell(fd, "", 1);
	end_free(&e);
}

static void events_between_processes(void)
{
	struct other o = other_start(sleeper, NULL);
	struct end e;
	struct ibv_wc wc;
	char c;

	end_make(&e, plain);
	meet(o.fd, &e, usual);
	for (int i = 0; i < WAKES; i++) {
		MUST(post_recv(&e, e.buf, 100, 0) == 0);
		MUST(post(&e, REQ(IBV_WR_SEND, e.buf, 4)) == 0);
		MUST(wait_wc(e.scq, &wc) == IBV_WC_SUCCESS && wait_wc(e.rcq, &wc) == IBV_WC_SUCCESS);
	}
	hear(o.fd, &c, 1);
	end_free(&e);
	other_end(o);
}

/* ---- starting and going ---- */

static void start_and_tell(int fd, const void *arg)
{
	struct end e;
	char c;

	(void)arg;
	hear(fd, &c, 1);
	end_make(&e, plain);
	tell(fd, &e.qp->qp_num, sizeof e.qp->qp_num);
	hear(fd, &c, 1);
	end_free(&e);
}

static void many_start_at_once(void)
{
	enum { N = 24 };
	struct other o[N];
	uint32_t qpn[N];

	for (int i = 0; i < N; i++)
		o[i] = other_start(start_and_tell, NULL);
	for (int i = 0; i < N; i++)
		tell(o[i].fd, "", 1);
	for (int i = 0; i < N; i++) {
		hear(o[i].fd, &qpn[i], sizeof qpn[i]);
		for (int k = 0; k < i; k++)
			CHECK(qpn[k] != qpn[i]);
	}
	CHECK(files() == N);
	for (int i = 0; i < N; i++)
		tell(o[i].fd, "", 1);
	for (int i = 0; i < N; i++)
		other_end(o[i]);
	CHECK(files() == 0);
}

static int mapped(void) /* of any home */
{
	FILE *f = fopen("/proc/self/maps", "re");
	char line[400];
	int n = 0;

	while (f && fgets(line, sizeof line, f))
		n += strstr(line, ".mem") != NULL;
	if (f)
		fclose(f);
	return n;
}

static void visitor(int fd, const void *arg)
{
	struct end e;
	struct remote you;
	struct ibv_wc wc;
	char c;

	(void)arg;
	end_make(&e, plain); /* in a child of a process that has devices itself */
	you = meet(fd, &e, usual);
	CHECK(post(&e, REQ(IBV_WR_RDMA_WRITE, e.buf, 100, .remote = you.addr, .rkey = you.rkey)) == 0);
	CHECK(wait_wc(e.scq, &wc) == IBV_WC_SUCCESS);
	tell(fd, "", 1);
	hear(fd, &c, 1);
	end_free(&e);
}

/* Nothing of a peer that went stays mapped for long. */
static void peers_come_and_go(void)
{
	int before = 0;
	struct end first;

	end_make(&first, plain);
	for (int i = 0; i < 60; i++) {
		struct other o = other_start(visitor, NULL);
		struct end e;
		struct remote you;
		struct ibv_wc wc;
		char c;

		end_make(&e, plain);
		you = meet(o.fd, &e, usual);
		CHECK(post(&e, REQ(IBV_WR_RDMA_READ, e.buf, 100, .remote = you.addr, .rkey = you.rkey)) == 0);
		CHECK(wait_wc(e.scq, &wc) == IBV_WC_SUCCESS);
		hear(o.fd, &c, 1);
		tell(o.fd, "", 1);
		other_end(o);
		end_free(&e);
		if (i == 10)
			before = mapped();
	}
	CHECK(mapped() <= before + 5);
	end_free(&first);
}

const struct test process_tests[] = {
	{ "processes: a stream is whole and in order", stream, { 0 } },
	{ "processes: ping-pong in memory", ping_pong, { 0 } },
	{ "processes: killed peer", killed_peer, { 0 } },
	{ "processes: files of the dead", files_of_the_dead, { 0 } },
	{ "processes: many start at once", many_start_at_once, { 0 } },
	{ "processes: peers come and go", peers_come_and_go, { 0 } },
	{ "processes: many QPs on one CQ", many_qps, { 0 } },
	{ "processes: events", events_between_processes, { 0 } },
	{ "threads: queues of their own", own_queues, { 0 } },
	{ "threads: shared queues", shared_queues, { 0 } },
	{ "threads: concurrent sessions", concurrent_sessions, { 0 } },
	{ "threads: the one that opened the device ends", opening_thread_ends, { 0 } },
	{ 0 },
};
