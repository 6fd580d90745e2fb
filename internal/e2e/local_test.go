// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// gauge returns a metric without labels.
func (c *caddy) gauge(t testing.TB, name string) float64 {
	t.Helper()
	for line := range strings.Lines(c.Metrics(t)) {
		if rest, ok := strings.CutPrefix(line, "caddy_stripe_ratelimit_"+name+" "); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// passes sends requests of a key until one is denied, and returns how many were not.
func (c *caddy) passes(t testing.TB, path, key string) (n int64) {
	t.Helper()
	for ; n < 200; n++ {
		switch a := c.get(t, path, bearer(key)...); a.status {
		case http.StatusOK:
		case http.StatusTooManyRequests:
			return n
		default:
			t.Fatalf("got status %d: %s", a.status, a.body)
		}
	}
	t.Fatalf("%d requests of one key pass", n)
	return n
}

// Three Caddys that are cut off from Redis together allow together no more than
// n shares, and what flows in meanwhile; once they have it again, what one has
// allowed counts for all.
func TestStore_FailsLocal(t *testing.T) {
	const burst, dear, slots = 30, 20, 5
	redis := redistest.Start(t)
	proxy := redistest.StartProxy(t, redis.Addr)
	up := newUpstream(t)
	// So little flows in that no token comes as long as the test may take.
	cfg := config{redis: proxy.Addr, site: fmt.Sprintf(`stripe_ratelimit {
			on_store_error local
			rate 1/d burst %d
			rate dear 1/d burst %d cost %d match /dear
		}
		stripe_ratelimit slots {
			on_store_error local
			concurrency %d match /hold
			fleet 30 reserve 80%% mode dark
			critical /none
		}
		reverse_proxy %s`, burst, dear+5, dear, slots, up.addr)}
	caddys := []*caddy{start(t, cfg), start(t, cfg), start(t, cfg)}
	know := func() {
		for _, c := range caddys {
			eventually(t, patience, "three that know of each other", func() bool { return c.gauge(t, "instances") == 3 })
		}
	}
	know()
	if n := caddys[0].passes(t, "/work", "sk_live_before"); n != burst {
		t.Fatalf("%d requests pass while Redis is there, want %d", n, burst)
	}

	cut := func() { proxy.Refuse(true); proxy.CloseAll() }
	cut()
	all, most := int64(0), int64(0)
	var n []int64 // instances, as each has heard last; 3 unless the machine stalled
	for i, c := range caddys {
		n = append(n, int64(c.gauge(t, "instances")))
		share := (burst + n[i] - 1) / n[i]
		if got := c.passes(t, "/work", "sk_live_cut_off"); got != share {
			t.Errorf("Caddy %d of %d: %d requests pass, want its share of %d", i, n[i], got, share)
		} else {
			all += got
		}
		if got := c.passes(t, "/dear", "sk_live_dear"); got != 1 { // of cost 20: more than a third of 25
			t.Errorf("Caddy %d of %d: %d dear requests pass, want 1", i, n[i], got)
		}
		most = max(most, n[i]*share)
		held := int((slots + n[i] - 1) / n[i])
		h := hold(t, c, up, held, bearer("sk_live_slots"))
		c.get(t, "/hold", append(up.call().header(), bearer("sk_live_slots")...)...).want(t, http.StatusTooManyRequests)
		h.letGo(t, held)
		hold(t, c, up, 1, bearer("sk_live_slots")).letGo(t, 1)

		if allowed, denied := c.metric(t, "decisions_total", `outcome="local_allowed"`), c.metric(t, "decisions_total", `outcome="local_denied"`); allowed < float64(share) || denied < 3 {
			t.Errorf("Caddy %d: %v decisions of its own allow and %v deny, want %d and 3 at least", i, allowed, denied, share)
		}
		if failed := c.metric(t, "decisions_total", `outcome="store_error"`, `kind="rate"`); failed != 0 {
			t.Errorf("Caddy %d: %v decisions of rates were not made, want 0", i, failed)
		}
	}
	if t.Logf("%v instances known: %d allowed, at most %d", n, all, most); all > most {
		t.Errorf("%d requests pass in all, want at most %d", all, most)
	}

	proxy.Refuse(false)
	for i, c := range caddys {
		key := fmt.Sprintf("sk_live_back_%d", i)
		eventually(t, patience, "judged by Redis", func() bool {
			before := c.metric(t, "requests_total", `outcome="store_error"`)
			return c.get(t, "/work", bearer(key)...).status == http.StatusOK && c.metric(t, "requests_total", `outcome="store_error"`) == before
		})
	}
	total := int64(0)
	for _, c := range caddys {
		total += c.passes(t, "/work", "sk_live_after")
	}
	if total != burst {
		t.Errorf("with Redis: %d requests pass in all, want exactly %d", total, burst)
	}
	if n := caddys[1].passes(t, "/work", "sk_live_before"); n != 0 {
		t.Errorf("who had used up the burst before: %d requests pass, want 0", n)
	}
	know()

	// The next outage begins where the last has ended.
	cut()
	for i, c := range caddys {
		again := int64(c.gauge(t, "instances"))
		if got := c.passes(t, "/work", "sk_live_cut_off"); again == n[i] && got != 0 {
			t.Errorf("Caddy %d, cut off again: %d requests pass, want 0", i, got)
		}
	}
}
