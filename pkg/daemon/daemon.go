// Package daemon is the life of a rdmabenchd process: it wires the other packages together, starts them, changes their
// configuration while they run, and ends them in the right order.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/exporter"
	"github.com/rdmabenchd/rdmabenchd/pkg/guard"
	"github.com/rdmabenchd/rdmabenchd/pkg/peers"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule"
	"github.com/rdmabenchd/rdmabenchd/pkg/sweeper"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// LockDir holds a lock file per port, by which the daemon and the CLI of one host keep out of each other's way.
const LockDir = "/run/rdmabenchd"

// Options set up a Daemon.
type Options struct {
	ConfigFile        string
	Version, Revision string
	ClassicHistograms bool
	StoragePath       string // folder of what outlives the process; empty: none
	Log               *slog.Logger
}

// Daemon is one node's rdmabenchd. Make it by New, then Run it, once.
type Daemon struct {
	o         Options
	log       *slog.Logger
	counters  *counters.FS
	node      *probe.Node
	responder *probe.Responder
	client    *control.Client
	scheduler *schedule.Scheduler
	exporter  *exporter.Exporter
	listener  net.Listener
	probe     func(ctx context.Context, s probe.Spec, to probe.Target, device string, port int) *probe.Result // an Initiator's Probe
	light     *semaphore.Weighted                                                                             // bounds the light probes under way, and with them threads
	known     *PortWatch
	journal   journal
	sweeps    *sweeper.Runner
	web       *sweeper.Web
	peers     *peers.Discovery
	replaced  atomic.Uint64 // peers behind whose name another machine was found

	reload sync.Mutex // one at a time
	mu     sync.RWMutex
	cfg    *config.Config
	all    *fleet
	guard  *peerGuard
	guards *guard.Guard
	store  *sweeper.Store

	plans struct {
		sync.Mutex
		last map[string]*plan // by probe
	}
}

// New reads the configuration and takes the control channel's port. What is wrong with either is an error here, and nowhere
// later: from then on a daemon runs whatever happens.
func New(o Options) (*Daemon, error) {
	cfg, err := config.Load(o.ConfigFile)
	if err != nil {
		return nil, err
	}
	d := &Daemon{o: o, log: o.Log, counters: counters.NewFS("/sys"), client: control.NewClientFrom(ownAddress(cfg)), cfg: cfg, guard: &peerGuard{},
		light: semaphore.NewWeighted(maxLight), journal: journal{log: o.Log}}
	_ = os.MkdirAll(LockDir, 0o755) // the gate says if it can't be used
	gate := schedule.NewGate(schedule.GateOptions{Dir: LockDir, Log: o.Log})
	d.node = probe.NewNode(cfg.Node.Name, gate, probe.NewMeter(d.counters), o.Log)
	d.guards = guard.New(o.StoragePath, func() config.Guards { return d.config().Guards }, o.Log)
	d.node.Use, d.node.Guard = d.use, d.guards
	d.node.Environments = probe.NewEnvironments(d.counters)
	d.node.Rail = func(device string, port, auto int) string { return d.config().Devices.Rail(device, port, auto) }
	d.node.GIDIndex = func() int { return d.config().Devices.GIDIndex }
	d.known = NewPortWatch(d.node, d.use, o.Log)
	d.responder = probe.NewResponder(d.node, limits(cfg))
	d.node.LameDuck = d.leftAlone
	d.peers = peers.New(peers.Options{
		Name: cfg.Node.Name, Instance: d.node.Instance, Dir: filepath.Dir(o.ConfigFile), Own: func() func(string) bool { return OwnAddresses(d.config()) },
		Ask: d.client.Hello, OnChange: d.peersChanged, OnReplaced: d.peerReplaced, Log: o.Log,
	})
	d.probe = (&probe.Initiator{
		Node: d.node, Client: d.client, Hello: d.peers.Greet, Tolerances: func() probe.Tolerances { return d.config().Taints },
	}).Probe
	d.exporter, err = exporter.New(exporter.Options{
		Node: cfg.Node.Name, NodeLabels: cfg.Node.Labels, Version: o.Version, Revision: o.Revision, ClassicHistograms: o.ClassicHistograms,
		Ports: &ports{node: d.node, fs: d.counters, filter: d.filter, watch: d.known}, Sessions: d.responder.Sessions, Maintenance: func() bool { return d.leftAlone() != "" }, Discovery: d.discovery, Log: o.Log,
		ClockResidual: verbs.ClockResidual,
	})
	if err != nil {
		return nil, err
	}
	d.newSweeps()
	d.scheduler = schedule.New(schedule.Options{
		Node: cfg.Node.Name, Log: o.Log,
		OnSkip:  d.skipped,
		OnPanic: func(job string, _ any) { d.exporter.Panicked(probeOf(job)) },
	})
	d.listener, err = net.Listen("tcp", cfg.Control.Listen)
	if err != nil {
		return nil, fmt.Errorf("%s: control.listen: %w; is another rdmabenchd running here?", o.ConfigFile, err)
	}
	if err := d.apply(cfg); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", o.ConfigFile, err), d.listener.Close())
	}
	d.exporter.SetReload(nil)
	return d, nil
}

