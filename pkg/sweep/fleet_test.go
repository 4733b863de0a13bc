package sweep

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
)

// fleet is a synthetic one: nodes × rails, in racks, with the noise of a real one, and faults to order.
type fleet struct {
	nodes, rails, perRack int
	rng                   *rand.Rand
	noise                 float64 // σ of bandwidth and p50 as a ratio; the tail has five times as much
	missing               float64 // share of rows that were skipped
	hiccups               float64 // share of rows with a wild tail, and a tenth of it with a slow run
	only                  int     // rows of this node only; 0: all
	fault                 func(*link)
}

// link is what a session of the fleet measures, before noise.
type link struct {
	src, dst, rail   int
	srcRack, dstRack int
	latencyProbe     bool
	bandwidth        float64 // from src to dst
	p50, p99         float64
	retransmits      float64
	fails            string // stage reason scope
}

func name(i int) string { return fmt.Sprintf("node%d", i) }

const (
	lineRate = 50e9
	goodRate = 46e9
	goodP50  = 2e-6
)

func (f *fleet) rack(i int) int {
	if f.perRack == 0 {
		return 0
	}
	return (i - 1) / f.perRack
}

func (f *fleet) input() Input {
	in := Input{Name: "nightly", By: "node1", Fleet: f.only == 0, Started: time.Unix(1e9, 0), Finished: time.Unix(1e9+600, 0)}
	for i := 1; i <= f.nodes; i++ {
		m := Member{Name: name(i), Labels: map[string]string{}}
		if f.perRack > 0 {
			m.Labels["rack"] = fmt.Sprintf("r%d", f.rack(i))
		}
		in.Members = append(in.Members, m)
	}
	in.Rows = f.rows(nil)
	return in
}

// rows measures the fleet, or those pairs that keep says.
func (f *fleet) rows(keep func(src, dst string, rail string, probe string) bool) []Row {
	var out []Row
	for src := 1; src <= f.nodes; src++ {
		if f.only > 0 && src != f.only {
			continue
		}
		for dst := 1; dst <= f.nodes; dst++ {
			for rail := range f.rails {
				for _, probe := range []string{"bandwidth", "latency"} {
					if src == dst || keep != nil && !keep(name(src), name(dst), fmt.Sprint(rail), probe) {
						continue
					}
					out = append(out, f.row(src, dst, rail, probe))
				}
			}
		}
	}
	return out
}

func (f *fleet) row(src, dst, rail int, probe string) Row {
	l := &link{src: src, dst: dst, rail: rail, srcRack: f.rack(src), dstRack: f.rack(dst), latencyProbe: probe == "latency", bandwidth: goodRate, p50: goodP50, p99: 1.4 * goodP50}
	path := "unknown"
	if f.perRack > 0 {
		if path = "same_rack"; l.srcRack != l.dstRack {
			path = "cross_rack"
			l.p50, l.p99 = 1.5*l.p50, 1.5*l.p99
		}
	}
	if f.fault != nil {
		f.fault(l)
	}
	rate := lineRate
	device := fmt.Sprintf("mlx5_%d", rail)
	r := Row{
		Src: name(src), SrcDevice: device, SrcPort: 1, Dst: name(dst), DstDevice: device, DstPort: 1, Rail: fmt.Sprint(rail), Path: path, LineRate: &rate,
		Probe: probe, Kind: probe, Op: "write", Result: "ok", Taints: []string{}, Points: []control.Point{},
	}
	if f.rng.Float64() < f.missing {
		r.Result, r.Stage, r.Reason, r.Scope, r.DstDevice, r.DstPort = "skipped", "admit", "busy-port", "peer", "", 0
		return r
	}
	if l.fails != "" {
		r.Result, r.DstDevice, r.DstPort = "failed", "", 0
		fmt.Sscanf(l.fails, "%s %s %s", &r.Stage, &r.Reason, &r.Scope)
		return r
	}
	vary := func(sigma float64) float64 { return math.Exp(sigma * f.rng.NormFloat64()) }
	tail, slow := 1.0, 1.0
	if f.rng.Float64() < f.hiccups {
		tail = 1 + 20*f.rng.Float64()
		if f.rng.Float64() < 0.1 {
			slow = 1 + f.rng.Float64()
		}
	}
	again := l.retransmits * vary(0.3)
	r.Retransmits = &again
	if l.latencyProbe {
		p50 := l.p50 * vary(f.noise) * slow
		p99 := max(p50, l.p99*vary(5*f.noise)*tail)
		r.Points = append(r.Points, control.Point{Size: 8, P50: &p50, P99: &p99})
	} else {
		b := min(lineRate, l.bandwidth*vary(f.noise)/slow)
		r.Points = append(r.Points, control.Point{Size: 65536, Bandwidth: &b})
	}
	return r
}

// confirm runs the checks that a report proposes.
func (f *fleet) confirm(t *testing.T, r *Report, in Input) {
	t.Helper()
	var again []Row
	for _, c := range r.Checks() {
		probes := map[string]bool{}
		for _, p := range c.Probes {
			probes[p] = true
		}
		for range 2 {
			again = append(again, f.rows(func(src, dst, rail, probe string) bool {
				return src == c.Src && dst == c.Dst && (c.Rail == "" || rail == c.Rail) && probes[probe]
			})...)
		}
	}
	r.Confirm(in, again)
}

func newFleet(seed uint64, nodes, rails, perRack int) *fleet {
	return &fleet{nodes: nodes, rails: rails, perRack: perRack, rng: rand.New(rand.NewPCG(seed, 1)), noise: 0.02, hiccups: 0.01}
}

func names(list []Suspect) []string {
	out := []string{}
	for _, s := range list {
		out = append(out, string(s.Kind)+" "+s.Name+" "+s.Direction)
	}
	return out
}
