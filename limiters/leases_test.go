// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// lt is a leaseTable in a test, with times in seconds after epoch.
type lt struct {
	*testing.T
	*leaseTable
}

func newLT(t *testing.T) lt { return lt{t, newLeaseTable(time.Second)} }

func sec(s float64) time.Time { return epoch.Add(time.Duration(s * float64(time.Second))) }

func testLease(n uint64) *lease {
	return &lease{key: stateKey{identity: id("a"), state: stateName{suffix: ":c:two"}.id()}, id: n, length: 10 * time.Second}
}

// released are the ids that a flush at a time sends.
func (t lt) released(at float64, all bool) []uint64 {
	leases, _ := t.toRelease(sec(at), 1000, all)
	return ids(leases)
}

func (t lt) renewals(at float64) []uint64 {
	var due []*lease
	for _, leases := range t.due(sec(at), time.Second/3) {
		due = append(due, leases...)
	}
	return ids(due)
}

func ids(leases []*lease) (ids []uint64) {
	for _, l := range leases {
		ids = append(ids, l.id)
	}
	slices.Sort(ids)
	return ids
}

func (t lt) check(what string, got []uint64, want ...uint64) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// empty checks that a table has forgotten everything.
func (t lt) empty() {
	t.Helper()
	if len(t.held) > 0 || len(t.ended) > 0 || t.nEnded != 0 {
		t.Errorf("left over: %d held, %d keys, %d ended", len(t.held), len(t.ended), t.nEnded)
	}
}

func TestLeaseTable_ReleaseOnce(t *testing.T) {
	table := newLT(t)
	l, other := testLease(1), testLease(2)
	table.hold(sec(0), l, other)
	table.end(sec(1), false, l)
	table.end(sec(1), false, l) // a second release of one admission does nothing
	table.check("queue", table.released(1, false), 1)
	table.check("queue again", table.released(1, false))
	table.check("retry", table.released(1.3, true), 1)
	some, more := table.claim(sec(1.3), 9, l.key, 10)
	table.check("on the way of an admission", ids(some), 1)
	if more {
		t.Error("more than all")
	}
	table.acknowledged(sec(1.3), []*lease{l})
	table.acknowledged(sec(1.3), []*lease{l}) // on two ways at once
	table.check("after the acknowledgement", table.released(2, true))
	table.end(sec(2), false, other)
	table.acknowledged(sec(2), []*lease{other})
	table.empty()
}

func TestLeaseTable_ReleaseWithoutAnswerIsSentAgain(t *testing.T) {
	table := newLT(t)
	l := testLease(1)
	table.hold(sec(0), l)
	table.end(sec(5), false, l)
	table.check("at once", table.released(5, false), 1)
	for at := 5.5; at < 16; at++ {
		table.check("retry", table.released(at, true), 1)
	}
	// By now it has ended by itself, even if a renewal was the last that Redis saw.
	table.check("at the end", table.released(16.1, true))
	table.empty()
}

// A renewal may be on its way when the lease is released, and come after it.
func TestLeaseTable_ReleaseDuringRenewal(t *testing.T) {
	rows := []struct {
		name    string
		ok      bool    // the renewal's answer
		revives float64 // until when it may come
	}{
		{"renewed", true, 5},
		{"no answer", false, 6},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			table := newLT(t)
			l := testLease(1)
			table.hold(sec(0), l)
			table.check("due", table.renewals(4), 1)
			table.end(sec(4.1), false, l)
			table.check("at once", table.released(4.1, false), 1)
			// Redis acknowledges, but may yet get the renewal.
			table.acknowledged(sec(4.1), []*lease{l})
			table.check("too early for another", table.released(4.9, true))
			table.renewed(sec(4), row.ok, sec(row.revives), []*lease{l})
			if !row.ok {
				table.check("the renewal may still come", table.released(5.9, true))
			}
			// This one is sent when nothing can come after it any more.
			table.check("for good", table.released(row.revives, !row.ok), 1)
			table.acknowledged(sec(row.revives), []*lease{l})
			table.check("no renewal of a released lease", table.renewals(9))
			table.empty()
		})
	}
}

