/* The buffer of an endpoint: where its pages come from, and its registration. */
#include "rb_memory.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MAP_HUGE_2MB
#define MAP_HUGE_2MB (21 << 26)
#endif

enum { HEADROOM = 64 }; /* a GRH in front of a UD payload takes 40 bytes */
static const size_t huge_page = (size_t)2 << 20;

static int neg_errno(void) { return errno ? -errno : -EIO; }

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

size_t rb_mem_stride(uint64_t msg_max, uint64_t ring, int qps)
{
	size_t half = (size_t)(ring / (uint64_t)qps);

	if (half < msg_max)
		half = (size_t)msg_max;
	return round_up(half + HEADROOM, (size_t)sysconf(_SC_PAGESIZE));
}

size_t rb_mem_bytes(uint64_t msg_max, uint64_t ring, int qps, int huge)
{
	size_t n = rb_mem_stride(msg_max, ring, qps) * 2 * (size_t)qps;

	return huge ? round_up(n, huge_page) : n;
}

/* Prefers a node, and no more: a node that is full is no reason to fail. Without NUMA there is nothing to prefer. */
static void prefer_node(void *at, size_t len, int node)
{
	enum { BITS = 8 * (int)sizeof(unsigned long), NODES = 1024 };
	unsigned long mask[NODES / BITS] = { 0 };

	if (node < 0 || node >= NODES)
		return;
	mask[node / BITS] = 1UL << (node % BITS);
	syscall(SYS_mbind, at, len, MPOL_PREFERRED, mask, (unsigned long)NODES + 1, 0U);
}

/* The node that a page is on, as the kernel tells; -1: it does not. */
static int node_of(void *at)
{
	int node = -1;

	if (syscall(SYS_get_mempolicy, &node, NULL, 0UL, at, (unsigned long)(MPOL_F_NODE | MPOL_F_ADDR)))
		return -1;
	return node;
}

static int map(struct rb_mem *m, size_t len, int flags)
{
	errno = 0;
	m->map = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
	if (m->map == MAP_FAILED) {
		m->map = NULL;
		return neg_errno();
	}
	m->map_len = len;
	return 0;
}

static void unmap(struct rb_mem *m)
{
	if (m->map)
		munmap(m->map, m->map_len);
	m->map = NULL;
}

/* Reserved huge pages. They are asked for page by page by the kernel's own hand, where a shortage is an error: touching one
 * that a cgroup forbids would be a SIGBUS. */
static int map_huge(struct rb_mem *m, size_t len, int node)
{
	int err = map(m, round_up(len, huge_page), MAP_HUGETLB | MAP_HUGE_2MB);

	if (err)
		return err;
	prefer_node(m->map, m->map_len, node);
	if (madvise(m->map, m->map_len, MADV_POPULATE_WRITE)) {
		err = neg_errno();
		unmap(m);
	}
	return err;
}

/* Bytes of a mapping that transparent huge pages back, by /proc/self/smaps. */
static size_t transparent_bytes(const void *at)
{
	FILE *f = fopen("/proc/self/smaps", "re");
	char line[512];
	uintptr_t from, to;
	size_t kib = 0;
	int ours = 0;

	if (!f)
		return 0;
	while (fgets(line, sizeof line, f)) {
		if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &from, &to) == 2)
			ours = from <= (uintptr_t)at && (uintptr_t)at < to;
		else if (ours && sscanf(line, "AnonHugePages: %zu kB", &kib) == 1)
			break;
	}
	fclose(f);
	return kib << 10;
}

static void populate(uint8_t *at, size_t len)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);

	if (madvise(at, len, MADV_POPULATE_WRITE) == 0)
		return;
	for (size_t i = 0; i < len; i += page)
		((volatile uint8_t *)at)[i] = 0;
}

int rb_mem_alloc(struct rb_ep *e)
{
	struct rb_mem *m = &e->mem;
	int err;

	m->node = -1;
	m->gpu_fd = -1;
	e->stride = rb_mem_stride(e->a.msg_max, e->a.ring, e->qps);
	e->buf_len = e->stride * 2 * (size_t)e->qps;
	if (e->a.gpu >= 0) {
		m->kind = RB_MEM_GPU;
		return rb_gpu_alloc(e);
	}
	if (e->a.huge_pages && map_huge(m, e->buf_len, e->a.numa_node) == 0) {
		m->kind = RB_MEM_HUGE;
		e->buf = m->map;
	} else {
		size_t align = e->a.huge_pages ? huge_page : 1;

		m->kind = RB_MEM_PAGES;
		err = map(m, e->a.huge_pages ? round_up(e->buf_len, huge_page) + huge_page : e->buf_len, 0);
		if (err)
			return err;
		e->buf = (uint8_t *)round_up((uintptr_t)m->map, align);
		prefer_node(m->map, m->map_len, e->a.numa_node);
		if (e->a.huge_pages)
			madvise(e->buf, round_up(e->buf_len, huge_page), MADV_HUGEPAGE);
		populate(e->buf, e->buf_len);
		if (e->a.huge_pages && transparent_bytes(e->buf) >= e->buf_len / huge_page * huge_page && e->buf_len >= huge_page)
			m->kind = RB_MEM_TRANSPARENT;
	}
	m->node = node_of(e->buf);
	return 0;
}

int rb_mem_register(struct rb_ep *e, unsigned access)
{
	unsigned relaxed = e->a.relaxed ? IBV_ACCESS_RELAXED_ORDERING : 0;

	for (;;) {
		errno = 0;
		e->mr = e->mem.kind == RB_MEM_GPU ? rb_gpu_register(e, access | relaxed) :
						    ibv_reg_mr(e->pd, e->buf, e->buf_len, access | relaxed);
		if (e->mr || !relaxed)
			break;
		/* A device that refuses it is used without. What lacks memory will lack it again, and says so then. */
		relaxed = 0;
	}
	e->mem.relaxed = e->mr && relaxed;
	return e->mr ? 0 : neg_errno();
}

void rb_mem_free(struct rb_ep *e)
{
	if (e->mem.kind == RB_MEM_GPU)
		rb_gpu_free(e);
	unmap(&e->mem);
	e->buf = NULL;
}

#ifndef RB_DMABUF
int rb_gpu_alloc(struct rb_ep *e)
{
	(void)e;
	return -ENOSYS;
}

struct ibv_mr *rb_gpu_register(struct rb_ep *e, unsigned access)
{
	(void)e;
	(void)access;
	errno = ENOSYS;
	return NULL;
}

void rb_gpu_free(struct rb_ep *e) { (void)e; }
#endif
