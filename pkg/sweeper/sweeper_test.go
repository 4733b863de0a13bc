package sweeper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/sweep"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func nodeConfig(t *testing.T, name string, peers []config.Peer) *config.Config {
	t.Helper()
	cfg, err := config.Parse("test.yaml", []byte(`
node: {name: `+name+`, labels: {rack: r1}}
control: {listen: "127.0.0.1:1"}
probes:
  - {name: bw, schedule: "@hourly", kind: bandwidth, op: write, sizes: 64KiB, iterations: 10}
  - {name: rtt, schedule: "@hourly", kind: latency, op: write, sizes: 8, iterations: 10}
`))
	if err != nil {
		t.Fatal(err)
	}
	cfg.Peers.Static = peers
	return cfg
}

// fakeFleet is daemons without RDMA: real control channels, results made up.
type fakeFleet struct {
	peers []config.Peer
	mu    sync.Mutex
	count map[string]int // sessions by pair
	busy  map[string]int // a pair is busy so many times
	slow  map[string]bool
	dead  map[string]bool
}

// result is what a probe would have come to.
func (f *fakeFleet) result(src string, s probe.Spec, to probe.Target, device string) *probe.Result {
	f.mu.Lock()
	defer f.mu.Unlock()
	pair := src + ">" + to.Name
	f.count[pair]++
	r := &probe.Result{ID: pair, Time: time.Now(), Probe: s.Name, Peer: to.Name, Path: to.Path, Device: device, Port: 1, Rail: "0", Kind: s.Kind, Op: s.Op, Outcome: probe.OK}
	fail := func(o probe.Outcome, stage probe.Stage, reason probe.Reason, scope probe.Scope) *probe.Result {
		detail := "made up"
		r.Outcome, r.Stage, r.Reason, r.Scope, r.Detail = o, &stage, &reason, &scope, &detail
		return r
	}
	switch {
	case f.dead[to.Name]:
		return fail(probe.Failed, probe.StageConnect, probe.Refused, probe.ScopePeer)
	case f.busy[pair] > 0:
		f.busy[pair]--
		return fail(probe.Skipped, probe.StageAdmit, probe.BusyPort, probe.ScopePeer)
	}
	dev, port := "rxe0", 1
	r.PeerDev, r.PeerPort = &dev, &port
	v := 10e9 + float64(f.count[pair])*1e6
	if f.slow[src] || f.slow[to.Name] {
		v /= 3
	}
	p50 := 2e-6
	run := probe.Run{Size: s.Sizes[0], Iterations: 10}
	if s.Kind == probe.Latency {
		run.Latency = &probe.LatencyStats{P50: &p50, P99: &p50}
	} else {
		run.Bandwidth = &probe.BandwidthStats{BytesPerSecond: v}
	}
	r.Runs = []probe.Run{run}
	return r
}

func (f *fakeFleet) runner(t *testing.T, name string) *Runner {
	cfg := nodeConfig(t, name, f.peers)
	return &Runner{
		Config: func() *config.Config { return cfg }, Peers: func() []config.Peer { return f.peers }, Log: slog.New(slog.DiscardHandler),
		Ports: func() []Port { return []Port{{Device: "rxe0", Port: 1, Rail: "0"}} },
		Probe: func(_ context.Context, s probe.Spec, to probe.Target, device string, _ int) *probe.Result {
			return f.result(name, s, to, device)
		},
		Results: func() []*probe.Result {
			var out []*probe.Result
			for _, p := range f.peers {
				if p.Name != name {
					out = append(out, f.result(name, probe.Spec{Name: "bw", Kind: probe.Bandwidth, Op: "write", Sizes: []int{65536}}, probe.Target{Name: p.Name}, "rxe0"))
				}
			}
			return out
		},
	}
}

