package probe

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

func pingSpec() Spec { return Spec{Name: "p", Kind: Ping, Gap: time.Millisecond} }

// checkPing checks what must hold of every run of pings.
func checkPing(t *testing.T, run Run, sent int) {
	t.Helper()
	s := run.Ping
	if s == nil || s.Sent != sent || s.Sent != s.Answered+s.Lost+s.Invalid || s.Stamps != SoftwareStamps {
		t.Fatalf("size %d: %+v", run.Size, s)
	}
	if w := s.Why; s.Invalid != w.Late+w.Stamps+w.OwnDelay+w.PeerBusy {
		t.Errorf("size %d: %d invalid ones by %+v", run.Size, s.Invalid, w)
	}
	if run.LossRatio == nil || *run.LossRatio != float64(s.Lost)/float64(s.Sent) {
		t.Errorf("size %d: loss ratio %v of %d in %d", run.Size, run.LossRatio, s.Lost, s.Sent)
	}
	if (run.Latency != nil) != (s.Answered > 0) {
		t.Fatalf("size %d: %d samples, latency %+v", run.Size, s.Answered, run.Latency)
	}
	if l := run.Latency; l != nil {
		if l.Measure != RTT || l.Samples != int64(s.Answered) || l.Min <= 0 || l.P50 != nil && (*l.P50 < l.Min || *l.P50 > l.Max) || l.Mean < l.Min || l.Mean > l.Max {
			t.Errorf("size %d: %+v", run.Size, l)
		}
		if run.Histogram.TotalCount() != l.Samples || s.Own == nil || s.Peer == nil || s.Peer.Max <= 0 || s.Peer.Mean > s.Peer.Max {
			t.Errorf("size %d: histogram of %d, own delay %+v, the responder's %+v", run.Size, run.Histogram.TotalCount(), s.Own, s.Peer)
		}
	}
}

func TestPingsOfEverySize(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	for _, way := range []struct{ from, to *host }{{a, b}, {b, a}, {a, b}} {
		spec := pingSpec()
		spec.Sizes, spec.Iterations = []int{verbs.PingHeader, 65, 1024, verbs.PingMaxSize}, 50
		r := way.from.probe(t.Context(), spec, way.to.target())
		wantUsable(t, r)
		checkJSON(t, r)
		if len(r.Runs) != len(spec.Sizes) {
			t.Fatalf("%d runs", len(r.Runs))
		}
		for n, run := range r.Runs {
			checkPing(t, run, 50)
			if run.Size != spec.Sizes[n] || run.Ping.Lost != 0 {
				t.Errorf("size %d: %+v", run.Size, run.Ping)
			}
		}
		if r.Transport != verbs.UD || r.Op != verbs.Send || *r.PeerDev != simDevice || *r.PeerPort != 1 || *r.MTU != 4096 || r.GIDIndex == nil || r.Rail == "" || r.Path != "same_rack" {
			t.Errorf("%+v", r)
		}
	}
}

// A run of pings may take longer than the peer's lease: it must not be forgotten in the middle.
func TestPingsOutlastTheLease(t *testing.T) {
	limits := roomy
	limits.Lease = time.Second
	a, b := newHost(t, "a", roomy), newHost(t, "b", limits)
	spec := pingSpec()
	spec.Iterations, spec.Gap = 250, 10*time.Millisecond
	r := a.probe(t.Context(), spec, b.target())
	wantUsable(t, r)
	checkPing(t, r.Runs[0], 250)
	if lost := r.Runs[0].Ping.Lost; lost != 0 {
		t.Errorf("%d of 250 pings are lost", lost)
	}
}

// countPings counts the announcements that reach a responder.
type countPings struct {
	control.Service
	n atomic.Int64
}

func (c *countPings) Ping(ctx context.Context, r *control.PingRequest) (*control.PingReply, error) {
	c.n.Add(1)
	return c.Service.Ping(ctx, r)
}

// A peer is told once of this end, and then only asked by datagrams. All probes of all peers share one queue pair.
func TestPingsNeedNoControlChannel(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	count := &countPings{Service: b.responder}
	b.service = count
	var qpn uint32
	for n := range 10 {
		r := a.probe(t.Context(), pingSpec(), b.target())
		wantUsable(t, r)
		p, f := a.Node.pinger(simDevice, 1)
		if f != nil {
			t.Fatal(f)
		}
		if n > 0 && p.echo.QPN() != qpn {
			t.Errorf("queue pair %d after %d", p.echo.QPN(), qpn)
		}
		qpn = p.echo.QPN()
	}
	if n := count.n.Load(); n != 1 {
		t.Errorf("%d announcements", n)
	}
}

// Dozens of peers asked at a time share the port: on a software device each probe would otherwise wait for all others.
func TestPingsShareThePort(t *testing.T) {
	a := newHost(t, "a", roomy)
	var wg sync.WaitGroup
	results := make([]*Result, 12)
	for n := range results {
		b := newHost(t, fmt.Sprintf("b%d", n), roomy)
		wg.Go(func() { results[n] = a.probe(t.Context(), pingSpec(), b.target()) })
	}
	wg.Wait()
	for _, r := range results {
		wantUsable(t, r)
		checkPing(t, r.Runs[0], defaultPings)
	}
}

