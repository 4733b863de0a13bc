package probe

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

func TestCompareNatural(t *testing.T) {
	ordered := []string{"", "0", "1", "1a", "2", "10", "irdma0", "mlx5_", "mlx5_0", "mlx5_1", "mlx5_2", "mlx5_10", "mlx5_10a", "mlx5_bond_0", "mlx10_0", "rocep65s0f0", "rocep65s0f1", "rocep129s0f0"}
	for i, a := range ordered {
		for j, b := range ordered {
			got, want := compareNatural(a, b), 0
			switch {
			case i < j:
				want = -1
			case i > j:
				want = 1
			}
			if got != want {
				t.Errorf("%q and %q compare as %d, want %d", a, b, got, want)
			}
		}
	}
	shuffled := slices.Clone(ordered)
	rand.New(rand.NewPCG(1, 1)).Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
	slices.SortFunc(shuffled, compareNatural)
	if diff := cmp.Diff(ordered, shuffled); diff != "" {
		t.Errorf("sorted (-want +got):\n%s", diff)
	}
}

// A number of any length is a number.
func TestCompareNaturalLongNumbers(t *testing.T) {
	if compareNatural("a99999999999999999999", "a100000000000000000000") != -1 {
		t.Error("21 digits are more than 20")
	}
}

// Names that differ never compare as equal: the order of ports, and so of rails, would be left to chance.
func TestCompareNaturalIsStrict(t *testing.T) {
	for _, p := range [][2]string{{"mlx5_1", "mlx5_01"}, {"a0b1", "a00b1"}} {
		if a, b := compareNatural(p[0], p[1]), compareNatural(p[1], p[0]); a == 0 || a != -b {
			t.Errorf("%q and %q compare as %d and %d", p[0], p[1], a, b)
		}
	}
}

func TestOpenReason(t *testing.T) {
	for errno, want := range map[syscall.Errno]Reason{
		syscall.EACCES: Permission, syscall.EPERM: Permission, syscall.ENOENT: NoCharDevice, syscall.ENXIO: NoCharDevice,
		syscall.ENODEV: DeviceRemoved, syscall.EIO: DeviceRemoved, syscall.ENOMEM: ResourceLimit, syscall.EMFILE: ResourceLimit,
	} {
		err := fmt.Errorf("open: %w", &verbs.OpError{Op: "open device", Device: "mlx5_0", Errno: errno})
		if got := openReason(err); got != want {
			t.Errorf("%s: %s, want %s", errno, got, want)
		}
	}
}

