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
	uint64_t slots;

	if (!e->a.ring || half < room)
		return (struct rb_ring){ .step = step, .slots = 1 };
	slots = (half - room) / step + 1;
	return (struct rb_ring){ .step = step, .slots = e->a.slots && e->a.slots < slots ? e->a.slots : slots };
}

#endif
