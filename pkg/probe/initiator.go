package probe

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// Bounds of what the initiator does around its runs.
const (
	leaseWanted  = 10 * time.Second
	teardownTime = 2 * time.Second
	busyPause    = 200 * time.Millisecond
)

// Target is a peer to probe.
type Target struct {
	Name    string // configured name; the metric label "dst"
	Address string // host:port of its control channel
	Device  string // of the peer; empty: what suits this end's port
	Port    int    // of the peer's device; 0: any
	Path    string // same_rack, cross_rack …; empty: unknown
	Shift   int    // without a Device: the peer's rail to ask for is this port's plus Shift
}

// Progress is told while a run is under way.
type Progress struct {
	Size    int // bytes
	Done    uint64
	Total   uint64 // 0: the run is by duration
	Elapsed time.Duration
}

// Initiator probes peers from a Node's ports.
type Initiator struct {
	Node   *Node
	Client *control.Client
	// Hello, if set, is asked instead of Client who is at an address, before a peer that was not met of late is probed.
	Hello func(ctx context.Context, address string) (*control.Hello, error)
	// OnProgress, if set, is called a few times a second while a run is under way.
	OnProgress func(Progress)
	// Tolerances, if set, gives those in force; else the defaults are.
	Tolerances func() Tolerances

	mu    sync.Mutex
	peers map[string]time.Time // by address: those that were there a moment ago
}

// Probe runs one probe against a peer from one port and returns what came of it, never nil. Its own deadlines bound it;
// cancelling ctx ends it within a few hundred milliseconds, with nothing left behind.
func (i *Initiator) Probe(ctx context.Context, spec Spec, to Target, device string, port int) *Result {
	start := time.Now()
	spec = spec.WithDefaults()
	r := &Result{
		ID: newID(), Time: start, Taints: []Taint{}, TaintLog: []TaintDetail{}, Runs: []Run{}, Probe: spec.Name, Peer: to.Name, Path: to.Path,
		Device: device, Port: port, Kind: spec.Kind, Transport: spec.Transport, Op: spec.Op, QPs: spec.QPs,
	}
	if r.Path == "" {
		r.Path = "unknown"
	}
	f := i.attempts(ctx, spec, to, r)
	r.Duration = time.Since(start).Seconds()
	switch {
	case f == nil:
		r.Outcome = OK
		r.taint(i.tolerances())
	default:
		if ctx.Err() != nil {
			f = skip(f.stage, Cancelled, ScopeLocal, "cancelled: %s", context.Cause(ctx))
		}
		r.Outcome = Failed
		if f.skipped {
			r.Outcome = Skipped
		}
		r.Stage, r.Reason, r.Scope, r.Detail = &f.stage, &f.reason, &f.scope, &f.detail
	}
	return r
}

func (i *Initiator) tolerances() Tolerances {
	if i.Tolerances == nil {
		return nil
	}
	return i.Tolerances()
}

// attempts repeats a session that found a port busy until it gets it or spec.Wait is over. In between it holds nothing, so
// two nodes that want each other at the same moment do not block each other.
func (i *Initiator) attempts(ctx context.Context, spec Spec, to Target, r *Result) *failure {
	if err := spec.Validate(); err != nil {
		return fail(StageSetup, OpUnsupported, ScopeLocal, "%s", err)
	}
	if spec.Kind == Ping {
		return i.ping(ctx, spec, to, r)
	}
	patience := time.Now().Add(spec.Wait)
	for {
		f, retry := i.attempt(ctx, spec, to, r, patience)
		if retry == 0 {
			return f
		}
		asked := time.Now()
		pause := retry/2 + rand.N(retry)
		if asked.Add(pause).After(patience) {
			return f
		}
		select {
		case <-ctx.Done():
			return f
		case <-time.After(pause):
		}
		r.Waited += time.Since(asked).Seconds()
		if time.Now().After(patience) { // a late timer: it was the peer that was busy
			return f
		}
	}
}

