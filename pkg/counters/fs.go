// Package counters reads what a Linux host knows about its RDMA devices: inventory and state,
// counters by the driver's own names, normalised classes and traffic, and the increase of a
// port's counters around a probe.
//
// Everything comes from a sysfs tree whose root is a value, so that the same code reads /sys, a
// mounted copy of it, or a fixture; on a real sysfs, rdma netlink and ethtool add what sysfs
// lacks. Three things are kept apart everywhere: a value, a file that is absent (the driver has
// no such counter), and a file that can't be read (listed as [Unreadable]). Nothing is invented:
// where a driver has no signal for a class, the class is missing, which is not zero.
//
// A read may hang in the driver. It then costs one goroutine and one [FS.ReadTimeout]: the file
// is left alone until that read returns or the file is replaced.
package counters

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// readTimeout is far above any healthy firmware command and far below a scrape's timeout.
	readTimeout = 400 * time.Millisecond

	// retryUnreadable is how long a file that answered with an error is left alone, unless its
	// port changes state or the file is replaced. Each try may cost the firmware a command.
	retryUnreadable = 10 * time.Minute

	// maxParallel bounds the devices read at once.
	maxParallel = 8
)

// FS reads one sysfs tree. It is safe for concurrent use.
type FS struct {
	// ReadTimeout is how long one read may take before its file is given up for now. NewFS sets
	// a default; change it only before first use.
	ReadTimeout time.Duration

	// Proc is the root of the procfs that goes with the tree: the host's own for a mounted sysfs, else none (empty). Change it
	// only before first use.
	Proc string

	root string
	live bool // root is a mounted sysfs: netlink and ethtool speak of the same devices

	trace   func(path string)                              // test seam: sees every path before it is touched
	ethtool func(netdev string) (map[string]uint64, error) // nil: there is none for this root
	nic     *nic                                           // likewise

	nstuck atomic.Int32 // len(stuck), readable without the lock

	mu      sync.Mutex
	gates   map[string]*gate     // by device
	stuck   map[string]stuckRead // by path
	refused map[string]refusal   // by path of a counter
	devices map[string]*Device   // as last read in full
	ports   map[portKey]*PortReader
	watched map[portKey]map[string]*watchedCount
	fastest map[portKey]float64 // Gb/s
}

type portKey struct {
	device string
	port   int
}

// refusal is a counter file that answered with an error or with text that is no number.
type refusal struct {
	what  Unreadable
	id    ident
	state int // of the port, when it refused
	at    time.Time
}

// NewFS returns a reader of the tree at root; empty means /sys. Whether there is such a tree shows
// with the first read.
func NewFS(root string) *FS {
	if root == "" {
		root = "/sys"
	}
	fs := &FS{
		ReadTimeout: readTimeout,
		root:        filepath.Clean(root),
		gates:       make(map[string]*gate),
		stuck:       make(map[string]stuckRead),
		refused:     make(map[string]refusal),
		devices:     make(map[string]*Device),
		ports:       make(map[portKey]*PortReader),
		watched:     make(map[portKey]map[string]*watchedCount),
		fastest:     make(map[portKey]float64),
	}
	var st unix.Statfs_t
	if unix.Statfs(fs.root, &st) == nil && st.Type == unix.SYSFS_MAGIC {
		fs.live = true
		fs.Proc = "/proc"
		fs.ethtool, fs.nic = ethtoolStats, kernelNIC
	}
	return fs
}

// Root is the root of the tree.
func (fs *FS) Root() string { return fs.root }

// Filter selects devices by globs (path.Match) on their names. A device that it rejects is never
// opened. An empty Include accepts all.
type Filter struct {
	Include []string
	Exclude []string
}

// Validate reports the first malformed glob.
func (f Filter) Validate() error {
	for _, g := range slices.Concat(f.Include, f.Exclude) {
		if _, err := path.Match(g, ""); err != nil {
			return fmt.Errorf("device glob %q: %w", g, err)
		}
	}
	return nil
}

