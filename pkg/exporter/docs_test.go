package exporter

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

const docsFile = "../../docs/metrics.md"

// labelDocs explains every label there is.
var labelDocs = []struct{ name, text string }{
	{"src", "this node's configured name"},
	{"device", "RDMA device of this node"},
	{"port", "port of the device, from 1"},
	{"rail", "rail of the port"},
	{"dst", "configured name of the peer; one node's `dst` is another's `src`"},
	{"dst_device", "the peer's RDMA device; empty until a session has got to know it"},
	{"path", "where the peer is: `same_node`, `same_rack`, `cross_rack` or `unknown`"},
	{"probe", "name of the probe in the configuration"},
	{"op", "`write`, `read` or `send`"},
	{"size", "message size in bytes"},
	{"measure", "what the latency is of: `half-rtt` is half of the round trip (write, send), `operation` from post to completion (read, atomics), `rtt` the round trip"},
	{"stat", "`min`, `p50`, `p90`, `p99`, `p999`, `max` or `mean` of all samples of one run"},
	{"direction", "of the data as `src` sees it: `tx` or `rx`"},
	{"result", "`ok`, `tainted`, `failed` or `skipped`"},
	{"stage", "how far a failed session got: `resolve`, `connect`, `auth`, `admit`, `setup`, `run`, `verify` or `teardown`"},
	{"reason", "why a run failed or was skipped, a port can't be used, or figures are tainted: a word of the closed list in [reasons.md](reasons.md)"},
	{"scope", "whose fault a failure is as far as the evidence goes: `local`, `path` or `peer`"},
	{"side", "`local`: this node, `remote`: the peer"},
	{"counter", "the driver's own name of a counter"},
	{"class", "what a counter's rise means, whatever the driver calls it: " + strings.Join(classNames(), ", ")},
	{"state", "`ok`, `degraded`, `failing` or `unknown`; or, of what is not probed, `self`, `drained`, `duplicate` or `unnamed`"},
	{"source", "what was read: `ports`; or, where peers come from, `static`, `files`, `dns`, `hostlist` or `http`"},
	{"sweep", "name of the sweep: its probe, or several joined by `+`"},
	{"verdict", "`healthy`, `unhealthy` or `unknown`"},
	{"kind", "`nic`, `node`, `rail`, `rack` or `pair`"},
	{"check", "a condition of the closed list in [environment.md](environment.md)"},
	{"fingerprint", "16 hex digits, of what must be alike for figures to be comparable"},
	{"version, revision, goversion", "of the build"},
	{"driver_version, kernel, rdma_core", "versions of the software below; that of a driver in the kernel's tree is the kernel's"},
	{"pcie, mtu", "PCIe link in use, and the RDMA MTU in bytes"},
	{"link_layer, driver, fw_version, hca_type, board_id, pci, numa_node, netdev", "as the kernel tells them"},
}

func classNames() (names []string) {
	for _, c := range counters.Classes {
		names = append(names, "`"+string(c)+"`")
	}
	return names
}

// fleet is what the number of series depends on.
type fleet struct{ ports, probes, latencyPairs, ratePairs, histograms, failures, counters int }

func (f fleet) elements(s scope) int {
	return map[scope]int{
		perNode: 1, perProbe: f.probes, perSweep: (f.probes + 1) / 2, perPort: f.ports, perPortCounter: f.ports * f.counters, perPortEvent: f.ports * len(counters.Classes), perPortCheck: f.ports * len(counters.Checks), perDevice: f.ports,
		perNIC: f.ports * f.probes, perFailure: f.failures, perHistogram: f.histograms,
		perPair: f.latencyPairs + f.ratePairs, perLatencyPair: f.latencyPairs, perRatePair: f.ratePairs,
	}[s]
}

// series adds up what one node exports, leaving out some metrics.
func (f fleet) series(except ...*metric) (n int) {
	for _, m := range table {
		if !slices.Contains(except, m) {
			n += m.each * f.elements(m.per)
		}
	}
	return n
}

func unit(m *metric) string {
	for _, u := range []struct{ in, unit string }{
		{"_timestamp_seconds", "Unix time, seconds"}, {"bytes_per_second", "bytes per second"}, {"_per_second", "per second"}, {"_seconds", "seconds"},
		{"_bytes", "bytes"}, {"_ratio", "0 to 1"},
	} {
		if strings.Contains(m.name, u.in) {
			return u.unit
		}
	}
	return ""
}

