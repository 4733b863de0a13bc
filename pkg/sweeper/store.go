package sweeper

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rdmabenchd/rdmabenchd/pkg/sweep"
)

// Bounds of what is kept.
const (
	keepReports = 20        // of each sweep, and scope
	keepMemory  = 4         // likewise, without a folder
	maxReport   = 512 << 20 // bytes of a report's file
)

// Store keeps reports as JSON files below a folder, the newest of each sweep; and if the folder can't be used, a few in memory.
type Store struct {
	Dir string // below it sweeps/ and label.json; empty: memory only

	mu     sync.Mutex
	memory map[string]*sweep.Report // by id
}

// Entry is a kept report.
type Entry struct {
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	Fleet   bool      `json:"fleet"`
	Started time.Time `json:"started"`
}

var (
	unsafeName = regexp.MustCompile(`[^A-Za-z0-9.+-]+`)
	idForm     = regexp.MustCompile(`^([A-Za-z0-9.+-]+)_(node|fleet)_(\d{8}T\d{6}Z)$`)
)

const stamp = "20060102T150405Z"

// ID is the name under which a report is kept.
func ID(r *sweep.Report) string {
	scope := "node"
	if r.Fleet {
		scope = "fleet"
	}
	name := unsafeName.ReplaceAllString(r.Name, "-")
	return cmp.Or(strings.TrimLeft(name[:min(len(name), 100)], "."), "sweep") + "_" + scope + "_" + r.Started.UTC().Format(stamp)
}

func parseID(id string) (Entry, bool) {
	m := idForm.FindStringSubmatch(id)
	if m == nil {
		return Entry{}, false
	}
	t, err := time.Parse(stamp, m[3])
	return Entry{ID: id, Name: m[1], Fleet: m[2] == "fleet", Started: t}, err == nil
}

func (s *Store) folder() string { return filepath.Join(s.Dir, "sweeps") }

// Put keeps a report and lets go of the oldest. The error says why it is only in memory.
func (s *Store) Put(r *sweep.Report) (id string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id = ID(r)
	err = errors.New("no folder for reports is set (--storage.path)")
	if s.Dir != "" {
		err = s.write(id, r)
	}
	keep := keepReports
	if err != nil {
		keep = keepMemory
		if s.memory == nil {
			s.memory = map[string]*sweep.Report{}
		}
		s.memory[id] = r
	}
	own, _ := parseID(id)
	n := 0
	for _, e := range s.listLocked() {
		if e.Name != own.Name || e.Fleet != own.Fleet {
			continue
		}
		if n++; n > keep {
			delete(s.memory, e.ID)
			if s.Dir != "" {
				_ = os.Remove(s.file(e.ID)) // gone already, or next time
			}
		}
	}
	return id, err
}

func (s *Store) file(id string) string { return filepath.Join(s.folder(), id+".json") }

func (s *Store) write(id string, r *sweep.Report) error {
	if err := os.MkdirAll(s.folder(), 0o750); err != nil {
		return fmt.Errorf("keep the report of a sweep: %w", err)
	}
	data, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("keep the report of a sweep: %w", err)
	}
	return replace(s.file(id), data)
}

// replace writes a file so that it is there as a whole or not at all.
func replace(name string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(name), ".new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// List returns what is kept, the newest first.
func (s *Store) List() []Entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.listLocked()
}

func (s *Store) listLocked() []Entry {
	out := []Entry{}
	for id := range s.memory {
		if e, ok := parseID(id); ok {
			out = append(out, e)
		}
	}
	if s.Dir != "" {
		files, _ := os.ReadDir(s.folder()) // none yet
		for _, f := range files {
			id, isJSON := strings.CutSuffix(f.Name(), ".json")
			if e, ok := parseID(id); ok && isJSON && f.Type().IsRegular() && s.memory[id] == nil {
				out = append(out, e)
			}
		}
	}
	slices.SortFunc(out, func(a, b Entry) int { return cmp.Or(b.Started.Compare(a.Started), cmp.Compare(a.ID, b.ID)) })
	return out
}

// Get returns a report; [fs.ErrNotExist] if there is none.
func (s *Store) Get(id string) (*sweep.Report, error) {
	if _, ok := parseID(id); !ok {
		return nil, fs.ErrNotExist
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.memory[id]; r != nil {
		return r, nil
	}
	if s.Dir == "" {
		return nil, fs.ErrNotExist
	}
	if info, err := os.Stat(s.file(id)); err != nil {
		return nil, err
	} else if info.Size() > maxReport {
		return nil, fmt.Errorf("%s is larger than %d bytes", s.file(id), maxReport)
	}
	data, err := os.ReadFile(s.file(id))
	if err != nil {
		return nil, err
	}
	r := &sweep.Report{}
	if err := json.Unmarshal(data, r); err != nil {
		return nil, fmt.Errorf("%s: %w", s.file(id), err)
	}
	return r, nil
}

// LastGood returns the newest healthy report of a sweep before a time, or nil.
func (s *Store) LastGood(name string, fleet bool, before time.Time) *sweep.Report {
	want, _ := parseID(ID(&sweep.Report{Name: name, Fleet: fleet}))
	for _, e := range s.List() {
		if e.Name != want.Name || e.Fleet != fleet || !e.Started.Before(before.Truncate(time.Second)) {
			continue
		}
		if r, err := s.Get(e.ID); err == nil && r.Verdict == sweep.Healthy {
			return r
		}
	}
	return nil
}

// Label is what a node was found to perform like when it was accepted.
type Label struct {
	Node     string             `json:"node"`
	Recorded time.Time          `json:"recorded"`
	Sweep    string             `json:"sweep"` // id of the report
	Coverage float64            `json:"coverage"`
	NICs     []sweep.NICReport  `json:"nics"`
	Figures  []sweep.LabelPoint `json:"figures"`
}

// Accept records the label of the node that made the report, which must have been found healthy.
func (s *Store) Accept(r *sweep.Report, now time.Time) (file string, err error) {
	for _, n := range r.Nodes {
		if n.Name != r.By {
			continue
		}
		if n.Verdict != sweep.Healthy || r.Verdict == sweep.Incomplete {
			return "", fmt.Errorf("not accepted: %s is %s in a sweep that is %s", n.Name, n.Verdict, r.Verdict)
		}
		data, err := json.MarshalIndent(Label{Node: r.By, Recorded: now.UTC(), Sweep: ID(r), Coverage: r.Coverage, NICs: n.NICs, Figures: r.Label(r.By)}, "", "  ")
		if err != nil {
			return "", err
		}
		file = filepath.Join(s.Dir, "label.json")
		if s.Dir == "" {
			return "", errors.New("no folder for the label is set (--storage.path)")
		}
		if err := os.MkdirAll(s.Dir, 0o750); err != nil {
			return "", err
		}
		return file, replace(file, append(data, '\n'))
	}
	return "", fmt.Errorf("not accepted: the report says nothing of %s", r.By)
}
