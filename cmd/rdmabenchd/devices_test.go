package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters/sysfstest"
)

// elsewhere is what the expected files have and a tree can't tell.
var elsewhere = map[string]bool{"kernel": true, "wrap_case": true, "ethtool": true, "link_classes": true}

// missing lists what of want is not in got. More fields are fine.
func missing(path string, want, got any) []string {
	switch want := want.(type) {
	case map[string]any:
		m, ok := got.(map[string]any)
		if !ok {
			return []string{fmt.Sprintf("%s: %v is no object", path, got)}
		}
		var out []string
		for k, v := range want {
			if elsewhere[k] {
				continue
			}
			g, ok := m[k]
			if !ok {
				out = append(out, path+"."+k+" is not there")
				continue
			}
			out = append(out, missing(path+"."+k, v, g)...)
		}
		return out
	case []any:
		list, _ := got.([]any)
		if len(list) != len(want) {
			return []string{fmt.Sprintf("%s has %d elements, want %d", path, len(list), len(want))}
		}
		var out []string
		for i := range want {
			out = append(out, missing(fmt.Sprintf("%s[%d]", path, i), want[i], list[i])...)
		}
		return out
	}
	if diff := cmp.Diff(want, got); diff != "" {
		return []string{path + ": " + diff}
	}
	return nil
}

// byName makes a map of the devices: their order is not part of the contract.
func byName(t *testing.T, data []byte) map[string]any {
	t.Helper()
	var v map[string]any
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatalf("%v: %s", err, data)
	}
	devices := map[string]any{}
	for _, d := range v["devices"].([]any) {
		devices[d.(map[string]any)["device"].(string)] = d
	}
	v["devices"] = devices
	return v
}

// The shape that scripts rely on stays, whatever else is in it.
func TestDevicesJSON(t *testing.T) {
	for _, tree := range sysfstest.Names() {
		t.Run(tree, func(t *testing.T) {
			var out, errs bytes.Buffer
			if code := run([]string{"devices", "--json", "--sysfs.root", sysfstest.Tree(t, tree)}, &out, &errs); code != exitOK {
				t.Fatalf("exit %d: %s", code, errs.String())
			}
			got := byName(t, out.Bytes())
			for _, m := range missing("", byName(t, sysfstest.Expected(t, tree)), got) {
				t.Error(m)
			}
			for name, d := range got["devices"].(map[string]any) {
				for _, p := range d.(map[string]any)["ports"].([]any) {
					p := p.(map[string]any)
					if p["usable"] != nil || p["rail"] != nil {
						t.Errorf("%s: a copied tree knows of verbs: %v, %v", name, p["usable"], p["rail"])
					}
					if env, ok := p["environment"].(map[string]any); !ok || env["device"] != name {
						t.Errorf("%s: environment %v", name, p["environment"])
					}
					if checks, ok := p["checks"].([]any); !ok || len(checks) == 0 {
						t.Errorf("%s: checks %v", name, p["checks"])
					}
				}
			}
		})
	}
}

// Every port has a line, with what is wrong in it.
func TestDevicesTable(t *testing.T) {
	for _, tt := range []struct {
		tree  string
		lines int
		says  []string
	}{
		{"pcie-degraded", 1, []string{"mlx5_0", "192.0.2.110", "8 GT/s x8", "pcie_degraded", "pcie-width", "mlx5_0 port 1: pcie-width: x8, expected x16", "cpu_governor_powersave"}},
		{"mixed-port-down", 5, []string{"port_down", "port_not_active"}},
		{"rxe", 2, []string{"rxe0", "software_rdma"}},
	} {
		var out, errs bytes.Buffer
		if code := run([]string{"devices", "--sysfs.root", sysfstest.Tree(t, tt.tree)}, &out, &errs); code != exitOK {
			t.Fatalf("%s: exit %d: %s", tt.tree, code, errs.String())
		}
		for _, s := range tt.says {
			if !strings.Contains(out.String(), s) {
				t.Errorf("%s: no %q in\n%s", tt.tree, s, out.String())
			}
		}
		head := out.String()
		table := 0
		for _, line := range strings.Split(head, "\n")[1:] {
			if strings.Contains(line, "  ") {
				table++
			}
		}
		if table != tt.lines {
			t.Errorf("%s: %d lines, want %d:\n%s", tt.tree, table, tt.lines, head)
		}
		if strings.Count(head, "pcie_degraded pcie_degraded") > 0 {
			t.Errorf("%s: a warning twice:\n%s", tt.tree, head)
		}
	}
}

// A device that only verbs shows is listed with its rail, and usable.
func TestDevicesOfVerbs(t *testing.T) {
	cmd := command(t, newFabric(t), "devices", "--json")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	sim, ok := byName(t, out)["devices"].(map[string]any)["sim0"].(map[string]any)
	if !ok {
		t.Fatalf("no sim0 in %s", out)
	}
	p := sim["ports"].([]any)[0].(map[string]any)
	if p["usable"] != true || p["rail"] == nil || p["reason"] != nil || p["rdma_mtu"] != 4096.0 {
		t.Errorf("usable %v, rail %v, reason %v, MTU %v", p["usable"], p["rail"], p["reason"], p["rdma_mtu"])
	}
}

func TestDevicesWithoutAny(t *testing.T) {
	var out, errs bytes.Buffer
	code := run([]string{"devices", "--json", "--sysfs.root", t.TempDir()}, &out, &errs)
	if code != exitNoDevice || !strings.Contains(errs.String(), "doctor") {
		t.Errorf("exit %d: %s", code, errs.String())
	}
	if v := byName(t, out.Bytes()); len(v["devices"].(map[string]any)) != 0 {
		t.Errorf("devices: %v", v["devices"])
	}
}
