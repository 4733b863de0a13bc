package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// towardsPeer are the layers that need one.
var towardsPeer = []Layer{Route, Control, SmallMessage, LargeMessage, BothDirections}

const (
	resolveTime = 5 * time.Second
	dialTime    = 3 * time.Second
)

// trip is the way from one port of this node to the peer.
type trip struct {
	*examination
	port    *port
	host    string
	service string
	addr    netip.Addr // of the peer's control channel
	source  netip.Addr // the port's own on the way there; invalid if control goes another way than RDMA
	route   counters.Route
	broken  Layer // the first that failed

	seen []observation
}

// peer walks through the layers towards the peer, from the port that it returns; nil without a peer or a port.
func (e *examination) peer(ctx context.Context, usable []*port) *port {
	switch {
	case e.Node == nil:
		e.skipAll(towardsPeer, "a copied tree has no way to a peer")
		return nil
	case e.Peer == "":
		e.skipAll(towardsPeer, "no peer was named")
		return nil
	case len(usable) == 0:
		e.skipAll(towardsPeer, "this node has no port that could be used")
		return nil
	}
	t := &trip{examination: e}
	var err error
	if t.host, t.service, err = net.SplitHostPort(e.Peer); err != nil {
		t.host = e.Peer
	}
	steps := []struct {
		layer Layer
		look  func(context.Context) bool
	}{
		{Route, func(ctx context.Context) bool { return t.resolve(ctx) && t.choose(usable) && t.reach(ctx) }},
		{Control, t.greet}, {SmallMessage, t.small}, {LargeMessage, t.large}, {BothDirections, t.back},
	}
	for _, s := range steps {
		if t.broken != "" {
			e.skip(s.layer, e.Peer, fmt.Sprintf("%s did not go well", t.broken))
		} else if !s.look(ctx) {
			t.broken = s.layer
		}
	}
	if t.port == nil {
		t.port = usable[0]
	}
	if t.broken == Route || t.broken == Control {
		t.suspectGID()
	}
	t.judge()
	return t.port
}

func (e *examination) skipAll(layers []Layer, why string) {
	for _, l := range layers {
		e.skip(l, "peer", why)
	}
}

// resolve turns the peer's name into an address.
func (t *trip) resolve(ctx context.Context) bool {
	const check, expected = "peer's name", "an address"
	ctx, cancel := context.WithTimeout(ctx, resolveTime)
	defer cancel()
	list, err := net.DefaultResolver.LookupNetIP(ctx, "ip", t.host)
	if err != nil {
		t.add(Route, Failed, check, err.Error(), expected, "correct the name, or look at the resolver: getent hosts "+t.host)
		return false
	}
	slices.SortStableFunc(list, func(a, b netip.Addr) int { return family(a) - family(b) })
	t.addr = list[0].Unmap()
	if a, err := netip.ParseAddr(t.host); err != nil || a != t.addr {
		t.add(Route, OK, check, fmt.Sprintf("%s is %s", t.host, t.addr), expected, "")
	}
	return true
}

func family(a netip.Addr) int {
	if a.Unmap().Is4() {
		return 0
	}
	return 1
}

// choose picks the port whose netdev leads to the peer, else the first, and looks at the way there.
func (t *trip) choose(usable []*port) bool {
	const check, expected = "way to the peer", "by the RDMA port's netdev, or a network of the control channel's own"
	free, freeErr := counters.RouteTo(t.addr, netip.Addr{})
	from := func(p *port) bool {
		for _, g := range p.local.GIDs {
			if g.Addr.Is4() != t.addr.Is4() || g.Addr.IsLinkLocalUnicast() != t.addr.IsLinkLocalUnicast() {
				continue
			}
			r, err := counters.RouteTo(t.addr, g.Addr)
			if err == nil && (r.Netdev == p.netdev() || r.Local && g.Addr.IsLoopback()) {
				t.port, t.source, t.route = p, g.Addr, r
				return true
			}
		}
		return false
	}
	ordered := slices.Clone(usable)
	slices.SortStableFunc(ordered, func(a, b *port) int { // the kernel's own choice first
		return notSo(a.netdev() == free.Netdev) - notSo(b.netdev() == free.Netdev)
	})
	if slices.ContainsFunc(ordered, from) {
		t.add(Route, OK, check, fmt.Sprintf("from %s by %s%s, which is %s", t.source, t.route.Netdev, via(t.route), t.port.name()), expected, "")
		return true
	}
	t.port = usable[0]
	if freeErr != nil {
		t.add(Route, Failed, check, freeErr.Error(), expected, "add the route: ip route get "+t.addr.String())
		return false
	}
	t.route = free
	t.add(Route, OK, check, fmt.Sprintf("the control channel goes from %s by %s%s; RDMA from %s", free.Source, free.Netdev, via(free), t.port.name()), expected, "")
	return true
}

