package config

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/peers"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule/pairing"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

var update = flag.Bool("update", false, "rewrite the expected errors in testdata")

// testEnv is an environment with the given variables on a host called host1.
func testEnv(vars map[string]string) environment {
	return environment{
		lookup:   func(name string) (string, bool) { v, ok := vars[name]; return v, ok },
		hostname: func() (string, error) { return "host1", nil },
	}
}

func mustParse(t *testing.T, text string, vars map[string]string) *Config {
	t.Helper()
	c, err := parse("test.yaml", []byte(text), testEnv(vars))
	if err != nil {
		t.Fatalf("refused:\n%s\n%s", err, text)
	}
	return c
}

// Each testdata/invalid-NAME.yaml must be refused with the errors in invalid-NAME.want.
func TestInvalid(t *testing.T) {
	files, err := filepath.Glob("testdata/invalid-*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no test data", err)
	}
	for _, file := range files {
		name := filepath.Base(file)
		t.Run(strings.TrimSuffix(name, ".yaml"), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			c, err := parse(name, data, testEnv(nil))
			var errs Errors
			if c != nil || !errors.As(err, &errs) {
				t.Fatalf("accepted, or refused by other than Errors: %v", err)
			}
			got := err.Error() + "\n"
			golden := strings.TrimSuffix(file, ".yaml") + ".want"
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("errors (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDefaults(t *testing.T) {
	for name, text := range map[string]string{
		"empty file":      "",
		"comment":         "# nothing yet\n",
		"document start":  "---\n",
		"null":            "~\n",
		"byte order mark": "\ufeff",
		"empty sections":  "node:\ndevices:\ncontrol:\nlimits:\npeers:\nprobes:\n",
		"empty text":      "node: {name: ''}\ncontrol: {advertise: \"\"}\n",
		"windows":         "node:\r\n  name:\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			c := mustParse(t, text, nil)
			if c.Node.Name != "host1" {
				t.Errorf("node.name %q", c.Node.Name)
			}
			if c.Control != (Control{Listen: "127.0.0.1:18516"}) {
				t.Errorf("control %+v: not just loopback", c.Control)
			}
			if !c.Devices.Use("mlx5_0") || c.Devices.GIDIndex != -1 {
				t.Errorf("devices %+v", c.Devices)
			}
			if want := (Limits{Sessions: 64, Memory: 1 << 30, Message: 64 << 20, Lease: time.Minute}); c.Limits != want {
				t.Errorf("limits %+v", c.Limits)
			}
			if diff := cmp.Diff(probe.DefaultTolerances(), c.Taints); diff != "" {
				t.Errorf("taints (-want +got):\n%s", diff)
			}
			var got []string
			for _, p := range c.Probes {
				got = append(got, fmt.Sprint(p.Spec.Name, p.Spec.Kind, p.Spec.Op, p.Spec.Sizes, p.Schedule, p.Spec.Interval, p.Jitter))
			}
			want := []string{"rttlatencywrite[8] */5 * * * * 5m0s 30s", "bandwidthbandwidthwrite[65536] @hourly 1h0m0s 30s"}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("probes (-want +got):\n%s", diff)
			}
		})
	}
}

func TestNoProbes(t *testing.T) {
	if c := mustParse(t, "probes: []", nil); len(c.Probes) != 0 {
		t.Errorf("an explicitly empty list means respond only, got %d probes", len(c.Probes))
	}
}

