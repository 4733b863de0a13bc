package exporter

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/sweep"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

var update = flag.Bool("update", false, "write docs/metrics.md and testdata/*.prom anew")

// fakePorts is a PortSource.
type fakePorts struct {
	mu    sync.Mutex
	ports []PortState
	err   error
}

func (f *fakePorts) Ports(context.Context) ([]PortState, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ports, f.err
}

func (f *fakePorts) set(err error, ports ...PortState) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ports, f.err = ports, err
}

func twoPorts() []PortState {
	return []PortState{
		{
			Device: "mlx5_0", Port: 1, Usable: true, Up: new(true), RateBytesPerSecond: new(25e9), Rail: "0", LinkLayer: "Ethernet", Driver: "mlx5",
			Firmware: "28.39.1002", HCAType: "MT4129", BoardID: "MT_0000000838", PCI: "0000:18:00.0", NUMANode: "0", Netdev: "ens1np0",
			Counters: map[string]uint64{"out_of_sequence": 3, "np_cnp_sent": 0}, Events: map[string]uint64{"sequence": 3, "congestion": 0},
			Environment: halfWidth(),
		},
		{Device: "mlx5_1", Port: 1, Up: new(false), Reason: probe.PortDown, Detail: "mlx5_1 port 1 is in state DOWN", Rail: "1", LinkLayer: "Ethernet"},
	}
}

// halfWidth is an environment in which one condition is bad, one is good and the others can't be told.
func halfWidth() *counters.Environment {
	return &counters.Environment{
		Device: "mlx5_0", Port: 1, Visible: true, Driver: "mlx5", Versions: counters.Versions{Kernel: new("6.1.0"), RDMACore: new("44.0")},
		PCI: &counters.PCIState{BDF: "0000:18:00.0", CurWidth: new(8), MaxWidth: new(16), CurGTS: new(32.0), MaxGTS: new(32.0)},
	}
}

func specs() []probe.Spec {
	return []probe.Spec{
		{Name: "rtt", Kind: probe.Latency, Interval: 5 * time.Minute},
		{Name: "bw", Kind: probe.Bandwidth, Op: verbs.Read, Sizes: []int{65536, 1 << 20}, Interval: 6 * time.Hour},
	}
}

func newExporter(t testing.TB, o Options) *Exporter {
	t.Helper()
	o.Node = "n1"
	e, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	e.SetTargets(Targets{Probes: specs(), Peers: []string{"n2", "n3"}})
	return e
}

func result(name, peer string) *probe.Result {
	return &probe.Result{
		ID: "0123456789abcdef0123456789abcdef", Time: time.Now(), Duration: 0.25, Outcome: probe.OK, Probe: name, Peer: peer, Path: "same_rack",
		Device: "mlx5_0", Port: 1, Rail: "0", PeerDev: new("mlx5_4"), PeerPort: new(1),
	}
}

func recorded(ns ...int64) *hdrhistogram.Histogram {
	h := hdrhistogram.New(1, verbs.HistogramHighest, 3)
	for _, v := range ns {
		_ = h.RecordValue(v) // in range
	}
	return h
}

func latencyResult(peer string, ns ...int64) *probe.Result {
	r := result("rtt", peer)
	h := recorded(ns...)
	r.Runs = []probe.Run{{
		Size: 8, Iterations: uint64(len(ns)), Seconds: 0.01, Bytes: 16 * uint64(len(ns)), Histogram: h,
		Latency: &probe.LatencyStats{
			Measure: probe.HalfRTT, Samples: int64(len(ns)), Min: float64(slices.Min(ns)) / 1e9, Max: float64(slices.Max(ns)) / 1e9,
			Mean: h.Mean() / 1e9, P50: new(float64(h.ValueAtQuantile(50)) / 1e9),
		},
		CPUSeconds: probe.CPUSeconds{Local: new(0.5)},
	}}
	return r
}

func bandwidthResult(peer string, bytesPerSecond float64) *probe.Result {
	r := result("bw", peer)
	for _, size := range []int{65536, 1 << 20} {
		r.Runs = append(r.Runs, probe.Run{
			Size: size, Iterations: 100, Seconds: 1, Bytes: 100 * uint64(size), Bandwidth: &probe.BandwidthStats{BytesPerSecond: bytesPerSecond, Rx: &bytesPerSecond},
			MessageRate: new(bytesPerSecond / float64(size)), LossRatio: new(0.0), CPUSeconds: probe.CPUSeconds{Local: new(1.0), Remote: new(2.0)},
		})
	}
	return r
}

