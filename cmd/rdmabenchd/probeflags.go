package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/alecthomas/kingpin/v2"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

const defaultControlPort = "18516"

type probeFlags struct {
	peers                        []string
	pattern, device              string
	port, gid                    int
	kind, transport, op, profile string
	sizes, ring, rate, pkey      string
	cpus                         string
	allSizes, relaxed            bool
	gpu                          int
	spec                         probe.Spec
	out                          probeOutput
	none                         []func() // make what was set to 0 the negative that a spec has for none
}

func addProbe(app *kingpin.Application, add func(string, func(context.Context, *environment) error)) {
	cmd, f := newProbe(app)
	add(cmd.FullCommand(), f.run)
}

func newProbe(app *kingpin.Application) (*kingpin.CmdClause, *probeFlags) {
	f := &probeFlags{}
	cmd := app.Command("probe", "Probe a peer once. Flags have perftest's letters where they mean the same. The peer runs `rdmabenchd respond` or the daemon.")
	cmd.Arg("peer", "Host or host:port of the peer's control channel (default port "+defaultControlPort+"); several with --pattern.").Required().StringsVar(&f.peers)
	f.addWhat(cmd)
	f.addShape(cmd)
	f.addPath(cmd)
	cmd.Flag("deadline", "Time for the whole probe.").DurationVar(&f.spec.Deadline)
	cmd.Flag("wait", "How long to wait for a port that another probe uses, here or there.").DurationVar(&f.spec.Wait)
	f.out.flags(cmd)
	return cmd, f
}

// orNone makes an explicit 0 of a flag mean none, where the spec's own 0 means the default.
func (f *probeFlags) orNone(flag *kingpin.FlagClause, v *int) {
	set := new(bool)
	flag.IsSetByUser(set).IntVar(v)
	f.none = append(f.none, func() {
		if *set && *v == 0 {
			*v = -1
		}
	})
}

// addWhat adds the flags that say what is measured, with which messages.
func (f *probeFlags) addWhat(cmd *kingpin.CmdClause) {
	cmd.Flag("kind", "What to measure: latency, bandwidth, message-rate or ping.").Default("latency").EnumVar(&f.kind, "latency", "bandwidth", "message-rate", "ping")
	cmd.Flag("op", "Verb: write (the default), write-imm, read, send, fetch-add or cmp-swap.").EnumVar(&f.op, "write", "write-imm", "read", "send", "fetch-add", "cmp-swap")
	cmd.Flag("transport", "Transport: rc (the default), uc (write, write-imm, send) or ud (send).").Short('c').EnumVar(&f.transport, "rc", "uc", "ud")
	cmd.Flag("profile", "perftest: what no flag sets is as in perftest (sizes, iterations, depths, CQ moderation, inline data, QP timers, no warm-up).").EnumVar(&f.profile, "perftest")
	cmd.Flag("size", "Message size in bytes, also as 64KiB, or a list of them: 2,64,4096 (default 8 for latency and message rate, 64KiB for bandwidth, 1KiB of it over UD).").
		Short('s').StringVar(&f.sizes)
	cmd.Flag("all-sizes", "All powers of two from 2 bytes to 8 MiB, or to what transport, op and device can carry.").Short('a').BoolVar(&f.allSizes)
	cmd.Flag("iterations", "Timed messages per QP (default 1000 for latency, 10 for ping, else 5000).").Short('n').IntVar(&f.spec.Iterations)
	cmd.Flag("interval", "Time from one ping to the next (default 10ms).").DurationVar(&f.spec.Gap)
	cmd.Flag("duration", "Time to measure for, such as 5s, instead of a number of iterations.").Short('D').DurationVar(&f.spec.Duration)
	f.orNone(cmd.Flag("warmup", "Untimed messages per QP first; 0 for none (default 100 or fewer for latency, one tx depth for bandwidth)."), &f.spec.Warmup)
	cmd.Flag("repeat", "Measure each size so many times; the median run is the result, with the spread.").IntVar(&f.spec.Repeat)
	cmd.Flag("verify", "Messages carry a pattern with a number and a checksum, which both ends check. That is in the figures.").BoolVar(&f.spec.Verify)
}

