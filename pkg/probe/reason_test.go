package probe

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// declared lists the values of every constant of a type in a source file, in order. An empty type stands for constants whose
// name begins with prefix.
func declared(t *testing.T, file, typ, prefix string) []string {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, d := range f.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		for _, s := range g.Specs {
			v := s.(*ast.ValueSpec)
			id, _ := v.Type.(*ast.Ident)
			if (id == nil) != (typ == "") || id != nil && id.Name != typ || !strings.HasPrefix(v.Names[0].Name, prefix) {
				continue
			}
			lit, ok := v.Values[0].(*ast.BasicLit)
			if !ok {
				t.Fatalf("%s: %s is no literal", file, v.Names[0].Name)
			}
			word, err := strconv.Unquote(lit.Value)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, word)
		}
	}
	if len(out) == 0 {
		t.Fatalf("%s declares no %s", file, typ+prefix)
	}
	return out
}

func words[T ~string](list []T) []string {
	out := make([]string, len(list))
	for i, w := range list {
		out[i] = string(w)
	}
	return out
}

// The lists hold every word once: metrics that must exist before the first run are made from them.
func TestListsAreClosed(t *testing.T) {
	for _, tt := range []struct {
		typ  string
		list []string
	}{
		{"Outcome", words(Outcomes)},
		{"Reason", words(Reasons)},
		{"Taint", words(Taints)},
	} {
		want := slices.Sorted(slices.Values(declared(t, "reason.go", tt.typ, "")))
		if diff := cmp.Diff(want, slices.Sorted(slices.Values(tt.list))); diff != "" {
			t.Errorf("%s (-declared +listed):\n%s", tt.typ, diff)
		}
		if unique := slices.Compact(slices.Clone(want)); len(unique) != len(want) {
			t.Errorf("%s: a word is declared twice in %v", tt.typ, want)
		}
	}
	for _, r := range SkipReasons {
		if !slices.Contains(Reasons, r) {
			t.Errorf("%s is a reason to skip, but no reason", r)
		}
	}
}

// Words become label values and are typed by people.
func TestWordsAreWords(t *testing.T) {
	word := regexp.MustCompile(`^[a-z]+(-[a-z]+)*$`)
	for _, list := range [][]string{words(Outcomes), words(Reasons), words(Taints), declared(t, "reason.go", "Stage", ""), declared(t, "reason.go", "Scope", "")} {
		for _, w := range list {
			if !word.MatchString(w) {
				t.Errorf("%q", w)
			}
		}
	}
}

// The control channel gives reasons without importing this package: they must be words of the list all the same.
func TestControlsReasonsAreReasons(t *testing.T) {
	for _, r := range declared(t, "../control/wire.go", "", "Reason") {
		if !slices.Contains(Reasons, Reason(r)) {
			t.Errorf("%q is not in the list", r)
		}
	}
}

var (
	docSection = regexp.MustCompile(`(?m)^## (.+)$`)
	docEntry   = regexp.MustCompile("(?m)^### `(.+)`$")
)

// docs/reasons.md explains each word of each list in the order of the code, and no other.
func TestDocsExplainEveryWord(t *testing.T) {
	text, err := os.ReadFile("../../docs/reasons.md")
	if err != nil {
		t.Fatal(err)
	}
	explained := map[string][]string{} // by section
	sections := docSection.FindAllStringSubmatchIndex(string(text), -1)
	for i, s := range sections {
		end := len(text)
		if i+1 < len(sections) {
			end = sections[i+1][0]
		}
		name, body := string(text[s[2]:s[3]]), string(text[s[1]:end])
		entries := docEntry.FindAllStringSubmatchIndex(body, -1)
		for j, e := range entries {
			stop := len(body)
			if j+1 < len(entries) {
				stop = entries[j+1][0]
			}
			word, paragraph := body[e[2]:e[3]], strings.TrimSpace(body[e[1]:stop])
			if len(paragraph) < 50 || !strings.HasSuffix(paragraph, ".") {
				t.Errorf("%s: %s is hardly explained: %q", name, word, paragraph)
			}
			explained[name] = append(explained[name], word)
		}
	}
	all := words(Reasons)
	at := func(r Reason) int { return slices.Index(all, string(r)) }
	want := map[string][]string{
		"Outcomes": words(Outcomes), "Stages": declared(t, "reason.go", "Stage", ""), "Scopes": declared(t, "reason.go", "Scope", ""), "Taints": words(Taints),
		"Reasons of this node": all[:at(DNS)], "Reasons while connecting": all[at(DNS):at(Timeout)], "Reasons of the data path": all[at(Timeout):at(BusyPort)],
		"Reasons for a skip": words(SkipReasons),
	}
	if diff := cmp.Diff(want, explained); diff != "" {
		t.Errorf("docs/reasons.md (-code +docs):\n%s", diff)
	}

	// The table of classes.
	classes := map[string]string{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\|.*\\| `([a-z-]+)` \\|$").FindAllStringSubmatch(string(text), -1) {
		classes[m[1]] = m[2]
	}
	taints := map[string]string{}
	for _, s := range signals {
		for _, c := range s.classes {
			taints[string(c)] = string(s.taint)
		}
	}
	if diff := cmp.Diff(taints, classes); diff != "" {
		t.Errorf("classes of counters (-code +docs):\n%s", diff)
	}
}

