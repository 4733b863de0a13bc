package probe

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

var (
	loopback = netip.MustParseAddr("127.0.0.1") // of the simulated device
	ula      = netip.MustParseAddr("fd00::1")   // of nobody
)

// long is a probe that lasts until something ends it.
func long(kind Kind, op verbs.Op) Spec {
	return Spec{Name: "long", Kind: kind, Op: op, Duration: 30 * time.Second, Deadline: 40 * time.Second}
}

// start runs a probe in the background and returns once its timed part is under way.
func (h *host) start(t *testing.T, ctx context.Context, spec Spec, to Target) <-chan *Result {
	t.Helper()
	under := make(chan struct{})
	var once sync.Once
	h.OnProgress = func(p Progress) {
		if p.Done > 0 {
			once.Do(func() { close(under) })
		}
	}
	done := make(chan *Result, 1)
	go func() { done <- h.probe(ctx, spec, to) }()
	select {
	case <-under:
	case r := <-done:
		t.Fatalf("ended at once: %s", describe(r))
	case <-time.After(20 * time.Second):
		t.Fatal("never began")
	}
	return done
}

// wait returns a result that must come.
func wait(t *testing.T, done <-chan *Result) *Result {
	t.Helper()
	select {
	case r := <-done:
		return r
	case <-time.After(30 * time.Second):
		t.Fatal("never ended")
	}
	return nil
}

// Ctrl-C, a reload, the end of the daemon: within a second nothing is left, at either end.
func TestCancel(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	for _, kind := range []Kind{Latency, Bandwidth} {
		for _, op := range []verbs.Op{verbs.Write, verbs.Read, verbs.Send} {
			t.Run(fmt.Sprintf("%s of %s", kind, op), func(t *testing.T) {
				ctx, cancel := context.WithCancelCause(t.Context())
				done := a.start(t, ctx, long(kind, op), b.target())
				began := time.Now()
				cancel(errors.New("the operator changed her mind"))
				r := wait(t, done)
				if took := time.Since(began); took > 2*time.Second { // one for a busy machine
					t.Errorf("took %s", took)
				}
				wantFailure(t, r, Skipped, StageRun, Cancelled, ScopeLocal)
				if !strings.Contains(*r.Detail, "changed her mind") {
					t.Errorf("detail %q does not say why", *r.Detail)
				}
				if len(r.Runs) > 0 {
					t.Errorf("figures of a run that was cancelled: %+v", r.Runs)
				}
				a.checkEmpty(t)
				b.checkEmpty(t)
			})
		}
	}
}

func TestCancelBeforeItBegins(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if r := a.probe(ctx, Spec{}, b.target()); r.Outcome != Skipped || *r.Reason != Cancelled {
		t.Error(describe(r))
	}
	b.checkEmpty(t)
}

// The probe's own deadline ends it even if everything works.
func TestDeadline(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	for _, op := range []verbs.Op{verbs.Write, verbs.Read, verbs.Send} {
		r := a.probe(t.Context(), Spec{Op: op, Iterations: 1 << 40, Deadline: 500 * time.Millisecond}, b.target())
		wantFailure(t, r, Failed, StageRun, Timeout, ScopePath)
		a.checkEmpty(t)
		b.checkEmpty(t)
	}
}

// An initiator that dies leaves nothing on the responder, and keeps nobody out for longer than its lease.
func TestInitiatorDies(t *testing.T) {
	l := roomy
	l.Lease = time.Second
	a, b := newHost(t, "a", roomy), newHost(t, "b", l)
	for _, op := range []verbs.Op{verbs.Write, verbs.Read, verbs.Send} {
		t.Run(string(op), func(t *testing.T) {
			dying := spawnProbe(t, b.target(), long(Latency, op))
			eventually(t, "the session is open", func() bool { return b.responder.Sessions() == 1 })
			time.Sleep(3 * l.Lease / 2) // it is renewed
			if b.responder.Sessions() != 1 {
				t.Fatal("the session ended while its initiator lived")
			}
			dying.kill()
			eventually(t, "the session is gone", func() bool { return b.responder.Sessions() == 0 })
			b.checkEmpty(t)
			wantUsable(t, a.probe(t.Context(), Spec{Op: op}, b.target()))
		})
	}
}

