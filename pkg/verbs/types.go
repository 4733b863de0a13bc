package verbs

import (
	"fmt"
	"net/netip"
	"time"
)

// Transport is the service type of a queue pair.
type Transport string

// The transports.
const (
	RC Transport = "rc" // reliable connection
	UC Transport = "uc" // unreliable connection
	UD Transport = "ud" // unreliable datagram
)

// Op is a verb that moves data.
type Op string

// The ops.
const (
	Write    Op = "write"
	Read     Op = "read"
	Send     Op = "send"
	WriteImm Op = "write-imm"
	FetchAdd Op = "fetch-add"
	CmpSwap  Op = "cmp-swap"
)

// OneSided reports whether only the initiator's CPU takes part: the responder's device answers alone.
func (o Op) OneSided() bool { return o == Read || o == FetchAdd || o == CmpSwap }

// Atomic reports whether the op changes 8 bytes of the far end and fetches what was there.
func (o Op) Atomic() bool { return o == FetchAdd || o == CmpSwap }

// Receives reports whether a message consumes a receive on the far end, which then learns of its arrival.
func (o Op) Receives() bool { return o == Send || o == WriteImm }

// PortState is the logical state of a port (IB spec vol. 1, 14.2.5.6).
type PortState int

// The port states.
const (
	PortDown   PortState = 1
	PortInit   PortState = 2
	PortArmed  PortState = 3
	PortActive PortState = 4
)

func (s PortState) String() string {
	switch s {
	case PortDown:
		return "DOWN"
	case PortInit:
		return "INIT"
	case PortArmed:
		return "ARMED"
	case PortActive:
		return "ACTIVE"
	}
	return fmt.Sprintf("state %d", int(s))
}

// LinkLayer is what runs below the transport.
type LinkLayer string

// The link layers.
const (
	InfiniBand       LinkLayer = "InfiniBand"
	Ethernet         LinkLayer = "Ethernet"
	UnknownLinkLayer LinkLayer = "Unknown"
)

// DeviceInfo is one entry of the device list.
type DeviceInfo struct {
	Name     string
	ID       uint64 // stays when the device is renamed, and is another one's if the device is removed and made again; 0: not known
	NodeGUID uint64
	IWARP    bool // queue pairs can only be connected through rdma_cm
}

// Caps are the limits of an open device (ibv_query_device).
type Caps struct {
	Ports           int
	MaxQP, MaxQPWR  int
	MaxCQ, MaxCQE   int
	MaxRDAtom       int // outstanding reads and atomics per QP, as responder
	MaxInitRDAtom   int // the same as requester
	Atomics         bool
	MaxMRBytes      uint64
	FirmwareVersion string
}

// Port is the state of one port (ibv_query_port).
type Port struct {
	State       PortState
	LinkLayer   LinkLayer
	ActiveMTU   int // bytes
	MaxMTU      int // bytes
	LID, SMLID  uint16
	GRHRequired bool
	MaxMsg      uint32 // bytes
	GIDs, PKeys int    // table lengths
	RateGbps    float64
}

// GIDType says which packets a GID stands for.
type GIDType string

// The GID types.
const (
	GIDIB      GIDType = "IB"
	GIDRoCEv1  GIDType = "RoCE v1"
	GIDRoCEv2  GIDType = "RoCE v2"
	GIDIWARP   GIDType = "iWARP"   // no GID at all, but an address that rdma_cm connects from
	GIDUnknown GIDType = "unknown" // the provider does not tell
)

// GID is a used entry of a port's GID table.
type GID struct {
	Index   int
	Addr    netip.Addr // IPv4 if IPv4-mapped
	Type    GIDType
	IfIndex int // of the netdev; 0: none, or not told
}

// EndpointSpec is what an endpoint is to be. Both ends of a session must agree on all but Initiator, Port and depths.
type EndpointSpec struct {
	Transport Transport
	Op        Op
	Initiator bool
	BothWays  bool // the peer writes or sends back: ping-pong, bidirectional, reverse
	Mixed     bool // writes, with reads among them
	Events    bool // completions are waited for on a channel, not polled for
	Port      int
	PKeyIndex int
	QPs       int
	Threads   int // that share the QPs in a run; 0: one
	TxDepth   int // outstanding sends per QP
	RxDepth   int // posted receives per QP; 0: never receives
	CQMod     int // one signaled send in CQMod; a multiple of PostList
	PostList  int // work requests per post
	Inline    int // wanted bytes of inline data; what was granted is in Endpoint.Inline
	MaxMsg    int // largest message, bytes
	QKey      uint32
	Samples   int // latency samples kept before they go into the histogram; 0: no latency is measured here
	Memory    Memory
	RDMACM    bool // the queue pairs are connected by ListenCM and AcceptCM, or DialCM, instead of Connect
}

