package daemon

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/guard"
	"github.com/rdmabenchd/rdmabenchd/pkg/peers"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/sweep"
)

// leftAlone says why this node wishes to be left alone, and leaves others alone; empty: it doesn't.
func (d *Daemon) leftAlone() string {
	switch p := d.guards.Paused(); {
	case p != nil && p.Until != nil:
		return "paused until " + p.Until.Format("2006-01-02 15:04:05 MST")
	case p != nil:
		return "paused"
	case peers.IsLameDuck(d.config().Node.Labels):
		return "a lame duck"
	}
	return ""
}

// defaultAge is how old what was measured of a port may be to stand for it.
const defaultAge = 4 * time.Hour

// maintenance serves the pause switch, leases and verdicts. Without lifecycle the switch is refused.
func (d *Daemon) maintenance(lifecycle bool) http.Handler {
	mux := http.NewServeMux()
	// A page of another origin must not make a browser stop a node.
	protect := func(pattern string, h http.HandlerFunc) {
		mux.Handle(pattern, http.NewCrossOriginProtection().Handler(h))
	}
	for _, method := range []string{"POST ", "PUT "} {
		protect(method+"/-/pause", func(w http.ResponseWriter, r *http.Request) { d.servePause(w, r, lifecycle) })
		protect(method+"/-/resume", func(w http.ResponseWriter, r *http.Request) {
			if !lifecycle {
				d.refuse(w)
				return
			}
			d.guards.Resume()
			say(w, http.StatusOK, "resumed")
		})
	}
	mux.HandleFunc("GET /api/v1/lease", func(w http.ResponseWriter, _ *http.Request) {
		reply(w, http.StatusOK, leaseReply{Leases: d.guards.Leases(), Running: d.guards.Running()})
	})
	protect("POST /api/v1/lease", d.serveLease)
	protect("DELETE /api/v1/lease", func(w http.ResponseWriter, r *http.Request) {
		if !d.guards.Release(r.URL.Query().Get("holder")) {
			fail(w, http.StatusNotFound, fmt.Errorf("no lease of holder %q: it is over, or never was", r.URL.Query().Get("holder")))
			return
		}
		reply(w, http.StatusOK, leaseReply{Leases: d.guards.Leases(), Running: d.guards.Running()})
	})
	mux.HandleFunc("GET /api/v1/verdict", func(w http.ResponseWriter, r *http.Request) {
		age := defaultAge
		if s := r.URL.Query().Get("max_age"); s != "" {
			var err error
			if age, err = config.ParseDuration(s); err != nil || age <= 0 {
				fail(w, http.StatusBadRequest, fmt.Errorf("max_age=%q: want a time above 0, for instance 4h", s))
				return
			}
		}
		reply(w, http.StatusOK, d.verdict(time.Now(), age))
	})
	return mux
}

func (d *Daemon) refuse(w http.ResponseWriter) {
	say(w, http.StatusForbidden, "Lifecycle API is not enabled: start the daemon with --web.enable-lifecycle.")
}

func (d *Daemon) servePause(w http.ResponseWriter, r *http.Request, lifecycle bool) {
	if !lifecycle {
		d.refuse(w)
		return
	}
	var length time.Duration
	if s := r.URL.Query().Get("for"); s != "" {
		var err error
		if length, err = config.ParseDuration(s); err != nil || length <= 0 {
			say(w, http.StatusBadRequest, fmt.Sprintf("for=%q: want a time above 0, for instance 2h, or none for a pause that /-/resume ends", s))
			return
		}
	}
	p, err := d.guards.Pause(length)
	switch {
	case err != nil:
		say(w, http.StatusBadRequest, err.Error())
	case p.Until != nil:
		say(w, http.StatusOK, "paused until "+p.Until.Format(time.RFC3339))
	default:
		say(w, http.StatusOK, "paused until resumed")
	}
}

// leaseRequest is the body of a POST to /api/v1/lease.
type leaseRequest struct {
	Holder   string `json:"holder"`
	Duration string `json:"duration"` // such as 2h
}

// leaseReply is the answer.
type leaseReply struct {
	Lease   *guard.Lease  `json:"lease,omitempty"` // that was asked for
	Leases  []guard.Lease `json:"leases"`          // all that hold
	Running int           `json:"running"`         // heavy probes still under way: a lease begins none, and ends none
}

const maxLeaseBody = 4 << 10

func (d *Daemon) serveLease(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxLeaseBody))
	if err != nil {
		fail(w, http.StatusRequestEntityTooLarge, err)
		return
	}
	var req leaseRequest
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&req); err != nil {
		fail(w, http.StatusBadRequest, fmt.Errorf(`want {"holder": "job-1234", "duration": "2h"}: %w`, err))
		return
	}
	length, err := config.ParseDuration(req.Duration)
	if err != nil {
		fail(w, http.StatusBadRequest, fmt.Errorf("duration: %w", err))
		return
	}
	l, err := d.guards.Hold(req.Holder, length)
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	reply(w, http.StatusOK, leaseReply{Lease: &l, Leases: d.guards.Leases(), Running: d.guards.Running()})
}

