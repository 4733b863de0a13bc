package probe

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// What both roles of a session do alike: an endpoint on a port, its address on the wire, the path they agreed on.

// yieldAfter is how long a loop over a software device idles before it lets others have the CPU: the packets are moved by
// the kernel on these same cores.
const yieldAfter = 20 * time.Microsecond

func (p *LocalPort) yield() time.Duration {
	if p.software {
		return yieldAfter
	}
	return 0
}

// timeout is the QP's local ACK timeout exponent where the probe leaves it open. A software device is answered by a CPU that
// may have other things to do: too short a timer retransmits what only waits.
func (p *LocalPort) timeout(want int) int {
	switch {
	case want != 0:
		return want
	case p.software:
		return softwareTimeout
	}
	return defaultTimeout
}

// softwareSlot is the gate's key of this host's CPUs, as far as software devices go.
const softwareSlot = "software"

// acquire takes a port for a probe of this node, waiting for it until patience ends. On a software device every probe is a
// heavy one, and one at a time on the whole host: they would measure each other.
func (n *Node) acquire(ctx context.Context, p *LocalPort, heavy bool, patience time.Time) (release func(), err error) {
	ctx, cancel := context.WithDeadline(ctx, patience)
	defer cancel()
	slot := func() {}
	if p.software {
		if slot, err = n.Gate.Acquire(ctx, softwareSlot, true); err != nil {
			return nil, err
		}
	}
	port, err := n.Gate.Acquire(ctx, p.Key(), heavy || p.software)
	if err != nil {
		slot()
		return nil, err
	}
	if heavy {
		n.busy(p.Key(), 1)
	}
	return func() {
		if heavy {
			n.busy(p.Key(), -1)
		}
		port()
		slot()
	}, nil
}

// randomPSNs returns n first packet sequence numbers. Random, so that a packet of a dead session does not fit a new one.
func randomPSNs(n int) []uint32 {
	b := make([]byte, 4*n)
	_, _ = rand.Read(b) // never fails, see crypto/rand
	out := make([]uint32, n)
	for i := range out {
		out[i] = binary.LittleEndian.Uint32(b[4*i:]) & (1<<24 - 1)
	}
	return out
}

// wireEndpoint is an endpoint's address as the peer must know it.
func (p *LocalPort) wireEndpoint(a verbs.Address) control.Endpoint {
	caps := p.dev.Caps()
	e := control.Endpoint{
		LID: p.State.LID, LinkLayer: string(p.State.LinkLayer), QPs: make([]control.QP, len(a.QPN)), RKey: a.RKey, Addr: a.Addr, Stride: a.Stride,
		QKey: a.QKey, ActiveMTU: p.State.ActiveMTU, RDAtom: min(caps.MaxInitRDAtom, 255), DestRDAtom: min(caps.MaxRDAtom, 255),
		RateBPS: uint64(p.State.RateGbps * 1e9 / 8),
	}
	for i := range e.QPs {
		e.QPs[i] = control.QP{QPN: a.QPN[i], PSN: a.PSN[i]}
	}
	return e
}

// peerAddress is the reverse of wireEndpoint.
func peerAddress(e *control.Endpoint, gid *control.GID) verbs.Address {
	a := verbs.Address{LID: e.LID, RKey: e.RKey, Addr: e.Addr, Stride: e.Stride, QKey: e.QKey}
	if gid != nil {
		a.GID = gid.Addr.As16()
		a.GIDType = verbs.GIDType(gid.Type)
	}
	for _, q := range e.QPs {
		a.QPN = append(a.QPN, q.QPN)
		a.PSN = append(a.PSN, q.PSN)
	}
	return a
}

func wireGIDs(gids []verbs.GID) []control.GID {
	out := make([]control.GID, 0, len(gids))
	for _, g := range gids[:min(len(gids), control.MaxGIDs)] {
		out = append(out, control.GID{Addr: g.Addr, Type: string(g.Type)})
	}
	return out
}

// psns returns the first packet sequence numbers of n queue pairs.
func (n *Node) psns(count int) []uint32 {
	out := randomPSNs(count)
	if n.FirstPSN != nil {
		for i := range out {
			out[i] = n.FirstPSN() & (1<<24 - 1)
		}
	}
	return out
}

