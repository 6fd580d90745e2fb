// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// lines returns what was logged, each line as its level and the first words.
func lines(logs *observer.ObservedLogs) []string {
	var all []string
	for _, entry := range logs.TakeAll() {
		words := strings.Fields(entry.Message)
		all = append(all, entry.Level.String()+" "+strings.Join(words[:min(4, len(words))], " "))
	}
	return all
}

func TestLogs_Store(t *testing.T) {
	cases := []struct {
		name string
		app  *App
		want []string
	}{
		{"memory", &App{}, nil},
		{"no address", &App{Redis: &RedisConfig{Addresses: []string{""}}}, []string{"warn redis has no address,"}},
		{"no secret", &App{Redis: &RedisConfig{Addresses: []string{"localhost:1"}}}, []string{"warn redis is used without"}},
		{"all is well", &App{Redis: &RedisConfig{Addresses: []string{"localhost:1"}}, KeySecret: "s"}, nil},
	}
	for _, c := range cases {
		core, logs := observer.New(zap.DebugLevel)
		c.app.logger = zap.New(core)
		if err := c.app.provisionStore(c.app.KeySecret); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(c.want, lines(logs)); diff != "" {
			t.Errorf("%s: log, -want +got:\n%s", c.name, diff)
		}
	}
}

// A start says once for each pool what is in force.
func TestLogs_Started(t *testing.T) {
	h := (&Handler{
		Rate: []*RateLimit{
			{Requests: 100},
			{Name: "search", Requests: 20, Per: caddy.Duration(60e9), Cost: 2, Mode: &Mode{State: "dark"}},
		},
		Concurrency: []*ConcurrencyLimit{{Capacity: 20, Lease: caddy.Duration(30e9), Mode: &Mode{State: "enforce", Percent: new(25)}}},
	}).onStore(t, failingStore{})
	core, logs := observer.New(zap.InfoLevel)
	h.app.logger, h.app.storeKey = zap.New(core), "memory "+t.Name()
	h.app.shedders = map[string]*shedders{h.Pool: {}}
	if err := (started{h.app}).Handle(t.Context(), caddy.Event{}); err != nil {
		t.Fatal(err)
	}
	defer h.app.Cleanup()
	entries := logs.TakeAll()
	if len(entries) != 1 || entries[0].Message != "limits in force" {
		t.Fatalf("got %v, want one line", entries)
	}
	want := map[string]any{
		"pool": h.Pool,
		"limits": "rate: 100/s per key on this instance alone, bucket 500; " +
			"search: 20/m (cost 2) per key on this instance alone, bucket 20 (dark); " +
			"concurrency: 20 in progress (lease 30s) per key on this instance alone (enforced for 25% of the keys)",
	}
	if diff := cmp.Diff(want, entries[0].ContextMap()); diff != "" {
		t.Errorf("limits in force, -want +got:\n%s", diff)
	}
}

// What a shedder does is what the strongest handler of its pool lets it do.
func TestShedders_Strength(t *testing.T) {
	reserve := 20
	dark, quarter := &Mode{State: "dark"}, &Mode{State: "enforce", Percent: new(25)}
	cases := []struct {
		name     string
		handlers []*Mode
		workers  *Mode
		want     []string
		gauges   []float64 // fleet, workers
	}{
		{"no modes", []*Mode{nil}, nil, []string{"fleet: 10 in progress fleet-wide, 8 for non-critical", "workers: 64 on this instance"}, []float64{2, 2}},
		{"a dark handler", []*Mode{dark}, nil, []string{"fleet: 10 in progress fleet-wide, 8 for non-critical (dark)", "workers: 64 on this instance (dark)"}, []float64{1, 1}},
		{"dark, and one that inherits", []*Mode{dark, quarter}, dark, []string{"fleet: 10 in progress fleet-wide, 8 for non-critical (enforced for 25% of the keys)", "workers: 64 on this instance (dark)"}, []float64{1.25, 1}},
	}
	for _, c := range cases {
		a := &App{shedders: map[string]*shedders{}}
		for i, mode := range c.handlers {
			h := &Handler{Pool: testPool(t), Mode: mode}
			if i == 0 {
				h.Fleet = &FleetShedder{Capacity: 10, Reserve: &reserve}
				h.Workers = &WorkerShedder{Count: 64, Mode: c.workers}
			}
			if err := a.declareShedders(caddy.Context{}, h); err != nil {
				t.Fatal(err)
			}
		}
		config := a.shedders[testPool(t)]
		if diff := cmp.Diff(c.want, config.summary()); diff != "" {
			t.Errorf("%s: in force, -want +got:\n%s", c.name, diff)
		}
		got := []float64{config.strength(config.fleet.Mode), config.strength(config.workers.Mode)}
		if diff := cmp.Diff(c.gauges, got); diff != "" {
			t.Errorf("%s: limit_mode of fleet and workers, -want +got:\n%s", c.name, diff)
		}
	}
}

// A proxy that nobody trusts makes all its clients one, of which the log warns
// once.
func TestLogs_Forwarded(t *testing.T) {
	const forwarded = "X-Forwarded-For"
	rows := []struct {
		name    string
		headers []string
		want    []string
	}{
		{"no proxy", []string{"peer", "10.0.0.1:1"}, nil},
		{"from afar", []string{"peer", "203.0.113.1:1", forwarded, "192.0.2.1"}, nil},
		{"not counted by address", []string{"peer", "10.0.0.1:1", forwarded, "192.0.2.1", "X-Api-Key", "sk_1"}, nil},
		{"a proxy", []string{"peer", "10.0.0.1:1", forwarded, "192.0.2.1"}, []string{"warn a private peer sends"}},
		{"again", []string{"peer", "10.0.0.1:1", forwarded, "192.0.2.1"}, nil},
	}
	h := (&Handler{Rate: []*RateLimit{{Requests: 1, Key: []string{sourceAPIKey, sourceClientIP}}}}).onStore(t, failingStore{})
	core, logs := observer.New(zap.WarnLevel)
	h.logger = zap.New(core)
	h.warnForwarded.Store(true)
	for _, row := range rows {
		r, _ := newRequest(http.MethodGet, "/", row.headers...)
		if err := h.ServeHTTP(httptest.NewRecorder(), r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(row.want, lines(logs)); diff != "" {
			t.Errorf("%s: log, -want +got:\n%s", row.name, diff)
		}
	}
}

func TestEverySecond(t *testing.T) {
	const ms = time.Millisecond
	rows := []struct {
		at      time.Duration
		ok      bool
		skipped int64
	}{
		{0, true, 0},
		{0, false, 0},
		{999 * ms, false, 0},
		{1000 * ms, true, 2},
		{1500 * ms, false, 0},
		{9000 * ms, true, 1},
		{10000 * ms, true, 0},
	}
	var e everySecond
	start := time.Now()
	for _, row := range rows {
		if skipped, ok := e.allow(start.Add(row.at)); ok != row.ok || skipped != row.skipped {
			t.Errorf("after %v: got %d, %v, want %d, %v", row.at, skipped, ok, row.skipped, row.ok)
		}
	}
}
