// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// outage is a server behind a proxy that something happens to.
type outage struct {
	t     *testing.T
	srv   *redistest.Server
	proxy *redistest.Proxy
}

func (o outage) do(args ...any) {
	o.t.Helper()
	if err := o.srv.Client().Do(o.t.Context(), args...).Err(); err != nil {
		o.t.Fatalf("%v: %v", args, err)
	}
}

// restart restarts the server, whose users are lost with its memory.
func (o outage) restart() {
	o.t.Helper()
	o.srv.Restart()
	o.srv.AddUser("caddy", "secret", aclRules...)
}

// hangUp closes the connections of everybody else.
func (o outage) hangUp() { o.proxy.CloseAll() }

// Whatever a node fails of: every request passes and takes nothing, for a while
// after its timeout and then at once, without a call, and the reason is told. When
// it is over, the limits are in force again by themselves.
func TestRedis_Outages(t *testing.T) {
	cases := []struct {
		name, reason string
		begin, heal  func(outage)
	}{
		{
			"refused", "connection",
			func(o outage) { o.proxy.Refuse(true); o.hangUp() },
			func(o outage) { o.proxy.Refuse(false) },
		},
		{
			"black hole", "timeout",
			func(o outage) { o.proxy.Blackhole(true) },
			func(o outage) { o.proxy.Blackhole(false) },
		},
		{
			"stopped", "timeout",
			func(o outage) { o.srv.Stop() },
			func(o outage) { o.srv.Cont() },
		},
		{
			"a second late", "timeout",
			func(o outage) { o.proxy.Delay(time.Second) },
			func(o outage) { o.proxy.Delay(0) },
		},
		{
			"killed", "connection",
			func(o outage) { o.srv.Kill() },
			func(o outage) { o.restart() },
		},
		{
			"loading", "loading",
			func(o outage) {
				// Ten thousand keys that take 10 ms each, and between any two of them
				// it answers.
				o.do("CONFIG", "SET", "rdbcompression", "no")
				o.do("EVAL", "for i = 1, 10000 do redis.call('SET', 'key' .. i, string.rep('x', 1100)) end return 1", 0)
				o.do("SAVE")
				o.srv.Args = append(o.srv.Args, "--key-load-delay", "10000", "--loading-process-events-interval-bytes", "1024")
				o.restart()
			},
			func(o outage) { o.do("CONFIG", "SET", "key-load-delay", "0") },
		},
		{
			"a replica", "readonly",
			func(o outage) { o.do("REPLICAOF", "127.0.0.1", "1") },
			func(o outage) { o.do("REPLICAOF", "NO", "ONE") },
		},
		{
			"too few replicas", "readonly",
			func(o outage) { o.do("CONFIG", "SET", "min-replicas-to-write", "1") },
			func(o outage) { o.do("CONFIG", "SET", "min-replicas-to-write", "0") },
		},
		{
			"full", "oom",
			func(o outage) { o.do("CONFIG", "SET", "maxmemory", "1") },
			func(o outage) { o.do("CONFIG", "SET", "maxmemory", "0") },
		},
		{
			"another password", "auth",
			func(o outage) { o.do("ACL", "SETUSER", "caddy", "resetpass", ">other"); o.hangUp() },
			func(o outage) { o.do("ACL", "SETUSER", "caddy", ">secret") },
		},
		{
			"no scripts", "auth",
			func(o outage) { o.do("ACL", "SETUSER", "caddy", "-evalsha", "-eval") },
			func(o outage) { o.do("ACL", "SETUSER", "caddy", "+evalsha", "+eval") },
		},
		{
			"no writes", "auth",
			func(o outage) { o.do("ACL", "SETUSER", "caddy", "-set") },
			func(o outage) { o.do("ACL", "SETUSER", "caddy", "+set") },
		},
		{
			"busy", "busy",
			func(o outage) {
				o.do("CONFIG", "SET", "busy-reply-threshold", "1")
				forever := redis.NewClient(&redis.Options{Addr: o.srv.Addr, ReadTimeout: -1, MaxRetries: -1})
				o.t.Cleanup(func() { _ = forever.Close() })
				go forever.Eval(o.t.Context(), "while true do end", nil)
				eventually(o.t, "a busy server", func() bool {
					return redis.HasErrorPrefix(o.srv.Client().Get(o.t.Context(), "x").Err(), "BUSY")
				})
			},
			func(o outage) { o.do("SCRIPT", "KILL") },
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			o := outage{t: t, srv: redistest.Start(t)}
			o.proxy = redistest.StartProxy(t, o.srv.Addr)
			o.srv.AddUser("caddy", "secret", aclRules...)
			options := redisAt(o.proxy.Addr)
			options.Universal.Username, options.Universal.Password = "caddy", "secret"
			// A server that answers may take its time: many run here at once, on a
			// machine that may be busy.
			if options.Timeout = 10 * time.Second; c.reason == "timeout" {
				options.Timeout = 200 * ms
			}
			var opened, closed atomic.Int64
			options.OnBreaker = func(_ string, open bool, _ error) {
				if open {
					opened.Add(1)
				} else {
					closed.Add(1)
				}
			}
			r := startRedis(t, options)
			asks := ask("a", rate(t, "rate", 1, time.Hour, 1000, 1), concurrency(t, "ten", 10, time.Hour))
			r.Release(works(t, r, asks))

			c.begin(o)
			reasons := map[string]int{}
			var slowest time.Duration
			admit := func() string {
				start := time.Now()
				adm, err := r.Admit(t.Context(), asks)
				slowest = max(slowest, time.Since(start))
				if !adm.Allowed || err != nil && len(adm.leases) > 0 {
					t.Fatalf("got %v, %v, want the request to pass and hold nothing", adm, err)
				}
				r.Release(adm)
				if err == nil {
					return ""
				}
				reasons[Reason(err)]++
				return Reason(err)
			}
			eventually(t, "an open breaker", func() bool { return admit() == "breaker_open" })
			if opened.Load() == 0 && closed.Load() == 0 {
				eventually(t, "word of it", func() bool { return opened.Load() > 0 })
			}
			for range 500 {
				if reason := admit(); reason != "breaker_open" {
					t.Fatalf("got the reason %q while the breaker is open", reason)
				}
			}
			t.Logf("%v, slowest %v", reasons, slowest)
			if reasons[c.reason] == 0 || slowest > options.Timeout+3*time.Second {
				t.Errorf("got the reasons %v, slowest %v, want %s and %v at most", reasons, slowest, c.reason, options.Timeout)
			}

			c.heal(o)
			healed := time.Now()
			first := works(t, r, asks)
			t.Logf("an answer %v after it was over", time.Since(healed))
			eventually(t, "a closed breaker", func() bool { return closed.Load() > 0 })
			eventually(t, "two answers", func() bool {
				second, err := r.Admit(t.Context(), asks)
				if err == nil && second.Results[0].Remaining >= first.Results[0].Remaining {
					t.Errorf("%d tokens left, then %d", first.Results[0].Remaining, second.Results[0].Remaining)
				}
				r.Release(second)
				return err == nil
			})
			r.Release(first)
			eventually(t, "all releases", func() bool {
				return o.srv.Client().ZCard(t.Context(), concurrencyKey).Val() == 0
			})
		})
	}
}

