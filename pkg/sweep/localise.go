package sweep

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// Thresholds of the localisation.
const (
	badShare    = 0.6  // of a port's peers in one direction: the port is bad
	minPeers    = 3    // that a port must have been measured with
	weakPeers   = 5    // likewise, if p99 or retransmits are all there is
	partShare   = 0.75 // of the parts of a whole (ports of a node or rail, nodes of a rack) that must be bad
	goodShare   = 0.3  // of the rows inside a rack that may be bad if its uplink is to be blamed
	minRacks    = 3    // with two, either could be blamed for what lies between them
	maxSuspects = 64
	railSources = 3
)

// count is how many of a port's peers are bad in a family and role.
type count struct {
	units, bad int
	firm       int // of the bad, by more than p99 or retransmits
}

func (c count) qualifies() bool {
	return c.units >= minPeers && c.share() >= badShare && (2*c.firm >= c.bad || c.units >= weakPeers)
}
func (c count) share() float64 {
	if c.units == 0 {
		return 0
	}
	return float64(c.bad) / float64(c.units)
}

type counts [families][roles]count

// count tallies the rows of a port that no suspect explains yet and that keep holds for. Rows with one peer in one role are
// one unit, bad if at least half of them are.
func (a *analysis) count(n nic, keep func(*judged) bool) *counts {
	type unit struct {
		peer nic
		f    family
		role int
	}
	all := map[unit]*count{}
	for _, i := range a.of[n] {
		j := &a.rows[i]
		if j.explained || keep != nil && !keep(j) {
			continue
		}
		for f := range families {
			if !j.seen[f] {
				continue
			}
			role, other := j.roles(f)
			peer := j.dst
			if j.src != n {
				role, peer = other, j.src
			}
			if role == none {
				continue
			}
			u := all[unit{peer, f, role}]
			if u == nil {
				u = &count{}
				all[unit{peer, f, role}] = u
			}
			u.units++
			if j.bad[f] != nil {
				u.bad++
				if j.runs[f] > 0 {
					u.firm++
				}
			}
		}
	}
	var out counts
	for u, c := range all {
		out[u.f][u.role].units++
		if 2*c.bad >= c.units {
			out[u.f][u.role].bad++
			if 2*c.firm >= c.bad {
				out[u.f][u.role].firm++
			}
		}
	}
	return &out
}

// accusation is a possible suspect, with the rows that it would explain.
type accusation struct {
	s       Suspect
	rows    []int // that are bad
	touches []int // rows that say nothing more of others once it is blamed
	weight  int
}

// accuse makes the accusation of a port, or nil.
func (a *analysis) accuse(n nic) *accusation {
	if !slices.ContainsFunc(a.of[n], func(i int) bool { return !a.rows[i].explained && a.rows[i].anyBad() }) {
		return nil
	}
	c := a.count(n, nil)
	use := func(f family, role int) bool { return c[f][role].qualifies() }
	var symmetric, sending, receiving bool
	for f := range families {
		symmetric = symmetric || use(f, sym)
		sending = sending || use(f, tx)
		receiving = receiving || use(f, rx)
	}
	own := a.ownFailure(n)
	if !symmetric && !sending && !receiving && !own {
		return nil
	}
	x := &accusation{s: Suspect{Kind: NIC, Name: n.String(), Node: n.node, Device: n.device, Port: n.port, Rail: a.railOf[n], Direction: Both, a: n}}
	if !symmetric && !own && sending != receiving {
		x.s.Direction = Sending
		other := rx
		if receiving {
			x.s.Direction, other = Receiving, tx
		}
		for f := range families {
			if k := c[f][other]; k.bad > 0 && k.share() >= badShare { // too few for a vote of their own
				x.s.Direction = Both
			}
		}
	}
	control := 0
	for _, i := range a.of[n] {
		j := &a.rows[i]
		if j.explained {
			continue
		}
		touched, bad := false, false
		for f := range families {
			role, other := j.roles(f)
			if j.src != n {
				role = other
			}
			if role == none || !j.seen[f] {
				continue
			}
			if x.s.Direction == Both || role == sym || role == tx && x.s.Direction == Sending || role == rx && x.s.Direction == Receiving {
				touched, bad = true, bad || j.bad[f] != nil
			}
		}
		if touched {
			x.touches = append(x.touches, i)
		}
		if bad {
			x.rows = append(x.rows, i)
			if AtControl(j.row) {
				control++
			}
		}
	}
	x.weight = len(x.rows)
	// A node whose daemon can't be reached has no more than that: it is not its NIC.
	if 2*control > len(x.rows) || n.device == "" {
		x.s.Kind, x.s.Name, x.s.Device, x.s.Port, x.s.Rail = Node, n.node, "", 0, ""
	}
	return x
}

