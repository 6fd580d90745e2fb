// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
)

// WorkersSettings are the numbers of a worker shedder.
type WorkersSettings struct {
	Ramp Ramp

	// Count is how many requests this instance can serve at once; at least 1
	// unless there is another source of Utilization.
	Count int64

	// Utilization, if not nil, is the source of the utilization, 0 to 1, in
	// place of in-flight / Count. It is called once a second, must not block
	// and returns NaN where it does not know.
	Utilization func() float64
}

// Workers sheds requests of an instance that has too much to do, the least
// critical first. Once a second it takes the utilization of that second (the
// mean over time of the requests in flight, over those that can be served at
// once) and moves its level along the ramp.
//
// Until the first Set it only counts. It is safe for concurrent use. What it
// trades for its calm is speed: it is no protection from a burst, only from
// overload that lasts for half a minute.
type Workers struct {
	level  atomic.Uint64 // the bits of a Level: what requests read
	stop   chan struct{}
	ended  chan struct{}
	closed sync.Once

	mu          sync.Mutex // guards below
	settings    WorkersSettings
	running     bool
	inFlight    gauge
	state       RampState
	utilization float64
	unknown     int
}

// WorkersStatus is what a worker shedder knows at one moment.
type WorkersStatus struct {
	InFlight    int64
	Utilization float64 // of the last second; NaN if not known
	Unknown     int     // samples in a row that did not know it
	Level       Level
}

// NewWorkers returns a worker shedder that counts and sheds nothing.
func NewWorkers() *Workers {
	return &Workers{
		stop:        make(chan struct{}),
		ended:       make(chan struct{}),
		inFlight:    gauge{at: clock()},
		utilization: math.NaN(),
	}
}

// Set puts settings in force from the next sample on. The level stays where it
// is. The first Set starts the sampling, at rest.
func (w *Workers) Set(s WorkersSettings) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.settings = s
	if !w.running {
		w.running = true
		w.inFlight.mean(clock()) // start a second
		go w.run(w.sample)
	}
}

// Close ends the sampling and waits for its end. The level stays as it is.
func (w *Workers) Close() {
	w.closed.Do(func() { close(w.stop) })
	w.mu.Lock()
	running := w.running
	w.running = true // no Set starts it again
	w.mu.Unlock()
	if running {
		<-w.ended
	}
}

// Enter counts a request that begins to be served. Every Enter wants one Leave.
func (w *Workers) Enter() { w.count(1) }

// Leave takes back one Enter.
func (w *Workers) Leave() { w.count(-1) }

func (w *Workers) count(n int64) {
	now := clock()
	w.mu.Lock()
	w.inFlight.add(now, n)
	w.mu.Unlock()
}

// Level returns the present level.
func (w *Workers) Level() Level {
	return Level(math.Float64frombits(w.level.Load()))
}

// Shed reports whether to shed a request of class c; u is a random number,
// uniform in [0, 1). It changes nothing.
func (w *Workers) Shed(c Criticality, u float64) bool {
	return w.Level().Decide(c, u)
}

// Status returns what the shedder knows.
func (w *Workers) Status() WorkersStatus {
	w.mu.Lock()
	defer w.mu.Unlock()
	return WorkersStatus{
		InFlight:    w.inFlight.count,
		Utilization: w.utilization,
		Unknown:     w.unknown,
		Level:       w.state.Level,
	}
}

// run samples once a second until Close.
func (w *Workers) run(sample func(now time.Time)) {
	defer close(w.ended)
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-w.stop:
			return
		case <-ticker.C:
			_ = safely.Do("sampler", func() { sample(clock()) })
		}
	}
}

func (w *Workers) sample(now time.Time) {
	settings, mean := w.mean(now)
	utilization := w.read(settings, mean) // foreign code: not under the lock

	w.mu.Lock()
	defer w.mu.Unlock()
	w.utilization = utilization
	if w.unknown++; !math.IsNaN(utilization) && !math.IsInf(utilization, 0) {
		w.unknown = 0
	}
	w.state = settings.Ramp.Step(w.state, now, utilization)
	w.level.Store(math.Float64bits(float64(w.state.Level)))
}

// mean returns the mean of the last second.
func (w *Workers) mean(now time.Time) (WorkersSettings, float64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.settings, w.inFlight.mean(now)
}

// read returns the utilization. A source that panics does not know it.
func (w *Workers) read(s WorkersSettings, mean float64) float64 {
	if s.Utilization == nil {
		return mean / float64(s.Count)
	}
	utilization := math.NaN()
	_ = safely.Do("utilization", func() { utilization = s.Utilization() })
	return utilization
}

// gauge is a count with its mean over time. It is not safe for concurrent use.
type gauge struct {
	count int64
	area  float64   // count · seconds since the mean was taken
	since time.Time // when the mean was taken
	at    time.Time // until when area is summed up
}

func (g *gauge) add(now time.Time, n int64) {
	g.area += float64(g.count) * now.Sub(g.at).Seconds()
	g.at = now
	g.count += n
}

// mean returns the mean since the last call, and begins anew.
func (g *gauge) mean(now time.Time) float64 {
	g.add(now, 0)
	mean := g.area / now.Sub(g.since).Seconds() // 0/0, not a number, over no time at all
	g.area, g.since = 0, now
	return mean
}

// started is when clock began.
var started = time.Now()

// clock is time.Now for the requests' path, at half its cost, which is most of what
// the shedders cost: it reads the monotonic clock alone. Its wall clock never steps.
func clock() time.Time { return started.Add(time.Since(started)) }
