#include "rb.h"
#include "rb_clock.h"

int rb_clock_tsc;
static uint64_t base_ticks, base_ns;

/* One (ticks, raw ns) pair, the tightest of a few so that a preemption between the two reads is not taken for drift. */
static void read_pair(uint64_t *ticks, uint64_t *ns)
{
	uint64_t best = UINT64_MAX;

	for (int i = 0; i < 8; i++) {
		uint64_t a = rb_ticks(), n = rb_clock_ns(CLOCK_MONOTONIC_RAW), b = rb_ticks();

		if (b - a < best) {
			best = b - a;
			*ticks = a + (b - a) / 2;
			*ns = n;
		}
	}
}

void rb_clock_init(int use_tsc)
{
	rb_clock_tsc = use_tsc;
	read_pair(&base_ticks, &base_ns);
}

/* Measured over the time since rb_clock_init: no calibration wait, and the longer the process lives the finer. */
double rb_clock_ns_per_tick(void)
{
	uint64_t t, n;

	if (!rb_clock_tsc)
		return 1;
	read_pair(&t, &n);
	while (n - base_ns < 2000000) /* 2 ms: a pair is good to about 50 ns */
		read_pair(&t, &n);
	return (double)(n - base_ns) / (double)(t - base_ticks);
}

double rb_clock_residual(void)
{
	static _Atomic uint64_t first_ticks, first_ns; /* 0: none yet */
	uint64_t t, n, ft = atomic_load(&first_ticks), fn = atomic_load(&first_ns);
	double first, all;

	if (!rb_clock_tsc)
		return 0;
	read_pair(&t, &n);
	if (n - base_ns < 1000000000)
		return 0;
	if (!ft || !fn) {
		atomic_store(&first_ns, n);
		atomic_store(&first_ticks, t);
		return 0;
	}
	first = (double)(fn - base_ns) / (double)(ft - base_ticks);
	all = (double)(n - base_ns) / (double)(t - base_ticks);
	return all > first ? all / first - 1 : first / all - 1;
}
