// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// brokenMatcher is a matcher with a bug.
type brokenMatcher struct{}

func (brokenMatcher) MatchWithError(*http.Request) (bool, error) { panic("bug") }

// brokenRelease is a store that takes and has a bug in giving back.
type brokenRelease struct{ limiters.Store }

func (brokenRelease) Release(limiters.Admission) { panic("bug") }

// bugOfStore is a store that has caught a bug by itself.
type bugOfStore struct{ failingStore }

func (s bugOfStore) Admit(ctx context.Context, asks []limiters.Ask) (limiters.Admission, error) {
	adm, _ := s.failingStore.Admit(ctx, asks)
	return adm, fmt.Errorf("admit: %w", safely.Do("script", func() { panic("bug") }))
}

// brokenWriter has a bug in one of its methods.
type brokenWriter struct {
	*httptest.ResponseRecorder
	header, body any // what it throws
}

func (w *brokenWriter) WriteHeader(status int) {
	w.ResponseRecorder.WriteHeader(status)
	if w.header != nil {
		panic(w.header)
	}
}

func (w *brokenWriter) Write(b []byte) (int, error) {
	if w.body != nil {
		panic(w.body)
	}
	return w.ResponseRecorder.Write(b)
}

// everything is a handler with all limits and shedders, on a memory store.
type everything struct {
	*Handler
	logs  *observer.ObservedLogs
	fleet *shedding.Fleet
	store *limiters.Memory
	id    limiters.Identity
}

func newEverything(t *testing.T) *everything {
	t.Helper()
	memory := limiters.NewMemory(0)
	t.Cleanup(func() { _ = memory.Close() })
	h := (&Handler{
		Rate:        []*RateLimit{{Requests: 1, Per: caddy.Duration(1e12), Burst: 5}},
		Concurrency: []*ConcurrencyLimit{{Capacity: 1}},
	}).onStore(t, memory)
	core, logs := observer.New(zap.ErrorLevel)
	h.logger = zap.New(core)
	f := shedding.NewFleet(nil, nil)
	t.Cleanup(f.Close)
	f.Set(shedding.FleetSettings{Capacity: 2})
	s := h.attached.shared
	s.fleet = &fleet{f}
	s.pool.workers.Set(shedding.WorkersSettings{Count: 1, Ramp: shedding.DefaultRamp()})
	t.Cleanup(s.pool.workers.Close)
	s.pool.shedders.Store(&shedderModes{
		workers: &shedderMode{mode: control.Enforce, metrics: newShedderMetrics(h.Pool, "workers")},
		fleet:   &shedderMode{mode: control.Enforce, metrics: newShedderMetrics(h.Pool, "fleet")},
		of:      s,
	})
	return &everything{h, logs, f, memory, h.app.hasher.identity(sourceAPIKey, "sk_live_1")}
}

// request sends a GET and returns the status, whether it reached the next
// handler, what the placeholder outcome says there, and what was thrown.
func (e *everything) request(t *testing.T, w http.ResponseWriter, next func()) (passed bool, outcome string, thrown any) {
	t.Helper()
	r, repl := newRequest(http.MethodGet, "/", "X-Api-Key", "sk_live_1")
	defer func() { thrown = recover() }()
	err := e.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
		passed = true
		outcome, _ = repl.GetString("http.stripe_ratelimit.outcome")
		if next != nil {
			next()
		}
		return nil
	}))
	if err != nil {
		t.Errorf("got error %v", err)
	}
	return passed, outcome, nil
}

// nothingTaken fails the test unless all that requests took is free again.
func (e *everything) nothingTaken(t *testing.T) {
	t.Helper()
	p := e.attached.pool
	if c, n := p.critical.Load(), p.nonCritical.Load(); c != 0 || n != 0 {
		t.Errorf("in progress: %d critical, %d others, want none", c, n)
	}
	if p.workers != nil {
		if n := p.workers.Status().InFlight; n != 0 {
			t.Errorf("%d workers are busy, want none", n)
		}
	}
	if s := e.fleet.Status(); s.InFlight != 0 || s.Critical != 0 {
		t.Errorf("slots of the fleet in use: %d and %d critical, want none", s.InFlight, s.Critical)
	}
	if n := e.attached.refs.Load(); n != 1 {
		t.Errorf("%d references to the pool, want that of the config", n)
	}
	limit := e.limits[1].numbers.limit
	adm, err := e.store.Admit(t.Context(), []limiters.Ask{{Identity: e.id, Checks: []limiters.Check{{Limit: limit}}}})
	if err != nil || !adm.Allowed {
		t.Errorf("the slot of the user is taken: %+v, %v", adm, err)
	}
	e.store.Release(adm)
}

