// Lab boots a fleet of Soft-RoCE nodes in a virtual machine and runs things in it.
// See README.md in this folder.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

const usage = `lab boots a fleet of Soft-RoCE nodes in a virtual machine and runs things in it.

  lab setup                            install and fetch what the lab needs; the others do it too
  lab exec [flags] -- CMD [ARG...]     run a command in a fresh guest; its output, its exit status
  lab shell [flags]                    the same with a shell, on this terminal
  lab run [flags]                      one daemon per node, their web ports on this machine
  lab list                             the labs that run now
  lab attach [--lab ID] [-- CMD...]    run a command (or a shell) in a running lab
  lab fault [--lab ID] --node I FAULT  make a node of a running lab faulty

lab MODE --help shows the flags of a mode. The guest sees this machine's files at the same paths,
and what it writes there is gone when it ends, except in $LAB_OUT. Node I is the device rxeI on the
interface nI, 10.9.0.I. In the guest are also the commands fault and node: see their --help.

The exit status is the command's; 125 if the lab itself failed, 2 for wrong usage, 128 + n if
signal n ended it; of run, 1 if a pair of nodes has no usable result.

The kernel, the initramfs and the folders of running labs are in $RDMABENCH_LAB_CACHE, or else
rdmabench-lab in the user's cache folder. Removing it makes the lab fetch the current kernel.
`

const (
	exitUsage = 2
	exitLab   = 125
	maxNodes  = 8
)

func init() { runtime.LockOSThread() } // the main goroutine starts QEMU; see vm.start

func main() { os.Exit(lab(os.Args)) }

func fail(code int, err error) int {
	fmt.Fprintln(os.Stderr, "lab:", err)
	return code
}

// options are the flags of all modes; each has its own subset.
type options struct {
	nodes    int
	out      string
	binary   string
	config   string
	duration time.Duration
	tty      bool
	lab      string
	node     int
}

func lab(argv []string) int {
	if filepath.Base(argv[0]) == "fault" {
		return faultMain(argv[1:])
	}
	if len(argv) < 2 || argv[1] == "-h" || argv[1] == "--help" || argv[1] == "help" {
		fmt.Print(usage)
		if len(argv) < 2 {
			return exitUsage
		}
		return 0
	}
	mode := argv[1]
	if mode == "agent" {
		return fail(1, agent())
	}

	var o options
	f := flag.NewFlagSet("lab "+mode, flag.ContinueOnError)
	var flagOutput bytes.Buffer
	f.SetOutput(&flagOutput)
	synopsis, more := "", ""
	guest := func() {
		f.IntVar(&o.nodes, "nodes", 4, "number of soft nodes, 1 to 8")
		f.StringVar(&o.out, "out", "", "`folder` that keeps what the guest writes to $LAB_OUT, and its logs")
		f.StringVar(&o.binary, "binary", "build/rdmabenchd", "`path` of the daemon that the command node starts")
		f.StringVar(&o.config, "config", "configs/lab.yaml", "`path` of its configuration; see node --help in the guest")
	}
	var action func(context.Context, *interrupts) (int, error)
	switch mode {
	case "setup":
		action = func(ctx context.Context, _ *interrupts) (int, error) { return 0, o.setup(ctx) }
	case "exec":
		synopsis = "[flags] -- CMD [ARG...]"
		guest()
		f.BoolVar(&o.tty, "tty", false, "give the command a terminal; needs one here")
		action = func(ctx context.Context, in *interrupts) (int, error) { return o.exec(ctx, in, mode, f.Args()) }
	case "shell":
		synopsis = "[flags]"
		guest()
		action = func(ctx context.Context, in *interrupts) (int, error) {
			o.tty = true
			return o.exec(ctx, in, mode, []string{"bash"})
		}
	case "run":
		synopsis = "[flags]"
		guest()
		f.DurationVar(&o.duration, "duration", 0, "end after so long; 0: on Ctrl-C")
		action = func(ctx context.Context, _ *interrupts) (int, error) { return o.run(ctx) }
	case "list":
		action = func(context.Context, *interrupts) (int, error) { return 0, list(os.Stdout) }
	case "attach":
		synopsis = "[--lab ID] [-- CMD [ARG...]]"
		f.StringVar(&o.lab, "lab", "", "`ID` of the lab, if several run")
		action = func(ctx context.Context, in *interrupts) (int, error) { return o.attach(ctx, in, f.Args()) }
	case "fault":
		synopsis, more = "[--lab ID] --node I FAULT", "\n"+faultHelp
		f.StringVar(&o.lab, "lab", "", "`ID` of the lab, if several run")
		f.IntVar(&o.node, "node", 0, "number of the node")
		action = func(ctx context.Context, in *interrupts) (int, error) { return o.fault(ctx, in, f.Args()) }
	default:
		return fail(exitUsage, fmt.Errorf("unknown mode %q; see lab --help", mode))
	}
	f.Usage = func() {
		fmt.Fprintln(&flagOutput, "usage: lab", mode, synopsis)
		f.PrintDefaults()
		flagOutput.WriteString(more)
	}
	switch err := f.Parse(argv[2:]); {
	case errors.Is(err, flag.ErrHelp):
		fmt.Print(flagOutput.String())
		return 0
	case err != nil:
		fmt.Fprint(os.Stderr, "lab: ", flagOutput.String())
		return exitUsage
	}
	takesArgs := mode == "exec" || mode == "attach" || mode == "fault"
	if f.NArg() > 0 && !takesArgs {
		return fail(exitUsage, fmt.Errorf("%s takes no argument %q; see lab %s --help", mode, f.Arg(0), mode))
	}
	if f.Lookup("nodes") != nil && (o.nodes < 1 || o.nodes > maxNodes) {
		return fail(exitUsage, fmt.Errorf("--nodes %d: it must be 1 to %d", o.nodes, maxNodes))
	}

	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	dieWithGoRun()
	code, err := action(ctx, watchSignals(cancel))
	var sig errSignal
	var misuse usageError
	switch {
	case errors.As(err, &sig):
		return 128 + int(sig.Signal)
	case errors.Is(err, syscall.EPIPE):
		return 128 + int(syscall.SIGPIPE)
	case errors.As(err, &misuse):
		return fail(exitUsage, err)
	case err != nil:
		return fail(exitLab, err)
	}
	return code
}

