package main

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/alecthomas/kingpin/v2"
	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// parseProbe is what `rdmabenchd probe node2 ARGS` would send.
func parseProbe(t *testing.T, port *probe.LocalPort, args ...string) (probe.Spec, error) {
	t.Helper()
	app := kingpin.New("rdmabenchd", "")
	app.Terminate(func(int) { t.Fatal("terminated") })
	app.UsageWriter(io.Discard)
	app.ErrorWriter(io.Discard)
	_, f := newProbe(app)
	if _, err := app.Parse(append([]string{"probe", "node2"}, args...)); err != nil {
		return probe.Spec{}, err
	}
	return f.shape(port)
}

func TestProbeFlags(t *testing.T) {
	port := &probe.LocalPort{State: verbs.Port{ActiveMTU: 1024, MaxMsg: 1 << 20}}
	for _, tt := range []struct {
		args string
		want func(*probe.Spec)
	}{
		{"", func(*probe.Spec) {}},
		{"--kind bandwidth -b -q 4 --threads 2 -e --cpus 2-3,7", func(s *probe.Spec) {
			s.Kind, s.Bidirectional, s.QPs, s.Threads, s.Events, s.CPUs = probe.Bandwidth, true, 4, 2, true, []int{2, 3, 7}
		}},
		{"--kind bandwidth -c ud --op send --rate-limit 10Gb/s", func(s *probe.Spec) {
			s.Kind, s.Transport, s.Op, s.RateLimit = probe.Bandwidth, verbs.UD, verbs.Send, 1.25e9
		}},
		{"-c uc --op write-imm -s 2,64,4KiB --repeat 5 -n 100", func(s *probe.Spec) {
			s.Transport, s.Op, s.Sizes, s.Repeat, s.Iterations = verbs.UC, verbs.WriteImm, []int{2, 64, 4096}, 5, 100
		}},
		{"--kind message-rate --reverse -D 2s --op send", func(s *probe.Spec) {
			s.Kind, s.Reverse, s.Duration, s.Op = probe.MessageRate, true, 2e9, verbs.Send
		}},
		{"--kind bandwidth --read-share 0.3 --pkey 0x8001 --flow-labels 8", func(s *probe.Spec) {
			s.Kind, s.ReadShare, s.PKey, s.FlowLabels = probe.Bandwidth, 0.3, 0x8001, 8
		}},
		{"--op fetch-add --verify", func(s *probe.Spec) { s.Op, s.Verify = verbs.FetchAdd, true }},
		{"--warmup 0 -I 0 --retry-count 0 --rnr-retry 0 -u 18", func(s *probe.Spec) {
			s.Warmup, s.Inline, s.Retries, s.RNRRetry, s.Timeout = -1, -1, -1, -1, 18
		}},
		{"--kind bandwidth -a", func(s *probe.Spec) {
			s.Kind = probe.Bandwidth
			for n := 2; n <= 1<<20; n *= 2 {
				s.Sizes = append(s.Sizes, n)
			}
		}},
		{"-c ud --op send -a", func(s *probe.Spec) {
			s.Transport, s.Op, s.Sizes = verbs.UD, verbs.Send, []int{2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}
		}},
		{"--profile perftest --kind bandwidth -c ud --op send", func(s *probe.Spec) {
			s.Kind, s.Transport, s.Op, s.Sizes, s.Iterations, s.RxDepth, s.CQMod = probe.Bandwidth, verbs.UD, verbs.Send, []int{1024}, 1000, 1000, 100
			s.Warmup, s.Timeout, s.Retries = -1, 14, 7
		}},
		{"--profile perftest -n 50 -I 0 --retry-count 2", func(s *probe.Spec) {
			s.Sizes, s.Iterations, s.TxDepth, s.RxDepth = []int{2}, 50, 1, 1
			s.Inline, s.Warmup, s.Timeout, s.Retries = -1, -1, 14, 2
		}},
	} {
		t.Run(tt.args, func(t *testing.T) {
			got, err := parseProbe(t, port, strings.Fields(tt.args)...)
			if err != nil {
				t.Fatal(err)
			}
			want := probe.Spec{Name: "probe", Kind: probe.Latency}
			tt.want(&want)
			if diff := cmp.Diff(want.WithDefaults(), got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// What can't work is refused before anything is sent, with what to change.
func TestProbeFlagsRefused(t *testing.T) {
	for args, want := range map[string]string{
		"-c ud":                               "use rc, or one of [send]",
		"-c uc --op read":                     "use rc, or one of",
		"-b":                                  "bidirectional and reverse are for bandwidth",
		"--kind bandwidth --reverse":          "reverse needs a duration",
		"--kind bandwidth -b --reverse -D 1s": "leave one out",
		"-a -s 8":                             "--size and --all-sizes are both set",
		"-s 8,8":                              "twice",
		"-s 8,x":                              "not a size",
		"--kind bandwidth --threads 4":        "use at least 4 QPs",
		"--rate-limit 10":                     "not a rate",
		"--rate-limit 10Gb/s":                 "a rate limit is for bandwidth",
		"--pkey 0x8000":                       "no partition",
		"--pkey 1x":                           "no partition",
		"--cpus 5-2":                          "CPU list",
		"-e":                                  "use send, write-imm or read",
		"--kind ping -b":                      "--bidirectional means nothing to a ping",
		"--kind ping --profile perftest":      "--profile means nothing to a ping",
		"--kind ping -c rc":                   "leave both out",
		"--op fetch-add -s 16":                "an atomic works on 8 bytes",
		"--kind bandwidth --read-share 2":     "0 to 1",
		"--verify -s 4":                       "takes 8 bytes",
		"--flow-label 3 --flow-labels 4":      "leave one out",
		"--interval 1s":                       "--kind=ping",
		"--repeat 1000":                       "out of range",
		"node3":                               "say --pattern",
		"node3 --pattern incast":              "use kind bandwidth",
		"node3 --pattern outcast --kind bandwidth":                "need a duration",
		"node3 --pattern incast --kind bandwidth -D 1s -a":        "one size",
		"node3 --pattern incast --kind bandwidth -D 1s --reverse": "leave one out",
		"node2 --pattern incast --kind bandwidth -D 1s":           "node2 is there twice",
	} {
		if _, err := parseProbe(t, nil, strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("probe %s: %v; want an error with %q", args, err, want)
		}
	}
}

// A group has a row for each peer, what failed of the others, and the sum.
func TestPrintGroup(t *testing.T) {
	v := func(f float64) *float64 { return &f }
	reason, scope, stage, detail := probe.Refused, probe.ScopePeer, probe.StageConnect, "nobody there"
	results := []*probe.Result{
		{Outcome: probe.OK, Peer: "b", Kind: probe.Bandwidth, Runs: []probe.Run{{Size: 8, Bandwidth: &probe.BandwidthStats{BytesPerSecond: 3 << 20}, MessageRate: v(1e6)}}},
		{Outcome: probe.Failed, Peer: "c", Reason: &reason, Scope: &scope, Stage: &stage, Detail: &detail},
	}
	var out bytes.Buffer
	printGroup(&out, probe.Spec{Sizes: []int{8}}, results, probe.GroupOf("incast", results))
	for _, want := range []string{"incast", "3.00", "refused (peer): nobody there", "1 of 2"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
}

// Each thing that a probe may find out has its place in the text.
func TestPrintResult(t *testing.T) {
	v := func(f float64) *float64 { return &f }
	n := func(u uint64) *uint64 { return &u }
	device, port, mtu, gid := "mlx5_1", 1, 4096, 3
	base := func() *probe.Result {
		return &probe.Result{
			Outcome: probe.OK, Peer: "node2", Device: "mlx5_0", Port: 1, GIDIndex: &gid, PeerDev: &device, PeerPort: &port, MTU: &mtu, QPs: 1,
			Transport: verbs.RC, Op: verbs.Write, Kind: probe.Bandwidth,
		}
	}
	run := func(size int, bps float64) probe.Run {
		return probe.Run{Size: size, Iterations: 5000, Bandwidth: &probe.BandwidthStats{BytesPerSecond: bps, Tx: v(bps / 4), Rx: v(bps * 3 / 4)}, MessageRate: v(bps / float64(size)),
			CPUSeconds: probe.CPUSeconds{Local: v(0.5)}}
	}
	for _, tt := range []struct {
		name string
		make func(r *probe.Result, s *probe.Spec)
		want []string
		not  []string
	}{
		{"plain", func(r *probe.Result, _ *probe.Spec) { r.Runs = []probe.Run{run(65536, 64<<20)} },
			[]string{"mlx5_0 port 1 -> node2 mlx5_1 port 1", "  64.00  ", "CPU[s]", "0.500"}, []string{"sent[", "lost", "verified", "repeats", "knee", "flow label"}},
		{"both ways", func(r *probe.Result, s *probe.Spec) {
			s.Bidirectional, r.Options.Bidirectional = true, true
			r.Runs = []probe.Run{run(65536, 64<<20)}
		}, []string{"<-> node2", "sent[MiB/s]", "received[MiB/s]", " 16.00 ", " 48.00 "}, nil},
		{"lossy", func(r *probe.Result, s *probe.Spec) {
			one := run(1024, 1<<20)
			one.Arrivals, one.LossRatio = &probe.Arrivals{Sent: 1000, Received: 990, Duplicates: n(2), Reordered: n(7)}, v(0.01)
			r.Transport, r.Op, r.Runs = verbs.UD, verbs.Send, []probe.Run{one}
		}, []string{"UD SEND", "lost", "loss", "duplicates", "reordered", "  10  1.00%           2          7"}, nil},
		{"verified and repeated", func(r *probe.Result, s *probe.Spec) {
			one := run(1024, 2<<20)
			one.Verified, one.Spread = n(123456), &probe.Spread{Runs: 3, Metric: "bytes_per_second", Median: 2 << 20, Min: 1 << 20, Max: 3 << 20, MAD: 1 << 20}
			r.Runs = []probe.Run{one}
		}, []string{"verified", "123456", "repeats: min..max (MAD)", "1.00..3.00 (1.00)"}, nil},
		{"sweep", func(r *probe.Result, _ *probe.Spec) {
			size := 4096
			r.Runs, r.Sweep = []probe.Run{run(8, 1), run(4096, 2), run(8192, 2)}, &probe.Sweep{Knee: &size, Plateau: v(2 << 20)}
		}, []string{"knee: 4096 bytes, the smallest size with 95 % of the plateau of 2.00 MiB/s"}, nil},
		{"paths", func(r *probe.Result, _ *probe.Spec) {
			no := probe.RetryExceeded
			values := []probe.PathValue{{FlowLabel: 11, Value: v(3 << 20)}, {FlowLabel: 22, Value: v(1 << 20)}, {FlowLabel: 33, Reason: &no}}
			r.Runs, r.Paths = []probe.Run{run(8, 1)}, &probe.Paths{Labels: 3, Metric: "bytes_per_second", Worst: &values[1], Best: &values[0], Values: values, Coverage: map[string]float64{"2": 0.75, "16": 0, "4": 0.1}}
		}, []string{"BW average[MiB/s]", "retry-exceeded", "1.00  worst", "3.00                      best", "3 labels took each of so many equal paths: 2: 75.0 %, 4: 10.0 %, 16: 0.0 %"}, nil},
		{"latency", func(r *probe.Result, _ *probe.Spec) {
			size := 64
			r.Kind = probe.Latency
			l := &probe.LatencyStats{Measure: probe.HalfRTT, Samples: 10, Min: 1e-6, Mean: 2e-6, P50: v(2e-6), Max: 4e-6}
			r.Runs = []probe.Run{{Size: 8, Iterations: 10, Latency: l}}
			r.Sweep = &probe.Sweep{FlatTo: &size, FlatLatency: v(1e-6)}
		}, []string{"measure: half-rtt", " 2.00 ", "flat up to 64 bytes: p50 within 10 % of the lowest, 1.00 us"}, []string{"CQ moderation"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, s := base(), probe.Spec{}
			tt.make(r, &s)
			var out bytes.Buffer
			printResult(&out, s, r)
			for _, w := range tt.want {
				if !strings.Contains(out.String(), w) {
					t.Errorf("no %q in\n%s", w, &out)
				}
			}
			for _, w := range tt.not {
				if strings.Contains(out.String(), w) {
					t.Errorf("%q in\n%s", w, &out)
				}
			}
		})
	}
}
