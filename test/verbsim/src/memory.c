#include "verbsim.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

struct mr {
	struct ibv_mr v; /* first */
	uintptr_t lo, hi; /* whole pages */
	struct mr *next;
};

static pthread_mutex_t mr_lock = PTHREAD_MUTEX_INITIALIZER;
static struct mr *mrs;
static uint32_t first_free;

static pthread_mutex_t window_lock = PTHREAD_MUTEX_INITIALIZER;
static struct window *retired; /* replaced; one may be in use by another thread for the length of a copy, then it goes */

/* ---- registered pages are pages of our file, at the offset of their address ---- */

struct vma {
	uintptr_t lo, hi;
	bool readable, writable, executable, private, ours;
};

/* What is mapped in [lo, hi), cut to it; the list is complete before anything is changed, as it lies on the heap. */
static int vmas(uintptr_t lo, uintptr_t hi, struct vma **out, size_t *n)
{
	FILE *f = fopen("/proc/self/maps", "re");
	struct stat st;
	char *line = NULL;
	size_t len = 0, cap = 0;

	*out = NULL;
	*n = 0;
	if (!f || fstat(home_fd, &st)) {
		if (f)
			fclose(f);
		return errno;
	}
	while (getline(&line, &len, f) > 0) {
		unsigned long a, b, ino;
		unsigned major_, minor_;
		char perm[5];

		if (sscanf(line, "%lx-%lx %4s %*x %x:%x %lu", &a, &b, perm, &major_, &minor_, &ino) != 6 || b <= lo)
			continue;
		if (a >= hi)
			break;
		if (*n == cap) {
			struct vma *more = realloc(*out, (cap += 16) * sizeof **out);

			if (!more)
				break;
			*out = more;
		}
		(*out)[(*n)++] = (struct vma){
			.lo = a < lo ? lo : a, .hi = b > hi ? hi : b,
			.readable = perm[0] == 'r', .writable = perm[1] == 'w', .executable = perm[2] == 'x', .private = perm[3] == 'p',
			.ours = ino == st.st_ino && makedev(major_, minor_) == st.st_dev,
		};
	}
	free(line);
	fclose(f);
	return 0;
}

/* Whole pages are copied by bare system calls: AddressSanitizer would find its red zones in them. */
static int share_piece(const struct vma *v)
{
	for (uintptr_t at = v->lo; at < v->hi;) {
		ssize_t r = syscall(SYS_pwrite64, home_fd, at, v->hi - at, at);

		if (r <= 0)
			return r < 0 && errno != ENOSPC ? errno : ENOMEM;
		at += (uintptr_t)r;
	}
	if (mmap((void *)v->lo, v->hi - v->lo, PROT_READ | (v->writable ? PROT_WRITE : 0), MAP_SHARED | MAP_FIXED | MAP_POPULATE,
		 home_fd, (off_t)v->lo) == MAP_FAILED)
		return errno;
	return 0;
}

/* Back to private memory with the same content; what the program unmapped or replaced is left alone. */
static void make_private(uintptr_t lo, uintptr_t hi)
{
	struct vma *v;
	size_t n;

	if (vmas(lo, hi, &v, &n))
		say("/proc/self/maps: %m");
	for (size_t i = 0; i < n; i++) {
		size_t len = v[i].hi - v[i].lo, have = 0;
		ssize_t r;
		void *m;

		if (!v[i].ours)
			continue;
		m = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (m == MAP_FAILED) {
			say("no memory to restore %zu bytes that were registered", len);
			free(v);
			return;
		}
		do {
			r = syscall(SYS_pread64, home_fd, (uintptr_t)m + have, len - have, v[i].lo + have);
			have += r > 0 ? (size_t)r : 0;
		} while (r > 0 && have < len);
		if (!v[i].writable)
			mprotect(m, len, PROT_READ);
		if (mremap(m, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)v[i].lo) == MAP_FAILED)
			say("mremap: %m");
	}
	free(v);
	fallocate(home_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)lo, (off_t)(hi - lo));
}

/* Unshares what no region covers; mr_lock is held. */
static void make_private_uncovered(uintptr_t lo, uintptr_t hi)
{
	while (lo < hi) {
		uintptr_t end = hi, covered = lo;

		for (struct mr *m = mrs; m; m = m->next) {
			if (m->lo <= lo && m->hi > covered)
				covered = m->hi;
			else if (m->lo > lo && m->lo < end)
				end = m->lo;
		}
		if (covered == lo) {
			make_private(lo, end);
			covered = end;
		}
		lo = covered;
	}
}

static int make_shared(uintptr_t lo, uintptr_t hi)
{
	uintptr_t frame = (uintptr_t)__builtin_frame_address(0), at = lo;
	struct vma *v;
	size_t n;
	int err = hi > HOME_OFFSET ? EFAULT : vmas(lo, hi, &v, &n);

	if (err)
		return err;
	for (size_t i = 0; i < n && v[i].lo == at && v[i].readable && (v[i].ours || (v[i].private && !v[i].executable)); i++)
		at = v[i].hi;
	if (at < hi || (lo < frame + PAGE && hi + 65536 > frame)) {
		say("can't register %#lx-%#lx: at %#lx it is not readable private memory, or the running stack", lo, hi, at);
		err = EFAULT;
	}
	for (size_t i = 0; i < n && !err; i++) {
		if (v[i].ours)
			continue;
		err = share_piece(&v[i]);
		if (err)
			make_private_uncovered(lo, v[i].hi);
	}
	free(v);
	return err;
}

/* ---- regions ---- */

