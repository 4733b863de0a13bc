package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule"
)

// maxLight is how many light probes this daemon has under way at most; each blocks an OS thread.
const maxLight = 16

// jobs are the scheduler's: a light probe is one job per peer, so that a slow or dead one holds up no other; a heavy probe is one
// job that visits its peers one after the other.
func (d *Daemon) jobs(cfg *config.Config) []schedule.Job {
	var out []schedule.Job
	peers := d.others(cfg)
	for _, p := range cfg.Probes {
		spec := p.Spec.WithDefaults()
		job := func(name string, to []config.Peer) schedule.Job {
			targets := make([]probe.Target, len(to))
			for i, peer := range to {
				targets[i] = probe.Target{Name: peer.Name, Address: peer.Address, Path: path(cfg.Node.Labels, peer.Labels)}
			}
			return schedule.Job{
				Name: name, Schedule: p.Schedule, Jitter: p.Jitter, Definition: fmt.Sprintf("%+v %+v", spec, targets),
				Timeout: time.Duration(max(1, len(to))) * maxPorts * (spec.Deadline + spec.Wait),
				Run:     func(ctx context.Context, _ time.Time) { d.visit(ctx, spec, targets) },
			}
		}
		if spec.Heavy() {
			if len(peers) > 0 {
				out = append(out, job(p.Spec.Name, peers))
			}
			continue
		}
		for i := range peers {
			out = append(out, job(p.Spec.Name+jobSeparator+peers[i].Name, peers[i:i+1]))
		}
	}
	return out
}

const (
	jobSeparator = " " // in no name
	maxPorts     = 16  // of a node, for bounds of time
)

// probeOf is the probe that a job runs.
func probeOf(job string) string {
	name, _, _ := strings.Cut(job, jobSeparator)
	return name
}

// others are the peers other than this node, beginning with the one after it in the order of names: when all nodes start at
// the same moment, each visits another.
func (d *Daemon) others(cfg *config.Config) []config.Peer {
	var after, before []config.Peer
	for _, p := range cfg.Peers.Static {
		switch {
		case p.Name > cfg.Node.Name:
			after = append(after, p)
		case p.Name < cfg.Node.Name:
			before = append(before, p)
		}
	}
	byName := func(a, b config.Peer) int { return strings.Compare(a.Name, b.Name) }
	slices.SortFunc(after, byName)
	slices.SortFunc(before, byName)
	return append(after, before...)
}

// path classifies the way between two nodes by their racks.
func path(own, peer map[string]string) string {
	switch a, b := own["rack"], peer["rack"]; {
	case a == "" || b == "":
		return "unknown"
	case a == b:
		return "same_rack"
	}
	return "cross_rack"
}

// visit probes targets from every port of this node, one after the other.
func (d *Daemon) visit(ctx context.Context, spec probe.Spec, targets []probe.Target) {
	if !spec.Heavy() {
		if d.light.Acquire(ctx, 1) != nil {
			return
		}
		defer d.light.Release(1)
	}
	ports := d.known.list()
	if len(ports) == 0 {
		ports = []portName{{}} // the result says why there is none
	}
	for _, to := range targets {
		for _, port := range ports {
			if ctx.Err() != nil {
				return
			}
			r := d.initiator.Probe(ctx, spec, to, port.device, port.port)
			d.exporter.Observe(r)
			d.journal.note(r)
		}
	}
}

func (d *Daemon) skipped(job string, why schedule.Skip, _ time.Time, n int) {
	if why == schedule.Missed {
		d.exporter.Missed(probeOf(job), n)
		return
	}
	d.exporter.Skipped(probeOf(job), probe.Overlap, n)
	d.log.Debug("run skipped: the one before it has not ended", slog.String("job", job), slog.Int("runs", n))
}
