package report

import (
	"bytes"
	"encoding/csv"
	"encoding/xml"
	"errors"
	"flag"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

var update = flag.Bool("update", false, "rewrite testdata")

var begun = time.Date(2026, 3, 4, 5, 6, 7, 891e6, time.UTC)

func ptr[T any](v T) *T { return &v }

// result is one without runs.
func result(kind probe.Kind, runs ...probe.Run) *probe.Result {
	return &probe.Result{
		ID: "0123abcd", Time: begun, Outcome: probe.OK, Probe: "probe", Peer: "gpu02", Path: "cross_rack", Device: "mlx5_0", Port: 1, GIDIndex: ptr(3), PeerDev: ptr("mlx5_1"),
		PeerPort: ptr(2), Kind: kind, Transport: verbs.RC, Op: verbs.Write, MTU: ptr(4096), QPs: 1, Fingerprint: ptr("12345678"),
		Options: probe.Options{TxDepth: 16, RxDepth: 16, CQMod: 1, PostList: 1, Threads: 1}, Runs: runs,
	}
}

// latencyRun has one sample of each of the given nanoseconds, which are in ascending order for min and max.
func latencyRun(size int, ns ...uint64) probe.Run {
	h := hdrhistogram.New(1, verbs.HistogramHighest, 3)
	for _, v := range ns {
		_ = h.RecordValue(int64(v))
	}
	sorted := slices.Sorted(slices.Values(ns))
	l := &probe.LatencyStats{
		Measure: probe.HalfRTT, Samples: int64(len(ns)), Min: float64(sorted[0]) / 1e9, Max: float64(sorted[len(ns)-1]) / 1e9, Mean: 1.5e-6,
		P50: ptr(float64(sorted[(len(ns)-1)/2]) / 1e9),
	}
	return probe.Run{
		Time: begun.Add(time.Second), Size: size, Iterations: uint64(len(ns)), Seconds: 0.0123, Latency: l, Histogram: h, Raw: ns, Bytes: uint64(2 * size * len(ns)),
		CPUSeconds: probe.CPUSeconds{Local: ptr(0.0125)},
	}
}

// bandwidthRun completes rate bytes per second for a number of 10 ms stretches.
func bandwidthRun(size int, rate float64, stretches int) probe.Run {
	run := probe.Run{
		Time: begun.Add(time.Second), Size: size, Iterations: 5000, Seconds: float64(stretches) / 100, MessageRate: ptr(rate / float64(size)),
		Bandwidth: &probe.BandwidthStats{BytesPerSecond: rate, Tx: &rate, Min: ptr(rate / 2), Max: ptr(rate * 2)},
	}
	for i := range stretches + 1 {
		run.Curve = append(run.Curve, verbs.Point{At: time.Hour + time.Duration(i)*10*time.Millisecond, Done: float64(i) * rate / float64(size) / 100})
	}
	return run
}

// results are of every shape that has cells of its own.
func results() []*probe.Result {
	tainted := result(probe.Bandwidth, bandwidthRun(65536, 12.5e9, 3))
	tainted.Outcome, tainted.Taints = probe.Tainted, []probe.Taint{probe.TaintRetransmit, probe.TaintPause}
	tainted.Runs[0].Spread = &probe.Spread{Runs: 5, Metric: "bytes_per_second", Median: 12.5e9, Min: 12e9, Max: 12.75e9, MAD: 1e8}
	failed := result(probe.Latency)
	failed.Outcome, failed.Stage, failed.Reason, failed.Scope = probe.Failed, ptr(probe.StageRun), ptr(probe.RetryExceeded), ptr(probe.ScopePath)
	failed.Peer, failed.PeerDev, failed.PeerPort, failed.MTU = "odd, \"name\"\nof a peer", nil, nil, nil
	lossy := result(probe.Bandwidth, bandwidthRun(1024, 1e9, 0))
	lossy.Transport, lossy.Op = verbs.UD, verbs.Send
	lossy.Runs[0].LossRatio, lossy.Runs[0].Arrivals = ptr(0.25), &probe.Arrivals{Sent: 400, Received: 300, Duplicates: ptr(uint64(1)), Reordered: ptr(uint64(0))}
	ping := result(probe.Ping, latencyRun(64, 9000, 9100))
	ping.Transport, ping.Op = verbs.UD, verbs.Send
	ping.Runs[0].Latency.Measure = probe.RTT
	ping.Runs[0].LossRatio, ping.Runs[0].Ping = ptr(0.25), &probe.PingStats{Sent: 4, Answered: 2, Lost: 1, Invalid: 1, Stamps: probe.HardwareStamps, Gap: 0.01}
	walk := result(probe.Latency, latencyRun(8, 1500, 1600))
	walk.Paths = &probe.Paths{Labels: 2, Worst: &probe.PathValue{FlowLabel: 4711}}
	return []*probe.Result{result(probe.Latency, latencyRun(8, 1500, 1600, 9000), latencyRun(4096, 2500, 2600)), tainted, failed, lossy, ping, walk}
}

func TestCSV(t *testing.T) {
	var b bytes.Buffer
	if err := CSV(&b, results()...); err != nil {
		t.Fatal(err)
	}
	golden := filepath.Join("testdata", "results.csv")
	if *update {
		if err := os.WriteFile(golden, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), b.String()); d != "" {
		t.Errorf("CSV (-want +got), `go test -update` if it is right:\n%s", d)
	}
	lines, err := csv.NewReader(&b).ReadAll() // which wants as many cells in every line
	if err != nil {
		t.Fatal(err)
	}
	if len(lines) != 8 {
		t.Errorf("%d lines, want a header, 6 runs, and a probe without any", len(lines))
	}
	cell := func(line int, name string) string { return lines[line][slices.Index(lines[0], name)] }
	for _, tt := range []struct {
		line       int
		name, want string
	}{
		{1, "latency_max_seconds", "9e-06"},
		{1, "latency_p99_seconds", ""}, // three samples carry none
		{1, "bytes_per_second", ""},
		{2, "size_bytes", "4096"},
		{2, "time", "2026-03-04T05:06:08.891000Z"},
		{3, "bytes_per_second", "1.25e+10"},
		{3, "taints", "retransmit pause"},
		{3, "repeat_runs", "5"},
		{3, "delayed_samples", ""},
		{4, "reason", "retry-exceeded"},
		{4, "peer", `odd, "name" of a peer`},
		{4, "size_bytes", ""},
		{5, "sent", "400"},
		{5, "received", "300"},
		{6, "invalid", "1"},
		{6, "received", "3"},
		{7, "flow_label", "4711"},
		{7, "fingerprint", "fp-12345678"},
	} {
		if got := cell(tt.line, tt.name); got != tt.want {
			t.Errorf("line %d, %s: %q, want %q", tt.line, tt.name, got, tt.want)
		}
	}
}

// TestColumnsAreDocumented: who reads the CSV finds every column in docs/output.md, in the same order.
func TestColumnsAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/output.md")
	if err != nil {
		t.Fatal(err)
	}
	var documented, want []string
	for line := range strings.Lines(string(text)) {
		if cells := strings.Split(line, "|"); len(cells) == 4 && strings.HasPrefix(strings.TrimSpace(cells[1]), "`") {
			for name := range strings.FieldsSeq(strings.NewReplacer("`", "", ",", " ").Replace(cells[1])) {
				documented = append(documented, name)
			}
		}
	}
	for _, c := range columns {
		want = append(want, c.name)
	}
	if d := cmp.Diff(want, documented); d != "" {
		t.Errorf("columns in docs/output.md (-code +docs):\n%s", d)
	}
}

