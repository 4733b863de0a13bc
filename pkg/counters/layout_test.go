package counters

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// layout is a sysfs tree by path. A text that begins with "-> " is a link.
type layout map[string]string

func (l layout) add(more layout) layout { maps.Copy(l, more); return l }

func (l layout) fs(t testing.TB) *FS {
	t.Helper()
	root := t.TempDir()
	for path, text := range l {
		path = filepath.Join(root, path)
		if target, ok := strings.CutPrefix(text, "-> "); ok {
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(target, path); err != nil {
				t.Fatal(err)
			}
			continue
		}
		write(t, path, text+"\n")
	}
	return NewFS(root)
}

const function = "devices/pci0000:40/0000:40:01.0/0000:41:00.0"

// onFunction is an RDMA device below dir, which is a PCI function or a device of one.
func onFunction(name, driver, dir string) layout {
	return layout{
		"class/infiniband/" + name:                 "-> ../../" + dir + "/infiniband/" + name,
		dir + "/infiniband/" + name + "/node_type": "1: CA",
		dir + "/infiniband/" + name + "/device":    "-> ../../../" + filepath.Base(dir),
		function + "/driver":                       "-> ../../../../bus/pci/drivers/" + driver,
		function + "/vendor":                       "0x15b3",
		function + "/max_link_width":               "16",
		function + "/current_link_width":           "8",
	}
}

// withPort adds a port; the extra files are relative to it.
func withPort(dir, name string, port int, linkLayer string, extra layout) layout {
	p := fmt.Sprintf("%s/infiniband/%s/ports/%d/", dir, name, port)
	l := layout{p + "state": "4: ACTIVE", p + "phys_state": "5: LinkUp", p + "link_layer": linkLayer, p + "rate": "100 Gb/sec (4X EDR)"}
	for path, text := range extra {
		l[p+path] = text
	}
	return l
}

// withNetdev adds a netdev to a PCI function or a device of one.
func withNetdev(dir, name string, extra layout) layout {
	l := layout{
		"class/net/" + name:           "-> ../../" + dir + "/net/" + name,
		dir + "/net/" + name + "/mtu": "9000", dir + "/net/" + name + "/speed": "100000", dir + "/net/" + name + "/operstate": "up",
	}
	for path, text := range extra {
		l[dir+"/net/"+name+"/"+path] = text
	}
	return l
}

func withGID(row int, gid, kind, netdev string) layout {
	return layout{
		fmt.Sprintf("gids/%d", row):            gid,
		fmt.Sprintf("gid_attrs/types/%d", row): kind,
		fmt.Sprintf("gid_attrs/ndevs/%d", row): netdev,
	}
}

const (
	gidZero = "0000:0000:0000:0000:0000:0000:0000:0000"
	gidV4   = "0000:0000:0000:0000:0000:ffff:0a09:0001"
)

func netdevNames(d Device) []string {
	names := []string{}
	for _, n := range d.Netdevs {
		names = append(names, n.Name)
	}
	return names
}

