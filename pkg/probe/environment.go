package probe

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
)

const (
	// environmentAge is how old a reading may be that goes with a result. A daemon reads once a minute, so that its probes find one.
	environmentAge  = 2 * time.Minute
	environmentTime = time.Second // for one port
)

// Environments holds what this host's ports measure under, as last read.
type Environments struct {
	fs *counters.FS

	mu     sync.Mutex
	latest map[environmentKey]reading
}

type environmentKey struct {
	device string
	port   int
}

type reading struct {
	*counters.Environment // nobody writes to it any more
	at                    time.Time
}

// NewEnvironments returns an Environments that has read nothing yet.
func NewEnvironments(fs *counters.FS) *Environments {
	return &Environments{fs: fs, latest: map[environmentKey]reading{}}
}

// Of returns the environment of a port: as last read, if that was not long ago, else as it is now. It is nil if it can't be
// read in time. Don't change it.
func (e *Environments) Of(ctx context.Context, p *LocalPort) *counters.Environment {
	if e == nil {
		return nil
	}
	e.mu.Lock()
	r := e.latest[environmentKey{p.Device, p.Port}]
	e.mu.Unlock()
	if r.Environment != nil && time.Since(r.at) < environmentAge {
		return r.Environment
	}
	ctx, cancel := context.WithTimeout(ctx, environmentTime)
	defer cancel()
	env, err := e.fs.Environment(ctx, p.Device, p.Port)
	if err != nil {
		return nil
	}
	e.note(p, env)
	return env
}

// Latest returns the environment of a port as last read, nil if it never was. Don't change it.
func (e *Environments) Latest(device string, port int) *counters.Environment {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.latest[environmentKey{device, port}].Environment
}

// EnvironmentChange is a port whose fingerprint is another than before.
type EnvironmentChange struct {
	Device  string
	Port    int
	Was, Is string   // fingerprints
	What    []string // in words
}

// Refresh reads the environment of every port anew, forgets ports that are gone, and returns what changed.
func (e *Environments) Refresh(ctx context.Context, ports []LocalPort) ([]EnvironmentChange, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*environmentTime)
	defer cancel()
	devices := make([]string, 0, len(ports)+1)
	for i := range ports {
		devices = append(devices, ports[i].Device)
	}
	envs, err := e.fs.Environments(ctx, counters.Filter{Include: append(devices, "")}) // none is not all
	if err != nil {
		return nil, err
	}
	var changes []EnvironmentChange
	seen := map[environmentKey]bool{}
	for i := range ports {
		p := &ports[i]
		seen[environmentKey{p.Device, p.Port}] = true
		n := slices.IndexFunc(envs, func(v *counters.Environment) bool { return v.Device == p.Device && v.Port == p.Port })
		var env *counters.Environment
		if n >= 0 {
			env = envs[n]
		} else if env, err = e.fs.Environment(ctx, p.Device, p.Port); err != nil { // sysfs does not show it
			return changes, err
		}
		if c := e.note(p, env); c != nil {
			changes = append(changes, *c)
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	maps.DeleteFunc(e.latest, func(k environmentKey, _ reading) bool { return !seen[k] })
	return changes, nil
}

// note makes a reading the latest one, and returns how it differs from the one before.
func (e *Environments) note(p *LocalPort, env *counters.Environment) *EnvironmentChange {
	if mtu := p.State.ActiveMTU; mtu > 0 { // verbs knows it on every link layer
		env.Link.ActiveMTU, env.Link.MaxMTU = &mtu, new(p.State.MaxMTU)
	}
	key := environmentKey{p.Device, p.Port}
	e.mu.Lock()
	defer e.mu.Unlock()
	before := e.latest[key].Environment
	env.Keep(before)
	e.latest[key] = reading{env, time.Now()}
	if before == nil {
		return nil
	}
	was, is := before.Fingerprint(), env.Fingerprint()
	if was.ID == is.ID {
		return nil
	}
	return &EnvironmentChange{Device: p.Device, Port: p.Port, Was: was.ID, Is: is.ID, What: was.Changes(is)}
}

// fingerprint returns that of a port's environment; nil if it is not known.
func (n *Node) fingerprint(ctx context.Context, p *LocalPort) *string {
	env := n.Environments.Of(ctx, p)
	if env == nil {
		return nil
	}
	return new(env.Fingerprint().ID)
}

// meter starts the port's Meter. To its evidence comes what else speaks against figures taken here.
func (n *Node) meter(ctx context.Context, p *LocalPort) (stop func(context.Context) *EndEvidence) {
	env := n.Environments.Of(ctx, p)
	throttled := n.Environments.throttles(ctx, env)
	counted := n.Meter.Start(ctx, p.Device, p.Port)
	return func(ctx context.Context) *EndEvidence {
		e := counted(ctx)
		if e != nil && env != nil {
			e.Conditions = union(e.Conditions, n.Environments.conditions(ctx, env, throttled))
		}
		return e
	}
}

// throttles is how often the CPUs near the port were held back since boot; nil if they don't tell.
func (e *Environments) throttles(ctx context.Context, env *counters.Environment) *uint64 {
	if env == nil {
		return nil
	}
	ctx, cancel := detached(ctx, environmentTime)
	defer cancel()
	v, ok := e.fs.Throttles(ctx, env)
	if !ok {
		return nil
	}
	return &v
}

// conditions finds what taints figures that were just taken: links below what they can do, and CPUs held back meanwhile.
func (e *Environments) conditions(ctx context.Context, env *counters.Environment, throttled *uint64) []control.Condition {
	var list []control.Condition
	add := func(t Taint, check counters.CheckName, detail string) {
		list = append(list, control.Condition{Taint: string(t), Check: string(check), Detail: detail})
	}
	for _, c := range env.Checks() {
		if c.Verdict != counters.CheckWarn {
			continue
		}
		detail := c.Found + ", expected " + c.Expected
		switch c.Name {
		case counters.CheckLinkRate:
			add(TaintLinkDegraded, c.Name, detail)
		case counters.CheckPCIeWidth:
			add(TaintPCIeDegraded, c.Name, detail)
		case counters.CheckPCIePath: // one that is slow by design is no degradation
			if b := env.PCI.Bottleneck; b.Degraded() {
				add(TaintPCIeDegraded, c.Name, detail)
			}
		case counters.CheckPCIeSpeed: // a link that idled may have been slow to save power: what counts is now
			ctx, cancel := detached(ctx, environmentTime)
			now, err := e.fs.Environment(ctx, env.Device, env.Port)
			cancel()
			if err != nil || now.PCI == nil || now.PCI.CurGTS == nil || now.PCI.MaxGTS == nil {
				continue
			}
			if *now.PCI.CurGTS < *now.PCI.MaxGTS {
				add(TaintPCIeDegraded, c.Name, fmt.Sprintf("%g GT/s, expected %g GT/s", *now.PCI.CurGTS, *now.PCI.MaxGTS))
			}
		}
	}
	if after := e.throttles(ctx, env); throttled != nil && after != nil && *after > *throttled {
		add(TaintCPUThrottled, counters.CheckThrottle, "CPUs near the device were slowed down for heat or power while the figures were taken")
	}
	return list
}
