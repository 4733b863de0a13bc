package probe

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule"
)

// The tests that need a device run over verbsim, a verbs provider in user space: real sessions, real loops, data that moves,
// without a NIC or a kernel module. It is preloaded, so the test binary starts itself again with it.
const (
	simLibrary = "../../build/verbsim.so" // make -C test/verbsim
	simDevice  = "sim0"

	simDirEnv = "VERBSIM_DIR"                  // the fabric of this run of the tests
	roleEnv   = "RDMABENCHD_TEST_ROLE"         // a process of the tests: respond or probe
	addrEnv   = "RDMABENCHD_TEST_ADDRESS"      // where to listen, or whom to probe
	specEnv   = "RDMABENCHD_TEST_SPEC"         // what to probe, as JSON
	noSimEnv  = "RDMABENCHD_TEST_NO_PRELOADED" // why there is no device
)

func TestMain(m *testing.M) {
	if os.Getenv(simDirEnv) == "" && os.Getenv(noSimEnv) == "" {
		os.Setenv(noSimEnv, "can't start again with "+simLibrary) // in case that fails
		if err := preload(); err != nil {
			os.Setenv(noSimEnv, err.Error())
		}
	}
	switch os.Getenv(roleEnv) {
	case "respond":
		respondUntilKilled()
	case "probe":
		probeOnce()
	}
	code := m.Run()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if dir := os.Getenv(simDirEnv); dir != "" {
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

// preload replaces this process by itself with the provider.
func preload() error {
	lib, err := filepath.Abs(simLibrary)
	if err == nil {
		_, err = os.Stat(lib)
	}
	if err != nil {
		return fmt.Errorf("no verbs provider: run `make -C test/verbsim` first: %w", err)
	}
	dir, err := os.MkdirTemp("/dev/shm", "rdmabenchd-probe-test.")
	if err != nil {
		return err
	}
	os.Unsetenv(noSimEnv)
	env := append(os.Environ(), "LD_PRELOAD="+lib, simDirEnv+"="+dir)
	err = syscall.Exec("/proc/self/exe", os.Args, env)
	os.RemoveAll(dir)
	return err
}

// needSim skips a test that can't be run without the provider.
func needSim(t *testing.T) {
	t.Helper()
	if why := os.Getenv(noSimEnv); why != "" {
		t.Skip(why)
	}
}

var roomy = Limits{Sessions: 64, Memory: 1 << 30, Message: 64 << 20, Lease: time.Minute}

// fixedMeter stands for a port whose counters each grow by one a run.
type fixedMeter string

func (m fixedMeter) Start(_ context.Context, device string, port int) func(context.Context) *EndEvidence {
	return func(context.Context) *EndEvidence {
		return &EndEvidence{
			Device: device, Port: port, Counters: map[string]uint64{string(m): 1}, Classes: map[string]uint64{}, Moved: map[string][]string{}, Unknown: []string{},
		}
	}
}

// host is a node of a fleet, within this process: both roles over the simulated device.
type host struct {
	*Node
	*Initiator
	responder *Responder
	service   control.Service // what the control channel serves; the responder, unless a test puts itself in between
	addr      string
	stop      func()
}

// newHost starts a node. When the test ends nothing may be left of any session.
func newHost(t *testing.T, name string, l Limits) *host {
	t.Helper()
	needSim(t)
	h := &host{Node: simNode(name)}
	h.Initiator = &Initiator{Node: h.Node, Client: control.NewClient()}
	h.responder = NewResponder(h.Node, l)
	h.service = h.responder
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h.addr = listener.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	s := control.Server{Service: h, Guard: control.AddressGuard(func(string) bool { return false }), Log: h.Log}
	go func() { served <- s.Serve(ctx, listener) }()
	h.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-served; err != nil {
			t.Errorf("%s: %s", name, err)
		}
		h.responder.Shutdown()
		h.Client.CloseIdle()
		h.checkEmpty(t)
		if err := h.Node.Close(); err != nil {
			t.Errorf("%s: something is left: %s", name, err)
		}
	})
	t.Cleanup(h.stop)
	return h
}

// The host is its own control.Service, so that a test can exchange what is behind it.
func (h *host) Hello(ctx context.Context) (*control.Hello, error) { return h.service.Hello(ctx) }
func (h *host) Ping(ctx context.Context, r *control.PingRequest) (*control.PingReply, error) {
	return h.service.Ping(ctx, r)
}
func (h *host) Open(ctx context.Context, r *control.OpenRequest) (*control.OpenReply, error) {
	return h.service.Open(ctx, r)
}
func (h *host) Run(ctx context.Context, id string, r *control.RunRequest) error {
	return h.service.Run(ctx, id, r)
}
func (h *host) Mark(ctx context.Context, id string) (*control.MarkReply, error) {
	return h.service.Mark(ctx, id)
}
func (h *host) Finish(ctx context.Context, id string, r *control.FinishRequest) (*control.FinishReply, error) {
	return h.service.Finish(ctx, id, r)
}
func (h *host) Renew(ctx context.Context, id string) error { return h.service.Renew(ctx, id) }
func (h *host) Close(ctx context.Context, id string) error { return h.service.Close(ctx, id) }