// addShape adds the flags of the load's shape.
func (f *probeFlags) addShape(cmd *kingpin.CmdClause) {
	cmd.Flag("bidirectional", "Both ends send, over one window.").Short('b').BoolVar(&f.spec.Bidirectional)
	cmd.Flag("reverse", "The peer sends instead of this node; needs --duration.").BoolVar(&f.spec.Reverse)
	cmd.Flag("pattern", "With several peers, at the same time: outcast (this node sends to all) or incast (all send to this node); needs --duration.").EnumVar(&f.pattern, "outcast", "incast")
	cmd.Flag("read-share", "Share of reads among writes, such as 0.3.").FloatVar(&f.spec.ReadShare)
	cmd.Flag("rate-limit", "Payload that each sending end sends at most, such as 10Gb/s or 500MB/s.").StringVar(&f.rate)
	cmd.Flag("tx-depth", "Outstanding sends per QP (default 128; latency 16).").Short('t').IntVar(&f.spec.TxDepth)
	cmd.Flag("rx-depth", "Posted receives per QP (default 512; latency 16).").Short('r').IntVar(&f.spec.RxDepth)
	cmd.Flag("qps", "Queue pairs.").Short('q').IntVar(&f.spec.QPs)
	cmd.Flag("threads", "Threads that share the queue pairs, at each end that posts.").IntVar(&f.spec.Threads)
	cmd.Flag("cpus", "CPUs of this end's threads, such as 2-5 (default: near the NIC, none that is isolated).").StringVar(&f.cpus)
	cmd.Flag("events", "Wait for completions instead of polling for them.").Short('e').BoolVar(&f.spec.Events)
	cmd.Flag("cq-mod", "One completion per so many sends.").Short('Q').IntVar(&f.spec.CQMod)
	cmd.Flag("post-list", "Work requests per post.").Short('l').IntVar(&f.spec.PostList)
	f.orNone(cmd.Flag("inline", "Bytes of inline data to ask the device for; it may grant less.").Short('I'), &f.spec.Inline)
	cmd.Flag("huge-pages", "Take the buffers from huge pages, at both ends, where there are any.").BoolVar(&f.spec.Memory.HugePages)
	cmd.Flag("ring", "Bytes that successive messages of a bandwidth or message-rate probe walk through at each end, such as 64MiB: above the size of the last-level cache it takes them to DRAM (default: each QP's stay in one place).").StringVar(&f.ring)
	cmd.Flag("relaxed-ordering", "Register memory with relaxed ordering where the devices take it; never for write latency, which polls it.").Default("true").BoolVar(&f.relaxed)
	cmd.Flag("gpu", "CUDA's number of the GPU whose memory this end uses, in a binary built with -tags dmabuf.").Default("-1").IntVar(&f.gpu)
}

// addPath adds the flags of the port and of the way to the peer.
func (f *probeFlags) addPath(cmd *kingpin.CmdClause) {
	cmd.Flag("device", "Device to probe from (default: the first usable one).").Short('d').StringVar(&f.device)
	cmd.Flag("port", "Port of the device (default: its first usable one).").Short('i').IntVar(&f.port)
	cmd.Flag("gid-index", "GID table index (default: chosen by content, to match the peer).").Short('x').Default("-1").IntVar(&f.gid)
	cmd.Flag("rdma-cm", "Connect by rdma_cm instead of an exchange of queue pair addresses; on iWARP always.").Short('R').BoolVar(&f.spec.RDMACM)
	cmd.Flag("mtu", "Path MTU in bytes (default: the smaller of both ports').").Short('m').IntVar(&f.spec.MTU)
	cmd.Flag("service-level", "Service level.").Short('S').IntVar(&f.spec.ServiceLevel)
	cmd.Flag("traffic-class", "Traffic class of the GRH: DSCP << 2.").IntVar(&f.spec.TrafficClass)
	cmd.Flag("flow-label", "Flow label of the GRH.").IntVar(&f.spec.FlowLabel)
	cmd.Flag("flow-labels", "Walk through so many flow labels, a session each, to take each of the equal paths between both ends; the result is that of the worst.").IntVar(&f.spec.FlowLabels)
	cmd.Flag("pkey", "Partition by value, such as 0x8001 (default: the one at index 0).").StringVar(&f.pkey)
	cmd.Flag("qp-timeout", "Exponent of the QP's local ACK timeout, 4.096 µs × 2^n (default 14, Soft-RoCE 16).").Short('u').IntVar(&f.spec.Timeout)
	f.orNone(cmd.Flag("retry-count", "How often the QP sends again what is not acknowledged (default 6; 7 never gives up on some drivers)."), &f.spec.Retries)
	f.orNone(cmd.Flag("rnr-retry", "How often the QP sends again where the peer had no receive (default 7: for ever)."), &f.spec.RNRRetry)
}

