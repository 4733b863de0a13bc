package peers

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// live runs a Discovery on real sources. It ends with the test.
func live(t *testing.T, c Config, o Options) *Discovery {
	t.Helper()
	o.Name = "me"
	d := New(o)
	d.Set(c)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = d.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return d
}

// eventually waits until the names of the active peers are these.
func eventually(t *testing.T, d *Discovery, what, want string) {
	t.Helper()
	var got string
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		var names []string
		for _, p := range d.View().Active() {
			names = append(names, p.Name)
		}
		if got = strings.Join(names, " "); got == want {
			return
		}
	}
	t.Fatalf("%s: peers are %q, want %q", what, got, want)
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func do(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func targets(names ...string) string { return "- targets: [" + strings.Join(names, ", ") + "]\n" }

// Files are followed however they are replaced.
func TestFiles(t *testing.T) {
	dir := t.TempDir()
	p := func(name string) string { return filepath.Join(dir, name) }
	write(t, p("peers/a.yaml"), targets("a"))
	write(t, p("peers/b.json"), `[{"targets": ["b"]}]`)
	d := live(t, Config{Files: []string{"peers/*.yaml", "peers/*.json"}}, Options{Dir: dir})
	eventually(t, d, "at the start", "a b")

	write(t, p("peers/a.yaml"), targets("a", "c"))
	eventually(t, d, "rewritten in place", "a b c")

	write(t, p("peers/.new"), targets("d"))
	do(t, os.Rename(p("peers/.new"), p("peers/a.yaml")))
	eventually(t, d, "replaced by renaming", "b d")

	write(t, p("peers/e.yaml"), targets("e"))
	eventually(t, d, "one more", "b d e")

	write(t, p("peers/a.yaml"), "- targets: [d")
	eventuallyFailing(t, d, 1)
	eventually(t, d, "half written", "b d e")

	write(t, p("peers/a.yaml"), targets("f"))
	eventually(t, d, "written out", "b e f")
	if n := d.Status()["files"].Failing; n != 0 {
		t.Errorf("%d sources fail", n)
	}

	do(t, os.Remove(p("peers/e.yaml")))
	eventually(t, d, "one less", "b f")
	do(t, os.RemoveAll(p("peers")))
	eventuallyFailing(t, d, 2)
	eventually(t, d, "all files are gone", "b f")
}

func eventuallyFailing(t *testing.T, d *Discovery, want int) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if d.Status()["files"].Failing == want {
			return
		}
	}
	t.Fatalf("%+v: want %d to fail", d.Status()["files"], want)
}

// A ConfigMap's files are links to ..data/file, and ..data is a link that is swapped. Links further away are followed as well.
func TestSymlinks(t *testing.T) {
	dir := t.TempDir()
	p := func(name string) string { return filepath.Join(dir, name) }
	swap := func(target, link string) {
		t.Helper()
		do(t, os.Symlink(target, link+".tmp"))
		do(t, os.Rename(link+".tmp", link))
	}
	write(t, p("map/..v1/peers.yaml"), targets("a"))
	write(t, p("map/..v2/peers.yaml"), targets("b"))
	write(t, p("far/v1/peers.yaml"), targets("x"))
	write(t, p("far/v2/peers.yaml"), targets("y"))
	swap("..v1", p("map/..data"))
	swap("..data/peers.yaml", p("map/peers.yaml"))
	swap("v1", p("far/current"))
	swap(p("far/current/peers.yaml"), p("near.yaml"))
	d := live(t, Config{Files: []string{"map/*.yaml", "near.yaml"}}, Options{Dir: dir})
	eventually(t, d, "at the start", "a x")
	swap("..v2", p("map/..data"))
	do(t, os.RemoveAll(p("map/..v1")))
	eventually(t, d, "the ConfigMap was updated", "b x")
	swap("v2", p("far/current"))
	eventually(t, d, "a directory on the way was swapped", "b y")
	write(t, p("far/v2/.new"), targets("z"))
	do(t, os.Rename(p("far/v2/.new"), p("far/v2/peers.yaml")))
	eventually(t, d, "the file at the end was replaced", "b z")
}

