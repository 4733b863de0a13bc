package probe

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// Kind is what a probe measures.
type Kind string

// The kinds.
const (
	Latency     Kind = "latency"
	Bandwidth   Kind = "bandwidth"
	MessageRate Kind = "message-rate"
)

// Spec is one probe: what to measure and how. The zero value of a field means its default, which
// [Spec.WithDefaults] fills in.
type Spec struct {
	Name      string // configured name; the metric label "probe"
	Kind      Kind
	Transport verbs.Transport
	Op        verbs.Op
	Sizes     []int // message sizes in bytes, one run each

	Iterations int           // timed messages per QP and run; exclusive with Duration
	Duration   time.Duration // timed part of a run; exclusive with Iterations
	Gap        time.Duration // of pings, from one to the next
	Warmup     int           // untimed messages per QP before each run; negative: none

	Bidirectional bool    // both ends send, over one common window
	Reverse       bool    // the peer sends; takes a Duration
	ReadShare     float64 // of an op write: the share of messages that are reads, 0 to 1
	RateLimit     float64 // payload bytes per second that an end sends at most; 0: as fast as it goes
	Repeat        int     // runs per size, of which the median is the result
	Verify        bool    // payloads carry a pattern and are checked; the figures then include that

	TxDepth  int   // outstanding sends per QP
	RxDepth  int   // posted receives per QP, on the end that receives
	QPs      int   // queue pairs
	Threads  int   // that share them, at each end that posts
	Events   bool  // completions are waited for, not polled for
	CPUs     []int // for the threads of this end; none: a CPU near the NIC that isn't isolated
	CQMod    int   // one signaled completion per CQMod sends
	PostList int   // work requests per post
	Inline   int   // bytes of inline data to ask for; negative: none

	Memory Memory
	RDMACM bool // connect by rdma_cm; on iWARP always

	MTU          int // path MTU in bytes; 0: the smaller of both ports' active MTU
	ServiceLevel int
	TrafficClass int
	FlowLabel    int
	FlowLabels   int    // how many flow labels to walk through, a session each; the result is the worst one's
	PKey         uint16 // of the partition, by value; 0: the one at index 0

	Timeout  int           // QP local ACK timeout exponent, 4.096 µs << Timeout; 0: as fits the device
	Retries  int           // QP retry_cnt; 7 never gives up on some drivers; negative: none
	RNRRetry int           // QP rnr_retry; 7 means for ever; negative: none
	Deadline time.Duration // for the whole session, both ends
	Wait     time.Duration // for a port that is busy, at either end, before the probe is skipped

	RawSamples int // latency samples of each run to keep in their order

	Interval time.Duration // between scheduled runs; 0: run by hand

	Exclusive bool // both ports to itself, which what fills the link has anyway
}

// Defaults that a Spec's zero fields stand for. Where a perftest user would compare they are perftest's; the QP's
// timers are not: with retry_cnt 7 Soft-RoCE never reports a dead path.
const (
	defaultLatencySize   = 8
	defaultBandwidthSize = 64 << 10
	defaultRateSize      = 8

	defaultLatencyIterations   = 1000
	defaultBandwidthIterations = 5000
	maxLatencyWarmup           = 100

	defaultTxDepth   = 128
	latencyDepth     = 16
	defaultRxDepth   = 512
	defaultCQMod     = 64
	smallMessage     = 8 << 10 // above it every send is signaled, as perftest does
	defaultTimeout   = 14      // 67 ms
	softwareTimeout  = 16      // 268 ms
	defaultRetries   = 6
	defaultRNRRetry  = 7
	minRNRTimer      = 12 // 0.64 ms
	hopLimit         = 255
	minDeadline      = 30 * time.Second
	minDuration      = time.Millisecond
	defaultWait      = 5 * time.Second
	maxScheduledWait = 30 * time.Second

	udSize       = 1024 // fits any path MTU that is in use
	maxUD        = 4096
	atomicSize   = 8
	verifyMemory = 8 << 20 // bytes, for what is under way on a QP
	maxRepeat    = 100

	maxFlowLabels = 1024
	// MaxRawSamples is how many raw samples a run keeps at most.
	MaxRawSamples = 1 << 24

	// stall ends a run in which nothing completes. The QP's own timers (0.5 s by default) should speak first.
	stall = 3 * time.Second
)

// named fills in which probe it is, where that was left open.
func (s Spec) named() Spec {
	s.Kind, s.Transport, s.Op = cmp.Or(s.Kind, Latency), cmp.Or(s.Transport, verbs.RC), cmp.Or(s.Op, verbs.Write)
	return s
}

// def sets what was left open to its default.
func def(v *int, d int) { *v = cmp.Or(*v, d) }

