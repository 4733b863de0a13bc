package probe

import (
	"testing"
	"time"
)

// Several peers at once: all measure over one window, from one port; one that is not there keeps nobody.
func TestGroup(t *testing.T) {
	a, b, c := newHost(t, "a", roomy), newHost(t, "b", roomy), newHost(t, "c", roomy)
	gone := Target{Name: "gone", Address: "127.0.0.1:1"}
	for _, pattern := range []string{"outcast", "incast"} {
		t.Run(pattern, func(t *testing.T) {
			spec := Spec{Kind: Bandwidth, Op: "send", Sizes: []int{4096}, Duration: 300 * time.Millisecond, Reverse: pattern == "incast"}
			results := a.ProbeGroup(t.Context(), spec, []Target{b.target(), gone, c.target()}, simDevice, 1)
			for _, r := range []*Result{results[0], results[2]} {
				wantUsable(t, r)
				if x := r.Runs[0].Bandwidth; x == nil || (x.Rx != nil) != spec.Reverse {
					t.Errorf("%s: %+v", r.Peer, x)
				}
			}
			wantFailure(t, results[1], Failed, StageConnect, Refused, ScopePeer)
			g := GroupOf(pattern, results)
			sum := results[0].Runs[0].Bandwidth.BytesPerSecond + results[2].Runs[0].Bandwidth.BytesPerSecond
			if g.Peers != 3 || g.Measured != 2 || *g.BytesPerSecond != sum || *g.Common <= 0 {
				t.Errorf("%+v of %g", g, sum)
			}
		})
	}
	// A busy peer keeps the others until the wait is over, and no longer.
	release, ok := b.Gate.TryAcquire(simDevice+"/1", true)
	if !ok {
		t.Fatal("held")
	}
	spec := Spec{Kind: MessageRate, Duration: 100 * time.Millisecond, Wait: 500 * time.Millisecond}
	results := a.ProbeGroup(t.Context(), spec, []Target{b.target(), c.target()}, simDevice, 1)
	release()
	wantUsable(t, results[1])
	if results[0].Outcome != Skipped {
		t.Error(describe(results[0]))
	}
	a.checkEmpty(t)
	for _, wrong := range []Spec{
		{Kind: Latency, Duration: time.Second}, {Kind: Bandwidth}, {Kind: Bandwidth, Duration: time.Second, Sizes: []int{2, 4}},
		{Kind: Bandwidth, Duration: time.Second, Repeat: 2}, {Kind: Bandwidth, Duration: time.Second, FlowLabels: 2},
	} {
		for _, r := range a.ProbeGroup(t.Context(), wrong, []Target{b.target(), c.target()}, simDevice, 1) {
			wantFailure(t, r, Failed, StageSetup, OpUnsupported, ScopeLocal)
		}
	}
}