func TestWireAddresses(t *testing.T) {
	p := &LocalPort{GIDs: []verbs.GID{
		{Index: 3, Addr: netip.MustParseAddr("10.9.0.1"), Type: verbs.GIDRoCEv2}, {Index: 1, Addr: netip.MustParseAddr("10.9.0.1"), Type: verbs.GIDRoCEv1},
		{Index: 0, Addr: netip.MustParseAddr("fe80::1"), Type: verbs.GIDUnknown},
	}}
	for i, g := range wireGIDs(p.GIDs) {
		if got := p.gidIndex(&g); got != p.GIDs[i].Index {
			t.Errorf("%v came back as index %d, want %d", g, got, p.GIDs[i].Index)
		}
	}
	if got := p.gidIndex(&control.GID{Addr: netip.MustParseAddr("10.9.0.2"), Type: "RoCE v2"}); got != -1 {
		t.Errorf("a foreign GID has index %d", got)
	}
	if got := p.gidIndex(nil); got != -1 {
		t.Errorf("no GID has index %d", got)
	}
	if many := wireGIDs(make([]verbs.GID, 1000)); len(many) != control.MaxGIDs {
		t.Errorf("%d GIDs are offered, a peer takes %d", len(many), control.MaxGIDs)
	}
	if none := wireGIDs(nil); none == nil {
		t.Error("no GIDs are null, not an empty list")
	}

	e := control.Endpoint{LID: 7, QPs: []control.QP{{QPN: 17, PSN: 5}, {QPN: 18, PSN: 6}}, RKey: 9, Addr: 1 << 63, Stride: 4096, QKey: 3}
	want := verbs.Address{
		GID: netip.MustParseAddr("::ffff:10.9.0.2").As16(), GIDType: verbs.GIDRoCEv2, LID: 7, QPN: []uint32{17, 18}, PSN: []uint32{5, 6}, RKey: 9, Addr: 1 << 63, Stride: 4096, QKey: 3,
	}
	if diff := cmp.Diff(want, peerAddress(&e, &control.GID{Addr: netip.MustParseAddr("10.9.0.2"), Type: "RoCE v2"})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Each end may have as many reads under way as the other answers.
func TestPathTakesTheSmallerOfBothEnds(t *testing.T) {
	a, b := &control.Endpoint{RDAtom: 16, DestRDAtom: 4}, &control.Endpoint{RDAtom: 8, DestRDAtom: 128}
	req := &control.OpenRequest{Timeout: 14, Retries: 6, RNRRetry: 7, ServiceLevel: 3, TrafficClass: 106, FlowLabel: 5}
	pa, pb := path(req, 1, 1024, a, b), path(req, 2, 1024, b, a)
	if pa.RDAtom != 16 || pa.DestRDAtom != 4 || pb.RDAtom != 4 || pb.DestRDAtom != 16 {
		t.Errorf("%+v and %+v", pa, pb)
	}
	if pa.RDAtom > pb.DestRDAtom || pb.RDAtom > pa.DestRDAtom {
		t.Error("one end may send more reads than the other answers")
	}
	pa.GIDIndex, pa.RDAtom, pa.DestRDAtom = pb.GIDIndex, pb.RDAtom, pb.DestRDAtom
	if diff := cmp.Diff(pa, pb); diff != "" {
		t.Errorf("the ends differ in more than that:\n%s", diff)
	}
}

func TestRandomPSNs(t *testing.T) {
	seen := map[uint32]bool{}
	for _, psn := range randomPSNs(1024) {
		if psn >= 1<<24 {
			t.Errorf("PSN %#x has more than 24 bits", psn)
		}
		seen[psn] = true
	}
	if len(seen) < 1000 {
		t.Errorf("%d different ones of 1024", len(seen))
	}
}

// The responder derives its end from the request; both must fit each other.
func TestEndpointSpecs(t *testing.T) {
	for _, tt := range []struct {
		kind               Kind
		op                 verbs.Op
		bothWays           bool
		rxInitiator, rxPer int
	}{
		{Latency, verbs.Write, true, 0, 0},
		{Latency, verbs.Read, false, 0, 0},
		{Latency, verbs.Send, true, 16, 16},
		{Bandwidth, verbs.Write, false, 0, 0},
		{Bandwidth, verbs.Read, false, 0, 0},
		{Bandwidth, verbs.Send, false, 0, 16},
		{MessageRate, verbs.Send, false, 0, 16},
	} {
		spec := Spec{Kind: tt.kind, Transport: verbs.RC, Op: tt.op, QPs: 2, RxDepth: 16}
		here, there := spec.endpoint(true, 4096), spec.endpoint(false, 4096)
		if here.BothWays != tt.bothWays || there.BothWays != tt.bothWays {
			t.Errorf("%s of %s: both ways %t and %t", tt.kind, tt.op, here.BothWays, there.BothWays)
		}
		if here.RxDepth != tt.rxInitiator || there.RxDepth != tt.rxPer {
			t.Errorf("%s of %s: %d receives here, %d there", tt.kind, tt.op, here.RxDepth, there.RxDepth)
		}
		if here.Initiator == there.Initiator || here.QPs != there.QPs || here.MaxMsg != there.MaxMsg {
			t.Errorf("%s of %s: %+v and %+v", tt.kind, tt.op, here, there)
		}
	}
}

// What is counted against limits.memory is not less than what is taken.
func TestFootprint(t *testing.T) {
	for _, tt := range []struct {
		es    verbs.EndpointSpec
		least int64
	}{
		{verbs.EndpointSpec{QPs: 1, MaxMsg: 1, TxDepth: 1}, 2 * 4096},
		{verbs.EndpointSpec{QPs: 1024, MaxMsg: 8, TxDepth: 1}, 1024 * 2 * 4096},
		{verbs.EndpointSpec{QPs: 2, MaxMsg: 1 << 30, TxDepth: 1}, 4 << 30},
		{verbs.EndpointSpec{QPs: 1024, MaxMsg: 8, TxDepth: 1, RxDepth: 1 << 16}, 1024 << 16 * 64},
	} {
		if got := footprint(tt.es); got < tt.least {
			t.Errorf("%+v counts as %d bytes, takes at least %d", tt.es, got, tt.least)
		}
	}
}

func TestSeconds(t *testing.T) {
	if got := seconds(0.3); got != 300*time.Millisecond {
		t.Errorf("0.3 s are %s", got)
	}
}

// Like rails meet like; a host with more rails than its peer spreads over the peer's; shifts come round on the peer.
func TestRails(t *testing.T) {
	four := []string{"0", "1", "2", "3"}
	for _, tt := range []struct {
		rail  string
		shift int
		rails []string
		want  int
	}{
		{"0", 0, four, 0},
		{"3", 0, four, 3},
		{"3", 1, four, 0},
		{"2", 6, four, 0},
		{"5", 0, four, 1},
		{"7", 0, []string{"0"}, 0},
		{"2", 0, []string{"0", "2"}, 1}, // one of them is of another fabric
		{"3", 0, []string{"0", "2"}, 1},
		{"", 3, four, 0},
		{"north", 1, []string{"south", "north"}, 1},
		{"east", 1, []string{"south", "north"}, 0},
		{"-1", 0, four, 0},
	} {
		if got := matchRail(tt.rails, shifted(tt.rail, tt.shift)); got != tt.want {
			t.Errorf("rail %q shifted by %d meets %v at %d, want %d", tt.rail, tt.shift, tt.rails, got, tt.want)
		}
	}
}

func TestFirstPSN(t *testing.T) {
	n := Node{FirstPSN: func() uint32 { return 1<<24 + 7 }}
	if got := n.psns(2); len(got) != 2 || got[0] != 7 || got[1] != 7 {
		t.Errorf("%v, want the 24 bits that were given", got)
	}
	n.FirstPSN = nil
	if got := n.psns(2); len(got) != 2 || got[0] == got[1] {
		t.Errorf("%v, want two at random", got)
	}
}
