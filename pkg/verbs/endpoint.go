package verbs

// #include <stdlib.h>
// #include <time.h>
// #include "rb.h"
// #include "rb_cm.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// interval is over what minimum and maximum bandwidth are taken, and how far apart the points of a curve are at least.
	interval = 10 * time.Millisecond
	// points of a curve, at most: 41 s at 10 ms.
	points = 4096
	// MaxThreads is how many threads may share an endpoint's QPs.
	MaxThreads = C.RB_MAX_LANES
)

// HistogramHighest is the largest latency, in nanoseconds, that Latency.Counts tells from a larger one.
const HistogramHighest = 1<<37 - 1

// Endpoint is one end of a session: its memory, completion queues and queue pairs, created and freed as a whole.
type Endpoint struct {
	dev  *Device
	spec EndpointSpec
	tx   *C.struct_rb_ctl // of Source and Ping. Both outlive c: Stop and Progress may come at any time
	rx   *C.struct_rb_ctl // of Sink and Pong

	memory MemoryGot

	// Inline is the inline data that the device granted, at most EndpointSpec.Inline bytes.
	Inline int

	runs   sync.WaitGroup // Close waits for them
	busy   [2]sync.Mutex  // one run at a time on each of tx and rx
	mu     sync.Mutex     // guards what follows, and runs.Add
	c      *C.struct_rb_ep
	cm     *C.struct_rb_cm // nil unless connected by rdma_cm, or about to be
	closed bool
}

var steps = map[C.enum_rb_step]string{
	C.RB_STEP_BUFFER: "allocate buffer", C.RB_STEP_PD: "allocate PD", C.RB_STEP_MR: "register memory", C.RB_STEP_CQ: "create CQ",
	C.RB_STEP_QP: "create QP", C.RB_STEP_INIT: "move QP to INIT", C.RB_STEP_RTR: "move QP to RTR", C.RB_STEP_RTS: "move QP to RTS",
	C.RB_STEP_AH: "create AH", C.RB_STEP_RECV: "post receive",
}

func (d *Device) setupError(why C.struct_rb_setup_error, rc C.int) error {
	return opError(steps[why.step], d.name, rc)
}

func cTransport(t Transport) (C.enum_rb_transport, error) {
	switch t {
	case RC:
		return C.RB_RC, nil
	case UC:
		return C.RB_UC, nil
	case UD:
		return C.RB_UD, nil
	}
	return 0, fmt.Errorf("transport %q: want rc, uc or ud", t)
}

func cOp(o Op) (C.enum_rb_op, error) {
	switch o {
	case Write:
		return C.RB_WRITE, nil
	case Read:
		return C.RB_READ, nil
	case Send:
		return C.RB_SEND, nil
	case WriteImm:
		return C.RB_WRITE_IMM, nil
	case FetchAdd:
		return C.RB_FETCH_ADD, nil
	case CmpSwap:
		return C.RB_CMP_SWAP, nil
	}
	return 0, fmt.Errorf("op %q: want write, read, send, write-imm, fetch-add or cmp-swap", o)
}

// LimitError is a spec that the device cannot carry.
type LimitError struct {
	Device, What string
	Want, Max    int
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("%s: %s %d is above the device's limit of %d", e.Device, e.What, e.Want, e.Max)
}

