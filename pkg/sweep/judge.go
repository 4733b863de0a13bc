package sweep

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"sort"
	"strings"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// family groups the figures by the kind of fault that they show.
type family int

const (
	bandwidth family = iota
	latency
	loss
	failures
	families
)

var symptom = [families]string{"bandwidth", "latency", "loss", "failures"}

// retransmitsName is of the metric that a row has once, not for each size.
const retransmitsName = "retransmits per message"

// metric is a figure of a row that is compared within its class.
type metric struct {
	name   string
	family family
	unit   func(float64) string
	higher bool    // is better
	effect float64 // least ratio to the reference that counts, whatever the noise
	offset float64 // added before ratios are taken, where 0 is the normal value
	weak   bool    // too nervous to accuse a single pair
	value  func(*Row, *control.Point) *float64
}

var metrics = []metric{
	{name: "bandwidth", family: bandwidth, unit: FormatRate, higher: true, effect: 1.11, value: func(_ *Row, p *control.Point) *float64 { return p.Bandwidth }},
	{name: "messages per second", family: bandwidth, unit: formatCount, higher: true, effect: 1.11, value: func(r *Row, p *control.Point) *float64 {
		if r.Kind != string(probe.MessageRate) {
			return nil // elsewhere it says the same as the bandwidth
		}
		return p.MessageRate
	}},
	{name: "p50 latency", family: latency, unit: FormatSeconds, effect: 1.25, value: func(_ *Row, p *control.Point) *float64 { return p.P50 }},
	{name: "p99 latency", family: latency, unit: FormatSeconds, effect: 1.5, weak: true, value: func(_ *Row, p *control.Point) *float64 { return p.P99 }},
	{name: "loss", family: loss, unit: formatShare, effect: 3, offset: 1e-4, value: func(_ *Row, p *control.Point) *float64 { return p.Loss }},
	{name: retransmitsName, family: loss, unit: formatShare, effect: 3, offset: 1e-3, weak: true, value: func(r *Row, _ *control.Point) *float64 { return r.Retransmits }},
}

// score maps a value so that larger is better and equal steps are equal ratios.
func (m *metric) score(v float64) float64 {
	s := math.Log(max(v, 1e-12) + m.offset)
	if !m.higher {
		s = -s
	}
	return s
}

func (m *metric) unscore(s float64) float64 {
	if !m.higher {
		s = -s
	}
	v := math.Exp(s) - m.offset
	if v < m.offset/1000 {
		return 0
	}
	return v
}

// Thresholds of the comparison.
const (
	madToSigma = 1.4826
	minSigma   = 0.02 // of a ratio: no fleet is more even than that
	badZ       = 5
	splitShare = 4 // a quarter of the ends that is better than the middle makes the middle doubtful
	strongZ    = 8 // for one run of one pair that nothing else speaks against
)

// nic is one end of a row.
type nic struct {
	node, device string
	port         int
}

func (n nic) compare(o nic) int {
	return cmp.Or(cmp.Compare(n.node, o.node), cmp.Compare(n.device, o.device), cmp.Compare(n.port, o.port))
}

// String names a NIC for people: node/device, with :port unless that is 1.
func (n nic) String() string {
	switch {
	case n.device == "":
		return n.node
	case n.port > 1:
		return fmt.Sprintf("%s/%s:%d", n.node, n.device, n.port)
	}
	return n.node + "/" + n.device
}

// finding is why a row is bad in a family.
type finding struct {
	metric    *metric // nil: it failed
	size      int
	value     float64
	reference float64
	z         float64
	ratio     float64 // how many times worse than the reference
	limit     bool    // below a configured limit, rather than outside of the fleet
}

// judged is a row with what is bad about it.
type judged struct {
	row       *Row
	src, dst  nic
	seen      [families]bool
	bad       [families]*finding
	runs      [families]int // independent runs that are bad and not weak
	explained bool          // by a suspect
}

func (j *judged) anyBad() bool {
	return slices.ContainsFunc(j.bad[:], func(f *finding) bool { return f != nil })
}

