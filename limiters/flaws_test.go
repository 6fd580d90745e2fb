// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// The sample limiters that everybody copies have faults, which these tests would
// find in them. Those of the fleet and of workers have theirs elsewhere.

// Sample: TTL = floor(2·capacity/rate) seconds is 0 when the capacity is below
// half the rate, SETEX fails, and the user is unlimited.
func TestSampleFlaw01_TTLIsTheTimeToFull(t *testing.T) {
	fake := redistest.StartFakeTime(t)
	r := handRedis(t, redisAt(fake.Addr))
	rdb := fake.Client()
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range 200 {
		capacity := 1 + rng.Int64N(1000)
		l := rate(t, "rate", 1+rng.Int64N(1000), []time.Duration{time.Second, 7 * time.Second, time.Hour}[i%3], capacity, 1+rng.Int64N(capacity))
		who := fmt.Sprint(i)
		fake.SetTime(epoch)
		adm, err := r.Admit(t.Context(), ask(who, l))
		if err != nil || !adm.Allowed {
			t.Fatalf("%v: got %v, %v", l, adm.Allowed, err)
		}
		key := l.stateKey(id(who)).redis(DefaultKeyPrefix)
		level := l.capacityUnits() - l.costUnits()
		full := l.until(level, l.capacityUnits())
		ttl := rdb.PTTL(t.Context(), key).Val()
		if ttl < full || ttl > full+3*time.Millisecond {
			t.Errorf("%d per %v, burst %d, cost %d: kept for %v, want %v or somewhat more", l.Requests, l.Period, l.Capacity, l.Cost, ttl, full)
		}
		fake.SetTime(epoch.Add(full - l.tick))
		if rdb.Exists(t.Context(), key).Val() == 0 {
			t.Errorf("%d per %v, burst %d, cost %d: gone before it is full", l.Requests, l.Period, l.Capacity, l.Cost)
		}
	}
	if n := rdb.Do(t.Context(), "DBSIZE").Val(); n == int64(0) {
		t.Error("nothing was stored at all")
	}
}

// Sample: the clock has whole seconds, so that twice the capacity passes within
// a millisecond across a second's edge.
func TestSampleFlaw02_NoLumpAtTheSecond(t *testing.T) {
	l := rate(t, "rate", 100, time.Second, 100, 1)
	for name, s := range stages(t) {
		for range 100 {
			s.admit(999*ms, ask("a", l))
		}
		for i, want := range []string{"denied 0 next 9ms wait 9ms", "denied 0 next 9ms wait 9ms"} {
			if got := briefly(s.admit(1000*ms, ask("a", l)).Results); got != want {
				t.Errorf("%s: request %d in the new second: got %q, want %q", name, i, got, want)
			}
		}
	}
}

// Sample: the client's clock counts, and instances whose clocks differ mint
// tokens by turns. Here instances think that the server's clock is ten seconds
// off either way.
func TestSampleFlaw03_InstancesWhoseClocksDiffer(t *testing.T) {
	fake := redistest.StartFakeTime(t)
	behind, ahead := handRedis(t, redisAt(fake.Addr)), handRedis(t, redisAt(fake.Addr))
	l := rate(t, "rate", 10, time.Second, 5, 1)
	allowed := 0
	const steps = 200
	for i := range steps {
		fake.SetTime(epoch.Add(time.Duration(i) * 10 * ms))
		for r, off := range map[*Redis]time.Duration{behind: -10 * time.Second, ahead: 10 * time.Second} {
			clock := &r.single.clock
			clock.ahead.Store(epoch.Add(time.Duration(i)*10*ms+off).UnixMicro() - time.Since(r.base).Microseconds())
			adm, err := r.Admit(t.Context(), ask("a", l))
			if err != nil {
				t.Fatal(err)
			}
			if adm.Allowed {
				allowed++
			}
		}
	}
	if want := 5 + 10*(steps-1)/100; allowed != want {
		t.Errorf("allowed %d within %v, want %d", allowed, (steps-1)*10*ms, want)
	}
}

