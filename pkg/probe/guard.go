package probe

import (
	"context"
	"fmt"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// Guard says when heavy probes must leave a port alone, for the sake of what else this node does. Both roles ask it. Package guard has
// the one that daemons use.
type Guard interface {
	// Begin admits a heavy probe to a port. The function that it returns is to be called when the probe is over, once, with the bytes that
	// it put on the wire there. Otherwise the refusal says why it may not run.
	Begin(ctx context.Context, u Use) (end func(bytes uint64), no *Refusal)
	// Traffic is how much of others' traffic a port may carry, as a share of its line rate, before a heavy probe (0: any amount), and
	// whether to give up one under way when it sees more.
	Traffic() (limit float64, abort bool)
}

// Use is what a heavy probe wants of a port.
type Use struct {
	Port  string        // as at the gate
	Bytes uint64        // that it will put on the wire, if known
	Time  time.Duration // of its timed parts, if known
}

// Refusal is a probe that may not run now.
type Refusal struct {
	Reason  Reason // of [SkipReasons]
	Detail  string
	Passing bool // it may be over soon: asking again makes sense
}

const (
	guardRetry  = time.Second            // about how long to wait before what is passing is looked at again
	idleWindow  = time.Second            // over which traffic is measured before a heavy probe
	watchEvery  = 100 * time.Millisecond // while one is under way
	watchWindow = 20                     // looks that are compared with the newest one
)

// errForeign ends a run that is in others' way.
type errForeign struct{ detail string }

func (e *errForeign) Error() string { return e.detail }

// paused says why this node is to be left alone, and leaves others alone; empty if it isn't.
func (n *Node) paused() string {
	if n.LameDuck == nil {
		return ""
	}
	return n.LameDuck()
}

// guarded reports whether guards apply: to heavy probes of nodes that have some.
func (n *Node) guarded(heavy bool) bool { return heavy && n.Guard != nil }

// begin asks the guard, if there is one.
func (n *Node) begin(ctx context.Context, heavy bool, u Use) (end func(uint64), no *Refusal) {
	if !n.guarded(heavy) {
		return func(uint64) {}, nil
	}
	return n.Guard.Begin(ctx, u)
}

// idle measures whether others use a port that this process uses for nothing itself. What can't be told refuses nothing, which the log
// says once for a port. No guard, no time spent.
func (n *Node) idle(ctx context.Context, p *LocalPort, heavy bool) *Refusal {
	if !n.guarded(heavy) {
		return nil
	}
	limit, _ := n.Guard.Traffic()
	if limit <= 0 {
		return nil
	}
	rate := p.rate()
	if rate <= 0 {
		n.blind(p, "its line rate is not known")
		return nil
	}
	grown := n.Meter.Start(ctx, p.Device, p.Port)
	began := time.Now()
	t := time.NewTimer(idleWindow)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
		return nil // whoever asked ends by that
	}
	e := grown(ctx)
	seen := trafficOf(e)
	if !seen.known {
		n.blind(p, "its driver counts no bytes")
		return nil
	}
	allowed := max(noise, atMost(limit*rate*time.Since(began).Seconds()))
	if most := max(seen.tx, seen.rx); most > allowed {
		return &Refusal{
			Reason: ForeignTraffic, Passing: true,
			Detail: fmt.Sprintf("%s port %d of %s carries %.3g %% of its line rate in traffic of others; guards.max_utilization is %.3g %%",
				p.Device, p.Port, n.Name, 100*float64(most)/(rate*time.Since(began).Seconds()), 100*limit),
		}
	}
	return nil
}

// blind tells, once for a port, that its traffic can't be guarded.
func (n *Node) blind(p *LocalPort, why string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.blinds[p.Key()] {
		return
	}
	if n.blinds == nil {
		n.blinds = map[string]bool{}
	}
	n.blinds[p.Key()] = true
	n.Log.Warn("guards.max_utilization can't be held on this port, heavy probes run there whatever else does", "device", p.Device, "port", p.Port, "why", why)
}

// rate is the port's line rate, bytes per second; 0: unknown. Of a software device it is what its netdev claims.
func (p *LocalPort) rate() float64 { return max(0, p.State.RateGbps*1e9/8) }

// seen is what a port carried, by its counters.
type seen struct {
	tx, rx uint64 // bytes; of RDMA traffic and all of the netdev's, whichever is more
	known  bool
}

