package counters

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// hostState is the machine around the devices, read once for all of them.
type hostState struct {
	shared Environment // the part that all ports have in common
	cpus   []cpuRead
	nodes  []nodeRead
	idle   []idleState
	local  []int // CPUs that this process may use
}

type nodeRead struct {
	node     int
	cpus     []int
	text     string
	distance []int // to the nodes in their order
}

type cpuRead struct {
	cpu                   int
	governor, preference  *string
	maxKHz, hardwareKHz   *uint64
	throttle, pkgThrottle *uint64
	asleep                int // index of the deepest idle state that is enabled; -1: not known
}

type idleState struct {
	name   string
	exitUS int
}

// environment begins that of a port with what the host's part of it is.
func (h *hostState) environment(device string, port int) *Environment {
	e := h.shared
	e.Device, e.Port, e.Driver, e.Transport = sanitise(device), port, unknown, unknown
	e.Missing = slices.Clone(h.shared.Missing)
	h.fill(&e, nil)
	return &e
}

func (fs *FS) hostState(ctx context.Context) (*hostState, error) {
	h, err := run(ctx, fs, hostLane, func(l *lane) (*hostState, error) { return l.hostState(), nil })
	if errors.Is(err, ErrNotAnswering) {
		h, err = &hostState{shared: Environment{Missing: []Unreadable{{Name: "host", Errno: new("ETIMEDOUT")}}}}, nil
	}
	return h, err
}

func (l *lane) hostState() *hostState {
	r := &reader{lane: l}
	h := &hostState{}
	e := &h.shared
	e.Missing = []Unreadable{}
	if l.fs.live {
		e.Versions.Kernel = kernelRelease()
	}
	if proc := l.fs.Proc; proc != "" {
		if v := field(r, "versions.kernel", proc+"/sys/kernel/osrelease", asText); v != nil {
			e.Versions.Kernel = v
		}
		e.Versions.RDMACore = r.rdmaCore(proc)
		e.Uptime = field(r, "uptime_seconds", proc+"/uptime", parseUptime)
		e.Memory.Memlock = r.memlock(proc)
		if list := field(r, "numa.allowed", proc+"/self/status", statusLine("Cpus_allowed_list")); list != nil {
			e.NUMA.Allowed = list
			h.local, _ = parseList(*list)
		}
	}
	r.memory(e)
	if units, err := l.list(l.fs.path("class", "iommu")); err == nil {
		e.IOMMU.Present = new(len(units) > 0)
	}
	h.readNodes(r, e)
	h.readCPUs(r)
	e.Missing = append(e.Missing, r.missing...)
	return h
}

// near brings in where the device is in the machine, and what its CPUs do.
func (h *hostState) near(r *reader, d *Device, e *Environment) {
	dir := r.function(d.dir)
	if dir == "" {
		return
	}
	e.NUMA.Node = field(r, "numa.node", dir+"/numa_node", parseInt)
	var near []int
	if e.NUMA.Node != nil && *e.NUMA.Node >= 0 {
		for _, n := range h.nodes {
			if n.node == *e.NUMA.Node {
				near = n.cpus
				e.NUMA.CPUs = new(n.text)
			}
		}
	}
	if near == nil { // a machine of one node, or a platform that knows no nodes but which CPUs are near
		if list := field(r, "numa.cpus", dir+"/local_cpulist", asText); list != nil {
			near, _ = parseList(*list)
			e.NUMA.CPUs = list
		}
	}
	h.distance(e, near)
	h.fill(e, near)
	for i, cpu := range near {
		if i == frequencySamples {
			break
		}
		khz := parsed(r.lane, r.fs.path("devices", "system", "cpu", "cpu"+strconv.Itoa(cpu), "cpufreq", "scaling_cur_freq"), parseCounter)
		if khz != nil && (e.CPU.CurKHz == nil || *khz < *e.CPU.CurKHz) {
			e.CPU.CurKHz = khz
		}
	}
}

