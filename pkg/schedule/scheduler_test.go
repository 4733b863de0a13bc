package schedule

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// rig is a scheduler that keeps what its hooks were told, on a wall clock that can be set.
type rig struct {
	*Scheduler
	t      *testing.T
	start  time.Time
	cancel context.CancelFunc
	done   chan error

	mu     sync.Mutex
	step   time.Duration // by which the wall clock was set
	skips  map[string]int
	panics []string
}

func newRig(t *testing.T, log *slog.Logger) *rig {
	r := &rig{t: t, start: time.Now(), skips: map[string]int{}, done: make(chan error, 1)}
	r.Scheduler = New(Options{
		Node: "node1",
		Log:  log,
		OnSkip: func(job string, why Skip, _ time.Time, n int) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.skips[job+" "+string(why)] += n
		},
		OnPanic: func(job string, v any) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.panics = append(r.panics, fmt.Sprint(job, " ", v))
		},
		now: func() time.Time {
			r.mu.Lock()
			defer r.mu.Unlock()
			return time.Now().Add(r.step)
		},
	})
	return r
}

func (r *rig) run(jobs ...Job) {
	r.t.Helper()
	if err := r.Replace(jobs); err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(r.t.Context())
	r.cancel = cancel
	go func() { r.done <- r.Run(ctx) }()
}

// stop ends the scheduler at a moment between ticks and waits for it.
func (r *rig) stop() {
	r.t.Helper()
	r.cancel()
	if err := <-r.done; err != nil {
		r.t.Errorf("Run: %v", err)
	}
}

func (r *rig) setClock(by time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.step += by
}

func (r *rig) skipped() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.skips
}

func sleepCtx(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

func every(t *testing.T, name, spec string, run func(context.Context)) Job {
	return Job{Name: name, Schedule: mustParse(t, spec), Timeout: time.Hour, Run: func(ctx context.Context, _ time.Time) { run(ctx) }}
}

func TestSlowJobDelaysNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		var aRuns, bRuns, aNow int
		r.run(
			every(t, "a", "@every 5s", func(ctx context.Context) {
				if aNow++; aNow > 1 {
					t.Error("job a overlaps with itself")
				}
				aRuns++
				sleepCtx(ctx, 19*time.Second)
				aNow--
			}),
			every(t, "b", "@every 5s", func(ctx context.Context) {
				bRuns++
				sleepCtx(ctx, time.Second)
			}),
		)
		time.Sleep(2*time.Minute + 2*time.Second)
		r.stop()
		if aRuns != 6 || bRuns != 24 {
			t.Errorf("a ran %d times, b %d; want 6 and 24", aRuns, bRuns)
		}
		if diff := cmp.Diff(map[string]int{"a overlap": 18}, r.skipped()); diff != "" {
			t.Errorf("skips (-want +got):\n%s", diff)
		}
	})
}

func TestJitterDoesNotDrift(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		const jitter = 2 * time.Second
		var starts []time.Duration
		job := every(t, "rtt", "@every 10s", func(ctx context.Context) {
			starts = append(starts, time.Since(r.start))
			sleepCtx(ctx, 3*time.Second)
		})
		job.Jitter = jitter
		r.run(job)
		time.Sleep(610 * time.Second)
		r.stop()
		phase := Phase("node1", "rtt", jitter)
		if phase == 0 {
			t.Fatal("choose a name with a phase")
		}
		var want []time.Duration
		for i := range time.Duration(len(starts)) { // the bubble's clock starts at a multiple of 10 s
			want = append(want, i*10*time.Second+phase)
		}
		if diff := cmp.Diff(want, starts); diff != "" || len(starts) != 61 {
			t.Errorf("%d starts (-want +got):\n%s", len(starts), diff)
		}
	})
}

func TestClock(t *testing.T) {
	tests := []struct {
		name string
		step time.Duration // set 2 min 30 s after the start
		want []string      // runs after that, in wall time since the start
		miss int
	}{
		// The overdue job runs once, soon after; the three whole minutes passed over are missed.
		{"suspended for 3 min", 3*time.Minute + 10*time.Second, []string{"5m50s", "6m0s", "7m0s"}, 2},
		{"suspended for a day", 24 * time.Hour, []string{"24h2m40s", "24h3m0s", "24h4m0s"}, 1439},
		{"set back an hour", -time.Hour, []string{"-57m0s", "-56m0s"}, 0},
		{"set back a little", -20 * time.Second, []string{"3m0s", "4m0s"}, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, nil)
				var got []string
				r.run(every(t, "rtt", "* * * * *", func(context.Context) {
					got = append(got, r.wall().Sub(r.start).String())
				}))
				time.Sleep(2*time.Minute + 30*time.Second)
				synctest.Wait()
				got = nil
				r.setClock(tt.step)
				time.Sleep(2 * time.Minute)
				r.stop()
				if diff := cmp.Diff(tt.want, got); diff != "" {
					t.Errorf("runs (-want +got):\n%s", diff)
				}
				if n := r.skipped()["rtt missed"]; n != tt.miss {
					t.Errorf("%d missed, want %d", n, tt.miss)
				}
			})
		})
	}
}

