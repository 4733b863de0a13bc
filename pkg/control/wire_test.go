package control

import (
	"encoding/json"
	"errors"
	"math"
	"net/netip"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func gid(addr string) GID { return GID{Addr: netip.MustParseAddr(addr), Type: "RoCE v2"} }

func endpoint(qps int) Endpoint {
	e := Endpoint{LinkLayer: "Ethernet", RKey: 7, Addr: 0x7f0000000000, Stride: 1 << 20, ActiveMTU: 4096, RDAtom: 16, DestRDAtom: 16, RateBPS: 1.25e9}
	for i := range qps {
		e.QPs = append(e.QPs, QP{QPN: uint32(17 + i), PSN: uint32(i)})
	}
	return e
}

func openRequest() *OpenRequest {
	return &OpenRequest{
		ID: strings.Repeat("0f", 16), Instance: "a", Node: "node1", Probe: "rtt", Rail: "0", Kind: "latency", Transport: "rc", Op: "write",
		MaxMsg: 1 << 16, RxDepth: 16, Deadline: 30, Lease: 10, Timeout: 14, Retries: 6, RNRRetry: 7,
		GIDs: []GID{gid("10.9.0.1"), gid("fd00::1")}, Endpoint: endpoint(2),
	}
}

func openReply(req *OpenRequest) *OpenReply {
	g := gid("10.9.0.2")
	return &OpenReply{
		Instance: "b", Node: "node2", Device: "mlx5_0", Port: 1, Lease: 10, MTU: 1024, GID: &g, InitiatorGID: &req.GIDs[0],
		Endpoint: endpoint(len(req.Endpoint.QPs)),
	}
}

// badEndpoints are what no peer may offer, with a word that the error must hold.
var badEndpoints = []struct {
	name, says string
	spoil      func(e *Endpoint)
}{
	{"no QP", "0 QPs", func(e *Endpoint) { e.QPs = nil }},
	{"1025 QPs", "1025 QPs", func(e *Endpoint) { *e = endpoint(1025) }},
	{"QPN of 25 bits", "QPN", func(e *Endpoint) { e.QPs[1].QPN = 1 << 24 }},
	{"QPN of a management QP", "QPN", func(e *Endpoint) { e.QPs[0].QPN = 1 }},
	{"PSN of 25 bits", "PSN", func(e *Endpoint) { e.QPs[1].PSN = 1 << 24 }},
	{"MTU 9", "MTU 9", func(e *Endpoint) { e.ActiveMTU = 9 }},
	{"MTU 0", "MTU 0", func(e *Endpoint) { e.ActiveMTU = 0 }},
	{"negative rd_atom", "rd_atom", func(e *Endpoint) { e.RDAtom = -1 }},
	{"rd_atom of 9 bits", "rd_atom", func(e *Endpoint) { e.RDAtom = 256 }},
	{"negative dest_rd_atom", "dest_rd_atom", func(e *Endpoint) { e.DestRDAtom = -1 }},
	{"dest_rd_atom of 9 bits", "dest_rd_atom", func(e *Endpoint) { e.DestRDAtom = 256 }},
	{"long link layer", "link layer", func(e *Endpoint) { e.LinkLayer = strings.Repeat("x", MaxName+1) }},
	{"no room", "stride 0", func(e *Endpoint) { e.Stride = 0 }},
	{"room for less than a message", "stride", func(e *Endpoint) { e.Stride = 1<<16 - 1 }},
	{"stride of 2^63", "stride", func(e *Endpoint) { e.Stride = 1 << 63 }},
	{"buffer that wraps", "wraps", func(e *Endpoint) { e.Addr = 0xffffffffffffff00 }},
	{"buffer whose last byte wraps", "wraps", func(e *Endpoint) { e.Addr = math.MaxUint64 - 4*e.Stride + 1 }},
}

var badGIDs = []struct{ name, json string }{
	{"all zero", `{"addr":"::","type":"RoCE v2"}`},
	{"all zero as IPv4", `{"addr":"0.0.0.0","type":"RoCE v2"}`},
	{"all zero as mapped IPv4", `{"addr":"::ffff:0.0.0.0","type":"RoCE v2"}`},
	{"all ones", `{"addr":"ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff","type":"RoCE v2"}`},
	{"broadcast", `{"addr":"255.255.255.255","type":"RoCE v2"}`},
	{"multicast", `{"addr":"ff02::1","type":"RoCE v2"}`},
	{"IPv4 multicast", `{"addr":"224.0.0.1","type":"RoCE v2"}`},
	{"IPv4 in its IPv6 form", `{"addr":"::ffff:10.9.0.1","type":"RoCE v2"}`},
	{"with a zone", `{"addr":"fe80::1%eth0","type":"RoCE v2"}`},
	{"absent", `{"type":"RoCE v2"}`},
	{"empty", `{"addr":"","type":"RoCE v2"}`},
}

func parseGID(t *testing.T, text string) GID {
	t.Helper()
	var g GID
	if err := json.Unmarshal([]byte(text), &g); err != nil {
		t.Fatal(err)
	}
	return g
}

func checkRefused(t *testing.T, err error, says string) {
	t.Helper()
	if err == nil {
		t.Fatal("was accepted")
	}
	if !strings.Contains(err.Error(), says) {
		t.Errorf("error %q does not name %q", err, says)
	}
}

func TestOpenRequestValidate(t *testing.T) {
	if err := openRequest().Validate(); err != nil {
		t.Fatalf("a good request was refused: %s", err)
	}
	type test struct {
		name, says string
		spoil      func(r *OpenRequest)
	}
	long := strings.Repeat("x", MaxName+1)
	tests := []test{
		{"no id", "session id", func(r *OpenRequest) { r.ID = "" }},
		{"short id", "session id", func(r *OpenRequest) { r.ID = "0f" }},
		{"id not hex", "session id", func(r *OpenRequest) { r.ID = strings.Repeat("zz", 16) }},
		{"long id", "session id", func(r *OpenRequest) { r.ID = strings.Repeat("0f", 1<<16) }},
		{"negative minor", "minor", func(r *OpenRequest) { r.Minor = -1 }},
		{"long instance", "instance", func(r *OpenRequest) { r.Instance = long }},
		{"long host", "host", func(r *OpenRequest) { r.Host = long }},
		{"long source device", "source device", func(r *OpenRequest) { r.Source.Device = long }},
		{"source port 256", "source port", func(r *OpenRequest) { r.Source.Port = 256 }},
		{"long node", "node", func(r *OpenRequest) { r.Node = long }},
		{"node that steers a terminal", "node", func(r *OpenRequest) { r.Node = "\x1b[2J" }},
		{"long probe", "probe", func(r *OpenRequest) { r.Probe = long }},
		{"probe with a line end", "probe", func(r *OpenRequest) { r.Probe = "a\nb" }},
		{"long rail", "rail", func(r *OpenRequest) { r.Rail = long }},
		{"long device", "device", func(r *OpenRequest) { r.Device = long }},
		{"long kind", "kind", func(r *OpenRequest) { r.Kind = long }},
		{"no kind", "kind", func(r *OpenRequest) { r.Kind = "" }},
		{"long transport", "transport", func(r *OpenRequest) { r.Transport = long }},
		{"no transport", "transport", func(r *OpenRequest) { r.Transport = "" }},
		{"long op", "op", func(r *OpenRequest) { r.Op = long }},
		{"no op", "op", func(r *OpenRequest) { r.Op = "" }},
		{"negative port", "port", func(r *OpenRequest) { r.Port = -1 }},
		{"port 256", "port", func(r *OpenRequest) { r.Port = 256 }},
		{"empty messages", "max_msg", func(r *OpenRequest) { r.MaxMsg = 0 }},
		{"huge messages", "max_msg", func(r *OpenRequest) { r.MaxMsg = MaxMessage + 1 }},
		{"negative rx_depth", "rx_depth", func(r *OpenRequest) { r.RxDepth = -1 }},
		{"huge rx_depth", "rx_depth", func(r *OpenRequest) { r.RxDepth = 1<<16 + 1 }},
		{"MTU 9", "MTU 9", func(r *OpenRequest) { r.MTU = 9 }},
		{"negative MTU", "MTU -1", func(r *OpenRequest) { r.MTU = -1 }},
		{"service level 16", "service_level", func(r *OpenRequest) { r.ServiceLevel = 16 }},
		{"negative service level", "service_level", func(r *OpenRequest) { r.ServiceLevel = -1 }},
		{"traffic class 256", "traffic_class", func(r *OpenRequest) { r.TrafficClass = 256 }},
		{"flow label of 21 bits", "flow_label", func(r *OpenRequest) { r.FlowLabel = 1 << 20 }},
		{"timeout 32", "timeout", func(r *OpenRequest) { r.Timeout = 32 }},
		{"8 retries", "retries", func(r *OpenRequest) { r.Retries = 8 }},
		{"8 RNR retries", "rnr_retry", func(r *OpenRequest) { r.RNRRetry = 8 }},
		{"negative RNR retries", "rnr_retry", func(r *OpenRequest) { r.RNRRetry = -1 }},
		{"65 GIDs", "65 GIDs", func(r *OpenRequest) { r.GIDs = make([]GID, MaxGIDs+1) }},
	}
	for what, field := range map[string]func(r *OpenRequest) *float64{
		"deadline": func(r *OpenRequest) *float64 { return &r.Deadline },
		"lease":    func(r *OpenRequest) *float64 { return &r.Lease },
	} {
		for name, v := range map[string]float64{
			"NaN": math.NaN(), "infinite": math.Inf(1), "-infinite": math.Inf(-1), "negative": -1, "zero": 0, "more than a day of": 86401, "huge": 1e300,
		} {
			tests = append(tests, test{name + " " + what, what, func(r *OpenRequest) { *field(r) = v }})
		}
	}
	// It would make a ticker of no period, or a storm of renewals.
	tests = append(tests, test{"lease of a nanosecond", "lease", func(r *OpenRequest) { r.Lease = 1e-9 }})
	for _, e := range badEndpoints {
		tests = append(tests, test{"endpoint: " + e.name, e.says, func(r *OpenRequest) { e.spoil(&r.Endpoint) }})
	}
	for _, g := range badGIDs {
		tests = append(tests, test{"GID " + g.name, "GID", func(r *OpenRequest) { r.GIDs[1] = parseGID(t, g.json) }})
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := openRequest()
			tt.spoil(r)
			err := r.Validate()
			checkRefused(t, err, tt.says)
			if e := bad(err); e.Reason != ReasonBadHandshake {
				t.Errorf("reason %s, want %s", e.Reason, ReasonBadHandshake)
			}
		})
	}
}

