package config

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
)

var errTooLarge = errors.New("too large")

var durationUnits = map[string]time.Duration{
	"ns": time.Nanosecond, "us": time.Microsecond, "µs": time.Microsecond, "ms": time.Millisecond,
	"s": time.Second, "m": time.Minute, "h": time.Hour, "d": 24 * time.Hour,
}

// ParseDuration reads a duration such as 30s, 1h30m, 1.5ms or 14d: as [time.ParseDuration] does,
// with days of 24 hours and without a sign.
func ParseDuration(s string) (time.Duration, error) {
	if s == "0" {
		return 0, nil
	}
	var total time.Duration
	rest := s
	for rest != "" {
		digits := len(rest) - len(strings.TrimLeft(rest, "0123456789."))
		number, after := rest[:digits], rest[digits:]
		letters := strings.IndexAny(after, "0123456789.")
		if letters < 0 {
			letters = len(after)
		}
		unit, ok := durationUnits[after[:letters]]
		if !ok || number == "" {
			break
		}
		rest = after[letters:]
		d, err := times(number, unit)
		if err != nil {
			return 0, fmt.Errorf("duration %q: %w", s, err)
		}
		if total += d; total < 0 {
			return 0, fmt.Errorf("duration %q: %w", s, errTooLarge)
		}
	}
	if s == "" || rest != "" {
		return 0, fmt.Errorf("%q is not a duration; write a number and ns, us, ms, s, m, h or d, for instance 30s or 1h30m", s)
	}
	return total, nil
}

// times returns number × unit. The library parses what may have a fraction.
func times(number string, unit time.Duration) (time.Duration, error) {
	if n, err := strconv.ParseInt(number, 10, 64); err == nil {
		if n > int64(math.MaxInt64/unit) {
			return 0, errTooLarge
		}
		return time.Duration(n) * unit, nil
	}
	f, err := strconv.ParseFloat(number, 64)
	switch {
	case err != nil:
		return 0, fmt.Errorf("%q is not a number", number)
	case f*float64(unit) >= math.MaxInt64:
		return 0, errTooLarge
	}
	return time.Duration(math.Round(f * float64(unit))), nil
}

var sizeUnits = map[string]int64{
	"": 1, "B": 1,
	"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
	"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
}

var numberAndUnit = regexp.MustCompile(`^([0-9]+) ?([A-Za-z/]*)$`)

// ParseSize reads a size in bytes: a whole number, alone or with B, KiB, MiB, GiB, TiB (powers of
// 1024) or kB, MB, GB, TB (powers of 1000). A bare k or M could be either and is refused.
func ParseSize(s string) (int64, error) {
	m := numberAndUnit.FindStringSubmatch(s)
	if m == nil {
		return 0, fmt.Errorf("%q is not a size; write whole bytes or a unit, for instance 4096, 64KiB or 8MiB", s)
	}
	unit, ok := sizeUnits[m[2]]
	if !ok {
		if u := strings.ToUpper(m[2][:1]); len(m[2]) == 1 && strings.Contains("KMGT", u) {
			return 0, fmt.Errorf("size %q is ambiguous; write %s%siB for powers of 1024 or %s%s for powers of 1000",
				s, m[1], u, m[1], strings.Replace(u+"B", "KB", "kB", 1))
		}
		return 0, fmt.Errorf("size %q has an unknown unit; use B, KiB, MiB, GiB, TiB, kB, MB, GB or TB", s)
	}
	n, err := strconv.ParseInt(m[1], 10, 64)
	if err != nil || n > math.MaxInt64/unit {
		return 0, fmt.Errorf("size %q: %w", s, errTooLarge)
	}
	return n * unit, nil
}

var rateUnits = map[string]float64{
	"b/s": 1. / 8, "kb/s": 1e3 / 8, "Mb/s": 1e6 / 8, "Gb/s": 1e9 / 8, "Tb/s": 1e12 / 8,
	"B/s": 1, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "KiB/s": 1 << 10, "MiB/s": 1 << 20, "GiB/s": 1 << 30,
}

var rate = regexp.MustCompile(`^([0-9]+(?:\.[0-9]+)?) ?([A-Za-z/]+)$`)

// ParseRate reads a rate such as 10Gb/s or 500MB/s, b for bits and B for bytes, and returns bytes per second.
func ParseRate(s string) (float64, error) {
	m := rate.FindStringSubmatch(s)
	if m == nil {
		return 0, fmt.Errorf("%q is not a rate; write a number and a unit, for instance 10Gb/s or 500MB/s", s)
	}
	unit, ok := rateUnits[m[2]]
	if !ok {
		return 0, fmt.Errorf("rate %q has an unknown unit; use kb/s, Mb/s or Gb/s for bits, and kB/s, MB/s, GB/s, KiB/s, MiB/s or GiB/s for bytes", s)
	}
	v, err := strconv.ParseFloat(m[1], 64)
	switch {
	case err != nil || v*unit > maxRate:
		return 0, fmt.Errorf("rate %q: %w", s, errTooLarge)
	case v == 0:
		return 0, fmt.Errorf("rate %q lets nothing through; leave the limit out for none", s)
	}
	return v * unit, nil
}

// maxRate is faster than any port, bytes per second.
const maxRate = 1e13

// ackTimeout is the unit of the exponent in a QP's local ACK timeout (InfiniBand specification, 9.7.6.1.3).
const ackTimeout = 4096 * time.Nanosecond

// ackExponent returns the exponent whose timeout is nearest to d by ratio.
func ackExponent(d time.Duration) int {
	return int(math.Round(math.Log2(float64(d) / float64(ackTimeout))))
}
