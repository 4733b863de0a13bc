//go:build rdma

// Tests against the running kernel. They need an RDMA device at rest, such as rxe in a VM:
//
//	go test -c -tags rdma ./pkg/counters && ./counters.test -test.run Integration

package counters

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestIntegrationNetlinkAgreesWithSysfs(t *testing.T) {
	fs := NewFS("")
	inv := mustInventory(t, fs)
	if len(inv.Devices) == 0 {
		t.Skip("no RDMA device")
	}
	for _, d := range inv.Devices {
		for _, p := range d.Ports {
			r := fs.Port(d.Name, p.Port)
			byNetlink := snapshot(t, r)
			netdev, err := run(t.Context(), fs, d.Name, func(l *lane) (*string, error) { return l.netlinkNetdev(d.netlink, p.Port), nil })
			if err != nil {
				t.Fatal(err)
			}
			if deref(netdev) != deref(p.Netdev) {
				t.Errorf("%s port %d: netdev %q by netlink, %q by sysfs", d.Name, p.Port, deref(netdev), deref(p.Netdev))
			}
			without := *fs.cached(d.Name, d.id)
			without.netlink = nil
			fs.remember(d.Name, &without)
			bySysfs := snapshot(t, r)
			t.Logf("%s port %d: %s %d, %s %d", d.Name, p.Port, byNetlink.Source, len(byNetlink.samples), bySysfs.Source, len(bySysfs.samples))
			if byNetlink.Source != Netlink || bySysfs.Source != Sysfs {
				t.Errorf("sources %q and %q", byNetlink.Source, bySysfs.Source)
			}
			m := meaningOf(d.Driver)
			hw := func(s *Snapshot) map[string]uint64 {
				v := make(map[string]uint64)
				for key, c := range s.byKey(m) {
					if c.group == HW {
						v[key] = c.value
					}
				}
				return v
			}
			if diff := cmp.Diff(hw(byNetlink), hw(bySysfs)); diff != "" {
				t.Errorf("%s port %d: -netlink +sysfs:\n%s", d.Name, p.Port, diff)
			}
		}
		for _, n := range d.Netdevs {
			t.Logf("ethtool %s: %v", n.Name, slices.Sorted(maps.Keys(inv.Ethtool[n.Name])))
		}
	}
}

func BenchmarkIntegrationSnapshot(b *testing.B) {
	fs := NewFS("")
	inv := mustInventory(b, fs)
	if len(inv.Devices) == 0 {
		b.Skip("no RDMA device")
	}
	r := fs.Port(inv.Devices[0].Name, inv.Devices[0].Ports[0].Port)
	for b.Loop() {
		snapshot(b, r)
	}
}