// outcomes returns how many requests are counted, by outcome.
func (e *everything) outcomes(t *testing.T) map[string]float64 {
	t.Helper()
	by := map[string]float64{}
	for labels, n := range series(t, newTestRegistry(t), "requests_total", e.Pool) {
		if _, outcome, _ := strings.Cut(labels, "outcome="); n > 0 {
			by[outcome] += n
		}
	}
	return by
}

// caught counts the bugs that were caught outside of requests.
func caught(t *testing.T, where string) float64 {
	t.Helper()
	return series(t, newTestRegistry(t), "panics_total", "")["where="+where]
}

// A bug in any step lets the request pass. It is counted and logged, and nothing
// stays taken.
func TestBugs(t *testing.T) {
	cases := []struct {
		name   string
		inject func(t *testing.T, e *everything)
		where  string // it is counted in panics_total, and the outcome is another
		quiet  bool   // the log of the handler has no line about it
	}{
		{name: "exempt", inject: func(_ *testing.T, e *everything) { e.exempt = broken() }},
		{name: "criticality", inject: func(_ *testing.T, e *everything) { e.ranking.critical = broken() }},
		{name: "limit matcher", inject: func(_ *testing.T, e *everything) { e.limits[0].match = broken() }},
		{name: "hasher", inject: func(_ *testing.T, e *everything) { e.app.hasher = nil }},
		{name: "denial cache", inject: func(_ *testing.T, e *everything) { e.attached.store.denials = nil }},
		{name: "worker shedder", inject: func(t *testing.T, e *everything) {
			workers := e.attached.pool.workers
			e.attached.pool.workers = nil
			t.Cleanup(func() { e.attached.pool.workers = workers })
		}},
		{name: "fleet shedder", inject: func(t *testing.T, e *everything) { e.attached.fleet = &fleet{} }},
		{name: "admit", inject: func(_ *testing.T, e *everything) { e.attached.store.Store = brokenStore{} }},
		{name: "admit of a closed one", inject: func(_ *testing.T, e *everything) {
			e.OnStoreError = "closed"
			e.attached.store.Store = brokenStore{}
		}},
		{name: "admit that caught it", inject: func(_ *testing.T, e *everything) {
			e.OnStoreError = "closed"
			e.attached.store.Store = bugOfStore{}
		}, quiet: true},
		{name: "annotate", inject: func(_ *testing.T, e *everything) {
			for i := range e.limits { // the fields cannot be rendered
				e.limits[i].numbers = &limitNumbers{limit: e.limits[i].numbers.limit}
			}
		}},
		{name: "the log, too", inject: func(_ *testing.T, e *everything) {
			e.attached.store.Store = brokenStore{}
			e.logger = zap.New(brokenCore{})
		}, quiet: true},
		{name: "metrics", inject: func(_ *testing.T, e *everything) { e.attached.pool.metrics = nil }},
		{name: "release", where: "release", inject: func(_ *testing.T, e *everything) {
			e.attached.store.Store = brokenRelease{failingStore{}}
		}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			e := newEverything(t)
			metrics := e.attached.pool.metrics
			c.inject(t, e)
			before := caught(t, c.where)
			w := httptest.NewRecorder()
			passed, outcome, thrown := e.request(t, w, nil)
			if !passed || thrown != nil || w.Code != 200 {
				t.Fatalf("passed: %v, status %d, thrown: %v; want the request to pass", passed, w.Code, thrown)
			}
			e.attached.pool.metrics = metrics
			if c.where != "" {
				if n := caught(t, c.where) - before; n < 1 {
					t.Errorf("panics_total{where=%q} rose by %v, want 1", c.where, n)
				}
			} else {
				if outcome != "panic" {
					t.Errorf("placeholder outcome: got %q, want panic", outcome)
				}
				if got := e.outcomes(t); c.name != "metrics" && (len(got) != 1 || got["panic"] != 1) {
					t.Errorf("requests by outcome: got %v, want one with panic", got)
				}
				if !c.quiet {
					e.oneLine(t)
				}
			}
			e.nothingTaken(t)
		})
	}
}

// broken are matchers with a bug.
func broken() caddyhttp.MatcherSets { return caddyhttp.MatcherSets{{brokenMatcher{}}} }

// brokenCore is a log with a bug.
type brokenCore struct{ zapcore.Core }

func (brokenCore) Enabled(zapcore.Level) bool { return true }
func (c brokenCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	return ce.AddCore(e, c)
}
func (brokenCore) Write(zapcore.Entry, []zapcore.Field) error { panic("bug") }
func (brokenCore) Sync() error                                { return nil }

// oneLine fails the test unless one line tells of a bug, with its stack.
func (e *everything) oneLine(t *testing.T) {
	t.Helper()
	entries := e.logs.TakeAll()
	if len(entries) != 1 {
		t.Fatalf("%d lines, want 1: %v", len(entries), entries)
	}
	fields := entries[0].ContextMap()
	stack, _ := fields["stack"].(string)
	if !strings.HasPrefix(entries[0].Message, "bug in stripe_ratelimit") || fields["panic"] == "" || !strings.Contains(stack, "caddy-stripe-ratelimit.(*Handler).ServeHTTP") {
		t.Errorf("got %q %v, want a bug with its stack", entries[0].Message, fields)
	}
}

