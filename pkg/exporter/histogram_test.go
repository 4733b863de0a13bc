package exporter

import (
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// nativeQuantile does as Prometheus does: by rank over the buckets, which it decodes from spans and deltas. It returns the bounds
// of the bucket.
func nativeQuantile(t *testing.T, h *dto.Histogram, q float64) (lower, upper float64) {
	t.Helper()
	rank := q * float64(h.GetSampleCount())
	seen, count, index, i := float64(h.GetZeroCount()), int64(0), 0, 0
	var result []float64
	for _, span := range h.PositiveSpan {
		index += int(span.GetOffset())
		for range span.GetLength() {
			count += h.PositiveDelta[i]
			if count < 0 {
				t.Fatalf("bucket %d has %d samples", index, count)
			}
			seen += float64(count)
			if result == nil && seen >= rank {
				result = []float64{math.Exp2(float64(index-1) / 8), math.Exp2(float64(index) / 8)}
			}
			i++
			index++
		}
	}
	if i != len(h.PositiveDelta) || seen != float64(h.GetSampleCount()) || result == nil {
		t.Fatalf("%d of %d deltas, %v of %d samples", i, len(h.PositiveDelta), seen, h.GetSampleCount())
	}
	return result[0], result[1]
}

// TestHistogramQuantiles: fast, slow and very slow networks, from the samples to what a server makes of a scrape.
func TestHistogramQuantiles(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for name, typical := range map[string]float64{"2 µs": 2000, "100 µs": 100e3, "20 ms": 20e6, "2 s": 2e9} {
		t.Run(name, func(t *testing.T) {
			e := newExporter(t, Options{ClassicHistograms: true})
			var all []int64
			var sum float64
			for range 4 { // runs
				ns := make([]int64, 5000)
				for i := range ns {
					ns[i] = int64(typical * math.Exp(rng.NormFloat64()*0.5))
				}
				r := latencyResult("n2", ns...)
				for _, v := range ns {
					sum += float64(v) / 1e9
				}
				r.Runs[0].Latency.Mean = mean(ns) / 1e9
				e.Observe(r)
				all = append(all, ns...)
			}
			slices.Sort(all)
			h := scrape(t, e)["latency_seconds"].Metric[0].Histogram
			if h.GetSchema() != 3 || h.GetSampleCount() != 20000 || math.Abs(h.GetSampleSum()/sum-1) > 1e-9 {
				t.Errorf("schema %d, count %d, sum %v, want 3, 20000, %v", h.GetSchema(), h.GetSampleCount(), h.GetSampleSum(), sum)
			}
			for _, q := range []float64{0.5, 0.9, 0.99, 0.999} {
				truth := float64(all[int(math.Ceil(q*20000))-1]) / 1e9
				lower, upper := nativeQuantile(t, h, q)
				// The HDR histogram has rounded the samples by up to a thousandth.
				if truth < lower*0.999 || truth > upper*1.001 {
					t.Errorf("p%v is %v, in the bucket %v to %v", 100*q, truth, lower, upper)
				}
				i, _ := slices.BinarySearchFunc(h.Bucket, uint64(math.Ceil(q*20000)), func(b *dto.Bucket, n uint64) int {
					return int(int64(b.GetCumulativeCount()) - int64(n))
				})
				if upper := h.Bucket[i].GetUpperBound(); truth > upper*1.001 || truth < upper/1.63 {
					t.Errorf("p%v is %v, in the classic bucket up to %v", 100*q, truth, upper)
				}
			}
		})
	}
}

// TestLayout compares with the library's own, slower way of telling which values a count stands for.
func TestLayout(t *testing.T) {
	for _, digits := range []int{1, 2, 3} {
		for _, lowest := range []int64{1, 1000, 1024} {
			h := hdrhistogram.New(lowest, 1<<37-1, digits)
			for v := int64(1); v < 1<<37; v += v/7 + 1 {
				_ = h.RecordValue(v) // in range
			}
			s := h.Export()
			layout := layoutOf(s)
			for i, bar := range h.Distribution() {
				if got, want := layout.middle(i), float64(bar.From+bar.To)/2; got != want || s.Counts[i] != bar.Count {
					t.Fatalf("%d digits from %d: count %d is around %v, want %v", digits, lowest, i, got, want)
				}
			}
		}
	}
}

func mean(ns []int64) float64 {
	var sum float64
	for _, v := range ns {
		sum += float64(v)
	}
	return sum / float64(len(ns))
}

// TestBucketsAreThoseOfTheLibrary compares with what client_golang makes of the same samples one by one.
func TestBucketsAreThoseOfTheLibrary(t *testing.T) {
	ns := []int64{0, 1, 2, 3, 1000, 1024, 1999, 2000, 50_000, 1 << 20, 1_000_000_000, 30_000_000_000}
	lib := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "x", NativeHistogramBucketFactor: 1.1, NativeHistogramZeroThreshold: prometheus.NativeHistogramZeroThresholdZero,
	})
	for _, v := range ns {
		h := recorded(v)
		lib.Observe(float64(h.Min()+h.Max()) / 2 / 1e9)
	}
	var wanted dto.Metric
	if err := lib.Write(&wanted); err != nil {
		t.Fatal(err)
	}
	var d distribution
	d.observe(bucketed(recorded(ns...), false), nil)
	got, want := d.metric().h, wanted.Histogram
	if !slices.Equal(got.PositiveDelta, want.PositiveDelta) || len(got.PositiveSpan) != len(want.PositiveSpan) ||
		got.GetSchema() != want.GetSchema() || got.GetZeroCount() != want.GetZeroCount() || got.GetSampleCount() != want.GetSampleCount() {
		t.Fatalf(" got %v\nwant %v", got, want)
	}
	for i, s := range got.PositiveSpan {
		if s.GetOffset() != want.PositiveSpan[i].GetOffset() || s.GetLength() != want.PositiveSpan[i].GetLength() {
			t.Errorf("span %d is %v, want %v", i, s, want.PositiveSpan[i])
		}
	}
}

