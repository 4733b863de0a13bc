package verbs

// #include "rb.h"
import "C"

import (
	"context"
	"fmt"
	"os"
	"syscall"
)

// EventType is the type of an asynchronous event (enum ibv_event_type).
type EventType int

// The types that callers tell apart.
const (
	EventDeviceFatal EventType = C.IBV_EVENT_DEVICE_FATAL
	EventPortActive  EventType = C.IBV_EVENT_PORT_ACTIVE
	EventPortError   EventType = C.IBV_EVENT_PORT_ERR
	EventLIDChange   EventType = C.IBV_EVENT_LID_CHANGE
	EventPKeyChange  EventType = C.IBV_EVENT_PKEY_CHANGE
	EventSMChange    EventType = C.IBV_EVENT_SM_CHANGE
	EventReregister  EventType = C.IBV_EVENT_CLIENT_REREGISTER
	EventGIDChange   EventType = C.IBV_EVENT_GID_CHANGE
)

func (t EventType) String() string {
	names := map[EventType]string{
		EventDeviceFatal: "device fatal", EventPortActive: "port active", EventPortError: "port error", EventLIDChange: "LID change",
		EventPKeyChange: "P_Key change", EventSMChange: "SM change", EventReregister: "client reregister", EventGIDChange: "GID change",
	}
	if s := names[t]; s != "" {
		return s
	}
	return fmt.Sprintf("event %d", int(t))
}

// Event is something that happened to a device by itself.
type Event struct {
	Type EventType
	Port int // 0: of the whole device, or of one of its objects
}

// Events calls f with each asynchronous event of the device, in order, until ctx ends or the device is closed, which is no
// error. No thread waits meanwhile. Close waits for f, so f must not wait for Close.
func (d *Device) Events(ctx context.Context, f func(Event)) error {
	file, closing, err := d.watch()
	if file == nil {
		return err
	}
	defer d.watchers.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(closing, cancel)()
	defer context.AfterFunc(ctx, func() { _ = file.Close() })()
	defer file.Close()
	conn, err := file.SyscallConn()
	if err != nil {
		return fmt.Errorf("%s: watch events: %w", d.name, err)
	}
	for {
		var e C.struct_rb_event
		var rc C.int
		err := conn.Read(func(uintptr) bool {
			rc = C.rb_event_get(d.c, &e) // d.c stays: Close waits for the watchers
			return rc != -C.EAGAIN && rc != -C.EINTR
		})
		switch {
		case err != nil && ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("%s: watch events: %w", d.name, err)
		case rc != 0:
			return opError("get event", d.name, rc)
		}
		f(Event{Type: EventType(e._type), Port: int(e.port)})
	}
}

// watch opens the queue of events, and a context that ends when the device is to be closed; nil without an error where there is
// nothing to watch.
func (d *Device) watch() (*os.File, context.Context, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.c == nil {
		return nil, nil, nil
	}
	fd := C.rb_event_fd(d.c)
	if fd == -C.int(syscall.ENOTSUP) {
		return nil, nil, nil
	}
	if fd < 0 {
		return nil, nil, opError("watch events", d.name, fd)
	}
	if d.closing == nil {
		d.closing, d.stopWatch = context.WithCancel(context.Background())
	}
	d.watchers.Add(1)
	return os.NewFile(uintptr(fd), d.name+" events"), d.closing, nil
}

// unwatch ends all calls of Events and waits for them. The caller holds mu.
func (d *Device) unwatch() {
	if d.stopWatch != nil {
		d.stopWatch()
	}
	d.watchers.Wait()
}
