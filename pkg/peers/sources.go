package peers

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Kinds of sources, in the order of their weight. They are the keys of the configuration.
var Kinds = []string{"static", "files", "dns", "hostlist", "http"}

const (
	filePoll    = 30 * time.Second // between looks at files that no event announced
	vanishAfter = 5 * time.Second  // a file that is gone for so long was removed, not replaced
	lookTimeout = 10 * time.Second // of one look at any source
)

// source is one place where peers are found.
type source struct {
	kind  string
	name  string        // as configured, without secrets
	id    string        // likewise with them, if it has any
	every time.Duration // between two looks; 0: it never changes
	// look asks the source. With an error, what it found besides is used if it found anything.
	look func(context.Context) (found, error)
	dirs func() []string // to watch; nil: none
	soon func() bool     // whether to look again soon; nil: no
	wake chan struct{}

	// The rest is guarded by Discovery.mu.
	found    found
	answered bool // the first look is over
	since    time.Time
	good     time.Time // of the last look without an error
	err      error
}

func (s *source) key() string { return s.kind + " " + s.name + " " + s.id + " " + s.every.String() }

// sources makes the sources of a configuration. What is fixed has its answer already.
func (o *Options) sources(c Config) []*source {
	now := time.Now()
	var out []*source
	add := func(s *source) {
		s.since, s.wake = now, make(chan struct{}, 1)
		out = append(out, s)
	}
	fixed := func(kind, name string, f found, err error) {
		add(&source{kind: kind, name: name, found: f, err: err, answered: true, good: now})
	}
	if len(c.Static) > 0 {
		fixed("static", "", found{peers: c.Static}, nil)
	}
	for _, pattern := range c.Files {
		f := &files{pattern: pattern, own: o.Name, states: map[string]*fileState{}}
		if !filepath.IsAbs(pattern) {
			f.pattern = filepath.Join(o.Dir, pattern)
		}
		add(&source{kind: "files", name: pattern, every: filePoll, look: f.look, dirs: f.dirs, soon: f.waiting})
	}
	for _, d := range c.DNS {
		name := d.Type + " " + d.Name
		if d.Type != "SRV" {
			name += ":" + strconv.Itoa(d.Port)
		}
		add(&source{
			kind: "dns", name: name, every: d.Refresh,
			look: func(ctx context.Context) (found, error) { return o.lookUp(ctx, d) },
		})
	}
	for _, h := range c.Hostlist {
		f, err := o.hosts(h)
		fixed("hostlist", h, f, err)
	}
	for _, h := range c.HTTP {
		add(&source{kind: "http", name: redacted(h.URL), id: h.URL, every: h.Refresh, look: func(ctx context.Context) (found, error) { return o.fetch(ctx, h) }})
	}
	return out
}

// hosts reads one hostlist.
func (o *Options) hosts(list string) (f found, err error) {
	hosts, err := ParseHostlist(list, MaxPeers)
	if err != nil {
		return found{}, err
	}
	for _, h := range hosts {
		address, err := ParseAddress(h, false)
		name := ""
		if err == nil {
			if name = nameOf(hostOf(address), o.Name); !ValidName(name) {
				err = fmt.Errorf("%q can't be a name: %s", name, NameRule)
			}
		}
		if err != nil {
			return found{}, fmt.Errorf("host %q: %w", h, err)
		}
		f.peers = append(f.peers, Peer{Name: name, Address: address})
	}
	return f, nil
}

// CheckHostlist returns why a hostlist can't be used, or nil.
func CheckHostlist(list string) error {
	_, err := (&Options{}).hosts(list)
	return err
}

// ---- DNS ----

func (o *Options) lookUp(ctx context.Context, d DNS) (f found, err error) {
	if d.Type != "SRV" {
		network := "ip4"
		if d.Type == "AAAA" {
			network = "ip6"
		}
		addrs, err := o.Resolver.LookupNetIP(ctx, network, d.Name)
		if err != nil {
			return found{}, err
		}
		for _, a := range addrs {
			f.peers = append(f.peers, Peer{Address: netip.AddrPortFrom(a.Unmap().WithZone(""), uint16(d.Port)).String()})
		}
		slices.SortFunc(f.peers, func(a, b Peer) int { return strings.Compare(a.Address, b.Address) })
		return f, tooMany(len(addrs))
	}
	_, records, err := o.Resolver.LookupSRV(ctx, "", "", d.Name)
	if err != nil && len(records) == 0 {
		return found{}, err
	}
	if err != nil { // some of the answer is no name; the rest is good
		f.problem("%s", err)
	}
	slices.SortFunc(records, func(a, b *net.SRV) int {
		return strings.Compare(a.Target+strconv.Itoa(int(a.Port)), b.Target+strconv.Itoa(int(b.Port)))
	})
	for _, r := range records {
		if r.Target == "." { // RFC 2782: the service is decidedly not available
			continue
		}
		host := strings.ToLower(strings.TrimSuffix(r.Target, "."))
		address, err := ParseAddress(host+":"+strconv.Itoa(int(r.Port)), false)
		if err != nil {
			f.problem("SRV record %s:%d: %s", r.Target, r.Port, err)
			continue
		}
		p := Peer{Name: nameOf(host, o.Name), Address: address}
		if !ValidName(p.Name) {
			f.problem("SRV record %s:%d: %q can't be a name: %s", r.Target, r.Port, p.Name, NameRule)
			continue
		}
		f.peers = append(f.peers, p)
	}
	return f, tooMany(len(records))
}

