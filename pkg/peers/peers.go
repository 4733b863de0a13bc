// Package peers finds the other nodes of the fleet: in a static list, in files and over HTTP as Prometheus finds its targets, in
// DNS, and in host lists as Slurm writes them. It follows their changes and says which of them are to be probed.
//
// An error is not an empty list: a source that can't be read keeps what it had. A peer is known by its name, so one whose address
// moves stays the same peer.
package peers

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// DefaultPort is the TCP port of the control channel.
const DefaultPort = 18516

// MaxPeers bounds the peers of one source, and of all together.
const MaxPeers = 50_000

// Peer is a node to probe.
type Peer struct {
	Name    string // as in that node's own node.name
	Address string // host:port of its control channel
	Labels  map[string]string
}

// Config says where peers are found. Sources that come first here win where two contradict each other.
type Config struct {
	Static   []Peer
	Files    []string // globs of files in Prometheus's file_sd format
	DNS      []DNS
	Hostlist []string // as [ParseHostlist] reads them
	HTTP     []HTTP
}

// DNS is a name to look up again and again.
type DNS struct {
	Name    string
	Type    string // SRV, A or AAAA
	Port    int    // of the control channel; SRV records carry their own
	Refresh time.Duration
}

// HTTP is a URL that answers as Prometheus's http_sd wants it.
type HTTP struct {
	URL     string
	Refresh time.Duration
}

// Defaults of how often to ask.
const (
	DefaultDNSRefresh  = 30 * time.Second
	DefaultHTTPRefresh = time.Minute
)

var (
	namePattern  = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$`)
	labelPattern = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	portPattern  = regexp.MustCompile(`^[1-9][0-9]{0,4}$`)
	hostPattern  = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?\.?$`)
	digitsDots   = regexp.MustCompile(`^[0-9.]+$`)
)

// NameRule says which names are valid.
const NameRule = "names are 1 to 128 letters, digits and . _ : @ -, and begin with a letter or digit"

// ValidName reports whether s can be the name of a node, and so the value of a metric label.
func ValidName(s string) bool { return namePattern.MatchString(s) }

// ValidLabel reports whether s can be the name of a label that is kept.
func ValidLabel(s string) bool { return labelPattern.MatchString(s) && !strings.HasPrefix(s, "__") }

// ParseAddress reads host, host:port or, to listen on, :port, and completes it with the default port. IP addresses come out in
// one spelling; host names are not resolved.
func ParseAddress(s string, listen bool) (string, error) {
	host, port := s, strconv.Itoa(DefaultPort)
	if _, err := netip.ParseAddr(s); err != nil { // a bare IPv6 address is full of colons
		switch i := strings.LastIndexByte(s, ':'); {
		case strings.HasPrefix(s, "[") && strings.HasSuffix(s, "]"):
			host = s[1 : len(s)-1]
		case i >= 0:
			host, port = s[:i], s[i+1:]
			if inner, ok := strings.CutPrefix(host, "["); ok && strings.HasSuffix(inner, "]") {
				host = inner[:len(inner)-1]
			} else if strings.Contains(host, ":") {
				return "", errors.New("not host:port (an IPv6 address with a port goes into brackets: [address]:port)")
			}
		}
	}
	if p, _ := strconv.Atoi(port); !portPattern.MatchString(port) || p > 65535 {
		return "", fmt.Errorf("%q is not a port; write plain decimal digits, 1 to 65535", port)
	}
	ip, err := netip.ParseAddr(host)
	switch {
	case err == nil && (ip.IsMulticast() || ip.IsUnspecified() && !listen):
		return "", fmt.Errorf("%s is not the address of a host", ip)
	case err == nil:
		host = ip.Unmap().String()
	case host == "" && listen:
	case host == "":
		return "", errors.New("no host; write host:port")
	case digitsDots.MatchString(host), !hostPattern.MatchString(host):
		return "", fmt.Errorf("%q is neither an IP address nor a host name", host)
	}
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	return host + ":" + port, nil
}

// hostOf is the host of a checked address.
func hostOf(address string) string {
	return strings.Trim(address[:strings.LastIndexByte(address, ':')], "[]")
}

// nameOf is what a node at host is called that has no other name: the host, without its domain if own, the name of this node,
// has none either. All nodes of a fleet call each other alike then, and one node's label dst is another's src.
func nameOf(host, own string) string {
	host = strings.TrimSuffix(host, ".")
	if _, err := netip.ParseAddr(host); err != nil && !strings.Contains(own, ".") {
		host, _, _ = strings.Cut(host, ".")
	}
	return host
}