func trafficOf(e *EndEvidence) seen {
	var s seen
	if e == nil {
		return s
	}
	for _, c := range []struct {
		from  map[string]uint64
		name  string
		total *uint64
	}{
		{e.Traffic, counters.TxBytes, &s.tx}, {e.Traffic, counters.RxBytes, &s.rx}, {e.Counters, "netdev/tx_bytes", &s.tx}, {e.Counters, "netdev/rx_bytes", &s.rx},
	} {
		if v, ok := c.from[c.name]; ok {
			*c.total, s.known = max(*c.total, v), true
		}
	}
	return s
}

// refused is a failure of the initiator, for what its own guard refuses.
func refused(no *Refusal) (f *failure, retry time.Duration) {
	f = skip(StageAdmit, no.Reason, ScopeLocal, "%s", no.Detail)
	if no.Passing {
		retry = guardRetry
	}
	return f, retry
}

// toControl is the same for the responder.
func (no *Refusal) toControl() *control.Error {
	e := &control.Error{Reason: string(no.Reason), Detail: no.Detail}
	if no.Reason == BusyPort {
		e.Reason = string(Busy)
	}
	if no.Passing {
		e.RetryAfter = guardRetry.Seconds()
	}
	return e
}

// look is what was known at one moment of a run.
type look struct {
	at  time.Time
	all seen
	own uint64 // messages that have completed
}

// watch gives up a timed part, by cancel, when the port carries more than the session accounts for. It looks only while this end alone
// sends: of what a peer sends it does not know how much there is yet.
func (s *initiation) watch(ctx context.Context, size int, role verbs.Role, cancel context.CancelCauseFunc) (end func()) {
	n := s.i.Node
	if !n.guarded(s.spec.Heavy()) || s.spec.peerSends() || s.start != nil { // or others of this node's, at the same time
		return func() {}
	}
	limit, abort := n.Guard.Traffic()
	rate := s.port.rate()
	if !abort || limit <= 0 || rate <= 0 {
		return func() {}
	}
	ctx, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	grown := n.Meter.Start(ctx, s.port.Device, s.port.Port)
	looks := []look{{at: time.Now()}}
	go func() {
		defer close(done)
		t := time.NewTicker(watchEvery)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
			}
			e := grown(ctx)
			now := look{all: trafficOf(e), at: time.Now()}
			now.own = s.ep.Progress(role) // after the counters, so that nothing of the session's is taken for others'
			if !now.all.known {
				if ctx.Err() == nil {
					n.blind(s.port, "its driver counts no bytes")
				}
				return
			}
			if e.Classes[string(counters.RetransmitLocal)]+e.Classes[string(counters.RetransmitPeer)] > 0 {
				return // what was sent again is the session's own
			}
			if now.own < looks[len(looks)-1].own { // only now has the timed part begun
				looks = nil
			}
			for _, past := range looks {
				if most := s.others(past, now, size); most > max(noise, atMost(limit*rate*now.at.Sub(past.at).Seconds())) {
					cancel(&errForeign{fmt.Sprintf("%s port %d carried %d bytes of others within %s: the run was given up (guards.abort_on_traffic)",
						s.port.Device, s.port.Port, most, now.at.Sub(past.at).Round(time.Millisecond))})
					return
				}
			}
			if looks = append(looks, now); len(looks) > watchWindow {
				looks = looks[1:]
			}
		}
	}()
	return func() {
		stop()
		<-done
	}
}

// others is the least that others sent or received between two looks. What the session had posted and not yet completed at the later one
// counts as its own.
func (s *initiation) others(a, b look, size int) uint64 {
	own := s.flows(size, b.own-a.own+uint64(s.spec.TxDepth*s.spec.QPs)).local
	most := uint64(0)
	for _, d := range [][2]uint64{{b.all.tx - min(a.all.tx, b.all.tx), own.tx}, {b.all.rx - min(a.all.rx, b.all.rx), own.rx}} {
		if d[0] > d[1] {
			most = max(most, d[0]-d[1])
		}
	}
	return most
}

// use is what a heavy probe is expected to take of this end's port: of one that runs for a time what the link takes.
func (p *LocalPort) use(s Spec) Use {
	u := Use{Port: p.Key()}
	for _, size := range s.Sizes {
		if s.Duration > 0 {
			u.Time += s.Duration * time.Duration(max(1, s.Repeat))
			continue
		}
		u.Bytes += uint64(size) * uint64(max(0, s.Iterations)+max(0, s.Warmup)) * uint64(s.QPs) * uint64(max(1, s.Repeat))
	}
	if u.Time > 0 {
		u.Bytes += atMost(p.rate() * u.Time.Seconds())
	}
	return u
}
