package counters

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// pci reads a PCI function.
func (l *lane) pci(dir string) *PCI {
	link := l.pciLink(dir)
	p := &PCI{
		BDF:      link.BDF,
		Vendor:   l.text(dir + "/vendor"),
		Device:   l.text(dir + "/device"),
		NUMANode: parsed(l, dir+"/numa_node", parseInt),
		CurGTS:   link.CurGTS,
		MaxGTS:   link.MaxGTS,
		CurWidth: link.CurWidth,
		MaxWidth: link.MaxWidth,
		Warnings: []string{},
	}
	if drv, err := l.link(dir + "/driver"); err == nil {
		p.Driver = new(sanitise(drv))
	}
	physical := dir
	if pf, err := l.link(dir + "/physfn"); err == nil {
		p.IsVF = true
		p.PFBDF = new(sanitise(pf))
		if physical, err = l.resolve(dir + "/physfn"); err == nil {
			link = l.pciLink(physical)
			p.PF = &link
		} else {
			physical = dir
		}
	}
	if bridge := filepath.Dir(physical); isBDF(filepath.Base(bridge)) {
		if up := l.pciLink(bridge); up.known() {
			p.Upstream = &up
		}
	}

	if p.CurGTS == nil || p.MaxGTS == nil || p.CurWidth == nil || p.MaxWidth == nil {
		p.Warnings = append(p.Warnings, WarnPCIeUnknown)
	}
	if link.Degraded() {
		p.Warnings = append(p.Warnings, WarnPCIeDegraded)
	}
	if p.NUMANode != nil && *p.NUMANode < 0 {
		p.Warnings = append(p.Warnings, WarnNUMAUnknown)
	}
	return p
}

func (l *lane) pciLink(dir string) PCILink {
	return PCILink{
		BDF:      filepath.Base(dir),
		CurGTS:   parsed(l, dir+"/current_link_speed", parseGTS),
		MaxGTS:   parsed(l, dir+"/max_link_speed", parseGTS),
		CurWidth: parsed(l, dir+"/current_link_width", parseWidth),
		MaxWidth: parsed(l, dir+"/max_link_width", parseWidth),
	}
}

func (k PCILink) known() bool {
	return k.CurGTS != nil || k.MaxGTS != nil || k.CurWidth != nil || k.MaxWidth != nil
}

// Degraded reports whether the link works below what both its ends can do. It needs both values of a pair.
func (k PCILink) Degraded() bool {
	return k.CurGTS != nil && k.MaxGTS != nil && *k.CurGTS < *k.MaxGTS ||
		k.CurWidth != nil && k.MaxWidth != nil && *k.CurWidth < *k.MaxWidth
}

