package sweep

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// medians collects figures and gives their medians.
type medians map[string][]float64

func (m medians) add(k string, v *float64) {
	if v != nil {
		m[k] = append(m[k], *v)
	}
}

func (m medians) of(k string) *float64 {
	v := m[k]
	if len(v) == 0 {
		return nil
	}
	slices.Sort(v)
	return finite(quantile(v, 0.5))
}

// peak is the best bandwidth over the sizes of a row, quick its latency at the smallest size.
func peak(r *Row) (best *float64) {
	for i := range r.Points {
		if b := r.Points[i].Bandwidth; b != nil && (best == nil || *b > *best) {
			best = b
		}
	}
	return best
}

func quick(r *Row) (p50, p99 *float64) {
	size := math.MaxInt
	for i := range r.Points {
		if p := &r.Points[i]; p.P50 != nil && p.Size < size {
			size, p50, p99 = p.Size, p.P50, p.P99
		}
	}
	return p50, p99
}

func (a *analysis) summary(n nic) NICReport {
	out := NICReport{Device: n.device, Port: n.port, Rail: a.railOf[n]}
	m := medians{}
	for _, i := range a.of[n] {
		j := &a.rows[i]
		if j.anyBad() {
			out.Bad++
		}
		if !usable(j.row) {
			continue
		}
		out.Measured++
		s, d := j.roles(bandwidth)
		role := s
		if j.src != n {
			role = d
		}
		if role == tx || role == sym {
			m.add("tx", peak(j.row))
		}
		if role == rx || role == sym {
			m.add("rx", peak(j.row))
		}
		p50, p99 := quick(j.row)
		m.add("p50", p50)
		m.add("p99", p99)
	}
	out.Sending, out.Receiving, out.P50, out.P99 = m.of("tx"), m.of("rx"), m.of("p50"), m.of("p99")
	return out
}

func (a *analysis) rails() []string {
	rails := map[string]bool{}
	for i := range a.rows {
		if a.rows[i].row.SrcDevice != "" {
			rails[a.rows[i].row.Rail] = true
		}
	}
	return slices.Sorted(maps.Keys(rails))
}

func (a *analysis) railSummary(rail string) RailReport {
	out := RailReport{Name: rail}
	m := medians{}
	for i := range a.rows {
		j := &a.rows[i]
		if j.row.Rail != rail {
			continue
		}
		if j.anyBad() {
			out.Bad++
		}
		if !usable(j.row) {
			continue
		}
		out.Measured++
		m.add("bw", peak(j.row))
		p50, p99 := quick(j.row)
		m.add("p50", p50)
		m.add("p99", p99)
	}
	out.Bandwidth, out.P50, out.P99 = m.of("bw"), m.of("p50"), m.of("p99")
	return out
}

// FormatRate writes bytes per second for people.
func FormatRate(v float64) string {
	for _, u := range []struct {
		at   float64
		name string
	}{{1e12, "TB/s"}, {1e9, "GB/s"}, {1e6, "MB/s"}, {1e3, "kB/s"}} {
		if v >= u.at {
			return fmt.Sprintf("%.3g %s", v/u.at, u.name)
		}
	}
	return fmt.Sprintf("%.3g B/s", v)
}

// FormatSeconds writes a time for people.
func FormatSeconds(v float64) string {
	switch {
	case v >= 1:
		return fmt.Sprintf("%.3g s", v)
	case v >= 1e-3:
		return fmt.Sprintf("%.3g ms", v*1e3)
	case v >= 1e-6:
		return fmt.Sprintf("%.3g µs", v*1e6)
	}
	return fmt.Sprintf("%.3g ns", v*1e9)
}

func formatCount(v float64) string { return fmt.Sprintf("%.3g/s", v) }
func formatShare(v float64) string { return fmt.Sprintf("%.2g", v) }

func formatSize(n int) string {
	for _, u := range []struct {
		at   int
		name string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.at && n%u.at == 0 {
			return strconv.Itoa(n/u.at) + " " + u.name
		}
	}
	return strconv.Itoa(n) + " B"
}

func formatTime(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format("2006-01-02 15:04:05 UTC")
}

func list(s []string, most int) string {
	if len(s) > most {
		return strings.Join(s[:most], ", ") + fmt.Sprintf(" and %d more", len(s)-most)
	}
	return strings.Join(s, ", ")
}
