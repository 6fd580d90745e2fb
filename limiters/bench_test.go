// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/lua"
)

// A request with both limits, by many clients at once, and its release.
func benchmarkAdmit(b *testing.B, s Store) {
	limits := []*Limit{rate(b, "rate", 1_000_000, time.Second, 1_000_000, 1), concurrency(b, "many", 1000, 10*time.Second)}
	ctx := context.Background()
	var clients atomic.Uint64
	b.ReportAllocs()
	b.SetParallelism(32)
	b.RunParallel(func(pb *testing.PB) {
		asks := ask("", limits...)
		asks[0].Identity = nth(clients.Add(1))
		for pb.Next() {
			adm, err := s.Admit(ctx, asks)
			if err != nil || !adm.Allowed {
				b.Errorf("got %v, %v", adm.Allowed, err)
				return
			}
			s.Release(adm)
		}
	})
}

func BenchmarkMemory_Admit(b *testing.B) {
	m := NewMemory(0)
	defer m.Close()
	benchmarkAdmit(b, m)
}

func BenchmarkRedis_Admit(b *testing.B) {
	benchmarkAdmit(b, startRedis(b, redisAt(redistest.Start(b).Addr)))
}

// What admit.lua and the release cost Redis for each identity, by how many are in a
// call. Redis-ns/op is what the operating system says; other work on the machine
// does not count in it, but it makes it more.
func BenchmarkAdmitScript(b *testing.B) {
	srv := redistest.Start(b)
	r := handRedis(b, redisAt(srv.Addr))
	rdb := srv.Client()
	if err := rdb.ScriptLoad(b.Context(), lua.Admit).Err(); err != nil {
		b.Fatal(err)
	}
	checks := []Check{{Limit: rate(b, "rate", 1_000_000, time.Second, 1_000_000, 1)}, {Limit: concurrency(b, "many", 1000, 10*time.Second)}}
	for _, n := range []int{1, 4, 16, 64} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			before := redisCPU(b, rdb)
			who := uint64(0)
			for done := 0; done < b.N; {
				pipe := rdb.Pipeline() // as many in all as fit
				for range maxPipeline / n {
					identities := make([]Identity, n)
					for i := range identities {
						who++
						identities[i] = nth(who % 10_000 * 0x9e3779b97f4a7c15)
					}
					calls := r.calls(time.Now(), checks, identities...)
					pipe.Do(b.Context(), compose(b, maxExact, calls...)...)
					for _, c := range calls {
						pipe.ZRem(b.Context(), c.keys[1], c.members[0])
					}
					done += n
				}
				if _, err := pipe.Exec(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric((redisCPU(b, rdb)-before)/float64(b.N), "redis-ns/op")
		})
	}
}

// redisCPU is the time that a server has spent, in ns.
func redisCPU(b *testing.B, rdb *redis.Client) (ns float64) {
	for line := range strings.Lines(rdb.Info(b.Context(), "cpu").Val()) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if name == "used_cpu_sys" || name == "used_cpu_user" {
			seconds, err := strconv.ParseFloat(value, 64)
			if err != nil {
				b.Fatal(err)
			}
			ns += seconds * 1e9
		}
	}
	return ns
}

func BenchmarkDenials_Denied(b *testing.B) {
	d := NewDenials()
	asks := ask("a", rate(b, "rate", 1, time.Hour, 1, 1), concurrency(b, "two", 2, 10*time.Second))
	d.Learn(epoch, asks, learned(denied(time.Hour), denied(0)))
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, known := d.Denied(epoch, asks); !known {
				b.Error("not known")
				return
			}
		}
	})
}

// Requests of clients of whom nothing is remembered.
func BenchmarkDenials_NotDenied(b *testing.B) {
	d := NewDenials()
	known := ask("a", rate(b, "rate", 1, time.Hour, 1, 1))
	d.Learn(epoch, known, learned(denied(time.Hour)))
	asks := ask("b", known[0].Checks[0].Limit, concurrency(b, "two", 2, 10*time.Second))
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, known := d.Denied(epoch, asks); known {
				b.Error("denied")
				return
			}
		}
	})
}
