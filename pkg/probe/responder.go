package probe

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// Limits are what a responder grants, whatever it is asked for.
type Limits struct {
	Sessions int           // at a time
	Memory   int64         // for the buffers and queues of all of them, bytes
	Message  int           // largest message, bytes
	Lease    time.Duration // longest silence of an initiator
}

// Bounds of the responder beyond its limits.
const (
	finishWait = 3 * time.Second // for the rest of what was sent to arrive
	busyRetry  = 0.3             // seconds; hint to an initiator that found the port busy
	deadlineOf = time.Hour       // longest session
	maxPosted  = 1 << 33         // messages that an initiator is believed to have sent in a run
)

// Responder answers the sessions that initiators open: the control.Service of a Node. Shut it down.
type Responder struct {
	node   *Node
	limits Limits

	mu       sync.Mutex
	sessions map[string]*response
	memory   int64
	closed   bool
}

// NewResponder returns a Responder without sessions.
func NewResponder(n *Node, l Limits) *Responder {
	return &Responder{node: n, limits: l, sessions: map[string]*response{}}
}

// Sessions is the number of sessions now open.
func (r *Responder) Sessions() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.sessions)
}

// SetLimits changes the limits for sessions to come.
func (r *Responder) SetLimits(l Limits) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.limits = l
}

// Shutdown ends every session and refuses new ones.
func (r *Responder) Shutdown() {
	r.mu.Lock()
	r.closed = true
	all := make([]*response, 0, len(r.sessions))
	for _, s := range r.sessions {
		all = append(all, s)
	}
	r.mu.Unlock()
	for _, s := range all {
		s.end("shutdown")
	}
}

// response is the responder's side of one session.
type response struct {
	r    *Responder
	req  *control.OpenRequest
	spec Spec
	port *LocalPort
	gid  int
	log  *slog.Logger

	ctx     context.Context
	cancel  context.CancelFunc
	lease   time.Duration
	expiry  *time.Timer
	memory  int64
	heavy   bool // whatever the initiator says, what fills the link does not share it
	release func()
	settle  func(bytes uint64) // ends what the guard has begun; nil: nothing
	spent   uint64             // bytes on the wire, without headers
	unwatch func() bool        // nil until there is a port

	calls  sync.Mutex // one call of a session at a time
	ep     *verbs.Endpoint
	size   int // of the run under way; 0: none is
	cpus   []int
	idle   func()               // gives the CPUs back
	cm     chan error           // holds what came of rdma_cm's connections; nil without it
	loop   chan verbs.RunResult // holds what it received or answered, once that ended; nil while nothing is
	source chan verbs.RunResult // and what it sent
	meter  func(context.Context) *EndEvidence
	ended  bool
}

// Hello says who answers here.
func (r *Responder) Hello(context.Context) (*control.Hello, error) {
	return r.node.hello(), nil
}

// Open admits a session and makes this end ready to answer.
func (r *Responder) Open(ctx context.Context, req *control.OpenRequest) (*control.OpenReply, error) {
	probe := specOf(req)
	if probe.Kind == Ping {
		return nil, &control.Error{Reason: string(BadHandshake), Detail: "pings need no session"}
	}
	if err := probe.validateParts(); err != nil {
		return nil, &control.Error{Reason: string(VersionSkew), Detail: fmt.Sprintf("%s can't answer this: %s", r.node.Name, err)}
	}
	if req.Instance == r.node.Instance {
		return nil, &control.Error{Reason: string(Self), Detail: "this is the asking process itself"}
	}
	if why := r.node.paused(); why != "" {
		return nil, &control.Error{Reason: string(Paused), Detail: r.node.Name + " is " + why}
	}
	es := probe.endpoint(false, req.MaxMsg)
	es.Memory.HugePages, es.Memory.Ring = req.Memory.HugePages, req.Memory.Ring
	s := &response{
		r: r, req: req, spec: probe, idle: func() {}, memory: footprint(es), heavy: req.Exclusive || probe.Heavy(), release: func() {},
		log: r.node.Log.With(slog.String("session", req.ID), slog.String("initiator", req.Node), slog.String("probe", req.Probe)),
	}
	if err := r.admit(s); err != nil {
		return nil, err
	}
	rep, err := s.open(es)
	if err != nil {
		s.end("refused")
		return nil, err
	}
	if ctx.Err() != nil { // nobody is there to hear of it
		s.end("initiator left")
		return nil, &control.Error{Reason: string(BadHandshake), Detail: "the connection is gone"}
	}
	return rep, nil
}

