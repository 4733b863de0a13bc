package promcheck

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"google.golang.org/protobuf/proto"
	"gopkg.in/yaml.v3"
)

// live stands in for Grafana's variables against a fleet that has been scraped for seconds.
var live = Variables{"window": "30s", "__range": "10m", "__rate_interval": "30s", "__interval": "5s"}

// Queries that need days of history.
var needHistory = map[string]bool{
	"rule/nic:rdmabench_latency_p99_seconds:baseline14d":              true,
	"rule/nic:rdmabench_bandwidth_bytes_per_second:baseline14d":       true,
	"rule/nic:rdmabench_latency_p99_seconds:tolerance14d":             true,
	"rule/nic:rdmabench_bandwidth_bytes_per_second:tolerance14d":      true,
	"rule/nic:rdmabench_latency_p99_seconds:ratio_to_baseline":        true,
	"rule/nic:rdmabench_bandwidth_bytes_per_second:ratio_to_baseline": true,
	"Worst p99 / baseline/A":                                          true,
	"Worst bandwidth / baseline/A":                                    true,
	"p99 latency / baseline, worst NICs/A":                            true,
	"Bandwidth / baseline, worst NICs/A":                              true,
}

// Queries that a healthy fleet has no answer to, or a small one, or one of Soft-RoCE, and why.
var mayBeEmpty = map[string]string{
	"Alerts firing/A":     "healthy",
	"annotation/alerts":   "healthy",
	"Stale pairs/A":       "healthy",
	"Failing as sender/A": "healthy", "Failing as receiver/A": "healthy",
	"Failures by reason and scope/A": "healthy", "Failures by NIC/A": "healthy",
	"Skips by reason/A":                                    "healthy",
	"Tainted pairs by reason/A":                            "healthy",
	"Retransmissions and timeouts, worst ports/A":          "healthy",
	"Congestion, worst ports/A":                            "healthy",
	"Bit errors and lost links, worst ports/A":             "healthy",
	"annotation/configuration loaded":                      "no reload",
	"rule/nic:rdmabench_probe:local_failure_ratio1h":       "healthy",
	"rule/nic:rdmabench_probe_tainted:ratio1h":             "healthy",
	"rule/nic:rdmabench_probe:failure_ratio1h_median":      "under four nodes",
	"rule/peer:rdmabench_probe:failure_ratio1h_median":     "under four nodes",
	"rule/peer:rdmabench_probe:stale":                      "under three nodes",
	"rule/nic:rdmabench_probe:stale":                       "under three nodes",
	"rule/nic:rdmabench_loss_ratio:avg1h":                  "no unreliable transport",
	"rule/probe:rdmabench_probe_skips:ratio6h":             "an exposition that stands still",
	"Bandwidth / line rate, slowest NICs/A":                "Soft-RoCE",
	"Slowest pairs by bandwidth/C":                         "Soft-RoCE",
	"Ports: what they are/C":                               "Soft-RoCE",
	"rule/port:rdmabench_port_rate_bytes_per_second:max1h": "Soft-RoCE",
}

// TestQueries runs every query of the dashboards and every rule in a Prometheus that scrapes a fleet:
//
//   - the daemons at RDMABENCH_TARGETS=host:port,… if it is set;
//   - else the expositions in the directory RDMABENCH_METRICS, a file for each node: *.prom as text, or *.pb as
//     Prometheus asks for it, which has native histograms too:
//     curl -H 'Accept: application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited' …/metrics;
//   - else a simulated fleet that has every trouble there is, so that only what needs days of history may be empty.
//
// RDMABENCH_WAIT says how long queries may take to find something, by default 60s: longer than the slowest probe's
// interval.
func TestQueries(t *testing.T) {
	t.Parallel()
	wait := 60 * time.Second
	if s := os.Getenv("RDMABENCH_WAIT"); s != "" {
		var err error
		if wait, err = time.ParseDuration(s); err != nil {
			t.Fatalf("RDMABENCH_WAIT: %v", err)
		}
	}
	var targets []string
	simulated := false
	switch {
	case os.Getenv("RDMABENCH_TARGETS") != "":
		targets = strings.Split(os.Getenv("RDMABENCH_TARGETS"), ",")
	case os.Getenv("RDMABENCH_METRICS") != "":
		targets = serveFiles(t, os.Getenv("RDMABENCH_METRICS"))
	default:
		targets, simulated = simulate(t), true
	}
	ctx, cancel := context.WithTimeout(t.Context(), wait+2*time.Minute)
	defer cancel()
	prom := start(ctx, t, func(native bool) string { return liveConfig(t, targets, native) })

	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	if err := poll(waiting, func() error { return prom.scraped(ctx, len(targets)) }); err != nil {
		t.Fatal(err)
	}
	queries := everything(t)
	checkLists(t, queries)
	for _, q := range queries {
		alert := strings.HasPrefix(q.Where, "rule/") && !strings.Contains(q.Where, ":")
		may := alert || needHistory[q.Where] || (!simulated && mayBeEmpty[q.Where] != "")
		q.Expr = live.Expand(q.Expr)
		n := 0
		err := poll(waiting, func() (err error) {
			n, err = prom.query(ctx, q)
			switch {
			case err != nil:
				return final{err}
			case n == 0 && !may:
				return errors.New("no series")
			}
			return nil
		})
		if err != nil {
			t.Errorf("%s: %v\n%s", q.Where, err, q.Expr)
			continue
		}
		t.Logf("%4d series  %s", n, q.Where)
	}
	if err := prom.rulesHealthy(ctx); err != nil {
		t.Error(err)
	}
}

