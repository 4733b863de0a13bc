// Command rdmabenchd measures an RDMA fleet from inside: a daemon on every node probes its peers with real verbs traffic
// and exports what it saw to Prometheus. Its other commands are one probe by hand, a responder alone, and a look at devices and config.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kingpin/v2"
	"github.com/lmittmann/tint"
	"golang.org/x/term"
)

// Exit codes, the same for every command.
const (
	exitOK       = 0
	exitFailed   = 1 // unhealthy, or a failed probe
	exitUsage    = 2 // usage or configuration
	exitNoDevice = 3 // nothing usable on this node
)

// exitError carries the exit code of an error that has been, or is to be, printed.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) int {
	app := kingpin.New("rdmabenchd", "Probes an RDMA fleet with real verbs traffic and exports the results to Prometheus.")
	app.UsageWriter(stdout)
	app.ErrorWriter(stderr)
	app.HelpFlag.Short('h')
	terminated := false
	app.Terminate(func(int) { terminated = true })
	app.Version(versionText())

	log := &logFlags{}
	app.Flag("log.level", "Only log messages of this level or above: debug, info, warn or error.").Default("info").EnumVar(&log.level, "debug", "info", "warn", "error")
	app.Flag("log.format", "tint (for people), logfmt or json; auto is tint on a terminal and logfmt elsewhere.").Default("auto").
		EnumVar(&log.format, "auto", "tint", "logfmt", "json")

	env := &environment{stdout: stdout, stderr: stderr, logs: log}
	commands := map[string]func(context.Context, *environment) error{}
	add := func(name string, f func(context.Context, *environment) error) { commands[name] = f }
	addRun(app, add)
	addCheckConfig(app, add)
	addDevices(app, add)
	addDoctor(app, add)
	addProbe(app, add)
	addRespond(app, add)
	addSweep(app, add)
	addSimulate(app, add)
	addPause(app, add)

	name, err := app.Parse(args)
	if terminated {
		return exitOK // --help or --version, which have printed
	}
	if err != nil {
		fmt.Fprintf(stderr, "rdmabenchd: %s\nTry 'rdmabenchd --help'.\n", err)
		return exitUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err = commands[name](ctx, env)
	var exit *exitError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &exit):
		fmt.Fprintf(stderr, "rdmabenchd: %s\n", exit.err)
		return exit.code
	}
	fmt.Fprintf(stderr, "rdmabenchd: %s\n", err)
	return exitFailed
}

// environment is what a command writes to.
type environment struct {
	stdout, stderr io.Writer
	logs           *logFlags
}

type logFlags struct{ level, format string }

// logger makes the logger that the flags ask for.
func (e *environment) logger() *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(e.logs.level)) // kingpin has checked it
	format := e.logs.format
	if format == "auto" {
		if format = "logfmt"; isTerminal(e.stderr) {
			format = "tint"
		}
	}
	var h slog.Handler
	switch format {
	case "tint":
		h = tint.NewHandler(e.stderr, &tint.Options{Level: level, TimeFormat: time.TimeOnly, NoColor: !isTerminal(e.stderr)})
	case "json":
		h = slog.NewJSONHandler(e.stderr, &slog.HandlerOptions{Level: level})
	default:
		o := &slog.HandlerOptions{Level: level}
		if os.Getenv("JOURNAL_STREAM") != "" { // the journal has its own time stamps
			o.ReplaceAttr = func(groups []string, a slog.Attr) slog.Attr {
				if len(groups) == 0 && a.Key == slog.TimeKey {
					return slog.Attr{}
				}
				return a
			}
		}
		h = slog.NewTextHandler(e.stderr, o)
	}
	return slog.New(h)
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
