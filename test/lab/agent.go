package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// agent serves the host from inside the guest until the wire breaks.
func agent() error {
	port, err := openPort()
	if err != nil {
		return err
	}
	a := &agentServer{wire: newWire(port), procs: map[uint32]*process{}}
	if err := a.wire.send(0, kindHello, nil); err != nil {
		return fmt.Errorf("say hello to the host: %w", err)
	}
	for {
		f, err := a.wire.receive()
		if err != nil {
			return fmt.Errorf("read from the host: %w", err)
		}
		a.handle(f)
	}
}

// openPort opens the one virtio-serial port of the guest.
func openPort() (*os.File, error) {
	names, err := filepath.Glob("/dev/vport*p*")
	if err != nil {
		return nil, err
	}
	if len(names) != 1 {
		return nil, fmt.Errorf("found %d virtio-serial ports (/dev/vport*): want 1", len(names))
	}
	// Blocking, on a thread of its own: until the host's end is known to be connected the driver
	// makes writers wait, but tells a poller that the port was hung up.
	fd, err := syscall.Open(names[0], syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: names[0], Err: err}
	}
	return os.NewFile(uintptr(fd), names[0]), nil
}

type agentServer struct {
	wire  *wire
	mu    sync.Mutex
	procs map[uint32]*process
}

// process is one command under way. A stream that it lacks (stderr on a terminal) is unused.
type process struct {
	cmd            *exec.Cmd
	tty            *os.File // the terminal's master side, or nil
	stdin          *queue[[]byte]
	stdout, stderr *window
}

func (a *agentServer) handle(f frame) {
	switch f.kind {
	case kindClock:
		if len(f.payload) == 8 {
			tv := syscall.NsecToTimeval(int64(binary.LittleEndian.Uint64(f.payload)))
			if err := syscall.Settimeofday(&tv); err != nil {
				fmt.Fprintln(os.Stderr, "lab: cannot set the clock:", err)
			}
		}
		return
	case kindOpen:
		var c command
		err := json.Unmarshal(f.payload, &c)
		if err == nil && len(c.Argv) == 0 {
			err = errors.New("no command")
		}
		if err != nil {
			a.exit(f.id, exit{Code: 126, Error: err.Error()})
			return
		}
		a.start(f.id, c)
		return
	}
	a.mu.Lock()
	p := a.procs[f.id]
	a.mu.Unlock()
	if p == nil {
		return // it ended while the frame was under way
	}
	switch f.kind {
	case kindStdin:
		p.stdin.push(f.payload)
	case kindSignal:
		if len(f.payload) == 1 {
			_ = syscall.Kill(-p.cmd.Process.Pid, syscall.Signal(f.payload[0])) // gone is fine
		}
	case kindResize:
		if p.tty != nil && len(f.payload) == 4 {
			rows, cols := binary.LittleEndian.Uint16(f.payload), binary.LittleEndian.Uint16(f.payload[2:])
			_ = setSize(p.tty, rows, cols) // cosmetic
		}
	case kindAck:
		switch stream, n := acked(f.payload); stream {
		case kindStdout:
			p.stdout.give(n)
		case kindStderr:
			p.stderr.give(n)
		}
	}
}

func (a *agentServer) exit(id uint32, e exit) {
	b, err := json.Marshal(e)
	if err == nil {
		err = a.wire.send(id, kindExit, b)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "lab: cannot report an exit:", err)
	}
}

