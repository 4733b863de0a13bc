package probe

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// Ping is the kind that asks peers by UD datagrams whether they are there, how long that takes, and how many get lost. It sets
// nothing up at the peer and shares the port with other light probes.
const Ping Kind = "ping"

// RTT is the LatencyStats.Measure of ping: the whole round trip, less the responder's own delay.
const RTT = "rtt"

const (
	defaultPings = 10
	defaultGap   = 10 * time.Millisecond
	minGap       = 100 * time.Microsecond
	maxPings     = 100_000

	// pingTimeout is when an answer is too late. Round trips within a fabric take microseconds, and with queues full all along
	// the path tens of milliseconds.
	pingTimeout = 500 * time.Millisecond
	// ownDelay is how long this end's thread may wait for a CPU during a sample; one of which that is below a tenth counts all
	// the same.
	ownDelay = 200 * time.Microsecond
	// pingSpin is how long a thread polls for an answer before it sleeps: on hardware most are there by then.
	pingSpin = 50 * time.Microsecond

	pingLease   = time.Minute // of an announcement
	pingRate    = 20_000      // answers per second to one initiator, twice what minGap allows
	portPingMax = 200_000     // and to all of them
)

// The values of PingStats.Stamps.
const (
	HardwareStamps = "hardware"
	SoftwareStamps = "software"
)

// PingStats are the datagrams of a ping run. Sent is the sum of Answered, Lost and Invalid.
type PingStats struct {
	Sent     int           `json:"sent"`
	Answered int           `json:"answered"` // each a sample of the latency
	Lost     int           `json:"lost"`
	Invalid  int           `json:"invalid"` // answered, but no sample
	Why      PingInvalid   `json:"invalid_by"`
	Stamps   string        `json:"stamps"` // hardware or software
	Own      *PingDelay    `json:"own_delay"`
	Peer     *PingDelay    `json:"responder_delay"`
	Gap      float64       `json:"interval"` // seconds from one ping to the next
	timeout  time.Duration // for the detail of a failure
}

// PingInvalid counts answers that are no samples by what is wrong with them. Duplicates and foreign ones come on top of those
// that were asked for.
type PingInvalid struct {
	Late       int    `json:"late"`
	Stamps     int    `json:"stamps"`
	OwnDelay   int    `json:"own_delay"`
	PeerBusy   int    `json:"peer_busy"`
	Duplicates uint64 `json:"duplicate"`
	Foreign    uint64 `json:"foreign"`
}

// PingDelay is over the samples of a run, in seconds.
type PingDelay struct {
	Mean float64 `json:"mean"`
	Max  float64 `json:"max"`
}

func (s Spec) pingDefaults() Spec {
	if s.Transport == "" {
		s.Transport = verbs.UD
	}
	if s.Op == "" {
		s.Op = verbs.Send
	}
	if len(s.Sizes) == 0 {
		s.Sizes = []int{verbs.PingHeader}
	}
	if s.Iterations == 0 {
		s.Iterations = defaultPings
	}
	if s.Gap == 0 {
		s.Gap = defaultGap
	}
	s.QPs, s.TxDepth, s.RxDepth, s.CQMod, s.PostList, s.Warmup = 1, 1, 1, 1, 1, -1
	if s.Deadline == 0 {
		s.Deadline = minDeadline + time.Duration(len(s.Sizes))*(time.Duration(s.Iterations)*s.Gap*2+pingTimeout)
	}
	if s.Wait == 0 {
		s.Wait = defaultWait
		if s.Interval > 0 {
			s.Wait = min(s.Interval, maxScheduledWait)
		}
	}
	return s
}

