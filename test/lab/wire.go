package main

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"sync"
)

// Between the host and the agent in the guest runs one byte stream, a virtio-serial port, which
// carries frames of any number of processes. A frame is the process's number (4 bytes), the kind
// (1 byte), the payload's length (3 bytes), all little endian, and the payload. Each data stream
// of a process has a window: its sender stops when so many bytes are not yet acknowledged, so a
// reader that lags holds up its own stream and nothing else, and every queue is bounded.

type kind uint8

const (
	kindHello  kind = iota + 1 // agent: the guest is ready
	kindClock                  // host: nanoseconds since 1970, sets the guest's clock
	kindOpen                   // host: JSON of command, starts a process
	kindSignal                 // host: one byte, for the process group
	kindResize                 // host: rows and columns of the terminal, 2 bytes each
	kindStdin                  // host: data; an empty payload is the end
	kindStdout                 // agent: likewise
	kindStderr                 // agent: likewise
	kindAck                    // both: the kind of stream, then 4 bytes: how much was consumed
	kindExit                   // agent: JSON of exit; the process's last frame
)

const (
	headerLen  = 8
	maxPayload = 32 << 10  // a virtio-serial write takes no more at once
	windowLen  = 256 << 10 // bytes under way per stream
)

type frame struct {
	id      uint32
	kind    kind
	payload []byte
}

// command is what the agent is asked to run.
type command struct {
	Argv []string `json:"argv"`
	Dir  string   `json:"dir"`
	Env  []string `json:"env"`
	TTY  bool     `json:"tty"` // on a terminal of its own, all output on stdout
	Rows uint16   `json:"rows"`
	Cols uint16   `json:"cols"`
}

// exit is how a process ended: its exit status, 128 + n if signal n ended it, or 126 or 127 with
// the error if it could not be started.
type exit struct {
	Code  int    `json:"code"`
	Error string `json:"error"`
}

// wire reads and writes frames. One goroutine may receive, any number may send.
type wire struct {
	r  *bufio.Reader
	mu sync.Mutex
	w  io.Writer
}

func newWire(rw io.ReadWriter) *wire {
	return &wire{r: bufio.NewReaderSize(rw, headerLen+maxPayload), w: rw}
}

func (w *wire) send(id uint32, k kind, payload []byte) error {
	if len(payload) > maxPayload {
		return fmt.Errorf("frame of %d bytes: the most is %d", len(payload), maxPayload)
	}
	b := make([]byte, headerLen, headerLen+len(payload))
	binary.LittleEndian.PutUint32(b, id)
	binary.LittleEndian.PutUint32(b[4:], uint32(len(payload))<<8|uint32(k))
	b = append(b, payload...)
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err := w.w.Write(b)
	return err
}

// receive returns the next frame. Its payload is the caller's to keep.
func (w *wire) receive() (frame, error) {
	var h [headerLen]byte
	if _, err := io.ReadFull(w.r, h[:]); err != nil {
		return frame{}, err
	}
	n := binary.LittleEndian.Uint32(h[4:])
	f := frame{id: binary.LittleEndian.Uint32(h[:]), kind: kind(n)}
	if n >>= 8; n > maxPayload {
		return frame{}, fmt.Errorf("frame of kind %d with %d bytes: the most is %d", f.kind, n, maxPayload)
	}
	f.payload = make([]byte, n)
	_, err := io.ReadFull(w.r, f.payload)
	return f, err
}

// window counts the bytes of one stream that its sender may still send.
type window struct {
	mu     sync.Mutex
	change sync.Cond
	left   int
}

func newWindow() *window {
	w := &window{left: windowLen}
	w.change.L = &w.mu
	return w
}

// take waits until n bytes may be sent.
func (w *window) take(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.left < n {
		w.change.Wait()
	}
	w.left -= n
}

func (w *window) give(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.left = min(w.left+n, windowLen)
	w.change.Broadcast()
}

// ack tells the sender of stream k that n bytes were consumed.
func (w *wire) ack(id uint32, k kind, n int) {
	payload := binary.LittleEndian.AppendUint32([]byte{byte(k)}, uint32(n))
	_ = w.send(id, kindAck, payload) // if the wire is gone, its receiver notices
}

// acked reads the payload of a kindAck.
func acked(payload []byte) (stream kind, n int) {
	if len(payload) != 5 {
		return 0, 0
	}
	return kind(payload[0]), int(min(binary.LittleEndian.Uint32(payload[1:]), windowLen))
}

// pump sends all of src as the stream k of process id, then its end.
func (w *wire) pump(id uint32, k kind, src io.Reader, win *window) {
	buf := make([]byte, maxPayload)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			win.take(n)
			if w.send(id, k, buf[:n]) != nil {
				return // if the wire is gone, its receiver notices
			}
		}
		if err != nil {
			_ = w.send(id, k, nil) // likewise
			return
		}
	}
}

// queue holds what was received and not yet consumed: at most a window per stream, as long as the
// other side keeps to the protocol.
type queue[T any] struct {
	mu     sync.Mutex
	change sync.Cond
	items  []T
	closed bool
}

func newQueue[T any]() *queue[T] {
	q := &queue[T]{}
	q.change.L = &q.mu
	return q
}

func (q *queue[T]) push(item T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.items = append(q.items, item)
	q.change.Signal()
}

// pop waits for the next item; false means that the queue was closed and is empty.
func (q *queue[T]) pop() (T, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.items) == 0 && !q.closed {
		q.change.Wait()
	}
	var item T
	if len(q.items) == 0 {
		return item, false
	}
	item, q.items = q.items[0], q.items[1:]
	return item, true
}

func (q *queue[T]) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.change.Broadcast()
}

// drain writes the data of stream k of process id to dst, acknowledging it, until the stream's end
// or dst's first error.
func (w *wire) drain(id uint32, k kind, q *queue[[]byte], dst io.Writer) error {
	for {
		data, ok := q.pop()
		if !ok || len(data) == 0 {
			return nil
		}
		_, err := dst.Write(data)
		w.ack(id, k, len(data))
		if err != nil {
			return err
		}
	}
}