// What is no regular file of reasonable size is not waited for.
func TestOddFiles(t *testing.T) {
	dir := t.TempDir()
	do(t, os.Mkdir(filepath.Join(dir, "dir.yaml"), 0o755))
	big, err := os.Create(filepath.Join(dir, "big.yaml"))
	do(t, err)
	do(t, big.Truncate(maxBytes+1))
	do(t, big.Close())
	do(t, unix.Mkfifo(filepath.Join(dir, "pipe.yaml"), 0o600))
	write(t, filepath.Join(dir, "good.yaml"), targets("a"))
	v, reports := Once(t.Context(), Config{Files: []string{"*.yaml"}}, Options{Name: "me", Dir: dir})
	if len(v.Active()) != 1 || len(reports) != 1 || reports[0].Err == nil || IsMissing(reports[0].Err) {
		t.Fatalf("%v %+v", lines(v), reports)
	}
	for _, part := range []string{"dir.yaml: not a regular file", "pipe.yaml: not a regular file", "big.yaml: more than"} {
		if !strings.Contains(reports[0].Err.Error(), part) {
			t.Errorf("nothing tells of %s: %v", part, reports[0].Err)
		}
	}
	if _, reports := Once(t.Context(), Config{Files: []string{"none-*.yaml"}}, Options{Name: "me", Dir: dir}); !IsMissing(reports[0].Err) {
		t.Errorf("no file: %v", reports[0].Err)
	}
}

// nameserver answers from records, which a test may exchange. It gives a resolver that asks it.
func nameserver(t *testing.T) (records *atomic.Pointer[[]string], broken *atomic.Bool, r *net.Resolver) {
	t.Helper()
	records, broken = &atomic.Pointer[[]string]{}, &atomic.Bool{}
	records.Store(&[]string{})
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	do(t, err)
	tcp, err := net.Listen("tcp", conn.LocalAddr().String())
	do(t, err)
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		if broken.Load() {
			m.Rcode = dns.RcodeServerFailure
			_ = w.WriteMsg(m)
			return
		}
		for _, text := range *records.Load() {
			rr, err := dns.NewRR(text)
			if err != nil {
				t.Error(err)
				continue
			}
			if rr.Header().Name == strings.ToLower(q.Question[0].Name) && rr.Header().Rrtype == q.Question[0].Qtype {
				m.Answer = append(m.Answer, rr)
			}
		}
		if len(m.Answer) == 0 {
			m.Rcode = dns.RcodeNameError
		}
		if w.LocalAddr().Network() == "udp" {
			m.Truncate(1232)
		}
		_ = w.WriteMsg(m)
	})
	for _, s := range []*dns.Server{{PacketConn: conn, Handler: handler}, {Listener: tcp, Handler: handler}} {
		var wg sync.WaitGroup
		ready := make(chan struct{})
		s.NotifyStartedFunc = func() { close(ready) }
		wg.Go(func() { _ = s.ActivateAndServe() })
		<-ready
		t.Cleanup(func() {
			_ = s.Shutdown()
			wg.Wait()
		})
	}
	return records, broken, &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, network, conn.LocalAddr().String())
	}}
}

