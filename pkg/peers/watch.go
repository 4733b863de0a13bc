package peers

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	maxWatched = 256                    // directories; files in others are found by looking again and again
	quiet      = 200 * time.Millisecond // between an event and the look that it leads to: writers need time
)

// watch wakes the sources of files when something changes in the directories that lead to them. Watched are directories, not
// files: files are replaced by renaming, and symbolic links to them or to directories on the way (as in Kubernetes's
// ConfigMaps) are swapped. Where nothing can be watched, looks at every 30 s have to do.
func (d *Discovery) watch(ctx context.Context) error {
	complained := false
	for ctx.Err() == nil {
		dirs := d.fileDirs()
		events, end := make(<-chan fsnotify.Event), func() {}
		if len(dirs) > 0 {
			// A watcher is made anew each time: one on a directory that was swapped would hold on to the old one.
			w, err := fsnotify.NewWatcher()
			if err != nil {
				if !complained {
					d.o.Log.Warn("files of peers can't be watched: they are read every 30 s", slog.Any("err", err))
				}
				complained = true
			} else {
				for _, dir := range dirs[:min(len(dirs), maxWatched)] {
					_ = w.Add(dir) // gone again, or unreadable: the look says so
				}
				events, end = w.Events, func() { w.Close() }
			}
		}
		d.wakeFiles() // what changed before the watch began
		d.await(ctx, events, dirs)
		end()
		pause(ctx, quiet)
	}
	return nil
}

// await returns when there is a reason to watch anew.
func (d *Discovery) await(ctx context.Context, events <-chan fsnotify.Event, dirs []string) {
	t := time.NewTicker(filePoll)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.rewatch:
			return
		case <-events:
			return
		case <-t.C:
			if !slices.Equal(dirs, d.fileDirs()) {
				return
			}
		}
	}
}

func (d *Discovery) files() []*source {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(d.sources), func(s *source) bool { return s.dirs == nil })
}

func (d *Discovery) fileDirs() []string {
	var dirs []string
	for _, s := range d.files() {
		dirs = append(dirs, s.dirs()...)
	}
	slices.Sort(dirs)
	return slices.Compact(dirs)
}

func (d *Discovery) wakeFiles() {
	for _, s := range d.files() {
		signal(s.wake)
	}
}
