package probe

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// The fields that scripts rely on; more of them are fine.
var (
	resultFields = []string{
		"id", "result", "stage", "reason", "scope", "taints", "peer", "device", "port", "gid_index", "kind", "transport", "op", "mtu", "qps", "runs",
		"evidence", "fingerprint",
	}
	runFields       = []string{"size", "iterations", "seconds", "latency", "bandwidth", "messages_per_second", "loss_ratio", "cpu_seconds"}
	latencyFields   = []string{"measure", "samples", "min", "mean", "p50", "p90", "p99", "p999", "max", "stddev"}
	bandwidthFields = []string{"bytes_per_second", "tx", "rx", "min", "max"}
	evidenceFields  = []string{"device", "port", "counters", "classes", "moved", "unknown"}
)

// lists are fields whose value is an array or object even if there is nothing in it.
var lists = []string{"taints", "taint_details", "runs", "evidence", "cpu_seconds", "counters", "classes", "moved", "unknown"}

// object checks that v is an object with the given fields.
func object(t *testing.T, path string, v any, fields []string) map[string]any {
	t.Helper()
	m, ok := v.(map[string]any)
	if !ok {
		t.Fatalf("%s is %v, no object", path, v)
	}
	for _, f := range fields {
		value, ok := m[f]
		if !ok {
			t.Errorf("%s has no field %s", path, f)
		}
		if value == nil && slices.Contains(lists, f) {
			t.Errorf("%s.%s is null", path, f)
		}
	}
	return m
}

// checkJSON checks the shape of a result as scripts see it, and returns it.
func checkJSON(t *testing.T, r *Result) map[string]any {
	t.Helper()
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatalf("no JSON: %s", err)
	}
	if strings.Contains(string(text), "NaN") || strings.Contains(string(text), "Inf") {
		t.Errorf("not a number in %s", text)
	}
	var v any
	if err := json.Unmarshal(text, &v); err != nil {
		t.Fatalf("%s: %s", text, err)
	}
	m := object(t, "result", v, append(slices.Clone(resultFields), "taint_details"))
	for i, run := range m["runs"].([]any) {
		path := fmt.Sprintf("runs[%d]", i)
		run := object(t, path, run, runFields)
		object(t, path+".cpu_seconds", run["cpu_seconds"], []string{"local", "remote"})
		if run["latency"] != nil {
			object(t, path+".latency", run["latency"], latencyFields)
		}
		if run["bandwidth"] != nil {
			object(t, path+".bandwidth", run["bandwidth"], bandwidthFields)
		}
	}
	for side, e := range object(t, "evidence", m["evidence"], []string{"local", "remote"}) {
		if e != nil {
			object(t, "evidence."+side, e, evidenceFields)
		}
	}
	usable := m["result"] == string(OK) || m["result"] == string(Tainted)
	for _, f := range []string{"stage", "reason", "scope", "detail"} {
		if (m[f] == nil) != usable {
			t.Errorf("%s of a result that is %v is %v", f, m["result"], m[f])
		}
	}
	return m
}

func testNode(t *testing.T) *Node {
	t.Helper()
	n := NewNode("here", freeGate{}, blindMeter{}, slog.New(slog.DiscardHandler))
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Errorf("something is left: %s", err)
		}
	})
	return n
}

// Results that need no device: their JSON has the shape of all others.
func TestFailedResults(t *testing.T) {
	nowhere := Target{Name: "node2", Address: "127.0.0.1:1"}
	for _, tt := range []struct {
		name   string
		spec   Spec
		to     Target
		use    bool
		reason []Reason
		stage  Stage
		scope  Scope
	}{
		{"a spec that can't work", Spec{Kind: "speed"}, nowhere, true, []Reason{OpUnsupported}, StageSetup, ScopeLocal},
		{"no address", Spec{}, Target{Name: "node2"}, true, []Reason{DNS}, StageResolve, ScopeLocal},
		{"no port in the address", Spec{}, Target{Name: "node2", Address: "10.9.0.2"}, true, []Reason{DNS}, StageResolve, ScopeLocal},
		{"no host in the address", Spec{}, Target{Name: "node2", Address: ":18516"}, true, []Reason{DNS}, StageResolve, ScopeLocal},
		{"no such device", Spec{}, nowhere, true, []Reason{NoDevice, NoRDMA}, StageSetup, ScopeLocal},
		{"a device that may not be used", Spec{}, nowhere, false, []Reason{NoDevice, NoRDMA}, StageSetup, ScopeLocal},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := testNode(t)
			n.Use = func(string) bool { return tt.use }
			i := Initiator{Node: n, Client: control.NewClient()}
			r := i.Probe(t.Context(), tt.spec, tt.to, "not_there", 1)
			if r.Outcome != Failed || r.Usable() || !slices.Contains(tt.reason, *r.Reason) || *r.Stage != tt.stage || *r.Scope != tt.scope {
				t.Errorf("%s: %s %s %s: %s", r.Outcome, *r.Stage, *r.Reason, *r.Scope, *r.Detail)
			}
			if len(r.ID) != 32 || r.Time.IsZero() || r.Duration < 0 || r.Peer != "node2" || r.Device != "not_there" || r.Path != "unknown" {
				t.Errorf("%+v", r)
			}
			m := checkJSON(t, r)
			for _, f := range []string{"gid_index", "mtu", "peer_device", "peer_port", "fingerprint"} {
				if m[f] != nil {
					t.Errorf("%s of a session that never was is %v", f, m[f])
				}
			}
		})
	}
}

