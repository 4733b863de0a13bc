package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// bootTimeout is for a guest to say that it is ready. That takes some seconds, on a busy machine
// more; now and then a boot hangs, so it is tried twice.
const bootTimeout = 90 * time.Second

// vmConfig is what one guest is to be like.
type vmConfig struct {
	nodes int
	accel string            // kvm or tcg; "": what works here
	out   string            // folder on the host that the guest may write to; "": a temporary one
	env   map[string]string // more LAB_ variables for the commands in the guest
	web   bool              // forward the web ports of the nodes
}

// vm is a running guest.
type vm struct {
	dir   *runDir
	out   string
	web   []string // host:port on the host of each node's web port
	relay *relay
	cmd   *exec.Cmd
	port  net.Conn
	ended chan struct{} // closed when QEMU has ended
}

// boot starts a guest and waits until it is ready; once more if that fails.
func boot(ctx context.Context, b base, c vmConfig) (*vm, error) {
	if c.accel == "" {
		var err error
		if c.accel, err = b.acceleration(ctx); err != nil {
			return nil, err
		}
	}
	m, err := bootOnce(ctx, b, c)
	if err != nil && ctx.Err() == nil {
		fmt.Fprintf(os.Stderr, "lab: %v\nlab: trying once more\n", err)
		c.accel = "tcg"
		m, err = bootOnce(ctx, b, c)
	}
	return m, err
}

func bootOnce(ctx context.Context, b base, c vmConfig) (_ *vm, err error) {
	dir, err := newRunDir(b.cache)
	if err != nil {
		return nil, err
	}
	m := &vm{dir: dir, out: c.out, ended: make(chan struct{})}
	defer func() {
		if err != nil {
			err = m.explain(err)
			m.stop()
		}
	}()
	if m.out == "" {
		m.out = dir.file("out")
	}
	if err := os.MkdirAll(m.out, 0o755); err != nil {
		return nil, err
	}
	env := map[string]string{
		"LAB_NODES":   strconv.Itoa(c.nodes),
		"LAB_OUT":     "/run/lab/out",
		"LAB_MODULES": filepath.Join(b.kernel, "lib/modules"),
	}
	for k, v := range c.env {
		env[k] = v
	}
	var network []string
	if c.web {
		env["LAB_NET"] = "user"
		if m.web, err = freePorts(c.nodes); err != nil {
			return nil, err
		}
		netdev := "user,id=net,restrict=on"
		for i, addr := range m.web {
			netdev += fmt.Sprintf(",hostfwd=tcp:%s-10.0.2.15:%d", addr, webPort(i+1))
		}
		network = []string{"-netdev", netdev, "-device", "virtio-net-pci,netdev=net,romfile="}
	} else {
		network = []string{"-nic", "none"}
	}
	if err := dir.writeShare(env); err != nil {
		return nil, err
	}
	return m, m.start(ctx, append(qemuArgs(b, c, m), network...))
}

// file is a file of the output folder, where the kernel's log and QEMU's are, too.
func (m *vm) file(name string) string { return filepath.Join(m.out, name) }

// webPort is where the daemon of a node listens inside the guest, guest/node.
func webPort(node int) int { return 9879 + node }

func qemuArgs(b base, c vmConfig, m *vm) []string {
	accel, cpu := "tcg,thread=multi", "max"
	if c.accel == "kvm" {
		accel, cpu = "kvm", "host"
	}
	share := func(path, tag, more string) string {
		return "local,path=" + strings.ReplaceAll(path, ",", ",,") + ",mount_tag=" + tag + ",security_model=none" + more
	}
	return []string{
		"-machine", "q35", "-accel", accel, "-cpu", cpu, "-smp", "2", "-m", "3072",
		"-nodefaults", "-display", "none", "-no-reboot",
		"-serial", "file:" + m.file("console.log"),
		"-kernel", filepath.Join(b.kernel, "vmlinux"), "-initrd", b.initrd,
		"-append", "console=ttyS0 loglevel=4 panic=-1 mitigations=off tsc=reliable",
		"-virtfs", share("/", "host", ",readonly=on,multidevs=remap"),
		"-virtfs", share(m.dir.file("share"), "lab", ",readonly=on"),
		"-virtfs", share(m.out, "out", ",multidevs=remap"),
		"-chardev", "socket,id=agent,fd=3", "-device", "virtio-serial-pci",
		"-device", "virtserialport,chardev=agent,name=lab.agent",
	}
}

