/* The buffer of an endpoint. rb_memory.c has pages of this host, rb_gpu.c those of a GPU. */
#ifndef RB_MEMORY_H
#define RB_MEMORY_H

#include "rb.h"

/* Sets e->buf, buf_len, stride and mem by e->a. */
int rb_mem_alloc(struct rb_ep *e);
/* Sets e->mr, with relaxed ordering if it is wanted and the device does not refuse it. */
int rb_mem_register(struct rb_ep *e, unsigned access);
/* Safe after a failure of the others. The MR must be gone. */
void rb_mem_free(struct rb_ep *e);

int rb_gpu_alloc(struct rb_ep *e);
struct ibv_mr *rb_gpu_register(struct rb_ep *e, unsigned access);
void rb_gpu_free(struct rb_ep *e);

static inline struct rb_ring rb_ring_of(const struct rb_ep *e, uint64_t size)
{
	uint64_t half = e->c.stride && e->c.stride < e->stride ? e->c.stride : e->stride;
	uint64_t unit = size >= 4096 ? 4096 : 64, grh = e->a.transport == RB_UD ? 40 : 0;
	uint64_t step = (size + grh + unit - 1) / unit * unit;
	uint64_t room = e->a.msg_max + 64; /* a receive may take as much */

	if (!e->a.ring || half < room)
		return (struct rb_ring){ .step = step, .slots = 1 };
	return (struct rb_ring){ .step = step, .slots = (half - room) / step + 1 };
}

/* Places n linked work requests in the slots from `slot` on; remote 0: they name no remote address. */
static inline void rb_ring_place(const struct rb_ring *g, uint64_t slot, struct ibv_send_wr *wr, int n, uint64_t local, uint64_t remote)
{
	for (int i = 0; i < n; i++) {
		wr[i].sg_list->addr = local + slot * g->step;
		if (remote)
			wr[i].wr.rdma.remote_addr = remote + slot * g->step; /* where an atomic has it, too */
		slot = slot + 1 < g->slots ? slot + 1 : 0;
	}
}

#endif
