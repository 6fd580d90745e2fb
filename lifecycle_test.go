// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	_ "github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	goredis "github.com/redis/go-redis/v9"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

func TestReloadKeepsBuckets(t *testing.T) {
	onBothStores(t, func(t *testing.T, s *server, global string) {
		s.load(global, "\tstripe_ratelimit {\n\t\trate 1/h burst 5\n\t}")
		s.want("sk_a", 200, 200, 200)
		s.load(global, "\theader X-Another thing\n\tstripe_ratelimit {\n\t\trate 1/h burst 5\n\t}")
		s.want("sk_a", 200, 200, 429)
	})
}

func TestReloadKeepsLeasesOfRequestsInProgress(t *testing.T) {
	onBothStores(t, func(t *testing.T, s *server, global string) {
		const site = "\tstripe_ratelimit {\n\t\tconcurrency 1\n\t}"
		s.load(global, site)
		release := s.held(t.Name(), "sk_a")
		s.load(global, "\theader X-Another thing\n"+site)
		if got := s.get("sk_a"); got != 429 {
			t.Fatalf("with a request of the old config in progress: got %d, want 429", got)
		}
		if got := release(); got != 200 {
			t.Fatalf("request that outlived its config: got %d, want 200", got)
		}
		// The client has its answer before the handler has returned and let the
		// slot go, and a refusal is remembered for 10 ms.
		eventually(t, func() bool { return s.get("sk_a") == 200 })
	})
}

func TestReloadPutsNewNumbersInForce(t *testing.T) {
	onBothStores(t, func(t *testing.T, s *server, global string) {
		s.load(global, "\tstripe_ratelimit {\n\t\trate 1/h burst 2\n\t}")
		s.want("sk_a", 200, 200, 429)
		s.load(global, "\tstripe_ratelimit {\n\t\trate 100000/h burst 100000\n\t}")
		eventually(t, func() bool { return s.get("sk_a") == 200 }) // drained, but refills fast now
		s.load(global, "\tstripe_ratelimit {\n\t\trate 1/h burst 1\n\t}")
		if first, second := s.get("sk_b"), s.get("sk_b"); first != 200 || second != 429 {
			t.Errorf("after lowering: got %d and %d, want 200 and 429", first, second)
		}
	})
}

func TestRejectedConfigChangesNothing(t *testing.T) {
	onBothStores(t, func(t *testing.T, s *server, global string) {
		const site = "\tstripe_ratelimit {\n\t\trate 1/h burst 3\n\t\tconcurrency 1\n\t}"
		s.load(global, site)
		release := s.held(t.Name(), "sk_a")
		s.want("sk_b", 200)
		refs, _ := pools.References("default")

		more := s.config(global, "\tstripe_ratelimit {\n\t\trate 1/h burst 100\n\t\tconcurrency 9\n\t}")
		rejected := map[string][]byte{
			"an app that does not start": withApp(t, more, "failing_app"),
			"a failure after the start":  failingLast(t, more),
			"two handlers that disagree": s.config(global, "\tstripe_ratelimit {\n\t\trate 7/h burst 77\n\t}\n\tstripe_ratelimit /x {\n\t\trate 7/h burst 78\n\t}"),
		}
		for name, config := range rejected {
			if err := caddy.Load(config, true); err == nil {
				t.Fatalf("%s: the config was accepted", name)
			}
			if got, _ := pools.References("default"); got != refs {
				t.Errorf("%s: %d references to the pool, want %d as before", name, got, refs)
			}
		}
		s.want("sk_b", 200, 200, 429)
		if got := s.get("sk_a"); got != 429 {
			t.Errorf("concurrency: got %d, want 429 as before", got)
		}
		if got := release(); got != 200 {
			t.Errorf("request in progress: got %d, want 200", got)
		}
	})
}

