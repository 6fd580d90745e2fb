// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"text/tabwriter"
	"unicode/utf8"
)

// table is written to a terminal and into the documentation.
type table struct {
	title string
	head  []string // the first column is of words, the others are of numbers
	rows  [][]string
}

func (t table) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n", t.title)
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	rows := append([][]string{t.head}, t.rows...)
	width := 0
	for _, row := range rows {
		width = max(width, utf8.RuneCountInString(row[0]))
	}
	for _, row := range rows {
		fmt.Fprintf(w, "%-*s\t%s\t\n", width, row[0], strings.Join(row[1:], "\t"))
	}
	_ = w.Flush() // to memory
	return b.String()
}

func (t table) markdown() string {
	var b strings.Builder
	if t.title != "" {
		fmt.Fprintf(&b, "%s:\n\n", t.title)
	}
	fmt.Fprintf(&b, "| %s |\n|---|%s\n", strings.Join(t.head, " | "), strings.Repeat("---:|", len(t.head)-1))
	for _, row := range t.rows {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
	}
	return b.String()
}

// tables returns what is shown of a report.
func (r *report) tables() (all []table) {
	for _, t := range []table{
		r.closedTable("As many requests as possible, HTTP/1.1, `respond`", "respond", "h1"),
		r.closedTable("As many requests as possible, HTTP/1.1, `reverse_proxy`", "proxy", "h1"),
		r.closedTable("As many requests as possible, HTTP/2, `respond`", "respond", "h2"),
		r.closedTable("As many requests as possible, HTTP/2, `reverse_proxy`", "proxy", "h2"),
		r.openTable("2,000 requests a second, HTTP/1.1, `respond`", "respond"),
		r.openTable("2,000 requests a second, HTTP/1.1, `reverse_proxy`", "proxy"),
		r.memoryTable(),
	} {
		if len(t.rows) > 0 {
			all = append(all, t)
		}
	}
	return all
}

// name is what the tables call a scenario.
func (s *series) name() string {
	about := s.Setup
	for _, setup := range setups {
		if setup.name == s.Setup {
			about = setup.about
		}
	}
	switch {
	case s.Keys == "zipf":
		about += ", Zipf"
	case s.Keys == "hot" && !strings.HasPrefix(s.Setup, "flood"):
		about += ", one key"
	}
	return about
}

func (r *report) closedTable(title, answer, protocol string) table {
	t := table{title: title, head: []string{
		"", "requests/s", "of bare", "Caddy µs", "Redis µs", "of it scripts", "added µs", "(all rounds)",
		"allocations", "commands", "p50 ms", "p90", "p99", "p99.9", "clients µs",
	}}
	for _, s := range r.Series {
		if s.Answer != answer || s.Protocol != protocol || s.Rate > 0 {
			continue
		}
		row := []string{s.name(), fmt.Sprintf("%.0f", s.over(func(p point) float64 { return p.Rate }).median)}
		ref := r.find(s.reference())
		if s == ref {
			row = append(row, "")
		} else {
			row = append(row, fmt.Sprintf("%.0f %%", 100*s.against(ref, ofRate).median))
		}
		row = append(row,
			fmt.Sprintf("%.1f", s.over(func(p point) float64 { return p.Caddy }).median),
			fmt.Sprintf("%.1f", s.over(func(p point) float64 { return p.Redis }).median),
			fmt.Sprintf("%.1f", s.over(func(p point) float64 { return p.Script }).median))
		if s == ref {
			row = append(row, "", "")
		} else {
			added := s.against(ref, addedCPU)
			row = append(row, fmt.Sprintf("%.1f", added.median), fmt.Sprintf("%.1f to %.1f", added.low, added.high))
		}
		row = append(row, fmt.Sprintf("%.0f", s.over(func(p point) float64 { return p.Allocs }).median))
		if s.Sent == nil {
			row = append(row, "")
		} else {
			row = append(row, fmt.Sprintf("%.2f", s.sent()))
		}
		t.rows = append(t.rows, append(row, append(s.latencies(), fmt.Sprintf("%.1f", s.over(func(p point) float64 { return p.Load }).median))...))
	}
	return t
}

