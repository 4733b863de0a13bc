package counters

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Inventory is what one sysfs tree says about RDMA. Its JSON is the machine interface of
// `rdmabenchd devices --json`. What is absent or can't be read is null.
type Inventory struct {
	Tree     string   `json:"tree"`   // last element of the root
	Kernel   *string  `json:"kernel"` // release of the running kernel; null for a copied tree
	Devices  []Device `json:"devices"`
	Host     Host     `json:"host"`
	Warnings []string `json:"warnings"`

	// Seen counts the devices that were listed and accepted. Those that went away before they
	// were read are not in Devices; those that don't answer are, with WarnNotAnswering.
	Seen int `json:"-"`

	// Ethtool is `ethtool -S` of each netdev of a device. Collect keeps only what is in a class.
	Ethtool map[string]map[string]uint64 `json:"ethtool,omitempty"`
}

// Device is one RDMA device.
type Device struct {
	Name         string    `json:"device"`
	Driver       string    `json:"driver"`    // kernel driver, without the bus driver's suffix: mlx5, bnxt_re
	Transport    Transport `json:"transport"` // of its first port
	NodeType     *string   `json:"node_type"`
	NodeGUID     *string   `json:"node_guid"`
	SysImageGUID *string   `json:"sys_image_guid"`
	FwVer        *string   `json:"fw_ver"` // null also where the driver prints an empty line
	HCAType      *string   `json:"hca_type"`
	BoardID      *string   `json:"board_id"`
	NodeDesc     *string   `json:"node_desc"`
	PCI          *PCI      `json:"pci"` // null for software devices
	Netdevs      []Netdev  `json:"netdevs"`
	Ports        []Port    `json:"ports"`
	Warnings     []string  `json:"warnings"`

	// HWCounters are the driver's counters of the whole device; absent if it has none.
	HWCounters   map[string]uint64  `json:"device_hw_counters,omitempty"`
	HWClasses    map[Class]ClassSum `json:"device_classes,omitempty"`
	HWUnreadable []Unreadable       `json:"device_unreadable,omitempty"`

	dir     string // in the tree
	id      ident
	lag     bool              // its netdev is a bond of several ports
	netlink *netlink.RdmaLink // nil if rdma netlink doesn't know it
	ethtool map[string]map[string]uint64
}

// Transport is the wire protocol of a device.
type Transport string

// The transports.
const (
	IB    Transport = "ib"
	RoCE  Transport = "roce"
	IWARP Transport = "iwarp"
	OPA   Transport = "opa"
	EFA   Transport = "efa"
	USNIC Transport = "usnic"
)

// unknown is the driver and transport of a device that doesn't tell.
const unknown = "unknown"

// PCI is the PCI function of a device; for an auxiliary device (an mlx5 sub-function), the
// function above it.
type PCI struct {
	BDF      string   `json:"bdf"`
	Vendor   *string  `json:"vendor"`
	Device   *string  `json:"device"`
	Driver   *string  `json:"driver"`
	NUMANode *int     `json:"numa_node"` // -1: the platform doesn't tell
	CurGTS   *float64 `json:"cur_gts"`   // GT/s per lane
	MaxGTS   *float64 `json:"max_gts"`
	CurWidth *int     `json:"cur_width"` // lanes
	MaxWidth *int     `json:"max_width"`
	IsVF     bool     `json:"is_vf"`
	PFBDF    *string  `json:"pf_bdf,omitempty"`
	PF       *PCILink `json:"pf_link,omitempty"`  // of a VF, which has no link of its own
	Upstream *PCILink `json:"upstream,omitempty"` // the bridge above, if it tells
	Warnings []string `json:"warnings"`
}

// PCILink is the link of another function than the device's.
type PCILink struct {
	BDF      string   `json:"bdf"`
	CurGTS   *float64 `json:"cur_gts"`
	MaxGTS   *float64 `json:"max_gts"`
	CurWidth *int     `json:"cur_width"`
	MaxWidth *int     `json:"max_width"`
}

// Netdev is a network interface of a device.
type Netdev struct {
	Name       string            `json:"name"`
	MTU        *int              `json:"mtu"`
	SpeedMbps  *int              `json:"speed_mbps"` // null if unknown or administratively down
	OperState  *string           `json:"operstate"`
	Statistics map[string]uint64 `json:"statistics"`

	ethtool bool // ethtool has something of a class for it
}