func failed(r *probe.Result, stage probe.Stage, reason probe.Reason, scope probe.Scope) *probe.Result {
	r.Outcome, r.Stage, r.Reason, r.Scope, r.Detail, r.Runs, r.PeerDev = probe.Failed, &stage, &reason, &scope, new("what happened"), nil, nil
	return r
}

func skipped(r *probe.Result, reason probe.Reason) *probe.Result {
	r.Outcome, r.Reason, r.Runs = probe.Skipped, &reason, nil
	return r
}

// scrape gets /metrics as Prometheus does and returns the families of ours.
func scrape(t testing.TB, e *Exporter) map[string]*dto.MetricFamily {
	t.Helper()
	req := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	req.Header.Set("Accept", string(expfmt.NewFormat(expfmt.TypeProtoDelim)))
	w := httptest.NewRecorder()
	e.Handler(HandlerOptions{}).ServeHTTP(w, req)
	if w.Code != http.StatusOK {
		t.Fatalf("/metrics answers %d: %s", w.Code, w.Body)
	}
	families := map[string]*dto.MetricFamily{}
	for dec := expfmt.NewDecoder(w.Body, expfmt.ResponseFormat(w.Header())); ; {
		var f dto.MetricFamily
		if err := dec.Decode(&f); err != nil {
			break
		}
		families[strings.TrimPrefix(f.GetName(), "rdmabench_")] = &f
	}
	return families
}

// find returns the values of a metric whose series have all the labels given as name, value, name, value …
func find(t testing.TB, families map[string]*dto.MetricFamily, name string, labels ...string) []float64 {
	t.Helper()
	var out []float64
series:
	for _, m := range families[name].GetMetric() {
		for i := 0; i < len(labels); i += 2 {
			if !slices.ContainsFunc(m.Label, func(l *dto.LabelPair) bool { return l.GetName() == labels[i] && l.GetValue() == labels[i+1] }) {
				continue series
			}
		}
		switch {
		case m.Gauge != nil:
			out = append(out, m.Gauge.GetValue())
		case m.Counter != nil:
			out = append(out, m.Counter.GetValue())
		case m.Histogram != nil:
			out = append(out, float64(m.Histogram.GetSampleCount()))
		}
	}
	return out
}

// want checks the one value of a series; NaN stands for "there is no such series".
func want(t testing.TB, families map[string]*dto.MetricFamily, value float64, name string, labels ...string) {
	t.Helper()
	got := find(t, families, name, labels...)
	switch {
	case math.IsNaN(value) && len(got) > 0:
		t.Errorf("%s%v = %v, want no series", name, labels, got)
	case !math.IsNaN(value) && (len(got) != 1 || math.Abs(got[0]-value) > 1e-9*math.Abs(value)):
		t.Errorf("%s%v = %v, want %v", name, labels, got, value)
	}
}

var absent = math.NaN()

// scenario feeds an exporter with one of everything.
func scenario(e *Exporter) {
	e.SetReload(nil)
	e.readPorts(context.Background())
	e.Plan("rtt", time.Now(), []string{"n2", "n3"}, 1)
	e.Observe(latencyResult("n2", 1900, 2000, 2100, 9000))
	e.Observe(failed(result("rtt", "n3"), probe.StageConnect, probe.Refused, probe.ScopePeer))
	tainted := bandwidthResult("n2", 20e9)
	tainted.Outcome, tainted.Taints = probe.Tainted, []probe.Taint{probe.TaintRetransmit}
	e.Observe(tainted)
	e.Observe(bandwidthResult("n2", 24e9))
	e.Observe(skipped(result("bw", "n3"), probe.BusyPort))
	e.Skipped("bw", probe.Overlap, 2)
	e.Missed("rtt", 3)
	e.Panicked("bw")
	time.Sleep(30 * time.Second)
	e.SetReload(errors.New("no"))
	e.Swept(sweepReport(8))
}