// check refuses what the device cannot carry before anything is created.
func (d *Device) check(s *EndpointSpec) error {
	for _, l := range []struct {
		what      string
		want, max int
	}{
		{"tx depth", s.TxDepth, min(d.caps.MaxQPWR, d.caps.MaxCQE)},
		{"rx depth", s.RxDepth, min(d.caps.MaxQPWR, d.caps.MaxCQE)},
		{"number of QPs", s.QPs, d.caps.MaxQP},
	} {
		if l.want > l.max {
			return &LimitError{Device: d.name, What: l.what, Want: l.want, Max: l.max}
		}
	}
	if s.Threads == 0 {
		s.Threads = 1
	}
	switch {
	case s.QPs < 1 || s.TxDepth < 1 || s.RxDepth < 0 || s.PostList < 1 || s.CQMod < 1 || s.MaxMsg < 1 || s.Samples < 0:
		return fmt.Errorf("%s: endpoint with %d QPs, tx depth %d, rx depth %d, post list %d, CQ moderation %d, messages of %d bytes: all must be positive",
			d.name, s.QPs, s.TxDepth, s.RxDepth, s.PostList, s.CQMod, s.MaxMsg)
	case s.CQMod%s.PostList != 0 || s.CQMod > s.TxDepth:
		return fmt.Errorf("%s: CQ moderation %d must be a multiple of the post list %d and at most the tx depth %d", d.name, s.CQMod, s.PostList, s.TxDepth)
	case s.Threads < 1 || s.Threads > s.QPs || s.Threads > MaxThreads:
		return fmt.Errorf("%s: %d threads for %d QPs: want 1 to %d, and a QP for each", d.name, s.Threads, s.QPs, MaxThreads)
	case s.Mixed && s.Op != Write:
		return fmt.Errorf("%s: reads among op %s: only among writes", d.name, s.Op)
	case s.Port < 1 || s.Port > d.caps.Ports:
		return fmt.Errorf("%s: port %d: the device has ports 1 to %d", d.name, s.Port, d.caps.Ports)
	}
	return nil
}

// NewEndpoint creates an endpoint with its queue pairs in INIT. Close it.
func (d *Device) NewEndpoint(s EndpointSpec) (*Endpoint, error) {
	if err := d.check(&s); err != nil {
		return nil, err
	}
	transport, err := cTransport(s.Transport)
	if err != nil {
		return nil, err
	}
	op, err := cOp(s.Op)
	if err != nil {
		return nil, err
	}
	attr := C.struct_rb_ep_attr{
		transport: transport, op: op, initiator: cBool(s.Initiator), both_ways: cBool(s.BothWays), mixed: cBool(s.Mixed),
		events: cBool(s.Events), lanes: C.int(s.Threads), port: C.uint8_t(s.Port),
		pkey_index: C.int(s.PKeyIndex), qps: C.int(s.QPs), tx_depth: C.int(s.TxDepth), rx_depth: C.int(s.RxDepth),
		cq_mod: C.int(s.CQMod), post_list: C.int(s.PostList), inline_max: C.int(s.Inline), msg_max: C.uint64_t(s.MaxMsg),
		qkey: C.uint32_t(s.QKey), max_cqe: C.int(d.caps.MaxCQE), samples: C.uint64_t(s.Samples),
		by_cm: cBool(s.RDMACM),
	}
	s.Memory.fill(&attr)
	e := &Endpoint{dev: d, spec: s}
	var why C.struct_rb_setup_error
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.c == nil {
		return nil, &OpError{Op: "create endpoint", Device: d.name, Errno: syscall.ENODEV}
	}
	e.tx, e.rx = C.rb_ctl_new(), C.rb_ctl_new()
	for _, c := range []*C.struct_rb_ctl{e.tx, e.rx} {
		if c != nil {
			runtime.AddCleanup(e, func(c *C.struct_rb_ctl) { C.rb_ctl_free(c) }, c)
		}
	}
	if e.tx == nil || e.rx == nil {
		return nil, &OpError{Op: "create endpoint", Device: d.name, Errno: syscall.ENOMEM}
	}
	if rc := C.rb_ep_create(d.c, &attr, &e.c, &why); rc != 0 {
		return nil, s.Memory.explain(d.setupError(why, rc))
	}
	d.endpoints.Add(1)
	e.Inline, e.memory = int(e.c.inline_max), memoryGot(e.c, s.Memory.Ring)
	return e, nil
}

func cBool(b bool) C.int {
	if b {
		return 1
	}
	return 0
}

// Address is this end as the peer must know it, with the given first PSNs. GID and LID are the caller's to fill in.
func (e *Endpoint) Address(psn []uint32) Address {
	a := Address{
		QPN: make([]uint32, e.spec.QPs), PSN: psn, RKey: uint32(C.rb_ep_rkey(e.c)), Addr: uint64(uintptr(unsafe.Pointer(e.c.buf))),
		Stride: uint64(e.c.stride), QKey: e.spec.QKey,
	}
	for i := range a.QPN {
		a.QPN[i] = uint32(C.rb_ep_qpn(e.c, C.int(i)))
	}
	return a
}

