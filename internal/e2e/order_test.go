// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// Each limiter is asked only about requests that those before it let pass, and
// what one has given comes back when a later one refuses.
func TestOrder(t *testing.T) {
	const slots = 4
	f := newFleet(t)
	g := newGauge(t, `{"busy": 3}`)
	options := fmt.Sprintf("rate 10/h burst 1 \n fleet 20 reserve 80%% \n workers grace 0s ramp 1s utilization probe %s /busy", g.url)
	f.start(t, 1, options)
	c := f.caddys[0]
	asked := func(kind string) float64 { return c.metric(t, "decisions_total", fmt.Sprintf("kind=%q", kind)) }
	buckets := func() int {
		keys, err := f.rdb.Keys(t.Context(), "*:r:*").Result()
		if err != nil {
			t.Fatal(err)
		}
		return len(keys)
	}

	// Workers, before all others.
	eventually(t, patience, "at level 1", func() bool { return c.shedLevel(t) == 1 })
	fleet, before := asked("fleet"), f.state(t)
	for range 10 {
		c.get(t, "/", bearer("sk_live_x")...).want(t, http.StatusServiceUnavailable)
	}
	if n := asked("fleet") - fleet; n != 0 || buckets() != 0 {
		t.Errorf("for 10 requests that the workers shed, the fleet decided %v times, and there are %d buckets; want none", n, buckets())
	}
	if e := f.syncs(t, before, 2).entries[f.ids[0]]; e.claim > 1 {
		t.Errorf("after 10 requests that the workers shed, the claim is %d, want that of an idle Caddy, 1", e.claim)
	}
	g.says.Store(`{"busy": 0}`)
	eventually(t, patience, "at rest", func() bool { return c.shedLevel(t) == 0 })

	// The fleet, before the limits of the user.
	calls := new(held)
	for i := range slots {
		call := f.others.call()
		if a, ok := calls.begin(t, c, call, "", bearer(fmt.Sprintf("sk_live_hold_%d", i))...); !ok {
			t.Fatalf("call %d: got status %d, want it in progress", i, a.status)
		}
	}
	for range 10 {
		f.refused(t, c, bearer("sk_live_x")...)
	}
	if n, most := buckets(), slots+min(1, f.unjudged(t)); n < slots || n > most {
		t.Errorf("there are %d buckets, want none but those of the %d calls in progress", n, slots)
	}
	calls.letGo(t, slots)

	// A slot of the fleet comes back from who has no token.
	for i := range 10 * slots {
		key := bearer(fmt.Sprintf("sk_live_%d", i))
		c.get(t, "/", key...).want(t, http.StatusOK)
		a := c.get(t, "/", key...).want(t, http.StatusTooManyRequests)
		if !strings.Contains(a.body, "rate_limit") {
			t.Errorf("got %s, want rate_limit", a.body)
		}
	}
	if err := f.syncs(t, f.state(t), 2).right(f.ids, 0, 0, 0); err != nil {
		t.Error(err)
	}

	// Who is known to have none is refused before all that.
	fleet, workers := asked("fleet"), asked("workers")
	for range 50 {
		c.get(t, "/", bearer("sk_live_0")...).want(t, http.StatusTooManyRequests)
	}
	fleet, workers = asked("fleet")-fleet, asked("workers")-workers
	if fleet != 0 || workers != 0 {
		t.Errorf("for 50 requests of a client that floods, the fleet decided %v times and the workers %v times, want never", fleet, workers)
	}
}
