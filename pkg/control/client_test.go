package control

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// A whole session over TCP: what one end sends is what the other gets.
func TestSession(t *testing.T) {
	f := &fakeService{}
	l := listen(t)
	start(t, server(f), l)
	c := NewClient()
	defer c.CloseIdle()
	t.Setenv("HTTP_PROXY", "http://127.0.0.1:1") // a fleet's peers are never behind a proxy

	req := openRequest()
	s, rep, err := c.Open(t.Context(), l.Addr().String(), req)
	if err != nil {
		t.Fatal(err)
	}
	addrs := cmp.Comparer(func(a, b GID) bool { return a == b })
	want, _ := f.Open(t.Context(), req)
	if diff := cmp.Diff(want, rep, addrs); diff != "" {
		t.Errorf("reply (-sent +got):\n%s", diff)
	}
	f.calls = nil
	if err := s.Run(t.Context(), RunRequest{Size: 4096}); err != nil {
		t.Error(err)
	}
	if _, err := s.Mark(t.Context()); err != nil {
		t.Error(err)
	}
	if err := s.Renew(t.Context()); err != nil {
		t.Error(err)
	}
	fin, err := s.Finish(t.Context(), FinishRequest{Sent: 1 << 60, Failed: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	wantFin, _ := (&fakeService{}).Finish(t.Context(), req.ID, &FinishRequest{Sent: 1 << 60})
	if diff := cmp.Diff(wantFin, fin); diff != "" {
		t.Errorf("finish (-sent +got):\n%s", diff)
	}
	wantCalls := []call{
		{"run", req.ID, &RunRequest{Size: 4096}}, {"mark", req.ID, nil}, {"renew", req.ID, nil},
		{"finish", req.ID, &FinishRequest{Sent: 1 << 60, Failed: true}}, {"close", req.ID, nil},
	}
	if diff := cmp.Diff(wantCalls, f.seen()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

func TestPeersErrors(t *testing.T) {
	l := listen(t)
	start(t, server(&fakeService{err: &Error{Reason: "busy", Detail: "mlx5_0 port 1 is in use", RetryAfter: 0.3}}), l)
	c := NewClient()
	defer c.CloseIdle()
	_, _, err := c.Open(t.Context(), l.Addr().String(), openRequest())
	want := &Error{Reason: "busy", Detail: "mlx5_0 port 1 is in use", RetryAfter: 0.3, FromPeer: true}
	if diff := cmp.Diff(want, reason(t, err)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// answer is a peer that reads a request and then does something else than it should. It serves one connection.
type answer func(c net.Conn)

func respond(text string) answer {
	return func(c net.Conn) { _, _ = io.WriteString(c, text) }
}

func respondBody(status, body string) answer {
	return respond(fmt.Sprintf("HTTP/1.1 %s\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n%s", status, len(body), body))
}

// endless repeats text until nobody reads it.
func endless(first, text string, pause time.Duration) answer {
	return func(c net.Conn) {
		if _, err := io.WriteString(c, first); err != nil {
			return
		}
		for {
			if _, err := io.WriteString(c, text); err != nil {
				return
			}
			time.Sleep(pause)
		}
	}
}

const html = "<html><body><h1>It works!</h1></body></html>"

func goodReply(t *testing.T) string {
	t.Helper()
	b, err := json.Marshal(openReply(openRequest()))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Every peer that misbehaves is named for what it does, within the time of one call, and costs nothing afterwards: the
// bubble does not end while anything of a call is left.
func TestPeersThatMisbehave(t *testing.T) {
	good := goodReply(t)
	skewed := strings.Replace(good, `"RoCE v2"`, `"RoCE v3"`, 1)
	for _, tt := range []struct {
		name  string
		peer  answer
		open  string // reason when the session is to be opened ...
		later string // ... and in the midst of it
	}{
		{"accepts and says nothing", func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }, ReasonHandshakeTimeout, ReasonPeerUnresponsive},
		{"closes", func(net.Conn) {}, ReasonBadHandshake, ReasonPeerUnresponsive},
		{"a byte a second", endless("", "H", time.Second), ReasonHandshakeTimeout, ReasonPeerUnresponsive},
		{"half a status line", respond("HTTP/1.1 20"), ReasonBadHandshake, ReasonPeerUnresponsive},
		{"body a byte a second", endless("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", " ", time.Second), ReasonHandshakeTimeout, ReasonPeerUnresponsive},
		{"body that ends early", respond("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"), ReasonBadHandshake, ReasonPeerUnresponsive},
		{"endless body", endless("HTTP/1.1 200 OK\r\n\r\n", strings.Repeat(" ", 4096), 0), ReasonBadHandshake, ReasonBadHandshake},
		{"endless header", endless("HTTP/1.1 200 OK\r\n", "X: y\r\n", 0), ReasonBadHandshake, ReasonPeerUnresponsive},
		{"endless interim replies", endless("", "HTTP/1.1 100 Continue\r\n\r\n", time.Millisecond), ReasonBadHandshake, ReasonPeerUnresponsive},
		{"400", respondBody("400 Bad Request", html), ReasonBadHandshake, ReasonBadHandshake},
		{"403 of a web server", respondBody("403 Forbidden", html), ReasonBadHandshake, ReasonBadHandshake},
		{"404", respondBody("404 Not Found", html), ReasonVersionSkew, ReasonVersionSkew},
		{"500", respondBody("500 Internal Server Error", html), ReasonBadHandshake, ReasonBadHandshake},
		{"status without an error", respondBody("409 Conflict", `{"error": null}`), ReasonBadHandshake, ReasonBadHandshake},
		{"an error without a reason", respondBody("409 Conflict", `{"error": {"detail": "because"}}`), ReasonBadHandshake, ReasonBadHandshake},
		{"redirect", respond("HTTP/1.1 307 Temporary Redirect\r\nLocation: http://10.9.0.99/\r\nContent-Length: 0\r\n\r\n"), ReasonBadHandshake, ReasonPeerUnresponsive},
		{"upgrade", respond("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"), ReasonBadHandshake, ReasonBadHandshake},
		{"200 in HTML", respondBody("200 OK", html), ReasonBadHandshake, ReasonBadHandshake},
		{"200 without a body", respondBody("200 OK", ""), ReasonBadHandshake, ReasonBadHandshake},
		{"no content", respond("HTTP/1.1 204 No Content\r\n\r\n"), ReasonBadHandshake, ReasonBadHandshake},
		{"an array", respondBody("200 OK", "[]"), ReasonBadHandshake, ReasonBadHandshake},
		{"wrong types", respondBody("200 OK", `{"port": "1", "rate": "fast"}`), ReasonBadHandshake, ReasonBadHandshake},
		{"a number beyond a double", respondBody("200 OK", `{"lease": 1e999, "rate": 1e999}`), ReasonBadHandshake, ReasonBadHandshake},
		{"values out of range", respondBody("200 OK", `{"lease": -1, "rate": -1}`), ReasonBadHandshake, ReasonBadHandshake},
		{"SSH", respond("SSH-2.0-OpenSSH_9.2p1\r\n"), ReasonBadHandshake, ReasonPeerUnresponsive},
		{"garbage", respond("\x00\x01\x02\xff\xfe\r\n\r\n"), ReasonBadHandshake, ReasonPeerUnresponsive},
		{"null", respondBody("200 OK", "null"), ReasonBadHandshake, ""},
		{"a newer GID type", respondBody("200 OK", skewed), ReasonVersionSkew, ""},
	} {
		for _, opening := range []bool{true, false} {
			want := tt.later
			if opening {
				want = tt.open
			}
			t.Run(fmt.Sprintf("%s, opening %t", tt.name, opening), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					p := newPipes()
					go serveAll(p, tt.peer)
					c := p.client()
					began := time.Now()
					var err error
					if opening {
						_, _, err = c.Open(t.Context(), "peer:18516", openRequest())
					} else {
						_, err = (&Session{c: c, addr: "peer:18516", id: "0f"}).Finish(t.Context(), FinishRequest{})
					}
					noLater(t, began, CallTimeout)
					if want == "" {
						if err != nil {
							t.Errorf("error %s", err)
						}
					} else if e := reason(t, err); e.Reason != want || e.Scope != "peer" || e.FromPeer || !strings.Contains(e.Detail, "peer:18516") {
						t.Errorf("%+v, want %s of the peer, naming its address", e, want)
					} else if e.Silent != (tt.open == ReasonHandshakeTimeout) {
						t.Errorf("%+v: nobody answered: %t", e, e.Silent)
					}
					c.CloseIdle()
					p.Close()
					time.Sleep(2 * time.Second) // peers that pause notice
				})
			})
		}
	}
}

// serveAll reads a request from each connection, answers it in its own way and reads on.
func serveAll(p *pipes, how answer) {
	for {
		c, err := p.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			r := bufio.NewReader(c)
			if req, err := http.ReadRequest(r); err == nil {
				_, _ = io.Copy(io.Discard, req.Body)
				how(c)
			}
		}()
	}
}

// A redirect leads nowhere, even to a peer that would answer.
func TestRedirectsAreNotFollowed(t *testing.T) {
	l := listen(t)
	good := goodReply(t)
	h := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/elsewhere" {
			_, _ = io.WriteString(w, good)
			return
		}
		http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
	})}
	served := make(chan error)
	go func() { served <- h.Serve(l) }()
	c := NewClient()
	_, _, err := c.Open(t.Context(), l.Addr().String(), openRequest())
	if err == nil {
		t.Error("followed")
	} else if e := reason(t, err); e.Reason != ReasonBadHandshake {
		t.Errorf("%+v", e)
	}
	c.CloseIdle()
	h.Close()
	<-served
}

