package counters

import (
	"encoding/binary"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters/sysfstest"
)

func missing(e *Environment) map[string]string {
	got := map[string]string{}
	for _, u := range e.Missing {
		got[u.Name] = deref(u.Errno) + deref(u.Text)
	}
	return got
}

func TestEnvironmentHangingReadCostsOneField(t *testing.T) {
	fs := goodHost(t)
	fs.ReadTimeout = 200 * time.Millisecond
	hang(t, filepath.Join(fs.root, pciDir, "config"))
	hang(t, filepath.Join(fs.root, pciDir, "aer_dev_fatal"))
	hang(t, filepath.Join(fs.root, "devices/system/cpu/cpu32/cpufreq/scaling_max_freq"))
	hang(t, filepath.Join(fs.Proc, "self/limits"))
	for range 2 { // the second reading leaves them alone
		e := environment(t, fs, "mlx5_0", 1)
		want := map[string]string{
			"pci.max_payload": "ETIMEDOUT", "pci.max_read_request": "ETIMEDOUT", "pci.relaxed_ordering": "ETIMEDOUT",
			"pci.aer_fatal": "ETIMEDOUT", "cpu.max_khz": "ETIMEDOUT", "memory.memlock": "ETIMEDOUT",
		}
		if diff := cmp.Diff(want, missing(e)); diff != "" {
			t.Errorf("unreadable (-want +got):\n%s", diff)
		}
		if e.PCI.CurWidth == nil || e.PCI.NonFatal == nil || e.PCI.ACSRedirect == nil || e.CPU.Governors == nil || e.Link.RateGbps == nil || e.Versions.RDMACore == nil {
			t.Errorf("what hangs hides other things: %s", asJSON(t, e))
		}
		if n := len(fs.Stuck()); n != 4 {
			t.Errorf("%d reads hang, want one for each file: %v", n, fs.Stuck())
		}
	}
}

// A machine that doesn't answer takes neither its devices nor their counters along.
func TestDeadHostHidesNoDevice(t *testing.T) {
	fs := goodHost(t)
	fs.ReadTimeout = 200 * time.Millisecond
	for _, name := range []string{"sys/kernel/osrelease", "uptime", "self/maps", "self/limits", "self/status"} {
		hang(t, filepath.Join(fs.Proc, name))
	}
	for range 2 {
		e := environment(t, fs, "mlx5_0", 1)
		if missing(e)["host"] != "ETIMEDOUT" || deref(e.Versions.Firmware) != "22.99.2048" || *e.PCI.CurWidth != 16 {
			t.Errorf("environment: %s", asJSON(t, e))
		}
		if p := find(t, collect(t, fs, Filter{}), "mlx5_0", 1); len(p.CountersRaw[PMA]) == 0 {
			t.Error("no counters")
		}
	}
	fs2 := goodHost(t)
	fs2.ReadTimeout = 200 * time.Millisecond
	for _, name := range []string{"node_type", "fw_ver", "ports/1/state", "ports/1/rate", "ports/1/link_layer"} {
		hang(t, filepath.Join(fs2.root, "class/infiniband/mlx5_0", name))
	}
	e := environment(t, fs2, "mlx5_0", 1)
	if missing(e)["device"] != "ETIMEDOUT" || e.Visible || deref(e.Versions.Kernel) == "" {
		t.Errorf("environment of a dead device: %s", asJSON(t, e))
	}
}

