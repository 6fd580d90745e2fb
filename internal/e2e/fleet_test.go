// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// fleet is a fleet of Caddys on one Redis. What they pass on is in progress in
// one of two upstreams, which count.
type fleet struct {
	redis            *redistest.Server
	rdb              *goredis.Client
	critical, others *upstream
	caddys           []*caddy
	ids              []string // of the caddys, as the fleet knows them
}

func newFleet(t testing.TB) *fleet {
	redis := redistest.Start(t)
	return &fleet{redis: redis, rdb: redis.Client(), critical: newUpstream(t), others: newUpstream(t)}
}

// hundred is a fleet whose allocation is 80.
const (
	hundred    = "fleet 100 reserve 20%"
	allocation = 80
	usable     = allocation * 95 / 100 // what one instance can have, while the others are idle
)

// config is a site with the options of stripe_ratelimit.
func (f *fleet) config(options string) config {
	return config{redis: f.redis.Addr, site: fmt.Sprintf(`
	stripe_ratelimit {
		critical /charges*
		%s
	}
	handle_path /charges* {
		reverse_proxy %s
	}
	handle {
		reverse_proxy %s
	}`, options, f.critical.addr, f.others.addr)}
}

// start starts n Caddys and waits until the fleet knows them.
func (f *fleet) start(t testing.TB, n int, options string) {
	t.Helper()
	for range n {
		known := f.state(t)
		f.caddys = append(f.caddys, start(t, f.config(options)))
		eventually(t, patience, "registered", func() bool {
			for id := range f.state(t).entries {
				if _, ok := known.entries[id]; !ok {
					f.ids = append(f.ids, id)
					return true
				}
			}
			return false
		})
	}
}

// unjudged is how many requests passed because their Caddy could not ask the
// fleet in time, for which a request waits 250ms at most. It is 0 unless the
// machine stalls; then the bounds are so much wider.
func (f *fleet) unjudged(t testing.TB) int {
	t.Helper()
	sum := 0.0
	for _, c := range f.caddys {
		sum += c.metric(t, "decisions_total", `kind="fleet"`, `outcome="store_error"`)
	}
	return int(sum)
}

// refused sends a request that the fleet must shed. One that passed because its
// Caddy could not ask in time tells nothing, so it is sent again.
func (f *fleet) refused(t testing.TB, c *caddy, header ...string) {
	t.Helper()
	for range 10 {
		before := f.unjudged(t)
		a := c.get(t, "/", header...)
		if a.status == http.StatusServiceUnavailable || f.unjudged(t) == before {
			a.want(t, http.StatusServiceUnavailable)
			return
		}
	}
	t.Fatal("the fleet cannot be asked")
}

// begin makes a call be in progress through a Caddy until it is let go, unless
// it is answered at once. It adds what is in progress to h.
func (h *held) begin(t testing.TB, c *caddy, call *call, path string, header ...string) (a answer, begun bool) {
	t.Helper()
	client := newClient(t, false)
	over := make(chan answer, 1)
	h.wg.Go(func() {
		a, _ := c.try(t.Context(), client, http.MethodGet, path+"/hold", call.header(header...)...)
		over <- a
	})
	select {
	case <-call.entered:
		h.calls = append(h.calls, call)
		return answer{}, true
	case a = <-over:
		return a, false
	case <-time.After(patience):
		t.Fatal("a call is neither in progress nor over")
	}
	return a, false
}

// fill makes n non-critical calls be in progress through a Caddy. It may refuse
// some, but not once every other Caddy has had so many beats. It returns after
// how many the last was refused.
func (f *fleet) fill(t testing.TB, i, n int, beats int64) (h *held, last int64) {
	t.Helper()
	h = new(held)
	before := f.state(t)
	for len(h.calls) < n {
		passed := patience.Milliseconds() // without others
		now := f.state(t)
		for other, id := range f.ids {
			if other != i {
				passed = min(passed, now.entries[id].seq-before.entries[id].seq)
			}
		}
		a, ok := h.begin(t, f.caddys[i], f.others.call(), "")
		if ok {
			continue
		}
		a.want(t, http.StatusServiceUnavailable)
		if last = passed; passed > beats {
			t.Fatalf("%d of %d are in progress and the next is refused, %d beats after the others were idle; want at most %d", len(h.calls), n, passed, beats)
		}
		time.Sleep(15 * time.Millisecond) // who was refused asks again after 12ms at most
	}
	return h, last
}

