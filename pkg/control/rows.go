package control

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"time"
)

// Sweeper runs this node's rows of sweeps and tells of them. Its errors are *Error where the asker may learn the reason.
type Sweeper interface {
	// Sweep starts a sweep, or does nothing if the one with that id is the last one already.
	Sweep(ctx context.Context, r *SweepRequest) error
	// Rows tells of the sweep of that id, or of the last results of all probes if of is [LastResults].
	Rows(ctx context.Context, of string) (*RowsReply, error)
}

// LastResults asks [Client.Rows] for what a node measured last, by whatever probe.
const LastResults = "last"

// Bounds of the call that fetches rows.
const (
	maxRowsReply = 64 << 20
	rowsTimeout  = 30 * time.Second
)

// StartSweep has the node at addr (host:port) run its rows of a sweep. Its error is always an *Error.
func (c *Client) StartSweep(ctx context.Context, addr string, r *SweepRequest) error {
	return (&Session{c: c, addr: addr, id: r.ID}).call(ctx, http.MethodPost, "/v1/sweeps", r, nil, true)
}

// Rows asks the node at addr (host:port) for the rows of a sweep by its id, or for [LastResults]. Its error is always an *Error.
func (c *Client) Rows(ctx context.Context, addr, of string) (*RowsReply, error) {
	s := &Session{c: c, addr: addr, limit: maxRowsReply, timeout: rowsTimeout}
	var rep RowsReply
	if err := s.call(ctx, http.MethodGet, "/v1/rows?of="+url.QueryEscape(of), nil, &rep, true); err != nil {
		return nil, err
	}
	if err := rep.Validate(); err != nil {
		return nil, s.invalid(err)
	}
	return &rep, nil
}

// Bounds of what nodes tell each other of their sweeps.
const (
	MaxRows   = 20000 // of one node and sweep: some 2,500 peers on 8 rails
	maxPoints = 64
	maxTaints = 32
)

// Row is what one session of a sweep came to: from a port of its node to a peer's. Figures are of the initiator; what was
// not measured is nil.
type Row struct {
	Src       string   `json:"src"` // configured names
	SrcDevice string   `json:"src_device"`
	SrcPort   int      `json:"src_port"`
	Dst       string   `json:"dst"`
	DstDevice string   `json:"dst_device"` // empty: the session did not get so far
	DstPort   int      `json:"dst_port"`
	Rail      string   `json:"rail"`
	Path      string   `json:"path"`
	LineRate  *float64 `json:"line_rate"` // of the initiator's port, bytes per second

	Probe string    `json:"probe"`
	Kind  string    `json:"kind"`
	Op    string    `json:"op"`
	Time  time.Time `json:"time"`

	Result string   `json:"result"` // ok, tainted, failed or skipped, as in docs/reasons.md
	Stage  string   `json:"stage"`
	Reason string   `json:"reason"`
	Scope  string   `json:"scope"`
	Detail string   `json:"detail"`
	Taints []string `json:"taints"`

	Points      []Point  `json:"points"`      // one for each message size
	Retransmits *float64 `json:"retransmits"` // packets either end sent again, per message
}

// Point is the figures of one message size.
type Point struct {
	Size        int      `json:"size"`                // bytes
	Bandwidth   *float64 `json:"bandwidth"`           // bytes per second
	P50         *float64 `json:"p50"`                 // seconds
	P99         *float64 `json:"p99"`                 // seconds
	MessageRate *float64 `json:"messages_per_second"` //
	Loss        *float64 `json:"loss_ratio"`
}

