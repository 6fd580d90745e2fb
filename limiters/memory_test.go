// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"encoding/binary"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

func (m *Memory) buckets() (n int) {
	for _, s := range m.shards {
		s.mu.Lock()
		n += len(s.buckets)
		s.mu.Unlock()
	}
	return n
}

func (m *Memory) sets() (n int) {
	for _, s := range m.shards {
		s.mu.Lock()
		n += len(s.slots)
		s.mu.Unlock()
	}
	return n
}

// nth returns an identity of many, spread over the shards.
func nth(n uint64) (who Identity) {
	binary.LittleEndian.PutUint64(who[:], n)
	return who
}

// Buckets that are full again are forgotten, and when there are too many others
// go as well: memory is bounded, whoever attacks.
func TestMemory_Bounded(t *testing.T) {
	for _, bound := range []int{memoryShards, 10_000} {
		m := newMemory(bound)
		l := rate(t, "rate", 1, time.Hour, 1, 1)
		now := m.now()
		for n := range uint64(3 * bound) {
			m.admitAt(now, []Ask{{nth(n), []Check{{Limit: l}}}})
			if got := m.buckets(); n%1000 == 0 && got > bound {
				t.Fatalf("%d buckets, want at most %d", got, bound)
			}
		}
		if got := m.buckets(); got > bound || got < bound/2 {
			t.Errorf("%d buckets, want at most %d", got, bound)
		}
		// A bucket that is already there needs no room.
		before := m.buckets()
		for n := range uint64(3 * bound) {
			s := m.shard(nth(n))
			if _, ok := s.buckets[l.stateKey(nth(n))]; ok {
				m.admitAt(now, []Ask{{nth(n), []Check{{Limit: l}}}})
			}
		}
		if got := m.buckets(); got != before {
			t.Errorf("%d buckets, want %d", got, before)
		}
	}
}

// While some are full again, those are the ones that make room.
func TestMemory_MakesRoomWhereItCan(t *testing.T) {
	m := newMemory(memoryShards * 100)
	day, short := rate(t, "day", 1, 24*time.Hour, 1, 1), rate(t, "short", 1, time.Millisecond, 1, 1)
	now := m.now()
	for n := range uint64(memoryShards) {
		m.admitAt(now, []Ask{{nth(n), []Check{{Limit: day}}}})
	}
	for n := range uint64(memoryShards * 1000) {
		now += 5000
		m.admitAt(now, []Ask{{nth(n), []Check{{Limit: short}}}})
	}
	kept := 0
	for n := range uint64(memoryShards) {
		if !m.admitAt(now, []Ask{{nth(n), []Check{{Limit: day}}}}).Allowed {
			kept++
		}
	}
	if kept < memoryShards*3/4 {
		t.Errorf("%d of %d buckets are kept, though others were full", kept, memoryShards)
	}
}

func TestMemory_Upkeep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := NewMemory(0)
		l, one := rate(t, "rate", 1, time.Second, 2, 1), concurrency(t, "one", 1, MinLease)
		for n := range uint64(10_000) {
			m.Release(must(t, m, []Ask{{nth(n), []Check{{l, false}, {one, false}}}}))
		}
		held := must(t, m, ask("a", l, one))
		time.Sleep(1500 * ms)
		synctest.Wait()
		if got := m.buckets(); got > 10_001/2 {
			t.Errorf("%d buckets of 10001 are kept though they are full", got)
		}
		if got := m.sets(); got != 1 {
			t.Errorf("%d sets of leases, want the one that has some", got)
		}
		// The lease is renewed, however long its request takes.
		time.Sleep(time.Hour)
		if adm := must(t, m, ask("a", one)); adm.Allowed {
			t.Error("the lease of a long request has ended")
		}
		m.Release(held)
		if adm := must(t, m, ask("a", one)); !adm.Allowed {
			t.Error("a released lease is still counted")
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		// synctest fails if the goroutine lives on.
	})
}

// A lease that has ended reaches nobody through the set that it was in, which
// another limit has by now.
func TestMemory_SetsAreReused(t *testing.T) {
	m := newMemory(0)
	one, two := concurrency(t, "one", 1, time.Second), concurrency(t, "two", 1, time.Second)
	now := m.now()
	late := m.admitAt(now, ask("a", one))
	now += 2_000_000 // it ends
	next := m.admitAt(now, ask("a", one))
	m.admitAt(now, ask("a", one)) // is denied, and drops what has ended
	m.Release(next)
	if got := m.sets(); got != 0 {
		t.Errorf("%d sets, want none without leases", got)
	}
	held := m.admitAt(now, ask("a", two))
	if late.leases[0].set != held.leases[0].set {
		t.Fatal("the set is not used again")
	}
	m.Release(late)
	if m.admitAt(now, ask("a", two)).Allowed {
		t.Error("the late release has freed the slot of another limit")
	}
	m.Release(held)
	if !m.admitAt(now, ask("a", two)).Allowed {
		t.Error("the slot is not free")
	}
}

