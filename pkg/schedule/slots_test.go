package schedule

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestSlots(t *testing.T) {
	const length, n = 10 * time.Second, 6
	type step struct{ after, by time.Duration }
	tests := []struct {
		name   string
		late   time.Duration // after the start
		visit  time.Duration // how long each visit takes
		slow   int           // the slot whose visit takes 25 s
		step   step          // of the wall clock
		want   []string      // slot@wall time since the start
		passed int
	}{
		{name: "in time", visit: time.Second, slow: -1, want: []string{"0@0s", "1@10s", "2@20s", "3@30s", "4@40s", "5@50s"}},
		{name: "early", late: -3 * time.Second, visit: time.Second, slow: -1, want: []string{"0@0s", "1@10s", "2@20s", "3@30s", "4@40s", "5@50s"}},
		{name: "late", late: 23 * time.Second, visit: time.Second, slow: -1, want: []string{"2@23s", "3@30s", "4@40s", "5@50s"}, passed: 2},
		{name: "too late", late: time.Hour, slow: -1, passed: 6},
		{name: "one visit is slow", visit: time.Second, slow: 1, want: []string{"0@0s", "1@10s", "3@35s", "4@40s", "5@50s"}, passed: 1},
		{name: "visits fill their slots", visit: length, slow: -1, want: []string{"0@0s", "1@10s", "2@20s", "3@30s", "4@40s", "5@50s"}},
		{
			name: "suspended, or the clock set forward", visit: time.Second, slow: -1, step: step{15 * time.Second, 20 * time.Second},
			want: []string{"0@0s", "1@10s", "4@40s", "5@50s"}, passed: 2,
		},
		{
			name: "the clock set back", visit: time.Second, slow: -1, step: step{25 * time.Second, -12 * time.Second},
			want: []string{"0@0s", "1@10s", "2@20s", "1@18s", "2@20s", "3@30s", "4@40s", "5@50s"},
		},
		{
			name: "set back to before the start", visit: time.Second, slow: -1, step: step{15 * time.Second, -30 * time.Second},
			want: []string{"0@0s", "1@10s", "0@0s", "1@10s", "2@20s", "3@30s", "4@40s", "5@50s"},
		},
		{name: "set forward beyond the end", visit: time.Second, slow: -1, step: step{15 * time.Second, time.Hour}, want: []string{"0@0s", "1@10s"}, passed: 4},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now().Add(-tt.late)
				began := time.Now()
				var by atomic.Int64
				wall := func() time.Time { return time.Now().Add(time.Duration(by.Load())) }
				if tt.step.after > 0 {
					time.AfterFunc(tt.step.after, func() { by.Store(int64(tt.step.by)) })
				}
				var got []string
				passed := slots(t.Context(), wall, start, length, n, func(_ context.Context, k int) {
					got = append(got, fmt.Sprintf("%d@%s", k, wall().Sub(start)))
					if d := tt.visit; k == tt.slow {
						time.Sleep(25 * time.Second)
					} else {
						time.Sleep(d)
					}
				})
				if diff := cmp.Diff(tt.want, got); diff != "" || passed != tt.passed {
					t.Errorf("passed %d, want %d; visits (-want +got):\n%s", passed, tt.passed, diff)
				}
				if took := time.Since(began); took > 2*n*length {
					t.Errorf("took %s", took)
				}
			})
		})
	}
}

func TestSlotsCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		visits := 0
		time.AfterFunc(15*time.Second, cancel)
		began := time.Now()
		Slots(ctx, began, 10*time.Second, 100, func(ctx context.Context, _ int) {
			visits++
			sleepCtx(ctx, time.Minute)
		})
		if took := time.Since(began); visits != 1 || took != 15*time.Second {
			t.Errorf("%d visits in %s", visits, took)
		}
		visits = 0
		Slots(ctx, began, 10*time.Second, 100, func(context.Context, int) { visits++ })
		if visits != 0 {
			t.Error("visits after the end")
		}
	})
}
