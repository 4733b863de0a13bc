package verbs

import "testing"

// TestMemory looks at what buffers are made of, on whatever this kernel has, and at the ring's geometry.
func TestMemory(t *testing.T) { runC(t, "testdata/memory.c") }

func TestBufferBytes(t *testing.T) {
	for name, tc := range map[string]struct {
		spec EndpointSpec
		want int64
	}{
		"one page a half":      {EndpointSpec{QPs: 1, MaxMsg: 8}, 2 * 4096},
		"room for a GRH":       {EndpointSpec{QPs: 1, MaxMsg: 4096}, 2 * 8192},
		"every QP":             {EndpointSpec{QPs: 16, MaxMsg: 8}, 32 * 4096},
		"a ring, at both ends": {EndpointSpec{QPs: 1, MaxMsg: 8, Memory: Memory{Ring: 64 << 20}}, 2 * (64<<20 + 4096)},
		"a ring is shared out": {EndpointSpec{QPs: 4, MaxMsg: 8, Memory: Memory{Ring: 64 << 20}}, 8 * (16<<20 + 4096)},
		"whole huge pages":     {EndpointSpec{QPs: 1, MaxMsg: 8, Memory: Memory{HugePages: true}}, 2 << 20},
	} {
		if got := tc.spec.BufferBytes(); got != tc.want {
			t.Errorf("%s: %d bytes, want %d", name, got, tc.want)
		}
	}
}
