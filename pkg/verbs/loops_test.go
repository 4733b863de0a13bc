package verbs

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestLoops drives the C loops on a fake provider: short polls, completions in error, full queues, dead paths.
func TestLoops(t *testing.T) { runC(t, "testdata/loops.c") }

// runC builds a C program with the package's C, with sanitizers and every warning an error, and runs it.
func runC(t *testing.T, program string) {
	t.Helper()
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Fatal("gcc is needed, as for the package itself: ", err)
	}
	sources, err := filepath.Glob("rb_*.c")
	if err != nil || len(sources) == 0 {
		t.Fatal("no C sources: ", err)
	}
	bin := filepath.Join(t.TempDir(), "program")
	args := append([]string{
		"-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror", "-DRB_DMABUF",
		"-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-o", bin, program,
	}, sources...)
	if out, err := exec.Command(gcc, append(args, "-libverbs", "-lrdmacm", "-lpthread", "-ldl")...).CombinedOutput(); err != nil {
		t.Fatalf("build: %s\n%s", err, out)
	}
	cmd := exec.CommandContext(t.Context(), bin)
	cmd.Env = append(os.Environ(), "ASAN_OPTIONS=detect_leaks=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s\n%s", err, out)
	}
	t.Logf("%s", out)
}
