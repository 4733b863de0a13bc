package daemon

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/exporter"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// portLook is how often the daemon looks for ports that came or went.
const portLook = 10 * time.Second

type portName struct {
	device string
	port   int
}

// knownPorts are those that were usable once. One that is down now stays among them, so that its probes fail with the reason
// instead of silently ending.
type knownPorts struct {
	mu    sync.Mutex
	ports []portName
	state map[portName]probe.Reason // as last logged; empty: usable
}

func (k *knownPorts) list() []portName {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.ports)
}

// watchPorts looks at the ports until ctx ends.
func (d *Daemon) watchPorts(ctx context.Context) error {
	t := time.NewTicker(portLook)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
			d.lookAtPorts()
		}
	}
}

// lookAtPorts learns of usable ports, and logs a line for each change.
func (d *Daemon) lookAtPorts() {
	ports, err := d.node.Ports()
	if err != nil {
		d.log.Warn("RDMA devices can't be listed", slog.Any("err", err))
		return
	}
	k := &d.known
	k.mu.Lock()
	defer k.mu.Unlock()
	first := k.state == nil
	if first {
		k.state = map[portName]probe.Reason{}
		if len(ports) == 0 {
			d.log.Info("no RDMA device here that may be used: the daemon runs, and probes once there is one")
		}
	}
	k.ports = slices.DeleteFunc(k.ports, func(p portName) bool { return !d.use(p.device) })
	seen := map[portName]bool{}
	for _, p := range ports {
		name := portName{p.Device, p.Port}
		seen[name] = true
		if p.Reason == "" && !slices.Contains(k.ports, name) {
			k.ports = append(k.ports, name)
		}
		if was, known := k.state[name]; known && was == p.Reason {
			continue
		}
		k.state[name] = p.Reason
		at := []any{slog.String("device", p.Device), slog.Int("port", p.Port)}
		if p.Reason == "" {
			d.log.Info("port is usable", append(at, slog.String("rail", p.Rail), slog.String("gids", gidText(p)))...)
		} else {
			d.log.Warn("port is not usable", append(at, slog.String("reason", string(p.Reason)), slog.String("detail", p.Detail))...)
		}
	}
	for name := range maps.Clone(k.state) {
		if !seen[name] {
			delete(k.state, name)
			d.log.Warn("port is gone", slog.String("device", name.device), slog.Int("port", name.port))
		}
	}
}

func gidText(p probe.LocalPort) string {
	s := ""
	for _, g := range p.GIDs {
		if s != "" {
			s += " "
		}
		s += strconv.Itoa(g.Index) + "=" + g.Addr.String()
	}
	return s
}

// ports is the exporter's view of this node's ports: what verbs can do with them and what sysfs knows of them.
type ports struct {
	node   *probe.Node
	fs     *counters.FS
	filter func() counters.Filter
}

func (p *ports) Ports(ctx context.Context) ([]exporter.PortState, error) {
	list, err := p.node.Ports()
	inv, ierr := p.fs.Collect(ctx, p.filter())
	if err == nil {
		err = ierr
	}
	var out []exporter.PortState
	for _, lp := range list {
		out = append(out, exporter.PortState{Device: lp.Device, Port: lp.Port, Usable: lp.Reason == "", Reason: lp.Reason, Detail: lp.Detail, Rail: lp.Rail,
			Environment: p.node.Environments.Latest(lp.Device, lp.Port)})
	}
	if inv == nil {
		return out, err
	}
	for i := range inv.Devices {
		d := &inv.Devices[i]
		for j := range d.Ports {
			addSysfs(&out, d, &d.Ports[j])
		}
	}
	return out, err
}

// addSysfs adds what sysfs knows of a port; one that verbs does not list is added as not usable.
func addSysfs(out *[]exporter.PortState, d *counters.Device, p *counters.Port) {
	i := slices.IndexFunc(*out, func(s exporter.PortState) bool { return s.Device == d.Name && s.Port == p.Port })
	if i < 0 {
		i = len(*out)
		*out = append(*out, exporter.PortState{Device: d.Name, Port: p.Port, Reason: probe.MissingReason(d.Name), Detail: "sysfs shows the device, verbs does not list it"})
	}
	s := &(*out)[i]
	if p.StateID != nil {
		up := *p.StateID == counters.StateActive
		s.Up = &up
	}
	if p.RateGbps != nil && p.RateTrustworthy {
		rate := *p.RateGbps * 1e9 / 8
		s.RateBytesPerSecond = &rate
	}
	s.Driver = d.Driver
	s.LinkLayer, s.Firmware, s.HCAType, s.BoardID, s.Netdev = deref(p.LinkLayer), deref(d.FwVer), deref(d.HCAType), deref(d.BoardID), deref(p.Netdev)
	if d.PCI != nil {
		s.PCI = d.PCI.BDF
		if n := d.PCI.NUMANode; n != nil && *n >= 0 {
			s.NUMANode = strconv.Itoa(*n)
		}
	}
	s.Counters, s.Events = map[string]uint64{}, map[string]uint64{}
	for _, group := range p.CountersRaw {
		maps.Copy(s.Counters, group)
	}
	for class, sum := range p.Classes {
		s.Events[string(class)] = sum.Sum
	}
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
