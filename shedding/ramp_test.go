// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// A run samples a ramp on virtual time.
type run struct {
	ramp  Ramp
	state RampState
	now   time.Time
}

func newRun(r Ramp) *run { return &run{ramp: r, now: epoch} }

// sample takes n samples of the utilization, a second apart.
func (r *run) sample(n int, utilization float64) Level {
	for range n {
		r.state = r.ramp.Step(r.state, r.now, utilization)
		r.now = r.now.Add(time.Second)
	}
	return r.state.Level
}

// until counts the seconds of this utilization until done.
func (r *run) until(t *testing.T, utilization float64, done func(Level) bool) int {
	t.Helper()
	for n := range 1_000_000 {
		if done(r.state.Level) {
			return n
		}
		r.sample(1, utilization)
	}
	t.Fatalf("level %v at utilization %v never gets there", r.state.Level, utilization)
	return 0
}

const almost = 1e-9 // far above what floats lose in these sums, far below what a sample moves

func sheds(l Level) bool           { return l.Probability(TestMode) > almost }
func shedsEverything(l Level) bool { return l > 1-almost }

func TestRamp_FullOverloadFromRest(t *testing.T) {
	// Utilization 3.0 is 1.0: more than full does not exist, and does not freeze
	// the level either.
	for _, utilization := range []float64{1, 3, 1e300} {
		r := newRun(DefaultRamp())
		r.sample(1, utilization) // starts the clock
		if got, want := r.state.Level, Level(-28.0/120); got != want {
			t.Fatalf("utilization %v: level starts at %v, want %v", utilization, got, want)
		}
		// Sample 28 reaches level 0, where nothing is shed yet.
		if got := r.until(t, utilization, sheds); got != 29 {
			t.Errorf("utilization %v: first request shed after %d s, want 29 (28 s of grace and a sample)", utilization, got)
		}
		if got := 29 + r.until(t, utilization, shedsEverything); got != 148 {
			t.Errorf("utilization %v: everything sheddable shed after %d s, want 148", utilization, got)
		}
		if got := r.sample(1000, utilization); got != 1 {
			t.Errorf("utilization %v: level %v after 1,000 s more, want 1", utilization, got)
		}
	}
}

func TestRamp_StepIsExact(t *testing.T) {
	ms := func(n int) time.Time { return epoch.Add(time.Duration(n) * time.Millisecond) }
	rest := -28.0 / 120
	rows := []struct {
		at          int // ms
		utilization float64
		want        float64
		why         string
	}{
		{0, 1, rest, "the first sample starts the clock"},
		{1000, 1, rest + 1/120., "overload"},
		{1500, 1, rest + 1.5/120, "half a second counts half"},
		{3500, 1, rest + 3.5/120, "two seconds are the most a sample speaks for"},
		{5501, 1, rest + 3.5/120, "a longer gap holds"},
		{6501, 1, rest + 4.5/120, "and the time goes on from its end"},
		{66501, 1, rest + 4.5/120, "a process that was suspended for a minute"},
		{66001, 1, rest + 4.5/120, "a clock that stepped back"},
		{67001, 0.9, rest + 5/120., "half-way between bad and full: half the slope"},
		{68001, 0.8, rest + 5/120., "bad itself is in the dead zone"},
		{69001, 0.7, rest + 5/120., "so is good"},
		{70001, 0.75, rest + 5/120., "and what lies between"},
		{71001, math.NaN(), rest + 5/120., "not a number holds"},
		{72001, math.Inf(1), rest + 5/120., "nor is infinity a reading"},
		{73001, math.Inf(-1), rest + 5/120., "nor its negative"},
		{74001, -0.5, rest + 5/120., "nor anything negative"},
		{75001, 1, rest + 6/120., "the time of bad readings is not made up for"},
		{76001, 0.35, rest + 5.5/120, "half of good: half the slope down"},
		{77001, 0, rest + 4.5/120, "idle"},
		{78001, 0, rest + 3.5/120, ""},
		{79001, 0, rest + 2.5/120, ""},
		{80001, 0, rest + 1.5/120, ""},
		{81001, 0, rest + .5/120, ""},
		{82001, 0, rest, "no further down than rest"},
	}
	ramp, state := DefaultRamp(), RampState{}
	for i, row := range rows {
		state = ramp.Step(state, ms(row.at), row.utilization)
		if math.Abs(float64(state.Level)-row.want) > almost {
			t.Fatalf("row %d, utilization %v at %d ms (%s): level %v, want %v", i, row.utilization, row.at, row.why, state.Level, row.want)
		}
	}
}

