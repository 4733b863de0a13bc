package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

const faultHelp = `FAULT is one or more of these together; they replace what an earlier call set on the node:

  loss P%                        packets the node sends get lost
  delay D [JITTER]               what it sends arrives later: delay 5ms 1ms
  duplicate P% | corrupt P%      what it sends arrives twice, or damaged
  reorder P%                     these overtake the others; needs delay
  rate R                         it sends no faster than R: 160mbit, 1gbit
  drop-large [BYTES]             IP packets longer than BYTES (1500) get lost, both ways
  blackhole [tx|rx] [roce|tcp]   all packets get lost; or only those it sends or should
                                 receive, or only RoCE v2 or TCP

or one of these alone, which leave the others as they are:

  down | up                      its link
  addr-del | addr-add            its IPv4 address, and with it its GID

or
  clear                          undoes everything
`

// step is a command of a fault. One that undoes what may not be there may fail.
type step struct {
	argv    []string
	mayFail bool
}

// planFault returns the commands which bring about the fault that words describe on a node (its
// cable is the veth pair nI-pI, guest/fleet). What a node sends is shaped at the root of nI; what
// gets lost in either direction is dropped on pI, the switch's end: the node can't know.
func planFault(node int, words []string) ([]step, error) {
	n, p := fmt.Sprintf("n%d", node), fmt.Sprintf("p%d", node)
	must := func(format string, args ...any) step {
		return step{argv: strings.Fields(fmt.Sprintf(format, args...))}
	}
	// The kernel takes the route along when the link goes down or the address goes.
	route := must("ip route replace 10.9.0.0/24 dev %s src 10.9.0.%d table %d", n, node, 100+node)
	up := must("ip link set %s up", n)
	address := must("ip addr replace 10.9.0.%d/24 dev %s", node, n)
	plan := []step{
		{argv: []string{"tc", "qdisc", "del", "dev", n, "root"}, mayFail: true},
		{argv: []string{"tc", "qdisc", "del", "dev", p, "clsact"}, mayFail: true},
	}
	if len(words) == 0 {
		return nil, errors.New("no fault given")
	}
	if len(words) == 1 {
		switch words[0] {
		case "clear":
			return append(plan, up, address, route), nil
		case "down":
			return []step{must("ip link set %s down", n)}, nil
		case "up":
			return []step{up, route}, nil
		case "addr-del":
			return []step{must("ip addr del 10.9.0.%d/24 dev %s", node, n)}, nil
		case "addr-add":
			return []step{address, route}, nil
		}
	}

	// next takes the word that follows if it parses: the optional arguments.
	next := func(parse func(string) (string, error)) (string, bool) {
		if len(words) == 0 {
			return "", false
		}
		s, err := parse(words[0])
		if err != nil {
			return "", false
		}
		words = words[1:]
		return s, true
	}
	var netem, rate string
	var drops []step
	seen := map[string]bool{}
	for len(words) > 0 {
		word := words[0]
		words = words[1:]
		if seen[word] {
			return nil, fmt.Errorf("%s is given twice", word)
		}
		seen[word] = true
		arg := func(parse func(string) (string, error)) (string, error) {
			if len(words) == 0 {
				return "", fmt.Errorf("%s needs a value", word)
			}
			s, err := parse(words[0])
			words = words[1:]
			if err != nil {
				return "", fmt.Errorf("%s: %w", word, err)
			}
			return s, nil
		}
		switch word {
		case "loss", "duplicate", "corrupt", "reorder":
			s, err := arg(parsePercent)
			if err != nil {
				return nil, err
			}
			netem += " " + word + " " + s
		case "delay":
			s, err := arg(parseDelay)
			if err != nil {
				return nil, err
			}
			netem += " delay " + s
			if s, ok := next(parseDelay); ok {
				netem += " " + s
			}
		case "rate":
			s, err := arg(parseRate)
			if err != nil {
				return nil, err
			}
			rate = s
		case "drop-large":
			s, ok := next(parseBytes)
			if !ok {
				s = "1500"
			}
			for _, hook := range []string{"ingress", "egress"} {
				drops = append(drops, step{argv: []string{
					"tc", "filter", "add", "dev", p, hook, "protocol", "ip", "pref", "20", "basic",
					"match", "cmp(u16 at 2 layer network gt " + s + ")", "action", "drop",
				}})
			}
		case "blackhole":
			hooks := []string{"ingress", "egress"}
			if s, ok := next(oneOf("tx", "rx")); ok {
				hooks = map[string][]string{"tx": {"ingress"}, "rx": {"egress"}}[s]
			}
			match := "pref 10 matchall"
			if s, ok := next(oneOf("roce", "tcp")); ok {
				match = map[string]string{
					"roce": "protocol ip pref 10 flower ip_proto udp dst_port 4791",
					"tcp":  "protocol ip pref 10 flower ip_proto tcp",
				}[s]
			}
			for _, hook := range hooks {
				drops = append(drops, must("tc filter add dev %s %s %s action drop", p, hook, match))
			}
		case "clear", "down", "up", "addr-del", "addr-add":
			return nil, fmt.Errorf("%s stands alone", word)
		default:
			return nil, fmt.Errorf("unknown fault %q", word)
		}
	}
	if seen["reorder"] && !seen["delay"] {
		return nil, errors.New("reorder needs a delay that packets can overtake")
	}
	parent := "root handle 1:"
	if netem != "" {
		plan = append(plan, must("tc qdisc add dev %s %s netem limit 100000%s", n, parent, netem))
		parent = "parent 1:1 handle 2:"
	}
	if rate != "" {
		plan = append(plan, must("tc qdisc add dev %s %s tbf %s", n, parent, rate))
	}
	if drops != nil {
		plan = append(plan, must("tc qdisc add dev %s clsact", p))
		plan = append(plan, drops...)
	}
	return plan, nil
}

