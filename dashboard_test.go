// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
)

const (
	dashboardFile = "examples/grafana/stripe_ratelimit.json"
	rulesFile     = "examples/prometheus/rules.yml"
	rulesTestFile = "examples/prometheus/rules_test.yml"
	runbookFile   = "docs/operating.md"
)

// metricLabels returns the labels of each metric by its full name, the series of
// histograms and the labels of every scrape included.
func metricLabels(t *testing.T) map[string][]string {
	t.Helper()
	desc := regexp.MustCompile(`fqName: "(\w+)".*variableLabels: \{([^}]*)\}`)
	descs := make(chan *prometheus.Desc)
	go func() {
		defer close(descs)
		for _, c := range collectors {
			c.Describe(descs)
		}
	}()
	metrics := map[string][]string{"up": {"job", "instance"}, "ALERTS": {"alertname", "alertstate", "severity"}}
	for d := range descs {
		m := desc.FindStringSubmatch(d.String())
		if m == nil {
			t.Fatalf("cannot read %v", d)
		}
		labels := append(strings.Split(m[2], ","), "job", "instance")
		metrics[m[1]] = labels
		if strings.HasSuffix(m[1], "_seconds") { // a histogram
			metrics[m[1]+"_bucket"] = append(slices.Clone(labels), "le")
			metrics[m[1]+"_count"], metrics[m[1]+"_sum"] = labels, labels
		}
	}
	return metrics
}

var (
	promMetric   = regexp.MustCompile(`\b(caddy_stripe_ratelimit_\w+|up|ALERTS)\b(?:\{([^}]*)\})?`)
	promMatcher  = regexp.MustCompile(`(\w+)\s*(?:=~|!~|!=|=)\s*"`)
	promGrouping = regexp.MustCompile(`\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)`)
)

// brokenQuery says what a query, or a text made from its labels, names and does
// not exist, or nothing.
func brokenQuery(metrics map[string][]string, query string, used ...string) string {
	var labels []string // that the metrics of the query have
	for _, m := range promMetric.FindAllStringSubmatch(query, -1) {
		has, ok := metrics[m[1]]
		if !ok {
			return "there is no metric " + m[1]
		}
		labels = append(labels, has...)
		for _, matcher := range promMatcher.FindAllStringSubmatch(m[2], -1) {
			if !slices.Contains(has, matcher[1]) {
				return fmt.Sprintf("%s has no label %s", m[1], matcher[1])
			}
		}
	}
	if labels == nil {
		return "it names no metric"
	}
	groupings := promGrouping.FindAllStringSubmatch(query, -1)
	var grouped []string
	for _, g := range groupings {
		for label := range strings.SplitSeq(g[1], ",") {
			label = strings.TrimSpace(label)
			if !slices.Contains(labels, label) {
				return fmt.Sprintf("no metric in it has the label %s", label)
			}
			grouped = append(grouped, label)
		}
	}
	if groupings != nil || regexp.MustCompile(`\b(sum|max|count)\(`).MatchString(query) {
		labels = grouped
	}
	for _, label := range used {
		if !slices.Contains(labels, label) {
			return fmt.Sprintf("its result has no label %s", label)
		}
	}
	return ""
}

func TestBrokenQuery(t *testing.T) {
	metrics := map[string][]string{"caddy_stripe_ratelimit_a": {"pool", "job"}, "up": {"job"}}
	cases := []struct {
		name, query string
		used        []string
		broken      bool
	}{
		{"a metric with its labels", `sum by (pool) (rate(caddy_stripe_ratelimit_a{pool=~"x"}[5m]))`, []string{"pool"}, false},
		{"two metrics", `up == 0 and on (job) caddy_stripe_ratelimit_a`, []string{"job"}, false},
		{"no aggregation", `caddy_stripe_ratelimit_a`, []string{"pool"}, false},
		{"no such metric", `caddy_stripe_ratelimit_ab`, nil, true},
		{"no metric at all", `vector(1)`, nil, true},
		{"no such label in a matcher", `caddy_stripe_ratelimit_a{pool="x", kind="y"}`, nil, true},
		{"a label of another metric in a matcher", `caddy_stripe_ratelimit_a and up{pool="x"}`, nil, true},
		{"no such label in a grouping", `sum by (kind) (caddy_stripe_ratelimit_a)`, nil, true},
		{"a label that is summed away", `sum by (job) (caddy_stripe_ratelimit_a)`, []string{"pool"}, true},
		{"all labels are summed away", `sum(caddy_stripe_ratelimit_a)`, []string{"pool"}, true},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if got := brokenQuery(metrics, c.query, c.used...); (got != "") != c.broken {
				t.Errorf("got %q, want broken: %v", got, c.broken)
			}
		})
	}
}

