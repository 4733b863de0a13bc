package counters

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Route is how this host sends packets to an address.
type Route struct {
	Netdev  string
	Source  netip.Addr
	Gateway netip.Addr // invalid: the address is on the netdev's own network
	Local   bool       // the address is this host's own
	MTU     int        // bytes, of the route or else of the netdev; 0: unknown
}

// RouteTo asks the kernel for the route to an address, of packets that leave with the given source; an invalid one leaves
// the choice to the kernel. The error is that there is none.
func RouteTo(dst, src netip.Addr) (Route, error) {
	var o netlink.RouteGetOptions
	if src.IsValid() {
		o.SrcAddr = src.AsSlice()
	}
	routes, err := netlink.RouteGetWithOptions(dst.AsSlice(), &o)
	if err != nil {
		return Route{}, fmt.Errorf("route to %s: %w", dst, err)
	}
	if len(routes) == 0 {
		return Route{}, fmt.Errorf("route to %s: none", dst)
	}
	k := routes[0]
	r := Route{Local: k.Type == unix.RTN_LOCAL, MTU: k.MTU}
	r.Source, r.Gateway = unmapped(k.Src), unmapped(k.Gw)
	if ifi, err := net.InterfaceByIndex(k.LinkIndex); err == nil {
		r.Netdev = ifi.Name
		if r.MTU == 0 {
			r.MTU = ifi.MTU
		}
	}
	return r, nil
}

func unmapped(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

// Neighbour is what the kernel knows of an address on a netdev's own network: "reachable", "stale", "incomplete", "failed" …;
// empty if nothing.
func Neighbour(netdev string, addr netip.Addr) string {
	ifi, err := net.InterfaceByName(netdev)
	if err != nil {
		return ""
	}
	list, _ := netlink.NeighList(ifi.Index, netlink.FAMILY_ALL) // no answer is no knowledge
	for _, n := range list {
		if unmapped(n.IP) == addr {
			return neighbourStates[n.State]
		}
	}
	return ""
}

var neighbourStates = map[int]string{
	netlink.NUD_INCOMPLETE: "incomplete", netlink.NUD_REACHABLE: "reachable", netlink.NUD_STALE: "stale", netlink.NUD_DELAY: "delay",
	netlink.NUD_PROBE: "probe", netlink.NUD_FAILED: "failed", netlink.NUD_NOARP: "noarp", netlink.NUD_PERMANENT: "permanent",
}
