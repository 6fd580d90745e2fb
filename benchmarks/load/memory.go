// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"runtime"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/benchmarks/redisproc"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// memory is what the state of one user takes, in bytes.
type memory struct {
	Identities int     `json:"identities"`
	Redis      float64 `json:"redis"`       // of used_memory, for a bucket
	Key        float64 `json:"redis_usage"` // MEMORY USAGE of a bucket
	Lease      float64 `json:"redis_lease"` // of used_memory, for a set with one lease
	Process    float64 `json:"process"`     // of the heap, for a bucket of the memory store
	Slots      float64 `json:"process_slots"`
}

// measureMemory fills both stores with users of whom each has taken one token
// of a day's, then with users of whom each has one request in progress.
func measureMemory(ctx context.Context, identities int) (*memory, error) {
	m := &memory{Identities: identities}
	bucket, err := limiters.NewRate("default", "rate", 100, 24*time.Hour, 500, 1)
	if err != nil {
		return nil, err
	}
	lease, err := limiters.NewConcurrency("default", "concurrency", 20, time.Hour)
	if err != nil {
		return nil, err
	}

	addr, stop, err := redisproc.Start()
	if err != nil {
		return nil, err
	}
	defer stop()
	rdb := redis.NewClient(&redis.Options{Addr: addr, Protocol: 2, DisableIdentity: true})
	defer rdb.Close()
	store := limiters.NewRedis(limiters.RedisOptions{
		Universal: redis.UniversalOptions{Addrs: []string{addr}}, Timeout: patience,
	})
	used := func() float64 {
		info, err2 := rdb.Info(ctx, "memory").Result()
		bytes, err3 := strconv.ParseFloat(field(info, "used_memory"), 64)
		err = errors.Join(err, err2, err3)
		return bytes
	}
	// Connections, the script and whatever else is there once.
	if err := fill(ctx, store, 1_000_000, 100, bucket, lease); err != nil {
		return nil, err
	}
	n := float64(identities)
	before := used()
	if err := fill(ctx, store, 0, identities, bucket); err != nil {
		return nil, err
	}
	buckets := used()
	if err := fill(ctx, store, 0, identities, lease); err != nil {
		return nil, err
	}
	leases := used()
	m.Redis, m.Lease = (buckets-before)/n, (leases-buckets)/n
	key := limiters.DefaultKeyPrefix + "default:{" + identity(0).String() + "}:r:rate:24h0m0s"
	bytes, err2 := rdb.MemoryUsage(ctx, key).Result()
	m.Key = float64(bytes)
	if err = errors.Join(err, err2); err != nil {
		return nil, err
	}
	stop() // so that the leases need not be given back one by one
	_ = store.Close()

	local := limiters.NewMemory(0)
	empty := heap()
	if err := fill(ctx, local, 0, identities, bucket); err != nil {
		return nil, err
	}
	withBuckets := heap()
	if err := fill(ctx, local, 0, identities, lease); err != nil {
		return nil, err
	}
	m.Process, m.Slots = (withBuckets-empty)/n, (heap()-withBuckets)/n
	return m, local.Close()
}

// fill lets every identity make a request that never ends.
func fill(ctx context.Context, s limiters.Store, first, n int, limits ...*limiters.Limit) error {
	checks := make([]limiters.Check, 0, len(limits))
	for _, l := range limits {
		checks = append(checks, limiters.Check{Limit: l})
	}
	const clients = 16
	errs := make([]error, clients)
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			for i := first + c; i < first+n && errs[c] == nil; i += clients {
				_, errs[c] = s.Admit(ctx, []limiters.Ask{{Identity: identity(i), Checks: checks}})
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func identity(n int) (id limiters.Identity) {
	binary.BigEndian.PutUint64(id[:], uint64(n)*0x9e3779b97f4a7c15) // spread like hashes
	binary.BigEndian.PutUint64(id[8:], uint64(n))
	return id
}

func heap() float64 {
	var s runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&s)
	return float64(s.HeapAlloc)
}
