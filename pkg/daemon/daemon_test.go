package daemon

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const good = `
node: {name: a, labels: {rack: r1}}
control: {listen: "127.0.0.1:PORT"}
devices: {include: ["none-of-this-name"]}
peers: {static: [{name: c, address: "127.0.0.1:1", labels: {rack: r1}}, {name: b, address: "127.0.0.1:2", labels: {rack: r2}}, {name: a, address: "127.0.0.1:3"}]}
probes: [{name: rtt, schedule: "@every 1s", kind: latency, op: write, sizes: 8, iterations: 10}]
`

func start(t *testing.T, text string) (*Daemon, string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "rdmabenchd.yaml")
	write(t, file, text)
	d, err := New(Options{ConfigFile: file, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(20 * time.Second):
			t.Error("the daemon does not end")
		}
	})
	return d, file
}

// port is free a moment ago.
var port = func() string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	defer l.Close()
	_, p, _ := net.SplitHostPort(l.Addr().String())
	return p
}()

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(strings.Replace(text, "PORT", port, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
}

func page(t *testing.T, d *Daemon, method, path string) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	d.Handler(true, false).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, path, nil))
	return w.Code, w.Body.String()
}

// A node without a usable device runs, is ready, and its probes say why they can't be.
func TestWithoutDevice(t *testing.T) {
	d, _ := start(t, good)
	var text string
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if _, text = page(t, d, http.MethodGet, "/api/v1/results"); strings.Contains(text, `"scope":"local"`) || strings.Contains(text, `"scope": "local"`) {
			break
		}
	}
	if !strings.Contains(text, `"no-rdma"`) && !strings.Contains(text, `"no-device"`) {
		t.Errorf("no result says that there is no device: %s", text)
	}
	if code, _ := page(t, d, http.MethodGet, "/-/ready"); code != http.StatusOK {
		t.Errorf("/-/ready is %d", code)
	}
}

// A bad configuration is refused whole, is seen in the metrics, and a good one is taken again.
func TestReload(t *testing.T) {
	d, file := start(t, good)
	before := d.config()
	for name, text := range map[string]string{
		"misspelt key":      strings.Replace(good, "schedule:", "shedule:", 1),
		"not YAML":          "probes: [",
		"another node name": strings.Replace(good, "name: a,", "name: z,", 1),
	} {
		write(t, file, text)
		if code, body := page(t, d, http.MethodPost, "/-/reload"); code == http.StatusOK || !strings.Contains(body, file) {
			t.Errorf("%s: %d %s", name, code, body)
		}
		if d.config() != before {
			t.Errorf("%s: the old configuration is gone", name)
		}
		if _, text := page(t, d, http.MethodGet, "/metrics"); !strings.Contains(text, "\nrdmabench_config_last_reload_successful 0\n") {
			t.Errorf("%s: not in the metrics", name)
		}
	}
	write(t, file, strings.Replace(good, "name: rtt", "name: other", 1))
	if code, body := page(t, d, http.MethodPost, "/-/reload"); code != http.StatusOK {
		t.Fatalf("%d %s", code, body)
	}
	_, text := page(t, d, http.MethodGet, "/metrics")
	if !strings.Contains(text, "\nrdmabench_config_last_reload_successful 1\n") || !strings.Contains(text, `probe="other"`) || strings.Contains(text, `probe="rtt"`) {
		t.Error("the new configuration is not in the metrics")
	}
}

func TestPath(t *testing.T) {
	r1, r2 := map[string]string{"rack": "r1"}, map[string]string{"rack": "r2"}
	for _, c := range []struct {
		own, peer map[string]string
		want      string
	}{{r1, r1, "same_rack"}, {r1, r2, "cross_rack"}, {r1, nil, "unknown"}, {nil, nil, "unknown"}} {
		if got := path(c.own, c.peer); got != c.want {
			t.Errorf("%v to %v is %s, want %s", c.own, c.peer, got, c.want)
		}
	}
}