func notSo(b bool) int {
	if b {
		return 0
	}
	return 1
}

func via(r counters.Route) string {
	if r.Gateway.IsValid() {
		return fmt.Sprintf(" via %s", r.Gateway)
	}
	return ""
}

// client calls from the port's own address where the way to the peer leads by its netdev: that way is what is examined.
func (t *trip) client() *control.Client {
	if t.source.IsValid() {
		return control.NewClientFrom(t.source.AsSlice())
	}
	return control.NewClient()
}

// reach finds out whether the peer's host answers at all. That nothing listens is an answer.
func (t *trip) reach(ctx context.Context) bool {
	const check, expected = "peer's host", "answers TCP"
	d := net.Dialer{Timeout: dialTime}
	if t.source.IsValid() {
		d.LocalAddr = &net.TCPAddr{IP: t.source.AsSlice()}
	}
	start := time.Now()
	conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(t.addr.String(), t.service))
	took := time.Since(start)
	if err == nil {
		conn.Close()
	}
	switch {
	case err == nil, errors.Is(err, syscall.ECONNREFUSED):
		t.add(Route, OK, check, fmt.Sprintf("%s answers in %s", t.addr, took.Round(time.Microsecond)), expected, "")
		return true
	case ctx.Err() != nil:
		t.add(Route, Unknown, check, "interrupted", expected, "")
		return false
	}
	found := fmt.Sprintf("no answer from %s: %s", t.addr, cause(err))
	advice := fmt.Sprintf("ping %s; look at the peer's link and address, the VLAN, and filters", t.addr)
	hop := t.addr
	if t.route.Gateway.IsValid() {
		hop = t.route.Gateway
	}
	switch state := counters.Neighbour(t.route.Netdev, hop); state {
	case "":
	case "failed", "incomplete":
		found += fmt.Sprintf("; %s does not answer ARP on %s", hop, t.route.Netdev)
		advice = "the peer's host is down, its link is, its address is gone, or it is in another VLAN: look there first"
	default:
		found += fmt.Sprintf("; its neighbour entry on %s is %s", t.route.Netdev, state)
	}
	t.add(Route, Failed, check, found, expected, advice)
	return false
}

// cause is the innermost error: what the kernel said.
func cause(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		return op.Err
	}
	return err
}

// greet asks the peer's control channel who it is.
func (t *trip) greet(ctx context.Context) bool {
	const expected = "rdmabenchd answers"
	c := t.client()
	defer c.CloseIdle()
	start := time.Now()
	hello, err := c.Hello(ctx, t.Peer)
	if err == nil {
		t.add(Control, OK, t.Peer, fmt.Sprintf("node %s, minor version %d, in %s", hello.Node, hello.Minor, time.Since(start).Round(time.Microsecond)), expected, "")
		return true
	}
	if ctx.Err() != nil {
		t.add(Control, Unknown, t.Peer, "interrupted", expected, "")
		return false
	}
	var e *control.Error
	if !errors.As(err, &e) {
		e = &control.Error{Reason: string(probe.PeerUnresponsive), Detail: err.Error()}
	}
	t.add(Control, Failed, t.Peer, e.Error(), expected, controlAdvice[probe.Reason(e.Reason)])
	return false
}

var controlAdvice = map[probe.Reason]string{
	probe.Refused:          "nothing listens there: systemctl status rdmabenchd on the peer, or start `rdmabenchd respond`; is the port right?",
	probe.HandshakeTimeout: "the peer accepts and says nothing: its daemon is stopped or hangs (look at its state and load), or packets of full size are lost on the way",
	probe.Unreachable:      "the connection is dropped on the way: look at filters for 18516/tcp",
	probe.BadHandshake:     "something else listens on that port: correct the address",
	probe.VersionSkew:      "the peer's rdmabenchd is of another version, or something else listens there: compare `rdmabenchd --version`",
	probe.Unauthorized:     "the peer does not know this node's address: add it to peers and see control in its configuration",
}

// suspectGID looks back: a port whose only addresses are link-local reaches nobody if its address went away.
func (t *trip) suspectGID() {
	if !t.port.linkLocalOnly() {
		return
	}
	for i := range t.checks {
		if c := &t.checks[i]; c.Layer == GID && c.Check == t.port.name() && c.Verdict == Warning {
			c.Verdict = Failed
		}
	}
}

