package probe

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// moved is evidence in which counters of one class grew.
func moved(class counters.Class, rises map[string]uint64) *EndEvidence {
	e := evidence(rises, nil, nil)
	for name, v := range rises {
		e.Classes[string(class)] += v
		e.Moved[string(class)] = append(e.Moved[string(class)], name)
	}
	return e
}

func passed(traffic map[string]uint64) *EndEvidence {
	e := evidence(nil, nil, nil)
	e.Traffic = traffic
	return e
}

// A tolerance is for all counters of a taint at one end, and each end has its own.
func TestTolerances(t *testing.T) {
	two := map[string]uint64{"a": 3, "b": 4}
	packets := ownTraffic{packets: 1000}
	for _, tt := range []struct {
		name      string
		tolerance Tolerances
		own       ownTraffic
		evidence  Evidence
		want      []Taint
		limit     uint64 // of the first detail
	}{
		{"any increase", nil, packets, Evidence{Local: moved(counters.Physical, map[string]uint64{"a": 1})}, []Taint{TaintLinkErrors}, 0},
		{"as many as tolerated", Tolerances{TaintRetransmit: 7}, packets, Evidence{Local: moved(counters.RetransmitLocal, two)}, []Taint{}, 0},
		{"one more", Tolerances{TaintRetransmit: 6}, packets, Evidence{Local: moved(counters.RetransmitLocal, two)}, []Taint{TaintRetransmit}, 6},
		{"ends are not added up", Tolerances{TaintRNR: 7}, packets, Evidence{Local: moved(counters.RNR, two), Remote: moved(counters.RNR, two)}, []Taint{}, 0},
		{"a few marks are normal", nil, packets, Evidence{Remote: moved(counters.Congestion, map[string]uint64{"np_cnp_sent": 10})}, []Taint{}, 0},
		{"more are not", nil, packets, Evidence{Remote: moved(counters.Congestion, map[string]uint64{"np_cnp_sent": 11})}, []Taint{TaintCongestion}, 10},
		{"a share of few packets is none", nil, ownTraffic{packets: 99}, Evidence{Local: moved(counters.Pause, map[string]uint64{"rx_prio3_pause": 1})}, []Taint{TaintPause}, 0},
		{"a share of 0", Tolerances{}, packets, Evidence{Local: moved(counters.Pause, map[string]uint64{"rx_prio3_pause": 1})}, []Taint{TaintPause}, 0},
		{"sums that overflow", Tolerances{TaintDiscards: 9}, packets, Evidence{Local: moved(counters.Discard, map[string]uint64{"a": 1 << 63, "b": 1 << 63})}, []Taint{TaintDiscards}, 9},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := Result{Outcome: OK, Taints: []Taint{}, own: tt.own, Evidence: tt.evidence}
			r.taint(tt.tolerance)
			if diff := cmp.Diff(tt.want, r.Taints); diff != "" {
				t.Fatalf("taints (-want +got):\n%s", diff)
			}
			if (r.Outcome == Tainted) != (len(tt.want) > 0) {
				t.Errorf("outcome %s", r.Outcome)
			}
			if len(r.TaintLog) > 0 && r.TaintLog[0].Limit != tt.limit {
				t.Errorf("limit %d, want %d", r.TaintLog[0].Limit, tt.limit)
			}
		})
	}
}

