// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// quick is a Timeout for tests of what fails: it is spent often.
const quick = 50 * ms

// open asks until the node's breaker is open, which takes a few failures.
func open(t *testing.T, r *Redis, asks []Ask) {
	t.Helper()
	eventually(t, "an open breaker", func() bool {
		adm, err := r.Admit(t.Context(), asks)
		if !adm.Allowed || len(adm.leases) > 0 {
			t.Fatalf("got %v, %v, want the request to pass and take nothing", adm, err)
		}
		return Reason(err) == "breaker_open"
	})
}

// works asks until the store answers.
func works(t *testing.T, r *Redis, asks []Ask) (adm Admission) {
	t.Helper()
	eventually(t, "an answer", func() bool {
		var err error
		adm, err = r.Admit(t.Context(), asks)
		return err == nil
	})
	return adm
}

// While the breaker is open nobody but a probe calls the node, and releases wait.
// When it works again, they are sent.
func TestRedis_BreakerKeepsCallsAway(t *testing.T) {
	srv := redistest.Start(t)
	proxy := redistest.StartProxy(t, srv.Addr)
	o := redisAt(proxy.Addr)
	o.Timeout = quick
	var mu sync.Mutex
	var told []bool
	o.OnBreaker = func(node string, open bool, err error) {
		mu.Lock()
		defer mu.Unlock()
		if told = append(told, open); node != proxy.Addr || open != (err != nil) {
			t.Errorf("told of %s, open %v, %v", node, open, err)
		}
	}
	r := startRedis(t, o)
	slots := concurrency(t, "ten", 10, time.Hour)
	var held []Admission
	for range 5 {
		held = append(held, works(t, r, ask("a", slots)))
	}

	proxy.Refuse(true)
	proxy.CloseAll()
	open(t, r, ask("b", slots))
	before := srv.Commands(t)["evalsha"]
	proxy.Refuse(false) // the next probe succeeds
	refused := time.Now()
	for range 1000 {
		if _, err := r.Admit(t.Context(), ask("b", slots)); err != nil && Reason(err) != "breaker_open" {
			t.Fatalf("got %v, want the reason breaker_open", err)
		}
	}
	t.Logf("1000 calls with the breaker open took %v", time.Since(refused))
	for _, adm := range held {
		r.Release(adm)
	}
	adm := works(t, r, ask("b", slots))
	if adm.Results[0].Remaining > 9 {
		t.Errorf("got %v", briefly(adm.Results))
	}
	eventually(t, "all releases", func() bool { return leasesOf(t, srv, "a", slots) == 0 })
	if srv.Commands(t)["evalsha"] == before {
		t.Error("nothing was called")
	}
	mu.Lock()
	defer mu.Unlock()
	if len(told) < 2 || !told[0] || told[1] {
		t.Errorf("told of %v, want an open breaker and a closed one", told)
	}
	if ttl := srv.Client().PTTL(t.Context(), DefaultKeyPrefix+"pool:{"+id("b").String()+"}:probe").Val(); ttl > 10*ms {
		t.Errorf("the probe's key lives for %v", ttl)
	}
}

// Connections that broke without a word, of which a pool may be full, do not make
// the outage longer: requests never meet them.
func TestRedis_BreakerWeedsConnections(t *testing.T) {
	srv := redistest.Start(t)
	proxy := redistest.StartProxy(t, srv.Addr)
	o := redisAt(proxy.Addr)
	o.Timeout, o.Universal.PoolSize = 200*ms, 30
	r := startRedis(t, o)
	l := rate(t, "rate", 1000, time.Second, 1000, 1)
	conns := make([]*redis.Conn, 20)
	for i := range conns { // as many as a burst on a slow node makes
		conns[i] = r.single.client.Conn()
		if err := conns[i].Ping(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range conns {
		_ = c.Close()
	}
	works(t, r, ask("a", l))
	t.Logf("%d connections", proxy.Open())

	proxy.Strand() // those that exist lead nowhere, new ones are good
	open(t, r, ask("a", l))
	works(t, r, ask("a", l))
	for range 50 {
		if _, err := r.Admit(t.Context(), ask("a", l)); Reason(err) == "timeout" {
			t.Error("a request met a connection that leads nowhere")
		}
	}
}

// A hundred outages leave nothing behind.
func TestRedis_BreakerLeaksNothing(t *testing.T) {
	srv := redistest.Start(t)
	proxy := redistest.StartProxy(t, srv.Addr)
	l := concurrency(t, "many", 1000, time.Hour)
	o := redisAt(proxy.Addr)
	// A client with as many failed dials as connections rests for a second.
	o.Timeout, o.Universal.PoolSize = quick, 10_000
	r := handRedis(t, o)
	r.probeMost = 10 * ms
	r.done.Go(r.flushLoop)
	r.Release(works(t, r, ask("a", l)))
	base := 0
	for i := range 100 {
		proxy.Refuse(true)
		proxy.CloseAll()
		open(t, r, ask("a", l))
		proxy.Refuse(false)
		adm := works(t, r, ask("a", l))
		r.Release(adm)
		if i == 9 {
			base = settled(t, 0)
		}
	}
	if n := settled(t, base); n > base {
		t.Errorf("%d goroutines after 100 outages, %d after 10", n, base)
	}
	if n := proxy.Open(); n > 5 {
		t.Errorf("%d connections are open", n)
	}
	eventually(t, "all releases", func() bool { return srv.Client().DBSize(t.Context()).Val() == 0 })
}

// settled is the number of goroutines, once it no longer falls or is low enough.
func settled(t *testing.T, enough int) int {
	t.Helper()
	n := runtime.NumGoroutine()
	for same := 0; same < 20 && n > enough; time.Sleep(100 * ms) {
		now := runtime.NumGoroutine()
		if same++; now < n {
			same = 0
		}
		n = min(n, now)
	}
	return n
}

// The first sync of an instance, which knows no time, comes late or in time, and
// never after its caller has given up.
func TestRedis_FirstFleetSyncHasADeadline(t *testing.T) {
	srv := redistest.Start(t)
	args := func() []any {
		return []any{"0123456789abcdef0123456789abcdef", int64(1), int64(0), 0, int64(0), int64(0), int64(1), int64(1), int64(0), int64(1), int64(0), int64(0), int64(0), int64(10), int64(0), int64(0)}
	}
	o := redisAt(srv.Addr)
	r := startRedis(t, o)
	reply, err := r.SyncFleet(t.Context(), "good", args())
	if err != nil || len(reply) != 16 || reply[1] != 1 {
		t.Fatalf("got %v, %v, want a claim on one slot", reply, err)
	}

	o.Timeout = quick
	r = startRedis(t, o)
	works(t, r, ask("a", rate(t, "rate", 1, time.Hour, 100, 1))) // a connection, and the script
	calls := srv.Commands(t)["evalsha"]
	srv.Stop()
	if _, err := r.SyncFleet(t.Context(), "bad", args()); Reason(err) != "timeout" {
		t.Errorf("got %v, want a timeout", err)
	}
	srv.Cont()
	eventually(t, "the sync", func() bool { return srv.Commands(t)["evalsha"] > calls })
	if n := srv.Client().Exists(t.Context(), DefaultKeyPrefix+"{bad}:fleet").Val(); n != 0 {
		t.Error("a sync was carried out that nobody waits for")
	}
}
