// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
)

// runningHandler returns a running handler with all four limiters on the memory store.
func runningHandler(b testing.TB, bucket *RateLimit) *Handler {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	b.Cleanup(cancel)
	reserve := 20
	app := &App{
		hasher: newHasher([]byte("s")), storeKey: "memory " + b.Name(), logger: zap.NewNop(), events: new(caddyevents.App),
		declared: map[string][]*declaredLimit{}, shedders: map[string]*shedders{},
	}
	if err := app.events.Provision(ctx); err != nil {
		b.Fatal(err)
	}
	h := &Handler{
		Pool: "benchmark", Key: []string{sourceAPIKey, sourceClientIP}, IPv6Prefix: 64, app: app,
		logger:      zap.NewNop(),
		Rate:        []*RateLimit{bucket},
		Concurrency: []*ConcurrencyLimit{{Capacity: 1000}},
		Fleet:       &FleetShedder{Capacity: 1_000_000, Reserve: &reserve},
		Workers:     &WorkerShedder{Count: 1_000_000},
	}
	if err := h.provisionLimits(ctx); err != nil {
		b.Fatal(err)
	}
	if err := app.declareShedders(ctx, h); err != nil {
		b.Fatal(err)
	}
	var err error
	if h.attached, err = h.attach(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _, _ = h.Cleanup(), app.Cleanup() })
	if err := (started{app}).Handle(ctx, caddy.Event{}); err != nil {
		b.Fatal(err)
	}
	return h
}

var ample = RateLimit{Requests: 100_000, Burst: 1_000_000}

// BenchmarkHandler is what the module adds to a request: all four limiters on
// the memory store, 10,000 keys. The cost of making the request is in "bare".
// Other work on the machine does not count in cpu-ns/op.
func BenchmarkHandler(b *testing.B) {
	h := runningHandler(b, &ample)
	keys := make([]string, 10_000)
	for i := range keys {
		keys[i] = fmt.Sprintf("Bearer sk_live_%d", i)
	}
	next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })
	run := func(name string, serve func(http.ResponseWriter, *http.Request) error) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			r := httptest.NewRequest(http.MethodGet, "/", nil)
			w := httptest.NewRecorder()
			i := 0
			b.ResetTimer()
			before := cpuTime()
			for b.Loop() {
				i++
				clear(w.Header())
				r.Header.Set("Authorization", keys[i%len(keys)])
				if err := serve(w, caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil)); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(cpuTime()-before)/float64(b.N), "cpu-ns/op")
		})
	}
	limited := func(w http.ResponseWriter, r *http.Request) error { return h.ServeHTTP(w, r, next) }
	run("bare", next.ServeHTTP)
	run("allowed", limited)
	switchedOn(b, h)
	run("allowed with switches and overrides", limited)
	h = runningHandler(b, &RateLimit{Requests: 1, Per: caddy.Duration(24 * time.Hour)})
	keys = keys[:1]
	run("denied", limited)
}

// switchedOn puts switches in force that are about the limits of a handler and
// change nothing, and a thousand overrides, one of them of the key sk_live_1.
func switchedOn(t testing.TB, h *Handler) {
	t.Helper()
	c := h.attached.store.control
	c.logger = zap.NewNop()
	note := control.Note{Reason: "test", Actor: "test"}
	changes := []control.Change{
		{Set: &control.Switch{Target: control.Target{Pool: "other"}, Mode: control.Off, Scope: control.Fleet, Note: note}},
		{Set: &control.Switch{Target: control.Target{Kind: "workers"}, Mode: control.EnforcePercent(99), Scope: control.Instance, Note: note}},
	}
	for i := range 1000 {
		id := h.app.hasher.identity(sourceAPIKey, fmt.Sprintf("sk_live_%d", i+1))
		changes = append(changes, control.Change{Override: &control.Override{
			Target: control.Target{Pool: h.Pool, Kind: "rate", Limit: "rate"}, Identity: id.String(),
			Requests: ample.Requests, Burst: ample.Burst, Note: note,
		}})
	}
	for _, change := range changes {
		change.TTL = time.Hour
		if err := c.keeper.Change(time.Now(), change); err != nil {
			t.Fatal(err)
		}
		next, n := c.keeper.Next(time.Now(), "test")
		if next != nil {
			c.keeper.Wrote(next, n)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refreshLocked("")
	if v := c.inForce().view; len(v.Switches) != 2 || len(v.Overrides) != 1000 {
		t.Fatalf("got %d switches and %d overrides in force, want 2 and 1000", len(v.Switches), len(v.Overrides))
	}
}

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// What a decision allocates is the garbage of every request.
func TestHandler_Allocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates, too")
	}
	next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })
	cases := []struct {
		what     string
		bucket   *RateLimit
		switches bool
		most     float64
	}{
		{"allowed", &ample, false, 4},
		{"allowed, with switches and an override", &ample, true, 4},
		{"denied from memory", &RateLimit{Requests: 1, Per: caddy.Duration(24 * time.Hour)}, false, 14},
	}
	for _, c := range cases {
		t.Run(c.what, func(t *testing.T) {
			h := runningHandler(t, c.bucket)
			if c.switches {
				switchedOn(t, h)
			}
			r := httptest.NewRequest(http.MethodGet, "/", nil)
			r.Header.Set("Authorization", "Bearer sk_live_1")
			w := httptest.NewRecorder()
			run := func(h caddyhttp.Handler) float64 {
				return testing.AllocsPerRun(1000, func() {
					clear(w.Header())
					_ = h.ServeHTTP(w, caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil))
				})
			}
			bare := run(next)
			got := run(caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error { return h.ServeHTTP(w, r, next) })) - bare
			t.Logf("%v allocations", got)
			if got > c.most {
				t.Errorf("%v allocations, want at most %v", got, c.most)
			}
			// With Server they are eight, and a ninth makes a larger map.
			if n := len(w.Header()); n > 7 {
				t.Errorf("%d fields in the header, want at most 7: %v", n, w.Header())
			}
		})
	}
}
