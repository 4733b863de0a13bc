package daemon

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule/pairing"
)

// tournament meets one peer after the other in the slots of the firing due. The time-table is worked out anew for each slot, so
// that nodes come to agree again soon after one has joined or left.
func (d *Daemon) tournament(ctx context.Context, p config.Probe, due time.Time) {
	t := p.Timetable()
	firing := p.Schedule.Ordinal(due)
	f := d.fleet()
	slots := t.Slots(len(f.members))
	var planned []string
	for k := range slots {
		if _, peer, ok := f.meet(p, t, firing, k); ok {
			planned = append(planned, peer.Name)
		}
	}
	d.exporter.Plan(p.Spec.Name, due, planned, len(d.known.list()))
	passed := schedule.Slots(ctx, due, t.Slot, slots, func(ctx context.Context, k int) {
		f := d.fleet()
		if m, peer, ok := f.meet(p, t, firing, k); ok {
			d.exporter.Plan(p.Spec.Name, due, []string{peer.Name}, len(d.known.list()))
			to := f.target(peer)
			to.Shift = m.Shift
			d.turn(ctx, p.Spec, to, due.Add(time.Duration(k)*t.Slot), t, m)
		}
	})
	if passed > 0 {
		d.exporter.Skipped(p.Spec.Name, probe.Overlap, passed)
		d.log.Warn("slots of a tournament passed unused: it began late, the clock was set, or a slot is too short for its probes",
			slog.String("probe", p.Spec.Name), slog.Int("slots", passed), slog.Duration("slot", t.Slot))
	}
	d.exporter.Planned(p.Spec.Name, due)
}

// meet returns what this node does in a slot, and with whom; not ok if with nobody.
func (f *fleet) meet(p config.Probe, t pairing.Timetable, firing int64, slot int) (m pairing.Meeting, peer config.Peer, ok bool) {
	if m, ok = t.Meet(len(f.members), f.self, firing, slot); !ok || !p.Pairing.Fits(f.own(), f.members[m.Partner]) {
		return m, peer, false
	}
	peer, ok = f.peers[f.members[m.Partner].Name]
	return m, peer, ok
}

// turn probes a peer from all ports at once when this node's turn in the slot has come. A port that is busy, on either end,
// is tried again as long as a run still fits into the slot.
func (d *Daemon) turn(ctx context.Context, spec probe.Spec, to probe.Target, slot time.Time, t pairing.Timetable, m pairing.Meeting) {
	select {
	case <-ctx.Done():
		return
	case <-time.After(time.Until(slot.Add(m.Begin))):
	}
	latest := slot.Add(m.Latest)
	if spec.Wait = time.Until(latest); spec.Wait <= 0 {
		d.exporter.Skipped(spec.Name, probe.Overlap, 1)
		return
	}
	spec.Deadline = min(spec.Deadline, t.Slot)
	var all sync.WaitGroup
	for _, port := range d.ports() {
		all.Go(func() { d.measure(ctx, spec, to, port, latest) })
	}
	all.Wait()
}
