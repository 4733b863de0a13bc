package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// Of one in badShare packets sent again, and few at least, a path is called bad; less is a blemish. An emulated lab has blemishes
// by itself.
const (
	badShare = 0.003
	few      = 3
)

// troubles are the classes that speak against a path, and what to do about each. Duplicates that a peer got are not
// among them: one loss makes many.
var troubles = []struct {
	class  counters.Class
	advice string
}{
	{counters.Physical, "bit errors or a flapping link: clean or replace cable and transceiver, then the port"},
	{counters.RetransmitLocal, "packets get lost: look for discards and physical errors at both ends and at every switch port on the way, then at PFC and ECN"},
	{counters.Timeout, "answers get lost: look for discards at the switches on the way"},
	{counters.RetryExhausted, "a connection died: look for discards at the switches on the way"},
	{counters.Discard, "packets are dropped for want of room: look at PFC, ECN and buffers of this end and its switch port"},
	{counters.NoBuffer, "the receiver drops: look at its CPU load and at flow control"},
	{counters.RNR, "the receiver does not keep up: look at its CPU load"},
	{counters.Congestion, "another sender shares the way: repeat without load, or look at ECN's thresholds"},
	{counters.Pause, "a link on the way is paused: find the receiver that does not drain"},
	{counters.Sequence, "packets get lost or overtake each other: look for discards, and for links with unequal load balancing"},
}

// observation is what the counters of both ends did while messages of one kind were under way.
type observation struct {
	what     string
	packets  uint64
	evidence probe.Evidence
}

func (t *trip) during(what string, r *probe.Result) {
	o := observation{what: what, evidence: r.Evidence}
	for _, run := range r.Runs {
		size := uint64(1)
		if r.MTU != nil && *r.MTU > 0 {
			size = uint64((run.Size + *r.MTU - 1) / *r.MTU)
		}
		o.packets += run.Iterations * size
	}
	t.seen = append(t.seen, o)
}

// lossy reports whether so much was sent again that the path is bad.
func (o observation) lossy() bool {
	return slices.ContainsFunc([]*probe.EndEvidence{o.evidence.Local, o.evidence.Remote}, func(e *probe.EndEvidence) bool {
		return e != nil && o.bad(e.Classes[string(counters.RetransmitLocal)])
	})
}

func (o observation) bad(n uint64) bool { return n >= few && float64(n) > badShare*float64(o.packets) }

// judge has a line for each end and kind of message during which its counters moved, and one for an end where all was quiet.
func (t *trip) judge() {
	if len(t.seen) == 0 {
		t.skip(Counters, t.Peer, "no message arrived")
		return
	}
	t.judgeEnd(t.port.name(), func(o observation) *probe.EndEvidence { return o.evidence.Local })
	t.judgeEnd(t.host, func(o observation) *probe.EndEvidence { return o.evidence.Remote })
}

func (t *trip) judgeEnd(name string, of func(observation) *probe.EndEvidence) {
	const expected = "nothing sent again, dropped or paused"
	noted, dark := false, false
	quiet := map[string]bool{}
	for _, o := range t.seen {
		e := of(o)
		if e == nil {
			dark = true
			continue
		}
		var found []string
		verdict, advice := OK, ""
		for _, trouble := range troubles {
			n, counted := e.Classes[string(trouble.class)]
			if n == 0 {
				if counted {
					quiet[string(trouble.class)] = true
				}
				continue
			}
			found = append(found, fmt.Sprintf("%s %d (%s)", trouble.class, n, strings.Join(e.Moved[string(trouble.class)], ", ")))
			if advice == "" {
				verdict, advice = Warning, trouble.advice
			}
			if o.bad(n) {
				verdict = Failed
			}
		}
		if verdict != OK {
			noted = true
			t.add(Counters, verdict, fmt.Sprintf("%s, %s", name, o.what), fmt.Sprintf("%s, in some %d packets", strings.Join(found, "; "), o.packets), expected, advice)
		}
	}
	switch {
	case noted:
	case dark:
		t.add(Counters, Unknown, name, "this end's driver or namespace shows no counters", expected, "")
	case len(quiet) == 0:
		t.add(Counters, Unknown, name, "this end's driver counts nothing of the kind", expected, "")
	default:
		t.add(Counters, OK, name, "quiet: "+strings.Join(slices.Sorted(maps.Keys(quiet)), ", "), expected, "")
	}
}

// standing looks at what the counters say by themselves, since they were last cleared. After a peer was probed only those of
// the port it was probed from are of interest, and those have been judged.
func (e *examination) standing(chosen *port) {
	const expected = "no link errors, nothing that can't be read"
	if chosen != nil {
		return
	}
	looked := false
	for _, p := range e.ports {
		if p.sys == nil {
			continue
		}
		looked = true
		var found []string
		verdict, advice := OK, ""
		note := func(v Verdict, text, hint string) {
			found = append(found, text)
			if verdict == OK || verdict == Unknown {
				verdict, advice = v, hint
			}
		}
		physical, known := p.sys.Classes[counters.Physical]
		if link, ok := p.sys.LinkClasses[counters.Physical]; ok && link.Sum > physical.Sum {
			physical, known = link, true
		}
		if physical.Sum > 0 {
			note(Warning, fmt.Sprintf("%d link errors since they were cleared (%s)", physical.Sum, strings.Join(physical.Names, ", ")),
				"look again in an hour: what stands still is past; what grows is cable, transceiver or port")
		}
		if len(p.sys.Saturated) > 0 {
			note(Warning, "stopped at their highest value: "+strings.Join(p.sys.Saturated, ", "), "they can't show growth until they are cleared: perfquery -R")
		}
		if n := len(p.sys.Unreadable); n > 0 {
			note(Unknown, fmt.Sprintf("%d can't be read (%s …)", n, p.sys.Unreadable[0].Name), "the driver or firmware refuses them to this function; other counters are not affected")
		}
		switch {
		case len(found) > 0:
		case len(p.sys.CountersRaw) == 0:
			verdict, found = Unknown, []string{"this driver has no counters here, or they are another network namespace's"}
		case !known:
			found = []string{"readable; this driver counts no link errors"}
		default:
			found = []string{"no link errors"}
		}
		e.add(Counters, verdict, p.name(), strings.Join(found, "; "), expected, advice)
	}
	if !looked {
		e.skip(Counters, "ports", "there is no port in sysfs")
	}
}
