// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// shardedStore is a memory of which a part fails to answer.
type shardedStore struct {
	limiters.Store
	down func(limiters.Identity) bool
}

func (s *shardedStore) Admit(ctx context.Context, asks []limiters.Ask) (limiters.Admission, error) {
	adm, failed := limiters.Admission{Allowed: true}, error(nil)
	var up []limiters.Ask
	for _, ask := range asks {
		if s.down(ask.Identity) {
			failed = errors.New("no answer")
		} else {
			up = append(up, ask)
		}
	}
	answered, _ := s.Store.Admit(ctx, up)
	rest := answered.Results
	for _, ask := range asks {
		few := make([]limiters.Result, len(ask.Checks))
		if !s.down(ask.Identity) {
			rest = rest[copy(few, rest):]
		}
		adm.Results = append(adm.Results, few...)
	}
	answered.Results = adm.Results
	return answered, failed
}

// newShardedStore returns a store of which nothing fails.
func newShardedStore(t *testing.T) *shardedStore {
	s := &shardedStore{limiters.NewMemory(0), func(limiters.Identity) bool { return false }}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func allShards(limiters.Identity) bool { return true }

// burst sends requests with a header until one is rejected, at most 100, and
// returns how many were not and what it says of the last.
func (h *Handler) burst(t *testing.T, during http.HandlerFunc, header ...string) (passed int, last string, status int) {
	t.Helper()
	for ; passed < 100; passed++ {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		for i := 0; i < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		repl := caddy.NewReplacer()
		r = caddyhttp.PrepareRequest(r, repl, w, nil)
		next := func(w http.ResponseWriter, r *http.Request) error { during(w, r); return nil }
		if err := h.ServeHTTP(w, r, caddyhttp.HandlerFunc(next)); err != nil {
			t.Fatal(err)
		}
		last, _ = repl.GetString("http.stripe_ratelimit.outcome")
		if status = w.Code; status != http.StatusOK {
			return passed, last, status
		}
	}
	return passed, last, status
}

func nothing(http.ResponseWriter, *http.Request) {}

// While the store fails each instance keeps to its share; the store itself, when
// it is back, and its denials know nothing of that.
func TestLocal(t *testing.T) {
	key := []string{"X-Api-Key", "sk_live_1"}
	s := newShardedStore(t)
	h := (&Handler{OnStoreError: "local", Rate: []*RateLimit{{Requests: 1, Per: caddy.Duration(3600e9), Burst: 10}}}).onStore(t, s)
	st := h.attached.store
	t.Cleanup(st.local.close)
	status := func() int { got, _ := h.serve(t); return got }

	if got := status(); got != http.StatusOK || st.local.memory != nil {
		t.Fatalf("the store works: got %d and the memory %v, want 200 and none", got, st.local.memory)
	}
	s.down = allShards
	st.control.instances.Store(3)
	if passed, said, code := h.burst(t, nothing, key...); passed != 4 || said != "denied" || code != http.StatusTooManyRequests {
		t.Errorf("one of three: %d pass, then %s, %d; want 4 and denied, 429", passed, said, code)
	}
	if passed, said, _ := h.burst(t, nothing, key...); passed != 0 || said != "denied" {
		t.Errorf("again: %d pass, then %s; want none", passed, said)
	}
	s.down = func(limiters.Identity) bool { return false }
	if passed, said, _ := h.burst(t, nothing, key...); passed != 9 || said != "denied" {
		t.Errorf("the store is back: %d pass, then %s; want the 9 that were left there", passed, said)
	}
	counted := series(t, newTestRegistry(t), "decisions_total", h.Pool)
	want := map[string]float64{"allowed": 10, "denied": 1, "local_allowed": 4, "local_denied": 2, "store_error": 0}
	for outcome, n := range want {
		if got := counted["kind=rate limit=rate mode=enforce outcome="+outcome]; got != n {
			t.Errorf("decisions_total of %s: got %v, want %v", outcome, got, n)
		}
	}
	counted = series(t, newTestRegistry(t), "requests_total", h.Pool)
	want = map[string]float64{"allowed": 10, "denied": 3, "store_error": 4}
	for outcome, n := range want {
		if got := counted["criticality=get outcome="+outcome]; got != n {
			t.Errorf("requests_total of %s: got %v, want %v", outcome, got, n)
		}
	}
}

// A second outage begins where the first has ended, and who never heard of others
// believes to be alone.
func TestLocal_Shares(t *testing.T) {
	rows := []struct {
		instances int64
		key       string
		want      int
	}{
		{0, "a", 10}, {0, "a", 0}, {3, "b", 4}, {3, "b", 0}, {100, "c", 1}, {3, "b", 0}, {1, "d", 10},
	}
	s := newShardedStore(t)
	h := (&Handler{OnStoreError: "local", Rate: []*RateLimit{
		{Requests: 1, Per: caddy.Duration(3600e9), Burst: 10},
		{Name: "candidate", Requests: 1, Per: caddy.Duration(3600e9), Burst: 1, Mode: &Mode{State: "dark"}},
	}}).onStore(t, s)
	t.Cleanup(h.attached.store.local.close)
	for i, row := range rows {
		s.down = allShards
		h.attached.store.control.instances.Store(row.instances)
		if got, said, _ := h.burst(t, nothing, "X-Api-Key", row.key); got != row.want || said != "denied" {
			t.Errorf("row %d: one of %d: %d requests of %s pass, then %s; want %d", i, row.instances, got, row.key, said, row.want)
		}
		s.down = func(limiters.Identity) bool { return false }
		if status, said := h.serve(t); i == 0 && (status != http.StatusOK || said != "allowed") {
			t.Errorf("in between: got %d, %s", status, said)
		}
	}
}

// Slots are held while requests run, and given back.
func TestLocal_Concurrency(t *testing.T) {
	s := newShardedStore(t)
	s.down = allShards
	h := (&Handler{OnStoreError: "local", Concurrency: []*ConcurrencyLimit{{Capacity: 5}}}).onStore(t, s)
	t.Cleanup(h.attached.store.local.close)
	h.attached.store.control.instances.Store(3)
	key := []string{"X-Api-Key", "a"}
	depth := 0
	var inside http.HandlerFunc
	inside = func(http.ResponseWriter, *http.Request) {
		if depth++; depth < 10 {
			w := httptest.NewRecorder()
			r := httptest.NewRequest(http.MethodGet, "/", nil)
			r.Header.Set(key[0], key[1])
			r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil)
			next := func(w http.ResponseWriter, r *http.Request) error { inside(w, r); return nil }
			if err := h.ServeHTTP(w, r, caddyhttp.HandlerFunc(next)); err != nil {
				t.Error(err)
			}
		}
	}
	for range 2 {
		depth = 0
		inside(nil, nil)
		if depth != 3 { // the call above, and two requests
			t.Errorf("got %d requests in progress at once, want 2", depth-1)
		}
	}
	if passed, _, _ := h.burst(t, nothing, key...); passed != 100 {
		t.Errorf("one after the other: %d pass, want all", passed)
	}
}

