// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"log/slog"
	"math"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
)

var quiet = slog.New(slog.DiscardHandler)

// countTo10 returns a worker shedder for 10 requests at once with the default ramp.
func countTo10(t *testing.T) *Workers {
	w := NewWorkers()
	t.Cleanup(w.Close)
	w.Set(WorkersSettings{Ramp: DefaultRamp(), Count: 10})
	return w
}

// enter puts n requests more in flight.
func enter(w *Workers, n int) {
	for range n {
		w.Enter()
	}
}

// after lets time pass, to just behind the sample at its end.
func after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestWorkers_OverloadAndRecovery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := countTo10(t)
		enter(w, 30) // utilization 3.0
		after(time.Second)
		if got, want := w.Level(), DefaultRamp().Rest(); got != want {
			t.Fatalf("level after the first sample: %v, want rest at %v", got, want)
		}
		after(28 * time.Second)
		if w.Level() > almost || w.Shed(TestMode, almost) {
			t.Errorf("level after 28 s of full overload: %v, want 0", w.Level())
		}
		after(40 * time.Second)
		if got := w.Level().Probability(TestMode); got < 1-almost || w.Level().Probability(Get) > almost {
			t.Errorf("level after 68 s: %v, want 1/3", w.Level())
		}
		after(80 * time.Second)
		if !w.Shed(Post, 1-almost) || w.Shed(Critical, 0) {
			t.Errorf("level after 148 s: %v, want all but critical shed", w.Level())
		}
		for range 30 {
			w.Leave()
		}
		after(120 * time.Second)
		if w.Shed(TestMode, almost) {
			t.Errorf("level after 120 s of rest: %v, want 0", w.Level())
		}
	})
}

func TestWorkers_UtilizationIsTheMeanOverTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := countTo10(t)
		if got := w.Status(); !math.IsNaN(got.Utilization) || got.Unknown != 0 {
			t.Errorf("before the first sample: %+v, want not known, by no sample", got)
		}
		rows := []struct {
			wait time.Duration // first
			n    int           // then so many enter, or leave
		}{
			{100 * time.Millisecond, 10},  // 0 requests for 0.1 s
			{200 * time.Millisecond, -6},  // 10 for 0.2 s
			{500 * time.Millisecond, 16},  // 4 for 0.5 s
			{200*time.Millisecond - 1, 0}, // 20 for 0.2 s
		}
		for _, row := range rows {
			time.Sleep(row.wait)
			w.mu.Lock()
			w.inFlight.add(time.Now(), int64(row.n))
			w.mu.Unlock()
		}
		after(1)
		if got, want := w.Status().Utilization, 0.8; math.Abs(got-want) > almost {
			t.Errorf("mean: got %v, want %v", got, want)
		}
		after(time.Second)
		if got := w.Status(); math.Abs(got.Utilization-2) > almost || got.InFlight != 20 {
			t.Errorf("a second later: got %+v, want 20 in flight and 2", got)
		}
	})
}

func TestWorkers_NewSettingsKeepLevelAndCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := countTo10(t)
		enter(w, 20)
		after(80 * time.Second)
		before := w.Level()
		w.Set(WorkersSettings{Ramp: DefaultRamp(), Count: 26}) // 20/26 is in the dead zone
		after(time.Minute)
		if got := w.Level(); got != before || got <= 0 {
			t.Errorf("level goes from %v to %v", before, got)
		}
		w.Set(WorkersSettings{Ramp: DefaultRamp(), Count: 20})
		after(time.Second)
		if got := w.Level(); got <= before {
			t.Errorf("level %v at full overload, want above %v", got, before)
		}
	})
}

func TestWorkers_OtherSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var caught []string
		safely.Report = func(b *safely.Bug) { caught = append(caught, b.Error()) }
		defer func() { safely.Report = func(*safely.Bug) {} }()
		w := NewWorkers()
		defer w.Close()
		source := func(read func() float64) {
			w.Set(WorkersSettings{Ramp: DefaultRamp(), Utilization: read})
		}
		source(func() float64 { return 1 })
		after(40 * time.Second)
		before := w.Level()
		if before <= 0 {
			t.Fatalf("level %v after 40 s of overload", before)
		}
		source(func() float64 { panic("out of order") })
		after(10 * time.Second)
		if got := w.Level(); got != before {
			t.Errorf("a source that panics moves the level from %v to %v", before, got)
		}
		if want := slices.Repeat([]string{"panic in utilization: out of order"}, 10); !slices.Equal(caught, want) {
			t.Errorf("reported: %q, want 10 panics", caught)
		}
		if got := w.Status(); !math.IsNaN(got.Utilization) || got.Unknown != 10 {
			t.Errorf("got %+v, want an utilization that is not known by 10 samples", got)
		}
		source(func() float64 { return 1 })
		after(time.Second)
		if got, want := w.Level(), before+1/120.; math.Abs(float64(got-want)) > almost {
			t.Errorf("after the source recovered: level %v, want %v", got, want)
		}
		if got := w.Status().Unknown; got != 0 {
			t.Errorf("after the source recovered: not known by %d samples", got)
		}
	})
}

func TestWorkers_WithoutAnyMeasure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWorkers()
		defer w.Close()
		w.Set(WorkersSettings{Ramp: DefaultRamp()}) // neither count nor source
		enter(w, 5)
		after(time.Hour)
		if got, want := w.Level(), DefaultRamp().Rest(); got != want {
			t.Errorf("level %v, want %v", got, want)
		}
	})
}

func TestWorkers_BeforeSet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWorkers()
		enter(w, 1000)
		after(time.Hour)
		if w.Shed(TestMode, 0) || w.Status().InFlight != 1000 {
			t.Errorf("got %+v, want counting only", w.Status())
		}
		// The hour before does not count as a sample.
		w.Set(WorkersSettings{Ramp: DefaultRamp(), Count: 1000})
		for range 1000 {
			w.Leave()
		}
		after(time.Second)
		if got := w.Status().Utilization; got != 0 {
			t.Errorf("utilization %v, want 0", got)
		}
		w.Close()
		w.Close()
	})
}

func TestWorkers_Close(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := countTo10(t)
		enter(w, 10)
		after(60 * time.Second)
		before := w.Level()
		w.Close() // synctest fails the test if the goroutine is left over
		after(time.Minute)
		if got := w.Level(); got != before {
			t.Errorf("level moves from %v to %v after Close", before, got)
		}
		w.Set(WorkersSettings{Ramp: DefaultRamp(), Count: 10})
		w.Leave()
		after(time.Minute)
		if got := w.Level(); got != before {
			t.Errorf("Set after Close starts it again: %v to %v", before, got)
		}
	})
	w := NewWorkers()
	w.Close() // never started: must not hang
}

func TestWorkers_CountsConcurrently(t *testing.T) {
	w := countTo10(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				w.Enter()
				w.Shed(Get, 0.5)
				w.Leave()
			}
			w.Enter()
		})
	}
	wg.Wait()
	if got := w.Status().InFlight; got != 8 {
		t.Errorf("%d in flight, want 8", got)
	}
}

func BenchmarkWorkers(b *testing.B) {
	w := NewWorkers()
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if w.Shed(Get, 0.5) {
				b.Fatal("shed at rest")
			}
			w.Enter()
			w.Leave()
		}
	})
}
