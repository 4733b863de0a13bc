package verbs

// #cgo pkg-config: librdmacm
// #include "rb_cm.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"
	"unsafe"
)

// cmDevice is what librdmacm speaks to.
const cmDevice = "/dev/infiniband/rdma_cm"

// ErrNoCM is a host without rdma_cm.
var ErrNoCM = errors.New("rdma_cm is not there: load the kernel module rdma_ucm, which makes " + cmDevice)

// cmPatience bounds a handshake whose context has no deadline.
const cmPatience = 10 * time.Second

// CMError is a connection that rdma_cm could not make. Unwrap gives the errno: ECONNREFUSED is a peer that rejected it,
// ETIMEDOUT one that did not answer.
type CMError struct {
	Device string
	What   string // was attempted
	QP     int    // for which queue pair
	Reason int    // InfiniBand's code of a rejection (IB spec vol. 1, 12.6.7.2): 8 nobody listens, 28 not wanted there; 0: none
	Errno  syscall.Errno
}

func (e *CMError) Error() string {
	text := fmt.Sprintf("%s: rdma_cm: %s: %s", e.Device, e.What, e.Errno.Error())
	switch e.Reason {
	case 0:
	case 8:
		text += " (nobody listens there)"
	default:
		text += fmt.Sprintf(" (rejected with reason %d)", e.Reason)
	}
	return text
}

func (e *CMError) Unwrap() error { return e.Errno }

// CMAddr is an address that rdma_cm connects from or to.
type CMAddr struct {
	Addr    netip.Addr
	Port    uint16
	IfIndex int // of this host's interface, for link-local addresses
}

func (a CMAddr) String() string { return netip.AddrPortFrom(a.Addr, a.Port).String() }

func (a CMAddr) c() C.struct_rb_cm_addr {
	out := C.struct_rb_cm_addr{port: C.uint16_t(a.Port)}
	ip := a.Addr.Unmap()
	raw := ip.AsSlice()
	for i, b := range raw {
		out.ip[i] = C.uint8_t(b)
	}
	if ip.Is4() {
		out.v4 = 1
	} else if ip.IsLinkLocalUnicast() {
		out.scope = C.uint32_t(a.IfIndex)
	}
	return out
}

// CMAddrs lists the addresses of this host that rdma_cm finds on a port of the device, as GIDs whose index is their place in
// the list: on iWARP, the addresses of the port's interface; on InfiniBand, those of IPoIB.
func (d *Device) CMAddrs(port int) ([]GID, error) {
	if err := cmThere(); err != nil {
		return nil, err
	}
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	var out []GID
	for _, ifi := range interfaces {
		if ifi.Flags&net.FlagLoopback != 0 || ifi.Flags&net.FlagUp == 0 {
			continue
		}
		addrs, err := ifi.Addrs()
		if err != nil {
			continue // it has just gone
		}
		for _, a := range addrs {
			p, err := netip.ParsePrefix(a.String())
			if err != nil {
				continue
			}
			at := CMAddr{Addr: p.Addr().Unmap(), IfIndex: ifi.Index}
			var name [C.IBV_SYSFS_NAME_MAX]C.char
			var num C.int
			ca := at.c()
			if C.rb_cm_owner(&ca, &name[0], &num) == 0 && C.GoString(&name[0]) == d.name && int(num) == port {
				out = append(out, GID{Index: len(out), Addr: at.Addr, Type: GIDIWARP, IfIndex: ifi.Index})
			}
		}
	}
	return out, nil
}

func cmThere() error {
	if _, err := os.Stat(cmDevice); err != nil {
		return ErrNoCM
	}
	return nil
}

var cmSteps = map[C.enum_rb_cm_step]string{
	C.RB_CM_OPEN: "open", C.RB_CM_BIND: "bind to %s", C.RB_CM_LISTEN: "listen on %s", C.RB_CM_REQUEST: "wait for the peer to connect to %s",
	C.RB_CM_ACCEPT: "accept the peer's connection to %s", C.RB_CM_ADDRESS: "resolve the address %s", C.RB_CM_ROUTE: "resolve the route to %s",
	C.RB_CM_QP: "set up a QP towards %s", C.RB_CM_CONNECT: "connect to %s",
}

