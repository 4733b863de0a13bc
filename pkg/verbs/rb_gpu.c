//go:build dmabuf

/* Memory of an NVIDIA GPU, registered by dma-buf. libcuda is loaded when it is first asked for, so that one binary serves
 * nodes with and without. Needs CUDA 11.7, a GPU that exports dma-bufs, and Linux 5.12. */
#include "rb_memory.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

/* What is used of cuda.h, whose ABI is fixed. */
typedef int cu_result;
typedef unsigned long long cu_deviceptr;
enum { CU_OK = 0, CU_OUT_OF_MEMORY = 2, CU_NO_DEVICE = 100, CU_INVALID_DEVICE = 101, CU_RANGE_DMA_BUF_FD = 1 };

static struct {
	cu_result (*init)(unsigned);
	cu_result (*device_get)(int *, int);
	cu_result (*ctx_retain)(void **, int);
	cu_result (*ctx_release)(int);
	cu_result (*ctx_push)(void *);
	cu_result (*ctx_pop)(void **);
	cu_result (*mem_alloc)(cu_deviceptr *, size_t);
	cu_result (*mem_free)(cu_deviceptr);
	cu_result (*handle_for_range)(void *, cu_deviceptr, size_t, int, unsigned long long);
} cu;

static int loaded; /* 0, or -errno */

static void load(void)
{
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	const struct {
		void *into;
		const char *name;
	} want[] = {
		{ &cu.init, "cuInit" }, { &cu.device_get, "cuDeviceGet" }, { &cu.ctx_retain, "cuDevicePrimaryCtxRetain" },
		{ &cu.ctx_release, "cuDevicePrimaryCtxRelease_v2" }, { &cu.ctx_push, "cuCtxPushCurrent_v2" },
		{ &cu.ctx_pop, "cuCtxPopCurrent_v2" }, { &cu.mem_alloc, "cuMemAlloc_v2" }, { &cu.mem_free, "cuMemFree_v2" },
		{ &cu.handle_for_range, "cuMemGetHandleForAddressRange" },
	};

	loaded = -ENOSYS;
	if (!lib)
		return;
	for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
		*(void **)want[i].into = dlsym(lib, want[i].name);
		if (!*(void **)want[i].into) {
			dlclose(lib);
			return;
		}
	}
	loaded = cu.init(0) == CU_OK ? 0 : -ENODEV;
}

static int cu_errno(cu_result r)
{
	switch (r) {
	case CU_OK: return 0;
	case CU_OUT_OF_MEMORY: return -ENOMEM;
	case CU_NO_DEVICE:
	case CU_INVALID_DEVICE: return -ENODEV;
	default: return -EIO;
	}
}

/* Every call works on the calling thread's current context: it is set for just that call. */
int rb_gpu_alloc(struct rb_ep *e)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	struct rb_mem *m = &e->mem;
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	void *old;
	int err;

	pthread_once(&once, load);
	if (loaded)
		return loaded;
	err = cu_errno(cu.device_get(&m->gpu_device, e->a.gpu));
	if (err)
		return err;
	err = cu_errno(cu.ctx_retain(&m->gpu_ctx, m->gpu_device));
	if (err)
		return err;
	err = cu_errno(cu.ctx_push(m->gpu_ctx));
	if (err)
		return err;
	/* An allocation of CUDA's is aligned to 256 bytes, a dma-buf's range must be to pages. */
	err = cu_errno(cu.mem_alloc(&m->gpu_mem, e->buf_len + page));
	if (!err) {
		e->buf = (uint8_t *)(uintptr_t)((m->gpu_mem + page - 1) / page * page);
		err = cu_errno(cu.handle_for_range(&m->gpu_fd, (uintptr_t)e->buf, e->buf_len, CU_RANGE_DMA_BUF_FD, 0));
		if (err == -EIO)
			err = -EOPNOTSUPP;
	}
	cu.ctx_pop(&old);
	return err;
}

struct ibv_mr *rb_gpu_register(struct rb_ep *e, unsigned access)
{
	return ibv_reg_dmabuf_mr(e->pd, 0, e->buf_len, (uintptr_t)e->buf, e->mem.gpu_fd, (int)access);
}

void rb_gpu_free(struct rb_ep *e)
{
	struct rb_mem *m = &e->mem;
	void *old;

	if (m->gpu_fd >= 0)
		close(m->gpu_fd);
	if (m->gpu_mem && cu.ctx_push(m->gpu_ctx) == CU_OK) {
		cu.mem_free(m->gpu_mem);
		cu.ctx_pop(&old);
	}
	if (m->gpu_ctx)
		cu.ctx_release(m->gpu_device);
}