func TestDNS(t *testing.T) {
	records, broken, r := nameserver(t)
	records.Store(&[]string{
		"_rdmabench._tcp.fleet.example. 5 IN SRV 0 0 18516 GPU2.fleet.example.",
		"_rdmabench._tcp.fleet.example. 5 IN SRV 0 0 99 gpu1.fleet.example.",
		"_rdmabench._tcp.fleet.example. 5 IN SRV 0 0 0 .",
		"all.fleet.example. 5 IN A 10.0.0.3", "all.fleet.example. 5 IN A 10.0.0.2", "all.fleet.example. 5 IN AAAA fd00::2",
	})
	srv := DNS{Name: "_rdmabench._tcp.fleet.example", Type: "SRV", Refresh: 50 * time.Millisecond}
	v, reports := Once(t.Context(), Config{DNS: []DNS{
		srv, {Name: "all.fleet.example", Type: "A", Port: 18516}, {Name: "all.fleet.example", Type: "AAAA", Port: 7}, {Name: "none.example", Type: "A", Port: 1},
	}}, Options{Name: "me", Resolver: r})
	want := []string{
		"10.0.0.2:18516 unnamed", "10.0.0.3:18516 unnamed", "[fd00::2]:7 unnamed", "gpu1 gpu1.fleet.example:99 active", "gpu2 gpu2.fleet.example:18516 active",
	}
	if diff := cmp.Diff(want, lines(v)); diff != "" {
		t.Error(diff)
	}
	if reports[3].Err == nil || reports[0].Err != nil {
		t.Errorf("%+v", reports)
	}

	d := live(t, Config{DNS: []DNS{srv}}, Options{Resolver: r})
	eventually(t, d, "at the start", "gpu1 gpu2")
	broken.Store(true)
	for end := time.Now().Add(10 * time.Second); d.Status()["dns"].Failures == 0 && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	eventually(t, d, "the name server fails", "gpu1 gpu2")
	records.Store(&[]string{"_rdmabench._tcp.fleet.example. 5 IN SRV 0 0 18516 gpu3.fleet.example."})
	broken.Store(false)
	eventually(t, d, "other records", "gpu3")
	records.Store(&[]string{})
	for f := d.Status()["dns"].Failures; d.Status()["dns"].Failures < f+2; {
		time.Sleep(10 * time.Millisecond)
	}
	eventually(t, d, "the name is gone", "gpu3")

	many := make([]string, 500) // do not fit into a datagram
	for i := range many {
		many[i] = fmt.Sprintf("_rdmabench._tcp.fleet.example. 5 IN SRV 0 0 18516 n%03d.fleet.example.", i)
	}
	records.Store(&many)
	for end := time.Now().Add(10 * time.Second); len(d.View().Active()) != len(many); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d peers of %d: %+v", len(d.View().Active()), len(many), d.Status()["dns"])
		}
	}
}

func TestHTTP(t *testing.T) {
	var reply atomic.Pointer[http.HandlerFunc]
	answer := func(f http.HandlerFunc) { reply.Store(&f) }
	text := func(s string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, s) }
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { (*reply.Load())(w, r) }))
	t.Cleanup(server.Close)
	h := HTTP{URL: strings.Replace(server.URL, "://", "://user:secret@", 1), Refresh: 50 * time.Millisecond}
	answer(func(w http.ResponseWriter, r *http.Request) {
		if user, pass, _ := r.BasicAuth(); user != "user" || pass != "secret" || r.Header.Get("X-Prometheus-Refresh-Interval-Seconds") != "0.05" {
			w.WriteHeader(http.StatusUnauthorized)
		}
		fmt.Fprint(w, `[{"targets": ["10.0.0.2:18516"], "labels": {"name": "a", "rack": "r1", "__meta_netbox_name": "x"}}]`)
	})
	d := live(t, Config{HTTP: []HTTP{h}}, Options{})
	eventually(t, d, "at the start", "a")
	if diff := cmp.Diff(peer("a", "10.0.0.2:18516", "rack", "r1"), d.View().Active()[0]); diff != "" {
		t.Error(diff)
	}
	for name, bad := range map[string]http.HandlerFunc{
		"500":      func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) },
		"HTML":     text("<html>sign in</html>"),
		"nothing":  text(""),
		"too much": func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, maxBytes+1)) },
		"cut off": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			fmt.Fprint(w, `[{"targets": ["b"]}]`)
		},
	} {
		answer(bad)
		_, reports := Once(t.Context(), Config{HTTP: []HTTP{h}}, Options{Name: "me"})
		if err := reports[0].Err; err == nil || strings.Contains(err.Error()+reports[0].Name, "secret") {
			t.Errorf("%s: %v, %s", name, err, reports[0].Name)
		}
		eventually(t, d, name, "a")
	}
	answer(text(`[]`))
	eventually(t, d, "none any more", "")
}