// A responder that dies is named, and used again as soon as it is back.
func TestResponderDies(t *testing.T) {
	a := newHost(t, "a", roomy)
	outer := t // each responder serves the next case as well
	p := spawnResponder(outer, "127.0.0.1:0")
	for _, spec := range []Spec{long(Latency, verbs.Write), long(Latency, verbs.Read), long(Latency, verbs.Send), long(Bandwidth, verbs.Write)} {
		t.Run(fmt.Sprintf("%s of %s", spec.Kind, spec.Op), func(t *testing.T) {
			done := a.start(t, t.Context(), spec, p.target())
			p.kill()
			wantFailure(t, wait(t, done), Failed, StageRun, PeerUnresponsive, ScopePeer)
			a.checkEmpty(t)
			wantFailure(t, a.probe(t.Context(), Spec{Op: spec.Op}, p.target()), Failed, StageConnect, Refused, ScopePeer)
			p = spawnResponder(outer, p.addr)
			wantUsable(t, a.probe(t.Context(), Spec{Op: spec.Op}, p.target()))
		})
	}
}

// A responder that was stopped answers neither here nor there; when it goes on it is as good as before.
func TestResponderStops(t *testing.T) {
	t.Parallel() // most of it is waiting
	a := newHost(t, "a", roomy)
	p := spawnResponder(t, "127.0.0.1:0")
	done := a.start(t, t.Context(), long(Latency, verbs.Write), p.target())
	p.signal(t, syscall.SIGSTOP)
	wantFailure(t, wait(t, done), Failed, StageRun, PeerUnresponsive, ScopePeer)
	a.checkEmpty(t)
	p.signal(t, syscall.SIGCONT)
	wantUsable(t, a.probe(t.Context(), Spec{Wait: 20 * time.Second}, p.target()))
}

// What only broken hardware does: the provider of the initiator's process makes it up.
func TestDeviceFaults(t *testing.T) {
	b := newHost(t, "b", roomy)
	for _, tt := range []struct {
		name, knob string
		spec       Spec
		check      func(t *testing.T, r *Result)
	}{
		{"completions one by one", "VERBSIM_SHORT_POLL=1", Spec{Kind: Bandwidth, Sizes: []int{64}}, func(t *testing.T, r *Result) { wantUsable(t, r) }},
		{"a full send queue", "VERBSIM_ENOMEM_EVERY=100", Spec{Kind: Bandwidth, Sizes: []int{64}}, func(t *testing.T, r *Result) {
			wantUsable(t, r)
			if got := r.Runs[0].Iterations; got != defaultBandwidthIterations {
				t.Errorf("%d messages", got)
			}
		}},
		{"a dead path", "VERBSIM_ERROR_EVERY=1000", Spec{Kind: Bandwidth}, func(t *testing.T, r *Result) {
			wantFailure(t, r, Failed, StageRun, RetryExceeded, ScopePath)
		}},
		{"a dead path under a ping-pong", "VERBSIM_ERROR_EVERY=500", Spec{Op: verbs.Send}, func(t *testing.T, r *Result) {
			wantFailure(t, r, Failed, StageRun, RetryExceeded, ScopePath)
		}},
		{"a device without RC", "VERBSIM_NO_RC=1", Spec{}, func(t *testing.T, r *Result) {
			wantFailure(t, r, Failed, StageSetup, TransportUnsupported, ScopeLocal)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.check(t, spawnProbe(t, b.target(), tt.spec, tt.knob).result(t))
			eventually(t, "the session is gone", func() bool { return b.responder.Sessions() == 0 })
			b.checkEmpty(t)
		})
	}
}

// Two nodes that want each other at the same moment, again and again: nobody blocks, and everybody gets through.
func TestBothEndsAtOnce(t *testing.T) {
	for _, tt := range []struct {
		name     string
		software bool
		kind     Kind
	}{
		{"a software device, one probe at a time", true, Latency},
		{"light probes share a port", false, Latency},
		{"heavy ones do not", false, Bandwidth},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
			for _, h := range []*host{a, b} {
				h.software = func(string) bool { return tt.software }
			}
			const each = 4
			results := make(chan *Result, 2*each)
			var all sync.WaitGroup
			for range each {
				for _, pair := range [][2]*host{{a, b}, {b, a}} {
					all.Go(func() {
						results <- pair[0].probe(t.Context(), Spec{Kind: tt.kind, Iterations: 50, Wait: 30 * time.Second}, pair[1].target())
					})
				}
			}
			all.Wait()
			close(results)
			for r := range results {
				wantUsable(t, r)
			}
			a.checkEmpty(t)
			b.checkEmpty(t)
		})
	}
}

