// Package doctor finds what keeps this node, or this node and a peer, from good RDMA. It looks layer by layer in the order in
// which one rests on the other, so that the first layer that fails is the diagnosis; what rests on it is skipped.
//
// It works on a copied sysfs tree as well, with what a tree can tell, and on a host where there is nothing at all.
package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// Layer is a group of checks. The words are a closed list, with a paragraph each in docs/doctor.md.
type Layer string

// The layers.
const (
	Modules        Layer = "modules"
	Devices        Layer = "device"
	Memlock        Layer = "memlock"
	Ports          Layer = "port"
	SubnetManager  Layer = "subnet-manager"
	GID            Layer = "gid"
	MTU            Layer = "mtu"
	Route          Layer = "route"
	Control        Layer = "control"
	SmallMessage   Layer = "small-message"
	LargeMessage   Layer = "large-message"
	BothDirections Layer = "both-directions"
	Counters       Layer = "counters"
	PCIe           Layer = "pcie"
	CPU            Layer = "cpu"
)

// Layers are all of them from the bottom up. The last three bear no other.
var Layers = []Layer{
	Modules, Devices, Memlock, Ports, SubnetManager, GID, MTU, Route, Control, SmallMessage, LargeMessage, BothDirections, Counters, PCIe, CPU,
}

// Verdict is what became of one check.
type Verdict string

// The verdicts of a check.
const (
	OK      Verdict = "ok"
	Warning Verdict = "warning" // it works, but not as well as it could, or not for long
	Failed  Verdict = "failed"
	Skipped Verdict = "skipped" // what it rests on is not there
	Unknown Verdict = "unknown" // can't be told here
)

// Check is one thing looked at.
type Check struct {
	Layer    Layer   `json:"layer"`
	Check    string  `json:"check"`
	Found    string  `json:"found"`
	Expected string  `json:"expected"`
	Verdict  Verdict `json:"verdict"`
	Advice   *string `json:"advice"` // what to do; null where nothing is to be done
}

// Health is the verdict over all checks.
type Health string

// The verdicts over all.
const (
	Healthy   Health = "ok"
	Doubtful  Health = "warning"   // nothing failed
	Unhealthy Health = "unhealthy" // something failed
	Unusable  Health = "unusable"  // this node has no port that could be used at all
)

// Report is an examination. Its JSON is the machine interface of `rdmabenchd doctor --json`.
type Report struct {
	Verdict   Health  `json:"verdict"`
	Layer     *Layer  `json:"layer"`     // the first that failed, or else has a warning
	Diagnosis string  `json:"diagnosis"` // one sentence for a person
	Peer      *string `json:"peer"`
	Device    *string `json:"device"` // from which the peer was probed
	Port      *int    `json:"port"`
	Checks    []Check `json:"checks"`
}

// Options say what to look at. The zero value of a field is explained with it.
type Options struct {
	Sysfs  *counters.FS
	Filter counters.Filter // devices to look at; empty: all
	Port   int             // of those devices; 0: all

	// Node is this host's verbs; nil if Sysfs is no more than a copy of a host's tree, in which only files can be looked at.
	Node *probe.Node

	Peer string // host:port of its control channel; empty: this node alone
}

// examination collects the checks of one run.
type examination struct {
	Options
	inv    *counters.Inventory
	ports  []*port
	checks []Check
}

// Run examines and never fails: what can't be found out is a check with that verdict. ctx ends it early.
func Run(ctx context.Context, o Options) (*Report, error) {
	e := &examination{Options: o}
	var err error
	if e.inv, err = o.Sysfs.Inventory(ctx, o.Filter); err != nil {
		return nil, err
	}
	e.modules()
	e.collectPorts()
	e.devices()
	usable := e.examinePorts()
	chosen := e.peer(ctx, usable)
	e.standing(chosen)
	e.environments(ctx, chosen)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return e.report(usable, chosen), nil
}

// add notes a check. Advice is for what is not well.
func (e *examination) add(l Layer, v Verdict, check, found, expected, advice string) {
	c := Check{Layer: l, Check: check, Found: found, Expected: expected, Verdict: v}
	if advice != "" && v != OK {
		c.Advice = &advice
	}
	e.checks = append(e.checks, c)
}

// skip notes a check that makes no sense, or can't be made, because of something before it.
func (e *examination) skip(l Layer, check, why string) {
	e.add(l, Skipped, check, "not looked at: "+why, "", "")
}

// report sums up. Later checks may have thrown light on an earlier layer: the order is that of the layers.
func (e *examination) report(usable []*port, chosen *port) *Report {
	slices.SortStableFunc(e.checks, func(a, b Check) int { return slices.Index(Layers, a.Layer) - slices.Index(Layers, b.Layer) })
	r := &Report{Verdict: Healthy, Checks: e.checks}
	if e.Peer != "" {
		r.Peer = &e.Peer
	}
	if chosen != nil {
		r.Device, r.Port = &chosen.device, &chosen.num
	}
	worst := func(v Verdict) bool {
		i := slices.IndexFunc(e.checks, func(c Check) bool { return c.Verdict == v })
		if i < 0 {
			return false
		}
		c := e.checks[i]
		r.Layer = &c.Layer
		r.Diagnosis = fmt.Sprintf("%s: %s: %s", c.Layer, c.Check, c.Found)
		var others []string
		for _, o := range e.checks[i:] {
			if o.Verdict == v && o.Layer != c.Layer && !slices.Contains(others, string(o.Layer)) {
				others = append(others, string(o.Layer))
			}
		}
		if len(others) > 0 {
			r.Diagnosis += " (look also at " + strings.Join(others, ", ") + ")"
		}
		return true
	}
	switch {
	case worst(Failed):
		if r.Verdict = Unhealthy; len(usable) == 0 {
			r.Verdict = Unusable
		}
	case worst(Warning):
		r.Verdict = Doubtful
	default:
		r.Diagnosis = "nothing that could be looked at speaks against it"
	}
	return r
}
