package control

import (
	"encoding/hex"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Minor is the minor version of the protocol spoken here.
const Minor = 0

// Limits of what may stand in a message.
const (
	MaxQPs     = 1024
	MaxGIDs    = 64
	MaxMessage = 1 << 30                // bytes
	MaxName    = 128                    // bytes, of any name
	MinLease   = 100 * time.Millisecond // a shorter one would be renewed all the time
	MaxSession = 24 * time.Hour         // longest deadline and lease
	maxDetail  = 1 << 10                // bytes, of what a peer says about an error
	maxCounter = 256                    // bytes, of a counter's name

	maxConditions = 32

	maxClock = 1e9 // seconds, of a monotonic clock: 30 years since the host was booted
)

// Reasons that this package itself gives; they are words of package probe's list.
const (
	ReasonDNS              = "dns"
	ReasonRefused          = "refused"
	ReasonUnreachable      = "unreachable"
	ReasonHandshakeTimeout = "handshake-timeout"
	ReasonBadHandshake     = "bad-handshake"
	ReasonVersionSkew      = "version-skew"
	ReasonUnauthorized     = "unauthorized"
	ReasonPeerUnresponsive = "peer-unresponsive"
)

// Error is why a call failed: found on the way (no answer, a bad one) or told by the peer.
type Error struct {
	Reason     string  `json:"reason"`
	Detail     string  `json:"detail"`
	RetryAfter float64 `json:"retry_after,omitempty"` // seconds; of busy

	// Scope is local, path or peer as found on the way; empty if the peer spoke: it does not say who is to blame.
	Scope    string `json:"-"`
	FromPeer bool   `json:"-"` // the peer said so
	Silent   bool   `json:"-"` // nobody answered in time: a peer that is gone, a host that is, or a path
}

func (e *Error) Error() string { return e.Reason + ": " + e.Detail }

// heard makes what a peer said fit to be shown and logged.
func (e *Error) heard() {
	e.FromPeer = true
	e.Reason = printable(e.Reason, MaxName)
	e.Detail = printable(e.Detail, maxDetail)
	if !(e.RetryAfter >= 0 && e.RetryAfter <= MaxSession.Seconds()) {
		e.RetryAfter = 0
	}
}

// printable cuts s to at most n bytes and takes out what a terminal would act on.
func printable(s string, n int) string {
	var b strings.Builder
	for _, r := range s {
		switch {
		case unicode.IsSpace(r):
			r = ' '
		case !unicode.IsPrint(r):
			r = '?'
		}
		if b.Len()+utf8.RuneLen(r) > n {
			break
		}
		b.WriteRune(r)
	}
	return b.String()
}

// GID is a GID table entry that an end offers.
type GID struct {
	Addr netip.Addr `json:"addr"`
	Type string     `json:"type"` // "RoCE v2", "RoCE v1", "IB", "iWARP" (an address that rdma_cm connects from) or "unknown"
}

// QP is one queue pair.
type QP struct {
	QPN uint32 `json:"qpn"` // 24 bit
	PSN uint32 `json:"psn"` // 24 bit, the first it sends
}

// Endpoint is one end's address as the other must know it.
type Endpoint struct {
	LID        uint16 `json:"lid"`
	LinkLayer  string `json:"link_layer"`
	QPs        []QP   `json:"qps"`
	RKey       uint32 `json:"rkey"`
	Addr       uint64 `json:"addr,string"`
	Stride     uint64 `json:"stride,string"`
	QKey       uint32 `json:"qkey,omitempty"`
	ActiveMTU  int    `json:"active_mtu"`    // bytes
	RDAtom     int    `json:"rd_atom"`       // outstanding reads and atomics it may have
	DestRDAtom int    `json:"dest_rd_atom"`  // and those it answers
	RateBPS    uint64 `json:"rate,omitzero"` // line rate, bytes per second; 0: unknown
}

// Source names the port that an initiator probes from.
type Source struct {
	Device string `json:"device"`
	Port   int    `json:"port"`
}

// Hello is what a responder says of itself before anything is asked of it.
type Hello struct {
	Minor    int    `json:"minor"`
	Instance string `json:"instance"`
	Node     string `json:"node"`
	LameDuck bool   `json:"lame_duck,omitempty"` // wishes to be left alone
	Identity
}

// Identity tells machines apart, across restarts and whatever their names and addresses.
type Identity struct {
	Machine string   `json:"machine,omitempty"` // hash of the machine id
	GUIDs   []string `json:"guids,omitempty"`   // of the RDMA devices there are now
}

// IsZero reports whether nothing is known.
func (i Identity) IsZero() bool { return i.Machine == "" && len(i.GUIDs) == 0 }

// Same reports whether two identities can be of one machine. A device that comes, goes or is exchanged makes no other machine of
// it; another machine id does, and so do other devices throughout: the id may have been cloned.
func (i Identity) Same(o Identity) bool {
	if i.Machine != o.Machine && i.Machine != "" && o.Machine != "" {
		return false
	}
	return len(i.GUIDs) == 0 || len(o.GUIDs) == 0 || slices.ContainsFunc(i.GUIDs, func(g string) bool { return slices.Contains(o.GUIDs, g) })
}

// Validate checks what is shown, logged or kept.
func (h *Hello) Validate() error {
	var c checker
	c.within("minor", h.Minor, 0, math.MaxUint16)
	c.name("instance", h.Instance)
	c.name("node", h.Node)
	c.name("machine", h.Machine)
	c.that(len(h.GUIDs) <= MaxGIDs, "%d GUIDs, want at most %d", len(h.GUIDs), MaxGIDs)
	for _, g := range h.GUIDs {
		c.name("GUID", g)
	}
	return c.err
}

// OpenRequest asks for a session. The session's parameters are the initiator's; the responder's limits decide.
type OpenRequest struct {
	Minor    int    `json:"minor"`
	ID       string `json:"id"`       // 16 bytes, hex; fresh for each session
	Instance string `json:"instance"` // of the initiator's process, so that nobody probes itself
	Host     string `json:"host"`     // boot id of the initiator's kernel; empty: unknown
	Source   Source `json:"source"`   // the initiator's port
	Node     string `json:"node"`     // the initiator's name, for logs
	Probe    string `json:"probe"`
	Rail     string `json:"rail,omitempty"`
	Device   string `json:"device,omitempty"` // the responder's, if the initiator insists
	Port     int    `json:"port,omitempty"`

	Kind      string  `json:"kind"`
	Transport string  `json:"transport"`
	Op        string  `json:"op"`
	Exclusive bool    `json:"exclusive"`
	MaxMsg    int     `json:"max_msg"` // largest message of the session, bytes
	RxDepth   int     `json:"rx_depth"`
	MTU       int     `json:"mtu,omitempty"` // bytes; 0: the smaller of both active MTUs
	Deadline  float64 `json:"deadline"`      // seconds; of the whole session
	Lease     float64 `json:"lease"`         // seconds; wanted

	ServiceLevel int `json:"service_level,omitempty"`
	TrafficClass int `json:"traffic_class,omitempty"`
	FlowLabel    int `json:"flow_label,omitempty"`
	Timeout      int `json:"timeout"`
	Retries      int `json:"retries"`
	RNRRetry     int `json:"rnr_retry"`

	Memory Memory `json:"memory,omitzero"`
	// RDMACM asks the responder to listen for the queue pairs' connections instead of making them by their addresses.
	RDMACM bool   `json:"rdma_cm,omitempty"`
	Shape  Shape  `json:"shape,omitzero"`
	PKey   uint16 `json:"pkey,omitempty"` // by value; 0: the one at index 0

	GIDs     []GID    `json:"gids"` // usable ones, best first; empty on InfiniBand without GRH
	Endpoint Endpoint `json:"endpoint"`
}

// OpenReply grants a session.
type OpenReply struct {
	Minor        int      `json:"minor"`
	Instance     string   `json:"instance"`
	Host         string   `json:"host"`
	Node         string   `json:"node"`
	Device       string   `json:"device"`
	Port         int      `json:"port"`
	Lease        float64  `json:"lease"`         // seconds; granted
	MTU          int      `json:"mtu"`           // bytes; both ends use it
	GID          *GID     `json:"gid,omitempty"` // the responder's
	InitiatorGID *GID     `json:"initiator_gid,omitempty"`
	Endpoint     Endpoint `json:"endpoint"`

	RDMACM *netip.AddrPort `json:"rdma_cm,omitempty"` // where it listens, if that was asked for

	Memory *MemoryGot `json:"memory,omitempty"` // of the responder's buffer; nil: it does not tell

	// Fingerprint is that of the responder's environment; empty if it is not known.
	Fingerprint string `json:"fingerprint,omitempty"`
}

// Memory is how the buffers of a session are to be made, at both ends.
type Memory struct {
	HugePages      bool `json:"huge_pages,omitempty"`
	Ring           int  `json:"ring,omitempty"` // bytes that successive messages walk through
	StrictOrdering bool `json:"strict_ordering,omitempty"`
}

// Shape is what a session is beyond messages from the initiator to the responder, one like the other.
type Shape struct {
	Bidirectional bool    `json:"bidirectional,omitempty"`
	Reverse       bool    `json:"reverse,omitempty"` // the responder sends, the initiator does not
	Mixed         int     `json:"mixed,omitempty"`   // reads in 1000 messages, the others write
	Verify        bool    `json:"verify,omitempty"`
	Events        bool    `json:"events,omitempty"`
	Threads       int     `json:"threads,omitempty"` // 0: one
	Rate          float64 `json:"rate,omitempty"`    // payload bytes per second that an end sends at most; 0: no limit
	// Of a responder that sends; 0 stands for 1.
	TxDepth  int `json:"tx_depth,omitempty"`
	CQMod    int `json:"cq_mod,omitempty"`
	PostList int `json:"post_list,omitempty"`
	Inline   int `json:"inline,omitempty"`
}

// MemoryGot is what an end's buffer turned out to be.
type MemoryGot struct {
	Kind            string `json:"kind"`
	NUMANode        *int   `json:"numa_node"` // nil: not known
	RelaxedOrdering bool   `json:"relaxed_ordering"`
	Ring            int    `json:"ring"`
}

// RunRequest readies the responder for messages of one size.
type RunRequest struct {
	Size int `json:"size"`
}

// MarkReply is the responder at the barrier before the timed part.
type MarkReply struct {
	Clock float64 `json:"clock"` // seconds, of its monotonic clock
}

// FinishRequest ends the timed part. Sent is how many messages the initiator posted since the RunRequest. After a failed run
// the responder looks for the cause on its end.
type FinishRequest struct {
	Sent   uint64 `json:"sent"`
	Failed bool   `json:"failed,omitempty"`
	Last   bool   `json:"last,omitempty"` // the session is over; frees it like a DELETE

	// The window, in seconds of the responder's clock, over which what it sent is to be counted.
	From float64 `json:"from,omitempty"`
	To   float64 `json:"to,omitempty"`
}

// FinishReply is what the responder saw.
type FinishReply struct {
	Received   *uint64   `json:"received,omitempty"`   // messages since the RunRequest; nil: the op does not show
	Duplicates *uint64   `json:"duplicates,omitempty"` // of numbered messages; not in Received
	Reordered  *uint64   `json:"reordered,omitempty"`
	Verified   *uint64   `json:"verified,omitempty"`  // messages whose payload was checked
	Sent       *uint64   `json:"sent,omitempty"`      // by the responder since the RunRequest; nil: it does not send
	SendRate   *float64  `json:"send_rate,omitempty"` // over the window: messages per second
	Apart      bool      `json:"apart,omitempty"`     // the window was too short for that: since the mark
	Rate       *float64  `json:"rate,omitempty"`      // of the timed part: messages per second
	MinRate    *float64  `json:"min_rate,omitempty"`
	MaxRate    *float64  `json:"max_rate,omitempty"`
	CPUSeconds *float64  `json:"cpu_seconds,omitempty"`
	Error      *Error    `json:"error,omitempty"` // of the responder's loop
	Evidence   *Evidence `json:"evidence,omitempty"`
}

// Evidence is one end's port counters over a timed part.
type Evidence struct {
	Device   string              `json:"device"`
	Port     int                 `json:"port"`
	Counters map[string]uint64   `json:"counters"`
	Classes  map[string]uint64   `json:"classes"`
	Moved    map[string][]string `json:"moved"`
	Unknown  []string            `json:"unknown"`

	Traffic    map[string]uint64 `json:"traffic"`
	CannotTell []string          `json:"cannot_tell"`
	Conditions []Condition       `json:"conditions"`
}

// Condition is something about an end other than a counter that speaks against figures taken there.
type Condition struct {
	Taint  string `json:"taint"`  // a word of package probe's list
	Check  string `json:"check"`  // what was looked at
	Detail string `json:"detail"` // what was found and what should be, for a person
}

// ---- checks ----

type checker struct{ err error }

func (c *checker) that(ok bool, format string, args ...any) {
	if !ok && c.err == nil {
		c.err = fmt.Errorf(format, args...)
	}
}

func (c *checker) within(what string, v, lo, hi int) {
	c.that(v >= lo && v <= hi, "%s is %d, want %d to %d", what, v, lo, hi)
}

func isPrintable(s string, n int) bool {
	return len(s) <= n && strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0
}

// name is shown on terminals and becomes a metric label.
func (c *checker) name(what, s string) {
	c.that(isPrintable(s, MaxName), "%s %.*q is not a name: want at most %d bytes of printable text", what, MaxName, s, MaxName)
}

// known is a value out of a list. One that is not comes from a version that knows more.
func (c *checker) known(what, s string, known ...string) {
	if !slices.Contains(known, s) && c.err == nil {
		c.err = &Error{Reason: ReasonVersionSkew, Detail: fmt.Sprintf("%s %q is not known to this version: it knows %q", what, printable(s, MaxName), known)}
	}
}

func (c *checker) seconds(what string, s float64, lo time.Duration) {
	c.that(s > 0 && s >= lo.Seconds() && s <= MaxSession.Seconds(), "%s is %g s, want %s to %s", what, s, lo, MaxSession)
}

var mtus = []int{256, 512, 1024, 2048, 4096}

// endpoint checks an end of a session for messages of up to maxMsg bytes; wantQPs 0: any number of QPs. With rdma_cm their
// numbers are only told: iWARP's have no bounds.
func (c *checker) endpoint(e *Endpoint, wantQPs, maxMsg int, cm bool) {
	c.that(len(e.QPs) >= 1 && len(e.QPs) <= MaxQPs, "%d QPs, want 1 to %d", len(e.QPs), MaxQPs)
	c.that(wantQPs == 0 || len(e.QPs) == wantQPs, "%d QPs, want %d", len(e.QPs), wantQPs)
	for _, q := range e.QPs {
		c.that(cm || q.QPN < 1<<24 && q.QPN > 1 && q.PSN < 1<<24, "QPN %d or PSN %d is out of range", q.QPN, q.PSN)
	}
	c.that(slices.Contains(mtus, e.ActiveMTU), "active MTU %d is none of %v", e.ActiveMTU, mtus)
	c.within("rd_atom", e.RDAtom, 0, 255)
	c.within("dest_rd_atom", e.DestRDAtom, 0, 255)
	c.name("link layer", e.LinkLayer)
	// Each QP has two halves in the buffer. The stride is bounded first, so that the product can't wrap.
	c.that(e.Stride >= uint64(maxMsg) && e.Stride <= 2*MaxMessage, "stride %d, want %d to %d", e.Stride, maxMsg, 2*MaxMessage)
	if c.err == nil {
		c.that(e.Addr+uint64(2*len(e.QPs))*e.Stride > e.Addr, "buffer at %#x with a stride of %d wraps", e.Addr, e.Stride)
	}
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// gid allows one way only to write an address: an IPv4-mapped one must look as IPv4.
func (c *checker) gid(g *GID) {
	a := g.Addr
	c.that(a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && a != broadcast && !a.Is4In6() && a.Zone() == "", "GID %q is no unicast address", a)
	c.known("GID type", g.Type, "RoCE v2", "RoCE v1", "IB", "iWARP", "unknown")
}

// offered are the GIDs that an initiator has.
func (c *checker) offered(gids []GID) {
	c.that(len(gids) <= MaxGIDs, "%d GIDs, want at most %d", len(gids), MaxGIDs)
	for i := range gids {
		c.gid(&gids[i])
	}
}

// chosen is the pair of GIDs that a responder picked: its own and one of those offered; neither where none is needed.
func (c *checker) chosen(own, theirs *GID, offered []GID) {
	c.that((own == nil) == (theirs == nil), "one GID of a pair")
	if own != nil && theirs != nil {
		c.gid(own)
		c.that(slices.Contains(offered, *theirs), "initiator GID %q was not offered", theirs.Addr)
	}
}

func (c *checker) shape(s *Shape) {
	c.within("mixed", s.Mixed, 0, 1000)
	c.within("threads", s.Threads, 0, MaxQPs)
	c.that(s.Rate >= 0 && s.Rate <= 1e15, "rate is out of range 0 to 1e15") // NaN is not >= 0
	c.within("tx_depth", s.TxDepth, 0, 1<<16)
	c.within("cq_mod", s.CQMod, 0, 1<<16)
	c.within("post_list", s.PostList, 0, 1<<16)
	c.within("inline", s.Inline, 0, 1<<16)
}

// Validate checks every field's range. Which kinds, transports and ops there are is the responder's to know.
func (r *OpenRequest) Validate() error {
	var c checker
	id, err := hex.DecodeString(r.ID)
	c.that(err == nil && len(id) == 16, "session id %q is not 16 bytes of hex", printable(r.ID, MaxName))
	c.within("minor", r.Minor, 0, math.MaxUint16)
	c.name("instance", r.Instance)
	c.name("node", r.Node)
	c.name("probe", r.Probe)
	c.name("rail", r.Rail)
	c.name("device", r.Device)
	c.name("kind", r.Kind)
	c.name("transport", r.Transport)
	c.name("op", r.Op)
	c.that(r.Kind != "" && r.Transport != "" && r.Op != "", "kind %q, transport %q, op %q: one is missing", r.Kind, r.Transport, r.Op)
	c.name("host", r.Host)
	c.name("source device", r.Source.Device)
	c.within("source port", r.Source.Port, 0, 255)
	c.within("port", r.Port, 0, 255)
	c.within("max_msg", r.MaxMsg, 1, MaxMessage)
	c.within("rx_depth", r.RxDepth, 0, 1<<16)
	c.within("ring", r.Memory.Ring, 0, MaxMessage)
	c.shape(&r.Shape)
	c.that(r.MTU == 0 || slices.Contains(mtus, r.MTU), "MTU %d is none of %v", r.MTU, mtus)
	c.seconds("deadline", r.Deadline, 0)
	c.seconds("lease", r.Lease, MinLease)
	c.within("service_level", r.ServiceLevel, 0, 15)
	c.within("traffic_class", r.TrafficClass, 0, 255)
	c.within("flow_label", r.FlowLabel, 0, 1<<20-1)
	c.within("timeout", r.Timeout, 0, 31)
	c.within("retries", r.Retries, 0, 7)
	c.within("rnr_retry", r.RNRRetry, 0, 7)
	c.offered(r.GIDs)
	c.endpoint(&r.Endpoint, 0, r.MaxMsg, r.RDMACM)
	return c.err
}

// Validate checks every field's range against the request it answers.
func (r *OpenReply) Validate(req *OpenRequest) error {
	var c checker
	c.within("minor", r.Minor, 0, math.MaxUint16)
	c.name("instance", r.Instance)
	c.name("host", r.Host)
	c.name("node", r.Node)
	c.name("device", r.Device)
	c.name("fingerprint", r.Fingerprint)
	c.within("port", r.Port, 1, 255)
	c.seconds("lease", r.Lease, MinLease)
	c.that(slices.Contains(mtus, r.MTU), "MTU %d is none of %v", r.MTU, mtus)
	c.chosen(r.GID, r.InitiatorGID, req.GIDs)
	c.endpoint(&r.Endpoint, len(req.Endpoint.QPs), req.MaxMsg, req.RDMACM)
	c.that(req.RDMACM == (r.RDMACM != nil), "rdma_cm was asked for: %t, and offered: %t", req.RDMACM, r.RDMACM != nil)
	if at := r.RDMACM; at != nil {
		c.gid(&GID{Addr: at.Addr(), Type: "unknown"})
		c.that(at.Port() != 0, "rdma_cm at port 0")
		c.that(r.GID == nil || r.GID.Type == "IB" || r.GID.Addr == at.Addr(), "rdma_cm at %s, but the GID is %s", at.Addr(), r.GID.Addr)
	}
	if m := r.Memory; m != nil {
		c.name("memory kind", m.Kind)
		c.within("ring", m.Ring, 0, MaxMessage)
		c.that(m.NUMANode == nil || *m.NUMANode >= 0 && *m.NUMANode < 1<<16, "NUMA node is out of range")
	}
	c.that(r.MTU <= req.Endpoint.ActiveMTU && r.MTU <= r.Endpoint.ActiveMTU && (req.MTU == 0 || r.MTU == req.MTU),
		"MTU %d does not suit ports with %d and %d, or the %d asked for", r.MTU, req.Endpoint.ActiveMTU, r.Endpoint.ActiveMTU, req.MTU)
	return c.err
}

// Validate checks the range of the size; what the session carries is the responder's to know.
func (r *RunRequest) Validate() error {
	var c checker
	c.within("size", r.Size, 1, MaxMessage)
	return c.err
}

// Validate checks the range of the clock, which is turned into a duration.
func (r *MarkReply) Validate() error {
	var c checker
	c.that(r.Clock >= 0 && r.Clock <= maxClock, "clock is out of range 0 to %g", maxClock) // NaN is not >= 0
	return c.err
}

// Validate checks the range of the window, which is turned into durations. One that can't be is none: it covers nothing.
func (r *FinishRequest) Validate() error {
	var c checker
	c.that(math.Abs(r.From) <= maxClock, "from is out of range -%g to %g", maxClock, maxClock) // NaN is not <= either
	c.that(math.Abs(r.To) <= maxClock, "to is out of range -%g to %g", maxClock, maxClock)
	return c.err
}

// Validate checks every figure's range. Of the evidence it drops what could not be shown instead.
func (r *FinishReply) Validate() error {
	var c checker
	figure := func(what string, v *float64, hi float64) {
		c.that(v == nil || *v >= 0 && *v <= hi, "%s is out of range 0 to %g", what, hi) // NaN is not >= 0
	}
	const maxRate = 1e12 // messages per second
	figure("rate", r.Rate, maxRate)
	figure("min_rate", r.MinRate, maxRate)
	figure("max_rate", r.MaxRate, maxRate)
	figure("send_rate", r.SendRate, maxRate)
	figure("cpu_seconds", r.CPUSeconds, MaxSession.Seconds())
	c.that(r.MinRate == nil || r.MaxRate == nil || *r.MinRate <= *r.MaxRate, "min_rate is above max_rate")
	if r.Error != nil {
		r.Error.heard()
	}
	if e := r.Evidence; e != nil {
		c.name("device", e.Device)
		c.within("port", e.Port, 0, 255)
		e.tidy()
	}
	return c.err
}

// tidy leaves no nil behind, and no name that is not fit to be shown.
func (e *Evidence) tidy() {
	bad := func(s string) bool { return !isPrintable(s, maxCounter) }
	if e.Counters == nil {
		e.Counters = map[string]uint64{}
	}
	if e.Classes == nil {
		e.Classes = map[string]uint64{}
	}
	if e.Moved == nil {
		e.Moved = map[string][]string{}
	}
	maps.DeleteFunc(e.Counters, func(k string, _ uint64) bool { return bad(k) })
	maps.DeleteFunc(e.Classes, func(k string, _ uint64) bool { return bad(k) })
	maps.DeleteFunc(e.Moved, func(k string, _ []string) bool { return bad(k) })
	for class, names := range e.Moved {
		e.Moved[class] = append([]string{}, slices.DeleteFunc(names, bad)...)
	}
	e.Unknown = append([]string{}, slices.DeleteFunc(e.Unknown, bad)...)
	if e.Traffic == nil {
		e.Traffic = map[string]uint64{}
	}
	maps.DeleteFunc(e.Traffic, func(k string, _ uint64) bool { return bad(k) })
	e.CannotTell = append([]string{}, slices.DeleteFunc(e.CannotTell, bad)...)
	e.Conditions = append([]Condition{}, e.Conditions[:min(len(e.Conditions), maxConditions)]...)
	for i := range e.Conditions {
		c := &e.Conditions[i]
		c.Taint, c.Check, c.Detail = printable(c.Taint, MaxName), printable(c.Check, MaxName), printable(c.Detail, maxDetail)
	}
}
