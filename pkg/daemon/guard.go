package daemon

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/peers"
)

// Names of peers are resolved for the guard: again after so long, each for at most so long, so many at a time. Those that can't be
// resolved hold up no others for long.
const (
	guardRefresh = 30 * time.Second
	guardLookup  = 5 * time.Second
	guardLookups = 8
)

// peerGuard knows the addresses from which peers call. Without TLS only those are served.
type peerGuard struct {
	mu      sync.RWMutex
	literal map[netip.Addr]bool
	names   map[string][]netip.Addr // as last resolved; nil: not yet
	addrs   map[netip.Addr]bool     // both
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

// set takes the peers of a view, whatever their state. Literal addresses count at once, names when run has resolved them.
func (g *peerGuard) set(cfg *config.Config, view peers.View) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.changed == nil {
		g.changed = make(chan struct{}, 1)
	}
	was := g.names
	g.literal, g.names = map[netip.Addr]bool{}, map[string][]netip.Addr{}
	if cfg.Control.Insecure {
		for _, m := range view.Members {
			host, _, err := net.SplitHostPort(m.Address)
			if err != nil {
				continue // addresses of members were checked
			}
			if a, err := netip.ParseAddr(host); err == nil {
				g.literal[a.Unmap().WithZone("")] = true
			} else {
				g.names[host] = was[host]
			}
		}
	}
	g.sum()
	select {
	case g.changed <- struct{}{}:
	default:
	}
}

// sum puts together who is allowed. The caller holds mu.
func (g *peerGuard) sum() {
	g.addrs = make(map[netip.Addr]bool, len(g.literal)+len(g.names))
	for a := range g.literal {
		g.addrs[a] = true
	}
	for _, addrs := range g.names {
		for _, a := range addrs {
			g.addrs[a] = true
		}
	}
}

// run resolves names until ctx ends. A name that can't be resolved now keeps the addresses it had.
func (g *peerGuard) run(ctx context.Context) error {
	t := time.NewTicker(guardRefresh)
	defer t.Stop()
	every := true // or only those that never were
	for {
		g.resolve(ctx, every)
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
			every = true
		case <-g.changed:
			every = false
		}
	}
}

func (g *peerGuard) resolve(ctx context.Context, every bool) {
	g.mu.RLock()
	var hosts []string
	for h, addrs := range g.names {
		if every || addrs == nil {
			hosts = append(hosts, h)
		}
	}
	g.mu.RUnlock()
	var all errgroup.Group
	all.SetLimit(guardLookups)
	for _, h := range hosts {
		if ctx.Err() != nil {
			break
		}
		all.Go(func() error {
			lookup, cancel := context.WithTimeout(ctx, guardLookup)
			defer cancel()
			found, err := net.DefaultResolver.LookupNetIP(lookup, "ip", h)
			if err != nil {
				return nil // asked again
			}
			addrs := make([]netip.Addr, 0, len(found))
			for _, a := range found {
				addrs = append(addrs, a.Unmap().WithZone(""))
			}
			g.mu.Lock()
			defer g.mu.Unlock()
			if _, wanted := g.names[h]; !wanted {
				return nil
			}
			for _, a := range addrs {
				g.addrs[a] = true // at once; what is no longer true goes below
			}
			g.names[h] = addrs
			return nil
		})
	}
	_ = all.Wait() // none returns an error
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sum()
}
