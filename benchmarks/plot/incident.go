// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// incident is the load that clients offer to an instance in ten minutes, as a
// part of what it can serve.
var incident = []struct {
	name    string
	length  time.Duration
	offered float64
}{
	{"calm", time.Minute, 0.6},
	{"overload", 150 * time.Second, 1.2},
	{"worse", 150 * time.Second, 2.5},
	{"over", 4 * time.Minute, 0.4},
}

// traffic is what the offered load is made of, as in the simulations of package
// shedding.
var traffic = map[shedding.Criticality]float64{
	shedding.TestMode: 0.1,
	shedding.Get:      0.5,
	shedding.Post:     0.3,
	shedding.Critical: 0.1,
}

// classes is the order in which classes are shed.
var classes = []shedding.Criticality{shedding.TestMode, shedding.Get, shedding.Post, shedding.Critical}

// second is the state of the instance at one time.
type second struct {
	at          time.Duration
	offered     float64
	utilization float64 // what is let in
	level       shedding.Level
	shed        map[shedding.Criticality]float64
}

// simulate runs the ramp of the defaults through the incident. What is shed is
// not served, so that the ramp sees the result of what it does. Everything
// happens on average and without chance.
func simulate() (seconds []second) {
	ramp, state := shedding.DefaultRamp(), shedding.RampState{}
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	var at time.Duration
	for _, part := range incident {
		for end := at + part.length; at < end; at += time.Second {
			s := second{at: at, offered: part.offered, shed: map[shedding.Criticality]float64{}}
			for _, class := range classes { // in order, because sums of floats depend on it
				s.shed[class] = state.Level.Probability(class)
				s.utilization += part.offered * traffic[class] * (1 - s.shed[class])
			}
			state = ramp.Step(state, start.Add(at), s.utilization)
			s.level = state.Level
			seconds = append(seconds, s)
		}
	}
	return seconds
}
