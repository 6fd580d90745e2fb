// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// served is what one request is expected to bring.
type served struct {
	method, path string // default GET /
	status       int
	body         string
	rateLimit    string // the field, without times
}

// serve sends one request a row and compares.
func serve(t *testing.T, c *caddy, header []string, rows []served) {
	t.Helper()
	for i, want := range rows {
		method, path := want.method, want.path
		if method == "" {
			method = http.MethodGet
		}
		if path == "" {
			path = "/"
		}
		a := c.do(t, method, path, header...)
		got := served{method: want.method, path: want.path, status: a.status, body: a.body, rateLimit: untimed(a.field("RateLimit"))}
		if a.status == http.StatusTooManyRequests && strings.HasPrefix(want.body, "...") {
			got.body = "..."
		}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(served{})); diff != "" {
			t.Errorf("row %d (-want +got):\n%s", i+1, diff)
		}
	}
}

// untimed cuts the times off a RateLimit field: `"rate";r=0;t=1` is r=0 of rate.
func untimed(field string) string {
	var items []string
	for item := range strings.SplitSeq(field, ", ") {
		name, rest, _ := strings.Cut(item, ";")
		left, _, _ := strings.Cut(rest, ";")
		items = append(items, strings.Trim(name, `"`)+" "+left)
	}
	return strings.TrimSpace(strings.Join(items, ", "))
}

// `reject error` leaves the answer to handle_errors, which keeps the fields;
// where it has nothing to say, the answer is empty.
func TestRejectError(t *testing.T) {
	c := start(t, config{site: `stripe_ratelimit {
			rate few 10/h burst 1
			reject error
		}
		respond ok
		handle_errors 429 {
			@shown path /shown
			respond @shown "{err.status_code}: {http.stripe_ratelimit.kind} {http.stripe_ratelimit.limit} {http.stripe_ratelimit.reason}"
		}`})
	key := bearer("sk_live_error")
	serve(t, c, key, []served{
		{status: 200, body: "ok", rateLimit: "few r=0"},
		{status: 429, rateLimit: "few r=0"},
		{path: "/shown", status: 429, body: "429: rate few global-rate", rateLimit: "few r=0"},
	})
	a := c.get(t, "/shown", key...)
	for _, name := range []string{"Retry-After", "RateLimit-Policy", "Stripe-Rate-Limited-Reason", "Request-Id"} {
		if a.field(name) == "" {
			t.Errorf("%s is missing", name)
		}
	}
	if got := a.field("Cache-Control"); got != "no-store" {
		t.Errorf("Cache-Control: got %q, want no-store", got)
	}
}

// A HEAD that is denied is answered as a GET, without the body.
func TestHead(t *testing.T) {
	c := start(t, config{site: "stripe_ratelimit {\n rate 10/h burst 1 \n}\n respond ok"})
	key := bearer("sk_live_head")
	c.do(t, http.MethodHead, "/", key...).want(t, http.StatusOK)
	head := c.do(t, http.MethodHead, "/", key...).want(t, http.StatusTooManyRequests)
	get := c.get(t, "/", key...).want(t, http.StatusTooManyRequests)
	if head.body != "" || get.body == "" {
		t.Errorf("bodies: HEAD %q, GET %q, want none and one", head.body, get.body)
	}
	for _, a := range []answer{head, get} {
		for _, name := range []string{"Request-Id", "Retry-After", "Date"} { // differ, or may
			if a.field(name) == "" {
				t.Errorf("%s is missing", name)
			}
			a.header.Del(name)
		}
		a.header.Set("RateLimit", untimed(a.field("RateLimit")))
	}
	// The body says what Retry-After says, which is drawn for each.
	head.header.Del("Content-Length")
	get.header.Del("Content-Length")
	if diff := cmp.Diff(get.header, head.header); diff != "" {
		t.Errorf("headers (-GET +HEAD):\n%s", diff)
	}
}

