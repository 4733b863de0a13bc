package peers

import (
	"slices"
	"strings"
	"testing"
)

func TestHostlist(t *testing.T) {
	for _, c := range []struct {
		in   string
		want string // hosts, or part of the error
	}{
		{"gpu1", "gpu1"},
		{"gpu[1-3]", "gpu1 gpu2 gpu3"},
		{"gpu[001-003,200]", "gpu001 gpu002 gpu003 gpu200"},
		{"gpu[8-11]", "gpu8 gpu9 gpu10 gpu11"},
		{"gpu[08-11]", "gpu08 gpu09 gpu10 gpu11"},
		{"r[1-2]n[01-02]-ib.example.org:99", "r1n01-ib.example.org:99 r1n02-ib.example.org:99 r2n01-ib.example.org:99 r2n02-ib.example.org:99"},
		{"a[1,3],b, c[7]", "a1 a3 b c7"},
		{"gpu[0-0]", "gpu0"},
		{"", "a host is missing"},
		{"a,,b", "a host is missing"},
		{"a[1-2", "without a ]"},
		{"a]1", "without a ["},
		{"a[1-[2]]", "[ within ["},
		{"a[]", `"" is not a number`},
		{"a[1-]", `"" is not a number`},
		{"a[3-1]", "counts down"},
		{"a[-1]", `"" is not a number`},
		{"a[x]", `"x" is not a number`},
		{"a[1-2-3]", `"2-3" is not a number`},
		{"a[1-9999999999]", "not a number of up to 9 digits"},
		{"a[1-999999999]", "too many hosts"},
		{"a[1-300]b[1-300]", "too many hosts"},
		{"a[1-49999],b[1-2]", "too many hosts"},
		{strings.Repeat("a[1]", 9), "more than 8 pairs"},
	} {
		got, err := ParseHostlist(c.in, MaxPeers)
		if err != nil {
			if !strings.Contains(err.Error(), c.want) || len(got) > 0 {
				t.Errorf("%s: %v, want %s", c.in, err, c.want)
			}
			continue
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s is %v, want %s", c.in, got, c.want)
		}
	}
	if got, err := ParseHostlist("a[1-50000]", MaxPeers); err != nil || len(got) != MaxPeers {
		t.Errorf("%d hosts, %v: the limit itself is allowed", len(got), err)
	}
	if err := CheckHostlist("gpu_[1-2].example.org:0"); err == nil || !strings.Contains(err.Error(), "not a port") {
		t.Errorf("a port of 0: %v", err)
	}
}

func FuzzHostlist(f *testing.F) {
	for _, s := range []string{"gpu[001-128,200]", "a[1-2]b[3-4],c", "[", "]", "a[1-", "a[[1]]", "a[9-1],", "ü[1-2]"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		hosts, err := ParseHostlist(s, 1000)
		if err != nil && len(hosts) > 0 || err == nil && (len(hosts) == 0 || len(hosts) > 1000) {
			t.Fatalf("%d hosts, %v", len(hosts), err)
		}
		for _, h := range hosts {
			if strings.ContainsAny(h, "[]") {
				t.Fatalf("%q has brackets", h)
			}
		}
		if again, err := ParseHostlist(strings.Join(hosts, ","), 1000); len(hosts) > 0 && !strings.Contains(s, ", ") && (err != nil || !slices.Equal(again, hosts)) && !strings.ContainsAny(s, " \t\r\n\v\f\u0085\u00a0") {
			t.Fatalf("%q written out is read as %q, %v", hosts, again, err)
		}
	})
}
