package schedule

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"
)

// DefaultShared is how many light jobs use a port at a time unless [GateOptions] says otherwise.
const DefaultShared = 4

// lockPoll is how often a lock that another process holds is tried again: flock(2) can't wait
// and be cancelled, and a heavy run lasts far longer than this.
const lockPoll = 50 * time.Millisecond

// GateOptions set up a [Gate].
type GateOptions struct {
	// Shared is how many light jobs may use a port at a time in this process; 0: [DefaultShared].
	Shared int
	// Dir holds one lock file per port, so that all processes of this host that name the same
	// directory keep out of each other's way. Empty: this process alone.
	Dir string
	// Log is told, once, if Dir can't be used.
	Log *slog.Logger
}

// Gate shares out ports. Heavy jobs fill the link and hold a port exclusively; light ones share
// it with a few others, but never with a heavy one. Within a process waiters are served in order
// of arrival, so a stream of light jobs does not starve a heavy one. Between processes there is
// no order. A process that dies leaves no lock behind.
type Gate struct {
	shared int64
	dir    string
	log    *slog.Logger
	warn   sync.Once

	mu    sync.Mutex
	ports map[string]*semaphore.Weighted // a heavy job takes all of its weight, a light one 1
}

// NewGate returns a Gate with every port free.
func NewGate(o GateOptions) *Gate {
	if o.Shared <= 0 {
		o.Shared = DefaultShared
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Gate{shared: int64(o.Shared), dir: o.Dir, log: o.Log, ports: map[string]*semaphore.Weighted{}}
}

func (g *Gate) port(key string) *semaphore.Weighted {
	g.mu.Lock()
	defer g.mu.Unlock()
	sem := g.ports[key]
	if sem == nil {
		sem = semaphore.NewWeighted(g.shared)
		g.ports[key] = sem
	}
	return sem
}

func (g *Gate) weight(exclusive bool) int64 {
	if exclusive {
		return g.shared
	}
	return 1
}

// Acquire waits until the port named key (for instance "mlx5_0/1") is free for exclusive or
// shared use, or until ctx ends; the error then wraps ctx's cause. The caller must call release
// once done; further calls of it do nothing.
func (g *Gate) Acquire(ctx context.Context, key string, exclusive bool) (release func(), err error) {
	sem, weight := g.port(key), g.weight(exclusive)
	if err := sem.Acquire(ctx, weight); err != nil {
		return nil, fmt.Errorf("wait for port %s: %w", key, context.Cause(ctx))
	}
	poll := time.NewTicker(lockPoll)
	defer poll.Stop()
	for {
		unlock, ok := g.lock(key, exclusive)
		if ok {
			return g.release(sem, weight, unlock), nil
		}
		select {
		case <-ctx.Done():
			sem.Release(weight)
			return nil, fmt.Errorf("wait for port %s, in use by another process: %w", key, context.Cause(ctx))
		case <-poll.C:
		}
	}
}

// TryAcquire is [Gate.Acquire] without waiting: ok is false if the port is in use or others wait.
func (g *Gate) TryAcquire(key string, exclusive bool) (release func(), ok bool) {
	sem, weight := g.port(key), g.weight(exclusive)
	if !sem.TryAcquire(weight) {
		return nil, false
	}
	unlock, ok := g.lock(key, exclusive)
	if !ok {
		sem.Release(weight)
		return nil, false
	}
	return g.release(sem, weight, unlock), true
}

func (g *Gate) release(sem *semaphore.Weighted, weight int64, unlock func()) func() {
	return sync.OnceFunc(func() {
		unlock() // first: whoever the semaphore lets in next asks for the lock at once
		sem.Release(weight)
	})
}

// lock takes the port's lock file. It reports false only if another process holds it; a file that
// can't be used is no reason not to measure.
func (g *Gate) lock(key string, exclusive bool) (unlock func(), ok bool) {
	if g.dir == "" {
		return func() {}, true
	}
	fd, err := openLock(filepath.Join(g.dir, url.PathEscape(key)+".lock"))
	if err == nil {
		how := unix.LOCK_SH
		if exclusive {
			how = unix.LOCK_EX
		}
		switch err = unix.Flock(fd, how|unix.LOCK_NB); {
		case err == nil:
			return func() { unix.Close(fd) }, true
		case errors.Is(err, unix.EWOULDBLOCK):
			unix.Close(fd)
			return nil, false
		}
		unix.Close(fd)
	}
	g.warn.Do(func() {
		g.log.Warn("no port locks: other processes on this host may use a port during a heavy probe; "+
			"make the directory or let this user write to it", slog.String("dir", g.dir), slog.Any("err", err))
	})
	return func() {}, true
}

// openLock opens the lock file read-only, which is all that flock(2) needs and what a user other
// than the one that made it may do. The file is never removed: a lock on an unlinked file would
// keep nobody out.
func openLock(path string) (fd int, err error) {
	const flags = unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NOFOLLOW | unix.O_NONBLOCK
	if fd, err = unix.Open(path, flags, 0); !errors.Is(err, unix.ENOENT) {
		return fd, err
	}
	if fd, err = unix.Open(path, flags|unix.O_CREAT, 0o644); err == nil {
		_ = unix.Fchmod(fd, 0o644) // despite the umask; fails only if another user was faster and did it
	}
	return fd, err
}