// path is what an end sets its queue pairs to. gid is its own source GID's index.
func path(r *control.OpenRequest, gid, mtu int, own, peer *control.Endpoint) verbs.Path {
	return verbs.Path{
		GIDIndex: gid, MTU: mtu, ServiceLevel: r.ServiceLevel, TrafficClass: r.TrafficClass, FlowLabel: r.FlowLabel, HopLimit: hopLimit,
		Timeout: r.Timeout, Retries: r.Retries, RNRRetry: r.RNRRetry, MinRNRTimer: minRNRTimer,
		RDAtom: min(own.RDAtom, peer.DestRDAtom), DestRDAtom: min(own.DestRDAtom, peer.RDAtom),
	}
}

// gidIndex finds the table index of one of the port's GIDs; -1 if there is none, as on InfiniBand.
func (p *LocalPort) gidIndex(g *control.GID) int {
	if g == nil {
		return -1
	}
	for _, own := range p.GIDs {
		if own.Addr == g.Addr && string(own.Type) == g.Type {
			return own.Index
		}
	}
	return -1
}

// onlyLinkLocal reports whether an end has lost, or never had, an address that is good beyond its link. Two such ends may
// well talk; one of them and one with an address can't, and it is the former that lacks something.
func onlyLinkLocal(gids []verbs.GID) bool {
	for _, g := range gids {
		if !g.Addr.IsLinkLocalUnicast() {
			return false
		}
	}
	return true
}

// recheck looks whether a run that failed did so because of this end: the device is gone, the port went down, or the GID in
// use is no longer ours. nil if this end is as it was.
func (n *Node) recheck(was *LocalPort, gidIndex int) *failure {
	now, f := n.find(was.Device, was.Port)
	switch {
	case f != nil:
		if f.reason == NoDevice || f.reason == NoRDMA {
			f.reason = DeviceRemoved
		}
		f.stage = StageRun
		return f
	case gidIndex < 0:
		return nil
	}
	for _, old := range was.GIDs {
		if old.Index != gidIndex {
			continue
		}
		for _, g := range now.GIDs {
			if g == old {
				return nil
			}
		}
		return fail(StageRun, GIDNotAssigned, ScopeLocal, "%s port %d: the GID in use, %s at index %d, is no longer assigned", was.Device, was.Port, old.Addr, old.Index)
	}
	return nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// detached gives clean-up its own bounded time, whatever became of the caller's.
func detached(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), d)
}

func wireEvidence(e *EndEvidence) *control.Evidence {
	if e == nil {
		return nil
	}
	return (*control.Evidence)(e)
}

// specOf is the probe that a responder is asked to take part in.
func specOf(r *control.OpenRequest) Spec {
	s := Spec{
		Kind: Kind(r.Kind), Transport: verbs.Transport(r.Transport), Op: verbs.Op(r.Op), QPs: len(r.Endpoint.QPs), RxDepth: r.RxDepth, Sizes: []int{r.MaxMsg},
		Bidirectional: r.Shape.Bidirectional, Reverse: r.Shape.Reverse, ReadShare: float64(r.Shape.Mixed) / 1000, Verify: r.Shape.Verify,
		Events: r.Shape.Events, Threads: r.Shape.Threads, RateLimit: r.Shape.Rate, TxDepth: r.Shape.TxDepth, CQMod: r.Shape.CQMod,
		PostList: r.Shape.PostList, Inline: r.Shape.Inline, PKey: r.PKey,
	}
	if s.Reverse {
		s.Duration = time.Second // the initiator's to end
	}
	return s.WithDefaults()
}

// wire is what the responder must know of a spec's shape.
func (s Spec) wire() control.Shape {
	w := control.Shape{
		Bidirectional: s.Bidirectional, Reverse: s.Reverse, Mixed: s.readPermille(), Verify: s.Verify, Events: s.Events, Threads: s.Threads, Rate: s.RateLimit,
	}
	if s.peerSends() || s.Verify { // which both ends make room for alike
		w.TxDepth, w.CQMod, w.PostList, w.Inline = s.TxDepth, s.CQMod, s.PostList, max(0, s.Inline)
	}
	return w
}

func (s Spec) readPermille() int { return int(math.Round(s.ReadShare * 1000)) }

