package counters

import (
	"cmp"
	"math"
	"slices"
	"strings"
)

// Class is what a counter's rise means, whatever its driver calls it.
type Class string

// The classes. Which counters make up a class differs by driver; a driver without one has no
// such class, which is not a class of zero.
const (
	RetransmitLocal Class = "retransmit_local" // this end sent again
	RetransmitPeer  Class = "retransmit_peer"  // this end saw what the peer sent again
	Sequence        Class = "sequence"         // packets missing or out of order, seen or reported
	RNR             Class = "rnr"              // receiver not ready, sent or received
	NoBuffer        Class = "no_buffer"        // arrived with nowhere to go
	Timeout         Class = "timeout"          // an answer came too late
	RetryExhausted  Class = "retry_exhausted"  // a connection died of it
	Congestion      Class = "congestion"       // ECN marks, CNPs, throttling
	Physical        Class = "physical"         // bit errors and lost links
	Pause           Class = "pause"            // link-level flow control, sent or received
	Discard         Class = "discard"          // dropped by the port for want of room
)

// Classes lists every class.
var Classes = []Class{RetransmitLocal, RetransmitPeer, Sequence, RNR, NoBuffer, Timeout, RetryExhausted, Congestion, Physical, Pause, Discard}

// Group is where a counter comes from. The first four are directories of a port in sysfs.
type Group string

// The groups.
const (
	PMA     Group = "counters"      // the IBTA's performance counters
	PMAExt  Group = "counters_ext"  // their 64-bit form, before kernel 4.5
	HW      Group = "hw_counters"   // the driver's own, of the port
	Diag    Group = "diag_counters" // qib
	DevHW   Group = "device"        // the driver's own, of the whole device
	Link    Group = "netdev"        // statistics of the port's netdev
	Ethtool Group = "ethtool"       // of the port's netdev
)

// pmaWidths are the PMA counters in the kernel's order with their width in bits. They stop at
// all ones. Traffic counters have 64 bits where the device supports the extended class.
var pmaWidths = []struct {
	name string
	bits int
}{
	{"symbol_error", 16}, {"link_error_recovery", 8}, {"link_downed", 8}, {"port_rcv_errors", 16},
	{"port_rcv_remote_physical_errors", 16}, {"port_rcv_switch_relay_errors", 16}, {"port_xmit_discards", 16},
	{"port_xmit_constraint_errors", 8}, {"port_rcv_constraint_errors", 8}, {"local_link_integrity_errors", 4},
	{"excessive_buffer_overrun_errors", 4}, {"VL15_dropped", 16}, {"port_xmit_wait", 32},
	{"port_xmit_data", 0}, {"port_rcv_data", 0}, {"port_xmit_packets", 0}, {"port_rcv_packets", 0},
	{"unicast_xmit_packets", 64}, {"unicast_rcv_packets", 64}, {"multicast_xmit_packets", 64}, {"multicast_rcv_packets", 64},
}

// rule makes counters a class. A {n} in a name stands for a number.
type rule struct {
	class Class
	names []string
}

// driver is what the counters of one kernel driver mean. The names are those of its source; where
// a vendor's build of the same driver spells them differently, both are here.
type driver struct {
	rules   []rule   // of HW, Diag and DevHW
	gauges  []string // values that go up and down
	traffic []flow   // beyond the PMA's
	flit    uint64   // bytes in a unit of the PMA's data counters; 0 means 4
	prefix  string   // that newer kernels put before the same names
}

// flow names the counters that sum up to one figure of traffic.
type flow struct {
	figure string
	names  []string
}

// The figures of Port.Normalised.
const (
	TxBytes   = "tx_bytes"
	RxBytes   = "rx_bytes"
	TxPackets = "tx_packets"
	RxPackets = "rx_packets"
)

func own(txBytes, rxBytes, txPackets, rxPackets string) []flow {
	var flows []flow
	for _, f := range []flow{
		{TxBytes, strings.Fields(txBytes)}, {RxBytes, strings.Fields(rxBytes)},
		{TxPackets, strings.Fields(txPackets)}, {RxPackets, strings.Fields(rxPackets)},
	} {
		if len(f.names) > 0 {
			flows = append(flows, f)
		}
	}
	return flows
}