/* Tags start anywhere and are used in turn, so that a key is long unknown after its region went; mr_lock is held. */
static int new_key(uint32_t *key)
{
	static uint16_t tag;

	if (!tag && getrandom(&tag, sizeof tag, 0) != sizeof tag)
		tag = (uint16_t)now_ns();
	for (uint32_t i = first_free; i < MAX_MR; i++) {
		if (home->mr[i].key)
			continue;
		if (++tag == 0)
			tag = 1;
		*key = i << 16 | tag;
		first_free = i;
		return 0;
	}
	return ENOMEM;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	uintptr_t lo = (uintptr_t)addr & -(uintptr_t)PAGE, hi = ((uintptr_t)addr + length + PAGE - 1) & -(uintptr_t)PAGE;
	const unsigned remote = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
	const unsigned known = remote | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_LOCAL_WRITE;
	struct mr_rec *rec;
	struct mr *m;
	uint32_t key;
	int err;

	access &= ~(unsigned)IBV_ACCESS_OPTIONAL_RANGE;
	if (!length || hi <= lo || access & ~known || (access & remote && !(access & IBV_ACCESS_LOCAL_WRITE))) {
		errno = EINVAL;
		return NULL;
	}
	m = calloc(1, sizeof *m);
	if (!m)
		return NULL;
	pthread_mutex_lock(&mr_lock);
	err = new_key(&key);
	if (!err && !knobs.null_mode)
		err = make_shared(lo, hi);
	if (err) {
		pthread_mutex_unlock(&mr_lock);
		free(m);
		errno = err;
		return NULL;
	}
	m->v = (struct ibv_mr){
		.context = pd->context, .pd = pd, .addr = addr, .length = length, .handle = key >> 16, .lkey = key, .rkey = key,
	};
	m->lo = lo;
	m->hi = hi;
	m->next = mrs;
	mrs = m;
	rec = &home->mr[key >> 16];
	rec->pd = pd->handle;
	rec->access = access;
	rec->iova = iova;
	rec->addr = (uintptr_t)addr;
	rec->len = length;
	store(&rec->key, key);
	__atomic_add_fetch(&((struct pd *)pd)->children, 1, __ATOMIC_RELAXED);
	pthread_mutex_unlock(&mr_lock);
	return &m->v;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, (unsigned)access);
}

struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, iova, (unsigned)access);
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	struct mr *m = (struct mr *)mr, **at;

	pthread_mutex_lock(&mr_lock);
	store(&home->mr[mr->handle].key, 0);
	if (mr->handle < first_free)
		first_free = mr->handle;
	for (at = &mrs; *at != m; at = &(*at)->next)
		;
	*at = m->next;
	if (!knobs.null_mode)
		make_private_uncovered(m->lo, m->hi);
	pthread_mutex_unlock(&mr_lock);
	__atomic_sub_fetch(&((struct pd *)mr->pd)->children, 1, __ATOMIC_RELAXED);
	free(m);
	return 0;
}

int ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access)
{
	(void)mr, (void)flags, (void)pd, (void)addr, (void)length, (void)access;
	errno = EOPNOTSUPP;
	return IBV_REREG_MR_ERR_INPUT;
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
	(void)pd, (void)offset, (void)length, (void)iova, (void)fd, (void)access;
	errno = EOPNOTSUPP;
	return NULL;
}

/* ---- windows ---- */

static void window_free(struct window *w)
{
	if (w->map_len)
		munmap(w->map, w->map_len);
	free(w);
}

static void reap_retired(uint64_t now)
{
	enum { GRACE_NS = 2000000000 };

	for (struct window **at = &retired; *at;) {
		struct window *w = *at;

		if (now - w->retired_ns < GRACE_NS) {
			at = &w->next;
			continue;
		}
		*at = w->next;
		window_free(w);
	}
}

static struct window *window_map(struct peer *p, uint32_t key)
{
	struct mr_rec m = p->home->mr[key >> 16];
	uintptr_t lo = m.addr & -(uintptr_t)PAGE, hi = (m.addr + m.len + PAGE - 1) & -(uintptr_t)PAGE;
	struct window *w = calloc(1, sizeof *w);

	if (!w)
		return NULL;
	w->key = key;
	w->base = (uint8_t *)(uintptr_t)m.addr;
	if (p->home != home) {
		void *map = mmap(NULL, hi - lo, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, p->fd, (off_t)lo);

		if (map == MAP_FAILED) {
			free(w);
			return NULL;
		}
		w->map = map;
		w->map_len = hi - lo;
		w->base = (uint8_t *)map + (m.addr - lo);
	}
	if (load(&p->home->mr[key >> 16].key) == key) /* else the copy above may be of two regions */
		return w;
	window_free(w);
	return NULL;
}

struct window *window_open(struct peer *p, uint32_t key)
{
	struct window *w, *old;

	pthread_mutex_lock(&window_lock);
	old = p->win[key >> 16];
	w = old;
	if (!old || old->key != key) {
		w = window_map(p, key);
		if (w) {
			store(&p->win[key >> 16], w);
			reap_retired(now_ns());
			if (old) {
				old->retired_ns = now_ns();
				old->next = retired;
				retired = old;
			}
		}
	}
	pthread_mutex_unlock(&window_lock);
	return w;
}

void windows_close(struct peer *p)
{
	for (uint32_t i = 0; i < MAX_MR; i++)
		if (p->win[i])
			window_free(p->win[i]);
}

void memory_after_fork(void)
{
	mrs = NULL;
	first_free = 0;
	reap_retired(UINT64_MAX);
	pthread_mutex_init(&mr_lock, NULL);
	pthread_mutex_init(&window_lock, NULL);
}
