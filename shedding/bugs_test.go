// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
)

// reported collects where bugs are caught for the time of a test.
func reported(t *testing.T) *[]string {
	t.Helper()
	where := new([]string)
	before := safely.Report
	safely.Report = func(b *safely.Bug) { *where = append(*where, b.Where) }
	t.Cleanup(func() { safely.Report = before })
	return where
}

// A sampler with a bug goes on at its next second.
func TestWorkers_BugInSampler(t *testing.T) {
	bugs := reported(t)
	synctest.Test(t, func(t *testing.T) {
		w := NewWorkers()
		w.running = true
		n := 0
		go w.run(func(time.Time) {
			if n++; n <= 3 {
				panic("bug")
			}
		})
		time.Sleep(10500 * time.Millisecond)
		w.Close()
		if n != 10 {
			t.Errorf("%d samples in 10 s, want 10", n)
		}
	})
	if want := []string{"sampler", "sampler", "sampler"}; !slices.Equal(*bugs, want) {
		t.Errorf("reported: %v, want %v", *bugs, want)
	}
}

// A bug in a sync, or in what is made of its answer, is a sync that failed: who
// waits for it passes, and the next beat asks again.
func TestFleet_Bugs(t *testing.T) {
	cases := []struct {
		name  string
		where string
		sync  func() (SyncReply, error)
	}{
		{"in the sync", "fleet_sync", func() (SyncReply, error) { panic("bug") }},
		// With no log to tell of the drift.
		{"with the answer", "beat", func() (SyncReply, error) {
			return SyncReply{Beat: minBeat, Claim: 1000, Limit: 1000, Epoch: 1, Drift: 1}, nil
		}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			bugs := reported(t)
			synctest.Test(t, func(t *testing.T) {
				var mended atomic.Bool
				f := NewFleet(func(context.Context, SyncRequest) (SyncReply, error) {
					if !mended.Load() {
						return c.sync()
					}
					return SyncReply{Now: 1, Beat: minBeat, Claim: 1, Limit: 1, Epoch: 1, Capacity: 1, Allocation: 1, Instances: 1}, nil
				}, nil)
				defer f.Close()
				f.Set(FleetSettings{Capacity: 1})
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				for range 100 { // no matter how many ask
					if got, err := f.Acquire(ctx, Get); !got {
						t.Fatalf("while the fleet has a bug: got %v, %v, want to pass", got, err)
					}
				}
				time.Sleep(10 * time.Second)
				for range 100 {
					f.Release(Get)
				}
				if n := len(*bugs); n < 30 || n > 60 || slices.ContainsFunc(*bugs, func(w string) bool { return w != c.where }) {
					t.Errorf("reported in 10 s: %d of %v, want about 40 in %s, one a beat", n, slices.Compact(*bugs), c.where)
				}
				mended.Store(true)
				time.Sleep(time.Second)
				if err := f.Status().Err; err != nil {
					t.Errorf("after the bug: %v", err)
				}
				if !f.TryAcquire(Get) || f.TryAcquire(Get) {
					t.Error("after the bug: want one slot of one")
				}
				f.Release(Get)
			})
		})
	}
}
