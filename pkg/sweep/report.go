// Package sweep turns the results of a whole sweep into one report: what was measured, what was not, what is slow, and whose
// fault that is as far as the figures tell. It is pure: rows in, report out. docs/localisation.md has the method.
package sweep

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// Row is the outcome of one session.
type Row = control.Row

// Verdict is the judgement of a sweep or of a part of it.
type Verdict string

// The verdicts.
const (
	Healthy    Verdict = "healthy"
	Unhealthy  Verdict = "unhealthy"
	Incomplete Verdict = "incomplete" // nothing is known to be wrong, but too little to say that all is well
	Unreached  Verdict = "unreached"  // did not answer
	Unknown    Verdict = "unknown"    // not measured, or it can't be told
)

// Kind is what a suspect is.
type Kind string

// The kinds of suspects.
const (
	NIC  Kind = "nic"
	Node Kind = "node"
	Rail Kind = "rail"
	Rack Kind = "rack" // its uplink
	Pair Kind = "pair"
)

// Directions of a suspect: the way of the data as the suspect sees it.
const (
	Sending   = "sending"
	Receiving = "receiving"
	Both      = "both"
)

// MinSources is how many sources a group must have before its members are compared with each other.
const MinSources = 6

// minCoverage is the least share of rows, those of unreached nodes aside, for a sweep without a finding to be healthy.
const minCoverage = 0.95

// Limits are the absolute limits of a probe, as configured by expect. Zero fields mean none.
type Limits struct {
	LineRate  float64 // least bandwidth, of the line rate
	Bandwidth float64 // least, bytes per second
	P50, P99  float64 // most, seconds
	Loss      float64 // most, ratio
}

// Member is a node that the sweep should cover.
type Member struct {
	Name   string
	Labels map[string]string // rack, pod
	// Reason and Detail say why its rows could not be had; empty: they are among the rows, or this is another node's own sweep,
	// in which members only answer.
	Reason, Detail string
}

// Input is all that a report is made from.
type Input struct {
	Name     string // of the sweep
	By       string // the node that reports
	Fleet    bool   // rows of all members; else only By's
	Started  time.Time
	Finished time.Time
	Members  []Member
	Rows     []Row
	Limits   map[string]Limits // by probe
	Notes    []string          // to be passed on
	Last     *Report           // the last good one, if there is one
}

// Report is the outcome of a sweep. Its JSON is the machine interface of `rdmabenchd sweep --output=json`.
type Report struct {
	Name       string          `json:"name"`
	By         string          `json:"by"`
	Fleet      bool            `json:"fleet"` // made from the rows of all nodes
	Verdict    Verdict         `json:"verdict"`
	Coverage   float64         `json:"coverage"` // measured, of the rows that were planned
	Planned    int             `json:"planned"`
	Measured   int             `json:"measured"`
	Started    time.Time       `json:"started"`
	Finished   time.Time       `json:"finished"`
	Nodes      []NodeReport    `json:"nodes"`
	Rails      []RailReport    `json:"rails"`
	Pairs      []PairReport    `json:"pairs"`
	Unreached  []UnreachedNode `json:"unreached"`
	Suspects   []Suspect       `json:"suspects"`
	Doubtful   []Suspect       `json:"doubtful"`   // what too little speaks against to accuse anybody until it is seen again
	Exonerated []Suspect       `json:"exonerated"` // what was fine when measured again
	Notes      []string        `json:"notes"`      // what could not be told, and why
	Diff       *Diff           `json:"diff"`       // to the last good sweep; null: there was none
	limits     map[string]Limits
	members    []Member
	split      bool // most of the fleet may be bad
}

// NodeReport sums up a node.
type NodeReport struct {
	Name    string            `json:"name"`
	Labels  map[string]string `json:"labels"`
	Verdict Verdict           `json:"verdict"`
	NICs    []NICReport       `json:"nics"`
}

// NICReport sums up a port over all its rows, in either role. Figures are medians over its peers.
type NICReport struct {
	Device    string   `json:"device"`
	Port      int      `json:"port"`
	Rail      string   `json:"rail"`
	Verdict   Verdict  `json:"verdict"`
	Measured  int      `json:"measured"`
	Bad       int      `json:"bad"`
	Sending   *float64 `json:"sending"`   // bytes per second
	Receiving *float64 `json:"receiving"` // bytes per second
	P50       *float64 `json:"p50"`       // seconds
	P99       *float64 `json:"p99"`       // seconds
}

