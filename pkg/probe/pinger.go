package probe

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// pinger is a port's UD echo with those it asks and those it answers. It lives as long as the device works.
type pinger struct {
	echo *verbs.Pinger
	node *Node

	mu     sync.Mutex
	port   *LocalPort // as it was at looked
	looked time.Time
	asks   map[askKey]*asked
	closed bool

	door   chan struct{} // holds one: who fetches a ticket
	ticket *ticket       // the newest; guarded by mu

	answering sync.Mutex // guards answers; held while an address handle is made, which may take its time
	answers   map[answerKey]*answered
}

// portFresh is how long a port is taken to be as it was: to look costs more than to ping.
const portFresh = 5 * time.Second

// pinger returns the UD echo of one of this node's ports; with a failure the port may be nil.
func (n *Node) pinger(device string, num int) (*pinger, *failure) {
	key := (&LocalPort{Device: device, Port: num}).Key()
	n.mu.Lock()
	p := n.pingers[key]
	n.mu.Unlock()
	if p != nil && p.fresh() {
		return p, nil
	}
	port, f := n.find(device, num)
	if f != nil {
		return nil, f
	}
	return n.pingerOf(port)
}

// pingerOf returns the UD echo of a port that was just looked at. One whose device failed is made anew.
func (n *Node) pingerOf(port *LocalPort) (*pinger, *failure) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if p := n.pingers[port.Key()]; p != nil {
		if p.works() {
			p.mu.Lock()
			p.port, p.looked = port, time.Now()
			p.mu.Unlock()
			return p, nil
		}
		n.Log.Warn("made anew: the queue pair for pings failed", "device", port.Device, "port", port.Port, "err", p.echo.Err())
		n.endPingerLocked(port.Key())
	}
	spec := verbs.PingerSpec{Port: port.Port, Rate: portPingMax}
	if !port.software {
		spec.Spin = pingSpin
	}
	echo, err := port.dev.NewPinger(spec)
	if err != nil {
		return nil, setupFailure(err)
	}
	p := &pinger{
		echo: echo, node: n, port: port, looked: time.Now(), asks: map[askKey]*asked{}, answers: map[answerKey]*answered{}, door: make(chan struct{}, 1),
	}
	echo.Busy(n.heavy[port.Key()])
	if n.pingers == nil {
		n.pingers = map[string]*pinger{}
	}
	n.pingers[port.Key()] = p
	return p, nil
}

// busy tells pingers of other nodes that a heavy probe uses the port: by 1 when it begins, -1 when it ends.
func (n *Node) busy(key string, by int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.heavy == nil {
		n.heavy = map[string]int{}
	}
	if n.heavy[key] += by; n.heavy[key] == 0 {
		delete(n.heavy, key)
	}
	if p := n.pingers[key]; p != nil {
		p.echo.Busy(by)
	}
}

// endPingersLocked frees the UD echoes of a device; empty: of all.
func (n *Node) endPingersLocked(device string) {
	for key, p := range n.pingers {
		if device == "" || p.device() == device {
			n.endPingerLocked(key)
		}
	}
}

func (n *Node) endPingerLocked(key string) {
	p := n.pingers[key]
	delete(n.pingers, key)
	p.mu.Lock()
	p.closed = true
	for _, a := range p.asks {
		a.expiry.Stop()
	}
	p.mu.Unlock()
	p.answering.Lock()
	for _, a := range p.answers {
		a.expiry.Stop()
	}
	p.answers = nil // whoever comes now finds the echo closed
	p.answering.Unlock()
	if err := p.echo.Close(); err != nil {
		n.Log.Warn("the queue pair for pings was not freed cleanly", "port", key, "err", err)
	}
}

func (p *pinger) works() bool {
	select {
	case <-p.echo.Ended():
		return false
	default:
		return true
	}
}

func (p *pinger) fresh() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.works() && time.Since(p.looked) < portFresh
}

