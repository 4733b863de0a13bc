package probe

import (
	"fmt"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// Every kind of probe with every op, over several sizes in one session.
func TestEveryProbe(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	sizes := []int{1, 8, 4096, 65536}
	for _, kind := range []Kind{Latency, Bandwidth, MessageRate} {
		for _, op := range []verbs.Op{verbs.Write, verbs.Read, verbs.Send} {
			for _, qps := range []int{1, 3} {
				if kind == Latency && qps > 1 {
					continue
				}
				t.Run(fmt.Sprintf("%s of %s, %d QPs", kind, op, qps), func(t *testing.T) {
					const iterations = 300
					spec := Spec{Name: "p", Kind: kind, Op: op, Sizes: sizes, Iterations: iterations, QPs: qps}
					r := a.probe(t.Context(), spec, b.target())
					wantUsable(t, r)
					checkJSON(t, r)
					if len(r.Runs) != len(sizes) {
						t.Fatalf("%d runs of %d sizes", len(r.Runs), len(sizes))
					}
					for i, run := range r.Runs {
						checkRun(t, kind, op, sizes[i], iterations*qps, run)
					}
					checkWhere(t, r, len(sizes))
				})
			}
		}
	}
}

func checkRun(t *testing.T, kind Kind, op verbs.Op, size, messages int, run Run) {
	t.Helper()
	if run.Size != size || run.Iterations != uint64(messages) || run.Seconds <= 0 || run.CPUSeconds.Local == nil {
		t.Errorf("size %d: %+v", size, run)
	}
	answered := Spec{Kind: kind, Op: op}.answered()
	if (run.CPUSeconds.Remote != nil) != answered {
		t.Errorf("size %d: the responder's loop ran: %t", size, run.CPUSeconds.Remote != nil)
	}
	if kind != Latency {
		b := run.Bandwidth
		if b == nil || run.Latency != nil || run.MessageRate == nil || *run.MessageRate <= 0 || b.BytesPerSecond != *run.MessageRate*float64(size) {
			t.Errorf("size %d: %+v", size, run)
			return
		}
		if there, back := b.Tx, b.Rx; (op == verbs.Read) != (there == nil) || (there == nil) == (back == nil) || b.Confirmed != op.Receives() || (b.Offered != nil) != b.Confirmed {
			t.Errorf("size %d: %+v flows the wrong way, or says the wrong thing of arrivals", size, b)
		}
		if run.Bytes != uint64(messages*size) {
			t.Errorf("size %d: %d bytes", size, run.Bytes)
		}
		return
	}
	measure, there := HalfRTT, 2
	if op.OneSided() {
		measure, there = Operation, 1
	}
	l := run.Latency
	if l == nil || run.Bandwidth != nil || l.Measure != measure || l.Samples != int64(messages) || l.Min <= 0 || l.P50 == nil || l.P99 == nil || l.P999 != nil {
		t.Errorf("size %d: %+v", size, l)
		return
	}
	if l.Min > *l.P50 || *l.P50 > *l.P99 || *l.P99 > l.Max || l.Mean < l.Min || l.Mean > l.Max {
		t.Errorf("size %d: %+v is out of order", size, l)
	}
	if run.Histogram.TotalCount() != l.Samples || run.Bytes != uint64(messages*size*there) {
		t.Errorf("size %d: %d samples in the histogram, %d bytes", size, run.Histogram.TotalCount(), run.Bytes)
	}
}

// checkWhere checks what a result says of the two ends, a and b, and their evidence over a number of runs.
func checkWhere(t *testing.T, r *Result, runs int) {
	t.Helper()
	if r.Device != simDevice || r.Port != 1 || *r.PeerDev != simDevice || *r.PeerPort != 1 || *r.MTU != 4096 || r.GIDIndex == nil || r.Peer != "b" || r.Path != "same_rack" || r.Rail == "" {
		t.Errorf("%+v", r)
	}
	if got := r.Evidence.Local.Counters["a_packets"]; got != uint64(runs) {
		t.Errorf("%d of %d timed parts are in this end's evidence", got, runs)
	}
	if got := r.Evidence.Remote.Counters["b_packets"]; got != uint64(runs) {
		t.Errorf("%d of %d timed parts are in the peer's evidence", got, runs)
	}
}

func TestDuration(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	const long = 100 * time.Millisecond
	for _, kind := range []Kind{Latency, Bandwidth} {
		for _, op := range []verbs.Op{verbs.Write, verbs.Read, verbs.Send} {
			t.Run(fmt.Sprintf("%s of %s", kind, op), func(t *testing.T) {
				r := a.probe(t.Context(), Spec{Kind: kind, Op: op, Sizes: []int{8, 1024}, Duration: long}, b.target())
				wantUsable(t, r)
				checkJSON(t, r)
				for _, run := range r.Runs {
					if run.Iterations == 0 || run.Seconds < long.Seconds() {
						t.Errorf("%d messages in %g s", run.Iterations, run.Seconds)
					}
					if kind == Latency && run.Latency.Samples != int64(run.Iterations) {
						t.Errorf("%d samples of %d messages", run.Latency.Samples, run.Iterations)
					}
					if b := run.Bandwidth; kind == Bandwidth && ((b.Min == nil) != (b.Max == nil) || b.Min != nil && *b.Min > *b.Max) {
						t.Errorf("%+v", b)
					}
				}
			})
		}
	}
}
