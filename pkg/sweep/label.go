package sweep

import (
	"cmp"
	"slices"
)

// LabelPoint is the median of one figure over a node's sessions, in either role.
type LabelPoint struct {
	Probe  string  `json:"probe"`
	Device string  `json:"device"`
	Size   int     `json:"size"`
	Figure string  `json:"figure"` // bandwidth, p50 latency, p99 latency
	Median float64 `json:"median"` // bytes per second, or seconds
	Rows   int     `json:"rows"`
}

// Label sums up what a node performs like.
func (r *Report) Label(node string) []LabelPoint {
	type key struct {
		probe, device string
		size          int
		figure        string
	}
	values := map[key][]float64{}
	for i := range r.Pairs {
		p := &r.Pairs[i]
		device := p.SrcDevice
		if p.Dst == node {
			device = p.DstDevice
		} else if p.Src != node {
			continue
		}
		if !usable(&p.Row) {
			continue
		}
		for k := range p.Points {
			for _, f := range figures {
				if f.point == nil {
					continue
				}
				if v := f.point(&p.Points[k]); v != nil {
					id := key{p.Probe, device, p.Points[k].Size, f.name}
					values[id] = append(values[id], *v)
				}
			}
		}
	}
	out := []LabelPoint{}
	for k, v := range values {
		slices.Sort(v)
		out = append(out, LabelPoint{k.probe, k.device, k.size, k.figure, quantile(v, 0.5), len(v)})
	}
	slices.SortFunc(out, func(a, b LabelPoint) int {
		return cmp.Or(cmp.Compare(a.Probe, b.Probe), cmp.Compare(a.Device, b.Device), cmp.Compare(a.Figure, b.Figure), cmp.Compare(a.Size, b.Size))
	})
	return out
}
