package exporter

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

func coverageOf(t *testing.T, e *Exporter, name string) string {
	t.Helper()
	w := get(e, "/api/v1/coverage?probe="+name)
	var reply coverageReply
	if err := json.Unmarshal(w.Body.Bytes(), &reply); err != nil || w.Code != http.StatusOK || reply.Node != "n1" || len(reply.Probes) != 1 {
		t.Fatalf("%d %s: %v", w.Code, w.Body, err)
	}
	c := reply.Probes[0]
	if !strings.Contains(w.Body.String(), `"unmeasured":[`) {
		t.Errorf("no list of the unmeasured: %s", w.Body)
	}
	text := fmt.Sprintf("%d/%d over=%t", c.Measured, c.Planned, c.Over)
	for _, u := range c.Unmeasured {
		text += fmt.Sprintf(" %s %d/%d %v", u.Peer, u.Measured, u.Planned, u.Reasons)
	}
	return text
}

func TestCoverage(t *testing.T) {
	e := newExporter(t, Options{})
	first := time.Now().Add(-time.Hour).Truncate(time.Second)
	at := func(r *probe.Result, after time.Duration, port int) *probe.Result {
		r.Time, r.Port = first.Add(after), port
		return r
	}
	metric := func(value float64) {
		t.Helper()
		want(t, scrape(t, e), value, "coverage_ratio", "probe", "rtt")
	}
	step := func(want string) {
		t.Helper()
		if got := coverageOf(t, e, "rtt"); got != want {
			t.Errorf("coverage %q, want %q", got, want)
		}
	}

	step("0/0 over=false")
	e.Plan("rtt", first, []string{"n2", "n3"}, 2)
	e.Observe(at(latencyResult("n2", 2000), 0, 1))
	e.Observe(at(latencyResult("n2", 2000), time.Second, 1)) // the same pair again
	e.Observe(at(latencyResult("stranger", 2000), time.Second, 1))
	step("1/4 over=false n2 1/2 [] n3 0/2 []")
	metric(absent) // nothing is known of a period under way
	if page := get(e, "/").Body.String(); !strings.Contains(page, "1 of 4 planned pairs measured so far") {
		t.Error("the status page does not tell")
	}
	e.Observe(at(skipped(latencyResult("n2", 2000), probe.BusyPort), time.Second, 2))
	e.Observe(at(failed(latencyResult("n3", 2000), probe.StageRun, probe.Timeout, probe.ScopePath), time.Second, 1))
	e.Observe(at(failed(latencyResult("n3", 2000), probe.StageRun, probe.RetryExceeded, probe.ScopePath), time.Second, 2))
	step("1/4 over=true n2 1/2 [busy-port] n3 0/2 [retry-exceeded timeout]") // everything was tried
	metric(0.25)
	e.Observe(at(latencyResult("n2", 2000), 2*time.Second, 2)) // busy before, measured after all
	metric(0.5)

	// A new period: until it is over the one before it counts, and what belongs to that goes there.
	second := first.Add(5 * time.Minute)
	e.Plan("rtt", second, []string{"n2"}, 1)
	e.Plan("rtt", second, []string{"n3", "n2"}, 1)
	e.Plan("rtt", first, []string{"n2"}, 1)
	metric(0.5)
	e.Observe(at(latencyResult("n3", 2000), 4*time.Minute, 1))
	metric(0.75)
	e.Observe(at(latencyResult("n2", 2000), 5*time.Minute-time.Millisecond, 1)) // the clock was set a little
	e.Planned("rtt", first)
	metric(0.75)
	e.Planned("rtt", second)
	step("1/2 over=true n3 0/1 []")
	metric(0.5)
	if page := get(e, "/").Body.String(); !strings.Contains(page, "1 of 2 planned pairs measured in the period from") || !strings.Contains(page, "not, or not from every port: n3") {
		t.Error("the status page does not tell")
	}

	// A reload keeps what is known; a period that ends without its runs counts against them.
	e.SetTargets(Targets{Probes: specs(), Peers: []string{"n2", "n3"}})
	metric(0.5)
	e.Plan("rtt", second.Add(5*time.Minute), []string{"n2", "n3"}, 1)
	e.Plan("rtt", second.Add(10*time.Minute), []string{"n2", "n3"}, 1)
	metric(0)
	e.Plan("rtt", second.Add(15*time.Minute), nil, 1)
	metric(absent) // nobody is to be measured
	e.Plan("none", second, []string{"n2"}, 1)
	if diff := cmp.Diff("0/0 over=false", coverageOf(t, e, "bw")); diff != "" {
		t.Error(diff)
	}
}

func TestUnconfirmed(t *testing.T) {
	e := newExporter(t, Options{})
	first := failed(latencyResult("n2", 2000), probe.StageRun, probe.Timeout, probe.ScopePath)
	again := latencyResult("n2", 2000)
	again.Repeats = first.Failure()
	e.Observe(again)
	confirmed := failed(latencyResult("n3", 2000), probe.StageRun, probe.Timeout, probe.ScopePath)
	confirmed.Repeats = first.Failure()
	e.Observe(confirmed)
	m := scrape(t, e)
	want(t, m, 1, "probe_unconfirmed_failures_total", "probe", "rtt")
	want(t, m, 1, "probe_runs_total", "probe", "rtt", "result", "failed")
	want(t, m, 1, "probe_runs_total", "probe", "rtt", "result", "ok")
}
