// SPDX-License-Identifier: Apache-2.0

// Command scale measures what the estimates of docs/scaling.md rest on, without
// HTTP: what a decision and a held lease cost Redis, and, by simulation, how
// evenly the masters of a Cluster are loaded.
//
//	go run -C benchmarks ./scale
//	go run -C benchmarks ./scale -docs ..
package main

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/benchmarks/marked"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/benchmarks/redisproc"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

const users = 10_000

func main() {
	length := flag.Duration("time", 3*time.Second, "how long each line is measured")
	leases := flag.Int("leases", 20_000, "how many leases are held at once")
	docs := flag.String("docs", "", "bring docs/scaling.md in this folder up to date")
	flag.Parse()
	var b strings.Builder
	err := run(context.Background(), io.MultiWriter(os.Stdout, &b), *length, limiters.DefaultLease, *leases)
	if err == nil && *docs != "" {
		err = marked.Replace(filepath.Join(*docs, "docs", "scaling.md"), "scale", "```text\n"+b.String()+"```")
	}
	if err != nil {
		log.Fatal(err)
	}
}

// run measures each line for length, and held leases for hold.
func run(ctx context.Context, out io.Writer, length, hold time.Duration, leases int) error {
	addr, stop, err := redisproc.Start()
	if err != nil {
		return err
	}
	defer stop()
	rdb := redis.NewClient(&redis.Options{Addr: addr, Protocol: 2, DisableIdentity: true})
	defer rdb.Close()
	m := &measurement{ctx, rdb, addr, length}

	rate, err := limiters.NewRate("default", "rate", 1_000_000, time.Second, 1_000_000, 1)
	if err != nil {
		return err
	}
	concurrency, err := limiters.NewConcurrency("default", "concurrency", 1000, limiters.DefaultLease)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%-28s  %8s  %12s  %9s  %10s  %9s  %9s\n", "decisions and releases", "clients", "decisions/s", "Redis µs", "of scripts", "bytes in", "bytes out")
	costs := map[string]float64{} // us, by the name of the line
	for _, line := range []struct {
		name   string
		limits []*limiters.Limit
	}{{"rate", []*limiters.Limit{rate}}, {"rate + concurrency", []*limiters.Limit{rate, concurrency}}} {
		for _, clients := range []int{1, 16, 64, 256} {
			us, err := m.decisions(out, line.name, clients, line.limits)
			if err != nil {
				return err
			}
			costs[line.name] = us // in the end of the most clients
		}
	}
	if err := m.renewals(out, hold, leases, concurrency); err != nil {
		return err
	}
	writeSpread(out)
	writeEstimates(out, costs)
	return nil
}

// measurement is one on one redis-server.
type measurement struct {
	ctx    context.Context
	rdb    *redis.Client
	addr   string
	length time.Duration
}

func (m *measurement) store() *limiters.Redis {
	return limiters.NewRedis(limiters.RedisOptions{
		Universal: redis.UniversalOptions{Addrs: []string{m.addr}}, Timeout: time.Second,
	})
}

// decisions measures requests by clients who each wait for the answer. It
// returns what one costs Redis.
func (m *measurement) decisions(out io.Writer, name string, clients int, limits []*limiters.Limit) (us float64, err error) {
	store := m.store()
	defer store.Close()
	checks := make([]limiters.Check, 0, len(limits))
	for _, l := range limits {
		checks = append(checks, limiters.Check{Limit: l})
	}
	var done atomic.Int64
	errs := make([]error, clients)
	for _, measured := range []bool{false, true} { // warm up, first
		length := m.length / 4
		if measured {
			length = m.length
		}
		done.Store(0)
		before, err := redisproc.ReadUsage(m.ctx, m.rdb)
		if err != nil {
			return 0, err
		}
		start := time.Now()
		var wg sync.WaitGroup
		for c := range clients {
			wg.Go(func() {
				r := rand.New(rand.NewPCG(uint64(c), 1))
				for errs[c] == nil && time.Since(start) < length {
					var adm limiters.Admission
					adm, errs[c] = store.Admit(m.ctx, []limiters.Ask{{Identity: identity(r.IntN(users)), Checks: checks}})
					store.Release(adm)
					done.Add(1)
				}
			})
		}
		wg.Wait()
		took := time.Since(start).Seconds()
		after, err := redisproc.ReadUsage(m.ctx, m.rdb)
		if err = errors.Join(append(errs, err)...); err != nil {
			return 0, err
		}
		if !measured {
			continue
		}
		n := float64(done.Load())
		us = (after.CPU - before.CPU) / n
		fmt.Fprintf(out, "%-28s  %8d  %12.0f  %9.1f  %10.1f  %9.0f  %9.0f\n", name, clients, n/took, us,
			(after.Script-before.Script)/n, (after.In-before.In)/n, (after.Out-before.Out)/n)
	}
	return us, nil
}

// renewals measures what leases cost that are held for long.
func (m *measurement) renewals(out io.Writer, hold time.Duration, leases int, concurrency *limiters.Limit) error {
	store := m.store()
	defer store.Close()
	const clients = 16
	errs := make([]error, clients)
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			for i := c; i < leases && errs[c] == nil; i += clients {
				_, errs[c] = store.Admit(m.ctx, []limiters.Ask{{Identity: identity(i), Checks: []limiters.Check{{Limit: concurrency}}}})
			}
		})
	}
	wg.Wait()
	before, err := redisproc.ReadUsage(m.ctx, m.rdb)
	if err = errors.Join(append(errs, err)...); err != nil {
		return err
	}
	start := time.Now()
	time.Sleep(hold)
	after, err := redisproc.ReadUsage(m.ctx, m.rdb)
	if err != nil {
		return err
	}
	seconds := time.Since(start).Seconds()
	cpu := after.CPU - before.CPU
	fmt.Fprintf(out, "\n%d leases of %v held: %.0f renewals of users a second, %.1f %% of a core, %.1f µs a second for each lease\n",
		leases, limiters.DefaultLease, (after.Calls["evalsha"]-before.Calls["evalsha"])/seconds, cpu/1e4/seconds, cpu/seconds/float64(leases))
	return nil
}

func identity(n int) (id limiters.Identity) {
	binary.BigEndian.PutUint64(id[:], uint64(n)*0x9e3779b97f4a7c15) // spread like hashes
	binary.BigEndian.PutUint64(id[8:], uint64(n)+1)
	return id
}
