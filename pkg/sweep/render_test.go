package sweep

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
)

// faulty is a report with one of everything, over several sizes.
func faulty(nodes, rails, perRack int) *Report {
	f := newFleet(3, nodes, rails, perRack)
	f.missing = 0.02
	f.fault = func(l *link) {
		switch {
		case touches(l, nodes) && nodes > 4:
			l.fails = "connect unreachable path"
		case touches(l, 3) && l.rail == 0:
			l.bandwidth *= 0.4
		case touches(l, 2) && nodes > 8:
			lossy(l, 0.02)
		}
	}
	in := f.input()
	for i := range in.Rows {
		r := &in.Rows[i]
		if len(r.Points) == 0 || r.Probe != "bandwidth" {
			continue
		}
		top := *r.Points[0].Bandwidth
		r.Points = nil
		for size := 64; size <= 8<<20; size *= 4 {
			b := top * float64(size) / float64(size+8192)
			r.Points = append(r.Points, control.Point{Size: size, Bandwidth: &b})
		}
	}
	in.Last = New(newFleet(4, nodes, rails, perRack).input())
	if nodes == 4 {
		in.Limits = map[string]Limits{"bandwidth": {LineRate: 0.8}}
	}
	in.Notes = []string{`a note with <script>alert("x")</script>`}
	return New(in)
}

// TestRender: every rendering is well-formed, shows the findings, and the page needs nothing from elsewhere. SWEEP_PAGES=DIR keeps pages
// to be looked at.
func TestRender(t *testing.T) {
	for _, c := range [][3]int{{4, 1, 0}, {8, 1, 0}, {64, 1, 8}, {70, 1, 10}} {
		t.Run(fmt.Sprintf("%d nodes", c[0]), func(t *testing.T) {
			r := faulty(c[0], c[1], c[2])
			var text, html, junit bytes.Buffer
			if err := r.Text(&text); err != nil {
				t.Fatal(err)
			}
			if err := r.HTML(&html); err != nil {
				t.Fatal(err)
			}
			if err := r.JUnit(&junit); err != nil {
				t.Fatal(err)
			}
			for what, s := range map[string]string{"text": text.String(), "html": html.String(), "junit": junit.String()} {
				for _, n := range []string{"node3/mlx5_0", "nightly"} {
					if !strings.Contains(s, n) {
						t.Errorf("%s does not name %s", what, n)
					}
				}
				if strings.Contains(s, "NaN") || strings.Contains(s, "Inf") && !strings.Contains(s, "Infi") {
					t.Errorf("%s has a figure that is none", what)
				}
			}
			for _, no := range []string{"http://", "https://", "<script", "ZgotmplZ", " src=", "url("} {
				if strings.Contains(strings.ReplaceAll(html.String(), "&lt;script", ""), no) {
					t.Errorf("the page has %q", no)
				}
			}
			var suites junitSuites
			if err := xml.Unmarshal(junit.Bytes(), &suites); err != nil {
				t.Fatal(err)
			}
			if suites.Failures == 0 || suites.Tests < c[0]*(c[0]-1) {
				t.Errorf("JUnit has %d failures of %d", suites.Failures, suites.Tests)
			}
			if dir := os.Getenv("SWEEP_PAGES"); dir != "" {
				if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("sweep-%d.html", c[0])), html.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
				t.Logf("%d bytes of HTML\n%s", html.Len(), text.String())
			}
		})
	}
}

// TestJSON holds the machine shape: the fields that scripts use, and no null where a list is.
func TestJSON(t *testing.T) {
	for name, r := range map[string]*Report{"faulty": faulty(8, 2, 0), "empty": New(Input{Name: "x"})} {
		data, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var m map[string]any
		if err := json.Unmarshal(data, &m); err != nil {
			t.Fatal(err)
		}
		for _, list := range []string{"nodes", "pairs", "unreached", "suspects", "doubtful", "exonerated", "rails", "notes"} {
			if _, ok := m[list].([]any); !ok {
				t.Errorf("%s: %s is %T", name, list, m[list])
			}
		}
		for _, field := range []string{"verdict", "coverage", "started", "finished", "diff"} {
			if _, ok := m[field]; !ok {
				t.Errorf("%s: no %s", name, field)
			}
		}
		var back Report
		if err := json.Unmarshal(data, &back); err != nil {
			t.Fatal(err)
		}
		var a, b bytes.Buffer
		if err := r.HTML(&a); err != nil {
			t.Fatal(err)
		}
		if err := back.HTML(&b); err != nil {
			t.Fatal(err)
		}
		if a.String() != b.String() {
			t.Errorf("%s: the page of a stored report differs", name)
		}
	}
}

// TestOddRows must neither panic nor accuse: rows that can't be trusted to be sensible.
func TestOddRows(t *testing.T) {
	zero, inf := 0.0, math.MaxFloat64
	rows := []Row{
		{}, {Src: "a", Dst: "a", Result: "ok"}, {Src: "a", Dst: "b", Result: "ok", Points: []control.Point{{}}},
		{Src: "a", Dst: "b", Result: "ok", Kind: "bandwidth", Points: []control.Point{{Size: 0, Bandwidth: &zero, P50: &zero, P99: &inf}}},
		{Src: "b", Dst: "a", Result: "failed"}, {Src: "c", Dst: "d", Result: "new-word"},
	}
	for i := range 8 {
		for j := range 8 {
			rows = append(rows, Row{Src: name(i), Dst: name(j), Result: "ok", Kind: "bandwidth", Op: "write", Points: []control.Point{{Size: 8, Bandwidth: &zero}, {Size: 16, Bandwidth: &inf}}})
		}
	}
	r := New(Input{Rows: rows})
	for _, f := range []func() error{func() error { return r.Text(&bytes.Buffer{}) }, func() error { return r.HTML(&bytes.Buffer{}) }, func() error { return r.JUnit(&bytes.Buffer{}) }} {
		if err := f(); err != nil {
			t.Error(err)
		}
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
	r.Confirm(Input{Rows: rows}, rows)
}
