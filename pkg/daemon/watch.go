package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// How often the watch looks at the ports: in any case, after a sign about RDMA devices, and after one about addresses and
// links, of which a host full of containers has many. Signs within settle make one look.
const (
	portLook   = 10 * time.Second
	deviceGap  = 200 * time.Millisecond
	networkGap = 5 * time.Second
	settle     = 50 * time.Millisecond
)

// PortWatch knows the ports of a node as they are now. Signs of the kernel only wake it: what it takes for true is what it
// sees when it looks, so that a lost sign costs seconds and nothing else.
type PortWatch struct {
	node *probe.Node
	use  func(device string) bool
	log  *slog.Logger
	wake chan time.Duration // when at the earliest after the last look

	mu    sync.Mutex
	ports []portName // usable once. One that is down now stays, so that its probes fail with the reason instead of silently ending
	state map[portName]portState
	flaps map[portName]*flaps
}

type portName struct {
	device string
	port   int
}

// portState is what a change of is worth a line in the log.
type portState struct {
	id     uint64
	reason probe.Reason // empty: usable
	up     verbs.PortState
	gids   string
	lid    uint16
	sm     uint16
}

// flaps counts how often a port went down. Whoever notices first counts: the event, or the look.
type flaps struct {
	n      uint64
	events uint64 // of n, since the last look
	ahead  bool   // the last time was seen before its event came
}

// NewPortWatch returns a watch over the devices of the node that use accepts. Set it up before the node opens a device.
func NewPortWatch(n *probe.Node, use func(device string) bool, log *slog.Logger) *PortWatch {
	w := &PortWatch{node: n, use: use, log: log, wake: make(chan time.Duration, 1), flaps: map[portName]*flaps{}}
	n.OnEvent = w.event
	return w
}

// list is the ports to probe from.
func (w *PortWatch) list() []portName {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.ports)
}

// flapped is how often a port went down so far.
func (w *PortWatch) flapped(device string, port int) uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	if f := w.flaps[portName{device, port}]; f != nil {
		return f.n
	}
	return 0
}

// Run watches until ctx ends.
func (w *PortWatch) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { w.listen(ctx, "uevents of the kernel", unix.NETLINK_KOBJECT_UEVENT, 1, aboutRDMA, deviceGap) })
	wg.Go(func() {
		const groups = unix.RTMGRP_LINK | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR
		w.listen(ctx, "changes of the network", unix.NETLINK_ROUTE, groups, func([]byte) bool { return true }, networkGap)
	})
	regular := time.NewTicker(portLook)
	defer regular.Stop()
	var sign <-chan time.Time // when to look because of a sign
	var due, looked time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case gap := <-w.wake:
			at := time.Now().Add(settle)
			if next := looked.Add(gap); next.After(at) {
				at = next
			}
			if sign == nil || at.Before(due) {
				due = at
				sign = time.After(time.Until(at))
			}
			continue
		case <-sign:
		case <-regular.C:
		}
		sign = nil
		w.look()
		looked = time.Now()
	}
}

// sign has the watch look soon. It never waits.
func (w *PortWatch) sign(gap time.Duration) {
	for {
		select {
		case w.wake <- gap:
			return
		default:
		}
		select { // the more urgent one counts
		case other := <-w.wake:
			gap = min(gap, other)
		default:
		}
	}
}

// aboutRDMA picks the uevents of RDMA devices and their character devices.
func aboutRDMA(msg []byte) bool { return bytes.Contains(msg, []byte("infiniband")) }

// listen takes messages of the kernel as signs. What they say is not relied on.
func (w *PortWatch) listen(ctx context.Context, what string, protocol int, groups uint32, matters func([]byte) bool, gap time.Duration) {
	f, err := subscribe(what, protocol, groups)
	if err != nil {
		w.log.Warn("can't listen: changes are found by looking, some seconds later", slog.String("to", what), slog.Any("err", err))
		return
	}
	defer context.AfterFunc(ctx, func() { _ = f.Close() })()
	defer f.Close()
	msg := make([]byte, 64<<10)
	for {
		n, err := f.Read(msg)
		switch {
		case errors.Is(err, os.ErrClosed):
			return
		case errors.Is(err, unix.ENOBUFS): // some were lost
			w.sign(gap)
		case err != nil:
			w.log.Warn("can't listen any more: changes are found by looking, some seconds later", slog.String("to", what), slog.Any("err", err))
			return
		case matters(msg[:n]):
			w.sign(gap)
		}
	}
}

func subscribe(what string, protocol int, groups uint32) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, err
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), what), nil
}

// event is told by a device what happened to it.
func (w *PortWatch) event(device string, e verbs.Event) {
	switch e.Type {
	case verbs.EventPortError:
		w.mu.Lock()
		f := w.flapsOf(portName{device, e.Port})
		if f.ahead {
			f.ahead = false
		} else {
			f.n++
		}
		f.events++
		w.mu.Unlock()
	case verbs.EventDeviceFatal:
		w.log.Error("device reports a fatal error: it is closed, and opened again if it recovers", slog.String("device", device))
	case verbs.EventPortActive, verbs.EventLIDChange, verbs.EventPKeyChange, verbs.EventSMChange, verbs.EventReregister, verbs.EventGIDChange:
	default:
		return // of a queue, whose session knows
	}
	w.sign(deviceGap)
}