// freeGate lets everybody in at once.
type freeGate struct{ Gate }

// blindMeter can't tell anything.
type blindMeter struct{ Meter }

func TestResultIDsDiffer(t *testing.T) {
	seen := map[string]bool{}
	for range 1000 {
		seen[newID()] = true
	}
	if len(seen) != 1000 {
		t.Errorf("%d ids of 1000", len(seen))
	}
}

// Figures out of every shape of what the two ends return: absent stays absent, and nothing is NaN.
func TestFigures(t *testing.T) {
	value := func(v float64) *float64 { return &v }
	seven := uint64(7)
	samples := func(n int) *verbs.Latency {
		s := make([]int64, n)
		for i := range s {
			s[i] = int64(1000 + i)
		}
		return latencyOf(t, s)
	}
	for _, tt := range []struct {
		name string
		spec Spec
		size int
		res  verbs.RunResult
		rep  control.FinishReply
		want Run
	}{
		{
			"latency of a write", Spec{Kind: Latency, Op: verbs.Write}, 8,
			verbs.RunResult{Completed: 2000, Elapsed: time.Second, CPU: time.Second / 2, Latency: samples(2000)}, control.FinishReply{CPUSeconds: value(0.25), Received: &seven},
			Run{Size: 8, Iterations: 2000, Seconds: 1, Bytes: 32000, CPUSeconds: CPUSeconds{Local: value(0.5), Remote: value(0.25)}, Latency: &LatencyStats{
				Measure: HalfRTT, Samples: 2000, Min: 1e-6, Mean: 1.9995e-6, P50: value(1.999e-6), P90: value(2.799e-6), P99: value(2.979e-6), P999: value(2.997e-6), Max: 2.999e-6,
				Stddev: 5.7735e-7,
			}},
		},
		{
			"latency of a read: the other end's CPU takes no part", Spec{Kind: Latency, Op: verbs.Read}, 8,
			verbs.RunResult{Completed: 1, Elapsed: time.Microsecond, Latency: samples(1)}, control.FinishReply{},
			Run{Size: 8, Iterations: 1, Seconds: 1e-6, Bytes: 8, CPUSeconds: CPUSeconds{Local: value(0)}, Latency: &LatencyStats{
				Measure: Operation, Samples: 1, Min: 1e-6, Mean: 1e-6, Max: 1e-6,
			}},
		},
		{
			"latency without a sample", Spec{Kind: Latency, Op: verbs.Send}, 8, verbs.RunResult{}, control.FinishReply{},
			Run{Size: 8, CPUSeconds: CPUSeconds{Local: value(0)}},
		},
		{
			"bandwidth of a write, counted here", Spec{Kind: Bandwidth, Op: verbs.Write}, 4096,
			verbs.RunResult{Completed: 100, Elapsed: time.Second, Rate: value(110), MinRate: value(90), MaxRate: value(120)}, control.FinishReply{},
			Run{Size: 4096, Iterations: 100, Seconds: 1, Bytes: 409600, CPUSeconds: CPUSeconds{Local: value(0)}, MessageRate: value(110), Bandwidth: &BandwidthStats{
				BytesPerSecond: 110 * 4096, Tx: value(110 * 4096), Min: value(90 * 4096), Max: value(120 * 4096),
			}},
		},
		{
			"bandwidth of a send, confirmed there", Spec{Kind: Bandwidth, Op: verbs.Send}, 4096,
			verbs.RunResult{Completed: 100, Elapsed: time.Second, Rate: value(110), MinRate: value(90), MaxRate: value(120)},
			control.FinishReply{Rate: value(108), MinRate: value(80), MaxRate: value(119)},
			Run{Size: 4096, Iterations: 100, Seconds: 1, Bytes: 409600, CPUSeconds: CPUSeconds{Local: value(0)}, MessageRate: value(108), Bandwidth: &BandwidthStats{
				BytesPerSecond: 108 * 4096, Tx: value(108 * 4096), Offered: value(110 * 4096), Min: value(80 * 4096), Max: value(119 * 4096), Confirmed: true,
			}},
		},
		{
			"too short for intervals", Spec{Kind: MessageRate, Op: verbs.Write}, 8, verbs.RunResult{Completed: 100, Elapsed: time.Millisecond, Rate: value(1e5)}, control.FinishReply{},
			Run{Size: 8, Iterations: 100, Seconds: 1e-3, Bytes: 800, CPUSeconds: CPUSeconds{Local: value(0)}, MessageRate: value(1e5), Bandwidth: &BandwidthStats{
				BytesPerSecond: 8e5, Tx: value(8e5),
			}},
		},
		{
			"one completion: a rate over the whole", Spec{Kind: Bandwidth, Op: verbs.Write}, 8, verbs.RunResult{Completed: 1, Elapsed: time.Millisecond}, control.FinishReply{},
			Run{Size: 8, Iterations: 1, Seconds: 1e-3, Bytes: 8, CPUSeconds: CPUSeconds{Local: value(0)}, MessageRate: value(1000), Bandwidth: &BandwidthStats{BytesPerSecond: 8000, Tx: value(8000)}, short: true},
		},
		{
			"no time at all", Spec{Kind: Bandwidth, Op: verbs.Write}, 8, verbs.RunResult{Completed: 1}, control.FinishReply{},
			Run{Size: 8, Iterations: 1, Bytes: 8, CPUSeconds: CPUSeconds{Local: value(0)}},
		},
		{
			"a peer at the limit of what it may say", Spec{Kind: Bandwidth, Op: verbs.Send}, control.MaxMessage,
			verbs.RunResult{Completed: math.MaxUint32, Elapsed: time.Hour}, control.FinishReply{Rate: value(1e12), MinRate: value(0), MaxRate: value(1e12)},
			Run{
				Size: control.MaxMessage, Iterations: math.MaxUint32, Seconds: 3600, Bytes: math.MaxUint32 << 30, CPUSeconds: CPUSeconds{Local: value(0)}, MessageRate: value(1e12),
				Bandwidth: &BandwidthStats{BytesPerSecond: 1e12 * (1 << 30), Tx: value(1e12 * (1 << 30)), Min: value(0), Max: value(1e12 * (1 << 30)), Confirmed: true},
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := tt.rep.Validate(); err != nil {
				t.Fatal(err)
			}
			got := (&initiation{spec: tt.spec}).figures(&spoken{size: tt.size, timed: tt.res, rep: &tt.rep})
			near := cmp.Comparer(func(a, b float64) bool { return math.Abs(a-b) <= 1e-3*math.Abs(b) })
			if diff := cmp.Diff(&tt.want, got, near, cmp.AllowUnexported(Run{}), cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == ".Histogram" }, cmp.Ignore())); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if (got.Histogram != nil) != (got.Latency != nil) {
				t.Error("a histogram without figures, or figures without one")
			}
			r := &Result{Outcome: OK, Taints: []Taint{}, TaintLog: []TaintDetail{}, Runs: []Run{*got}, Evidence: Evidence{Local: evidence(nil, nil, nil)}}
			r.taint(nil)
			checkJSON(t, r)
		})
	}
}

// Metrics that must exist before the first run take their values from these lists.
func TestUsable(t *testing.T) {
	for o, want := range map[Outcome]bool{OK: true, Tainted: true, Failed: false, Skipped: false} {
		if got := (&Result{Outcome: o}).Usable(); got != want {
			t.Errorf("%s: %t", o, got)
		}
	}
	if got := slices.Sorted(maps.Keys(map[Outcome]bool{OK: true, Tainted: true, Failed: true, Skipped: true})); !cmp.Equal(got, slices.Sorted(slices.Values(Outcomes))) {
		t.Errorf("outcomes %v", Outcomes)
	}
}