// ownFailure reports whether every session that the port began failed for a reason that it found of itself. That needs no vote.
func (a *analysis) ownFailure(n nic) bool {
	own := 0
	for _, i := range a.of[n] {
		j := &a.rows[i]
		if j.src != n || j.row.Result == string(probe.Skipped) {
			continue
		}
		if j.explained || j.bad[failures] == nil || j.row.Scope != string(probe.ScopeLocal) {
			return false
		}
		own++
	}
	return own > 0
}

// whole joins the accusations of parts to one of the whole, if enough of the parts are accused.
func whole(s Suspect, parts int, accused []*accusation) *accusation {
	if parts < 2 || float64(len(accused)) < partShare*float64(parts) {
		return nil
	}
	x := &accusation{s: s}
	rows, touches := map[int]bool{}, map[int]bool{}
	direction := ""
	for _, p := range accused {
		for _, i := range p.rows {
			rows[i] = true
		}
		for _, i := range p.touches {
			touches[i] = true
		}
		if direction == "" {
			direction = p.s.Direction
		} else if direction != p.s.Direction {
			direction = Both
		}
	}
	x.s.Direction = direction
	x.rows, x.touches = slices.Sorted(maps.Keys(rows)), slices.Sorted(maps.Keys(touches))
	x.weight = len(x.rows)
	return x
}

// candidates are all accusations that the rows as yet unexplained can carry.
func (a *analysis) candidates() []*accusation {
	var out []*accusation
	byNode, byRail := map[string][]*accusation{}, map[string][]*accusation{}
	nodeParts, railParts := map[string]int{}, map[string]int{}
	for _, n := range a.nics() {
		if n.device != "" {
			nodeParts[n.node]++
			railParts[a.railOf[n]]++
		}
		x := a.accuse(n)
		if x == nil {
			continue
		}
		out = append(out, x)
		byNode[n.node] = append(byNode[n.node], x)
		if rail := a.railOf[n]; n.device != "" {
			byRail[rail] = append(byRail[rail], x)
		}
	}
	for node, accused := range byNode {
		if x := whole(Suspect{Kind: Node, Name: node, Node: node}, nodeParts[node], accused); x != nil {
			out = append(out, x)
		}
	}
	if len(railParts) > 1 {
		for rail, accused := range byRail {
			if x := whole(Suspect{Kind: Rail, Name: "rail " + orUnknown(rail), Rail: rail}, railParts[rail], accused); x != nil && railParts[rail] >= railSources {
				out = append(out, x)
			}
		}
	}
	return append(out, a.uplinks()...)
}

func (a *analysis) rack(n nic) string { return a.labels[n.node]["rack"] }