// withApp adds an app without settings to a config.
func withApp(t *testing.T, config []byte, name string) []byte {
	t.Helper()
	var c map[string]any
	if err := json.Unmarshal(config, &c); err != nil {
		t.Fatal(err)
	}
	c["apps"].(map[string]any)[name] = map[string]any{}
	out, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestHandlersOfOnePoolMustAgree(t *testing.T) {
	s := newServer(t)
	cases := []struct{ name, first, second, want string }{
		{"other numbers", "rate 7/h burst 77", "rate 7/h burst 78", `rate limit "rate" of pool "default" is 7/h`},
		{"other key", "rate 7/h", "rate 7/h key client_ip", "has other keys, matchers or ipv6_prefix"},
		{"other matchers", "rate 7/h match /a", "rate 7/h match /b", "has other keys, matchers or ipv6_prefix"},
		{"other prefix", "rate 7/h\n\t\tipv6_prefix 56", "rate 7/h", "has other keys, matchers or ipv6_prefix"},
	}
	for _, c := range cases {
		config := s.config("", fmt.Sprintf("\tstripe_ratelimit {\n\t\t%s\n\t}\n\tstripe_ratelimit /x {\n\t\t%s\n\t}", c.first, c.second))
		err := caddy.Validate(decode(t, config))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got error %v, want one with %q", c.name, err, c.want)
		}
	}
	// Where no address is a key, the prefix is no matter.
	config := s.config("", "\tstripe_ratelimit {\n\t\tkey api_key\n\t\trate 7/h\n\t\tipv6_prefix 56\n\t}\n\tstripe_ratelimit /x {\n\t\tkey api_key\n\t\trate 7/h\n\t}")
	if err := caddy.Validate(decode(t, config)); err != nil {
		t.Errorf("other prefix, but no address: %v", err)
	}
}

func decode(t *testing.T, config []byte) *caddy.Config {
	t.Helper()
	c := new(caddy.Config)
	if err := caddy.StrictUnmarshalJSON(config, c); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestValidateNeverDials(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var dials atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			dials.Add(1)
			c.Close()
		}
	}()
	s := newServer(t)
	for _, options := range []string{"", "cluster", "master_name mymaster"} {
		global := fmt.Sprintf("\tstripe_ratelimit {\n\t\tredis %s {\n\t\t\t%s\n\t\t}\n\t\tkey_secret s\n\t}", l.Addr(), options)
		if err := caddy.Validate(decode(t, s.config(global, "\tstripe_ratelimit {\n\t\trate 5/s\n\t\tconcurrency 5\n\t}"))); err != nil {
			t.Errorf("caddy.Validate with %q: %v", options, err)
		}
	}
	l.Close()
	<-done
	if n := dials.Load(); n != 0 {
		t.Errorf("validating dialled Redis %d times, want never", n)
	}
}

// A request may start on a handler after its Cleanup, when its config has just
// been replaced.
func TestRequestAfterCleanup(t *testing.T) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancel()
	a := &App{hasher: newHasher([]byte("s")), storeKey: "memory " + t.Name(), declared: map[string][]*declaredLimit{}}
	h := &Handler{
		Pool: "after_cleanup", Key: []string{sourceAPIKey}, IPv6Prefix: 64, app: a,
		logger:      ctx.Logger(),
		Concurrency: []*ConcurrencyLimit{{Capacity: 1}},
	}
	if err := h.provisionLimits(ctx); err != nil {
		t.Fatal(err)
	}
	var err error
	if h.attached, err = h.attach(); err != nil {
		t.Fatal(err)
	}

	serve := func(next caddyhttp.HandlerFunc) int {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("X-Api-Key", "sk_a")
		r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil)
		if err := h.ServeHTTP(w, r, next); err != nil {
			t.Fatal(err)
		}
		return w.Code
	}
	ok := caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error { return nil })

	serve(func(w http.ResponseWriter, _ *http.Request) error {
		if err := h.Cleanup(); err != nil {
			t.Fatal(err)
		}
		if refs, _ := pools.References(h.Pool); refs != 1 {
			t.Errorf("in progress after Cleanup: %d references to the pool, want 1", refs)
		}
		if got := serve(ok); got != 429 {
			t.Errorf("a second request after Cleanup: got %d, want 429", got)
		}
		return nil
	})
	gone := func(pool *caddy.UsagePool, key any) func() bool {
		return func() bool { _, exists := pool.References(key); return !exists }
	}
	eventually(t, gone(pools, h.Pool))
	serve(func(http.ResponseWriter, *http.Request) error {
		if got := serve(ok); got != 429 {
			t.Errorf("a request that started after everything had ended was not counted: got %d, want 429", got)
		}
		return nil
	})
	eventually(t, gone(pools, h.Pool))
	eventually(t, gone(stores, a.storeKey))
}

