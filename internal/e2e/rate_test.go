// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// Two Caddys that share a Redis admit what one bucket holds: never more than
// capacity + rate * elapsed, and, since somebody always asks, hardly less.
func TestRate_TwoInstancesOneBucket(t *testing.T) {
	const (
		rate, burst = 200, 200
		clients     = 50
		load        = 3 * time.Second
	)
	redis := redistest.Start(t)
	cfg := config{redis: redis.Addr, site: fmt.Sprintf("stripe_ratelimit {\n rate %d/s burst %d \n}\n respond ok", rate, burst)}
	caddys := []*caddy{start(t, cfg), start(t, cfg)}

	// result is what one client saw.
	type result struct {
		allowed, denied, errors int
		firstAnswer, lastAnswer time.Time
		lastDenied              time.Time // when the last request was sent that was denied
	}
	results := make([]result, clients)
	begin := time.Now()
	var wg sync.WaitGroup
	for i := range results {
		client := newClient(t, false)
		wg.Go(func() {
			r := &results[i]
			// The last request of each is one that is denied: it proves that
			// the bucket was empty then.
			for last := false; !last || time.Since(begin) < load; {
				a, err := caddys[i%2].try(t.Context(), client, http.MethodGet, "/", bearer("sk_live_shared")...)
				if err != nil {
					if r.errors++; r.errors > 100 {
						t.Errorf("client %d: %v", i, err)
						return
					}
					continue
				}
				if r.firstAnswer.IsZero() {
					r.firstAnswer = a.came
				}
				r.lastAnswer = a.came
				switch last = false; a.status {
				case http.StatusOK:
					r.allowed++
				case http.StatusTooManyRequests:
					r.denied++
					r.lastDenied, last = a.sent, true
				default:
					t.Errorf("client %d: got %d, want 200 or 429", i, a.status)
					return
				}
			}
		})
	}
	wg.Wait()

	sum := result{firstAnswer: time.Now()}
	for _, r := range results {
		sum.allowed += r.allowed
		sum.denied += r.denied
		sum.errors += r.errors
		if r.firstAnswer.Before(sum.firstAnswer) {
			sum.firstAnswer = r.firstAnswer
		}
		if r.lastAnswer.After(sum.lastAnswer) {
			sum.lastAnswer = r.lastAnswer
		}
		if r.lastDenied.After(sum.lastDenied) {
			sum.lastDenied = r.lastDenied
		}
	}
	most := burst + rate*sum.lastAnswer.Sub(begin).Seconds()
	least := .99 * (burst + rate*sum.lastDenied.Sub(sum.firstAnswer).Seconds())
	t.Logf("%d allowed, between %.1f and %.1f; %d denied, %d transport errors", sum.allowed, least, most, sum.denied, sum.errors)
	if float64(sum.allowed) > most || float64(sum.allowed) < least {
		t.Errorf("%d allowed, want between %.1f and %.1f", sum.allowed, least, most)
	}
	for _, c := range caddys {
		c.noStoreErrors(t)
	}
}
