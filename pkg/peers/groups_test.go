package peers

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestGroups(t *testing.T) {
	const asYAML = `
- targets: [gpu1, "10.0.0.2:99", "fd00::3", "[fd00::4]:99", gpu5.example.org]
  labels: {rack: r1, __meta_consul_dc: dc1, pod: "", rail: 3}
- targets: ["10.0.0.6"]
  labels: {name: gpu6, lame_duck: "true"}
`
	const asJSON = `[
 {"targets": ["gpu1", "10.0.0.2:99", "fd00::3", "[fd00::4]:99", "gpu5.example.org"], "labels": {"rack": "r1", "__meta_consul_dc": "dc1", "pod": "", "rail": "3"}},
 {"targets": ["10.0.0.6"], "labels": {"name": "gpu6", "lame_duck": "true"}}
]`
	labels := map[string]string{"rack": "r1", "rail": "3"}
	want := []Peer{
		{"gpu1", "gpu1:18516", labels},
		{"10.0.0.2", "10.0.0.2:99", labels},
		{"fd00::3", "[fd00::3]:18516", labels},
		{"fd00::4", "[fd00::4]:99", labels},
		{"gpu5", "gpu5.example.org:18516", labels},
		{"gpu6", "10.0.0.6:18516", map[string]string{"lame_duck": "true"}},
	}
	for name, parse := range map[string]func() ([]group, error){
		"YAML":         func() ([]group, error) { return parseYAML([]byte(asYAML)) },
		"JSON":         func() ([]group, error) { return parseJSON([]byte(asJSON)) },
		"JSON as YAML": func() ([]group, error) { return parseYAML([]byte(asJSON)) },
	} {
		groups, err := parse()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		f, err := collect(groups, "gpu1")
		if diff := cmp.Diff(want, f.peers); err != nil || diff != "" || f.problems != nil {
			t.Errorf("%s: %v %q %s", name, err, f.problems, diff)
		}
	}
	groups, _ := parseYAML([]byte(asYAML))
	if f, _ := collect(groups, "gpu1.example.org"); f.peers[4].Name != "gpu5.example.org" {
		t.Errorf("a node with a domain calls another %q", f.peers[4].Name)
	}
}

// What is wrong with an entry costs that entry, not its neighbours.
func TestBadEntries(t *testing.T) {
	groups, err := parseYAML([]byte(`
- targets: ["gpu1:0", good, "http://gpu2/", "", "_x"]
  labels: {bad-label: x, rack: r1, long: ` + strings.Repeat("x", 200) + `}
- targets: [a, b]
  labels: {name: both}
`))
	if err != nil {
		t.Fatal(err)
	}
	f, err := collect(groups, "own")
	want := []Peer{{"good", "good:18516", map[string]string{"rack": "r1"}}, {"a", "a:18516", nil}, {"b", "b:18516", nil}}
	if diff := cmp.Diff(want, f.peers); err != nil || diff != "" {
		t.Error(err, diff)
	}
	all := strings.Join(f.problems, "\n")
	for _, part := range []string{`target "gpu1:0"`, `target "http://gpu2/"`, `target ""`, `"_x" can't be a name`, `"bad-label"`, "label long", `name="both" for 2 targets`} {
		if !strings.Contains(all, part) {
			t.Errorf("nothing tells of %s:\n%s", part, all)
		}
	}
}

func TestBrokenFiles(t *testing.T) {
	for _, c := range []struct{ yaml, want string }{
		{"", "the file is empty"},
		{"# nothing\n", "the file is empty"},
		{"null", "the file is empty"},
		{"- targets: [a\n", "1:1: "},
		{"targets: [a]", "want a list of"},
		{"- targets: []\n- target: [a]", "2:1: field target not found"},
		{"- targets: [a]\n---\n- targets: [b]", "more than one"},
		{"- targets: [a]\n  targets: [b]", "already defined"},
	} {
		if g, err := parseYAML([]byte(c.yaml)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v %v, want %s", c.yaml, g, err, c.want)
		}
	}
	for _, c := range []struct{ json, want string }{
		{"", "1:1: EOF"},
		{"null", "write []"},
		{"[{\"targets\": [\"a\"]},\n {\"targets\": \"b\"}]", "2:"},
		{"[\n{\"targets\": [}]", "2:14: "},
		{`[{"target": ["a"]}]`, `unknown field "target"`},
		{`[] []`, "more after the end"},
		{"<html>", "1:1: "},
	} {
		if g, err := parseJSON([]byte(c.json)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v %v, want %s", c.json, g, err, c.want)
		}
	}
	for _, parse := range []func([]byte) ([]group, error){parseJSON, parseYAML} {
		if g, err := parse([]byte("[]")); err != nil || len(g) != 0 {
			t.Errorf("[] is %v, %v: it means that there are no peers", g, err)
		}
	}
}

func TestTooMany(t *testing.T) {
	var b strings.Builder
	b.WriteString("[")
	for i := range MaxPeers + 1 {
		fmt.Fprintf(&b, "{\"targets\": [\"h%d\"]},", i)
	}
	b.WriteString("{}]")
	groups, err := parseJSON([]byte(b.String()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := collect(groups, "own"); err == nil {
		t.Error("no error")
	}
}

func FuzzGroups(f *testing.F) {
	for _, s := range []string{
		"", "[]", "- targets: [a]", `[{"targets": ["a:1"], "labels": {"rack": "r"}}]`, "- targets: [&a b, *a]\n  labels: {<<: {x: y}}", "a: &a [*a]", "\x00", "- targets: [\"\\ud800\"]",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, parse := range []func([]byte) ([]group, error){parseJSON, parseYAML} {
			groups, err := parse(data)
			if err != nil {
				continue
			}
			got, err := collect(groups, "own")
			if err != nil {
				continue
			}
			for _, p := range got.peers {
				if again, err := ParseAddress(p.Address, false); err != nil || again != p.Address {
					t.Fatalf("address %q is read as %q, %v", p.Address, again, err)
				}
				if !ValidName(p.Name) {
					t.Fatalf("name %q", p.Name)
				}
				for k, v := range p.Labels {
					if !ValidLabel(k) || v == "" || len(v) > maxLabelValue {
						t.Fatalf("label %q=%q", k, v)
					}
				}
			}
		}
	})
}
