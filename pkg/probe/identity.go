package probe

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/control"
	"github.com/rdmabenchd/rdmabenchd/pkg/verbs"
)

// identityLife is how long the list of devices is taken from memory: whoever may ask may ask often.
const identityLife = 10 * time.Second

// identity remembers what tells this machine from others.
type identity struct {
	mu   sync.Mutex
	last control.Identity
	at   time.Time
}

// hello is what this node says of itself.
func (n *Node) hello() *control.Hello {
	h := &control.Hello{Minor: control.Minor, Instance: n.Instance, Node: n.Name, Identity: n.identify()}
	h.LameDuck = n.paused() != ""
	return h
}

func (n *Node) identify() control.Identity {
	n.identity.mu.Lock()
	defer n.identity.mu.Unlock()
	if !n.identity.at.IsZero() && time.Since(n.identity.at) < identityLife {
		return n.identity.last
	}
	id := control.Identity{Machine: machine("/etc/machine-id")}
	devices, _ := verbs.Devices() // none: they may come yet
	for _, d := range devices {
		if n.Use(d.Name) && d.NodeGUID != 0 {
			id.GUIDs = append(id.GUIDs, fmt.Sprintf("%016x", d.NodeGUID))
		}
	}
	slices.Sort(id.GUIDs)
	id.GUIDs = slices.Compact(id.GUIDs)
	id.GUIDs = id.GUIDs[:min(len(id.GUIDs), control.MaxGIDs)]
	n.identity.last, n.identity.at = id, time.Now()
	return id
}

// machine is a hash of the machine id, which itself must not be given to others: see machine-id(5).
func machine(file string) string {
	id, err := os.ReadFile(file)
	if id = bytes.TrimSpace(id); err != nil || len(id) == 0 {
		return ""
	}
	mac := hmac.New(sha256.New, id)
	_, _ = mac.Write([]byte("rdmabenchd node identity")) // never fails
	return hex.EncodeToString(mac.Sum(nil)[:16])
}
