package exporter

import (
	"maps"
	"slices"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/sweep"
)

// maxSweeps is how many sweeps have metrics; more names than that are not configured by anybody.
const maxSweeps = 16

var (
	sweepKinds    = []sweep.Kind{sweep.NIC, sweep.Node, sweep.Rail, sweep.Rack, sweep.Pair}
	sweepVerdicts = []sweep.Verdict{sweep.Healthy, sweep.Unhealthy, sweep.Unknown}
)

// swept is what the metrics keep of a report.
type swept struct {
	finished, good time.Time
	seconds        float64
	healthy        bool
	coverage       float64
	rows           map[sweep.Verdict]int
	suspects       map[sweep.Kind]int
	unreached      int
}

// Swept takes the report of a sweep of this node.
func (e *Exporter) Swept(r *sweep.Report) {
	s := &swept{
		finished: r.Finished, seconds: max(0, r.Finished.Sub(r.Started).Seconds()), healthy: r.Verdict == sweep.Healthy, coverage: r.Coverage,
		rows: map[sweep.Verdict]int{}, suspects: map[sweep.Kind]int{}, unreached: len(r.Unreached),
	}
	for i := range r.Pairs {
		s.rows[r.Pairs[i].Verdict]++
	}
	for _, x := range r.Suspects {
		s.suspects[x.Kind]++
	}
	name := clean(r.Name)
	e.mu.Lock()
	defer e.mu.Unlock()
	old := e.sweeps[name]
	switch {
	case s.healthy:
		s.good = r.Finished
	case old != nil:
		s.good = old.good
	}
	if old == nil && len(e.sweeps) >= maxSweeps {
		oldest := ""
		for k, v := range e.sweeps {
			if oldest == "" || v.finished.Before(e.sweeps[oldest].finished) {
				oldest = k
			}
		}
		delete(e.sweeps, oldest)
	}
	if e.sweeps == nil {
		e.sweeps = map[string]*swept{}
	}
	e.sweeps[name] = s
}

// Last returns the last result with something to tell of each probe, peer and port.
func (e *Exporter) Last() []*probe.Result {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []*probe.Result
	for _, l := range e.memory.sorted() {
		if l.run != nil {
			out = append(out, l.run)
		} else if l.skip != nil {
			out = append(out, l.skip)
		}
	}
	return out
}

// collectSweeps adds the metrics of sweeps. The caller holds mu.
func (c collector) collectSweeps(b *batch) {
	for _, name := range slices.Sorted(maps.Keys(c.sweeps)) {
		s := c.sweeps[name]
		labels := pairs(sweepLabels, c.opt.Node, name)
		b.add(sweepHealthy, labels, truth(s.healthy))
		b.add(sweepRun, labels, unix(s.finished))
		if !s.good.IsZero() {
			b.add(sweepGood, labels, unix(s.good))
		}
		b.add(sweepDuration, labels, s.seconds)
		b.add(sweepCoverage, labels, s.coverage)
		b.add(sweepUnreached, labels, float64(s.unreached))
		for _, v := range sweepVerdicts {
			b.add(sweepRows, with(labels, "verdict", string(v)), float64(s.rows[v]))
		}
		for _, k := range sweepKinds {
			b.add(sweepSuspects, with(labels, "kind", string(k)), float64(s.suspects[k]))
		}
	}
}