// flapsOf returns the count of a port. The caller holds mu.
func (w *PortWatch) flapsOf(p portName) *flaps {
	f := w.flaps[p]
	if f == nil {
		f = &flaps{}
		w.flaps[p] = f
	}
	return f
}

// look learns how the ports are now, and logs a line for each change. The node lets go of devices that are no longer there.
func (w *PortWatch) look() {
	ports, err := w.node.Ports()
	if err != nil {
		w.log.Warn("RDMA devices can't be listed", slog.Any("err", err))
		return
	}
	w.see(ports)
}

// see compares the ports with those of the last look.
func (w *PortWatch) see(ports []probe.LocalPort) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.state == nil {
		w.state = map[portName]portState{}
		if len(ports) == 0 {
			w.log.Info("no RDMA device here that may be used: the daemon runs, and probes once there is one")
		}
	}
	w.renamed(ports)
	w.ports = slices.DeleteFunc(w.ports, func(p portName) bool { return !w.use(p.device) })
	seen := map[portName]bool{}
	for _, p := range ports {
		name := portName{p.Device, p.Port}
		seen[name] = true
		if p.Reason == "" && !slices.Contains(w.ports, name) {
			w.ports = append(w.ports, name)
		}
		now := portState{p.ID, p.Reason, p.State.State, gidText(p), p.State.LID, p.State.SMLID}
		was, known := w.state[name]
		w.state[name] = now
		w.changed(p, was, now, known)
	}
	removed := map[string]bool{} // a line for each device, not for each port
	for _, name := range slices.SortedFunc(maps.Keys(w.state), portName.compare) {
		if seen[name] {
			continue
		}
		delete(w.state, name)
		if !removed[name.device] {
			removed[name.device] = true
			w.log.Warn("device is gone", slog.String("device", name.device))
		}
	}
}

func (p portName) compare(o portName) int {
	if p.device != o.device {
		if p.device < o.device {
			return -1
		}
		return 1
	}
	return p.port - o.port
}

// renamed follows devices that have another name than before. The caller holds mu.
func (w *PortWatch) renamed(ports []probe.LocalPort) {
	listed := map[string]bool{}
	for _, p := range ports {
		listed[p.Device] = true
	}
	told := map[string]bool{}
	for _, p := range ports {
		now := portName{p.Device, p.Port}
		if _, known := w.state[now]; known || p.ID == 0 {
			continue
		}
		for was, state := range w.state {
			if state.id != p.ID || was.port != p.Port || listed[was.device] {
				continue
			}
			delete(w.state, was)
			w.state[now] = state
			if f := w.flaps[was]; f != nil { // the series of the old name ends
				delete(w.flaps, was)
				w.flaps[now] = f
			}
			if i := slices.Index(w.ports, was); i >= 0 {
				w.ports[i] = now
			}
			if !told[p.Device] {
				told[p.Device] = true
				w.log.Info("device has another name", slog.String("device", p.Device), slog.String("was", was.device))
			}
			break
		}
	}
}

// changed logs what is other than at the last look, as one line. The caller holds mu.
func (w *PortWatch) changed(p probe.LocalPort, was, now portState, known bool) {
	f := w.flapsOf(portName{p.Device, p.Port})
	events := f.events
	f.events = 0
	switch wasUp, isUp := was.up == verbs.PortActive, now.up == verbs.PortActive; {
	case isUp:
		f.ahead = false
	case known && wasUp && events == 0:
		f.n++
		f.ahead = true
	}
	at := []any{slog.String("device", p.Device), slog.Int("port", p.Port)}
	switch {
	case known && was.id != 0 && was.id != now.id:
		w.log.Info("device was replaced by another of its name", append(at, slog.String("reason", string(p.Reason)), slog.String("gids", now.gids))...)
	case (!known || was.reason != now.reason) && now.reason == "":
		w.log.Info("port is usable", append(at, slog.String("rail", p.Rail), slog.String("gids", now.gids))...)
	case !known || was.reason != now.reason:
		w.log.Warn("port is not usable", append(at, slog.String("reason", string(p.Reason)), slog.String("detail", p.Detail))...)
	case was.gids != now.gids:
		w.log.Info("GIDs changed", append(at, slog.String("was", was.gids), slog.String("gids", now.gids))...)
	case was.lid != now.lid || was.sm != now.sm:
		w.log.Info("LID or subnet manager changed", append(at, slog.String("was", lidText(was)), slog.String("is", lidText(now)))...)
	case events > 0 && now.up == verbs.PortActive:
		w.log.Warn("port went down and came back", append(at, slog.Uint64("times", events))...)
	}
}

func lidText(s portState) string { return fmt.Sprintf("LID %d, SM %d", s.lid, s.sm) }

func gidText(p probe.LocalPort) string {
	s := ""
	for _, g := range p.GIDs {
		if s != "" {
			s += " "
		}
		s += strconv.Itoa(g.Index) + "=" + g.Addr.String()
	}
	return s
}