// A bug with every request is logged once a second, and does no harm that lasts.
func TestBugs_OfEveryRequest(t *testing.T) {
	e := newEverything(t)
	e.attached.store.Store = brokenStore{}
	for range 100 {
		if passed, _, _ := e.request(t, httptest.NewRecorder(), nil); !passed {
			t.Fatal("a request did not pass")
		}
	}
	if n := e.logs.Len(); n > 10 {
		t.Errorf("%d lines for 100 bugs, want 1 a second", n)
	}
	e.nothingTaken(t)
	e.attached.store.Store = e.store
	if _, outcome, _ := e.request(t, httptest.NewRecorder(), nil); outcome != "allowed" {
		t.Errorf("after the bug: outcome %q, want allowed", outcome)
	}
}

// A bug in the answer of a request that is denied: if nothing has been written
// the request passes, else the answer breaks off.
func TestBugs_InAnswer(t *testing.T) {
	cases := []struct {
		name    string
		words   bool // are lacking
		writer  brokenWriter
		passes  bool
		outcome string
		quiet   bool
	}{
		{name: "before", words: true, passes: true, outcome: "panic"},
		{name: "with the header", writer: brokenWriter{header: "bug"}, outcome: "panic"},
		{name: "with the body", writer: brokenWriter{body: "bug"}, outcome: "panic"},
		{name: "the client has gone", writer: brokenWriter{body: http.ErrAbortHandler}, outcome: "denied", quiet: true},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			e := newEverything(t)
			e.Rate[0].Burst = 1
			if passed, _, _ := e.request(t, httptest.NewRecorder(), func() { // holds the only slot
				if c.words {
					for i := range e.limits {
						e.limits[i].numbers = &limitNumbers{limit: e.limits[i].numbers.limit}
					}
				}
				w := c.writer
				w.ResponseRecorder = httptest.NewRecorder()
				e.logs.TakeAll()
				passed, outcome, thrown := e.request(t, &w, nil)
				if passed != c.passes || (thrown == http.ErrAbortHandler) == c.passes {
					t.Errorf("passed: %v, thrown: %v; want passed: %v, or else http.ErrAbortHandler", passed, thrown, c.passes)
				}
				if c.passes && outcome != c.outcome {
					t.Errorf("outcome: got %q, want %q", outcome, c.outcome)
				}
				if c.passes && len(w.Header()) > 1 { // Request-Id
					t.Errorf("of the answer there is left: %v", w.Header())
				}
				if got := e.outcomes(t); got["allowed"] != 1 || got[c.outcome] != 1 || len(got) != 2 {
					t.Errorf("requests by outcome: got %v, want one allowed and one %s", got, c.outcome)
				}
				if !c.quiet {
					e.oneLine(t)
				}
			}); !passed {
				t.Fatal("the first request did not pass")
			}
			e.nothingTaken(t)
		})
	}
}

// Panics of later handlers are theirs: they pass, after all has been given back.
func TestPanicsOfLaterHandlersPass(t *testing.T) {
	for _, thrown := range []any{http.ErrAbortHandler, "theirs", errors.New("theirs")} {
		e := newEverything(t)
		if _, _, got := e.request(t, httptest.NewRecorder(), func() { panic(thrown) }); got != thrown {
			t.Errorf("got %v, want %v", got, thrown)
		}
		e.nothingTaken(t)
		if got := e.outcomes(t); got["panic"] != 0 {
			t.Errorf("requests by outcome: got %v, want no panic", got)
		}
		if n := e.logs.Len(); n != 0 {
			t.Errorf("%d lines, want none", n)
		}
	}
}

// A scrape survives a bug in what it reads.
func TestBugs_InGauges(t *testing.T) {
	before := caught(t, "metrics")
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(&gaugeCollector{func() gaugeSnapshot { panic("bug") }})
	if got, err := reg.Gather(); err != nil || len(got) != 0 {
		t.Errorf("got %v, %v, want nothing", got, err)
	}
	if n := caught(t, "metrics") - before; n != 1 {
		t.Errorf("panics_total{where=metrics} rose by %v, want 1", n)
	}
}

// What is caught outside of requests is counted and logged, at most once a second.
func TestReportBug(t *testing.T) {
	before := caught(t, "upkeep")
	for range 3 {
		_ = safely.Do("upkeep", func() { panic("bug") })
	}
	if n := caught(t, "upkeep") - before; n != 3 {
		t.Errorf("panics_total{where=upkeep} rose by %v, want 3", n)
	}
}
