package probe

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// cpus are where the threads of a run over the port may go, best first; none: anywhere.
//
// On hardware it is a CPU of the NIC's node, the last one: the first has interrupts. One that the kernel keeps free of other
// work (isolcpus) is somebody's, and only used if it is named. On a software device the two ends of a session may be on one
// host, as in the lab: there they must not share a CPU while another idles.
func (p *LocalPort) cpus(lastFirst bool) []int {
	allowed := affinity()
	if !p.software {
		near := cpuList(filepath.Join("/sys/class/infiniband", p.Device, "device/local_cpulist"))
		isolated := cpuList("/sys/devices/system/cpu/isolated")
		allowed = slices.DeleteFunc(allowed, func(c int) bool { return !slices.Contains(near, c) || slices.Contains(isolated, c) })
		lastFirst = true
	}
	if lastFirst {
		slices.Reverse(allowed)
	}
	return allowed
}

// affinity are the CPUs that this process may use, in order.
func affinity() []int {
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil {
		return nil
	}
	var out []int
	for i := range len(set) * 64 {
		if set.IsSet(i) {
			out = append(out, i)
		}
	}
	return out
}

// cpuList reads a file of the kernel's list format, such as 0-3,8; none if it can't be read.
func cpuList(file string) []int {
	b, _ := os.ReadFile(file)
	list, _ := ParseCPUs(strings.TrimSpace(string(b)))
	return list
}

// ParseCPUs reads a list of CPUs in the kernel's format: 0-3,8.
func ParseCPUs(s string) ([]int, error) {
	var out []int
	if s == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(s, ",") {
		from, to, isRange := strings.Cut(part, "-")
		lo, err := strconv.ParseUint(from, 10, 12)
		hi := lo
		if err == nil && isRange {
			hi, err = strconv.ParseUint(to, 10, 12)
		}
		if err != nil || hi < lo {
			return nil, &cpuListError{s, part}
		}
		for c := lo; c <= hi; c++ {
			out = append(out, int(c))
		}
	}
	return out, nil
}

type cpuListError struct{ list, part string }

func (e *cpuListError) Error() string {
	return "CPU list " + strconv.Quote(e.list) + ": " + strconv.Quote(e.part) + " is neither a CPU's number below 4096 nor a range such as 0-3"
}

// takeCPUs chooses CPUs for the threads of a run, those that the fewest other runs of this process are on, until release.
func (n *Node) takeCPUs(p *LocalPort, initiator bool, threads int, want []int) (cpus []int, release func()) {
	if len(want) > 0 {
		return want, func() {}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	near := p.cpus(initiator)
	slices.SortStableFunc(near, func(a, b int) int { return n.onCPU[a] - n.onCPU[b] })
	near = near[:min(threads, len(near))]
	for _, c := range near {
		n.onCPU[c]++
	}
	return near, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		for _, c := range near {
			n.onCPU[c]--
		}
	}
}
