package doctor

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/counters/sysfstest"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

func examine(t *testing.T, o Options) *Report {
	t.Helper()
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// find returns the check of a layer whose name begins so.
func find(t *testing.T, r *Report, l Layer, check string) Check {
	t.Helper()
	for _, c := range r.Checks {
		if c.Layer == l && strings.HasPrefix(c.Check, check) {
			return c
		}
	}
	t.Fatalf("no check %q in layer %s of %+v", check, l, r.Checks)
	return Check{}
}

// What each tree's trouble is, as a person who knows its README would say.
func TestTrees(t *testing.T) {
	for _, tt := range []struct {
		tree    string
		verdict Health
		layer   Layer
	}{
		{"bnxt-re", Healthy, ""},
		{"counters-ext-oldkernel", Doubtful, Counters},
		{"efa", Healthy, ""},
		{"hfi1-opa", Doubtful, Counters},
		{"hns-roce", Doubtful, Counters},
		{"irdma-roce-iwarp", Doubtful, PCIe},
		{"mana", Doubtful, MTU},
		{"mixed-port-down", Unhealthy, Ports},
		{"mlx5-bond-lag", Healthy, ""},
		{"mlx5-ib-ndr", Doubtful, Counters},
		{"mlx5-roce-2x100g", Doubtful, Counters},
		{"mlx5-sriov-vf", Doubtful, MTU},
		{"nopma-oldkernel", Doubtful, CPU},
		{"pcie-degraded", Unhealthy, PCIe},
		{"rxe", Unhealthy, Ports},
		{"saturated-32bit", Doubtful, Counters},
		{"siw", Healthy, ""},
	} {
		t.Run(tt.tree, func(t *testing.T) {
			r := examine(t, Options{Sysfs: counters.NewFS(sysfstest.Tree(t, tt.tree))})
			layer := Layer("")
			if r.Layer != nil {
				layer = *r.Layer
			}
			if r.Verdict != tt.verdict || layer != tt.layer {
				t.Errorf("%s at %q, want %s at %q: %s", r.Verdict, layer, tt.verdict, tt.layer, r.Diagnosis)
			}
			wellFormed(t, r)
		})
	}
}

// wellFormed holds what every report has, whatever it is about.
func wellFormed(t *testing.T, r *Report) {
	t.Helper()
	at := 0
	for _, c := range r.Checks {
		i := slices.Index(Layers, c.Layer)
		if i < at {
			t.Errorf("%s comes after %s", c.Layer, Layers[at])
		}
		at = i
		if c.Check == "" || c.Found == "" || (c.Expected == "") != (c.Verdict == Skipped) {
			t.Errorf("a gap in %+v", c)
		}
		if (c.Verdict == Failed || c.Verdict == Warning) && c.Advice == nil {
			t.Errorf("no advice: %+v", c)
		}
		if (c.Verdict == OK || c.Verdict == Skipped) && c.Advice != nil {
			t.Errorf("advice where nothing is to be done: %+v", c)
		}
	}
	for _, l := range Layers {
		if !slices.ContainsFunc(r.Checks, func(c Check) bool { return c.Layer == l }) {
			t.Errorf("nothing is said of layer %s", l)
		}
	}
	if r.Diagnosis == "" {
		t.Error("no diagnosis")
	}
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var m struct {
		Verdict string
		Checks  []map[string]any
	}
	if err := json.Unmarshal(b, &m); err != nil || m.Verdict == "" || len(m.Checks) != len(r.Checks) {
		t.Fatalf("%v: %s", err, b)
	}
	keys := []string{"layer", "check", "found", "expected", "verdict", "advice"}
	for _, c := range m.Checks {
		for _, k := range keys {
			if _, ok := c[k]; !ok {
				t.Errorf("%s is missing in %v", k, c)
			}
		}
	}
}

// Each port stands for itself: what a failed layer bears is skipped for that port alone.
func TestPortsOfOneTree(t *testing.T) {
	r := examine(t, Options{Sysfs: counters.NewFS(sysfstest.Tree(t, "mixed-port-down"))})
	type line struct {
		layer   Layer
		check   string
		verdict Verdict
	}
	for _, want := range []line{
		{Ports, "mlx5_0 port 1", OK}, {SubnetManager, "mlx5_0 port 1", OK}, {GID, "mlx5_0 port 1", Skipped},
		{Ports, "mlx5_1 port 1", Failed}, {SubnetManager, "mlx5_1 port 1", Skipped},
		{Ports, "mlx5_2 port 1", Failed}, {GID, "mlx5_2 port 1", Skipped},
		{Ports, "mlx4_0 port 1", OK}, {SubnetManager, "mlx4_0 port 1", Failed}, {GID, "mlx4_0 port 1", Skipped},
		{Ports, "mlx4_0 port 2", Failed},
	} {
		if c := find(t, r, want.layer, want.check); c.Verdict != want.verdict {
			t.Errorf("%s %s: %s, want %s: %s", want.layer, want.check, c.Verdict, want.verdict, c.Found)
		}
	}
	if a := *find(t, r, Ports, "mlx5_1").Advice; !strings.Contains(a, "signal") {
		t.Errorf("Polling: %s", a)
	}
	if a := *find(t, r, Ports, "mlx5_2").Advice; !strings.Contains(a, "ip link set enp97s0np0 up") {
		t.Errorf("no carrier: %s", a)
	}
	if a := *find(t, r, SubnetManager, "mlx4_0 port 1").Advice; !strings.Contains(a, "opensm") {
		t.Errorf("INIT: %s", a)
	}
}

// One that is asked for is the only one: its own state makes the verdict.
func TestOneDevice(t *testing.T) {
	fs := counters.NewFS(sysfstest.Tree(t, "mixed-port-down"))
	for _, tt := range []struct {
		device string
		port   int
		want   Health
		layer  Layer
	}{
		{"mlx5_0", 0, Healthy, ""},
		{"mlx5_1", 0, Unusable, Ports},
		{"mlx4_0", 1, Unusable, SubnetManager},
		{"mlx4_0", 3, Unusable, Ports},
		{"mlx5_7", 0, Unusable, Modules},
	} {
		r := examine(t, Options{Sysfs: fs, Filter: counters.Filter{Include: []string{tt.device}}, Port: tt.port})
		if r.Verdict != tt.want || tt.layer != "" && (r.Layer == nil || *r.Layer != tt.layer) {
			t.Errorf("%s port %d: %s: %s, want %s at %q", tt.device, tt.port, r.Verdict, r.Diagnosis, tt.want, tt.layer)
		}
		wellFormed(t, r)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// A host without RDMA is told what it lacks: the RDMA half of a NIC that it has, if there is one.
func TestNothingThere(t *testing.T) {
	root := t.TempDir()
	r := examine(t, Options{Sysfs: counters.NewFS(root)})
	if r.Verdict != Unusable || *r.Layer != Modules {
		t.Errorf("%s: %s", r.Verdict, r.Diagnosis)
	}
	wellFormed(t, r)

	write(t, root+"/bus/pci/drivers/mlx5_core/bind", "")
	write(t, root+"/bus/pci/devices/0000:41:00.0/vendor", "0x15b3\n")
	if err := os.Symlink("../../drivers/mlx5_core", root+"/bus/pci/devices/0000:41:00.0/driver"); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(root+"/class/infiniband", 0o755); err != nil {
		t.Fatal(err)
	}
	r = examine(t, Options{Sysfs: counters.NewFS(root)})
	if a := *find(t, r, Modules, "RDMA devices").Advice; !strings.Contains(a, "modprobe mlx5_ib") || !strings.Contains(a, "0000:41:00.0") {
		t.Errorf("advice %q", a)
	}
}

// GIDs by kind, on a tree that is made sick bit by bit.
func TestGIDs(t *testing.T) {
	port := func(root string) string { return root + "/class/infiniband/mlx5_0/ports/1/" }
	clear := func(t *testing.T, root string, keep func(gid string) bool) {
		rows, err := filepath.Glob(port(root) + "gids/*")
		if err != nil || len(rows) == 0 {
			t.Fatal(rows, err)
		}
		for _, row := range rows {
			if text, err := os.ReadFile(row); err != nil || !keep(string(text)) {
				write(t, row, "0000:0000:0000:0000:0000:0000:0000:0000\n")
			}
		}
	}
	for _, tt := range []struct {
		name  string
		spoil func(t *testing.T, root string)
		want  Verdict
	}{
		{"as it is", func(*testing.T, string) {}, OK},
		{"only link-local", func(t *testing.T, root string) {
			clear(t, root, func(g string) bool { return strings.HasPrefix(g, "fe80") })
		}, Warning},
		{"empty", func(t *testing.T, root string) { clear(t, root, func(string) bool { return false }) }, Failed},
		{"only RoCE v1", func(t *testing.T, root string) {
			types, _ := filepath.Glob(port(root) + "gid_attrs/types/*")
			for _, f := range types {
				write(t, f, "IB/RoCE v1\n")
			}
		}, Failed},
		{"of another namespace", func(t *testing.T, root string) {
			if err := os.RemoveAll(root + "/class/net"); err != nil {
				t.Fatal(err)
			}
		}, Failed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := sysfstest.Tree(t, "pcie-degraded")
			tt.spoil(t, root)
			r := examine(t, Options{Sysfs: counters.NewFS(root)})
			if c := find(t, r, GID, "mlx5_0"); c.Verdict != tt.want {
				t.Errorf("%s, want %s: %s", c.Verdict, tt.want, c.Found)
			}
			if tt.want == Failed && (r.Verdict != Unusable || *r.Layer != GID) {
				t.Errorf("%s: %s", r.Verdict, r.Diagnosis)
			}
		})
	}
}

// docs/doctor.md explains every layer, in their order, and no other.
func TestDocsExplainEveryLayer(t *testing.T) {
	text, err := os.ReadFile("../../docs/doctor.md")
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for _, l := range Layers {
		want = append(want, string(l))
	}
	for _, m := range regexp.MustCompile("(?m)^### `(.+)`$").FindAllStringSubmatch(string(text), -1) {
		got = append(got, m[1])
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("docs/doctor.md (-code +docs):\n%s", diff)
	}
}

// Every check of the environment has its place, or is one that another layer looks at.
func TestEnvironmentChecksHaveALayer(t *testing.T) {
	for _, c := range counters.Checks {
		if _, ok := layerOf[c]; !ok && c != counters.CheckRoCE { // which is gid
			t.Errorf("%s has no layer", c)
		}
	}
}

// A reason that a probe may end in is either about a layer below or about the message itself.
func TestReasonsHaveALayer(t *testing.T) {
	for r, l := range blames {
		if !slices.Contains(probe.Reasons, r) || !slices.Contains(Layers, l) {
			t.Errorf("%s is blamed on %s", r, l)
		}
	}
}

// Few repeats are a blemish, many are a bad path, and it is the share that counts.
func TestJudge(t *testing.T) {
	end := func(n uint64) *probe.EndEvidence {
		return &probe.EndEvidence{
			Classes: map[string]uint64{string(counters.RetransmitLocal): n, string(counters.RetransmitPeer): 50, string(counters.RNR): 0},
			Moved:   map[string][]string{string(counters.RetransmitLocal): {"completer_retry_err"}},
		}
	}
	for _, tt := range []struct {
		name    string
		packets uint64
		local   *probe.EndEvidence
		want    Verdict
	}{
		{"quiet", 2000, end(0), OK},
		{"duplicates alone", 2000, end(0), OK},
		{"one", 2000, end(1), Warning},
		{"two of a hundred", 100, end(2), Warning},
		{"1 %", 2000, end(20), Failed},
		{"many, of more", 1e6, end(20), Warning},
		{"no counters", 2000, nil, Unknown},
		{"other counters", 2000, &probe.EndEvidence{Classes: map[string]uint64{}}, Unknown},
	} {
		e := &trip{examination: &examination{Options: Options{Peer: "b:1"}}, port: &port{device: "mlx5_0", num: 1}, host: "b"}
		e.seen = []observation{{what: "small", packets: tt.packets, evidence: probe.Evidence{Local: tt.local, Remote: end(0)}}}
		e.judge()
		r := e.report([]*port{e.port}, e.port)
		if c := find(t, r, Counters, "mlx5_0 port 1"); c.Verdict != tt.want {
			t.Errorf("%s: %s, want %s: %s", tt.name, c.Verdict, tt.want, c.Found)
		}
		if c := find(t, r, Counters, "b"); c.Verdict != OK {
			t.Errorf("%s: the other end is %s: %s", tt.name, c.Verdict, c.Found)
		}
	}
}

// A driver that hangs costs a line, not the examination.
func TestDeviceThatHangs(t *testing.T) {
	root := sysfstest.Tree(t, "mlx5-ib-ndr")
	fifo, err := filepath.EvalSymlinks(root + "/class/infiniband/mlx5_6/fw_ver")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(fifo), syscall.Mkfifo(fifo, 0o644)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // let the reader go
		if f, err := os.OpenFile(fifo, os.O_WRONLY|syscall.O_NONBLOCK, 0); err == nil {
			f.Close()
		}
	})
	r := examine(t, Options{Sysfs: counters.NewFS(root)})
	if c := find(t, r, Devices, "reads that hang"); c.Verdict != Failed || !strings.Contains(c.Found, "mlx5_6/fw_ver") {
		t.Errorf("%+v", c)
	}
	for _, device := range []string{"mlx5_0", "mlx5_6"} { // of which all else is known
		if c := find(t, r, Ports, device); c.Verdict != OK {
			t.Errorf("%+v", c)
		}
	}
	if r.Verdict != Unhealthy || *r.Layer != Devices {
		t.Errorf("%s: %s", r.Verdict, r.Diagnosis)
	}
}