// largeSize is many packets, and few enough that a message still arrives where one packet in a hundred is lost.
const largeSize = 64 << 10

// The messages. Small ones go back and forth, so that a lost packet of either end shows; large ones go one way, then the other.
var (
	smallSpec = probe.Spec{Name: "doctor-small", Kind: probe.Latency, Op: verbs.Send, Iterations: 1000, Deadline: time.Minute}
	largeSpec = probe.Spec{Name: "doctor-large", Kind: probe.Bandwidth, Op: verbs.Write, Sizes: []int{largeSize}, Duration: 500 * time.Millisecond, TxDepth: 16, Warmup: 16, Deadline: 30 * time.Second}
	backSpec  = probe.Spec{Name: "doctor-back", Kind: probe.Bandwidth, Op: verbs.Read, Sizes: []int{largeSize}, Duration: 500 * time.Millisecond, TxDepth: 16, Warmup: 16, Deadline: 30 * time.Second}
)

// run probes the peer once.
func (t *trip) run(ctx context.Context, s probe.Spec) *probe.Result {
	c := t.client()
	defer c.CloseIdle()
	i := &probe.Initiator{Node: t.Node, Client: c}
	return i.Probe(ctx, s, probe.Target{Name: t.host, Address: t.Peer}, t.port.device, t.port.num)
}

func (t *trip) small(ctx context.Context) bool {
	const check, expected = "8 bytes back and forth", "each message answered"
	r := t.run(ctx, smallSpec)
	if !r.Usable() {
		t.unusable(SmallMessage, check, expected, r, "RDMA packets are lost while TCP passes: look at filters for 4791/udp, at routes of the RDMA addresses, at VLAN and PFC of the switches")
		return false
	}
	found := fmt.Sprintf("%d messages", r.Runs[0].Iterations)
	if l := r.Runs[0].Latency; l != nil && l.P50 != nil && l.P99 != nil {
		found += fmt.Sprintf(", %s p50 %.1f µs, p99 %.1f µs", l.Measure, *l.P50*1e6, *l.P99*1e6)
	}
	t.add(SmallMessage, OK, check, found, expected, "")
	t.agreed(r)
	t.during("small messages", r)
	return true
}

// agreed looks at what the two ends made of their MTUs.
func (t *trip) agreed(r *probe.Result) {
	if r.MTU == nil {
		return
	}
	const expected = "the same at both ends"
	own := t.port.local.State.ActiveMTU
	switch {
	case slices.Contains(r.Taints, probe.TaintMTUReduced):
		t.add(MTU, Warning, "path MTU", fmt.Sprintf("%d bytes, where one end would carry more (this one %d)", *r.MTU, own), expected,
			"give both ports' netdevs the same MTU: `rdmabenchd devices` on both")
	default:
		t.add(MTU, OK, "path MTU", fmt.Sprintf("%d bytes", *r.MTU), expected, "")
	}
}

func (t *trip) large(ctx context.Context) bool {
	const check, expected = "64 KiB messages to the peer", "arrive"
	r := t.run(ctx, largeSpec)
	if r.Usable() {
		t.bandwidth(LargeMessage, check, r)
		return true
	}
	if t.drowned(LargeMessage, check, expected, r) {
		return false
	}
	if lost(r) {
		if advice := t.narrow(ctx, r); advice != "" {
			t.add(LargeMessage, Failed, check, reasonOf(r), expected, advice)
			return false
		}
	}
	t.unusable(LargeMessage, check, expected, r, "small messages pass and large ones don't: look at the MTU of every switch and netdev on the way, then at PFC and buffers")
	return false
}

// lost reports whether a probe ended because packets did not arrive.
func lost(r *probe.Result) bool {
	return r.Outcome == probe.Failed && (*r.Reason == probe.RetryExceeded || *r.Reason == probe.Timeout)
}

// drowned notes large messages that did not get through where packets of small ones get lost already: that is the trouble.
func (t *trip) drowned(l Layer, check, expected string, r *probe.Result) bool {
	if !lost(r) || !slices.ContainsFunc(t.seen, observation.lossy) {
		return false
	}
	t.add(l, Unknown, check, "too many packets get lost, see counters: "+reasonOf(r), expected, "")
	return true
}

