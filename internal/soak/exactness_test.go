// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"context"
	"flag"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

var (
	seedFlag      = flag.Uint64("seed", 0, "what faults and requests are drawn from (default: another each time)")
	exactnessTime = flag.Duration("exactness.time", 6*time.Second, "how long faults follow each other in TestExactness")
)

// newSeed returns the seed of this run, and tells how to run it again.
func newSeed(t *testing.T) uint64 {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64() >> 1
	}
	t.Logf("again with: go test ./internal/soak -run '^%s$' -seed %d", t.Name(), seed)
	return seed
}

// patience bounds every wait for something that must happen. It is long because
// it only ever passes when something is broken.
const patience = 60 * time.Second

// eventually fails the test unless something becomes true.
func eventually(t testing.TB, what string, true func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !true(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("within %v: not %s", patience, what)
		}
	}
}

// The whole of it: instances come and go, Redis and the network fail in all ways
// at random, and nothing is ever allowed that must not be. Afterwards everything
// is forgotten that has to be.
func TestExactness(t *testing.T) {
	w := newWorld(t, newSeed(t), 3)
	w.play(rand.New(rand.NewPCG(w.seed, 0)), append(w.ground.faults(), w.faults()...), *exactnessTime, 150*time.Millisecond)
	w.calm()
	w.checkForgets()
	w.check()
}

// One token, one lease or a few slots that a script gives away by mistake do not
// escape. The faults are made in Redis: an EVAL of the mistake's effect.
func TestExactness_FindsMistakes(t *testing.T) {
	cases := []struct {
		name, about string
		mistake     string // returns whether it was made
		times       int
		key         func(w *world) string
	}{
		{"a token", "rate scarce", `
			local level, at = string.match(redis.call('GET', KEYS[1]) or '', '^(%d+) (%d+)$')
			if not level or tonumber(level) > 1000000 then return 0 end
			redis.call('SET', KEYS[1], string.format('%.0f %.0f', level + 1000000, at), 'KEEPTTL')
			return 1`, 1,
			func(w *world) string { return w.key(0, scarce) }},
		{"a lease", "concurrency long", `
			if redis.call('ZCARD', KEYS[1]) < 2 then return 0 end
			redis.call('ZPOPMIN', KEYS[1])
			return 1`, 20, // some of them are about to be given back anyway
			func(w *world) string { return w.key(3, long) }},
		{"slots of the fleet", "fleet", `
			local state = redis.call('HGET', KEYS[1], 'state') or ''
			local before, claims, after = string.match(state, '^(.*) (%d+) (%S+ %S+ %S+ %S+)$')
			if not claims or claims + 0 < 6 then return 0 end
			redis.call('HSET', KEYS[1], 'state', before .. ' ' .. claims - 4 .. ' ' .. after)
			return 1`, 1,
			func(*world) string { return fleetKey }},
	}
	seed := newSeed(t)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			// A machine that pauses can make a history blind, so one of a few must see.
			for try := range uint64(5) {
				w := newWorld(t, seed+try, 2)
				key := c.key(w)
				made := func() bool { return w.command("EVAL", c.mistake, 1, key) == int64(1) }
				time.Sleep(time.Second)
				for range c.times {
					eventually(t, "a mistake", made)
					time.Sleep(50 * time.Millisecond)
				}
				time.Sleep(1500 * time.Millisecond)
				w.stop()
				complaints := w.collect().Check()
				for _, complaint := range complaints {
					if !strings.HasPrefix(complaint, c.about) {
						t.Errorf("a complaint about something else: %s", complaint)
					}
					t.Log(complaint)
				}
				if len(complaints) > 0 {
					return
				}
			}
			t.Error("nobody has noticed")
		})
	}
}

// Limits of all shapes. Those of identities are in templates.
var (
	rate20  = rate("steady", 20, time.Second, 10, 1)
	rate300 = rate("fast", 300, time.Second, 40, 1)
	dear    = rate("dear", 7, time.Second, 6, 2)
	scarce  = rate("scarce", 1, time.Second, 4, 1)
	decade  = rate("decade", 30, 10*time.Second, 5, 1)
	three   = concurrency("three", 3, time.Second)
	long    = concurrency("long", 2, 2*time.Second)
)

// templates are what requests ask, by identity.
var templates = [][]struct {
	identity int
	checks   []limiters.Check
}{
	{{0, []limiters.Check{{Limit: scarce}}}},
	{{1, []limiters.Check{{Limit: rate300}, {Limit: rate20, Dark: true}}}},
	{{1, []limiters.Check{{Limit: rate300}}}},
	{{2, []limiters.Check{{Limit: dear}, {Limit: three}}}},
	{{3, []limiters.Check{{Limit: long}}}},
	{{0, []limiters.Check{{Limit: scarce}}}, {4, []limiters.Check{{Limit: decade}, {Limit: rate20}}}},
	{{5, []limiters.Check{{Limit: rate20}, {Limit: three}, {Limit: long, Dark: true}}}},
	{{6, []limiters.Check{{Limit: rate20}}}, {7, []limiters.Check{{Limit: three}}}},
}

