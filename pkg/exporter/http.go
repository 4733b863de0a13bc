package exporter

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/pprof"
	"strconv"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// HandlerOptions choose the routes of [Exporter.Handler] that are not always there.
type HandlerOptions struct {
	// Reload loads the configuration anew, for POST and PUT of /-/reload; nil: that answers 403.
	Reload func(context.Context) error
	Pprof  bool // serve /debug/pprof/
	// Sweeps serves /sweeps/ and /api/v1/sweeps; nil: nothing does.
	Sweeps http.Handler
	// Maintenance serves /-/pause, /-/resume, /api/v1/lease and /api/v1/verdict; nil: nothing does.
	Maintenance http.Handler
}

// Handler serves the status page, the metrics, the API and what Prometheus's own daemons have below /-/.
func (e *Exporter) Handler(o HandlerOptions) http.Handler {
	metrics := promhttp.HandlerFor(e.registry, promhttp.HandlerOpts{
		ErrorLog:          errorLog{e.opt.Log},
		ErrorHandling:     promhttp.ContinueOnError, // one bad series must not hide the others
		Registry:          e.registry,
		EnableOpenMetrics: true, // for exemplars
	})
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		e.readPorts(r.Context())
		metrics.ServeHTTP(w, r)
	})
	mux.HandleFunc("GET /{$}", e.serveStatus)
	mux.HandleFunc("GET /api/v1/results", e.serveResults)
	mux.HandleFunc("GET /api/v1/coverage", e.serveCoverage)
	mux.HandleFunc("GET /-/healthy", func(w http.ResponseWriter, _ *http.Request) { say(w, http.StatusOK, "rdmabenchd is healthy.") })
	mux.HandleFunc("GET /-/ready", func(w http.ResponseWriter, _ *http.Request) {
		if !e.ready.Load() {
			say(w, http.StatusServiceUnavailable, "rdmabenchd is not ready.")
			return
		}
		say(w, http.StatusOK, "rdmabenchd is ready.")
	})
	// A page of another origin must not make a browser reload the daemon.
	reload := http.NewCrossOriginProtection().Handler(e.reloadHandler(o.Reload))
	mux.Handle("POST /-/reload", reload)
	mux.Handle("PUT /-/reload", reload)
	if o.Sweeps != nil {
		mux.Handle("/sweeps/", o.Sweeps)
		mux.Handle("/api/v1/sweeps", o.Sweeps)
	}
	if o.Maintenance != nil {
		for _, path := range []string{"/-/pause", "/-/resume", "/api/v1/lease", "/api/v1/verdict"} {
			mux.Handle(path, o.Maintenance)
		}
	}
	if o.Pprof {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "no-referrer")
		mux.ServeHTTP(w, r)
	})
}

func say(w http.ResponseWriter, status int, line string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, line+"\n") // the client has gone
}

func (e *Exporter) reloadHandler(reload func(context.Context) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if reload == nil {
			say(w, http.StatusForbidden, "Lifecycle API is not enabled.")
			return
		}
		if err := reload(r.Context()); err != nil {
			say(w, http.StatusInternalServerError, "failed to reload config: "+err.Error())
			return
		}
		say(w, http.StatusOK, "The configuration was reloaded.")
	})
}

// resultsReply is the JSON of /api/v1/results.
type resultsReply struct {
	Node string `json:"node"`
	// Results are the last ones of every probe, peer and port. Where the last run was skipped, the one before it that
	// was not comes first.
	Results  []*probe.Result `json:"results"`
	Recent   []*probe.Result `json:"recent,omitzero"`   // the newest first; only with ?recent=
	Failures []*probe.Result `json:"failures,omitzero"` // likewise, with ?failures=
}

func (e *Exporter) serveResults(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	match := filter(q.Get("probe"), q.Get("peer"))
	var counts [2]int
	for i, name := range []string{"recent", "failures"} {
		v := q.Get(name)
		if v == "" {
			continue
		}
		n, err := strconv.ParseUint(v, 10, 31)
		if err != nil {
			sendJSON(w, http.StatusBadRequest, map[string]string{"error": fmt.Sprintf("%s=%q: want a number of results, 0 or more", name, v)})
			return
		}
		counts[i] = int(n)
	}
	reply := resultsReply{Node: e.opt.Node, Results: []*probe.Result{}}
	e.mu.Lock()
	for _, l := range e.memory.sorted() {
		for _, x := range []*probe.Result{l.run, l.skip} {
			if x != nil && match(x) {
				reply.Results = append(reply.Results, x)
			}
		}
	}
	if q.Get("recent") != "" {
		reply.Recent = e.memory.recent.newest(counts[0], match)
	}
	if q.Get("failures") != "" {
		reply.Failures = e.memory.failures.newest(counts[1], match)
	}
	e.mu.Unlock()
	sendJSON(w, http.StatusOK, reply)
}

// filter matches results by probe and peer; empty: any.
func filter(name, peer string) func(*probe.Result) bool {
	return func(r *probe.Result) bool {
		return (name == "" || r.Probe == name) && (peer == "" || r.Peer == peer)
	}
}

func sendJSON(w http.ResponseWriter, status int, v any) {
	var body bytes.Buffer
	if err := json.NewEncoder(&body).Encode(v); err != nil {
		status = http.StatusInternalServerError
		body.Reset()
		_ = json.NewEncoder(&body).Encode(map[string]string{"error": err.Error()}) // strings always encode
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = body.WriteTo(w) // the client has gone
}

// errorLog hands promhttp's complaints on.
type errorLog struct{ log *slog.Logger }

func (l errorLog) Println(v ...any) {
	l.log.Error("metrics are incomplete: please report this", slog.String("err", fmt.Sprint(v...)))
}
