package main

import (
	"crypto/rand"
	"embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

//go:embed guest
var guestFiles embed.FS

// runInfo is what a lab tells other processes about itself.
type runInfo struct {
	ID      string    `json:"id"`
	PID     int       `json:"pid"`
	Mode    string    `json:"mode"`
	Nodes   int       `json:"nodes"`
	Started time.Time `json:"started"`
	Command []string  `json:"command"`
	Web     []string  `json:"web"` // addresses of the daemons' web ports on the host
}

// runDir is the folder of one lab. Its lock is held by the lab's process as long as that lives,
// so that what a killed one left behind can be told from what is in use.
type runDir struct {
	path string
	id   string
	lock *os.File
}

func runsDir(cache string) string { return filepath.Join(cache, "run") }

// newRunDir makes the folder of a new lab and removes those of labs that were killed.
func newRunDir(cache string) (*runDir, error) {
	dirs, err := filepath.Glob(filepath.Join(runsDir(cache), "*"))
	if err != nil {
		return nil, err
	}
	for _, d := range dirs {
		if st, err := os.Stat(d); err != nil || time.Since(st.ModTime()) < time.Minute {
			continue // too young to have its lock for sure
		}
		if lock, err := tryLock(filepath.Join(d, "lock")); err == nil {
			_ = os.RemoveAll(d) // the next lab tries again
			_ = lock.Close()
		}
	}
	if err := os.MkdirAll(runsDir(cache), 0o700); err != nil {
		return nil, err
	}
	for {
		var b [2]byte
		if _, err := rand.Read(b[:]); err != nil {
			return nil, err
		}
		r := &runDir{id: hex.EncodeToString(b[:])}
		r.path = filepath.Join(runsDir(cache), r.id)
		err := os.Mkdir(r.path, 0o700)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if r.lock, err = tryLock(r.file("lock")); err != nil {
			return nil, err
		}
		return r, nil
	}
}

func (r *runDir) file(name string) string { return filepath.Join(r.path, name) }

func (r *runDir) close() {
	_ = os.RemoveAll(r.path) // the next lab tries again
	_ = r.lock.Close()
}

// tryLock locks path for this process, or fails at once.
func tryLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, &fs.PathError{Op: "lock", Path: path, Err: err}
	}
	return f, nil
}

// writeShare fills the folder that the guest sees, read-only, as /run/lab: its scripts, this
// program as its agent and as the command fault, and env, the settings of this lab.
func (r *runDir) writeShare(env map[string]string) error {
	share := r.file("share")
	for _, d := range []string{"bin", "out"} { // out is a mount point
		if err := os.MkdirAll(filepath.Join(share, d), 0o755); err != nil {
			return err
		}
	}
	for name, mode := range map[string]fs.FileMode{"boot": 0o644, "fleet": 0o644, "node": 0o755} {
		b, err := guestFiles.ReadFile("guest/" + name)
		if err != nil {
			return err
		}
		if name == "node" {
			name = "bin/node"
		}
		if err := os.WriteFile(filepath.Join(share, name), b, mode); err != nil {
			return err
		}
	}
	var b strings.Builder
	for k, v := range env {
		fmt.Fprintf(&b, "%s='%s'\n", k, strings.ReplaceAll(v, "'", `'\''`))
	}
	if err := os.WriteFile(filepath.Join(share, "env"), []byte(b.String()), 0o644); err != nil {
		return err
	}
	if err := os.Symlink("../agent", filepath.Join(share, "bin/fault")); err != nil {
		return err
	}
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer self.Close()
	agent, err := os.OpenFile(filepath.Join(share, "agent"), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	if _, err = io.Copy(agent, self); err != nil {
		_ = agent.Close()
		return err
	}
	return agent.Close()
}

func (r *runDir) writeInfo(info runInfo) error {
	b, err := json.Marshal(info)
	if err != nil {
		return err
	}
	tmp := r.file("info.tmp")
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, r.file("info.json"))
}