// Match reports whether the filter accepts a device. A malformed glob matches nothing.
func (f Filter) Match(device string) bool {
	match := func(g string) bool { ok, err := path.Match(g, device); return ok && err == nil }
	return (len(f.Include) == 0 || slices.ContainsFunc(f.Include, match)) && !slices.ContainsFunc(f.Exclude, match)
}

// Inventory reads everything about the devices that the filter accepts, GID tables included.
// A GID table may have a thousand rows: call it at start and after events, and [FS.Collect] for
// a scrape. A host without RDMA has an empty inventory, which is no error; the error is for a
// root that is no directory, and for ctx.
func (fs *FS) Inventory(ctx context.Context, f Filter) (*Inventory, error) {
	inv, err := fs.read(ctx, f, true)
	if err != nil {
		return nil, err
	}
	host, err := run(ctx, fs, hostLane, func(l *lane) (Host, error) { return l.host(), nil })
	if err != nil && !errors.Is(err, ErrNotAnswering) {
		return nil, err
	}
	inv.Host = host
	inv.Warnings = append(inv.Warnings, host.warnings()...)
	slices.Sort(inv.Warnings)
	return inv, nil
}

// Collect reads what changes from scrape to scrape: state, rate, counters, netdevs. GID tables,
// PCI and firmware are those of the last full read of the device, which is repeated when the
// device was replaced. Host is empty.
func (fs *FS) Collect(ctx context.Context, f Filter) (*Inventory, error) {
	return fs.read(ctx, f, false)
}

// read reads the devices side by side, so that a device that hangs delays no other.
func (fs *FS) read(ctx context.Context, f Filter, full bool) (*Inventory, error) {
	inv := &Inventory{Tree: sanitise(filepath.Base(fs.root)), Devices: []Device{}, Warnings: []string{}}
	if fs.live {
		inv.Kernel = kernelRelease()
	}
	names, err := fs.names(ctx, f)
	if err != nil {
		return nil, err
	}
	fs.forget(f, names)
	inv.Seen = len(names)

	devices := make([]*Device, len(names))
	limit := make(chan struct{}, maxParallel)
	var wg sync.WaitGroup
	for i, name := range names {
		limit <- struct{}{}
		wg.Go(func() {
			defer func() { <-limit }()
			devices[i] = fs.device(ctx, name, full)
		})
	}
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("read sysfs at %s: %w", fs.root, err)
	}

	for _, d := range devices {
		if d == nil { // gone since it was listed
			continue
		}
		inv.Devices = append(inv.Devices, *d)
		for name, stats := range d.ethtool {
			if inv.Ethtool == nil {
				inv.Ethtool = make(map[string]map[string]uint64)
			}
			inv.Ethtool[name] = stats
		}
	}
	slices.SortFunc(inv.Devices, func(a, b Device) int {
		return cmp.Or(cmp.Compare(a.order(), b.order()), naturalCompare(a.Name, b.Name))
	})
	if len(inv.Devices) == 0 {
		inv.Warnings = append(inv.Warnings, WarnNoDevice)
	}
	return inv, nil
}

// names lists the devices that the filter accepts.
func (fs *FS) names(ctx context.Context, f Filter) ([]string, error) {
	names, err := run(ctx, fs, "", func(l *lane) ([]string, error) {
		if st, err := os.Stat(fs.root); err != nil {
			return nil, err
		} else if !st.IsDir() {
			return nil, unix.ENOTDIR
		}
		names, err := l.list(fs.path("class", "infiniband"))
		if errors.Is(err, unix.ENOENT) {
			return nil, nil
		}
		return names, err
	})
	if err != nil {
		return nil, fmt.Errorf("read sysfs at %s: %w", fs.root, err)
	}
	return slices.DeleteFunc(names, func(n string) bool { return !f.Match(n) }), nil
}

