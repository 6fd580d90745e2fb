// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"fmt"
	"regexp"
	"strconv"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// What syncs cost Redis, in CPU time of its main thread: with all of a fleet's
// instances beating, and with all of them short of slots, each asking again as
// soon as it may. Both follow from the cost of one sync:
//
//	go test ./shedding -run '^$' -bench FleetSync
func BenchmarkFleetSync(b *testing.B) {
	for _, instances := range []int{20, 1000} {
		for _, refused := range []bool{false, true} {
			b.Run(fmt.Sprintf("instances=%d/refused=%v", instances, refused), func(b *testing.B) {
				rdb := redistest.Start(b).Client()
				sync := redisSync(rdb)
				settings := FleetSettings{Capacity: 5000, Reserve: 20}
				shares := make([]share, instances)
				for i := range shares {
					shares[i].instance = fmt.Sprintf("%032x", i)
					shares[i].set(settings)
					shares[i].inFlight = 2
					if refused {
						shares[i].inFlight = 4000/int64(instances) + 2
					}
				}
				short := 0 // syncs that got less than they need
				do := func(n int) SyncReply {
					s := &shares[n%instances]
					now := epoch // the headroom does not matter here
					request := s.request(now, 1)
					request.Deadline = 0
					reply, err := sync(b.Context(), request)
					if err != nil {
						b.Fatal(err)
					}
					s.reply(request, now, now, reply, 0)
					if reply.Limit < request.Need {
						short++
					}
					return reply
				}
				for n := range 3 * instances { // all have come, and want what they will
					do(n)
				}
				short = 0
				before := redisCPU(b, rdb)
				b.ResetTimer()
				var last SyncReply
				for n := range b.N {
					last = do(n)
				}
				b.StopTimer()
				each := (redisCPU(b, rdb) - before) / float64(b.N)
				period := last.Beat
				if refused {
					period = last.Hold
				}
				b.ReportMetric(100*float64(short)/float64(b.N), "%-refused")
				b.ReportMetric(each*1e6, "redis-µs/sync")
				b.ReportMetric(100*each*float64(instances)/period.Seconds(), "%-of-redis")
			})
		}
	}
}

var cpuField = regexp.MustCompile(`used_cpu_(?:sys|user)_main_thread:([0-9.]+)`)

// redisCPU returns the seconds that the server's main thread has used.
func redisCPU(b *testing.B, rdb *redis.Client) (seconds float64) {
	for _, field := range cpuField.FindAllStringSubmatch(rdb.Info(b.Context(), "cpu").Val(), -1) {
		value, err := strconv.ParseFloat(field[1], 64)
		if err != nil {
			b.Fatal(err)
		}
		seconds += value
	}
	return seconds
}
