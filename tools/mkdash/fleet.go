package main

import (
	"fmt"
	"strings"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/units"
)

// The variables that narrow down a selector: of metrics of a probe, of a node or port, and of a target.
const (
	ofProbe  = `job=~"$job",src=~"$src",probe=~"$probe"`
	ofNode   = `job=~"$job",src=~"$src"`
	ofTarget = `job=~"$job"`
)

// Expressions that several panels build on.
const (
	// age of the last success of each pair, in intervals of its probe
	age = `((time() - rdmabench_probe_last_success_timestamp_seconds{` + ofProbe + `})
  / on (job, instance, src, probe) group_left () rdmabench_probe_interval_seconds{` + ofTarget + `})`

	p99       = `rdmabench_last_latency_seconds{` + ofProbe + `,stat="p99"}`
	bandwidth = `min without (direction) (rdmabench_last_bandwidth_bytes_per_second{` + ofProbe + `})`

	// figures of pairs in terms of the median of all pairs that do the same
	p99ToFleet = p99 + `
  / on (job, probe, op, size) group_left ()
    quantile by (job, probe, op, size) (0.5, rdmabench_last_latency_seconds{` + ofTarget + `,probe=~"$probe",stat="p99"})`
	bandwidthToFleet = bandwidth + `
  / on (job, probe, op, size) group_left ()
    quantile by (job, probe, op, size) (0.5, min without (direction) (rdmabench_last_bandwidth_bytes_per_second{` + ofTarget + `,probe=~"$probe"}))`

	nic = "src, device, port, probe, op, size"
)

// worst keeps those lines of x that are among the eight largest (of = topk) or smallest (bottomk) by rank over
// the whole time range. topk alone would choose anew at each step, and lines would come and go.
func worst(x, of, by, rank string) string {
	return fmt.Sprintf("%s\nand on (%s) %s(8, %s)", x, by, of, rank)
}

// replace puts an expression in place of %s.
func replace(format, with string) string { return strings.ReplaceAll(format, "%s", with) }

