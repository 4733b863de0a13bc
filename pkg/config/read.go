package config

import (
	"fmt"
	"math/bits"
	"net/netip"
	"net/url"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"gopkg.in/yaml.v3"

	"github.com/rdmabenchd/rdmabenchd/pkg/peers"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/schedule"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// Bounds of what a file may ask for. Some are the hardware's (see the messages); the others keep
// a slip of the finger from taking a node's memory or a day.
const (
	maxName       = 128
	maxLabels     = 32
	maxGlobs      = 256
	maxSources    = 256 // of peers, of a kind
	maxRail       = 255
	maxProbes     = 256
	maxSizes      = 64
	maxMessage    = 1 << 30
	maxIterations = 1_000_000_000
	maxSamples    = 10_000_000 // of a latency run, each of which is kept until the run ends
	maxDepth      = 1 << 16
	maxQPs        = 1024
	maxEvents     = 1_000_000_000 // of a counter, to be put up with
)

func parse(name string, data []byte, env environment) (*Config, error) {
	d := &decoder{file: name, env: env}
	root := d.document(data)
	if len(d.errs) > 0 {
		return nil, d.result()
	}
	c := &Config{}
	if root != nil && isNull(root) {
		root = nil
	}
	o := d.object("", root)
	d.readNode(o, c)
	d.readDevices(o.sub("devices"), c)
	d.readControl(o.sub("control"), c)
	d.readLimits(o.sub("limits"), c)
	d.readGuards(o.sub("guards"), c)
	d.readTaints(o.sub("taints"), c)
	d.readPeers(o.sub("peers"), c)
	d.readProbes(o, c)
	o.done("baseline", "history")
	if err := d.result(); err != nil {
		return nil, err
	}
	return c, nil
}

// sub opens the mapping under key.
func (o *object) sub(key string) *object { return o.object(o.join(key), o.take(key)) }

func (d *decoder) readNode(top *object, c *Config) {
	o := top.sub("node")
	if s, _, ok := o.get("name"); s != "" {
		o.name("name", &c.Node.Name)
	} else if ok || !o.has("name") {
		host, err := d.env.hostname()
		if err != nil || !peers.ValidName(host) {
			o.errorf(o.node, o.join("name"), "the hostname %q can't serve as name: %s; set node.name", host, peers.NameRule)
		}
		c.Node.Name = host
	}
	o.labels(&c.Node.Labels)
	o.done()
}

func (d *decoder) readDevices(o *object, c *Config) {
	c.Devices = Devices{Include: []string{"*"}, GIDIndex: -1}
	o.globs("include", &c.Devices.Include)
	o.globs("exclude", &c.Devices.Exclude)
	if o.has("include") && len(c.Devices.Include) == 0 {
		o.errorf(o.at("include"), o.join("include"), "an empty list leaves no device; name some, or leave the key out for all")
	}
	if n := o.take("gid"); n != nil && n.Kind == yaml.MappingNode {
		o.errorf(n, o.join("gid"), "choosing by type or subnet is not supported by this version; use auto or an index")
	} else if s, _, ok := o.get("gid"); ok && s != "auto" {
		// ibv_global_route.sgid_index has 8 bits.
		o.integer("gid", 0, 255, "the field has 8 bits (auto chooses by content)", &c.Devices.GIDIndex)
	}
	o.rails(&c.Devices.Rails)
	o.done()
}

var railPort = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,62}(/[1-9][0-9]{0,2})?$`)

// rails reads the rails of ports: auto, or a number for each device or device/port.
func (o *object) rails(dst *map[string]int) {
	n := o.take("rails")
	if n == nil {
		return
	}
	if n = o.resolve(o.join("rails"), n); n == nil {
		return
	}
	if n.Kind == yaml.ScalarNode {
		if s, _, ok := o.get("rails"); ok && s != "auto" {
			o.errorf(n, o.join("rails"), "%q is neither auto nor a list of devices with their rails, for instance {mlx5_0: 0, mlx5_3: 1}", clip(s, maxName))
		}
		return
	}
	r := o.object(o.join("rails"), n)
	taken := map[int]string{}
	for _, k := range r.keys {
		rail := -1
		switch r.integer(k.Value, 0, maxRail, "", &rail); {
		case !railPort.MatchString(k.Value):
			r.errorf(k, r.path, "%q is no device, nor device/port", clip(k.Value, maxName))
		case rail < 0:
			r.take(k.Value)
			if !r.has(k.Value) {
				r.errorf(k, r.join(k.Value), "missing; give the rail's number")
			}
		case taken[rail] != "":
			r.errorf(r.at(k.Value), r.join(k.Value), "rail %d is that of %s; each port needs its own", rail, taken[rail])
		default:
			taken[rail] = k.Value
			if *dst == nil {
				*dst = map[string]int{}
			}
			(*dst)[k.Value] = rail
		}
	}
}

func (d *decoder) readControl(o *object, c *Config) {
	o.boolean("insecure", &c.Control.Insecure)
	c.Control.Listen = "127.0.0.1:" + strconv.Itoa(DefaultPort)
	if c.Control.Insecure {
		c.Control.Listen = ":" + strconv.Itoa(DefaultPort)
	}
	o.address("listen", true, &c.Control.Listen)
	if s, _, _ := o.get("advertise"); s != "" {
		o.address("advertise", false, &c.Control.Advertise)
	}
	if o.has("listen") && !c.Control.Insecure && !isLoopback(c.Control.Listen) {
		o.errorf(o.at("listen"), o.join("listen"), "%s serves other hosts, but this version has no TLS to protect that; "+
			"listen on 127.0.0.1, or set control.insecure: true if every host that reaches this port is trusted", c.Control.Listen)
	}
	o.done("tls", "allow")
}

func (d *decoder) readLimits(o *object, c *Config) {
	c.Limits = Limits{Sessions: defaultSessions, Memory: defaultMemory, Message: defaultMessage, Lease: defaultLease}
	l := &c.Limits
	o.integer("sessions", 1, 4096, "", &l.Sessions)
	o.size("memory", 1<<20, 1<<46, &l.Memory)
	message := int64(l.Message)
	o.size("message", 1, maxMessage, &message)
	l.Message = int(message)
	o.duration("lease", 5*time.Second, 10*time.Minute, &l.Lease)
	if message > l.Memory {
		o.errorf(o.at("message"), o.join("message"), "%s is more than limits.memory, %s: no such message could ever be admitted",
			formatSize(message), formatSize(l.Memory))
	}
	o.done()
}

// readTaints reads tolerances: a number of events, or a share.
func (d *decoder) readTaints(o *object, c *Config) {
	c.Taints = probe.DefaultTolerances()
	for _, t := range probe.Tolerable() {
		if slices.Contains(probe.Shares, t) {
			share := c.Taints[t]
			o.share(string(t), &share)
			c.Taints[t] = share
			continue
		}
		events := int(c.Taints[t])
		o.integer(string(t), 0, maxEvents, "events at one end in the timed part", &events)
		c.Taints[t] = float64(events)
	}
	o.done()
}

func (o *object) size(key string, lo, hi int64, dst *int64) {
	if n := o.take(key); n != nil {
		if v, ok := o.sizeOf(o.join(key), n, lo, hi); ok {
			*dst = v
		}
	}
}

func (d *decoder) readPeers(o *object, c *Config) {
	names, addresses := map[string]*yaml.Node{}, map[string]*yaml.Node{}
	for i, n := range o.list("static", peers.MaxPeers) {
		p := d.object(index(o.join("static"), i), n)
		var peer Peer
		p.name("name", &peer.Name)
		p.address("address", false, &peer.Address)
		p.labels(&peer.Labels)
		p.require("name", "the peer's own node.name")
		p.require("address", "host:port of its control channel")
		p.unique("name", peer.Name, names)
		p.unique("address", peer.Address, addresses)
		p.done()
		c.Peers.Static = append(c.Peers.Static, peer)
	}
	for i, n := range o.list("files", maxSources) {
		at := index(o.join("files"), i)
		if glob, ok := o.text(at, n); ok && o.filePattern(at, n, glob) {
			c.Peers.Files = append(c.Peers.Files, glob)
		}
	}
	for i, n := range o.list("dns", maxSources) {
		if l, ok := d.object(index(o.join("dns"), i), n).dns(); ok {
			c.Peers.DNS = append(c.Peers.DNS, l)
		}
	}
	for i, n := range o.list("hostlist", maxSources) {
		at := index(o.join("hostlist"), i)
		list, ok := o.text(at, n)
		if !ok {
			continue
		}
		if err := peers.CheckHostlist(list); err != nil {
			o.errorf(n, at, "%s", err)
			continue
		}
		c.Peers.Hostlist = append(c.Peers.Hostlist, list)
	}
	for i, n := range o.list("http", maxSources) {
		if h, ok := d.object(index(o.join("http"), i), n).http(); ok {
			c.Peers.HTTP = append(c.Peers.HTTP, h)
		}
	}
	o.done()
}

// filePattern wants what Prometheus wants of file_sd: the end of the name says what the file holds, and keeps editors' backups out.
func (o *object) filePattern(at string, n *yaml.Node, glob string) bool {
	switch ext := filepath.Ext(glob); {
	case glob == "":
		o.errorf(n, at, "empty; name a file or pattern, or remove the entry")
	case ext != ".json" && ext != ".yml" && ext != ".yaml":
		o.errorf(n, at, "%q does not end in .json, .yml or .yaml", clip(glob, maxName))
	default:
		if _, err := filepath.Match(glob, ""); err != nil {
			o.errorf(n, at, "%q is not a pattern; write a path, with * for any text within a name and ? for any character", clip(glob, maxName))
			return false
		}
		return true
	}
	return false
}

// dns reads a name to look up.
func (o *object) dns() (d peers.DNS, ok bool) {
	told := len(o.errs)
	d = peers.DNS{Type: "SRV", Refresh: peers.DefaultDNSRefresh}
	if s, n, ok := o.get("name"); ok {
		if d.Name = strings.TrimSuffix(s, "."); len(s) > 253 || !dnsPattern.MatchString(d.Name) {
			o.errorf(n, o.join("name"), "%q is not a DNS name; write for instance _rdmabench._tcp.fleet.example.org", clip(s, maxName))
		}
	}
	o.require("name", "what to look up")
	word(o, "type", []string{"SRV", "A", "AAAA"}, nil, &d.Type)
	o.duration("refresh", time.Second, 24*time.Hour, &d.Refresh)
	o.integer("port", 1, 65535, "", &d.Port)
	switch {
	case d.Type == "SRV" && o.has("port"):
		o.errorf(o.at("port"), o.join("port"), "SRV records carry the port themselves; remove it")
	case d.Type != "SRV" && d.Port == 0:
		d.Port = DefaultPort
	}
	o.done()
	return d, len(o.errs) == told
}

// http reads a URL that tells of peers.
func (o *object) http() (h peers.HTTP, ok bool) {
	told := len(o.errs)
	h = peers.HTTP{Refresh: peers.DefaultHTTPRefresh}
	if s, n, ok := o.get("url"); ok {
		u, err := url.Parse(s)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			o.errorf(n, o.join("url"), "not a URL with http:// or https:// and a host") // not quoted: it may hold a password
		}
		h.URL = s
	}
	o.require("url", "what answers with a list of targets, as Prometheus's http_sd wants it")
	o.duration("refresh", time.Second, 24*time.Hour, &h.Refresh)
	o.done()
	return h, len(o.errs) == told
}

func (d *decoder) readProbes(top *object, c *Config) {
	if !top.has("probes") {
		top.take("probes")
		c.Probes = defaultProbes()
		for i := range c.Probes {
			p := &c.Probes[i]
			if p.Spec.Sizes[0] > c.Limits.Message {
				top.errorf(top.at("limits"), "limits.message", "less than the default probe %s needs, %s; raise it or write your own probes",
					p.Spec.Name, formatSize(int64(p.Spec.Sizes[0])))
			}
		}
		return
	}
	names := map[string]*yaml.Node{}
	for i, n := range top.list("probes", maxProbes) {
		p := d.object(index("probes", i), n)
		c.Probes = append(c.Probes, p.readProbe(c.Limits))
		p.unique("name", c.Probes[i].Spec.Name, names)
	}
}

func (o *object) readProbe(limits Limits) Probe {
	told := len(o.errs)
	var p Probe
	s := &p.Spec
	o.name("name", &s.Name)
	o.schedule(&p)
	word(o, "kind", []probe.Kind{probe.Latency, probe.Bandwidth, probe.MessageRate, probe.Ping}, nil, &s.Kind)
	s.Transport, s.Op = verbs.RC, verbs.Write
	if s.Kind == probe.Ping {
		o.ping(s)
	} else {
		word(o, "transport", []verbs.Transport{verbs.RC, verbs.UC, verbs.UD}, nil, &s.Transport)
		word(o, "op", []verbs.Op{verbs.Write, verbs.WriteImm, verbs.Read, verbs.Send, verbs.FetchAdd, verbs.CmpSwap}, nil, &s.Op)
	}
	o.require("name", "it becomes the label probe of the metrics")
	o.require("schedule", `when it runs, for instance "*/5 * * * *" or "@every 30s"`)
	o.require("kind", "latency, bandwidth, message-rate or ping")

	o.sizes(limits.Message, &s.Sizes)
	maxCount, why := maxIterations, ""
	if s.Kind == probe.Latency {
		maxCount, why = maxSamples, "a latency run keeps every sample until it ends"
	}
	o.integer("iterations", 1, maxCount, why, &s.Iterations)
	o.duration("duration", 10*time.Millisecond, time.Hour, &s.Duration)
	if o.has("iterations") && o.has("duration") {
		o.errorf(o.at("duration"), o.join("duration"), "iterations and duration are both set, but a run ends by one of them; remove one")
	}
	o.integer("warmup", 0, 1_000_000, "", &s.Warmup)
	o.integer("tx_depth", 1, maxDepth, "", &s.TxDepth)
	o.integer("rx_depth", 1, maxDepth, "", &s.RxDepth)
	o.integer("qps", 1, maxQPs, "", &s.QPs)
	o.integer("cq_mod", 1, maxDepth, "", &s.CQMod)
	o.integer("post_list", 1, maxDepth, "", &s.PostList)
	o.integer("mtu", 256, 4096, "", &s.MTU)
	if s.MTU != 0 && bits.OnesCount(uint(s.MTU)) != 1 {
		o.errorf(o.at("mtu"), o.join("mtu"), "%d is no path MTU of InfiniBand; use 256, 512, 1024, 2048 or 4096, or leave it out for the largest that both ends have", s.MTU)
	}
	o.integer("service_level", 0, 15, "the field has 4 bits", &s.ServiceLevel)
	o.integer("traffic_class", 0, 255, "the field has 8 bits", &s.TrafficClass)
	o.integer("flow_label", 0, 1<<20-1, "the field has 20 bits", &s.FlowLabel)
	o.ackTimeout(&s.Timeout)
	o.integer("retry_count", 0, 7, "the QP's field has 3 bits", &s.Retries)
	o.integer("rnr_retry", 0, 7, "the QP's field has 3 bits", &s.RNRRetry)
	o.boolean("rdma_cm", &s.RDMACM)
	o.shape(s)
	memory := o.sub("memory")
	memory.boolean("huge_pages", &s.Memory.HugePages)
	var ring int64
	memory.size("ring", 1, maxMessage, &ring)
	relaxed := true
	memory.boolean("relaxed_ordering", &relaxed)
	s.Memory.Ring, s.Memory.StrictOrdering = int(ring), !relaxed
	gpu := -1
	if memory.integer("gpu", 0, 1023, "", &gpu); gpu >= 0 {
		s.Memory.GPU = &gpu
	}
	memory.done()
	o.duration("deadline", time.Second, 24*time.Hour, &s.Deadline)
	o.noneIfZero("warmup", &s.Warmup)
	o.noneIfZero("retry_count", &s.Retries)
	o.noneIfZero("rnr_retry", &s.RNRRetry)
	o.profile(s)

	o.pairing(&p)
	o.done("expect")
	o.together(*s, limits, told)
	return p
}

// noneIfZero turns a 0 that was written down into the negative that a [probe.Spec] has for none,
// since its 0 is the default.
func (o *object) noneIfZero(key string, v *int) {
	if o.has(key) && *v == 0 {
		*v = -1
	}
}

// together checks what is right key by key but can't work as a whole. A probe with other errors
// than the first told ones is not checked for what this package has no message of its own for.
func (o *object) together(s probe.Spec, limits Limits, told int) {
	refuse := func(key, format string, args ...any) { o.errorf(o.at(key), o.join(key), format, args...) }
	if s.Deadline > 0 && time.Duration(len(s.Sizes)*max(1, s.Repeat))*s.Duration >= s.Deadline {
		refuse("deadline", "%s is too short for a duration of %s and %d sizes; raise it or leave it out",
			formatDuration(s.Deadline), formatDuration(s.Duration), max(1, len(s.Sizes)))
	}
	if s.Kind == probe.Ping {
		o.pingTogether(s, told)
		return
	}
	s = s.WithDefaults()
	s.Retries, s.RNRRetry = max(0, s.Retries), max(0, s.RNRRetry)
	const alone = "%d is not possible: latency has one message on its way at a time; remove it, or measure bandwidth or message-rate"
	switch {
	case s.Kind == probe.Latency && s.QPs > 1:
		refuse("qps", alone, s.QPs)
	case s.Kind == probe.Latency && s.PostList > 1:
		refuse("post_list", alone, s.PostList)
	case s.PostList > s.TxDepth:
		refuse("post_list", "%d is more than tx_depth, %d; lower it or raise that", s.PostList, s.TxDepth)
	case s.CQMod > s.TxDepth:
		refuse("cq_mod", "%d is more than tx_depth, %d: the queue would be full before a completion comes; lower it or raise that", s.CQMod, s.TxDepth)
	case s.CQMod%s.PostList != 0:
		refuse("cq_mod", "%d is not a multiple of post_list, %d: a list would end without a completion", s.CQMod, s.PostList)
	}
	if need := 2 * int64(s.Memory.Ring); need > limits.Memory {
		memory := o.sub("memory")
		memory.errorf(memory.at("ring"), memory.join("ring"), "%s, one to send from and one to receive in, need %s of memory, more than limits.memory, %s; use a smaller one",
			formatSize(int64(s.Memory.Ring)), formatSize(need), formatSize(limits.Memory))
	}
	largest := int64(slices.Max(s.Sizes))
	if need := largest * int64(s.QPs); need > limits.Memory {
		refuse("sizes", "%d queue pairs of %s need %s of memory, more than limits.memory, %s; use fewer or smaller ones",
			s.QPs, formatSize(largest), formatSize(need), formatSize(limits.Memory))
	} else if largest > int64(limits.Message) {
		refuse("sizes", "the default of %s is more than limits.message, %s; set a size", formatSize(largest), formatSize(int64(limits.Message)))
	}
	if err := s.Validate(); err != nil && len(o.errs) == told {
		o.errorf(o.node, o.path, "%s", err)
	}
}

func (o *object) schedule(p *Probe) {
	text, n, ok := o.get("schedule")
	if ok {
		s, err := schedule.Parse(text)
		if err != nil {
			o.errorf(n, o.join("schedule"), "%q is no schedule: %s", text, err)
		} else {
			p.Schedule = s
			p.timing()
		}
	}
	longest := 24 * time.Hour
	if p.Spec.Interval > 0 {
		longest = min(longest, p.Spec.Interval)
	}
	o.duration("jitter", 0, longest, &p.Jitter)
}

// sizes reads one size, a list of them, or {from, to} for the powers of two between.
func (o *object) sizes(limit int, dst *[]int) {
	n := o.take("sizes")
	path := o.join("sizes")
	if n == nil {
		return
	}
	if n = o.resolve(path, n); n == nil {
		return
	}
	switch n.Kind {
	case yaml.MappingNode:
		r := o.object(path, n)
		var from, to int64
		r.size("from", 1, int64(limit), &from)
		r.size("to", 1, int64(limit), &to)
		r.require("from", "the smallest size")
		r.require("to", "the largest size")
		r.done()
		for _, key := range []string{"from", "to"} {
			if v := map[string]int64{"from": from, "to": to}[key]; v > 0 && bits.OnesCount64(uint64(v)) != 1 {
				r.errorf(r.at(key), r.join(key), "%d is not a power of two", v)
				return
			}
		}
		if from > to && to > 0 {
			r.errorf(n, path, "from is larger than to")
		}
		for size := from; size > 0 && size <= to; size *= 2 {
			*dst = append(*dst, int(size))
		}
	case yaml.SequenceNode:
		entries := o.list("sizes", maxSizes)
		if len(entries) == 0 && len(n.Content) == 0 {
			o.errorf(n, path, "an empty list measures nothing; name a size, or leave the key out")
		}
		for i, e := range entries {
			size, ok := o.sizeOf(index(path, i), e, 1, int64(limit))
			switch {
			case !ok:
			case slices.Contains(*dst, int(size)):
				o.errorf(e, index(path, i), "%s is there twice", formatSize(size))
			default:
				*dst = append(*dst, int(size))
			}
		}
	default:
		if size, ok := o.sizeOf(path, n, 1, int64(limit)); ok {
			*dst = []int{int(size)}
		}
	}
}

// ackTimeout reads the exponent of the QP's local ACK timeout or a duration, which becomes the
// nearest exponent.
func (o *object) ackTimeout(dst *int) {
	const key, lo, hi = "ack_timeout", 1, 31
	text, n, ok := o.get(key)
	if !ok {
		return
	}
	v, err := strconv.Atoi(text)
	if err != nil || !plainInteger.MatchString(text) {
		d, err := ParseDuration(text)
		switch {
		case err != nil:
			o.errorf(n, o.join(key), "%q is neither an exponent (%d to %d) nor a duration", text, lo, hi)
			return
		case d <= 0:
			v = 0
		default:
			v = ackExponent(d)
		}
		if v < lo || v > hi {
			if v = 0; d > 0 {
				o.errorf(n, o.join(key), "%s is out of range; use %s to %s", text, ackTimeout<<lo, (ackTimeout << hi).Round(time.Second))
				return
			}
		}
	}
	switch {
	case v == 0:
		o.errorf(n, o.join(key), "0 means that a lost packet is waited for without end; use %d to %d, the timeout is 4.096µs × 2^n", lo, hi)
	case v < lo || v > hi:
		o.errorf(n, o.join(key), "%s is out of range: the QP's field has 5 bits and 0 waits for ever; use %d to %d, the timeout is 4.096µs × 2^n", text, lo, hi)
	default:
		*dst = v
	}
}

// require tells an error if key has no value.
func (o *object) require(key, what string) {
	if !o.has(key) && o.node.Kind == yaml.MappingNode {
		o.errorf(o.node, o.join(key), "missing; set it (%s)", what)
	}
}

// unique tells an error if value is in taken, else puts it there.
func (o *object) unique(key, value string, taken map[string]*yaml.Node) {
	n := o.at(key)
	if value == "" {
		return
	}
	if first := taken[value]; first != nil {
		o.errorf(n, o.join(key), "%q is taken, in line %d; each needs its own", value, first.Line)
		return
	}
	taken[value] = n
}

var (
	nameBad    = regexp.MustCompile(`[^A-Za-z0-9._:@-]+`)
	dnsPattern = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9])?$`)
)

