//go:build lab

package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// TestSessionsByCM probes with queue pairs that rdma_cm connects, from few to many, and finds nothing left afterwards.
func TestSessionsByCM(t *testing.T) {
	startFleet(t, "test/fleet/testdata/responders.yaml", 2)
	byHand(t, "-R", "-n", "50") // opens the devices, for this program and for librdmacm, which keeps them
	before := [3]resources{1: held(t, 1), 2: held(t, 2)}
	for _, args := range [][]string{
		{"--kind=latency", "--op=write", "-n", "200"},
		{"--kind=latency", "--op=send", "-n", "200"},
		{"--kind=latency", "--op=read", "-n", "200"},
		{"--kind=bandwidth", "--op=write", "-n", "200", "-t", "16"},
		{"--kind=bandwidth", "--op=read", "-n", "200", "-t", "16"},
		{"--kind=bandwidth", "--op=send", "-n", "200", "-t", "16", "-q", "4"},
		{"--kind=bandwidth", "--op=write", "-n", "20", "-t", "8", "-q", "64", "-s", "4096"},
		{"--kind=bandwidth", "--op=write", "-n", "200", "-t", "16", "-m", "1024", "--flow-label", "77", "--traffic-class", "104", "--ring", "4MiB"},
	} {
		t.Run(fmt.Sprint(args), func(t *testing.T) {
			r := byHand(t, append([]string{"-R"}, args...)...)
			if !r.Usable() {
				t.Fatal(describe(r))
			}
		})
	}
	for node := 1; node <= 2; node++ {
		eventually(t, 20*time.Second, fmt.Sprintf("node %d holds no more than before", node), func() bool { return !held(t, node).above(before[node]) })
	}
	eventually(t, 20*time.Second, "no connection is left", func() bool { return cmIDs(t) == 0 })
}

func eventually(t *testing.T, limit time.Duration, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if holds() {
			return
		}
	}
	t.Errorf("never came true within %s: %s", limit, what)
}

// cmIDs is how many connections the kernel knows, on all devices.
func cmIDs(t *testing.T) (n int) {
	t.Helper()
	var devices []struct {
		IDs int `json:"cm_id"`
	}
	if err := json.Unmarshal([]byte(command(t, "rdma", "-j", "resource")), &devices); err != nil {
		t.Fatal(err)
	}
	for _, d := range devices {
		n += d.IDs
	}
	return n
}

var cmPath = verbs.Path{MTU: 1024, HopLimit: 64, Timeout: 16, Retries: 6, RNRRetry: 6, MinRNRTimer: 12, RDAtom: 1, DestRDAtom: 1}

func cmNode(i int) verbs.CMAddr {
	return verbs.CMAddr{Addr: netip.AddrFrom4([4]byte{10, 9, 0, byte(i)})}
}

