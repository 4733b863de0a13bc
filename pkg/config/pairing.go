package config

import (
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/peers"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule/pairing"
)

// Pairing says with which peers a probe runs, and how its rails meet theirs.
type Pairing struct {
	pairing.Rule
	Rounds int           // of a tournament at one firing, at most
	Slot   time.Duration // of a tournament: in it both directions of a pair are measured
	Rails  Rails
}

// Rails says which ports of two nodes meet.
type Rails string

// The choices.
const (
	SameRails Rails = "same" // those with the same number
	AllRails  Rails = "all"  // every one with every other, one shift after the other
)

const (
	defaultPeers  = 8
	defaultRounds = 64
	defaultSlot   = 10 * time.Second
	maxRounds     = 100_000
	maxSlot       = time.Hour
)

// Timetable is that of a probe whose strategy is tournament.
func (p Probe) Timetable() pairing.Timetable {
	need := sessionTime(p.Spec)
	if need == 0 {
		need = p.Pairing.Slot / 4 // as long as it takes: half of its turn is a guess
	}
	return pairing.Timetable{
		Rounds: p.Pairing.Rounds, Slot: p.Pairing.Slot, Need: need, InTurn: p.Spec.Heavy(), Cross: p.Pairing.Rails == AllRails,
	}
}

// PerFiring is how many peers a probe visits at one firing at most, with n peers that it may visit.
func (p Probe) PerFiring(n int) int {
	switch p.Pairing.Strategy {
	case pairing.Ring, pairing.Random:
		return min(n, p.Pairing.Peers)
	case pairing.Tournament:
		return min(n, p.Pairing.Rounds)
	}
	return n
}

// sessionTime is about what one session takes; 0 if it runs by iterations, whose time is the link's.
func sessionTime(s probe.Spec) time.Duration {
	if s.Duration == 0 {
		return 0
	}
	const session, run = time.Second, 200 * time.Millisecond // connections and QPs; warm-up and barriers
	return time.Duration(max(1, s.FlowLabels)) * (session + time.Duration(max(1, len(s.Sizes))*max(1, s.Repeat))*(s.Duration+run))
}

// leastSlot is how long a slot must be for both directions, one after the other, and clocks that differ a little.
func leastSlot(s probe.Spec) time.Duration {
	const slack = 2 * time.Second
	return (2*sessionTime(s) + slack).Round(time.Second)
}

// pairing reads how a probe chooses its peers. The spec and the schedule must have been read.
func (o *object) pairing(p *Probe) {
	c := &p.Pairing
	c.Strategy, c.Rails = pairing.All, SameRails
	k := o.sub("pairing")
	word(k, "strategy", pairing.Strategies, nil, &c.Strategy)
	word(k, "rails", []Rails{SameRails, AllRails}, nil, &c.Rails)
	k.integer("peers", 1, peers.MaxPeers, "", &c.Peers)
	k.integer("rounds", 1, maxRounds, "", &c.Rounds)
	k.duration("slot", time.Second, maxSlot, &c.Slot)
	k.boolean("exclusive", &p.Spec.Exclusive)
	where := k.sub("where")
	for _, label := range where.keys {
		var m pairing.Match
		if word(where, label.Value, pairing.Matches, nil, &m); m == "" {
			continue
		}
		if !peers.ValidLabel(label.Value) {
			where.errorf(label, where.path, "%q can't be the name of a label", clip(label.Value, maxName))
		}
		if m == pairing.OneOfEach && one(c.Where) {
			where.errorf(label, where.join(label.Value), "%s can be said of one label only", m)
		}
		if c.Where == nil {
			c.Where = map[string]pairing.Match{}
		}
		c.Where[label.Value] = m
	}
	k.done()

	some := c.Strategy == pairing.Ring || c.Strategy == pairing.Random
	if k.has("peers") && !some {
		k.errorf(k.at("peers"), k.join("peers"), "strategy %s has no number of peers, only ring and random have; remove it or change the strategy", c.Strategy)
	}
	if some && c.Peers == 0 {
		c.Peers = defaultPeers
	}
	if k.has("exclusive") && !p.Spec.Exclusive && p.Spec.Heavy() {
		k.errorf(k.at("exclusive"), k.join("exclusive"), "a probe of %s fills the link, so it always has both ports for itself; remove this", p.Spec.Kind)
	}
	if c.Strategy == pairing.Tournament {
		o.tournament(k, p)
		return
	}
	for _, key := range []string{"rounds", "slot"} {
		if k.has(key) {
			k.errorf(k.at(key), k.join(key), "strategy %s has none, only tournament has; remove it or change the strategy", c.Strategy)
		}
	}
}

func one(where map[string]pairing.Match) bool {
	for _, m := range where {
		if m == pairing.OneOfEach {
			return true
		}
	}
	return false
}

// tournament completes the time-table of o, whose key pairing is k.
func (o *object) tournament(k *object, p *Probe) {
	c := &p.Pairing
	switch {
	case o.has("jitter") && p.Jitter > 0:
		o.errorf(o.at("jitter"), o.join("jitter"), "in a tournament all nodes take their turns at the same time; remove the jitter, or choose another strategy")
	case one(c.Where):
		k.errorf(k.at("where"), k.join("where"), "in a tournament everybody meets everybody, not %s; use same or other, or another strategy", pairing.OneOfEach)
	}
	p.Jitter = 0
	if c.Slot == 0 {
		c.Slot = defaultSlot
	}
	c.Slot = max(c.Slot, leastSlot(p.Spec))
	interval := p.Spec.Interval
	switch {
	case interval == 0: // there is an error in the schedule
		return
	case c.Slot > maxSlot:
		k.errorf(o.at("duration"), o.join("duration"), "both directions of a pair would take %s, and a slot at most %s; measure for a shorter time, or fewer sizes",
			formatDuration(c.Slot), formatDuration(maxSlot))
		return
	}
	fit := int(interval / c.Slot)
	switch {
	case fit == 0:
		k.errorf(k.at("slot"), k.join("slot"), "a slot of %s is longer than the %s between two firings; both directions of a pair must be measured in it",
			formatDuration(c.Slot), formatDuration(interval))
	case c.Rounds == 0:
		c.Rounds = min(defaultRounds, fit)
	case c.Rounds > fit:
		k.errorf(k.at("rounds"), k.join("rounds"), "%d slots of %s are longer than the %s between two firings; use at most %d rounds",
			c.Rounds, formatDuration(c.Slot), formatDuration(interval), fit)
	}
}

func (p Probe) effectivePairing() tree {
	c := p.Pairing
	m := mapping("strategy", string(c.Strategy))
	switch {
	case c.Peers > 0:
		m.add("peers", c.Peers)
	case c.Strategy == pairing.Tournament:
		m.add("rounds", c.Rounds, "slot", c.Slot)
	}
	where := map[string]string{}
	for label, match := range c.Where {
		where[label] = string(match)
	}
	m.add("rails", string(c.Rails), "exclusive", p.Spec.Heavy(), "where", where)
	return m.flow()
}