// attempt is one session. retry is not 0 if the peer was busy and may be asked again after about so long.
func (i *Initiator) attempt(ctx context.Context, spec Spec, to Target, r *Result, patience time.Time) (f *failure, retry time.Duration) {
	if host, _, err := net.SplitHostPort(to.Address); err != nil || host == "" {
		return fail(StageResolve, DNS, ScopeLocal, "peer %s: address %q is not host:port", to.Name, to.Address), 0
	}
	port, f := i.Node.find(r.Device, r.Port)
	if port != nil {
		r.Rail, r.Fingerprint = port.Rail, i.Node.fingerprint(ctx, port)
	}
	if f != nil {
		return f, 0
	}
	if f := i.greet(ctx, port, to); f != nil {
		return f, 0
	}
	asked := time.Now()
	release, err := i.Node.acquire(ctx, port, spec.Heavy(), patience)
	r.Waited += time.Since(asked).Seconds()
	if err != nil {
		return skip(StageAdmit, BusyPort, ScopeLocal, "%s port %d was in use for %s", r.Device, r.Port, spec.Wait), 0
	}
	defer release()

	ctx, cancel := context.WithTimeoutCause(ctx, spec.Deadline, errDeadline)
	defer cancel()
	ctx, done := port.whileThere(ctx)
	defer done()
	s := &initiation{i: i, spec: spec, to: to, port: port, r: r}
	defer s.teardown(ctx)
	f, retry = s.open(ctx)
	if f == nil {
		f = s.runs(ctx)
	}
	if f != nil && errors.Is(context.Cause(ctx), errRemoved) { // whatever that looked like
		return fail(f.stage, DeviceRemoved, ScopeLocal, "%s was removed or failed during the session (%s: %s)", r.Device, f.reason, f.detail), 0
	}
	return f, retry
}

var errDeadline = errors.New("the session's deadline passed")

// acquainted is how long a peer that took part in a whole session is taken to be there.
const acquainted = time.Minute

// met notes that a peer took part in a whole session.
func (i *Initiator) met(addr string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.peers == nil {
		i.peers = map[string]time.Time{}
	}
	i.peers[addr] = time.Now()
}

// greet finds out whether anybody is there before the port is taken: a dead peer must not keep others waiting for it.
func (i *Initiator) greet(ctx context.Context, port *LocalPort, to Target) *failure {
	i.mu.Lock()
	last, known := i.peers[to.Address]
	delete(i.peers, to.Address) // until it does so again
	i.mu.Unlock()
	if known && time.Since(last) < acquainted {
		return nil
	}
	ask := i.Hello
	if ask == nil {
		ask = i.Client.Hello
	}
	hello, err := ask(ctx, to.Address)
	switch {
	case err != nil:
		return i.unanswered(port, fromControl(StageAdmit, err))
	case hello.Instance == i.Node.Instance:
		return skip(StageAdmit, Self, ScopeLocal, "%s at %s is this process itself", to.Name, to.Address)
	case hello.LameDuck:
		return skip(StageAdmit, Paused, ScopePeer, "%s wishes to be left alone: it is a lame duck", to.Name)
	}
	return nil
}

// unanswered looks behind a peer that was not reached: a node whose own address is gone reaches nobody.
func (i *Initiator) unanswered(port *LocalPort, f *failure) *failure {
	if (f.reason == GIDMismatch || f.scope == ScopeLocal) && len(port.GIDs) > 0 && onlyLinkLocal(port.GIDs) {
		f.reason, f.scope = NoGID, ScopeLocal
		f.detail = fmt.Sprintf("%s port %d has no GID but link-local ones: is the netdev's address gone? (%s)", port.Device, port.Port, f.detail)
	}
	return f
}

// initiation is the initiator's side of one session.
type initiation struct {
	i    *Initiator
	spec Spec
	to   Target
	port *LocalPort
	r    *Result

	req      *control.OpenRequest
	rep      *control.OpenReply
	session  *control.Session // nil until open
	ep       *verbs.Endpoint
	gidIndex int
}

// endpointSpec is one end of a session over spec's op; the responder derives the same from the OpenRequest.
func endpointSpec(kind Kind, transport verbs.Transport, op verbs.Op, initiator bool, port, qps, maxMsg, rxDepth int) verbs.EndpointSpec {
	e := verbs.EndpointSpec{
		Transport: transport, Op: op, Initiator: initiator, Port: port, QPs: qps, TxDepth: 1, CQMod: 1, PostList: 1, MaxMsg: maxMsg,
	}
	pingPong := kind == Latency && !op.OneSided()
	if pingPong {
		e.BothWays, e.TxDepth = true, latencyDepth
	}
	if op.Receives() && (pingPong || !initiator) {
		e.RxDepth = rxDepth
	}
	return e
}

