package report

import (
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// ErrNoLatency is what HLog returns for a result in which no run measured latency.
var ErrNoLatency = errors.New("no latency was measured: an HdrHistogram log has nothing to hold")

// HLog writes the histogram of each run in the HdrHistogram log format 1.3, in nanoseconds: an interval a run, with absolute times.
// Runs of several sizes are tagged by their size, such as 64B: standard tools leave out tagged intervals unless told which they are
// to read, so sizes are never mixed. A single run has no tag.
func HLog(w io.Writer, r *probe.Result) error {
	var runs []*probe.Run
	for i := range r.Runs {
		if r.Runs[i].Histogram != nil {
			runs = append(runs, &r.Runs[i])
		}
	}
	if len(runs) == 0 {
		return ErrNoLatency
	}
	log := hdrhistogram.NewHistogramLogWriter(w)
	err := errors.Join(
		log.OutputComment(fmt.Sprintf("[%s]", oneLine(title(r)))),
		log.OutputComment(fmt.Sprintf("[values: nanoseconds, %s; Interval_Max: milliseconds; result: %s]", runs[0].Latency.Measure, r.Outcome)),
		log.OutputLogFormatVersion(),
		log.OutputStartTime(r.Time.UnixMilli()),
		log.OutputLegend(),
	)
	if err != nil {
		return err
	}
	for _, run := range runs {
		h, begun := run.Histogram.Clone(), run.Time
		if begun.IsZero() {
			begun = r.Time
		}
		h.SetStartTimeMs(begun.UnixMilli())
		h.SetEndTimeMs(begun.UnixMilli() + max(1, int64(math.Ceil(run.Seconds*1e3))))
		if len(runs) > 1 {
			h.SetTag(fmt.Sprintf("%dB", run.Size))
		}
		if err := log.OutputIntervalHistogram(h); err != nil {
			return err
		}
	}
	return nil
}
