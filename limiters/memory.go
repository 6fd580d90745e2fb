// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"encoding/binary"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
)

const (
	memoryShards = 64
	spareSlots   = 8 // sets that a shard keeps for reuse

	// DefaultMemoryBuckets bounds the buckets that a Memory keeps: some
	// 200 MB at most.
	DefaultMemoryBuckets = 1 << 20

	// renewEvery is a third of the shortest lease, so that a lease survives
	// two renewals that come late.
	renewEvery = MinLease / 3
)

// Memory is a Store in the memory of this process: the limits hold for this
// process alone and start anew with it.
//
// It is also the specification of the Lua scripts: given the same clock, both
// answer every sequence of operations alike. It trades exactness for bounded
// memory in one case: when more buckets are in use at once than it may keep,
// it forgets some, which are then full.
type Memory struct {
	shards [memoryShards]*memoryShard
	start  time.Time

	stop chan struct{}
	done chan struct{}
}

type memoryShard struct {
	maxBuckets int

	mu      sync.Mutex // guards below
	buckets map[stateKey]bucket
	slots   map[stateKey]*slots // of requests in progress; few, so they stay in the cache
	spare   []*slots            // for the next keys
}

// bucket is what Redis keeps as the string "level at".
type bucket struct {
	level   int64 // units
	at      int64 // ticks
	expires int64 // ms; after it the bucket does not exist
}

// slots is what Redis keeps as a sorted set.
type slots struct {
	leases  []*lease // in no order; each knows its index
	first   int64    // us; no lease ends before it
	expires int64    // ms; after it there are none

	one [1]*lease // room for most
}

// NewMemory returns a Memory that keeps at most maxBuckets buckets, or
// DefaultMemoryBuckets if that is 0.
func NewMemory(maxBuckets int) *Memory {
	m := newMemory(maxBuckets)
	go m.upkeepLoop()
	return m
}

// newMemory returns a Memory without its background work.
func newMemory(maxBuckets int) *Memory {
	if maxBuckets <= 0 {
		maxBuckets = DefaultMemoryBuckets
	}
	m := &Memory{start: time.Now(), stop: make(chan struct{}), done: make(chan struct{})}
	for i := range m.shards {
		m.shards[i] = newMemoryShard(max(1, maxBuckets/memoryShards))
	}
	return m
}

func newMemoryShard(maxBuckets int) *memoryShard {
	return &memoryShard{
		maxBuckets: maxBuckets,
		buckets:    map[stateKey]bucket{},
		slots:      map[stateKey]*slots{},
		spare:      make([]*slots, 0, spareSlots),
	}
}

// now is the store's clock in us: it moves as monotonic time does.
func (m *Memory) now() int64 {
	return m.start.UnixMicro() + time.Since(m.start).Microseconds()
}

// Admit implements Store. It never fails.
func (m *Memory) Admit(_ context.Context, asks []Ask) (Admission, error) {
	return m.admitAt(m.now(), asks), nil
}

func (m *Memory) admitAt(now int64, asks []Ask) Admission {
	adm := newAdmission(total(asks))
	done := false
	defer func() {
		if !done { // a bug: nobody else would give back what is taken
			m.Release(adm)
		}
	}()
	id := uint64(now/1000) << leaseCounterBits // for its time: nobody asks for a lease by it
	for _, ask := range asks {
		allowed := m.shard(ask.Identity).admit(now, ask, id, &adm)
		adm.Allowed = adm.Allowed && allowed
	}
	if !adm.Allowed {
		m.Release(adm)
		adm.leases = nil
	}
	done = true
	return adm
}

// Release implements Store.
func (m *Memory) Release(adm Admission) {
	for _, l := range adm.leases {
		m.shard(l.key.identity).release(l)
	}
}

// Close implements Store.
func (m *Memory) Close() error {
	close(m.stop)
	<-m.done
	return nil
}

