package pairing

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// fleet is n members in racks of the given size.
func fleet(n, rack int) []Member {
	out := make([]Member, n)
	for i := range out {
		out[i] = Member{Name: fmt.Sprintf("node%05d", i), Labels: map[string]string{"rack": fmt.Sprint("r", i/rack), "pod": fmt.Sprint("p", i/rack/4)}}
	}
	return out
}

func names(ms []Member) []string {
	out := make([]string, len(ms))
	for i, m := range ms {
		out[i] = m.Name
	}
	return out
}

// inDegrees counts how often each member is visited when all choose.
func inDegrees(t *testing.T, r Rule, members []Member, firing int64) map[string]int {
	t.Helper()
	in := map[string]int{}
	for _, self := range members {
		seen := map[string]bool{self.Name: true}
		for _, p := range r.Choose(members, self, firing) {
			if seen[p.Name] {
				t.Fatalf("%s visits %s twice, or itself", self.Name, p.Name)
			}
			seen[p.Name] = true
			in[p.Name]++
		}
	}
	return in
}

func TestEvenInDegree(t *testing.T) {
	for _, tt := range []struct {
		name       string
		rule       Rule
		n, rack    int
		want, slop int
	}{
		{"ring", Rule{Strategy: Ring, Peers: 8}, 127, 16, 8, 0},
		{"random", Rule{Strategy: Random, Peers: 8}, 127, 16, 8, 0},
		{"a ring wider than the fleet", Rule{Strategy: Ring, Peers: 8}, 5, 5, 4, 0},
		{"random of two", Rule{Strategy: Random, Peers: 1}, 2, 1, 1, 0},
		{"all", Rule{Strategy: All}, 9, 3, 8, 0},
		{"ring within the rack", Rule{Strategy: Ring, Peers: 3, Where: map[string]Match{"rack": Same}}, 64, 16, 3, 0},
		{"random to other racks", Rule{Strategy: Random, Peers: 8, Where: map[string]Match{"rack": Other}}, 128, 16, 8, 4},
		{"one of each rack", Rule{Strategy: All, Where: map[string]Match{"rack": OneOfEach}}, 128, 16, 8, 0},
		{"one of each other rack", Rule{Strategy: All, Where: map[string]Match{"rack": OneOfEach, "pod": Same}}, 128, 16, 4, 0},
		{"few racks at random", Rule{Strategy: Random, Peers: 3, Where: map[string]Match{"rack": OneOfEach}}, 128, 16, 3, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := inDegrees(t, tt.rule, fleet(tt.n, tt.rack), 7)
			if len(in) != tt.n {
				t.Errorf("%d of %d members are visited", len(in), tt.n)
			}
			for name, n := range in {
				if n < tt.want-tt.slop || n > tt.want+tt.slop {
					t.Errorf("%s is visited by %d, want %d±%d", name, n, tt.want, tt.slop)
				}
			}
		})
	}
}

func TestFits(t *testing.T) {
	members := fleet(12, 3) // racks r0 to r3, pod p0
	members = append(members, Member{Name: "unlabelled"})
	self := members[4] // r1
	for _, tt := range []struct {
		where map[string]Match
		want  int
	}{
		{nil, 12},
		{map[string]Match{"rack": Same}, 2},
		{map[string]Match{"rack": Other}, 9},
		{map[string]Match{"rack": OneOfEach}, 4},
		{map[string]Match{"rack": Other, "pod": Same}, 9},
		{map[string]Match{"rack": Other, "pod": Other}, 0},
		{map[string]Match{"rail": Same}, 0},
	} {
		got := Rule{Strategy: All, Where: tt.where}.Choose(members, self, 0)
		if len(got) != tt.want {
			t.Errorf("%v: %v, want %d", tt.where, names(got), tt.want)
		}
		for _, m := range got {
			if tt.where != nil && m.Name == "unlabelled" {
				t.Errorf("%v: visits a member without labels", tt.where)
			}
		}
	}
	if got := (Rule{Strategy: All, Where: map[string]Match{"rack": Same}}).Choose(members, members[12], 0); len(got) != 0 {
		t.Errorf("without a label of its own it visits %v", names(got))
	}
}

