package probe

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// TestMemory has both ends say what their buffers are, over ops that walk through a ring in each way there is.
func TestMemory(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	for _, tc := range []struct {
		name    string
		spec    Spec
		relaxed bool
	}{
		{"as it comes", Spec{Kind: Bandwidth}, true},
		{"a buffer that is polled", Spec{Kind: Latency, Op: verbs.Write}, false},
		{"one that is not", Spec{Kind: Latency, Op: verbs.Send}, true},
		{"strict", Spec{Kind: Bandwidth, Memory: Memory{StrictOrdering: true}}, false},
		{"huge pages", Spec{Kind: Bandwidth, Memory: Memory{HugePages: true}}, true},
		{"a ring, write", Spec{Kind: Bandwidth, Sizes: []int{64, 4096}, QPs: 3, Memory: Memory{Ring: 1 << 20}}, true},
		{"a ring, read", Spec{Kind: Bandwidth, Op: verbs.Read, Memory: Memory{Ring: 1 << 20}}, true},
		{"a ring, send", Spec{Kind: MessageRate, Op: verbs.Send, Sizes: []int{100}, PostList: 16, Memory: Memory{Ring: 1 << 16}}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.spec.Iterations = 2000
			r := a.probe(t.Context(), tc.spec, b.target())
			wantUsable(t, r)
			for end, m := range map[string]*verbs.MemoryKind{"local": kind(r.Memory), "remote": kind(r.PeerMemory)} {
				if m == nil {
					t.Fatalf("the %s end does not say what its memory is", end)
				}
				if *m != verbs.OrdinaryPages && !tc.spec.Memory.HugePages {
					t.Errorf("%s memory is %s: nobody asked for that", end, *m)
				}
			}
			if r.Memory.RelaxedOrdering != tc.relaxed || r.PeerMemory.RelaxedOrdering != tc.relaxed {
				t.Errorf("relaxed ordering: %t here, %t there, want %t", r.Memory.RelaxedOrdering, r.PeerMemory.RelaxedOrdering, tc.relaxed)
			}
			if want := tc.spec.Memory.Ring; r.Memory.Ring != want || r.PeerMemory.Ring != want {
				t.Errorf("rings of %d and %d bytes, want %d", r.Memory.Ring, r.PeerMemory.Ring, want)
			}
			checkJSON(t, r)
		})
	}
}

func kind(m *control.MemoryGot) *verbs.MemoryKind {
	if m == nil {
		return nil
	}
	k := verbs.MemoryKind(m.Kind)
	return &k
}

func TestRingCountsAgainstTheLimit(t *testing.T) {
	small := roomy
	small.Memory = 4 << 20
	a, b := newHost(t, "a", roomy), newHost(t, "b", small)
	r := a.probe(t.Context(), Spec{Kind: Bandwidth, Memory: Memory{Ring: 2 << 20}}, b.target())
	wantFailure(t, r, Failed, StageAdmit, ResourceLimit, ScopePeer)
	wantUsable(t, a.probe(t.Context(), Spec{Kind: Bandwidth, Memory: Memory{Ring: 1 << 20}}, b.target()))
}

func TestGPUIsRefusedWhereThereIsNone(t *testing.T) {
	a, b := newHost(t, "a", roomy), newHost(t, "b", roomy)
	gpu := 0
	r := a.probe(t.Context(), Spec{Kind: Bandwidth, Memory: Memory{GPU: &gpu}}, b.target())
	wantFailure(t, r, Failed, StageSetup, OpUnsupported, ScopeLocal)
	if !strings.Contains(*r.Detail, "-tags dmabuf") {
		t.Errorf("does not say what to do: %s", *r.Detail)
	}
}

func TestMemoryIsValidated(t *testing.T) {
	gpu := 0
	for want, s := range map[string]Spec{
		"a ring is for bandwidth":        {Kind: Latency, Memory: Memory{Ring: 1 << 20}},
		"out of range":                   {Kind: Bandwidth, Memory: Memory{Ring: 1 << 40}},
		"no room for two messages":       {Kind: Bandwidth, Sizes: []int{65536}, QPs: 16, Memory: Memory{Ring: 1 << 20}},
		"inline data is copied":          {Kind: Bandwidth, Inline: 64, Memory: Memory{GPU: &gpu}},
		"write latency polls the memory": {Kind: Latency, Memory: Memory{GPU: &gpu}},
	} {
		if err := s.WithDefaults().Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", s.Memory, err, want)
		}
	}
}

func TestNUMANode(t *testing.T) {
	root := t.TempDir()
	put := func(device, file, text string) {
		pci := filepath.Join(root, "devices", device)
		class := filepath.Join(root, "class/infiniband", device)
		at := filepath.Join(pci, file)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(class, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(filepath.Join(pci, "function"), filepath.Join(class, "device")); err != nil {
			t.Fatal(err)
		}
	}
	put("mlx5_0", "function/numa_node", "1\n")
	put("mlx5_1", "function/numa_node", "-1\n") // one node, or the firmware does not tell
	put("mlx5_2", "numa_node", "3\n")           // a sub-function: its parent knows
	if err := os.MkdirAll(filepath.Join(root, "devices/mlx5_2/function"), 0o755); err != nil {
		t.Fatal(err)
	}
	for device, want := range map[string]int{"mlx5_0": 1, "mlx5_1": -1, "mlx5_2": 3, "rxe0": -1} {
		got := -1
		if n := numaNode(root, device); n != nil {
			got = *n
		}
		if got != want {
			t.Errorf("%s: node %d, want %d", device, got, want)
		}
	}
}
