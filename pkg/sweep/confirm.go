package sweep

import (
	"cmp"
	"math"
	"slices"
	"strings"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// Check is a pair that should be measured again, in the direction from Src, to confirm or clear a suspect.
type Check struct {
	Src, Dst string
	Rail     string   // empty: all rails
	Probes   []string // those that spoke against it
}

// How a suspect is looked at again.
const (
	goodPeers   = 3    // known-good peers that it is measured with
	confirmedAt = 0.5  // of the new rows are bad: confirmed
	clearedAt   = 0.25 // at most: cleared
	minChecks   = 2    // new rows, without which nothing changes
)

// Checks proposes what to measure to confirm the suspects: each with ports that nothing speaks against. The same check may
// serve two suspects and is listed once.
func (r *Report) Checks() []Check {
	var out []Check
	seen := map[string]bool{}
	add := func(src, dst, rail string, probes []string) {
		key := src + "\x00" + dst + "\x00" + rail + "\x00" + strings.Join(probes, "\x00")
		if src != dst && len(probes) > 0 && !seen[key] {
			seen[key] = true
			out = append(out, Check{src, dst, rail, probes})
		}
	}
	for si, s := range slices.Concat(r.Suspects, r.Doubtful) {
		probes := r.probesAgainst(s)
		switch s.Kind {
		case NIC, Node:
			for _, g := range r.good(s.Rail, s.Node, si) {
				add(g, s.Node, s.Rail, probes)
				if !r.unreached(s.Node) {
					add(s.Node, g, s.Rail, probes)
				}
			}
		case Pair:
			if s.Peer == "" { // of racks
				for _, p := range r.badRows(s, goodPeers) {
					add(p.Src, p.Dst, p.Rail, probes)
				}
				continue
			}
			add(s.Node, s.Peer, s.Rail, probes)
			add(s.Peer, s.Node, s.Rail, probes)
		case Rail:
			good := r.good(s.Rail, "", si)
			for i := range good {
				add(good[i], good[(i+1)%len(good)], s.Rail, probes)
			}
			if len(good) < 2 { // it is dead altogether
				for _, p := range r.badRows(s, goodPeers) {
					add(p.Src, p.Dst, p.Rail, probes)
				}
			}
		case Rack:
			for _, p := range r.badRows(s, 2*goodPeers) {
				add(p.Src, p.Dst, p.Rail, probes)
			}
		}
	}
	return out
}

// good lists nodes that nothing speaks against on a rail, another start for each suspect so that not all use the same ones.
func (r *Report) good(rail, but string, turn int) []string {
	type node struct {
		name string
		bad  float64
	}
	var all []node
	for _, n := range r.Nodes {
		if n.Name == but || n.Verdict != Healthy {
			continue
		}
		for _, x := range n.NICs {
			if (rail == "" || x.Rail == rail) && x.Verdict == Healthy {
				all = append(all, node{n.Name, math.Round(4 * float64(x.Bad) / float64(max(1, x.Measured)))})
				break
			}
		}
	}
	slices.SortStableFunc(all, func(x, y node) int { return cmp.Compare(x.bad, y.bad) })
	best := 0
	for best < len(all) && (all[best].bad == all[0].bad || best < goodPeers) {
		best++
	}
	var out []string
	for i := range min(goodPeers, best) {
		out = append(out, all[(turn*goodPeers+i)%best].name)
	}
	return out
}

// concerns reports whether a row is one that a suspect would explain.
func (r *Report) concerns(s Suspect, row *Row) bool {
	src, dst := nic{row.Src, row.SrcDevice, row.SrcPort}, nic{row.Dst, row.DstDevice, row.DstPort}
	same := func(n nic) bool { // the peer's device may be unknown
		return n.node == s.Node && (n.device == s.Device && n.port == s.Port || n.device == "" && row.Rail == s.Rail)
	}
	switch s.Kind {
	case NIC:
		return same(src) || same(dst)
	case Node:
		return row.Src == s.Node || row.Dst == s.Node
	case Rail:
		return row.Rail == s.Rail
	case Rack:
		a, b := r.rackOf(row.Src), r.rackOf(row.Dst)
		rack, _, _ := strings.Cut(s.Name, " rail ")
		return a != b && (a == rack || b == rack) && (s.Rail == "" || row.Rail == s.Rail)
	}
	if s.Peer == "" {
		x, y := r.rackOf(s.a.node), r.rackOf(s.b.node)
		a, b := r.rackOf(row.Src), r.rackOf(row.Dst)
		return a == x && b == y || a == y && b == x
	}
	return row.Rail == s.Rail && (row.Src == s.Node && row.Dst == s.Peer || row.Src == s.Peer && row.Dst == s.Node)
}

func (r *Report) rackOf(node string) string {
	for _, m := range r.members {
		if m.Name == node {
			return m.Labels["rack"]
		}
	}
	return ""
}

func (r *Report) badRows(s Suspect, most int) []*PairReport {
	var out []*PairReport
	used := map[string]bool{}
	for i := range r.Pairs {
		p := &r.Pairs[i]
		if p.Verdict == Unhealthy && r.concerns(s, &p.Row) && len(out) < most && !used[p.Src+"\x00"+p.Dst] {
			used[p.Src+"\x00"+p.Dst] = true
			out = append(out, p)
		}
	}
	return out
}

func (r *Report) probesAgainst(s Suspect) []string {
	var out []string
	for i := range r.Pairs {
		p := &r.Pairs[i]
		if (p.Verdict == Unhealthy || s.Kind == Rail) && r.concerns(s, &p.Row) && !slices.Contains(out, p.Probe) {
			out = append(out, p.Probe)
		}
	}
	return out
}

// Confirm brings the rows that were measured again to the suspects of a report made from in: those that are bad again are
// confirmed, those that are not are cleared, and with too few new rows nothing changes. What was doubtful becomes a suspect if it is
// confirmed.
func (r *Report) Confirm(in Input, again []Row) {
	a := newAnalysis(slices.Clone(in.Rows), in)
	fresh := make([]judged, 0, len(again))
	for i := range again {
		row := &again[i]
		j := judged{row: row, src: nic{row.Src, row.SrcDevice, row.SrcPort}, dst: nic{row.Dst, row.DstDevice, row.DstPort}}
		a.judge(&j, in.Limits[row.Probe])
		fresh = append(fresh, j)
	}
	left, doubtful := []Suspect{}, []Suspect{}
	for i, s := range slices.Concat(r.Suspects, r.Doubtful) {
		bad := 0
		s.Checks = 0
		for i := range fresh {
			j := &fresh[i]
			if j.row.Result == string(probe.Skipped) || !r.concerns(s, j.row) || !a.good(r, s, j) {
				continue
			}
			relevant, isBad := a.speaks(s, j)
			if relevant {
				s.Checks++
				if isBad {
					bad++
				}
			}
		}
		share := float64(bad) / float64(max(1, s.Checks))
		switch {
		case s.Checks >= minChecks && share >= confirmedAt:
			s.Confirmed = true
		case s.Checks >= minChecks && share <= clearedAt:
			r.Exonerated = append(r.Exonerated, s)
			continue
		}
		if i < len(r.Suspects) || s.Confirmed {
			left = append(left, s)
		} else {
			doubtful = append(doubtful, s)
		}
	}
	r.Suspects, r.Doubtful = left, doubtful
	r.Nodes, r.Rails, r.Pairs = []NodeReport{}, []RailReport{}, []PairReport{}
	r.fill(a, in)
	r.conclude()
	if in.Last != nil {
		r.Compare(in.Last)
	}
}

// good reports whether the other end of a new row of a NIC or node is none of the suspects itself.
func (a *analysis) good(r *Report, s Suspect, j *judged) bool {
	if s.Kind != NIC && s.Kind != Node {
		return true
	}
	other := j.row.Dst
	if other == s.Node {
		other = j.row.Src
	}
	return !slices.ContainsFunc(r.Suspects, func(o Suspect) bool {
		return o.Node == other && (o.Kind == Node || o.Kind == NIC && o.Rail == j.row.Rail)
	})
}

// speaks tells whether a new row says anything of a suspect, and whether it speaks against it.
func (a *analysis) speaks(s Suspect, j *judged) (relevant, bad bool) {
	if s.Kind == Rail {
		if old := a.acrossRails(j); old != nil {
			return true, *old
		}
	}
	for f := range families {
		role, other := j.roles(f)
		if s.Kind == NIC && j.src.node != s.Node || s.Kind == Node && j.src.node != s.Node {
			role = other
		}
		if s.Kind == NIC && (role == none || role == tx && s.Direction == Receiving || role == rx && s.Direction == Sending) {
			continue
		}
		if j.bad[failures] != nil || slices.Contains(s.Symptoms, symptom[f]) && j.seen[f] {
			relevant = true
			bad = bad || j.bad[f] != nil
		}
	}
	return relevant, bad
}

// acrossRails compares a row with the other rails; nil: there is nothing to compare.
func (a *analysis) acrossRails(j *judged) *bool {
	var out *bool
	eachValue(j, func(mi, size int, v float64) {
		m := &metrics[mi]
		if m.weak {
			return
		}
		own := a.class(j, mi, size)
		var others []float64
		sigma := minSigma
		for c, ref := range a.refs {
			same := c
			same.rail = own.rail
			if ref.ok && c.rail != own.rail && same == own {
				others = append(others, ref.center)
				sigma = max(sigma, ref.sigma)
			}
		}
		if len(others) == 0 {
			return
		}
		slices.Sort(others)
		drop := quantile(others, 0.5) - m.score(v)
		bad := drop > 2*sigma && drop > math.Log(m.effect)
		if out == nil || bad {
			out = &bad
		}
	})
	return out
}
