// SPDX-License-Identifier: Apache-2.0

package shedding_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// The law of the worker shedder is a pure function, here driven by hand through
// two and a half minutes of full overload.
func ExampleRamp() {
	ramp := shedding.DefaultRamp()
	var state shedding.RampState
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for second := range 149 {
		state = ramp.Step(state, start.Add(time.Duration(second)*time.Second), 1.0)
		switch second {
		case 0, 28, 48, 68, 108, 148:
			level := state.Level
			fmt.Printf("%3d s: test_mode %3.0f %%, get %3.0f %%, post %3.0f %%, critical %.0f %%\n", second,
				100*level.Probability(shedding.TestMode), 100*level.Probability(shedding.Get),
				100*level.Probability(shedding.Post), 100*level.Probability(shedding.Critical))
		}
	}
	// Output:
	//   0 s: test_mode   0 %, get   0 %, post   0 %, critical 0 %
	//  28 s: test_mode   0 %, get   0 %, post   0 %, critical 0 %
	//  48 s: test_mode  50 %, get   0 %, post   0 %, critical 0 %
	//  68 s: test_mode 100 %, get   0 %, post   0 %, critical 0 %
	// 108 s: test_mode 100 %, get 100 %, post   0 %, critical 0 %
	// 148 s: test_mode 100 %, get 100 %, post 100 %, critical 0 %
}

// A worker shedder around the serving of a request.
func ExampleWorkers() {
	workers := shedding.NewWorkers()
	defer workers.Close()
	workers.Set(shedding.WorkersSettings{Ramp: shedding.DefaultRamp(), Count: 64})

	serve := func(c shedding.Criticality) string {
		if workers.Shed(c, rand.Float64()) {
			return "503"
		}
		workers.Enter()
		defer workers.Leave()
		return "200"
	}
	fmt.Println(serve(shedding.TestMode))
	// Output: 200
}

// A fleet shedder around the serving of a request. A nil SyncFunc makes the fleet
// this one process; otherwise it brings requests to Redis.
func ExampleFleet() {
	fleet := shedding.NewFleet(nil, slog.Default())
	defer fleet.Close()
	fleet.Set(shedding.FleetSettings{Capacity: 5, Reserve: 20})

	begin := func(c shedding.Criticality) string {
		if !fleet.TryAcquire(c) {
			// Only now is a context with the deadline of the store worth its price.
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			if begun, _ := fleet.Acquire(ctx, c); !begun {
				return "shed"
			}
		}
		// Serve, and in the end: fleet.Release(c)
		return "begun"
	}
	for range 5 {
		fmt.Println("post:", begin(shedding.Post))
	}
	fmt.Println("critical:", begin(shedding.Critical))
	// Output:
	// post: begun
	// post: begun
	// post: begun
	// post: begun
	// post: shed
	// critical: begun
}