// sweepReport is of a healthy sweep from one node to some others.
func sweepReport(peers int) *sweep.Report {
	in := sweep.Input{Name: "bw", By: "n1", Started: time.Now().Add(-20 * time.Second), Finished: time.Now()}
	for i := range peers {
		v := 24e9
		in.Rows = append(in.Rows, sweep.Row{Src: "n1", SrcDevice: "mlx5_0", SrcPort: 1, Dst: fmt.Sprintf("p%d", i), DstDevice: "mlx5_0", DstPort: 1, Probe: "bw",
			Kind: "bandwidth", Op: "write", Result: "ok", Points: []control.Point{{Size: 65536, Bandwidth: &v}}})
	}
	return sweep.New(in)
}

// TestSweptFaults: what a sweep found is in the metrics, and the time of the last good one stays.
func TestSweptFaults(t *testing.T) {
	e := newExporter(t, Options{})
	good := sweepReport(8)
	e.Swept(good)
	bad := sweepReport(8)
	bad.Finished = good.Finished.Add(time.Hour)
	bad.Verdict, bad.Suspects, bad.Unreached = sweep.Unhealthy, []sweep.Suspect{{Kind: sweep.NIC}, {Kind: sweep.NIC}}, []sweep.UnreachedNode{{Name: "p1"}}
	e.Swept(bad)
	families := scrape(t, e)
	value := func(m *metric, label, is string) float64 {
		for _, x := range families[strings.TrimPrefix(m.name, "rdmabench_")].GetMetric() {
			if label == "" || slices.ContainsFunc(x.Label, func(l *dto.LabelPair) bool { return l.GetName() == label && l.GetValue() == is }) {
				return x.GetGauge().GetValue()
			}
		}
		return absent
	}
	for _, c := range []struct {
		m         *metric
		label, is string
		want      float64
	}{
		{sweepHealthy, "", "", 0}, {sweepSuspects, "kind", "nic", 2}, {sweepSuspects, "kind", "pair", 0}, {sweepUnreached, "", "", 1},
		{sweepRows, "verdict", "healthy", 8}, {sweepRun, "", "", unix(bad.Finished)}, {sweepGood, "", "", unix(good.Finished)},
	} {
		if got := value(c.m, c.label, c.is); got != c.want {
			t.Errorf("%s %s is %g, want %g", c.m.name, c.is, got, c.want)
		}
	}
	for i := range 2 * maxSweeps {
		r := sweepReport(1)
		r.Name = fmt.Sprintf("sweep%d", i)
		e.Swept(r)
	}
	if n := len(scrape(t, e)["sweep_healthy"].GetMetric()); n != maxSweeps {
		t.Errorf("%d sweeps have metrics", n)
	}
}

