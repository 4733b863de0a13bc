package counters

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestParsers(t *testing.T) {
	num := func(v float64, ok bool) any {
		if !ok {
			return nil
		}
		return v
	}
	integer := func(v int, ok bool) any { return num(float64(v), ok) }
	rate := func(s string) any { return num(parseRate(s)) }
	gts := func(s string) any { return num(parseGTS(s)) }
	width := func(s string) any { return integer(parseWidth(s)) }
	lid := func(s string) any { return integer(parseLID(s)) }
	state := func(s string) any { return integer(func() (int, bool) { n, _, ok := parseState(s); return n, ok }()) }
	counter := func(s string) any {
		return num(func() (float64, bool) { v, ok := parseCounter(s); return float64(v), ok }())
	}
	mtu := func(s string) any { n, _ := parseInt(s); return integer(rdmaMTU(n)) }

	tests := []struct {
		what  string
		parse func(string) any
		text  string
		want  any
	}{
		{"rate", rate, "56 Gb/sec (4X FDR)", 56.0},
		{"rate", rate, "2.5 Gb/sec (1X SDR)", 2.5},
		{"rate", rate, "inf Gb/sec", nil},
		{"rate", rate, "1e3 Gb/sec", nil},
		{"rate", rate, "-1 Gb/sec", nil},
		{"rate", rate, "100 Mb/sec", nil},
		{"rate", rate, "", nil},
		{"PCIe speed", gts, "16.0 GT/s PCIe", 16.0},
		{"PCIe speed", gts, "8 GT/s", 8.0},
		{"PCIe speed", gts, "2.5 GT/s", 2.5},
		{"PCIe speed", gts, "Unknown", nil},
		{"PCIe speed", gts, "Unknown speed", nil},
		{"PCIe width", width, "16", 16.0},
		{"PCIe width", width, "0", nil},
		{"PCIe width", width, "255", nil},
		{"LID", lid, "0x1c", 28.0},
		{"LID", lid, "0xffff", 65535.0},
		{"LID", lid, "-1", nil},
		{"state", state, "4: ACTIVE", 4.0},
		{"state", state, "5: ACTIVE_DEFER", 5.0},
		{"state", state, "ACTIVE", nil},
		{"state", state, "-4: ACTIVE", nil},
		{"counter", counter, "0", 0.0},
		{"counter", counter, "N/A (no PMA)", nil},
		{"counter", counter, "+1", nil},
		{"counter", counter, "18446744073709551616", nil},
		{"MTU", mtu, "576", 256.0},
		{"MTU", mtu, "1500", 1024.0},
		{"MTU", mtu, "4200", 4096.0},
		{"MTU", mtu, "9000", 4096.0},
		{"MTU", mtu, "300", nil},
	}
	for _, tt := range tests {
		if got := tt.parse(tt.text); got != tt.want {
			t.Errorf("%s %q: %v, want %v", tt.what, tt.text, got, tt.want)
		}
	}
	for s, want := range map[string]bool{
		"0000:41:00.0": true, "7870:00:00.0": true, "10000:e1:00.7": true,
		"0000:41:00.8": false, "mlx5_core.sf.4": false, "pci0000:40": false, "41:00.0": false, "0000:41:00": false,
	} {
		if isBDF(s) != want {
			t.Errorf("isBDF(%q) = %v", s, !want)
		}
	}
	for _, pair := range [][2]string{{"eth2", "eth10"}, {"mlx5_0", "mlx5_1"}, {"a", "a0"}, {"a1b2", "a1b10"}, {"a01", "a1"}, {"9", "10"}} {
		if naturalCompare(pair[0], pair[1]) >= 0 || naturalCompare(pair[1], pair[0]) <= 0 {
			t.Errorf("%q must come before %q", pair[0], pair[1])
		}
	}
}

