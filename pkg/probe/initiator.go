package probe

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
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
	spec = spec.WithDefaults()
	r := i.begin(spec, to, device, port)
	var f *failure
	if err := spec.Validate(); err != nil {
		f = fail(StageSetup, OpUnsupported, ScopeLocal, "%s", err)
	} else if why := i.Node.paused(); why != "" {
		f = skip(StageAdmit, Paused, ScopeLocal, "%s is %s", i.Node.Name, why)
	} else if spec.FlowLabels > 0 {
		f = i.walk(ctx, spec, to, r)
	} else {
		f = i.attempts(ctx, spec, to, r)
	}
	i.conclude(ctx, r, f)
	return r
}

// begin is a result of which nothing is known but what was asked for. spec has its defaults.
func (i *Initiator) begin(spec Spec, to Target, device string, port int) *Result {
	r := &Result{
		ID: newID(), Time: time.Now(), Taints: []Taint{}, TaintLog: []TaintDetail{}, Runs: []Run{}, Probe: spec.Name, Peer: to.Name, Path: to.Path,
		Device: device, Port: port, Kind: spec.Kind, Transport: spec.Transport, Op: spec.Op, QPs: spec.QPs, Options: spec.options(),
	}
	if r.Path == "" {
		r.Path = "unknown"
	}
	return r
}

// conclude judges a result.
func (i *Initiator) conclude(ctx context.Context, r *Result, f *failure) {
	r.Sweep, r.ClockResidual = sweepOf(r.Runs), verbs.ClockResidual()
	r.Duration = time.Since(r.Time).Seconds()
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
	r.spent = 0
	port, f := i.ready(ctx, spec, to, r)
	if f != nil {
		return f, 0
	}
	heavy := spec.Heavy()
	end, no := i.Node.begin(ctx, heavy, port.use(spec))
	if no != nil {
		return refused(no)
	}
	defer func() { end(r.spent) }()
	asked := time.Now()
	release, err := i.Node.acquire(ctx, port, heavy, patience)
	r.Waited += time.Since(asked).Seconds()
	if err != nil {
		return skip(StageAdmit, BusyPort, ScopeLocal, "%s port %d was in use for %s", r.Device, r.Port, spec.Wait), 0
	}
	defer release()

	ctx, cancel := context.WithTimeoutCause(ctx, spec.Deadline, errDeadline)
	defer cancel()
	ctx, done := port.whileThere(ctx)
	defer done()
	if no := i.Node.idle(ctx, port, heavy); no != nil {
		return refused(no)
	}
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

// ready finds the port to probe from, and out whether there is a point in taking it.
func (i *Initiator) ready(ctx context.Context, spec Spec, to Target, r *Result) (*LocalPort, *failure) {
	if host, _, err := net.SplitHostPort(to.Address); err != nil || host == "" {
		return nil, fail(StageResolve, DNS, ScopeLocal, "peer %s: address %q is not host:port", to.Name, to.Address)
	}
	port, f := i.Node.find(r.Device, r.Port)
	if port != nil {
		r.Rail, r.Fingerprint = port.Rail, i.Node.fingerprint(ctx, port)
	}
	if f != nil {
		return nil, f
	}
	if f := i.greet(ctx, port, to); f != nil {
		return nil, f
	}
	if f := i.Node.unsupported(port.Device, spec); f != nil {
		return nil, f
	}
	return port, nil
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
		return skip(StageAdmit, Paused, ScopePeer, "%s wishes to be left alone: it is a lame duck or paused", to.Name)
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
