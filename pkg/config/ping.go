package config

import (
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// ping reads the keys that a probe of kind ping has instead of others.
func (o *object) ping(s *probe.Spec) {
	s.Transport, s.Op = verbs.UD, verbs.Send
	word(o, "transport", []verbs.Transport{verbs.UD}, nil, &s.Transport)
	word(o, "op", []verbs.Op{verbs.Send}, nil, &s.Op)
	o.integer("count", 1, 100_000, "every sample is kept until the run ends", &s.Iterations)
	o.duration("interval", 100*time.Microsecond, time.Minute, &s.Gap)
}

// notOfPing are the keys of other kinds that mean nothing to a ping. A key that does nothing would be taken for one that does.
var notOfPing = map[string]string{
	"iterations": "a ping has a count", "duration": "a ping run ends by its count", "warmup": "there is nothing to warm up",
	"tx_depth": "one ping is sent at a time", "rx_depth": "it is the same for all peers", "qps": "there is one queue pair for all peers",
	"memory": "it is the same for all peers", "cq_mod": "every ping has its completion", "post_list": "one ping is sent at a time", "mtu": "a datagram is not split",
	"ack_timeout": "nothing is acknowledged", "retry_count": "nothing is sent again", "rnr_retry": "nothing is sent again",
	"bidirectional": "one ping is sent at a time", "reverse": "the peer sends its own", "read_share": "it reads nothing", "repeat": "a ping has a count",
	"verify": "an answer carries nothing to check", "threads": "a thread per port sends them all", "cpus": "a thread per port sends them all", "events": "its thread sleeps between pings",
	"inline": "it is the same for all peers", "rate_limit": "it has an interval", "flow_labels": "there is one queue pair for all peers", "pkey": "there is one queue pair for all peers",
	"rdma_cm": "nothing is connected",
}

// pingTogether is together for a ping.
func (o *object) pingTogether(s probe.Spec, told int) {
	for key, why := range notOfPing {
		if o.has(key) {
			o.errorf(o.at(key), o.join(key), "not for kind ping: %s; remove it", why)
		}
	}
	if err := s.WithDefaults().Validate(); err != nil && len(o.errs) == told {
		o.errorf(o.node, o.path, "%s", err)
	}
}

// effectivePing adds to m what a ping has.
func (p Probe) effectivePing(m tree) tree {
	s := p.Spec.WithDefaults()
	m.add("count", s.Iterations, "interval", s.Gap, "service_level", s.ServiceLevel, "traffic_class", s.TrafficClass, "flow_label", s.FlowLabel,
		"deadline", s.Deadline, "pairing", p.effectivePairing())
	return m
}
