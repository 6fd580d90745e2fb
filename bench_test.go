// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
)

// BenchmarkHandler is what the module adds to a request: all four limiters on
// the memory store, 10,000 keys, allowed and denied from memory. The cost of
// making the request is in "bare".
func BenchmarkHandler(b *testing.B) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancel()
	reserve := 20
	app := &App{
		hasher: newHasher([]byte("s")), storeKey: "memory " + b.Name(), logger: zap.NewNop(),
		declared: map[string][]*declaredLimit{}, shedders: map[string]*shedders{},
	}
	h := &Handler{
		Pool: "benchmark", Key: []string{sourceAPIKey, sourceClientIP}, IPv6Prefix: 64, app: app,
		logger: zap.NewNop(), entered: "entered",
		Rate:        []*RateLimit{{Requests: 100_000, Burst: 1_000_000}},
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
	defer h.Cleanup()
	if err := (started{app}).Handle(ctx, caddy.Event{}); err != nil {
		b.Fatal(err)
	}

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
			for b.Loop() {
				i++
				clear(w.Header())
				r.Header.Set("Authorization", keys[i%len(keys)])
				if err := serve(w, caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	run("bare", next.ServeHTTP)
	run("allowed", func(w http.ResponseWriter, r *http.Request) error { return h.ServeHTTP(w, r, next) })
}