// upkeepLoop renews every lease, since each is held by a request of this very
// process, and forgets what is no longer needed.
func (m *Memory) upkeepLoop() {
	defer close(m.done)
	ticker := time.NewTicker(renewEvery)
	defer ticker.Stop()
	for {
		select {
		case <-m.stop:
			return
		case <-ticker.C:
			now := m.now()
			for _, shard := range m.shards { // a bug in one is none in the others
				_ = safely.Do("upkeep", func() { shard.upkeep(now) })
			}
		}
	}
}

func (m *Memory) shard(id Identity) *memoryShard {
	// An identity is a keyed hash: its bits are as good as random.
	return m.shards[binary.LittleEndian.Uint64(id[:])%memoryShards]
}

// admit is the script admit.lua. It appends its results, and the leases it
// takes, to adm and reports whether every enforced check allows.
func (s *memoryShard) admit(now int64, ask Ask, id uint64, adm *Admission) bool {
	s.mu.Lock()
	defer s.mu.Unlock()

	type state struct {
		key          stateKey
		set          *slots
		level, clock int64
		known        bool // there was a bucket
		fits, behind bool
	}
	var few [4]state
	states := few[:0]
	allowed := true

	for _, c := range ask.Checks {
		l := c.Limit
		st := state{key: l.stateKey(ask.Identity)}
		if l.Kind == Rate {
			st.clock = now / l.tick.Microseconds()
			st.level = l.capacityUnits()
			var b bucket
			if b, st.known = s.bucket(now, st.key); st.known {
				st.behind = st.clock < b.at
				st.level = l.refill(b.level, st.clock-b.at)
			}
			st.fits = st.level >= l.costUnits()
		} else {
			st.set = s.leases(now, st.key)
			st.level = st.set.live(now)
			st.fits = st.level < l.Capacity
			if !st.fits {
				st.set.purge(now)
				st.set.cutBack(now, l.Lease.Microseconds())
			}
		}
		if !st.fits && !c.Dark {
			allowed = false
		}
		states = append(states, st)
	}

	for i, c := range ask.Checks {
		l, st := c.Limit, &states[i]
		take := allowed && st.fits
		if l.Kind == Rate {
			if take {
				st.level -= l.costUnits()
			}
			if take || st.behind {
				if !st.known {
					s.makeRoom(now)
				}
				s.buckets[st.key] = bucket{st.level, st.clock, now/1000 + l.ttl(st.level)}
			}
		} else if take {
			if st.set == nil {
				st.set = s.newLeases(st.key)
			}
			st.set.renew(now, adm.take(st.key, id, l.Lease))
			st.level++
		}

		outcome := int64(replyNotEvaluated)
		if allowed || !c.Dark {
			outcome = replyDenied
			if st.fits {
				outcome = replyAllowed
			}
		}
		r, _ := l.result(outcome, st.level) // cannot fail: the outcome is one of the three
		adm.Results = append(adm.Results, r)
	}
	return allowed
}

// makeRoom makes room for a bucket; mu must be held. When the shard is full it
// forgets a few: those that are full again, and if there are none, one at random.
func (s *memoryShard) makeRoom(now int64) {
	if len(s.buckets) < s.maxBuckets {
		return
	}
	look := min(16, len(s.buckets))
	n, freed := 0, false
	for k, old := range s.buckets {
		if n++; now/1000 > old.expires || (n == look && !freed) {
			delete(s.buckets, k)
			freed = true
		}
		if n == look {
			return
		}
	}
}

// sweep forgets buckets that are full again; mu must be held. As Redis does, it
// looks at a few and goes on while that is worth it.
func (s *memoryShard) sweep(now int64) {
	const look, rounds = 20, 16
	for range rounds {
		n, expired := 0, 0
		for k, b := range s.buckets {
			if now/1000 > b.expires {
				delete(s.buckets, k)
				expired++
			}
			if n++; n == look {
				break
			}
		}
		if expired < look/4 {
			return
		}
	}
}