// Verdict says whether this node's ports were found good of late.
type Verdict struct {
	Node     string        `json:"node"`
	Verified bool          `json:"verified"` // all ports were
	MaxAge   float64       `json:"max_age"`  // seconds
	Reason   string        `json:"reason"`   // why not; empty: verified
	Ports    []PortVerdict `json:"ports"`
}

// PortVerdict is that of one port.
type PortVerdict struct {
	Device   string   `json:"device"`
	Port     int      `json:"port"`
	Verified bool     `json:"verified"`
	Age      *float64 `json:"age"` // seconds since the newest good result; null: there is none
	Reason   string   `json:"reason"`

	unmeasured bool // by this process within the time
}

// verdict judges the ports by the last heavy probes from each, and by the last sweep.
func (d *Daemon) verdict(now time.Time, age time.Duration) Verdict {
	v := Verdict{Node: d.config().Node.Name, MaxAge: age.Seconds(), Ports: []PortVerdict{}}
	ports, err := d.node.Ports()
	switch {
	case err != nil:
		v.Reason = err.Error()
	case len(ports) == 0:
		v.Reason = "this node has no RDMA port to use"
	}
	results := d.exporter.Last()
	for _, p := range ports {
		one := judge(p.Device, p.Port, results, now, age)
		if p.Reason != "" {
			one.Verified, one.Reason, one.unmeasured = false, p.Detail, false
		}
		v.Ports = append(v.Ports, one)
	}
	d.bySweep(&v, now, age)
	v.Verified = v.Reason == ""
	for _, p := range v.Ports {
		if !p.Verified && v.Reason == "" {
			v.Verified, v.Reason = false, fmt.Sprintf("%s port %d: %s", p.Device, p.Port, p.Reason)
		}
	}
	return v
}

// judge looks at what was measured from a port: a heavy probe must have gone well, and not fewer than have failed.
func judge(device string, port int, results []*probe.Result, now time.Time, age time.Duration) PortVerdict {
	v := PortVerdict{Device: device, Port: port}
	good, bad, old := 0, 0, false
	for _, r := range results {
		if r.Device != device || r.Port != port || r.Kind == probe.Latency || r.Kind == probe.Ping || r.Outcome == probe.Skipped {
			continue
		}
		since := now.Sub(r.Time)
		switch {
		case since > age || since < -time.Minute: // or from a time that the clock has not reached
			old = true
		case r.Outcome == probe.OK:
			good++
			if s := max(0, since.Seconds()); v.Age == nil || s < *v.Age {
				v.Age = &s
			}
		case r.Outcome == probe.Failed && r.Scope != nil && *r.Scope == probe.ScopePeer: // says nothing of this port
		default:
			bad++
		}
	}
	v.unmeasured = good+bad == 0
	switch {
	case good == 0 && bad > 0:
		v.Reason = fmt.Sprintf("none of %d heavy probes within %s went well", bad, age)
	case good == 0 && old:
		v.Reason = fmt.Sprintf("no heavy probe within %s", age)
	case good == 0:
		v.Reason = "no heavy probe yet"
	case bad > good:
		v.Reason = fmt.Sprintf("%d of %d heavy probes within %s failed or were tainted", bad, good+bad, age)
	default:
		v.Verified = true
	}
	return v
}

// bySweep takes in what the newest report on this node within the time says of its ports.
func (d *Daemon) bySweep(v *Verdict, now time.Time, age time.Duration) {
	for _, e := range d.store.List() {
		if now.Sub(e.Started) > age {
			return
		}
		r, err := d.store.Get(e.ID)
		if err != nil {
			continue // the next one may be readable
		}
		i := slices.IndexFunc(r.Nodes, func(n sweep.NodeReport) bool { return n.Name == v.Node })
		if i < 0 {
			continue
		}
		for _, nic := range r.Nodes[i].NICs {
			for k := range v.Ports {
				p := &v.Ports[k]
				switch {
				case p.Device != nic.Device || p.Port != nic.Port:
				case nic.Verdict == sweep.Unhealthy:
					p.Verified, p.Reason = false, "unhealthy in sweep "+e.ID
				case nic.Verdict == sweep.Healthy && p.unmeasured: // before a restart, or by the command line
					p.Verified, p.Reason, p.Age = true, "", new(max(0, now.Sub(e.Started).Seconds()))
				}
			}
		}
		if r.Nodes[i].Verdict == sweep.Unhealthy && v.Reason == "" {
			v.Reason = "unhealthy in sweep " + e.ID
		}
		return
	}
}

func say(w http.ResponseWriter, status int, line string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, line+"\n") // the client has gone
}

func fail(w http.ResponseWriter, status int, err error) {
	reply(w, status, map[string]string{"error": err.Error()})
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the client has gone
}
