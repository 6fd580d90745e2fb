// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// failed is how many syncs of each Caddy have failed, for a reason if there is
// one.
func (f *fleet) failed(t testing.TB, reason ...string) (n []float64) {
	t.Helper()
	for _, c := range f.caddys {
		n = append(n, c.metric(t, "store_errors_total", append(reason, `operation="fleet_sync"`)...))
	}
	return n
}

// While Redis is gone everything passes, though a Caddy that was told last that
// the fleet is full stays shut until its claim ends. Once Redis is back, everybody
// is known again with all that is in progress, and slots are what they were.
func TestFleet_RedisGone(t *testing.T) {
	const outage = 2300 * time.Millisecond // claims end after seven beats, of 250ms
	f := newFleet(t)
	f.start(t, 3, hundred)
	cases := []struct {
		name       string
		gone, back func()
		full       bool
		after      float64 // so many syncs that failed, everything passes
	}{
		{"hung", f.redis.Stop, f.redis.Cont, false, 1},
		{"killed", f.redis.Kill, f.redis.Restart, true, 10}, // 200ms or more from one to the next
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			first, _ := f.fill(t, 0, usable/2, 5)
			second, _ := f.fill(t, 1, usable/2, 5)
			// Two beats after the last call came, nobody is told that the fleet is full.
			before, failed := f.syncs(t, f.state(t), 2), f.failed(t)
			for i := 0; c.full && i < len(f.caddys); {
				if _, ok := second.begin(t, f.caddys[i], f.others.call(), ""); !ok {
					i++
				}
			}

			c.gone()
			begin := time.Now()
			eventually(t, patience, "noticed", func() bool {
				for i, n := range f.failed(t) {
					if n < failed[i]+c.after {
						return false
					}
				}
				return true
			})
			third := new(held)
			for i := range 30 {
				if a, ok := third.begin(t, f.caddys[i%3], f.others.call(), ""); !ok {
					t.Fatalf("got status %d while Redis is gone, want it in progress", a.status)
				}
			}
			for time.Since(begin) < outage {
				for _, c := range f.caddys {
					c.get(t, "/charges").want(t, http.StatusOK)
					c.get(t, "/").want(t, http.StatusOK)
				}
				time.Sleep(20 * time.Millisecond)
			}

			c.back()
			// A machine that stalls is no fault of the Caddys, and until a probe has
			// found Redis nobody asks.
			excused := func() []float64 {
				n := f.failed(t, `reason="timeout"`)
				for i, m := range f.failed(t, `reason="breaker_open"`) {
					n[i] += m
				}
				return n
			}
			failed, late := f.failed(t), excused()
			back := f.syncs(t, before, 1)
			state := f.syncs(t, back, 1)
			if err := state.right(f.ids, len(first.calls)+len(second.calls)+30, 0, 0); err != nil {
				t.Errorf("after two beats: %v", err)
			}
			for i, n := range excused() {
				late[i] = n - late[i]
			}
			for i, n := range f.failed(t) {
				// One was under way, and one may find its connection broken.
				if n -= failed[i] + late[i]; n > 2 {
					t.Errorf("after Redis was back, %v syncs of Caddy %d failed, want at most 2", n, i)
				}
			}
			// Nobody has more in progress than its claim, but for what began while
			// Redis was gone.
			more := new(held)
			for i, c := range f.caddys {
				began, unjudged := len(more.calls), f.unjudged(t)
				for range allocation {
					a, ok := more.begin(t, c, f.others.call(), "")
					if !ok {
						a.want(t, http.StatusServiceUnavailable)
						break
					}
				}
				e := f.syncs(t, f.state(t), 2).entries[f.ids[i]]
				if len(more.calls) > began && e.inFlight > e.claim && f.unjudged(t) == unjudged {
					t.Errorf("Caddy %d let a call pass, and has %d in progress with a claim on %d slots", i, e.inFlight, e.claim)
				}
				c.get(t, "/charges").want(t, http.StatusOK)
			}

			first.letGo(t, len(first.calls))
			inProgress := len(second.calls) + len(third.calls) + len(more.calls)
			rest, _ := f.fill(t, 2, usable-inProgress, 5)
			for _, h := range []*held{second, third, more, rest} {
				h.letGo(t, len(h.calls))
			}
			state = f.syncs(t, f.syncs(t, f.state(t), 1), 1)
			if err := state.right(f.ids, 0, 0, 0); err != nil {
				t.Errorf("after all was over: %v", err)
			}
		})
	}
}

