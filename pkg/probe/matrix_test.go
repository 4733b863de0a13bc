package probe

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// every is each op of each transport.
func every(f func(transport verbs.Transport, op verbs.Op)) {
	for _, transport := range []verbs.Transport{verbs.RC, verbs.UC, verbs.UD} {
		for _, op := range supported[transport] {
			f(transport, op)
		}
	}
}

// sizesOf are sizes that a transport and an op can carry.
func sizesOf(transport verbs.Transport, op verbs.Op) []int {
	switch {
	case op.Atomic():
		return []int{8}
	case transport == verbs.UD:
		return []int{8, 100, 4096}
	}
	return []int{8, 100, 65536}
}

// whole checks what must hold of any run: figures that are in order, and nothing lost, made up or counted twice.
func whole(t *testing.T, spec Spec, r *Result) {
	t.Helper()
	wantUsable(t, r)
	checkJSON(t, r)
	if len(r.Runs) != len(spec.Sizes) {
		t.Fatalf("%d runs of %d sizes", len(r.Runs), len(spec.Sizes))
	}
	for _, run := range r.Runs {
		if run.Iterations == 0 || run.Seconds <= 0 || run.CPUSeconds.Local == nil || run.Bytes == 0 {
			t.Errorf("size %d: %+v", run.Size, run)
		}
		lost := uint64(0) // a busy machine may take longer to answer than a ping is waited for
		if run.Arrivals != nil && spec.Kind == Latency {
			lost = run.Arrivals.Sent - run.Arrivals.Received
		}
		if spec.Iterations > 0 && run.Iterations+lost != uint64(spec.Iterations*max(1, spec.QPs)) {
			t.Errorf("size %d: %d messages", run.Size, run.Iterations)
		}
		// Nobody keeps a sender of UC and UD from sending more than the other end takes, but one message at a time arrives.
		if a := run.Arrivals; a != nil && (a.Received > a.Sent || *run.LossRatio < 0 || *run.LossRatio >= 1) {
			t.Errorf("size %d: %d of %d messages arrived, loss ratio %g", run.Size, a.Received, a.Sent, *run.LossRatio)
		}
		if b := run.Bandwidth; b != nil {
			sum := 0.0
			for _, v := range []*float64{b.Tx, b.Rx} {
				if v != nil {
					sum += *v
				}
			}
			if b.BytesPerSecond <= 0 || math.Abs(sum-b.BytesPerSecond) > 1e-6*sum || math.Abs(*run.MessageRate*float64(run.Size)-sum) > 1e-6*sum {
				t.Errorf("size %d: %+v is not the sum of its directions", run.Size, b)
			}
			if spec.Bidirectional && !run.short && (b.Tx == nil || b.Rx == nil) {
				t.Errorf("size %d: %+v has one direction", run.Size, b)
			}
		}
		if l := run.Latency; l != nil && (l.Min <= 0 || l.P50 == nil || l.Min > *l.P50 || *l.P50 > l.Max || l.Mean < l.Min || l.Mean > l.Max || l.Samples != int64(run.Iterations)) {
			t.Errorf("size %d: %+v is out of order", run.Size, l)
		}
		if (spec.Verify || spec.Op.Atomic()) && (run.Verified == nil || *run.Verified == 0) {
			t.Errorf("size %d: nothing was verified", run.Size)
		}
	}
}

func TestEveryTransport(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	every(func(transport verbs.Transport, op verbs.Op) {
		for _, kind := range []Kind{Latency, Bandwidth, MessageRate} {
			t.Run(fmt.Sprintf("%s of %s %s", kind, transport, op), func(t *testing.T) {
				spec := Spec{Kind: kind, Transport: transport, Op: op, Sizes: sizesOf(transport, op), Iterations: 300}
				whole(t, spec, a.probe(t.Context(), spec, b.target()))
			})
		}
	})
}