// Connect moves the queue pairs through RTR to RTS towards remote. psn are the first PSNs that this end sends, as in
// the Address the peer was given.
func (e *Endpoint) Connect(remote Address, psn []uint32, p Path) error {
	if len(remote.QPN) != e.spec.QPs || len(remote.PSN) != e.spec.QPs || len(psn) != e.spec.QPs {
		return fmt.Errorf("%s: connect %d QPs to a peer with %d", e.dev.name, e.spec.QPs, len(remote.QPN))
	}
	if p.GIDIndex > math.MaxUint8 { // ibv_global_route.sgid_index is 8 bit
		return &LimitError{Device: e.dev.name, What: "GID index", Want: p.GIDIndex, Max: math.MaxUint8}
	}
	attr := connAttr(&remote, &p)
	var why C.struct_rb_setup_error
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return errClosed
	}
	rc := C.rb_ep_connect(e.c, &attr, (*C.uint32_t)(&remote.QPN[0]), (*C.uint32_t)(&remote.PSN[0]), (*C.uint32_t)(&psn[0]), &why)
	if rc != 0 {
		return e.dev.setupError(why, rc)
	}
	return nil
}

func connAttr(remote *Address, p *Path) C.struct_rb_conn_attr {
	attr := C.struct_rb_conn_attr{
		gid_index: C.int(p.GIDIndex), lid: C.uint16_t(remote.LID), mtu: C.int(p.MTU), sl: C.int(p.ServiceLevel), traffic_class: C.int(p.TrafficClass),
		flow_label: C.int(p.FlowLabel), hop_limit: C.int(p.HopLimit), timeout: C.int(p.Timeout), retry: C.int(p.Retries),
		rnr_retry: C.int(p.RNRRetry), min_rnr_timer: C.int(p.MinRNRTimer), rd_atom: C.int(p.RDAtom), dest_rd_atom: C.int(p.DestRDAtom),
		qkey: C.uint32_t(remote.QKey), addr: C.uint64_t(remote.Addr), stride: C.uint64_t(remote.Stride), rkey: C.uint32_t(remote.RKey),
	}
	for i, b := range remote.GID {
		attr.gid[i] = C.uint8_t(b)
	}
	return attr
}

var errClosed = errors.New("endpoint is closed")

// Arm readies the endpoint for runs at one size, before the peer may send.
func (e *Endpoint) Arm(size int, verify bool) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return errClosed
	}
	if size < 1 || size > e.spec.MaxMsg {
		return fmt.Errorf("%s: message of %d bytes: the session was set up for 1 to %d", e.dev.name, size, e.spec.MaxMsg)
	}
	C.rb_ctl_expect(e.tx, math.MaxUint64)
	C.rb_ctl_expect(e.rx, math.MaxUint64)
	return opError("post receive", e.dev.name, C.rb_arm(e.c, C.uint64_t(size), cBool(verify)))
}

// Expect tells a Sink or Pong how many messages the peer sent in all since Arm: it ends when it has seen them, or when no more
// of them come.
func (e *Endpoint) Expect(messages uint64) { C.rb_ctl_expect(e.rx, C.uint64_t(messages)) }

// Enough ends a Source that has neither Iterations nor a Duration, with what it has under way completed.
func (e *Endpoint) Enough() { C.rb_ctl_expect(e.tx, 0) }

// Mark tells a Sink, and a Source of the responder, that the warm-up is over: its rates begin anew.
func (e *Endpoint) Mark() {
	C.rb_ctl_mark(e.tx)
	C.rb_ctl_mark(e.rx)
}

// Stop ends the current runs, and every later one at once.
func (e *Endpoint) Stop() {
	C.rb_ctl_stop(e.tx)
	C.rb_ctl_stop(e.rx)
}

