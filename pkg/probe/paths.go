package probe

import (
	"context"
	"fmt"
	"hash/fnv"
	"slices"
)

// flowLabels are n different flow labels for a pair of ports: the same on every walk, so that a path that was bad is found again.
func flowLabels(n int, pair string) []int {
	out := make([]int, 0, n)
	for i := 0; len(out) < n; i++ {
		h := fnv.New64a()
		fmt.Fprintf(h, "%s %d", pair, i)
		label := int(h.Sum64() * 0x9e3779b97f4a7c15 >> 44) // the product's high bits: FNV's own mix slowly
		if label != 0 && !slices.Contains(out, label) {
			out = append(out, label)
		}
	}
	return out
}

// walk probes once with each of a number of flow labels. The worst label's result is what is returned: what a job would meet. A
// label that fails makes the whole fail, for its path carries traffic too.
func (i *Initiator) walk(ctx context.Context, spec Spec, to Target, r *Result) *failure {
	labels := flowLabels(spec.FlowLabels, fmt.Sprintf("%s/%s/%d/%s", i.Node.Name, r.Device, r.Port, to.Name))
	paths := &Paths{Labels: len(labels), Values: []PathValue{}, Coverage: coverages(len(labels))}
	var worst, best *Result
	var worstValue, bestValue float64
	var failed *failure
	evidence := r.Evidence
	for _, label := range labels {
		one := *r
		one.Runs, one.Evidence, one.Options.FlowLabel = []Run{}, Evidence{}, label
		spec.FlowLabel = label
		f := i.attempts(ctx, spec, to, &one)
		v := PathValue{FlowLabel: label}
		r.Waited = one.Waited
		evidence.Local, evidence.Remote = evidence.Local.add(one.Evidence.Local), evidence.Remote.add(one.Evidence.Remote)
		if f != nil {
			v.Reason = &f.reason
			if failed == nil || failed.skipped && !f.skipped {
				failed = f
				failed.detail = fmt.Sprintf("flow label %d: %s", label, f.detail)
			}
			paths.Values = append(paths.Values, v)
			if ctx.Err() != nil || f.skipped || f.scope == ScopeLocal || f.stage != StageRun && f.stage != StageVerify {
				break // not this path's fault: the others would meet it too
			}
			continue
		}
		metric, x, lowIsWorse := one.pathMetric()
		paths.Metric, v.Value = metric, &x
		paths.Values = append(paths.Values, v)
		if worst == nil || (x < worstValue) == lowIsWorse && x != worstValue {
			worst, worstValue, paths.Worst = &one, x, &paths.Values[len(paths.Values)-1]
		}
		if best == nil || (x > bestValue) == lowIsWorse && x != bestValue {
			best, bestValue, paths.Best = &one, x, &paths.Values[len(paths.Values)-1]
		}
	}
	waited := r.Waited
	if worst != nil {
		*r = *worst
	}
	r.Waited, r.Evidence, r.Paths = waited, evidence, paths
	if failed != nil {
		r.Runs = []Run{}
		bad := 0
		for _, v := range paths.Values {
			if v.Reason != nil {
				bad++
			}
		}
		failed.detail = fmt.Sprintf("%s (%d of %d labels)", failed.detail, bad, len(paths.Values))
	}
	return failed
}

// pathMetric is what paths are compared by, at the largest size.
func (r *Result) pathMetric() (metric string, v float64, lowIsWorse bool) {
	run := slices.MaxFunc(r.Runs, func(a, b Run) int { return a.Size - b.Size })
	switch l := run.Latency; {
	case run.Bandwidth != nil:
		return "bytes_per_second", run.Bandwidth.BytesPerSecond, true
	case l != nil && l.P99 != nil:
		return "p99", *l.P99, false
	case l != nil:
		return "max", l.Max, false
	}
	return "", 0, false
}
