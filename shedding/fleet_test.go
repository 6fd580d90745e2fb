// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// fakeFleet answers syncs: it grants up to room, after the given time.
type fakeFleet struct {
	mu    sync.Mutex // guards below
	room  int64
	stats SyncReply // what it tells of all instances
	takes time.Duration
	err   error
	panic any
	got   []SyncRequest
}

func (f *fakeFleet) sync(ctx context.Context, r SyncRequest) (SyncReply, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.got = append(f.got, r)
	takes := f.takes
	f.mu.Unlock()
	select {
	case <-time.After(takes):
	case <-ctx.Done():
	}
	f.mu.Lock()
	if ctx.Err() != nil {
		return SyncReply{}, ctx.Err()
	}
	if f.panic != nil {
		panic(f.panic)
	}
	reply := f.stats
	reply.Now, reply.Claim = time.Now().UnixMicro(), min(r.Wanted, f.room)
	reply.Limit, reply.Claims = reply.Claim, reply.Claim
	return reply, f.err
}

// eight instances: an equal share is 10 slots, a tenth of that is one in headroom.
var eight = SyncReply{
	Beat: minBeat, Hold: 10 * ms, Epoch: 1, Generation: 1, Capacity: 100, Allocation: 80, Instances: 8,
}

// set changes how syncs are answered from now on, and forgets those there were.
func (f *fakeFleet) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
	f.got = nil
}

func (f *fakeFleet) syncs() []SyncRequest {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.got
}

var hundred = FleetSettings{Capacity: 100, Reserve: 20}

// newFleet starts a Fleet on a fake fleet, settled after its first two syncs.
func newFleet(t *testing.T, settings FleetSettings) (*Fleet, *fakeFleet) {
	fake := &fakeFleet{room: 80, stats: eight, takes: ms}
	f := NewFleet(fake.sync, quiet)
	t.Cleanup(f.Close)
	f.Set(settings)
	after(3 * ms)
	fake.set(func() {})
	return f, fake
}

// acquire counts the requests that begin of n that come at once.
func acquire(t *testing.T, f *Fleet, n int) (begun int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var count atomic.Int64
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			ok, err := f.Acquire(ctx, Post)
			if err != nil {
				t.Errorf("Acquire: %v", err)
			}
			if ok {
				count.Add(1)
			}
		})
	}
	wg.Wait()
	return int(count.Load())
}

func TestFleet_IdleInstanceHasASlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, fake := newFleet(t, hundred)
		for range 20 {
			if !f.TryAcquire(Get) {
				t.Fatal("one request at a time has to wait")
			}
			time.Sleep(20 * ms)
			f.Release(Get)
			time.Sleep(980 * ms)
		}
		for _, r := range fake.syncs() {
			if r.Held != 1 || r.Wanted != r.Need+1 {
				t.Fatalf("an idle instance syncs %+v, want to hold 1 and one in headroom", r)
			}
		}
		if n := len(fake.syncs()); n < 20*4*8/10 || n > 20*4*12/10 {
			t.Errorf("%d syncs in 20 s, want four a second ± 20 %%", n)
		}
	})
}

func TestFleet_WaitersShareOneSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, fake := newFleet(t, hundred)
		if got := acquire(t, f, 50); got != 50 {
			t.Errorf("%d of 50 requests begin, want all", got)
		}
		// The first to come may have started a sync without the others.
		if n := len(fake.syncs()); n < 1 || n > 2 {
			t.Errorf("%d syncs for 50 requests at once, want 1 or 2", n)
		}
		if got := f.Status(); got.InFlight != 50 {
			t.Errorf("%d in flight, want 50", got.InFlight)
		}
	})
}

func TestFleet_NoneLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, fake := newFleet(t, hundred)
		fake.set(func() { fake.room = 30 })
		if got := acquire(t, f, 50); got != 30 {
			t.Errorf("%d of 50 requests begin, want 30", got)
		}
		fake.set(func() {})
		start := time.Now()
		if got := acquire(t, f, 50); got != 0 || time.Since(start) > 0 || len(fake.syncs()) > 0 {
			t.Errorf("right after: %d begin, after %v and %d syncs; want shed at once", got, time.Since(start), len(fake.syncs()))
		}
		if !f.TryAcquire(Critical) {
			t.Error("a critical request has to wait")
		}
		f.Release(Post)
		if !f.TryAcquire(Post) {
			t.Error("a slot of its own that is free again is not used")
		}
		time.Sleep(12*ms - 1) // hold is 10 ms ± 20 %
		fake.set(func() { fake.room = 40 })
		time.Sleep(1)
		if got := acquire(t, f, 20); got != 10 {
			t.Errorf("after the hold: %d of 20 requests begin, want 10", got)
		}
		if got, want := f.Status().InFlight, int64(40); got != want {
			t.Errorf("%d in flight, want %d", got, want)
		}
	})
}