var drivers = map[string]driver{
	"mlx5": {
		prefix: "vport_",
		rules: []rule{
			{RetransmitLocal, []string{"packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err", "roce_adp_retrans"}},
			{RetransmitPeer, []string{"duplicate_request"}},
			{Sequence, []string{"out_of_sequence", "packet_seq_err", "implied_nak_seq_err"}},
			{RNR, []string{"rnr_nak_retry_err"}},
			{NoBuffer, []string{"out_of_buffer"}},
			{Timeout, []string{"local_ack_timeout_err", "roce_adp_retrans_to"}},
			{RetryExhausted, []string{"req_transport_retries_exceeded", "req_rnr_retries_exceeded"}},
			{Congestion, []string{"rp_cnp_handled", "rp_cnp_ignored", "np_ecn_marked_roce_packets", "np_cnp_sent"}},
			{Physical, []string{"rx_icrc_encapsulated"}},
		},
	},
	"mlx4": {
		rules: []rule{
			{RetransmitLocal, []string{"sq_num_oos", "sq_num_to"}},
			{RetransmitPeer, []string{"rq_num_dup"}},
			{Sequence, []string{"rq_num_oos", "sq_num_oos"}},
			{RNR, []string{"sq_num_rnr", "rq_num_rnr"}},
			{Timeout, []string{"sq_num_to"}},
			{RetryExhausted, []string{"sq_num_tree", "sq_num_rree"}},
			{NoBuffer, []string{"rq_num_udsdprd"}},
		},
	},
	"bnxt_re": { // the second half of a line is Broadcom's package
		rules: []rule{
			{RetransmitLocal, []string{"to_retransmits", "seq_err_naks_rcvd", "missing_resp",
				"packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err", "roce_adp_retrans"}},
			{RetransmitPeer, []string{"dup_req", "duplicate_request"}},
			{Sequence, []string{"oos_drop_count", "seq_err_naks_rcvd",
				"out_of_sequence", "packet_seq_err", "implied_nak_seq_err"}},
			{RNR, []string{"rnr_naks_rcvd", "rnr_nak_retry_err"}},
			{NoBuffer, []string{"rx_out_of_buffer", "out_of_buffer"}},
			{Timeout, []string{"to_retransmits", "local_ack_timeout_err"}},
			{RetryExhausted, []string{"max_retry_exceeded"}},
			{Congestion, []string{"rx_roce_discards", "tx_cnp_pkts", "rx_cnp_pkts", "rx_ecn_marked_pkts",
				"np_cnp_sent", "np_cnp_pkts", "rp_cnp_handled", "rp_cnp_ignored", "np_ecn_marked_roce_packets"}},
			{Physical, []string{"rx_roce_errors", "rx_icrc_encapsulated", "tx_roce_errors"}},
		},
		gauges: []string{"active_pds", "active_ahs", "active_qps", "active_rc_qps", "active_ud_qps", "active_srqs",
			"active_cqs", "active_mrs", "active_mws", "watermark_pds", "watermark_ahs", "watermark_qps",
			"watermark_rc_qps", "watermark_ud_qps", "watermark_srqs", "watermark_cqs", "watermark_mrs",
			"watermark_mws", "db_fifo_register"},
		traffic: own("tx_bytes", "rx_bytes", "tx_pkts", "rx_pkts"),
	},
	"irdma": { // the tcp names count in RoCE mode too
		rules: []rule{
			{RetransmitLocal, []string{"tcpRetransSegs", "RetransSegs"}},
			{Sequence, []string{"tcpInProtoErrors", "Nak Sequence Error", "Nak Sequence Error Implied", "Rcvd Out of order packets"}},
			{RNR, []string{"RNR sent", "RNR received"}},
			{NoBuffer, []string{"ip4InDiscards", "ip6InDiscards"}},
			{Timeout, []string{"RTO"}},
			{Congestion, []string{"cnpHandled", "cnpIgnored", "cnpSent", "RxECNMrkd"}},
			{Physical, []string{"CRC errors"}},
		},
		traffic: own("ip4OutOctets ip6OutOctets", "ip4InOctets ip6InOctets", "ip4OutPkts ip6OutPkts", "ip4InPkts ip6InPkts"),
	},
	"hns": { // no signal for anything that is sent again
		rules: []rule{
			{Congestion, []string{"rx_cnp_pkt", "tx_cnp_pkt"}},
			{Physical, []string{"rx_err_pkt", "tx_err_pkt"}},
		},
		traffic: own("", "", "tx_pkt", "rx_pkt"),
	},
	"efa": {
		rules: []rule{
			{RetransmitLocal, []string{"retrans_pkts"}},
			{NoBuffer, []string{"rx_drops"}},
			{Timeout, []string{"retrans_timeout_events"}},
			{RetryExhausted, []string{"unresponsive_remote_events"}},
			{Congestion, []string{"impaired_remote_conn_events"}},
		},
		traffic: own("tx_bytes", "rx_bytes", "tx_pkts", "rx_pkts"),
	},
	"mana": {
		rules: []rule{
			{RetransmitLocal, []string{"requester_timeout", "requester_oos_nak", "requester_implicit_nak", "requester_readresp_psn_mismatch"}},
			{RetransmitPeer, []string{"responder_dup_request", "dup_rx_requests"}},
			{Sequence, []string{"responder_oos", "requester_oos_nak", "requester_implicit_nak"}},
			{RNR, []string{"requester_rnr_nak", "responder_rnr_nak"}},
			{Timeout, []string{"requester_timeout"}},
			{RetryExhausted, []string{"requester_retries_exceeded", "requester_rnr_nak_retries_exceeded"}},
			{Congestion, []string{"received_cnps", "sent_cnps", "received_ecns", "received_cnp_count", "qp_congested_events"}},
		},
		gauges:  []string{"current_rate"},
		traffic: own("tx_bytes", "rx_bytes", "tx_packets", "rx_packets"),
	},
	"erdma": { // the limiter is the cloud's
		rules: []rule{
			{Congestion, []string{"tx_bps_limit_drop_cnt", "rx_bps_limit_drop_cnt", "tx_pps_limit_drop_cnt", "rx_pps_limit_drop_cnt"}},
			{Physical, []string{"tx_disable_drop_cnt", "rx_disable_drop_cnt"}},
		},
		traffic: own("tx_bytes_cnt", "rx_bytes_cnt", "tx_packets_cnt", "rx_packets_cnt"),
	},
	"rxe": {
		rules: []rule{
			{RetransmitLocal, []string{"completer_retry_err", "rcvd_seq_err"}},
			{RetransmitPeer, []string{"duplicate_request"}},
			{Sequence, []string{"out_of_seq_request", "rcvd_seq_err"}},
			{RNR, []string{"rcvd_rnr_err", "send_rnr_err"}},
			{RetryExhausted, []string{"retry_exceeded_err", "retry_rnr_exceeded_err"}},
			{Physical, []string{"link_downed"}},
		},
		traffic: own("", "", "sent_pkts", "rcvd_pkts"),
	},
	"siw": {},
	"hfi1": { // names of 32-bit counters end in ",32"; RcDupRew is spelled so
		flit: 8,
		rules: []rule{
			{RetransmitLocal, []string{"RcResend"}},
			{RetransmitPeer, []string{"RcDupRew"}},
			{Sequence, []string{"RcSeqNak", "SeqNak", "RdmaSeq"}},
			{RNR, []string{"RnrNak"}},
			{NoBuffer, []string{"PktDrop", "RcvHdrOvr{n}"}},
			{Timeout, []string{"RcTimeOut"}},
			{Congestion, []string{"XmitDscd,32", "DcRcvFcn", "DcRcvBcn", "DcMarkFcn"}},
			{Physical, []string{"SwLinkDown,32", "DcTotCrc", "DcTxReplay", "DcRxReplay", "RxICrcErr,32"}},
		},
	},
	"qib": {
		rules: []rule{
			{RetransmitLocal, []string{"rc_resends"}},
			{RetransmitPeer, []string{"rc_dupreq"}},
			{Sequence, []string{"seq_naks", "rc_seqnak", "rdma_seq"}},
			{RNR, []string{"rnr_naks"}},
			{NoBuffer, []string{"pkt_drops"}},
			{Timeout, []string{"rc_timeouts"}},
			{Congestion, []string{"rc_crwaits", "dmawait"}},
		},
	},
	"cxgb4": {
		rules: []rule{
			{RetransmitLocal, []string{"ip4RetransSegs", "ip6RetransSegs"}},
			{Physical, []string{"ip4OutRsts"}},
		},
	},
}

