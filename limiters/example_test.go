// SPDX-License-Identifier: Apache-2.0

package limiters_test

import (
	"context"
	"fmt"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// A client may send five requests an hour, of which one may be in progress. The
// same works on Redis, with NewRedis, for many processes together.
func Example() {
	rate, err := limiters.NewRate("api", "rate", 5, time.Hour, 5, 1)
	if err != nil {
		fmt.Println(err)
		return
	}
	concurrency, err := limiters.NewConcurrency("api", "concurrency", 1, limiters.DefaultLease)
	if err != nil {
		fmt.Println(err)
		return
	}
	store := limiters.NewMemory(0)
	defer store.Close()

	// The identity is a keyed hash of the client's API key.
	asks := []limiters.Ask{{
		Identity: limiters.Identity{0x5e, 0xc2, 0xe7},
		Checks:   []limiters.Check{{Limit: rate}, {Limit: concurrency}},
	}}
	request := func() limiters.Admission {
		admission, err := store.Admit(context.Background(), asks)
		if err != nil {
			fmt.Println("the store failed, so the request passes:", err)
		}
		fmt.Printf("allowed: %v (%d tokens, %d slots left)\n", admission.Allowed,
			admission.Results[0].Remaining, admission.Results[1].Remaining)
		return admission
	}
	first := request()
	second := request()   // while the first is in progress
	store.Release(first)  // when it has been served
	store.Release(second) // denied or not
	store.Release(request())
	// Output:
	// allowed: true (4 tokens, 0 slots left)
	// allowed: false (4 tokens, 0 slots left)
	// allowed: true (3 tokens, 0 slots left)
}
