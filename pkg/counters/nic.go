package counters

import (
	"bytes"
	"encoding/binary"
	"errors"
	"iter"
	"slices"
	"strconv"
	"strings"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// nic asks the kernel for settings of a netdev that are in no file.
type nic struct {
	fastest func(netdev string) (mbps int, err error) // 0: the driver doesn't list what it supports
	pause   func(netdev string) (rx, tx bool, err error)
	dcb     func(netdev string) (dcb, error)
}

var kernelNIC = &nic{fastest: fastestMode, pause: pauseFrames, dcb: bridging}

// dcb is what data centre bridging is set to.
type dcb struct {
	pfc   []int  // priorities; nil: the driver doesn't tell
	trust string // dscp or pcp; empty: the driver doesn't tell
}

// netdevSettings reads what a netdev's link supports and how it controls its flow.
func (r *reader) netdevSettings(netdev string, e *Environment) {
	if r.fs.nic == nil {
		return
	}
	mbps, err := ask(r.lane, "ethtool:"+netdev+"/modes", func() (int, error) { return r.fs.nic.fastest(netdev) })
	if err != nil {
		r.unsupported("link.max_rate_gbps", err)
	} else if mbps > 0 {
		e.Link.MaxGbps = new(float64(mbps) / 1000)
	}
	q := e.QoS
	if q == nil {
		return
	}
	type pauses struct{ rx, tx bool }
	p, err := ask(r.lane, "ethtool:"+netdev+"/pause", func() (pauses, error) {
		rx, tx, err := r.fs.nic.pause(netdev)
		return pauses{rx, tx}, err
	})
	if err != nil {
		r.unsupported("qos.pause_rx", err)
		r.unsupported("qos.pause_tx", err)
	} else {
		q.PauseRx, q.PauseTx = &p.rx, &p.tx
	}
	d, err := ask(r.lane, "netlink:dcb/"+netdev, func() (dcb, error) { return r.fs.nic.dcb(netdev) })
	if err != nil {
		r.unsupported("qos.pfc", err)
		return
	}
	q.PFC = d.pfc
	if q.Trust == nil && d.trust != "" {
		q.Trust = &d.trust
	}
}

// unsupported notes a failure, unless it says that the driver or the kernel has no such thing.
func (r *reader) unsupported(name string, err error) {
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENODEV) {
		r.failed(name, err)
	}
}

func pauseFrames(netdev string) (rx, tx bool, err error) {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return false, false, err
	}
	defer e.Close()
	p, err := e.GetPause(netdev)
	return p.RxPause != 0, p.TxPause != 0, err
}

// fastestMode asks by netlink, where the kernel names the modes: ethtool's ioctl numbers them, and knows fewer.
func fastestMode(netdev string) (mbps int, err error) {
	family, err := netlink.GenlFamilyGet(unix.ETHTOOL_GENL_NAME)
	if err != nil {
		return 0, unix.EOPNOTSUPP // before kernel 5.6
	}
	req := nl.NewNetlinkRequest(int(family.ID), unix.NLM_F_ACK)
	req.AddData(&nl.Genlmsg{Command: unix.ETHTOOL_MSG_LINKMODES_GET, Version: unix.ETHTOOL_GENL_VERSION})
	head := nl.NewRtAttr(unix.ETHTOOL_A_LINKMODES_HEADER|unix.NLA_F_NESTED, nil)
	head.AddRtAttr(unix.ETHTOOL_A_HEADER_DEV_NAME, nl.ZeroTerminated(netdev))
	req.AddData(head)
	msgs, err := req.Execute(unix.NETLINK_GENERIC, 0)
	if err != nil {
		return 0, err
	}
	for _, m := range msgs {
		if len(m) >= nl.SizeofGenlmsg {
			mbps = max(mbps, parseLinkModes(m[nl.SizeofGenlmsg:]))
		}
	}
	return mbps, nil
}