func TestLayouts(t *testing.T) {
	sf := function + "/mlx5_core.sf.4"
	tests := []struct {
		name    string
		tree    layout
		device  string
		driver  string
		kind    Transport
		bdf     string
		netdevs []string
		ports   map[int]string // netdev by port
		warns   []string
	}{{
		name: "a sub-function's netdev is below the auxiliary device, its PCI function above",
		tree: onFunction("mlx5_2", "mlx5_core", sf).
			add(withPort(sf, "mlx5_2", 1, "Ethernet", nil)).
			add(withNetdev(sf, "enp65s0f0s88", nil)).add(withNetdev(function, "enp65s0f0np0", nil)),
		device: "mlx5_2", driver: "mlx5", kind: RoCE, bdf: "0000:41:00.0",
		netdevs: []string{"enp65s0f0s88"}, ports: map[int]string{1: "enp65s0f0s88"},
		warns: []string{WarnPCIeDegraded, WarnPCIeUnknown},
	}, {
		name: "two ports of one function are told apart by dev_port",
		tree: onFunction("renamed", "mlx4_core", function).
			add(withPort(function, "renamed", 1, "InfiniBand", nil)).add(withPort(function, "renamed", 2, "Ethernet", nil)).
			add(withNetdev(function, "a0", layout{"dev_port": "1"})).add(withNetdev(function, "b0", layout{"dev_port": "0"})),
		device: "renamed", driver: "mlx4", kind: IB, bdf: "0000:41:00.0",
		netdevs: []string{"a0", "b0"}, ports: map[int]string{1: "b0", 2: "a0"},
		warns: []string{WarnPCIeDegraded, WarnPCIeUnknown},
	}, {
		name: "a VLAN's row comes first, the port's own netdev wins",
		tree: onFunction("mlx5_0", "mlx5_core", function).
			add(withPort(function, "mlx5_0", 1, "Ethernet", withGID(0, gidV4, "RoCE v2", "eth0.7").add(withGID(1, gidV4, "RoCE v2", "eth0")))).
			add(withNetdev(function, "eth0", nil)).add(layout{"class/net/eth0.7": "-> ../../devices/virtual/net/eth0.7", "devices/virtual/net/eth0.7/mtu": "1500"}),
		device: "mlx5_0", driver: "mlx5", kind: RoCE, bdf: "0000:41:00.0",
		netdevs: []string{"eth0.7", "eth0"}, ports: map[int]string{1: "eth0"},
		warns: []string{WarnPCIeDegraded, WarnPCIeUnknown},
	}, {
		name: "netdevs of virtual functions in switchdev mode are not the device's",
		tree: onFunction("mlx5_0", "mlx5_core", function).add(withPort(function, "mlx5_0", 1, "Ethernet", nil)).
			add(withNetdev(function, "eth0", layout{"phys_port_name": "p0"})).
			add(withNetdev(function, "eth1", layout{"phys_port_name": "pf0vf0"})).add(withNetdev(function, "eth2", layout{"phys_port_name": "c1pf0sf88"})),
		device: "mlx5_0", driver: "mlx5", kind: RoCE, bdf: "0000:41:00.0",
		netdevs: []string{"eth0"}, ports: map[int]string{1: "eth0"},
		warns: []string{WarnPCIeDegraded, WarnPCIeUnknown},
	}, {
		name: "a netdev of another network namespace is not ours",
		tree: onFunction("mlx5_0", "mlx5_core", function).
			add(withPort(function, "mlx5_0", 1, "Ethernet", withGID(2, gidV4, "RoCE v2", "eth9"))),
		device: "mlx5_0", driver: "mlx5", kind: RoCE, bdf: "0000:41:00.0",
		netdevs: []string{}, ports: map[int]string{1: ""},
		warns: []string{WarnNoNetdev, WarnPCIeDegraded, WarnPCIeUnknown},
	}, {
		name: "a bridge above the netdev is no bond",
		tree: onFunction("mlx5_0", "mlx5_core", function).
			add(withPort(function, "mlx5_0", 1, "Ethernet", withGID(0, gidV4, "RoCE v2", "eth0"))).
			add(withNetdev(function, "eth0", layout{"master": "-> ../../../../../virtual/net/br0"})).
			add(layout{"devices/virtual/net/br0/mtu": "1500", "class/net/br0": "-> ../../devices/virtual/net/br0"}),
		device: "mlx5_0", driver: "mlx5", kind: RoCE, bdf: "0000:41:00.0",
		netdevs: []string{"eth0"}, ports: map[int]string{1: "eth0"},
		warns: []string{WarnPCIeDegraded, WarnPCIeUnknown},
	}, {
		name:   "an unknown driver is called by its bus driver's name",
		tree:   onFunction("ionic_0", "ionic", function).add(withPort(function, "ionic_0", 1, "Ethernet", nil)),
		device: "ionic_0", driver: "ionic", kind: RoCE, bdf: "0000:41:00.0",
		netdevs: []string{}, ports: map[int]string{1: ""},
		warns: []string{WarnNoNetdev, WarnPCIeDegraded, WarnPCIeUnknown},
	}, {
		name: "usNIC",
		tree: onFunction("usnic_0", "enic", function).add(withPort(function, "usnic_0", 1, "Ethernet", nil)).
			add(layout{function + "/infiniband/usnic_0/node_type": "6: usNIC UDP"}),
		device: "usnic_0", driver: "usnic", kind: USNIC, bdf: "0000:41:00.0",
		netdevs: []string{}, ports: map[int]string{1: ""},
		warns: []string{WarnNoNetdev, WarnPCIeDegraded, WarnPCIeUnknown},
	}}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inv := mustInventory(t, tt.tree.fs(t))
			if len(inv.Devices) != 1 {
				t.Fatalf("devices: %s", asNames(inv))
			}
			d := inv.Devices[0]
			if d.Name != tt.device || d.Driver != tt.driver || d.Transport != tt.kind || d.PCI == nil || d.PCI.BDF != tt.bdf {
				t.Errorf("got %s %s %s %+v", d.Name, d.Driver, d.Transport, d.PCI)
			}
			if diff := cmp.Diff(tt.netdevs, netdevNames(d)); diff != "" {
				t.Errorf("netdevs: %s", diff)
			}
			ports := make(map[int]string)
			for _, p := range d.Ports {
				ports[p.Port] = deref(p.Netdev)
			}
			if diff := cmp.Diff(tt.ports, ports); diff != "" {
				t.Errorf("netdevs by port: %s", diff)
			}
			if diff := cmp.Diff(tt.warns, d.Warnings); diff != "" {
				t.Errorf("warnings: %s", diff)
			}
		})
	}
}

