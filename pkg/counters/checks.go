package counters

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// CheckName is a condition that can spoil a measurement. The list is closed: metrics have it as a label.
type CheckName string

// The checks, in the order of [Checks].
const (
	CheckPCIeWidth    CheckName = "pcie-width"
	CheckPCIeSpeed    CheckName = "pcie-speed"
	CheckPCIePath     CheckName = "pcie-path"
	CheckPCIeRate     CheckName = "pcie-rate"
	CheckPCIeErrors   CheckName = "pcie-errors"
	CheckPCIePayload  CheckName = "pcie-payload"
	CheckPCIeRead     CheckName = "pcie-read-request"
	CheckPCIeOrdering CheckName = "pcie-relaxed-ordering"
	CheckPCIePower    CheckName = "pcie-power"
	CheckIOMMU        CheckName = "iommu"
	CheckACS          CheckName = "acs"
	CheckNUMA         CheckName = "numa"
	CheckGovernor     CheckName = "cpu-governor"
	CheckFrequency    CheckName = "cpu-frequency"
	CheckIdle         CheckName = "cpu-idle"
	CheckThrottle     CheckName = "cpu-throttle"
	CheckMemlock      CheckName = "memlock"
	CheckHugePages    CheckName = "huge-pages"
	CheckLinkRate     CheckName = "link-rate"
	CheckMTU          CheckName = "mtu"
	CheckRoCE         CheckName = "roce-mode"
	CheckFlowControl  CheckName = "flow-control"
	CheckECN          CheckName = "ecn"
)

// Checks lists all names.
var Checks = []CheckName{CheckPCIeWidth, CheckPCIeSpeed, CheckPCIePath, CheckPCIeRate, CheckPCIeErrors, CheckPCIePayload,
	CheckPCIeRead, CheckPCIeOrdering, CheckPCIePower, CheckIOMMU, CheckACS, CheckNUMA, CheckGovernor, CheckFrequency, CheckIdle,
	CheckThrottle, CheckMemlock, CheckHugePages, CheckLinkRate, CheckMTU, CheckRoCE, CheckFlowControl, CheckECN}

// CheckVerdict is what came of a check.
type CheckVerdict string

// The verdicts.
const (
	CheckOK      CheckVerdict = "ok"
	CheckWarn    CheckVerdict = "warn"    // figures may suffer from it
	CheckUnknown CheckVerdict = "unknown" // it can't be told here
)

// Check is one condition, judged.
type Check struct {
	Name     CheckName    `json:"check"`
	Found    string       `json:"found"`
	Expected string       `json:"expected"`
	Verdict  CheckVerdict `json:"verdict"`
	Advice   string       `json:"advice"` // what to do, in a sentence; empty unless the verdict is warn, or root could see more
}

const (
	wantMemlock     = 1 << 30 // bytes that sessions may take, by default
	wantReadRequest = 512     // bytes
	wantPayload     = 256     // bytes, where the function can
	wantIdleExit    = 10      // microseconds
	wantMTU         = 4096    // bytes
	headroom        = 0.85    // of the PCIe link, for its packets' headers and flow control
)

// Checks judges the environment. A check that makes no sense for the port is left out: a software device has no PCIe.
func (e *Environment) Checks() []Check {
	c := checker{e: e}
	if e.PCI != nil {
		c.pcie()
	}
	c.host()
	if e.Visible {
		c.link()
	}
	return c.list
}

type checker struct {
	e    *Environment
	list []Check
}

// add judges: ok is nil if it can't be told. The advice is for when it is false.
func (c *checker) add(name CheckName, ok *bool, found, expected, advice string) {
	k := Check{Name: name, Found: found, Expected: expected}
	switch {
	case ok != nil && *ok:
		k.Verdict = CheckOK
	case ok != nil:
		k.Verdict, k.Advice = CheckWarn, advice
	default:
		k.Verdict = CheckUnknown
		if found == hidden {
			k.Advice = "Look again as root."
		}
	}
	c.list = append(c.list, k)
}

// hidden is what is found where only root can look.
const hidden = "not readable for this user"

// why says why a field is not known.
func (c *checker) why(fields ...string) string {
	for _, u := range c.e.Missing {
		if !slices.Contains(fields, u.Name) {
			continue
		}
		switch {
		case deref(u.Errno) == "EACCES" || deref(u.Errno) == "EPERM":
			return hidden
		case u.Errno != nil:
			return "unreadable: " + *u.Errno
		case u.Text != nil:
			return "reads " + *u.Text
		}
	}
	return "not known"
}

// atLeast compares two things that may not be known.
func atLeast[T int | uint64 | float64](found, expected *T) *bool {
	if found == nil || expected == nil {
		return nil
	}
	return new(*found >= *expected)
}

