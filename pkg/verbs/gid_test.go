package verbs

import (
	"errors"
	"net/netip"
	"testing"
)

func gid(index int, addr string, t GIDType, ifIndex int) GID {
	return GID{Index: index, Addr: netip.MustParseAddr(addr), Type: t, IfIndex: ifIndex}
}

func TestUsableGIDs(t *testing.T) {
	// Interface 3 is ours and has these; interface 9 is another namespace's.
	assigned := func(ifIndex int, a netip.Addr) bool {
		return ifIndex == 3 && (a == netip.MustParseAddr("10.9.0.1") || a == netip.MustParseAddr("fd93::1") || a == netip.MustParseAddr("fe80::1") ||
			a == netip.MustParseAddr("172.16.4.1") || a == netip.MustParseAddr("100.64.0.1"))
	}
	for _, c := range []struct {
		name  string
		table []GID
		pin   int
		want  []int
		err   error
	}{
		{name: "slot 0 is link-local, the usable one behind it", table: []GID{gid(0, "fe80::1", GIDRoCEv2, 3), gid(1, "10.9.0.1", GIDRoCEv2, 3)}, pin: -1, want: []int{1}},
		{name: "v1 twins are passed over", table: []GID{gid(2, "10.9.0.1", GIDRoCEv1, 3), gid(3, "10.9.0.1", GIDRoCEv2, 3)}, pin: -1, want: []int{3}},
		{name: "private ranges are as good as any", table: []GID{gid(4, "100.64.0.1", GIDRoCEv2, 3), gid(5, "172.16.4.1", GIDRoCEv2, 3)}, pin: -1, want: []int{4, 5}},
		{name: "IPv6 only", table: []GID{gid(0, "fe80::1", GIDRoCEv2, 3), gid(7, "fd93::1", GIDRoCEv2, 3)}, pin: -1, want: []int{7}},
		{name: "only link-local", table: []GID{gid(0, "fe80::1", GIDRoCEv2, 3)}, pin: -1, want: []int{0}},
		{name: "the address was removed", table: []GID{gid(0, "fe80::2", GIDRoCEv2, 3)}, pin: -1, err: ErrGIDNotAssigned},
		{name: "another namespace's", table: []GID{gid(2, "10.9.0.1", GIDRoCEv2, 9)}, pin: -1, err: ErrGIDNotAssigned},
		{name: "only v1", table: []GID{gid(0, "10.9.0.1", GIDRoCEv1, 3)}, pin: -1, err: ErrNoGID},
		{name: "empty table", pin: -1, err: ErrNoGID},
		{name: "far down a long table", table: []GID{gid(700, "10.9.0.1", GIDRoCEv2, 3)}, pin: -1, want: []int{700}},
		{name: "pinned, v1 as asked for", table: []GID{gid(0, "10.9.0.1", GIDRoCEv1, 3), gid(1, "10.9.0.1", GIDRoCEv2, 3)}, pin: 0, want: []int{0}},
		{name: "pinned to an empty slot", table: []GID{gid(1, "10.9.0.1", GIDRoCEv2, 3)}, pin: 5, err: ErrNoGID},
		{name: "pinned to a removed address", table: []GID{gid(0, "fe80::2", GIDRoCEv2, 3), gid(1, "10.9.0.1", GIDRoCEv2, 3)}, pin: 0, err: ErrGIDNotAssigned},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := UsableGIDs(c.table, assigned, c.pin)
			if !errors.Is(err, c.err) {
				t.Fatalf("error %v, want %v", err, c.err)
			}
			if len(got) != len(c.want) {
				t.Fatalf("got %v, want indexes %v", got, c.want)
			}
			for i, g := range got {
				if g.Index != c.want[i] {
					t.Errorf("got %v, want indexes %v", got, c.want)
				}
			}
		})
	}
}

func TestMatchGIDs(t *testing.T) {
	for _, c := range []struct {
		name         string
		mine, theirs []GID
		m, t         int // indexes; -1: no pair
	}{
		{"same family", []GID{gid(1, "10.9.0.1", GIDRoCEv2, 0)}, []GID{gid(3, "10.9.0.2", GIDRoCEv2, 0)}, 1, 3},
		{"the subnet that both are in", []GID{gid(1, "192.168.7.1", GIDRoCEv2, 0), gid(2, "10.9.0.1", GIDRoCEv2, 0)}, []GID{gid(4, "10.9.0.2", GIDRoCEv2, 0)}, 2, 4},
		{"IPv4 before IPv6", []GID{gid(1, "fd00::1", GIDRoCEv2, 0), gid(2, "10.9.0.1", GIDRoCEv2, 0)}, []GID{gid(4, "fd00::2", GIDRoCEv2, 0), gid(5, "10.8.0.2", GIDRoCEv2, 0)}, 2, 5},
		{"IPv6 where that is what they share", []GID{gid(1, "fd00::1", GIDRoCEv2, 0), gid(2, "10.9.0.1", GIDRoCEv2, 0)}, []GID{gid(4, "fd00::2", GIDRoCEv2, 0)}, 1, 4},
		{"link-local only with link-local", []GID{gid(0, "fe80::1", GIDRoCEv2, 0)}, []GID{gid(4, "fd00::2", GIDRoCEv2, 0)}, -1, -1},
		{"no family in common", []GID{gid(0, "fd00::1", GIDRoCEv2, 0)}, []GID{gid(1, "10.9.0.2", GIDRoCEv2, 0)}, -1, -1},
		{"v1 against v2", []GID{gid(0, "10.9.0.1", GIDRoCEv1, 0)}, []GID{gid(1, "10.9.0.2", GIDRoCEv2, 0)}, -1, -1},
		{"one that does not tell its type", []GID{gid(0, "10.9.0.1", GIDUnknown, 0)}, []GID{gid(1, "10.9.0.2", GIDRoCEv2, 0)}, 0, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, th, ok := MatchGIDs(c.mine, c.theirs)
			if ok != (c.m >= 0) || ok && (m.Index != c.m || th.Index != c.t) {
				t.Errorf("got %v, %v, %v; want %d, %d", m, th, ok, c.m, c.t)
			}
		})
	}
}
