package sweep

import (
	"cmp"
	"slices"
	"time"
)

// Diff is what changed since the last good sweep.
type Diff struct {
	Since    time.Time `json:"since"` // when that one began
	Joined   []string  `json:"joined"`
	Left     []string  `json:"left"`
	Coverage float64   `json:"coverage"` // now, less then
	Changes  []Change  `json:"changes"`  // the greatest first
}

// Change is a port whose median moved by more than the least effect that counts.
type Change struct {
	Node   string  `json:"node"`
	Device string  `json:"device"`
	Port   int     `json:"port"`
	Figure string  `json:"figure"` // sending, receiving, p50, p99
	Was    float64 `json:"was"`
	Is     float64 `json:"is"`
	Worse  bool    `json:"worse"`
}

func (c Change) ratio() float64 {
	if c.Was <= 0 || c.Is <= 0 {
		return 1
	}
	return max(c.Was/c.Is, c.Is/c.Was)
}

// The least ratios of a change.
const (
	changedRate    = 1.1
	changedLatency = 1.25
	changedTail    = 1.5
	maxChanges     = 100
)

func diff(last, now *Report) *Diff {
	if last == nil {
		return nil
	}
	d := &Diff{Since: last.Started, Joined: []string{}, Left: []string{}, Coverage: now.Coverage - last.Coverage, Changes: []Change{}}
	type key struct {
		node, device string
		port         int
	}
	old, was := map[key]NICReport{}, map[string]bool{}
	for _, n := range last.Nodes {
		was[n.Name] = true
		for _, x := range n.NICs {
			old[key{n.Name, x.Device, x.Port}] = x
		}
	}
	for _, n := range now.Nodes {
		if !was[n.Name] {
			d.Joined = append(d.Joined, n.Name)
		}
		delete(was, n.Name)
		for _, x := range n.NICs {
			o, ok := old[key{n.Name, x.Device, x.Port}]
			if !ok {
				continue
			}
			for _, f := range []struct {
				name   string
				was    *float64
				is     *float64
				least  float64
				higher bool
			}{
				{"sending", o.Sending, x.Sending, changedRate, true}, {"receiving", o.Receiving, x.Receiving, changedRate, true},
				{"p50", o.P50, x.P50, changedLatency, false}, {"p99", o.P99, x.P99, changedTail, false},
			} {
				if f.was == nil || f.is == nil {
					continue
				}
				c := Change{Node: n.Name, Device: x.Device, Port: x.Port, Figure: f.name, Was: *f.was, Is: *f.is, Worse: (*f.is < *f.was) == f.higher}
				if c.ratio() > f.least {
					d.Changes = append(d.Changes, c)
				}
			}
		}
	}
	for name := range was {
		d.Left = append(d.Left, name)
	}
	slices.Sort(d.Left)
	slices.SortStableFunc(d.Changes, func(x, y Change) int { return -cmp.Compare(x.ratio(), y.ratio()) })
	d.Changes = d.Changes[:min(len(d.Changes), maxChanges)]
	return d
}
