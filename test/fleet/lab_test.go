//go:build lab

package fleet

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// command runs a command of the guest and returns its output.
func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// startFleet starts the daemons of nodes 1 to n on a configuration, and ends them after the test.
func startFleet(t *testing.T, config string, n int) {
	t.Helper()
	t.Setenv("LAB_CONFIG", absolute(t, config))
	nodes := make([]string, n)
	for i := range nodes {
		nodes[i] = fmt.Sprint(i + 1)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, i := range nodes {
				out, _ := exec.Command("node", "log", i).CombinedOutput()
				t.Logf("log of node%s:\n%s", i, tail(out, 3000))
			}
		}
		_ = exec.Command("node", append([]string{"stop"}, nodes...)...).Run()
	})
	command(t, "node", append([]string{"start"}, nodes...)...)
}

func tail(b []byte, n int) []byte { return b[max(0, len(b)-n):] }

func get(t *testing.T, node int, path string) []byte {
	t.Helper()
	return getAs(t, node, path, "*/*")
}

func getAs(t *testing.T, node int, path, accept string) []byte {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d%s", 9879+node, path), nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", accept)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("node%d %s: %s %v\n%s", node, path, resp.Status, err, body)
	}
	return body
}

// recent returns a node's results of a probe of a peer that began after a time, newest first.
func recent(t *testing.T, node int, probeName, peer string, after time.Time) []probe.Result {
	t.Helper()
	var body struct{ Recent []probe.Result }
	path := fmt.Sprintf("/api/v1/results?recent=50&probe=%s&peer=%s", probeName, peer)
	if err := json.Unmarshal(get(t, node, path), &body); err != nil {
		t.Fatal(err)
	}
	var out []probe.Result
	for _, r := range body.Recent {
		if r.Time.After(after) {
			out = append(out, r)
		}
	}
	return out
}

// await waits for a result that began after a time and is as wanted.
func await(t *testing.T, node int, probeName, peer string, after time.Time, limit time.Duration, what string, want func(probe.Result) bool) probe.Result {
	t.Helper()
	var seen []string
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		seen = nil
		for _, r := range recent(t, node, probeName, peer, after) {
			if want(r) {
				return r
			}
			seen = append(seen, describe(r))
		}
	}
	t.Fatalf("node%d %s of %s: no result within %s that %s; seen:\n%s", node, probeName, peer, limit, what, strings.Join(seen, "\n"))
	return probe.Result{}
}

func describe(r probe.Result) string {
	if r.Reason == nil {
		return fmt.Sprintf("  %s %v in %.3f s", r.Outcome, r.Taints, r.Duration)
	}
	return fmt.Sprintf("  %s at %s: %s (%s) in %.3f s: %s", r.Outcome, *r.Stage, *r.Reason, *r.Scope, r.Duration, *r.Detail)
}

func failedFor(reasons ...probe.Reason) func(probe.Result) bool {
	return func(r probe.Result) bool {
		if r.Outcome != probe.Failed {
			return false
		}
		for _, want := range reasons {
			if *r.Reason == want {
				return true
			}
		}
		return false
	}
}

func usable(r probe.Result) bool { return r.Usable() }

// byHand runs `rdmabenchd probe` from node 1 against node 2's daemon.
func byHand(t *testing.T, args ...string) probe.Result {
	t.Helper()
	return byHandTo(t, "10.9.0.2", args...)
}

// byHandTo is byHand against whoever is at an address.
func byHandTo(t *testing.T, peer string, args ...string) probe.Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Getenv("LAB_BINARY"), append([]string{"probe", "-d", "rxe1", "--output=json", "--wait=20s", peer}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var r probe.Result
	if json.Unmarshal(out.Bytes(), &r) != nil {
		t.Fatalf("probe %v: %v: no JSON:\n%s%s", args, err, out.Bytes(), errs.Bytes())
	}
	if (err == nil) != r.Usable() {
		t.Fatalf("probe %v: exit %v, but the result is %s", args, err, describe(r))
	}
	return r
}

// resources are what a daemon holds at the kernel.
type resources struct{ qp, mr, cq, fds int }

func (r resources) above(o resources) bool {
	return r.qp > o.qp || r.mr > o.mr || r.cq > o.cq || r.fds > o.fds
}

func held(t *testing.T, node int) resources {
	t.Helper()
	var devices []struct {
		Name string `json:"ifname"`
		QP   int    `json:"qp"`
		MR   int    `json:"mr"`
		CQ   int    `json:"cq"`
	}
	if err := json.Unmarshal([]byte(command(t, "rdma", "-j", "resource")), &devices); err != nil {
		t.Fatal(err)
	}
	fds, err := os.ReadDir("/proc/" + strings.TrimSpace(command(t, "node", "pid", fmt.Sprint(node))) + "/fd")
	if err != nil {
		t.Fatal(err)
	}
	r := resources{fds: len(fds)}
	for _, d := range devices {
		if d.Name == fmt.Sprintf("rxe%d", node) {
			r.qp, r.mr, r.cq = d.QP, d.MR, d.CQ
		}
	}
	return r
}

// active is the configuration that the daemons run on; reconfigure rewrites it.
const active = "/run/fleet.yaml"

// startMutable is startFleet on a copy of a configuration, for reconfigure.
func startMutable(t *testing.T, config string, n int) {
	t.Helper()
	copyConfig(t, config)
	startFleet(t, active, n)
}

func copyConfig(t *testing.T, config string) {
	t.Helper()
	data, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(active, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

// reconfigure has running daemons load another configuration.
func reconfigure(t *testing.T, config string, n int) {
	t.Helper()
	copyConfig(t, config)
	for node := 1; node <= n; node++ {
		command(t, "kill", "-HUP", strings.TrimSpace(command(t, "node", "pid", fmt.Sprint(node))))
	}
}

func absolute(t *testing.T, path string) string {
	t.Helper()
	abs, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return abs
}

// quiet skips a test whose figures mean something only where nobody else uses the host's CPUs: make test-truth.
func quiet(t *testing.T) {
	t.Helper()
	if os.Getenv("LAB_TRUTH") == "" {
		t.Skip("needs a quiet host: make test-truth")
	}
}
