// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
)

// reported collects where bugs are caught for the time of a test.
func reported(t *testing.T) func() []string {
	t.Helper()
	var mu sync.Mutex
	var where []string
	before := safely.Report
	safely.Report = func(b *safely.Bug) {
		mu.Lock()
		defer mu.Unlock()
		where = append(where, b.Where)
	}
	t.Cleanup(func() { safely.Report = before })
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(where)
	}
}

// A bug in the upkeep of some leases ends neither the process nor the others'.
func TestMemory_BugInUpkeep(t *testing.T) {
	bugs := reported(t)
	synctest.Test(t, func(t *testing.T) {
		m := newMemory(0)
		limit := concurrency(t, "limit", 1, time.Second)
		bad := limit.stateKey(id("bad"))
		m.shard(bad.identity).slots[bad] = nil
		good := id("good")
		if m.shard(bad.identity) == m.shard(good) {
			t.Fatal("both identities are in one shard")
		}
		go m.upkeepLoop()
		defer m.Close()
		if adm, _ := m.Admit(t.Context(), ask("good", limit)); !adm.Allowed {
			t.Fatal("denied")
		}
		time.Sleep(10 * time.Second)
		if adm, _ := m.Admit(t.Context(), ask("good", limit)); adm.Allowed {
			t.Error("ten leases later a second request is let in: nobody has renewed the first one's")
		}
		if n := len(bugs()); n < 25 || n > 35 {
			t.Errorf("%d bugs in 10 s, want one a turn of a third of a second", n)
		}
	})
}

// A bug in mid-admission leaves no lease behind: in memory it would be renewed for
// ever.
func TestMemory_BugInAdmit(t *testing.T) {
	m := newMemory(0)
	limit := concurrency(t, "limit", 1, time.Second)
	asks := append(ask("a", limit), ask("b", limit)...)
	bad := limit.stateKey(id("b"))
	m.shard(bad.identity).slots[bad] = &slots{leases: []*lease{nil}, expires: 1 << 60} // which panics
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		m.admitAt(m.now(), asks)
	}()
	if adm := m.admitAt(m.now(), ask("a", limit)); !adm.Allowed {
		t.Error("the lease of the first identity is still taken")
	}
}

// Bugs in the background work of a Redis store are counted, and it goes on.
func TestRedis_BugsInBackground(t *testing.T) {
	bugs := reported(t)
	srv := redistest.Start(t)
	r := startRedis(t, redisAt(srv.Addr))
	limit := concurrency(t, "limit", 1, 10*time.Second)
	bad := limit.stateKey(id("bad"))

	r.leases.mu.Lock()
	r.leases.ended[bad] = &ended{leases: []*lease{nil}} // with every release that is sent again
	r.leases.held[nil] = struct{}{}                     // with every renewal
	r.leases.mu.Unlock()
	eventually(t, "both loops caught a bug twice", func() bool {
		releases, renewals := 0, 0
		for _, where := range bugs() {
			switch where {
			case "release":
				releases++
			case "renew":
				renewals++
			}
		}
		return releases >= 2 && renewals >= 2
	})
	r.leases.mu.Lock()
	delete(r.leases.ended, bad)
	delete(r.leases.held, nil)
	r.leases.mu.Unlock()

	adm, err := r.Admit(t.Context(), ask("a", limit))
	if err != nil || !adm.Allowed {
		t.Fatalf("got %+v, %v", adm, err)
	}
	r.Release(adm)
	eventually(t, "the release after the bugs", func() bool { return leasesOf(t, srv, "a", limit) == 0 })
}

// brokenHook has a bug in every command.
type brokenHook struct{ redis.Hook }

func (brokenHook) DialHook(next redis.DialHook) redis.DialHook { return next }
func (brokenHook) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(context.Context, redis.Cmder) error { panic("bug") }
}
func (brokenHook) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(context.Context, []redis.Cmder) error { panic("bug") }
}

