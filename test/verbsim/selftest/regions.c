#include "selftest.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, BIG = 1 << 20 };

static uint8_t *pages(size_t n, int prot, int flags)
{
	uint8_t *p = mmap(NULL, n, prot, flags | MAP_ANONYMOUS, -1, 0);

	MUST(p != MAP_FAILED);
	return p;
}

/* Pages that are still shared after all regions are gone would leak, and be written by children. */
static int shared_pages(void)
{
	FILE *f = fopen("/proc/self/maps", "re");
	char line[400];
	int n = 0;

	while (f && fgets(line, sizeof line, f))
		n += strstr(line, ".mem") != NULL;
	if (f)
		fclose(f);
	return n - 1; /* the home itself */
}

static void content_is_kept(void)
{
	struct end e;
	uint8_t *m = pages(BIG, PROT_READ | PROT_WRITE, MAP_PRIVATE), *copy = malloc(BIG), *heap, *heap2;
	struct ibv_mr *mr[6];

	end_make(&e, (struct spec){ 0 });
	for (int i = 0; i < BIG; i++)
		m[i] = copy[i] = (uint8_t)(i * 31);
	/* Overlapping, adjacent, within one page. */
	MUST(mr[0] = ibv_reg_mr(e.pd, m + 100, 300000, ACCESS));
	MUST(mr[1] = ibv_reg_mr(e.pd, m + 200000, 500000, ACCESS));
	MUST(mr[2] = ibv_reg_mr(e.pd, m + 5000, 10, IBV_ACCESS_REMOTE_READ));
	MUST(mr[3] = ibv_reg_mr(e.pd, m, BIG, ACCESS));
	heap = malloc(3000);
	heap2 = malloc(3000);
	memset(heap, 3, 3000);
	memset(heap2, 4, 3000);
	MUST(mr[4] = ibv_reg_mr(e.pd, heap, 3000, ACCESS));
	MUST(mr[5] = ibv_reg_mr(e.pd, heap2, 3000, ACCESS));
	CHECK(memcmp(m, copy, BIG) == 0 && heap[2999] == 3 && heap2[0] == 4);
	m[7] = copy[7] = 99;
	CHECK(ibv_dereg_mr(mr[3]) == 0 && memcmp(m, copy, BIG) == 0);
	CHECK(ibv_dereg_mr(mr[1]) == 0 && memcmp(m, copy, BIG) == 0);
	munmap(m + 8192, PAGE); /* the program may, before it deregisters; and map something else */
	CHECK(ibv_dereg_mr(mr[0]) == 0 && ibv_dereg_mr(mr[2]) == 0);
	CHECK(memcmp(m, copy, 8192) == 0 && memcmp(m + 12288, copy + 12288, BIG - 12288) == 0);
	CHECK(ibv_dereg_mr(mr[4]) == 0 && heap2[5] == 4);
	CHECK(ibv_dereg_mr(mr[5]) == 0 && heap[0] == 3 && heap2[2999] == 4);
	free(heap);
	free(heap2);
	free(copy);
	munmap(m, BIG);
	end_free(&e);
	CHECK(shared_pages() == 0);
}

static void what_cannot_be_registered(void)
{
	struct end e;
	uint8_t stack[64], *shared = pages(8192, PROT_READ | PROT_WRITE, MAP_SHARED), *none_ = pages(8192, PROT_NONE, MAP_PRIVATE);
	uint8_t *half = pages(8192, PROT_READ | PROT_WRITE, MAP_PRIVATE), *ro = pages(PAGE, PROT_READ, MAP_PRIVATE);
	struct ibv_mr *mr;

	end_make(&e, (struct spec){ 0 });
	fprintf(stderr, "(some refusals follow)\n");
	CHECK(!ibv_reg_mr(e.pd, stack, sizeof stack, ACCESS) && errno == EFAULT);
	CHECK(!ibv_reg_mr(e.pd, shared, 8192, ACCESS) && errno == EFAULT);
	CHECK(!ibv_reg_mr(e.pd, none_, 8192, ACCESS) && errno == EFAULT);
	CHECK(!ibv_reg_mr(e.pd, (void *)(uintptr_t)PAGE, 64, ACCESS) && errno == EFAULT);
	munmap(half + PAGE, PAGE);
	half[0] = 5;
	CHECK(!ibv_reg_mr(e.pd, half, 8192, ACCESS) && errno == EFAULT && half[0] == 5);
	CHECK(!ibv_reg_mr(e.pd, half, 0, ACCESS) && errno == EINVAL);
	CHECK(!ibv_reg_mr(e.pd, half, 64, IBV_ACCESS_REMOTE_WRITE) && errno == EINVAL);
	CHECK(!ibv_reg_mr(e.pd, half, 64, IBV_ACCESS_MW_BIND) && errno == EINVAL);
	MUST(mr = ibv_reg_mr(e.pd, ro, PAGE, IBV_ACCESS_REMOTE_READ));
	CHECK(ibv_dereg_mr(mr) == 0);
	MUST(mr = ibv_reg_mr(e.pd, half, 64, ACCESS | IBV_ACCESS_RELAXED_ORDERING)); /* an optional flag */
	CHECK(ibv_dealloc_pd(e.pd) == EBUSY && ibv_dereg_mr(mr) == 0);
	munmap(half, PAGE);
	munmap(none_, 8192);
	munmap(shared, 8192);
	munmap(ro, PAGE);
	end_free(&e);
}

static void keys(void)
{
	struct end a, b;
	struct ibv_wc wc;
	uint32_t last = 0;

	pair_make(&a, &b, (struct spec){ 0 }, (struct way){ 0 });
	/* An address of the region's own, as dma-buf users have it. */
	uint8_t *m = pages(PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
	struct ibv_mr *mr = ibv_reg_mr_iova2(b.pd, m + 8, 100, 0x1000, ACCESS);
	MUST(mr);
	memcpy(a.buf, "iova", 4);
	CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 4, .remote = 0x1004, .rkey = mr->rkey)) == 0);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && memcmp(m + 12, "iova", 4) == 0);
	ibv_dereg_mr(mr);
	/* The same memory again and again: each time another key, and what is written arrives. */
	for (int i = 0; i < 3000; i++) {
		MUST(mr = ibv_reg_mr(b.pd, m, 64, ACCESS));
		CHECK(mr->rkey != last);
		last = mr->rkey;
		a.buf[0] = (uint8_t)i;
		CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1, .remote = (uintptr_t)m, .rkey = mr->rkey)) == 0);
		CHECK(wait_wc(a.scq, &wc) == IBV_WC_SUCCESS && m[0] == (uint8_t)i);
		CHECK(ibv_dereg_mr(mr) == 0);
	}
	CHECK(post(&a, REQ(IBV_WR_RDMA_WRITE, a.buf, 1, .remote = (uintptr_t)m, .rkey = last)) == 0);
	CHECK(wait_wc(a.scq, &wc) == IBV_WC_REM_ACCESS_ERR);
	munmap(m, PAGE);
	pair_free(&a, &b);
}

const struct test memory_tests[] = {
	{ "memory: content is kept", content_is_kept, { 0 } },
	{ "memory: what can't be registered", what_cannot_be_registered, { 0 } },
	{ "memory: keys", keys, { 0 } },
	{ 0 },
};
