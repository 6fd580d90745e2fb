// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// shared is a config of which two Caddys are instances. Its lease is that of
// requests whose Caddy was killed.
func shared(redis *redistest.Server, up *upstream, slots int, lease time.Duration) config {
	return config{
		redis:  redis.Addr,
		global: "grace_period 60s",
		site: fmt.Sprintf("stripe_ratelimit {\n critical /charges \n concurrency %d lease %s \n fleet 100 reserve 20%% \n}\n reverse_proxy %s",
			slots, lease, up.addr),
	}
}

// instances returns how many Caddys the fleet has.
func instances(t testing.TB, redis *redistest.Server) int {
	t.Helper()
	rdb := redis.Client()
	defer rdb.Close()
	return len((&fleet{rdb: rdb}).state(t).entries)
}

// live returns how many leases have not ended.
func live(t testing.TB, redis *redistest.Server) (n int64) {
	t.Helper()
	rdb := redis.Client()
	defer rdb.Close()
	for _, key := range slots(t, redis) {
		now, err := rdb.Time(t.Context()).Result()
		if err != nil {
			t.Fatal(err)
		}
		more, err := rdb.ZCount(t.Context(), key, fmt.Sprint(now.UnixMicro()), "+inf").Result()
		if err != nil {
			t.Fatal(err)
		}
		n += more
	}
	return n
}

// A Caddy that is stopped answers what it has begun, which counts until then,
// and leaves nothing of its own in Redis: another takes over at once.
func TestLifecycle_Stop(t *testing.T) {
	ways := map[string]func(c *caddy){
		"SIGTERM": func(c *caddy) { c.Signal(syscall.SIGTERM) },
		"POST stop": func(c *caddy) {
			if status, body := c.Ask(t, http.MethodPost, "/stop", ""); status != http.StatusOK {
				t.Errorf("POST /stop: got %d %s, want 200", status, body)
			}
		},
	}
	for name, stop := range ways {
		t.Run(name, func(t *testing.T) {
			const places = 10
			redis := redistest.Start(t)
			up := newUpstream(t)
			// A lease longer than the test: none may go by ending.
			cfg := shared(redis, up, places, 10*time.Minute)
			first, second := start(t, cfg), start(t, cfg)
			key := bearer("sk_live_stopped")
			calls := hold(t, first, up, places, key)
			second.get(t, "/", key...).want(t, http.StatusTooManyRequests)

			// Others keep it busy until it hears them no more.
			var done atomic.Int64
			var wg sync.WaitGroup
			for i, h2c := range []bool{false, false, true, true} {
				client := newClient(t, h2c)
				wg.Go(func() {
					for {
						call := up.call()
						a, err := first.try(t.Context(), client, http.MethodGet, "/work", call.header(bearer(fmt.Sprint("sk_live_", i))...)...)
						if err != nil {
							return
						}
						if a.status != http.StatusOK {
							t.Errorf("got status %d while it stops, want 200\n%s", a.status, a.body)
							return
						}
						done.Add(1)
					}
				})
			}
			eventually(t, patience, "busy", func() bool { return done.Load() > 20 })

			stopped := make(chan struct{})
			go func() {
				defer close(stopped)
				stop(first)
			}()
			eventually(t, patience, "deaf", func() bool {
				conn, err := net.Dial("tcp", first.addr())
				if err == nil {
					_ = conn.Close()
				}
				return err != nil
			})
			wg.Wait()
			for range 3 {
				second.get(t, "/", key...).want(t, http.StatusTooManyRequests) // what is in progress counts
			}
			if n := instances(t, redis); n != 2 {
				t.Errorf("%d instances in the fleet while requests are in progress, want 2", n)
			}
			calls.letGo(t, places)
			for _, a := range calls.answers {
				a.want(t, http.StatusOK)
			}
			if code := first.Wait(); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
			receive(t, "answered", stopped)
			if left := slots(t, redis); len(left) != 0 {
				t.Errorf("it has left %v", left)
			}
			if n := instances(t, redis); n != 1 {
				t.Errorf("%d instances in the fleet after one has gone, want 1", n)
			}
			time.Sleep(10 * time.Millisecond) // for which a refusal is remembered
			again := hold(t, second, up, places, key)
			second.get(t, "/", key...).want(t, http.StatusTooManyRequests)
			again.letGo(t, places)
			second.noStoreErrors(t)
			second.Stop()
			left(t, redis)
			disconnected(t, redis)
		})
	}
}

