package probe

import (
	"math"
	"slices"
	"strconv"

	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// minSweep is how many sizes make a sweep.
const minSweep = 3

// AllSizes are the powers of two from 2 bytes to 8 MiB that the spec's transport and op carry over a port; nil: any.
func (s Spec) AllSizes(p *LocalPort) []int {
	from, to := 2, 8<<20
	if s.Verify || s.Op.Atomic() {
		from = 8 // a number in each message
	}
	if p != nil && p.State.MaxMsg > 0 {
		to = int(min(uint64(to), uint64(p.State.MaxMsg)))
	}
	switch {
	case s.Op.Atomic():
		to = atomicSize
	case s.Transport == verbs.UD:
		to = min(to, maxUD)
		if p != nil && p.State.ActiveMTU > 0 {
			to = min(to, p.State.ActiveMTU)
		}
		if s.MTU > 0 {
			to = min(to, s.MTU)
		}
	}
	var out []int
	for size := from; size <= to; size *= 2 {
		out = append(out, size)
	}
	return out
}

// sweepOf finds the knee and the plateaus of a result's sizes; nil if there are too few.
func sweepOf(runs []Run) *Sweep {
	if len(runs) < minSweep {
		return nil
	}
	runs = slices.Clone(runs)
	slices.SortStableFunc(runs, func(a, b Run) int { return a.Size - b.Size })
	s := &Sweep{}
	top, low := 0.0, math.Inf(1)
	for _, r := range runs {
		if r.Bandwidth != nil {
			top = max(top, r.Bandwidth.BytesPerSecond)
		}
		if r.Latency != nil && r.Latency.P50 != nil {
			low = min(low, *r.Latency.P50)
		}
	}
	if top > 0 {
		s.Plateau = &top
		for _, r := range runs {
			if r.Bandwidth != nil && r.Bandwidth.BytesPerSecond >= 0.95*top {
				s.Knee = &r.Size
				break
			}
		}
	}
	if !math.IsInf(low, 1) {
		s.FlatLatency = &low
		for _, r := range runs {
			if r.Latency == nil || r.Latency.P50 == nil || *r.Latency.P50 > 1.1*low {
				break
			}
			s.FlatTo = &r.Size
		}
	}
	return s
}

// headline is the one figure by which runs are compared: bytes per second, or p50 in seconds. false: the run has none.
func (r *Run) headline() (metric string, v float64, ok bool) {
	switch {
	case r.Bandwidth != nil:
		return "bytes_per_second", r.Bandwidth.BytesPerSecond, true
	case r.Latency != nil && r.Latency.P50 != nil:
		return "p50", *r.Latency.P50, true
	}
	return "", 0, false
}

// medianRun picks the run in the middle, of an even number the lower of the two, and says how the others differ.
func medianRun(runs []Run) Run {
	if len(runs) == 1 {
		return runs[0]
	}
	value := func(r Run) float64 {
		_, v, _ := r.headline()
		return v
	}
	sorted := slices.Clone(runs)
	slices.SortStableFunc(sorted, func(a, b Run) int {
		switch {
		case value(a) < value(b):
			return -1
		case value(a) > value(b):
			return 1
		}
		return 0
	})
	mid := sorted[(len(sorted)-1)/2]
	metric, m, ok := mid.headline()
	if !ok {
		return mid
	}
	deviations := make([]float64, len(sorted))
	for i, r := range sorted {
		deviations[i] = math.Abs(value(r) - m)
	}
	slices.Sort(deviations)
	mid.Spread = &Spread{
		Runs: len(runs), Metric: metric, Median: m, Min: value(sorted[0]), Max: value(sorted[len(sorted)-1]), MAD: deviations[(len(deviations)-1)/2],
	}
	return mid
}

// coverage is the probability that each of a number of equally likely paths was taken at least once by n labels: a Markov chain
// over how many were, which loses no digits as the sum by inclusion and exclusion does.
func coverage(paths, n int) float64 {
	taken := make([]float64, paths+1) // taken[k]: probability that k were
	taken[0] = 1
	for range n {
		for k := paths; k >= 1; k-- {
			taken[k] = taken[k]*float64(k)/float64(paths) + taken[k-1]*float64(paths-k+1)/float64(paths)
		}
		taken[0] = 0
	}
	return taken[paths]
}

// coverages says what n labels cover, for the numbers of paths that fabrics have.
func coverages(n int) map[string]float64 {
	out := map[string]float64{}
	for _, paths := range []int{2, 4, 8, 16, 32, 64} {
		out[strconv.Itoa(paths)] = coverage(paths, n)
	}
	return out
}
