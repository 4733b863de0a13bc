package daemon

import (
	"slices"
	"strings"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule/pairing"
)

// fleet is the nodes as this one knows them at a moment, itself among them. It does not change.
type fleet struct {
	members []pairing.Member // by name
	self    int              // its place among them
	peers   map[string]config.Peer
}

// newFleet makes the fleet of a node and its peers, which may hold the node itself.
func newFleet(node config.Node, peers []config.Peer) *fleet {
	f := &fleet{peers: make(map[string]config.Peer, len(peers))}
	f.members = append(f.members, pairing.Member{Name: node.Name, Labels: node.Labels})
	for _, p := range peers {
		if _, twice := f.peers[p.Name]; p.Name != node.Name && !twice {
			f.peers[p.Name] = p
			f.members = append(f.members, pairing.Member{Name: p.Name, Labels: p.Labels})
		}
	}
	slices.SortFunc(f.members, func(a, b pairing.Member) int { return strings.Compare(a.Name, b.Name) })
	f.self = slices.IndexFunc(f.members, func(m pairing.Member) bool { return m.Name == node.Name })
	return f
}

func (f *fleet) own() pairing.Member { return f.members[f.self] }

func (f *fleet) target(p config.Peer) probe.Target {
	return probe.Target{Name: p.Name, Address: p.Address, Path: path(f.own().Labels, p.Labels)}
}

// path classifies the way between two nodes by their racks.
func path(own, peer map[string]string) string {
	switch a, b := own["rack"], peer["rack"]; {
	case a == "" || b == "":
		return "unknown"
	case a == b:
		return "same_rack"
	}
	return "cross_rack"
}
