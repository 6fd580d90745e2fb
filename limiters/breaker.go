// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"sync/atomic"
	"time"
)

const (
	// A breaker opens when of the calls of the last second as many as this, and
	// half of all, have failed.
	breakerFailures = 5

	breakerSlot  = 100 * time.Millisecond
	breakerSlots = 10

	// The first probe of a node that failed, and what the waits in between grow to.
	probeFirst = 100 * time.Millisecond
	probeMost  = time.Second

	// probeMemory is how soon a node has to fail again for its probes to go on
	// with twice the wait of the last ones: what closed it did not see what is wrong.
	probeMemory = 10 * time.Second
)

// breaker decides whether it is worth calling a node. It is a state machine whose
// time is an argument, monotonic since any moment. Closed, it costs a call a load
// before and a load and an addition after, on words that calls share but no lock.
type breaker struct {
	open  atomic.Bool
	since atomic.Int64 // when it last closed; calls from before say nothing any more
	slots [breakerSlots]atomic.Uint64
}

// A slot is what happened in one tenth of a second: its number, the calls and the
// failures, in one word. A tenth of a second has far fewer calls than fit.
const (
	slotFailure  = 1
	slotCall     = 1 << 20
	slotNumber   = 1 << 40
	slotMask     = 1<<20 - 1
	slotNumbers  = 1 << 24 // they start again after three weeks
	slotsAllTime = ^uint64(slotNumber - 1)
)

// slotAt returns the number of the slot of a moment. It is never that of a slot
// which nothing has happened in, so that one need not be told from the first.
func slotAt(now time.Duration) uint64 {
	return uint64(now/breakerSlot+breakerSlots) % slotNumbers
}

// note takes down a call that began and ended at these times, and reports whether
// it opens the breaker: whoever is told so has to close it again.
func (b *breaker) note(began, ended time.Duration, failed bool) (opens bool) {
	if int64(began) < b.since.Load() {
		return false
	}
	add := uint64(slotCall)
	if failed {
		add += slotFailure
	}
	number := slotAt(ended)
	slot := &b.slots[number%breakerSlots]
	for {
		old := slot.Load()
		if old&slotsAllTime == number*slotNumber {
			slot.Add(add)
			break
		}
		if slot.CompareAndSwap(old, number*slotNumber+add) {
			break
		}
	}
	if !failed {
		return false
	}
	calls, failures := b.lastSecond(ended)
	return failures >= breakerFailures && 2*failures >= calls && b.open.CompareAndSwap(false, true)
}

// lastSecond counts the calls of the last second, and those of them that failed.
func (b *breaker) lastSecond(now time.Duration) (calls, failures uint64) {
	last := slotAt(now)
	for i := range b.slots {
		s := b.slots[i].Load()
		if age := (last - s/slotNumber) % slotNumbers; s != 0 && age < breakerSlots {
			calls += s / slotCall & slotMask
			failures += s & slotMask
		}
	}
	return calls, failures
}

// close lets calls through again, as if nothing had ever happened.
func (b *breaker) close(now time.Duration) {
	for i := range b.slots {
		b.slots[i].Store(0)
	}
	b.since.Store(int64(now))
	b.open.Store(false)
}

// patience is how long to wait before the first probe of a node that fails at now,
// whose last wait was the given one.
func (b *breaker) patience(now, last time.Duration) time.Duration {
	closed := time.Duration(b.since.Load())
	if last > 0 && closed > 0 && now-closed < probeMemory {
		return 2 * last
	}
	return probeFirst
}

// idle is for how long nobody has called.
func (b *breaker) idle(now time.Duration) time.Duration {
	least := now - time.Duration(b.since.Load())
	last := slotAt(now)
	for i := range b.slots {
		if s := b.slots[i].Load(); s != 0 {
			least = min(least, time.Duration((last-s/slotNumber)%slotNumbers)*breakerSlot)
		}
	}
	return least
}