func TestRamp_ShedsInOrder(t *testing.T) {
	r := newRun(DefaultRamp())
	var last [Critical + 1]float64
	for range 200 {
		level := r.sample(1, 1)
		p := func(c Criticality) float64 { return level.Probability(c) }
		if p(Get) > 0 && p(TestMode) != 1 {
			t.Fatalf("level %v: get is shed (%v) before all of test_mode is (%v)", level, p(Get), p(TestMode))
		}
		if p(Post) > 0 && p(Get) != 1 {
			t.Fatalf("level %v: post is shed (%v) before all of get is (%v)", level, p(Post), p(Get))
		}
		for c := TestMode; c <= Critical; c++ {
			if p(c) < last[c] {
				t.Fatalf("level %v: probability of %v falls from %v to %v under constant overload", level, c, last[c], p(c))
			}
			last[c] = p(c)
		}
	}
	if want := [...]float64{0, 1, 1, 1, 0}; last != want {
		t.Errorf("at the end: got %v, want %v", last, want)
	}
}

func TestRamp_Recovery(t *testing.T) {
	cases := []struct {
		utilization float64
		want        int // seconds from everything to nothing
	}{
		{0, 120},
		{0.35, 240},
		{0.6, 840}, // 14 minutes: the anti-flap design, which alert rules must know
		{0.69, 8400},
	}
	for _, c := range cases {
		r := newRun(DefaultRamp())
		r.sample(1, 1)
		r.until(t, 1, shedsEverything)
		if got := r.until(t, c.utilization, func(l Level) bool { return !sheds(l) }); got != c.want {
			t.Errorf("at utilization %v: recovered after %d s, want %d", c.utilization, got, c.want)
		}
	}

	r := newRun(DefaultRamp())
	r.sample(1, 1)
	r.until(t, 1, shedsEverything)
	if got := r.sample(3600, 0.75); !shedsEverything(got) {
		t.Errorf("after an hour in the dead zone: level %v, want 1", got)
	}
}

// A load that flips faster than the ramp moves the level by little: by at most
// half a period over the ramp time. So waves of up to 12 s shift no class's
// share by more than 15 %, and longer ones turn the level as often as they turn
// themselves, never oftener.
func TestRamp_SquareWave(t *testing.T) {
	for _, half := range []int{1, 2, 3, 6, 15, 30, 60} {
		for _, low := range []float64{0, 0.3, 0.6, 0.75} {
			t.Run(fmt.Sprintf("half period %d s, low %v", half, low), func(t *testing.T) {
				r, turns := newRun(DefaultRamp()), turnCounter{}
				r.sample(1, 1)
				const settled, end = 3600, 3600 + 600
				lowest, highest := Level(2), Level(-2)
				for s := range end {
					utilization := 1.0
					if s/half%2 == 1 {
						utilization = low
					}
					level := r.sample(1, utilization)
					if s >= settled {
						lowest, highest = min(lowest, level), max(highest, level)
						turns.see(level)
					}
				}
				if got, bound := float64(highest-lowest), float64(half)/120+almost; got > bound {
					t.Errorf("level swings by %v, want at most %v", got, bound)
				}
				bound := 600 / half // the edges of the wave
				if half <= 6 {
					bound = 0
				}
				if turns.count > bound {
					t.Errorf("%d changes of direction in ten minutes, want at most %d", turns.count, bound)
				}
			})
		}
	}
}

