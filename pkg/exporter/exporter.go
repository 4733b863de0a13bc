// Package exporter turns the results of probes into Prometheus metrics, a status page and a JSON API. It measures and
// schedules nothing; it is told every [probe.Result], what is to be probed, and reads the ports when it is asked.
//
// No other package imports the Prometheus client library. The metrics are a table in metrics.go, of which docs/metrics.md is
// generated (go test ./pkg/exporter -update).
package exporter

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// DefaultMaxPairs is how many label sets the metrics with a dst have at most, unless [Options] say otherwise. A scrape with
// so many is some 6,000 series and 2 MB.
const DefaultMaxPairs = 512

const (
	portsTimeout = 3 * time.Second // for one reading of the ports; a scrape times out after 10 s by default
	minShelfLife = time.Hour       // of a figure that no success renews
	shelfRuns    = 3               // the same in intervals of its probe
)

// Options set up an [Exporter].
type Options struct {
	Node       string            // the label src
	NodeLabels map[string]string // further labels of rdmabench_node_info
	Version    string
	Revision   string

	// MaxPairs caps the label sets of the metrics with a dst; 0: [DefaultMaxPairs].
	MaxPairs int
	// ClassicHistograms adds buckets to rdmabench_latency_seconds for servers that don't scrape native histograms.
	ClassicHistograms bool

	Ports PortSource // nil: no metrics of ports
	// Discovery tells where peers come from; nil: no metrics of that. It is called at each scrape.
	Discovery func() Discovery
	Sessions  func() int // sessions under way; nil: no such metric
	// Maintenance tells whether this node is to be left alone; nil: no such metric.
	Maintenance func() bool
	// ClockResidual is that of the clock of latencies; nil: no such metric.
	ClockResidual func() float64
	Log           *slog.Logger // nil: none
}

// Discovery is what is known of the sources of peers.
type Discovery struct {
	States   map[string]int    // members that are not probed, by why: self, drained, duplicate, unnamed
	Sources  map[string]Source // by kind
	Replaced float64           // times that another machine was found behind a peer's name
}

// Source sums up the sources of one kind.
type Source struct {
	Failures float64   // of reading one
	Failing  int       // sources that can't be read now
	Good     time.Time // when the one that has been failing longest could last be read; zero: never, or there is none
}

// PortSource reads the ports of this node, in the order to show them in. It must return when ctx ends. What it could read is
// used even if there is an error. It is called at each scrape, from several goroutines.
type PortSource interface {
	Ports(ctx context.Context) ([]PortState, error)
}

// PortState is a port of an RDMA device as it is now. What isn't known is nil, empty or missing.
type PortState struct {
	Device string
	Port   int

	Usable bool         // probes can run from it
	Reason probe.Reason // why not
	Detail string       // the same in a sentence

	Up                 *bool // state is ACTIVE
	RateBytesPerSecond *float64
	Flaps              uint64 // times it went down

	Rail      string
	LinkLayer string
	Driver    string
	Firmware  string
	HCAType   string
	BoardID   string
	PCI       string // address of the PCI function
	NUMANode  string
	Netdev    string

	Environment *counters.Environment // what it measures under

	Counters map[string]uint64 // by the driver's own name
	Events   map[string]uint64 // by class
}

// Targets are what this node is to probe.
type Targets struct {
	Probes []probe.Spec
	Peers  []string                 // configured names
	Use    func(device string) bool // whether a device is probed from; nil: every one is
}

// Exporter holds the state behind the metrics and pages. Its methods may be called from several goroutines.
type Exporter struct {
	opt      Options
	registry *prometheus.Registry
	started  time.Time
	created  *timestamppb.Timestamp
	fixed    batch // series that never change
	ready    atomic.Bool

	mu       sync.Mutex // guards what follows; nothing slow is done under it
	probes   map[string]*probeState
	peers    map[string]bool          // the configured ones
	use      func(device string) bool // true for "", which stands in results of a node without any
	nics     map[nicKey]*nic
	pairs    map[pairKey]*pair
	dropped  float64 // results beyond MaxPairs
	memory   memory
	reload   reload
	ports    []PortState
	portsErr error
	portErrs float64
	changes  map[string]float64 // of the environment, by device
	sweeps   map[string]*swept  // by name
}

// probeState is a configured probe.
type probeState struct {
	spec         probe.Spec // with defaults
	skips        map[probe.Reason]float64
	missed       float64
	panics       float64
	unconfirmed  float64
	plan, before *plan // of the period under way and of the one before it; nil: none
}

// shelfLife is how long a figure is shown that no success renews.
func (p *probeState) shelfLife() time.Duration { return max(shelfRuns*p.spec.Interval, minShelfLife) }

type reload struct {
	tried bool
	err   error
	good  time.Time // of the last success
}

