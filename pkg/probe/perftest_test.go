package probe

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// The defaults of perftest's tools. A row is ib_OP_bw or ib_OP_lat without options, on mlx5.
func TestPerftest(t *testing.T) {
	type row struct {
		Size, Iterations, TxDepth, RxDepth, CQMod, Inline int
	}
	for _, tt := range []struct {
		tool string
		spec Spec
		want row
	}{
		{"ib_write_bw", Spec{Kind: Bandwidth, Op: verbs.Write}, row{65536, 5000, 128, 1, 1, 0}},
		{"ib_write_bw --write_with_imm", Spec{Kind: Bandwidth, Op: verbs.WriteImm}, row{65536, 5000, 128, 512, 1, 0}},
		{"ib_read_bw", Spec{Kind: Bandwidth, Op: verbs.Read}, row{65536, 1000, 128, 1, 1, 0}},
		{"ib_send_bw", Spec{Kind: Bandwidth, Op: verbs.Send}, row{65536, 1000, 128, 512, 1, 0}},
		{"ib_atomic_bw", Spec{Kind: Bandwidth, Op: verbs.FetchAdd}, row{8, 1000, 128, 1, 100, 0}},
		{"ib_atomic_bw -A CMP_AND_SWAP", Spec{Kind: Bandwidth, Op: verbs.CmpSwap}, row{8, 1000, 128, 1, 100, 0}},
		{"ib_write_bw -c UC", Spec{Kind: Bandwidth, Op: verbs.Write, Transport: verbs.UC}, row{65536, 5000, 128, 1, 1, 0}},
		{"ib_send_bw -c UD", Spec{Kind: Bandwidth, Op: verbs.Send, Transport: verbs.UD}, row{4096, 1000, 128, 1000, 100, 0}},
		{"ib_write_lat", Spec{Kind: Latency, Op: verbs.Write}, row{2, 1000, 1, 1, 1, 220}},
		{"ib_write_lat --write_with_imm", Spec{Kind: Latency, Op: verbs.WriteImm}, row{2, 1000, 1, 512, 1, 220}},
		{"ib_read_lat", Spec{Kind: Latency, Op: verbs.Read}, row{2, 1000, 1, 1, 1, 0}},
		{"ib_send_lat", Spec{Kind: Latency, Op: verbs.Send}, row{2, 1000, 1, 512, 1, 236}},
		{"ib_send_lat -c UC", Spec{Kind: Latency, Op: verbs.Send, Transport: verbs.UC}, row{2, 1000, 1, 512, 1, 236}},
		{"ib_send_lat -c UD", Spec{Kind: Latency, Op: verbs.Send, Transport: verbs.UD}, row{2, 1000, 1, 512, 1, 188}},
		{"ib_atomic_lat", Spec{Kind: Latency, Op: verbs.FetchAdd}, row{8, 1000, 1, 1, 1, 0}},

		{"ib_write_bw -s 2", Spec{Kind: Bandwidth, Op: verbs.Write, Sizes: []int{2}}, row{2, 5000, 128, 1, 100, 0}},
		{"ib_write_bw -n 50", Spec{Kind: Bandwidth, Op: verbs.Write, Sizes: []int{2}, Iterations: 50}, row{2, 50, 50, 1, 50, 0}},
		{"ib_write_bw -l 16", Spec{Kind: Bandwidth, Op: verbs.Write, PostList: 16}, row{65536, 5000, 128, 1, 16, 0}},
		{"ib_write_bw -e", Spec{Kind: Bandwidth, Op: verbs.Write, Events: true}, row{65536, 5000, 128, 1, 100, 0}},
		{"ib_send_bw -t 16 -r 64 -Q 8 -I 64 -n 200", Spec{Kind: Bandwidth, Op: verbs.Send, TxDepth: 16, RxDepth: 64, CQMod: 8, Inline: 64, Iterations: 200}, row{65536, 200, 16, 64, 8, 64}},
		{"ib_write_lat -I 0", Spec{Kind: Latency, Op: verbs.Write, Inline: -1}, row{2, 1000, 1, 1, 1, -1}},
	} {
		t.Run(tt.tool, func(t *testing.T) {
			s, err := tt.spec.Perftest(4096)
			if err != nil {
				t.Fatal(err)
			}
			s = s.WithDefaults()
			if err := s.Validate(); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, row{s.Sizes[0], s.Iterations, s.TxDepth, s.RxDepth, s.CQMod, s.Inline}); diff != "" {
				t.Errorf("(-theirs +ours):\n%s", diff)
			}
			// The same for all of them: one QP, no list, no warm-up, the smaller MTU, index 0, the QP's timers.
			got := fmt.Sprint(s.QPs, max(1, s.PostList) == s.PostList, s.Warmup, s.MTU, s.PKey, s.ServiceLevel, s.TrafficClass, s.FlowLabel, s.Timeout, s.Retries, s.RNRRetry, s.Memory.StrictOrdering)
			if want := "1 true -1 0 0 0 0 0 14 7 7 false"; got != want {
				t.Errorf("%s, want %s", got, want)
			}
		})
	}
	s, err := Spec{Kind: Bandwidth, Op: verbs.Write, Duration: time.Second, Retries: 3, RNRRetry: -1, Timeout: 18, Warmup: 10}.Perftest(0)
	if err != nil || s.Iterations != 0 || s.Retries != 3 || s.RNRRetry != -1 || s.Timeout != 18 || s.Warmup != 10 {
		t.Errorf("explicit values are lost: %+v, %v", s, err)
	}
	if _, err := (Spec{Kind: Ping}).Perftest(0); err == nil {
		t.Error("perftest has no ping")
	}
}

// All sizes end where a transport, an op or a port does.
func TestAllSizes(t *testing.T) {
	port := &LocalPort{State: verbs.Port{ActiveMTU: 1024, MaxMsg: 1 << 20}}
	for _, tt := range []struct {
		name     string
		spec     Spec
		port     *LocalPort
		from, to int
	}{
		{"rc write", Spec{Transport: verbs.RC, Op: verbs.Write}, nil, 2, 8 << 20},
		{"a device of 1 MiB", Spec{Transport: verbs.RC, Op: verbs.Write}, port, 2, 1 << 20},
		{"ud", Spec{Transport: verbs.UD, Op: verbs.Send}, nil, 2, 4096},
		{"ud over a small MTU", Spec{Transport: verbs.UD, Op: verbs.Send}, port, 2, 1024},
		{"ud, a smaller MTU wanted", Spec{Transport: verbs.UD, Op: verbs.Send, MTU: 512}, port, 2, 512},
		{"an atomic", Spec{Transport: verbs.RC, Op: verbs.FetchAdd}, port, 8, 8},
		{"verified", Spec{Transport: verbs.RC, Op: verbs.Write, Verify: true}, nil, 8, 8 << 20},
	} {
		got := tt.spec.AllSizes(tt.port)
		if got[0] != tt.from || got[len(got)-1] != tt.to {
			t.Errorf("%s: %v", tt.name, got)
		}
		for i := range got[1:] {
			if got[i+1] != 2*got[i] {
				t.Errorf("%s: %v", tt.name, got)
			}
		}
	}
}
