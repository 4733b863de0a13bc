// Package schedule decides when jobs run and who may use a port meanwhile. It knows nothing of
// probes: it is the only owner of cron syntax, of wake-ups and of the lock on a port.
//
//   - [Parse] turns a cron spec into a [Schedule].
//   - [Scheduler] runs jobs by their schedules.
//   - [Slots] walks through the slots of a time-table by the wall clock.
//   - [Gate] keeps heavy jobs alone on their port.
package schedule

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"strconv"
	"strings"
	"time"
	_ "time/tzdata" // a zone that works on one node must work in an image without zoneinfo

	"github.com/robfig/cron/v3"
)

const (
	maxSpec  = 256                  // bytes of a spec
	maxEvery = 366 * 24 * time.Hour // longest @every
	maxCount = 10_000               // firings Count looks for one by one
	// maxSearch bounds Next for dates that a zone leaves out each time they come round; the
	// library itself gives up after five years.
	maxSearch = 10 * 366 * 24 * time.Hour
)

// Schedule is a parsed spec. The zero Schedule never fires. Schedules are equal when their
// [Schedule.String] is.
type Schedule struct {
	spec  string
	cron  cron.Schedule  // nil for @every
	zone  *time.Location // in which cron counts
	every time.Duration  // whole seconds
}

// Parse reads a spec as robfig/cron does: five fields (minute, hour, day of month, month, day of
// week), a descriptor (@hourly, @daily, @weekly, @monthly, @yearly) or "@every 90s", each
// optionally after TZ=Zone or CRON_TZ=Zone and a blank. It differs from robfig/cron where that
// would surprise a fleet:
//
//   - without a zone a spec is in UTC on every node ("TZ=Local …" is the node's own zone);
//   - @every counts from the Unix epoch, not from the start of the process, so that a restart
//     does not move it and nodes agree on it;
//   - what would be rounded, never fire, or mean something else than it says is an error.
func Parse(spec string) (Schedule, error) {
	if len(spec) > maxSpec {
		return Schedule{}, fmt.Errorf("longer than %d bytes", maxSpec)
	}
	fields := strings.Fields(spec)
	if len(fields) == 0 {
		return Schedule{}, errors.New("empty")
	}
	s := Schedule{spec: strings.Join(fields, " "), zone: time.UTC}

	// The library panics on a zone prefix that no blank follows, so it never gets to see one.
	if name, ok := zoneName(fields[0]); ok {
		fields = fields[1:]
		var err error
		switch {
		case name == "":
			return Schedule{}, errors.New("no zone after the =; write for instance TZ=UTC or TZ=Europe/Rome")
		case len(fields) == 0:
			return Schedule{}, fmt.Errorf("nothing after the zone; write for instance %q", s.spec+" 0 2 * * *")
		}
		if _, again := zoneName(fields[0]); again {
			return Schedule{}, errors.New("more than one time zone")
		}
		if s.zone, err = time.LoadLocation(name); err != nil {
			return Schedule{}, fmt.Errorf("time zone %q: %w", name, err)
		}
	}
	if fields[0] == "@every" {
		return s.parseEvery(fields[1:])
	}
	for _, f := range fields {
		if err := checkField(f); err != nil {
			return Schedule{}, err
		}
	}
	if len(fields) == 5 && stepTooWide(fields) {
		return Schedule{}, fmt.Errorf("a step in %q is wider than its field, so it would fire only at the start of the range; "+
			"for a period that no field holds use for instance \"@every 90m\"", s.spec)
	}
	c, err := cron.ParseStandard(strings.Join(fields, " "))
	if err != nil {
		return Schedule{}, err
	}
	s.cron = c
	if sc, ok := c.(*cron.SpecSchedule); ok {
		sc.Location = time.UTC // see Next
	}
	if s.Next(reference).IsZero() {
		return Schedule{}, errors.New("never fires: no such date exists")
	}
	return s, nil
}