// fleet is the one dashboard there is, in the order of an incident: is it real and since when, which of the
// nodes, as sender or as receiver, is it congestion or errors, and is the tool itself healthy.
func fleet() (dashboard.Dashboard, error) {
	b := &board{DashboardBuilder: dashboard.NewDashboardBuilder("RDMA bench / fleet").Uid("rdmabench-fleet").
		Description("Nodes that probe each other over RDMA, as measured by rdmabenchd. From top to bottom: is it real and since when; which node or pair; as sender or as receiver; congestion, errors or the host; is the tool itself healthy. Generated: see tools/mkdash.").
		Tags([]string{"rdma", "rdmabench"}).Readonly().Refresh("1m").Time("now-24h", "now").Timezone("browser").
		Tooltip(dashboard.DashboardCursorSyncCrosshair).
		WithVariable(dashboard.NewDatasourceVariableBuilder("datasource").Label("data source").Description("Prometheus that scrapes the fleet").Type("prometheus")).
		WithVariable(label("job", "Scrape job of the daemons", "rdmabench_build_info")).
		WithVariable(label("src", "Node that probes", `rdmabench_node_info{`+ofTarget+`}`)).
		WithVariable(label("probe", "Probe as named in the configuration", `rdmabench_probe_interval_seconds{`+ofNode+`}`)).
		WithVariable(dashboard.NewCustomVariableBuilder("window").
			Description("What rates and shares look back over: more than two intervals of the probes shown. Grafana's own rate interval follows the scrapes, which are far more frequent than the probes.").
			Values(dashboard.StringOrMap{String: new("5m,15m,30m,1h,3h,6h,1d,3d")}).Current(option("1h", "1h"))).
		Annotation(annotation("alerts", "red", `max by (alertname, severity, src, device, dst) (ALERTS{alertname=~"Rdmabench.+",alertstate="firing",severity!="info"})`, "{{alertname}}", "{{src}} {{device}} {{dst}}")).
		Annotation(annotation("configuration loaded", "blue", `changes(rdmabench_config_last_reload_success_timestamp_seconds{`+ofTarget+`}[5m]) > 0`, "configuration loaded", "{{instance}}")),
	}

	b.row("Is it real, and since when?")
	b.stat(about{"Daemons up", "Share of the scrape targets that answer.", units.PercentUnit, 3, 4},
		steps("red", step{0.9, "orange"}, step{1, "green"}),
		`avg(up{`+ofTarget+`})`)
	b.stat(about{"Usable ports", "Ports that probes can use.", units.Short, 3, 4},
		steps("red", step{1, "text"}),
		`sum(rdmabench_device_usable{`+ofNode+`})`)
	b.stat(about{"Fresh pairs", "Share of the pairs with a success within three intervals of the probe.", units.PercentUnit, 3, 4},
		steps("red", step{0.9, "orange"}, step{0.999, "green"}),
		`avg(`+age+` < bool 3)`)
	b.stat(about{"Failed runs", "Share of all runs in the window that failed. Skipped ones count neither way.", units.PercentUnit, 3, 4},
		steps("green", step{0.001, "orange"}, step{0.05, "red"}),
		`sum(increase(rdmabench_probe_runs_total{`+ofProbe+`,result="failed"}[$window]))
/ sum(increase(rdmabench_probe_runs_total{`+ofProbe+`,result=~"ok|tainted|failed"}[$window]))`)
	b.stat(about{"Tainted pairs", "Share of the pairs whose last figures come with a reason not to trust them.", units.PercentUnit, 3, 4},
		steps("green", step{0.001, "orange"}, step{0.25, "red"}),
		`(count(max without (reason) (rdmabench_probe_tainted{`+ofProbe+`}) == 1) or vector(0))
/ count(rdmabench_probe_success{`+ofProbe+`})`)
	b.stat(about{"Worst p99 / baseline", "The NIC whose p99 latency rose most over its own last 14 days; 100 % is as always. From the recording rules, four days after they begin.", units.PercentUnit, 3, 4},
		steps("green", step{1.25, "orange"}, step{2, "red"}),
		`max(nic:rdmabench_latency_p99_seconds:ratio_to_baseline{`+ofProbe+`})`)
	b.stat(about{"Worst bandwidth / baseline", "The NIC whose bandwidth fell most below its own last 14 days; 100 % is as always. From the recording rules, four days after they begin.", units.PercentUnit, 3, 4},
		steps("red", step{0.7, "orange"}, step{0.9, "green"}),
		`min(nic:rdmabench_bandwidth_bytes_per_second:ratio_to_baseline{`+ofProbe+`})`)
	b.stat(about{"Alerts", "Alerts of rdmabenchd that are firing, of all nodes.", units.Short, 3, 4},
		steps("green", step{1, "red"}),
		`count(ALERTS{alertname=~"Rdmabench.+",alertstate="firing"}) or vector(0)`)

	b.lines(about{"p99 latency of the fleet", "Last results: the median pair, and the worst. Only the worst moves: look for a pair or a NIC. Both move: look for a switch or for load.", units.Seconds, 12, 8}, nil,
		query{`quantile by (probe, op, size) (0.5, ` + p99 + `)`, "median {{probe}} {{op}} {{size}} B"},
		query{`max by (probe, op, size) (` + p99 + `)`, "worst {{probe}} {{op}} {{size}} B"})
	b.lines(about{"Bandwidth of the fleet", "Last results: the median pair, and the worst, payload only. Of two directions the slower one.", units.BytesPerSecondSI, 12, 8}, nil,
		query{`quantile by (probe, op, size) (0.5, ` + bandwidth + `)`, "median {{probe}} {{op}} {{size}} B"},
		query{`min by (probe, op, size) (` + bandwidth + `)`, "worst {{probe}} {{op}} {{size}} B"})
	b.heat(about{"Latency of all samples", "Native histograms of every timed sample of the runs in the window. A second band is a second path or a retransmission; choose one probe.", units.Seconds, 12, 9},
		`sum(increase(rdmabench_latency_seconds{`+ofProbe+`}[$window]))`)
	b.table(about{"Alerts firing", "What the alert rules say now. info alerts explain others.", "", 12, 9},
		[]column{{field: "severity"}, {field: "alertname", name: "alert"}, {field: "src"}, {field: "device"}, {field: "port"}, {field: "dst"}, {field: "probe"}, {field: "reason"}, {field: "instance"}},
		`sort_desc(ALERTS{alertname=~"Rdmabench.+",alertstate="firing"})`)

	b.row("Which node, which pair?")
	b.lines(about{"p99 latency / baseline, worst NICs", "Each NIC against its own last 14 days, as the alerts see it: median over its peers and its last three results or more. 100 % is as always.", units.PercentUnit, 12, 8},
		steps("transparent", step{1.25, "orange"}),
		query{worst(`nic:rdmabench_latency_p99_seconds:ratio_to_baseline{`+ofProbe+`}`, "topk", nic,
			`max_over_time(nic:rdmabench_latency_p99_seconds:ratio_to_baseline{`+ofProbe+`}[$__range] @ end())`), "{{src}} {{device}} {{probe}} {{op}} {{size}} B"})
	b.lines(about{"Bandwidth / baseline, worst NICs", "Each NIC against its own last 14 days, as the alerts see it: median over its peers and its last three results or more. 100 % is as always.", units.PercentUnit, 12, 8},
		steps("red", step{0.9, "transparent"}),
		query{worst(`nic:rdmabench_bandwidth_bytes_per_second:ratio_to_baseline{`+ofProbe+`}`, "bottomk", nic,
			`min_over_time(nic:rdmabench_bandwidth_bytes_per_second:ratio_to_baseline{`+ofProbe+`}[$__range] @ end())`), "{{src}} {{device}} {{probe}} {{op}} {{size}} B"})
	b.lines(about{"Latency of the slowest NICs", "p50 and p99 of the last results, median over the peers of a NIC. p99 alone: jitter, retransmissions. Both: a longer path, a slower link or CPU.", units.Seconds, 12, 8}, nil,
		query{worstLatency("p99"), "p99 {{src}} {{device}} {{probe}} {{op}} {{size}} B"},
		query{worstLatency("p50"), "p50 {{src}} {{device}} {{probe}} {{op}} {{size}} B"})
	b.lines(about{"Bandwidth / line rate, slowest NICs", "Last results, median over the peers of a NIC. Absent where the driver doesn't know its line rate (Soft-RoCE).", units.PercentUnit, 12, 8},
		steps("red", step{0.8, "transparent"}),
		query{worst(`quantile by (`+nic+`) (0.5, rdmabench_line_rate_ratio{`+ofProbe+`})`, "bottomk", nic,
			`quantile by (`+nic+`) (0.5, min_over_time(rdmabench_line_rate_ratio{`+ofProbe+`}[$__range] @ end()))`), "{{src}} {{device}} {{probe}} {{op}} {{size}} B"})

	b.matrix(about{"Reached: src × dst", "Did the last run give figures? A red row is a node that reaches nobody, a red column one that nobody reaches.", units.Short, 8, 10},
		column{text: failedOK}, `min by (src, dst) (rdmabench_probe_success{`+ofProbe+`})`)
	b.matrix(about{"p99 latency: src × dst", "In terms of the fleet's median for the same probe and size, the worst of all probes shown. A coloured row or column is a NIC, a cell a path.", units.PercentUnit, 8, 10},
		column{steps: []step{{1.5, "orange"}, {2.5, "red"}}}, `max by (src, dst) (`+p99ToFleet+`)`)
	b.matrix(about{"Bandwidth: src × dst", "In terms of the fleet's median for the same probe and size, the worst of all probes shown. A coloured row or column is a NIC, a cell a path.", units.PercentUnit, 8, 10},
		column{steps: []step{{0, "red"}, {0.7, "orange"}, {0.9, "transparent"}}}, `min by (src, dst) (`+bandwidthToFleet+`)`)

	pair := []column{{field: "src"}, {field: "device"}, {field: "dst"}, {field: "dst_device", name: "to device"}, {field: "path"}, {field: "probe"}, {field: "op"}, {field: "size", unit: units.BytesIEC}}
	b.table(about{"Slowest pairs by p99 latency", "Last results in terms of the fleet's median, and what they are.", "", 12, 9},
		append(pair[:len(pair):len(pair)],
			column{field: "Value #A", name: "p99 / fleet", unit: units.PercentUnit, steps: []step{{1.5, "orange"}, {2.5, "red"}}},
			column{field: "Value #B", name: "p50", unit: units.Seconds}, column{field: "Value #C", name: "p99", unit: units.Seconds}, column{field: "Value #D", name: "max", unit: units.Seconds}),
		top("topk", p99ToFleet, `%s`),
		top("topk", p99ToFleet, lastLatency("p50")+" and on ("+pairOf+") %s"),
		top("topk", p99ToFleet, lastLatency("p99")+" and on ("+pairOf+") %s"),
		top("topk", p99ToFleet, lastLatency("max")+" and on ("+pairOf+") %s"))
	b.table(about{"Slowest pairs by bandwidth", "Last results in terms of the fleet's median, and what they are.", "", 12, 9},
		append(pair[:len(pair):len(pair)],
			column{field: "Value #A", name: "bandwidth / fleet", unit: units.PercentUnit, steps: []step{{0, "red"}, {0.7, "orange"}, {0.9, "transparent"}}},
			column{field: "Value #B", name: "bandwidth", unit: units.BytesPerSecondSI}, column{field: "Value #C", name: "/ line rate", unit: units.PercentUnit}),
		top("bottomk", bandwidthToFleet, `%s`),
		top("bottomk", bandwidthToFleet, bandwidth+" and on ("+pairOf+") %s"),
		top("bottomk", bandwidthToFleet, "max by ("+pairOf+") (rdmabench_line_rate_ratio{"+ofProbe+"}) and on ("+pairOf+") %s"))

	b.row("As sender or as receiver?")
	b.lines(about{"Failing as sender", "Share of the time in which the last run from a node had failed, over all its peers.", units.PercentUnit, 12, 8}, nil,
		query{replace(`avg by (src) (%s) > 0`, failing), "{{src}}"})
	b.lines(about{"Failing as receiver", "The same by the node that was probed: over all that probe it. High here and low as sender: the receiving side, or its daemon.", units.PercentUnit, 12, 8}, nil,
		query{replace(`avg by (dst) (%s) > 0`, failing), "{{dst}}"})
	b.lines(about{"p99 latency as sender, worst nodes", "In terms of the fleet's median, the median over a node's peers.", units.PercentUnit, 12, 8},
		steps("transparent", step{1.5, "orange"}),
		query{worst(`quantile by (src) (0.5, `+p99ToFleet+`)`, "topk", "src", `quantile by (src) (0.5, max_over_time((`+p99ToFleet+`)[$__range:$__interval] @ end()))`), "{{src}}"})
	b.lines(about{"p99 latency as receiver, worst nodes", "In terms of the fleet's median, the median over the nodes that probe this one.", units.PercentUnit, 12, 8},
		steps("transparent", step{1.5, "orange"}),
		query{worst(`quantile by (dst) (0.5, `+p99ToFleet+`)`, "topk", "dst", `quantile by (dst) (0.5, max_over_time((`+p99ToFleet+`)[$__range:$__interval] @ end()))`), "{{dst}}"})
	b.areas(about{"Failures by reason and scope", "Failed runs in the window. scope says whose fault it is as far as the evidence goes: local is never the peer's. The first failure of a kind on a node is missing here; the table has it.", units.Short, 12, 9},
		query{`sum by (scope, stage, reason) (increase(rdmabench_probe_failures_total{` + ofProbe + `}[$window])) > 0`, "{{scope}}: {{reason}} ({{stage}})"})
	b.table(about{"Failures by NIC", "Failed runs in the window by stage, reason and scope; docs/reasons.md says what the words mean.", "", 12, 9},
		[]column{{field: "src"}, {field: "device"}, {field: "probe"}, {field: "stage"}, {field: "reason"}, {field: "scope"}, {field: "Value", name: "failures", unit: units.Short}},
		`sort_desc(sum by (src, device, probe, stage, reason, scope) (
  (increase(rdmabench_probe_failures_total{`+ofProbe+`}[$window]) > 0)
  or (rdmabench_probe_failures_total{`+ofProbe+`} unless rdmabench_probe_failures_total{`+ofProbe+`} offset $window)))`)

	b.row("Congestion, errors or the host?")
	b.lines(about{"Retransmissions and timeouts, worst ports", "Events a second on the port, by what the driver's counters mean, all traffic and not only ours.", units.CountsPerSecond, 12, 8}, nil,
		query{worstPorts("retransmit_local|retransmit_peer|sequence|timeout|retry_exhausted"), "{{src}} {{device}} {{class}}"})
	b.lines(about{"Congestion, worst ports", "Events a second on the port: ECN marks and CNPs, pause frames, receivers not ready, packets dropped for want of room.", units.CountsPerSecond, 12, 8}, nil,
		query{worstPorts("congestion|pause|discard|rnr|no_buffer"), "{{src}} {{device}} {{class}}"})
	b.lines(about{"Bit errors and lost links, worst ports", "Events a second on the port. Anything steady is a cable, a transceiver or a switch port.", units.CountsPerSecond, 12, 8}, nil,
		query{worstPorts("physical"), "{{src}} {{device}} {{class}}"})
	b.areas(about{"Tainted pairs by reason", "Pairs whose last figures come with this reason not to trust them.", units.Short, 12, 8},
		query{`sum by (reason) (rdmabench_probe_tainted{` + ofProbe + `}) > 0`, "{{reason}}"})
	b.upDown(about{"Ports", "ACTIVE or not: 40 ports, those that were down longest before others.", units.Short, 12, 9},
		query{`rdmabench_port_up{` + ofNode + `}
and on (src, device, port) bottomk(40, avg_over_time(rdmabench_port_up{` + ofNode + `}[$__range] @ end()))`, "{{src}} {{device}} {{port}}"})
	b.table(about{"Ports: what they are", "Compare firmware, rate and NUMA node of a suspect with those of its neighbours.", "", 12, 9},
		[]column{{field: "src"}, {field: "device"}, {field: "port"}, {field: "rail"}, {field: "Value #B", name: "state", text: downUp}, {field: "Value #C", name: "rate", unit: units.BytesPerSecondSI},
			{field: "link_layer", name: "link"}, {field: "driver"}, {field: "fw_version", name: "firmware"}, {field: "board_id", name: "board"}, {field: "numa_node", name: "NUMA"}, {field: "netdev"}},
		`max by (src, device, port, rail, link_layer, driver, fw_version, board_id, numa_node, netdev) (rdmabench_device_info{`+ofNode+`})`,
		`max by (src, device, port) (rdmabench_port_up{`+ofNode+`})`,
		`max by (src, device, port) (rdmabench_port_rate_bytes_per_second{`+ofNode+`})`)

	b.row("Is the tool itself healthy?")
	b.lines(about{"Age of the last success, oldest nodes", "In intervals of the probe, the oldest pair of a node. Above 3 a result is stale. A steady rise is a node that stopped.", units.Short, 12, 8},
		steps("transparent", step{3, "orange"}),
		query{worst(`max by (src, probe) `+age, "topk", "src, probe", `max by (src, probe) (max_over_time(`+age+`[$__range:$__interval] @ end()))`), "{{src}} {{probe}}"})
	b.table(about{"Stale pairs", "Pairs without a success in three intervals.", "", 12, 8},
		[]column{{field: "src"}, {field: "device"}, {field: "dst"}, {field: "probe"}, {field: "Value", name: "intervals ago", unit: units.Short}},
		`sort_desc(max by (src, device, dst, probe) `+age+` > 3)`)
	b.areas(about{"Runs by result", "Runs in the window. Skipped ones are neither success nor failure.", units.Short, 8, 8},
		query{`sum by (result) (increase(rdmabench_probe_runs_total{` + ofProbe + `}[$window]))`, "{{result}}"})
	b.areas(about{"Skips by reason", "Runs that were not tried, in the window: for want of a free port, in a blackout, while the last one was still running.", units.Short, 8, 8},
		query{`sum by (reason) (increase(rdmabench_probe_skips_total{` + ofProbe + `}[$window])) > 0`, "{{reason}}"})
	b.lines(about{"Duration of a run", "From the first connection to the last clean-up: the median pair, and the longest. The interval must be longer.", units.Seconds, 8, 8}, nil,
		query{`quantile by (probe) (0.5, rdmabench_probe_duration_seconds{` + ofProbe + `})`, "median {{probe}}"},
		query{`max by (probe) (rdmabench_probe_duration_seconds{` + ofProbe + `})`, "longest {{probe}}"})
	b.lines(about{"What probing costs the fabric", "Payload that probes move, averaged over the window.", units.BytesPerSecondSI, 8, 8}, nil,
		query{`sum by (probe) (rate(rdmabench_probe_bytes_total{` + ofProbe + `}[$window]))`, "{{probe}}"})
	b.lines(about{"What probing costs the nodes", "Processors kept busy: by the measuring threads averaged over the window, and by all of a daemon, the busiest one.", units.PercentUnit, 8, 8}, nil,
		query{`max by (side) (sum by (src, side) (rate(rdmabench_probe_cpu_seconds_total{` + ofProbe + `}[$window])))`, "measuring, {{side}}"},
		query{`max(rate(process_cpu_seconds_total{` + ofTarget + `}[$__rate_interval]))`, "daemon"})
	b.lines(about{"Scrapes", "The slowest daemon to answer a scrape.", units.Seconds, 8, 8}, nil,
		query{`max(scrape_duration_seconds{` + ofTarget + `})`, "slowest scrape"})
	b.lines(about{"Memory", "Resident memory: the median daemon, and the largest.", units.BytesIEC, 8, 8}, nil,
		query{`quantile(0.5, process_resident_memory_bytes{` + ofTarget + `})`, "median"},
		query{`max(process_resident_memory_bytes{` + ofTarget + `})`, "largest"})
	b.lines(about{"Sessions", "Under way at this moment on one node, in either role: the average, and the most.", units.Short, 8, 8}, nil,
		query{`avg(rdmabench_sessions{` + ofTarget + `})`, "average"},
		query{`max(rdmabench_sessions{` + ofTarget + `})`, "most"})
	b.stat(about{"Reloads failed", "Daemons that run on an old configuration because the new one is bad.", units.Short, 2, 8},
		steps("green", step{1, "red"}), `sum(rdmabench_config_last_reload_successful{`+ofTarget+`} == bool 0)`)
	b.stat(about{"Pairs shown", "Of the pairs a daemon may show one by one, the share in use at the fullest one. Beyond it results are missing from the figures per pair, though not from those per NIC.", units.PercentUnit, 2, 8},
		steps("green", step{0.9, "orange"}, step{1, "red"}), `max(rdmabench_pairs{`+ofTarget+`} / rdmabench_pairs_limit{`+ofTarget+`})`)
	b.stat(about{"Results not shown", "Results in the window that found no room among the pairs shown.", units.Short, 2, 8},
		steps("green", step{1, "orange"}), `sum(increase(rdmabench_pair_results_dropped_total{`+ofTarget+`}[$window]))`)
	b.stat(about{"Bugs", "Probes that panicked and sources of metrics that failed, in the window.", units.Short, 2, 8},
		steps("green", step{1, "red"}), `sum(increase({__name__=~"rdmabench_(schedule_panics|scrape_errors)_total",`+ofTarget+`}[$window]))`)
	return b.Build()
}