func (s *initiation) open(ctx context.Context) (f *failure, retry time.Duration) {
	spec := s.spec
	es := endpointSpec(spec.Kind, spec.Transport, spec.Op, true, s.port.Port, spec.QPs, slices.Max(spec.Sizes), spec.RxDepth)
	es.TxDepth, es.CQMod, es.PostList, es.Inline = spec.TxDepth, spec.CQMod, spec.PostList, spec.Inline
	if spec.Kind == Latency {
		es.CQMod = 1
		es.Samples = latencyScratch
		if spec.Iterations > 0 {
			es.Samples = min(spec.Iterations, latencyScratch)
		}
	}
	es.Memory = s.port.memory(spec.Memory.wire(), spec.Kind, spec.Op)
	es.Memory.GPU = spec.Memory.GPU
	es.RDMACM = spec.RDMACM || s.port.iwarp
	if f := s.port.iwarpLacks(spec.Kind, spec.Transport, spec.Op); f != nil {
		return f, 0
	}
	if m := s.port.State.MaxMsg; m > 0 && uint64(es.MaxMsg) > uint64(m) {
		return fail(StageSetup, ResourceLimit, ScopeLocal, "message size %d is above the limit of %s port %d, %d bytes", es.MaxMsg, s.port.Device, s.port.Port, m), 0
	}
	var err error
	if s.ep, err = s.port.dev.NewEndpoint(es); err != nil {
		return setupFailure(err), 0
	}
	s.r.Memory = memoryGot(s.ep.Memory())
	psn := randomPSNs(spec.QPs)
	s.req = &control.OpenRequest{
		Minor: control.Minor, ID: newID(), Instance: s.i.Node.Instance, Host: s.i.Node.host,
		Source: control.Source{Device: s.port.Device, Port: s.port.Port}, Node: s.i.Node.Name, Probe: spec.Name, Rail: shifted(s.port.Rail, s.to.Shift),
		Device: s.to.Device, Port: s.to.Port, Kind: string(spec.Kind), Transport: string(spec.Transport), Op: string(spec.Op),
		Exclusive: spec.Heavy() || s.port.software, MaxMsg: es.MaxMsg, RxDepth: spec.RxDepth, MTU: spec.MTU, Deadline: spec.Deadline.Seconds(), Lease: leaseWanted.Seconds(),
		ServiceLevel: spec.ServiceLevel, TrafficClass: spec.TrafficClass, FlowLabel: spec.FlowLabel,
		Timeout: s.port.timeout(spec.Timeout), Retries: max(0, spec.Retries), RNRRetry: max(0, spec.RNRRetry),
		Memory: spec.Memory.wire(), RDMACM: es.RDMACM, GIDs: wireGIDs(s.port.GIDs), Endpoint: s.port.wireEndpoint(s.ep.Address(psn)),
	}
	session, rep, err := s.i.Client.Open(ctx, s.to.Address, s.req)
	if err != nil {
		f := fromControl(StageAdmit, err)
		var e *control.Error
		if errors.As(err, &e) && e.Reason == string(Busy) {
			return f, max(seconds(e.RetryAfter), busyPause)
		}
		return s.i.unanswered(s.port, f), 0
	}
	s.session, s.rep = session, rep
	s.r.PeerDev, s.r.PeerPort, s.r.MTU = &rep.Device, &rep.Port, &rep.MTU
	if rep.Fingerprint != "" {
		s.r.PeerPrint = &rep.Fingerprint
	}
	s.r.PeerMemory = rep.Memory
	if rep.Host != "" && rep.Host == s.req.Host {
		s.r.Path = "same_node"
	}
	if own := s.port.State.ActiveMTU; spec.MTU == 0 && (rep.MTU < own || rep.MTU < rep.Endpoint.ActiveMTU) {
		s.r.mtuReduced = max(own, rep.Endpoint.ActiveMTU)
	}
	s.gidIndex = s.port.gidIndex(rep.InitiatorGID)
	if s.gidIndex >= 0 && !s.port.iwarp {
		s.r.GIDIndex = &s.gidIndex
	} else if s.gidIndex < 0 && len(s.port.GIDs) > 0 && s.port.State.LinkLayer == verbs.Ethernet {
		return fail(StageSetup, GIDMismatch, ScopePeer, "%s chose no GID of ours", s.to.Name), 0
	}
	if es.RDMACM {
		return s.dial(ctx), 0
	}
	err = s.ep.Connect(peerAddress(&rep.Endpoint, rep.GID), psn, path(s.req, s.gidIndex, rep.MTU, &s.req.Endpoint, &rep.Endpoint))
	if err != nil {
		return setupFailure(err), 0
	}
	return nil, 0
}

