package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"gopkg.in/yaml.v3"
)

const (
	maxErrors = 50        // told of one file
	maxKept   = 1000      // before they are put in order
	maxText   = 1000      // bytes of a message
	maxNodes  = 1_000_000 // looked at, aliases followed: no file that fits needs more
	maxMerge  = 8         // merge keys within merge keys; also ends one that holds itself
)

// Error is one thing wrong with a configuration.
type Error struct {
	File         string
	Line, Column int    // from 1, in characters
	Path         string // of the key, such as probes[0].sizes; empty: the file as a whole
	Message      string // what is wrong, why, and what to do
}

func (e *Error) Error() string {
	where := fmt.Sprintf("%s:%d:%d: ", e.File, e.Line, e.Column)
	if e.Path != "" {
		where += e.Path + ": "
	}
	return where + e.Message
}

// Errors is all that is wrong with a configuration, in the order of the file.
type Errors []*Error

func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, err := range e {
		lines[i] = err.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap lets errors.As find an [Error].
func (e Errors) Unwrap() []error {
	errs := make([]error, len(e))
	for i, err := range e {
		errs[i] = err
	}
	return errs
}

// decoder walks the YAML nodes of one file and collects errors.
type decoder struct {
	file  string
	env   environment
	errs  Errors
	nodes int
}

func (d *decoder) errorf(n *yaml.Node, path, format string, args ...any) {
	if len(d.errs) == maxKept {
		return
	}
	d.errs = append(d.errs, &Error{
		File: d.file, Line: max(1, n.Line), Column: max(1, n.Column),
		Path: presentable(path), Message: presentable(fmt.Sprintf(format, args...)),
	})
}

// presentable makes what may quote the file fit for one line of a log or terminal.
func presentable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return utf8.RuneError
		}
		return r
	}, clip(s, maxText))
}

// clip cuts s after about limit bytes.
func clip(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "…"
}

// result is what there is to tell, or nil: in the order of the file, once, and not endlessly.
func (d *decoder) result() error {
	if len(d.errs) == 0 {
		return nil
	}
	slices.SortStableFunc(d.errs, func(a, b *Error) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	errs := slices.CompactFunc(d.errs, func(a, b *Error) bool { return *a == *b })
	if len(errs) > maxErrors {
		last := *errs[maxErrors]
		last.Path, last.Message = "", "and more errors from here on"
		errs = append(errs[:maxErrors:maxErrors], &last)
	}
	return errs
}

// document parses data into the node of its only document; nil if there is none.
func (d *decoder) document(data []byte) *yaml.Node {
	if len(data) > maxFile {
		d.errorf(&yaml.Node{}, "", "the file is larger than %d bytes; this is not a configuration", maxFile)
		return nil
	}
	data = bytes.TrimPrefix(data, []byte("\ufeff"))
	if !d.checkText(data) {
		return nil
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, second yaml.Node
	if err := decodeNode(dec, &doc); errors.Is(err, io.EOF) {
		return nil
	} else if err != nil {
		d.syntaxError(data, err)
		return nil
	}
	if err := decodeNode(dec, &second); err == nil {
		d.errorf(&second, "", "a second YAML document begins here; put everything into one and remove the ---")
		return nil
	} else if !errors.Is(err, io.EOF) {
		d.syntaxError(data, err)
		return nil
	}
	return doc.Content[0]
}

// decodeNode reads the next document. The library panics on some malformed input.
func decodeNode(dec *yaml.Decoder, n *yaml.Node) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("yaml: %v", r)
		}
	}()
	return dec.Decode(n)
}

// checkText finds what is no text, for which the library has no line number.
func (d *decoder) checkText(data []byte) bool {
	line, column := 1, 1
	for i := 0; i < len(data); {
		r, size := utf8.DecodeRune(data[i:])
		at := &yaml.Node{Line: line, Column: column}
		switch {
		case r == utf8.RuneError && size == 1:
			d.errorf(at, "", "byte 0x%02x is not valid UTF-8; save the file as UTF-8", data[i])
			return false
		case r < ' ' && r != '\t' && r != '\n' && r != '\r' || r == 0x7f:
			d.errorf(at, "", "control character 0x%02x; remove it", r)
			return false
		}
		if column++; r == '\n' {
			line, column = line+1, 1
		}
		i += size
	}
	return true
}