func (p *pinger) device() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.port.Device
}

// at returns the port as it was seen last.
func (p *pinger) at() *LocalPort {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.port
}

func (p *pinger) endpoint(port *LocalPort) control.PingEndpoint {
	return control.PingEndpoint{
		LID: port.State.LID, LinkLayer: string(port.State.LinkLayer), QPN: p.echo.QPN(), QKey: p.echo.QKey(), ActiveMTU: port.State.ActiveMTU,
	}
}

// ---- the gate ----

// ticket is a place at the gate that the pings of a port share, so that dozens of peers can be asked at a time. It can be joined
// for a moment only: whoever waits for the port has its turn then.
type ticket struct {
	release func()
	users   int
	until   time.Time
}

const ticketTime = 250 * time.Millisecond

// enter takes a place at the gate, or joins one.
func (p *pinger) enter(ctx context.Context, patience time.Time) (leave func(), err error) {
	if leave = p.join(); leave != nil {
		return leave, nil
	}
	wait, cancel := context.WithDeadline(ctx, patience)
	defer cancel()
	select {
	case p.door <- struct{}{}:
		defer func() { <-p.door }()
	case <-wait.Done():
		return nil, context.Cause(wait)
	}
	if leave = p.join(); leave != nil {
		return leave, nil
	}
	release, err := p.node.acquire(wait, p.at(), false, patience)
	if err != nil {
		return nil, err
	}
	t := &ticket{release: release, users: 1, until: time.Now().Add(ticketTime)}
	p.mu.Lock()
	p.ticket = t
	p.mu.Unlock()
	return func() { p.exit(t) }, nil
}

func (p *pinger) join() func() {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.ticket
	if t == nil || t.users == 0 || time.Now().After(t.until) {
		return nil
	}
	t.users++
	return func() { p.exit(t) }
}

func (p *pinger) exit(t *ticket) {
	p.mu.Lock()
	t.users--
	last := t.users == 0
	p.mu.Unlock()
	if last {
		t.release()
	}
}

// ---- those it asks ----

type askKey struct {
	address, device         string
	port, shift             int
	level, class, flowLabel int
}

// asked is a peer that this end asks: what it said of itself, and the address handle to it, which goes when it was not used for
// a while.
type asked struct {
	p      *pinger
	key    askKey
	users  int // guarded by p.mu
	expiry *time.Timer

	mu       sync.Mutex // held while the peer is told of this end
	req      *control.PingRequest
	rep      *control.PingReply
	gids     string // of this end, as they were told
	told     time.Time
	peer     verbs.PingPeer
	taken    bool
	gidIndex int
}

// ask finds or makes the peer's entry; leave it.
func (p *pinger) ask(key askKey) *asked {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.asks[key]
	if a == nil {
		a = &asked{p: p, key: key, gidIndex: -1}
		a.expiry = time.AfterFunc(2*pingLease, a.expire)
		p.asks[key] = a
	}
	a.users++
	return a
}

func (a *asked) leave() {
	a.p.mu.Lock()
	defer a.p.mu.Unlock()
	a.users--
	if !a.p.closed {
		a.expiry.Reset(2 * pingLease)
	}
}

func (a *asked) expire() {
	a.p.mu.Lock()
	defer a.p.mu.Unlock()
	if a.users > 0 || a.p.asks[a.key] != a {
		return // leave sets the time anew
	}
	delete(a.p.asks, a.key)
	if a.taken {
		a.p.echo.Remove(a.peer)
	}
}

// epoch changes when the peer is another than it was.
func (a *asked) epoch() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.peer.Nonce
}

