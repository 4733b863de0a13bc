package verbs

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
)

// ErrNoGID is a port whose GID table holds nothing that could be used; ErrGIDNotAssigned one where what could be used
// is not an address of this host now: the kernel keeps GIDs of addresses that are gone, and those of other network namespaces.
var (
	ErrNoGID          = errors.New("no usable GID")
	ErrGIDNotAssigned = errors.New("GID is not an address of this host")
)

// Assigned reports whether addr is now assigned to the network interface with the given index in our own network namespace.
// Index 0 asks for any interface.
func Assigned(ifIndex int, addr netip.Addr) bool {
	if addr.IsLoopback() {
		return true // all of 127.0.0.0/8 is, whatever the interface lists
	}
	var addrs []net.Addr
	if ifIndex == 0 {
		addrs, _ = net.InterfaceAddrs()
	} else {
		ifi, err := net.InterfaceByIndex(ifIndex)
		if err != nil {
			return false
		}
		addrs, _ = ifi.Addrs()
	}
	return slices.ContainsFunc(addrs, func(a net.Addr) bool {
		p, err := netip.ParsePrefix(a.String())
		return err == nil && p.Addr().Unmap() == addr
	})
}

// UsableGIDs picks from a RoCE port's table what a queue pair may use as its source, best first: RoCE v2, an address that
// assigned says is on the GID's own netdev; IPv4, then global IPv6, and link-local only if there is nothing else. Indexes are
// positions that change with every address, so they decide nothing, unless pin is not negative: then only that entry counts.
//
// The error is ErrNoGID or ErrGIDNotAssigned, and says which entries were looked at.
func UsableGIDs(table []GID, assigned func(ifIndex int, addr netip.Addr) bool, pin int) ([]GID, error) {
	var out []GID
	var stale []string
	for _, g := range table {
		switch {
		case pin >= 0 && g.Index != pin:
		case pin < 0 && g.Type != GIDRoCEv2 && g.Type != GIDUnknown:
		case !assigned(g.IfIndex, g.Addr):
			stale = append(stale, fmt.Sprintf("%d (%s)", g.Index, g.Addr))
		default:
			out = append(out, g)
		}
	}
	slices.SortStableFunc(out, func(a, b GID) int { return cmp.Compare(gidRank(a.Addr), gidRank(b.Addr)) })
	if i := slices.IndexFunc(out, func(g GID) bool { return g.Addr.IsLinkLocalUnicast() }); i > 0 {
		out = out[:i]
	}
	switch {
	case len(out) > 0:
		return out, nil
	case len(stale) > 0:
		return nil, fmt.Errorf("%w: looked at %v; assign the address to the netdev, or pin another GID", ErrGIDNotAssigned, stale)
	case pin >= 0:
		return nil, fmt.Errorf("%w: slot %d of the GID table is empty", ErrNoGID, pin)
	}
	return nil, fmt.Errorf("%w: none of %d entries of the GID table is RoCE v2; give the netdev an address", ErrNoGID, len(table))
}

func gidRank(a netip.Addr) int {
	switch {
	case a.IsLinkLocalUnicast():
		return 2
	case a.Is4():
		return 0
	}
	return 1
}

// MatchGIDs picks the pair of GIDs over which two ends can reach each other: same type, same family and scope; among
// several, those with the longest common prefix, and else the first of each.
func MatchGIDs(mine, theirs []GID) (m, t GID, ok bool) {
	best := -1
	for _, a := range mine {
		for _, b := range theirs {
			if a.Type != b.Type && a.Type != GIDUnknown && b.Type != GIDUnknown || gidRank(a.Addr) != gidRank(b.Addr) {
				continue
			}
			score := (2-gidRank(a.Addr))<<8 + commonPrefix(a.Addr, b.Addr)
			if score > best {
				best, m, t, ok = score, a, b, true
			}
		}
	}
	return m, t, ok
}

func commonPrefix(a, b netip.Addr) int {
	n := 0
	for n < a.BitLen() {
		p, err := a.Prefix(n + 1)
		if err != nil || !p.Contains(b) {
			break
		}
		n++
	}
	return n
}
