// Package pairing decides who measures whom, without a coordinator: what each node works out for
// itself from the list of members, the number of the firing and the clock on the wall fits what the
// others work out, as far as they see the same. It is pure: no state, no clock, no network.
//
//   - [Rule.Choose] picks the peers of one firing for the strategies all, ring and random.
//   - [Timetable] says whom a member meets in which slot, so that nobody is asked by two at a time.
package pairing

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Strategy is a way to choose peers.
type Strategy string

// The strategies.
const (
	All    Strategy = "all"    // every peer at each firing
	Ring   Strategy = "ring"   // always the same few peers, each member visited by as many as it visits
	Random Strategy = "random" // a few others at each firing, each member visited by as many as it visits
	// All members in pairs, slot after slot until everybody met everybody: see [Timetable].
	Tournament Strategy = "tournament"
)

// Match says how a peer's label is to compare with the node's own. Where either has no such label
// there is no match.
type Match string

// The matches.
const (
	Same      Match = "same"
	Other     Match = "other"
	OneOfEach Match = "one-of-each" // of the peers with the same value one, for each value
)

// Strategies lists the strategies.
var Strategies = []Strategy{All, Ring, Random, Tournament}

// Matches lists the matches.
var Matches = []Match{Same, Other, OneOfEach}

// Member is a node of the fleet.
type Member struct {
	Name   string // unique
	Labels map[string]string
}

// Rule is how a probe chooses its peers.
type Rule struct {
	Strategy Strategy
	Peers    int              // for ring and random: how many
	Where    map[string]Match // by label; all must match, and at most one is OneOfEach
}

// Fits reports whether a node may visit a peer at all.
func (r Rule) Fits(self, peer Member) bool {
	if peer.Name == self.Name {
		return false
	}
	for label, m := range r.Where {
		a, b := self.Labels[label], peer.Labels[label]
		if a == "" || b == "" || m == Same && a != b || m == Other && a == b {
			return false
		}
	}
	return true
}

// Choose returns the members that self visits at a firing (see schedule.Schedule.Ordinal), in the
// order to visit them in. Members are in any order, with or without self. A tournament's are all
// that it visits sooner or later.
func (r Rule) Choose(members []Member, self Member, firing int64) []Member {
	var fit []Member
	for _, m := range members {
		if r.Fits(self, m) {
			fit = append(fit, m)
		}
	}
	salt := ""
	if r.Strategy == Random {
		salt = strconv.FormatInt(firing, 10)
	}
	each := r.oneOfEach()
	if each != "" {
		fit = onePerValue(fit, self, each, salt)
	}
	switch {
	case r.Strategy != Ring && r.Strategy != Random:
		return after(fit, self, func(m Member) string { return m.Name }, cmp.Compare[string])
	case each != "":
		// The ring is one of values, so that peers of few other racks are not asked by all of a rack.
		fit = after(fit, self, func(m Member) uint64 { return hash(salt, m.Labels[each]) }, cmp.Compare[uint64])
	default:
		fit = after(fit, self, func(m Member) uint64 { return hash(salt, m.Name) }, cmp.Compare[uint64])
	}
	return fit[:min(len(fit), r.Peers)]
}

func (r Rule) oneOfEach() string {
	for label, m := range r.Where {
		if m == OneOfEach {
			return label
		}
	}
	return ""
}

// after returns members in the order of their keys, beginning after self's.
func after[K any](members []Member, self Member, key func(Member) K, compare func(a, b K) int) []Member {
	type keyed struct {
		key K
		m   Member
	}
	before := func(a, b keyed) int { return cmp.Or(compare(a.key, b.key), strings.Compare(a.m.Name, b.m.Name)) }
	ring := make([]keyed, len(members))
	for i, m := range members {
		ring[i] = keyed{key(m), m}
	}
	slices.SortFunc(ring, before)
	// Those with self's own key, which are of its own rack, come last for all of that rack.
	first, _ := slices.BinarySearchFunc(ring, key(self), func(k keyed, own K) int {
		if compare(k.key, own) <= 0 {
			return -1
		}
		return 1
	})
	out := make([]Member, 0, len(members))
	for i := range ring {
		out = append(out, ring[(first+i)%len(ring)].m)
	}
	return out
}

// onePerValue chooses a peer for every value of a label: the one whose place among those with that
// value is self's place among its own. So with racks of the same size each member of a rack is
// visited by one of every rack.
func onePerValue(peers []Member, self Member, label, salt string) []Member {
	byHash := func(a, b Member) int {
		return cmp.Or(cmp.Compare(hash(salt, a.Name), hash(salt, b.Name)), strings.Compare(a.Name, b.Name))
	}
	groups := map[string][]Member{}
	for _, p := range peers {
		groups[p.Labels[label]] = append(groups[p.Labels[label]], p)
	}
	own := self.Labels[label]
	place := 0
	for _, p := range groups[own] {
		if byHash(p, self) < 0 {
			place++
		}
	}
	out := make([]Member, 0, len(groups))
	for _, value := range slices.Sorted(maps.Keys(groups)) {
		g := groups[value]
		slices.SortFunc(g, byHash)
		out = append(out, g[place%len(g)]) // of its own, which does not hold it, that is the next one
	}
	return out
}

func hash(salt, name string) uint64 {
	sum := sha256.Sum256([]byte(salt + "\x00" + name))
	return binary.BigEndian.Uint64(sum[:8])
}
