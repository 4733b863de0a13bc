package probe

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
)

func evidence(counters, classes map[string]uint64, moved map[string][]string, unknown ...string) *EndEvidence {
	e := &EndEvidence{Device: "rxe0", Port: 1, Counters: map[string]uint64{}, Classes: map[string]uint64{}, Moved: map[string][]string{}, Unknown: []string{},
		Traffic: map[string]uint64{}, CannotTell: []string{}, Conditions: []control.Condition{}}
	for k, v := range counters {
		e.Counters[k] = v
	}
	for k, v := range classes {
		e.Classes[k] = v
	}
	for k, v := range moved {
		e.Moved[k] = append([]string{}, v...)
	}
	e.Unknown = append(e.Unknown, unknown...)
	return e
}

// The evidence of a session is the sum over its timed parts.
func TestEvidenceAddsUp(t *testing.T) {
	first := evidence(map[string]uint64{"sent_pkts": 10, "duplicate_request": 1}, map[string]uint64{"retransmit_peer": 1},
		map[string][]string{"retransmit_peer": {"duplicate_request"}}, "link_downed")
	second := evidence(map[string]uint64{"sent_pkts": 5, "duplicate_request": 2, "send_err": 1}, map[string]uint64{"retransmit_peer": 2, "discard": 1},
		map[string][]string{"retransmit_peer": {"duplicate_request"}, "discard": {"send_err"}}, "link_downed", "ack_deferred")
	want := evidence(map[string]uint64{"sent_pkts": 15, "duplicate_request": 3, "send_err": 1}, map[string]uint64{"retransmit_peer": 3, "discard": 1},
		map[string][]string{"retransmit_peer": {"duplicate_request"}, "discard": {"send_err"}}, "link_downed", "ack_deferred")
	var sum *EndEvidence
	for _, e := range []*EndEvidence{nil, first, nil, second, nil} {
		sum = sum.add(e)
	}
	if diff := cmp.Diff(want, sum); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if sum := (*EndEvidence)(nil).add(nil); sum != nil {
		t.Errorf("nothing became %+v", sum)
	}
}

func TestEveryClassOfCountersHasATaint(t *testing.T) {
	taints := map[counters.Class]int{}
	for _, s := range signals {
		for _, c := range s.classes {
			taints[c]++
		}
	}
	for _, c := range counters.Classes {
		if taints[c] != 1 {
			t.Errorf("class %s is in %d taints", c, taints[c])
		}
	}
	if len(taints) != len(counters.Classes) {
		t.Errorf("%d classes taint, package counters has %d", len(taints), len(counters.Classes))
	}
}

