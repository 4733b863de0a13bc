package pairing

import "time"

// Rounds is how many rounds it takes n members to meet each other once: n-1, or n if there is one
// too many, who has a bye in each. 0 if there is nobody to meet.
func Rounds(n int) int {
	switch {
	case n < 2:
		return 0
	case n%2 == 0:
		return n - 1
	}
	return n
}

// Partner returns whom member i of n meets in a round from 0 to [Rounds](n)-1; not ok if it has a
// bye. It is the circle method: the last member stays in the middle, the others stand around it,
// and each round those meet whose places add up to the round.
func Partner(n, round, i int) (j int, ok bool) {
	r := Rounds(n)
	if r == 0 || i < 0 || i >= n {
		return 0, false
	}
	if j = round - i; j < 0 {
		j += r
	}
	switch {
	case i == r: // in the middle, which is there only for an even n: the one whose place doubled is the round
		return round * (r + 1) / 2 % r, true
	case j == i && r == n: // nobody is in the middle
		return 0, false
	case j == i:
		return r, true
	}
	return j, true
}

// Timetable is that of a tournament, in which each member meets one other in every slot. All members must
// have the same list of members and the same clock for it to be without collisions; leases on the
// ports keep it safe when they have not.
type Timetable struct {
	Rounds int           // slots at one firing, at most; a firing goes on where the one before it ended
	Slot   time.Duration // length of a slot, in which both directions of a pair are measured
	Need   time.Duration // of it one direction takes about this; at most half
	InTurn bool          // one direction after the other; else both at the beginning of the slot
	Cross  bool          // rails are shifted against each other by one more in each cycle
}

// Meeting is what one member has to do in a slot.
type Meeting struct {
	Partner int // place in the list of members
	Shift   int // the own rail r meets the partner's rail r+Shift, modulo how many it has
	// The member probes the partner from Begin after the start of the slot on, or as soon after
	// that as both ports are free, but not later than at Latest.
	Begin, Latest time.Duration
}

// Slots is how many slots a firing has with n members.
func (t Timetable) Slots(n int) int { return min(t.Rounds, Rounds(n)) }

// Meet returns what member i of n does in a slot of a firing; not ok if nothing.
func (t Timetable) Meet(n, i int, firing int64, slot int) (m Meeting, ok bool) {
	if slot < 0 || slot >= t.Slots(n) {
		return Meeting{}, false
	}
	rounds := int64(Rounds(n))
	turn := firing*int64(t.Slots(n)) + int64(slot)
	round := int(((turn % rounds) + rounds) % rounds)
	j, ok := Partner(n, round, i)
	if !ok {
		return Meeting{}, false
	}
	m = Meeting{Partner: j, Latest: t.Slot - t.Need}
	if t.Cross {
		m.Shift = int(turn / rounds & (1<<16 - 1))
	}
	// The number of rounds is odd, so that in the next cycle it is the other one's turn first.
	if first := i < j == (turn%2 == 0); t.InTurn && !first {
		m.Begin = t.Slot / 2
	}
	return m, true
}

// RoundOf returns the round in which members i and j of n, two different ones, meet: the reverse of [Partner].
func RoundOf(n, i, j int) int {
	r := Rounds(n)
	if i == r { // in the middle
		i = j
	} else if j == r {
		j = i
	}
	return (i + j) % r
}