func TestEveryKey(t *testing.T) {
	c := mustParse(t, `
node: {name: node1, labels: {rack: r12, site: NO}}
devices: {include: ["mlx5_*", rxe1], exclude: ["*_bond_*"], gid: 3}
control: {listen: "[fd00::1]:1", advertise: node1.example.org, insecure: yes}
limits: {sessions: 8, memory: 2GB, message: 8 MiB, lease: 1m30s}
taints: {retransmit: 5, out-of-order: 1, rnr: 2, timeout: 3, discards: 4, link-errors: 6, congestion: 0, pause: 1, foreign-traffic: 0.5}
peers:
  static:
    - {name: node2, address: "10.9.0.2:18517", labels: {rack: r13}}
    - {name: node3, address: "fd00::3"}
    - {name: node4, address: "[fd00::4]"}
    - {name: node5, address: node5.example.org}
  files: ["peers/*.yaml", /run/peers.json]
  dns:
    - {name: _rdmabench._tcp.fleet.example.org}
    - {name: fleet.example.org., type: AAAA, refresh: 5m}
    - {name: fleet.example.org, type: A, port: 99}
  hostlist: ["gpu[001-128,200]", "r[1-4]n[1-16].example.org:99"]
  http:
    - {url: "https://user:pass@sd.example.org/targets?site=a", refresh: 2m}
    - {url: "http://localhost:8080"}
probes:
  - name: everything
    schedule: "TZ=Europe/Rome 0 2 * * *"
    jitter: 1h
    kind: bandwidth
    transport: rc
    op: read
    sizes: {from: 2, to: 16}
    duration: 2s
    warmup: 7
    tx_depth: 64
    rx_depth: 32
    qps: 4
    cq_mod: 16
    post_list: 8
    mtu: 1024
    service_level: 3
    traffic_class: 106
    flow_label: 9
    ack_timeout: 10s
    retry_count: 5
    rnr_retry: 4
    rdma_cm: true
    memory: {huge_pages: yes, ring: 64MiB, relaxed_ordering: off, gpu: 0}
    deadline: 2m
    pairing: {strategy: all}
  - name: rtt
    schedule: "@every 10s"
    jitter: 0
    kind: message-rate
    op: send
    sizes: [8, 4KiB]
    iterations: 100
  - name: shape
    schedule: "@hourly"
    kind: bandwidth
    transport: rc
    op: write
    duration: 1s
    bidirectional: on
    read_share: 0.25
    rate_limit: 10Gb/s
    repeat: 3
    threads: 2
    qps: 8
    cpus: 2-5
    events: yes
    inline: 0
    flow_labels: 16
    pkey: 0x8001
    pairing: {strategy: all}
  - {name: other-way, schedule: "@hourly", kind: message-rate, transport: uc, op: write-imm, duration: 1s, reverse: true, pairing: {strategy: all}}
  - {name: checked, schedule: "@hourly", kind: latency, transport: ud, op: send, sizes: 64, verify: true, inline: 188, pairing: {strategy: all}}
  - {name: as-perftest, schedule: "@hourly", kind: bandwidth, op: read, tx_depth: 16, profile: perftest, pairing: {strategy: all}}
`, nil)
	probes := c.Probes
	c.Probes = nil
	want := &Config{
		Node:    Node{Name: "node1", Labels: map[string]string{"rack": "r12", "site": "NO"}},
		Devices: Devices{Include: []string{"mlx5_*", "rxe1"}, Exclude: []string{"*_bond_*"}, GIDIndex: 3},
		Control: Control{Listen: "[fd00::1]:1", Advertise: "node1.example.org:18516", Insecure: true},
		Limits:  Limits{Sessions: 8, Memory: 2e9, Message: 8 << 20, Lease: 90 * time.Second},
		Taints: probe.Tolerances{
			probe.TaintRetransmit: 5, probe.TaintOutOfOrder: 1, probe.TaintRNR: 2, probe.TaintTimeout: 3, probe.TaintDiscards: 4, probe.TaintLinkErrors: 6,
			probe.TaintCongestion: 0, probe.TaintPause: 1, probe.TaintForeignTraffic: 0.5,
		},
		Peers: Peers{Static: []Peer{
			{Name: "node2", Address: "10.9.0.2:18517", Labels: map[string]string{"rack": "r13"}},
			{Name: "node3", Address: "[fd00::3]:18516"},
			{Name: "node4", Address: "[fd00::4]:18516"},
			{Name: "node5", Address: "node5.example.org:18516"},
		}, Files: []string{"peers/*.yaml", "/run/peers.json"}, DNS: []peers.DNS{
			{Name: "_rdmabench._tcp.fleet.example.org", Type: "SRV", Refresh: 30 * time.Second},
			{Name: "fleet.example.org", Type: "AAAA", Port: 18516, Refresh: 5 * time.Minute},
			{Name: "fleet.example.org", Type: "A", Port: 99, Refresh: 30 * time.Second},
		}, Hostlist: []string{"gpu[001-128,200]", "r[1-4]n[1-16].example.org:99"}, HTTP: []peers.HTTP{
			{URL: "https://user:pass@sd.example.org/targets?site=a", Refresh: 2 * time.Minute},
			{URL: "http://localhost:8080", Refresh: time.Minute},
		}},
	}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Errorf("config (-want +got):\n%s", diff)
	}
	wantSpecs := []probe.Spec{
		{
			Name: "everything", Kind: probe.Bandwidth, Transport: verbs.RC, Op: verbs.Read, Sizes: []int{2, 4, 8, 16},
			Duration: 2 * time.Second, Warmup: 7, TxDepth: 64, RxDepth: 32, QPs: 4, CQMod: 16, PostList: 8, MTU: 1024,
			ServiceLevel: 3, TrafficClass: 106, FlowLabel: 9, Timeout: 21, Retries: 5, RNRRetry: 4,
			RDMACM:   true,
			Memory:   probe.Memory{HugePages: true, Ring: 64 << 20, StrictOrdering: true, GPU: new(int)},
			Deadline: 2 * time.Minute, Interval: 24 * time.Hour,
		},
		{
			Name: "rtt", Kind: probe.MessageRate, Transport: verbs.RC, Op: verbs.Send, Sizes: []int{8, 4096},
			Iterations: 100, Interval: 10 * time.Second,
		},
		{
			Name: "shape", Kind: probe.Bandwidth, Transport: verbs.RC, Op: verbs.Write, Duration: time.Second, Bidirectional: true, ReadShare: 0.25, RateLimit: 1.25e9,
			Repeat: 3, Threads: 2, QPs: 8, CPUs: []int{2, 3, 4, 5}, Events: true, Inline: -1, FlowLabels: 16, PKey: 0x8001, Interval: time.Hour,
		},
		{Name: "other-way", Kind: probe.MessageRate, Transport: verbs.UC, Op: verbs.WriteImm, Duration: time.Second, Reverse: true, Interval: time.Hour},
		{Name: "checked", Kind: probe.Latency, Transport: verbs.UD, Op: verbs.Send, Sizes: []int{64}, Verify: true, Inline: 188, Interval: time.Hour},
		{
			Name: "as-perftest", Kind: probe.Bandwidth, Transport: verbs.RC, Op: verbs.Read, Iterations: 1000, TxDepth: 16, RxDepth: 1, CQMod: 1, Warmup: -1,
			Timeout: 14, Retries: 7, RNRRetry: 7, Interval: time.Hour,
		},
	}
	for i, p := range probes {
		if diff := cmp.Diff(wantSpecs[i], p.Spec); diff != "" {
			t.Errorf("probe %d (-want +got):\n%s", i, diff)
		}
		if p.Pairing.Strategy != pairing.All || p.Pairing.Rails != SameRails {
			t.Errorf("probe %d: pairing %+v", i, p.Pairing)
		}
	}
	c.Probes = probes
	for i, p := range mustParse(t, string(c.Effective()), nil).Probes {
		want := probes[i].Spec.WithDefaults()
		want.Exclusive = want.Heavy() // written down
		if diff := cmp.Diff(want, p.Spec.WithDefaults()); diff != "" {
			t.Errorf("probe %d read back from its effective form (-want +got):\n%s", i, diff)
		}
	}
	if probes[0].Jitter != time.Hour || probes[0].Schedule.String() != "TZ=Europe/Rome 0 2 * * *" || probes[1].Jitter != 0 {
		t.Errorf("timing: %s after %s, %s", probes[0].Jitter, probes[0].Schedule, probes[1].Jitter)
	}
}

