package counters

import (
	"encoding/binary"
	"errors"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// pci reads the device's PCI function and the bridges above it.
func (r *reader) pci(d *Device, e *Environment) {
	own := r.function(d.dir)
	if own == "" {
		return
	}
	p := &PCIState{BDF: filepath.Base(own), Path: []PCILink{}}
	e.PCI = p
	dir := own
	if pf, err := r.resolve(own + "/physfn"); err == nil { // a virtual function has no link of its own
		dir = pf
	}
	p.CurGTS = field(r, "pci.cur_gts", dir+"/current_link_speed", parseGTS)
	p.MaxGTS = field(r, "pci.max_gts", dir+"/max_link_speed", parseGTS)
	p.CurWidth = field(r, "pci.cur_width", dir+"/current_link_width", parseWidth)
	p.MaxWidth = field(r, "pci.max_width", dir+"/max_link_width", parseWidth)
	p.Correctable = field(r, "pci.aer_correctable", dir+"/aer_dev_correctable", parseAER)
	p.NonFatal = field(r, "pci.aer_nonfatal", dir+"/aer_dev_nonfatal", parseAER)
	p.Fatal = field(r, "pci.aer_fatal", dir+"/aer_dev_fatal", parseAER)
	p.L1 = field(r, "pci.aspm_l1", dir+"/link/l1_aspm", parseSwitch)
	r.config(p, dir)

	e.IOMMU.Type = field(r, "iommu.type", own+"/iommu_group/type", asText)
	if e.IOMMU.Type != nil {
		e.IOMMU.Present = new(true)
	}

	for bridge := filepath.Dir(dir); isBDF(filepath.Base(bridge)) && len(bridge) > len(r.fs.root); bridge = filepath.Dir(bridge) {
		link := r.pciLink(bridge)
		p.Path = append(p.Path, link)
		r.acs(p, bridge)
		if own := bandwidth(p.MaxGTS, p.MaxWidth); own > 0 {
			if b := link.bandwidth(); b > 0 && b < own && (p.Bottleneck == nil || b < p.Bottleneck.bandwidth()) {
				p.Bottleneck = &link
			}
		}
	}
}

// function returns the directory of the PCI function that an RDMA device is on, directly or through an auxiliary device; empty
// if there is none.
func (l *lane) function(deviceDir string) string {
	parent, err := l.resolve(deviceDir + "/device")
	if err != nil {
		return ""
	}
	return l.functionAbove(parent)
}

func (l *lane) functionAbove(dir string) string {
	for ; len(dir) > len(l.fs.root); dir = filepath.Dir(dir) {
		if isBDF(filepath.Base(dir)) {
			return dir
		}
	}
	return ""
}

// bandwidth is what the link carries as it works now, bytes per second each way after line coding; 0 if that is not known.
func (k PCILink) bandwidth() float64 { return bandwidth(k.CurGTS, k.CurWidth) }

func bandwidth(gts *float64, lanes *int) float64 {
	if gts == nil || lanes == nil {
		return 0
	}
	coding := 242.0 / 256 // flits, from 64 GT/s on
	switch {
	case *gts < 8:
		coding = 8.0 / 10
	case *gts < 64:
		coding = 128.0 / 130
	}
	return *gts * 1e9 / 8 * float64(*lanes) * coding
}

// parseAER returns the total of an aer_dev_* file: lines of a name and a count, of which the last begins with TOTAL_ERR.
func parseAER(s string) (uint64, bool) {
	for line := range strings.Lines(s) {
		name, count, ok := strings.Cut(strings.TrimSpace(line), " ")
		if ok && strings.HasPrefix(name, "TOTAL_ERR") {
			return parseCounter(strings.TrimSpace(count))
		}
	}
	return 0, false
}

// parseSwitch takes 0 and 1.
func parseSwitch(s string) (on, ok bool) { return s == "1", s == "0" || s == "1" }

// Offsets and ids of PCI configuration space, as in the kernel's pci_regs.h.
const (
	cfgStatus       = 0x06
	cfgCapabilities = 0x34
	cfgExtended     = 0x100

	statusCapList = 0x10
	capExpress    = 0x10
	extCapACS     = 0x0d

	expressTypeDownstream = 6 // a switch's port towards a device

	acsP2PRequestRedirect    = 1 << 2
	acsP2PCompletionRedirect = 1 << 3
)

// configSpace reads single registers: some chips lock up when all of their configuration space is read, and without
// CAP_SYS_ADMIN the kernel hands out the first 64 bytes only.
type configSpace struct{ f io.ReaderAt }

var errHidden = unix.EACCES // what is beyond the first 64 bytes, for an ordinary user

func (c configSpace) read(offset, size int) (uint32, error) {
	var b [4]byte
	n, err := c.f.ReadAt(b[:size], int64(offset))
	switch {
	case n == size:
		return binary.LittleEndian.Uint32(b[:]), nil
	case err == nil || errors.Is(err, io.EOF):
		return 0, errHidden
	}
	return 0, err
}

// express finds the PCI Express capability; 0 if there is none.
func (c configSpace) express() (offset int, err error) {
	status, err := c.read(cfgStatus, 2)
	if err != nil || status&statusCapList == 0 {
		return 0, err
	}
	next, err := c.read(cfgCapabilities, 1)
	for hops := 0; err == nil && next&^3 >= 0x40 && hops < 48; hops++ {
		at := int(next &^ 3)
		var head uint32
		if head, err = c.read(at, 2); err == nil && head&0xff == capExpress {
			return at, nil
		}
		next = head >> 8 & 0xff
	}
	return 0, err
}

// extended finds an extended capability; 0 if there is none.
func (c configSpace) extended(id uint32) (offset int, err error) {
	for at, hops := cfgExtended, 0; at >= cfgExtended && hops < 480; hops++ {
		head, err := c.read(at, 4)
		if err != nil {
			if hops == 0 && errors.Is(err, errHidden) {
				return 0, nil // a function with 256 bytes has none
			}
			return 0, err
		}
		if head == 0 || head == 0xffffffff {
			return 0, nil
		}
		if head&0xffff == id {
			return at, nil
		}
		at = int(head >> 20 &^ 3)
	}
	return 0, nil
}

// withConfig opens the configuration space of a function for fn. All of it is one read to the lane's supervisor.
func (r *reader) withConfig(dir string, fn func(configSpace) error) error {
	path := dir + "/config"
	if err := r.enter(path); err != nil {
		return err
	}
	err := func() error {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return fn(configSpace{fdReader(fd)})
	}()
	if lost := r.leave(); lost != nil {
		return lost
	}
	return err
}

type fdReader int

func (fd fdReader) ReadAt(b []byte, offset int64) (n int, err error) {
	err = ignoringEINTR(func() (err error) {
		n, err = unix.Pread(int(fd), b, offset)
		return err
	})
	return max(n, 0), err
}

// config reads what the function may put into a packet.
func (r *reader) config(p *PCIState, dir string) {
	var caps, control uint32
	err := r.withConfig(dir, func(c configSpace) error {
		at, err := c.express()
		if err != nil {
			return err
		}
		if at == 0 {
			return unix.ENOENT
		}
		if caps, err = c.read(at+4, 4); err != nil {
			return err
		}
		control, err = c.read(at+8, 2)
		return err
	})
	if err != nil {
		for _, name := range []string{"pci.max_payload", "pci.max_read_request", "pci.relaxed_ordering"} {
			r.failed(name, err)
		}
		return
	}
	// Codes 6 and 7 are reserved; they also come from a function that is gone and reads all ones.
	size := func(code uint32) *int {
		if code &= 7; code > 5 {
			return nil
		}
		return new(128 << code)
	}
	p.MaxPayloadSupported = size(caps)
	p.MaxPayload = size(control >> 5)
	p.MaxReadRequest = size(control >> 12)
	if p.MaxPayload != nil {
		p.RelaxedOrdering = new(control&(1<<4) != 0)
	}
}

// acs looks whether a bridge is a switch's port that redirects traffic between devices.
func (r *reader) acs(p *PCIState, bridge string) {
	redirects, told := false, false
	err := r.withConfig(bridge, func(c configSpace) error {
		at, err := c.express()
		if err != nil {
			return err
		}
		told = true
		if at == 0 {
			return nil
		}
		flags, err := c.read(at+2, 2)
		if err != nil || flags>>4&0xf != expressTypeDownstream {
			return err
		}
		cap, err := c.extended(extCapACS)
		if err != nil || cap == 0 {
			return err
		}
		control, err := c.read(cap+6, 2)
		redirects = control&(acsP2PRequestRedirect|acsP2PCompletionRedirect) != 0
		return err
	})
	if err != nil {
		r.failed("pci.acs_redirect", err)
		return
	}
	if told && p.ACSRedirect == nil {
		p.ACSRedirect = []string{}
	}
	if redirects {
		p.ACSRedirect = append(p.ACSRedirect, filepath.Base(bridge))
	}
}

// driverVersion reads the versions of the module that drives the function, if it is not the kernel's own.
func (r *reader) driverVersion(d *Device, e *Environment) {
	modules := []string{}
	if d.PCI != nil && d.PCI.Driver != nil {
		modules = append(modules, *d.PCI.Driver)
	}
	for _, m := range rdmaModules[d.Driver] {
		if !slices.Contains(modules, m) {
			modules = append(modules, m)
		}
	}
	for _, m := range modules {
		if v := field(r, "versions.driver", r.fs.path("module", strings.ReplaceAll(m, "-", "_"), "version"), asText); v != nil {
			e.Versions.Driver = v
			return
		}
	}
}

// rdmaModules are the kernel modules behind the drivers, where the name is another.
var rdmaModules = map[string][]string{
	"mlx5": {"mlx5_ib"}, "mlx4": {"mlx4_ib"}, "mthca": {"ib_mthca"}, "qib": {"ib_qib"}, "bnxt_re": {"bnxt_re"}, "irdma": {"irdma"},
	"i40iw": {"i40iw"}, "hns": {"hns_roce_hw_v2"}, "efa": {"efa"}, "mana": {"mana_ib"}, "erdma": {"erdma"}, "rxe": {"rdma_rxe"}, "siw": {"siw"},
	"hfi1": {"hfi1"}, "cxgb4": {"iw_cxgb4"}, "qedr": {"qedr"}, "ocrdma": {"ocrdma"}, "usnic": {"usnic_verbs"}, "vmw_pvrdma": {"vmw_pvrdma"},
}

func formatGbps(bytesPerSecond float64) string {
	return strconv.FormatFloat(bytesPerSecond*8/1e9, 'f', 0, 64) + " Gb/s"
}
