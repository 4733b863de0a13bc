package counters

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Environment is what a port measures under: all that may change a figure without the fabric having changed.
//
// A field is nil if the host has no such thing, and also if it has and doesn't say: then it is in Unreadable. 0 is 0.
// [Environment.Checks] judges it, [Environment.Fingerprint] sums it up.
type Environment struct {
	Device    string    `json:"device"`
	Port      int       `json:"port"`
	Visible   bool      `json:"visible"` // false: sysfs doesn't show the port, so that only the host's part is known
	Driver    string    `json:"driver"`
	Transport Transport `json:"transport"`

	Versions Versions     `json:"versions"`
	PCI      *PCIState    `json:"pci"` // nil for software devices
	NUMA     NUMAState    `json:"numa"`
	CPU      CPUState     `json:"cpu"` // of the CPUs on the device's node; of all, if that is not known
	IOMMU    IOMMUState   `json:"iommu"`
	Memory   MemoryState  `json:"memory"`
	Link     LinkState    `json:"link"`
	QoS      *QoSState    `json:"qos"` // of RoCE ports
	Uptime   *float64     `json:"uptime_seconds"`
	Missing  []Unreadable `json:"unreadable"` // what is there and gave no value, by the JSON name of the field

	counting []int             // CPUs that count how often they were throttled
	recent   map[string]bool   // counts that rose lately
	first    map[string]bool   // counts that were read for the first time, so that only their total is known
	kept     map[string]string // facts of an earlier reading that this one could not read
}

// Versions are those of the software below a measurement.
type Versions struct {
	Firmware *string `json:"firmware"`
	Driver   *string `json:"driver"` // of a module that has a version of its own; those of the kernel's tree mostly don't
	Kernel   *string `json:"kernel"`
	RDMACore *string `json:"rdma_core"` // of the libibverbs in this process
}

// PCIState is the device's PCI function as it works now. Of a virtual function, all but BDF is that of its physical one.
type PCIState struct {
	BDF      string   `json:"bdf"`
	CurGTS   *float64 `json:"cur_gts"` // GT/s per lane
	MaxGTS   *float64 `json:"max_gts"`
	CurWidth *int     `json:"cur_width"` // lanes
	MaxWidth *int     `json:"max_width"`

	// Path is the links from the device up to the root port, as the bridge above each of them sees it. Bottleneck is the
	// slowest of them, if it carries less than the device could.
	Path       []PCILink `json:"path"`
	Bottleneck *PCILink  `json:"bottleneck"`

	Correctable *uint64 `json:"aer_correctable"` // errors since boot
	NonFatal    *uint64 `json:"aer_nonfatal"`
	Fatal       *uint64 `json:"aer_fatal"`

	MaxPayload          *int  `json:"max_payload"` // bytes
	MaxPayloadSupported *int  `json:"max_payload_supported"`
	MaxReadRequest      *int  `json:"max_read_request"` // bytes
	RelaxedOrdering     *bool `json:"relaxed_ordering"` // whether the device may use it
	L1                  *bool `json:"aspm_l1"`          // whether the link may sleep

	// ACSRedirect are the switch ports above that send traffic between devices by way of the root, which matters to
	// transfers from and to a GPU only. Nil: can't be told.
	ACSRedirect []string `json:"acs_redirect"`
}

// NUMAState is where the device is in the machine.
type NUMAState struct {
	Nodes    *int    `json:"nodes"`     // of the machine
	Node     *int    `json:"node"`      // of the device; -1: the platform doesn't tell
	CPUs     *string `json:"cpus"`      // of that node
	Allowed  *string `json:"allowed"`   // CPUs that this process may use
	Distance *int    `json:"distance"`  // from those to the device's node, at best; 10 is local
	Local    *bool   `json:"cpu_local"` // whether one of those is on the device's node
}

// CPUState is over the CPUs near the device.
type CPUState struct {
	CPUs         int      `json:"cpus"`                   // looked at
	Governors    []string `json:"governors"`              // in use; nil if frequency can't be set here, as in most VMs
	Preferences  []string `json:"energy_preferences"`     // of drivers that have them
	CurKHz       *uint64  `json:"cur_khz"`                // slowest of a few
	MaxKHz       *uint64  `json:"max_khz"`                // ceiling of the CPU that is held back most
	HardwareKHz  *uint64  `json:"hardware_max_khz"`       // what the hardware of that one allows
	IdleState    *string  `json:"deepest_idle"`           // deepest sleep that is enabled
	IdleExit     *int     `json:"deepest_idle_us"`        // time to wake from it, microseconds
	CoreThrottle *uint64  `json:"core_throttle_count"`    // since boot, summed up
	PkgThrottle  *uint64  `json:"package_throttle_count"` // since boot, highest
}

