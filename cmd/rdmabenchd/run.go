package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/alecthomas/kingpin/v2"
	"github.com/prometheus/exporter-toolkit/web"
	"github.com/prometheus/exporter-toolkit/web/kingpinflag"

	"github.com/rdmabenchd/rdmabenchd/pkg/daemon"
)

const (
	defaultConfigFile = "/etc/rdmabenchd/rdmabenchd.yaml"
	defaultStorage    = "/var/lib/rdmabenchd"
	defaultWebAddress = ":9879"
	webShutdown       = 2 * time.Second
)

func addRun(app *kingpin.Application, add func(string, func(context.Context, *environment) error)) {
	cmd := app.Command("run", "The daemon: probe on schedule, answer probes, export the results. SIGHUP reloads the configuration.").Default()
	file := cmd.Flag("config.file", "Configuration file.").Default(defaultConfigFile).String()
	storage := cmd.Flag("storage.path", "Folder for what outlives the daemon: reports of sweeps, this node's performance label, what guards keep (pause, leases, budget).").Default(defaultStorage).String()
	lifecycle := cmd.Flag("web.enable-lifecycle", "Allow a reload by POST to /-/reload, and a pause by /-/pause and /-/resume.").Bool()
	pprof := cmd.Flag("web.enable-pprof", "Serve /debug/pprof.").Bool()
	classic := cmd.Flag("web.classic-histograms", "Export latency histograms with classic buckets, too, for servers that do not scrape native ones.").Bool()
	flags := kingpinflag.AddFlags(cmd, defaultWebAddress)
	add(cmd.FullCommand(), func(ctx context.Context, env *environment) error {
		log := env.logger()
		d, err := daemon.New(daemon.Options{ConfigFile: *file, Version: version, Revision: revision(), ClassicHistograms: *classic, StoragePath: *storage, Log: log})
		if err != nil {
			return &exitError{exitUsage, err}
		}
		return serve(ctx, d, d.Handler(*lifecycle, *pprof), flags, log)
	})
}

// serve runs the daemon and its web port until ctx ends or the port can't be served.
func serve(ctx context.Context, d *daemon.Daemon, h http.Handler, flags *web.FlagConfig, log *slog.Logger) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	server := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute}
	webDone := make(chan struct{})
	go func() {
		defer close(webDone)
		if err := web.ListenAndServe(server, flags, log); !errors.Is(err, http.ErrServerClosed) {
			cancel(fmt.Errorf("serve the web port: %w", err))
		}
	}()
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	reloads := make(chan struct{})
	go func() {
		defer close(reloads)
		for {
			select {
			case <-ctx.Done():
				return
			case <-hup:
				_ = d.Reload() // logged and counted there
			}
		}
	}()
	err := d.Run(ctx)
	// The web port last: until then it shows what goes on.
	end, stop := context.WithTimeout(context.Background(), webShutdown)
	defer stop()
	if server.Shutdown(end) != nil {
		server.Close()
	}
	<-webDone
	<-reloads
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		err = errors.Join(cause, err)
	}
	return err
}