// TestExposition holds the whole of what a scrape shows against a file.
func TestExposition(t *testing.T) {
	for _, classic := range []bool{false, true} {
		t.Run(fmt.Sprintf("classic=%t", classic), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ports := &fakePorts{ports: twoPorts()}
				e := newExporter(t, Options{
					NodeLabels: map[string]string{"rack": "r12", "2 bad-name": "x", "src": "no"}, Version: "0.2.0", Revision: "abc", Ports: ports,
					Sessions: func() int { return 2 }, Maintenance: func() bool { return true }, ClockResidual: func() float64 { return 2e-6 }, Discovery: discovered, ClassicHistograms: classic,
				})
				scenario(e)
				pedantic := prometheus.NewPedanticRegistry()
				if err := pedantic.Register(collector{e}); err != nil {
					t.Fatal(err)
				}
				if problems, err := testutil.GatherAndLint(pedantic); err != nil || len(problems) > 0 {
					t.Errorf("lint: %v %v", problems, err)
				}
				families, err := pedantic.Gather()
				if err != nil {
					t.Fatal(err)
				}
				var text bytes.Buffer
				var names []string
				for _, f := range families {
					if f.GetName() == buildInfo.name { // has the version of Go
						continue
					}
					if classic != (f.GetName() == latency.name) {
						continue
					}
					names = append(names, f.GetName())
					if _, err := expfmt.MetricFamilyToText(&text, f); err != nil {
						t.Fatal(err)
					}
				}
				for _, m := range table {
					if !slices.Contains(names, m.name) && !classic && m != latency && m != buildInfo {
						t.Errorf("the scenario shows no %s", m.name)
					}
				}
				golden := "testdata/scenario.prom"
				if classic {
					golden = "testdata/classic.prom"
				}
				if *update {
					if err := os.WriteFile(golden, text.Bytes(), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				f, err := os.Open(golden)
				if err != nil {
					t.Fatal(err)
				}
				defer f.Close()
				if err := testutil.GatherAndCompare(pedantic, f, names...); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestFirstScrapeHasCountersAtZero(t *testing.T) {
	e := newExporter(t, Options{Ports: &fakePorts{ports: twoPorts()}})
	m := scrape(t, e)
	for _, outcome := range probe.Outcomes {
		want(t, m, 0, "probe_runs_total", "device", "mlx5_0", "rail", "0", "probe", "rtt", "op", "write", "result", string(outcome))
	}
	want(t, m, 0, "probe_bytes_total", "device", "mlx5_0", "probe", "bw", "op", "read")
	want(t, m, 0, "probe_skips_total", "probe", "rtt", "reason", string(probe.BusyPort))
	want(t, m, absent, "probe_runs_total", "device", "mlx5_1") // nothing can run from it
	want(t, m, absent, "probe_cpu_seconds_total")              // nobody has told yet
	want(t, m, absent, "probe_success")
	want(t, m, absent, "config_last_reload_successful")
	want(t, m, absent, "sessions")
	want(t, m, 2, "peers", "state", "unknown")
	want(t, m, 0, "peers", "state", "failing")
	want(t, m, 300, "probe_interval_seconds", "src", "n1", "probe", "rtt")
}

func TestPorts(t *testing.T) {
	source := &fakePorts{ports: twoPorts()}
	e := newExporter(t, Options{Ports: source})
	m := scrape(t, e)
	want(t, m, 1, "port_up", "src", "n1", "device", "mlx5_0", "port", "1")
	want(t, m, 0, "port_up", "device", "mlx5_1")
	want(t, m, 25e9, "port_rate_bytes_per_second")
	want(t, m, 1, "device_fault", "device", "mlx5_1", "reason", "port-down")
	want(t, m, absent, "device_fault", "device", "mlx5_0")
	want(t, m, 3, "port_counters_total", "counter", "out_of_sequence")
	want(t, m, 0, "port_events_total", "class", "congestion")

	bad := twoPorts()[0]
	bad.RateBytesPerSecond, bad.Up = new(math.Inf(1)), nil
	bad.Counters = map[string]uint64{"a\xff": 1, "a\xfe": 2, "b": math.MaxUint64}
	source.set(errors.New("sysfs hangs"), bad, bad) // what there is is used, twice the same or not
	m = scrape(t, e)
	want(t, m, absent, "port_rate_bytes_per_second")
	want(t, m, absent, "port_up")
	want(t, m, 1, "device_usable")
	if n := len(find(t, m, "port_counters_total")); n != 2 {
		t.Errorf("%d counters, want 2", n)
	}
	want(t, m, 1, "scrape_errors_total", "source", "ports")

	source.set(errors.New("sysfs hangs"))
	m = scrape(t, e)
	want(t, m, absent, "port_counters_total") // not the old ones
	want(t, m, 2, "scrape_errors_total", "source", "ports")
	want(t, m, 0, "probe_runs_total", "device", "mlx5_0", "probe", "rtt", "result", "ok") // others stay

	source.set(nil, twoPorts()...)
	want(t, scrape(t, e), 3, "port_counters_total", "counter", "out_of_sequence")
}

func TestValuesAndFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newExporter(t, Options{Ports: &fakePorts{ports: twoPorts()}})
		e.Observe(latencyResult("n2", 1900, 2000, 2100))
		begun := time.Now()
		e.Observe(bandwidthResult("n2", 20e9))
		pair := []string{
			"src", "n1", "device", "mlx5_0", "port", "1", "rail", "0", "dst", "n2", "dst_device", "mlx5_4", "path", "same_rack", "probe", "rtt", "op",
			"write", "size", "8",
		}
		m := scrape(t, e)
		want(t, m, 1, "probe_success", pair...)
		want(t, m, 1900e-9, "last_latency_seconds", append(pair, "measure", "half-rtt", "stat", "min")...)
		want(t, m, absent, "last_latency_seconds", append(pair, "stat", "p99")...) // three samples can't tell
		want(t, m, float64(begun.Unix())+0.25, "probe_last_run_timestamp_seconds", pair...)
		want(t, m, 20e9, "last_bandwidth_bytes_per_second", "size", "65536", "direction", "rx")
		want(t, m, 0.8, "line_rate_ratio", "size", "65536") // though the ports were read after the result
		want(t, m, 0, "loss_ratio", "size", "65536")
		want(t, m, absent, "loss_ratio", "probe", "rtt")
		want(t, m, 1, "peers", "state", "ok")

		time.Sleep(5 * time.Minute)
		e.Observe(skipped(result("rtt", "n2"), probe.BusyPort)) // says nothing about the peer
		m = scrape(t, e)
		want(t, m, 1, "probe_success", pair...)
		want(t, m, float64(begun.Unix())+0.25, "probe_last_run_timestamp_seconds", pair...)
		want(t, m, 1, "probe_skips_total", "probe", "rtt", "reason", "busy-port")

		// A failure that didn't get to know the peer's device keeps the same labels, and the old value, but not as a success.
		e.Observe(failed(result("rtt", "n2"), probe.StageConnect, probe.Refused, probe.ScopePeer))
		m = scrape(t, e)
		want(t, m, 0, "probe_success", pair...)
		want(t, m, 1900e-9, "last_latency_seconds", append(pair, "stat", "min")...)
		want(t, m, float64(begun.Unix())+0.25, "probe_last_success_timestamp_seconds", pair...)
		want(t, m, float64(begun.Unix())+300.25, "probe_last_run_timestamp_seconds", pair...)
		want(t, m, 1, "probe_failures_total", "probe", "rtt", "stage", "connect", "reason", "refused", "scope", "peer")
		want(t, m, 1, "peers", "state", "degraded") // its bandwidth probe was fine
		if n := len(find(t, m, "probe_success", "probe", "rtt")); n != 1 {
			t.Errorf("%d pairs of rtt, want 1", n)
		}

		time.Sleep(time.Hour) // longer than 3 × 5 min and than an hour since the last success
		m = scrape(t, e)
		want(t, m, absent, "last_latency_seconds")
		want(t, m, 20e9, "last_bandwidth_bytes_per_second", "size", "65536") // of a probe that runs every 6 h
		want(t, m, 0, "probe_success", pair...)
		want(t, m, float64(begun.Unix())+0.25, "probe_last_success_timestamp_seconds", pair...)

		e.Observe(latencyResult("n2", 3000))
		m = scrape(t, e)
		want(t, m, 3e-6, "last_latency_seconds", append(pair, "stat", "min")...)
		want(t, m, 4, "latency_seconds", "probe", "rtt", "measure", "half-rtt", "size", "8", "path", "same_rack")

		// A failure of this node says nothing about a peer it never reached.
		e.Observe(failed(result("rtt", "n3"), probe.StageSetup, probe.Memlock, probe.ScopeLocal))
		m = scrape(t, e)
		want(t, m, 1, "peers", "state", "unknown")
		want(t, m, absent, "probe_last_success_timestamp_seconds", "dst", "n3")
		want(t, m, 0, "probe_success", "dst", "n3", "dst_device", "")
	})
}

// TestNoDevice: a node without RDMA says so, and forgets it when there is a device.
func TestNoDevice(t *testing.T) {
	e := newExporter(t, Options{Ports: &fakePorts{}})
	e.SetTargets(Targets{Probes: specs(), Peers: []string{"n2"}, Use: func(d string) bool { return d == "mlx5_0" }})
	r := failed(result("rtt", "n2"), probe.StageSetup, probe.NoRDMA, probe.ScopeLocal)
	r.Device, r.Port, r.Rail = "", 0, ""
	e.Observe(r)
	m := scrape(t, e)
	want(t, m, 1, "probe_failures_total", "device", "", "reason", "no-rdma", "scope", "local")
	want(t, m, absent, "probe_success")
	if page := get(e, "/").Body.String(); !strings.Contains(page, "no-rdma") {
		t.Error("the page doesn't say why nothing works")
	}
	e.Observe(latencyResult("n2", 2000))
	want(t, scrape(t, e), 1, "probe_success")
	if got := results(t, e, ""); fmt.Sprint(got.results) != "[rtt n2 ok]" {
		t.Errorf("results %v", got.results)
	}
}

func TestTaints(t *testing.T) {
	e := newExporter(t, Options{})
	r := latencyResult("n2", 2000)
	r.Outcome, r.Taints = probe.Tainted, []probe.Taint{probe.TaintPause, "no such taint"}
	e.Observe(r)
	m := scrape(t, e)
	want(t, m, 1, "probe_success")
	want(t, m, 1, "probe_tainted", "reason", "pause")
	if n := len(find(t, m, "probe_tainted")); n != 1 {
		t.Errorf("%d taints, want 1", n)
	}
	e.Observe(latencyResult("n2", 2000))
	want(t, scrape(t, e), 0, "probe_tainted", "reason", "pause")
}

func TestNoNumbersStayAbsent(t *testing.T) {
	e := newExporter(t, Options{})
	for _, nan := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		r := latencyResult("n2", 2000)
		r.Duration = nan
		r.Runs[0].Latency.P99, r.Runs[0].Latency.Mean = &nan, nan
		r.Runs[0].CPUSeconds.Local = &nan
		r.Runs[0].LossRatio, r.Runs[0].MessageRate = &nan, &nan
		e.Observe(r)
		e.Observe(bandwidthResult("n2", nan))
		m := scrape(t, e)
		for name, f := range m {
			for _, v := range find(t, m, name) {
				if strings.HasPrefix(f.GetName(), "rdmabench_") && !finite(v) {
					t.Errorf("%s is %v", name, v)
				}
			}
		}
		want(t, m, absent, "last_bandwidth_bytes_per_second")
		want(t, m, absent, "loss_ratio", "probe", "rtt")
		want(t, m, absent, "probe_cpu_seconds_total", "probe", "rtt")
		if w := get(e, "/api/v1/results?recent=9"); w.Code != http.StatusOK {
			t.Errorf("API: %d %s", w.Code, w.Body)
		}
	}
}

func TestRemovedTargetsVanish(t *testing.T) {
	e := newExporter(t, Options{Ports: &fakePorts{ports: twoPorts()}})
	observe := func() {
		for _, peer := range []string{"n2", "n3"} {
			e.Observe(latencyResult(peer, 2000))
			e.Observe(bandwidthResult(peer, 20e9))
		}
	}
	observe()
	of := func(label, value string) (n int) {
		for _, f := range scrape(t, e) {
			n += len(find(t, map[string]*dto.MetricFamily{"x": f}, "x", label, value))
		}
		return n
	}
	check := func(what, label, value string, gone bool) {
		t.Helper()
		if n := of(label, value); (n == 0) != gone {
			t.Errorf("%s: %d series with %s=%s", what, n, label, value)
		}
	}
	check("at first", "dst", "n3", false)

	e.SetTargets(Targets{Probes: specs(), Peers: []string{"n2"}})
	check("n3 left", "dst", "n3", true)
	check("n3 left", "dst", "n2", false)
	want(t, scrape(t, e), 2, "probe_runs_total", "probe", "rtt", "result", "ok") // what the port did, it did
	observe()                                                                    // a run that was still under way
	check("late result", "dst", "n3", true)
	if strings.Contains(get(e, "/api/v1/results").Body.String(), `"n3"`) {
		t.Error("the API still shows n3 as a last result")
	}

	e.SetTargets(Targets{Probes: specs()[1:], Peers: []string{"n2"}})
	check("rtt removed", "probe", "rtt", true)
	check("rtt removed", "probe", "bw", false)
	observe()
	check("late result", "probe", "rtt", true)

	fewer := specs()[1]
	fewer.Sizes = fewer.Sizes[:1]
	e.SetTargets(Targets{Probes: []probe.Spec{fewer}, Peers: []string{"n2"}})
	check("size removed", "size", "1048576", true)
	check("size removed", "size", "65536", false)

	e.SetTargets(Targets{Probes: specs(), Peers: []string{"n2"}, Use: func(d string) bool { return d != "mlx5_0" }})
	check("device excluded", "probe", "bw", false) // of the probe itself
	want(t, scrape(t, e), absent, "probe_runs_total", "device", "mlx5_0")
	want(t, scrape(t, e), absent, "probe_success", "device", "mlx5_0")
}

func TestPairLimitIsSticky(t *testing.T) {
	e := newExporter(t, Options{MaxPairs: 1})
	for range 3 {
		e.Observe(latencyResult("n2", 2000))
		e.Observe(latencyResult("n3", 2000))
	}
	m := scrape(t, e)
	want(t, m, 1, "probe_success", "dst", "n2")
	want(t, m, absent, "probe_success", "dst", "n3")
	want(t, m, 3, "pair_results_dropped_total")
	want(t, m, 6, "probe_runs_total", "result", "ok")
	want(t, m, 6, "latency_seconds")
	want(t, m, 2, "peers", "state", "ok")

	e.SetTargets(Targets{Probes: specs(), Peers: []string{"n3"}})
	e.Observe(latencyResult("n3", 2000))
	want(t, scrape(t, e), 1, "probe_success", "dst", "n3") // the place is free again
}

// TestHostileResults feeds what no probe should return. Metrics, page and API answer all the same.
func TestHostileResults(t *testing.T) {
	wild := "\xff\xfe\x00\n\x1b[31m" + strings.Repeat("é", 5000)
	e := newExporter(t, Options{Ports: &fakePorts{ports: []PortState{{}, {Device: wild, Reason: "no such reason", Rail: wild, Counters: map[string]uint64{wild: 1}}}}})
	e.SetTargets(Targets{Probes: append(specs(), probe.Spec{Name: wild}, probe.Spec{}), Peers: []string{"n2", wild, ""}})
	e.SetReload(errors.New(wild))
	e.Observe(nil)
	for _, outcome := range append(slices.Clone(probe.Outcomes), "", "no such outcome") {
		for _, name := range []string{"rtt", "bw", wild, "", "unknown"} {
			for _, peer := range []string{"n2", wild, "", "unknown"} {
				e.Observe(&probe.Result{Outcome: outcome, Probe: name, Peer: peer})
				e.Observe(&probe.Result{Outcome: outcome, Probe: name, Peer: peer, Device: "d", Time: time.Unix(1<<60, 0), Duration: -1e300})
				r := latencyResult(peer, 2000)
				r.Outcome, r.Probe, r.ID, r.Rail, r.Path, r.PeerDev = outcome, name, wild, wild, wild, &wild
				r.Stage, r.Reason, r.Scope, r.Detail = new(probe.Stage(wild)), new(probe.Reason(wild)), new(probe.Scope(wild)), &wild
				r.Taints, r.TaintLog = []probe.Taint{probe.Taint(wild)}, []probe.TaintDetail{{Taint: probe.Taint(wild), Counter: wild}}
				r.Runs[0].Latency.Measure = wild
				r.Runs = append(r.Runs, r.Runs[0], probe.Run{}, probe.Run{Size: 8, Histogram: recorded()}, probe.Run{Latency: &probe.LatencyStats{}})
				e.Observe(r)
			}
		}
	}
	for _, path := range []string{"/metrics", "/", "/?probe=rtt&peer=%ff&problems=1&refresh=99999999999", "/api/v1/results?recent=5&failures=5"} {
		if w := get(e, path); w.Code != http.StatusOK {
			t.Errorf("%s: %d %.200s", path, w.Code, w.Body)
		}
	}
	for name, f := range scrape(t, e) {
		for _, m := range f.Metric {
			for _, l := range m.Label {
				if len(l.GetValue()) > maxLabelBytes {
					t.Errorf("%s has a label of %d bytes", name, len(l.GetValue()))
				}
			}
		}
	}
	if n := find(t, scrape(t, e), "promhttp_metric_handler_errors_total"); slices.Max(n) > 0 {
		t.Errorf("errors while gathering: %v", n)
	}
}

func TestObserveDuringScrapes(t *testing.T) {
	source := &fakePorts{ports: twoPorts()}
	e := newExporter(t, Options{Ports: source, Sessions: func() int { return 0 }, Maintenance: func() bool { return true }})
	h := e.Handler(HandlerOptions{})
	var wg sync.WaitGroup
	for _, f := range []func(int){
		func(i int) { e.Observe(latencyResult("n2", int64(1000+i))) },
		func(int) { e.Observe(bandwidthResult("n3", 1e9)) },
		func(int) { e.Observe(failed(result("rtt", "n3"), probe.StageRun, probe.Timeout, probe.ScopePath)) },
		func(i int) { e.SetTargets(Targets{Probes: specs(), Peers: []string{"n2", "n3"}[:1+i%2]}) },
		func(i int) { source.set(nil, twoPorts()[:i%3]...) },
		func(int) { e.SetReload(nil); e.SetReady(true); e.Skipped("rtt", probe.Overlap, 1) },
		func(int) { h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/metrics", nil)) },
		func(int) { h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil)) },
		func(int) {
			h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/api/v1/results?recent=9", nil))
		},
	} {
		wg.Go(func() {
			for i := range 50 {
				f(i)
			}
		})
	}
	wg.Wait()
	want(t, scrape(t, e), 50, "probe_runs_total", "device", "mlx5_0", "probe", "rtt", "result", "ok")
}