// Sample: 0.9 tokens come back as 0 and `false` as nothing. Here all is
// integers, and a wait is exact.
func TestSampleFlaw04_FractionsOfTokens(t *testing.T) {
	l := rate(t, "rate", 1, time.Second, 1, 1)
	for name, s := range stages(t) {
		s.admit(0, ask("a", l))
		for _, at := range []time.Duration{time.Microsecond, 100 * ms, 900 * ms, time.Second - time.Microsecond} {
			wait := time.Second - at
			want := fmt.Sprintf("denied 0 next %v wait %v", wait, wait)
			if got := briefly(s.admit(at, ask("a", l)).Results); got != want {
				t.Errorf("%s: after %v: got %q, want %q", name, at, got, want)
			}
		}
	}
}

// Sample: a bucket has two keys without a hash tag, which a Cluster refuses, and
// of which either can be lost alone.
func TestSampleFlaw05_OneKeyWithATag(t *testing.T) {
	srv := redistest.Start(t)
	r := startRedis(t, redisAt(srv.Addr))
	who := Identity{0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff}
	adm, err := r.Admit(t.Context(), []Ask{{who, []Check{
		{rate(t, "rate", 5, time.Second, 5, 1), false},
		{rate(t, "daily", 5, 24*time.Hour, 5, 1), true},
		{concurrency(t, "concurrency", 5, 10*time.Second), false},
	}}})
	if err != nil || !adm.Allowed {
		t.Fatal(adm, err)
	}
	// Renaming a key forgets what it holds in every fleet that upgrades.
	want := map[string]string{
		"stripe_ratelimit:pool:{00112233445566778899aabbccddeeff}:r:rate:1s":       "string",
		"stripe_ratelimit:pool:{00112233445566778899aabbccddeeff}:r:daily:24h0m0s": "string",
		"stripe_ratelimit:pool:{00112233445566778899aabbccddeeff}:c:concurrency":   "zset",
	}
	rdb := srv.Client()
	for _, key := range rdb.Keys(t.Context(), "*").Val() {
		if got := rdb.Type(t.Context(), key).Val(); got != want[key] {
			t.Errorf("%s: got a %s, want %q", key, got, want[key])
		}
		delete(want, key)
	}
	for key, kind := range want {
		t.Errorf("no %s %s", kind, key)
	}
}

// Sample: a denial writes, so an attack multiplies writes and replication.
func TestSampleFlaw06_ADenialWritesNothing(t *testing.T) {
	fake := redistest.StartFakeTime(t)
	s := &redisStage{t, handRedis(t, redisAt(fake.Addr)), fake}
	five, one := rate(t, "rate", 5, time.Second, 5, 5), concurrency(t, "one", 1, 10*time.Second)
	changes := func() string {
		info := fake.Client().Info(t.Context(), "persistence").Val()
		_, rest, _ := strings.Cut(info, "rdb_changes_since_last_save:")
		n, _, _ := strings.Cut(rest, "\r\n")
		return n
	}
	s.admit(0, ask("a", five))
	s.admit(0, ask("b", one))
	before := changes()
	for i := range 10 {
		at := time.Duration(i) * ms
		for _, asks := range [][]Ask{ask("a", five), ask("b", one), ask("a", five, one), ask("b", five, one)} {
			if s.admit(at, asks).Allowed {
				t.Fatalf("%v is allowed", asks)
			}
		}
	}
	if after := changes(); after != before {
		t.Errorf("changes: got %s, want %s as before the denials", after, before)
	}
}

// Sample: EVAL sends the source each time.
func TestSampleFlaw07_SourceIsSentOnce(t *testing.T) {
	srv := redistest.Start(t)
	r := startRedis(t, redisAt(srv.Addr))
	l := rate(t, "rate", 1, time.Hour, 500, 1)
	for i := range 100 {
		if i == 50 {
			srv.Client().ScriptFlush(t.Context())
		}
		if _, err := r.Admit(t.Context(), ask("a", l)); err != nil {
			t.Fatalf("request %d: %v", i, err)
		}
	}
	// One for each time that the source was not known, and one more because the
	// very first call of a store only learns what the server's clock says.
	if got, want := srv.Commands(t)["eval"], int64(3); got != want {
		t.Errorf("EVAL: got %d calls, want %d", got, want)
	}
	adm, err := r.Admit(t.Context(), ask("a", l))
	if got, want := adm.Results[0].Remaining, int64(500-101); got != want || err != nil {
		t.Errorf("remaining: got %d, %v, want %d: each request costs once", got, err, want)
	}
}