func tooMany(n int) error {
	if n > MaxPeers {
		return fmt.Errorf("more than %d peers", MaxPeers)
	}
	return nil
}

// ---- HTTP ----

// redacted is a URL without the password in it.
func redacted(s string) string {
	u, err := url.Parse(s)
	if err != nil {
		return "URL"
	}
	return u.Redacted()
}

func (o *Options) fetch(ctx context.Context, h HTTP) (found, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, h.URL, nil)
	if err != nil {
		return found{}, errors.New("not a URL")
	}
	req.Header.Set("Accept", "application/json")
	req.Header.Set("User-Agent", "rdmabenchd")
	req.Header.Set("X-Prometheus-Refresh-Interval-Seconds", strconv.FormatFloat(h.Refresh.Seconds(), 'f', -1, 64))
	resp, err := o.HTTP.Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err // without the URL, which may hold a password
		}
		return found{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return found{}, fmt.Errorf("answered %s", presentable(resp.Status))
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxBytes+1))
	if err != nil {
		return found{}, err
	}
	if len(data) > maxBytes {
		return found{}, fmt.Errorf("answered with more than %d bytes", maxBytes)
	}
	groups, err := parseJSON(data)
	if err != nil {
		return found{}, err
	}
	return collect(groups, o.Name)
}

// ---- files ----

// files are those that match one pattern. Only one goroutine uses it.
type files struct {
	pattern string
	own     string
	states  map[string]*fileState
}

// fileState is the last good content of a file.
type fileState struct {
	sum     [sha256.Size]byte
	known   bool // sum, found and err are of a look at content
	found   found
	err     error
	missing time.Time // since when; zero: it is there
}

var errNoFile = errors.New("no file matches")

// look reads what changed. A file that can't be read, or holds nonsense, keeps what it had; so do all if no file matches any more.
func (f *files) look(context.Context) (found, error) {
	matches, err := filepath.Glob(f.pattern)
	if err != nil {
		return found{}, fmt.Errorf("%s: %w", f.pattern, err)
	}
	var errs []error
	if len(matches) == 0 {
		errs = append(errs, fmt.Errorf("%w %s", errNoFile, f.pattern))
	}
	now := time.Now()
	for path, s := range f.states {
		switch {
		case slices.Contains(matches, path):
			s.missing = time.Time{}
		case s.missing.IsZero():
			s.missing = now
		case len(matches) > 0 && now.Sub(s.missing) >= vanishAfter:
			delete(f.states, path)
		}
	}
	for _, path := range matches {
		s := f.states[path]
		if s == nil {
			s = &fileState{}
			f.states[path] = s
		}
		if err := s.read(path, f.own); err != nil {
			errs = append(errs, err)
		}
	}
	var out found
	for _, path := range slices.Sorted(maps.Keys(f.states)) {
		s := f.states[path]
		out.peers = append(out.peers, s.found.peers...)
		for _, p := range s.found.problems {
			out.problem("%s: %s", path, p)
		}
	}
	if len(out.peers) > MaxPeers {
		return found{}, fmt.Errorf("%s: more than %d targets", f.pattern, MaxPeers)
	}
	return out, errors.Join(errs...)
}

// waiting reports whether a file is missing and it is not certain yet that it is gone.
func (f *files) waiting() bool {
	for _, s := range f.states {
		if !s.missing.IsZero() {
			return true
		}
	}
	return false
}

func (s *fileState) read(path, own string) error {
	data, err := readFile(path)
	if err != nil {
		s.known = false
		return err
	}
	sum := sha256.Sum256(data)
	if s.known && sum == s.sum {
		return s.err
	}
	s.known, s.sum = true, sum
	parse := parseYAML
	if strings.HasSuffix(path, ".json") {
		parse = parseJSON
	}
	groups, err := parse(data)
	var f found
	if err == nil {
		f, err = collect(groups, own)
	}
	if err != nil {
		s.err = fmt.Errorf("%s:%w", path, err)
		return s.err
	}
	s.found, s.err = f, nil
	return nil
}

// readFile reads a regular file, and never waits for anybody to write to a pipe.
func readFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: not a regular file", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxBytes+1))
	if err == nil && len(data) > maxBytes {
		err = fmt.Errorf("%s: more than %d bytes", path, maxBytes)
	}
	return data, err
}

// dirs are the directories in which a change can change what the pattern leads to.
func (f *files) dirs() []string {
	dirs := map[string]bool{}
	base := filepath.Dir(f.pattern)
	if parents, _ := filepath.Glob(base); len(parents) > 0 {
		for _, p := range parents {
			dirs[p] = true
			links(p, dirs)
		}
	}
	matches, _ := filepath.Glob(f.pattern)
	for _, m := range matches {
		links(m, dirs)
	}
	return slices.Sorted(maps.Keys(dirs))
}

// links adds the directory that a path's file really is in, and those of the symbolic links on the way there.
func links(path string, dirs map[string]bool) {
	const most = 40 // as the kernel follows
	path, err := filepath.Abs(path)
	if err != nil {
		return
	}
	for range most {
		next := ""
		for i := 1; i <= len(path) && next == ""; i++ {
			if i < len(path) && path[i] != '/' {
				continue
			}
			target, err := os.Readlink(path[:i])
			if err != nil {
				continue // no link
			}
			dirs[filepath.Dir(path[:i])] = true
			if !filepath.IsAbs(target) {
				target = filepath.Join(filepath.Dir(path[:i]), target)
			}
			next = filepath.Join(target, path[i:])
		}
		if next == "" {
			dirs[filepath.Dir(path)] = true
			return
		}
		path = next
	}
}
