package exporter

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// Bounds of what the exporter remembers for its pages.
const (
	maxLast     = 1024 // probes × peers × ports
	maxRecent   = 256
	maxFailures = 128
)

// resultKey is what a probe's results replace each other by.
type resultKey struct {
	probe, peer, device string
	port                int
}

func keyOf(r *probe.Result) resultKey { return resultKey{r.Probe, r.Peer, r.Device, r.Port} }

func (k resultKey) compare(o resultKey) int {
	return cmp.Or(cmp.Compare(k.probe, o.probe), cmp.Compare(k.peer, o.peer), cmp.Compare(k.device, o.device), cmp.Compare(k.port, o.port))
}

// lastResult is the state of one probe against one peer from one port.
type lastResult struct {
	run  *probe.Result // the last that was tried; nil if none was
	skip *probe.Result // the last skip, if nothing was tried since
	good *probe.Result // the last with figures
	seq  uint64        // of the last change
}

// memory holds results: the last of everything, the newest, and the newest failures, which a success doesn't push out.
type memory struct {
	last     map[resultKey]*lastResult
	recent   ring
	failures ring
	seq      uint64
}

func newMemory() memory {
	return memory{last: map[resultKey]*lastResult{}, recent: ring{size: maxRecent}, failures: ring{size: maxFailures}}
}

// note keeps r among the newest.
func (m *memory) note(r *probe.Result) {
	m.recent.push(r)
	if r.Outcome == probe.Failed {
		m.failures.push(r)
	}
}

// keep makes r the last of its kind. If there are too many kinds, the one that has been silent longest goes.
func (m *memory) keep(r *probe.Result) {
	k := keyOf(r)
	if r.Device != "" { // there is one now
		delete(m.last, resultKey{r.Probe, r.Peer, "", 0})
	}
	l := m.last[k]
	if l == nil {
		if len(m.last) >= maxLast {
			oldest := k
			for k, l := range m.last {
				if o := m.last[oldest]; o == nil || l.seq < o.seq {
					oldest = k
				}
			}
			delete(m.last, oldest)
		}
		l = &lastResult{}
		m.last[k] = l
	}
	m.seq++
	l.seq = m.seq
	if r.Outcome == probe.Skipped {
		l.skip = r
		return
	}
	l.run, l.skip = r, nil
	if r.Usable() {
		l.good = r
	}
}

// peerState sums up the last results of all probes and ports with one peer.
type peerState string

const (
	peerOK       peerState = "ok"
	peerDegraded peerState = "degraded"
	peerFailing  peerState = "failing"
	peerUnknown  peerState = "unknown"
)

var peerStates = []peerState{peerOK, peerDegraded, peerFailing, peerUnknown}

// passiveStates are those of members that are not probed, in [Discovery.States].
var passiveStates = []string{"self", "drained", "duplicate", "unnamed"}

// peers counts the configured peers by state. Failures of this node say nothing about them.
func (m *memory) peers(configured map[string]bool) map[peerState]int {
	type tally struct{ good, bad int }
	tallies := map[string]*tally{}
	for k, l := range m.last {
		t := tallies[k.peer]
		if t == nil {
			t = &tally{}
			tallies[k.peer] = t
		}
		switch {
		case l.run == nil:
		case l.run.Usable():
			t.good++
		case l.run.Scope != nil && *l.run.Scope != probe.ScopeLocal:
			t.bad++
		}
	}
	states := map[peerState]int{peerUnknown: len(configured)}
	for peer, t := range tallies {
		state := peerDegraded
		switch {
		case !configured[peer] || t.good+t.bad == 0:
			continue
		case t.bad == 0:
			state = peerOK
		case t.good == 0:
			state = peerFailing
		}
		states[state]++
		states[peerUnknown]--
	}
	return states
}

// sorted returns copies of the last results by probe, peer, device and port.
func (m *memory) sorted() []lastResult {
	keys := make([]resultKey, 0, len(m.last))
	for k := range m.last {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, resultKey.compare)
	out := make([]lastResult, len(keys))
	for i, k := range keys {
		out[i] = *m.last[k]
	}
	return out
}

// ring keeps the newest results, up to a size.
type ring struct {
	size  int
	items []*probe.Result
	next  int // where the next one goes once items is full
}

func (r *ring) push(x *probe.Result) {
	if len(r.items) < r.size {
		r.items = append(r.items, x)
		return
	}
	r.items[r.next] = x
	r.next = (r.next + 1) % r.size
}

// newest returns up to n results that match, the newest first.
func (r *ring) newest(n int, match func(*probe.Result) bool) []*probe.Result {
	out := []*probe.Result{}
	for i := range r.items {
		if len(out) == n {
			break
		}
		if x := r.items[(r.next-1-i+2*len(r.items))%len(r.items)]; match(x) {
			out = append(out, x)
		}
	}
	return out
}

// kept is the copy of a result that the exporter holds on to: without histograms, which are large, with names that are fit
// to be labels, and without figures that are no numbers, which JSON can't carry.
func kept(r *probe.Result) *probe.Result {
	k := *r
	for _, s := range []*string{&k.Probe, &k.Peer, &k.Device, &k.Rail, &k.Path} {
		*s = clean(*s)
	}
	if k.PeerDev != nil {
		k.PeerDev = new(clean(*k.PeerDev))
	}
	if k.Detail != nil {
		k.Detail = new(strings.ToValidUTF8(*k.Detail, "\uFFFD"))
	}
	if k.Time = k.Time.UTC(); k.Time.Year() < 0 || k.Time.Year() > 9999 { // JSON has no other years
		k.Time = time.Time{}
	}
	if !finite(k.Duration) {
		k.Duration = 0
	}
	k.Runs = slices.Clone(k.Runs)
	for i := range k.Runs {
		run := &k.Runs[i]
		run.Histogram = nil
		if !finite(run.Seconds) {
			run.Seconds = 0
		}
		run.MessageRate, run.LossRatio = number(run.MessageRate), number(run.LossRatio)
		run.CPUSeconds.Local, run.CPUSeconds.Remote = number(run.CPUSeconds.Local), number(run.CPUSeconds.Remote)
		if l := run.Latency; l != nil {
			run.Latency = nil
			if finite(l.Min, l.Mean, l.Max, l.Stddev) {
				c := *l
				c.P50, c.P90, c.P99, c.P999 = number(c.P50), number(c.P90), number(c.P99), number(c.P999)
				run.Latency = &c
			}
		}
		if b := run.Bandwidth; b != nil {
			run.Bandwidth = nil
			if finite(b.BytesPerSecond) {
				c := *b
				c.Tx, c.Rx, c.Min, c.Max = number(c.Tx), number(c.Rx), number(c.Min), number(c.Max)
				run.Bandwidth = &c
			}
		}
	}
	return &k
}

func finite(vs ...float64) bool {
	return !slices.ContainsFunc(vs, func(v float64) bool { return math.IsNaN(v) || math.IsInf(v, 0) })
}

// number returns nil for what is no number.
func number(v *float64) *float64 {
	if v == nil || !finite(*v) {
		return nil
	}
	return v
}
