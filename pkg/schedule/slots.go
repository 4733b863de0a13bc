package schedule

import (
	"context"
	"time"
)

// Slots calls visit for the slots 0 to n-1 of a time-table that began at start, each when the
// wall clock is in it: slot k lasts from start+k·length to start+(k+1)·length. A slot in the past
// is passed over, and so is one whose time visit spent on the slot before it; Slots returns how
// many those were. After the clock was set back it waits, or visits slots again: other nodes go
// by the time that it is now. visit's context ends with ctx, not with the slot.
func Slots(ctx context.Context, start time.Time, length time.Duration, n int, visit func(ctx context.Context, k int)) (passed int) {
	return slots(ctx, time.Now, start, length, n, visit)
}

func slots(ctx context.Context, now func() time.Time, start time.Time, length time.Duration, n int, visit func(context.Context, int)) (passed int) {
	start = start.Round(0) // wall clock only, as in entry
	timer := time.NewTimer(0)
	defer timer.Stop()
	last := -1 // visited
	for ctx.Err() == nil {
		at := now().Round(0).Sub(start)
		k := int(floorDiv(int64(at), int64(length)))
		switch wait := time.Duration(max(0, last+1))*length - at; {
		case k == last: // over early
			timer.Reset(min(MaxSleep, wait))
		case k < 0:
			timer.Reset(min(MaxSleep, -at))
		default:
			passed += max(0, min(k, n)-last-1)
			if last = k; k >= n {
				return passed
			}
			visit(ctx, k)
			timer.Reset(0)
		}
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
	}
	return passed
}
