package verbs

// #include <stdlib.h>
// #include "rb_ping.h"
import "C"

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// PingHeader and PingMaxSize bound the payload of a ping, in bytes. The larger one is the largest MTU there is; what a path
// carries is for the caller to know.
const (
	PingHeader  = C.RB_PING_HEADER
	PingMaxSize = C.RB_PING_MAX
)

// PingerSpec is what a Pinger is to be.
type PingerSpec struct {
	Port      int
	PKeyIndex int
	Spin      time.Duration // after a ping, before its thread sleeps; 0: it sleeps at once
	Rate      float64       // answers per second, to all peers together
}

// Pinger is the UD echo of one port: one queue pair and one thread, which asks and answers any number of peers. It is safe
// for concurrent use. Close it.
type Pinger struct {
	dev       *Device
	qpn, qkey uint32
	c         *C.struct_rb_ping
	told      *os.File // readable when a job has ended

	ended   chan struct{} // closed once the thread has
	watched chan struct{} // closed once watch has

	mu     sync.Mutex
	jobs   map[*C.struct_rb_ping_job]chan struct{} // closed when the job is done
	uses   sync.WaitGroup                          // calls that use c
	closed bool
}

// PingPath is the way to a peer's Pinger.
type PingPath struct {
	GIDIndex     int // of this end's source GID; -1: no GRH
	GID          [16]byte
	LID          uint16
	QPN, QKey    uint32
	ServiceLevel int
	TrafficClass int
	FlowLabel    int
	HopLimit     int
}

// PingPeer is a peer that a Pinger knows.
type PingPeer struct {
	id    C.int
	Nonce uint64 // what questions to it, or from it, carry
}

// PingSpec is one run of pings.
type PingSpec struct {
	Peer     PingPeer
	Size     int // payload bytes, PingHeader to PingMaxSize
	Count    int
	Gap      time.Duration // from one ping to the next
	Timeout  time.Duration // an answer that comes later is no sample, and none by then after the last ping is a loss
	Deadline time.Duration // from now; the run ends by then, whatever happens
	// Own is the bound of this end's own delay: a sample during which its thread waited longer for a CPU, and longer than a tenth
	// of the sample, is none. Hardware stamps are not affected by that delay, nor by this bound. 0: no bound.
	Own time.Duration
}

// PingResult is what came of a run of pings. Sent is the sum of the samples, of what was lost and of what is invalid but
// Duplicates and Foreign, which are datagrams beyond those that were asked for.
type PingResult struct {
	Sent int
	Lost int
	// Answered, but no samples: too late; with stamps that can't be; while this end's thread waited for a CPU; while a
	// heavy probe used the peer's port.
	Late, Stamps, Own, Busy int
	Duplicates, Foreign     uint64

	Hardware bool // the samples are by the devices' clocks
	Samples  []PingSample
	Elapsed  time.Duration // from the first ping to the end
}

// PingSample is one round trip, less the responder's delay.
type PingSample struct {
	RTT       time.Duration
	Responder time.Duration // from its receiving the question to its sending the answer
	Own       time.Duration // until this end saw that the answer was there, and in posting; by software: waiting for a CPU
}

// PingTotals count datagrams since a Pinger was made.
type PingTotals struct {
	Asked, Answered          uint64
	Strangers, Limited, Full uint64 // questions not answered: not announced, above the rate, no room
	Stray                    uint64 // answers to nothing that was under way
	Hardware                 bool
}

// NewPinger makes the UD echo of a port and starts its thread.
func (d *Device) NewPinger(s PingerSpec) (*Pinger, error) {
	if s.Port < 1 || s.Port > d.caps.Ports {
		return nil, fmt.Errorf("%s: port %d: the device has ports 1 to %d", d.name, s.Port, d.caps.Ports)
	}
	p := &Pinger{dev: d, qkey: uint32(random64()) &^ (1 << 31), ended: make(chan struct{}), watched: make(chan struct{}), jobs: map[*C.struct_rb_ping_job]chan struct{}{}}
	attr := C.struct_rb_ping_attr{
		port: C.uint8_t(s.Port), pkey_index: C.int(s.PKeyIndex), qkey: C.uint32_t(p.qkey), spin_ns: C.uint64_t(s.Spin),
		rate: C.double(s.Rate), burst: C.double(s.Rate / 10),
	}
	var why C.struct_rb_setup_error
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.c == nil {
		return nil, &OpError{Op: "create pinger", Device: d.name, Errno: syscall.ENODEV}
	}
	if rc := C.rb_ping_new(d.c, &attr, &p.c, &why); rc != 0 {
		return nil, d.setupError(why, rc)
	}
	// The descriptor is duplicated: the C side closes its own.
	fd, err := unix.FcntlInt(uintptr(p.c.done), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: create pinger: %w", d.name, err), opError("free pinger", d.name, C.rb_ping_free(p.c)))
	}
	p.qpn = uint32(C.rb_ping_qpn(p.c))
	p.told = os.NewFile(uintptr(fd), "eventfd")
	d.endpoints.Add(1)
	p.uses.Add(1)
	go func() {
		defer p.uses.Done()
		C.rb_ping_serve(p.c)
		close(p.ended)
	}()
	go p.watch()
	return p, nil
}