// IOMMUState is how the device's memory accesses are translated.
type IOMMUState struct {
	Present *bool   `json:"present"` // whether the machine has one in use
	Type    *string `json:"type"`    // of the device's group: identity (passed through), DMA, DMA-FQ …; nil: not translated
}

// MemoryState is about memory for registration.
type MemoryState struct {
	Memlock        *uint64 `json:"memlock"` // bytes this process may lock; MaxUint64: no limit
	HugePagesTotal *uint64 `json:"huge_pages_total"`
	HugePagesFree  *uint64 `json:"huge_pages_free"`
	HugePageSize   *uint64 `json:"huge_page_size"` // bytes
	Transparent    *string `json:"transparent_huge_pages"`
}

// LinkState is the port's link.
type LinkState struct {
	State     *string  `json:"state"`
	RateGbps  *float64 `json:"rate_gbps"`     // nil where the driver is known not to tell the truth, unless the netdev does
	MaxGbps   *float64 `json:"max_rate_gbps"` // that the netdev supports, or what this process saw before, if that was more
	Lanes     *int     `json:"lanes"`
	Netdev    *string  `json:"netdev"`
	NetdevMTU *int     `json:"netdev_mtu"`

	// ActiveMTU and MaxMTU are the RDMA MTU in bytes. On Ethernet the active one is derived from the netdev's; on InfiniBand
	// only verbs knows them: set them from there, if you can, before you ask for checks.
	ActiveMTU *int `json:"active_mtu"`
	MaxMTU    *int `json:"max_mtu"`
}

// QoSState is how Ethernet treats the port's packets.
type QoSState struct {
	RoCEv2       *bool   `json:"roce_v2"`      // whether there is a GID for it
	DefaultMode  *string `json:"default_mode"` // that rdma_cm takes, if configured
	DefaultTOS   *int    `json:"default_tos"`
	TrafficClass *int    `json:"traffic_class"` // forced upon all packets of the port
	Trust        *string `json:"trust"`         // dscp or pcp
	PFC          []int   `json:"pfc"`           // priorities that may be paused; nil: can't be told
	PauseRx      *bool   `json:"pause_rx"`      // of the whole link
	PauseTx      *bool   `json:"pause_tx"`
	ECN          []int   `json:"ecn"` // priorities on which congestion is signalled; nil: can't be told
}

// Environments reads the environment of every port of the devices that the filter accepts, in their order. A device that
// doesn't answer has one without its own part. The error is for a root that is no directory, and for ctx.
func (fs *FS) Environments(ctx context.Context, f Filter) ([]*Environment, error) {
	names, err := fs.names(ctx, f)
	if err != nil {
		return nil, err
	}
	host, err := fs.hostState(ctx)
	if err != nil {
		return nil, err
	}
	each := make([][]*Environment, len(names))
	var wg sync.WaitGroup
	limit := make(chan struct{}, maxParallel)
	for i, name := range names {
		limit <- struct{}{}
		wg.Go(func() {
			defer func() { <-limit }()
			each[i] = fs.environments(ctx, name, 0, host)
		})
	}
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("read sysfs at %s: %w", fs.root, err)
	}
	return slices.Concat(each...), nil
}

// Environment reads the environment of one port. A port that sysfs doesn't show has one with the host's part alone. The
// error is ctx's.
func (fs *FS) Environment(ctx context.Context, device string, port int) (*Environment, error) {
	host, err := fs.hostState(ctx)
	if err != nil {
		return nil, err
	}
	envs := fs.environments(ctx, device, port, host)
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("environment of %s port %d: %w", device, port, err)
	}
	if len(envs) == 1 {
		return envs[0], nil
	}
	e := host.environment(device, port)
	return e, nil
}

