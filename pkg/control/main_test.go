package control

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeService answers every call and keeps what it was called with. hold, if set, runs within each call.
type fakeService struct {
	hold func(ctx context.Context)
	err  error

	mu    sync.Mutex
	calls []call
}

type call struct {
	Method, ID string
	Request    any
}

func (f *fakeService) called(ctx context.Context, method, id string, req any) error {
	f.mu.Lock()
	f.calls = append(f.calls, call{method, id, req})
	f.mu.Unlock()
	if f.hold != nil {
		f.hold(ctx)
	}
	return f.err
}

func (f *fakeService) seen() []call {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]call{}, f.calls...)
}

func (f *fakeService) Hello(context.Context) (*Hello, error) {
	return &Hello{Minor: Minor, Instance: "fake", Node: "fake"}, f.err
}

func (f *fakeService) Ping(ctx context.Context, r *PingRequest) (*PingReply, error) {
	if err := f.called(ctx, "ping", "", r); err != nil {
		return nil, err
	}
	return pingReply(), nil
}

func (f *fakeService) Open(ctx context.Context, r *OpenRequest) (*OpenReply, error) {
	if err := f.called(ctx, "open", r.ID, r); err != nil {
		return nil, err
	}
	rep := openReply(openRequest())
	rep.Endpoint = endpoint(len(r.Endpoint.QPs))
	rep.Endpoint.Stride = max(rep.Endpoint.Stride, uint64(r.MaxMsg))
	rep.GID, rep.InitiatorGID = nil, nil
	if len(r.GIDs) > 0 {
		g := gid("10.9.0.2")
		rep.GID, rep.InitiatorGID = &g, &r.GIDs[0]
	}
	return rep, nil
}

func (f *fakeService) Run(ctx context.Context, id string, r *RunRequest) error {
	return f.called(ctx, "run", id, r)
}

func (f *fakeService) Mark(ctx context.Context, id string) (*MarkReply, error) {
	return &MarkReply{Clock: 1}, f.called(ctx, "mark", id, nil)
}

func (f *fakeService) Finish(ctx context.Context, id string, r *FinishRequest) (*FinishReply, error) {
	if err := f.called(ctx, "finish", id, r); err != nil {
		return nil, err
	}
	seen, rate := r.Sent, 1e6
	return &FinishReply{Received: &seen, Rate: &rate, Evidence: &Evidence{
		Device: "mlx5_0", Port: 1, Counters: map[string]uint64{"out_of_sequence": 2}, Classes: map[string]uint64{"sequence": 2},
		Moved: map[string][]string{"sequence": {"out_of_sequence"}}, Unknown: []string{},
		Traffic: map[string]uint64{"tx_bytes": 9}, CannotTell: []string{"pause"}, Conditions: []Condition{{Taint: "pcie-degraded", Check: "width", Detail: "x8 of x16"}},
	}}, nil
}

func (f *fakeService) Renew(ctx context.Context, id string) error {
	return f.called(ctx, "renew", id, nil)
}

func (f *fakeService) Close(ctx context.Context, id string) error {
	return f.called(ctx, "close", id, nil)
}

func anyone(*http.Request) error { return nil }

func server(f *fakeService) *Server {
	return &Server{Service: f, Guard: anyone, Log: slog.New(slog.DiscardHandler)}
}

// start serves on l until the test ends.
func start(t *testing.T, s *Server, l net.Listener) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, l) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("serve: %s", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// pipes is a network of net.Pipe connections, for tests under a fake clock. Dialed but not accepted connections wait, as in
// a listen queue.
type pipes struct {
	queue  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newPipes() *pipes { return &pipes{queue: make(chan net.Conn, 4096), closed: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.queue:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.closed) })
	for {
		select {
		case c := <-p.queue:
			c.Close()
		default:
			return nil
		}
	}
}

func (p *pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(10, 9, 0, 2), Port: 18516} }

func (p *pipes) dial() net.Conn {
	here, there := net.Pipe()
	p.queue <- there
	return here
}

// client returns a client that can reach nothing but p.
func (p *pipes) client() *Client {
	c := NewClient()
	c.tr.DialContext = func(context.Context, string, string) (net.Conn, error) { return p.dial(), nil }
	return c
}

// reason returns the *Error that err must be.
func reason(t *testing.T, err error) *Error {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("error is %v (%T), want an *Error", err, err)
	}
	return e
}

// noLater fails the test if the (fake) clock has passed start + d.
func noLater(t *testing.T, start time.Time, d time.Duration) {
	t.Helper()
	if took := time.Since(start); took > d {
		t.Errorf("took %s, want at most %s", took, d)
	}
}
