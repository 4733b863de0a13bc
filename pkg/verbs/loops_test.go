package verbs

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestLoops builds the C loops with sanitizers and every warning an error, and drives them on a fake provider: short polls,
// completions in error, full queues, dead paths.
func TestLoops(t *testing.T) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Fatal("gcc is needed, as for the package itself: ", err)
	}
	sources, err := filepath.Glob("rb_*.c")
	if err != nil || len(sources) == 0 {
		t.Fatal("no C sources: ", err)
	}
	bin := filepath.Join(t.TempDir(), "loops")
	args := append([]string{
		"-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror",
		"-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-o", bin, "testdata/loops.c",
	}, sources...)
	if out, err := exec.Command(gcc, append(args, "-libverbs", "-lpthread")...).CombinedOutput(); err != nil {
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
