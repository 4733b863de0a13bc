package promcheck

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"gopkg.in/yaml.v3"
)

// TestRules has promtool lint the rules, run their tests and read the example configuration.
func TestRules(t *testing.T) {
	t.Parallel()
	promtool := tool(t, "promtool")
	files, err := filepath.Glob(ruleDir + "/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no rules", err)
	}
	command(t, promtool, append([]string{"check", "rules", "--lint=all", "--lint-fatal"}, files...)...)

	tests, err := filepath.Glob(ruleDir + "/tests/*.yaml")
	if err != nil || len(tests) == 0 {
		t.Fatal("no tests of rules", err)
	}
	for _, f := range tests {
		t.Run(filepath.Base(f), func(t *testing.T) {
			t.Parallel()
			command(t, promtool, "test", "rules", f)
		})
	}
}

// The example is for Prometheus 3; what an older one does not know can be left out, as its comment says.
func TestConfig(t *testing.T) {
	promtool := tool(t, "promtool")
	b, err := os.ReadFile(configDir + "/prometheus.yaml")
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	if !strings.Contains(text, "\n    scrape_native_histograms: true\n") {
		t.Error("prometheus.yaml does not ask for native histograms")
	}
	if version, _ := exec.Command(promtool, "--version").CombinedOutput(); strings.Contains(string(version), "version 2.") {
		text = strings.Replace(text, "    scrape_native_histograms: true\n", "", 1)
	}
	// Rules are looked for beside the configuration.
	dir := t.TempDir()
	rules, err := filepath.Abs(ruleDir)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(rules, filepath.Join(dir, "rules")); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "prometheus.yaml")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	command(t, promtool, "check", "config", file)
}

func command(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput(); err != nil {
		t.Errorf("%s %s: %v\n%s", filepath.Base(name), strings.Join(args, " "), err, out)
	}
}

// Every alert has a case in which it fires and one in which it does not, a severity, and words for who is woken.
func TestAlertsAreTested(t *testing.T) {
	type ruleTest struct {
		Name          string
		AlertRuleTest []struct {
			AlertName string `yaml:"alertname"`
			ExpAlerts []any  `yaml:"exp_alerts"`
		} `yaml:"alert_rule_test"`
		PromQLExprTest []struct {
			Expr       string
			ExpSamples []struct{ Labels string } `yaml:"exp_samples"`
		} `yaml:"promql_expr_test"`
	}
	fires, silent := map[string]bool{}, map[string]bool{}
	files, err := filepath.Glob(ruleDir + "/tests/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		var doc struct{ Tests []ruleTest }
		if err := yaml.Unmarshal(b, &doc); err != nil {
			t.Fatalf("%s: %v", f, err)
		}
		inFile := map[string]bool{}
		for _, c := range doc.Tests {
			for _, a := range c.AlertRuleTest {
				if inFile[a.AlertName] = true; len(a.ExpAlerts) > 0 {
					fires[a.AlertName] = true
				} else {
					silent[a.AlertName] = true
				}
			}
		}
		// An expectation of all alerts that fire says of the others that they do not, of those this file is about.
		for _, c := range doc.Tests {
			for _, e := range c.PromQLExprTest {
				if !strings.Contains(e.Expr, `alertstate="firing"`) {
					continue
				}
				listed := ""
				for _, s := range e.ExpSamples {
					listed += s.Labels
				}
				for a := range inFile {
					if !strings.Contains(listed, `"`+a+`"`) && !strings.Contains(e.Expr, `alertname!="`+a+`"`) {
						silent[a] = true
					}
				}
			}
		}
	}
	for _, r := range rules(t) {
		if r.Record != "" {
			if !regexp.MustCompile(`^(pair|nic|peer|probe|port):rdmabench_\w+:\w+$`).MatchString(r.Record) {
				t.Errorf("%s: a recorded name is level:metric:operation", r.Record)
			}
			continue
		}
		if !fires[r.Alert] || !silent[r.Alert] {
			t.Errorf("%s: has a case in which it fires: %v; one in which it does not: %v", r.Alert, fires[r.Alert], silent[r.Alert])
		}
		switch r.Labels["severity"] {
		case "critical", "warning", "info":
		default:
			t.Errorf("%s: severity %q", r.Alert, r.Labels["severity"])
		}
		if r.For == "" {
			t.Errorf("%s: fires at the first evaluation", r.Alert)
		}
		for _, a := range []string{"summary", "description"} {
			if r.Annotations[a] == "" {
				t.Errorf("%s: no %s", r.Alert, a)
			}
		}
	}
}
