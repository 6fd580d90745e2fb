// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"net/http"
	"strings"
	"testing"
	"time"
)

// A switch of the fleet that is set on one Caddy is in force on the other two
// polls later, survives both, and ends by itself: not before its time, and then
// everywhere.
func TestOperate_FleetSwitch(t *testing.T) {
	p := newPair(t)
	p.want(t, 0, enforced, enforced)
	p.want(t, 1, enforced, enforced)

	changed := time.Now()
	p.caddys[0].admin(t, "POST", "switches", `{"pool":"a","kind":"rate","mode":"off","ttl":"1h","reason":"INC-1","actor":"anna"}`, http.StatusOK)
	p.want(t, 0, off, enforced)
	p.caddys[1].withinTwoPolls(t, "set", changed, func() bool {
		mode, _ := modeOf(t, p.caddys[1], "/a")
		return mode == off
	})
	p.want(t, 1, off, enforced)

	for i, c := range p.caddys {
		c.Stop()
		p.start(t, i)
	}
	for i := range p.caddys {
		p.want(t, i, off, enforced)
	}

	answer := p.caddys[1].admin(t, "POST", "switches", `{"pool":"a","kind":"rate","mode":"off","ttl":"3s","reason":"INC-1"}`, http.StatusOK)
	until, err := time.Parse(time.RFC3339, answer["switch"].(map[string]any)["until"].(string))
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range p.caddys {
		eventually(t, patience, "expired", func() bool {
			mode, a := modeOf(t, c, "/a")
			if mode == enforced && a.came.Before(until) {
				t.Fatalf("on Caddy %d: ended %v early", i, until.Sub(a.came))
			}
			return mode == enforced
		})
		t.Logf("on Caddy %d: seen to have ended %v late", i, time.Since(until).Round(time.Millisecond))
	}
	for i, c := range p.caddys {
		p.want(t, i, enforced, enforced)
		if got := c.switches(t); len(got) != 0 {
			t.Errorf("on Caddy %d: got switches %v, want none", i, got)
		}
		if n := c.metric(t, "switch_changes_total", `action="expired"`); n != 1 {
			t.Errorf("on Caddy %d: %v have expired, want 1", i, n)
		}
		c.noStoreErrors(t)
	}
}

// While Redis is gone, and after it has lost its data, switches stay in force;
// those that are set meanwhile are in force where they were set, and then
// everywhere.
func TestOperate_RedisGone(t *testing.T) {
	p := newPair(t)
	changed := time.Now()
	p.caddys[0].admin(t, "POST", "switches", `{"pool":"a","mode":"off","ttl":"1h","reason":"INC-1"}`, http.StatusOK)
	p.caddys[1].withinTwoPolls(t, "set", changed, func() bool { return len(p.caddys[1].switches(t)) == 1 })
	const control = "stripe_ratelimit:{control}"
	older := p.rdb.HGetAll(t.Context(), control).Val()
	if older["id"] == "" {
		t.Fatalf("got %v of %s, want the state", older, control)
	}

	p.redis.Kill()
	for _, c := range p.caddys {
		eventually(t, patience, "without Redis", func() bool { return c.metric(t, "store_errors_total", `operation="control"`) >= 3 })
	}
	p.want(t, 0, off, enforced)
	p.want(t, 1, off, enforced)
	out, code := p.caddys[0].command(t, "", "switch", "--pool", "b", "off", "--for", "1h", "--reason", "INC-2")
	if want := "b is off for 1h on this instance ALONE so far: "; code != 4 || !strings.HasPrefix(out, want) {
		t.Errorf("got exit code %d, want 4\n%s\nwant %s…", code, out, want)
	}
	answer := p.caddys[0].admin(t, "POST", "switches", `{"pool":"b","mode":"off","ttl":"1h","reason":"INC-3"}`, http.StatusAccepted)
	if answer["pending"] == "" || answer["pending"] == nil {
		t.Errorf("got %v, want why it is pending", answer)
	}
	p.want(t, 0, off, off)
	p.want(t, 1, off, enforced)

	p.saved(t, 0, "INC-3")
	p.saved(t, 1, "INC-1")
	for i, c := range p.caddys {
		c.Kill()
		p.start(t, i)
	}
	p.want(t, 0, off, off)
	p.want(t, 1, off, enforced)

	p.redis.Restart()
	eventually(t, patience, "in force everywhere", func() bool {
		for i, c := range p.caddys {
			if mode, _ := modeOf(t, c, "/a"); mode != off {
				t.Fatalf("/a on Caddy %d is %s while Redis comes back, want it off", i, mode)
			}
		}
		mode, _ := modeOf(t, p.caddys[1], "/b")
		return mode == off
	})
	for _, c := range p.caddys { // both know both, and so does Redis
		c.passPolls(t)
	}

	newest := p.rdb.HGetAll(t.Context(), control).Val()
	for _, row := range []struct {
		what string
		lose func() error
	}{
		{"FLUSHALL", func() error { return p.rdb.FlushAll(t.Context()).Err() }},
		{"a failover to a replica that was behind", func() error { return p.rdb.HSet(t.Context(), control, older).Err() }},
	} {
		if err := row.lose(); err != nil {
			t.Fatal(err)
		}
		for i, c := range p.caddys {
			for began := c.polls(t); c.polls(t) < began+3; {
				p.want(t, i, off, off)
			}
		}
		if got := p.rdb.HGetAll(t.Context(), control).Val(); got["id"] != newest["id"] {
			t.Errorf("after %s: got %v in Redis, want %v", row.what, got, newest)
		}
	}

	changed = time.Now()
	p.caddys[1].admin(t, "DELETE", "switches", `{"all":true}`, http.StatusOK)
	p.want(t, 1, enforced, enforced)
	p.caddys[0].withinTwoPolls(t, "cleared", changed, func() bool { return len(p.caddys[0].switches(t)) == 0 })
	p.want(t, 0, enforced, enforced)
}

