// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	goredis "github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

func init() {
	caddy.RegisterModule(new(failingApp))
	caddy.RegisterModule(new(gate))
	httpcaddyfile.RegisterHandlerDirective("test_gate", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		h.Next()
		return new(gate), nil
	})
}

// failingApp is an app that provisions but does not start.
type failingApp struct{}

func (*failingApp) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "failing_app", New: func() caddy.Module { return new(failingApp) }}
}
func (*failingApp) Start() error { return errors.New("failing_app never starts") }
func (*failingApp) Stop() error  { return nil }

// gate is a handler that holds requests with X-Hold until the test lets them go.
type gate struct{}

var gates sync.Map // X-Hold -> *hold

type hold struct{ entered, leave chan struct{} }

// newHold makes requests with X-Hold: name wait for close(leave).
func newHold(t *testing.T, name string) *hold {
	h := &hold{entered: make(chan struct{}, 1000), leave: make(chan struct{})}
	gates.Store(name, h)
	t.Cleanup(func() { gates.Delete(name) })
	return h
}

func (*gate) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.test_gate", New: func() caddy.Module { return new(gate) }}
}

func (*gate) ServeHTTP(w http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
	if v, ok := gates.Load(r.Header.Get("X-Hold")); ok {
		h := v.(*hold)
		h.entered <- struct{}{}
		<-h.leave
	}
	_, err := io.WriteString(w, "ok")
	return err
}

// server is a Caddy in this process; there is one at a time.
type server struct {
	t    *testing.T
	port int
	hold *http.Client
}

func newServer(t *testing.T) *server {
	t.Helper()
	s := &server{t: t, port: redistest.FreePort(t), hold: &http.Client{}}
	t.Cleanup(func() {
		s.hold.CloseIdleConnections()
		if err := caddy.Stop(); err != nil {
			t.Errorf("caddy.Stop: %v", err)
		}
	})
	return s
}

// config adapts a global option block and what a site has in it.
func (s *server) config(global, site string) []byte {
	s.t.Helper()
	text := fmt.Sprintf("{\n\tadmin off\n\tpersist_config off\n\tauto_https off\n\tskip_install_trust\n\torder test_gate last\n%s\n}\nhttp://127.0.0.1:%d {\n%s\n\ttest_gate\n}\n", global, s.port, site)
	adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		s.t.Fatalf("adapt: %v\n%s", err, text)
	}
	return adapted
}

// load puts a config in force.
func (s *server) load(global, site string) {
	s.t.Helper()
	if err := caddy.Load(s.config(global, site), true); err != nil {
		s.t.Fatalf("caddy.Load: %v", err)
	}
}

// get sends a request for the key and returns the status. A connection that the
// reload has closed under it is no answer: it asks again.
func (s *server) get(key string, header ...string) int {
	s.t.Helper()
	var err error
	for range 20 {
		var status int
		if status, err = s.try(key, header...); err == nil {
			return status
		}
	}
	s.t.Fatalf("get %s: %v", key, err)
	return 0
}

func (s *server) try(key string, header ...string) (int, error) {
	req, err := http.NewRequest(http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/", s.port), nil)
	if err != nil {
		return 0, err
	}
	req.Header.Set("Authorization", "Bearer "+key)
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := s.hold.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	return res.StatusCode, err
}

func (s *server) want(key string, statuses ...int) {
	s.t.Helper()
	for i, want := range statuses {
		if got := s.get(key); got != want {
			s.t.Fatalf("request %d with %s: got status %d, want %d", i+1, key, got, want)
		}
	}
}

// held starts a request that stays in progress until release is called.
func (s *server) held(name, key string) (release func() int) {
	s.t.Helper()
	h := newHold(s.t, name)
	status := make(chan int, 1)
	go func() {
		code, _ := s.try(key, "X-Hold", name)
		status <- code
	}()
	select {
	case <-h.entered:
	case code := <-status:
		s.t.Fatalf("request to be held ended with %d", code)
	}
	return func() int { close(h.leave); return <-status }
}

func app(redis *redistest.Server) string {
	if redis == nil {
		return ""
	}
	return fmt.Sprintf("\tstripe_ratelimit {\n\t\tredis %s {\n\t\t\ttimeout 5s\n\t\t}\n\t\tkey_secret test\n\t}", redis.Addr)
}

// onBothStores runs a test on the memory store and on Redis.
func onBothStores(t *testing.T, test func(t *testing.T, s *server, global string)) {
	t.Run("memory", func(t *testing.T) { test(t, newServer(t), app(nil)) })
	t.Run("redis", func(t *testing.T) {
		redis := redistest.Start(t)
		test(t, newServer(t), app(redis))
	})
}

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

// eventually waits for what another goroutine is about to do.
func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatal("still not so after 20 s")
		}
		runtime.Gosched()
	}
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

		rejected := map[string][]byte{
			"an app that does not start": withApp(t, s.config(global, "\tstripe_ratelimit {\n\t\trate 1/h burst 100\n\t\tconcurrency 9\n\t}"), "failing_app"),
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
		{"other key", "rate 7/h", "rate 7/h key client_ip", "has other keys or matchers"},
		{"other matchers", "rate 7/h match /a", "rate 7/h match /b", "has other keys or matchers"},
	}
	for _, c := range cases {
		config := s.config("", fmt.Sprintf("\tstripe_ratelimit {\n\t\t%s\n\t}\n\tstripe_ratelimit /x {\n\t\t%s\n\t}", c.first, c.second))
		err := caddy.Validate(decode(t, config))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got error %v, want one with %q", c.name, err, c.want)
		}
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
		logger: ctx.Logger(), entered: "entered",
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
		s.load(global, site(i))
	}
	close(stop)
	wg.Wait()
	if wrong.Load() > 0 || ok.Load() < reloads {
		t.Errorf("over %d reloads: %d answers of 200 and %d others, want at least %d and none", reloads, ok.Load(), wrong.Load(), reloads)
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