func TestEnvironmentOddFiles(t *testing.T) {
	fs := goodHost(t)
	fw := filepath.Join(fs.root, "class/infiniband/mlx5_0/fw_ver")
	remove(t, fw)
	if err := os.Mkdir(fw, 0o755); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(fs.root, pciDir)
	for name, text := range map[string]string{
		"max_link_speed": "Unknown\n", "aer_dev_fatal": "no total\n", "numa_node": "x\n", "config": "short",
	} {
		write(t, filepath.Join(dir, name), text)
	}
	write(t, filepath.Join(fs.root, "devices/system/node/node1/cpulist"), "0-99999999999\n")
	write(t, filepath.Join(fs.Proc, "self/limits"), "Max locked memory\n")
	vanishing := filepath.Join(dir, "aer_dev_nonfatal")
	fs.trace = func(p string) {
		if p == vanishing {
			os.Remove(p)
		}
	}
	e := environment(t, fs, "mlx5_0", 1)
	want := map[string]string{
		"versions.firmware": "EISDIR", "pci.max_gts": "Unknown", "pci.aer_fatal": "no total", "numa.node": "x", "memory.memlock": "Max locked memory",
		"pci.max_payload": "EACCES", "pci.max_read_request": "EACCES", "pci.relaxed_ordering": "EACCES",
	}
	if diff := cmp.Diff(want, missing(e)); diff != "" {
		t.Errorf("unreadable (-want +got):\n%s", diff)
	}
	if e.PCI.NonFatal != nil {
		t.Error("a file that went away has a value")
	}
	if *e.PCI.CurWidth != 16 || *e.Link.ActiveMTU != 4096 {
		t.Errorf("environment: %s", asJSON(t, e))
	}
}

// A device that goes away while it is read leaves nothing half done.
func TestEnvironmentOfVanishingDevice(t *testing.T) {
	for _, at := range []string{"fw_ver", "current_link_width", "rate", "enable/3"} {
		fs := goodHost(t)
		fs.trace = func(p string) {
			if strings.HasSuffix(p, at) {
				os.Remove(filepath.Join(fs.root, "class/infiniband/mlx5_0"))
			}
		}
		if e := environment(t, fs, "mlx5_0", 1); e.Visible {
			t.Errorf("%s: %s", at, asJSON(t, e))
		}
		fs.trace = nil
		if envs, err := fs.Environments(t.Context(), Filter{}); err != nil || len(envs) > 0 {
			t.Errorf("%s: %v %v", at, envs, err)
		}
	}
}

// opens watches directories and counts what the kernel saw opened or read in each.
func opens(t *testing.T, root string) (count func() map[string]int) {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Skipf("inotify: %v", err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	dirs := map[int32]string{}
	err = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return err
		}
		wd, err := unix.InotifyAddWatch(fd, path, unix.IN_OPEN|unix.IN_ACCESS|unix.IN_ONLYDIR)
		dirs[int32(wd)] = path
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	drain := func() map[string]int {
		seen := map[string]int{}
		buf := make([]byte, 1<<16)
		for {
			n, err := unix.Read(fd, buf)
			if err == unix.EAGAIN {
				return seen
			}
			if err != nil {
				t.Fatal(err)
			}
			for b := buf[:n]; len(b) >= unix.SizeofInotifyEvent; {
				size := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(b[12:]))
				name := strings.TrimRight(string(b[unix.SizeofInotifyEvent:size]), "\x00")
				seen[filepath.Join(dirs[int32(binary.NativeEndian.Uint32(b))], name)]++
				b = b[size:]
			}
		}
	}
	drain()
	return drain
}

