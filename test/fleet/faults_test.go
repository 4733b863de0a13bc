//go:build lab

package fleet

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// Bounds on how long a result of a faulty fleet may take to appear: the interval, the deadline of 8 s, and a slow guest.
const (
	toFail = 40 * time.Second
	toHeal = 60 * time.Second
)

// TestFaults breaks node 2 in every way the lab knows. Each time the probes must end within their deadline with the right
// reason, and go on by themselves once the fault is gone, holding no more than before.
func TestFaults(t *testing.T) {
	startMutable(t, "test/fleet/testdata/responders.yaml", 2)
	rest := [3]resources{1: held(t, 1), 2: held(t, 2)}
	t.Logf("at rest: node1 %+v, node2 %+v", rest[1], rest[2])
	reconfigure(t, "test/fleet/testdata/faults.yaml", 2)
	start := time.Now()
	for _, name := range []string{"small", "large"} {
		await(t, 1, name, "node2", start, toHeal, "is usable", usable)
		await(t, 2, name, "node1", start, toHeal, "is usable", usable)
	}

	for _, c := range []struct {
		name         string
		breaks, mend []string
		// What node 1 says of node 2 and, where set, node 2 of itself when it probes node 1.
		probe   string
		reasons []probe.Reason
		scopes  []probe.Scope
		own     probe.Reason
	}{
		{
			name: "blackhole", breaks: []string{"fault", "2", "blackhole"}, mend: []string{"fault", "2", "clear"}, probe: "small",
			reasons: []probe.Reason{probe.Unreachable, probe.HandshakeTimeout}, scopes: []probe.Scope{probe.ScopePath, probe.ScopePeer},
		},
		{
			name: "killed responder", breaks: []string{"node", "kill", "2"}, mend: []string{"node", "start", "2"}, probe: "small",
			reasons: []probe.Reason{probe.Refused}, scopes: []probe.Scope{probe.ScopePeer},
		},
		{
			name: "stopped responder", breaks: []string{"node", "pause", "2"}, mend: []string{"node", "cont", "2"}, probe: "small",
			reasons: []probe.Reason{probe.HandshakeTimeout}, scopes: []probe.Scope{probe.ScopePeer},
		},
		{
			name: "link down", breaks: []string{"fault", "2", "down"}, mend: []string{"fault", "2", "up"}, probe: "small",
			reasons: []probe.Reason{probe.PortDown, probe.Unreachable, probe.HandshakeTimeout}, scopes: []probe.Scope{probe.ScopePath, probe.ScopePeer}, own: probe.PortDown,
		},
		{
			name: "address removed", breaks: []string{"fault", "2", "addr-del"}, mend: []string{"fault", "2", "addr-add"}, probe: "small",
			reasons: []probe.Reason{probe.Unreachable, probe.HandshakeTimeout}, scopes: []probe.Scope{probe.ScopePath, probe.ScopePeer}, own: probe.NoGID,
		},
		{
			name: "large packets dropped", breaks: []string{"fault", "2", "drop-large"}, mend: []string{"fault", "2", "clear"}, probe: "large",
			reasons: []probe.Reason{probe.RetryExceeded}, scopes: []probe.Scope{probe.ScopePath},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			broken := time.Now()
			command(t, c.breaks[0], c.breaks[1:]...)
			mended := false
			mend := func() {
				if !mended {
					mended = true
					command(t, c.mend[0], c.mend[1:]...)
				}
			}
			defer mend()
			r := await(t, 1, c.probe, "node2", broken, toFail, "failed for "+string(c.reasons[0]), failedFor(c.reasons...))
			if !contains(c.scopes, *r.Scope) {
				t.Errorf("booked on %s, want %v: %s", *r.Scope, c.scopes, describe(r))
			}
			if took := r.Duration - r.Waited; took > 8+3 {
				t.Errorf("took %.1f s with a deadline of 8 s: %s", took, describe(r))
			}
			t.Log(describe(r))
			if c.name == "large packets dropped" {
				await(t, 1, "small", "node2", broken, toFail, "is usable", usable)
			}
			if c.own != "" {
				r := await(t, 2, "small", "node1", broken, toFail, "failed for "+string(c.own), failedFor(c.own))
				if *r.Scope != probe.ScopeLocal {
					t.Errorf("node 2 books its own fault on %s: %s", *r.Scope, describe(r))
				}
				t.Log(describe(r))
			}
			mend()
			healed := time.Now()
			for _, name := range []string{"small", "large"} {
				await(t, 1, name, "node2", healed, toHeal, "is usable", usable)
				await(t, 2, name, "node1", healed, toHeal, "is usable", usable)
			}
		})
	}
	// With nothing left to probe, nothing of all that may be left.
	reconfigure(t, "test/fleet/testdata/responders.yaml", 2)
	for node := 1; node <= 2; node++ {
		settles(t, node, rest[node])
	}
}

