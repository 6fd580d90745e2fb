// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// faults are those of instances and of the network before them.
func (w *world) faults() []fault {
	cutOff := func(beats time.Duration) func(*rand.Rand, time.Duration) {
		return func(rng *rand.Rand, d time.Duration) {
			proxy := w.alive[rng.IntN(len(w.alive))].proxy
			proxy.Blackhole(true)
			time.Sleep(beats*250*time.Millisecond + d)
			proxy.Blackhole(false)
		}
	}
	each := func(do func(*redistest.Proxy)) {
		for _, i := range w.alive {
			do(i.proxy)
		}
	}
	return []fault{
		{"an instance is cut off", cutOff(0)},
		{"an instance is cut off for many beats", cutOff(8)},
		{"all are refused", func(_ *rand.Rand, d time.Duration) {
			each(func(p *redistest.Proxy) {
				p.Refuse(true)
				p.CloseAll()
			})
			time.Sleep(d)
			each(func(p *redistest.Proxy) { p.Refuse(false) })
		}},
		{"replies are lost", func(rng *rand.Rand, d time.Duration) {
			for range 4 {
				each(func(p *redistest.Proxy) { p.CutReplies(1 + rng.IntN(3)) })
				time.Sleep(d / 4)
			}
		}},
		{"an instance is killed, and another comes", func(rng *rand.Rand, d time.Duration) {
			w.killOne(rng)
			time.Sleep(d)
			w.start()
		}},
		{"an instance is stopped, and another comes", func(rng *rand.Rand, _ time.Duration) {
			n := rng.IntN(len(w.alive))
			gone := w.alive[n]
			w.alive = slices.Delete(w.alive, n, n+1)
			w.start()
			gone.stop()
			gone.close()
		}},
	}
}

func (w *world) killOne(rng *rand.Rand) {
	n := rng.IntN(len(w.alive))
	victim := w.alive[n]
	w.alive = slices.Delete(w.alive, n, n+1)
	victim.kill()
}

// calm waits until limits are in force again everywhere, and for some time in
// which denials can be judged.
func (w *world) calm() {
	from := time.Now()
	for _, i := range w.alive {
		before := i.good.Load()
		eventually(w.t, "an answer of Redis to each instance", func() bool { return i.good.Load() > before+10 })
		eventually(w.t, "a fleet", func() bool { s := i.fleet.Status(); return s.Err == nil && s.Claim > 0 })
	}
	w.t.Logf("all is well again after %v", time.Since(from))
	time.Sleep(settle*time.Microsecond + time.Second)
}

// checkForgets kills an instance, stops the others, and looks at what is left:
// leases for the length of a lease, claims for nine beats, and buckets until they
// are full.
func (w *world) checkForgets() {
	t := w.t
	rng := rand.New(rand.NewPCG(w.seed, 1))
	w.killOne(rng)
	const script = `
		local time, all = redis.call('TIME'), {}
		local now = time[1] * 1000000 + time[2]
		for _, key in ipairs(redis.call('KEYS', '*')) do
			local last = 0
			if redis.call('TYPE', key).ok == 'zset' then
				last = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2] - now
			end
			local fleet = redis.call('TYPE', key).ok == 'hash' and redis.call('HVALS', key) or {}
			for _, text in ipairs(fleet) do
				last = math.max(last, (string.match(text, '^%d+ %d+ %d+ %d+ %d+ (%d+)$') or 0) - now)
			end
			all[#all + 1] = {key, redis.call('PTTL', key), last}
		end
		return all`
	left := func() map[string][2]time.Duration {
		keys := map[string][2]time.Duration{}
		for _, entry := range w.command("EVAL", script, 0).([]any) {
			e := entry.([]any)
			keys[e[0].(string)] = [2]time.Duration{time.Duration(e[1].(int64)) * time.Millisecond, time.Duration(e[2].(int64)) * time.Microsecond}
		}
		return keys
	}
	limits := map[string]*limiters.Limit{}
	for _, template := range templates {
		for _, part := range template {
			for _, c := range part.checks {
				limits[w.key(part.identity, c.Limit)] = c.Limit
			}
		}
	}
	// What a clock that was set back keeps for longer is one's of before that.
	back := time.Duration(w.behind) * time.Microsecond
	for key, e := range left() {
		ttl, last := e[0], e[1]
		l := limits[key]
		var mostTTL, mostLast time.Duration
		switch {
		case strings.HasPrefix(key, fleetKey):
			mostTTL, mostLast = time.Minute+2*time.Second, 2*time.Second
		case l == nil:
			t.Errorf("%s is nobody's", key)
			continue
		case l.Kind == limiters.Rate:
			mostTTL = time.Duration(l.Capacity)*l.Period/time.Duration(l.Requests) + 3*time.Millisecond
		default:
			mostTTL, mostLast = limiters.MaxLease+3*time.Millisecond, l.Lease
		}
		if ttl <= 0 || ttl > mostTTL+back || last > mostLast+back {
			t.Errorf("%s lives for %v and its last member for %v, want at most %v and %v", key, ttl, last, mostTTL, mostLast)
		}
	}
	// Nine beats, and with the next sync of somebody.
	eventually(t, "the claim of the instance that was killed free", func() bool {
		return w.alive[0].fleet.Status().Fleet.Instances == int64(len(w.alive))
	})
	w.stop()
	eventually(t, "nothing left but buckets", func() bool {
		for key, e := range left() {
			if l := limits[key]; e[1] > 0 && (l == nil || l.Kind == limiters.Concurrency) {
				return false
			}
		}
		return true
	})
}
