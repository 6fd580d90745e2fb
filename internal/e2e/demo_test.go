// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/caddyproc"
)

// startDemo starts examples/Caddyfile, as it is but for its port.
func startDemo(t *testing.T, env ...string) *caddy {
	t.Helper()
	text, err := os.ReadFile("../../examples/Caddyfile")
	if err != nil {
		t.Fatal(err)
	}
	port := caddyproc.FreePort(t)
	const site = "\n:8080 {\n"
	if n := strings.Count(string(text), site); n != 1 {
		t.Fatalf("examples/Caddyfile has %d lines %q, want 1", n, site)
	}
	caddyfile := strings.Replace(string(text), site, fmt.Sprintf("\nhttp://127.0.0.1:%d {\n\tbind 127.0.0.1\n", port), 1)
	return &caddy{caddyproc.Start(t, caddyfile, env...), port}
}

// drain sends requests, the headers in turn, until one is denied, and checks
// that exactly as many passed as an idle bucket allows in the time that took.
func drain(t *testing.T, c *caddy, path string, rate float64, burst int, headers ...[]string) answer {
	t.Helper()
	begin := time.Now()
	for n := 0; ; n++ {
		a := c.get(t, path, headers[n%len(headers)]...)
		if a.status == http.StatusTooManyRequests {
			most := burst + int(math.Floor(rate*time.Since(begin).Seconds()))
			if n < burst || n > most {
				t.Errorf("%d requests in a row passed, want %d, or up to %d for the time it took", n, burst, most)
			}
			return a
		}
		if a.want(t, http.StatusOK); n == 0 && a.remaining("rate") != burst-1 {
			t.Errorf("first answer: RateLimit %q, want r=%d for rate", a.field("RateLimit"), burst-1)
		}
	}
}

