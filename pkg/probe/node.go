package probe

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// Gate shares out ports among the probes of this host. Package schedule has the one that daemons use.
type Gate interface {
	// Acquire waits for the port until ctx ends.
	Acquire(ctx context.Context, key string, exclusive bool) (release func(), err error)
	// TryAcquire does not wait.
	TryAcquire(key string, exclusive bool) (release func(), ok bool)
}

// Meter reads a port's counters around the timed part of a run. stop returns what they grew by since Start, nil if this port can't
// tell. It may be called several times.
type Meter interface {
	Start(ctx context.Context, device string, port int) (stop func(context.Context) *EndEvidence)
}

// Node is this host in the fleet: its devices, and both roles over them ([Node.Probe] and [NewResponder]).
type Node struct {
	Name  string
	Gate  Gate
	Meter Meter
	Log   *slog.Logger
	// Use says whether a device may be used; one that may not is never opened.
	Use func(device string) bool
	// GIDIndex gives the GID index to use; negative: chosen by content.
	GIDIndex func() int
	// FirstPSN, if set, gives the number of a queue pair's first packet, which is random else. A run that begins near 1<<24 is
	// soon over the wrap.
	FirstPSN func() uint32
	// Environments, if set, gives results their fingerprint.
	Environments *Environments
	// LameDuck says why this node wishes to be left alone; empty or nil: it doesn't.
	LameDuck func() string
	// Guard, if set, is asked before heavy probes.
	Guard Guard
	// Rail gives the rail of a port, whose place among all ports is auto.
	Rail func(device string, port, auto int) string
	// Instance identifies this process in handshakes. NewNode makes it.
	Instance string

	host     string                   // boot id of this kernel
	software func(device string) bool // isSoftware, but in tests
	identity identity

	// OnEvent, if set before the first device is opened, is told what happens to devices by itself. It must not wait.
	OnEvent func(device string, e verbs.Event)

	mu         sync.Mutex
	open       map[string]*openDevice
	background sync.WaitGroup
	closed     chan struct{}
	pingers    map[string]*pinger  // by port
	heavy      map[string]int      // heavy probes on a port now
	onCPU      map[int]int         // runs by CPU
	cant       map[string]*failure // what a device was found not to do, by device, transport and op
	blinds     map[string]bool     // ports whose traffic can't be guarded
}

// NewNode returns a Node that may use every device. Close it.
func NewNode(name string, gate Gate, meter Meter, log *slog.Logger) *Node {
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // empty: no peer is taken for this host
	return &Node{
		host: strings.TrimSpace(string(boot)), Name: name, Gate: gate, Meter: meter, Log: log, Instance: newID(),
		Use: func(string) bool { return true }, GIDIndex: func() int { return -1 },
		Rail: func(_ string, _, auto int) string { return strconv.Itoa(auto) }, software: isSoftware, open: map[string]*openDevice{}, closed: make(chan struct{}),
		onCPU: map[int]int{}, cant: map[string]*failure{},
	}
}

// loops reports whether a session's initiator is on this very port, which it then holds at the gate for both ends.
func (n *Node) loops(r *control.OpenRequest, p *LocalPort) bool {
	return n.host != "" && r.Host == n.host && r.Source.Device == p.Device && r.Source.Port == p.Port
}

// newID returns 16 random bytes in hex.
func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, see crypto/rand
	return hex.EncodeToString(b[:])
}

// LocalPort is one port of this host.
type LocalPort struct {
	Device string
	ID     uint64 // of this registration of the device, see verbs.DeviceInfo
	Port   int
	Rail   string
	State  verbs.Port
	GIDs   []verbs.GID // usable ones, best first; none on InfiniBand that needs no GRH

	// Reason is empty if the port can be probed from; else it and Detail say why not.
	Reason Reason
	Detail string

	dev      *openDevice
	software bool // no PCI function behind it: this CPU moves the packets
	iwarp    bool // only rdma_cm can connect its queue pairs; GIDs are addresses of its interface
}