// Handlers of one pool share its buckets, wherever a snippet or a named route
// puts them.
func TestSnippetsAndNamedRoutes(t *testing.T) {
	c := start(t, config{
		blocks: `(limited) {
			stripe_ratelimit {args[0]} {
				rate 10/h burst {args[1]}
			}
		}
		&(named) {
			stripe_ratelimit route {
				rate 10/h burst 3
			}
		}`,
		site: `handle /a* {
			import limited snippet 3
			respond a
		}
		handle /b* {
			import limited snippet 3
			respond b
		}
		handle /other* {
			import limited other 1
			respond other
		}
		handle /route/1 {
			invoke named
			respond 1
		}
		handle /route/2 {
			invoke named
			respond 2
		}`,
	})
	serve(t, c, bearer("sk_live_shared"), []served{
		{path: "/a", status: 200, body: "a", rateLimit: "rate r=2"},
		{path: "/b", status: 200, body: "b", rateLimit: "rate r=1"},
		{path: "/route/1", status: 200, body: "1", rateLimit: "rate r=2"},
		{path: "/a", status: 200, body: "a", rateLimit: "rate r=0"},
		{path: "/b", status: 429, body: "...", rateLimit: "rate r=0"},
		{path: "/other", status: 200, body: "other", rateLimit: "rate r=0"},
		{path: "/route/2", status: 200, body: "2", rateLimit: "rate r=1"},
		{path: "/route/2", status: 200, body: "2", rateLimit: "rate r=0"},
		{path: "/route/1", status: 429, body: "...", rateLimit: "rate r=0"},
	})
}

// Two pools apply in order: what the first denies, the second never sees.
func TestTwoPools(t *testing.T) {
	c := start(t, config{site: `stripe_ratelimit edge {
			key client_ip
			rate address 10/h burst 5
		}
		stripe_ratelimit api {
			key api_key
			rate user 10/h burst 3
		}
		respond ok`})
	serve(t, c, bearer("sk_live_one"), []served{
		{status: 200, body: "ok", rateLimit: "address r=4, user r=2"},
		{status: 200, body: "ok", rateLimit: "address r=3, user r=1"},
		{status: 200, body: "ok", rateLimit: "address r=2, user r=0"},
		{status: 429, body: "...", rateLimit: "address r=1, user r=0"},
	})
	serve(t, c, bearer("sk_live_two"), []served{
		{status: 200, body: "ok", rateLimit: "address r=0, user r=2"},
		{status: 429, body: "...", rateLimit: "address r=0"},
	})
	for pool, want := range map[string]map[string]float64{
		"edge": {"allowed": 5, "denied": 1},
		"api":  {"allowed": 4, "denied": 1},
	} {
		for outcome, n := range want {
			if got := c.metric(t, "requests_total", fmt.Sprintf("pool=%q", pool), fmt.Sprintf("outcome=%q", outcome)); got != n {
				t.Errorf("requests_total of %s, %s: got %v, want %v", pool, outcome, got, n)
			}
		}
	}
}

// A request counts once in a pool, however many handlers of it are on its way,
// error routes included.
func TestOnePoolCountsOnce(t *testing.T) {
	const limited = "stripe_ratelimit {\n rate 10/h burst 4 \n}\n"
	c := start(t, config{site: limited + limited + `
		@fail path /fail
		error @fail 500
		respond ok
		handle_errors {
			` + limited + `
			respond handled
		}`})
	key := bearer("sk_live_once")
	serve(t, c, key, []served{
		{status: 200, body: "ok", rateLimit: "rate r=3"},
		{path: "/fail", status: 500, body: "handled", rateLimit: "rate r=2"},
		{path: "/fail", status: 500, body: "handled", rateLimit: "rate r=1"},
		{status: 200, body: "ok", rateLimit: "rate r=0"},
		{path: "/fail", status: 429, body: "...", rateLimit: "rate r=0"},
	})
	if got := c.metric(t, "requests_total"); got != 5 {
		t.Errorf("requests_total: got %v, want 5", got)
	}
}

