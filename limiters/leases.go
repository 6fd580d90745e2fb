// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"sync"
	"sync/atomic"
	"time"
)

// maxEnded bounds the releases that wait to be sent while Redis is away. One
// that is dropped costs its identity a slot until the lease ends by itself.
const maxEnded = 1 << 17

// lease is one taken concurrency slot.
type lease struct {
	key    stateKey
	id     uint64
	length time.Duration
	index  int // in set.leases, or in ended.leases

	// As they stand in Redis; empty: not rendered yet.
	redisKey, name string

	// Of a Memory alone. Guarded by memoryShard.mu.
	set *slots // that has it, or had
	end int64  // us

	// Guarded by leaseTable.mu.
	renewAt  time.Time // when the next renewal is due
	revives  time.Time // until when a script under way may take or lengthen it
	ends     time.Time // when it has surely ended by itself; zero while it is held
	released bool      // a release was acknowledged
	gone     bool      // and it was the last word
	claimed  uint64    // the admission that is to release it; 0: none
}

// ended are the leases of a key that were given back and are not forgotten yet: the
// claimed ones first.
type ended struct {
	leases  []*lease
	claimed int
	room    [1]*lease // for what is usual
}

func (e *ended) swap(i, j int) {
	e.leases[i], e.leases[j] = e.leases[j], e.leases[i]
	e.leases[i].index, e.leases[j].index = i, j
}

// leaseTable knows the leases that this process holds in Redis, and those it
// has given back but whose release is not yet final.
//
// A release is final once Redis acknowledges one that was sent when no script
// could take or lengthen the lease any more: before that a script under way, of
// an admission whose reply never came or of a renewal, may come after it and
// revive the lease. While a release is not acknowledged the admissions of its
// identity apply it as well, so that a client never waits for a slot that it has
// freed itself. Each claims one of them that no other counts on: a client that
// comes back has given one back, so there is one for each, and clients in any number
// and order, as many as the limit, never meet each other's.
type leaseTable struct {
	longest time.Duration // that a script may be under way

	mu     sync.Mutex // guards below and the marked fields of lease
	held   map[*lease]struct{}
	ended  map[stateKey]*ended
	spare  []*ended // which are used again, up to its capacity
	nEnded int
	queue  []*lease // ended, to be released at once
	turn   int      // where claim begins

	wake chan struct{} // capacity 1: the queue has something

	ends [256]atomic.Uint32 // how many leases have ended, by endsOf
}

func newLeaseTable(longest time.Duration) *leaseTable {
	return &leaseTable{
		longest: longest,
		held:    map[*lease]struct{}{},
		ended:   map[stateKey]*ended{},
		spare:   make([]*ended, 0, maxPipeline),
		wake:    make(chan struct{}, 1),
	}
}

// hold begins to renew leases that were taken by a script sent at now.
func (t *leaseTable) hold(now time.Time, leases ...*lease) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range leases {
		l.renewAt = now.Add(l.length / 3)
		t.held[l] = struct{}{}
	}
}

// end gives leases back. With unsure, a script under way may yet take them.
func (t *leaseTable) end(now time.Time, unsure bool, leases ...*lease) {
	if len(leases) == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range leases {
		if !l.ends.IsZero() {
			continue // given back twice
		}
		delete(t.held, l)
		t.endsOf(l.key).Add(1)
		if unsure {
			l.revives = now.Add(t.longest)
		}
		l.ends = now.Add(t.longest + l.length)
		if t.nEnded == maxEnded {
			l.gone = true
			continue
		}
		t.nEnded++
		e := t.ended[l.key]
		if e == nil {
			if n := len(t.spare); n > 0 {
				e, t.spare = t.spare[n-1], t.spare[:n-1]
			} else {
				e = new(ended)
			}
			e.leases = e.room[:0]
			t.ended[l.key] = e
		}
		l.index = len(e.leases)
		e.leases = append(e.leases, l)
		t.queue = append(t.queue, l)
	}
	t.kickLocked()
}

// endsOf counts the leases of a key that have ended, and those of a few others.
func (t *leaseTable) endsOf(key stateKey) *atomic.Uint32 {
	return &t.ends[key.identity[0]^byte(key.state)]
}

func (t *leaseTable) kickLocked() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// wants reports whether a release sent at now would be of use.
func (l *lease) wants(now time.Time) bool {
	return !l.gone && (!l.released || !now.Before(l.revives))
}

