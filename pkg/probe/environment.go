package probe

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

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
