package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/alecthomas/kingpin/v2"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/daemon"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/sweep"
	"github.com/rdmabenchd/rdmabenchd/pkg/sweeper"
)

type sweepFlags struct {
	names                     []string
	file, storage, output     string
	deadline                  time.Duration
	parallel                  int
	fleet, full, accept, once bool
}

func addSweep(app *kingpin.Application, add func(string, func(context.Context, *environment) error)) {
	f := &sweepFlags{}
	cmd := app.Command("sweep", "Run a configured sweep now, wait for it, and report: which part is bad, and what was not measured. Exit code 1 if not all is well.")
	cmd.Arg("name", "Probes to run (default: those that are sweeps: bandwidth or message-rate with pairing all or tournament).").StringsVar(&f.names)
	f.common(cmd)
	cmd.Flag("fleet", "Have every node run its rows, and report on all of them.").BoolVar(&f.fleet)
	cmd.Flag("parallel", "With --fleet: nodes that run their rows at a time; fewer take longer and load the fabric less (default: all).").IntVar(&f.parallel)
	cmd.Flag("full", "All configured probes.").BoolVar(&f.full)
	cmd.Flag("accept", "If this node is healthy, record what it performs like as label.json below --storage.path.").BoolVar(&f.accept)
	cmd.Flag("once", "Do not measure suspects again.").BoolVar(&f.once)
	cmd.Flag("deadline", "Time for the sweep; what is not measured by then is missing.").Default(sweeper.DefaultDeadline.String()).DurationVar(&f.deadline)
	add(cmd.FullCommand(), f.sweep)

	b := &sweepFlags{}
	blame := app.Command("blame", "Gather what all nodes measured last, by whatever probe, and say which part is bad. Measures nothing.")
	b.common(blame)
	blame.Flag("deadline", "Time for asking all nodes.").Default("1m").DurationVar(&b.deadline)
	add(blame.FullCommand(), b.blame)
}

func (f *sweepFlags) common(cmd *kingpin.CmdClause) {
	cmd.Flag("config.file", "Configuration file.").Default(defaultConfigFile).StringVar(&f.file)
	cmd.Flag("storage.path", "Folder of the daemon's reports and of the performance label.").Default(defaultStorage).StringVar(&f.storage)
	cmd.Flag("output", "text, json, html (one page) or junit (XML).").Default("text").EnumVar(&f.output, "text", "json", "html", "junit")
}

func (f *sweepFlags) load(ctx context.Context, env *environment) (*config.Config, error) {
	if f.deadline < time.Second || f.deadline > control.MaxSession {
		return nil, &exitError{exitUsage, fmt.Errorf("--deadline: %s is out of range 1s to %s", f.deadline, control.MaxSession)}
	}
	cfg, err := config.Load(f.file)
	if err != nil {
		return nil, &exitError{exitUsage, err}
	}
	if f.full && len(f.names) > 0 {
		return nil, &exitError{exitUsage, errors.New("--full is all probes: leave out their names")}
	}
	if f.full {
		for _, p := range cfg.Probes {
			f.names = append(f.names, p.Spec.Name)
		}
	}
	discover(ctx, f.file, cfg, env.logger())
	return cfg, nil
}

func (f *sweepFlags) sweep(ctx context.Context, env *environment) error {
	cfg, err := f.load(ctx, env)
	if err != nil {
		return err
	}
	probes, err := sweeper.Select(cfg, f.names)
	if err != nil {
		return &exitError{exitUsage, err}
	}
	store := &sweeper.Store{Dir: f.storage}
	client := daemon.OwnClient(cfg)
	defer client.CloseIdle()
	req := control.SweepRequest{ID: sweeper.NewID(), Probes: f.names, Deadline: f.deadline.Seconds()}
	show, hide := progressLine(env.stderr)
	name := sweeper.Name(probes)
	if f.full {
		name = "full"
	}
	var r *sweep.Report
	if f.fleet {
		r, err = f.sweepFleet(ctx, cfg, name, probes, client, req, store, show)
	} else {
		r, err = f.sweepNode(ctx, env, cfg, name, client, req, store, show)
	}
	hide()
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		r.Notes = append(r.Notes, "interrupted")
	}
	if id, err := store.Put(r); err != nil {
		env.logger().Debug("the report is not kept", slog.String("id", id), slog.Any("err", err))
	}
	return f.tell(env, r, store)
}

