package probe

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

func TestWithDefaults(t *testing.T) {
	latency := Spec{
		Kind: Latency, Transport: verbs.RC, Op: verbs.Write, Sizes: []int{8}, Iterations: 1000, Warmup: 100, TxDepth: 16, RxDepth: 16, QPs: 1, Threads: 1, Repeat: 1,
		CQMod: 1, PostList: 1, Retries: 6, RNRRetry: 7, Deadline: 31 * time.Second, Wait: 5 * time.Second,
	}
	bandwidth := Spec{
		Kind: Bandwidth, Transport: verbs.RC, Op: verbs.Write, Sizes: []int{65536}, Iterations: 5000, Warmup: 128, TxDepth: 128, RxDepth: 512, QPs: 1, Threads: 1, Repeat: 1,
		CQMod: 1, PostList: 1, Retries: 6, RNRRetry: 7, Deadline: 31 * time.Second, Wait: 5 * time.Second,
	}
	with := func(s Spec, change func(*Spec)) Spec { change(&s); return s }
	for _, tt := range []struct {
		name     string
		in, want Spec
	}{
		{"nothing is an 8-byte write latency", Spec{}, latency},
		{"bandwidth", Spec{Kind: Bandwidth}, bandwidth},
		{"message rate", Spec{Kind: MessageRate}, with(bandwidth, func(s *Spec) { s.Kind, s.Sizes, s.CQMod = MessageRate, []int{8}, 64 })},
		{"small messages complete in groups", Spec{Kind: Bandwidth, Sizes: []int{8192}}, with(bandwidth, func(s *Spec) { s.Sizes, s.CQMod = []int{8192}, 64 })},
		{"a shallow queue halves the group", Spec{Kind: Bandwidth, Sizes: []int{64}, TxDepth: 10}, with(bandwidth, func(s *Spec) { s.Sizes, s.TxDepth, s.Warmup, s.CQMod = []int{64}, 10, 10, 5 })},
		{"the shallowest queue", Spec{Kind: Bandwidth, TxDepth: 1}, with(bandwidth, func(s *Spec) { s.TxDepth, s.Warmup, s.CQMod = 1, 1, 1 })},
		{"a post list is a group", Spec{Kind: Bandwidth, PostList: 16}, with(bandwidth, func(s *Spec) { s.PostList, s.CQMod = 16, 16 })},
		{"a duration stands for no iterations", Spec{Duration: 2 * time.Second}, with(latency, func(s *Spec) { s.Iterations, s.Duration, s.Warmup, s.Deadline = 0, 2*time.Second, 1, 35*time.Second })},
		{"every size has its time", Spec{Sizes: []int{2, 4, 8}, Duration: 10 * time.Second}, with(latency, func(s *Spec) {
			s.Sizes, s.Iterations, s.Duration, s.Warmup, s.Deadline = []int{2, 4, 8}, 0, 10*time.Second, 1, 93*time.Second
		})},
		{"few iterations, little warm-up", Spec{Iterations: 20}, with(latency, func(s *Spec) { s.Iterations, s.Warmup = 20, 2 })},
		{"at least one", Spec{Iterations: 1}, with(latency, func(s *Spec) { s.Iterations, s.Warmup = 1, 1 })},
		{"no warm-up on demand", Spec{Warmup: -1}, with(latency, func(s *Spec) { s.Warmup = -1 })},
		{"no retries on demand", Spec{Retries: -1, RNRRetry: -1}, with(latency, func(s *Spec) { s.Retries, s.RNRRetry = -1, -1 })},
		{"a scheduled probe waits for its interval", Spec{Interval: 10 * time.Second}, with(latency, func(s *Spec) { s.Interval, s.Wait = 10*time.Second, 10*time.Second })},
		{"but not for ever", Spec{Interval: time.Hour}, with(latency, func(s *Spec) { s.Interval, s.Wait = time.Hour, 30*time.Second })},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := tt.in.WithDefaults()
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if err := got.Validate(); err != nil {
				t.Errorf("its own defaults are refused: %s", err)
			}
			if again := got.WithDefaults(); !cmp.Equal(got, again) {
				t.Errorf("defaults of defaults differ:\n%s", cmp.Diff(got, again))
			}
		})
	}
}

func TestWithDefaultsKeepsTheCallersSizes(t *testing.T) {
	in := Spec{Sizes: []int{64, 8}}
	if got := in.WithDefaults(); !cmp.Equal(got.Sizes, []int{64, 8}) || !cmp.Equal(in.Sizes, []int{64, 8}) {
		t.Errorf("sizes %v of %v", got.Sizes, in.Sizes)
	}
}