// environments reads one port of a device, or all (0).
func (fs *FS) environments(ctx context.Context, name string, port int, host *hostState) []*Environment {
	envs, err := run(ctx, fs, name, func(l *lane) ([]*Environment, error) {
		dir, id, err := l.deviceDir(name)
		if err != nil {
			return nil, err
		}
		d := fs.cached(name, id)
		if d == nil || l.renamed(d) {
			d = l.device(name, dir, id)
			fs.remember(name, d)
		}
		var envs []*Environment
		for i := range d.Ports {
			if port == 0 || d.Ports[i].Port == port {
				envs = append(envs, l.environment(d, &d.Ports[i], host))
			}
		}
		_, _, err = l.deviceDir(name) // of one that went away meanwhile, half is missing
		return envs, err
	})
	if errors.Is(err, ErrNotAnswering) {
		e := host.environment(name, port)
		e.Missing = append(e.Missing, Unreadable{Name: "device", Errno: new("ETIMEDOUT")})
		return []*Environment{e}
	}
	if err != nil {
		return nil
	}
	for _, e := range envs {
		fs.watchCounts(e)
	}
	return envs
}

// renamed reports whether a netdev of the device has another name by now, or is gone.
func (l *lane) renamed(d *Device) bool {
	return slices.ContainsFunc(d.Netdevs, func(n Netdev) bool { return !l.exists(l.fs.path("class", "net", n.Name)) })
}

// reader reads optional things and notes those that are there and don't say.
type reader struct {
	*lane
	missing []Unreadable
}

// field reads a file; name is that of the field it is for.
func field[T any](r *reader, name, path string, parse func(string) (T, bool)) *T {
	text, err := r.read(path)
	if err != nil {
		r.failed(name, err)
		return nil
	}
	v, ok := parse(text)
	if !ok {
		r.missing = append(r.missing, Unreadable{Name: name, Text: new(sanitise(text))})
		return nil
	}
	return &v
}

func (r *reader) failed(name string, err error) {
	if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, errLost) {
		r.missing = append(r.missing, Unreadable{Name: name, Errno: errno(err)})
	}
}

func asText(s string) (string, bool) { return sanitise(s), s != "" }

func (l *lane) environment(d *Device, p *Port, host *hostState) *Environment {
	e := host.environment(d.Name, p.Port)
	e.Visible, e.Driver, e.Transport = true, d.Driver, d.Transport
	r := &reader{lane: l}
	if fw := field(r, "versions.firmware", d.dir+"/fw_ver", func(s string) (string, bool) { return sanitise(s), true }); fw != nil && *fw != "" {
		e.Versions.Firmware = fw // some drivers print an empty line
	}
	r.pci(d, e)
	r.driverVersion(d, e)
	r.link(d, p, e)
	host.near(r, d, e)
	e.Missing = append(e.Missing, r.missing...)
	slices.SortFunc(e.Missing, func(a, b Unreadable) int { return cmp.Compare(a.Name, b.Name) })
	return e
}

// watchedCount is a count since boot, as this process has seen it move.
type watchedCount struct {
	value uint64
	rose  time.Time
}

// lately is how long a count that rose is news.
const lately = 10 * time.Minute

// watchCounts compares the environment's counts with those of earlier readings, and its rate with the highest so far.
func (fs *FS) watchCounts(e *Environment) {
	counts := map[string]*uint64{"core_throttle": e.CPU.CoreThrottle, "package_throttle": e.CPU.PkgThrottle}
	if p := e.PCI; p != nil {
		counts["aer_correctable"], counts["aer_nonfatal"], counts["aer_fatal"] = p.Correctable, p.NonFatal, p.Fatal
	}
	key := portKey{e.Device, e.Port}
	now := time.Now()
	fs.mu.Lock()
	defer fs.mu.Unlock()
	w := fs.watched[key]
	if w == nil {
		w = make(map[string]*watchedCount, len(counts))
		fs.watched[key] = w
	}
	e.recent, e.first = make(map[string]bool), make(map[string]bool)
	for name, v := range counts {
		if v == nil {
			continue
		}
		seen := w[name]
		if seen == nil {
			w[name] = &watchedCount{value: *v}
			e.first[name] = true
			continue
		}
		if *v > seen.value {
			seen.rose = now
		}
		seen.value = *v
		e.recent[name] = !seen.rose.IsZero() && now.Sub(seen.rose) < lately
	}
	if r := e.Link.RateGbps; r != nil {
		fs.fastest[key] = max(fs.fastest[key], *r)
		if fastest := fs.fastest[key]; fastest > *r && (e.Link.MaxGbps == nil || *e.Link.MaxGbps < fastest) {
			e.Link.MaxGbps = &fastest
		}
	}
}