// A busy port is waited for, and then the probe is skipped: at this end or at the peer's.
func TestBusyPorts(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	for _, h := range []*host{a, b} {
		h.software = func(string) bool { return false }
	}
	const key = simDevice + "/1"
	hold := func(t *testing.T, h *host, exclusive bool) (release func()) {
		t.Helper()
		release, ok := h.Gate.TryAcquire(key, exclusive)
		if !ok {
			t.Fatal("the port is not free")
		}
		return release
	}
	for _, tt := range []struct {
		name      string
		at        *host
		exclusive bool
		kind      Kind
		busy      bool
		scope     Scope
	}{
		{"heavy here, light asked", a, true, Latency, true, ScopeLocal},
		{"heavy here, heavy asked", a, true, Bandwidth, true, ScopeLocal},
		{"light here, heavy asked", a, false, Bandwidth, true, ScopeLocal},
		{"light here, light asked", a, false, Latency, false, ""},
		{"heavy there, light asked", b, true, Latency, true, ScopePeer},
		{"heavy there, heavy asked", b, true, Bandwidth, true, ScopePeer},
		{"light there, heavy asked", b, false, Bandwidth, true, ScopePeer},
		{"light there, light asked", b, false, Latency, false, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			release := hold(t, tt.at, tt.exclusive)
			spec := Spec{Kind: tt.kind, Iterations: 50, Wait: 500 * time.Millisecond}
			r := a.probe(t.Context(), spec, b.target())
			if !tt.busy {
				wantUsable(t, r)
			} else {
				wantFailure(t, r, Skipped, StageAdmit, BusyPort, tt.scope)
			}
			// It is used as soon as it is free.
			var freed sync.WaitGroup
			freed.Go(func() {
				time.Sleep(300 * time.Millisecond)
				release()
			})
			spec.Wait = 20 * time.Second
			r = a.probe(t.Context(), spec, b.target())
			freed.Wait()
			wantUsable(t, r)
			if tt.busy && r.Waited <= 0 {
				t.Errorf("waited %g s for a port that was busy", r.Waited)
			}
		})
	}
	t.Run("cancelled while it waits", func(t *testing.T) {
		for _, at := range []*host{a, b} {
			release := hold(t, at, true)
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			r := a.probe(ctx, Spec{Wait: time.Minute}, b.target())
			cancel()
			release()
			if r.Outcome != Skipped || *r.Reason != Cancelled || *r.Scope != ScopeLocal {
				t.Error(describe(r))
			}
		}
	})
}

// A node that probes another process of its own host, over the one port they share: the probe holds it for both ends.
func TestLoopback(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	b.host, b.Gate = a.host, a.Gate
	for _, software := range []bool{true, false} {
		a.software = func(string) bool { return software }
		b.software = a.software
		for _, kind := range []Kind{Latency, Bandwidth} {
			r := a.probe(t.Context(), Spec{Kind: kind, Iterations: 50, Wait: 500 * time.Millisecond}, b.target())
			wantUsable(t, r)
			if r.Path != "same_node" {
				t.Errorf("path %s", r.Path)
			}
		}
	}
	// Hosts that can't tell who they are share nothing.
	a.host, b.host = "", ""
	b.Gate = schedule.NewGate(schedule.GateOptions{})
	r := a.probe(t.Context(), Spec{}, b.target())
	wantUsable(t, r)
	if r.Path != "same_rack" {
		t.Errorf("path %s", r.Path)
	}
}