// Progress is the number of messages completed so far in the current run of a role.
func (e *Endpoint) Progress(r Role) uint64 {
	ctl, _ := e.ctl(r)
	return uint64(C.rb_ctl_done(ctl))
}

func (e *Endpoint) ctl(r Role) (*C.struct_rb_ctl, *sync.Mutex) {
	if r == Sink || r == Pong {
		return e.rx, &e.busy[1]
	}
	return e.tx, &e.busy[0]
}

// begin keeps Close waiting until runs.Done.
func (e *Endpoint) begin() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.closed {
		e.runs.Add(1)
	}
	return !e.closed
}

// Run carries out one run and returns what it saw. Cancelling ctx ends it within 100 ms, with End Stopped and the figures so
// far. A Source and a Sink may run at the same time.
func (e *Endpoint) Run(ctx context.Context, s RunSpec) RunResult {
	ctl, busy := e.ctl(s.Role)
	busy.Lock()
	defer busy.Unlock()
	if !e.begin() {
		return RunResult{End: Broken, Err: errClosed}
	}
	defer e.runs.Done()
	if s.Role == Ping && e.spec.Samples == 0 {
		return RunResult{End: Broken, Err: fmt.Errorf("%s: endpoint was set up without latency samples", e.dev.name)}
	}

	done := make(chan struct{})
	unhook := context.AfterFunc(ctx, func() {
		e.Stop()
		close(done)
	})
	lanes := make([]laneResult, e.spec.Threads)
	var wg sync.WaitGroup
	for i := range lanes {
		wg.Go(func() {
			lanes[i] = e.lane(ctl, i, s)
			if len(lanes) > 1 && lanes[i].End != Done { // the others would wait for what won't come
				e.Stop()
			}
		})
	}
	wg.Wait()
	if !unhook() {
		<-done
	}
	return merge(lanes)
}

// laneResult is what one thread saw.
type laneResult struct {
	RunResult
	start, end time.Duration
}

// lane runs one thread's share.
func (e *Endpoint) lane(ctl *C.struct_rb_ctl, lane int, s RunSpec) laneResult {
	r := C.struct_rb_run{
		lane: C.int(lane), size: C.uint64_t(s.Size), iterations: C.uint64_t(s.Iterations), duration_ns: C.uint64_t(s.Duration.Nanoseconds()),
		deadline_ns: C.uint64_t(monotonicNS() + uint64(s.Deadline.Nanoseconds())), stall_ns: C.uint64_t(s.Stall.Nanoseconds()),
		interval_ns: C.uint64_t(interval.Nanoseconds()), yield_ns: C.uint64_t(s.Yield.Nanoseconds()), scale: 1,
		responds: cBool(s.Role == Pong), rate: C.double(s.Rate / float64(e.spec.Threads)), read_permille: C.int(s.ReadPermille), verify: cBool(s.Verify),
	}
	var mem cMemory
	defer mem.free()
	var counts []int64
	if s.Role == Ping {
		counts = make([]int64, C.RB_HIST_LEN)
		r.hist = (*C.int64_t)(mem.alloc(C.RB_HIST_LEN, 8))
		if s.Raw > 0 {
			r.raw, r.raw_cap = (*C.uint64_t)(mem.alloc(s.Raw, 8)), C.uint64_t(s.Raw)
		}
		if !e.spec.Op.OneSided() {
			r.scale = 0.5
		}
	}
	if s.Role == Source || s.Role == Sink {
		r.series, r.series_cap = (*C.struct_rb_point)(mem.alloc(points, C.sizeof_struct_rb_point)), points
	}
	if mem.failed {
		return laneResult{RunResult: RunResult{End: Broken, Err: &OpError{Op: "allocate samples", Device: e.dev.name, Errno: syscall.ENOMEM}}}
	}
	cpu := -1
	if len(s.CPUs) > 0 {
		cpu = s.CPUs[lane%len(s.CPUs)]
	}
	onCPU(cpu, func() { e.loop(s.Role, &r, ctl) })
	if r.hist != nil {
		copy(counts, unsafe.Slice((*int64)(unsafe.Pointer(r.hist)), len(counts)))
	}
	return laneResult{RunResult: e.result(&r, counts), start: time.Duration(r.start_ns), end: time.Duration(r.end_ns)}
}