// A Caddy that is killed in the middle of a reload is as any that is killed: its
// slots are free with the end of their lease.
func TestLifecycle_KilledInReload(t *testing.T) {
	const places, lease = 10, longLease
	redis := redistest.Start(t)
	up := newUpstream(t)
	cfg := shared(redis, up, places, lease)
	other := start(t, cfg)
	key := bearer("sk_live_killed")
	for _, progress := range []string{"received request", "admin endpoint started", "limits in force"} {
		victim := start(t, cfg)
		calls := hold(t, victim, up, places, key)
		before := strings.Count(victim.Logs(), progress)
		answered := make(chan struct{})
		go func() { // it has no answer to wait for
			defer close(answered)
			req, err := http.NewRequest(http.MethodPost, "http://"+victim.Admin+"/load", strings.NewReader(cfg.caddyfile(victim.port)))
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("Content-Type", "text/caddyfile")
			req.Header.Set("Cache-Control", "must-revalidate")
			if resp, err := http.DefaultClient.Do(req); err == nil {
				_ = resp.Body.Close()
			}
		}()
		eventually(t, patience, progress, func() bool { return strings.Count(victim.Logs(), progress) > before })
		victim.Kill()
		<-answered
		calls.wg.Wait()
		for _, call := range calls.calls {
			call.leave()
		}
		eventually(t, patience, "dropped by the fleet", func() bool { return instances(t, redis) == 1 })
		eventually(t, patience, "free", func() bool { return live(t, redis) == 0 })
		again := hold(t, other, up, places, key)
		again.letGo(t, places)
		eventually(t, patience, "given back", func() bool { return live(t, redis) == 0 })
	}
	other.noStoreErrors(t)
}

// Reloads need no Redis. What becomes of requests while it is down follows the
// config that runs.
func TestLifecycle_ReloadsWithoutStore(t *testing.T) {
	down := map[string]func(redis *redistest.Server){
		"refused": (*redistest.Server).Kill,
		"hung":    (*redistest.Server).Stop,
	}
	for name, fail := range down {
		t.Run(name, func(t *testing.T) {
			redis, spare := redistest.Start(t), redistest.Start(t)
			cfg := func(redis *redistest.Server, onStoreError string) config {
				return config{redis: redis.Addr, store: "timeout 100ms", site: fmt.Sprintf(
					"stripe_ratelimit {\n critical /charges \n rate 3/d \n concurrency 5 lease 10m \n fleet 100 reserve 20%% \n on_store_error %s \n}\n respond ok", onStoreError)}
			}
			c := start(t, cfg(redis, "closed"))
			fail(redis)
			rows := []struct {
				redis        *redistest.Server
				onStoreError string
				status       int
			}{
				{redis, "closed", http.StatusServiceUnavailable},
				{redis, "open", http.StatusOK},
				{redis, "closed", http.StatusServiceUnavailable},
			}
			for i, row := range rows {
				c = c.load(t, cfg(row.redis, row.onStoreError))
				for range 3 {
					c.get(t, "/", bearer(fmt.Sprint("sk_live_", i))...).want(t, row.status)
					c.get(t, "/charges", bearer(fmt.Sprint("sk_live_", i))...).want(t, http.StatusOK)
				}
			}
			// Another Redis, which works, and limits at once.
			ample := cfg(spare, "closed")
			ample.store = ""
			c = c.load(t, ample)
			passes(t, c, 3, bearer("sk_live_spare"))
			// And back to the one that does not, before it does again.
			c = c.load(t, cfg(redis, "open"))
			c.get(t, "/", bearer("sk_live_spare")...).want(t, http.StatusOK)
			if name == "hung" {
				redis.Cont()
			} else {
				redis.Restart()
			}
			a, _ := judged(t, c, "sk_live_back")
			if a.field("RateLimit") == "" {
				t.Error("not limited once Redis is back")
			}
			c.Stop()
			for _, redis := range []*redistest.Server{redis, spare} {
				left(t, redis)
				disconnected(t, redis)
			}
		})
	}
}