// shape makes the spec that the flags ask for, and refuses what can't work. What depends on the port is settled by it; nil: not known yet.
func (f *probeFlags) shape(port *probe.LocalPort) (probe.Spec, error) {
	for _, settle := range f.none {
		settle()
	}
	s := f.spec
	s.Name, s.Kind, s.Transport, s.Op = "probe", probe.Kind(f.kind), verbs.Transport(f.transport), verbs.Op(f.op)
	s.Memory.StrictOrdering = !f.relaxed
	if f.gpu >= 0 {
		s.Memory.GPU = &f.gpu
	}
	if err := f.parse(&s); err != nil {
		return s, err
	}
	if err := f.pingFlags(&s); err != nil {
		return s, err
	}
	if f.allSizes {
		if f.sizes != "" {
			return s, errors.New("--size and --all-sizes are both set: leave one out")
		}
		s.Sizes = s.AllSizes(port)
	}
	if f.profile != "" {
		mtu := 0
		if port != nil {
			mtu = port.State.ActiveMTU
		}
		var err error
		if s, err = s.Perftest(mtu); err != nil {
			return s, err
		}
	}
	switch {
	case f.pattern == "" && len(f.peers) > 1:
		return s, errors.New("several peers: say --pattern=outcast or --pattern=incast, or name one")
	case f.pattern != "" && s.Reverse:
		return s, errors.New("--reverse is --pattern=incast: leave one out")
	case f.pattern != "" && s.Bidirectional:
		return s, errors.New("--pattern has one direction: leave out --bidirectional")
	case f.pattern != "" && (f.out.form == "csv" || f.out.plot != ""):
		return s, errors.New("--pattern writes text or json: leave out --output=csv and --plot")
	}
	s.Reverse = s.Reverse || f.pattern == "incast"
	s = s.WithDefaults()
	s.RawSamples = f.out.samples(s)
	if f.pattern != "" {
		return s, s.ValidateGroup(f.targets())
	}
	return s, s.Validate()
}

// targets are the peers that the flags name.
func (f *probeFlags) targets() []probe.Target {
	out := make([]probe.Target, len(f.peers))
	for i, peer := range f.peers {
		out[i] = probe.Target{Name: peer, Address: peer}
		if _, _, err := net.SplitHostPort(peer); err != nil {
			out[i].Address = net.JoinHostPort(strings.Trim(peer, "[]"), defaultControlPort)
		}
	}
	return out
}

// parse reads the flags that are not plain numbers.
func (f *probeFlags) parse(s *probe.Spec) error {
	var err error
	for part := range strings.SplitSeq(f.sizes, ",") {
		if f.sizes == "" {
			break
		}
		n, err := config.ParseSize(strings.TrimSpace(part))
		if err != nil {
			return fmt.Errorf("--size: %w", err)
		}
		if slices.Contains(s.Sizes, int(n)) {
			return fmt.Errorf("--size: %d is there twice", n)
		}
		s.Sizes = append(s.Sizes, int(n))
	}
	if f.ring != "" {
		n, err := config.ParseSize(f.ring)
		if err != nil {
			return fmt.Errorf("--ring: %w", err)
		}
		s.Memory.Ring = int(n)
	}
	if f.rate != "" {
		if s.RateLimit, err = config.ParseRate(f.rate); err != nil {
			return fmt.Errorf("--rate-limit: %w", err)
		}
	}
	if f.pkey != "" {
		v, err := strconv.ParseUint(f.pkey, 0, 16)
		if err != nil || v&0x7fff == 0 {
			return fmt.Errorf("--pkey: %q is no partition: want a value such as 0x8001, with one of the lower 15 bits set", f.pkey)
		}
		s.PKey = uint16(v)
	}
	if f.cpus != "" {
		if s.CPUs, err = probe.ParseCPUs(f.cpus); err != nil {
			return fmt.Errorf("--cpus: %w", err)
		}
	}
	return nil
}