// findNetdevs attaches netdevs to a device and its ports. Four sources know them, each for other
// drivers: the rows of the GID table (RoCE, and the only one for a bond or for mana), rxe's
// parent file, the net directory of the parent device (IPoIB, iWARP), and netlink.
func (l *lane) findNetdevs(d *Device, parent string) {
	var names []string
	add := func(name string) {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	children := l.children(parent)
	for i := range d.Ports {
		p := &d.Ports[i]
		for _, g := range p.GIDs {
			if g.Netdev == nil || g.Foreign {
				continue
			}
			add(*g.Netdev)
			// A VLAN or macvlan above the port has rows of its own: prefer the port's.
			if p.Netdev == nil || isChild(children, *g.Netdev) && !isChild(children, *p.Netdev) {
				p.Netdev = g.Netdev
			}
		}
	}
	for _, c := range children {
		if c.master != "" && slices.Contains(names, c.master) {
			d.lag = true
			continue // the bond stands for it
		}
		add(c.name)
	}
	for i := range d.Ports {
		p := &d.Ports[i]
		if p.Netdev != nil {
			continue
		}
		switch c := childOf(children, p.Port, len(d.Ports)); {
		case c != "":
			p.Netdev = &c
		case d.Driver == "rxe":
			p.Netdev = parsed(l, d.dir+"/parent", parseNetdev)
		default:
			p.Netdev = l.netlinkNetdev(d.netlink, p.Port)
		}
		if p.Netdev != nil && l.exists(l.fs.path("class", "net", *p.Netdev)) {
			add(*p.Netdev)
		}
	}
	d.Netdevs = make([]Netdev, len(names))
	for i, name := range names {
		d.Netdevs[i].Name = name
	}
}

// child is a netdev of the same PCI function or auxiliary device.
type child struct {
	name   string
	port   int    // 1-based; 0 if the driver doesn't tell
	master string // the bond or bridge above it
}

func isChild(children []child, name string) bool {
	return slices.ContainsFunc(children, func(c child) bool { return c.name == name || c.master == name })
}

func (l *lane) children(parent string) []child {
	if parent == "" {
		return nil
	}
	names, _ := l.list(parent + "/net")
	var list []child
	for _, name := range names {
		dir := parent + "/net/" + name
		// In switchdev mode the netdevs of virtual functions are here too; they are not this
		// device's.
		if label, err := l.read(dir + "/phys_port_name"); err == nil && isRepresentor(label) {
			continue
		}
		c := child{name: name}
		if n := parsed(l, dir+"/dev_port", parseInt); n != nil {
			c.port = *n + 1
		}
		c.master, _ = l.link(dir + "/master")
		list = append(list, c)
	}
	return list
}

// isRepresentor recognises the phys_port_name of a VF's or sub-function's stand-in: pf0vf3, c1pf0sf88.
func isRepresentor(label string) bool {
	pf := strings.Index(label, "pf")
	return pf >= 0 && (strings.Contains(label[pf:], "vf") || strings.Contains(label[pf:], "sf"))
}

// childOf picks the netdev of a port. Several may share one, as IPoIB's partitions do: the first
// name is the plain one.
func childOf(children []child, port, ports int) string {
	for _, c := range children {
		if c.port == port || ports == 1 && len(children) == 1 {
			return c.name
		}
	}
	if ports == 1 && len(children) > 0 && children[0].port == 0 {
		return children[0].name
	}
	return ""
}

// netdev reads a network interface.
func (l *lane) netdev(n *Netdev) {
	dir := l.netdevDir(n.Name)
	n.MTU = parsed(l, dir+"/mtu", parseInt)
	n.SpeedMbps = parsed(l, dir+"/speed", func(s string) (int, bool) {
		v, err := strconv.ParseInt(s, 10, 32) // 4294967295 is an old kernel's -1
		return int(v), err == nil && v > 0
	})
	n.OperState = l.text(dir + "/operstate")
	n.Statistics = make(map[string]uint64)
	for _, s := range l.netdevStatistics(dir) {
		n.Statistics[s.name] = s.value
	}
}

func (l *lane) netdevDir(name string) string {
	dir := l.fs.path("class", "net", name)
	if !l.fs.live {
		if real, err := l.resolve(dir); err == nil {
			return real
		}
	}
	return dir
}

func (l *lane) netdevStatistics(dir string, only ...string) []sample {
	names := only
	if len(only) == 0 {
		names, _ = l.list(dir + "/statistics")
	}
	samples := make([]sample, 0, len(names))
	for _, name := range names {
		if v := parsed(l, dir+"/statistics/"+name, parseCounter); v != nil {
			samples = append(samples, sample{group: Link, name: sanitiseName(name), value: *v})
		}
	}
	return samples
}

func (l *lane) host() Host {
	h := Host{NUMANodes: make(map[string]string)}
	nodes, _ := l.list(l.fs.path("devices", "system", "node"))
	for _, node := range nodes {
		if n, ok := strings.CutPrefix(node, "node"); ok && n != "" && digits(n) == n {
			if cpus, err := l.read(l.fs.path("devices", "system", "node", node, "cpulist")); err == nil {
				h.NUMANodes[n] = sanitise(cpus)
			}
		}
	}
	cpus, _ := l.list(l.fs.path("devices", "system", "cpu"))
	for _, cpu := range cpus {
		if n, ok := strings.CutPrefix(cpu, "cpu"); ok && n != "" && digits(n) == n {
			g, err := l.read(l.fs.path("devices", "system", "cpu", cpu, "cpufreq", "scaling_governor"))
			if err == nil && !slices.Contains(h.CPUGovernors, g) {
				h.CPUGovernors = append(h.CPUGovernors, sanitise(g))
			}
		}
	}
	slices.Sort(h.CPUGovernors)
	return h
}

// warnings names each governor that lets the clock sleep.
func (h Host) warnings() []string {
	if len(h.CPUGovernors) == 0 {
		return []string{WarnGovernorPrefix + "unavailable"}
	}
	var w []string
	for _, g := range h.CPUGovernors {
		if g != "performance" {
			w = append(w, WarnGovernorPrefix+g)
		}
	}
	return w
}
