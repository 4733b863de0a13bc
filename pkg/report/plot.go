package report

import (
	"bytes"
	"errors"
	"fmt"
	"image/color"
	"io"
	"math"
	"strings"

	xfont "golang.org/x/image/font"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// The formats of Plot.
const (
	SVG = "svg"
	PNG = "png"
)

// Of a picture.
const (
	pageWidth   = 10 * vg.Inch
	panelHeight = 3.6 * vg.Inch
	headHeight  = 0.85 * vg.Inch
	labelHeight = 18 // of an axis
	legendWidth = 1.2 * vg.Inch
	margin      = 0.2 * vg.Inch
	pngDPI      = 144
)

// maxLines is how many runs are told apart in one panel. Of more sizes some are picked.
const maxLines = 8

// panel is one diagram of a picture.
type panel struct {
	*plot.Plot
	xLabel, yLabel string // drawn apart: on a logarithmic axis the library makes room for them in the wrong place
	legend         plot.Legend
	entries        int
}

// Plot draws what a probe measured, a panel below the other: figures over message size if there were several, latency by
// percentile and over time, bandwidth over time.
func Plot(w io.Writer, format string, r *probe.Result) error {
	panels := panelsOf(r)
	if len(panels) == 0 {
		return errors.New("nothing to draw: the probe has no figures")
	}
	width, height := pageWidth, headHeight+panelHeight*vg.Length(len(panels))
	switch format {
	case SVG:
		c := vgsvg.New(width, height)
		page(draw.New(c), r, panels)
		var b bytes.Buffer
		if _, err := c.WriteTo(&b); err != nil {
			return err
		}
		// Where the font is not installed its metric twins are.
		out := bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Sans;"), []byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif;"))
		_, err := w.Write(out)
		return err
	case PNG:
		c := vgimg.NewWith(vgimg.UseWH(width, height), vgimg.UseDPI(pngDPI), vgimg.UseBackgroundColor(color.White))
		page(draw.New(c), r, panels)
		_, err := vgimg.PngCanvas{Canvas: c}.WriteTo(w)
		return err
	}
	return fmt.Errorf("format %q: want %s or %s", format, SVG, PNG)
}

func page(c draw.Canvas, r *probe.Result, panels []*panel) {
	c.SetColor(color.White)
	c.Fill(c.Rectangle.Path())
	body := draw.Crop(c, margin, -margin, 0, -margin)
	y := body.Max.Y
	for _, line := range []struct {
		text string
		size vg.Length
		bold bool
		grey uint8
	}{{title(r), 13, true, 0}, {subtitle(r), 9.5, false, 0x50}} {
		sty := style(line.size, color.Gray{Y: line.grey})
		if line.bold {
			sty.Font.Weight = xfont.WeightBold
		}
		sty.YAlign = draw.YTop
		body.FillText(sty, vg.Point{X: body.Min.X, Y: y}, fit(sty, line.text, body.Max.X-body.Min.X))
		y -= line.size * 1.5
	}
	for i, p := range panels {
		at := body
		at.Max.Y = body.Max.Y + margin - headHeight - panelHeight*vg.Length(i)
		at.Min.Y = at.Max.Y - panelHeight + margin
		if p.entries > 1 {
			key := at
			key.Min.X = at.Max.X - legendWidth + margin
			key.Max.Y -= 1.8 * p.Title.TextStyle.Font.Size
			at.Max.X -= legendWidth
			p.legend.Draw(key)
		}
		inner := draw.Crop(at, labelHeight, 0, labelHeight, 0)
		p.Draw(inner)
		data := p.DataCanvas(inner)
		sty := style(10, ink)
		sty.XAlign, sty.YAlign = draw.XCenter, draw.YBottom
		c.FillText(sty, vg.Point{X: data.Center().X, Y: at.Min.Y + 3}, p.xLabel)
		sty.Rotation, sty.YAlign = math.Pi/2, draw.YTop
		c.FillText(sty, vg.Point{X: at.Min.X, Y: data.Center().Y}, p.yLabel)
	}
}

// fit cuts a line to a width.
func fit(sty text.Style, s string, width vg.Length) string {
	if sty.Width(s) <= width {
		return s
	}
	runes := []rune(s)
	for len(runes) > 0 && sty.Width(string(runes)+"…") > width {
		runes = runes[:len(runes)-1]
	}
	return string(runes) + "…"
}

func title(r *probe.Result) string {
	what := fmt.Sprintf("%s %s %s", strings.ToUpper(string(r.Transport)), strings.ToUpper(string(r.Op)), r.Kind)
	if r.Kind == probe.Ping {
		what = "UD ping"
	}
	to := r.Peer
	if r.PeerDev != nil && r.PeerPort != nil {
		to += fmt.Sprintf(" %s port %d", *r.PeerDev, *r.PeerPort)
	}
	return fmt.Sprintf("%s: %s port %d → %s", what, r.Device, r.Port, to)
}