// sweepFleet has all daemons run their rows.
func (f *sweepFlags) sweepFleet(ctx context.Context, cfg *config.Config, name string, probes []config.Probe, client *control.Client, req control.SweepRequest, store *sweeper.Store, show func(int, int)) (*sweep.Report, error) {
	fleet := &sweeper.Fleet{Client: client, Members: sweeper.Members(cfg, cfg.Peers.Static, daemon.OwnControl(cfg)), Progress: show, AtOnce: max(0, f.parallel)}
	started := time.Now().UTC()
	limit, cancel := context.WithTimeout(ctx, f.deadline+time.Minute) // nodes stop by themselves at the deadline
	defer cancel()
	in := sweeper.Input(name, cfg.Node.Name, fleet.Sweep(limit, req))
	in.Started, in.Finished, in.Limits = started, time.Now().UTC(), sweeper.Limits(probes)
	in.Last = store.LastGood(name, true, started)
	r := sweep.New(in)
	if len(in.Rows) == 0 {
		return nil, fmt.Errorf("no node ran the sweep: %s: %s", in.Members[0].Reason, in.Members[0].Detail)
	}
	if !f.once && ctx.Err() == nil {
		fleet.Confirm(ctx, r, in, f.deadline)
	}
	r.Finished = time.Now().UTC()
	return r, nil
}

// sweepNode measures this node's rows, whether a daemon runs here or not: ports are shared out by lock files.
func (f *sweepFlags) sweepNode(ctx context.Context, env *environment, cfg *config.Config, name string, client *control.Client, req control.SweepRequest, store *sweeper.Store, show func(int, int)) (*sweep.Report, error) {
	log := env.logger()
	node := oneShotNode(log, cfg.Devices.Use, cfg.Devices.GIDIndex)
	node.Name = cfg.Node.Name
	defer node.Close()
	if err := anyUsable(node); err != nil {
		return nil, err
	}
	i := &probe.Initiator{Node: node, Client: client, Tolerances: func() probe.Tolerances { return cfg.Taints }}
	runner := &sweeper.Runner{
		Config: func() *config.Config { return cfg }, Peers: func() []config.Peer { return cfg.Peers.Static }, Log: log,
		Ports: func() []sweeper.Port { return daemon.SweepPorts(node, log) }, Probe: i.Probe,
	}
	own := runner.Once(ctx, req, show)
	if own == nil {
		return nil, errors.New("the sweep did not run")
	}
	own.Input.Name, own.Report.Name = name, name
	if own.Input.Last = store.LastGood(name, false, own.Report.Started); own.Input.Last != nil {
		own.Report.Compare(own.Input.Last)
	}
	if !f.once && ctx.Err() == nil {
		runner.Confirm(ctx, own)
	}
	return own.Report, nil
}

func (f *sweepFlags) blame(ctx context.Context, env *environment) error {
	cfg, err := f.load(ctx, env)
	if err != nil {
		return err
	}
	client := daemon.OwnClient(cfg)
	defer client.CloseIdle()
	ctx, cancel := context.WithTimeout(ctx, f.deadline)
	defer cancel()
	fleet := &sweeper.Fleet{Client: client, Members: sweeper.Members(cfg, cfg.Peers.Static, daemon.OwnControl(cfg))}
	in := sweeper.Input("last results", cfg.Node.Name, fleet.Last(ctx))
	in.Limits, in.Finished = sweeper.Limits(cfg.Probes), time.Now().UTC()
	in.Started = in.Finished
	for i := range in.Rows {
		if t := in.Rows[i].Time; t.Before(in.Started) {
			in.Started = t
		}
	}
	return f.tell(env, sweep.New(in), nil)
}

// tell writes the report and makes the exit code of its verdict.
func (f *sweepFlags) tell(env *environment, r *sweep.Report, store *sweeper.Store) error {
	if err := sweeper.Write(env.stdout, r, f.output); err != nil {
		return err
	}
	if f.accept {
		file, err := store.Accept(r, time.Now())
		if err != nil {
			return &exitError{exitFailed, err}
		}
		fmt.Fprintf(env.stderr, "rdmabenchd: accepted: what this node performs like is recorded in %s\n", file)
	}
	if r.Verdict != sweep.Healthy {
		return &exitError{exitFailed, errors.New(r.Summary())}
	}
	return nil
}

// progressLine shows progress on a terminal, and nothing elsewhere.
func progressLine(w io.Writer) (show func(done, planned int), hide func()) {
	if !isTerminal(w) {
		return func(int, int) {}, func() {}
	}
	var mu sync.Mutex
	var last time.Time
	return func(done, planned int) {
			mu.Lock()
			defer mu.Unlock()
			if now := time.Now(); now.Sub(last) > 200*time.Millisecond {
				last = now
				fmt.Fprintf(w, "\r\033[K%d of %d sessions", done, planned)
			}
		}, func() {
			fmt.Fprint(w, "\r\033[K")
		}
}
