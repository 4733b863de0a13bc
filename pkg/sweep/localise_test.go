package sweep

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"
)

func touches(l *link, node int) bool { return l.src == node || l.dst == node }

// delay adds a constant both ways, which also bounds the bandwidth.
func delay(l *link, seconds float64) {
	l.p50, l.p99 = l.p50+seconds, l.p99+seconds
	l.bandwidth = min(l.bandwidth, 16*65536/(2*l.p50))
}

func lossy(l *link, share float64) {
	l.retransmits += 16 * share
	l.bandwidth *= 1 / (1 + 30*share)
	l.p99 += 4e-3
}

// TestLocalise injects each kind of fault into fleets of several shapes: it must be named, nothing else may be, and measured again
// it must be confirmed.
func TestLocalise(t *testing.T) {
	for _, c := range []struct {
		what                  string
		nodes, rails, perRack int
		missing               float64
		fault                 func(*link)
		want                  []string
	}{
		{"nothing", 8, 1, 0, 0, func(*link) {}, nil},
		{"nothing in racks and rails", 16, 4, 4, 0.05, func(*link) {}, nil},
		{"NIC slow both ways", 8, 2, 0, 0, func(l *link) {
			if touches(l, 3) && l.rail == 1 {
				l.bandwidth *= 0.6
			}
		}, []string{"nic node3/mlx5_1 both"}},
		{"NIC slow at sending", 8, 2, 0, 0, func(l *link) {
			if l.src == 3 && l.rail == 0 {
				l.bandwidth *= 0.8
			}
		}, []string{"nic node3/mlx5_0 sending"}},
		{"NIC slow at receiving", 12, 1, 0, 0.1, func(l *link) {
			if l.dst == 5 {
				l.bandwidth *= 0.8
			}
		}, []string{"nic node5/mlx5_0 receiving"}},
		{"NIC with latency", 8, 1, 0, 0.05, func(l *link) {
			if touches(l, 2) {
				l.p50, l.p99 = 1.5*l.p50, 1.5*l.p99
			}
		}, []string{"nic node2/mlx5_0 both"}},
		{"NIC that loses packets", 8, 2, 0, 0, func(l *link) {
			if touches(l, 7) && l.rail == 1 {
				lossy(l, 0.02)
			}
		}, []string{"nic node7/mlx5_1 both"}},
		{"NIC that only has a tail", 8, 1, 0, 0, func(l *link) {
			if touches(l, 7) {
				l.p99 *= 4
			}
		}, []string{"nic node7/mlx5_0 both"}},
		{"node slow on all rails", 8, 4, 0, 0, func(l *link) {
			if touches(l, 6) {
				l.bandwidth *= 0.7
			}
		}, []string{"node node6 both"}},
		{"dead node", 8, 2, 0, 0, func(l *link) {
			if touches(l, 4) {
				l.fails = "connect unreachable path"
			}
		}, []string{"node node4 both"}},
		{"NIC whose data path is dead", 8, 2, 0, 0, func(l *link) {
			if touches(l, 4) && l.rail == 0 {
				l.fails = "run retry-exceeded path"
			}
		}, []string{"nic node4/mlx5_0 both"}},
		{"NIC that finds a fault of itself", 8, 2, 0, 0, func(l *link) {
			if l.rail == 0 && l.src == 4 {
				l.fails = "setup port-down local"
			}
			if l.rail == 0 && l.dst == 4 {
				l.fails = "setup port-down peer"
			}
		}, []string{"nic node4/mlx5_0 both"}},
		{"rail slow as a whole", 8, 4, 0, 0, func(l *link) {
			if l.rail == 2 {
				l.bandwidth *= 0.7
			}
		}, []string{"rail rail 2 both"}},
		{"slow rail and a NIC on it", 8, 4, 0, 0, func(l *link) {
			if l.rail == 2 {
				l.bandwidth *= 0.7
				if touches(l, 1) {
					l.bandwidth *= 0.5
				}
			}
		}, []string{"nic node1/mlx5_2 both", "rail rail 2 both"}},
		{"rail that fails", 8, 4, 0, 0, func(l *link) {
			if l.rail == 3 {
				l.fails = "run retry-exceeded path"
			}
		}, []string{"rail rail 3 both"}},
		{"uplink of a rack", 16, 2, 4, 0, func(l *link) {
			if (l.srcRack == 2) != (l.dstRack == 2) {
				l.bandwidth *= 0.6
			}
		}, []string{"rack r2 both"}},
		{"uplink of a rack, only out of it", 16, 1, 4, 0, func(l *link) {
			if l.srcRack == 1 && l.dstRack != 1 {
				l.bandwidth *= 0.6
			}
		}, []string{"rack r1 sending"}},
		{"uplink of a rack on one rail", 16, 4, 4, 0, func(l *link) {
			if (l.srcRack == 2) != (l.dstRack == 2) && l.rail == 1 {
				l.bandwidth *= 0.6
			}
		}, []string{"rack r2 rail 1 both"}},
		{"between two racks", 16, 1, 4, 0, func(l *link) {
			if l.srcRack+l.dstRack == 1 {
				l.bandwidth *= 0.6
			}
		}, []string{"pair rack r0 - rack r1 both"}},
		{"one pair, both ways", 8, 2, 0, 0, func(l *link) {
			if touches(l, 2) && touches(l, 5) && l.rail == 0 {
				l.bandwidth *= 0.6
			}
		}, []string{"pair node2/mlx5_0 - node5/mlx5_0 both"}},
		{"one pair, one way", 8, 1, 0, 0, func(l *link) {
			if l.src == 2 && l.dst == 5 {
				l.bandwidth *= 0.5
			}
		}, []string{"pair node2/mlx5_0 -> node5/mlx5_0 both"}},
		{"one pair fails", 8, 1, 0, 0, func(l *link) {
			if l.src == 2 && l.dst == 5 {
				l.fails = "run retry-exceeded path"
			}
		}, []string{"pair node2/mlx5_0 -> node5/mlx5_0 both"}},
		{"delay, loss, rate limit and a dead node among eight", 8, 1, 0, 0, func(l *link) {
			if touches(l, 3) {
				delay(l, 10e-3)
			}
			if touches(l, 5) {
				lossy(l, 0.02)
			}
			if touches(l, 6) {
				l.bandwidth *= 0.1
			}
			if touches(l, 8) {
				l.fails = "connect unreachable path"
			}
		}, []string{"nic node3/mlx5_0 both", "nic node5/mlx5_0 both", "nic node6/mlx5_0 both", "node node8 both"}},
	} {
		t.Run(c.what, func(t *testing.T) {
			for seed := range uint64(5) {
				f := newFleet(seed, c.nodes, c.rails, c.perRack)
				f.missing, f.fault, f.hiccups = c.missing, c.fault, 0
				in := f.input()
				r := New(in)
				slices.Sort(c.want)
				got := names(slices.Concat(r.Suspects, r.Doubtful))
				slices.Sort(got)
				if !slices.Equal(got, append([]string{}, c.want...)) {
					t.Fatalf("seed %d: %q, want %q\n%s", seed, got, c.want, r.Summary())
				}
				f.missing = 0
				f.confirm(t, r, in)
				if len(r.Suspects) != len(c.want) {
					t.Fatalf("seed %d: cleared %q, want %q", seed, names(r.Exonerated), c.want)
				}
				for _, s := range r.Suspects {
					if !s.Confirmed {
						t.Errorf("seed %d: %s %s is not confirmed after %d checks: %s", seed, s.Kind, s.Name, s.Checks, s.Evidence)
					}
				}
				if want := Healthy; len(c.want) == 0 && c.missing == 0 && r.Verdict != want {
					t.Errorf("seed %d: verdict %s, want %s", seed, r.Verdict, want)
				}
				if len(c.want) > 0 && r.Verdict != Unhealthy {
					t.Errorf("seed %d: verdict %s", seed, r.Verdict)
				}
			}
		})
	}
}

