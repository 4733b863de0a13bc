// Package verbs drives RDMA devices through libibverbs: what they are, endpoints of connected or datagram queue pairs,
// and timed runs over them.
//
// It is the only package that imports "C". Objects that the NIC or a C loop sees live in C memory and belong to the
// [Endpoint]; a run is one cgo call, whatever it lasts, and ends by its own deadline even if nobody cancels it.
//
// Sizes are bytes, rates bytes per second unless a name says otherwise. Errors are *[OpError] for a verb that failed
// (with its errno) and *[WCError] for a work completion in error.
package verbs
