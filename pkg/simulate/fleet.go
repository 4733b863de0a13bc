package simulate

import (
	"math/rand/v2"
	"slices"
	"time"
)

const (
	// maxDelay is how long it takes at most until a node hears of a change of the members: discovery asks twice a minute.
	maxDelay = time.Minute
	// maxVersions of the list of members in one firing; changes beyond it come together.
	maxVersions = 100
	// maxStale is how many different outdated lists there are among the lagging nodes.
	maxStale = 16
)

// fleet is all nodes that ever are members, by number. Numbers are in the order of their names.
type fleet struct {
	o      Options
	rng    *rand.Rand
	skew   []time.Duration // how much a node's clock is ahead
	delay  []time.Duration // until it hears of a change
	stale  []*view         // of lagging nodes: the list they have instead; else nil
	dead   []bool
	from   []time.Duration // when it becomes a member, in this firing
	until  []time.Duration // and when it is gone
	spare  []int32         // not members yet
	member []int32
	now    []version // in this firing, the oldest first
}

// view is a list of members.
type view struct {
	ids  []int32 // in order
	rank []int32 // by number: the place among them; -1: none
}

// version is the list of members from a moment on.
type version struct {
	at time.Duration
	*view
}

const never = time.Duration(1<<63 - 1)

func newFleet(o Options) *fleet {
	rng := random(o.Seed, 1)
	joins := int(o.Churn*float64(o.Nodes)) * o.Firings
	all := o.Nodes + joins
	f := &fleet{
		o: o, rng: rng, skew: make([]time.Duration, all), delay: make([]time.Duration, all), stale: make([]*view, all), dead: make([]bool, all),
		from: make([]time.Duration, all), until: make([]time.Duration, all),
	}
	for i := range all {
		if o.Skew > 0 {
			f.skew[i] = time.Duration(rng.Int64N(2*int64(o.Skew)+1)) - o.Skew
		}
		f.delay[i] = time.Duration(rng.Int64N(int64(maxDelay)))
	}
	order := rng.Perm(all)
	for _, i := range order[:o.Nodes] {
		f.member = append(f.member, int32(i))
	}
	for _, i := range order[o.Nodes:] {
		f.spare = append(f.spare, int32(i))
	}
	for _, i := range f.some(o.Dead) {
		f.dead[i] = true
	}
	slices.Sort(f.member)
	var lists []*view
	for _, i := range f.some(o.Lagging) {
		if len(lists) < maxStale {
			lists = append(lists, f.outdated())
		}
		// One that holds the node itself: everybody is in most of them.
		for try := 0; f.stale[i] == nil && try < 4*maxStale; try++ {
			if v := lists[rng.IntN(len(lists))]; v.rank[i] >= 0 {
				f.stale[i] = v
			}
		}
	}
	return f
}

// some returns a share of the members, at random.
func (f *fleet) some(share float64) []int32 {
	n := int(share*float64(f.o.Nodes) + 0.5)
	order := f.rng.Perm(len(f.member))
	out := make([]int32, n)
	for k := range out {
		out[k] = f.member[order[k]]
	}
	return out
}

// outdated is a list that lacks one to three members.
func (f *fleet) outdated() *view {
	ids := slices.Clone(f.member)
	for range min(1+f.rng.IntN(3), len(ids)-1) {
		k := f.rng.IntN(len(ids))
		ids = slices.Delete(ids, k, k+1)
	}
	return f.view(ids)
}

func (f *fleet) view(ids []int32) *view {
	v := &view{ids: ids, rank: make([]int32, len(f.skew))}
	for i := range v.rank {
		v.rank[i] = -1
	}
	for k, i := range ids {
		v.rank[i] = int32(k)
	}
	return v
}

// length is how long a firing lasts.
func (f *fleet) length() time.Duration {
	return time.Duration(f.o.Timetable.Slots(f.o.Nodes)) * f.o.Timetable.Slot
}

// begin draws who comes and goes during a firing.
func (f *fleet) begin(int) {
	for i := range f.from {
		f.from[i], f.until[i] = never, 0
	}
	for _, i := range f.member {
		f.from[i], f.until[i] = -never, never
	}
	f.now = []version{{-never, f.view(slices.Clone(f.member))}}
	changes := int(f.o.Churn * float64(f.o.Nodes))
	for done := 0; done < changes; {
		versions := min(changes, maxVersions)
		step := f.length() / time.Duration(versions+1)
		at := time.Duration(len(f.now)) * step
		for upto := changes * len(f.now) / versions; done < upto; done++ {
			k := f.rng.IntN(len(f.member))
			gone, new := f.member[k], f.spare[0]
			f.spare = f.spare[1:]
			f.until[gone], f.from[new] = at, at
			f.member = slices.Delete(f.member, k, k+1)
			k, _ = slices.BinarySearch(f.member, new)
			f.member = slices.Insert(f.member, k, new)
		}
		f.now = append(f.now, version{at, f.view(slices.Clone(f.member))})
	}
}

// truth is the list of members at a moment.
func (f *fleet) truth(at time.Duration) *view { return f.asOf(at, 0) }

// seen is the list of members as a node has it.
func (f *fleet) seen(i int32, at time.Duration) *view {
	if v := f.stale[i]; v != nil {
		return v
	}
	return f.asOf(at, f.delay[i])
}

func (f *fleet) asOf(at, delay time.Duration) *view {
	k := len(f.now) - 1
	for k > 0 && f.now[k].at > at-delay {
		k--
	}
	return f.now[k].view
}

// there reports whether a node runs at a moment.
func (f *fleet) there(i int32, at time.Duration) bool {
	return !f.dead[i] && f.from[i] <= at && at < f.until[i]
}
