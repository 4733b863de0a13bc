/* barelp: the least a generator can do: post work requests, poll their completions, count. What a message costs here is
 * the floor for any program over the same provider. Both ends of each connection are in this process.
 *
 *   VERBSIM=null LD_PRELOAD=build/verbsim.so build/barelp -s 64 -Q 100 -l 1 -q 1
 *
 * Prints one JSON object; ns_per_message is the median of the runs. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MAX_QPS = 1024, MAX_LIST = 128, MAX_RUNS = 101, BATCH = 16 };

static struct options {
	const char *device;
	int gid, qps, depth, cq_mod, list, runs;
	unsigned size;
	long messages;
	enum ibv_wr_opcode op;
} o = { .gid = 1, .qps = 1, .depth = 128, .cq_mod = 100, .list = 1, .runs = 5, .size = 64, .messages = 1000000 };

struct lane {
	struct ibv_qp *qp;
	struct ibv_send_wr wr[MAX_LIST];
	struct ibv_sge sge;
	int to_signal; /* work requests to the next signaled one */
	int free;      /* of the queue */
};

static struct lane lanes[MAX_QPS];
static struct ibv_cq *cq;

static void die(const char *what)
{
	fprintf(stderr, "barelp: %s: %s\n", what, strerror(errno));
	exit(1);
}

static double seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Fills a queue; returns how many were posted. With a list of several moderations, the flags never change; else the last
 * of a list is signaled when it is time. */
static inline long fill(struct lane *l, long most)
{
	const int list = o.list, every = o.cq_mod;
	struct ibv_send_wr *first = l->wr, *last = &l->wr[list - 1], *bad;
	struct ibv_qp *qp = l->qp;
	int free_ = l->free, to_signal = l->to_signal, err;
	long posted = 0;

	for (; free_ >= list && posted < most; posted += list) {
		if (every > list) {
			to_signal -= list;
			last->send_flags = to_signal > 0 ? 0 : IBV_SEND_SIGNALED;
			if (to_signal <= 0)
				to_signal += every;
		}
		err = ibv_post_send(qp, first, &bad);
		if (err) {
			errno = err;
			die("ibv_post_send");
		}
		free_ -= list;
	}
	l->free = free_;
	l->to_signal = to_signal;
	return posted;
}

/* Returns the time of a message in ns. What the moderation leaves unsignaled at the end of a run, the next one completes. */
static double run(void)
{
	long posted = 0, completed = 0, total = o.messages;
	struct ibv_wc wc[BATCH];
	double start = seconds();

	while (completed + o.cq_mod * (long)o.qps <= total) {
		int n;

		for (int i = 0; i < o.qps; i++)
			posted += fill(&lanes[i], total - posted);
		n = ibv_poll_cq(cq, BATCH, wc);
		if (n < 0)
			die("ibv_poll_cq");
		for (int i = 0; i < n; i++) {
			if (wc[i].status != IBV_WC_SUCCESS) {
				fprintf(stderr, "barelp: completion: %s\n", ibv_wc_status_str(wc[i].status));
				exit(1);
			}
			lanes[wc[i].wr_id].free += o.cq_mod;
			completed += o.cq_mod;
		}
	}
	return (seconds() - start) * 1e9 / (double)completed;
}

static void to_rts(struct ibv_qp *qp, uint32_t dest, const union ibv_gid *gid)
{
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
	};

	errno = ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	if (errno)
		die("QP to INIT");
	a = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = dest, .max_dest_rd_atomic = 16, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = *gid, .sgid_index = (uint8_t)o.gid, .hop_limit = 64 } },
	};
	errno = ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	if (errno)
		die("QP to RTR");
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 16 };
	errno = ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
			      IBV_QP_MAX_QP_RD_ATOMIC);
	if (errno)
		die("QP to RTS");
}

static struct ibv_context *open_device(void)
{
	int n = 0;
	struct ibv_device **list = ibv_get_device_list(&n);
	struct ibv_context *c = NULL;

	for (int i = 0; i < n && !c; i++)
		if (!o.device || strcmp(o.device, ibv_get_device_name(list[i])) == 0)
			c = ibv_open_device(list[i]);
	if (!c)
		die(o.device ? o.device : "no device");
	ibv_free_device_list(list);
	return c;
}

