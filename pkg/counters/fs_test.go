package counters

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters/sysfstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// portDir finds the directory of a port in an unpacked tree.
func portDir(t testing.TB, root, device string, port int) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(filepath.Join(root, "class", "infiniband", device))
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "ports", fmt.Sprint(port))
}

func write(t testing.TB, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func remove(t testing.TB, path string) {
	t.Helper()
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
}

// hang replaces a file by a FIFO that nobody writes to: opening it hangs, as a read does whose
// driver waits for dead firmware. The result lets it return; the test's end does so anyhow.
func hang(t testing.TB, path string) (release func()) {
	t.Helper()
	remove(t, path)
	if err := unix.Mkfifo(path, 0o644); err != nil {
		t.Fatal(err)
	}
	keep := filepath.Join(t.TempDir(), "fifo") // still there when path is something else
	if err := os.Link(path, keep); err != nil {
		t.Fatal(err)
	}
	release = sync.OnceFunc(func() {
		// Both ends: opening does not block, and closing ends a read that has begun.
		fd, err := unix.Open(keep, unix.O_RDWR|unix.O_NONBLOCK, 0)
		if err == nil {
			runtime.Gosched()
			unix.Close(fd)
		}
	})
	t.Cleanup(release)
	return release
}

func collect(t testing.TB, fs *FS, f Filter) *Inventory {
	t.Helper()
	inv, err := fs.Collect(t.Context(), f)
	if err != nil {
		t.Fatal(err)
	}
	return inv
}

func find(t testing.TB, inv *Inventory, device string, port int) *Port {
	t.Helper()
	for i := range inv.Devices {
		if inv.Devices[i].Name == device {
			if p := inv.Devices[i].port(port); p != nil {
				return p
			}
		}
	}
	t.Fatalf("no %s port %d in %s", device, port, asNames(inv))
	return nil
}

func asNames(inv *Inventory) string {
	var b strings.Builder
	for _, d := range inv.Devices {
		fmt.Fprintf(&b, "%s(%d ports, %v) ", d.Name, len(d.Ports), d.Warnings)
	}
	return b.String()
}

func unreadable(p *Port, name string) string {
	for _, u := range p.Unreadable {
		if u.Name == name {
			return deref(u.Errno) + deref(u.Text)
		}
	}
	return ""
}

// eventually waits for another goroutine.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for !ok() {
		if ctx.Err() != nil {
			t.Fatal("never came: " + what)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestHangingReadCostsOneFile(t *testing.T) {
	fs := open(t, "mlx5-ib-ndr")
	fs.ReadTimeout = 50 * time.Millisecond
	mustInventory(t, fs)
	path := filepath.Join(portDir(t, fs.root, "mlx5_0", 1), "counters", "symbol_error")
	hang(t, path)
	var opened atomic.Int32
	fs.trace = func(p string) {
		if p == path {
			opened.Add(1)
		}
	}

	for range 3 {
		inv := collect(t, fs, Filter{})
		p := find(t, inv, "mlx5_0", 1)
		if got := unreadable(p, "counters/symbol_error"); got != "ETIMEDOUT" {
			t.Errorf("symbol_error: %q, want ETIMEDOUT", got)
		}
		if len(p.CountersRaw[PMA]) != 20 || len(p.CountersRaw[HW]) != 24 {
			t.Errorf("%d PMA and %d hw counters remain, want 20 and 24", len(p.CountersRaw[PMA]), len(p.CountersRaw[HW]))
		}
		if p := find(t, inv, "mlx5_6", 1); len(p.CountersRaw[PMA]) != 21 || len(p.Unreadable) != 0 {
			t.Errorf("the other device lost counters: %v", p.Unreadable)
		}
	}
	if n := opened.Load(); n != 1 {
		t.Errorf("the file was opened %d times while the first reader hung", n)
	}
	if got := fs.Stuck(); len(got) != 1 || got[0] != path {
		t.Errorf("Stuck() = %q, want the one file", got)
	}

	s, err := fs.Port("mlx5_0", 1).Snapshot(t.Context())
	if err != nil || len(s.samples) == 0 {
		t.Errorf("a snapshot beside the stuck file: %v, %v", s, err)
	}

	remove(t, path)
	write(t, path, "7\n")
	if got := find(t, collect(t, fs, Filter{}), "mlx5_0", 1).CountersRaw[PMA]["symbol_error"]; got != 7 {
		t.Errorf("after the file was replaced: symbol_error = %d, want 7", got)
	}
	if got := fs.Stuck(); len(got) != 0 {
		t.Errorf("Stuck() = %q after the file was replaced", got)
	}
}

func TestStuckReadReturns(t *testing.T) {
	fs := open(t, "rxe")
	fs.ReadTimeout = 50 * time.Millisecond
	path := filepath.Join(portDir(t, fs.root, "rxe0", 1), "hw_counters", "sent_pkts")
	release := hang(t, path)
	collect(t, fs, Filter{})
	if len(fs.Stuck()) != 1 {
		t.Fatalf("Stuck() = %q", fs.Stuck())
	}
	release()
	eventually(t, "the stuck read returns", func() bool { return len(fs.Stuck()) == 0 })
}

func TestDeadDeviceIsLeftAlone(t *testing.T) {
	fs := open(t, "mlx5-ib-ndr")
	fs.ReadTimeout = 200 * time.Millisecond
	dir := portDir(t, fs.root, "mlx5_0", 1)
	var paths []string
	for _, name := range []string{"symbol_error", "link_downed", "port_rcv_errors", "port_xmit_wait", "VL15_dropped", "port_xmit_data"} {
		path := filepath.Join(dir, "counters", name)
		hang(t, path)
		paths = append(paths, path)
	}
	for range 2 {
		inv := collect(t, fs, Filter{})
		if n := len(fs.Stuck()); n != maxStuck {
			t.Errorf("%d reads hang, want no more than %d", n, maxStuck)
		}
		if len(find(t, inv, "mlx5_6", 1).CountersRaw[PMA]) != 21 {
			t.Error("the other device suffers")
		}
		for _, d := range inv.Devices {
			if d.Name == "mlx5_0" && (len(d.Warnings) != 1 || d.Warnings[0] != WarnNotAnswering) {
				t.Errorf("warnings of the dead device: %v", d.Warnings)
			}
		}
	}
	if _, err := fs.Port("mlx5_0", 1).Snapshot(t.Context()); !errors.Is(err, ErrNotAnswering) {
		t.Errorf("snapshot of the dead device: %v", err)
	}
	for _, path := range paths {
		remove(t, path)
		write(t, path, "0\n")
	}
	if p := find(t, collect(t, fs, Filter{}), "mlx5_0", 1); len(p.CountersRaw[PMA]) != 21 {
		t.Errorf("after recovery: %d counters", len(p.CountersRaw[PMA]))
	}
}

func TestCancelledReadReturns(t *testing.T) {
	fs := open(t, "rxe")
	fs.ReadTimeout = time.Hour
	hang(t, filepath.Join(portDir(t, fs.root, "rxe0", 1), "state"))
	ctx, cancel := context.WithCancel(t.Context())
	fs.trace = func(p string) {
		if strings.HasSuffix(p, "/ports/1/state") {
			cancel()
		}
	}
	if _, err := fs.Inventory(ctx, Filter{}); !errors.Is(err, context.Canceled) {
		t.Errorf("err = %v, want canceled", err)
	}
}

func TestOddFilesHideNothing(t *testing.T) {
	fs := open(t, "mlx5-ib-ndr")
	dir := portDir(t, fs.root, "mlx5_0", 1)
	pma := filepath.Join(dir, "counters")
	long := strings.Repeat("x", 200)

	remove(t, filepath.Join(pma, "symbol_error"))
	if err := os.Mkdir(filepath.Join(pma, "symbol_error"), 0o755); err != nil {
		t.Fatal(err)
	}
	remove(t, filepath.Join(pma, "link_downed"))
	if err := os.Symlink("nowhere", filepath.Join(pma, "link_downed")); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"negative": "-1\n", "hex": "0x10\n", "words": "12 34\n", "huge": "99999999999999999999\n", "bare": "5",
		"latin1": "caf\xe9\n", "SwLinkUp,32": "3\n", "a.b": "4\n", "größe": "5\n", long: "6\n", "bad\xff": "7\n",
	} {
		write(t, filepath.Join(dir, "hw_counters", name), text)
	}
	write(t, filepath.Join(filepath.Dir(filepath.Dir(dir)), "node_desc"), "br\xc3\x28ken \x01"+strings.Repeat("é", 100)+"\n")
	vanishing := filepath.Join(pma, "port_rcv_errors")
	fs.trace = func(p string) {
		if p == vanishing {
			os.Remove(p)
		}
	}

	inv := mustInventory(t, fs)
	p := find(t, inv, "mlx5_0", 1)
	for name, want := range map[string]string{
		"counters/symbol_error": "EISDIR",
		"counters/link_downed":  "ENOENT",
		"hw_counters/negative":  "-1",
		"hw_counters/hex":       "0x10",
		"hw_counters/words":     "12 34",
		"hw_counters/huge":      "99999999999999999999",
		"hw_counters/latin1":    "caf\ufffd",

		"counters/port_rcv_errors": "", // gone, which is not unreadable
	} {
		if got := unreadable(p, name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	for name, want := range map[string]uint64{"bare": 5, "SwLinkUp,32": 3, "a.b": 4, "größe": 5, long: 6, "bad\ufffd": 7} {
		if got, ok := p.CountersRaw[HW][name]; !ok || got != want {
			t.Errorf("%s = %d, %v, want %d", name, got, ok, want)
		}
	}
	if n := len(p.CountersRaw[PMA]); n != 18 {
		t.Errorf("%d PMA counters remain, want 18", n)
	}
	if names := p.Classes[Physical].Names; len(names) != 4 {
		t.Errorf("physical counts %v, want the 4 that can be read", names)
	}
	if desc := deref(inv.Devices[0].NodeDesc); len(desc) > 128 || !strings.HasPrefix(desc, "br\ufffd(ken \ufffdé") {
		t.Errorf("node_desc = %q (%d bytes)", desc, len(desc))
	}
	if p := find(t, inv, "mlx5_6", 1); len(p.Unreadable) != 0 || len(p.CountersRaw[PMA]) != 21 {
		t.Error("the other device suffers")
	}
	if b, err := json.Marshal(inv); err != nil || !json.Valid(b) {
		t.Errorf("JSON: %v", err)
	}
}

func TestPermissionDenied(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root may read everything")
	}
	fs := open(t, "rxe")
	if err := os.Chmod(filepath.Join(portDir(t, fs.root, "rxe0", 1), "hw_counters", "sent_pkts"), 0); err != nil {
		t.Fatal(err)
	}
	p := find(t, mustInventory(t, fs), "rxe0", 1)
	if got := unreadable(p, "hw_counters/sent_pkts"); got != "EACCES" || len(p.CountersRaw[HW]) != 14 {
		t.Errorf("%q, %d counters remain", got, len(p.CountersRaw[HW]))
	}
}

func TestUnreadableIsNotPoked(t *testing.T) {
	fs := open(t, "mlx5-sriov-vf")
	dir := portDir(t, fs.root, "rocep59s0f0v0", 1)
	path := filepath.Join(dir, "counters", "symbol_error")
	opened := 0
	fs.trace = func(p string) {
		if p == path {
			opened++
		}
	}
	expect := func(what string, want int) {
		t.Helper()
		if opened != want {
			t.Errorf("%s: opened %d times, want %d", what, opened, want)
		}
	}
	mustInventory(t, fs)
	for range 3 {
		if got := unreadable(find(t, collect(t, fs, Filter{}), "rocep59s0f0v0", 1), "counters/symbol_error"); got != "EINVAL" {
			t.Errorf("symbol_error: %q", got)
		}
		if _, err := fs.Port("rocep59s0f0v0", 1).Snapshot(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	expect("at rest", 1)
	write(t, filepath.Join(dir, "state"), "1: DOWN\n")
	collect(t, fs, Filter{})
	collect(t, fs, Filter{})
	expect("after the port changed state", 2)
	write(t, path, "9\n")
	for _, state := range []string{"1: DOWN\n", "4: ACTIVE\n"} { // the refusal must be forgotten
		write(t, filepath.Join(dir, "state"), state)
		if got := find(t, collect(t, fs, Filter{}), "rocep59s0f0v0", 1).CountersRaw[PMA]["symbol_error"]; got != 9 {
			t.Errorf("symbol_error = %d after the file changed", got)
		}
	}
}

func TestExcludedDeviceIsNotOpened(t *testing.T) {
	fs := open(t, "mixed-port-down")
	var touched []string
	var mu sync.Mutex
	fs.trace = func(p string) {
		mu.Lock()
		defer mu.Unlock()
		if strings.Contains(p, "mlx5_1") || strings.Contains(p, "mlx4_0") {
			touched = append(touched, p)
		}
	}
	for _, f := range []Filter{{Exclude: []string{"*_1", "mlx4*"}}, {Include: []string{"mlx5_[02]"}}} {
		if _, err := fs.Inventory(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		if inv := collect(t, fs, f); len(inv.Devices) != 2 {
			t.Errorf("%+v accepts %s", f, asNames(inv))
		}
	}
	if len(touched) > 0 {
		t.Errorf("touched %q", touched)
	}
}

func TestFilterValidate(t *testing.T) {
	if err := (Filter{Include: []string{"mlx5_*"}, Exclude: []string{"[a-"}}).Validate(); err == nil || !strings.Contains(err.Error(), "[a-") {
		t.Errorf("err = %v, want one that names the glob", err)
	}
}

func TestRoots(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, "")
	for _, root := range []string{file, "/nonexistent"} {
		if _, err := NewFS(root).Inventory(t.Context(), Filter{}); err == nil || !strings.Contains(err.Error(), root) {
			t.Errorf("%s: err = %v, want one that names the root", root, err)
		}
	}
	inv := mustInventory(t, NewFS(t.TempDir()))
	if len(inv.Devices) != 0 || len(inv.Warnings) != 2 || inv.Warnings[1] != WarnNoDevice {
		t.Errorf("a host without RDMA: %s", asJSON(t, inv))
	}
}

func TestDeviceComesAndGoes(t *testing.T) {
	fs := open(t, "mlx5-ib-ndr")
	mustInventory(t, fs)
	r := fs.Port("mlx5_0", 1)
	if _, err := r.Snapshot(t.Context()); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(fs.root, "class", "infiniband", "mlx5_0")
	target, err := os.Readlink(link)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(filepath.Dir(link), target)

	// Gone while it is read.
	fs.trace = func(p string) {
		if strings.HasSuffix(p, "mlx5_0/ports/1/phys_state") {
			os.Rename(dir, dir+".gone")
			os.Remove(link)
		}
	}
	if inv := collect(t, fs, Filter{}); len(inv.Devices) != 1 || inv.Devices[0].Name != "mlx5_6" {
		t.Errorf("devices: %s, want mlx5_6 alone", asNames(inv))
	}
	fs.trace = nil
	if _, err := r.Snapshot(t.Context()); !errors.Is(err, ErrNotVisible) {
		t.Errorf("snapshot: %v, want not visible", err)
	}
	collect(t, fs, Filter{})
	if len(fs.devices) != 1 || len(fs.ports) != 0 {
		t.Errorf("%d devices and %d ports are still held", len(fs.devices), len(fs.ports))
	}

	// Back, with other firmware: a scrape must notice without an inventory.
	if err := os.Rename(dir+".gone", dir); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "fw_ver"), "28.0.1\n")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	inv := collect(t, fs, Filter{})
	if find(t, inv, "mlx5_0", 1); deref(inv.Devices[0].FwVer) != "28.0.1" {
		t.Errorf("firmware is still %q", deref(inv.Devices[0].FwVer))
	}
	if _, err := r.Snapshot(t.Context()); err != nil {
		t.Errorf("an old reader of a device that came back: %v", err)
	}
}

// Nothing may grow from scrape to scrape.
func TestCollectHoldsNothing(t *testing.T) {
	fs := NewFS(sysfstest.Tree(t, "mlx5-sriov-vf"))
	mustInventory(t, fs)
	sizes := func() [5]int {
		return [5]int{len(fs.gates), len(fs.stuck), len(fs.refused), len(fs.devices), len(fs.ports)}
	}
	collect(t, fs, Filter{})
	before := sizes()
	for range 50 {
		collect(t, fs, Filter{})
	}
	if after := sizes(); after != before {
		t.Errorf("gates, stuck, refused, devices, ports: %v, were %v", after, before)
	}
}

func TestConcurrentUse(t *testing.T) {
	fs := open(t, "mlx5-ib-ndr")
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 5 {
				if _, err := fs.Collect(t.Context(), Filter{}); err != nil {
					t.Error(err)
				}
				if _, err := fs.Port("mlx5_6", 1).Snapshot(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Go(func() {
		for range 5 {
			if _, err := fs.Inventory(t.Context(), Filter{}); err != nil {
				t.Error(err)
			}
		}
	})
	wg.Wait()
}
