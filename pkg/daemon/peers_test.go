package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/peers"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule"
)

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}

// Peers come and go with their file, without a reload. Who stays keeps its time; who goes takes what is known of it along.
func TestPeersOfFiles(t *testing.T) {
	dir := t.TempDir()
	list := filepath.Join(dir, "peers.yaml")
	tell := func(text string) {
		t.Helper()
		if err := os.WriteFile(list+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(list+".new", list); err != nil {
			t.Fatal(err)
		}
	}
	tell(`[{targets: ["127.0.0.1:1"], labels: {name: b}}, {targets: ["127.0.0.1:2"], labels: {name: c}}]`)
	d, _ := start(t, strings.Replace(strings.Replace(good, "static: [{name: c, address: \"127.0.0.1:1\", labels: {rack: r1}}, {name: b, address: \"127.0.0.1:2\", labels: {rack: r2}}, {name: a, address: \"127.0.0.1:3\"}]",
		"files: ["+list+"]", 1), "@every 1s", "@every 1h", 1))
	names := func() string {
		var out []string
		for _, m := range d.fleet().members {
			out = append(out, m.Name)
		}
		return strings.Join(out, " ")
	}
	waitFor(t, "the file is not read", func() bool { return names() == "a b c" })
	job := "rtt" + jobSeparator + "b"
	next := d.scheduler.Next(job)
	if next.IsZero() {
		t.Fatal("no job for b")
	}
	tell(`[{targets: ["127.0.0.1:1"], labels: {name: b}}, {targets: ["127.0.0.1:3"], labels: {name: e}}, {targets: ["127.0.0.1:4"], labels: {name: f, lame_duck: "true"}}]`)
	waitFor(t, "the change is not taken over", func() bool { return names() == "a b e" })
	if got := d.scheduler.Next(job); !got.Equal(next) {
		t.Errorf("b was due at %s and is at %s", next, got)
	}
	if got := d.scheduler.Next("rtt" + jobSeparator + "c"); !got.IsZero() {
		t.Error("c is gone, its job is not")
	}
	_, text := page(t, d, http.MethodGet, "/metrics")
	for _, line := range []string{`rdmabench_peers{state="drained"} 1`, `rdmabench_peers{state="unknown"} 2`, `rdmabench_discovery_failing{source="files"} 0`} {
		if !strings.Contains(text, "\n"+line+"\n") {
			t.Errorf("no %s", line)
		}
	}
	tell(`[{targets: [`)
	waitFor(t, "the failure is not counted", func() bool {
		_, text := page(t, d, http.MethodGet, "/metrics")
		return strings.Contains(text, "\nrdmabench_discovery_failing{source=\"files\"} 1\n")
	})
	if got := names(); got != "a b e" {
		t.Errorf("a broken file leaves %s", got)
	}
}

// One peer of ten that takes its time holds up no run against another.
func TestSlowPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		runs := map[string][]time.Time{}
		d, cfg := bare(t, fleetText("node00", 11, "{name: rtt, schedule: '@every 10s', jitter: 0, kind: latency}"), func(ctx context.Context, _ probe.Spec, to probe.Target, _ string) *probe.Result {
			mu.Lock()
			runs[to.Name] = append(runs[to.Name], time.Now())
			mu.Unlock()
			if to.Name == "node05" {
				select {
				case <-ctx.Done():
				case <-time.After(9 * time.Second):
				}
				return bad(probe.ScopePath, probe.Unreachable)
			}
			return figures()
		})
		d.scheduler = schedule.New(schedule.Options{Node: "node00", Log: slog.New(slog.DiscardHandler), OnSkip: d.skipped})
		if err := d.scheduler.Replace(d.jobs(cfg, d.all)); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute+time.Second)
		defer cancel()
		if err := d.scheduler.Run(ctx); err != nil {
			t.Fatal(err)
		}
		for i := 1; i <= 10; i++ {
			name := fmt.Sprintf("node%02d", i)
			if name == "node05" {
				continue
			}
			if n := len(runs[name]); n != 2*60 { // from two ports
				t.Errorf("%s was probed %d times", name, n)
			}
			for k := 2; k < len(runs[name]); k++ {
				if gap := runs[name][k].Sub(runs[name][k-2]); gap != 10*time.Second {
					t.Errorf("%s was probed after %s", name, gap)
				}
			}
		}
	})
}

func TestOwnAddresses(t *testing.T) {
	for _, c := range []struct {
		listen, advertise, address string
		own                        bool
	}{
		{":18516", "", "127.0.0.1:18516", true},
		{":18516", "", "[::1]:18516", true},
		{":18516", "", "127.0.0.1:99", false},
		{":18516", "", "192.0.2.1:18516", false},
		{":18516", "192.0.2.1:99", "192.0.2.1:99", true},
		{"10.9.0.2:18516", "", "10.9.0.2:18516", true},
		{"10.9.0.2:18516", "", "127.0.0.1:18516", false},
		{"localhost:18516", "", "localhost:18516", true},
	} {
		cfg := &config.Config{Control: config.Control{Listen: c.listen, Advertise: c.advertise}}
		if got := OwnAddresses(cfg)(c.address); got != c.own {
			t.Errorf("listening on %q, advertising %q: %s is own: %t", c.listen, c.advertise, c.address, got)
		}
	}
}

// Who is a peer may call, whatever its state; who is none may not, nor may anybody without control.insecure.
func TestGuard(t *testing.T) {
	view := peers.View{Members: []peers.Member{
		{Peer: peers.Peer{Name: "a", Address: "10.0.0.2:1"}, State: peers.Active},
		{Peer: peers.Peer{Address: "10.0.0.3:1"}, State: peers.Unnamed},
		{Peer: peers.Peer{Name: "h", Address: "host:1"}, State: peers.Active},
	}}
	g := &peerGuard{names: map[string][]netip.Addr{"host": {netip.MustParseAddr("10.0.0.4")}, "gone": {netip.MustParseAddr("10.0.0.5")}}}
	g.set(&config.Config{Control: config.Control{Insecure: true}}, view)
	for addr, want := range map[string]bool{"10.0.0.2": true, "::ffff:10.0.0.2": true, "10.0.0.3": true, "10.0.0.4": true, "10.0.0.5": false, "10.0.0.9": false, "x": false} {
		if g.allowed(addr) != want {
			t.Errorf("%s is allowed: %t", addr, !want)
		}
	}
	g.set(&config.Config{}, view)
	if g.allowed("10.0.0.2") {
		t.Error("allowed without control.insecure")
	}
}
