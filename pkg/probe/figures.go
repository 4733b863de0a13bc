package probe

import (
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// figures turns what both ends saw into a Run.
func (s *initiation) figures(v *spoken) *Run {
	res, rep := v.timed, v.rep
	run := &Run{
		Time: v.begun, Size: v.size, Iterations: res.Completed, Seconds: res.Elapsed.Seconds(), Bytes: res.Completed * uint64(v.size),
		CPUSeconds: CPUSeconds{Local: finite(res.CPU.Seconds()), Remote: rep.CPUSeconds}, from: v.from, to: v.to,
	}
	if v.sink != nil {
		run.CPUSeconds.Local = finite(res.CPU.Seconds() + v.sink.CPU.Seconds())
	}
	if s.spec.Verify || s.spec.Op.Atomic() {
		n := v.verified
		if rep.Verified != nil {
			n += *rep.Verified
		}
		run.Verified = &n
	}
	if s.spec.lossy() {
		run.Arrivals, run.LossRatio = s.arrivals(v)
	}
	if s.spec.Kind == Latency {
		s.latency(run, res)
	} else {
		s.bandwidth(run, v)
	}
	return run
}

func (s *initiation) latency(run *Run, res verbs.RunResult) {
	measure := HalfRTT
	if s.spec.Op.OneSided() {
		measure = Operation
	} else {
		run.Bytes *= 2 // there and back
	}
	if res.Latency != nil {
		run.Latency, run.Histogram = latencyStats(res.Latency, measure)
		run.Raw, run.Delayed = res.Latency.Raw, res.Latency.Hit
	}
}

// flow is what one end sends.
type flow struct {
	rate    *float64 // messages per second, as they arrived if that shows
	offered *float64 // as they were posted, where they were also counted on arrival
	lo, hi  *float64
}

// forward is the flow that this end sends, nil if it does not.
func (s *initiation) forward(v *spoken, run *Run) *flow {
	if s.spec.Reverse {
		return nil
	}
	f := &flow{rate: v.timed.Rate, lo: v.timed.MinRate, hi: v.timed.MaxRate}
	if v.rep.Rate != nil && s.spec.peerReceives() {
		f = &flow{rate: v.rep.Rate, offered: v.timed.Rate, lo: v.rep.MinRate, hi: v.rep.MaxRate}
	}
	if f.rate == nil && v.timed.Elapsed > 0 { // too few completions to take a rate between them
		whole := float64(v.timed.Completed) / v.timed.Elapsed.Seconds()
		f.rate, run.short = &whole, true
	}
	return f
}

// backward is the flow that the peer sends, over the window of the forward one.
func (s *initiation) backward(v *spoken, run *Run) *flow {
	if !s.spec.peerSends() {
		return nil
	}
	f := &flow{rate: v.rep.SendRate, lo: v.rep.MinRate, hi: v.rep.MaxRate}
	apart := v.rep.Apart
	if v.sink != nil {
		f.offered, f.rate = f.rate, v.sink.Rate
		rate, ok := v.sink.Curve.Rate(v.from, v.to)
		if ok {
			f.rate = &rate
		}
		apart = !ok
		f.lo, f.hi = v.sink.MinRate, v.sink.MaxRate
	}
	run.short = run.short || apart || f.rate == nil
	return f
}

func (s *initiation) bandwidth(run *Run, v *spoken) {
	forward, backward := s.forward(v, run), s.backward(v, run)
	b := &BandwidthStats{Confirmed: s.spec.Op.Receives()}
	var messages, tx, rx float64
	// What a read moves flows against its request.
	reads := s.spec.ReadShare
	if s.spec.Op == verbs.Read {
		reads = 1
	}
	size := float64(v.size)
	var window time.Duration
	if v.to > v.from {
		window = v.to - v.from
	}
	if forward != nil && forward.rate != nil {
		messages += *forward.rate
		tx += *forward.rate * size * (1 - reads)
		rx += *forward.rate * size * reads
		b.Min, b.Max, b.Offered = scaled(forward.lo, v.size), scaled(forward.hi, v.size), scaled(forward.offered, v.size)
		run.Curve = v.timed.Curve
	}
	if backward != nil && backward.rate != nil {
		messages += *backward.rate
		rx += *backward.rate * size * (1 - reads)
		tx += *backward.rate * size * reads
		back := *backward.rate * window.Seconds()
		run.Bytes += uint64(back * size)
		if forward == nil {
			run.Iterations, run.Seconds = uint64(back), window.Seconds()
			b.Min, b.Max, b.Offered = scaled(backward.lo, v.size), scaled(backward.hi, v.size), scaled(backward.offered, v.size)
			if v.sink != nil {
				run.Curve = v.sink.Curve
			}
		}
	}
	if messages == 0 {
		return
	}
	run.MessageRate, b.BytesPerSecond = &messages, tx+rx
	if tx > 0 {
		b.Tx = &tx
	}
	if rx > 0 {
		b.Rx = &rx
	}
	run.Bandwidth = b
}

// arrivals counts what was lost of messages that nobody acknowledges; nil where nobody can tell.
func (s *initiation) arrivals(v *spoken) (*Arrivals, *float64) {
	a := &Arrivals{}
	add := func(dst **uint64, n uint64) {
		if *dst == nil {
			*dst = new(uint64)
		}
		**dst += n
	}
	switch {
	case s.spec.Kind == Latency:
		a.Sent, a.Received = v.timed.Posted, v.timed.Completed
		add(&a.Late, v.timed.Late)
	case !s.spec.Op.Receives():
		return nil, nil
	default:
		if v.rep.Received != nil && s.spec.peerReceives() {
			a.Sent, a.Received = v.sent, *v.rep.Received
			a.Duplicates, a.Reordered = v.rep.Duplicates, v.rep.Reordered
		}
		if v.sink != nil && v.rep.Sent != nil {
			a.Sent += *v.rep.Sent
			a.Received += v.sink.Received
			add(&a.Duplicates, v.sink.Duplicates)
			add(&a.Reordered, v.sink.Reordered)
		}
	}
	if a.Sent == 0 {
		return nil, nil
	}
	return a, finite(max(0, 1-float64(a.Received)/float64(a.Sent)))
}