func TestPairing(t *testing.T) {
	for _, tt := range []struct {
		name, probe string
		want        Pairing
		need        time.Duration
		jitter      time.Duration
	}{
		{
			name: "left out", probe: "schedule: '@hourly', kind: latency", jitter: 30 * time.Second,
			want: Pairing{Rule: pairing.Rule{Strategy: pairing.All}, Rails: SameRails},
		},
		{
			name: "random", probe: "schedule: '@hourly', kind: latency, pairing: {strategy: random, peers: 3, rails: all, where: {rack: other, pod: same}}", jitter: 30 * time.Second,
			want: Pairing{Rule: pairing.Rule{Strategy: pairing.Random, Peers: 3, Where: map[string]pairing.Match{"rack": pairing.Other, "pod": pairing.Same}}, Rails: AllRails},
		},
		{
			name: "ring with the default of peers", probe: "schedule: '@hourly', kind: latency, pairing: {strategy: ring}", jitter: 30 * time.Second,
			want: Pairing{Rule: pairing.Rule{Strategy: pairing.Ring, Peers: 8}, Rails: SameRails},
		},
		{
			name: "a nightly tournament", probe: "schedule: '0 2 * * *', kind: bandwidth, duration: 2s, pairing: {strategy: tournament, rounds: 100, slot: 20s, exclusive: true}",
			want: Pairing{Rule: pairing.Rule{Strategy: pairing.Tournament}, Rounds: 100, Slot: 20 * time.Second, Rails: SameRails}, need: 3200 * time.Millisecond,
		},
		{
			name: "a tournament with defaults", probe: "schedule: '0 2 * * *', jitter: 0, kind: bandwidth, pairing: {strategy: tournament}",
			want: Pairing{Rule: pairing.Rule{Strategy: pairing.Tournament}, Rounds: 64, Slot: 10 * time.Second, Rails: SameRails}, need: 2500 * time.Millisecond,
		},
		{
			name: "no more rounds than fit", probe: "schedule: '@every 1m', kind: bandwidth, pairing: {strategy: tournament}",
			want: Pairing{Rule: pairing.Rule{Strategy: pairing.Tournament}, Rounds: 6, Slot: 10 * time.Second, Rails: SameRails}, need: 2500 * time.Millisecond,
		},
		{
			name: "a slot is as long as both directions", probe: "schedule: '0 2 * * *', kind: bandwidth, sizes: {from: 2, to: 8MiB}, duration: 2s, pairing: {strategy: tournament, rounds: 64, slot: 10s}",
			want: Pairing{Rule: pairing.Rule{Strategy: pairing.Tournament}, Rounds: 64, Slot: 105 * time.Second, Rails: SameRails}, need: 51600 * time.Millisecond,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := mustParse(t, "probes: [{name: a, "+tt.probe+"}]", nil).Probes[0]
			if diff := cmp.Diff(tt.want, p.Pairing); diff != "" || p.Jitter != tt.jitter {
				t.Errorf("jitter %s, want %s; pairing (-want +got):\n%s", p.Jitter, tt.jitter, diff)
			}
			if tt.need == 0 {
				return
			}
			want := pairing.Timetable{Rounds: tt.want.Rounds, Slot: tt.want.Slot, Need: tt.need, InTurn: true}
			if diff := cmp.Diff(want, p.Timetable()); diff != "" {
				t.Errorf("time-table (-want +got):\n%s", diff)
			}
		})
	}
	quiet := mustParse(t, "probes: [{name: a, schedule: '@hourly', kind: latency, pairing: {exclusive: yes}}]", nil).Probes[0]
	if !quiet.Spec.Heavy() {
		t.Error("an exclusive latency shares its port")
	}
}