// Address is one end as the other must know it. It crosses the wire in package control's form.
type Address struct {
	GID     [16]byte
	GIDType GIDType
	LID     uint16
	QPN     []uint32 // 24 bit, one a QP
	PSN     []uint32 // 24 bit, the first this end sends
	RKey    uint32
	Addr    uint64 // of the buffer
	Stride  uint64 // bytes of one QP's half of the buffer
	QKey    uint32
}

// Path is what both ends agreed on for a connection.
type Path struct {
	GIDIndex     int // of this end's source GID; -1: no GRH
	MTU          int // bytes
	ServiceLevel int
	TrafficClass int
	FlowLabel    int
	HopLimit     int
	Timeout      int // local ACK timeout exponent: 4.096 µs << Timeout
	Retries      int
	RNRRetry     int // 7: for ever
	MinRNRTimer  int // code of IB spec vol. 1, table 45
	RDAtom       int // outstanding reads and atomics this end may have
	DestRDAtom   int // and those it answers
}

// Role is what an end does in a run.
type Role int

// The roles.
const (
	Source Role = iota // posts the messages that are measured
	Sink               // receives them
	Ping               // measures latency
	Pong               // answers a ping-pong
)

// RunSpec is one timed run.
type RunSpec struct {
	Role       Role
	Size       int           // bytes
	Iterations uint64        // messages per QP; 0: Duration, or until told to stop
	Duration   time.Duration // ends a run without Iterations
	Deadline   time.Duration // from now; the run ends by then, whatever happens
	Stall      time.Duration // ends a run in which nothing completes for so long; 0: never
	Yield      time.Duration // idle for so long, the thread yields its CPU; 0: never
	CPUs       []int         // for the threads to run on, in turn; none: wherever the kernel puts them

	Rate         float64 // of a Source: messages per second over all QPs; 0: as fast as it goes
	ReadPermille int     // of a Mixed endpoint: reads in 1000 messages
	Verify       bool    // payloads carry a pattern, and are checked; at least 8 bytes
	Raw          int     // of a Ping: latency samples to keep in their order
}

// End is how a run ended.
type End int

// The ends.
const (
	Done     End = iota // all iterations, or the duration is over
	Stopped             // cancelled, or told to stop
	Deadline            // RunSpec.Deadline passed
	Stalled             // nothing completed for RunSpec.Stall
	Broken              // a completion in error or a verb that failed: RunResult.Err
	Corrupt             // a payload or an atomic's value was not what was sent: RunResult.Err, a *CorruptError
)

func (e End) String() string {
	return [...]string{"done", "stopped", "deadline passed", "stalled", "broken", "corrupt"}[e]
}

// RunResult is what a run saw, summed over its threads. Its figures are of the timed loop alone.
type RunResult struct {
	End     End
	Err     error // *WCError or *OpError if End is Broken
	Flushed uint64

	Posted, Completed, Received uint64 // messages
	BytesReceived               uint64
	Lost, Late                  uint64 // pings over UC or UD: not answered, answered too late
	Duplicates, Reordered       uint64 // arrivals over UD; duplicates are not in Received
	Verified                    uint64 // messages whose payload or value was checked
	QueueFull                   uint64 // posts that a full queue refused, repeated later

	Elapsed   time.Duration // the whole loop
	CPU       time.Duration // of the measuring threads
	Preempted uint64        // times they lost their CPU against their will

	// Rate is messages per second between the first and the last completion seen; nil if there were fewer than two.
	Rate *float64
	// MinRate and MaxRate are over 10 ms intervals; nil if no whole interval fitted.
	MinRate, MaxRate *float64
	// Curve is messages completed over time, a point every 10 ms or, of long runs, more.
	Curve Curve

	Latency *Latency // nil unless the role was Ping and a sample was taken
}

// Latency are the samples of a run.
type Latency struct {
	Samples          int64
	Min, Max         time.Duration // true extremes
	MeanNS, StddevNS float64
	Hit              int64    // samples during which the thread lost its CPU; not told where it yields by itself
	Raw              []uint64 // the first RunSpec.Raw samples in order, ns
	// Counts are in HdrHistogram's layout for 1 ns to HistogramHighest at 3 significant digits.
	Counts []int64
}