// pmaPhysical holds for every driver that has the PMA group. port_xmit_wait is in no class: it
// counts ticks of a device-specific length, and rises on any busy port.
var pmaPhysical = []string{"symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors",
	"port_rcv_remote_physical_errors", "local_link_integrity_errors", "excessive_buffer_overrun_errors"}

// linkRules are about the link below RDMA, from the PMA and from ethtool. Where a driver counts
// one thing twice, as a total and by priority, one of the two is here.
var linkRules = []rule{
	{Discard, []string{"port_xmit_discards"}},

	// mlx5
	{Pause, []string{"rx_prio{n}_pause", "tx_prio{n}_pause", "rx_global_pause", "tx_global_pause", "tx_pause_storm_warning_events", "tx_pause_storm_error_events"}},
	{Discard, []string{"rx_discards_phy", "tx_discards_phy", "outbound_pci_buffer_overflow"}},
	{Congestion, []string{"rx_prio{n}_marked"}}, // by this NIC, whose own buffers fill
	{Physical, []string{"rx_crc_errors_phy", "rx_symbol_err_phy", "rx_pcs_symbol_err_phy", "link_down_events_phy"}},
	// bnxt_en
	{Pause, []string{"rx_pause_frames", "tx_pause_frames", "rx_pfc_frames", "tx_pfc_frames"}},
	{Discard, []string{"rx_stat_discard"}},
	// qede, which shares bnxt_en's names of pause frames
	{Discard, []string{"brb_discards"}},
	// mlx4_en
	{Pause, []string{"rx_pause_prio_{n}", "tx_pause_prio_{n}", "rx_pause", "tx_pause"}},
	// ice
	{Pause, []string{"rx_priority_{n}_xoff.nic", "tx_priority_{n}_xoff.nic", "link_xoff_rx.nic", "link_xoff_tx.nic"}},
	{Discard, []string{"rx_dropped.nic"}},
	{Physical, []string{"rx_crc_errors.nic", "mac_local_faults.nic", "mac_remote_faults.nic"}},
	// i40e
	{Pause, []string{"port.rx_priority_{n}_xoff_rx", "port.tx_priority_{n}_xoff_tx", "port.link_xoff_rx", "port.link_xoff_tx"}},
	{Discard, []string{"port.rx_discards"}},
	// hns3
	{Pause, []string{"mac_rx_pfc_pri{n}_pkt_num", "mac_tx_pfc_pri{n}_pkt_num", "mac_rx_mac_pause_num", "mac_tx_mac_pause_num"}},
	{Physical, []string{"mac_rx_fcs_err_pkt_num", "mac_rx_bad_pkt_num"}},
}

