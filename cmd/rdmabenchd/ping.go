package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// pingFlags refuses the flags that mean nothing where pings are sent, and those that mean something only there.
func (f *probeFlags) pingFlags(s *probe.Spec) error {
	if s.Kind != probe.Ping {
		if s.Gap != 0 {
			return errors.New("--interval is between pings: add --kind=ping, or leave it out")
		}
		return nil
	}
	for _, x := range []struct {
		name string
		set  bool
	}{
		{"qps", s.QPs != 0}, {"tx-depth", s.TxDepth != 0}, {"rx-depth", s.RxDepth != 0}, {"cq-mod", s.CQMod != 0}, {"post-list", s.PostList != 0},
		{"warmup", s.Warmup != 0}, {"inline", s.Inline != 0}, {"mtu", s.MTU != 0}, {"ring", s.Memory.Ring != 0}, {"gpu", s.Memory.GPU != nil},
		{"huge-pages", s.Memory.HugePages}, {"rdma-cm", s.RDMACM}, {"bidirectional", s.Bidirectional}, {"reverse", s.Reverse}, {"read-share", s.ReadShare != 0},
		{"rate-limit", s.RateLimit != 0}, {"repeat", s.Repeat != 0}, {"verify", s.Verify}, {"threads", s.Threads != 0}, {"events", s.Events},
		{"cpus", len(s.CPUs) > 0}, {"flow-labels", s.FlowLabels != 0}, {"pkey", s.PKey != 0}, {"qp-timeout", s.Timeout != 0}, {"retry-count", s.Retries != 0},
		{"rnr-retry", s.RNRRetry != 0}, {"all-sizes", f.allSizes}, {"profile", f.profile != ""},
	} {
		if x.set {
			return fmt.Errorf("--%s means nothing to a ping: leave it out", x.name)
		}
	}
	return nil
}

// printPing prints what came of pings as ping(8) and perftest would, a line a size.
func printPing(w io.Writer, r *probe.Result) {
	gid := "none"
	if r.GIDIndex != nil {
		gid = fmt.Sprint(*r.GIDIndex)
	}
	fmt.Fprintf(w, "UD ping: %s port %d -> %s %s port %d, MTU %d, GID index %s", r.Device, r.Port, r.Peer, *r.PeerDev, *r.PeerPort, *r.MTU, gid)
	if len(r.Runs) > 0 {
		fmt.Fprintf(w, ", one every %g ms, %s stamps", r.Runs[0].Ping.Gap*1e3, r.Runs[0].Ping.Stamps)
	}
	fmt.Fprint(w, "\n\n")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "#bytes\tsent\tlost\tinvalid\tloss\tt_min[us]\tt_p50[us]\tt_p90[us]\tt_p99[us]\tt_max[us]\tt_avg[us]\tt_stdev[us]\tpeer[us]\town[us]\tmeasure: %s\t\n", probe.RTT)
	for _, run := range r.Runs {
		s := run.Ping
		fmt.Fprintf(t, "%d\t%d\t%d\t%d\t%.2f%%\t", run.Size, s.Sent, s.Lost, s.Invalid, *run.LossRatio*100)
		l := run.Latency
		if l == nil {
			fmt.Fprintln(t, strings.Repeat("-\t", 9)+"\t")
			continue
		}
		fmt.Fprintf(t, "%.2f\t%s\t%s\t%s\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t\t\n", l.Min*1e6, micros(l.P50), micros(l.P90), micros(l.P99), l.Max*1e6, l.Mean*1e6,
			l.Stddev*1e6, s.Peer.Mean*1e6, s.Own.Mean*1e6)
	}
	t.Flush()
	for _, run := range r.Runs {
		if why := invalid(run.Ping.Why); why != "" {
			fmt.Fprintf(w, "\nof %d bytes: %s", run.Size, why)
		}
	}
	fmt.Fprintf(w, "\nresult: %s\n", r.Outcome)
}

// invalid says which datagrams are no samples.
func invalid(v probe.PingInvalid) string {
	var out []string
	for _, x := range []struct {
		n    uint64
		what string
	}{
		{uint64(v.Late), "late"}, {uint64(v.Stamps), "with stamps that can't be"}, {uint64(v.OwnDelay), "during which this end waited for a CPU"},
		{uint64(v.PeerBusy), "during a heavy probe of the peer's port"}, {v.Duplicates, "duplicates"}, {v.Foreign, "not of this run"},
	} {
		if x.n > 0 {
			out = append(out, fmt.Sprintf("%d %s", x.n, x.what))
		}
	}
	return strings.Join(out, ", ")
}