// New returns an Exporter that knows of no targets, is not ready and has a registry of its own.
func New(o Options) (*Exporter, error) {
	if o.Node == "" {
		return nil, errors.New("exporter: the node has no name")
	}
	o.Node = clean(o.Node)
	o.MaxPairs = cmp.Or(max(0, o.MaxPairs), DefaultMaxPairs)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	now := time.Now()
	e := &Exporter{
		opt: o, registry: prometheus.NewRegistry(), started: now, created: timestamppb.New(now),
		probes: map[string]*probeState{}, peers: map[string]bool{}, use: func(string) bool { return true },
		nics: map[nicKey]*nic{}, pairs: map[pairKey]*pair{}, memory: newMemory(), changes: map[string]float64{},
	}
	e.fixed.add(buildInfo, pairs(buildInfo.labels, clean(o.Version), clean(o.Revision), runtime.Version()), 1)
	e.fixed.add(nodeMetric(o), nodeLabels(o), 1)
	for _, c := range []prometheus.Collector{
		collector{e}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	} {
		if err := e.registry.Register(c); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// nodeMetric is nodeInfo with the configured labels.
func nodeMetric(o Options) *metric {
	m := *nodeInfo
	for _, l := range nodeLabels(o) {
		if l.GetName() != "src" {
			m.labels = append(m.labels[:len(m.labels):len(m.labels)], l.GetName())
		}
	}
	m.desc = prometheus.NewDesc(m.name, m.help, m.labels, nil)
	return &m
}

// nodeLabels are the labels of nodeInfo. Of two configured ones that come out with the same name the first counts.
func nodeLabels(o Options) []*dto.LabelPair {
	names, values := []string{"src"}, []string{o.Node}
	for _, k := range slices.Sorted(maps.Keys(o.NodeLabels)) {
		if name := labelName(k); name != "" && !slices.Contains(names, name) {
			names, values = append(names, name), append(values, clean(o.NodeLabels[k]))
		}
	}
	return pairs(names, values...)
}

// SetReady says whether the daemon does its work; until then /-/ready answers 503.
func (e *Exporter) SetReady(ready bool) { e.ready.Store(ready) }

// SetReload reports an attempt to load the configuration, the first one included.
func (e *Exporter) SetReload(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.reload.tried, e.reload.err = true, err
	if err == nil {
		e.reload.good = time.Now().Round(0)
	}
}

// Skipped counts n runs of a probe that were skipped without a result of their own.
func (e *Exporter) Skipped(name string, why probe.Reason, n int) {
	e.update(name, func(p *probeState) { p.skips[oneOf(probe.SkipReasons, &why)] += float64(n) })
}

// Missed counts n runs of a probe that were due while the machine slept.
func (e *Exporter) Missed(name string, n int) {
	e.update(name, func(p *probeState) { p.missed += float64(n) })
}

// Panicked counts a run of a probe that panicked.
func (e *Exporter) Panicked(name string) { e.update(name, func(p *probeState) { p.panics++ }) }

// EnvironmentChanged counts a change of a device's fingerprint.
func (e *Exporter) EnvironmentChanged(device string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if device = clean(device); e.use(device) {
		e.changes[device]++
	}
}

func (e *Exporter) update(name string, f func(*probeState)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if p := e.probes[clean(name)]; p != nil {
		f(p)
	}
}

// SetTargets replaces what is to be probed. The series and last results of what is no longer in it are gone with the next
// scrape; everything else stays.
func (e *Exporter) SetTargets(t Targets) {
	use := func(device string) bool { return device == "" || t.Use == nil || t.Use(device) }
	e.mu.Lock()
	defer e.mu.Unlock()

	probes := make(map[string]*probeState, len(t.Probes))
	for _, s := range t.Probes {
		p := &probeState{spec: s.WithDefaults(), skips: map[probe.Reason]float64{}}
		for _, r := range probe.SkipReasons {
			p.skips[r] = 0
		}
		if old := e.probes[clean(s.Name)]; old != nil {
			p.skips, p.missed, p.panics, p.unconfirmed, p.plan, p.before = old.skips, old.missed, old.panics, old.unconfirmed, old.plan, old.before
		}
		probes[clean(s.Name)] = p
	}
	peers := make(map[string]bool, len(t.Peers))
	for _, name := range t.Peers {
		peers[clean(name)] = true
	}
	e.probes, e.peers, e.use = probes, peers, use

	maps.DeleteFunc(e.pairs, func(k pairKey, _ *pair) bool {
		return !peers[k.dst] || !e.wanted(k.nicKey) || !slices.Contains(probes[k.probe].spec.Sizes, k.size)
	})
	maps.DeleteFunc(e.nics, func(k nicKey, n *nic) bool {
		if !e.wanted(k) {
			return true
		}
		maps.DeleteFunc(n.latency, func(d distKey, _ *distribution) bool {
			return !slices.Contains(probes[k.probe].spec.Sizes, d.size)
		})
		return false
	})
	maps.DeleteFunc(e.changes, func(device string, _ float64) bool { return !e.use(device) })
	maps.DeleteFunc(e.memory.last, func(k resultKey, _ *lastResult) bool {
		return !peers[k.peer] || probes[k.probe] == nil || !e.use(k.device)
	})
	e.expectNICs()
}

// wanted reports whether the port and the op of the probe are still among the targets. The caller holds mu.
func (e *Exporter) wanted(k nicKey) bool {
	p := e.probes[k.probe]
	return p != nil && string(p.spec.Op) == k.op && e.use(k.device)
}

// expectNICs makes the counters of every usable port and probe exist, at 0, before the first run. The caller holds mu.
func (e *Exporter) expectNICs() {
	for _, p := range e.ports {
		if device := clean(p.Device); p.Usable && e.use(device) {
			for name, s := range e.probes {
				e.nic(nicKey{device, p.Port, name, string(s.spec.Op)}, clean(p.Rail))
			}
		}
	}
}

// nic returns the state of a port and probe, making it if need be. The caller holds mu.
func (e *Exporter) nic(k nicKey, rail string) *nic {
	n := e.nics[k]
	if n == nil {
		n = newNIC()
		e.nics[k] = n
	}
	n.place(e.opt.Node, k, rail)
	return n
}

// Observe takes the result of an ended run into account, skips included. It keeps parts of r, which must not change any more.
// It reads nothing and waits for no one but a scrape that copies the same state.
// Results of probes, peers and devices that are no targets (any more) are only remembered for the API.
func (e *Exporter) Observe(r *probe.Result) {
	if r == nil {
		return
	}
	if !slices.Contains(probe.Outcomes, r.Outcome) {
		e.opt.Log.Error("a result has no outcome and is not counted: please report this",
			slog.String("probe", r.Probe), slog.String("peer", r.Peer), slog.String("outcome", string(r.Outcome)))
		return
	}
	dists := make([]*samples, len(r.Runs)) // made before the lock is taken
	for i, run := range r.Runs {
		if run.Histogram != nil && run.Latency != nil && r.Usable() {
			dists[i] = bucketed(run.Histogram, e.opt.ClassicHistograms)
			if sum := run.Latency.Mean * float64(dists[i].count); finite(sum) {
				dists[i].sum = sum // the histogram's own is rounded
			}
		}
	}
	r = kept(r)

	e.mu.Lock()
	defer e.mu.Unlock()
	e.memory.note(r)
	p := e.probes[r.Probe]
	if p == nil || !e.use(r.Device) {
		return
	}
	if r.Outcome == probe.Skipped {
		p.skips[oneOf(probe.SkipReasons, r.Reason)]++
	}
	if r.Repeats != nil && r.Usable() {
		p.unconfirmed++
	}
	p.cover(r)
	k := nicKey{r.Device, r.Port, r.Probe, string(p.spec.Op)}
	e.nic(k, r.Rail).observe(e.opt.Node, k, r, dists, e.created)
	if !e.peers[r.Peer] {
		return
	}
	e.memory.keep(r)
	if r.Outcome == probe.Skipped || r.Device == "" { // a series without a device would outlive the day there is one
		return
	}
	for _, size := range p.spec.Sizes {
		e.pair(pairKey{k, r.Peer, size}, r)
	}
}

// pair brings the result's part of one message size to its pair, if that has or gets a place. The caller holds mu.
func (e *Exporter) pair(k pairKey, r *probe.Result) {
	p := e.pairs[k]
	if p == nil {
		if len(e.pairs) >= e.opt.MaxPairs {
			e.dropped++
			return
		}
		p = &pair{tainted: map[probe.Taint]bool{}}
		e.pairs[k] = p
	}
	p.observe(r, k.size, e.lineRate(k.device, k.port))
	p.render(e.opt.Node, k)
}

// lineRate returns the rate of a port in bytes per second as far as it is known, else 0. The caller holds mu.
func (e *Exporter) lineRate(device string, port int) float64 {
	for _, p := range e.ports {
		if p.Port == port && clean(p.Device) == device && p.RateBytesPerSecond != nil && finite(*p.RateBytesPerSecond) {
			return *p.RateBytesPerSecond
		}
	}
	return 0
}

// readPorts brings the state of the ports up to date. What can't be read is forgotten: a counter that stands still would
// look like a quiet port.
func (e *Exporter) readPorts(ctx context.Context) {
	if e.opt.Ports == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, portsTimeout)
	defer cancel()
	ports, err := e.opt.Ports.Ports(ctx)

	e.mu.Lock()
	defer e.mu.Unlock()
	if err != nil {
		e.portErrs++
	}
	if (err == nil) != (e.portsErr == nil) { // a message for each change, not for each scrape
		if err != nil {
			e.opt.Log.Warn("reading the RDMA ports: their metrics are incomplete", slog.Any("err", err))
		} else {
			e.opt.Log.Info("the RDMA ports can be read again")
		}
	}
	e.ports, e.portsErr = ports, err
	e.expectNICs()
	for k, p := range e.pairs { // results that came before the ports were first read
		if p.rate == 0 && p.run != nil && p.run.Bandwidth != nil {
			if p.rate = e.lineRate(k.device, k.port); p.rate > 0 {
				p.render(e.opt.Node, k)
			}
		}
	}
}

// oneOf keeps a label to its closed list.
func oneOf[T ~string](list []T, v *T) T {
	if v == nil || !slices.Contains(list, *v) {
		return "unknown"
	}
	return *v
}

func itoa(i int) string { return strconv.Itoa(i) }