// FuzzParsers holds each parser to what its callers rely on.
func FuzzParsers(f *testing.F) {
	for _, s := range []string{"4: ACTIVE", "100 Gb/sec (4X EDR)", "16.0 GT/s PCIe", "255", "0x1c", "N/A (no PMA)", gidV4, "0000:41:00.0", "rx_prio3_pause", "caf\xe9\x00", strings.Repeat("é", 100), "0-3,8", "always [madvise] never",
		"RxErr 0\nTOTAL_ERR_COR 3", "Max locked memory 1 2 bytes", "eth10: 5", "Global tclass=106", string(express(256, 0, 2, 0x2910)), string(withACS(express(4096, 6, 2, 0), 4))} {
		f.Add(s, "eth10")
	}
	f.Fuzz(func(t *testing.T, s, other string) {
		if c := sanitise(s); !utf8.ValidString(c) || len(c) > maxText || sanitise(c) != c {
			t.Errorf("sanitise(%q) = %q", s, c)
		}
		if c := sanitiseName(s); !utf8.ValidString(c) || len(s) > 0 && c == "" {
			t.Errorf("sanitiseName(%q) = %q", s, c)
		}
		if v, ok := parseRate(s); ok && !(v >= 0 && v < 1e9) {
			t.Errorf("parseRate(%q) = %v", s, v)
		}
		if v, ok := parseGTS(s); ok && !(v > 0 && v < 1e9) {
			t.Errorf("parseGTS(%q) = %v", s, v)
		}
		if v, ok := parseWidth(s); ok && (v < 1 || v > 254) {
			t.Errorf("parseWidth(%q) = %v", s, v)
		}
		if v, ok := parseLID(s); ok && v < 0 {
			t.Errorf("parseLID(%q) = %v", s, v)
		}
		if id, _, ok := parseState(s); ok && id < 0 {
			t.Errorf("parseState(%q) = %v", s, id)
		}
		if g, ok := parseGID(s); ok && !g.IsValid() {
			t.Errorf("parseGID(%q) = %v", s, g)
		}
		if n, ok := parseNetdev(s); ok && (strings.Contains(n, "/") || n == "..") {
			t.Errorf("parseNetdev(%q) = %q", s, n)
		}
		if isBDF(s) && bdfOrder(s) == 0 && strings.Trim(s, "0:.") != "" {
			t.Errorf("bdfOrder(%q) = 0", s)
		}
		if p := patternOf(s); utf8.ValidString(s) && p == s && strings.ContainsAny(s, "0123456789") {
			t.Errorf("patternOf(%q) keeps its digits", s)
		}
		if a, b := naturalCompare(s, other), naturalCompare(other, s); a != -b || (a == 0) != (s == other) {
			t.Errorf("naturalCompare(%q, %q) = %d, and %d the other way", s, other, a, b)
		}
		parseCounter(s)
		if list, ok := parseList(s); ok && (len(list) > 2*maxCPUs || slices.ContainsFunc(list, func(c int) bool { return c < 0 })) {
			t.Errorf("parseList(%q) = %d CPUs", s, len(list))
		}
		if n := parseLanes(s); n != nil && *n < 1 {
			t.Errorf("parseLanes(%q) = %d", s, *n)
		}
		if v, ok := parseSpeed(s); ok && v < 1 {
			t.Errorf("parseSpeed(%q) = %d", s, v)
		}
		if v, ok := parseUptime(s); ok && !(v >= 0) {
			t.Errorf("parseUptime(%q) = %v", s, v)
		}
		if v, ok := parseChosen(s); ok && (v == "" || !utf8.ValidString(v)) {
			t.Errorf("parseChosen(%q) = %q", s, v)
		}
		if v, ok := parseTrafficClass(s); ok && (v < 0 || v > 255) {
			t.Errorf("parseTrafficClass(%q) = %d", s, v)
		}
		if v, ok := statusLine(other)(s); ok && (v == "" || !utf8.ValidString(v)) {
			t.Errorf("statusLine(%q)(%q) = %q", other, s, v)
		}
		parseAER(s)
		parseMemlock(s)
		c := configSpace{strings.NewReader(s)}
		if at, err := c.express(); err == nil && at != 0 && (at < 0x40 || at > 0xff) {
			t.Errorf("express(%q) = %#x", s, at)
		}
		if at, err := c.extended(extCapACS); err == nil && at != 0 && (at < 0x100 || at > 0xfff) {
			t.Errorf("extended(%q) = %#x", s, at)
		}
	})
}

// FuzzTree puts arbitrary bytes into every file that is read.
func FuzzTree(f *testing.F) {
	f.Add([]byte("4: ACTIVE\n"))
	f.Add([]byte("0"))
	f.Add([]byte(""))
	f.Add([]byte("../../../x"))
	f.Add([]byte(gidV4))
	f.Add([]byte("\xff\xfe\x00"))
	f.Add([]byte("18446744073709551615\n"))
	paths := []string{
		"node_type", "node_guid", "fw_ver", "board_id", "node_desc", "parent", "ports/1/state", "ports/1/phys_state", "ports/1/link_layer",
		"ports/1/rate", "ports/1/lid", "ports/1/sm_lid", "ports/1/gids/0", "ports/1/gid_attrs/types/0", "ports/1/gid_attrs/ndevs/0",
		"ports/1/counters/port_xmit_data", "ports/1/counters/symbol_error", "ports/1/hw_counters/sent_pkts", "ports/1/hw_counters/lifespan",
		"hw_counters/x", "device",
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		fs := NewFS(t.TempDir())
		fs.Proc = t.TempDir()
		dir := filepath.Join(fs.root, "class", "infiniband", "rxe0")
		for _, p := range paths {
			write(t, filepath.Join(dir, p), string(text))
		}
		for _, p := range []string{
			"devices/system/node/node0/cpulist", "devices/system/node/node0/distance", "devices/system/cpu/cpu0/cpufreq/scaling_governor",
			"devices/system/cpu/cpu0/cpufreq/scaling_max_freq", "devices/system/cpu/cpu0/cpuidle/state0/name", "devices/system/cpu/cpu0/cpuidle/state0/latency",
			"devices/system/cpu/cpu0/cpuidle/state0/disable", "kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "kernel/mm/transparent_hugepage/enabled",
		} {
			write(t, filepath.Join(fs.root, p), string(text))
		}
		for _, p := range []string{"uptime", "self/maps", "self/status", "self/limits", "sys/kernel/osrelease"} {
			write(t, filepath.Join(fs.Proc, p), string(text))
		}
		inv := mustInventory(t, fs)
		if len(inv.Devices) != 1 || len(inv.Devices[0].Ports) != 1 {
			t.Fatalf("devices: %s", asNames(inv))
		}
		if b, err := json.Marshal(inv); err != nil || !utf8.Valid(b) {
			t.Errorf("JSON: %v", err)
		}
		a, err := fs.Port("rxe0", 1).Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		e := environment(t, fs, "rxe0", 1)
		if b, err := json.Marshal(e); err != nil || !utf8.Valid(b) {
			t.Errorf("JSON: %v", err)
		}
		for _, c := range e.Checks() {
			if !utf8.ValidString(c.Found+c.Expected) || !slices.Contains(Checks, c.Name) {
				t.Errorf("check %+v", c)
			}
		}
		if f := e.Fingerprint(); len(f.ID) != 16 {
			t.Errorf("fingerprint %v", f)
		}
		for name, v := range Sub(a, a).Counters {
			if v != 0 {
				t.Errorf("%s rose by %d within one snapshot", name, v)
			}
		}
	})
}
