// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/caddyproc"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// Minutes of the shipped rules last so much less in tests: ranges, which must
// hold some scrapes, and how long a condition must last.
const (
	rangeScale = 100 // 5m is 3s
	forScale   = 300 // 5m is 1s, 1h is 12s
)

const scrapeInterval = "500ms"

// prometheus is a Prometheus that scrapes Caddys and evaluates the rules of
// examples/prometheus, with scaled times.
type prometheus struct{ addr string }

// startPrometheus starts a Prometheus that scrapes the admin APIs at the targets
// as job api.
func startPrometheus(t testing.TB, targets ...string) *prometheus {
	t.Helper()
	program, err := exec.LookPath("../../bin/prometheus") // where tools/need.sh has it
	if err != nil {
		program, err = exec.LookPath("prometheus")
	}
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("prometheus is missing (tools/need.sh prometheus), and this run must not skip tests")
		}
		t.Skip("prometheus is missing (tools/need.sh prometheus)")
	}
	dir := t.TempDir()
	rules, err := os.ReadFile("../../examples/prometheus/rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string]string{
		"rules.yml": scaleRules(t, string(rules)),
		"prometheus.yml": fmt.Sprintf(`
global: {scrape_interval: %[1]s, scrape_timeout: %[1]s, evaluation_interval: %[1]s}
rule_files: [rules.yml]
scrape_configs: [{job_name: api, static_configs: [{targets: ["%[2]s"]}]}]
`, scrapeInterval, strings.Join(targets, `", "`)),
	} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p := &prometheus{fmt.Sprintf("127.0.0.1:%d", caddyproc.FreePort(t))}
	var log redistest.Output
	cmd := exec.Command(program, "--config.file="+filepath.Join(dir, "prometheus.yml"),
		"--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+p.addr)
	cmd.Stdout, cmd.Stderr = &log, &log
	redistest.TieToParent(cmd)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("prometheus:\n%s", log.String())
		}
	})
	eventually(t, patience, "prometheus is ready", func() bool {
		resp, err := http.Get("http://" + p.addr + "/-/ready")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return p
}

var (
	ruleRange = regexp.MustCompile(`(\[|offset )(\d+)([mhd])\b`)
	ruleFor   = regexp.MustCompile(`(for: )(\d+)([mhd])\b`)
)

// scaleRules makes times in the text of rules shorter.
func scaleRules(t testing.TB, rules string) string {
	t.Helper()
	for pattern, scale := range map[*regexp.Regexp]int64{ruleRange: rangeScale, ruleFor: forScale} {
		if !pattern.MatchString(rules) {
			t.Fatalf("the rules have nothing like %v", pattern)
		}
		rules = pattern.ReplaceAllStringFunc(rules, func(text string) string {
			m := pattern.FindStringSubmatch(text)
			n, err := strconv.ParseInt(m[2], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			unit := map[string]time.Duration{"m": time.Minute, "h": time.Hour, "d": 24 * time.Hour}[m[3]]
			return fmt.Sprintf("%s%dms", m[1], n*unit.Milliseconds()/scale)
		})
	}
	return rules
}

// query returns the label sets of a PromQL query's result.
func (p *prometheus) query(t testing.TB, query string) (series []map[string]string) {
	t.Helper()
	resp, err := http.Get("http://" + p.addr + "/api/v1/query?query=" + url.QueryEscape(query))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var answer struct {
		Error string
		Data  struct {
			Result []struct{ Metric map[string]string }
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		t.Fatal(err)
	}
	if answer.Error != "" {
		t.Fatalf("query %s: %s", query, answer.Error)
	}
	for _, r := range answer.Data.Result {
		series = append(series, r.Metric)
	}
	return series
}

// alert is the selector of an alert, such as `Shedding{kind="fleet"}`, without
// the prefix that all have.
type alert string

func (a alert) selector() string {
	_, labels, _ := strings.Cut(string(a), "{")
	return fmt.Sprintf(`ALERTS{alertstate="firing", alertname="StripeRatelimit%s", %s`, a.name(), labels)
}

// fired reports whether the alert has been firing since a time. One that was so
// between two looks counts.
func (p *prometheus) fired(t testing.TB, a alert, since time.Time) bool {
	t.Helper()
	return len(p.query(t, fmt.Sprintf("last_over_time(%s[%dms])", a.selector(), time.Since(since).Milliseconds()+1))) > 0
}

// firing reports whether the alert is firing.
func (p *prometheus) firing(t testing.TB, a alert) bool {
	t.Helper()
	return len(p.query(t, a.selector())) > 0
}

// name is the alert's, without the prefix.
func (a alert) name() string {
	name, _, _ := strings.Cut(string(a), "{")
	return name
}

// alertName is that of a series of ALERTS, without the prefix.
func alertName(series map[string]string) string {
	return strings.TrimPrefix(series["alertname"], "StripeRatelimit")
}
