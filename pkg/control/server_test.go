package control

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func openBody(t *testing.T) string {
	t.Helper()
	b, err := json.Marshal(openRequest())
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func do(s *Server, method, target, body string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	s.handler().ServeHTTP(w, httptest.NewRequest(method, target, strings.NewReader(body)))
	return w
}

// replyError returns the error that a reply carries, nil if it carries none.
func replyError(t *testing.T, w *httptest.ResponseRecorder) *Error {
	t.Helper()
	if got := w.Header().Get("Content-Type"); got != "application/json" {
		t.Errorf("content type %q", got)
	}
	var r errorReply
	if err := json.Unmarshal(w.Body.Bytes(), &r); err != nil {
		t.Fatalf("reply %q is no JSON: %s", w.Body, err)
	}
	return r.Error
}

func TestCallsReachTheService(t *testing.T) {
	const id = "0f0f"
	for _, tt := range []struct {
		method, target, body string
		want                 call
	}{
		{"POST", "/v1/sessions", openBody(t), call{"open", openRequest().ID, openRequest()}},
		{"POST", "/v1/ping", pingBody(t), call{"ping", "", pingRequest()}},
		{"POST", "/v1/sessions/0f0f/run", `{"size": 4096}`, call{"run", id, &RunRequest{Size: 4096}}},
		{"POST", "/v1/sessions/0f0f/mark", "", call{"mark", id, nil}},
		{"POST", "/v1/sessions/0f0f/mark", "not read", call{"mark", id, nil}},
		{"POST", "/v1/sessions/0f0f/finish", `{"sent": 18446744073709551615, "failed": true}`, call{"finish", id, &FinishRequest{Sent: 1<<64 - 1, Failed: true}}},
		{"POST", "/v1/sessions/0f0f/renew", "", call{"renew", id, nil}},
		{"DELETE", "/v1/sessions/0f0f", "", call{"close", id, nil}},
		// What a newer minor version adds is ignored.
		{"POST", "/v1/sessions/0f0f/run", `{"size": 8, "colour": {"deep": [1, [2, {}]]}, "pace": null}`, call{"run", id, &RunRequest{Size: 8}}},
		{"POST", "/v1/sessions", strings.Replace(openBody(t), "{", `{"colour": "blue", `, 1), call{"open", openRequest().ID, openRequest()}},
	} {
		t.Run(tt.want.Method, func(t *testing.T) {
			f := &fakeService{}
			w := do(server(f), tt.method, tt.target, tt.body)
			if w.Code != http.StatusOK || replyError(t, w) != nil {
				t.Errorf("%d %s", w.Code, w.Body)
			}
			if diff := cmp.Diff([]call{tt.want}, f.seen(), cmp.Comparer(func(a, b GID) bool { return a == b })); diff != "" {
				t.Errorf("calls (-want +got):\n%s", diff)
			}
		})
	}
}

func TestBadRequestsStopAtTheServer(t *testing.T) {
	spoiled := func(field, value string) string {
		var m map[string]any
		if err := json.Unmarshal([]byte(openBody(t)), &m); err != nil {
			t.Fatal(err)
		}
		m[field] = json.RawMessage(value)
		b, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	const open, run, finish = "/v1/sessions", "/v1/sessions/0f/run", "/v1/sessions/0f/finish"
	for _, tt := range []struct {
		name, method, target, body string
		status                     int
		reason                     string
	}{
		{"nothing", "POST", open, "", 400, ReasonBadHandshake},
		{"null", "POST", open, "null", 400, ReasonBadHandshake},
		{"an array", "POST", open, "[]", 400, ReasonBadHandshake},
		{"half of it", "POST", open, openBody(t)[:100], 400, ReasonBadHandshake},
		{"two of it", "POST", open, openBody(t) + openBody(t), 400, ReasonBadHandshake},
		{"a form", "POST", open, "size=1&id=2", 400, ReasonBadHandshake},
		{"too deep", "POST", open, strings.Repeat(`{"a":`, 20000), 400, ReasonBadHandshake},
		{"text for a number", "POST", open, spoiled("port", `"1"`), 400, ReasonBadHandshake},
		{"number for text", "POST", open, spoiled("id", "7"), 400, ReasonBadHandshake},
		{"a fraction", "POST", open, spoiled("max_msg", "1.5"), 400, ReasonBadHandshake},
		{"a number beyond 64 bits", "POST", open, spoiled("max_msg", "1e30"), 400, ReasonBadHandshake},
		{"a number beyond a double", "POST", open, spoiled("deadline", "1e999"), 400, ReasonBadHandshake},
		{"NaN", "POST", open, strings.Replace(openBody(t), `"deadline":30`, `"deadline":NaN`, 1), 400, ReasonBadHandshake},
		{"a GID that is no address", "POST", open, spoiled("gids", `[{"addr": "ten", "type": "RoCE v2"}]`), 400, ReasonBadHandshake},
		{"a value out of range", "POST", open, spoiled("service_level", "16"), 400, ReasonBadHandshake},
		{"a newer GID type", "POST", open, spoiled("gids", `[{"addr": "10.9.0.1", "type": "RoCE v3"}]`), 409, ReasonVersionSkew},
		{"a ping without a queue pair", "POST", "/v1/ping", `{"instance": "i", "source": {"device": "mlx5_0", "port": 1}, "lease": 60}`, 400, ReasonBadHandshake},
		{"a ping of nothing", "POST", "/v1/ping", "null", 400, ReasonBadHandshake},
		{"run without a body", "POST", run, "", 400, ReasonBadHandshake},
		{"finish with a negative count", "POST", finish, `{"sent": -1}`, 400, ReasonBadHandshake},
		{"finish with text", "POST", finish, `{"sent": "7"}`, 400, ReasonBadHandshake},
		{"more than is read", "POST", open, strings.Repeat(" ", maxRequest) + openBody(t), 413, ReasonBadHandshake},

		{"the root", "GET", "/", "", 404, ReasonVersionSkew},
		{"another version", "POST", "/v2/sessions", "", 404, ReasonVersionSkew},
		{"another method", "GET", "/v1/sessions", "", 404, ReasonVersionSkew},
		{"a call of a newer version", "POST", "/v1/sessions/0f/pace", "", 404, ReasonVersionSkew},
		{"a path to clean", "POST", "//v1/sessions", openBody(t), 404, ReasonVersionSkew},
		{"a path upwards", "POST", "/v1/x/../sessions", openBody(t), 404, ReasonVersionSkew},
		{"a slash too many", "POST", "/v1/sessions/", openBody(t), 404, ReasonVersionSkew},
		{"no session", "POST", "/v1/sessions//run", `{"size": 8}`, 404, ReasonVersionSkew},
		{"the whole server", "OPTIONS", "*", "", 404, ReasonVersionSkew},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := &fakeService{}
			w := do(server(f), tt.method, tt.target, tt.body)
			e := replyError(t, w)
			if w.Code != tt.status || e == nil || e.Reason != tt.reason || e.Detail == "" {
				t.Errorf("%d %s, want %d with %s and a detail", w.Code, w.Body, tt.status, tt.reason)
			}
			if calls := f.seen(); len(calls) > 0 {
				t.Errorf("reached the service: %+v", calls)
			}
			if w.Body.Len() > 4<<10 {
				t.Errorf("reply of %d bytes", w.Body.Len())
			}
		})
	}
}

