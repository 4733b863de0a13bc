package main

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const node1 = `[
{"time":"2030-01-01T00:00:10Z","result":"ok","probe":"rtt","peer":"node2","taints":[],
 "runs":[{"size":8,"latency":{"p50":1.234e-5,"p99":0.004},"bandwidth":null}]},
{"time":"2030-01-01T00:00:05Z","result":"failed","stage":"connect","reason":"refused","probe":"rtt","peer":"node2","runs":null},
{"time":"2030-01-01T00:00:20Z","result":"skipped","reason":"overlap","probe":"rtt","peer":"node2","runs":null},
{"time":"2030-01-01T00:00:05Z","result":"tainted","taints":["retransmit"],"probe":"bw","peer":"node2",
 "runs":[{"size":2,"bandwidth":{"bytes_per_second":1048576}},{"size":65536,"bandwidth":{"bytes_per_second":66060288}}]},
{"time":"2030-01-01T00:00:05Z","result":"failed","stage":"run","reason":"timeout","probe":"rtt","peer":"node3","runs":null}
]`

func TestSummary(t *testing.T) {
	s := summary{results: make([][]result, 3), errs: make([]error, 3)}
	for i, text := range []string{node1, `{"results":[]}`} {
		var err error
		if s.results[i], err = parseResults([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	s.errs[2] = errors.New("connection refused")
	var out strings.Builder
	missing, err := s.write(&out)
	if err != nil {
		t.Fatal(err)
	}
	want := `
NODE   PEER   PROBE  SIZE   P50       P99      BANDWIDTH   VERDICT
node1  node2  bw     2      -         -        1.0 MiB/s   tainted retransmit
node1  node2  bw     65536  -         -        63.0 MiB/s  tainted retransmit
node1  node2  rtt    8      12.34 µs  4.00 ms  -           ok
node1  node3  rtt    -      -         -        -           failed run timeout
node3  -      -      -      -         -        -           connection refused
`
	if diff := cmp.Diff(want, "\n"+out.String()); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	wantMissing := []string{"node1 to node3", "node2 to node1", "node2 to node3", "node3 to node1", "node3 to node2"}
	if diff := cmp.Diff(wantMissing, missing); diff != "" {
		t.Errorf("pairs without a usable result (-want +got)\n%s", diff)
	}
}

// A result that claims to be fine and has no figures does not make a pair usable.
func TestSummaryWantsFigures(t *testing.T) {
	list, err := parseResults([]byte(`[{"result":"ok","peer":"node2","probe":"rtt","runs":[]}]`))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	missing, err := summary{results: [][]result{list, nil}, errs: make([]error, 2)}.write(&out)
	if err != nil || len(missing) != 2 {
		t.Errorf("missing %v, error %v: want both pairs", missing, err)
	}
}

func TestFetchResults(t *testing.T) {
	answer := ""
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api/v1/results" {
			t.Errorf("asked for %s", r.URL.Path)
		}
		if answer == "" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_, _ = w.Write([]byte(answer))
	}))
	defer srv.Close()
	for text, ok := range map[string]bool{
		"": false, "null": true, "[]": true, node1: true, `{"results":` + node1 + `}`: true,
		"{}": false, "<html>": false, `{"error":"no"}`: false,
	} {
		answer = text
		s := fetchSummary(t.Context(), []string{strings.TrimPrefix(srv.URL, "http://")})
		if (s.errs[0] == nil) != ok {
			t.Errorf("answer %.20q: error %v, want one: %v", text, s.errs[0], !ok)
		}
	}
}
