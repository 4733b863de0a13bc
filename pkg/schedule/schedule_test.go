package schedule

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func mustParse(t testing.TB, spec string) Schedule {
	t.Helper()
	s, err := Parse(spec)
	if err != nil {
		t.Fatalf("Parse(%q): %v", spec, err)
	}
	return s
}

func TestParseNext(t *testing.T) {
	from := "2026-03-28T12:34:56.789Z" // a Saturday, the day before Europe's clocks go forward
	tests := []struct {
		spec string
		want string // the two firings after from, in UTC
	}{
		{"*/5 * * * *", "03-28 12:35:00, 03-28 12:40:00"},
		{"  0   2 * * * ", "03-29 02:00:00, 03-30 02:00:00"}, // UTC, whatever TZ says
		{"30 2 * * Mon-Fri", "03-30 02:30:00, 03-31 02:30:00"},
		{"0 0 29 2 *", "2028-02-29 00:00:00, 2032-02-29 00:00:00"},
		{"@hourly", "03-28 13:00:00, 03-28 14:00:00"},
		{"@every 10s", "03-28 12:35:00, 03-28 12:35:10"},
		{"@every 7m", "03-28 12:40:00, 03-28 12:47:00"},                // multiples of 7 min since the epoch
		{"TZ=Europe/Rome 0 2 * * *", "03-30 00:00:00, 03-31 00:00:00"}, // 02:00 of the 29th does not exist
		{"CRON_TZ=Europe/Rome 0 4 * * *", "03-29 02:00:00, 03-30 02:00:00"},
		{"TZ=America/New_York @daily", "03-29 04:00:00, 03-30 04:00:00"},
		{"TZ=UTC @every 1h", "03-28 13:00:00, 03-28 14:00:00"},
	}
	start, err := time.Parse(time.RFC3339Nano, from)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range tests {
		t.Run(tt.spec, func(t *testing.T) {
			s := mustParse(t, tt.spec)
			first := s.Next(start)
			second := s.Next(first)
			got := strings.ReplaceAll(fmt.Sprintf("%s, %s", first.UTC().Format(time.DateTime), second.UTC().Format(time.DateTime)), "2026-", "")
			if got != tt.want {
				t.Errorf("firings after %s:\n got %s\nwant %s", from, got, tt.want)
			}
		})
	}
}

func TestParseRefuses(t *testing.T) {
	tests := []struct{ spec, want string }{
		{"", "empty"},
		{" \t", "empty"},
		{"TZ=0", "nothing after the zone"},
		{"TZ=", "no zone after the ="},
		{"CRON_TZ=", "no zone after the ="},
		{"TZ= 0 2 * * *", "no zone after the ="},
		{"CRON_TZ=UTC", "nothing after the zone"},
		{"TZ=Europe/Rome", "nothing after the zone"},
		{"TZ=UTC TZ=0", "more than one time zone"},
		{"TZ=UTC CRON_TZ=UTC * * * * *", "more than one time zone"},
		{"TZ=Mars/Olympus 0 2 * * *", `time zone "Mars/Olympus"`},
		{"TZ=../../etc/passwd 0 2 * * *", "time zone"},
		{"* * * *", "expected exactly 5 fields"},
		{"0 * * * * *", "expected exactly 5 fields"},
		{", * * * *", "empty element"},
		{"1,,2 * * * *", "empty element"},
		{"5-2 * * * *", "beyond end of range"},
		{"*-5 * * * *", "must start with a number"},
		{"60 * * * *", "above maximum"},
		{"*/0 * * * *", "step"},
		{"*/90 * * * *", "wider than its field"},
		{"0 */24 * * *", "wider than its field"},
		{"*/99999999999999999999 * * * *", "parse int"},
		{"0 0 30 2 *", "never fires"},
		{"0 0 31 4,6,9,11 *", "never fires"},
		{"@reboot", "unrecognized descriptor"},
		{"@every", "needs one duration"},
		{"@every 1h 30m", "needs one duration"},
		{"@every soon", "not a duration"},
		{"@every 0s", "at least 1s"},
		{"@every -5m", "at least 1s"},
		{"@every 500ms", "at least 1s"},
		{"@every 1500ms", "whole seconds"},
		{"@every 9000h", "at most"},
		{strings.Repeat("1,", 200) + "2 * * * *", "longer than"},
	}
	for _, tt := range tests {
		t.Run(tt.spec, func(t *testing.T) {
			s, err := Parse(tt.spec)
			if err == nil {
				t.Fatalf("accepted; next firing %s", s.Next(reference))
			}
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %q does not say %q", err, tt.want)
			}
		})
	}
}