// Port is one port of a device.
type Port struct {
	Port            int      `json:"port"`
	State           *string  `json:"state"` // the kernel's word: ACTIVE, DOWN, INIT …
	StateID         *int     `json:"state_id"`
	PhysState       *string  `json:"phys_state"`
	LinkLayer       *string  `json:"link_layer"`
	RateRaw         *string  `json:"rate_raw"`
	RateGbps        *float64 `json:"rate_gbps"`
	RateTrustworthy bool     `json:"rate_trustworthy"` // false where drivers are known to print something else
	LID             *int     `json:"lid"`
	SMLID           *int     `json:"sm_lid"`
	Netdev          *string  `json:"netdev"`
	NetdevMTU       *int     `json:"netdev_mtu"`
	NetdevSpeedMbps *int     `json:"netdev_speed_mbps"`
	RDMAMTU         *int     `json:"rdma_mtu"` // derived from the netdev's; null where only verbs knows it
	GIDs            []GID    `json:"gids"`     // rows in use
	RoCEv2GIDs      []GID    `json:"rocev2_gids"`

	// CountersRaw is every counter of the port by group and the driver's own name. A group is
	// missing if there is no such directory.
	CountersRaw map[Group]map[string]uint64 `json:"counters_raw"`

	// Normalised is traffic in bytes and packets. A figure is missing if the driver doesn't count
	// it, and null if its counter has stopped.
	Normalised  map[string]*uint64 `json:"counters_normalised"`
	Classes     map[Class]ClassSum `json:"classes"`                // of the RDMA device
	LinkClasses map[Class]ClassSum `json:"link_classes,omitempty"` // of the link below, ethtool's included
	Unreadable  []Unreadable       `json:"unreadable"`
	Saturated   []string           `json:"saturated"` // counters that stopped at all ones: "at least"
	LifespanMs  *int               `json:"lifespan_ms"`
	Warnings    []string           `json:"warnings"`
}

// GID is a row in use of a port's GID table.
type GID struct {
	Index   int     `json:"index"`
	GID     string  `json:"gid"`
	Type    *string `json:"type"` // "IB/RoCE v1" or "RoCE v2"
	Netdev  *string `json:"ndev"`
	IPv4    *string `json:"ipv4"`              // if the GID is a mapped IPv4 address
	Foreign bool    `json:"foreign,omitempty"` // its netdev is not in this network namespace: unusable here
}

// Unreadable is a counter that exists and gave no value.
type Unreadable struct {
	Name  string  `json:"name"`            // group/name
	Errno *string `json:"errno,omitempty"` // of the failed read; ETIMEDOUT if it hangs
	Text  *string `json:"text,omitempty"`  // what it said instead of a number
}

// Host is what matters of the machine around the devices.
type Host struct {
	NUMANodes    map[string]string `json:"numa_nodes"`    // node to its CPU list
	CPUGovernors []string          `json:"cpu_governors"` // in use; null in most VMs
}

// Warnings of an inventory, a device, its PCI function or a port.
const (
	WarnNoDevice       = "no_rdma_device"
	WarnNotAnswering   = "not_answering" // reads of the device hang
	WarnNoPCI          = "no_pci_parent"
	WarnSoftware       = "software_rdma"
	WarnNoNetdev       = "no_netdev"
	WarnNetlinkNetdev  = "netdev_only_by_netlink"
	WarnForeignNetdev  = "netdev_foreign_netns"
	WarnNodeGUIDZero   = "node_guid_zero"
	WarnVF             = "vf"
	WarnLAG            = "lag"
	WarnPCIeUnknown    = "pcie_link_unknown"
	WarnPCIeDegraded   = "pcie_degraded"
	WarnNUMAUnknown    = "numa_unknown"
	WarnNoPMA          = "counters_dir_missing"
	WarnNoHW           = "hw_counters_dir_missing"
	WarnPMANotAvail    = "counters_na_no_pma"
	WarnUnreadable     = "counters_unreadable"
	WarnSaturated      = "counter_saturated"
	WarnNarrow         = "counters_32bit_only"
	WarnPortDown       = "port_down"
	WarnPortNotActive  = "port_not_active"
	WarnStateUnknown   = "port_state_unknown"
	WarnNoSM           = "no_subnet_manager"
	WarnRateUnknown    = "rate_unknown"
	WarnRateDefault    = "rate_is_default_for_unknown_speed"
	WarnRateBelow      = "rate_below_netdev_speed"
	WarnRateAbove      = "rate_above_netdev_speed"
	WarnRateLAG        = "rate_is_one_lag_member"
	WarnGovernorPrefix = "cpu_governor_" // followed by the governor, or unavailable
)

