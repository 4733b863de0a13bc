package main

import (
	"bytes"
	"encoding/csv"
	"errors"
	"image/png"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// probed runs `rdmabenchd probe` and returns what it put out, and its exit code.
func probed(t *testing.T, fabric string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := command(t, fabric, append([]string{"probe"}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	_ = cmd.Run()
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// left are the names in a directory.
func left(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestProbeOutputs(t *testing.T) {
	fabric, dir := newFabric(t), t.TempDir()
	peer := respond(t, fabric)
	raw, svg, pic := filepath.Join(dir, "raw.csv"), filepath.Join(dir, "a.svg"), filepath.Join(dir, "b.png")
	if err := os.WriteFile(raw, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}

	out, errs, code := probed(t, fabric, peer, "-n", "300", "--output=hlog", "--raw-samples", raw, "--plot", svg)
	if code != exitOK {
		t.Fatalf("exit %d: %s", code, errs)
	}
	h, err := hdrhistogram.NewHistogramLogReader(strings.NewReader(out)).NextIntervalHistogram()
	if err != nil || h == nil || h.TotalCount() != 300 {
		t.Errorf("hlog: %v, %v, want 300 samples:\n%s", h, err, out)
	}
	f, err := os.Open(raw)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if lines, err := csv.NewReader(f).ReadAll(); err != nil || len(lines) != 301 {
		t.Errorf("raw samples: %d lines, %v, want 301", len(lines), err)
	}
	if info, err := f.Stat(); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("raw samples: %v, %v, want the mode that the file had", info.Mode(), err)
	}
	if text, err := os.ReadFile(svg); err != nil || !bytes.Contains(text, []byte("the 300 samples")) {
		t.Errorf("picture: %v, %d bytes", err, len(text))
	}

	out, errs, code = probed(t, fabric, peer, "--kind=bandwidth", "-s", "4KiB", "--output=csv", "--plot", pic)
	if code != exitOK {
		t.Fatalf("exit %d: %s", code, errs)
	}
	if lines, err := csv.NewReader(strings.NewReader(out)).ReadAll(); err != nil || len(lines) != 2 {
		t.Errorf("CSV: %d lines, %v, want 2:\n%s", len(lines), err, out)
	}
	p, err := os.Open(pic)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if _, err := png.DecodeConfig(p); err != nil {
		t.Error(err)
	}
	if names := left(t, dir); len(names) != 3 {
		t.Errorf("left behind: %v", names)
	}
}

// A probe that fails has a line that says so, and leaves files as they were.
func TestProbeOutputsOfFailure(t *testing.T) {
	fabric, dir := newFabric(t), t.TempDir()
	raw := filepath.Join(dir, "raw.csv")
	if err := os.WriteFile(raw, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, _, code := probed(t, fabric, "127.0.0.1:1", "--output=csv", "--raw-samples", raw, "--plot", filepath.Join(dir, "x.svg"))
	if code != exitFailed {
		t.Errorf("exit %d, want %d", code, exitFailed)
	}
	if lines, err := csv.NewReader(strings.NewReader(out)).ReadAll(); err != nil || len(lines) != 2 || lines[1][4] != string(probe.Refused) {
		t.Errorf("CSV: %v, %v, want a line with reason %s", lines, err, probe.Refused)
	}
	if text, err := os.ReadFile(raw); err != nil || string(text) != "old" {
		t.Errorf("the old file is %q, %v", text, err)
	}
	if names := left(t, dir); len(names) != 1 {
		t.Errorf("left behind: %v", names)
	}
}

func TestProbeOutputsRefused(t *testing.T) {
	dir := t.TempDir()
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"a picture of another kind", []string{"--plot", "x.jpg"}, "must end in .svg or .png"},
		{"no such directory", []string{"--plot", filepath.Join(dir, "none", "x.svg")}, "no such file or directory"},
		{"a directory", []string{"--raw-samples", dir}, "is a directory"},
		{"one file for both", []string{"--raw-samples", "x.svg", "--plot", "./x.svg"}, "use two files"},
		{"samples of bandwidth", []string{"--kind=bandwidth", "--raw-samples", "x.csv"}, "takes no latency samples"},
		{"a histogram of bandwidth", []string{"--kind=bandwidth", "--output=hlog"}, "has no histogram"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, errs, code := probed(t, "", append([]string{"192.0.2.1"}, tt.args...)...)
			if code != exitUsage || !strings.Contains(errs, tt.want) || out != "" {
				t.Errorf("exit %d, %q, want %d, %q, and nothing on stdout: %q", code, errs, exitUsage, tt.want, out)
			}
		})
	}
	if names := left(t, dir); len(names) != 0 {
		t.Errorf("left behind: %v", names)
	}
}

func TestOutFile(t *testing.T) {
	dir := t.TempDir()
	name, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	if err := os.WriteFile(name, []byte("old"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("file", link); err != nil {
		t.Fatal(err)
	}
	f, err := openOut(link)
	if err != nil {
		t.Fatal(err)
	}
	broken := errors.New("broken")
	if err := f.write(func(w io.Writer) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("error %v, want what the content failed with", err)
	}
	if text, _ := os.ReadFile(name); string(text) != "old" {
		t.Errorf("after a failure the file is %q", text)
	}
	if f, err = openOut(link); err != nil {
		t.Fatal(err)
	}
	if err := f.write(func(w io.Writer) error { _, err := io.WriteString(w, "new"); return err }); err != nil {
		t.Fatal(err)
	}
	if text, _ := os.ReadFile(name); string(text) != "new" {
		t.Errorf("the file is %q", text)
	}
	if target, err := os.Readlink(link); err != nil || target != "file" {
		t.Errorf("the link leads to %q, %v", target, err)
	}
	if names := left(t, dir); len(names) != 2 {
		t.Errorf("left behind: %v", names)
	}
	f, err = openOut(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.write(func(w io.Writer) error { _, err := io.WriteString(w, "new"); return err }); err != nil {
		t.Error(err)
	}
	if info, err := os.Stat(os.DevNull); err != nil || info.Mode().IsRegular() {
		t.Errorf("%s: %v, %v", os.DevNull, info, err)
	}
}
