package probe

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// A node keeps its devices open between sessions. It lets one go as soon as it sees that the device is no longer there: the
// kernel may hold up whoever removes it until then.

// letGo is how often a device is tried to be closed whose sessions are being ended.
const letGo = 20 * time.Millisecond

var errRemoved = errors.New("the device was removed")

// openDevice is a device of this host as it is open now.
type openDevice struct {
	*verbs.Device
	name string // as it is called now; guarded by Node.mu
	id   uint64
	gone context.Context // ends when the device can't be used any more
	lose context.CancelFunc
}

// device opens a device, unless it is open.
func (n *Node) device(info verbs.DeviceInfo) (*openDevice, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if d := n.open[info.Name]; d != nil {
		return d, nil
	}
	dev, err := verbs.Open(info.Name)
	if err != nil {
		return nil, err
	}
	d := &openDevice{Device: dev, name: info.Name, id: info.ID}
	d.gone, d.lose = context.WithCancel(context.Background())
	n.open[info.Name] = d
	if n.OnEvent != nil {
		n.background.Go(func() { n.watch(d) })
	}
	return d, nil
}

// watch hands on the events of a device until it is closed.
func (n *Node) watch(d *openDevice) {
	err := d.Events(context.Background(), func(e verbs.Event) {
		n.mu.Lock()
		name := d.name
		if e.Type == verbs.EventDeviceFatal {
			n.leaveLocked(d)
		}
		n.mu.Unlock()
		n.OnEvent(name, e)
	})
	if err != nil {
		n.Log.Warn("the events of a device can't be watched: changes are found by looking, some seconds later", slog.String("device", d.Name()), slog.Any("err", err))
	}
}

// forget follows devices that have another name now, and lets those go that are no longer listed.
func (n *Node) forget(list []verbs.DeviceInfo) {
	n.mu.Lock()
	defer n.mu.Unlock()
	known := map[string]uint64{}
	names := map[uint64]string{}
	for _, i := range list {
		known[i.Name] = i.ID
		if i.ID != 0 {
			names[i.ID] = i.Name
		}
	}
	for name, d := range n.open {
		id, listed := known[name]
		switch {
		case listed && (id == d.id || id == 0 || d.id == 0):
		case names[d.id] != "" && n.open[names[d.id]] == nil:
			n.endPingersLocked(name) // they are known by it
			delete(n.open, name)
			d.name = names[d.id]
			n.open[d.name] = d
		default:
			n.leaveLocked(d)
		}
	}
}

// drop lets a device go that does not answer.
func (n *Node) drop(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if d := n.open[name]; d != nil {
		n.leaveLocked(d)
	}
}

// leaveLocked ends the sessions on a device, and closes it once they have freed what they hold. The caller holds mu.
func (n *Node) leaveLocked(d *openDevice) {
	if n.open[d.name] == d {
		delete(n.open, d.name)
	}
	if d.gone.Err() != nil {
		return
	}
	n.endPingersLocked(d.name)
	maps.DeleteFunc(n.cant, func(key string, _ *failure) bool { return strings.HasPrefix(key, d.name+" ") })
	d.lose()
	n.background.Go(func() {
		t := time.NewTicker(letGo)
		defer t.Stop()
		began, told := time.Now(), false
		for {
			err := d.Close()
			if err == nil {
				return
			}
			if !told && time.Since(began) > 3*time.Second {
				told = true
				n.Log.Warn("a device that is gone can't be closed yet", slog.String("device", d.Name()), slog.Any("err", err))
			}
			select {
			case <-t.C:
			case <-n.closed:
				_ = d.Close() // said above if it can't be
				return
			}
		}
	})
}

// Close closes the devices. Sessions must have ended.
func (n *Node) Close() error {
	n.mu.Lock()
	n.endPingersLocked("")
	devices := slices.Collect(maps.Values(n.open))
	clear(n.open)
	select {
	case <-n.closed:
	default:
		close(n.closed)
	}
	n.mu.Unlock()
	var errs []error
	for _, d := range devices { // without the lock: closing waits for whoever watches events
		d.lose()
		errs = append(errs, d.Close())
	}
	n.background.Wait()
	return errors.Join(errs...)
}

// whileThere returns a context that also ends, because of errRemoved, when the port's device goes.
func (p *LocalPort) whileThere(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(p.dev.gone, func() { cancel(errRemoved) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}
