package schedule

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// MaxSleep is the longest time the scheduler sleeps. Timers stand still while a machine is
// suspended and know nothing of a stepped clock, so the wall clock is read at least this often.
// A watchdog that sees no tick for some multiples of it may take the scheduler for dead.
const MaxSleep = 10 * time.Second

// ErrReplaced is the cause ([context.Cause]) with which a running job's context ends when
// [Scheduler.Replace] removes the job or changes its definition.
var ErrReplaced = errors.New("job removed or redefined")

// Job is something to do again and again.
type Job struct {
	Name     string        // unique; also what the phase is drawn from
	Schedule Schedule      // when it is due
	Jitter   time.Duration // each run starts at a fixed phase in [0, Jitter) after it is due, see [Phase]
	Timeout  time.Duration // the context of each run ends after this; must be positive

	// Definition stands for what Run does. A job is unchanged if its Name, Schedule, Jitter,
	// Timeout and Definition are.
	Definition string
	// Run does the work of the firing due, which nodes with the same schedule agree on: neither jitter nor delay is in it. It
	// must return soon after its context ends. It may panic.
	Run func(ctx context.Context, due time.Time)
}

func (j Job) same(o Job) bool {
	return j.Name == o.Name && j.Schedule.spec == o.Schedule.spec && j.Jitter == o.Jitter &&
		j.Timeout == o.Timeout && j.Definition == o.Definition
}

func (j Job) check() error {
	switch {
	case j.Name == "":
		return errors.New("a job has no name")
	case j.Schedule.spec == "":
		return fmt.Errorf("job %q has no schedule", j.Name)
	case j.Jitter < 0:
		return fmt.Errorf("job %q has a negative jitter", j.Name)
	case j.Timeout <= 0:
		return fmt.Errorf("job %q has no timeout", j.Name)
	case j.Run == nil:
		return fmt.Errorf("job %q has nothing to run", j.Name)
	}
	return nil
}

// Skip says why a run that was due did not happen.
type Skip string

// The reasons for a skip.
const (
	Overlap Skip = "overlap" // the job's previous run had not ended
	Missed  Skip = "missed"  // the machine was suspended, the process stopped, or the clock set forward
)

// Options are what a [Scheduler] needs of its surroundings. All are optional. The hooks are
// called from several goroutines and must return at once.
type Options struct {
	Node    string                                           // name of this node, for the phase of jobs
	Log     *slog.Logger                                     // gets panics
	OnSkip  func(job string, why Skip, due time.Time, n int) // n runs of the job were skipped, at the firing due or from it on
	OnPanic func(job string, recovered any)                  // a run of the job panicked
	now     func() time.Time                                 // the wall clock; tests step it
}

// Scheduler runs jobs when they are due, each in its own goroutine, never two runs of one job at
// a time. A run that is due while the last one goes on is skipped, not queued. After a suspend,
// or when the clock was set forward, an overdue job runs once. When it was set back, jobs are due
// at their next firing from there on. Runs missed while the process was down are not known here.
type Scheduler struct {
	opt     Options
	wake    chan struct{} // Replace to Run; one pending wake-up is enough
	started atomic.Bool
	tick    atomic.Pointer[time.Time]

	mu      sync.Mutex // guards what follows; no hook or job is called under it
	jobs    map[string]*entry
	queue   queue                              // the same entries, the next due first
	running map[string]context.CancelCauseFunc // by name: a redefined job still does not overlap with itself
	last    time.Time                          // wall clock of the last pass
}

// entry is a job with its plan.
type entry struct {
	Job
	phase time.Duration
	next  time.Time // wall clock only: differences must not use the monotonic clock, which sleeps in suspend
}

func (e *entry) plan(now time.Time) {
	e.next = e.Schedule.Next(now.Add(-e.phase))
	if !e.next.IsZero() {
		e.next = e.next.Add(e.phase)
	}
}

func (e *entry) due(now time.Time) bool { return !e.next.IsZero() && !e.next.After(now) }

// New returns a Scheduler without jobs.
func New(o Options) *Scheduler {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.OnSkip == nil {
		o.OnSkip = func(string, Skip, time.Time, int) {}
	}
	if o.OnPanic == nil {
		o.OnPanic = func(string, any) {}
	}
	if o.now == nil {
		o.now = time.Now
	}
	return &Scheduler{
		opt:     o,
		wake:    make(chan struct{}, 1),
		jobs:    map[string]*entry{},
		running: map[string]context.CancelCauseFunc{},
	}
}

func (s *Scheduler) wall() time.Time { return s.opt.now().Round(0) }

