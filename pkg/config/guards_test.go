package config

import (
	"testing"
	"time"
)

// What is written of guards is what holds, and what is told as effective is the same.
func TestGuards(t *testing.T) {
	const text = `
node: {name: a}
guards:
  max_utilization: 0.05
  abort_on_traffic: true
  budget: {bytes_per_day: 10TiB, concurrent: 2}
  blackout: ["Mon-Fri 09:00-18:00", "Europe/Berlin Sat 22:00-06:00"]
  command: [/usr/bin/test, "!", -e, "/run/$${JOB}"]
`
	c, err := Parse("a.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	again, err := Parse("again.yaml", c.Effective())
	if err != nil {
		t.Fatalf("%s\n%s", err, c.Effective())
	}
	for _, g := range []Guards{c.Guards, again.Guards} {
		if g.MaxUtilization != 0.05 || !g.AbortOnTraffic || g.BytesPerDay != 10<<40 || g.Concurrent != 2 || len(g.Blackout) != 2 || len(g.Command) != 4 || g.Command[3] != "/run/${JOB}" {
			t.Errorf("got %+v", g)
			continue
		}
		if monday := time.Date(2026, 11, 30, 10, 0, 0, 0, time.UTC); !g.Blackout[0].Contains(monday) || g.Blackout[1].Contains(monday) {
			t.Errorf("the windows are %v", g.Blackout)
		}
	}
	if c.Hash() != again.Hash() {
		t.Error("the hashes differ")
	}
	none, err := Parse("a.yaml", []byte("node: {name: a}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if g := none.Guards; g.MaxUtilization != 0 || g.AbortOnTraffic || g.BytesPerDay != 0 || g.Concurrent != 0 || g.Blackout != nil || g.Command != nil {
		t.Errorf("without guards: %+v", g)
	}
}
