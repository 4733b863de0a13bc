package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// place is where tools run: devices, addresses, and what stands before and after their names.
type place struct {
	binary           string   // rdmabenchd
	client, server   []string // put before a command: which CPU it may use
	env              []string
	deviceA, deviceB string // of the client, of the server
	addr, port       string // of the server, and of rdmabenchd's responder on it
	gid              int
	perftestArgs     []string
	perftestPort     string
}

func (p *place) command(ctx context.Context, before []string, name string, args ...string) *exec.Cmd {
	all := append(append(append([]string{}, before...), name), args...)
	cmd := exec.CommandContext(ctx, all[0], all[1:]...)
	cmd.Env = append(os.Environ(), p.env...)
	cmd.WaitDelay = time.Second
	return cmd
}

// used adds what a child took of the CPU.
func used(cmd *exec.Cmd, to map[string]float64) map[string]float64 {
	if u, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		to["user"] = time.Duration(u.Utime.Nano()).Seconds()
		to["cpu"] = to["user"] + time.Duration(u.Stime.Nano()).Seconds()
	}
	return to
}

// probe runs one probe by hand. Figures: bandwidth (MiB/s), rate (messages/s), p50 and mean (us), loop (CPU seconds of the
// measuring thread), user and cpu (CPU seconds of the process).
func (p *place) probe(ctx context.Context, args ...string) (map[string]float64, error) {
	args = append([]string{"probe", "-d", p.deviceA, "-x", strconv.Itoa(p.gid), "--output=json", p.addr + ":" + p.port}, args...)
	cmd := p.command(ctx, p.client, p.binary, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("rdmabenchd %s: %w\n%s", strings.Join(args, " "), err, stderr.Bytes())
	}
	var r struct {
		Result string
		Runs   []struct {
			Latency   *struct{ P50, Mean *float64 }
			Bandwidth *struct {
				BytesPerSecond *float64 `json:"bytes_per_second"`
			}
			MessageRate *float64                 `json:"messages_per_second"`
			CPU         struct{ Local *float64 } `json:"cpu_seconds"`
		}
	}
	if err := json.Unmarshal(out, &r); err != nil {
		return nil, err
	}
	if len(r.Runs) == 0 {
		return nil, fmt.Errorf("rdmabenchd %s: %s, no figures", strings.Join(args, " "), r.Result)
	}
	got, run := map[string]float64{}, r.Runs[0]
	set := func(key string, v *float64, scale float64) {
		if v != nil {
			got[key] = *v * scale
		}
	}
	if run.Latency != nil {
		set("p50", run.Latency.P50, 1e6)
		set("mean", run.Latency.Mean, 1e6)
	}
	if run.Bandwidth != nil {
		set("bandwidth", run.Bandwidth.BytesPerSecond, 1.0/(1<<20))
	}
	set("rate", run.MessageRate, 1)
	set("loop", run.CPU.Local, 1)
	return used(cmd, got), nil
}

// perftest runs one of its tools between the two devices and returns the client's figures: bandwidth (MiB/s), rate
// (messages/s), p50 and mean (us), user and cpu (CPU seconds of the process).
func (p *place) perftest(ctx context.Context, tool string, args ...string) (map[string]float64, error) {
	common := append([]string{"-F", "-x", strconv.Itoa(p.gid), "-p", p.perftestPort}, p.perftestArgs...)
	common = append(common, args...)
	server := p.command(ctx, p.server, tool, append([]string{"-d", p.deviceB}, common...)...)
	if err := server.Start(); err != nil {
		return nil, err
	}
	defer func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	}()
	// A connection to see whether it listens would be taken for the client's.
	for !listens(p.perftestPort) {
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%s does not listen on port %s: %w", tool, p.perftestPort, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
	client := p.command(ctx, p.client, tool, append([]string{"-d", p.deviceA, p.addr}, common...)...)
	out, err := client.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w\n%s", tool, strings.Join(common, " "), err, out)
	}
	lines := strings.Split(string(out), "\n")
	for i, l := range lines {
		if !strings.HasPrefix(strings.TrimSpace(l), "#bytes") || i+1 == len(lines) {
			continue
		}
		columns := map[int]string{3: "bandwidth", 4: "rate"}
		if strings.Contains(l, "t_typical") {
			columns = map[int]string{4: "p50", 5: "mean"}
		}
		got := map[string]float64{}
		for k, f := range strings.Fields(lines[i+1]) {
			if key := columns[k]; key != "" {
				if got[key], err = strconv.ParseFloat(f, 64); err != nil {
					return nil, fmt.Errorf("%s: %w in\n%s", tool, err, out)
				}
			}
		}
		got["rate"] *= 1e6
		return used(client, got), nil
	}
	return nil, fmt.Errorf("%s printed no table:\n%s", tool, out)
}