// settles waits until a daemon holds no more than at rest.
func settles(t *testing.T, node int, rest resources) {
	t.Helper()
	var now resources
	rest.fds += 4 // idle connections of the control channel are kept for a while
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if now = held(t, node); !now.above(rest) {
			return
		}
	}
	t.Errorf("node%d holds %+v, at rest %+v", node, now, rest)
}

func contains[T comparable](all []T, v T) bool {
	for _, x := range all {
		if x == v {
			return true
		}
	}
	return false
}

// TestFaultsDuringRun breaks node 2 in the middle of a long run by hand.
func TestFaultsDuringRun(t *testing.T) {
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	for _, c := range []struct {
		name         string
		args         []string
		breaks, mend []string
		reasons      []probe.Reason
		scope        probe.Scope
	}{
		{"blackhole", []string{"--kind=bandwidth", "-s", "4096", "-D", "15s", "-t", "4"}, []string{"fault", "2", "blackhole"}, []string{"fault", "2", "clear"},
			[]probe.Reason{probe.RetryExceeded}, probe.ScopePath},
		{"killed responder, latency", []string{"--kind=latency", "-D", "15s"}, []string{"node", "kill", "2"}, []string{"node", "start", "2"},
			[]probe.Reason{probe.PeerUnresponsive}, probe.ScopePeer},
		{"killed responder, bandwidth", []string{"--kind=bandwidth", "-s", "4096", "-D", "15s", "-t", "4"}, []string{"node", "kill", "2"}, []string{"node", "start", "2"},
			[]probe.Reason{probe.PeerUnresponsive}, probe.ScopePeer},
		{"stopped responder, latency", []string{"--kind=latency", "--op=send", "-D", "15s"}, []string{"node", "pause", "2"}, []string{"node", "cont", "2"},
			[]probe.Reason{probe.PeerUnresponsive}, probe.ScopePeer},
		{"own link down", []string{"--kind=bandwidth", "-s", "4096", "-D", "15s", "-t", "4"}, []string{"fault", "1", "down"}, []string{"fault", "1", "up"},
			[]probe.Reason{probe.PortDown}, probe.ScopeLocal},
		{"own address removed", []string{"--kind=latency", "-D", "15s"}, []string{"fault", "1", "addr-del"}, []string{"fault", "1", "addr-add"},
			[]probe.Reason{probe.GIDNotAssigned}, probe.ScopeLocal},
	} {
		t.Run(c.name, func(t *testing.T) {
			heals(t)
			breaker := time.AfterFunc(3*time.Second, func() { _ = exec.Command(c.breaks[0], c.breaks[1:]...).Run() })
			defer breaker.Stop()
			r := byHand(t, append(c.args, "--deadline=25s")...)
			t.Log(describe(r))
			command(t, c.mend[0], c.mend[1:]...)
			if r.Outcome != probe.Failed || !contains(c.reasons, *r.Reason) || *r.Scope != c.scope {
				t.Errorf("got %s, want %v (%s)", describe(r), c.reasons, c.scope)
			}
			if took := r.Duration - r.Waited; took > 15 {
				t.Errorf("took %.1f s to notice", took)
			}
			heals(t)
		})
	}
}

// heals waits until a short probe by hand works.
func heals(t *testing.T) {
	t.Helper()
	var r probe.Result
	for end := time.Now().Add(toHeal); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if r = byHand(t, "-n", "10"); r.Usable() {
			return
		}
	}
	t.Fatalf("does not heal: %s", describe(r))
}

