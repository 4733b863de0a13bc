// Package simulate runs the schedule of a probe against a fleet that is not there, in virtual time: the real pairing and the
// real gate, with clocks that differ, lists of members that lag behind, nodes that are dead or replaced, and messages that get
// lost. What stands for the rest of a session is how long it takes. Rails have nothing to do with each other and are simulated
// side by side.
package simulate

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/schedule"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule/pairing"
)

// Bounds of what is simulated; MaxNodes takes 50 MB of memory a rail.
const (
	MaxNodes = 20_000
	MaxRails = 64
)

// Options are a fleet, what it does, and what is wrong with it. Shares are from 0 to 1.
type Options struct {
	Nodes int
	Rails int // of each node

	Schedule  schedule.Schedule
	Timetable pairing.Timetable
	Firings   int     // of the schedule, one after the other
	Bytes     float64 // that one session moves

	Skew    time.Duration // clocks are wrong by up to so much, either way
	Lagging float64       // of the nodes: their list of members is not up to date all the time
	Dead    float64       // of the nodes: in the lists, but not there
	Loss    float64       // of the messages
	Churn   float64       // of the nodes: replaced by another during each firing
	Seed    uint64
}

func (o Options) check() error {
	switch {
	case o.Nodes < 2 || o.Nodes > MaxNodes:
		return fmt.Errorf("%d nodes: want 2 to %d", o.Nodes, MaxNodes)
	case o.Rails < 1 || o.Rails > MaxRails:
		return fmt.Errorf("%d rails: want 1 to %d", o.Rails, MaxRails)
	case o.Firings < 1:
		return errors.New("no firing to simulate")
	case o.Skew < 0 || o.Skew > time.Hour:
		return fmt.Errorf("skew %s: want 0 to 1h", o.Skew)
	case o.Timetable.Slot <= 0 || o.Timetable.Rounds < 1 || o.Timetable.Need <= 0 || o.Timetable.Need > o.Timetable.Slot:
		return fmt.Errorf("a time-table of %d rounds in slots of %s, of which a session needs %s, can't work", o.Timetable.Rounds, o.Timetable.Slot, o.Timetable.Need)
	}
	for _, s := range []struct {
		what  string
		share float64
	}{{"lagging", o.Lagging}, {"dead", o.Dead}, {"loss", o.Loss}, {"churn", o.Churn}} {
		if !(s.share >= 0 && s.share <= 1) {
			return fmt.Errorf("%s %g: want a share from 0 to 1", s.what, s.share)
		}
	}
	return nil
}

// Report is what came of it.
type Report struct {
	Nodes   int    `json:"nodes"`
	Rails   int    `json:"rails"`
	Seed    uint64 `json:"seed"`
	Firings int    `json:"firings"`

	CycleRounds   int     `json:"cycle_rounds"`   // until everybody has met everybody
	RoundsPer     int     `json:"rounds"`         // of them at one firing
	Slot          float64 `json:"slot_seconds"`   // of one round
	Duration      float64 `json:"duration"`       // of the longest firing, until its last session ended; seconds
	CycleDuration float64 `json:"cycle_duration"` // until everybody has met everybody, with the schedule's breaks; seconds
	BytesPerPort  Load    `json:"bytes_per_port"` // in one firing, sent or received
	Sessions      Tally   `json:"sessions"`       // one per direction, as the nodes themselves planned them
	Collisions    int     `json:"collisions"`     // leases refused because a port was in use, at either end
	Overlaps      int     `json:"overlaps"`       // sessions that shared a port although they must not: always 0
	Pairs         Pairs   `json:"pairs"`          // on each rail one, as the members really were
	Coverage      []Point `json:"coverage"`       // as time passed
}

// Load is what ports had to carry in one firing, bytes.
type Load struct {
	Mean float64 `json:"mean"`
	Max  float64 `json:"max"`
}

// Tally counts sessions.
type Tally struct {
	Planned  int `json:"planned"`
	Measured int `json:"measured"`
	Busy     int `json:"busy"`   // skipped: a port was in use as long as a session would still have fitted into the slot
	Failed   int `json:"failed"` // the peer was dead, or messages got lost
}

// Pairs counts pairs of nodes on a rail.
type Pairs struct {
	All         int     `json:"all"`         // there are
	Planned     int     `json:"planned"`     // for these firings, both nodes being there
	Measured    int     `json:"measured"`    // of the planned, in one direction at least
	Both        int     `json:"both"`        // of the planned, in both directions
	Ratio       float64 `json:"ratio"`       // measured of planned
	Repeated    int     `json:"repeated"`    // measured once more in the same direction: 0 within a cycle
	Unreachable int     `json:"unreachable"` // of a node that was dead, or gone by then
}