// bucket is GET; mu must be held.
func (s *memoryShard) bucket(now int64, key stateKey) (bucket, bool) {
	b, ok := s.buckets[key]
	if ok && now/1000 > b.expires {
		delete(s.buckets, key)
		return bucket{}, false
	}
	return b, ok
}

// leases returns the set of a key, or nil if there is none; mu must be held.
func (s *memoryShard) leases(now int64, key stateKey) *slots {
	set := s.slots[key]
	if set != nil && now/1000 > set.expires {
		set.leases = nil // they may be renewed into another set
		delete(s.slots, key)
		return nil
	}
	return set
}

// newLeases makes the set of a key that has none; mu must be held.
func (s *memoryShard) newLeases(key stateKey) *slots {
	var set *slots
	if last := len(s.spare) - 1; last >= 0 {
		set, s.spare = s.spare[last], s.spare[:last]
	} else {
		set = new(slots)
	}
	set.leases, set.first = set.one[:0], math.MaxInt64
	s.slots[key] = set
	return set
}

// release is ZREM.
func (s *memoryShard) release(l *lease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !l.set.has(l) {
		return
	}
	l.set.remove(l)
	if len(l.set.leases) == 0 {
		delete(s.slots, l.key)
		if len(s.spare) < spareSlots {
			s.spare = append(s.spare, l.set)
		}
	}
}

// renew is the script renew.lua.
func (s *memoryShard) renew(now int64, l *lease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	set := s.leases(now, l.key)
	if set == nil {
		set = s.newLeases(l.key)
	}
	set.renew(now, l)
}

// upkeep renews every lease of the shard and forgets what is as if it were not
// there.
func (s *memoryShard) upkeep(now int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sweep(now)
	for key, set := range s.slots {
		if len(set.leases) == 0 {
			delete(s.slots, key) // whose leases had ended
			continue
		}
		set.first = math.MaxInt64
		for _, l := range set.leases {
			set.renew(now, l)
		}
	}
}

// has reports whether a lease is in the set.
func (s *slots) has(l *lease) bool {
	return s != nil && l.index < len(s.leases) && s.leases[l.index] == l
}

// remove takes a lease out, which is in the set.
func (s *slots) remove(l *lease) {
	last := len(s.leases) - 1
	s.leases[l.index] = s.leases[last]
	s.leases[l.index].index = l.index
	s.leases[last] = nil
	s.leases = s.leases[:last]
}

// live counts the leases that have not ended.
func (s *slots) live(now int64) int64 {
	if s == nil {
		return 0
	}
	if now <= s.first {
		return int64(len(s.leases))
	}
	var n int64
	for _, l := range s.leases {
		if l.end >= now {
			n++
		}
	}
	return n
}

// purge drops the leases that have ended.
func (s *slots) purge(now int64) {
	if now <= s.first {
		return
	}
	s.first = math.MaxInt64
	for _, l := range slices.Backward(s.leases) { // what moves is behind us
		if l.end < now {
			s.remove(l)
			continue
		}
		s.first = min(s.first, l.end)
	}
}

// renew lets a lease end one length from now, and adds it if it is not there.
func (s *slots) renew(now int64, l *lease) {
	if !s.has(l) {
		l.set, l.index = s, len(s.leases)
		s.leases = append(s.leases, l)
	}
	l.end = now + l.length.Microseconds()
	s.first = min(s.first, l.end)
	s.expires = now/1000 + MaxLease.Milliseconds() + 2
}

// cutBack shortens leases that end later than they could, were the clock not
// set back, and later than one of length would.
func (s *slots) cutBack(now, length int64) {
	for _, l := range s.leases {
		if own := l.length.Microseconds(); l.end > now+max(length, own) {
			l.end = now + own
			s.first = min(s.first, l.end)
		}
	}
}
