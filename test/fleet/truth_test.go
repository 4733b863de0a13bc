//go:build lab

package fleet

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// The tests of truth set a condition that is known, and compare what is measured with it.

// A busy host only ever makes a run slower: of some attempts the best one counts, and an attempt that is better than can be is a
// fault at once.
const attempts = 6

// off is how far a value is from what it should be, as a share of that.
func off(got, want float64) float64 { return math.Abs(got/want - 1) }

// stolen is the share of the time that the host takes from a guest whose CPUs are all busy: gaps between two looks at the clock.
func stolen() float64 {
	const spin, gap = 500 * time.Millisecond, 500 * time.Microsecond
	shares := make([]float64, runtime.NumCPU())
	var all sync.WaitGroup
	for n := range shares {
		all.Go(func() {
			start := time.Now()
			var lost time.Duration
			for last := start; last.Sub(start) < spin; {
				now := time.Now()
				if d := now.Sub(last); d > gap {
					lost += d
				}
				last = now
			}
			shares[n] = lost.Seconds() / time.Since(start).Seconds()
		})
	}
	all.Wait()
	return slices.Max(shares)
}

// judge is what to make of a figure that is off: a fault, unless the host gives the guest too little time to tell.
type judge struct {
	t    *testing.T
	busy float64 // share of the guest's time, at most
	off  int
}

func (j *judge) say(good bool, line string) {
	j.t.Helper()
	if good {
		j.t.Log(line)
		return
	}
	j.busy = max(j.busy, stolen())
	j.off++
	if j.busy > 0.1 {
		j.t.Log(line + " (not judged)")
	} else {
		j.t.Error(line)
	}
}

func (j *judge) end() {
	j.t.Helper()
	if j.off > 0 && j.busy > 0.1 && !j.t.Failed() {
		j.t.Skipf("the host takes up to %.0f %% of the guest's time: %d figures can't be judged", 100*j.busy, j.off)
	}
}

// TestTrueLatency delays what node 1, or both nodes, send. A delayed direction adds its delay to a round trip and to an
// operation, and half of it to half a round trip. Where the op allows, completions are waited for, as the emulated CPUs then have time for
// what they emulate.
func TestTrueLatency(t *testing.T) {
	quiet(t)
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	l := localNode(t, 1)
	l.reaches(t, 2)
	defer command(t, "fault", "1", "clear")
	defer command(t, "fault", "2", "clear")
	for _, c := range []struct {
		spec    probe.Spec
		measure string
		share   float64 // of one direction's delay
	}{
		{probe.Spec{Op: verbs.Write}, probe.HalfRTT, 0.5},
		{probe.Spec{Op: verbs.Send, Events: true}, probe.HalfRTT, 0.5},
		{probe.Spec{Transport: verbs.UC, Op: verbs.WriteImm, Events: true}, probe.HalfRTT, 0.5},
		{probe.Spec{Transport: verbs.UD, Op: verbs.Send, Events: true}, probe.HalfRTT, 0.5},
		{probe.Spec{Op: verbs.Read}, probe.Operation, 1},
		{probe.Spec{Op: verbs.FetchAdd, Events: true}, probe.Operation, 1},
		{probe.Spec{Kind: probe.Ping}, probe.RTT, 1},
	} {
		s := c.spec
		t.Run(string(s.Kind)+" "+string(s.Transport)+" "+string(s.Op), func(t *testing.T) {
			p50 := func(iterations int) float64 {
				s.Iterations = iterations
				if s.Kind == probe.Ping {
					s.Gap = 2 * time.Millisecond
				} else {
					s.Warmup = 3
				}
				run := l.usableTo(t, 2, s)
				if run.Latency == nil || run.Latency.P50 == nil || run.Latency.Measure != c.measure {
					t.Fatalf("latency %+v, want a median of %s", run.Latency, c.measure)
				}
				return *run.Latency.P50
			}
			j := judge{t: t}
			defer j.end()
			base := math.Inf(1)
			for range 5 {
				base = min(base, p50(50))
			}
			for _, delay := range []time.Duration{time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond} {
				for both := range 2 {
					command(t, "fault", "1", "delay", delay.String())
					command(t, "fault", "2", "clear")
					if both == 1 {
						command(t, "fault", "2", "delay", delay.String())
					}
					set := delay.Seconds() * c.share * float64(1+both)
					want, got, tries := base+set, math.Inf(1), 0
					for ; tries < attempts && got > want*1.02; tries++ {
						got = min(got, p50(20))
					}
					line := fmt.Sprintf("%s at %d of 2: p50 %.0f us, base %.0f us + %.0f us: %+.1f %%, attempt %d", delay, 1+both, got*1e6, base*1e6, set*1e6, 100*(got/want-1), tries)
					j.say(off(got, want) <= 0.02, line)
				}
			}
			command(t, "fault", "1", "clear")
			command(t, "fault", "2", "clear")
		})
	}
}

