package probe

import (
	"errors"
	"fmt"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// failure is a session that ended without figures.
type failure struct {
	stage   Stage
	reason  Reason
	scope   Scope
	detail  string
	skipped bool // on purpose or for want of a free port: neither success nor failure
}

func (f *failure) Error() string { return fmt.Sprintf("%s: %s: %s", f.stage, f.reason, f.detail) }

func fail(stage Stage, reason Reason, scope Scope, format string, args ...any) *failure {
	return &failure{stage: stage, reason: reason, scope: scope, detail: fmt.Sprintf(format, args...)}
}

func skip(stage Stage, reason Reason, scope Scope, format string, args ...any) *failure {
	f := fail(stage, reason, scope, format, args...)
	f.skipped = true
	return f
}

// fromControl turns an error of the control channel into a failure of the given stage.
func fromControl(stage Stage, err error) *failure {
	var e *control.Error
	if !errors.As(err, &e) {
		return fail(stage, PeerUnresponsive, ScopePeer, "%s", err)
	}
	f := &failure{stage: stage, reason: Reason(e.Reason), scope: Scope(e.Scope), detail: e.Detail}
	switch f.reason {
	case DNS:
		if !e.FromPeer {
			f.stage = StageResolve
		}
	case Refused, Unreachable, HandshakeTimeout, BadHandshake, VersionSkew:
		if stage == StageAdmit {
			f.stage = StageConnect
		} else if f.reason == Refused {
			f.reason, f.detail = PeerUnresponsive, "the peer's daemon ended during the session: "+f.detail
		}
	case Unauthorized:
		f.stage = StageAuth
	case Busy:
		f.skipped = true
		f.reason = BusyPort
	default:
		f.skipped = slices.Contains(SkipReasons, f.reason)
	}
	switch {
	case f.scope == ScopeLocal || f.scope == ScopePath || f.scope == ScopePeer:
	case f.reason == GIDMismatch || f.reason == MTUMismatch || f.reason == Unreachable || f.reason == DataCorrupt:
		f.scope = ScopePath
	default:
		f.scope = ScopePeer
	}
	if !known[f.reason] {
		f.reason, f.detail = VersionSkew, fmt.Sprintf("the peer gave a reason that this version does not know: %s: %s", e.Reason, e.Detail)
	}
	return f
}

var known = func() map[Reason]bool {
	m := map[Reason]bool{}
	for _, r := range Reasons {
		m[r] = true
	}
	return m
}()

// setupReason finds the reason behind a verb that failed while an endpoint was made or connected.
func setupReason(err error) Reason {
	var limit *verbs.LimitError
	var op *verbs.OpError
	var cm *verbs.CMError
	switch {
	case errors.As(err, &limit):
		return ResourceLimit
	case errors.Is(err, verbs.ErrNoCM):
		return NoCharDevice
	case errors.As(err, &cm):
		return cmReason(cm)
	case !errors.As(err, &op):
		return ResourceLimit
	}
	switch op.Errno {
	case syscall.ENOMEM:
		if op.Op == "register memory" && memlockLimited() {
			return Memlock
		}
	case syscall.EACCES, syscall.EPERM:
		return Permission
	case syscall.ENODEV, syscall.EIO:
		return DeviceRemoved
	case syscall.EOPNOTSUPP, syscall.ENOSYS:
		if op.Op == "create QP" {
			return TransportUnsupported
		}
		return OpUnsupported
	case syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.ETIMEDOUT:
		return Unreachable
	case syscall.EINVAL:
		if op.Op == "move QP to RTR" {
			return GIDMismatch
		}
	}
	return ResourceLimit
}

// memlockLimited reports whether RLIMIT_MEMLOCK binds this process.
func memlockLimited() bool {
	var r unix.Rlimit
	return unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r) == nil && r.Cur != unix.RLIM_INFINITY
}

func memlockHint() string {
	var r unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r) // 0 on error, which says enough
	return fmt.Sprintf("RLIMIT_MEMLOCK is %d bytes: raise LimitMEMLOCK= in the unit, or `ulimit -l`", r.Cur)
}

// setupFailure is an endpoint that could not be made or connected on this end.
func setupFailure(err error) *failure {
	f := fail(StageSetup, setupReason(err), ScopeLocal, "%s", err)
	switch f.reason {
	case Memlock:
		f.detail += "; " + memlockHint()
	case Unreachable, GIDMismatch:
		f.scope = ScopePath
	case Refused:
		f.scope = ScopePeer
	}
	return f
}

// runFailure is a run that ended without being done: the first completion in error, a verb that failed, or silence.
func runFailure(r verbs.RunResult) *failure {
	var wc *verbs.WCError
	switch {
	case r.End == verbs.Stopped:
		return skip(StageRun, Cancelled, ScopeLocal, "cancelled after %d messages", r.Completed)
	case r.End == verbs.Deadline:
		return fail(StageRun, Timeout, ScopePath, "the deadline passed after %d messages", r.Completed)
	case r.End == verbs.Stalled:
		return fail(StageRun, Timeout, ScopePath, "nothing completed for %s, after %d messages", stall, r.Completed)
	case r.End == verbs.Corrupt:
		return corrupt(r.Err)
	case !errors.As(r.Err, &wc):
		f := setupFailure(r.Err)
		f.stage = StageRun
		return f
	}
	f := fail(StageRun, RemoteOperation, ScopePeer, "%s after %d messages, %d flushed", wc, r.Completed, r.Flushed)
	switch wc.Status {
	case verbs.WCLocalLength:
		f.reason, f.scope = LocalLength, ScopeLocal
	case verbs.WCLocalProtection, verbs.WCLocalAccess:
		f.reason, f.scope = LocalProtection, ScopeLocal
	case verbs.WCFatal:
		f.reason, f.scope = DeviceRemoved, ScopeLocal
	case verbs.WCLocalQPOp:
		f.reason, f.scope = ResourceLimit, ScopeLocal
	case verbs.WCRemoteAccess:
		f.reason = RemoteAccess
	case verbs.WCRetryExceeded:
		f.reason, f.scope = RetryExceeded, ScopePath
	case verbs.WCRNRExceeded:
		f.reason = RNRExceeded
	}
	return f
}

// ownReasons are those that an end finds of itself.
var ownReasons = map[Reason]bool{
	NoRDMA: true, NoDevice: true, DeviceRemoved: true, NoCharDevice: true, Permission: true, ProviderMissing: true, PortDown: true,
	PortInit: true, NoGID: true, GIDNotAssigned: true, Memlock: true, ResourceLimit: true, OpUnsupported: true, TransportUnsupported: true,
	ClockFault: true, Paused: true,
}

// toControl is the reverse of fromControl, for what the responder found of itself.
func (f *failure) toControl() *control.Error {
	return &control.Error{Reason: string(f.reason), Detail: f.detail}
}

// corrupt is data that arrived and is not what was sent.
func corrupt(err error) *failure { return fail(StageVerify, DataCorrupt, ScopePath, "%s", err) }
