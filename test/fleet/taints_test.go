//go:build lab

package fleet

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
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

// TestLossOnEitherEnd has half a percent of what an end sends lost: whichever end it is, the result says that packets were
// sent again, and which counter shows it.
func TestLossOnEitherEnd(t *testing.T) {
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	heals(t)
	for _, node := range []string{"1", "2"} {
		for _, args := range [][]string{
			{"--kind=latency", "-n", "1500", "--deadline=120s"},
			{"--kind=bandwidth", "--op=read", "-n", "100", "-t", "4", "--deadline=120s"},
		} {
			command(t, "fault", node, "loss", "0.5%")
			r := byHand(t, args...)
			command(t, "fault", node, "clear")
			if r.Outcome != probe.Tainted || !contains(r.Taints, probe.TaintRetransmit) {
				t.Errorf("loss at node%s, %v: got %s, want a taint of retransmit; evidence %+v %+v", node, args, describe(r), r.Evidence.Local, r.Evidence.Remote)
			}
			t.Logf("loss at node%s, %v: %v", node, args, r.TaintLog)
		}
	}
}

// TestTaintsAreTheCounters runs without a fault, LAB_RUNS times: a result is tainted by retransmit exactly when a counter of
// either end moved within the timed part. There is no warm-up, so that sysfs, read before and after, sees that part alone.
// The emulated lab sends again by itself now and then; the test says how often.
func TestTaintsAreTheCounters(t *testing.T) {
	runs := 20
	if s := os.Getenv("LAB_RUNS"); s != "" {
		var err error
		if runs, err = strconv.Atoi(s); err != nil {
			t.Fatalf("LAB_RUNS: %s", err)
		}
	}
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	heals(t)
	kinds := [][]string{
		{"--kind=latency", "-n", "300"},
		{"--kind=latency", "--op=read", "-n", "300"},
		{"--kind=latency", "--op=send", "-n", "300"},
		{"--kind=bandwidth", "-n", "100", "-t", "16"},
		{"--kind=bandwidth", "--op=read", "-n", "100", "-t", "16"},
		{"--kind=bandwidth", "--op=send", "-n", "100", "-t", "16"},
		{"--kind=message-rate", "-n", "1000", "-t", "16"},
	}
	tainted, of := map[string]int{}, map[string]int{}
	all := 0
	for i := range runs {
		args := kinds[i%len(kinds)]
		kind := strings.Join(args, " ")
		before := counted(t)
		r := byHand(t, append(args, "--warmup=-1", "--deadline=60s")...)
		after := counted(t)
		if !r.Usable() {
			t.Fatalf("run %d, %s: %s", i, kind, describe(r))
		}
		var inside, outside uint64
		var differ []string
		for side, e := range map[string]*probe.EndEvidence{"local": r.Evidence.Local, "remote": r.Evidence.Remote} {
			if e == nil {
				t.Fatalf("run %d, %s: no %s evidence", i, kind, side)
			}
			for _, name := range retransmits {
				moved := after[side+" "+name] - before[side+" "+name]
				inside += e.Counters[name]
				outside += moved
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
		}
	}
	t.Logf("%d of %d runs sent packets again by themselves", all, runs)
	for _, args := range kinds {
		kind := strings.Join(args, " ")
		t.Logf("  %2d of %2d: %s", tainted[kind], of[kind], kind)
	}
}
