//go:build lab

package fleet

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// retransmits are rxe's counters of packets sent again, as the requester and as the responder see them.
var retransmits = []string{"completer_retry_err", "rcvd_seq_err", "duplicate_request"}

// counted reads those of both ends, from sysfs, past the daemon.
func counted(t *testing.T) map[string]uint64 {
	t.Helper()
	out := map[string]uint64{}
	for side, device := range map[string]string{"local": "rxe1", "remote": "rxe2"} {
		for _, name := range retransmits {
			text, err := os.ReadFile(filepath.Join("/sys/class/infiniband", device, "ports/1/hw_counters", name))
			if err != nil {
				t.Fatal(err)
			}
			v, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			out[side+" "+name] = v
		}
	}
	return out
}

// TestLossOnEitherEnd has one percent of what an end sends lost: whichever end it is, the result says that packets were sent
// again, and which counter shows it. Each end sends 1000 packets or more: that none is lost happens once in 20,000 times.
func TestLossOnEitherEnd(t *testing.T) {
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	l := localNode(t, 1)
	l.reaches(t, 2)
	for _, node := range []string{"1", "2"} {
		for _, spec := range []probe.Spec{
			{Kind: probe.Latency},
			{Kind: probe.Bandwidth, Op: verbs.Read, Sizes: []int{1024}, TxDepth: 4}, // a packet each way
		} {
			spec.Iterations, spec.Deadline = 1000, 2*time.Minute
			what := fmt.Sprintf("loss at node%s, %s of %s", node, spec.Kind, spec.WithDefaults().Op)
			command(t, "fault", node, "loss", "1%")
			r := l.to(t, 2, spec)
			command(t, "fault", node, "clear")
			if r.Outcome != probe.Tainted || !contains(r.Taints, probe.TaintRetransmit) {
				t.Errorf("%s: got %s, want a taint of retransmit; evidence %+v %+v", what, describe(*r), r.Evidence.Local, r.Evidence.Remote)
			}
			t.Logf("%s: %.1f s, %v", what, r.Duration, r.TaintLog)
		}
	}
}

// TestTaintsAreTheCounters runs without a fault, LAB_RUNS times: a result is tainted by retransmit exactly when a counter of
// either end moved within the timed part. There is no warm-up, so that sysfs, read before and after, sees that part alone.
// The emulated lab sends again by itself now and then; the test says how often.
func TestTaintsAreTheCounters(t *testing.T) {
	runs := 21
	if s := os.Getenv("LAB_RUNS"); s != "" {
		var err error
		if runs, err = strconv.Atoi(s); err != nil {
			t.Fatalf("LAB_RUNS: %s", err)
		}
	}
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	l := localNode(t, 1)
	l.reaches(t, 2)
	specs := []probe.Spec{
		{Kind: probe.Latency, Op: verbs.Write, Iterations: 300},
		{Kind: probe.Latency, Op: verbs.Read, Iterations: 300},
		{Kind: probe.Latency, Op: verbs.Send, Iterations: 300},
		{Kind: probe.Bandwidth, Op: verbs.Write, Iterations: 100, TxDepth: 16},
		{Kind: probe.Bandwidth, Op: verbs.Read, Iterations: 100, TxDepth: 16},
		{Kind: probe.Bandwidth, Op: verbs.Send, Iterations: 100, TxDepth: 16},
		{Kind: probe.MessageRate, Op: verbs.Write, Iterations: 1000, TxDepth: 16},
	}
	tainted, of := map[string]int{}, map[string]int{}
	all := 0
	for i := range runs {
		spec := specs[i%len(specs)]
		spec.Warmup, spec.Deadline = -1, time.Minute
		kind := fmt.Sprintf("%s of %s", spec.Kind, spec.Op)
		before := counted(t)
		r := l.to(t, 2, spec)
		after := counted(t)
		if !r.Usable() {
			t.Fatalf("run %d, %s: %s", i, kind, describe(*r))
		}
		var inside uint64
		var differ []string
		for side, e := range map[string]*probe.EndEvidence{"local": r.Evidence.Local, "remote": r.Evidence.Remote} {
			if e == nil {
				t.Fatalf("run %d, %s: no %s evidence", i, kind, side)
			}
			for _, name := range retransmits {
				moved := after[side+" "+name] - before[side+" "+name]
				inside += e.Counters[name]
				if e.Counters[name] != moved {
					differ = append(differ, fmt.Sprintf("%s %s +%d, evidence says +%d", side, name, moved, e.Counters[name]))
				}
			}
		}
		has := contains(r.Taints, probe.TaintRetransmit)
		if has != (inside > 0) {
			t.Errorf("run %d, %s: counters moved by %d, but the taint is %t", i, kind, inside, has)
		}
		if len(differ) > 0 {
			t.Errorf("run %d, %s: the evidence is not what the kernel counted: %s", i, kind, strings.Join(differ, "; "))
		}
		if contains(r.Taints, probe.TaintForeignTraffic) {
			t.Errorf("run %d, %s: foreign traffic where there is none: %v", i, kind, r.TaintLog)
		}
		of[kind]++
		if has {
			tainted[kind]++
			all++
			t.Logf("run %d, %s: %v", i, kind, r.TaintLog)
		}
	}
	t.Logf("%d of %d runs sent packets again by themselves", all, runs)
	for kind, n := range of {
		t.Logf("  %2d of %2d: %s", tainted[kind], n, kind)
	}
}
