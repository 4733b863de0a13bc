package counters

import (
	"cmp"
	"errors"
	"math"
	"path"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// groupRead is one directory of counters.
type groupRead struct {
	exists     bool
	samples    []sample
	unreadable []Unreadable
	lifespan   *int // ms for which the driver's values are cached
}

func (g groupRead) values() map[string]uint64 {
	values := make(map[string]uint64, len(g.samples))
	for _, s := range g.samples {
		values[s.name] = s.value
	}
	return values
}

// group reads every counter of a directory. A file that refused before is not asked again for
// some time: state is that of the port, whose change makes another try worthwhile.
func (l *lane) group(dir string, g Group, state int) groupRead {
	names, err := l.list(dir)
	if errors.Is(err, unix.ENOENT) {
		return groupRead{}
	}
	r := groupRead{exists: true}
	prefix := path.Base(dir) + "/"
	if err != nil {
		r.unreadable = append(r.unreadable, Unreadable{Name: path.Base(dir), Errno: errno(err)})
		return r
	}
	if g == PMA {
		slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(pmaRank(a), pmaRank(b)) })
	}
	r.samples = make([]sample, 0, len(names))
	for _, file := range names {
		if file == "lifespan" && (g == HW || g == DevHW) {
			r.lifespan = parsed(l, dir+"/lifespan", parseInt)
			continue
		}
		name := sanitiseName(file)
		path := dir + "/" + file
		before, again := l.fs.recall(path, state)
		if !again {
			r.unreadable = append(r.unreadable, *before)
			continue
		}
		text, err := l.read(path)
		if errors.Is(err, unix.ENOENT) && !l.exists(path) { // gone since it was listed
			continue
		}
		u := Unreadable{Name: prefix + name}
		if err == nil {
			if v, ok := parseCounter(text); ok {
				r.samples = append(r.samples, sample{group: g, name: name, value: v})
				if before != nil {
					l.fs.accept(path)
				}
				continue
			}
			u.Text = new(sanitise(text))
		} else {
			u.Errno = errno(err)
		}
		r.unreadable = append(r.unreadable, u)
		if !errors.Is(err, errStuck) && !errors.Is(err, errLost) {
			l.fs.refuse(path, state, u)
		}
	}
	return r
}

func errno(err error) *string {
	var e unix.Errno
	if !errors.As(err, &e) {
		return new("EIO")
	}
	return new(cmp.Or(unix.ErrnoName(e), "E"+strconv.Itoa(int(e))))
}

func pmaRank(name string) int {
	for i, p := range pmaWidths {
		if p.name == name {
			return i
		}
	}
	return len(pmaWidths)
}

// portCounters is all that counts at one port.
type portCounters struct {
	meaning *meaning
	groups  map[Group]groupRead
	link    []sample // the netdev's and ethtool's
	narrow  bool     // a 32-bit traffic counter has stopped and nothing wider exists
}

func (l *lane) portCounters(d *Device, port int, netdev string, state int) portCounters {
	dir := d.dir + "/ports/" + strconv.Itoa(port)
	c := portCounters{meaning: meaningOf(d.Driver), groups: make(map[Group]groupRead, 4)}
	c.groups[HW] = l.hwCounters(d, port, dir, state)
	for _, g := range []Group{PMA, PMAExt, Diag} {
		c.groups[g] = l.group(dir+"/"+string(g), g, state)
	}
	c.markFull()
	for name, v := range d.ethtool[netdev] {
		c.link = append(c.link, sample{group: Ethtool, name: name, value: v})
	}
	if n := d.netdev(&netdev); n != nil && software(d.Driver) {
		for name, v := range n.Statistics {
			c.link = append(c.link, sample{group: Link, name: name, value: v})
		}
	}
	return c
}

// hwCounters reads a port's hw_counters. Netlink is asked first: it brings the whole port in one
// message, past the driver's cache, and with it the optional counters that sysfs never shows.
func (l *lane) hwCounters(d *Device, port int, dir string, state int) groupRead {
	if r, ok := l.netlinkGroup(d, port, dir); ok {
		return r
	}
	return l.group(dir+"/hw_counters", HW, state)
}

