package exporter

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	dto "github.com/prometheus/client_model/go"
)

func TestClean(t *testing.T) {
	for _, s := range []string{"", "node1", "ü", strings.Repeat("x", maxLabelBytes)} {
		if got := clean(s); got != s {
			t.Errorf("clean(%q) = %q, want it untouched", s, got)
		}
	}
	for in, want := range map[string]string{"a\nb": "a\uFFFDb", "\x1b[31mred": "\uFFFD[31mred", "a\xff\xfeb": "a\uFFFDb", "a\x00": "a\uFFFD"} {
		if got := clean(in); got != want {
			t.Errorf("clean(%q) = %q, want %q", in, got, want)
		}
	}
	long := strings.Repeat("x", 200)
	if clean(long+"a") == clean(long+"b") {
		t.Error("two long names became one")
	}
}

func FuzzClean(f *testing.F) {
	for _, s := range []string{"node1", "\xff\xfe\x00", strings.Repeat("é", 100), strings.Repeat("\n", 300)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		c := clean(s)
		if len(c) > maxLabelBytes || !utf8.ValidString(c) || strings.IndexFunc(c, unicode.IsControl) >= 0 {
			t.Errorf("clean(%q) = %q is no label", s, c)
		}
		if clean(c) != c {
			t.Errorf("clean(clean(%q)) changes it again", s)
		}
	})
}

func TestLabelName(t *testing.T) {
	for in, want := range map[string]string{"rack": "rack", "__name__": "name__", "9lives": "lives", "a-b.c": "a_b_c", "é": "", "": ""} {
		if got := labelName(in); got != want {
			t.Errorf("labelName(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestWithKeepsOrder(t *testing.T) {
	base := pairs([]string{"src", "device"}, "n1", "d")
	for _, name := range []string{"a", "e", "z"} {
		l := with(base, name, "x")
		if !ordered(l) || len(l) != 3 {
			t.Errorf("%s: %v", name, l)
		}
	}
	if len(base) != 2 || !ordered(base) {
		t.Errorf("the shared labels changed: %v", base)
	}
}

func ordered(l []*dto.LabelPair) bool {
	for i := range l[1:] {
		if byName(l[i], l[i+1]) >= 0 {
			return false
		}
	}
	return true
}

// discovered is what a discovery of tests tells.
func discovered() Discovery {
	return Discovery{
		States: map[string]int{"self": 1, "drained": 2, "duplicate": 3}, Replaced: 1,
		Sources: map[string]Source{
			"static": {Good: time.Unix(1000, 0)}, "files": {Failures: 4, Failing: 1, Good: time.Unix(900, 0)}, "dns": {Failures: 2, Failing: 2}, "hostlist": {}, "http": {},
		},
	}
}

func TestDiscovery(t *testing.T) {
	w := httptest.NewRecorder()
	newExporter(t, Options{Discovery: discovered}).Handler(HandlerOptions{}).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	text := w.Body.String()
	for _, line := range []string{
		`rdmabench_peers{state="drained"} 2`, `rdmabench_peers{state="unnamed"} 0`, `rdmabench_peers{state="unknown"} 2`,
		`rdmabench_discovery_failures_total{source="files"} 4`, `rdmabench_discovery_failures_total{source="http"} 0`,
		`rdmabench_discovery_failing{source="dns"} 2`, `rdmabench_discovery_last_success_timestamp_seconds{source="files"} 900`,
		`rdmabench_peer_replacements_total 1`,
	} {
		if !strings.Contains(text, "\n"+line+"\n") {
			t.Errorf("no %s", line)
		}
	}
	if strings.Contains(text, `rdmabench_discovery_last_success_timestamp_seconds{source="dns"}`) {
		t.Error("a source that never answered has a time of its last answer")
	}
}
