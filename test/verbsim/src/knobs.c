#include "verbsim.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct knobs knobs;

void say(const char *format, ...)
{
	char line[512];
	va_list a;

	va_start(a, format);
	vsnprintf(line, sizeof line, format, a);
	va_end(a);
	fprintf(stderr, "verbsim: %s\n", line); /* one write: lines of several processes don't mix */
}

uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static int refuse(const char *name, const char *value, const char *wanted)
{
	say("%s=%s: want %s", name, value, wanted);
	return EINVAL;
}

static int number(const char *name, uint64_t max, uint64_t *out)
{
	const char *v = getenv(name);
	char *end;

	*out = 0;
	if (!v || !*v)
		return 0;
	errno = 0;
	*out = strtoull(v, &end, 10);
	if (*end || errno || *v == '-' || *out > max)
		return refuse(name, v, "a whole number");
	return 0;
}

static int flag(const char *name, bool *out)
{
	uint64_t n;
	int err = number(name, 1, &n);

	*out = n != 0;
	return err;
}

static int every(const char *name, uint32_t *out)
{
	uint64_t n;
	int err = number(name, UINT32_MAX, &n);

	*out = (uint32_t)n;
	return err;
}

/* A count, or names: sim0,sim3. */
static int devices(void)
{
	const char *v = getenv("VERBSIM_DEVICES");
	static const char wanted[] = "a count from 1 to 64, or names such as sim0,sim3 (numbers to 63)";
	char *end;

	knobs.devices = 0;
	if (!v || !*v)
		v = "1";
	if (strncmp(v, "sim", 3) != 0) {
		unsigned long n = strtoul(v, &end, 10);

		if (*end || n < 1 || n > MAX_DEVICE)
			return refuse("VERBSIM_DEVICES", v, wanted);
		for (unsigned i = 0; i < n; i++)
			knobs.device[knobs.devices++] = (int)i;
		return 0;
	}
	for (const char *p = v;; p = end + 1) {
		unsigned long n;

		if (strncmp(p, "sim", 3) != 0 || p[3] < '0' || p[3] > '9')
			return refuse("VERBSIM_DEVICES", v, wanted);
		n = strtoul(p + 3, &end, 10);
		if (n >= MAX_DEVICE || knobs.devices == MAX_DEVICE || (*end && *end != ','))
			return refuse("VERBSIM_DEVICES", v, wanted);
		knobs.device[knobs.devices++] = (int)n;
		if (!*end)
			return 0;
	}
}

int knobs_load(void)
{
	const char *mode = getenv("VERBSIM"), *gbps = getenv("VERBSIM_GBPS");
	char *end;

	if (mode && *mode && strcmp(mode, "null") != 0 && strcmp(mode, "shm") != 0)
		return refuse("VERBSIM", mode, "null or shm");
	knobs.null_mode = mode && strcmp(mode, "null") == 0;
	knobs.gbps = 0;
	if (gbps && *gbps) {
		knobs.gbps = strtod(gbps, &end);
		if (*end || !(knobs.gbps > 0) || knobs.gbps > 1e6)
			return refuse("VERBSIM_GBPS", gbps, "a number of Gbit/s above 0");
	}
	if (devices() || number("VERBSIM_DELAY_NS", 60000000000, &knobs.delay_ns) ||
	    every("VERBSIM_ERROR_EVERY", &knobs.error_every) || every("VERBSIM_DROP_EVERY", &knobs.drop_every) ||
	    every("VERBSIM_ENOMEM_EVERY", &knobs.enomem_every) ||
	    flag("VERBSIM_SHORT_POLL", &knobs.short_poll) || flag("VERBSIM_NO_RC", &knobs.no_rc))
		return EINVAL;
	return 0;
}