// cMemory is freed as a whole.
type cMemory struct {
	all    []unsafe.Pointer
	failed bool
}

func (m *cMemory) alloc(n, size int) unsafe.Pointer {
	p := C.calloc(C.size_t(n), C.size_t(size))
	m.failed = m.failed || p == nil
	m.all = append(m.all, p)
	return p
}

func (m *cMemory) free() {
	for _, p := range m.all {
		C.free(p)
	}
}

func (e *Endpoint) loop(role Role, r *C.struct_rb_run, ctl *C.struct_rb_ctl) {
	switch {
	case role == Source:
		C.rb_run_bw_source(e.c, r, ctl)
	case role == Sink:
		C.rb_run_bw_sink(e.c, r, ctl)
	case e.spec.Op.OneSided():
		C.rb_run_lat_operation(e.c, r, ctl)
	case e.spec.Op == Write:
		C.rb_run_lat_memory(e.c, r, ctl)
	default:
		C.rb_run_lat_message(e.c, r, ctl)
	}
}

// VerifySlots checks what the peer's plain writes of a verified run left here, once they are all done: every slot must hold a
// message that belongs there. It returns how many did.
func (e *Endpoint) VerifySlots(size int) (verified uint64, err error) {
	if !e.begin() {
		return 0, errClosed
	}
	defer e.runs.Done()
	r := C.struct_rb_run{size: C.uint64_t(size)}
	C.rb_verify_slots(e.c, &r)
	if r.end == C.RB_END_CORRUPT {
		return uint64(r.verified), e.corrupt(&r)
	}
	return uint64(r.verified), nil
}

func (e *Endpoint) corrupt(r *C.struct_rb_run) error {
	return &CorruptError{
		Device: e.dev.name, QP: int(r.bad_qp), Message: uint64(r.bad_message), Offset: uint64(r.bad_at), Want: uint64(r.bad_want), Got: uint64(r.bad_got),
	}
}

// onCPU calls f on a thread that is bound to one CPU, and gives that thread up afterwards: one that went back to the Go
// runtime would run other goroutines there. If it can't be bound, f runs all the same.
func onCPU(cpu int, f func()) {
	if cpu < 0 {
		f()
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		var set unix.CPUSet
		set.Set(cpu)
		_ = unix.SchedSetaffinity(0, &set)
		f()
	}()
	<-done
}

