package probe

import (
	"context"
	"maps"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/counters"
)

// meterTime bounds a snapshot: a driver that hangs must not hold up the barrier.
const meterTime = 3 * time.Second

// counterMeter is the Meter over this host's counters.
type counterMeter struct{ fs *counters.FS }

// NewMeter returns a Meter that reads the counters of fs.
func NewMeter(fs *counters.FS) Meter { return counterMeter{fs} }

func (m counterMeter) Start(ctx context.Context, device string, port int) func(context.Context) *EndEvidence {
	reader := m.fs.Port(device, port)
	snapshot := func(ctx context.Context) *counters.Snapshot {
		ctx, cancel := detached(ctx, meterTime)
		defer cancel()
		s, err := reader.Snapshot(ctx)
		if err != nil {
			return nil // can't tell, which Sub understands
		}
		return s
	}
	before := snapshot(ctx)
	return func(ctx context.Context) *EndEvidence {
		d := counters.Sub(before, snapshot(ctx))
		if d == nil {
			return nil
		}
		e := &EndEvidence{
			Device: device, Port: port, Counters: maps.Clone(d.Counters), Classes: map[string]uint64{}, Moved: map[string][]string{}, Unknown: d.Unknown,
			Traffic: maps.Clone(d.Traffic), CannotTell: cannotTell(d), Conditions: []control.Condition{},
		}
		if e.Unknown == nil {
			e.Unknown = []string{}
		}
		for class, v := range d.Classes {
			e.Classes[string(class)] = v
		}
		for class, names := range d.Moved {
			e.Moved[string(class)] = names
		}
		return e
	}
}
