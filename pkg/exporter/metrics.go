package exporter

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

const (
	gauge     = dto.MetricType_GAUGE
	counter   = dto.MetricType_COUNTER
	histogram = dto.MetricType_HISTOGRAM
)

// scope is what a metric has a series for, on one node. Its value stands for the number of them in the documented formula.
type scope string

const (
	perNode        scope = "1"
	perProbe       scope = "T"
	perSweep       scope = "S"
	perPort        scope = "P"
	perPortCounter scope = "P·C"
	perPortEvent   scope = "P·E"
	perPortCheck   scope = "P·K"
	perDevice      scope = "D"
	perNIC         scope = "P·T" // a port and a probe
	perFailure     scope = "F"
	perHistogram   scope = "H"
	perPair        scope = "L"
	perLatencyPair scope = "Ll"
	perRatePair    scope = "Lb"
)

// metric is a row of the table below, from which the descriptors and docs/metrics.md are made.
type metric struct {
	name   string
	typ    dto.MetricType
	per    scope
	each   int // series per element of the scope, at worst
	help   string
	labels []string
	desc   *prometheus.Desc
}

var table []*metric // in the order of the documentation

func define(name string, typ dto.MetricType, per scope, each int, labels []string, help string) *metric {
	m := &metric{name: "rdmabench_" + name, typ: typ, per: per, each: each, help: help, labels: labels}
	m.desc = prometheus.NewDesc(m.name, help, labels, nil)
	table = append(table, m)
	return m
}

// The label sets. src and dst are configured names: src of one node's series matches dst of another's.
var (
	portLabels  = []string{"src", "device", "port"}
	sweepLabels = []string{"src", "sweep"}
	nicLabels   = []string{"src", "device", "port", "rail", "probe", "op"}
	histLabels  = []string{"src", "device", "port", "rail", "path", "probe", "op", "size", "measure"}
	pairLabels  = []string{"src", "device", "port", "rail", "dst", "dst_device", "path", "probe", "op", "size"}
)

func also(labels []string, more ...string) []string { return slices.Concat(labels, more) }

// latencyStats are the values of the label stat, in the order in which the registry sorts them.
var latencyStats = []string{"max", "mean", "min", "p50", "p90", "p99", "p999"}

