package guard

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

func at(t *testing.T, s string) time.Time {
	t.Helper()
	v, err := time.Parse("2006-01-02 15:04 MST", s)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// Windows go by the clocks of their zone, over midnight, weekends and changes of the clocks.
func TestWindow(t *testing.T) {
	for _, tt := range []struct {
		window, at string
		want       bool
	}{
		{"Mon-Fri 09:00-18:00", "2026-11-30 08:59 UTC", false}, // a Monday
		{"Mon-Fri 09:00-18:00", "2026-11-30 09:00 UTC", true},
		{"Mon-Fri 09:00-18:00", "2026-11-30 17:59 UTC", true},
		{"Mon-Fri 09:00-18:00", "2026-11-30 18:00 UTC", false},
		{"Mon-Fri 09:00-18:00", "2026-11-29 12:00 UTC", false}, // Sunday
		{"Fri-Mon 09:00-18:00", "2026-11-29 12:00 UTC", true},
		{"Fri-Mon 09:00-18:00", "2026-12-01 12:00 UTC", false},
		{"Mon,Wed-Thu 00:00-24:00", "2026-12-02 23:59 UTC", true},
		{"Mon,Wed-Thu 00:00-24:00", "2026-12-01 12:00 UTC", false},
		{"Sun 00:00-24:00", "2026-11-29 00:00 UTC", true},
		{"22:00-06:00", "2026-12-01 23:00 UTC", true},
		{"22:00-06:00", "2026-12-01 05:59 UTC", true},
		{"22:00-06:00", "2026-12-01 06:00 UTC", false},
		{"Sat 22:00-06:00", "2026-11-29 05:00 UTC", true},  // began on Saturday
		{"Sat 22:00-06:00", "2026-11-28 05:00 UTC", false}, // would have begun on Friday
		{"Sat 22:00-00:00", "2026-11-28 23:59 UTC", true},  // to midnight
		{"Sat 22:00-00:00", "2026-11-29 00:00 UTC", false}, // and no further
		{"UTC Mon 09:00-10:00", "2026-11-30 09:30 UTC", true},
		{"Europe/Berlin Sat 22:00-06:00", "2026-11-28 21:00 UTC", true},  // winter: 22:00
		{"Europe/Berlin Sat 22:00-06:00", "2026-07-04 20:00 UTC", true},  // summer: 22:00
		{"Europe/Berlin Sat 22:00-06:00", "2026-11-28 20:30 UTC", false}, // winter: 21:30
		{"Europe/Berlin 09:00-18:00", "2026-07-04 07:00 UTC", true},
		// 29 March 2026: 02:00 is followed by 03:00. 25 October: 02:00 to 03:00 is there twice.
		{"Europe/Berlin Sun 02:00-04:00", "2026-03-29 00:59 UTC", false}, // 01:59
		{"Europe/Berlin Sun 02:00-04:00", "2026-03-29 01:00 UTC", true},  // 03:00
		{"Europe/Berlin Sun 02:00-03:00", "2026-03-29 01:00 UTC", false}, // the hour was skipped
		{"Europe/Berlin Sun 02:00-03:00", "2026-10-25 00:30 UTC", true},
		{"Europe/Berlin Sun 02:00-03:00", "2026-10-25 01:30 UTC", true},
		{"Europe/Berlin Sun 02:00-03:00", "2026-10-25 02:00 UTC", false},
	} {
		w, err := ParseWindow(tt.window)
		if err != nil {
			t.Errorf("%s: %s", tt.window, err)
		} else if got := w.Contains(at(t, tt.at)); got != tt.want {
			t.Errorf("%q contains %s: %t, want %t", tt.window, tt.at, got, tt.want)
		}
	}
	w, err := ParseWindow("Europe/Berlin Sat 22:00-06:00")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := w.until(at(t, "2026-10-24 21:17 UTC")), at(t, "2026-10-25 05:00 UTC"); !got.Equal(want) { // 06:00 in winter
		t.Errorf("ends at %s, want %s", got, want)
	}
}

func TestWindowRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"":                          "not a time of the week",
		"Mon-Fri":                   "not a time of the week",
		"9:00-18:00":                "not a time of the week",
		"Mon-Fri 09:00 - 18:00":     "not a time of the week",
		"mon 09:00-18:00":           "neither a time zone nor days",
		"Foo 09:00-18:00":           "neither a time zone nor days",
		"UTC Foo 09:00-18:00":       "no day",
		"UTC Mon-Foo 09:00-18:00":   "no day",
		"Mon 24:00-25:00":           "no time of day",
		"Mon 24:00-06:00":           "no time of day",
		"Mon 09:60-10:00":           "no time of day",
		"Mon 09:00-09:00":           "ends when it begins",
		"Local Mon 09:00-10:00":     "neither a time zone nor days",
		"Mars/Olympus 09:00-10:00":  "neither a time zone nor days",
		"../etc/passwd 09:00-10:00": "not a time of the week",
		"Mon 09:00-10:00 UTC":       "not a time of the week",
	} {
		if _, err := ParseWindow(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// Whatever is taken for a window can be written down again, and holds some moment of a week, but not all.
func FuzzParseWindow(f *testing.F) {
	for _, s := range []string{"Mon-Fri 09:00-18:00", "Europe/Berlin Sat 22:00-06:00", "22:00-06:00", "Sat,Sun 00:00-24:00", "UTC 00:00-00:01"} {
		f.Add(s)
	}
	week := time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)
	f.Fuzz(func(t *testing.T, s string) {
		w, err := ParseWindow(s)
		if err != nil {
			return
		}
		again, err := ParseWindow(w.String())
		if err != nil {
			t.Fatalf("%q: not read again: %s", s, err)
		}
		some := false
		for m := range 7 * 24 * 60 {
			now := week.Add(time.Duration(m) * time.Minute)
			some = some || w.Contains(now)
			if w.Contains(now) != again.Contains(now) {
				t.Fatalf("%q and what was written differ at %s", s, now)
			}
		}
		if !some {
			t.Errorf("%q is never", s)
		}
	})
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func fixed(s Settings) func() Settings { return func() Settings { return s } }

// begin wants a probe to be admitted.
func begin(t *testing.T, g *Guard, u probe.Use) func(uint64) {
	t.Helper()
	end, no := g.Begin(t.Context(), u)
	if no != nil {
		t.Fatalf("refused: %s: %s", no.Reason, no.Detail)
	}
	return end
}

// refused wants it not to be.
func refused(t *testing.T, g *Guard, u probe.Use, reason probe.Reason, passing bool) {
	t.Helper()
	end, no := g.Begin(t.Context(), u)
	if no == nil {
		end(0)
		t.Fatalf("admitted, want %s", reason)
	}
	if no.Reason != reason || no.Passing != passing || no.Detail == "" {
		t.Errorf("refused with %+v, want %s, passing: %t", no, reason, passing)
	}
}

// The bytes of a day are spent once, by port, over restarts, and are there again on the next UTC day.
func TestBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := fixed(Settings{BytesPerDay: 1000})
		g := New(dir, s, quiet())
		time.Sleep(20 * time.Hour)
		begin(t, g, probe.Use{Port: "a/1", Bytes: 600})(600)
		refused(t, g, probe.Use{Port: "a/1", Bytes: 500}, probe.Budget, false)
		begin(t, g, probe.Use{Port: "b/1", Bytes: 1000})(10)
		under := begin(t, g, probe.Use{Port: "a/1", Bytes: 400})
		refused(t, g, probe.Use{Port: "a/1", Bytes: 1}, probe.Budget, false) // reserved
		refused(t, g, probe.Use{Port: "a/1"}, probe.Budget, false)
		under(100)
		under(100) // counts once

		g = New(dir, s, quiet())
		if got := g.Spent(); got["a/1"] != 700 || got["b/1"] != 10 {
			t.Errorf("after a restart %v are spent, want 700 of a/1 and 10 of b/1", got)
		}
		begin(t, g, probe.Use{Port: "a/1"})(500) // a responder does not know in advance
		refused(t, g, probe.Use{Port: "a/1"}, probe.Budget, false)
		time.Sleep(4 * time.Hour)
		begin(t, g, probe.Use{Port: "a/1", Bytes: 1000})(1)
		if got := g.Spent()["a/1"]; got != 1 {
			t.Errorf("%d bytes are spent on the new day, want 1", got)
		}
	})
}

