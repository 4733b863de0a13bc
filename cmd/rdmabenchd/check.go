package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/alecthomas/kingpin/v2"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/daemon"
	"github.com/rdmabenchd/rdmabenchd/pkg/peers"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

func addCheckConfig(app *kingpin.Application, add func(string, func(context.Context, *environment) error)) {
	cmd := app.Command("check-config", "Validate a configuration file and print what would run.")
	file := cmd.Arg("file", "Configuration file.").Required().String()
	effective := cmd.Flag("effective", "Print the effective configuration, defaults included, instead.").Bool()
	add(cmd.FullCommand(), func(ctx context.Context, env *environment) error {
		cfg, err := config.Load(*file)
		if err != nil {
			return &exitError{exitUsage, err}
		}
		if *effective {
			_, err := env.stdout.Write(cfg.Effective())
			return err
		}
		view, sources := peers.Once(ctx, cfg.Peers, discovery(*file, cfg))
		if err := wrongFiles(sources); err != nil {
			return &exitError{exitUsage, err}
		}
		printPlan(env.stdout, *file, cfg, view, sources, time.Now())
		return nil
	})
}

// discovery looks for the peers of a configuration from where its file is.
func discovery(file string, cfg *config.Config) peers.Options {
	return peers.Options{Name: cfg.Node.Name, Dir: filepath.Dir(file), Own: func() func(string) bool { return daemon.OwnAddresses(cfg) }}
}

// discover makes the peers that all sources tell of now the static ones of a configuration.
func discover(ctx context.Context, file string, cfg *config.Config, log *slog.Logger) {
	o := discovery(file, cfg)
	client := daemon.OwnClient(cfg)
	defer client.CloseIdle()
	o.Ask = client.Hello
	view, sources := peers.Once(ctx, cfg.Peers, o)
	for _, s := range sources {
		if s.Err != nil {
			log.Warn("a source of peers can't be read", slog.String("source", s.Kind), slog.String("name", s.Name), slog.Any("err", s.Err))
		}
	}
	cfg.Peers = config.Peers{Static: view.Active()}
}

// printPlan says what a configuration would do: peers, and of each probe when, what and how many bytes.
func printPlan(w io.Writer, file string, cfg *config.Config, view peers.View, sources []peers.Report, now time.Time) {
	fmt.Fprintf(w, "%s is valid.\n\nnode %s, control channel on %s\n", file, cfg.Node.Name, cfg.Control.Listen)
	count := printPeers(w, view, sources)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "PROBE\tWHAT\tSIZES\tSCHEDULE\tNEXT (UTC)\tSENT PER DAY AND PORT")
	for _, p := range cfg.Probes {
		spec := p.Spec.WithDefaults()
		next := "never"
		if n := p.Schedule.Next(now); !n.IsZero() {
			next = n.UTC().Format(time.DateTime)
		}
		fmt.Fprintf(t, "%s\t%s %s over %s\t%s\t%s\t%s\t%s\n", spec.Name, spec.Op, spec.Kind, spec.Transport, sizes(spec.Sizes), p.Schedule, next,
			perDay(spec, p.Schedule.Count(now, now.Add(24*time.Hour)), p.PerFiring(count)))
	}
	t.Flush()
	printGuards(w, cfg, count, now)
}