// Zones have hours that come twice, hours and whole days that never come. The first two of these
// keep robfig/cron itself busy for ever, or have it answer with the time it was asked from.
func TestNextWhereClocksChange(t *testing.T) {
	tests := []struct{ spec, after, want string }{
		{"TZ=Pacific/Apia 0 3 31 * *", "2011-10-31T13:00:00Z", "2011-12-30 13:00:00"}, // the day before was left out
		{"TZ=Asia/Bishkek 30 2 31 * *", "1999-10-30T20:30:00Z", "1999-10-30 21:30:00"},
		{"TZ=Europe/Rome */30 * * * *", "2026-10-25T00:30:00Z", "2026-10-25 01:00:00"}, // 02:00 again
		{"TZ=Europe/Rome 30 2 * * *", "2026-10-25T00:30:00Z", "2026-10-25 01:30:00"},
		{"TZ=Europe/Rome 30 2 * * *", "2026-03-28T01:30:00Z", "2026-03-30 00:30:00"}, // no 02:30 on the 29th
		{"TZ=Europe/Rome 0 3 * * *", "2026-03-28T02:00:00Z", "2026-03-29 01:00:00"},
		{"TZ=America/Sao_Paulo 0 0 * * *", "2018-11-03T03:00:00Z", "2018-11-05 02:00:00"},    // no midnight on the 4th
		{"TZ=Australia/Lord_Howe 15 2 * * *", "2026-10-03T15:45:00Z", "2026-10-04 15:15:00"}, // half an hour left out
	}
	for _, tt := range tests {
		after, err := time.Parse(time.RFC3339, tt.after)
		if err != nil {
			t.Fatal(err)
		}
		if got := mustParse(t, tt.spec).Next(after).Format(time.DateTime); got != tt.want {
			t.Errorf("%q fires after %s at %s, want %s", tt.spec, tt.after, got, tt.want)
		}
	}
}

// The zones must come out of the binary when the image has none.
func TestZoneWithoutZoneinfo(t *testing.T) {
	t.Setenv("ZONEINFO", "/nonexistent")
	mustParse(t, "TZ=America/New_York 0 2 * * *")
}

func TestZeroSchedule(t *testing.T) {
	var s Schedule
	if n := s.Next(reference); !n.IsZero() {
		t.Errorf("fires at %s", n)
	}
	if i := Interval(s); i != 0 {
		t.Errorf("interval %s", i)
	}
}

func TestInterval(t *testing.T) {
	day := 24 * time.Hour
	tests := []struct {
		spec string
		want time.Duration
	}{
		{"*/5 * * * *", 5 * time.Minute},
		{"@every 10s", 10 * time.Second},
		{"*/45 * * * *", 45 * time.Minute}, // 45, then 15 minutes
		{"*/5 9-17 * * Mon-Fri", 63*time.Hour + 5*time.Minute},
		{"0 2 * * *", day},
		{"@weekly", 7 * day},
		{"@monthly", 31 * day},
		{"@yearly", 366 * day},
		{"TZ=Asia/Tokyo 0 2 * * *", day},
	}
	for _, tt := range tests {
		if got := Interval(mustParse(t, tt.spec)); got != tt.want {
			t.Errorf("Interval(%q) = %s, want %s", tt.spec, got, tt.want)
		}
	}
}

func TestCount(t *testing.T) {
	at := func(d time.Duration) time.Time { return reference.Add(d) }
	tests := []struct {
		spec     string
		from, to time.Duration
		want     int
	}{
		{"@every 10s", 0, time.Minute, 6},
		{"@every 10s", -time.Second, time.Minute, 7},
		{"@every 10s", time.Second, 9 * time.Second, 0},
		{"@every 10s", time.Minute, 0, 0},
		{"@every 1s", 0, 365 * 24 * time.Hour, 365 * 24 * 3600},
		{"*/5 * * * *", 0, time.Hour, 12},
		{"*/5 * * * *", time.Hour, 0, 0},
		{"* * * * *", 0, 365 * 24 * time.Hour, maxCount},
	}
	for _, tt := range tests {
		if got := mustParse(t, tt.spec).Count(at(tt.from), at(tt.to)); got != tt.want {
			t.Errorf("%q: %d firings in (%s, %s], want %d", tt.spec, got, tt.from, tt.to, tt.want)
		}
	}
}

