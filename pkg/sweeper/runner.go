// Package sweeper runs sweeps: this node's rows of them, a whole fleet's by asking its daemons, and what follows from a report
// (measuring suspects again, keeping reports). Package sweep judges the rows.
package sweeper

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule/pairing"
	"github.com/rdmabenchd/rdmabenchd/pkg/sweep"
)

// Bounds of a sweep on one node.
const (
	minWait  = 10 * time.Second // for a busy port: partners do not keep step
	maxWait  = 30 * time.Second
	passes   = 4 // over what was found busy
	confirms = 2 // sessions of a pair that is measured again
	// DefaultDeadline is for a whole sweep that says nothing else.
	DefaultDeadline = 2 * time.Hour
	minDeadline     = time.Second
)

// Port is one that sweeps measure from.
type Port struct {
	Device   string
	Port     int
	Rail     string
	LineRate *float64 // bytes per second
}

// Runner runs this node's rows, one sweep at a time. All fields but Observe, Results and Done must be set. It is a [control.Sweeper].
type Runner struct {
	Config  func() *config.Config
	Peers   func() []config.Peer // this node may be among them
	Ports   func() []Port
	Probe   func(ctx context.Context, s probe.Spec, to probe.Target, device string, port int) *probe.Result
	Observe func(*probe.Result)    // gets each result
	Results func() []*probe.Result // the last ones of all probes
	Done    func(*Own)             // gets each sweep that was not for selected peers
	Log     *slog.Logger

	mu      sync.Mutex
	last    control.RowsReply // of the sweep that runs or ran last
	pending chan job          // of size 1

	collecting map[string]*[]sweep.Row // of scheduled sweeps, by probe
}

// Own is a finished sweep of this node's own rows.
type Own struct {
	Request control.SweepRequest
	Input   sweep.Input
	Report  *sweep.Report
}

type job struct {
	request control.SweepRequest
	byWeb   bool
}

// NewID returns a fresh id of a sweep.
func NewID() string { return strings.ToLower(rand.Text()) }

// IsSweep reports whether a probe is a sweep by its own name: a heavy one that meets every peer.
func IsSweep(p config.Probe) bool {
	return p.Spec.WithDefaults().Heavy() && (string(p.Pairing.Strategy) == "all" || string(p.Pairing.Strategy) == "tournament")
}

