package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/semaphore"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/exporter"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule"
)

// bare is a daemon of which only what probes is there; run stands for its probes.
func bare(t *testing.T, text string, run func(ctx context.Context, s probe.Spec, to probe.Target, device string) *probe.Result) (*Daemon, *config.Config) {
	t.Helper()
	cfg, err := config.Parse("test.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	d := &Daemon{log: log, cfg: cfg, all: newFleet(cfg.Node, cfg.Peers.Static), light: semaphore.NewWeighted(maxLight), journal: journal{log: log}}
	d.known = &PortWatch{ports: []portName{{"rail0", 1}, {"rail1", 1}}}
	if d.exporter, err = exporter.New(exporter.Options{Node: cfg.Node.Name}); err != nil {
		t.Fatal(err)
	}
	targets := exporter.Targets{}
	for _, p := range cfg.Probes {
		targets.Probes = append(targets.Probes, p.Spec)
	}
	for name := range d.all.peers {
		targets.Peers = append(targets.Peers, name)
	}
	d.exporter.SetTargets(targets)
	d.probe = func(ctx context.Context, s probe.Spec, to probe.Target, device string, port int) *probe.Result {
		r := run(ctx, s, to, device)
		r.Probe, r.Peer, r.Device, r.Port, r.Path, r.Op = s.Name, to.Name, device, port, to.Path, s.WithDefaults().Op
		return r
	}
	return d, cfg
}

func figures() *probe.Result { return &probe.Result{Time: time.Now(), Outcome: probe.OK} }

func bad(scope probe.Scope, reason probe.Reason) *probe.Result {
	return &probe.Result{Time: time.Now(), Outcome: probe.Failed, Stage: new(probe.StageRun), Reason: &reason, Scope: &scope, Detail: new("why")}
}

func busy() *probe.Result {
	r := bad(probe.ScopePeer, probe.BusyPort)
	r.Outcome = probe.Skipped
	return r
}

func fleetText(self string, n int, probes string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "node: {name: %s, labels: {rack: r%s}}\npeers:\n  static:\n", self, self[4:5])
	for i := range n {
		fmt.Fprintf(&b, "    - {name: node%02d, address: '10.0.0.%d', labels: {rack: r%d}}\n", i, i+1, i/10)
	}
	return b.String() + "probes:\n  - " + probes + "\n"
}

// A whole fleet's tournament, each node on its own: every pair meets once, in both directions, one after the other, every rail
// its like, and no port is in two sessions at a time.
func TestTournament(t *testing.T) {
	for _, tt := range []struct {
		name string
		n    int
		who  func(i, j int) bool // who is to meet
		text string
	}{
		{"eight", 8, func(i, j int) bool { return true }, "{name: bw, schedule: '0 2 * * *', kind: bandwidth, pairing: {strategy: tournament}}"},
		{"odd", 5, func(i, j int) bool { return true }, "{name: bw, schedule: '0 2 * * *', kind: bandwidth, pairing: {strategy: tournament}}"},
		{
			"racks", 13, func(i, j int) bool { return i/10 != j/10 },
			"{name: bw, schedule: '0 2 * * *', kind: bandwidth, pairing: {strategy: tournament, where: {rack: other}}}",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				met, inUse := map[string]int{}, map[string]bool{}
				var fleet []*Daemon
				due := time.Now().Truncate(time.Second).Add(3 * time.Second)
				var all sync.WaitGroup
				for i := range tt.n {
					self := fmt.Sprintf("node%02d", i)
					d, cfg := bare(t, fleetText(self, tt.n, tt.text), func(_ context.Context, s probe.Spec, to probe.Target, device string) *probe.Result {
						ports := []string{self + device, to.Name + device}
						mu.Lock()
						met[self+" "+to.Name]++
						for _, p := range ports {
							if inUse[p] {
								t.Errorf("%s is in use when %s asks %s", p, self, to.Name)
							}
							inUse[p] = true
						}
						mu.Unlock()
						time.Sleep(4 * time.Second)
						mu.Lock()
						defer mu.Unlock()
						for _, p := range ports {
							inUse[p] = false
						}
						if s.Wait <= 0 || s.Deadline > 10*time.Second {
							t.Errorf("waits %s, deadline %s in a slot of 10 s", s.Wait, s.Deadline)
						}
						return figures()
					})
					fleet = append(fleet, d)
					p := cfg.Probes[0]
					p.Spec = p.Spec.WithDefaults()
					all.Go(func() { d.tournament(t.Context(), p, due) })
				}
				all.Wait()
				pairs := 0
				for i := range tt.n {
					for j := range tt.n {
						want := 0
						if i != j && tt.who(i, j) {
							want = 2 // rails
							pairs++
						}
						if got := met[fmt.Sprintf("node%02d node%02d", i, j)]; got != want {
							t.Errorf("node %d probed node %d %d times, want %d", i, j, got, want)
						}
					}
				}
				for _, d := range fleet {
					if _, text := page(t, d, http.MethodGet, "/metrics"); pairs > 0 && !strings.Contains(text, `rdmabench_coverage_ratio{probe="bw",src="`+d.config().Node.Name+`"} 1`) {
						t.Errorf("coverage of %s is not whole", d.config().Node.Name)
					}
				}
			})
		})
	}
}