func zoneName(field string) (string, bool) {
	if name, ok := strings.CutPrefix(field, "TZ="); ok {
		return name, true
	}
	return strings.CutPrefix(field, "CRON_TZ=")
}

func (s Schedule) parseEvery(args []string) (Schedule, error) {
	if len(args) != 1 {
		return Schedule{}, errors.New(`@every needs one duration, for instance "@every 5m"`)
	}
	d, err := time.ParseDuration(args[0])
	switch {
	case err != nil:
		return Schedule{}, fmt.Errorf("@every %q is not a duration; write for instance 90s, 5m or 36h", args[0])
	case d < time.Second || d%time.Second != 0:
		return Schedule{}, fmt.Errorf("@every %s: the period must be whole seconds, at least 1s", args[0])
	case d > maxEvery:
		return Schedule{}, fmt.Errorf("@every %s: the period must be at most %s", args[0], maxEvery)
	}
	s.every = d
	return s, nil
}

// checkField refuses what the library takes for something else: an empty list element matches
// nothing (", * * * *" then searches five years in vain), "*-5" is taken for "*".
func checkField(f string) error {
	for part := range strings.SplitSeq(f, ",") {
		switch {
		case part == "":
			return fmt.Errorf("empty element in the list %q", f)
		case strings.HasPrefix(part, "*-"), strings.HasPrefix(part, "?-"):
			return fmt.Errorf("range %q must start with a number", part)
		}
	}
	return nil
}

// stepTooWide reports a step as wide as its field, such as the "*/90" minutes that people write
// for an hour and a half and that fires each hour.
func stepTooWide(fields []string) bool {
	for i, width := range []int{60, 24, 31, 12, 7} {
		for part := range strings.SplitSeq(fields[i], ",") {
			_, step, _ := strings.Cut(part, "/")
			if n, err := strconv.Atoi(step); err == nil && n >= width {
				return true
			}
		}
	}
	return false
}

// String returns the spec with its blanks normalised.
func (s Schedule) String() string { return s.spec }

// Next returns the first firing after t, in t's zone; the zero time if there is none. A schedule
// fires whenever the clock on the wall of its zone matches: twice if the clock is put back over
// that time, not at all if it is put forward over it.
func (s Schedule) Next(t time.Time) time.Time {
	switch {
	case s.every > 0:
		period := int64(s.every / time.Second)
		return time.Unix((floorDiv(t.Unix(), period)+1)*period, 0).In(t.Location())
	case s.cron == nil:
		return time.Time{}
	}
	// The library is asked in UTC only, where no wall time is missing or repeated: at some of
	// those it answers with the past, or never. So go from one change of the zone's offset to the
	// next; between two, the wall clock is UTC plus a constant.
	after, at := t, t.In(s.zone)
	for at.Sub(t) < maxSearch {
		_, seconds := at.Zone()
		offset := time.Duration(seconds) * time.Second
		next := s.cron.Next(after.UTC().Add(offset))
		if next.IsZero() {
			return next
		}
		next = next.Add(-offset)
		_, end := at.ZoneBounds()
		if end.IsZero() || next.Before(end) {
			return next.In(t.Location())
		}
		after, at = end.Add(-time.Second), end.In(s.zone) // the library looks from the next second on
	}
	return time.Time{}
}

// Count returns how many firings fall into (from, to]. A cron schedule is counted up to 10,000,
// a week of every minute.
func (s Schedule) Count(from, to time.Time) int {
	n, _ := s.count(from, to)
	return n
}

// count is Count, with the last of the firings it counted; from if there is none.
func (s Schedule) count(from, to time.Time) (n int, last time.Time) {
	last = from
	if s.every > 0 {
		period := int64(s.every / time.Second)
		end := floorDiv(to.Unix(), period)
		if n = max(0, int(end-floorDiv(from.Unix(), period))); n > 0 {
			last = time.Unix(end*period, 0).In(from.Location())
		}
		return n, last
	}
	for t := s.Next(from); n < maxCount && !t.IsZero() && !t.After(to); t = s.Next(t) {
		n, last = n+1, t
	}
	return n, last
}