// The responder's limits decide, whatever is asked for.
func TestLimits(t *testing.T) {
	for _, tt := range []struct {
		name    string
		limits  Limits
		spec    Spec
		outcome Outcome
		reason  Reason
	}{
		{"message too large", Limits{Sessions: 1, Memory: 1 << 30, Message: 4096, Lease: time.Minute}, Spec{Sizes: []int{8, 4097}}, Failed, ResourceLimit},
		{"message that just fits", Limits{Sessions: 1, Memory: 1 << 30, Message: 4096, Lease: time.Minute}, Spec{Sizes: []int{4096}}, OK, ""},
		{"too much memory for one", Limits{Sessions: 1, Memory: 1 << 20, Message: 1 << 30, Lease: time.Minute}, Spec{Sizes: []int{1 << 20}}, Failed, ResourceLimit},
		{"small messages on many QPs", Limits{Sessions: 1, Memory: 1 << 20, Message: 1 << 30, Lease: time.Minute}, Spec{Kind: Bandwidth, Sizes: []int{8}, QPs: 256}, Failed, ResourceLimit},
		{"deep queues", Limits{Sessions: 1, Memory: 1 << 20, Message: 1 << 30, Lease: time.Minute}, Spec{Kind: Bandwidth, Op: verbs.Send, Sizes: []int{8}, RxDepth: 1 << 15}, Failed, ResourceLimit},
		{"no sessions", Limits{Sessions: 0, Memory: 1 << 30, Message: 1 << 30, Lease: time.Minute}, Spec{}, Skipped, BusyPort},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, b := newHost(t, "a", roomy), newHost(t, "b", tt.limits)
			tt.spec.Wait, tt.spec.Iterations = 100*time.Millisecond, 100
			r := a.probe(t.Context(), tt.spec, b.target())
			if tt.outcome == OK {
				wantUsable(t, r)
				return
			}
			wantFailure(t, r, tt.outcome, StageAdmit, tt.reason, ScopePeer)
			if !strings.Contains(*r.Detail, "limits.") {
				t.Errorf("detail %q does not name the setting", *r.Detail)
			}
		})
	}
	t.Run("they change under it", func(t *testing.T) {
		a, b := newHost(t, "a", roomy), newHost(t, "b", Limits{})
		b.responder.SetLimits(roomy)
		wantUsable(t, a.probe(t.Context(), Spec{}, b.target()))
	})
}

