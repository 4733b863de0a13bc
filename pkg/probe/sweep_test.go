package probe

import (
	"math"
	"slices"
	"testing"
)

// The knee is the smallest size at 95 % of the highest bandwidth, the flat part of latency ends where p50 leaves the lowest by 10 %.
func TestSweepOf(t *testing.T) {
	bandwidth := func(size int, v float64) Run { return Run{Size: size, Bandwidth: &BandwidthStats{BytesPerSecond: v}} }
	latency := func(size int, v float64) Run { return Run{Size: size, Latency: &LatencyStats{P50: &v}} }
	s := sweepOf([]Run{bandwidth(65536, 100), bandwidth(2, 1), bandwidth(4096, 94), bandwidth(8192, 95), bandwidth(1<<20, 99)})
	if *s.Knee != 8192 || *s.Plateau != 100 || s.FlatTo != nil {
		t.Errorf("%+v: knee %d", s, *s.Knee)
	}
	s = sweepOf([]Run{latency(2, 1.05), latency(4, 1), latency(64, 1.1), latency(4096, 1.3), latency(8192, 1.05)})
	if *s.FlatTo != 64 || *s.FlatLatency != 1 || s.Knee != nil {
		t.Errorf("%+v", s)
	}
	if sweepOf([]Run{bandwidth(1, 1), bandwidth(2, 2)}) != nil {
		t.Error("two sizes make no sweep")
	}
}

// The run in the middle is the result, with its own figures, and the others are its spread.
func TestMedianRun(t *testing.T) {
	run := func(v float64) Run { return Run{Size: 8, Bandwidth: &BandwidthStats{BytesPerSecond: v}} }
	got := medianRun([]Run{run(30), run(10), run(50), run(20)})
	if got.Bandwidth.BytesPerSecond != 20 || *got.Spread != (Spread{Runs: 4, Metric: "bytes_per_second", Median: 20, Min: 10, Max: 50, MAD: 10}) {
		t.Errorf("%+v of %+v", got.Bandwidth, got.Spread)
	}
	if one := medianRun([]Run{run(5)}); one.Spread != nil || one.Bandwidth.BytesPerSecond != 5 {
		t.Errorf("%+v", one)
	}
}

// Worked out by inclusion and exclusion: 1 - Σ (-1)^(i+1) C(N,i) (1-i/N)^k.
func TestCoverage(t *testing.T) {
	for _, tt := range []struct {
		paths, labels int
		want          float64
	}{{1, 1, 1}, {2, 1, 0}, {2, 2, 0.5}, {2, 4, 0.875}, {4, 4, 24.0 / 256}, {4, 16, 0.960004}, {16, 64, 0.7652}, {16, 115, 0.9902}, {64, 10, 0}} {
		if got := coverage(tt.paths, tt.labels); math.Abs(got-tt.want) > 1e-3 {
			t.Errorf("%d labels over %d paths: %.4f, want %.4f", tt.labels, tt.paths, got, tt.want)
		}
	}
}

// Labels differ from each other, are the same for a pair each time, and spread over the whole range.
func TestFlowLabels(t *testing.T) {
	a, b := flowLabels(256, "n1/mlx5_0/1/n2"), flowLabels(256, "n1/mlx5_0/1/n2")
	if !slices.Equal(a, b) || slices.Equal(a, flowLabels(256, "n2/mlx5_0/1/n1")) {
		t.Error("not the pair's own")
	}
	seen, high := map[int]bool{}, map[int]int{}
	for _, l := range a {
		if l < 1 || l >= 1<<20 || seen[l] {
			t.Fatalf("label %d", l)
		}
		seen[l] = true
		high[l>>16]++
	}
	for i := range 16 {
		if high[i] < 4 || high[i] > 40 {
			t.Errorf("%d of 256 labels begin with %x", high[i], i)
		}
	}
}