// Every alert can be computed, says what it is about, and has a place in the
// runbook and a test.
func TestAlertRules(t *testing.T) {
	metrics := metricLabels(t)
	var (
		runbook   = readFile(t, runbookFile)
		tests     = readFile(t, rulesTestFile)
		used      = regexp.MustCompile(`\{\{ \$labels\.(\w+) \}\}`)
		rules     = regexp.MustCompile(`(?m)^ +- (alert|record): `).Split(readFile(t, rulesFile), -1)[1:]
		alertName = regexp.MustCompile(`^StripeRatelimit[A-Z]\w+`)
		names     []string
	)
	for _, rule := range rules {
		name := alertName.FindString(rule)
		names = append(names, name)
		t.Run(name, func(t *testing.T) {
			expr := regexp.MustCompile(`(?s)\n +expr: \|\n(.*?)\n {8}(for|labels):`).FindStringSubmatch(rule)
			if expr == nil {
				t.Fatal("no expr in a block of its own")
			}
			var labels []string
			for _, m := range used.FindAllStringSubmatch(rule, -1) {
				labels = append(labels, m[1])
			}
			if broken := brokenQuery(metrics, expr[1], labels...); broken != "" {
				t.Error(broken)
			}
			if !regexp.MustCompile(`\n +severity: (critical|warning|info)\n`).MatchString(rule) {
				t.Error("no severity")
			}
			anchor := "#" + strings.ToLower(name)
			for _, annotation := range []string{"summary: .+", "description: .+", "runbook_url: https://.+/" + runbookFile + anchor} {
				if !regexp.MustCompile(`\n +` + annotation + `\n`).MatchString(rule + "\n") {
					t.Errorf("no annotation like %s", annotation)
				}
			}
			if n := strings.Count(runbook, "\n### "+name+"\n"); n != 1 {
				t.Errorf("%s: got %d headings, want 1", runbookFile, n)
			}
			if n := strings.Count(tests, "alertname: "+name+"\n        exp_alerts:"); n == 0 {
				t.Errorf("%s: it is never expected to fire", rulesTestFile)
			}
			if !regexp.MustCompile("alertname: " + name + `\n( +- eval|  - name|$)`).MatchString(tests) {
				t.Errorf("%s: it is never expected not to fire", rulesTestFile)
			}
		})
	}
	for _, m := range regexp.MustCompile(`(?m)^### (StripeRatelimit\w+)$`).FindAllStringSubmatch(runbook, -1) {
		if !slices.Contains(names, m[1]) {
			t.Errorf("%s: there is no alert %s", runbookFile, m[1])
		}
	}
}

// gridPos is where a panel is, in a grid 24 wide.
type gridPos struct{ X, Y, W, H int }

type panel struct {
	ID          int
	Type        string
	Title       string
	Description string
	Datasource  *datasource
	GridPos     gridPos
	FieldConfig struct {
		Defaults struct{ Unit string }
	}
	Options struct{ Legend *struct{ ShowLegend bool } }
	Targets []struct {
		RefID        string
		Datasource   *datasource
		Expr         string
		LegendFormat string
		Instant      bool
		Range        bool
	}
	Panels []panel
}

type datasource struct{ Type, UID string }