// endpoint is one end of a session for messages of up to maxMsg bytes, but for its port and memory.
func (s Spec) endpoint(initiator bool, maxMsg int) verbs.EndpointSpec {
	e := verbs.EndpointSpec{
		Transport: s.Transport, Op: s.Op, Initiator: initiator, Mixed: s.ReadShare > 0, Events: s.Events, QPs: s.QPs, Threads: s.Threads,
		TxDepth: 1, CQMod: 1, PostList: 1, MaxMsg: maxMsg, BothWays: s.peerSends(),
	}
	if s.Transport == verbs.UD {
		e.QKey = rand32() &^ (1 << 31) // the high bit is the kernel's
	}
	pingPong := s.Kind == Latency && !s.Op.OneSided()
	sends, receives := initiator != s.Reverse || s.Bidirectional, s.Op.Receives() && (initiator == s.Reverse || s.Bidirectional)
	switch {
	case pingPong:
		e.BothWays, e.TxDepth, e.Inline = true, latencyDepth, max(0, s.Inline)
		if initiator {
			e.TxDepth = s.TxDepth
		}
		receives = s.Op.Receives()
	case s.Kind == Latency:
		if initiator {
			e.TxDepth = s.TxDepth
		}
		receives = false
	case sends:
		e.TxDepth, e.CQMod, e.PostList, e.Inline = s.TxDepth, s.CQMod, s.PostList, max(0, s.Inline)
	}
	if receives {
		e.RxDepth = s.RxDepth
	}
	return e
}

func rand32() uint32 {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails, see crypto/rand
	return binary.LittleEndian.Uint32(b[:])
}

// reverseWarmup is how long the peer sends before it counts.
func (s Spec) reverseWarmup() time.Duration { return min(100*time.Millisecond, s.Duration/4) }

// options are the spec's part of a Result.
func (s Spec) options() Options {
	return Options{
		TxDepth: s.TxDepth, RxDepth: s.RxDepth, CQMod: s.CQMod, PostList: s.PostList, Threads: s.Threads, Events: s.Events, Bidirectional: s.Bidirectional,
		Reverse: s.Reverse, ReadShare: s.ReadShare, RateLimit: s.RateLimit, Verify: s.Verify, ServiceLevel: s.ServiceLevel, TrafficClass: s.TrafficClass,
		FlowLabel: s.FlowLabel, PKey: int(s.PKey),
	}
}

// pkeyIndex finds a partition in the port's table by the 15 bits that name it; of two entries the full member's.
func (p *LocalPort) pkeyIndex(pkey uint16) (int, *failure) {
	if pkey == 0 {
		return 0, nil
	}
	found := -1
	var have []string
	for i := range p.State.PKeys {
		v, err := p.dev.PKey(p.Port, i)
		if err != nil || v&0x7fff == 0 {
			continue
		}
		have = append(have, fmt.Sprintf("%#04x", v))
		if v&0x7fff == pkey&0x7fff && (found < 0 || v&0x8000 != 0) {
			found = i
		}
	}
	if found < 0 {
		return 0, fail(StageSetup, Incompatible, ScopeLocal, "%s port %d has no partition %#04x: it has %v", p.Device, p.Port, pkey, have)
	}
	return found, nil
}

// barrier lets sessions begin their timed parts together.
type barrier struct {
	mu      sync.Mutex
	missing int           // sessions that are not there yet
	open    chan struct{} // closed when none is
}

func newBarrier(n int) *barrier { return &barrier{missing: n, open: make(chan struct{})} }

func (b *barrier) arrive() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.missing--; b.missing == 0 {
		close(b.open)
	}
}

// turn is one session's place at a barrier. A nil one keeps nobody.
type turn struct {
	b    *barrier
	once sync.Once
}

// arrive is for a session that is there, or will never be.
func (t *turn) arrive() { t.once.Do(t.b.arrive) }

func (t *turn) wait(ctx context.Context) *failure {
	if t == nil {
		return nil
	}
	t.arrive()
	select {
	case <-t.b.open:
		return nil
	case <-ctx.Done():
		return fail(StageRun, Timeout, ScopeLocal, "the other sessions were not ready: %s", context.Cause(ctx))
	}
}
