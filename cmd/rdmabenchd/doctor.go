package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"text/tabwriter"

	"github.com/alecthomas/kingpin/v2"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/doctor"
)

func addDoctor(app *kingpin.Application, add func(string, func(context.Context, *environment) error)) {
	cmd := app.Command("doctor", "Find what keeps this node, or this node and a peer, from good RDMA: layer by layer, with what was found, what was expected and what to do.")
	peer := cmd.Arg("peer", "Host or host:port of a peer's control channel (default port "+defaultControlPort+"), to which messages are sent. Without, this node alone.").String()
	device := cmd.Flag("device", "Only this device (default: all; with a peer, the one whose netdev leads there).").Short('d').String()
	port := cmd.Flag("port", "Only this port of the devices.").Short('i').Int()
	gid := cmd.Flag("gid-index", "GID table index to send from (default: chosen by content).").Short('x').Default("-1").Int()
	root := cmd.Flag("sysfs.root", "Read this tree instead of /sys, and nothing else.").Default(defaultSysfs).String()
	asJSON := cmd.Flag("json", "Print JSON.").Bool()
	add(cmd.FullCommand(), func(ctx context.Context, env *environment) error {
		o := doctor.Options{Sysfs: counters.NewFS(*root), Port: *port}
		if *device != "" {
			o.Filter.Include = []string{*device}
		}
		switch {
		case *root == defaultSysfs:
			o.Node = oneShotNode(env.logger(), o.Filter.Match, *gid)
			defer o.Node.Close()
		case *peer != "":
			return &exitError{exitUsage, errors.New("a peer can't be reached from a copied tree: leave out the peer or --sysfs.root")}
		}
		if *peer != "" {
			o.Peer = *peer
			if _, _, err := net.SplitHostPort(o.Peer); err != nil {
				o.Peer = net.JoinHostPort(strings.Trim(o.Peer, "[]"), defaultControlPort)
			}
		}
		r, err := doctor.Run(ctx, o)
		switch {
		case err != nil && ctx.Err() != nil:
			return err
		case err != nil:
			return &exitError{exitUsage, fmt.Errorf("--sysfs.root: %w", err)}
		}
		if *asJSON {
			enc := json.NewEncoder(env.stdout)
			enc.SetIndent("", "  ")
			if err := enc.Encode(r); err != nil {
				return err
			}
		} else {
			printReport(env.stdout, r)
		}
		switch r.Verdict {
		case doctor.Unhealthy:
			return &exitError{exitFailed, errors.New(r.Diagnosis)}
		case doctor.Unusable:
			return &exitError{exitNoDevice, errors.New(r.Diagnosis)}
		}
		return nil
	})
}

// printReport prints a line a check, those of a layer that can't be told for the same reason in one, and then what to do.
func printReport(w io.Writer, r *doctor.Report) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "LAYER\tVERDICT\tCHECK\tFOUND")
	for i, c := range r.Checks {
		text := c.Found
		if c.Expected != "" {
			text += " (expected: " + c.Expected + ")"
		}
		if c.Verdict == doctor.Unknown {
			var names []string
			for j, o := range r.Checks {
				if o.Verdict == doctor.Unknown && o.Layer == c.Layer && o.Found == c.Found {
					if j < i {
						break // printed with that one
					}
					names = append(names, o.Check)
				}
			}
			switch {
			case names == nil:
				continue
			case len(names) > 1:
				c.Check, text = fmt.Sprintf("%d checks", len(names)), c.Found+": "+strings.Join(names, "; ")
			}
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", c.Layer, c.Verdict, c.Check, text)
	}
	t.Flush()
	fmt.Fprintln(w)
	for _, c := range r.Checks {
		if c.Advice != nil {
			fmt.Fprintf(w, "%s: %s: %s: %s\n  %s\n", c.Verdict, c.Layer, c.Check, c.Found, *c.Advice)
		}
	}
	fmt.Fprintf(w, "%s: %s\n", r.Verdict, r.Diagnosis)
}