// Key names the port at the gate.
func (p *LocalPort) Key() string { return p.Device + "/" + strconv.Itoa(p.Port) }

// Ports lists every port of every device that may be used, usable or not, in rail order. The state is read anew at each call:
// devices come and go, GID indexes move.
func (n *Node) Ports() ([]LocalPort, error) { return n.scan("") }

// scan is Ports; if only is not empty, just that device's ports are queried and listed.
func (n *Node) scan(only string) ([]LocalPort, error) {
	list, err := verbs.Devices()
	if err != nil {
		return nil, err
	}
	list = slices.DeleteFunc(list, func(d verbs.DeviceInfo) bool { return !n.Use(d.Name) })
	slices.SortFunc(list, func(a, b verbs.DeviceInfo) int { return compareNatural(a.Name, b.Name) })
	n.forget(list)
	var out []LocalPort
	rail := 0
	for _, info := range list {
		dev, err := n.device(info)
		if err != nil {
			if only == "" || only == info.Name {
				reason, detail := openFailure(info.Name, err)
				out = append(out, LocalPort{Device: info.Name, ID: info.ID, Port: 1, Rail: n.Rail(info.Name, 1, rail), Reason: reason, Detail: detail})
			}
			rail++
			continue
		}
		for num := 1; num <= dev.Caps().Ports; num++ {
			if only == "" || only == info.Name {
				p := LocalPort{Device: info.Name, ID: info.ID, Port: num, Rail: n.Rail(info.Name, num, rail), dev: dev, software: n.software(info.Name)}
				n.inspect(&p, info)
				out = append(out, p)
			}
			rail++
		}
	}
	return out, nil
}

// inspect fills in the state of a port and whether it can be used.
func (n *Node) inspect(p *LocalPort, info verbs.DeviceInfo) {
	var err error
	if p.State, err = p.dev.Port(p.Port); err != nil {
		p.Reason, p.Detail = DeviceRemoved, err.Error()
		n.drop(p.Device)
		return
	}
	switch {
	case p.State.State == verbs.PortInit || p.State.State == verbs.PortArmed:
		p.Reason, p.Detail = PortInit, fmt.Sprintf("%s port %d is in state %s: no subnet manager?", p.Device, p.Port, p.State.State)
	case p.State.State != verbs.PortActive:
		p.Reason, p.Detail = PortDown, fmt.Sprintf("%s port %d is in state %s: check the cable and `ip link`", p.Device, p.Port, p.State.State)
	case info.IWARP:
		p.inspectIWARP()
	case p.State.LinkLayer == verbs.Ethernet || p.State.GRHRequired:
		table, err := p.dev.GIDs(p.Port)
		if err != nil {
			p.Reason, p.Detail = NoGID, err.Error()
			return
		}
		if p.State.LinkLayer == verbs.Ethernet {
			p.GIDs, err = verbs.UsableGIDs(table, verbs.Assigned, n.GIDIndex())
		} else if p.GIDs = table[:min(1, len(table))]; len(table) == 0 {
			err = verbs.ErrNoGID
		}
		switch {
		case errors.Is(err, verbs.ErrGIDNotAssigned):
			p.Reason, p.Detail = GIDNotAssigned, fmt.Sprintf("%s port %d: %s", p.Device, p.Port, err)
		case err != nil:
			p.Reason, p.Detail = NoGID, fmt.Sprintf("%s port %d: %s", p.Device, p.Port, err)
		}
	}
}

// find returns one port as it is now.
func (n *Node) find(device string, port int) (*LocalPort, *failure) {
	ports, err := n.scan(device)
	if err != nil {
		return nil, fail(StageSetup, openReason(err), ScopeLocal, "%s", err)
	}
	for i := range ports {
		if p := &ports[i]; p.Device == device && p.Port == port {
			if p.Reason != "" {
				return p, fail(StageSetup, p.Reason, ScopeLocal, "%s", p.Detail)
			}
			return p, nil
		}
	}
	return nil, fail(StageSetup, MissingReason(device), ScopeLocal, "device %s has no port %d that verbs can use", device, port)
}

