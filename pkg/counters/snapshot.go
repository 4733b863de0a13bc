package counters

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"time"
)

// maxLifespan bounds the wait for a driver's cache of hw_counters to run out. Its default is
// 10 ms; an administrator may set 10 s.
const maxLifespan = 50 * time.Millisecond

// ErrNotVisible is the error of Snapshot for a port that sysfs doesn't show: a user-space
// provider's, one of another network namespace, or one that is gone. Its counters can't be told,
// which says nothing about the port.
var ErrNotVisible = errors.New("not visible in sysfs")

// Source is how the driver's own counters of a port were read.
type Source string

// The sources. The empty Source means that the driver has none.
const (
	Netlink Source = "netlink" // one message, values of that moment
	Sysfs   Source = "sysfs"   // file by file, after the driver's cache has run out
)

// PortReader reads the counters of one port. It is safe for concurrent use.
type PortReader struct {
	fs  *FS
	key portKey
}

// Snapshot is the counters of a port at one moment.
type Snapshot struct {
	Device string
	Port   int
	Time   time.Time // no counter is older
	Source Source

	driver  string
	id      ident
	samples []sample
	stale   bool // but the driver's own, in sysfs, may be
}

// Snapshot reads the port's counters: the driver's, the PMA's, and those of the netdev and
// ethtool that say something about RDMA. The error wraps [ErrNotVisible], [ErrNotAnswering] or
// that of ctx. A counter that can't be read is left out.
//
// The driver's counters come by netlink, past the cache that makes sysfs up to 12 ms stale. Where
// only sysfs has them, Snapshot waits that long first, so that no value is older than the call.
func (r *PortReader) Snapshot(ctx context.Context) (*Snapshot, error) {
	type result struct {
		snapshot *Snapshot
		device   *Device
	}
	res, err := run(ctx, r.fs, r.key.device, func(l *lane) (result, error) {
		dir, id, err := l.deviceDir(r.key.device)
		if err != nil {
			return result{}, fmt.Errorf("%w: %w", ErrNotVisible, err)
		}
		d := r.fs.cached(r.key.device, id)
		if d == nil {
			d = l.device(r.key.device, dir, id)
		}
		p := d.port(r.key.port)
		if p == nil {
			return result{}, fmt.Errorf("%w: the device has no such port", ErrNotVisible)
		}
		s, err := l.snapshot(ctx, d, p)
		return result{s, d}, err
	})
	if err != nil {
		return nil, fmt.Errorf("counters of %s port %d: %w", r.key.device, r.key.port, err)
	}
	r.fs.remember(r.key.device, res.device)
	return res.snapshot, nil
}

func (l *lane) snapshot(ctx context.Context, d *Device, p *Port) (*Snapshot, error) {
	s := &Snapshot{Device: d.Name, Port: p.Port, driver: d.Driver, id: d.id}
	m := meaningOf(d.Driver)
	dir := d.dir + "/ports/" + strconv.Itoa(p.Port)
	state := value(p.StateID)

	// Counters of the whole device matter where the port has none of their classes. Otherwise
	// they are the same ones over again.
	missing := func(c Class) bool { _, ok := p.Classes[c]; return !ok }
	deviceToo := slices.ContainsFunc(slices.Collect(maps.Keys(d.HWClasses)), missing)
	c := portCounters{meaning: m, groups: make(map[Group]groupRead, 4)}
	s.Time = time.Now()
	hw, ok := l.netlinkGroup(d, p.Port, dir)
	if ok {
		s.Source = Netlink
	}
	if l.fs.live && (!ok || deviceToo) {
		if err := l.expireCaches(ctx, s, dir+"/hw_counters", d.dir+"/hw_counters"); err != nil {
			return nil, err
		}
	}
	if !ok {
		if hw = l.group(dir+"/hw_counters", HW, state); hw.exists {
			s.Source = Sysfs
		}
	}
	c.groups[HW] = hw
	for _, g := range []Group{PMA, PMAExt, Diag} {
		if _, ok := p.CountersRaw[g]; ok {
			c.groups[g] = l.group(dir+"/"+string(g), g, state)
		}
	}
	c.markFull()
	s.samples = c.all()
	if deviceToo {
		for _, v := range l.group(d.dir+"/hw_counters", DevHW, 0).samples {
			classes := m.rdma(DevHW, v.name)
			present := slices.ContainsFunc(classes, func(m membership) bool { return !missing(m.class) })
			if len(classes) > 0 && !present {
				s.samples = append(s.samples, v)
			}
		}
	}
	if n := d.netdev(p.Netdev); n != nil {
		s.samples = append(s.samples, l.netdevStatistics(l.netdevDir(n.Name), linkStatistics...)...)
		if n.ethtool {
			for name, v := range l.ethtoolStats(n.Name, false) {
				s.samples = append(s.samples, sample{group: Ethtool, name: name, value: v})
			}
		}
	}
	return s, nil
}

var linkStatistics = []string{"rx_bytes", "tx_bytes", "rx_packets", "tx_packets", "rx_dropped", "tx_dropped", "rx_errors", "tx_errors"}

