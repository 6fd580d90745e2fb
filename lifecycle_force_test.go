// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"encoding/json"
	"errors"
	"maps"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// failingLast makes a config fail when all its apps have started, and said so.
func failingLast(t *testing.T, config []byte) []byte {
	t.Helper()
	var c map[string]any
	if err := json.Unmarshal(config, &c); err != nil {
		t.Fatal(err)
	}
	c["admin"] = map[string]any{"disabled": true, "config": map[string]any{"load": map[string]any{"module": "no_such_module"}}}
	out, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// A config that fails after it has started leaves the one before it as it was,
// with its shedders.
func TestConfigThatFailsLastLeavesTheShedders(t *testing.T) {
	onBothStores(t, func(t *testing.T, s *server, global string) {
		shedding := func(pool string) string {
			return "\tstripe_ratelimit " + pool + " {\n\t\tcritical /charges\n\t\tfleet 10 reserve 100%\n\t}"
		}
		s.load(global, shedding("default"))
		eventually(t, func() bool { return s.get("sk_a") == 503 })
		for _, site := range []string{
			"\tstripe_ratelimit {\n\t\tcritical /charges\n\t\tfleet 10 reserve 0%\n\t}",
			"\tstripe_ratelimit {\n\t\trate 1/h burst 100\n\t}",
			shedding("other_pool"),
			"",
		} {
			if err := caddy.Load(failingLast(t, s.config(global, site)), true); err == nil {
				t.Fatalf("%s: the config was accepted", site)
			}
			eventually(t, func() bool { return s.get("sk_a") == 503 })
			s.want("sk_a", 503, 503)
		}
		// The next one is as if nothing had happened.
		s.load(global, "\tstripe_ratelimit {\n\t\trate 1/h burst 3\n\t}")
		s.want("sk_b", 200, 200, 200, 429)
	})
}

// A limit or a pool that a config has not is in force no more, even where long
// requests keep what it knows, and when it comes back it has nothing from before.
func TestReloadForgetsNumbers(t *testing.T) {
	s := newServer(t)
	s.load("", "\tstripe_ratelimit {\n\t\trate a 1/h burst 5\n\t\tworkers 3\n\t\tcritical /c\n\t}")
	release := s.held(t.Name(), "sk_a")
	value, _, err := pools.LoadOrNew("default", func() (caddy.Destructor, error) { return nil, errors.New("there is no pool") })
	if err != nil {
		t.Fatal(err)
	}
	defer pools.Delete("default")
	p := value.(*pool)
	a, b := limitKey{limiters.Rate, "a"}, limitKey{limiters.Rate, "b"}
	rows := []struct {
		site    string
		current map[limitKey]int64
		workers bool
	}{
		{"\tstripe_ratelimit {\n\t\trate b 1/h burst 6\n\t}", map[limitKey]int64{b: 6}, false},
		{"\tstripe_ratelimit {\n\t\trate a 1/h burst 7\n\t\tworkers 3\n\t\tcritical /c\n\t}", map[limitKey]int64{a: 7}, true},
		{"\tstripe_ratelimit other {\n\t\trate a 1/h burst 8\n\t}", map[limitKey]int64{}, false},
		{"\tstripe_ratelimit {\n\t\trate b 1/h burst 9\n\t}", map[limitKey]int64{b: 9}, false},
		{"", map[limitKey]int64{}, false},
	}
	for _, row := range rows {
		s.load("", row.site)
		current := map[limitKey]int64{}
		for key, pl := range p.limits {
			if numbers := pl.current.Load(); numbers != nil {
				current[key] = numbers.limit.Capacity
			}
		}
		if !maps.Equal(current, row.current) {
			t.Errorf("%s\nhas left the capacities %v in force, want %v", row.site, current, row.current)
		}
		if got := p.shedders.Load().workers != nil; got != row.workers {
			t.Errorf("%s\nhas workers: got %v, want %v", row.site, got, row.workers)
		}
		if got := len(p.shown); got != len(row.current) {
			t.Errorf("%s\nshows %d limits, want %d", row.site, got, len(row.current))
		}
	}
	if got := release(); got != 200 {
		t.Errorf("request that outlived %d configs: got %d, want 200", len(rows), got)
	}
}
