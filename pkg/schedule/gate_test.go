package schedule

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

const heavy, light = true, false

// take is TryAcquire that must succeed.
func take(t *testing.T, g *Gate, key string, exclusive bool) func() {
	t.Helper()
	release, ok := g.TryAcquire(key, exclusive)
	if !ok {
		t.Fatalf("%s (exclusive %t) is in use", key, exclusive)
	}
	return release
}

func refuse(t *testing.T, g *Gate, key string, exclusive bool) {
	t.Helper()
	if release, ok := g.TryAcquire(key, exclusive); ok {
		release()
		t.Errorf("%s (exclusive %t) was given out although in use", key, exclusive)
	}
}

func TestGateRules(t *testing.T) {
	g := NewGate(GateOptions{Shared: 2})
	a := take(t, g, "rxe1/1", heavy)
	refuse(t, g, "rxe1/1", heavy)
	refuse(t, g, "rxe1/1", light)
	take(t, g, "rxe2/1", heavy)() // another port is another matter
	a()
	a() // releasing twice must not free what somebody else holds
	b := take(t, g, "rxe1/1", light)
	a()
	c := take(t, g, "rxe1/1", light)
	refuse(t, g, "rxe1/1", light) // the bound
	refuse(t, g, "rxe1/1", heavy)
	b()
	refuse(t, g, "rxe1/1", heavy)
	c()
	take(t, g, "rxe1/1", heavy)()
}

// A heavy job behind light ones gets its turn although more light ones keep coming, and they
// wait behind it.
func TestGateIsFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGate(GateOptions{})
		release := take(t, g, "rxe1/1", light)
		var order []string
		var waiters sync.WaitGroup
		for i, exclusive := range []bool{light, heavy, light, heavy} {
			waiters.Go(func() {
				time.Sleep(time.Duration(i+1) * time.Second)
				r, err := g.Acquire(t.Context(), "rxe1/1", exclusive)
				if err != nil {
					t.Error(err)
					return
				}
				order = append(order, fmt.Sprint(i))
				time.Sleep(10 * time.Second)
				r()
			})
		}
		time.Sleep(5 * time.Second)
		refuse(t, g, "rxe1/1", light) // there is room, but others came first
		release()
		waiters.Wait()
		if got := strings.Join(order, " "); got != "0 1 2 3" {
			t.Errorf("served in the order %s", got)
		}
	})
}

func TestGateCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGate(GateOptions{})
		release := take(t, g, "rxe1/1", heavy)
		why := errors.New("shutdown")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(why) })
		_, err := g.Acquire(ctx, "rxe1/1", light)
		if !errors.Is(err, why) || !strings.Contains(err.Error(), "rxe1/1") {
			t.Errorf("Acquire: %v; want the port and the cause", err)
		}
		release()
		take(t, g, "rxe1/1", heavy)() // the waiter left nothing behind
	})
}

// Two gates on one directory are two processes: flock(2) belongs to the open file.
func TestGateBetweenProcesses(t *testing.T) {
	dir := t.TempDir()
	daemon, cli := NewGate(GateOptions{Dir: dir}), NewGate(GateOptions{Dir: dir})
	a := take(t, daemon, "mlx5_0/1", light)
	b := take(t, cli, "mlx5_0/1", light)
	refuse(t, cli, "mlx5_0/1", heavy)
	refuse(t, daemon, "mlx5_0/1", heavy)
	b()
	a()
	a = take(t, daemon, "mlx5_0/1", heavy)
	refuse(t, cli, "mlx5_0/1", light)
	refuse(t, cli, "mlx5_0/1", heavy)
	take(t, cli, "mlx5_0/2", heavy)()
	a()
	take(t, cli, "mlx5_0/1", heavy)()

	info, err := os.Stat(filepath.Join(dir, "mlx5_0%2F1.lock"))
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != 0o644 { // another user must be able to open it
		t.Errorf("lock file has mode %s", info.Mode())
	}
}

func TestGateWaitsForAnotherProcess(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		daemon, cli := NewGate(GateOptions{Dir: dir}), NewGate(GateOptions{Dir: dir})
		release := take(t, daemon, "rxe1/1", heavy)
		time.AfterFunc(time.Minute, release)

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := cli.Acquire(ctx, "rxe1/1", light); !errors.Is(err, context.DeadlineExceeded) ||
			!strings.Contains(err.Error(), "another process") {
			t.Errorf("Acquire: %v; want the deadline and who is in the way", err)
		}
		begin := time.Now()
		r, err := cli.Acquire(t.Context(), "rxe1/1", heavy)
		if err != nil {
			t.Fatal(err)
		}
		if waited := time.Since(begin); waited < 58*time.Second || waited > time.Minute {
			t.Errorf("waited %s", waited)
		}
		r()
	})
}

// Without a usable directory a port is still exclusive within the process, and the log says once
// what is lost.
func TestGateWithoutDirectory(t *testing.T) {
	tests := []struct {
		name string
		make func(t *testing.T, dir string)
	}{
		{"missing", func(*testing.T, string) {}},
		{"a file", func(t *testing.T, dir string) {
			if err := os.WriteFile(dir, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}},
		{"a symbolic link as lock file", func(t *testing.T, dir string) {
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink("/dev/null", filepath.Join(dir, "rxe1%2F1.lock")); err != nil {
				t.Fatal(err)
			}
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "locks")
			tt.make(t, dir)
			var log bytes.Buffer
			g := NewGate(GateOptions{Dir: dir, Log: slog.New(slog.NewTextHandler(&log, nil))})
			for range 3 {
				release := take(t, g, "rxe1/1", heavy)
				refuse(t, g, "rxe1/1", light)
				release()
			}
			if n := strings.Count(log.String(), "no port locks"); n != 1 {
				t.Errorf("warned %d times:\n%s", n, log.String())
			}
		})
	}
}