// Bytes that a packet has beside its payload: Ethernet, IPv4, UDP, BTH and ICRC; UD has a DETH and these tests' immediate.
const (
	rocePacket  = 14 + 20 + 8 + 12 + 4
	udPacket    = rocePacket + 8 + 4
	wirePayload = 4096
)

// TestTrueBandwidth has node 1, or for reads node 2, send no faster than a rate that counts all bytes of a packet.
func TestTrueBandwidth(t *testing.T) {
	quiet(t)
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	l := localNode(t, 1)
	l.reaches(t, 2)
	defer command(t, "fault", "1", "clear")
	defer command(t, "fault", "2", "clear")
	j := judge{t: t}
	defer j.end()
	large := probe.Spec{Kind: probe.Bandwidth, Sizes: []int{16 << 10}, TxDepth: 16, CQMod: 1, Duration: 700 * time.Millisecond, Events: true}
	with := func(transport verbs.Transport, op verbs.Op) probe.Spec {
		s := large
		s.Transport, s.Op = transport, op
		if transport == verbs.UD {
			s.Sizes = []int{4096}
		}
		return s
	}
	for _, rate := range []float64{5e6, 20e6} {
		for _, c := range []struct {
			spec     probe.Spec
			node     string // whose rate is limited
			overhead int
		}{
			{with(verbs.RC, verbs.Write), "1", rocePacket},
			{with(verbs.RC, verbs.Send), "1", rocePacket},
			{with(verbs.RC, verbs.Read), "2", rocePacket},
			{with(verbs.UC, verbs.Send), "1", rocePacket},
			{with(verbs.UD, verbs.Send), "1", udPacket},
		} {
			want := rate * wirePayload / float64(wirePayload+c.overhead)
			got, tries := 0.0, 0
			for ; tries < attempts && got < want*0.97; tries++ {
				command(t, "fault", c.node, "rate", fmt.Sprintf("%.0fmbit", rate*8/1e6))
				run := l.usableTo(t, 2, c.spec)
				command(t, "fault", c.node, "clear")
				if run.Bandwidth == nil {
					t.Fatalf("%s %s: no bandwidth", c.spec.Transport, c.spec.Op)
				}
				got = max(got, run.Bandwidth.BytesPerSecond)
			}
			line := fmt.Sprintf("%s %s, %.0f MB/s at node%s: %.3f MB/s, %.3f less headers: %+.1f %%, attempt %d", c.spec.Transport, c.spec.Op, rate/1e6, c.node,
				got/1e6, want/1e6, 100*(got/want-1), tries)
			j.say(off(got, want) <= 0.03, line)
		}
	}
}

// likely reports whether k of n is within the central 99 % of a binomial distribution.
func likely(k, n uint64, p float64) bool {
	if p <= 0 || p >= 1 {
		return float64(k) == p*float64(n)
	}
	var below, upTo float64 // P(X < k), P(X <= k)
	lg := func(x float64) float64 { v, _ := math.Lgamma(x); return v }
	for i := range k + 1 {
		x := float64(i)
		pmf := math.Exp(lg(float64(n)+1) - lg(x+1) - lg(float64(n)-x+1) + x*math.Log(p) + (float64(n)-x)*math.Log1p(-p))
		below, upTo = upTo, upTo+pmf
	}
	return upTo >= 0.005 && 1-below >= 0.005
}

func TestLikely(t *testing.T) {
	for _, c := range []struct {
		k, n uint64
		p    float64
		want bool
	}{
		{0, 1000, 0, true}, {1, 1000, 0, false},
		// scipy.stats.binom.interval(0.99, 1000, 0.01) is (3, 19).
		{2, 1000, 0.01, false}, {3, 1000, 0.01, true}, {19, 1000, 0.01, true}, {20, 1000, 0.01, false},
		{150, 3000, 0.05, true}, {100, 3000, 0.05, false}, {200, 3000, 0.05, false},
	} {
		if got := likely(c.k, c.n, c.p); got != c.want {
			t.Errorf("%d of %d at %g: %t", c.k, c.n, c.p, got)
		}
	}
}

