package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// port is one port as sysfs and verbs see it. Either may be missing.
type port struct {
	device string
	num    int
	dev    *counters.Device
	sys    *counters.Port
	local  *probe.LocalPort
	live   bool // verbs were asked
	broken bool // one of the layers that make it usable failed
}

func (p *port) name() string { return fmt.Sprintf("%s port %d", p.device, p.num) }

// unopened is why verbs could not open the device; empty if they did.
func (p *port) unopened() probe.Reason {
	if p.local == nil {
		return probe.MissingReason(p.device)
	}
	switch r := p.local.Reason; r {
	case probe.Permission, probe.NoCharDevice, probe.DeviceRemoved, probe.ResourceLimit:
		return r
	}
	return ""
}

func (p *port) detail() string {
	if p.local != nil {
		return p.local.Detail
	}
	return ""
}

// ethernet reports whether the port is a RoCE one.
func (p *port) ethernet() bool {
	if p.local != nil && p.local.State.LinkLayer != "" {
		return p.local.State.LinkLayer == verbs.Ethernet
	}
	return p.sys != nil && p.sys.LinkLayer != nil && *p.sys.LinkLayer == "Ethernet"
}

// managed reports whether a subnet manager has to configure the port.
func (p *port) managed() bool {
	if p.dev != nil {
		return p.dev.Transport == counters.IB || p.dev.Transport == counters.OPA
	}
	return p.local != nil && p.local.State.LinkLayer == verbs.InfiniBand
}

// state is the port's logical state, a verbs number; 0: unknown.
func (p *port) state() verbs.PortState {
	switch {
	case p.local != nil && p.local.State.State != 0:
		return p.local.State.State
	case p.sys != nil && p.sys.StateID != nil:
		return verbs.PortState(*p.sys.StateID)
	}
	return 0
}

// netdev is the port's network interface; empty if unknown.
func (p *port) netdev() string {
	if p.sys != nil && p.sys.Netdev != nil {
		return *p.sys.Netdev
	}
	return ""
}

// collectPorts brings together what sysfs and verbs know.
func (e *examination) collectPorts() {
	want := func(n int) bool { return e.Port == 0 || e.Port == n }
	find := func(device string, n int) *port {
		for _, p := range e.ports {
			if p.device == device && p.num == n {
				return p
			}
		}
		p := &port{device: device, num: n, live: e.Node != nil}
		e.ports = append(e.ports, p)
		return p
	}
	for i := range e.inv.Devices {
		d := &e.inv.Devices[i]
		for j := range d.Ports {
			if want(d.Ports[j].Port) {
				p := find(d.Name, d.Ports[j].Port)
				p.dev, p.sys = d, &d.Ports[j]
			}
		}
	}
	if e.Node == nil {
		return
	}
	list, err := e.Node.Ports()
	if err != nil {
		return // which modules has said
	}
	for i := range list {
		l := &list[i]
		if !e.Filter.Match(l.Device) {
			continue
		}
		if l.State.State == 0 { // the device could not be opened: this entry stands for all its ports
			for _, p := range e.ports {
				if p.device == l.Device {
					p.local = l
				}
			}
		}
		if want(l.Port) {
			find(l.Device, l.Port).local = l
		}
	}
}

// examinePorts takes each port through the layers that make it usable, and returns those that are.
func (e *examination) examinePorts() []*port {
	if len(e.ports) == 0 {
		why := "there is no RDMA device"
		if len(e.inv.Devices) > 0 && e.Port > 0 {
			e.add(Ports, Failed, fmt.Sprintf("port %d", e.Port), "no such port", "one of the device's ports", "`rdmabenchd devices` lists them")
			why = "there is no such port"
		} else {
			e.skip(Ports, "ports", why)
		}
		for _, l := range []Layer{SubnetManager, GID} {
			e.skip(l, "ports", why)
		}
		return nil
	}
	steps := []struct {
		layer Layer
		look  func(*port) bool
	}{{Ports, e.link}, {SubnetManager, e.subnet}, {GID, e.gids}}
	var usable []*port
	for _, p := range e.ports {
		why := ""
		if p.live && p.unopened() != "" {
			why = "the device could not be opened"
		}
		for _, s := range steps {
			if why != "" && !(s.layer == Ports && p.sys != nil) { // its state sysfs tells all the same
				e.skip(s.layer, p.name(), why)
			} else if !s.look(p) && why == "" {
				why = fmt.Sprintf("%s failed", s.layer)
			}
		}
		p.broken = why != ""
		if !p.broken && (p.local == nil || p.local.Reason == "") {
			usable = append(usable, p)
		}
	}
	return usable
}