// uplinks are the accusations of racks' uplinks, as a whole and for each rail: what leaves the rack is bad, what stays in it
// is not.
func (a *analysis) uplinks() []*accusation {
	byRack := map[string][]nic{}
	rails := map[string]bool{}
	for _, n := range a.nics() {
		if r := a.rack(n); r != "" && n.device != "" {
			byRack[r] = append(byRack[r], n)
			rails[a.railOf[n]] = true
		}
	}
	if len(byRack) < minRacks {
		return nil
	}
	outside := func(j *judged) bool { return a.rack(j.src) != a.rack(j.dst) }
	suspicious := map[string]bool{}
	for i := range a.rows {
		if j := &a.rows[i]; !j.explained && j.anyBad() && outside(j) {
			suspicious[a.rack(j.src)], suspicious[a.rack(j.dst)] = true, true
		}
	}
	in, out := map[nic]*counts{}, map[nic]*counts{}
	for rack, nics := range byRack {
		if !suspicious[rack] {
			continue
		}
		for _, n := range nics {
			out[n], in[n] = a.count(n, outside), a.count(n, func(j *judged) bool { return !outside(j) })
		}
	}
	var found []*accusation
	scopes := []string{""} // all rails
	if len(rails) > 1 {
		scopes = append(scopes, slices.Sorted(maps.Keys(rails))...)
	}
	for rack, nics := range byRack {
		if !suspicious[rack] {
			continue
		}
		for si, rail := range scopes {
			one := si > 0
			s := Suspect{Kind: Rack, Name: rack}
			if one {
				s.Name, s.Rail = rack+" rail "+rail, rail
			}
			for _, roleSet := range [][]int{{tx, rx, sym}, {tx}, {rx}} {
				if x := a.uplink(s, nics, func(n nic) bool { return !one || a.railOf[n] == rail }, roleSet, out, in); x != nil {
					found = append(found, x)
					break
				}
			}
		}
	}
	return found
}

func (a *analysis) uplink(s Suspect, nics []nic, member func(nic) bool, roleSet []int, out, in map[nic]*counts) *accusation {
	outside := func(j *judged) bool { return a.rack(j.src) != a.rack(j.dst) }
	parts, accused, nodes, peers := map[nic]bool{}, map[nic]bool{}, map[string]bool{}, 0
	inner := count{}
	var rows, touches []int
	for _, n := range nics {
		if !member(n) {
			continue
		}
		c := out[n]
		for f := range families {
			bad, seen := true, false
			for _, role := range roleSet {
				if k := c[f][role]; k.units > 0 {
					seen = true
					bad = bad && k.share() >= badShare
					peers += k.units
				}
			}
			if seen {
				parts[n], nodes[n.node] = true, true
				if bad {
					accused[n] = true
				}
			}
		}
		for f := range families {
			for _, role := range []int{tx, rx, sym} {
				inner.units += in[n][f][role].units
				inner.bad += in[n][f][role].bad
			}
		}
		for _, i := range a.of[n] {
			j := &a.rows[i]
			if j.explained || !outside(j) {
				continue
			}
			touched, bad := false, false
			for f := range families {
				role, other := j.roles(f)
				if j.src != n {
					role = other
				}
				if j.seen[f] && slices.Contains(roleSet, role) {
					touched, bad = true, bad || j.bad[f] != nil
				}
			}
			if touched {
				touches = append(touches, i)
			}
			if bad {
				rows = append(rows, i)
			}
		}
	}
	if len(nodes) < 2 || float64(len(accused)) < partShare*float64(len(parts)) || peers < 2*minPeers || inner.share() > goodShare || len(rows) == 0 {
		return nil
	}
	s.Direction = Both
	if len(roleSet) == 1 {
		s.Direction = map[int]string{tx: Sending, rx: Receiving}[roleSet[0]]
	}
	return &accusation{s: s, rows: rows, touches: touches, weight: len(rows)}
}

// rank orders kinds: of two suspects that explain the same, the smaller one is taken.
var rank = map[Kind]int{NIC: 0, Node: 1, Rack: 2, Rail: 3, Pair: 4}

