package daemon

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// confirmPause is about how long after a failure it is tried again: longer than a switch takes to learn an address anew,
// and soon enough to look into what is still going on.
const confirmPause = 2 * time.Second

// measure runs a probe against a peer from one port and tells everybody what came of it. A failure is news: it counts once
// a second run soon after has failed, too. That one does not begin after latest, if there is such a time.
func (d *Daemon) measure(ctx context.Context, spec probe.Spec, to probe.Target, port portName, latest time.Time) {
	r := d.attempt(ctx, spec, to, port)
	if r == nil {
		return
	}
	if pause := confirmPause/2 + rand.N(confirmPause); confirmable(r) && d.journal.news(r) && (latest.IsZero() || time.Now().Add(pause).Before(latest)) {
		select {
		case <-ctx.Done():
		case <-time.After(pause):
			if !latest.IsZero() {
				spec.Wait = time.Until(latest)
			}
			if again := d.attempt(ctx, spec, to, port); again != nil && again.Outcome != probe.Skipped {
				again.Repeats = r.Failure()
				r = again
			}
		}
	}
	d.exporter.Observe(r)
	d.journal.note(r)
	d.sweeps.Note(r)
}

// confirmable reports whether a result is a failure that may have been chance. What a node sees of itself is none.
func confirmable(r *probe.Result) bool {
	f := r.Failure()
	return f != nil && f.Scope != probe.ScopeLocal
}

// attempt is one run; nil if ctx ended before it could begin.
func (d *Daemon) attempt(ctx context.Context, spec probe.Spec, to probe.Target, port portName) *probe.Result {
	if !spec.Heavy() {
		if d.light.Acquire(ctx, 1) != nil {
			return nil
		}
		defer d.light.Release(1)
	}
	return d.probe(ctx, spec, to, port.device, port.port)
}
