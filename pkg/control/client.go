package control

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"syscall"
	"time"
)

// Client calls responders. The zero value is not usable; see NewClient. It keeps idle connections, so that a probe costs
// round trips and no handshakes.
type Client struct {
	http *http.Client
	tr   *http.Transport
}

// Default bounds of one call: for the TCP connection, and for the whole of it.
const (
	DialTimeout = 3 * time.Second
	CallTimeout = 5 * time.Second
)

// NewClient returns a client whose connections come from whatever address the kernel chooses.
func NewClient() *Client { return NewClientFrom(nil) }

// NewClientFrom returns a client that calls from one address of this host, so that peers see the one they know it by.
func NewClientFrom(ip net.IP) *Client {
	d := &net.Dialer{Timeout: DialTimeout, KeepAlive: 15 * time.Second}
	if ip != nil {
		d.LocalAddr = &net.TCPAddr{IP: ip}
	}
	tr := &http.Transport{
		DialContext: d.DialContext, MaxIdleConnsPerHost: 4, MaxIdleConns: 256, IdleConnTimeout: idleTimeout - 30*time.Second,
		MaxResponseHeaderBytes: maxHeader, DisableCompression: true,
	}
	return &Client{tr: tr, http: &http.Client{
		Transport:     tr,
		CheckRedirect: func(*http.Request, []*http.Request) error { return errors.New("a redirect, which no responder sends") },
	}}
}

// CloseIdle closes the connections that no call uses.
func (c *Client) CloseIdle() { c.tr.CloseIdleConnections() }

// Session is an open session as its initiator sees it.
type Session struct {
	c    *Client
	addr string
	id   string

	limit   int           // bytes of a reply; 0: maxReply
	timeout time.Duration // of a call; 0: CallTimeout
}

// Hello finds out whether a responder is at addr (host:port), and which: cheap, and before anything is taken for it. Its
// error is always an *Error.
func (c *Client) Hello(ctx context.Context, addr string) (*Hello, error) {
	s := &Session{c: c, addr: addr}
	var h Hello
	if err := s.call(ctx, http.MethodGet, "/v1/hello", nil, &h, true); err != nil {
		return nil, err
	}
	if err := h.Validate(); err != nil {
		return nil, s.invalid(err)
	}
	return &h, nil
}

// Open opens a session at addr (host:port). Its error is always an *Error.
func (c *Client) Open(ctx context.Context, addr string, req *OpenRequest) (*Session, *OpenReply, error) {
	s := &Session{c: c, addr: addr, id: req.ID}
	var rep OpenReply
	if err := s.call(ctx, http.MethodPost, sessions, req, &rep, true); err != nil {
		return nil, nil, err
	}
	if err := rep.Validate(req); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = s.Close(ctx) // it holds something for us that we won't use; else its lease ends that
		return nil, nil, s.invalid(err)
	}
	return s, &rep, nil
}

// invalid is an answer that can't be.
func (s *Session) invalid(err error) *Error {
	e := &Error{Reason: ReasonBadHandshake, Scope: "peer", Detail: fmt.Sprintf("%s answered with %s", s.addr, err)}
	var skew *Error
	if errors.As(err, &skew) {
		e.Reason, e.Detail = skew.Reason, fmt.Sprintf("%s answered with %s", s.addr, skew.Detail)
	}
	return e
}

// Run readies the responder for one message size.
func (s *Session) Run(ctx context.Context, r RunRequest) error {
	return s.call(ctx, http.MethodPost, s.path("/run"), r, nil, false)
}

// Mark is the barrier before the timed part.
func (s *Session) Mark(ctx context.Context) (*MarkReply, error) {
	var rep MarkReply
	if err := s.call(ctx, http.MethodPost, s.path("/mark"), nil, &rep, false); err != nil {
		return nil, err
	}
	if err := rep.Validate(); err != nil {
		return nil, s.invalid(err)
	}
	return &rep, nil
}

// Finish is the barrier after the timed part.
func (s *Session) Finish(ctx context.Context, r FinishRequest) (*FinishReply, error) {
	var rep FinishReply
	if err := s.call(ctx, http.MethodPost, s.path("/finish"), r, &rep, false); err != nil {
		return nil, err
	}
	if err := rep.Validate(); err != nil {
		return nil, s.invalid(err)
	}
	return &rep, nil
}

