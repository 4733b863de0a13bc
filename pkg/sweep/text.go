package sweep

import (
	"encoding/xml"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

func rate(v *float64) string {
	if v == nil {
		return "-"
	}
	return FormatRate(*v)
}

func seconds(v *float64) string {
	if v == nil {
		return "-"
	}
	return FormatSeconds(*v)
}

// tableNodes is from how many nodes on the text lists only those with something to tell.
const tableNodes = 32

// Text writes the report for a terminal.
func (r *Report) Text(w io.Writer) error {
	var b strings.Builder
	of := "this node's rows only"
	if r.Fleet {
		of = "rows of the whole fleet"
	}
	fmt.Fprintf(&b, "sweep %s by %s (%s): %s\n", r.Name, r.By, of, strings.ToUpper(string(r.Verdict)))
	fmt.Fprintf(&b, "%s to %s, %d of %d rows measured: coverage %.1f %%\n", formatTime(r.Started), formatTime(r.Finished), r.Measured, r.Planned, 100*r.Coverage)
	if len(r.Suspects) > 0 {
		b.WriteString("\nSUSPECTS\n")
		for _, s := range r.Suspects {
			fmt.Fprintf(&b, "  %s %s (%s, %s): %s\n", s.Kind, s.Name, s.direction(), s.state(), s.Evidence)
		}
	}
	if len(r.Unreached) > 0 {
		b.WriteString("\nUNREACHED\n")
		for _, u := range r.Unreached {
			fmt.Fprintf(&b, "  %s: %s: %s (tried by %d)\n", u.Name, u.Reason, u.Detail, u.Tried)
		}
	}
	if len(r.Doubtful) > 0 {
		b.WriteString("\nDOUBTFUL (bad in one run, which accuses nobody yet)\n")
		for _, s := range r.Doubtful {
			fmt.Fprintf(&b, "  %s %s: %s\n", s.Kind, s.Name, s.Evidence)
		}
	}
	if len(r.Exonerated) > 0 {
		b.WriteString("\nCLEARED (bad once, fine when measured again)\n")
		for _, s := range r.Exonerated {
			fmt.Fprintf(&b, "  %s %s: %s\n", s.Kind, s.Name, s.Evidence)
		}
	}
	b.WriteString("\n")
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NODE\tNIC\tRAIL\tVERDICT\tMEASURED\tBAD\tSENDING\tRECEIVING\tP50\tP99")
	hidden := 0
	for _, n := range r.Nodes {
		if len(r.Nodes) > tableNodes && n.Verdict == Healthy {
			hidden++
			continue
		}
		if len(n.NICs) == 0 {
			fmt.Fprintf(t, "%s\t-\t-\t%s\t0\t0\t-\t-\t-\t-\n", n.Name, n.Verdict)
		}
		for _, x := range n.NICs {
			v := x.Verdict
			if n.Verdict == Unreached {
				v = n.Verdict
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%d\t%s\t%s\t%s\t%s\n", n.Name, nic{device: x.Device, port: x.Port}.String()[1:], x.Rail, v, x.Measured, x.Bad,
				rate(x.Sending), rate(x.Receiving), seconds(x.P50), seconds(x.P99))
		}
	}
	t.Flush()
	if hidden > 0 {
		fmt.Fprintf(&b, "and %d healthy nodes\n", hidden)
	}
	if d := r.Diff; d != nil {
		fmt.Fprintf(&b, "\nSINCE THE LAST GOOD SWEEP (%s)\n", formatTime(d.Since))
		if len(d.Joined)+len(d.Left)+len(d.Changes) == 0 {
			b.WriteString("  nothing changed\n")
		}
		if len(d.Joined) > 0 {
			fmt.Fprintf(&b, "  joined: %s\n", list(d.Joined, 20))
		}
		if len(d.Left) > 0 {
			fmt.Fprintf(&b, "  left: %s\n", list(d.Left, 20))
		}
		for _, c := range d.Changes[:min(20, len(d.Changes))] {
			fmt.Fprintf(&b, "  %s\n", c)
		}
	}
	if len(r.Notes) > 0 {
		b.WriteString("\nNOTES\n")
		for _, n := range r.Notes {
			fmt.Fprintf(&b, "  %s\n", n)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (s Suspect) direction() string {
	if s.Direction == Both || s.Direction == "" {
		return "both ways"
	}
	return s.Direction
}

func (s Suspect) state() string {
	switch {
	case s.Confirmed:
		return "confirmed"
	case s.Checks > 0:
		return "looked at again, neither confirmed nor cleared"
	}
	return "not confirmed yet"
}

// String says what changed.
func (c Change) String() string {
	show := FormatRate
	if c.Figure == "p50" || c.Figure == "p99" {
		show = FormatSeconds
	}
	word := "better"
	if c.Worse {
		word = "worse"
	}
	return fmt.Sprintf("%s %s: %s, was %s (%s)", nic{c.Node, c.Device, c.Port}, c.Figure, show(c.Is), show(c.Was), word)
}

// ---- JUnit ----

type junitSuites struct {
	XMLName  xml.Name     `xml:"testsuites"`
	Name     string       `xml:"name,attr"`
	Tests    int          `xml:"tests,attr"`
	Failures int          `xml:"failures,attr"`
	Skipped  int          `xml:"skipped,attr"`
	Time     string       `xml:"time,attr"`
	Suites   []junitSuite `xml:"testsuite"`
}

type junitSuite struct {
	Name     string      `xml:"name,attr"`
	Tests    int         `xml:"tests,attr"`
	Failures int         `xml:"failures,attr"`
	Errors   int         `xml:"errors,attr"`
	Skipped  int         `xml:"skipped,attr"`
	Time     string      `xml:"timestamp,attr"`
	Cases    []junitCase `xml:"testcase"`
}

type junitCase struct {
	Class   string        `xml:"classname,attr"`
	Name    string        `xml:"name,attr"`
	Time    string        `xml:"time,attr"`
	Failure *junitMessage `xml:"failure"`
	Skipped *junitMessage `xml:"skipped"`
}

type junitMessage struct {
	Message string `xml:"message,attr"`
	Type    string `xml:"type,attr,omitempty"`
}

// JUnit writes the report as JUnit XML: a suite each for nodes, rails, suspects and pairs.
func (r *Report) JUnit(w io.Writer) error {
	out := junitSuites{Name: "rdmabenchd sweep " + r.Name, Time: fmt.Sprintf("%.3f", max(0, r.Finished.Sub(r.Started).Seconds()))}
	suite := func(name string, cases []junitCase) {
		s := junitSuite{Name: name, Tests: len(cases), Cases: cases, Time: r.Started.UTC().Format("2006-01-02T15:04:05")}
		for i := range cases {
			cases[i].Class, cases[i].Time = "rdmabenchd."+r.Name+"."+name, "0"
			if cases[i].Failure != nil {
				s.Failures++
			}
			if cases[i].Skipped != nil {
				s.Skipped++
			}
		}
		out.Tests, out.Failures, out.Skipped = out.Tests+s.Tests, out.Failures+s.Failures, out.Skipped+s.Skipped
		out.Suites = append(out.Suites, s)
	}
	because := func(match func(Suspect) bool) string {
		var all []string
		for _, s := range r.Suspects {
			if match(s) {
				all = append(all, fmt.Sprintf("%s %s: %s", s.Kind, s.Name, s.Evidence))
			}
		}
		return strings.Join(all, "; ")
	}
	var nodes, rails, others, pairs []junitCase
	for _, n := range r.Nodes {
		c := junitCase{Name: n.Name}
		switch n.Verdict {
		case Unhealthy:
			c.Failure = &junitMessage{because(func(s Suspect) bool { return s.Node == n.Name && s.Kind != Pair }), string(n.Verdict)}
		case Unreached:
			c.Failure = &junitMessage{"nobody could talk to it", string(n.Verdict)}
			for _, u := range r.Unreached {
				if u.Name == n.Name {
					c.Failure.Message = u.Reason + ": " + u.Detail
				}
			}
		case Unknown:
			c.Skipped = &junitMessage{Message: "not measured"}
		}
		nodes = append(nodes, c)
	}
	for _, x := range r.Rails {
		c := junitCase{Name: "rail " + orUnknown(x.Name)}
		switch x.Verdict {
		case Unhealthy:
			c.Failure = &junitMessage{because(func(s Suspect) bool { return s.Kind == Rail && s.Rail == x.Name }), string(x.Verdict)}
		case Unknown:
			c.Skipped = &junitMessage{Message: "not measured"}
		}
		rails = append(rails, c)
	}
	for _, s := range r.Suspects {
		if s.Kind == Rack || s.Kind == Pair {
			others = append(others, junitCase{Name: string(s.Kind) + " " + s.Name, Failure: &junitMessage{s.Evidence, s.state()}})
		}
	}
	for i := range r.Pairs {
		p := &r.Pairs[i]
		c := junitCase{Name: fmt.Sprintf("%s %s -> %s", p.Probe, nic{p.Src, p.SrcDevice, p.SrcPort}, nic{p.Dst, p.DstDevice, p.DstPort})}
		switch {
		case p.Verdict == Unhealthy:
			c.Failure = &junitMessage{p.Why, string(p.Verdict)}
		case p.Result == string(probe.Skipped):
			c.Skipped = &junitMessage{Message: p.Why}
		}
		pairs = append(pairs, c)
	}
	if r.Verdict == Incomplete {
		others = append(others, junitCase{Name: "coverage", Failure: &junitMessage{fmt.Sprintf("%d of %d rows measured", r.Measured, r.Planned), string(Incomplete)}})
	}
	suite("nodes", nodes)
	suite("rails", rails)
	suite("findings", others)
	suite("pairs", pairs)
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return err
	}
	enc := xml.NewEncoder(w)
	enc.Indent("", " ")
	if err := enc.Encode(out); err != nil {
		return err
	}
	_, err := io.WriteString(w, "\n")
	return err
}
