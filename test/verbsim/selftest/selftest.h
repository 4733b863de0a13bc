/* What the cases share: ends of connections, work requests in one line, a second process. */
#ifndef SELFTEST_H
#define SELFTEST_H

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

enum {
	ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
	QKEY = 0x1111,
};

extern int failures;
#define CHECK(ok) \
	do { \
		if (!(ok)) { \
			failures++; \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #ok); \
		} \
	} while (0)
/* For what the rest of a case stands on. */
#define MUST(ok) \
	do { \
		if (!(ok)) \
			fatal(__FILE__, __LINE__, #ok); \
	} while (0)
void fatal(const char *file, int line, const char *what) __attribute__((noreturn));

/* One end: everything of its own, and 64 KiB registered. */
enum { BUF = 65536 };
struct end {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *scq, *rcq;
	struct ibv_qp *qp;
	uint8_t *buf;
	struct ibv_mr *mr;
};

/* What an end is made of; zero fields get the defaults in brackets. */
struct spec {
	enum ibv_qp_type type; /* [RC] */
	int depth;             /* of both queues [16] */
	int cqe;               /* of both CQs [2 * depth] */
	int sges;              /* [4] */
	int inline_max;        /* [64] */
	int device;            /* index in the list [0] */
	bool events, signal_all;
};

/* How a QP goes to RTS. */
struct way {
	uint32_t qpn;
	union ibv_gid gid;
	uint32_t psn, peer_psn;
	int mtu;      /* [IBV_MTU_1024] */
	int timeout;  /* -1: for ever [8, 1 ms] */
	int rnr_retry; /* [7, for ever] */
	int access;   /* [ACCESS without LOCAL_WRITE] */
	int rd_atomic; /* -1: none [4] */
};

void end_make(struct end *e, struct spec s);
void end_free(struct end *e);
int qp_up(struct ibv_qp *qp, struct way w); /* to RTS; 0 or the errno */
int qp_to(struct ibv_qp *qp, enum ibv_qp_state s);
enum ibv_qp_state qp_state(struct ibv_qp *qp);
union ibv_gid gid_of(struct end *e);
/* Both in this process, connected both ways. */
void pair_make(struct end *a, struct end *b, struct spec s, struct way w);
void pair_free(struct end *a, struct end *b);

/* A work request of up to one SGE. */
struct req {
	enum ibv_wr_opcode op;
	void *at;
	uint32_t len, lkey;
	uint64_t remote;
	uint32_t rkey;
	unsigned flags; /* send_flags, or UNSIGNALED */
	uint64_t id, add, swap;
	uint32_t imm;
	struct ibv_ah *ah;
	uint32_t qpn, qkey;
};
enum { UNSIGNALED = 1 << 20 };
#define REQ(op_, at_, len_, ...) ((struct req){ .op = (op_), .at = (at_), .len = (len_), __VA_ARGS__ })
#define AT(end_, offset) .remote = (uintptr_t)(end_).buf + (offset), .rkey = (end_).mr->rkey
int post(struct end *e, struct req r);
int post_recv(struct end *e, void *at, uint32_t len, uint64_t id);
int wait_wc(struct ibv_cq *cq, struct ibv_wc *wc); /* its status; -1: none came, -2: the CQ is broken */
int none(struct ibv_cq *cq);                       /* nothing is there */

double seconds(void);

/* A second process. */
struct remote { /* what the ends tell each other */
	uint32_t qpn, rkey;
	uint64_t addr;
	union ibv_gid gid;
};
struct other {
	pid_t pid;
	int fd;
};
/* Runs child(fd, arg) in it. */
struct other other_start(void (*child)(int fd, const void *arg), const void *arg);
void other_end(struct other o); /* waits; a failure of it is one of ours */
void tell(int fd, const void *p, size_t n);
void hear(int fd, void *p, size_t n);
/* Exchanges and connects. */
struct remote meet(int fd, struct end *e, struct way w);

/* A case runs in a process of its own, with NAME=VALUE pairs (up to three) in its environment. */
struct test {
	const char *name;
	void (*run)(void);
	const char *env[3];
};
extern const struct test rc_tests[], ud_tests[], memory_tests[], process_tests[], knob_tests[]; /* end with a null name */

#endif
