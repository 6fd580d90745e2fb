// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// Two Caddys that share a Redis admit what one bucket holds: never more than
// capacity + rate * elapsed, and, since somebody always asks, hardly less.
//
// The most is counted from before the first request to after the last answer.
// The least is what must have been taken while the bucket is known to be empty
// now and then: from when the first denial came to when the last one was still
// to come, and the burst before.
func TestRate_TwoInstancesOneBucket(t *testing.T) {
	const (
		rate, burst = 100, 100
		clients     = 50
		load        = 4 * time.Second
	)
	redis := redistest.Start(t)
	cfg := config{redis: redis.Addr, site: fmt.Sprintf("stripe_ratelimit {\n rate %d/s burst %d \n}\n respond ok", rate, burst)}
	caddys := []*caddy{start(t, cfg), start(t, cfg)}

	// result is what one client saw.
	type result struct {
		allowed, errors int
		last            time.Time // answer
		denied          []answer
	}
	results := make([]result, clients)
	connections := make([]*http.Client, clients)
	var wg sync.WaitGroup
	for i := range connections {
		connections[i] = newClient(t, false)
		wg.Go(func() { // opens the connections, for all is to begin at once
			if _, err := caddys[i%2].try(t.Context(), connections[i], http.MethodGet, "/", bearer("sk_live_warm_up")...); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	begin := time.Now()
	for i := range results {
		wg.Go(func() {
			r := &results[i]
			// Each goes on until it is denied, so that the bucket is empty at the
			// end.
			for denied := false; !denied || time.Since(begin) < load; {
				a, err := caddys[i%2].try(t.Context(), connections[i], http.MethodGet, "/", bearer("sk_live_shared")...)
				if err != nil {
					if r.errors++; r.errors > 100 {
						t.Errorf("client %d: %v", i, err)
						return
					}
					continue
				}
				r.last = a.came
				switch denied = a.status == http.StatusTooManyRequests; {
				case denied:
					r.denied = append(r.denied, answer{sent: a.sent, came: a.came})
				case a.status == http.StatusOK:
					r.allowed++
				default:
					t.Errorf("client %d: got %d, want 200 or 429", i, a.status)
					return
				}
			}
		})
	}
	wg.Wait()

	var sum result
	for _, r := range results {
		sum.allowed += r.allowed
		sum.errors += r.errors
		sum.denied = append(sum.denied, r.denied...)
		if r.last.After(sum.last) {
			sum.last = r.last
		}
	}
	if t.Failed() || len(sum.denied) == 0 {
		t.Fatalf("%d allowed, %d denied, %d transport errors", sum.allowed, len(sum.denied), sum.errors)
	}
	slices.SortFunc(sum.denied, func(a, b answer) int { return a.sent.Compare(b.sent) })
	first := slices.MinFunc(sum.denied, func(a, b answer) int { return a.came.Compare(b.came) })
	last := sum.denied[len(sum.denied)-1]
	most := burst + rate*sum.last.Sub(begin).Seconds()
	least := burst + rate*last.sent.Sub(first.came).Seconds()
	for i := range sum.denied[1:] {
		// A machine that stalls lets the bucket fill up, and then tokens are lost.
		stalled := sum.denied[i+1].came.Sub(sum.denied[i].sent)
		least -= max(0, rate*stalled.Seconds()-burst)
	}
	least *= .99
	t.Logf("%d allowed, between %.1f and %.1f; %d denied, %d transport errors", sum.allowed, least, most, len(sum.denied), sum.errors)
	if float64(sum.allowed) > most || float64(sum.allowed) < least {
		t.Errorf("%d allowed, want between %.1f and %.1f", sum.allowed, least, most)
	}
	for _, c := range caddys {
		c.noStoreErrors(t)
	}
}
