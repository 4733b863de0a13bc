package daemon

import (
	"context"
	"log/slog"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// notify tells systemd that the daemon is up, feeds its watchdog for as long as the scheduler makes its rounds, and says when
// it stops. Without systemd it does nothing.
func (d *Daemon) notify(ctx context.Context) error {
	tell := func(state string) {
		if _, err := daemon.SdNotify(false, state); err != nil {
			d.log.Warn("systemd can't be told", slog.String("state", state), slog.Any("err", err))
		}
	}
	tell(daemon.SdNotifyReady)
	defer tell(daemon.SdNotifyStopping)
	period, err := daemon.SdWatchdogEnabled(false)
	if err != nil || period == 0 {
		<-ctx.Done()
		return nil
	}
	t := time.NewTicker(period / 3)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-t.C:
			if d.progressing(now) {
				tell(daemon.SdNotifyWatchdog)
			}
		}
	}
}