func TestFleet_LowersItsClaimFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, fake := newFleet(t, hundred)
		acquire(t, f, 20)
		for range 20 {
			f.Release(Post)
		}
		after(5 * time.Second)
		last := int64(20)
		for _, r := range fake.syncs() {
			if r.Held > r.Wanted {
				t.Fatalf("syncs %+v: holds more than it wants", r)
			}
			last = r.Held
		}
		if last != 1 {
			t.Errorf("an instance that was busy five seconds ago holds %d, want 1", last)
		}
	})
}

func TestFleet_StoreFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, fake := newFleet(t, hundred)
		down := errors.New("no Redis")
		fake.set(func() { fake.err = down })
		for i := range 200 {
			ok, err := f.Acquire(t.Context(), Post)
			if !ok || i > 0 && !errors.Is(err, down) {
				t.Fatalf("request %d: %v, %v; want it to pass, with the error", i, ok, err)
			}
		}
		if n := len(fake.syncs()); n != 1 {
			t.Errorf("%d syncs for 200 requests, want 1", n)
		}
		after(time.Minute)
		if ok, err := f.Acquire(t.Context(), Post); !ok || !errors.Is(err, down) {
			t.Errorf("a minute later: %v, %v", ok, err)
		}
		fake.set(func() { fake.err = nil })
		after(2 * minBeat)
		if got := fake.syncs()[0]; got.InFlight != 201 || got.Held != 0 {
			t.Errorf("the first sync after the return: %+v, want 201 in flight and nothing held", got)
		}
		if got := f.Status(); got.Claim != 80 || got.Err != nil {
			t.Errorf("two beats after the return: %+v, want a claim of 80", got)
		}
		if ok, err := f.Acquire(t.Context(), Post); ok || err != nil {
			t.Errorf("with 201 in flight of 80: %v, %v, want shed", ok, err)
		}
	})
}

// A fleet that was full stays shut as long as the claim stands.
func TestFleet_StoreFailsInOverload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, fake := newFleet(t, hundred)
		fake.set(func() { fake.room = 30 })
		if got := acquire(t, f, 50); got != 30 {
			t.Fatalf("%d of 50 requests begin, want 30", got)
		}
		end := time.Now().Add(claimBeats*minBeat - 2*ms) // counted from when the sync was sent
		fake.set(func() { fake.err = errors.New("no Redis") })
		for time.Now().Before(end) {
			if ok, err := f.Acquire(t.Context(), Get); ok || err != nil {
				t.Fatalf("%v before the claim ends: %v, %v; want shed", time.Until(end), ok, err)
			}
			time.Sleep(20 * ms)
		}
		time.Sleep(20 * ms)
		if ok, err := f.Acquire(t.Context(), Get); !ok || err == nil {
			t.Errorf("after the claim has ended: %v, %v; want it to pass", ok, err)
		}
	})
}

func TestFleet_StoreFailsAndTheShareIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		settings := hundred
		settings.ShareOnError = true
		f, fake := newFleet(t, settings)
		fake.set(func() { fake.err = errors.New("no Redis") })
		begun := 0
		for range 100 {
			ok, err := f.Acquire(t.Context(), Get)
			if ok {
				begun++
			} else if err != nil {
				t.Fatalf("shed with an error: %v", err)
			}
		}
		if begun != 10 { // 80 slots, eight instances
			t.Errorf("%d requests begin, want 10", begun)
		}
		if ok, _ := f.Acquire(t.Context(), Critical); !ok {
			t.Error("a critical request is shed")
		}
	})
}

// A store that hangs keeps a request no longer than its context, and nobody once
// it is known to hang.
func TestFleet_StoreHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, fake := newFleet(t, hundred)
		fake.set(func() { fake.takes = time.Hour })
		f.TryAcquire(Post) // the last one of the claim
		ctx, cancel := context.WithTimeout(t.Context(), 20*ms)
		defer cancel()
		start := time.Now()
		ok, err := f.Acquire(ctx, Post)
		if !ok || !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 20*ms {
			t.Errorf("%v, %v after %v; want it to pass after 20ms", ok, err, time.Since(start))
		}
		after(30 * ms) // the sync gives up after 50
		start = time.Now()
		if ok, err := f.Acquire(t.Context(), Post); !ok || err == nil || time.Since(start) > 0 {
			t.Errorf("%v, %v after %v; want it to pass at once", ok, err, time.Since(start))
		}
	})
}

