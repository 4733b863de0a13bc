package probe

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// checkFailure compares what metrics show of a failure.
func checkFailure(t *testing.T, f *failure, stage Stage, reason Reason, scope Scope, skipped bool) {
	t.Helper()
	if f == nil {
		t.Fatal("no failure")
	}
	if f.stage != stage || f.reason != reason || f.scope != scope || f.skipped != skipped {
		t.Errorf("stage %s, reason %s, scope %s, skipped %t; want %s, %s, %s, %t", f.stage, f.reason, f.scope, f.skipped, stage, reason, scope, skipped)
	}
	if f.detail == "" {
		t.Error("no detail")
	}
	if !known[f.reason] {
		t.Errorf("reason %q is not in the list", f.reason)
	}
}

func TestControlErrors(t *testing.T) {
	peer := func(r Reason) error { return &control.Error{Reason: string(r), Detail: "x", FromPeer: true} }
	way := func(reason, scope string) error { return &control.Error{Reason: reason, Scope: scope, Detail: "x"} }
	for _, tt := range []struct {
		name    string
		stage   Stage // that the session was at
		err     error
		want    Stage
		reason  Reason
		scope   Scope
		skipped bool
	}{
		{"no such name", StageAdmit, way(control.ReasonDNS, "local"), StageResolve, DNS, ScopeLocal, false},
		{"refused", StageAdmit, way(control.ReasonRefused, "peer"), StageConnect, Refused, ScopePeer, false},
		{"refused in the midst of it", StageRun, way(control.ReasonRefused, "peer"), StageRun, PeerUnresponsive, ScopePeer, false},
		{"unreachable", StageAdmit, way(control.ReasonUnreachable, "path"), StageConnect, Unreachable, ScopePath, false},
		{"out of file descriptors", StageAdmit, way(control.ReasonUnreachable, "local"), StageConnect, Unreachable, ScopeLocal, false},
		{"silence", StageAdmit, way(control.ReasonHandshakeTimeout, "peer"), StageConnect, HandshakeTimeout, ScopePeer, false},
		{"nonsense", StageAdmit, way(control.ReasonBadHandshake, "peer"), StageConnect, BadHandshake, ScopePeer, false},
		{"nonsense at the end", StageVerify, way(control.ReasonBadHandshake, "peer"), StageVerify, BadHandshake, ScopePeer, false},
		{"no answer at the end", StageVerify, way(control.ReasonPeerUnresponsive, "peer"), StageVerify, PeerUnresponsive, ScopePeer, false},
		{"something else", StageRun, errors.New("x"), StageRun, PeerUnresponsive, ScopePeer, false},
		{"wrapped", StageAdmit, fmt.Errorf("open: %w", way(control.ReasonRefused, "peer")), StageConnect, Refused, ScopePeer, false},

		{"another version", StageAdmit, peer(VersionSkew), StageConnect, VersionSkew, ScopePeer, false},
		{"not allowed", StageAdmit, peer(Unauthorized), StageAuth, Unauthorized, ScopePeer, false},
		{"busy", StageAdmit, peer(Busy), StageAdmit, BusyPort, ScopePeer, true},
		{"paused", StageAdmit, peer(Paused), StageAdmit, Paused, ScopePeer, true},
		{"ourselves", StageAdmit, peer(Self), StageAdmit, Self, ScopePeer, true},
		{"its owner does not want it now", StageAdmit, peer(Blackout), StageAdmit, Blackout, ScopePeer, true},
		{"no device there", StageAdmit, peer(PeerNoDevice), StageAdmit, PeerNoDevice, ScopePeer, false},
		{"its port is down", StageAdmit, peer(PortDown), StageAdmit, PortDown, ScopePeer, false},
		{"its memlock", StageAdmit, peer(Memlock), StageAdmit, Memlock, ScopePeer, false},
		{"its limits", StageAdmit, peer(ResourceLimit), StageAdmit, ResourceLimit, ScopePeer, false},
		{"GIDs that don't go together", StageAdmit, peer(GIDMismatch), StageAdmit, GIDMismatch, ScopePath, false},
		{"MTUs that don't go together", StageAdmit, peer(MTUMismatch), StageAdmit, MTUMismatch, ScopePath, false},
		{"its kernel finds no way to us", StageAdmit, peer(Unreachable), StageConnect, Unreachable, ScopePath, false},
		{"its DNS is not ours", StageAdmit, peer(DNS), StageAdmit, DNS, ScopePeer, false},
		{"the session is gone", StageRun, peer(PeerUnresponsive), StageRun, PeerUnresponsive, ScopePeer, false},
		{"a word of a later version", StageAdmit, peer("moon-phase"), StageAdmit, VersionSkew, ScopePeer, false},
		{"no word", StageAdmit, peer(""), StageAdmit, VersionSkew, ScopePeer, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			checkFailure(t, fromControl(tt.stage, tt.err), tt.want, tt.reason, tt.scope, tt.skipped)
		})
	}
	if f := fromControl(StageAdmit, peer("moon-phase")); !strings.Contains(f.detail, "moon-phase") {
		t.Errorf("detail %q lost the word", f.detail)
	}
}