// footprint is about what an endpoint takes: its registered buffer and entries of its queues.
func footprint(es verbs.EndpointSpec) int64 {
	const entry = 128
	return es.BufferBytes() + int64(es.QPs)*entry*int64(es.TxDepth+es.RxDepth)
}

// admit takes a place for the session, with its lease running.
func (r *Responder) admit(s *response) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.limits
	switch {
	case r.closed:
		return &control.Error{Reason: string(Busy), Detail: r.node.Name + " is shutting down", RetryAfter: busyRetry}
	case r.sessions[s.req.ID] != nil:
		return &control.Error{Reason: string(BadHandshake), Detail: "a session with this id is open"}
	case s.req.MaxMsg > l.Message:
		return &control.Error{Reason: string(ResourceLimit), Detail: fmt.Sprintf("%s takes messages of at most %d bytes (limits.message), not %d", r.node.Name, l.Message, s.req.MaxMsg)}
	case s.memory > l.Memory:
		return &control.Error{Reason: string(ResourceLimit), Detail: fmt.Sprintf("%s registers at most %d bytes (limits.memory), not %d", r.node.Name, l.Memory, s.memory)}
	case len(r.sessions) >= l.Sessions || r.memory+s.memory > l.Memory:
		return &control.Error{Reason: string(Busy), Detail: fmt.Sprintf("%s has %d sessions open (limits.sessions, limits.memory)", r.node.Name, len(r.sessions)), RetryAfter: busyRetry}
	}
	s.lease = min(seconds(s.req.Lease), l.Lease)
	s.ctx, s.cancel = context.WithTimeout(context.Background(), min(seconds(s.req.Deadline)+finishWait, deadlineOf))
	context.AfterFunc(s.ctx, func() { s.end("deadline passed") })
	s.expiry = time.AfterFunc(s.lease, func() { s.end("lease expired") })
	r.sessions[s.req.ID] = s
	r.memory += s.memory
	return nil
}

func (s *response) open(es verbs.EndpointSpec) (*control.OpenReply, error) {
	s.calls.Lock()
	defer s.calls.Unlock()
	n := s.r.node
	port, own, theirs, err := n.choosePort(s.req)
	if err != nil {
		return nil, err
	}
	release, ok := func() {}, true
	if !n.loops(s.req, port) {
		release, ok = n.Gate.TryAcquire(port.Key(), s.heavy || port.software)
	}
	if !ok {
		return nil, &control.Error{Reason: string(Busy), Detail: fmt.Sprintf("%s port %d of %s is in use", port.Device, port.Port, n.Name), RetryAfter: busyRetry}
	}
	if s.heavy {
		n.busy(port.Key(), 1)
		gate := release
		release = func() {
			n.busy(port.Key(), -1)
			gate()
		}
	}
	s.port, s.release, s.gid = port, release, -1
	var no *Refusal
	if !n.loops(s.req, port) { // who loops has asked already
		guarded := s.spec.Heavy() || s.heavy && !port.software // on a software device every probe is exclusive
		if s.settle, no = n.begin(s.ctx, guarded, Use{Port: port.Key()}); no == nil {
			no = n.idle(s.ctx, port, guarded)
		}
	}
	if no != nil {
		return nil, no.toControl()
	}
	s.unwatch = context.AfterFunc(port.dev.gone, func() { s.end("device removed") })
	es.Port = port.Port
	es.RDMACM = s.req.RDMACM
	es.Memory = port.memory(s.req.Memory, Kind(s.req.Kind), es.Op)
	es.Memory.Slots = s.spec.needsSlots()
	var f *failure
	if es.PKeyIndex, f = port.pkeyIndex(s.req.PKey); f != nil {
		return nil, f.toControl()
	}
	if s.ep, err = port.dev.NewEndpoint(es); err != nil {
		return nil, setupFailure(err).toControl()
	}
	s.cpus, s.idle = n.takeCPUs(port, false, s.spec.Threads, nil)
	psn := n.psns(es.QPs)
	rep := &control.OpenReply{
		Minor: control.Minor, Instance: n.Instance, Host: n.host, Node: n.Name, Device: port.Device, Port: port.Port, Lease: s.lease.Seconds(),
		MTU:      min(port.State.ActiveMTU, s.req.Endpoint.ActiveMTU),
		Endpoint: port.wireEndpoint(s.ep.Address(psn)),
		Memory:   memoryGot(s.ep.Memory()),
	}
	if f := n.fingerprint(s.ctx, port); f != nil {
		rep.Fingerprint = *f
	}
	if s.req.MTU > 0 {
		if s.req.MTU > rep.MTU {
			return nil, &control.Error{Reason: string(MTUMismatch), Detail: fmt.Sprintf("MTU %d was asked for, the ports carry %d", s.req.MTU, rep.MTU)}
		}
		rep.MTU = s.req.MTU
	}
	if own != nil {
		s.gid = own.Index
		rep.GID = &control.GID{Addr: own.Addr, Type: string(own.Type)}
		rep.InitiatorGID = theirs
	}
	if s.req.RDMACM {
		if f := s.listen(rep, own, theirs); f != nil {
			return nil, f.toControl()
		}
		return rep, nil
	}
	err = s.ep.Connect(peerAddress(&s.req.Endpoint, theirs), psn, path(s.req, s.gid, rep.MTU, &rep.Endpoint, &s.req.Endpoint))
	if err != nil {
		return nil, setupFailure(err).toControl()
	}
	return rep, nil
}

