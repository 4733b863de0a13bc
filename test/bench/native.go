package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// What a message may cost: half of what it costs perftest, and at most so much more than a loop that checks nothing.
const (
	goalPerftest = 0.5
	goalBareLoop = 1.5
)

// nativeMessages is how many messages a figure of cost is over, all queue pairs together.
const nativeMessages = 4000000

// native are the contests on this host, without kernel or device: over the user-space provider of test/verbsim, the ends on
// a CPU each. Over its null mode, where every send is complete at once, a message costs what the generator costs.
func native(ctx context.Context, build string) ([]*contest, func(), error) {
	cpus, err := affinity()
	if err != nil {
		return nil, nil, err
	}
	dir, err := os.MkdirTemp("/dev/shm", "bench")
	if err != nil {
		return nil, nil, err
	}
	at := func(mode, port string) *place {
		return &place{
			binary: filepath.Join(build, "rdmabenchd"),
			client: []string{"taskset", "-c", cpus[len(cpus)-1]}, server: []string{"taskset", "-c", cpus[0]},
			env:     []string{"LD_PRELOAD=" + filepath.Join(build, "verbsim.so"), "VERBSIM=" + mode, "VERBSIM_DIR=" + filepath.Join(dir, mode)},
			deviceA: "sim0", deviceB: "sim0", addr: "127.0.0.1", port: port, gid: 1,
			perftestArgs: []string{"--use_old_post_send", "-m", "4096"}, perftestPort: "18690",
		}
	}
	null, shm := at("null", "18601"), at("shm", "18602")
	var stops []func()
	stop := func() {
		for _, f := range stops {
			f()
		}
		os.RemoveAll(dir)
	}
	for _, p := range []*place{null, shm} {
		if err := os.Mkdir(filepath.Join(dir, map[*place]string{null: "null", shm: "shm"}[p]), 0o700); err != nil {
			stop()
			return nil, nil, err
		}
		end, err := p.respond(ctx)
		if err != nil {
			stop()
			return nil, nil, err
		}
		stops = append(stops, end)
	}
	var all []*contest
	for _, size := range []string{"2", "64", "4096", "65536"} {
		// perftest wants a list to be a multiple of the moderation, rdmabenchd the other way round.
		for _, shape := range []struct{ mod, list string }{{"1", "1"}, {"100", "1"}, {"16", "16"}} {
			for _, qps := range []int{1, 16} {
				all = append(all, cost(null, filepath.Join(build, "barelp"), size, shape.mod, shape.list, qps))
			}
		}
	}
	for _, op := range []string{"write", "read", "send"} {
		for _, size := range []string{"2", "64", "4096"} {
			all = append(all, latency(shm, "shm: RC", op, size, 20000))
		}
	}
	return all, stop, nil
}

// cost is the time of a message in the generator itself.
func cost(p *place, barelp, size, mod, list string, qps int) *contest {
	shape := []string{"-s", size, "-Q", mod, "-l", list, "-q", strconv.Itoa(qps)}
	each := strconv.Itoa(nativeMessages / qps)
	perMessage := func(got map[string]float64, err error) (map[string]float64, error) {
		if err == nil && got["rate"] <= 0 {
			err = errors.New("no message rate was given")
		}
		if err == nil {
			got["ns"] = 1e9 / got["rate"]
		}
		return got, err
	}
	return &contest{
		name:    fmt.Sprintf("null: write %s, CQ mod %s, list %s, %d QP:", bytesText(size), mod, list, qps),
		figures: []figure{{"ns", "a message", "ns", "lower"}},
		sides: []side{
			{"rdmabenchd", 1, func(ctx context.Context) (map[string]float64, error) {
				return perMessage(p.probe(ctx, append(shape, "--kind=message-rate", "--op=write", "-t", "128", "-I", "0", "-m", "4096", "-n", each)...))
			}},
			{"ib_write_bw", goalPerftest, func(ctx context.Context) (map[string]float64, error) {
				if list == "1" {
					return perMessage(p.perftest(ctx, "ib_write_bw", "-s", size, "-Q", mod, "-q", strconv.Itoa(qps), "-t", "128", "-n", each, "-N"))
				}
				return perMessage(p.perftest(ctx, "ib_write_bw", append(shape, "-t", "128", "-n", each, "-N")...))
			}},
			{"bare loop", goalBareLoop, func(ctx context.Context) (map[string]float64, error) {
				cmd := p.command(ctx, p.client, barelp, append(shape, "-t", "128", "-r", "1", "-n", strconv.Itoa(nativeMessages))...)
				out, err := cmd.Output()
				if err != nil {
					return nil, fmt.Errorf("barelp: %w", err)
				}
				var r struct {
					NS float64 `json:"ns_per_message"`
				}
				err = json.Unmarshal(out, &r)
				return map[string]float64{"ns": r.NS}, err
			}},
		},
	}
}

func bytesText(size string) string {
	switch n, _ := strconv.Atoi(size); {
	case n >= 1<<20:
		return fmt.Sprintf("%d MiB", n>>20)
	case n >= 1<<10:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return size + " B"
}

// affinity are the CPUs that this process may use, as taskset names them.
func affinity() ([]string, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, err
	}
	var out []string
	for i := range len(set) * 64 {
		if set.IsSet(i) {
			out = append(out, strconv.Itoa(i))
		}
	}
	return out, nil
}
