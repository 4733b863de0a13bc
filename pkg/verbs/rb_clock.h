/* Clocks of the data path. Deadlines use CLOCK_MONOTONIC; samples use ticks, which are TSC cycles where the
 * kernel itself keeps time by the TSC (it does so only while that is invariant and in step on all CPUs: Intel SDM vol. 3,
 * 17.17.1), and CLOCK_MONOTONIC_RAW nanoseconds elsewhere. */
#ifndef RB_CLOCK_H
#define RB_CLOCK_H

#include <stdint.h>
#include <time.h>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

extern int rb_clock_tsc;

static inline uint64_t rb_clock_ns(clockid_t id)
{
	struct timespec t;

	clock_gettime(id, &t);
	return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

static inline uint64_t rb_now_ns(void) { return rb_clock_ns(CLOCK_MONOTONIC); }

static inline uint64_t rb_ticks(void)
{
#if defined(__x86_64__)
	if (__builtin_expect(rb_clock_tsc, 1))
		return __rdtsc();
#endif
	return rb_clock_ns(CLOCK_MONOTONIC_RAW);
}

static inline void rb_relax(void)
{
#if defined(__x86_64__)
	_mm_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

#endif
