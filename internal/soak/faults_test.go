// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// fault is one way to fail. It lasts for a while, d, and is over when do returns.
type fault struct {
	name string
	do   func(w *world, rng *rand.Rand, d time.Duration)
}

var faults = []fault{
	{"Redis hangs", func(w *world, _ *rand.Rand, d time.Duration) {
		w.redis.Stop()
		time.Sleep(d)
		w.redis.Cont()
	}},
	{"Redis is killed and comes back with its data", func(w *world, _ *rand.Rand, d time.Duration) {
		w.redis.Kill()
		time.Sleep(d)
		w.redis.Restart()
	}},
	{"Redis is killed and comes back without its data", func(w *world, _ *rand.Rand, d time.Duration) {
		from := now()
		w.redis.Kill()
		w.lost(from)
		dir := w.redis.Args[1+slices.Index(w.redis.Args, "--dir")]
		if err := os.RemoveAll(filepath.Join(dir, "appendonlydir")); err != nil {
			w.t.Fatal(err)
		}
		time.Sleep(d)
		w.redis.Restart()
	}},
	{"FLUSHALL", func(w *world, _ *rand.Rand, _ time.Duration) {
		from := now()
		w.must(w.rdb.FlushAll(w.t.Context()).Err())
		w.lost(from)
	}},
	{"SCRIPT FLUSH", func(w *world, _ *rand.Rand, _ time.Duration) {
		w.must(w.rdb.ScriptFlush(w.t.Context()).Err())
	}},
	{"CLIENT KILL", func(w *world, _ *rand.Rand, _ time.Duration) {
		w.must(w.rdb.Do(w.t.Context(), "CLIENT", "KILL", "TYPE", "normal").Err())
	}},
	{"one instance is cut off", func(w *world, rng *rand.Rand, d time.Duration) {
		proxy := w.alive[rng.IntN(len(w.alive))].proxy
		proxy.Blackhole(true)
		time.Sleep(d)
		proxy.Blackhole(false)
	}},
	{"one instance is cut off for beats", func(w *world, rng *rand.Rand, d time.Duration) {
		proxy := w.alive[rng.IntN(len(w.alive))].proxy
		proxy.Blackhole(true)
		time.Sleep(2*time.Second + d)
		proxy.Blackhole(false)
	}},
	{"all are refused", func(w *world, _ *rand.Rand, d time.Duration) {
		for _, i := range w.alive {
			i.proxy.Refuse(true)
			i.proxy.CloseAll()
		}
		time.Sleep(d)
		for _, i := range w.alive {
			i.proxy.Refuse(false)
		}
	}},
	{"replies are lost", func(w *world, rng *rand.Rand, d time.Duration) {
		for range 4 {
			for _, i := range w.alive {
				i.proxy.CutReplies(1 + rng.IntN(3))
			}
			time.Sleep(d / 4)
		}
	}},
	{"the clock jumps forward", func(w *world, rng *rand.Rand, _ time.Duration) {
		w.jump(time.Duration(1+rng.IntN(12)) * 250 * time.Millisecond)
	}},
	{"the clock jumps back", func(w *world, rng *rand.Rand, _ time.Duration) {
		w.jump(-time.Duration(1+rng.IntN(4)) * 250 * time.Millisecond)
	}},
	{"an instance is killed, and another comes", func(w *world, rng *rand.Rand, d time.Duration) {
		w.killOne(rng)
		time.Sleep(d)
		w.start()
	}},
	{"an instance is stopped, and another comes", func(w *world, rng *rand.Rand, _ time.Duration) {
		n := rng.IntN(len(w.alive))
		gone := w.alive[n]
		w.alive = slices.Delete(w.alive, n, n+1)
		w.start()
		gone.stop()
		gone.close()
	}},
}

// must fails the test.
func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// lost notes that what Redis had is gone since some moment from a time until now.
func (w *world) lost(from int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.h.Losses = append(w.h.Losses, Span{from, now()})
}

// jump sets Redis's clock.
func (w *world) jump(by time.Duration) {
	from := now()
	w.offset += by
	w.redis.SetOffset(w.offset)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.h.Jumps = append(w.h.Jumps, Jump{Span{from, now()}, by.Microseconds()})
	w.behind += max(0, -by.Microseconds())
}

func (w *world) killOne(rng *rand.Rand) *instance {
	n := rng.IntN(len(w.alive))
	victim := w.alive[n]
	w.alive = slices.Delete(w.alive, n, n+1)
	victim.kill()
	return victim
}

// faults makes faults follow each other for a time, each kind once before any
// comes again.
func (w *world) faults(length time.Duration) {
	rng := rand.New(rand.NewPCG(w.seed, 0))
	var deck []int
	for end := time.Now().Add(length); time.Now().Before(end); {
		time.Sleep(upTo(rng, 300*time.Millisecond))
		if len(deck) == 0 {
			deck = rng.Perm(len(faults))
		}
		f := faults[deck[0]]
		deck = deck[1:]
		d := 100*time.Millisecond + upTo(rng, 500*time.Millisecond)
		from := now()
		f.do(w, rng, d)
		w.mu.Lock()
		w.h.Troubles = append(w.h.Troubles, Span{from, now()})
		w.mu.Unlock()
		w.t.Logf("%d µs: %s; %v", from, f.name, time.Duration(now()-from)*time.Microsecond)
	}
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
			all[#all + 1] = {key, redis.call('PTTL', key), last}
		end
		return all`
	left := func() map[string][2]time.Duration {
		reply, err := w.rdb.Eval(t.Context(), script, nil).Slice()
		w.must(err)
		keys := map[string][2]time.Duration{}
		for _, entry := range reply {
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
