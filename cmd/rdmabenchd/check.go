package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/alecthomas/kingpin/v2"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

func addCheckConfig(app *kingpin.Application, add func(string, func(context.Context, *environment) error)) {
	cmd := app.Command("check-config", "Validate a configuration file and print what would run.")
	file := cmd.Arg("file", "Configuration file.").Required().String()
	effective := cmd.Flag("effective", "Print the effective configuration, defaults included, instead.").Bool()
	add(cmd.FullCommand(), func(_ context.Context, env *environment) error {
		cfg, err := config.Load(*file)
		if err != nil {
			return &exitError{exitUsage, err}
		}
		if *effective {
			_, err := env.stdout.Write(cfg.Effective())
			return err
		}
		printPlan(env.stdout, *file, cfg, time.Now())
		return nil
	})
}

// printPlan says what a configuration would do: peers, and of each probe when, what and how many bytes.
func printPlan(w io.Writer, file string, cfg *config.Config, now time.Time) {
	var peers []string
	for _, p := range cfg.Peers.Static {
		if p.Name != cfg.Node.Name {
			peers = append(peers, p.Name)
		}
	}
	fmt.Fprintf(w, "%s is valid.\n\nnode %s, control channel on %s\n", file, cfg.Node.Name, cfg.Control.Listen)
	fmt.Fprintf(w, "%d peers: %s\n\n", len(peers), strings.Join(peers, ", "))
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "PROBE\tWHAT\tSIZES\tSCHEDULE\tNEXT (UTC)\tSENT PER DAY AND PORT")
	for _, p := range cfg.Probes {
		spec := p.Spec.WithDefaults()
		next := "never"
		if n := p.Schedule.Next(now); !n.IsZero() {
			next = n.UTC().Format(time.DateTime)
		}
		fmt.Fprintf(t, "%s\t%s %s over %s\t%s\t%s\t%s\t%s\n", spec.Name, spec.Op, spec.Kind, spec.Transport, sizes(spec.Sizes), p.Schedule, next,
			perDay(spec, p.Schedule.Count(now, now.Add(24*time.Hour)), p.PerFiring(len(peers))))
	}
	t.Flush()
}

func sizes(s []int) string {
	if len(s) > 3 {
		return fmt.Sprintf("%d sizes, %d to %d", len(s), s[0], s[len(s)-1])
	}
	return strings.Trim(fmt.Sprint(s), "[]")
}

// perDay is the payload that a probe sends from one port in a day; a probe by duration sends what the link takes.
func perDay(s probe.Spec, runs, peers int) string {
	if s.Duration > 0 {
		return fmt.Sprintf("%s of traffic", time.Duration(runs*peers*len(s.Sizes))*s.Duration)
	}
	var bytes float64
	for _, size := range s.Sizes {
		bytes += float64(size) * float64(s.Iterations+max(0, s.Warmup)) * float64(s.QPs) * float64(runs*peers)
	}
	return amount(bytes)
}

func amount(bytes float64) string {
	for _, unit := range []string{"B", "KiB", "MiB", "GiB"} {
		if bytes < 1024 {
			return fmt.Sprintf("%.4g %s", bytes, unit)
		}
		bytes /= 1024
	}
	return fmt.Sprintf("%.4g TiB", bytes)
}