// localise finds the suspects: first the rails that are slow as a whole, then again and again what explains most of the bad
// rows, then the pairs that are left.
func (a *analysis) localise(r *Report) {
	a.compareRails(r)
	for {
		candidates := a.candidates()
		if len(candidates) == 0 {
			break
		}
		if len(r.Suspects) >= maxSuspects {
			r.Notes = append(r.Notes, fmt.Sprintf("more than %d suspects: the list is cut, look at the pairs", maxSuspects))
			break
		}
		best := slices.MinFunc(candidates, func(x, y *accusation) int {
			return cmp.Or(-cmp.Compare(x.weight, y.weight), cmp.Compare(rank[x.s.Kind], rank[y.s.Kind]), cmp.Compare(x.s.Name, y.s.Name))
		})
		a.take(r, best)
	}
	a.leftPairs(r)
	if n := a.unexplained(); n > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("%d rows were out of the ordinary once, which is too little to accuse anybody", n))
	}
	r.Notes = append(r.Notes, a.notes...)
	if racks := map[string]bool{}; true {
		for _, l := range a.labels {
			if l["rack"] != "" {
				racks[l["rack"]] = true
			}
		}
		if len(racks) == 2 {
			r.Notes = append(r.Notes, "two racks: what lies between them can't be booked on one of them")
		}
	}
}

// take makes a suspect of an accusation.
func (a *analysis) take(r *Report, x *accusation) {
	seen := map[string]bool{}
	var texts []string
	for f := range families {
		var rows []*judged
		for _, i := range x.rows {
			if a.rows[i].bad[f] != nil {
				rows = append(rows, &a.rows[i])
			}
		}
		// A symptom is one if it is no exception among the rows.
		if len(rows) == 0 || 3*len(rows) < len(x.rows) && len(rows) < minPeers {
			continue
		}
		x.s.Symptoms = append(x.s.Symptoms, symptom[f])
		of := 0
		for _, i := range x.touches {
			if a.rows[i].seen[f] {
				of++
			}
		}
		if t := evidence(f, rows, of); !seen[t] {
			seen[t] = true
			texts = append(texts, t)
		}
	}
	x.s.Evidence = strings.Join(texts, "; ")
	if x.s.Symptoms == nil {
		x.s.Symptoms = []string{}
	}
	for _, i := range x.touches {
		a.rows[i].explained = true
	}
	for _, i := range x.rows {
		a.rows[i].explained = true
	}
	if x.s.Kind == Node && slices.ContainsFunc(r.Suspects, func(s Suspect) bool { return s.Kind == Node && s.Node == x.s.Node }) {
		return // a port more of the same
	}
	// The few peers that the others' faults left over may agree by chance, and what is too nervous to accuse a pair may do so more often.
	few := len(r.Suspects) > 0 && a.peers(x) < weakPeers
	if x.s.Kind == NIC && (few || a.weak(x)) && !slices.Contains(x.s.Symptoms, symptom[failures]) {
		r.Doubtful = append(r.Doubtful, x.s)
		return
	}
	r.Suspects = append(r.Suspects, x.s)
}

// weak reports whether p99 and retransmits are nearly all that speaks against a port.
func (a *analysis) weak(x *accusation) bool {
	firm := 0
	for _, i := range x.rows {
		for f := range families {
			if a.rows[i].bad[f] != nil && a.rows[i].runs[f] > 0 {
				firm++
				break
			}
		}
	}
	return 2*firm < len(x.rows)
}

// peers is how many peers a port's accusation rests on.
func (a *analysis) peers(x *accusation) int {
	seen := map[nic]bool{}
	for _, i := range x.touches {
		j := &a.rows[i]
		if j.src == x.s.a {
			seen[j.dst] = true
		} else {
			seen[j.src] = true
		}
	}
	return len(seen)
}