// A word whose paragraph says "Reserved" is one that no code gives yet, and the other way round.
func TestReservedWordsAreNotGiven(t *testing.T) {
	text, err := os.ReadFile("../../docs/reasons.md")
	if err != nil {
		t.Fatal(err)
	}
	given := wordsGiven(t)
	for _, entry := range strings.Split(string(text), "\n### ")[1:] {
		heading, paragraph, _ := strings.Cut(entry, "\n")
		if i := strings.Index(paragraph, "\n## "); i >= 0 {
			paragraph = paragraph[:i]
		}
		word := strings.Trim(heading, "`")
		if !slices.Contains(Reasons, Reason(word)) && !slices.Contains(Taints, Taint(word)) {
			continue
		}
		taint := slices.Contains(Taints, Taint(word)) && strings.Contains(string(text[strings.Index(string(text), "\n## Taints"):]), entry)
		if reserved := strings.Contains(paragraph, "Reserved"); reserved == given[key(word, taint)] {
			t.Errorf("%s (taint: %t): the docs say reserved: %t, the code gives it: %t", word, taint, reserved, !reserved)
		}
	}
}

func key(word string, taint bool) string {
	if taint {
		return "taint " + word
	}
	return word
}

// wordsGiven finds the words that code gives: as an argument, a value that is assigned or returned, or that of a table. Where
// one is merely compared with, or the key of a table, it is not given.
func wordsGiven(t *testing.T) map[string]bool {
	t.Helper()
	byName := map[string]string{} // of the constant
	collect := func(file, typ, prefix string, taint bool) {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST {
				continue
			}
			for _, s := range g.Specs {
				v := s.(*ast.ValueSpec)
				id, _ := v.Type.(*ast.Ident)
				if (id == nil) != (typ == "") || id != nil && id.Name != typ || !strings.HasPrefix(v.Names[0].Name, prefix) {
					continue
				}
				if word, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value); err == nil {
					byName[v.Names[0].Name] = key(word, taint)
				}
			}
		}
	}
	collect("reason.go", "Reason", "", false)
	collect("reason.go", "Taint", "", true)
	collect("../control/wire.go", "", "Reason", false)

	given := map[string]bool{}
	for _, dir := range []string{".", "../control", "../daemon", "../guard"} {
		files, err := filepath.Glob(dir + "/*.go")
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") || file == "reason.go" {
				continue
			}
			f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			give := func(exprs ...ast.Expr) {
				for _, e := range exprs {
					if conversion, ok := e.(*ast.CallExpr); ok && len(conversion.Args) == 1 {
						e = conversion.Args[0]
					}
					if sel, ok := e.(*ast.SelectorExpr); ok {
						e = sel.Sel
					}
					if id, ok := e.(*ast.Ident); ok && byName[id.Name] != "" {
						given[byName[id.Name]] = true
					}
				}
			}
			ast.Inspect(f, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.CallExpr:
					give(n.Args...)
				case *ast.AssignStmt:
					give(n.Rhs...)
				case *ast.ReturnStmt:
					give(n.Results...)
				case *ast.KeyValueExpr:
					give(n.Value)
				case *ast.CompositeLit:
					give(n.Elts...) // a row of a table
				}
				return true
			})
		}
	}
	return given
}