// A member that comes or goes changes little for the others, and what they choose does not depend on the order of the list.
func TestRingChurn(t *testing.T) {
	const n, k = 1000, 8
	rule := Rule{Strategy: Ring, Peers: k}
	before, after := fleet(n, 16), fleet(n, 16)
	after = slices.Delete(after, 500, 501)
	slices.Reverse(after)
	changed := 0
	for _, self := range after {
		a, b := rule.Choose(before, self, 0), rule.Choose(after, self, 99)
		for _, m := range a {
			if !slices.ContainsFunc(b, func(x Member) bool { return x.Name == m.Name }) {
				changed++
			}
		}
	}
	if changed != k {
		t.Errorf("%d choices changed with one member gone, want %d", changed, k)
	}
}

// Over the firings random reaches everybody, and it is the same choice whenever it is asked.
func TestRandomWalks(t *testing.T) {
	members := fleet(64, 8)
	rule := Rule{Strategy: Random, Peers: 8}
	met := map[string]bool{}
	for firing := range int64(60) {
		got := names(rule.Choose(members, members[3], firing))
		if diff := cmp.Diff(got, names(rule.Choose(members, members[3], firing))); diff != "" {
			t.Fatal(diff)
		}
		for _, m := range got {
			met[m] = true
		}
	}
	if len(met) != 63 {
		t.Errorf("met %d of 63 in 60 firings", len(met))
	}
}

// Nodes that start at the same moment begin with another peer each.
func TestAllBeginsWithTheNext(t *testing.T) {
	members := fleet(5, 5)
	firsts := map[string]bool{}
	for _, self := range members {
		got := Rule{Strategy: All}.Choose(members, self, 0)
		firsts[got[0].Name] = true
	}
	if len(firsts) != 5 {
		t.Errorf("the first visits go to %v only", firsts)
	}
	got := names(Rule{Strategy: All}.Choose(members, Member{Name: "node00002x"}, 0))
	if diff := cmp.Diff([]string{"node00003", "node00004", "node00000", "node00001", "node00002"}, got); diff != "" {
		t.Errorf("a node that is not in the list (-want +got):\n%s", diff)
	}
}

// Every round is a matching, and after a cycle of rounds every pair met exactly once.
func TestEveryPairOnce(t *testing.T) {
	for _, n := range []int{0, 1, 2, 3, 4, 5, 8, 9, 127, 128, 300} {
		met := make([]int8, n*n)
		for round := range Rounds(n) {
			byes := 0
			for i := range n {
				j, ok := Partner(n, round, i)
				if !ok {
					byes++
					continue
				}
				if RoundOf(n, i, j) != round {
					t.Fatalf("n %d: %d and %d meet in round %d, not %d", n, i, j, round, RoundOf(n, i, j))
				}
				if back, ok := Partner(n, round, j); !ok || back != i || j == i {
					t.Fatalf("n %d, round %d: %d meets %d, who meets %d", n, round, i, j, back)
				}
				met[i*n+j]++
			}
			if byes != n%2 {
				t.Fatalf("n %d, round %d: %d byes", n, round, byes)
			}
		}
		for i := range n {
			for j := range n {
				if want := int8(1); met[i*n+j] != want && i != j || met[i*n+j] != 0 && i == j {
					t.Fatalf("n %d: %d and %d met %d times", n, i, j, met[i*n+j])
				}
			}
		}
	}
	for _, bad := range [][3]int{{0, 0, 0}, {1, 0, 0}, {4, 0, 4}, {4, 0, -1}} {
		if j, ok := Partner(bad[0], bad[1], bad[2]); ok {
			t.Errorf("Partner%v is %d", bad, j)
		}
	}
}

