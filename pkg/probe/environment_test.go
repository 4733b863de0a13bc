package probe

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/counters/sysfstest"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

func TestEnvironments(t *testing.T) {
	root := sysfstest.Tree(t, "pcie-degraded")
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	const width = "devices/pci0000:40/0000:40:01.1/0000:41:00.0/current_link_width"
	synctest.Test(t, func(t *testing.T) {
		e := NewEnvironments(counters.NewFS(root))
		n := &Node{Environments: e}
		ports := []LocalPort{
			{Device: "mlx5_0", Port: 1, State: verbs.Port{ActiveMTU: 1024, MaxMTU: 4096}},
			{Device: "nullverbs0", Port: 1}, // one that sysfs does not show
		}
		refresh := func() []EnvironmentChange {
			t.Helper()
			changes, err := e.Refresh(t.Context(), ports)
			if err != nil {
				t.Fatal(err)
			}
			return changes
		}
		if e.Latest("mlx5_0", 1) != nil {
			t.Error("an environment before any was read")
		}
		if changes := refresh(); len(changes) > 0 {
			t.Errorf("changes at first: %v", changes)
		}
		first := n.fingerprint(t.Context(), &ports[0])
		if mtu := e.Latest("mlx5_0", 1).Link.ActiveMTU; mtu == nil || *mtu != 1024 {
			t.Errorf("MTU %v is not the one of verbs", mtu)
		}
		if other := n.fingerprint(t.Context(), &ports[1]); other == nil || *other == *first {
			t.Errorf("fingerprint %v of a device that sysfs does not show", other)
		}

		write(width, "4\n")
		if got := n.fingerprint(t.Context(), &ports[0]); *got != *first {
			t.Error("a probe read the environment anew")
		}
		changes := refresh()
		if len(changes) != 1 || changes[0].Device != "mlx5_0" || changes[0].Was != *first || changes[0].Is != *n.fingerprint(t.Context(), &ports[0]) {
			t.Fatalf("changes: %v", changes)
		}
		if diff := cmp.Diff([]string{"PCIe width changed 8 → 4"}, changes[0].What); diff != "" {
			t.Errorf("words (-want +got):\n%s", diff)
		}
		if changes := refresh(); len(changes) > 0 {
			t.Errorf("the same change again: %v", changes)
		}

		// Without a daemon that refreshes, a reading does not last for ever.
		write(width, "2\n")
		time.Sleep(environmentAge)
		if w := e.Of(t.Context(), &ports[0]).PCI.CurWidth; *w != 2 {
			t.Errorf("width %d after the reading grew old", *w)
		}

		ports = ports[1:]
		refresh()
		if e.Latest("mlx5_0", 1) != nil {
			t.Error("a port that is gone is remembered")
		}
	})
}

func TestNoEnvironments(t *testing.T) {
	if got := (&Node{}).fingerprint(t.Context(), &LocalPort{Device: "mlx5_0", Port: 1}); got != nil {
		t.Errorf("fingerprint %v of nothing", got)
	}
}

// What speaks against figures besides counters, with a reading from before the run.
func TestConditionsOfEnvironment(t *testing.T) {
	root := sysfstest.Tree(t, "pcie-degraded")
	const function = "devices/pci0000:40/0000:40:01.1/0000:41:00.0/"
	const throttle = "devices/system/cpu/cpu32/thermal_throttle/core_throttle_count"
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(throttle, "7\n")
	p := &LocalPort{Device: "mlx5_0", Port: 1}
	run := func(n *Node, meanwhile func()) []string {
		t.Helper()
		stop := n.meter(t.Context(), p)
		meanwhile()
		got := []string{}
		for _, c := range stop(t.Context()).Conditions {
			got = append(got, c.Taint+" "+c.Check+": "+c.Detail)
		}
		return got
	}
	node := func() *Node {
		return &Node{Meter: fixedMeter("packets"), Environments: NewEnvironments(counters.NewFS(root))}
	}
	n := node()
	width := "pcie-degraded pcie-width: x8, expected x16"
	speed := "pcie-degraded pcie-speed: 8 GT/s, expected 16 GT/s"
	throttled := "cpu-throttled cpu-throttle: CPUs near the device were slowed down for heat or power while the figures were taken"
	for _, step := range []struct {
		name      string
		meanwhile func()
		want      []string
	}{
		{"degraded", func() {}, []string{width, speed}},
		{"throttled meanwhile", func() { write(throttle, "9\n") }, []string{width, speed, throttled}},
		{"throttled before", func() {}, []string{width, speed}},
		{"fast under load", func() { write(function+"current_link_speed", "16.0 GT/s PCIe\n") }, []string{width}},
	} {
		if diff := cmp.Diff(step.want, run(n, step.meanwhile)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.name, diff)
		}
	}
	write(function+"current_link_width", "16\n")
	if got := run(node(), func() {}); len(got) > 0 {
		t.Errorf("nothing is wrong: %v", got)
	}
	if got := run(&Node{Meter: fixedMeter("packets")}, func() {}); len(got) > 0 {
		t.Errorf("nothing is known: %v", got)
	}
}