// start runs QEMU and waits for the agent's hello. It must be called on the main goroutine, which
// is locked to the main thread: the kernel ends QEMU when the thread that started it ends.
func (m *vm) start(ctx context.Context, args []string) error {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("make a socket pair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "agent"), os.NewFile(uintptr(fds[1]), "agent")
	defer theirs.Close()
	m.port, err = net.FileConn(ours)
	_ = ours.Close() // FileConn has its own copy
	if err != nil {
		return err
	}
	log, err := os.Create(m.file("qemu.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command("qemu-system-x86_64", args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{theirs}
	// A process group of its own: Ctrl-C on a terminal is for the lab, which passes it on.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start QEMU: %w", err)
	}
	m.cmd = cmd
	go func() {
		_ = cmd.Wait() // how it ended is in its log
		close(m.ended)
	}()

	w := newWire(m.port)
	hello := make(chan error, 1)
	go func() {
		f, err := w.receive()
		if err == nil && f.kind != kindHello {
			err = fmt.Errorf("the guest spoke out of turn: frame of kind %d", f.kind)
		}
		hello <- err
	}()
	timeout := time.NewTimer(bootTimeout)
	defer timeout.Stop()
	select {
	case err = <-hello:
		if err != nil { // the wire breaks when QEMU ends
			err = fmt.Errorf("the guest ended before it was ready (%w)", err)
		}
	case <-m.ended:
		err = errors.New("QEMU ended before the guest was ready")
	case <-timeout.C:
		err = fmt.Errorf("the guest was not ready within %v", bootTimeout)
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	now := binary.LittleEndian.AppendUint64(nil, uint64(time.Now().UnixNano()))
	if err := w.send(0, kindClock, now); err != nil {
		return fmt.Errorf("set the guest's clock: %w", err)
	}
	m.relay = newRelay(w)
	go m.relay.receive()
	return nil
}

// run runs a command in the guest, as runCommand does.
func (m *vm) run(ctx context.Context, cmd command, std stdio, in *interrupts) (int, error) {
	ours, theirs := net.Pipe()
	go m.relay.serve(theirs)
	code, err := runCommand(ctx, ours, cmd, std, in)
	if errors.Is(err, errGuestGone) {
		err = m.explain(err)
	}
	return code, err
}

// explain adds to err what QEMU and the guest's kernel had to say.
func (m *vm) explain(err error) error {
	var sig errSignal
	if errors.As(err, &sig) {
		return err
	}
	for _, name := range []string{"qemu.log", "console.log"} {
		b, readErr := os.ReadFile(m.file(name))
		if b = bytes.TrimSpace(b); readErr == nil && len(b) > 0 {
			lines := bytes.Split(b, []byte("\n"))
			lines = lines[max(0, len(lines)-60):]
			err = fmt.Errorf("%w\n--- end of %s\n%s", err, name, bytes.Join(lines, []byte("\n")))
		}
	}
	return err
}

// stop ends the guest at once. There is nothing to lose in it: what commands wrote to the output
// folder is there when they have ended.
func (m *vm) stop() {
	if m.cmd != nil {
		_ = m.cmd.Process.Kill() // it may have ended by itself
		<-m.ended
	}
	if m.port != nil {
		_ = m.port.Close()
	}
	m.dir.close()
}

// freePorts returns n addresses of the loopback which nobody listens on: those with the ports the
// daemons have in the guest, if they are free. Another program may be faster to use one; then QEMU
// fails, and the second boot takes others.
func freePorts(n int) ([]string, error) {
	var addrs []string
	for i := range n {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", webPort(i+1)))
		if err != nil {
			if l, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
				return nil, fmt.Errorf("find a free port: %w", err)
			}
		}
		defer l.Close()
		addrs = append(addrs, l.Addr().String())
	}
	return addrs, nil
}