// The answer to a release that was sent before the renewal was over says nothing,
// though it arrives after it.
func TestLeaseTable_ReleaseAnsweredAfterRenewal(t *testing.T) {
	table := newLT(t)
	l := testLease(1)
	table.hold(sec(0), l)
	table.check("due", table.renewals(4), 1)
	table.end(sec(4.1), false, l)
	table.check("at once", table.released(4.1, false), 1)
	table.renewed(sec(4), true, sec(5), []*lease{l})
	table.acknowledged(sec(4.1), []*lease{l})
	table.check("once more", table.released(5, false), 1)
	table.acknowledged(sec(5), []*lease{l})
	table.empty()
}

// An admission without an answer may take its lease until its deadline.
func TestLeaseTable_Unsure(t *testing.T) {
	table := newLT(t)
	l := testLease(1)
	table.end(sec(0), true, l)
	table.check("at once", table.released(0, false), 1)
	table.acknowledged(sec(0), []*lease{l})
	some, _ := table.claim(sec(0.9), 9, l.key, 10)
	table.check("not needed again yet", ids(some))
	table.check("nor here", table.released(0.9, true))
	table.check("when it can no longer be taken", table.released(1, true), 1)
	table.acknowledged(sec(1), []*lease{l})
	table.empty()
}

func TestLeaseTable_RenewsInTime(t *testing.T) {
	table := newLT(t)
	long, short := testLease(1), testLease(2)
	short.length = MinLease
	table.hold(sec(0), long, short)
	rows := []struct {
		at   float64
		ok   bool
		want []uint64
	}{
		{0, true, []uint64{2}}, // the next tick would be too late for a third of a second
		{0.33, true, []uint64{2}},
		{2.9, true, []uint64{2}},
		{3, false, []uint64{1, 2}},
		{3.4, true, []uint64{1, 2}}, // what failed is due again at once
		{6.3, true, []uint64{2}},
		{6.4, true, []uint64{1, 2}},
	}
	for _, row := range rows {
		byKey := table.due(sec(row.at), renewEvery)
		var due []*lease
		for key, leases := range byKey {
			for _, l := range leases {
				if l.length != key.length {
					t.Errorf("a lease of %v is renewed for %v", l.length, key.length)
				}
			}
			due = append(due, leases...)
		}
		table.check("due", ids(due), row.want...)
		table.renewed(sec(row.at), row.ok, sec(row.at), due)
	}
}

// With more releases than one admission may carry, each carries others.
func TestLeaseTable_TakesTurns(t *testing.T) {
	table := newLT(t)
	for n := range uint64(10) {
		table.end(sec(0), false, testLease(n))
	}
	seen := map[uint64]int{}
	for range 5 {
		some, more := table.claim(sec(0), 100, testLease(0).key, 4)
		if len(some) != 4 || !more {
			t.Fatalf("got %d, %v, want 4 and more", len(some), more)
		}
		for _, l := range some {
			seen[l.id]++
		}
		table.disclaim(100, some)
	}
	for n := range uint64(10) {
		if seen[n] == 0 {
			t.Errorf("lease %d: never", n)
		}
	}
}

