// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"encoding/binary"
	"sync"
	"sync/atomic"
	"time"
)

const (
	denialShards = 64

	// maxDenials bounds the denials that are remembered: some 20 MB.
	maxDenials = 1 << 16

	// refusalMemory is how long a full concurrency limit is believed to be
	// full without asking.
	refusalMemory = 10 * time.Millisecond
)

// Denials remembers what a store has denied, so that a client which floods is
// turned away without asking the store again.
//
// A bucket's denial stays true until its wait has passed, whatever other
// requests do, for the same or a higher cost. A concurrency limit may have room
// again at any time: its refusal is believed for refusalMemory or until a lease
// of the identity ends in this process, and then one request asks while the
// others wait for what it learns, at most as long again.
//
// It trades a little memory: what does not fit is forgotten, and asked again.
type Denials struct {
	shards [denialShards]denialShard
}

type denialShard struct {
	// size is len(denials), written under mu. Mostly it is 0, and then nobody needs
	// mu: who reads 0 and does nothing has done what it would have done under mu
	// just before the next denial came in. What was learned before it began it sees.
	size atomic.Int64

	mu        sync.Mutex // guards below
	denials   map[denialKey]denial
	forgotten time.Time // what was asked before must not be learned any more
}

func (s *denialShard) empty() bool { return s.size.Load() == 0 }

// unlock ends a change.
func (s *denialShard) unlock() {
	s.size.Store(int64(len(s.denials)))
	s.mu.Unlock()
}

// denialKey has the numbers of a bucket in it: its denial says nothing about
// others. A refusal of a concurrency limit is one for each identity, with the
// number in it, so that the end of a lease that another number admitted forgets
// it, too.
type denialKey struct {
	state    stateKey
	capacity int64 // of a bucket
	requests int64
}

type denial struct {
	until    time.Time
	cost     int64
	capacity int64
}

// NewDenials returns an empty memory.
func NewDenials() *Denials {
	d := &Denials{}
	for i := range d.shards {
		d.shards[i].denials = map[denialKey]denial{}
	}
	return d
}

// Denied answers asks from memory if one of their enforced checks is known to
// be denied at now. Of the enforced checks of the Admission only denied ones
// have a result, and not all of them if one suffices; no Release is needed.
func (d *Denials) Denied(now time.Time, asks []Ask) (Admission, bool) {
	var adm Admission
	n, denied := 0, false
	for _, ask := range asks {
		shard := d.shard(ask.Identity)
		if shard.empty() {
			n += len(ask.Checks)
			continue
		}
		for i, c := range ask.Checks {
			if denied && c.Limit.Kind == Concurrency {
				continue // or this request would pass for the one that asks
			}
			wait, ok := shard.denied(now, ask.Identity, c)
			if !ok {
				continue
			}
			if !denied {
				denied = true
				adm.Results = make([]Result, total(asks))
			}
			adm.Results[n+i] = Result{Outcome: Denied, RetryAfter: wait}
		}
		n += len(ask.Checks)
	}
	if !denied {
		return adm, false
	}
	for n, i := 0, 0; i < len(asks); n, i = n+len(asks[i].Checks), i+1 {
		for j, c := range asks[i].Checks {
			if r := &adm.Results[n+j]; r.Outcome == Unknown && c.Dark {
				r.Outcome = NotEvaluated
			}
		}
	}
	return adm, true
}

// Learn remembers the denials in what a store answered to asks that were sent
// at now. It must be called for every call of Admit, also for a failed one.
func (d *Denials) Learn(now time.Time, asks []Ask, adm Admission) {
	n := 0
	for _, ask := range asks {
		shard := d.shard(ask.Identity)
		for i, c := range ask.Checks {
			r := adm.Results[n+i]
			if c.Dark || (c.Limit.Kind == Rate && r.Outcome != Denied) {
				continue
			}
			shard.learn(now, ask.Identity, c.Limit, r)
		}
		n += len(ask.Checks)
	}
}

// Ended forgets refusals of concurrency limits of which a lease has ended here.
func (d *Denials) Ended(adm Admission) {
	for _, l := range adm.leases {
		shard := d.shard(l.key.identity)
		if shard.empty() {
			continue
		}
		shard.mu.Lock()
		delete(shard.denials, denialKey{state: l.key})
		shard.unlock()
	}
}

// Forget drops everything, after limits were reset by hand, and what answers to
// earlier questions will yet say.
func (d *Denials) Forget() { d.forgetAt(time.Now()) }

func (d *Denials) forgetAt(now time.Time) {
	for i := range d.shards {
		shard := &d.shards[i]
		shard.mu.Lock()
		clear(shard.denials)
		shard.forgotten = now
		shard.unlock()
	}
}

func total(asks []Ask) int {
	n := 0
	for _, ask := range asks {
		n += len(ask.Checks)
	}
	return n
}

func (d *Denials) shard(id Identity) *denialShard {
	return &d.shards[binary.LittleEndian.Uint64(id[8:])%denialShards]
}

func (l *Limit) denialKey(id Identity) denialKey {
	key := denialKey{state: l.stateKey(id)}
	if l.Kind == Rate {
		key.capacity, key.requests = l.Capacity, l.Requests
	}
	return key
}

func (s *denialShard) denied(now time.Time, id Identity, c Check) (time.Duration, bool) {
	if c.Dark {
		return 0, false
	}
	s.mu.Lock()
	defer s.unlock()
	key := c.Limit.denialKey(id)
	den, ok := s.denials[key]
	known := now.Before(den.until)
	switch {
	case !ok, den.capacity != c.Limit.Capacity:
		return 0, false
	case c.Limit.Kind == Concurrency:
		if !known { // this request asks
			den.until = now.Add(refusalMemory)
			s.denials[key] = den
		}
		return 0, known
	case !known:
		delete(s.denials, key)
		return 0, false
	}
	return den.until.Sub(now), c.Limit.Cost >= den.cost
}

func (s *denialShard) learn(now time.Time, id Identity, l *Limit, r Result) {
	if r.Outcome != Denied && s.empty() {
		return
	}
	key := l.denialKey(id)
	s.mu.Lock()
	defer s.unlock()
	if r.Outcome != Denied {
		delete(s.denials, key)
		return
	}
	if now.Before(s.forgotten) {
		return
	}
	den := denial{until: now.Add(r.RetryAfter), cost: l.Cost, capacity: l.Capacity}
	if l.Kind == Concurrency {
		den.until = now.Add(refusalMemory)
	}
	if _, ok := s.denials[key]; !ok && len(s.denials) >= maxDenials/denialShards {
		s.makeRoom(now)
	}
	s.denials[key] = den
}

// makeRoom forgets what has passed among a few, and at least one; mu must be held.
func (s *denialShard) makeRoom(now time.Time) {
	const look = 16
	n, freed := 0, false
	for k, den := range s.denials {
		if n++; now.After(den.until) || (n == look && !freed) {
			delete(s.denials, k)
			freed = true
		}
		if n == look {
			return
		}
	}
}