// choosePort finds the port that answers a session: the one asked for, else the one on the rail asked for. On a host without
// such a rail it is one of the ports that the initiator can reach, by the number of the rail; a rail that is there but down is an
// answer, not a reason to measure another. own and theirs are the GIDs to use; nil on InfiniBand without GRH.
func (n *Node) choosePort(req *control.OpenRequest) (port *LocalPort, own *verbs.GID, theirs *control.GID, err error) {
	ports, lerr := n.Ports()
	if lerr != nil {
		return nil, nil, nil, &control.Error{Reason: string(PeerNoDevice), Detail: fmt.Sprintf("%s: %s", n.Name, lerr)}
	}
	offered := make([]verbs.GID, len(req.GIDs))
	for i, g := range req.GIDs {
		offered[i] = verbs.GID{Index: i, Addr: g.Addr, Type: verbs.GIDType(g.Type)}
	}
	type candidate struct {
		port   *LocalPort
		own    *verbs.GID
		theirs *control.GID
	}
	var fit []candidate
	var rails, why []string
	var reason Reason
	for i := range ports {
		p := &ports[i]
		switch {
		case req.Device != "" && (p.Device != req.Device || req.Port != 0 && p.Port != req.Port):
			continue
		case p.Reason != "":
			if req.Device == "" && req.Rail != "" && p.Rail == req.Rail {
				return nil, nil, nil, &control.Error{Reason: string(p.Reason), Detail: fmt.Sprintf("rail %s of %s: %s", p.Rail, n.Name, p.Detail)}
			}
			reason = p.Reason
			why = append(why, p.Detail)
			continue
		case p.iwarp && !req.RDMACM:
			reason = TransportUnsupported
			why = append(why, p.Device+" is iWARP, which only rdma_cm can connect")
			continue
		case string(p.State.LinkLayer) != req.Endpoint.LinkLayer:
			reason = GIDMismatch
			why = append(why, fmt.Sprintf("%s is %s, the initiator's port %s", p.Device, p.State.LinkLayer, req.Endpoint.LinkLayer))
			continue
		}
		var g *verbs.GID
		var t *control.GID
		if p.State.LinkLayer == verbs.Ethernet || p.State.GRHRequired || len(offered) > 0 {
			a, b, ok := verbs.MatchGIDs(p.GIDs, offered)
			if !ok {
				if reason = GIDMismatch; onlyLinkLocal(p.GIDs) && !onlyLinkLocal(offered) {
					reason = NoGID
				}
				why = append(why, fmt.Sprintf("%s has GIDs %v, the initiator %v", p.Device, p.GIDs, req.GIDs))
				continue
			}
			g, t = &a, &req.GIDs[b.Index]
		}
		fit = append(fit, candidate{p, g, t})
		rails = append(rails, p.Rail)
	}
	switch {
	case len(fit) > 0:
		c := fit[matchRail(rails, req.Rail)]
		return c.port, c.own, c.theirs, nil
	case reason == "":
		return nil, nil, nil, &control.Error{Reason: string(PeerNoDevice), Detail: fmt.Sprintf("%s has no RDMA device %s", n.Name, req.Device)}
	}
	return nil, nil, nil, &control.Error{Reason: string(reason), Detail: fmt.Sprintf("%s has no port for this: %v", n.Name, why)}
}

