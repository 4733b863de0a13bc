// Package report turns a probe's Result into what other programs and people read: CSV, HdrHistogram logs, raw samples and pictures.
// docs/output.md describes each of them.
package report
