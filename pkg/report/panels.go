package report

import (
	"fmt"
	"image/color"
	"math"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg/draw"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// panelsOf are the panels that a result has figures for.
func panelsOf(r *probe.Result) []*panel {
	var latency, bandwidth []*probe.Run
	for i := range r.Runs {
		run := &r.Runs[i]
		if run.Latency != nil {
			latency = append(latency, run)
		}
		if run.Bandwidth != nil {
			bandwidth = append(bandwidth, run)
		}
	}
	var out []*panel
	add := func(p *panel) {
		if p != nil {
			out = append(out, p)
		}
	}
	if len(latency) > 0 {
		if severalSizes(latency) {
			add(latencyBySize(r, latency))
		}
		add(latencyByPercentile(latency))
		add(latencyByTime(latency))
	}
	if len(bandwidth) > 0 {
		if severalSizes(bandwidth) {
			add(bandwidthBySize(r, bandwidth))
		}
		add(bandwidthByTime(r, bandwidth))
	}
	return out
}

func severalSizes(runs []*probe.Run) bool {
	return slices.ContainsFunc(runs, func(run *probe.Run) bool { return run.Size != runs[0].Size })
}

// some picks runs that can be told apart in one panel, the first and the last among them, and says so.
func some(runs []*probe.Run) (picked []*probe.Run, note string) {
	if len(runs) <= maxLines {
		return runs, ""
	}
	for i := range maxLines {
		picked = append(picked, runs[i*(len(runs)-1)/(maxLines-1)])
	}
	return picked, fmt.Sprintf(" (%d of %d sizes)", maxLines, len(runs))
}

// bySize is a copy in the order of sizes.
func bySize(runs []*probe.Run) []*probe.Run {
	runs = slices.Clone(runs)
	slices.SortStableFunc(runs, func(a, b *probe.Run) int { return a.Size - b.Size })
	return runs
}

// latencyLabel is the label of an axis of latencies.
func latencyLabel(runs []*probe.Run) string { return "latency (" + runs[0].Latency.Measure + ")" }

func latencyBySize(r *probe.Result, runs []*probe.Run) *panel {
	p := newPanel("Latency over message size", "message size", latencyLabel(runs))
	for i, q := range []struct {
		name string
		of   func(*probe.LatencyStats) *float64
	}{
		{"p99.9", func(l *probe.LatencyStats) *float64 { return l.P999 }},
		{"p99", func(l *probe.LatencyStats) *float64 { return l.P99 }},
		{"p50", func(l *probe.LatencyStats) *float64 { return l.P50 }},
		{"minimum", func(l *probe.LatencyStats) *float64 { return &l.Min }},
	} {
		p.bySize(q.name, runs, func(run *probe.Run) *float64 { return q.of(run.Latency) }, 1, hues[i])
	}
	if p.entries == 0 {
		return nil
	}
	sizes(&p.X)
	logarithmic(&p.Y, seconds)
	if s := r.Sweep; s != nil && s.FlatTo != nil && s.FlatLatency != nil {
		p.Title.Text += fmt.Sprintf(": p50 within 10 %% of %s up to %s", seconds(*s.FlatLatency), sizeText(*s.FlatTo))
		p.Add(rule{x: float64(*s.FlatTo)}, note{float64(*s.FlatTo), "flat to " + sizeText(*s.FlatTo), true})
	}
	return p
}

func bandwidthBySize(r *probe.Result, runs []*probe.Run) *panel {
	if r.Kind == probe.MessageRate {
		p := newPanel("Message rate over message size", "message size", "messages per second")
		p.bySize("messages", runs, func(run *probe.Run) *float64 { return run.MessageRate }, 1, hues[0])
		if p.entries == 0 {
			return nil
		}
		sizes(&p.X)
		logarithmic(&p.Y, messageRate)
		return p
	}
	p := newPanel("Bandwidth over message size", "message size", "bandwidth of payload")
	p.bySize("bandwidth", runs, func(run *probe.Run) *float64 { return &run.Bandwidth.BytesPerSecond }, 8, hues[0])
	if r.Options.Bidirectional {
		p.bySize("of it sent", runs, func(run *probe.Run) *float64 { return run.Bandwidth.Tx }, 8, hues[1])
		p.bySize("received", runs, func(run *probe.Run) *float64 { return run.Bandwidth.Rx }, 8, hues[2])
	}
	if p.entries == 0 {
		return nil
	}
	sizes(&p.X)
	logarithmic(&p.Y, bitRate)
	if s := r.Sweep; s != nil && s.Knee != nil && s.Plateau != nil {
		p.Title.Text += fmt.Sprintf(": knee at %s, 95 %% of the plateau of %s", sizeText(*s.Knee), bitRate(*s.Plateau*8))
		p.Add(rule{x: float64(*s.Knee)}, rule{y: *s.Plateau * 8}, note{float64(*s.Knee), "knee at " + sizeText(*s.Knee), false})
	}
	return p
}

// bySize adds a curve over message sizes, as far as there are values for it.
func (p *panel) bySize(name string, runs []*probe.Run, of func(*probe.Run) *float64, times float64, hue color.Color) {
	var xy plotter.XYs
	for _, run := range bySize(runs) {
		if v := of(run); v != nil && *v > 0 {
			xy = append(xy, plotter.XY{X: float64(run.Size), Y: *v * times})
		}
	}
	if len(xy) > 0 {
		p.line(name, xy, hue, true)
	}
}

// latencyByPercentile is HdrHistogram's picture: a step for each value that was measured, up to the last sample.
func latencyByPercentile(runs []*probe.Run) *panel {
	runs, picked := some(runs)
	most := runs[0].Latency.Samples
	same := true
	for _, run := range runs {
		same = same && run.Latency.Samples == most
		most = max(most, run.Latency.Samples)
	}
	x := fmt.Sprintf("percentile of %d samples", most)
	switch {
	case !same:
		x = fmt.Sprintf("percentile of up to %d samples", most)
	case len(runs) > 1:
		x += " of each size"
	}
	p := newPanel("Latency by percentile"+picked, x, latencyLabel(runs))
	for i, run := range runs {
		if xy := percentileSteps(run); len(xy) > 0 {
			p.line(sizeText(run.Size), xy, hues[i%len(hues)], false)
		}
	}
	if p.entries == 0 {
		return nil
	}
	percentiles(&p.X, float64(most))
	scale(&p.Y, seconds)
	return p
}

// percentileSteps are two points for each bucket that holds samples: where its ranks begin and where they end.
func percentileSteps(run *probe.Run) plotter.XYs {
	if run.Histogram == nil || run.Latency.Samples == 0 {
		return nil
	}
	n, before := float64(run.Latency.Samples), int64(0)
	var xy plotter.XYs
	for _, b := range run.Histogram.Distribution() {
		if b.Count == 0 {
			continue
		}
		// A bucket stands for a range: it may not pass the true extremes.
		y := min(max(float64(b.To)/1e9, run.Latency.Min), run.Latency.Max)
		xy = append(xy, plotter.XY{X: n / max(n-float64(before), 1), Y: y})
		before += b.Count
		xy = append(xy, plotter.XY{X: n / max(n-float64(before), 1), Y: y})
	}
	return xy
}

// maxDots is how many samples are drawn one by one. Of more, what each of bands stretches holds.
const (
	maxDots = 6000
	bands   = 700
)

// latencyByTime draws the raw samples: of one run each when it ended, of several each beside the one before, since long
// messages would leave no room for short ones.
func latencyByTime(runs []*probe.Run) *panel {
	runs, picked := some(runs)
	runs = slices.DeleteFunc(slices.Clone(runs), func(run *probe.Run) bool { return len(run.Raw) == 0 })
	if len(runs) == 0 {
		return nil
	}
	count, first := 0, ""
	for _, run := range runs {
		count += len(run.Raw)
		if int64(len(run.Raw)) < run.Latency.Samples {
			first = "first "
		}
	}
	what := fmt.Sprintf("the %s%d samples", first, count)
	if count > maxDots {
		what += ", lowest to highest and median"
	}
	p := newPanel("Latency over time: "+what+picked, "time since the first sample was begun", latencyLabel(runs))
	if len(runs) > 1 {
		p.xLabel = "samples in the order in which they were taken, size by size"
	}
	all, end := make([]plotter.XYs, len(runs)), 0.0
	for i, run := range runs {
		if len(runs) == 1 {
			all[i] = overTime(run)
		} else {
			for _, ns := range run.Raw {
				all[i] = append(all[i], plotter.XY{X: end + float64(len(all[i])), Y: float64(ns) / 1e9})
			}
		}
		end = all[i][len(all[i])-1].X
	}
	for i, xy := range all {
		hue, name := hues[i%len(hues)], sizeText(runs[i].Size)
		if count > maxDots {
			b := banded(xy, end/bands, hue)
			p.Add(b)
			p.entry(name, b)
			continue
		}
		dots := &plotter.Scatter{XYs: xy, GlyphStyle: draw.GlyphStyle{Color: hue, Radius: 1.3, Shape: draw.CircleGlyph{}}}
		p.Add(dots)
		p.entry(name, dots)
	}
	if len(runs) > 1 {
		linear(&p.X, plain)
	} else {
		linear(&p.X, seconds)
	}
	p.X.Max = max(end*1.01, p.X.Max/2)
	scale(&p.Y, seconds)
	return p
}

// overTime are a run's samples over the time since it began. Pings are sent at a pace; the others follow each other.
func overTime(run *probe.Run) plotter.XYs {
	xy, trips, at := make(plotter.XYs, len(run.Raw)), 1.0, 0.0
	if run.Latency.Measure == probe.HalfRTT {
		trips = 2
	}
	for i, ns := range run.Raw {
		v := float64(ns) / 1e9
		if run.Ping != nil {
			xy[i] = plotter.XY{X: float64(i) * run.Ping.Gap, Y: v}
			continue
		}
		at += v * trips
		xy[i] = plotter.XY{X: at, Y: v}
	}
	return xy
}

// envelope is a column from the lowest to the highest sample of each stretch of the X axis, and a dash at their median.
type envelope struct {
	low, high, median plotter.XYs
	width             float64
	hue               color.RGBA
}

func banded(xy plotter.XYs, width float64, hue color.RGBA) *envelope {
	e := &envelope{width: width, hue: hue}
	for len(xy) > 0 {
		band := math.Floor(xy[0].X / width)
		n := 1
		for n < len(xy) && math.Floor(xy[n].X/width) == band {
			n++
		}
		values := make([]float64, n)
		for i, v := range xy[:n] {
			values[i] = v.Y
		}
		slices.Sort(values)
		x := (band + 0.5) * width
		e.low = append(e.low, plotter.XY{X: x, Y: values[0]})
		e.high = append(e.high, plotter.XY{X: x, Y: values[n-1]})
		e.median = append(e.median, plotter.XY{X: x, Y: values[(n-1)/2]})
		xy = xy[n:]
	}
	return e
}

// DataRange implements plot.DataRanger.
func (e *envelope) DataRange() (xmin, xmax, ymin, ymax float64) {
	xmin, xmax, ymin, _ = plotter.XYRange(e.low)
	_, _, _, ymax = plotter.XYRange(e.high)
	return xmin, xmax, ymin, ymax
}

// Plot implements plot.Plotter.
func (e *envelope) Plot(c draw.Canvas, p *plot.Plot) {
	trX, trY := p.Transforms(&c)
	pale := draw.LineStyle{Color: color.RGBA{e.hue.R/2 + 0x80, e.hue.G/2 + 0x80, e.hue.B/2 + 0x80, 0xff}, Width: 0.9}
	for i := range e.low {
		x := trX(e.low[i].X)
		c.StrokeLine2(pale, x, trY(e.low[i].Y)-0.5, x, trY(e.high[i].Y)+0.5)
	}
	for _, m := range e.median {
		c.StrokeLine2(draw.LineStyle{Color: e.hue, Width: 1.5}, trX(m.X-e.width/2)-0.3, trY(m.Y), trX(m.X+e.width/2)+0.3, trY(m.Y))
	}
}

// Thumbnail implements plot.Thumbnailer.
func (e *envelope) Thumbnail(c *draw.Canvas) {
	y := c.Center().Y
	c.StrokeLine2(draw.LineStyle{Color: e.hue, Width: 1.5}, c.Min.X, y, c.Max.X, y)
}

// step is a rate from one time to another, in seconds.
type step struct{ from, to, rate float64 }

// steps are the rates between the points of a run's curve, in messages per second.
func steps(run *probe.Run, begun float64) []step {
	var out []step
	for k := 1; k < len(run.Curve); k++ {
		a, b, zero := run.Curve[k-1], run.Curve[k], run.Curve[0].At
		if b.At > a.At {
			out = append(out, step{begun + (a.At - zero).Seconds(), begun + (b.At - zero).Seconds(), (b.Done - a.Done) / (b.At - a.At).Seconds()})
		}
	}
	return out
}

// minSteps is how many stretches of time a run of several must have to be worth drawing over time.
const minSteps = 3

// bandwidthByTime draws the rate between each two points of a run's curve; a single run that is too short for that, as its mean.
func bandwidthByTime(r *probe.Result, runs []*probe.Run) *panel {
	messages := r.Kind == probe.MessageRate
	title, label, q := "Bandwidth over time", "bandwidth of payload", bitRate
	if messages {
		title, label, q = "Message rate over time", "messages per second", messageRate
	}
	if r.Options.Bidirectional {
		title += ", of what this end sends"
	}
	if len(runs) > 1 {
		runs = slices.DeleteFunc(slices.Clone(runs), func(run *probe.Run) bool { return len(run.Curve) <= minSteps })
		if len(runs) == 0 {
			return nil
		}
	}
	runs, picked := some(runs)
	p := newPanel(title+picked, "time since the first completion", label)
	end := 0.0
	for i, run := range runs {
		each := float64(run.Size) * 8
		if messages {
			each = 1
		}
		begun := run.Time.Sub(runs[0].Time).Seconds()
		all := steps(run, begun)
		if len(all) == 0 {
			all = []step{{begun, begun + run.Seconds, run.Bandwidth.BytesPerSecond / float64(run.Size)}}
		}
		var xy plotter.XYs
		for _, s := range all {
			xy = append(xy, plotter.XY{X: s.from, Y: s.rate * each}, plotter.XY{X: s.to, Y: s.rate * each})
			end = max(end, s.to)
		}
		p.line(sizeText(run.Size), xy, hues[i%len(hues)], false)
	}
	if end <= 0 {
		return nil
	}
	linear(&p.X, seconds)
	p.X.Max = end
	if len(runs) > 1 {
		scale(&p.Y, q)
	} else {
		linear(&p.Y, q)
	}
	return p
}

// scale makes an axis linear from 0, or logarithmic where values are far apart.
func scale(a *plot.Axis, q quantity) {
	if wide(a.Min, a.Max) {
		logarithmic(a, q)
		return
	}
	linear(a, q)
}