// WithDefaults returns the spec with every zero field that has a default replaced by it. Negatives that mean none stay, so
// that it may be called again.
func (s Spec) WithDefaults() Spec {
	if s.Kind == Ping {
		return s.pingDefaults()
	}
	s = s.named()
	if s.Transport == verbs.UD && s.Sizes == nil && s.Kind == Bandwidth {
		s.Sizes = []int{udSize}
	}
	if s.Op.Atomic() && s.Sizes == nil {
		s.Sizes = []int{atomicSize}
	}
	size, iterations, depth := defaultBandwidthSize, defaultBandwidthIterations, defaultTxDepth
	switch s.Kind {
	case Latency:
		size, iterations, depth = defaultLatencySize, defaultLatencyIterations, latencyDepth
	case MessageRate:
		size = defaultRateSize
	}
	if len(s.Sizes) == 0 {
		s.Sizes = []int{size}
	}
	if s.Duration == 0 {
		def(&s.Iterations, iterations)
	}
	if s.Verify { // each message under way has its own place
		depth = min(depth, max(2, verifyMemory/slices.Max(s.Sizes)))
		def(&s.RxDepth, min(defaultRxDepth, max(2, verifyMemory/slices.Max(s.Sizes))))
		if s.Kind == Latency {
			def(&s.RxDepth, latencyDepth)
		}
	}
	def(&s.TxDepth, depth)
	if s.Kind == Latency {
		def(&s.RxDepth, latencyDepth)
		def(&s.Warmup, max(1, min(maxLatencyWarmup, s.Iterations/10)))
	} else {
		def(&s.RxDepth, defaultRxDepth)
		def(&s.Warmup, s.TxDepth)
	}
	def(&s.QPs, 1)
	def(&s.Threads, 1)
	def(&s.Repeat, 1)
	def(&s.PostList, 1)
	if s.CQMod == 0 {
		s.CQMod = min(defaultCQMod, max(1, s.TxDepth/2))
		if s.Kind == Latency {
			s.CQMod = 1
		} else if s.PostList > 1 {
			s.CQMod = s.PostList
		} else if slices.Max(s.Sizes) > smallMessage && len(s.Sizes) == 1 {
			s.CQMod = 1
		}
	}
	def(&s.Retries, defaultRetries)
	def(&s.RNRRetry, defaultRNRRetry)
	if s.Deadline == 0 {
		s.Deadline = minDeadline + time.Duration(len(s.Sizes)*max(1, s.Repeat))*(2*s.Duration+time.Second)
	}
	if s.Wait == 0 {
		s.Wait = defaultWait
		if s.Interval > 0 {
			s.Wait = min(s.Interval, maxScheduledWait)
		}
	}
	return s
}

// Heavy reports whether the probe needs both ports for itself: everything that fills the link, or is to be alone on it. A ping never does.
func (s Spec) Heavy() bool { return s.Kind != Ping && (s.Exclusive || s.Kind != Latency) }

// answered reports whether the responder's CPU takes part: it answers pings, counts what arrives, or sends itself.
func (s Spec) answered() bool {
	return s.peerReceives() || s.peerSends() || s.Kind == Latency && !s.Op.OneSided()
}

// peerReceives reports whether the responder counts what arrives, bandwidth and message rate only.
func (s Spec) peerReceives() bool { return s.Kind != Latency && s.Op.Receives() && !s.Reverse }

// peerSends reports whether the responder posts messages of its own.
func (s Spec) peerSends() bool { return s.Bidirectional || s.Reverse }

// receives reports whether this end counts what arrives.
func (s Spec) receives() bool { return s.peerSends() && s.Op.Receives() }

// lossy reports whether messages may be lost without anybody being told.
func (s Spec) lossy() bool { return s.Transport == verbs.UC || s.Transport == verbs.UD }

// needsRing is how many bytes of ring a verified run takes: a place for each message under way, so that none is overwritten
// before it was checked.
func (s Spec) needsRing() int {
	if !s.Verify || polled(s.Kind, s.Op) {
		return 0
	}
	size := (slices.Max(s.Sizes) + 40 + 4095) / 4096 * 4096 // as far apart as messages are, at most
	return s.QPs * (s.needsSlots()*size + size + 4096)
}

// needsSlots is how many messages have a place of their own in a verified run; 0: it is none.
func (s Spec) needsSlots() int {
	if !s.Verify {
		return 0
	}
	return s.TxDepth + s.RxDepth // a write lands before it is known whether there is a receive for its immediate
}

// messages is a rate in messages per second for one in bytes per second; 0: no limit.
func (s Spec) messages(size int) float64 {
	if s.RateLimit <= 0 {
		return 0
	}
	return s.RateLimit / float64(size)
}