func (j *judged) why() string {
	var all []string
	for f, b := range j.bad {
		if b != nil {
			all = append(all, b.text(family(f), j.row))
		}
	}
	return strings.Join(all, "; ")
}

func (b *finding) text(f family, row *Row) string {
	switch {
	case f == failures:
		return strings.TrimSuffix(row.Reason+": "+row.Detail, ": ")
	case b.limit:
		return fmt.Sprintf("%s %s, the limit is %s", b.metric.name, b.metric.unit(b.value), b.metric.unit(b.reference))
	}
	return fmt.Sprintf("%s %s, the others have %s", b.metric.name, b.metric.unit(b.value), b.metric.unit(b.reference))
}

// The roles of a NIC in a row's figures of a family.
const (
	tx   = iota // data leaves it
	rx          // data arrives at it
	sym         // the figure has both ways in it
	none        // the row says nothing of it
	roles
)

// roles tells what part the two ends of a row play in a family.
func (j *judged) roles(f family) (src, dst int) {
	row := j.row
	if f == failures {
		switch row.Scope {
		case string(probe.ScopeLocal):
			return sym, none
		case string(probe.ScopePeer):
			if !AtControl(row) {
				return none, sym
			}
		}
		return sym, sym
	}
	switch {
	case row.Kind == string(probe.Latency) || f == latency || row.Kind == "ping":
		return sym, sym
	case row.Op == string(verbs.Read):
		return rx, tx
	case row.Op == string(verbs.Write) || row.Op == string(verbs.Send) || row.Op == "write-imm":
		return tx, rx
	}
	return sym, sym
}

// class are rows whose figures can be compared.
type class struct {
	probe  string
	metric int
	size   int
	rail   string
	path   string
	rate   float64 // line rate; 0: unknown
}

// reference is what the healthy members of a class have.
type reference struct {
	center, sigma float64 // of scores
	sources       int
	ok            bool
}

// analysis is a sweep's rows and what is thought of them.
type analysis struct {
	rows   []judged
	rateOf map[nic]float64
	railOf map[nic]string
	labels map[string]map[string]string
	refs   map[class]reference
	of     map[nic][]int // rows by either end
	notes  []string
	split  map[string]bool // classes in which most may be bad
}

func newAnalysis(rows []Row, in Input) *analysis {
	a := &analysis{
		rows: make([]judged, len(rows)), rateOf: map[nic]float64{}, railOf: map[nic]string{}, labels: map[string]map[string]string{}, of: map[nic][]int{},
		split: map[string]bool{},
	}
	for _, m := range in.Members {
		a.labels[m.Name] = m.Labels
	}
	// What ports the peers have is known from the sessions that got far enough to tell.
	byRail := map[[2]string]nic{}
	for i := range rows {
		row := &rows[i]
		n := nic{row.Src, row.SrcDevice, row.SrcPort}
		if row.LineRate != nil {
			a.rateOf[n] = *row.LineRate
		}
		if row.SrcDevice != "" {
			byRail[[2]string{row.Src, row.Rail}] = n
			a.railOf[n] = row.Rail
		}
	}
	for i := range rows {
		row := &rows[i]
		n := nic{row.Dst, row.DstDevice, row.DstPort}
		if key := [2]string{row.Dst, row.Rail}; row.DstDevice != "" {
			if _, known := a.railOf[n]; !known {
				a.railOf[n] = row.Rail
			}
			if _, known := byRail[key]; !known {
				byRail[key] = n
			}
		}
	}
	for i := range rows {
		row := &rows[i]
		j := &a.rows[i]
		j.row, j.src, j.dst = row, nic{row.Src, row.SrcDevice, row.SrcPort}, nic{row.Dst, row.DstDevice, row.DstPort}
		if row.DstDevice == "" {
			if n, known := byRail[[2]string{row.Dst, row.Rail}]; known {
				j.dst = n
			}
		}
		a.of[j.src] = append(a.of[j.src], i)
		if j.dst != j.src {
			a.of[j.dst] = append(a.of[j.dst], i)
		}
	}
	a.refer()
	for i := range a.rows {
		a.judge(&a.rows[i], in.Limits[a.rows[i].row.Probe])
	}
	return a
}