func TestPingsWaitForTheGate(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	release, ok := a.Gate.TryAcquire(simDevice+"/1", true)
	if !ok {
		t.Fatal("the port is held")
	}
	spec := pingSpec()
	spec.Wait = 50 * time.Millisecond
	r := a.probe(t.Context(), spec, b.target())
	wantFailure(t, r, Skipped, StageAdmit, BusyPort, ScopeLocal)
	release()
	wantUsable(t, a.probe(t.Context(), pingSpec(), b.target()))
}

func TestPingsDuringAHeavyProbeOfThePeer(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	b.busy(simDevice+"/1", 1) // before there is a pinger
	r := a.probe(t.Context(), pingSpec(), b.target())
	wantFailure(t, r, Skipped, StageRun, BusyPort, ScopePeer)
	checkPing(t, r.Runs[0], defaultPings)
	b.busy(simDevice+"/1", -1)
	wantUsable(t, a.probe(t.Context(), pingSpec(), b.target()))

	release, err := b.acquire(t.Context(), &LocalPort{Device: simDevice, Port: 1}, true, time.Now().Add(time.Second))
	if err != nil {
		t.Fatal(err)
	}
	wantFailure(t, a.probe(t.Context(), pingSpec(), b.target()), Skipped, StageRun, BusyPort, ScopePeer)
	release()
	wantUsable(t, a.probe(t.Context(), pingSpec(), b.target()))
}

func TestPingOfItself(t *testing.T) {
	a := newHost(t, "a", roomy)
	wantFailure(t, a.probe(t.Context(), pingSpec(), a.target()), Skipped, StageAdmit, Self, ScopePeer)
}

func TestPingCancelled(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	ctx, cancel := context.WithCancel(t.Context())
	spec := pingSpec()
	spec.Iterations, spec.Gap = 1000, 100*time.Millisecond
	time.AfterFunc(300*time.Millisecond, cancel)
	r := a.probe(ctx, spec, b.target())
	if r.Outcome != Skipped || *r.Reason != Cancelled || r.Duration > 5 {
		t.Errorf("%s after %g s", describe(r), r.Duration)
	}
	wantUsable(t, a.probe(t.Context(), pingSpec(), b.target()))
}

// An initiator that has not been heard of for its lease is answered no more.
func TestPingsEndWithTheLease(t *testing.T) {
	limits := roomy
	limits.Lease = 200 * time.Millisecond
	a, b := newHost(t, "a", roomy), newHost(t, "b", limits)
	wantUsable(t, a.probe(t.Context(), pingSpec(), b.target()))
	p, f := b.Node.pinger(simDevice, 1)
	if f != nil {
		t.Fatal(f)
	}
	eventually(t, "the announcement is forgotten", func() bool {
		p.answering.Lock()
		defer p.answering.Unlock()
		return len(p.answers) == 0
	})
	own, f := a.Node.pinger(simDevice, 1)
	if f != nil {
		t.Fatal(f)
	}
	var known *asked
	for _, known = range own.asks {
	}
	got, err := own.echo.Ping(t.Context(), verbs.PingSpec{Peer: known.peer, Size: 64, Count: 5, Timeout: 50 * time.Millisecond, Deadline: time.Second})
	if err != nil || got.Lost != 5 {
		t.Errorf("%+v, %v", got, err)
	}
	if n := p.echo.Totals().Strangers; n != 5 {
		t.Errorf("%d questions of strangers", n)
	}
	wantUsable(t, a.probe(t.Context(), pingSpec(), b.target())) // announces itself again
}

func TestPingCountsLoss(t *testing.T) {
	b := newHost(t, "b", roomy)
	spec := pingSpec()
	spec.Iterations = 200
	p := spawnProbe(t, b.target(), spec, "VERBSIM_DROP_EVERY=5") // of the initiator's datagrams
	r := p.result(t)
	wantUsable(t, r)
	run := r.Runs[0]
	if run.Ping.Sent != 200 || run.Ping.Lost != 40 || *run.LossRatio != 0.2 {
		t.Errorf("%+v, loss ratio %v", run.Ping, *run.LossRatio)
	}
}

// A peer that was started anew has another queue pair; the very next probe finds it.
func TestPingHealsAfterARestart(t *testing.T) {
	a := newHost(t, "a", roomy)
	p := spawnResponder(t, "127.0.0.1:0")
	to := p.target()
	wantUsable(t, a.probe(t.Context(), pingSpec(), to))
	// A verbsim process that is killed while it posts its last answer leaves a lock held in its slot's name; the next process in
	// that slot takes the lock for its own and waits for ever. Let it come to rest.
	time.Sleep(300 * time.Millisecond)
	p.kill()
	r := a.probe(t.Context(), pingSpec(), to)
	wantFailure(t, r, Failed, StageRun, PeerUnresponsive, ScopePeer)
	checkPing(t, r.Runs[0], defaultPings)
	if *r.Runs[0].LossRatio != 1 {
		t.Errorf("loss ratio %v of a dead peer", *r.Runs[0].LossRatio)
	}
	p = spawnResponder(t, p.addr)
	r = a.probe(t.Context(), pingSpec(), to)
	wantUsable(t, r)
	checkPing(t, r.Runs[0], defaultPings)
	if len(r.Runs) != 1 || r.Runs[0].Ping.Lost != 0 {
		t.Errorf("%d runs, %d lost: what the old queue pair did not answer counts", len(r.Runs), r.Runs[0].Ping.Lost)
	}
}