func BenchmarkScrape(b *testing.B) {
	e, err := New(Options{Node: "n1", MaxPairs: 1000})
	if err != nil {
		b.Fatal(err)
	}
	var peers []string
	for i := range 1000 {
		peers = append(peers, fmt.Sprintf("gpu%04d.cluster.example.org", i))
	}
	e.SetTargets(Targets{Probes: specs(), Peers: peers})
	for _, p := range peers {
		r := latencyResult(p, 1900, 2000, 2100)
		l := r.Runs[0].Latency
		l.P90, l.P99, l.P999 = &l.Max, &l.Max, &l.Max
		e.Observe(r)
	}
	h := e.Handler(HandlerOptions{})
	for name, header := range map[string]map[string]string{
		"text": {}, "gzip": {"Accept-Encoding": "gzip"}, "protobuf": {"Accept": string(expfmt.NewFormat(expfmt.TypeProtoDelim))},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
				for k, v := range header {
					r.Header.Set(k, v)
				}
				w := httptest.NewRecorder()
				h.ServeHTTP(w, r)
				b.SetBytes(int64(w.Body.Len()))
			}
			b.ReportMetric(float64(testutil.CollectAndCount(collector{e})), "series")
		})
	}
}

func BenchmarkObserve(b *testing.B) {
	e := newExporter(b, Options{})
	var ns []int64
	for i := range int64(5000) {
		ns = append(ns, 2000+i%500)
	}
	r := latencyResult("n2", append(ns, 40_000_000)...)
	for b.Loop() {
		e.Observe(r)
	}
}