// name reads a name that becomes the value of a metric label.
func (o *object) name(key string, dst *string) {
	s, n, ok := o.get(key)
	if !ok {
		return
	}
	if !peers.ValidName(s) {
		hint := strings.Trim(nameBad.ReplaceAllString(s, "-"), "._:@-")
		if hint = hint[:min(len(hint), maxName)]; hint != "" {
			hint = fmt.Sprintf("; use for instance %q", hint)
		}
		o.errorf(n, o.join(key), "%q can't be a name: %s%s", clip(s, maxName), peers.NameRule, hint)
		return
	}
	*dst = s
}

// labels reads the labels of a node or peer.
func (o *object) labels(dst *map[string]string) {
	l := o.sub("labels")
	if len(l.keys) > maxLabels {
		l.errorf(l.node, l.path, "%d labels are too many; at most %d", len(l.keys), maxLabels)
		return
	}
	for _, k := range l.keys {
		v, n, ok := l.get(k.Value)
		switch {
		case n == nil: // left empty: no such label, as in Prometheus
		case !peers.ValidLabel(k.Value):
			l.errorf(k, l.path, "%q can't be the name of a label; use letters, digits and _, not beginning with a digit or __", clip(k.Value, maxName))
		case !ok || v == "":
		case len(v) > maxName || strings.ContainsFunc(v, func(r rune) bool { return !unicode.IsPrint(r) }):
			l.errorf(n, l.join(k.Value), "%q can't be the value of a label; use at most %d bytes of printable text", clip(v, maxName), maxName)
		default:
			if *dst == nil {
				*dst = map[string]string{}
			}
			(*dst)[k.Value] = v
		}
	}
}

func (o *object) globs(key string, dst *[]string) {
	entries := o.list(key, maxGlobs)
	if entries == nil {
		return
	}
	*dst = []string{}
	for i, e := range entries {
		p := index(o.join(key), i)
		g, ok := o.text(p, e)
		if !ok {
			continue
		}
		if _, err := path.Match(g, ""); err != nil || g == "" {
			o.errorf(e, p, "%q is not a pattern; write a device name, with * for any text and ? for any character", g)
			continue
		}
		*dst = append(*dst, g)
	}
}

// address reads host, host:port or, to listen on, :port, and completes it with the default port.
func (o *object) address(key string, listen bool, dst *string) {
	s, n, ok := o.get(key)
	if !ok {
		return
	}
	address, err := peers.ParseAddress(s, listen)
	if err != nil {
		o.errorf(n, o.join(key), "%q: %s", clip(s, maxName), err)
		return
	}
	*dst = address
}

// isLoopback reports whether listening on a checked address serves this host only.
func isLoopback(address string) bool {
	host := address[:strings.LastIndexByte(address, ':')]
	ip, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil && ip.Unmap().IsLoopback() || host == "localhost"
}
