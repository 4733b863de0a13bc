// Command mkdash writes the Grafana dashboards of rdmabenchd as JSON:
//
//	go run ./mkdash ../dashboards
//
// The files are committed; a test fails when they differ from what this command writes.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: mkdash DIRECTORY")
		os.Exit(2)
	}
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "mkdash:", err)
		os.Exit(1)
	}
}

// dashboards are the files and what they hold.
var dashboards = map[string]func() (dashboard.Dashboard, error){
	"fleet.json": fleet,
}

func write(dir string) error {
	for name, build := range dashboards {
		b, err := render(build)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// render is JSON as Grafana's file provisioning takes it, with < and > left readable in the queries.
func render(build func() (dashboard.Dashboard, error)) ([]byte, error) {
	d, err := build()
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(d); err != nil {
		return nil, err
	}
	// The SDK's types marshal themselves and escape HTML all the same.
	out := b.Bytes()
	for from, to := range map[string]string{`\u003c`: "<", `\u003e`: ">", `\u0026`: "&"} {
		out = bytes.ReplaceAll(out, []byte(from), []byte(to))
	}
	return out, nil
}
