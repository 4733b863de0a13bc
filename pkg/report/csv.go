package report

import (
	"encoding/csv"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// timeFormat is RFC 3339 in UTC with a fixed number of digits, so that text sorts as time does.
const timeFormat = "2006-01-02T15:04:05.000000Z"

// column is one of the CSV's: a name, and a run's cell. The run is nil where a probe ended without one.
type column struct {
	name string
	cell func(r *probe.Result, run *probe.Run) string
}

// columns of the CSV, in their order. Both are an interface: new ones go to the end.
var columns = []column{
	ofResult("id", func(r *probe.Result) string { return r.ID }),
	{"time", func(r *probe.Result, run *probe.Run) string {
		at := r.Time
		if run != nil && !run.Time.IsZero() {
			at = run.Time
		}
		return at.UTC().Format(timeFormat)
	}},
	ofResult("result", func(r *probe.Result) string { return string(r.Outcome) }),
	ofResult("stage", func(r *probe.Result) string { return optional(r.Stage) }),
	ofResult("reason", func(r *probe.Result) string { return optional(r.Reason) }),
	ofResult("scope", func(r *probe.Result) string { return optional(r.Scope) }),
	ofResult("taints", func(r *probe.Result) string {
		var names []string
		for _, t := range r.Taints {
			names = append(names, string(t))
		}
		return strings.Join(names, " ")
	}),
	ofResult("probe", func(r *probe.Result) string { return r.Probe }),
	ofResult("peer", func(r *probe.Result) string { return r.Peer }),
	ofResult("peer_device", func(r *probe.Result) string { return optional(r.PeerDev) }),
	ofResult("peer_port", func(r *probe.Result) string { return integer(r.PeerPort) }),
	ofResult("device", func(r *probe.Result) string { return r.Device }),
	ofResult("port", func(r *probe.Result) string { return strconv.Itoa(r.Port) }),
	ofResult("gid_index", func(r *probe.Result) string { return integer(r.GIDIndex) }),
	ofResult("path", func(r *probe.Result) string { return r.Path }),
	ofResult("kind", func(r *probe.Result) string { return string(r.Kind) }),
	ofResult("transport", func(r *probe.Result) string { return string(r.Transport) }),
	ofResult("op", func(r *probe.Result) string { return string(r.Op) }),
	ofResult("mtu_bytes", func(r *probe.Result) string { return integer(r.MTU) }),
	ofResult("qps", func(r *probe.Result) string { return strconv.Itoa(r.QPs) }),
	option("tx_depth", func(o probe.Options) int { return o.TxDepth }),
	option("rx_depth", func(o probe.Options) int { return o.RxDepth }),
	option("cq_mod", func(o probe.Options) int { return o.CQMod }),
	option("post_list", func(o probe.Options) int { return o.PostList }),
	option("inline_bytes", func(o probe.Options) int { return o.Inline }),
	option("threads", func(o probe.Options) int { return o.Threads }),
	boolean("events", func(o probe.Options) bool { return o.Events }),
	boolean("bidirectional", func(o probe.Options) bool { return o.Bidirectional }),
	boolean("reverse", func(o probe.Options) bool { return o.Reverse }),
	boolean("verify", func(o probe.Options) bool { return o.Verify }),
	ofResult("read_share", func(r *probe.Result) string { return number(r.Options.ReadShare) }),
	ofResult("rate_limit_bytes_per_second", func(r *probe.Result) string {
		if r.Options.RateLimit == 0 {
			return ""
		}
		return number(r.Options.RateLimit)
	}),
	option("service_level", func(o probe.Options) int { return o.ServiceLevel }),
	option("traffic_class", func(o probe.Options) int { return o.TrafficClass }),
	ofResult("flow_label", func(r *probe.Result) string {
		if r.Paths != nil && r.Paths.Worst != nil {
			return strconv.Itoa(r.Paths.Worst.FlowLabel) // whose figures the result's are
		}
		return strconv.Itoa(r.Options.FlowLabel)
	}),
	option("pkey", func(o probe.Options) int { return o.PKey }),

	ofRun("size_bytes", func(run *probe.Run) string { return strconv.Itoa(run.Size) }),
	ofRun("iterations", func(run *probe.Run) string { return strconv.FormatUint(run.Iterations, 10) }),
	ofRun("seconds", func(run *probe.Run) string { return number(run.Seconds) }),
	ofRun("payload_bytes", func(run *probe.Run) string { return strconv.FormatUint(run.Bytes, 10) }),
	ofLatency("latency_measure", func(l *probe.LatencyStats) string { return l.Measure }),
	ofLatency("latency_samples", func(l *probe.LatencyStats) string { return strconv.FormatInt(l.Samples, 10) }),
	ofLatency("latency_min_seconds", func(l *probe.LatencyStats) string { return number(l.Min) }),
	ofLatency("latency_mean_seconds", func(l *probe.LatencyStats) string { return number(l.Mean) }),
	ofLatency("latency_p50_seconds", func(l *probe.LatencyStats) string { return figure(l.P50) }),
	ofLatency("latency_p90_seconds", func(l *probe.LatencyStats) string { return figure(l.P90) }),
	ofLatency("latency_p99_seconds", func(l *probe.LatencyStats) string { return figure(l.P99) }),
	ofLatency("latency_p999_seconds", func(l *probe.LatencyStats) string { return figure(l.P999) }),
	ofLatency("latency_max_seconds", func(l *probe.LatencyStats) string { return number(l.Max) }),
	ofLatency("latency_stddev_seconds", func(l *probe.LatencyStats) string { return number(l.Stddev) }),
	ofRun("delayed_samples", func(run *probe.Run) string {
		if run.Latency == nil || run.Ping != nil {
			return ""
		}
		return strconv.FormatInt(run.Delayed, 10)
	}),
	ofBandwidth("bytes_per_second", func(b *probe.BandwidthStats) string { return number(b.BytesPerSecond) }),
	ofBandwidth("tx_bytes_per_second", func(b *probe.BandwidthStats) string { return figure(b.Tx) }),
	ofBandwidth("rx_bytes_per_second", func(b *probe.BandwidthStats) string { return figure(b.Rx) }),
	ofBandwidth("min_bytes_per_second", func(b *probe.BandwidthStats) string { return figure(b.Min) }),
	ofBandwidth("max_bytes_per_second", func(b *probe.BandwidthStats) string { return figure(b.Max) }),
	ofBandwidth("offered_bytes_per_second", func(b *probe.BandwidthStats) string { return figure(b.Offered) }),
	ofBandwidth("confirmed", func(b *probe.BandwidthStats) string { return strconv.FormatBool(b.Confirmed) }),
	ofRun("messages_per_second", func(run *probe.Run) string { return figure(run.MessageRate) }),
	ofRun("loss_ratio", func(run *probe.Run) string { return figure(run.LossRatio) }),
	ofRun("sent", func(run *probe.Run) string {
		switch {
		case run.Ping != nil:
			return strconv.Itoa(run.Ping.Sent)
		case run.Arrivals != nil:
			return strconv.FormatUint(run.Arrivals.Sent, 10)
		}
		return ""
	}),
	ofRun("received", func(run *probe.Run) string {
		switch {
		case run.Ping != nil:
			return strconv.Itoa(run.Ping.Sent - run.Ping.Lost)
		case run.Arrivals != nil:
			return strconv.FormatUint(run.Arrivals.Received, 10)
		}
		return ""
	}),
	ofArrivals("duplicates", func(a *probe.Arrivals) *uint64 { return a.Duplicates }),
	ofArrivals("reordered", func(a *probe.Arrivals) *uint64 { return a.Reordered }),
	ofArrivals("late", func(a *probe.Arrivals) *uint64 { return a.Late }),
	ofRun("invalid", func(run *probe.Run) string {
		if run.Ping == nil {
			return ""
		}
		return strconv.Itoa(run.Ping.Invalid)
	}),
	ofRun("stamps", func(run *probe.Run) string {
		if run.Ping == nil {
			return ""
		}
		return run.Ping.Stamps
	}),
	ofRun("verified", func(run *probe.Run) string { return count(run.Verified) }),
	ofRun("cpu_local_seconds", func(run *probe.Run) string { return figure(run.CPUSeconds.Local) }),
	ofRun("cpu_remote_seconds", func(run *probe.Run) string { return figure(run.CPUSeconds.Remote) }),
	ofSpread("repeat_runs", func(s *probe.Spread) string { return strconv.Itoa(s.Runs) }),
	ofSpread("repeat_metric", func(s *probe.Spread) string { return s.Metric }),
	ofSpread("repeat_min", func(s *probe.Spread) string { return number(s.Min) }),
	ofSpread("repeat_max", func(s *probe.Spread) string { return number(s.Max) }),
	ofSpread("repeat_mad", func(s *probe.Spread) string { return number(s.MAD) }),
	ofResult("clock_residual", func(r *probe.Result) string { return number(r.ClockResidual) }),
	ofResult("fingerprint", func(r *probe.Result) string { return fingerprint(r.Fingerprint) }),
	ofResult("peer_fingerprint", func(r *probe.Result) string { return fingerprint(r.PeerPrint) }),
}

// CSV writes results as RFC 4180 says, with \n as line end: a header, then one line a run, or one without figures for a result
// that has no run. What was not measured is an empty cell.
func CSV(w io.Writer, results ...*probe.Result) error {
	out := csv.NewWriter(w)
	line := make([]string, len(columns))
	for i, c := range columns {
		line[i] = c.name
	}
	if err := out.Write(line); err != nil {
		return err
	}
	row := func(r *probe.Result, run *probe.Run) error {
		for i, c := range columns {
			line[i] = oneLine(c.cell(r, run))
		}
		return out.Write(line)
	}
	for _, r := range results {
		if len(r.Runs) == 0 {
			if err := row(r, nil); err != nil {
				return err
			}
		}
		for i := range r.Runs {
			if err := row(r, &r.Runs[i]); err != nil {
				return err
			}
		}
	}
	out.Flush()
	return out.Error()
}

// RawSamples writes every latency sample that the runs kept, in the order in which they were taken.
func RawSamples(w io.Writer, r *probe.Result) error {
	out := csv.NewWriter(w)
	if err := out.Write([]string{"size_bytes", "index", "nanoseconds"}); err != nil {
		return err
	}
	for _, run := range r.Runs {
		size := strconv.Itoa(run.Size)
		for i, ns := range run.Raw {
			if err := out.Write([]string{size, strconv.Itoa(i), strconv.FormatUint(ns, 10)}); err != nil {
				return err
			}
		}
	}
	out.Flush()
	return out.Error()
}

func ofResult(name string, f func(*probe.Result) string) column {
	return column{name, func(r *probe.Result, _ *probe.Run) string { return f(r) }}
}

func ofRun(name string, f func(*probe.Run) string) column {
	return column{name, func(_ *probe.Result, run *probe.Run) string {
		if run == nil {
			return ""
		}
		return f(run)
	}}
}

func option(name string, f func(probe.Options) int) column {
	return ofResult(name, func(r *probe.Result) string { return strconv.Itoa(f(r.Options)) })
}

func boolean(name string, f func(probe.Options) bool) column {
	return ofResult(name, func(r *probe.Result) string { return strconv.FormatBool(f(r.Options)) })
}

func ofLatency(name string, f func(*probe.LatencyStats) string) column {
	return part(name, func(run *probe.Run) *probe.LatencyStats { return run.Latency }, f)
}

func ofBandwidth(name string, f func(*probe.BandwidthStats) string) column {
	return part(name, func(run *probe.Run) *probe.BandwidthStats { return run.Bandwidth }, f)
}

func ofSpread(name string, f func(*probe.Spread) string) column {
	return part(name, func(run *probe.Run) *probe.Spread { return run.Spread }, f)
}

func ofArrivals(name string, f func(*probe.Arrivals) *uint64) column {
	return part(name, func(run *probe.Run) *probe.Arrivals { return run.Arrivals }, func(a *probe.Arrivals) string { return count(f(a)) })
}

// part is a column of what not every run has.
func part[T any](name string, of func(*probe.Run) *T, f func(*T) string) column {
	return ofRun(name, func(run *probe.Run) string {
		if p := of(run); p != nil {
			return f(p)
		}
		return ""
	})
}

func optional[T ~string](s *T) string {
	if s == nil {
		return ""
	}
	return string(*s)
}

// fingerprint begins with letters: of hexadecimal digits alone some would be read as numbers.
func fingerprint(s *string) string {
	if s == nil || *s == "" {
		return ""
	}
	return "fp-" + *s
}

func integer(v *int) string {
	if v == nil {
		return ""
	}
	return strconv.Itoa(*v)
}

func count(v *uint64) string {
	if v == nil {
		return ""
	}
	return strconv.FormatUint(*v, 10)
}

func figure(v *float64) string {
	if v == nil {
		return ""
	}
	return number(*v)
}

// number has as many digits as it takes to get the same number back.
func number(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// stamp is a point in time for people.
func stamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") }
