// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// onStores runs a test on both stores. addr is empty for memory.
func onStores(t *testing.T, test func(t *testing.T, addr string)) {
	t.Run("memory", func(t *testing.T) { test(t, "") })
	t.Run("redis", func(t *testing.T) { test(t, redistest.Start(t).Addr) })
}

// passes fails the test unless exactly n requests in a row are allowed. The
// refill in that time must be no matter.
func passes(t *testing.T, c *caddy, n int, header []string) {
	t.Helper()
	for i := range n {
		if a := c.get(t, "/", header...); a.status != http.StatusOK {
			t.Fatalf("request %d of %d: got %d, want 200\n%s", i+1, n, a.status, a.body)
		}
	}
	c.get(t, "/", header...).want(t, http.StatusTooManyRequests)
}

// New numbers of a bucket are in force with the answer to the reload, whatever
// it held; a config that is rejected changes nothing.
func TestReload_Rate(t *testing.T) {
	onStores(t, func(t *testing.T, addr string) {
		rate := func(numbers string) config {
			return config{redis: addr, site: "stripe_ratelimit {\n rate " + numbers + " \n}\n respond ok"}
		}
		// A token in six minutes at most: nothing refills unless a test wants it.
		c := start(t, rate("10/h burst 10"))
		drained, partly, full := bearer("sk_live_drained"), bearer("sk_live_partly"), bearer("sk_live_full")
		passes(t, c, 10, drained)
		for range 4 {
			c.get(t, "/", partly...).want(t, http.StatusOK)
		}

		bad := rate("10/h burst 10")
		bad.site += "\n no_such_directive"
		if status, body := c.Load(t, bad.caddyfile(c.port)); status != http.StatusBadRequest {
			t.Fatalf("load of a bad config: got %d %s, want 400", status, body)
		}
		bad = rate("10/h burst 1")
		bad.site += "\n tls no-such-cert.pem no-such-key.pem" // fails late, once handlers are provisioned
		if status, body := c.Load(t, bad.caddyfile(c.port)); status == http.StatusOK {
			t.Fatalf("load of a config that cannot start: got %d %s, want an error", status, body)
		}
		if a := c.get(t, "/", partly...).want(t, http.StatusOK); a.remaining("rate") != 5 {
			t.Errorf("after a rejected config: RateLimit %q, want r=5", a.field("RateLimit"))
		}

		c = c.load(t, rate("10/h burst 3")) // lower: what was more is cut
		c.get(t, "/", drained...).want(t, http.StatusTooManyRequests)
		passes(t, c, 3, partly)
		passes(t, c, 3, full)

		c = c.load(t, rate("10/h burst 20")) // higher: only what flows in is new
		c.get(t, "/", drained...).want(t, http.StatusTooManyRequests)
		c.get(t, "/", full...).want(t, http.StatusTooManyRequests)
		passes(t, c, 20, bearer("sk_live_new"))

		c = c.load(t, rate("10000000/h burst 20")) // some 3 a millisecond
		for range 10 {
			c.get(t, "/", drained...).want(t, http.StatusOK)
		}
		c.noStoreErrors(t)
	})
}

// New numbers of a concurrency limit are in force with the answer to the
// reload, for leases that are held; requests in progress go on.
func TestReload_Concurrency(t *testing.T) {
	onStores(t, func(t *testing.T, addr string) {
		up := newUpstream(t)
		concurrency := func(n int) config {
			return config{redis: addr, site: fmt.Sprintf("stripe_ratelimit {\n concurrency %d lease 10m \n}\n reverse_proxy %s", n, up.addr)}
		}
		key := bearer("sk_live_held")
		denied := func(c *caddy) {
			t.Helper()
			c.get(t, "/", key...).want(t, http.StatusTooManyRequests)
		}
		c := start(t, concurrency(3))
		first := hold(t, c, up, 3, key)
		denied(c)
		c = c.load(t, concurrency(5)) // higher
		second := hold(t, c, up, 2, key)
		denied(c)
		c = c.load(t, concurrency(4)) // lower than what is held
		denied(c)
		first.letGo(t, 3)
		for _, a := range first.answers {
			a.want(t, http.StatusOK)
		}
		third := hold(t, c, up, 2, key) // 2 of the 4 were left
		denied(c)
		second.letGo(t, 2)
		third.letGo(t, 2)
		c.get(t, "/", key...).want(t, http.StatusOK)
		c.noStoreErrors(t)
	})
}

// A limit that a reload switches off, or to dark, denies no more, and one that
// it switches on again remembers.
func TestReload_Mode(t *testing.T) {
	onStores(t, func(t *testing.T, addr string) {
		mode := func(mode string) config {
			return config{redis: addr, site: "stripe_ratelimit {\n rate 10/h burst 3 \n mode " + mode + " \n}\n respond ok"}
		}
		key := bearer("sk_live_mode")
		c := start(t, mode("enforce"))
		passes(t, c, 3, key)
		for m := range strings.FieldsSeq("dark off") {
			c = c.load(t, mode(m))
			for range 5 {
				c.get(t, "/", key...).want(t, http.StatusOK)
			}
		}
		c = c.load(t, mode("enforce"))
		c.get(t, "/", key...).want(t, http.StatusTooManyRequests)
	})
}
