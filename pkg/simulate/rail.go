package simulate

import (
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/schedule"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule/pairing"
)

// What a daemon does around its sessions, as packages probe and control have it.
const (
	busyRetry    = 300 * time.Millisecond // hint of a peer whose port is in use
	connectTime  = 3 * time.Second        // until a peer that is not there is given up
	firstResend  = time.Second            // of a message that got lost; then twice as long
	maxResends   = 3
	leaseTime    = 10 * time.Second // until a responder takes its initiator for gone
	leastSession = 0.85             // of what a session is expected to take
)

// rail is one port of every node.
type rail struct {
	*fleet
	number int
	rng    *rand.Rand
	gate   *schedule.Gate
	ports  []string // by node: what its port is called at the gate
	inUse  []uint8  // the same once more, to see whether the gate keeps its word
	events queue
	open   []session
	free   []int32 // places in open

	measured   []uint64 // a bit for each direction of each pair
	load       []float64
	end        time.Duration
	collisions int
	overlaps   int
	sessions   Tally
	pairs      Pairs
	news       []newPairs // by part of the firings
}

// newPairs counts pairs measured for the first time.
type newPairs struct{ all, planned int }

// session is one under way.
type session struct{ release [2]func() }

type eventKind uint8

const (
	slotBegins eventKind = iota // for a node; n is the slot
	tries                       // to open a session with peer
	closes                      // a session with peer that went well; n is its place
	gives                       // up on peer: n is the place of what it holds, -1 for nothing
	expires                     // the responder's lease of a session; n is its place
)

// event happens to a node at a moment of true time, counted from the firing.
type event struct {
	at         time.Duration
	latest     time.Duration // for tries: to begin
	node, peer int32
	n          int32
	kind       eventKind
}

func newRail(f *fleet, number int) *rail {
	all := len(f.skew)
	x := &rail{
		fleet: f, number: number, rng: random(f.o.Seed, 2, uint64(number)), gate: schedule.NewGate(schedule.GateOptions{}),
		ports: make([]string, all), inUse: make([]uint8, all), measured: make([]uint64, pairing.Rounds(all)*all/64+1), load: make([]float64, all),
	}
	for i := range x.ports {
		x.ports[i] = "node" + strconv.Itoa(i) + "/" + strconv.Itoa(number)
	}
	return x
}

// fire simulates one firing until nothing happens any more.
func (x *rail) fire(firing int64, n, parts int) {
	clear(x.load)
	x.end = 0
	x.news = append(x.news, make([]newPairs, parts)...)
	news := x.news[n*parts:]
	slot, slots := x.o.Timetable.Slot, int32(x.o.Timetable.Slots(x.o.Nodes))
	for i := range x.skew {
		if x.from[i] != never {
			// Who joins begins with the next slot by its own clock.
			k := int32(0)
			if x.from[i] > 0 {
				k = int32(max(0, (x.from[i]+x.skew[i]+slot-1)/slot))
			}
			x.events.push(event{kind: slotBegins, node: int32(i), n: k, at: time.Duration(k)*slot - x.skew[i]})
		}
	}
	for len(x.events) > 0 {
		e := x.events.pop()
		switch e.kind {
		case slotBegins:
			if e.n+1 < slots {
				x.events.push(event{kind: slotBegins, node: e.node, n: e.n + 1, at: e.at + slot})
			}
			if e.n < slots && x.there(e.node, e.at) {
				x.meet(firing, e)
			}
		case tries:
			x.try(e)
		case closes:
			x.close(e.n, 0, 1)
			x.inUse[e.node]--
			x.inUse[e.peer]--
			x.end = max(x.end, e.at)
			x.sessions.Measured++
			x.load[e.node] += x.o.Bytes
			x.load[e.peer] += x.o.Bytes
			x.note(firing, e, news)
		case gives:
			if e.n >= 0 {
				if x.open[e.n].release[1] != nil {
					x.inUse[e.node]--
					x.inUse[e.peer]--
				}
				x.close(e.n, 0)
			}
			x.sessions.Failed++
		case expires:
			x.close(e.n, 1)
		}
	}
}

// note takes down that a direction of a pair was measured.
func (x *rail) note(firing int64, e event, news []newPairs) {
	if x.marked(e.node, e.peer) {
		x.pairs.Repeated++
		return
	}
	if !x.marked(e.peer, e.node) {
		part := int(e.at * time.Duration(len(news)) / x.length())
		n := &news[min(max(0, part), len(news)-1)]
		n.all++
		if x.planned(firing, e) {
			n.planned++
		}
	}
	bit := x.bit(e.node, e.peer)
	x.measured[bit/64] |= 1 << (bit % 64)
}

// planned reports whether a pair is one of those that the true list of members has for this firing.
func (x *rail) planned(firing int64, e event) bool {
	v := x.truth(e.at)
	i, j := v.rank[e.node], v.rank[e.peer]
	if i < 0 || j < 0 {
		return false
	}
	n := len(v.ids)
	rounds, slots := int64(pairing.Rounds(n)), int64(x.o.Timetable.Slots(n))
	return (int64(pairing.RoundOf(n, int(i), int(j)))+rounds-firing*slots%rounds)%rounds < slots
}

func (x *rail) marked(i, j int32) bool {
	bit := x.bit(i, j)
	return x.measured[bit/64]>>(bit%64)&1 != 0
}

// bit is the place of a direction among all: those that are measured in the same slot are next to each other, if nobody comes
// or goes.
func (x *rail) bit(i, j int32) int {
	all := len(x.skew)
	return pairing.RoundOf(all, int(i), int(j))*all + int(i)
}

