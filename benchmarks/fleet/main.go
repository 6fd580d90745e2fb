// SPDX-License-Identifier: Apache-2.0

// Command fleet measures what the fleet shedder costs Redis. Instances without
// HTTP around them, each with a connection of its own, share one redis-server:
// first they only beat, then all of them have more requests than slots, and ask
// for more as often as they may. All the while they ask for switches, too, with
// each beat of theirs.
//
//	go run ./fleet -instances 1000 -time 10s
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/benchmarks/redisproc"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

const (
	bar    = 10.0 // percent of one core that Redis may use for 1,000 instances
	settle = 5 * time.Second

	// Slots for each instance: idle ones use two, those that are refused all.
	capacity, reserve = 10, 20
	idle              = 2
)

func main() {
	instances := flag.Int("instances", 1000, "how many instances there are")
	length := flag.Duration("time", 10*time.Second, "how long each of the two phases is measured")
	flag.Parse()
	if err := run(os.Stdout, *instances, *length, settle); err != nil {
		log.Fatal(err)
	}
}

// run starts a redis-server, measures both phases and writes a table.
func run(out io.Writer, instances int, length, settle time.Duration) error {
	addr, stop, err := redisproc.Start()
	if err != nil {
		return err
	}
	defer stop()
	rdb := redis.NewClient(&redis.Options{Addr: addr})
	defer rdb.Close()

	s := newSimulation(addr, instances)
	defer s.close()
	ctx := context.Background()
	if err := s.each(func(f *shedding.Fleet) error { return begin(ctx, f, idle) }); err != nil {
		return err
	}
	for _, store := range s.stores {
		s.done.Go(func() { s.control(store) })
	}
	fmt.Fprintf(out, "%d instances, %s for each phase\n", instances, length)
	fmt.Fprintf(out, "%-8s  %8s  %10s  %8s  %10s  %8s  %11s\n", "", "syncs/s", "controls/s", "us/call", "refused/s", "failed", "Redis CPU")
	for _, phase := range []string{"beating", "refused"} {
		if phase == "refused" {
			s.overload()
		}
		time.Sleep(settle)
		if err := s.measure(out, rdb, phase, length); err != nil {
			return err
		}
	}
	return nil
}

// begin begins n requests that never end.
func begin(ctx context.Context, f *shedding.Fleet, n int) error {
	for range n {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		ok, err := f.Acquire(ctx, shedding.Get)
		cancel()
		if !ok {
			return fmt.Errorf("an idle fleet refuses a request: %v", err)
		}
	}
	return nil
}

// simulation is a fleet without requests of any substance.
type simulation struct {
	fleets []*shedding.Fleet
	stores []*limiters.Redis

	refused                 atomic.Int64 // requests
	syncs, controls, failed atomic.Int64 // calls of Redis

	stop chan struct{}
	done sync.WaitGroup
}

func newSimulation(addr string, instances int) *simulation {
	s := &simulation{stop: make(chan struct{})}
	settings := shedding.FleetSettings{Capacity: int64(capacity * instances), Reserve: reserve}
	for range instances {
		store := limiters.NewRedis(limiters.RedisOptions{
			Universal: redis.UniversalOptions{Addrs: []string{addr}, PoolSize: 2},
			Observe: func(operation string, _ time.Duration, err error) {
				switch operation {
				case "fleet_sync":
					s.syncs.Add(1)
				case "control":
					s.controls.Add(1)
				}
				if err != nil {
					s.failed.Add(1)
				}
			},
		})
		fleet := shedding.NewFleet(func(ctx context.Context, r shedding.SyncRequest) (shedding.SyncReply, error) {
			reply, err := store.SyncFleet(ctx, "default", r.Args())
			if err != nil {
				return shedding.SyncReply{}, err
			}
			return shedding.ParseSyncReply(reply)
		}, slog.New(slog.DiscardHandler))
		fleet.Set(settings)
		s.stores, s.fleets = append(s.stores, store), append(s.fleets, fleet)
	}
	return s
}

// control asks for switches as the module does, until close.
func (s *simulation) control(store *limiters.Redis) {
	call := limiters.ControlCall{Secret: "0123456789abcdef"}
	beat := time.Second // not all of a thousand in their first quarter of a second
	for {
		select {
		case <-s.stop:
			return
		case <-time.After(time.Duration((0.8 + 0.4*rand.Float64()) * float64(beat))):
		}
		if reply, err := store.Control(context.Background(), call); err == nil {
			beat = reply.Beat
		}
	}
}

// each does something with all instances at once.
func (s *simulation) each(do func(*shedding.Fleet) error) error {
	errs := make(chan error, len(s.fleets))
	for _, f := range s.fleets {
		go func() { errs <- do(f) }()
	}
	var first error
	for range s.fleets {
		if err := <-errs; err != nil && first == nil {
			first = err
		}
	}
	return first
}

// overload brings every instance more requests than there will be slots, until
// close.
func (s *simulation) overload() {
	for _, f := range s.fleets {
		s.done.Go(func() {
			for {
				select {
				case <-s.stop:
					return
				case <-time.After(time.Duration((0.5 + rand.Float64()) * float64(20*time.Millisecond))):
				}
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				if ok, _ := f.Acquire(ctx, shedding.Get); !ok {
					s.refused.Add(1)
				}
				cancel()
			}
		})
	}
}

func (s *simulation) close() {
	close(s.stop)
	s.done.Wait()
	_ = s.each(func(f *shedding.Fleet) error { f.Close(); return nil })
	for _, store := range s.stores {
		_ = store.Close()
	}
}

// measure writes a line about what Redis does in some time.
func (s *simulation) measure(out io.Writer, rdb *redis.Client, phase string, length time.Duration) error {
	refused, syncs, controls, failed := s.refused.Load(), s.syncs.Load(), s.controls.Load(), s.failed.Load()
	before, err := redisproc.ReadUsage(context.Background(), rdb)
	if err != nil {
		return err
	}
	begin := time.Now()
	time.Sleep(length)
	after, err := redisproc.ReadUsage(context.Background(), rdb)
	if err != nil {
		return err
	}
	seconds := time.Since(begin).Seconds()
	cpu := 100 * (after.CPU - before.CPU) / 1e6 / seconds
	verdict := ""
	if len(s.fleets) == 1000 {
		verdict = fmt.Sprintf(" (want at most %.0f %%)", bar)
	}
	each := func(now, then int64) float64 { return float64(now-then) / seconds }
	fmt.Fprintf(out, "%-8s  %8.0f  %10.0f  %8.1f  %10.0f  %8d  %9.1f %%%s\n", phase,
		each(s.syncs.Load(), syncs), each(s.controls.Load(), controls),
		(after.Script-before.Script)/(after.Calls["evalsha"]-before.Calls["evalsha"]),
		each(s.refused.Load(), refused), s.failed.Load()-failed, cpu, verdict)
	return nil
}