// softRules add the netdev's own drops, which for a software device are its packets.
var softRules = []rule{
	{Discard, []string{"rx_dropped", "tx_dropped"}},
	{Physical, []string{"rx_errors", "tx_errors"}},
}

// meaning is a driver's table turned around: what each counter means.
type meaning struct {
	driver driver
	own    index // of its own counters
	pma    index
	netdev index // of the netdev's, if RDMA goes through it
	gauges map[string]bool
}

// index finds the classes of a counter by its name, or by its pattern.
type index map[string][]membership

type membership struct {
	class Class
	rank  int // position in the table
}

func indexOf(rules []rule) index {
	ix := make(index)
	for i, r := range rules {
		for j, name := range r.names {
			ix[name] = append(ix[name], membership{r.class, i<<8 | j})
		}
	}
	return ix
}

func (ix index) find(name string) []membership {
	if m := ix[name]; m != nil {
		return m
	}
	return ix[patternOf(name)]
}

var linkIndex = indexOf(linkRules)

// meanings has one entry per driver; "" is for those that the table doesn't know.
var meanings = func() map[string]*meaning {
	all := make(map[string]*meaning)
	for name, d := range drivers {
		m := &meaning{driver: d, own: indexOf(d.rules), gauges: make(map[string]bool)}
		for _, g := range d.gauges {
			m.gauges[g] = true
		}
		all[name] = m
	}
	all[""] = &meaning{}
	for name, m := range all {
		m.pma = indexOf([]rule{{Physical, pmaPhysical}})
		if software(name) {
			m.netdev = indexOf(softRules)
		}
	}
	return all
}()