static void setup(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	size_t half = o.size > 64 ? o.size : 64;
	uint8_t *buf = mmap(NULL, 2 * half, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
	struct ibv_mr *mr = !pd || buf == MAP_FAILED ? NULL : ibv_reg_mr(pd, buf, 2 * half, access);
	struct ibv_cq *unused = ibv_create_cq(ctx, 1, NULL, NULL, 0);
	union ibv_gid gid;

	cq = ibv_create_cq(ctx, o.depth * o.qps, NULL, NULL, 0);
	if (!mr || !cq || !unused)
		die("setup");
	if (ibv_query_gid(ctx, 1, o.gid, &gid))
		die("GID");
	for (int i = 0; i < o.qps; i++) {
		struct lane *l = &lanes[i];
		struct ibv_qp_init_attr a = {
			.send_cq = cq, .recv_cq = unused, .qp_type = IBV_QPT_RC,
			.cap = { .max_send_wr = (uint32_t)o.depth, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		};
		struct ibv_qp *far;

		l->qp = ibv_create_qp(pd, &a);
		a.send_cq = unused;
		a.cap.max_send_wr = 1;
		far = l->qp ? ibv_create_qp(pd, &a) : NULL;
		if (!far)
			die("ibv_create_qp");
		to_rts(far, l->qp->qp_num, &gid);
		to_rts(l->qp, far->qp_num, &gid);
		l->free = o.depth;
		l->to_signal = o.cq_mod;
		l->sge = (struct ibv_sge){ .addr = (uintptr_t)buf, .length = o.size, .lkey = mr->lkey };
		for (int k = 0; k < o.list; k++) {
			l->wr[k] = (struct ibv_send_wr){
				.wr_id = (uint64_t)i, .sg_list = &l->sge, .num_sge = 1, .opcode = o.op,
				.next = k + 1 < o.list ? &l->wr[k + 1] : NULL,
			};
			l->wr[k].wr.rdma.remote_addr = (uintptr_t)buf + half;
			l->wr[k].wr.rdma.rkey = mr->rkey;
			if (o.cq_mod <= o.list && (k + 1) % o.cq_mod == 0)
				l->wr[k].send_flags = IBV_SEND_SIGNALED;
		}
	}
}

static long number(const char *s, long min, long max, char opt)
{
	char *end;
	long n = strtol(s, &end, 10);

	if (*s && !*end && n >= min && n <= max)
		return n;
	fprintf(stderr, "barelp: -%c %s: want a number from %ld to %ld\n", opt, s, min, max);
	exit(2);
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	double ns[MAX_RUNS];

	for (int c; (c = getopt(argc, argv, "d:g:s:Q:l:q:t:n:r:o:")) != -1;)
		switch (c) {
		case 'd': o.device = optarg; break;
		case 'g': o.gid = (int)number(optarg, 0, 255, 'g'); break;
		case 's': o.size = (unsigned)number(optarg, 1, 1L << 30, 's'); break;
		case 'Q': o.cq_mod = (int)number(optarg, 1, 1 << 14, 'Q'); break;
		case 'l': o.list = (int)number(optarg, 1, MAX_LIST, 'l'); break;
		case 'q': o.qps = (int)number(optarg, 1, MAX_QPS, 'q'); break;
		case 't': o.depth = (int)number(optarg, 1, 1 << 14, 't'); break;
		case 'n': o.messages = number(optarg, 1, 1L << 40, 'n'); break;
		case 'r': o.runs = (int)number(optarg, 1, MAX_RUNS, 'r'); break;
		case 'o':
			o.op = strcmp(optarg, "read") == 0 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
			if (o.op == IBV_WR_RDMA_READ || strcmp(optarg, "write") == 0)
				break;
			/* fallthrough */
		default:
			fprintf(stderr, "usage: barelp [-d device] [-g gid index] [-o write|read] [-s size] [-Q cq moderation] [-l post list]\n"
					"              [-q qps] [-t depth] [-n messages] [-r runs]\n");
			return 2;
		}
	if (o.depth < o.list || o.depth < o.cq_mod || (o.cq_mod <= o.list ? o.list % o.cq_mod : o.cq_mod % o.list) ||
	    o.messages < 2L * o.depth * o.qps) {
		fprintf(stderr, "barelp: the depth must hold a post list and a moderation, one of these divide the other, "
				"and the messages fill all queues twice\n");
		return 2;
	}
	setup();
	for (int i = 0; i < o.runs; i++)
		ns[i] = run();
	qsort(ns, (size_t)o.runs, sizeof *ns, by_value);
	printf("{\"op\": \"%s\", \"size\": %u, \"cq_mod\": %d, \"post_list\": %d, \"qps\": %d, \"depth\": %d, "
	       "\"messages\": %ld, \"runs\": %d, \"ns_per_message\": %.3f, \"min\": %.3f, \"max\": %.3f}\n",
	       o.op == IBV_WR_RDMA_READ ? "read" : "write", o.size, o.cq_mod, o.list, o.qps, o.depth,
	       o.messages, o.runs, ns[o.runs / 2], ns[0], ns[o.runs - 1]);
	return 0;
}
