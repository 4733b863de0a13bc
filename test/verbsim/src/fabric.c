/* Homes: making ours, finding those of peers, telling the living from the dead. */
#include "verbsim.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct home *home;
int home_fd = -1;

static char dir[200];
static pthread_mutex_t start_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t peer_lock = PTHREAD_MUTEX_INITIALIZER;
static struct peer *peers[MAX_SLOT];

/* ---- locks ---- */

void local_lock_slow(uint32_t *l)
{
	for (unsigned i = 1; peek(l) || !local_trylock(l); i++) {
		if (i % 128)
			cpu_relax();
		else
			sched_yield(); /* its holder may have been preempted */
	}
}

static bool slot_dead(uint32_t slot);

enum { LOCKER_SHIFT = 10 };
_Static_assert(MAX_SLOT <= 1 << LOCKER_SHIFT, "a slot fits below the process id in struct home's locker");

static uint32_t locker(uint32_t slot) { return (uint32_t)getpid() << LOCKER_SHIFT | slot; }

/* Whether a lock's holder is no more: its slot is dead, or has this process in it now. */
static bool locker_dead(uint32_t holder)
{
	uint32_t slot = holder & ((1 << LOCKER_SHIFT) - 1);

	return slot == home->slot ? holder != home->locker : slot_dead(slot);
}

