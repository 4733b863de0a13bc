package peers

import (
	"fmt"
	"strconv"
	"strings"
)

// maxBrackets is how many groups one host expression may have.
const maxBrackets = 8

// ParseHostlist expands a list of hosts as Slurm writes it, such as gpu[001-128,200],rack[1-4]n[01-16]:18516, to at most limit
// hosts. Numbers keep the width of the first of their range.
func ParseHostlist(list string, limit int) ([]string, error) {
	var out []string
	for rest := list; ; {
		expr, after, more := cutTop(rest)
		hosts, err := expand(expr, limit-len(out))
		if err != nil {
			return nil, err
		}
		if out = append(out, hosts...); !more {
			return out, nil
		}
		rest = after
	}
}

// cutTop cuts s at the first comma outside of brackets.
func cutTop(s string) (before, after string, found bool) {
	inside := false
	for i := range len(s) {
		switch s[i] {
		case '[':
			inside = true
		case ']':
			inside = false
		case ',':
			if !inside {
				return s[:i], s[i+1:], true
			}
		}
	}
	return s, "", false
}

// expand writes out one host expression.
func expand(expr string, limit int) ([]string, error) {
	text := strings.TrimSpace(expr)
	if text == "" {
		return nil, fmt.Errorf("a host is missing: two commas, or one at an end")
	}
	out := []string{""}
	for brackets := 0; ; brackets++ {
		plain, rest, open := strings.Cut(text, "[")
		if strings.Contains(plain, "]") {
			return nil, fmt.Errorf("%q: ] without a [ before it", expr)
		}
		for i := range out {
			out[i] += plain
		}
		if !open {
			return out, nil
		}
		inner, after, closed := strings.Cut(rest, "]")
		switch {
		case !closed:
			return nil, fmt.Errorf("%q: [ without a ] after it", expr)
		case strings.Contains(inner, "["):
			return nil, fmt.Errorf("%q: [ within [", expr)
		case brackets == maxBrackets:
			return nil, fmt.Errorf("%q: more than %d pairs of brackets", expr, maxBrackets)
		}
		numbers, err := numbers(inner, limit/len(out))
		if err != nil {
			return nil, fmt.Errorf("%q: %w", expr, err)
		}
		next := make([]string, 0, len(out)*len(numbers))
		for _, o := range out {
			for _, n := range numbers {
				next = append(next, o+n)
			}
		}
		out, text = next, after
	}
}

// numbers writes out what stands between brackets.
func numbers(ranges string, limit int) ([]string, error) {
	var out []string
	for _, r := range strings.Split(ranges, ",") {
		r = strings.TrimSpace(r)
		first, last, isRange := strings.Cut(r, "-")
		if !isRange {
			last = first
		}
		lo, err := number(first)
		if err != nil {
			return nil, err
		}
		hi, err := number(last)
		switch {
		case err != nil:
			return nil, err
		case hi < lo:
			return nil, fmt.Errorf("the range %s counts down", r)
		case hi-lo >= limit-len(out):
			return nil, fmt.Errorf("too many hosts; a list has at most %d", MaxPeers)
		}
		for n := lo; n <= hi; n++ {
			out = append(out, fmt.Sprintf("%0*d", len(first), n))
		}
	}
	return out, nil
}

func number(s string) (int, error) {
	const digits = 9 // fits an int everywhere
	if s == "" || len(s) > digits || strings.Trim(s, "0123456789") != "" {
		return 0, fmt.Errorf("%.20q is not a number of up to %d digits; brackets hold numbers and ranges, such as [001-128,200]", s, digits)
	}
	return strconv.Atoi(s)
}
