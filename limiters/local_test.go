// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"testing"
	"time"
)

// What n instances that are cut off together allow of a limit, each by its own
// memory, over a stretch of time.
func TestLimit_Share(t *testing.T) {
	cases := []struct {
		limit    *Limit
		n        int64
		capacity int64
		after    time.Duration
		want     int64 // of all together: n buckets at once, and the rate over time
	}{
		{rate(t, "rate", 100, time.Second, 500, 1), 1, 500, time.Second, 600},
		{rate(t, "rate", 100, time.Second, 500, 1), 3, 167, 3 * time.Second, 3*167 + 300},
		{rate(t, "rate", 7, time.Second, 10, 1), 3, 4, 3 * time.Second, 3*4 + 21},
		{rate(t, "rate", 1, time.Hour, 2, 1), 3, 1, 3 * time.Hour, 3 + 3},
		{rate(t, "cost", 10, time.Second, 100, 50), 4, 50, 20 * time.Second, 4 + 4},
		{rate(t, "long", 1, 24*time.Hour, 1_000_000, 1), 1000, 1000, 0, 1_000_000},
		{concurrency(t, "slots", 20, time.Hour), 3, 7, time.Second, 21},
		{concurrency(t, "slots", 1, time.Hour), 3, 1, time.Second, 3},
	}
	for _, c := range cases {
		share := c.limit.Share(c.n)
		if share.Capacity != c.capacity {
			t.Errorf("%+v of %d: got the capacity %d, want %d", c.limit, c.n, share.Capacity, c.capacity)
		}
		var allowed int64
		for range c.n {
			m := newMemory(0)
			drain := func(now time.Time) {
				for m.admitAt(now.UnixMicro(), ask("a", share)).Allowed {
					allowed++
				}
			}
			drain(epoch)
			// The bucket is full again and must not be, or tokens would be lost: in steps.
			for i := range int64(100) {
				drain(epoch.Add(c.after * time.Duration(i+1) / 100))
			}
		}
		if allowed != c.want {
			t.Errorf("%s of %d instances: got %d allowed within %v, want %d", c.limit.Name, c.n, allowed, c.after, c.want)
		}
	}
}
