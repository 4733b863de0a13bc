package exporter

import (
	"cmp"
	"maps"
	"slices"
	"time"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// nicKey is a port and a probe that runs from it.
type nicKey struct {
	device string
	port   int
	probe  string
	op     string
}

// nic holds what a port's probes add up to, over all peers.
type nic struct {
	rail     string
	labels   []*dto.LabelPair
	runs     map[probe.Outcome]float64
	failures map[failure]float64
	bytes    float64
	cpu      map[string]float64 // by side; a side that never told is missing
	latency  map[distKey]*distribution
}

type failure struct {
	stage  probe.Stage
	reason probe.Reason
	scope  probe.Scope
}

// distKey tells apart the latencies that must not be mixed.
type distKey struct {
	path    string
	size    int
	measure string
}

func newNIC() *nic {
	n := &nic{
		runs: map[probe.Outcome]float64{}, failures: map[failure]float64{}, cpu: map[string]float64{}, latency: map[distKey]*distribution{},
	}
	for _, o := range probe.Outcomes {
		n.runs[o] = 0
	}
	return n
}

// place labels the series. The rail is empty in results that didn't find the port: what was known stays.
func (n *nic) place(src string, k nicKey, rail string) {
	if n.labels != nil && (rail == "" || rail == n.rail) {
		return
	}
	n.rail = rail
	n.labels = pairs(nicLabels, src, k.device, itoa(k.port), rail, k.probe, k.op)
	for d, dist := range n.latency {
		dist.labels = n.distLabels(src, k, d)
	}
}

func (n *nic) distLabels(src string, k nicKey, d distKey) []*dto.LabelPair {
	return pairs(histLabels, src, k.device, itoa(k.port), n.rail, d.path, k.probe, k.op, itoa(d.size), d.measure)
}

var (
	stages = []probe.Stage{
		probe.StageResolve, probe.StageConnect, probe.StageAuth, probe.StageAdmit, probe.StageSetup, probe.StageRun, probe.StageVerify,
		probe.StageTeardown,
	}
	scopes   = []probe.Scope{probe.ScopeLocal, probe.ScopePath, probe.ScopePeer}
	measures = []string{probe.HalfRTT, probe.Operation, "rtt"}
)

// observe adds a result; dists are the samples of each of its runs, or nil.
func (n *nic) observe(src string, k nicKey, r *probe.Result, dists []*samples, created *timestamppb.Timestamp) {
	n.runs[r.Outcome]++
	if r.Outcome == probe.Failed {
		n.failures[failure{oneOf(stages, r.Stage), oneOf(probe.Reasons, r.Reason), oneOf(scopes, r.Scope)}]++
	}
	for i, run := range r.Runs {
		n.bytes += float64(run.Bytes)
		for side, v := range map[string]*float64{"local": run.CPUSeconds.Local, "remote": run.CPUSeconds.Remote} {
			if v != nil && *v >= 0 {
				n.cpu[side] += *v
			}
		}
		if dists[i] == nil || run.Latency == nil {
			continue
		}
		d := distKey{r.Path, run.Size, oneOf(measures, &run.Latency.Measure)}
		dist := n.latency[d]
		if dist == nil {
			dist = &distribution{labels: n.distLabels(src, k, d), created: created}
			n.latency[d] = dist
		}
		dist.observe(dists[i], exemplar(r, run.Latency.Max))
	}
}

// ended is when a result's session was over, by the wall clock.
func ended(r *probe.Result) time.Time {
	if y := r.Time.Year(); y < 1970 || y > 9999 || r.Duration < 0 || r.Duration > 1e6 {
		return time.Now().Round(0)
	}
	return r.Time.Add(time.Duration(r.Duration * float64(time.Second))).Round(0)
}

// pairKey is a port, a probe, a peer and a message size: what the metrics with a dst have series for. The other labels
// follow from it.
type pairKey struct {
	nicKey
	dst  string
	size int
}

// compare orders keys as the names of their labels do.
func (k pairKey) compare(o pairKey) int {
	return cmp.Or(cmp.Compare(k.device, o.device), cmp.Compare(k.dst, o.dst), cmp.Compare(k.op, o.op), cmp.Compare(k.port, o.port),
		cmp.Compare(k.probe, o.probe), cmp.Compare(k.size, o.size))
}

// pair is the last that is known of a pairKey.
type pair struct {
	rail, dstDevice, path string // the last known

	ok        bool
	ended     time.Time
	succeeded time.Time // zero: never
	duration  float64   // seconds
	run       *probe.Run
	rate      float64              // line rate in bytes per second; 0: unknown
	tainted   map[probe.Taint]bool // those there ever were

	status, figures batch // made of the above
}

// observe takes over a result that isn't a skip.
func (p *pair) observe(r *probe.Result, size int, lineRate float64) {
	if r.Rail != "" {
		p.rail = r.Rail
	}
	if r.Path != "" {
		p.path = r.Path
	}
	if r.PeerDev != nil && *r.PeerDev != "" { // unknown to a session that didn't get so far
		p.dstDevice = *r.PeerDev
	}
	p.ok, p.ended, p.duration = false, ended(r), r.Duration
	if !r.Usable() {
		return
	}
	for i := range r.Runs {
		if r.Runs[i].Size != size {
			continue
		}
		p.ok, p.succeeded, p.run, p.rate = true, p.ended, &r.Runs[i], lineRate
	}
	for t := range p.tainted {
		p.tainted[t] = false
	}
	for _, t := range r.Taints {
		if slices.Contains(probe.Taints, t) {
			p.tainted[t] = true
		}
	}
}

// render makes the series anew; scrapes are far more frequent than results.
func (p *pair) render(src string, k pairKey) {
	labels := pairs(pairLabels, src, k.device, itoa(k.port), p.rail, k.dst, p.dstDevice, p.path, k.probe, k.op, itoa(k.size))
	p.status, p.figures = nil, nil
	p.status.add(probeSuccess, labels, truth(p.ok))
	p.status.add(lastRun, labels, unix(p.ended))
	p.status.add(probeDuration, labels, p.duration)
	if p.succeeded.IsZero() {
		return
	}
	p.status.add(lastSuccess, labels, unix(p.succeeded))

	for _, t := range slices.Sorted(maps.Keys(p.tainted)) {
		p.figures.add(probeTainted, with(labels, "reason", string(t)), truth(p.tainted[t]))
	}
	if l := p.run.Latency; l != nil {
		of := with(labels, "measure", oneOf(measures, &l.Measure))
		for i, v := range []*float64{&l.Max, &l.Mean, &l.Min, l.P50, l.P90, l.P99, l.P999} {
			p.figures.maybe(lastLatency, with(of, "stat", latencyStats[i]), v)
		}
	}
	if b := p.run.Bandwidth; b != nil {
		busier := 0.0
		for i, v := range []*float64{b.Rx, b.Tx} {
			if v != nil {
				p.figures.add(lastBandwidth, with(labels, "direction", directions[i]), *v)
				busier = max(busier, *v)
			}
		}
		if p.rate > 0 && busier > 0 {
			p.figures.add(lineRateRatio, labels, busier/p.rate)
		}
	}
	p.figures.maybe(lastMessageRate, labels, p.run.MessageRate)
	p.figures.maybe(lossRatio, labels, p.run.LossRatio)
}

// directions are the values of the label direction, in the order in which the registry sorts them.
var directions = []string{"rx", "tx"}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func unix(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }
