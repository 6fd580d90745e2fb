// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/benchmarks/marked"
)

// document brings a checkout's documentation up to date.
func (r *report) document(root string) error {
	var figures strings.Builder
	fmt.Fprintf(&figures, "%s.\n", r.about())
	for _, t := range r.tables() {
		fmt.Fprintf(&figures, "\n%s", t.markdown())
	}
	if odd := r.odd(); len(odd) > 0 {
		fmt.Fprintf(&figures, "\nTo be noted:\n\n- %s\n", strings.Join(odd, "\n- "))
	}
	svg, err := r.draw()
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(root, "docs", "performance.svg"), svg, 0o644); err != nil {
		return err
	}
	for _, part := range []struct{ file, name, text string }{
		{"docs/performance.md", "bars", r.barTable().markdown()},
		{"docs/performance.md", "figures", figures.String()},
		{"README.md", "summary", r.summary().markdown() + "\n" + r.about() + ".\n"},
	} {
		if err := marked.Replace(filepath.Join(root, part.file), part.name, part.text); err != nil {
			return err
		}
	}
	return nil
}

// summary is a table in a few lines.
func (r *report) summary() table {
	t := table{head: []string{"", "added CPU, µs", "of bare `respond`", "of bare `reverse_proxy`", "commands to Redis"}}
	for _, name := range []string{"memory", "rate", "both", "four", "flood", "sample"} {
		keys := "uniform"
		if name == "flood" {
			keys = "hot"
		}
		s := r.find(scenario{name, "respond", "h1", keys, 0})
		if s == nil {
			continue
		}
		ref := r.find(s.reference())
		row := []string{s.name(), fmt.Sprintf("%.1f", s.against(ref, addedCPU).median), fmt.Sprintf("%.0f %%", 100*s.against(ref, ofRate).median), "", ""}
		if p := r.find(scenario{name, "proxy", "h1", keys, 0}); p != nil {
			row[3] = fmt.Sprintf("%.0f %%", 100*p.against(r.find(p.reference()), ofRate).median)
		}
		if s.Sent != nil {
			row[4] = fmt.Sprintf("%.2f", s.sent())
		}
		t.rows = append(t.rows, row)
	}
	return t
}
