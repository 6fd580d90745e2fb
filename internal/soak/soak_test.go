// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/caddyproc"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

var soakTime = flag.Duration("soak", 0, "how long TestSoak runs (default: not at all)")

// Three Caddys on one Redis serve all sorts of traffic while everything fails
// around them at random. No client may get a response that is wrong, no limit may
// let pass what it must not, and at the end there must be no more of anything than
// there was at the start: memory, goroutines, files, keys.
//
//	make soak DURATION=10m
func TestSoak(t *testing.T) {
	if *soakTime == 0 {
		t.Skip("make soak runs it")
	}
	s := newSoak(t, newSeed(t))
	warm := min(*soakTime/6, time.Minute)

	s.traffic(100, func() {
		time.Sleep(warm / 2)
		for n := range s.caddys {
			s.reload(n) // what only a second config needs is there at the start, too
		}
		time.Sleep(warm / 2)
	})
	start := s.rest()
	t.Logf("%v of warming up; at rest: %v", warm, start)

	s.traffic(200, func() {
		rng := rand.New(rand.NewPCG(s.seed, 0))
		n := s.play(rng, append(s.ground.faults(), s.faults()...), *soakTime-warm, 800*time.Millisecond)
		t.Logf("%d faults", n)
		s.heal()
	})
	end := s.rest()
	for tries := 0; end.above(start) != "" && tries < 20; tries++ {
		time.Sleep(3 * time.Second) // what only takes its time is no leak
		end = s.rest()
	}
	t.Logf("at rest after it: %v", end)
	if what := end.above(start); what != "" {
		t.Errorf("more at the end than at the start: %s", what)
	}
	s.report()
	for _, c := range s.caddys {
		c.process.Stop()
	}
}

// soak is a fleet of Caddys, and what happens to its clients.
type soak struct {
	*ground

	seed   uint64
	up     string // host:port of the API behind the Caddys
	caddys []*caddy

	talk
}

// caddy is a Caddy at an address of its own, whichever process it is now.
type caddy struct {
	number  int
	port    int
	proxy   *redistest.Proxy // to Redis
	process *caddyproc.Process
	config  int // which it has
}

func newSoak(t *testing.T, seed uint64) *soak {
	s := &soak{ground: newGround(t), seed: seed, up: newUpstream(t)}
	s.counts, s.keys = map[string]int{}, map[string]int{}
	for n := range 3 {
		c := &caddy{number: n, port: caddyproc.FreePort(t), proxy: redistest.StartProxy(t, s.redis.Addr)}
		c.process = caddyproc.Start(t, s.caddyfile(c, 0))
		s.caddys = append(s.caddys, c)
	}
	return s
}

func (c *caddy) addr() string { return "127.0.0.1:" + strconv.Itoa(c.port) }

// What all configs agree about, so that the history can be checked.
var (
	soakRate = rate("rate", 20, time.Second, 40, 1)
	soakHeld = concurrency("concurrency", 6, 2*time.Second)
)

// caddyfile returns a config. All that may differ from one to the next differs.
func (s *soak) caddyfile(c *caddy, variant int) string {
	return fmt.Sprintf(`{
	default_bind 127.0.0.1
	persist_config off
	grace_period 5s
	log {
		exclude admin.api http.handlers.reverse_proxy
	}
	servers {
		protocols h1 h2c
	}
	stripe_ratelimit {
		redis %[1]s {
			timeout 100ms
			pool_size 10
		}
		key_secret dBWuqeC41LmsR8hKx2TzVn7G
	}
}
http://127.0.0.1:%[2]d {
	header >X-Outcome {http.stripe_ratelimit.outcome}
	handle /closed/* {
		stripe_ratelimit closed {
			rate 100/s
			concurrency 10 lease 2s
			on_store_error closed
		}
		respond ok
	}
	handle {
		stripe_ratelimit api {
			rate 20/s burst 40
			rate search %[3]d/s match /search
			rate candidate %[4]d/s mode dark
			concurrency 6 lease 2s
			critical /charges
			exempt /health
			fleet %[5]d reserve 25%%
			workers %[6]d grace 2s ramp 20s
		}
		reverse_proxy %[7]s {
			transport http {
				keepalive 2s
			}
		}
	}
}
`, c.proxy.Addr, c.port, 5+variant%3, 10+variant%2, 30+4*(variant%4), 8+variant%5, s.up)
}

// reload gives a Caddy another config.
func (s *soak) reload(n int) {
	c := s.caddys[n]
	defer s.excuse(c)()
	c.config++
	if status, body := c.process.Load(s.t, s.caddyfile(c, c.config)); status != http.StatusOK {
		s.t.Errorf("load: got %d %s, want 200", status, body)
	}
}