// YAML 1.1 would make something else of each of these.
func TestTextStaysText(t *testing.T) {
	names := []string{"no", "on", "y", "NO", "007", "1e3", "12:30:45", "0o17", "0x10", "10.10", "2024-01-01", "true", "1_000"}
	var b strings.Builder
	b.WriteString("peers:\n  static:\n")
	for i, n := range names {
		fmt.Fprintf(&b, "    - {name: %s, address: 10.0.0.%d, labels: {site: %s}}\n", n, i+1, n)
	}
	var got []string
	for _, p := range mustParse(t, b.String(), nil).Peers.Static {
		got = append(got, p.Name)
		if p.Labels["site"] != p.Name {
			t.Errorf("label %q of peer %q", p.Labels["site"], p.Name)
		}
	}
	if diff := cmp.Diff(names, got); diff != "" {
		t.Errorf("names (-want +got):\n%s", diff)
	}
	for text, want := range map[string]bool{"yes": true, "on": true, "'true'": true, "no": false, `"off"`: false, "false": false} {
		if got := mustParse(t, "control: {insecure: "+text+"}", nil).Control.Insecure; got != want {
			t.Errorf("insecure: %s is %t", text, got)
		}
	}
}

func TestExpansion(t *testing.T) {
	vars := map[string]string{"NODE": "3", "EMPTY": "", "TRICK": "${NODE}: {a: b}", "N": "200"}
	c := mustParse(t, `
node: {name: "node${NODE}", labels: {a: "$${NODE}", b: "$NODE $5", c: "${TRICK}", d: "${EMPTY}", e: "${NODE}${NODE}", f: "$$${NODE}"}}
probes: [{name: a, schedule: "@hourly", kind: latency, iterations: "${N}"}]
`, vars)
	if c.Node.Name != "node3" || c.Probes[0].Spec.Iterations != 200 {
		t.Errorf("name %q, %d iterations", c.Node.Name, c.Probes[0].Spec.Iterations)
	}
	want := map[string]string{"a": "${NODE}", "b": "$NODE $5", "c": "${NODE}: {a: b}", "e": "33", "f": "$${NODE}"}
	if diff := cmp.Diff(want, c.Node.Labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(c.Node, mustParse(t, string(c.Effective()), nil).Node); diff != "" {
		t.Errorf("read back from its effective form (-want +got):\n%s", diff)
	}
}

func TestAnchorsAndMerge(t *testing.T) {
	c := mustParse(t, `
x-probe: &base {schedule: "@every 1m", kind: latency, iterations: 50, qps: 1}
x-more: &more {iterations: 60, sizes: &s [8, 64]}
probes:
  - {<<: *base, name: a}
  - {name: b, <<: *base, iterations: 70}
  - {name: c, <<: [*more, *base]}
  - {name: d, schedule: "@hourly", kind: bandwidth, sizes: *s}
`, nil)
	var got []string
	for _, p := range c.Probes {
		got = append(got, fmt.Sprint(p.Spec.Name, " ", p.Schedule, " ", p.Spec.Iterations, " ", p.Spec.Sizes))
	}
	want := []string{"a @every 1m 50 []", "b @every 1m 70 []", "c @every 1m 60 [8 64]", "d @hourly 0 [8 64]"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("probes (-want +got):\n%s", diff)
	}
}

// A 0 that was written means none and not the default.
func TestExplicitZero(t *testing.T) {
	c := mustParse(t, `
probes:
  - {name: a, schedule: "@hourly", kind: latency, warmup: 0, retry_count: 0, rnr_retry: 0}
  - {name: b, schedule: "@hourly", kind: latency}
`, nil)
	if a := c.Probes[0].Spec; a.Warmup >= 0 || a.Retries >= 0 || a.RNRRetry >= 0 {
		t.Errorf("lost: %+v", a)
	}
	if b := c.Probes[1].Spec; b.Warmup != 0 || b.Retries != 0 || b.RNRRetry != 0 {
		t.Errorf("not the default: %+v", b)
	}
	for _, line := range []string{"warmup: 0", "retry_count: 0", "rnr_retry: 0"} {
		if !strings.Contains(string(c.Effective()), line) {
			t.Errorf("the effective configuration has no %q", line)
		}
	}
}

func TestDevicesUse(t *testing.T) {
	tests := []struct {
		include, exclude string
		device           string
		want             bool
	}{
		{"[rxe1]", "[]", "rxe1", true},
		{"[rxe1]", "[]", "rxe10", false},
		{`["mlx5_*"]`, `["*_bond_*"]`, "mlx5_0", true},
		{`["mlx5_*"]`, `["*_bond_*"]`, "mlx5_bond_0", false},
		{`["mlx5_[0-3]"]`, "[]", "mlx5_4", false},
		{`["*"]`, `["*"]`, "mlx5_0", false},
	}
	for _, tt := range tests {
		c := mustParse(t, fmt.Sprintf("devices: {include: %s, exclude: %s}", tt.include, tt.exclude), nil)
		if got := c.Devices.Use(tt.device); got != tt.want {
			t.Errorf("include %s, exclude %s: Use(%s) = %t", tt.include, tt.exclude, tt.device, got)
		}
	}
}

func TestRails(t *testing.T) {
	rail := func(c *Config, device string, port, auto int) string { return c.Devices.Rail(device, port, auto) }
	for _, text := range []string{"", "devices: {rails: auto}"} {
		if got := rail(mustParse(t, text, nil), "mlx5_3", 1, 7); got != "7" {
			t.Errorf("%q: rail %q, want the place among the ports", text, got)
		}
	}
	c := mustParse(t, "devices: {rails: {mlx5_0: 4, mlx5_3/1: 0, mlx5_3/2: 1}}", nil)
	for _, tt := range []struct {
		device string
		port   int
		want   string
	}{{"mlx5_0", 1, "4"}, {"mlx5_0", 2, ""}, {"mlx5_3", 1, "0"}, {"mlx5_3", 2, "1"}, {"mlx5_4", 1, ""}} {
		if got := rail(c, tt.device, tt.port, 7); got != tt.want {
			t.Errorf("%s port %d: rail %q, want %q", tt.device, tt.port, got, tt.want)
		}
	}
}

func TestListenDefaults(t *testing.T) {
	for text, want := range map[string]string{
		"":                                          "127.0.0.1:18516",
		"control: {insecure: true}":                 ":18516",
		"control: {listen: '127.0.0.2:7'}":          "127.0.0.2:7",
		"control: {listen: '::1'}":                  "[::1]:18516",
		"control: {listen: 'localhost:7'}":          "localhost:7",
		"control: {listen: ':7', insecure: on}":     ":7",
		"control: {listen: 10.9.0.1, insecure: on}": "10.9.0.1:18516",
	} {
		if got := mustParse(t, text, nil).Control.Listen; got != want {
			t.Errorf("%q listens on %q, want %q", text, got, want)
		}
	}
}

// Bounds keep a hostile or broken file from costing memory or time.
func TestBounds(t *testing.T) {
	repeat := func(s string, n int) string { return strings.Repeat(s, n) }
	bomb := "x-a: &a {k: v}\n"
	for i := range 12 {
		name, before := string(rune('b'+i)), string(rune('a'+i))
		bomb += fmt.Sprintf("x-%s: &%s {<<: [%s*%s]}\n", name, name, repeat("*"+before+", ", 30), before)
	}
	tests := []struct{ name, text, want string }{
		{"huge file", "# " + repeat("x", maxFile), "larger than"},
		{"alias bomb", bomb + "node: {<<: *m}\n", "merge keys within each other"},
		{"wide alias bomb", bomb + "node: {<<: *g}\n", "aliases (*) repeat too much"},
		{"deep nesting", "node: " + repeat("[", 200_000), "not valid YAML"},
		{"many errors", "node: {\n" + repeat("  a: 1,\n", 1000) + "}", "more errors from here on"},
		{"many probes", "probes: [" + repeat("a, ", 300) + "a]", "at most 256"},
		{"long name", "node: {name: " + repeat("é", 500) + "}", "…"},
		{"long key", "node: {? " + repeat("k", 1<<20) + " : 1}", "unknown key"},
		{"long value", "node: {labels: " + repeat("v", 1<<20) + "}", "…"},
		{"escape sequence", `limits: {sessions: "\e[31m5"}`, "not a whole number"},
		{"escape sequence in a schedule", `probes: [{name: a, kind: latency, schedule: "\e[2J * * * *"}]`, "no schedule"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := parse("test.yaml", []byte(tt.text), testEnv(nil))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("error does not say %q: %.500v", tt.want, err)
			}
			if n := len(err.Error()); n > 20_000 {
				t.Errorf("%d bytes of errors", n)
			}
			if strings.ContainsRune(err.Error(), '\x1b') {
				t.Error("the error writes to the terminal")
			}
		})
	}
}