// MissingReason tells apart the ways in which verbs does not list a device.
func MissingReason(device string) Reason {
	if _, err := os.Stat(filepath.Join("/sys/class/infiniband", device)); err != nil {
		if _, err := os.Stat("/sys/class/infiniband"); err != nil {
			return NoRDMA
		}
		return NoDevice
	}
	if nodes, _ := filepath.Glob("/dev/infiniband/uverbs*"); len(nodes) == 0 {
		return NoCharDevice
	}
	return ProviderMissing
}

func ability(device string, s Spec) string { return fmt.Sprintf("%s %s %s", device, s.Transport, s.Op) }

// unsupported is what is known of a device's lack of a transport or an op; nil: it may have it. It is found by trying, once.
func (n *Node) unsupported(device string, s Spec) *failure {
	n.mu.Lock()
	defer n.mu.Unlock()
	if f := n.cant[ability(device, s)]; f != nil {
		again := *f
		return &again
	}
	return nil
}

// learn keeps a failure that will not be another one the next time, and returns it.
func (n *Node) learn(device string, s Spec, f *failure) *failure {
	if f.reason == OpUnsupported || f.reason == TransportUnsupported {
		n.mu.Lock()
		defer n.mu.Unlock()
		kept := *f
		n.cant[ability(device, s)] = &kept
	}
	return f
}

func openReason(err error) Reason {
	switch {
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return Permission
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ENXIO):
		return NoCharDevice
	case errors.Is(err, syscall.ENODEV), errors.Is(err, syscall.EIO):
		return DeviceRemoved
	}
	return ResourceLimit
}

// isSoftware reports whether no bus device is behind an RDMA device: rxe, siw, or one that sysfs does not know.
func isSoftware(device string) bool {
	_, err := os.Stat(filepath.Join("/sys/class/infiniband", device, "device"))
	return err != nil
}

// openFailure says why a device could not be opened. libibverbs reports a node that may not be opened as one that is not
// there, after a second attempt by another way: so the node itself is asked.
func openFailure(device string, err error) (Reason, string) {
	reason := openReason(err)
	if node := CharDevice(device); reason == NoCharDevice && node != "" {
		f, own := os.OpenFile(node, os.O_RDWR, 0)
		if own == nil {
			f.Close()
		} else if openReason(own) == Permission {
			return Permission, fmt.Sprintf("%s: %s", device, own)
		}
	}
	return reason, err.Error()
}

// CharDevice is the node by which a device is opened, whether it exists or not; empty if sysfs names none.
func CharDevice(device string) string {
	names, _ := filepath.Glob("/sys/class/infiniband_verbs/uverbs*/ibdev") // the pattern is well-formed
	for _, n := range names {
		if text, err := os.ReadFile(n); err == nil && strings.TrimSpace(string(text)) == device {
			return "/dev/infiniband/" + filepath.Base(filepath.Dir(n))
		}
	}
	return ""
}

// compareNatural orders mlx5_2 before mlx5_10.
func compareNatural(a, b string) int {
	tie := 0 // of equal numbers, the one with fewer zeros in front
	for a != "" && b != "" {
		da, db := digits(a), digits(b)
		if da > 0 && db > 0 {
			x, y := strings.TrimLeft(a[:da], "0"), strings.TrimLeft(b[:db], "0")
			if c := cmp.Or(cmp.Compare(len(x), len(y)), cmp.Compare(x, y)); c != 0 {
				return c
			}
			tie = cmp.Or(tie, cmp.Compare(da, db))
			a, b = a[da:], b[db:]
			continue
		}
		if a[0] != b[0] {
			return cmp.Compare(a[0], b[0])
		}
		a, b = a[1:], b[1:]
	}
	return cmp.Or(cmp.Compare(len(a), len(b)), tie)
}

func digits(s string) int {
	n := 0
	for n < len(s) && s[n] >= '0' && s[n] <= '9' {
		n++
	}
	return n
}
