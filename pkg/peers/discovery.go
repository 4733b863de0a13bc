package peers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
)

const (
	settleTime = 10 * time.Second       // how long peers are kept while a new source has not answered
	gather     = 100 * time.Millisecond // changes that come close together are made one
	shownNames = 10                     // of peers, in one line of the log
)

// Options set up a [Discovery]. Name is needed, everything else is optional. No hook is called before [Discovery.Run].
type Options struct {
	Name     string // of this node
	Instance string // of this process, as in [control.Hello]
	Dir      string // that relative patterns of files begin at
	// Own returns a test for addresses (host:port) at which this node itself is reached. It is called for each new view.
	Own func() func(address string) bool
	// Ask asks who is at an address. Its error is a *[control.Error].
	Ask func(ctx context.Context, address string) (*control.Hello, error)
	// OnChange gets each new view, one at a time.
	OnChange func(View)
	// OnReplaced is told that another machine answers to a peer's name now. What was measured of the old one says nothing of it.
	OnReplaced func(peer string, was, is control.Identity)

	Resolver *net.Resolver // default: Go's, on /etc/resolv.conf
	HTTP     *http.Client  // default: one of its own
	Log      *slog.Logger
}

// Status is what monitoring wants to know of the sources of one kind.
type Status struct {
	Failures float64   // looks that failed, since the start
	Failing  int       // sources whose last look failed
	Good     time.Time // when the one that has been failing longest was last good; zero: never, or there is none
}

// Discovery follows the sources of peers. Make it by New, give it sources by Set, then Run it, once.
type Discovery struct {
	o       Options
	changed chan struct{} // something that a view is made of
	asks    chan struct{} // places for probes that ask peers which may not answer
	reask   chan struct{} // wakes the one that asks in the background
	rewatch chan struct{} // the set of sources changed

	mu         sync.Mutex // guards what follows; nothing slow is done under it
	sources    []*source
	view       View
	failures   map[string]float64 // by kind
	contacts   map[string]*contact
	identities map[string]control.Identity // by name
	told       map[string]bool             // what the log has
}

// New returns a Discovery without sources.
func New(o Options) *Discovery {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Own == nil {
		o.Own = func() func(string) bool { return func(string) bool { return false } }
	}
	if o.OnChange == nil {
		o.OnChange = func(View) {}
	}
	if o.OnReplaced == nil {
		o.OnReplaced = func(string, control.Identity, control.Identity) {}
	}
	if o.Resolver == nil {
		o.Resolver = &net.Resolver{PreferGo: true} // the C library's can't be cancelled
	}
	if o.HTTP == nil {
		tr := http.DefaultTransport.(*http.Transport).Clone()
		tr.MaxIdleConnsPerHost, tr.MaxResponseHeaderBytes = 1, 64<<10
		o.HTTP = &http.Client{Transport: tr}
	}
	return &Discovery{
		o: o, changed: make(chan struct{}, 1), asks: make(chan struct{}, inlineAsks), reask: make(chan struct{}, 1), rewatch: make(chan struct{}, 1),
		failures: map[string]float64{}, contacts: map[string]*contact{}, identities: map[string]control.Identity{}, told: map[string]bool{},
	}
}

// signal wakes who waits at a channel of one place.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Set replaces the sources and returns the view as it is at once: unchanged sources keep what they know, fixed ones have their
// answer, others get up to 10 s for their first one; so long, nobody who was there before is missed for want of it.
func (d *Discovery) Set(c Config) View {
	fresh := d.o.sources(c)
	d.mu.Lock()
	defer d.mu.Unlock()
	old := map[string]*source{}
	for _, s := range d.sources {
		old[s.key()] = s
	}
	for i, s := range fresh {
		if was := old[s.key()]; was != nil && s.every > 0 {
			fresh[i] = was
		}
	}
	d.sources = fresh
	d.refresh()
	signal(d.changed)
	signal(d.rewatch)
	return d.view
}

// View returns what the sources tell now.
func (d *Discovery) View() View {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.view
}

