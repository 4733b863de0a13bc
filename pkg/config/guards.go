package config

import (
	"path/filepath"
	"strconv"

	"github.com/rdmabenchd/rdmabenchd/pkg/guard"
)

const (
	maxWindows    = 64
	maxArguments  = 64
	maxConcurrent = 64
	minBudget     = 1 << 20 // bytes a day: less is a slip, no heavy probe gets by with it
	maxBudget     = 1 << 60
)

func (d *decoder) readGuards(o *object, c *Config) {
	g := &c.Guards
	told := len(o.errs)
	o.share("max_utilization", &g.MaxUtilization)
	if o.has("max_utilization") && g.MaxUtilization == 0 && len(o.errs) == told {
		o.errorf(o.at("max_utilization"), o.join("max_utilization"), "0 would let no heavy probe run, for there is always some traffic; use for instance 0.05, or leave it out for no limit")
	}
	o.boolean("abort_on_traffic", &g.AbortOnTraffic)
	if g.AbortOnTraffic && !o.has("max_utilization") {
		o.errorf(o.at("abort_on_traffic"), o.join("abort_on_traffic"), "how much traffic is too much is not set; set guards.max_utilization, for instance 0.05")
	}
	b := o.sub("budget")
	b.size("bytes_per_day", minBudget, maxBudget, &g.BytesPerDay)
	b.integer("concurrent", 1, maxConcurrent, "heavy probes of this node at a time", &g.Concurrent)
	b.done()
	for i, n := range o.list("blackout", maxWindows) {
		at := index(o.join("blackout"), i)
		s, ok := o.text(at, n)
		if !ok {
			continue
		}
		w, err := guard.ParseWindow(s)
		if err != nil {
			o.errorf(n, at, "%s", err)
			continue
		}
		g.Blackout = append(g.Blackout, w)
	}
	for i, n := range o.list("command", maxArguments) {
		at := index(o.join("command"), i)
		s, ok := o.text(at, n)
		if !ok {
			continue
		}
		if i == 0 && !filepath.IsAbs(s) {
			o.errorf(n, at, "%q is no absolute path; a daemon has no PATH to rely on, and there is no shell unless you name one (/bin/sh, -c, ...)", clip(s, maxName))
		}
		g.Command = append(g.Command, s)
	}
	if o.has("command") && len(g.Command) == 0 {
		o.errorf(o.at("command"), o.join("command"), "an empty list is no command; name a program with its absolute path, or leave the key out")
	}
	o.done()
}

func effectiveGuards(g Guards) tree {
	m := mapping()
	if g.MaxUtilization > 0 {
		m.add("max_utilization", scalar(strconv.FormatFloat(g.MaxUtilization, 'f', -1, 64)), "abort_on_traffic", g.AbortOnTraffic)
	}
	budget := mapping()
	if g.BytesPerDay > 0 {
		budget.add("bytes_per_day", formatSize(g.BytesPerDay))
	}
	if g.Concurrent > 0 {
		budget.add("concurrent", g.Concurrent)
	}
	if len(budget.node.Content) > 0 {
		m.add("budget", budget.flow())
	}
	if len(g.Blackout) > 0 {
		windows := []string{}
		for _, w := range g.Blackout {
			windows = append(windows, w.String())
		}
		m.add("blackout", windows)
	}
	if len(g.Command) > 0 {
		m.add("command", g.Command)
	}
	return m
}