func TestRawSamples(t *testing.T) {
	var b bytes.Buffer
	if err := RawSamples(&b, result(probe.Latency, latencyRun(8, 1600, 1500), latencyRun(64, 2000))); err != nil {
		t.Fatal(err)
	}
	if want := "size_bytes,index,nanoseconds\n8,0,1600\n8,1,1500\n64,0,2000\n"; b.String() != want {
		t.Errorf("got %q, want %q", b.String(), want)
	}
}

func TestHLog(t *testing.T) {
	for _, tt := range []struct {
		name  string
		runs  []probe.Run
		tags  []string
		total []int64
	}{
		{"one size", []probe.Run{latencyRun(8, 1500, 1600, 9000)}, []string{""}, []int64{3}},
		{"two sizes", []probe.Run{latencyRun(8, 1500, 1600, 9000), latencyRun(4096, 2500, 2600)}, []string{"8B", "4096B"}, []int64{3, 2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var b bytes.Buffer
			if err := HLog(&b, result(probe.Latency, tt.runs...)); err != nil {
				t.Fatal(err)
			}
			log := hdrhistogram.NewHistogramLogReader(&b)
			for i, run := range tt.runs {
				h, err := log.NextIntervalHistogram()
				if err != nil || h == nil {
					t.Fatalf("interval %d: %v, %v", i, h, err)
				}
				if h.Tag() != tt.tags[i] || h.TotalCount() != tt.total[i] {
					t.Errorf("interval %d: tag %q, %d samples, want %q, %d", i, h.Tag(), h.TotalCount(), tt.tags[i], tt.total[i])
				}
				if h.Max() != run.Histogram.Max() || h.Min() != run.Histogram.Min() {
					t.Errorf("interval %d: %d to %d ns, want %d to %d", i, h.Min(), h.Max(), run.Histogram.Min(), run.Histogram.Max())
				}
				if got := time.UnixMilli(h.StartTimeMs()); !got.Equal(run.Time) {
					t.Errorf("interval %d begins at %s, want %s", i, got, run.Time)
				}
				if got := h.EndTimeMs() - h.StartTimeMs(); got != 13 {
					t.Errorf("interval %d lasts %d ms, want 13", i, got)
				}
				if run.Histogram.Tag() != "" {
					t.Error("the result's own histogram was changed")
				}
			}
			if h, _ := log.NextIntervalHistogram(); h != nil {
				t.Error("more intervals than runs")
			}
		})
	}
	if err := HLog(&bytes.Buffer{}, result(probe.Bandwidth, bandwidthRun(8, 1e9, 1))); !errors.Is(err, ErrNoLatency) {
		t.Errorf("of bandwidth: %v, want ErrNoLatency", err)
	}
}

