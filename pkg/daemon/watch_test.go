package daemon

import (
	"bytes"
	"context"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// quietWatch is a watch that is shown ports instead of looking for them.
func quietWatch(out *bytes.Buffer) *PortWatch {
	n := probe.NewNode("a", nil, nil, slog.New(slog.DiscardHandler))
	w := NewPortWatch(n, func(string) bool { return true }, slog.New(slog.NewTextHandler(out, nil)))
	w.state = map[portName]portState{}
	return w
}

func active(device string, id uint64, gid string, index int) probe.LocalPort {
	p := probe.LocalPort{Device: device, ID: id, Port: 1, Rail: "0", State: verbs.Port{State: verbs.PortActive}}
	if gid != "" {
		p.GIDs = []verbs.GID{{Index: index, Addr: netip.MustParseAddr(gid)}}
	}
	return p
}

func down(p probe.LocalPort) probe.LocalPort {
	p.State.State, p.Reason, p.Detail = verbs.PortDown, probe.PortDown, "check the cable"
	return p
}

// Every change is a line, and only one; what stays as it is says nothing.
func TestOneLineForEachChange(t *testing.T) {
	var out bytes.Buffer
	w := quietWatch(&out)
	usable := active("mlx5_0", 7, "10.9.0.1", 3)
	ib := active("mlx5_1", 8, "", 0)
	ib.State.LID, ib.State.SMLID = 5, 1
	moved, elsewhere := active("mlx5_0", 7, "10.9.0.1", 4), ib
	elsewhere.State.LID, elsewhere.State.SMLID = 6, 2
	for i, step := range []struct {
		ports []probe.LocalPort
		says  []string
	}{
		{[]probe.LocalPort{usable, ib}, []string{"port is usable", "port is usable"}},
		{[]probe.LocalPort{usable, ib}, nil},
		{[]probe.LocalPort{moved, ib}, []string{`GIDs changed" device=mlx5_0 port=1 was="3=10.9.0.1" gids="4=10.9.0.1`}},
		{[]probe.LocalPort{moved, elsewhere}, []string{`LID or subnet manager changed" device=mlx5_1 port=1 was="LID 5, SM 1" is="LID 6, SM 2`}},
		{[]probe.LocalPort{down(moved), elsewhere}, []string{"port is not usable.*mlx5_0.*port-down"}},
		{[]probe.LocalPort{down(moved), elsewhere}, nil},
		{[]probe.LocalPort{moved, elsewhere}, []string{"port is usable"}},
		{[]probe.LocalPort{active("roce0", 7, "10.9.0.1", 4), elsewhere}, []string{"another name.*device=roce0 was=mlx5_0"}},
		{[]probe.LocalPort{active("roce0", 9, "10.9.0.1", 4), elsewhere}, []string{"replaced"}},
		{[]probe.LocalPort{elsewhere}, []string{"device is gone.*roce0"}},
		{[]probe.LocalPort{elsewhere}, nil},
		{nil, []string{"device is gone.*mlx5_1"}},
		{[]probe.LocalPort{usable}, []string{"port is usable"}},
	} {
		out.Reset()
		w.see(step.ports)
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if out.Len() == 0 {
			lines = nil
		}
		ok := len(lines) == len(step.says)
		for j := range step.says {
			ok = ok && containsInOrder(lines[j], strings.Split(step.says[j], ".*"))
		}
		if !ok {
			t.Errorf("step %d says\n%swant %q", i, out.String(), step.says)
		}
	}
	want := []portName{{"roce0", 1}, {"mlx5_1", 1}, {"mlx5_0", 1}} // what is gone is still probed from, and fails
	if diff := cmp.Diff(want, w.list(), cmp.AllowUnexported(portName{})); diff != "" {
		t.Errorf("ports (-want +got):\n%s", diff)
	}
}

func containsInOrder(s string, parts []string) bool {
	for _, p := range parts {
		_, rest, ok := strings.Cut(s, p)
		if !ok {
			return false
		}
		s = rest
	}
	return true
}

// A port that goes down counts once, whether its event or the look comes first, and also if there is no event, or nothing
// to be seen any more.
func TestFlaps(t *testing.T) {
	up := active("mlx5_0", 7, "10.9.0.1", 3)
	look := func(p probe.LocalPort) func(*PortWatch) { return func(w *PortWatch) { w.see([]probe.LocalPort{p}) } }
	event := func(typ verbs.EventType) func(*PortWatch) {
		return func(w *PortWatch) { w.event("mlx5_0", verbs.Event{Type: typ, Port: 1}) }
	}
	isUp, isDown, errored, came := look(up), look(down(up)), event(verbs.EventPortError), event(verbs.EventPortActive)
	for _, tt := range []struct {
		name  string
		steps []func(*PortWatch)
		want  uint64
	}{
		{"event, look", []func(*PortWatch){isUp, errored, isDown, came, isUp}, 1},
		{"look, event", []func(*PortWatch){isUp, isDown, errored, came, isUp}, 1},
		{"no events", []func(*PortWatch){isUp, isDown, isDown, isUp, isDown}, 2},
		{"between two looks", []func(*PortWatch){isUp, errored, came, isUp}, 1},
		{"twice between two looks", []func(*PortWatch){isUp, errored, came, errored, came, isUp, isUp}, 2},
		{"down from the start", []func(*PortWatch){isDown, isUp}, 0},
		{"an event that never came hides no later one", []func(*PortWatch){isUp, isDown, isUp, errored, isDown}, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := quietWatch(&bytes.Buffer{})
			for _, step := range tt.steps {
				step(w)
			}
			if got := w.flapped("mlx5_0", 1); got != tt.want {
				t.Errorf("%d flaps, want %d", got, tt.want)
			}
		})
	}
}

// A sign never waits, and the more urgent one counts.
func TestSigns(t *testing.T) {
	w := quietWatch(&bytes.Buffer{})
	for range 3 {
		w.sign(networkGap)
		w.sign(deviceGap)
		w.sign(networkGap)
	}
	if got := <-w.wake; got != deviceGap {
		t.Errorf("woken for a gap of %s", got)
	}
}

// The kernel's messages can be listened to without privilege, and listening ends with its context.
func TestListens(t *testing.T) {
	var out bytes.Buffer
	w := quietWatch(&out)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if strings.Contains(out.String(), "can't listen any more") {
		t.Error(out.String())
	}
}