func TestTaints(t *testing.T) {
	mtu := 1024
	for _, tt := range []struct {
		name    string
		result  Result
		outcome Outcome
		taints  []Taint
		log     []TaintDetail
	}{
		{"no evidence at either end", Result{}, OK, []Taint{}, []TaintDetail{}},
		{"quiet counters", Result{Evidence: Evidence{
			Local: evidence(map[string]uint64{"sent_pkts": 9, "duplicate_request": 0}, map[string]uint64{"retransmit_peer": 0, "sequence": 0}, nil),
		}}, OK, []Taint{}, []TaintDetail{}},
		{"unknown counters are no evidence", Result{Evidence: Evidence{Local: evidence(nil, nil, nil, "out_of_sequence")}}, OK, []Taint{}, []TaintDetail{}},
		{"classes that mean nothing here", Result{Evidence: Evidence{
			Local: evidence(map[string]uint64{"tx_bytes": 9}, map[string]uint64{"traffic": 9}, map[string][]string{"traffic": {"tx_bytes"}}),
		}}, OK, []Taint{}, []TaintDetail{}},
		{"this end sent again", Result{Evidence: Evidence{
			Local: evidence(map[string]uint64{"completer_retry_err": 4}, map[string]uint64{"retransmit_local": 4}, map[string][]string{"retransmit_local": {"completer_retry_err"}}),
		}}, Tainted, []Taint{TaintRetransmit}, []TaintDetail{{Taint: TaintRetransmit, Side: "local", Counter: "completer_retry_err", Delta: 4}}},
		{"the peer saw it twice", Result{Evidence: Evidence{
			Remote: evidence(map[string]uint64{"duplicate_request": 2}, map[string]uint64{"retransmit_peer": 2}, map[string][]string{"retransmit_peer": {"duplicate_request"}}),
		}}, Tainted, []Taint{TaintRetransmit}, []TaintDetail{{Taint: TaintRetransmit, Side: "remote", Counter: "duplicate_request", Delta: 2}}},
		{"both ends, one taint, all of the evidence", Result{Evidence: Evidence{
			Local: evidence(map[string]uint64{"packet_seq_err": 1, "local_ack_timeout_err": 3}, map[string]uint64{"retransmit_local": 4, "timeout": 3},
				map[string][]string{"retransmit_local": {"packet_seq_err", "local_ack_timeout_err"}, "timeout": {"local_ack_timeout_err"}}),
			Remote: evidence(map[string]uint64{"out_of_sequence": 1, "duplicate_request": 1}, map[string]uint64{"sequence": 1, "retransmit_peer": 1},
				map[string][]string{"sequence": {"out_of_sequence"}, "retransmit_peer": {"duplicate_request"}}),
		}}, Tainted, []Taint{TaintRetransmit, TaintOutOfOrder, TaintTimeout}, []TaintDetail{
			{Taint: TaintRetransmit, Side: "local", Counter: "packet_seq_err", Delta: 1}, {Taint: TaintRetransmit, Side: "local", Counter: "local_ack_timeout_err", Delta: 3},
			{Taint: TaintRetransmit, Side: "remote", Counter: "duplicate_request", Delta: 1}, {Taint: TaintOutOfOrder, Side: "remote", Counter: "out_of_sequence", Delta: 1},
			{Taint: TaintTimeout, Side: "local", Counter: "local_ack_timeout_err", Delta: 3},
		}},
		{"congestion, pause and bit errors", Result{Evidence: Evidence{
			Remote: evidence(map[string]uint64{"np_cnp_sent": 8, "ethtool/rx_prio3_pause": 2, "symbol_error": 1, "rx_discards_phy": 5},
				map[string]uint64{"congestion": 8, "pause": 2, "physical": 1, "discard": 5},
				map[string][]string{"congestion": {"np_cnp_sent"}, "pause": {"ethtool/rx_prio3_pause"}, "physical": {"symbol_error"}, "discard": {"rx_discards_phy"}}),
		}}, Tainted, []Taint{TaintCongestion, TaintPause, TaintDiscards, TaintLinkErrors}, []TaintDetail{
			{Taint: TaintCongestion, Side: "remote", Counter: "np_cnp_sent", Delta: 8}, {Taint: TaintPause, Side: "remote", Counter: "ethtool/rx_prio3_pause", Delta: 2},
			{Taint: TaintDiscards, Side: "remote", Counter: "rx_discards_phy", Delta: 5}, {Taint: TaintLinkErrors, Side: "remote", Counter: "symbol_error", Delta: 1},
		}},
		{"too short for a rate", Result{Runs: []Run{{Iterations: 1, Bandwidth: &BandwidthStats{}, short: true}}},
			Tainted, []Taint{TaintShortRun}, []TaintDetail{{Taint: TaintShortRun, Side: "local", Counter: "messages", Delta: 1}}},
		{"ports of unlike MTU", Result{MTU: &mtu, mtuReduced: 4096}, Tainted, []Taint{TaintMTUReduced}, []TaintDetail{{Taint: TaintMTUReduced, Side: "local", Counter: "mtu", Delta: 1024, Limit: 4096}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := tt.result
			r.Outcome, r.Taints, r.TaintLog = OK, []Taint{}, []TaintDetail{}
			r.taint(nil)
			if r.Outcome != tt.outcome {
				t.Errorf("outcome %s, want %s", r.Outcome, tt.outcome)
			}
			if diff := cmp.Diff(tt.taints, r.Taints); diff != "" {
				t.Errorf("taints (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.log, r.TaintLog); diff != "" {
				t.Errorf("details (-want +got):\n%s", diff)
			}
		})
	}
}

// Evidence is the same on the wire as in a result.
func TestEvidenceCrossesTheWire(t *testing.T) {
	if wireEvidence(nil) != nil {
		t.Error("no evidence became some")
	}
	e := evidence(map[string]uint64{"sent_pkts": 1 << 63}, map[string]uint64{"rnr": 0}, map[string][]string{}, "x")
	sent, err := json.Marshal(wireEvidence(e))
	if err != nil {
		t.Fatal(err)
	}
	shown, err := json.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	if string(sent) != string(shown) {
		t.Errorf("sent as %s, shown as %s", sent, shown)
	}
}
