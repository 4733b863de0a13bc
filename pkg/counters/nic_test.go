package counters

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// attr makes a netlink attribute.
func attr(kind uint16, parts ...[]byte) []byte {
	var value []byte
	for _, p := range parts {
		value = append(value, p...)
	}
	b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(value)))
	b = append(binary.NativeEndian.AppendUint16(b, kind), value...)
	return append(b, make([]byte, -len(b)&3)...)
}

func linkModes(names ...string) []byte {
	var bits [][]byte
	for i, name := range names {
		bits = append(bits, attr(unix.ETHTOOL_A_BITSET_BITS_BIT|unix.NLA_F_NESTED,
			attr(unix.ETHTOOL_A_BITSET_BIT_INDEX, []byte{byte(i), 0, 0, 0}), attr(unix.ETHTOOL_A_BITSET_BIT_NAME, []byte(name+"\x00"))))
	}
	return append(attr(unix.ETHTOOL_A_LINKMODES_AUTONEG, []byte{1}),
		attr(unix.ETHTOOL_A_LINKMODES_OURS|unix.NLA_F_NESTED, attr(unix.ETHTOOL_A_BITSET_BITS|unix.NLA_F_NESTED, bits...))...)
}

func TestParseLinkModes(t *testing.T) {
	for _, test := range []struct {
		names []string
		want  int
	}{
		{nil, 0},
		{[]string{"Autoneg", "TP", "FIBRE", "Pause"}, 0},
		{[]string{"Autoneg", "1000baseKX/Full", "100000baseCR4/Full", "25000baseCR/Full", "FEC_RS"}, 100000},
		{[]string{"800000baseDR8/Full", "10baseT/Half"}, 800000},
		{[]string{"99999999999999999999baseX/Full", "-5baseT/Full", "base"}, 0},
	} {
		if got := parseLinkModes(linkModes(test.names...)); got != test.want {
			t.Errorf("%v: %d Mb/s, want %d", test.names, got, test.want)
		}
	}
}

