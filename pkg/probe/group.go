package probe

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

// Several peers at the same time: this node sends to all of them (outcast), or all of them to this node (incast, Spec.Reverse).

// maxGroup is how many peers are probed at a time.
const maxGroup = 256

// Group sums up the sessions of a group.
type Group struct {
	Pattern        string   `json:"pattern"` // incast or outcast
	Peers          int      `json:"peers"`
	Measured       int      `json:"measured"`         // those with figures, which are in the sums
	BytesPerSecond *float64 `json:"bytes_per_second"` // nil: there are none
	MessageRate    *float64 `json:"messages_per_second"`
	Common         *float64 `json:"common_seconds"` // of their windows, that all of them share
}

// member is one session of a group.
type member struct {
	to    Target
	r     *Result
	s     *initiation
	f     *failure
	retry time.Duration // not 0: the peer was busy
}

// ProbeGroup probes several peers at the same time from one port, which it takes once, and returns a result for each. Their timed
// parts begin together. A peer that fails does not keep the others from measuring; one that is busy does until spec.Wait is over.
func (i *Initiator) ProbeGroup(ctx context.Context, spec Spec, to []Target, device string, port int) []*Result {
	spec = spec.WithDefaults()
	members := make([]*member, len(to))
	wrong := spec.ValidateGroup(to)
	for n, t := range to {
		members[n] = &member{to: t, r: i.begin(spec, t, device, port)}
		if wrong != nil {
			members[n].f = fail(StageSetup, OpUnsupported, ScopeLocal, "%s", wrong)
		}
	}
	for patience := time.Now().Add(spec.Wait); wrong == nil; {
		retry := i.together(ctx, spec, members, patience)
		if retry == 0 {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(retry/2 + rand.N(retry)):
		}
	}
	var all flows
	for _, m := range members {
		all.tx, all.rx = all.tx+m.r.own.local.tx, all.rx+m.r.own.local.rx
	}
	out := make([]*Result, len(members))
	for n, m := range members {
		m.r.own.others = flows{tx: all.tx - m.r.own.local.tx, rx: all.rx - m.r.own.local.rx}
		i.conclude(ctx, m.r, m.f)
		out[n] = m.r
	}
	return out
}

// ValidateGroup refuses what can't be done with several peers at a time.
func (s Spec) ValidateGroup(to []Target) error {
	switch {
	case s.Kind != Bandwidth && s.Kind != MessageRate:
		return errors.New("several peers at a time: use kind bandwidth or message-rate")
	case s.Duration == 0:
		return errors.New("several peers at a time need a duration, over which all of them send")
	case len(s.Sizes) != 1 || s.Repeat != 1 || s.FlowLabels > 0:
		return errors.New("several peers at a time: one size, once, without a walk over flow labels")
	case len(to) > maxGroup:
		return fmt.Errorf("%d peers at a time: at most %d", len(to), maxGroup)
	}
	seen := map[string]bool{}
	for _, t := range to {
		if seen[t.Address] {
			return fmt.Errorf("peer %s is there twice", t.Name)
		}
		seen[t.Address] = true
	}
	return s.Validate()
}

// each calls f for each member at the same time, and waits.
func each(members []*member, f func(*member)) {
	var wg sync.WaitGroup
	for _, m := range members {
		wg.Go(func() { f(m) })
	}
	wg.Wait()
}

// without returns the members that have not failed.
func without(members []*member) (ok []*member) {
	for _, m := range members {
		if m.f == nil {
			ok = append(ok, m)
		}
	}
	return ok
}

// together is one attempt at all sessions. retry is not 0 if a peer was busy and all are to be tried again after about so long.
func (i *Initiator) together(ctx context.Context, spec Spec, members []*member, patience time.Time) (retry time.Duration) {
	for _, m := range members {
		if m.retry > 0 {
			m.f, m.retry = nil, 0
		}
	}
	var port *LocalPort
	var mu sync.Mutex
	each(without(members), func(m *member) {
		p, f := i.ready(ctx, spec, m.to, m.r)
		m.f = f
		mu.Lock()
		defer mu.Unlock()
		if f == nil {
			port = p
		}
	})
	live := without(members)
	if len(live) == 0 {
		return 0
	}
	asked := time.Now()
	release, err := i.Node.acquire(ctx, port, true, patience)
	for _, m := range live {
		m.r.Waited += time.Since(asked).Seconds()
		if err != nil {
			m.f = skip(StageAdmit, BusyPort, ScopeLocal, "%s port %d was in use for %s", m.r.Device, m.r.Port, spec.Wait)
		}
	}
	if err != nil {
		return 0
	}
	defer release()
	ctx, cancel := context.WithTimeoutCause(ctx, spec.Deadline, errDeadline)
	defer cancel()
	ctx, done := port.whileThere(ctx)
	defer done()
	each(live, func(m *member) {
		m.s = &initiation{i: i, spec: spec, to: m.to, port: port, r: m.r}
		m.f, m.retry = m.s.open(ctx)
	})
	defer each(live, func(m *member) { m.s.teardown(ctx) })
	for _, m := range live {
		retry = max(retry, m.retry)
	}
	if retry > 0 && ctx.Err() == nil && time.Now().Add(2*retry).Before(patience) {
		for _, m := range live {
			if m.f == nil {
				m.retry = retry // again with the others
			}
		}
		return retry
	}
	for _, m := range live {
		m.retry = 0
	}
	opened := without(live)
	start := newBarrier(len(opened))
	each(opened, func(m *member) {
		m.s.start = &turn{b: start}
		m.f = m.s.runs(ctx)
		m.s.start.arrive() // if it did not get there
		if m.f != nil && errors.Is(context.Cause(ctx), errRemoved) {
			m.f = fail(m.f.stage, DeviceRemoved, ScopeLocal, "%s was removed or failed during the session (%s: %s)", m.r.Device, m.f.reason, m.f.detail)
		}
	})
	return 0
}

// GroupOf sums up what a group's sessions measured.
func GroupOf(pattern string, results []*Result) Group {
	g := Group{Pattern: pattern, Peers: len(results)}
	var bytes, messages float64
	var from, to time.Duration
	for _, r := range results {
		if !r.Usable() || len(r.Runs) != 1 || r.Runs[0].Bandwidth == nil || r.Runs[0].MessageRate == nil {
			continue
		}
		run := r.Runs[0]
		if g.Measured == 0 {
			from, to = run.from, run.to
		}
		from, to = max(from, run.from), min(to, run.to)
		g.Measured++
		bytes += run.Bandwidth.BytesPerSecond
		messages += *run.MessageRate
	}
	if g.Measured > 0 {
		common := max(0, to-from).Seconds()
		g.BytesPerSecond, g.MessageRate, g.Common = &bytes, &messages, &common
	}
	return g
}
