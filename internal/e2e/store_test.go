// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// A request waits 50ms for a store that fails. How much longer the machine lets
// it wait is bounded loosely, because the machine may have more to do than this
// test. What clients of Redis do by default (dial for 5s, read for 3s, try
// again) is beyond it all the same.
const (
	storeTimeout = 50 * time.Millisecond
	mostMedian   = storeTimeout + 450*time.Millisecond
	mostWorst    = storeTimeout + 2450*time.Millisecond
)

// outage sends requests of a key for some seconds while the store fails, and
// checks that none is harmed and that the operator is told, but not flooded.
func outage(t *testing.T, c *caddy, key string) {
	t.Helper()
	const clients, length = 4, 2500 * time.Millisecond
	failed := c.metric(t, "store_errors_total", `operation="admit"`)
	passed := c.metric(t, "requests_total", `outcome="store_error"`)
	logged := len(c.Logs())

	begin := time.Now()
	var mu sync.Mutex // guards below
	var took []time.Duration
	var wg sync.WaitGroup
	for range clients {
		client := newClient(t, false)
		wg.Go(func() {
			for ; time.Since(begin) < length; time.Sleep(20 * time.Millisecond) {
				a, err := c.try(t.Context(), client, http.MethodGet, "/", bearer(key)...)
				if err != nil || a.status != http.StatusOK || a.field("RateLimit") != "" {
					t.Errorf("got status %d, RateLimit %q, error %v, want 200 and nothing else", a.status, a.field("RateLimit"), err)
					return
				}
				mu.Lock()
				took = append(took, a.came.Sub(a.sent))
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	lines := warnings(c.Logs()[logged:])
	elapsed := time.Since(begin)

	requests := len(took)
	if requests == 0 {
		t.Fatal("no request was answered")
	}
	slices.Sort(took)
	median, worst := took[requests/2], took[requests-1]
	t.Logf("%d requests, p50 %v, p100 %v, %d log lines in %v", requests, median, worst, len(lines), elapsed)
	if median > mostMedian || worst > mostWorst {
		t.Errorf("requests took %v in the median and %v at worst, want about %v", median, worst, storeTimeout)
	}
	if n := c.metric(t, "store_errors_total", `operation="admit"`) - failed; n != float64(requests) {
		t.Errorf("store_errors_total: %v more, want %d", n, requests)
	}
	if n := c.metric(t, "requests_total", `outcome="store_error"`) - passed; n != float64(requests) {
		t.Errorf("requests_total of store errors: %v more, want %d", n, requests)
	}
	if most := 1 + int(elapsed/time.Second); len(lines) < 1 || len(lines) > most {
		t.Errorf("%d log lines in %v, want 1 to %d:\n%s", len(lines), elapsed, most, strings.Join(lines, "\n"))
	}
}

// warnings returns the lines of a log that are not of level info.
func warnings(log string) (lines []string) {
	for line := range strings.Lines(log) {
		if !strings.Contains(line, `"level":"info"`) {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

// judged sends requests of a key until the store has judged one, which may
// take as long as it fails. It returns the answer and how many came before it.
func judged(t *testing.T, c *caddy, key string) (a answer, before int) {
	t.Helper()
	eventually(t, patience, "limited by the store", func() bool {
		a = c.get(t, "/", bearer(key)...)
		before++
		return a.field("RateLimit") != ""
	})
	return a, before - 1
}

// inForce fails the test unless a key that nobody has used is limited.
func inForce(t *testing.T, c *caddy, key string, burst int) {
	t.Helper()
	a, _ := judged(t, c, key)
	if n := a.remaining("rate"); a.status != http.StatusOK || n < 0 || n >= burst {
		t.Errorf("first judged request: got status %d, RateLimit %q, want 200 and less than %d", a.status, a.field("RateLimit"), burst)
	}
	eventually(t, patience, "denied", func() bool {
		return c.get(t, "/", bearer(key)...).status == http.StatusTooManyRequests
	})
}

// A Redis that is absent, gone or hung costs no request more than the timeout;
// once it is back, the limits are.
func TestStore_Fails(t *testing.T) {
	const burst = 20
	redis := redistest.Start(t)
	redis.Kill()
	c := start(t, config{
		redis: redis.Addr, store: "timeout " + storeTimeout.String(),
		site: fmt.Sprintf("stripe_ratelimit {\n rate 10/h burst %d \n concurrency 10 lease 10m \n}\n respond ok", burst),
	})
	t.Run("absent at start", func(t *testing.T) { outage(t, c, "sk_live_absent") })
	redis.Restart()
	t.Run("there", func(t *testing.T) { inForce(t, c, "sk_live_there", burst) })

	redis.Kill()
	t.Run("gone", func(t *testing.T) { outage(t, c, "sk_live_gone") })
	redis.Restart()
	t.Run("back without its data", func(t *testing.T) { inForce(t, c, "sk_live_there_again", burst) })

	before, _ := judged(t, c, "sk_live_hung")
	redis.Stop()
	t.Run("hung", func(t *testing.T) { outage(t, c, "sk_live_hung") })
	redis.Cont()
	t.Run("alive again", func(t *testing.T) {
		inForce(t, c, "sk_live_alive", burst)
		// What was sent while Redis hung is executed now, too late to take
		// anything. Only requests that came since may have.
		after, unheard := judged(t, c, "sk_live_hung")
		most := before.remaining("rate") - 1
		if n := after.remaining("rate"); n > most || n < most-unheard {
			t.Errorf("%d tokens are left, want %d less at most %d", n, most, unheard)
		}
		eventually(t, patience, "all leases given back", func() bool { return len(slots(t, redis)) == 0 })
	})
}

// With on_store_error closed, requests are refused while the store fails, but
// for critical ones.
func TestStore_FailsClosed(t *testing.T) {
	redis := redistest.Start(t)
	redis.Kill()
	c := start(t, config{
		redis: redis.Addr, store: "timeout " + storeTimeout.String(),
		site: "stripe_ratelimit {\n critical /v1/charges \n rate 10/h \n on_store_error closed \n}\n respond ok",
	})
	a := c.get(t, "/", bearer("sk_live_closed")...).want(t, http.StatusServiceUnavailable)
	if !strings.Contains(a.body, `"code":"limiter_unavailable"`) || a.header.Get("Retry-After") == "" {
		t.Errorf("got %v %s, want limiter_unavailable and Retry-After", a.header, a.body)
	}
	if n := c.metric(t, "requests_total", `outcome="store_error"`, `criticality="get"`); n != 1 {
		t.Errorf("requests_total of store errors: got %v, want 1", n)
	}
	for range 10 { // also when the breaker is open
		c.get(t, "/v1/charges", bearer("sk_live_closed")...).want(t, http.StatusOK)
		a := c.do(t, http.MethodHead, "/", bearer("sk_live_closed")...).want(t, http.StatusServiceUnavailable)
		if a.body != "" || a.field("RateLimit") != "" || a.header.Get("Stripe-Rate-Limited-Reason") != "" {
			t.Errorf("got %v %q, want neither limits nor a body", a.header, a.body)
		}
	}
	redis.Restart()
	eventually(t, patience, "judged again", func() bool {
		return c.get(t, "/", bearer("sk_live_closed")...).status == http.StatusOK
	})
}