// usageError is a mistake in how the program was called.
type usageError struct{ error }

// dieWithGoRun makes `go run` take its child along when it is killed; it doesn't by itself.
func dieWithGoRun() {
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", os.Getppid()))
	if err == nil && strings.TrimSpace(string(comm)) == "go" {
		_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, syscall.PR_SET_PDEATHSIG, uintptr(syscall.SIGTERM), 0)
	}
}

func (o *options) setup(ctx context.Context) error {
	b, err := setup(ctx)
	if err != nil {
		return err
	}
	accel, err := b.acceleration(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("kernel %s, %s, in %s\n", b.version, accel, b.cache)
	return nil
}

// boot sets up and boots a guest as the flags say, announced to other processes.
func (o *options) boot(ctx context.Context, mode string, argv []string) (_ *vm, stop func(), err error) {
	b, err := setup(ctx)
	if err != nil {
		return nil, nil, err
	}
	c := vmConfig{nodes: o.nodes, web: mode == "run", env: map[string]string{}}
	for name, path := range map[string]string{"LAB_BINARY": o.binary, "LAB_CONFIG": o.config} {
		if c.env[name], err = filepath.Abs(path); err != nil {
			return nil, nil, err
		}
	}
	if o.out != "" {
		if c.out, err = filepath.Abs(o.out); err != nil {
			return nil, nil, err
		}
	}
	m, err := boot(ctx, b, c)
	if err != nil {
		return nil, nil, err
	}
	stopListening, err := m.relay.listen(m.dir.file("sock"))
	if err == nil {
		err = m.dir.writeInfo(runInfo{
			ID: m.dir.id, PID: os.Getpid(), Mode: mode, Nodes: o.nodes,
			Started: time.Now(), Command: argv, Web: m.web,
		})
	}
	if err != nil {
		m.stop()
		return nil, nil, err
	}
	return m, func() { stopListening(); m.stop() }, nil
}

// here is a command with the caller's folder and environment.
func here(argv ...string) (command, error) {
	dir, err := os.Getwd()
	return command{Argv: argv, Dir: dir, Env: os.Environ()}, err
}

func (o *options) exec(ctx context.Context, in *interrupts, mode string, argv []string) (int, error) {
	if len(argv) == 0 {
		return 0, usageError{errors.New("exec needs a command; see lab exec --help")}
	}
	if o.tty && !isTerminal(os.Stdin) {
		return 0, usageError{errors.New("the input is no terminal")}
	}
	cmd, err := here(argv...)
	if err != nil {
		return 0, err
	}
	cmd.TTY = o.tty
	if o.tty {
		cmd.Env = append(cmd.Env, "debian_chroot=lab") // shows in the prompt
	}
	m, stop, err := o.boot(ctx, mode, argv)
	if err != nil {
		return 0, err
	}
	defer stop()
	return m.run(ctx, cmd, hostStdio(o.tty), in)
}

// run is the live fleet.
func (o *options) run(ctx context.Context) (int, error) {
	for _, path := range []string{o.binary, o.config} {
		if _, err := os.Stat(path); err != nil {
			return 0, usageError{fmt.Errorf("%w: build the daemon first, or give --binary and --config", err)}
		}
	}
	m, stop, err := o.boot(ctx, "run", nil)
	if err != nil {
		return 0, err
	}
	defer stop()
	start, err := here("node", "start")
	if err != nil {
		return 0, err
	}
	code, err := m.run(ctx, start, stdio{out: os.Stdout, err: os.Stderr}, nil)
	if err != nil {
		return 0, err
	}
	if code != 0 {
		return 0, errors.New("the fleet did not start")
	}
	fmt.Printf("lab %s: %d nodes are up, their logs are in %s\n", m.dir.id, o.nodes, m.out)
	for i, addr := range m.web {
		fmt.Printf("  node%d  http://%s/\n", i+1, addr)
	}
	var end <-chan time.Time
	if o.duration > 0 {
		fmt.Printf("It ends in %v, or on Ctrl-C.\n", o.duration)
		end = time.After(o.duration)
	} else {
		fmt.Println("It ends on Ctrl-C.")
	}
	select {
	case <-end:
	case <-ctx.Done():
	case <-m.ended:
		return 0, m.explain(errGuestGone)
	}
	missing, err := fetchSummary(context.WithoutCancel(ctx), m.web).write(os.Stdout)
	if err != nil {
		return 0, err
	}
	if len(missing) > 0 && ctx.Err() == nil {
		return fail(1, fmt.Errorf("no usable result from %s", strings.Join(missing, ", "))), nil
	}
	return 0, nil
}

func list(w io.Writer) error {
	cache, err := cacheDir()
	if err != nil {
		return err
	}
	labs, err := runningLabs(cache)
	if err != nil {
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "ID\tPID\tMODE\tNODES\tSINCE\tCOMMAND OR WEB PORTS")
	for _, l := range labs {
		what := strings.Join(append(l.Command, l.Web...), " ")
		fmt.Fprintf(t, "%s\t%d\t%s\t%d\t%s\t%s\n", l.ID, l.PID, l.Mode, l.Nodes, l.Started.Format(time.TimeOnly), what)
	}
	return t.Flush()
}

func (o *options) attach(ctx context.Context, in *interrupts, argv []string) (int, error) {
	tty := len(argv) == 0
	if tty {
		if !isTerminal(os.Stdin) {
			return 0, usageError{errors.New("a shell needs a terminal: give a command")}
		}
		argv = []string{"bash"}
	}
	cmd, err := here(argv...)
	if err != nil {
		return 0, err
	}
	cmd.TTY = tty
	cache, err := cacheDir()
	if err != nil {
		return 0, err
	}
	conn, err := dialLab(cache, o.lab)
	if err != nil {
		return 0, err
	}
	return runCommand(ctx, conn, cmd, hostStdio(tty), in)
}

func (o *options) fault(ctx context.Context, in *interrupts, words []string) (int, error) {
	if o.node < 1 || o.node > maxNodes {
		return 0, usageError{errors.New("which node? give --node I; see lab fault --help")}
	}
	if _, err := planFault(o.node, strings.Fields(strings.Join(words, " "))); err != nil {
		return 0, usageError{fmt.Errorf("%w; see lab fault --help", err)}
	}
	return o.attach(ctx, in, append([]string{"fault", strconv.Itoa(o.node)}, words...))
}