// TestFalseBlame sweeps healthy fleets, with hiccups of single runs: what is accused at first, and what is left after it was measured
// again. The figures are in docs/localisation.md.
func TestFalseBlame(t *testing.T) {
	fleets := 50 // docs: 1000, by SWEEP_FLEETS
	if n, err := strconv.Atoi(os.Getenv("SWEEP_FLEETS")); err == nil {
		fleets = n
	}
	first, left, parts, rows := 0, 0, 0, 0
	for seed := range fleets {
		shapes := [][3]int{{8, 1, 0}, {8, 4, 0}, {16, 1, 4}, {24, 2, 4}, {12, 2, 3}}
		s := shapes[seed%len(shapes)]
		f := newFleet(uint64(seed)+1000, s[0], s[1], s[2])
		f.noise = []float64{0.005, 0.02, 0.04, 0.08}[seed%4]
		f.missing = []float64{0, 0.02, 0.2}[seed%3]
		in := f.input()
		rows += len(in.Rows)
		r := New(in)
		if len(r.Suspects) > 0 {
			first++
		}
		for _, x := range r.Suspects {
			if x.Kind != Pair {
				parts++
				t.Logf("fleet %d: %s %s: %s", seed, x.Kind, x.Name, x.Evidence)
			}
		}
		f.missing = 0
		f.confirm(t, r, in)
		for _, x := range r.Suspects {
			t.Logf("fleet %d: left after checks: %s %s: %s", seed, x.Kind, x.Name, x.Evidence)
		}
		if len(r.Suspects) > 0 {
			left++
		}
	}
	t.Logf("%d healthy fleets, %d rows: %d with a suspect at first (%d suspects that are no pairs), %d after confirmation", fleets, rows, first, parts, left)
	if parts > 0 || left > fleets/300 {
		t.Errorf("%d false NICs, nodes, rails or racks, and %d of %d fleets with a false suspect after confirmation", parts, left, fleets)
	}
}

