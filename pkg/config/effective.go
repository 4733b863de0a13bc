package config

import (
	"bytes"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
)

// Effective returns the configuration as it is used: variables expanded, defaults filled in, in
// one spelling. What is left to the devices (MTU, ACK timeout) is left out. It can be parsed
// again, to the same effect.
func (c *Config) Effective() []byte {
	static := list{}
	for _, p := range c.Peers.Static {
		static = append(static, mapping("name", p.Name, "address", p.Address, "labels", p.Labels).flow())
	}
	sources := mapping("static", static, "files", c.Peers.Files)
	if len(c.Peers.DNS) > 0 {
		names := list{}
		for _, d := range c.Peers.DNS {
			m := mapping("name", d.Name, "type", d.Type, "refresh", d.Refresh)
			if d.Type != "SRV" {
				m.add("port", d.Port)
			}
			names = append(names, m.flow())
		}
		sources.add("dns", names)
	}
	sources.add("hostlist", c.Peers.Hostlist)
	if len(c.Peers.HTTP) > 0 {
		urls := list{}
		for _, h := range c.Peers.HTTP {
			urls = append(urls, mapping("url", h.URL, "refresh", h.Refresh).flow())
		}
		sources.add("http", urls)
	}
	probes := list{}
	for _, p := range c.Probes {
		probes = append(probes, p.effective())
	}
	var gid any = "auto"
	if c.Devices.GIDIndex >= 0 {
		gid = c.Devices.GIDIndex
	}
	doc := mapping(
		"node", mapping("name", c.Node.Name, "labels", c.Node.Labels),
		"devices", mapping("include", c.Devices.Include, "exclude", c.Devices.Exclude, "gid", gid, "rails", c.Devices.rails()),
		"control", mapping("listen", c.Control.Listen, "advertise", c.Control.Advertise, "insecure", c.Control.Insecure),
		"limits", mapping("sessions", c.Limits.Sessions, "memory", formatSize(c.Limits.Memory),
			"message", formatSize(int64(c.Limits.Message)), "lease", c.Limits.Lease),
		"taints", effectiveTaints(c.Taints),
		"peers", sources,
		"probes", probes,
	)
	if g := effectiveGuards(c.Guards); len(g.node.Content) > 0 {
		doc.add("guards", g)
	}
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := enc.Encode(doc.node); err != nil {
		panic(err) // a tree of plain scalars always encodes, and a buffer takes everything
	}
	return out.Bytes()
}

func effectiveTaints(tolerances probe.Tolerances) tree {
	m := mapping()
	for _, t := range probe.Tolerable() {
		m.add(string(t), scalar(strconv.FormatFloat(tolerances[t], 'f', -1, 64)))
	}
	return m
}

func (p Probe) effective() tree {
	s := p.Spec.WithDefaults()
	sizes := list{}
	for _, size := range s.Sizes {
		sizes = append(sizes, scalar(formatSize(int64(size))))
	}
	m := mapping("name", s.Name, "schedule", p.Schedule.String(), "jitter", p.Jitter, "kind", string(s.Kind),
		"transport", string(s.Transport), "op", string(s.Op), "sizes", sizes.flow())
	if s.Kind == probe.Ping {
		return p.effectivePing(m)
	}
	if s.Duration > 0 {
		m.add("duration", s.Duration)
	} else {
		m.add("iterations", s.Iterations)
	}
	m.add("warmup", max(0, s.Warmup), "tx_depth", s.TxDepth, "rx_depth", s.RxDepth, "qps", s.QPs, "cq_mod", s.CQMod, "post_list", s.PostList)
	if s.MTU > 0 {
		m.add("mtu", s.MTU)
	}
	m.add("service_level", s.ServiceLevel, "traffic_class", s.TrafficClass)
	if s.FlowLabels == 0 {
		m.add("flow_label", s.FlowLabel)
	}
	if s.Timeout > 0 {
		m.add("ack_timeout", s.Timeout)
	}
	if s.RDMACM {
		m.add("rdma_cm", s.RDMACM)
	}
	effectiveShape(m, s)
	if s.Memory != (probe.Memory{}) {
		memory := mapping("huge_pages", s.Memory.HugePages, "relaxed_ordering", !s.Memory.StrictOrdering)
		if s.Memory.Ring > 0 {
			memory.add("ring", formatSize(int64(s.Memory.Ring)))
		}
		if s.Memory.GPU != nil {
			memory.add("gpu", *s.Memory.GPU)
		}
		m.add("memory", memory.flow())
	}
	m.add("retry_count", max(0, s.Retries), "rnr_retry", max(0, s.RNRRetry), "deadline", s.Deadline,
		"pairing", p.effectivePairing())
	return m
}

func (d Devices) rails() any {
	if d.Rails == nil {
		return "auto"
	}
	m := mapping()
	for _, port := range slices.Sorted(maps.Keys(d.Rails)) {
		m.add(port, d.Rails[port])
	}
	return m.flow()
}

// tree is a YAML node to be written; list a sequence of them.
type (
	tree struct{ node *yaml.Node }
	list []tree
)

func mapping(pairs ...any) tree {
	t := tree{&yaml.Node{Kind: yaml.MappingNode}}
	t.add(pairs...)
	return t
}

// add appends keys with values to a mapping; empty text and labels are left out.
func (t tree) add(pairs ...any) {
	for i := 0; i < len(pairs); i += 2 {
		if value, ok := toTree(pairs[i+1]); ok {
			t.node.Content = append(t.node.Content, scalar(pairs[i].(string)).node, value.node)
		}
	}
}

func toTree(v any) (tree, bool) {
	switch v := v.(type) {
	case tree:
		return v, true
	case list:
		t := tree{&yaml.Node{Kind: yaml.SequenceNode}}
		for _, e := range v {
			t.node.Content = append(t.node.Content, e.node)
		}
		return t, true
	case []string:
		l := list{}
		for _, s := range v {
			l = append(l, text(s))
		}
		return l.flow(), true
	case map[string]string:
		t := mapping()
		for _, k := range slices.Sorted(maps.Keys(v)) {
			t.node.Content = append(t.node.Content, scalar(k).node, text(v[k]).node)
		}
		return t.flow(), len(v) > 0
	case string:
		return text(v), v != ""
	case time.Duration:
		return scalar(formatDuration(v)), true
	case bool:
		return scalar(strconv.FormatBool(v)), true
	case int:
		return scalar(strconv.Itoa(v)), true
	}
	panic("config: no YAML for this type") // a slip in this file; its tests write every key
}

func (t tree) flow() tree {
	t.node.Style = yaml.FlowStyle
	return t
}

func (l list) flow() tree {
	t, _ := toTree(l)
	return t.flow()
}

// scalar is written as it is; text is quoted where it could be taken for something else, and kept
// from being expanded when read again.
func scalar(s string) tree { return tree{&yaml.Node{Kind: yaml.ScalarNode, Value: s}} }

func text(s string) tree {
	return tree{&yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: strings.ReplaceAll(s, "${", "$${")}}
}

// formatDuration writes d as ParseDuration reads it, without the zeros of Duration.String.
func formatDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// formatSize writes bytes in the largest unit that holds them without a fraction.
func formatSize(n int64) string {
	for _, u := range []string{"TiB", "GiB", "MiB", "KiB"} {
		if unit := sizeUnits[u]; n >= unit && n%unit == 0 {
			return strconv.FormatInt(n/unit, 10) + u
		}
	}
	return strconv.FormatInt(n, 10)
}
