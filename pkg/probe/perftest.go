package probe

import (
	"errors"
	"slices"

	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// perftest's defaults, where they are not this package's.
const (
	perftestLatencySize  = 2
	perftestIterations   = 1000
	perftestWrites       = 5000 // of write bandwidth
	perftestCQMod        = 100
	perftestRetries      = 7 // on Soft-RoCE for ever: the session's deadline bounds it
	perftestDatagrams    = 16000
	perftestInlineWrite  = 220
	perftestInlineSend   = 236
	perftestInlineUDSend = 188
)

// Perftest fills in the zero fields as perftest's tools do by default, so that the figures can be held against theirs. mtu is that
// of the port, which is how large perftest makes a datagram; 0: unknown. Its defaults of inline data hold for the devices that it
// knows, mlx5 among them; here they are asked for, and the device grants what it can.
func (s Spec) Perftest(mtu int) (Spec, error) {
	if s.Kind == Ping {
		return s, errors.New("perftest has no ping: leave out the profile")
	}
	s = s.named()
	latency, write := s.Kind == Latency, s.Op == verbs.Write || s.Op == verbs.WriteImm
	if s.Duration == 0 {
		if !latency && write {
			def(&s.Iterations, perftestWrites)
		}
		def(&s.Iterations, perftestIterations)
	}
	if len(s.Sizes) == 0 {
		switch {
		case s.Op.Atomic():
			s.Sizes = []int{atomicSize}
		case latency:
			s.Sizes = []int{perftestLatencySize}
		case s.Kind == Bandwidth && s.Transport == verbs.UD && mtu > 0:
			s.Sizes = []int{mtu}
		}
	}
	s = s.perftestQueues(latency)
	if latency {
		switch {
		case write:
			def(&s.Inline, perftestInlineWrite)
		case s.Op == verbs.Send && s.Transport == verbs.UD:
			def(&s.Inline, perftestInlineUDSend)
		case s.Op == verbs.Send:
			def(&s.Inline, perftestInlineSend)
		}
	}
	def(&s.Warmup, -1)
	def(&s.Timeout, defaultTimeout)
	def(&s.Retries, perftestRetries)
	def(&s.RNRRetry, defaultRNRRetry)
	return s, nil
}

func (s Spec) perftestQueues(latency bool) Spec {
	if s.TxDepth == 0 {
		if s.TxDepth = 1; !latency {
			s.TxDepth = defaultTxDepth
			if s.Iterations > 0 {
				s.TxDepth = min(s.TxDepth, s.Iterations)
			}
		}
	}
	if s.RxDepth == 0 {
		if s.RxDepth = 1; s.Op.Receives() {
			s.RxDepth = defaultRxDepth
			if s.Transport == verbs.UD && !latency { // lest it runs out of receives, which would be loss
				s.RxDepth = max(s.RxDepth, min(s.Iterations, perftestDatagrams))
			}
		}
	}
	if s.CQMod == 0 {
		large := len(s.Sizes) == 0 && s.Kind == Bandwidth || len(s.Sizes) == 1 && slices.Max(s.Sizes) > smallMessage
		switch {
		case latency:
			s.CQMod = 1
		case s.PostList > 1:
			s.CQMod = s.PostList
		case large && s.Transport != verbs.UD && !s.Events:
			s.CQMod = 1
		default:
			s.CQMod = min(perftestCQMod, s.TxDepth)
		}
	}
	return s
}
