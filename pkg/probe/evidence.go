package probe

import (
	"maps"
	"slices"
)

// taintOf maps a class of counters to the taint that its growth during the timed part is evidence of. Classes not listed
// (traffic, configuration, management) taint nothing.
var taintOf = map[string]Taint{
	"retransmit_local": TaintRetransmit,
	"retransmit_peer":  TaintRetransmit,
	"sequence":         TaintOutOfOrder,
	"rnr":              TaintRNR,
	"no_buffer":        TaintDiscards,
	"timeout":          TaintTimeout,
	"retry_exhausted":  TaintTimeout,
	"congestion":       TaintCongestion,
	"pause":            TaintPause,
	"discard":          TaintDiscards,
	"physical":         TaintLinkErrors,
}

// add merges the evidence of a further timed part of the same port.
func (e *EndEvidence) add(o *EndEvidence) *EndEvidence {
	switch {
	case o == nil:
		return e
	case e == nil:
		return o
	}
	for k, v := range o.Counters {
		e.Counters[k] += v
	}
	for k, v := range o.Classes {
		e.Classes[k] += v
	}
	for k, names := range o.Moved {
		for _, n := range names {
			if !slices.Contains(e.Moved[k], n) {
				e.Moved[k] = append(e.Moved[k], n)
			}
		}
	}
	for _, u := range o.Unknown {
		if !slices.Contains(e.Unknown, u) {
			e.Unknown = append(e.Unknown, u)
		}
	}
	return e
}

// taint judges the result by its evidence and figures.
func (r *Result) taint() {
	add := func(t Taint, side, counter string, delta uint64) {
		if !slices.Contains(r.Taints, t) {
			r.Taints = append(r.Taints, t)
		}
		r.TaintLog = append(r.TaintLog, TaintDetail{Taint: t, Side: side, Counter: counter, Delta: delta})
	}
	for _, side := range []struct {
		name string
		e    *EndEvidence
	}{{"local", r.Evidence.Local}, {"remote", r.Evidence.Remote}} {
		if side.e == nil {
			continue
		}
		for _, class := range slices.Sorted(maps.Keys(side.e.Classes)) {
			t, ok := taintOf[class]
			if !ok {
				continue
			}
			for _, counter := range side.e.Moved[class] {
				add(t, side.name, counter, side.e.Counters[counter])
			}
		}
	}
	for _, run := range r.Runs {
		if run.Bandwidth != nil && run.short {
			add(TaintShortRun, "local", "messages", run.Iterations)
		}
	}
	if r.mtuReduced > 0 && r.MTU != nil {
		add(TaintMTUReduced, "local", "mtu", uint64(*r.MTU))
	}
	if len(r.Taints) > 0 {
		r.Outcome = Tainted
	}
}
