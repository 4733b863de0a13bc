package control

import (
	"math"
	"strings"
	"testing"
)

// TestRowsValidate: a peer's rows are shown on pages and judged, so none may lie about whose they are or hold what is no figure.
func TestRowsValidate(t *testing.T) {
	good := func() RowsReply {
		v := 1.5
		return RowsReply{Node: "a", ID: "x", Planned: 1, Done: 1, Labels: map[string]string{"rack": "r1"},
			Rows: []Row{{Src: "a", SrcDevice: "mlx5_0", SrcPort: 1, Dst: "b", Probe: "p", Kind: "bandwidth", Op: "write", Result: "ok", Points: []Point{{Size: 8, Bandwidth: &v}}}}}
	}
	if r := good(); r.Validate() != nil {
		t.Fatal(r.Validate())
	}
	nan, neg, two := math.NaN(), -1.0, 2.0
	for name, spoil := range map[string]func(*RowsReply){
		"another node's row":  func(r *RowsReply) { r.Rows[0].Src = "c" },
		"no peer":             func(r *RowsReply) { r.Rows[0].Dst = "" },
		"unknown result":      func(r *RowsReply) { r.Rows[0].Result = "splendid" },
		"escape in a name":    func(r *RowsReply) { r.Rows[0].Dst = "b\x1b[2J" },
		"long name":           func(r *RowsReply) { r.Rows[0].Dst = strings.Repeat("b", MaxName+1) },
		"NaN":                 func(r *RowsReply) { r.Rows[0].Points[0].Bandwidth = &nan },
		"negative":            func(r *RowsReply) { r.Rows[0].Points[0].P50 = &neg },
		"ratio above 1":       func(r *RowsReply) { r.Rows[0].Points[0].Loss = &two },
		"too many points":     func(r *RowsReply) { r.Rows[0].Points = make([]Point, maxPoints+1) },
		"too many rows":       func(r *RowsReply) { r.Rows = make([]Row, MaxRows+1) },
		"negative count":      func(r *RowsReply) { r.Done = -1 },
		"control char, label": func(r *RowsReply) { r.Labels["rack"] = "\n" },
	} {
		r := good()
		spoil(&r)
		if r.Validate() == nil {
			t.Errorf("%s is taken", name)
		}
	}
	r := good()
	r.Rows[0].Detail = "two\nlines \x1b[31m"
	if err := r.Validate(); err != nil || strings.ContainsAny(r.Rows[0].Detail, "\n\x1b") {
		t.Errorf("%v: %q", err, r.Rows[0].Detail)
	}
	s := SweepRequest{ID: "x", Deadline: 60}
	if err := s.Validate(); err != nil {
		t.Error(err)
	}
	for name, s := range map[string]SweepRequest{"no id": {Deadline: 60}, "no deadline": {ID: "x"}, "many repeats": {ID: "x", Deadline: 60, Repeat: maxRepeat + 1}} {
		if s.Validate() == nil {
			t.Errorf("%s is taken", name)
		}
	}
}