// latencyScratch is how many latency samples are kept before they go into the histogram.
const latencyScratch = 1 << 16

func (s *initiation) runs(ctx context.Context) *failure {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	renewed, session := make(chan struct{}), s.session
	go func() {
		defer close(renewed)
		s.renew(ctx, session, cancel)
	}()
	defer func() {
		cancel(nil)
		<-renewed
	}()
	for n, size := range s.spec.Sizes {
		run, f := s.run(ctx, size, n == len(s.spec.Sizes)-1)
		if f != nil {
			return f
		}
		s.r.Runs = append(s.r.Runs, *run)
	}
	return nil
}

// renew keeps the lease; a peer that does not renew it is gone, and the run with it.
func (s *initiation) renew(ctx context.Context, session *control.Session, cancel context.CancelCauseFunc) {
	t := time.NewTicker(seconds(s.rep.Lease) / 3)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			if err := session.Renew(ctx); err != nil && ctx.Err() == nil {
				cancel(err)
				return
			}
		}
	}
}

// run measures at one message size: warm-up, barrier, timed part, barrier.
func (s *initiation) run(ctx context.Context, size int, last bool) (*Run, *failure) {
	if err := s.ep.Arm(size, false); err != nil {
		return nil, setupFailure(err)
	}
	if err := s.session.Run(ctx, control.RunRequest{Size: size}); err != nil {
		return nil, s.lost(ctx, StageRun, err)
	}
	rs := verbs.RunSpec{Role: verbs.Source, Size: size, Stall: stall, Yield: s.port.yield(), CPUs: s.port.cpus(true, 1, nil)}
	if s.spec.Kind == Latency {
		rs.Role = verbs.Ping
	}
	var sent uint64
	if s.spec.Warmup > 0 {
		rs.Iterations = uint64(s.spec.Warmup)
		warm, f := s.loop(ctx, rs)
		if f != nil {
			return nil, f
		}
		sent += warm.Posted
	}
	if err := s.session.Mark(ctx); err != nil {
		return nil, s.lost(ctx, StageRun, err)
	}
	stop := s.i.Node.meter(ctx, s.port)
	rs.Iterations, rs.Duration = uint64(s.spec.Iterations), s.spec.Duration
	res, f := s.loop(ctx, rs)
	s.r.Evidence.Local = s.r.Evidence.Local.add(stop(ctx))
	if f != nil {
		return nil, f
	}
	sent += res.Posted
	s.r.own.add(s.traffic(size, res.Posted, res.Elapsed.Seconds()))
	rep, err := s.session.Finish(ctx, control.FinishRequest{Sent: sent, Last: last})
	if err != nil {
		return nil, s.lost(ctx, StageVerify, err)
	}
	if last {
		s.session = nil
		s.i.met(s.to.Address)
	}
	s.r.Evidence.Remote = s.r.Evidence.Remote.add((*EndEvidence)(rep.Evidence))
	if rep.Error != nil {
		return nil, fromControl(StageVerify, rep.Error)
	}
	if rep.Received != nil && s.spec.answered() && *rep.Received != sent {
		return nil, fail(StageVerify, Loss, ScopePath, "%d messages were sent and %d arrived", sent, *rep.Received)
	}
	return s.figures(size, res, rep), nil
}

// lost is a barrier that got no answer: the session's deadline, our own cancellation, or the peer.
func (s *initiation) lost(ctx context.Context, stage Stage, err error) *failure {
	if errors.Is(context.Cause(ctx), errDeadline) {
		return fail(stage, Timeout, ScopePeer, "%s while %s was asked", errDeadline, s.to.Name)
	}
	if e, ok := errors.AsType[*control.Error](context.Cause(ctx)); ok {
		err = e // the lease could not be renewed
	}
	return fromControl(stage, err)
}

