//go:build lab

package fleet

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// factor is one dimension of the matrix with all its levels.
type factor struct {
	name   string
	levels []level
}

type level struct {
	name string
	set  func(*probe.Spec)
}

func levels[T any](set func(*probe.Spec, T), values ...T) []level {
	var out []level
	for _, v := range values {
		out = append(out, level{fmt.Sprint(v), func(s *probe.Spec) { set(s, v) }})
	}
	return out
}

// verb is a transport with an op that it has.
type verb struct {
	transport verbs.Transport
	op        verbs.Op
}

// factors are in the order in which they are applied: what a level needs of another factor comes before it, so that what is
// valid up to a factor, with the defaults of those that follow, is so with some level of each of them.
var factors = []factor{
	{"kind", levels(func(s *probe.Spec, v probe.Kind) { s.Kind = v }, probe.Latency, probe.Bandwidth, probe.MessageRate)},
	{"verb", levels(func(s *probe.Spec, v verb) { s.Transport, s.Op = v.transport, v.op },
		verb{verbs.RC, verbs.Write}, verb{verbs.RC, verbs.WriteImm}, verb{verbs.RC, verbs.Read}, verb{verbs.RC, verbs.Send}, verb{verbs.RC, verbs.FetchAdd}, verb{verbs.RC, verbs.CmpSwap},
		verb{verbs.UC, verbs.Write}, verb{verbs.UC, verbs.WriteImm}, verb{verbs.UC, verbs.Send}, verb{verbs.UD, verbs.Send})},
	{"size", levels(func(s *probe.Spec, v int) { s.Sizes = []int{v} }, 1, 8, 1000, 4096, 20001)},
	{"qps", levels(func(s *probe.Spec, v int) { s.QPs = v }, 1, 4, 64)},
	{"threads", levels(func(s *probe.Spec, v int) { s.Threads = v }, 1, 3)},
	{"length", []level{
		{"iterations", func(s *probe.Spec) { s.Iterations = max(5, 100/s.QPs) }},
		{"duration", func(s *probe.Spec) { s.Duration = 400 * time.Millisecond }},
	}},
	{"events", levels(func(s *probe.Spec, v bool) { s.Events = v }, false, true)},
	{"ways", []level{
		{"one way", func(*probe.Spec) {}},
		{"both ways", func(s *probe.Spec) { s.Bidirectional = true }},
		{"reverse", func(s *probe.Spec) { s.Reverse = true }},
	}},
	{"list", levels(func(s *probe.Spec, v int) { s.PostList = v }, 1, 4)},
	{"verify", levels(func(s *probe.Spec, v bool) { s.Verify = v }, false, true)},
	{"rate", levels(func(s *probe.Spec, v float64) { s.RateLimit = v }, 0, 8e6)},
	{"cm", levels(func(s *probe.Spec, v bool) { s.RDMACM = v }, false, true)},
}

// combination is a level of each factor.
type combination []int

func (c combination) spec() probe.Spec {
	s := probe.Spec{TxDepth: 16, RxDepth: 64, Warmup: 3, Deadline: 30 * time.Second}
	for f, l := range c {
		factors[f].levels[l].set(&s)
	}
	return s
}

func (c combination) String() string {
	var text []string
	for f, l := range c {
		text = append(text, factors[f].name+"="+factors[f].levels[l].name)
	}
	return strings.Join(text, " ")
}

// pair is two levels of two factors.
type pair struct{ f, l, g, m int }

func (c combination) each(do func(pair)) {
	for f := range c {
		for g := f + 1; g < len(c); g++ {
			do(pair{f, c[f], g, c[g]})
		}
	}
}

// with is a combination at random that has a pair and that Validate allows; nil if this attempt led to none.
func with(p pair, random *rand.Rand) combination {
	c := make(combination, 0, len(factors))
	for f := range factors {
		levels := random.Perm(len(factors[f].levels))
		switch f {
		case p.f:
			levels = []int{p.l}
		case p.g:
			levels = []int{p.m}
		}
		n := slices.IndexFunc(levels, func(l int) bool { return append(c, l).spec().WithDefaults().Validate() == nil })
		if n < 0 {
			return nil
		}
		c = append(c, levels[n])
	}
	return c
}

// pairwise is a small set of combinations in which each two levels meet that Validate lets meet. It is the same at each call.
func pairwise() (set []combination, pairs int) {
	const attempts, candidates = 60, 8
	random := rand.New(rand.NewPCG(1, 2))
	met := map[pair]bool{}
	for f := range factors {
		for g := f + 1; g < len(factors); g++ {
			for l := range factors[f].levels {
				for m := range factors[g].levels {
					p := pair{f, l, g, m}
					if met[p] {
						continue
					}
					// Of some combinations that have it, the one with the most others that are missing.
					var best combination
					most, found := 0, 0
					for try := 0; try < attempts && found < candidates; try++ {
						c, news := with(p, random), 0
						if c == nil {
							continue
						}
						found++
						c.each(func(p pair) {
							if !met[p] {
								news++
							}
						})
						if news > most {
							best, most = c, news
						}
					}
					if best != nil {
						best.each(func(p pair) { met[p] = true })
						set = append(set, best)
					}
				}
			}
		}
	}
	return set, len(met)
}
