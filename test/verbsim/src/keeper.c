/* The keeper: a thread whose robust futex says that the process lives. It also runs the work requests that wait while the
 * program looks elsewhere (at memory, at a completion channel). */
#include "verbsim.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t ready_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ready = PTHREAD_COND_INITIALIZER;
static uint32_t calls;        /* a futex: changes when the keeper must look anew */
static uint64_t sleeps_until; /* until then; 0: it is awake */

static void keep(void)
{
	enum { JITTER_NS = 50000 };

	for (;;) {
		uint32_t seen = load(&calls), progressed;
		uint64_t next = UINT64_MAX;
		struct timespec t;

		if (load(&waiters)) {
			next = progress();
			if (next > now_ns() + RETRY_NS)
				next = now_ns() + RETRY_NS;
		}
		/* Sleeps to within a wake-up's jitter of the time, then spins, unless the program itself looks after it. */
		if (next > now_ns() + JITTER_NS) {
			next -= next == UINT64_MAX ? 0 : JITTER_NS;
			t = (struct timespec){ .tv_sec = (time_t)(next / 1000000000), .tv_nsec = (long)(next % 1000000000) };
			__atomic_store_n(&sleeps_until, next, __ATOMIC_SEQ_CST);
			if (next < UINT64_MAX || !__atomic_load_n(&waiters, __ATOMIC_SEQ_CST))
				syscall(SYS_futex, &calls, FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG, seen, next < UINT64_MAX ? &t : NULL, NULL,
					FUTEX_BITSET_MATCH_ANY);
			store(&sleeps_until, 0);
			continue;
		}
		for (progressed = peek(&progress_count); now_ns() < next && peek(&progress_count) == progressed;)
			cpu_relax();
	}
}

void keeper_wake(uint64_t at)
{
	uint64_t sleeps = __atomic_load_n(&sleeps_until, __ATOMIC_SEQ_CST);

	if (sleeps && sleeps <= at)
		return;
	__atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST); /* if it is about to sleep, it won't */
	if (sleeps)
		syscall(SYS_futex, &calls, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void *run(void *arg)
{
	static struct robust_list_head list;

	(void)arg;
	prctl(PR_SET_NAME, "verbsim");
	prctl(PR_SET_TIMERSLACK, 1);
	/* Takes the place of glibc's list: this thread uses no robust mutex. */
	home->robust.next = &list.list;
	list.list.next = &home->robust;
	list.futex_offset = (long)offsetof(struct home, life) - (long)offsetof(struct home, robust);
	store(&home->life, (uint32_t)gettid());
	syscall(SYS_set_robust_list, &list, sizeof list);
	pthread_mutex_lock(&ready_lock);
	store(&home->magic, MAGIC);
	pthread_cond_signal(&ready);
	pthread_mutex_unlock(&ready_lock);
	keep();
	return NULL;
}

int keeper_start(void)
{
	sigset_t all, old;
	pthread_t t;
	pthread_attr_t a;
	int err;

	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &old);
	pthread_attr_init(&a);
	pthread_attr_setdetachstate(&a, PTHREAD_CREATE_DETACHED);
	err = pthread_create(&t, &a, run, NULL);
	pthread_attr_destroy(&a);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	pthread_mutex_lock(&ready_lock);
	while (!err && home->magic != MAGIC)
		pthread_cond_wait(&ready, &ready_lock);
	pthread_mutex_unlock(&ready_lock);
	return err;
}

void keeper_after_fork(void)
{
	sleeps_until = 0;
	pthread_mutex_init(&ready_lock, NULL);
	pthread_cond_init(&ready, NULL);
}
