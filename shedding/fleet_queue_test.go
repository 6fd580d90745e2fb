// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Sixty-four clients come within a moment, again and again, to an instance that has been
// idle, and the fleet has room for a thousand times as many. However the claim
// grows, nobody is shed, and with headroom for it nobody waits.
func TestFleet_AmpleRoom(t *testing.T) {
	cases := []struct {
		instances int64
		patient   bool // nobody waits
	}{
		{1, true},
		{10, true},
		{80_000, false}, // so that headroom is nothing but the peak
	}
	for _, c := range cases {
		for seed := range uint64(3) {
			t.Run(fmt.Sprint(c.instances, " instances/seed ", seed), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { testAmpleRoom(t, c.instances, c.patient, seed) })
			})
		}
	}
}

func testAmpleRoom(t *testing.T, instances int64, patient bool, seed uint64) {
	fake := &fakeFleet{room: 80_000, stats: eight, takes: ms}
	fake.stats.Allocation, fake.stats.Instances = 80_000, instances
	f := NewFleet(fake.sync, quiet)
	defer f.Close()
	f.Set(FleetSettings{Capacity: 100_000, Reserve: 20})
	for round := range 20 {
		after(3 * time.Second) // idle: the claim is as small as it gets
		var clients sync.WaitGroup
		for client := range 64 {
			clients.Go(func() {
				rng := rand.New(rand.NewPCG(seed, uint64(64*round+client)))
				upTo := func(d time.Duration) time.Duration { return time.Duration(rng.Float64() * float64(d)) }
				time.Sleep(upTo(4 * ms)) // a sync or four
				for range 10 {
					ctx, cancel := context.WithTimeout(t.Context(), 50*ms)
					start := time.Now()
					ok, err := f.Acquire(ctx, Post)
					if waited := time.Since(start); !ok || err != nil || patient && waited > 0 {
						t.Errorf("round %d: %v, %v after %v; want a slot", round, ok, err, waited)
					}
					cancel()
					time.Sleep(upTo(ms))
					if ok {
						f.Release(Post)
					}
					time.Sleep(upTo(ms))
				}
			})
		}
		clients.Wait()
	}
}

// Requests that begin without a claim while others wait take their slots. As the
// fleet has not said that there are no more, who waits asks again.
func TestFleet_AsksAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, fake := newFleet(t, hundred)
		f.TryAcquire(Post)
		fake.set(func() { fake.takes, fake.room = 30*ms, 4 })
		type result struct {
			ok    bool
			err   error
			after time.Duration
		}
		come := func(patience time.Duration) chan result {
			c := make(chan result, 1)
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				start := time.Now()
				ok, err := f.Acquire(ctx, Post)
				c <- result{ok, err, time.Since(start)}
			}()
			synctest.Wait()
			return c
		}
		first, second := come(200*ms), come(200*ms) // the sync knows of the first alone
		var hasty [2]chan result
		for i := range hasty {
			hasty[i] = come(10 * ms)
		}
		for _, c := range hasty {
			if got := <-c; !got.ok || !errors.Is(got.err, context.DeadlineExceeded) || got.after != 10*ms {
				t.Errorf("who waits no longer: %+v, want to pass after 10ms", got)
			}
		}
		// The first sync brings 3 slots, of which 3 are in use.
		if got, want := <-first, (result{true, nil, 60 * ms}); got != want {
			t.Errorf("the first: %+v, want %+v", got, want)
		}
		// The second has room for 4.
		if got, want := <-second, (result{false, nil, 60 * ms}); got != want {
			t.Errorf("the second: %+v, want %+v: then the fleet was full", got, want)
		}
		if got, want := f.Status().InFlight, int64(4); got != want {
			t.Errorf("%d in flight, want %d", got, want)
		}
	})
}