// A bug while Redis is asked is a failed store whose error tells of it; what may
// have been taken is given back.
func TestRedis_BugInCall(t *testing.T) {
	bugs := reported(t)
	r := handRedis(t, redisAt("127.0.0.1:1"))
	r.single.client.AddHook(brokenHook{})
	limit := concurrency(t, "limit", 1, 10*time.Second)
	adm, err := r.Admit(t.Context(), append(ask("a", limit), ask("b", limit)...))
	if _, ok := errors.AsType[*safely.Bug](err); !ok || Reason(err) != "panic" {
		t.Errorf("got %v, of which the reason is %s; want a bug", err, Reason(err))
	}
	if !adm.Allowed || len(adm.Results) != 2 {
		t.Errorf("got %+v, want that nothing is denied", adm)
	}
	if got := bugs(); !slices.Contains(got, "script") {
		t.Errorf("reported: %v, want script", got)
	}
	r.leases.mu.Lock()
	defer r.leases.mu.Unlock()
	if len(r.leases.held) != 0 || r.leases.nEnded != 2 {
		t.Errorf("%d leases are held and %d given back, want 0 and 2", len(r.leases.held), r.leases.nEnded)
	}
}

// A bug while the commands are made of those who wait ends neither the process nor
// their waiting, and the next pipeline leaves.
func TestRedis_BugInPipeline(t *testing.T) {
	bugs := reported(t)
	srv := redistest.Start(t)
	r := handRedis(t, redisAt(srv.Addr))
	o := &r.single.outbox
	checks := []Check{{Limit: rate(t, "rate", 1, time.Hour, 5, 1)}}
	r.ask(in30s(), r.calls(time.Now(), checks, id("z"))) // it knows the script and the clock from now on
	o.lag = time.Hour
	srv.Stop()
	var wg sync.WaitGroup
	first, bad, good := r.calls(time.Now(), checks, id("a")), r.calls(time.Now(), checks, id("b")), r.calls(time.Now(), checks, id("c"))
	bad[0].counts = []int{1} // releases, of which there are none
	wg.Go(func() { r.ask(in30s(), first) })
	awayIs(t, o, 1)
	wg.Go(func() { r.ask(in30s(), bad) })
	waitingIs(t, o, 1)
	srv.Cont()
	wg.Wait()
	if got := bugs(); Reason(bad[0].err) != "panic" || !slices.Equal(got, []string{"script"}) {
		t.Errorf("got %v and reports of %v, want a panic in script", bad[0].err, got)
	}
	if r.ask(in30s(), good); first[0].err != nil || good[0].err != nil {
		t.Errorf("others: got %v and %v", first[0].err, good[0].err)
	}
}

// A bug in what is told of an admission leaves no lease that is renewed for ever.
func TestRedis_BugInObserve(t *testing.T) {
	srv := redistest.Start(t)
	o := redisAt(srv.Addr)
	o.Observe = func(operation string, _ time.Duration, _ error) {
		if operation == "admit" {
			panic("bug")
		}
	}
	r := startRedis(t, o)
	limit := concurrency(t, "limit", 1, 10*time.Second)
	func() {
		defer func() { _ = recover() }()
		_, _ = r.Admit(t.Context(), ask("a", limit))
	}()
	eventually(t, "the release", func() bool { return leasesOf(t, srv, "a", limit) == 0 })
}

// A dark limit that is full, as far as Redis has been told, makes nobody ask again
// where others have allowed, and taken: they would take twice. Alone it is decided
// anew, by all that has ended.
func TestRedis_DarkDenialTakesOnce(t *testing.T) {
	r := handRedis(t, redisAt(redistest.Start(t).Addr))
	wide, narrow := concurrency(t, "slots", maxPiggyback+6, time.Hour), concurrency(t, "slots", 5, time.Hour)
	steady := rate(t, "rate", 1, time.Hour, 10, 1)
	cases := []struct {
		who   string
		other []*Limit
		want  string
	}{
		{"a", []*Limit{steady}, "allowed 9 next 1h0m0s; denied 0"},
		{"b", nil, "allowed 4"},
	}
	for _, c := range cases {
		var ended []Admission
		for range wide.Capacity {
			adm, err := r.Admit(t.Context(), ask(c.who, wide))
			if err != nil || !adm.Allowed {
				t.Fatalf("got %+v, %v", adm, err)
			}
			ended = append(ended, adm)
		}
		for _, adm := range ended {
			r.Release(adm) // more than one call can tell
		}
		asks := ask(c.who, append(c.other, narrow)...)
		asks[0].Checks[len(c.other)].Dark = true
		adm, err := r.Admit(t.Context(), asks)
		if got := briefly(adm.Results); err != nil || got != c.want {
			t.Errorf("beside %d others: got %s, %v; want %s", len(c.other), got, err, c.want)
		}
	}
}
