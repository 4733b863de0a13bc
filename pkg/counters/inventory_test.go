package counters

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"golang.org/x/sys/unix"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters/sysfstest"
)

// sideEthtool answers as ethtool would on the host of a tree.
func sideEthtool(root string) func(string) (map[string]uint64, error) {
	return func(netdev string) (map[string]uint64, error) {
		f, err := os.Open(filepath.Join(root, "side", "ethtool-S", netdev+".txt"))
		if err != nil {
			return nil, err
		}
		defer f.Close()
		stats := make(map[string]uint64)
		for in := bufio.NewScanner(f); in.Scan(); {
			if name, v, ok := strings.Cut(strings.TrimSpace(in.Text()), ": "); ok {
				n, err := strconv.ParseUint(v, 10, 64)
				if err != nil {
					return nil, err
				}
				stats[name] = n
			}
		}
		return stats, nil
	}
}

func open(t testing.TB, tree string) *FS {
	t.Helper()
	fs := NewFS(sysfstest.Tree(t, tree))
	fs.ethtool = sideEthtool(fs.root)
	return fs
}

func mustInventory(t testing.TB, fs *FS) *Inventory {
	t.Helper()
	inv, err := fs.Inventory(t.Context(), Filter{})
	if err != nil {
		t.Fatal(err)
	}
	return inv
}

// What a tree can't tell, and what devices --json says beyond the expected files.
var (
	notInTree = []string{"kernel", "wrap_case"}
	beyond    = []string{"node_desc", "sm_lid", "link_classes", "device_classes", "device_unreadable", "upstream", "pf_link"}
)

// byName turns the list of devices into a map: their order is not part of the contract.
func byName(t *testing.T, v map[string]any) map[string]any {
	devices := make(map[string]any)
	for _, d := range v["devices"].([]any) {
		devices[d.(map[string]any)["device"].(string)] = d
	}
	v["devices"] = devices
	return v
}

func strip(v any, keys []string) {
	switch v := v.(type) {
	case map[string]any:
		for _, k := range keys {
			delete(v, k)
		}
		for _, e := range v {
			strip(e, keys)
		}
	case []any:
		for _, e := range v {
			strip(e, keys)
		}
	}
}

func decode(t *testing.T, b []byte) map[string]any {
	t.Helper()
	var v map[string]any
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatal(err)
	}
	return byName(t, v)
}

func TestInventoryIsAsExpected(t *testing.T) {
	for _, tree := range sysfstest.Names() {
		t.Run(tree, func(t *testing.T) {
			fs := open(t, tree)
			want := decode(t, sysfstest.Expected(t, tree))
			strip(want, notInTree)
			if tree == "efa" { // its one netdev, ena's, belongs to no RDMA device
				delete(want, "ethtool")
			}
			for i := range 2 { // reading again must change nothing
				b, err := json.Marshal(mustInventory(t, fs))
				if err != nil {
					t.Fatal(err)
				}
				got := decode(t, b)
				strip(got, slices.Concat(notInTree, beyond))
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("read %d, -want +got:\n%s", i+1, diff)
				}
			}
		})
	}
}

// A checkout without symbolic links has small text files in their place.
func TestInventoryOfTreeWithoutLinks(t *testing.T) {
	for _, tree := range sysfstest.Names() {
		t.Run(tree, func(t *testing.T) {
			fs := open(t, tree)
			want := mustInventory(t, fs)
			err := filepath.WalkDir(fs.root, func(path string, e os.DirEntry, err error) error {
				if err != nil || e.Type() != os.ModeSymlink {
					return err
				}
				target, err := os.Readlink(path)
				if err != nil {
					return err
				}
				if err := os.Remove(path); err != nil {
					return err
				}
				return os.WriteFile(path, []byte(target), 0o444)
			})
			if err != nil {
				t.Fatal(err)
			}
			flat := NewFS(fs.root)
			flat.ethtool = fs.ethtool
			if diff := cmp.Diff(asJSON(t, want), asJSON(t, mustInventory(t, flat))); diff != "" {
				t.Errorf("-links +files:\n%s", diff)
			}
		})
	}
}

func asJSON(t *testing.T, v any) string {
	t.Helper()
	b, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// A scrape must say the same as the inventory, except for what it leaves out.
func TestCollectAgreesWithInventory(t *testing.T) {
	for _, tree := range sysfstest.Names() {
		t.Run(tree, func(t *testing.T) {
			fs := open(t, tree)
			want := mustInventory(t, fs)
			for range 2 {
				got, err := fs.Collect(t.Context(), Filter{})
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(asJSON(t, want.Devices), asJSON(t, got.Devices)); diff != "" {
					t.Errorf("-inventory +collect:\n%s", diff)
				}
			}
		})
	}
}

// tree8 writes the tree of a host with eight mlx5 ports, four cards of two.
func tree8(t testing.TB) string {
	t.Helper()
	src, dst := sysfstest.Tree(t, "mlx5-roce-2x100g"), filepath.Join(t.TempDir(), "tree8")
	for card := 4; card < 8; card++ {
		n := fmt.Sprint(card)
		rename := strings.NewReplacer("pci0000:40", "pci0000:"+n+"0", "0000:40:", "0000:"+n+"0:", "0000:41:", "0000:"+n+"1:", "p65s0", "p"+n+"1s0")
		err := filepath.WalkDir(src, func(path string, e os.DirEntry, err error) error {
			if err != nil {
				return err
			}
			to := dst + rename.Replace(strings.TrimPrefix(path, src))
			if e.IsDir() {
				return os.MkdirAll(to, 0o755)
			}
			if e.Type() == os.ModeSymlink {
				target, err := os.Readlink(path)
				if err != nil {
					return err
				}
				if _, err := os.Lstat(to); err == nil {
					return nil
				}
				return os.Symlink(rename.Replace(target), to)
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			return os.WriteFile(to, []byte(rename.Replace(string(text))), 0o644)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return dst
}

func BenchmarkCollect8(b *testing.B) {
	fs := NewFS(tree8(b))
	if inv := mustInventory(b, fs); len(inv.Devices) != 8 {
		b.Fatalf("%d devices", len(inv.Devices))
	}
	b.ReportAllocs()
	var took []time.Duration
	cpu := cpuTime(b)
	for b.Loop() {
		start := time.Now()
		if _, err := fs.Collect(b.Context(), Filter{}); err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	b.ReportMetric((cpuTime(b)-cpu).Seconds()*1e3/float64(len(took)), "cpu-ms/op") // which a busy machine doesn't spoil
	b.ReportMetric(took[len(took)/2].Seconds()*1e3, "median-ms/op")
}

func cpuTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func BenchmarkEnvironments8(b *testing.B) {
	fs := NewFS(tree8(b))
	mustInventory(b, fs)
	b.ReportAllocs()
	for b.Loop() {
		if envs, err := fs.Environments(b.Context(), Filter{}); err != nil || len(envs) != 8 {
			b.Fatal(err, len(envs))
		}
	}
}

func BenchmarkInventory8(b *testing.B) {
	fs := NewFS(tree8(b))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := fs.Inventory(b.Context(), Filter{}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSnapshot(b *testing.B) {
	fs := NewFS(tree8(b))
	mustInventory(b, fs)
	r := fs.Port("rocep41s0f0", 1)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := r.Snapshot(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
