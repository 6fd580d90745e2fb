// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/caddyproc"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// pair is two Caddys on one Redis, with a directory each for what survives them.
type pair struct {
	redis  *redistest.Server
	rdb    *goredis.Client
	config config
	data   [2]string
	caddys [2]*caddy
}

// newPair starts two Caddys with two pools, a at /a and b at /b.
func newPair(t testing.TB) *pair {
	redis := redistest.Start(t)
	p := &pair{redis: redis, rdb: redis.Client(), config: config{redis: redis.Addr, site: `
	route /a {
		stripe_ratelimit a {
			rate 1/h burst 1
			on_store_error closed
		}
		respond ok
	}
	route /b {
		stripe_ratelimit b {
			rate 1/h burst 1
			on_store_error closed
		}
		respond ok
	}`}}
	t.Cleanup(func() { _ = p.rdb.Close() })
	for i := range p.caddys {
		p.data[i] = t.TempDir()
		p.start(t, i)
	}
	return p
}

// start starts one of them with what it had left.
func (p *pair) start(t testing.TB, i int) {
	t.Helper()
	port := caddyproc.FreePort(t)
	p.caddys[i] = &caddy{caddyproc.Start(t, p.config.caddyfile(port), "XDG_DATA_HOME="+p.data[i]), port}
}

// saved waits until the snapshot of one of them says something.
func (p *pair) saved(t testing.TB, i int, what string) {
	t.Helper()
	eventually(t, patience, "saved", func() bool {
		files, _ := filepath.Glob(filepath.Join(p.data[i], "caddy", "stripe_ratelimit", "control-*.json"))
		for _, file := range files {
			if text, err := os.ReadFile(file); err == nil && strings.Contains(string(text), what) {
				return true
			}
		}
		return false
	})
}

// The ways in which a limit of a pair can be in force.
const (
	off      = "off"
	enforced = "enforced"
)

// modeOf sends a request and tells how its limit is in force: who asks the store
// is told what is left, or is refused, if need be because the store is gone.
func modeOf(t testing.TB, c *caddy, path string) (mode string, a answer) {
	t.Helper()
	a = c.get(t, path, bearer("sk_live_1")...)
	switch {
	case a.status == http.StatusTooManyRequests, a.status == http.StatusServiceUnavailable, a.remaining("rate") >= 0:
		return enforced, a
	}
	a.want(t, http.StatusOK)
	return off, a
}

// want fails the test unless the limit at each path is in force as it should be
// on one of the pair.
func (p *pair) want(t testing.TB, i int, a, b string) {
	t.Helper()
	for path, want := range map[string]string{"/a": a, "/b": b} {
		if got, answer := modeOf(t, p.caddys[i], path); got != want {
			t.Fatalf("%s on Caddy %d: got %s, want %s\n%+v", path, i, got, want, answer)
		}
	}
}

// polls is how often a Caddy has asked the store for switches, and was answered.
func (c *caddy) polls(t testing.TB) float64 {
	t.Helper()
	const control = `operation="control"`
	failed := c.metric(t, "store_errors_total", control) - c.metric(t, "store_errors_total", control, `reason="breaker_open"`)
	return c.metric(t, "store_duration_seconds_count", control) - failed
}

// withinTwoPolls waits until something that was changed in the store is in force
// on a Caddy that asks the store for it, and fails the test if it has asked twice
// before.
func (c *caddy) withinTwoPolls(t testing.TB, what string, changed time.Time, true func() bool) {
	t.Helper()
	for began := c.polls(t); ; {
		// One may have been under way, and a third begins when the second is done.
		polled := c.polls(t) - began
		if true() {
			break
		}
		if polled >= 3 {
			t.Fatalf("after %v polls and %v: not %s", polled, time.Since(changed), what)
		}
	}
	t.Logf("%s after %v, of 500ms", what, time.Since(changed).Round(time.Millisecond))
}

// passPolls waits until a Caddy has asked the store twice from begin to end.
func (c *caddy) passPolls(t testing.TB) {
	t.Helper()
	began := c.polls(t)
	eventually(t, patience, "asked twice", func() bool { return c.polls(t) >= began+3 })
}

// admin sends JSON to the admin API and wants a status.
func (c *caddy) admin(t testing.TB, method, path, body string, want int) map[string]any {
	t.Helper()
	status, text := c.Ask(t, method, "/stripe_ratelimit/"+path, body, "Content-Type", "application/json")
	var answer map[string]any
	if err := json.Unmarshal([]byte(text), &answer); err != nil || status != want {
		t.Fatalf("%s %s %s: got %d %s (%v), want %d", method, path, body, status, text, err, want)
	}
	return answer
}

// switches are those in force on a Caddy, as the admin API tells.
func (c *caddy) switches(t testing.TB) []any {
	t.Helper()
	return c.admin(t, http.MethodGet, "switches", "", http.StatusOK)["switches"].([]any)
}
