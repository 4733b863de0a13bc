package peers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
)

// A peer that does not answer costs whoever asks it some seconds. So that many of them hold up neither a probe of the others nor
// fill memory with those that wait, few ask them at a time; what one finds the others are told.
const (
	inlineAsks     = 8                // probes that ask a peer which is not known to answer
	backgroundAsks = 4                // and askers besides, which find out that it is back
	freshFor       = time.Second      // a probe does not ask again after a failure for so long
	patience       = 5 * time.Second  // likewise, in the background, at first
	maxPatience    = time.Minute      // and of a peer that has failed for long
	drainLook      = 15 * time.Second // how often a drained peer is asked whether it still is
	interest       = time.Hour        // for which a peer that no probe asks any more is still asked after
)

// contact is what the node at an address told, or why it did not.
type contact struct {
	name          string // its own
	self, drained bool
	good          bool // it answered when last asked
	err           error
	asked         time.Time     // when
	wanted        time.Time     // by a probe
	pause         time.Duration // until it is asked again
	next          time.Time     // when; zero: not by itself
}

// Greet asks who is at an address, on behalf of a probe. Of a peer that has just failed to answer, it may return that failure
// without asking again; if too many such peers are being asked already, it does so without having asked at all. Its error is a
// *[control.Error].
func (d *Discovery) Greet(ctx context.Context, address string) (*control.Hello, error) {
	now := time.Now()
	d.mu.Lock()
	c := d.contacts[address]
	if c == nil { // no peer of the view: a list that has just changed
		d.mu.Unlock()
		return d.o.Ask(ctx, address)
	}
	c.wanted = now
	good, err, asked := c.good, c.err, c.asked
	d.mu.Unlock()
	if !good {
		if err != nil && now.Sub(asked) < freshFor {
			return nil, remembered(err, now.Sub(asked))
		}
		select {
		case d.asks <- struct{}{}:
			defer func() { <-d.asks }()
		default:
			if err != nil {
				return nil, remembered(err, now.Sub(asked))
			}
			d.schedule(address, now)
			return nil, &control.Error{Reason: "overlap", Scope: "local", Detail: fmt.Sprintf("%s has not been asked yet: %d peers that don't answer are being waited for", address, inlineAsks)}
		}
	}
	h, err := d.o.Ask(ctx, address)
	d.note(ctx, address, h, err)
	return h, err
}

// remembered is a failure of a while ago.
func remembered(err error, age time.Duration) error {
	e, ok := errors.AsType[*control.Error](err)
	if !ok {
		return err
	}
	c := *e
	c.Detail = fmt.Sprintf("%s (when last asked, %s ago)", e.Detail, age.Round(time.Second))
	return &c
}

// schedule has an address asked in the background at a time.
func (d *Discovery) schedule(address string, at time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c := d.contacts[address]; c != nil && (c.next.IsZero() || at.Before(c.next)) {
		c.next = at
		signal(d.reask)
	}
}

