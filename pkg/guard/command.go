package guard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Bounds of the guard command.
const (
	commandTime  = 3 * time.Second // a peer waits for the answer, and not for much longer than this
	commandFresh = 5 * time.Second // how long an answer is good for
	commandSaid  = 512             // bytes of its output that are told
)

// command asks a program whether this node has a job.
type command struct {
	log *slog.Logger

	mu   sync.Mutex // held while it runs: whoever comes meanwhile gets the same answer
	args string
	at   time.Time
	busy string // why heavy probes must not run; empty: they may
}

// busyWith returns why heavy probes must not run; empty if they may. A program that can't be run or doesn't end says nothing, so that they
// must not.
func (c *command) busyWith(args []string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := strings.Join(args, "\x00")
	if key == c.args && !c.at.IsZero() && time.Since(c.at) < commandFresh {
		return c.busy
	}
	was := c.busy
	c.busy, c.args = run(args), key
	c.at = time.Now()
	if c.busy != was && c.busy != "" {
		c.log.Info("guards.command keeps heavy probes away", slog.String("why", c.busy))
	}
	return c.busy
}

func run(args []string) string {
	ctx, cancel := context.WithTimeout(context.Background(), commandTime) // the answer is kept for others than who asks now
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	out := &head{}
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) } // and what it has started
	cmd.WaitDelay = 100 * time.Millisecond
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return ""
	case ctx.Err() != nil:
		return fmt.Sprintf("%s did not end within %s (guards.command), so it is not known whether this node has a job", args[0], commandTime)
	case errors.As(err, &exit):
		said := strings.Join(strings.Fields(out.String()), " ")
		if said != "" {
			said = ": " + said
		}
		return fmt.Sprintf("%s says that this node has a job (%s)%s", args[0], exit.ProcessState, said)
	}
	return fmt.Sprintf("guards.command can't be run, so it is not known whether this node has a job: %s", err)
}

// head keeps the beginning of what a program says.
type head struct{ b strings.Builder }

func (t *head) Write(p []byte) (int, error) {
	if room := commandSaid - t.b.Len(); room > 0 {
		t.b.Write(p[:min(len(p), room)])
	}
	return len(p), nil
}

func (t *head) String() string { return strings.ToValidUTF8(t.b.String(), "") }