// Sample: the user's text stands in the key, braces, secrets and all. Here an
// Identity cannot hold a text; that its hash is keyed is the classifier's.
func TestSampleFlaw08_NoTextOfTheUserInKeys(t *testing.T) {
	key := rate(t, "rate", 5, time.Second, 5, 1).stateKey(id("sk_live_}{")).redis(DefaultKeyPrefix)
	if want := "stripe_ratelimit:pool:{736b5f6c6976655f7d7b000000000000}:r:rate:1s"; key != want {
		t.Errorf("key: got %s, want %s", key, want)
	}
}

// Sample: a cost above the capacity is denied for ever, with "retry later".
func TestSampleFlaw09_CostAboveCapacity(t *testing.T) {
	if _, err := NewRate("pool", "rate", 5, time.Second, 5, 6); err == nil {
		t.Error("a cost of 6 with a burst of 5 is no error")
	}
	l := rate(t, "rate", 5, time.Second, 5, 5)
	for name, s := range stages(t) {
		if !s.admit(0, ask("a", l)).Allowed {
			t.Errorf("%s: a cost of the whole burst is denied", name)
		}
	}
}

// Sample: a Redis failure in the release turns a finished request into an error,
// and the slot is lost for a minute.
func TestSampleFlaw10_ReleaseOutlivesAFailure(t *testing.T) {
	srv := redistest.Start(t)
	proxy := redistest.StartProxy(t, srv.Addr)
	r := startRedis(t, redisAt(proxy.Addr))
	l := concurrency(t, "one", 1, time.Hour)
	adm, err := r.Admit(t.Context(), ask("a", l))
	if err != nil || !adm.Allowed {
		t.Fatal(adm, err)
	}
	proxy.Refuse(true)
	proxy.CloseAll()
	r.Release(adm) // must neither wait nor fail
	if got := leasesOf(t, srv, "a", l); got != 1 {
		t.Fatalf("leases: got %d, want 1 while Redis cannot be reached", got)
	}
	proxy.Refuse(false)
	eventually(t, "the release", func() bool { return leasesOf(t, srv, "a", l) == 0 })
}

// Sample: the purge runs on the client's clock, so a host whose clock is ahead
// wipes everybody's live slots.
func TestSampleFlaw11_PurgeOnTheServersClock(t *testing.T) {
	fake := redistest.StartFakeTime(t)
	r := handRedis(t, redisAt(fake.Addr))
	l := concurrency(t, "two", 2, 10*time.Second)
	for want := int64(1); want <= 2; want++ {
		r.single.clock.ahead.Store(epoch.Add(time.Hour).UnixMicro() - time.Since(r.base).Microseconds())
		adm, err := r.Admit(t.Context(), ask("a", l))
		if err != nil || !adm.Allowed {
			t.Fatal(adm, err)
		}
		if got := leasesOf(t, fake.Server, "a", l); got != want {
			t.Errorf("leases: got %d, want %d", got, want)
		}
	}
}

// Sample: a request that takes longer than the TTL leaves the count silently.
// That a renewal comes in time is leaseTable's; TestMemory_Upkeep has the other
// store.
func TestSampleFlaw12_LongRequestsStayCounted(t *testing.T) {
	fake := redistest.StartFakeTime(t)
	s := &redisStage{t, handRedis(t, redisAt(fake.Addr)), fake}
	l := concurrency(t, "one", 1, 10*time.Second)
	held := s.admit(0, ask("a", l))
	end := 10 * time.Second
	for range 5 {
		if s.admit(end, ask("a", l)).Allowed {
			t.Fatalf("a second request is allowed after %v", end)
		}
		held.leases[0].renewAt = time.Now()
		if err := s.r.renew(); err != nil {
			t.Fatal(err)
		}
		end += 10 * time.Second
	}
	s.release(end, held)
	if !s.admit(end, ask("a", l)).Allowed {
		t.Error("a request is denied after the long one")
	}
}

