package simulate

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/schedule"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule/pairing"
)

func nightly(t testing.TB, nodes, rails, rounds, firings int) Options {
	t.Helper()
	s, err := schedule.Parse("0 2 * * *")
	if err != nil {
		t.Fatal(err)
	}
	return Options{
		Nodes: nodes, Rails: rails, Schedule: s, Firings: firings, Bytes: 1e9, Seed: 1,
		Timetable: pairing.Timetable{Rounds: rounds, Slot: 10 * time.Second, Need: 3200 * time.Millisecond, InTurn: true},
	}
}

// With views that agree nobody is ever asked by two at a time, and each pair meets exactly once in a cycle, in both directions.
func TestAgreement(t *testing.T) {
	for _, tt := range []struct{ nodes, rails, rounds, firings int }{
		{2, 1, 64, 1},
		{3, 2, 64, 1},
		{8, 8, 64, 1},
		{9, 1, 3, 3}, // a cycle is three nights
		{127, 2, 127, 1},
		{1000, 1, 37, 27},
		{10_000, 2, 8, 1}, // of 9,999 rounds
	} {
		t.Run(fmt.Sprint(tt), func(t *testing.T) {
			r, err := Run(nightly(t, tt.nodes, tt.rails, tt.rounds, tt.firings))
			if err != nil {
				t.Fatal(err)
			}
			n := tt.nodes
			rounds := min(tt.rounds, pairing.Rounds(n)) * tt.firings
			pairs := tt.rails * rounds * (n / 2)
			want := &Report{
				Nodes: n, Rails: tt.rails, Seed: 1, Firings: tt.firings, CycleRounds: pairing.Rounds(n), RoundsPer: min(tt.rounds, pairing.Rounds(n)), Slot: 10,
				Sessions: Tally{Planned: 2 * pairs, Measured: 2 * pairs},
				Pairs:    Pairs{All: tt.rails * n * (n - 1) / 2, Planned: pairs, Measured: pairs, Both: pairs, Ratio: 1},
			}
			got := *r
			got.Duration, got.CycleDuration, got.BytesPerPort, got.Coverage = 0, 0, Load{}, nil
			if diff := cmp.Diff(want, &got); diff != "" {
				t.Errorf("report (-want +got):\n%s", diff)
			}
			if whole := rounds == pairing.Rounds(n); whole != (r.Pairs.Planned == r.Pairs.All) {
				t.Errorf("%d of %d pairs in %d of %d rounds", r.Pairs.Planned, r.Pairs.All, rounds, r.CycleRounds)
			}
			slots := float64(got.RoundsPer)
			if r.Duration > 10*slots || r.Duration < 10*slots-5 {
				t.Errorf("%g slots of 10 s took %g s", slots, r.Duration)
			}
			// A node takes part in both directions of each of its pairs; one in n has a bye in each round of an odd fleet.
			if mean := 2e9 * slots * float64(n-n%2) / float64(n); math.Abs(r.BytesPerPort.Mean/mean-1) > 1e-9 || r.BytesPerPort.Max > 2e9*slots || r.BytesPerPort.Max < mean*(1-1e-9) {
				t.Errorf("bytes per port %+v, want a mean of %g", r.BytesPerPort, mean)
			}
			last := r.Coverage[len(r.Coverage)-1]
			if last.Ratio != 1 || last.Of != float64(pairs)/float64(r.Pairs.All) || last.Firing != tt.firings || last.At != 10*slots {
				t.Errorf("at the end coverage is %+v", last)
			}
			for i := range r.Coverage[1:] {
				if r.Coverage[i+1].Ratio < r.Coverage[i].Ratio {
					t.Errorf("coverage falls: %+v", r.Coverage)
				}
			}
		})
	}
}

