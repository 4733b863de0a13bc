package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// duplex joins two one-way streams.
type duplex struct {
	io.Reader
	io.Writer
}

func TestFramesSurvive(t *testing.T) {
	var b bytes.Buffer
	w := newWire(duplex{&b, &b})
	want := []frame{
		{0, kindHello, []byte{}},
		{7, kindStdout, []byte("\x00\xff\n\r\x1b")},
		{1<<32 - 1, kindStdin, bytes.Repeat([]byte{0}, maxPayload)},
		{8, kindExit, []byte(`{"code":3}`)},
	}
	for _, f := range want {
		if err := w.send(f.id, f.kind, f.payload); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.send(1, kindStdin, make([]byte, maxPayload+1)); err == nil {
		t.Error("a frame above the limit was sent")
	}
	for _, f := range want {
		got, err := w.receive()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(f, got, cmp.AllowUnexported(frame{})); diff != "" {
			t.Errorf("(-want +got)\n%.400s", diff)
		}
	}
	if _, err := w.receive(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last frame: %v", err)
	}
}

func FuzzReceive(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, byte(kindStdout), 2, 0, 0, 'o', 'k'})
	f.Add([]byte{1, 0, 0, 0, byte(kindExit), 255, 255, 255})
	f.Add([]byte{1, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		w := newWire(duplex{bytes.NewReader(b), io.Discard})
		for {
			fr, err := w.receive()
			if err != nil {
				return
			}
			if len(fr.payload) > maxPayload {
				t.Fatalf("payload of %d bytes", len(fr.payload))
			}
			acked(fr.payload)
		}
	})
}

// startGuest connects a relay to an agent in this process, as QEMU does with one in the guest.
func startGuest(t *testing.T) *relay {
	t.Helper()
	host, guest := net.Pipe()
	agent := &agentServer{wire: newWire(guest), procs: map[uint32]*process{}}
	r := newRelay(newWire(host))
	var wg sync.WaitGroup
	wg.Go(r.receive)
	wg.Go(func() {
		for {
			f, err := agent.wire.receive()
			if err != nil {
				return
			}
			agent.handle(f)
		}
	})
	t.Cleanup(func() {
		_ = host.Close()
		_ = guest.Close()
		wg.Wait()
	})
	return r
}

// shell runs a script in such a guest.
func shell(ctx context.Context, r *relay, script string, std stdio) (int, error) {
	ours, theirs := net.Pipe()
	go r.serve(theirs)
	cmd := command{Argv: []string{"sh", "-c", script}, Dir: "/", Env: os.Environ()}
	return runCommand(ctx, ours, cmd, std, nil)
}

func TestCommandStreams(t *testing.T) {
	r := startGuest(t)
	in := make([]byte, 3*windowLen+1)
	if _, err := rand.Read(in); err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	code, err := shell(t.Context(), r, "tee /dev/stderr; exit 7", stdio{bytes.NewReader(in), &out, &errs})
	if code != 7 || err != nil {
		t.Errorf("exit status %d, error %v: want 7", code, err)
	}
	if !bytes.Equal(out.Bytes(), in) || !bytes.Equal(errs.Bytes(), in) {
		t.Errorf("%d bytes went in; %d came out on stdout, %d on stderr, or other ones", len(in), out.Len(), errs.Len())
	}
}

func TestCommandEnds(t *testing.T) {
	r := startGuest(t)
	for _, tc := range []struct {
		script string
		code   int
		out    string
	}{
		{"true", 0, ""},
		{"kill -9 $$", 128 + 9, ""},
		{"exec /nonexistent", 127, ""},
		{"cat", 0, ""}, // no input is an empty one
	} {
		var out bytes.Buffer
		code, err := shell(t.Context(), r, tc.script, stdio{nil, &out, io.Discard})
		if err != nil || code != tc.code || out.String() != tc.out {
			t.Errorf("%s: status %d, output %q, error %v: want %d, %q", tc.script, code, out.String(), err, tc.code, tc.out)
		}
	}
}

