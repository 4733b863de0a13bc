package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// stdio is what a command in the guest reads and writes on the host.
type stdio struct {
	in       io.Reader
	out, err io.Writer
}

// hostStdio is the caller's own. A terminal is no input unless the command has a terminal too:
// reading it would stop a lab in the background.
func hostStdio(tty bool) stdio {
	s := stdio{out: os.Stdout, err: os.Stderr}
	if tty || !isTerminal(os.Stdin) {
		s.in = os.Stdin
	}
	return s
}

var errGuestGone = errors.New("the guest ended before the command did")

// runCommand runs cmd at the other end of conn, a relay, until it ends or ctx does, and returns its
// exit status. A closed output ends it with the write's error. The first signal goes to the command
// if in is not nil.
func runCommand(ctx context.Context, conn io.ReadWriteCloser, cmd command, std stdio, in *interrupts) (int, error) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	w := newWire(conn)
	if cmd.TTY {
		cmd.Rows, cmd.Cols = size(os.Stdin)
		restore, err := makeRaw(os.Stdin)
		if err != nil {
			return 0, err
		}
		defer restore()
		resized := make(chan os.Signal, 1)
		signal.Notify(resized, syscall.SIGWINCH)
		defer func() { signal.Stop(resized); close(resized) }()
		go func() {
			for range resized {
				rows, cols := size(os.Stdin)
				b := binary.LittleEndian.AppendUint16(nil, rows)
				_ = w.send(0, kindResize, binary.LittleEndian.AppendUint16(b, cols)) // cosmetic
			}
		}()
	}
	open, err := json.Marshal(cmd)
	if err != nil {
		return 0, err
	}
	if len(open) > maxPayload {
		return 0, fmt.Errorf("command and environment take %d bytes: the most is %d", len(open), maxPayload)
	}
	if err := w.send(0, kindOpen, open); err != nil {
		return 0, err
	}
	if in != nil {
		defer in.forward(func(s syscall.Signal) {
			_ = w.send(0, kindSignal, []byte{byte(s)}) // if it is gone, the receiver below notices
		})()
	}

	stdin := newWindow()
	if std.in == nil {
		_ = w.send(0, kindStdin, nil) // likewise
	} else {
		go w.pump(0, kindStdin, std.in, stdin) // until the input ends or this process does
	}
	stdout, stderr := newQueue[[]byte](), newQueue[[]byte]()
	defer stdout.close()
	defer stderr.close()
	failed := make(chan error, 2)
	var output sync.WaitGroup
	drain := func(k kind, q *queue[[]byte], dst io.Writer) {
		if err := w.drain(0, k, q, dst); err != nil {
			failed <- err
			_ = conn.Close() // ends the receiver below
		}
	}
	output.Go(func() { drain(kindStdout, stdout, std.out) })
	output.Go(func() { drain(kindStderr, stderr, std.err) })
	for {
		f, err := w.receive()
		if err != nil {
			select {
			case err = <-failed:
				return 0, err
			default:
			}
			if ctx.Err() != nil {
				return 0, context.Cause(ctx)
			}
			return 0, errGuestGone
		}
		switch f.kind {
		case kindStdout:
			stdout.push(f.payload)
		case kindStderr:
			stderr.push(f.payload)
		case kindAck:
			_, n := acked(f.payload)
			stdin.give(n)
		case kindExit:
			stdout.close()
			stderr.close()
			output.Wait()
			var e exit
			if err := json.Unmarshal(f.payload, &e); err != nil {
				return 0, fmt.Errorf("read the exit status: %w", err)
			}
			if e.Error != "" {
				fmt.Fprintln(os.Stderr, "lab:", e.Error)
			}
			return e.Code, nil
		}
	}
}

// stopGrace is how long a command in the guest may take to end after a signal was handed to it.
const stopGrace = 3 * time.Second

// interrupts turns signals to this process into the end of its work: the first is handed to the
// command in the guest, if one runs, which then has stopGrace; a second, or the first while there
// is no command, ends it at once.
type interrupts struct {
	mu     sync.Mutex
	hand   func(syscall.Signal)
	cancel func(error)
}

// errSignal is the cause of a context which a signal cancelled.
type errSignal struct{ syscall.Signal }

func (e errSignal) Error() string { return "ended by " + e.Signal.String() }

func watchSignals(cancel func(error)) *interrupts {
	in := &interrupts{cancel: cancel}
	ch := make(chan os.Signal, 8)
	signal.Notify(ch, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	signal.Ignore(syscall.SIGPIPE) // a closed output is a write error and no reason to leave a guest behind
	go func() {
		for s := range ch {
			s := s.(syscall.Signal)
			in.mu.Lock()
			hand := in.hand
			in.hand = nil
			in.mu.Unlock()
			if hand == nil {
				cancel(errSignal{s})
				continue
			}
			time.AfterFunc(stopGrace, func() { cancel(errSignal{s}) })
			go hand(s)
		}
	}()
	return in
}

// forward hands the next signal to f, until undo is called.
func (in *interrupts) forward(f func(syscall.Signal)) (undo func()) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.hand = f
	return func() {
		in.mu.Lock()
		defer in.mu.Unlock()
		in.hand = nil
	}
}