// Status returns the state of the sources by their kind. Every kind is there.
func (d *Discovery) Status() map[string]Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := map[string]Status{}
	for _, k := range Kinds {
		st := Status{Failures: d.failures[k]}
		first := true
		for _, s := range d.sources {
			if s.kind != k {
				continue
			}
			if s.err != nil {
				st.Failing++
			}
			if first || s.good.Before(st.Good) {
				st.Good = s.good
			}
			first = false
		}
		out[k] = st
	}
	return out
}

// refresh makes the view anew. The caller holds mu. It reports whether it changed.
func (d *Discovery) refresh() bool {
	var lists []listing
	total, settling := 0, false
	for _, s := range d.sources {
		lists = append(lists, listing{s.kind, s.found.peers})
		total += len(s.found.peers)
		settling = settling || !s.answered && time.Since(s.since) < settleTime
	}
	k := knowledge{own: d.o.Name, isOwn: d.o.Own(), contact: func(a string) *contact { return d.contacts[a] }, previous: d.view}
	if settling {
		lists = append(lists, d.held(lists))
	}
	next := merge(lists, k)
	var reports []string
	for _, s := range d.sources {
		for _, p := range s.found.problems {
			reports = append(reports, strings.TrimSpace(s.kind+" "+s.name)+": "+p)
		}
	}
	if total > MaxPeers {
		reports = append(reports, fmt.Sprintf("the sources tell of %d peers: those beyond %d are left out", total, MaxPeers))
	}
	for _, m := range next.Members {
		if m.State == Duplicate {
			reports = append(reports, m.Detail)
		}
	}
	d.report(reports)
	changed := !next.equal(d.view)
	if changed {
		d.logChange(d.view, next)
	}
	d.view = next
	d.keepContacts()
	return changed
}

// held are those of the last view that no source tells of now, but one that has not answered yet may.
func (d *Discovery) held(lists []listing) listing {
	names, addresses := map[string]bool{}, map[string]bool{}
	for _, l := range lists {
		for _, p := range l.peers {
			names[p.Name], addresses[p.Address] = true, true
		}
	}
	out := listing{source: "held"}
	for _, m := range d.view.Members {
		if !addresses[m.Address] && (m.Name == "" || !names[m.Name]) {
			out.peers = append(out.peers, m.Peer)
		}
	}
	return out
}

// report logs what is wrong with the lists, once as long as it is. The caller holds mu.
func (d *Discovery) report(reports []string) {
	now := map[string]bool{}
	logged := 0
	for _, r := range reports {
		if now[r] {
			continue
		}
		now[r] = true
		if d.told[r] {
			continue
		}
		if logged++; logged <= maxProblems {
			d.o.Log.Warn("peers contradict or can't be used", slog.String("detail", r))
		}
	}
	if logged > maxProblems {
		d.o.Log.Warn("peers contradict or can't be used", slog.Int("more", logged-maxProblems))
	}
	d.told = now
}

func (d *Discovery) logChange(was, is View) {
	before := map[string]Peer{}
	for _, p := range was.Active() {
		before[p.Name] = p
	}
	var added, moved []string
	active := is.Active()
	for _, p := range active {
		old, known := before[p.Name]
		switch {
		case !known:
			added = append(added, p.Name)
		case old.Address != p.Address:
			moved = append(moved, fmt.Sprintf("%s from %s to %s", p.Name, old.Address, p.Address))
		}
		delete(before, p.Name)
	}
	removed := slices.Sorted(maps.Keys(before))
	at := []any{slog.Int("peers", len(active))}
	for _, l := range []struct {
		key   string
		names []string
	}{{"added", added}, {"removed", removed}, {"moved", moved}} {
		if len(l.names) > 0 {
			text := strings.Join(l.names[:min(len(l.names), shownNames)], ", ")
			if more := len(l.names) - shownNames; more > 0 {
				text += fmt.Sprintf(" and %d more", more)
			}
			at = append(at, slog.String(l.key, text))
		}
	}
	for _, s := range []State{Self, Drained, Duplicate, Unnamed} {
		if n := is.Count(s); n > 0 {
			at = append(at, slog.Int(string(s), n))
		}
	}
	d.o.Log.Info("peers changed", at...)
}