// Four planes of a ConnectX-8: twelve ports, data on every third, none on port 1.
func TestAllPortsAreRead(t *testing.T) {
	tree := onFunction("mlx5_0", "mlx5_core", function)
	for port := 1; port <= 12; port++ {
		tree.add(withPort(function, "mlx5_0", port, "Ethernet", layout{"counters/port_xmit_data": fmt.Sprint(port)}))
		if port%3 != 0 {
			tree.add(withPort(function, "mlx5_0", port, "Ethernet", layout{"state": "1: DOWN"}))
		}
	}
	tree[function+"/infiniband/mlx5_0/ports/README"] = "no port"
	var active, all []int
	for _, p := range mustInventory(t, tree.fs(t)).Devices[0].Ports {
		all = append(all, p.Port)
		if p.Active() {
			active = append(active, p.Port)
			if got := *p.Normalised[TxBytes]; got != uint64(4*p.Port) {
				t.Errorf("port %d sent %d bytes", p.Port, got)
			}
		}
	}
	if !slices.IsSorted(all) || len(all) != 12 || !slices.Equal(active, []int{3, 6, 9, 12}) {
		t.Errorf("ports %v, active %v", all, active)
	}
}

// The good row stands behind hundreds of empty ones, whose type reads EINVAL by design.
func TestGIDTableIsScannedToItsEnd(t *testing.T) {
	rows := layout{}
	for i := range 1024 {
		rows[fmt.Sprintf("gids/%d", i)] = gidZero
	}
	rows.add(withGID(700, gidV4, "RoCE v2", "eth0"))
	rows["gids/701"] = "not a gid"
	fs := onFunction("mlx5_0", "mlx5_core", function).add(withPort(function, "mlx5_0", 1, "Ethernet", rows)).
		add(withNetdev(function, "eth0", nil)).fs(t)
	reads := 0
	fs.trace = func(p string) {
		if strings.Contains(p, "/gid") {
			reads++
		}
	}
	p := find(t, mustInventory(t, fs), "mlx5_0", 1)
	want := []GID{{Index: 700, GID: gidV4, Type: new("RoCE v2"), Netdev: new("eth0"), IPv4: new("10.9.0.1")}}
	if diff := cmp.Diff(want, p.GIDs); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(want, p.RoCEv2GIDs); diff != "" {
		t.Error(diff)
	}
	if reads > 1+1025+2 {
		t.Errorf("%d reads", reads)
	}
	reads = 0
	if p := find(t, collect(t, fs, Filter{}), "mlx5_0", 1); reads != 0 || len(p.GIDs) != 1 {
		t.Errorf("a scrape read %d rows of the table and shows %d", reads, len(p.GIDs))
	}
}