// failing is the share of the window in which the last run of a pair had failed.
const failing = `1 - avg_over_time(rdmabench_probe_success{` + ofProbe + `}[$window])`

const pairOf = "src, device, port, dst, dst_device, path, probe, op, size"

func lastLatency(stat string) string {
	return `max by (` + pairOf + `) (rdmabench_last_latency_seconds{` + ofProbe + `,stat="` + stat + `"})`
}

// top puts the 20 pairs with the largest or smallest x in place of %s.
func top(of, x, format string) string {
	return replace(format, fmt.Sprintf("%s(20, max by (%s) (%s))", of, pairOf, x))
}

// worstLatency is a quantile of the NICs that have the highest p99.
func worstLatency(stat string) string {
	return worst(`quantile by (`+nic+`) (0.5, rdmabench_last_latency_seconds{`+ofProbe+`,stat="`+stat+`"})`, "topk", nic,
		`quantile by (`+nic+`) (0.5, max_over_time(`+p99+`[$__range] @ end()))`)
}

// worstPorts is the rate of events of some classes on the ports that had most of them.
func worstPorts(classes string) string {
	x := `rdmabench_port_events_total{` + ofNode + `,class=~"` + classes + `"}`
	return worst(`rate(`+x+`[$window])`, "topk", "src, device, port, class", `increase(`+x+`[$__range] @ end()) > 0`)
}

func annotation(name, color, expr, title, text string) cog.Builder[dashboard.AnnotationQuery] {
	return dashboard.NewAnnotationQueryBuilder().Name(name).Datasource(datasource()).Enable(true).IconColor(color).
		Expr(expr).Step("60s").TitleFormat(title).TextFormat(text)
}
