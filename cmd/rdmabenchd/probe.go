package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/alecthomas/kingpin/v2"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/daemon"
	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

const defaultControlPort = "18516"

type probeFlags struct {
	peer, device, output string
	port, gid            int
	kind, transport, op  string
	size                 string
	allSizes             bool
	ring                 string
	relaxed              bool
	gpu                  int
	spec                 probe.Spec
}

func addProbe(app *kingpin.Application, add func(string, func(context.Context, *environment) error)) {
	f := &probeFlags{}
	cmd := app.Command("probe", "Probe a peer once. Flags have perftest's letters where they mean the same. The peer runs `rdmabenchd respond` or the daemon.")
	cmd.Arg("peer", "Host or host:port of the peer's control channel (default port "+defaultControlPort+").").Required().StringVar(&f.peer)
	cmd.Flag("kind", "What to measure: latency, bandwidth, message-rate or ping.").Default("latency").EnumVar(&f.kind, "latency", "bandwidth", "message-rate", "ping")
	cmd.Flag("op", "Verb: write, read or send.").Default("write").EnumVar(&f.op, "write", "read", "send")
	cmd.Flag("transport", "Transport: rc.").Short('c').Default("rc").EnumVar(&f.transport, "rc")
	cmd.Flag("device", "Device to probe from (default: the first usable one).").Short('d').StringVar(&f.device)
	cmd.Flag("port", "Port of the device (default: its first usable one).").Short('i').IntVar(&f.port)
	cmd.Flag("gid-index", "GID table index (default: chosen by content, to match the peer).").Short('x').Default("-1").IntVar(&f.gid)
	cmd.Flag("size", "Message size in bytes, also as 64KiB (default 8 for latency and message rate, 64KiB for bandwidth).").Short('s').StringVar(&f.size)
	cmd.Flag("all-sizes", "All powers of two from 2 bytes to 8 MiB.").Short('a').BoolVar(&f.allSizes)
	cmd.Flag("iterations", "Timed messages per QP (default 1000 for latency, 10 for ping, else 5000).").Short('n').IntVar(&f.spec.Iterations)
	cmd.Flag("interval", "Time from one ping to the next (default 10ms).").DurationVar(&f.spec.Gap)
	cmd.Flag("duration", "Time to measure for, such as 5s, instead of a number of iterations.").Short('D').DurationVar(&f.spec.Duration)
	cmd.Flag("warmup", "Untimed messages per QP first; -1 for none (default 100 or fewer for latency, one tx depth for bandwidth).").IntVar(&f.spec.Warmup)
	cmd.Flag("tx-depth", "Outstanding sends per QP (default 128; latency 16).").Short('t').IntVar(&f.spec.TxDepth)
	cmd.Flag("rx-depth", "Posted receives per QP (default 512; latency 16).").Short('r').IntVar(&f.spec.RxDepth)
	cmd.Flag("qps", "Queue pairs.").Short('q').IntVar(&f.spec.QPs)
	cmd.Flag("cq-mod", "One completion per so many sends.").Short('Q').IntVar(&f.spec.CQMod)
	cmd.Flag("post-list", "Work requests per post.").Short('l').IntVar(&f.spec.PostList)
	cmd.Flag("inline", "Bytes of inline data to ask the device for.").Short('I').IntVar(&f.spec.Inline)
	cmd.Flag("rdma-cm", "Connect by rdma_cm instead of an exchange of queue pair addresses; on iWARP always.").Short('R').BoolVar(&f.spec.RDMACM)
	cmd.Flag("huge-pages", "Take the buffers from huge pages, at both ends, where there are any.").BoolVar(&f.spec.Memory.HugePages)
	cmd.Flag("ring", "Bytes that successive messages of a bandwidth or message-rate probe walk through at each end, such as 64MiB: above the size of the last-level cache it takes them to DRAM (default: each QP's stay in one place).").StringVar(&f.ring)
	cmd.Flag("relaxed-ordering", "Register memory with relaxed ordering where the devices take it; never for write latency, which polls it.").Default("true").BoolVar(&f.relaxed)
	cmd.Flag("gpu", "CUDA's number of the GPU whose memory this end uses, in a binary built with -tags dmabuf.").Default("-1").IntVar(&f.gpu)
	cmd.Flag("mtu", "Path MTU in bytes (default: the smaller of both ports').").Short('m').IntVar(&f.spec.MTU)
	cmd.Flag("service-level", "Service level.").Short('S').IntVar(&f.spec.ServiceLevel)
	cmd.Flag("traffic-class", "Traffic class of the GRH: DSCP << 2.").IntVar(&f.spec.TrafficClass)
	cmd.Flag("flow-label", "Flow label of the GRH.").IntVar(&f.spec.FlowLabel)
	cmd.Flag("deadline", "Time for the whole probe.").DurationVar(&f.spec.Deadline)
	cmd.Flag("wait", "How long to wait for a port that another probe uses, here or there.").DurationVar(&f.spec.Wait)
	cmd.Flag("output", "text or json.").Default("text").EnumVar(&f.output, "text", "json")
	add(cmd.FullCommand(), f.run)
}

