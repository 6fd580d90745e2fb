// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/google/go-cmp/cmp"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// failingStore is a store that answers nobody.
type failingStore struct{ limiters.Store }

func (failingStore) Admit(_ context.Context, asks []limiters.Ask) (limiters.Admission, error) {
	results := 0
	for _, ask := range asks {
		results += len(ask.Checks)
	}
	return limiters.Admission{Allowed: true, Results: make([]limiters.Result, results)}, errors.New("no answer")
}
func (failingStore) Release(limiters.Admission) {}

// brokenStore is a store with a bug.
type brokenStore struct{ failingStore }

func (brokenStore) Admit(context.Context, []limiters.Ask) (limiters.Admission, error) {
	panic("bug")
}

// onStore returns the handler on a store that is not of this world, ready to
// serve.
func newTestStore(s limiters.Store) *store {
	denials := limiters.NewDenials()
	return &store{Store: s, denials: denials, control: newController(nil, denials, "", "", nil), events: newEvents(), timeout: time.Hour}
}

func (h *Handler) onStore(t *testing.T, s limiters.Store) *Handler {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	h.Pool, h.Key, h.IPv6Prefix = testPool(t), []string{sourceAPIKey}, 64
	h.app = &App{hasher: newHasher([]byte("s")), declared: map[string][]*declaredLimit{}}
	h.logger = ctx.Logger()
	if err := h.provisionLimits(ctx); err != nil {
		t.Fatal(err)
	}
	p, err := newPool(h.Pool)
	if err != nil {
		t.Fatal(err)
	}
	h.attached = &attachment{shared: &shared{
		pool:  p.(*pool),
		store: newTestStore(s),
	}}
	h.attached.refs.Store(1)
	for _, l := range h.limits {
		h.attached.limits = append(h.attached.limits, h.attached.pool.limit(l.numbers.limit))
	}
	return h
}

// serve sends a GET through the handler and returns the status and what the
// placeholder outcome says then.
func (h *Handler) serve(t *testing.T) (status int, said string) {
	t.Helper()
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.Header.Set("X-Api-Key", "sk_live_1")
	repl := caddy.NewReplacer()
	r = caddyhttp.PrepareRequest(r, repl, w, nil)
	err := h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil }))
	if err != nil {
		t.Fatal(err)
	}
	said, _ = repl.GetString("http.stripe_ratelimit.outcome")
	return w.Code, said
}

func TestStoreFails(t *testing.T) {
	rate := func(name, mode string) *RateLimit {
		return &RateLimit{Name: name, Requests: 1, Mode: &Mode{State: mode}}
	}
	cases := []struct {
		name, onStoreError string
		limits             []*RateLimit
		want               int
		said               string
	}{
		{"open", "open", []*RateLimit{rate("a", "enforce")}, 200, "store_error"},
		{"closed", "closed", []*RateLimit{rate("a", "enforce")}, 503, "store_error"},
		{"closed, critical", "closed", []*RateLimit{rate("a", "enforce")}, 200, "store_error"},
		{"dark never rejects", "closed", []*RateLimit{rate("a", "dark")}, 200, "store_error"},
		{"a dark one beside an enforced one", "closed", []*RateLimit{rate("a", "dark"), rate("b", "enforce")}, 503, "store_error"},
		{"nobody is asked", "closed", []*RateLimit{rate("a", "off")}, 200, "allowed"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			h := (&Handler{OnStoreError: c.onStoreError, Rate: c.limits}).onStore(t, failingStore{})
			if strings.HasSuffix(c.name, "critical") {
				h.ranking.critical = caddyhttp.MatcherSets{{caddyhttp.MatchMethod{http.MethodGet}}}
			}
			if got, said := h.serve(t); got != c.want || said != c.said {
				t.Errorf("got %d and %s, want %d and %s", got, said, c.want, c.said)
			}
		})
	}
}

// A bug of ours lets the request pass, and everybody hears of it.
func TestBugPasses(t *testing.T) {
	h := (&Handler{Rate: []*RateLimit{{Requests: 1}}}).onStore(t, brokenStore{})
	if status, said := h.serve(t); status != 200 || said != "panic" {
		t.Errorf("got status %d and outcome %q, want 200 and panic", status, said)
	}
	counted := series(t, newTestRegistry(t), "requests_total", h.Pool)
	for labels, n := range counted {
		if n > 0 && (n != 1 || labels != "criticality=get outcome=panic") {
			t.Errorf("requests_total{%s}: got %v, want one GET with outcome panic; all: %v", labels, n, counted)
		}
	}
}