// Exempt requests pass and cost nothing.
func TestExempt(t *testing.T) {
	c := start(t, config{site: `@internal header X-Internal yes
		stripe_ratelimit {
			exempt /health @internal
			rate 10/h burst 1
		}
		respond "{http.stripe_ratelimit.outcome}"`})
	key := bearer("sk_live_exempt")
	serve(t, c, key, []served{
		{path: "/health", status: 200, body: "exempt"},
		{path: "/health", status: 200, body: "exempt"},
		{status: 200, body: "allowed", rateLimit: "rate r=0"},
		{path: "/health", status: 200, body: "exempt"},
		{status: 429, body: "...", rateLimit: "rate r=0"},
	})
	serve(t, c, append(key, "X-Internal", "yes"), []served{{status: 200, body: "exempt"}})
	if got := c.metric(t, "requests_total", `outcome="exempt"`); got != 4 {
		t.Errorf("requests_total of exempt: got %v, want 4", got)
	}
}

// A dark limit decides and counts and shows its clients nothing.
func TestDark(t *testing.T) {
	c := start(t, config{site: `stripe_ratelimit {
			rate 10/h burst 3 mode dark
		}
		respond "{http.stripe_ratelimit.outcome} {http.stripe_ratelimit.would_reject}"`})
	rows := make([]served, 5)
	for i := range rows {
		rows[i] = served{status: 200, body: "allowed "}
		if i >= 3 {
			rows[i].body = "allowed rate/rate"
		}
	}
	serve(t, c, bearer("sk_live_dark"), rows)
	a := c.get(t, "/", bearer("sk_live_dark")...)
	for _, name := range []string{"RateLimit", "RateLimit-Policy", "Retry-After", "Stripe-Rate-Limited-Reason"} {
		if got := a.field(name); got != "" {
			t.Errorf("%s: got %q, want none", name, got)
		}
	}
	for outcome, want := range map[string]float64{"allowed": 3, "denied": 3} {
		if got := c.metric(t, "decisions_total", `mode="dark"`, fmt.Sprintf("outcome=%q", outcome)); got != want {
			t.Errorf("decisions_total of dark, %s: got %v, want %v", outcome, got, want)
		}
	}
	if got := c.metric(t, "decisions_total", `mode="enforce"`); got != 0 {
		t.Errorf("decisions_total of enforce: got %v, want 0", got)
	}
}

// `enforce 25` enforces for a quarter of the keys: the same ones on every
// instance and after a reload, and more of them when it is raised.
func TestEnforceShare(t *testing.T) {
	const keys = 60
	share := func(percent int) config {
		return config{site: fmt.Sprintf("stripe_ratelimit {\n rate 10/h burst 1 mode enforce %d \n}\n respond ok", percent)}
	}
	enforced := func(c *caddy) (who [keys]bool, n int) {
		for i := range keys {
			key := bearer(fmt.Sprintf("sk_live_%d", i))
			c.get(t, "/", key...)
			if c.get(t, "/", key...).status == http.StatusTooManyRequests {
				who[i] = true
				n++
			}
		}
		return who, n
	}
	c := start(t, share(25))
	quarter, n := enforced(c)
	t.Logf("enforced for %d of %d keys", n, keys)
	// As key_secret is known, so is who is meant: this never varies.
	if n < keys/8 || n > keys*3/8 {
		t.Errorf("enforced for %d of %d keys, want about a quarter", n, keys)
	}
	if again, _ := enforced(start(t, share(25))); again != quarter {
		t.Errorf("another instance enforces for others:\n%v\n%v", again, quarter)
	}
	c = c.load(t, share(60))
	most, n := enforced(c)
	t.Logf("then for %d", n)
	for i := range keys {
		if quarter[i] && !most[i] {
			t.Errorf("key %d is not among those of a larger share", i)
		}
	}
	if n < keys*4/10 || n > keys*8/10 {
		t.Errorf("enforced for %d of %d keys, want about 60 percent", n, keys)
	}
}
