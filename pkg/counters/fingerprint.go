package counters

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Fingerprint is what must be alike for two results to be comparable. Counters, frequencies and whatever else changes by
// itself are no part of it.
type Fingerprint struct {
	ID    string            `json:"id"`    // hash of Facts: 16 hex digits
	Facts map[string]string `json:"facts"` // what is known, by name in words
}

// fact is one part of a fingerprint. Empty: not known.
type fact struct{ name, field, value string }

// facts lists what matters, known or not. Field is that of the environment, as in Missing.
func (e *Environment) facts() []fact {
	p, q := e.PCI, e.QoS
	if p == nil {
		p = &PCIState{}
	}
	if q == nil {
		q = &QoSState{}
	}
	driver := e.Driver
	if driver == unknown {
		driver = ""
	}
	bottleneck := ""
	if b := p.Bottleneck; b != nil {
		bottleneck = fmt.Sprintf("%s with %d lanes at %s GT/s", b.BDF, *b.CurWidth, known(b.CurGTS))
	}
	return []fact{
		{"driver", "driver", driver},
		{"firmware", "versions.firmware", known(e.Versions.Firmware)},
		{"driver version", "versions.driver", known(e.Versions.Driver)},
		{"kernel", "versions.kernel", known(e.Versions.Kernel)},
		{"rdma-core", "versions.rdma_core", known(e.Versions.RDMACore)},
		{"PCIe width", "pci.cur_width", known(p.CurWidth)},
		{"PCIe speed", "pci.cur_gts", known(p.CurGTS)},
		{"PCIe bottleneck", "pci.bottleneck", bottleneck},
		{"PCIe payload", "pci.max_payload", known(p.MaxPayload)},
		{"PCIe read request", "pci.max_read_request", known(p.MaxReadRequest)},
		{"PCIe relaxed ordering", "pci.relaxed_ordering", known(p.RelaxedOrdering)},
		{"NUMA node", "numa.node", known(e.NUMA.Node)},
		{"CPU governor", "cpu.governors", strings.Join(e.CPU.Governors, ", ")},
		{"CPU ceiling", "cpu.max_khz", known(e.CPU.MaxKHz)},
		{"deepest idle state", "cpu.deepest_idle", known(e.CPU.IdleState)},
		{"IOMMU", "iommu.type", known(e.IOMMU.Type)},
		{"rate", "link.rate_gbps", known(e.Link.RateGbps)},
		{"lanes", "link.rate_gbps", known(e.Link.Lanes)},
		{"netdev MTU", "link.netdev_mtu", known(e.Link.NetdevMTU)},
		{"RDMA MTU", "link.netdev_mtu", known(e.Link.ActiveMTU)},
		{"traffic class", "qos.traffic_class", known(q.TrafficClass)},
		{"trust", "qos.trust", known(q.Trust)},
		{"pause received", "qos.pause_rx", known(q.PauseRx)},
		{"pause sent", "qos.pause_tx", known(q.PauseTx)},
		{"PFC priorities", "qos.pfc", priorities(q.PFC)},
		{"ECN priorities", "qos.ecn", priorities(q.ECN)},
	}
}

func known[T string | int | uint64 | float64 | bool](v *T) string {
	if v == nil {
		return ""
	}
	switch v := any(*v).(type) {
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64)
	case bool:
		return map[bool]string{true: "on", false: "off"}[v]
	default:
		return fmt.Sprint(v)
	}
}

// priorities tells none from not known.
func priorities(list []int) string {
	switch {
	case list == nil:
		return ""
	case len(list) == 0:
		return "none"
	}
	return strings.Trim(fmt.Sprint(list), "[]")
}

// Fingerprint sums up the environment. What is not known is left out.
func (e *Environment) Fingerprint() Fingerprint {
	f := Fingerprint{Facts: maps.Clone(e.kept)}
	if f.Facts == nil {
		f.Facts = make(map[string]string)
	}
	for _, fact := range e.facts() {
		if fact.value != "" {
			f.Facts[fact.name] = fact.value
		}
	}
	h := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(f.Facts)) {
		fmt.Fprintf(h, "%q=%q\n", name, f.Facts[name])
	}
	f.ID = hex.EncodeToString(h.Sum(nil)[:8])
	return f
}

// Keep takes over what an earlier reading of the same port knew and this one could not read, so that a file that fails once
// and a link that is down for a moment don't change the fingerprint.
func (e *Environment) Keep(before *Environment) {
	if before == nil || before.Device != e.Device || before.Port != e.Port {
		return
	}
	was := before.Fingerprint().Facts
	lost := make(map[string]bool)
	for _, u := range e.Missing {
		lost[u.Name] = true
	}
	link := deref(e.Link.State) != "ACTIVE"
	for _, f := range e.facts() {
		v, had := was[f.name]
		if had && f.value == "" && (lost[f.field] || lost["device"] || link && strings.HasPrefix(f.field, "link.")) {
			if e.kept == nil {
				e.kept = make(map[string]string)
			}
			e.kept[f.name] = v
		}
	}
}

// Changes says in words what differs between this fingerprint and a later one: "firmware changed 22.1 → 22.2". It is empty if
// their IDs are the same.
func (f Fingerprint) Changes(later Fingerprint) []string {
	names := slices.Sorted(maps.Keys(f.Facts))
	for name := range later.Facts {
		if _, ok := f.Facts[name]; !ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	var changes []string
	for _, name := range names {
		was, before := f.Facts[name]
		is, now := later.Facts[name]
		switch {
		case !before:
			changes = append(changes, name+" was not known, is "+is)
		case !now:
			changes = append(changes, name+" was "+was+", is not known")
		case was != is:
			changes = append(changes, name+" changed "+was+" → "+is)
		}
	}
	return changes
}
