package exporter

import (
	"cmp"
	"net/http"
	"slices"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// plan is whom a probe is to measure in one period, and what came of it.
type plan struct {
	due    time.Time
	peers  map[string]*planned
	open   int // pairs nothing is known of yet
	closed bool
}

// planned is one peer of a plan.
type planned struct {
	ports    int                      // of this node that are to measure it
	measured map[portKey]bool         // port to whether there are figures; a port that has not been tried is missing
	why      map[portKey]probe.Reason // of those without
}

type portKey struct {
	device string
	port   int
}

func (p *planned) good() (n int) {
	for _, ok := range p.measured {
		if ok {
			n++
		}
	}
	return min(n, p.ports)
}

// over reports whether nothing more is to come of the plan.
func (p *plan) over() bool { return p.closed || p.open <= 0 }

// share is that of the planned pairs that were measured; not ok if there was nothing to measure.
func (p *plan) share() (ratio float64, pairs, measured int, ok bool) {
	for _, w := range p.peers {
		pairs += w.ports
		measured += w.good()
	}
	return float64(measured) / float64(max(1, pairs)), pairs, measured, pairs > 0
}

func (p *plan) add(peer string, ports int) {
	if p.peers[peer] == nil {
		p.peers[peer] = &planned{ports: ports, measured: map[portKey]bool{}, why: map[portKey]probe.Reason{}}
		p.open += ports
	}
}

func (p *plan) observe(r *probe.Result) {
	w := p.peers[r.Peer]
	if w == nil {
		return
	}
	k := portKey{r.Device, r.Port}
	if w.measured[k] {
		return
	}
	if _, tried := w.measured[k]; !tried {
		p.open--
	}
	w.measured[k] = r.Usable()
	delete(w.why, k)
	if !r.Usable() {
		w.why[k] = oneOf(probe.Reasons, r.Reason)
	}
}

// Plan says whom a probe is to measure from so many of this node's ports in the period that began at due: the first call with
// a new due ends the period before it, later ones add peers.
func (e *Exporter) Plan(name string, due time.Time, peers []string, ports int) {
	e.update(name, func(p *probeState) {
		switch {
		case p.plan != nil && due.Before(p.plan.due):
			return
		case p.plan == nil || due.After(p.plan.due):
			p.before, p.plan = p.plan, &plan{due: due, peers: make(map[string]*planned, len(peers))}
		}
		for _, peer := range peers {
			p.plan.add(clean(peer), max(1, ports))
		}
	})
}

// Planned says that nothing more is to come of the plan of the period that began at due.
func (e *Exporter) Planned(name string, due time.Time) {
	e.update(name, func(p *probeState) {
		if p.plan != nil && p.plan.due.Equal(due) {
			p.plan.closed = true
		}
	})
}

// covered is the last plan that is over; nil if there was none yet.
func (p *probeState) covered() *plan {
	if p.plan != nil && p.plan.over() {
		return p.plan
	}
	return p.before
}

// cover brings a result to the plan of its period.
func (p *probeState) cover(r *probe.Result) {
	if p.plan != nil && !r.Time.Before(p.plan.due.Add(-clockSlack)) {
		p.plan.observe(r)
	} else if p.before != nil {
		p.before.observe(r)
	}
}

// clockSlack is how much earlier than its firing a run may seem to begin: the scheduler goes by the clock on the wall, which
// is set now and then.
const clockSlack = time.Second

// coverageReply is the JSON of /api/v1/coverage.
type coverageReply struct {
	Node   string          `json:"node"`
	Probes []probeCoverage `json:"probes"`
}

// probeCoverage is what came of the last period of a probe that is over, or of its first one so far.
type probeCoverage struct {
	Probe      string       `json:"probe"`
	Due        *time.Time   `json:"due"`      // when that period began; null if none did
	Over       bool         `json:"over"`     // whether it is
	Planned    int          `json:"planned"`  // pairs of a port of this node and a peer
	Measured   int          `json:"measured"` // of them with figures
	Ratio      *float64     `json:"ratio"`    // null if nothing was planned
	Unmeasured []unmeasured `json:"unmeasured"`
}

// unmeasured is a peer that was not measured from all ports.
type unmeasured struct {
	Peer     string         `json:"peer"`
	Planned  int            `json:"planned"`
	Measured int            `json:"measured"`
	Reasons  []probe.Reason `json:"reasons"` // empty: it was not tried
}

// coverage sums up all probes that match. The caller holds mu.
func (e *Exporter) coverage(name string) []probeCoverage {
	out := []probeCoverage{}
	for n, p := range e.probes {
		if name != "" && name != n {
			continue
		}
		c := probeCoverage{Probe: n, Unmeasured: []unmeasured{}}
		if pl := cmp.Or(p.covered(), p.plan); pl != nil {
			c.Due, c.Over = new(pl.due.UTC()), pl.over()
			ratio, pairs, measured, ok := pl.share()
			if c.Planned, c.Measured = pairs, measured; ok {
				c.Ratio = &ratio
			}
			for peer, w := range pl.peers {
				if good := w.good(); good < w.ports {
					u := unmeasured{Peer: peer, Planned: w.ports, Measured: good, Reasons: []probe.Reason{}}
					for _, why := range w.why {
						if !slices.Contains(u.Reasons, why) {
							u.Reasons = append(u.Reasons, why)
						}
					}
					slices.Sort(u.Reasons)
					c.Unmeasured = append(c.Unmeasured, u)
				}
			}
			slices.SortFunc(c.Unmeasured, func(a, b unmeasured) int { return cmp.Compare(a.Peer, b.Peer) })
		}
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b probeCoverage) int { return cmp.Compare(a.Probe, b.Probe) })
	return out
}

func (e *Exporter) serveCoverage(w http.ResponseWriter, r *http.Request) {
	e.mu.Lock()
	reply := coverageReply{Node: e.opt.Node, Probes: e.coverage(r.URL.Query().Get("probe"))}
	e.mu.Unlock()
	sendJSON(w, http.StatusOK, reply)
}