// supported are the ops of each transport (IB spec vol. 1, table 46).
var supported = map[verbs.Transport][]verbs.Op{
	verbs.RC: {verbs.Write, verbs.WriteImm, verbs.Read, verbs.Send, verbs.FetchAdd, verbs.CmpSwap},
	verbs.UC: {verbs.Write, verbs.WriteImm, verbs.Send},
	verbs.UD: {verbs.Send},
}

// Validate refuses combinations that can't work, before anything is sent. Call it on a spec with defaults.
func (s Spec) Validate() error {
	if s.Kind == Ping {
		return s.validatePing()
	}
	if err := s.validateParts(); err != nil {
		return err
	}
	return s.validateRate()
}

// validateParts is Validate without what only the initiator knows: how many messages there will be.
func (s Spec) validateParts() error {
	ops, known := supported[s.Transport]
	switch {
	case s.Kind != Latency && s.Kind != Bandwidth && s.Kind != MessageRate:
		return fmt.Errorf("kind %q: want latency, bandwidth, message-rate or ping", s.Kind)
	case !known:
		return fmt.Errorf("transport %q: want rc, uc or ud", s.Transport)
	case !slices.Contains(supported[verbs.RC], s.Op):
		return fmt.Errorf("op %q: want write, write-imm, read, send, fetch-add or cmp-swap", s.Op)
	case !slices.Contains(ops, s.Op):
		return fmt.Errorf("%s has no %s: use rc, or one of %v", s.Transport, s.Op, ops)
	case s.Iterations > 0 && s.Duration > 0:
		return errors.New("iterations and duration are both set: leave one out")
	case s.Iterations < 0 || s.Duration < 0 || s.Deadline < 0:
		return errors.New("iterations, duration and deadline can't be negative")
	case s.Duration > 0 && s.Duration < minDuration:
		return fmt.Errorf("duration %s is too short to measure anything: use at least %s", s.Duration, minDuration)
	case s.Duration >= s.Deadline:
		return fmt.Errorf("deadline %s must be longer than the duration %s", s.Deadline, s.Duration)
	case s.Deadline > deadlineOf:
		return fmt.Errorf("deadline %s: a session may last at most %s", s.Deadline, deadlineOf)
	case s.RDMACM && s.Transport != verbs.RC:
		return fmt.Errorf("rdma_cm connects %s, not %s: leave it out", verbs.RC, s.Transport)
	}
	if err := s.validateShape(); err != nil {
		return err
	}
	for _, r := range []struct {
		what      string
		v, lo, hi int
	}{
		{"QPs", s.QPs, 1, control.MaxQPs},
		{"threads", s.Threads, 1, verbs.MaxThreads},
		{"repeat", s.Repeat, 1, maxRepeat},
		{"flow labels", s.FlowLabels, 0, maxFlowLabels},
		{"raw samples", s.RawSamples, 0, MaxRawSamples},
		{"tx depth", s.TxDepth, 1, 1 << 16},
		{"rx depth", s.RxDepth, 1, 1 << 16},
		{"post list", s.PostList, 1, 1 << 16},
		{"CQ moderation", s.CQMod, 1, 1 << 16},
		{"inline size", max(0, s.Inline), 0, 1 << 16},
		{"service level", s.ServiceLevel, 0, 15},
		{"traffic class", s.TrafficClass, 0, 255},
		{"flow label", s.FlowLabel, 0, 1<<20 - 1},
		{"QP timeout", s.Timeout, 0, 31},
		{"retries", max(0, s.Retries), 0, 7},
		{"RNR retries", max(0, s.RNRRetry), 0, 7},
	} {
		if r.v < r.lo || r.v > r.hi {
			return fmt.Errorf("%s %d is out of range %d to %d", r.what, r.v, r.lo, r.hi)
		}
	}
	switch { // of numbers that are in range
	case s.Threads > s.QPs:
		return fmt.Errorf("%d threads share %d QPs: each needs one, so use at least %d QPs", s.Threads, s.QPs, s.Threads)
	case s.PostList > s.TxDepth:
		return fmt.Errorf("post list %d is longer than the tx depth %d", s.PostList, s.TxDepth)
	case s.CQMod > s.TxDepth:
		return fmt.Errorf("CQ moderation %d is above the tx depth %d: the queue would fill before a completion", s.CQMod, s.TxDepth)
	case s.CQMod%s.PostList != 0:
		return fmt.Errorf("CQ moderation %d must be a multiple of the post list %d", s.CQMod, s.PostList)
	}
	if err := s.validateSizes(); err != nil {
		return err
	}
	if err := s.Memory.validate(&s, slices.Max(s.Sizes)); err != nil {
		return err
	}
	if s.MTU != 0 && !slices.Contains([]int{256, 512, 1024, 2048, 4096}, s.MTU) {
		return fmt.Errorf("MTU %d: want 256, 512, 1024, 2048 or 4096", s.MTU)
	}
	return nil
}

