package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Node 1 probes node 2, in both tools.
const (
	addrA, addrB     = "10.9.0.1", "10.9.0.2"
	deviceA, deviceB = "rxe1", "rxe2"
	responderPort    = "18600"
	probeIterations  = 100
)

func figures(binary string) []comparison {
	var out []comparison
	for _, op := range []string{"write", "read", "send"} {
		out = append(out,
			comparison{
				name: op + " bandwidth 64 KiB", unit: "MiB/s", better: "higher", tool: "ib_" + op + "_bw", goal: 1,
				ours: func(ctx context.Context) (float64, error) {
					r, err := probe(ctx, binary, "--kind=bandwidth", "--op="+op, "-s", "65536", "-n", "500")
					if err != nil {
						return 0, err
					}
					return *r.Runs[0].Bandwidth.BytesPerSecond / (1 << 20), nil
				},
				theirs: func(ctx context.Context) (float64, error) {
					return perftest(ctx, 3, "ib_"+op+"_bw", "-s", "65536", "-n", "500")
				},
			},
			comparison{
				name: op + " latency 8 B p50", unit: "us", better: "lower", tool: "ib_" + op + "_lat", goal: 1,
				ours: func(ctx context.Context) (float64, error) {
					r, err := probe(ctx, binary, "--kind=latency", "--op="+op, "-s", "8", "-n", "1000")
					if err != nil {
						return 0, err
					}
					return *r.Runs[0].Latency.P50 * 1e6, nil
				},
				theirs: func(ctx context.Context) (float64, error) {
					return perftest(ctx, 4, "ib_"+op+"_lat", "-s", "8", "-n", "1000")
				},
			})
	}
	return out
}

// result is what is read of `rdmabenchd probe --output=json`.
type result struct {
	Result   string
	Detail   *string
	Duration float64
	Runs     []struct {
		Latency   *struct{ P50 *float64 }
		Bandwidth *struct {
			BytesPerSecond *float64 `json:"bytes_per_second"`
		}
	}
}

// probe runs one probe by hand against the responder.
func probe(ctx context.Context, binary string, args ...string) (*result, error) {
	cmd := exec.CommandContext(ctx, binary, append([]string{"probe", "-d", deviceA, "--output=json", addrB + ":" + responderPort}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("rdmabenchd probe %s: %w\n%s", strings.Join(args, " "), err, stderr.Bytes())
	}
	var r result
	if err := json.Unmarshal(out, &r); err != nil {
		return nil, err
	}
	if len(r.Runs) == 0 {
		return nil, fmt.Errorf("probe %s gave no figures", r.Result)
	}
	return &r, nil
}

// perftest runs one of its tools between the two nodes and returns a column of the client's table.
func perftest(ctx context.Context, column int, tool string, args ...string) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	server := exec.CommandContext(ctx, tool, append([]string{"-F", "-d", deviceB, "-x", "1"}, args...)...)
	if err := server.Start(); err != nil {
		return 0, err
	}
	defer func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	}()
	var out []byte
	var err error
	// The server has no way to say that it listens.
	for range 50 {
		client := exec.CommandContext(ctx, tool, append([]string{"-F", "-d", deviceA, "-x", "1", addrB}, args...)...)
		if out, err = client.CombinedOutput(); err == nil || !bytes.Contains(out, []byte("Couldn't connect")) {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err != nil {
		return 0, fmt.Errorf("%s %s: %w\n%s", tool, strings.Join(args, " "), err, out)
	}
	lines := strings.Split(string(out), "\n")
	for i, l := range lines {
		if strings.HasPrefix(strings.TrimSpace(l), "#bytes") && i+1 < len(lines) {
			if f := strings.Fields(lines[i+1]); len(f) > column {
				return strconv.ParseFloat(f[column], 64)
			}
		}
	}
	return 0, fmt.Errorf("%s printed no table:\n%s", tool, out)
}

// startResponder starts `rdmabenchd respond` on node 2 and waits until it answers.
func startResponder(ctx context.Context, binary string) (stop func(), err error) {
	cmd := exec.CommandContext(ctx, binary, "respond", "-d", deviceB, "--listen", addrB+":"+responderPort)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	stop = func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
	}
	for range 100 {
		if _, err = probe(ctx, binary, "-n", "10"); err == nil {
			return stop, nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	stop()
	return nil, err
}

// daemons are two rdmabenchds, of which the first probes the second every second.
type daemons struct {
	url  string
	seen map[string]bool // result ids
}

const benchConfig = `
node: {name: %[1]s}
devices: {include: [%[2]s]}
control: {listen: "%[3]s:18700", insecure: true}
peers: {static: [{name: a, address: "10.9.0.1:18700"}, {name: b, address: "10.9.0.2:18700"}]}
probes: [%[4]s]
`

func startDaemons(ctx context.Context, binary string) (*daemons, func(), error) {
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return nil, nil, err
	}
	var all []*exec.Cmd
	stop := func() {
		for _, c := range all {
			_ = c.Process.Signal(os.Interrupt)
			_ = c.Wait()
		}
		os.RemoveAll(dir)
	}
	for i, c := range []string{
		fmt.Sprintf(benchConfig, "a", deviceA, addrA, fmt.Sprintf(`{name: cost, schedule: "@every 1s", kind: latency, op: write, sizes: [8], iterations: %d}`, probeIterations)),
		fmt.Sprintf(benchConfig, "b", deviceB, addrB, ""),
	} {
		file := filepath.Join(dir, fmt.Sprintf("%d.yaml", i))
		if err := os.WriteFile(file, []byte(c), 0o600); err != nil {
			stop()
			return nil, nil, err
		}
		cmd := exec.CommandContext(ctx, binary, "run", "--config.file="+file, fmt.Sprintf("--web.listen-address=127.0.0.1:%d", 18710+i), "--log.level=warn")
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			stop()
			return nil, nil, err
		}
		all = append(all, cmd)
	}
	return &daemons{url: "http://127.0.0.1:18710/api/v1/results?recent=100", seen: map[string]bool{}}, stop, nil
}

// cost compares all that a scheduled probe takes with launching perftest for the same figure.
func (d *daemons) cost() comparison {
	return comparison{
		name: fmt.Sprintf("cost of a probe of %d iterations", probeIterations), unit: "s", better: "lower", tool: "ib_write_lat", goal: 0.1,
		ours: d.probeCost,
		theirs: func(ctx context.Context) (float64, error) {
			start := time.Now()
			_, err := perftest(ctx, 4, "ib_write_lat", "-s", "8", "-n", strconv.Itoa(probeIterations))
			return time.Since(start).Seconds(), err
		},
	}
}

// probeCost returns how long the next scheduled probe takes, from the scheduler to its result.
func (d *daemons) probeCost(ctx context.Context) (float64, error) {
	first := true
	for range 300 {
		var body struct {
			Recent []struct {
				ID, Result, Probe string
				Duration          float64
			}
		}
		if resp, err := http.Get(d.url); err == nil {
			err = json.NewDecoder(resp.Body).Decode(&body)
			resp.Body.Close()
			if err != nil {
				return 0, err
			}
		}
		for _, r := range body.Recent {
			if d.seen[r.ID] {
				continue
			}
			d.seen[r.ID] = true
			if !first && (r.Result == "ok" || r.Result == "tainted") {
				return r.Duration, nil
			}
		}
		first = false
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
	return 0, errors.New("the daemon gave no result in 30 s")
}