// Values of Port.StateID.
const (
	StateDown   = 1
	StateInit   = 2
	StateArmed  = 3
	StateActive = 4
)

// Active reports whether traffic can flow.
func (p *Port) Active() bool { return p.StateID != nil && *p.StateID == StateActive }

// order sorts devices as the PCI bus does, those without a function last.
func (d *Device) order() uint64 {
	if d.PCI == nil {
		return math.MaxUint64
	}
	return bdfOrder(d.PCI.BDF)
}

func (d *Device) port(n int) *Port {
	for i := range d.Ports {
		if d.Ports[i].Port == n {
			return &d.Ports[i]
		}
	}
	return nil
}

func (d *Device) netdev(name *string) *Netdev {
	if name == nil {
		return nil
	}
	for i := range d.Netdevs {
		if d.Netdevs[i].Name == *name {
			return &d.Netdevs[i]
		}
	}
	return nil
}

// deviceDir returns the directory of a device and what tells it from a later one of that name.
func (l *lane) deviceDir(name string) (dir string, id ident, err error) {
	if name == "" || name == "." || name == ".." || strings.Contains(name, "/") {
		return "", ident{}, unix.ENOENT // no name of a file
	}
	dir = l.fs.path("class", "infiniband", name)
	if !l.fs.live {
		if dir, err = l.resolve(dir); err != nil {
			return "", ident{}, err
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return "", ident{}, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return "", ident{}, unix.ENOTDIR
	}
	id, err = l.fs.identify(dir)
	return dir, id, err
}

// text reads an optional file; nil if it is absent or can't be read.
func (l *lane) text(path string) *string {
	s, err := l.read(path)
	if err != nil {
		return nil
	}
	return new(sanitise(s))
}

// parsed reads an optional file and parses it.
func parsed[T any](l *lane, path string, parse func(string) (T, bool)) *T {
	s, err := l.read(path)
	if err != nil {
		return nil
	}
	v, ok := parse(s)
	if !ok {
		return nil
	}
	return &v
}

func parseInt(s string) (int, bool) {
	v, err := strconv.Atoi(s)
	return v, err == nil
}

// device reads one device in full.
func (l *lane) device(name, dir string, id ident) *Device {
	d := &Device{
		Name:         sanitise(name),
		NodeType:     l.text(dir + "/node_type"),
		NodeGUID:     l.text(dir + "/node_guid"),
		SysImageGUID: l.text(dir + "/sys_image_guid"),
		FwVer:        l.text(dir + "/fw_ver"),
		HCAType:      l.text(dir + "/hca_type"),
		BoardID:      l.text(dir + "/board_id"),
		NodeDesc:     l.text(dir + "/node_desc"),
		Ports:        []Port{},
		dir:          dir,
		id:           id,
	}
	if d.FwVer != nil && *d.FwVer == "" {
		d.FwVer = nil
	}

	// The parent is the PCI function, or an auxiliary device below it.
	var parent, function string
	if p, err := l.resolve(dir + "/device"); err == nil {
		parent = p
		function = l.functionAbove(p)
	}
	if function != "" {
		d.PCI = l.pci(function)
	}
	d.Driver = l.driver(d, parent)

	ports, _ := l.list(dir + "/ports")
	for _, p := range ports {
		if n, err := strconv.Atoi(p); err == nil && n > 0 {
			port := Port{Port: n}
			l.gids(&port, dir+"/ports/"+p)
			d.Ports = append(d.Ports, port)
		}
	}
	if l.fs.live {
		d.netlink = l.netlinkLink(name)
	}
	l.findNetdevs(d, parent)
	l.live(d, true)
	return d
}

// refresh reads again what changes between events.
func (l *lane) refresh(old *Device) *Device {
	d := *old
	d.Ports = make([]Port, len(old.Ports))
	for i, p := range old.Ports {
		d.Ports[i] = Port{Port: p.Port, GIDs: p.GIDs, RoCEv2GIDs: p.RoCEv2GIDs, Netdev: p.Netdev}
	}
	d.Netdevs = make([]Netdev, len(old.Netdevs))
	for i, n := range old.Netdevs {
		d.Netdevs[i] = Netdev{Name: n.Name, ethtool: n.ethtool}
	}
	l.live(&d, false)
	return &d
}

// live reads what changes between events, and judges it.
func (l *lane) live(d *Device, full bool) {
	d.ethtool = nil
	for i := range d.Netdevs {
		n := &d.Netdevs[i]
		l.netdev(n)
		if !full && !n.ethtool {
			continue
		}
		if stats := l.ethtoolStats(n.Name, full); len(stats) > 0 {
			if d.ethtool == nil {
				d.ethtool = make(map[string]map[string]uint64)
			}
			d.ethtool[n.Name] = stats
			for name := range stats {
				n.ethtool = n.ethtool || linkIndex.find(name) != nil
			}
		}
	}
	for i := range d.Ports {
		l.port(d, &d.Ports[i])
	}
	d.Transport = transport(d)

	m := meaningOf(d.Driver)
	hw := l.group(d.dir+"/hw_counters", DevHW, 0)
	d.HWCounters, d.HWUnreadable, d.HWClasses = nil, hw.unreadable, nil
	if hw.exists {
		d.HWCounters = hw.values()
	}
	if classes := sumClasses(hw.samples, m.rdma); len(classes) > 0 {
		d.HWClasses = classes
	}

	w := []string{}
	if d.PCI != nil {
		w = append(w, d.PCI.Warnings...)
		if d.PCI.IsVF {
			w = append(w, WarnVF)
		}
	} else {
		w = append(w, WarnNoPCI)
	}
	if software(d.Driver) {
		w = append(w, WarnSoftware)
	}
	if len(d.Netdevs) == 0 {
		if d.Transport == IWARP { // its GID rows name none
			w = append(w, WarnNetlinkNetdev)
		} else {
			w = append(w, WarnNoNetdev)
		}
	}
	if d.NodeGUID != nil && strings.Trim(*d.NodeGUID, "0:") == "" {
		w = append(w, WarnNodeGUIDZero)
	}
	if d.lag {
		w = append(w, WarnLAG)
	}
	slices.Sort(w)
	d.Warnings = slices.Compact(w)
}

// busDrivers maps drivers of the PCI function to that of the RDMA device on it.
var busDrivers = map[string]string{
	"mlx5_core": "mlx5", "mlx4_core": "mlx4", "ib_mthca": "mthca", "ib_qib": "qib", "bnxt_en": "bnxt_re",
	"ice": "irdma", "i40e": "irdma", "idpf": "irdma", "iavf": "irdma", "hns3": "hns", "hns_roce": "hns",
	"qede": "qedr", "be2net": "ocrdma", "enic": "usnic",
}

// driver finds the kernel driver of a device. Its name is no evidence: udev renames it.
func (l *lane) driver(d *Device, parent string) string {
	name := ""
	switch {
	case d.PCI != nil && d.PCI.Driver != nil:
		name = *d.PCI.Driver
	case parent != "": // a platform device
		if drv, err := l.link(parent + "/driver"); err == nil {
			name = sanitise(drv)
		}
	case l.exists(d.dir + "/parent"):
		return "rxe"
	case strings.HasPrefix(deref(d.NodeType), "4:"):
		return "siw"
	}
	if name == "i40e" && strings.EqualFold(deref(d.HCAType), "i40iw") { // irdma's predecessor
		return "i40iw"
	}
	if rdma, ok := busDrivers[name]; ok {
		return rdma
	}
	return cmp.Or(name, unknown)
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// transport decides by node type and link layer; the text of a GID's type says "IB/RoCE v1" for
// plain IB and iWARP as well.
func transport(d *Device) Transport {
	id, _, _ := parseState(deref(d.NodeType))
	switch {
	case d.Driver == "hfi1":
		return OPA
	case d.Driver == "efa":
		return EFA
	case id == 4:
		return IWARP
	case id == 5 || id == 6:
		return USNIC
	}
	for _, p := range d.Ports {
		switch deref(p.LinkLayer) {
		case "InfiniBand":
			return IB
		case "Ethernet":
			return RoCE
		}
	}
	return unknown
}

// gids reads the table of a port. Empty rows may stand between used ones; their type reads
// EINVAL, so it is not asked for.
func (l *lane) gids(p *Port, dir string) {
	p.GIDs, p.RoCEv2GIDs = []GID{}, []GID{}
	rows, _ := l.list(dir + "/gids")
	for _, row := range rows {
		index, err := strconv.Atoi(row)
		if err != nil {
			continue
		}
		text, err := l.read(dir + "/gids/" + row)
		if err != nil {
			continue
		}
		addr, ok := parseGID(text)
		if !ok || addr.IsUnspecified() {
			continue
		}
		g := GID{
			Index:  index,
			GID:    text,
			Type:   l.text(dir + "/gid_attrs/types/" + row),
			Netdev: parsed(l, dir+"/gid_attrs/ndevs/"+row, parseNetdev),
		}
		if addr.Is4In6() {
			g.IPv4 = new(addr.Unmap().String())
		}
		g.Foreign = g.Netdev != nil && !l.exists(l.fs.path("class", "net", *g.Netdev))
		p.GIDs = append(p.GIDs, g)
		if deref(g.Type) == "RoCE v2" {
			p.RoCEv2GIDs = append(p.RoCEv2GIDs, g)
		}
	}
}

// port reads state and counters of one port.
func (l *lane) port(d *Device, p *Port) {
	dir := d.dir + "/ports/" + strconv.Itoa(p.Port)
	w := []string{}

	p.State, p.StateID = l.state(dir + "/state")
	p.PhysState, _ = l.state(dir + "/phys_state")
	p.LinkLayer = l.text(dir + "/link_layer")
	p.LID = parsed(l, dir+"/lid", parseLID)
	p.SMLID = parsed(l, dir+"/sm_lid", parseLID)
	if n := d.netdev(p.Netdev); n != nil {
		p.NetdevMTU, p.NetdevSpeedMbps = n.MTU, n.SpeedMbps
		if n.MTU != nil && deref(p.LinkLayer) == "Ethernet" {
			if mtu, ok := rdmaMTU(*n.MTU); ok {
				p.RDMAMTU = &mtu
			}
		}
	}
	switch {
	case p.StateID == nil:
		w = append(w, WarnStateUnknown)
	case *p.StateID == StateDown:
		w = append(w, WarnPortDown)
	case *p.StateID != StateActive:
		w = append(w, WarnPortNotActive)
	}
	if deref(p.LinkLayer) == "InfiniBand" && p.StateID != nil && *p.StateID != StateDown && p.SMLID != nil && *p.SMLID == 0 {
		w = append(w, WarnNoSM)
	}
	if slices.ContainsFunc(p.GIDs, func(g GID) bool { return g.Foreign }) {
		w = append(w, WarnForeignNetdev)
	}

	p.RateRaw = l.text(dir + "/rate")
	if p.RateRaw != nil {
		if gbps, ok := parseRate(*p.RateRaw); ok {
			p.RateGbps = &gbps
		}
	}
	if why := rateDoubt(d, p); why != "" {
		w = append(w, why)
	} else {
		p.RateTrustworthy = p.StateID != nil && (*p.StateID != StateDown || software(d.Driver))
	}

	c := l.portCounters(d, p.Port, deref(p.Netdev), value(p.StateID))
	c.fill(p, d)
	w = append(w, c.warnings()...)
	slices.Sort(w)
	p.Warnings = w
}

func value(p *int) int {
	if p == nil {
		return 0
	}
	return *p
}

func (l *lane) state(path string) (name *string, id *int) {
	s, err := l.read(path)
	if err != nil {
		return nil, nil
	}
	n, text, ok := parseState(s)
	if !ok {
		return nil, nil
	}
	return new(sanitise(text)), &n
}

// rateDoubt names why the rate file is known to be wrong; empty if nothing speaks against it.
func rateDoubt(d *Device, p *Port) string {
	if p.RateGbps == nil || *p.RateGbps == 0 {
		return WarnRateUnknown
	}
	if d.lag {
		return WarnRateLAG
	}
	if deref(p.LinkLayer) != "Ethernet" {
		return ""
	}
	speed := p.NetdevSpeedMbps
	switch {
	case speed == nil && strings.HasPrefix(*p.RateRaw, "2.5 "):
		return WarnRateDefault
	case speed != nil && *p.RateGbps*1000 < float64(*speed):
		return WarnRateBelow
	case speed != nil && *p.RateGbps*1000 > float64(*speed):
		return WarnRateAbove
	}
	return ""
}