// drawing is what an SVG shows.
type drawing struct {
	texts  []string
	points []int // of each path that is stroked in a colour of ours
	dots   int   // filled circles
}

func drawn(t *testing.T, r *probe.Result) drawing {
	t.Helper()
	var b bytes.Buffer
	if err := Plot(&b, SVG, r); err != nil {
		t.Fatal(err)
	}
	var d drawing
	for dec := xml.NewDecoder(&b); ; {
		token, err := dec.Token()
		if err != nil {
			if err.Error() == "EOF" {
				return d
			}
			t.Fatal(err)
		}
		e, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		attr := map[string]string{}
		for _, a := range e.Attr {
			attr[a.Name.Local] = a.Value
		}
		switch {
		case e.Name.Local == "text":
			var text string
			if err := dec.DecodeElement(&text, &e); err != nil {
				t.Fatal(err)
			}
			d.texts = append(d.texts, text)
		case e.Name.Local != "path":
		case strings.Contains(attr["d"], "A"):
			d.dots++
		case strings.Contains(attr["style"], "stroke:#0072B2"):
			d.points = append(d.points, strings.Count(attr["d"], "L")+1)
		}
	}
}

func (d drawing) wants(t *testing.T, texts ...string) {
	t.Helper()
	for _, want := range texts {
		if !slices.ContainsFunc(d.texts, func(s string) bool { return strings.Contains(s, want) }) {
			t.Errorf("no label has %q: %q", want, d.texts)
		}
	}
}