// distance finds how far the CPUs that this process may use are from the device.
func (h *hostState) distance(e *Environment, near []int) {
	if len(near) == 0 || len(h.local) == 0 {
		return
	}
	e.NUMA.Local = new(slices.ContainsFunc(h.local, func(c int) bool { return slices.Contains(near, c) }))
	if e.NUMA.Node == nil {
		return
	}
	for i, to := range h.nodes {
		if to.node != *e.NUMA.Node {
			continue
		}
		for _, from := range h.nodes {
			if i < len(from.distance) && slices.ContainsFunc(from.cpus, func(c int) bool { return slices.Contains(h.local, c) }) {
				if d := from.distance[i]; e.NUMA.Distance == nil || d < *e.NUMA.Distance {
					e.NUMA.Distance = &d
				}
			}
		}
	}
}

func (h *hostState) readNodes(r *reader, e *Environment) {
	names, err := r.list(r.fs.path("devices", "system", "node"))
	if err != nil {
		return
	}
	for _, name := range names {
		n, ok := strings.CutPrefix(name, "node")
		node, err := strconv.Atoi(n)
		if !ok || err != nil {
			continue
		}
		read := nodeRead{node: node}
		dir := r.fs.path("devices", "system", "node", name)
		if text, err := r.read(dir + "/cpulist"); err == nil { // an empty line: memory alone
			read.text = sanitise(text)
			read.cpus, _ = parseList(text)
		}
		if text, err := r.read(dir + "/distance"); err == nil {
			for _, f := range strings.Fields(text) {
				d, _ := strconv.Atoi(f)
				read.distance = append(read.distance, d)
			}
		}
		h.nodes = append(h.nodes, read)
	}
	if len(h.nodes) > 0 {
		e.NUMA.Nodes = new(len(h.nodes))
	}
}

// maxCPUs bounds what a tree can make us read.
const maxCPUs = 4096

func (h *hostState) readCPUs(r *reader) {
	names, _ := r.list(r.fs.path("devices", "system", "cpu"))
	for _, name := range names {
		n, ok := strings.CutPrefix(name, "cpu")
		cpu, err := strconv.Atoi(n)
		if !ok || err != nil || len(h.cpus) == maxCPUs {
			continue
		}
		dir := r.fs.path("devices", "system", "cpu", name)
		c := cpuRead{
			cpu:         cpu,
			governor:    field(r, "cpu.governors", dir+"/cpufreq/scaling_governor", asText),
			throttle:    field(r, "cpu.core_throttle_count", dir+"/thermal_throttle/core_throttle_count", parseCounter),
			pkgThrottle: field(r, "cpu.package_throttle_count", dir+"/thermal_throttle/package_throttle_count", parseCounter),
			asleep:      -1,
		}
		if c.governor != nil {
			c.preference = field(r, "cpu.energy_preferences", dir+"/cpufreq/energy_performance_preference", asText)
			c.maxKHz = field(r, "cpu.max_khz", dir+"/cpufreq/scaling_max_freq", parseCounter)
			c.hardwareKHz = field(r, "cpu.hardware_max_khz", dir+"/cpufreq/cpuinfo_max_freq", parseCounter)
		}
		h.readIdle(r, &c, dir+"/cpuidle")
		h.cpus = append(h.cpus, c)
	}
	r.missing = compactUnreadable(r.missing)
}

// readIdle finds the deepest state that a CPU may sleep in. All CPUs have the same states.
func (h *hostState) readIdle(r *reader, c *cpuRead, dir string) {
	if len(h.idle) == 0 {
		states, _ := r.list(dir)
		for _, s := range states {
			name, err := r.read(dir + "/" + s + "/name")
			us := field(r, "cpu.deepest_idle_us", dir+"/"+s+"/latency", parseInt)
			if !strings.HasPrefix(s, "state") || err != nil || us == nil {
				continue
			}
			h.idle = append(h.idle, idleState{sanitise(name), *us})
		}
	}
	for i, s := range slices.Backward(h.idle) {
		off := field(r, "cpu.deepest_idle", dir+"/state"+strconv.Itoa(i)+"/disable", parseSwitch)
		if off == nil {
			return
		}
		if !*off && (c.asleep < 0 || s.exitUS > h.idle[c.asleep].exitUS) {
			c.asleep = i
			return
		}
	}
}

// frequencySamples is how many CPUs are asked for their frequency: each may be woken for it.
const frequencySamples = 4