func (s Spec) validatePing() error {
	switch {
	case s.Transport != verbs.UD || s.Op != verbs.Send:
		return fmt.Errorf("ping over %s with %s: it is ud with send, always; leave both out", s.Transport, s.Op)
	case s.Exclusive:
		return errors.New("a ping never has the ports for itself: leave exclusive out")
	case s.Duration != 0:
		return fmt.Errorf("duration %s: a ping run is a count and an interval; leave duration out", s.Duration)
	case s.Iterations < 1 || s.Iterations > maxPings:
		return fmt.Errorf("%d pings: want 1 to %d", s.Iterations, maxPings)
	case s.Gap < minGap || s.Gap > time.Minute:
		return fmt.Errorf("interval of %s between pings: want %s to %s", s.Gap, minGap, time.Minute)
	case s.Deadline <= time.Duration(len(s.Sizes))*time.Duration(s.Iterations)*s.Gap:
		return fmt.Errorf("deadline %s is too short for %d pings every %s", s.Deadline, s.Iterations, s.Gap)
	case s.Deadline > deadlineOf:
		return fmt.Errorf("deadline %s: a run may last at most %s", s.Deadline, deadlineOf)
	}
	for _, r := range []struct {
		what      string
		v, lo, hi int
	}{
		{"service level", s.ServiceLevel, 0, 15},
		{"traffic class", s.TrafficClass, 0, 255},
		{"flow label", s.FlowLabel, 0, 1<<20 - 1},
	} {
		if r.v < r.lo || r.v > r.hi {
			return fmt.Errorf("%s %d is out of range %d to %d", r.what, r.v, r.lo, r.hi)
		}
	}
	for _, size := range s.Sizes {
		if size < verbs.PingHeader || size > verbs.PingMaxSize {
			return fmt.Errorf("ping of %d bytes: want %d (the header) to %d, and no more than the path's MTU", size, verbs.PingHeader, verbs.PingMaxSize)
		}
	}
	return nil
}

// ping is the probe of kind Ping: from attempts, in the place of a session.
func (i *Initiator) ping(ctx context.Context, spec Spec, to Target, r *Result) *failure {
	if host, _, err := net.SplitHostPort(to.Address); err != nil || host == "" {
		return fail(StageResolve, DNS, ScopeLocal, "peer %s: address %q is not host:port", to.Name, to.Address)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, spec.Deadline, errDeadline)
	defer cancel()
	p, f := i.Node.pinger(r.Device, r.Port)
	if f != nil {
		return f
	}
	r.Rail = p.at().Rail
	a, f := i.introduce(ctx, p, spec, to, StageAdmit)
	if f != nil {
		return f
	}
	for again := false; ; again = true {
		known := a.epoch()
		forget := i.keepKnown(ctx, a, to)
		f = i.pings(ctx, p, a, spec, to, r)
		forget()
		a.leave()
		lost := slices.ContainsFunc(r.Runs, func(run Run) bool { return run.Ping.Lost > 0 })
		if again || !lost || ctx.Err() != nil || f != nil && f.reason != Timeout {
			return f
		}
		// Losses may be a peer that was started anew, with another queue pair: ask, and if so measure what is there now. That it
		// can't be asked matters only if no ping was answered either.
		var g *failure
		if a, g = i.introduce(ctx, p, spec, to, StageRun); g != nil {
			if f != nil {
				return g
			}
			return nil
		}
		if a.epoch() == known {
			a.leave()
			return i.blamePing(p, a, f)
		}
		r.Runs = []Run{}
	}
}

// blamePing looks on this end for the cause of pings that were not answered. nil stays nil.
func (i *Initiator) blamePing(p *pinger, a *asked, f *failure) *failure {
	if f == nil {
		return nil
	}
	if own := i.Node.recheck(p.at(), a.gidIndex); own != nil {
		own.detail = fmt.Sprintf("%s (%s: %s)", own.detail, f.reason, f.detail)
		return own
	}
	return f
}