func TestPlotLatency(t *testing.T) {
	d := drawn(t, result(probe.Latency, latencyRun(8, 1500, 1600, 1700, 1800, 1600, 2900, 3000, 2000, 2100, 2200)))
	d.wants(t, "RC WRITE latency: mlx5_0 port 1 → gpu02 mlx5_1 port 2", "2026-03-04 05:06:07 UTC", "messages of 8 B", "MTU 4096", "result ok",
		"Latency by percentile", "percentile of 10 samples", "latency (half-rtt)", "90 %", "Latency over time: the 10 samples", "time since the first sample was begun", "1 µs")
	if d.dots != 10 {
		t.Errorf("%d dots, want one a sample", d.dots)
	}
	if want := []int{18}; !slices.Equal(d.points, want) { // two for each of nine different values
		t.Errorf("curves of %v points, want %v", d.points, want)
	}
}

func TestPlotManySamples(t *testing.T) {
	ns := make([]uint64, maxDots+1)
	for i := range ns {
		ns[i] = 1500 + uint64(i%100)
	}
	ns[500] = 900_000
	d := drawn(t, result(probe.Latency, latencyRun(8, ns...)))
	d.wants(t, "the 6001 samples, lowest to highest and median", "1 ms", "2 µs")
	if d.dots != 0 {
		t.Errorf("%d dots, want none", d.dots)
	}
	cut := result(probe.Latency, latencyRun(8, ns...))
	cut.Runs[0].Raw = ns[:100]
	drawn(t, cut).wants(t, "the first 100 samples")
}

func TestPlotSweep(t *testing.T) {
	var bandwidth, latency []probe.Run
	for size := 2; size <= 8<<20; size *= 2 {
		bandwidth = append(bandwidth, bandwidthRun(size, min(float64(size)*5e6, 12.5e9), 4))
		latency = append(latency, latencyRun(size, 1500+uint64(size), 1600+uint64(size)))
	}
	r := result(probe.Bandwidth, bandwidth...)
	r.Sweep = &probe.Sweep{Knee: ptr(4096), Plateau: ptr(12.5e9)}
	d := drawn(t, r)
	d.wants(t, "Bandwidth over message size: knee at 4 KiB, 95 % of the plateau of 100 Gbit/s", "knee at 4 KiB", "message size", "bandwidth of payload", "10 Gbit/s", "8 MiB",
		"Bandwidth over time (8 of 23 sizes)")
	if d.dots != len(bandwidth) {
		t.Errorf("%d marks, want one a size: %d", d.dots, len(bandwidth))
	}
	if !slices.Contains(d.points, len(bandwidth)) {
		t.Errorf("curves of %v points, want one of %d", d.points, len(bandwidth))
	}
	r = result(probe.Latency, latency...)
	r.Sweep = &probe.Sweep{FlatTo: ptr(64), FlatLatency: ptr(1.502e-6)}
	drawn(t, r).wants(t, "Latency over message size: p50 within 10 % of 1.5 µs up to 64 B", "flat to 64 B", "p50", "minimum", "(8 of 23 sizes)",
		"samples in the order in which they were taken, size by size")
}

func TestPlotBandwidthOverTime(t *testing.T) {
	d := drawn(t, result(probe.Bandwidth, bandwidthRun(65536, 12.5e9, 50)))
	d.wants(t, "Bandwidth over time", "time since the first completion", "100 Gbit/s", "500 ms")
	if want := []int{100}; !slices.Equal(d.points, want) { // a stretch has two
		t.Errorf("curves of %v points, want %v", d.points, want)
	}
	short := bandwidthRun(65536, 12.5e9, 0)
	short.Curve, short.Seconds = nil, 1e-3
	if d := drawn(t, result(probe.Bandwidth, short)); !slices.Equal(d.points, []int{2}) {
		t.Errorf("of a run too short for a curve: %v points, want its mean", d.points)
	}
	r := result(probe.MessageRate, bandwidthRun(8, 8e8, 50))
	r.Op = verbs.Send
	drawn(t, r).wants(t, "RC SEND message-rate", "Message rate over time", "messages per second", "100 M/s")
}

