// Package config reads rdmabenchd's YAML configuration. It is strict: whatever is misspelt, out of
// range, contradictory or of a later version is an error with file, line and column, and all errors
// of a file are told at once. A configuration that this package returns can run.
//
// What goes beyond plain YAML:
//
//   - ${VAR} in a string value is replaced by that environment variable, which must be set. The
//     value is taken as it is; nothing in it is expanded or parsed as YAML again. $${ stands for ${,
//     any other $ for itself. Keys are not expanded.
//   - Text stays text: a peer may be called no, 007 or 1e3 without quotes. Numbers are plain
//     decimal. Booleans are true, false, yes, no, on or off, quoted or not.
//   - Anchors, aliases and merge keys (<<) work; top-level keys that begin with x- are ignored, to
//     hold anchors. Tags (!!str) and more than one document are refused.
//   - A key without a value counts as left out.
//
// Units: see [ParseDuration] and [ParseSize].
package config

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path"
	"strconv"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/guard"
	"github.com/rdmabenchd/rdmabenchd/pkg/peers"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule/pairing"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// DefaultPort is the TCP port of the control channel.
const DefaultPort = peers.DefaultPort

// maxFile bounds a configuration file, in bytes: some 50,000 static peers.
const maxFile = 4 << 20

// Config is a whole configuration, checked and with defaults filled in. Treat it as immutable.
type Config struct {
	Node    Node
	Devices Devices
	Control Control
	Limits  Limits
	Guards  Guards
	Taints  probe.Tolerances // what a result may show without being tainted
	Peers   Peers
	Probes  []Probe // in the order of the file; none means that this node only responds
}

// Node is how this host is called in metrics and by its peers.
type Node struct {
	Name   string            // default: the hostname
	Labels map[string]string // such as rack
}

// Devices says which RDMA devices are used.
type Devices struct {
	Include  []string // globs as in [path.Match]; default: all
	Exclude  []string // likewise; wins over Include
	GIDIndex int      // pinned GID; -1: chosen by content

	// Rails are those of ports by "device" (of its port 1) or "device/port"; nil: by the order of the devices.
	Rails map[string]int
}

// Use reports whether the device may be used.
func (d Devices) Use(device string) bool {
	return matchAny(d.Include, device) && !matchAny(d.Exclude, device)
}

// Rail returns the rail of a port, whose place among all ports of the node is auto. It is empty for one that a list of rails
// leaves out.
func (d Devices) Rail(device string, port, auto int) string {
	if d.Rails == nil {
		return strconv.Itoa(auto)
	}
	rail, ok := d.Rails[device+"/"+strconv.Itoa(port)]
	if !ok && port == 1 {
		rail, ok = d.Rails[device]
	}
	if !ok {
		return ""
	}
	return strconv.Itoa(rail)
}

func matchAny(globs []string, name string) bool {
	for _, g := range globs {
		if ok, _ := path.Match(g, name); ok { // a bad pattern was refused on reading
			return true
		}
	}
	return false
}

// Control is this node's end of the control channel.
type Control struct {
	// Listen is a host:port for [net.Listen]. The default is every address if Insecure, else loopback.
	Listen    string
	Advertise string // host:port by which peers reach this node; empty: as they find it
	Insecure  bool   // serve and call named peers without TLS
}

// Limits bound what peers can make this node do.
type Limits struct {
	Sessions int           // at a time
	Memory   int64         // registered for sessions at a time, bytes
	Message  int           // largest message, bytes; also of this node's own probes
	Lease    time.Duration // a session that is not renewed for so long is freed
}

// Guards say when heavy probes leave this node alone.
type Guards = guard.Settings

// Peers say where the other nodes are found. Nothing is resolved or read here. What is found may hold the node itself; whoever
// probes skips it.
type Peers = peers.Config

// Peer is a node to probe.
type Peer = peers.Peer

// Probe is something to measure against peers again and again.
type Probe struct {
	Spec     probe.Spec // with Name and Interval; other zero fields mean the defaults
	Schedule schedule.Schedule
	Jitter   time.Duration // default: a tenth of the interval, at most 30 s; none for a tournament
	Pairing  Pairing
}

const (
	defaultSessions = 64
	defaultMemory   = 1 << 30
	defaultMessage  = 64 << 20
	defaultLease    = time.Minute
	maxJitter       = 30 * time.Second // of the default
)

// defaultProbes stand in for a file that says nothing of probes: a latency that costs nothing and
// a bandwidth that takes the link for some milliseconds an hour. configs/minimal.yaml shows them.
func defaultProbes() []Probe {
	rtt := Probe{
		Spec:     probe.Spec{Name: "rtt", Kind: probe.Latency, Transport: verbs.RC, Op: verbs.Write, Sizes: []int{8}},
		Schedule: mustSchedule("*/5 * * * *"),
	}
	bandwidth := Probe{
		Spec:     probe.Spec{Name: "bandwidth", Kind: probe.Bandwidth, Transport: verbs.RC, Op: verbs.Write, Sizes: []int{64 << 10}},
		Schedule: mustSchedule("@hourly"),
	}
	probes := []Probe{rtt, bandwidth}
	for i := range probes {
		probes[i].Pairing = Pairing{Rule: pairing.Rule{Strategy: pairing.All}, Rails: SameRails}
		probes[i].timing()
	}
	return probes
}

func mustSchedule(spec string) schedule.Schedule {
	s, err := schedule.Parse(spec)
	if err != nil {
		panic(err) // a constant of this file
	}
	return s
}

// timing fills in what follows from the schedule.
func (p *Probe) timing() {
	p.Spec.Interval = schedule.Interval(p.Schedule)
	p.Jitter = min(p.Spec.Interval/10, maxJitter)
}

// Load reads and checks the file at name. The error is of type [Errors] if the file could be read.
func Load(name string) (*Config, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("read config: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("read config: %w", err)
	}
	return Parse(name, data)
}

// Parse checks a configuration; name stands for it in errors. Environment variables and the
// hostname are this process's. The error is of type [Errors].
func Parse(name string, data []byte) (*Config, error) {
	return parse(name, data, environment{os.LookupEnv, os.Hostname})
}

// environment is what a configuration takes from the process.
type environment struct {
	lookup   func(string) (string, bool)
	hostname func() (string, error)
}

// Hash identifies the effective configuration: two files that only differ in comments, order of
// keys or spelling have the same.
func (c *Config) Hash() string {
	sum := sha256.Sum256(c.Effective())
	return hex.EncodeToString(sum[:])
}
