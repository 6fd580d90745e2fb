// SPDX-License-Identifier: Apache-2.0

// Package e2e shows over HTTP what the module promises: every test drives real
// Caddys, most of them on a real Redis, and counts what a client or an upstream
// can count. It has tests alone.
//
// Two rules keep the tests from failing on a busy machine. What depends on time
// is compared with what the test itself measured, on the side that is safe, and
// never with a fixed number. And where exactness is the point, Redis may take
// its time (see config): a store that fails lets requests pass.
package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/caddyproc"
)

// patience bounds every wait for something that must happen. It is long because
// it only ever passes when something is broken.
const patience = 60 * time.Second

// config is a Caddyfile in the parts that tests differ in.
type config struct {
	global  string   // more global options
	servers string   // options of servers
	redis   string   // host:port; none: the limits live in memory
	store   string   // options of redis (default: a timeout that nobody reaches)
	blocks  string   // snippets and named routes
	site    string   // what is in the site's block
	env     []string // of the process, when it starts
}

// keySecret makes identities, and with them all that is drawn from them, the
// same in each run.
const keySecret = "dBWuqeC41LmsR8hKx2TzVn7G"

func (c config) caddyfile(port int) string {
	redis := ""
	if c.redis != "" {
		store := c.store
		if store == "" {
			store = "timeout 30s"
		}
		redis = fmt.Sprintf("redis %s {\n%s\n}", c.redis, store)
	}
	return fmt.Sprintf(`{
	default_bind 127.0.0.1
	persist_config off
	servers {
		protocols h1 h2c
		%s
	}
	%s
	stripe_ratelimit {
		key_secret %s
		%s
	}
}
%s
http://127.0.0.1:%d {
	%s
}
`, c.servers, c.global, keySecret, redis, c.blocks, port, c.site)
}

// caddy is a running Caddy with one site.
type caddy struct {
	*caddyproc.Process
	port int
}

func start(t testing.TB, c config) *caddy {
	t.Helper()
	port := caddyproc.FreePort(t)
	return &caddy{caddyproc.Start(t, c.caddyfile(port), c.env...), port}
}

// load replaces the config and returns the Caddy with the new one. Its site is on
// a new port: on the old one a moment's connections may still reach the server
// of the old config, or be lost with it, as Caddy does it.
func (c *caddy) load(t testing.TB, cfg config) *caddy {
	t.Helper()
	port := caddyproc.FreePort(t)
	if status, body := c.Load(t, cfg.caddyfile(port)); status != http.StatusOK {
		t.Fatalf("load: got %d %s, want 200", status, body)
	}
	return &caddy{c.Process, port}
}

func (c *caddy) addr() string { return "127.0.0.1:" + strconv.Itoa(c.port) }

// newClient returns a client with connections of its own. Through a shared one
// a request may be sent on another connection than that of the last answer,
// and be read before Caddy is done with that one.
func newClient(t testing.TB, h2c bool) *http.Client {
	transport := &http.Transport{DisableCompression: true, Protocols: new(http.Protocols)}
	transport.Protocols.SetHTTP1(!h2c)
	transport.Protocols.SetUnencryptedHTTP2(h2c)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: patience}
}

// answer is a response, read to its end.
type answer struct {
	status int
	header http.Header
	body   string

	sent, came time.Time // before the first byte, after the last
}

// try sends a request. The header is names and values in turn.
func (c *caddy) try(ctx context.Context, client *http.Client, method, path string, header ...string) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+c.addr()+path, nil)
	if err != nil {
		return answer{}, err
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	a := answer{sent: time.Now()}
	resp, err := client.Do(req)
	if err != nil {
		return a, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	a.status, a.header, a.body, a.came = resp.StatusCode, resp.Header, string(body), time.Now()
	return a, err
}

// get sends a GET.
func (c *caddy) get(t testing.TB, path string, header ...string) answer {
	t.Helper()
	return c.do(t, http.MethodGet, path, header...)
}

// do sends a request on a connection of its own.
func (c *caddy) do(t testing.TB, method, path string, header ...string) answer {
	t.Helper()
	client := newClient(t, false)
	defer client.CloseIdleConnections()
	a, err := c.try(t.Context(), client, method, path, header...)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	return a
}

// bearer is the header of a key.
func bearer(key string) []string { return []string{"Authorization", "Bearer " + key} }

// want fails the test unless the answer has the status.
func (a answer) want(t testing.TB, status int) answer {
	t.Helper()
	if a.status != status {
		t.Fatalf("got status %d, want %d\n%v\n%s", a.status, status, a.header, a.body)
	}
	return a
}

// field returns a list field with its lines joined.
func (a answer) field(name string) string { return strings.Join(a.header.Values(name), ", ") }

// remaining returns what the RateLimit field says is left of a limit, or -1.
func (a answer) remaining(limit string) int {
	for item := range strings.SplitSeq(a.field("RateLimit"), ", ") {
		if rest, ok := strings.CutPrefix(item, `"`+limit+`";r=`); ok {
			number, _, _ := strings.Cut(rest, ";")
			if n, err := strconv.Atoi(number); err == nil {
				return n
			}
		}
	}
	return -1
}

// metric adds up the series of a metric that have all the labels, such as
// `mode="dark"`.
func (c *caddy) metric(t testing.TB, name string, labels ...string) float64 {
	t.Helper()
	sum := 0.0
series:
	for line := range strings.Lines(c.Metrics(t)) {
		rest, ok := strings.CutPrefix(line, "caddy_stripe_ratelimit_"+name+"{")
		if !ok {
			continue
		}
		has, number, _ := strings.Cut(rest, "} ")
		for _, label := range labels {
			if !strings.Contains(","+has+",", ","+label+",") {
				continue series
			}
		}
		n, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
		if err != nil {
			t.Fatalf("metric %s: %q: %v", name, line, err)
		}
		sum += n
	}
	return sum
}

// noStoreErrors fails the test if the store has failed: what it shows of limits
// would be worth nothing. What is done in the background has a second, not half a
// minute, and is done again: on a busy machine it may come too late.
func (c *caddy) noStoreErrors(t testing.TB) {
	t.Helper()
	n := c.metric(t, "store_errors_total")
	for _, slow := range []string{`reason="timeout"`, `reason="late"`} {
		n -= c.metric(t, "store_errors_total", slow) - c.metric(t, "store_errors_total", slow, `operation="admit"`)
	}
	if n > 0 {
		t.Errorf("store_errors_total: got %v of requests, or that are not for want of time; want 0", n)
	}
}

// eventually fails the test unless something becomes true within a time.
func eventually(t testing.TB, within time.Duration, what string, true func() bool) {
	t.Helper()
	for deadline := time.Now().Add(within); !true(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("within %v: not %s", within, what)
		}
	}
}

// receive waits until a channel is closed.
func receive(t testing.TB, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(patience):
		t.Fatalf("within %v: not %s", patience, what)
	}
}