func TestFleet_ClientGoesWhileWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, fake := newFleet(t, hundred)
		fake.set(func() { fake.takes = 40 * ms })
		f.TryAcquire(Post)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(10*ms, cancel)
		if ok, err := f.Acquire(ctx, Post); ok || !errors.Is(err, context.Canceled) {
			t.Errorf("%v, %v; want canceled", ok, err)
		}
		after(time.Second)
		if got := f.Status(); got.InFlight != 1 || got.Err != nil {
			t.Errorf("%+v, want 1 in flight", got)
		}
	})
}

func TestFleet_ClaimEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, fake := newFleet(t, hundred)
		acquire(t, f, 10)
		got := f.Status().Claim
		after(minBeat) // a sync that succeeds
		fake.set(func() { fake.takes = time.Hour })
		after(7*minBeat - 2*minBeat)
		if got == 0 || f.Status().Claim == 0 {
			t.Errorf("the claim is %d, and %d before it should end", got, f.Status().Claim)
		}
		after(2 * minBeat)
		if got := f.Status().Claim; got != 0 {
			t.Errorf("seven beats after the last good sync the claim is %d, want 0", got)
		}
	})
}

func TestFleet_BeforeSetAndAfterClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := &fakeFleet{room: 0, stats: eight, takes: ms}
		f := NewFleet(fake.sync, quiet)
		if got := acquire(t, f, 200); got != 200 || len(fake.syncs()) > 0 {
			t.Errorf("before Set: %d begin, %d syncs; want all and none", got, len(fake.syncs()))
		}
		f.Set(hundred)
		after(10 * ms)
		if got := fake.syncs()[0]; got.InFlight != 200 {
			t.Errorf("the first sync states %d in flight, want 200", got.InFlight)
		}
		if f.TryAcquire(Post) {
			t.Error("a slot where there is none")
		}
		fake.set(func() {})
		f.Close()
		f.Close()
		if got := fake.syncs(); len(got) != 1 || !got[0].Leave {
			t.Errorf("Close syncs %+v, want one that leaves", got)
		}
		f.Set(hundred) // a late one
		after(time.Minute)
		if n := len(fake.syncs()); n != 1 {
			t.Errorf("%d syncs after Close", n-1)
		}
		if !f.TryAcquire(Post) {
			t.Error("a request is shed after Close")
		}
	})
	f := NewFleet(nil, quiet)
	f.Close() // never started: must not hang
}

func TestFleet_CloseLetsWaitersGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, fake := newFleet(t, hundred)
		f.TryAcquire(Post)
		fake.set(func() { fake.takes = 40 * ms })
		passed := make(chan bool, 2)
		for range 2 {
			go func() {
				ok, _ := f.Acquire(t.Context(), Post)
				passed <- ok
			}()
			time.Sleep(ms) // the second one waits for the next sync
		}
		f.Close()
		if !<-passed || !<-passed {
			t.Error("a request that waited is shed")
		}
	})
}

func TestFleet_NewSettings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, fake := newFleet(t, hundred)
		acquire(t, f, 5)
		fake.set(func() {})
		same := hundred
		same.Workers = 7
		f.Set(same)
		after(2 * ms)
		if got := fake.syncs()[0]; got.Generation != 1 || got.Workers != 7 || got.InFlight != 5 {
			t.Errorf("the same capacity: %+v, want generation 1, 7 workers at once", got)
		}
		fake.set(func() {})
		f.Set(FleetSettings{Capacity: 200, Reserve: 20})
		after(2 * ms)
		if got := fake.syncs()[0]; got.Generation != 0 || got.Capacity != 200 {
			t.Errorf("another capacity: %+v, want it as a new configuration", got)
		}
		after(time.Second)
		if got := fake.syncs(); got[len(got)-1].Generation != 1 {
			t.Errorf("afterwards: %+v, want the generation it was given", got[len(got)-1])
		}
	})
}