func TestExemplars(t *testing.T) {
	e := newExporter(t, Options{ClassicHistograms: true})
	for i := range maxExemplars + 5 {
		r := latencyResult("n2", 2000, 3000+int64(i))
		r.ID = strings.Repeat("a", 31) + string(rune('a'+i))
		e.Observe(r)
	}
	long := latencyResult("n2", 5000)
	long.ID = strings.Repeat("x", 120) // together with its name longer than exemplars may be
	e.Observe(long)
	h := scrape(t, e)["latency_seconds"].Metric[0].Histogram
	if len(h.Exemplars) != maxExemplars {
		t.Fatalf("%d exemplars, want the newest %d", len(h.Exemplars), maxExemplars)
	}
	last := h.Exemplars[maxExemplars-1]
	if last.GetValue() != 3014e-9 || last.Timestamp == nil || last.Label[0].GetValue() != "n2" || last.Label[1].GetValue() != strings.Repeat("a", 31)+"o" {
		t.Errorf("exemplar %v, want the run's largest sample with dst and result_id", last)
	}

	r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	r.Header.Set("Accept", "application/openmetrics-text; version=1.0.0")
	w := httptest.NewRecorder()
	e.Handler(HandlerOptions{}).ServeHTTP(w, r)
	if !strings.Contains(w.Body.String(), `# {dst="n2",result_id="`) {
		t.Error("no exemplar in OpenMetrics text")
	}
}

// TestFailuresHaveNoSamples: what a run that failed has measured so far is not mixed into the distribution.
func TestFailuresHaveNoSamples(t *testing.T) {
	e := newExporter(t, Options{})
	r := latencyResult("n2", 2000)
	runs := r.Runs
	r = failed(r, probe.StageVerify, probe.Loss, probe.ScopePath)
	r.Runs = runs
	e.Observe(r)
	m := scrape(t, e)
	want(t, m, absent, "latency_seconds")
	want(t, m, 16, "probe_bytes_total", "probe", "rtt") // they were sent, though
}

func TestClassicBounds(t *testing.T) {
	if n := len(classicBounds); n > 40 || classicBounds[0] != 1e-6 || classicBounds[n-1] < (30*time.Second).Seconds() || !slices.IsSorted(classicBounds) {
		t.Errorf("%v", classicBounds)
	}
}
