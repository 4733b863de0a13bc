// Command bench compares rdmabenchd with perftest in one lab guest: the same op, size and count, one after the other in turns,
// medians of several. It prints a table and writes bench.json. Run it by `make bench`.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
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

	OursRuns   []float64 `json:"ours_runs"`
	TheirsRuns []float64 `json:"theirs_runs"`
}

// comparison measures one figure with both tools.
type comparison struct {
	name, unit, better, tool string
	goal                     float64
	ours, theirs             func(context.Context) (float64, error)
}

func main() {
	binary := flag.String("binary", "build/rdmabenchd", "rdmabenchd to measure")
	out := flag.String("out", "build", "folder for bench.json")
	runs := flag.Int("runs", 5, "runs of each tool; the median counts")
	flag.Parse()
	if err := bench(*binary, *out, *runs); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func bench(binary, out string, runs int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
	defer cancel()
	stop, err := startResponder(ctx, binary)
	if err != nil {
		return err
	}
	defer stop()
	rows, err := compare(ctx, figures(binary), runs)
	if err != nil {
		return err
	}
	// Only now: a daemon that probes by itself would disturb the others.
	d, stopDaemons, err := startDaemons(ctx, binary)
	if err != nil {
		return err
	}
	defer stopDaemons()
	cost, err := compare(ctx, []comparison{d.cost()}, runs)
	if err != nil {
		return err
	}
	rows = append(rows, cost...)
	data, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(out, "bench.json"), append(data, '\n'), 0o644); err != nil {
		return err
	}
	table(rows)
	return nil
}

func compare(ctx context.Context, all []comparison, runs int) ([]Row, error) {
	var rows []Row
	for _, c := range all {
		row := Row{Name: c.name, Unit: c.unit, Better: c.better, Tool: c.tool, Runs: runs, Goal: c.goal}
		for i := range runs {
			// In turns, and who goes first changes: what drifts in the guest meets both.
			order := []func() error{
				func() error { return measure(ctx, c.ours, &row.OursRuns) },
				func() error { return measure(ctx, c.theirs, &row.TheirsRuns) },
			}
			if i%2 == 1 {
				slices.Reverse(order)
			}
			for _, f := range order {
				if err := f(); err != nil {
					return nil, fmt.Errorf("%s: %w", c.name, err)
				}
			}
		}
		row.Ours, row.Theirs = median(row.OursRuns), median(row.TheirsRuns)
		row.Ratio = row.Ours / row.Theirs
		rows = append(rows, row)
		fmt.Fprintf(os.Stderr, "%s: %.4g %s, %s %.4g, ratio %.3f\n", row.Name, row.Ours, row.Unit, row.Tool, row.Theirs, row.Ratio)
	}
	return rows, nil
}

func measure(ctx context.Context, f func(context.Context) (float64, error), to *[]float64) error {
	v, err := f(ctx)
	*to = append(*to, v)
	return err
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

func table(rows []Row) {
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "COMPARISON\tUNIT\tRDMABENCHD\tTHEIRS\tTOOL\tRATIO\tGOAL\tMET\t")
	for _, r := range rows {
		goal, met := "", "yes"
		if r.Better == "higher" {
			goal = fmt.Sprintf(">= %.2f", r.Goal)
			if r.Ratio < r.Goal {
				met = "no"
			}
		} else {
			goal = fmt.Sprintf("<= %.2f", r.Goal)
			if r.Ratio > r.Goal {
				met = "no"
			}
		}
		fmt.Fprintf(t, "%s\t%s\t%.4g\t%.4g\t%s\t%.3f\t%s\t%s\t\n", r.Name, r.Unit, r.Ours, r.Theirs, r.Tool, r.Ratio, goal, met)
	}
	t.Flush()
}