// RailReport sums up a rail.
type RailReport struct {
	Name      string   `json:"name"`
	Verdict   Verdict  `json:"verdict"`
	Measured  int      `json:"measured"`
	Bad       int      `json:"bad"`
	Bandwidth *float64 `json:"bandwidth"`
	P50       *float64 `json:"p50"`
	P99       *float64 `json:"p99"`
}

// PairReport is a row with its judgement.
type PairReport struct {
	Row
	Verdict Verdict `json:"verdict"`
	Why     string  `json:"why"` // of a verdict of unhealthy or unknown
}

// UnreachedNode is a node that nobody could talk to, or whose rows could not be had.
type UnreachedNode struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
	Detail string `json:"detail"`
	Tried  int    `json:"tried"` // by so many nodes
}

// Suspect is what the evidence points at.
type Suspect struct {
	Kind      Kind     `json:"kind"`
	Name      string   `json:"name"`
	Node      string   `json:"node"` // empty for rails, racks and pairs
	Device    string   `json:"device"`
	Port      int      `json:"port"`
	Rail      string   `json:"rail"`
	Peer      string   `json:"peer"`      // of a pair: the other node
	Direction string   `json:"direction"` // sending, receiving or both
	Symptoms  []string `json:"symptoms"`  // bandwidth, latency, loss, failures
	Evidence  string   `json:"evidence"`
	Confirmed bool     `json:"confirmed"` // seen again, against peers that are known to be good
	Checks    int      `json:"checks"`    // how many rows were measured again for it

	a, b nic // of a pair; a: of a NIC
}

// FromResult makes the row of a node's result.
func FromResult(src string, r *probe.Result, lineRate *float64) Row {
	row := Row{
		Src: src, SrcDevice: r.Device, SrcPort: r.Port, Dst: r.Peer, Rail: r.Rail, Path: r.Path, LineRate: lineRate,
		Probe: r.Probe, Kind: string(r.Kind), Op: string(r.Op), Time: r.Time, Result: string(r.Outcome), Taints: []string{}, Points: []control.Point{},
	}
	if r.PeerDev != nil {
		row.DstDevice = *r.PeerDev
	}
	if r.PeerPort != nil {
		row.DstPort = *r.PeerPort
	}
	if r.Reason != nil {
		row.Stage, row.Reason, row.Scope, row.Detail = string(*r.Stage), string(*r.Reason), string(*r.Scope), *r.Detail
	}
	for _, t := range r.Taints {
		row.Taints = append(row.Taints, string(t))
	}
	if !r.Usable() {
		return row
	}
	messages := uint64(0)
	for _, run := range r.Runs {
		messages += run.Iterations
		p := control.Point{Size: run.Size, MessageRate: run.MessageRate, Loss: run.LossRatio}
		if run.Latency != nil {
			p.P50, p.P99 = run.Latency.P50, run.Latency.P99
		}
		if run.Bandwidth != nil {
			v := run.Bandwidth.BytesPerSecond
			p.Bandwidth = &v
		}
		row.Points = append(row.Points, p)
	}
	if again, ok := retransmits(r); ok && messages > 0 {
		v := again / float64(messages)
		row.Retransmits = &v
	}
	return row
}

// retransmits counts what either end sent again; ok is false if neither can tell.
func retransmits(r *probe.Result) (n float64, ok bool) {
	for _, e := range []*probe.EndEvidence{r.Evidence.Local, r.Evidence.Remote} {
		if e == nil {
			continue
		}
		for _, class := range []string{"retransmit_local", "retransmit_peer", "timeout"} {
			if v, has := e.Classes[class]; has {
				n, ok = n+float64(v), true
			}
		}
	}
	return n, ok
}

// New makes the report of a sweep.
func New(in Input) *Report {
	r := &Report{
		Name: in.Name, By: in.By, Fleet: in.Fleet, Started: in.Started, Finished: in.Finished, Nodes: []NodeReport{}, Rails: []RailReport{},
		Pairs: []PairReport{}, Unreached: []UnreachedNode{}, Suspects: []Suspect{}, Doubtful: []Suspect{}, Exonerated: []Suspect{}, Notes: append([]string{}, in.Notes...),
		limits: in.Limits, members: in.Members,
	}
	rows := slices.Clone(in.Rows)
	slices.SortStableFunc(rows, compareRows)
	a := newAnalysis(rows, in)
	r.findUnreached(a, in)
	a.localise(r)
	r.cover(a, in)
	r.fill(a, in)
	r.split = len(a.split) > 0
	r.conclude()
	r.Compare(in.Last)
	return r
}

