package counters

import (
	"strconv"
	"strings"
)

// link reads the port's link, and how Ethernet treats its packets.
func (r *reader) link(d *Device, p *Port, e *Environment) {
	dir := d.dir + "/ports/" + strconv.Itoa(p.Port)
	k := &e.Link
	k.Netdev = p.Netdev
	now := Port{Port: p.Port, LinkLayer: p.LinkLayer}
	now.State, now.StateID = r.state(dir + "/state")
	k.State = now.State
	if text := field(r, "link.rate_gbps", dir+"/rate", asText); text != nil {
		now.RateRaw = text
		if gbps, ok := parseRate(*text); ok {
			now.RateGbps = &gbps
		}
	}
	if p.Netdev != nil {
		netdev := r.netdevDir(*p.Netdev)
		k.NetdevMTU = field(r, "link.netdev_mtu", netdev+"/mtu", parseInt)
		now.NetdevSpeedMbps = parsed(r.lane, netdev+"/speed", parseSpeed) // refuses where the link is down
	}
	if now.Active() || software(d.Driver) {
		switch doubt := rateDoubt(d, &now); {
		case doubt == "":
			k.RateGbps, k.Lanes = now.RateGbps, parseLanes(*now.RateRaw)
		case now.NetdevSpeedMbps != nil:
			k.RateGbps = new(float64(*now.NetdevSpeedMbps) / 1000)
		}
	}
	if deref(p.LinkLayer) != "Ethernet" {
		return
	}
	k.MaxMTU = new(4096)
	if k.NetdevMTU != nil {
		if mtu, ok := rdmaMTU(*k.NetdevMTU); ok && d.Transport != IWARP {
			k.ActiveMTU = &mtu
		}
	}
	if d.Transport == RoCE {
		r.qos(d, p, e)
	}
	if p.Netdev != nil {
		r.netdevSettings(*p.Netdev, e)
	}
}

// parseLanes returns the width of "100 Gb/sec (4X EDR)".
func parseLanes(rate string) *int {
	_, rest, _ := strings.Cut(rate, "(")
	n, _, ok := strings.Cut(rest, "X")
	lanes, err := strconv.Atoi(n)
	if !ok || err != nil || lanes < 1 {
		return nil
	}
	return &lanes
}

// parseSpeed takes a netdev's speed in Mb/s; -1 and 4294967295 are the kernel's ways to say unknown.
func parseSpeed(s string) (mbps int, ok bool) {
	v, err := strconv.ParseInt(s, 10, 32)
	return int(v), err == nil && v > 0
}

// qos reads what of the treatment of packets is in sysfs: rdma_cm's defaults, where somebody made the directory, and what the
// vendor's package of mlx5 adds.
func (r *reader) qos(d *Device, p *Port, e *Environment) {
	q := &QoSState{}
	e.QoS = q
	port := strconv.Itoa(p.Port)
	q.RoCEv2 = r.hasRoCEv2(d.dir + "/ports/" + port + "/gid_attrs/types")
	cm := r.fs.path("kernel", "config", "rdma_cm", d.Name, "ports", port)
	q.DefaultMode = field(r, "qos.default_mode", cm+"/default_roce_mode", asText)
	q.DefaultTOS = field(r, "qos.default_tos", cm+"/default_roce_tos", parseInt)
	q.TrafficClass = parsed(r.lane, d.dir+"/tc/"+port+"/traffic_class", parseTrafficClass) // reads empty if none is forced
	if p.Netdev == nil {
		return
	}
	netdev := r.netdevDir(*p.Netdev)
	q.Trust = field(r, "qos.trust", netdev+"/qos/trust", asText)
	if ecn := r.ecn(netdev); ecn != nil {
		q.ECN = ecn
	}
}

// hasRoCEv2 looks for a GID of that type. Rows that are empty can't be read, and stand behind those in use as a rule.
func (r *reader) hasRoCEv2(dir string) *bool {
	rows, err := r.list(dir)
	if err != nil {
		r.failed("qos.roce_v2", err)
		return nil
	}
	for _, row := range rows {
		if kind, err := r.read(dir + "/" + row); err == nil && kind == "RoCE v2" {
			return new(true)
		}
	}
	return new(false)
}

// parseTrafficClass takes the first line of "Global tclass=106".
func parseTrafficClass(s string) (int, bool) {
	line, _, _ := strings.Cut(s, "\n")
	_, v, ok := strings.Cut(line, "tclass=")
	class, err := strconv.ParseUint(strings.TrimSpace(v), 10, 8)
	return int(class), ok && err == nil
}

// ecn lists the priorities for which both ends of congestion control are on: notifying and reacting.
func (r *reader) ecn(netdev string) []int {
	var on []int
	for prio := range 8 {
		n := strconv.Itoa(prio)
		np := field(r, "qos.ecn", netdev+"/ecn/roce_np/enable/"+n, parseSwitch)
		rp := field(r, "qos.ecn", netdev+"/ecn/roce_rp/enable/"+n, parseSwitch)
		if np == nil || rp == nil {
			continue
		}
		if on == nil {
			on = []int{}
		}
		if *np && *rp {
			on = append(on, prio)
		}
	}
	return on
}
