package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path"
	"time"

	"golang.org/x/net/netutil"
)

// Bounds of the server. A request of the largest session (1024 QPs) is about 40 KiB.
const (
	maxRequest  = 256 << 10
	maxReply    = 1 << 20
	maxHeader   = 8 << 10
	maxConns    = 1024
	readTimeout = 5 * time.Second
	// The longest call, Finish, waits a few seconds for what was sent to arrive. A client that does not read its reply
	// must not hold a connection for ever.
	writeTimeout = 15 * time.Second
	idleTimeout  = 90 * time.Second
)

// Service is the responder behind a Server. Its errors are *Error where the initiator may learn the reason.
type Service interface {
	Hello(ctx context.Context) (*Hello, error)
	Ping(ctx context.Context, r *PingRequest) (*PingReply, error)
	Open(ctx context.Context, r *OpenRequest) (*OpenReply, error)
	Run(ctx context.Context, id string, r *RunRequest) error
	Mark(ctx context.Context, id string) (*MarkReply, error)
	Finish(ctx context.Context, id string, r *FinishRequest) (*FinishReply, error)
	Renew(ctx context.Context, id string) error
	Close(ctx context.Context, id string) error
}

// Server serves the control channel of one daemon.
type Server struct {
	Service Service
	Sweeper Sweeper // nil: this daemon runs no sweeps for others
	// Guard decides who is served; nil serves nobody. It sees the request before anything of it is read. With TLS it is the
	// place to look at the client's certificate.
	Guard func(r *http.Request) error
	Log   *slog.Logger
}

// Serve accepts connections on l until ctx ends, then lets calls under way finish for up to a second.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	h := &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: readTimeout, ReadTimeout: readTimeout, WriteTimeout: writeTimeout, IdleTimeout: idleTimeout,
		MaxHeaderBytes: maxHeader, DisableGeneralOptionsHandler: true, // OPTIONS * passes the guard as well
		ErrorLog: slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
	}
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(done)
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if h.Shutdown(grace) != nil {
			h.Close()
		}
	})
	err := h.Serve(netutil.LimitListener(l, maxConns))
	if !stop() {
		<-done
		return nil
	}
	h.Close()
	return fmt.Errorf("serve control channel on %s: %w", l.Addr(), err)
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/hello", s.call(func(ctx context.Context, _ string, _ []byte) (any, error) {
		return s.Service.Hello(ctx)
	}))
	mux.HandleFunc("POST "+pings, s.call(s.servePing))
	mux.HandleFunc("POST /v1/sessions", s.call(func(ctx context.Context, _ string, body []byte) (any, error) {
		var r OpenRequest
		if err := decode(body, &r); err != nil {
			return nil, err
		}
		if err := r.Validate(); err != nil {
			return nil, bad(err)
		}
		return s.Service.Open(ctx, &r)
	}))
	mux.HandleFunc("POST /v1/sessions/{id}/run", s.call(func(ctx context.Context, id string, body []byte) (any, error) {
		var r RunRequest
		if err := decode(body, &r); err != nil {
			return nil, err
		}
		if err := r.Validate(); err != nil {
			return nil, bad(err)
		}
		return nil, s.Service.Run(ctx, id, &r)
	}))
	mux.HandleFunc("POST /v1/sessions/{id}/mark", s.call(func(ctx context.Context, id string, _ []byte) (any, error) {
		return s.Service.Mark(ctx, id)
	}))
	mux.HandleFunc("POST /v1/sessions/{id}/finish", s.call(func(ctx context.Context, id string, body []byte) (any, error) {
		var r FinishRequest
		if err := decode(body, &r); err != nil {
			return nil, err
		}
		if err := r.Validate(); err != nil {
			return nil, bad(err)
		}
		return s.Service.Finish(ctx, id, &r)
	}))
	mux.HandleFunc("POST /v1/sessions/{id}/renew", s.call(func(ctx context.Context, id string, _ []byte) (any, error) {
		return nil, s.Service.Renew(ctx, id)
	}))
	mux.HandleFunc("DELETE /v1/sessions/{id}", s.call(func(ctx context.Context, id string, _ []byte) (any, error) {
		return nil, s.Service.Close(ctx, id)
	}))
	if s.Sweeper != nil {
		mux.HandleFunc("POST /v1/sweeps", s.call(func(ctx context.Context, _ string, body []byte) (any, error) {
			var r SweepRequest
			if err := decode(body, &r); err != nil {
				return nil, err
			}
			if err := r.Validate(); err != nil {
				return nil, bad(err)
			}
			return nil, s.Sweeper.Sweep(ctx, &r)
		}))
		mux.HandleFunc("GET /v1/rows", func(w http.ResponseWriter, r *http.Request) {
			s.call(func(ctx context.Context, _ string, _ []byte) (any, error) {
				return s.Sweeper.Rows(ctx, printable(r.URL.Query().Get("of"), MaxName))
			})(w, r)
		})
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := errors.New("no guard is set")
		if s.Guard != nil {
			err = s.Guard(r)
		}
		if err != nil {
			s.Log.Debug("refused a stranger on the control channel", slog.String("remote", r.RemoteAddr), slog.Any("err", err))
			w.Header().Set("Connection", "close")
			reply(w, http.StatusForbidden, errorReply{&Error{Reason: ReasonUnauthorized, Detail: "this node is not served here"}})
			return
		}
		// The mux would answer in HTML what it does not know, and redirect paths that are not clean.
		if _, pattern := mux.Handler(r); pattern == "" || path.Clean(r.URL.Path) != r.URL.Path {
			reply(w, http.StatusNotFound, errorReply{&Error{
				Reason: ReasonVersionSkew, Detail: fmt.Sprintf("no such call here: this daemon speaks /v1 up to minor version %d", Minor),
			}})
			return
		}
		mux.ServeHTTP(w, r)
	})
}

