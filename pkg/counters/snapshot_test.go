package counters

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func snapshot(t testing.TB, r *PortReader) *Snapshot {
	t.Helper()
	s, err := r.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestIncrease(t *testing.T) {
	const max32 = 1<<32 - 1
	hw := func(v uint64) sample { return sample{group: HW, value: v} }
	pma := func(v uint64, full bool) sample { return sample{group: PMA, value: v, full: full} }
	tests := []struct {
		name          string
		before, after sample
		rise          uint64
		known, least  bool
	}{
		{"still", hw(7), hw(7), 0, true, false},
		{"rise", hw(7), hw(9), 2, true, false},
		{"reset", hw(7), hw(3), 0, false, false},
		{"32-bit wrap", hw(4294967290), hw(5), 11, true, false},
		{"fall from half of 32 bits", hw(1 << 31), hw(5), 0, false, false},
		{"fall from near 2^32 to half of it is no wrap", hw(max32 - 5), hw(1 << 31), 0, false, false},
		{"past 2^32", hw(max32 - 5), hw(max32 + 5), 10, true, false},
		{"64-bit reset", hw(1 << 40), hw(5), 0, false, false},
		{"underflow in the driver", hw(3), hw(math.MaxUint64 - 2), 0, false, false},
		{"driver's counter that may have stopped", hw(max32), hw(max32), 0, false, false},
		{"reaches its highest value", pma(65000, false), pma(65535, true), 535, true, true},
		{"stands at its highest value", pma(65535, true), pma(65535, true), 0, false, false},
		{"cleared from its highest value", pma(65535, true), pma(2, false), 0, false, false},
		{"the PMA's don't wrap", pma(max32-5, false), pma(5, false), 0, false, false},
	}
	for _, tt := range tests {
		rise, known, least := increase(tt.before, tt.after)
		if rise != tt.rise && known || known != tt.known || least != tt.least {
			t.Errorf("%s: %d, known %v, at least %v", tt.name, rise, known, least)
		}
	}
}

// bump sets counters of a port.
func bump(t testing.TB, dir string, values map[string]uint64) {
	t.Helper()
	for path, v := range values {
		write(t, filepath.Join(dir, path), fmt.Sprintf("%d\n", v))
	}
}

func TestDeltaOfMlx5(t *testing.T) {
	fs := open(t, "mlx5-roce-2x100g")
	dir := portDir(t, fs.root, "rocep65s0f1", 1)
	pause := uint64(90112)
	side := fs.ethtool
	fs.ethtool = func(netdev string) (map[string]uint64, error) {
		stats, err := side(netdev)
		if netdev == "enp65s0f1np1" {
			stats["rx_prio3_pause"] = pause
		}
		return stats, err
	}
	r := fs.Port("rocep65s0f1", 1)
	before := snapshot(t, r)
	bump(t, dir, map[string]uint64{
		"hw_counters/packet_seq_err": 3987 + 5, "hw_counters/duplicate_request": 1180 + 2, "hw_counters/out_of_buffer": 0,
		"counters/port_xmit_data": 498765432109 + 1000, "counters/port_xmit_discards": 1, "hw_counters/new_in_firmware": 4,
	})
	remove(t, filepath.Join(dir, "hw_counters", "np_cnp_sent"))
	pause += 10
	d := Sub(before, snapshot(t, r))

	if d.Device != "rocep65s0f1" || d.Port != 1 || d.Source != Sysfs || d.Seconds < 0 {
		t.Errorf("%+v", d)
	}
	moved := maps.Clone(d.Counters)
	maps.DeleteFunc(moved, func(_ string, v uint64) bool { return v == 0 })
	want := map[string]uint64{"packet_seq_err": 5, "duplicate_request": 2, "port_xmit_data": 1000, "port_xmit_discards": 1, "ethtool/rx_prio3_pause": 10}
	if diff := cmp.Diff(want, moved); diff != "" {
		t.Errorf("counters: %s", diff)
	}
	// Fell, appeared, vanished: none of them is a zero.
	if diff := cmp.Diff([]string{"new_in_firmware", "np_cnp_sent", "out_of_buffer"}, d.Unknown); diff != "" {
		t.Errorf("unknown: %s", diff)
	}
	classes := map[Class]uint64{RetransmitLocal: 5, RetransmitPeer: 2, Sequence: 5, RNR: 0, Timeout: 0, Congestion: 0, Physical: 0, Pause: 10, Discard: 1}
	if diff := cmp.Diff(classes, d.Classes); diff != "" { // no_buffer can't be told
		t.Errorf("classes: %s", diff)
	}
	names := map[Class][]string{RetransmitLocal: {"packet_seq_err"}, RetransmitPeer: {"duplicate_request"}, Sequence: {"packet_seq_err"},
		Pause: {"ethtool/rx_prio3_pause"}, Discard: {"port_xmit_discards"}}
	if diff := cmp.Diff(names, d.Moved); diff != "" {
		t.Errorf("moved: %s", diff)
	}
	if diff := cmp.Diff(map[string]uint64{TxBytes: 4000, RxBytes: 0, TxPackets: 0, RxPackets: 0}, d.Traffic); diff != "" {
		t.Errorf("traffic: %s", diff)
	}
}

func TestDeltaUnits(t *testing.T) {
	tests := []struct {
		tree, device string
		values       map[string]uint64
		traffic      map[string]uint64
	}{
		{"hfi1-opa", "hfi1_0", map[string]uint64{"counters/port_xmit_data": 412233445566 + 10}, map[string]uint64{TxBytes: 80, RxBytes: 0, TxPackets: 0, RxPackets: 0}},
		{"counters-ext-oldkernel", "mlx4_0", map[string]uint64{"counters_ext/port_xmit_data_64": 771122334455 + 10}, map[string]uint64{TxBytes: 40, RxBytes: 0, TxPackets: 0, RxPackets: 0}},
		{"irdma-roce-iwarp", "rocep177s0f0", map[string]uint64{"hw_counters/ip6OutOctets": 4096 + 10, "hw_counters/ip4OutOctets": 799345678901 + 1}, map[string]uint64{TxBytes: 11, RxBytes: 0, TxPackets: 0, RxPackets: 0}},
		{"hns-roce", "hns_0", map[string]uint64{"hw_counters/tx_pkt": 90112331 + 3}, map[string]uint64{TxPackets: 3, RxPackets: 0}},
		// The counter stopped within: its bytes can't be told.
		{"saturated-32bit", "mthca0", map[string]uint64{"counters/port_rcv_data": math.MaxUint32}, map[string]uint64{RxPackets: 0}},
	}
	for _, tt := range tests {
		fs := open(t, tt.tree)
		r := fs.Port(tt.device, 1)
		before := snapshot(t, r)
		bump(t, portDir(t, fs.root, tt.device, 1), tt.values)
		if diff := cmp.Diff(tt.traffic, Sub(before, snapshot(t, r)).Traffic); diff != "" {
			t.Errorf("%s: %s", tt.device, diff)
		}
	}
}

// rxe counts packets only; its bytes and drops are those of the netdev.
func TestDeltaOfSoftwareDevice(t *testing.T) {
	fs := open(t, "rxe")
	r := fs.Port("rxe0", 1)
	before := snapshot(t, r)
	bump(t, portDir(t, fs.root, "rxe0", 1), map[string]uint64{"hw_counters/sent_pkts": 5140 + 7, "hw_counters/rcvd_seq_err": 2})
	bump(t, filepath.Join(fs.root, "devices", "virtual", "net", "va", "statistics"), map[string]uint64{"tx_bytes": 1500 + 700, "rx_dropped": 3})
	d := Sub(before, snapshot(t, r))
	if diff := cmp.Diff(map[string]uint64{TxBytes: 700, RxBytes: 0, TxPackets: 7, RxPackets: 0}, d.Traffic); diff != "" {
		t.Error(diff)
	}
	if d.Classes[Discard] != 3 || d.Classes[RetransmitLocal] != 2 || d.Classes[Sequence] != 2 {
		t.Errorf("classes: %v", d.Classes)
	}
	if _, ok := d.Classes[Congestion]; ok {
		t.Error("rxe has no signal of congestion, which is not no congestion")
	}
}

func TestDeltaLeavesGaugesOut(t *testing.T) {
	fs := open(t, "bnxt-re")
	r := fs.Port("bnxt_re0", 1)
	before := snapshot(t, r)
	bump(t, portDir(t, fs.root, "bnxt_re0", 1), map[string]uint64{"hw_counters/active_qps": 3})
	d := Sub(before, snapshot(t, r))
	if _, ok := d.Counters["active_qps"]; ok || slices.Contains(d.Unknown, "active_qps") {
		t.Error("active_qps is a gauge")
	}
	if !IsGauge("bnxt_re", "active_qps") || IsGauge("bnxt_re", "rx_pkts") || IsGauge("new_driver", "active_qps") {
		t.Error("IsGauge")
	}
}

func TestDeltaIsAtLeast(t *testing.T) {
	fs := open(t, "saturated-32bit")
	r := fs.Port("mlx5_0", 1)
	before := snapshot(t, r)
	bump(t, portDir(t, fs.root, "mlx5_0", 1), map[string]uint64{"counters/port_xmit_discards": 65535, "hw_counters/local_ack_timeout_err": 5})
	d := Sub(before, snapshot(t, r))
	if d.Counters["port_xmit_discards"] != 1 || !slices.Contains(d.Unknown, "port_xmit_discards") {
		t.Errorf("port_xmit_discards reached its top: %d, unknown %v", d.Counters["port_xmit_discards"], d.Unknown)
	}
	if _, ok := d.Counters["symbol_error"]; ok || !slices.Contains(d.Unknown, "symbol_error") {
		t.Error("a counter that stands at its top can't be told")
	}
	if d.Counters["local_ack_timeout_err"] != 11 || d.Classes[Timeout] != 11 {
		t.Errorf("local_ack_timeout_err wrapped: %d, class %d, want 11", d.Counters["local_ack_timeout_err"], d.Classes[Timeout])
	}
	if v, ok := d.Classes[Physical]; !ok || v != 0 {
		t.Errorf("physical = %d, %v: one of its counters is still good", v, ok)
	}
}

// mlx5 in switchdev mode has its list at the device, and newer kernels prefix the port's.
func TestDeltaOfSwitchdev(t *testing.T) {
	dev := function + "/infiniband/mlx5_0/"
	tree := onFunction("mlx5_0", "mlx5_core", function).add(withPort(function, "mlx5_0", 1, "Ethernet",
		layout{"hw_counters/vport_out_of_buffer": "1"})).add(layout{
		dev + "hw_counters/packet_seq_err": "1", dev + "hw_counters/out_of_buffer": "1", dev + "hw_counters/rx_write_requests": "1",
	})
	fs := tree.fs(t)
	r := fs.Port("mlx5_0", 1)
	before := snapshot(t, r)
	bump(t, filepath.Join(fs.root, dev), map[string]uint64{
		"hw_counters/packet_seq_err": 3, "hw_counters/out_of_buffer": 2, "hw_counters/rx_write_requests": 9, "ports/1/hw_counters/vport_out_of_buffer": 2,
	})
	d := Sub(before, snapshot(t, r))
	if d.Classes[RetransmitLocal] != 2 || d.Counters["device/packet_seq_err"] != 2 {
		t.Errorf("classes %v of counters %v", d.Classes, d.Counters)
	}
	if d.Classes[NoBuffer] != 1 {
		t.Errorf("no_buffer = %d: the port's counter is the device's too, and counts once", d.Classes[NoBuffer])
	}
}

func TestSameNameInTwoDirectories(t *testing.T) {
	fs := onFunction("mlx5_0", "mlx5_core", function).add(withPort(function, "mlx5_0", 1, "InfiniBand",
		layout{"counters/link_downed": "1", "hw_counters/link_downed": "1"})).fs(t)
	r := fs.Port("mlx5_0", 1)
	before := snapshot(t, r)
	bump(t, portDir(t, fs.root, "mlx5_0", 1), map[string]uint64{"counters/link_downed": 2, "hw_counters/link_downed": 5})
	d := Sub(before, snapshot(t, r))
	if d.Counters["link_downed"] != 4 || d.Counters["counters/link_downed"] != 1 {
		t.Errorf("%v", d.Counters)
	}
	if got := d.Moved[Physical]; d.Classes[Physical] != 1 || !slices.Equal(got, []string{"counters/link_downed"}) {
		t.Errorf("physical = %d by %v", d.Classes[Physical], got)
	}
}

func TestDeltaThatCannotBeTold(t *testing.T) {
	fs := open(t, "mlx5-ib-ndr")
	a, b := snapshot(t, fs.Port("mlx5_0", 1)), snapshot(t, fs.Port("mlx5_6", 1))
	if Sub(nil, a) != nil || Sub(a, nil) != nil || Sub(a, b) != nil {
		t.Error("a delta of nothing, or of two ports")
	}
	for _, r := range []*PortReader{fs.Port("nullverbs0", 1), fs.Port("mlx5_0", 2), fs.Port("../../net", 1), fs.Port("", 1)} {
		if s, err := r.Snapshot(t.Context()); s != nil || !errors.Is(err, ErrNotVisible) {
			t.Errorf("%v: %v, %v, want not visible", r.key, s, err)
		}
	}
}

// Between the two snapshots the device was taken away and came back.
func TestDeltaAcrossReplacement(t *testing.T) {
	fs := open(t, "mlx5-ib-ndr")
	r := fs.Port("mlx5_0", 1)
	before := snapshot(t, r)
	dir := filepath.Dir(filepath.Dir(portDir(t, fs.root, "mlx5_0", 1)))
	if err := os.Rename(dir, dir+".gone"); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(dir, os.DirFS(dir+".gone")); err != nil {
		t.Fatal(err)
	}
	d := Sub(before, snapshot(t, r))
	if len(d.Counters) != 0 || len(d.Classes) != 0 || len(d.Unknown) == 0 {
		t.Errorf("counters %v, classes %v, %d unknown", d.Counters, d.Classes, len(d.Unknown))
	}
}

// Of siw nothing is known but what its netdev says, which the tree doesn't name.
func TestDeltaOfDeviceWithoutCounters(t *testing.T) {
	r := open(t, "siw").Port("siw0", 1)
	d := Sub(snapshot(t, r), snapshot(t, r))
	if d == nil || len(d.Counters) != 0 || len(d.Classes) != 0 || d.Source != "" {
		t.Errorf("%+v", d)
	}
}