// Many sessions at once: each takes its place and its memory, and gives both back.
func TestSessionsAreCounted(t *testing.T) {
	b := newHost(t, "b", Limits{Sessions: 3, Memory: 5 << 20, Message: 1 << 20, Lease: time.Minute})
	b.software = func(string) bool { return false }
	open := func(maxMsg int) (string, error) {
		req := request()
		req.MaxMsg, req.Endpoint.Stride = maxMsg, uint64(maxMsg)
		_, err := b.responder.Open(t.Context(), req)
		return req.ID, err
	}
	wantBusy := func(what string, err error) {
		t.Helper()
		var e *control.Error
		if !errors.As(err, &e) || e.Reason != string(Busy) || e.RetryAfter <= 0 {
			t.Errorf("%s: %v, want busy with a hint when to ask again", what, err)
		}
	}
	first, err := open(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	second, err := open(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	_, err = open(1 << 20)
	wantBusy("memory", err)
	third, err := open(8)
	if err != nil {
		t.Fatal(err)
	}
	_, err = open(8)
	wantBusy("sessions", err)
	for _, id := range []string{first, first, second, third, "unknown"} { // twice is no error
		if err := b.responder.Close(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
	b.checkEmpty(t)
	if _, err := open(1 << 20); err != nil {
		t.Error(err)
	}
	b.responder.Shutdown()
	_, err = open(8)
	wantBusy("shut down", err)
}

// request is what an initiator asks for that this process does not have: its QPs lead nowhere.
func request() *control.OpenRequest {
	return &control.OpenRequest{
		ID: newID(), Instance: "another", Node: "a", Probe: "p", Kind: string(Latency), Transport: string(verbs.RC), Op: string(verbs.Read), MaxMsg: 4096,
		Deadline: 30, Lease: 10, Timeout: 14, Retries: 6, RNRRetry: 7, GIDs: []control.GID{{Addr: loopback, Type: "RoCE v2"}},
		Endpoint: control.Endpoint{LinkLayer: string(verbs.Ethernet), QPs: []control.QP{{QPN: 17, PSN: 1}}, Addr: 1 << 40, Stride: 8192, ActiveMTU: 4096, RDAtom: 1, DestRDAtom: 1},
	}
}

// A session is opened for a largest size; a run must not slip one past that the op, or what verifies it, can't carry.
func TestRunOfASizeThatCantBe(t *testing.T) {
	r := newHost(t, "b", roomy).responder
	for name, set := range map[string]func(*control.OpenRequest){
		"verify":    func(req *control.OpenRequest) { req.Op, req.Shape.Verify = string(verbs.Send), true },
		"fetch-add": func(req *control.OpenRequest) { req.Op, req.MaxMsg = string(verbs.FetchAdd), 8 },
	} {
		t.Run(name, func(t *testing.T) {
			req := request()
			set(req)
			if _, err := r.Open(t.Context(), req); err != nil {
				t.Fatal(err)
			}
			defer r.Close(t.Context(), req.ID)
			err := r.Run(t.Context(), req.ID, &control.RunRequest{Size: 3})
			if e, ok := errors.AsType[*control.Error](err); !ok || e.Reason != string(BadHandshake) {
				t.Errorf("a run of 3 bytes: %v", err)
			}
			if err := r.Run(t.Context(), req.ID, &control.RunRequest{Size: 8}); err != nil {
				t.Errorf("a run of 8 bytes after it: %s", err)
			}
		})
	}
}

// A rate at which the initiator's few messages fit its deadline must not be judged by a responder that doesn't know how many there are.
func TestResponderTakesALowRate(t *testing.T) {
	r := newHost(t, "b", roomy).responder
	req := request()
	req.Kind, req.Op, req.Shape.Rate = string(Bandwidth), string(verbs.Send), 8
	if _, err := r.Open(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(t.Context(), req.ID); err != nil {
		t.Error(err)
	}
}

// Calls that fit no session, or not at this moment, change nothing.
func TestCallsOutOfPlace(t *testing.T) {
	b := newHost(t, "b", roomy)
	r := b.responder
	reasonOf := func(err error) Reason {
		var e *control.Error
		if !errors.As(err, &e) {
			return Reason(fmt.Sprintf("%v (%T)", err, err))
		}
		return Reason(e.Reason)
	}
	finish := func(id string) error { _, err := r.Finish(t.Context(), id, &control.FinishRequest{}); return err }
	mark := func(id string) error { _, err := r.Mark(t.Context(), id); return err }
	all := func(id string) map[string]error {
		return map[string]error{
			"run": r.Run(t.Context(), id, &control.RunRequest{Size: 8}), "mark": mark(id), "finish": finish(id), "renew": r.Renew(t.Context(), id),
		}
	}
	for call, err := range all("0f") {
		if reasonOf(err) != PeerUnresponsive {
			t.Errorf("%s of a session that never was: %v", call, err)
		}
	}

	req := request()
	req.Op = string(verbs.Send)
	if _, err := r.Open(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Open(t.Context(), req); reasonOf(err) != BadHandshake {
		t.Errorf("the same session again: %v", err)
	}
	for _, size := range []int{0, -1, req.MaxMsg + 1, math.MaxInt} {
		if err := r.Run(t.Context(), req.ID, &control.RunRequest{Size: size}); reasonOf(err) != BadHandshake {
			t.Errorf("a run of size %d: %v", size, err)
		}
	}
	if err := finish(req.ID); err != nil {
		t.Errorf("a finish without a run: %s", err)
	}
	if err := r.Run(t.Context(), req.ID, &control.RunRequest{Size: 8}); err != nil {
		t.Error(err)
	}
	if err := r.Run(t.Context(), req.ID, &control.RunRequest{Size: 8}); reasonOf(err) != BadHandshake {
		t.Errorf("a run within a run: %v", err)
	}
	if err := r.Close(t.Context(), req.ID); err != nil { // with its loop under way
		t.Error(err)
	}
	for call, err := range all(req.ID) {
		if reasonOf(err) != PeerUnresponsive {
			t.Errorf("%s of a session that was closed: %v", call, err)
		}
	}
	b.checkEmpty(t)
}

// What an older responder does not know it refuses, and what asks for its own process.
func TestResponderRefuses(t *testing.T) {
	b := newHost(t, "b", roomy)
	for _, tt := range []struct {
		name   string
		change func(r *control.OpenRequest)
		reason Reason
	}{
		{"a newer kind", func(r *control.OpenRequest) { r.Kind = "jitter" }, VersionSkew},
		{"a newer transport", func(r *control.OpenRequest) { r.Transport = "dc" }, VersionSkew},
		{"a newer op", func(r *control.OpenRequest) { r.Op = "flush" }, VersionSkew},
		{"itself", func(r *control.OpenRequest) { r.Instance = b.Instance }, Self},
		{"another device", func(r *control.OpenRequest) { r.Device = "mlx5_7" }, PeerNoDevice},
		{"another port", func(r *control.OpenRequest) { r.Device, r.Port = simDevice, 2 }, PeerNoDevice},
		{"another link layer", func(r *control.OpenRequest) { r.Endpoint.LinkLayer = string(verbs.InfiniBand) }, GIDMismatch},
		{"only IPv6", func(r *control.OpenRequest) { r.GIDs[0].Addr = ula }, GIDMismatch},
		{"no GID", func(r *control.OpenRequest) { r.GIDs = nil }, GIDMismatch},
		{"an MTU beyond the ports", func(r *control.OpenRequest) { r.MTU, r.Endpoint.ActiveMTU = 4096, 1024 }, MTUMismatch},
	} {
		t.Run(tt.name, func(t *testing.T) {
			req := request()
			tt.change(req)
			if err := req.Validate(); err != nil {
				t.Fatalf("never gets here: %s", err)
			}
			_, err := b.responder.Open(t.Context(), req)
			var e *control.Error
			if !errors.As(err, &e) || Reason(e.Reason) != tt.reason || e.Detail == "" {
				t.Errorf("%v, want %s", err, tt.reason)
			}
			b.checkEmpty(t)
		})
	}
	t.Run("the smaller MTU", func(t *testing.T) {
		req := request()
		req.Endpoint.ActiveMTU = 512
		rep, err := b.responder.Open(t.Context(), req)
		if err != nil || rep.MTU != 512 {
			t.Fatalf("%+v, %v", rep, err)
		}
		if err := rep.Validate(req); err != nil {
			t.Error(err)
		}
		_ = b.responder.Close(t.Context(), req.ID)
	})
}

func TestSelf(t *testing.T) {
	a := newHost(t, "a", roomy)
	wantFailure(t, a.probe(t.Context(), Spec{}, a.target()), Skipped, StageAdmit, Self, ScopeLocal)
}

// An initiator that leaves while its session is being opened leaves none behind.
func TestInitiatorLeavesEarly(t *testing.T) {
	b := newHost(t, "b", roomy)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.responder.Open(ctx, request()); err == nil {
		t.Error("opened for nobody")
	}
	b.checkEmpty(t)
}

// Silence ends a session after the lease, whatever it had asked for and however far it had got.
func TestLease(t *testing.T) {
	l := roomy
	l.Lease = control.MinLease
	b := newHost(t, "b", l)
	for _, far := range []string{"opened", "answering"} {
		t.Run(far, func(t *testing.T) {
			req := request()
			req.Op = string(verbs.Send)
			rep, err := b.responder.Open(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			if rep.Lease != l.Lease.Seconds() {
				t.Errorf("lease of %g s", rep.Lease)
			}
			if far == "answering" {
				if err := b.responder.Run(t.Context(), req.ID, &control.RunRequest{Size: 8}); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, "the session is gone", func() bool { return b.responder.Sessions() == 0 })
			b.checkEmpty(t)
		})
	}
}

// A session ends at its deadline even if its lease is renewed.
func TestSessionsEndAtTheirDeadline(t *testing.T) {
	t.Parallel() // most of it is waiting
	b := newHost(t, "b", roomy)
	req := request()
	req.Deadline = 0.1
	if _, err := b.responder.Open(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the session is gone", func() bool {
		_ = b.responder.Renew(t.Context(), req.ID)
		return b.responder.Sessions() == 0
	})
}

// An initiator that is alive keeps its lease, through runs that are longer.
func TestLeaseIsRenewed(t *testing.T) {
	l := roomy
	l.Lease = time.Second
	a, b := newHost(t, "a", roomy), newHost(t, "b", l)
	for _, op := range []verbs.Op{verbs.Read, verbs.Send} { // without and with a loop at the responder
		wantUsable(t, a.probe(t.Context(), Spec{Op: op, Duration: 3 * l.Lease / 2}, b.target()))
	}
}

// The end of the daemon ends its sessions.
func TestShutdownEndsSessions(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	done := a.start(t, t.Context(), long(Latency, verbs.Send), b.target())
	b.responder.Shutdown()
	b.checkEmpty(t)
	wantFailure(t, wait(t, done), Failed, StageRun, PeerUnresponsive, ScopePeer)
}

// altered is a responder that does not say what it saw.
type altered struct {
	control.Service
	open   func(*control.OpenReply)
	finish func(*control.FinishReply) error
	renew  func() error
}

func (s *altered) Open(ctx context.Context, r *control.OpenRequest) (*control.OpenReply, error) {
	rep, err := s.Service.Open(ctx, r)
	if err == nil && s.open != nil {
		s.open(rep)
	}
	return rep, err
}

func (s *altered) Finish(ctx context.Context, id string, r *control.FinishRequest) (*control.FinishReply, error) {
	rep, err := s.Service.Finish(ctx, id, r)
	if err == nil && s.finish != nil {
		err = s.finish(rep)
	}
	return rep, err
}

func (s *altered) Renew(ctx context.Context, id string) error {
	if s.renew != nil {
		return s.renew()
	}
	return s.Service.Renew(ctx, id)
}

// Whatever a responder claims, the initiator ends with one result that can be shown.
func TestRespondersThatLie(t *testing.T) {
	value := func(v float64) *float64 { return &v }
	count := func(v uint64) *uint64 { return &v }
	send := Spec{Kind: Bandwidth, Op: verbs.Send, Iterations: 100, Sizes: []int{8, 16}}
	for _, tt := range []struct {
		name   string
		spec   Spec
		lie    altered
		stage  Stage // empty: usable all the same
		reason Reason
		scope  Scope
	}{
		{"fewer arrived", send, altered{finish: func(r *control.FinishReply) error { r.Received = count(*r.Received - 1); return nil }}, StageVerify, Loss, ScopePath},
		{"more arrived", send, altered{finish: func(r *control.FinishReply) error { r.Received = count(math.MaxUint64); return nil }}, StageVerify, Loss, ScopePath},
		{"an endless rate", send, altered{finish: func(r *control.FinishReply) error { r.Rate = value(1e300); return nil }}, StageVerify, BadHandshake, ScopePeer},
		{"a negative rate", send, altered{finish: func(r *control.FinishReply) error { r.Rate = value(-1); return nil }}, StageVerify, BadHandshake, ScopePeer},
		{"evidence without anything", send, altered{finish: func(r *control.FinishReply) error { r.Evidence = &control.Evidence{}; return nil }}, "", "", ""},
		{"no evidence, no figures", Spec{Iterations: 100}, altered{finish: func(r *control.FinishReply) error { *r = control.FinishReply{}; return nil }}, "", "", ""},
		{"an error of its own", send, altered{finish: func(r *control.FinishReply) error {
			r.Error = &control.Error{Reason: string(PortDown), Detail: "\x1b[2J"}
			return nil
		}}, StageVerify, PortDown, ScopePeer},
		{"an error of no list", send, altered{finish: func(r *control.FinishReply) error { r.Error = &control.Error{Reason: "moon-phase"}; return nil }}, StageVerify, VersionSkew, ScopePeer},
		{"an error of ours", send, altered{finish: func(r *control.FinishReply) error {
			r.Error = &control.Error{Reason: string(Memlock), Scope: "local"}
			return nil
		}}, StageVerify, Memlock, ScopePeer},
		{"a bug", send, altered{finish: func(*control.FinishReply) error { return errors.New("nil pointer somewhere") }}, StageVerify, PeerUnresponsive, ScopePeer},
		{"a lease that it does not renew", Spec{Duration: 20 * time.Second}, altered{
			open:  func(r *control.OpenReply) { r.Lease = control.MinLease.Seconds() },
			renew: func() error { return &control.Error{Reason: string(PeerUnresponsive), Detail: "no such session"} },
		}, StageRun, PeerUnresponsive, ScopePeer},
		{"a lease of nothing", send, altered{open: func(r *control.OpenReply) { r.Lease = 1e-12 }}, StageConnect, BadHandshake, ScopePeer},
		{"another GID than was offered", send, altered{open: func(r *control.OpenReply) { r.InitiatorGID.Addr = ula }}, StageConnect, BadHandshake, ScopePeer},
		{"no GIDs", send, altered{open: func(r *control.OpenReply) { r.GID, r.InitiatorGID = nil, nil }}, StageSetup, GIDMismatch, ScopePeer},
		{"QPs that are not there", Spec{Op: verbs.Read, Iterations: 10}, altered{open: func(r *control.OpenReply) { r.Endpoint.QPs[0].QPN = 1<<24 - 1 }}, StageRun, RetryExceeded, ScopePath},
		{"a key that is not there", Spec{Op: verbs.Read, Iterations: 10}, altered{open: func(r *control.OpenReply) { r.Endpoint.RKey++ }}, StageRun, RemoteAccess, ScopePeer},
		{"an address that is not there", Spec{Kind: Bandwidth, Iterations: 10}, altered{open: func(r *control.OpenReply) { r.Endpoint.Addr += 1 << 40 }}, StageRun, RemoteAccess, ScopePeer},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
			tt.lie.Service = b.responder
			b.service = &tt.lie
			r := a.probe(t.Context(), tt.spec, b.target())
			if tt.stage == "" {
				wantUsable(t, r)
				checkJSON(t, r)
				return
			}
			wantFailure(t, r, Failed, tt.stage, tt.reason, tt.scope)
			if strings.ContainsRune(*r.Detail, '\x1b') {
				t.Errorf("detail %q steers terminals", *r.Detail)
			}
		})
	}
}

// A fault of this end is found before a byte is sent, or as soon as a run fails, and not booked on the peer.
func TestOwnFaults(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	var asked atomic.Int32
	b.service = &counting{b.responder, &asked}
	for _, tt := range []struct {
		name   string
		gid    int
		reason Reason
	}{
		{"a pinned GID that is on no netdev", 0, GIDNotAssigned},
		{"a pinned GID that is not there", 5, NoGID},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a.GIDIndex = func() int { return tt.gid }
			defer func() { a.GIDIndex = func() int { return -1 } }()
			wantFailure(t, a.probe(t.Context(), Spec{}, b.target()), Failed, StageSetup, tt.reason, ScopeLocal)
			if asked.Load() > 0 {
				t.Error("the peer was asked")
			}
		})
		t.Run(tt.name+", at the peer", func(t *testing.T) {
			b.GIDIndex = func() int { return tt.gid }
			defer func() { b.GIDIndex = func() int { return -1 } }()
			wantFailure(t, a.probe(t.Context(), Spec{}, b.target()), Failed, StageAdmit, tt.reason, ScopePeer)
			asked.Store(0)
		})
	}
	wantUsable(t, a.probe(t.Context(), Spec{}, b.target()))
}

// The same under a run: the cause is found behind the symptom, which is silence.
func TestOwnFaultsUnderARun(t *testing.T) {
	for _, scope := range []Scope{ScopeLocal, ScopePeer} {
		t.Run(string(scope), func(t *testing.T) {
			t.Parallel() // most of it is waiting
			a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
			at := a
			if scope == ScopePeer {
				at = b
			}
			var gid atomic.Int32
			gid.Store(-1)
			at.GIDIndex = func() int { return int(gid.Load()) }
			done := a.start(t, t.Context(), long(Latency, verbs.Send), b.target())
			gid.Store(5)
			b.responder.mu.Lock()
			for _, s := range b.responder.sessions {
				s.ep.Stop() // it no longer answers
			}
			b.responder.mu.Unlock()
			wantFailure(t, wait(t, done), Failed, StageRun, NoGID, scope)
		})
	}
}

type counting struct {
	control.Service
	n *atomic.Int32
}

func (c *counting) Open(ctx context.Context, r *control.OpenRequest) (*control.OpenReply, error) {
	c.n.Add(1)
	return c.Service.Open(ctx, r)
}

// Progress is told while a run is under way, and never more than there is.
// A result says what both ends measured under.
func TestFingerprintsOfBothEnds(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	for _, known := range []bool{false, true} {
		if known {
			a.Environments, b.Environments = NewEnvironments(counters.NewFS("")), NewEnvironments(counters.NewFS(t.TempDir()))
		}
		r := a.probe(t.Context(), Spec{Op: verbs.Read, Iterations: 100}, b.target())
		if !r.Usable() || (r.Fingerprint != nil) != known || (r.PeerPrint != nil) != known || known && *r.Fingerprint == *r.PeerPrint {
			t.Errorf("known %t: %s, fingerprints %v and %v", known, r.Outcome, r.Fingerprint, r.PeerPrint)
		}
	}
}

func TestProgress(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	var told atomic.Int32
	a.OnProgress = func(p Progress) {
		told.Add(1)
		if p.Size != 8 || p.Elapsed <= 0 || p.Total > 0 && p.Done > p.Total {
			t.Errorf("%+v", p)
		}
	}
	wantUsable(t, a.probe(t.Context(), Spec{Op: verbs.Read, Duration: 500 * time.Millisecond}, b.target()))
	if told.Load() == 0 {
		t.Error("never told")
	}
}

// Nothing grows with the number of sessions: goroutines, threads, file descriptors, mappings.
func TestNothingGrows(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	session := func() { wantUsable(t, a.probe(t.Context(), Spec{Op: verbs.Read, Iterations: 10}, b.target())) }
	session()
	before := usage(t)
	const sessions = 100
	for range sessions {
		session()
	}
	var after map[string]int
	eventually(t, "usage is as before", func() bool {
		after = usage(t)
		for what, n := range before {
			if after[what] > n+sessions/5 {
				return false
			}
		}
		return true
	})
	t.Logf("before %v, after %v", before, after)
}

func usage(t *testing.T) map[string]int {
	t.Helper()
	out := map[string]int{"goroutines": runtime.NumGoroutine()}
	for what, dir := range map[string]string{"threads": "/proc/self/task", "file descriptors": "/proc/self/fd"} {
		list, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		out[what] = len(list)
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	out["mappings"] = strings.Count(string(maps), "\n")
	return out
}
