/* Rings: whole pages of our heap, in sizes of powers of two. */
#include "verbsim.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

static pthread_mutex_t heap_lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t heap_used = 1, heap_free[32]; /* pages; 0 ends a list, whose links are the first words of the free rings */

static unsigned ring_class(size_t bytes)
{
	unsigned c = 0;

	while ((size_t)PAGE << c < bytes)
		c++;
	return c;
}

int ring_alloc(size_t bytes, uint32_t *page)
{
	unsigned c = ring_class(bytes);
	int err = 0;

	pthread_mutex_lock(&heap_lock);
	*page = heap_free[c];
	if (*page) {
		uint32_t *first = ring_at(home, *page);

		heap_free[c] = *first;
		*first = 0;
	} else if (heap_used + ((uint64_t)1 << c) <= HEAP_BYTES / PAGE) {
		*page = heap_used;
		heap_used += 1u << c;
	} else {
		err = ENOMEM;
	}
	pthread_mutex_unlock(&heap_lock);
	/* A full tmpfs shows here, not as SIGBUS at the first write. */
	if (!err && !knobs.null_mode) {
		off_t at = (off_t)(HOME_OFFSET + offsetof(struct home, heap) + (uint64_t)*page * PAGE);

		if (fallocate(home_fd, 0, at, (off_t)PAGE << c)) {
			ring_free(bytes, *page);
			err = ENOMEM;
		}
	}
	return err;
}

void ring_free(size_t bytes, uint32_t page)
{
	unsigned c = ring_class(bytes);
	uint32_t *first = ring_at(home, page);

	if (madvise(first, (size_t)PAGE << c, knobs.null_mode ? MADV_DONTNEED : MADV_REMOVE))
		memset(first, 0, (size_t)PAGE << c);
	pthread_mutex_lock(&heap_lock);
	*first = heap_free[c];
	heap_free[c] = page;
	pthread_mutex_unlock(&heap_lock);
}

void heap_after_fork(void)
{
	memset(heap_free, 0, sizeof heap_free);
	heap_used = 1;
	pthread_mutex_init(&heap_lock, NULL);
}