// Compare tells what changed since the last good sweep; nil: there was none.
func (r *Report) Compare(last *Report) { r.Diff = diff(last, r) }

func compareRows(x, y Row) int {
	return cmp.Or(cmp.Compare(x.Probe, y.Probe), cmp.Compare(x.Src, y.Src), cmp.Compare(x.SrcDevice, y.SrcDevice), cmp.Compare(x.SrcPort, y.SrcPort),
		cmp.Compare(x.Dst, y.Dst), cmp.Compare(x.DstDevice, y.DstDevice), cmp.Compare(x.DstPort, y.DstPort), x.Time.Compare(y.Time))
}

func usable(row *Row) bool {
	return row.Result == string(probe.OK) || row.Result == string(probe.Tainted)
}

// AtControl reports whether a session ended before any RDMA was tried, for a reason that is not its own node's.
func AtControl(row *Row) bool {
	return row.Result == string(probe.Failed) && row.Scope != string(probe.ScopeLocal) &&
		slices.Contains([]string{string(probe.StageResolve), string(probe.StageConnect), string(probe.StageAuth)}, row.Stage)
}

// findUnreached lists the nodes that nobody could talk to.
func (r *Report) findUnreached(a *analysis, in Input) {
	type tally struct {
		tried, failed map[string]bool
		why           *Row
	}
	by := map[string]*tally{}
	for i := range a.rows {
		row := a.rows[i].row
		if row.Result == string(probe.Skipped) || row.Scope == string(probe.ScopeLocal) {
			continue
		}
		t := by[row.Dst]
		if t == nil {
			t = &tally{map[string]bool{}, map[string]bool{}, nil}
			by[row.Dst] = t
		}
		t.tried[row.Src] = true
		if AtControl(row) {
			t.failed[row.Src], t.why = true, row
		}
	}
	talked := map[string]bool{} // nodes that answered anybody once, or measured something themselves
	for i := range a.rows {
		if row := a.rows[i].row; usable(row) {
			talked[row.Src], talked[row.Dst] = true, true
		}
	}
	listed := map[string]bool{}
	for _, m := range in.Members {
		if m.Reason == "" {
			continue
		}
		u := UnreachedNode{Name: m.Name, Reason: m.Reason, Detail: m.Detail, Tried: 1}
		if t := by[m.Name]; t != nil {
			u.Tried = max(1, len(t.failed))
		}
		r.Unreached, listed[m.Name] = append(r.Unreached, u), true
	}
	for name, t := range by {
		if !listed[name] && len(t.failed) > 0 && len(t.failed) == len(t.tried) && !talked[name] {
			r.Unreached = append(r.Unreached, UnreachedNode{Name: name, Reason: t.why.Reason, Detail: t.why.Detail, Tried: len(t.tried)})
		}
	}
	slices.SortFunc(r.Unreached, func(x, y UnreachedNode) int { return strings.Compare(x.Name, y.Name) })
}

func (r *Report) unreached(node string) bool {
	return slices.ContainsFunc(r.Unreached, func(u UnreachedNode) bool { return u.Name == node })
}

// cover counts what was planned and what was measured. A node whose rows could not be had counts as many as the median of the
// others.
func (r *Report) cover(a *analysis, in Input) {
	perNode := map[string]int{}
	for i := range a.rows {
		row := a.rows[i].row
		perNode[row.Src]++
		if usable(row) {
			r.Measured++
		}
	}
	r.Planned = len(a.rows)
	if counts := slices.Sorted(maps.Values(perNode)); in.Fleet && len(counts) > 0 {
		for _, m := range in.Members {
			if perNode[m.Name] == 0 {
				r.Planned += counts[len(counts)/2]
			}
		}
	}
	if r.Planned > 0 {
		r.Coverage = float64(r.Measured) / float64(r.Planned)
	}
}