// A peer whose process is stuck ends the probe in bounded time.
func TestPingOfAFrozenPeer(t *testing.T) {
	a := newHost(t, "a", roomy)
	p := spawnResponder(t, "127.0.0.1:0")
	wantUsable(t, a.probe(t.Context(), pingSpec(), p.target()))
	p.signal(t, syscall.SIGSTOP)
	eventually(t, "every thread of it has stopped", func() bool {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.Process.Pid))
		return !slices.ContainsFunc(threads, func(name string) bool {
			stat, err := os.ReadFile(name)
			return err == nil && !strings.Contains(string(stat), ") T ")
		})
	})
	r := a.probe(t.Context(), pingSpec(), p.target())
	if r.Outcome != Failed || *r.Stage != StageRun || *r.Scope != ScopePeer || r.Duration > 20 {
		t.Errorf("%s after %g s", describe(r), r.Duration)
	}
	p.signal(t, syscall.SIGCONT)
	eventually(t, "it answers again", func() bool { return a.probe(t.Context(), pingSpec(), p.target()).Usable() })
}

// Pings vanish though the peer is there and says so.
func TestPingsThatVanish(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	wantUsable(t, a.probe(t.Context(), pingSpec(), b.target()))
	p, f := b.Node.pinger(simDevice, 1)
	if f != nil {
		t.Fatal(f)
	}
	p.answering.Lock()
	for _, x := range p.answers {
		p.echo.Remove(x.peer) // and nobody knows
	}
	p.answering.Unlock()
	r := a.probe(t.Context(), pingSpec(), b.target())
	wantFailure(t, r, Failed, StageRun, Timeout, ScopePath)
	checkPing(t, r.Runs[0], defaultPings)
}

// Nothing of a session's call is done for a ping.
func TestPingIsNoSession(t *testing.T) {
	b := newHost(t, "b", roomy)
	req := &control.OpenRequest{Kind: string(Ping), Transport: "ud", Op: "send", MaxMsg: 64, Endpoint: control.Endpoint{QPs: []control.QP{{QPN: 2}}}}
	if _, err := b.responder.Open(t.Context(), req); err == nil {
		t.Error("a session was opened")
	}
}

func TestPingSpec(t *testing.T) {
	for name, spoil := range map[string]func(*Spec){
		"rc":                     func(s *Spec) { s.Transport = verbs.RC },
		"write":                  func(s *Spec) { s.Op = verbs.Write },
		"by duration":            func(s *Spec) { s.Duration = time.Second },
		"a flood":                func(s *Spec) { s.Gap = time.Microsecond },
		"too many":               func(s *Spec) { s.Iterations = maxPings + 1; s.Deadline = time.Hour },
		"too long for its bound": func(s *Spec) { s.Iterations, s.Gap, s.Deadline = 100, time.Second, time.Minute },
		"less than a header":     func(s *Spec) { s.Sizes = []int{8} },
		"more than an MTU":       func(s *Spec) { s.Sizes = []int{64, 4097} },
		"a level too high":       func(s *Spec) { s.ServiceLevel = 16 },
	} {
		s := pingSpec().WithDefaults()
		spoil(&s)
		if s.Validate() == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	s := pingSpec().WithDefaults()
	if err := s.Validate(); err != nil {
		t.Error(err)
	}
	if s.Heavy() {
		t.Error("it takes the port for itself")
	}
	if again := s.WithDefaults(); fmt.Sprint(again) != fmt.Sprint(s) {
		t.Errorf("defaults of defaults: %+v", again)
	}
}

func TestRTTStats(t *testing.T) {
	var samples []verbs.PingSample
	for n := range 1000 {
		samples = append(samples, verbs.PingSample{RTT: time.Duration(1000-n) * time.Microsecond})
	}
	s, h := rttStats(samples)
	if s.Measure != RTT || s.Min != 1e-6 || s.Max != 1e-3 || *s.P50 != 500e-6 || *s.P90 != 900e-6 || *s.P99 != 990e-6 || *s.P999 != 999e-6 {
		t.Errorf("%+v", s)
	}
	if h.TotalCount() != 1000 {
		t.Errorf("%d of the samples are in the histogram", h.TotalCount())
	}
	if s, _ = rttStats(samples[:10]); s.P50 == nil || s.P90 == nil || s.P99 != nil || s.P999 != nil {
		t.Errorf("quantiles that 10 samples can't carry: %+v", s)
	}
	if s, h = rttStats(samples[:1]); s.Min != s.Max || s.Mean != s.Min || s.Stddev != 0 || s.P50 != nil || h.TotalCount() != 1 {
		t.Errorf("of one: %+v", s)
	}
}
