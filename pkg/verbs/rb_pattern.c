#include "rb_run.h"

#include <string.h>

/* Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), the finalizer of SplitMix64. */
static inline uint64_t mix(uint64_t x)
{
	x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
	return x ^ (x >> 31);
}

static inline uint64_t word(uint64_t seed, uint64_t i) { return mix(seed + i * UINT64_C(0x9e3779b97f4a7c15)); }

static inline uint64_t seed_of(int qp, uint64_t message) { return mix(message ^ ((uint64_t)(qp + 1) << 48)); }

void rb_pattern_fill(uint8_t *p, uint64_t size, int qp, uint64_t message)
{
	uint64_t seed = seed_of(qp, message), i = 8, w;

	memcpy(p, &message, 8);
	for (; i + 8 <= size; i += 8) {
		w = word(seed, i);
		memcpy(p + i, &w, 8);
	}
	w = word(seed, i);
	memcpy(p + i, &w, size - i);
}

int rb_pattern_check(const uint8_t *p, uint64_t size, uint64_t except, int qp, uint64_t message, struct rb_run *r)
{
	uint64_t seed = seed_of(qp, message), got;

	r->verified++;
	for (uint64_t i = 0; i + except < size; i += 8) {
		uint64_t want = i ? word(seed, i) : message, n = size - except - i < 8 ? size - except - i : 8;

		got = 0;
		memcpy(&got, p + i, n);
		if (n < 8)
			want &= (UINT64_C(1) << (8 * n)) - 1;
		if (__builtin_expect(got != want, 0)) {
			rb_corrupt(r, qp, message, i, want, got);
			return 1;
		}
	}
	return 0;
}

void rb_verify_slots(struct rb_ep *e, struct rb_run *r)
{
	for (int q = 0; q < e->qps; q++)
		for (uint64_t s = 0; s < e->ring.slots; s++) {
			const uint8_t *p = rb_written_buf(e, q, s);
			uint64_t message;

			memcpy(&message, p, 8);
			if (message == UINT64_MAX) /* as rb_arm left it */
				continue;
			if (message % e->ring.slots != s)
				rb_corrupt(r, q, message, 0, s, message % e->ring.slots);
			else
				rb_pattern_check(p, r->size, 0, q, message, r);
			if (r->end == RB_END_CORRUPT)
				return;
		}
}