// narrow looks for a packet size that passes where the agreed MTU does not.
func (t *trip) narrow(ctx context.Context, r *probe.Result) string {
	if r.MTU == nil {
		return ""
	}
	s := largeSpec
	s.Sizes, s.Duration, s.Iterations, s.TxDepth, s.Warmup, s.Deadline = []int{16 << 10}, 0, 8, 4, 1, 8*time.Second
	for s.MTU = *r.MTU / 2; s.MTU >= 256; s.MTU /= 2 {
		if t.run(ctx, s).Usable() {
			return fmt.Sprintf("packets with %d bytes of payload pass and those with %d do not: something on the way has a smaller MTU than both ends; "+
				"look at every switch port and VLAN, or lower the MTU of both netdevs", s.MTU, *r.MTU)
		}
	}
	return ""
}

func (t *trip) back(ctx context.Context) bool {
	const check = "64 KiB messages from the peer"
	r := t.run(ctx, backSpec)
	if !r.Usable() {
		if t.drowned(BothDirections, check, "arrive", r) {
			return false
		}
		t.unusable(BothDirections, check, "arrive", r, "what goes to the peer passes and what comes from it does not: run doctor there against this node, compare routes, MTU and rp_filter of both")
		return false
	}
	t.bandwidth(BothDirections, check, r)
	return true
}

// slow is the share of a link's rate below which a port of hardware is not right.
const slow = 0.5

func (t *trip) bandwidth(l Layer, check string, r *probe.Result) {
	found, expected, v, advice := "moved", "arrive", OK, ""
	if b := r.Runs[0].Bandwidth; b != nil {
		bits := b.BytesPerSecond * 8
		found = fmt.Sprintf("%.1f MiB/s, %.3g Gb/s", b.BytesPerSecond/(1<<20), bits/1e9)
		if rate := t.port.gbps() * 1e9; rate > 0 && t.port.dev != nil && t.port.dev.PCI != nil {
			expected = fmt.Sprintf("arrive, at more than %.0f %% of %g Gb/s", slow*100, rate/1e9)
			if bits < slow*rate {
				v, advice = Warning, "look at counters, PCIe and CPU below, and at the peer's link rate; then measure with `rdmabenchd probe --kind bandwidth`"
			}
		}
	}
	t.add(l, v, check, found, expected, advice)
	t.during(check, r)
}

func reasonOf(r *probe.Result) string {
	return fmt.Sprintf("%s (%s): %s", *r.Reason, *r.Scope, oneLine(*r.Detail))
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// blames maps the reason of a failed probe to the layer it is about, if that is not the layer of the message itself.
var blames = map[probe.Reason]Layer{
	probe.NoRDMA: Modules, probe.NoDevice: Modules, probe.ProviderMissing: Modules, probe.NoCharDevice: Devices, probe.Permission: Devices,
	probe.DeviceRemoved: Devices, probe.ResourceLimit: Devices, probe.TransportUnsupported: Devices, probe.OpUnsupported: Devices,
	probe.PeerNoDevice: Devices, probe.Memlock: Memlock, probe.PortDown: Ports, probe.PortInit: SubnetManager,
	probe.NoGID: GID, probe.GIDNotAssigned: GID, probe.GIDMismatch: GID, probe.MTUMismatch: MTU, probe.DNS: Route, probe.Unreachable: Route,
	probe.Refused: Control, probe.HandshakeTimeout: Control, probe.BadHandshake: Control, probe.VersionSkew: Control, probe.Unauthorized: Control,
}

// unusable notes a probe without figures at the layer that is to blame.
func (t *trip) unusable(l Layer, check, expected string, r *probe.Result, advice string) {
	if r.Outcome == probe.Skipped {
		v, hint := Unknown, "try again: "+reasonOf(r)
		if *r.Reason == probe.Self {
			hint = "name a peer that is another process or node"
		}
		t.add(l, v, check, reasonOf(r), expected, hint)
		return
	}
	to, elsewhere := blames[*r.Reason]
	if !elsewhere || to == l {
		t.add(l, Failed, check, reasonOf(r), expected, advice)
		return
	}
	where, hint := t.port.name(), "docs/reasons.md explains "+string(*r.Reason)
	if *r.Scope != probe.ScopeLocal {
		where, hint = "with "+t.host, "run `rdmabenchd doctor` on "+t.host+" as well; "+hint
	} else if to == GID {
		hint = gidAdvice(t.port)
	}
	t.add(to, Failed, where, reasonOf(r), "a session of "+check, hint)
	t.skip(l, check, fmt.Sprintf("see %s", to))
}