// TestPlotAnything: whatever a probe may bring, a picture or an error comes of it.
func TestPlotAnything(t *testing.T) {
	zero := latencyRun(8, 0)
	huge := latencyRun(8, 1, 137_000_000_000)
	same := latencyRun(1, 2000, 2000, 2000)
	bare := latencyRun(8, 1500)
	bare.Raw, bare.Histogram, bare.Latency.P50 = nil, nil, nil
	long := result(probe.Latency, latencyRun(8, 1500))
	long.Peer = strings.Repeat("very-long-name.", 40)
	nothing := bandwidthRun(8, 0, 0)
	two := bandwidthRun(8, 1e9, 1)
	two.Size = 3000
	for name, tt := range map[string]struct {
		r     *probe.Result
		fails bool
	}{
		"a sample of 0 ns":    {result(probe.Latency, zero), false},
		"1 ns to 137 s":       {result(probe.Latency, huge), false},
		"all samples alike":   {result(probe.Latency, same), false},
		"no histogram":        {result(probe.Latency, bare), true},
		"a long name":         {long, false},
		"no rate":             {result(probe.Bandwidth, nothing), true},
		"sizes not of powers": {result(probe.Bandwidth, bandwidthRun(1500, 1e9, 1), two), false},
		"one size twice":      {result(probe.Bandwidth, bandwidthRun(8, 1e9, 1), bandwidthRun(8, 1e9, 1)), true},
		"no runs":             {result(probe.Latency), true},
		"a ping":              {results()[4], false},
	} {
		t.Run(name, func(t *testing.T) {
			var b bytes.Buffer
			err := Plot(&b, PNG, tt.r)
			if (err != nil) != tt.fails {
				t.Fatalf("error %v, want one: %t", err, tt.fails)
			}
			if err != nil {
				return
			}
			if _, err := png.DecodeConfig(&b); err != nil {
				t.Error(err)
			}
			_ = drawn(t, tt.r)
		})
	}
	if err := Plot(&bytes.Buffer{}, "gif", results()[0]); err == nil {
		t.Error("gif was not refused")
	}
}

func TestTicks(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 2.76e-7: "276 ns", 0.000002: "2 µs", 1 - 1e-16: "1 s", 0.001: "1 ms", 0.25: "250 ms", 12: "12 s"} {
		if got := seconds(v); got != want {
			t.Errorf("seconds(%v) = %q, want %q", v, got, want)
		}
	}
	for v, want := range map[float64]string{0: "0", 500: "500 bit/s", 1e9: "1 Gbit/s", 2.5e10: "25 Gbit/s", 1e12: "1 Tbit/s"} {
		if got := bitRate(v); got != want {
			t.Errorf("bitRate(%v) = %q, want %q", v, got, want)
		}
	}
	for _, span := range [][2]float64{{1e-7, 1e-7}, {1e-9, 137}, {3e-6, 4e-6}, {1e-6, 1e-3}} {
		lo, hi := below(span[0]), above(span[1])
		labels := 0
		for _, tick := range decades(lo, max(hi, 2*lo), seconds) {
			if tick.Label != "" {
				labels++
			}
		}
		if lo > span[0]*(1+1e-9) || hi < span[1]*(1-1e-9) || labels < 2 || labels > 13 {
			t.Errorf("%v: axis from %v to %v with %s labels", span, lo, hi, strconv.Itoa(labels))
		}
	}
}
