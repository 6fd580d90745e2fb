// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"errors"
	"math"
	"time"
)

// Level is how much an overloaded instance sheds, the one number that the ramp
// moves: at 0 and below nothing, at 1 everything that may be shed.
//
// Its way from 0 to 1 is split into three equal parts, one for each sheddable
// class. A class is shed altogether before the first request of the next one
// is: test_mode by 1/3, get by 2/3, post by 1.
type Level float64

// Probability returns the chance that a request of class c is shed,
//
//	clamp(3·level − i, 0, 1)   with i = 0 for test_mode, 1 for get, 2 for post,
//
// and 0 for critical requests (and for any value that is no sheddable class).
func (l Level) Probability(c Criticality) float64 {
	if l <= 0 {
		return 0
	}
	switch c {
	case TestMode:
		return clamp(3*float64(l), 0, 1)
	case Get:
		return clamp(3*float64(l)-1, 0, 1)
	case Post:
		return clamp(3*float64(l)-2, 0, 1)
	}
	return 0
}

// Decide reports whether to shed a request of class c; u is a random number,
// uniform in [0, 1).
func (l Level) Decide(c Criticality, u float64) bool {
	return u < l.Probability(c)
}

// maxStep is the longest time that one sample speaks for. A gap that is longer
// (a suspended process, a stopped machine) says nothing about the load in
// between. Samples come once a second, so one may be missed.
const maxStep = 2 * time.Second

// Ramp is the law by which utilization moves the level. It is slow on purpose:
// shedding is for overload that lasts, and what flaps helps nobody.
//
// Per second the level moves by slope / Ramp, where the slope is
//
//	below Good            utilization/Good − 1           (−1 .. 0)
//	between Good and Bad  0, the dead zone: the level stands still
//	above Bad             (utilization − Bad)/(1 − Bad)  (0 .. 1, and 1 above 1)
//
// within [−Grace/Ramp, 1]. The part below 0 sheds nothing: an instance at rest
// (at −Grace/Ramp) that becomes fully overloaded sheds its first request after
// Grace and everything sheddable after Grace + Ramp. Recovery is as slow: at
// utilization 0 it takes Ramp to come from everything to nothing, at 0.6 it
// takes seven times as long, and in the dead zone it does not happen at all.
type Ramp struct {
	Good  float64       // utilization below which the level falls; 0 < Good < Bad
	Bad   float64       // utilization above which the level rises; Bad < 1
	Grace time.Duration // full overload from rest that sheds nothing; 0 or more
	Ramp  time.Duration // full overload from the first request shed to all
}

// DefaultRamp returns the ramp of Stripe's post: good 70 %, bad 80 %, grace
// 28 s, ramp 120 s.
func DefaultRamp() Ramp {
	return Ramp{Good: 0.7, Bad: 0.8, Grace: 28 * time.Second, Ramp: 120 * time.Second}
}

// Validate tells what is wrong with the numbers, if anything is.
func (r Ramp) Validate() error {
	switch {
	case !(r.Good > 0 && r.Good < r.Bad && r.Bad < 1): // NaN fails this, too
		return errors.New("good and bad must satisfy 0 < good < bad < 100 percent")
	case r.Grace < 0:
		return errors.New("grace must not be negative")
	case r.Ramp <= 0:
		return errors.New("ramp must be longer than zero")
	}
	return nil
}

// Rest is the level of an instance that has been calm for long, −Grace/Ramp.
func (r Ramp) Rest() Level {
	return Level(-r.Grace.Seconds() / r.Ramp.Seconds())
}

// RampState is where a ramp stands. The zero RampState has seen no sample.
type RampState struct {
	Level Level
	At    time.Time // when the last sample was taken
}

// Step returns the state after a sample of the utilization at now. The first
// sample only starts the clock, at rest. A sample that is not a finite number of
// at least 0, or that comes more than two seconds after the one before (or
// before it), leaves the level where it is.
func (r Ramp) Step(s RampState, now time.Time, utilization float64) RampState {
	if s.At.IsZero() {
		return RampState{Level: r.Rest(), At: now}
	}
	var change float64
	if dt := now.Sub(s.At); dt >= 0 && dt <= maxStep {
		change = r.slope(utilization) * dt.Seconds() / r.Ramp.Seconds()
	}
	// Clamping also when nothing changes carries a state over to new numbers.
	level := clamp(float64(s.Level)+change, float64(r.Rest()), 1)
	return RampState{Level: Level(level), At: now}
}

// slope is the change of the level per Ramp, in [−1, 1].
func (r Ramp) slope(utilization float64) float64 {
	switch {
	case math.IsNaN(utilization) || math.IsInf(utilization, 0) || utilization < 0:
		return 0
	case utilization < r.Good:
		return utilization/r.Good - 1
	case utilization > r.Bad:
		return math.Min(1, (utilization-r.Bad)/(1-r.Bad))
	}
	return 0
}

func clamp(x, low, high float64) float64 {
	return math.Max(low, math.Min(high, x))
}