// A node that begins late takes part in what is left, and says what it missed.
func TestTournamentLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		runs := 0
		text := fleetText("node00", 8, "{name: bw, schedule: '0 2 * * *', kind: bandwidth, pairing: {strategy: tournament}}")
		d, cfg := bare(t, text, func(context.Context, probe.Spec, probe.Target, string) *probe.Result { runs++; return figures() })
		d.known.ports = d.known.ports[:1]
		d.tournament(t.Context(), cfg.Probes[0], time.Now().Add(-30*time.Second))
		if runs != 4 {
			t.Errorf("%d runs, want those of the last 4 of 7 slots", runs)
		}
		_, text = page(t, d, http.MethodGet, "/metrics")
		if !strings.Contains(text, `rdmabench_probe_skips_total{probe="bw",reason="overlap",src="node00"} 3`) {
			t.Error("the slots missed are not counted")
		}
	})
}

// A failure counts when a second run has confirmed it, once; what was known to fail is not tried twice.
func TestConfirm(t *testing.T) {
	fail := func() *probe.Result { return bad(probe.ScopePath, probe.RetryExceeded) }
	local := func() *probe.Result { return bad(probe.ScopeLocal, probe.PortDown) }
	for _, tt := range []struct {
		name        string
		runs        []func() *probe.Result // what each run comes to
		visits      int
		ok, failed  int // as counted
		unconfirmed int
	}{
		{"good", []func() *probe.Result{figures}, 1, 1, 0, 0},
		{"chance", []func() *probe.Result{fail, figures}, 1, 1, 0, 1},
		{"confirmed", []func() *probe.Result{fail, fail}, 1, 0, 1, 0},
		{"busy when repeated", []func() *probe.Result{fail, busy}, 1, 0, 1, 0},
		{"of this node", []func() *probe.Result{local}, 1, 0, 1, 0},
		{"known to fail", []func() *probe.Result{fail, fail, fail, fail}, 3, 0, 3, 0},
		{"mended, then new", []func() *probe.Result{fail, fail, figures, fail, figures}, 3, 2, 1, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begin, n := time.Now(), 0
				text := fleetText("node00", 2, "{name: rtt, schedule: '@hourly', kind: latency}")
				d, cfg := bare(t, text, func(context.Context, probe.Spec, probe.Target, string) *probe.Result {
					if n++; n > len(tt.runs) {
						t.Fatalf("run %d", n)
					}
					return tt.runs[n-1]()
				})
				for range tt.visits {
					d.measure(t.Context(), cfg.Probes[0].Spec, probe.Target{Name: "node01"}, portName{"rail0", 1}, time.Time{})
				}
				if n != len(tt.runs) {
					t.Errorf("%d runs, want %d", n, len(tt.runs))
				}
				_, text = page(t, d, http.MethodGet, "/metrics")
				for metric, want := range map[string]int{
					`rdmabench_probe_runs_total{device="rail0",op="write",port="1",probe="rtt",rail="",result="ok",src="node00"}`:     tt.ok,
					`rdmabench_probe_runs_total{device="rail0",op="write",port="1",probe="rtt",rail="",result="failed",src="node00"}`: tt.failed,
					`rdmabench_probe_unconfirmed_failures_total{probe="rtt",src="node00"}`:                                            tt.unconfirmed,
				} {
					if !strings.Contains(text, fmt.Sprintf("%s %d\n", metric, want)) {
						t.Errorf("%s is not %d", metric, want)
					}
				}
				if took := time.Since(begin); took > time.Duration(tt.visits)*2*confirmPause {
					t.Errorf("took %s", took)
				}
			})
		})
	}
}

