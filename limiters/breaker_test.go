// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestBreaker_Opens(t *testing.T) {
	const s = time.Second
	type calls struct {
		at   time.Duration
		good int
		bad  int
	}
	cases := []struct {
		name  string
		calls []calls
		open  bool
	}{
		{"no failure", []calls{{0, 1000, 0}}, false},
		{"four failures", []calls{{0, 0, 4}}, false},
		{"five failures", []calls{{0, 0, 5}}, true},
		{"five failures of ten", []calls{{0, 5, 5}}, true},
		{"five failures of eleven", []calls{{0, 6, 5}}, false},
		{"half of very many", []calls{{0, 100_000, 0}, {s / 2, 0, 99_999}}, false},
		{"and one more", []calls{{0, 100_000, 0}, {s / 2, 0, 100_000}}, true},
		{"within the second", []calls{{0, 0, 4}, {9 * breakerSlot, 0, 1}}, true},
		{"not within the second", []calls{{0, 0, 4}, {10 * breakerSlot, 0, 1}}, false},
		{"good ones are a second ago", []calls{{0, 1000, 0}, {10 * breakerSlot, 0, 5}}, true},
		{"one at a time", []calls{{0, 0, 1}, {s, 0, 1}, {2 * s, 0, 1}, {3 * s, 0, 1}, {4 * s, 0, 1}, {5 * s, 0, 1}}, false},
		{"after a month", []calls{{0, 0, 4}, {721 * time.Hour, 0, 4}}, false},
		{"when numbers begin again", []calls{{0, 0, 4}, {slotNumbers * breakerSlot, 0, 4}}, true}, // every 19 days, for a second
		{"around the end of the numbers", []calls{{(slotNumbers - 11) * breakerSlot, 0, 4}, {(slotNumbers - 10) * breakerSlot, 0, 1}}, true},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var b breaker
			opened := 0
			for _, n := range c.calls {
				for range n.good {
					if b.note(n.at, n.at, false) {
						t.Fatal("a call that is good opened it")
					}
				}
				for range n.bad {
					if b.note(n.at, n.at, true) {
						opened++
					}
				}
			}
			if b.open.Load() != c.open || opened > 1 || opened == 1 != c.open {
				t.Errorf("got open %v after it opened %d times, want %v", b.open.Load(), opened, c.open)
			}
		})
	}
}

func TestBreaker_StartsAnewWhenItCloses(t *testing.T) {
	const ms = time.Millisecond
	var b breaker
	fail := func(began, ended time.Duration, n int) (opened bool) {
		for range n {
			opened = b.note(began, ended, true) || opened
		}
		return opened
	}
	if !fail(0, 10*ms, 5) || fail(0, 20*ms, 5) {
		t.Error("it opens once")
	}
	b.close(100 * ms)
	if b.open.Load() {
		t.Fatal("closed, and it is open")
	}
	if fail(99*ms, 150*ms, 100) {
		t.Error("calls that began before it closed open it")
	}
	if fail(100*ms, 150*ms, 4) || !fail(100*ms, 150*ms, 1) {
		t.Error("it does not start anew")
	}
}

func TestBreaker_Patience(t *testing.T) {
	const s = time.Second
	var b breaker
	rows := []struct {
		closed, now, last, want time.Duration
	}{
		{0, s, 0, probeFirst},
		{2 * s, 3 * s, probeFirst, 2 * probeFirst},  // what closed it was wrong
		{6 * s, 16*s - 1, probeMost, 2 * probeMost}, // which the caller bounds
		{6 * s, 16 * s, probeMost, probeFirst},      // another outage
	}
	for i, row := range rows {
		b.close(row.closed)
		if got := b.patience(row.now, row.last); got != row.want {
			t.Errorf("row %d: got %v, want %v", i, got, row.want)
		}
	}
}

func TestBreaker_Idle(t *testing.T) {
	var b breaker
	for _, row := range []struct{ call, now, want time.Duration }{
		{-1, time.Hour, time.Hour},
		{time.Hour, time.Hour, 0},
		{-1, 90 * time.Minute, 30 * time.Minute},
		{2 * time.Hour, 2*time.Hour + time.Second, time.Second},
	} {
		if row.call >= 0 {
			b.note(row.call, row.call, false)
		}
		if got := b.idle(row.now); got != row.want {
			t.Errorf("at %v: got %v, want %v", row.now, got, row.want)
		}
	}
}

// Whoever opens it must be one, and no call is lost.
func TestBreaker_ManyAtOnce(t *testing.T) {
	var b breaker
	var opened atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 1000 {
				if b.note(0, time.Duration(i)*time.Millisecond/2, i%2 == 0) {
					opened.Add(1)
				}
			}
		})
	}
	wg.Wait()
	calls, failures := b.lastSecond(499 * time.Millisecond)
	if calls != 8000 || failures != 4000 || opened.Load() != 1 {
		t.Errorf("got %d failures of %d calls, opened %d times, want 4000 of 8000, once", failures, calls, opened.Load())
	}
}

func BenchmarkBreaker(b *testing.B) {
	var br breaker
	start := time.Now()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if !br.open.Load() {
				now := time.Since(start)
				br.note(now, now, false)
			}
		}
	})
}
