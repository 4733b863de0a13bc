package sweeper

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/sweep"
)

// Bounds of asking a fleet.
const (
	concurrency = 32
	maxFleet    = 4_000_000 // rows in all
	pollEvery   = time.Second
	maxLost     = 5 // polls in a row without an answer
	startTries  = 3
)

// Fleet asks the daemons of all members for their rows.
type Fleet struct {
	Client  *control.Client
	Members []config.Peer // the asking node among them
	AtOnce  int           // nodes that run their rows at a time; 0: all
	// Progress, if set, is told now and then, from several goroutines.
	Progress func(done, planned int)
}

// answer is what one member said.
type answer struct {
	member config.Peer
	rows   *control.RowsReply
	err    error
}

// Members are the nodes of a configuration's fleet, the node itself among them; it is called at the address on which it listens.
func Members(cfg *config.Config, peers []config.Peer, own string) []config.Peer {
	out := []config.Peer{{Name: cfg.Node.Name, Address: own, Labels: cfg.Node.Labels}}
	for _, p := range peers {
		if !slices.ContainsFunc(out, func(o config.Peer) bool { return o.Name == p.Name }) {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b config.Peer) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// Last gathers what every member measured last.
func (f *Fleet) Last(ctx context.Context) []answer {
	return f.each(ctx, f.Members, func(ctx context.Context, m config.Peer) (*control.RowsReply, error) {
		return f.Client.Rows(ctx, m.Address, control.LastResults)
	})
}

// Sweep has every member run its rows, waits until all have, and gathers them.
func (f *Fleet) Sweep(ctx context.Context, req control.SweepRequest) []answer {
	return f.run(ctx, f.Members, func(config.Peer) control.SweepRequest { return req })
}

func (f *Fleet) run(ctx context.Context, members []config.Peer, request func(config.Peer) control.SweepRequest) []answer {
	var mu sync.Mutex
	state := map[string][2]int{}
	calls := make(chan struct{}, concurrency)
	call := func(ask func()) {
		calls <- struct{}{} // each call has its own deadline, so a place comes free
		ask()
		<-calls
	}
	pause := max(pollEvery, time.Duration(len(members))*5*time.Millisecond) // at most 200 polls a second
	return f.all(ctx, members, cmp.Or(f.AtOnce, len(members)), func(ctx context.Context, m config.Peer) (*control.RowsReply, error) {
		req := request(m)
		var err error
		call(func() { err = f.start(ctx, m, req) })
		if err != nil {
			return nil, err
		}
		lost := 0
		for {
			var rep *control.RowsReply
			call(func() { rep, err = f.Client.Rows(ctx, m.Address, req.ID) })
			var e *control.Error
			switch {
			case err == nil && !rep.Running:
				return rep, nil
			case err == nil:
				lost = 0
				mu.Lock()
				state[m.Name] = [2]int{rep.Done, rep.Planned}
				done, planned := 0, 0
				for _, s := range state {
					done, planned = done+s[0], planned+s[1]
				}
				mu.Unlock()
				if f.Progress != nil {
					f.Progress(done, planned)
				}
			case errors.As(err, &e) && e.FromPeer:
				return nil, err // it runs another one, or was restarted
			default:
				if lost++; lost >= maxLost {
					return nil, err
				}
			}
			select {
			case <-ctx.Done():
				return nil, &control.Error{Reason: string(probe.Timeout), Detail: "the sweep's deadline passed before this node had its rows"}
			case <-time.After(pause):
			}
		}
	})
}

// start asks a member to begin; one that is busy with another sweep is asked again.
func (f *Fleet) start(ctx context.Context, m config.Peer, req control.SweepRequest) error {
	for try := 1; ; try++ {
		err := f.Client.StartSweep(ctx, m.Address, &req)
		var e *control.Error
		if err == nil || try == startTries || errors.As(err, &e) && e.FromPeer && e.Reason != string(probe.Busy) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(time.Duration(try) * pollEvery):
		}
	}
}

func (f *Fleet) each(ctx context.Context, members []config.Peer, do func(context.Context, config.Peer) (*control.RowsReply, error)) []answer {
	return f.all(ctx, members, concurrency, do)
}

// all asks members, so many at a time. All begin a sweep together, or partners would wait for each other.
func (f *Fleet) all(ctx context.Context, members []config.Peer, atOnce int, do func(context.Context, config.Peer) (*control.RowsReply, error)) []answer {
	out := make([]answer, len(members))
	var g errgroup.Group
	g.SetLimit(max(1, atOnce))
	for i, m := range members {
		g.Go(func() error {
			rep, err := do(ctx, m)
			if err == nil && rep.Node != m.Name {
				rep, err = nil, &control.Error{Reason: string(probe.Incompatible), Detail: "the node at " + m.Address + " calls itself " + rep.Node}
			}
			out[i] = answer{m, rep, err}
			return nil
		})
	}
	_ = g.Wait() // every error is in its answer
	return out
}

// Input makes a report's input of what the members said.
func Input(name, by string, answers []answer) sweep.Input {
	in := sweep.Input{Name: name, By: by, Fleet: true}
	for _, a := range answers {
		m := sweep.Member{Name: a.member.Name, Labels: a.member.Labels}
		if a.err != nil {
			m.Reason, m.Detail = "peer-unresponsive", a.err.Error()
			var e *control.Error
			if errors.As(a.err, &e) {
				m.Reason, m.Detail = e.Reason, e.Detail
			}
		} else {
			if len(a.rows.Labels) > 0 {
				m.Labels = a.rows.Labels
			}
			if len(in.Rows)+len(a.rows.Rows) > maxFleet {
				in.Notes = append(in.Notes, "too many rows: those of "+a.member.Name+" are left out")
			} else {
				in.Rows = append(in.Rows, a.rows.Rows...)
			}
			if in.Started.IsZero() || !a.rows.Started.IsZero() && a.rows.Started.Before(in.Started) {
				in.Started = a.rows.Started
			}
		}
		in.Members = append(in.Members, m)
	}
	return in
}

// Confirm has the members measure again what a report suspects, and brings that to the report. Checks that share a node are made
// one after the other.
func (f *Fleet) Confirm(ctx context.Context, r *sweep.Report, in sweep.Input, deadline time.Duration) {
	byName := map[string]config.Peer{}
	for _, m := range f.Members {
		byName[m.Name] = m
	}
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	checks := r.Checks()
	progress := f.Progress
	f.Progress = nil
	defer func() { f.Progress = progress }()
	var again []sweep.Row
	for len(checks) > 0 && ctx.Err() == nil {
		taken := map[string]bool{}
		wave := map[string]sweep.Check{}
		var members []config.Peer
		var later []sweep.Check
		for _, c := range checks {
			m, known := byName[c.Src]
			switch {
			case !known:
			case taken[c.Src] || taken[c.Dst]:
				later = append(later, c)
			default:
				taken[c.Src], taken[c.Dst] = true, true
				wave[c.Src] = c
				members = append(members, m)
			}
		}
		for _, a := range f.run(ctx, members, func(m config.Peer) control.SweepRequest {
			c := wave[m.Name]
			return control.SweepRequest{ID: NewID(), Probes: c.Probes, Peers: []string{c.Dst}, Rail: c.Rail, Repeat: confirms, Deadline: max(1, deadline.Seconds()/2)}
		}) {
			if a.err == nil {
				again = append(again, a.rows.Rows...)
			}
		}
		checks = later
	}
	if len(again) > 0 {
		r.Confirm(in, again)
	}
}
