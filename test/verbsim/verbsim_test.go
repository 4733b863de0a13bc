// Package verbsim tests the user-space verbs provider in src: its own self-test, and the programs it is made for.
package verbsim

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// build makes targets in a directory of the test's own, or skips the test where the tools for that are missing.
func build(t *testing.T, targets ...string) (dir string) {
	t.Helper()
	for _, tool := range []string{"make", "gcc"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is not installed", tool)
		}
	}
	if err := exec.CommandContext(t.Context(), "gcc", "-fsyntax-only", "-include", "infiniband/verbs.h", "-xc", "/dev/null").Run(); err != nil {
		t.Skip("infiniband/verbs.h is not installed (libibverbs-dev, rdma-core-devel)")
	}
	if _, err := os.Stat("/dev/shm"); err != nil {
		t.Skip("no /dev/shm")
	}
	dir = t.TempDir()
	args := []string{"OUT=" + dir}
	for _, target := range targets {
		args = append(args, filepath.Join(dir, target))
	}
	if out, err := exec.CommandContext(t.Context(), "make", args...).CombinedOutput(); err != nil {
		t.Fatalf("make: %v\n%s", err, out)
	}
	return dir
}

func TestSelfTest(t *testing.T) {
	programs := []string{"verbsim-selftest"}
	if !testing.Short() {
		programs = append(programs, "verbsim-selftest-asan")
	}
	for _, name := range programs {
		t.Run(name, func(t *testing.T) {
			dir := build(t, name)
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			if out, err := exec.CommandContext(ctx, filepath.Join(dir, name)).CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// TestPrograms runs unmodified programs over the provider: a server and a client each.
func TestPrograms(t *testing.T) {
	library := filepath.Join(build(t, "verbsim.so"), "verbsim.so")
	perftest := []string{"--use_old_post_send", "-F", "-d", "sim0"}
	pingpong := []string{"-d", "sim0", "-g", "1", "-c"}
	for _, c := range []struct {
		name   string
		common []string
		args   string
	}{
		{"ibv_rc_pingpong", pingpong, ""},
		{"ibv_rc_pingpong", pingpong, "-e -n 100"},
		{"ibv_uc_pingpong", pingpong, "-n 100"},
		{"ibv_ud_pingpong", pingpong, "-s 1000"},
		{"ib_write_bw", perftest, "-q 4 -n 1000"},
		{"ib_write_bw", perftest, "-b -n 1000"},
		{"ib_write_lat", perftest, ""},
		{"ib_read_bw", perftest, "-n 1000"},
		{"ib_send_bw", perftest, "-e"},
		{"ib_send_bw", perftest, "-c UD -s 2048"},
		{"ib_send_lat", perftest, "-c UC"},
		{"ib_atomic_bw", perftest, "-A FETCH_AND_ADD"},
	} {
		t.Run(c.name+" "+c.args, func(t *testing.T) {
			if _, err := exec.LookPath(c.name); err != nil {
				t.Skipf("%s is not installed", c.name)
			}
			args := append(append([]string{}, c.common...), strings.Fields(c.args)...)
			runPair(t, library, c.name, append(args, "-p", strconv.Itoa(freePort(t))))
		})
	}
}

func runPair(t *testing.T, library, name string, args []string) {
	fabric, err := os.MkdirTemp("/dev/shm", "verbsim-test.")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(fabric) })
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	command := func(args ...string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Env = append(os.Environ(), "LD_PRELOAD="+library, "VERBSIM_DIR="+fabric)
		return cmd
	}

	type result struct {
		out []byte
		err error
	}
	server := make(chan result, 1)
	go func() {
		out, err := command(args...).CombinedOutput()
		server <- result{out, err}
	}()
	// The client doesn't wait for the server to listen, so it is repeated until it does.
	for {
		out, err := command(append(args, "127.0.0.1")...).CombinedOutput()
		if err != nil && strings.Contains(string(out), "ouldn't connect") && ctx.Err() == nil {
			time.Sleep(50 * time.Millisecond)
			continue
		}
		if err != nil {
			t.Errorf("client: %v\n%s", err, out)
			cancel()
		}
		break
	}
	if s := <-server; s.err != nil {
		t.Errorf("server: %v\n%s", s.err, s.out)
	}
}

func freePort(t *testing.T) int {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}
