package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// column is one of a table of runs.
type column struct {
	head string
	cell func(run *probe.Run) string
}

// printResult prints a table that a perftest user reads at once: its units, its definitions.
func printResult(w io.Writer, spec probe.Spec, r *probe.Result) {
	if r.Kind == probe.Ping {
		printPing(w, r)
		return
	}
	fmt.Fprintf(w, "%s\n\n", heading(spec, r))
	columns := bandwidthColumns(r)
	if r.Kind == probe.Latency {
		columns = latencyColumns(r)
	}
	columns = append(columns, commonColumns(r)...)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, c := range columns {
		fmt.Fprint(t, c.head, "\t")
	}
	fmt.Fprintln(t)
	for i := range r.Runs {
		if r.Runs[i].Latency == nil && r.Runs[i].Bandwidth == nil {
			continue
		}
		for _, c := range columns {
			fmt.Fprint(t, c.cell(&r.Runs[i]), "\t")
		}
		fmt.Fprintln(t)
	}
	t.Flush()
	if r.Sweep != nil {
		printSweep(w, r.Sweep)
	}
	if r.Paths != nil {
		printPaths(w, r.Paths)
	}
	fmt.Fprintf(w, "\nmemory: %s; of the peer: %s\n", memoryText(r.Memory), memoryText(r.PeerMemory))
	fmt.Fprintf(w, "result: %s\n", r.Outcome)
	for _, d := range r.TaintLog {
		fmt.Fprintf(w, "  %s: %s\n", d.Taint, oneLine(d.String()))
	}
	blind := r.CannotTell()
	for _, side := range []string{"local", "remote"} {
		if slices.Contains(blind[side], string(probe.TaintRetransmit)) {
			fmt.Fprintf(w, "  the %s device can't tell whether packets were sent again\n", side)
		}
	}
}

// heading says what was measured, and with what.
func heading(spec probe.Spec, r *probe.Result) string {
	gid := "none"
	if r.GIDIndex != nil {
		gid = fmt.Sprint(*r.GIDIndex)
	}
	arrow := "->"
	switch {
	case spec.Bidirectional:
		arrow = "<->"
	case spec.Reverse:
		arrow = "<-"
	}
	text := fmt.Sprintf("%s %s %s: %s port %d %s %s %s port %d, %d QP, MTU %d, GID index %s, tx depth %d",
		strings.ToUpper(string(r.Transport)), strings.ToUpper(string(r.Op)), r.Kind, r.Device, r.Port, arrow, r.Peer, *r.PeerDev, *r.PeerPort, r.QPs, *r.MTU, gid,
		spec.TxDepth)
	if r.Kind != probe.Latency {
		text += fmt.Sprintf(", CQ moderation %d, post list %d", spec.CQMod, spec.PostList)
	}
	if r.Options.Inline > 0 {
		text += fmt.Sprintf(", inline %d", r.Options.Inline)
	}
	if spec.Threads > 1 {
		text += fmt.Sprintf(", %d threads", spec.Threads)
	}
	if spec.Events {
		text += ", events"
	}
	if spec.ReadShare > 0 {
		text += fmt.Sprintf(", %g %% reads", spec.ReadShare*100)
	}
	if spec.RateLimit > 0 {
		text += fmt.Sprintf(", at most %.2f MiB/s", spec.RateLimit/(1<<20))
	}
	return text
}

func latencyColumns(r *probe.Result) []column {
	of := func(f func(l *probe.LatencyStats) string) func(*probe.Run) string {
		return func(run *probe.Run) string { return f(run.Latency) }
	}
	measure := probe.HalfRTT
	if len(r.Runs) > 0 && r.Runs[0].Latency != nil {
		measure = r.Runs[0].Latency.Measure
	}
	return []column{
		{"#bytes", func(run *probe.Run) string { return strconv.Itoa(run.Size) }},
		{"#iterations", func(run *probe.Run) string { return strconv.FormatUint(run.Iterations, 10) }},
		{"t_min[us]", of(func(l *probe.LatencyStats) string { return micros(&l.Min) })},
		{"t_p50[us]", of(func(l *probe.LatencyStats) string { return micros(l.P50) })},
		{"t_p90[us]", of(func(l *probe.LatencyStats) string { return micros(l.P90) })},
		{"t_p99[us]", of(func(l *probe.LatencyStats) string { return micros(l.P99) })},
		{"t_p99.9[us]", of(func(l *probe.LatencyStats) string { return micros(l.P999) })},
		{"t_max[us]", of(func(l *probe.LatencyStats) string { return micros(&l.Max) })},
		{"t_avg[us]", of(func(l *probe.LatencyStats) string { return micros(&l.Mean) })},
		{"t_stdev[us]", of(func(l *probe.LatencyStats) string { return micros(&l.Stddev) })},
		{"measure: " + measure, func(*probe.Run) string { return "" }},
	}
}

