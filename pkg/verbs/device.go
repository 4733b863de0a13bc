package verbs

// #cgo pkg-config: libibverbs
// #cgo CFLAGS: -std=gnu11 -O2
// #include <stdlib.h>
// #include "rb.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"
)

const maxDevices = 256

// maxGIDs bounds the scan of a GID table; rxe and some NICs have 1024 slots.
const maxGIDs = 4096

func init() {
	// The kernel keeps time by the TSC only while that can be trusted; so do we.
	src, _ := os.ReadFile("/sys/devices/system/clocksource/clocksource0/current_clocksource")
	if strings.TrimSpace(string(src)) == "tsc" {
		C.rb_clock_init(1)
	} else {
		C.rb_clock_init(0)
	}
}

func opError(op, device string, rc C.int) error {
	if rc == 0 {
		return nil
	}
	return &OpError{Op: op, Device: device, Errno: syscall.Errno(-rc)}
}

// Devices lists the devices that libibverbs can use. A device in sysfs that is missing here has no user-space provider or
// no /dev/infiniband node. A machine without RDMA gives an empty list and no error.
func Devices() ([]DeviceInfo, error) {
	list := make([]C.struct_rb_dev_info, maxDevices)
	var n C.int
	if rc := C.rb_list(&list[0], maxDevices, &n); rc != 0 {
		if errno := syscall.Errno(-rc); errno == syscall.ENOSYS || errno == syscall.ENOENT {
			return nil, nil // no kernel module is loaded
		}
		return nil, opError("list devices", "verbs", rc)
	}
	out := make([]DeviceInfo, n)
	for i := range out {
		d := &list[i]
		out[i] = DeviceInfo{
			Name:     C.GoString(&d.name[0]),
			ID:       uint64(d.id),
			NodeGUID: uint64(d.node_guid),
			IWARP:    d.transport == C.IBV_TRANSPORT_IWARP,
		}
	}
	return out, nil
}

// Device is an open device. It is safe for concurrent use.
type Device struct {
	name string
	caps Caps

	endpoints atomic.Int32
	watchers  sync.WaitGroup   // of events
	mu        sync.RWMutex     // Close takes it for writing
	c         *C.struct_rb_dev // nil once closed
	closing   context.Context  // ends the watchers; nil while there was none
	stopWatch context.CancelFunc
}

// Open opens a device by its verbs name and reads its limits.
func Open(name string) (*Device, error) {
	cname := C.CString(name)
	defer C.free(unsafe.Pointer(cname))
	var c *C.struct_rb_dev
	if rc := C.rb_open(cname, &c); rc != 0 {
		return nil, opError("open device", name, rc)
	}
	var caps C.struct_rb_caps
	if rc := C.rb_query_caps(c, &caps); rc != 0 {
		return nil, errors.Join(opError("query device", name, rc), opError("close device", name, C.rb_close(c)))
	}
	return &Device{name: name, c: c, caps: Caps{
		Ports: int(caps.ports), MaxQP: int(caps.max_qp), MaxQPWR: int(caps.max_qp_wr), MaxCQ: int(caps.max_cq), MaxCQE: int(caps.max_cqe),
		MaxRDAtom: int(caps.max_rd_atom), MaxInitRDAtom: int(caps.max_init_rd_atom), Atomics: caps.atomic_cap != C.IBV_ATOMIC_NONE,
		MaxMRBytes: uint64(caps.max_mr_size), FirmwareVersion: C.GoString(&caps.fw_ver[0]),
	}}, nil
}

// Name is the verbs name, such as mlx5_0.
func (d *Device) Name() string { return d.name }

// Caps are the device's limits, read when it was opened.
func (d *Device) Caps() Caps { return d.caps }

// Close closes the device. It fails while endpoints are open: closing does not free them.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.c == nil {
		return nil
	}
	if n := d.endpoints.Load(); n > 0 {
		return fmt.Errorf("%s: close device: %d endpoints are still open", d.name, n)
	}
	d.unwatch()
	c := d.c
	d.c = nil
	return opError("close device", d.name, C.rb_close(c))
}

// use calls f with the open device and keeps Close out meanwhile.
func (d *Device) use(op string, f func(c *C.struct_rb_dev) C.int) error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.c == nil {
		return &OpError{Op: op, Device: d.name, Errno: syscall.ENODEV}
	}
	return opError(op, d.name, f(d.c))
}

// Port queries the state of port n, counted from 1.
func (d *Device) Port(n int) (Port, error) {
	var p C.struct_rb_port
	err := d.use(fmt.Sprintf("query port %d", n), func(c *C.struct_rb_dev) C.int { return C.rb_query_port(c, C.int(n), &p) })
	if err != nil {
		return Port{}, err
	}
	layer := UnknownLinkLayer
	switch p.link_layer {
	case C.IBV_LINK_LAYER_ETHERNET:
		layer = Ethernet
	case C.IBV_LINK_LAYER_INFINIBAND, C.IBV_LINK_LAYER_UNSPECIFIED: // unspecified is IB by definition of the verb
		layer = InfiniBand
	}
	return Port{
		State: PortState(p.state), LinkLayer: layer, ActiveMTU: int(p.active_mtu), MaxMTU: int(p.max_mtu), LID: uint16(p.lid), SMLID: uint16(p.sm_lid),
		GRHRequired: p.grh_required != 0, MaxMsg: uint32(p.max_msg), GIDs: int(p.gid_len), PKeys: int(p.pkey_len), RateGbps: float64(p.rate),
	}, nil
}

// GIDs reads the used entries of a port's GID table.
func (d *Device) GIDs(port int) ([]GID, error) {
	table := make([]C.struct_rb_gid, maxGIDs)
	var n C.int
	err := d.use(fmt.Sprintf("query GID table of port %d", port), func(c *C.struct_rb_dev) C.int {
		return C.rb_query_gids(c, C.int(port), &table[0], maxGIDs, &n)
	})
	if err != nil {
		return nil, err
	}
	out := make([]GID, n)
	for i := range out {
		g := &table[i]
		raw := *(*[16]byte)(unsafe.Pointer(&g.raw))
		out[i] = GID{Index: int(g.index), Addr: netip.AddrFrom16(raw).Unmap(), IfIndex: int(g.ifindex)}
		switch g._type {
		case C.RB_GID_IB:
			out[i].Type = GIDIB
		case C.RB_GID_ROCE_V1:
			out[i].Type = GIDRoCEv1
		case C.RB_GID_ROCE_V2:
			out[i].Type = GIDRoCEv2
		default:
			out[i].Type = GIDUnknown
		}
	}
	return out, nil
}

// ClockResidual is the relative difference between two calibrations of the clock that latency samples are taken with, one of the
// process's first second and one of all the time since; 0 where that clock needs none.
func ClockResidual() float64 { return float64(C.rb_clock_residual()) }

// PKey is an entry of a port's partition table, in host order. 0 is an empty one.
func (d *Device) PKey(port, index int) (uint16, error) {
	var v C.uint16_t
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.c == nil {
		return 0, &OpError{Op: "query P_Key", Device: d.name, Errno: syscall.ENODEV}
	}
	err := opError("query P_Key", d.name, C.rb_query_pkey(d.c, C.int(port), C.int(index), &v))
	return uint16(v), err
}