// Validate checks every field's range. It makes no nil slices, so that a row has the same JSON everywhere.
func (r *Row) Validate() error {
	var c checker
	for what, s := range map[string]string{
		"src": r.Src, "src_device": r.SrcDevice, "dst": r.Dst, "dst_device": r.DstDevice, "rail": r.Rail, "path": r.Path,
		"probe": r.Probe, "kind": r.Kind, "op": r.Op, "stage": r.Stage, "reason": r.Reason, "scope": r.Scope,
	} {
		c.name(what, s)
	}
	c.that(r.Src != "" && r.Dst != "", "a row without src or dst")
	c.known("result", r.Result, "ok", "tainted", "failed", "skipped")
	c.within("src_port", r.SrcPort, 0, 255)
	c.within("dst_port", r.DstPort, 0, 255)
	c.that(len(r.Taints) <= maxTaints, "%d taints, want at most %d", len(r.Taints), maxTaints)
	for _, t := range r.Taints {
		c.name("taint", t)
	}
	figure := func(what string, v *float64, hi float64) {
		c.that(v == nil || *v >= 0 && *v <= hi, "%s is out of range 0 to %g", what, hi) // NaN is not >= 0
	}
	figure("line_rate", r.LineRate, maxFigure)
	figure("retransmits", r.Retransmits, maxFigure)
	c.that(len(r.Points) <= maxPoints, "%d points, want at most %d", len(r.Points), maxPoints)
	for _, p := range r.Points {
		c.within("size", p.Size, 0, MaxMessage)
		figure("bandwidth", p.Bandwidth, maxFigure)
		figure("messages_per_second", p.MessageRate, maxFigure)
		figure("p50", p.P50, MaxSession.Seconds())
		figure("p99", p.P99, MaxSession.Seconds())
		figure("loss_ratio", p.Loss, 1)
	}
	r.Detail = printable(r.Detail, maxDetail)
	r.Taints, r.Points = append([]string{}, r.Taints...), append([]Point{}, r.Points...)
	return c.err
}

const maxFigure = 1e15 // bytes or messages per second

// SweepRequest asks a node to run its rows of a sweep. Asking again with the same id changes nothing.
type SweepRequest struct {
	ID       string   `json:"id"`               // of this sweep, the same for all nodes
	Probes   []string `json:"probes"`           // configured names; none: every probe that is a sweep
	Peers    []string `json:"peers,omitempty"`  // only these; none: all
	Deadline float64  `json:"deadline"`         // seconds
	Rail     string   `json:"rail,omitempty"`   // only from ports of this rail
	Repeat   int      `json:"repeat,omitempty"` // measure each pair so often; 0: once
}

// maxRepeat bounds SweepRequest.Repeat.
const maxRepeat = 8

// Validate checks every field's range.
func (r *SweepRequest) Validate() error {
	var c checker
	c.name("id", r.ID)
	c.that(r.ID != "", "a sweep without id")
	c.name("rail", r.Rail)
	c.that(len(r.Probes) <= 256 && len(r.Peers) <= MaxRows, "%d probes and %d peers are too many", len(r.Probes), len(r.Peers))
	for _, n := range append(append([]string{}, r.Probes...), r.Peers...) {
		c.name("name", n)
	}
	c.seconds("deadline", r.Deadline, time.Second)
	c.within("repeat", r.Repeat, 0, maxRepeat)
	return c.err
}

// RowsReply is how far a node is with its rows of a sweep.
type RowsReply struct {
	Minor    int               `json:"minor"`
	Node     string            `json:"node"`
	Labels   map[string]string `json:"labels"`
	ID       string            `json:"id"` // of the sweep; empty: this node has run none since it started
	Running  bool              `json:"running"`
	Planned  int               `json:"planned"`
	Done     int               `json:"done"`
	Started  time.Time         `json:"started"`
	Finished time.Time         `json:"finished"` // zero while it runs
	Rows     []Row             `json:"rows"`     // those that are done; left out while it runs
}

// Validate checks every field's range; all rows must be the node's own.
func (r *RowsReply) Validate() error {
	var c checker
	c.within("minor", r.Minor, 0, math.MaxUint16)
	c.name("node", r.Node)
	c.name("id", r.ID)
	c.within("planned", r.Planned, 0, MaxRows)
	c.within("done", r.Done, 0, MaxRows)
	c.that(len(r.Rows) <= MaxRows, "%d rows, want at most %d", len(r.Rows), MaxRows)
	c.that(len(r.Labels) <= maxLabels, "%d labels, want at most %d", len(r.Labels), maxLabels)
	for k, v := range r.Labels {
		c.name("label", k)
		c.name("label", v)
	}
	if c.err != nil {
		return c.err
	}
	for i := range r.Rows {
		if err := r.Rows[i].Validate(); err != nil {
			return fmt.Errorf("row %d: %w", i, err)
		}
		if r.Rows[i].Src != r.Node {
			return fmt.Errorf("row %d is of %s, not of %s, which sent it", i, r.Rows[i].Src, r.Node)
		}
	}
	return nil
}

const maxLabels = 64