func limits(c *config.Config) probe.Limits {
	return probe.Limits{Sessions: c.Limits.Sessions, Memory: c.Limits.Memory, Message: c.Limits.Message, Lease: c.Limits.Lease}
}

// ownAddress is the address to call peers from: the one that they call, if the configuration names it. Else the kernel
// chooses (nil).
func ownAddress(c *config.Config) net.IP {
	host, _, err := net.SplitHostPort(c.Control.Listen)
	if err != nil {
		return nil
	}
	if ip := net.ParseIP(host); ip != nil && !ip.IsUnspecified() && !ip.IsLoopback() {
		return ip
	}
	return nil
}

// config is the configuration in force.
func (d *Daemon) config() *config.Config {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.cfg
}

// fleet is the nodes as they are known now.
func (d *Daemon) fleet() *fleet {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.all
}

func (d *Daemon) use(device string) bool { return d.config().Devices.Use(device) }

func (d *Daemon) filter() counters.Filter {
	c := d.config()
	return counters.Filter{Include: c.Devices.Include, Exclude: c.Devices.Exclude}
}

// Handler serves the daemon's web port. reload says whether HTTP may reload the configuration, and pause the node.
func (d *Daemon) Handler(reload, pprof bool) http.Handler {
	o := exporter.HandlerOptions{Pprof: pprof, Sweeps: d.web.Handler(), Maintenance: d.maintenance(reload)}
	if reload {
		o.Reload = func(context.Context) error { return d.Reload() }
	}
	return d.exporter.Handler(o)
}

// Reload reads the configuration again. A bad one is refused whole: the old one stays in force.
func (d *Daemon) Reload() error {
	d.reload.Lock()
	defer d.reload.Unlock()
	cfg, err := config.Load(d.o.ConfigFile)
	if err == nil {
		err = d.fixed(cfg)
	}
	if err == nil {
		err = d.apply(cfg)
	}
	d.exporter.SetReload(err)
	if err != nil {
		d.log.Error("reload refused, the old configuration stays in force", slog.Any("err", err))
		return err
	}
	d.log.Info("configuration loaded", slog.String("file", d.o.ConfigFile), slog.String("hash", cfg.Hash()[:12]))
	return nil
}

// fixed refuses changes that need a restart.
func (d *Daemon) fixed(cfg *config.Config) error {
	old := d.config()
	var errs []error
	if cfg.Node.Name != old.Node.Name {
		errs = append(errs, fmt.Errorf("%s: node.name changed from %q to %q: restart the daemon for that", d.o.ConfigFile, old.Node.Name, cfg.Node.Name))
	}
	if cfg.Control.Listen != old.Control.Listen {
		errs = append(errs, fmt.Errorf("%s: control.listen changed from %q to %q: restart the daemon for that", d.o.ConfigFile, old.Control.Listen, cfg.Control.Listen))
	}
	return errors.Join(errs...)
}

// apply puts a checked configuration in force.
func (d *Daemon) apply(cfg *config.Config) error {
	all := fleetOf(cfg, d.peers.Set(cfg.Peers))
	if err := d.scheduler.Replace(d.jobs(cfg, all)); err != nil {
		d.peers.Set(d.config().Peers)
		return err
	}
	d.mu.Lock()
	d.cfg, d.all = cfg, all
	d.mu.Unlock()
	d.responder.SetLimits(limits(cfg))
	d.target(cfg, all)
	return nil
}

// Run works until ctx ends, then ends what it started: scheduler first, then the sessions of others, then the devices.
func (d *Daemon) Run(ctx context.Context) error {
	d.describe()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.peers.Run(ctx) })
	g.Go(func() error { return d.guard.run(ctx) })
	g.Go(func() error { return d.known.Run(ctx) })
	g.Go(func() error { return d.watchEnvironment(ctx) })
	g.Go(func() error {
		s := control.Server{Service: d.responder, Sweeper: d.sweeps, Guard: control.AddressGuard(d.guard.allowed), Log: d.log}
		return s.Serve(ctx, d.listener)
	})
	g.Go(func() error { return d.sweeps.Run(ctx) })
	g.Go(func() error { return d.scheduler.Run(ctx) })
	g.Go(func() error { return d.notify(ctx) })
	d.exporter.SetReady(true)
	err := g.Wait()
	d.exporter.SetReady(false)
	d.responder.Shutdown()
	d.client.CloseIdle()
	return errors.Join(err, d.node.Close())
}

// describe says once, at start, what there is.
func (d *Daemon) describe() {
	cfg := d.config()
	d.known.look()
	d.log.Info("started", slog.String("node", cfg.Node.Name), slog.String("control", d.listener.Addr().String()), slog.Int("peers", len(d.fleet().peers)),
		slog.Int("probes", len(cfg.Probes)), slog.Int("ports", len(d.known.list())))
}

// progressing reports whether the scheduler still makes its rounds.
func (d *Daemon) progressing(now time.Time) bool {
	return now.Sub(d.scheduler.LastTick()) < 3*schedule.MaxSleep
}