type errorReply struct {
	Error *Error `json:"error"`
}

// decode reads a request; fields that it does not know are ignored.
func decode(body []byte, into any) error {
	if err := json.Unmarshal(body, into); err != nil {
		return bad(err)
	}
	return nil
}

// bad is a request that can't be.
func bad(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return &Error{Reason: ReasonBadHandshake, Detail: err.Error()}
}

// call turns one method into a handler: bounded body in, JSON or an error out.
func (s *Server) call(f func(ctx context.Context, id string, body []byte) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
		if err != nil {
			status := http.StatusBadRequest
			if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
				status = http.StatusRequestEntityTooLarge
			}
			w.Header().Set("Connection", "close")
			reply(w, status, errorReply{bad(err)})
			return
		}
		out, err := f(r.Context(), r.PathValue("id"), body)
		if err != nil {
			var e *Error
			if !errors.As(err, &e) {
				s.Log.Error("control call failed", slog.String("path", r.URL.Path), slog.Any("err", err))
				reply(w, http.StatusInternalServerError, errorReply{&Error{Reason: ReasonPeerUnresponsive, Detail: "internal error, see the peer's log"}})
				return
			}
			status := http.StatusConflict
			if e.Reason == ReasonBadHandshake {
				status = http.StatusBadRequest
			}
			reply(w, status, errorReply{e})
			return
		}
		if out == nil {
			out = struct{}{}
		}
		reply(w, http.StatusOK, out)
	}
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the peer is gone: it will see that by itself
}

// AddressGuard is the guard without TLS: it serves loopback, and the addresses that allowed says are configured peers'.
func AddressGuard(allowed func(addr string) bool) func(r *http.Request) error {
	return func(r *http.Request) error {
		from, err := netip.ParseAddrPort(r.RemoteAddr)
		if err != nil {
			return err
		}
		if a := from.Addr().Unmap(); a.IsLoopback() || allowed(a.String()) {
			return nil
		}
		return fmt.Errorf("%s is neither loopback nor a configured peer", from.Addr())
	}
}