// either is one of two texts, or why it can't be told.
func either(v *bool, yes, no, why string) string {
	switch {
	case v == nil:
		return why
	case *v:
		return yes
	}
	return no
}

// valueOr is a value, or what stands for one that is not known.
func valueOr[T any](v *T, otherwise T) T {
	if v == nil {
		return otherwise
	}
	return *v
}

// or is the text of a value, or why there is none.
func or[T any](v *T, format, why string) string {
	if v == nil {
		return why
	}
	return fmt.Sprintf(format, *v)
}

func (c *checker) pcie() {
	p := c.e.PCI
	c.add(CheckPCIeWidth, atLeast(p.CurWidth, p.MaxWidth), or(p.CurWidth, "x%d", c.why("pci.cur_width", "pci.max_width")), or(p.MaxWidth, "x%d", "the device's width"),
		pcieAdvice(p, "Reseat the card, try another slot, and look at the slot's lanes in the BIOS."))
	c.add(CheckPCIeSpeed, atLeast(p.CurGTS, p.MaxGTS), or(p.CurGTS, "%g GT/s", c.why("pci.cur_gts", "pci.max_gts")), or(p.MaxGTS, "%g GT/s", "the device's speed"),
		pcieAdvice(p, "If it stays so under load, look at the slot, the riser and the BIOS: idle links may run slower to save power."))

	own := bandwidth(p.MaxGTS, p.MaxWidth)
	var pathOK *bool
	found, expected := "not known", "as fast as the device"
	if own > 0 {
		expected = formatGbps(own) + " or more"
		known := len(p.Path) > 0 && !slices.ContainsFunc(p.Path, func(k PCILink) bool { return k.bandwidth() == 0 })
		switch b := p.Bottleneck; {
		case b != nil:
			pathOK = new(false)
			found = fmt.Sprintf("%s has x%d at %g GT/s: %s", b.BDF, *b.CurWidth, *b.CurGTS, formatGbps(b.bandwidth()))
		case known:
			pathOK = new(true)
			found = fmt.Sprintf("%d bridges, none slower", len(p.Path))
		}
	}
	c.add(CheckPCIePath, pathOK, found, expected, "Use a slot that is wired for the card's full width and speed, or expect no more than this.")

	now := bandwidth(p.CurGTS, p.CurWidth)
	if p.Bottleneck != nil {
		now = min(now, p.Bottleneck.bandwidth())
	}
	var rateOK *bool
	found, expected = "not known", "more than the link"
	if rate := c.e.Link.RateGbps; now > 0 && rate != nil {
		rateOK = new(now*headroom*8/1e9 >= *rate)
		found = fmt.Sprintf("%.0f Gb/s of payload", now*headroom*8/1e9)
		expected = fmt.Sprintf("%g Gb/s or more", *rate)
	}
	c.add(CheckPCIeRate, rateOK, found, expected, "The PCIe link, not the network, bounds the bandwidth of this port.")

	c.pcieErrors()

	var want *int
	if p.MaxPayloadSupported != nil {
		want = new(min(wantPayload, *p.MaxPayloadSupported))
	}
	c.add(CheckPCIePayload, atLeast(p.MaxPayload, want), or(p.MaxPayload, "%d B", c.why("pci.max_payload")), or(want, "%d B or more", "256 B or more"),
		"Boot with pci=pcie_bus_perf, or raise the maximum payload in the BIOS.")
	c.add(CheckPCIeRead, atLeast(p.MaxReadRequest, new(wantReadRequest)), or(p.MaxReadRequest, "%d B", c.why("pci.max_read_request")), fmt.Sprintf("%d B or more", wantReadRequest),
		"Raise it with setpci on the device control register, or boot with pci=pcie_bus_perf.")
	c.add(CheckPCIeOrdering, p.RelaxedOrdering, either(p.RelaxedOrdering, "allowed", "not allowed", c.why("pci.relaxed_ordering")), "allowed",
		"Allow relaxed ordering for the card in the BIOS; the kernel clears it on some root complexes on purpose.")
	var awake *bool
	if p.L1 != nil {
		awake = new(!*p.L1)
	}
	c.add(CheckPCIePower, awake, either(awake, "L1 off", "L1 on", c.why("pci.aspm_l1")), "L1 off",
		"Write 0 to link/l1_aspm of the function, or boot with pcie_aspm.policy=performance.")

	var passed *bool
	found = c.why("iommu.type")
	switch t := c.e.IOMMU; {
	case t.Type != nil:
		passed = new(*t.Type == "identity")
		found = *t.Type
	case t.Present != nil && !*t.Present:
		passed, found = new(true), "none"
	}
	c.add(CheckIOMMU, passed, found, "none or identity", "Boot with iommu=pt, so that the card's memory accesses are not translated.")

	var acs *bool
	found = c.why("pci.acs_redirect")
	if p.ACSRedirect != nil {
		acs = new(len(p.ACSRedirect) == 0)
		found = "no redirection"
		if !*acs {
			found = "redirection at " + strings.Join(p.ACSRedirect, ", ")
		}
	}
	c.add(CheckACS, acs, found, "no redirection", "Transfers between this card and a GPU take the way by the root: turn ACS off on these switch ports if nothing needs it.")
}

