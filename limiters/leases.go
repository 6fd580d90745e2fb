// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"slices"
	"sync"
	"time"
)

// maxEnded bounds the releases that wait to be sent while Redis is away. One
// that is dropped costs its identity a slot until the lease ends by itself.
const maxEnded = 1 << 17

// lease is one taken concurrency slot.
type lease struct {
	key      stateKey
	id       uint64
	length   time.Duration
	capacity int64 // of the limit that took it

	// Guarded by leaseTable.mu.
	renewAt time.Time // when the next renewal is due
	revives time.Time // until when a script under way may take or renew it
	ends    time.Time // when it has surely ended by itself
	sending bool      // a release is under way
}

// leaseTable knows the leases that this process holds in Redis, and those it
// has given back but whose release Redis has not acknowledged.
//
// An ended lease stays until a release is acknowledged that was sent when no
// script could revive the lease any more. Until then every admission of its identity applies the release again, so that a client never
// waits for a slot that it has freed itself.
type leaseTable struct {
	mu     sync.Mutex // guards below and the marked fields of lease
	held   map[*lease]struct{}
	ended  map[stateKey][]*lease
	nEnded int

	wake chan struct{} // capacity 1: something has ended
}

func newLeaseTable() *leaseTable {
	return &leaseTable{
		held:  map[*lease]struct{}{},
		ended: map[stateKey][]*lease{},
		wake:  make(chan struct{}, 1),
	}
}

// hold begins to renew a lease that was taken by a script sent at now.
func (t *leaseTable) hold(now time.Time, l *lease) {
	l.renewAt = now.Add(l.length / 3)
	t.mu.Lock()
	t.held[l] = struct{}{}
	t.mu.Unlock()
}

// end gives leases back. With unsure, they may or may not have been taken: the
// release is repeated until they have ended by themselves.
func (t *leaseTable) end(now time.Time, unsure bool, leases ...*lease) {
	if len(leases) == 0 {
		return
	}
	t.mu.Lock()
	for _, l := range leases {
		delete(t.held, l)
		// A renewal under way may still lengthen it.
		l.ends = now.Add(backgroundTimeout + l.length)
		if unsure {
			l.revives = l.ends
		}
		if t.nEnded < maxEnded {
			t.ended[l.key] = append(t.ended[l.key], l)
			t.nEnded++
		}
	}
	t.mu.Unlock()
	t.kick()
}

func (t *leaseTable) kick() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// endedOf returns up to n leases of a key whose release is not acknowledged.
func (t *leaseTable) endedOf(key stateKey, n int) []*lease {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := t.ended[key]
	if len(all) == 0 {
		return nil
	}
	return append([]*lease(nil), all[:min(n, len(all))]...)
}

// acknowledged notes that Redis has applied the release of leases of one key,
// which was sent at now.
func (t *leaseTable) acknowledged(now time.Time, key stateKey, leases []*lease) {
	if len(leases) == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.forgetLocked(key, func(l *lease) bool {
		return !now.Before(l.revives) && slices.Contains(leases, l)
	})
}

func (t *leaseTable) forgetLocked(key stateKey, forget func(*lease) bool) {
	all := t.ended[key]
	kept := all[:0]
	for _, l := range all {
		if !forget(l) {
			kept = append(kept, l)
		}
	}
	t.nEnded -= len(all) - len(kept)
	clear(all[len(kept):])
	if len(kept) == 0 {
		delete(t.ended, key)
	} else {
		t.ended[key] = kept
	}
}

// toSend returns the ended leases whose release is not under way, by key, and
// marks them so. It forgets those that have ended by themselves.
func (t *leaseTable) toSend(now time.Time) map[stateKey][]*lease {
	t.mu.Lock()
	defer t.mu.Unlock()
	batch := map[stateKey][]*lease{}
	for key := range t.ended {
		t.forgetLocked(key, func(l *lease) bool { return now.After(l.ends) })
		for _, l := range t.ended[key] {
			if !l.sending {
				l.sending = true
				batch[key] = append(batch[key], l)
			}
		}
	}
	return batch
}

// sent notes that a release of leases of one key, sent at now, is over.
func (t *leaseTable) sent(now time.Time, key stateKey, leases []*lease, ok bool) {
	t.mu.Lock()
	for _, l := range leases {
		l.sending = false
	}
	t.mu.Unlock()
	if ok {
		t.acknowledged(now, key, leases)
	}
}

// due returns the held leases that want renewal at now, by key, and marks them.
func (t *leaseTable) due(now time.Time) map[stateKey][]*lease {
	t.mu.Lock()
	defer t.mu.Unlock()
	var batch map[stateKey][]*lease
	for l := range t.held {
		if now.Before(l.renewAt) {
			continue
		}
		if batch == nil {
			batch = map[stateKey][]*lease{}
		}
		l.revives = now.Add(MaxLease) // until renewed
		batch[l.key] = append(batch[l.key], l)
	}
	return batch
}

// renewed notes that a renewal sent at now is over; if it failed, it may still
// be applied until deadline.
func (t *leaseTable) renewed(now time.Time, leases []*lease, ok bool, deadline time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range leases {
		l.revives = deadline
		if ok {
			l.renewAt = now.Add(l.length / 3)
		}
	}
}