func TestMode_Dark(t *testing.T) {
	in, out := limiters.Identity{15: 24}, limiters.Identity{15: 25}
	var none limiters.Identity
	cases := []struct {
		name          string
		mode          *Mode
		in, out, none bool
	}{
		{"no mode", nil, false, false, false},
		{"enforce", &Mode{State: "enforce"}, false, false, false},
		{"enforce 100 is enforce", &Mode{State: "enforce", Percent: new(100)}, false, false, false},
		{"enforce 25", &Mode{State: "enforce", Percent: new(25)}, false, true, true},
		{"enforce 0 is dark", &Mode{State: "enforce", Percent: new(0)}, true, true, true},
		{"dark", &Mode{State: "dark"}, true, true, true},
	}
	for _, c := range cases {
		got := [3]bool{isDark(c.mode.level(), in), isDark(c.mode.level(), out), isDark(c.mode.level(), none)}
		if want := [3]bool{c.in, c.out, c.none}; got != want {
			t.Errorf("%s: dark for an identity in the share, out of it, and without: got %v, want %v", c.name, got, want)
		}
	}
}

// A client that goes away while its request waits for a slot is no error of the
// store.
func TestClientGoesWhileTheFleetIsAsked(t *testing.T) {
	answer := make(chan struct{})
	f := shedding.NewFleet(func(context.Context, shedding.SyncRequest) (shedding.SyncReply, error) {
		<-answer
		return shedding.SyncReply{}, errors.New("too late")
	}, slog.New(slog.DiscardHandler))
	defer f.Close()
	defer close(answer)
	f.Set(shedding.FleetSettings{Capacity: 1})

	h := &Handler{Pool: testPool(t)}
	a := &attachment{shared: &shared{store: newTestStore(nil), fleet: &fleet{f}}}
	a.refs.Store(1)
	modes := &shedderModes{fleet: &shedderMode{mode: control.Enforce, metrics: newShedderMetrics(h.Pool, "fleet")}, of: a.shared}
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	ctx, cancel := context.WithCancel(r.Context())
	cancel()
	shed, cancel := h.shed(a, modes, &ctx, r, &verdict{criticality: shedding.Get}, new(taken))
	defer cancel()
	if shed {
		t.Error("shed, though nobody has said that no slot is free")
	}
	for labels, n := range series(t, newTestRegistry(t), "decisions_total", h.Pool) {
		if n != 0 {
			t.Errorf("decisions_total{%s}: got %v, want 0", labels, n)
		}
	}
}

// askedStore allows everything and notes what it was asked.
type askedStore struct {
	failingStore
	asks *[][]string // of each identity the limits
}

func (s askedStore) Admit(_ context.Context, asks []limiters.Ask) (limiters.Admission, error) {
	adm := limiters.Admission{Allowed: true}
	for _, ask := range asks {
		var names []string
		for _, check := range ask.Checks {
			names = append(names, check.Limit.Name)
			adm.Results = append(adm.Results, limiters.Result{Outcome: limiters.Allowed})
		}
		*s.asks = append(*s.asks, names)
	}
	return adm, nil
}

// Limits of one identity are one question, whichever keys gave it.
func TestAsks(t *testing.T) {
	h := func() *Handler {
		return &Handler{
			Rate: []*RateLimit{
				{Name: "all", Requests: 1, Key: []string{sourceAPIKey, sourceClientIP}},
				{Name: "address", Requests: 1, Key: []string{sourceClientIP}},
				{Name: "not_in_force", Requests: 1, Mode: &Mode{State: "off"}},
			},
			Concurrency: []*ConcurrencyLimit{{Name: "held", Capacity: 1, Key: []string{sourceAPIKey, sourceClientIP}}},
		}
	}
	cases := []struct {
		name    string
		method  string
		headers []string
		want    [][]string
	}{
		{"a key and an address", "GET", []string{"X-Api-Key", "sk_1"}, [][]string{{"all", "held"}, {"address"}}},
		{"an address alone", "GET", nil, [][]string{{"all", "address", "held"}}},
		{"a preflight", "OPTIONS", []string{"Origin", "https://a", "Access-Control-Request-Method", "PUT"}, nil},
		{"OPTIONS that is none", "OPTIONS", nil, [][]string{{"all", "address", "held"}}},
		{"nobody", "GET", []string{"peer", "@"}, nil},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var got [][]string
			h := h().onStore(t, askedStore{asks: &got})
			r, _ := newRequest(c.method, "/", c.headers...)
			if err := h.ServeHTTP(httptest.NewRecorder(), r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })); err != nil {
				t.Fatal(err)
			}
			// The order of identities is that of their hashes.
			slices.SortFunc(got, func(a, b []string) int { return len(b) - len(a) })
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("asked, -want +got:\n%s", diff)
			}
		})
	}
}