// conclude gives the one verdict.
func (r *Report) conclude() {
	open, known := 0, 0
	for i := range r.Pairs {
		p := &r.Pairs[i]
		if r.unreached(p.Dst) || r.unreached(p.Src) {
			continue
		}
		known++
		if p.Result == string(probe.Skipped) {
			open++
		}
	}
	switch {
	case len(r.Suspects) > 0 || len(r.Unreached) > 0:
		r.Verdict = Unhealthy
	case r.Measured == 0 || r.split || float64(open) > (1-minCoverage)*float64(known):
		r.Verdict = Incomplete
	default:
		r.Verdict = Healthy
	}
}

// fill makes the lists of nodes, rails and pairs from the analysis.
func (r *Report) fill(a *analysis, in Input) {
	labels := map[string]map[string]string{}
	for _, m := range in.Members {
		labels[m.Name] = m.Labels
	}
	blamed := map[nic]bool{}
	blamedNode, blamedRail := map[string]bool{}, map[string]bool{}
	for _, s := range r.Suspects {
		switch s.Kind {
		case NIC:
			blamed[s.a] = true
		case Node:
			blamedNode[s.Node] = true
		case Rail:
			blamedRail[s.Rail] = true
		}
	}
	nodes := map[string]*NodeReport{}
	node := func(name string) *NodeReport {
		n := nodes[name]
		if n == nil {
			n = &NodeReport{Name: name, Labels: labels[name], Verdict: Unknown, NICs: []NICReport{}}
			if n.Labels == nil {
				n.Labels = map[string]string{}
			}
			nodes[name] = n
		}
		return n
	}
	for _, m := range in.Members {
		node(m.Name)
	}
	for _, n := range a.nics() {
		rep, own := node(n.node), a.summary(n)
		own.Verdict = Unknown
		switch {
		case blamed[n] || blamedNode[n.node]:
			own.Verdict = Unhealthy
		case own.Measured > 0:
			own.Verdict = Healthy
		}
		if n.device != "" {
			rep.NICs = append(rep.NICs, own)
		}
		if own.Verdict == Unhealthy || own.Verdict == Healthy && rep.Verdict == Unknown {
			rep.Verdict = own.Verdict
		}
	}
	for _, name := range slices.SortedFunc(maps.Keys(nodes), natural) {
		n := nodes[name]
		if blamedNode[name] {
			n.Verdict = Unhealthy
		}
		if r.unreached(name) {
			n.Verdict = Unreached
		}
		r.Nodes = append(r.Nodes, *n)
	}
	for _, rail := range a.rails() {
		rep := a.railSummary(rail)
		rep.Verdict = Unknown
		switch {
		case blamedRail[rail]:
			rep.Verdict = Unhealthy
		case rep.Measured > 0:
			rep.Verdict = Healthy
		}
		r.Rails = append(r.Rails, rep)
	}
	for i := range a.rows {
		j := &a.rows[i]
		p := PairReport{Row: *j.row, Verdict: Unknown}
		switch {
		case j.anyBad():
			p.Verdict, p.Why = Unhealthy, j.why()
		case usable(j.row):
			p.Verdict = Healthy
		default:
			p.Why = strings.TrimPrefix(j.row.Reason+": "+j.row.Detail, ": ")
		}
		if p.Taints == nil {
			p.Taints = []string{}
		}
		if p.Points == nil {
			p.Points = []control.Point{}
		}
		r.Pairs = append(r.Pairs, p)
	}
}

// natural orders node2 before node10.
func natural(a, b string) int {
	x, y := strings.TrimRight(a, "0123456789"), strings.TrimRight(b, "0123456789")
	if x != y {
		return strings.Compare(a, b)
	}
	return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b))
}

// finite keeps what JSON can't hold out of a report.
func finite(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}

// Summary is the report in one line.
func (r *Report) Summary() string {
	s := fmt.Sprintf("%s: %s, %d of %d rows measured (%.1f %%)", r.Name, r.Verdict, r.Measured, r.Planned, 100*r.Coverage)
	if len(r.Suspects) > 0 {
		var names []string
		for _, x := range r.Suspects {
			names = append(names, string(x.Kind)+" "+x.Name)
		}
		s += ", suspects: " + strings.Join(names, ", ")
	}
	if len(r.Unreached) > 0 {
		var names []string
		for _, x := range r.Unreached {
			names = append(names, x.Name)
		}
		s += ", unreached: " + strings.Join(names, ", ")
	}
	return s
}
