package sweep

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

//go:embed report.html.tmpl
var pageText string

var page = template.Must(template.New("report").Funcs(template.FuncMap{
	"time": formatTime, "rate": rate, "seconds": seconds, "percent": func(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) },
	"direction": Suspect.direction, "state": Suspect.state, "port": func(x NICReport) string { return nic{device: x.Device, port: x.Port}.String()[1:] },
	"labels": func(l map[string]string) string {
		var out []string
		for _, k := range slices.Sorted(maps.Keys(l)) {
			out = append(out, k+" "+l[k])
		}
		return strings.Join(out, ", ")
	},
}).Parse(pageText))

// Bounds of the page: a matrix of more nodes shows those with most to tell.
const (
	maxMatrix   = 64
	maxCurves   = 6
	numbersUpTo = 8 // nodes, to which a matrix has the figures in its cells
	maxListed   = 200
)

// HTML writes the report as one page that needs nothing but itself.
func (r *Report) HTML(w io.Writer) error {
	v := view{Report: r}
	v.Matrices, v.LeftOut = r.matrices()
	v.Curves = r.curves()
	for i := range r.Pairs {
		if p := &r.Pairs[i]; p.Verdict == Unhealthy {
			v.BadCount++
			if len(v.Bad) < maxListed {
				v.Bad = append(v.Bad, p)
			}
		}
	}
	return page.Execute(w, v)
}

type view struct {
	*Report
	Matrices []matrix
	LeftOut  int // nodes that the matrices do not show
	Curves   []chart
	Bad      []*PairReport
	BadCount int
}

// matrix is a heatmap of one figure of a probe: from row to column.
type matrix struct {
	Title, Note string
	Heads       []string
	Rows        []matrixRow
	Numbers     bool
}

type matrixRow struct {
	Name  string
	Cells []cell
}

type cell struct{ Class, Text, Title string }

// figure is one that has a matrix and a curve.
type figure struct {
	name   string
	value  func(*Row) *float64
	point  func(*control.Point) *float64
	format func(float64) string
	higher bool
}

var figures = []figure{
	{"bandwidth", peak, func(p *control.Point) *float64 { return p.Bandwidth }, FormatRate, true},
	{"p50 latency", func(r *Row) *float64 { v, _ := quick(r); return v }, func(p *control.Point) *float64 { return p.P50 }, FormatSeconds, false},
	{"p99 latency", func(r *Row) *float64 { _, v := quick(r); return v }, func(p *control.Point) *float64 { return p.P99 }, FormatSeconds, false},
	{retransmitsName, func(r *Row) *float64 { return r.Retransmits }, nil, formatShare, false},
}

func (r *Report) probes() []string {
	set := map[string]bool{}
	for i := range r.Pairs {
		set[r.Pairs[i].Probe] = true
	}
	return slices.Sorted(maps.Keys(set))
}

// shown are the nodes of the matrices.
func (r *Report) shown() (names []string, left int) {
	bad := map[string]int{}
	for i := range r.Pairs {
		if p := &r.Pairs[i]; p.Verdict != Healthy {
			bad[p.Src]++
			bad[p.Dst]++
		}
	}
	for _, n := range r.Nodes {
		names = append(names, n.Name)
	}
	if len(names) <= maxMatrix {
		return names, 0
	}
	worst := slices.Clone(names)
	slices.SortStableFunc(worst, func(a, b string) int { return bad[b] - bad[a] })
	worst = worst[:maxMatrix]
	out := slices.DeleteFunc(names, func(n string) bool { return !slices.Contains(worst, n) })
	return out, len(r.Nodes) - len(out)
}

// matrices are one for each probe and figure. Several rails share a cell, which shows the worst of them.
func (r *Report) matrices() (out []matrix, leftOut int) {
	nodes, leftOut := r.shown()
	at := map[string]int{}
	for i, n := range nodes {
		at[n] = i
	}
	for _, name := range r.probes() {
		for _, fig := range figures {
			group := func(p *PairReport) string { return p.Rail + "\x00" + p.Path }
			values, rails := map[string][]float64{}, map[string]bool{}
			for i := range r.Pairs {
				p := &r.Pairs[i]
				if p.Probe != name {
					continue
				}
				rails[p.Rail] = true
				if v := fig.value(&p.Row); v != nil && usable(&p.Row) {
					values[group(p)] = append(values[group(p)], *v)
				}
			}
			if len(values) == 0 || fig.name == retransmitsName && !anyAbove(values, 1e-4) {
				continue
			}
			for _, v := range values {
				slices.Sort(v)
			}
			m := matrix{Title: name + ": " + fig.name, Heads: nodes, Numbers: len(nodes) <= numbersUpTo}
			if len(rails) > 1 {
				m.Note = fmt.Sprintf("Each cell shows the worst of %d rails.", len(rails))
			}
			type found struct {
				level int
				cell
			}
			cells := make([][]*found, len(nodes))
			for i := range cells {
				cells[i] = make([]*found, len(nodes))
			}
			for i := range r.Pairs {
				p := &r.Pairs[i]
				x, ok := at[p.Src]
				y, ok2 := at[p.Dst]
				if p.Probe != name || !ok || !ok2 {
					continue
				}
				f := &found{level: -1, cell: cell{Class: "m", Text: "-"}}
				f.Title = fmt.Sprintf("%s → %s", nic{p.Src, p.SrcDevice, p.SrcPort}, nic{p.Dst, p.DstDevice, p.DstPort})
				v := fig.value(&p.Row)
				switch {
				case p.Result == string(probe.Failed):
					f.level, f.Class, f.Text = 100, "x", "failed"
					f.Title += ": failed: " + p.Reason
				case !usable(&p.Row):
					f.Title += ": not measured: " + p.Reason
				case v == nil:
					f.Title += ": no figure"
				default:
					f.level = level(*v, quantile(values[group(p)], 0.5), fig)
					f.Class, f.Text = fmt.Sprintf("h%d", f.level), fig.format(*v)
					f.Title += ": " + f.Text
				}
				if old := cells[x][y]; old == nil || f.level > old.level {
					cells[x][y] = f
				}
			}
			for i, n := range nodes {
				row := matrixRow{Name: n}
				for j := range nodes {
					c := cell{Class: "m", Title: n + " → " + nodes[j] + ": not measured"}
					switch f := cells[i][j]; {
					case i == j:
						c = cell{Class: "s"}
					case f != nil:
						c = f.cell
					}
					if !m.Numbers {
						c.Text = ""
					}
					row.Cells = append(row.Cells, c)
				}
				m.Rows = append(m.Rows, row)
			}
			out = append(out, m)
		}
	}
	return out, leftOut
}