// matchRail returns which of some rails, at least one, meets the wanted one: the same, else the one at that place counting round,
// so that a host with more rails than its peer asks for each of the peer's as often.
func matchRail(rails []string, want string) int {
	if i := slices.Index(rails, want); i >= 0 {
		return i
	}
	n, err := strconv.Atoi(want)
	if err != nil || n < 0 {
		return 0
	}
	return n % len(rails)
}

// shifted is the name of the rail that comes so many after rail; rails without a number have none.
func shifted(rail string, by int) string {
	n, err := strconv.Atoi(rail)
	if err != nil || n < 0 {
		return rail
	}
	return strconv.Itoa(n + by)
}

// call finds an open session, renews its lease and keeps other calls of it out until done is called.
func (r *Responder) call(id string) (s *response, done func(), err error) {
	r.mu.Lock()
	s = r.sessions[id]
	r.mu.Unlock()
	gone := &control.Error{Reason: string(PeerUnresponsive), Detail: r.node.Name + " has no such session: its lease expired, or it was restarted"}
	if s == nil {
		return nil, nil, gone
	}
	s.expiry.Reset(s.lease)
	s.calls.Lock()
	if s.ended || s.ep == nil {
		s.calls.Unlock()
		return nil, nil, gone
	}
	return s, s.calls.Unlock, nil
}

// Run readies this end for messages of one size and starts its loop, if the op needs one.
func (r *Responder) Run(_ context.Context, id string, req *control.RunRequest) error {
	s, done, err := r.call(id)
	if err != nil {
		return err
	}
	defer done()
	if s.size != 0 {
		return &control.Error{Reason: string(BadHandshake), Detail: "run within a run"}
	}
	if req.Size < 1 || req.Size > s.req.MaxMsg {
		return &control.Error{Reason: string(BadHandshake), Detail: fmt.Sprintf("size %d: the session is for 1 to %d", req.Size, s.req.MaxMsg)}
	}
	one := s.spec // of which the largest size was checked when the session was opened
	one.Sizes = []int{req.Size}
	if err := one.validateSizes(); err != nil {
		return &control.Error{Reason: string(BadHandshake), Detail: err.Error()}
	}
	if err := s.connected(); err != nil {
		return err
	}
	if err := s.ep.Arm(req.Size, s.spec.Verify); err != nil {
		return setupFailure(err).toControl()
	}
	s.size = req.Size
	if !s.spec.answered() {
		return nil
	}
	end, _ := s.ctx.Deadline()
	rs := verbs.RunSpec{
		Size: req.Size, Deadline: time.Until(end), Yield: s.port.yield(), CPUs: s.cpus, Verify: s.spec.Verify, Rate: s.spec.messages(req.Size),
		ReadPermille: s.spec.readPermille(),
	}
	start := func(role verbs.Role) chan verbs.RunResult {
		rs.Role = role
		out := make(chan verbs.RunResult, 1)
		go func(rs verbs.RunSpec) { out <- s.ep.Run(s.ctx, rs) }(rs)
		return out
	}
	switch {
	case s.spec.Kind == Latency && !s.spec.Op.OneSided():
		s.loop = start(verbs.Pong)
	case s.spec.peerReceives():
		s.loop = start(verbs.Sink)
	}
	if s.spec.peerSends() {
		s.source = start(verbs.Source)
	}
	return nil
}

// Mark is the barrier before the timed part.
func (r *Responder) Mark(ctx context.Context, id string) (*control.MarkReply, error) {
	s, done, err := r.call(id)
	if err != nil {
		return nil, err
	}
	defer done()
	s.ep.Mark()
	s.meter = r.node.meter(ctx, s.port)
	return &control.MarkReply{Clock: verbs.Now().Seconds()}, nil
}

// Finish is the barrier after the timed part: the loop ends once all that was sent is here.
func (r *Responder) Finish(ctx context.Context, id string, req *control.FinishRequest) (*control.FinishReply, error) {
	s, done, err := r.call(id)
	if err != nil {
		return nil, err
	}
	if req.Last {
		defer s.end("finished")
	}
	defer done()
	rep := &control.FinishReply{}
	patience := time.After(finishWait) // for both, or the initiator would stop waiting for the answer
	s.ep.Enough()
	s.ep.Expect(req.Sent)
	s.spent += min(req.Sent, maxPosted) * uint64(s.size)
	if req.Failed { // nothing more is to come
		s.ep.Stop()
	}
	if s.source != nil {
		s.sent(rep, s.await(s.source, patience), seconds(req.From), seconds(req.To))
		s.source = nil
	}
	if s.loop != nil {
		s.received(rep, s.await(s.loop, patience), seconds(req.From), seconds(req.To))
		s.loop = nil
	}
	if s.spec.Verify && s.spec.Op == verbs.Write && s.spec.Kind != Latency && !s.spec.Reverse && s.size != 0 {
		n, err := s.ep.VerifySlots(s.size)
		rep.Verified = &n
		if err != nil && rep.Error == nil {
			rep.Error = corrupt(err).toControl()
		}
	}
	s.size = 0
	if s.meter != nil {
		rep.Evidence = wireEvidence(s.meter(ctx))
		s.meter = nil
	}
	if req.Failed {
		if f := r.node.recheck(s.port, s.gid); f != nil {
			rep.Error = f.toControl()
		}
	}
	return rep, nil
}