// A run is told the firing it is for: without its jitter, and after a suspend the latest.
func TestDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		var got []string
		job := every(t, "rtt", "* * * * *", nil)
		job.Jitter = 20 * time.Second
		job.Run = func(_ context.Context, due time.Time) { got = append(got, due.Sub(r.start).String()) }
		r.run(job)
		time.Sleep(2*time.Minute + 30*time.Second)
		r.setClock(24 * time.Hour)
		time.Sleep(time.Minute)
		r.stop()
		if diff := cmp.Diff([]string{"0s", "1m0s", "2m0s", "24h2m0s", "24h3m0s"}, got); diff != "" {
			t.Errorf("due (-want +got):\n%s", diff)
		}
	})
}

// When a whole fleet restarts at once, nothing runs at once: each node waits for its own phase, which is the one it had before.
func TestNoHerdAfterRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const nodes, jitter = 200, 30 * time.Second
		start := time.Now()
		starts := map[string][]time.Duration{}
		var mu sync.Mutex
		boot := func() {
			ctx, cancel := context.WithCancel(t.Context())
			var fleet sync.WaitGroup
			for i := range nodes {
				node := fmt.Sprintf("node%d", i)
				s := New(Options{Node: node})
				job := Job{Name: "rtt", Schedule: mustParse(t, "*/5 * * * *"), Jitter: jitter, Timeout: time.Minute, Run: func(context.Context, time.Time) {
					mu.Lock()
					defer mu.Unlock()
					starts[node] = append(starts[node], time.Since(start)%(5*time.Minute))
				}}
				if err := s.Replace([]Job{job}); err != nil {
					t.Fatal(err)
				}
				fleet.Go(func() { _ = s.Run(ctx) })
			}
			time.Sleep(8*time.Minute + 17*time.Second)
			cancel()
			fleet.Wait()
		}
		boot()
		boot()
		var slices [10]int
		for node, at := range starts {
			if len(at) < 2 || at[0] != at[1] {
				t.Fatalf("%s starts at %v of the period", node, at)
			}
			slices[at[0]*10/jitter]++
		}
		for i, n := range slices {
			if n > nodes/5 {
				t.Errorf("%d of %d nodes start in tenth %d of the jitter", n, nodes, i)
			}
		}
	})
}

func TestNothingRunsAtStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		runs := 0
		if err := r.Replace([]Job{every(t, "rtt", "@every 1h", func(context.Context) { runs++ })}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5*time.Hour + time.Minute) // the daemon was slow to come up
		r.run(every(t, "rtt", "@every 1h", func(context.Context) { runs++ }))
		time.Sleep(time.Minute)
		r.stop()
		if runs != 0 || len(r.skipped()) != 0 {
			t.Errorf("%d runs, skips %v; want none", runs, r.skipped())
		}
	})
}

func TestPanickingJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		r := newRig(t, slog.New(slog.NewTextHandler(&log, nil)))
		good, bad := 0, 0
		r.run(
			every(t, "bad", "@every 1m", func(context.Context) { bad++; panic("boom") }),
			every(t, "good", "@every 1m", func(context.Context) { good++ }),
		)
		time.Sleep(3*time.Minute + time.Second)
		r.stop()
		if good != 3 || bad != 3 {
			t.Errorf("the good job ran %d times, the bad one %d; want 3 each", good, bad)
		}
		if diff := cmp.Diff([]string{"bad boom", "bad boom", "bad boom"}, r.panics); diff != "" {
			t.Errorf("panics (-want +got):\n%s", diff)
		}
		if !strings.Contains(log.String(), "job=bad") || !strings.Contains(log.String(), "scheduler_test.go") {
			t.Errorf("the log tells neither job nor stack:\n%s", log.String())
		}
	})
}

func TestTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		var took time.Duration
		var cause error
		job := every(t, "rtt", "@hourly", func(ctx context.Context) {
			begin := time.Now()
			<-ctx.Done()
			took, cause = time.Since(begin), context.Cause(ctx)
		})
		job.Timeout = 7 * time.Second
		r.run(job)
		time.Sleep(time.Hour + time.Minute)
		r.stop()
		if took != job.Timeout || !errors.Is(cause, context.DeadlineExceeded) {
			t.Errorf("ended after %s by %v", took, cause)
		}
	})
}

// A run in progress outlives a reload that leaves its job as it is, and nothing else.
func TestReplace(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Job) // nil: the job is removed
		want   error      // what ends the run
	}{
		{"unchanged", func(*Job) {}, context.DeadlineExceeded},
		{"definition", func(j *Job) { j.Definition = "new" }, ErrReplaced},
		{"schedule", func(j *Job) { j.Schedule = Schedule{spec: "@every 30m", every: 30 * time.Minute} }, ErrReplaced},
		{"jitter", func(j *Job) { j.Jitter = time.Second }, ErrReplaced},
		{"timeout", func(j *Job) { j.Timeout++ }, ErrReplaced},
		{"removed", nil, ErrReplaced},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, nil)
				var ended []error
				job := every(t, "rtt", "@hourly", func(ctx context.Context) {
					<-ctx.Done()
					ended = append(ended, context.Cause(ctx))
				})
				job.Timeout = 10 * time.Minute
				r.run(job)
				time.Sleep(time.Hour + time.Minute)

				other := every(t, "other", "@hourly", func(context.Context) {})
				next := []Job{other}
				if tt.change != nil {
					changed := job
					tt.change(&changed)
					next = append(next, changed)
				}
				if err := r.Replace(next); err != nil {
					t.Fatal(err)
				}
				time.Sleep(20 * time.Minute)
				r.stop()
				if len(ended) != 1 || !errors.Is(ended[0], tt.want) {
					t.Errorf("runs ended by %v, want one by %v", ended, tt.want)
				}
				if got := r.Next("rtt").IsZero(); got != (tt.change == nil) {
					t.Errorf("planned next: %s", r.Next("rtt"))
				}
			})
		})
	}
}

// A redefined job whose old run is slow to end still does not overlap with itself, and is not
// cancelled again by the next reload.
func TestReplaceDoesNotOverlap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		now := 0
		job := every(t, "rtt", "@every 1m", func(ctx context.Context) {
			if now++; now > 1 {
				t.Error("overlap")
			}
			<-ctx.Done()
			time.Sleep(90 * time.Second) // teardown that takes its time
			now--
		})
		r.run(job)
		time.Sleep(61 * time.Second)
		job.Definition = "2"
		if err := r.Replace([]Job{job}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(60 * time.Second)
		r.stop()
		if n := r.skipped()["rtt overlap"]; n != 1 {
			t.Errorf("%d skips, want 1", n)
		}
	})
}

func TestReplaceIsAllOrNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		runs := 0
		good := every(t, "good", "@every 1m", func(context.Context) { runs++ })
		r.run(good)
		err := r.Replace([]Job{
			every(t, "new", "@every 1s", func(context.Context) { t.Error("ran a job of a refused set") }),
			{Name: "empty"},
			{Schedule: good.Schedule},
			every(t, "new", "@every 1s", func(context.Context) {}),
		})
		for _, want := range []string{`two jobs are named "new"`, `job "empty" has no schedule`, "a job has no name"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("Replace: %v; want it to say %q", err, want)
			}
		}
		time.Sleep(3*time.Minute + time.Second)
		r.stop()
		if runs != 3 {
			t.Errorf("the old job ran %d times, want 3", runs)
		}
	})
}

func TestRunJoinsEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		ended := false
		r.run(every(t, "rtt", "@every 1s", func(ctx context.Context) {
			<-ctx.Done()
			time.Sleep(5 * time.Second)
			ended = true
		}))
		time.Sleep(2500 * time.Millisecond)
		r.stop()
		if !ended {
			t.Error("Run returned before its job")
		}
		if err := r.Run(t.Context()); err == nil {
			t.Error("Run can be called twice")
		}
	})
}

// What a watchdog looks at moves although no job is due for months.
func TestLastTick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		if !r.LastTick().IsZero() {
			t.Error("ticked before Run")
		}
		r.run(every(t, "rtt", "@yearly", func(context.Context) {}))
		for range 20 {
			time.Sleep(7 * time.Second)
			synctest.Wait()
			if age := time.Since(r.LastTick()); age > MaxSleep {
				t.Fatalf("last tick %s ago", age)
			}
		}
		r.stop()
	})
}