// A reply that can't be used still stands for a session on the peer: it is closed.
func TestOpenClosesWhatItCannotUse(t *testing.T) {
	f := &fakeService{}
	l := listen(t)
	s := server(f)
	start(t, s, l)
	c := NewClient()
	defer c.CloseIdle()
	req := openRequest()
	req.MTU = 2048 // the fake answers with another
	_, _, err := c.Open(t.Context(), l.Addr().String(), req)
	if e := reason(t, err); e.Reason != ReasonBadHandshake {
		t.Errorf("%+v", e)
	}
	if calls := f.seen(); len(calls) != 2 || calls[1].Method != "close" || calls[1].ID != req.ID {
		t.Errorf("calls %+v, want open and close", calls)
	}
}

func TestPeersThatCannotBeReached(t *testing.T) {
	dial := func(err error) error {
		return &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", err)}
	}
	for _, tt := range []struct {
		name          string
		err           error
		reason, scope string
	}{
		{"refused", dial(syscall.ECONNREFUSED), ReasonRefused, "peer"},
		{"no route to the host", dial(syscall.EHOSTUNREACH), ReasonUnreachable, "path"},
		{"no route to the network", dial(syscall.ENETUNREACH), ReasonUnreachable, "path"},
		{"no answer in the kernel's time", dial(syscall.ETIMEDOUT), ReasonUnreachable, "path"},
		{"no answer in our time", &net.OpError{Op: "dial", Net: "tcp", Err: context.DeadlineExceeded}, ReasonUnreachable, "path"},
		{"no file descriptors", dial(syscall.EMFILE), ReasonUnreachable, "local"},
		{"no ports", dial(syscall.EADDRNOTAVAIL), ReasonUnreachable, "local"},
		{"forbidden by a filter", dial(syscall.EACCES), ReasonUnreachable, "local"},
		{"no such name", &net.OpError{Op: "dial", Net: "tcp", Err: &net.DNSError{Err: "no such host", Name: "peer", IsNotFound: true}}, ReasonDNS, "local"},
		{"no answer from DNS", &net.OpError{Op: "dial", Net: "tcp", Err: &net.DNSError{Err: "i/o timeout", Name: "peer", IsTimeout: true}}, ReasonDNS, "local"},
		{"bad port", &net.OpError{Op: "dial", Net: "tcp", Err: &net.AddrError{Err: "invalid port", Addr: "99999"}}, ReasonDNS, "local"},
	} {
		for _, opening := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, opening %t", tt.name, opening), func(t *testing.T) {
				c := NewClient()
				c.tr.DialContext = func(context.Context, string, string) (net.Conn, error) { return nil, tt.err }
				var err error
				if opening {
					_, _, err = c.Open(t.Context(), "peer:18516", openRequest())
				} else {
					err = (&Session{c: c, addr: "peer:18516", id: "0f"}).Renew(t.Context())
				}
				if e := reason(t, err); e.Reason != tt.reason || e.Scope != tt.scope || !strings.Contains(e.Detail, "peer:18516") {
					t.Errorf("%+v, want %s (%s) naming the address", e, tt.reason, tt.scope)
				}
			})
		}
	}
}