// claim returns at most n leases of a key that want a release at now and that no
// admission has claimed, others each time if there are more, and whether there are.
// The first is claimed by the admission until acknowledged or disclaim.
func (t *leaseTable) claim(now time.Time, admission uint64, key stateKey, n int) (some []*lease, more bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.ended[key]
	if e == nil || e.claimed == len(e.leases) {
		return nil, false
	}
	free := e.leases[e.claimed:]
	some = make([]*lease, 0, min(n, len(free)))
	for i := range min(4*n, len(free)) { // not all, if few of very many want it
		l := free[(t.turn+i)%len(free)]
		if !l.wants(now) {
			continue
		}
		if len(some) == n {
			more = true
			break
		}
		some = append(some, l)
	}
	t.turn += len(some)
	if len(some) > 0 {
		some[0].claimed = admission
		e.swap(some[0].index, e.claimed)
		e.claimed++
	}
	return some, more
}

// disclaim ends the claims of an admission that has failed.
func (t *leaseTable) disclaim(admission uint64, leases []*lease) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range leases {
		if l.claimed == admission {
			t.disclaimLocked(l)
		}
	}
}

func (t *leaseTable) disclaimLocked(l *lease) {
	if l.claimed == 0 || l.gone {
		return
	}
	l.claimed = 0
	e := t.ended[l.key]
	e.claimed--
	e.swap(l.index, e.claimed)
}

// acknowledged notes that Redis has applied a release sent at sent.
func (t *leaseTable) acknowledged(sent time.Time, leases []*lease) {
	if len(leases) == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range leases {
		l.released = true
		t.disclaimLocked(l)
		if !sent.Before(l.revives) {
			t.forgetLocked(l)
		}
	}
}

func (t *leaseTable) forgetLocked(l *lease) {
	if l.gone {
		return
	}
	t.disclaimLocked(l)
	l.gone = true
	t.nEnded--
	e := t.ended[l.key]
	last := len(e.leases) - 1
	e.swap(l.index, last)
	e.leases[last] = nil
	if e.leases = e.leases[:last]; last == 0 {
		delete(t.ended, l.key)
		if e.leases = nil; len(t.spare) < cap(t.spare) {
			t.spare = append(t.spare, e)
		}
	}
}

// toRelease returns at most n ended leases that want a release at now: those of
// the queue, or with all any. More reports whether the queue has others.
func (t *leaseTable) toRelease(now time.Time, n int, all bool) (leases []*lease, more bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if all {
		t.queue = t.queue[:0]
		for _, e := range t.ended {
			t.queue = append(t.queue, e.leases...)
		}
	}
	n = min(n, len(t.queue))
	for _, l := range t.queue[:n] {
		if now.After(l.ends) {
			t.forgetLocked(l)
		}
		if l.wants(now) {
			leases = append(leases, l)
		}
	}
	if t.queue = t.queue[n:]; len(t.queue) == 0 {
		t.queue = nil
	}
	return leases, len(t.queue) > 0
}

// renewalKey names the leases that one renewal may renew.
type renewalKey struct {
	stateKey
	length time.Duration
}

// due returns the held leases that want renewal at now or before due is asked
// again, interval later. Each must be told to renewed.
func (t *leaseTable) due(now time.Time, interval time.Duration) map[renewalKey][]*lease {
	t.mu.Lock()
	defer t.mu.Unlock()
	var batch map[renewalKey][]*lease
	for l := range t.held {
		if l.renewAt.After(now.Add(interval)) {
			continue
		}
		if batch == nil {
			batch = map[renewalKey][]*lease{}
		}
		l.revives = now.Add(MaxLease) // until renewed
		key := renewalKey{l.key, l.length}
		batch[key] = append(batch[key], l)
	}
	return batch
}

// renewed notes that a renewal sent at sent is over, and whether it succeeded.
// A script of it may be under way until revives.
func (t *leaseTable) renewed(sent time.Time, ok bool, revives time.Time, leases []*lease) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range leases {
		l.revives = revives
		if ok {
			l.renewAt = sent.Add(l.length / 3)
		}
		if !l.ends.IsZero() && !l.gone { // released meanwhile: once more
			t.queue = append(t.queue, l)
			t.kickLocked()
		}
	}
}
