package probe

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// removable lets a test take the device from a node while it is in use, and give it back.
func (h *host) removable() (remove, restore func()) {
	var gone atomic.Bool
	h.Use = func(device string) bool { return device == simDevice && !gone.Load() }
	return func() { gone.Store(true) }, func() { gone.Store(false) }
}

func (n *Node) openDevices() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.open)
}

// A device that goes takes its sessions along, at either end; it is closed, and a new one is used.
func TestRemovedDevice(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	for _, tt := range []struct {
		name   string
		loses  *host
		reason Reason
		scope  Scope
	}{{"the initiator's", a, DeviceRemoved, ScopeLocal}, {"the responder's", b, PeerUnresponsive, ScopePeer}} {
		t.Run(tt.name, func(t *testing.T) {
			remove, restore := tt.loses.removable()
			done := a.start(t, t.Context(), long(Latency, verbs.Write), b.target())
			ports, err := tt.loses.Ports()
			if err != nil || len(ports) == 0 {
				t.Fatal("no port: ", err)
			}
			dev := ports[0].dev
			remove()
			began := time.Now()
			if left, err := tt.loses.Ports(); err != nil || len(left) != 0 { // somebody looks
				t.Fatalf("still listed: %v %v", left, err)
			}
			if tt.loses == b { // the silence of its end is noticed by the loop, or by the lease
				eventually(t, "the session is over", func() bool { return b.responder.Sessions() == 0 })
			}
			eventually(t, "the device is closed", func() bool { _, err := dev.Port(1); return err != nil })
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("let go after %s", took)
			}
			r := wait(t, done)
			if r.Outcome != Failed || *r.Reason != tt.reason || *r.Scope != tt.scope {
				t.Errorf("got %s, want %s (%s)", describe(r), tt.reason, tt.scope)
			}
			checkJSON(t, r)
			if n := tt.loses.openDevices(); n != 0 {
				t.Errorf("%d devices are open", n)
			}
			restore()
			wantUsable(t, a.probe(t.Context(), Spec{Name: "after", Iterations: 10}, b.target()))
		})
	}
}

// The queue of events is watched without being in the way of closing.
func TestCloseWhileEventsAreWatched(t *testing.T) {
	needSim(t)
	n := simNode("a")
	n.OnEvent = func(string, verbs.Event) {}
	for range 20 {
		if _, err := n.Ports(); err != nil {
			t.Fatal(err)
		}
		n.drop(simDevice)
	}
	if _, err := n.Ports(); err != nil {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	go func() { closed <- n.Close() }()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("Close hangs")
	}
}
