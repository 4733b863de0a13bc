package probe

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// Tolerances say how much of what a taint stands for is put up with at one end during a timed part. Of most taints it is a
// number of events, so that 0 makes any increase a taint. Of those in [Shares] it is a share: of the session's own packets,
// and for foreign traffic of what the port could have carried.
type Tolerances map[Taint]float64

// Shares are the taints that have a share, 0 to 1, as tolerance: some of that is on any busy fabric.
var Shares = []Taint{TaintCongestion, TaintPause, TaintForeignTraffic}

// DefaultTolerances returns the tolerances that hold unless the configuration says otherwise.
func DefaultTolerances() Tolerances {
	return Tolerances{
		TaintRetransmit: 0, TaintOutOfOrder: 0, TaintRNR: 0, TaintTimeout: 0, TaintDiscards: 0, TaintLinkErrors: 0,
		TaintCongestion: 0.01, TaintPause: 0.01, TaintForeignTraffic: 0.02,
	}
}

// noise is what a port carries for housekeeping (ARP, this session's own control channel) where all of a netdev's traffic is
// counted, in bytes. Less is never foreign traffic.
const noise = 256 << 10

// taint judges the result by its evidence and figures. A nil tolerance is the default one.
func (r *Result) taint(tolerance Tolerances) {
	if tolerance == nil {
		tolerance = DefaultTolerances()
	}
	sides := []struct {
		name string
		e    *EndEvidence
	}{{"local", r.Evidence.Local}, {"remote", r.Evidence.Remote}}
	for _, s := range signals {
		limit := tolerance[s.taint]
		if slices.Contains(Shares, s.taint) {
			limit *= float64(r.own.packets)
		}
		for _, side := range sides {
			r.counted(s.taint, s.classes, side.name, side.e, atMost(limit))
		}
	}
	for i, side := range sides {
		if side.e == nil {
			continue
		}
		own := flows{tx: r.own.local.tx + r.own.others.tx, rx: r.own.local.rx + r.own.others.rx}
		if i == 1 {
			own = r.own.local.mirror()
		}
		r.foreign(tolerance[TaintForeignTraffic], side.name, side.e, own)
		for _, c := range side.e.Conditions {
			d := TaintDetail{Taint: Taint(c.Taint), Side: side.name, Counter: c.Check, Note: c.Detail}
			if i == 1 { // the peer's node, not this one, is as it should not be
				d.Taint, d.Counter = TaintPeerTainted, c.Taint+": "+c.Check
			}
			r.addTaint(d)
		}
	}
	const thousandth = 1e-3
	if r.ClockResidual > thousandth {
		r.addTaint(TaintDetail{Taint: TaintClock, Side: "local", Counter: "clock", Note: fmt.Sprintf("two calibrations differ by %.2g", r.ClockResidual)})
	}
	for _, run := range r.Runs {
		if l := run.Latency; l != nil && run.Delayed > 0 && float64(run.Delayed) >= thousandth*float64(l.Samples) {
			r.addTaint(TaintDetail{Taint: TaintClock, Side: "local", Counter: "delayed samples", Delta: uint64(run.Delayed), Limit: uint64(thousandth * float64(l.Samples))})
		}
		if run.short {
			r.addTaint(TaintDetail{Taint: TaintShortRun, Side: "local", Counter: "messages", Delta: run.Iterations})
		}
	}
	if r.mtuReduced > 0 && r.MTU != nil {
		r.addTaint(TaintDetail{Taint: TaintMTUReduced, Side: "local", Counter: "mtu", Delta: uint64(*r.MTU), Limit: uint64(r.mtuReduced)})
	}
	slices.SortStableFunc(r.Taints, func(a, b Taint) int { return cmp.Compare(slices.Index(Taints, a), slices.Index(Taints, b)) })
	if len(r.Taints) > 0 {
		r.Outcome = Tainted
	}
}

func (r *Result) addTaint(d TaintDetail) {
	if !slices.Contains(r.Taints, d.Taint) {
		r.Taints = append(r.Taints, d.Taint)
	}
	r.TaintLog = append(r.TaintLog, d)
}

// counted finds a taint in the counters of an end: all that belong to it, each once, together above the limit.
func (r *Result) counted(t Taint, classes []counters.Class, side string, e *EndEvidence, limit uint64) {
	if e == nil {
		return
	}
	var moved []string
	for _, c := range classes {
		moved = union(moved, e.Moved[string(c)])
	}
	var sum uint64
	for _, name := range moved {
		sum += min(e.Counters[name], math.MaxInt64-min(sum, math.MaxInt64))
	}
	if sum <= limit {
		return
	}
	for _, name := range moved {
		r.addTaint(TaintDetail{Taint: t, Side: side, Counter: name, Delta: e.Counters[name], Limit: limit})
	}
}

// foreign compares the bytes that an end's port counted with those that the session put on the wire there. Two things count:
// RDMA traffic and, on hardware apart from it, that of the netdev. Drivers differ in whether the netdev's has RDMA in it, so
// it must exceed the session's by itself.
func (r *Result) foreign(share float64, side string, e *EndEvidence, own flows) {
	if slices.Contains(r.Taints, TaintRetransmit) {
		e.CannotTell = union(e.CannotTell, []string{string(TaintForeignTraffic)}) // what was sent again is the session's own
		return
	}
	capacity := max(float64(own.tx), float64(own.rx), r.own.rate*r.own.seconds)
	limit := max(noise, atMost(share*capacity))
	for _, c := range []struct {
		name  string
		known map[string]uint64
		own   uint64
	}{
		{counters.TxBytes, e.Traffic, own.tx}, {counters.RxBytes, e.Traffic, own.rx},
		{"netdev/tx_bytes", e.Counters, own.tx}, {"netdev/rx_bytes", e.Counters, own.rx},
	} {
		if total := c.known[c.name]; total > c.own && total-c.own > limit {
			r.addTaint(TaintDetail{Taint: TaintForeignTraffic, Side: side, Counter: c.name, Delta: total - c.own, Limit: limit})
		}
	}
}

