// Package sysfstest holds sysfs trees of hosts with RDMA devices, one of each kind of driver and
// of trouble, for tests and for `--sysfs.root`.
//
// A tree is one archive, because sysfs needs names and links that a Go module can't hold. The
// format is that of ttar (github.com/ideaship/ttar), which unpacks them by hand. Each tree's
// README says which kernel it models, where its format is from and what in it is invented. A
// file of 0 bytes stands for a read that fails with EINVAL; side/ is not sysfs, but what ethtool
// and rdma print on the same host.
package sysfstest

import (
	"bufio"
	"embed"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

//go:embed testdata/*.ttar testdata/*.json
var files embed.FS

// Names lists the trees.
func Names() []string {
	entries, err := files.ReadDir("testdata")
	if err != nil {
		panic(err) // it is embedded
	}
	var names []string
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), ".ttar"); ok {
			names = append(names, name)
		}
	}
	return names
}

// Tree unpacks a tree into a directory of the test's own and returns its root.
func Tree(tb testing.TB, name string) string {
	tb.Helper()
	dir := filepath.Join(tb.TempDir(), name)
	if err := Extract(name, dir); err != nil {
		tb.Fatal(err)
	}
	return dir
}

// Expected returns what `devices --json` must say of a tree.
func Expected(tb testing.TB, name string) []byte {
	tb.Helper()
	b, err := files.ReadFile("testdata/" + name + ".json")
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// Extract unpacks a tree into dir.
func Extract(name, dir string) error {
	f, err := files.Open("testdata/" + name + ".ttar")
	if err != nil {
		return err
	}
	defer f.Close()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	path := ""
	for in := bufio.NewScanner(f); in.Scan(); {
		key, value, _ := strings.Cut(in.Text(), ": ")
		var err error
		switch key {
		case "Directory":
			err = os.MkdirAll(filepath.Join(dir, value), 0o755)
		case "Path":
			path = filepath.Join(dir, value)
		case "SymlinkTo":
			err = os.Symlink(value, path)
		case "Lines":
			var n int
			if n, err = strconv.Atoi(value); err != nil {
				break
			}
			var text strings.Builder
			for ; n > 0 && in.Scan(); n-- {
				text.WriteString(in.Text())
				text.WriteByte('\n')
			}
			err = os.WriteFile(path, []byte(text.String()), 0o644)
		}
		if err != nil {
			return fmt.Errorf("unpack %s: %q: %w", name, in.Text(), err)
		}
	}
	return nil
}
