// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// server is a model of an overloaded API and of the clients that make it so: a
// fixed number of workers with a queue before them, a shedder in front, and
// clients that give up waiting, retry what failed, and go away after that. Time
// advances in ticks of 10 ms, without chance but for the seed.
type server struct {
	rng   *rand.Rand
	ramp  Ramp
	state RampState
	tick  int

	busy    []request
	queue   []request // the oldest first
	retries map[int][]request
	area    int // requests in flight, summed over the ticks of this second
	counts  [Critical + 1]count
}

type count struct{ arrived, shed, served int }

type request struct {
	class Criticality
	since int // tick of arrival
	tries int // retries left
}

const (
	workers  = 20
	ticks    = 100         // a second
	service  = 0.2 * ticks // mean service time
	patience = 5 * ticks   // how long a client waits for an answer
	capacity = workers * 1.0 / service
)

func newServer(seed uint64) *server {
	return &server{
		rng:     rand.New(rand.NewPCG(seed, seed)),
		ramp:    DefaultRamp(),
		retries: map[int][]request{},
	}
}

// second lets a second pass with arrivals at load times capacity.
func (s *server) second(load float64) {
	s.area = 0
	for range ticks {
		s.tick++
		for range s.poisson(load * capacity) {
			s.arrive(request{class: s.class(), tries: 2})
		}
		again := s.retries[s.tick]
		delete(s.retries, s.tick)
		for _, r := range again {
			s.arrive(r)
		}
		s.work()
		s.area += len(s.busy) + len(s.queue)
	}
	utilization := float64(s.area) / ticks / workers
	s.state = s.ramp.Step(s.state, epoch.Add(time.Duration(s.tick/ticks)*time.Second), utilization)
}

func (s *server) arrive(r request) {
	r.since = s.tick
	s.counts[r.class].arrived++
	if s.state.Level.Decide(r.class, s.rng.Float64()) {
		s.counts[r.class].shed++
		s.retry(r)
		return
	}
	s.queue = append(s.queue, r)
}

// retry comes back after Retry-After, which is drawn from 1 to k seconds; k
// grows from 2 to 10 with the level.
func (s *server) retry(r request) {
	if r.tries == 0 {
		return
	}
	r.tries--
	k := 2 + 8*max(0, float64(s.state.Level))
	at := s.tick + ticks + s.rng.IntN(1+int(k-1)*ticks)
	s.retries[at] = append(s.retries[at], r)
}

func (s *server) work() {
	still := s.busy[:0]
	for _, r := range s.busy {
		if s.rng.Float64() < 1/service {
			s.counts[r.class].served++
		} else {
			still = append(still, r)
		}
	}
	s.busy = still
	for len(s.queue) > 0 && s.tick-s.queue[0].since > patience {
		s.retry(s.queue[0])
		s.queue = s.queue[1:]
	}
	for len(s.queue) > 0 && len(s.busy) < workers {
		s.busy = append(s.busy, s.queue[0])
		s.queue = s.queue[1:]
	}
}

// class draws from the traffic of an API: a tenth critical, a tenth test mode.
func (s *server) class() Criticality {
	switch u := s.rng.Float64(); {
	case u < 0.1:
		return Critical
	case u < 0.2:
		return TestMode
	case u < 0.5:
		return Post
	}
	return Get
}

func (s *server) poisson(mean float64) int {
	n, p := 0, s.rng.Float64()
	for limit := math.Exp(-mean); p > limit; n++ {
		p *= s.rng.Float64()
	}
	return n
}

// Arrivals at any multiple of the capacity, with clients that retry twice. The
// level overshoots once while the queue of the first minutes drains, so there is
// at most one change of direction in the first ten minutes. Then it stays where
// the load belongs, good..bad, and does not turn at all.
func TestRamp_ClosedLoop(t *testing.T) {
	for _, load := range []float64{1.2, 1.5, 2, 4} {
		for seed := range uint64(2) {
			s := newServer(seed)
			for part, want := range []struct {
				turns int
				swing Level
			}{{1, 2}, {0, turnSize}, {0, turnSize}} {
				turns, lowest, highest := turnCounter{}, Level(2), Level(-2)
				var area int
				s.counts = [Critical + 1]count{}
				for range 600 {
					s.second(load)
					turns.see(s.state.Level)
					lowest, highest = min(lowest, s.state.Level), max(highest, s.state.Level)
					area += s.area
				}
				if turns.count > want.turns || highest-lowest > want.swing {
					t.Errorf("load %v, seed %d, ten minutes %d: %d changes of direction, level %.3f to %.3f; want %d and a swing of %v",
						load, seed, part, turns.count, lowest, highest, want.turns, want.swing)
				}
				if part == 0 {
					continue
				}
				if got := float64(area) / ticks / workers / 600; got < s.ramp.Good-0.02 || got > s.ramp.Bad+0.02 {
					t.Errorf("load %v, seed %d, ten minutes %d: utilization %.3f, want good to bad", load, seed, part, got)
				}
				if c := s.counts[Critical]; c.shed > 0 || c.served < c.arrived*99/100 {
					t.Errorf("load %v, seed %d, ten minutes %d: critical requests: %+v, want 99 %% served and none shed", load, seed, part, c)
				}
			}
		}
	}
}