// What the scheduler is given, and whom each firing visits.
func TestJobs(t *testing.T) {
	for _, tt := range []struct {
		name, probe string
		jobs        int
		visits      int // of one firing, from two ports
	}{
		{"all", "{name: p, schedule: '@hourly', kind: latency}", 11, 22},
		{"heavy", "{name: p, schedule: '@hourly', kind: bandwidth}", 1, 22},
		{"ring", "{name: p, schedule: '@hourly', kind: latency, pairing: {strategy: ring, peers: 3}}", 3, 6},
		{"random", "{name: p, schedule: '@hourly', kind: latency, pairing: {strategy: random, peers: 3}}", 3, 6},
		{"heavy random", "{name: p, schedule: '@hourly', kind: bandwidth, pairing: {strategy: random, peers: 3}}", 1, 6},
		{"same rack", "{name: p, schedule: '@hourly', kind: latency, pairing: {where: {rack: same}}}", 9, 18},
		{"one of each rack", "{name: p, schedule: '@hourly', kind: latency, pairing: {where: {rack: one-of-each}}}", 2, 4},
		{"nobody fits", "{name: p, schedule: '@hourly', kind: latency, pairing: {where: {pod: same}}}", 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				var visited []string
				d, cfg := bare(t, fleetText("node00", 12, tt.probe), func(_ context.Context, _ probe.Spec, to probe.Target, device string) *probe.Result {
					mu.Lock()
					defer mu.Unlock()
					visited = append(visited, to.Name+device)
					return figures()
				})
				jobs := d.jobs(cfg, d.all)
				if err := schedule.New(schedule.Options{}).Replace(jobs); err != nil {
					t.Fatal(err)
				}
				due := time.Now().Truncate(time.Hour)
				for _, j := range jobs {
					j.Run(t.Context(), due)
				}
				if len(jobs) != tt.jobs || len(visited) != tt.visits {
					t.Errorf("%d jobs, %d visits: %v; want %d and %d", len(jobs), len(visited), visited, tt.jobs, tt.visits)
				}
				slices.Sort(visited)
				if n := len(slices.Compact(visited)); n != tt.visits {
					t.Errorf("some were visited twice: %v", visited)
				}
				_, text := page(t, d, http.MethodGet, "/api/v1/coverage")
				if want := fmt.Sprintf(`"planned":%d,"measured":%[1]d,`, tt.visits); !strings.Contains(text, want) {
					t.Errorf("coverage %s, want %s", text, want)
				}
			})
		})
	}
}

// A reload that changes the peers ends no run, and what was planned before is known still.
func TestJobsSurviveNewPeers(t *testing.T) {
	for _, strategy := range []string{"{strategy: tournament}", "{strategy: random, peers: 2}", "{}"} {
		probes := "{name: p, schedule: '@hourly', kind: bandwidth, pairing: " + strategy + "}"
		var definitions [][]string
		for _, n := range []int{4, 5} {
			d, cfg := bare(t, fleetText("node00", n, probes), nil)
			var now []string
			for _, j := range d.jobs(cfg, d.all) {
				now = append(now, fmt.Sprint(j.Name, j.Jitter, j.Timeout, j.Definition))
			}
			definitions = append(definitions, now)
		}
		if diff := cmp.Diff(definitions[0], definitions[1]); diff != "" {
			t.Errorf("%s: a new peer changes the job:\n%s", strategy, diff)
		}
	}
}

// A period in which the probe was held up by the one before it counts as not measured.
func TestOverlapIsNotCovered(t *testing.T) {
	d, cfg := bare(t, fleetText("node00", 3, "{name: p, schedule: '@hourly', kind: bandwidth}"), func(context.Context, probe.Spec, probe.Target, string) *probe.Result { return figures() })
	first := time.Now().Truncate(time.Hour)
	d.round(t.Context(), cfg.Probes[0], first)
	d.skipped("p", schedule.Overlap, first.Add(time.Hour), 1)
	d.skipped("p", schedule.Overlap, first.Add(2*time.Hour), 1)
	if _, text := page(t, d, http.MethodGet, "/metrics"); !strings.Contains(text, `rdmabench_coverage_ratio{probe="p",src="node00"} 0`) {
		t.Error("an hour without a run is covered")
	}
}

func TestFleet(t *testing.T) {
	labels := map[string]string{"rack": "r1"}
	f := newFleet(config.Node{Name: "b", Labels: labels}, []config.Peer{{Name: "c"}, {Name: "b", Address: "b:1"}, {Name: "a", Labels: labels}, {Name: "a"}})
	var names []string
	for _, m := range f.members {
		names = append(names, m.Name)
	}
	if diff := cmp.Diff([]string{"a", "b", "c"}, names); diff != "" || f.own().Name != "b" || len(f.peers) != 2 {
		t.Errorf("own %s, peers %v, members (-want +got):\n%s", f.own().Name, f.peers, diff)
	}
	if to := f.target(f.peers["a"]); to.Path != "same_rack" {
		t.Errorf("target %+v", to)
	}
}