// fill sums up the CPUs near a device; all of them if it isn't known which those are.
func (h *hostState) fill(e *Environment, near []int) {
	if !slices.ContainsFunc(h.cpus, func(c cpuRead) bool { return slices.Contains(near, c.cpu) }) {
		near = nil
	}
	c := CPUState{}
	e.counting = nil
	held := 0.0 // share of its frequency that the CPU in MaxKHz may use
	for _, cpu := range h.cpus {
		if len(near) > 0 && !slices.Contains(near, cpu.cpu) {
			continue
		}
		c.CPUs++
		for _, t := range []struct {
			list *[]string
			text *string
		}{{&c.Governors, cpu.governor}, {&c.Preferences, cpu.preference}} {
			if t.text != nil && !slices.Contains(*t.list, *t.text) {
				*t.list = append(*t.list, *t.text)
			}
		}
		// CPUs of one machine may differ in what they can: the one that is held back most counts.
		if may, can := cpu.maxKHz, cpu.hardwareKHz; may != nil && can != nil && *can > 0 {
			if ratio := float64(*may) / float64(*can); c.MaxKHz == nil || ratio < held {
				held, c.MaxKHz, c.HardwareKHz = ratio, may, can
			}
		}
		if v := cpu.throttle; v != nil {
			e.counting = append(e.counting, cpu.cpu)
			sum := *v
			if c.CoreThrottle != nil {
				sum = addSat(sum, *c.CoreThrottle)
			}
			c.CoreThrottle = &sum
		}
		if v := cpu.pkgThrottle; v != nil && (c.PkgThrottle == nil || *v > *c.PkgThrottle) {
			c.PkgThrottle = v
		}
		if cpu.asleep >= 0 && (c.IdleExit == nil || h.idle[cpu.asleep].exitUS > *c.IdleExit) {
			c.IdleState, c.IdleExit = &h.idle[cpu.asleep].name, &h.idle[cpu.asleep].exitUS
		}
	}
	slices.Sort(c.Governors)
	slices.Sort(c.Preferences)
	e.CPU = c
}

// Throttles reads how often the CPUs near a port were slowed down for heat or power since boot, anew and summed up. It is false
// if they don't count that.
func (fs *FS) Throttles(ctx context.Context, e *Environment) (count uint64, ok bool) {
	if len(e.counting) == 0 {
		return 0, false
	}
	sum, err := run(ctx, fs, hostLane, func(l *lane) (*uint64, error) {
		var sum uint64
		for _, cpu := range e.counting {
			dir := l.fs.path("devices", "system", "cpu", "cpu"+strconv.Itoa(cpu), "thermal_throttle")
			core, pkg := parsed(l, dir+"/core_throttle_count", parseCounter), parsed(l, dir+"/package_throttle_count", parseCounter)
			if core == nil {
				return nil, nil
			}
			sum = addSat(sum, *core)
			if pkg != nil {
				sum = addSat(sum, *pkg)
			}
		}
		return &sum, nil
	})
	if err != nil || sum == nil {
		return 0, false
	}
	return *sum, true
}

func (r *reader) memory(e *Environment) {
	dir := r.fs.path("kernel", "mm", "hugepages")
	sizes, _ := r.list(dir)
	for _, s := range sizes {
		text, found := strings.CutPrefix(s, "hugepages-")
		kb, err := strconv.ParseUint(strings.TrimSuffix(text, "kB"), 10, 32)
		if !found || err != nil {
			continue
		}
		total := field(r, "memory.huge_pages_total", dir+"/"+s+"/nr_hugepages", parseCounter)
		free := field(r, "memory.huge_pages_free", dir+"/"+s+"/free_hugepages", parseCounter)
		// Of several sizes, the smallest is what memory is asked for in.
		if total != nil && (e.Memory.HugePageSize == nil || kb<<10 < *e.Memory.HugePageSize) {
			e.Memory.HugePagesTotal, e.Memory.HugePagesFree, e.Memory.HugePageSize = total, free, new(kb<<10)
		}
	}
	e.Memory.Transparent = field(r, "memory.transparent_huge_pages", r.fs.path("kernel", "mm", "transparent_hugepage", "enabled"), parseChosen)
}