// The table of all metrics.
var (
	buildInfo = define("build_info", gauge, perNode, 1, []string{"version", "revision", "goversion"},
		"Always 1. What this daemon was built from.")
	nodeInfo = define("node_info", gauge, perNode, 1, []string{"src"},
		"Always 1. This node's name and, as further labels, the labels it was configured with.")
	reloadOK = define("config_last_reload_successful", gauge, perNode, 1, nil,
		"1 if the last attempt to load the configuration succeeded, else 0 and the previous one is in use.")
	reloadTime = define("config_last_reload_success_timestamp_seconds", gauge, perNode, 1, nil,
		"When the configuration in use was loaded.")
	peerCount = define("peers", gauge, perNode, len(peerStates)+len(passiveStates), []string{"state"},
		"Peers by state. Of the last sessions of all probes and ports with them: ok (every one gave figures), degraded (some failed, for a reason of the path or the peer), failing (all did), unknown (none is remembered, or only failures of this node). Not probed are: self (this node in the list), drained (label lame_duck, or its own wish), duplicate (its name or address is another's already), unnamed (an address from DNS whose node has never told its name).")
	discoveryFailures = define("discovery_failures_total", counter, perNode, 5, []string{"source"},
		"Times that a source of peers could not be read. What it told last stays in use.")
	discoveryFailing = define("discovery_failing", gauge, perNode, 5, []string{"source"},
		"Sources of peers that can't be read now.")
	discoveryTime = define("discovery_last_success_timestamp_seconds", gauge, perNode, 5, []string{"source"},
		"When sources of peers could last be read; of several of a kind, the one that could not for longest.")
	peersReplaced = define("peer_replacements_total", counter, perNode, 1, nil,
		"Times that another machine was found behind a peer's name, by its machine id and devices: what was measured before says nothing of it.")
	sessionCount = define("sessions", gauge, perNode, 1, nil,
		"Sessions under way with other nodes, in either role.")
	maintenanceMode = define("maintenance_mode", gauge, perNode, 1, nil,
		"1 while this node is paused or a lame duck: it probes nobody, and its peers are told to leave it alone. Else 0.")
	pairCount = define("pairs", gauge, perNode, 1, nil,
		"Label sets in use by the metrics that have a dst.")
	pairLimit = define("pairs_limit", gauge, perNode, 1, nil,
		"Label sets that the metrics with a dst may have. The first ones keep their place until they are no longer configured.")
	pairsDropped = define("pair_results_dropped_total", counter, perNode, 1, nil,
		"Results that found rdmabench_pairs_limit reached and so are missing from the metrics with a dst, once for each message size. They count everywhere else.")
	clockResidual = define("clock_residual_ratio", gauge, perNode, 1, nil,
		"How far two calibrations of the clock that latencies are taken with differ, one over the process's first second and one over all the time since; 0 where that clock needs none. Above 0.001 results are tainted (clock).")
	scrapeErrors = define("scrape_errors_total", counter, perNode, 1, []string{"source"},
		"Times that a source of metrics failed, which left its metrics incomplete.")

	deviceInfo = define("device_info", gauge, perPort, 1,
		also(portLabels, "rail", "link_layer", "driver", "fw_version", "hca_type", "board_id", "pci", "numa_node", "netdev",
			"driver_version", "kernel", "rdma_core", "pcie", "mtu", "fingerprint"),
		"Always 1. What is known of an RDMA device and its port; empty where the driver doesn't tell.")
	deviceUsable = define("device_usable", gauge, perPort, 1, portLabels,
		"1 if probes can use the port, else 0; rdmabench_device_fault says why.")
	deviceFault = define("device_fault", gauge, perPort, 1, also(portLabels, "reason"),
		"Always 1, and only there while the port can't be used, for this reason.")
	portUp = define("port_up", gauge, perPort, 1, portLabels,
		"1 if the port is ACTIVE, else 0.")
	portFlaps = define("port_flaps_total", counter, perPort, 1, portLabels,
		"Times that the port went down while the daemon ran, short ones included.")
	portRate = define("port_rate_bytes_per_second", gauge, perPort, 1, portLabels,
		"Line rate of the port, where the driver tells the truth about it.")
	portCounter = define("port_counters_total", counter, perPortCounter, 1, also(portLabels, "counter"),
		"Counters of the port by the driver's own names.")
	portEvents = define("port_events_total", counter, perPortEvent, 1, also(portLabels, "class"),
		"Events on the port by what they mean, summed up from the driver's counters. A driver that can't count a class doesn't have it.")
	environmentOK = define("environment_ok", gauge, perPortCheck, 1, also(portLabels, "check"),
		"1 if this condition is as it should be for a measurement from the port, 0 if figures may suffer from it. A condition that can't be told here is absent. docs/environment.md lists them.")
	environmentChanges = define("environment_changes_total", counter, perDevice, 1, []string{"src", "device"},
		"Times that the device's fingerprint became another one: figures from before and after are not alike. The log says what changed.")

	probeInterval = define("probe_interval_seconds", gauge, perProbe, 1, []string{"src", "probe"},
		"Time between two scheduled runs of the probe.")
	probeSkips = define("probe_skips_total", counter, perProbe, len(probe.SkipReasons), []string{"src", "probe", "reason"},
		"Runs that were skipped, by reason. A skip is neither success nor failure.")
	scheduleMissed = define("schedule_missed_total", counter, perProbe, 1, []string{"src", "probe"},
		"Runs that were never due to this process because the machine was suspended or its clock set forward.")
	schedulePanics = define("schedule_panics_total", counter, perProbe, 1, []string{"src", "probe"},
		"Runs that ended in a panic, which is a bug in rdmabenchd.")

	unconfirmed = define("probe_unconfirmed_failures_total", counter, perProbe, 1, []string{"src", "probe"},
		"Failures that the repeat soon after did not confirm. They count nowhere else.")
	coverageRatio = define("coverage_ratio", gauge, perProbe, 1, []string{"src", "probe"},
		"Share of the pairs (a port of this node and a peer) planned for a period of the probe that gave figures in it; of the last period that is over, absent before. /api/v1/coverage names the others.")
	sweepHealthy = define("sweep_healthy", gauge, perSweep, 1, sweepLabels,
		"1 if the last sweep from this node found nothing wrong and measured enough to say so, else 0.")
	sweepRun = define("sweep_last_run_timestamp_seconds", gauge, perSweep, 1, sweepLabels,
		"When the last sweep from this node ended.")
	sweepGood = define("sweep_last_success_timestamp_seconds", gauge, perSweep, 1, sweepLabels,
		"When the last healthy sweep from this node ended, since this daemon started.")
	sweepDuration = define("sweep_duration_seconds", gauge, perSweep, 1, sweepLabels,
		"Time the last sweep from this node took.")
	sweepCoverage = define("sweep_coverage_ratio", gauge, perSweep, 1, sweepLabels,
		"Sessions with figures in the last sweep from this node, of those that were planned.")
	sweepRows = define("sweep_rows", gauge, perSweep, len(sweepVerdicts), also(sweepLabels, "verdict"),
		"Sessions of the last sweep from this node by verdict; unknown is what was not measured.")
	sweepSuspects = define("sweep_suspects", gauge, perSweep, len(sweepKinds), also(sweepLabels, "kind"),
		"Suspects of the last sweep from this node by kind; the report below /sweeps/ names them.")
	sweepUnreached = define("sweep_unreached_nodes", gauge, perSweep, 1, sweepLabels,
		"Nodes that this node could not talk to in its last sweep.")

	probeRuns = define("probe_runs_total", counter, perNIC, len(probe.Outcomes), also(nicLabels, "result"),
		"Sessions from this port by how they ended: ok, tainted, failed or skipped.")
	probeFailures = define("probe_failures_total", counter, perFailure, 1, also(nicLabels, "stage", "reason", "scope"),
		"Failed sessions from this port by stage, reason and whose fault it is. A combination exists from its first failure on.")
	probeBytes = define("probe_bytes_total", counter, perNIC, 1, nicLabels,
		"Payload bytes that the timed parts of probes from this port moved.")
	probeCPU = define("probe_cpu_seconds_total", counter, perNIC, 2, also(nicLabels, "side"),
		"Processor time of the measuring threads, on this node (local) and on the peers (remote).")
	latency = define("latency_seconds", histogram, perHistogram, 1, histLabels,
		"Latency of every timed sample of every run that gave figures, over all peers. Native histogram of schema 3 with exemplars; what measure means is in rdmabench_last_latency_seconds.")

	probeSuccess = define("probe_success", gauge, perPair, 1, pairLabels,
		"1 if the last session gave figures (ok or tainted), 0 if it failed. Skips don't change it.")
	lastRun = define("probe_last_run_timestamp_seconds", gauge, perPair, 1, pairLabels,
		"When the last session ended, skips aside.")
	lastSuccess = define("probe_last_success_timestamp_seconds", gauge, perPair, 1, pairLabels,
		"When the last session that gave figures ended.")
	probeDuration = define("probe_duration_seconds", gauge, perPair, 1, pairLabels,
		"Time the last session took, skips aside, from the first connection to the last clean-up and over all its message sizes.")
	probeTainted = define("probe_tainted", gauge, perPair, len(probe.Taints), also(pairLabels, "reason"),
		"1 if there is this reason not to trust the last figures, 0 if there was one only earlier.")
	lastLatency = define("last_latency_seconds", gauge, perLatencyPair, len(latencyStats), also(pairLabels, "measure", "stat"),
		"Latency in the last run that gave figures. measure is half-rtt (half of the round trip: write, send), operation (post to completion: read, atomics) or rtt. A quantile that the number of samples can't carry is absent.")
	lastBandwidth = define("last_bandwidth_bytes_per_second", gauge, perRatePair, len(directions), also(pairLabels, "direction"),
		"Payload bandwidth in the last run that gave figures; direction is that of the data as src sees it: tx or rx. A probe of both directions, or of reads among writes, has both.")
	lineRateRatio = define("line_rate_ratio", gauge, perRatePair, 1, pairLabels,
		"Payload bandwidth in the last run that gave figures, of this port's line rate; of two directions, the busier one's.")
	lastMessageRate = define("last_message_rate_per_second", gauge, perRatePair, 1, pairLabels,
		"Messages per second in the last run that gave figures.")
	lossRatio = define("loss_ratio", gauge, perPair, 1, pairLabels,
		"Lost messages in the last run that gave figures, of those sent: of pings, and over UC and UD, where the end that receives counts.")
)