// evidence says in words what a family's bad rows have in common.
func evidence(f family, rows []*judged, of int) string {
	if f == failures {
		why := map[string]int{}
		for _, j := range rows {
			why[j.row.Reason]++
		}
		most := slices.MaxFunc(slices.Sorted(maps.Keys(why)), func(x, y string) int { return cmp.Compare(why[x], why[y]) })
		return fmt.Sprintf("%d of %d sessions failed, most for %s", len(rows), of, most)
	}
	worst := map[string][]*finding{}
	for _, j := range rows {
		worst[j.bad[f].metric.name] = append(worst[j.bad[f].metric.name], j.bad[f])
	}
	name := slices.MaxFunc(slices.Sorted(maps.Keys(worst)), func(x, y string) int { return cmp.Compare(len(worst[x]), len(worst[y])) })
	list := worst[name]
	slices.SortFunc(list, func(x, y *finding) int { return cmp.Compare(x.ratio, y.ratio) })
	mid := list[len(list)/2]
	than := "the others have"
	if mid.limit {
		than = "the limit is"
	}
	at := " at " + formatSize(mid.size)
	if name == retransmitsName {
		at = ""
	}
	return fmt.Sprintf("%s is bad in %d of %d sessions: %s%s, %s %s", name, len(rows), of, mid.metric.unit(mid.value), at, than, mid.metric.unit(mid.reference))
}

// compareRails looks for rails that are worse than the others as a whole, which a comparison within a rail can't see.
func (a *analysis) compareRails(r *Report) {
	byOthers := map[class]map[string]reference{}
	for c, ref := range a.refs {
		if !ref.ok {
			continue
		}
		rail := c.rail
		c.rail = ""
		if byOthers[c] == nil {
			byOthers[c] = map[string]reference{}
		}
		byOthers[c][rail] = ref
	}
	type verdict struct {
		text     string
		symptoms map[string]bool
		worst    float64
	}
	found := map[string]*verdict{}
	for c, rails := range byOthers {
		m := &metrics[c.metric]
		if m.weak || len(rails) < 2 {
			continue
		}
		for rail, ref := range rails {
			var others []float64
			sigma := ref.sigma
			for other, o := range rails {
				if other != rail {
					others = append(others, o.center)
					sigma = max(sigma, o.sigma)
				}
			}
			slices.Sort(others)
			// Centres of many rows are much surer than a row; the noise of a row is asked for nevertheless, as rails may differ a little.
			drop := quantile(others, 0.5) - ref.center
			if drop > 2*sigma && drop > math.Log(m.effect) {
				v := found[rail]
				if v == nil {
					v = &verdict{symptoms: map[string]bool{}}
					found[rail] = v
				}
				v.symptoms[symptom[m.family]] = true
				if drop > v.worst {
					v.worst = drop
					v.text = fmt.Sprintf("%s over the whole rail is %s, the other rails have %s (%s, path %s)", m.name, m.unit(m.unscore(ref.center)), m.unit(m.unscore(quantile(others, 0.5))), c.probe, c.path)
				}
			}
		}
	}
	for _, rail := range slices.Sorted(maps.Keys(found)) {
		r.Suspects = append(r.Suspects, Suspect{
			Kind: Rail, Name: "rail " + orUnknown(rail), Rail: rail, Direction: Both, Symptoms: slices.Sorted(maps.Keys(found[rail].symptoms)), Evidence: found[rail].text,
		})
	}
}

