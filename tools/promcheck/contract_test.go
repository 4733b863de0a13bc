package promcheck

import (
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/promql/parser"
)

// Every metric that a dashboard or a rule asks for is exported by the daemon, recorded by a rule, or known to
// every Prometheus.
func TestMetricsExist(t *testing.T) {
	exported, _ := contract(t)
	known := map[string]bool{"up": true, "ALERTS": true, "scrape_duration_seconds": true, "process_start_time_seconds": true,
		"process_cpu_seconds_total": true, "process_resident_memory_bytes": true}
	for n := range exported {
		known[n] = true
	}
	used := map[string]bool{}
	for _, r := range rules(t) {
		if r.Record != "" {
			known[r.Record] = true
		}
	}
	for _, q := range everything(t) {
		selectors(parse(t, q), func(s *parser.VectorSelector, _ []parser.Node) {
			ns := names(s, known)
			if len(ns) == 0 {
				t.Errorf("%s: %s selects no known metric", q.Where, s)
			}
			for _, n := range ns {
				used[n] = true
				if !known[n] {
					t.Errorf("%s: nobody exports or records %s", q.Where, n)
				}
			}
		})
	}
	for _, r := range rules(t) {
		if r.Record != "" && !used[r.Record] {
			t.Errorf("%s is recorded, but no alert, rule or panel uses it", r.Record)
		}
	}
}

// Every label in a matcher, a grouping, a legend or an annotation is one the daemon has.
func TestLabelsExist(t *testing.T) {
	_, known := contract(t)
	for _, l := range []string{"__name__", "job", "instance", "alertname", "alertstate", "severity"} {
		known[l] = true
	}
	check := func(where string, labels ...string) {
		for _, l := range labels {
			if !known[l] {
				t.Errorf("%s: docs/metrics.md knows no label %q", where, l)
			}
		}
	}
	for _, q := range everything(t) {
		parser.Inspect(parse(t, q), func(n parser.Node, _ []parser.Node) error {
			switch n := n.(type) {
			case *parser.VectorSelector:
				for _, m := range n.LabelMatchers {
					check(q.Where, m.Name)
				}
			case *parser.AggregateExpr:
				check(q.Where, n.Grouping...)
			case *parser.BinaryExpr:
				if n.VectorMatching != nil {
					check(q.Where, n.VectorMatching.MatchingLabels...)
				}
			}
			return nil
		})
	}
	for _, d := range dashboards(t) {
		for _, p := range d.All() {
			for _, q := range p.Targets {
				for _, m := range regexp.MustCompile(`\{\{\s*(\w+)\s*\}\}`).FindAllStringSubmatch(q.LegendFormat, -1) {
					check(p.Title+", legend", m[1])
				}
			}
		}
	}
	for _, r := range rules(t) {
		for _, a := range r.Annotations {
			for _, m := range regexp.MustCompile(`\$labels\.(\w+)`).FindAllStringSubmatch(a, -1) {
				check(r.Name(), m[1])
			}
		}
	}
}

// A counter's value means nothing by itself: it starts anew with the daemon.
func TestCountersInsideRate(t *testing.T) {
	// A kind of failure that appears in the window has no rate yet; this is how the table finds it.
	except := map[string]bool{"Failures by NIC/A": true}
	exported, _ := contract(t)
	for _, q := range everything(t) {
		selectors(parse(t, q), func(s *parser.VectorSelector, path []parser.Node) {
			for _, n := range names(s, exported) {
				if !strings.HasSuffix(n, "_total") || except[q.Where] {
					continue
				}
				if len(path) < 2 {
					t.Errorf("%s: %s outside of rate or increase", q.Where, n)
					continue
				}
				call, ok := path[len(path)-2].(*parser.Call)
				if !ok || (call.Func.Name != "rate" && call.Func.Name != "increase") {
					t.Errorf("%s: %s outside of rate or increase", q.Where, n)
				}
			}
		})
	}
}