// device reads one device; nil if it is gone. A device that doesn't answer is returned by its
// name alone, with a warning.
func (fs *FS) device(ctx context.Context, name string, full bool) *Device {
	d, err := run(ctx, fs, name, func(l *lane) (*Device, error) {
		dir, id, err := l.deviceDir(name)
		if err != nil {
			return nil, err
		}
		var d *Device
		if cached := fs.cached(name, id); cached != nil && !full {
			d = l.refresh(cached)
		} else {
			d = l.device(name, dir, id)
		}
		// Of a device that went away meanwhile, half is missing: rather show none of it.
		_, _, err = l.deviceDir(name)
		return d, err
	})
	switch {
	case err == nil:
		fs.remember(name, d)
		return d
	case errors.Is(err, ErrNotAnswering):
		return &Device{Name: sanitise(name), Driver: unknown, Transport: unknown, Netdevs: []Netdev{}, Ports: []Port{}, Warnings: []string{WarnNotAnswering}}
	default:
		return nil
	}
}

func (fs *FS) cached(name string, id ident) *Device {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if d := fs.devices[name]; d != nil && d.id == id {
		return d
	}
	return nil
}

func (fs *FS) remember(name string, d *Device) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.devices[name] = d
}

// forget drops what is held about devices that the filter accepts and that are gone, so that a
// host whose devices come and go holds no more than one that stands still.
func (fs *FS) forget(f Filter, present []string) {
	gone := func(device string) bool { return f.Match(device) && !slices.Contains(present, device) }
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for name, d := range fs.devices {
		if gone(name) {
			delete(fs.devices, name)
			for p := range fs.refused {
				if strings.HasPrefix(p, d.dir+"/") {
					delete(fs.refused, p)
				}
			}
		}
	}
	for key := range fs.ports {
		if gone(key.device) {
			delete(fs.ports, key)
		}
	}
	for key := range fs.watched {
		if gone(key.device) {
			delete(fs.watched, key)
		}
	}
	for key := range fs.fastest {
		if gone(key.device) {
			delete(fs.fastest, key)
		}
	}
}

// Port returns the reader of one port's counters. Nothing is read yet, and the device need not
// exist. Calls for the same port return the same reader as long as the device stays.
func (fs *FS) Port(device string, port int) *PortReader {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	key := portKey{device, port}
	r := fs.ports[key]
	if r == nil {
		r = &PortReader{fs: fs, key: key}
		fs.ports[key] = r
	}
	return r
}

// Stuck lists the files whose read has not returned yet.
func (fs *FS) Stuck() []string {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	paths := make([]string, 0, len(fs.stuck))
	for p := range fs.stuck {
		paths = append(paths, p)
	}
	slices.Sort(paths)
	return paths
}

// recall returns how a counter file refused last time. Again is false if trying again makes no
// sense yet; what is nil if the file never refused.
func (fs *FS) recall(path string, state int) (what *Unreadable, again bool) {
	fs.mu.Lock()
	r, ok := fs.refused[path]
	fs.mu.Unlock()
	if !ok {
		return nil, true
	}
	if r.state != state || time.Since(r.at) > retryUnreadable {
		return &r.what, true
	}
	// A stat never reaches the driver, unlike a read.
	id, err := fs.identify(path)
	return &r.what, err != nil || id != r.id
}

func (fs *FS) refuse(path string, state int, what Unreadable) {
	id, err := fs.identify(path)
	if err != nil {
		return
	}
	fs.mu.Lock()
	fs.refused[path] = refusal{what, id, state, time.Now()}
	fs.mu.Unlock()
}

func (fs *FS) accept(path string) {
	fs.mu.Lock()
	delete(fs.refused, path)
	fs.mu.Unlock()
}

func (fs *FS) path(elem ...string) string {
	return fs.root + "/" + strings.Join(elem, "/")
}

// ident tells a file from one that later took its name.
type ident struct {
	dev, ino uint64
	ctime    int64 // of a copied tree only: there inode numbers are soon used again
}

func (fs *FS) identify(path string) (ident, error) {
	var st unix.Stat_t
	if err := ignoringEINTR(func() error { return unix.Stat(path, &st) }); err != nil {
		return ident{}, err
	}
	id := ident{dev: st.Dev, ino: st.Ino}
	if !fs.live {
		id.ctime = st.Ctim.Nano()
	}
	return id, nil
}

func ignoringEINTR(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}