func parsePercent(s string) (string, error) {
	v, err := strconv.ParseFloat(strings.TrimSuffix(s, "%"), 64)
	if err != nil || !(v >= 0 && v <= 100) {
		return "", fmt.Errorf("%q is no percentage from 0%% to 100%%", s)
	}
	return strconv.FormatFloat(v, 'f', -1, 64) + "%", nil
}

func parseDelay(s string) (string, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 || d > time.Minute {
		return "", fmt.Errorf("%q is no delay such as 5ms, up to 1m", s)
	}
	return fmt.Sprintf("%dus", d.Microseconds()), nil
}

// parseRate returns the arguments of tbf. The queue holds what dozens of QPs of rxe can have under
// way (64 packets each), so a slow link is slow and does not lose packets as well; the bucket
// holds 2 ms' worth, little enough not to show in a bandwidth measured over a second.
func parseRate(s string) (string, error) {
	units := []struct {
		suffix string
		bits   float64
	}{{"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}}
	for _, u := range units {
		if digits, ok := strings.CutSuffix(s, u.suffix); ok {
			v, err := strconv.ParseFloat(digits, 64)
			if bits := v * u.bits; err == nil && bits >= 1e4 && bits <= 1e11 {
				burst := max(16<<10, int(bits/8/500))
				return fmt.Sprintf("rate %.0fbit burst %d limit %d", bits, burst, 16<<20+burst), nil
			}
		}
	}
	return "", fmt.Errorf("%q is no rate such as 160mbit, from 10kbit to 100gbit", s)
}

func parseBytes(s string) (string, error) {
	v, err := strconv.ParseUint(s, 10, 16)
	if err != nil || v < 28 {
		return "", fmt.Errorf("%q is no packet length from 28 to 65535", s)
	}
	return strconv.FormatUint(v, 10), nil
}

func oneOf(words ...string) func(string) (string, error) {
	return func(s string) (string, error) {
		for _, w := range words {
			if s == w {
				return s, nil
			}
		}
		return "", fmt.Errorf("%q is none of %s", s, strings.Join(words, ", "))
	}
}

// faultMain is the command `fault I FAULT...` in the guest.
func faultMain(args []string) int {
	if len(args) == 0 || args[0] == "-h" || args[0] == "--help" {
		fmt.Print("usage: fault I FAULT...\n\nMakes node I of the lab faulty. ", faultHelp)
		return 0
	}
	nodes, err := strconv.Atoi(os.Getenv("LAB_NODES"))
	if err != nil {
		return fail(exitUsage, errors.New("fault: LAB_NODES is not set: this runs inside the lab"))
	}
	node, err := strconv.Atoi(args[0])
	if err != nil || node < 1 || node > nodes {
		return fail(exitUsage, fmt.Errorf("fault: %q is no node: they are 1 to %d", args[0], nodes))
	}
	plan, err := planFault(node, strings.Fields(strings.Join(args[1:], " ")))
	if err != nil {
		return fail(exitUsage, fmt.Errorf("fault: %w; see fault --help", err))
	}
	for _, s := range plan {
		out, err := exec.Command(s.argv[0], s.argv[1:]...).CombinedOutput()
		if err != nil && !s.mayFail {
			return fail(1, fmt.Errorf("fault: %s: %w\n%s", strings.Join(s.argv, " "), err, out))
		}
	}
	return 0
}
