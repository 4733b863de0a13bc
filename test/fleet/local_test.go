//go:build lab

package fleet

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/daemon"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule"
)

// local is a node of this process: it starts in no time, and takes any spec.
type local struct {
	probe.Initiator
	device string
}

// localNode returns one on node i's device. What it holds at the end is a fault.
func localNode(t *testing.T, i int) *local {
	t.Helper()
	device := "rxe" + strconv.Itoa(i)
	if err := os.MkdirAll(daemon.LockDir, 0o755); err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	n := probe.NewNode("node"+strconv.Itoa(i), schedule.NewGate(schedule.GateOptions{Dir: daemon.LockDir, Log: log}), probe.NewMeter(counters.NewFS("/sys")), log)
	n.Use = func(d string) bool { return d == device }
	l := &local{Initiator: probe.Initiator{Node: n, Client: control.NewClient()}, device: device}
	t.Cleanup(func() {
		l.Client.CloseIdle()
		if err := n.Close(); err != nil {
			t.Errorf("%s: something is left: %s", device, err)
		}
	})
	return l
}

// to probes node i's daemon.
func (l *local) to(t *testing.T, i int, spec probe.Spec) *probe.Result {
	t.Helper()
	if spec.Wait == 0 {
		spec.Wait = 20 * time.Second
	}
	name := "node" + strconv.Itoa(i)
	return l.Probe(t.Context(), spec, probe.Target{Name: name, Address: "10.9.0." + strconv.Itoa(i) + ":18516"}, l.device, 1)
}

// usableTo is to, for a probe that must have figures.
func (l *local) usableTo(t *testing.T, i int, spec probe.Spec) probe.Run {
	t.Helper()
	r := l.to(t, i, spec)
	if !r.Usable() || len(r.Runs) != 1 {
		t.Fatalf("%s of %s %s: %s", spec.Kind, spec.Transport, spec.Op, describe(*r))
	}
	return r.Runs[0]
}

// reaches waits until a short probe of node i works.
func (l *local) reaches(t *testing.T, i int) {
	t.Helper()
	eventually(t, toHeal, "a short probe works", func() bool { r := l.to(t, i, probe.Spec{Iterations: 10}); return r.Usable() })
}

// queue is what the kernel counted at what shapes a node's packets.
type queue struct{ Packets, Drops uint64 }

func queueOf(t *testing.T, node int) queue {
	t.Helper()
	var all []struct {
		Root    bool
		Packets uint64
		Drops   uint64
	}
	if err := json.Unmarshal([]byte(command(t, "tc", "-s", "-j", "qdisc", "show", "dev", "n"+strconv.Itoa(node))), &all); err != nil {
		t.Fatal(err)
	}
	for _, q := range all {
		if q.Root {
			return queue{q.Packets, q.Drops}
		}
	}
	t.Fatalf("n%d has no root qdisc", node)
	return queue{}
}

// ownFiles counts this process's descriptors, less those of connections, which come and go.
func ownFiles(t *testing.T) (n int) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if to, err := os.Readlink(filepath.Join("/proc/self/fd", fd.Name())); err == nil && !strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}