// meet plans what a node does in a slot.
func (x *rail) meet(firing int64, e event) {
	v := x.seen(e.node, e.at)
	rank := v.rank[e.node]
	if rank < 0 {
		return // it has not heard of itself yet
	}
	m, ok := x.o.Timetable.Meet(len(v.ids), int(rank), firing, int(e.n))
	if !ok {
		return
	}
	x.sessions.Planned++
	e = event{kind: tries, node: e.node, peer: v.ids[m.Partner], at: e.at + m.Begin, latest: e.at + m.Latest}
	if m.Begin == 0 {
		x.try(e)
		return
	}
	x.events.push(e)
}

// try opens a session, or finds that it can't.
func (x *rail) try(e event) {
	if !x.there(e.node, e.at) {
		x.sessions.Failed++
		return
	}
	if !x.there(e.peer, e.at) {
		x.events.push(event{kind: gives, node: e.node, peer: e.peer, n: -1, at: e.at + connectTime})
		return
	}
	exclusive := x.o.Timetable.InTurn
	own, ok := x.gate.TryAcquire(x.ports[e.node], exclusive)
	if !ok {
		x.again(e)
		return
	}
	took, arrived := x.send()
	if !arrived {
		x.events.push(event{kind: gives, node: e.node, peer: e.peer, n: x.hold(own, nil), at: e.at + took})
		return
	}
	theirs, ok := x.gate.TryAcquire(x.ports[e.peer], exclusive)
	if !ok {
		own()
		e.at += took
		x.again(e)
		return
	}
	x.use(e.node, exclusive)
	x.use(e.peer, exclusive)
	place := x.hold(own, theirs)
	need := float64(x.o.Timetable.Need)
	took += time.Duration(need * (leastSession + (1-leastSession)*x.rng.Float64()))
	end, arrived := x.send()
	done := event{kind: closes, node: e.node, peer: e.peer, n: place, at: e.at + took + end}
	if !arrived {
		// The initiator gives up, and the responder goes on waiting for it.
		done.kind = gives
		x.events.push(event{kind: expires, node: e.peer, n: place, at: e.at + took + leaseTime})
	}
	x.events.push(done)
}

// again tries once more after a pause, if a session then still fits into the slot.
func (x *rail) again(e event) {
	x.collisions++
	e.at += busyRetry/2 + time.Duration(x.rng.Int64N(int64(busyRetry)))
	if e.at > e.latest {
		x.sessions.Busy++
		return
	}
	x.events.push(e)
}

// send is how long a message takes to be answered, and whether it was.
func (x *rail) send() (took time.Duration, ok bool) {
	for n := range maxResends {
		if x.o.Loss == 0 || x.rng.Float64() >= x.o.Loss {
			return took, true
		}
		took += firstResend << n
	}
	return took, false
}

func (x *rail) use(i int32, exclusive bool) {
	if x.inUse[i]++; exclusive && x.inUse[i] > 1 {
		x.overlaps++
	}
}

// hold keeps what a session holds; its place is the answer.
func (x *rail) hold(own, theirs func()) int32 {
	s := session{release: [2]func(){own, theirs}}
	if n := len(x.free); n > 0 {
		place := x.free[n-1]
		x.free = x.free[:n-1]
		x.open[place] = s
		return place
	}
	x.open = append(x.open, s)
	return int32(len(x.open) - 1)
}

// close lets go of the ends of a session, 0 the initiator's and 1 the responder's.
func (x *rail) close(place int32, ends ...int) {
	s := &x.open[place]
	for _, end := range ends {
		s.release[end]()
		s.release[end] = nil
	}
	if s.release[0] == nil && s.release[1] == nil {
		x.free = append(x.free, place)
	}
}

// account compares what was measured with what the true list of members planned.
func (x *rail) account(firing int64) {
	t := x.o.Timetable
	for slot := range t.Slots(x.o.Nodes) {
		at := time.Duration(slot) * t.Slot
		v := x.truth(at)
		for rank, i := range v.ids {
			m, ok := t.Meet(len(v.ids), rank, firing, slot)
			if !ok || m.Partner < rank {
				continue
			}
			j := v.ids[m.Partner]
			if !x.there(i, at) || !x.there(j, at) {
				x.pairs.Unreachable++
				continue
			}
			x.pairs.Planned++
			there, back := x.marked(i, j), x.marked(j, i)
			if there || back {
				x.pairs.Measured++
			}
			if there && back {
				x.pairs.Both++
			}
		}
	}
}

// queue holds events, the earliest first; of the same moment those of lower nodes, so that a seed gives one outcome.
type queue []event

func (q queue) before(a, b int) bool {
	x, y := &q[a], &q[b]
	if x.at != y.at {
		return x.at < y.at
	}
	if (x.kind >= closes) != (y.kind >= closes) {
		return x.kind >= closes // who lets go comes before who takes
	}
	return x.node < y.node
}

func (q *queue) push(e event) {
	*q = append(*q, e)
	h := *q
	for i := len(h) - 1; i > 0; {
		up := (i - 1) / 2
		if !h.before(i, up) {
			break
		}
		h[i], h[up] = h[up], h[i]
		i = up
	}
}

func (q *queue) pop() event {
	h := *q
	top := h[0]
	last := len(h) - 1
	h[0] = h[last]
	h = h[:last]
	*q = h
	for i := 0; ; {
		down := 2*i + 1
		if down >= last {
			break
		}
		if r := down + 1; r < last && h.before(r, down) {
			down = r
		}
		if !h.before(down, i) {
			break
		}
		h[i], h[down] = h[down], h[i]
		i = down
	}
	return top
}
