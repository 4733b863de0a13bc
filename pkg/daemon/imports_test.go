package daemon

import (
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/rdmabenchd/rdmabenchd/"

// layers are our packages from the top down: a package imports only what stands below it.
var layers = []string{"cmd/rdmabenchd", "pkg/daemon", "pkg/exporter", "pkg/doctor", "pkg/sweeper", "pkg/config", "pkg/peers", "pkg/sweep", "pkg/guard", "pkg/report", "pkg/probe", "pkg/simulate", "pkg/schedule", "pkg/schedule/pairing", "pkg/control", "pkg/counters", "pkg/verbs"}

// owners are the only packages that import what they own.
var owners = map[string][]string{
	"C":                                   {"pkg/verbs"},
	"github.com/prometheus/client_golang": {"pkg/exporter"},
	"github.com/robfig/cron":              {"pkg/schedule"},
	"gopkg.in/yaml.v3":                    {"pkg/config", "pkg/peers"},
	"github.com/fsnotify/fsnotify":        {"pkg/peers"},
	"github.com/vishvananda/netlink":      {"pkg/counters"},
	"gonum.org/v1/plot":                   {"pkg/report"},
	"os/exec":                             {"pkg/guard"},
}

// TestImports holds the direction of imports that docs/architecture.md draws.
func TestImports(t *testing.T) {
	rank := map[string]int{}
	for i, l := range layers {
		rank[l] = i
	}
	seen := map[string]bool{}
	root := filepath.Join("..", "..")
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if rel != "." && rel != "cmd" && rel != "pkg" && !strings.HasPrefix(rel, "cmd/") && !strings.HasPrefix(rel, "pkg/") || d.Name() == "testdata" {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") {
			return nil
		}
		own := filepath.ToSlash(filepath.Dir(rel))
		seen[own] = true
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, imp := range parsed.Imports {
			name, err := strconv.Unquote(imp.Path.Value)
			if err != nil {
				return err
			}
			if ours, ok := strings.CutPrefix(name, module); ok {
				if below, known := rank[ours]; known && below <= rank[own] {
					t.Errorf("%s imports %s, which stands above it", rel, ours)
				}
			}
			for owned, by := range owners {
				if (name == owned || strings.HasPrefix(name, owned+"/")) && (!slices.Contains(by, own)) {
					t.Errorf("%s imports %s: only %v may", rel, name, by)
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range layers {
		if !seen[l] {
			t.Errorf("layer %s has no files", l)
		}
	}
}
