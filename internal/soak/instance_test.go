// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// instance is what is in one Caddy: a store and a part in the fleet, behind a
// network of its own, and clients who never stop asking.
type instance struct {
	w      *world
	number int
	proxy  *redistest.Proxy
	store  *limiters.Redis
	fleet  *shedding.Fleet

	ending chan struct{} // closed when clients are to end
	dead   atomic.Bool   // it was killed: nothing is given back any more
	wg     sync.WaitGroup
	good   atomic.Int64 // admissions without a store error

	mu        sync.Mutex // guards below
	decisions []*Decision
	slots     []*Slot
}

func newInstance(w *world, number int) *instance {
	i := &instance{w: w, number: number, proxy: redistest.StartProxy(w.t, w.redis.Addr), ending: make(chan struct{})}
	i.store = limiters.NewRedis(limiters.RedisOptions{
		Universal: redis.UniversalOptions{Addrs: []string{i.proxy.Addr}, PoolSize: 20},
		Timeout:   storeTimeout,
		Observe: func(operation string, _ time.Duration, err error) {
			if operation != "renew" || err != nil {
				return
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			w.h.Renewals[number] = append(w.h.Renewals[number], now())
		},
	})
	i.fleet = shedding.NewFleet(func(ctx context.Context, r shedding.SyncRequest) (shedding.SyncReply, error) {
		reply, err := i.store.SyncFleet(ctx, "pool", r.Args())
		if err != nil {
			return shedding.SyncReply{}, err
		}
		return shedding.ParseSyncReply(reply)
	}, slog.New(slog.DiscardHandler))
	i.fleet.Set(shedding.FleetSettings{Capacity: 2 * allocation, Reserve: 50, Timeout: storeTimeout})
	for worker := range 6 {
		i.wg.Go(func() { i.ask(i.random(worker)) })
	}
	for worker := range 6 {
		i.wg.Go(func() { i.serve(i.random(100 + worker)) })
	}
	return i
}

func (i *instance) random(worker int) *rand.Rand {
	return rand.New(rand.NewPCG(i.w.seed, uint64(1000*i.number+worker)))
}

// sleep waits, and reports whether to go on.
func (i *instance) sleep(d time.Duration) bool {
	select {
	case <-i.ending:
		return false
	case <-time.After(d):
		return true
	}
}

// ask is a client of the per-user limits.
func (i *instance) ask(rng *rand.Rand) {
	for i.sleep(upTo(rng, 3*time.Millisecond)) {
		template := templates[rng.IntN(len(templates))]
		var asks []limiters.Ask
		for _, part := range template {
			asks = append(asks, limiters.Ask{Identity: identity(part.identity), Checks: part.checks})
		}
		hold := upTo(rng, 20*time.Millisecond)
		if rng.IntN(20) == 0 {
			hold = upTo(rng, 4*time.Second) // longer than leases are
		}

		sent := now()
		adm, err := i.store.Admit(context.Background(), asks)
		received := now()
		if err == nil {
			i.good.Add(1)
		}
		var made, leases []*Decision
		n := 0
		for _, part := range template {
			results := adm.Results[n : n+len(part.checks)]
			n += len(part.checks)
			allowed := true // by this identity, whatever others say
			for k, c := range part.checks {
				allowed = allowed && (c.Dark || results[k].Outcome == limiters.Allowed)
			}
			for k, c := range part.checks {
				d := &Decision{
					Instance: i.number, Identity: part.identity, Limit: c.Limit, Outcome: results[k].Outcome,
					Taken: allowed && results[k].Outcome == limiters.Allowed, Sent: sent, Received: received,
				}
				made = append(made, d)
				if d.Taken && c.Limit.Kind == limiters.Concurrency {
					d.Released = sent // unless it is held
					if adm.Allowed {
						leases = append(leases, d)
					}
				}
			}
		}
		for _, d := range leases {
			d.Released = 0
		}
		i.mu.Lock()
		i.decisions = append(i.decisions, made...)
		i.mu.Unlock()
		if len(leases) == 0 {
			i.store.Release(adm)
			continue
		}
		i.wg.Go(func() {
			i.sleep(hold)
			if i.dead.Load() {
				return
			}
			released := now()
			for _, d := range leases {
				d.Released = released
			}
			i.store.Release(adm)
		})
	}
}

// serve is a client of the fleet.
func (i *instance) serve(rng *rand.Rand) {
	for i.sleep(upTo(rng, 3*time.Millisecond)) {
		class := []shedding.Criticality{shedding.Critical, shedding.Get, shedding.Post}[rng.IntN(3)]
		slot := &Slot{Instance: i.number, Sent: now()}
		ctx, cancel := context.WithTimeout(context.Background(), storeTimeout)
		begun, err := i.fleet.Acquire(ctx, class)
		cancel()
		if !begun {
			continue
		}
		slot.Received, slot.Claimed = now(), err == nil
		if class != shedding.Critical {
			i.mu.Lock()
			i.slots = append(i.slots, slot)
			i.mu.Unlock()
		}
		i.sleep(upTo(rng, 40*time.Millisecond))
		if i.dead.Load() {
			return
		}
		slot.Released = now()
		i.fleet.Release(class)
	}
}

// stop lets the clients end, who give back what they hold.
func (i *instance) stop() {
	close(i.ending)
	i.wg.Wait()
}

// close ends what is under the clients.
func (i *instance) close() {
	i.fleet.Close()
	if err := i.store.Close(); err != nil {
		i.w.t.Errorf("close of instance %d: %v", i.number, err)
	}
}

// kill ends the instance as kill -9 does: Redis hears nothing from it any more.
func (i *instance) kill() {
	i.dead.Store(true)
	i.proxy.Refuse(true)
	i.proxy.CloseAll()
	i.stop()
	i.w.wg.Go(i.close) // has to find out that nobody listens
}
