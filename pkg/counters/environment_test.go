package counters

import (
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters/sysfstest"
)

func environment(t testing.TB, fs *FS, device string, port int) *Environment {
	t.Helper()
	e, err := fs.Environment(t.Context(), device, port)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// verdicts lists the checks that are not ok, by name.
func verdicts(e *Environment) map[CheckName]CheckVerdict {
	v := map[CheckName]CheckVerdict{}
	for _, c := range e.Checks() {
		v[c.Name] = c.Verdict
	}
	return v
}

// files lays a tree below a root.
func files(t testing.TB, root string, list map[string]string) {
	t.Helper()
	for name, text := range list {
		write(t, filepath.Join(root, name), text)
	}
}

const pciDir = "devices/pci0000:40/0000:40:01.1/0000:41:00.0"

// express makes a configuration space with a PCI Express capability at 0x60.
func express(size int, kind, caps, control uint16) []byte {
	b := make([]byte, size)
	le := binary.LittleEndian
	le.PutUint16(b[0x06:], 0x10)
	b[0x34] = 0x40
	if size > 0x40 {
		b[0x40], b[0x41] = 0x01, 0x60 // power management first
		b[0x60], b[0x61] = 0x10, 0
		le.PutUint16(b[0x62:], kind<<4|2)
		le.PutUint32(b[0x64:], uint32(caps))
		le.PutUint16(b[0x68:], control)
	}
	return b
}

// withACS adds an extended capability for access control behind another one.
func withACS(b []byte, control uint16) []byte {
	le := binary.LittleEndian
	le.PutUint32(b[0x100:], 0x140<<20|1<<16|0x0001) // AER
	le.PutUint32(b[0x140:], 1<<16|0x000d)
	le.PutUint16(b[0x146:], control)
	return b
}

// goodHost is a tree in which nothing is wrong, with its procfs.
func goodHost(t testing.TB) *FS {
	t.Helper()
	root := sysfstest.Tree(t, "pcie-degraded")
	files(t, root, map[string]string{
		pciDir + "/current_link_speed":                                  "16.0 GT/s PCIe\n",
		pciDir + "/current_link_width":                                  "16\n",
		pciDir + "/aer_dev_correctable":                                 "RxErr 0\nTOTAL_ERR_COR 0\n",
		pciDir + "/aer_dev_nonfatal":                                    "Undefined 0\nTOTAL_ERR_NONFATAL 0\n",
		pciDir + "/aer_dev_fatal":                                       "Undefined 0\nTOTAL_ERR_FATAL 0\n",
		pciDir + "/link/l1_aspm":                                        "0\n",
		pciDir + "/iommu_group/type":                                    "identity\n",
		pciDir + "/config":                                              string(express(4096, 0, 2, 5<<12|1<<5|1<<4)),
		"devices/pci0000:40/0000:40:01.1/current_link_speed":            "16.0 GT/s PCIe\n",
		"devices/pci0000:40/0000:40:01.1/max_link_speed":                "16.0 GT/s PCIe\n",
		"devices/pci0000:40/0000:40:01.1/current_link_width":            "16\n",
		"devices/pci0000:40/0000:40:01.1/max_link_width":                "16\n",
		"devices/pci0000:40/0000:40:01.1/config":                        string(withACS(express(4096, 6, 2, 0), 0)),
		"devices/system/node/node0/distance":                            "10 21\n",
		"devices/system/node/node1/distance":                            "21 10\n",
		"devices/system/cpu/cpu32/cpufreq/scaling_governor":             "performance\n",
		"devices/system/cpu/cpu32/cpufreq/scaling_max_freq":             "3500000\n",
		"devices/system/cpu/cpu32/cpufreq/cpuinfo_max_freq":             "3500000\n",
		"devices/system/cpu/cpu32/cpufreq/scaling_cur_freq":             "3400000\n",
		"devices/system/cpu/cpu32/thermal_throttle/core_throttle_count": "0\n",
		"devices/system/cpu/cpu32/cpuidle/state0/name":                  "POLL\n",
		"devices/system/cpu/cpu32/cpuidle/state0/latency":               "0\n",
		"devices/system/cpu/cpu32/cpuidle/state0/disable":               "0\n",
		"devices/system/cpu/cpu32/cpuidle/state1/name":                  "C1\n",
		"devices/system/cpu/cpu32/cpuidle/state1/latency":               "2\n",
		"devices/system/cpu/cpu32/cpuidle/state1/disable":               "0\n",
		"devices/system/cpu/cpu32/cpuidle/state2/name":                  "C6\n",
		"devices/system/cpu/cpu32/cpuidle/state2/latency":               "133\n",
		"devices/system/cpu/cpu32/cpuidle/state2/disable":               "1\n",
		"devices/system/cpu/cpu0/cpufreq/scaling_governor":              "powersave\n", // far from the device
		"kernel/mm/hugepages/hugepages-2048kB/nr_hugepages":             "512\n",
		"kernel/mm/hugepages/hugepages-2048kB/free_hugepages":           "500\n",
		"kernel/mm/transparent_hugepage/enabled":                        "always [madvise] never\n",
		"module/mlx5_core/version":                                      "24.10-0.7.0\n",
		"class/net/enp65s0np0/qos/trust":                                "dscp\n",
		"class/net/enp65s0np0/ecn/roce_np/enable/3":                     "1\n",
		"class/net/enp65s0np0/ecn/roce_rp/enable/3":                     "1\n",
	})
	proc := t.TempDir()
	files(t, proc, map[string]string{
		"sys/kernel/osrelease": "6.1.0-57-amd64\n",
		"uptime":               "36000.00 71000.00\n",
		"self/status":          "Name:\trdmabenchd\nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-63\n",
		"self/limits":          "Limit                     Soft Limit           Hard Limit           Units     \nMax locked memory         unlimited            unlimited            bytes     \n",
		"self/maps":            "7f0000000000-7f0000001000 r-xp 00000000 08:01 1234 /usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0\n",
	})
	fs := NewFS(root)
	fs.Proc = proc
	return fs
}

func TestGoodEnvironment(t *testing.T) {
	fs := goodHost(t)
	e := environment(t, fs, "mlx5_0", 1)
	for name, v := range verdicts(e) {
		want := CheckOK
		if name == CheckLinkRate || name == CheckFlowControl { // these need ethtool and netlink
			want = CheckUnknown
		}
		if v != want {
			t.Errorf("check %s: %s, want %s: %+v", name, v, want, e.Checks())
		}
	}
	if len(e.Missing) > 0 {
		t.Errorf("unreadable: %s", asJSON(t, e.Missing))
	}
	want := map[string]string{
		"firmware": "22.99.2048", "driver": "mlx5", "driver version": "24.10-0.7.0", "kernel": "6.1.0-57-amd64", "rdma-core": "44.0",
		"PCIe width": "16", "PCIe speed": "16", "PCIe payload": "256", "PCIe read request": "4096", "PCIe relaxed ordering": "on",
		"NUMA node": "1", "CPU ceiling": "3500000", "CPU governor": "performance", "deepest idle state": "C1", "IOMMU": "identity",
		"rate": "100", "lanes": "4", "netdev MTU": "9000", "RDMA MTU": "4096", "trust": "dscp", "ECN priorities": "3",
	}
	if diff := cmp.Diff(want, e.Fingerprint().Facts); diff != "" {
		t.Errorf("facts (-want +got):\n%s", diff)
	}
	if *e.NUMA.Distance != 10 || *e.Memory.Memlock != math.MaxUint64 || *e.CPU.CurKHz != 3400000 {
		t.Errorf("environment: %s", asJSON(t, e))
	}
}

func TestDegradedEnvironment(t *testing.T) {
	tests := map[string]struct {
		check CheckName
		files map[string]string
		proc  map[string]string
	}{
		"lanes lost":           {CheckPCIeWidth, map[string]string{pciDir + "/current_link_width": "8\n"}, nil},
		"slow lanes":           {CheckPCIeSpeed, map[string]string{pciDir + "/current_link_speed": "8 GT/s\n"}, nil},
		"slow bridge above":    {CheckPCIePath, map[string]string{"devices/pci0000:40/0000:40:01.1/current_link_width": "4\n"}, nil},
		"PCIe below the link":  {CheckPCIeRate, map[string]string{pciDir + "/current_link_width": "4\n"}, nil},
		"fatal PCIe error":     {CheckPCIeErrors, map[string]string{pciDir + "/aer_dev_fatal": "DLP 11\nTOTAL_ERR_FATAL 11\n"}, nil},
		"small payload":        {CheckPCIePayload, map[string]string{pciDir + "/config": string(express(4096, 0, 2, 5<<12|1<<4))}, nil},
		"small reads":          {CheckPCIeRead, map[string]string{pciDir + "/config": string(express(4096, 0, 2, 1<<12|1<<5|1<<4))}, nil},
		"strict ordering":      {CheckPCIeOrdering, map[string]string{pciDir + "/config": string(express(4096, 0, 2, 5<<12|1<<5))}, nil},
		"sleeping link":        {CheckPCIePower, map[string]string{pciDir + "/link/l1_aspm": "1\n"}, nil},
		"translation":          {CheckIOMMU, map[string]string{pciDir + "/iommu_group/type": "DMA-FQ\n"}, nil},
		"redirection":          {CheckACS, map[string]string{"devices/pci0000:40/0000:40:01.1/config": string(withACS(express(4096, 6, 2, 0), 4))}, nil},
		"far CPUs":             {CheckNUMA, nil, map[string]string{"self/status": "CapEff:\t0\nCpus_allowed_list:\t0-7\n"}},
		"governor":             {CheckGovernor, map[string]string{"devices/system/cpu/cpu32/cpufreq/scaling_governor": "powersave\n"}, nil},
		"capped frequency":     {CheckFrequency, map[string]string{"devices/system/cpu/cpu32/cpufreq/scaling_max_freq": "2000000\n"}, nil},
		"deep sleep":           {CheckIdle, map[string]string{"devices/system/cpu/cpu32/cpuidle/state2/disable": "0\n"}, nil},
		"throttled":            {CheckThrottle, map[string]string{"devices/system/cpu/cpu32/thermal_throttle/core_throttle_count": "11\n"}, nil},
		"memlock":              {CheckMemlock, nil, map[string]string{"self/limits": "Max locked memory         8388608 8388608 bytes\n"}},
		"no huge pages":        {CheckHugePages, map[string]string{"kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "0\n", "kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"}, nil},
		"no RoCE v2":           {CheckRoCE, map[string]string{"class/infiniband/mlx5_0/ports/1/gid_attrs/types/1": "IB/RoCE v1\n", "class/infiniband/mlx5_0/ports/1/gid_attrs/types/3": "IB/RoCE v1\n"}, nil},
		"small MTU":            {CheckMTU, map[string]string{"class/net/enp65s0np0/mtu": "1500\n"}, nil},
		"no congestion signal": {CheckECN, map[string]string{"class/net/enp65s0np0/ecn/roce_rp/enable/3": "0\n"}, nil},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			fs := goodHost(t) // where the check is ok, as TestGoodEnvironment shows
			files(t, fs.root, test.files)
			files(t, fs.Proc, test.proc)
			checks := environment(t, fs, "mlx5_0", 1).Checks()
			i := slices.IndexFunc(checks, func(c Check) bool { return c.Name == test.check })
			if i < 0 || checks[i].Verdict != CheckWarn || checks[i].Advice == "" {
				t.Errorf("check %s is no warning with advice: %+v", test.check, checks)
			}
		})
	}
}

// What is absent, what can't be read and what is 0 are three things.
func TestEnvironmentAbsentUnreadableZero(t *testing.T) {
	fs := goodHost(t)
	remove(t, filepath.Join(fs.root, pciDir, "aer_dev_correctable"))
	write(t, filepath.Join(fs.root, pciDir, "aer_dev_nonfatal"), "") // a read that failed
	write(t, filepath.Join(fs.root, pciDir, "config"), string(express(64, 0, 0, 0)))
	write(t, filepath.Join(fs.root, pciDir, "current_link_width"), "255\n")
	e := environment(t, fs, "mlx5_0", 1)
	if e.PCI.Correctable != nil || e.PCI.NonFatal != nil || e.PCI.Fatal == nil || *e.PCI.Fatal != 0 {
		t.Errorf("AER: %s", asJSON(t, e.PCI))
	}
	want := map[string]string{
		"pci.aer_nonfatal": "EINVAL", "pci.cur_width": "255",
		"pci.max_payload": "EACCES", "pci.max_read_request": "EACCES", "pci.relaxed_ordering": "EACCES",
	}
	got := map[string]string{}
	for _, u := range e.Missing {
		got[u.Name] = deref(u.Errno) + deref(u.Text)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("unreadable (-want +got):\n%s", diff)
	}
	if v := verdicts(e); v[CheckPCIeWidth] != CheckUnknown || v[CheckPCIePayload] != CheckUnknown {
		t.Errorf("verdicts: %v", v)
	}
}

func TestFingerprint(t *testing.T) {
	fs := goodHost(t)
	before := environment(t, fs, "mlx5_0", 1)
	a := before.Fingerprint()
	if len(a.ID) != 16 {
		t.Errorf("id %q is not 16 digits long", a.ID)
	}
	// What changes by itself is no part of it.
	files(t, fs.root, map[string]string{
		pciDir + "/aer_dev_correctable":                                 "TOTAL_ERR_COR 7\n",
		"devices/system/cpu/cpu32/cpufreq/scaling_cur_freq":             "1000000\n",
		"devices/system/cpu/cpu32/thermal_throttle/core_throttle_count": "9\n",
		"kernel/mm/hugepages/hugepages-2048kB/free_hugepages":           "0\n",
	})
	if b := environment(t, fs, "mlx5_0", 1).Fingerprint(); b.ID != a.ID {
		t.Errorf("changed without a reason: %v", a.Changes(b))
	}
	files(t, fs.root, map[string]string{
		"class/infiniband/mlx5_0/fw_ver": "22.100.1\n",
		"class/net/enp65s0np0/mtu":       "1500\n",
	})
	write(t, filepath.Join(fs.root, pciDir, "config"), string(express(64, 0, 0, 0))) // of an ordinary user
	remove(t, filepath.Join(fs.root, "module/mlx5_core/version"))
	e := environment(t, fs, "mlx5_0", 1)
	e.Keep(before) // what can't be read any more is not a change, what is gone is one
	b := e.Fingerprint()
	want := []string{"RDMA MTU changed 4096 → 1024", "driver version was 24.10-0.7.0, is not known",
		"firmware changed 22.99.2048 → 22.100.1", "netdev MTU changed 9000 → 1500"}
	if diff := cmp.Diff(want, a.Changes(b)); diff != "" || a.ID == b.ID {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
	if c := a.Changes(a); len(c) > 0 {
		t.Errorf("changes of nothing: %v", c)
	}
	// A link that is down for a moment leaves the fingerprint as it is.
	write(t, filepath.Join(portDir(t, fs.root, "mlx5_0", 1), "state"), "1: DOWN\n")
	down := environment(t, fs, "mlx5_0", 1)
	down.Keep(e)
	if id := down.Fingerprint().ID; id != b.ID {
		t.Errorf("changes of a link that is down: %v", b.Changes(down.Fingerprint()))
	}
}

// Of every tree, whatever its driver, the environment is read without a complaint about what the driver doesn't have.
func TestEnvironmentsOfAllTrees(t *testing.T) {
	for _, name := range sysfstest.Names() {
		t.Run(name, func(t *testing.T) {
			fs := open(t, name)
			envs, err := fs.Environments(t.Context(), Filter{})
			if err != nil {
				t.Fatal(err)
			}
			i := 0
			for _, d := range mustInventory(t, fs).Devices {
				i += len(d.Ports)
				for _, p := range d.Ports {
					e := environment(t, fs, d.Name, p.Port)
					if !e.Visible || e.Driver != d.Driver || deref(e.Versions.Firmware) != deref(d.FwVer) || deref(e.Link.State) != deref(p.State) {
						t.Errorf("%s port %d: %s", d.Name, p.Port, asJSON(t, e))
					}
					if d.PCI == nil != (e.PCI == nil) {
						t.Errorf("%s: PCI %v, want %v", d.Name, e.PCI, d.PCI)
					}
				}
			}
			if len(envs) != i || i == 0 {
				t.Errorf("%d environments of %d ports", len(envs), i)
			}
		})
	}
}

// Cores that differ by nature are no fault, and a platform that doesn't tell a node is no reason to call all of them near.
func TestEnvironmentOfUnevenMachine(t *testing.T) {
	fs := goodHost(t)
	files(t, fs.root, map[string]string{
		"devices/system/cpu/cpu33/cpufreq/scaling_governor": "performance\n",
		"devices/system/cpu/cpu33/cpufreq/scaling_max_freq": "2400000\n",
		"devices/system/cpu/cpu33/cpufreq/cpuinfo_max_freq": "2400000\n",
	})
	if v := verdicts(environment(t, fs, "mlx5_0", 1)); v[CheckFrequency] != CheckOK {
		t.Errorf("frequency of a slower core: %s", v[CheckFrequency])
	}
	files(t, fs.root, map[string]string{
		"devices/system/cpu/cpu33/cpufreq/scaling_max_freq": "2000000\n",
		pciDir + "/numa_node":                               "-1\n",
		pciDir + "/local_cpulist":                           "0-63\n",
	})
	e := environment(t, fs, "mlx5_0", 1)
	if v := verdicts(e); v[CheckFrequency] != CheckWarn || *e.CPU.MaxKHz != 2000000 || v[CheckNUMA] != CheckUnknown {
		t.Errorf("%v %s", v, asJSON(t, e.CPU))
	}
}

// A netdev that was renamed is found under its new name.
func TestEnvironmentAfterRename(t *testing.T) {
	fs := goodHost(t)
	before := environment(t, fs, "mlx5_0", 1)
	dir := filepath.Join(fs.root, pciDir, "net")
	if err := os.Rename(filepath.Join(dir, "enp65s0np0"), filepath.Join(dir, "rail0")); err != nil {
		t.Fatal(err)
	}
	remove(t, filepath.Join(fs.root, "class/net/enp65s0np0"))
	if err := os.Symlink("../../"+pciDir+"/net/rail0", filepath.Join(fs.root, "class/net/rail0")); err != nil {
		t.Fatal(err)
	}
	for _, row := range []string{"0", "1", "2", "3"} {
		write(t, filepath.Join(portDir(t, fs.root, "mlx5_0", 1), "gid_attrs/ndevs", row), "rail0\n")
	}
	e := environment(t, fs, "mlx5_0", 1)
	if deref(e.Link.Netdev) != "rail0" || e.Link.NetdevMTU == nil || *e.Link.NetdevMTU != 9000 {
		t.Errorf("link: %s", asJSON(t, e.Link))
	}
	if c := before.Fingerprint().Changes(e.Fingerprint()); len(c) > 0 {
		t.Errorf("a name is no condition: %v", c)
	}
}

func TestEnvironmentOfNoDevice(t *testing.T) {
	e := environment(t, goodHost(t), "nullverbs0", 1)
	if e.Visible || e.PCI != nil || deref(e.Versions.Kernel) != "6.1.0-57-amd64" || e.Memory.Memlock == nil {
		t.Errorf("environment: %s", asJSON(t, e))
	}
	for _, c := range e.Checks() {
		if !slices.Contains(Checks, c.Name) {
			t.Errorf("check %s is not in the closed list", c.Name)
		}
	}
}

// TestEnvironmentDocs holds the documented list of checks and the code together.
func TestEnvironmentDocs(t *testing.T) {
	text, err := os.ReadFile("../../docs/environment.md")
	if err != nil {
		t.Fatal(err)
	}
	var documented []CheckName
	for line := range strings.Lines(string(text)) {
		if name, ok := strings.CutPrefix(line, "| `"); ok {
			name, _, _ = strings.Cut(name, "`")
			documented = append(documented, CheckName(name))
		}
	}
	if diff := cmp.Diff(Checks, documented); diff != "" {
		t.Errorf("docs/environment.md (-code +doc):\n%s", diff)
	}
}