func bandwidthColumns(r *probe.Result) []column {
	of := func(f func(b *probe.BandwidthStats) string) func(*probe.Run) string {
		return func(run *probe.Run) string { return f(run.Bandwidth) }
	}
	columns := []column{
		{"#bytes", func(run *probe.Run) string { return strconv.Itoa(run.Size) }},
		{"#iterations", func(run *probe.Run) string { return strconv.FormatUint(run.Iterations, 10) }},
		{"BW min[MiB/s]", of(func(b *probe.BandwidthStats) string { return mebi(b.Min) })},
		{"BW average[MiB/s]", of(func(b *probe.BandwidthStats) string { return mebi(&b.BytesPerSecond) })},
		{"BW max[MiB/s]", of(func(b *probe.BandwidthStats) string { return mebi(b.Max) })},
		{"BW average[Gb/s]", of(func(b *probe.BandwidthStats) string { return fmt.Sprintf("%.3f", b.BytesPerSecond*8/1e9) })},
		{"MsgRate[Mpps]", func(run *probe.Run) string {
			if run.MessageRate == nil {
				return "-"
			}
			return fmt.Sprintf("%.6f", *run.MessageRate/1e6)
		}},
	}
	if r.Options.Bidirectional || r.Options.ReadShare > 0 {
		columns = append(columns,
			column{"sent[MiB/s]", of(func(b *probe.BandwidthStats) string { return mebi(b.Tx) })},
			column{"received[MiB/s]", of(func(b *probe.BandwidthStats) string { return mebi(b.Rx) })})
	}
	return columns
}

// commonColumns are those of what some probes have besides their figures.
func commonColumns(r *probe.Result) []column {
	has := func(f func(run *probe.Run) bool) bool {
		return slices.ContainsFunc(r.Runs, func(run probe.Run) bool { return f(&run) })
	}
	var out []column
	if has(func(run *probe.Run) bool { return run.Arrivals != nil }) {
		of := func(f func(a *probe.Arrivals) string) func(*probe.Run) string {
			return func(run *probe.Run) string {
				if run.Arrivals == nil {
					return "-"
				}
				return f(run.Arrivals)
			}
		}
		out = append(out,
			column{"lost", of(func(a *probe.Arrivals) string { return strconv.FormatUint(a.Sent-min(a.Sent, a.Received), 10) })},
			column{"loss", func(run *probe.Run) string {
				if run.LossRatio == nil {
					return "-"
				}
				return fmt.Sprintf("%.2f%%", *run.LossRatio*100)
			}})
		if has(func(run *probe.Run) bool { return run.Arrivals != nil && run.Arrivals.Duplicates != nil }) {
			out = append(out,
				column{"duplicates", of(func(a *probe.Arrivals) string { return count(a.Duplicates) })},
				column{"reordered", of(func(a *probe.Arrivals) string { return count(a.Reordered) })})
		}
		if has(func(run *probe.Run) bool { return run.Arrivals != nil && run.Arrivals.Late != nil }) {
			out = append(out, column{"late", of(func(a *probe.Arrivals) string { return count(a.Late) })})
		}
	}
	if has(func(run *probe.Run) bool { return run.Verified != nil }) {
		out = append(out, column{"verified", func(run *probe.Run) string { return count(run.Verified) }})
	}
	if has(func(run *probe.Run) bool { return run.Spread != nil }) {
		out = append(out, column{"repeats: min..max (MAD)", func(run *probe.Run) string {
			s := run.Spread
			if s == nil {
				return "-"
			}
			value := measured(s.Metric)
			return fmt.Sprintf("%s..%s (%s)", value(s.Min), value(s.Max), value(s.MAD))
		}})
	}
	return append(out,
		column{"CPU[s]", func(run *probe.Run) string { return secondsText(run.CPUSeconds.Local) }},
		column{"peer CPU[s]", func(run *probe.Run) string { return secondsText(run.CPUSeconds.Remote) }})
}

