package probe

import (
	"fmt"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// Result is the one value in which a run of a probe against a peer ends, whatever happened.
// Its JSON is the machine interface of `rdmabenchd probe --output=json` and /api/v1/results:
// times in seconds, rates in bytes per second, null for what was not measured.
type Result struct {
	ID       string    `json:"id"`
	Time     time.Time `json:"time"`     // when the session began
	Duration float64   `json:"duration"` // of the whole, seconds
	Waited   float64   `json:"waited"`   // of it for a busy port, at either end

	Outcome Outcome `json:"result"`
	Stage   *Stage  `json:"stage"`
	Reason  *Reason `json:"reason"`
	Scope   *Scope  `json:"scope"`
	Detail  *string `json:"detail"` // one sentence for a person: what, where, what to do

	Taints   []Taint       `json:"taints"`
	TaintLog []TaintDetail `json:"taint_details"`
	Probe    string        `json:"probe"`
	Peer     string        `json:"peer"`
	Path     string        `json:"path"` // same_node, same_rack, cross_rack or unknown
	Device   string        `json:"device"`
	Port     int           `json:"port"`
	GIDIndex *int          `json:"gid_index"`
	Rail     string        `json:"rail"`
	PeerDev  *string       `json:"peer_device"`
	PeerPort *int          `json:"peer_port"`

	Kind      Kind            `json:"kind"`
	Transport verbs.Transport `json:"transport"`
	Op        verbs.Op        `json:"op"`
	MTU       *int            `json:"mtu"` // path MTU in use, bytes
	QPs       int             `json:"qps"`

	Memory     *control.MemoryGot `json:"memory"`      // of this end's buffer; nil: none was made
	PeerMemory *control.MemoryGot `json:"peer_memory"` // nil: not told

	Options Options `json:"options"`
	Sweep   *Sweep  `json:"sweep"` // of several sizes; nil: fewer than three
	Paths   *Paths  `json:"paths"` // of a walk over flow labels
	// ClockResidual is the relative difference between two calibrations of the clock that the samples were taken with.
	ClockResidual float64 `json:"clock_residual"`

	Runs        []Run    `json:"runs"`
	Evidence    Evidence `json:"evidence"`
	Fingerprint *string  `json:"fingerprint"`      // of this end's environment
	PeerPrint   *string  `json:"peer_fingerprint"` // of the peer's

	Repeats *Failure `json:"repeats"` // the failure that this run was to confirm

	own        ownTraffic
	spent      uint64 // payload bytes that the session put on the wire, both ways
	mtuReduced int    // bytes that one of the ports would carry, where the other's limit was below; 0: they agree
}

// Failure is why a run failed, as its result said.
type Failure struct {
	ID     string    `json:"id"`
	Time   time.Time `json:"time"`
	Stage  Stage     `json:"stage"`
	Reason Reason    `json:"reason"`
	Scope  Scope     `json:"scope"`
	Detail string    `json:"detail"`
}

// Failure returns why the run failed; nil if it did not.
func (r *Result) Failure() *Failure {
	if r.Outcome != Failed || r.Stage == nil || r.Reason == nil || r.Scope == nil || r.Detail == nil {
		return nil
	}
	return &Failure{ID: r.ID, Time: r.Time, Stage: *r.Stage, Reason: *r.Reason, Scope: *r.Scope, Detail: *r.Detail}
}

// TaintDetail is the evidence behind one taint.
type TaintDetail struct {
	Taint   Taint  `json:"taint"`
	Side    string `json:"side"`    // local or remote
	Counter string `json:"counter"` // the driver's own name, or what was compared
	Delta   uint64 `json:"delta"`
	Limit   uint64 `json:"limit"`          // what all counters of the taint were allowed, or what was expected
	Note    string `json:"note,omitempty"` // for a person, where a number does not say it
}

// String says it to a person, without the taint's name.
func (d TaintDetail) String() string {
	switch {
	case d.Note != "":
		return fmt.Sprintf("%s %s: %s", d.Side, d.Counter, d.Note)
	case d.Taint == TaintShortRun:
		return fmt.Sprintf("%s %s: only %d", d.Side, d.Counter, d.Delta)
	case d.Taint == TaintMTUReduced:
		return fmt.Sprintf("%s %s: %d, and one of the ports has %d", d.Side, d.Counter, d.Delta, d.Limit)
	case d.Taint == TaintForeignTraffic:
		return fmt.Sprintf("%s %s: %d more than this session's, tolerated are %d", d.Side, d.Counter, d.Delta, d.Limit)
	case d.Limit > 0:
		return fmt.Sprintf("%s %s +%d, tolerated are %d", d.Side, d.Counter, d.Delta, d.Limit)
	}
	return fmt.Sprintf("%s %s +%d", d.Side, d.Counter, d.Delta)
}

// Options are what the probe was carried out with, defaults filled in.
type Options struct {
	TxDepth       int     `json:"tx_depth"`
	RxDepth       int     `json:"rx_depth"`
	CQMod         int     `json:"cq_mod"`
	PostList      int     `json:"post_list"`
	Inline        int     `json:"inline"` // bytes that the device granted
	Threads       int     `json:"threads"`
	Events        bool    `json:"events"`
	Bidirectional bool    `json:"bidirectional"`
	Reverse       bool    `json:"reverse"`
	ReadShare     float64 `json:"read_share"`
	RateLimit     float64 `json:"rate_limit"` // payload bytes per second; 0: none
	Verify        bool    `json:"verify"`
	ServiceLevel  int     `json:"service_level"`
	TrafficClass  int     `json:"traffic_class"`
	FlowLabel     int     `json:"flow_label"`
	PKey          int     `json:"pkey"`
}

// Run is the timed part of a session at one message size.
type Run struct {
	Time        time.Time       `json:"time"`       // when the timed part began
	Size        int             `json:"size"`       // bytes
	Iterations  uint64          `json:"iterations"` // completed, timed messages
	Seconds     float64         `json:"seconds"`
	Latency     *LatencyStats   `json:"latency"`
	Bandwidth   *BandwidthStats `json:"bandwidth"`
	MessageRate *float64        `json:"messages_per_second"` // of all directions
	LossRatio   *float64        `json:"loss_ratio"`          // of UC and UD, warm-up included; nil: nobody counts what arrives
	Arrivals    *Arrivals       `json:"arrivals"`            // where messages may be lost
	Verified    *uint64         `json:"verified"`            // messages whose payload or value was checked, both ends
	CPUSeconds  CPUSeconds      `json:"cpu_seconds"`
	Ping        *PingStats      `json:"ping"`
	Bytes       uint64          `json:"bytes"`           // payload bytes moved by the timed part
	Delayed     int64           `json:"delayed_samples"` // during which the measuring thread lost its CPU
	Spread      *Spread         `json:"spread"`          // of repeated runs, of which this is the median

	// Histogram holds every timed sample in nanoseconds; nil unless latency was measured.
	Histogram *hdrhistogram.Histogram `json:"-"`
	// Raw are the first Spec.RawSamples samples in order, ns.
	Raw []uint64 `json:"-"`
	// Curve is messages completed over the timed part, of this end's direction.
	Curve verbs.Curve `json:"-"`

	from, to time.Duration // the window of the timed part, by the clock of latencies

	short bool // too few completions for a rate between them
}

// Arrivals are messages sent and what became of them, over the warm-up and the timed part.
type Arrivals struct {
	Sent       uint64  `json:"sent"`
	Received   uint64  `json:"received"` // of a ping-pong: answered in time
	Duplicates *uint64 `json:"duplicates"`
	Reordered  *uint64 `json:"reordered"`
	Late       *uint64 `json:"late"` // answers that came after the ping was given up
}

// Spread is how repeated runs of one size differ in what they measure: p50 in seconds, or bytes per second.
type Spread struct {
	Runs   int     `json:"runs"`
	Metric string  `json:"metric"` // p50 or bytes_per_second
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	MAD    float64 `json:"mad"` // median of the absolute deviations from the median
}

// Sweep is what the sizes of a result show together.
type Sweep struct {
	// Knee is the smallest size at 95 % of the highest bandwidth, Plateau that bandwidth in bytes per second.
	Knee    *int     `json:"knee"`
	Plateau *float64 `json:"plateau_bytes_per_second"`
	// FlatTo is the largest size whose p50, and that of all below it, is within 10 % of the lowest p50, FlatLatency.
	FlatTo      *int     `json:"flat_to"`
	FlatLatency *float64 `json:"flat_latency"` // seconds
}

// Paths is what a walk over flow labels found. The figures of the result are those of the worst label.
type Paths struct {
	Labels int         `json:"labels"`
	Metric string      `json:"metric"` // p99 (or max, of too few samples) in seconds, or bytes_per_second
	Worst  *PathValue  `json:"worst"`
	Best   *PathValue  `json:"best"`
	Values []PathValue `json:"values"`
	// Coverage is the probability that each of so many equal paths carried at least one of the labels.
	Coverage map[string]float64 `json:"coverage"`
}

// PathValue is what one flow label measured.
type PathValue struct {
	FlowLabel int      `json:"flow_label"`
	Value     *float64 `json:"value"`  // nil: it failed
	Reason    *Reason  `json:"reason"` // nil: it did not
}

// The values of LatencyStats.Measure.
const (
	HalfRTT   = "half-rtt"  // half of the round trip: write, send
	Operation = "operation" // post to completion: read, atomics
)

// LatencyStats are over all timed samples of one run, in seconds. A quantile that the number of
// samples can't carry is nil.
type LatencyStats struct {
	Measure string   `json:"measure"`
	Samples int64    `json:"samples"`
	Min     float64  `json:"min"`
	Mean    float64  `json:"mean"`
	P50     *float64 `json:"p50"`
	P90     *float64 `json:"p90"`
	P99     *float64 `json:"p99"`
	P999    *float64 `json:"p999"`
	Max     float64  `json:"max"`
	Stddev  float64  `json:"stddev"`
}

// BandwidthStats are payload bytes per second. Where the op shows arrivals they are what arrived, not what was sent. Min and Max
// are over 10 ms intervals, of one direction.
type BandwidthStats struct {
	BytesPerSecond float64  `json:"bytes_per_second"` // of all directions
	Tx             *float64 `json:"tx"`               // from this node; nil: nothing flows that way
	Rx             *float64 `json:"rx"`               // to this node
	Min            *float64 `json:"min"`
	Max            *float64 `json:"max"`
	Offered        *float64 `json:"offered"`   // what the sending end posted; nil: no end counted it apart
	Confirmed      bool     `json:"confirmed"` // counted by the end where it arrived
}

// CPUSeconds is the processor time of the measuring threads, per end.
type CPUSeconds struct {
	Local  *float64 `json:"local"`
	Remote *float64 `json:"remote"`
}

// Evidence is what both ends saw around the timed parts. A side that can't tell is nil.
type Evidence struct {
	Local  *EndEvidence `json:"local"`
	Remote *EndEvidence `json:"remote"`
}

// EndEvidence is one end's port counters over the timed parts of a session. Absent counters are
// absent, not 0.
type EndEvidence struct {
	Device   string              `json:"device"`
	Port     int                 `json:"port"`
	Counters map[string]uint64   `json:"counters"` // driver's own name to increase
	Classes  map[string]uint64   `json:"classes"`  // normalised class to increase, docs/reasons.md
	Moved    map[string][]string `json:"moved"`    // class to the counters of it that increased
	Unknown  []string            `json:"unknown"`  // counters whose increase can't be told

	// Traffic is all that passed the port, by tx_bytes, rx_bytes, tx_packets and rx_packets, as far as the driver counts it.
	Traffic map[string]uint64 `json:"traffic"`
	// CannotTell lists the taints that this end has no signal of. That there is no such taint says nothing then.
	CannotTell []string `json:"cannot_tell"`
	// Conditions are what else speaks against figures taken at this end.
	Conditions []control.Condition `json:"conditions"`
}

// Usable reports whether the result carries figures.
func (r *Result) Usable() bool { return r.Outcome == OK || r.Outcome == Tainted }
