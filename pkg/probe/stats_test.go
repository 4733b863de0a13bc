package probe

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// latencyOf turns samples in nanoseconds into what a run returns.
func latencyOf(t *testing.T, samples []int64) *verbs.Latency {
	t.Helper()
	h := hdrhistogram.New(1, verbs.HistogramHighest, 3)
	l := &verbs.Latency{Samples: int64(len(samples)), Min: time.Duration(slices.Min(samples)), Max: time.Duration(slices.Max(samples))}
	var sum, sq float64
	for _, s := range samples {
		if err := h.RecordValue(min(s, verbs.HistogramHighest)); err != nil {
			t.Fatal(err)
		}
		sum += float64(s)
	}
	l.MeanNS = sum / float64(len(samples))
	for _, s := range samples {
		sq += (float64(s) - l.MeanNS) * (float64(s) - l.MeanNS)
	}
	l.StddevNS = math.Sqrt(sq / float64(len(samples)))
	l.Counts = h.Export().Counts
	return l
}

// nearestRank is the definition: the smallest sample that at least a share q of all samples does not exceed.
func nearestRank(sorted []int64, permille int) int64 {
	rank := (len(sorted)*permille + 999) / 1000
	return sorted[rank-1]
}

func TestQuantilesAreNearestRank(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	shapes := map[string]func() int64{
		"narrow":      func() int64 { return 14_000 + r.Int64N(50) },
		"uniform":     func() int64 { return 1 + r.Int64N(1e9) },
		"log-uniform": func() int64 { return int64(math.Exp(r.Float64() * 25)) },
		"two modes": func() int64 {
			if r.IntN(100) == 0 {
				return 68_000_000 + r.Int64N(1e6)
			}
			return 4_000 + r.Int64N(400)
		},
		"one value": func() int64 { return 777 },
		"shortest":  func() int64 { return 1 },
		"longest":   func() int64 { return math.MaxInt64 - r.Int64N(1000) },
	}
	sizes := []int{1, 2, 9, 10, 11, 99, 100, 101, 149, 151, 160, 999, 1000, 1001, 1050, 9999}
	for range 10 {
		sizes = append(sizes, 1+r.IntN(5000))
	}
	for name, draw := range shapes {
		for _, n := range sizes {
			t.Run(fmt.Sprintf("%s of %d", name, n), func(t *testing.T) {
				samples := make([]int64, n)
				for i := range samples {
					samples[i] = draw()
				}
				l := latencyOf(t, samples)
				slices.Sort(samples)
				s, h := latencyStats(l, HalfRTT)
				if h.TotalCount() != int64(n) || s.Samples != int64(n) {
					t.Fatalf("%d samples, histogram holds %d", s.Samples, h.TotalCount())
				}
				last := s.Min
				for _, q := range []struct {
					permille int
					got      *float64
				}{{500, s.P50}, {900, s.P90}, {990, s.P99}, {999, s.P999}} {
					carries := n*(1000-q.permille) >= 1000
					if carries != (q.got != nil) {
						t.Errorf("p%d of %d samples is there: %t", q.permille, n, q.got != nil)
					}
					if q.got == nil {
						continue
					}
					// Three significant digits; above the histogram's range nothing is told apart.
					want := float64(min(nearestRank(samples, q.permille), max(verbs.HistogramHighest, samples[0]))) / 1e9
					if math.Abs(*q.got-want) > want/1000+0.5e-9 {
						t.Errorf("p%d is %.9f, want %.9f", q.permille, *q.got, want)
					}
					if *q.got < last {
						t.Errorf("p%d is %g, below %g before it", q.permille, *q.got, last)
					}
					last = *q.got
				}
				if s.Max < last || s.Mean < s.Min || s.Mean > s.Max {
					t.Errorf("min %g, mean %g, last quantile %g, max %g", s.Min, s.Mean, last, s.Max)
				}
				if s.Min != time.Duration(samples[0]).Seconds() || s.Max != time.Duration(samples[n-1]).Seconds() {
					t.Errorf("extremes %g and %g of %d and %d ns", s.Min, s.Max, samples[0], samples[n-1])
				}
				if _, err := json.Marshal(s); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// The mean is accumulated in floating point, the extremes in whole nanoseconds.
func TestMeanStaysWithinTheExtremes(t *testing.T) {
	l := latencyOf(t, []int64{100, 100, 100})
	for _, mean := range []float64{99.6, 100.4} {
		l.MeanNS = mean
		if s, _ := latencyStats(l, Operation); s.Mean != s.Min {
			t.Errorf("mean %g of samples of %g", s.Mean, s.Min)
		}
	}
}

func TestFinite(t *testing.T) {
	for _, v := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		if finite(v) != nil {
			t.Errorf("%g passed", v)
		}
	}
	for _, v := range []float64{0, -1, 1e300} {
		if got := finite(v); got == nil || *got != v {
			t.Errorf("%g became %v", v, got)
		}
	}
	if scaled(nil, 8) != nil {
		t.Error("a rate from nothing")
	}
	huge := 1e308
	if scaled(&huge, 1<<30) != nil {
		t.Error("an infinite rate")
	}
	rate := 1e6
	if got := scaled(&rate, 4096); got == nil || *got != 4096e6 {
		t.Errorf("1e6 messages of 4096 bytes are %v", got)
	}
}