// leftPairs accuses pairs whose bad rows no other suspect explains. One run out of the ordinary is not enough, unless it failed; one
// that is far out is worth another look.
func (a *analysis) leftPairs(r *Report) {
	type ends struct{ a, b nic }
	type tally struct {
		rows        []int
		runs        int
		far, failed bool
	}
	left := map[ends]*tally{}
	for i := range a.rows {
		j := &a.rows[i]
		if j.explained || !j.anyBad() || r.unreached(j.row.Dst) || r.unreached(j.row.Src) {
			continue
		}
		e := ends{j.src, j.dst}
		if e.b.compare(e.a) < 0 {
			e = ends{j.dst, j.src}
		}
		t := left[e]
		if t == nil {
			t = &tally{}
			left[e] = t
		}
		t.rows = append(t.rows, i)
		runs := 0
		for f, b := range j.bad {
			if b == nil {
				continue
			}
			runs = max(runs, j.runs[f])
			t.failed = t.failed || family(f) == failures
			t.far = t.far || j.runs[f] > 0 && b.z > strongZ && b.ratio > 4./3
		}
		t.runs += min(1, runs) // sizes of one session are not independent
	}
	var accused, doubtful []*accusation
	for e, t := range left {
		sure := t.failed || t.runs >= 2
		if !sure && !t.far {
			continue
		}
		s := Suspect{Kind: Pair, Name: e.a.String() + " - " + e.b.String(), Rail: a.railOf[e.a], Node: e.a.node, Device: e.a.device, Port: e.a.port, Peer: e.b.node, Direction: Both, a: e.a, b: e.b}
		if dirs := map[nic]bool{}; true {
			both := false
			for _, i := range t.rows {
				dirs[a.rows[i].src] = true
				for f, b := range a.rows[i].bad {
					if from, _ := a.rows[i].roles(family(f)); b != nil && from == sym && family(f) != failures {
						both = true
					}
				}
			}
			if len(dirs) == 1 && !both {
				s.Name = a.rows[t.rows[0]].src.String() + " -> " + a.rows[t.rows[0]].dst.String()
			}
		}
		if x := (&accusation{s: s, rows: t.rows, touches: t.rows}); sure {
			accused = append(accused, x)
		} else {
			doubtful = append(doubtful, x)
		}
	}
	accused = a.betweenRacks(accused)
	slices.SortFunc(accused, func(x, y *accusation) int {
		return cmp.Or(-cmp.Compare(len(x.rows), len(y.rows)), cmp.Compare(x.s.Name, y.s.Name))
	})
	for i, x := range accused {
		if i == maxSuspects {
			r.Notes = append(r.Notes, fmt.Sprintf("%d more pairs are bad, which no common cause was found for: look at the pairs", len(accused)-i))
			break
		}
		a.take(r, x)
	}
	slices.SortFunc(doubtful, func(x, y *accusation) int { return cmp.Compare(x.s.Name, y.s.Name) })
	sure := r.Suspects
	for i, x := range doubtful {
		if i == maxSuspects {
			break
		}
		r.Suspects = nil
		a.take(r, x)
		r.Doubtful = append(r.Doubtful, r.Suspects...)
	}
	r.Suspects = sure
}

// betweenRacks joins pairs that lie between the same two racks, if most of what is between them is bad: a spine, or a path.
func (a *analysis) betweenRacks(pairs []*accusation) []*accusation {
	key := func(x, y nic) [2]string {
		k := [2]string{a.rack(x), a.rack(y)}
		slices.Sort(k[:])
		return k
	}
	groups := map[[2]string][]*accusation{}
	for _, p := range pairs {
		k := key(p.s.a, p.s.b)
		groups[k] = append(groups[k], p)
	}
	var out []*accusation
	for k, list := range groups {
		measured := map[[2]nic]bool{}
		for i := range a.rows {
			if j := &a.rows[i]; key(j.src, j.dst) == k && (usable(j.row) || j.anyBad()) {
				e := [2]nic{j.src, j.dst}
				if j.dst.compare(j.src) < 0 {
					e = [2]nic{j.dst, j.src}
				}
				measured[e] = true
			}
		}
		if k[0] == "" || k[0] == k[1] || len(list) < minPeers || float64(len(list)) < badShare*float64(len(measured)) {
			out = append(out, list...)
			continue
		}
		x := &accusation{s: Suspect{Kind: Pair, Name: "rack " + k[0] + " - rack " + k[1], Direction: Both, a: list[0].s.a, b: list[0].s.b}}
		for _, p := range list {
			x.rows = append(x.rows, p.rows...)
		}
		x.touches = x.rows
		out = append(out, x)
	}
	return out
}

// unexplained counts the bad rows that no suspect explains.
func (a *analysis) unexplained() int {
	n := 0
	for i := range a.rows {
		if j := &a.rows[i]; !j.explained && j.anyBad() {
			n++
		}
	}
	return n
}