// However load is spread over three Caddys, no more than 80 calls that are not
// critical are in progress at the upstream, and every critical one passes.
func TestFleet_Bound(t *testing.T) {
	const clients, charging, load = 110, 12, 2 * time.Second
	f := newFleet(t)
	f.start(t, 3, hundred)

	cases := []struct {
		name string
		at   func(client int, since time.Duration) int // a Caddy
		want int                                       // in progress at once, at least
	}{
		{"one hot instance", func(int, time.Duration) int { return 0 }, usable},
		{"even", func(client int, _ time.Duration) int { return client % 3 }, usable},
		{"shifting", func(_ int, since time.Duration) int { return int(since / (400 * time.Millisecond) % 3) }, allocation / 2},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			f.others.forget()
			before := f.unjudged(t)
			var passed, shed, charged atomic.Int64
			begin := time.Now()
			goOn := func() bool {
				since := time.Since(begin)
				return since < load || f.others.peak() < c.want && since < patience
			}
			run := func(client int, up *upstream, path string, count func(status int)) {
				rng := rand.New(rand.NewPCG(uint64(client), 0))
				var https [3]*http.Client
				for i := range https {
					https[i] = newClient(t, false)
				}
				for goOn() {
					i, call := c.at(client, time.Since(begin)), up.call()
					time.AfterFunc(time.Duration(100+rng.IntN(300))*time.Millisecond, func() { close(call.answer) })
					a, err := f.caddys[i].try(t.Context(), https[i], http.MethodGet, path+"/hold", call.header()...)
					if err != nil {
						t.Error(err)
						return
					}
					count(a.status)
				}
			}
			var wg sync.WaitGroup
			for client := range clients {
				wg.Go(func() {
					run(client, f.others, "", func(status int) {
						switch status {
						case http.StatusOK:
							passed.Add(1)
						case http.StatusServiceUnavailable:
							shed.Add(1)
							time.Sleep(60 * time.Millisecond) // leaves the machine to the others
						default:
							t.Errorf("got status %d, want 200 or 503", status)
						}
					})
				})
			}
			for client := range charging {
				wg.Go(func() {
					run(clients+client, f.critical, "/charges", func(status int) {
						charged.Add(1)
						if status != http.StatusOK {
							t.Errorf("critical: got status %d, want 200", status)
						}
					})
				})
			}
			wg.Wait()

			peak, most := f.others.peak(), allocation+f.unjudged(t)-before
			t.Logf("%d in progress at most, %d passed (%d unjudged), %d shed, %d critical",
				peak, passed.Load(), most-allocation, shed.Load(), charged.Load())
			if peak < c.want || peak > most {
				t.Errorf("%d were in progress at once, want %d to %d", peak, c.want, most)
			}
			if shed.Load() == 0 {
				t.Error("none was shed, so the bound was not tried")
			}
		})
	}
}

// One Caddy can use 95 % of the slots while the others are idle. Where load
// moves, slots follow: what a Caddy refuses while another has slots that it
// does not need, it does not refuse for longer than 5 beats.
func TestFleet_SlotsFollowTheLoad(t *testing.T) {
	const beats = 5
	f := newFleet(t)
	f.start(t, 3, hundred)
	for _, i := range []int{0, 1, 2, 0} {
		h, last := f.fill(t, i, usable, beats)
		t.Logf("%d in progress through Caddy %d, the last was refused in beat %d of the others", usable, i, last)
		for more := true; more; { // as many as go, but for those that need not be usable
			_, more = h.begin(t, f.caddys[i], f.others.call(), "")
		}
		if n := f.others.peak(); n < usable || n > allocation+f.unjudged(t) {
			t.Errorf("%d were in progress at once, want %d to %d", n, usable, allocation)
		}
		for _, c := range f.caddys {
			c.get(t, "/charges").want(t, http.StatusOK)
		}
		h.letGo(t, len(h.calls))
	}
}

// While there is room, requests need no store: a Caddy says what it does each
// beat, however many requests there are.
func TestFleet_NoStoreOnTheWay(t *testing.T) {
	f := newFleet(t)
	f.start(t, 1, hundred)
	c := f.caddys[0]
	const shortest = 200 * time.Millisecond // from one beat to the next
	// Each sync reads two fields; switches have a script of their own.
	const sync = "hmget"
	calls := func() int64 { return f.redis.Commands(t)[sync] }
	eventually(t, patience, "known to Redis", func() bool { return calls() > 0 })

	t.Run("one after the other", func(t *testing.T) {
		const requests = 400
		client := newClient(t, false)
		begin := time.Now()
		before := f.redis.Commands(t)
		for range requests {
			if a, err := c.try(t.Context(), client, http.MethodGet, "/", "Authorization", "Bearer sk_live_x"); err != nil || a.status != http.StatusOK {
				t.Fatalf("got status %d, error %v, want 200", a.status, err)
			}
		}
		after := f.redis.Commands(t)
		most := int64(time.Since(begin)/shortest) + 1
		n := after[sync] - before[sync]
		t.Logf("%d syncs for %d requests in %v", n, requests, time.Since(begin))
		if n > most || n > requests/4 {
			t.Errorf("%d syncs for %d requests, want those of %d beats", n, requests, most)
		}
		if got := after["eval"] - before["eval"]; got != 0 {
			t.Errorf("%d scripts were sent as text, want none", got)
		}
	})

	// A claim that falls to nothing would make each request wait for a slot.
	t.Run("one a second", func(t *testing.T) {
		for valid := 0; valid < 3; {
			time.Sleep(time.Second)
			// Right after a beat there is none for some time. What happens then
			// is the request's doing.
			before, seen := calls(), time.Now()
			eventually(t, patience, "a beat", func() bool {
				at := time.Now()
				now := calls()
				if now == before {
					seen = at
					return false
				}
				before = now
				return true
			})
			c.get(t, "/").want(t, http.StatusOK)
			n := calls() - before
			if time.Since(seen) >= shortest {
				continue // too slow to tell
			}
			valid++
			if n != 0 {
				t.Errorf("a request made %d syncs, want none", n)
			}
		}
	})
	if n := f.unjudged(t); n != 0 {
		t.Errorf("%d requests had to wait for the store, and it failed", n)
	}
}