func (f *probeFlags) run(ctx context.Context, env *environment) error {
	spec := f.spec
	spec.Name, spec.Kind, spec.Transport, spec.Op = "probe", probe.Kind(f.kind), verbs.Transport(f.transport), verbs.Op(f.op)
	switch {
	case f.allSizes && f.size != "":
		return &exitError{exitUsage, errors.New("--size and --all-sizes are both set: leave one out")}
	case f.allSizes:
		for s := 2; s <= 8<<20; s *= 2 {
			spec.Sizes = append(spec.Sizes, s)
		}
	case f.size != "":
		n, err := config.ParseSize(f.size)
		if err != nil {
			return &exitError{exitUsage, fmt.Errorf("--size: %w", err)}
		}
		spec.Sizes = []int{int(n)}
	}
	spec.Memory.StrictOrdering = !f.relaxed
	if f.gpu >= 0 {
		spec.Memory.GPU = &f.gpu
	}
	if f.ring != "" {
		n, err := config.ParseSize(f.ring)
		if err != nil {
			return &exitError{exitUsage, fmt.Errorf("--ring: %w", err)}
		}
		spec.Memory.Ring = int(n)
	}
	if err := pingFlags(&spec); err != nil {
		return &exitError{exitUsage, err}
	}
	spec = spec.WithDefaults()
	if err := spec.Validate(); err != nil {
		return &exitError{exitUsage, err}
	}
	addr := f.peer
	if _, _, err := net.SplitHostPort(addr); err != nil {
		addr = net.JoinHostPort(strings.Trim(addr, "[]"), defaultControlPort)
	}
	log := env.logger()
	node := oneShotNode(log, func(string) bool { return true }, f.gid)
	defer node.Close()
	watch := daemon.NewPortWatch(node, node.Use, slog.New(slog.DiscardHandler)) // lets a device go that an administrator removes
	watching, stop := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() { _ = watch.Run(watching) })
	defer done.Wait()
	defer stop()
	device, port, pickErr := f.pick(node)
	if pickErr != nil && f.output != "json" {
		return pickErr
	}
	client := control.NewClient()
	defer client.CloseIdle()
	i := &probe.Initiator{Node: node, Client: client}
	if isTerminal(env.stderr) && f.output == "text" {
		i.OnProgress = func(p probe.Progress) { printProgress(env.stderr, p) }
	}
	r := i.Probe(ctx, spec, probe.Target{Name: f.peer, Address: addr}, device, port)
	if i.OnProgress != nil {
		fmt.Fprint(env.stderr, "\r\033[K")
	}
	if f.output == "json" {
		enc := json.NewEncoder(env.stdout)
		enc.SetIndent("", "  ")
		if err := enc.Encode(r); err != nil {
			return err
		}
	} else if r.Usable() {
		printResult(env.stdout, spec, r)
	}
	switch {
	case r.Usable():
		return nil
	case pickErr != nil:
		return pickErr // the same in a few words, and its exit code
	}
	code := exitFailed
	if *r.Scope == probe.ScopeLocal && noDevice[*r.Reason] {
		code = exitNoDevice
	}
	return &exitError{code, fmt.Errorf("probe of %s %s at stage %s: %s (%s): %s", r.Peer, r.Outcome, *r.Stage, *r.Reason, *r.Scope, oneLine(*r.Detail))}
}

// noDevice are the reasons for which nothing on this node can be used.
var noDevice = map[probe.Reason]bool{
	probe.NoRDMA: true, probe.NoDevice: true, probe.NoCharDevice: true, probe.ProviderMissing: true, probe.PortDown: true, probe.PortInit: true,
	probe.NoGID: true, probe.GIDNotAssigned: true, probe.Permission: true, probe.DeviceRemoved: true, probe.TransportUnsupported: true,
}

// pick finds the port to probe from: what the flags name, else the first that is usable. With an error it names the port
// that was wanted, if any, so that a result can say the same.
func (f *probeFlags) pick(n *probe.Node) (device string, port int, err error) {
	ports, err := n.Ports()
	if err != nil {
		return "", 0, &exitError{exitNoDevice, err}
	}
	device, port = f.device, max(f.port, 1)
	var names []string
	for _, p := range ports {
		names = append(names, p.Key())
		if f.device != "" && p.Device != f.device || f.port != 0 && p.Port != f.port {
			continue
		}
		if p.Reason == "" {
			return p.Device, p.Port, nil
		}
		if err == nil {
			device, port, err = p.Device, p.Port, fmt.Errorf("%s: %s", p.Reason, p.Detail)
		}
	}
	switch {
	case err != nil:
		return device, port, &exitError{exitNoDevice, err}
	case len(ports) == 0, f.device == "" && f.port == 0:
		return device, port, anyUsable(n)
	}
	what := "device " + f.device
	if f.port != 0 {
		what = strings.TrimSpace(what + fmt.Sprintf(" port %d", f.port))
	}
	return device, port, &exitError{exitUsage, fmt.Errorf("%s is not there: this node has %s", what, strings.Join(names, ", "))}
}