func TestConcurrent(t *testing.T) {
	g := New("", fixed(Settings{Concurrent: 2}), quiet())
	one, two := begin(t, g, probe.Use{Port: "a/1"}), begin(t, g, probe.Use{Port: "b/1"})
	refused(t, g, probe.Use{Port: "c/1"}, probe.Budget, true)
	one(0)
	one(0)
	if got := g.Running(); got != 1 {
		t.Errorf("%d run, want 1", got)
	}
	three := begin(t, g, probe.Use{Port: "c/1"})
	two(0)
	three(0)
}

// No heavy probe begins in a window, or would reach into one.
func TestBlackout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // begins on Saturday, 2000-01-01 00:00 UTC
		w, err := ParseWindow("Sat 01:00-02:00")
		if err != nil {
			t.Fatal(err)
		}
		g := New("", fixed(Settings{Blackout: []Window{w}}), quiet())
		time.Sleep(59 * time.Minute)
		begin(t, g, probe.Use{Time: 30 * time.Second})(0)
		refused(t, g, probe.Use{Time: 2 * time.Minute}, probe.Blackout, false)
		time.Sleep(time.Minute)
		refused(t, g, probe.Use{}, probe.Blackout, false)
		time.Sleep(time.Hour)
		begin(t, g, probe.Use{})(0)
	})
}