func random64() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails, see crypto/rand
	return binary.LittleEndian.Uint64(b[:])
}

// watch tells the callers whose jobs are done, until Close.
func (p *Pinger) watch() {
	defer close(p.watched)
	var b [8]byte
	for {
		if _, err := p.told.Read(b[:]); err != nil {
			return
		}
		p.mu.Lock()
		for j, done := range p.jobs {
			if C.rb_ping_job_done(j) != 0 {
				close(done)
				delete(p.jobs, j)
			}
		}
		p.mu.Unlock()
	}
}

// use keeps Close out until the returned function is called. The error says why the pinger no longer works.
func (p *Pinger) use() (done func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, fmt.Errorf("%s: %w", p.dev.name, errPingerClosed)
	}
	p.uses.Add(1)
	return p.uses.Done, nil
}

var errPingerClosed = errors.New("pinger is closed")

// QPN and QKey are what a peer must know, besides a GID or LID of the port.
func (p *Pinger) QPN() uint32 { return p.qpn }

// QKey is the key that datagrams to this end must carry.
func (p *Pinger) QKey() uint32 { return p.qkey }

// Ended is closed when the pinger's thread has ended: by Close, or because the device failed.
func (p *Pinger) Ended() <-chan struct{} { return p.ended }

// Err says why the thread ended by itself; nil while it runs and after Close.
func (p *Pinger) Err() error {
	select {
	case <-p.ended:
	default:
		return nil
	}
	done, err := p.use()
	if err != nil {
		return nil
	}
	defer done()
	switch {
	case p.c.wc_status != 0:
		return &WCError{Status: WCStatus(p.c.wc_status), VendorErr: uint32(p.c.wc_vendor_err)}
	case syscall.Errno(p.c.err) == syscall.ECANCELED:
		return nil
	}
	return &OpError{Op: callNames[p.c.call], Device: p.dev.name, Errno: syscall.Errno(p.c.err)}
}

var callNames = map[C.enum_rb_call]string{C.RB_CALL_POST_SEND: "post send", C.RB_CALL_POST_RECV: "post receive", C.RB_CALL_POLL: "poll CQ"}

// Ask takes in a peer to be asked with the nonce that it gave.
func (p *Pinger) Ask(path PingPath, nonce uint64) (PingPeer, error) {
	if nonce == 0 {
		return PingPeer{}, fmt.Errorf("%s: a peer's nonce can't be 0", p.dev.name)
	}
	return p.add(path, nonce, 0)
}

// Answer takes in a peer whose questions are answered, up to rate per second, and chooses the nonce that they must carry.
func (p *Pinger) Answer(path PingPath, rate float64) (PingPeer, error) { return p.add(path, 0, rate) }

func (p *Pinger) add(path PingPath, nonce uint64, rate float64) (PingPeer, error) {
	if path.GIDIndex > math.MaxUint8 {
		return PingPeer{}, &LimitError{Device: p.dev.name, What: "GID index", Want: path.GIDIndex, Max: math.MaxUint8}
	}
	done, err := p.use()
	if err != nil {
		return PingPeer{}, err
	}
	defer done()
	c := C.struct_rb_ping_path{
		gid_index: C.int(path.GIDIndex), lid: C.uint16_t(path.LID), sl: C.int(path.ServiceLevel), traffic_class: C.int(path.TrafficClass),
		flow_label: C.int(path.FlowLabel), hop_limit: C.int(path.HopLimit), qpn: C.uint32_t(path.QPN), qkey: C.uint32_t(path.QKey),
	}
	for i, b := range path.GID {
		c.gid[i] = C.uint8_t(b)
	}
	peer := PingPeer{}
	n := C.uint64_t(nonce)
	rc := C.rb_ping_add(p.c, &c, &n, C.uint64_t(random64()), C.double(rate), C.double(math.Max(64, rate/10)), &peer.id)
	if rc == -C.int(syscall.ENOSPC) {
		return PingPeer{}, &LimitError{Device: p.dev.name, What: "number of peers", Want: C.RB_PING_PEERS + 1, Max: C.RB_PING_PEERS}
	}
	if rc != 0 {
		return PingPeer{}, opError("create AH", p.dev.name, rc)
	}
	peer.Nonce = uint64(n)
	return peer, nil
}

