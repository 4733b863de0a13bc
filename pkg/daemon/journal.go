package daemon

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// journal logs results: a failure when it begins, changes its reason or ends, taints when they are other than before, everything
// else at debug level. A fleet whose switch is down must not fill the disk.
type journal struct {
	log    *slog.Logger
	mu     sync.Mutex
	last   map[journalKey]probe.Reason // of what fails now
	taints map[journalKey][]probe.Taint
}

type journalKey struct {
	probe, peer, device string
	port                int
}

// news reports whether a failure is one that was not there before.
func (j *journal) news(r *probe.Result) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	_, failing := j.last[journalKey{r.Probe, r.Peer, r.Device, r.Port}]
	return !failing
}

// keep forgets all peers but some.
func (j *journal) keep(peers map[string]config.Peer) {
	j.mu.Lock()
	defer j.mu.Unlock()
	gone := func(k journalKey) bool {
		_, there := peers[k.peer]
		return !there
	}
	maps.DeleteFunc(j.last, func(k journalKey, _ probe.Reason) bool { return gone(k) })
	maps.DeleteFunc(j.taints, func(k journalKey, _ []probe.Taint) bool { return gone(k) })
}

func (j *journal) note(r *probe.Result) {
	key := journalKey{r.Probe, r.Peer, r.Device, r.Port}
	at := []any{
		slog.String("probe", r.Probe), slog.String("peer", r.Peer), slog.String("device", r.Device), slog.Int("port", r.Port),
		slog.String("id", r.ID), slog.Float64("seconds", r.Duration),
	}
	if r.Reason != nil {
		at = append(at, slog.String("stage", string(*r.Stage)), slog.String("reason", string(*r.Reason)), slog.String("scope", string(*r.Scope)), slog.String("detail", *r.Detail))
	}
	if f := r.Repeats; f != nil && r.Usable() {
		j.log.Info("a failure was not confirmed by a second run", append(at, slog.String("was", string(f.Reason)), slog.String("what", f.Detail))...)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.last == nil {
		j.last, j.taints = map[journalKey]probe.Reason{}, map[journalKey][]probe.Taint{}
	}
	if r.Usable() {
		before := j.taints[key]
		if len(r.Taints) > 0 {
			j.taints[key] = r.Taints
			at = append(at, slog.Any("taints", r.Taints), slog.String("evidence", evidenceText(r.TaintLog)))
		} else {
			delete(j.taints, key)
		}
		if !slices.Equal(before, r.Taints) && len(r.Taints) > 0 {
			j.log.Info("figures are tainted", at...)
		}
	}
	was, failing := j.last[key]
	switch {
	case r.Outcome == probe.Failed && (!failing || was != *r.Reason):
		j.last[key] = *r.Reason
		j.log.Warn("probe failed", at...)
	case r.Usable() && failing:
		delete(j.last, key)
		j.log.Info("probe works again", append(at, slog.String("was", string(was)))...)
	default:
		j.log.Debug("probe "+string(r.Outcome), at...)
	}
}

// maxEvidence bounds a line of the log; the whole is in the result.
const maxEvidence = 8

func evidenceText(details []probe.TaintDetail) string {
	var parts []string
	for i, d := range details {
		if i == maxEvidence {
			parts = append(parts, fmt.Sprintf("and %d more", len(details)-i))
			break
		}
		parts = append(parts, string(d.Taint)+": "+d.String())
	}
	return strings.Join(parts, "; ")
}
