package probe

import (
	"slices"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
)

// signals are the taints that the counters of an end are evidence of, with the classes that each is found in. Classes not
// listed (traffic, configuration, management) taint nothing.
var signals = []struct {
	taint   Taint
	classes []counters.Class
}{
	{TaintRetransmit, []counters.Class{counters.RetransmitLocal, counters.RetransmitPeer}},
	{TaintOutOfOrder, []counters.Class{counters.Sequence}},
	{TaintRNR, []counters.Class{counters.RNR}},
	{TaintTimeout, []counters.Class{counters.Timeout, counters.RetryExhausted}},
	{TaintCongestion, []counters.Class{counters.Congestion}},
	{TaintPause, []counters.Class{counters.Pause}},
	{TaintDiscards, []counters.Class{counters.NoBuffer, counters.Discard}},
	{TaintLinkErrors, []counters.Class{counters.Physical}},
}

// cannotTell lists the taints of which an end has no signal: its driver counts nothing of the kind, or what it counts could
// not be read. They are neither there nor absent.
func cannotTell(d *counters.Delta) []string {
	out := []string{}
	for _, s := range signals {
		if !slices.ContainsFunc(s.classes, func(c counters.Class) bool { _, known := d.Classes[c]; return known }) {
			out = append(out, string(s.taint))
		}
	}
	if _, known := d.Traffic[counters.TxBytes]; !known {
		if _, known = d.Traffic[counters.RxBytes]; !known {
			out = append(out, string(TaintForeignTraffic))
		}
	}
	return out
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
	for k := range e.Traffic {
		if _, known := o.Traffic[k]; !known {
			delete(e.Traffic, k) // the sum can't be told
		}
	}
	for k := range e.Traffic {
		e.Traffic[k] += o.Traffic[k]
	}
	for k, names := range o.Moved {
		e.Moved[k] = union(e.Moved[k], names)
	}
	e.Unknown = union(e.Unknown, o.Unknown)
	e.CannotTell = union(e.CannotTell, o.CannotTell)
	e.Conditions = union(e.Conditions, o.Conditions)
	return e
}

func union[T comparable](a, b []T) []T {
	for _, v := range b {
		if !slices.Contains(a, v) {
			a = append(a, v)
		}
	}
	return a
}