// qperf runs one of its tests for a second against the qperf that runs on the server. Figures: bandwidth (MiB/s), mean (us).
func (p *place) qperf(ctx context.Context, test string, args ...string) (map[string]float64, error) {
	// Polled, as the others are; it would wait for events. Without rdma_cm it sends no GRH, and RoCE does not work.
	args = append([]string{"-t", "1", "-uu", "-cp", "1", "-cm", "1"}, args...)
	args = append(args, p.addr, test)
	out, err := p.command(ctx, p.client, "qperf", args...).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("qperf %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	got := map[string]float64{}
	for l := range strings.Lines(string(out)) {
		f := strings.Fields(l) // name = value unit
		if len(f) < 4 || f[1] != "=" {
			continue
		}
		v, err := strconv.ParseFloat(strings.ReplaceAll(f[2], ",", ""), 64)
		if err != nil {
			return nil, fmt.Errorf("qperf %s: %w in\n%s", test, err, out)
		}
		switch {
		case f[3] == "bytes/sec" && (f[0] == "bw" || f[0] == "send_bw"):
			got["bandwidth"] = v / (1 << 20)
		case f[0] == "latency" && f[3] == "ns":
			got["mean"] = v / 1e3
		}
	}
	if len(got) == 0 {
		return nil, fmt.Errorf("qperf %s gave no figure:\n%s", test, out)
	}
	return got, nil
}

// respond starts `rdmabenchd respond` on the server and waits until it answers.
func (p *place) respond(ctx context.Context) (stop func(), err error) {
	cmd := p.command(ctx, p.server, p.binary, "respond", "-d", p.deviceB, "--listen", p.addr+":"+p.port, "--log.level=error")
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	stop = func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
	}
	for range 100 {
		if _, err = p.probe(ctx, "--kind=bandwidth", "-s", "64", "-n", "500"); err == nil {
			return stop, nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	stop()
	return nil, err
}

// perMillion gives what a million messages take: the difference of two runs, the longer of which does extra messages more, so
// that what a process takes to start doesn't count.
func perMillion(extra int, run func(ctx context.Context, longer bool) (map[string]float64, error)) func(context.Context) (map[string]float64, error) {
	return func(ctx context.Context) (map[string]float64, error) {
		short, err := run(ctx, false)
		if err != nil {
			return nil, err
		}
		long, err := run(ctx, true)
		if err != nil {
			return nil, err
		}
		got := map[string]float64{}
		for key, v := range long {
			got[key] = (v - short[key]) * 1e6 / float64(extra)
		}
		return got, nil
	}
}

// listens says whether something on this host listens on a TCP port.
func listens(port string) bool {
	n, err := strconv.Atoi(port)
	if err != nil {
		return false
	}
	for _, file := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		data, _ := os.ReadFile(file)
		for l := range strings.Lines(string(data)) {
			// sl, local_address:port, remote, state; 0A is LISTEN.
			if f := strings.Fields(l); len(f) > 3 && f[3] == "0A" && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", n)) {
				return true
			}
		}
	}
	return false
}