func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		g := New(dir, fixed(Settings{}), quiet())
		if g.Paused() != nil {
			t.Fatal("paused from the start")
		}
		if _, err := g.Pause(2 * time.Hour); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if g = New(dir, fixed(Settings{}), quiet()); g.Paused() == nil {
			t.Error("a restart ended the pause")
		}
		time.Sleep(time.Hour)
		if g.Paused() != nil {
			t.Error("the pause does not end")
		}
		if _, err := g.Pause(0); err != nil {
			t.Fatal(err)
		}
		time.Sleep(1000 * time.Hour)
		if g = New(dir, fixed(Settings{}), quiet()); g.Paused() == nil {
			t.Error("a pause without end ended")
		}
		g.Resume()
		if g.Paused() != nil || New(dir, fixed(Settings{}), quiet()).Paused() != nil {
			t.Error("still paused")
		}
		if _, err := g.Pause(-time.Second); err == nil {
			t.Error("a pause of -1 s was taken")
		}
	})
}

func TestLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		g := New(dir, fixed(Settings{}), quiet())
		hold := func(holder string, d time.Duration) {
			t.Helper()
			if _, err := g.Hold(holder, d); err != nil {
				t.Fatal(err)
			}
		}
		hold("job-1", time.Hour)
		hold("job-2", 30*time.Minute)
		refused(t, g, probe.Use{}, probe.BusyPort, true)
		time.Sleep(45 * time.Minute)
		g = New(dir, fixed(Settings{}), quiet())
		if l := g.Leases(); len(l) != 1 || l[0].Holder != "job-1" {
			t.Errorf("after 45 min and a restart the leases are %v", l)
		}
		hold("job-1", time.Hour) // renewed
		time.Sleep(30 * time.Minute)
		refused(t, g, probe.Use{}, probe.BusyPort, true)
		if !g.Release("job-1") || g.Release("job-1") {
			t.Error("a release that is none")
		}
		begin(t, g, probe.Use{})(0)
		hold("job-3", time.Minute)
		time.Sleep(time.Minute)
		begin(t, g, probe.Use{})(0)
		for _, bad := range []string{"", "a b", "ä", strings.Repeat("x", 200)} {
			if _, err := g.Hold(bad, time.Hour); err == nil {
				t.Errorf("holder %q was taken", bad)
			}
		}
		for _, bad := range []time.Duration{0, -time.Hour, 1000 * time.Hour} {
			if _, err := g.Hold("a", bad); err == nil {
				t.Errorf("a lease of %s was taken", bad)
			}
		}
	})
}

// A file that can't be read, or whose folder can't be written, stops nothing.
func TestStateThatIsBroken(t *testing.T) {
	for name, text := range map[string]string{"no JSON": "{", "a list": "[]", "no day": `{"budget":{"day":"tomorrow","spent":{}}}`, "empty": ""} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, stateFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		g := New(dir, fixed(Settings{BytesPerDay: 10}), quiet())
		begin(t, g, probe.Use{Port: "a/1"})(3)
		if got := New(dir, fixed(Settings{}), quiet()).Spent()["a/1"]; got != 3 {
			t.Errorf("%s: %d bytes are kept, want 3", name, got)
		}
	}
	g := New("/proc/no/such/folder", fixed(Settings{}), quiet())
	if _, err := g.Pause(0); err != nil || g.Paused() == nil {
		t.Errorf("without a folder there is no pause: %v", err)
	}
}

func TestCommand(t *testing.T) {
	dir := t.TempDir()
	job := filepath.Join(dir, "job")
	for _, tt := range []struct {
		name string
		args []string
		want string // part of why; empty: none
	}{
		{"free", []string{"/bin/true"}, ""},
		{"a job", []string{"/bin/sh", "-c", "echo job 17; exit 3"}, "exit status 3): job 17"},
		{"not there", []string{"/no/such/program"}, "can't be run"},
		{"hangs", []string{"/bin/sh", "-c", "sleep 60 & sleep 60"}, "did not end"},
		{"talks much", []string{"/bin/sh", "-c", "yes | head -c 1000000; exit 1"}, "y y y"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := New("", fixed(Settings{Command: tt.args}), quiet())
			if tt.want == "" {
				begin(t, g, probe.Use{})(0)
				return
			}
			_, no := g.Begin(t.Context(), probe.Use{})
			if no == nil || no.Reason != probe.GuardCommand || !strings.Contains(no.Detail, tt.want) || len(no.Detail) > 1000 {
				t.Errorf("got %+v, want %q", no, tt.want)
			}
		})
	}
	t.Run("is not run for each probe", func(t *testing.T) {
		g := New("", fixed(Settings{Command: []string{"/bin/sh", "-c", "echo >> " + job}}), quiet())
		for range 5 {
			begin(t, g, probe.Use{})(0)
		}
		if b, _ := os.ReadFile(job); len(b) != 1 {
			t.Errorf("ran %d times, want once", len(b))
		}
	})
}