// Whatever the peer says, a fault of this end is found by this end.
func TestPeerCanNotBlameUs(t *testing.T) {
	for _, r := range append([]Reason{"", "moon-phase"}, Reasons...) {
		for _, stage := range []Stage{StageAdmit, StageRun, StageVerify} {
			f := fromControl(stage, &control.Error{Reason: string(r), Detail: "x", FromPeer: true})
			if f.scope == ScopeLocal || f.scope == "" {
				t.Errorf("%s at %s has scope %q", r, stage, f.scope)
			}
			if !known[f.reason] {
				t.Errorf("%s became %s", r, f.reason)
			}
		}
	}
}

func memlock(t *testing.T, soft uint64) {
	t.Helper()
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: soft, Max: max(soft, was.Max)}); err != nil {
		t.Skipf("RLIMIT_MEMLOCK can't be set: %s", err)
	}
	t.Cleanup(func() { _ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &was) })
}

func TestSetupErrors(t *testing.T) {
	memlock(t, 64<<10)
	op := func(op string, errno syscall.Errno) error {
		return &verbs.OpError{Op: op, Device: "mlx5_0", Errno: errno}
	}
	for _, tt := range []struct {
		err    error
		reason Reason
		scope  Scope
	}{
		{&verbs.LimitError{Device: "mlx5_0", What: "tx depth", Want: 40000, Max: 32767}, ResourceLimit, ScopeLocal},
		{errors.New("endpoint is closed"), ResourceLimit, ScopeLocal},
		{op("register memory", syscall.ENOMEM), Memlock, ScopeLocal},
		{op("allocate buffer", syscall.ENOMEM), ResourceLimit, ScopeLocal},
		{op("create CQ", syscall.ENOMEM), ResourceLimit, ScopeLocal},
		{op("create QP", syscall.ENOMEM), ResourceLimit, ScopeLocal},
		{op("create QP", syscall.EINVAL), ResourceLimit, ScopeLocal},
		{op("create QP", syscall.EAGAIN), ResourceLimit, ScopeLocal}, // a cgroup's rdma.max
		{op("create QP", syscall.EOPNOTSUPP), TransportUnsupported, ScopeLocal},
		{op("create QP", syscall.ENOSYS), TransportUnsupported, ScopeLocal},
		{op("move QP to INIT", syscall.EOPNOTSUPP), OpUnsupported, ScopeLocal},
		{op("create QP", syscall.EPERM), Permission, ScopeLocal},
		{op("allocate PD", syscall.EACCES), Permission, ScopeLocal},
		{op("create endpoint", syscall.ENODEV), DeviceRemoved, ScopeLocal},
		{op("move QP to RTR", syscall.EIO), DeviceRemoved, ScopeLocal},
		{op("move QP to RTR", syscall.EINVAL), GIDMismatch, ScopePath},
		{op("move QP to RTR", syscall.ENETUNREACH), Unreachable, ScopePath},
		{op("move QP to RTR", syscall.EHOSTUNREACH), Unreachable, ScopePath},
		{op("move QP to RTR", syscall.ETIMEDOUT), Unreachable, ScopePath}, // no neighbour
		{op("move QP to RTS", syscall.EINVAL), ResourceLimit, ScopeLocal},
		{fmt.Errorf("setup: %w", op("register memory", syscall.ENOMEM)), Memlock, ScopeLocal},
	} {
		t.Run(tt.err.Error(), func(t *testing.T) {
			f := setupFailure(tt.err)
			checkFailure(t, f, StageSetup, tt.reason, tt.scope, false)
			if !strings.Contains(f.detail, tt.err.Error()) {
				t.Errorf("detail %q lost the error", f.detail)
			}
			if hint := strings.Contains(f.detail, "LimitMEMLOCK="); hint != (tt.reason == Memlock) {
				t.Errorf("detail %q gives the advice: %t", f.detail, hint)
			}
		})
	}
}

