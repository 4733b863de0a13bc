package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// group probes all peers at the same time. JSON is one result a line, and the sum in the last.
func (f *probeFlags) group(ctx context.Context, env *environment, i *probe.Initiator, spec probe.Spec, device string, port int) error {
	i.OnProgress = nil // which is of one session
	results := i.ProbeGroup(ctx, spec, f.targets(), device, port)
	sum := probe.GroupOf(f.pattern, results)
	if f.out.form == "json" {
		enc := json.NewEncoder(env.stdout)
		for _, r := range results {
			if err := enc.Encode(r); err != nil {
				return err
			}
		}
		if err := enc.Encode(sum); err != nil {
			return err
		}
	} else {
		printGroup(env.stdout, spec, results, sum)
	}
	for _, r := range results {
		if !r.Usable() {
			return failed(r)
		}
	}
	return nil
}

// printGroup prints a row for each peer, and the sum.
func printGroup(w io.Writer, spec probe.Spec, results []*probe.Result, sum probe.Group) {
	first := results[0]
	fmt.Fprintf(w, "%s %s %s, %s: %s port %d and %d peers, %d bytes, %d QP each\n\n", strings.ToUpper(string(first.Transport)), strings.ToUpper(string(first.Op)), first.Kind,
		sum.Pattern, first.Device, first.Port, sum.Peers, spec.Sizes[0], first.QPs)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "peer\tBW average[MiB/s]\tBW average[Gb/s]\tMsgRate[Mpps]\tloss\tCPU[s]\tpeer CPU[s]\tresult")
	for _, r := range results {
		switch {
		case !r.Usable():
			fmt.Fprintf(t, "%s\t-\t-\t-\t-\t-\t-\t%s: %s (%s): %s\n", r.Peer, r.Outcome, *r.Reason, *r.Scope, oneLine(*r.Detail))
			continue
		case len(r.Runs) == 0 || r.Runs[0].Bandwidth == nil || r.Runs[0].MessageRate == nil:
			fmt.Fprintf(t, "%s\t-\t-\t-\t-\t-\t-\t%s\n", r.Peer, r.Outcome)
			continue
		}
		run := r.Runs[0]
		loss, bps := "-", run.Bandwidth.BytesPerSecond
		if run.LossRatio != nil {
			loss = fmt.Sprintf("%.2f%%", *run.LossRatio*100)
		}
		taints := make([]string, len(r.Taints))
		for i, taint := range r.Taints {
			taints[i] = string(taint)
		}
		fmt.Fprintf(t, "%s\t%s\t%.3f\t%.6f\t%s\t%s\t%s\t%s %s\n", r.Peer, mebi(&bps), bps*8/1e9, *run.MessageRate/1e6, loss, secondsText(run.CPUSeconds.Local),
			secondsText(run.CPUSeconds.Remote), r.Outcome, strings.Join(taints, " "))
	}
	if sum.BytesPerSecond != nil {
		fmt.Fprintf(t, "sum\t%s\t%.3f\t%.6f\t\t\t\t%d of %d peers, %.3f s in common\n", mebi(sum.BytesPerSecond), *sum.BytesPerSecond*8/1e9, *sum.MessageRate/1e6, sum.Measured,
			sum.Peers, *sum.Common)
	}
	t.Flush()
}