func TestParseDCB(t *testing.T) {
	pfc := func(enabled byte) []byte { return attr(ieeePFC, append([]byte{8, enabled}, make([]byte, 134)...)) }
	dscp := attr(ieeeApps, attr(ieeeApp, []byte{selectorDSCP, 3, 26, 0}))
	for name, test := range map[string]struct {
		msg  []byte
		want dcb
	}{
		"nothing":          {nil, dcb{}},
		"no priority":      {attr(dcbIEEE, pfc(0)), dcb{pfc: []int{}}},
		"priority 3":       {attr(dcbIEEE|unix.NLA_F_NESTED, pfc(1<<3)), dcb{pfc: []int{3}}},
		"all and DSCP":     {attr(dcbIEEE, pfc(0xff), dscp), dcb{pfc: []int{0, 1, 2, 3, 4, 5, 6, 7}, trust: "dscp"}},
		"another app":      {attr(dcbIEEE, attr(ieeeApps, attr(ieeeApp, []byte{1, 3, 6, 0x89}))), dcb{}},
		"trust table":      {attr(dcbIEEE, dscp, attr(ieeeTrust, attr(ieeeTrustApp, []byte{selectorPCP}))), dcb{trust: "pcp"}},
		"both are trusted": {attr(dcbIEEE, attr(ieeeTrust, attr(ieeeTrustApp, []byte{selectorPCP}), attr(ieeeTrustApp, []byte{selectorDSCP}))), dcb{trust: "dscp"}},
	} {
		if diff := cmp.Diff(test.want, parseDCB(test.msg), cmp.AllowUnexported(dcb{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// What only netlink and ethtool tell comes into the environment and its checks.
func TestNetdevSettings(t *testing.T) {
	fs := goodHost(t)
	fs.nic = &nic{
		fastest: func(string) (int, error) { return 200000, nil },
		pause:   func(string) (rx, tx bool, err error) { return false, true, nil },
		dcb:     func(string) (dcb, error) { return dcb{pfc: []int{3}, trust: "pcp"}, nil },
	}
	e := environment(t, fs, "mlx5_0", 1)
	if v := verdicts(e); v[CheckLinkRate] != CheckWarn || v[CheckFlowControl] != CheckOK || *e.Link.MaxGbps != 200 || *e.QoS.Trust != "dscp" {
		t.Errorf("%v %s", v, asJSON(t, e))
	}
	facts := e.Fingerprint().Facts
	if facts["PFC priorities"] != "3" || facts["pause received"] != "off" || facts["pause sent"] != "on" {
		t.Errorf("facts: %v", facts)
	}

	fs.nic.dcb = func(string) (dcb, error) { return dcb{pfc: []int{}}, nil }
	if v := verdicts(environment(t, fs, "mlx5_0", 1)); v[CheckFlowControl] != CheckWarn {
		t.Errorf("flow control without PFC and with half of pause: %s", v[CheckFlowControl])
	}
	// A driver that has none of it is not a fault; a request that hangs or fails is noted.
	fs.ReadTimeout = 200 * time.Millisecond
	hung := make(chan struct{})
	defer close(hung)
	fs.nic = &nic{
		fastest: func(string) (int, error) { return 0, unix.EOPNOTSUPP },
		pause:   func(string) (rx, tx bool, err error) { return false, false, unix.EPERM },
		dcb:     func(string) (dcb, error) { <-hung; return dcb{}, nil },
	}
	e = environment(t, fs, "mlx5_0", 1)
	got := map[string]string{}
	for _, u := range e.Missing {
		got[u.Name] = deref(u.Errno)
	}
	want := map[string]string{"qos.pause_rx": "EPERM", "qos.pause_tx": "EPERM", "qos.pfc": "ETIMEDOUT"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("unreadable (-want +got):\n%s", diff)
	}
	if e.PCI == nil || e.Versions.Firmware == nil {
		t.Error("one request that hangs hides the rest")
	}
}

// A link slower than before is a warning as long as this process remembers.
func TestRateFell(t *testing.T) {
	fs := goodHost(t)
	if v := verdicts(environment(t, fs, "mlx5_0", 1)); v[CheckLinkRate] != CheckUnknown {
		t.Errorf("at first: %s", v[CheckLinkRate])
	}
	dir := portDir(t, fs.root, "mlx5_0", 1)
	for text, want := range map[string]CheckVerdict{"50 Gb/sec (1X HDR)\n": CheckWarn, "100 Gb/sec (4X EDR)\n": CheckUnknown} {
		write(t, filepath.Join(dir, "rate"), text)
		write(t, filepath.Join(fs.root, "class/net/enp65s0np0/speed"), strings.TrimSuffix(text[:3], " ")+"000\n")
		if v := verdicts(environment(t, fs, "mlx5_0", 1)); v[CheckLinkRate] != want {
			t.Errorf("%q: %s, want %s", text, v[CheckLinkRate], want)
		}
	}
}

func FuzzNetlink(f *testing.F) {
	f.Add(linkModes("100000baseCR4/Full"))
	f.Add(attr(dcbIEEE, attr(ieeePFC, []byte{8, 8})))
	f.Add([]byte{3, 0, 13, 0, 255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, msg []byte) {
		if v := parseLinkModes(msg); v < 0 {
			t.Errorf("%d Mb/s", v)
		}
		if d := parseDCB(msg); len(d.pfc) > 8*len(msg) {
			t.Errorf("%d priorities", len(d.pfc))
		}
	})
}

// The requests themselves, against this machine's kernel.
func TestKernelNIC(t *testing.T) {
	names, err := os.ReadDir("/sys/class/net")
	if err != nil {
		t.Skip(err)
	}
	for _, n := range names {
		mbps, err1 := kernelNIC.fastest(n.Name())
		rx, tx, err2 := kernelNIC.pause(n.Name())
		d, err3 := kernelNIC.dcb(n.Name())
		t.Logf("%s: %d Mb/s %v, pause %t %t %v, %+v %v", n.Name(), mbps, err1, rx, tx, err2, d, err3)
		for _, err := range []error{err1, err2, err3} {
			if err == unix.EINVAL || err == unix.EBADMSG {
				t.Errorf("%s: the kernel does not understand the request: %v", n.Name(), err)
			}
		}
	}
}