func (s *series) latencies() (row []string) {
	for _, f := range []func(point) float64{
		func(p point) float64 { return p.P50 }, func(p point) float64 { return p.P90 },
		func(p point) float64 { return p.P99 }, func(p point) float64 { return p.P999 },
	} {
		row = append(row, fmt.Sprintf("%.2f", s.over(f).median))
	}
	return row
}

func (r *report) openTable(title, answer string) table {
	t := table{title: title, head: []string{
		"", "p50 ms", "p90", "p99", "p99.9", "added p50", "(all rounds)", "added p99", "(all rounds)", "Caddy µs", "Redis µs",
	}}
	for _, s := range r.Series {
		if s.Answer != answer || s.Rate == 0 {
			continue
		}
		row := append([]string{s.name()}, s.latencies()...)
		if ref := r.find(s.reference()); s == ref {
			row = append(row, "", "", "", "")
		} else {
			p50, p99 := s.against(ref, addedP50), s.against(ref, addedP99)
			row = append(row, fmt.Sprintf("%.2f", p50.median), fmt.Sprintf("%.2f to %.2f", p50.low, p50.high),
				fmt.Sprintf("%.2f", p99.median), fmt.Sprintf("%.2f to %.2f", p99.low, p99.high))
		}
		t.rows = append(t.rows, append(row,
			fmt.Sprintf("%.1f", s.over(func(p point) float64 { return p.Caddy }).median),
			fmt.Sprintf("%.1f", s.over(func(p point) float64 { return p.Redis }).median)))
	}
	return t
}

func (r *report) memoryTable() table {
	t := table{title: "Memory for each user, bytes", head: []string{"", "rate", "concurrency, one request in progress"}}
	if m := r.Memory; m != nil {
		t.rows = [][]string{
			{"Redis (`used_memory`)", fmt.Sprintf("%.0f", m.Redis), fmt.Sprintf("%.0f", m.Lease)},
			{"memory store (heap)", fmt.Sprintf("%.0f", m.Process), fmt.Sprintf("%.0f", m.Slots)},
		}
	}
	return t
}

func (r *report) barTable() table {
	t := table{head: []string{"", "bar", "measured (all rounds)", ""}}
	for _, b := range r.Bars {
		t.rows = append(t.rows, []string{b.About, b.want(), b.got(), b.verdict()})
	}
	return t
}

// about says what ran on what.
func (r *report) about() string {
	m := r.Machine
	return fmt.Sprintf("%s, %d cores, %s; %s, Caddy %s, Redis %s; commit %s; %s; %d rounds of %v for each line",
		m.CPU, m.Cores, m.System, m.Go, m.Caddy, m.Redis, m.Commit, r.When.Format("2006-01-02 15:04 MST"), r.Count, r.Length)
}

// odd tells of what makes a measurement worth less.
func (r *report) odd() (all []string) {
	for _, s := range r.Series {
		if n := s.over(func(p point) float64 { return p.FailedOpen }).high; n > 0 {
			all = append(all, fmt.Sprintf("%s: in one round %.2f %% of the requests passed because Redis did not answer in time", s, 100*n))
		}
		if n := s.over(func(p point) float64 { return p.Other }).high; n > 0 {
			all = append(all, fmt.Sprintf("%s: in one round %.3f %% of the responses were neither 200 nor 429", s, 100*n))
		}
		if late := s.over(func(p point) float64 { return p.Late }); late.median > 1 {
			all = append(all, fmt.Sprintf("%s: the 99th percentile of requests was sent %.1f ms late, by the clients", s, late.median))
		}
	}
	return all
}

// text is the report for a terminal.
func (r *report) text() string {
	var b strings.Builder
	fmt.Fprintln(&b, r.about())
	for _, t := range r.tables() {
		fmt.Fprintf(&b, "\n%s", strings.ReplaceAll(t.text(), "`", ""))
	}
	bars := r.barTable()
	bars.title = "Bars"
	fmt.Fprintf(&b, "\n%s", bars.text())
	for _, line := range r.odd() {
		fmt.Fprintf(&b, "\nNote: %s", line)
	}
	return b.String()
}
