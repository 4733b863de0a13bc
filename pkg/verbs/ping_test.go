package verbs

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestPing builds the UD echo with sanitizers and every warning an error, and runs two of them on a fake device whose network
// loses, repeats, reorders and forges: with stamps by software, and by clocks of the device's own.
func TestPing(t *testing.T) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Fatal("gcc is needed, as for the package itself: ", err)
	}
	for name, sanitizer := range map[string]string{"memory": "address,undefined", "threads": "thread"} {
		t.Run(name, func(t *testing.T) {
			bin := filepath.Join(t.TempDir(), "ping")
			out, err := exec.Command(gcc, "-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror",
				"-fsanitize="+sanitizer, "-fno-sanitize-recover=all", "-o", bin,
				"testdata/ping.c", "rb_ping.c", "rb_ping_run.c", "rb_clock.c", "-libverbs", "-lpthread").CombinedOutput()
			if err != nil {
				t.Fatalf("build: %s\n%s", err, out)
			}
			cmd := exec.CommandContext(t.Context(), bin)
			cmd.Env = append(os.Environ(), "ASAN_OPTIONS=detect_leaks=1")
			if out, err = cmd.CombinedOutput(); err != nil {
				t.Fatalf("%s\n%s", err, out)
			}
			t.Logf("%s", out)
		})
	}
}