// Whatever is lost of the fleet's state while requests come and go, none is
// shed, and three beats later all is as it was.
func TestFleet_LostState(t *testing.T) {
	f := newFleet(t)
	f.start(t, 3, hundred)
	var calls []*held
	for i := range f.caddys {
		h, _ := f.fill(t, i, 10, 5)
		calls = append(calls, h)
	}
	charge := new(held)
	if _, ok := charge.begin(t, f.caddys[0], f.critical.call(), "/charges"); !ok {
		t.Fatal("a critical request does not pass")
	}

	var stop atomic.Bool
	var requests atomic.Int64
	var wg sync.WaitGroup
	for _, c := range f.caddys {
		client := newClient(t, false)
		wg.Go(func() {
			for n := 0; !stop.Load(); n++ {
				path := []string{"/", "/charges"}[n%2]
				a, err := c.try(t.Context(), client, http.MethodGet, path, "Authorization", "Bearer sk_live_x")
				if err != nil || a.status != http.StatusOK {
					t.Errorf("%s: got status %d, error %v, want 200", path, a.status, err)
					return
				}
				requests.Add(1)
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
	cases := []struct {
		name string
		lose func() error
	}{
		{"the key", func() error { return f.rdb.Del(t.Context(), fleetKey).Err() }},
		{"the numbers", func() error { return f.rdb.HDel(t.Context(), fleetKey, "state").Err() }},
		{"sense", func() error { return f.rdb.HSet(t.Context(), fleetKey, "state", "none").Err() }},
		{"the scripts", func() error { return f.rdb.ScriptFlush(t.Context()).Err() }},
		{"everything", func() error { return f.rdb.FlushAll(t.Context()).Err() }},
	}
	for round := range 2 {
		for _, c := range cases {
			before := f.state(t)
			if err := c.lose(); err != nil {
				t.Fatal(err)
			}
			state := f.syncs(t, before, 3)
			if err := state.right(f.ids, 30, 1, len(f.caddys)); err != nil {
				t.Errorf("round %d, without %s: %v", round, c.name, err)
			}
		}
	}
	stop.Store(true)
	wg.Wait()
	t.Logf("%d requests passed", requests.Load())
	for _, h := range append(calls, charge) {
		h.letGo(t, len(h.calls))
	}
	if n := f.unjudged(t); n > 0 {
		t.Logf("of which %d had no answer from the fleet", n)
	}
}

// What a killed Caddy had is free eight beats after its last one, with the next
// beat of any other.
func TestFleet_KilledInstance(t *testing.T) {
	f := newFleet(t)
	f.start(t, 3, hundred)
	calls, _ := f.fill(t, 0, 60, 5)
	victim, others := f.ids[0], f.ids[1:]
	f.caddys[0].Kill()
	for _, call := range calls.calls {
		call.leave()
	}
	f.caddys, f.ids = f.caddys[1:], others

	f.state(t) // what the victim had sent comes before the second look
	killed := f.state(t)
	if end, latest := killed.ends[victim], killed.now+8*250_000; end == 0 || end > latest {
		t.Fatalf("the victim ends at %d us, want at most %d", end, latest)
	}
	f.caddys[0].get(t, "/").want(t, http.StatusOK) // there is room yet
	heard := func(s fleetState) int64 { return s.entries[others[0]].seq + s.entries[others[1]].seq }
	var due int64 // what was heard of the others when the end had come
	eventually(t, patience, "dropped", func() bool {
		s := f.state(t)
		switch e, ok := s.entries[victim]; {
		case !ok:
			if s.now < killed.ends[victim] {
				t.Errorf("the victim was dropped %d us early", killed.ends[victim]-s.now)
			}
			return true
		case e != killed.entries[victim]:
			t.Fatalf("a dead Caddy says %+v, and said %+v", e, killed.entries[victim])
		case due > 0 && heard(s) > due:
			t.Fatal("a sync after the end has not dropped the victim")
		case due == 0 && s.now >= killed.ends[victim]:
			due = heard(s)
		}
		return false
	})
	if err := f.state(t).right(others, 0, 0, 0); err != nil {
		t.Error(err)
	}
	h, _ := f.fill(t, 0, usable, 5)
	h.letGo(t, usable)
	calls.wg.Wait()
}

// A Caddy that stops takes its claim with it.
func TestFleet_StoppedInstance(t *testing.T) {
	f := newFleet(t)
	f.start(t, 3, hundred)
	h, _ := f.fill(t, 0, 50, 5)
	h.letGo(t, len(h.calls))
	f.caddys[0].Stop()
	state := f.state(t)
	if err := state.right(f.ids[1:], 0, 0, 0); err != nil {
		t.Error(err)
	}
	if state.totals.claim > 10 {
		t.Errorf("%d slots are claimed, want those of idle Caddys", state.totals.claim)
	}
}
