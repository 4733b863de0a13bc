package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// rdmaModules maps the driver of a PCI function to the module that makes an RDMA device of it.
var rdmaModules = map[string]string{
	"mlx5_core": "mlx5_ib", "mlx4_core": "mlx4_ib", "bnxt_en": "bnxt_re", "ice": "irdma", "i40e": "irdma", "hns3": "hns_roce_hw_v2",
	"qede": "qedr", "cxgb4": "iw_cxgb4", "mana": "mana_ib", "ionic": "ionic_rdma",
}

const aTree = "a copied tree does not tell"

// modules looks at the kernel's modules and at what user space needs to use them.
func (e *examination) modules() {
	const check, expected = "RDMA devices", "at least one in /sys/class/infiniband"
	var names []string
	for _, d := range e.inv.Devices {
		names = append(names, fmt.Sprintf("%s (%s)", d.Name, d.Driver))
	}
	var listed []verbs.DeviceInfo
	var err error
	if e.Node != nil {
		if listed, err = verbs.Devices(); err != nil {
			e.add(Modules, Failed, "libibverbs", err.Error(), "a list of devices", "install rdma-core's libibverbs and ibverbs-providers of one version")
		}
		listed = slices.DeleteFunc(listed, func(d verbs.DeviceInfo) bool { return !e.Filter.Match(d.Name) })
		for _, d := range listed {
			if e.device(d.Name) == nil {
				names = append(names, d.Name+" (by a user-space provider alone)")
			}
		}
	}
	switch class := e.path("class", "infiniband"); {
	case len(names) > 0:
		e.add(Modules, OK, check, strings.Join(names, ", "), expected, "")
	case len(e.Filter.Include) > 0:
		e.add(Modules, Failed, check, "none that is called "+strings.Join(e.Filter.Include, " or "), expected,
			"`rdmabenchd devices` lists those that are there; udev may have renamed it (mlx5_0 to rocep65s0f0)")
	case !exists(class):
		e.add(Modules, Failed, check, "no /sys/class/infiniband: the kernel has no RDMA stack", expected, e.loadAdvice())
	default:
		e.add(Modules, Failed, check, "/sys/class/infiniband is empty", expected, e.loadAdvice())
	}
	if e.Node == nil {
		e.skip(Modules, "verbs providers", aTree)
		return
	}
	var missing []string
	for _, d := range e.inv.Devices {
		if slices.ContainsFunc(listed, func(l verbs.DeviceInfo) bool { return l.Name == d.Name }) {
			continue
		}
		missing = append(missing, d.Name)
		if probe.MissingReason(d.Name) == probe.NoCharDevice {
			continue // which the next layer says
		}
		e.add(Modules, Failed, "verbs provider of "+d.Name, "libibverbs does not list it", "listed, as by ibv_devices",
			"install ibverbs-providers (Debian) or libibverbs (RPM) for driver "+d.Driver+", or the vendor's package that fits the kernel's driver")
	}
	if len(missing) == 0 && len(names) > 0 {
		e.add(Modules, OK, "verbs providers", "libibverbs lists every device", "every device listed", "")
	}
	if len(e.inv.Devices) > 0 {
		found, v := "loaded", OK
		if !exists("/sys/class/infiniband_verbs") {
			found, v = "not loaded", Failed
		}
		e.add(Modules, v, "module ib_uverbs", found, "loaded", "modprobe ib_uverbs; `systemctl enable --now rdma-load-modules@infiniband` has it loaded at boot")
	}
}

// loadAdvice looks for a NIC whose RDMA half is missing.
func (e *examination) loadAdvice() string {
	functions, _ := filepath.Glob(e.path("bus", "pci", "devices", "*", "driver")) // the pattern is well-formed
	for _, f := range functions {
		driver, err := os.Readlink(f)
		if err != nil {
			continue
		}
		if module := rdmaModules[filepath.Base(driver)]; module != "" {
			return fmt.Sprintf("modprobe %s: driver %s has the NIC at %s", module, filepath.Base(driver), filepath.Base(filepath.Dir(f)))
		}
	}
	return "load the NIC's RDMA module (mlx5_ib, bnxt_re, irdma, …) and see in dmesg what becomes of it; in a container, pass the host's /sys and /dev/infiniband; " +
		"without such a NIC: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev NETDEV"
}