// start runs c as process id, in a session of its own.
func (a *agentServer) start(id uint32, c command) {
	p := &process{stdin: newQueue[[]byte](), stdout: newWindow(), stderr: newWindow()}
	p.cmd = &exec.Cmd{Args: c.Argv, Dir: c.Dir, Env: guestEnv(c.Env, c.Dir)}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	fail := func(code int, err error) {
		a.exit(id, exit{Code: code, Error: err.Error()})
	}
	// A missing folder would otherwise be reported as a missing command.
	if st, err := os.Stat(c.Dir); err != nil || !st.IsDir() {
		fail(126, fmt.Errorf("the working directory %s is not there in the guest", c.Dir))
		return
	}
	path, err := lookPath(c.Argv[0], c.Dir, p.cmd.Env)
	if err != nil {
		fail(127, err)
		return
	}
	p.cmd.Path = path

	var ours, theirs []*os.File // both ends of what the process holds as 0, 1 and 2
	closeAll := func(files []*os.File) {
		for _, f := range files {
			_ = f.Close() // pipes and terminals have nothing to lose
		}
	}
	if c.TTY {
		master, slave, err := openTerminal(c.Rows, c.Cols)
		if err != nil {
			fail(126, err)
			return
		}
		p.tty = master
		p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = slave, slave, slave
		p.cmd.SysProcAttr.Setctty = true
		ours, theirs = []*os.File{master}, []*os.File{slave}
	} else {
		for i := range 3 {
			r, w, err := os.Pipe()
			if err != nil {
				closeAll(append(ours, theirs...))
				fail(126, err)
				return
			}
			if i == 0 {
				r, w = w, r
			}
			ours, theirs = append(ours, r), append(theirs, w)
		}
		p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = theirs[0], theirs[1], theirs[2]
	}
	err = p.cmd.Start()
	closeAll(theirs)
	if err != nil {
		closeAll(ours)
		fail(126, err)
		return
	}
	a.mu.Lock()
	a.procs[id] = p
	a.mu.Unlock()

	go func() {
		if err := a.wire.drain(id, kindStdin, p.stdin, ours[0]); err != nil {
			_ = a.wire.drain(id, kindStdin, p.stdin, io.Discard) // a process need not read its input
		}
		if !c.TTY {
			_ = ours[0].Close()
		}
	}()
	ended := make(chan struct{})
	var output sync.WaitGroup
	if c.TTY {
		output.Go(func() { a.wire.pump(id, kindStdout, &lingering{ours[0], ended}, p.stdout) })
	} else {
		output.Go(func() { a.wire.pump(id, kindStdout, &lingering{ours[1], ended}, p.stdout) })
		output.Go(func() { a.wire.pump(id, kindStderr, &lingering{ours[2], ended}, p.stderr) })
	}
	go func() {
		err := p.cmd.Wait()
		close(ended)
		for _, f := range ours {
			_ = f.SetReadDeadline(time.Now().Add(linger)) // wakes a pump that waits already
		}
		output.Wait()
		a.mu.Lock()
		delete(a.procs, id)
		a.mu.Unlock()
		p.stdin.close()
		closeAll(ours)
		syscall.Sync()
		a.exit(id, exitOf(p.cmd.ProcessState, err))
	}()
}

// linger is how long after a process's end more output is awaited from what it left behind.
const linger = 300 * time.Millisecond

// lingering reads from a pipe or terminal until its end or, once the process has ended, until
// nothing more has come for a while: a background child may hold it open for ever.
type lingering struct {
	f     *os.File
	ended chan struct{}
}

func (l *lingering) Read(b []byte) (int, error) {
	select {
	case <-l.ended:
		if err := l.f.SetReadDeadline(time.Now().Add(linger)); err != nil {
			return 0, err
		}
	default:
	}
	return l.f.Read(b)
}

func exitOf(st *os.ProcessState, err error) exit {
	if st == nil {
		return exit{Code: 126, Error: err.Error()}
	}
	if ws, ok := st.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return exit{Code: 128 + int(ws.Signal())}
	}
	return exit{Code: st.ExitCode()}
}

// guestEnv is the environment of a command: the caller's, the lab's LAB_ variables, the lab's
// tools and the administrator's ones on PATH, and no proxies, for there is nothing to reach by one.
func guestEnv(caller []string, dir string) []string {
	path := "/usr/local/bin:/usr/bin:/bin"
	var env []string
	for _, kv := range caller {
		name, value, _ := strings.Cut(kv, "=")
		switch {
		case strings.HasSuffix(strings.ToLower(name), "_proxy"), strings.HasPrefix(name, "LAB_"), name == "PWD":
		case name == "PATH":
			path = value
		default:
			env = append(env, kv)
		}
	}
	for _, kv := range os.Environ() {
		if strings.HasPrefix(kv, "LAB_") {
			env = append(env, kv)
		}
	}
	return append(env, "PWD="+dir, "PATH=/run/lab/bin:"+path+":/usr/local/sbin:/usr/sbin:/sbin")
}

// lookPath finds an executable along the PATH of env, or relative to dir.
func lookPath(name, dir string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		if !filepath.IsAbs(name) {
			name = filepath.Join(dir, name)
		}
		if _, err := os.Stat(name); err != nil {
			return "", err
		}
		return name, nil
	}
	for _, kv := range env {
		if path, ok := strings.CutPrefix(kv, "PATH="); ok {
			for _, d := range filepath.SplitList(path) {
				full := filepath.Join(d, name)
				if st, err := os.Stat(full); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
					return full, nil
				}
			}
		}
	}
	return "", fmt.Errorf("%s: command not found", name)
}
