package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/alecthomas/kingpin/v2"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule/pairing"
	"github.com/rdmabenchd/rdmabenchd/pkg/simulate"
)

// simulated is what is simulated without a configuration: the rounds of one night.
const simulated = `
node: {name: simulated}
probes: [{name: nightly-bandwidth, schedule: "0 2 * * *", kind: bandwidth, duration: 2s, pairing: {strategy: tournament}}]
`

func addSimulate(app *kingpin.Application, add func(string, func(context.Context, *environment) error)) {
	cmd := app.Command("simulate", "The time-table of a tournament against a fleet that is not there, in virtual time: collisions, coverage, duration, bytes per port. "+
		"Without a configuration: a nightly bandwidth probe of 2 s, 64 rounds a night in slots of 10 s.")
	file := cmd.Flag("config.file", "Take the probe from this configuration.").String()
	name := cmd.Flag("probe", "Name of the probe; default: the first one whose strategy is tournament.").String()
	var o simulate.Options
	cmd.Flag("nodes", "Nodes of the fleet.").Default("1000").IntVar(&o.Nodes)
	cmd.Flag("rails", "Ports of each node.").Default("1").IntVar(&o.Rails)
	cmd.Flag("firings", "How many times the schedule fires, for instance nights; 0: as many as it takes until everybody has met everybody.").Default("1").IntVar(&o.Firings)
	cmd.Flag("skew", "Clocks of the nodes are wrong by up to so much, either way.").Default("0s").DurationVar(&o.Skew)
	cmd.Flag("lagging", "Share of the nodes (0 to 1) whose list of members is not up to date all the time.").Default("0").Float64Var(&o.Lagging)
	cmd.Flag("dead", "Share of the nodes that are in the lists but not there.").Default("0").Float64Var(&o.Dead)
	cmd.Flag("loss", "Share of the messages that get lost.").Default("0").Float64Var(&o.Loss)
	cmd.Flag("churn", "Share of the nodes that are replaced by another during each firing.").Default("0").Float64Var(&o.Churn)
	cmd.Flag("seed", "Seed of all that is random: the same gives the same again.").Default("1").Uint64Var(&o.Seed)
	rate := cmd.Flag("line-rate", "Of a port in Gb/s, for the bytes of a probe that runs by duration.").Default("400").Float64()
	output := cmd.Flag("output", "text or json.").Default("text").Enum("text", "json")
	add(cmd.FullCommand(), func(_ context.Context, env *environment) error {
		p, err := simulatedProbe(*file, *name)
		if err != nil {
			return &exitError{exitUsage, err}
		}
		o.Schedule, o.Timetable, o.Bytes = p.Schedule, p.Timetable(), sessionBytes(p.Spec.WithDefaults(), *rate)
		if o.Firings == 0 && o.Nodes > 1 {
			slots := o.Timetable.Slots(o.Nodes)
			o.Firings = (pairing.Rounds(o.Nodes) + slots - 1) / slots
		}
		begin := time.Now()
		r, err := simulate.Run(o)
		if err != nil {
			return &exitError{exitUsage, err}
		}
		if *output == "json" {
			enc := json.NewEncoder(env.stdout)
			enc.SetIndent("", "  ")
			err = enc.Encode(struct {
				Probe string `json:"probe"`
				*simulate.Report
			}{p.Spec.Name, r})
		} else {
			printSimulation(env.stdout, p, r, time.Since(begin))
		}
		if r.Overlaps > 0 {
			err = &exitError{exitFailed, fmt.Errorf("%d sessions shared a port although they must not: this is a bug, please report it", r.Overlaps)}
		}
		return err
	})
}

func simulatedProbe(file, name string) (config.Probe, error) {
	cfg, err := config.Parse("built-in", []byte(simulated))
	if file != "" {
		cfg, err = config.Load(file)
	}
	if err != nil {
		return config.Probe{}, err
	}
	for _, p := range cfg.Probes {
		if name == p.Spec.Name && p.Pairing.Strategy != pairing.Tournament {
			return p, fmt.Errorf("the strategy of probe %s is %s: only a tournament has a time-table to simulate", name, p.Pairing.Strategy)
		}
		if p.Pairing.Strategy == pairing.Tournament && (name == "" || name == p.Spec.Name) {
			return p, nil
		}
	}
	if name != "" {
		return config.Probe{}, fmt.Errorf("%s has no probe %q", file, name)
	}
	return config.Probe{}, errors.New(file + " has no probe with the strategy tournament; set probes[].pairing.strategy, or leave --config.file out")
}

// sessionBytes is the payload of one session; one that runs by duration sends what the link takes, gbps.
func sessionBytes(s probe.Spec, gbps float64) (bytes float64) {
	for _, size := range s.Sizes {
		if s.Duration > 0 {
			bytes += gbps * 1e9 / 8 * s.Duration.Seconds()
		} else {
			bytes += float64(size) * float64(s.Iterations+max(0, s.Warmup)) * float64(s.QPs)
		}
	}
	return bytes
}

func printSimulation(w io.Writer, p config.Probe, r *simulate.Report, took time.Duration) {
	seconds := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)).Round(time.Second) }
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(what, format string, args ...any) { fmt.Fprintf(t, what+"\t"+format+"\n", args...) }
	row("fleet", "%d nodes, %d rails, seed %d", r.Nodes, r.Rails, r.Seed)
	row("probe", "%s: %d rounds at each firing of %q, in slots of %s", p.Spec.Name, r.RoundsPer, p.Schedule, seconds(r.Slot))
	row("cycle", "%d rounds until everybody has met everybody, in %s", r.CycleRounds, seconds(r.CycleDuration))
	row("simulated", "%d firings, the longest took %s", r.Firings, seconds(r.Duration))
	row("sessions", "%d planned by the nodes: %d measured, %d skipped as busy, %d failed", r.Sessions.Planned, r.Sessions.Measured, r.Sessions.Busy, r.Sessions.Failed)
	row("collisions", "%d leases refused because a port was in use", r.Collisions)
	row("overlaps", "%d sessions that shared a port although they must not", r.Overlaps)
	row("pairs", "%d planned: %d measured (%.4g %%), %d of them in both directions; %d measured again, %d unreachable", r.Pairs.Planned, r.Pairs.Measured,
		100*r.Pairs.Ratio, r.Pairs.Both, r.Pairs.Repeated, r.Pairs.Unreachable)
	row("per port", "%s in a firing, at most %s", amount(r.BytesPerPort.Mean), amount(r.BytesPerPort.Max))
	t.Flush()
	fmt.Fprintf(w, "\ncoverage over time\n")
	t = tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "firing\tat\tof planned\tof all pairs\t")
	for i, c := range r.Coverage {
		if n := len(r.Coverage); n > 20 && i%(n/20+1) != 0 && i != n-1 {
			continue
		}
		fmt.Fprintf(t, "%d\t%s\t%.2f %%\t%.2f %%\t\n", c.Firing, seconds(c.At), 100*c.Ratio, 100*c.Of)
	}
	t.Flush()
	fmt.Fprintf(w, "\nsimulated in %s\n", took.Round(10*time.Millisecond))
}