func (a *analysis) nics() []nic { return slices.SortedFunc(maps.Keys(a.of), nic.compare) }

// rate is the line rate of the slower end, as far as known.
func (a *analysis) rate(j *judged) float64 {
	s, d := a.rateOf[j.src], a.rateOf[j.dst]
	if s == 0 || d == 0 {
		return max(s, d)
	}
	return min(s, d)
}

func (a *analysis) class(j *judged, m int, size int) class {
	if metrics[m].name == retransmitsName {
		size = 0
	}
	return class{j.row.Probe, m, size, j.row.Rail, j.row.Path, a.rate(j)}
}

// eachValue visits every figure of a usable row.
func eachValue(j *judged, visit func(m int, size int, v float64)) {
	if !usable(j.row) {
		return
	}
	for m := range metrics {
		for i := range j.row.Points {
			p := &j.row.Points[i]
			if v := metrics[m].value(j.row, p); v != nil {
				visit(m, p.Size, *v)
				if metrics[m].name == retransmitsName {
					break // of the whole session
				}
			}
		}
	}
}

// refer finds the reference of every class.
func (a *analysis) refer() {
	type member struct {
		j     *judged
		score float64
	}
	classes := map[class][]member{}
	for i := range a.rows {
		j := &a.rows[i]
		eachValue(j, func(m, size int, v float64) {
			c := a.class(j, m, size)
			classes[c] = append(classes[c], member{j, metrics[m].score(v)})
		})
	}
	a.refs = map[class]reference{}
	small := map[string]bool{}
	for c, members := range classes {
		m := &metrics[c.metric]
		// How well a port does with its best peers does not depend on the bad ones, as long as a quarter of them is good.
		type end struct {
			n    nic
			role int
		}
		scores := map[end][]float64{}
		srcs, dsts := map[string]bool{}, map[string]bool{}
		for _, x := range members {
			s, d := x.j.roles(m.family)
			scores[end{x.j.src, s}] = append(scores[end{x.j.src, s}], x.score)
			scores[end{x.j.dst, d}] = append(scores[end{x.j.dst, d}], x.score)
			srcs[x.j.src.node], dsts[x.j.dst.node] = true, true
		}
		ref := reference{sources: max(len(srcs), len(dsts))}
		if ref.sources < MinSources {
			a.refs[c] = ref
			small[fmt.Sprintf("%s, rail %s, path %s: %d nodes can be compared, %d are needed to tell a bad one", c.probe, orUnknown(c.rail), c.path, ref.sources, MinSources)] = true
			continue
		}
		best := map[end]float64{}
		for e, s := range scores {
			slices.Sort(s)
			best[e] = s[(3*len(s)-1)/4]
		}
		all := slices.Sorted(maps.Values(best))
		middle := all[len(all)/2] // the better one of two
		reach := max(badZ*madToSigma*deviation(all, middle), math.Log(m.effect))
		if above := len(all) - sort.Search(len(all), func(i int) bool { return all[i] > middle+reach }); splitShare*float64(above) >= float64(len(all)) {
			a.split[fmt.Sprintf("%s, rail %s, path %s: by their %s the ports fall into groups, and %d of %d ends are better than the middle: it can't be told which are as they should be, without limits (expect)",
				c.probe, orUnknown(c.rail), c.path, m.name, above, len(all))] = true
		}
		var trusted []float64
		for _, x := range members {
			s, d := x.j.roles(m.family)
			if best[end{x.j.src, s}] >= middle-reach && best[end{x.j.dst, d}] >= middle-reach {
				trusted = append(trusted, x.score)
			}
		}
		slices.Sort(trusted)
		if len(trusted) >= MinSources {
			ref.center = quantile(trusted, 0.5)
			ref.sigma = max(minSigma, madToSigma*deviation(trusted, ref.center))
			ref.ok = true
		}
		a.refs[c] = ref
	}
	a.notes = append(a.notes, slices.Sorted(maps.Keys(small))...)
	a.notes = append(a.notes, slices.Sorted(maps.Keys(a.split))...)
}

