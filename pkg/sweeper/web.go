package sweeper

import (
	"bytes"
	"encoding/json"
	"errors"
	"html/template"
	"io"
	"io/fs"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/sweep"
)

// webPause is the least time between two sweeps that the web port starts: it asks nobody who they are.
const webPause = time.Minute

// Web serves the reports below /sweeps/ and /api/v1/sweeps, where a POST starts a sweep.
type Web struct {
	Runner *Runner
	Store  *Store

	mu   sync.Mutex
	last time.Time
}

// Handler returns the routes.
func (w *Web) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /sweeps/{$}", w.index)
	mux.HandleFunc("GET /sweeps/{id}", w.report)
	mux.HandleFunc("GET /api/v1/sweeps", func(rw http.ResponseWriter, _ *http.Request) {
		reply(rw, http.StatusOK, map[string]any{"reports": w.Store.List(), "sweep": w.state()})
	})
	// A page of another origin must not make a browser start traffic.
	mux.Handle("POST /api/v1/sweeps", http.NewCrossOriginProtection().Handler(http.HandlerFunc(w.start)))
	return mux
}

// state is of the sweep that runs or ran last.
func (w *Web) state() any {
	w.Runner.mu.Lock()
	defer w.Runner.mu.Unlock()
	s := w.Runner.last
	if s.ID == "" {
		return nil
	}
	return map[string]any{"id": s.ID, "running": s.Running, "planned": s.Planned, "done": s.Done, "started": s.Started}
}

// request is the body of a POST.
type request struct {
	Probes   []string `json:"probes"`
	Peers    []string `json:"peers"`
	Deadline float64  `json:"deadline"` // seconds
}

const maxBody = 64 << 10

func (w *Web) start(rw http.ResponseWriter, r *http.Request) {
	fail := func(status int, what string) { reply(rw, status, map[string]string{"error": what}) }
	body, err := io.ReadAll(http.MaxBytesReader(rw, r.Body, maxBody))
	if err != nil {
		fail(http.StatusRequestEntityTooLarge, err.Error())
		return
	}
	var req request
	if len(bytes.TrimSpace(body)) > 0 {
		dec := json.NewDecoder(bytes.NewReader(body))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&req); err != nil {
			fail(http.StatusBadRequest, `want {"probes": [], "peers": [], "deadline": SECONDS}, each of which may be left out: `+err.Error())
			return
		}
	}
	if req.Deadline == 0 {
		req.Deadline = DefaultDeadline.Seconds()
	}
	s := control.SweepRequest{ID: NewID(), Probes: req.Probes, Peers: req.Peers, Deadline: req.Deadline}
	if err := s.Validate(); err != nil {
		fail(http.StatusBadRequest, err.Error())
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if since := time.Since(w.last); !w.last.IsZero() && since < webPause {
		rw.Header().Set("Retry-After", "60")
		fail(http.StatusTooManyRequests, "a sweep was started less than a minute ago")
		return
	}
	if err := w.Runner.start(s, true); err != nil {
		status := http.StatusBadRequest
		var e *control.Error
		if errors.As(err, &e) && e.Reason == "busy" {
			status = http.StatusConflict
		}
		fail(status, err.Error())
		return
	}
	w.last = time.Now()
	reply(rw, http.StatusAccepted, map[string]string{"id": s.ID, "status": "/api/v1/sweeps", "reports": "/sweeps/"})
}

func reply(rw http.ResponseWriter, status int, v any) {
	rw.Header().Set("Content-Type", "application/json")
	rw.Header().Set("Cache-Control", "no-store")
	rw.WriteHeader(status)
	_ = json.NewEncoder(rw).Encode(v) // the client has gone
}

// Write writes a report in one of the formats text, json, html and junit.
func Write(out io.Writer, r *sweep.Report, format string) error {
	switch format {
	case "json":
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		return enc.Encode(r)
	case "html":
		return r.HTML(out)
	case "junit":
		return r.JUnit(out)
	}
	return r.Text(out)
}

var formats = map[string][2]string{
	"html": {"html", "text/html; charset=utf-8"}, "json": {"json", "application/json"}, "txt": {"text", "text/plain; charset=utf-8"}, "xml": {"junit", "application/xml"},
}

func (w *Web) report(rw http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	format := formats["html"]
	if i := strings.LastIndexByte(id, '.'); i >= 0 {
		if f, ok := formats[id[i+1:]]; ok {
			id, format = id[:i], f
		}
	}
	rep, err := w.Store.Get(id)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		http.Error(rw, "no such report; /sweeps/ lists those there are", http.StatusNotFound)
		return
	case err != nil:
		http.Error(rw, err.Error(), http.StatusInternalServerError)
		return
	}
	var body bytes.Buffer
	if err := Write(&body, rep, format[0]); err != nil {
		http.Error(rw, err.Error(), http.StatusInternalServerError)
		return
	}
	rw.Header().Set("Content-Type", format[1])
	_, _ = body.WriteTo(rw) // the client has gone
}

var indexPage = template.Must(template.New("index").Parse(`<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<title>Sweeps - rdmabenchd</title>
<style>body{margin:0 auto;max-width:60rem;padding:1rem;font:15px/1.45 system-ui,sans-serif}td,th{padding:.25rem .7rem;text-align:left}table{border-collapse:collapse}</style>
<h1>Sweeps</h1>
{{if .}}<table><tr><th>sweep</th><th>rows of</th><th>started</th><th></th></tr>
{{range .}}<tr><td><a href="/sweeps/{{.ID}}">{{.Name}}</a></td><td>{{if .Fleet}}the fleet{{else}}this node{{end}}</td><td>{{.Started.Format "2006-01-02 15:04:05"}} UTC</td><td><a href="/sweeps/{{.ID}}.json">JSON</a> <a href="/sweeps/{{.ID}}.txt">text</a> <a href="/sweeps/{{.ID}}.xml">JUnit</a></td></tr>
{{end}}</table>{{else}}<p>No sweep has been reported yet.</p>{{end}}
<p><a href="/">status</a></p></html>
`))

func (w *Web) index(rw http.ResponseWriter, _ *http.Request) {
	var body bytes.Buffer
	if err := indexPage.Execute(&body, w.Store.List()); err != nil {
		http.Error(rw, err.Error(), http.StatusInternalServerError)
		return
	}
	rw.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = body.WriteTo(rw) // the client has gone
}