func count(m *metric) string {
	switch {
	case m.per == perNode:
		return fmt.Sprint(m.each)
	case m.each == 1:
		return string(m.per)
	}
	return fmt.Sprintf("%d·%s", m.each, m.per)
}

func thousands(n int) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%s,%03d", thousands(n/1000), n%1000)
}

func document() string {
	var b strings.Builder
	p := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	p("<!-- Generated from the code: go test ./pkg/exporter -update. Don't edit. -->")
	p("# Metrics")
	p("")
	p("What `/metrics` of a daemon shows, beside the usual `go_*`, `process_*` and `promhttp_*`. Times are in seconds, sizes in bytes, ratios from 0 to 1.")
	p("No sample has a timestamp of its own. What isn't known is absent: it is never 0 and never NaN.")
	p("")
	p("- **Per pair** is what the last run measured. A failed run leaves the figures of the last good one in place: `rdmabench_probe_success` and the two timestamps say how old they are.")
	p("  Figures that no success renews for %d intervals of the probe, and for %.0f h at least, are dropped; success and timestamps stay. The series of a peer, probe, size or device that is no longer configured are gone with the next scrape.", shelfRuns, minShelfLife.Hours())
	p("- Only so many pairs have series, by default %d. They are the first ones that had a result, and they keep their place. Results of others are counted in `rdmabench_pair_results_dropped_total`; they are in the metrics per port and probe and in `/api/v1/results` all the same.", DefaultMaxPairs)
	p("- **Per port and probe** adds up over all peers since the daemon started. Latency is a native histogram: a Prometheus server needs `scrape_native_histograms: true` in the scrape configuration, one before 3.9 `--enable-feature=native-histograms`, and `curl` shows only its sum and count.")
	p("  Exemplars carry `result_id` and `dst` of the run's largest sample. Classic buckets, %d of them from 1 µs to 63 s, can be had besides.", len(classicBounds))
	p("- Counters exist at 0 from the first scrape, except `rdmabench_probe_failures_total`, whose combinations appear when they happen: alert on `rdmabench_probe_runs_total{result=\"failed\"}`.")
	p("")
	for _, section := range []struct {
		title  string
		per    []scope
		labels []string // that all have
	}{
		{"Per pair: port, probe, peer, size", []scope{perPair, perLatencyPair, perRatePair}, pairLabels},
		{"Per port and probe", []scope{perNIC, perFailure, perHistogram}, nicLabels},
		{"Per port", []scope{perPort, perPortCounter, perPortEvent, perPortCheck}, portLabels},
		{"Per device", []scope{perDevice}, environmentChanges.labels},
		{"Per probe", []scope{perProbe}, probeInterval.labels},
		{"Per node", []scope{perNode}, nil}, {"Per sweep", []scope{perSweep}, nil},
	} {
		p("## %s", section.title)
		p("")
		head := "Labels"
		if section.labels != nil {
			p("All have the labels `%s`.", strings.Join(section.labels, "` `"))
			p("")
			head = "More labels"
		}
		p("| Name | Type | Unit | %s | Series | Meaning |", head)
		p("| --- | --- | --- | --- | --- | --- |")
		for _, m := range table {
			if !slices.Contains(section.per, m.per) {
				continue
			}
			more := slices.DeleteFunc(slices.Clone(m.labels), func(l string) bool { return slices.Contains(section.labels, l) })
			p("| `%s` | %s | %s | %s | %s | %s |", m.name, strings.ToLower(m.typ.String()), unit(m), strings.Join(more, " "), count(m), m.help)
		}
		p("")
	}
	p("## Labels")
	p("")
	p("| Label | Value |")
	p("| --- | --- |")
	for _, l := range labelDocs {
		p("| %s | %s |", l.name, l.text)
	}
	p("")
	p("Values are cut to %d bytes; what isn't printable UTF-8 is replaced.", maxLabelBytes)
	p("")
	p("## How many series")
	p("")
	p("The column *Series* is the most a node can have, in terms of")
	p("")
	p("- P: ports, T: probes, S: sweeps that ran")
	p("- L: pairs, that is P × (peers × sizes, summed up over the probes), and never more than the limit of %d; Ll of them by latency probes, Lb by others", DefaultMaxPairs)
	p("- H: histograms, that is P × (sizes × paths, summed up over the latency probes); each with classic buckets has %d series more", len(classicBounds)+2)
	p("- F: combinations of stage, reason and scope that have happened, per port and probe")
	p("- C: counters of a driver, E: classes of them, %d; K: conditions, %d; D: devices", len(counters.Classes), len(counters.Checks))
	p("")
	p("None of them grows with the fleet as long as a node's peers are bounded. For nodes of 8 ports with 60 counters each, a latency and a bandwidth probe of one size, 8 peers a port, 2 kinds of path:")
	p("")
	node := fleet{ports: 8, probes: 2, latencyPairs: 64, ratePairs: 64, histograms: 8 * 2, failures: 8 * 2 * 4, counters: 60}
	full := node
	full.latencyPairs, full.ratePairs = DefaultMaxPairs/2, DefaultMaxPairs/2
	p("| | one node | 100 nodes | 1,000 nodes | 10,000 nodes |")
	p("| --- | ---: | ---: | ---: | ---: |")
	for _, row := range []struct {
		what string
		n    int
	}{
		{fmt.Sprintf("L = %d, no failures and no taints", node.elements(perPair)), node.series(probeFailures, probeTainted)},
		{fmt.Sprintf("L = %d, at worst: 4 kinds of failure for each port and probe, %d taints for each pair", node.elements(perPair), len(probe.Taints)), node.series()},
		{fmt.Sprintf("L = %d, the limit, no failures and no taints", full.elements(perPair)), full.series(probeFailures, probeTainted)},
		{fmt.Sprintf("L = %d, at worst", full.elements(perPair)), full.series()},
	} {
		p("| %s | %s | %s | %s | %s |", row.what, thousands(row.n), thousands(100*row.n), thousands(1000*row.n), thousands(10000*row.n))
	}
	p("")
	p("A server needs 2 to 3 KB of memory for a series. The driver's own counters are %s of them: drop `rdmabench_port_counters_total` while relabelling if they aren't wanted.", thousands(node.elements(perPortCounter)))
	return b.String()
}

