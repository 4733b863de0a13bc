package peers

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"gopkg.in/yaml.v3"
)

// Bounds of what a file or URL may hold.
const (
	maxBytes      = 8 << 20
	maxLabels     = 32
	maxLabelValue = 128
	maxProblems   = 20 // told of one source
)

// nameLabel is the label by which a file names a node. It is no label of the peer.
const nameLabel = "name"

// group is what Prometheus's file_sd and http_sd consist of: targets that share labels.
type group struct {
	Targets []string          `json:"targets" yaml:"targets"`
	Labels  map[string]string `json:"labels" yaml:"labels"`
}

// found is what a source tells.
type found struct {
	peers    []Peer
	problems []string // of single entries, which are left out
}

func (f *found) problem(format string, args ...any) {
	switch len(f.problems) {
	case maxProblems:
	case maxProblems - 1:
		f.problems = append(f.problems, "and more")
	default:
		f.problems = append(f.problems, presentable(fmt.Sprintf(format, args...)))
	}
}

// presentable makes what may quote a file or an answer fit for one line of a log or terminal.
func presentable(s string) string {
	const most = 500
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, s)
}

// parseJSON reads a list of groups.
func parseJSON(data []byte) ([]group, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	var groups []group
	if err := dec.Decode(&groups); err != nil {
		line, column := position(data, dec.InputOffset())
		if s, ok := errors.AsType[*json.SyntaxError](err); ok {
			line, column = position(data, s.Offset-1)
		} else if u, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			line, column = position(data, u.Offset-1)
		}
		return nil, fmt.Errorf("%d:%d: %s; want a list of {targets, labels}", line, column, presentable(err.Error()))
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		line, column := position(data, dec.InputOffset())
		return nil, fmt.Errorf("%d:%d: more after the end of the list", line, column)
	}
	if groups == nil {
		return nil, errors.New("1:1: null; write [] if there are no peers")
	}
	return groups, nil
}

// position is the line and column of an offset, from 1.
func position(data []byte, offset int64) (line, column int) {
	before := data[:min(max(0, offset), int64(len(data)))]
	return 1 + bytes.Count(before, []byte("\n")), len(before) - bytes.LastIndexByte(before, '\n')
}

// parseYAML reads a list of groups.
func parseYAML(data []byte) (groups []group, err error) {
	defer func() { // the library panics on some malformed input
		if r := recover(); r != nil {
			groups, err = nil, fmt.Errorf("1:1: not valid YAML: %v", r)
		}
	}()
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	switch err := dec.Decode(&groups); {
	case errors.Is(err, io.EOF), err == nil && groups == nil:
		return nil, errors.New("1:1: the file is empty; write [] if there are no peers")
	case err != nil:
		return nil, yamlError(err)
	}
	var second any
	if !errors.Is(dec.Decode(&second), io.EOF) {
		return nil, errors.New("1:1: more than one YAML document")
	}
	return groups, nil
}

var yamlLine = regexp.MustCompile(`^line ([0-9]+): `)

// yamlError puts the line in front, where an error of the library has one.
func yamlError(err error) error {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	if t, ok := errors.AsType[*yaml.TypeError](err); ok {
		text = t.Errors[0]
	}
	line := "1"
	if m := yamlLine.FindStringSubmatch(text); m != nil {
		line, text = m[1], text[len(m[0]):]
	}
	return fmt.Errorf("%s:1: %s; want a list of {targets, labels}", line, presentable(text))
}

// collect makes peers of groups. A bad target or label is left out and told: it must not take the good ones along.
func collect(groups []group, own string) (f found, err error) {
	n := 0
	for i, g := range groups {
		if n += len(g.Targets); n > MaxPeers {
			return found{}, fmt.Errorf("more than %d targets", MaxPeers)
		}
		name := g.Labels[nameLabel]
		if name != "" && len(g.Targets) > 1 {
			f.problem("group %d: label %s=%q for %d targets; give each a group of its own", i+1, nameLabel, name, len(g.Targets))
			name = ""
		}
		labels := f.labels(i, g.Labels)
		for _, t := range g.Targets {
			address, err := ParseAddress(t, false)
			if err != nil {
				f.problem("group %d: target %q: %s", i+1, t, err)
				continue
			}
			p := Peer{Name: name, Address: address, Labels: labels}
			if p.Name == "" {
				p.Name = nameOf(hostOf(address), own)
			}
			if !ValidName(p.Name) {
				f.problem("group %d: target %q: %q can't be a name: %s", i+1, t, p.Name, NameRule)
				continue
			}
			f.peers = append(f.peers, p)
		}
	}
	return f, nil
}

// labels keeps the labels of group i that a target has in Prometheus after relabelling: those that begin with __, such as
// __meta_consul_dc, and empty ones are dropped.
func (f *found) labels(i int, in map[string]string) map[string]string {
	var out map[string]string
	for _, k := range slices.Sorted(maps.Keys(in)) {
		v := in[k]
		switch {
		case strings.HasPrefix(k, "__"), k == nameLabel, v == "":
			continue
		case !ValidLabel(k):
			f.problem("group %d: %q can't be the name of a label; use letters, digits and _", i+1, k)
			continue
		case len(v) > maxLabelValue || strings.ContainsFunc(v, func(r rune) bool { return !unicode.IsPrint(r) }):
			f.problem("group %d: label %s: its value is not at most %d bytes of printable text", i+1, k, maxLabelValue)
			continue
		case len(out) == maxLabels:
			f.problem("group %d: more than %d labels", i+1, maxLabels)
			return out
		}
		if out == nil {
			out = map[string]string{}
		}
		out[k] = v
	}
	return out
}
