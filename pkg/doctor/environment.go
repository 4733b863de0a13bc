package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
)

// layerOf says where a check of the environment belongs. One that is not listed repeats what an earlier layer looks at.
var layerOf = map[counters.CheckName]Layer{
	counters.CheckPCIeWidth: PCIe, counters.CheckPCIeSpeed: PCIe, counters.CheckPCIePath: PCIe, counters.CheckPCIeRate: PCIe,
	counters.CheckPCIeErrors: PCIe, counters.CheckPCIePayload: PCIe, counters.CheckPCIeRead: PCIe, counters.CheckPCIeOrdering: PCIe,
	counters.CheckPCIePower: PCIe, counters.CheckIOMMU: PCIe, counters.CheckACS: PCIe,
	counters.CheckNUMA: CPU, counters.CheckGovernor: CPU, counters.CheckFrequency: CPU, counters.CheckIdle: CPU, counters.CheckThrottle: CPU,
	counters.CheckMemlock: Memlock, counters.CheckHugePages: Memlock,
	counters.CheckLinkRate: Ports, counters.CheckFlowControl: Ports, counters.CheckECN: Ports, counters.CheckMTU: MTU,
}

// grave are the checks that fail where others warn: they are certain, and don't come and go.
var grave = map[counters.CheckName]bool{counters.CheckPCIeWidth: true}

// environments looks at what the ports measure under: of all ports, or of the one that a peer was probed from.
func (e *examination) environments(ctx context.Context, chosen *port) {
	type finding struct {
		counters.Check
		of []*port
	}
	var all []*finding
	ports := e.ports
	if chosen != nil {
		ports = []*port{chosen}
	}
	look := func(device string, num int, p *port) {
		env, err := e.Sysfs.Environment(ctx, device, num)
		if err != nil {
			return // ctx ended, which Run says
		}
		if p != nil && p.local != nil && p.local.State.ActiveMTU > 0 {
			env.Link.ActiveMTU, env.Link.MaxMTU = &p.local.State.ActiveMTU, &p.local.State.MaxMTU
		}
		for _, c := range env.Checks() {
			layer, ok := layerOf[c.Name]
			if !ok || (p == nil || p.broken) && (layer == Ports || layer == MTU) { // what a port that is down would do is no matter
				continue
			}
			i := slices.IndexFunc(all, func(f *finding) bool { return f.Check == c })
			if i < 0 {
				i, all = len(all), append(all, &finding{Check: c})
			}
			if p != nil {
				all[i].of = append(all[i].of, p)
			}
		}
	}
	for _, p := range ports {
		look(p.device, p.num, p)
	}
	if len(ports) == 0 {
		look("", 0, nil) // the host's part
	}
	for _, f := range all {
		layer := layerOf[f.Name]
		check := string(f.Name)
		if len(f.of) > 0 && (len(f.of) < len(ports) || layer != CPU && layer != Memlock) {
			check += " of " + list(f.of, layer == PCIe || layer == CPU)
		}
		v := map[counters.CheckVerdict]Verdict{counters.CheckOK: OK, counters.CheckWarn: Warning}[f.Verdict]
		switch {
		case v == "":
			v = Unknown
		case v == Warning && grave[f.Name]:
			v = Failed
		}
		e.add(layer, v, check, f.Found, f.Expected, f.Advice)
	}
	for l, why := range map[Layer]string{MTU: "no usable port is in sysfs", PCIe: "no port has a PCI function"} {
		if !slices.ContainsFunc(e.checks, func(c Check) bool { return c.Layer == l }) {
			e.skip(l, "ports", why)
		}
	}
}

// list names ports, or their devices where those are what matters; of many it gives the number.
func list(ports []*port, devices bool) string {
	var names []string
	for _, p := range ports {
		name := p.name()
		if devices {
			name = p.device
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	if len(names) > 4 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:3], ", "), len(names)-3)
	}
	return strings.Join(names, ", ")
}