func simNode(name string) *Node {
	n := NewNode(name, schedule.NewGate(schedule.GateOptions{}), fixedMeter(name+"_packets"), slog.New(slog.DiscardHandler))
	n.Use = func(device string) bool { return device == simDevice }
	n.host = name // else both ends would be the same port of one host
	return n
}

func (h *host) target() Target { return Target{Name: h.Name, Address: h.addr, Path: "same_rack"} }

func (h *host) probe(ctx context.Context, spec Spec, to Target) *Result {
	return h.Initiator.Probe(ctx, spec, to, simDevice, 1)
}

// checkEmpty fails the test if a session, its memory or its port is still held.
func (h *host) checkEmpty(t *testing.T) {
	t.Helper()
	if n := h.responder.Sessions(); n != 0 {
		t.Errorf("%s: %d sessions are open", h.Name, n)
	}
	h.responder.mu.Lock()
	if m := h.responder.memory; m != 0 {
		t.Errorf("%s: %d bytes are booked", h.Name, m)
	}
	h.responder.mu.Unlock()
	for _, key := range []string{simDevice + "/1", softwareSlot} {
		release, ok := h.Gate.TryAcquire(key, true)
		if !ok {
			t.Errorf("%s: %s is held", h.Name, key)
			continue
		}
		release()
	}
}

// eventually waits until a condition holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for range 1000 {
		if holds() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("never came true: %s", what)
}

// describe is a result in one line.
func describe(r *Result) string {
	if r.Usable() {
		return fmt.Sprintf("%s %v", r.Outcome, r.TaintLog)
	}
	return fmt.Sprintf("%s at %s: %s (%s): %s", r.Outcome, *r.Stage, *r.Reason, *r.Scope, *r.Detail)
}

// wantUsable fails the test unless there are figures that nothing but their brevity speaks against.
func wantUsable(t *testing.T, r *Result) {
	t.Helper()
	for _, taint := range r.Taints {
		if taint != TaintShortRun && taint != TaintClock { // a busy machine takes the CPU away
			t.Errorf("tainted: %v", r.TaintLog)
		}
	}
	if !r.Usable() {
		t.Fatal(describe(r))
	}
}

// wantFailure fails the test unless the result is that of the failure.
func wantFailure(t *testing.T, r *Result, outcome Outcome, stage Stage, reason Reason, scope Scope) {
	t.Helper()
	if r.Outcome != outcome || *r.Stage != stage || *r.Reason != reason || *r.Scope != scope {
		t.Errorf("%s; want %s at %s: %s (%s)", describe(r), outcome, stage, reason, scope)
	}
	checkJSON(t, r)
}

// ---- other processes ----

// process is a node in a process of its own.
type process struct {
	*exec.Cmd
	addr string
	out  *bufio.Reader
}

// spawn starts this binary in another role. It is killed when the test ends.
func spawn(t *testing.T, role string, env ...string) *process {
	t.Helper()
	needSim(t)
	p := &process{Cmd: exec.Command("/proc/self/exe")}
	p.Env = append(append(os.Environ(), roleEnv+"="+role), env...)
	p.Stderr = os.Stderr
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	return p
}

// kill ends the process as a power cut would.
func (p *process) kill() {
	_ = p.Process.Kill()
	_ = p.Wait()
}

func (p *process) signal(t *testing.T, s os.Signal) {
	t.Helper()
	if err := p.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// spawnResponder starts a responder; addr may be that of one that was before.
func spawnResponder(t *testing.T, addr string) *process {
	t.Helper()
	p := spawn(t, "respond", addrEnv+"="+addr)
	line, err := p.out.ReadString('\n')
	if err != nil {
		t.Fatalf("responder: %q, %s", line, err)
	}
	p.addr = strings.TrimSpace(line)
	return p
}

func (p *process) target() Target { return Target{Name: "other", Address: p.addr} }

func respondUntilKilled() {
	n := simNode("other")
	l, err := net.Listen("tcp", os.Getenv(addrEnv))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(l.Addr())
	limits := roomy
	limits.Lease = 2 * time.Second
	s := control.Server{Service: NewResponder(n, limits), Guard: control.AddressGuard(func(string) bool { return false }), Log: n.Log}
	fmt.Fprintln(os.Stderr, s.Serve(context.Background(), l))
	os.Exit(1)
}

// spawnProbe starts an initiator that probes once.
func spawnProbe(t *testing.T, to Target, spec Spec, env ...string) *process {
	t.Helper()
	text, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	return spawn(t, "probe", append(env, addrEnv+"="+to.Address, specEnv+"="+string(text))...)
}

// result waits for what the initiator found.
func (p *process) result(t *testing.T) *Result {
	t.Helper()
	var r Result
	if err := json.NewDecoder(p.out).Decode(&r); err != nil {
		t.Fatalf("result: %s", err)
	}
	return &r
}

func probeOnce() {
	var spec Spec
	if err := json.Unmarshal([]byte(os.Getenv(specEnv)), &spec); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	i := Initiator{Node: simNode("other"), Client: control.NewClient()}
	r := i.Probe(context.Background(), spec, Target{Name: "here", Address: os.Getenv(addrEnv)}, simDevice, 1)
	if err := json.NewEncoder(os.Stdout).Encode(r); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}