// series is one sample of a gauge or a counter. It doesn't change once it is collected.
type series struct {
	m       *metric
	labels  []*dto.LabelPair // sorted by name
	value   float64
	created *timestamppb.Timestamp // of a counter
}

func (s *series) Desc() *prometheus.Desc { return s.m.desc }

func (s *series) Write(out *dto.Metric) error {
	out.Label = s.labels
	if s.m.typ == counter {
		out.Counter = &dto.Counter{Value: &s.value, CreatedTimestamp: s.created}
	} else {
		out.Gauge = &dto.Gauge{Value: &s.value}
	}
	return nil
}

// batch gathers series.
type batch []prometheus.Metric

// add leaves out what is no number: NaN and infinity never leave the daemon.
func (b *batch) add(m *metric, labels []*dto.LabelPair, v float64) {
	if !math.IsNaN(v) && !math.IsInf(v, 0) {
		*b = append(*b, &series{m: m, labels: labels, value: v})
	}
}

// maybe adds a value that may be absent.
func (b *batch) maybe(m *metric, labels []*dto.LabelPair, v *float64) {
	if v != nil {
		b.add(m, labels, *v)
	}
}

// count adds a counter that began at 0 at the time created.
func (b *batch) count(m *metric, labels []*dto.LabelPair, v float64, created *timestamppb.Timestamp) {
	*b = append(*b, &series{m: m, labels: labels, value: v, created: created})
}