// Ten thousand are not met one by one here: a sample of rounds is a matching, a sample of pairs meets in exactly one round.
func TestTenThousand(t *testing.T) {
	const n = 10_000
	for _, round := range []int{0, 1, 4999, 5000, 9998} {
		for i := range n {
			j, ok := Partner(n, round, i)
			if back, ok2 := Partner(n, round, j); !ok || !ok2 || back != i || i == j {
				t.Fatalf("round %d: %d meets %d, who meets %d", round, i, j, back)
			}
		}
	}
	for _, i := range []int{0, 1, 4999, 9998, 9999} {
		met := make([]bool, n)
		for round := range Rounds(n) {
			j, _ := Partner(n, round, i)
			if met[j] {
				t.Fatalf("%d meets %d twice", i, j)
			}
			met[j] = true
		}
	}
}

// Firings go on where the one before ended, over the end of a cycle too, and both ends of a meeting agree on it.
func TestTimetable(t *testing.T) {
	for _, tt := range []Timetable{
		{Rounds: 64, Slot: 10 * time.Second, Need: 3 * time.Second, InTurn: true},
		{Rounds: 3, Slot: 10 * time.Second, Need: 3 * time.Second, InTurn: true, Cross: true},
		{Rounds: 5, Slot: 10 * time.Second},
	} {
		for _, n := range []int{2, 3, 8, 9} {
			slots := tt.Slots(n)
			firings := (Rounds(n) + slots - 1) / slots * slots // whole cycles
			cycles := firings * slots / Rounds(n)
			met, firsts, shifts := map[[2]int]int{}, map[[2]int]int{}, map[int]bool{}
			for firing := range int64(Rounds(n)) * 2 {
				for slot := range slots {
					for i := range n {
						m, ok := tt.Meet(n, i, firing+1000*int64(Rounds(n)), slot)
						if !ok {
							continue
						}
						back, ok := tt.Meet(n, m.Partner, firing+1000*int64(Rounds(n)), slot)
						if !ok || back.Partner != i || back.Shift != m.Shift {
							t.Fatalf("%+v, n %d: %d meets %+v, who meets %+v", tt, n, i, m, back)
						}
						if both := m.Begin + back.Begin; tt.InTurn && both != tt.Slot/2 || !tt.InTurn && both != 0 {
							t.Fatalf("%+v: the turns begin at %s and %s", tt, m.Begin, back.Begin)
						}
						if m.Begin > m.Latest || m.Latest+tt.Need != tt.Slot {
							t.Fatalf("%+v: begins at %s, latest at %s", tt, m.Begin, m.Latest)
						}
						met[[2]int{i, m.Partner}]++
						if m.Begin == 0 {
							firsts[[2]int{i, m.Partner}]++
						}
						shifts[m.Shift] = true
					}
				}
			}
			for pair, times := range met {
				if want := 2 * slots; times != want {
					t.Errorf("%+v, n %d: %v met %d times in 2·%d firings of %d slots, want %d", tt, n, pair, times, Rounds(n), slots, want)
				}
				if tt.InTurn && firsts[pair] != slots {
					t.Errorf("%+v, n %d: %d of %d times the first turn was the first one's of %v", tt, n, firsts[pair], 2*slots, pair)
				}
			}
			if len(met) != n*(n-1) {
				t.Errorf("%+v, n %d: %d of %d pairs met in %d cycles", tt, n, len(met), n*(n-1), cycles)
			}
			if tt.Cross != (len(shifts) > 1) {
				t.Errorf("%+v, n %d: shifts %v", tt, n, shifts)
			}
		}
	}
	if m, ok := (Timetable{Rounds: 4, Slot: time.Second}).Meet(1, 0, 3, 0); ok {
		t.Errorf("alone, it meets %+v", m)
	}
	if m, ok := (Timetable{Rounds: 4, Slot: time.Second}).Meet(8, 0, 3, 4); ok {
		t.Errorf("in a slot after the last it meets %+v", m)
	}
	if _, ok := (Timetable{Rounds: 4, Slot: time.Second}).Meet(8, 0, -3, 2); !ok {
		t.Error("no meeting before 1970")
	}
}

func BenchmarkMeet(b *testing.B) {
	tt := Timetable{Rounds: 64, Slot: 10 * time.Second, Need: 3 * time.Second, InTurn: true}
	for i := 0; b.Loop(); i++ {
		tt.Meet(10_000, i%10_000, int64(i), i%64)
	}
}
