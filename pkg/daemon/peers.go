package daemon

import (
	"log/slog"
	"net"
	"net/netip"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/exporter"
	"github.com/rdmabenchd/rdmabenchd/pkg/peers"
)

// peersChanged takes over what the sources of peers tell now. Probes of those that stay keep their time, and their runs go on.
func (d *Daemon) peersChanged(peers.View) {
	d.reload.Lock()
	defer d.reload.Unlock()
	cfg := d.config()
	all := fleetOf(cfg, d.peers.View()) // a reload may have been faster
	if err := d.scheduler.Replace(d.jobs(cfg, all)); err != nil {
		d.log.Error("the new peers can't be scheduled, the old ones stay: please report this", slog.Any("err", err))
		return
	}
	d.mu.Lock()
	d.all = all
	d.mu.Unlock()
	d.target(cfg, all)
}

// fleetOf is the fleet of a view. A node that is to be left alone leaves the others alone, too.
func fleetOf(cfg *config.Config, view peers.View) *fleet {
	if peers.IsLameDuck(cfg.Node.Labels) {
		return newFleet(cfg.Node, nil)
	}
	return newFleet(cfg.Node, view.Active())
}

// target tells who needs to know which peers there are.
func (d *Daemon) target(cfg *config.Config, all *fleet) {
	d.guard.set(cfg, d.peers.View())
	targets := exporter.Targets{Use: cfg.Devices.Use}
	for _, p := range cfg.Probes {
		targets.Probes = append(targets.Probes, p.Spec.WithDefaults())
	}
	for name := range all.peers {
		targets.Peers = append(targets.Peers, name)
	}
	d.exporter.SetTargets(targets)
	d.journal.keep(all.peers)
}

// peerReplaced is told that another machine answers to a peer's name. Package peers has logged it.
func (d *Daemon) peerReplaced(_ string, _, _ control.Identity) {
	d.replaced.Add(1)
}

// discovery is the exporter's view of where peers come from.
func (d *Daemon) discovery() exporter.Discovery {
	out := exporter.Discovery{States: map[string]int{}, Sources: map[string]exporter.Source{}, Replaced: float64(d.replaced.Load())}
	view := d.peers.View()
	for _, s := range []peers.State{peers.Self, peers.Drained, peers.Duplicate, peers.Unnamed} {
		out.States[string(s)] = view.Count(s)
	}
	for kind, s := range d.peers.Status() {
		out.Sources[kind] = exporter.Source{Failures: s.Failures, Failing: s.Failing, Good: s.Good}
	}
	return out
}

// OwnAddresses returns a test for addresses at which this daemon itself answers. Where it listens on one address, those of other
// interfaces may be other daemons', as in the lab.
func OwnAddresses(cfg *config.Config) func(address string) bool {
	listen, err := netip.ParseAddrPort(withHost(cfg.Control.Listen))
	if err != nil {
		return func(a string) bool { return a == cfg.Control.Listen || a == cfg.Control.Advertise }
	}
	own := map[netip.Addr]bool{listen.Addr().Unmap(): true}
	if listen.Addr().IsUnspecified() {
		addrs, _ := net.InterfaceAddrs() // none: the handshake will tell
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				own[p.Addr().Unmap()] = true
			}
		}
	}
	return func(address string) bool {
		if address == cfg.Control.Advertise {
			return true
		}
		a, err := netip.ParseAddrPort(address)
		if err != nil || a.Port() != listen.Port() {
			return false
		}
		return own[a.Addr().Unmap().WithZone("")] || listen.Addr().IsUnspecified() && a.Addr().IsLoopback()
	}
}

// withHost makes a listening address parse that has none.
func withHost(listen string) string {
	if listen != "" && listen[0] == ':' {
		return "[::]" + listen
	}
	return listen
}