// take notes what the peer said, with a.mu held.
func (a *asked) take(p *pinger, req *control.PingRequest, rep *control.PingReply, to Target) *failure {
	port := p.at()
	gid := port.gidIndex(rep.InitiatorGID)
	if gid < 0 && len(port.GIDs) > 0 && port.State.LinkLayer == verbs.Ethernet {
		return fail(StageSetup, GIDMismatch, ScopePeer, "%s chose no GID of ours", to.Name)
	}
	old := a.rep
	if !a.taken || gid != a.gidIndex || old.Nonce != rep.Nonce || old.End != rep.End || (old.GID == nil) != (rep.GID == nil) || old.GID != nil && *old.GID != *rep.GID {
		path := verbs.PingPath{
			GIDIndex: gid, LID: rep.End.LID, QPN: rep.End.QPN, QKey: rep.End.QKey, HopLimit: hopLimit,
			ServiceLevel: req.ServiceLevel, TrafficClass: req.TrafficClass, FlowLabel: req.FlowLabel,
		}
		if rep.GID != nil {
			path.GID = rep.GID.Addr.As16()
		}
		peer, err := p.echo.Ask(path, rep.Nonce)
		if err != nil {
			return setupFailure(err)
		}
		if a.taken {
			p.echo.Remove(a.peer)
		}
		a.peer, a.taken, a.gidIndex = peer, true, gid
	}
	a.rep, a.told, a.gids = rep, time.Now(), fmt.Sprint(port.GIDs)
	return nil
}

// describe fills in what a result says of the peer.
func (a *asked) describe(r *Result) {
	a.mu.Lock()
	defer a.mu.Unlock()
	rep, gid := a.rep, a.gidIndex
	mtu := min(a.p.at().State.ActiveMTU, rep.End.ActiveMTU)
	r.PeerDev, r.PeerPort, r.MTU = &rep.Device, &rep.Port, &mtu
	if rep.Host != "" && rep.Host == a.p.node.host {
		r.Path = "same_node"
	}
	if gid >= 0 {
		r.GIDIndex = &gid
	}
}

// ---- those it answers ----

// answerKey is an initiator's port, and the way to it.
type answerKey struct {
	instance                string
	source                  control.Source
	level, class, flowLabel int
}

type answered struct {
	peer   verbs.PingPeer
	end    control.PingEndpoint
	gids   string // both ends'
	expiry *time.Timer
}

// answer has an initiator's pings answered until its lease ends, and returns the nonce that they must carry.
func (p *pinger) answer(req *control.PingRequest, own *verbs.GID, theirs *control.GID, lease time.Duration) (uint64, error) {
	key := answerKey{req.Instance, req.Source, req.ServiceLevel, req.TrafficClass, req.FlowLabel}
	gids := ""
	if own != nil {
		gids = fmt.Sprint(*own, *theirs)
	}
	p.answering.Lock()
	defer p.answering.Unlock()
	if a := p.answers[key]; a != nil {
		if a.end == req.End && a.gids == gids {
			a.expiry.Reset(lease)
			return a.peer.Nonce, nil
		}
		p.forget(key, a)
	}
	path := verbs.PingPath{
		GIDIndex: -1, LID: req.End.LID, QPN: req.End.QPN, QKey: req.End.QKey, HopLimit: hopLimit,
		ServiceLevel: req.ServiceLevel, TrafficClass: req.TrafficClass, FlowLabel: req.FlowLabel,
	}
	if own != nil {
		path.GIDIndex, path.GID = own.Index, theirs.Addr.As16()
	}
	peer, err := p.echo.Answer(path, pingRate)
	if err != nil {
		return 0, err
	}
	a := &answered{peer: peer, end: req.End, gids: gids}
	a.expiry = time.AfterFunc(lease, func() {
		p.answering.Lock()
		defer p.answering.Unlock()
		if p.answers[key] == a {
			p.forget(key, a)
		}
	})
	if p.answers != nil {
		p.answers[key] = a
	}
	return peer.Nonce, nil
}

func (p *pinger) forget(key answerKey, a *answered) {
	a.expiry.Stop()
	delete(p.answers, key)
	p.echo.Remove(a.peer)
}