func subtitle(r *probe.Result) string {
	parts := []string{stamp(r.Time)}
	if n := len(r.Runs); n > 0 && r.Runs[0].Size == r.Runs[n-1].Size {
		parts = append(parts, "messages of "+sizeText(r.Runs[0].Size))
	}
	if r.Kind != probe.Ping {
		qps := fmt.Sprintf("%d QPs", r.QPs)
		if r.QPs == 1 {
			qps = "1 QP"
		}
		parts = append(parts, qps, fmt.Sprintf("tx depth %d", r.Options.TxDepth))
	}
	if r.MTU != nil {
		parts = append(parts, fmt.Sprintf("MTU %d", *r.MTU))
	}
	for _, o := range []struct {
		on   bool
		text string
	}{{r.Options.Bidirectional, "bidirectional"}, {r.Options.Reverse, "reverse"}, {r.Options.RateLimit > 0, "rate limited"}, {r.Options.Verify, "verified"}} {
		if o.on {
			parts = append(parts, o.text)
		}
	}
	if len(r.Runs) > 0 && r.Runs[0].Spread != nil {
		parts = append(parts, fmt.Sprintf("medians of %d runs", r.Runs[0].Spread.Runs))
	}
	result := "result " + string(r.Outcome)
	if len(r.Taints) > 0 {
		var names []string
		for _, t := range r.Taints {
			names = append(names, string(t))
		}
		result += ": " + strings.Join(names, ", ")
	}
	return strings.Join(append(parts, result), "  ·  ")
}

// ---- what panels are made of ----

var ink = color.Gray{Y: 0x20}

// hues differ for most colour-blind people too (Okabe and Ito).
var hues = []color.RGBA{
	{0x00, 0x72, 0xb2, 0xff}, {0xd5, 0x5e, 0x00, 0xff}, {0x00, 0x9e, 0x73, 0xff}, {0xcc, 0x79, 0xa7, 0xff},
	{0xe6, 0x9f, 0x00, 0xff}, {0x56, 0xb4, 0xe9, 0xff}, {0x00, 0x00, 0x00, 0xff}, {0x99, 0x99, 0x99, 0xff},
}

func style(size vg.Length, c color.Color) text.Style {
	return text.Style{Color: c, Font: font.Font{Typeface: "Liberation", Variant: "Sans", Size: size}, Handler: plot.DefaultTextHandler}
}

func newPanel(title, x, y string) *panel {
	p := &panel{Plot: plot.New(), xLabel: x, yLabel: y, legend: plot.NewLegend()}
	p.Title.Text = title
	p.Title.TextStyle = style(11, ink)
	p.Title.TextStyle.XAlign, p.Title.TextStyle.YAlign = draw.XCenter, draw.YTop
	p.Title.Padding = 6
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		keep := a.Tick.Label
		a.Tick.Label = style(9, ink)
		a.Tick.Label.XAlign, a.Tick.Label.YAlign = keep.XAlign, keep.YAlign
		a.Padding = 0
	}
	grid := plotter.NewGrid()
	grid.Horizontal.Color, grid.Vertical.Color = color.Gray{Y: 0xe4}, color.Gray{Y: 0xe4}
	p.Add(grid)
	p.legend.Top, p.legend.Left = true, true
	p.legend.TextStyle = style(9, ink)
	p.legend.Padding = 3
	return p
}

func (p *panel) entry(name string, thumb plot.Thumbnailer) {
	p.legend.Add(name, thumb)
	p.entries++
}

// line adds a curve, with a mark on every point where marks is set.
func (p *panel) line(name string, xy plotter.XYs, hue color.Color, marks bool) {
	l := &plotter.Line{XYs: xy, LineStyle: draw.LineStyle{Color: hue, Width: 1.3}}
	p.Add(l)
	if marks {
		p.Add(&plotter.Scatter{XYs: xy, GlyphStyle: draw.GlyphStyle{Color: hue, Radius: 2.2, Shape: draw.CircleGlyph{}}})
	}
	if name != "" {
		p.entry(name, l)
	}
}

// rule is a dashed line from edge to edge: at x, or at y where x is 0.
type rule struct{ x, y float64 }

func (u rule) Plot(c draw.Canvas, p *plot.Plot) {
	sty := draw.LineStyle{Color: color.Gray{Y: 0x60}, Width: 0.9, Dashes: []vg.Length{4, 3}}
	trX, trY := p.Transforms(&c)
	if u.x != 0 {
		c.StrokeLine2(sty, trX(u.x), c.Min.Y, trX(u.x), c.Max.Y)
	} else {
		c.StrokeLine2(sty, c.Min.X, trY(u.y), c.Max.X, trY(u.y))
	}
}

// note is a word beside a rule, on the side where there is more room: at its foot, or at its top.
type note struct {
	x    float64
	text string
	top  bool
}

func (n note) Plot(c draw.Canvas, p *plot.Plot) {
	trX, _ := p.Transforms(&c)
	sty := style(9, ink)
	at := vg.Point{X: trX(n.x) + 4, Y: c.Min.Y + 5}
	if n.top {
		at.Y = c.Max.Y - 12
	}
	width := sty.Width(n.text)
	if at.X > c.Center().X {
		at.X -= 8 + width
	}
	c.SetColor(color.White)
	c.Fill(vg.Rectangle{Min: vg.Point{X: at.X - 2, Y: at.Y - 2}, Max: vg.Point{X: at.X + width + 2, Y: at.Y + 9}}.Path())
	c.FillText(sty, at, n.text)
}
