package probe

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// How a session's queue pairs are connected by rdma_cm: the responder listens on its port's address and says where; the
// initiator dials, and names the session. All else of a session stays with the control channel.

// cmWait is how long the handshake of a session may take.
const cmWait = 10 * time.Second

// inspectIWARP finds the addresses that rdma_cm can connect from; they stand in for GIDs, which iWARP does not have.
func (p *LocalPort) inspectIWARP() {
	p.iwarp = true
	addrs, err := p.dev.CMAddrs(p.Port)
	switch {
	case err != nil:
		p.Reason, p.Detail = TransportUnsupported, fmt.Sprintf("%s is iWARP, whose queue pairs only rdma_cm can connect: %s", p.Device, err)
	case len(addrs) == 0:
		p.Reason, p.Detail = NoGID, fmt.Sprintf("%s port %d: its interface has no IP address that rdma_cm could connect from: assign one", p.Device, p.Port)
	default:
		p.GIDs = addrs
	}
}

// iwarpLacks refuses what iWARP has no opcode for, or no flow control.
func (p *LocalPort) iwarpLacks(kind Kind, transport verbs.Transport, op verbs.Op) *failure {
	switch {
	case !p.iwarp:
		return nil
	case transport != verbs.RC:
		return fail(StageSetup, TransportUnsupported, ScopeLocal, "%s is iWARP, which has no %s: use rc", p.Device, transport)
	case op == verbs.WriteImm || op == verbs.FetchAdd || op == verbs.CmpSwap:
		return fail(StageSetup, OpUnsupported, ScopeLocal, "%s is iWARP, which has no %s: use write, read or send", p.Device, op)
	case op == verbs.Send && kind != Latency:
		return fail(StageSetup, OpUnsupported, ScopeLocal,
			"%s is iWARP, where a send that finds no receive ends the connection, and nothing here holds the sender back: use write or read", p.Device)
	}
	return nil
}

// cmAddr is the port's address for rdma_cm: that of its GID in use, or, on InfiniBand, the first of IPoIB that like agrees
// with in family; like may be invalid.
func (p *LocalPort) cmAddr(gid *verbs.GID, like netip.Addr) (verbs.CMAddr, *failure) {
	if gid != nil && gid.Type != verbs.GIDIB {
		return verbs.CMAddr{Addr: gid.Addr, IfIndex: gid.IfIndex}, nil
	}
	addrs, err := p.dev.CMAddrs(p.Port)
	if err != nil {
		return verbs.CMAddr{}, setupFailure(err)
	}
	for _, a := range addrs {
		if !like.IsValid() || a.Addr.Is4() == like.Is4() {
			return verbs.CMAddr{Addr: a.Addr, IfIndex: a.IfIndex}, nil
		}
	}
	return verbs.CMAddr{}, fail(StageSetup, NoGID, ScopeLocal, "%s port %d has no IP address that rdma_cm could use: on InfiniBand it takes IPoIB", p.Device, p.Port)
}

// sessionKey is what an initiator names in rdma_cm's private data.
func sessionKey(id string) (key [16]byte) {
	_, _ = hex.Decode(key[:], []byte(id)) // of 16 bytes: OpenRequest.Validate
	return key
}

// dial connects the initiator's queue pairs to where the responder listens.
func (s *initiation) dial(ctx context.Context) *failure {
	var own *verbs.GID
	for i := range s.port.GIDs {
		if s.port.GIDs[i].Index == s.gidIndex {
			own = &s.port.GIDs[i]
		}
	}
	to := verbs.CMAddr{Addr: s.rep.RDMACM.Addr(), Port: s.rep.RDMACM.Port()}
	from, f := s.port.cmAddr(own, to.Addr)
	if f != nil {
		return f
	}
	ctx, cancel := context.WithTimeout(ctx, cmWait)
	defer cancel()
	err := s.ep.DialCM(ctx, from, to, sessionKey(s.req.ID), peerAddress(&s.rep.Endpoint, s.rep.GID), path(s.req, s.gidIndex, s.rep.MTU, &s.req.Endpoint, &s.rep.Endpoint))
	if err == nil {
		return nil
	}
	f = setupFailure(err)
	if own := s.i.Node.recheck(s.port, s.gidIndex); own != nil {
		own.stage, own.detail = StageSetup, fmt.Sprintf("%s (%s: %s)", own.detail, f.reason, f.detail)
		return own
	}
	return f
}

// listen waits for the initiator's connections in the background; connected has what came of it.
func (s *response) listen(rep *control.OpenReply, own *verbs.GID, theirs *control.GID) *failure {
	at, f := s.port.cmAddr(own, netip.Addr{})
	if f != nil {
		return f
	}
	port, err := s.ep.ListenCM(at, sessionKey(s.req.ID))
	if err != nil {
		return setupFailure(err)
	}
	at.Port = port
	where := netip.AddrPortFrom(at.Addr.WithZone(""), port)
	rep.RDMACM = &where
	ep, peer, p := s.ep, peerAddress(&s.req.Endpoint, theirs), path(s.req, s.gid, rep.MTU, &rep.Endpoint, &s.req.Endpoint)
	s.cm = make(chan error, 1)
	go func(out chan<- error) {
		ctx, cancel := context.WithTimeout(s.ctx, cmWait)
		defer cancel()
		out <- ep.AcceptCM(ctx, at, peer, p)
	}(s.cm)
	return nil
}

// connected waits until this end's queue pairs are connected, if rdma_cm does it: the initiator's word that its own are may be
// ahead of the last message of the handshake.
func (s *response) connected() error {
	if s.cm == nil {
		return nil
	}
	err := <-s.cm
	s.cm <- err // for the next run
	if err != nil {
		return setupFailure(err).toControl()
	}
	return nil
}

// cmReason finds the reason behind a handshake of rdma_cm that failed.
func cmReason(e *verbs.CMError) Reason {
	switch {
	case errors.Is(e, syscall.ECONNREFUSED), errors.Is(e, syscall.ECONNRESET):
		return Refused
	case errors.Is(e, syscall.ETIMEDOUT), errors.Is(e, syscall.EHOSTUNREACH), errors.Is(e, syscall.ENETUNREACH):
		return Unreachable
	case errors.Is(e, syscall.EADDRNOTAVAIL), errors.Is(e, syscall.ENODEV):
		return GIDMismatch
	case errors.Is(e, syscall.EACCES), errors.Is(e, syscall.EPERM):
		return Permission
	case errors.Is(e, syscall.EOPNOTSUPP), errors.Is(e, syscall.ENOSYS):
		return TransportUnsupported
	}
	return ResourceLimit
}