// Where one identity's shard fails, the other's answer stands.
func TestLocal_OneShard(t *testing.T) {
	s := newShardedStore(t)
	h := (&Handler{OnStoreError: "local",
		Rate: []*RateLimit{
			{Requests: 1, Per: caddy.Duration(3600e9), Burst: 6},
			{Name: "tenant", Requests: 1, Per: caddy.Duration(3600e9), Burst: 9, Key: []string{"{http.request.header.Tenant}"}},
		},
		Concurrency: []*ConcurrencyLimit{{Capacity: 1}},
	}).onStore(t, s)
	t.Cleanup(h.attached.store.local.close)
	h.attached.store.control.instances.Store(3)
	hash := func(header, value string) limiters.Identity {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set(header, value)
		r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), httptest.NewRecorder(), nil)
		repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
		for _, g := range h.groups {
			if id, _ := g.sources.identify(r, repl, apiKey(r), h.app.hasher, 64); !id.IsZero() {
				return id
			}
		}
		t.Fatal("no identity")
		return limiters.Identity{}
	}
	fails := func(id limiters.Identity) { s.down = func(other limiters.Identity) bool { return other == id } }

	fails(hash("Tenant", "t1")) // its share is 3
	if passed, said, _ := h.burst(t, nothing, "X-Api-Key", "k1", "Tenant", "t1"); passed != 3 || said != "denied" {
		t.Errorf("the tenant's shard fails: %d pass, then %s; want 3", passed, said)
	}
	// The fourth took a token of the key, as one that another tenant's limit denies
	// does, but no slot.
	if passed, said, _ := h.burst(t, nothing, "X-Api-Key", "k1", "Tenant", "t2"); passed != 2 || said != "denied" {
		t.Errorf("the key's bucket is exact: %d pass, then %s; want the 2 that are left", passed, said)
	}
	fails(hash("X-Api-Key", "k2")) // its share is 2
	if passed, said, _ := h.burst(t, nothing, "X-Api-Key", "k2", "Tenant", "t3"); passed != 2 || said != "denied" {
		t.Errorf("the key's shard fails: %d pass, then %s; want 2", passed, said)
	}
	if passed, said, _ := h.burst(t, nothing, "X-Api-Key", "k3", "Tenant", "t3"); passed != 6 || said != "denied" {
		t.Errorf("the tenant's bucket is exact: %d pass, then %s; want 6", passed, said)
	}
}

