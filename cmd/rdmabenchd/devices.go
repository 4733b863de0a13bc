package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/alecthomas/kingpin/v2"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// listing is what `devices --json` prints: the inventory, and with each port what verbs say of it and what it measures under.
type listing struct {
	*counters.Inventory
	Devices []listedDevice `json:"devices"`
}

type listedDevice struct {
	counters.Device
	Ports []listedPort `json:"ports"`
}

type listedPort struct {
	counters.Port
	Rail        *string               `json:"rail"`   // null in a copied tree, as are the next two
	Usable      *bool                 `json:"usable"` // whether probes could use it now
	Reason      *probe.Reason         `json:"reason"` // why not
	Environment *counters.Environment `json:"environment"`
	Fingerprint *string               `json:"fingerprint"` // of the environment
	Checks      []counters.Check      `json:"checks"`
}

func addDevices(app *kingpin.Application, add func(string, func(context.Context, *environment) error)) {
	cmd := app.Command("devices", "List RDMA devices, their ports, GIDs, netdevs and PCI functions, what they measure under, and warnings.")
	root := cmd.Flag("sysfs.root", "Read this tree instead of /sys; in it a file of 0 bytes stands for a read that fails.").Default(defaultSysfs).String()
	asJSON := cmd.Flag("json", "Print JSON.").Bool()
	add(cmd.FullCommand(), func(ctx context.Context, env *environment) error {
		fs := counters.NewFS(*root)
		inv, err := fs.Inventory(ctx, counters.Filter{})
		if err != nil {
			return &exitError{exitUsage, fmt.Errorf("--sysfs.root: %w", err)}
		}
		var ports []probe.LocalPort
		if *root == defaultSysfs {
			node := oneShotNode(env.logger(), func(string) bool { return true }, -1)
			defer node.Close()
			ports, _ = node.Ports() // what sysfs shows is all there is to show
			addVerbs(inv, ports)
		}
		list, err := list(ctx, fs, inv, ports)
		if err != nil {
			return err
		}
		if *asJSON {
			enc := json.NewEncoder(env.stdout)
			enc.SetIndent("", "  ")
			if err := enc.Encode(list); err != nil {
				return err
			}
		} else {
			printDevices(env.stdout, list)
		}
		if len(inv.Devices) == 0 {
			return &exitError{exitNoDevice, fmt.Errorf("no RDMA device in %s/class/infiniband: `rdmabenchd doctor` looks for the cause", strings.TrimRight(*root, "/"))}
		}
		return nil
	})
}

// list adds to the inventory what is known beyond sysfs' RDMA class.
func list(ctx context.Context, fs *counters.FS, inv *counters.Inventory, ports []probe.LocalPort) (*listing, error) {
	l := &listing{Inventory: inv, Devices: []listedDevice{}}
	for _, d := range inv.Devices {
		out := listedDevice{Device: d, Ports: []listedPort{}}
		for _, p := range d.Ports {
			e, err := fs.Environment(ctx, d.Name, p.Port)
			if err != nil {
				return nil, err
			}
			lp := listedPort{Port: p, Environment: e}
			if k := localPort(ports, d.Name, p.Port); k != nil {
				usable := k.Reason == ""
				lp.Rail, lp.Usable = &k.Rail, &usable
				if !usable {
					lp.Reason = &k.Reason
				}
				if k.State.ActiveMTU > 0 {
					e.Link.ActiveMTU, e.Link.MaxMTU = &k.State.ActiveMTU, &k.State.MaxMTU
				}
			}
			lp.Fingerprint, lp.Checks = new(e.Fingerprint().ID), e.Checks()
			out.Ports = append(out.Ports, lp)
		}
		l.Devices = append(l.Devices, out)
	}
	return l, nil
}

func localPort(ports []probe.LocalPort, device string, port int) *probe.LocalPort {
	for i := range ports {
		if ports[i].Device == device && ports[i].Port == port {
			return &ports[i]
		}
	}
	return nil
}

const (
	defaultSysfs   = "/sys"
	warnVerbsOnly  = "not_in_sysfs"      // its counters can't be told
	warnSysfsOnly  = "not_in_verbs"      // no provider for it, or no node below /dev/infiniband
	warnNotOpening = "can_not_be_opened" // verbs list it and can't open it
)