func (e *Endpoint) result(r *C.struct_rb_run, counts []int64) RunResult {
	out := RunResult{
		Flushed: uint64(r.flushed), Posted: uint64(r.posted), Completed: uint64(r.completed), Received: uint64(r.received),
		BytesReceived: uint64(r.bytes_received), Lost: uint64(r.lost), Late: uint64(r.late), Duplicates: uint64(r.duplicates),
		Reordered: uint64(r.reordered), Verified: uint64(r.verified), QueueFull: uint64(r.enomem),
		Elapsed: time.Duration(r.end_ns - r.start_ns), CPU: time.Duration(r.cpu_ns), Preempted: uint64(r.preempted),
	}
	switch r.end {
	case C.RB_END_DONE:
		out.End = Done
	case C.RB_END_STOPPED:
		out.End = Stopped
	case C.RB_END_DEADLINE:
		out.End = Deadline
	case C.RB_END_STALLED:
		out.End = Stalled
	case C.RB_END_WC:
		out.End, out.Err = Broken, &WCError{Status: WCStatus(r.wc_status), VendorErr: uint32(r.wc_vendor_err)}
	case C.RB_END_CORRUPT:
		out.End, out.Err = Corrupt, e.corrupt(r)
	default:
		calls := map[C.enum_rb_call]string{C.RB_CALL_POST_SEND: "post send", C.RB_CALL_POST_RECV: "post receive", C.RB_CALL_POLL: "poll CQ"}
		out.End, out.Err = Broken, &OpError{Op: calls[r.call], Device: e.dev.name, Errno: syscall.Errno(r.err)}
	}
	if span := r.last_ns - r.first_ns; r.first_ns != 0 && span > 0 {
		rate := float64(r.last_done-r.first_done) * 1e9 / float64(span)
		out.Rate = &rate
	}
	if r.max_rate > 0 {
		lo, hi := float64(r.min_rate), float64(r.max_rate)
		out.MinRate, out.MaxRate = &lo, &hi
	}
	if r.series_n > 0 {
		for _, p := range unsafe.Slice(r.series, r.series_n) {
			out.Curve = append(out.Curve, Point{At: time.Duration(p.ns), Done: float64(p.done)})
		}
		if last := (Point{At: time.Duration(r.last_ns), Done: float64(r.last_done)}); last.At > out.Curve[len(out.Curve)-1].At {
			out.Curve = append(out.Curve, last)
		}
	}
	if n := int64(r.lat_n); n > 0 {
		out.Latency = &Latency{
			Samples: n, Hit: int64(r.lat_hit), Min: time.Duration(r.lat_min), Max: time.Duration(r.lat_max), MeanNS: float64(r.lat_mean),
			StddevNS: math.Sqrt(float64(r.lat_m2) / float64(n)), Counts: counts,
		}
		if r.raw_n > 0 {
			out.Latency.Raw = slices.Clone(unsafe.Slice((*uint64)(unsafe.Pointer(r.raw)), r.raw_n))
		}
	}
	return out
}

// merge sums up what the threads of a run saw. A rate is taken over the time that they have in common.
func merge(lanes []laneResult) RunResult {
	if len(lanes) == 1 {
		return lanes[0].RunResult
	}
	out := RunResult{End: Done}
	start, end := lanes[0].start, lanes[0].end
	curves := make([]Curve, len(lanes))
	for i, l := range lanes {
		// Of a lane that broke and those that were stopped for it, the first tells why.
		if l.End != Done && (out.End == Done || out.End == Stopped) {
			out.End, out.Err = l.End, l.Err
		}
		out.Flushed += l.Flushed
		out.Posted += l.Posted
		out.Completed += l.Completed
		out.Received += l.Received
		out.BytesReceived += l.BytesReceived
		out.Duplicates += l.Duplicates
		out.Reordered += l.Reordered
		out.Late += l.Late
		out.Verified += l.Verified
		out.QueueFull += l.QueueFull
		out.CPU += l.CPU
		out.Preempted += l.Preempted
		start, end = min(start, l.start), max(end, l.end)
		curves[i] = l.Curve
	}
	out.Elapsed = end - start
	out.Curve = sum(curves)
	if n := len(out.Curve); n > 1 {
		if rate, ok := out.Curve.Rate(out.Curve[0].At, out.Curve[n-1].At); ok {
			out.Rate = &rate
		}
		if lo, hi, ok := out.Curve.Extremes(interval); ok {
			out.MinRate, out.MaxRate = &lo, &hi
		}
	}
	return out
}

// Close stops a run under way and waits for it, then moves the queue pairs to ERR and frees everything. It is idempotent.
func (e *Endpoint) Close() error {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return nil
	}
	e.closed = true
	if e.cm != nil {
		C.rb_cm_stop(e.cm)
	}
	e.mu.Unlock()

	e.Stop()
	e.runs.Wait()
	C.rb_ep_abort(e.c)
	rc := C.rb_ep_destroy(e.c)
	if e.cm != nil {
		C.rb_cm_free(e.cm)
	}
	e.dev.endpoints.Add(-1)
	return opError("free endpoint", e.dev.name, rc)
}

func monotonicNS() uint64 {
	var t C.struct_timespec
	C.clock_gettime(C.CLOCK_MONOTONIC, &t)
	return uint64(t.tv_sec)*1e9 + uint64(t.tv_nsec)
}

// Now is this host's CLOCK_MONOTONIC, the time of a Curve.
func Now() time.Duration { return time.Duration(monotonicNS()) }
