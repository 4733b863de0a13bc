package exporter

import (
	"cmp"
	"maps"
	"math"
	"math/bits"
	"slices"
	"unicode/utf8"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

const (
	// Schema 3 of native histograms has 8 buckets to each doubling, so a bucket's bounds are a factor of 1.09 apart:
	// what client_golang chooses for a NativeHistogramBucketFactor of 1.1.
	schema           = 3
	bucketsPerDouble = 1 << schema

	maxExemplars     = 10
	maxExemplarRunes = 128 // of all label names and values, by the OpenMetrics specification
)

// classicBounds are the upper bounds of the optional classic buckets in seconds: five to a decade, 1 µs to 63 s.
var classicBounds = func() (bounds []float64) {
	for scale := 1e-6; scale < 50; scale *= 10 {
		for _, v := range []float64{1, 1.6, 2.5, 4, 6.3} {
			bounds = append(bounds, math.Round(v*scale*1e7)/1e7)
		}
	}
	return bounds
}()

// samples are the samples of one run, or the sum of many, in buckets.
type samples struct {
	native  map[int]uint64 // index of the upper bound to number of samples
	classic []uint64       // per bucket of classicBounds, not cumulated; nil if not asked for
	zero    uint64         // samples of 0
	count   uint64
	sum     float64 // seconds
}

// bucketed sorts an HDR histogram in nanoseconds into buckets, without looking at each sample.
func bucketed(h *hdrhistogram.Histogram, classic bool) *samples {
	s := &samples{native: map[int]uint64{}}
	if classic {
		s.classic = make([]uint64, len(classicBounds)+1)
	}
	snapshot := h.Export()
	layout := layoutOf(snapshot)
	for i, c := range snapshot.Counts {
		if c <= 0 {
			continue
		}
		n := uint64(c)
		v := layout.middle(i) / 1e9
		s.count += n
		s.sum += v * float64(n)
		if v > 0 {
			s.native[nativeIndex(v)] += n
		} else {
			s.zero += n
		}
		if classic {
			i, _ := slices.BinarySearch(classicBounds, v)
			s.classic[i] += n
		}
	}
	return s
}

// hdrLayout is how HdrHistogram lays out its counts: 2^(bits+1) equally wide ones, then 2^bits for each doubling, each of them
// twice as wide as before. Histogram.Distribution tells the same ten times slower.
type hdrLayout struct {
	bits uint
	unit uint // width of the first counts, as a power of two
}

func layoutOf(s *hdrhistogram.Snapshot) hdrLayout {
	finest := 2 * math.Pow10(int(s.SignificantFigures)) // below it every value has a count of its own
	return hdrLayout{bits: uint(bits.Len64(uint64(finest)-1) - 1), unit: uint(bits.Len64(uint64(max(1, s.LowestTrackableValue))) - 1)}
}

// middle of the values that share count i.
func (l hdrLayout) middle(i int) float64 {
	from, shift := int64(i), l.unit
	if doublings := i >> l.bits; doublings > 1 {
		from = int64(i&(1<<l.bits-1) | 1<<l.bits)
		shift += uint(doublings - 1)
	}
	return float64(from<<shift) + float64(int64(1)<<shift-1)/2
}

// nativeIndex is that of the bucket whose upper bound is the smallest not below v.
func nativeIndex(v float64) int { return int(math.Ceil(math.Log2(v) * bucketsPerDouble)) }

func (s *samples) add(o *samples) {
	for i, n := range o.native {
		s.native[i] += n
	}
	for i, n := range o.classic {
		s.classic[i] += n
	}
	s.zero += o.zero
	s.count += o.count
	s.sum += o.sum
}

// distribution is a histogram metric.
type distribution struct {
	samples
	labels    []*dto.LabelPair
	exemplars []*dto.Exemplar // the newest maxExemplars, oldest first
	created   *timestamppb.Timestamp

	collected *dto.Histogram // what Collect made of the above, until that changes
}

func (d *distribution) observe(s *samples, exemplar *dto.Exemplar) {
	if d.native == nil {
		d.native, d.classic = map[int]uint64{}, make([]uint64, len(s.classic))
	}
	d.add(s)
	if exemplar != nil {
		d.exemplars = append(d.exemplars[max(0, len(d.exemplars)-maxExemplars+1):len(d.exemplars):len(d.exemplars)], exemplar)
	}
	d.collected = nil
}

// exemplar points from a run's largest sample to its result. Its time is now, not the run's: servers refuse exemplars that are
// older than the last, and runs don't end in the order in which they are observed.
func exemplar(r *probe.Result, worst float64) *dto.Exemplar {
	e := &dto.Exemplar{Value: &worst, Timestamp: timestamppb.Now()}
	room := maxExemplarRunes
	for _, l := range pairs([]string{"result_id", "dst"}, clean(r.ID), r.Peer) {
		if room -= utf8.RuneCountInString(l.GetName()) + utf8.RuneCountInString(l.GetValue()); room < 0 {
			return nil
		}
		e.Label = append(e.Label, l)
	}
	return e
}

// histogramMetric is a distribution as it was when collected.
type histogramMetric struct {
	labels []*dto.LabelPair
	h      *dto.Histogram
}

func (m *histogramMetric) Desc() *prometheus.Desc { return latency.desc }

func (m *histogramMetric) Write(out *dto.Metric) error {
	out.Label, out.Histogram = m.labels, m.h
	return nil
}

func (d *distribution) metric() *histogramMetric {
	if d.collected == nil {
		d.collected = d.proto()
	}
	return &histogramMetric{labels: d.labels, h: d.collected}
}

func (d *distribution) proto() *dto.Histogram {
	h := &dto.Histogram{
		Schema: new(int32(schema)), ZeroThreshold: new(0.0), ZeroCount: new(d.zero),
		SampleCount: new(d.count), SampleSum: new(d.sum), CreatedTimestamp: d.created,
		Exemplars: slices.Clone(d.exemplars),
	}
	last, next := int64(0), 0 // the last bucket's count and the index after it
	for _, i := range slices.Sorted(maps.Keys(d.native)) {
		gap := i - next
		if len(h.PositiveSpan) == 0 || gap > 2 {
			h.PositiveSpan = append(h.PositiveSpan, &dto.BucketSpan{Offset: new(int32(gap)), Length: new(uint32(0))})
			gap = 0
		}
		span := h.PositiveSpan[len(h.PositiveSpan)-1]
		*span.Length += uint32(gap) + 1
		for range gap { // a short gap costs less as empty buckets than as another span
			h.PositiveDelta = append(h.PositiveDelta, -last)
			last = 0
		}
		n := int64(d.native[i])
		h.PositiveDelta = append(h.PositiveDelta, n-last)
		last, next = n, i+1
	}
	if len(h.PositiveSpan) == 0 && d.zero == 0 {
		h.PositiveSpan = []*dto.BucketSpan{{Offset: new(int32(0)), Length: new(uint32(0))}} // marks it as native
	}
	if len(d.classic) > 0 {
		h.Bucket = d.classicProto()
	}
	return h
}

func (d *distribution) classicProto() []*dto.Bucket {
	buckets := make([]*dto.Bucket, len(classicBounds))
	var below uint64
	for i, bound := range classicBounds {
		below += d.classic[i]
		buckets[i] = &dto.Bucket{UpperBound: new(bound), CumulativeCount: new(below)}
	}
	for _, e := range d.exemplars { // the newest of a bucket wins
		if i, _ := slices.BinarySearchFunc(buckets, e.GetValue(), func(b *dto.Bucket, v float64) int {
			return cmp.Compare(b.GetUpperBound(), v)
		}); i < len(buckets) {
			buckets[i].Exemplar = e
		}
	}
	return buckets
}