func identity(n int) (id limiters.Identity) {
	id[0] = byte(n + 1)
	return id
}

const (
	storeTimeout = 250 * time.Millisecond
	fleetKey     = limiters.DefaultKeyPrefix + "{pool}:fleet"
	allocation   = 8 // half of 16
)

// world is a Redis with a fleet of instances of the limiters, and what happens.
type world struct {
	*ground

	seed uint64
	wg   sync.WaitGroup
	done chan struct{}

	instances []*instance // all that ever lived
	alive     []*instance // changed by the test's goroutine alone
}

func newWorld(t *testing.T, seed uint64, instances int) *world {
	w := &world{ground: newGround(t), seed: seed, done: make(chan struct{})}
	w.h.Allocation, w.h.Renewals = allocation, map[int][]int64{}
	t.Cleanup(w.stop)
	for range instances {
		w.start()
	}
	w.wg.Go(w.sample)
	return w
}

// start starts another instance.
func (w *world) start() {
	i := newInstance(w, len(w.instances))
	w.instances = append(w.instances, i)
	w.alive = append(w.alive, i)
}

// key is the key of a limit of an identity.
func (w *world) key(id int, l *limiters.Limit) string {
	key := limiters.DefaultKeyPrefix + "pool:{" + identity(id).String() + "}"
	if l.Kind == limiters.Concurrency {
		return key + ":c:" + l.Name
	}
	return key + ":r:" + l.Name + ":" + l.Period.String()
}

// sample looks at the fleet's claims, in one step.
func (w *world) sample() {
	rdb := w.redis.Client()
	for {
		select {
		case <-w.done:
			return
		case <-time.After(10 * time.Millisecond):
		}
		all, err := rdb.HGetAll(context.Background(), fleetKey).Result()
		if err != nil {
			continue
		}
		sum := Sum{At: now()}
		for name, entry := range all {
			if fields := strings.Fields(entry); len(name) == 32 && len(fields) == 6 {
				claim, _ := strconv.ParseInt(fields[1], 10, 64)
				sum.Claims += claim
			}
		}
		w.mu.Lock()
		w.h.Sums = append(w.h.Sums, sum)
		w.mu.Unlock()
	}
}

// stop ends all instances that live, as instances that are stopped end.
func (w *world) stop() {
	select {
	case <-w.done:
		return
	default:
	}
	for _, i := range w.alive {
		i.stop()
	}
	close(w.done)
	w.wg.Wait()
	for _, i := range w.alive {
		i.close()
	}
}

// collect returns the history, once all has stopped.
func (w *world) collect() *History {
	for _, i := range w.instances {
		for _, d := range i.decisions {
			w.h.Decisions = append(w.h.Decisions, *d)
		}
		for _, s := range i.slots {
			w.h.Slots = append(w.h.Slots, *s)
		}
	}
	return &w.h
}

// check complains of the history, and if it is too poor to prove anything.
func (w *world) check() {
	w.t.Helper()
	w.stop()
	h := w.collect()
	complaints := h.Check()
	for _, c := range complaints[:min(10, len(complaints))] {
		w.t.Error(c)
	}
	type count struct{ allowed, denied, unknown int }
	counts := map[string]*count{}
	for _, d := range h.Decisions {
		c := counts[d.Limit.Name]
		if c == nil {
			c = new(count)
			counts[d.Limit.Name] = c
		}
		switch d.Outcome {
		case limiters.Allowed:
			c.allowed++
		case limiters.Denied:
			c.denied++
		case limiters.Unknown:
			c.unknown++
		}
	}
	for name, c := range counts {
		w.t.Logf("%s: %d allowed, %d denied, %d without an answer", name, c.allowed, c.denied, c.unknown)
		if c.allowed == 0 || c.denied == 0 {
			w.t.Errorf("%s: %d allowed and %d denied prove nothing", name, c.allowed, c.denied)
		}
	}
	claimed := 0
	for _, s := range h.Slots {
		if s.Claimed {
			claimed++
		}
	}
	w.t.Logf("fleet: %d requests, %d in claimed slots; %d looks at the claims", len(h.Slots), claimed, len(h.Sums))
	if claimed == 0 || len(h.Sums) == 0 {
		w.t.Error("a fleet without requests proves nothing")
	}
}