// limited is a stream of datagrams that the receiver keeps up with, so that only the wire loses any.
func limited(messages int) probe.Spec {
	const size, perSecond = 64, 2000
	return probe.Spec{Kind: probe.MessageRate, Transport: verbs.UD, Op: verbs.Send, Sizes: []int{size}, Iterations: messages, RateLimit: size * perSecond, TxDepth: 16, CQMod: 1, RxDepth: 2048}
}

// TestTrueLoss has a share of what node 1 sends lost. What is counted as lost must be what the kernel dropped, and be likely for the
// share; an unlikely outcome gets a second chance, as one in a hundred is.
func TestTrueLoss(t *testing.T) {
	quiet(t)
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	l := localNode(t, 1)
	l.reaches(t, 2)
	defer command(t, "fault", "1", "clear")
	ping := probe.Spec{Kind: probe.Ping, Iterations: 1500, Gap: time.Millisecond}
	for _, percent := range []float64{0, 0.1, 1, 5} {
		for what, measure := range map[string]func() (lost, sent uint64, ratio float64){
			"UD send": func() (uint64, uint64, float64) {
				run := l.usableTo(t, 2, limited(3000))
				a := run.Arrivals
				if a == nil || run.LossRatio == nil || a.Sent < 3000 || a.Received > a.Sent || *a.Duplicates != 0 || *a.Reordered != 0 {
					t.Fatalf("arrivals %+v", a)
				}
				return a.Sent - a.Received, a.Sent, *run.LossRatio
			},
			"ping": func() (uint64, uint64, float64) {
				run := l.usableTo(t, 2, ping)
				p := run.Ping
				if p == nil || run.LossRatio == nil || p.Sent != ping.Iterations || p.Answered+p.Lost+p.Invalid != p.Sent {
					t.Fatalf("ping %+v", p)
				}
				return uint64(p.Lost), uint64(p.Sent), *run.LossRatio
			},
		} {
			var line string
			for range 2 {
				command(t, "fault", "1", "loss", fmt.Sprintf("%g%%", percent))
				lost, sent, ratio := measure()
				dropped := queueOf(t, 1)
				line = fmt.Sprintf("%s, %g %%: %d of %d lost, %.2f %%; the kernel dropped %d of %d", what, percent, lost, sent, 100*ratio, dropped.Drops, dropped.Packets)
				if d := int64(lost) - int64(dropped.Drops); d < -1 || d > 1 { // a packet of the address resolution's may be among them
					t.Error(line)
				}
				if off(ratio, float64(lost)/float64(sent)) > 1e-9 && lost > 0 {
					t.Errorf("%s: the ratio is not that of the counts", line)
				}
				if likely(lost, sent, percent/100) {
					t.Log(line)
					line = ""
					break
				}
			}
			if line != "" {
				t.Errorf("%s: twice unlikely", line)
			}
		}
	}
}

