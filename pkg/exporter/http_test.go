package exporter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

func get(e *Exporter, path string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	e.Handler(HandlerOptions{}).ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w
}

func TestRoutes(t *testing.T) {
	e := newExporter(t, Options{})
	reloaded := 0
	var reloadErr error
	reload := func(context.Context) error { reloaded++; return reloadErr }
	for _, tt := range []struct {
		name, method, path string
		header             string // of the request, Name: value
		ready              bool
		reloadErr          error
		options            HandlerOptions
		status             int
		body               string // is in it
	}{
		{name: "metrics", method: "GET", path: "/metrics", status: 200, body: "rdmabench_build_info"},
		{name: "openmetrics", method: "GET", path: "/metrics", header: "Accept: application/openmetrics-text; version=1.0.0", status: 200, body: "# EOF"},
		{name: "metrics POST", method: "POST", path: "/metrics", status: 405},
		{name: "healthy", method: "GET", path: "/-/healthy", status: 200, body: "healthy"},
		{name: "healthy HEAD", method: "HEAD", path: "/-/healthy", status: 200},
		{name: "not ready", method: "GET", path: "/-/ready", status: 503, body: "not ready"},
		{name: "ready", method: "GET", path: "/-/ready", ready: true, status: 200, body: "is ready"},
		{name: "status page", method: "GET", path: "/", status: 200, body: "<h1>n1</h1>"},
		{name: "nothing there", method: "GET", path: "/nothing", status: 404},
		{name: "no pprof", method: "GET", path: "/debug/pprof/", status: 404},
		{name: "pprof", method: "GET", path: "/debug/pprof/", options: HandlerOptions{Pprof: true}, status: 200, body: "goroutine"},
		{name: "reload off", method: "POST", path: "/-/reload", status: 403, body: "Lifecycle API is not enabled."},
		{name: "reload GET", method: "GET", path: "/-/reload", options: HandlerOptions{Reload: reload}, status: 405},
		{name: "reload", method: "POST", path: "/-/reload", options: HandlerOptions{Reload: reload}, status: 200},
		{name: "reload PUT", method: "PUT", path: "/-/reload", options: HandlerOptions{Reload: reload}, status: 200},
		{name: "bad reload", method: "POST", path: "/-/reload", options: HandlerOptions{Reload: reload}, reloadErr: errors.New("x.yml:3:1: no"), status: 500, body: "x.yml:3:1: no"},
		{name: "reload from another site", method: "POST", path: "/-/reload", header: "Sec-Fetch-Site: cross-site", options: HandlerOptions{Reload: reload}, status: 403},
		{name: "results", method: "GET", path: "/api/v1/results", status: 200, body: `"results":[]`},
		{name: "results, bad number", method: "GET", path: "/api/v1/results?recent=-1", status: 400, body: `"error"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := reloaded
			reloadErr = tt.reloadErr
			e.SetReady(tt.ready)
			r := httptest.NewRequest(tt.method, tt.path, nil)
			if k, v, ok := strings.Cut(tt.header, ": "); ok {
				r.Header.Set(k, v)
			}
			w := httptest.NewRecorder()
			e.Handler(tt.options).ServeHTTP(w, r)
			if w.Code != tt.status || !strings.Contains(w.Body.String(), tt.body) {
				t.Errorf("%d %.300q, want %d with %q", w.Code, w.Body, tt.status, tt.body)
			}
			if w.Header().Get("X-Content-Type-Options") != "nosniff" {
				t.Error("no nosniff")
			}
			if called := reloaded - before; tt.options.Reload != nil && (called == 1) != (w.Code == 200 || w.Code == 500) {
				t.Errorf("reload was called %d times", called)
			}
		})
	}
}

// reply is /api/v1/results as a client sees it: results by "probe peer result".
type reply struct{ results, recent, failures []string }

func results(t *testing.T, e *Exporter, query string) (out reply) {
	t.Helper()
	w := get(e, "/api/v1/results"+query)
	var body struct {
		Results, Recent, Failures []struct {
			Probe, Peer, Result string
			Runs                []struct{ Latency *struct{ P99 *float64 } }
		}
	}
	dec := json.NewDecoder(w.Body)
	if err := dec.Decode(&body); err != nil || dec.More() {
		t.Fatalf("%s: not one JSON object: %v", query, err)
	}
	for _, l := range []struct {
		to   *[]string
		from []struct {
			Probe, Peer, Result string
			Runs                []struct{ Latency *struct{ P99 *float64 } }
		}
	}{{&out.results, body.Results}, {&out.recent, body.Recent}, {&out.failures, body.Failures}} {
		for _, r := range l.from {
			*l.to = append(*l.to, fmt.Sprint(r.Probe, " ", r.Peer, " ", r.Result))
		}
	}
	return out
}

func TestResults(t *testing.T) {
	e := newExporter(t, Options{})
	e.Observe(failed(result("rtt", "n3"), probe.StageRun, probe.Timeout, probe.ScopePath))
	e.Observe(latencyResult("n3", 2000))
	e.Observe(bandwidthResult("n2", 1e9))
	e.Observe(skipped(result("bw", "n2"), probe.BusyPort))
	e.Observe(latencyResult("n2", 2000))
	e.Observe(latencyResult("n2", 2000))
	e.Observe(latencyResult("stranger", 2000))
	for _, tt := range []struct {
		query string
		want  reply
	}{
		{"", reply{results: []string{"bw n2 ok", "bw n2 skipped", "rtt n2 ok", "rtt n3 ok"}}},
		{"?probe=bw", reply{results: []string{"bw n2 ok", "bw n2 skipped"}}},
		{"?peer=n3&recent=9&failures=9", reply{[]string{"rtt n3 ok"}, []string{"rtt n3 ok", "rtt n3 failed"}, []string{"rtt n3 failed"}}},
		{"?probe=none&recent=3", reply{}},
		{"?probe=bw&peer=n2&recent=1", reply{results: []string{"bw n2 ok", "bw n2 skipped"}, recent: []string{"bw n2 skipped"}}},
		{"?peer=stranger&recent=1", reply{recent: []string{"rtt stranger ok"}}},
	} {
		if got := results(t, e, tt.query); fmt.Sprint(got) != fmt.Sprint(tt.want) {
			t.Errorf("%s:\n got %v\nwant %v", tt.query, got, tt.want)
		}
	}

	for range maxRecent + 3 {
		e.Observe(latencyResult("n2", 2000))
	}
	got := results(t, e, "?recent=100000&failures=100000")
	if len(got.recent) != maxRecent || len(got.failures) != 1 {
		t.Errorf("%d recent and %d failures, want %d and the 1 that successes don't push out", len(got.recent), len(got.failures), maxRecent)
	}
	if e.memory.last[keyOf(latencyResult("n2", 1))].run.Runs[0].Histogram != nil {
		t.Error("histograms are kept: 200 KB for each result")
	}
}

func TestMemoryIsBounded(t *testing.T) {
	m := newMemory()
	for i := range maxLast + 10 {
		m.keep(result("rtt", fmt.Sprint("n", i)))
		m.keep(result("rtt", "n0")) // renewed all the time, so it stays
	}
	if len(m.last) != maxLast {
		t.Errorf("%d last results, want %d", len(m.last), maxLast)
	}
	if m.last[keyOf(result("rtt", "n0"))] == nil || m.last[keyOf(result("rtt", "n1"))] != nil {
		t.Error("the one that has been silent longest should have gone")
	}
}

func TestStatusPage(t *testing.T) {
	evil := `<script>alert("x")</script>`
	e := newExporter(t, Options{Version: evil, Ports: &fakePorts{ports: twoPorts()}, NodeLabels: map[string]string{"rack": evil}})
	e.SetTargets(Targets{Probes: specs(), Peers: []string{"n2", evil}})
	e.SetReload(errors.New(evil))
	e.Observe(latencyResult("n2", 1900, 2000, 2100))
	r := failed(latencyResult(evil, 2000), probe.StageRun, probe.RetryExceeded, probe.ScopePath)
	r.Detail = &evil
	e.Observe(r)
	tainted := bandwidthResult("n2", 20e9)
	tainted.Outcome, tainted.Taints = probe.Tainted, []probe.Taint{probe.TaintPause}
	tainted.TaintLog = []probe.TaintDetail{{Taint: probe.TaintPause, Side: "remote", Counter: "pause", Delta: 77}}
	tainted.Evidence.Local = &probe.EndEvidence{CannotTell: []string{"retransmit"}}
	e.Observe(tainted)

	w := get(e, "/")
	page := w.Body.String()
	if strings.Contains(page, "<script") {
		t.Error("markup got through")
	}
	for _, s := range []string{
		"half-rtt, µs", "2.00", // p50 with its measure in the head
		"160", "80.0 %", "64 KiB", "1 MiB", // bandwidth in Gb/s and of the line rate
		"retry-exceeded", "(path)", "&lt;script&gt;", "port-down", "remote pause &#43;77",
		"this end can&#39;t tell: retransmit; the peer can&#39;t tell: any taint by counters",
	} {
		if !strings.Contains(page, s) {
			t.Errorf("no %q on the page", s)
		}
	}
	// The browser applies the style sheet only if it is, byte for byte, the one the policy names.
	_, style, _ := strings.Cut(page, "<style>")
	style, _, _ = strings.Cut(style, "</style>")
	if style != statusCSS {
		t.Error("the style sheet isn't what contentPolicy has the hash of")
	}
	if w.Header().Get("Content-Security-Policy") != contentPolicy {
		t.Error("no content security policy")
	}

	for query, want := range map[string][2]bool{ // rows of n2's rtt, of its bw
		"/?probe=rtt":         {true, false},
		"/?problems=1":        {false, true},
		"/?peer=n2":           {true, true},
		"/?peer=nobody":       {false, false},
		"/?probe=bw&refresh=": {false, true},
	} {
		page := get(e, query).Body.String()
		_, page, _ = strings.Cut(page, "</form>")
		page, _, _ = strings.Cut(page, "Past failures")
		got := [2]bool{strings.Contains(page, ">2.00<"), strings.Contains(page, ">160<")}
		if got != want {
			t.Errorf("%s: shows rtt, bw: %v, want %v", query, got, want)
		}
	}
	if page := get(e, "/?refresh=10").Body.String(); !strings.Contains(page, `<meta http-equiv="refresh" content="10">`) {
		t.Error("no refresh")
	}
	if page := get(e, "/?refresh=x").Body.String(); strings.Contains(page, "http-equiv") {
		t.Error("refresh by a word")
	}
}

func TestUnits(t *testing.T) {
	none := (*float64)(nil)
	for _, tt := range []struct{ got, want string }{
		{microseconds(1.2345e-6), "1.23"}, {microseconds(new(123.46e-6)), "123.5"}, {microseconds(0.0123), "12300"}, {microseconds(none), "–"},
		{gigabits(25e9), "200"}, {gigabits(1.234e9), "9.87"}, {gigabits(none), "–"}, {percent(0.9666), "96.7 %"},
		{si(1.5e6), "1.50 M"}, {si(999.0), "999"}, {si(3e9), "3.00 G"},
		{binary(8), "8 B"}, {binary(65536), "64 KiB"}, {binary(1 << 20), "1 MiB"}, {binary(1025), "1025 B"},
		{human(0), "0 s"}, {human(-5e9), "0 s"}, {human(90e9), "1 min 30 s"}, {human(3600e9), "1 h"}, {human(49 * 3600e9), "2 d 1 h"},
	} {
		if tt.got != tt.want {
			t.Errorf("got %q, want %q", tt.got, tt.want)
		}
	}
}