func (e *Endpoint) cmError(ctx context.Context, why *C.struct_rb_cm_error, rc C.int, at CMAddr) error {
	switch {
	case rc == 0:
		return nil
	case rc == -C.ECANCELED && ctx.Err() != nil:
		return fmt.Errorf("%s: rdma_cm: %w", e.dev.name, context.Cause(ctx))
	case rc == -C.ECANCELED:
		return errClosed
	}
	out := &CMError{Device: e.dev.name, QP: int(why.qp), Reason: int(why.reason), Errno: syscall.Errno(-rc)}
	if why.step == C.RB_CM_DEVICE {
		out.What = fmt.Sprintf("%s belongs to, or is reached by, %s port %d, not port %d of this device", at, C.GoString(&why.device[0]), int(why.port), e.spec.Port)
	} else if out.What = cmSteps[why.step]; why.step != C.RB_CM_OPEN {
		out.What = fmt.Sprintf(out.What, at)
	}
	return out
}

// ListenCM begins to wait for a session's connections at an address of the endpoint's own port, and returns the port that a
// peer must dial. AcceptCM completes them. Whoever does not name the session is rejected.
func (e *Endpoint) ListenCM(at CMAddr, session [16]byte) (port uint16, err error) {
	if !e.begin() {
		return 0, errClosed
	}
	defer e.runs.Done()
	if err := e.newCM(session); err != nil {
		return 0, err
	}
	var why C.struct_rb_cm_error
	var got C.uint16_t
	ca := at.c()
	rc := C.rb_cm_listen(e.cm, e.c, &ca, &got, &why)
	return uint16(got), e.cmError(context.Background(), &why, rc, at)
}

// AcceptCM waits until every queue pair is connected, at most until ctx ends. Of remote only the buffer counts.
func (e *Endpoint) AcceptCM(ctx context.Context, at CMAddr, remote Address, p Path) error {
	return e.withCM(ctx, at, remote, p, func(c *C.struct_rb_conn_attr, deadline C.uint64_t, why *C.struct_rb_cm_error) C.int {
		return C.rb_cm_accept(e.cm, e.c, c, deadline, why)
	})
}

// DialCM connects every queue pair to a peer that listens for the session, from an address of the endpoint's own port, at most
// until ctx ends. Of remote only the buffer counts.
func (e *Endpoint) DialCM(ctx context.Context, from, to CMAddr, session [16]byte, remote Address, p Path) error {
	if err := e.newCM(session); err != nil {
		return err
	}
	to.IfIndex = from.IfIndex
	cf, ct := from.c(), to.c()
	return e.withCM(ctx, to, remote, p, func(c *C.struct_rb_conn_attr, deadline C.uint64_t, why *C.struct_rb_cm_error) C.int {
		return C.rb_cm_connect(e.cm, e.c, c, &cf, &ct, deadline, why)
	})
}

// newCM makes what one handshake needs. Close frees it.
func (e *Endpoint) newCM(session [16]byte) error {
	if err := cmThere(); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.closed:
		return errClosed
	case e.cm != nil || !e.spec.RDMACM:
		return fmt.Errorf("%s: this endpoint is not to be connected by rdma_cm, or is already", e.dev.name)
	}
	return opError("open rdma_cm", e.dev.name, C.rb_cm_new((*C.uint8_t)(unsafe.Pointer(&session)), &e.cm))
}

// withCM makes a call that waits for the peer, until ctx ends or the endpoint is closed.
func (e *Endpoint) withCM(ctx context.Context, at CMAddr, remote Address, p Path, call func(*C.struct_rb_conn_attr, C.uint64_t, *C.struct_rb_cm_error) C.int) error {
	if !e.begin() {
		return errClosed
	}
	defer e.runs.Done()
	e.mu.Lock()
	cm := e.cm
	e.mu.Unlock()
	if cm == nil {
		return fmt.Errorf("%s: accept without a listener", e.dev.name)
	}
	end, ok := ctx.Deadline()
	if !ok {
		end = time.Now().Add(cmPatience)
	}
	stopped := make(chan struct{})
	unhook := context.AfterFunc(ctx, func() {
		if ctx.Err() == context.Canceled { // a deadline is the call's own
			C.rb_cm_stop(cm)
		}
		close(stopped)
	})
	var why C.struct_rb_cm_error
	attr := connAttr(&remote, &p)
	rc := call(&attr, C.uint64_t(monotonicNS()+uint64(max(0, time.Until(end)).Nanoseconds())), &why)
	if !unhook() {
		<-stopped
	}
	return e.cmError(ctx, &why, rc, at)
}