// devices looks at the nodes by which user space opens the devices, and at whether it may.
func (e *examination) devices() {
	for _, d := range e.inv.Devices {
		if slices.Contains(d.Warnings, counters.WarnNotAnswering) {
			e.add(Devices, Failed, d.Name, "reads of its files hang", "a device that answers", "its driver or firmware is stuck: look in dmesg, reset the device or reboot")
		}
	}
	if stuck := e.Sysfs.Stuck(); len(stuck) > 0 {
		e.add(Devices, Failed, "reads that hang", strings.Join(stuck, ", "), "none", "the driver or firmware behind them is stuck: look in dmesg; a scrape leaves them alone until they return")
	}
	if e.Node == nil {
		e.skip(Devices, "device nodes", aTree)
		return
	}
	seen := map[string]bool{}
	for _, p := range e.ports {
		if seen[p.device] {
			continue
		}
		seen[p.device] = true
		node := probe.CharDevice(p.device)
		found := "opened"
		if node != "" {
			found = describeNode(node)
		}
		const expected = "a node in /dev/infiniband that this process may open"
		switch reason := p.unopened(); reason {
		case "":
			e.add(Devices, OK, p.device, found, expected, "")
			continue
		case probe.NoCharDevice:
			e.add(Devices, Failed, p.device, "no "+orElse(node, "/dev/infiniband/uverbs*")+" to open it by", expected,
				"modprobe ib_uverbs; in a unit remove PrivateDevices=; in a container pass /dev/infiniband")
		case probe.Permission:
			e.add(Devices, Failed, p.device, fmt.Sprintf("%s; user %d, groups %v: %s", found, os.Geteuid(), groups(), p.local.Detail), expected, permissionAdvice(node))
		case probe.ProviderMissing, probe.NoDevice, probe.NoRDMA:
			e.skip(Devices, p.device, "libibverbs does not list it")
		case probe.DeviceRemoved:
			e.add(Devices, Failed, p.device, p.detail(), "a device that answers", "look in dmesg for a reset or a firmware fault of the device")
		default:
			e.add(Devices, Failed, p.device, p.detail(), expected, "look at the rdma cgroup's limits (rdma.max), open files (ulimit -n) and memory")
		}
	}
	if len(seen) == 0 {
		e.skip(Devices, "device nodes", "there is no RDMA device")
	}
}

// permissionAdvice tells a file's mode from a cgroup's rule.
func permissionAdvice(node string) string {
	if node == "" {
		return "run as a user that may open /dev/infiniband/uverbs*"
	}
	f, err := os.OpenFile(node, os.O_RDWR, 0)
	if err == nil {
		f.Close()
	}
	if errors.Is(err, syscall.EPERM) {
		return "the unit's DeviceAllow= or the container's device list denies it: allow char-infiniband_verbs (major 231), load ib_uverbs before the unit starts, and restart it"
	}
	return "give the user's group access by a udev rule (rdma-core's has mode 0666), or run as root"
}

func groups() []int {
	g, err := os.Getgroups()
	if err != nil {
		return nil
	}
	return g
}

func describeNode(node string) string {
	st, err := os.Stat(node)
	if err != nil {
		return node + " is not there"
	}
	s := fmt.Sprintf("%s, mode %04o", node, st.Mode().Perm())
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		s += fmt.Sprintf(", of user %d and group %d", sys.Uid, sys.Gid)
	}
	return s
}

// device returns what sysfs says of a device; nil if nothing.
func (e *examination) device(name string) *counters.Device {
	for i := range e.inv.Devices {
		if e.inv.Devices[i].Name == name {
			return &e.inv.Devices[i]
		}
	}
	return nil
}

func (e *examination) path(elem ...string) string {
	return filepath.Join(append([]string{e.Sysfs.Root()}, elem...)...)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

func orElse(s, other string) string {
	if s == "" {
		return other
	}
	return s
}