func TestDocs(t *testing.T) {
	want := document()
	if *update {
		if err := os.MkdirAll("../../docs", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(docsFile, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(docsFile)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("%s isn't up to date: go test ./pkg/exporter -update", docsFile)
	}
}

func TestTable(t *testing.T) {
	explained := map[string]bool{}
	for _, l := range labelDocs {
		for _, name := range strings.Split(l.name, ", ") {
			explained[name] = true
		}
	}
	used := map[string]bool{}
	var families []*dto.MetricFamily
	for _, m := range table {
		for _, l := range m.labels {
			used[l] = true
			if !explained[l] {
				t.Errorf("%s: label %s isn't explained", m.name, l)
			}
		}
		var one dto.Metric
		_ = (&series{m: m}).Write(&one) // never fails
		families = append(families, &dto.MetricFamily{Name: &m.name, Help: &m.help, Type: m.typ.Enum(), Metric: []*dto.Metric{&one}})
	}
	for l := range explained {
		if !used[l] {
			t.Errorf("label %s is explained and unused", l)
		}
	}
	if problems, err := promlint.NewWithMetricFamilies(families).Lint(); err != nil || len(problems) > 0 {
		t.Errorf("lint: %v %v", problems, err)
	}
	if err := prometheus.NewPedanticRegistry().Register(collector{newExporter(t, Options{})}); err != nil {
		t.Error(err)
	}
}

// TestSeriesCount holds the documented formula against a real scrape: a daemon at its limit has no more series than it says.
func TestSeriesCount(t *testing.T) {
	e := newExporter(t, Options{MaxPairs: 4, Ports: &fakePorts{ports: twoPorts()}, Sessions: func() int { return 0 }, ClockResidual: func() float64 { return 0 }, Discovery: discovered})
	e.SetReload(nil)
	e.Observe(failed(result("rtt", "n2"), probe.StageRun, probe.Timeout, probe.ScopePath))
	for _, peer := range []string{"n2", "n3"} {
		for _, r := range []*probe.Result{latencyResult(peer, 1, 2, 3), bandwidthResult(peer, 1e9)} {
			r.Outcome, r.Taints = probe.Tainted, probe.Taints
			e.Observe(r)
		}
	}
	most := fleet{ports: 2, probes: 2, latencyPairs: 2, ratePairs: 4, histograms: 1, failures: 1, counters: 2}
	for name, f := range scrape(t, e) {
		if i := slices.IndexFunc(table, func(m *metric) bool { return m.name == f.GetName() }); i >= 0 {
			if limit := table[i].each * most.elements(table[i].per); len(f.Metric) > limit {
				t.Errorf("%s has %d series, documented are at most %d", name, len(f.Metric), limit)
			}
		}
	}
}
