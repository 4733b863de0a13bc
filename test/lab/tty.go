package main

import (
	"fmt"
	"os"
	"syscall"
	"unsafe"
)

func ioctl(fd uintptr, request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, fd, request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// control does an ioctl without taking f out of the runtime's poller, as File.Fd would.
func control(f *os.File, request uintptr, arg unsafe.Pointer) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = conn.Control(func(fd uintptr) { failed = ioctl(fd, request, arg) })
	if err != nil {
		return err
	}
	return failed
}

type winsize struct{ Rows, Cols, X, Y uint16 }

func setSize(f *os.File, rows, cols uint16) error {
	return control(f, syscall.TIOCSWINSZ, unsafe.Pointer(&winsize{Rows: rows, Cols: cols}))
}

func size(f *os.File) (rows, cols uint16) {
	var w winsize
	if err := control(f, syscall.TIOCGWINSZ, unsafe.Pointer(&w)); err != nil {
		return 24, 80
	}
	return w.Rows, w.Cols
}

func isTerminal(f *os.File) bool {
	var t syscall.Termios
	return control(f, syscall.TCGETS, unsafe.Pointer(&t)) == nil
}

// makeRaw hands every key to the reader of f, as cfmakeraw(3) does, and returns how to undo it.
func makeRaw(f *os.File) (restore func(), err error) {
	var t syscall.Termios
	if err := control(f, syscall.TCGETS, unsafe.Pointer(&t)); err != nil {
		return nil, fmt.Errorf("read the settings of the terminal: %w", err)
	}
	saved := t
	t.Iflag &^= syscall.IGNBRK | syscall.BRKINT | syscall.PARMRK | syscall.ISTRIP |
		syscall.INLCR | syscall.IGNCR | syscall.ICRNL | syscall.IXON
	t.Oflag &^= syscall.OPOST
	t.Lflag &^= syscall.ECHO | syscall.ECHONL | syscall.ICANON | syscall.ISIG | syscall.IEXTEN
	t.Cflag = t.Cflag&^(syscall.CSIZE|syscall.PARENB) | syscall.CS8
	t.Cc[syscall.VMIN], t.Cc[syscall.VTIME] = 1, 0
	if err := control(f, syscall.TCSETS, unsafe.Pointer(&t)); err != nil {
		return nil, fmt.Errorf("make the terminal raw: %w", err)
	}
	return func() {
		_ = control(f, syscall.TCSETS, unsafe.Pointer(&saved)) // nothing left to do about it
	}, nil
}

// openTerminal makes a pseudo terminal.
func openTerminal(rows, cols uint16) (master, slave *os.File, err error) {
	master, err = os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, err
	}
	var unlock, number int32
	if err = control(master, syscall.TIOCSPTLCK, unsafe.Pointer(&unlock)); err == nil {
		err = control(master, syscall.TIOCGPTN, unsafe.Pointer(&number))
	}
	if err == nil {
		slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	}
	if err != nil {
		_ = master.Close()
		return nil, nil, fmt.Errorf("make a terminal: %w", err)
	}
	_ = setSize(master, rows, cols) // cosmetic
	return master, slave, nil
}