// The shapes that a run of bandwidth may have, each with every op that it goes with.
func TestShapes(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	for name, shape := range map[string]func(*Spec){
		"bidirectional":               func(s *Spec) { s.Bidirectional = true },
		"bidirectional, 16 QPs":       func(s *Spec) { s.Bidirectional, s.QPs = true, 16 },
		"reverse":                     func(s *Spec) { s.Reverse, s.Duration, s.Iterations = true, 200*time.Millisecond, 0 },
		"for a time":                  func(s *Spec) { s.Duration, s.Iterations = 20*time.Millisecond, 0 },
		"16 QPs, 4 threads":           func(s *Spec) { s.QPs, s.Threads = 16, 4 },
		"events":                      func(s *Spec) { s.Events = true },
		"bidirectional, with events":  func(s *Spec) { s.Bidirectional, s.Events = true, true },
		"verified":                    func(s *Spec) { s.Verify = true },
		"verified, 3 QPs, post list":  func(s *Spec) { s.Verify, s.QPs, s.PostList, s.TxDepth = true, 3, 4, 32 },
		"verified, both ways":         func(s *Spec) { s.Verify, s.Bidirectional = true, true },
		"limited":                     func(s *Spec) { s.RateLimit = 50e6 },
		"a post list, an odd number":  func(s *Spec) { s.PostList, s.Iterations = 7, 301 },
		"shallow":                     func(s *Spec) { s.TxDepth, s.RxDepth = 1, 1 },
		"repeated":                    func(s *Spec) { s.Repeat = 3 },
		"reads among the writes":      func(s *Spec) { s.ReadShare = 0.3 },
		"reads among them, both ways": func(s *Spec) { s.ReadShare, s.Bidirectional = 0.7, true },
		"a ring":                      func(s *Spec) { s.Memory.Ring = 1 << 20 },
		"flow labels":                 func(s *Spec) { s.FlowLabels = 3 },
	} {
		every(func(transport verbs.Transport, op verbs.Op) {
			spec := Spec{Kind: Bandwidth, Transport: transport, Op: op, Sizes: sizesOf(transport, op), Iterations: 300}
			shape(&spec)
			if spec.Verify && transport != verbs.UD {
				spec.Sizes[len(spec.Sizes)-1] = min(spec.Sizes[len(spec.Sizes)-1], 4096)
			}
			if spec.Bidirectional { // for the other direction to be on its way
				spec.Iterations, spec.Duration = 0, 200*time.Millisecond
			}
			if spec.Duration > 0 {
				spec.Sizes = spec.Sizes[len(spec.Sizes)-1:]
			}
			if err := spec.WithDefaults().Validate(); err != nil {
				return
			}
			t.Run(fmt.Sprintf("%s of %s %s", name, transport, op), func(t *testing.T) {
				whole(t, spec, a.probe(t.Context(), spec, b.target()))
			})
		})
	}
}

func TestShapesOfLatency(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	for name, shape := range map[string]func(*Spec){
		"events":     func(s *Spec) { s.Events = true },
		"verified":   func(s *Spec) { s.Verify = true },
		"for a time": func(s *Spec) { s.Duration, s.Iterations = 20*time.Millisecond, 0 },
		"repeated":   func(s *Spec) { s.Repeat = 3 },
		"raw":        func(s *Spec) { s.RawSamples = 100 },
	} {
		every(func(transport verbs.Transport, op verbs.Op) {
			spec := Spec{Kind: Latency, Transport: transport, Op: op, Sizes: sizesOf(transport, op), Iterations: 300}
			shape(&spec)
			if err := spec.WithDefaults().Validate(); err != nil {
				return
			}
			t.Run(fmt.Sprintf("%s of %s %s", name, transport, op), func(t *testing.T) {
				r := a.probe(t.Context(), spec, b.target())
				whole(t, spec, r)
				if got := len(r.Runs[0].Raw); got != spec.RawSamples {
					t.Errorf("%d raw samples, want %d", got, spec.RawSamples)
				}
				if s := r.Runs[0].Spread; (s != nil) != (spec.Repeat > 1) || s != nil && !(s.Runs == 3 && s.Min <= s.Median && s.Median <= s.Max && s.Median == *r.Runs[0].Latency.P50) {
					t.Errorf("spread %+v", s)
				}
			})
		})
	}
}
