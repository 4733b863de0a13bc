package daemon

import (
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/guard"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/sweep"
	"github.com/rdmabenchd/rdmabenchd/pkg/sweeper"
)

// maintained is a daemon of which only what is kept of guards is there.
func maintained(t *testing.T, lifecycle bool) (d *Daemon, call func(method, target, body string) (int, string)) {
	t.Helper()
	d, _ = bare(t, fleetText("node00", 2, "{name: bw, schedule: '0 2 * * *', kind: bandwidth}"), nil)
	d.guards = guard.New(t.TempDir(), func() config.Guards { return d.config().Guards }, slog.New(slog.DiscardHandler))
	h := d.maintenance(lifecycle)
	return d, func(method, target, body string) (int, string) {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(method, target, strings.NewReader(body)))
		b, err := io.ReadAll(w.Body)
		if err != nil {
			t.Fatal(err)
		}
		return w.Code, string(b)
	}
}

func TestPauseSwitch(t *testing.T) {
	d, call := maintained(t, true)
	for _, tt := range []struct {
		method, target string
		status         int
		why            string // prefix of why the node is left alone; empty: it isn't
	}{
		{http.MethodPost, "/-/pause?for=1h", 200, "paused until "},
		{http.MethodPost, "/-/pause?for=soon", 400, "paused until "},
		{http.MethodPost, "/-/pause?for=0", 400, "paused until "},
		{http.MethodPost, "/-/pause?for=9999999h", 400, "paused until "},
		{http.MethodPut, "/-/pause", 200, "paused"},
		{http.MethodGet, "/-/resume", 405, "paused"},
		{http.MethodPost, "/-/resume", 200, ""},
		{http.MethodPost, "/-/resume", 200, ""},
	} {
		status, text := call(tt.method, tt.target, "")
		if why := d.leftAlone(); status != tt.status || tt.why == "" && why != "" || !strings.HasPrefix(why, tt.why) {
			t.Errorf("%s %s: %d %q, and the node is %q", tt.method, tt.target, status, text, why)
		}
	}
	d, call = maintained(t, false)
	for _, path := range []string{"/-/pause", "/-/resume"} {
		if status, text := call(http.MethodPost, path, ""); status != http.StatusForbidden || !strings.Contains(text, "--web.enable-lifecycle") || d.leftAlone() != "" {
			t.Errorf("%s without lifecycle: %d %q", path, status, text)
		}
	}
}

func TestLeaseAPI(t *testing.T) {
	d, call := maintained(t, false)
	for _, tt := range []struct {
		method, target, body string
		status, leases       int
	}{
		{http.MethodPost, "/api/v1/lease", `{"holder": "job-1", "duration": "2h"}`, 200, 1},
		{http.MethodPost, "/api/v1/lease", `{"holder": "job-1", "duration": "3h"}`, 200, 1},
		{http.MethodPost, "/api/v1/lease", `{"holder": "job-2", "duration": "3h"}`, 200, 2},
		{http.MethodPost, "/api/v1/lease", `{"holder": "job-3", "duration": "3"}`, 400, 2},
		{http.MethodPost, "/api/v1/lease", `{"holder": "job-3"}`, 400, 2},
		{http.MethodPost, "/api/v1/lease", `{"holder": "", "duration": "1h"}`, 400, 2},
		{http.MethodPost, "/api/v1/lease", `{"holder": "job-3", "duration": "1h", "ports": []}`, 400, 2},
		{http.MethodPost, "/api/v1/lease", strings.Repeat(" ", 10_000), 413, 2},
		{http.MethodDelete, "/api/v1/lease?holder=job-1", "", 200, 1},
		{http.MethodDelete, "/api/v1/lease?holder=job-1", "", 404, 1},
	} {
		status, text := call(tt.method, tt.target, tt.body)
		if n := len(d.guards.Leases()); status != tt.status || n != tt.leases || !json.Valid([]byte(text)) {
			t.Errorf("%s %s %s: %d %s, %d leases", tt.method, tt.target, tt.body, status, text, n)
		}
	}
	_, text := call(http.MethodGet, "/api/v1/lease", "")
	var got leaseReply
	if err := json.Unmarshal([]byte(text), &got); err != nil || len(got.Leases) != 1 || got.Leases[0].Holder != "job-2" {
		t.Errorf("%s: %v", text, err)
	}
}

