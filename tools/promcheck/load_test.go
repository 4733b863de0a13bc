package promcheck

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/promql/parser"
)

// Where things are, seen from here.
const (
	dashboardDir = "../../dashboards"
	configDir    = "../../configs/prometheus"
	ruleDir      = configDir + "/rules"
	metricsDoc   = "../../docs/metrics.md"
)

// forParser stands in for Grafana's variables where only the syntax matters.
var forParser = Variables{"window": "1h", "__range": "1d", "__rate_interval": "1m", "__interval": "1m"}

// everything returns all queries there are.
func everything(t *testing.T) (out []Query) {
	t.Helper()
	for _, d := range dashboards(t) {
		out = append(out, d.Queries()...)
	}
	for _, r := range rules(t) {
		out = append(out, Query{Where: "rule/" + r.Name(), Expr: r.Expr})
	}
	return out
}

func dashboards(t *testing.T) map[string]*Dashboard {
	t.Helper()
	ds, err := LoadDashboards(dashboardDir)
	if err != nil {
		t.Fatal(err)
	}
	return ds
}

func rules(t *testing.T) (out []Rule) {
	t.Helper()
	files, err := LoadRules(ruleDir)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		for _, g := range files[name].Groups {
			out = append(out, g.Rules...)
		}
	}
	return out
}

// contract is what docs/metrics.md says of metrics and labels.
func contract(t *testing.T) (metrics, labels map[string]bool) {
	t.Helper()
	b, err := os.ReadFile(metricsDoc)
	if err != nil {
		t.Fatal(err)
	}
	metrics, labels = map[string]bool{}, map[string]bool{}
	inLabels := false
	for _, line := range strings.Split(string(b), "\n") {
		if strings.HasPrefix(line, "## ") {
			inLabels = line == "## Labels"
		}
		if m := regexp.MustCompile("^\\| `(rdmabench_\\w+)`").FindStringSubmatch(line); m != nil {
			metrics[m[1]] = true
		}
		if cells := strings.Split(line, "|"); inLabels && len(cells) > 2 {
			for _, l := range regexp.MustCompile(`\w+`).FindAllString(cells[1], -1) {
				labels[l] = true
			}
		}
	}
	if len(metrics) < 20 || len(labels) < 20 {
		t.Fatalf("%s: found %d metrics and %d labels; has its format changed?", metricsDoc, len(metrics), len(labels))
	}
	return metrics, labels
}

func parse(t *testing.T, q Query) parser.Expr {
	t.Helper()
	e, err := parser.NewParser(parser.Options{}).ParseExpr(forParser.Expand(q.Expr))
	if err != nil {
		t.Fatalf("%s: %v\n%s", q.Where, err, q.Expr)
	}
	return e
}

// selectors calls f with each vector selector and the nodes around it, outermost first.
func selectors(e parser.Expr, f func(s *parser.VectorSelector, path []parser.Node)) {
	parser.Inspect(e, func(n parser.Node, path []parser.Node) error {
		if s, ok := n.(*parser.VectorSelector); ok {
			f(s, path)
		}
		return nil
	})
}

// names returns the metrics a selector selects, given those there are.
func names(s *parser.VectorSelector, all map[string]bool) []string {
	if s.Name != "" {
		return []string{s.Name}
	}
	var out []string
	for _, m := range s.LabelMatchers {
		if m.Name != "__name__" {
			continue
		}
		for n := range all {
			if m.Matches(n) {
				out = append(out, n)
			}
		}
	}
	return out
}
