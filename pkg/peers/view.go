package peers

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// State says what is to be done with a member.
type State string

// The states.
const (
	Active    State = "active"    // probe it
	Self      State = "self"      // this node
	Drained   State = "drained"   // leave it alone: its label lame_duck or its own answer says so
	Duplicate State = "duplicate" // its name or its address is another member's already
	Unnamed   State = "unnamed"   // an address from DNS whose node has not told its name yet
)

// drainLabel is the label by which a source takes a peer out of use.
const drainLabel = "lame_duck"

// IsLameDuck reports whether labels say that a node is to be left alone.
func IsLameDuck(labels map[string]string) bool {
	switch strings.ToLower(labels[drainLabel]) {
	case "", "0", "false", "no", "off":
		return false
	}
	return true
}

// Member is a node or address that some source tells of.
type Member struct {
	Peer
	Source string // kind of the first source that tells of it
	State  State
	Detail string // why it is not active
}

// View is all that the sources tell, by name and address. Treat it as immutable.
type View struct {
	Members []Member
}

// Active are the peers to be probed, by name.
func (v View) Active() []Peer {
	var out []Peer
	for _, m := range v.Members {
		if m.State == Active {
			out = append(out, m.Peer)
		}
	}
	return out
}

// Count returns how many members are in a state.
func (v View) Count(s State) (n int) {
	for _, m := range v.Members {
		if m.State == s {
			n++
		}
	}
	return n
}

func (v View) equal(o View) bool {
	return slices.EqualFunc(v.Members, o.Members, func(a, b Member) bool {
		return a.Name == b.Name && a.Address == b.Address && a.State == b.State && a.Detail == b.Detail && a.Source == b.Source && maps.Equal(a.Labels, b.Labels)
	})
}

// listing is what one source tells.
type listing struct {
	source string
	peers  []Peer
}

// knowledge is what else decides about members.
type knowledge struct {
	own      string                        // name of this node
	isOwn    func(address string) bool     // whether an address is this node's control channel
	contact  func(address string) *contact // what the node at an address told; nil: nothing
	previous View
}

// merge makes one view of what the sources tell, the first of them the weightiest. Where two tell one name at two addresses, or
// one address under two names, the one that was active before stays so: the order of answers must not move a peer about.
func merge(lists []listing, k knowledge) View {
	members := flatten(lists, k)
	byName, byAddress := map[string]string{}, map[string]string{} // the active ones before
	for _, m := range k.previous.Members {
		if m.State == Active || m.State == Drained {
			byName[m.Name], byAddress[m.Address] = m.Address, m.Name
		}
	}
	// What was there before comes first; otherwise the order of the sources stands.
	order := make([]*Member, len(members))
	for i := range members {
		order[i] = &members[i]
	}
	slices.SortStableFunc(order, func(a, b *Member) int {
		before := func(m *Member) int {
			if m.Name != "" && byName[m.Name] == m.Address && byAddress[m.Address] == m.Name {
				return 0
			}
			return 1
		}
		return cmp.Compare(before(a), before(b))
	})
	names, addresses := map[string]*Member{}, map[string]*Member{}
	for _, m := range order {
		c := k.contact(m.Address)
		switch {
		case m.Name == k.own && m.Name != "", k.isOwn(m.Address), c != nil && c.self:
			m.State = Self
			continue
		case m.Name == "":
			m.State, m.Detail = Unnamed, "its node has not answered yet"
			if c != nil && c.err != nil {
				m.Detail = "its node has not told its name: " + c.err.Error()
			}
			continue
		}
		if first := names[m.Name]; first != nil {
			m.State, m.Detail = Duplicate, fmt.Sprintf("%s is a name of two nodes, at %s (%s) and at %s (%s); the first is used", m.Name, first.Address, first.Source, m.Address, m.Source)
			continue
		}
		if first := addresses[m.Address]; first != nil {
			m.State, m.Detail = Duplicate, fmt.Sprintf("%s is the address of two peers, %s (%s) and %s (%s); the first is used", m.Address, first.Name, first.Source, m.Name, m.Source)
			continue
		}
		names[m.Name], addresses[m.Address] = m, m
		switch {
		case IsLameDuck(m.Labels):
			m.State, m.Detail = Drained, "label "+drainLabel
		case c != nil && c.drained:
			m.State, m.Detail = Drained, "it says so itself"
		default:
			m.State = Active
		}
	}
	slices.SortFunc(members, func(a, b Member) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Address, b.Address)) })
	return View{members}
}

// flatten puts the lists into one, each name and address once with the labels of all. What is too much is left out: the caller
// has told of it.
func flatten(lists []listing, k knowledge) []Member {
	type key struct{ name, address string }
	at := map[key]int{}
	var members []Member
	for _, l := range lists {
		for _, p := range l.peers {
			if p.Name == "" {
				if c := k.contact(p.Address); c != nil {
					p.Name = c.name
				}
			}
			i, known := at[key{p.Name, p.Address}]
			if !known {
				if len(members) == MaxPeers {
					return members
				}
				at[key{p.Name, p.Address}] = len(members)
				members = append(members, Member{Peer: p, Source: l.source})
				continue
			}
			for name, v := range p.Labels {
				if _, there := members[i].Labels[name]; !there {
					if members[i].Labels = maps.Clone(members[i].Labels); members[i].Labels == nil {
						members[i].Labels = map[string]string{}
					}
					members[i].Labels[name] = v
				}
			}
		}
	}
	return members
}