// atMost makes a count of a share.
func atMost(v float64) uint64 {
	if !(v > 0) {
		return 0
	}
	return uint64(min(v, math.MaxInt64))
}

// CannotTell lists, for each end of a result with figures, the taints that it has no signal of: all of them where no counters
// could be read.
func (r *Result) CannotTell() map[string][]string {
	out := map[string][]string{}
	if !r.Usable() {
		return out
	}
	for side, e := range map[string]*EndEvidence{"local": r.Evidence.Local, "remote": r.Evidence.Remote} {
		switch {
		case e == nil:
			out[side] = wordsOf(Tolerable())
		case len(e.CannotTell) > 0:
			out[side] = slices.Clone(e.CannotTell)
		}
	}
	return out
}

// Tolerable are the taints that have a tolerance.
func Tolerable() []Taint {
	var out []Taint
	for _, s := range signals {
		out = append(out, s.taint)
	}
	return append(out, TaintForeignTraffic)
}

func wordsOf(taints []Taint) []string {
	out := make([]string, len(taints))
	for i, t := range taints {
		out[i] = string(t)
	}
	return out
}

// flows are the bytes that a session puts on the wire, at most, as one end counts them.
type flows struct{ tx, rx uint64 }

func (f flows) mirror() flows { return flows{tx: f.rx, rx: f.tx} }

// ownTraffic is what a session itself did during its timed parts.
type ownTraffic struct {
	local   flows
	others  flows   // of the group's other sessions over this end's port
	packets uint64  // with payload
	seconds float64 // of the timed parts
	rate    float64 // of the slower port, bytes per second; 0: unknown
}

func (o *ownTraffic) add(p ownTraffic) {
	o.local.tx += p.local.tx
	o.local.rx += p.local.rx
	o.packets += p.packets
	o.seconds += p.seconds
	o.rate = p.rate
}

// Bytes around the payload of a packet, at most. A driver counts the checksum and the VLAN tag or not; what is too much here
// is not found as foreign.
const (
	ethernet  = 14 + 4 + 4 // header, VLAN tag, FCS
	lrh       = 8 + 2      // InfiniBand's local header and VCRC
	grh       = 40         // as long as an IPv6 header
	ipv4, udp = 20, 8
	bth       = 12 + 4 // with ICRC
	reqHeader = 28     // the longest header of a first packet: an atomic's; RETH and immediate data have 20
	ackHeader = 12     // AETH and an atomic's answer
)

// header is the overhead of each packet of a session on this port.
func (p *LocalPort) header(gid int) int {
	if p.State.LinkLayer != verbs.Ethernet {
		if gid < 0 {
			return lrh + bth
		}
		return lrh + grh + bth
	}
	for _, g := range p.GIDs {
		if g.Index == gid && g.Addr.Is4() && g.Type == verbs.GIDRoCEv2 {
			return ethernet + ipv4 + udp + bth
		}
	}
	return ethernet + grh + udp + bth
}

// traffic is what the messages of a timed part put on the wire.
func (s *initiation) traffic(v *spoken) ownTraffic {
	o := s.flows(v.size, v.timed.Posted)
	if s.spec.peerSends() && v.rep.Sent != nil { // warm-up and all: what is too much here is not found as foreign
		back := s.flows(v.size, *v.rep.Sent)
		o.packets += back.packets
		o.local.tx += back.local.rx
		o.local.rx += back.local.tx
	}
	o.seconds = (v.to - v.from).Seconds()
	if !s.port.software { // whose rate is a word
		o.rate = s.port.State.RateGbps * 1e9 / 8
		if theirs := float64(s.rep.Endpoint.RateBPS); theirs > 0 && (o.rate <= 0 || theirs < o.rate) {
			o.rate = theirs
		}
	}
	return o
}

// flows are n messages of one end on the wire, as that end counts them.
func (s *initiation) flows(size int, n uint64) ownTraffic {
	mtu := 4096
	if s.r.MTU != nil && *s.r.MTU > 0 {
		mtu = *s.r.MTU
	}
	head := uint64(s.port.header(s.gidIndex))
	packets := n * uint64(max(1, (size+mtu-1)/mtu))
	payload := n*uint64(size) + packets*head + n*reqHeader
	answers := packets * (head + ackHeader) // one for each packet at most, mostly one for many
	o := ownTraffic{packets: packets}
	switch {
	case s.spec.Kind == Latency && !s.spec.Op.OneSided(): // there and back
		o.packets *= 2
		o.local = flows{payload + answers, payload + answers}
	case s.spec.ReadShare > 0: // each way at most all of it
		o.local = flows{payload, payload + answers}
	case s.spec.Op.OneSided(): // a small request, and the payload is the answer
		o.local = flows{tx: n * (head + reqHeader), rx: n*uint64(size) + answers}
	default:
		o.local = flows{tx: payload, rx: answers}
	}
	return o
}
