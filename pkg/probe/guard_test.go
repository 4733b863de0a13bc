package probe

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// keeper is a guard that a test sets.
type keeper struct {
	limit float64
	abort bool

	mu     sync.Mutex
	no     *Refusal
	asked  []Use
	booked []uint64
}

func (k *keeper) Begin(_ context.Context, u Use) (func(uint64), *Refusal) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.asked = append(k.asked, u)
	if k.no != nil {
		return nil, k.no
	}
	return func(n uint64) {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.booked = append(k.booked, n)
	}, nil
}

func (k *keeper) Traffic() (float64, bool) { return k.limit, k.abort }

// busyMeter is a port on which others send at a rate, bytes per second; none at first.
type busyMeter struct {
	rate  atomic.Int64
	blind bool
}

func (m *busyMeter) Start(context.Context, string, int) func(context.Context) *EndEvidence {
	last, total := time.Now(), 0.0
	return func(context.Context) *EndEvidence {
		if m.blind {
			return nil
		}
		total += time.Since(last).Seconds() * float64(m.rate.Load())
		last = time.Now()
		return &EndEvidence{
			Counters: map[string]uint64{}, Classes: map[string]uint64{}, Moved: map[string][]string{}, Traffic: map[string]uint64{counters.TxBytes: 0, counters.RxBytes: uint64(total)},
		}
	}
}

const lots = 40_000_000_000 // bytes per second: above any limit on the simulated device

// What a guard refuses at either end is skipped with its word, and light probes don't ask.
func TestGuardRefuses(t *testing.T) {
	for _, tt := range []struct {
		reason Reason
		atPeer bool
	}{{Blackout, false}, {Blackout, true}, {Budget, false}, {Budget, true}, {GuardCommand, false}, {GuardCommand, true}, {BusyPort, false}, {BusyPort, true}} {
		t.Run(fmt.Sprintf("%s, at the peer: %t", tt.reason, tt.atPeer), func(t *testing.T) {
			a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
			k, scope := &keeper{no: &Refusal{Reason: tt.reason, Detail: "because"}}, ScopeLocal
			if a.Node.Guard = k; tt.atPeer {
				a.Node.Guard, b.Node.Guard, scope = nil, k, ScopePeer
			}
			spec := Spec{Name: "bw", Kind: Bandwidth, Op: verbs.Write, Iterations: 10, Wait: 2 * time.Second}
			r := a.probe(t.Context(), spec, b.target())
			if r.Outcome != Skipped || *r.Stage != StageAdmit || *r.Reason != tt.reason || *r.Scope != scope {
				t.Errorf("got %s", describe(r))
			}
			spec.Kind = Latency
			if r := a.probe(t.Context(), spec, b.target()); !r.Usable() {
				t.Errorf("a light probe: %s", describe(r))
			}
		})
	}
}

// What is passing is asked again, until the probe's patience is over.
func TestGuardPasses(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	k := &keeper{no: &Refusal{Reason: Budget, Detail: "others run", Passing: true}}
	b.Node.Guard = k
	time.AfterFunc(500*time.Millisecond, func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.no = nil
	})
	r := a.probe(t.Context(), Spec{Name: "bw", Kind: Bandwidth, Op: verbs.Write, Iterations: 10, Wait: 20 * time.Second}, b.target())
	if !r.Usable() || r.Waited == 0 {
		t.Errorf("waited %g s: %s", r.Waited, describe(r))
	}
}

