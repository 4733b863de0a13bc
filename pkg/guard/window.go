package guard

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	_ "time/tzdata" // a zone that works on one node must work in an image without zoneinfo
)

// Window is a time of the week, by the clocks of a time zone. The zero Window holds no moment.
type Window struct {
	zone       *time.Location
	days       [7]bool // on which it begins, from Sunday
	begin, end int     // minutes of the day; end <= begin: of the next day
	text       string
}

var (
	windowForm = regexp.MustCompile(`^(?:([A-Za-z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9_+-]+)*) )?(?:([A-Z][a-z]{2}(?:[-,][A-Z][a-z]{2})*) )?(\d\d):(\d\d)-(\d\d):(\d\d)$`)
	dayNames   = []string{"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"}
)

const windowHint = `write for instance "Mon-Fri 09:00-18:00" or "Europe/Berlin Sat,Sun 22:00-06:00": a time zone (UTC if left out), days (all if left out) and a time of day`

// ParseWindow reads "[ZONE] [DAYS] HH:MM-HH:MM". Days are Mon to Sun: single ones, lists with commas, ranges with a dash, which may
// go over the weekend. A time that ends before it begins, or at 00:00, ends on the next day; it belongs to the day on which it begins.
// Without a zone it is UTC, as in schedules.
func ParseWindow(s string) (Window, error) {
	w := Window{zone: time.UTC, text: s}
	m := windowForm.FindStringSubmatch(s)
	if m == nil {
		return Window{}, fmt.Errorf("%q is not a time of the week; %s", clip(s), windowHint)
	}
	zone, days := m[1], m[2]
	if days == "" && slices.Contains(dayNames, zone) { // the expression takes a lone day for a zone
		zone, days = "", zone
	} else if days == "" && zone != "" {
		if err := new(Window).setDays(zone); err == nil {
			zone, days = "", zone
		}
	}
	if zone != "" {
		var err error
		if w.zone, err = time.LoadLocation(zone); err != nil || zone == "Local" {
			return Window{}, fmt.Errorf("%q: %s is neither a time zone nor days; use a name such as Europe/Berlin or UTC, or days such as Mon-Fri", clip(s), zone)
		}
	}
	if err := w.setDays(days); err != nil {
		return Window{}, fmt.Errorf("%q: %w", clip(s), err)
	}
	var err error
	if w.begin, err = minutes(m[3], m[4], false); err == nil {
		w.end, err = minutes(m[5], m[6], true)
	}
	switch {
	case err != nil:
		return Window{}, fmt.Errorf("%q: %w", clip(s), err)
	case w.begin == w.end:
		return Window{}, fmt.Errorf("%q ends when it begins; for a whole day write 00:00-24:00", clip(s))
	}
	return w, nil
}

func (w *Window) setDays(s string) error {
	if s == "" {
		w.days = [7]bool{true, true, true, true, true, true, true}
		return nil
	}
	for _, part := range strings.Split(s, ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		i, j := slices.Index(dayNames, from), slices.Index(dayNames, to)
		if i < 0 || j < 0 {
			return fmt.Errorf("%q is no day; days are Mon, Tue, Wed, Thu, Fri, Sat and Sun", part)
		}
		for ; ; i = (i + 1) % 7 {
			w.days[i] = true
			if i == j {
				break
			}
		}
	}
	return nil
}

func minutes(h, m string, end bool) (int, error) {
	hour, _ := strconv.Atoi(h) // two digits
	minute, _ := strconv.Atoi(m)
	if hour > 23 && !(end && hour == 24 && minute == 0) || minute > 59 {
		return 0, fmt.Errorf("%s:%s is no time of day; use 00:00 to 23:59, or 24:00 for the end of one", h, m)
	}
	return hour*60 + minute, nil
}

func clip(s string) string {
	if len(s) > 100 {
		return strings.ToValidUTF8(s[:100], "") + "…"
	}
	return s
}

// String is the window as it was written.
func (w Window) String() string { return w.text }

// Contains reports whether t is in the window. It goes by what the clocks of the zone show: an hour that they skip is in none, one that
// they show twice is in it twice.
func (w Window) Contains(t time.Time) bool {
	if w.zone == nil {
		return false
	}
	t = t.In(w.zone)
	now, today := t.Hour()*60+t.Minute(), int(t.Weekday())
	if w.begin < w.end {
		return w.days[today] && w.begin <= now && now < w.end
	}
	return w.days[today] && now >= w.begin || w.days[(today+6)%7] && now < w.end
}

// until is the end of the window that t is in, to the minute, at most a day away.
func (w Window) until(t time.Time) time.Time {
	t = t.Truncate(time.Minute)
	for end := t.Add(25 * time.Hour); t.Before(end); t = t.Add(time.Minute) {
		if !w.Contains(t) {
			break
		}
	}
	return t
}