// A slot that becomes free is for who waits, in the order of their coming, and
// not for those who come later.
func TestFleet_WaitersAreFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, fake := newFleet(t, hundred)
		f.TryAcquire(Post)
		fake.set(func() { fake.takes = 40 * ms })
		order := make(chan int, 3)
		for i := range 3 {
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				if ok, _ := f.Acquire(ctx, Post); ok {
					order <- i
				}
			}()
			synctest.Wait()
			if i == 0 {
				cancel() // who has gone is not
			} else {
				defer cancel()
			}
			synctest.Wait()
		}
		f.Release(Post)
		if f.TryAcquire(Post) {
			t.Error("who comes last is first")
		}
		if !f.TryAcquire(Critical) {
			t.Error("a critical request waits")
		}
		for want := 1; want < 3; want++ {
			synctest.Wait()
			select {
			case got := <-order:
				if got != want {
					t.Errorf("request %d gets the slot, want %d", got, want)
				}
			default:
				t.Errorf("a slot is free, and request %d waits", want)
			}
			f.Release(Post)
		}
		if got := f.Status(); got.InFlight != 0 || got.Critical != 1 {
			t.Errorf("%+v, want only the critical request in flight", got)
		}
	})
}

// A fleet that has no slots says so once, to all that wait.
func TestFleet_FullForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, fake := newFleet(t, hundred)
		fake.set(func() { fake.room, fake.stats.Hold = 30, 0 })
		if got := acquire(t, f, 500); got != 30 {
			t.Errorf("%d of 500 requests begin, want 30", got)
		}
		if n := len(fake.syncs()); n > 3 {
			t.Errorf("%d syncs for 500 requests at once, want a few", n)
		}
	})
}

func TestShare_Headroom(t *testing.T) {
	cases := []struct {
		allocation, claims, instances, peak int64
		want                                int64
	}{
		{80, 0, 8, 0, 1},
		{80, 0, 8, 7, 7},
		{800, 0, 8, 0, 10}, // a tenth of an equal share
		{800, 0, 8, 7, 10},
		{800, 0, 8, 70, 70},
		{800, 640, 8, 70, 70},
		{800, 700, 8, 70, 35}, // 87.5 %
		{800, 760, 8, 70, 0},
		{800, 900, 8, 70, 0},
		{800, 0, 0, 0, 80}, // a fleet of nobody, by accident
		{3, 0, 1, 50, 3},
		{0, 0, 1, 50, 0},
		{maxReplyCount, 0, 1, 50, maxReplyCount / 10},
		{maxReplyCount, maxReplyCount - maxReplyCount/8, 1, 50, maxReplyCount / 20},
	}
	for _, c := range cases {
		s := share{fleet: SyncReply{Epoch: 1, Allocation: c.allocation, Claims: c.claims, Instances: c.instances}}
		if got := s.headroom(c.peak); got < c.want-c.want/1000 || got > c.want {
			t.Errorf("%+v: got %d, want %d", c, got, c.want)
		}
	}
}

// An instance that has just come knows nothing. It asks again at once, lest its
// first second be one of waiting.
func TestFleet_HeadroomAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := &fakeFleet{room: 800, stats: eight, takes: ms}
		fake.stats.Allocation, fake.stats.Instances = 800, 4
		f := NewFleet(fake.sync, quiet)
		defer f.Close()
		fake.set(func() { fake.err = errors.New("no Redis") })
		f.Set(FleetSettings{Capacity: 1000, Reserve: 20})
		after(2 * minBeat)
		if n := len(fake.syncs()); n > 3 {
			t.Errorf("%d syncs in two beats without Redis, want one each", n)
		}
		fake.set(func() { fake.err = nil })
		start := time.Now()
		for f.Status().Claim == 0 {
			time.Sleep(ms / 2)
		}
		after(2 * ms)
		if got := f.Status().Claim; got != 20 {
			t.Errorf("%v after the first sync: %d slots, want 20", time.Since(start), got)
		}
		after(10 * minBeat)
		if n := len(fake.syncs()); n > 14 {
			t.Errorf("%d syncs in eleven beats, want one each and one", n)
		}
	})
}