var (
	yamlError = regexp.MustCompile(`^yaml: (?:line ([0-9]+): )?`)
	// yamlParser are the errors of the library's parser, whose lines count from 0; those of its scanner count from 1.
	yamlParser  = regexp.MustCompile(`^did not find expected (<document start>|node content|',' or|'-' indicator|key)`)
	yamlUnknown = regexp.MustCompile(`^unknown anchor '(.*)' referenced$`) // comes without a line
)

// syntaxError tells an error of the YAML parser, which knows the line but not the column.
func (d *decoder) syntaxError(data []byte, err error) {
	text, at := err.Error(), 0
	if m := yamlError.FindStringSubmatch(text); m != nil {
		text = text[len(m[0]):]
		at, _ = strconv.Atoi(m[1])
	}
	if yamlParser.MatchString(text) {
		at++
	}
	lines := strings.Split(string(data), "\n")
	if m := yamlUnknown.FindStringSubmatch(text); m != nil {
		at = 1 + slices.IndexFunc(lines, func(l string) bool { return strings.Contains(l, "*"+m[1]) })
	}
	at = min(max(1, at), len(lines))
	line := lines[at-1]
	indent := line[:len(line)-len(strings.TrimLeft(line, " \t"))]
	column := len(indent) + 1
	if tab := strings.IndexByte(indent, '\t'); tab >= 0 {
		column = tab + 1
		text = "a tab indents this line; YAML wants spaces"
	}
	d.errorf(&yaml.Node{Line: at, Column: column}, "", "not valid YAML: %s", text)
}

// spend counts nodes looked at, which few aliases can multiply without end.
func (d *decoder) spend(nodes int, path string, n *yaml.Node) bool {
	if d.nodes > maxNodes {
		return false // told already
	}
	if d.nodes += nodes; d.nodes > maxNodes {
		d.errorf(n, path, "aliases (*) repeat too much; write it out or use fewer")
		return false
	}
	return true
}

// resolve follows an alias and refuses what is not plain YAML. It returns nil after telling why.
func (d *decoder) resolve(path string, n *yaml.Node) *yaml.Node {
	if !d.spend(1, path, n) {
		return nil
	}
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if n.Style&yaml.TaggedStyle != 0 {
		d.errorf(n, path, "tag %s is not supported; remove it, text needs none", n.Tag)
		return nil
	}
	return n
}

func isNull(n *yaml.Node) bool {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" && n.Style&yaml.TaggedStyle == 0
}

// object is a mapping of which the known keys are taken one by one. Its methods set dst if the
// key is there and right, tell an error if it is there and wrong, and else leave dst alone.
type object struct {
	*decoder
	path   string
	node   *yaml.Node // for errors about what is missing
	keys   []*yaml.Node
	values map[string]*yaml.Node
	known  []string
}

// object opens a mapping; a nil node is an empty one.
func (d *decoder) object(path string, n *yaml.Node) *object {
	o := &object{decoder: d, path: path, node: &yaml.Node{Line: 1, Column: 1}, values: map[string]*yaml.Node{}}
	if n == nil {
		return o
	}
	if n = d.resolve(path, n); n == nil {
		return o
	}
	o.node = n
	if n.Kind != yaml.MappingNode {
		d.errorf(n, path, "%s where keys with values are wanted (key: value)", describe(n))
		return o
	}
	o.add(n, 0)
	return o
}

// add takes the pairs of n. What merge keys bring in yields to what is there already.
func (o *object) add(n *yaml.Node, depth int) {
	if !o.spend(len(n.Content), o.path, n) {
		return
	}
	var merges []*yaml.Node
	own := map[string]*yaml.Node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		if k.Kind != yaml.ScalarNode {
			o.errorf(k, o.path, "%s as a key; keys must be plain words", describe(k))
			continue
		}
		if k.ShortTag() == "!!merge" {
			merges = append(merges, v)
			continue
		}
		if first := own[k.Value]; first != nil {
			o.errorf(k, o.join(k.Value), "the key is there twice, first in line %d; remove one", first.Line)
			continue
		}
		own[k.Value] = k
		if o.values[k.Value] == nil {
			o.keys = append(o.keys, k)
			o.values[k.Value] = v
		}
	}
	for _, m := range merges {
		if m = o.resolve(o.join("<<"), m); m == nil {
			continue
		}
		from := []*yaml.Node{m}
		if m.Kind == yaml.SequenceNode {
			from = m.Content
		}
		for _, f := range from {
			switch f = o.resolve(o.join("<<"), f); {
			case f == nil:
			case f.Kind != yaml.MappingNode:
				o.errorf(f, o.join("<<"), "%s can't be merged; name an anchor that holds keys with values", describe(f))
			case depth == maxMerge:
				o.errorf(f, o.join("<<"), "more than %d merge keys within each other", maxMerge)
			default:
				o.add(f, depth+1)
			}
		}
	}
}