// pings carries out the runs, one a size.
func (i *Initiator) pings(ctx context.Context, p *pinger, a *asked, spec Spec, to Target, r *Result) *failure {
	begun, port := time.Now(), p.at()
	leave, err := p.enter(ctx, begun.Add(spec.Wait))
	r.Waited += time.Since(begun).Seconds()
	if err != nil {
		return skip(StageAdmit, BusyPort, ScopeLocal, "%s port %d was in use for %s", r.Device, r.Port, spec.Wait)
	}
	defer leave()
	a.describe(r)
	for _, size := range spec.Sizes {
		if mtu := min(port.State.ActiveMTU, a.rep.End.ActiveMTU); size > mtu {
			return fail(StageSetup, MTUMismatch, ScopePath, "a ping of %d bytes is above the MTU of %d bytes (this port %d, the peer's %d): a datagram is not split",
				size, mtu, port.State.ActiveMTU, a.rep.End.ActiveMTU)
		}
		end, _ := ctx.Deadline()
		begun := time.Now()
		got, err := p.echo.Ping(ctx, verbs.PingSpec{
			Peer: a.peer, Size: size, Count: spec.Iterations, Gap: spec.Gap, Timeout: pingTimeout, Deadline: max(time.Until(end), time.Millisecond), Own: ownDelay,
		})
		if err != nil {
			if ctx.Err() != nil {
				return fail(StageRun, Timeout, ScopePath, "%s", context.Cause(ctx))
			}
			f := runFailure(verbs.RunResult{End: verbs.Broken, Err: err})
			if own := i.Node.recheck(p.at(), a.gidIndex); own != nil {
				own.detail = fmt.Sprintf("%s (%s)", own.detail, f.detail)
				return own
			}
			f.scope = ScopeLocal
			return f
		}
		run := pingRun(size, spec, got)
		run.Time = begun
		r.Runs = append(r.Runs, run)
		switch s := run.Ping; {
		case s.Sent < spec.Iterations:
			return fail(StageRun, Timeout, ScopePath, "the deadline passed after %d of %d pings", s.Sent, spec.Iterations)
		case s.Lost == s.Sent:
			return fail(StageRun, Timeout, ScopePath, "none of %d pings of %d bytes was answered within %s", s.Sent, size, pingTimeout)
		case s.Why.PeerBusy == s.Sent:
			return skip(StageRun, BusyPort, ScopePeer, "a heavy probe was using the peer's port")
		}
	}
	return nil
}

// pingRun turns what came of pings into a Run.
func pingRun(size int, spec Spec, got *verbs.PingResult) Run {
	s := &PingStats{
		Sent: got.Sent, Answered: len(got.Samples), Lost: got.Lost, Stamps: SoftwareStamps, Gap: spec.Gap.Seconds(), timeout: pingTimeout,
		Why: PingInvalid{Late: got.Late, Stamps: got.Stamps, OwnDelay: got.Own, PeerBusy: got.Busy, Duplicates: got.Duplicates, Foreign: got.Foreign},
	}
	s.Invalid = s.Sent - s.Answered - s.Lost
	if got.Hardware {
		s.Stamps = HardwareStamps
	}
	run := Run{
		Size: size, Iterations: uint64(s.Answered), Seconds: got.Elapsed.Seconds(), Ping: s,
		Bytes: uint64(size) * uint64(2*(s.Sent-s.Lost)+s.Lost), // what was lost was lost on its way there, or back
	}
	if got.Sent > 0 {
		run.LossRatio = finite(float64(got.Lost) / float64(got.Sent))
	}
	if len(got.Samples) > 0 {
		run.Latency, run.Histogram = rttStats(got.Samples)
		for _, x := range got.Samples[:min(len(got.Samples), spec.RawSamples)] {
			run.Raw = append(run.Raw, uint64(x.RTT))
		}
		s.Own = pingDelay(got.Samples, func(x verbs.PingSample) time.Duration { return x.Own })
		s.Peer = pingDelay(got.Samples, func(x verbs.PingSample) time.Duration { return x.Responder })
	}
	return run
}

func pingDelay(samples []verbs.PingSample, of func(verbs.PingSample) time.Duration) *PingDelay {
	var d PingDelay
	for _, x := range samples {
		v := of(x).Seconds()
		d.Mean += v / float64(len(samples))
		d.Max = max(d.Max, v)
	}
	d.Mean = min(d.Mean, d.Max)
	return &d
}

// rttStats are exact: there are few samples, and each is at hand. The histogram is no larger than they need.
func rttStats(samples []verbs.PingSample) (*LatencyStats, *hdrhistogram.Histogram) {
	sorted := make([]time.Duration, len(samples))
	var mean, m2 float64
	for n, x := range samples {
		sorted[n] = x.RTT
		d := x.RTT.Seconds() - mean
		mean += d / float64(n+1)
		m2 += d * (x.RTT.Seconds() - mean)
	}
	slices.Sort(sorted)
	n := int64(len(sorted))
	lo, hi := sorted[0], sorted[n-1]
	h := hdrhistogram.New(1, max(int64(hi), 2), 3)
	for _, v := range sorted {
		_ = h.RecordValue(int64(v)) // within its range by construction
	}
	s := &LatencyStats{
		Measure: RTT, Samples: n, Min: lo.Seconds(), Max: hi.Seconds(), Mean: min(max(mean, lo.Seconds()), hi.Seconds()), Stddev: math.Sqrt(m2 / float64(n)),
	}
	quantile := func(permille int64) *float64 {
		if n*(1000-permille) < 1000 {
			return nil
		}
		return finite(sorted[(n*permille+999)/1000-1].Seconds())
	}
	s.P50, s.P90, s.P99, s.P999 = quantile(500), quantile(900), quantile(990), quantile(999)
	return s, h
}

