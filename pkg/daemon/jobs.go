package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule/pairing"
	"github.com/rdmabenchd/rdmabenchd/pkg/sweeper"
)

const (
	// maxLight is how many light probes this daemon has under way at most; each blocks an OS thread.
	maxLight = 16
	maxPorts = 16 // of a node, for bounds of time
	// longest is how long a job that visits one peer after the other may take.
	longest = 24 * time.Hour

	jobSeparator = " " // in no name
)

// jobs are the scheduler's. A light probe is one job per peer, so that a slow or dead one holds up no other; if its peers change
// with each firing, one per place among them. A heavy probe is one job: it visits its peers one after the other, or meets
// them in the slots of a tournament. What a job does with peers it finds out when it runs, so that one that comes or goes ends no run.
func (d *Daemon) jobs(cfg *config.Config, f *fleet) []schedule.Job {
	var out []schedule.Job
	for _, p := range cfg.Probes {
		p.Spec = p.Spec.WithDefaults()
		add := func(suffix string, timeout time.Duration, definition any, run func(context.Context, time.Time)) {
			if sweeper.IsSweep(p) {
				run = d.reported(p.Spec.Name, run)
			}
			out = append(out, schedule.Job{
				Name: p.Spec.Name + suffix, Schedule: p.Schedule, Jitter: p.Jitter, Timeout: timeout,
				Definition: fmt.Sprintf("%+v %+v %+v", p.Spec, p.Pairing, definition), Run: run,
			})
		}
		visit := time.Duration(2*maxPorts) * (p.Spec.Deadline + p.Spec.Wait) // twice, see measure
		peers := p.Pairing.Choose(f.members, f.own(), 0)
		switch {
		case len(peers) == 0 && p.Pairing.Strategy != pairing.Tournament: // who joins changes nothing in a tournament's job
		case p.Pairing.Strategy == pairing.Tournament:
			t := p.Timetable()
			add("", time.Duration(t.Rounds+1)*t.Slot+p.Spec.Deadline, nil, func(ctx context.Context, due time.Time) { d.tournament(ctx, p, due) })
		case p.Spec.Heavy():
			add("", longest, nil, func(ctx context.Context, due time.Time) { d.round(ctx, p, due) })
		case p.Pairing.Strategy == pairing.Random:
			for place := range peers {
				add(jobSeparator+strconv.Itoa(place), visit, nil, func(ctx context.Context, due time.Time) {
					if now := d.plan(p, due); place < len(now) {
						d.visit(ctx, p, due, now[place])
					}
				})
			}
		default:
			for _, peer := range peers {
				to := f.peers[peer.Name]
				add(jobSeparator+peer.Name, visit, to, func(ctx context.Context, due time.Time) {
					d.plan(p, due)
					d.visit(ctx, p, due, peer.Name)
				})
			}
		}
	}
	return out
}

// probeOf is the probe that a job runs.
func probeOf(job string) string {
	name, _, _ := strings.Cut(job, jobSeparator)
	return name
}

// skipped counts runs that did not happen.
func (d *Daemon) skipped(job string, why schedule.Skip, due time.Time, n int) {
	name := probeOf(job)
	if why == schedule.Missed {
		d.exporter.Missed(name, n)
		return
	}
	d.exporter.Skipped(name, probe.Overlap, n)
	d.log.Debug("run skipped: the one before it has not ended", slog.String("job", job), slog.Int("runs", n))
	for _, p := range d.config().Probes { // what should have been measured in this period all the same
		if p.Spec.Name == name && p.Pairing.Strategy != pairing.Tournament {
			d.plan(p, due)
		}
	}
}

// plan returns the names of the peers that a probe visits at the firing due, and tells the exporter whom to expect results of.
func (d *Daemon) plan(p config.Probe, due time.Time) []string {
	d.plans.Lock()
	defer d.plans.Unlock()
	f := d.fleet()
	if last := d.plans.last[p.Spec.Name]; last != nil && last.due.Equal(due) && last.fleet == f {
		return last.peers
	}
	var peers []string
	for _, m := range p.Pairing.Choose(f.members, f.own(), p.Schedule.Ordinal(due)) {
		peers = append(peers, m.Name)
	}
	if d.plans.last == nil {
		d.plans.last = map[string]*plan{}
	}
	d.plans.last[p.Spec.Name] = &plan{due: due, fleet: f, peers: peers}
	d.exporter.Plan(p.Spec.Name, due, peers, len(d.known.list()))
	return peers
}

// plan is whom a probe visits at one firing.
type plan struct {
	due   time.Time
	fleet *fleet // as it was
	peers []string
}

// round visits the peers of one firing, one after the other. The next round must not wait for a period to end: what is planned
// is told at once, and that it is over at the end.
func (d *Daemon) round(ctx context.Context, p config.Probe, due time.Time) {
	for _, name := range d.plan(p, due) {
		if ctx.Err() != nil {
			return
		}
		d.visit(ctx, p, due, name)
	}
	d.exporter.Planned(p.Spec.Name, due)
}

// visit probes a peer from every port of this node, one after the other. A peer that is gone by now is left out.
func (d *Daemon) visit(ctx context.Context, p config.Probe, due time.Time, name string) {
	f := d.fleet()
	peer, ok := f.peers[name]
	if !ok {
		return
	}
	to := f.target(peer)
	if p.Pairing.Rails == config.AllRails {
		to.Shift = int(p.Schedule.Ordinal(due) & (1<<16 - 1))
	}
	for _, port := range d.ports() {
		if ctx.Err() != nil {
			return
		}
		d.measure(ctx, p.Spec, to, port, time.Time{})
	}
}

// ports are those to probe from; if there are none, one without a name, whose results say why.
func (d *Daemon) ports() []portName {
	if ports := d.known.list(); len(ports) > 0 {
		return ports
	}
	return []portName{{}}
}