// link looks at the physical and, on Ethernet, the logical state.
func (e *examination) link(p *port) bool {
	state, phys, raw := p.state(), "", ""
	if p.sys != nil {
		phys, raw = deref(p.sys.PhysState), deref(p.sys.State)
	}
	found := state.String()
	if state == 0 {
		found = orElse(raw, "no state")
	}
	if phys != "" {
		found += ", " + phys
	}
	if g := p.gbps(); g > 0 && state == verbs.PortActive {
		found += fmt.Sprintf(", %g Gb/s", g)
	}
	if n := p.netdev(); n != "" {
		found += ", " + n
		if dev := p.net(); dev != nil && dev.OperState != nil && *dev.OperState != "unknown" {
			found += " " + *dev.OperState
		}
	}
	expected := "ACTIVE, LinkUp"
	switch {
	case state == verbs.PortActive && (phys == "" || phys == "LinkUp"):
		e.add(Ports, OK, p.name(), found, expected, "")
	case state == verbs.PortActive:
		e.add(Ports, Warning, p.name(), found, expected, "the link is being repaired again and again, or the driver does not tell: watch the physical errors")
	case p.managed() && (state == verbs.PortInit || state == verbs.PortArmed):
		e.add(Ports, OK, p.name(), found, "a link, LinkUp", "") // what is missing is the next layer's
	case state == 0:
		e.add(Ports, Unknown, p.name(), "state can't be read", expected, "see `rdmabenchd devices` for what can")
		return p.local != nil
	default:
		e.add(Ports, Failed, p.name(), found, expected, linkAdvice(p, phys))
		return false
	}
	return true
}

func linkAdvice(p *port, phys string) string {
	n := p.netdev()
	switch {
	case p.ethernet() && n != "":
		return fmt.Sprintf("ip link set %s up; if it is up, look at cable, transceiver and the switch port: ethtool %s", n, n)
	case phys == "Polling":
		return "no signal: look at cable, transceiver and whether the switch port is enabled"
	case phys == "Disabled":
		return "the port is switched off: ibportstate enables it, or the firmware's setting"
	case phys == "PortConfigurationTraining":
		return "the link trains and does not come up: clean or replace cable and transceiver"
	}
	return "look at cable, transceiver and the switch port, then at dmesg"
}

// subnet looks at whether an InfiniBand port has been configured.
func (e *examination) subnet(p *port) bool {
	if !p.managed() {
		e.add(SubnetManager, Skipped, p.name(), "not needed on this kind of link", "", "")
		return true
	}
	var lid, sm int
	switch {
	case p.local != nil && p.local.State.State != 0:
		lid, sm = int(p.local.State.LID), int(p.local.State.SMLID)
	case p.sys != nil && p.sys.LID != nil && p.sys.SMLID != nil:
		lid, sm = *p.sys.LID, *p.sys.SMLID
	default:
		lid, sm = -1, -1
	}
	found := fmt.Sprintf("%s, LID %d, subnet manager at LID %d", p.state(), lid, sm)
	if lid < 0 {
		found = fmt.Sprintf("%s, LIDs can't be read", p.state())
	}
	const expected = "ACTIVE, with a LID from a subnet manager"
	const advice = "start a subnet manager in this subnet (opensm, or the switch's or UFM's) and look whether it sees this port: sminfo, ibstat; a port that stays ARMED lacks traffic to it"
	switch {
	case p.state() != verbs.PortActive:
		e.add(SubnetManager, Failed, p.name(), found, expected, advice)
		return false
	case lid < 0:
		e.add(SubnetManager, Unknown, p.name(), found, expected, "")
	case sm == 0 || lid == 0 || lid == 0xffff:
		e.add(SubnetManager, Warning, p.name(), found, expected, "the port still runs on what a subnet manager once set and nobody keeps it: "+advice)
	default:
		e.add(SubnetManager, OK, p.name(), found, expected, "")
	}
	return true
}

