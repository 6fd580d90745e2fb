// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// Long-run rates of the script, as TestMemory_LongRunRate has them of its
// specification: clients who never stop asking get what the bucket held and what
// flowed in, to the last request, however odd the times are at which they ask.
// A cost of many tokens lets a test see minutes of a high rate.
func TestRedis_LongRunRate(t *testing.T) {
	cases := []struct {
		perSecond, cost int64
		every           time.Duration // how often somebody asks, about
		seconds         int64
	}{
		{7, 1, 500 * time.Millisecond, 300},
		{7000, 700, 300 * time.Millisecond, 200},
		{30_000, 1000, 100 * time.Millisecond, 60},
	}
	fake := redistest.StartFakeTime(t)
	r := handRedis(t, redisAt(fake.Addr))
	rng := rand.New(rand.NewPCG(1, 1))
	for _, c := range cases {
		l := rate(t, "rate", c.perSecond, time.Second, 5*c.perSecond, c.cost)
		asks := ask("a", l)
		got, now := int64(0), time.Duration(0)
		drain := func() {
			fake.SetTime(epoch.Add(now))
			for {
				adm, err := r.Admit(t.Context(), asks)
				if err != nil {
					t.Fatal(err)
				}
				if !adm.Allowed {
					return
				}
				got += c.cost
			}
		}
		for end := time.Duration(c.seconds) * time.Second; now < end; now += time.Microsecond + time.Duration(rng.Int64N(int64(2*c.every))) {
			drain()
		}
		now = time.Duration(c.seconds) * time.Second
		drain()
		want := 5*c.perSecond + c.perSecond*c.seconds
		if got > want || got <= want-c.cost {
			t.Errorf("%d/s: %d tokens were taken in %d s, want %d less a part of one request", c.perSecond, got, c.seconds, want)
		}
		fake.Client().FlushAll(t.Context())
	}
}
