package verbs

import (
	"sort"
	"time"
)

// Point is how many messages had completed at a time of this host's CLOCK_MONOTONIC.
type Point struct {
	At   time.Duration
	Done float64
}

// Curve is messages completed over time: At and Done never decrease.
type Curve []Point

// At is how many messages had completed at t, on the straight line between two points.
func (c Curve) At(t time.Duration) float64 {
	i := sort.Search(len(c), func(i int) bool { return c[i].At >= t })
	switch {
	case len(c) == 0:
		return 0
	case i == len(c):
		return c[len(c)-1].Done
	case i == 0:
		return c[0].Done
	}
	a, b := c[i-1], c[i]
	return a.Done + (b.Done-a.Done)*float64(t-a.At)/float64(b.At-a.At)
}

// Rate is messages per second from one time to another; false if the curve does not cover nine tenths of that.
func (c Curve) Rate(from, to time.Duration) (float64, bool) {
	if len(c) < 2 || to <= from {
		return 0, false
	}
	lo, hi := max(from, c[0].At), min(to, c[len(c)-1].At)
	if hi <= lo || float64(hi-lo) < 0.9*float64(to-from) {
		return 0, false
	}
	return (c.At(hi) - c.At(lo)) / (hi - lo).Seconds(), true
}

// Extremes are the lowest and the highest rate over intervals of the given length, in messages per second; false if not one
// whole interval fits.
func (c Curve) Extremes(interval time.Duration) (lo, hi float64, ok bool) {
	if len(c) < 2 {
		return 0, 0, false
	}
	for t := c[0].At; t+interval <= c[len(c)-1].At; t += interval {
		r := (c.At(t+interval) - c.At(t)) / interval.Seconds()
		if !ok || r < lo {
			lo = r
		}
		if !ok || r > hi {
			hi = r
		}
		ok = true
	}
	return lo, hi, ok
}

// sum adds up curves over the time that all of them cover.
func sum(curves []Curve) Curve {
	if len(curves) == 1 {
		return curves[0]
	}
	var from, to time.Duration
	for i, c := range curves {
		if len(c) == 0 {
			return nil
		}
		if i == 0 || c[0].At > from {
			from = c[0].At
		}
		if i == 0 || c[len(c)-1].At < to {
			to = c[len(c)-1].At
		}
	}
	if to <= from {
		return nil
	}
	at := func(t time.Duration) Point {
		p := Point{At: t}
		for _, c := range curves {
			p.Done += c.At(t)
		}
		return p
	}
	out := Curve{at(from)}
	for _, p := range curves[0] {
		if p.At > from && p.At < to {
			out = append(out, at(p.At))
		}
	}
	return append(out, at(to))
}
