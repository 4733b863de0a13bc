//go:build lab

package fleet

import (
	"encoding/json"
	"math"
	"net"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// inOrder checks what must hold of any run: nothing lost where that can't be, made up, or counted twice, and figures that fit
// each other.
func inOrder(t *testing.T, spec probe.Spec, r *probe.Result) {
	t.Helper()
	spec = spec.WithDefaults()
	if !r.Usable() || len(r.Runs) != 1 {
		t.Fatal(describe(*r))
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
	if r.Duration-r.Waited > spec.Deadline.Seconds() {
		t.Errorf("took %.1f s, with a deadline of %s", r.Duration, spec.Deadline)
	}
	run := r.Runs[0]
	lossy := spec.Transport != verbs.RC
	// Too little time on a busy host is no fault, if the result says so.
	short := spec.Duration > 0 && contains(r.Taints, probe.TaintShortRun)
	if run.Iterations == 0 && !short || run.Seconds <= 0 {
		t.Errorf("nothing was measured: %+v", run)
	}
	if want := uint64(spec.Iterations * spec.QPs); want > 0 && run.Iterations != want && !(lossy && spec.Kind == probe.Latency && run.Iterations < want) {
		t.Errorf("%d messages, want %d", run.Iterations, want)
	}
	if a := run.Arrivals; a != nil && (!lossy || a.Sent == 0 || a.Received > a.Sent || run.LossRatio == nil || *run.LossRatio < 0 || *run.LossRatio >= 1) {
		t.Errorf("arrivals %+v, loss ratio %v", *a, run.LossRatio)
	}
	if spec.Kind == probe.Latency {
		l := run.Latency
		if l == nil || l.Samples != int64(run.Iterations) || run.Histogram.TotalCount() != l.Samples {
			t.Fatalf("latency %+v of %d iterations", l, run.Iterations)
		}
		last := l.Min
		for _, q := range []*float64{l.P50, l.P90, l.P99, l.P999, &l.Max} {
			if q != nil {
				if *q < last {
					t.Errorf("out of order: %+v", *l)
				}
				last = *q
			}
		}
		if l.Min <= 0 || l.Mean < l.Min || l.Mean > l.Max || l.Stddev < 0 {
			t.Errorf("latency %+v", *l)
		}
	} else if b := run.Bandwidth; b == nil || run.MessageRate == nil {
		if !short {
			t.Errorf("no bandwidth, and no word of it: %v", r.TaintLog)
		}
	} else {
		sum := 0.0
		for _, v := range []*float64{b.Tx, b.Rx} {
			if v != nil {
				sum += *v
			}
		}
		if b.BytesPerSecond <= 0 || math.Abs(sum-b.BytesPerSecond) > 1e-6*sum || math.Abs(*run.MessageRate*float64(run.Size)-sum) > 1e-6*sum {
			t.Errorf("%+v is not the sum of its directions, or not what %g messages per second are", *b, *run.MessageRate)
		}
		if b.Min != nil && b.Max != nil && (*b.Min < 0 || *b.Min > *b.Max) {
			t.Errorf("%+v is out of order", *b)
		}
	}
	if (spec.Verify || spec.Op.Atomic()) && (run.Verified == nil || *run.Verified == 0 && !lossy && !short) {
		t.Error("nothing was verified")
	}
}

// TestMatrix runs every two properties that a probe may have together, and finds nothing left.
func TestMatrix(t *testing.T) {
	quiet(t)
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	l := localNode(t, 1)
	l.reaches(t, 2)
	l.usableTo(t, 2, probe.Spec{RDMACM: true, Iterations: 10}) // librdmacm keeps what it opens
	set, pairs := pairwise()
	t.Logf("%d pairs of levels in %d probes", pairs, len(set))
	files, one, two := ownFiles(t), held(t, 1), held(t, 2)
	retransmitted, began := 0, time.Now()
	for _, c := range set {
		t.Run(c.String(), func(t *testing.T) {
			spec := c.spec()
			r := l.to(t, 2, spec)
			if contains(r.Taints, probe.TaintRetransmit) {
				retransmitted++
			}
			inOrder(t, spec, r)
			if r.Duration > 3 {
				t.Logf("took %.1f s: %v", r.Duration, r.TaintLog)
			}
		})
	}
	t.Logf("%d probes in %s; %d sent packets again", len(set), time.Since(began).Round(time.Second), retransmitted)
	if n := ownFiles(t); n > files {
		t.Errorf("%d files are open, before %d", n, files)
	}
	two.fds += 4
	eventually(t, 20*time.Second, "node 1 holds no more than before", func() bool { now := held(t, 1); now.fds = 0; return !now.above(one) })
	eventually(t, 20*time.Second, "node 2 holds no more than before", func() bool { return !held(t, 2).above(two) })
	eventually(t, 20*time.Second, "no connection is left", func() bool { return cmIDs(t) == 0 })
}

// TestManySamples has more operations in one run than fit the scratch that samples are first kept in.
func TestManySamples(t *testing.T) {
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	l := localNode(t, 1)
	l.reaches(t, 2)
	spec := probe.Spec{Op: verbs.Read, Iterations: 70100, RawSamples: 70050, Deadline: 2 * time.Minute}
	r := l.to(t, 2, spec)
	inOrder(t, spec, r)
	run := r.Runs[0]
	if len(run.Raw) != 70050 {
		t.Errorf("%d raw samples", len(run.Raw))
	}
	var sum uint64
	for _, v := range run.Raw {
		sum += v
	}
	if mean := float64(sum) / float64(len(run.Raw)) / 1e9; off(mean, run.Latency.Mean) > 0.05 {
		t.Errorf("the raw samples' mean is %g s, the statistics' %g s", mean, run.Latency.Mean)
	}
	t.Logf("%d operations in %.1f s, %+v", run.Iterations, run.Seconds, *run.Latency)
}

// TestPSNWrap begins just below the highest packet sequence number, at both ends.
func TestPSNWrap(t *testing.T) {
	wraps := func() uint32 { return 1<<24 - 10 }
	l, peer := localNode(t, 1), localNode(t, 2)
	l.Node.FirstPSN, peer.Node.FirstPSN = wraps, wraps
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	responder := probe.NewResponder(peer.Node, probe.Limits{Sessions: 8, Memory: 256 << 20, Message: 1 << 20, Lease: 10 * time.Second})
	server := control.Server{Service: responder, Guard: control.AddressGuard(func(string) bool { return false }), Log: peer.Node.Log}
	served := make(chan error, 1)
	go func() { served <- server.Serve(t.Context(), listener) }()
	t.Cleanup(func() { // the context of the test is over by now
		if err := <-served; err != nil {
			t.Error(err)
		}
		responder.Shutdown()
	})
	for _, spec := range []probe.Spec{
		{Op: verbs.Write}, {Op: verbs.Send}, {Op: verbs.Read}, {Op: verbs.FetchAdd}, {Transport: verbs.UC, Op: verbs.Send}, {Transport: verbs.UD, Op: verbs.Send},
		{Kind: probe.Bandwidth, Op: verbs.Write, QPs: 4},
		{Kind: probe.Bandwidth, Op: verbs.Read, QPs: 4},
		{Kind: probe.Bandwidth, Op: verbs.Send, Verify: true, Sizes: []int{16384}},
		{Kind: probe.Bandwidth, Op: verbs.Send, Bidirectional: true},
		{Kind: probe.Bandwidth, Transport: verbs.UC, Op: verbs.Send, RateLimit: 4e6},
		{Kind: probe.Bandwidth, Transport: verbs.UD, Op: verbs.Send, RateLimit: 4e6},
	} {
		spec.Iterations, spec.Deadline = 100, 30*time.Second
		if spec.Kind != "" {
			spec.TxDepth = 16
		}
		t.Run(string(spec.Kind)+" "+string(spec.Transport)+" "+string(spec.Op), func(t *testing.T) {
			r := l.Probe(t.Context(), spec, probe.Target{Name: "node2", Address: listener.Addr().String()}, "rxe1", 1)
			inOrder(t, spec, r)
			if a := r.Runs[0].Arrivals; a != nil && a.Received < a.Sent*9/10 {
				t.Errorf("%d of %d arrived", a.Received, a.Sent)
			}
		})
	}
}
