package promcheck

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// tool finds prometheus or promtool: in the directory PROMETHEUS_DIR, where it then must be, or in PATH. Without
// either the test is skipped.
func tool(t *testing.T, name string) string {
	t.Helper()
	if dir := os.Getenv("PROMETHEUS_DIR"); dir != "" {
		path, err := exec.LookPath(filepath.Join(dir, name))
		if err != nil {
			t.Fatalf("PROMETHEUS_DIR: %v", err)
		}
		return path
	}
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("no %s in PATH and PROMETHEUS_DIR is not set", name)
	}
	return path
}

// server is a Prometheus of the test's own.
type server struct{ url string }

// start runs Prometheus on a free port of the loopback with the scrape and rule settings in config. It is gone,
// and its data too, when the test ends, however that is.
func start(ctx context.Context, t *testing.T, config func(native bool) string) *server {
	t.Helper()
	bin := tool(t, "prometheus")
	version, err := exec.CommandContext(ctx, bin, "--version").CombinedOutput()
	if err != nil {
		t.Fatalf("%s --version: %v", bin, err)
	}
	old := bytes.Contains(version, []byte("version 2.")) // which takes native histograms by a flag, not in its configuration
	dir := t.TempDir()
	file := filepath.Join(dir, "prometheus.yaml")
	if err := os.WriteFile(file, []byte(config(!old)), 0o644); err != nil {
		t.Fatal(err)
	}
	for attempt := 0; ; attempt++ {
		port := freePort(t)
		args := []string{"--config.file=" + file, "--storage.tsdb.path=" + filepath.Join(dir, "data"),
			"--web.listen-address=127.0.0.1:" + port, "--log.level=warn"}
		if old {
			args = append(args, "--enable-feature=native-histograms")
		}
		s := &server{url: "http://127.0.0.1:" + port}
		var log bytes.Buffer
		exited, stop := run(bin, args, &log)
		err := s.ready(ctx, exited)
		if err == nil {
			t.Cleanup(func() {
				stop()
				if t.Failed() {
					t.Logf("prometheus said:\n%s", log.String())
				}
			})
			return s
		}
		stop()
		if attempt == 2 || !strings.Contains(log.String(), "address already in use") {
			t.Fatalf("prometheus: %v\n%s", err, log.String())
		}
	}
}

// run starts a command that the kernel kills should this process die. exited is closed when the command is gone;
// stop asks it to end, and makes it if it does not.
func run(bin string, args []string, log io.Writer) (exited chan struct{}, stop func()) {
	exited = make(chan struct{})
	cmd := exec.Command(bin, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second
	started := make(chan bool)
	go func() {
		defer close(exited)
		// Pdeathsig goes by the thread that forked, so that has to stay.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if err := cmd.Start(); err != nil {
			fmt.Fprintln(log, err)
			started <- false
			return
		}
		started <- true
		_ = cmd.Wait() // it is told to end by a signal
	}()
	ok := <-started
	return exited, func() {
		if !ok {
			return
		}
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-exited:
		case <-time.After(15 * time.Second):
			_ = cmd.Process.Kill()
			<-exited
		}
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
}

func (s *server) ready(ctx context.Context, exited <-chan struct{}) error {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	return poll(ctx, func() error {
		select {
		case <-exited:
			return final{errors.New("ended at once")}
		default:
		}
		return s.get(ctx, "/-/ready", nil, nil)
	})
}

// final is an error that waiting will not cure.
type final struct{ error }

// poll repeats f until it succeeds, fails for good, or ctx ends.
func poll(ctx context.Context, f func() error) error {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		var last final
		if err == nil || errors.As(err, &last) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-tick.C:
		}
	}
}

// get asks an API and decodes its data.
func (s *server) get(ctx context.Context, path string, args url.Values, data any) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+path+"?"+args.Encode(), nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if data == nil {
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", path, resp.Status)
		}
		return nil
	}
	var answer struct {
		Status, Error string
		Data          json.RawMessage
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		return fmt.Errorf("%s: %s: %w", path, resp.Status, err)
	}
	if answer.Status != "success" {
		return errors.New(answer.Error)
	}
	return json.Unmarshal(answer.Data, data)
}

// query returns the number of series that q has now or, if it is a range, had within the last minute.
func (s *server) query(ctx context.Context, q Query) (int, error) {
	now := time.Now()
	args := url.Values{"query": {q.Expr}}
	path := "/api/v1/query"
	if q.Range {
		path = "/api/v1/query_range"
		args.Set("start", strconv.FormatInt(now.Add(-time.Minute).Unix(), 10))
		args.Set("end", strconv.FormatInt(now.Unix(), 10))
		args.Set("step", "5")
	}
	var data struct {
		Result []struct{ Values, Histograms []json.RawMessage }
	}
	if err := s.get(ctx, path, args, &data); err != nil {
		return 0, err
	}
	for _, r := range data.Result {
		if q.Heat && len(r.Histograms) == 0 {
			return 0, errors.New("numbers instead of native histograms")
		}
	}
	return len(data.Result), nil
}