// What only counts goes on to only count, and a store that is healthy makes no
// memory; a bug passes.
func TestLocal_NeverMore(t *testing.T) {
	dark := (&Handler{OnStoreError: "local", Rate: []*RateLimit{{Requests: 1, Mode: &Mode{State: "dark"}}}}).onStore(t, failingStore{})
	t.Cleanup(dark.attached.store.local.close)
	if passed, said, _ := dark.burst(t, nothing, "X-Api-Key", "a"); passed != 100 || said != "store_error" {
		t.Errorf("dark: %d pass, the last as %s; want all, as store_error", passed, said)
	}
	counted := series(t, newTestRegistry(t), "decisions_total", dark.Pool)
	if got := counted["kind=rate limit=rate mode=dark outcome=local_denied"]; got < 50 {
		t.Errorf("dark: %v denied, want about 95: %v", got, counted)
	}
	broken := (&Handler{OnStoreError: "local", Rate: []*RateLimit{{Requests: 1}}}).onStore(t, brokenStore{})
	if status, said := broken.serve(t); status != http.StatusOK || said != "panic" || broken.attached.store.local.memory != nil {
		t.Errorf("a bug of the store: got %d, %s", status, said)
	}
}

// The fleet keeps to a share where a handler that has it says so.
func TestLocal_Fleet(t *testing.T) {
	reserve := 20
	cases := []struct {
		name     string
		handlers []string // what each says; the first has the fleet
		want     bool
	}{
		{"open", []string{"open"}, false},
		{"local", []string{"local"}, true},
		{"closed", []string{"closed"}, false},
		{"only another one is local", []string{"open", "local"}, false},
		{"another one is open", []string{"local", "open"}, true},
	}
	for _, c := range cases {
		a := &App{shedders: map[string]*shedders{}}
		for i, word := range c.handlers {
			h := &Handler{Pool: strings.ToLower(t.Name()), OnStoreError: word}
			if i == 0 {
				h.Fleet = &FleetShedder{Capacity: 10, Reserve: &reserve}
			}
			if err := a.declareShedders(caddy.Context{}, h); err != nil {
				t.Fatal(err)
			}
		}
		if got := a.shedders[strings.ToLower(t.Name())].local; got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}
