package probe

// Outcome is how a run ended. Every run ends in exactly one.
type Outcome string

// The four outcomes.
const (
	OK      Outcome = "ok"      // figures exist and nothing speaks against them
	Tainted Outcome = "tainted" // figures exist, with reasons why not to trust them
	Failed  Outcome = "failed"  // no figures: stage, reason and scope say why
	Skipped Outcome = "skipped" // never tried, on purpose: reason says why
)

// Outcomes lists every Outcome, for metrics that must exist before the first run.
var Outcomes = []Outcome{OK, Tainted, Failed, Skipped}

// Stage is the step of a session at which it failed.
type Stage string

// The stages, in the order a session walks through them.
const (
	StageResolve  Stage = "resolve"
	StageConnect  Stage = "connect"
	StageAuth     Stage = "auth"
	StageAdmit    Stage = "admit"
	StageSetup    Stage = "setup"
	StageRun      Stage = "run"
	StageVerify   Stage = "verify"
	StageTeardown Stage = "teardown"
)

// Scope says whose fault a failure is, as far as the evidence goes.
type Scope string

// The scopes. A local fault is never booked on the peer.
const (
	ScopeLocal Scope = "local"
	ScopePath  Scope = "path"
	ScopePeer  Scope = "peer"
)

// Reason is a word of a closed list, used alike in metrics, logs, JSON and docs/reasons.md.
type Reason string

// Reasons of this node.
const (
	NoRDMA               Reason = "no-rdma"
	NoDevice             Reason = "no-device"
	DeviceRemoved        Reason = "device-removed"
	NoCharDevice         Reason = "no-char-device"
	Permission           Reason = "permission"
	ProviderMissing      Reason = "provider-missing"
	PortDown             Reason = "port-down"
	PortInit             Reason = "port-init"
	NoGID                Reason = "no-gid"
	GIDNotAssigned       Reason = "gid-not-assigned"
	Memlock              Reason = "memlock"
	ResourceLimit        Reason = "resource-limit"
	OpUnsupported        Reason = "op-unsupported"
	TransportUnsupported Reason = "transport-unsupported"
	ClockFault           Reason = "clock"
	Paused               Reason = "paused"
)

// Reasons found while connecting to the peer's control channel or agreeing on a session.
const (
	DNS              Reason = "dns"
	Refused          Reason = "refused"
	Unreachable      Reason = "unreachable"
	HandshakeTimeout Reason = "handshake-timeout"
	BadHandshake     Reason = "bad-handshake"
	VersionSkew      Reason = "version-skew"
	Unauthorized     Reason = "unauthorized"
	Busy             Reason = "busy"
	PeerNoDevice     Reason = "peer-no-device"
	PeerUnresponsive Reason = "peer-unresponsive"
	GIDMismatch      Reason = "gid-mismatch"
	MTUMismatch      Reason = "mtu-mismatch"
)

// Reasons of the data path.
const (
	Timeout         Reason = "timeout"
	RetryExceeded   Reason = "retry-exceeded"
	RNRExceeded     Reason = "rnr-exceeded"
	RemoteAccess    Reason = "remote-access"
	RemoteOperation Reason = "remote-operation"
	LocalLength     Reason = "local-length"
	LocalProtection Reason = "local-protection"
	DataCorrupt     Reason = "data-corrupt"
	Loss            Reason = "loss"
)

// Reasons for a skip.
const (
	BusyPort       Reason = "busy-port"
	ForeignTraffic Reason = "foreign-traffic"
	Blackout       Reason = "blackout"
	Budget         Reason = "budget"
	GuardCommand   Reason = "guard-command"
	Overlap        Reason = "overlap"
	Self           Reason = "self"
	Incompatible   Reason = "incompatible"
	Cancelled      Reason = "cancelled"
	Shutdown       Reason = "shutdown"
)

// Taint is a reason not to trust the figures of a run that completed.
type Taint string

// The taints.
const (
	TaintRetransmit     Taint = "retransmit"
	TaintOutOfOrder     Taint = "out-of-order"
	TaintRNR            Taint = "rnr"
	TaintTimeout        Taint = "timeout"
	TaintCongestion     Taint = "congestion"
	TaintPause          Taint = "pause"
	TaintDiscards       Taint = "discards"
	TaintLinkErrors     Taint = "link-errors"
	TaintForeignTraffic Taint = "foreign-traffic"
	TaintMTUReduced     Taint = "mtu-reduced"
	TaintLinkDegraded   Taint = "link-degraded"
	TaintPCIeDegraded   Taint = "pcie-degraded"
	TaintCPUThrottled   Taint = "cpu-throttled"
	TaintClock          Taint = "clock"
	TaintShortRun       Taint = "short-run"
	TaintPeerTainted    Taint = "peer-tainted"
)

// Taints lists every Taint, for docs and tests.
var Taints = []Taint{
	TaintRetransmit, TaintOutOfOrder, TaintRNR, TaintTimeout, TaintCongestion, TaintPause, TaintDiscards,
	TaintLinkErrors, TaintForeignTraffic, TaintMTUReduced, TaintLinkDegraded, TaintPCIeDegraded,
	TaintCPUThrottled, TaintClock, TaintShortRun, TaintPeerTainted,
}

// SkipReasons lists the reasons a run is skipped for, for metrics that must exist before the first skip.
var SkipReasons = []Reason{
	BusyPort, ForeignTraffic, Blackout, Budget, GuardCommand, Overlap, Self, Incompatible, Cancelled, Shutdown, Paused,
}

// Reasons lists every Reason, for docs and tests.
var Reasons = append([]Reason{
	NoRDMA, NoDevice, DeviceRemoved, NoCharDevice, Permission, ProviderMissing, PortDown, PortInit, NoGID,
	GIDNotAssigned, Memlock, ResourceLimit, OpUnsupported, TransportUnsupported, ClockFault,
	DNS, Refused, Unreachable, HandshakeTimeout, BadHandshake, VersionSkew, Unauthorized, Busy, PeerNoDevice,
	PeerUnresponsive, GIDMismatch, MTUMismatch,
	Timeout, RetryExceeded, RNRExceeded, RemoteAccess, RemoteOperation, LocalLength, LocalProtection, DataCorrupt, Loss,
}, SkipReasons...)