// TestMagnitude finds out how small a fault is still seen.
func TestMagnitude(t *testing.T) {
	const tries = 10
	for _, c := range []struct {
		what  string
		fault func(*link, float64)
		steps []float64
		sure  float64 // from here on it must be found each time
	}{
		{"NIC's bandwidth times", func(l *link, x float64) { l.bandwidth *= x }, []float64{0.95, 0.92, 0.9, 0.88, 0.85, 0.8, 0.5}, 0.85},
		{"NIC's latency times", func(l *link, x float64) { l.p50, l.p99 = l.p50*x, l.p99*x }, []float64{1.1, 1.2, 1.25, 1.3, 1.4, 2}, 1.4},
	} {
		for _, x := range c.steps {
			found := 0
			for seed := range uint64(tries) {
				f := newFleet(seed+77, 8, 2, 0)
				f.fault = func(l *link) {
					if touches(l, 3) && l.rail == 1 {
						c.fault(l, x)
					}
				}
				r := New(f.input())
				if slices.ContainsFunc(r.Suspects, func(s Suspect) bool { return s.Kind == NIC && s.Name == "node3/mlx5_1" }) {
					found++
				}
			}
			t.Logf("%s %g: found in %d of %d fleets", c.what, x, found, tries)
			if (x < 1 && x <= c.sure || x > 1 && x >= c.sure) && found < tries {
				t.Errorf("%s %g: found in %d of %d only", c.what, x, found, tries)
			}
		}
	}
}

// TestManyBad finds out how many of eight ports may be bad before the method breaks down; it must say nothing wrong before that.
func TestManyBad(t *testing.T) {
	for bad := 1; bad <= 5; bad++ {
		found, wrong := 0, 0
		const tries = 10
		for seed := range uint64(tries) {
			f := newFleet(seed+99, 8, 1, 0)
			f.hiccups = 0
			f.fault = func(l *link) {
				if l.src <= bad || l.dst <= bad {
					l.bandwidth *= 0.6
				}
			}
			r := New(f.input())
			if r.Verdict == Healthy {
				t.Errorf("%d of 8 bad: healthy", bad)
			}
			for _, s := range r.Suspects {
				if s.Kind == NIC && slices.ContainsFunc([]int{1, 2, 3, 4, 5, 6, 7}[:bad], func(i int) bool { return s.Node == name(i) }) {
					found++
				} else {
					wrong++
				}
			}
		}
		t.Logf("%d of 8 ports bad: %.1f %% of them found, %d wrong suspects in %d fleets", bad, 100*float64(found)/float64(bad*tries), wrong, tries)
		if bad <= 3 && (found < bad*tries || wrong > 0) {
			t.Errorf("%d of 8 bad: %d of %d found, %d wrong", bad, found, bad*tries, wrong)
		}
		if wrong > 0 {
			t.Errorf("%d of 8 bad: %d wrong suspects", bad, wrong)
		}
	}
}