// TestTrueOrder has datagrams of node 1 arrive twice, or in another order.
func TestTrueOrder(t *testing.T) {
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	l := localNode(t, 1)
	l.reaches(t, 2)
	defer command(t, "fault", "1", "clear")

	t.Run("duplicates", func(t *testing.T) {
		command(t, "fault", "1", "duplicate", "10%")
		run := l.usableTo(t, 2, limited(2000))
		a, q := run.Arrivals, queueOf(t, 1)
		t.Logf("%+v: %d duplicates, %d reordered; the kernel sent %d", *a, *a.Duplicates, *a.Reordered, q.Packets)
		if a.Received != a.Sent || *run.LossRatio != 0 {
			t.Errorf("%d of %d received: each arrived at least once", a.Received, a.Sent)
		}
		if extra := q.Packets - a.Sent; *a.Duplicates > extra || *a.Duplicates+2 < extra || !likely(*a.Duplicates, a.Sent, 0.1) && (*a.Duplicates < a.Sent/20 || *a.Duplicates > a.Sent/5) {
			t.Errorf("%d duplicates counted, %d sent", *a.Duplicates, extra)
		}
	})
	t.Run("duplicates and loss", func(t *testing.T) {
		command(t, "fault", "1", "duplicate", "20%", "loss", "5%")
		run := l.usableTo(t, 2, limited(2000))
		a := run.Arrivals
		t.Logf("%+v: %d duplicates, %d reordered", *a, *a.Duplicates, *a.Reordered)
		if a.Received > a.Sent || *run.LossRatio <= 0 || *run.LossRatio > 0.1 || *a.Duplicates == 0 {
			t.Errorf("%d of %d received, %d duplicates, loss ratio %g", a.Received, a.Sent, *a.Duplicates, *run.LossRatio)
		}
	})
	t.Run("reordered", func(t *testing.T) {
		command(t, "fault", "1", "delay", "5ms", "reorder", "10%")
		run := l.usableTo(t, 2, limited(2000))
		a := run.Arrivals
		t.Logf("%+v: %d duplicates, %d reordered", *a, *a.Duplicates, *a.Reordered)
		if a.Received != a.Sent || *a.Duplicates != 0 || *a.Reordered == 0 || *a.Reordered >= a.Sent {
			t.Errorf("%d of %d received, %d duplicates, %d reordered", a.Received, a.Sent, *a.Duplicates, *a.Reordered)
		}
	})
	t.Run("pings twice", func(t *testing.T) {
		command(t, "fault", "1", "duplicate", "10%")
		run := l.usableTo(t, 2, probe.Spec{Kind: probe.Ping, Iterations: 500, Gap: time.Millisecond})
		p := run.Ping
		t.Logf("%+v", *p)
		if p.Lost != 0 || p.Sent != 500 || p.Answered+p.Invalid != 500 || p.Why.Duplicates == 0 {
			t.Errorf("ping %+v", *p)
		}
	})
}

// TestLossEnds has 5 % of what both nodes send lost: whatever nobody acknowledges must end all the same, and count.
func TestLossEnds(t *testing.T) {
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	l := localNode(t, 1)
	l.reaches(t, 2)
	for _, n := range []string{"1", "2"} {
		command(t, "fault", n, "loss", "5%")
		defer command(t, "fault", n, "clear")
	}
	for _, kind := range []probe.Kind{probe.Latency, probe.Bandwidth} {
		for _, c := range []struct {
			transport verbs.Transport
			op        verbs.Op
		}{{verbs.UC, verbs.Write}, {verbs.UC, verbs.WriteImm}, {verbs.UC, verbs.Send}, {verbs.UD, verbs.Send}} {
			t.Run(fmt.Sprintf("%s of %s %s", kind, c.transport, c.op), func(t *testing.T) {
				s := probe.Spec{Kind: kind, Transport: c.transport, Op: c.op, Sizes: []int{64}, Iterations: 150, Deadline: 60 * time.Second}
				if kind == probe.Bandwidth {
					s.Iterations, s.RateLimit, s.TxDepth, s.RxDepth, s.CQMod = 2000, 64*4000, 16, 2048, 1 // with a receive for each
				}
				r := l.to(t, 2, s)
				if !r.Usable() {
					t.Fatal(describe(*r))
				}
				run := r.Runs[0]
				if kind == probe.Bandwidth && c.op == verbs.Write { // nobody sees what arrives
					if run.LossRatio != nil || run.Iterations != 2000 {
						t.Errorf("%+v", run)
					}
					return
				}
				a := run.Arrivals
				if a == nil || run.LossRatio == nil {
					t.Fatalf("nothing is counted: %+v", run)
				}
				t.Logf("%d of %d in %.2f s, whole %.2f s", a.Received, a.Sent, run.Seconds, r.Duration)
				share := 0.05
				if kind == probe.Latency { // there and back
					share = 1 - 0.95*0.95
					if a.Sent != 150 || a.Received != run.Iterations || uint64(run.Latency.Samples) != a.Received {
						t.Errorf("%d sent, %d received, %d iterations, %d samples", a.Sent, a.Received, run.Iterations, run.Latency.Samples)
					}
				} else if a.Sent < 2000 {
					t.Errorf("%d sent", a.Sent)
				}
				if *run.LossRatio < share/4 || *run.LossRatio > share*2.5 {
					t.Errorf("loss ratio %g, where %g is set", *run.LossRatio, share)
				}
			})
		}
	}
}