void shared_lock_slow(uint32_t *l)
{
	for (unsigned i = 1;; i++) {
		uint32_t holder = 0;

		if (!peek(l) && __atomic_compare_exchange_n(l, &holder, home->locker, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
			return;
		if (i % 128) {
			cpu_relax();
			continue;
		}
		sched_yield();
		holder = peek(l);
		if (i % 8192 == 0 && holder && holder != home->locker && locker_dead(holder) &&
		    __atomic_compare_exchange_n(l, &holder, home->locker, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
			return;
	}
}

/* ---- files: NNNN.mem is the home of slot NNNN, NNNN.eC the FIFO of its completion channel C ---- */

static int slot_path(uint32_t slot, char *path, size_t len) { return snprintf(path, len, "%s/%04u.mem", dir, slot); }

int channel_fifo(uint32_t slot, uint32_t chan, char *path, size_t len)
{
	return snprintf(path, len, "%s/%04u.e%u", dir, slot, chan);
}

/* Whether the home in this file is one of a process that lives. */
static bool alive(int fd)
{
	struct { uint32_t magic, slot; struct robust_list r; uint32_t life; } h;
	_Static_assert(offsetof(struct home, life) == 16 && sizeof h == 24, "the head of struct home");

	return pread(fd, &h, sizeof h, (off_t)HOME_OFFSET) == sizeof h && h.magic == MAGIC && (h.life & FUTEX_TID_MASK);
}

static bool slot_alive_on_disk(uint32_t slot)
{
	char path[256];
	bool yes;
	int fd;

	slot_path(slot, path, sizeof path);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	yes = alive(fd);
	close(fd);
	return yes;
}

/* Removes what the dead left. The directory is locked, so a half-made home is nobody's. */
static void sweep(void)
{
	DIR *d = opendir(dir);
	struct dirent *e;

	while (d && (e = readdir(d))) {
		char path[sizeof dir + sizeof e->d_name + 1], *end;
		unsigned long slot = strtoul(e->d_name, &end, 10);

		if (end == e->d_name || *end != '.' || slot == 0 || slot >= MAX_SLOT || slot_alive_on_disk((uint32_t)slot))
			continue;
		snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
		unlink(path);
	}
	if (d)
		closedir(d);
}

static int make_dir(void)
{
	const char *wanted = getenv("VERBSIM_DIR");
	int n = wanted && *wanted ? snprintf(dir, sizeof dir, "%s", wanted) :
				    snprintf(dir, sizeof dir, "/dev/shm/verbsim.%u", getuid());

	if (n >= (int)sizeof dir) {
		say("VERBSIM_DIR is longer than %zu bytes", sizeof dir - 1);
		return ENAMETOOLONG;
	}
	if (mkdir(dir, 0700) && errno != EEXIST) {
		say("%s: %m", dir);
		return errno;
	}
	return 0;
}

/* Processes come and go one at a time. */
static int lock_dir(void)
{
	int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
	struct stat st;

	if (fd < 0)
		return -1;
	if (fstat(fd, &st) == 0 && st.st_uid != getuid())
		errno = EPERM;
	else if (flock(fd, LOCK_EX) == 0)
		return fd;
	close(fd);
	return -1;
}

static void unlock_dir(int fd)
{
	flock(fd, LOCK_UN); /* a child may hold a copy of fd */
	close(fd);
}

static void drop_home(void)
{
	char path[256];

	slot_path(home->slot, path, sizeof path);
	unlink(path);
	munmap(home, sizeof *home);
	close(home_fd);
	home = NULL;
	home_fd = -1;
}

static int create_home(void)
{
	char path[256];

	for (uint32_t slot = 1; slot < MAX_SLOT; slot++) {
		void *m = MAP_FAILED;
		int err;

		slot_path(slot, path, sizeof path);
		home_fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
		if (home_fd < 0 && errno == EEXIST)
			continue;
		if (home_fd >= 0 && ftruncate(home_fd, (off_t)(HOME_OFFSET + sizeof *home)) == 0)
			m = mmap(NULL, sizeof *home, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, home_fd, (off_t)HOME_OFFSET);
		if (m != MAP_FAILED) {
			madvise(m, sizeof *home, MADV_DONTDUMP);
			home = m;
			home->slot = slot;
			home->locker = locker(slot);
			return 0;
		}
		err = errno;
		say("%s: %s (it must be on tmpfs)", path, strerror(err));
		if (home_fd >= 0) {
			unlink(path);
			close(home_fd);
		}
		return err;
	}
	say("%s: all %d places are taken", dir, MAX_SLOT - 1);
	return ENOSPC;
}

/* ---- peers ---- */

static void peer_free(struct peer *p)
{
	windows_close(p);
	if (p->home != home) {
		munmap(p->home, sizeof *p->home);
		close(p->fd);
	}
	free(p);
}

static struct peer *peer_open(uint32_t slot)
{
	char path[256];
	struct peer *p = calloc(1, sizeof *p);

	if (!p)
		return NULL;
	if (slot == home->slot) {
		p->home = home;
		p->fd = home_fd;
		return p;
	}
	slot_path(slot, path, sizeof path);
	p->fd = open(path, O_RDWR | O_CLOEXEC);
	if (p->fd >= 0 && alive(p->fd)) {
		p->home = mmap(NULL, sizeof *p->home, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, p->fd, (off_t)HOME_OFFSET);
		if (p->home != MAP_FAILED) {
			madvise(p->home, sizeof *p->home, MADV_DONTDUMP);
			return p;
		}
	}
	if (p->fd >= 0)
		close(p->fd);
	free(p);
	return NULL;
}

struct peer *peer_get(uint32_t slot)
{
	struct peer *p;

	if (slot == 0 || slot >= MAX_SLOT)
		return NULL;
	pthread_mutex_lock(&peer_lock);
	p = peers[slot];
	if (!p || home_dead(p->home)) {
		/* A rare moment: let go of all the dead. Those in use go with their last user. */
		for (unsigned i = 0; i < MAX_SLOT; i++) {
			if (!peers[i] || !home_dead(peers[i]->home))
				continue;
			if (peers[i]->refs == 0)
				peer_free(peers[i]);
			peers[i] = NULL;
		}
		p = peers[slot] = peer_open(slot);
	}
	if (p)
		p->refs++;
	pthread_mutex_unlock(&peer_lock);
	return p;
}

void peer_put(struct peer *p)
{
	pthread_mutex_lock(&peer_lock);
	if (--p->refs == 0 && peers[p->home->slot] != p)
		peer_free(p);
	pthread_mutex_unlock(&peer_lock);
}

static bool slot_dead(uint32_t slot)
{
	bool dead;

	pthread_mutex_lock(&peer_lock);
	dead = peers[slot] ? home_dead(peers[slot]->home) : !slot_alive_on_disk(slot);
	pthread_mutex_unlock(&peer_lock);
	return dead;
}

/* ---- start and end ---- */

static pid_t home_pid;

/* A child shares its parent's pages but is nobody on the fabric until it opens a device itself. */
static void after_fork(void)
{
	for (int i = 0; i < MAX_SLOT; i++) {
		if (peers[i])
			peer_free(peers[i]);
		peers[i] = NULL;
	}
	if (home_fd >= 0)
		close(home_fd);
	home = NULL;
	home_fd = -1;
	heap_after_fork();
	keeper_after_fork();
	memory_after_fork();
	cq_after_fork();
	send_after_fork();
	pthread_mutex_init(&start_lock, NULL);
	pthread_mutex_init(&peer_lock, NULL);
}

__attribute__((destructor)) static void finish(void)
{
	int fd;

	if (!home || knobs.null_mode || home_pid != getpid())
		return;
	store(&home->life, FUTEX_OWNER_DIED);
	fd = lock_dir();
	if (fd >= 0) {
		sweep();
		unlock_dir(fd);
	}
}

static int start(void)
{
	int fd, err = make_dir();

	if (err)
		return err;
	fd = lock_dir();
	if (fd < 0) {
		err = errno;
		say("%s: %s", dir, strerror(err));
		return err;
	}
	sweep();
	err = create_home();
	if (!err) {
		err = keeper_start();
		if (err)
			drop_home();
	}
	home_pid = getpid();
	unlock_dir(fd);
	return err;
}

/* Nobody else looks at it. */
static int start_alone(void)
{
	void *m = mmap(NULL, sizeof *home, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (m == MAP_FAILED)
		return errno;
	home = m;
	home->slot = 1;
	home->locker = locker(1);
	return 0;
}

int fabric_start(void)
{
	static bool hooked;
	int err = 0;

	pthread_mutex_lock(&start_lock);
	if (!hooked)
		hooked = pthread_atfork(NULL, NULL, after_fork) == 0;
	if (!home)
		err = knobs.null_mode ? start_alone() : start();
	pthread_mutex_unlock(&start_lock);
	return err;
}
