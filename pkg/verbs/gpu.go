//go:build dmabuf

package verbs

// #cgo CFLAGS: -DRB_DMABUF
// #cgo LDFLAGS: -ldl
import "C"