// introduce makes the pinger known to the peer, unless that was done not long ago and nothing speaks for doing it anew: in
// stage run something does. Leave what it returns.
func (i *Initiator) introduce(ctx context.Context, p *pinger, spec Spec, to Target, stage Stage) (*asked, *failure) {
	port := p.at()
	a := p.ask(askKey{to.Address, to.Device, to.Port, to.Shift, spec.ServiceLevel, spec.TrafficClass, spec.FlowLabel})
	a.mu.Lock()
	defer a.mu.Unlock()
	if stage != StageRun && a.rep != nil && time.Since(a.told) < seconds(a.rep.Lease)/2 && a.gids == fmt.Sprint(port.GIDs) {
		return a, nil
	}
	n := i.Node
	req := &control.PingRequest{
		Minor: control.Minor, Instance: n.Instance, Host: n.host, Source: control.Source{Device: port.Device, Port: port.Port}, Node: n.Name,
		Rail: shifted(port.Rail, to.Shift), Device: to.Device, Port: to.Port, Lease: pingLease.Seconds(), ServiceLevel: spec.ServiceLevel,
		TrafficClass: spec.TrafficClass, FlowLabel: spec.FlowLabel, GIDs: wireGIDs(port.GIDs), End: p.endpoint(port),
	}
	rep, err := i.Client.Ping(ctx, to.Address, req)
	if err != nil {
		a.leave()
		return nil, i.unanswered(port, fromControl(stage, err))
	}
	if f := a.take(p, req, rep, to); f != nil {
		a.leave()
		return nil, f
	}
	a.req = req
	return a, nil
}

// keepKnown renews what introduce told the peer until it is ended: pings may be under way for longer than a lease. A peer that
// does not answer shows in the pings.
func (i *Initiator) keepKnown(ctx context.Context, a *asked, to Target) (end func()) {
	a.mu.Lock()
	req, every := a.req, seconds(a.rep.Lease)/3 // at most half a lease has passed
	a.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		t := time.NewTicker(every)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
				_, _ = i.Client.Ping(ctx, to.Address, req)
			}
		}
	}()
	return func() {
		cancel()
		<-done
	}
}

// Ping makes this end ready to answer an initiator's pings, for as long as the lease says. It is the control.Service's.
func (r *Responder) Ping(_ context.Context, req *control.PingRequest) (*control.PingReply, error) {
	n := r.node
	r.mu.Lock()
	closed, lease := r.closed, min(pingLease, r.limits.Lease)
	r.mu.Unlock()
	switch {
	case req.Instance == n.Instance:
		return nil, &control.Error{Reason: string(Self), Detail: "this is the asking process itself"}
	case closed:
		return nil, &control.Error{Reason: string(Busy), Detail: n.Name + " is shutting down", RetryAfter: busyRetry}
	case n.paused() != "":
		return nil, &control.Error{Reason: string(Paused), Detail: n.Name + " is " + n.paused()}
	}
	port, own, theirs, err := n.choosePort(&control.OpenRequest{
		Device: req.Device, Port: req.Port, Rail: req.Rail, GIDs: req.GIDs, Endpoint: control.Endpoint{LinkLayer: req.End.LinkLayer},
	})
	if err != nil {
		return nil, err
	}
	p, f := n.pingerOf(port)
	if f != nil {
		return nil, f.toControl()
	}
	lease = min(lease, seconds(req.Lease))
	nonce, err := p.answer(req, own, theirs, lease)
	if err != nil {
		return nil, setupFailure(err).toControl()
	}
	rep := &control.PingReply{
		Minor: control.Minor, Instance: n.Instance, Host: n.host, Node: n.Name, Device: port.Device, Port: port.Port, Lease: lease.Seconds(),
		End: p.endpoint(port), Nonce: nonce, Rate: pingRate,
	}
	if own != nil {
		rep.GID, rep.InitiatorGID = &control.GID{Addr: own.Addr, Type: string(own.Type)}, theirs
	}
	return rep, nil
}