var concurrencyKey = DefaultKeyPrefix + "pool:{" + id("a").String() + "}:c:ten"

// What goes wrong with one key, or now and then, opens no breaker.
func TestRedis_FaultsThatOpenNoBreaker(t *testing.T) {
	srv := redistest.Start(t)
	proxy := redistest.StartProxy(t, srv.Addr)
	options := redisAt(proxy.Addr)
	options.OnBreaker = func(string, bool, error) { t.Error("the breaker opened") }
	r := startRedis(t, options)
	rdb := srv.Client()
	l := rate(t, "rate", 1, time.Hour, 1000, 1)
	works(t, r, ask("a", l))
	rdb.RPush(t.Context(), l.stateKey(id("list")).redis(DefaultKeyPrefix), "x")

	cases := []struct {
		name    string
		who     string
		before  func(i int)
		reasons []string // of failures, if any
	}{
		{"a list at our key", "list", func(int) {}, []string{"wrong_type"}},
		{"scripts are flushed", "a", func(int) { rdb.ScriptFlush(t.Context()) }, nil},
		{"everything is flushed", "a", func(int) { rdb.FlushAll(t.Context()) }, nil},
		{"keys are evicted", "a", func(int) { rdb.Del(t.Context(), l.stateKey(id("a")).redis(DefaultKeyPrefix)) }, nil},
		{"each tenth connection is reset", "a", func(i int) {
			if i == 0 {
				proxy.CutEvery(10)
			}
		}, []string{"connection"}},
	}
	for _, c := range cases {
		failed := 0
		for i := range 50 {
			c.before(i)
			adm, err := r.Admit(t.Context(), ask(c.who, l))
			if !adm.Allowed || err != nil && !slices.Contains(c.reasons, Reason(err)) {
				t.Errorf("%s: got %v, %v", c.name, adm.Allowed, err)
			}
			if err != nil {
				failed++
			}
		}
		if (failed > 0) != (len(c.reasons) > 0) {
			t.Errorf("%s: %d calls failed", c.name, failed)
		}
		t.Logf("%s: %d of 50 calls failed", c.name, failed)
	}
}

// A name that cannot be resolved fails as a server that is not there.
func TestRedis_NameUnknown(t *testing.T) {
	o := redisAt("redis..invalid:6379") // no name at all, so nobody is asked for it
	o.Timeout = quick
	r := startRedis(t, o)
	l := rate(t, "rate", 1, time.Hour, 1000, 1)
	if _, err := r.Admit(t.Context(), ask("a", l)); Reason(err) != "connection" || !strings.Contains(err.Error(), "no such host") {
		t.Errorf("got %v (%s), want the reason connection", err, Reason(err))
	}
	open(t, r, ask("a", l))
}