// Renew keeps the lease.
func (s *Session) Renew(ctx context.Context) error {
	return s.call(ctx, http.MethodPost, s.path("/renew"), nil, nil, false)
}

// Close frees the responder's side.
func (s *Session) Close(ctx context.Context) error {
	return s.call(ctx, http.MethodDelete, s.path(""), nil, nil, false)
}

const sessions = "/v1/sessions"

func (s *Session) path(call string) string { return sessions + "/" + s.id + call }

// call makes one round trip. opening tells whether the peer is known to be there: until then silence is a failed handshake,
// later it is a peer that stopped answering.
func (s *Session) call(ctx context.Context, method, path string, in, out any, opening bool) error {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(s.timeout, CallTimeout))
	defer cancel()
	limit := cmp.Or(s.limit, maxReply)
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return &Error{Reason: ReasonBadHandshake, Scope: "local", Detail: err.Error()}
		}
	}
	_, _, err := net.SplitHostPort(s.addr)
	var req *http.Request
	if err == nil {
		req, err = http.NewRequestWithContext(ctx, method, "http://"+s.addr+path, bytes.NewReader(body))
	}
	if err != nil {
		return &Error{Reason: ReasonDNS, Scope: "local", Detail: fmt.Sprintf("peer address %q: %s", s.addr, unwrapURL(err))}
	}
	// Lets the transport repeat the call on a new connection if the peer had closed the idle one, as after its restart.
	req.Header.Set("Idempotency-Key", s.id+path)
	req.Header.Set("Content-Type", "application/json")
	resp, err := s.c.http.Do(req)
	if err != nil {
		return s.classify(ctx, err, opening)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, int64(limit)+1))
	if err != nil {
		return s.classify(ctx, err, opening)
	}
	if len(data) > limit {
		return &Error{Reason: ReasonBadHandshake, Scope: "peer", Detail: fmt.Sprintf("%s answered with more than %d bytes", s.addr, limit)}
	}
	if resp.StatusCode != http.StatusOK {
		var e errorReply
		switch {
		case json.Unmarshal(data, &e) == nil && e.Error != nil && e.Error.Reason != "":
			e.Error.heard()
			return e.Error
		case resp.StatusCode == http.StatusNotFound:
			return &Error{Reason: ReasonVersionSkew, Scope: "peer", Detail: fmt.Sprintf("%s does not know /v1: it speaks another version, or is no rdmabenchd", s.addr)}
		}
		return &Error{Reason: ReasonBadHandshake, Scope: "peer", Detail: fmt.Sprintf("%s answered %s: is that port rdmabenchd's?", s.addr, resp.Status)}
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(data, out); err != nil {
		return &Error{Reason: ReasonBadHandshake, Scope: "peer", Detail: fmt.Sprintf("%s answered with something else than a reply: %s", s.addr, err)}
	}
	return nil
}

// classify finds the reason behind a call that got no answer.
func (s *Session) classify(ctx context.Context, err error, opening bool) error {
	e := &Error{Detail: fmt.Sprintf("control channel to %s: %s", s.addr, unwrapURL(err))}
	var dns *net.DNSError
	var addr *net.AddrError
	var op *net.OpError
	dialing := errors.As(err, &op) && op.Op == "dial"
	timeout := errors.Is(err, context.DeadlineExceeded) || (op != nil && op.Timeout()) || ctx.Err() != nil
	e.Silent = timeout
	switch {
	case errors.As(err, &dns) || errors.As(err, &addr):
		e.Reason, e.Scope = ReasonDNS, "local"
	case errors.Is(err, syscall.ECONNREFUSED):
		e.Reason, e.Scope = ReasonRefused, "peer"
	case dialing && (timeout || errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH)):
		e.Reason, e.Scope = ReasonUnreachable, "path"
	case dialing && (errors.Is(err, syscall.EADDRNOTAVAIL) || errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.EMFILE)):
		e.Reason, e.Scope = ReasonUnreachable, "local"
	case dialing:
		e.Reason, e.Scope = ReasonUnreachable, "path"
	case !opening:
		e.Reason, e.Scope = ReasonPeerUnresponsive, "peer"
	case timeout:
		e.Reason, e.Scope = ReasonHandshakeTimeout, "peer"
	default:
		e.Reason, e.Scope = ReasonBadHandshake, "peer"
	}
	return e
}

// unwrapURL drops the method and URL that net/http puts in front.
func unwrapURL(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		return u.Err
	}
	return err
}