// The logs of a config may be closed when it has ended, and what its last
// requests have to say would be lost.
func TestComplaintsAfterCleanup(t *testing.T) {
	core, complaints := observer.New(zap.ErrorLevel)
	h := &Handler{logger: zap.New(core)}
	h.complain("before")
	if err := h.Cleanup(); err != nil {
		t.Fatal(err)
	}
	h.complaints.last.Store(0)
	h.complain("after")
	if got := complaints.Len(); got != 1 {
		t.Errorf("%d complaints went to the log of the config, want the one before its end", got)
	}
}

// So would be the lines about what was decided of them.
func TestDecisionsAfterCleanup(t *testing.T) {
	core, decisions := observer.New(zap.DebugLevel)
	h := (&Handler{Rate: []*RateLimit{{Requests: 5}}}).onStore(t, newShardedStore(t))
	h.logger = zap.New(core)
	h.serve(t)
	h.ended.Store(true)
	if status, said := h.serve(t); status != http.StatusOK || said != "allowed" || decisions.Len() != 1 {
		t.Errorf("got %d, %s and %d lines in the log of the config, want 200, allowed and the one before its end", status, said, decisions.Len())
	}
}

// slowStore is a store that takes its time to close.
type slowStore struct {
	failingStore
	closing, closed chan struct{}
}

func (s slowStore) Close() error {
	close(s.closing)
	<-s.closed
	return nil
}

// The last request of a config that is gone closes the store. Its response does
// not wait for that.
func TestLastRequestDoesNotWaitForTheStore(t *testing.T) {
	slow := slowStore{closing: make(chan struct{}), closed: make(chan struct{})}
	defer close(slow.closed)
	h := (&Handler{Concurrency: []*ConcurrencyLimit{{Capacity: 1}}}).onStore(t, slow)
	h.app.storeKey = "slow " + t.Name()
	stores.LoadOrStore(h.app.storeKey, h.attached.store)
	attached, err := h.attach()
	if err != nil {
		t.Fatal(err)
	}
	h.attached = attached
	_, _ = stores.Delete(h.app.storeKey) // ours, so that the handler's is the last
	if refs, _ := stores.References(h.app.storeKey); refs != 1 {
		t.Fatalf("%d references to the store, want that of the handler", refs)
	}

	answered := make(chan struct{})
	go func() {
		defer close(answered)
		w := httptest.NewRecorder()
		r, _ := newRequest(http.MethodGet, "/", "X-Api-Key", "sk_a")
		_ = h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return h.Cleanup() }))
	}()
	<-slow.closing
	select {
	case <-answered:
	case <-time.After(20 * time.Second):
		t.Error("the request waits until the store is closed")
	}
}