// expireCaches waits until what the driver has cached is older than this call.
func (l *lane) expireCaches(ctx context.Context, s *Snapshot, dirs ...string) error {
	var wait time.Duration
	for _, dir := range dirs {
		if ms := parsed(l, dir+"/lifespan", parseInt); ms != nil {
			wait = max(wait, time.Duration(*ms+1)*time.Millisecond)
		}
	}
	if wait > maxLifespan {
		s.stale = true
		return nil
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Delta is what a port's counters did between two snapshots.
type Delta struct {
	Device  string
	Port    int
	Seconds float64
	Source  Source

	// Counters is the increase by the driver's own name, never negative. A name that two
	// directories share, and all that isn't a counter of the RDMA port, stands behind its group:
	// "netdev/rx_dropped". Gauges are left out.
	Counters map[string]uint64

	// Unknown lists the counters whose increase can't be told: they fell, they are at one end
	// only, they were cached. One that is in Counters as well has stopped at its highest value:
	// the increase is "at least" that.
	Unknown []string

	// Classes adds Counters up. A class of which nothing is known is missing: it can't be told.
	Classes map[Class]uint64

	// Moved lists the counters of a class that increased.
	Moved map[Class][]string

	// Traffic is RDMA traffic, by TxBytes and so on; what the driver doesn't count is missing. A
	// software device's is that of its netdev, so it includes all else that went through there.
	Traffic map[string]uint64

	// Netdev is the same for the port's netdev. On hardware, RDMA is rarely part of it.
	Netdev map[string]uint64
}

// Sub returns the increase from before to after, or nil, which is "can't tell": if either
// snapshot is nil or they are of different ports.
func Sub(before, after *Snapshot) *Delta {
	if before == nil || after == nil || before.Device != after.Device || before.Port != after.Port {
		return nil
	}
	d := &Delta{
		Device:   after.Device,
		Port:     after.Port,
		Seconds:  after.Time.Sub(before.Time).Seconds(),
		Source:   after.Source,
		Counters: make(map[string]uint64),
		Unknown:  []string{},
		Classes:  make(map[Class]uint64),
		Moved:    make(map[Class][]string),
		Traffic:  make(map[string]uint64),
		Netdev:   make(map[string]uint64),
	}
	m := meaningOf(after.driver)
	replaced := before.id != after.id || before.driver != after.driver
	old, now := before.byKey(m), after.byKey(m)

	var rises []sample // with the increase as value
	for key, b := range now {
		a, ok := old[key]
		if !ok || replaced {
			d.Unknown = append(d.Unknown, key)
			continue
		}
		if (b.group == HW || b.group == DevHW) && (before.stale || after.stale) {
			d.Unknown = append(d.Unknown, key)
			continue
		}
		rise, known, least := increase(a, b)
		if !known || least {
			d.Unknown = append(d.Unknown, key)
		}
		if !known {
			continue
		}
		d.Counters[key] = rise
		b.value, b.full = rise, least
		rises = append(rises, b)
	}
	for key := range old {
		if _, ok := now[key]; !ok {
			d.Unknown = append(d.Unknown, key)
		}
	}
	slices.Sort(d.Unknown)
	d.classify(m, rises)
	d.traffic(m, rises, software(after.driver))
	return d
}

// byKey names the counters and drops the gauges.
func (s *Snapshot) byKey(m *meaning) map[string]sample {
	keyed := make(map[string]sample, len(s.samples))
	for _, v := range s.samples {
		if m.gauge(v.group, v.name) {
			continue
		}
		v.key = key(keyed, v)
		keyed[v.key] = v
	}
	return keyed
}

// key relies on the order in which a snapshot reads its groups: the first to have a name keeps
// it bare.
func key(taken map[string]sample, s sample) string {
	switch s.group {
	case HW, Diag, PMA, PMAExt:
		if _, ok := taken[s.name]; !ok {
			return s.name
		}
	}
	return string(s.group) + "/" + s.name
}

// increase tells by how much a counter rose. A fall is a reset or a wrap; it is taken for a wrap
// only if a 32-bit field (mlx5's Q counters) was about to. known is false if the increase can't
// be told, least is true if it may have been more.
func increase(a, b sample) (rise uint64, known, least bool) {
	const (
		wrap = 1 << 32
		near = 1 << 24 // what a counter of events can't do within a probe
	)
	switch {
	case a.full, a.group == HW && a.value == wrap-1 && b.value == wrap-1:
		return 0, false, false
	case b.value >= a.value:
		rise = b.value - a.value
		return rise, rise <= math.MaxInt64, b.full // beyond, it is the underflow of a value computed by the driver
	case (a.group == HW || a.group == DevHW) && a.value < wrap && a.value >= wrap-near && b.value < near:
		return b.value + wrap - a.value, true, false
	}
	return 0, false, false
}

func (d *Delta) classify(m *meaning, rises []sample) {
	for _, classes := range []func(Group, string) []membership{m.rdma, m.link} {
		for class, sum := range sumClasses(rises, classes) {
			d.Classes[class] = addSat(d.Classes[class], sum.Sum)
		}
		for _, r := range rises {
			if r.value == 0 {
				continue
			}
			for _, c := range classes(r.group, r.name) {
				d.Moved[c.class] = append(d.Moved[c.class], r.key)
			}
		}
	}
	for _, names := range d.Moved {
		slices.SortFunc(names, naturalCompare)
	}
}

func (d *Delta) traffic(m *meaning, rises []sample, software bool) {
	figures := m.normalise(func(g Group, name string) (uint64, bool, bool) {
		for _, r := range rises {
			if r.group == g && r.name == name {
				return r.value, !r.full, true
			}
		}
		_, lost := slices.BinarySearch(d.Unknown, name)
		return 0, false, lost
	})
	for figure, v := range figures {
		if v != nil {
			d.Traffic[figure] = *v
		}
	}
	for _, r := range rises {
		if r.group == Link && slices.Contains(linkStatistics[:4], r.name) {
			d.Netdev[r.name] = r.value
			if _, ok := d.Traffic[r.name]; !ok && software {
				d.Traffic[r.name] = r.value
			}
		}
	}
}
