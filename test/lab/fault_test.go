package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// commands are the plan's without the two that take down what was set before.
func commands(t *testing.T, node int, fault string) []string {
	t.Helper()
	plan, err := planFault(node, strings.Fields(fault))
	if err != nil {
		t.Fatalf("%s: %v", fault, err)
	}
	var lines []string
	for _, s := range plan {
		if !s.mayFail {
			lines = append(lines, strings.Join(s.argv, " "))
		}
	}
	return lines
}

func TestFaultCommands(t *testing.T) {
	for _, tc := range []struct {
		fault string
		want  []string
	}{
		{"loss 1%", []string{"tc qdisc add dev n2 root handle 1: netem limit 100000 loss 1%"}},
		{"loss 0.5", []string{"tc qdisc add dev n2 root handle 1: netem limit 100000 loss 0.5%"}},
		{"delay 5ms", []string{"tc qdisc add dev n2 root handle 1: netem limit 100000 delay 5000us"}},
		{"delay 5ms 500us loss 1%", []string{"tc qdisc add dev n2 root handle 1: netem limit 100000 delay 5000us 500us loss 1%"}},
		{"rate 160mbit", []string{"tc qdisc add dev n2 root handle 1: tbf rate 160000000bit burst 40000 limit 16817216"}},
		{"delay 1ms rate 1gbit", []string{
			"tc qdisc add dev n2 root handle 1: netem limit 100000 delay 1000us",
			"tc qdisc add dev n2 parent 1:1 handle 2: tbf rate 1000000000bit burst 250000 limit 17027216",
		}},
		{"drop-large", []string{
			"tc qdisc add dev p2 clsact",
			"tc filter add dev p2 ingress protocol ip pref 20 basic match cmp(u16 at 2 layer network gt 1500) action drop",
			"tc filter add dev p2 egress protocol ip pref 20 basic match cmp(u16 at 2 layer network gt 1500) action drop",
		}},
		{"blackhole", []string{
			"tc qdisc add dev p2 clsact",
			"tc filter add dev p2 ingress pref 10 matchall action drop",
			"tc filter add dev p2 egress pref 10 matchall action drop",
		}},
		{"blackhole tx roce drop-large 3000", []string{
			"tc qdisc add dev p2 clsact",
			"tc filter add dev p2 ingress protocol ip pref 10 flower ip_proto udp dst_port 4791 action drop",
			"tc filter add dev p2 ingress protocol ip pref 20 basic match cmp(u16 at 2 layer network gt 3000) action drop",
			"tc filter add dev p2 egress protocol ip pref 20 basic match cmp(u16 at 2 layer network gt 3000) action drop",
		}},
		{"blackhole rx", []string{
			"tc qdisc add dev p2 clsact",
			"tc filter add dev p2 egress pref 10 matchall action drop",
		}},
		{"down", []string{"ip link set n2 down"}},
		{"up", []string{"ip link set n2 up", "ip route replace 10.9.0.0/24 dev n2 src 10.9.0.2 table 102"}},
		{"addr-del", []string{"ip addr del 10.9.0.2/24 dev n2"}},
		{"clear", []string{
			"ip link set n2 up", "ip addr replace 10.9.0.2/24 dev n2",
			"ip route replace 10.9.0.0/24 dev n2 src 10.9.0.2 table 102",
		}},
	} {
		if diff := cmp.Diff(tc.want, commands(t, 2, tc.fault)); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", tc.fault, diff)
		}
	}
}

// A fault replaces the node's earlier ones; link and address are states of their own.
func TestFaultReplaces(t *testing.T) {
	for fault, want := range map[string]int{"loss 1%": 2, "blackhole": 2, "clear": 2, "down": 0, "addr-add": 0} {
		plan, err := planFault(1, strings.Fields(fault))
		if err != nil {
			t.Fatal(err)
		}
		removed := 0
		for _, s := range plan {
			if s.mayFail {
				removed++
			}
		}
		if removed != want {
			t.Errorf("%s removes %d earlier faults, want %d", fault, removed, want)
		}
	}
}

func TestFaultRefused(t *testing.T) {
	for fault, want := range map[string]string{
		"":                  "no fault given",
		"los 1%":            `unknown fault "los"`,
		"loss":              "loss needs a value",
		"loss 101%":         "no percentage",
		"loss NaN":          "no percentage",
		"loss 1% loss 2%":   "given twice",
		"loss 1% 2%":        `unknown fault "2%"`,
		"delay 5":           "no delay",
		"delay -5ms":        "no delay",
		"delay 2m":          "no delay",
		"rate 5":            "no rate",
		"rate 1bit":         "no rate",
		"rate -1mbit":       "no rate",
		"rate nanmbit":      "no rate",
		"reorder 10%":       "needs a delay",
		"loss 1% down":      "stands alone",
		"clear now":         "stands alone",
		"drop-large 70000":  "unknown fault",
		"blackhole tx rx":   "unknown fault",
		"loss 1%;reboot":    "no percentage",
		"drop-large 9) and": "unknown fault",
	} {
		plan, err := planFault(1, strings.Fields(fault))
		if err == nil {
			t.Errorf("%q is taken for %v", fault, plan)
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %q lacks %q", fault, err, want)
		}
	}
}
