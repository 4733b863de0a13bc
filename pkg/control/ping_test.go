package control

import (
	"encoding/json"
	"net"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func pingRequest() *PingRequest {
	return &PingRequest{
		Minor: Minor, Instance: "i1", Host: "h1", Source: Source{Device: "mlx5_0", Port: 1}, Node: "node1", Rail: "0", Lease: 60,
		TrafficClass: 104, FlowLabel: 7, GIDs: []GID{gid("10.9.0.1")},
		End: PingEndpoint{LinkLayer: "Ethernet", QPN: 0x112233, QKey: 0x7fffffff, ActiveMTU: 4096},
	}
}

func pingReply() *PingReply {
	own, theirs := gid("10.9.0.2"), gid("10.9.0.1")
	return &PingReply{
		Minor: Minor, Instance: "i2", Host: "h2", Node: "node2", Device: "mlx5_1", Port: 1, Lease: 60, GID: &own, InitiatorGID: &theirs,
		End: PingEndpoint{LinkLayer: "Ethernet", QPN: 0x445566, QKey: 1, ActiveMTU: 1024}, Nonce: 1<<63 | 5, Rate: 20000,
	}
}

func pingBody(t *testing.T) string {
	t.Helper()
	b, err := json.Marshal(pingRequest())
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestPingIsAnnounced(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	start(t, server(&fakeService{}), l)
	c := NewClient()
	defer c.CloseIdle()
	got, err := c.Ping(t.Context(), l.Addr().String(), pingRequest())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(pingReply(), got, cmp.Comparer(func(a, b GID) bool { return a == b })); diff != "" {
		t.Errorf("reply (-want +got):\n%s", diff)
	}
}

func TestPingValidate(t *testing.T) {
	if err := pingRequest().Validate(); err != nil {
		t.Error(err)
	}
	if err := pingReply().Validate(pingRequest()); err != nil {
		t.Error(err)
	}
	for name, spoil := range map[string]func(*PingRequest){
		"no instance":            func(r *PingRequest) { r.Instance = "" },
		"no source":              func(r *PingRequest) { r.Source = Source{} },
		"a name to draw on":      func(r *PingRequest) { r.Node = "\x1b[2J" },
		"no lease":               func(r *PingRequest) { r.Lease = 0 },
		"a lease for ever":       func(r *PingRequest) { r.Lease = 1e9 },
		"the QP of management":   func(r *PingRequest) { r.End.QPN = 1 },
		"a QPN of 25 bits":       func(r *PingRequest) { r.End.QPN = 1 << 24 },
		"no MTU":                 func(r *PingRequest) { r.End.ActiveMTU = 0 },
		"flow label of 21 bits":  func(r *PingRequest) { r.FlowLabel = 1 << 20 },
		"too many GIDs":          func(r *PingRequest) { r.GIDs = make([]GID, MaxGIDs+1) },
		"a GID to all":           func(r *PingRequest) { r.GIDs = []GID{gid("224.0.0.1")} },
		"a negative minor":       func(r *PingRequest) { r.Minor = -1 },
		"a service level too hi": func(r *PingRequest) { r.ServiceLevel = 16 },
	} {
		r := pingRequest()
		spoil(r)
		if r.Validate() == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	for name, spoil := range map[string]func(*PingReply){
		"no nonce":         func(r *PingReply) { r.Nonce = 0 },
		"no lease":         func(r *PingReply) { r.Lease = 0 },
		"no rate":          func(r *PingReply) { r.Rate = 0 },
		"no port":          func(r *PingReply) { r.Port = 0 },
		"a GID not known":  func(r *PingReply) { g := gid("10.9.0.77"); r.InitiatorGID = &g },
		"half a GID pair":  func(r *PingReply) { r.GID = nil },
		"the broadcast QP": func(r *PingReply) { r.End.QPN = 0 },
	} {
		r := pingReply()
		spoil(r)
		if r.Validate(pingRequest()) == nil {
			t.Errorf("reply with %s: accepted", name)
		}
	}
}