// validateShape refuses shapes that contradict each other.
func (s Spec) validateShape() error {
	latency := s.Kind == Latency
	for _, r := range []struct {
		wrong bool
		why   string
	}{
		{latency && s.QPs != 1, fmt.Sprintf("latency is measured on one QP, not %d", s.QPs)},
		{latency && s.Threads != 1, "latency is measured by one thread"},
		{latency && s.PostList != 1, fmt.Sprintf("latency posts one work request at a time, not a list of %d", s.PostList)},
		{latency && (s.Bidirectional || s.Reverse), "latency has one message under way: bidirectional and reverse are for bandwidth and message-rate"},
		{latency && s.RateLimit > 0, "a rate limit is for bandwidth and message-rate"},
		{latency && s.Events && s.Op == verbs.Write, "write latency is seen by polling memory, which raises no event: use send, write-imm or read"},
		{!latency && s.RawSamples > 0, "raw samples are of latency"},
		{s.Bidirectional && s.Reverse, "bidirectional and reverse are both set: leave one out"},
		{s.Reverse && s.Duration == 0, "reverse needs a duration: the peer sends until it is over"},
		{s.RateLimit < 0 || math.IsNaN(s.RateLimit) || math.IsInf(s.RateLimit, 0), "the rate limit must be a number of bytes per second above 0"},
		{!(s.ReadShare >= 0 && s.ReadShare <= 1), "the share of reads must be 0 to 1"},
		{s.ReadShare > 0 && s.readPermille() == 0, fmt.Sprintf("a share of reads of %g: shares are kept in thousandths, so use 0.001 or more, or leave it out", s.ReadShare)},
		{s.ReadShare > 0 && (s.Op != verbs.Write || s.Transport != verbs.RC || latency), "reads are mixed with writes: use op write, transport rc, and kind bandwidth or message-rate"},
		{s.ReadShare > 0 && s.Verify, "a mix of reads and writes can't be verified: use one op"},
		{s.Verify && s.lossy() && s.Op != verbs.Send, "what is lost of a " + string(s.Transport) + " write leaves half a message, which is no corruption: verify send, or use rc"},
		{s.Verify && s.Memory.GPU != nil, "this CPU can't check a GPU's memory: leave out verify or the GPU"},
		{s.Verify && s.Memory.Ring > 0, "verify makes a ring of its own: leave out the ring"},
		{s.FlowLabels > 0 && s.FlowLabel > 0, "a flow label and a number of them are both set: leave one out"},
		{slices.ContainsFunc(s.CPUs, func(c int) bool { return c < 0 || c >= 4096 }), "a CPU's number is 0 to 4095"},
	} {
		if r.wrong {
			return errors.New(r.why)
		}
	}
	return nil
}

// validateRate refuses a rate limit at which a run of the largest size can't end before the deadline.
func (s Spec) validateRate() error {
	if s.RateLimit <= 0 {
		return nil
	}
	size := slices.Max(s.Sizes)
	messages := (float64(max(0, s.Warmup)) + float64(s.Iterations)) * float64(s.QPs)
	if takes := messages*float64(size)/s.RateLimit + s.Duration.Seconds(); takes > s.Deadline.Seconds() {
		return fmt.Errorf("at %g bytes per second, warm-up and run of %d-byte messages take %.3g s, longer than the deadline %s: raise the rate limit or the deadline, or use fewer or smaller messages",
			s.RateLimit, size, takes, s.Deadline)
	}
	return nil
}

// validateSizes refuses message sizes that the transport or the op can't carry, whatever the device.
func (s Spec) validateSizes() error {
	for _, size := range s.Sizes {
		switch {
		case size < 1 || size > control.MaxMessage:
			return fmt.Errorf("message size %d is out of range 1 to %d", size, control.MaxMessage)
		case s.Op.Atomic() && size != atomicSize:
			return fmt.Errorf("message size %d: an atomic works on %d bytes", size, atomicSize)
		case s.Transport == verbs.UD && size > maxUD:
			return fmt.Errorf("message size %d: a UD message is one packet, at most the path MTU, which is %d bytes or less", size, maxUD)
		case s.Verify && size < 8:
			return fmt.Errorf("message size %d: verify numbers each message, which takes 8 bytes", size)
		}
	}
	if s.Verify && s.TxDepth*slices.Max(s.Sizes) > 4*verifyMemory {
		return fmt.Errorf("verify keeps each message under way in a place of its own: %d of %d bytes are too much, use a smaller tx depth", s.TxDepth, slices.Max(s.Sizes))
	}
	return nil
}
