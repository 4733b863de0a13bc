package main

import (
	"fmt"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/variants"
	"github.com/grafana/grafana-foundation-sdk/go/common"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/heatmap"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/statetimeline"
	"github.com/grafana/grafana-foundation-sdk/go/table"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
)

// board lays out panels from left to right and gives them their ids.
type board struct {
	*dashboard.DashboardBuilder
	id uint32
}

// about is what every panel has. Sizes are in units of Grafana's grid, which is 24 wide. A table has no unit of its
// own: Grafana would put it on labels too (rail "1" as "100%"), so its columns have theirs.
type about struct {
	title, desc, unit string
	width, height     uint32
}

// query is an expression and, for time series, the name of a line.
type query struct{ expr, legend string }

func (b *board) next() uint32 { b.id++; return b.id }

func (b *board) row(title string) { b.WithRow(dashboard.NewRowBuilder(title).Id(b.next())) }

func datasource() common.DataSourceRef {
	return common.DataSourceRef{Type: new("prometheus"), Uid: new("$datasource")}
}

func ranged(qs []query) (out []cog.Builder[variants.Dataquery]) {
	for i, q := range qs {
		out = append(out, prometheus.NewDataqueryBuilder().Datasource(datasource()).RefId(refID(i)).Expr(q.expr).LegendFormat(q.legend).Range())
	}
	return out
}

// instant asks for the values at the end of the time range, as a table.
func instant(exprs []string) (out []cog.Builder[variants.Dataquery]) {
	for i, e := range exprs {
		out = append(out, prometheus.NewDataqueryBuilder().Datasource(datasource()).RefId(refID(i)).Expr(e).
			Format(prometheus.PromQueryFormatTable).Instant())
	}
	return out
}

func refID(i int) string { return string(rune('A' + i)) }

// step is the colour from a value on.
type step struct {
	from  float64
	color string
}

// steps are thresholds above a base colour.
func steps(base string, above ...step) cog.Builder[dashboard.ThresholdsConfig] {
	all := []dashboard.Threshold{{Color: base}}
	for _, s := range above {
		all = append(all, dashboard.Threshold{Value: &s.from, Color: s.color})
	}
	return dashboard.NewThresholdsConfigBuilder().Mode(dashboard.ThresholdsModeAbsolute).Steps(all)
}

func byThreshold() cog.Builder[dashboard.FieldColor] {
	return dashboard.NewFieldColorBuilder().Mode(dashboard.FieldColorModeIdThresholds)
}

// stat adds one number, coloured.
func (b *board) stat(a about, t cog.Builder[dashboard.ThresholdsConfig], expr string) {
	b.WithPanel(stat.NewPanelBuilder().Id(b.next()).Title(a.title).Description(a.desc).Datasource(datasource()).Unit(a.unit).
		Span(a.width).Height(a.height).Thresholds(t).ColorScheme(byThreshold()).ColorMode(common.BigValueColorModeValue).
		GraphMode(common.BigValueGraphModeArea).ReduceOptions(common.NewReduceDataOptionsBuilder().Calcs([]string{"lastNotNull"})).
		NoValue("no data").Targets(ranged([]query{{expr, ""}})))
}

// lines adds time series. limit, if any, draws its steps as dashed lines.
func (b *board) lines(a about, limit cog.Builder[dashboard.ThresholdsConfig], qs ...query) {
	p := b.timeSeries(a, qs).LineWidth(1).FillOpacity(0)
	if limit != nil {
		p.Thresholds(limit).ThresholdsStyle(common.NewGraphThresholdsStyleConfigBuilder().Mode(common.GraphThresholdsStyleModeDashed))
	}
	b.WithPanel(p)
}

// areas adds time series stacked on each other.
func (b *board) areas(a about, qs ...query) {
	b.WithPanel(b.timeSeries(a, qs).LineWidth(1).FillOpacity(40).
		Stacking(common.NewStackingConfigBuilder().Mode(common.StackingModeNormal)))
}

func (b *board) timeSeries(a about, qs []query) *timeseries.PanelBuilder {
	return timeseries.NewPanelBuilder().Id(b.next()).Title(a.title).Description(a.desc).Datasource(datasource()).Unit(a.unit).
		Span(a.width).Height(a.height).ShowPoints(common.VisibilityModeNever).
		Legend(common.NewVizLegendOptionsBuilder().ShowLegend(true).DisplayMode(common.LegendDisplayModeList).Placement(common.LegendPlacementBottom)).
		Tooltip(common.NewVizTooltipOptionsBuilder().Mode(common.TooltipDisplayModeMulti).Sort(common.SortOrderDescending)).
		Targets(ranged(qs))
}

// heat adds a heatmap of native histograms.
func (b *board) heat(a about, expr string) {
	b.WithPanel(heatmap.NewPanelBuilder().Id(b.next()).Title(a.title).Description(a.desc).Datasource(datasource()).Unit(a.unit).
		Span(a.width).Height(a.height).Calculate(false).ShowLegend().
		Color(heatmap.NewHeatmapColorOptionsBuilder().Mode(heatmap.HeatmapColorModeScheme).Scheme("Turbo").Steps(64)).
		YAxis(heatmap.NewYAxisConfigBuilder().Unit(a.unit)).
		WithTarget(prometheus.NewDataqueryBuilder().Datasource(datasource()).RefId("A").Expr(expr).Format(prometheus.PromQueryFormatHeatmap).Range()))
}

// column is what to do with a field of a table: rename it, give it a unit, colour its cells.
type column struct {
	field, name, unit string
	steps             []step // colours of the cell's background, if any
	text              map[string]dashboard.ValueMappingResult
}