func meaningOf(driver string) *meaning {
	if m := meanings[driver]; m != nil {
		return m
	}
	return meanings[""]
}

// software reports whether a driver sends its packets through an ordinary netdev.
func software(driver string) bool { return driver == "rxe" || driver == "siw" }

// rdma returns the classes of a counter of the RDMA device.
func (m *meaning) rdma(g Group, name string) []membership {
	switch g {
	case HW, Diag, DevHW:
		if p := m.driver.prefix; p != "" {
			name = strings.TrimPrefix(name, p)
		}
		return m.own.find(name)
	case PMA:
		return m.pma[name]
	}
	return nil
}

// link returns the classes of a counter of the link below.
func (m *meaning) link(g Group, name string) []membership {
	switch g {
	case PMA, Ethtool:
		return linkIndex.find(name)
	case Link:
		return m.netdev[name]
	}
	return nil
}

// gauge reports whether a value goes up and down, so that its difference means nothing.
func (m *meaning) gauge(g Group, name string) bool {
	return (g == HW || g == DevHW) && m.gauges[name]
}

// IsGauge reports whether a driver's counter goes up and down instead of only up.
func IsGauge(driver, counter string) bool { return meaningOf(driver).gauges[counter] }

// ClassSum is a class as it stands at one port.
type ClassSum struct {
	Sum   uint64   `json:"sum"`
	Names []string `json:"names"`
}

// sample is one counter.
type sample struct {
	group Group
	name  string // the driver's own
	value uint64
	full  bool   // all ones: it may have stopped, so the value is "at least"
	key   string // its name in a Delta
}

// sumClasses adds samples up by class, and names them in the order of the table.
func sumClasses(samples []sample, classes func(Group, string) []membership) map[Class]ClassSum {
	type member struct {
		name string
		rank int
	}
	sums := make(map[Class]ClassSum)
	var members map[Class][]member
	for _, s := range samples {
		for _, m := range classes(s.group, s.name) {
			if members == nil {
				members = make(map[Class][]member)
			}
			rank := m.rank
			if s.group != PMA {
				rank += 1 << 20 // the PMA's come first
			}
			members[m.class] = append(members[m.class], member{s.name, rank})
			sums[m.class] = ClassSum{Sum: addSat(sums[m.class].Sum, s.value)}
		}
	}
	for class, list := range members {
		slices.SortFunc(list, func(a, b member) int {
			return cmp.Or(cmp.Compare(a.rank, b.rank), naturalCompare(a.name, b.name))
		})
		sum := sums[class]
		for _, m := range list {
			sum.Names = append(sum.Names, m.name)
		}
		sums[class] = sum
	}
	return sums
}

func addSat(a, b uint64) uint64 {
	if a > math.MaxUint64-b {
		return math.MaxUint64
	}
	return a + b
}

// normalise turns counters into bytes and packets. A figure is missing if the driver has no
// counter for it, and nil if the counter has stopped or can't be told.
func (m *meaning) normalise(find func(Group, string) (value uint64, known, present bool)) map[string]*uint64 {
	figures := make(map[string]*uint64)
	sum := func(figure string, g Group, unit uint64, names ...string) bool {
		var total uint64
		any, all := false, true
		for _, name := range names {
			v, known, present := find(g, name)
			if !present {
				continue
			}
			any = true
			all = all && known && v <= math.MaxUint64/unit && total <= math.MaxUint64-v*unit
			total += v * unit
		}
		if !any {
			return false
		}
		figures[figure] = nil
		if all {
			figures[figure] = &total
		}
		return true
	}
	for _, f := range m.driver.traffic {
		sum(f.figure, HW, 1, f.names...)
	}
	if len(figures) > 0 {
		return figures
	}
	flit := cmp.Or(m.driver.flit, 4)
	for _, f := range []struct {
		figure, name string
		unit         uint64
	}{
		{TxBytes, "port_xmit_data", flit}, {RxBytes, "port_rcv_data", flit},
		{TxPackets, "port_xmit_packets", 1}, {RxPackets, "port_rcv_packets", 1},
	} {
		if !sum(f.figure, PMAExt, f.unit, f.name+"_64") {
			sum(f.figure, PMA, f.unit, f.name)
		}
	}
	return figures
}