// addVerbs adds what verbs know: devices that sysfs does not show, those of a user-space provider, and the MTU of InfiniBand.
func addVerbs(inv *counters.Inventory, ports []probe.LocalPort) {
	for _, k := range ports {
		i := slices.IndexFunc(inv.Devices, func(d counters.Device) bool { return d.Name == k.Device })
		if i < 0 {
			i = len(inv.Devices)
			inv.Devices = append(inv.Devices, counters.Device{
				Name: k.Device, Transport: counters.RoCE, Netdevs: []counters.Netdev{}, Ports: []counters.Port{}, Warnings: []string{warnVerbsOnly},
			})
			inv.Warnings = slices.DeleteFunc(inv.Warnings, func(w string) bool { return w == counters.WarnNoDevice })
		}
		d := &inv.Devices[i]
		switch p := slices.IndexFunc(d.Ports, func(p counters.Port) bool { return p.Port == k.Port }); {
		case k.State.State == 0: // it could not be opened
			d.Warnings = append(d.Warnings, warnNotOpening)
		case p < 0:
			d.Ports = append(d.Ports, verbsPort(k.Port, k.State))
		case d.Ports[p].RDMAMTU == nil && k.State.ActiveMTU > 0:
			d.Ports[p].RDMAMTU = &k.State.ActiveMTU
		}
	}
	for i := range inv.Devices {
		d := &inv.Devices[i]
		if !slices.ContainsFunc(ports, func(k probe.LocalPort) bool { return k.Device == d.Name }) {
			d.Warnings = append(d.Warnings, warnSysfsOnly)
		}
	}
}

func verbsPort(n int, p verbs.Port) counters.Port {
	state, id, layer, lid, mtu := p.State.String(), int(p.State), string(p.LinkLayer), int(p.LID), p.ActiveMTU
	out := counters.Port{
		Port: n, State: &state, StateID: &id, LinkLayer: &layer, LID: &lid, RDMAMTU: &mtu, GIDs: []counters.GID{}, RoCEv2GIDs: []counters.GID{},
		CountersRaw: map[counters.Group]map[string]uint64{}, Normalised: map[string]*uint64{}, Classes: map[counters.Class]counters.ClassSum{},
		Unreadable: []counters.Unreadable{}, Saturated: []string{}, Warnings: []string{},
	}
	if p.RateGbps > 0 {
		out.RateGbps = &p.RateGbps
	}
	return out
}

func printDevices(w io.Writer, l *listing) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "DEVICE\tPORT\tRAIL\tSTATE\tLINK\tRATE\tMTU\tNETDEV\tGID\tNUMA\tPCI\tFIRMWARE\tWARNINGS")
	var details []string
	for _, d := range l.Devices {
		numa, pci := "-", "-"
		if p := d.PCI; p != nil {
			pci = p.BDF
			if p.CurGTS != nil && p.CurWidth != nil {
				pci += fmt.Sprintf(" %g GT/s x%d", *p.CurGTS, *p.CurWidth)
			}
			if p.NUMANode != nil && *p.NUMANode >= 0 {
				numa = strconv.Itoa(*p.NUMANode)
			}
		}
		for _, p := range d.Ports {
			rate, mtu := "-", "-"
			if p.RateGbps != nil {
				rate = fmt.Sprintf("%g Gb/s", *p.RateGbps)
			}
			if p.RDMAMTU != nil {
				mtu = strconv.Itoa(*p.RDMAMTU)
			}
			warnings := slices.Concat(d.Warnings, p.Warnings)
			if p.Reason != nil {
				warnings = append(warnings, string(*p.Reason))
			}
			for _, c := range p.Checks {
				if c.Verdict == counters.CheckWarn {
					warnings = append(warnings, string(c.Name))
					details = append(details, fmt.Sprintf("%s port %d: %s: %s, expected %s", d.Name, p.Port.Port, c.Name, c.Found, c.Expected))
				}
			}
			fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", d.Name, p.Port.Port, text(p.Rail), text(p.State), text(p.LinkLayer), rate, mtu, text(p.Netdev),
				bestGID(p.Port), numa, pci, text(d.FwVer), strings.Join(warnings, " "))
		}
		if len(d.Ports) == 0 {
			fmt.Fprintf(t, "%s\t-\t-\t-\t-\t-\t-\t-\t-\t%s\t%s\t%s\t%s\n", d.Name, numa, pci, text(d.FwVer), strings.Join(d.Warnings, " "))
		}
	}
	t.Flush()
	for _, warning := range l.Warnings {
		fmt.Fprintln(w, "warning:", warning)
	}
	for _, line := range details {
		fmt.Fprintln(w, line)
	}
}

// bestGID shows the RoCE v2 GID that a person would look for: the first IPv4 one, else the first.
func bestGID(p counters.Port) string {
	for _, g := range p.RoCEv2GIDs {
		if g.IPv4 != nil {
			return fmt.Sprintf("%d %s", g.Index, *g.IPv4)
		}
	}
	if len(p.RoCEv2GIDs) > 0 {
		return fmt.Sprintf("%d %s", p.RoCEv2GIDs[0].Index, p.RoCEv2GIDs[0].GID)
	}
	return "-"
}

func text(s *string) string {
	if s == nil || *s == "" {
		return "-"
	}
	return *s
}