func TestOpenRequestValidateAllows(t *testing.T) {
	for name, change := range map[string]func(r *OpenRequest){
		"the largest session":                     func(r *OpenRequest) { r.Endpoint = endpoint(MaxQPs) },
		"the largest message":                     func(r *OpenRequest) { r.MaxMsg, r.Endpoint.Stride = MaxMessage, 2*MaxMessage },
		"the last address":                        func(r *OpenRequest) { r.Endpoint.Addr = math.MaxUint64 - 4*r.Endpoint.Stride },
		"the last QPN and PSN":                    func(r *OpenRequest) { r.Endpoint.QPs[0] = QP{QPN: 1<<24 - 1, PSN: 1<<24 - 1} },
		"no GID, as on InfiniBand":                func(r *OpenRequest) { r.GIDs = nil },
		"no receives":                             func(r *OpenRequest) { r.RxDepth = 0 },
		"names in any script":                     func(r *OpenRequest) { r.Node = "узел-一" },
		"an op that only the responder can judge": func(r *OpenRequest) { r.Op = "teleport" },
		"a newer minor version":                   func(r *OpenRequest) { r.Minor = Minor + 2 },
		"the shortest lease":                      func(r *OpenRequest) { r.Lease = MinLease.Seconds() },
	} {
		t.Run(name, func(t *testing.T) {
			r := openRequest()
			change(r)
			if err := r.Validate(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestOpenReplyValidate(t *testing.T) {
	if req := openRequest(); openReply(req).Validate(req) != nil {
		t.Fatalf("a good reply was refused: %s", openReply(req).Validate(req))
	}
	type test struct {
		name, says string
		spoil      func(r *OpenReply)
	}
	tests := []test{
		{"negative minor", "minor", func(r *OpenReply) { r.Minor = -1 }},
		{"long instance", "instance", func(r *OpenReply) { r.Instance = strings.Repeat("x", MaxName+1) }},
		{"long host", "host", func(r *OpenReply) { r.Host = strings.Repeat("x", MaxName+1) }},
		{"long node", "node", func(r *OpenReply) { r.Node = strings.Repeat("x", MaxName+1) }},
		{"device that steers a terminal", "device", func(r *OpenReply) { r.Device = "\x1b]0;owned\a" }},
		{"no port", "port", func(r *OpenReply) { r.Port = 0 }},
		{"port 256", "port", func(r *OpenReply) { r.Port = 256 }},
		{"no lease", "lease", func(r *OpenReply) { r.Lease = 0 }},
		{"lease of a nanosecond", "lease", func(r *OpenReply) { r.Lease = 1e-9 }},
		{"lease of NaN", "lease", func(r *OpenReply) { r.Lease = math.NaN() }},
		{"MTU 9", "MTU 9", func(r *OpenReply) { r.MTU = 9 }},
		{"MTU above the initiator's port", "MTU 4096", func(r *OpenReply) { r.MTU = 4096 }},
		{"MTU above the responder's port", "MTU 1024", func(r *OpenReply) { r.Endpoint.ActiveMTU = 512 }},
		{"GID without the other", "one GID", func(r *OpenReply) { r.InitiatorGID = nil }},
		{"only the other's GID", "one GID", func(r *OpenReply) { r.GID = nil }},
		{"a GID that was not offered", "not offered", func(r *OpenReply) { g := gid("10.9.0.77"); r.InitiatorGID = &g }},
		{"a type that was not offered", "not offered", func(r *OpenReply) { r.InitiatorGID = &GID{Addr: r.InitiatorGID.Addr, Type: "RoCE v1"} }},
		{"one QP of two", "1 QPs", func(r *OpenReply) { r.Endpoint = endpoint(1) }},
		{"three QPs of two", "3 QPs", func(r *OpenReply) { r.Endpoint = endpoint(3) }},
	}
	for _, e := range badEndpoints {
		tests = append(tests, test{"endpoint: " + e.name, e.says, func(r *OpenReply) { e.spoil(&r.Endpoint) }})
	}
	for _, g := range badGIDs {
		tests = append(tests, test{"GID " + g.name, "GID", func(r *OpenReply) { g := parseGID(t, g.json); r.GID = &g }})
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			req := openRequest()
			req.Endpoint.ActiveMTU = 1024
			r := openReply(req)
			tt.spoil(r)
			checkRefused(t, r.Validate(req), tt.says)
		})
	}
	t.Run("another MTU than the one asked for", func(t *testing.T) {
		req := openRequest()
		req.MTU = 2048
		checkRefused(t, openReply(req).Validate(req), "2048")
	})
}

// What a peer names in a list that this version does not know is a matter of versions, not of garbage.
func TestUnknownValuesAreVersionSkew(t *testing.T) {
	r := openRequest()
	r.GIDs[0].Type = "RoCE v3"
	if e := bad(r.Validate()); e.Reason != ReasonVersionSkew || !strings.Contains(e.Detail, "RoCE v3") {
		t.Errorf("request: %v, want %s naming the type", e, ReasonVersionSkew)
	}
	req := openRequest()
	rep := openReply(req)
	rep.GID.Type = "RoCE v3"
	var e *Error
	if err := rep.Validate(req); !errors.As(err, &e) || e.Reason != ReasonVersionSkew {
		t.Errorf("reply: %v, want %s", err, ReasonVersionSkew)
	}
}

func TestFinishReplyValidate(t *testing.T) {
	value := func(v float64) *float64 { return &v }
	for _, tt := range []struct {
		name, says string
		rep        FinishReply
	}{
		{"negative rate", "rate", FinishReply{Rate: value(-1)}},
		{"NaN rate", "rate", FinishReply{Rate: value(math.NaN())}},
		{"rate beyond any device", "rate", FinishReply{Rate: value(1e300)}}, // times the size it would be infinite
		{"infinite minimum", "min_rate", FinishReply{MinRate: value(math.Inf(1))}},
		{"negative maximum", "max_rate", FinishReply{MaxRate: value(-0.1)}},
		{"minimum above the maximum", "min_rate", FinishReply{MinRate: value(2), MaxRate: value(1)}},
		{"negative CPU time", "cpu_seconds", FinishReply{CPUSeconds: value(-1)}},
		{"endless CPU time", "cpu_seconds", FinishReply{CPUSeconds: value(math.Inf(1))}},
		{"evidence of a port 256", "port", FinishReply{Evidence: &Evidence{Port: 256}}},
		{"evidence of a long device", "device", FinishReply{Evidence: &Evidence{Device: strings.Repeat("x", MaxName+1), Port: 1}}},
	} {
		t.Run(tt.name, func(t *testing.T) { checkRefused(t, tt.rep.Validate(), tt.says) })
	}
}

// Evidence is merged and shown: no map in it may be nil, and one odd name must not cost the rest.
// Seconds that come over the wire become durations, whose range is smaller than a number's.
func TestClocksAndWindows(t *testing.T) {
	for _, tt := range []struct {
		name string
		msg  interface{ Validate() error }
		ok   bool
	}{
		{"clock", &MarkReply{Clock: 8714.29}, true},
		{"negative clock", &MarkReply{Clock: -1}, false},
		{"clock of NaN", &MarkReply{Clock: math.NaN()}, false},
		{"clock beyond a duration", &MarkReply{Clock: 1e300}, false},
		{"no window", &FinishRequest{Sent: math.MaxUint64}, true},
		{"window", &FinishRequest{From: 8714.29, To: 8715}, true},
		{"window beyond a duration", &FinishRequest{From: 1, To: 1e300}, false},
		{"window far before the clock began", &FinishRequest{From: -1e300, To: 1}, false},
		{"window reversed", &FinishRequest{From: 5, To: 1}, true},
		{"window of NaN", &FinishRequest{From: math.NaN(), To: math.NaN()}, false},
		{"size", &RunRequest{Size: 1}, true},
		{"size 0", &RunRequest{}, false},
		{"size beyond a message", &RunRequest{Size: MaxMessage + 1}, false},
	} {
		if err := tt.msg.Validate(); (err == nil) != tt.ok {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

func TestFinishReplyTidiesEvidence(t *testing.T) {
	var r FinishReply
	body := `{"evidence": {"device": "rxe0", "port": 1, "counters": {"sent_pkts": 5, "a\u001b[2Jb": 1, "RcvHdrOvr,32": 2},
		"moved": {"rnr": ["x\u0000", "rcvd_rnr_err"], "timeout": null}, "unknown": ["\n", "duplicate_request"], "newer": true,
		"traffic": {"tx_bytes": 7, "\u001b": 1}, "cannot_tell": ["pause", "\u0007"], "conditions": [{"taint": "pcie-degraded", "check": "a\nb", "detail": "\u001b[2J"}]}}`
	if err := json.Unmarshal([]byte(body), &r); err != nil {
		t.Fatal(err)
	}
	if err := r.Validate(); err != nil {
		t.Fatal(err)
	}
	want := &Evidence{
		Device: "rxe0", Port: 1, Counters: map[string]uint64{"sent_pkts": 5, "RcvHdrOvr,32": 2}, Classes: map[string]uint64{},
		Moved: map[string][]string{"rnr": {"rcvd_rnr_err"}, "timeout": {}}, Unknown: []string{"duplicate_request"},
		Traffic: map[string]uint64{"tx_bytes": 7}, CannotTell: []string{"pause"}, Conditions: []Condition{{Taint: "pcie-degraded", Check: "a b", Detail: "?[2J"}},
	}
	if diff := cmp.Diff(want, r.Evidence); diff != "" {
		t.Errorf("evidence (-want +got):\n%s", diff)
	}
}

func TestPeersErrorIsFitToBeShown(t *testing.T) {
	for _, tt := range []struct {
		name     string
		in, want Error
	}{
		{name: "as it should be", in: Error{Reason: "busy", Detail: "port in use", RetryAfter: 0.3}, want: Error{Reason: "busy", Detail: "port in use", RetryAfter: 0.3}},
		{name: "terminal sequence", in: Error{Reason: "busy\x1b", Detail: "\x1b[2Jgone"}, want: Error{Reason: "busy?", Detail: "?[2Jgone"}},
		{name: "lines", in: Error{Reason: "busy", Detail: "a\r\n\tb\u2028c"}, want: Error{Reason: "busy", Detail: "a   b c"}},
		{name: "negative wait", in: Error{Reason: "busy", RetryAfter: -5}, want: Error{Reason: "busy"}},
		{name: "endless wait", in: Error{Reason: "busy", RetryAfter: 1e300}, want: Error{Reason: "busy"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.in.heard()
			if diff := cmp.Diff(tt.want, tt.in, cmpopts.IgnoreFields(Error{}, "FromPeer")); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if !tt.in.FromPeer {
				t.Error("not marked as the peer's")
			}
		})
	}
	e := Error{Detail: strings.Repeat("é", 1<<20)}
	e.heard()
	if len(e.Detail) > maxDetail || !utf8.ValidString(e.Detail) {
		t.Errorf("detail has %d bytes and is valid UTF-8: %t", len(e.Detail), utf8.ValidString(e.Detail))
	}
}

// Addresses and strides use all 64 bits, which a JSON number in most other languages does not carry.
func TestWideNumbersAreStrings(t *testing.T) {
	in := endpoint(1)
	in.Addr, in.Stride = math.MaxUint64-1, 1<<63+1
	text, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), `"addr":"18446744073709551614"`) {
		t.Errorf("address is no string in %s", text)
	}
	var out Endpoint
	if err := json.Unmarshal(text, &out); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(in, out); diff != "" {
		t.Errorf("(-sent +read):\n%s", diff)
	}
}

// The scope of a fault is for the end that looks for it to find: a peer can't put the blame anywhere.
func TestScopeStaysHome(t *testing.T) {
	text, err := json.Marshal(&Error{Reason: "busy", Scope: "local", Detail: "x"})
	if err != nil || strings.Contains(string(text), "scope") {
		t.Errorf("sent as %s, %v", text, err)
	}
	var e Error
	if err := json.Unmarshal([]byte(`{"reason":"busy","scope":"local","detail":"x"}`), &e); err != nil || e.Scope != "" {
		t.Errorf("read as %+v, %v", e, err)
	}
}
