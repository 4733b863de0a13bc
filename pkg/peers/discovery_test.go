package peers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
)

// answers are what a source of a test gives, one look after the other; the last one again and again.
type answers struct {
	mu    sync.Mutex
	left  []answer
	looks int
}

type answer struct {
	peers []Peer
	err   error
	takes time.Duration // to come; negative: until it is cancelled
}

func (a *answers) look(ctx context.Context) (found, error) {
	a.mu.Lock()
	x := a.left[0]
	if len(a.left) > 1 {
		a.left = a.left[1:]
	}
	a.looks++
	a.mu.Unlock()
	if x.takes < 0 {
		<-ctx.Done()
		return found{}, ctx.Err()
	}
	pause(ctx, x.takes)
	return found{peers: x.peers}, x.err
}

// watcher collects what a Discovery says.
type watcher struct {
	mu    sync.Mutex
	views [][]string
	log   bytes.Buffer
}

func (w *watcher) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.Write(p)
}

func (w *watcher) count(text string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Count(w.log.String(), text)
}

// run begins a Discovery on sources of a test, in a bubble. It ends with the test.
func run(t *testing.T, o Options, sources ...*source) (*Discovery, *watcher) {
	t.Helper()
	w := &watcher{}
	o.Name, o.Log = "me", slog.New(slog.NewTextHandler(w, nil))
	o.OnChange = func(v View) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.views = append(w.views, lines(v))
	}
	d := New(o)
	d.sources = sources
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := d.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return d, w
}

func fake(kind, name string, every time.Duration, a *answers) *source {
	return &source{kind: kind, name: name, every: every, look: a.look, since: time.Now(), wake: make(chan struct{}, 1)}
}

func after(t time.Duration) {
	time.Sleep(t) // of a bubble
	synctest.Wait()
}

// An error is not an empty list: it leaves the peers alone, is counted, and logged once. An empty list is one.
func TestErrorKeepsPeers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		down := errors.New("no such host")
		a := &answers{left: []answer{
			{peers: []Peer{peer("a", "a:1")}}, {err: down}, {err: down}, {err: down}, {peers: []Peer{peer("a", "a:1"), peer("b", "b:1")}}, {}, {err: down},
		}}
		d, w := run(t, Options{}, fake("dns", "fleet", time.Minute, a))
		after(time.Second)
		want := []string{"a a:1 active"}
		if diff := cmp.Diff(want, lines(d.View())); diff != "" {
			t.Fatal(diff)
		}
		first := d.Status()["dns"].Good
		after(3 * time.Minute)
		if diff := cmp.Diff(want, lines(d.View())); diff != "" {
			t.Fatal("the failed lookups changed the peers:", diff)
		}
		if s := d.Status()["dns"]; s.Failures != 3 || s.Failing != 1 || !s.Good.Equal(first) {
			t.Errorf("status %+v", s)
		}
		if n := w.count("can't be read"); n != 1 {
			t.Errorf("the failure is logged %d times", n)
		}
		after(time.Minute)
		if n := len(d.View().Active()); n != 2 || d.Status()["dns"].Failing != 0 || w.count("can be read again") != 1 {
			t.Errorf("%d peers after the source came back", n)
		}
		after(time.Minute)
		if n := len(d.View().Members); n != 0 || w.count("is empty now") != 1 {
			t.Errorf("%d peers after the source told that there are none", n)
		}
	})
}

// A source that hangs holds up nobody, and its own look ends.
func TestSlowSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow, fast := &answers{left: []answer{{takes: -1}}}, &answers{left: []answer{{peers: []Peer{peer("a", "a:1")}}}}
		d, _ := run(t, Options{}, fake("dns", "slow", 30*time.Second, slow), fake("http", "fast", 30*time.Second, fast))
		after(time.Second)
		if n := len(d.View().Active()); n != 1 {
			t.Errorf("%d peers while a source hangs", n)
		}
		after(10 * time.Minute)
		if s := d.Status(); s["dns"].Failures < 14 || s["http"].Failures > 0 || fast.looks < 20 {
			t.Errorf("status %+v; %d looks at the fast one", s, fast.looks)
		}
	})
}