// faults are those of Caddys and of the network before Redis.
func (s *soak) faults() []fault {
	one := func(rng *rand.Rand) *caddy { return s.caddys[rng.IntN(len(s.caddys))] }
	return []fault{
		{"a Caddy is cut off from Redis", func(rng *rand.Rand, d time.Duration) {
			c := one(rng)
			c.proxy.Blackhole(true)
			time.Sleep(4 * d)
			c.proxy.Blackhole(false)
		}},
		{"Redis refuses a Caddy", func(rng *rand.Rand, d time.Duration) {
			c := one(rng)
			c.proxy.Refuse(true)
			c.proxy.CloseAll()
			time.Sleep(4 * d)
			c.proxy.Refuse(false)
		}},
		{"replies are lost", func(rng *rand.Rand, d time.Duration) {
			for range 5 {
				for _, c := range s.caddys {
					c.proxy.CutReplies(1 + rng.IntN(3))
				}
				time.Sleep(d / 5)
			}
		}},
		{"a Caddy hangs", func(rng *rand.Rand, d time.Duration) {
			c := one(rng)
			c.process.Signal(syscall.SIGSTOP)
			time.Sleep(d)
			c.process.Signal(syscall.SIGCONT)
		}},
		{"a Caddy is killed, and starts anew", func(rng *rand.Rand, d time.Duration) {
			c := one(rng)
			defer s.excuse(c)()
			c.process.Kill()
			time.Sleep(d)
			c.process = caddyproc.Start(s.t, s.caddyfile(c, c.config))
		}},
		{"a Caddy is stopped, and starts anew", func(rng *rand.Rand, _ time.Duration) {
			c := one(rng)
			defer s.excuse(c)()
			c.process.Stop()
			c.process = caddyproc.Start(s.t, s.caddyfile(c, c.config))
		}},
		{"a reload", func(rng *rand.Rand, _ time.Duration) {
			s.reload(one(rng).number)
		}},
		{"five reloads of each Caddy", func(*rand.Rand, time.Duration) {
			for range 5 {
				for _, c := range s.caddys {
					s.reload(c.number)
				}
			}
		}},
		{"reloads that are rejected", func(rng *rand.Rand, _ time.Duration) {
			c := one(rng)
			defer s.excuse(c)()
			for _, bad := range []string{
				"http://127.0.0.1:%d {\n stripe_ratelimit {\n rate 0/s \n}\n}",
				"http://127.0.0.1:%d {\n stripe_ratelimit api {\n rate 1/h \n}\n tls no-such-cert.pem no-such-key.pem\n}",
			} {
				if status, _ := c.process.Load(s.t, fmt.Sprintf(bad, c.port)); status == http.StatusOK {
					s.t.Error("load of a bad config: got 200")
				}
			}
		}},
	}
}

// heal waits until each Caddy limits by Redis again.
func (s *soak) heal() {
	from := time.Now()
	for _, c := range s.caddys {
		client := newClient(false)
		defer client.CloseIdleConnections()
		for n, since := 0, time.Now(); n < 20; {
			resp, err := s.get(client, c, "/", fmt.Sprint("sk_live_healed_", c.number, "_", n))
			if err == nil && resp.outcome == "allowed" {
				n++
				continue
			}
			if time.Since(since) > patience {
				s.t.Fatalf("Caddy %d does not limit by Redis again within %v: %v, %v", c.number, patience, resp, err)
			}
			n = 0
			time.Sleep(20 * time.Millisecond)
		}
	}
	s.t.Logf("all is well again after %v", time.Since(from))
}

// state is how much there is of what must not grow. Of the Caddys it is the most
// that one has.
type state struct {
	rss, heap, goroutines, files int
	keys, dead, redis            int
}

func (s state) String() string {
	return fmt.Sprintf("RSS %.1f MiB, heap after GC %.1f MiB, %d goroutines, %d files, %d keys in Redis (and %d sets of leases that have ended) in %.1f MiB",
		mib(s.rss), mib(s.heap), s.goroutines, s.files, s.keys, s.dead, mib(s.redis))
}

func mib(bytes int) float64 { return float64(bytes) / (1 << 20) }

// above says what there is more of than at the start, by more than what comes
// and goes: connections to Redis (10 at most), what the memories of denials and
// the like may hold, garbage that has not been given back to the system.
func (s state) above(start state) (what string) {
	for _, c := range []struct {
		name            string
		now, then, more int
	}{
		{"RSS", s.rss, start.rss, start.rss + 64<<20},
		{"heap", s.heap, start.heap, 16 << 20},
		{"goroutines", s.goroutines, start.goroutines, 15},
		{"files", s.files, start.files, 15},
		{"keys", s.keys, start.keys, 3},
		{"memory of Redis", s.redis, start.redis, 8 << 20},
	} {
		if c.now > c.then+c.more {
			what += fmt.Sprintf(" %s: %d, and %d at the start;", c.name, c.now, c.then)
		}
	}
	return what
}

// rest waits until what clients have left behind is over, and returns the state.
func (s *soak) rest() (most state) {
	s.t.Helper()
	eventually(s.t, "at rest", func() bool {
		for _, c := range s.caddys {
			if c.metric(s.t, "caddy_stripe_ratelimit_in_flight") > 0 {
				return false
			}
		}
		live, _ := s.stored()
		return live <= 8
	})
	for _, c := range s.caddys {
		most.heap = max(most.heap, c.heap(s.t))
		most.rss = max(most.rss, c.metric(s.t, "process_resident_memory_bytes"))
		most.goroutines = max(most.goroutines, c.metric(s.t, "go_goroutines"))
		most.files = max(most.files, c.metric(s.t, "process_open_fds"))
	}
	most.keys, most.dead = s.stored()
	most.redis = s.memory()
	return most
}
