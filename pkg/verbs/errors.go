package verbs

import (
	"fmt"
	"syscall"
)

// OpError is a verb that failed. Unwrap gives the errno, so errors.Is(err, syscall.ENOMEM) works.
type OpError struct {
	Op     string // what was attempted, such as "create QP"
	Device string
	Errno  syscall.Errno
}

func (e *OpError) Error() string {
	return fmt.Sprintf("%s: %s: %s", e.Device, e.Op, e.Errno.Error())
}

func (e *OpError) Unwrap() error { return e.Errno }

// WCStatus is the status of a work completion (enum ibv_wc_status).
type WCStatus int

// The statuses that callers tell apart.
const (
	WCLocalLength     WCStatus = 1
	WCLocalQPOp       WCStatus = 2
	WCLocalProtection WCStatus = 4
	WCFlushed         WCStatus = 5
	WCLocalAccess     WCStatus = 8
	WCRemoteInvalid   WCStatus = 9
	WCRemoteAccess    WCStatus = 10
	WCRemoteOp        WCStatus = 11
	WCRetryExceeded   WCStatus = 12
	WCRNRExceeded     WCStatus = 13
	WCFatal           WCStatus = 19
)

func (s WCStatus) String() string {
	names := [...]string{
		"success", "local length error", "local QP operation error", "local EEC operation error", "local protection error",
		"work request flushed", "memory window bind error", "bad response", "local access error", "remote invalid request",
		"remote access error", "remote operation error", "transport retry counter exceeded", "RNR retry counter exceeded",
	}
	if int(s) < len(names) && s >= 0 {
		return names[s]
	}
	return fmt.Sprintf("status %d", int(s))
}

// WCError is the first work completion in error of a run.
type WCError struct {
	Status    WCStatus
	VendorErr uint32
}

func (e *WCError) Error() string {
	return fmt.Sprintf("work completion: %s (status %d, vendor 0x%x)", e.Status, int(e.Status), e.VendorErr)
}

// CorruptError is a payload, or an atomic's value, that was not what was sent.
type CorruptError struct {
	Device  string
	QP      int    // index within the endpoint
	Message uint64 // its number on the QP
	Offset  uint64 // byte of the first word that is wrong
	Want    uint64
	Got     uint64
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("%s: message %d of QP %d is corrupt at byte %d: %#x where %#x was sent", e.Device, e.Message, e.QP, e.Offset, e.Got, e.Want)
}
