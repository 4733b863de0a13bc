package config

import (
	"strings"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

func TestPingProbe(t *testing.T) {
	c, err := Parse("p.yaml", []byte(`
node: {name: n}
probes:
  - {name: p, schedule: "@every 1s", kind: ping, count: 20, interval: 5ms, sizes: [64, 1KiB], traffic_class: 104, flow_label: 7}
  - {name: q, schedule: "@every 1s", kind: ping, transport: ud, op: send}
`))
	if err != nil {
		t.Fatal(err)
	}
	p := c.Probes[0].Spec.WithDefaults()
	if p.Kind != probe.Ping || p.Transport != verbs.UD || p.Op != verbs.Send || p.Iterations != 20 || p.Gap != 5*time.Millisecond || len(p.Sizes) != 2 ||
		p.TrafficClass != 104 || p.FlowLabel != 7 || p.Interval != time.Second {
		t.Errorf("%+v", p)
	}
	text := string(c.Effective())
	for _, want := range []string{"kind: ping", "count: 20", "interval: 5ms", "count: 10", "interval: 10ms"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	again, err := Parse("p.yaml", []byte(text))
	if err != nil {
		t.Fatalf("what it is used as can't be read again: %s\n%s", err, text)
	}
	if got := string(again.Effective()); got != text {
		t.Errorf("reads as\n%s\nbut was\n%s", got, text)
	}
}
