package probe

import (
	"errors"
	"fmt"
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

	TxDepth  int // outstanding sends per QP
	RxDepth  int // posted receives per QP, on the end that receives
	QPs      int // queue pairs
	CQMod    int // one signaled completion per CQMod sends
	PostList int // work requests per post
	Inline   int // bytes of inline data to ask for

	Memory Memory
	RDMACM bool // connect by rdma_cm; on iWARP always

	MTU          int // path MTU in bytes; 0: the smaller of both ports' active MTU
	ServiceLevel int
	TrafficClass int
	FlowLabel    int

	Timeout  int           // QP local ACK timeout exponent, 4.096 µs << Timeout; 0: as fits the device
	Retries  int           // QP retry_cnt; 7 never gives up on some drivers; negative: none
	RNRRetry int           // QP rnr_retry; 7 means for ever; negative: none
	Deadline time.Duration // for the whole session, both ends
	Wait     time.Duration // for a port that is busy, at either end, before the probe is skipped

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
	defaultWait      = 5 * time.Second
	maxScheduledWait = 30 * time.Second

	// stall ends a run in which nothing completes. The QP's own timers (0.5 s by default) should speak first.
	stall = 3 * time.Second
)

// WithDefaults returns the spec with every zero field that has a default replaced by it. Negatives that mean none stay, so
// that it may be called again.
func (s Spec) WithDefaults() Spec {
	if s.Kind == Ping {
		return s.pingDefaults()
	}
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	if s.Kind == "" {
		s.Kind = Latency
	}
	if s.Transport == "" {
		s.Transport = verbs.RC
	}
	if s.Op == "" {
		s.Op = verbs.Write
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
	def(&s.TxDepth, depth)
	if s.Kind == Latency {
		def(&s.RxDepth, latencyDepth)
		def(&s.Warmup, max(1, min(maxLatencyWarmup, s.Iterations/10)))
	} else {
		def(&s.RxDepth, defaultRxDepth)
		def(&s.Warmup, s.TxDepth)
	}
	def(&s.QPs, 1)
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
		s.Deadline = minDeadline + time.Duration(len(s.Sizes))*(2*s.Duration+time.Second)
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

// answered reports whether the responder's CPU takes part: it answers pings, or counts what arrives.
func (s Spec) answered() bool {
	if s.Kind == Latency {
		return !s.Op.OneSided()
	}
	return s.Op.Receives()
}

// Validate refuses combinations that can't work, before anything is sent. Call it on a spec with defaults.
func (s Spec) Validate() error {
	if s.Kind == Ping {
		return s.validatePing()
	}
	switch {
	case s.Kind != Latency && s.Kind != Bandwidth && s.Kind != MessageRate:
		return fmt.Errorf("kind %q: want latency, bandwidth, message-rate or ping", s.Kind)
	case s.Transport != verbs.RC:
		return fmt.Errorf("transport %q: want rc", s.Transport)
	case s.Op != verbs.Write && s.Op != verbs.Read && s.Op != verbs.Send:
		return fmt.Errorf("op %q: want write, read or send", s.Op)
	case s.Iterations > 0 && s.Duration > 0:
		return errors.New("iterations and duration are both set: leave one out")
	case s.Iterations < 0 || s.Duration < 0 || s.Deadline < 0:
		return errors.New("iterations, duration and deadline can't be negative")
	case s.Duration >= s.Deadline:
		return fmt.Errorf("deadline %s must be longer than the duration %s", s.Deadline, s.Duration)
	case s.Deadline > deadlineOf:
		return fmt.Errorf("deadline %s: a session may last at most %s", s.Deadline, deadlineOf)
	case s.RDMACM && s.Transport != verbs.RC:
		return fmt.Errorf("rdma_cm connects %s, not %s: leave it out", verbs.RC, s.Transport)
	case s.Kind == Latency && s.QPs != 1:
		return fmt.Errorf("latency is measured on one QP, not %d", s.QPs)
	case s.Kind == Latency && s.PostList != 1:
		return fmt.Errorf("latency posts one work request at a time, not a list of %d", s.PostList)
	}
	for _, r := range []struct {
		what      string
		v, lo, hi int
	}{
		{"QPs", s.QPs, 1, control.MaxQPs},
		{"tx depth", s.TxDepth, 1, 1 << 16},
		{"rx depth", s.RxDepth, 1, 1 << 16},
		{"post list", s.PostList, 1, 1 << 16},
		{"CQ moderation", s.CQMod, 1, 1 << 16},
		{"inline size", s.Inline, 0, 1 << 16},
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
	case s.PostList > s.TxDepth:
		return fmt.Errorf("post list %d is longer than the tx depth %d", s.PostList, s.TxDepth)
	case s.CQMod > s.TxDepth:
		return fmt.Errorf("CQ moderation %d is above the tx depth %d: the queue would fill before a completion", s.CQMod, s.TxDepth)
	case s.CQMod%s.PostList != 0:
		return fmt.Errorf("CQ moderation %d must be a multiple of the post list %d", s.CQMod, s.PostList)
	}
	for _, size := range s.Sizes {
		if size < 1 || size > control.MaxMessage {
			return fmt.Errorf("message size %d is out of range 1 to %d", size, control.MaxMessage)
		}
	}
	if err := s.Memory.validate(&s, slices.Max(s.Sizes)); err != nil {
		return err
	}
	if s.MTU != 0 && !slices.Contains([]int{256, 512, 1024, 2048, 4096}, s.MTU) {
		return fmt.Errorf("MTU %d: want 256, 512, 1024, 2048 or 4096", s.MTU)
	}
	return nil
}
