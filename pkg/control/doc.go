// Package control is the channel over which two daemons agree on a session: HTTP and JSON under the prefix /v1/.
//
//	GET    /v1/hello                  whether anybody is there, and who
//	POST   /v1/sessions               open: admission, and the endpoints of both ends
//	POST   /v1/sessions/{id}/run      ready the responder for one message size, its loop started where the op needs one
//	POST   /v1/sessions/{id}/mark     barrier: the warm-up is over, counters are read
//	POST   /v1/sessions/{id}/finish   barrier: the timed part is over, counters are read, figures come back
//	POST   /v1/sessions/{id}/renew    keep the lease
//	DELETE /v1/sessions/{id}          free everything now
//	POST   /v1/sweeps                 run this node's rows of a sweep
//	GET    /v1/rows                   how far that is, and the rows once it is over; or the last results of all probes
//
// A session is a lease on the responder's port. It lives as long as its initiator calls within the lease; one that falls
// silent frees everything by itself. Each message is bounded, and every number in it is checked against its range
// ([OpenRequest.Validate], [OpenReply.Validate], [FinishReply.Validate]) before it reaches a verb or a metric.
//
// A call that is refused is answered with {"error": {"reason", "detail", "retry_after"}}: 400 for a request that can't be, 403
// for a stranger, 404 for what this version does not have, 409 for what the responder does not want, 413 for too much.
//
// The URL prefix is the major version. Within it fields are only added; what a daemon does not know in a message is ignored,
// what it does not know in a value (an op, a transport) it refuses as version-skew.
package control