func TestServiceErrors(t *testing.T) {
	for _, tt := range []struct {
		name   string
		err    error
		status int
		want   Error
	}{
		{"busy", &Error{Reason: "busy", Detail: "in use", RetryAfter: 0.3}, 409, Error{Reason: "busy", Detail: "in use", RetryAfter: 0.3}},
		{"wrapped", fmt.Errorf("open: %w", &Error{Reason: "peer-no-device", Detail: "none"}), 409, Error{Reason: "peer-no-device", Detail: "none"}},
		{"a fault of ours", errors.New("secret path /etc/x"), 500, Error{Reason: ReasonPeerUnresponsive, Detail: "internal error, see the peer's log"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := do(server(&fakeService{err: tt.err}), "POST", "/v1/sessions", openBody(t))
			if w.Code != tt.status {
				t.Errorf("status %d, want %d", w.Code, tt.status)
			}
			if diff := cmp.Diff(&tt.want, replyError(t, w)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestStrangersLearnNothing(t *testing.T) {
	refuse := func(*http.Request) error { return errors.New("who is that?") }
	for name, guard := range map[string]func(*http.Request) error{"refusing guard": refuse, "no guard": nil} {
		for _, target := range []string{"/v1/sessions", "/v1/sessions/0f/run", "/", "/v2", "*"} {
			t.Run(name+" "+target, func(t *testing.T) {
				f := &fakeService{}
				s := &Server{Service: f, Guard: guard, Log: slog.New(slog.DiscardHandler)}
				w := do(s, "POST", target, openBody(t))
				if e := replyError(t, w); w.Code != http.StatusForbidden || e == nil || e.Reason != ReasonUnauthorized {
					t.Errorf("%d %s", w.Code, w.Body)
				}
				if w.Header().Get("Connection") != "close" {
					t.Error("the connection stays open")
				}
				if calls := f.seen(); len(calls) > 0 {
					t.Errorf("reached the service: %+v", calls)
				}
			})
		}
	}
}

// A stranger's body is not read, whatever its length claims to be.
func TestStrangersBodyIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipes()
		s := server(&fakeService{})
		s.Guard = func(*http.Request) error { return errors.New("who is that?") }
		stop := start(t, s, p)
		c := p.dial()
		replied := make(chan string)
		go func() {
			b, _ := io.ReadAll(c)
			replied <- string(b)
		}()
		fmt.Fprintf(c, "POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", int64(1)<<40)
		sent, chunk := 0, make([]byte, 4096)
		for sent < 64<<20 {
			n, err := c.Write(chunk)
			sent += n
			if err != nil {
				break
			}
		}
		if sent > 1<<20 {
			t.Errorf("%d bytes were read", sent)
		}
		if got := <-replied; !strings.HasPrefix(got, "HTTP/1.1 403 ") {
			t.Errorf("reply %q", got)
		}
		stop()
	})
}

func TestAddressGuard(t *testing.T) {
	guard := AddressGuard(func(addr string) bool { return addr == "10.9.0.1" || addr == "fd00::1" })
	for _, tt := range []struct {
		remote string
		served bool
	}{
		{"127.0.0.1:4000", true},
		{"127.8.8.8:4000", true},
		{"[::1]:4000", true},
		{"[::ffff:127.0.0.1]:4000", true},
		{"10.9.0.1:4000", true},
		{"[::ffff:10.9.0.1]:4000", true},
		{"[fd00::1]:4000", true},
		{"10.9.0.2:4000", false},
		{"[fd00::2]:4000", false},
		{"[fe80::1%eth0]:4000", false},
		{"10.9.0.1", false},
		{"pipe", false},
		{"", false},
	} {
		if err := guard(&http.Request{RemoteAddr: tt.remote}); (err == nil) != tt.served {
			t.Errorf("%q: %v, want it served: %t", tt.remote, err, tt.served)
		}
	}
}

// Whatever arrives on the port, the next peer is served.
func TestForeignBytesOnThePort(t *testing.T) {
	f := &fakeService{}
	l := listen(t)
	start(t, server(f), l)
	for _, tt := range []struct{ name, send, want string }{
		{"HTTP/1.0", "DELETE /v1/sessions/0f HTTP/1.0\r\n\r\n", "HTTP/1.0 200 "},
		{"HTTP/1.1 without a host", "DELETE /v1/sessions/0f HTTP/1.1\r\n\r\n", "HTTP/1.1 400 "},
		{"HTTP/2 preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/1.1 "},
		{"huge header", "GET / HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("a", 1<<16), "HTTP/1.1 431 "},
		{"many headers", "GET / HTTP/1.1\r\nHost: x\r\n" + strings.Repeat("X: a\r\n", 1<<14), "HTTP/1.1 431 "},
		{"huge request line", "GET /" + strings.Repeat("a", 1<<16), "HTTP/1.1 431 "},
		{"garbage", "\x00\xff\x1b\x07 what\r\n\r\n", "HTTP/1.1 400 "},
		{"TLS hello", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "HTTP/1.1 400 "},
		{"SSH banner", "SSH-2.0-OpenSSH_9.2\r\n\r\n", "HTTP/1.1 400 "},
		{"two lengths", "POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", "HTTP/1.1 400 "},
		{"negative length", "POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", "HTTP/1.1 400 "},
		{"endless chunks", "POST /v1/sessions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + strings.Repeat("1000\r\n"+strings.Repeat(" ", 0x1000)+"\r\n", 80), "HTTP/1.1 413 "},
		{"bad chunk", "POST /v1/sessions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "HTTP/1.1 400 "},
		{"options", "OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "HTTP/1.1 404 "},
		{"proxy request", "GET http://example.org/ HTTP/1.1\r\nHost: example.org\r\nConnection: close\r\n\r\n", "HTTP/1.1 404 "},
		{"tunnel", "CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\nConnection: close\r\n\r\n", "HTTP/1.1 404 "},
		{"nothing at all", "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			go func() {
				_, _ = io.WriteString(c, tt.send) // fails if the server has had enough
				_ = c.(*net.TCPConn).CloseWrite()
			}()
			line, err := bufio.NewReader(c).ReadString('\n')
			if !strings.HasPrefix(line, tt.want) {
				t.Errorf("reply %q (%v), want %q", line, err, tt.want)
			}
		})
	}
	c := NewClient()
	defer c.CloseIdle()
	if _, _, err := c.Open(t.Context(), l.Addr().String(), openRequest()); err != nil {
		t.Errorf("a peer afterwards: %s", err)
	}
}

// Slow senders, silent ones and readers that do not read are let go, each after its own time.
func TestSlowClientsAreLetGo(t *testing.T) {
	const head = "POST /v1/sessions/0f/run HTTP/1.1\r\nHost: x\r\n"
	for _, tt := range []struct {
		name  string
		send  func(c net.Conn)
		reads bool
		limit time.Duration
		calls int
	}{
		{"says nothing", func(net.Conn) {}, true, readTimeout, 0},
		{"half a header", func(c net.Conn) { fmt.Fprint(c, head) }, true, readTimeout, 0},
		{"header byte by byte", func(c net.Conn) { trickle(c, head+"X: "+strings.Repeat("a", 100)) }, true, readTimeout, 0},
		{"no body", func(c net.Conn) { fmt.Fprint(c, head+"Content-Length: 10\r\n\r\n") }, true, readTimeout, 0},
		{"body byte by byte", func(c net.Conn) { trickle(c, head+"Content-Length: 1000\r\n\r\n"+strings.Repeat(" ", 999)) }, true, readTimeout, 0},
		{"idle after a call", func(c net.Conn) { fmt.Fprint(c, head+"Content-Length: 10\r\n\r\n{\"size\":8}") }, true, idleTimeout, 1},
		{"does not read its reply", func(c net.Conn) { fmt.Fprint(c, head+"Content-Length: 10\r\n\r\n{\"size\":8}") }, false, writeTimeout, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, p := &fakeService{}, newPipes()
				stop := start(t, server(f), p)
				began := time.Now()
				closed := make(chan struct{})
				c := &watched{Conn: p.dial(), closed: closed, read: tt.reads}
				go c.watch()
				tt.send(c)
				<-closed
				noLater(t, began, tt.limit+time.Second) // and a little for lingering over unread bytes
				if took := time.Since(began); took < tt.limit-time.Second {
					t.Errorf("let go after %s already, want %s", took, tt.limit)
				}
				if got := len(f.seen()); got != tt.calls {
					t.Errorf("%d calls reached the service, want %d", got, tt.calls)
				}
				c.Close()
				stop()
			})
		})
	}
}

// trickle writes one byte every tenth of a second.
func trickle(c net.Conn, text string) {
	for i := range len(text) {
		if _, err := c.Write([]byte{text[i]}); err != nil {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// watched is a client's end that notices when the server closes the connection.
type watched struct {
	net.Conn
	closed chan struct{}
	read   bool
}

func (w *watched) watch() {
	defer close(w.closed)
	if w.read {
		_, _ = io.Copy(io.Discard, w.Conn)
		return
	}
	// Without reading, only a write tells.
	for {
		time.Sleep(100 * time.Millisecond)
		if _, err := w.Conn.Write([]byte("x")); err != nil {
			return
		}
	}
}

// More connections than the server takes wait, until the silent ones among them are let go.
func TestConnectionsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipes()
		stop := start(t, server(&fakeService{}), p)
		var idle []net.Conn
		for range maxConns + 100 {
			idle = append(idle, p.dial())
		}
		synctest.Wait()
		if waiting := len(p.queue); waiting < 99 { // one may be accepted and wait for its turn
			t.Errorf("%d of %d connections were taken, want at most %d", len(idle)-waiting, len(idle), maxConns)
		}
		c := p.client()
		var err error
		for range 4 { // the first tries wait behind the silent ones
			if _, _, err = c.Open(t.Context(), "peer:1", openRequest()); err == nil {
				break
			}
		}
		if err != nil {
			t.Errorf("a peer after %d silent connections: %s", len(idle), err)
		}
		c.CloseIdle()
		for _, conn := range idle {
			conn.Close()
		}
		stop()
	})
}

func TestShutdown(t *testing.T) {
	for _, tt := range []struct {
		name     string
		call     time.Duration // that the service takes
		finishes bool
		within   time.Duration
	}{
		{"waits for a call under way", 900 * time.Millisecond, true, time.Second},
		{"does not wait for ever", time.Hour, false, time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				under := make(chan struct{})
				f := &fakeService{hold: func(ctx context.Context) {
					close(under)
					select {
					case <-time.After(tt.call):
					case <-ctx.Done(): // the connection is gone
					}
				}}
				p := newPipes()
				stop := start(t, server(f), p)
				c := p.client()
				replied := make(chan error)
				go func() { _, err := (&Session{c: c, addr: "peer:1", id: "0f"}).Mark(t.Context()); replied <- err }()
				<-under
				began := time.Now()
				stopped := make(chan struct{})
				go func() {
					defer close(stopped)
					stop()
				}()
				if err := <-replied; (err == nil) != tt.finishes {
					t.Errorf("the call ended with %v", err)
				}
				<-stopped
				noLater(t, began, tt.within+100*time.Millisecond) // Shutdown polls
				c.CloseIdle()
			})
		})
	}
}

// A daemon that is told to stop before it serves just stops.
func TestShutdownBeforeStart(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := server(&fakeService{}).Serve(ctx, listen(t)); err != nil {
		t.Error(err)
	}
}

func TestListenerThatFails(t *testing.T) {
	l := listen(t)
	l.Close()
	err := server(&fakeService{}).Serve(t.Context(), l)
	if err == nil || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("error %v, want one that names %s", err, l.Addr())
	}
}

// The log must not grow by what strangers send, beyond debug level.
func TestStrangersDoNotFillTheLog(t *testing.T) {
	var log bytes.Buffer
	s := server(&fakeService{})
	s.Log = slog.New(slog.NewTextHandler(&log, nil))
	s.Guard = func(*http.Request) error { return errors.New("who is that?") }
	do(s, "POST", "/v1/sessions", "")
	s.Guard = anyone
	do(s, "POST", "/v1/sessions", "garbage")
	do(s, "GET", "/", "")
	if log.Len() > 0 {
		t.Errorf("logged: %s", &log)
	}
}