func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "keys with values"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias"
	}
	if n.Value == "" {
		return "nothing"
	}
	return strconv.Quote(n.Value)
}

func (o *object) join(key string) string {
	if o.path == "" {
		return key
	}
	return o.path + "." + key
}

// take returns the value of key, or nil if it has none.
func (o *object) take(key string) *yaml.Node {
	o.known = append(o.known, key)
	if n := o.values[key]; n != nil && !isNull(n) {
		return n
	}
	return nil
}

// has reports whether key has a value.
func (o *object) has(key string) bool { return o.values[key] != nil && !isNull(o.values[key]) }

// at returns where to tell an error about key.
func (o *object) at(key string) *yaml.Node {
	if n := o.values[key]; n != nil {
		return n
	}
	return o.node
}

// done tells of the keys that nobody took. Those in later belong to a later version.
func (o *object) done(later ...string) {
	for _, k := range o.keys {
		switch {
		case slices.Contains(o.known, k.Value), o.path == "" && strings.HasPrefix(k.Value, "x-"):
		case slices.Contains(later, k.Value):
			o.errorf(k, o.join(k.Value), "not supported by this version; remove it")
		default:
			o.errorf(k, o.join(k.Value), "unknown key; %s", suggest(k.Value, o.known))
		}
	}
}

// suggest names the candidate nearest to word, or all if none is near.
func suggest(word string, candidates []string) string {
	best, distance := "", max(2, len(word)/3)+1
	for _, c := range candidates {
		if n := editDistance(strings.ToLower(word), c); n < distance {
			best, distance = c, n
		}
	}
	if best != "" {
		return fmt.Sprintf("did you mean %q?", best)
	}
	sorted := slices.Sorted(slices.Values(candidates))
	return "known are " + strings.Join(sorted, ", ")
}

