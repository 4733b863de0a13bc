package promcheck

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// simulate serves five nodes of a fleet in which something of everything goes wrong, in the names and labels of
// docs/metrics.md.
func simulate(t *testing.T) (targets []string) {
	t.Helper()
	for _, src := range nodes {
		reg := prometheus.NewPedanticRegistry()
		reg.MustRegister(newNode(src, time.Now()), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
		targets = append(targets, serve(t, promhttp.HandlerFor(reg, promhttp.HandlerOpts{})))
	}
	return targets
}

var nodes = []string{"n1", "n2", "n3", "n4", "n5"}

// The probes of the simulated fleet, which run every two seconds.
var simulatedProbes = []struct{ name, op, size string }{{"rtt", "write", "8"}, {"bw", "write", "1048576"}, {"ping", "send", "8"}}

// node is a daemon that never existed.
type node struct {
	name    string
	began   time.Time
	latency *prometheus.HistogramVec
}

func newNode(name string, began time.Time) *node {
	return &node{name: name, began: began, latency: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "rdmabench_latency_seconds", Help: "Simulated.", NativeHistogramBucketFactor: 1.1,
	}, []string{"src", "device", "port", "rail", "path", "probe", "op", "size", "measure"})}
}

// Describe describes nothing, as the metrics are made while they are collected.
func (n *node) Describe(chan<- *prometheus.Desc) {}

// Collect makes up the state of the node at this moment.
func (n *node) Collect(out chan<- prometheus.Metric) {
	runs := math.Floor(time.Since(n.began).Seconds() / 2)
	now := float64(time.Now().Unix())
	gauge, counter := prometheus.GaugeValue, prometheus.CounterValue
	// labels are pairs of names and values
	put := func(kind prometheus.ValueType, name string, v float64, labels ...string) {
		var names, values []string
		for i := 0; i < len(labels); i += 2 {
			names, values = append(names, labels[i]), append(values, labels[i+1])
		}
		out <- prometheus.MustNewConstMetric(prometheus.NewDesc("rdmabench_"+name, "Simulated.", names, nil), kind, v, values...)
	}
	is := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}
	put(gauge, "build_info", 1, "version", "0", "revision", "", "goversion", "")
	put(gauge, "node_info", 1, "src", n.name)
	put(gauge, "config_last_reload_successful", is(n.name != "n2"))
	put(gauge, "config_last_reload_success_timestamp_seconds", now-math.Mod(now, 7))
	put(gauge, "sessions", 1)
	put(gauge, "pairs", 12)
	put(gauge, "pairs_limit", 512)
	put(counter, "pair_results_dropped_total", runs)
	put(counter, "scrape_errors_total", 0, "source", "ports")

	port := []string{"src", n.name, "device", "mlx5_0", "port", "1"}
	put(gauge, "device_usable", 1, port...)
	put(gauge, "device_info", 1, slices.Concat(port, []string{"rail", "0", "link_layer", "Ethernet", "driver", "mlx5", "fw_version", "28.39.1002",
		"hca_type", "MT4129", "board_id", "MT_0000000838", "pci", "0000:18:00.0", "numa_node", "0", "netdev", "ens1np0"})...)
	put(gauge, "port_up", is(n.name != "n5" || runs < 3), port...)
	put(gauge, "port_rate_bytes_per_second", 50e9, port...)
	for i, class := range []string{"retransmit_local", "timeout", "congestion", "pause", "discard", "physical"} {
		put(counter, "port_events_total", runs*float64(i+1), slices.Concat(port, []string{"class", class})...)
	}

	for _, p := range simulatedProbes {
		of := []string{"src", n.name, "probe", p.name}
		put(gauge, "probe_interval_seconds", 2, of...)
		put(counter, "probe_skips_total", runs, slices.Concat(of, []string{"reason", "busy-port"})...)
		put(counter, "schedule_panics_total", 0, of...)

		nic := slices.Concat(port, []string{"rail", "0", "probe", p.name, "op", p.op})
		for _, r := range []string{"ok", "tainted", "failed", "skipped"} {
			put(counter, "probe_runs_total", 5*runs, slices.Concat(nic, []string{"result", r})...)
		}
		put(counter, "probe_failures_total", 4*runs, slices.Concat(nic, []string{"stage", "run", "reason", "retry-exceeded", "scope", "path"})...)
		if n.name == "n5" {
			put(counter, "probe_failures_total", runs, slices.Concat(nic, []string{"stage", "setup", "reason", "memlock", "scope", "local"})...)
		}
		put(counter, "probe_bytes_total", 1e6*runs, nic...)
		put(counter, "probe_cpu_seconds_total", 0.1*runs, slices.Concat(nic, []string{"side", "local"})...)

		if p.name == "rtt" {
			h := n.latency.WithLabelValues(n.name, "mlx5_0", "1", "0", "same_rack", p.name, p.op, p.size, "half-rtt")
			for range 100 {
				h.Observe(2e-6 * math.Exp(0.1*rand.NormFloat64()))
			}
		}
		for _, dst := range nodes {
			if dst == n.name {
				continue
			}
			pair := slices.Concat(port, []string{"rail", "0", "dst", dst, "dst_device", "mlx5_0", "path", "same_rack", "probe", p.name, "op", p.op, "size", p.size})
			bad := n.name == "n4" && dst == "n5" // never succeeds again
			put(gauge, "probe_success", is(!bad && (dst != "n5" || math.Mod(runs, 2) == 0)), pair...)
			put(gauge, "probe_last_run_timestamp_seconds", now, pair...)
			put(gauge, "probe_duration_seconds", 0.2, pair...)
			if bad {
				put(gauge, "probe_last_success_timestamp_seconds", now-1000, pair...)
				continue
			}
			put(gauge, "probe_last_success_timestamp_seconds", now, pair...)
			put(gauge, "probe_tainted", 1, slices.Concat(pair, []string{"reason", "retransmit"})...)
			switch p.name {
			case "rtt":
				for i, s := range []string{"min", "p50", "p90", "p99", "p999", "max", "mean"} {
					put(gauge, "last_latency_seconds", 2e-6*float64(i+1), slices.Concat(pair, []string{"measure", "half-rtt", "stat", s})...)
				}
			case "bw":
				put(gauge, "last_bandwidth_bytes_per_second", 47e9, slices.Concat(pair, []string{"direction", "tx"})...)
				put(gauge, "line_rate_ratio", 0.94, pair...)
			case "ping":
				put(gauge, "loss_ratio", 0.02, pair...)
			}
		}
	}
	n.latency.Collect(out)
}

// The simulated fleet speaks as docs/metrics.md says daemons do.
func TestSimulation(t *testing.T) {
	metrics, labels := contract(t)
	reg := prometheus.NewPedanticRegistry()
	if err := reg.Register(newNode("n1", time.Now().Add(-time.Minute))); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if !metrics[f.GetName()] {
			t.Errorf("docs/metrics.md knows no %s", f.GetName())
		}
		for _, m := range f.Metric {
			for _, l := range m.Label {
				if !labels[l.GetName()] {
					t.Errorf("docs/metrics.md knows no label %s, as in %s", l.GetName(), f.GetName())
				}
			}
		}
	}
}