func TestForeignTraffic(t *testing.T) {
	const mb = 1_000_000
	fast := ownTraffic{local: flows{tx: 100 * mb, rx: 2 * mb}, seconds: 0.01, rate: 12.5e9} // 100 MB of the 125 that fit
	slow := ownTraffic{local: flows{tx: 100 * mb, rx: 2 * mb}, seconds: 10}                 // rate unknown
	quiet := ownTraffic{local: flows{tx: mb, rx: mb}, seconds: 1, rate: 12.5e9}
	bytes := func(tx, rx uint64) *EndEvidence {
		return passed(map[string]uint64{counters.TxBytes: tx, counters.RxBytes: rx})
	}
	onNetdev := func(tx, rx uint64) *EndEvidence {
		return evidence(map[string]uint64{"netdev/tx_bytes": tx, "netdev/rx_bytes": rx}, nil, nil)
	}
	for _, tt := range []struct {
		name     string
		own      ownTraffic
		evidence Evidence
		want     []TaintDetail
	}{
		{"all the session's", fast, Evidence{Local: bytes(100*mb, 2*mb), Remote: bytes(2*mb, 100*mb)}, nil},
		{"less than it could be: headers are counted generously", fast, Evidence{Local: bytes(90*mb, mb)}, nil},
		{"2 % of the port", fast, Evidence{Local: bytes(102*mb, 4*mb)}, nil},
		{"more, sent", fast, Evidence{Local: bytes(103*mb, 2*mb)},
			[]TaintDetail{{Taint: TaintForeignTraffic, Side: "local", Counter: "tx_bytes", Delta: 3 * mb, Limit: 25 * mb / 10}}},
		{"more, received: full duplex", fast, Evidence{Local: bytes(100*mb, 90*mb)},
			[]TaintDetail{{Taint: TaintForeignTraffic, Side: "local", Counter: "rx_bytes", Delta: 88 * mb, Limit: 25 * mb / 10}}},
		{"at the peer, whose directions are the other way round", fast, Evidence{Remote: bytes(2*mb, 150*mb)},
			[]TaintDetail{{Taint: TaintForeignTraffic, Side: "remote", Counter: "rx_bytes", Delta: 50 * mb, Limit: 25 * mb / 10}}},
		{"of the session's own bytes where the rate is unknown", slow, Evidence{Local: bytes(101*mb, 5*mb)},
			[]TaintDetail{{Taint: TaintForeignTraffic, Side: "local", Counter: "rx_bytes", Delta: 3 * mb, Limit: 2 * mb}}},
		{"a latency probe beside a job", quiet, Evidence{Local: bytes(6000*mb, mb)},
			[]TaintDetail{{Taint: TaintForeignTraffic, Side: "local", Counter: "tx_bytes", Delta: 5999 * mb, Limit: 250 * mb}}},
		{"a latency probe beside another", quiet, Evidence{Local: bytes(3*mb, 3*mb)}, nil},
		{"housekeeping", ownTraffic{local: flows{1000, 1000}, seconds: 1}, Evidence{Local: bytes(200_000, 1000)}, nil},
		{"a job's TCP on hardware", quiet, Evidence{Local: onNetdev(500*mb, 0)},
			[]TaintDetail{{Taint: TaintForeignTraffic, Side: "local", Counter: "netdev/tx_bytes", Delta: 499 * mb, Limit: 250 * mb}}},
		{"a netdev that counts RDMA as well", fast, Evidence{Local: onNetdev(100*mb, 2*mb)}, nil},
		{"a driver without bytes", fast, Evidence{Local: passed(map[string]uint64{counters.TxPackets: 1 << 40})}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := Result{Outcome: OK, Taints: []Taint{}, own: tt.own, Evidence: tt.evidence}
			r.taint(nil)
			if diff := cmp.Diff(tt.want, r.TaintLog); diff != "" {
				t.Errorf("details (-want +got):\n%s", diff)
			}
		})
	}
}

// Packets that were sent again are the session's own bytes: how many there were can't be told.
func TestForeignTrafficAfterRetransmission(t *testing.T) {
	e := moved(counters.RetransmitPeer, map[string]uint64{"duplicate_request": 2})
	e.Traffic = map[string]uint64{counters.TxBytes: 1 << 40, counters.RxBytes: 0}
	r := Result{Outcome: OK, Taints: []Taint{}, Evidence: Evidence{Local: passed(nil), Remote: e}}
	r.taint(nil)
	if diff := cmp.Diff([]Taint{TaintRetransmit}, r.Taints); diff != "" {
		t.Errorf("taints (-want +got):\n%s", diff)
	}
	want := map[string][]string{"local": {"foreign-traffic"}, "remote": {"foreign-traffic"}}
	if diff := cmp.Diff(want, r.CannotTell()); diff != "" {
		t.Errorf("can't tell (-want +got):\n%s", diff)
	}
}

// What is wrong with a node is that node's taint here, and peer-tainted from over there.
func TestConditions(t *testing.T) {
	e := evidence(nil, nil, nil)
	e.Conditions = []control.Condition{{Taint: "pcie-degraded", Check: "pcie-width", Detail: "x8, the card has x16"}}
	for side, want := range map[string]TaintDetail{
		"local":  {Taint: TaintPCIeDegraded, Side: "local", Counter: "pcie-width", Note: "x8, the card has x16"},
		"remote": {Taint: TaintPeerTainted, Side: "remote", Counter: "pcie-degraded: pcie-width", Note: "x8, the card has x16"},
	} {
		r := Result{Outcome: OK, Taints: []Taint{}}
		r.Evidence.Local = e
		if side == "remote" {
			r.Evidence = Evidence{Remote: e}
		}
		r.taint(nil)
		if diff := cmp.Diff([]TaintDetail{want}, r.TaintLog); diff != "" || r.Taints[0] != want.Taint {
			t.Errorf("%s: %v (-want +got):\n%s", side, r.Taints, diff)
		}
	}
}

