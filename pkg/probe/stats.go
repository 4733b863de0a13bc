package probe

import (
	"math"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// latencyStats turns a run's samples into figures. Quantiles are by nearest rank over all samples; one that fewer than
// 1/(1-q) samples would have to carry is nil.
func latencyStats(l *verbs.Latency, measure string) (*LatencyStats, *hdrhistogram.Histogram) {
	h := hdrhistogram.Import(&hdrhistogram.Snapshot{
		LowestTrackableValue: 1, HighestTrackableValue: verbs.HistogramHighest, SignificantFigures: 3, Counts: l.Counts,
	})
	s := &LatencyStats{
		Measure: measure, Samples: l.Samples, Min: l.Min.Seconds(), Max: l.Max.Seconds(), Mean: l.MeanNS / 1e9, Stddev: l.StddevNS / 1e9,
	}
	// A bucket stands for a range, and the mean is not rounded to whole nanoseconds: neither may pass the true extremes.
	s.Mean = min(max(s.Mean, s.Min), s.Max)
	quantile := func(permille int64) *float64 {
		if l.Samples*(1000-permille) < 1000 {
			return nil
		}
		rank := (l.Samples*permille + 999) / 1000
		// The library rounds to the nearest rank, where the definition wants the next one up: aim inside of it.
		v := h.ValueAtPercentile((float64(rank) - 0.25) / float64(l.Samples) * 100)
		sec := min(max(time.Duration(v), l.Min), l.Max).Seconds()
		return &sec
	}
	s.P50, s.P90, s.P99, s.P999 = quantile(500), quantile(900), quantile(990), quantile(999)
	return s, h
}

// finite returns nil for what is no number.
func finite(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}

// scaled multiplies messages per second by the message size.
func scaled(rate *float64, size int) *float64 {
	if rate == nil {
		return nil
	}
	return finite(*rate * float64(size))
}
