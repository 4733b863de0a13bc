/* Where an endpoint's memory comes from, how it is registered, and how messages walk through a ring of it. Built and run by
 * TestMemory under the sanitizers. */
#include "../rb_memory.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef ibv_reg_mr

static int failures;

static void expect(int ok, const char *what, const char *why)
{
	if (ok)
		return;
	printf("%s: %s\n", what, why);
	failures++;
}

/* The device: what it was asked for, and what it refuses. */
static struct {
	unsigned refused, access;
	int err, calls;
} dev;
static struct ibv_mr mr;

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	(void)pd;
	(void)addr;
	(void)length;
	(void)iova;
	dev.calls++;
	dev.access = access;
	if (dev.err || (access & dev.refused)) {
		errno = dev.err ? dev.err : EOPNOTSUPP;
		return NULL;
	}
	return &mr;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, (unsigned)access);
}

static struct rb_ep endpoint(uint64_t msg_max, uint64_t ring, int qps)
{
	return (struct rb_ep){ .qps = qps, .a = { .msg_max = msg_max, .ring = ring, .qps = qps, .numa_node = -1, .gpu = -1 } };
}

static void pages(const char *what, uint64_t msg_max, uint64_t ring, int qps, int huge, int node)
{
	struct rb_ep e = endpoint(msg_max, ring, qps);
	int err;

	e.a.huge_pages = huge;
	e.a.numa_node = node;
	err = rb_mem_alloc(&e);
	expect(err == 0, what, "no memory");
	if (err)
		return;
	expect((uintptr_t)e.buf % 4096 == 0, what, "not aligned to a page");
	expect(e.stride >= msg_max + 64 && e.stride % 4096 == 0, what, "a half has no room for a message and a GRH");
	expect(e.stride * (uint64_t)qps >= ring, what, "the ring is short");
	expect(e.buf_len <= rb_mem_bytes(msg_max, ring, qps, huge), what, "more than what is accounted for");
	expect(huge || e.mem.kind == RB_MEM_PAGES, what, "huge pages that nobody asked for");
	memset(e.buf, 0xa5, e.buf_len); /* a fault here is the test's end */
	printf("%s: kind %d, node %d, %zu bytes\n", what, e.mem.kind, e.mem.node, e.buf_len);
	rb_mem_free(&e);
}

static void registered(const char *what, int wanted, unsigned refused, int errno_of_all, int want_err, int want_relaxed)
{
	struct rb_ep e = endpoint(64, 0, 1);
	int err;

	memset(&dev, 0, sizeof dev);
	dev.refused = refused;
	dev.err = errno_of_all;
	e.a.relaxed = wanted;
	err = rb_mem_register(&e, IBV_ACCESS_LOCAL_WRITE);
	expect(err == want_err, what, "wrong error");
	expect(e.mem.relaxed == want_relaxed, what, "says the wrong thing of relaxed ordering");
	expect((e.mr != NULL) == (want_err == 0), what, "an MR where there is none, or the reverse");
	expect(err || !!(dev.access & IBV_ACCESS_RELAXED_ORDERING) == want_relaxed, what, "registered otherwise than it says");
	expect(dev.access & IBV_ACCESS_LOCAL_WRITE, what, "lost a right on the way");
}

static void ring(const char *what, uint64_t own, uint64_t theirs, uint64_t msg_max, uint64_t size, uint64_t want_step, uint64_t want_slots)
{
	struct rb_ep e = { .stride = own, .a = { .msg_max = msg_max, .ring = own }, .c = { .stride = theirs } };
	struct rb_ring g = rb_ring_of(&e, size);
	uint64_t half = theirs && theirs < own ? theirs : own;

	expect(g.step == want_step, what, "wrong step");
	expect(g.slots == want_slots, what, "wrong number of slots");
	expect((g.slots - 1) * g.step + msg_max + 40 <= half, what, "beyond the half");
}

int main(void)
{
	pages("ordinary pages", 1, 0, 1, 0, -1);
	pages("many QPs", 65536, 0, 16, 0, -1);
	pages("this node's memory", 65536, 0, 1, 0, 0);
	pages("a node that is not there", 65536, 0, 1, 0, 1000);
	pages("a ring", 4096, 8 << 20, 3, 0, 0);
	pages("huge pages, small", 64, 0, 1, 1, 0);
	pages("huge pages, a ring", 65536, 16 << 20, 2, 1, 0);

	registered("strict", 0, 0, 0, 0, 0);
	registered("relaxed", 1, 0, 0, 0, 1);
	registered("relaxed, refused", 1, IBV_ACCESS_RELAXED_ORDERING, 0, 0, 0);
	registered("no memory", 1, 0, ENOMEM, -ENOMEM, 0);

	ring("small messages", 65536, 65536, 64, 8, 64, (65536 - 128) / 64 + 1);
	ring("odd size", 1 << 20, 0, 5000, 5000, 8192, ((1 << 20) - 5064) / 8192 + 1);
	ring("a peer with less", 1 << 20, 16384, 4096, 4096, 4096, (16384 - 4160) / 4096 + 1);
	ring("a peer without a ring", 1 << 20, 8192, 4096, 4096, 4096, 1);
	ring("one size of a sweep", 1 << 20, 1 << 20, 65536, 64, 64, ((1 << 20) - 65600) / 64 + 1);
	{
		struct rb_ep e = { .stride = 1 << 20, .a = { .msg_max = 64, .gpu = -1 } };

		expect(rb_ring_of(&e, 64).slots == 1, "no ring", "walks all the same");
	}
	return failures != 0;
}
