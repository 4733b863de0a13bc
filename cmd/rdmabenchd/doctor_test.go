package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters/sysfstest"
	"github.com/rdmabenchd/rdmabenchd/pkg/doctor"
)

// asCommand makes the test binary be rdmabenchd, so that whole commands run in processes of their own.
const asCommand = "RDMABENCHD_TEST_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// command prepares rdmabenchd with a user-space provider's devices, if there is one; see test/verbsim.
func command(t *testing.T, fabric string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Env = append(os.Environ(), asCommand+"=1")
	if fabric != "" {
		lib, err := filepath.Abs("../../build/verbsim.so")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(lib); err != nil {
			t.Skip("no verbs provider: run `make -C test/verbsim` first")
		}
		cmd.Env = append(cmd.Env, "LD_PRELOAD="+lib, "VERBSIM_DIR="+fabric)
	}
	return cmd
}

func newFabric(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "rdmabenchd-cmd-test.")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// respond starts a responder and returns its address.
func respond(t *testing.T, fabric string) string {
	t.Helper()
	cmd := command(t, fabric, "respond", "--listen=127.0.0.1:0", "--log.format=logfmt")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	lines := bufio.NewScanner(stderr)
	for lines.Scan() {
		if m := regexp.MustCompile(`address=(\S+)`).FindStringSubmatch(lines.Text()); m != nil {
			return m[1]
		}
	}
	t.Fatal("the responder did not start")
	return ""
}

// report runs a doctor and returns its report and exit code.
func report(t *testing.T, fabric string, args ...string) (doctor.Report, int) {
	t.Helper()
	cmd := command(t, fabric, append([]string{"doctor", "--json"}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	var r doctor.Report
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatalf("%v: %s%s", err, out.Bytes(), errs.Bytes())
	}
	if code := cmd.ProcessState.ExitCode(); code != 0 && !strings.Contains(errs.String(), r.Diagnosis) {
		t.Errorf("exit %d, and no diagnosis on stderr: %q", code, errs.String())
	}
	return r, cmd.ProcessState.ExitCode()
}

// verdicts gives the worst verdict of each layer.
func verdicts(r doctor.Report) map[doctor.Layer]doctor.Verdict {
	order := map[doctor.Verdict]int{doctor.Skipped: 0, doctor.Unknown: 1, doctor.OK: 2, doctor.Warning: 3, doctor.Failed: 4}
	worst := map[doctor.Layer]doctor.Verdict{}
	for _, c := range r.Checks {
		if v, ok := worst[c.Layer]; !ok || order[c.Verdict] > order[v] {
			worst[c.Layer] = c.Verdict
		}
	}
	return worst
}

// Messages of every kind pass between two processes, over a device that no file of sysfs shows.
func TestDoctorOfPeer(t *testing.T) {
	fabric := newFabric(t)
	r, code := report(t, fabric, respond(t, fabric))
	if code != 0 {
		t.Errorf("exit %d: %s", code, r.Diagnosis)
	}
	v := verdicts(r)
	for _, l := range []doctor.Layer{doctor.Modules, doctor.Devices, doctor.Ports, doctor.GID, doctor.MTU, doctor.Route, doctor.Control, doctor.SmallMessage, doctor.LargeMessage, doctor.BothDirections} {
		if v[l] != doctor.OK {
			t.Errorf("%s is %s", l, v[l])
		}
	}
	if v[doctor.Counters] != doctor.Unknown {
		t.Errorf("counters of a device without any are %s", v[doctor.Counters])
	}
	if r.Device == nil || *r.Device != "sim0" || r.Peer == nil {
		t.Errorf("from %v to %v", r.Device, r.Peer)
	}
}

func TestDoctorNamesTheLayer(t *testing.T) {
	fabric := newFabric(t)
	peer := respond(t, fabric)
	for _, tt := range []struct {
		name    string
		env     string
		args    []string
		code    int
		layer   doctor.Layer
		skipped []doctor.Layer
	}{
		{"a name that is none", "", []string{"no-such-host.invalid"}, 1, doctor.Route, []doctor.Layer{doctor.Control, doctor.SmallMessage}},
		{"nobody listens", "", []string{"127.0.0.1:9"}, 1, doctor.Control, []doctor.Layer{doctor.SmallMessage, doctor.LargeMessage, doctor.BothDirections, doctor.Counters}},
		{"another device", "", []string{"-d", "sim7", peer}, 3, doctor.Modules, []doctor.Layer{doctor.Ports, doctor.GID, doctor.Route, doctor.Control}},
		{"an empty GID slot", "", []string{"-x", "7", peer}, 3, doctor.GID, []doctor.Layer{doctor.Route, doctor.Control}},
		{"sends that fail", "VERBSIM_ERROR_EVERY=5", []string{peer}, 1, doctor.SmallMessage, []doctor.Layer{doctor.LargeMessage, doctor.BothDirections}},
		{"a device without RC", "VERBSIM_NO_RC=1", []string{peer}, 1, doctor.Devices, []doctor.Layer{doctor.SmallMessage}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if key, value, ok := strings.Cut(tt.env, "="); ok {
				t.Setenv(key, value)
			}
			r, code := report(t, fabric, tt.args...)
			if code != tt.code || r.Layer == nil || *r.Layer != tt.layer {
				t.Errorf("exit %d: %s; want %d and %s", code, r.Diagnosis, tt.code, tt.layer)
			}
			v := verdicts(r)
			for _, l := range tt.skipped {
				if v[l] != doctor.Skipped {
					t.Errorf("%s is %s, and rests on what failed", l, v[l])
				}
			}
		})
	}
}

func TestDoctorUsage(t *testing.T) {
	tree := sysfstest.Tree(t, "pcie-degraded")
	for _, tt := range []struct {
		name string
		args []string
		code int
		says string
	}{
		{"text", []string{"doctor", "--sysfs.root", tree}, 1, "pcie-width of mlx5_0"},
		{"no such tree", []string{"doctor", "--sysfs.root", tree + "/none"}, 2, "--sysfs.root"},
		{"a peer of a tree", []string{"doctor", "--sysfs.root", tree, "node2"}, 2, "leave out the peer"},
		{"nothing here", []string{"doctor", "--sysfs.root", t.TempDir()}, 3, "no RDMA stack"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cmd := command(t, "", tt.args...)
			out, _ := cmd.CombinedOutput()
			if code := cmd.ProcessState.ExitCode(); code != tt.code || !strings.Contains(string(out), tt.says) {
				t.Errorf("exit %d, want %d and %q:\n%s", code, tt.code, tt.says, out)
			}
		})
	}
}