// editDistance is Levenshtein's, with the swap of two neighbours as one edit.
func editDistance(a, b string) int {
	if len(a) > 64 {
		return math.MaxInt
	}
	var before, last []int
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before, last, row = last, row, make([]int, len(b)+1)
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			row[j+1] = min(last[j]+cost, last[j+1]+1, row[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
	}
	return row[len(b)]
}

// text returns the text of a scalar with variables expanded.
func (d *decoder) text(path string, n *yaml.Node) (string, bool) {
	if n = d.resolve(path, n); n == nil {
		return "", false
	}
	if n.Kind != yaml.ScalarNode {
		d.errorf(n, path, "%s where one value is wanted", describe(n))
		return "", false
	}
	return d.expand(path, n)
}

var variable = regexp.MustCompile(`^\{([A-Za-z_][A-Za-z0-9_]*)\}`)

func (d *decoder) expand(path string, n *yaml.Node) (string, bool) {
	var b strings.Builder
	rest := n.Value
	for {
		i := strings.Index(rest, "${")
		if i < 0 {
			b.WriteString(rest)
			return b.String(), true
		}
		if i > 0 && rest[i-1] == '$' {
			b.WriteString(rest[:i-1] + "${")
			rest = rest[i+2:]
			continue
		}
		b.WriteString(rest[:i])
		m := variable.FindStringSubmatch(rest[i+1:])
		if m == nil {
			d.errorf(n, path, "%q is not a variable; write ${NAME} with letters, digits and _, or $${ for a plain ${", rest[i:])
			return "", false
		}
		v, ok := d.env.lookup(m[1])
		if !ok {
			d.errorf(n, path, "environment variable %s is not set; set it, or write $${ for a plain ${", m[1])
			return "", false
		}
		b.WriteString(v)
		rest = rest[i+1+len(m[0]):]
	}
}

// list returns the entries of a list of at most limit. A list that is there is not nil.
func (o *object) list(key string, limit int) []*yaml.Node {
	n := o.take(key)
	if n == nil {
		return nil
	}
	if n = o.resolve(o.join(key), n); n == nil {
		return nil
	}
	switch {
	case n.Kind != yaml.SequenceNode:
		o.errorf(n, o.join(key), "%s where a list is wanted ([a, b], or each entry on a line after a dash)", describe(n))
		return nil
	case len(n.Content) > limit:
		o.errorf(n, o.join(key), "%d entries are too many; at most %d", len(n.Content), limit)
		return nil
	case n.Content == nil:
		return []*yaml.Node{}
	}
	return n.Content
}

func index(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }

// get takes key and returns its text.
func (o *object) get(key string) (string, *yaml.Node, bool) {
	n := o.take(key)
	if n == nil {
		return "", nil, false
	}
	s, ok := o.text(o.join(key), n)
	return s, n, ok
}

var (
	plainInteger = regexp.MustCompile(`^(0|-?[1-9][0-9]*)$`)
	plainNumber  = regexp.MustCompile(`^(0|[1-9][0-9]*)(\.[0-9]+)?$`)
)

// integer wants lo to hi; why, if not empty, is the reason for these bounds.
func (o *object) integer(key string, lo, hi int, why string, dst *int) {
	s, n, ok := o.get(key)
	if !ok {
		return
	}
	if !plainInteger.MatchString(s) {
		o.errorf(n, o.join(key), "%q is not a whole number; write plain decimal digits without leading zero or unit", s)
		return
	}
	v, err := strconv.Atoi(s)
	if err != nil || v < lo || v > hi {
		o.errorf(n, o.join(key), "%s is out of range%s; use %d to %d", s, because(why), lo, hi)
		return
	}
	*dst = v
}

func because(why string) string {
	if why == "" {
		return ""
	}
	return ": " + why
}

// share reads a number from 0 to 1.
func (o *object) share(key string, dst *float64) {
	s, n, ok := o.get(key)
	if !ok {
		return
	}
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || !plainNumber.MatchString(s) || v > 1 {
		o.errorf(n, o.join(key), "%q is not a share; write a number from 0 to 1, such as 0.05", clip(s, maxName))
		return
	}
	*dst = v
}

func (o *object) duration(key string, lo, hi time.Duration, dst *time.Duration) {
	s, n, ok := o.get(key)
	if !ok {
		return
	}
	v, err := ParseDuration(s)
	switch {
	case err != nil:
		o.errorf(n, o.join(key), "%s", err)
	case v < lo || v > hi:
		o.errorf(n, o.join(key), "%s is out of range; use %s to %s", s, formatDuration(lo), formatDuration(hi))
	default:
		*dst = v
	}
}

// sizeOf parses a size of lo to hi bytes.
func (d *decoder) sizeOf(path string, n *yaml.Node, lo, hi int64) (int64, bool) {
	s, ok := d.text(path, n)
	if !ok {
		return 0, false
	}
	v, err := ParseSize(s)
	switch {
	case err != nil:
		d.errorf(n, path, "%s", err)
	case v < lo || v > hi:
		d.errorf(n, path, "%s is out of range; use %s to %s", s, formatSize(lo), formatSize(hi))
	default:
		return v, true
	}
	return 0, false
}

func (o *object) boolean(key string, dst *bool) {
	s, n, ok := o.get(key)
	if !ok {
		return
	}
	switch s {
	case "true", "yes", "on":
		*dst = true
	case "false", "no", "off":
		*dst = false
	default:
		o.errorf(n, o.join(key), "%q is neither true nor false", s)
	}
}

// word takes key, whose value must be one of words. Those in later belong to a later version.
func word[T ~string](o *object, key string, words, later []T, dst *T) {
	s, n, ok := o.get(key)
	switch {
	case !ok:
	case slices.Contains(words, T(s)):
		*dst = T(s)
	case slices.Contains(later, T(s)):
		o.errorf(n, o.join(key), "%q is not supported by this version; use %s", s, anyOf(words))
	default:
		plain := make([]string, len(words))
		for i, w := range words {
			plain[i] = string(w)
		}
		o.errorf(n, o.join(key), "unknown %s %q; %s", key, s, suggest(s, plain))
	}
}

func anyOf[T ~string](words []T) string {
	text := string(words[0])
	for i, w := range words[1:] {
		if i == len(words)-2 {
			text += " or " + string(w)
		} else {
			text += ", " + string(w)
		}
	}
	return text
}