// loop carries out one run and finds out what is behind one that was not done.
func (s *initiation) loop(ctx context.Context, rs verbs.RunSpec) (verbs.RunResult, *failure) {
	end, _ := ctx.Deadline()
	rs.Deadline = time.Until(end)
	ticked := make(chan struct{})
	stopTicks := func() {}
	if report := s.i.OnProgress; report != nil {
		tick, cancel := context.WithCancel(ctx)
		stopTicks = cancel
		go func() {
			defer close(ticked)
			s.progress(tick, rs, report)
		}()
	} else {
		close(ticked)
	}
	res := s.ep.Run(ctx, rs)
	stopTicks()
	<-ticked
	if res.End == verbs.Done {
		return res, nil
	}
	f := runFailure(res)
	if cause := context.Cause(ctx); res.End == verbs.Stopped && cause != nil {
		var e *control.Error
		switch {
		case errors.As(cause, &e):
			return res, fromControl(StageRun, cause)
		case errors.Is(cause, errDeadline):
			f = fail(StageRun, Timeout, ScopePath, "%s after %d messages", errDeadline, res.Completed)
		default:
			return res, f
		}
	}
	return res, s.blame(ctx, f)
}

// blame looks for the cause of a run's failure beyond its symptom: first on this end, then on the peer's.
func (s *initiation) blame(ctx context.Context, f *failure) *failure {
	if own := s.i.Node.recheck(s.port, s.gidIndex); own != nil {
		own.detail = fmt.Sprintf("%s (%s: %s)", own.detail, f.reason, f.detail)
		return own
	}
	if f.scope == ScopeLocal {
		return f
	}
	ask, cancel := detached(ctx, teardownTime)
	defer cancel()
	rep, err := s.session.Finish(ask, control.FinishRequest{Failed: true})
	if err != nil {
		var e *control.Error
		answered := errors.As(err, &e) && !e.Silent && e.Reason != control.ReasonUnreachable // its host did, but the session is gone
		if answered || f.reason == Timeout {
			// In the second case its device still acknowledged: the path is there, and nobody behind it.
			return fail(StageRun, PeerUnresponsive, ScopePeer, "%s (%s: %s)", err, f.reason, f.detail)
		}
		return f
	}
	s.r.Evidence.Remote = s.r.Evidence.Remote.add((*EndEvidence)(rep.Evidence))
	if rep.Error != nil {
		if e := fromControl(StageRun, rep.Error); ownReasons[e.reason] {
			e.detail = fmt.Sprintf("%s: %s (%s: %s)", s.to.Name, e.detail, f.reason, f.detail)
			return e
		}
	}
	return f
}

func (s *initiation) progress(ctx context.Context, rs verbs.RunSpec, report func(Progress)) {
	t := time.NewTicker(200 * time.Millisecond)
	defer t.Stop()
	start := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			report(Progress{Size: rs.Size, Done: s.ep.Progress(rs.Role), Total: rs.Iterations * uint64(s.spec.QPs), Elapsed: time.Since(start)})
		}
	}
}

// figures turns what both ends saw into a Run.
func (s *initiation) figures(size int, res verbs.RunResult, rep *control.FinishReply) *Run {
	run := &Run{
		Size: size, Iterations: res.Completed, Seconds: res.Elapsed.Seconds(), Bytes: res.Completed * uint64(size),
		CPUSeconds: CPUSeconds{Local: finite(res.CPU.Seconds()), Remote: rep.CPUSeconds},
	}
	if s.spec.Kind == Latency {
		measure := HalfRTT
		if s.spec.Op.OneSided() {
			measure = Operation
		} else {
			run.Bytes *= 2 // there and back
		}
		if res.Latency != nil {
			run.Latency, run.Histogram = latencyStats(res.Latency, measure)
		}
		return run
	}
	rate, lo, hi := res.Rate, res.MinRate, res.MaxRate
	if rep.Rate != nil {
		rate, lo, hi = rep.Rate, rep.MinRate, rep.MaxRate // what arrived, not what was sent
	}
	if rate == nil && res.Elapsed > 0 { // too few completions to take a rate between them
		whole := float64(res.Completed) / res.Elapsed.Seconds()
		rate, run.short = &whole, true
	}
	if rate != nil {
		run.MessageRate = rate
		run.Bandwidth = &BandwidthStats{
			BytesPerSecond: *rate * float64(size), Tx: scaled(res.Rate, size), Rx: scaled(rep.Rate, size), Min: scaled(lo, size), Max: scaled(hi, size),
		}
	}
	return run
}

// teardown frees both ends, whatever state the session is in.
func (s *initiation) teardown(ctx context.Context) {
	if s.ep != nil {
		if err := s.ep.Close(); err != nil {
			s.i.Node.Log.Warn("endpoint not freed cleanly", "device", s.port.Device, "err", err)
		}
	}
	if s.session != nil {
		ctx, cancel := detached(ctx, teardownTime)
		defer cancel()
		_ = s.session.Close(ctx) // the lease frees it if this does not arrive
	}
}