// measured returns how values of a metric are printed.
func measured(metric string) func(float64) string {
	if metric == "bytes_per_second" {
		return func(v float64) string { return mebi(&v) }
	}
	return func(v float64) string { return micros(&v) }
}

func unitOf(metric string) string {
	if metric == "bytes_per_second" {
		return "MiB/s"
	}
	return "us"
}

func printSweep(w io.Writer, s *probe.Sweep) {
	if s.Knee != nil && s.Plateau != nil {
		fmt.Fprintf(w, "\nknee: %d bytes, the smallest size with 95 %% of the plateau of %s MiB/s\n", *s.Knee, mebi(s.Plateau))
	}
	if s.FlatTo != nil && s.FlatLatency != nil {
		fmt.Fprintf(w, "\nflat up to %d bytes: p50 within 10 %% of the lowest, %s us\n", *s.FlatTo, micros(s.FlatLatency))
	}
}

// printPaths prints what each flow label measured, worst first, and how likely it is that every path was one of theirs.
func printPaths(w io.Writer, p *probe.Paths) {
	value := measured(p.Metric)
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "flow label\t%s[%s]\t\t\n", strings.ReplaceAll(p.Metric, "bytes_per_second", "BW average"), unitOf(p.Metric))
	sorted := slices.SortedStableFunc(slices.Values(p.Values), func(a, b probe.PathValue) int {
		switch {
		case a.Value == nil || b.Value == nil:
			return cmp.Compare(truth(a.Value != nil), truth(b.Value != nil))
		case p.Metric == "bytes_per_second":
			return cmp.Compare(*a.Value, *b.Value)
		}
		return cmp.Compare(*b.Value, *a.Value)
	})
	for _, v := range sorted {
		text, note := "-", ""
		if v.Value != nil {
			text = value(*v.Value)
		}
		switch {
		case v.Reason != nil:
			note = string(*v.Reason)
		case p.Worst != nil && v.FlowLabel == p.Worst.FlowLabel:
			note = "worst: the figures above"
		case p.Best != nil && v.FlowLabel == p.Best.FlowLabel:
			note = "best"
		}
		fmt.Fprintf(t, "%d\t%s\t%s\t\n", v.FlowLabel, text, note)
	}
	t.Flush()
	paths := slices.SortedFunc(maps.Keys(p.Coverage), func(a, b string) int {
		x, _ := strconv.Atoi(a)
		y, _ := strconv.Atoi(b)
		return x - y
	})
	var all []string
	for _, n := range paths {
		all = append(all, fmt.Sprintf("%s: %.1f %%", n, p.Coverage[n]*100))
	}
	fmt.Fprintf(w, "chance that %d labels took each of so many equal paths: %s\n", p.Labels, strings.Join(all, ", "))
}

func truth(b bool) int {
	if b {
		return 1
	}
	return 0
}

// memoryText is an end's memory in a few words.
func memoryText(m *control.MemoryGot) string {
	if m == nil {
		return "not told"
	}
	text := m.Kind
	if m.NUMANode != nil {
		text += fmt.Sprintf(" on NUMA node %d", *m.NUMANode)
	}
	if m.RelaxedOrdering {
		text += ", relaxed ordering"
	}
	if m.Ring > 0 {
		text += fmt.Sprintf(", ring of %d bytes", m.Ring)
	}
	return text
}

// micros prints seconds in µs; a quantile that the samples can't carry is a dash.
func micros(s *float64) string {
	if s == nil {
		return "-"
	}
	return fmt.Sprintf("%.2f", *s*1e6)
}

func mebi(b *float64) string {
	if b == nil {
		return "-"
	}
	return fmt.Sprintf("%.2f", *b/(1<<20))
}

func secondsText(s *float64) string {
	if s == nil {
		return "-"
	}
	return fmt.Sprintf("%.3f", *s)
}

func count(n *uint64) string {
	if n == nil {
		return "-"
	}
	return strconv.FormatUint(*n, 10)
}