// Each firing has the number after the one before it, on every node and whenever it is asked.
func TestOrdinal(t *testing.T) {
	for _, spec := range []string{
		"@every 10s", "@every 36h", "0 2 * * *", "*/5 * * * *", "7,23 1-5,18 * * *", "0 3 * * Mon-Fri", "30 4 1,15 * *", "0 0 13 * Fri",
		"15 6 29 2 *", "0 12 */2 Jan,Jun *", "@hourly", "@weekly", "@monthly", "@yearly", "TZ=Asia/Kolkata 0 0 * * *", "0 0 ? * *",
	} {
		s := mustParse(t, spec)
		at := s.Next(time.Date(2026, time.December, 24, 13, 14, 15, 0, time.UTC))
		for n, next := s.Ordinal(at), s.Next(at); next.Sub(at) > 0 && next.Year() < 2040 && n < s.Ordinal(at)+500; next = s.Next(next) {
			if n++; s.Ordinal(next) != n {
				t.Errorf("%q: firing %s has number %d, want %d", spec, next, s.Ordinal(next), n)
				break
			}
		}
	}
	// Written down: another value after an update would make nodes of two versions disagree.
	at := time.Date(2026, time.December, 2, 2, 0, 0, 0, time.UTC)
	if got := mustParse(t, "0 2 * * *").Ordinal(at); got != 1066 {
		t.Errorf("number %d, was 1066", got)
	}
	if got := (Schedule{}).Ordinal(at); got != 0 {
		t.Errorf("the zero schedule has a firing %d", got)
	}

	// Where clocks change: the days go on, a firing of the repeated hour keeps its number.
	nightly := mustParse(t, "TZ=Europe/Rome 30 2 * * *")
	var got []int64
	day := nightly.Next(time.Date(2026, time.October, 24, 0, 0, 0, 0, time.UTC))
	for range 4 {
		got = append(got, nightly.Ordinal(day)-1027)
		day = nightly.Next(day)
	}
	if diff := cmp.Diff([]int64{0, 1, 1, 2}, got); diff != "" {
		t.Errorf("around the end of summer time (-want +got):\n%s", diff)
	}
}

func TestPhase(t *testing.T) {
	const jitter = 3 * time.Second
	if got := Phase("node1", "rtt/node2", 0); got != 0 {
		t.Errorf("without jitter: %s", got)
	}
	// Written down: another value after an update would shift the whole fleet at once.
	if got, want := Phase("node1", "rtt/node2", jitter), 2798699212*time.Nanosecond; got != want {
		t.Errorf("Phase is %d, was %d", got, want)
	}
	if Phase("node1", "2/node3", jitter) == Phase("node12", "/node3", jitter) {
		t.Error("names run into each other")
	}
	// A fleet must fill the whole jitter: 1,000 nodes leave none of ten slices sparse.
	var slices [10]int
	for i := range 1000 {
		p := Phase(fmt.Sprintf("node%d", i), "rtt", jitter)
		if p < 0 || p >= jitter {
			t.Fatalf("phase %s outside [0, %s)", p, jitter)
		}
		slices[p*10/jitter]++
	}
	for i, n := range slices {
		if n < 60 {
			t.Errorf("slice %d of the jitter holds %d of 1000 nodes: %v", i, n, slices)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"*/5 * * * *", "TZ=0", "CRON_TZ=UTC", "TZ=Europe/Rome 0 2 * * *", "@every 1h30m", "TZ=UTC @daily", ", * * * *",
		"0 0 30 2 *", "*-5 * * * *", "0 0 29 2 *", "TZ=UTC TZ=0", "1-5/2,7 0 ? Jan-Mar sun", "TZ=America/Sao_Paulo 0 0 * * *",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, spec string) {
		s, err := Parse(spec)
		if err != nil {
			return
		}
		last := reference
		for range 3 {
			next := s.Next(last)
			if !next.After(last) {
				t.Fatalf("%q fires at %s after %s", spec, next, last)
			}
			last = next
		}
		if i := Interval(s); i < time.Second {
			t.Fatalf("%q: interval %s", spec, i)
		}
		again, err := Parse(s.String())
		if err != nil || again.String() != s.String() {
			t.Fatalf("%q became %q: %v", spec, s, err)
		}
	})
}