// await waits for a loop that was told to end.
func (s *response) await(loop <-chan verbs.RunResult, patience <-chan time.Time) verbs.RunResult {
	select {
	case res := <-loop:
		return res
	case <-patience:
		s.ep.Stop()
		return <-loop
	}
}

func (s *response) done(rep *control.FinishReply, res verbs.RunResult) {
	cpu := res.CPU.Seconds()
	if rep.CPUSeconds != nil {
		cpu += *rep.CPUSeconds
	}
	rep.CPUSeconds = &cpu
	if s.spec.Verify || s.spec.Op.Atomic() {
		n := res.Verified
		if rep.Verified != nil {
			n += *rep.Verified
		}
		rep.Verified = &n
	}
	if (res.End == verbs.Broken || res.End == verbs.Corrupt) && rep.Error == nil {
		rep.Error = runFailure(res).toControl()
	}
}

// sent tells what this end sent, as far as the window goes.
func (s *response) sent(rep *control.FinishReply, res verbs.RunResult, from, to time.Duration) {
	s.done(rep, res)
	rep.Sent = &res.Posted
	s.spent += res.Posted * uint64(s.size)
	if rate, ok := res.Curve.Rate(from, to); ok {
		rep.SendRate = &rate
	} else {
		rep.SendRate, rep.Apart = res.Rate, true
	}
	rep.MinRate, rep.MaxRate = res.MinRate, res.MaxRate
}

// received tells what arrived here, over the window if there is one.
func (s *response) received(rep *control.FinishReply, res verbs.RunResult, from, to time.Duration) {
	s.done(rep, res)
	if s.spec.Kind == Latency {
		rep.Received = &res.Completed
		return
	}
	rep.Received = &res.Received
	if s.spec.Transport == verbs.UD { // whose messages are numbered
		rep.Duplicates, rep.Reordered = &res.Duplicates, &res.Reordered
	}
	rep.Rate, rep.MinRate, rep.MaxRate = res.Rate, res.MinRate, res.MaxRate
	if rate, ok := res.Curve.Rate(from, to); ok {
		rep.Rate = &rate
	}
}

// Renew keeps the lease.
func (r *Responder) Renew(_ context.Context, id string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sessions[id]
	if s == nil {
		return &control.Error{Reason: string(PeerUnresponsive), Detail: r.node.Name + " has no such session"}
	}
	s.expiry.Reset(s.lease)
	return nil
}

// Close ends a session. One that is not there is no error: it ended by itself.
func (r *Responder) Close(_ context.Context, id string) error {
	r.mu.Lock()
	s := r.sessions[id]
	r.mu.Unlock()
	if s != nil {
		s.end("closed")
	}
	return nil
}

// end frees everything of a session, once.
func (s *response) end(why string) {
	s.cancel() // ends the loop, so that a call that waits for it lets go
	s.calls.Lock()
	defer s.calls.Unlock()
	if s.ended {
		return
	}
	s.ended = true
	s.expiry.Stop()
	if s.unwatch != nil {
		s.unwatch()
	}
	if s.ep != nil {
		if err := s.ep.Close(); err != nil {
			s.log.Warn("endpoint not freed cleanly", slog.Any("err", err))
		}
	}
	s.idle()
	if s.settle != nil {
		if s.meter != nil { // the initiator never told how much it sent
			ctx, cancel := detached(s.ctx, meterTime)
			t := trafficOf(s.meter(ctx))
			s.spent += t.tx + t.rx
			cancel()
		}
		s.settle(s.spent)
	}
	s.release()
	s.r.mu.Lock()
	delete(s.r.sessions, s.req.ID)
	s.r.memory -= s.memory
	s.r.mu.Unlock()
	s.log.Debug("session ended", slog.String("why", why))
}