// checkLists fails on names in the lists above that are no query's.
func checkLists(t *testing.T, queries []Query) {
	t.Helper()
	there := map[string]bool{}
	for _, q := range queries {
		there[q.Where] = true
	}
	for _, w := range slices.Concat(slices.Collect(maps.Keys(needHistory)), slices.Collect(maps.Keys(mayBeEmpty))) {
		if !there[w] {
			t.Errorf("%q may be empty, but there is no such query", w)
		}
	}
}

// liveConfig scrapes each second and runs the rules of this repository as often, the hourly ones too. Alerts fire
// without waiting.
func liveConfig(t *testing.T, targets []string, native bool) string {
	t.Helper()
	files, err := LoadRules(ruleDir)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name := range files {
		var doc map[string]any
		b, err := os.ReadFile(filepath.Join(ruleDir, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := yaml.Unmarshal(b, &doc); err != nil {
			t.Fatal(err)
		}
		for _, g := range doc["groups"].([]any) {
			g.(map[string]any)["interval"] = "1s"
			for _, r := range g.(map[string]any)["rules"].([]any) {
				delete(r.(map[string]any), "for")
			}
		}
		if b, err = yaml.Marshal(doc); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	scrape := map[string]any{"job_name": "rdmabenchd", "static_configs": []any{map[string]any{"targets": targets}}}
	if native {
		scrape["scrape_native_histograms"] = true
	}
	b, err := yaml.Marshal(map[string]any{
		"global":         map[string]any{"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
		"rule_files":     []string{filepath.Join(dir, "*.yaml")},
		"scrape_configs": []any{scrape},
	})
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// scraped returns an error until all targets have been scraped ten times.
func (s *server) scraped(ctx context.Context, targets int) error {
	n, err := s.query(ctx, Query{Expr: `sum_over_time(up{job="rdmabenchd"}[5m]) >= 10`})
	if err != nil || n == targets {
		return err
	}
	var found struct {
		ActiveTargets []struct{ ScrapeURL, Health, LastError string }
	}
	if err := s.get(ctx, "/api/v1/targets", nil, &found); err != nil {
		return err
	}
	why := fmt.Sprintf("%d of %d daemons scraped ten times", n, targets)
	for _, x := range found.ActiveTargets {
		if x.Health != "up" {
			why += fmt.Sprintf("\n%s is %s: %s", x.ScrapeURL, x.Health, x.LastError)
		}
	}
	return errors.New(why)
}

// rulesHealthy returns the errors that rules had in the server itself, where they see each other's results.
func (s *server) rulesHealthy(ctx context.Context) error {
	var data struct {
		Groups []struct {
			Name  string
			Rules []struct{ Name, Health, LastError string }
		}
	}
	if err := s.get(ctx, "/api/v1/rules", nil, &data); err != nil {
		return err
	}
	var errs []error
	n := 0
	for _, g := range data.Groups {
		for _, r := range g.Rules {
			n++
			if r.Health != "ok" {
				errs = append(errs, fmt.Errorf("%s: %s is %s: %s", g.Name, r.Name, r.Health, r.LastError))
			}
		}
	}
	if n == 0 {
		errs = append(errs, errors.New("no rules were loaded"))
	}
	return errors.Join(errs...)
}

// serveFiles serves each exposition in a directory as a target of its own.
func serveFiles(t *testing.T, dir string) (targets []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		format := map[string]expfmt.Format{
			".prom": expfmt.NewFormat(expfmt.TypeTextPlain),
			".pb":   expfmt.NewFormat(expfmt.TypeProtoDelim),
		}[filepath.Ext(f)]
		if format == "" {
			continue
		}
		families, taken := readMetrics(t, f, format)
		targets = append(targets, serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", string(format))
			enc := expfmt.NewEncoder(w, format)
			for _, family := range families {
				_ = enc.Encode(moved(family, time.Since(taken))) // Prometheus will say so if it gets half of it
			}
		})))
	}
	if len(targets) == 0 {
		t.Fatalf("RDMABENCH_METRICS: neither *.prom nor *.pb in %s", dir)
	}
	return targets
}

// readMetrics reads an exposition, and when it was taken.
func readMetrics(t *testing.T, name string, format expfmt.Format) (families []*dto.MetricFamily, taken time.Time) {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	for dec := expfmt.NewDecoder(f, format); ; {
		family := &dto.MetricFamily{}
		if err := dec.Decode(family); errors.Is(err, io.EOF) {
			return families, info.ModTime()
		} else if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		families = append(families, family)
	}
}

// moved brings the times in a family that was taken so long ago up to now: the results in it are to be as fresh as they were.
func moved(family *dto.MetricFamily, by time.Duration) *dto.MetricFamily {
	if !strings.HasSuffix(family.GetName(), "_timestamp_seconds") {
		return family
	}
	family = proto.CloneOf(family)
	for _, m := range family.GetMetric() {
		if m.GetGauge() != nil {
			m.Gauge.Value = proto.Float64(m.GetGauge().GetValue() + by.Seconds())
		}
	}
	return family
}

func serve(t *testing.T, h http.Handler) string {
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}
