package peers

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func peer(name, address string, labels ...string) Peer {
	p := Peer{Name: name, Address: address}
	for i := 0; i < len(labels); i += 2 {
		if p.Labels == nil {
			p.Labels = map[string]string{}
		}
		p.Labels[labels[i]] = labels[i+1]
	}
	return p
}

func knows(contacts map[string]*contact, previous View) knowledge {
	return knowledge{
		own: "me", isOwn: func(a string) bool { return strings.HasPrefix(a, "10.0.0.1:") || strings.HasPrefix(a, "127.") },
		contact: func(a string) *contact { return contacts[a] }, previous: previous,
	}
}

// lines writes a view as name address state.
func lines(v View) (out []string) {
	for _, m := range v.Members {
		out = append(out, strings.TrimSpace(fmt.Sprintf("%s %s %s", m.Name, m.Address, m.State)))
	}
	return out
}

func TestMerge(t *testing.T) {
	for name, c := range map[string]struct {
		lists    []listing
		contacts map[string]*contact
		before   []Member
		want     []string
	}{
		"self by name, by address and by answer": {
			lists:    []listing{{"static", []Peer{peer("me", "10.0.0.99:1"), peer("x", "10.0.0.1:1"), peer("y", "127.0.0.1:1"), peer("z", "gpu:1"), peer("b", "10.0.0.2:1")}}},
			contacts: map[string]*contact{"gpu:1": {self: true, good: true}},
			want:     []string{"b 10.0.0.2:1 active", "me 10.0.0.99:1 self", "x 10.0.0.1:1 self", "y 127.0.0.1:1 self", "z gpu:1 self"},
		},
		"one address under two names": {
			lists: []listing{{"static", []Peer{peer("b", "10.0.0.2:1")}}, {"files", []Peer{peer("a", "10.0.0.2:1")}}},
			want:  []string{"a 10.0.0.2:1 duplicate", "b 10.0.0.2:1 active"},
		},
		"one name at two addresses": {
			lists: []listing{{"static", []Peer{peer("a", "10.0.0.3:1")}}, {"files", []Peer{peer("a", "10.0.0.2:1")}}},
			want:  []string{"a 10.0.0.2:1 duplicate", "a 10.0.0.3:1 active"},
		},
		"what was in use stays, whatever the order": {
			lists:  []listing{{"dns", []Peer{peer("a", "10.0.0.2:1"), peer("a", "10.0.0.3:1")}}},
			before: []Member{{Peer: peer("a", "10.0.0.3:1"), State: Active}},
			want:   []string{"a 10.0.0.2:1 duplicate", "a 10.0.0.3:1 active"},
		},
		"a move": {
			lists:  []listing{{"dns", []Peer{peer("a", "10.0.0.4:1")}}},
			before: []Member{{Peer: peer("a", "10.0.0.3:1"), State: Active}},
			want:   []string{"a 10.0.0.4:1 active"},
		},
		"two that swap addresses": {
			lists:  []listing{{"files", []Peer{peer("a", "10.0.0.3:1"), peer("b", "10.0.0.2:1")}}},
			before: []Member{{Peer: peer("a", "10.0.0.2:1"), State: Active}, {Peer: peer("b", "10.0.0.3:1"), State: Active}},
			want:   []string{"a 10.0.0.3:1 active", "b 10.0.0.2:1 active"},
		},
		"drained by label and by answer": {
			lists:    []listing{{"files", []Peer{peer("a", "10.0.0.2:1", "lame_duck", "true"), peer("b", "10.0.0.3:1", "lame_duck", "No"), peer("c", "10.0.0.4:1")}}},
			contacts: map[string]*contact{"10.0.0.4:1": {drained: true, good: true}},
			want:     []string{"a 10.0.0.2:1 drained", "b 10.0.0.3:1 active", "c 10.0.0.4:1 drained"},
		},
		"addresses get the names that their nodes tell": {
			lists:    []listing{{"dns", []Peer{peer("", "10.0.0.1:1"), peer("", "10.0.0.2:1"), peer("", "10.0.0.3:1"), peer("", "10.0.0.4:1"), peer("", "[fd00::2]:1")}}},
			contacts: map[string]*contact{"10.0.0.2:1": {name: "a"}, "10.0.0.3:1": {}, "10.0.0.4:1": {name: "me"}, "[fd00::2]:1": {name: "a"}},
			want:     []string{"10.0.0.1:1 self", "10.0.0.3:1 unnamed", "a 10.0.0.2:1 active", "a [fd00::2]:1 duplicate", "me 10.0.0.4:1 self"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := merge(c.lists, knows(c.contacts, View{c.before}))
			if diff := cmp.Diff(c.want, lines(got)); diff != "" {
				t.Error(diff)
			}
			for _, m := range got.Members {
				if m.State == Duplicate && (!strings.Contains(m.Detail, "10.0.0.2:1") || !strings.Contains(m.Detail, "two")) {
					t.Errorf("detail %q", m.Detail)
				}
			}
		})
	}
}

// Two sources that tell of one peer complete each other's labels; the first counts where they differ.
func TestMergeLabels(t *testing.T) {
	first := peer("a", "10.0.0.2:1", "rack", "r1")
	got := merge([]listing{{"static", []Peer{first}}, {"http", []Peer{peer("a", "10.0.0.2:1", "rack", "r2", "rail", "3")}}}, knows(nil, View{}))
	want := []Member{{Peer: peer("a", "10.0.0.2:1", "rack", "r1", "rail", "3"), Source: "static", State: Active}}
	if diff := cmp.Diff(want, got.Members); diff != "" {
		t.Error(diff)
	}
	if len(first.Labels) != 1 {
		t.Error("the source's own labels were changed")
	}
}

func TestMergeBound(t *testing.T) {
	many := make([]Peer, MaxPeers)
	for i := range many {
		many[i] = peer(fmt.Sprint("n", i), fmt.Sprintf("h%d:1", i))
	}
	got := merge([]listing{{"files", many}, {"dns", []Peer{peer("z", "z:1")}}}, knows(nil, View{}))
	if len(got.Members) != MaxPeers || len(got.Active()) != MaxPeers {
		t.Errorf("%d members", len(got.Members))
	}
}