func TestReloadUnderLoadLeavesNothingBehind(t *testing.T) {
	redis := redistest.Start(t)
	client := redis.Client()
	before := connections(t, client)
	s := newServer(t)
	global := app(redis)
	site := func(n int) string {
		return fmt.Sprintf("\theader X-N %d\n\tstripe_ratelimit {\n\t\trate 100000/s\n\t\tconcurrency 1000\n\t}", n)
	}
	s.load(global, site(0))
	releases := make([]func() int, 10)
	for i := range releases {
		releases[i] = s.held(fmt.Sprint(t.Name(), i), "sk_held")
	}

	stop := make(chan struct{})
	var wg sync.WaitGroup
	var ok, wrong atomic.Int64
	for range 8 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				// Errors of the transport are the reload's: Caddy closes idle
				// connections, and a request may be on its way on one.
				switch status, err := s.try("sk_load"); {
				case err != nil:
				case status == 200:
					ok.Add(1)
				default:
					wrong.Add(1)
				}
			}
		})
	}
	const reloads = 50
	for i := 1; i <= reloads; i++ {
		s.loadInPlace(global, site(i))
		eventually(t, func() bool { return ok.Load() >= int64(i) || wrong.Load() > 0 })
	}
	close(stop)
	wg.Wait()
	if wrong.Load() > 0 {
		t.Errorf("over %d reloads: %d answers of 200 and %d others, want no others", reloads, ok.Load(), wrong.Load())
	}
	live, err := client.ZCard(t.Context(), heldKey(t, client)).Result()
	if err != nil || live != int64(len(releases)) {
		t.Errorf("after %d reloads: %d leases (%v), want the %d of the requests in progress", reloads, live, err, len(releases))
	}
	if n := goroutinesIn("limiters.(*Redis).flushLoop"); n != 1 {
		t.Errorf("after %d reloads: %d stores are open, want 1", reloads, n)
	}
	for _, release := range releases {
		if got := release(); got != 200 {
			t.Errorf("request that outlived %d configs: got %d, want 200", reloads, got)
		}
	}
	s.hold.CloseIdleConnections()
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool { return goroutinesIn("caddy-stripe-ratelimit/limiters.") == 0 })
	if _, exists := pools.References("default"); exists {
		t.Error("the pool is still there after everything has stopped")
	}
	keys, err := client.Keys(t.Context(), "*:c:*").Result()
	if err != nil || len(keys) > 0 {
		t.Errorf("leases left in Redis: %v (%v), want none", keys, err)
	}
	eventually(t, func() bool { return connections(t, client) == before })
}

// connections counts the connections to a Redis.
func connections(t *testing.T, client *goredis.Client) int {
	t.Helper()
	list, err := client.ClientList(t.Context()).Result()
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(list, "\n")
}

// heldKey returns the one sorted set that has leases of requests in progress.
func heldKey(t *testing.T, client *goredis.Client) string {
	t.Helper()
	var held []string
	eventually(t, func() bool {
		keys, err := client.Keys(t.Context(), "*:c:*").Result()
		held = keys
		return err == nil && len(keys) == 1 // releases of ended requests have been sent
	})
	return held[0]
}

// goroutinesIn counts the goroutines with a function in their stack.
func goroutinesIn(function string) int {
	buf := make([]byte, 8<<20)
	n := 0
	for stack := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		if strings.Contains(stack, function) {
			n++
		}
	}
	return n
}

func TestMetricsSurviveReloads(t *testing.T) {
	pool := testPool(t)
	s := newServer(t)
	site := "\tstripe_ratelimit " + pool + " {\n\t\trate 1/h burst 2\n\t}"
	s.load("", site)
	s.want("sk_metrics", 200, 200, 429)
	s.load("", "\theader X-Another thing\n"+site)
	s.want("sk_metrics", 429)
	got := map[string]float64{}
	ctx := caddy.ActiveContext()
	for name, value := range series(t, ctx.GetMetricsRegistry(), "requests_total", pool) {
		if value > 0 {
			got[name] = value
		}
	}
	var allowed, denied float64
	for name, value := range got {
		switch {
		case strings.Contains(name, "allowed"):
			allowed += value
		case strings.Contains(name, "denied"):
			denied += value
		}
	}
	if allowed != 2 || denied != 2 {
		t.Errorf("after a reload: %v allowed and %v denied, want 2 and 2; all: %v", allowed, denied, got)
	}
}