// newFakeFleet starts n nodes; those in dead have no daemon.
func newFakeFleet(t *testing.T, n int, dead ...string) *fakeFleet {
	t.Helper()
	f := &fakeFleet{count: map[string]int{}, busy: map[string]int{}, slow: map[string]bool{}, dead: map[string]bool{}}
	for _, d := range dead {
		f.dead[d] = true
	}
	var listeners []net.Listener
	for i := 1; i <= n; i++ {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		listeners = append(listeners, l)
		f.peers = append(f.peers, config.Peer{Name: fmt.Sprintf("n%d", i), Address: l.Addr().String(), Labels: map[string]string{"rack": "r1"}})
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for i, p := range f.peers {
		if f.dead[p.Name] {
			listeners[i].Close()
			continue
		}
		r := f.runner(t, p.Name)
		s := control.Server{Sweeper: r, Guard: control.AddressGuard(func(string) bool { return true }), Log: r.Log}
		wg.Go(func() { _ = r.Run(ctx) })
		wg.Go(func() { _ = s.Serve(ctx, listeners[i]) })
	}
	t.Cleanup(func() { cancel(); wg.Wait() })
	return f
}

// TestFleet: every pair of the living is measured once, the dead node is listed and named, the slow one is found and confirmed.
func TestFleet(t *testing.T) {
	f := newFakeFleet(t, 9, "n9")
	f.slow["n3"] = true
	f.busy["n1>n2"] = 2
	client := control.NewClient()
	defer client.CloseIdle()
	fl := &Fleet{Client: client, Members: f.peers}
	in := Input("bw", "n1", fl.Sweep(t.Context(), control.SweepRequest{ID: NewID(), Deadline: 60}))
	r := sweep.New(in)
	if r.Planned != 72 || r.Measured != 56 {
		t.Errorf("measured %d of %d, want 56 of 72", r.Measured, r.Planned)
	}
	if len(r.Unreached) != 1 || r.Unreached[0].Name != "n9" || r.Unreached[0].Reason != "refused" {
		t.Errorf("unreached %+v", r.Unreached)
	}
	var got []string
	for _, s := range r.Suspects {
		got = append(got, string(s.Kind)+" "+s.Name)
	}
	if slices.Sort(got); !slices.Equal(got, []string{"nic n3/rxe0", "node n9"}) {
		t.Errorf("suspects %q", got)
	}
	for pair, n := range f.count {
		if want := map[bool]int{false: 1, true: 3}[pair == "n1>n2"]; n != want {
			t.Errorf("%s was measured %d times, want %d", pair, n, want)
		}
	}
	fl.Confirm(t.Context(), r, in, time.Minute)
	if len(r.Suspects) != 2 {
		t.Fatalf("cleared %+v", r.Exonerated)
	}
	for _, s := range r.Suspects {
		if !s.Confirmed {
			t.Errorf("%s is not confirmed after %d checks", s.Name, s.Checks)
		}
	}
}

func TestBlame(t *testing.T) {
	f := newFakeFleet(t, 8)
	f.slow["n3"] = true
	client := control.NewClient()
	defer client.CloseIdle()
	r := sweep.New(Input("last results", "n1", (&Fleet{Client: client, Members: f.peers}).Last(t.Context())))
	if r.Measured != 56 || len(r.Suspects) != 1 || r.Suspects[0].Name != "n3/rxe0" {
		t.Errorf("%d rows, suspects %+v", r.Measured, r.Suspects)
	}
}

// TestNameMismatch: a node that says it is another one is not believed.
func TestNameMismatch(t *testing.T) {
	f := newFakeFleet(t, 2)
	f.peers[0].Address, f.peers[1].Address = f.peers[1].Address, f.peers[0].Address
	client := control.NewClient()
	defer client.CloseIdle()
	in := Input("x", "n1", (&Fleet{Client: client, Members: slices.Clone(f.peers)}).Last(t.Context()))
	if len(in.Rows) != 0 || in.Members[0].Reason != "incompatible" {
		t.Errorf("%+v", in)
	}
}

// TestOneAtATime: a second sweep is told that one is under way, the same one again is fine.
func TestOneAtATime(t *testing.T) {
	f := newFakeFleet(t, 1)
	r := f.runner(t, "n1")
	first := &control.SweepRequest{ID: "one", Deadline: 60}
	if err := r.Sweep(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	if err := r.Sweep(t.Context(), first); err != nil {
		t.Errorf("the same again: %v", err)
	}
	var e *control.Error
	if err := r.Sweep(t.Context(), &control.SweepRequest{ID: "two", Deadline: 60}); !errors.As(err, &e) || e.Reason != "busy" {
		t.Errorf("a second one: %v", err)
	}
	if err := r.Sweep(t.Context(), &control.SweepRequest{ID: "three", Deadline: 60, Probes: []string{"nope"}}); !errors.As(err, &e) || !strings.Contains(e.Detail, "nope") {
		t.Errorf("an unknown probe: %v", err)
	}
	if rep, err := r.Rows(t.Context(), "one"); err != nil || !rep.Running || len(rep.Rows) != 0 {
		t.Errorf("rows of what has not begun: %+v %v", rep, err)
	}
	if _, err := r.Rows(t.Context(), "two"); err == nil {
		t.Error("rows of an unknown sweep")
	}
}

// TestDeadline: what was not measured in time is there as not measured.
func TestDeadline(t *testing.T) {
	f := newFakeFleet(t, 4)
	r := f.runner(t, "n1")
	ctx, cancel := context.WithCancel(t.Context())
	run := r.Probe
	r.Probe = func(ctx context.Context, s probe.Spec, to probe.Target, device string, port int) *probe.Result {
		cancel()
		return run(ctx, s, to, device, port)
	}
	own := r.Once(ctx, control.SweepRequest{ID: "x", Deadline: 60}, nil)
	if own.Report.Planned != 3 || own.Report.Measured != 1 || own.Report.Verdict != sweep.Incomplete {
		t.Errorf("%s", own.Report.Summary())
	}
}

// TestDeadPeer is asked once, not for every probe.
func TestDeadPeer(t *testing.T) {
	f := newFakeFleet(t, 3, "n2")
	r := f.runner(t, "n1")
	own := r.Once(t.Context(), control.SweepRequest{ID: "x", Deadline: 60, Probes: []string{"bw", "rtt"}}, nil)
	if f.count["n1>n2"] != 1 || own.Report.Planned != 4 || len(own.Report.Unreached) != 1 {
		t.Errorf("asked %d times; %s", f.count["n1>n2"], own.Report.Summary())
	}
}

func TestCollect(t *testing.T) {
	f := newFakeFleet(t, 8)
	r := f.runner(t, "n1")
	var got *Own
	r.Done = func(o *Own) { got = o }
	end := r.Collect("bw")
	for _, p := range f.peers[1:] {
		r.Note(f.result("n1", probe.Spec{Name: "bw", Kind: probe.Bandwidth, Op: "write", Sizes: []int{65536}}, probe.Target{Name: p.Name}, "rxe0"))
		r.Note(f.result("n1", probe.Spec{Name: "rtt", Kind: probe.Latency, Op: "write", Sizes: []int{8}}, probe.Target{Name: p.Name}, "rxe0"))
	}
	end(t.Context())
	if got == nil || got.Report.Planned != 7 || got.Report.Verdict != sweep.Healthy || got.Report.Name != "bw" {
		t.Fatalf("%+v", got)
	}
}

func report(name string, fleet bool, at time.Time, v sweep.Verdict) *sweep.Report {
	r := sweep.New(sweep.Input{Name: name, By: "n1", Fleet: fleet, Started: at, Finished: at.Add(time.Minute)})
	r.Verdict = v
	return r
}

func TestStore(t *testing.T) {
	for _, dir := range []string{t.TempDir(), ""} {
		s := &Store{Dir: dir}
		at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
		for i := range 30 {
			v := sweep.Healthy
			if i%2 == 1 {
				v = sweep.Unhealthy
			}
			if _, err := s.Put(report("nightly/../x", i%3 == 0, at.Add(time.Duration(i)*time.Minute), v)); (err == nil) != (dir != "") {
				t.Fatal(err)
			}
		}
		list := s.List()
		if want := map[bool]int{true: 30, false: 2 * keepMemory}[dir != ""]; len(list) != want {
			t.Fatalf("%q: %d are kept, want %d", dir, len(list), want)
		}
		if r, err := s.Get(list[0].ID); err != nil || r.Name != "nightly/../x" {
			t.Errorf("%v %v", r, err)
		}
		last := s.LastGood("nightly/../x", false, at.Add(29*time.Minute))
		if last == nil || last.Verdict != sweep.Healthy || !last.Started.Before(at.Add(29*time.Minute)) {
			t.Errorf("last good: %+v", last)
		}
		for _, id := range []string{"../../etc/passwd", "", "x", ".._node_20260102T030405Z/../y"} {
			if _, err := s.Get(id); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%q: %v", id, err)
			}
		}
	}
	outside := t.TempDir()
	s := &Store{Dir: filepath.Join(outside, "a")}
	if _, err := s.Put(report("../../evil", false, time.Now(), sweep.Healthy)); err != nil {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(outside); len(left) != 1 {
		t.Errorf("files outside of the folder: %v", left)
	}
}

// TestAccept records the label of a healthy node only.
func TestAccept(t *testing.T) {
	f := newFakeFleet(t, 8)
	own := f.runner(t, "n1").Once(t.Context(), control.SweepRequest{ID: "x", Deadline: 60, Probes: []string{"bw", "rtt"}}, nil)
	s := &Store{Dir: t.TempDir()}
	file, err := s.Accept(own.Report, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var l Label
	if err := json.Unmarshal(data, &l); err != nil || l.Node != "n1" || len(l.Figures) != 3 || l.Figures[0].Median < 10e9 || l.Figures[0].Rows != 7 {
		t.Errorf("%v %s", err, data)
	}
	own.Report.Nodes[0].Verdict = sweep.Unhealthy
	if _, err := s.Accept(own.Report, time.Now()); err == nil {
		t.Error("an unhealthy node is accepted")
	}
}

func TestWeb(t *testing.T) {
	f := newFakeFleet(t, 4)
	w := &Web{Runner: f.runner(t, "n1"), Store: &Store{Dir: t.TempDir()}}
	done := make(chan string, 1)
	w.Runner.Done = func(o *Own) {
		id, err := w.Store.Put(o.Report)
		if err != nil {
			t.Error(err)
		}
		done <- id
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = w.Runner.Run(ctx) })
	defer wg.Wait()
	defer cancel()
	call := func(method, path, body string, header ...string) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
		for i := 0; i < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		rec := httptest.NewRecorder()
		w.Handler().ServeHTTP(rec, r)
		return rec
	}
	for body, want := range map[string]int{`{"probes":["nope"]}`: http.StatusBadRequest, `{"probe":1}`: http.StatusBadRequest, `{"deadline":-1}`: http.StatusBadRequest} {
		if rec := call(http.MethodPost, "/api/v1/sweeps", body); rec.Code != want {
			t.Errorf("%s: %d %s", body, rec.Code, rec.Body)
		}
	}
	if rec := call(http.MethodPost, "/api/v1/sweeps", "", "Sec-Fetch-Site", "cross-site"); rec.Code != http.StatusForbidden {
		t.Errorf("a page of another origin: %d", rec.Code)
	}
	if rec := call(http.MethodPost, "/api/v1/sweeps", ""); rec.Code != http.StatusAccepted {
		t.Fatalf("%d %s", rec.Code, rec.Body)
	}
	id := <-done
	if rec := call(http.MethodPost, "/api/v1/sweeps", ""); rec.Code != http.StatusTooManyRequests {
		t.Errorf("at once again: %d", rec.Code)
	}
	for path, want := range map[string]string{
		"/sweeps/": id, "/sweeps/" + id: "<!doctype html>", "/sweeps/" + id + ".json": `"verdict"`, "/sweeps/" + id + ".txt": "sweep bw by n1", "/sweeps/" + id + ".xml": "<testsuites",
		"/api/v1/sweeps": `"reports"`,
	} {
		if rec := call(http.MethodGet, path, ""); rec.Code != http.StatusOK || !strings.Contains(rec.Body.String(), want) {
			t.Errorf("%s: %d, want it to have %q", path, rec.Code, want)
		}
	}
	if rec := call(http.MethodGet, "/sweeps/nope", ""); rec.Code != http.StatusNotFound {
		t.Errorf("no such report: %d", rec.Code)
	}
}
