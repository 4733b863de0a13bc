package daemon

import (
	"context"
	"maps"
	"slices"
	"strconv"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/exporter"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// ports is the exporter's view of this node's ports: what verbs can do with them and what sysfs knows of them.
type ports struct {
	node   *probe.Node
	fs     *counters.FS
	filter func() counters.Filter
	watch  *PortWatch
}

func (p *ports) Ports(ctx context.Context) ([]exporter.PortState, error) {
	list, err := p.node.Ports()
	inv, ierr := p.fs.Collect(ctx, p.filter())
	if err == nil {
		err = ierr
	}
	var out []exporter.PortState
	for _, lp := range list {
		out = append(out, exporter.PortState{Device: lp.Device, Port: lp.Port, Usable: lp.Reason == "", Reason: lp.Reason, Detail: lp.Detail, Rail: lp.Rail, Flaps: p.watch.flapped(lp.Device, lp.Port),
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