// printGuards says what the guards leave of the plan, if there are any.
func printGuards(w io.Writer, cfg *config.Config, count int, now time.Time) {
	var bytes float64
	var long time.Duration
	for _, p := range cfg.Probes {
		if spec := p.Spec.WithDefaults(); spec.Heavy() {
			b, d := load(spec, p.Schedule.Count(now, now.Add(24*time.Hour)), p.PerFiring(count))
			bytes, long = bytes+b, long+d
		}
	}
	text := amount(bytes)
	if long > 0 {
		text += fmt.Sprintf(" and %s at line rate", long)
	}
	fmt.Fprintf(w, "\nheavy probes send %s per day and port\n", text)
	g := cfg.Guards
	if g.BytesPerDay > 0 {
		fmt.Fprintf(w, "guards: at most %s per day and port, sent and received", amount(float64(g.BytesPerDay)))
		if 2*bytes > float64(g.BytesPerDay) { // peers send as much
			fmt.Fprint(w, "; THAT IS LESS than these probes and those of the peers would take, some will be skipped (budget)")
		}
		fmt.Fprintln(w)
	}
	if g.Concurrent > 0 {
		fmt.Fprintf(w, "guards: at most %d heavy probes of this node at a time\n", g.Concurrent)
	}
	if g.MaxUtilization > 0 {
		during := ""
		if g.AbortOnTraffic {
			during = ", or begins to"
		}
		fmt.Fprintf(w, "guards: none where others use more than %.4g %% of the line rate%s\n", 100*g.MaxUtilization, during)
	}
	for _, b := range g.Blackout {
		state := ""
		if b.Contains(now) {
			state = " (now)"
		}
		fmt.Fprintf(w, "guards: none in %s%s\n", b, state)
	}
	if len(g.Command) > 0 {
		fmt.Fprintf(w, "guards: none while %s exits with other than 0\n", strings.Join(g.Command, " "))
	}
}

// wrongFiles returns the errors of files with peers that are there and can't be used. Those that are not there may come yet.
func wrongFiles(sources []peers.Report) error {
	var errs []error
	for _, s := range sources {
		if s.Kind == "files" && s.Err != nil && !peers.IsMissing(s.Err) {
			errs = append(errs, s.Err)
		}
	}
	return errors.Join(errs...)
}

// printPeers says who would be probed, and what each source has just told, and returns the number of peers.
func printPeers(w io.Writer, view peers.View, sources []peers.Report) int {
	active := view.Active()
	var names []string
	for _, p := range active[:min(len(active), shownPeers)] {
		names = append(names, p.Name)
	}
	text := strings.Join(names, ", ")
	if more := len(active) - len(names); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	fmt.Fprintf(w, "%d peers: %s\n", len(active), text)
	for _, s := range []peers.State{peers.Self, peers.Drained, peers.Unnamed} {
		if n := view.Count(s); n > 0 {
			fmt.Fprintf(w, "not probed: %d %s\n", n, s)
		}
	}
	for _, m := range view.Members {
		if m.State == peers.Duplicate {
			fmt.Fprintf(w, "not probed: %s\n", m.Detail)
		}
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "PEERS FROM\tNAME\tENTRIES\tPROBLEMS")
	for _, s := range sources {
		count, problems := strconv.Itoa(s.Peers), slices.Clone(s.Problems)
		if s.Err != nil {
			count, problems = "-", append(problems, s.Err.Error())
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", s.Kind, s.Name, count, strings.Join(problems, "; "))
	}
	t.Flush()
	fmt.Fprintln(w)
	return len(active)
}

// shownPeers is how many peers are named.
const shownPeers = 20

func sizes(s []int) string {
	if len(s) > 3 {
		return fmt.Sprintf("%d sizes, %d to %d", len(s), s[0], s[len(s)-1])
	}
	return strings.Trim(fmt.Sprint(s), "[]")
}

// perDay is the payload that a probe sends from one port in a day; a probe by duration sends what the link takes.
func perDay(s probe.Spec, runs, peers int) string {
	bytes, long := load(s, runs, peers)
	if long > 0 {
		return fmt.Sprintf("%s of traffic", long)
	}
	return amount(bytes)
}

// load is the payload that a probe sends from one port in so many runs against so many peers, or for how long it sends.
func load(s probe.Spec, runs, peers int) (bytes float64, long time.Duration) {
	runs *= max(1, s.Repeat) * max(1, s.FlowLabels)
	if s.Duration > 0 {
		return 0, time.Duration(runs*peers*len(s.Sizes)) * s.Duration
	}
	for _, size := range s.Sizes {
		bytes += float64(size) * float64(s.Iterations+max(0, s.Warmup)) * float64(s.QPs) * float64(runs*peers)
	}
	return bytes, 0
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