// Run follows the sources until ctx ends.
func (d *Discovery) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.watch(ctx) })
	g.Go(func() error { return d.askAgain(ctx) })
	followed := map[*source]context.CancelFunc{}
	defer d.o.HTTP.CloseIdleConnections()
	var shown *View
	settled := time.NewTimer(settleTime)
	defer settled.Stop()
	for {
		d.mu.Lock()
		for _, s := range d.sources {
			if followed[s] == nil && s.every > 0 {
				each, cancel := context.WithCancel(ctx)
				followed[s] = cancel
				g.Go(func() error { return d.follow(each, s) })
			}
		}
		for s, cancel := range followed {
			if !slices.Contains(d.sources, s) {
				cancel()
				delete(followed, s)
			}
		}
		d.refresh()
		view := d.view
		d.mu.Unlock()
		if shown == nil || !shown.equal(view) {
			shown = &view
			d.o.OnChange(view)
		}
		select {
		case <-ctx.Done():
			for _, cancel := range followed {
				cancel()
			}
			return g.Wait()
		case <-d.changed:
			pause(ctx, gather)
			settled.Reset(settleTime)
		case <-settled.C:
		}
	}
}

// pause waits, but not beyond the end of ctx.
func pause(ctx context.Context, t time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(t):
	}
}

// follow looks at one source again and again.
func (d *Discovery) follow(ctx context.Context, s *source) error {
	for {
		d.look(ctx, s)
		// Nodes that were started together must not ask together for ever.
		wait := s.every - time.Duration(rand.Int64N(int64(s.every)/10+1))
		if s.soon != nil && s.soon() {
			wait = min(wait, vanishAfter)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		case <-s.wake:
		}
	}
}

// look asks a source once and takes its answer, or keeps what it had.
func (d *Discovery) look(ctx context.Context, s *source) {
	bounded, cancel := context.WithTimeout(ctx, lookTimeout)
	f, err := s.look(bounded)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("no answer within %s", lookTimeout)
	}
	cancel()
	if ctx.Err() != nil {
		return
	}
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	was := s.err
	s.answered, s.err = true, err
	at := []any{slog.String("source", s.kind), slog.String("name", s.name)}
	switch {
	case err == nil:
		s.good = now.Round(0)
		if len(f.peers) == 0 && len(s.found.peers) > 0 {
			d.o.Log.Warn("a source of peers is empty now: its peers are gone", at...)
		}
		if was != nil {
			d.o.Log.Info("a source of peers can be read again", append(at, slog.Int("peers", len(f.peers)))...)
		}
	default:
		d.failures[s.kind]++
		if was == nil {
			d.o.Log.Warn("a source of peers can't be read: what it told last stays", append(at, slog.Any("err", err))...)
		} else {
			d.o.Log.Debug("a source of peers still can't be read", append(at, slog.Any("err", err))...)
		}
	}
	if err == nil || len(f.peers) > 0 {
		s.found = f
	}
	signal(d.changed)
}

// Report is what one source told.
type Report struct {
	Kind, Name string
	Peers      int
	Problems   []string
	Err        error
}

// Once asks every source of a configuration once, and nodes for their names if it has a way to, and returns what they told together and one by one.
func Once(ctx context.Context, c Config, o Options) (View, []Report) {
	d := New(o)
	defer d.o.HTTP.CloseIdleConnections()
	d.Set(c)
	var g errgroup.Group
	g.SetLimit(8)
	for _, s := range d.sources {
		if s.look != nil {
			g.Go(func() error {
				d.look(ctx, s)
				return nil
			})
		}
	}
	_ = g.Wait() // none returns an error
	d.mu.Lock()
	d.refresh()
	members := d.view.Members
	d.mu.Unlock()
	for _, m := range members {
		if m.State == Unnamed && d.o.Ask != nil {
			g.Go(func() error {
				h, err := d.o.Ask(ctx, m.Address)
				d.note(ctx, m.Address, h, err)
				return nil
			})
		}
	}
	_ = g.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refresh()
	var out []Report
	for _, s := range d.sources {
		out = append(out, Report{s.kind, s.name, len(s.found.peers), s.found.problems, s.err})
	}
	return d.view, out
}

// IsMissing reports whether an error of files is that there are none, which a check may forgive: they may be written later.
func IsMissing(err error) bool { return errors.Is(err, errNoFile) }
