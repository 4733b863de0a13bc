package control

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// checkingService fails the test if anything reaches it that a verb must not see.
type checkingService struct {
	fakeService
	t *testing.T
}

func (c *checkingService) Open(ctx context.Context, r *OpenRequest) (*OpenReply, error) {
	if err := r.Validate(); err != nil {
		c.t.Errorf("reached the service: %s", err)
	}
	return c.fakeService.Open(ctx, r)
}

// Whatever a client sends, the answer is JSON of bounded size with a status that clients know, and nothing out of range gets
// through.
func FuzzServer(f *testing.F) {
	open, err := json.Marshal(openRequest())
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range []struct{ method, target, body string }{
		{"POST", "/v1/sessions", string(open)},
		{"POST", "/v1/sessions", `{"id":"` + strings.Repeat("0f", 16) + `","deadline":1e-320,"lease":1e308,"gids":[{"addr":"fe80::1%25eth0"}]}`},
		{"POST", "/v1/sessions", `{"endpoint":{"addr":"18446744073709551615","stride":"9223372036854775808","qps":[{"qpn":16777216}]}}`},
		{"POST", "/v1/sessions/0f/run", `{"size":4096}`},
		{"POST", "/v1/sessions/0f/mark", ""},
		{"POST", "/v1/sessions/0f/finish", `{"sent":18446744073709551615,"failed":true}`},
		{"POST", "/v1/sessions/0f/renew", "null"},
		{"DELETE", "/v1/sessions/0f", ""},
		{"OPTIONS", "*", ""},
		{"CONNECT", "example.org:443", ""},
		{"GET", "http://example.org/../%2e%2e//x?y#z", ""},
	} {
		f.Add(seed.method, seed.target, seed.body)
	}
	statuses := []int{200, 400, 404, 413}
	f.Fuzz(func(t *testing.T, method, target, body string) {
		raw := method + " " + target + " HTTP/1.1\r\nHost: x\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body
		r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(raw)))
		if err != nil {
			return // net/http answers that itself
		}
		s := &Server{Service: &checkingService{t: t}, Guard: anyone, Log: slog.New(slog.DiscardHandler)}
		w := httptest.NewRecorder()
		s.handler().ServeHTTP(w, r)
		var rep errorReply
		if err := json.Unmarshal(w.Body.Bytes(), &rep); err != nil || w.Body.Len() > 256<<10 {
			t.Errorf("%d bytes of reply, no JSON or too many: %v", w.Body.Len(), err)
		}
		skew := w.Code == http.StatusConflict && rep.Error != nil && rep.Error.Reason == ReasonVersionSkew
		if !slices.Contains(statuses, w.Code) && !skew {
			t.Errorf("status %d: %s", w.Code, w.Body)
		}
		if (w.Code == 200) != (rep.Error == nil) {
			t.Errorf("status %d with error %v", w.Code, rep.Error)
		}
	})
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Whatever a peer answers, a call ends in a reply within every range or in one error out of a known list; both can be shown
// and put into JSON.
func FuzzClientReply(f *testing.F) {
	good, err := json.Marshal(openReply(openRequest()))
	if err != nil {
		f.Fatal(err)
	}
	finish, _ := (&fakeService{}).Finish(f.Context(), "", &FinishRequest{Sent: 7})
	fin, err := json.Marshal(finish)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(200, good)
	f.Add(200, fin)
	f.Add(200, []byte(`{"evidence":{"port":1,"counters":null,"moved":{"a":null}},"error":{"reason":"\u001b","retry_after":-1e308}}`))
	f.Add(200, []byte(`{"rate":1e308,"min_rate":-0,"cpu_seconds":1e-320}`))
	f.Add(409, []byte(`{"error":{"reason":"busy","detail":"in use","retry_after":0.3}}`))
	f.Add(409, []byte(`{"error":{"reason":"no such word"}}`))
	f.Add(404, []byte(html))
	f.Add(500, []byte(nil))
	own := []string{ReasonBadHandshake, ReasonVersionSkew}
	f.Fuzz(func(t *testing.T, status int, body []byte) {
		c := &Client{http: &http.Client{Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
			if r.Method == http.MethodDelete { // the client lets go of a session it can't use
				return nil, errors.New("gone")
			}
			return &http.Response{
				StatusCode: status, Status: strconv.Itoa(status), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{},
				Body: io.NopCloser(strings.NewReader(string(body))), Request: r,
			}, nil
		})}}
		check := func(v any, err error) {
			if err == nil {
				if _, err := json.Marshal(v); err != nil {
					t.Errorf("reply can't be shown: %s", err)
				}
				return
			}
			e := reason(t, err)
			if !e.FromPeer && !slices.Contains(own, e.Reason) {
				t.Errorf("reason %q", e.Reason)
			}
			if printable(e.Reason, MaxName) != e.Reason || len(e.Detail) > 4<<10 || e.RetryAfter < 0 {
				t.Errorf("not fit to be shown: %q", err)
			}
		}
		req := openRequest()
		_, rep, err := c.Open(t.Context(), "peer:1", req)
		check(rep, err)
		if err == nil && rep.Validate(req) != nil {
			t.Errorf("out of range: %s", rep.Validate(req))
		}
		fin, err := (&Session{c: c, addr: "peer:1", id: "0f"}).Finish(t.Context(), FinishRequest{})
		check(fin, err)
		if err == nil && fin.Evidence != nil && (fin.Evidence.Counters == nil || fin.Evidence.Classes == nil || fin.Evidence.Moved == nil || fin.Evidence.Unknown == nil ||
			fin.Evidence.Traffic == nil || fin.Evidence.CannotTell == nil || fin.Evidence.Conditions == nil || len(fin.Evidence.Conditions) > maxConditions) {
			t.Error("evidence with a nil map or list")
		}
	})
}