func TestDemo(t *testing.T) {
	c := startDemo(t, "REDIS_ADDR=")
	basic, token := []string{"Authorization", "Basic c2tfbGl2ZV9kZW1vOg=="}, bearer("sk_live_demo")

	// Basic and Bearer of one key are one user: had each a bucket of its own,
	// twice as many would pass.
	denied := drain(t, c, "/v1/balance", 2, 5, basic, token)

	t.Run("429", func(t *testing.T) {
		seconds, err := strconv.Atoi(denied.header.Get("Retry-After"))
		if err != nil || seconds < 1 || seconds > 2 {
			t.Errorf("Retry-After: got %q, want 1 or 2", denied.header.Get("Retry-After"))
		}
		if id := denied.header.Get("Request-Id"); !regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`).MatchString(id) {
			t.Errorf("Request-Id: got %q, want a UUID", id)
		}
		for name, want := range map[string]string{
			"Content-Type":               "application/json",
			"Cache-Control":              "no-store",
			"RateLimit-Policy":           `"rate";q=5;w=3, "concurrency";q=2;qu="concurrent-requests"`,
			"RateLimit":                  `"rate";r=0;t=1, "concurrency";r=2`,
			"Stripe-Rate-Limited-Reason": "global-rate",
			"Stripe-Should-Retry":        "",
			"Content-Length":             strconv.Itoa(len(denied.body)),
		} {
			if got := denied.field(name); got != want {
				t.Errorf("%s: got %q, want %q", name, got, want)
			}
		}
		wait := "1 second"
		if seconds == 2 {
			wait = "2 seconds"
		}
		want := map[string]map[string]string{"error": {
			"type":    "invalid_request_error",
			"code":    "rate_limit",
			"message": `Request rate limit exceeded: 2 requests per second for this API key (limit "rate"). Retry after ` + wait + ".",
		}}
		var got map[string]map[string]string
		if err := json.Unmarshal([]byte(denied.body), &got); err != nil {
			t.Errorf("body %q: %v", denied.body, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("body (-want +got):\n%s", diff)
		}
	})

	t.Run("another key has a bucket of its own", func(t *testing.T) {
		for _, header := range [][]string{bearer("sk_live_other"), {"X-Forwarded-For", "192.0.2.1"}} {
			if a := c.get(t, "/v1/balance", header...).want(t, http.StatusOK); a.remaining("rate") != 4 {
				t.Errorf("%s: RateLimit %q, want r=4 for rate", header[0], a.field("RateLimit"))
			}
		}
	})

	t.Run("after the stated wait it is allowed", func(t *testing.T) {
		seconds, _ := strconv.Atoi(denied.header.Get("Retry-After"))
		time.Sleep(time.Until(denied.came.Add(time.Duration(seconds) * time.Second)))
		c.get(t, "/v1/balance", token...).want(t, http.StatusOK)
	})

	t.Run("exempt", func(t *testing.T) {
		for range 20 {
			if a := c.get(t, "/health", basic...).want(t, http.StatusOK); a.field("RateLimit") != "" {
				t.Fatalf("RateLimit: got %q, want none", a.field("RateLimit"))
			}
		}
	})
}

// What a 429 of each kind says beyond what the demo's does.
func TestDenied(t *testing.T) {
	up := newUpstream(t)
	c := start(t, config{site: `stripe_ratelimit {
			rate search 10/h burst 1 match /search
			concurrency 2 lease 10m
			concurrency reports 1 lease 10m match /hold
			doc_url https://example.com/limits?a=b&c=d
			should_retry auto
		}
		reverse_proxy ` + up.addr})

	check := func(t *testing.T, a answer, header map[string]string, message string) {
		t.Helper()
		a.want(t, http.StatusTooManyRequests)
		for name, want := range header {
			if got := a.field(name); got != want {
				t.Errorf("%s: got %q, want %q", name, got, want)
			}
		}
		var body struct{ Error map[string]string }
		if err := json.Unmarshal([]byte(a.body), &body); err != nil {
			t.Errorf("body %q: %v", a.body, err)
		}
		if got := body.Error["message"]; !strings.HasPrefix(got, message) {
			t.Errorf("message: got %q, want it to begin with %q", got, message)
		}
		if got := body.Error["doc_url"]; got != "https://example.com/limits?a=b&c=d" {
			t.Errorf("doc_url: got %q", got)
		}
	}
	t.Run("endpoint rate", func(t *testing.T) {
		key := bearer("sk_live_search")
		c.get(t, "/search", key...).want(t, http.StatusOK)
		a := c.get(t, "/search", key...)
		check(t, a, map[string]string{
			"Stripe-Rate-Limited-Reason": "endpoint-rate",
			"Stripe-Should-Retry":        "", // it is minutes until the next token
			"RateLimit-Policy":           `"search";q=1;w=360, "concurrency";q=2;qu="concurrent-requests"`,
		}, `Request rate limit exceeded: 10 requests per hour for this API key (limit "search"). Retry after `)
		if seconds, err := strconv.Atoi(a.header.Get("Retry-After")); err != nil || seconds < 300 || seconds > 432 {
			t.Errorf("Retry-After: got %q, want the wait of at most 360 and up to a fifth more", a.header.Get("Retry-After"))
		}
	})
	t.Run("concurrency", func(t *testing.T) {
		key := bearer("sk_live_busy")
		held := hold(t, c, up, 1, key)
		endpoint := c.get(t, "/hold", key...)
		check(t, endpoint, map[string]string{
			"Stripe-Rate-Limited-Reason": "endpoint-concurrency",
			"RateLimit":                  `"concurrency";r=1, "reports";r=0`,
		}, `Request concurrency limit exceeded: 1 request in progress for this API key (limit "reports"). Retry after `)

		other := up.call()
		var second sync.WaitGroup
		second.Go(func() {
			_, _ = c.try(t.Context(), newClient(t, false), http.MethodGet, "/hold/other", other.header(key...)...)
		})
		receive(t, "a second call in progress", other.entered)
		global := c.get(t, "/", key...)
		check(t, global, map[string]string{
			"Stripe-Rate-Limited-Reason": "global-concurrency",
			"Stripe-Should-Retry":        "",
			"RateLimit":                  `"concurrency";r=0`,
			"RateLimit-Policy":           `"concurrency";q=2;qu="concurrent-requests"`,
		}, `Request concurrency limit exceeded: 2 requests in progress for this API key (limit "concurrency"). Retry after `)
		for _, a := range []answer{endpoint, global} {
			if got := a.header.Get("Retry-After"); len(got) != 1 || got < "1" || got > "3" {
				t.Errorf("Retry-After: got %q, want 1 to 3", got)
			}
		}
		close(other.answer)
		second.Wait()
		held.letGo(t, 1)
	})
}
