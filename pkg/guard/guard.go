// Package guard keeps heavy probes away from a node that has something else to do: blackout windows, a budget of bytes, a command that
// knows of jobs, leases of a scheduler, and a pause switch, which holds for all probes. Traffic of others is measured by package probe,
// by the limit that is set here.
package guard

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// Settings are the guards of a node. The zero value guards nothing.
type Settings struct {
	MaxUtilization float64  // share of the line rate that others may use before a heavy probe; 0: any
	AbortOnTraffic bool     // give up a heavy probe under way when others use more
	BytesPerDay    int64    // that heavy probes may put on a port's wire in a UTC day; 0: any number
	Concurrent     int      // heavy probes of this node at a time, over all ports; 0: one a port
	Blackout       []Window // without heavy probes
	Command        []string // program and arguments; non-zero exit: this node has a job
}

// Guard holds the guards of one node. It implements [probe.Guard]. Its methods may be called from several goroutines.
type Guard struct {
	settings func() Settings
	command  command
	log      *slog.Logger

	mu       sync.Mutex
	state    state
	file     string // empty: none
	unsaved  bool   // which has been told
	running  int
	reserved map[string]uint64 // bytes of heavy probes under way, by port
}

var _ probe.Guard = (*Guard)(nil)

// New returns a Guard that keeps what outlives the process below a folder; empty: nowhere.
func New(dir string, settings func() Settings, log *slog.Logger) *Guard {
	g := &Guard{settings: settings, log: log, reserved: map[string]uint64{}, command: command{log: log}}
	g.load(dir)
	return g
}

// Traffic is [probe.Guard]'s.
func (g *Guard) Traffic() (limit float64, abort bool) {
	s := g.settings()
	return s.MaxUtilization, s.AbortOnTraffic
}

// Begin is [probe.Guard]'s.
func (g *Guard) Begin(_ context.Context, u probe.Use) (end func(bytes uint64), no *probe.Refusal) {
	s := g.settings()
	now := time.Now()
	for _, w := range s.Blackout {
		for _, t := range []time.Time{now, now.Add(u.Time)} {
			if w.Contains(t) {
				return nil, &probe.Refusal{Reason: probe.Blackout, Detail: fmt.Sprintf("no heavy probes in %q, which lasts until %s", w, w.until(t).UTC().Format("2006-01-02 15:04 MST"))}
			}
		}
	}
	if why := g.held(now); why != "" {
		return nil, &probe.Refusal{Reason: probe.BusyPort, Passing: true, Detail: why}
	}
	if len(s.Command) > 0 {
		if why := g.command.busyWith(s.Command); why != "" {
			return nil, &probe.Refusal{Reason: probe.GuardCommand, Detail: why}
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if s.Concurrent > 0 && g.running >= s.Concurrent {
		return nil, &probe.Refusal{Reason: probe.Budget, Passing: true, Detail: fmt.Sprintf("%d heavy probes run on this node (guards.budget.concurrent)", g.running)}
	}
	g.state.Budget.turn(now)
	if spent := g.state.Budget.Spent[u.Port] + g.reserved[u.Port]; s.BytesPerDay > 0 && (spent >= uint64(s.BytesPerDay) || u.Bytes > uint64(s.BytesPerDay)-spent) {
		return nil, &probe.Refusal{Reason: probe.Budget, Detail: fmt.Sprintf("%s has %d of %d bytes left for heavy probes until 00:00 UTC (guards.budget.bytes_per_day), this one wants %d",
			u.Port, max(0, s.BytesPerDay-int64(min(spent, uint64(s.BytesPerDay)))), s.BytesPerDay, u.Bytes)}
	}
	g.running++
	g.reserved[u.Port] += u.Bytes
	var once sync.Once
	return func(bytes uint64) { once.Do(func() { g.end(u, bytes) }) }, nil
}

// end books a heavy probe that is over.
func (g *Guard) end(u probe.Use, bytes uint64) {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running--
	if g.reserved[u.Port] -= u.Bytes; g.reserved[u.Port] == 0 {
		delete(g.reserved, u.Port)
	}
	if bytes > 0 {
		g.state.Budget.turn(now)
		g.state.Budget.Spent[u.Port] += bytes
		g.save()
	}
}

// Running is the number of heavy probes under way.
func (g *Guard) Running() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.running
}
