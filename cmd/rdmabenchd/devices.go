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
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

func addDevices(app *kingpin.Application, add func(string, func(context.Context, *environment) error)) {
	cmd := app.Command("devices", "List RDMA devices, their ports, GIDs, netdevs and PCI functions, with warnings.")
	root := cmd.Flag("sysfs.root", "Read this tree instead of /sys; in it a file of 0 bytes stands for a read that fails.").Default(defaultSysfs).String()
	asJSON := cmd.Flag("json", "Print JSON.").Bool()
	add(cmd.FullCommand(), func(ctx context.Context, env *environment) error {
		inv, err := counters.NewFS(*root).Inventory(ctx, counters.Filter{})
		if err != nil {
			return &exitError{exitUsage, fmt.Errorf("--sysfs.root: %w", err)}
		}
		if *root == defaultSysfs {
			addVerbsOnly(inv)
		}
		if *asJSON {
			enc := json.NewEncoder(env.stdout)
			enc.SetIndent("", "  ")
			if err := enc.Encode(inv); err != nil {
				return err
			}
		} else {
			printDevices(env.stdout, inv)
		}
		if len(inv.Devices) == 0 {
			return &exitError{exitNoDevice, fmt.Errorf("no RDMA device in %s/class/infiniband: is the driver loaded?", strings.TrimRight(*root, "/"))}
		}
		return nil
	})
}

const (
	defaultSysfs  = "/sys"
	warnVerbsOnly = "not_in_sysfs" // its counters can't be told
)

// addVerbsOnly adds the devices that verbs can use and sysfs does not show: those of a user-space provider.
func addVerbsOnly(inv *counters.Inventory) {
	list, err := verbs.Devices()
	if err != nil {
		return // what sysfs shows is all there is to show
	}
	for _, info := range list {
		if slices.ContainsFunc(inv.Devices, func(d counters.Device) bool { return d.Name == info.Name }) {
			continue
		}
		d := counters.Device{Name: info.Name, Transport: counters.RoCE, Netdevs: []counters.Netdev{}, Ports: []counters.Port{}, Warnings: []string{warnVerbsOnly}}
		if dev, err := verbs.Open(info.Name); err == nil {
			for n := 1; n <= dev.Caps().Ports; n++ {
				if p, err := dev.Port(n); err == nil {
					d.Ports = append(d.Ports, verbsPort(n, p))
				}
			}
			dev.Close()
		}
		inv.Devices = append(inv.Devices, d)
		inv.Warnings = slices.DeleteFunc(inv.Warnings, func(w string) bool { return w == counters.WarnNoDevice })
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

func printDevices(w io.Writer, inv *counters.Inventory) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "DEVICE\tPORT\tSTATE\tLINK\tRATE\tMTU\tNETDEV\tGID\tNUMA\tPCI\tFIRMWARE\tWARNINGS")
	for _, d := range inv.Devices {
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
			warnings := append(append([]string{}, d.Warnings...), p.Warnings...)
			if d.PCI != nil {
				warnings = append(warnings, d.PCI.Warnings...)
			}
			fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", d.Name, p.Port, text(p.State), text(p.LinkLayer), rate, mtu, text(p.Netdev), bestGID(p), numa, pci,
				text(d.FwVer), strings.Join(warnings, " "))
		}
		if len(d.Ports) == 0 {
			fmt.Fprintf(t, "%s\t-\t-\t-\t-\t-\t-\t-\t%s\t%s\t%s\t%s\n", d.Name, numa, pci, text(d.FwVer), strings.Join(d.Warnings, " "))
		}
	}
	t.Flush()
	for _, warning := range inv.Warnings {
		fmt.Fprintln(w, "warning:", warning)
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