// pcieAdvice is for a link below the device's maximum.
func pcieAdvice(p *PCIState, advice string) string {
	if len(p.Path) > 0 {
		up := p.Path[0]
		if up.MaxWidth != nil && p.MaxWidth != nil && *up.MaxWidth < *p.MaxWidth {
			return fmt.Sprintf("The slot at %s has x%d only: use another.", up.BDF, *up.MaxWidth)
		}
	}
	return advice
}

func (c *checker) pcieErrors() {
	p := c.e.PCI
	if p.Correctable == nil && p.NonFatal == nil && p.Fatal == nil {
		c.add(CheckPCIeErrors, nil, c.why("pci.aer_correctable", "pci.aer_nonfatal", "pci.aer_fatal"), newsExpected, "")
		return
	}
	found := fmt.Sprintf("%s correctable, %s non-fatal, %s fatal since boot", or(p.Correctable, "%d", "?"), or(p.NonFatal, "%d", "?"), or(p.Fatal, "%d", "?"))
	rising := c.rising("aer_correctable", p.Correctable) || c.rising("aer_nonfatal", p.NonFatal) || c.rising("aer_fatal", p.Fatal)
	c.add(CheckPCIeErrors, new(!rising), found, newsExpected, "Reseat the card or its riser: errors cost repeats on the PCIe link.")
}

const newsExpected = "none in the last 10 minutes"

// rising says whether a count since boot is news: it rose lately, or nobody watched it and it is more than one an hour.
func (c *checker) rising(name string, v *uint64) bool {
	switch {
	case v == nil:
		return false
	case !c.e.first[name]:
		return c.e.recent[name]
	}
	return float64(*v) > valueOr(c.e.Uptime, 0)/3600
}

func (c *checker) host() {
	e := c.e
	if e.PCI != nil || e.NUMA.Nodes != nil {
		c.numa()
	}
	p := e.CPU
	var ok *bool
	found := "not settable here"
	if p.Governors != nil {
		found = strings.Join(p.Governors, ", ")
		awake := slices.Equal(p.Governors, []string{"performance"})
		if len(p.Preferences) > 0 {
			found += " with preference " + strings.Join(p.Preferences, ", ")
			awake = awake || slices.Equal(p.Preferences, []string{"performance"})
		}
		ok = &awake
	}
	c.add(CheckGovernor, ok, found, "performance", "Set it: cpupower frequency-set -g performance.")
	c.add(CheckFrequency, atLeast(p.MaxKHz, p.HardwareKHz), or(mhz(p.MaxKHz), "at most %d MHz", "not known"), or(mhz(p.HardwareKHz), "%d MHz", "the hardware's maximum"),
		"Raise scaling_max_freq: something caps these CPUs.")
	ok, found = nil, "not known"
	if p.IdleExit != nil {
		ok = new(*p.IdleExit <= wantIdleExit)
		found = fmt.Sprintf("%s, %d µs to wake", deref(p.IdleState), *p.IdleExit)
	}
	c.add(CheckIdle, ok, found, fmt.Sprintf("%d µs or less", wantIdleExit), "Disable deep idle states for latency figures: cpupower idle-set -D 10.")

	ok, found = nil, "not counted here"
	if p.CoreThrottle != nil || p.PkgThrottle != nil {
		found = fmt.Sprintf("%s by core, %s by package since boot", or(p.CoreThrottle, "%d", "?"), or(p.PkgThrottle, "%d", "?"))
		ok = new(!c.rising("core_throttle", p.CoreThrottle) && !c.rising("package_throttle", p.PkgThrottle))
	}
	c.add(CheckThrottle, ok, found, newsExpected, "The CPU slows down for heat or power: look at fans, power capping and the BMC's log.")

	m := e.Memory
	found = c.why("memory.memlock")
	if m.Memlock != nil {
		if found = fmt.Sprintf("%d MiB", *m.Memlock>>20); *m.Memlock == math.MaxUint64 {
			found = "unlimited"
		}
	}
	c.add(CheckMemlock, atLeast(m.Memlock, new(uint64(wantMemlock))), found, "1 GiB or more", "Set LimitMEMLOCK=infinity in the unit, or memlock in /etc/security/limits.d.")
	ok, found = nil, c.why("memory.huge_pages_free", "memory.transparent_huge_pages")
	if m.HugePagesFree != nil || m.Transparent != nil {
		ok = new(valueOr(m.HugePagesFree, 0) > 0 || valueOr(m.Transparent, "never") != "never")
		found = fmt.Sprintf("%s free, transparent ones: %s", or(m.HugePagesFree, "%d", "?"), or(m.Transparent, "%s", "?"))
	}
	c.add(CheckHugePages, ok, found, "some free, or transparent ones", "Reserve some: sysctl vm.nr_hugepages=512.")
}

