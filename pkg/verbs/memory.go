package verbs

// #include "rb.h"
import "C"

import (
	"errors"
	"fmt"
	"syscall"
)

// Memory says what an endpoint's buffer is to be. The zero value is pages of this host, wherever the kernel puts them, with
// strict ordering.
type Memory struct {
	// HugePages asks for reserved huge pages of 2 MiB, then for transparent ones, then for ordinary ones: what there is.
	HugePages bool
	// NUMANode is preferred, not insisted on; nil: any.
	NUMANode *int
	// Ring, in bytes, is what successive messages of a bandwidth run walk through at each end, over all QPs. Above the size of
	// the last-level cache it takes them to DRAM. 0: each QP's messages stay in one place.
	Ring int
	// Slots is how many messages it walks through at most before it begins anew; 0: as many as fit.
	Slots int
	// RelaxedOrdering lets the device's writes pass each other on the bus, where device and root port know that. A device that
	// refuses it is used without. Not for a buffer that is polled.
	RelaxedOrdering bool
	// GPU is CUDA's number of the GPU to take the memory of. It takes a binary that was built with the tag dmabuf.
	GPU *int
}

// MemoryKind says what pages a buffer got.
type MemoryKind string

// The kinds.
const (
	OrdinaryPages   MemoryKind = "pages"
	TransparentHuge MemoryKind = "transparent-huge-pages"
	HugePages       MemoryKind = "huge-pages"
	GPUMemory       MemoryKind = "gpu"
)

// MemoryGot is what an endpoint's buffer turned out to be.
type MemoryGot struct {
	Kind MemoryKind
	// NUMANode is where its first page is; nil: the kernel does not tell.
	NUMANode *int
	// RelaxedOrdering is whether the device took the registration so. Whether it makes use of it can't be told.
	RelaxedOrdering bool
	Ring            int // as in Memory
	Bytes           int64
}

// BufferBytes is how much memory an endpoint of this spec registers.
func (s EndpointSpec) BufferBytes() int64 {
	return int64(C.rb_mem_bytes(C.uint64_t(max(0, s.MaxMsg)), C.uint64_t(max(0, s.Memory.Ring)), C.int(max(1, s.QPs)), cBool(s.Memory.HugePages)))
}

// fill sets the C side's wishes.
func (m Memory) fill(a *C.struct_rb_ep_attr) {
	a.ring, a.slots, a.huge_pages, a.relaxed = C.uint64_t(m.Ring), C.uint64_t(m.Slots), cBool(m.HugePages), cBool(m.RelaxedOrdering)
	a.numa_node, a.gpu = -1, -1
	if m.NUMANode != nil {
		a.numa_node = C.int(*m.NUMANode)
	}
	if m.GPU != nil {
		a.gpu = C.int(max(0, *m.GPU))
	}
}

// Memory is what the endpoint's buffer turned out to be.
func (e *Endpoint) Memory() MemoryGot { return e.memory }

func memoryGot(c *C.struct_rb_ep, ring int) MemoryGot {
	kinds := map[C.enum_rb_mem_kind]MemoryKind{
		C.RB_MEM_PAGES: OrdinaryPages, C.RB_MEM_TRANSPARENT: TransparentHuge, C.RB_MEM_HUGE: HugePages, C.RB_MEM_GPU: GPUMemory,
	}
	got := MemoryGot{Kind: kinds[c.mem.kind], RelaxedOrdering: c.mem.relaxed != 0, Ring: ring, Bytes: int64(c.buf_len)}
	if node := int(c.mem.node); node >= 0 {
		got.NUMANode = &node
	}
	return got
}

// explain adds what to do to the error of a buffer that could not be made.
func (m Memory) explain(err error) error {
	if m.GPU != nil && errors.Is(err, syscall.ENOSYS) {
		return fmt.Errorf("%w: the memory of GPU %d takes a binary that was built with -tags dmabuf, and libcuda.so.1 on this node", err, *m.GPU)
	}
	return err
}