// table adds a table with the given columns in this order and no others. The value of query A is the
// field Value, or Value #A, Value #B … if there are several.
func (b *board) table(a about, columns []column, exprs ...string) {
	order, names, include := map[string]int{}, map[string]string{}, map[string]bool{}
	p := b.grid(a, exprs)
	if len(exprs) > 1 {
		p.WithTransformation(dashboard.DataTransformerConfig{Id: "merge", Options: map[string]any{}})
	}
	for i, c := range columns {
		order[c.field], include[c.field] = i, true
		if c.name != "" {
			names[c.field] = c.name
		}
		name := c.name
		if name == "" {
			name = c.field
		}
		if props := c.properties(); len(props) > 0 {
			p.OverrideByName(name, props)
		}
	}
	// organize is told what to show and what to call it: its list of exclusions would let new labels through.
	p.WithTransformation(dashboard.DataTransformerConfig{Id: "filterFieldsByName", Options: map[string]any{"include": map[string]any{"names": keys(columns)}}})
	p.WithTransformation(dashboard.DataTransformerConfig{Id: "organize", Options: map[string]any{"indexByName": order, "renameByName": names}})
	b.WithPanel(p)
}

func keys(columns []column) (out []string) {
	for _, c := range columns {
		out = append(out, c.field)
	}
	return out
}

func (c column) properties() (out []dashboard.DynamicConfigValue) {
	if c.unit != "" {
		out = append(out, dashboard.DynamicConfigValue{Id: "unit", Value: c.unit})
	}
	if c.text != nil {
		out = append(out, dashboard.DynamicConfigValue{Id: "mappings", Value: []any{map[string]any{"type": "value", "options": c.text}}})
	}
	if len(c.steps) > 0 {
		all := []map[string]any{{"color": "transparent", "value": nil}}
		for _, s := range c.steps {
			all = append(all, map[string]any{"color": s.color, "value": s.from})
		}
		out = append(out, dashboard.DynamicConfigValue{Id: "thresholds", Value: map[string]any{"mode": "absolute", "steps": all}})
	}
	if c.text != nil || len(c.steps) > 0 {
		out = append(out, dashboard.DynamicConfigValue{Id: "custom.cellOptions", Value: map[string]any{"type": "color-background"}})
	}
	return out
}

// matrix adds a table of src (rows) by dst (columns). Pairs without a value stay empty and uncoloured.
func (b *board) matrix(a about, c column, expr string) {
	p := b.grid(a, []string{expr}).
		WithTransformation(dashboard.DataTransformerConfig{Id: "sortBy", Options: map[string]any{"sort": []any{map[string]any{"field": "dst"}}}}).
		WithTransformation(dashboard.DataTransformerConfig{Id: "sortBy", Options: map[string]any{"sort": []any{map[string]any{"field": "src"}}}}).
		WithTransformation(dashboard.DataTransformerConfig{Id: "groupingToMatrix", Options: map[string]any{
			"rowField": "src", "columnField": "dst", "valueField": "Value", "emptyValue": "null"}})
	c.unit = a.unit
	b.WithPanel(p.OverrideByFieldType("number", c.properties()))
}

// grid is what tables and matrices have in common.
func (b *board) grid(a about, exprs []string) *table.PanelBuilder {
	return table.NewPanelBuilder().Id(b.next()).Title(a.title).Description(a.desc).Datasource(datasource()).
		Span(a.width).Height(a.height).NoValue("").Thresholds(steps("transparent")).ColorScheme(byThreshold()).Targets(instant(exprs))
}

// upDown adds a timeline of 0 and 1.
func (b *board) upDown(a about, q query) {
	b.WithPanel(statetimeline.NewPanelBuilder().Id(b.next()).Title(a.title).Description(a.desc).Datasource(datasource()).Unit(a.unit).
		Span(a.width).Height(a.height).ShowValue(common.VisibilityModeNever).RowHeight(0.8).LineWidth(0).FillOpacity(80).
		Thresholds(steps("red", step{1, "green"})).ColorScheme(byThreshold()).Mappings([]dashboard.ValueMapping{{
		ValueMap: &dashboard.ValueMap{Type: dashboard.MappingTypeValueToText, Options: downUp}}}).
		Legend(common.NewVizLegendOptionsBuilder().ShowLegend(false)).Targets(ranged([]query{q})))
}

// What 0 and 1 are called.
var (
	downUp   = map[string]dashboard.ValueMappingResult{"0": {Text: new("down"), Color: new("red")}, "1": {Text: new("up"), Color: new("green")}}
	failedOK = map[string]dashboard.ValueMappingResult{"0": {Text: new("failed"), Color: new("red")}, "1": {Text: new("ok"), Color: new("green")}}
)

// label is a variable with the values of a label, of which any number may be chosen.
func label(name, desc, metric string) *dashboard.QueryVariableBuilder {
	return dashboard.NewQueryVariableBuilder(name).Description(desc).Datasource(datasource()).
		Query(dashboard.StringOrMap{String: new(fmt.Sprintf("label_values(%s, %s)", metric, name))}).
		Multi(true).IncludeAll(true).AllValue(".*").Current(option("All", "$__all")).
		Refresh(dashboard.VariableRefreshOnTimeRangeChanged).Sort(dashboard.VariableSortNaturalAsc)
}

func option(text, value string) dashboard.VariableOption {
	return dashboard.VariableOption{Selected: new(true),
		Text:  dashboard.StringOrArrayOfString{String: &text},
		Value: dashboard.StringOrArrayOfString{String: &value}}
}
