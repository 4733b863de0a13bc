package daemon

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
)

// Names of peers are resolved this often for the guard, and each for at most so long.
const (
	guardRefresh = 30 * time.Second
	guardLookup  = 5 * time.Second
)

// peerGuard knows the addresses from which configured peers call. Without TLS only those are served.
type peerGuard struct {
	mu      sync.RWMutex
	hosts   []string // as configured
	addrs   map[netip.Addr]bool
	changed chan struct{}
}

func (g *peerGuard) allowed(addr string) bool {
	a, err := netip.ParseAddr(addr)
	if err != nil {
		return false
	}
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.addrs[a.Unmap().WithZone("")]
}

// set takes the peers of a configuration. Literal addresses count at once, names when run has resolved them.
func (g *peerGuard) set(cfg *config.Config) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.changed == nil {
		g.changed = make(chan struct{}, 1)
	}
	g.hosts, g.addrs = nil, map[netip.Addr]bool{}
	if !cfg.Control.Insecure {
		return
	}
	for _, p := range cfg.Peers.Static {
		host, _, err := net.SplitHostPort(p.Address)
		if err != nil {
			continue // the configuration was checked
		}
		if a, err := netip.ParseAddr(host); err == nil {
			g.addrs[a.Unmap().WithZone("")] = true
			continue
		}
		g.hosts = append(g.hosts, host)
	}
	select {
	case g.changed <- struct{}{}:
	default:
	}
}

// run resolves names until ctx ends. A name that can't be resolved now keeps the addresses it had.
func (g *peerGuard) run(ctx context.Context) error {
	t := time.NewTicker(guardRefresh)
	defer t.Stop()
	for {
		g.mu.RLock()
		hosts := g.hosts
		g.mu.RUnlock()
		for _, h := range hosts {
			lookup, cancel := context.WithTimeout(ctx, guardLookup)
			addrs, err := net.DefaultResolver.LookupNetIP(lookup, "ip", h)
			cancel()
			if err != nil {
				continue
			}
			g.mu.Lock()
			for _, a := range addrs {
				g.addrs[a.Unmap().WithZone("")] = true
			}
			g.mu.Unlock()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		case <-g.changed:
		}
	}
}