// What can't work is refused before anything is sent, in words that name the field.
func TestSpecValidate(t *testing.T) {
	for _, tt := range []struct {
		says string
		spec Spec
	}{
		{"kind \"speed\"", Spec{Kind: "speed"}},
		{"ud has no write", Spec{Transport: verbs.UD}},
		{"uc has no read", Spec{Transport: verbs.UC, Op: verbs.Read}},
		{"works on 8 bytes", Spec{Op: verbs.FetchAdd, Sizes: []int{16}}},
		{"one packet", Spec{Transport: verbs.UD, Op: verbs.Send, Sizes: []int{8192}}},
		{"threads share 2 QPs", Spec{Kind: Bandwidth, QPs: 2, Threads: 3}},
		{"one message under way", Spec{Bidirectional: true}},
		{"leave one out", Spec{Kind: Bandwidth, Bidirectional: true, Reverse: true, Duration: time.Second}},
		{"needs a duration", Spec{Kind: Bandwidth, Reverse: true}},
		{"rate limit is for bandwidth", Spec{RateLimit: 1e6}},
		{"above 0", Spec{Kind: Bandwidth, RateLimit: -1}},
		{"above 0", Spec{Kind: Bandwidth, RateLimit: math.NaN()}},
		{"thousandths", Spec{Kind: Bandwidth, ReadShare: 1e-9}},
		{"longer than the deadline 30s", Spec{Kind: Bandwidth, RateLimit: 0.125, Iterations: 100, Deadline: 30 * time.Second}},
		{"longer than the deadline 33s", Spec{Kind: Bandwidth, RateLimit: 1, Duration: time.Second}}, // the warm-up alone
		{"too short", Spec{Duration: 1}},
		{"too short", Spec{Kind: Bandwidth, Reverse: true, Duration: time.Millisecond - 1}},
		{"share of reads", Spec{Kind: Bandwidth, ReadShare: 1.5}},
		{"mixed with writes", Spec{Kind: Bandwidth, ReadShare: 0.5, Op: verbs.Send}},
		{"can't be verified", Spec{Kind: Bandwidth, ReadShare: 0.5, Verify: true}},
		{"half a message", Spec{Kind: Bandwidth, Transport: verbs.UC, Verify: true}},
		{"takes 8 bytes", Spec{Kind: Bandwidth, Verify: true, Sizes: []int{4}}},
		{"smaller tx depth", Spec{Kind: Bandwidth, Verify: true, TxDepth: 128, Sizes: []int{8 << 20}}},
		{"raises no event", Spec{Events: true}},
		{"raw samples are of latency", Spec{Kind: Bandwidth, RawSamples: 5}},
		{"leave one out", Spec{FlowLabel: 5, FlowLabels: 5}},
		{"flow labels 1025", Spec{FlowLabels: 1025}},
		{"repeat 101", Spec{Repeat: 101}},
		{"CPU's number", Spec{CPUs: []int{4096}}},
		{"transport \"xrc\"", Spec{Transport: "xrc"}},
		{"op \"teleport\"", Spec{Op: "teleport"}},
		{"iterations and duration", Spec{Iterations: 5, Duration: time.Second}},
		{"negative", Spec{Iterations: -1}},
		{"negative", Spec{Duration: -time.Second}},
		{"negative", Spec{Deadline: -time.Second}},
		{"deadline 1s", Spec{Duration: 2 * time.Second, Deadline: time.Second}},
		{"deadline 1s", Spec{Duration: time.Second, Deadline: time.Second}},
		{"at most 1h", Spec{Deadline: time.Hour + 1}}, // the responder would end it
		{"at most 1h", Spec{Duration: time.Hour}},
		{"one QP", Spec{QPs: 2}},
		{"one work request", Spec{PostList: 2}},
		{"post list 8", Spec{Kind: Bandwidth, PostList: 8, TxDepth: 4, CQMod: 4}},
		{"post list -1", Spec{Kind: Bandwidth, PostList: -1}},
		{"CQ moderation 129", Spec{Kind: Bandwidth, CQMod: 129}},
		{"CQ moderation -1", Spec{Kind: Bandwidth, CQMod: -1}},
		{"multiple of the post list", Spec{Kind: Bandwidth, PostList: 3, CQMod: 4}},
		{"QPs -1", Spec{Kind: Bandwidth, QPs: -1}},
		{"QPs 1025", Spec{Kind: Bandwidth, QPs: 1025}},
		{"tx depth -1", Spec{TxDepth: -1}},
		{"tx depth 65537", Spec{Kind: Bandwidth, TxDepth: 1<<16 + 1}},
		{"rx depth -1", Spec{RxDepth: -1}},
		{"rx depth 65537", Spec{RxDepth: 1<<16 + 1}},
		{"inline size 65537", Spec{Inline: 1<<16 + 1}},
		{"service level 16", Spec{ServiceLevel: 16}},
		{"service level -1", Spec{ServiceLevel: -1}},
		{"traffic class 256", Spec{TrafficClass: 256}},
		{"flow label 1048576", Spec{FlowLabel: 1 << 20}},
		{"timeout 32", Spec{Timeout: 32}},
		{"timeout -1", Spec{Timeout: -1}},
		{"retries 8", Spec{Retries: 8}},
		{"RNR retries 8", Spec{RNRRetry: 8}},
		{"message size 0", Spec{Sizes: []int{8, 0}}},
		{"message size -8", Spec{Sizes: []int{-8}}},
		{"message size", Spec{Sizes: []int{control.MaxMessage + 1}}},
		{"MTU 9", Spec{MTU: 9}},
		{"MTU 8192", Spec{MTU: 8192}},
	} {
		t.Run(tt.says, func(t *testing.T) {
			err := tt.spec.WithDefaults().Validate()
			if err == nil {
				t.Fatalf("accepted: %+v", tt.spec.WithDefaults())
			}
			if !strings.Contains(err.Error(), tt.says) {
				t.Errorf("error %q does not name %q", err, tt.says)
			}
		})
	}
}