// parseLinkModes returns the fastest of the modes that a netdev supports, in Mb/s. Those are named like 100000baseCR4/Full.
func parseLinkModes(msg []byte) (mbps int) {
	for bits := range nested(msg, unix.ETHTOOL_A_LINKMODES_OURS, unix.ETHTOOL_A_BITSET_BITS) {
		for bit := range nested(bits, unix.ETHTOOL_A_BITSET_BITS_BIT) {
			for name := range nested(bit, unix.ETHTOOL_A_BITSET_BIT_NAME) {
				speed, _, ok := strings.Cut(string(bytes.TrimRight(name, "\x00")), "base")
				if v, err := strconv.Atoi(speed); ok && err == nil && v < 1<<30 {
					mbps = max(mbps, v)
				}
			}
		}
	}
	return mbps
}

// Numbers of linux/dcbnl.h.
const (
	dcbIEEEGet     = 21
	dcbIfname      = 1
	dcbIEEE        = 13
	ieeePFC        = 2
	ieeeApps       = 3
	ieeeTrust      = 11
	ieeeApp        = 1
	ieeeTrustApp   = 1
	selectorPCP    = 255
	selectorDSCP   = 5
	enabledPFC     = 1 // offset in struct ieee_pfc
	sizeofDCB      = 4
	sizeofDCBEntry = 4
)

// raw is the fixed head of a netlink request.
type raw []byte

func (r raw) Len() int          { return len(r) }
func (r raw) Serialize() []byte { return r }

func bridging(netdev string) (dcb, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETDCB, unix.NLM_F_ACK)
	req.AddData(raw{unix.AF_UNSPEC, dcbIEEEGet, 0, 0})
	req.AddData(nl.NewRtAttr(dcbIfname, nl.ZeroTerminated(netdev)))
	msgs, err := req.Execute(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return dcb{}, err
	}
	for _, m := range msgs {
		if len(m) >= sizeofDCB {
			return parseDCB(m[sizeofDCB:]), nil
		}
	}
	return dcb{}, unix.EOPNOTSUPP
}

// parseDCB takes the attributes of a DCB_CMD_IEEE_GET. Without a table of what is trusted, entries for DSCP in the one of
// applications mean that the driver sorts packets by it.
func parseDCB(msg []byte) dcb {
	var d dcb
	for pfc := range nested(msg, dcbIEEE, ieeePFC) {
		if len(pfc) > enabledPFC {
			d.pfc = []int{}
			for prio := range 8 {
				if pfc[enabledPFC]>>prio&1 == 1 {
					d.pfc = append(d.pfc, prio)
				}
			}
		}
	}
	for app := range nested(msg, dcbIEEE, ieeeApps, ieeeApp) {
		if len(app) >= sizeofDCBEntry && app[0] == selectorDSCP {
			d.trust = "dscp"
		}
	}
	var trusted []byte
	for selector := range nested(msg, dcbIEEE, ieeeTrust, ieeeTrustApp) {
		trusted = append(trusted, selector[:min(1, len(selector))]...)
	}
	switch {
	case slices.Contains(trusted, selectorDSCP):
		d.trust = "dscp"
	case slices.Contains(trusted, selectorPCP):
		d.trust = "pcp"
	}
	return d
}

// nested walks to the attributes at the end of a path of types.
func nested(msg []byte, path ...uint16) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		walk(msg, path, yield)
	}
}

func walk(msg []byte, path []uint16, yield func([]byte) bool) bool {
	if len(path) == 0 {
		return yield(msg)
	}
	for len(msg) >= unix.SizeofRtAttr {
		size := int(binary.NativeEndian.Uint16(msg))
		kind := binary.NativeEndian.Uint16(msg[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
		if size < unix.SizeofRtAttr || size > len(msg) {
			return true
		}
		if kind == path[0] && !walk(msg[unix.SizeofRtAttr:size], path[1:], yield) {
			return false
		}
		msg = msg[min((size+3)&^3, len(msg)):]
	}
	return true
}