// runningLabs lists the labs that serve others now.
func runningLabs(cache string) ([]runInfo, error) {
	files, err := filepath.Glob(filepath.Join(runsDir(cache), "*", "info.json"))
	if err != nil {
		return nil, err
	}
	var labs []runInfo
	for _, f := range files {
		lock, err := tryLock(filepath.Join(filepath.Dir(f), "lock"))
		if err == nil { // its process is gone
			_ = lock.Close()
			continue
		}
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it ended just now
		}
		var info runInfo
		if err := json.Unmarshal(b, &info); err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		labs = append(labs, info)
	}
	return labs, nil
}

// dialLab connects to a running lab: the one with the given id or, without one, the only one.
func dialLab(cache, id string) (net.Conn, error) {
	labs, err := runningLabs(cache)
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, l := range labs {
		if l.ID == id || id == "" {
			ids = append(ids, l.ID)
		}
	}
	switch {
	case len(ids) == 1:
		return net.Dial("unix", filepath.Join(runsDir(cache), ids[0], "sock"))
	case len(ids) > 1:
		return nil, fmt.Errorf("%d labs run (%s): choose one with --lab ID", len(ids), strings.Join(ids, ", "))
	case id != "":
		return nil, fmt.Errorf("no lab %s runs: see the mode list", id)
	}
	return nil, errors.New("no lab runs: start one with the mode run, exec or shell")
}

// relay carries the frames of any number of clients, each of which runs one process, to the agent
// in the guest and back.
type relay struct {
	guest   *wire
	mu      sync.Mutex
	last    uint32
	clients map[uint32]*queue[frame] // nil: the client is gone, its process not yet
	broken  bool
}

func newRelay(guest *wire) *relay { return &relay{guest: guest, clients: map[uint32]*queue[frame]{}} }

// receive hands out what the agent sends until the wire breaks, then lets all clients go.
func (r *relay) receive() {
	for {
		f, err := r.guest.receive()
		r.mu.Lock()
		if err != nil {
			r.broken = true
			for _, q := range r.clients {
				if q != nil {
					q.close()
				}
			}
			r.mu.Unlock()
			return
		}
		q := r.clients[f.id]
		if f.kind == kindExit {
			delete(r.clients, f.id)
		}
		r.mu.Unlock()
		switch {
		case q != nil:
			q.push(f)
			if f.kind == kindExit {
				q.close()
			}
		case f.kind == kindStdout || f.kind == kindStderr:
			r.guest.ack(f.id, f.kind, len(f.payload))
		}
	}
}

// serve carries frames of one client until its process ends or it goes away; the process then
// gets SIGHUP, like one whose terminal was closed.
func (r *relay) serve(conn io.ReadWriteCloser) {
	q := newQueue[frame]()
	r.mu.Lock()
	r.last++
	id := r.last
	if r.broken {
		q.close()
	} else {
		r.clients[id] = q
	}
	r.mu.Unlock()
	client := newWire(conn)
	go func() {
		defer conn.Close()
		for {
			f, ok := q.pop()
			if !ok || client.send(0, f.kind, f.payload) != nil {
				return
			}
		}
	}()
	for {
		f, err := client.receive()
		if err != nil {
			break
		}
		if r.guest.send(id, f.kind, f.payload) != nil {
			break
		}
	}
	r.mu.Lock()
	_, alive := r.clients[id]
	if alive {
		r.clients[id] = nil
	}
	r.mu.Unlock()
	q.close()
	if alive {
		_ = r.guest.send(id, kindSignal, []byte{byte(syscall.SIGHUP)}) // if the guest is gone, so is the process
	}
}

// listen serves other processes on the lab's socket until stop is called.
func (r *relay) listen(path string) (stop func(), err error) {
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("%w (a shorter $RDMABENCH_LAB_CACHE may help)", err)
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go r.serve(conn)
		}
	}()
	return func() { _ = l.Close() }, nil
}