// The kernel is the witness: nothing below an excluded device is opened, neither by its name in class nor below its PCI function.
func TestKernelSeesNoOpenOfExcludedDevice(t *testing.T) {
	root := sysfstest.Tree(t, "mixed-port-down")
	seen := opens(t, root)
	fs := NewFS(root)
	read := func(f Filter) map[string]int {
		t.Helper()
		if _, err := fs.Inventory(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		collect(t, fs, f)
		if _, err := fs.Environments(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		return seen()
	}
	resolved := func(device string) (own, function string) {
		own, err := filepath.EvalSymlinks(filepath.Join(root, "class/infiniband", device))
		if err != nil {
			t.Fatal(err)
		}
		return own, filepath.Dir(filepath.Dir(own))
	}
	for _, excluded := range []string{"mlx5_1", "mlx4_0"} {
		own, function := resolved(excluded)
		for path := range read(Filter{Exclude: []string{excluded}}) {
			if strings.HasPrefix(path, own) || strings.HasPrefix(path, function+"/") || strings.Contains(path, "/infiniband/"+excluded) {
				t.Errorf("%s is excluded, and %s was opened", excluded, path)
			}
		}
	}
	own, _ := resolved("mlx5_1")
	if n := read(Filter{})[own+"/fw_ver"]; n == 0 {
		t.Error("the witness sees nothing at all")
	}
}

// Every PMA counter stops at its own width: there it is "at least", one below it is a number.
func TestSaturationAtEachWidth(t *testing.T) {
	for _, c := range pmaWidths {
		bits := c.bits
		if bits == 0 {
			bits = 32 // without the extended class
		}
		t.Run(fmt.Sprintf("%s/%d", c.name, bits), func(t *testing.T) {
			top := uint64(math.MaxUint64) >> (64 - bits)
			dir := "devices/pci0000:40/0000:41:00.0"
			tree := onFunction("mlx5_0", "mlx5_core", dir).add(withPort(dir, "mlx5_0", 1, "InfiniBand", layout{"counters/" + c.name: strconv.FormatUint(top-3, 10)}))
			fs := tree.fs(t)
			file := filepath.Join(portDir(t, fs.root, "mlx5_0", 1), "counters", c.name)
			r := fs.Port("mlx5_0", 1)
			saturated := func() bool {
				return slices.Contains(find(t, mustInventory(t, fs), "mlx5_0", 1).Saturated, "counters/"+c.name)
			}

			begin := snapshot(t, r)
			write(t, file, strconv.FormatUint(top-1, 10)+"\n")
			below := snapshot(t, r)
			if d := Sub(begin, below); d.Counters[c.name] != 2 || len(d.Unknown) > 0 || saturated() {
				t.Errorf("below the top: rose by %d, unknown %v", d.Counters[c.name], d.Unknown)
			}
			write(t, file, strconv.FormatUint(top, 10)+"\n")
			full := snapshot(t, r)
			if d := Sub(below, full); d.Counters[c.name] != 1 || !slices.Contains(d.Unknown, c.name) || !saturated() {
				t.Errorf("at the top: rose by %d, unknown %v, saturated %t", d.Counters[c.name], d.Unknown, saturated())
			}
			if d := Sub(full, snapshot(t, r)); !slices.Contains(d.Unknown, c.name) {
				t.Errorf("standing at the top is known: %v", d.Counters)
			} else if _, known := d.Counters[c.name]; known {
				t.Error("standing at the top counts as no increase")
			}
			write(t, file, "1\n")
			if d := Sub(below, snapshot(t, r)); !slices.Contains(d.Unknown, c.name) || d.Counters[c.name] != 0 {
				t.Errorf("after a reset: %d, unknown %v", d.Counters[c.name], d.Unknown)
			}
		})
	}
}

// TestNoGrowth: ten thousand scrapes leave no more behind than a thousand did.
func TestNoGrowth(t *testing.T) {
	if testing.Short() {
		t.Skip("ten thousand scrapes")
	}
	dir := "devices/pci0000:40/0000:41:00.0"
	fs := onFunction("mlx5_0", "mlx5_core", dir).add(withPort(dir, "mlx5_0", 1, "Ethernet", layout{
		"counters/port_xmit_data": "1", "counters/symbol_error": "N/A (no PMA)", "hw_counters/out_of_sequence": "1", "hw_counters/lifespan": "10",
	})).fs(t)
	mustInventory(t, fs)
	scrape := func(n int) {
		for i := range n {
			collect(t, fs, Filter{})
			if i%100 == 0 {
				environment(t, fs, "mlx5_0", 1)
				snapshot(t, fs.Port("mlx5_0", 1))
			}
		}
	}
	held := func() (heap uint64, goroutines, files int) {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip(err)
		}
		return m.HeapAlloc, runtime.NumGoroutine(), len(fds)
	}
	scrape(1000)
	heap, goroutines, files := held()
	scrape(9000)
	heap2, goroutines2, files2 := held()
	if heap2 > heap+256<<10 || goroutines2 > goroutines || files2 > files {
		t.Errorf("heap %d, was %d; goroutines %d, were %d; files %d, were %d", heap2, heap, goroutines2, goroutines, files2, files)
	}
}