// Replace makes jobs the whole set of jobs, or changes nothing and returns an error. A job that
// is unchanged keeps its plan and its run goes on (its next run is by the new Run); one that was
// removed or redefined has its run cancelled with [ErrReplaced].
func (s *Scheduler) Replace(jobs []Job) error {
	next := make(map[string]*entry, len(jobs))
	var errs []error
	for _, j := range jobs {
		if err := j.check(); err != nil {
			errs = append(errs, err)
		} else if next[j.Name] != nil {
			errs = append(errs, fmt.Errorf("two jobs are named %q", j.Name))
		}
		next[j.Name] = &entry{Job: j, phase: Phase(s.opt.Node, j.Name, j.Jitter)}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.wall()
	queue := make(queue, 0, len(next))
	for name, e := range next {
		if old := s.jobs[name]; old != nil && old.same(e.Job) {
			e.next = old.next
		} else {
			e.plan(now)
		}
		queue = append(queue, e)
	}
	for name, old := range s.jobs {
		if e := next[name]; e == nil || !old.same(e.Job) {
			if cancel := s.running[name]; cancel != nil {
				cancel(ErrReplaced)
			}
		}
	}
	heap.Init(&queue)
	s.jobs, s.queue = next, queue
	select {
	case s.wake <- struct{}{}:
	default:
	}
	return nil
}

// Next returns when the job is due next, or the zero time if there is no such job.
func (s *Scheduler) Next(job string) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.jobs[job]; e != nil {
		return e.next
	}
	return time.Time{}
}

// LastTick returns when the scheduler last looked at its jobs, with a monotonic reading; the zero
// time before [Scheduler.Run]. It is never older than [MaxSleep] by much while the scheduler lives.
func (s *Scheduler) LastTick() time.Time {
	if t := s.tick.Load(); t != nil {
		return *t
	}
	return time.Time{}
}

// Run runs the jobs until ctx ends, then ends their contexts, waits for all of them and returns
// nil. It can be called once.
func (s *Scheduler) Run(ctx context.Context) error {
	if s.started.Swap(true) {
		return errors.New("schedule: Run called twice")
	}
	var runs sync.WaitGroup
	defer runs.Wait()

	s.mu.Lock()
	s.replan(s.wall()) // nothing is overdue at the start, however long ago the jobs were set
	s.mu.Unlock()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.wake:
		case <-timer.C:
		}
		timer.Reset(s.pass(ctx, &runs))
	}
}

// replan sets all plans anew from now on. The caller holds mu.
func (s *Scheduler) replan(now time.Time) {
	for _, e := range s.queue {
		e.plan(now)
	}
	heap.Init(&s.queue)
	s.last = now
}

type skipped struct {
	job string
	why Skip
	due time.Time
	n   int
}

// pass starts what is due and returns how long to sleep.
func (s *Scheduler) pass(ctx context.Context, runs *sync.WaitGroup) time.Duration {
	tick := time.Now()
	s.tick.Store(&tick)
	var skips []skipped
	defer func() {
		for _, k := range skips {
			s.opt.OnSkip(k.job, k.why, k.due, k.n)
		}
	}()

	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.wall()
	if now.Before(s.last) {
		s.replan(now)
	}
	s.last = now
	for len(s.queue) > 0 && s.queue[0].due(now) {
		e := s.queue[0]
		missed := e.next.Add(-e.phase)
		n, due := e.Schedule.count(missed, now.Add(-e.phase))
		if n > 0 {
			skips = append(skips, skipped{e.Name, Missed, missed, n})
		}
		e.plan(now)
		heap.Fix(&s.queue, 0)
		if s.running[e.Name] != nil {
			skips = append(skips, skipped{e.Name, Overlap, due, 1})
			continue
		}
		s.start(ctx, runs, e.Job, due)
	}
	if len(s.queue) == 0 || s.queue[0].next.IsZero() {
		return MaxSleep
	}
	return min(MaxSleep, s.queue[0].next.Sub(now))
}

// start begins the run of j for the firing due. The caller holds mu.
func (s *Scheduler) start(ctx context.Context, runs *sync.WaitGroup, j Job, due time.Time) {
	ctx, cancel := context.WithCancelCause(ctx)
	s.running[j.Name] = cancel
	runs.Go(func() {
		defer func() {
			s.mu.Lock()
			delete(s.running, j.Name)
			s.mu.Unlock()
			cancel(nil)
		}()
		defer func() {
			if r := recover(); r != nil {
				s.opt.Log.Error("job panicked; the daemon goes on, please report this",
					slog.String("job", j.Name), slog.Any("panic", r), slog.String("stack", string(debug.Stack())))
				s.opt.OnPanic(j.Name, r)
			}
		}()
		ctx, cancel := context.WithTimeout(ctx, j.Timeout)
		defer cancel()
		j.Run(ctx, due)
	})
}

// queue is a heap of entries, the next due first. Names decide ties, so that the order is stable.
// What has no next firing within the library's five years comes last.
type queue []*entry

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	a, b := q[i], q[j]
	if a.next.IsZero() || b.next.IsZero() {
		return !a.next.IsZero()
	}
	return cmp.Or(a.next.Compare(b.next), cmp.Compare(a.Name, b.Name)) < 0
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)   { *q = append(*q, x.(*entry)) }
func (q *queue) Pop() any {
	old := *q
	last := old[len(old)-1]
	*q = old[:len(old)-1]
	return last
}