// TestEnvironmentChanges: the counter is there from the first scrape, and gone with its device.
func TestEnvironmentChanges(t *testing.T) {
	source := &fakePorts{ports: twoPorts()}
	e := newExporter(t, Options{Ports: source})
	values := func() map[string]float64 {
		got := map[string]float64{}
		if f := scrape(t, e)["environment_changes_total"]; f != nil {
			for _, m := range f.Metric {
				for _, l := range m.Label {
					if l.GetName() == "device" {
						got[l.GetValue()] = m.GetCounter().GetValue()
					}
				}
			}
		}
		return got
	}
	if diff := cmp.Diff(map[string]float64{"mlx5_0": 0, "mlx5_1": 0}, values()); diff != "" {
		t.Errorf("at first (-want +got):\n%s", diff)
	}
	e.EnvironmentChanged("mlx5_1")
	if diff := cmp.Diff(map[string]float64{"mlx5_0": 0, "mlx5_1": 1}, values()); diff != "" {
		t.Errorf("after a change (-want +got):\n%s", diff)
	}
	source.set(nil, twoPorts()[0])
	if diff := cmp.Diff(map[string]float64{"mlx5_0": 0}, values()); diff != "" {
		t.Errorf("without the device (-want +got):\n%s", diff)
	}
}

// A probe of both directions has a series for each, and its busier one is held against the line rate.
func TestBothDirections(t *testing.T) {
	e := newExporter(t, Options{Ports: &fakePorts{ports: twoPorts()}})
	scrape(t, e) // the line rate is known from the ports
	r := bandwidthResult("n2", 3e9)
	for i := range r.Runs {
		b := r.Runs[i].Bandwidth
		b.Tx, b.Rx = new(1e9), new(2e9)
	}
	e.Observe(r)
	f := scrape(t, e)
	for direction, want := range map[string]float64{"tx": 1e9, "rx": 2e9} {
		if got := find(t, f, "last_bandwidth_bytes_per_second", "size", "65536", "direction", direction); len(got) != 1 || got[0] != want {
			t.Errorf("%s: %v, want %g", direction, got, want)
		}
	}
	if n := len(find(t, f, "last_bandwidth_bytes_per_second")); n != 4 {
		t.Errorf("%d series of 2 sizes in 2 directions", n)
	}
}