func TestLoad(t *testing.T) {
	if _, err := Load(filepath.Join(t.TempDir(), "absent.yaml")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("absent file: %v", err)
	}
	if _, err := Load(t.TempDir()); err == nil {
		t.Error("a directory was read")
	}
	file := filepath.Join(t.TempDir(), "a.yaml")
	if err := os.WriteFile(file, []byte("node: {nam: x}"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Load(file)
	var one *Error
	if !errors.As(err, &one) || one.File != file || one.Line != 1 || one.Column != 8 || one.Path != "node.nam" {
		t.Errorf("error %+v", one)
	}
}

func TestHash(t *testing.T) {
	base := mustParse(t, "node: {name: a}\nlimits: {memory: 1GiB, lease: 60s}", nil).Hash()
	for text, same := range map[string]bool{
		"limits: {lease: 1m}   # the same\nnode:\n  name: 'a'\n": true,
		"node: {name: a}":                                true,
		"node: {name: b}":                                false,
		"node: {name: a}\nlimits: {lease: 61s}":          false,
		"node: {name: a}\nprobes: []":                    false,
		"node: {name: a, labels: {rack: r1}}":            false,
		"node: {name: a}\ndevices: {gid: 0}":             false,
		"node: {name: a}\ncontrol: {advertise: a.b.org}": false,
	} {
		if got := mustParse(t, text, nil).Hash() == base; got != same {
			t.Errorf("same hash %t, want %t:\n%s", got, same, text)
		}
	}
}

// Whatever ships under configs/ is valid, and does what its comments say.
func TestShippedConfigs(t *testing.T) {
	files, err := filepath.Glob("../../configs/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no files", err)
	}
	read := map[string]*Config{}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		c, err := parse(file, data, testEnv(map[string]string{"NODE": "2", "RACK": "r1"}))
		if err != nil {
			t.Errorf("%v", err)
			continue
		}
		read[filepath.Base(file)] = c
		for _, p := range c.Probes {
			if err := p.Spec.WithDefaults().Validate(); err != nil {
				t.Errorf("%s: probe %s: %v", file, p.Spec.Name, err)
			}
		}
	}

	t.Run("minimal", func(t *testing.T) {
		data, err := os.ReadFile("../../configs/minimal.yaml")
		if err != nil {
			t.Fatal(err)
		}
		_, commented, ok := strings.Cut(string(data), "\n# probes:\n")
		if !ok {
			t.Fatal("the default probes are not shown")
		}
		_, taints, ok := strings.Cut(string(data), "\n# taints:\n")
		taints, _, end := strings.Cut(taints, "\n\n")
		if !ok || !end || strings.Count(taints, "\n")+1 != len(probe.Tolerable()) {
			t.Fatalf("not every tolerance is shown:\n%s", taints)
		}
		uncomment := func(s string) string {
			return strings.ReplaceAll(strings.ReplaceAll("\n"+s, "\n# ", "\n"), "\n#", "\n")
		}
		text := string(data) + "\ntaints:\n" + uncomment(taints) + "\nprobes:\n" + uncomment(commented)
		if diff := cmp.Diff(string(read["minimal.yaml"].Effective()), string(mustParse(t, text, nil).Effective())); diff != "" {
			t.Errorf("what is in the comments is not the default (-default +comment):\n%s", diff)
		}
	})
	t.Run("lab", func(t *testing.T) {
		names := map[string][]string{}
		for file, nodes := range map[string]int{"lab.yaml": 4, "lab-8.yaml": 8} {
			c := read[file]
			if c == nil || len(c.Peers.Static) != nodes {
				t.Fatalf("%s has not %d peers", file, nodes)
			}
			if self := c.Peers.Static[1]; self.Name != c.Node.Name || self.Address != c.Control.Listen {
				t.Errorf("%s: node 2 is %s at %s, but in the list %+v", file, c.Node.Name, c.Control.Listen, self)
			}
			if !c.Devices.Use("rxe2") || c.Devices.Use("rxe1") {
				t.Errorf("%s: node 2 uses the wrong devices", file)
			}
			for _, p := range c.Probes {
				names[file] = append(names[file], p.Spec.Name)
				if file == "lab.yaml" && p.Spec.Interval+p.Jitter+p.Spec.Deadline > time.Minute {
					t.Errorf("%s: probe %s can't have a result within a minute", file, p.Spec.Name)
				}
			}
		}
		if diff := cmp.Diff(names["lab.yaml"], names["lab-8.yaml"]); diff != "" {
			t.Errorf("probes differ:\n%s", diff)
		}
	})
}