// The dashboard can be imported into Grafana 11 and later, which ask nothing and
// warn of nothing, and every panel says what it shows.
func TestDashboard(t *testing.T) {
	text := []byte(readFile(t, dashboardFile))
	var formatted bytes.Buffer
	if err := json.Indent(&formatted, text, "", "  "); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(formatted.String(), string(text)); diff != "" {
		t.Errorf("not as `jq .` writes it (-want +got):\n%s", diff)
	}
	var d struct {
		ID            *int
		UID, Title    string
		SchemaVersion int
		Panels        []panel
		Templating    struct {
			List []struct {
				Name, Label, Type, Definition string
				Datasource                    *datasource
			}
		}
		Annotations struct {
			List []struct {
				BuiltIn    int
				Datasource *datasource
				Expr       string
			}
		}
		Inputs json.RawMessage `json:"__inputs"`
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	if d.ID != nil || d.UID == "" || d.Title == "" || d.SchemaVersion < 39 || d.Inputs != nil {
		t.Errorf("got id %v, uid %q, title %q, schema %d, inputs %s; want no id, a uid, a title, Grafana 11's schema (39) and no inputs",
			d.ID, d.UID, d.Title, d.SchemaVersion, d.Inputs)
	}

	metrics := metricLabels(t)
	prom := &datasource{"prometheus", "${datasource}"}
	var variables []string
	for _, v := range d.Templating.List {
		variables = append(variables, v.Name)
		if v.Label == "" {
			t.Errorf("variable %s has no label", v.Name)
		}
		if v.Type == "query" {
			m := regexp.MustCompile(`^label_values\((\w+), (\w+)\)$`).FindStringSubmatch(v.Definition)
			if m == nil || !slices.Contains(metrics[m[1]], m[2]) || !cmp.Equal(v.Datasource, prom) {
				t.Errorf("variable %s: got %q from %v", v.Name, v.Definition, v.Datasource)
			}
		}
	}
	if want := []string{"datasource", "pool", "instance"}; !slices.Equal(variables, want) {
		t.Errorf("variables: got %q, want %q", variables, want)
	}
	for _, a := range d.Annotations.List {
		if a.BuiltIn == 1 {
			continue
		}
		if broken := brokenQuery(metrics, a.Expr); broken != "" || !cmp.Equal(a.Datasource, prom) {
			t.Errorf("annotation %q of %v: %s", a.Expr, a.Datasource, broken)
		}
	}

	var (
		ids    = map[int]bool{}
		titles = map[string]bool{}
		taken  = map[[2]int]string{}
	)
	for _, p := range d.Panels {
		name := fmt.Sprintf("panel %d %q", p.ID, p.Title)
		if p.ID < 1 || ids[p.ID] || p.Title == "" || len(p.Panels) > 0 {
			t.Errorf("%s: its id is not its own, it has no title, or panels in it", name)
		}
		ids[p.ID] = true
		g := p.GridPos
		if g.X < 0 || g.Y < 0 || g.W < 1 || g.H < 1 || g.X+g.W > 24 {
			t.Errorf("%s: at %+v", name, g)
		}
		for x := g.X; x < g.X+g.W; x++ {
			for y := g.Y; y < g.Y+g.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" {
					t.Fatalf("%s is on top of %s", name, other)
				}
				taken[[2]int{x, y}] = name
			}
		}
		if p.Type == "row" {
			continue
		}
		if titles[p.Title] {
			t.Errorf("%s: there are two", name)
		}
		titles[p.Title] = true
		// graph, singlestat, table-old and the like are gone from Grafana 12.
		if !slices.Contains([]string{"stat", "timeseries", "state-timeline"}, p.Type) {
			t.Errorf("%s: type %s", name, p.Type)
		}
		if p.Description == "" || p.FieldConfig.Defaults.Unit == "" || len(p.Targets) == 0 || !cmp.Equal(p.Datasource, prom) {
			t.Errorf("%s: lacks a description, a unit, a query or the data source", name)
		}
		if p.Type != "stat" && (p.Options.Legend == nil || !p.Options.Legend.ShowLegend) {
			t.Errorf("%s: shows no legend", name)
		}
		refs := map[string]bool{}
		for _, q := range p.Targets {
			if q.RefID == "" || refs[q.RefID] || q.LegendFormat == "" || q.Instant == q.Range || !cmp.Equal(q.Datasource, prom) {
				t.Errorf("%s, query %s: not a query with a name of its own, a legend and the data source", name, q.RefID)
			}
			refs[q.RefID] = true
			var labels []string
			for _, m := range regexp.MustCompile(`\{\{(\w+)\}\}`).FindAllStringSubmatch(q.LegendFormat, -1) {
				labels = append(labels, m[1])
			}
			if broken := brokenQuery(metrics, q.Expr, labels...); broken != "" {
				t.Errorf("%s, query %s: %s", name, q.RefID, broken)
			}
			for _, m := range promMetric.FindAllStringSubmatch(q.Expr, -1) {
				for label, filter := range map[string]string{"pool": `pool=~"$pool"`, "instance": `instance=~"$instance"`} {
					if slices.Contains(metrics[m[1]], label) && !strings.Contains(m[2], filter) {
						t.Errorf("%s, query %s: %s without %s", name, q.RefID, m[1], filter)
					}
				}
			}
		}
	}
}