func cmEndpoint(t *testing.T, d *verbs.Device, initiator bool, qps int) *verbs.Endpoint {
	t.Helper()
	e, err := d.NewEndpoint(verbs.EndpointSpec{
		Transport: verbs.RC, Op: verbs.Write, Initiator: initiator, Port: 1, QPs: qps, TxDepth: 8, CQMod: 1, PostList: 1, MaxMsg: 4096, RDMACM: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

func openDevice(t *testing.T, name string) *verbs.Device {
	t.Helper()
	d, err := verbs.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// TestCMBadCases has no daemon: a listener on node 2, and dialers on node 1 that it does not want, or can't hear.
func TestCMBadCases(t *testing.T) {
	one, two := openDevice(t, "rxe1"), openDevice(t, "rxe2")
	session := [16]byte{1, 2, 3}
	address := verbs.Address{QPN: []uint32{2}, PSN: []uint32{0}}
	dial := func(t *testing.T, to verbs.CMAddr, from verbs.CMAddr, session [16]byte, patience time.Duration) error {
		t.Helper()
		e := cmEndpoint(t, one, true, 2)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		start := time.Now()
		err := e.DialCM(ctx, from, to, session, address, cmPath)
		if took := time.Since(start); took > patience+5*time.Second {
			t.Errorf("took %s, with patience for %s", took, patience)
		}
		if cerr := e.Close(); cerr != nil {
			t.Errorf("close: %s", cerr)
		}
		return err
	}

	t.Run("addresses of a port", func(t *testing.T) {
		got, err := one.CMAddrs(1)
		if err != nil {
			t.Fatal(err)
		}
		var found bool
		for _, g := range got {
			found = found || g.Addr == cmNode(1).Addr
			if g.Addr == cmNode(2).Addr {
				t.Errorf("%s is another device's", g.Addr)
			}
		}
		if !found {
			t.Errorf("%v lacks %s", got, cmNode(1).Addr)
		}
	})
	for name, c := range map[string]struct {
		from, to verbs.CMAddr
		want     []error
	}{
		"nobody listens":       {cmNode(1), verbs.CMAddr{Addr: cmNode(2).Addr, Port: 45678}, []error{syscall.ECONNREFUSED}},
		"no such host":         {cmNode(1), verbs.CMAddr{Addr: cmNode(77).Addr, Port: 45678}, []error{syscall.EHOSTUNREACH, syscall.ETIMEDOUT, syscall.ENODEV}},
		"another's address":    {cmNode(2), verbs.CMAddr{Addr: cmNode(2).Addr, Port: 45678}, []error{syscall.ENODEV}},
		"nobody's address":     {cmNode(99), verbs.CMAddr{Addr: cmNode(2).Addr, Port: 45678}, []error{syscall.EADDRNOTAVAIL, syscall.ENODEV}},
		"an address of no NIC": {cmNode(1), verbs.CMAddr{Addr: netip.MustParseAddr("192.0.2.1"), Port: 45678}, []error{syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.ETIMEDOUT, syscall.ENODEV}},
	} {
		t.Run(name, func(t *testing.T) {
			err := dial(t, c.to, c.from, session, 5*time.Second)
			for _, want := range c.want {
				if errors.Is(err, want) {
					t.Log(err)
					return
				}
			}
			t.Errorf("%v, want one of %v", err, c.want)
		})
	}

	listener := cmEndpoint(t, two, false, 2)
	port, err := listener.ListenCM(cmNode(2), session)
	if err != nil {
		t.Fatal(err)
	}
	to := verbs.CMAddr{Addr: cmNode(2).Addr, Port: port}
	accepted := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		accepted <- listener.AcceptCM(ctx, to, address, cmPath)
	}()
	t.Run("a stranger", func(t *testing.T) {
		if err := dial(t, to, cmNode(1), [16]byte{9}, 5*time.Second); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%v, want %v", err, syscall.ECONNREFUSED)
		}
	})
	t.Run("black hole", func(t *testing.T) {
		command(t, "fault", "2", "blackhole")
		defer command(t, "fault", "2", "clear")
		err := dial(t, to, cmNode(1), session, 3*time.Second)
		if !errors.Is(err, syscall.ETIMEDOUT) && !errors.Is(err, syscall.EHOSTUNREACH) {
			t.Errorf("%v, want %v", err, syscall.ETIMEDOUT)
		}
		t.Log(err)
	})
	t.Run("cancelled", func(t *testing.T) {
		command(t, "fault", "2", "blackhole")
		defer command(t, "fault", "2", "clear")
		e := cmEndpoint(t, one, true, 2)
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(200*time.Millisecond, func() { cancel(errors.New("enough")) })
		start := time.Now()
		err := e.DialCM(ctx, cmNode(1), to, session, address, cmPath)
		if err == nil || err.Error() != "rxe1: rdma_cm: enough" {
			t.Errorf("%v, want the cause", err)
		}
		if took := time.Since(start); took > 5*time.Second {
			t.Errorf("took %s", took)
		}
	})
	t.Run("the session's own", func(t *testing.T) {
		e := cmEndpoint(t, one, true, 2)
		ctx, stop := context.WithTimeout(t.Context(), 10*time.Second)
		defer stop()
		if err := e.DialCM(ctx, cmNode(1), to, session, address, cmPath); err != nil {
			t.Fatal(err)
		}
		if err := <-accepted; err != nil {
			t.Fatal(err)
		}
		// The peer goes without a word.
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Run("closed while it listens", func(t *testing.T) {
		l := cmEndpoint(t, two, false, 2)
		if _, err := l.ListenCM(cmNode(2), session); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- l.AcceptCM(context.WithoutCancel(t.Context()), to, address, cmPath) }()
		time.Sleep(100 * time.Millisecond)
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		select {
		case err := <-ended:
			if err == nil {
				t.Error("connected to nobody")
			}
		case <-time.After(5 * time.Second):
			t.Error("still listens")
		}
	})
	if err := listener.Close(); err != nil {
		t.Error(err)
	}
	eventually(t, 10*time.Second, "no connection is left", func() bool { return cmIDs(t) == 0 })
	if n := openFiles(t, "rdma_cm"); n != 0 {
		t.Errorf("%d event channels are open", n)
	}
}

// openFiles counts this process's descriptors of a device.
func openFiles(t *testing.T, name string) (n int) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && to == "/dev/infiniband/"+name {
			n++
		}
	}
	return n
}

// TestCMThroughABlackHole keeps the control channel, which is on loopback, and loses the wire: the session must end at its
// setup, in time, and the next one must work.
func TestCMThroughABlackHole(t *testing.T) {
	const control = "127.0.0.1:18600"
	ctx, cancel := context.WithCancel(t.Context())
	responder := exec.CommandContext(ctx, os.Getenv("LAB_BINARY"), "respond", "--listen", control, "-d", "rxe2")
	responder.Stderr = os.Stderr
	if err := responder.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cancel()
		_ = responder.Wait()
	}()
	eventually(t, 20*time.Second, "the responder answers", func() bool {
		c, err := net.Dial("tcp", control)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	again := func() probe.Result { return byHandTo(t, control, "-R", "-n", "100") }
	if r := again(); !r.Usable() {
		t.Fatal(describe(r))
	}
	command(t, "fault", "2", "blackhole")
	r := again()
	if r.Outcome != probe.Failed || *r.Stage != probe.StageSetup || *r.Reason != probe.Unreachable || *r.Scope != probe.ScopePath {
		t.Errorf("%s; want %s at %s: %s", describe(r), probe.Failed, probe.StageSetup, probe.Unreachable)
	}
	t.Log(describe(r))
	if r.Duration > 20 {
		t.Errorf("took %.1f s", r.Duration)
	}
	command(t, "fault", "2", "clear")
	if r := again(); !r.Usable() {
		t.Error(describe(r))
	}
}