// turnCounter counts changes of direction of a level, without those of less than
// a twentieth, which shift no class's share by more than 15 %.
type turnCounter struct {
	count     int
	started   bool
	direction int // 1 up, −1 down, 0 not known yet
	low, high Level
}

const turnSize = 0.05

func (c *turnCounter) see(l Level) {
	if !c.started {
		c.started, c.low, c.high = true, l, l
		return
	}
	c.low, c.high = min(c.low, l), max(c.high, l)
	switch {
	case c.direction >= 0 && c.high-l > turnSize:
		c.turn(-1, l)
	case c.direction <= 0 && l-c.low > turnSize:
		c.turn(1, l)
	}
}

func (c *turnCounter) turn(direction int, l Level) {
	if c.direction != 0 {
		c.count++
	}
	c.direction, c.low, c.high = direction, l, l
}

func TestTurnCounter(t *testing.T) {
	var c turnCounter
	for _, l := range []Level{0, 0.04, 0, 0.04, 0.1, 0.2, 0.16, 0.2, 0.1, 0.02, 0.06, 0.08, 0} {
		c.see(l)
	}
	if c.count != 3 { // down after 0.2, up after 0.02, down after 0.08
		t.Errorf("got %d turns, want 3", c.count)
	}
}

func TestRamp_NewNumbersKeepTheLevel(t *testing.T) {
	r := newRun(DefaultRamp())
	r.sample(1, 1)
	before := r.sample(100, 1)
	r.ramp.Good, r.ramp.Bad, r.ramp.Grace, r.ramp.Ramp = 0.5, 0.6, time.Minute, 10*time.Minute
	if got := r.sample(1, 0.55); got != before {
		t.Errorf("level goes from %v to %v", before, got)
	}

	r = newRun(DefaultRamp())
	r.sample(1, 1) // at rest
	r.ramp.Grace = 0
	if got := r.sample(1, 0.75); got != 0 {
		t.Errorf("level at rest is %v once there is no grace, want 0", got)
	}
}

func TestLevel_ShareIsBinomial(t *testing.T) {
	rng := rand.New(rand.NewPCG(19, 23))
	const n = 100_000
	for _, level := range []Level{-0.2, 0, 0.1, 1.0 / 3, 0.5, 0.9, 1} {
		for c := TestMode; c <= Critical; c++ {
			shed := 0
			for range n {
				if level.Decide(c, rng.Float64()) {
					shed++
				}
			}
			p := level.Probability(c)
			bound := 4 * math.Sqrt(n*p*(1-p)) // with this seed, for good
			if got := float64(shed); math.Abs(got-n*p) > bound {
				t.Errorf("level %v: %d of %d %v requests shed, want %v ± %v", level, shed, n, c, n*p, bound)
			}
		}
	}
}

func TestLevel_ExtremesNeedNoLuck(t *testing.T) {
	almostOne := math.Nextafter(1, 0)
	cases := []struct {
		level Level
		c     Criticality
		u     float64
		want  bool
	}{
		{0, TestMode, 0, false}, // even the smallest random number sheds nothing
		{1.0 / 3, TestMode, almostOne, true},
		{1.0 / 3, Get, 0, false},
		{1, Get, almostOne, true},
		{1, Post, almostOne, true},
		{1, Critical, 0, false},
		{1, 0, 0, false}, // unclassified is not sheddable
		{1, 200, 0, false},
		{Level(math.NaN()), Post, 0, false},
	}
	for _, c := range cases {
		if got := c.level.Decide(c.c, c.u); got != c.want {
			t.Errorf("level %v, %v, u %v: shed %v, want %v", c.level, c.c, c.u, got, c.want)
		}
	}
}