func (l *lane) netlinkGroup(d *Device, port int, dir string) (groupRead, bool) {
	if d.netlink == nil {
		return groupRead{}, false
	}
	samples, err := l.netlinkCounters(d.netlink, port)
	if err != nil {
		return groupRead{}, false
	}
	return groupRead{exists: true, samples: samples, lifespan: parsed(l, dir+"/hw_counters/lifespan", parseInt)}, true
}

// markFull finds the PMA counters that have reached all ones. Their width is that of the field
// the kernel reads; traffic has 64 bits if the extended class shows, by its unicast files.
func (c *portCounters) markFull() {
	pma := c.groups[PMA]
	traffic := 32
	extended := func(name string) bool { return name == "unicast_xmit_packets" || name == "multicast_xmit_packets" }
	if slices.ContainsFunc(pma.samples, func(s sample) bool { return extended(s.name) }) ||
		slices.ContainsFunc(pma.unreadable, func(u Unreadable) bool { return extended(path.Base(u.Name)) }) {
		traffic = 64
	}
	for i, s := range pma.samples {
		rank := pmaRank(s.name)
		if rank == len(pmaWidths) {
			continue
		}
		bits := pmaWidths[rank].bits
		if bits == 0 {
			bits = traffic
		}
		full := s.value == uint64(math.MaxUint64)>>(64-bits)
		pma.samples[i].full = full
		if full && pmaWidths[rank].bits == 0 && bits == 32 && !c.groups[PMAExt].exists {
			c.narrow = true
		}
	}
}

// find looks a counter up for meaning.normalise.
func (c *portCounters) find(g Group, name string) (value uint64, known, present bool) {
	for _, s := range c.groups[g].samples {
		if s.name == name {
			return s.value, !s.full, true
		}
	}
	return 0, false, false
}

// all returns the counters of the RDMA port.
func (c *portCounters) all() []sample {
	var all []sample
	for _, g := range []Group{HW, Diag, PMA, PMAExt} {
		all = append(all, c.groups[g].samples...)
	}
	return all
}

// fill puts the counters into a port.
func (c *portCounters) fill(p *Port, d *Device) {
	p.CountersRaw = make(map[Group]map[string]uint64)
	p.Unreadable, p.Saturated = []Unreadable{}, []string{}
	for _, g := range []Group{PMA, PMAExt, HW, Diag} {
		r := c.groups[g]
		if !r.exists {
			continue
		}
		p.CountersRaw[g] = r.values()
		p.Unreadable = append(p.Unreadable, r.unreadable...)
		for _, s := range r.samples {
			if s.full {
				p.Saturated = append(p.Saturated, string(g)+"/"+s.name)
			}
		}
	}
	p.LifespanMs = c.groups[HW].lifespan
	p.Normalised = c.meaning.normalise(c.find)
	p.Classes = sumClasses(c.all(), c.meaning.rdma)
	if link := sumClasses(append(c.groups[PMA].samples, c.link...), c.meaning.link); len(link) > 0 {
		p.LinkClasses = link
	}
}

func (c *portCounters) warnings() []string {
	var w []string
	if !c.groups[PMA].exists {
		w = append(w, WarnNoPMA)
	}
	if !c.groups[HW].exists {
		w = append(w, WarnNoHW)
	}
	var refused, notAvailable, full bool
	for _, g := range c.groups {
		for _, u := range g.unreadable {
			if deref(u.Text) == "N/A (no PMA)" {
				notAvailable = true
			} else {
				refused = true
			}
		}
		full = full || slices.ContainsFunc(g.samples, func(s sample) bool { return s.full })
	}
	for warning, on := range map[string]bool{WarnPMANotAvail: notAvailable, WarnUnreadable: refused, WarnSaturated: full, WarnNarrow: c.narrow} {
		if on {
			w = append(w, warning)
		}
	}
	return w
}
