package exporter

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"fmt"
	"html/template"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

//go:embed status.html
var statusHTML string

//go:embed status.css
var statusCSS string

var statusPage = template.Must(template.New("status").Funcs(template.FuncMap{
	"css":      func() template.CSS { return template.CSS(statusCSS) },
	"age":      func(now, t time.Time) string { return human(now.Sub(t)) },
	"clock":    func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") },
	"us":       microseconds,
	"gbps":     gigabits,
	"percent":  percent,
	"si":       si,
	"bytes":    binary,
	"interval": human,
}).Parse(statusHTML))

// contentPolicy lets the page use the one style sheet inside it, and nothing else.
var contentPolicy = func() string {
	sum := sha256.Sum256([]byte(statusCSS))
	return "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) +
		"'; img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
}()

const shownFailures = 20

// status is what the page shows.
type status struct {
	Node, Version  string
	Now, Started   time.Time
	Ready          bool
	ReloadErr      string
	Reloaded       time.Time
	PortsErr       string
	Ports          []PortState
	Usable         int
	Peers          map[string]int // by state
	PeerCount      int
	Labels         []string
	Probes         []probeView
	Tally          map[string]int
	Failing        []row
	Failures       []*probe.Result
	Dropped        float64
	Probe, Peer    string // the filter
	ProblemsOnly   bool
	Refresh        int // seconds; 0: never
	RefreshURL     string
	AllProbes      []string
	NothingMatches bool
}

// probeView is one probe's part of the page.
type probeView struct {
	Spec    probe.Spec
	Latency bool
	Measure string // of its latencies
	Covered probeCoverage
	Rows    []row
}

// row is one message size of a last result, or all of one that failed.
type row struct {
	*probe.Result
	Run       *probe.Run // nil: no figures
	LineRate  float64    // bytes per second; 0: unknown
	LastGood  *probe.Result
	Skip      *probe.Result // since then
	Continued bool          // the same result as the row above
	Evidence  []evidence
}

// evidence is a taint and why it is there.
type evidence struct {
	Taint probe.Taint
	Why   string
}

func (r row) Problem() bool { return r.Outcome == probe.Failed || r.Outcome == probe.Tainted }

func (r row) Ratio() *float64 {
	if r.Run == nil || r.Run.Bandwidth == nil || r.LineRate <= 0 {
		return nil
	}
	return new(r.Run.Bandwidth.BytesPerSecond / r.LineRate)
}

func (e *Exporter) serveStatus(w http.ResponseWriter, r *http.Request) {
	e.readPorts(r.Context())
	s := e.status(r.URL.Query())
	var body bytes.Buffer
	if err := statusPage.Execute(&body, s); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", contentPolicy)
	h.Set("Cache-Control", "no-store")
	_, _ = body.WriteTo(w) // the client has gone
}

func (e *Exporter) status(q url.Values) *status {
	s := &status{
		Node: e.opt.Node, Version: e.opt.Version, Now: time.Now().Round(0), Started: e.started.Round(0), Ready: e.ready.Load(),
		Peers: map[string]int{}, Tally: map[string]int{},
		Probe: q.Get("probe"), Peer: q.Get("peer"), ProblemsOnly: q.Get("problems") != "",
	}
	if n, err := strconv.ParseUint(q.Get("refresh"), 10, 16); err == nil && n > 0 {
		s.Refresh = int(n)
		q.Del("refresh")
	} else {
		q.Set("refresh", "10")
	}
	s.RefreshURL = "/?" + q.Encode()
	match := filter(s.Probe, s.Peer)
	for _, k := range slices.Sorted(maps.Keys(e.opt.NodeLabels)) {
		s.Labels = append(s.Labels, k+"="+e.opt.NodeLabels[k])
	}

	e.mu.Lock()
	defer e.mu.Unlock()
	s.Reloaded, s.Dropped = e.reload.good, e.dropped
	if e.reload.err != nil {
		s.ReloadErr = e.reload.err.Error()
	}
	if e.portsErr != nil {
		s.PortsErr = e.portsErr.Error()
	}
	s.Ports = slices.Clone(e.ports)
	for _, p := range e.ports {
		if p.Usable {
			s.Usable++
		}
	}
	for state, n := range e.memory.peers(e.peers) {
		s.Peers[string(state)] = n
	}
	s.PeerCount = len(e.peers)
	views := map[string]*probeView{}
	for name, p := range e.probes {
		s.AllProbes = append(s.AllProbes, name)
		if s.Probe == "" || s.Probe == name {
			views[name] = &probeView{Spec: p.spec, Latency: p.spec.Kind == probe.Latency, Covered: e.coverage(name)[0]}
		}
	}
	slices.Sort(s.AllProbes)
	shown := 0
	for _, l := range e.memory.sorted() {
		last := cmp.Or(l.run, l.skip)
		s.Tally[string(last.Outcome)]++
		v := views[last.Probe]
		if v == nil || !match(last) {
			continue
		}
		rows := rowsOf(l, e.lineRate(last.Device, last.Port))
		if last.Outcome == probe.Failed {
			s.Failing = append(s.Failing, rows[0])
		}
		if s.ProblemsOnly && !rows[0].Problem() {
			continue
		}
		shown++
		v.Rows = append(v.Rows, rows...)
		for _, r := range rows {
			if r.Run != nil && r.Run.Latency != nil {
				v.Measure = r.Run.Latency.Measure
			}
		}
	}
	s.NothingMatches = shown == 0 && (s.Probe != "" || s.Peer != "" || s.ProblemsOnly)
	for _, name := range s.AllProbes {
		if v := views[name]; v != nil && (len(v.Rows) > 0 || s.Peer == "" && !s.ProblemsOnly) {
			s.Probes = append(s.Probes, *v)
		}
	}
	s.Failures = e.memory.failures.newest(shownFailures, match)
	return s
}

