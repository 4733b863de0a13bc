package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
)

// result is what the summary needs of a result as /api/v1/results gives it: times in seconds,
// rates in bytes per second, null for what was not measured.
type result struct {
	Time    time.Time `json:"time"`
	Outcome string    `json:"result"`
	Stage   *string   `json:"stage"`
	Reason  *string   `json:"reason"`
	Taints  []string  `json:"taints"`
	Probe   string    `json:"probe"`
	Peer    string    `json:"peer"`
	Runs    []struct {
		Size    int `json:"size"`
		Latency *struct {
			P50 *float64 `json:"p50"`
			P99 *float64 `json:"p99"`
		} `json:"latency"`
		Bandwidth *struct {
			BytesPerSecond *float64 `json:"bytes_per_second"`
		} `json:"bandwidth"`
	} `json:"runs"`
}

// usable reports whether the result carries figures.
func (r *result) usable() bool {
	return (r.Outcome == "ok" || r.Outcome == "tainted") && len(r.Runs) > 0
}

func (r *result) verdict() string {
	words := []string{r.Outcome}
	for _, s := range []*string{r.Stage, r.Reason} {
		if s != nil {
			words = append(words, *s)
		}
	}
	return strings.Join(append(words, r.Taints...), " ")
}

// parseResults reads the answer of /api/v1/results: an array, or an object with "results".
func parseResults(b []byte) ([]result, error) {
	var list []result
	if err := json.Unmarshal(b, &list); err == nil {
		return list, nil
	}
	var object struct {
		Results *[]result `json:"results"`
	}
	if err := json.Unmarshal(b, &object); err != nil {
		return nil, err
	}
	if object.Results == nil {
		return nil, errors.New(`neither an array nor an object with "results"`)
	}
	return *object.Results, nil
}

// summary is what became of a fleet: per node, in order, its results or why there are none.
type summary struct {
	results [][]result
	errs    []error
}

// fetchSummary asks the daemon of each node for its results.
func fetchSummary(ctx context.Context, web []string) summary {
	s := summary{results: make([][]result, len(web)), errs: make([]error, len(web))}
	var wg sync.WaitGroup
	for i, addr := range web {
		wg.Go(func() { s.results[i], s.errs[i] = fetchResults(ctx, "http://"+addr+"/api/v1/results") })
	}
	wg.Wait()
	return s
}

func fetchResults(ctx context.Context, url string) ([]result, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", url, resp.Status)
	}
	list, err := parseResults(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", url, err)
	}
	return list, nil
}

// write prints a table of the latest result of every pair and probe, a line for each message
// size. One that was skipped stands for its probe only if there is no other. It returns the
// ordered pairs of nodes that have no usable result at all.
func (s summary) write(w io.Writer) (missing []string, err error) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NODE\tPEER\tPROBE\tSIZE\tP50\tP99\tBANDWIDTH\tVERDICT")
	for i, results := range s.results {
		node := fmt.Sprintf("node%d", i+1)
		type key struct{ peer, probe string }
		latest := map[key]result{}
		usable := map[string]bool{}
		for _, r := range results {
			if r.usable() {
				usable[r.Peer] = true
			}
			k := key{r.Peer, r.Probe}
			old, ok := latest[k]
			rank := func(r result) int {
				if r.Outcome == "skipped" {
					return 0
				}
				return 1
			}
			if d := rank(r) - rank(old); !ok || d > 0 || d == 0 && r.Time.After(old.Time) {
				latest[k] = r
			}
		}
		keys := slices.SortedFunc(maps.Keys(latest), func(a, b key) int {
			return strings.Compare(a.peer+"\x00"+a.probe, b.peer+"\x00"+b.probe)
		})
		for _, k := range keys {
			r := latest[k]
			if !r.usable() {
				fmt.Fprintf(t, "%s\t%s\t%s\t-\t-\t-\t-\t%s\n", node, k.peer, k.probe, r.verdict())
				continue
			}
			for _, run := range r.Runs {
				p50, p99, bandwidth := "-", "-", "-"
				if run.Latency != nil {
					p50, p99 = seconds(run.Latency.P50), seconds(run.Latency.P99)
				}
				if run.Bandwidth != nil && run.Bandwidth.BytesPerSecond != nil {
					bandwidth = fmt.Sprintf("%.1f MiB/s", *run.Bandwidth.BytesPerSecond/(1<<20))
				}
				fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\n",
					node, k.peer, k.probe, run.Size, p50, p99, bandwidth, r.verdict())
			}
		}
		if s.errs[i] != nil {
			fmt.Fprintf(t, "%s\t-\t-\t-\t-\t-\t-\t%v\n", node, s.errs[i])
		}
		for j := range s.results {
			if peer := fmt.Sprintf("node%d", j+1); j != i && !usable[peer] {
				missing = append(missing, node+" to "+peer)
			}
		}
	}
	return missing, t.Flush()
}

func seconds(v *float64) string {
	switch {
	case v == nil:
		return "-"
	case *v < 1e-3:
		return fmt.Sprintf("%.2f µs", *v*1e6)
	case *v < 1:
		return fmt.Sprintf("%.2f ms", *v*1e3)
	}
	return fmt.Sprintf("%.2f s", *v)
}
