package probe

import (
	"context"
	"crypto/rand"
	"encoding/binary"
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
