package probe

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// Memory is how the buffers of a probe are made. The zero value is ordinary pages, near the device, registered with relaxed
// ordering unless the buffer is polled.
type Memory struct {
	HugePages bool // at both ends, where there are any
	// Ring is how many bytes the messages of a bandwidth probe walk through at each end; 0: each QP's stay in one place.
	Ring           int
	StrictOrdering bool // no relaxed ordering, at either end
	GPU            *int // CUDA's number of the GPU whose memory this end uses; nil: none
}

// validate refuses what can't work for a spec with defaults.
func (m Memory) validate(s *Spec, largest int) error {
	switch {
	case m.Ring == 0 && m.GPU == nil:
		return nil
	case m.Ring < 0 || m.Ring > control.MaxMessage:
		return fmt.Errorf("ring %d is out of range 1 to %d bytes", m.Ring, control.MaxMessage)
	case m.Ring > 0 && s.Kind != Bandwidth && s.Kind != MessageRate:
		return fmt.Errorf("a ring is for bandwidth and message-rate; %s has one message on its way at a time", s.Kind)
	case m.Ring > 0 && m.Ring/s.QPs < 2*largest:
		return fmt.Errorf("a ring of %d bytes over %d QPs has no room for two messages of %d bytes each: use a larger one", m.Ring, s.QPs, largest)
	case m.GPU != nil && (*m.GPU < 0 || *m.GPU > 1023):
		return fmt.Errorf("GPU %d is out of range 0 to 1023", *m.GPU)
	case m.GPU != nil && s.Inline > 0:
		return fmt.Errorf("inline data is copied by this CPU, which can't read a GPU's memory: leave out inline or the GPU")
	case m.GPU != nil && polled(s.Kind, s.Op):
		return fmt.Errorf("write latency polls the memory that is written to, which this CPU can't do with a GPU's: use send or read")
	}
	return nil
}

// polled reports whether the ends watch their memory for what arrives: then the last byte must come last.
func polled(kind Kind, op verbs.Op) bool { return kind == Latency && op == verbs.Write }

// memory is what an endpoint on this port asks for.
func (p *LocalPort) memory(m control.Memory, kind Kind, op verbs.Op) verbs.Memory {
	return verbs.Memory{
		HugePages: m.HugePages, Ring: m.Ring, RelaxedOrdering: !m.StrictOrdering && !polled(kind, op), NUMANode: numaNode("/sys", p.Device),
	}
}

func (m Memory) wire() control.Memory {
	return control.Memory{HugePages: m.HugePages, Ring: m.Ring, StrictOrdering: m.StrictOrdering}
}

func memoryGot(m verbs.MemoryGot) *control.MemoryGot {
	return &control.MemoryGot{Kind: string(m.Kind), NUMANode: m.NUMANode, RelaxedOrdering: m.RelaxedOrdering, Ring: m.Ring}
}

// numaNode is the node that a device's PCI function is on; nil: none, or not told. A sub-function's is its parent's.
func numaNode(sysfs, device string) *int {
	for _, at := range []string{"device", "device/.."} {
		dir, err := filepath.EvalSymlinks(filepath.Join(sysfs, "class/infiniband", device, "device"))
		if err != nil {
			return nil
		}
		text, err := os.ReadFile(filepath.Join(dir, strings.TrimPrefix(at, "device"), "numa_node"))
		if err != nil {
			continue
		}
		if n, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && n >= 0 {
			return &n
		}
		return nil
	}
	return nil
}