// Sample: the sorted set never expires.
func TestSampleFlaw13_EveryKeyExpires(t *testing.T) {
	srv := redistest.Start(t)
	r := startRedis(t, redisAt(srv.Addr))
	l := concurrency(t, "two", 2, 10*time.Second)
	adm, err := r.Admit(t.Context(), ask("a", rate(t, "rate", 5, time.Second, 5, 1), l))
	if err != nil || !adm.Allowed {
		t.Fatal(adm, err)
	}
	if err := r.renew(); err != nil {
		t.Fatal(err)
	}
	rdb := srv.Client()
	for _, key := range rdb.Keys(t.Context(), "*").Val() {
		if ttl := rdb.PTTL(t.Context(), key).Val(); ttl <= 0 || ttl > 2*time.Hour {
			t.Errorf("%s: kept for %v", key, ttl)
		}
	}
}

// Sample: ids of 4 bytes collide, and one release frees both.
func TestSampleFlaw14_IDsDoNotCollide(t *testing.T) {
	const instances, each = 20, 1000
	seen := map[string]bool{}
	for range instances {
		r := handRedis(t, redisAt("127.0.0.1:1"))
		for range each {
			seen[r.member(&lease{id: r.nextID.Add(1), length: time.Second})] = true
		}
	}
	if len(seen) != instances*each {
		t.Errorf("ids: got %d different ones of %d", len(seen), instances*each)
	}
}

// Sample: the id is kept on a shared object, where concurrent requests overwrite
// each other's.
func TestSampleFlaw15_EachRequestHasItsLease(t *testing.T) {
	srv := redistest.Start(t)
	r := startRedis(t, redisAt(srv.Addr))
	l := concurrency(t, "many", 100, 10*time.Second)
	adms := make([]Admission, 100)
	var wg sync.WaitGroup
	for i := range adms {
		wg.Go(func() { adms[i], _ = r.Admit(context.Background(), ask("a", l)) })
	}
	wg.Wait()
	for i, adm := range adms {
		if !adm.Allowed || len(adm.leases) != 1 {
			t.Fatalf("request %d: got %v with %d leases", i, adm.Allowed, len(adm.leases))
		}
	}
	for i := range 50 {
		r.Release(adms[i])
	}
	eventually(t, "50 releases", func() bool { return leasesOf(t, srv, "a", l) == 50 })
	rdb := srv.Client()
	key := l.stateKey(id("a")).redis(DefaultKeyPrefix)
	for _, adm := range adms[50:] {
		if err := rdb.ZScore(t.Context(), key, r.member(adm.leases[0])).Err(); err == redis.Nil {
			t.Fatal("the lease of a request that goes on is gone")
		}
	}
}

// Sample: only errors of Redis fail open, a bug in the limiter does not. What
// runs in the background here is under no request's recover.
func TestSampleFlaw24_BackgroundSurvivesABug(t *testing.T) {
	srv := redistest.Start(t)
	o := redisAt(srv.Addr)
	var mu sync.Mutex
	var seen []string
	bug := true
	o.Observe = func(operation string, _ time.Duration, err error) {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, operation+" "+Reason(err))
		if bug && operation != "admit" {
			panic("a bug")
		}
	}
	r := startRedis(t, o)
	l := concurrency(t, "two", 2, MinLease)
	held, err := r.Admit(t.Context(), ask("a", l))
	if err != nil {
		t.Fatal(err)
	}
	gone, err := r.Admit(t.Context(), ask("a", l))
	if err != nil {
		t.Fatal(err)
	}
	r.Release(gone)
	count := func(what string) (n int) {
		mu.Lock()
		defer mu.Unlock()
		for _, s := range seen {
			if s == what {
				n++
			}
		}
		return n
	}
	eventually(t, "a panic in each loop", func() bool { return count("release panic") > 0 && count("renew panic") > 0 })
	mu.Lock()
	bug, seen = false, nil
	mu.Unlock()
	r.Release(held)
	eventually(t, "the release", func() bool { return leasesOf(t, srv, "a", l) == 0 })
}