// Peers of before are not missed while a new source has not answered, and not kept when it has.
func TestSetHoldsPeers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, w := run(t, Options{})
		d.Set(Config{Static: []Peer{peer("a", "a:1"), peer("b", "b:1")}})
		after(time.Second)
		next := fake("http", "new", time.Minute, &answers{left: []answer{{peers: []Peer{peer("b", "b:1"), peer("c", "c:1")}, takes: 5 * time.Second}}})
		d.mu.Lock()
		d.sources = []*source{next} // as Set does
		d.refresh()
		d.mu.Unlock()
		signal(d.changed)
		after(4 * time.Second)
		if diff := cmp.Diff([]string{"a a:1 active", "b b:1 active"}, lines(d.View())); diff != "" {
			t.Error("while it has not answered:", diff)
		}
		after(4 * time.Second)
		if diff := cmp.Diff([]string{"b b:1 active", "c c:1 active"}, lines(d.View())); diff != "" {
			t.Error("after its answer:", diff)
		}
		hangs := fake("http", "hangs", time.Minute, &answers{left: []answer{{takes: -1}}})
		d.mu.Lock()
		d.sources, hangs.since = []*source{hangs}, time.Now()
		d.mu.Unlock()
		signal(d.changed)
		after(25 * time.Second)
		if n := len(d.View().Members); n != 0 {
			t.Errorf("%d peers are kept for a source that never answers", n)
		}
		if v := d.Set(Config{Static: []Peer{peer("d", "d:1")}}); len(v.Active()) != 1 {
			t.Errorf("a static list is not in force at once: %v", lines(v))
		}
		after(time.Second)
		w.mu.Lock()
		defer w.mu.Unlock()
		if last := w.views[len(w.views)-1]; !cmp.Equal(last, []string{"d d:1 active"}) {
			t.Errorf("last told were %v", last)
		}
	})
}

// fleet answers Hello for some addresses.
type fleet struct {
	mu    sync.Mutex
	nodes map[string]*control.Hello // nil: silent for 3 s, then unreachable
	asked map[string]int
	most  int
	now   int
}

func (f *fleet) ask(ctx context.Context, address string) (*control.Hello, error) {
	f.mu.Lock()
	if f.asked == nil {
		f.asked = map[string]int{}
	}
	f.asked[address]++
	f.now++
	f.most = max(f.most, f.now)
	h := f.nodes[address]
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		f.now--
		f.mu.Unlock()
	}()
	if h != nil {
		c := *h
		return &c, nil
	}
	pause(ctx, 3*time.Second)
	return nil, &control.Error{Reason: control.ReasonUnreachable, Detail: "no answer"}
}

func (f *fleet) set(address string, h *control.Hello) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.nodes[address] = h
}

// An address from DNS is a peer once its node has told its name; when that moves, it stays the same peer.
func TestNamesOfAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fleet{nodes: map[string]*control.Hello{"10.0.0.2:1": {Node: "a"}, "10.0.0.3:1": {Node: "me", Instance: "mine"}, "10.0.0.5:1": {Node: "a"}}}
		dns := &answers{left: []answer{
			{peers: []Peer{peer("", "10.0.0.2:1"), peer("", "10.0.0.3:1"), peer("", "10.0.0.4:1")}},
			{peers: []Peer{peer("", "10.0.0.5:1"), peer("", "10.0.0.3:1"), peer("", "10.0.0.4:1")}},
		}}
		d, w := run(t, Options{Ask: f.ask, Instance: "mine"}, fake("dns", "fleet", 10*time.Minute, dns))
		after(5 * time.Second)
		if diff := cmp.Diff([]string{"10.0.0.4:1 unnamed", "a 10.0.0.2:1 active", "me 10.0.0.3:1 self"}, lines(d.View())); diff != "" {
			t.Error(diff)
		}
		f.set("10.0.0.4:1", &control.Hello{Node: "c"})
		after(70 * time.Second)
		if diff := cmp.Diff([]string{"a 10.0.0.2:1 active", "c 10.0.0.4:1 active", "me 10.0.0.3:1 self"}, lines(d.View())); diff != "" {
			t.Error(diff)
		}
		after(10 * time.Minute)
		if diff := cmp.Diff([]string{"a 10.0.0.5:1 active", "c 10.0.0.4:1 active", "me 10.0.0.3:1 self"}, lines(d.View())); diff != "" {
			t.Error(diff)
		}
		if w.count("another") > 0 {
			t.Error("a move was taken for something else")
		}
	})
}

// A peer that says that it is drained is left alone until it says otherwise, without a probe that asks.
func TestDrained(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fleet{nodes: map[string]*control.Hello{"a:1": {Node: "a", LameDuck: true}}}
		d, _ := run(t, Options{Ask: f.ask})
		d.Set(Config{Static: []Peer{peer("a", "a:1"), peer("b", "b:1")}})
		if h, err := d.Greet(t.Context(), "a:1"); err != nil || !h.LameDuck {
			t.Fatalf("%+v, %v", h, err)
		}
		after(time.Second)
		if diff := cmp.Diff([]string{"a a:1 drained", "b b:1 active"}, lines(d.View())); diff != "" {
			t.Error(diff)
		}
		f.set("a:1", &control.Hello{Node: "a"})
		after(20 * time.Second)
		if n := len(d.View().Active()); n != 2 {
			t.Errorf("%d peers", n)
		}
	})
}

func TestReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		id := func(machine string, guids ...string) control.Identity {
			return control.Identity{Machine: machine, GUIDs: guids}
		}
		f := &fleet{nodes: map[string]*control.Hello{}}
		var replaced []string
		d, w := run(t, Options{Ask: f.ask, OnReplaced: func(name string, was, is control.Identity) {
			replaced = append(replaced, fmt.Sprint(name, " ", was.Machine, " ", is.Machine))
		}})
		d.Set(Config{Static: []Peer{peer("a", "a:1")}})
		for _, c := range []struct {
			what string
			is   control.Identity
			want int // replacements so far
		}{
			{"the first answer", id("m1", "g1", "g2"), 0},
			{"a device is gone", id("m1", "g2"), 0},
			{"all are", id("m1"), 0},
			{"they are back, one of them new", id("m1", "g2", "g3"), 0},
			{"another version tells nothing", id(""), 0},
			{"another machine", id("m2", "g8"), 1},
			{"a clone of it", id("m2", "g9"), 2},
		} {
			f.set("a:1", &control.Hello{Node: "a", Instance: "other", Identity: c.is})
			if _, err := d.Greet(t.Context(), "a:1"); err != nil {
				t.Fatal(err)
			}
			if len(replaced) != c.want {
				t.Errorf("%s: replaced %q, want %d", c.what, replaced, c.want)
			}
		}
		if n := w.count("another machine answers"); n != 2 {
			t.Errorf("logged %d times", n)
		}
	})
}

// 2,000 peers that don't answer are asked by few at a time, keep nobody waiting, and are found to be back.
func TestManyDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fleet{nodes: map[string]*control.Hello{"alive:1": {Node: "alive"}}}
		d, _ := run(t, Options{Ask: f.ask})
		list := []Peer{peer("alive", "alive:1")}
		for i := range 2000 {
			list = append(list, peer(fmt.Sprint("n", i), fmt.Sprintf("n%d:1", i)))
		}
		d.Set(Config{Static: list})
		if _, err := d.Greet(t.Context(), "alive:1"); err != nil {
			t.Fatal(err)
		}
		before := runtime.NumGoroutine()
		var wg sync.WaitGroup
		for range 3 { // rounds of a probe
			for _, p := range list[1:] {
				wg.Go(func() {
					start := time.Now()
					if _, err := d.Greet(t.Context(), p.Address); err == nil {
						t.Errorf("%s answers", p.Name)
					}
					if took := time.Since(start); took > 3*time.Second {
						t.Errorf("a probe waited for %s", took)
					}
				})
			}
			start := time.Now()
			if _, err := d.Greet(t.Context(), "alive:1"); err != nil || time.Since(start) > 0 {
				t.Errorf("the one that is alive: %v after %s", err, time.Since(start))
			}
			synctest.Wait()
			if n := runtime.NumGoroutine() - before; n > inlineAsks+backgroundAsks+5 {
				t.Errorf("%d goroutines more than at rest", n)
			}
			after(time.Minute)
		}
		wg.Wait()
		if f.most > inlineAsks+backgroundAsks+1 {
			t.Errorf("%d were asked at a time", f.most)
		}
		for _, p := range list[1:] {
			f.set(p.Address, &control.Hello{Node: p.Name})
		}
		after(10 * time.Minute)
		for _, p := range list {
			if _, err := d.Greet(t.Context(), p.Address); err != nil {
				t.Fatalf("%s is back: %v", p.Name, err)
			}
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		if len(d.contacts) != len(list) {
			t.Errorf("%d contacts", len(d.contacts))
		}
	})
}

// What leaves the lists leaves nothing behind.
func TestChurn(t *testing.T) {
	d := New(Options{Name: "me"})
	for i := range 1000 {
		d.Set(Config{Static: []Peer{peer(fmt.Sprint("n", i), fmt.Sprintf("n%d:1", i)), peer("b", fmt.Sprintf("n%d:1", i))}})
	}
	if len(d.contacts) != 1 || len(d.told) != 1 || len(d.sources) != 1 || len(d.view.Members) != 2 {
		t.Errorf("%d contacts, %d reports, %d sources, %d members", len(d.contacts), len(d.told), len(d.sources), len(d.view.Members))
	}
}

func TestReportsOnce(t *testing.T) {
	w := &watcher{}
	d := New(Options{Name: "me", Log: slog.New(slog.NewTextHandler(w, nil))})
	twice := Config{Static: []Peer{peer("a", "10.0.0.2:1"), peer("b", "10.0.0.2:1")}}
	d.Set(twice)
	d.Set(twice)
	if n := w.count("10.0.0.2:1 is the address of two peers, a (static) and b (static)"); n != 1 {
		t.Errorf("told %d times:\n%s", n, w.log.String())
	}
	d.Set(Config{})
	d.Set(twice)
	if n := w.count("is the address of two peers"); n != 2 {
		t.Errorf("told %d times after it had been put right in between", n)
	}
}