func printProgress(w io.Writer, p probe.Progress) {
	rate := float64(p.Done) / p.Elapsed.Seconds()
	if p.Total > 0 {
		fmt.Fprintf(w, "\r\033[K%d bytes: %d of %d messages, %.0f/s, %.1f MiB/s", p.Size, p.Done, p.Total, rate, rate*float64(p.Size)/(1<<20))
		return
	}
	fmt.Fprintf(w, "\r\033[K%d bytes: %d messages in %s, %.0f/s, %.1f MiB/s", p.Size, p.Done, p.Elapsed.Round(100*time.Millisecond), rate, rate*float64(p.Size)/(1<<20))
}

// printResult prints a table that a perftest user reads at once: its units, its definitions.
func printResult(w io.Writer, spec probe.Spec, r *probe.Result) {
	if r.Kind == probe.Ping {
		printPing(w, r)
		return
	}
	gid := "none"
	if r.GIDIndex != nil {
		gid = fmt.Sprint(*r.GIDIndex)
	}
	fmt.Fprintf(w, "%s %s %s: %s port %d -> %s %s port %d, %d QP, MTU %d, GID index %s, tx depth %d",
		strings.ToUpper(string(r.Transport)), strings.ToUpper(string(r.Op)), r.Kind, r.Device, r.Port, r.Peer, *r.PeerDev, *r.PeerPort, r.QPs, *r.MTU, gid,
		spec.TxDepth)
	if r.Kind != probe.Latency {
		fmt.Fprintf(w, ", CQ moderation %d, post list %d", spec.CQMod, spec.PostList)
	}
	fmt.Fprint(w, "\n\n")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	if r.Kind == probe.Latency {
		measure := probe.HalfRTT
		if len(r.Runs) > 0 && r.Runs[0].Latency != nil {
			measure = r.Runs[0].Latency.Measure
		}
		fmt.Fprintf(t, "#bytes\t#iterations\tt_min[us]\tt_p50[us]\tt_p90[us]\tt_p99[us]\tt_p99.9[us]\tt_max[us]\tt_avg[us]\tt_stdev[us]\tmeasure: %s\t\n", measure)
		for _, run := range r.Runs {
			l := run.Latency
			if l == nil {
				continue
			}
			fmt.Fprintf(t, "%d\t%d\t%.2f\t%s\t%s\t%s\t%s\t%.2f\t%.2f\t%.2f\t\t\n", run.Size, run.Iterations, l.Min*1e6, micros(l.P50), micros(l.P90), micros(l.P99), micros(l.P999), l.Max*1e6, l.Mean*1e6, l.Stddev*1e6)
		}
	} else {
		fmt.Fprint(t, "#bytes\t#iterations\tBW min[MiB/s]\tBW average[MiB/s]\tBW max[MiB/s]\tBW average[Gb/s]\tMsgRate[Mpps]\t\n")
		for _, run := range r.Runs {
			b := run.Bandwidth
			if b == nil {
				continue
			}
			fmt.Fprintf(t, "%d\t%d\t%s\t%.2f\t%s\t%.3f\t%.6f\t\n", run.Size, run.Iterations, mebi(b.Min), b.BytesPerSecond/(1<<20), mebi(b.Max), b.BytesPerSecond*8/1e9, *run.MessageRate/1e6)
		}
	}
	t.Flush()
	fmt.Fprintf(w, "\nmemory: %s; of the peer: %s\n", memoryText(r.Memory), memoryText(r.PeerMemory))
	fmt.Fprintf(w, "result: %s\n", r.Outcome)
	for _, d := range r.TaintLog {
		fmt.Fprintf(w, "  %s: %s\n", d.Taint, oneLine(d.String()))
	}
	blind := r.CannotTell()
	for _, side := range []string{"local", "remote"} {
		if slices.Contains(blind[side], string(probe.TaintRetransmit)) {
			fmt.Fprintf(w, "  the %s device can't tell whether packets were sent again\n", side)
		}
	}
}

// memoryText is an end's memory in a few words.
func memoryText(m *control.MemoryGot) string {
	if m == nil {
		return "not told"
	}
	text := m.Kind
	if m.NUMANode != nil {
		text += fmt.Sprintf(" on NUMA node %d", *m.NUMANode)
	}
	if m.RelaxedOrdering {
		text += ", relaxed ordering"
	}
	if m.Ring > 0 {
		text += fmt.Sprintf(", ring of %d bytes", m.Ring)
	}
	return text
}

// micros prints a quantile in µs; one that the samples can't carry is a dash.
func micros(s *float64) string {
	if s == nil {
		return "-"
	}
	return fmt.Sprintf("%.2f", *s*1e6)
}

func mebi(b *float64) string {
	if b == nil {
		return "-"
	}
	return fmt.Sprintf("%.2f", *b/(1<<20))
}