// pairs returns the label pairs of names and as many values, sorted by name.
func pairs(names []string, values ...string) []*dto.LabelPair {
	out := make([]*dto.LabelPair, len(names))
	for i := range names {
		out[i] = &dto.LabelPair{Name: &names[i], Value: &values[i]}
	}
	slices.SortFunc(out, byName)
	return out
}

// with returns the sorted labels with one more in its place. They share what they have in common.
func with(labels []*dto.LabelPair, name, value string) []*dto.LabelPair {
	l := &dto.LabelPair{Name: &name, Value: &value}
	i, _ := slices.BinarySearchFunc(labels, l, byName)
	out := make([]*dto.LabelPair, 0, len(labels)+1)
	out = append(out, labels[:i]...)
	out = append(out, l)
	return append(out, labels[i:]...)
}

func byName(a, b *dto.LabelPair) int { return cmp.Compare(a.GetName(), b.GetName()) }

const maxLabelBytes = 128

// clean makes a label value of a string from a driver, a peer or a person: valid UTF-8 without control characters, at most
// maxLabelBytes long. What is cut gets a hash in its place, so that two long names stay two.
func clean(s string) string {
	if len(s) <= maxLabelBytes && utf8.ValidString(s) && strings.IndexFunc(s, unicode.IsControl) < 0 {
		return s
	}
	long := s
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return utf8.RuneError
		}
		return r
	}, strings.ToValidUTF8(s, string(utf8.RuneError)))
	if len(s) <= maxLabelBytes {
		return s
	}
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(long)) // never fails
	end := fmt.Sprintf("~%08x", hash.Sum32())
	i := maxLabelBytes - len(end)
	for !utf8.RuneStart(s[i]) {
		i--
	}
	return s[:i] + end
}

// labelName makes a label name of a configured one; empty if nothing is left of it.
func labelName(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < utf8.RuneSelf && (unicode.IsLetter(r) || unicode.IsDigit(r)) {
			return r
		}
		return '_'
	}, clean(s))
	return strings.TrimLeft(s, "_0123456789") // a name can't begin with a digit, and __ is reserved
}
