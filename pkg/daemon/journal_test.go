package daemon

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// One line for each change, with the evidence; nothing for what goes on as before.
func TestJournal(t *testing.T) {
	var out bytes.Buffer
	j := journal{log: slog.New(slog.NewTextHandler(&out, nil))}
	ok := func() *probe.Result { return &probe.Result{Outcome: probe.OK, Probe: "rtt", Peer: "b"} }
	tainted := func(taints ...probe.Taint) *probe.Result {
		r := ok()
		r.Outcome, r.Taints = probe.Tainted, taints
		for _, taint := range taints {
			r.TaintLog = append(r.TaintLog, probe.TaintDetail{Taint: taint, Side: "remote", Counter: "out_of_sequence", Delta: 3})
		}
		return r
	}
	failed := func() *probe.Result {
		r := ok()
		r.Outcome = probe.Failed
		r.Stage, r.Reason, r.Scope, r.Detail = new(probe.StageRun), new(probe.Timeout), new(probe.ScopePath), new("silence")
		return r
	}
	for i, step := range []struct {
		r    *probe.Result
		says string // empty: no line
	}{
		{ok(), ""}, {tainted(probe.TaintRetransmit), "retransmit: remote out_of_sequence +3"}, {tainted(probe.TaintRetransmit), ""},
		{tainted(probe.TaintRetransmit, probe.TaintTimeout), "timeout: remote"}, {failed(), "probe failed"}, {failed(), ""},
		{tainted(probe.TaintRetransmit, probe.TaintTimeout), "probe works again"}, {ok(), ""}, {tainted(probe.TaintRetransmit), "figures are tainted"},
	} {
		out.Reset()
		j.note(step.r)
		if n := strings.Count(out.String(), "\n"); step.says == "" && n > 0 || step.says != "" && (n != 1 || !strings.Contains(out.String(), step.says)) {
			t.Errorf("step %d: %d lines, want one with %q:\n%s", i, n, step.says, out.String())
		}
	}
}