// A child left behind, which holds the output open, does not hold up the end.
func TestBackgroundChild(t *testing.T) {
	r := startGuest(t)
	var out bytes.Buffer
	code, err := shell(t.Context(), r, "sleep 60 & echo $!", stdio{nil, &out, io.Discard})
	if code != 0 || err != nil {
		t.Fatalf("status %d, error %v", code, err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(out.String()))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Errorf("the command ended after its child did: %v", err)
	}
}

// stuck blocks its writer until it is released.
type stuck struct{ release chan struct{} }

func (s stuck) Write(b []byte) (int, error) { <-s.release; return len(b), nil }

// One whose output nobody reads holds up neither the others nor more than a window's memory.
func TestSlowReaderHoldsUpNobody(t *testing.T) {
	r := startGuest(t)
	slow := stuck{make(chan struct{})}
	done := make(chan error, 1)
	go func() {
		_, err := shell(t.Context(), r, "head -c 1000000 /dev/zero", stdio{nil, slow, io.Discard})
		done <- err
	}()
	for range 20 {
		if code, err := shell(t.Context(), r, "echo x", stdio{nil, io.Discard, io.Discard}); code != 0 || err != nil {
			t.Fatalf("status %d, error %v", code, err)
		}
	}
	close(slow.release)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

type closedPipe struct{}

func (closedPipe) Write([]byte) (int, error) { return 0, syscall.EPIPE }

func TestClosedOutputEndsCommand(t *testing.T) {
	r := startGuest(t)
	_, err := shell(t.Context(), r, "yes", stdio{nil, closedPipe{}, io.Discard})
	if !errors.Is(err, syscall.EPIPE) {
		t.Errorf("error %v: want EPIPE", err)
	}
}

// A client that goes away takes its process along.
func TestCancelEndsCommand(t *testing.T) {
	r := startGuest(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	file := t.TempDir() + "/pid"
	done := make(chan error, 1)
	go func() {
		_, err := shell(ctx, r, "echo $$ >"+file+"; yes", stdio{nil, io.Discard, io.Discard})
		done <- err
	}()
	var pid []byte
	for len(pid) == 0 {
		pid, _ = os.ReadFile(file)
		time.Sleep(time.Millisecond)
	}
	cancel(errSignal{syscall.SIGINT})
	if err := <-done; !errors.As(err, new(errSignal)) {
		t.Errorf("error %v: want the signal", err)
	}
	for { // the test's own timeout ends this if the process lives on
		if _, err := os.Stat("/proc/" + strings.TrimSpace(string(pid))); err != nil {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

func TestGuestGone(t *testing.T) {
	host, guest := net.Pipe()
	r := newRelay(newWire(host))
	go r.receive()
	go func() {
		_, _ = newWire(guest).receive() // the command
		_ = guest.Close()
	}()
	if _, err := shell(t.Context(), r, "true", stdio{nil, io.Discard, io.Discard}); !errors.Is(err, errGuestGone) {
		t.Errorf("error %v: want %v", err, errGuestGone)
	}
	if _, err := shell(t.Context(), r, "true", stdio{nil, io.Discard, io.Discard}); err == nil {
		t.Error("a command ran in a guest that is gone")
	}
}

func TestGuestEnv(t *testing.T) {
	t.Setenv("LAB_NODES", "4")
	env := guestEnv([]string{"PATH=/opt/bin", "HTTP_PROXY=x", "no_proxy=x", "LAB_NODES=9", "A=b=c", "PWD=/x"}, "/here")
	for _, want := range []string{"A=b=c", "LAB_NODES=4", "PWD=/here"} {
		if !strings.Contains("\n"+strings.Join(env, "\n")+"\n", "\n"+want+"\n") {
			t.Errorf("%q lacks %s", env, want)
		}
	}
	for _, kv := range env {
		if strings.Contains(strings.ToLower(kv), "proxy") || kv == "LAB_NODES=9" || kv == "PWD=/x" {
			t.Errorf("%s got through", kv)
		}
		if path, ok := strings.CutPrefix(kv, "PATH="); ok && !strings.HasPrefix(path, "/run/lab/bin:/opt/bin:") {
			t.Errorf("PATH is %s", path)
		}
	}
}
