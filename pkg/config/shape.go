package config

import (
	"strconv"
	"strings"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// maxRepeats and the like are what a key may say; what goes together is [probe.Spec.Validate]'s to know.
const (
	maxRepeats    = 100
	maxThreads    = 64
	maxInline     = 1 << 16
	maxFlowLabels = 1024
)

// shape reads the keys of a load's shape.
func (o *object) shape(s *probe.Spec) {
	o.boolean("bidirectional", &s.Bidirectional)
	o.boolean("reverse", &s.Reverse)
	o.share("read_share", &s.ReadShare)
	o.integer("repeat", 1, maxRepeats, "", &s.Repeat)
	o.boolean("verify", &s.Verify)
	o.integer("threads", 1, maxThreads, "", &s.Threads)
	o.boolean("events", &s.Events)
	o.integer("inline", 0, maxInline, "", &s.Inline)
	o.noneIfZero("inline", &s.Inline)
	o.integer("flow_labels", 1, maxFlowLabels, "each is a session of its own", &s.FlowLabels)
	if text, n, ok := o.get("rate_limit"); ok {
		v, err := ParseRate(text)
		if err != nil {
			o.errorf(n, o.join("rate_limit"), "%s", err)
		}
		s.RateLimit = v
	}
	if text, n, ok := o.get("pkey"); ok {
		v, err := strconv.ParseUint(text, 0, 16)
		if err != nil || v&0x7fff == 0 {
			o.errorf(n, o.join("pkey"), "%q is no partition; write its value, for instance 0x8001, with one of the lower 15 bits set", clip(text, maxName))
		} else {
			s.PKey = uint16(v)
		}
	}
	if text, n, ok := o.get("cpus"); ok {
		cpus, err := probe.ParseCPUs(text)
		if err != nil {
			o.errorf(n, o.join("cpus"), "%s", err)
		}
		s.CPUs = cpus
	}
}

// profile fills in what the profile of a probe says, where the probe says nothing.
func (o *object) profile(s *probe.Spec) {
	var name string
	word(o, "profile", []string{"perftest"}, nil, &name)
	if name == "" {
		return
	}
	filled, err := s.Perftest(0)
	if err != nil {
		o.errorf(o.at("profile"), o.join("profile"), "%s", err)
		return
	}
	*s = filled
}

// effectiveShape adds to m what is not the default.
func effectiveShape(m tree, s probe.Spec) {
	for _, b := range []struct {
		key string
		on  bool
	}{{"bidirectional", s.Bidirectional}, {"reverse", s.Reverse}, {"verify", s.Verify}, {"events", s.Events}} {
		if b.on {
			m.add(b.key, true)
		}
	}
	if s.ReadShare > 0 {
		m.add("read_share", scalar(strconv.FormatFloat(s.ReadShare, 'f', -1, 64)))
	}
	if s.RateLimit > 0 {
		m.add("rate_limit", scalar(strconv.FormatFloat(s.RateLimit, 'f', -1, 64)+"B/s"))
	}
	m.add("repeat", s.Repeat, "threads", s.Threads)
	if len(s.CPUs) > 0 {
		list := make([]string, len(s.CPUs))
		for i, c := range s.CPUs {
			list[i] = strconv.Itoa(c)
		}
		m.add("cpus", strings.Join(list, ","))
	}
	if s.Inline != 0 {
		m.add("inline", max(0, s.Inline))
	}
	if s.FlowLabels > 0 {
		m.add("flow_labels", s.FlowLabels)
	}
	if s.PKey != 0 {
		m.add("pkey", scalar("0x"+strconv.FormatUint(uint64(s.PKey), 16)))
	}
}
