package report

import (
	"fmt"
	"math"
	"strconv"

	"gonum.org/v1/plot"
)

// quantity is what an axis shows: a number in base units, for people.
type quantity func(v float64) string

// seconds, bitRate and messageRate are the quantities of our axes.
func seconds(v float64) string {
	if v == 0 {
		return "0"
	}
	for _, u := range []struct {
		of   float64
		name string
	}{{1, "s"}, {1e-3, "ms"}, {1e-6, "µs"}} {
		if v >= u.of*(1-1e-9) {
			return short(v/u.of) + " " + u.name
		}
	}
	return short(v*1e9) + " ns"
}

func bitRate(v float64) string { return metric(v, "bit/s") }

func messageRate(v float64) string { return metric(v, "/s") }

// metric is a number with the prefix that suits it.
func metric(v float64, unit string) string {
	if v == 0 {
		return "0"
	}
	for _, p := range []struct {
		of   float64
		name string
	}{{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}} {
		if v >= p.of*(1-1e-9) {
			return short(v/p.of) + " " + p.name + unit
		}
	}
	return short(v) + " " + unit
}

func plain(v float64) string { return short(v) }

// short has as many digits as matter on an axis, three at least.
func short(v float64) string {
	if v >= 1000 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

// sizeText is a message size for people, exact.
func sizeText(n int) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return fmt.Sprintf("%d MiB", n>>20)
	case n >= 1<<10 && n%(1<<10) == 0:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d B", n)
}

// linear makes an axis go from 0 to a little above the data.
func linear(a *plot.Axis, q quantity) {
	a.Min = 0
	a.Max *= 1.06
	if a.Max <= 0 {
		a.Max = 1
	}
	step := above(a.Max / 8)
	var ticks []plot.Tick
	for n := 0; float64(n)*step <= a.Max; n++ {
		ticks = append(ticks, plot.Tick{Value: float64(n) * step, Label: q(float64(n) * step)})
	}
	a.Tick.Marker = plot.ConstantTicks(ticks)
}

// wide reports whether values are so far apart that a linear axis would hide the lower ones.
func wide(lo, hi float64) bool { return lo > 0 && hi/lo >= 20 }

// logarithmic makes an axis logarithmic, from one of 1, 2, 5 times a power of ten to another, around the data.
func logarithmic(a *plot.Axis, q quantity) {
	lo, hi := a.Min, a.Max
	a.Min, a.Max = below(lo), above(hi)
	if a.Min == a.Max {
		a.Min, a.Max = a.Min/2, a.Max*2
	}
	a.Scale = plot.LogScale{}
	a.Tick.Marker = plot.ConstantTicks(decades(a.Min, a.Max, q))
}

// below and above are the nearest of 1, 2, 5 times a power of ten that is not above, or below, a number above 0.
func below(v float64) float64 {
	p := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{5, 2} {
		if m*p <= v*(1+1e-9) {
			return m * p
		}
	}
	return p
}

func above(v float64) float64 {
	p := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 5} {
		if m*p >= v*(1-1e-9) {
			return m * p
		}
	}
	return 10 * p
}

// decades are the ticks of a logarithmic axis.
func decades(lo, hi float64, q quantity) []plot.Tick {
	span := math.Log10(hi / lo)
	every := int(math.Ceil(span / 9)) // decades between labels
	var ticks []plot.Tick
	for e := int(math.Floor(math.Log10(lo))); ; e++ {
		p := math.Pow(10, float64(e))
		if p > hi*(1+1e-9) {
			return ticks
		}
		for m := 1.; m < 10; m++ {
			v := m * p
			if v < lo*(1-1e-9) || v > hi*(1+1e-9) || m > 1 && span > 4 {
				continue
			}
			t := plot.Tick{Value: v}
			if m == 1 && e%every == 0 || span <= 3 && (m == 2 || m == 5) {
				t.Label = q(v)
			}
			ticks = append(ticks, t)
		}
	}
}

// sizes makes an axis one of message sizes: powers of two.
func sizes(a *plot.Axis) {
	lo, hi := math.Floor(math.Log2(a.Min)), math.Ceil(math.Log2(a.Max))
	if lo == hi {
		lo, hi = lo-1, hi+1
	}
	every := int(math.Ceil((hi - lo) / 12))
	var ticks []plot.Tick
	for e := int(lo); e <= int(hi); e++ {
		t := plot.Tick{Value: math.Exp2(float64(e))}
		if e >= 0 && (e-int(lo))%every == 0 {
			t.Label = sizeText(1 << e)
		}
		ticks = append(ticks, t)
	}
	a.Min, a.Max, a.Scale, a.Tick.Marker = math.Exp2(lo), math.Exp2(hi), plot.LogScale{}, plot.ConstantTicks(ticks)
}

// percentiles makes an axis one of 1/(1-p): the further out the samples are, the more room they have.
func percentiles(a *plot.Axis, samples float64) {
	a.Min, a.Max, a.Scale = 1, max(samples, 10), plot.LogScale{}
	ticks := []plot.Tick{{Value: 1, Label: "0 %"}, {Value: 2, Label: "50 %"}, {Value: 4, Label: "75 %"}}
	for v, digits := 10., 0; v <= a.Max*(1+1e-9); v, digits = v*10, digits+1 {
		ticks = append(ticks, plot.Tick{Value: v, Label: strconv.FormatFloat(100-100/v, 'f', max(0, digits-1), 64) + " %"})
		for m := 2.; m < 10; m++ {
			ticks = append(ticks, plot.Tick{Value: v * m})
		}
	}
	a.Tick.Marker = plot.ConstantTicks(ticks)
}