func rowsOf(l lastResult, lineRate float64) []row {
	last := cmp.Or(l.run, l.skip)
	first := row{Result: last, LastGood: l.good, LineRate: lineRate, Evidence: evidenceOf(last)}
	if l.skip != last {
		first.Skip = l.skip
	}
	if !last.Usable() || len(last.Runs) == 0 {
		return []row{first}
	}
	rows := make([]row, len(last.Runs))
	for i := range last.Runs {
		rows[i] = row{Result: last, LineRate: lineRate, Continued: true}
		if i == 0 {
			rows[i] = first
		}
		rows[i].Run = &last.Runs[i]
	}
	return rows
}

func evidenceOf(r *probe.Result) []evidence {
	out := make([]evidence, len(r.Taints))
	for i, t := range r.Taints {
		out[i].Taint = t
		var why []string
		for _, d := range r.TaintLog {
			if d.Taint == t {
				why = append(why, d.String())
			}
		}
		out[i].Why = strings.Join(why, ", ")
	}
	return out
}

// CannotTell says which taints an end has no signal of, which is not the same as their absence.
func (r row) CannotTell() string {
	by := r.Result.CannotTell()
	told := func(taints []string) string {
		if len(taints) == len(probe.Tolerable()) {
			return "any taint by counters"
		}
		return strings.Join(taints, ", ")
	}
	local, remote := told(by["local"]), told(by["remote"])
	var parts []string
	switch {
	case local != "" && local == remote:
		parts = append(parts, "neither end can tell: "+local)
	default:
		if local != "" {
			parts = append(parts, "this end can't tell: "+local)
		}
		if remote != "" {
			parts = append(parts, "the peer can't tell: "+remote)
		}
	}
	return strings.Join(parts, "; ")
}

// At is when the session ended.
func (r row) At() time.Time { return ended(r.Result) }

const dash = "–" // for what is absent

func microseconds(v any) string {
	return show(v, func(s float64) string {
		us := s * 1e6
		switch {
		case us < 100:
			return strconv.FormatFloat(us, 'f', 2, 64)
		case us < 10000:
			return strconv.FormatFloat(us, 'f', 1, 64)
		}
		return strconv.FormatFloat(us, 'f', 0, 64)
	})
}

func gigabits(v any) string {
	return show(v, func(b float64) string { return digits3(b * 8 / 1e9) })
}

func percent(v any) string {
	return show(v, func(x float64) string { return digits3(x*100) + " %" })
}

// si gives three digits and a prefix.
func si(v any) string {
	return show(v, func(x float64) string {
		for _, p := range []struct {
			unit float64
			name string
		}{{1e9, " G"}, {1e6, " M"}, {1e3, " k"}} {
			if x >= p.unit {
				return digits3(x/p.unit) + p.name
			}
		}
		return digits3(x)
	})
}

func digits3(x float64) string {
	switch {
	case x >= 99.95:
		return strconv.FormatFloat(x, 'f', 0, 64)
	case x >= 9.995:
		return strconv.FormatFloat(x, 'f', 1, 64)
	}
	return strconv.FormatFloat(x, 'f', 2, 64)
}

// show formats a number; one that is nil, a dash.
func show(v any, format func(float64) string) string {
	switch v := v.(type) {
	case float64:
		return format(v)
	case *float64:
		if v != nil {
			return format(*v)
		}
	}
	return dash
}

// binary names a message size.
func binary(n int) string {
	for _, u := range []struct {
		shift int
		name  string
	}{{30, " GiB"}, {20, " MiB"}, {10, " KiB"}} {
		if n >= 1<<u.shift && n%(1<<u.shift) == 0 {
			return strconv.Itoa(n>>u.shift) + u.name
		}
	}
	return strconv.Itoa(n) + " B"
}

// human names a duration by its two largest units.
func human(d time.Duration) string {
	s := int64(max(0, d.Round(time.Second)) / time.Second)
	for _, u := range []struct {
		size, next    int64
		name, smaller string
	}{{86400, 3600, "d", "h"}, {3600, 60, "h", "min"}, {60, 1, "min", "s"}} {
		if s < u.size {
			continue
		}
		if rest := s % u.size / u.next; rest > 0 {
			return fmt.Sprintf("%d %s %d %s", s/u.size, u.name, rest, u.smaller)
		}
		return fmt.Sprintf("%d %s", s/u.size, u.name)
	}
	return fmt.Sprintf("%d s", s)
}