func TestRamp_Properties(t *testing.T) {
	const seed = 5
	rng := rand.New(rand.NewPCG(seed, seed))
	readings := []float64{math.NaN(), math.Inf(1), math.Inf(-1), -1, 0, 0.7, 0.75, 0.8, 1, 3, 1e300}
	for trial := range 300 {
		good := rng.Float64()*0.98 + 0.001
		r := Ramp{
			Good: good, Bad: good + (1-good)*(0.01+0.98*rng.Float64()),
			Grace: time.Duration(rng.Int64N(int64(2 * time.Minute))), Ramp: time.Second + time.Duration(rng.Int64N(int64(10*time.Minute))),
		}
		if err := r.Validate(); err != nil {
			t.Fatalf("seed %d, trial %d: %+v: %v", seed, trial, r, err)
		}
		state, now := RampState{}, epoch
		for range 300 {
			now = now.Add(time.Duration((rng.Float64()*4 - 0.5) * float64(time.Second)))
			utilization := rng.Float64() * 1.5
			if rng.IntN(5) == 0 {
				utilization = readings[rng.IntN(len(readings))]
			}
			before := state
			state = r.Step(state, now, utilization)
			l := state.Level
			p, q, s := l.Probability(TestMode), l.Probability(Get), l.Probability(Post)
			switch {
			case !(l >= r.Rest() && l <= 1):
				t.Fatalf("seed %d, trial %d, %+v: level %v", seed, trial, r, l)
			case !(1 >= p && p >= q && q >= s && s >= 0) || l.Probability(Critical) != 0:
				t.Fatalf("seed %d, trial %d: level %v: probabilities %v, %v, %v", seed, trial, l, p, q, s)
			case before.At.IsZero():
			case utilization > r.Bad && l < before.Level, utilization < r.Good && l > before.Level:
				t.Fatalf("seed %d, trial %d, %+v: utilization %v moves the level from %v to %v", seed, trial, r, utilization, before.Level, l)
			case math.Abs(float64(l-before.Level)) > maxStep.Seconds()/r.Ramp.Seconds()+almost:
				t.Fatalf("seed %d, trial %d, %+v: level jumps from %v to %v", seed, trial, r, before.Level, l)
			}
		}
	}
}

func FuzzRamp_Step(f *testing.F) {
	f.Add(0.7, 0.8, int64(28e9), int64(120e9), 0.5, int64(1e9), 1.0)
	f.Fuzz(func(t *testing.T, good, bad float64, grace, ramp int64, level float64, dt int64, utilization float64) {
		r := Ramp{Good: good, Bad: bad, Grace: time.Duration(grace), Ramp: time.Duration(ramp)}
		if r.Validate() != nil || math.IsNaN(level) {
			t.Skip()
		}
		got := r.Step(RampState{Level(level), epoch}, epoch.Add(time.Duration(dt)), utilization)
		if !(got.Level >= r.Rest() && got.Level <= 1) {
			t.Errorf("%+v from %v after %v at %v: level %v", r, level, time.Duration(dt), utilization, got.Level)
		}
	})
}

func TestRamp_Validate(t *testing.T) {
	cases := []struct {
		name   string
		change func(*Ramp)
	}{
		{"good is 0", func(r *Ramp) { r.Good = 0 }},
		{"good equals bad", func(r *Ramp) { r.Good = r.Bad }},
		{"bad is 1", func(r *Ramp) { r.Bad = 1 }},
		{"good is not a number", func(r *Ramp) { r.Good = math.NaN() }},
		{"grace is negative", func(r *Ramp) { r.Grace = -1 }},
		{"no ramp", func(r *Ramp) { r.Ramp = 0 }},
	}
	for _, c := range cases {
		r := DefaultRamp()
		if err := r.Validate(); err != nil {
			t.Fatal(err)
		}
		c.change(&r)
		if err := r.Validate(); err == nil {
			t.Errorf("%s: no error", c.name)
		}
	}
}