// capIPCLock lets a process lock memory without limit.
const capIPCLock = 14

func (r *reader) memlock(proc string) *uint64 {
	caps := field(r, "memory.memlock", proc+"/self/status", func(s string) (uint64, bool) {
		hex, ok := statusLine("CapEff")(s)
		v, err := strconv.ParseUint(hex, 16, 64)
		return v, ok && err == nil
	})
	if caps != nil && *caps>>capIPCLock&1 == 1 {
		return new(uint64(math.MaxUint64))
	}
	return field(r, "memory.memlock", proc+"/self/limits", parseMemlock)
}

// rdmaCore finds the libibverbs of this process: its file is named libibverbs.so.1.14.44.0, where 44.0 is the release of
// rdma-core.
func (r *reader) rdmaCore(proc string) *string {
	const name = "versions.rdma_core"
	text, err := r.readLong(proc + "/self/maps")
	if err != nil {
		r.failed(name, err)
		return nil
	}
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(path.Base(strings.TrimSpace(line)), "libibverbs.so."); ok {
			if part := strings.Split(v, "."); len(part) >= 3 {
				return new(sanitise(strings.Join(part[2:], ".")))
			}
		}
	}
	return nil
}

// maxLong bounds the files of procfs that are longer than a page.
const maxLong = 4 << 20

// readLong reads a file that one call doesn't bring whole.
func (l *lane) readLong(path string) (string, error) {
	if err := l.enter(path); err != nil {
		return "", err
	}
	text, err := func() (string, error) {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return "", err
		}
		defer unix.Close(fd)
		var b strings.Builder
		for b.Len() < maxLong {
			n, err := unix.Read(fd, l.buf[:])
			if err == unix.EINTR {
				continue
			}
			if err != nil {
				return "", err
			}
			if n <= 0 {
				break
			}
			b.Write(l.buf[:n])
		}
		return b.String(), nil
	}()
	if lost := l.leave(); lost != nil {
		return "", lost
	}
	if err != nil {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	return text, nil
}

// statusLine returns a parser for one line of /proc/PID/status.
func statusLine(key string) func(string) (string, bool) {
	return func(s string) (string, bool) {
		for line := range strings.Lines(s) {
			if name, v, ok := strings.Cut(line, ":"); ok && name == key {
				v = sanitise(strings.TrimSpace(v))
				return v, v != ""
			}
		}
		return "", false
	}
}

// parseMemlock finds the soft limit in /proc/PID/limits.
func parseMemlock(s string) (uint64, bool) {
	for line := range strings.Lines(s) {
		rest, ok := strings.CutPrefix(line, "Max locked memory")
		if f := strings.Fields(rest); ok && len(f) >= 2 {
			if f[0] == "unlimited" {
				return math.MaxUint64, true
			}
			return parseCounter(f[0])
		}
	}
	return 0, false
}

func parseUptime(s string) (float64, bool) {
	first, _, _ := strings.Cut(s, " ")
	return parseDecimal(first)
}

// parseChosen returns the word in brackets of "always [madvise] never".
func parseChosen(s string) (string, bool) {
	_, rest, ok := strings.Cut(s, "[")
	word, _, end := strings.Cut(rest, "]")
	return sanitise(word), ok && end && word != ""
}

// parseList takes a list of CPUs: 0-3,8. An empty one is a list too.
func parseList(s string) ([]int, bool) {
	var list []int
	for part := range strings.SplitSeq(strings.TrimSpace(s), ",") {
		if part == "" {
			continue
		}
		from, to, isRange := strings.Cut(part, "-")
		a, err := strconv.Atoi(from)
		b := a
		if isRange && err == nil {
			b, err = strconv.Atoi(to)
		}
		if err != nil || a < 0 || b < a || b-a >= maxCPUs || len(list) > maxCPUs {
			return nil, false
		}
		for ; a <= b; a++ {
			list = append(list, a)
		}
	}
	return list, true
}

func compactUnreadable(list []Unreadable) []Unreadable {
	seen := map[string]bool{}
	return slices.DeleteFunc(list, func(u Unreadable) bool {
		double := seen[u.Name]
		seen[u.Name] = true
		return double
	})
}
