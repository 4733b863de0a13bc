package probe

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

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
	cpus     []int
	sink     chan verbs.RunResult // holds what this end received, once that ended; nil while nothing is
	parting  atomic.Bool          // the last call was made: the session may be gone before its answer is here
	start    *turn                // of sessions that begin their timed parts together; nil: this one is alone
}

func (s *initiation) open(ctx context.Context) (f *failure, retry time.Duration) {
	spec := s.spec
	es := spec.endpoint(true, slices.Max(spec.Sizes))
	es.Port = s.port.Port
	if spec.Kind == Latency {
		es.Samples = latencyScratch
		if spec.Iterations > 0 {
			es.Samples = min(spec.Iterations, latencyScratch)
		}
	}
	memory := spec.Memory.wire()
	memory.Ring = max(memory.Ring, spec.needsRing())
	es.Memory = s.port.memory(memory, spec.Kind, spec.Op)
	es.Memory.GPU, es.Memory.Slots = spec.Memory.GPU, spec.needsSlots()
	es.RDMACM = spec.RDMACM || s.port.iwarp
	if f := s.port.iwarpLacks(spec.Kind, spec.Transport, spec.Op); f != nil {
		return f, 0
	}
	if m := s.port.State.MaxMsg; m > 0 && uint64(es.MaxMsg) > uint64(m) {
		return fail(StageSetup, ResourceLimit, ScopeLocal, "message size %d is above the limit of %s port %d, %d bytes", es.MaxMsg, s.port.Device, s.port.Port, m), 0
	}
	if f := s.fitsUD(s.port.State.ActiveMTU); f != nil {
		return f, 0
	}
	if es.PKeyIndex, f = s.port.pkeyIndex(spec.PKey); f != nil {
		return f, 0
	}
	var err error
	if s.ep, err = s.port.dev.NewEndpoint(es); err != nil {
		return s.i.Node.learn(s.port.Device, spec, setupFailure(err)), 0
	}
	s.r.Options.Inline = s.ep.Inline
	s.r.Memory = memoryGot(s.ep.Memory())
	psn := s.i.Node.psns(spec.QPs)
	s.req = &control.OpenRequest{
		Minor: control.Minor, ID: newID(), Instance: s.i.Node.Instance, Host: s.i.Node.host,
		Source: control.Source{Device: s.port.Device, Port: s.port.Port}, Node: s.i.Node.Name, Probe: spec.Name, Rail: shifted(s.port.Rail, s.to.Shift),
		Device: s.to.Device, Port: s.to.Port, Kind: string(spec.Kind), Transport: string(spec.Transport), Op: string(spec.Op),
		Exclusive: spec.Heavy() || s.port.software, MaxMsg: es.MaxMsg, RxDepth: spec.RxDepth, MTU: spec.MTU, Deadline: spec.Deadline.Seconds(), Lease: leaseWanted.Seconds(),
		ServiceLevel: spec.ServiceLevel, TrafficClass: spec.TrafficClass, FlowLabel: spec.FlowLabel,
		Timeout: s.port.timeout(spec.Timeout), Retries: max(0, spec.Retries), RNRRetry: max(0, spec.RNRRetry),
		Memory: memory, RDMACM: es.RDMACM, Shape: spec.wire(), PKey: spec.PKey, GIDs: wireGIDs(s.port.GIDs), Endpoint: s.port.wireEndpoint(s.ep.Address(psn)),
	}
	session, rep, err := s.i.Client.Open(ctx, s.to.Address, s.req)
	if err != nil {
		f := fromControl(StageAdmit, err)
		var e *control.Error
		if errors.As(err, &e) && (e.Reason == string(Busy) || f.skipped && e.RetryAfter > 0) {
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
	if f := s.fitsUD(rep.MTU); f != nil {
		return f, 0
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
	var release func()
	s.cpus, release = s.i.Node.takeCPUs(s.port, true, s.spec.Threads, s.spec.CPUs)
	defer release()
	for n, size := range s.spec.Sizes {
		repeated := make([]Run, s.spec.Repeat)
		for k := range repeated {
			run, f := s.run(ctx, size, n == len(s.spec.Sizes)-1 && k == s.spec.Repeat-1)
			if f != nil {
				return f
			}
			repeated[k] = *run
		}
		s.r.Runs = append(s.r.Runs, medianRun(repeated))
	}
	return nil
}

// fitsUD refuses what is no single packet.
func (s *initiation) fitsUD(mtu int) *failure {
	if largest := slices.Max(s.spec.Sizes); s.spec.Transport == verbs.UD && largest > mtu {
		return fail(StageSetup, MTUMismatch, ScopeLocal, "message size %d: a UD message is one packet, here at most %d bytes", largest, mtu)
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
			if err := session.Renew(ctx); err != nil && ctx.Err() == nil && !s.parting.Load() {
				cancel(err)
				return
			}
		}
	}
}

// spoken is what both ends saw of a run.
type spoken struct {
	size     int
	begun    time.Time       // the timed part
	sent     uint64          // by this end, warm-up included
	warm     verbs.RunResult // of the warm-up
	timed    verbs.RunResult
	sink     *verbs.RunResult // what this end received, warm-up included
	from, to time.Duration    // the window of the timed part, by this end's clock
	rep      *control.FinishReply
	verified uint64 // by this end
}

// run measures at one message size: warm-up, barrier, timed part, barrier.
func (s *initiation) run(ctx context.Context, size int, last bool) (*Run, *failure) {
	if err := s.ep.Arm(size, s.spec.Verify); err != nil {
		return nil, setupFailure(err)
	}
	if err := s.session.Run(ctx, control.RunRequest{Size: size}); err != nil {
		return nil, s.lost(ctx, StageRun, err)
	}
	if s.spec.receives() {
		s.startSink(ctx, size)
		defer s.stopSink()
	}
	v := &spoken{size: size}
	rs := verbs.RunSpec{
		Role: verbs.Source, Size: size, Stall: stall, Yield: s.port.yield(), CPUs: s.cpus, Rate: s.spec.messages(size),
		ReadPermille: s.spec.readPermille(), Verify: s.spec.Verify,
	}
	if s.spec.Kind == Latency {
		rs.Role, rs.Raw = verbs.Ping, s.spec.RawSamples
	}
	if s.spec.Warmup > 0 {
		rs.Iterations = uint64(s.spec.Warmup)
		var f *failure
		v.warm, f = s.step(ctx, rs, s.spec.reverseWarmup())
		if s.spend(size, v.warm.Posted); f != nil {
			return nil, f
		}
	}
	asked := verbs.Now()
	mark, err := s.session.Mark(ctx)
	if err != nil {
		return nil, s.lost(ctx, StageRun, err)
	}
	// Where the responder's clock is when this end's shows 0: in the middle of the call, give or take half of it.
	ahead := seconds(mark.Clock) - (asked+verbs.Now())/2
	s.ep.Mark()
	if f := s.start.wait(ctx); f != nil {
		return nil, f
	}
	stop := s.i.Node.meter(ctx, s.port)
	rs.Iterations, rs.Duration = uint64(s.spec.Iterations), s.spec.Duration
	v.begun, v.from = time.Now(), verbs.Now()
	timed, giveUp := context.WithCancelCause(ctx)
	unwatched := s.watch(timed, size, rs.Role, giveUp)
	res, f := s.step(timed, rs, s.spec.Duration)
	v.timed, v.to = res, verbs.Now()
	unwatched()
	giveUp(nil)
	s.r.Evidence.Local = s.r.Evidence.Local.add(stop(ctx))
	s.spend(size, res.Posted)
	if f != nil {
		return nil, f
	}
	if n := len(res.Curve); n > 1 {
		v.from, v.to = res.Curve[0].At, res.Curve[n-1].At
	}
	v.sent = v.warm.Posted + res.Posted
	finish := control.FinishRequest{Sent: v.sent, Last: last}
	if s.spec.peerSends() {
		finish.From, finish.To = (v.from + ahead).Seconds(), (v.to + ahead).Seconds()
	}
	if last {
		s.parting.Store(true)
	}
	if v.rep, err = s.session.Finish(ctx, finish); err != nil {
		return nil, s.lost(ctx, StageVerify, err)
	}
	if last {
		s.session = nil
		s.i.met(s.to.Address)
	}
	s.r.Evidence.Remote = s.r.Evidence.Remote.add((*EndEvidence)(v.rep.Evidence))
	if v.rep.Sent != nil {
		s.spend(size, min(*v.rep.Sent, maxPosted))
	}
	if v.rep.Error != nil {
		return nil, fromControl(StageVerify, v.rep.Error)
	}
	if f := s.settle(v); f != nil {
		return nil, f
	}
	s.r.own.add(s.traffic(v))
	return s.figures(v), nil
}

// spend notes the payload of messages that were on the wire.
func (s *initiation) spend(size int, messages uint64) {
	if s.spec.Kind == Latency && !s.spec.Op.OneSided() {
		messages *= 2 // there and back
	}
	s.r.spent += messages * uint64(size)
}

// step is a warm-up or a timed part. Where only the peer sends it is nothing but time.
func (s *initiation) step(ctx context.Context, rs verbs.RunSpec, long time.Duration) (verbs.RunResult, *failure) {
	if !s.spec.Reverse {
		return s.loop(ctx, rs)
	}
	t := time.NewTimer(long)
	defer t.Stop()
	select {
	case <-t.C:
		return verbs.RunResult{Elapsed: long}, nil
	case res := <-s.sink: // which nothing but trouble ends
		s.sink = nil
		return res, s.blame(ctx, runFailure(res))
	case <-ctx.Done():
		return verbs.RunResult{}, s.lost(ctx, StageRun, context.Cause(ctx))
	}
}

// startSink counts what the peer sends, until settle.
func (s *initiation) startSink(ctx context.Context, size int) {
	end, _ := ctx.Deadline()
	rs := verbs.RunSpec{Role: verbs.Sink, Size: size, Deadline: time.Until(end), Yield: s.port.yield(), CPUs: s.cpus, Verify: s.spec.Verify}
	s.sink = make(chan verbs.RunResult, 1)
	go func(out chan<- verbs.RunResult) { out <- s.ep.Run(ctx, rs) }(s.sink)
}

// stopSink ends a sink that settle did not, so that nothing runs on an endpoint that is freed.
func (s *initiation) stopSink() {
	if s.sink != nil {
		s.ep.Stop()
		<-s.sink
		s.sink = nil
	}
}

// settle waits for the rest of what the peer sent, and checks that nothing is missing or wrong.
func (s *initiation) settle(v *spoken) *failure {
	rep := v.rep
	v.verified = v.warm.Verified + v.timed.Verified
	if s.sink != nil {
		if rep.Sent != nil {
			s.ep.Expect(*rep.Sent)
		}
		select {
		case res := <-s.sink:
			v.sink = &res
		case <-time.After(finishWait):
			s.ep.Stop()
			res := <-s.sink
			v.sink = &res
		}
		s.sink = nil
		if v.sink.End != verbs.Done {
			f := runFailure(*v.sink)
			f.stage = StageVerify
			return f
		}
		v.verified += v.sink.Verified
	}
	if s.spec.Verify && s.spec.peerSends() && s.spec.Op == verbs.Write {
		n, err := s.ep.VerifySlots(v.size)
		v.verified += n
		if err != nil {
			return corrupt(err)
		}
	}
	if s.spec.Reverse && rep.Sent != nil && *rep.Sent == 0 {
		return fail(StageRun, Timeout, ScopePeer, "%s sent nothing in %s", s.to.Name, s.spec.Duration)
	}
	if s.spec.lossy() {
		return nil
	}
	if rep.Received != nil && (s.spec.peerReceives() || s.spec.Kind == Latency) && *rep.Received != v.sent {
		return fail(StageVerify, Loss, ScopePath, "%d messages were sent and %d arrived", v.sent, *rep.Received)
	}
	if v.sink != nil && rep.Sent != nil && v.sink.Received != *rep.Sent {
		return fail(StageVerify, Loss, ScopePath, "%s sent %d messages and %d arrived", s.to.Name, *rep.Sent, v.sink.Received)
	}
	return nil
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
		var foreign *errForeign
		switch {
		case errors.As(cause, &foreign):
			return res, skip(StageRun, ForeignTraffic, ScopeLocal, "%s, after %d messages", foreign, res.Completed)
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
	if f.reason == ResourceLimit && s.spec.Op.Atomic() { // what a device without atomics says of one
		f.reason = OpUnsupported
		return s.i.Node.learn(s.port.Device, s.spec, f)
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
		if e := fromControl(StageRun, rep.Error); ownReasons[e.reason] || e.reason == DataCorrupt {
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
