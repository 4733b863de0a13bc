//go:build lab

package fleet

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// TestFleet runs the lab's own configuration on four nodes until every pair has figures for every probe, and checks what
// the daemons export.
func TestFleet(t *testing.T) {
	startFleet(t, "configs/lab.yaml", 4)
	probes := []string{"write-latency", "read-latency", "send-latency", "write-bandwidth", "read-bandwidth", "send-bandwidth"}
	var missing []string
	for end := time.Now().Add(3 * time.Minute); ; time.Sleep(time.Second) {
		missing = nil
		for src := 1; src <= 4; src++ {
			var body struct{ Results []probe.Result }
			if err := json.Unmarshal(get(t, src, "/api/v1/results"), &body); err != nil {
				t.Fatal(err)
			}
			for dst := 1; dst <= 4; dst++ {
				for _, p := range probes {
					if dst != src && !anyUsable(body.Results, p, fmt.Sprintf("node%d", dst)) {
						missing = append(missing, fmt.Sprintf("%s node%d -> node%d", p, src, dst))
					}
				}
			}
		}
		if len(missing) == 0 || time.Now().After(end) {
			break
		}
	}
	if len(missing) > 0 {
		t.Errorf("%d of %d without figures after 3 minutes: %v", len(missing), 12*len(probes), missing)
	}
	for node := 1; node <= 4; node++ {
		text := string(get(t, node, "/metrics"))
		if dir := os.Getenv("LAB_OUT"); dir != "" {
			// For the test of dashboards and rules, which runs outside. Only protobuf has the native histograms.
			if err := os.MkdirAll(filepath.Join(dir, "metrics"), 0o755); err != nil {
				t.Fatal(err)
			}
			pb := getAs(t, node, "/metrics", "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited")
			if err := os.WriteFile(filepath.Join(dir, "metrics", fmt.Sprintf("node%d.pb", node)), pb, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		for _, want := range []string{
			fmt.Sprintf(`(?m)^rdmabench_device_usable\{.*device="rxe%d".*\} 1$`, node),
			fmt.Sprintf(`(?m)^rdmabench_port_up\{.*device="rxe%d".*\} 1$`, node),
			`(?m)^rdmabench_port_counters_total\{.*counter="sent_pkts".*\} [1-9]`,
			`(?m)^rdmabench_last_latency_seconds\{.*measure="half-rtt".*op="write".*stat="p50".*\} [0-9.e-]+$`,
			`(?m)^rdmabench_last_bandwidth_bytes_per_second\{.*op="read".*\} [1-9]`,
			`(?m)^rdmabench_latency_seconds_count\{.*\} [1-9]`,
			`(?m)^rdmabench_config_last_reload_successful 1$`,
		} {
			if !regexp.MustCompile(want).MatchString(text) {
				t.Errorf("node%d: /metrics has no line like %s", node, want)
			}
		}
		if strings.Contains(text, "NaN") {
			t.Errorf("node%d exports NaN", node)
		}
		if page := string(get(t, node, "/")); !strings.Contains(page, "write-latency") || !strings.Contains(page, fmt.Sprintf("rxe%d", node)) {
			t.Errorf("node%d: the status page lacks its probes or its device", node)
		}
	}
}

func anyUsable(all []probe.Result, name, peer string) bool {
	for _, r := range all {
		if r.Probe == name && r.Peer == peer && r.Usable() {
			return true
		}
	}
	return false
}
