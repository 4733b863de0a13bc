package counters

import (
	"net/netip"
	"testing"
)

func TestRouteToOwnAddress(t *testing.T) {
	lo := netip.MustParseAddr("127.0.0.1")
	r, err := RouteTo(lo, netip.Addr{})
	if err != nil {
		t.Skip(err) // a sandbox without netlink
	}
	if !r.Local || r.Netdev != "lo" || r.Source != lo || r.Gateway.IsValid() || r.MTU == 0 {
		t.Errorf("%+v", r)
	}
	if s := Neighbour("no-such-netdev", lo); s != "" {
		t.Errorf("neighbour of a netdev that is not there: %q", s)
	}
}