// What one Caddy is told of an identity, the other knows two polls later, though
// it remembers that the identity was denied.
func TestOperate_OtherInstance(t *testing.T) {
	p := newPair(t)
	denied := func() {
		t.Helper()
		for _, c := range p.caddys {
			eventually(t, patience, "denied", func() bool {
				return c.get(t, "/a", bearer("k")...).status == http.StatusTooManyRequests
			})
		}
	}
	allowed := func(what string, changed time.Time) {
		t.Helper()
		p.caddys[1].withinTwoPolls(t, what, changed, func() bool {
			return p.caddys[1].get(t, "/a", bearer("k")...).status == http.StatusOK
		})
	}
	denied()
	changed := time.Now()
	p.caddys[0].admin(t, "POST", "keys/reset", `{"pool":"a","value":"k","reason":"test"}`, http.StatusOK)
	allowed("reset", changed)
	denied()

	changed = time.Now()
	p.caddys[0].admin(t, "POST", "overrides", `{"pool":"a","kind":"rate","limit":"rate","value":"k","requests":3600000,"burst":1000,"ttl":"1h","reason":"test"}`, http.StatusOK)
	allowed("overridden", changed)
	if a := p.caddys[1].get(t, "/a", bearer("k")...).want(t, http.StatusOK); !strings.Contains(a.field("RateLimit-Policy"), `"rate";q=1000`) {
		t.Errorf("got policy %s, want a burst of 1000", a.field("RateLimit-Policy"))
	}
	p.caddys[1].admin(t, "DELETE", "overrides", `{"pool":"a","kind":"rate","limit":"rate","value":"k"}`, http.StatusOK)
	denied()
}

// A switch of one instance is its own, until it ends: no reload, rejected or
// not, changes that. And what a rejected config has is not there.
func TestOperate_Reloads(t *testing.T) {
	p := newPair(t)
	c := p.caddys[0]
	c.admin(t, "POST", "switches", `{"pool":"a","mode":"off","ttl":"1h","reason":"test","scope":"instance"}`, http.StatusOK)
	p.want(t, 0, off, enforced)

	other := p.config
	other.site = strings.ReplaceAll(other.site, "stripe_ratelimit b", "stripe_ratelimit other")
	if status, body := c.LoadJSON(t, failingLast(t, c, other.caddyfile(c.port))); status == http.StatusOK {
		t.Fatalf("load: got %d %s, want it rejected", status, body)
	}
	p.want(t, 0, off, enforced)
	refused := c.admin(t, "POST", "switches", `{"pool":"other","mode":"off","ttl":"1h","reason":"test"}`, http.StatusBadRequest)
	if want := "there is no target 'other'; there are a/rate/rate, b/rate/rate"; refused["error"] != want {
		t.Errorf("a pool of the rejected config: got %v, want %s", refused, want)
	}
	c.admin(t, "POST", "switches", `{"pool":"b","mode":"off","ttl":"1h","reason":"test","scope":"instance"}`, http.StatusOK)
	p.want(t, 0, off, off)
	c.admin(t, "DELETE", "switches", `{"pool":"b","scope":"instance"}`, http.StatusOK)

	p.caddys[0] = c.load(t, p.config)
	c = p.caddys[0]
	p.want(t, 0, off, enforced)
	p.caddys[1].passPolls(t)
	p.want(t, 1, enforced, enforced)
	if got := p.caddys[1].switches(t); len(got) != 0 {
		t.Errorf("on the other Caddy: got switches %v, want none", got)
	}

	c.Stop()
	p.start(t, 0)
	p.want(t, 0, enforced, enforced)
}