// Remove forgets a peer; runs of pings to it end at once.
func (p *Pinger) Remove(peer PingPeer) {
	if done, err := p.use(); err == nil {
		C.rb_ping_remove(p.c, peer.id)
		done()
	}
}

// Busy tells peers, with each answer, that a heavy probe is using the port: by 1 when one begins, -1 when it ends.
func (p *Pinger) Busy(by int) {
	if done, err := p.use(); err == nil {
		C.rb_ping_busy(p.c, C.int(by))
		done()
	}
}

// Totals counts the datagrams so far.
func (p *Pinger) Totals() PingTotals {
	done, err := p.use()
	if err != nil {
		return PingTotals{}
	}
	defer done()
	var t C.struct_rb_ping_totals
	var hw C.int
	C.rb_ping_totals(p.c, &t, &hw)
	return PingTotals{
		Asked: uint64(t.asked), Answered: uint64(t.answered), Strangers: uint64(t.strangers), Limited: uint64(t.limited), Full: uint64(t.full),
		Stray: uint64(t.stray), Hardware: hw != 0,
	}
}

// Ping sends a run of pings and waits for what comes of it, without holding a thread. Its error is that of ctx, or why the pinger
// can't: closed, its device failed (see Err), too many runs at a time (EBUSY), the peer is not known any more (ESTALE).
func (p *Pinger) Ping(ctx context.Context, s PingSpec) (*PingResult, error) {
	if s.Size < PingHeader || s.Size > PingMaxSize || s.Count < 1 || s.Count > math.MaxInt32 || s.Gap < 0 || s.Timeout <= 0 || s.Deadline <= 0 {
		return nil, fmt.Errorf("%s: %d pings of %d bytes (want %d to %d), gap %s, timeout %s", p.dev.name, s.Count, s.Size, PingHeader, PingMaxSize, s.Gap, s.Timeout)
	}
	free, err := p.use()
	if err != nil {
		return nil, err
	}
	defer free()
	j := C.rb_ping_job_new(C.uint32_t(s.Count))
	if j == nil {
		return nil, &OpError{Op: "allocate pings", Device: p.dev.name, Errno: syscall.ENOMEM}
	}
	defer C.free(unsafe.Pointer(j))
	j.peer, j.size, j.gap_ns, j.timeout_ns = s.Peer.id, C.uint32_t(s.Size), C.uint64_t(s.Gap), C.uint64_t(s.Timeout)
	j.deadline_ns, j.own_ns = C.uint64_t(monotonicNS()+uint64(s.Deadline)), C.uint64_t(s.Own)
	done := make(chan struct{})
	p.mu.Lock()
	p.jobs[j] = done
	p.mu.Unlock()
	if rc := C.rb_ping_start(p.c, j); rc != 0 {
		p.forget(j)
		return nil, opError("ping", p.dev.name, rc)
	}
	select {
	case <-done:
	case <-ctx.Done():
		C.rb_ping_cancel(p.c, j)
		p.forget(j)
		return nil, context.Cause(ctx)
	case <-p.ended: // every job is over then
		p.forget(j)
		if err := p.Err(); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("%s: %w", p.dev.name, errPingerClosed)
	}
	return pingResult(j), nil
}

func (p *Pinger) forget(j *C.struct_rb_ping_job) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.jobs, j)
}

func pingResult(j *C.struct_rb_ping_job) *PingResult {
	r := &PingResult{
		Sent: int(j.sent), Duplicates: uint64(j.duplicates), Foreign: uint64(j.foreign), Hardware: j.hardware != 0,
	}
	if r.Sent > 0 {
		r.Elapsed = time.Duration(j.last_ns - j.first_ns)
	}
	shots := unsafe.Slice(C.rb_ping_shots(j), int(j.sent))
	for i := range shots {
		x := &shots[i]
		switch x.state {
		case C.RB_SHOT_OK:
			r.Samples = append(r.Samples, PingSample{RTT: time.Duration(x.rtt_ns), Responder: time.Duration(x.responder_ns), Own: time.Duration(x.own_ns)})
		case C.RB_SHOT_OPEN:
			r.Lost++
		case C.RB_SHOT_LATE:
			r.Late++
		case C.RB_SHOT_OWN:
			r.Own++
		case C.RB_SHOT_BUSY:
			r.Busy++
		default: // also those that still waited for stamps
			r.Stamps++
		}
	}
	return r
}

// Close ends the thread and every run, and frees everything. It is idempotent.
func (p *Pinger) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	p.mu.Unlock()
	C.rb_ping_stop(p.c)
	p.uses.Wait()
	err := p.told.Close()
	<-p.watched
	rc := C.rb_ping_free(p.c)
	p.dev.endpoints.Add(-1)
	return errors.Join(err, opError("free pinger", p.dev.name, rc))
}
