package daemon

import (
	"context"
	"log/slog"
	"strings"
	"time"
)

// environmentLook is how often the daemon reads what its ports measure under.
const environmentLook = time.Minute

// watchEnvironment looks at the environment of the ports until ctx ends.
func (d *Daemon) watchEnvironment(ctx context.Context) error {
	t := time.NewTicker(environmentLook)
	defer t.Stop()
	for {
		d.lookAtEnvironment(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// lookAtEnvironment logs and counts a change once: whoever compares figures must know of it.
func (d *Daemon) lookAtEnvironment(ctx context.Context) {
	ports, err := d.node.Ports()
	if err != nil {
		return // the watch says so
	}
	changes, err := d.node.Environments.Refresh(ctx, ports)
	if err != nil && ctx.Err() == nil {
		d.log.Warn("the environment of the ports can't be read: results have an old fingerprint or none", slog.Any("err", err))
	}
	counted := map[string]bool{}
	for _, c := range changes {
		d.log.Warn("environment changed: figures from before and after are not alike", slog.String("device", c.Device), slog.Int("port", c.Port),
			slog.String("what", strings.Join(c.What, "; ")), slog.String("was", c.Was), slog.String("fingerprint", c.Is))
		if !counted[c.Device] {
			counted[c.Device] = true
			d.exporter.EnvironmentChanged(c.Device)
		}
	}
}