func TestPortJudgement(t *testing.T) {
	tests := []struct {
		name      string
		linkLayer string
		port      layout
		speed     string
		gbps      float64
		trust     bool
		warns     []string
	}{
		{"fraction", "InfiniBand", layout{"rate": "2.5 Gb/sec (1X SDR)", "sm_lid": "0x1"}, "", 2.5, true, nil},
		{"generation to come", "InfiniBand", layout{"rate": "1600 Gb/sec (8X ZDR)"}, "", 1600, true, nil},
		{"old kernel", "InfiniBand", layout{"rate": "10 Gb/sec (4X)"}, "", 10, true, nil},
		{"zero", "InfiniBand", layout{"rate": "0 GB/sec"}, "", 0, false, []string{WarnRateUnknown}},
		{"zero with lanes", "InfiniBand", layout{"rate": "0 Gb/sec (4X SDR)"}, "", 0, false, []string{WarnRateUnknown}},
		{"garbage", "InfiniBand", layout{"rate": "fast"}, "", -1, false, []string{WarnRateUnknown}},
		{"capped", "Ethernet", nil, "400000", 100, false, []string{WarnRateBelow}},
		{"50G printed as 100", "Ethernet", nil, "50000", 100, false, []string{WarnRateAbove}},
		{"true", "Ethernet", nil, "100000", 100, true, nil},
		{"default of a driver that found no speed", "Ethernet", layout{"rate": "2.5 Gb/sec (1X SDR)"}, "-1", 2.5, false, []string{WarnRateDefault}},
		{"no subnet manager", "InfiniBand", layout{"sm_lid": "0x0"}, "", 100, true, []string{WarnNoSM}},
		{"no subnet manager on Ethernet", "Ethernet", layout{"sm_lid": "0x0"}, "100000", 100, true, nil},
		{"INIT", "InfiniBand", layout{"state": "2: INIT", "sm_lid": "0x0"}, "", 100, true, []string{WarnNoSM, WarnPortNotActive}},
		{"ARMED", "InfiniBand", layout{"state": "3: ARMED"}, "", 100, true, []string{WarnPortNotActive}},
		{"DOWN", "InfiniBand", layout{"state": "1: DOWN", "sm_lid": "0x0"}, "", 100, false, []string{WarnPortDown}},
		{"state of a kernel to come", "InfiniBand", layout{"state": "9: UNKNOWN"}, "", 100, true, []string{WarnPortNotActive}},
		{"no state", "InfiniBand", layout{"state": "ACTIVE"}, "", 100, false, []string{WarnStateUnknown}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tree := onFunction("mlx5_0", "mlx5_core", function).add(withPort(function, "mlx5_0", 1, tt.linkLayer, tt.port))
			if tt.speed != "" {
				tree.add(withNetdev(function, "eth0", layout{"speed": tt.speed}))
			}
			p := find(t, mustInventory(t, tree.fs(t)), "mlx5_0", 1)
			gbps := -1.0
			if p.RateGbps != nil {
				gbps = *p.RateGbps
			}
			if gbps != tt.gbps || p.RateTrustworthy != tt.trust {
				t.Errorf("rate %v, trustworthy %v", gbps, p.RateTrustworthy)
			}
			want := append([]string{WarnNoPMA, WarnNoHW}, tt.warns...)
			slices.Sort(want)
			if diff := cmp.Diff(want, p.Warnings); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestVFTakesTheLinkOfItsPF(t *testing.T) {
	const vf = "devices/pci0000:40/0000:40:01.0/0000:41:00.2"
	tree := onFunction("mlx5_1", "mlx5_core", function).add(layout{
		"class/infiniband/mlx5_1":                        "-> ../../" + vf + "/infiniband/mlx5_1",
		vf + "/infiniband/mlx5_1/node_type":              "1: CA",
		vf + "/infiniband/mlx5_1/device":                 "-> ../../../0000:41:00.2",
		vf + "/physfn":                                   "-> ../0000:41:00.0",
		vf + "/current_link_width":                       "0",
		vf + "/max_link_width":                           "255",
		"devices/pci0000:40/0000:40:01.0/max_link_speed": "16.0 GT/s PCIe",
	})
	pci := mustInventory(t, tree.fs(t)).Devices[0].PCI
	if !pci.IsVF || deref(pci.PFBDF) != "0000:41:00.0" || pci.CurWidth != nil || pci.MaxWidth != nil {
		t.Errorf("the VF's own: %s", asJSON(t, pci))
	}
	if pci.PF == nil || *pci.PF.CurWidth != 8 || !slices.Contains(pci.Warnings, WarnPCIeDegraded) {
		t.Errorf("the PF's: %s", asJSON(t, pci))
	}
	if pci.Upstream == nil || pci.Upstream.BDF != "0000:40:01.0" || *pci.Upstream.MaxGTS != 16 {
		t.Errorf("the bridge's: %s", asJSON(t, pci))
	}
}

// A link must not lead out of a copied tree, however it is written.
func TestLinksStayInTheTree(t *testing.T) {
	outside := t.TempDir()
	write(t, filepath.Join(outside, "node_type"), "4: RNIC\n")
	tree := layout{
		"class/infiniband/up":                         "-> ../../../../../../../../../../.." + outside,
		"class/infiniband/absolute":                   "-> " + outside,
		"class/infiniband/loop":                       "-> loop",
		"class/infiniband/file":                       "no device",
		"class/infiniband/kernel":                     "-> /sys/devices/virtual/infiniband/kernel",
		"devices/virtual/infiniband/kernel/node_type": "4: RNIC",
	}
	if inv := mustInventory(t, tree.fs(t)); len(inv.Devices) != 1 || inv.Devices[0].Name != "kernel" {
		t.Errorf("devices: %s, want only the one whose link is the kernel's", asNames(inv))
	}
}
