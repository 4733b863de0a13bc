package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/alecthomas/kingpin/v2"
	"golang.org/x/sync/errgroup"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/daemon"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule"
)

// oneShotNode is this host for commands that need no configuration.
func oneShotNode(log *slog.Logger, use func(string) bool, gid int) *probe.Node {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	_ = os.MkdirAll(daemon.LockDir, 0o755) // the gate says if it can't be used
	fs := counters.NewFS("/sys")
	n := probe.NewNode(host, schedule.NewGate(schedule.GateOptions{Dir: daemon.LockDir, Log: log}), probe.NewMeter(fs), log)
	n.Environments = probe.NewEnvironments(fs)
	n.Use, n.GIDIndex = use, func() int { return gid }
	return n
}

func addRespond(app *kingpin.Application, add func(string, func(context.Context, *environment) error)) {
	cmd := app.Command("respond", "Answer probes until interrupted: a responder alone, for ad-hoc use.")
	listen := cmd.Flag("listen", "Address of the control channel. It is not encrypted: any host that reaches it may probe this one.").Default(":18516").String()
	device := cmd.Flag("device", "Only this device.").Short('d').String()
	add(cmd.FullCommand(), func(ctx context.Context, env *environment) error {
		log := env.logger()
		use := func(d string) bool { return *device == "" || d == *device }
		node := oneShotNode(log, use, -1)
		defer node.Close()
		watch := daemon.NewPortWatch(node, use, log)
		if err := anyUsable(node); err != nil {
			return err
		}
		l, err := net.Listen("tcp", *listen)
		if err != nil {
			return &exitError{exitUsage, fmt.Errorf("listen for probes: %w", err)}
		}
		r := probe.NewResponder(node, probe.Limits{Sessions: 64, Memory: 1 << 30, Message: 64 << 20, Lease: time.Minute})
		defer r.Shutdown()
		log.Info("answering probes; interrupt to end", slog.String("address", l.Addr().String()))
		s := control.Server{Service: r, Log: log, Guard: control.AddressGuard(func(string) bool { return true })}
		g, ctx := errgroup.WithContext(ctx)
		g.Go(func() error { return watch.Run(ctx) })
		g.Go(func() error { return s.Serve(ctx, l) })
		return g.Wait()
	})
}

// anyUsable explains a node from which nothing can be probed.
func anyUsable(n *probe.Node) error {
	ports, err := n.Ports()
	if err != nil {
		return &exitError{exitNoDevice, err}
	}
	why := "no RDMA device that verbs can use: is the driver loaded, and rdma-core's provider installed?"
	for _, p := range ports {
		if p.Reason == "" {
			return nil
		}
		why = fmt.Sprintf("no usable RDMA port: %s", p.Detail)
	}
	return &exitError{exitNoDevice, fmt.Errorf("%s", why)}
}
