package main

import (
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

// node 1 of the lab probes node 2, in every tool.
func labPlace(build string) *place {
	return &place{
		binary: filepath.Join(build, "rdmabenchd"), deviceA: "rxe1", deviceB: "rxe2", addr: "10.9.0.2", port: "18600", gid: 1,
		perftestArgs: []string{"-m", "4096"}, perftestPort: "18690",
	}
}

// lab are the contests on real verbs, in a guest of the lab. The matrix is a perftest user's; iterations are such
// that a run is short on Soft-RoCE in an emulator.
func lab(ctx context.Context, build string) ([]*contest, func(), error) {
	p := labPlace(build)
	stop, err := p.respond(ctx)
	if err != nil {
		return nil, nil, err
	}
	server := p.command(ctx, nil, "qperf")
	if err := server.Start(); err != nil {
		stop()
		return nil, nil, err
	}
	end := func() {
		_ = server.Process.Kill()
		_ = server.Wait()
		stop()
	}
	var all []*contest
	for _, op := range []string{"write", "read", "send"} {
		for _, size := range []string{"2", "64", "4096", "65536", "1048576"} {
			all = append(all, bandwidth(p, "RC", op, size), latency(p, "RC", op, size, map[string]int{"65536": 200, "1048576": 20}[size]))
		}
	}
	for _, c := range []struct {
		transport, op string
		sizes         []string
	}{{"UC", "write", []string{"64", "65536"}}, {"UC", "send", []string{"64", "65536"}}, {"UD", "send", []string{"64", "1024"}}} {
		for _, size := range c.sizes {
			all = append(all, bandwidth(p, c.transport, c.op, size, "-c", c.transport))
		}
		all = append(all, latency(p, c.transport, c.op, "64", 0, "-c", c.transport))
	}
	for _, op := range []string{"write", "read", "send"} {
		all = append(all, bandwidth(p, "RC bidirectional", op, "65536", "-b"))
	}
	for _, size := range []string{"64", "65536"} {
		all = append(all, bandwidth(p, "RC 16 QP", "write", size, "-q", "16"))
	}
	all = append(all,
		bandwidth(p, "RC list 16", "write", "64", "-Q", "16", "-l", "16"),
		bandwidth(p, "RC 16 QP, list 16", "write", "64", "-q", "16", "-Q", "16", "-l", "16"),
	)
	for _, op := range []string{"write", "read", "send"} {
		all = append(all, cpu(p, op))
	}
	return append(all, qperfs(p)...), end, nil
}

// iterations of a bandwidth run, per queue pair.
var iterations = map[string]int{"4096": 1000, "65536": 200, "1048576": 20}

func count(size string) int {
	if n := iterations[size]; n > 0 {
		return n
	}
	return 2000
}

// letters are flags that both sides know under the same letters, of which ours wants the transport in lower case.
func letters(args []string) []string {
	var out []string
	for _, a := range args {
		if a == "UC" || a == "UD" || a == "RC" {
			a = strings.ToLower(a)
		}
		out = append(out, a)
	}
	return out
}

func bandwidth(p *place, what, op, size string, args ...string) *contest {
	n := count(size)
	for i, a := range args {
		if a == "-q" {
			qps, _ := strconv.Atoi(args[i+1])
			n = max(n/qps, 5)
		}
	}
	shape := append([]string{"-s", size, "-n", strconv.Itoa(n), "-t", "128"}, args...)
	if !strings.Contains(strings.Join(args, " "), "-Q") {
		shape = append(shape, "-Q", strconv.Itoa(min(n, 100)))
	}
	if op == "send" {
		shape = append(shape, "-r", "512")
	}
	return &contest{
		name:    fmt.Sprintf("%s %s %s", what, op, bytesText(size)),
		figures: []figure{{"bandwidth", "bandwidth", "MiB/s", "higher"}, {"rate", "message rate", "1/s", "higher"}},
		sides: []side{
			{"rdmabenchd", 1, func(ctx context.Context) (map[string]float64, error) {
				return p.probe(ctx, append(letters(shape), "--kind=bandwidth", "--op="+op, "-m", "4096", "-I", "0")...)
			}},
			{"ib_" + op + "_bw", 1, func(ctx context.Context) (map[string]float64, error) {
				return p.perftest(ctx, "ib_"+op+"_bw", shape...)
			}},
		},
	}
}

func latency(p *place, what, op, size string, n int, args ...string) *contest {
	if n == 0 {
		n = 500
	}
	shape := append([]string{"-s", size, "-n", strconv.Itoa(n), "-I", "0"}, args...)
	if op == "read" {
		shape = append([]string{"-s", size, "-n", strconv.Itoa(n)}, args...)
	}
	return &contest{
		name:    fmt.Sprintf("%s %s %s", what, op, bytesText(size)),
		figures: []figure{{"p50", "latency p50", "us", "lower"}},
		sides: []side{
			{"rdmabenchd", 1, func(ctx context.Context) (map[string]float64, error) {
				return p.probe(ctx, append(letters(shape), "--kind=latency", "--op="+op, "-m", "4096")...)
			}},
			{"ib_" + op + "_lat", 1, func(ctx context.Context) (map[string]float64, error) {
				return p.perftest(ctx, "ib_"+op+"_lat", shape...)
			}},
		},
	}
}

// cpu is what a million messages of 64 B take of the initiator's CPU.
func cpu(p *place, op string) *contest {
	const short, long = 500, 5500
	n := func(longer bool) string {
		if longer {
			return strconv.Itoa(long)
		}
		return strconv.Itoa(short)
	}
	shape := []string{"-s", "64", "-t", "128", "-Q", "100"}
	return &contest{
		name:    "RC " + op + " 64 B",
		figures: []figure{{"user", "user CPU of 1 M messages", "s", "lower"}, {"cpu", "user and system CPU of 1 M messages", "s", "lower"}, {"loop", "CPU of 1 M messages as cpu_seconds tells", "s", "lower"}},
		sides: []side{
			{"rdmabenchd", 1, perMillion(long-short, func(ctx context.Context, longer bool) (map[string]float64, error) {
				return p.probe(ctx, append(shape, "--kind=message-rate", "--op="+op, "-m", "4096", "-I", "0", "-n", n(longer))...)
			})},
			{"ib_" + op + "_bw", 1, func(ctx context.Context) (map[string]float64, error) {
				got, err := perMillion(long-short, func(ctx context.Context, longer bool) (map[string]float64, error) {
					return p.perftest(ctx, "ib_"+op+"_bw", append(shape, "-n", n(longer))...)
				})(ctx)
				if err == nil {
					got["loop"] = got["cpu"]
				}
				return got, err
			}},
		},
	}
}

// qperfs are the tests that qperf has, too, and that run on RoCE: RC, by rdma_cm. Its depth is 1024, every send is signaled,
// its time is a second, its latency a mean.
func qperfs(p *place) []*contest {
	var all []*contest
	for _, t := range []struct{ test, op, size string }{
		{"rc_bw", "send", "65536"}, {"rc_rdma_write_bw", "write-imm", "65536"}, {"rc_rdma_read_bw", "read", "65536"},
		{"rc_lat", "send", "64"}, {"rc_rdma_write_lat", "write-imm", "64"}, {"rc_rdma_write_poll_lat", "write", "64"}, {"rc_rdma_read_lat", "read", "64"},
	} {
		c := &contest{name: fmt.Sprintf("RC %s %s", t.op, bytesText(t.size))}
		args := []string{"--op=" + t.op, "-s", t.size, "-D", "1s", "-m", "4096"}
		if strings.HasSuffix(t.test, "_lat") {
			c.figures = []figure{{"mean", "latency mean", "us", "lower"}}
			args = append(args, "--kind=latency")
		} else {
			c.figures = []figure{{"bandwidth", "bandwidth", "MiB/s", "higher"}}
			args = append(args, "--kind=bandwidth", "-t", "1024", "-r", "1024", "-Q", "1")
		}
		c.sides = []side{
			{"rdmabenchd", 1, func(ctx context.Context) (map[string]float64, error) { return p.probe(ctx, args...) }},
			{"qperf " + t.test, 1, func(ctx context.Context) (map[string]float64, error) {
				return p.qperf(ctx, t.test, "-m", t.size, "-mt", "4096")
			}},
		}
		all = append(all, c)
	}
	return all
}

// probeIterations is how many iterations a scheduled probe has whose cost is compared.
const probeIterations = 100

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

// daemonCost compares all that a scheduled probe takes with launching perftest for the same figure. It comes last: a daemon
// that probes by itself would disturb the others.
func daemonCost(ctx context.Context, build string) ([]*contest, func(), error) {
	p := labPlace(build)
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
	probe := fmt.Sprintf(`{name: cost, schedule: "@every 1s", kind: latency, op: write, sizes: [8], iterations: %d}`, probeIterations)
	for i, c := range []string{
		fmt.Sprintf(benchConfig, "a", p.deviceA, "10.9.0.1", probe),
		fmt.Sprintf(benchConfig, "b", p.deviceB, p.addr, ""),
	} {
		file := filepath.Join(dir, fmt.Sprintf("%d.yaml", i))
		if err := os.WriteFile(file, []byte(c), 0o600); err != nil {
			stop()
			return nil, nil, err
		}
		cmd := exec.CommandContext(ctx, p.binary, "run", "--config.file="+file, fmt.Sprintf("--web.listen-address=127.0.0.1:%d", 18710+i), "--log.level=warn")
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			stop()
			return nil, nil, err
		}
		all = append(all, cmd)
	}
	d := &daemons{url: "http://127.0.0.1:18710/api/v1/results?recent=100", seen: map[string]bool{}}
	return []*contest{{
		name:    fmt.Sprintf("scheduled probe of %d iterations", probeIterations),
		figures: []figure{{"seconds", "as a whole", "s", "lower"}},
		sides: []side{
			{"rdmabenchd", 1, d.probeCost},
			{"ib_write_lat", 0.1, func(ctx context.Context) (map[string]float64, error) {
				start := time.Now()
				_, err := p.perftest(ctx, "ib_write_lat", "-s", "8", "-n", strconv.Itoa(probeIterations))
				return map[string]float64{"seconds": time.Since(start).Seconds()}, err
			}},
		},
	}}, stop, nil
}

// probeCost returns how long the next scheduled probe takes, from the scheduler to its result.
func (d *daemons) probeCost(ctx context.Context) (map[string]float64, error) {
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
				return nil, err
			}
		}
		for _, r := range body.Recent {
			if d.seen[r.ID] {
				continue
			}
			d.seen[r.ID] = true
			if !first && (r.Result == "ok" || r.Result == "tainted") {
				return map[string]float64{"seconds": r.Duration}, nil
			}
		}
		first = false
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
	return nil, errors.New("the daemon gave no result in 30 s")
}