// Without a limit it is not the limit's fault.
func TestUnlimitedMemlockIsNotToBlame(t *testing.T) {
	memlock(t, unix.RLIM_INFINITY)
	f := setupFailure(&verbs.OpError{Op: "register memory", Device: "mlx5_0", Errno: syscall.ENOMEM})
	checkFailure(t, f, StageSetup, ResourceLimit, ScopeLocal, false)
}

func TestRunErrors(t *testing.T) {
	wc := func(s verbs.WCStatus) verbs.RunResult {
		return verbs.RunResult{End: verbs.Broken, Err: &verbs.WCError{Status: s, VendorErr: 0x81}, Completed: 7, Flushed: 3}
	}
	for _, tt := range []struct {
		name    string
		res     verbs.RunResult
		reason  Reason
		scope   Scope
		skipped bool
	}{
		{"cancelled", verbs.RunResult{End: verbs.Stopped, Completed: 7}, Cancelled, ScopeLocal, true},
		{"deadline", verbs.RunResult{End: verbs.Deadline, Completed: 7}, Timeout, ScopePath, false},
		{"silence", verbs.RunResult{End: verbs.Stalled, Completed: 7}, Timeout, ScopePath, false},
		{"post failed", verbs.RunResult{End: verbs.Broken, Err: &verbs.OpError{Op: "post send", Device: "x", Errno: syscall.EINVAL}}, ResourceLimit, ScopeLocal, false},
		{"device gone", verbs.RunResult{End: verbs.Broken, Err: &verbs.OpError{Op: "poll CQ", Device: "x", Errno: syscall.EIO}}, DeviceRemoved, ScopeLocal, false},
		{"local length", wc(verbs.WCLocalLength), LocalLength, ScopeLocal, false},
		{"local QP operation", wc(verbs.WCLocalQPOp), ResourceLimit, ScopeLocal, false},
		{"local protection", wc(verbs.WCLocalProtection), LocalProtection, ScopeLocal, false},
		{"remote access", wc(verbs.WCRemoteAccess), RemoteAccess, ScopePeer, false},
		{"remote invalid request", wc(verbs.WCRemoteInvalid), RemoteOperation, ScopePeer, false},
		{"remote operation", wc(verbs.WCRemoteOp), RemoteOperation, ScopePeer, false},
		{"retries exceeded", wc(verbs.WCRetryExceeded), RetryExceeded, ScopePath, false},
		{"receiver not ready", wc(verbs.WCRNRExceeded), RNRExceeded, ScopePeer, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := runFailure(tt.res)
			checkFailure(t, f, StageRun, tt.reason, tt.scope, tt.skipped)
			if tt.res.Completed > 0 && !strings.Contains(f.detail, "7 messages") {
				t.Errorf("detail %q does not say how far it got", f.detail)
			}
		})
	}
}

// What one end found of itself arrives at the other under the same word, as the peer's.
func TestFailuresCrossTheWire(t *testing.T) {
	for r := range ownReasons {
		e := fail(StageSetup, r, ScopeLocal, "mlx5_0 port 1").toControl()
		e.FromPeer = true
		f := fromControl(StageAdmit, e)
		if f.reason != r || f.scope != ScopePeer || !strings.Contains(f.detail, "mlx5_0 port 1") {
			t.Errorf("%s arrived as %s (%s): %s", r, f.reason, f.scope, f.detail)
		}
	}
}
