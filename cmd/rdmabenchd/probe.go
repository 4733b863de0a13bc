package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/daemon"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

func (f *probeFlags) run(ctx context.Context, env *environment) error {
	spec, err := f.shape(nil)
	if err != nil {
		return &exitError{exitUsage, err}
	}
	if err := f.out.prepare(spec); err != nil {
		return &exitError{exitUsage, err}
	}
	defer f.out.discard()
	log := env.logger()
	node := oneShotNode(log, func(string) bool { return true }, f.gid)
	defer node.Close()
	watch := daemon.NewPortWatch(node, node.Use, slog.New(slog.DiscardHandler)) // lets a device go that an administrator removes
	watching, stop := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() { _ = watch.Run(watching) })
	defer done.Wait()
	defer stop()
	device, port, pickErr := f.pick(node)
	if pickErr != nil && !f.out.records() {
		return pickErr
	}
	if pickErr == nil { // what the port can carry
		if spec, err = f.shape(portOf(node, device, port)); err != nil {
			return &exitError{exitUsage, err}
		}
	}
	client := control.NewClient()
	defer client.CloseIdle()
	i := &probe.Initiator{Node: node, Client: client}
	if f.pattern != "" {
		return f.group(ctx, env, i, spec, device, port)
	}
	if isTerminal(env.stderr) && f.out.form == "text" {
		i.OnProgress = func(p probe.Progress) { printProgress(env.stderr, p) }
	}
	r := i.Probe(ctx, spec, f.targets()[0], device, port)
	if i.OnProgress != nil {
		fmt.Fprint(env.stderr, "\r\033[K")
	}
	if err := f.out.write(env.stdout, env.stderr, spec, r); err != nil {
		return err
	}
	switch {
	case r.Usable():
		return nil
	case pickErr != nil:
		return pickErr // the same in a few words, and its exit code
	}
	return failed(r)
}

// failed is the error of a result without figures.
func failed(r *probe.Result) error {
	code := exitFailed
	if *r.Scope == probe.ScopeLocal && noDevice[*r.Reason] {
		code = exitNoDevice
	}
	return &exitError{code, fmt.Errorf("probe of %s %s at stage %s: %s (%s): %s", r.Peer, r.Outcome, *r.Stage, *r.Reason, *r.Scope, oneLine(*r.Detail))}
}

// noDevice are the reasons for which nothing on this node can be used.
var noDevice = map[probe.Reason]bool{
	probe.NoRDMA: true, probe.NoDevice: true, probe.NoCharDevice: true, probe.ProviderMissing: true, probe.PortDown: true, probe.PortInit: true,
	probe.NoGID: true, probe.GIDNotAssigned: true, probe.Permission: true, probe.DeviceRemoved: true, probe.TransportUnsupported: true,
}

// pick finds the port to probe from: what the flags name, else the first that is usable. With an error it names the port
// that was wanted, if any, so that a result can say the same.
func (f *probeFlags) pick(n *probe.Node) (device string, port int, err error) {
	ports, err := n.Ports()
	if err != nil {
		return "", 0, &exitError{exitNoDevice, err}
	}
	device, port = f.device, max(f.port, 1)
	var names []string
	for _, p := range ports {
		names = append(names, p.Key())
		if f.device != "" && p.Device != f.device || f.port != 0 && p.Port != f.port {
			continue
		}
		if p.Reason == "" {
			return p.Device, p.Port, nil
		}
		if err == nil {
			device, port, err = p.Device, p.Port, fmt.Errorf("%s: %s", p.Reason, p.Detail)
		}
	}
	switch {
	case err != nil:
		return device, port, &exitError{exitNoDevice, err}
	case len(ports) == 0, f.device == "" && f.port == 0:
		return device, port, anyUsable(n)
	}
	what := "device " + f.device
	if f.port != 0 {
		what = strings.TrimSpace(what + fmt.Sprintf(" port %d", f.port))
	}
	return device, port, &exitError{exitUsage, fmt.Errorf("%s is not there: this node has %s", what, strings.Join(names, ", "))}
}

// portOf is a port that was picked; nil if it has gone since.
func portOf(n *probe.Node, device string, port int) *probe.LocalPort {
	ports, _ := n.Ports()
	for i := range ports {
		if ports[i].Device == device && ports[i].Port == port {
			return &ports[i]
		}
	}
	return nil
}

func printProgress(w io.Writer, p probe.Progress) {
	rate := float64(p.Done) / p.Elapsed.Seconds()
	if p.Total > 0 {
		fmt.Fprintf(w, "\r\033[K%d bytes: %d of %d messages, %.0f/s, %.1f MiB/s", p.Size, p.Done, p.Total, rate, rate*float64(p.Size)/(1<<20))
		return
	}
	fmt.Fprintf(w, "\r\033[K%d bytes: %d messages in %s, %.0f/s, %.1f MiB/s", p.Size, p.Done, p.Elapsed.Round(100*time.Millisecond), rate, rate*float64(p.Size)/(1<<20))
}
