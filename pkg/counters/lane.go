package counters

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// maxStuck is how many reads of one device may hang before the device is left alone as a whole:
// each holds an operating system thread, and firmware that died answers no file at all.
const maxStuck = 4

// hostLane is the name of the lanes that read what is of the machine. No device has a slash in its name.
const hostLane = "/host"

// ErrNotAnswering is the error of a device so many of whose reads hang that it is left alone
// until they return.
var ErrNotAnswering = errors.New("device is not answering")

var (
	errLost  = errors.New("read was given up") // the lane's result is no longer wanted
	errStuck = fmt.Errorf("an earlier read has not returned: %w", unix.ETIMEDOUT)
)

// stuckRead is a read that has not returned.
type stuckRead struct {
	device string
	id     ident
	known  bool // id is the file's; otherwise the path is no file
}

// lane is the one goroutine that reads a device, together with what its supervisor needs to know
// to give it up. All methods but stalled and abandon are the goroutine's own.
type lane struct {
	fs  *FS
	dev string     // its name; empty for the list of devices, hostLane for the machine
	buf [4096]byte // sysfs text is at most a page

	mu    sync.Mutex
	path  string // being read; empty between reads
	since time.Time
	lost  bool
}

// run calls fn on a goroutine of its own and supervises its reads. When one hangs, that goroutine
// is left behind, the file is marked, and fn starts over without it; so fn must leave nothing
// half done but its result. The error is fn's, ctx's or ErrNotAnswering.
func run[T any](ctx context.Context, fs *FS, device string, fn func(*lane) (T, error)) (T, error) {
	var zero T
	type result struct {
		value T
		err   error
	}
	release, err := fs.acquire(ctx, device)
	if err != nil {
		return zero, err
	}
	defer release()
	for {
		if fs.stuckReads(device) >= maxStuck {
			return zero, fmt.Errorf("read %s: %w: %d reads hang", device, ErrNotAnswering, maxStuck)
		}
		l := &lane{fs: fs, dev: device}
		done := make(chan result, 1)
		go func() {
			v, err := fn(l)
			done <- result{v, err}
		}()
		tick := time.NewTicker(fs.ReadTimeout / 4)
		for stalled := false; !stalled; {
			select {
			case r := <-done:
				tick.Stop()
				return r.value, r.err
			case <-ctx.Done():
				tick.Stop()
				l.abandon()
				return zero, ctx.Err()
			case <-tick.C:
				stalled = l.stalled()
			}
		}
		tick.Stop()
		l.abandon()
	}
}

// gate lets one lane at a time work on a device. That keeps a file from getting a second reader
// while the first hangs, and two callers from making the firmware answer the same twice at once.
type gate struct {
	busy  chan struct{} // capacity 1
	users int           // holders and waiters, under FS.mu
}

func (fs *FS) acquire(ctx context.Context, device string) (release func(), err error) {
	fs.mu.Lock()
	g := fs.gates[device]
	if g == nil {
		g = &gate{busy: make(chan struct{}, 1)}
		fs.gates[device] = g
	}
	g.users++
	fs.mu.Unlock()
	leave := func() {
		fs.mu.Lock()
		defer fs.mu.Unlock()
		if g.users--; g.users == 0 {
			delete(fs.gates, device)
		}
	}
	select {
	case g.busy <- struct{}{}:
		return func() { <-g.busy; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}

// stalled reports whether the current read has taken longer than it may.
func (l *lane) stalled() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.path != "" && time.Since(l.since) > l.fs.ReadTimeout
}

// abandon gives the goroutine up. If it is inside a read, nobody starts another on that file
// before this one returns, so that a file never has more than one stuck reader.
func (l *lane) abandon() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost = true
	if l.path == "" {
		return
	}
	id, err := l.fs.identify(l.path)
	l.fs.mu.Lock()
	l.fs.stuck[l.path] = stuckRead{device: l.dev, id: id, known: err == nil}
	l.fs.nstuck.Store(int32(len(l.fs.stuck)))
	l.fs.mu.Unlock()
}

// enter announces a read; leave must follow unless it fails.
func (l *lane) enter(path string) error {
	if l.fs.isStuck(path) {
		return fmt.Errorf("read %s: %w", path, errStuck)
	}
	if l.fs.trace != nil {
		l.fs.trace(path)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lost {
		return errLost
	}
	l.path, l.since = path, time.Now()
	return nil
}

func (l *lane) leave() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	path := l.path
	l.path = ""
	if !l.lost {
		return nil
	}
	l.fs.mu.Lock()
	delete(l.fs.stuck, path)
	l.fs.nstuck.Store(int32(len(l.fs.stuck)))
	l.fs.mu.Unlock()
	return errLost
}

// isStuck reports whether a read of this very file hangs. A file that was replaced since may be
// read again although the old read never returns.
func (fs *FS) isStuck(path string) bool {
	if fs.nstuck.Load() == 0 {
		return false
	}
	fs.mu.Lock()
	s, ok := fs.stuck[path]
	fs.mu.Unlock()
	if !ok {
		return false
	}
	return !fs.replaced(path, s)
}