func anyAbove(values map[string][]float64, least float64) bool {
	for _, list := range values {
		if slices.ContainsFunc(list, func(v float64) bool { return v > least }) {
			return true
		}
	}
	return false
}

// level is how bad a value is beside the median, 0 to 5.
func level(v, median float64, f figure) int {
	bad := (v + 1e-9) / (median + 1e-9)
	if f.higher {
		bad = 1 / bad
	}
	if f.name == retransmitsName {
		bad = (v + 1e-3) / (median + 1e-3)
	}
	for i, at := range []float64{1.05, 1.15, 1.4, 2, 4} {
		if bad < at {
			return i
		}
	}
	return 5
}

// chart is curves over message sizes, both axes logarithmic.
type chart struct {
	Title  string
	W, H   int
	Lines  []curve
	X, Y   []tick
	Left   int
	Bottom int
}

type curve struct {
	Class, Name, Points string
	Dots                []dot
}

type dot struct {
	X, Y  float64
	Title string
}

type tick struct {
	At   float64
	Text string
}

const (
	chartWidth, chartHeight             = 640, 240
	chartLeft, chartBottom, chartMargin = 78, 28, 10
)

// curves are one chart for each probe with several sizes and each figure: the fleet's median, its best and worst pair, and the nodes
// under suspicion.
func (r *Report) curves() []chart {
	var suspects []string
	for _, s := range r.Suspects {
		if s.Node != "" && !slices.Contains(suspects, s.Node) && len(suspects) < maxCurves {
			suspects = append(suspects, s.Node)
		}
	}
	var out []chart
	for _, name := range r.probes() {
		for _, fig := range figures {
			if fig.point == nil {
				continue
			}
			all, of := map[int][]float64{}, map[string]map[int][]float64{}
			for i := range r.Pairs {
				p := &r.Pairs[i]
				if p.Probe != name || !usable(&p.Row) {
					continue
				}
				for k := range p.Points {
					v := fig.point(&p.Points[k])
					if v == nil || *v <= 0 {
						continue
					}
					size := p.Points[k].Size
					all[size] = append(all[size], *v)
					for _, n := range suspects {
						if p.Src == n || p.Dst == n {
							if of[n] == nil {
								of[n] = map[int][]float64{}
							}
							of[n][size] = append(of[n][size], *v)
						}
					}
				}
			}
			if len(all) < 2 {
				continue
			}
			sizes := slices.Sorted(maps.Keys(all))
			lo, hi := math.Inf(1), 0.0
			for _, v := range all {
				slices.Sort(v)
				lo, hi = min(lo, v[0]), max(hi, v[len(v)-1])
			}
			if hi <= lo {
				hi = 2 * lo
			}
			c := chart{Title: name + ": " + fig.name + " over message size", W: chartWidth, H: chartHeight, Left: chartLeft, Bottom: chartHeight - chartBottom}
			x := func(size int) float64 {
				a, b := math.Log(float64(sizes[0])), math.Log(float64(sizes[len(sizes)-1]))
				return chartLeft + (math.Log(float64(size))-a)/(b-a)*(chartWidth-chartLeft-chartMargin)
			}
			y := func(v float64) float64 {
				a, b := math.Log(lo), math.Log(hi)
				return chartMargin + (b-math.Log(v))/(b-a)*(chartHeight-chartBottom-2*chartMargin)
			}
			line := func(class, title string, data map[int][]float64, q float64) {
				l := curve{Class: class, Name: title}
				for _, s := range sizes {
					if len(data[s]) == 0 {
						continue
					}
					slices.Sort(data[s])
					v := quantile(data[s], q)
					l.Points += fmt.Sprintf("%.1f,%.1f ", x(s), y(v))
					l.Dots = append(l.Dots, dot{x(s), y(v), fmt.Sprintf("%s, %s: %s", title, formatSize(s), fig.format(v))})
				}
				c.Lines = append(c.Lines, l)
			}
			line("edge", "lowest pair", all, 0)
			line("edge", "highest pair", all, 1)
			for i, n := range suspects {
				if of[n] != nil {
					line(fmt.Sprintf("c%d", i), n, of[n], 0.5)
				}
			}
			line("mid", "median of all pairs", all, 0.5)
			for i, s := range sizes {
				if every := (len(sizes) + 7) / 8; i%every == 0 {
					c.X = append(c.X, tick{x(s), formatSize(s)})
				}
			}
			for i := range 5 {
				v := math.Exp(math.Log(lo) + float64(i)/4*(math.Log(hi)-math.Log(lo)))
				c.Y = append(c.Y, tick{y(v), fig.format(v)})
			}
			out = append(out, c)
		}
	}
	return out
}