// Point is how far things were at a moment.
type Point struct {
	Firing int     `json:"firing"` // from 1
	At     float64 `json:"at"`     // since that firing, seconds
	Ratio  float64 `json:"ratio"`  // pairs measured so far, of all that were planned for the firings
	Of     float64 `json:"of_all"` // the same, of all pairs there are
}

// Run simulates o.
func Run(o Options) (*Report, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	f := newFleet(o)
	t := o.Timetable
	r := &Report{
		Nodes: o.Nodes, Rails: o.Rails, Seed: o.Seed, Firings: o.Firings, CycleRounds: pairing.Rounds(o.Nodes), RoundsPer: t.Slots(o.Nodes),
		Slot: t.Slot.Seconds(),
	}
	r.Pairs.All = o.Rails * o.Nodes * (o.Nodes - 1) / 2
	r.CycleDuration = cycle(o, r).Seconds()

	rails := make([]*rail, o.Rails)
	for i := range rails {
		rails[i] = newRail(f, i)
	}
	parts := max(1, min(10/o.Firings, r.RoundsPer))
	news := make([]newPairs, o.Firings*parts)
	due := o.Schedule.Next(epoch)
	for n := range o.Firings {
		firing := o.Schedule.Ordinal(due)
		f.begin(n)
		each(rails, func(x *rail) { x.fire(firing, n, parts) })
		for _, x := range rails {
			r.Duration = max(r.Duration, time.Duration(x.end).Seconds())
			for _, b := range x.load {
				r.BytesPerPort.Mean += b
				r.BytesPerPort.Max = max(r.BytesPerPort.Max, b)
			}
		}
		each(rails, func(x *rail) { x.account(firing) })
		due = o.Schedule.Next(due)
	}
	r.BytesPerPort.Mean /= float64(o.Firings * o.Rails * o.Nodes)
	for _, x := range rails {
		r.Collisions += x.collisions
		r.Overlaps += x.overlaps
		r.Sessions.add(x.sessions)
		r.Pairs.Planned += x.pairs.Planned
		r.Pairs.Measured += x.pairs.Measured
		r.Pairs.Both += x.pairs.Both
		r.Pairs.Unreachable += x.pairs.Unreachable
		r.Pairs.Repeated += x.pairs.Repeated
		for i, n := range x.news {
			news[i].all += n.all
			news[i].planned += n.planned
		}
	}
	if r.Pairs.Planned > 0 {
		r.Pairs.Ratio = float64(r.Pairs.Measured) / float64(r.Pairs.Planned)
	}
	var sum newPairs
	for i, n := range news {
		sum.all += n.all
		sum.planned += n.planned
		r.Coverage = append(r.Coverage, Point{
			Firing: i/parts + 1, At: (time.Duration(i%parts+1) * f.length() / time.Duration(parts)).Seconds(),
			Ratio: float64(sum.planned) / float64(max(1, r.Pairs.Planned)), Of: float64(sum.all) / float64(max(1, r.Pairs.All)),
		})
	}
	return r, nil
}

// epoch is where virtual time begins: the simulation of a schedule is the same on every day.
var epoch = time.Date(2026, time.January, 1, 0, 0, 0, 0, time.UTC)

// cycle is how long it takes from the first slot of a cycle to its last.
func cycle(o Options, r *Report) time.Duration {
	firings := (r.CycleRounds + r.RoundsPer - 1) / r.RoundsPer
	first := o.Schedule.Next(epoch)
	last := first
	for range firings - 1 {
		last = o.Schedule.Next(last)
	}
	return last.Sub(first) + time.Duration(r.CycleRounds-(firings-1)*r.RoundsPer)*o.Timetable.Slot
}

func (t *Tally) add(o Tally) {
	t.Planned += o.Planned
	t.Measured += o.Measured
	t.Busy += o.Busy
	t.Failed += o.Failed
}

// each does something to every rail, as many at a time as there are processors.
func each(rails []*rail, do func(*rail)) {
	var all sync.WaitGroup
	next := make(chan *rail)
	for range min(len(rails), runtime.GOMAXPROCS(0)) {
		all.Go(func() {
			for x := range next {
				do(x)
			}
		})
	}
	for _, x := range rails {
		next <- x
	}
	close(next)
	all.Wait()
}

func random(seed uint64, what ...uint64) *rand.Rand {
	for _, w := range what {
		seed = (seed ^ w) * 0x9e3779b97f4a7c15
		seed ^= seed >> 29
	}
	return rand.New(rand.NewPCG(seed, 0x2545f4914f6cdd1d))
}
