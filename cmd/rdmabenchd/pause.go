package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/alecthomas/kingpin/v2"

	"github.com/rdmabenchd/rdmabenchd/pkg/config"
	"github.com/rdmabenchd/rdmabenchd/pkg/daemon"
)

const (
	localDaemon   = "http://127.0.0.1:9879"
	daemonTime    = 10 * time.Second
	maxDaemonSays = 1 << 20 // bytes
)

func addPause(app *kingpin.Application, add func(string, func(context.Context, *environment) error)) {
	pause := app.Command("pause", "Stop all probes of this node's daemon, which tells its peers to leave it alone. It lasts over restarts.")
	length := pause.Flag("for", "How long, for instance 2h (default: until resumed).").String()
	pauseAt := webAddress(pause)
	add(pause.FullCommand(), func(ctx context.Context, env *environment) error {
		path := "/-/pause"
		if *length != "" {
			if d, err := config.ParseDuration(*length); err != nil || d <= 0 {
				return &exitError{exitUsage, fmt.Errorf("--for: %q is no time above 0, such as 2h", *length)}
			}
			path += "?for=" + url.QueryEscape(*length)
		}
		return tellDaemon(ctx, env, *pauseAt, path)
	})
	resume := app.Command("resume", "End a pause of this node's daemon.")
	resumeAt := webAddress(resume)
	add(resume.FullCommand(), func(ctx context.Context, env *environment) error { return tellDaemon(ctx, env, *resumeAt, "/-/resume") })

	verdict := app.Command("verdict", "Ask this node's daemon whether its ports were found good of late. Exit code 1 if not: for a scheduler's prolog.")
	age := verdict.Flag("max-age", "How old the newest good heavy probe from each port may be.").Default("4h").String()
	output := verdict.Flag("output", "text or json.").Default("text").Enum("text", "json")
	verdictAt := webAddress(verdict)
	add(verdict.FullCommand(), func(ctx context.Context, env *environment) error {
		if d, err := config.ParseDuration(*age); err != nil || d <= 0 {
			return &exitError{exitUsage, fmt.Errorf("--max-age: %q is no time above 0, such as 4h", *age)}
		}
		body, err := askDaemon(ctx, http.MethodGet, *verdictAt, "/api/v1/verdict?max_age="+url.QueryEscape(*age))
		if err != nil {
			return err
		}
		return tellVerdict(env.stdout, body, *output)
	})
}

func webAddress(cmd *kingpin.CmdClause) *string {
	return cmd.Flag("web.address", "URL of the daemon's web port, with user and password if it wants them.").Default(localDaemon).String()
}

func tellDaemon(ctx context.Context, env *environment, address, path string) error {
	body, err := askDaemon(ctx, http.MethodPost, address, path)
	if err != nil {
		return err
	}
	_, err = env.stdout.Write(body)
	return err
}

// askDaemon calls a daemon's web port and returns what it says.
func askDaemon(ctx context.Context, method, address, path string) ([]byte, error) {
	base, err := url.Parse(strings.TrimSuffix(address, "/"))
	if err != nil || base.Host == "" || base.Scheme != "http" && base.Scheme != "https" {
		return nil, &exitError{exitUsage, fmt.Errorf("--web.address: want a URL such as %s", localDaemon)} // not quoted: it may hold a password
	}
	ctx, cancel := context.WithTimeout(ctx, daemonTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, base.String()+path, nil)
	if err != nil {
		return nil, &exitError{exitUsage, fmt.Errorf("--web.address: want a URL such as %s", localDaemon)}
	}
	res, err := http.DefaultClient.Do(req)
	var failed *url.Error
	if errors.As(err, &failed) {
		err = failed.Err // without the URL
	}
	if err != nil {
		return nil, fmt.Errorf("ask the daemon at %s: %w; does it run, and is this its --web.listen-address?", base.Host, err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, maxDaemonSays))
	if err != nil {
		return nil, fmt.Errorf("ask the daemon at %s: %w", base.Host, err)
	}
	if res.StatusCode != http.StatusOK {
		said := oneLine(string(body[:min(len(body), 500)]))
		return nil, fmt.Errorf("the daemon at %s refused: %s: %s", base.Host, res.Status, said)
	}
	return body, nil
}

func tellVerdict(w io.Writer, body []byte, output string) error {
	var v daemon.Verdict
	if err := json.Unmarshal(body, &v); err != nil {
		return fmt.Errorf("the daemon's answer is no verdict: %w", err)
	}
	if output == "json" {
		if _, err := w.Write(body); err != nil {
			return err
		}
	} else {
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "PORT\tVERIFIED\tAGE\tWHY NOT")
		for _, p := range v.Ports {
			age, verified := "-", "no"
			if p.Age != nil {
				age = (time.Duration(*p.Age) * time.Second).String()
			}
			if p.Verified {
				verified = "yes"
			}
			fmt.Fprintf(t, "%s/%d\t%s\t%s\t%s\n", p.Device, p.Port, verified, age, p.Reason)
		}
		t.Flush()
	}
	if !v.Verified {
		return &exitError{exitFailed, fmt.Errorf("%s is not verified: %s", v.Node, v.Reason)}
	}
	return nil
}
