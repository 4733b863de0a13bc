package promcheck

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/promql/parser"
)

func TestDashboards(t *testing.T) {
	uids := map[string]string{}
	for file, d := range dashboards(t) {
		t.Run(file, func(t *testing.T) {
			if d.UID == "" || d.Title == "" || d.Editable || d.SchemaVersion == 0 {
				t.Errorf("uid %q, title %q, editable %v, schemaVersion %d: a provisioned dashboard has all of them and can't be edited", d.UID, d.Title, d.Editable, d.SchemaVersion)
			}
			if other, ok := uids[d.UID]; ok {
				t.Errorf("uid %q is that of %s too", d.UID, other)
			}
			uids[d.UID] = file
			checkPanels(t, d)
			checkLayout(t, d)
			checkVariables(t, d)
		})
	}
}

const datasource = "$datasource"

func checkPanels(t *testing.T, d *Dashboard) {
	ids := map[int]string{}
	titles := map[string]bool{}
	for _, p := range d.All() {
		if other, ok := ids[p.ID]; ok || p.ID <= 0 {
			t.Errorf("%s: id %d is missing or that of %q too", p.Title, p.ID, other)
		}
		ids[p.ID] = p.Title
		if p.Title == "" || titles[p.Title] {
			t.Errorf("panel %d: title %q is missing or not unique", p.ID, p.Title)
		}
		titles[p.Title] = true
		if p.Type == "row" {
			continue
		}
		if len(p.Description) < 20 {
			t.Errorf("%s: no description worth reading: %q", p.Title, p.Description)
		}
		if p.Datasource.UID != datasource {
			t.Errorf("%s: data source %q, not the one chosen", p.Title, p.Datasource.UID)
		}
		if len(p.Targets) == 0 {
			t.Errorf("%s: no query", p.Title)
		}
		refs := map[string]bool{}
		for _, q := range p.Targets {
			if q.RefID == "" || refs[q.RefID] {
				t.Errorf("%s: refId %q is missing or not unique", p.Title, q.RefID)
			}
			refs[q.RefID] = true
			if q.Datasource.UID != datasource {
				t.Errorf("%s: query %s asks data source %q, not the one chosen", p.Title, q.RefID, q.Datasource.UID)
			}
			if q.Instant == q.Range || q.Instant != (p.Type == "table") || (q.Format == "table") != (p.Type == "table") {
				t.Errorf("%s: query %s: a table takes instant values in table format, all else a range", p.Title, q.RefID)
			}
			checkExpr(t, p, q)
		}
		checkUnits(t, p)
	}
}

// checkExpr holds a query against what goes wrong in Grafana without an error.
func checkExpr(t *testing.T, p Panel, q Target) {
	e := parse(t, Query{Where: p.Title, Expr: q.Expr})
	parser.Inspect(e, func(n parser.Node, path []parser.Node) error {
		a, ok := n.(*parser.AggregateExpr)
		if ok && (a.Op == parser.TOPK || a.Op == parser.BOTTOMK) && q.Range && !strings.Contains(a.String(), "@ end()") {
			t.Errorf("%s: %s chooses anew at each step, so that lines come and go; rank with @ end()", p.Title, a.Op)
		}
		return nil
	})
	selectors(e, func(s *parser.VectorSelector, _ []parser.Node) {
		if s.Name == "ALERTS" {
			return // of all nodes: what explains an alert here may be elsewhere
		}
		if !strings.Contains(s.String(), `job=~".*"`) {
			t.Errorf("%s: %s ignores the chosen job", p.Title, s)
		}
	})
	// Probes run far less often than Grafana thinks Prometheus scrapes.
	if m := regexp.MustCompile(`rdmabench_\w+\{[^}]*\}\[(\$__interval|\$__rate_interval|\d\w+)\]`).FindString(q.Expr); m != "" {
		t.Errorf("%s: %s must look back over $window or $__range", p.Title, m)
	}
}

// checkUnits wants a unit for whatever is a number: of the panel, or in a table of each column, as a unit of the
// whole table would be put on labels too.
func checkUnits(t *testing.T, p Panel) {
	if p.Type != "table" {
		if p.FieldConfig.Defaults.Unit == "" {
			t.Errorf("%s: no unit", p.Title)
		}
		return
	}
	if u := p.FieldConfig.Defaults.Unit; u != "" {
		t.Errorf("%s: unit %q for all columns, labels included", p.Title, u)
	}
	told := map[string]bool{}
	for _, o := range p.FieldConfig.Overrides {
		for _, prop := range o.Properties {
			if prop.ID == "unit" || prop.ID == "mappings" {
				told[o.Matcher.Options] = true
			}
		}
	}
	shown := []string{}
	for _, tr := range p.Transformations {
		switch tr.ID {
		case "groupingToMatrix":
			shown = append(shown, "number") // overridden by type, as the columns are nodes
		case "organize":
			renamed := tr.Options["renameByName"].(map[string]any)
			for field := range tr.Options["indexByName"].(map[string]any) {
				if !strings.HasPrefix(field, "Value") {
					continue
				}
				if name, ok := renamed[field].(string); ok {
					field = name
				}
				shown = append(shown, field)
			}
		}
	}
	for _, s := range shown {
		if !told[s] {
			t.Errorf("%s: column %q has no unit", p.Title, s)
		}
	}
}

func checkLayout(t *testing.T, d *Dashboard) {
	cells := map[[2]int]string{}
	for _, p := range d.All() {
		g := p.GridPos
		if g.W < 1 || g.H < 1 || g.X < 0 || g.Y < 0 || g.X+g.W > 24 {
			t.Errorf("%s: at %+v, outside of the grid", p.Title, g)
			continue
		}
		for x := g.X; x < g.X+g.W; x++ {
			for y := g.Y; y < g.Y+g.H; y++ {
				if other, ok := cells[[2]int{x, y}]; ok {
					t.Fatalf("%s lies over %s", p.Title, other)
				}
				cells[[2]int{x, y}] = p.Title
			}
		}
	}
}

func checkVariables(t *testing.T, d *Dashboard) {
	defined := map[string]bool{}
	used := map[string]bool{}
	use := func(where, s string) {
		for _, m := range variable.FindAllStringSubmatch(s, -1) {
			used[m[1]] = true
			if !defined[m[1]] && !strings.HasPrefix(m[1], "__") {
				t.Errorf("%s: no variable %s", where, m[0])
			}
		}
	}
	for _, v := range d.Templating.List {
		use("variable "+v.Name, v.Datasource.UID+" "+v.query()) // those before it
		defined[v.Name] = true
		if v.Description == "" {
			t.Errorf("variable %s: no description", v.Name)
		}
		if v.Type == "query" && (v.Datasource.UID != datasource || v.Refresh != 2 || !labelValues.MatchString(v.query())) {
			t.Errorf("variable %s: must ask the chosen data source for label_values whenever the time range changes", v.Name)
		}
	}
	for _, a := range d.Annotations.List {
		use("annotation "+a.Name, a.Datasource.UID+" "+a.Expr)
		if a.Datasource.UID != datasource {
			t.Errorf("annotation %s: data source %q, not the one chosen", a.Name, a.Datasource.UID)
		}
	}
	for _, p := range d.All() {
		for _, q := range p.Targets {
			use(p.Title, q.Datasource.UID+" "+q.Expr+" "+q.LegendFormat)
		}
	}
	for _, v := range slices.Sorted(maps.Keys(defined)) {
		if !used[v] {
			t.Errorf("variable %s is not used", v)
		}
	}
}
