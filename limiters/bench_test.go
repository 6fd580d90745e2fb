// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
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