// gids looks for an address to send from.
func (e *examination) gids(p *port) bool {
	const expected = "a RoCE v2 GID whose address is on the port's netdev"
	if !p.ethernet() || p.dev != nil && p.dev.Transport == counters.IWARP {
		found := "not needed on this kind of link"
		if p.local != nil && p.local.Reason == probe.TransportUnsupported {
			e.add(GID, Failed, p.name(), p.local.Detail, "queue pairs that can be connected by GID", "leave the device out: devices.exclude")
			return false
		}
		e.add(GID, Skipped, p.name(), found, "", "")
		return true
	}
	if p.local != nil {
		switch p.local.Reason {
		case probe.NoGID, probe.GIDNotAssigned, probe.TransportUnsupported:
			e.add(GID, Failed, p.name(), fmt.Sprintf("%s: %s", p.local.Reason, p.local.Detail), expected, gidAdvice(p))
			return false
		}
		var list []string
		for _, g := range p.local.GIDs {
			list = append(list, fmt.Sprintf("%d: %s", g.Index, g.Addr))
		}
		if p.linkLocalOnly() {
			e.add(GID, Warning, p.name(), "only link-local: "+strings.Join(list, ", "), expected, gidAdvice(p))
			return true
		}
		e.add(GID, OK, p.name(), strings.Join(list, ", "), expected, "")
		return true
	}
	if p.sys == nil {
		return false
	}
	var good, local []string
	for _, g := range p.sys.RoCEv2GIDs {
		text := fmt.Sprintf("%d: %s", g.Index, g.GID)
		switch {
		case g.Foreign:
		case g.IPv4 != nil:
			good = append(good, fmt.Sprintf("%d: %s", g.Index, *g.IPv4))
		case strings.HasPrefix(g.GID, "fe80:"):
			local = append(local, text)
		default:
			good = append(good, text)
		}
	}
	switch {
	case len(good) > 0:
		e.add(GID, OK, p.name(), strings.Join(good, ", "), expected, "")
	case len(local) > 0:
		e.add(GID, Warning, p.name(), "only link-local: "+strings.Join(local, ", "), expected, gidAdvice(p))
	default:
		found := fmt.Sprintf("none of %d rows in use is RoCE v2", len(p.sys.GIDs))
		if slices.ContainsFunc(p.sys.GIDs, func(g counters.GID) bool { return g.Foreign }) {
			found += "; some belong to another network namespace"
		}
		e.add(GID, Failed, p.name(), found, expected, gidAdvice(p))
		return false
	}
	return true
}

// linkLocalOnly reports whether nothing beyond the link can be reached from the port. The usual cause is that its address is gone.
func (p *port) linkLocalOnly() bool {
	return p.local != nil && len(p.local.GIDs) > 0 && p.local.State.LinkLayer == verbs.Ethernet &&
		!slices.ContainsFunc(p.local.GIDs, func(g verbs.GID) bool { return !g.Addr.IsLinkLocalUnicast() })
}

func gidAdvice(p *port) string {
	n := orElse(p.netdev(), "NETDEV")
	return fmt.Sprintf("give the netdev its address again: ip addr add ADDRESS/PREFIX dev %s; see `ip addr show %s`, and devices.gid in the configuration", n, n)
}

// gbps is the port's rate as far as it can be trusted; 0: unknown.
func (p *port) gbps() float64 {
	switch {
	case p.sys != nil && p.sys.NetdevSpeedMbps != nil:
		return float64(*p.sys.NetdevSpeedMbps) / 1000
	case p.sys != nil && p.sys.RateTrustworthy && p.sys.RateGbps != nil:
		return *p.sys.RateGbps
	}
	return 0
}

func (p *port) net() *counters.Netdev {
	if p.dev == nil {
		return nil
	}
	for i := range p.dev.Netdevs {
		if p.dev.Netdevs[i].Name == p.netdev() {
			return &p.dev.Netdevs[i]
		}
	}
	return nil
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
