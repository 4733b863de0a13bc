package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/alecthomas/kingpin/v2"

	"github.com/rdmabenchd/rdmabenchd/pkg/probe"
	probereport "github.com/rdmabenchd/rdmabenchd/pkg/report"
)

// plotSamples is how many samples of a run a picture is drawn from where no file of them was asked for.
const plotSamples = 1 << 20

// probeOutput is where the result of a probe goes: one form on stdout, and files.
type probeOutput struct {
	form      string
	raw, plot string
	files     map[string]*outFile // by flag
}

func (o *probeOutput) flags(cmd *kingpin.CmdClause) {
	cmd.Flag("output", "text, json, csv (a line a run) or hlog (HdrHistogram log; latency and ping only), on stdout.").Default("text").EnumVar(&o.form, "text", "json", "csv", "hlog")
	cmd.Flag("raw-samples", "Write every latency sample to this file, in order: CSV of size_bytes, index, nanoseconds.").PlaceHolder("FILE").StringVar(&o.raw)
	cmd.Flag("plot", "Draw a picture of the figures into this file, .svg or .png.").PlaceHolder("FILE").StringVar(&o.plot)
}

// records reports whether the output is for a machine, which wants a record of a probe that failed too.
func (o *probeOutput) records() bool { return o.form == "json" || o.form == "csv" }

// prepare refuses what can't be written before anything is measured. The spec has defaults.
func (o *probeOutput) prepare(s probe.Spec) error {
	latency := s.Kind == probe.Latency || s.Kind == probe.Ping
	switch {
	case o.form == "hlog" && !latency:
		return fmt.Errorf("--output=hlog: a %s probe has no histogram; use --kind=latency or ping, or another output", s.Kind)
	case o.raw != "" && !latency:
		return fmt.Errorf("--raw-samples: a %s probe takes no latency samples; use --kind=latency or ping", s.Kind)
	case o.plot != "" && plotFormat(o.plot) == "":
		return fmt.Errorf("--plot %s: the name must end in .svg or .png", o.plot)
	case o.raw != "" && filepath.Clean(o.raw) == filepath.Clean(o.plot):
		return fmt.Errorf("--raw-samples and --plot both name %s: use two files", o.raw)
	}
	o.files = map[string]*outFile{}
	for flag, name := range map[string]string{"--raw-samples": o.raw, "--plot": o.plot} {
		if name == "" {
			continue
		}
		f, err := openOut(name)
		if err != nil {
			o.discard()
			return fmt.Errorf("%s: %w", flag, err)
		}
		o.files[flag] = f
	}
	return nil
}

// samples is how many latency samples of each run are to be kept. The spec has defaults.
func (o *probeOutput) samples(s probe.Spec) int {
	n := 0
	switch {
	case s.Kind != probe.Latency && s.Kind != probe.Ping:
	case o.raw != "":
		n = probe.MaxRawSamples
	case o.plot != "":
		n = plotSamples
	}
	if s.Iterations > 0 {
		n = min(n, s.Iterations)
	}
	return n
}

func plotFormat(name string) string {
	format := strings.ToLower(strings.TrimPrefix(filepath.Ext(name), "."))
	if slices.Contains([]string{probereport.SVG, probereport.PNG}, format) {
		return format
	}
	return ""
}

// write puts out a result. Files are only written if there are figures; else they are left as they were.
func (o *probeOutput) write(stdout, stderr io.Writer, spec probe.Spec, r *probe.Result) error {
	switch {
	case o.form == "json":
		enc := json.NewEncoder(stdout)
		enc.SetIndent("", "  ")
		if err := enc.Encode(r); err != nil {
			return err
		}
	case o.form == "csv":
		if err := probereport.CSV(stdout, r); err != nil {
			return err
		}
	case !r.Usable():
	case o.form == "hlog":
		if err := probereport.HLog(stdout, r); err != nil {
			return err
		}
	default:
		printResult(stdout, spec, r)
	}
	if !r.Usable() {
		return nil
	}
	var errs []error
	if f := o.files["--raw-samples"]; f != nil {
		errs = append(errs, f.write(func(w io.Writer) error { return probereport.RawSamples(w, r) }))
		for _, run := range r.Runs {
			if kept := len(run.Raw); run.Latency != nil && int64(kept) < run.Latency.Samples {
				fmt.Fprintf(stderr, "rdmabenchd: %s holds the first %d of %d samples of %d bytes: there is no room for more\n", o.raw, kept, run.Latency.Samples, run.Size)
			}
		}
	}
	if f := o.files["--plot"]; f != nil {
		errs = append(errs, f.write(func(w io.Writer) error { return probereport.Plot(w, plotFormat(o.plot), r) }))
	}
	return errors.Join(errs...)
}

// discard gives up what was not written.
func (o *probeOutput) discard() {
	for _, f := range o.files {
		f.discard()
	}
}

// outFile is a file that appears as a whole, in place of what had its name, or not at all. A pipe or a terminal is written to as it is.
type outFile struct {
	name string
	f    *os.File // nil: done with
	temp bool     // f is a temporary one beside it
}

// openOut makes sure that a file can be written, without touching it.
func openOut(name string) (*outFile, error) {
	target, err := filepath.EvalSymlinks(name)
	if errors.Is(err, fs.ErrNotExist) {
		target, err = name, nil
	}
	if err != nil {
		return nil, err
	}
	switch info, err := os.Stat(target); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case info.IsDir():
		return nil, fmt.Errorf("%s is a directory: name a file", name)
	default: // also a regular one: where it must not be changed it is not to be replaced either
		f, err := os.OpenFile(target, os.O_WRONLY, 0)
		if err != nil {
			return nil, err
		}
		if !info.Mode().IsRegular() {
			return &outFile{name: target, f: f}, nil
		}
		f.Close()
	}
	f, err := os.CreateTemp(filepath.Dir(target), "."+filepath.Base(target)+".*")
	if err != nil {
		return nil, fmt.Errorf("%s can't be written: %w", name, err)
	}
	return &outFile{name: target, f: f, temp: true}, nil
}

func (o *outFile) write(content func(io.Writer) error) (err error) {
	defer o.discard()
	w := bufio.NewWriterSize(o.f, 1<<16)
	if err = content(w); err == nil {
		err = w.Flush()
	}
	if err == nil && o.temp {
		err = o.f.Chmod(mode(o.name))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", o.name, err)
	}
	f := o.f
	if err := f.Close(); err != nil {
		return err
	}
	if o.temp {
		if err := os.Rename(f.Name(), o.name); err != nil {
			return err
		}
	}
	o.f = nil
	return nil
}

// mode is what a file has that is replaced, else what a new one has: temporary files are their owner's alone.
func mode(name string) fs.FileMode {
	if info, err := os.Stat(name); err == nil {
		return info.Mode().Perm()
	}
	return 0o644
}

func (o *outFile) discard() {
	if o.f == nil {
		return
	}
	o.f.Close()
	if o.temp {
		os.Remove(o.f.Name())
	}
	o.f = nil
}
