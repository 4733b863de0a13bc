package counters

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// portGet is RDMA_NLDEV_CMD_PORT_GET, which nl lacks.
const portGet = 5

// ask runs a request to the kernel under the supervision that file reads have. It needs a name
// of its own, as a path.
func ask[T any](l *lane, name string, request func() (T, error)) (T, error) {
	var zero T
	if err := l.enter(name); err != nil {
		return zero, err
	}
	v, err := request()
	if lost := l.leave(); lost != nil {
		return zero, lost
	}
	if err != nil {
		return zero, fmt.Errorf("%s: %w", name, err)
	}
	return v, nil
}

// netlinkLink finds a device in rdma netlink; nil if it isn't there or the kernel has none.
func (l *lane) netlinkLink(device string) *netlink.RdmaLink {
	for range 3 { // a dump that devices come and go in must be repeated
		link, err := ask(l, "netlink:dev/"+device, func() (*netlink.RdmaLink, error) { return netlink.RdmaLinkByName(device) })
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return link
		}
	}
	return nil
}

// netlinkCounters reads a port's hw_counters; no privilege is needed. A device that came back
// has another index, so a stale link fails and can't show another device's counters.
func (l *lane) netlinkCounters(link *netlink.RdmaLink, port int) ([]sample, error) {
	name := "netlink:stat/" + link.Attrs.Name + "/" + strconv.Itoa(port)
	stats, err := ask(l, name, func() (*netlink.RdmaPortStatistic, error) {
		return netlink.RdmaPortStatisticList(link, uint32(port))
	})
	if err != nil {
		return nil, err
	}
	samples := make([]sample, 0, len(stats.Statistics))
	for name, v := range stats.Statistics {
		samples = append(samples, sample{group: HW, name: sanitiseName(name), value: v})
	}
	return samples, nil
}

// netlinkNetdev asks for the netdev of a port, which for siw and iWARP no file tells.
func (l *lane) netlinkNetdev(link *netlink.RdmaLink, port int) *string {
	if link == nil {
		return nil
	}
	name := "netlink:port/" + link.Attrs.Name + "/" + strconv.Itoa(port)
	netdev, err := ask(l, name, func() (string, error) {
		req := nl.NewNetlinkRequest(nl.RDMA_NL_NLDEV<<nl.RDMA_NL_GET_CLIENT_SHIFT|portGet, unix.NLM_F_ACK)
		req.AddData(nl.NewRtAttr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, nl.Uint32Attr(link.Attrs.Index)))
		req.AddData(nl.NewRtAttr(nl.RDMA_NLDEV_ATTR_PORT_INDEX, nl.Uint32Attr(uint32(port))))
		msgs, err := req.Execute(unix.NETLINK_RDMA, 0)
		if err != nil {
			return "", err
		}
		for _, m := range msgs {
			attrs, err := nl.ParseRouteAttr(m)
			if err != nil {
				return "", err
			}
			for _, a := range attrs {
				if a.Attr.Type == nl.RDMA_NLDEV_ATTR_NDEV_NAME {
					return unix.ByteSliceToString(a.Value), nil
				}
			}
		}
		return "", unix.ENODATA
	})
	if err != nil {
		return nil
	}
	return &netdev
}

func ethtoolStats(netdev string) (map[string]uint64, error) { return ethtool.Stats(netdev) }

// ethtoolStats reads the statistics of a netdev; all of them, or those that are in a class.
func (l *lane) ethtoolStats(netdev string, all bool) map[string]uint64 {
	if l.fs.ethtool == nil {
		return nil
	}
	stats, err := ask(l, "ethtool:"+netdev, func() (map[string]uint64, error) { return l.fs.ethtool(netdev) })
	if err != nil {
		return nil
	}
	kept := make(map[string]uint64, len(stats))
	for name, v := range stats {
		if all || linkIndex.find(name) != nil {
			kept[sanitiseName(name)] = v
		}
	}
	return kept
}
