package counters

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
)

// Fingerprint is what must be alike for two results to be comparable. Counters, frequencies and whatever else changes by
// itself are no part of it.
type Fingerprint struct {
	ID    string            `json:"id"`    // hash of Facts: 16 hex digits
	Facts map[string]string `json:"facts"` // what is known, by name in words
}

// Fingerprint sums up the environment. What is not known is left out.
func (e *Environment) Fingerprint() Fingerprint {
	f := make(map[string]string)
	maps.Copy(f, e.kept)
	fact(f, "firmware", e.Versions.Firmware)
	fact(f, "driver version", e.Versions.Driver)
	fact(f, "kernel", e.Versions.Kernel)
	fact(f, "rdma-core", e.Versions.RDMACore)
	if e.Driver != unknown {
		f["driver"] = e.Driver
	}
	if p := e.PCI; p != nil {
		fact(f, "PCIe width", p.CurWidth)
		fact(f, "PCIe speed", p.CurGTS)
		fact(f, "PCIe payload", p.MaxPayload)
		fact(f, "PCIe read request", p.MaxReadRequest)
		fact(f, "PCIe relaxed ordering", p.RelaxedOrdering)
		if p.Bottleneck != nil {
			f["PCIe bottleneck"] = fmt.Sprintf("%s at x%d %s GT/s", p.Bottleneck.BDF, *p.Bottleneck.CurWidth, decimal(*p.Bottleneck.CurGTS))
		}
	}
	fact(f, "NUMA node", e.NUMA.Node)
	fact(f, "CPU ceiling", e.CPU.MaxKHz)
	if e.CPU.Governors != nil {
		f["CPU governor"] = fmt.Sprint(e.CPU.Governors)
	}
	fact(f, "deepest idle state", e.CPU.IdleState)
	fact(f, "IOMMU", e.IOMMU.Type)
	fact(f, "rate", e.Link.RateGbps)
	fact(f, "lanes", e.Link.Lanes)
	fact(f, "netdev MTU", e.Link.NetdevMTU)
	fact(f, "RDMA MTU", e.Link.ActiveMTU)
	if q := e.QoS; q != nil {
		fact(f, "traffic class", q.TrafficClass)
		fact(f, "trust", q.Trust)
		fact(f, "pause received", q.PauseRx)
		fact(f, "pause sent", q.PauseTx)
		if q.PFC != nil {
			f["PFC priorities"] = fmt.Sprint(q.PFC)
		}
		if q.ECN != nil {
			f["ECN priorities"] = fmt.Sprint(q.ECN)
		}
	}
	return Fingerprint{ID: hash(f), Facts: f}
}

// Keep makes the fingerprint hold what an earlier reading of the same port knew and this one could not find out, so that a
// read that fails once doesn't look like a change.
func (e *Environment) Keep(before *Environment) {
	if before == nil || before.Device != e.Device || before.Port != e.Port {
		return
	}
	e.kept = before.Fingerprint().Facts
}

func fact[T string | int | uint64 | float64 | bool](f map[string]string, name string, v *T) {
	if v == nil {
		return
	}
	switch v := any(*v).(type) {
	case float64:
		f[name] = decimal(v)
	case bool:
		f[name] = map[bool]string{true: "on", false: "off"}[v]
	default:
		f[name] = fmt.Sprint(v)
	}
}

func decimal(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }

func hash(facts map[string]string) string {
	h := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(facts)) {
		fmt.Fprintf(h, "%q=%q\n", name, facts[name])
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// Changes says in words what differs between this fingerprint and a later one: "firmware changed 22.1 → 22.2". What one of
// the two doesn't know is no difference.
func (f Fingerprint) Changes(later Fingerprint) []string {
	var changes []string
	for _, name := range slices.Sorted(maps.Keys(f.Facts)) {
		if was, is := f.Facts[name], later.Facts[name]; is != "" && was != is {
			changes = append(changes, name+" changed "+was+" → "+is)
		}
	}
	return changes
}
