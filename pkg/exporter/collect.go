package exporter

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// collector is the Exporter as the registry sees it. It reads nothing: see [Exporter.readPorts].
type collector struct{ *Exporter }

func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range table {
		if m != nodeInfo {
			ch <- m.desc
		}
	}
	ch <- nodeMetric(c.opt).desc
}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	sessions := -1
	if c.opt.Sessions != nil {
		sessions = c.opt.Sessions()
	}
	maintained, maintenance := c.opt.Maintenance != nil, false
	if maintained {
		maintenance = c.opt.Maintenance()
	}
	var discovered *Discovery
	if c.opt.Discovery != nil {
		discovered = new(c.opt.Discovery())
	}
	c.mu.Lock()
	b := make(batch, 0, 64+16*len(c.pairs)+32*len(c.nics))
	b = append(b, c.fixed...)
	if sessions >= 0 {
		b.add(sessionCount, nil, float64(sessions))
	}
	if c.opt.ClockResidual != nil {
		b.add(clockResidual, nil, c.opt.ClockResidual())
	}
	if maintained {
		b.add(maintenanceMode, nil, truth(maintenance))
	}
	c.collectNode(&b, discovered)
	c.collectPorts(&b)
	c.collectProbes(&b)
	c.collectSweeps(&b)
	now := time.Now().Round(0)
	for _, k := range slices.SortedFunc(maps.Keys(c.pairs), pairKey.compare) { // the registry sorts what is sorted far faster
		p := c.pairs[k]
		b = append(b, p.status...)
		if now.Sub(p.succeeded) <= c.probes[k.probe].shelfLife() {
			b = append(b, p.figures...)
		}
	}
	c.mu.Unlock()
	for _, m := range b {
		ch <- m
	}
}

func (c collector) collectNode(b *batch, d *Discovery) {
	if c.reload.tried {
		b.add(reloadOK, nil, truth(c.reload.err == nil))
	}
	if !c.reload.good.IsZero() {
		b.add(reloadTime, nil, unix(c.reload.good))
	}
	states := c.memory.peers(c.peers)
	for _, s := range peerStates {
		b.add(peerCount, pairs(peerCount.labels, string(s)), float64(states[s]))
	}
	if d != nil {
		for _, s := range passiveStates {
			b.add(peerCount, pairs(peerCount.labels, s), float64(d.States[s]))
		}
		for _, kind := range slices.Sorted(maps.Keys(d.Sources)) {
			s, labels := d.Sources[kind], pairs(discoveryFailures.labels, kind)
			b.count(discoveryFailures, labels, s.Failures, c.created)
			b.add(discoveryFailing, labels, float64(s.Failing))
			if !s.Good.IsZero() {
				b.add(discoveryTime, labels, unix(s.Good))
			}
		}
		b.count(peersReplaced, nil, d.Replaced, c.created)
	}
	b.add(pairCount, nil, float64(len(c.pairs)))
	b.add(pairLimit, nil, float64(c.opt.MaxPairs))
	b.count(pairsDropped, nil, c.dropped, c.created)
	if c.opt.Ports != nil {
		b.count(scrapeErrors, pairs(scrapeErrors.labels, "ports"), c.portErrs, c.created)
	}
}

func (c collector) collectPorts(b *batch) {
	type key struct {
		device string
		port   int
	}
	devices := map[string]bool{}
	seen := map[key]bool{} // two series with the same labels would spoil the scrape
	for _, p := range c.ports {
		device, port := clean(p.Device), itoa(p.Port)
		if seen[key{device, p.Port}] {
			continue
		}
		seen[key{device, p.Port}] = true
		info := append([]string{c.opt.Node, device, port, p.Rail, p.LinkLayer, p.Driver, p.Firmware, p.HCAType, p.BoardID, p.PCI, p.NUMANode, p.Netdev},
			environmentInfo(p.Environment)...)
		for i := range info {
			info[i] = clean(info[i])
		}
		b.add(deviceInfo, pairs(deviceInfo.labels, info...), 1)
		labels := pairs(portLabels, c.opt.Node, device, port)
		b.add(deviceUsable, labels, truth(p.Usable))
		if !p.Usable {
			b.add(deviceFault, with(labels, "reason", string(oneOf(probe.Reasons, &p.Reason))), 1)
		}
		if p.Up != nil {
			b.add(portUp, labels, truth(*p.Up))
		}
		b.count(portFlaps, labels, float64(p.Flaps), c.created)
		b.maybe(portRate, labels, p.RateBytesPerSecond)
		if !devices[device] {
			devices[device] = true
			b.count(environmentChanges, pairs(environmentChanges.labels, c.opt.Node, device), c.changes[device], c.created)
		}
		if p.Environment != nil {
			for _, k := range p.Environment.Checks() {
				if k.Verdict != counters.CheckUnknown {
					b.add(environmentOK, with(labels, "check", string(k.Name)), truth(k.Verdict == counters.CheckOK))
				}
			}
		}
		c.collectCounts(b, portCounter, labels, "counter", p.Counters)
		c.collectCounts(b, portEvents, labels, "class", p.Events)
	}
}

// environmentInfo are the last labels of deviceInfo.
func environmentInfo(e *counters.Environment) []string {
	if e == nil {
		return make([]string, 6)
	}
	f := e.Fingerprint()
	pcie := ""
	if p := e.PCI; p != nil && p.CurWidth != nil && p.CurGTS != nil {
		pcie = fmt.Sprintf("x%d %g GT/s", *p.CurWidth, *p.CurGTS)
	}
	return []string{f.Facts["driver version"], f.Facts["kernel"], f.Facts["rdma-core"], pcie, f.Facts["RDMA MTU"], f.ID}
}

func (c collector) collectCounts(b *batch, m *metric, labels []*dto.LabelPair, label string, values map[string]uint64) {
	seen := make(map[string]bool, len(values))
	for name, v := range values {
		if name = clean(name); !seen[name] {
			seen[name] = true
			b.add(m, with(labels, label, name), float64(v))
		}
	}
}

func (c collector) collectProbes(b *batch) {
	for name, p := range c.probes {
		labels := pairs(probeInterval.labels, c.opt.Node, name)
		if p.spec.Interval > 0 {
			b.add(probeInterval, labels, p.spec.Interval.Seconds())
		}
		for reason, v := range p.skips {
			b.count(probeSkips, with(labels, "reason", string(reason)), v, c.created)
		}
		b.count(scheduleMissed, labels, p.missed, c.created)
		b.count(schedulePanics, labels, p.panics, c.created)
		b.count(unconfirmed, labels, p.unconfirmed, c.created)
		if pl := p.covered(); pl != nil {
			if ratio, _, _, ok := pl.share(); ok {
				b.add(coverageRatio, labels, ratio)
			}
		}
	}
	for _, n := range c.nics {
		for outcome, v := range n.runs {
			b.count(probeRuns, with(n.labels, "result", string(outcome)), v, c.created)
		}
		for f, v := range n.failures {
			labels := with(with(with(n.labels, "stage", string(f.stage)), "reason", string(f.reason)), "scope", string(f.scope))
			b.count(probeFailures, labels, v, c.created)
		}
		b.count(probeBytes, n.labels, n.bytes, c.created)
		for side, v := range n.cpu {
			b.count(probeCPU, with(n.labels, "side", side), v, c.created)
		}
		for _, d := range n.latency {
			*b = append(*b, d.metric())
		}
	}
}
