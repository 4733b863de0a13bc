package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// version is set by the linker (see Makefile).
var version = "devel"

func revision() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				return s.Value
			}
		}
	}
	return "unknown"
}

func versionText() string {
	return fmt.Sprintf("rdmabenchd %s (revision %s, %s, %s/%s)", version, revision(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
