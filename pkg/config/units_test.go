package config

import (
	"math"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestParseDuration(t *testing.T) {
	day := 24 * time.Hour
	for s, want := range map[string]time.Duration{
		"0": 0, "0s": 0, "30s": 30 * time.Second, "5m": 5 * time.Minute, "1h30m": 90 * time.Minute, "14d": 14 * day,
		"1d12h": 36 * time.Hour, "1.5ms": 1500 * time.Microsecond, "10us": 10 * time.Microsecond, "10µs": 10 * time.Microsecond,
		"7ns": 7, "0.5d": 12 * time.Hour, "106751d": 106751 * day,
	} {
		if got, err := ParseDuration(s); err != nil || got != want {
			t.Errorf("ParseDuration(%q) = %s, %v; want %s", s, got, err, want)
		}
	}
	for _, s := range []string{
		"", "5", "s", "-5s", "+5s", "5 s", "5x", "5s ", "1..5s", ".s", "5m-1s", "1w", "99999999999999999999s", "106752d", "1e3s",
		"9223372036854775807ns1ns", strings.Repeat("1", 400) + "s", "NaNs", "0x5s",
	} {
		if got, err := ParseDuration(s); err == nil {
			t.Errorf("ParseDuration(%q) = %s", s, got)
		}
	}
}

func TestParseSize(t *testing.T) {
	for s, want := range map[string]int64{
		"0": 0, "4096": 4096, "8B": 8, "64KiB": 65536, "8 MiB": 8 << 20, "1GiB": 1 << 30, "10TiB": 10 << 40,
		"64kB": 64000, "2MB": 2e6, "1GB": 1e9, "1TB": 1e12, "9223372036854775807": math.MaxInt64,
	} {
		if got, err := ParseSize(s); err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", s, got, err, want)
		}
	}
	for s, want := range map[string]string{
		"": "not a size", "-1": "not a size", "1.5GiB": "not a size", "0x10": "not a size", "KiB": "not a size", "1  KiB": "not a size",
		"64k": "64KiB for powers of 1024 or 64kB", "8M": "8MiB for powers of 1024 or 8MB", "64K": "64KiB for powers of 1024 or 64kB",
		"64kib": "unknown unit", "10Mb": "unknown unit", "10Gb/s": "unknown unit", "5x": "unknown unit",
		"9223372036854775808": "too large", "8388608TiB": "too large",
	} {
		if got, err := ParseSize(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("ParseSize(%q) = %d, %v; want an error with %q", s, got, err, want)
		}
	}
}

func TestParseRate(t *testing.T) {
	for s, want := range map[string]float64{
		"10Gb/s": 1.25e9, "500MB/s": 5e8, "1.5 Gb/s": 1.875e8, "8b/s": 1, "100GiB/s": 100 << 30, "400Gb/s": 5e10, "1250000000B/s": 1.25e9,
	} {
		if got, err := ParseRate(s); err != nil || got != want {
			t.Errorf("ParseRate(%q) = %g, %v; want %g", s, got, err, want)
		}
	}
	for s, want := range map[string]string{
		"": "not a rate", "10": "not a rate", "-1Gb/s": "not a rate", "Gb/s": "not a rate", "1e3Gb/s": "not a rate", "NaNGb/s": "not a rate",
		"10Gb": "unknown unit", "10gb/s": "unknown unit", "10Gbps": "unknown unit", "0Gb/s": "lets nothing through", "99999999999Tb/s": "too large",
		strings.Repeat("9", 400) + "B/s": "too large",
	} {
		if got, err := ParseRate(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("ParseRate(%q) = %g, %v; want an error with %q", s, got, err, want)
		}
	}
}

func TestAckTimeout(t *testing.T) {
	for d, want := range map[time.Duration]int{
		8192 * time.Nanosecond: 1, 67 * time.Millisecond: 14, 50 * time.Millisecond: 14, 46 * time.Millisecond: 13, 10 * time.Second: 21, 8796 * time.Second: 31,
	} {
		if got := ackExponent(d); got != want {
			t.Errorf("%s is nearest to exponent %d, got %d", d, want, got)
		}
	}
}

func TestFormat(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0s", time.Minute: "1m", 90 * time.Minute: "1h30m", 24 * time.Hour: "24h", 10 * time.Second: "10s", time.Hour + time.Second: "1h0m1s", 1500 * time.Microsecond: "1.5ms", 20 * time.Minute: "20m",
	} {
		if got := formatDuration(d); got != want {
			t.Errorf("formatDuration(%s) = %s, want %s", d, got, want)
		}
		if back, err := ParseDuration(want); err != nil || back != d {
			t.Errorf("%s reads back as %s, %v", want, back, err)
		}
	}
	for n, want := range map[int64]string{0: "0", 8: "8", 1000: "1000", 1024: "1KiB", 1536: "1536", 65536: "64KiB", 8 << 20: "8MiB", 3 << 40: "3TiB"} {
		if got := formatSize(n); got != want {
			t.Errorf("formatSize(%s) = %s, want %s", strconv.FormatInt(n, 10), got, want)
		}
	}
}
