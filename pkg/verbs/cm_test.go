package verbs

import (
	"errors"
	"net/netip"
	"strings"
	"syscall"
	"testing"
)

// TestCM drives the handshakes on a scripted connection manager: refusals, silence, strangers, each of which must leave nothing
// behind.
func TestCM(t *testing.T) { runC(t, "testdata/cm.c") }

func TestCMErrorsSayWhatAndWhy(t *testing.T) {
	err := error(&CMError{Device: "rxe1", What: "connect to 10.9.0.2:4711", Reason: 8, Errno: syscall.ECONNREFUSED})
	for _, want := range []string{"rxe1", "10.9.0.2:4711", "nobody listens", "connection refused"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q lacks %q", err, want)
		}
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Error("the errno is lost")
	}
}

func TestCMAddresses(t *testing.T) {
	for text, want := range map[string]CMAddr{
		"10.9.0.2:7":      {Addr: netip.MustParseAddr("10.9.0.2"), Port: 7},
		"[fd00::1]:65535": {Addr: netip.MustParseAddr("fd00::1"), Port: 65535},
	} {
		if got := want.String(); got != text {
			t.Errorf("%q, want %q", got, text)
		}
	}
	mapped := CMAddr{Addr: netip.MustParseAddr("::ffff:10.9.0.2")}.c()
	if mapped.v4 != 1 || mapped.ip[0] != 10 || mapped.ip[3] != 2 {
		t.Errorf("an IPv4-mapped address is not IPv4: %v", mapped)
	}
	local := CMAddr{Addr: netip.MustParseAddr("fe80::1"), IfIndex: 3}.c()
	if local.scope != 3 || local.v4 != 0 {
		t.Errorf("a link-local address lacks its interface: %v", local)
	}
}
