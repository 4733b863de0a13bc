// Command bench compares rdmabenchd with what else measures RDMA: in a lab guest with perftest and qperf, and natively, over
// the user-space provider, with perftest and a bare loop. The same op, sizes and parameters, one after the other in turns,
// medians of several rounds. It prints a table and writes a JSON file. Run it by `make bench`.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Row is one comparison in bench.json.
type Row struct {
	Name   string  `json:"name"`
	Unit   string  `json:"unit"`
	Better string  `json:"better"` // higher or lower
	Ours   float64 `json:"ours"`
	Theirs float64 `json:"theirs"`
	Tool   string  `json:"tool"`
	Ratio  float64 `json:"ratio"` // ours / theirs
	Runs   int     `json:"runs"`
	Goal   float64 `json:"goal"` // of ratio: at least if higher is better, else at most
	Met    bool    `json:"met"`

	OursRuns   []float64 `json:"ours_runs"`
	TheirsRuns []float64 `json:"theirs_runs"`
}

// figure is something that every side of a contest measures.
type figure struct{ key, name, unit, better string }

// side is one of the tools in a contest: its goal is ours/theirs, and run gives its figures by key.
type side struct {
	tool string
	goal float64
	run  func(context.Context) (map[string]float64, error)
}

// contest is one measurement, done by all sides with the same parameters. The first side is rdmabenchd.
type contest struct {
	name    string
	figures []figure
	sides   []side
	got     []map[string][]float64 // by side and figure
	failed  error
}

func main() {
	where := flag.String("where", "lab", "lab: in a guest of the lab; native: on this host, over the user-space provider")
	build := flag.String("build", "build", "folder with rdmabenchd, and verbsim.so and barelp")
	out := flag.String("out", "build/bench.json", "file to write")
	with := flag.String("with", "", "file of an earlier part, whose rows go first into table and file")
	runs := flag.Int("runs", 3, "rounds; the medians count")
	budget := flag.Duration("budget", 4*time.Minute, "time for all rounds; a round that has begun when it is over ends there")
	only := flag.String("only", "", "only comparisons whose names contain this")
	flag.Parse()
	if err := bench(*where, *build, *out, *with, *only, *runs, *budget); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func bench(where, build, out, with, only string, runs int, budget time.Duration) error {
	var rows []Row
	if with != "" {
		data, err := os.ReadFile(with)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(data, &rows); err != nil {
			return fmt.Errorf("%s: %w", with, err)
		}
	}
	build, err := filepath.Abs(build)
	if err != nil {
		return err
	}
	// What hangs is cut off; else the budget ends it long before.
	ctx, cancel := context.WithTimeout(context.Background(), budget+time.Minute)
	defer cancel()
	begin := time.Now()
	parts := []func(context.Context, string) ([]*contest, func(), error){lab, daemonCost}
	if where == "native" {
		parts = []func(context.Context, string) ([]*contest, func(), error){native}
	}
	failed := 0
	for i, part := range parts {
		end := begin.Add(budget)
		if i+1 < len(parts) {
			end = end.Add(-budget / 10) // some is left for the others
		}
		contests, stop, err := part(ctx, build)
		if err != nil {
			return err
		}
		contests = slices.DeleteFunc(contests, func(c *contest) bool { return !strings.Contains(c.name, only) })
		measure(ctx, contests, runs, end)
		stop()
		for _, c := range contests {
			if c.failed != nil {
				failed++
				fmt.Fprintf(os.Stderr, "bench: %s: %v\n", c.name, c.failed)
			}
			rows = append(rows, c.rows()...)
		}
	}
	data, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(out, append(data, '\n'), 0o644); err != nil {
		return err
	}
	table(rows)
	if failed > 0 {
		return fmt.Errorf("%d comparisons could not be made, see above", failed)
	}
	return nil
}

// measure runs all contests in rounds until there were enough of them or the time is over. What drifts meets all sides alike:
// they take turns at going first.
func measure(ctx context.Context, contests []*contest, runs int, end time.Time) {
	for round := range runs {
		for _, c := range contests {
			if time.Now().After(end) {
				if round == 0 && c.failed == nil {
					c.failed = fmt.Errorf("not measured: the time was over (--budget)")
				}
				continue
			}
			if c.failed == nil {
				c.failed = c.round(ctx, round)
			}
		}
		fmt.Fprintf(os.Stderr, "round %d of %d done\n", round+1, runs)
	}
}

// round runs every side once. Its figures count only if all sides have them.
func (c *contest) round(ctx context.Context, n int) error {
	if c.got == nil {
		c.got = make([]map[string][]float64, len(c.sides))
	}
	all := make([]map[string]float64, len(c.sides))
	for k := range c.sides {
		i := (k + n) % len(c.sides)
		run, cancel := context.WithTimeout(ctx, 30*time.Second)
		got, err := c.sides[i].run(run)
		cancel()
		if err != nil {
			return err
		}
		all[i] = got
	}
	for i, got := range all {
		if c.got[i] == nil {
			c.got[i] = map[string][]float64{}
		}
		for key, v := range got {
			c.got[i][key] = append(c.got[i][key], v)
		}
	}
	return nil
}

// rows are the comparisons of the first side with each of the others.
func (c *contest) rows() []Row {
	var out []Row
	for _, f := range c.figures {
		for i := 1; i < len(c.sides) && c.got != nil; i++ {
			ours, theirs := c.got[0][f.key], c.got[i][f.key]
			if len(ours) == 0 || len(theirs) == 0 {
				continue
			}
			r := Row{
				Name: c.name + " " + f.name, Unit: f.unit, Better: f.better, Ours: median(ours), Theirs: median(theirs),
				Tool: c.sides[i].tool, Runs: len(ours), Goal: c.sides[i].goal, OursRuns: ours, TheirsRuns: theirs,
			}
			if r.Theirs > 0 {
				r.Ratio = r.Ours / r.Theirs
				r.Met = r.Better == "higher" && r.Ratio >= r.Goal || r.Better == "lower" && r.Ratio <= r.Goal
			}
			out = append(out, r)
		}
	}
	return out
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

func table(rows []Row) {
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "COMPARISON\tUNIT\tRDMABENCHD\tTHEIRS\tTOOL\tRATIO\tGOAL\tMET\tRUNS\t")
	met := 0
	for _, r := range rows {
		sign, yes := "<=", "no"
		if r.Better == "higher" {
			sign = ">="
		}
		if r.Met {
			yes = "yes"
			met++
		}
		fmt.Fprintf(t, "%s\t%s\t%.4g\t%.4g\t%s\t%.3f\t%s %.2f\t%s\t%d\t\n", r.Name, r.Unit, r.Ours, r.Theirs, r.Tool, r.Ratio, sign, r.Goal, yes, r.Runs)
	}
	t.Flush()
	fmt.Printf("%d of %d goals met\n", met, len(rows))
}
