package daemon

import (
	"context"
	"log/slog"
	"net"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/sweeper"
)

// newSweeps makes what runs sweeps, reports on them and shows the reports.
func (d *Daemon) newSweeps() {
	store := &sweeper.Store{Dir: d.o.StoragePath}
	d.store = store
	d.sweeps = &sweeper.Runner{
		Config: d.config, Log: d.log, Results: d.exporter.Last,
		Peers: func() []config.Peer { return d.peers.View().Active() },
		Ports: func() []sweeper.Port { return SweepPorts(d.node, d.log) },
		Probe: func(ctx context.Context, s probe.Spec, to probe.Target, device string, port int) *probe.Result {
			return d.probe(ctx, s, to, device, port)
		},
		Observe: func(r *probe.Result) {
			d.exporter.Observe(r)
			d.journal.note(r)
		},
		Done: func(own *sweeper.Own) {
			own.Input.Last = store.LastGood(own.Report.Name, false, own.Report.Started)
			own.Report.Compare(own.Input.Last)
			id, err := store.Put(own.Report)
			if err != nil {
				d.log.Warn("the report of a sweep is kept in memory only", slog.Any("err", err))
			}
			d.exporter.Swept(own.Report)
			d.log.Info("sweep finished", slog.String("summary", own.Report.Summary()), slog.String("report", "/sweeps/"+id))
		},
	}
	d.web = &sweeper.Web{Runner: d.sweeps, Store: store}
}

// reported makes a report of what a job of the schedule measures, when it is over.
func (d *Daemon) reported(name string, run func(context.Context, time.Time)) func(context.Context, time.Time) {
	return func(ctx context.Context, due time.Time) {
		end := d.sweeps.Collect(name)
		run(ctx, due)
		end(ctx)
	}
}

// SweepPorts are the usable ports of a node.
func SweepPorts(n *probe.Node, log *slog.Logger) []sweeper.Port {
	ports, err := n.Ports()
	if err != nil {
		log.Warn("RDMA devices can't be listed", slog.Any("err", err))
	}
	var out []sweeper.Port
	for _, p := range ports {
		if p.Reason != "" {
			continue
		}
		s := sweeper.Port{Device: p.Device, Port: p.Port, Rail: p.Rail}
		if g := p.State.RateGbps; g > 0 {
			rate := g * 1e9 / 8
			s.LineRate = &rate
		}
		out = append(out, s)
	}
	return out
}

// OwnClient calls daemons as the daemon of this node would.
func OwnClient(c *config.Config) *control.Client { return control.NewClientFrom(ownAddress(c)) }

// OwnControl is where this node's daemon is to be called from this node.
func OwnControl(c *config.Config) string {
	host, port, err := net.SplitHostPort(c.Control.Listen)
	if err != nil {
		return c.Control.Listen
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}