// The same, as far as it can be had from the kernel without a network.
func TestUnusableAddresses(t *testing.T) {
	l := listen(t)
	free := l.Addr().String()
	l.Close()
	for _, tt := range []struct{ addr, reason, scope string }{
		{free, ReasonRefused, "peer"},
		{"127.0.0.1:99999", ReasonDNS, "local"},
		{"bad host:18516", ReasonDNS, "local"},
		{"10.9.0.2", ReasonDNS, "local"},
		{"", ReasonDNS, "local"},
	} {
		c := NewClient()
		_, _, err := c.Open(t.Context(), tt.addr, openRequest())
		if e := reason(t, err); e.Reason != tt.reason || e.Scope != tt.scope {
			t.Errorf("%q: %+v, want %s (%s)", tt.addr, e, tt.reason, tt.scope)
		}
	}
}

// A host that swallows packets takes no longer than the dial's own time. Here it is a full listen queue, which drops SYNs.
func TestDialIsBounded(t *testing.T) {
	t.Parallel()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), syscall.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port)
	for { // until it is full
		c, err := net.DialTimeout("tcp", addr, 200*time.Millisecond)
		if err != nil {
			break
		}
		defer c.Close()
	}
	ctx, cancel := context.WithTimeout(t.Context(), CallTimeout)
	defer cancel()
	_, _, err = NewClient().Open(ctx, addr, openRequest())
	if e := reason(t, err); e.Reason != ReasonUnreachable || e.Scope != "path" {
		t.Errorf("%+v", e)
	}
}

func TestCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipes()
		go serveAll(p, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
		c := p.client()
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		began := time.Now()
		if _, _, err := c.Open(ctx, "peer:1", openRequest()); err == nil {
			t.Error("no error")
		}
		noLater(t, began, time.Second)
		c.CloseIdle()
		p.Close()
	})
}

// After a peer's restart its old connections are stale. The next call works at once all the same.
func TestPeerRestarts(t *testing.T) {
	f := &fakeService{}
	l := listen(t)
	addr := l.Addr().String()
	stop := start(t, server(f), l)
	c := NewClient()
	defer c.CloseIdle()
	for i := range 10 {
		if _, _, err := c.Open(t.Context(), addr, openRequest()); err != nil {
			t.Fatalf("after %d restarts: %s", i, err)
		}
		stop()
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		stop = start(t, server(f), l) // closes l
	}
}

// The worst moment: the peer reads a call on the old connection and goes before it answers.
func TestPeerRestartsUnderACall(t *testing.T) {
	l := listen(t)
	good := goodReply(t)
	connections := make(chan int, 1)
	go func() {
		n := 0
		defer func() { connections <- n }()
		for ; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			r := bufio.NewReader(c)
			for answered := false; ; answered = true {
				req, err := http.ReadRequest(r)
				if err != nil {
					break
				}
				_, _ = io.Copy(io.Discard, req.Body)
				if answered {
					break
				}
				fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(good), good)
			}
			c.Close()
		}
	}()
	c := NewClient()
	for i := range 2 {
		if _, _, err := c.Open(t.Context(), l.Addr().String(), openRequest()); err != nil {
			t.Errorf("call %d: %s", i+1, err)
		}
	}
	c.CloseIdle()
	l.Close()
	if n := <-connections; n != 2 {
		t.Errorf("%d connections, want 2: the second call was to be repeated", n)
	}
}

// Nothing grows over many calls to peers that fail in every way.
func TestNothingGrows(t *testing.T) {
	peers := map[string]answer{
		"closes":    func(net.Conn) {},
		"500":       respondBody("500 Internal Server Error", html),
		"HTML":      respondBody("200 OK", html),
		"too much":  endless("HTTP/1.1 200 OK\r\n\r\n", strings.Repeat(" ", 1<<16), 0),
		"redirect":  respond("HTTP/1.1 307 Temporary Redirect\r\nLocation: http://10.9.0.99/\r\nContent-Length: 0\r\n\r\n"),
		"half":      respond("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"),
		"says none": func(c net.Conn) { _, _ = io.Copy(io.Discard, c) },
	}
	var addrs []string
	for _, how := range peers {
		l := listen(t)
		addrs = append(addrs, l.Addr().String())
		go acceptAll(l, how)
	}
	gone := listen(t)
	addrs = append(addrs, gone.Addr().String())
	gone.Close()
	slices.Sort(addrs)

	c := NewClient()
	try := func() {
		for _, addr := range addrs {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond) // for the silent one
			if _, _, err := c.Open(ctx, addr, openRequest()); err == nil {
				t.Errorf("%s answered", addr)
			}
			cancel()
		}
	}
	try() // what is made once
	before := usage(t)
	for range 200 / len(addrs) {
		try()
	}
	c.CloseIdle()
	const slack = 4 // connections on their way out
	var after [2]int
	for range 100 {
		if after = usage(t); after[0] <= before[0]+slack && after[1] <= before[1]+slack {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Errorf("goroutines and file descriptors: %v before, %v after", before, after)
}

func acceptAll(l net.Listener, how answer) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			if req, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
				_, _ = io.Copy(io.Discard, req.Body)
				how(c)
			}
		}()
	}
}

// usage counts goroutines and open file descriptors.
func usage(t *testing.T) [2]int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip(err)
	}
	return [2]int{runtime.NumGoroutine(), len(fds)}
}

// An error of the transport keeps its cause, without net/http's decoration.
func TestUnwrapURL(t *testing.T) {
	plain := errors.New("plain")
	if got := unwrapURL(plain); got != plain {
		t.Errorf("got %v", got)
	}
}