// TestLoss has 1 % of node 2's packets lost: the tail rises, the counters of an end move, and the result says so.
func TestLoss(t *testing.T) {
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	heals(t)
	args := []string{"--kind=latency", "-n", "1000", "--deadline=60s"}
	clean := byHand(t, args...)
	if !clean.Usable() {
		t.Fatal(describe(clean))
	}
	command(t, "fault", "2", "loss", "1%")
	defer command(t, "fault", "2", "clear")
	lossy := byHand(t, args...)
	if lossy.Outcome != probe.Tainted || !contains(lossy.Taints, probe.TaintRetransmit) {
		t.Fatalf("got %s, want a taint of retransmit", describe(lossy))
	}
	if a, b := *clean.Runs[0].Latency.P99, *lossy.Runs[0].Latency.P99; b < 2*a && b < 0.05 {
		t.Errorf("p99 is %g s with loss and %g s without", b, a)
	}
	moved := uint64(0)
	for _, d := range lossy.TaintLog {
		moved += d.Delta
	}
	if moved == 0 {
		t.Errorf("no evidence: %+v", lossy.TaintLog)
	}
	t.Logf("p99 %g s clean, %g s with loss; %+v", *clean.Runs[0].Latency.P99, *lossy.Runs[0].Latency.P99, lossy.TaintLog)
}

// TestOps measures every op in every kind by hand.
func TestOps(t *testing.T) {
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	heals(t)
	for _, op := range []string{"write", "read", "send"} {
		for _, kind := range []string{"latency", "bandwidth", "message-rate"} {
			t.Run(op+" "+kind, func(t *testing.T) {
				args := []string{"--kind=" + kind, "--op=" + op, "-n", "200"}
				if kind != "latency" {
					args = append(args, "-q", "2", "-t", "16")
				}
				r := byHand(t, args...)
				if !r.Usable() || len(r.Runs) != 1 {
					t.Fatal(describe(r))
				}
				run := r.Runs[0]
				if kind == "latency" {
					if l := run.Latency; l == nil || l.Samples != 200 || !(l.Min <= *l.P50 && *l.P50 <= *l.P99 && *l.P99 <= l.Max) {
						t.Errorf("latency %+v", l)
					}
					return
				}
				if run.Iterations != 400 || run.Bandwidth == nil || run.Bandwidth.BytesPerSecond <= 0 {
					t.Errorf("run %+v, bandwidth %+v", run, run.Bandwidth)
				}
			})
		}
	}
}

// TestBadInput gets one clear message and its exit code.
func TestBadInput(t *testing.T) {
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	heals(t)
	bin := os.Getenv("LAB_BINARY")
	for _, c := range []struct {
		name string
		argv []string
		code int
		says string
	}{
		{"unknown device", []string{bin, "probe", "-d", "mlx5_7", "10.9.0.2"}, 2, "mlx5_7"},
		{"unreachable peer", []string{bin, "probe", "-d", "rxe1", "10.9.0.77"}, 1, "unreachable"},
		{"wrong port", []string{bin, "probe", "-d", "rxe1", "10.9.0.2:9"}, 1, "refused"},
		{"the web port", []string{bin, "probe", "-d", "rxe1", "10.9.0.2:9881"}, 1, "version-skew"},
		{"pinned to an empty GID slot", []string{bin, "probe", "-d", "rxe1", "-x", "5", "10.9.0.2"}, 3, "no-gid"},
		{"message above the peer's limit", []string{bin, "probe", "-d", "rxe1", "--kind=bandwidth", "-s", "128MiB", "10.9.0.2"}, 1, "limit"},
		{"depth above the device's limit", []string{bin, "probe", "-d", "rxe1", "--kind=bandwidth", "-t", "40000", "10.9.0.2"}, 1, "32767"},
		{"out of range", []string{bin, "probe", "-d", "rxe1", "--mtu=9000", "10.9.0.2"}, 2, "4096"},
		{"memlock too small", []string{"prlimit", "--memlock=65536", "setpriv", "--reuid=nobody", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all",
			bin, "probe", "-d", "rxe1", "--kind=bandwidth", "-s", "1MiB", "10.9.0.2"}, 1, "memlock"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), c.argv[0], c.argv[1:]...)
			out, _ := cmd.CombinedOutput()
			if code := cmd.ProcessState.ExitCode(); code != c.code || !strings.Contains(string(out), c.says) {
				t.Errorf("exit %d, want %d; output %q, want it to say %q", code, c.code, out, c.says)
			}
			if n := strings.Count(strings.TrimSpace(string(out)), "\n"); n > 1 {
				t.Errorf("more than one message:\n%s", out)
			}
		})
	}
}