func (fs *FS) replaced(path string, s stuckRead) bool {
	if !s.known {
		return false
	}
	id, err := fs.identify(path)
	if err == nil && id == s.id {
		return false
	}
	fs.mu.Lock()
	defer fs.mu.Unlock()
	delete(fs.stuck, path)
	fs.nstuck.Store(int32(len(fs.stuck)))
	return true
}

func (fs *FS) stuckReads(device string) int {
	if fs.nstuck.Load() == 0 {
		return 0
	}
	fs.mu.Lock()
	reads := make(map[string]stuckRead)
	for p, s := range fs.stuck {
		if s.device == device {
			reads[p] = s
		}
	}
	fs.mu.Unlock()
	n := 0
	for p, s := range reads {
		if !fs.replaced(p, s) {
			n++
		}
	}
	return n
}

// read returns the text of a file without white space around it. A file that reads empty is an
// error: sysfs ends every value in a newline, and in a copied tree an empty file is what remains
// of a read that failed. EINVAL is then the kernel's answer in all known cases.
func (l *lane) read(path string) (string, error) {
	if err := l.enter(path); err != nil {
		return "", err
	}
	n, err := readOnce(path, l.buf[:])
	if lost := l.leave(); lost != nil {
		return "", lost
	}
	if err != nil {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	if n == 0 {
		return "", fmt.Errorf("read %s: empty: %w", path, unix.EINVAL)
	}
	return strings.TrimSpace(string(l.buf[:n])), nil
}

// readOnce reads with a single system call. os.ReadFile would hand the file to the runtime's
// poller and read on to the end, which for some drivers is a second firmware command.
func readOnce(path string, buf []byte) (n int, err error) {
	var fd int
	err = ignoringEINTR(func() (err error) {
		fd, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	err = ignoringEINTR(func() (err error) {
		n, err = unix.Read(fd, buf)
		return err
	})
	return max(n, 0), err
}

// list returns the names in a directory, sorted as people count.
func (l *lane) list(dir string) ([]string, error) {
	if err := l.enter(dir); err != nil {
		return nil, err
	}
	names, err := readNames(dir)
	if lost := l.leave(); lost != nil {
		return nil, lost
	}
	slices.SortFunc(names, naturalCompare)
	return names, err
}

func readNames(dir string) ([]string, error) {
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Readdirnames(-1)
}

// exists reports whether there is an entry of that name, even a dangling link.
func (l *lane) exists(path string) bool {
	if l.fs.trace != nil {
		l.fs.trace(path)
	}
	_, err := os.Lstat(path)
	return err == nil
}

// link returns the last element of a link's target, which sysfs uses as a name.
func (l *lane) link(path string) (string, error) {
	if err := l.enter(path); err != nil {
		return "", err
	}
	target, err := l.fs.readlink(path)
	if lost := l.leave(); lost != nil {
		return "", lost
	}
	if err != nil {
		return "", err
	}
	return filepath.Base(target), nil
}

// resolve returns the directory behind a path, all links followed.
func (l *lane) resolve(path string) (string, error) {
	if err := l.enter(path); err != nil {
		return "", err
	}
	var err error
	if l.fs.live {
		path, err = filepath.EvalSymlinks(path)
	} else {
		path, err = l.fs.resolveCopy(path)
	}
	if lost := l.leave(); lost != nil {
		return "", lost
	}
	return path, err
}

// resolveCopy follows links within a copied tree. It never leaves the root, whatever a link says,
// and it takes absolute links as the kernel's, below /sys.
func (fs *FS) resolveCopy(path string) (string, error) {
	rest := strings.TrimPrefix(path, fs.root)
	at := fs.root
	for hops := 0; ; {
		var elem string
		elem, rest, _ = strings.Cut(strings.TrimLeft(rest, "/"), "/")
		switch elem {
		case "":
			return at, nil
		case ".":
			continue
		case "..":
			if at != fs.root {
				at = filepath.Dir(at)
			}
			continue
		}
		next := at + "/" + elem
		target, err := fs.readlink(next)
		switch {
		case errors.Is(err, unix.EINVAL): // no link
			at = next
			continue
		case err != nil:
			return "", err
		}
		if hops++; hops > 40 {
			return "", fmt.Errorf("resolve %s: %w", path, unix.ELOOP)
		}
		if filepath.IsAbs(target) {
			at = fs.root
			target = strings.TrimPrefix(target, "/sys")
		}
		rest = target + "/" + rest
	}
}

// readlink also reads what a copy made without links (git's core.symlinks=false) has in their
// place: a small file with the relative target and no newline. EINVAL means no link.
func (fs *FS) readlink(path string) (string, error) {
	st, err := os.Lstat(path)
	if err != nil {
		return "", err
	}
	if st.Mode()&os.ModeSymlink != 0 {
		return os.Readlink(path)
	}
	if fs.live || !st.Mode().IsRegular() || st.Size() == 0 || st.Size() > unix.PathMax {
		return "", unix.EINVAL
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	if target := string(text); strings.HasPrefix(target, "../") && !strings.ContainsAny(target, "\n\x00") {
		return target, nil
	}
	return "", unix.EINVAL
}