// TestTooFew must not guess.
func TestTooFew(t *testing.T) {
	slow := func(l *link) {
		if touches(l, 2) {
			l.bandwidth *= 0.5
		}
	}
	t.Run("without limits", func(t *testing.T) {
		f := newFleet(1, 4, 1, 0)
		f.fault = slow
		r := New(f.input())
		if len(r.Suspects) > 0 || len(r.Notes) == 0 {
			t.Errorf("suspects %q, notes %q", names(r.Suspects), r.Notes)
		}
	})
	t.Run("with limits", func(t *testing.T) {
		f := newFleet(1, 4, 1, 0)
		f.fault = slow
		in := f.input()
		in.Limits = map[string]Limits{"bandwidth": {LineRate: 0.8}}
		if got := names(New(in).Suspects); !slices.Equal(got, []string{"nic node2/mlx5_0 both"}) {
			t.Errorf("got %q", got)
		}
	})
	t.Run("two nodes", func(t *testing.T) {
		f := newFleet(1, 2, 1, 0)
		f.fault = slow
		in := f.input()
		in.Limits = map[string]Limits{"bandwidth": {LineRate: 0.8}}
		if got := names(New(in).Suspects); !slices.Equal(got, []string{"pair node1/mlx5_0 - node2/mlx5_0 both"}) {
			t.Errorf("got %q", got)
		}
	})
	t.Run("rows of one node", func(t *testing.T) {
		f := newFleet(1, 10, 1, 0)
		f.only, f.fault = 1, func(l *link) {
			if touches(l, 4) {
				delay(l, 10e-3)
			}
		}
		if got := names(New(f.input()).Suspects); !slices.Equal(got, []string{"pair node1/mlx5_0 - node4/mlx5_0 both"}) {
			t.Errorf("got %q", got)
		}
	})
}

// TestCoverage: what was measured, of what was planned, and which nodes were not reached.
func TestCoverage(t *testing.T) {
	f := newFleet(1, 8, 1, 0)
	f.fault = func(l *link) {
		if l.dst == 8 {
			l.fails = "connect refused peer"
		}
	}
	in := f.input()
	in.Rows = slices.DeleteFunc(in.Rows, func(r Row) bool { return r.Src == "node8" })
	in.Members[7].Reason, in.Members[7].Detail = "refused", "connection refused"
	r := New(in)
	if want := 2 * 42; r.Measured != want || r.Planned != 2*56 || r.Coverage != 0.75 {
		t.Errorf("%d of %d, coverage %g; want %d of %d", r.Measured, r.Planned, r.Coverage, want, 2*56)
	}
	if len(r.Unreached) != 1 || r.Unreached[0].Name != "node8" || r.Unreached[0].Reason != "refused" {
		t.Errorf("unreached %+v", r.Unreached)
	}
	for _, n := range r.Nodes {
		want := Healthy
		if n.Name == "node8" {
			want = Unreached
		}
		if n.Verdict != want {
			t.Errorf("%s is %s, want %s", n.Name, n.Verdict, want)
		}
	}

	f = newFleet(1, 8, 1, 0)
	f.missing = 0.3
	if r := New(f.input()); r.Verdict != Incomplete {
		t.Errorf("with 30 %% skipped the verdict is %s", r.Verdict)
	}
	if r := New(Input{Name: "empty"}); r.Verdict != Incomplete || r.Coverage != 0 {
		t.Errorf("an empty sweep is %s, coverage %g", r.Verdict, r.Coverage)
	}
}

// TestExonerate: a pair that was slow once and is fine afterwards is cleared.
func TestExonerate(t *testing.T) {
	f := newFleet(1, 8, 1, 0)
	f.hiccups = 0
	f.fault = func(l *link) {
		if l.src == 2 && l.dst == 5 {
			l.bandwidth *= 0.4
		}
	}
	in := f.input()
	r := New(in)
	if len(r.Suspects) != 0 || len(r.Doubtful) != 1 || r.Verdict != Healthy {
		t.Fatalf("suspects %q, doubtful %q, verdict %s", names(r.Suspects), names(r.Doubtful), r.Verdict)
	}
	f.fault = nil
	f.confirm(t, r, in)
	if len(r.Suspects)+len(r.Doubtful) != 0 || len(r.Exonerated) != 1 || r.Verdict != Healthy {
		t.Errorf("suspects %q, cleared %q, verdict %s", names(r.Suspects), names(r.Exonerated), r.Verdict)
	}
}

func TestDiff(t *testing.T) {
	f := newFleet(1, 8, 1, 0)
	last := New(f.input())
	f = newFleet(2, 9, 1, 0)
	f.fault = func(l *link) {
		if touches(l, 3) {
			l.bandwidth *= 0.5
		}
	}
	in := f.input()
	in.Last = last
	d := New(in).Diff
	if d == nil || !slices.Equal(d.Joined, []string{"node9"}) || len(d.Left) != 0 {
		t.Fatalf("diff %+v", d)
	}
	if len(d.Changes) == 0 || d.Changes[0].Node != "node3" || !d.Changes[0].Worse {
		t.Errorf("changes %+v", d.Changes)
	}
	for _, c := range d.Changes {
		if c.Figure != "p99" && c.Node != "node3" {
			t.Errorf("%s did not change: %s", c.Node, c)
		}
	}
	_ = fmt.Sprint(d)
}
