//go:build lab

package fleet

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/doctor"
)

// examine runs `rdmabenchd doctor` on node 1.
func examine(t *testing.T, args ...string) (doctor.Report, int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Getenv("LAB_BINARY"), append([]string{"doctor", "--json", "-d", "rxe1"}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	start := time.Now()
	err := cmd.Run()
	var r doctor.Report
	if json.Unmarshal(out.Bytes(), &r) != nil {
		t.Fatalf("doctor %v: %v: no JSON:\n%s%s", args, err, out.Bytes(), errs.Bytes())
	}
	t.Logf("exit %d after %s: %s: %s", cmd.ProcessState.ExitCode(), time.Since(start).Round(time.Millisecond), r.Verdict, r.Diagnosis)
	return r, cmd.ProcessState.ExitCode()
}

func logChecks(t *testing.T, r doctor.Report) {
	for _, c := range r.Checks {
		advice := ""
		if c.Advice != nil {
			advice = " -> " + *c.Advice
		}
		t.Logf("  %-15s %-8s %s: %s%s", c.Layer, c.Verdict, c.Check, c.Found, advice)
	}
}

// TestDoctor breaks node 2, or node 1 itself, in every way the lab knows. Each time the doctor on node 1 must name the right
// layer, and nothing of those below it; a fleet that is well must pass.
func TestDoctor(t *testing.T) {
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	heals(t)
	healthy := func(t *testing.T) {
		r, code := examine(t, "10.9.0.2")
		if code != 0 {
			logChecks(t, r)
			t.Errorf("exit %d of a fleet that is well", code)
		}
		for _, c := range r.Checks {
			if c.Verdict == doctor.Skipped && c.Layer != doctor.SubnetManager && c.Layer != doctor.PCIe {
				t.Errorf("%s: %s: %s", c.Layer, c.Check, c.Found)
			}
		}
	}
	t.Run("well", healthy)
	for _, c := range []struct {
		name         string
		breaks, mend []string
		layers       []doctor.Layer
		code         int
	}{
		{"blackhole", []string{"fault", "2", "blackhole"}, []string{"fault", "2", "clear"}, []doctor.Layer{doctor.Route}, 1},
		{"killed responder", []string{"node", "kill", "2"}, []string{"node", "start", "2"}, []doctor.Layer{doctor.Control}, 1},
		{"stopped responder", []string{"node", "pause", "2"}, []string{"node", "cont", "2"}, []doctor.Layer{doctor.Control}, 1},
		{"own link down", []string{"fault", "1", "down"}, []string{"fault", "1", "up"}, []doctor.Layer{doctor.Ports}, 3},
		{"own address removed", []string{"fault", "1", "addr-del"}, []string{"fault", "1", "addr-add"}, []doctor.Layer{doctor.GID}, 1},
		{"the peer's link down", []string{"fault", "2", "down"}, []string{"fault", "2", "up"}, []doctor.Layer{doctor.Route}, 1},
		{"the peer's address removed", []string{"fault", "2", "addr-del"}, []string{"fault", "2", "addr-add"}, []doctor.Layer{doctor.Route}, 1},
		{"large packets dropped", []string{"fault", "2", "drop-large"}, []string{"fault", "2", "clear"}, []doctor.Layer{doctor.LargeMessage}, 1},
		{"RoCE filtered", []string{"fault", "2", "blackhole", "roce"}, []string{"fault", "2", "clear"}, []doctor.Layer{doctor.SmallMessage}, 1},
		{"loss 1 % there", []string{"fault", "2", "loss", "1%"}, []string{"fault", "2", "clear"}, []doctor.Layer{doctor.Counters}, 1},
		{"loss 1 % here", []string{"fault", "1", "loss", "1%"}, []string{"fault", "1", "clear"}, []doctor.Layer{doctor.Counters}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			command(t, c.breaks[0], c.breaks[1:]...)
			mended := false
			mend := func() {
				if !mended {
					mended = true
					command(t, c.mend[0], c.mend[1:]...)
				}
			}
			defer mend()
			r, code := examine(t, "10.9.0.2")
			for _, k := range r.Checks {
				if k.Verdict == doctor.Failed {
					t.Logf("  %s: %s: %s -> %s", k.Layer, k.Check, k.Found, *k.Advice)
				}
			}
			if code != c.code || r.Layer == nil || !contains(c.layers, *r.Layer) {
				t.Errorf("exit %d, want %d and layer %v", code, c.code, c.layers)
				logChecks(t, r)
			}
			at := map[doctor.Layer]int{}
			for i, l := range doctor.Layers {
				at[l] = i
			}
			for _, k := range r.Checks {
				if k.Verdict == doctor.Failed && at[k.Layer] < at[c.layers[0]] {
					t.Errorf("%s is innocent: %s: %s", k.Layer, k.Check, k.Found)
				}
			}
			mend()
			heals(t)
		})
	}
	t.Run("well again", healthy)
}
