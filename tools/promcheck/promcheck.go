// Package promcheck reads the dashboards and the Prometheus rules of this repository. Its tests hold them
// against what the daemons export: by docs/metrics.md, by promtool, and by a Prometheus that scrapes a fleet.
package promcheck

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"gopkg.in/yaml.v3"
)

// Dashboard is the part of Grafana's classic dashboard JSON that the tests look at.
type Dashboard struct {
	UID, Title    string
	Editable      bool
	Panels        []Panel
	SchemaVersion int
	Templating    struct{ List []Variable }
	Annotations   struct{ List []Annotation }
}

// Panel is a panel or, with Type row, a heading.
type Panel struct {
	ID                       int
	Type, Title, Description string
	Datasource               Datasource
	GridPos                  struct{ X, Y, W, H int }
	Targets                  []Target
	FieldConfig              struct {
		Defaults  struct{ Unit string }
		Overrides []struct {
			Matcher    struct{ ID, Options string }
			Properties []struct {
				ID    string
				Value any
			}
		}
	}
	Transformations []struct {
		ID      string
		Options map[string]any
	}
	Panels []Panel // of a collapsed row
}

// Target is a query of a panel.
type Target struct {
	RefID, Expr, LegendFormat, Format string
	Instant, Range                    bool
	Datasource                        Datasource
}

// Datasource is a reference to one.
type Datasource struct{ Type, UID string }

// Variable is a template variable.
type Variable struct {
	Name, Type, Description string
	Query                   any
	Refresh                 int
	Datasource              Datasource
}

// Annotation is a query whose results are marked in all panels.
type Annotation struct {
	Name, Expr string
	Datasource Datasource
}

// Rule is a recording or an alerting rule.
type Rule struct {
	Record        string
	Alert         string
	Expr          string
	For           string
	KeepFiringFor string `yaml:"keep_firing_for"`
	Labels        map[string]string
	Annotations   map[string]string
}

// Name is what the rule is called.
func (r Rule) Name() string { return r.Record + r.Alert }

// RuleFile is a file of rules.
type RuleFile struct {
	Groups []struct {
		Name     string
		Interval string `yaml:",omitempty"`
		Rules    []Rule
	}
}

// Query is an expression and where it is from.
type Query struct {
	Where string // dashboard/panel/query, or rule/its name
	Expr  string // with Grafana's variables still in it
	Range bool   // evaluated over a time range
	Heat  bool   // wants histograms, not numbers
}

// LoadDashboards reads all dashboards in dir, by file name.
func LoadDashboards(dir string) (map[string]*Dashboard, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("no dashboards in %s", dir)
	}
	out := map[string]*Dashboard{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		d := &Dashboard{Editable: true} // Grafana's default
		if err := json.Unmarshal(b, d); err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		out[filepath.Base(f)] = d
	}
	return out, nil
}

// All returns the panels with those inside of collapsed rows.
func (d *Dashboard) All() (out []Panel) {
	for _, p := range d.Panels {
		out = append(out, p)
		out = append(out, p.Panels...)
	}
	return out
}

// Queries returns the queries of the panels, annotations and variables.
func (d *Dashboard) Queries() (out []Query) {
	for _, p := range d.All() {
		for _, t := range p.Targets {
			out = append(out, Query{Where: p.Title + "/" + t.RefID, Expr: t.Expr, Range: !t.Instant, Heat: t.Format == "heatmap"})
		}
	}
	for _, a := range d.Annotations.List {
		if a.Expr != "" {
			out = append(out, Query{Where: "annotation/" + a.Name, Expr: a.Expr, Range: true})
		}
	}
	for _, v := range d.Templating.List {
		if m := labelValues.FindStringSubmatch(v.query()); m != nil {
			out = append(out, Query{Where: "variable/" + v.Name, Expr: "count by (" + m[2] + ") (" + m[1] + ")"})
		}
	}
	return out
}

var labelValues = regexp.MustCompile(`^label_values\((.+), (\w+)\)$`)

func (v Variable) query() string {
	s, _ := v.Query.(string)
	return s
}

// Variables maps a Grafana variable to what stands in for it.
type Variables map[string]string

var variable = regexp.MustCompile(`\$\{?(\w+)\}?`)

// Expand puts values in place of the variables. Those that are not in v match everything.
func (v Variables) Expand(expr string) string {
	return variable.ReplaceAllStringFunc(expr, func(s string) string {
		name := strings.Trim(s, "${}")
		if value, ok := v[name]; ok {
			return value
		}
		return ".*"
	})
}

// LoadRules reads all rule files in dir, by file name.
func LoadRules(dir string) (map[string]*RuleFile, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("no rules in %s", dir)
	}
	out := map[string]*RuleFile{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		r := &RuleFile{}
		if err := yaml.Unmarshal(b, r); err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		out[filepath.Base(f)] = r
	}
	return out, nil
}
