// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// traffic is what some clients send while something happens, each request with a
// key of its own, so that no limit denies any.
type traffic struct {
	c     *caddy
	stop  chan struct{}
	wg    sync.WaitGroup
	begun time.Time
	lines int // of the log, before

	mu    sync.Mutex // guards below
	took  []time.Duration
	wrong []string
}

func startTraffic(t testing.TB, c *caddy) *traffic {
	tr := &traffic{c: c, stop: make(chan struct{}), begun: time.Now(), lines: len(c.Logs())}
	for i := range 4 {
		client := newClient(t, false)
		tr.wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-tr.stop:
					return
				case <-time.After(5 * time.Millisecond):
				}
				a, err := c.try(t.Context(), client, http.MethodGet, "/", bearer(fmt.Sprintf("sk_live_%d_%d", i, n))...)
				tr.mu.Lock()
				tr.took = append(tr.took, a.came.Sub(a.sent))
				if err != nil || a.status != http.StatusOK {
					tr.wrong = append(tr.wrong, fmt.Sprint(a.status, " ", err))
				}
				tr.mu.Unlock()
			}
		})
	}
	return tr
}

// end fails the test unless all requests passed, in time, and the log was not
// flooded.
func (tr *traffic) end(t testing.TB) {
	t.Helper()
	close(tr.stop)
	tr.wg.Wait()
	lines, elapsed := warnings(tr.c.Logs()[tr.lines:]), time.Since(tr.begun)
	slices.Sort(tr.took)
	n := len(tr.took)
	if n == 0 {
		t.Fatal("no request was answered")
	}
	t.Logf("%d requests, p50 %v, p99 %v, p100 %v, %d log lines in %v", n, tr.took[n/2], tr.took[n*99/100], tr.took[n-1], len(lines), elapsed)
	if len(tr.wrong) > 0 {
		t.Errorf("%d of %d requests did not pass, such as %s", len(tr.wrong), n, tr.wrong[0])
	}
	if worst := tr.took[n-1]; worst > mostWorst {
		t.Errorf("a request took %v, want about %v at most", worst, storeTimeout)
	}
	if most := 1 + int(elapsed/time.Second); len(lines) > most {
		t.Errorf("%d log lines in %v, want at most %d:\n%s", len(lines), elapsed, most, strings.Join(lines, "\n"))
	}
}

// What clients and operators see of each fault that comes in the middle of
// requests: nothing, and its reason.
func TestFaults(t *testing.T) {
	const burst = 20
	redis := redistest.Start(t)
	proxy := redistest.StartProxy(t, redis.Addr)
	do := func(args ...any) {
		if err := redis.Client().Do(t.Context(), args...).Err(); err != nil {
			t.Fatalf("%v: %v", args, err)
		}
	}
	c := start(t, config{
		redis: proxy.Addr, store: "timeout " + storeTimeout.String(),
		site: fmt.Sprintf("stripe_ratelimit {\n rate 1/d burst %d \n concurrency 10 \n}\n respond ok", burst),
	})
	cases := []struct {
		name, reason string
		begin, heal  func()
	}{
		{"stopped", "timeout", redis.Stop, redis.Cont},
		{"black hole", "timeout", func() { proxy.Blackhole(true) }, func() { proxy.Blackhole(false) }},
		{"a second late", "timeout", func() { proxy.Delay(time.Second) }, func() { proxy.Delay(0) }},
		{"killed", "connection", redis.Kill, redis.Restart},
		{"a replica", "readonly", func() { do("REPLICAOF", "127.0.0.1", "1") }, func() { do("REPLICAOF", "NO", "ONE") }},
	}
	for _, f := range cases {
		t.Run(f.name, func(t *testing.T) {
			judged(t, c, "sk_live_before_"+f.name[:1])
			failed := c.metric(t, "store_errors_total", `operation="admit"`, `reason="`+f.reason+`"`)
			tr := startTraffic(t, c)
			time.Sleep(200 * time.Millisecond) // of requests in progress, whatever becomes of them
			f.begin()
			eventually(t, patience, "given up", func() bool { return c.metric(t, "store_breaker_open") == 1 })
			time.Sleep(500 * time.Millisecond) // of requests that nobody judges
			f.heal()
			healed := time.Now()
			eventually(t, patience, "called again", func() bool { return c.metric(t, "store_breaker_open") == 0 })
			t.Logf("called again after %v", time.Since(healed))
			tr.end(t)
			if n := c.metric(t, "store_errors_total", `operation="admit"`, `reason="`+f.reason+`"`) - failed; n < 1 {
				t.Errorf("no failure for the reason %s was counted:\n%s", f.reason, c.Metrics(t))
			}
			inForce(t, c, "sk_live_after_"+strings.ReplaceAll(f.name, " ", "_"), burst)
		})
	}
}