// Clients, as many as the limit, begin their next requests when the last have ended,
// and what they send runs and is answered in any order, as are releases: there is a
// slot for each at once. Here Redis is a set, and many more have ended than one
// admission may carry.
func TestLeaseTable_ClosedLoop(t *testing.T) {
	const clients = 5 * maxPiggyback
	type call struct {
		ended []*lease
		takes *lease // nil: it only releases
	}
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 0))
		table := newLT(t)
		redis := map[*lease]bool{}
		var holding []*lease
		var sent, ran []call
		pick := func(calls *[]call) call {
			i := rng.IntN(len(*calls))
			c := (*calls)[i]
			*calls = slices.Delete(*calls, i, i+1)
			return c
		}
		idle, next, pace := clients, uint64(1), 0
		for step := range 20_000 {
			if step%500 == 0 {
				pace = rng.IntN(4) // at times answers, or what ends, pile up
			}
			switch what := rng.IntN(5); {
			case what == 0 && idle > 0:
				l := testLease(next)
				ended, _ := table.claim(sec(0), next, l.key, maxPiggyback)
				sent = append(sent, call{ended, l})
				idle, next = idle-1, next+1
			case what == 1 && len(sent) > 0 && pace != 1:
				c := pick(&sent)
				for _, l := range c.ended {
					delete(redis, l)
				}
				if ran = append(ran, c); c.takes == nil {
					continue
				}
				if len(redis) >= clients {
					t.Fatalf("seed %d, step %d: no slot for one of %d clients", seed, step, clients)
				}
				redis[c.takes] = true
			case what == 2 && len(ran) > 0 && pace != 2:
				c := pick(&ran)
				if table.acknowledged(sec(0), c.ended); c.takes != nil {
					table.hold(sec(0), c.takes)
					holding = append(holding, c.takes)
				}
			case what == 3 && len(holding) > 0 && pace != 3:
				i := rng.IntN(len(holding))
				table.end(sec(0), false, holding[i])
				holding = slices.Delete(holding, i, i+1)
				idle++
			case what == 4 && rng.IntN(50) == 0:
				if leases, _ := table.toRelease(sec(0), roundSize, false); len(leases) > 0 {
					sent = append(sent, call{leases, nil})
				}
			}
		}
		if next < 2*clients {
			t.Fatalf("only %d requests", next)
		}
	}
}

// What an admission has claimed that has failed is there for the next one.
func TestLeaseTable_Disclaim(t *testing.T) {
	table := newLT(t)
	table.end(sec(0), false, testLease(1), testLease(2))
	first, _ := table.claim(sec(0), 10, testLease(0).key, 1)
	second, _ := table.claim(sec(0), 11, testLease(0).key, 1)
	table.check("one each", ids(slices.Concat(first, second)), 1, 2)
	if some, more := table.claim(sec(0), 12, testLease(0).key, 1); len(some) > 0 || more {
		t.Errorf("a third got %d, %v", len(some), more)
	}
	table.disclaim(10, first)
	third, _ := table.claim(sec(0), 12, testLease(0).key, 1)
	table.check("the third, of the first", ids(third), first[0].id)
	table.acknowledged(sec(0), second)
	table.disclaim(12, third)
	table.acknowledged(sec(0), third)
	table.empty()
}

// While Redis is away memory is bounded.
func TestLeaseTable_Bounded(t *testing.T) {
	table := newLT(t)
	leases := make([]*lease, maxEnded+10)
	for n := range leases {
		leases[n] = testLease(uint64(n))
	}
	table.hold(sec(0), leases...)
	due := table.due(sec(5), 0)
	table.end(sec(5), false, leases...)
	if table.nEnded != maxEnded || len(table.ended[leases[0].key].leases) != maxEnded || len(table.queue) != maxEnded {
		t.Errorf("got %d ended, %d of the key, %d queued, want %d", table.nEnded, len(table.ended[leases[0].key].leases), len(table.queue), maxEnded)
	}
	for _, renewed := range due { // those that were dropped as well
		table.renewed(sec(5), true, sec(5), renewed)
	}
	for more := true; more; {
		var batch []*lease
		batch, more = table.toRelease(sec(6), 1000, false)
		if len(batch) > 1000 {
			t.Fatalf("a batch of %d", len(batch))
		}
		table.acknowledged(sec(6), batch)
	}
	table.empty()
}

// Releases that end while others are under way share the next round.
func TestLeaseTable_Wakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newLT(t)
		var rounds [][]uint64
		go func() {
			for range table.wake {
				rounds = append(rounds, table.released(0, false))
				time.Sleep(time.Second) // Redis takes its time
			}
		}()
		for n := range uint64(5) {
			table.end(sec(0), false, testLease(n))
			if n == 0 {
				synctest.Wait()
			}
		}
		time.Sleep(time.Minute)
		close(table.wake)
		synctest.Wait()
		if diff := cmp.Diff([][]uint64{{0}, {1, 2, 3, 4}}, rounds); diff != "" {
			t.Errorf("rounds (-want +got):\n%s", diff)
		}
	})
}