func must(t *testing.T, s Store, asks []Ask) Admission {
	t.Helper()
	adm, err := s.Admit(context.Background(), asks)
	if err != nil {
		t.Fatal(err)
	}
	return adm
}

// Long-run rates, on a made-up clock: clients that never stop asking get what the
// bucket held and what flowed in, to the token.
func TestMemory_LongRunRate(t *testing.T) {
	cases := []struct {
		perSecond int64
		every     time.Duration // how often somebody asks
		seconds   int64
	}{
		{7, 3307 * time.Microsecond, 300},
		{7000, 71 * time.Microsecond, 15},
		{30_000, 17 * time.Microsecond, 8},
	}
	for _, c := range cases {
		l := rate(t, "rate", c.perSecond, time.Second, 5*c.perSecond, 1)
		s := newMemoryShard(10)
		end := epoch.Add(time.Duration(c.seconds) * time.Second)
		got := int64(0)
		a := ask("a", l)[0]
		var adm Admission
		for now := epoch; now.Before(end); now = now.Add(c.every) {
			adm.Results = adm.Results[:0]
			if s.admit(now.UnixMicro(), a, 0, &adm) {
				got++
			}
		}
		want := l.Capacity + c.perSecond*c.seconds
		// What flowed in after the last question is still in the bucket.
		if got > want || got < want-1-int64(c.every.Seconds()*float64(c.perSecond)) {
			t.Errorf("%d/s: allowed %d in %d s, want %d", c.perSecond, got, c.seconds, want)
		}
	}
}

func TestMemory_ConcurrentUse(t *testing.T) {
	m := NewMemory(0)
	defer m.Close()
	const limit = 5
	l, bucket := concurrency(t, "five", limit, 10*time.Second), rate(t, "rate", 1, time.Hour, 3000, 1)
	var busy, allowed atomic.Int64
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			for range 500 {
				adm, _ := m.Admit(context.Background(), ask("a", bucket, l))
				if !adm.Allowed {
					continue
				}
				allowed.Add(1)
				if n := busy.Add(1); n > limit {
					t.Errorf("%d at once, want at most %d", n, limit)
				}
				busy.Add(-1)
				m.Release(adm)
			}
		})
	}
	wg.Wait()
	if got := allowed.Load(); got > 3000 || got < limit {
		t.Errorf("allowed %d, want at most 3000", got)
	}
}

// What the memory store costs must stay small: each allocation is the garbage of
// every request.
func TestMemory_Allocations(t *testing.T) {
	m := NewMemory(0)
	defer m.Close()
	asks := ask("a", rate(t, "rate", 1_000_000, time.Second, 1_000_000, 1), concurrency(t, "two", 2, 10*time.Second))
	ctx := context.Background()
	got := testing.AllocsPerRun(1000, func() {
		adm, _ := m.Admit(ctx, asks)
		m.Release(adm)
	})
	if most := 1.0; got > most { // results and lease, in one piece
		t.Errorf("%v allocations, want at most %v", got, most)
	}
	d := NewDenials()
	d.Learn(epoch, asks, learned(denied(time.Hour), denied(0)))
	got = testing.AllocsPerRun(1000, func() { d.Denied(epoch, asks) })
	if most := 1.0; got > most { // the results
		t.Errorf("a denial from memory: %v allocations, want at most %v", got, most)
	}
}

// What an identity costs that is neither idle for long nor has a request in
// progress.
func TestMemory_BytesPerIdentity(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector needs memory, too")
	}
	const identities = 200_000
	l := rate(t, "rate", 1, time.Hour, 500, 1)
	heap := func() int64 {
		runtime.GC()
		var stats runtime.MemStats
		runtime.ReadMemStats(&stats)
		return int64(stats.HeapAlloc)
	}
	before := heap()
	m := newMemory(0)
	now := m.now()
	for n := range uint64(identities) {
		m.Release(m.admitAt(now, []Ask{{nth(n), []Check{{Limit: l}}}}))
	}
	got := (heap() - before) / identities
	t.Logf("%d B", got)
	if got > 200 {
		t.Errorf("%d B, want at most 200", got)
	}
	runtime.KeepAlive(m)
}

// The same in Redis.
func TestRedis_BytesPerIdentity(t *testing.T) {
	srv := redistest.Start(t)
	r := startRedis(t, redisAt(srv.Addr))
	l := rate(t, "rate", 100, time.Second, 500, 1)
	must(t, r, ask("a", l))
	got := srv.Client().MemoryUsage(t.Context(), l.stateKey(id("a")).redis(DefaultKeyPrefix)).Val()
	t.Logf("%d B", got)
	if got > 250 {
		t.Errorf("%d B, want at most 250", got)
	}
}