func mhz(khz *uint64) *uint64 {
	if khz == nil {
		return nil
	}
	return new(*khz / 1000)
}

func (c *checker) numa() {
	n := c.e.NUMA
	var ok *bool
	found := "not known"
	switch {
	case n.Nodes != nil && *n.Nodes == 1:
		ok, found = new(true), "one node"
	case n.Node != nil && *n.Node < 0:
		found = "the platform doesn't tell"
	case n.Local != nil:
		ok = n.Local
		found = fmt.Sprintf("device on node %s (CPUs %s), this process on CPUs %s", or(n.Node, "%d", "?"), deref(n.CPUs), deref(n.Allowed))
		if n.Distance != nil {
			found += fmt.Sprintf(", distance %d", *n.Distance)
		}
	case n.Node != nil:
		found = fmt.Sprintf("device on node %d", *n.Node)
	}
	c.add(CheckNUMA, ok, found, "a CPU on the device's node", "Let the process run on the device's node: numactl --cpunodebind, or CPUAffinity in the unit.")
}

func (c *checker) link() {
	k := c.e.Link
	ok := atLeast(k.RateGbps, k.MaxGbps)
	found, expected := or(k.RateGbps, "%g Gb/s", c.why("link.rate_gbps")), or(k.MaxGbps, "%g Gb/s", "the port's maximum")
	if fabric := c.e.Transport == IB || c.e.Transport == OPA; fabric && k.Lanes != nil && *k.Lanes == 1 { // ports have 4 lanes, or 2 where they are split
		ok, expected = new(false), "4 lanes, or 2"
		found += " over 1 lane"
	}
	c.add(CheckLinkRate, ok, found, expected,
		"Look at cable, transceiver and the switch's port: the link came up below what it can do.")
	if c.e.Transport != IWARP && c.e.Transport != EFA && c.e.Transport != USNIC {
		ok, found = nil, "not known"
		if k.ActiveMTU != nil {
			ok = new(*k.ActiveMTU >= min(wantMTU, valueOr(k.MaxMTU, wantMTU)))
			found = fmt.Sprintf("RDMA %d B", *k.ActiveMTU)
			if k.NetdevMTU != nil && c.e.Transport == RoCE {
				found += fmt.Sprintf(", netdev %d B", *k.NetdevMTU)
			}
		}
		advice := "Raise the MTU in the subnet manager's partition configuration."
		if c.e.Transport == RoCE {
			advice = "Set the netdev's MTU to 4200 or more, here, on the peers and on the switches."
		}
		c.add(CheckMTU, ok, found, fmt.Sprintf("RDMA %d B", valueOr(k.MaxMTU, wantMTU)), advice)
	}
	q := c.e.QoS
	if q == nil {
		return
	}
	c.add(CheckRoCE, q.RoCEv2, either(q.RoCEv2, "RoCE v2", "no GID for RoCE v2", c.why("qos.roce_v2")), "RoCE v2",
		"Give the netdev an address: RoCE v1 is not routed, and switches treat it differently.")
	ok, found = nil, "not known"
	var parts []string
	if q.PFC != nil {
		ok = new(len(q.PFC) > 0)
		parts = append(parts, fmt.Sprintf("PFC on %v", q.PFC))
	}
	if q.PauseRx != nil && q.PauseTx != nil {
		ok = new(ok != nil && *ok || *q.PauseRx && *q.PauseTx)
		parts = append(parts, fmt.Sprintf("pause received %t, sent %t", *q.PauseRx, *q.PauseTx))
	}
	if parts != nil {
		found = strings.Join(parts, "; ")
	}
	c.add(CheckFlowControl, ok, found, "PFC on RoCE's priority, or pause both ways", "Without either, congestion loses packets, and RoCE sends again.")
	ok, found = nil, "not known"
	if q.ECN != nil {
		ok, found = new(len(q.ECN) > 0), fmt.Sprintf("on %v", q.ECN)
	}
	c.add(CheckECN, ok, found, "on for RoCE's priority", "Turn on congestion notification for RoCE's priority, here and on the switches.")
}