// Sentinels choose another master while requests come.
func TestFaults_Sentinel(t *testing.T) {
	const burst = 20
	s := redistest.StartSentinel(t)
	c := start(t, config{
		redis: s.Addr, store: "master_name " + s.MasterName + "\n timeout " + storeTimeout.String(),
		site: fmt.Sprintf("stripe_ratelimit {\n rate 1/d burst %d \n}\n respond ok", burst),
	})
	judged(t, c, "sk_live_before")
	tr := startTraffic(t, c)
	s.Master.Kill()
	eventually(t, patience, "given up", func() bool { return c.metric(t, "store_breaker_open") == 1 })
	s.Failover()
	eventually(t, patience, "called again", func() bool { return c.metric(t, "store_breaker_open") == 0 })
	tr.end(t)
	inForce(t, c, "sk_live_after", burst)
}

// One dead shard of a Cluster: its users pass, and all others are limited as
// ever.
func TestFaults_Shard(t *testing.T) {
	const burst = 20
	cluster := redistest.StartCluster(t, 3, 0)
	c := start(t, config{
		redis: strings.Join(cluster.Addrs(), " "), store: "timeout 500ms", // which a shard that works surely keeps to
		site: fmt.Sprintf("stripe_ratelimit {\n rate 1/d burst %d \n}\n respond {http.stripe_ratelimit.identity}", burst),
	})
	dead := cluster.Masters[2]
	on := func(want bool, name string) (key string) { // the dead shard
		for n := range 100 {
			key = fmt.Sprintf("sk_live_%s_%d", name, n)
			a, _ := judged(t, c, key)
			if (cluster.MasterOf("{"+a.body+"}") == dead) == want {
				return key
			}
		}
		t.Fatal("all keys are on the same shards")
		return ""
	}
	theirs := on(true, "theirs")
	others := []string{on(false, "one"), on(false, "two"), on(false, "three")}

	tr := startTraffic(t, c)
	dead.Stop()
	node := fmt.Sprintf(`node="%s"`, dead.Addr)
	eventually(t, patience, "given up", func() bool {
		c.get(t, "/", bearer(theirs)...).want(t, http.StatusOK)
		return c.metric(t, "store_breaker_open", node) == 1
	})
	for range 2 * burst {
		if a := c.get(t, "/", bearer(theirs)...).want(t, http.StatusOK); a.field("RateLimit") != "" {
			t.Fatalf("got RateLimit %s of a dead shard", a.field("RateLimit"))
		}
	}
	for _, key := range others {
		passed, last := 0, -1
		denied := false
		for range 10 * burst {
			a := c.get(t, "/", bearer(key)...)
			if denied = a.status == http.StatusTooManyRequests; denied {
				break
			}
			if left := a.remaining("rate"); left >= 0 {
				passed, last = passed+1, left
			}
		}
		if !denied || passed >= burst { // one was used to find the key
			t.Errorf("%s: %d requests pass, then denied: %v; want less than %d, and denied", key, passed, denied, burst)
		}
		t.Logf("%s: %d requests pass, %d left after the last", key, passed, last)
	}
	// Those of the others may have been held up by the machine, but do not fail.
	if open := c.metric(t, "store_breaker_open"); open != 1 {
		t.Errorf("%v breakers are open, want that of the dead shard alone:\n%s", open, c.Metrics(t))
	}
	tr.end(t)

	dead.Cont()
	eventually(t, patience, "called again", func() bool { return c.metric(t, "store_breaker_open") == 0 })
	inForce(t, c, theirs, burst)
}