// Both ends book the bytes of heavy probes, warm-up included, whoever sent them.
func TestGuardBooks(t *testing.T) {
	for name, spec := range map[string]Spec{
		"write":         {Op: verbs.Write},
		"read":          {Op: verbs.Read},
		"send":          {Op: verbs.Send},
		"bidirectional": {Op: verbs.Write, Bidirectional: true},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
			ka, kb := &keeper{}, &keeper{}
			a.Node.Guard, b.Node.Guard = ka, kb
			spec.Name, spec.Kind, spec.Sizes, spec.Iterations, spec.Warmup = "bw", Bandwidth, []int{1000, 3000}, 100, 20
			if r := a.probe(t.Context(), spec, b.target()); !r.Usable() {
				t.Fatal(describe(r))
			}
			a.stop()
			b.stop()
			const one = 120 * (1000 + 3000)
			for side, k := range map[string]*keeper{"initiator": ka, "responder": kb} {
				if len(k.booked) != 1 || k.booked[0] < one || !spec.Bidirectional && k.booked[0] != one || spec.Bidirectional && k.booked[0] < one*3/2 {
					t.Errorf("the %s booked %v, want about %d once", side, k.booked, one)
				}
			}
			if len(ka.asked) != 1 || ka.asked[0].Bytes != one || ka.asked[0].Port == "" {
				t.Errorf("the initiator expected %+v, want %d bytes", ka.asked, one)
			}
		})
	}
}

// A port that others use is left alone before a heavy probe begins, at either end. What can't be told refuses nothing.
func TestForeignTrafficBefore(t *testing.T) {
	for _, tt := range []struct {
		name                 string
		atPeer, blind, quiet bool
	}{{name: "here"}, {name: "at the peer", atPeer: true}, {name: "no counters", blind: true}, {name: "quiet", quiet: true}} {
		t.Run(tt.name, func(t *testing.T) {
			a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
			m := &busyMeter{blind: tt.blind}
			if !tt.quiet {
				m.rate.Store(lots)
			}
			n, scope := a.Node, ScopeLocal
			if tt.atPeer {
				n, scope = b.Node, ScopePeer
			}
			n.Guard, n.Meter = &keeper{limit: 0.05}, m
			r := a.probe(t.Context(), Spec{Name: "bw", Kind: Bandwidth, Op: verbs.Write, Iterations: 10, Wait: 2 * time.Second}, b.target())
			if tt.blind || tt.quiet {
				if !r.Usable() {
					t.Errorf("got %s", describe(r))
				}
				return
			}
			if r.Outcome != Skipped || *r.Stage != StageAdmit || *r.Reason != ForeignTraffic || *r.Scope != scope {
				t.Errorf("got %s", describe(r))
			}
		})
	}
}

// Traffic that begins during a heavy probe ends it, if that is wanted. The session's own never does.
func TestForeignTrafficDuring(t *testing.T) {
	for _, abort := range []bool{true, false} {
		t.Run(fmt.Sprintf("abort: %t", abort), func(t *testing.T) {
			a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
			m := &busyMeter{}
			a.Node.Guard, a.Node.Meter = &keeper{limit: 0.05, abort: abort}, m
			spec := long(Bandwidth, verbs.Write)
			if !abort {
				spec.Duration = time.Second
			}
			done := a.start(t, t.Context(), spec, b.target())
			m.rate.Store(lots)
			began := time.Now()
			r := wait(t, done)
			if !abort {
				if !r.Usable() {
					t.Errorf("got %s", describe(r))
				}
				return
			}
			if r.Outcome != Skipped || *r.Stage != StageRun || *r.Reason != ForeignTraffic || *r.Scope != ScopeLocal {
				t.Errorf("got %s", describe(r))
			}
			if took := time.Since(began); took > 5*time.Second { // 0.2 s on a machine that is not shared
				t.Errorf("took %s", took)
			}
		})
	}
}

// A paused node begins nothing, and says why to those who ask.
func TestPaused(t *testing.T) {
	for _, kind := range []Kind{Latency, Bandwidth, Ping} {
		a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
		spec := Spec{Name: "x", Kind: kind, Op: verbs.Write, Iterations: 10}
		if kind == Ping {
			spec.Op = ""
		}
		b.Node.LameDuck = func() string { return "paused" }
		for from, to := range map[*host]*host{a: b, b: a} {
			want := ScopeLocal
			if from == a {
				want = ScopePeer
			}
			if r := from.probe(t.Context(), spec, to.target()); r.Outcome != Skipped || r.Reason == nil || *r.Reason != Paused || *r.Scope != want {
				t.Errorf("%s with scope %s: got %s", kind, want, describe(r))
			}
		}
	}
}