func orUnknown(s string) string {
	if s == "" {
		return "unknown"
	}
	return s
}

// quantile of sorted values by nearest rank.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	return sorted[min(len(sorted)-1, max(0, int(math.Ceil(q*float64(len(sorted))))-1))]
}

// deviation is the median absolute deviation from center.
func deviation(values []float64, center float64) float64 {
	d := make([]float64, len(values))
	for i, v := range values {
		d[i] = math.Abs(v - center)
	}
	slices.Sort(d)
	return quantile(d, 0.5)
}

// manySizes is from how many sizes on a single bad one is taken for chance.
const manySizes = 4

// judge compares a row with the references of its classes and with the limits.
func (a *analysis) judge(j *judged, limits Limits) {
	if j.row.Result == string(probe.Failed) {
		j.seen[failures] = true
		j.bad[failures] = &finding{ratio: math.Inf(1), z: math.Inf(1)}
		j.runs[failures] = 1
		return
	}
	if !usable(j.row) {
		return
	}
	j.seen[failures] = true
	var sizes, bad [families]map[int]bool
	for f := range sizes {
		sizes[f], bad[f] = map[int]bool{}, map[int]bool{}
	}
	strong := [families]map[int]bool{}
	eachValue(j, func(mi, size int, v float64) {
		m := &metrics[mi]
		f := m.family
		var found *finding
		if ref := a.refs[a.class(j, mi, size)]; ref.ok {
			sizes[f][size], j.seen[f] = true, true
			drop := ref.center - m.score(v)
			if drop > badZ*ref.sigma && drop > math.Log(m.effect) {
				found = &finding{metric: m, size: size, value: v, reference: m.unscore(ref.center), z: drop / ref.sigma, ratio: math.Exp(drop)}
			}
		}
		if limit, ok := a.limit(j, m, size, limits); ok {
			sizes[f][size], j.seen[f] = true, true
			if m.higher && v < limit || !m.higher && v > limit {
				if found == nil {
					found = &finding{metric: m, size: size, value: v, reference: limit, z: strongZ + 1, ratio: max(2, max(v, limit)/max(1e-12, min(v, limit))), limit: true}
				}
			}
		}
		if found == nil {
			return
		}
		bad[f][size] = true
		if !m.weak || found.limit {
			if strong[f] == nil {
				strong[f] = map[int]bool{}
			}
			strong[f][size] = true
		}
		if old := j.bad[f]; old == nil || found.score() > old.score() {
			j.bad[f] = found
		}
	})
	for f := range j.bad {
		if len(sizes[f]) >= manySizes && len(bad[f]) < 2 {
			j.bad[f] = nil
			continue
		}
		j.runs[f] = len(strong[f])
	}
}

// score ranks findings: a firm one before a weak one, then by size of the effect.
func (b *finding) score() float64 {
	if b.metric.weak {
		return b.ratio / 1e6
	}
	return b.ratio
}

// limit is the configured limit of a metric; bandwidth limits hold for the largest size, where the link is what counts.
func (a *analysis) limit(j *judged, m *metric, size int, l Limits) (float64, bool) {
	switch m.name {
	case "bandwidth":
		v := l.Bandwidth
		if rate := a.rate(j); l.LineRate > 0 && rate > 0 {
			v = max(v, l.LineRate*rate)
		}
		return v, v > 0 && size == slices.MaxFunc(j.row.Points, func(x, y control.Point) int { return cmp.Compare(x.Size, y.Size) }).Size
	case "p50 latency":
		return l.P50, l.P50 > 0
	case "p99 latency":
		return l.P99, l.P99 > 0
	case "loss":
		return l.Loss, l.Loss > 0
	}
	return 0, false
}
