package guard

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Bounds of what is asked of a guard.
const (
	maxLeases = 64
	maxLease  = 7 * 24 * time.Hour
	maxPause  = 365 * 24 * time.Hour
	maxHolder = 128
	stateFile = "guards.json"
	maxState  = 1 << 20 // bytes of that
)

// state is what outlives the process: a restart refills no budget, ends no pause and frees no lease.
type state struct {
	Pause  *Pause  `json:"pause,omitempty"`
	Leases []Lease `json:"leases,omitempty"`
	Budget budget  `json:"budget"`
}

// Pause is the switch that stops all probes of a node.
type Pause struct {
	Since time.Time  `json:"since"`
	Until *time.Time `json:"until"` // null: until it is resumed
}

// Lease keeps heavy probes off all ports of a node.
type Lease struct {
	Holder string    `json:"holder"` // who asked, such as a job's number
	Until  time.Time `json:"until"`
}

// budget is what heavy probes have put on the wire.
type budget struct {
	Day   string            `json:"day"`   // UTC, 2006-01-02
	Spent map[string]uint64 `json:"spent"` // bytes by port
}

// turn begins a new day. A clock that was set back by less than a day ends none.
func (b *budget) turn(now time.Time) {
	tomorrow := now.Add(24 * time.Hour).UTC().Format(time.DateOnly)
	if day := now.UTC().Format(time.DateOnly); day > b.Day || b.Day > tomorrow || b.Spent == nil {
		b.Day, b.Spent = day, map[string]uint64{}
	}
}

// load reads what was kept. What can't be read is said and begun anew: a daemon starts all the same.
func (g *Guard) load(dir string) {
	if dir == "" {
		return
	}
	g.file = filepath.Join(dir, stateFile)
	info, err := os.Stat(g.file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return
	case err == nil && info.Size() > maxState:
		err = fmt.Errorf("larger than %d bytes", maxState)
	}
	var data []byte
	if err == nil {
		data, err = os.ReadFile(g.file)
	}
	var s state
	if err == nil {
		err = json.Unmarshal(data, &s)
	}
	if _, wrong := time.Parse(time.DateOnly, s.Budget.Day); err == nil && s.Budget.Day != "" {
		err = wrong
	}
	if err != nil {
		g.log.Warn("what guards kept of pause, leases and budget can't be read and is begun anew", slog.String("file", g.file), slog.Any("err", err))
		return
	}
	s.Leases = s.Leases[:min(len(s.Leases), maxLeases)]
	g.state = s
}

// save keeps the state. The caller holds mu.
func (g *Guard) save() {
	if g.file == "" {
		return
	}
	err := g.write()
	if err != nil && !g.unsaved {
		g.log.Warn("pause, leases and budget are kept in memory only: a restart forgets them; check --storage.path", slog.Any("err", err))
	}
	g.unsaved = err != nil
}

func (g *Guard) write() error {
	data, err := json.Marshal(g.state)
	if err != nil {
		return err
	}
	dir := filepath.Dir(g.file)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, ".guards-*")
	if err != nil {
		return err
	}
	_, err = f.Write(append(data, '\n'))
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), g.file)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// Pause stops all probes for a time; 0: until Resume. A later call replaces an earlier one.
func (g *Guard) Pause(d time.Duration) (Pause, error) {
	if d < 0 || d > maxPause {
		return Pause{}, fmt.Errorf("a pause of %s is out of range; use 1s to %s, or none for one that Resume ends", d, maxPause)
	}
	now := time.Now().UTC()
	p := Pause{Since: now}
	if d > 0 {
		p.Until = new(now.Add(d))
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if was := g.state.Pause; was != nil && was.holds(now) {
		p.Since = was.Since
	}
	g.state.Pause = &p
	g.save()
	g.log.Info("paused: nothing is probed, and peers are told so", slog.Any("until", p.Until))
	return p, nil
}

// Resume ends a pause.
func (g *Guard) Resume() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state.Pause == nil {
		return
	}
	g.state.Pause = nil
	g.save()
	g.log.Info("resumed")
}

func (p *Pause) holds(now time.Time) bool { return p.Until == nil || now.Before(*p.Until) }

// Paused returns the pause that holds now, or nil.
func (g *Guard) Paused() *Pause {
	g.mu.Lock()
	defer g.mu.Unlock()
	p := g.state.Pause
	if p == nil || !p.holds(time.Now()) {
		return nil
	}
	copied := *p
	return &copied
}

// Hold keeps heavy probes off this node's ports for a time. A holder that has a lease renews it.
func (g *Guard) Hold(holder string, d time.Duration) (Lease, error) {
	switch {
	case holder == "" || len(holder) > maxHolder || strings.ContainsFunc(holder, func(r rune) bool { return r < '!' || r > '~' }):
		return Lease{}, fmt.Errorf("holder %q: want 1 to %d letters, digits and signs without spaces, such as a job's number", clip(holder), maxHolder)
	case d < time.Second || d > maxLease:
		return Lease{}, fmt.Errorf("duration %s is out of range; use 1s to %s", d, maxLease)
	}
	now := time.Now().UTC()
	l := Lease{Holder: holder, Until: now.Add(d)}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.expire(now)
	if i := slices.IndexFunc(g.state.Leases, func(o Lease) bool { return o.Holder == holder }); i >= 0 {
		g.state.Leases[i] = l
	} else if len(g.state.Leases) == maxLeases {
		return Lease{}, fmt.Errorf("%d leases are held already", maxLeases)
	} else {
		g.state.Leases = append(g.state.Leases, l)
	}
	g.save()
	return l, nil
}

// Release ends a holder's lease, and says whether there was one.
func (g *Guard) Release(holder string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.expire(time.Now())
	i := slices.IndexFunc(g.state.Leases, func(l Lease) bool { return l.Holder == holder })
	if i < 0 {
		return false
	}
	g.state.Leases = slices.Delete(g.state.Leases, i, i+1)
	g.save()
	return true
}

// Leases returns those that hold now.
func (g *Guard) Leases() []Lease {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.expire(time.Now())
	return append([]Lease{}, g.state.Leases...)
}

// expire lets go of leases that are over. The caller holds mu.
func (g *Guard) expire(now time.Time) {
	g.state.Leases = slices.DeleteFunc(g.state.Leases, func(l Lease) bool { return !now.Before(l.Until) })
}

// held says who holds the ports; empty: nobody.
func (g *Guard) held(now time.Time) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.expire(now)
	if len(g.state.Leases) == 0 {
		return ""
	}
	last := slices.MaxFunc(g.state.Leases, func(a, b Lease) int { return a.Until.Compare(b.Until) })
	return fmt.Sprintf("this node's ports are leased to %s until %s", last.Holder, last.Until.Format("2006-01-02 15:04:05 MST"))
}

// Spent is what heavy probes have put on the wire today (UTC), in bytes by port.
func (g *Guard) Spent() map[string]uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.state.Budget.turn(time.Now())
	out := make(map[string]uint64, len(g.state.Budget.Spent))
	for port, n := range g.state.Budget.Spent {
		out[port] = n
	}
	return out
}