// Validate is for specs with defaults; without them it refuses rather than divides by zero.
func TestSpecValidateWithoutDefaults(t *testing.T) {
	if err := (Spec{Kind: Bandwidth, Transport: verbs.RC, Op: verbs.Write, Iterations: 1, Deadline: time.Second, QPs: 1, TxDepth: 1, RxDepth: 1}).Validate(); err == nil {
		t.Error("accepted")
	}
}

// Every spec that passes here passes the checks of the wire as well: a peer must not be the first to complain.
func TestValidSpecsFitTheWire(t *testing.T) {
	for _, spec := range []Spec{
		{}, {Kind: Bandwidth, QPs: control.MaxQPs, TxDepth: 1 << 16, RxDepth: 1 << 16}, {Sizes: []int{control.MaxMessage}},
		{ServiceLevel: 15, TrafficClass: 255, FlowLabel: 1<<20 - 1, Timeout: 31, Retries: 7, RNRRetry: 7}, {MTU: 256}, {Deadline: time.Hour}, {Retries: -1, RNRRetry: -1},
	} {
		spec = spec.WithDefaults()
		if err := spec.Validate(); err != nil {
			t.Errorf("%+v: %s", spec, err)
			continue
		}
		req := control.OpenRequest{
			ID: newID(), Kind: string(spec.Kind), Transport: string(spec.Transport), Op: string(spec.Op), MaxMsg: spec.Sizes[0], RxDepth: spec.RxDepth, MTU: spec.MTU,
			Deadline: spec.Deadline.Seconds(), Lease: leaseWanted.Seconds(), ServiceLevel: spec.ServiceLevel, TrafficClass: spec.TrafficClass,
			FlowLabel: spec.FlowLabel, Timeout: (&LocalPort{}).timeout(spec.Timeout), Retries: max(0, spec.Retries), RNRRetry: max(0, spec.RNRRetry),
			Endpoint: control.Endpoint{Addr: 1 << 40, Stride: uint64(spec.Sizes[0]) + 64, ActiveMTU: 4096},
		}
		for i := range spec.QPs {
			req.Endpoint.QPs = append(req.Endpoint.QPs, control.QP{QPN: uint32(i + 2)})
		}
		if err := req.Validate(); err != nil {
			t.Errorf("%+v: the peer would refuse it: %s", spec, err)
		}
	}
}

func TestHeavyAndAnswered(t *testing.T) {
	for _, tt := range []struct {
		kind            Kind
		op              verbs.Op
		heavy, answered bool
	}{
		{Latency, verbs.Write, false, true}, // a ping-pong
		{Latency, verbs.Send, false, true},
		{Latency, verbs.Read, false, false},
		{Bandwidth, verbs.Write, true, false},
		{Bandwidth, verbs.Read, true, false},
		{Bandwidth, verbs.Send, true, true}, // the receiver counts
		{MessageRate, verbs.Write, true, false},
		{MessageRate, verbs.Send, true, true},
	} {
		s := Spec{Kind: tt.kind, Op: tt.op}
		if s.Heavy() != tt.heavy || s.answered() != tt.answered {
			t.Errorf("%s of %s: heavy %t, answered %t", tt.kind, tt.op, s.Heavy(), s.answered())
		}
	}
}