// FuzzParse holds that no input panics or hangs, that errors have a place, and that what is
// accepted can run and means the same when its effective form is read again.
func FuzzParse(f *testing.F) {
	for _, pattern := range []string{"testdata/invalid-*.yaml", "../../configs/*.yaml"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			f.Fatal(err)
		}
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(data)
		}
	}
	f.Add([]byte("a: &a [*a]\nnode: *a"))
	f.Add([]byte("probes:\n- {name: a, schedule: '*/5 * * * *', kind: latency, sizes: [1,2], labels: {a: $${b}}}"))
	env := testEnv(map[string]string{"NODE": "2"})
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := parse("fuzz.yaml", data, env)
		if err != nil {
			var errs Errors
			if !errors.As(err, &errs) || len(errs) == 0 {
				t.Fatalf("error %T: %v", err, err)
			}
			for _, e := range errs {
				if e.Line < 1 || e.Column < 1 || e.Message == "" {
					t.Fatalf("error without place or message: %+v", e)
				}
			}
			return
		}
		for _, p := range c.Probes {
			s := p.Spec
			s.Retries, s.RNRRetry = max(0, s.Retries), max(0, s.RNRRetry)
			if err := s.WithDefaults().Validate(); err != nil {
				t.Fatalf("accepted probe can't run: %v", err)
			}
			if p.Spec.Interval < time.Second || p.Jitter > p.Spec.Interval {
				t.Fatalf("interval %s, jitter %s", p.Spec.Interval, p.Jitter)
			}
		}
		again, err := parse("effective.yaml", c.Effective(), testEnv(nil))
		if err != nil {
			t.Fatalf("the effective form is refused: %v\n%s", err, c.Effective())
		}
		if diff := cmp.Diff(string(c.Effective()), string(again.Effective())); diff != "" {
			t.Fatalf("the effective form changes when read again:\n%s", diff)
		}
	})
}

func TestSuggest(t *testing.T) {
	known := slices.Sorted(maps.Keys(map[string]bool{"schedule": true, "sizes": true, "jitter": true, "tx_depth": true, "op": true}))
	for word, want := range map[string]string{
		"shedule": `"schedule"`, "size": `"sizes"`, "Jitter": `"jitter"`, "tx-depth": `"tx_depth"`, "zzz": "known are", "jtiter": `"jitter"`,
		"completely-different": "known are jitter, op, schedule", "po": `"op"`,
	} {
		if got := suggest(word, known); !strings.Contains(got, want) {
			t.Errorf("suggest(%q) = %s, want %s", word, got, want)
		}
	}
}