func TestFleet_SyncPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, fake := newFleet(t, hundred)
		f.TryAcquire(Post)
		fake.set(func() { fake.panic = "bug" })
		if ok, err := f.Acquire(t.Context(), Post); !ok || err == nil || !strings.Contains(err.Error(), "bug") {
			t.Errorf("%v, %v; want it to pass, and the bug told", ok, err)
		}
		fake.set(func() { fake.panic = nil })
		after(2 * minBeat)
		if got := f.Status().Err; got != nil {
			t.Errorf("after the bug was gone: %v", got)
		}
	})
}

func TestFleet_LoneProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFleet(nil, quiet)
		defer f.Close()
		f.Set(hundred)
		if got := acquire(t, f, 200); got != 80 {
			t.Errorf("%d requests begin, want 80", got)
		}
		for range 100 {
			if !f.TryAcquire(Critical) {
				t.Fatal("a critical request is shed")
			}
		}
		want := FleetStatus{InFlight: 80, Critical: 100, Claim: 80, Fleet: SyncReply{
			Claim: 80, Limit: 80, Claims: 80, Allocation: 80, Capacity: 100, InFlight: 80, Critical: 100, Instances: 1,
		}}
		if diff := cmp.Diff(want, f.Status()); diff != "" {
			t.Errorf("status (-want +got):\n%s", diff)
		}
		f.Set(FleetSettings{Workers: 50, Reserve: 10}) // auto
		if f.TryAcquire(Get) {
			t.Error("80 are in flight of 45, and another begins")
		}
		for range 36 {
			f.Release(Get)
		}
		if !f.TryAcquire(Get) || f.TryAcquire(Get) {
			t.Error("45 are the limit, want just one more to begin")
		}
		after(time.Hour)
		if got := f.Status().Claim; got != 45 {
			t.Errorf("an hour later %d slots, want 45", got)
		}
	})
}

func TestFleetSettings_Validate(t *testing.T) {
	cases := []struct {
		settings FleetSettings
		want     string // part of the error, "" for none
	}{
		{hundred, ""},
		{FleetSettings{Workers: 1}, ""},
		{FleetSettings{Capacity: 1, Reserve: 100}, ""},
		{FleetSettings{}, "workers"},
		{FleetSettings{Capacity: -1}, "capacity"},
		{FleetSettings{Capacity: 2_000_000_000}, "capacity"},
		{FleetSettings{Capacity: 1, Workers: -1}, "workers"},
		{FleetSettings{Capacity: 1, Reserve: -1}, "reserve"},
		{FleetSettings{Capacity: 1, Reserve: 100.1}, "reserve"},
	}
	for _, c := range cases {
		err := c.settings.Validate()
		if got := err == nil; got != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: got %v, want %q", c.settings, err, c.want)
		}
	}
}

// The Fleet as a whole on a real Redis, on real time.
func TestFleet_OnRedis(t *testing.T) {
	redis := redistest.Start(t)
	rdb := redis.Client()
	run := redisSync(rdb)
	patient := func(ctx context.Context, r SyncRequest) (SyncReply, error) {
		r.Deadline = 0 // however slow this machine is
		return run(context.WithoutCancel(ctx), r)
	}
	var log bytes.Buffer
	a, b := NewFleet(patient, slog.New(slog.NewTextHandler(&log, nil))), NewFleet(patient, quiet)
	a.Set(hundred)
	b.Set(hundred)
	// All but what b, being idle, has in headroom.
	if got := acquire(t, a, 100) + acquire(t, b, 50); got != 80 {
		t.Errorf("%d requests begin, want 80", got)
	}
	if !a.TryAcquire(Critical) || !b.TryAcquire(Critical) {
		t.Error("a critical request is shed")
	}
	if a.TryAcquire(Post) && b.TryAcquire(Post) {
		t.Error("another begins")
	}
	b.Close()
	if state := readState(t, rdb); state["instances"] != 1 {
		t.Errorf("after one has gone, %d instances with %d slots are left", state["instances"], state["claims"])
	}
	a.Close()
	if fields := rdb.HKeys(t.Context(), fleetKey).Val(); !slices.Equal(fields, []string{"state"}) {
		t.Errorf("after both have gone, %v are left", fields)
	}
	if log.Len() > 0 {
		t.Errorf("log: %s", log.String())
	}
}

func BenchmarkFleet(b *testing.B) {
	f := NewFleet(nil, quiet)
	defer f.Close()
	f.Set(FleetSettings{Capacity: 1_000_000})
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if !f.TryAcquire(Post) {
				b.Fatal("shed")
			}
			f.Release(Post)
		}
	})
}
