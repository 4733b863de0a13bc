package counters

import (
	"cmp"
	"net/netip"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// maxText bounds every text taken from the kernel: node_desc and board_id hold what somebody
// once wrote into the hardware.
const maxText = 128

// sanitise makes a text safe for logs, JSON and metric labels: valid UTF-8, printable, at most
// maxText bytes.
func sanitise(s string) string {
	if clean(s) && len(s) <= maxText {
		return s
	}
	var b strings.Builder
	for _, r := range s { // a byte that is no UTF-8 comes as RuneError
		if !unicode.IsPrint(r) {
			r = utf8.RuneError
		}
		if b.Len()+utf8.RuneLen(r) > maxText {
			break
		}
		b.WriteRune(r)
	}
	return b.String()
}

func clean(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] >= 0x7f {
			return false
		}
	}
	return true
}

// sanitiseName does the same for a counter's name, but keeps its length: a file name has at most
// 255 bytes, and two names must not become one.
func sanitiseName(s string) string {
	if clean(s) {
		return s
	}
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return utf8.RuneError
		}
		return r
	}, s)
}

// parseState splits the "4: ACTIVE" of state, phys_state and node_type.
func parseState(s string) (id int, name string, ok bool) {
	num, name, found := strings.Cut(s, ":")
	id, err := strconv.Atoi(strings.TrimSpace(num))
	if !found || err != nil || id < 0 {
		return 0, "", false
	}
	return id, strings.TrimSpace(name), true
}

// parseRate returns the number of "2.5 Gb/sec (1X SDR)" in Gb/s, whatever lanes and generation
// the rest may name.
func parseRate(s string) (gbps float64, ok bool) {
	num, rest, _ := strings.Cut(s, " ")
	unit, _, _ := strings.Cut(rest, " ")
	if !strings.EqualFold(unit, "Gb/sec") {
		return 0, false
	}
	return parseDecimal(num)
}

// parseGTS returns the number of "16.0 GT/s PCIe" or "8 GT/s"; false for "Unknown".
func parseGTS(s string) (gts float64, ok bool) {
	num, unit, _ := strings.Cut(s, " ")
	if !strings.HasPrefix(unit, "GT/s") {
		return 0, false
	}
	gts, ok = parseDecimal(num)
	return gts, ok && gts > 0
}

// parseDecimal takes digits with at most one point, as the kernel prints fractions. ParseFloat
// alone would also take "inf", "0x1p4" and "1e9".
func parseDecimal(s string) (float64, bool) {
	if s == "" || strings.Trim(s, "0123456789.") != "" {
		return 0, false
	}
	v, err := strconv.ParseFloat(s, 64)
	return v, err == nil && v < 1e9
}

// parseWidth returns a number of PCIe lanes; 0 and 255 are the kernel's ways to say unknown.
func parseWidth(s string) (lanes int, ok bool) {
	lanes, err := strconv.Atoi(s)
	return lanes, err == nil && lanes > 0 && lanes < 255
}

// parseLID takes the kernel's "0x1c" and plain decimals.
func parseLID(s string) (int, bool) {
	v, err := strconv.ParseUint(s, 0, 32)
	return int(v), err == nil
}

// parseCounter takes what a counter file holds: an unsigned decimal.
func parseCounter(s string) (uint64, bool) {
	v, err := strconv.ParseUint(s, 10, 64)
	return v, err == nil
}

// parseNetdev takes what the kernel accepts as an interface's name, so that it can stand in a path.
func parseNetdev(s string) (string, bool) {
	ok := s != "" && s != "." && s != ".." && len(s) < unix.IFNAMSIZ && !strings.ContainsAny(s, "/: \t\n")
	return s, ok && utf8.ValidString(s)
}

// parseGID takes 8 groups of 4 hex digits.
func parseGID(s string) (netip.Addr, bool) {
	if len(s) != 39 {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(s)
	return a, err == nil && a.Is6() && a.Zone() == ""
}

// isBDF reports whether a name is a PCI function's, such as 0000:41:00.0. A domain has four
// digits or more.
func isBDF(s string) bool {
	head, fn, ok := strings.Cut(s, ".")
	if !ok || len(fn) != 1 || fn[0] < '0' || fn[0] > '7' {
		return false
	}
	part := strings.Split(head, ":")
	return len(part) == 3 && len(part[0]) >= 4 && len(part[0]) <= 8 && len(part[1]) == 2 && len(part[2]) == 2 &&
		strings.Trim(part[0]+part[1]+part[2], "0123456789abcdef") == ""
}

// bdfOrder maps a PCI function's name to a number that sorts as the bus does.
func bdfOrder(s string) uint64 {
	v, _ := strconv.ParseUint(strings.NewReplacer(":", "", ".", "").Replace(s), 16, 64)
	return v
}

// patternOf replaces each run of digits in a name by {n}.
func patternOf(name string) string {
	if !strings.ContainsAny(name, "0123456789") {
		return name
	}
	var b strings.Builder
	digits := false
	for _, r := range name {
		if r >= '0' && r <= '9' {
			if !digits {
				b.WriteString("{n}")
			}
			digits = true
			continue
		}
		digits = false
		b.WriteRune(r)
	}
	return b.String()
}

// naturalCompare orders names by their text and by the value of the numbers within: eth2 before
// eth10.
func naturalCompare(a, b string) int {
	for i, j := 0, 0; ; {
		if i == len(a) || j == len(b) {
			return cmp.Or(cmp.Compare(len(a)-i, len(b)-j), strings.Compare(a, b))
		}
		if isDigit(a[i]) && isDigit(b[j]) {
			na, nb := digits(a[i:]), digits(b[j:])
			i, j = i+len(na), j+len(nb)
			na, nb = strings.TrimLeft(na, "0"), strings.TrimLeft(nb, "0")
			if c := cmp.Or(cmp.Compare(len(na), len(nb)), strings.Compare(na, nb)); c != 0 {
				return c
			}
			continue
		}
		if a[i] != b[j] {
			return cmp.Compare(a[i], b[j])
		}
		i, j = i+1, j+1
	}
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

func digits(s string) string {
	n := 0
	for n < len(s) && isDigit(s[n]) {
		n++
	}
	return s[:n]
}

// rdmaMTU is the RDMA MTU that an Ethernet port derives from its netdev's MTU: the largest the
// wire format knows that leaves room for the headers. IB alone tells its own, through verbs.
func rdmaMTU(netdevMTU int) (int, bool) {
	for mtu := 4096; mtu >= 256; mtu /= 2 {
		if mtu <= netdevMTU-96 {
			return mtu, true
		}
	}
	return 0, false
}

func kernelRelease() *string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return nil
	}
	return new(sanitise(unix.ByteSliceToString(u.Release[:])))
}
