//go:build lab

package fleet

import (
	"context"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// letsGo runs a command that the kernel holds up for as long as a daemon has the device open.
func letsGo(t *testing.T, argv ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	start := time.Now()
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	took := time.Since(start)
	if err != nil {
		t.Fatalf("%v after %s: %v\n%s", argv, took, err, out)
	}
	if took > 10*time.Second {
		t.Errorf("%v took %s: the device was not let go", argv, took)
	}
	t.Logf("%s took %s", strings.Join(argv, " "), took.Round(time.Millisecond))
}

// said returns the lines of a node's log that match.
func said(t *testing.T, node, pattern string) []string {
	t.Helper()
	return regexp.MustCompile("(?m)^.*"+pattern+".*$").FindAllString(command(t, "node", "log", node), -1)
}

// says waits until a node's log has n lines that match, and not one more.
func says(t *testing.T, node, pattern string, n int) {
	t.Helper()
	var lines []string
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if lines = said(t, node, pattern); len(lines) >= n {
			break
		}
	}
	if len(lines) != n {
		t.Errorf("node%s has %d lines like %q in its log, want %d:\n%s", node, len(lines), pattern, n, strings.Join(lines, "\n"))
	}
}

func from(device string) func(probe.Result) bool {
	return func(r probe.Result) bool { return r.Usable() && r.Device == device }
}

// TestEvents does to node 2 what administrators do to devices. The daemon must follow without a restart, hold up nobody, and
// say each change once.
func TestEvents(t *testing.T) {
	startFleet(t, "test/fleet/testdata/events.yaml", 2)
	works := func(device string) probe.Result {
		t.Helper()
		now := time.Now()
		r := await(t, 2, "small", "node1", now, toHeal, "comes from "+device, from(device))
		await(t, 1, "small", "node2", now, toHeal, "reaches "+device, func(r probe.Result) bool { return r.Usable() && *r.PeerDev == device })
		return r
	}
	works("rxe2")

	t.Run("address moved to another slot", func(t *testing.T) {
		before, lines := works("rxe2"), len(said(t, "2", "GIDs changed.*gids=[^ ]*fe80"))
		command(t, "fault", "2", "addr-del")
		says(t, "2", "GIDs changed.*gids=[^ ]*fe80", lines+1)
		command(t, "ip", "addr", "add", "10.9.0.202/32", "dev", "n2")
		command(t, "fault", "2", "addr-add")
		defer command(t, "ip", "addr", "del", "10.9.0.202/32", "dev", "n2")
		if after := works("rxe2"); *after.GIDIndex == *before.GIDIndex {
			t.Errorf("the GID is still at index %d", *after.GIDIndex)
		}
	})
	t.Run("link down and up", func(t *testing.T) {
		lines := len(said(t, "2", "port is not usable.*port-down"))
		command(t, "fault", "2", "down")
		says(t, "2", "port is not usable.*port-down", lines+1)
		command(t, "fault", "2", "up")
		works("rxe2")
		if text := string(get(t, 2, "/metrics")); !regexp.MustCompile(`(?m)^rdmabench_port_flaps_total\{.*device="rxe2".*\} 1$`).MatchString(text) {
			t.Errorf("not one flap: %v", regexp.MustCompile(`(?m)^rdmabench_port_flaps.*$`).FindAllString(text, -1))
		}
	})
	t.Run("renamed", func(t *testing.T) {
		letsGo(t, "rdma", "dev", "set", "rxe2", "name", "renamed2")
		works("renamed2")
		says(t, "2", "another name.*renamed2", 1)
		letsGo(t, "rdma", "dev", "set", "renamed2", "name", "rxe2")
		works("rxe2")
		says(t, "2", "another name.*device=rxe2", 1)
	})
	t.Run("deleted and made again", func(t *testing.T) {
		lines := len(said(t, "2", "device is gone.*rxe2"))
		letsGo(t, "rdma", "link", "delete", "rxe2")
		says(t, "2", "device is gone.*rxe2", lines+1)
		gone := time.Now()
		await(t, 2, "small", "node1", gone, toFail, "says that there is no device", failedFor(probe.NoDevice, probe.NoRDMA, probe.DeviceRemoved))
		command(t, "rdma", "link", "add", "rxe2", "type", "rxe", "netdev", "n2")
		works("rxe2")
	})
	t.Run("netdev deleted and made again", func(t *testing.T) {
		lines := len(said(t, "2", "device is gone.*rxe2"))
		letsGo(t, "ip", "link", "del", "n2")
		says(t, "2", "device is gone.*rxe2", lines+1)
		for _, c := range []string{
			"ip link add n2 mtu 4200 gso_max_segs 1 type veth peer name p2 mtu 4200", "ip link set p2 master br0 up", "ip link set n2 up",
			"ip addr add 10.9.0.2/24 dev n2", "ip route replace 10.9.0.0/24 dev n2 src 10.9.0.2 table 102", "rdma link add rxe2 type rxe netdev n2",
		} {
			argv := strings.Fields(c)
			command(t, argv[0], argv[1:]...)
		}
		works("rxe2")
	})
}

// TestRemovalDuringRun removes a device in the middle of a run, at either end.
func TestRemovalDuringRun(t *testing.T) {
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	for _, c := range []struct {
		name, device, netdev string
		reasons              []probe.Reason
		scope                probe.Scope
	}{
		{"the peer's", "rxe2", "n2", []probe.Reason{probe.PeerUnresponsive}, probe.ScopePeer},
		{"this end's", "rxe1", "n1", []probe.Reason{probe.DeviceRemoved}, probe.ScopeLocal},
	} {
		t.Run(c.name, func(t *testing.T) {
			heals(t)
			removed := make(chan struct{})
			time.AfterFunc(3*time.Second, func() {
				defer close(removed)
				start := time.Now()
				out, err := exec.Command("timeout", "30", "rdma", "link", "delete", c.device).CombinedOutput()
				if took := time.Since(start); err != nil || took > 10*time.Second {
					t.Errorf("rdma link delete %s took %s: %v %s", c.device, took, err, out)
				} else {
					t.Logf("rdma link delete %s took %s", c.device, took.Round(time.Millisecond))
				}
			})
			r := byHand(t, "--kind=latency", "-D", "15s", "--deadline=25s")
			<-removed
			command(t, "rdma", "link", "add", c.device, "type", "rxe", "netdev", c.netdev)
			if r.Outcome != probe.Failed || !contains(c.reasons, *r.Reason) || *r.Scope != c.scope {
				t.Errorf("got %s, want %v (%s)", describe(r), c.reasons, c.scope)
			}
			t.Log(describe(r))
			heals(t)
		})
	}
}