// Select returns the probes of those names; without names those that are sweeps.
func Select(cfg *config.Config, names []string) ([]config.Probe, error) {
	var out []config.Probe
	var known []string
	for _, p := range cfg.Probes {
		known = append(known, p.Spec.Name)
		if slices.Contains(names, p.Spec.Name) || len(names) == 0 && IsSweep(p) {
			out = append(out, p)
		}
	}
	for _, n := range names {
		if !slices.Contains(known, n) {
			return nil, fmt.Errorf("no probe is named %q: there are %s", n, cmp.Or(strings.Join(known, ", "), "none"))
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("no probe here is a sweep (kind bandwidth or message-rate, pairing all or tournament): name one of %s", cmp.Or(strings.Join(known, ", "), "none"))
	}
	return out, nil
}

// Name is what a sweep of some probes is called.
func Name(probes []config.Probe) string {
	var names []string
	for _, p := range probes {
		names = append(names, p.Spec.Name)
	}
	return strings.Join(names, "+")
}

func (r *Runner) init() chan job {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pending == nil {
		r.pending = make(chan job, 1)
	}
	return r.pending
}

// Sweep starts a sweep that another asks for.
func (r *Runner) Sweep(_ context.Context, req *control.SweepRequest) error {
	return r.start(*req, false)
}

func (r *Runner) start(req control.SweepRequest, byWeb bool) error {
	pending := r.init()
	if _, err := Select(r.Config(), req.Probes); err != nil {
		return &control.Error{Reason: string(probe.Incompatible), Detail: err.Error()}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.last.ID == req.ID:
		return nil
	case r.last.Running:
		return &control.Error{Reason: string(probe.Busy), Detail: fmt.Sprintf("sweep %s is under way here, %d of %d rows are done", r.last.ID, r.last.Done, r.last.Planned), RetryAfter: 10}
	}
	select {
	case pending <- job{req, byWeb}:
	default:
		return &control.Error{Reason: string(probe.Busy), Detail: "another sweep is about to start here", RetryAfter: 10}
	}
	cfg := r.Config()
	r.last = control.RowsReply{Node: cfg.Node.Name, Labels: labels(cfg), ID: req.ID, Running: true, Started: time.Now().UTC()}
	return nil
}

func labels(cfg *config.Config) map[string]string {
	if cfg.Node.Labels == nil {
		return map[string]string{}
	}
	return cfg.Node.Labels
}

// Rows tells of the sweep of that id, or of the last results.
func (r *Runner) Rows(_ context.Context, of string) (*control.RowsReply, error) {
	cfg := r.Config()
	if of == control.LastResults {
		rep := &control.RowsReply{Node: cfg.Node.Name, Labels: labels(cfg), ID: of, Rows: []control.Row{}}
		rates := r.rates()
		for _, x := range r.Results() {
			if len(rep.Rows) < control.MaxRows && x.Peer != cfg.Node.Name {
				rep.Rows = append(rep.Rows, sweep.FromResult(cfg.Node.Name, x, rates[x.Device+"/"+fmt.Sprint(x.Port)]))
			}
		}
		rep.Planned, rep.Done = len(rep.Rows), len(rep.Rows)
		return rep, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last.ID == "" || of != "" && of != r.last.ID {
		return nil, &control.Error{Reason: string(probe.Incompatible), Detail: "no such sweep here: this node has not run it, or another one since"}
	}
	rep := r.last // the rows of a finished sweep do not change
	if rep.Running {
		rep.Rows = []control.Row{}
	}
	return &rep, nil
}

func (r *Runner) rates() map[string]*float64 {
	out := map[string]*float64{}
	for _, p := range r.Ports() {
		out[p.Device+"/"+fmt.Sprint(p.Port)] = p.LineRate
	}
	return out
}

// Run runs what is asked for until ctx ends.
func (r *Runner) Run(ctx context.Context) error {
	pending := r.init()
	for {
		select {
		case <-ctx.Done():
			return nil
		case j := <-pending:
			own := r.Once(ctx, j.request, nil)
			if r.Done != nil && len(j.request.Peers) == 0 && ctx.Err() == nil && own != nil {
				if j.byWeb {
					r.confirm(ctx, own)
				}
				r.Done(own)
			}
		}
	}
}

// Once runs this node's rows of a sweep and reports on them. progress, if there is one, is told after each row. It returns nil if the
// request can't be run.
func (r *Runner) Once(ctx context.Context, req control.SweepRequest, progress func(done, planned int)) *Own {
	cfg := r.Config()
	started := time.Now().UTC()
	probes, err := Select(cfg, req.Probes)
	if err != nil {
		r.Log.Error("sweep can't run", slog.Any("err", err))
		probes = nil
	}
	rows := r.measure(ctx, cfg, probes, req, func(done, planned int) {
		r.mu.Lock()
		r.last.Done, r.last.Planned = done, planned
		r.mu.Unlock()
		if progress != nil {
			progress(done, planned)
		}
	})
	finished := time.Now().UTC()
	r.mu.Lock()
	r.last = control.RowsReply{
		Node: cfg.Node.Name, Labels: labels(cfg), ID: req.ID, Planned: len(rows), Done: len(rows), Started: started, Finished: finished, Rows: rows,
	}
	r.mu.Unlock()
	if probes == nil {
		return nil
	}
	in := sweep.Input{Name: Name(probes), By: cfg.Node.Name, Started: started, Finished: finished, Rows: rows, Limits: Limits(probes)}
	in.Members = append(in.Members, sweep.Member{Name: cfg.Node.Name, Labels: cfg.Node.Labels})
	for _, p := range r.others(cfg, req.Peers) {
		in.Members = append(in.Members, sweep.Member{Name: p.Name, Labels: p.Labels})
	}
	return &Own{Request: req, Input: in, Report: sweep.New(in)}
}

// Confirm measures again what a report suspects and this node can reach, and brings that to the report.
func (r *Runner) confirm(ctx context.Context, own *Own) {
	cfg := r.Config()
	var again []sweep.Row
	for _, c := range own.Report.Checks() {
		if c.Src != cfg.Node.Name || ctx.Err() != nil {
			continue
		}
		probes, err := Select(cfg, c.Probes)
		if err != nil {
			continue // reloaded since
		}
		again = append(again, r.measure(ctx, cfg, probes, control.SweepRequest{Peers: []string{c.Dst}, Rail: c.Rail, Repeat: confirms, Deadline: own.Request.Deadline}, nil)...)
	}
	if len(again) > 0 {
		own.Report.Confirm(own.Input, again)
	}
}

// Confirm is what the command line does after [Runner.Once].
func (r *Runner) Confirm(ctx context.Context, own *Own) { r.confirm(ctx, own) }

// others are the peers of a sweep without this node, in the order in which it meets them: that of a tournament, so that all
// nodes that begin together meet another one each.
func (r *Runner) others(cfg *config.Config, only []string) []config.Peer {
	byName := map[string]config.Peer{}
	names := []string{cfg.Node.Name}
	for _, p := range r.Peers() {
		if _, twice := byName[p.Name]; p.Name != cfg.Node.Name && !twice {
			byName[p.Name] = p
			names = append(names, p.Name)
		}
	}
	slices.Sort(names)
	self := slices.Index(names, cfg.Node.Name)
	var out []config.Peer
	for round := range pairing.Rounds(len(names)) {
		if j, ok := pairing.Partner(len(names), round, self); ok {
			if n := names[j]; len(only) == 0 || slices.Contains(only, n) {
				out = append(out, byName[n])
			}
		}
	}
	return out
}

// target is a peer as a probe's target.
func target(cfg *config.Config, p config.Peer) probe.Target {
	path := "unknown"
	if a, b := cfg.Node.Labels["rack"], p.Labels["rack"]; a != "" && b != "" {
		if path = "cross_rack"; a == b {
			path = "same_rack"
		}
	}
	return probe.Target{Name: p.Name, Address: p.Address, Path: path}
}

// step is one row that is to be measured.
type step struct {
	spec probe.Spec
	peer config.Peer
	port Port
	row  *sweep.Row
}

// measure runs rows one after the other. What was busy is tried again at the end.
func (r *Runner) measure(ctx context.Context, cfg *config.Config, probes []config.Probe, req control.SweepRequest, progress func(done, planned int)) []control.Row {
	deadline := time.Duration(req.Deadline * float64(time.Second))
	if deadline < minDeadline {
		deadline = DefaultDeadline
	}
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	ports := r.Ports()
	if req.Rail != "" {
		ports = slices.DeleteFunc(ports, func(p Port) bool { return p.Rail != req.Rail })
	} else if len(ports) == 0 {
		ports = []Port{{}} // the results say why there is none
	}
	var steps []*step
	for _, peer := range r.others(cfg, req.Peers) { // all of a peer at once, while it has time for this node
		for _, p := range probes {
			for range max(1, req.Repeat) {
				for _, port := range ports {
					spec := p.Spec.WithDefaults()
					spec.Wait = min(max(spec.Wait, minWait), maxWait)
					steps = append(steps, &step{spec: spec, peer: peer, port: port})
				}
			}
		}
	}
	steps = steps[:min(len(steps), control.MaxRows)]
	done := 0
	tell := func() {
		if progress != nil {
			progress(done, len(steps))
		}
	}
	tell()
	dead := map[string]*sweep.Row{} // peers that nobody answers at: they are not asked for each row
	left := steps
	for pass := 0; pass < passes && len(left) > 0; pass++ {
		var busy []*step
		for _, s := range left {
			if d := dead[s.peer.Name]; d != nil && s.row == nil {
				row := r.unmeasured(cfg, s, d.Result)
				row.Stage, row.Reason, row.Scope, row.Detail = d.Stage, d.Reason, d.Scope, d.Detail
				s.row = &row
				done++
				tell()
				continue
			}
			if ctx.Err() != nil {
				break
			}
			res := r.Probe(ctx, s.spec, target(cfg, s.peer), s.port.Device, s.port.Port)
			if r.Observe != nil {
				r.Observe(res)
			}
			row := sweep.FromResult(cfg.Node.Name, res, s.port.LineRate)
			if row.Rail == "" {
				row.Rail = s.port.Rail
			}
			if s.row == nil {
				done++
			}
			s.row = &row
			switch {
			case res.Outcome == probe.Skipped && *res.Reason == probe.BusyPort:
				busy = append(busy, s)
			case sweep.AtControl(&row):
				dead[s.peer.Name] = &row
			}
			tell()
		}
		left = busy
		if ctx.Err() != nil {
			break
		}
	}
	out := make([]control.Row, 0, len(steps))
	for _, s := range steps {
		if s.row == nil {
			row := r.unmeasured(cfg, s, string(probe.Skipped))
			row.Stage, row.Reason, row.Scope, row.Detail = string(probe.StageAdmit), string(probe.Cancelled), string(probe.ScopeLocal), "the sweep ended before it"
			s.row = &row
		}
		if err := s.row.Validate(); err != nil { // a name that can't be shown
			r.Log.Error("row left out: please report this", slog.Any("err", err))
			continue
		}
		out = append(out, *s.row)
	}
	return out
}

func (r *Runner) unmeasured(cfg *config.Config, s *step, result string) sweep.Row {
	t := target(cfg, s.peer)
	return sweep.Row{
		Src: cfg.Node.Name, SrcDevice: s.port.Device, SrcPort: s.port.Port, Dst: s.peer.Name, Rail: s.port.Rail, Path: t.Path, LineRate: s.port.LineRate,
		Probe: s.spec.Name, Kind: string(s.spec.Kind), Op: string(s.spec.Op), Time: time.Now().UTC(), Result: result, Taints: []string{}, Points: []control.Point{},
	}
}

// Limits are the configured limits of probes, by name.
func Limits([]config.Probe) map[string]sweep.Limits { return map[string]sweep.Limits{} }

// Collect begins to gather the results of a probe that is a sweep of its own, as they are noted. The function it returns reports on
// them.
func (r *Runner) Collect(name string) (end func(context.Context)) {
	if r == nil { // nobody wants reports
		return func(context.Context) {}
	}
	started := time.Now().UTC()
	rows := &[]sweep.Row{}
	r.mu.Lock()
	if r.collecting == nil {
		r.collecting = map[string]*[]sweep.Row{}
	}
	r.collecting[name] = rows
	r.mu.Unlock()
	return func(ctx context.Context) {
		r.mu.Lock()
		if r.collecting[name] == rows {
			delete(r.collecting, name)
		}
		list := *rows
		r.mu.Unlock()
		cfg := r.Config()
		probes, err := Select(cfg, []string{name})
		if err != nil || len(list) == 0 || ctx.Err() != nil && len(list) < 2 {
			return // reloaded since, or there is nothing to tell
		}
		rates := r.rates()
		in := sweep.Input{Name: name, By: cfg.Node.Name, Started: started, Limits: Limits(probes), Members: []sweep.Member{{Name: cfg.Node.Name, Labels: cfg.Node.Labels}}}
		for _, p := range r.Peers() {
			if p.Name != cfg.Node.Name {
				in.Members = append(in.Members, sweep.Member{Name: p.Name, Labels: p.Labels})
			}
		}
		for _, row := range list {
			row.LineRate = rates[row.SrcDevice+"/"+fmt.Sprint(row.SrcPort)]
			if row.Validate() == nil {
				in.Rows = append(in.Rows, row)
			}
		}
		in.Finished = time.Now().UTC()
		own := &Own{Request: control.SweepRequest{Deadline: DefaultDeadline.Seconds()}, Input: in, Report: sweep.New(in)}
		r.confirm(ctx, own)
		if r.Done != nil {
			r.Done(own)
		}
	}
}

// Note takes a result that the schedule brought.
func (r *Runner) Note(res *probe.Result) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if rows := r.collecting[res.Probe]; rows != nil && len(*rows) < control.MaxRows {
		*rows = append(*rows, sweep.FromResult(r.Config().Node.Name, res, nil))
	}
}
