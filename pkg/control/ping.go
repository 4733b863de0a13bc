package control

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"slices"
)

// PingRequest announces an initiator's UD queue pair to a responder, so that its pings are answered while the lease lasts. The
// same request again renews it. No port is taken by it, and nothing is to be torn down.
type PingRequest struct {
	Minor    int    `json:"minor"`
	Instance string `json:"instance"`
	Host     string `json:"host"`
	Source   Source `json:"source"`
	Node     string `json:"node"`
	Rail     string `json:"rail,omitempty"`
	Device   string `json:"device,omitempty"` // the responder's, if the initiator insists
	Port     int    `json:"port,omitempty"`

	Lease float64 `json:"lease"` // seconds; wanted

	ServiceLevel int `json:"service_level,omitempty"`
	TrafficClass int `json:"traffic_class,omitempty"`
	FlowLabel    int `json:"flow_label,omitempty"`

	GIDs []GID        `json:"gids"` // usable ones, best first
	End  PingEndpoint `json:"end"`
}

// PingEndpoint is one end's UD queue pair.
type PingEndpoint struct {
	LID       uint16 `json:"lid"`
	LinkLayer string `json:"link_layer"`
	QPN       uint32 `json:"qpn"` // 24 bit
	QKey      uint32 `json:"qkey"`
	ActiveMTU int    `json:"active_mtu"` // bytes; the largest payload
}

// PingReply grants a PingRequest.
type PingReply struct {
	Minor        int          `json:"minor"`
	Instance     string       `json:"instance"`
	Host         string       `json:"host"`
	Node         string       `json:"node"`
	Device       string       `json:"device"`
	Port         int          `json:"port"`
	Lease        float64      `json:"lease"` // seconds; granted
	GID          *GID         `json:"gid,omitempty"`
	InitiatorGID *GID         `json:"initiator_gid,omitempty"`
	End          PingEndpoint `json:"end"`
	Nonce        uint64       `json:"nonce,string"` // pings must carry it; never 0
	Rate         float64      `json:"rate"`         // pings per second that are answered
}

func (c *checker) pingEndpoint(e *PingEndpoint) {
	c.that(e.QPN < 1<<24 && e.QPN > 1, "QPN %d is out of range", e.QPN)
	c.that(slices.Contains(mtus, e.ActiveMTU), "active MTU %d is none of %v", e.ActiveMTU, mtus)
	c.name("link layer", e.LinkLayer)
}

// Validate checks every field's range.
func (r *PingRequest) Validate() error {
	var c checker
	c.within("minor", r.Minor, 0, math.MaxUint16)
	c.name("instance", r.Instance)
	c.name("host", r.Host)
	c.name("node", r.Node)
	c.name("rail", r.Rail)
	c.name("device", r.Device)
	c.name("source device", r.Source.Device)
	c.that(r.Instance != "" && r.Source.Device != "", "instance %q, source device %q: one is missing", r.Instance, r.Source.Device)
	c.within("source port", r.Source.Port, 0, 255)
	c.within("port", r.Port, 0, 255)
	c.seconds("lease", r.Lease, MinLease)
	c.within("service_level", r.ServiceLevel, 0, 15)
	c.within("traffic_class", r.TrafficClass, 0, 255)
	c.within("flow_label", r.FlowLabel, 0, 1<<20-1)
	c.offered(r.GIDs)
	c.pingEndpoint(&r.End)
	return c.err
}

// Validate checks every field's range against the request it answers.
func (r *PingReply) Validate(req *PingRequest) error {
	var c checker
	c.within("minor", r.Minor, 0, math.MaxUint16)
	c.name("instance", r.Instance)
	c.name("host", r.Host)
	c.name("node", r.Node)
	c.name("device", r.Device)
	c.within("port", r.Port, 1, 255)
	c.seconds("lease", r.Lease, MinLease)
	c.chosen(r.GID, r.InitiatorGID, req.GIDs)
	c.pingEndpoint(&r.End)
	c.that(r.Nonce != 0, "no nonce")
	c.that(r.Rate > 0 && r.Rate <= 1e9, "rate is out of range")
	return c.err
}

// Ping announces this end's UD queue pair to the responder at addr. Its error is always an *Error.
func (c *Client) Ping(ctx context.Context, addr string, req *PingRequest) (*PingReply, error) {
	s := &Session{c: c, addr: addr, id: "ping"}
	var rep PingReply
	if err := s.call(ctx, http.MethodPost, pings, req, &rep, true); err != nil {
		return nil, err
	}
	if err := rep.Validate(req); err != nil {
		return nil, s.invalid(err)
	}
	return &rep, nil
}

const pings = "/v1/ping"

// servePing is the handler's part of it.
func (s *Server) servePing(ctx context.Context, _ string, body []byte) (any, error) {
	var r PingRequest
	if err := decode(body, &r); err != nil {
		return nil, err
	}
	if err := r.Validate(); err != nil {
		return nil, bad(fmt.Errorf("ping: %w", err))
	}
	return s.Service.Ping(ctx, &r)
}