// A port is verified if heavy probes from it went well of late.
func TestVerdictOfPort(t *testing.T) {
	now := time.Now()
	result := func(kind probe.Kind, outcome probe.Outcome, ago time.Duration) *probe.Result {
		r := bad(probe.ScopePath, probe.Timeout)
		r.Device, r.Port, r.Kind, r.Outcome, r.Time = "mlx5_0", 1, kind, outcome, now.Add(-ago)
		return r
	}
	peers := result(probe.Bandwidth, probe.Failed, time.Minute)
	peers.Scope = new(probe.ScopePeer)
	for _, tt := range []struct {
		name    string
		results []*probe.Result
		want    bool
		reason  string
	}{
		{"nothing", nil, false, "no heavy probe yet"},
		{"good", []*probe.Result{result(probe.Bandwidth, probe.OK, time.Hour)}, true, ""},
		{"too old", []*probe.Result{result(probe.Bandwidth, probe.OK, 5*time.Hour)}, false, "no heavy probe within"},
		{"from the future", []*probe.Result{result(probe.Bandwidth, probe.OK, -5*time.Hour)}, false, "no heavy probe within"},
		{"light", []*probe.Result{result(probe.Latency, probe.OK, time.Minute), result(probe.Ping, probe.OK, time.Minute)}, false, "no heavy probe yet"},
		{"tainted", []*probe.Result{result(probe.Bandwidth, probe.Tainted, time.Minute)}, false, "none of 1"},
		{"mostly bad", []*probe.Result{result(probe.Bandwidth, probe.OK, time.Minute), result(probe.Bandwidth, probe.Failed, 0), result(probe.MessageRate, probe.Failed, 0)}, false, "2 of 3"},
		{"mostly good", []*probe.Result{result(probe.Bandwidth, probe.OK, time.Minute), result(probe.Bandwidth, probe.Failed, 0)}, true, ""},
		{"skipped, or a peer's fault", []*probe.Result{result(probe.Bandwidth, probe.OK, time.Minute), result(probe.Bandwidth, probe.Skipped, 0), peers, peers}, true, ""},
	} {
		v := judge("mlx5_0", 1, tt.results, now, 4*time.Hour)
		if v.Verified != tt.want || !strings.HasPrefix(v.Reason, tt.reason) || (v.Reason == "") != tt.want {
			t.Errorf("%s: %+v", tt.name, v)
		}
		if other := judge("mlx5_1", 1, tt.results, now, 4*time.Hour); other.Verified {
			t.Errorf("%s: verified by the results of another port", tt.name)
		}
	}
}

// The newest report of a sweep stands for what this process has not measured, and against what it has.
func TestVerdictBySweep(t *testing.T) {
	now := time.Now()
	for _, tt := range []struct {
		name       string
		verdict    sweep.Verdict
		ago        time.Duration
		unmeasured bool
		want       bool
	}{
		{"healthy", sweep.Healthy, time.Hour, true, true},
		{"healthy long ago", sweep.Healthy, 5 * time.Hour, true, false},
		{"unhealthy", sweep.Unhealthy, time.Hour, false, false},
		{"unknown, but measured", sweep.Unknown, time.Hour, false, true},
		{"unknown", sweep.Unknown, time.Hour, true, false},
	} {
		d, _ := maintained(t, false)
		d.store = &sweeper.Store{}
		_, _ = d.store.Put(&sweep.Report{ // kept in memory
			Name: "bw", Started: now.Add(-tt.ago),
			Nodes: []sweep.NodeReport{{Name: "node00", Verdict: tt.verdict, NICs: []sweep.NICReport{{Device: "mlx5_0", Port: 1, Verdict: tt.verdict}}}},
		})
		v := Verdict{Node: "node00", Ports: []PortVerdict{{Device: "mlx5_0", Port: 1, Verified: !tt.unmeasured, unmeasured: tt.unmeasured}}}
		if d.bySweep(&v, now, 4*time.Hour); v.Ports[0].Verified != tt.want {
			t.Errorf("%s: %+v", tt.name, v)
		}
	}
}