// A driver without a signal is not one without trouble.
func TestCannotTell(t *testing.T) {
	d := &counters.Delta{Classes: map[counters.Class]uint64{counters.RetransmitPeer: 0, counters.Sequence: 0, counters.Discard: 4}, Traffic: map[string]uint64{counters.RxBytes: 0}}
	if diff := cmp.Diff([]string{"rnr", "timeout", "congestion", "pause", "link-errors"}, cannotTell(d)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := cannotTell(&counters.Delta{Traffic: map[string]uint64{counters.TxPackets: 3}}); len(got) != len(Tolerable()) {
		t.Errorf("of nothing: %v", got)
	}
	r := Result{Outcome: OK, Evidence: Evidence{Local: evidence(nil, nil, nil)}}
	if got := r.CannotTell(); len(got) != 1 || len(got["remote"]) != len(Tolerable()) {
		t.Errorf("without evidence: %v", got)
	}
	if got := (&Result{Outcome: Failed}).CannotTell(); len(got) > 0 {
		t.Errorf("of a failure: %v", got)
	}
}

// Own traffic is an upper bound of what a packet capture would show, and not far above it.
func TestOwnTraffic(t *testing.T) {
	mtu := 4096
	roce := &LocalPort{State: verbs.Port{LinkLayer: verbs.Ethernet, RateGbps: 100}, GIDs: []verbs.GID{{Index: 3, Addr: netip.MustParseAddr("10.9.0.1"), Type: verbs.GIDRoCEv2}}}
	ib := &LocalPort{State: verbs.Port{LinkLayer: verbs.InfiniBand, RateGbps: 400}}
	soft := &LocalPort{State: roce.State, GIDs: roce.GIDs, software: true}
	for _, tt := range []struct {
		name   string
		port   *LocalPort
		gid    int
		spec   Spec
		size   int
		n      uint64
		tx, rx uint64 // on the wire: payload, headers without FCS, one acknowledgement for each message
		rate   float64
	}{
		{"RoCE v2 write of 64 KiB", roce, 3, Spec{Kind: Bandwidth, Op: verbs.Write}, 64 << 10, 1000, 1000 * (65536 + 16*58 + 16), 1000 * 62, 12.5e9},
		{"RoCE v2 read of 64 KiB", roce, 3, Spec{Kind: Bandwidth, Op: verbs.Read}, 64 << 10, 1000, 1000 * (58 + 16), 1000 * (65536 + 16*58 + 4), 12.5e9},
		{"RoCE v2 ping-pong of 8 B", roce, 3, Spec{Kind: Latency, Op: verbs.Send}, 8, 1000, 1000 * (8 + 58 + 62), 1000 * (8 + 58 + 62), 12.5e9},
		{"InfiniBand write of 4 KiB", ib, -1, Spec{Kind: Bandwidth, Op: verbs.Write}, 4096, 10, 10 * (4096 + 26 + 16), 10 * 30, 25e9},
		{"InfiniBand with GRH", ib, 0, Spec{Kind: Bandwidth, Op: verbs.Write}, 4096, 10, 10 * (4096 + 66 + 16), 10 * 70, 25e9},
		{"software: no rate", soft, 3, Spec{Kind: MessageRate, Op: verbs.Write}, 8, 10, 10 * (8 + 58 + 16), 10 * 62, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &initiation{spec: tt.spec, port: tt.port, gidIndex: tt.gid, r: &Result{MTU: &mtu}, rep: &control.OpenReply{Endpoint: control.Endpoint{RateBPS: 25e9}}}
			o := s.traffic(&spoken{size: tt.size, timed: verbs.RunResult{Posted: tt.n}, to: 2 * time.Second, rep: &control.FinishReply{}})
			if o.local.tx < tt.tx || o.local.tx > tt.tx+tt.tx/2 {
				t.Errorf("sent %d, on the wire are %d", o.local.tx, tt.tx)
			}
			packets := uint64(max(1, tt.size/mtu))
			if o.local.rx < tt.rx || o.local.rx > tt.rx*3/2+tt.n*packets*100 {
				t.Errorf("received %d, on the wire are %d", o.local.rx, tt.rx)
			}
			if o.rate != min(tt.rate, 25e9) || o.seconds != 2 {
				t.Errorf("rate %g for %g s, want %g", o.rate, o.seconds, tt.rate)
			}
		})
	}
}