// What is wrong with a fleet costs coverage, but never puts two sessions on a port.
func TestDisagreement(t *testing.T) {
	for _, tt := range []struct {
		name     string
		nodes    int
		change   func(*Options)
		atLeast  float64 // of the planned pairs are measured
		inBoth   float64 // in both directions
		collides bool
	}{
		{"skew", 1000, func(o *Options) { o.Skew = 2 * time.Second }, 1, 0.99, true},
		{"lagging", 1000, func(o *Options) { o.Lagging = 0.01 }, 0.99, 0.97, true},
		{"lagging and skew", 1000, func(o *Options) { o.Lagging, o.Skew = 0.01, 2*time.Second }, 0.99, 0.95, true},
		{"lagging and skew, many", 10_000, func(o *Options) { o.Lagging, o.Skew, o.Timetable.Rounds = 0.01, 2*time.Second, 16 }, 0.99, 0.95, true},
		{"lagging and skew, few", 100, func(o *Options) { o.Lagging, o.Skew = 0.01, 2*time.Second }, 0.99, 0.95, true},
		{"dead", 500, func(o *Options) { o.Dead = 0.05 }, 1, 1, false},
		{"loss", 500, func(o *Options) { o.Loss = 0.01 }, 0.999, 0.99, true},
		{"churn", 500, func(o *Options) { o.Churn = 0.01 }, 0.85, 0.5, true},
		{"one clock is minutes off", 200, func(o *Options) { o.Skew = 5 * time.Minute }, 0, 0, true},
		{"nobody agrees", 200, func(o *Options) { o.Lagging = 1 }, 0, 0, true},
		{"all at once", 300, func(o *Options) { o.Lagging, o.Skew, o.Dead, o.Loss, o.Churn = 0.05, 5*time.Second, 0.05, 0.05, 0.05 }, 0.1, 0.1, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := nightly(t, tt.nodes, 1, 64, 1)
			tt.change(&o)
			r, err := Run(o)
			if err != nil {
				t.Fatal(err)
			}
			if r.Overlaps != 0 {
				t.Errorf("%d sessions shared a port", r.Overlaps)
			}
			if both := float64(r.Pairs.Both) / float64(r.Pairs.Planned); r.Pairs.Ratio < tt.atLeast || both < tt.inBoth {
				t.Errorf("measured %.4f of the pairs, %.4f in both directions: %+v %+v", r.Pairs.Ratio, both, r.Pairs, r.Sessions)
			}
			if (r.Collisions > 0) != tt.collides {
				t.Errorf("%d collisions", r.Collisions)
			}
			if s := r.Sessions; s.Planned != s.Measured+s.Busy+s.Failed {
				t.Errorf("some sessions have no end: %+v", s)
			}
			if (r.Pairs.Unreachable > 0) != (o.Dead > 0 || o.Churn > 0) {
				t.Errorf("unreachable: %d", r.Pairs.Unreachable)
			}
		})
	}
}

// A night on which not all goes well is made up for: over the nights everybody is measured.
func TestSeveralFirings(t *testing.T) {
	o := nightly(t, 65, 1, 13, 5)
	o.Churn = 0.02
	r, err := Run(o)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Coverage) != 10 || r.Coverage[9].Firing != 5 || r.CycleDuration != (4*24*time.Hour+130*time.Second).Seconds() {
		t.Errorf("a cycle of %g s, coverage %+v", r.CycleDuration, r.Coverage)
	}
}

// The gate lets light sessions share, up to its bound.
func TestLight(t *testing.T) {
	o := nightly(t, 100, 1, 99, 1)
	o.Timetable.InTurn, o.Skew = false, 2*time.Second
	r, err := Run(o)
	if err != nil {
		t.Fatal(err)
	}
	if r.Pairs.Ratio != 1 || r.Overlaps != 0 || r.Collisions != 0 || r.Pairs.Both != 4950 {
		t.Errorf("%+v", r)
	}
}

func TestSeed(t *testing.T) {
	o := nightly(t, 100, 3, 64, 1)
	o.Lagging, o.Skew, o.Loss, o.Churn = 0.05, 2*time.Second, 0.01, 0.02
	run := func() *Report {
		r, err := Run(o)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	first := run()
	if diff := cmp.Diff(first, run()); diff != "" {
		t.Errorf("the same seed gives something else:\n%s", diff)
	}
	o.Seed = 2
	if cmp.Equal(first.Collisions, run().Collisions) {
		t.Error("another seed gives the same")
	}
}

func TestRefused(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"one node":      func(o *Options) { o.Nodes = 1 },
		"many nodes":    func(o *Options) { o.Nodes = MaxNodes + 1 },
		"no rail":       func(o *Options) { o.Rails = 0 },
		"no firing":     func(o *Options) { o.Firings = 0 },
		"percent":       func(o *Options) { o.Lagging = 2 },
		"negative loss": func(o *Options) { o.Loss = -0.1 },
		"skew":          func(o *Options) { o.Skew = -time.Second },
		"no slot":       func(o *Options) { o.Timetable.Slot = 0 },
	} {
		o := nightly(t, 8, 1, 64, 1)
		change(&o)
		if r, err := Run(o); err == nil {
			t.Errorf("%s: %+v", name, r)
		}
	}
	o := nightly(t, 2, 1, 64, 1) // everything wrong with the smallest fleet
	o.Lagging, o.Dead, o.Loss, o.Churn = 1, 1, 1, 1
	if _, err := Run(o); err != nil {
		t.Error(err)
	}
}

func BenchmarkTenThousand(b *testing.B) {
	o := nightly(b, 10_000, 1, 64, 1)
	for b.Loop() {
		if _, err := Run(o); err != nil {
			b.Fatal(err)
		}
	}
}