// note keeps what asking an address gave.
func (d *Discovery) note(ctx context.Context, address string, h *control.Hello, err error) {
	if err != nil && ctx.Err() != nil {
		return // it was us who hung up
	}
	now := time.Now()
	var replaced func()
	d.mu.Lock()
	defer func() {
		d.mu.Unlock()
		if replaced != nil {
			replaced()
		}
	}()
	c := d.contacts[address]
	if c == nil {
		return
	}
	was := *c
	c.asked, c.err, c.good = now, err, err == nil
	c.next = time.Time{}
	if err != nil {
		c.pause = min(max(patience, 2*c.pause), maxPatience)
		c.next = now.Add(c.pause)
		signal(d.reask)
		if c.name == "" && was.err == nil {
			signal(d.changed)
		}
		return
	}
	c.pause, c.self, c.drained = 0, h.Instance == d.o.Instance && h.Instance != "", h.LameDuck
	if ValidName(h.Node) {
		c.name = h.Node
	}
	if c.drained {
		c.next = now.Add(drainLook)
		signal(d.reask)
	}
	if c.self != was.self || c.drained != was.drained || c.name != was.name {
		signal(d.changed)
	}
	if c.self {
		return
	}
	if c.name == d.o.Name && c.name != was.name {
		d.o.Log.Warn("another node has this node's name: give each its own (node.name)", slog.String("name", c.name), slog.String("address", address))
	}
	i := slices.IndexFunc(d.view.Members, func(m Member) bool { return m.Address == address && m.State != Duplicate && m.State != Self })
	if i < 0 {
		return
	}
	name := d.view.Members[i].Name
	if name == "" {
		name = c.name
	}
	if c.name != "" && c.name != name && c.name != was.name {
		d.o.Log.Warn("a peer has another name than the one it is configured by: its metrics and ours don't match",
			slog.String("peer", name), slog.String("address", address), slog.String("own", c.name))
	}
	if is := h.Identity; !is.IsZero() && name != "" {
		old, known := d.identities[name]
		if known && !old.Same(is) {
			d.o.Log.Warn("another machine answers to a peer's name: what was measured before says nothing of it",
				slog.String("peer", name), slog.String("address", address))
			replaced = func() { d.o.OnReplaced(name, old, is) }
		}
		d.identities[name] = is
	}
}

// keepContacts drops the contacts of addresses that are in the view no more, and makes those of new ones. The caller holds mu.
func (d *Discovery) keepContacts() {
	now := time.Now()
	listed := make(map[string]bool, len(d.view.Members))
	for _, m := range d.view.Members {
		listed[m.Address] = true
		if d.contacts[m.Address] == nil {
			c := &contact{}
			d.contacts[m.Address] = c
			if m.State == Unnamed {
				c.next, c.wanted = now, now
				signal(d.reask)
			}
		}
	}
	maps.DeleteFunc(d.contacts, func(a string, _ *contact) bool { return !listed[a] })
	// A name that left may come back with another machine behind it. Not without end, though.
	if len(d.identities) > 2*MaxPeers {
		names := map[string]bool{}
		for _, m := range d.view.Members {
			names[m.Name] = true
		}
		maps.DeleteFunc(d.identities, func(n string, _ control.Identity) bool { return !names[n] })
	}
}

// askAgain asks, in the background, who has not answered, who has not told its name, and who is drained.
func (d *Discovery) askAgain(ctx context.Context) error {
	if d.o.Ask == nil {
		return nil
	}
	var g errgroup.Group
	g.SetLimit(backgroundAsks)
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return g.Wait()
		case <-d.reask:
			pause(ctx, gather)
		case <-t.C:
		}
		due, wait := d.due()
		for _, address := range due {
			if ctx.Err() != nil {
				break
			}
			g.Go(func() error { // waits for a place
				if ctx.Err() == nil {
					h, err := d.o.Ask(ctx, address)
					d.note(ctx, address, h, err)
				}
				return nil
			})
		}
		t.Reset(wait)
	}
}

// due takes some addresses to be asked now and tells how long there are no more. Those that have failed for long are many, once
// a part of the fleet is down: they come last, and then who has waited longest.
func (d *Discovery) due() (due []string, wait time.Duration) {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	wait = maxPatience
	waiting := map[string]*contact{}
	for address, c := range d.contacts {
		switch {
		case c.next.IsZero():
		case c.next.After(now):
			wait = min(wait, c.next.Sub(now))
		case !c.drained && c.name != "" && now.Sub(c.wanted) > interest:
			c.next = time.Time{}
		default:
			due, waiting[address] = append(due, address), c
		}
	}
	slices.SortFunc(due, func(a, b string) int {
		x, y := waiting[a], waiting[b]
		return cmp.Or(cmp.Compare(x.pause, y.pause), x.next.Compare(y.next), cmp.Compare(a, b))
	})
	if len(due) > 2*backgroundAsks {
		due, wait = due[:2*backgroundAsks], 0
	}
	for _, address := range due {
		waiting[address].next = time.Time{} // what is found sets the next time
	}
	return due, wait
}
