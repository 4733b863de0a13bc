package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// The committed dashboards are what this command writes, byte for byte.
func TestCommitted(t *testing.T) {
	for name, build := range dashboards {
		want, err := render(build)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join("..", "..", "dashboards", name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("dashboards/%s differs from the generator: run `go run ./mkdash ../dashboards` in tools/", name)
		}
	}
	files, err := filepath.Glob("../../dashboards/*.json")
	if err != nil || len(files) != len(dashboards) {
		t.Errorf("%d dashboards are committed, %d generated (%v)", len(files), len(dashboards), err)
	}
}