// Ordinal numbers the firings of s: of a firing t it returns the same number on every node and
// after every restart, and one more than of the firing before it. That holds but for the days on
// which the clocks of its zone are changed: a firing in the hour that comes twice has the same
// number both times, and that of one in the hour that is left out is not used.
func (s Schedule) Ordinal(t time.Time) int64 {
	if s.every > 0 {
		return floorDiv(t.Unix(), int64(s.every/time.Second))
	}
	c, ok := s.cron.(*cron.SpecSchedule)
	if !ok {
		return 0
	}
	wall := t.In(s.zone)
	today := time.Date(wall.Year(), wall.Month(), wall.Day(), 0, 0, 0, 0, time.UTC)
	var days int64 // with firings, before today
	for d := reference; d.Before(today); d = d.AddDate(0, 0, 1) {
		if onDay(c, d) {
			days++
		}
	}
	const minutes, hours = 1<<60 - 1, 1<<24 - 1
	perHour, perDay := ones(c.Minute&minutes), ones(c.Hour&hours)
	n := days * perHour * perDay
	if onDay(c, today) {
		n += ones(c.Hour&(1<<wall.Hour()-1))*perHour + ones(c.Minute&(1<<wall.Minute()-1)&-(c.Hour>>wall.Hour()&1))
	}
	return n
}

func ones(set uint64) int64 { return int64(bits.OnesCount64(set)) }

// onDay reports whether c has firings on a day: its two fields for days are alternatives if
// neither is a star, as the library does it.
func onDay(c *cron.SpecSchedule, day time.Time) bool {
	const star = 1 << 63
	dom, dow := c.Dom>>day.Day()&1 != 0, c.Dow>>day.Weekday()&1 != 0
	switch {
	case c.Month>>day.Month()&1 == 0:
		return false
	case (c.Dom|c.Dow)&star != 0:
		return dom && dow
	}
	return dom || dow
}

func floorDiv(a, b int64) int64 {
	q := a / b
	if a%b < 0 {
		q--
	}
	return q
}

// reference is where specs are looked at without regard to the present day, so that the same
// spec gives the same answer whenever it is asked: a Monday, the first day of a leap year.
var reference = time.Date(2024, time.January, 1, 0, 0, 0, 0, time.UTC)

// Interval returns the longest regular gap between two firings of s: the time after which a run
// is overdue, whatever the hour. "*/5 9-17 * * Mon-Fri" has a gap of five minutes at most times,
// but of 63h5m over the weekend, which must not look like a fault. Gaps are looked at over eight
// days, or four firings if those are further apart. It returns 0 for the zero Schedule.
func Interval(s Schedule) time.Duration {
	if s.every > 0 {
		return s.every
	}
	const horizon, firings = 8 * 24 * time.Hour, 5
	var longest time.Duration
	last := s.Next(reference)
	for n := 1; !last.IsZero() && (n < firings || last.Sub(reference) < horizon); n++ {
		next := s.Next(last)
		if next.IsZero() {
			break
		}
		longest = max(longest, next.Sub(last))
		last = next
	}
	return longest
}

// Phase returns how long after each firing of its schedule a job with that jitter starts on a
// node: a fixed time in [0, jitter) drawn from the two names. It is the same for each firing and
// after a restart, so the cadence keeps to the schedule and never drifts, while a fleet with one
// schedule spreads over the whole jitter.
func Phase(node, job string, jitter time.Duration) time.Duration {
	if jitter <= 0 {
		return 0
	}
	sum := sha256.Sum256([]byte(node + "\x00" + job))
	hi, _ := bits.Mul64(binary.BigEndian.Uint64(sum[:8]), uint64(jitter))
	return time.Duration(hi)
}
