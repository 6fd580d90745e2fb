// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// operating returns the operator of the running config until the test ends.
func operating(t *testing.T) *operator {
	t.Helper()
	o, err := operate()
	if err != nil {
		t.Fatalf("operate: %v", err)
	}
	t.Cleanup(o.leave)
	return o
}

// withStorage is global options with a storage of the test's own.
func withStorage(t *testing.T, global string) string {
	return fmt.Sprintf("%s\n\tstorage file_system %s", global, t.TempDir())
}

// put makes a change that must succeed.
func put(t *testing.T, done applied, err error) {
	t.Helper()
	if err != nil || done.Pending != nil {
		t.Fatalf("got %v, pending %v; want a change that all know", err, done.Pending)
	}
}

func target(text string) control.Target {
	parts := append(strings.Split(text, "/"), "", "")
	if parts[0] == "*" {
		parts[0] = ""
	}
	return control.Target{Pool: parts[0], Kind: parts[1], Limit: parts[2]}
}

func weaken(t *testing.T, o *operator, where string, mode control.Mode, scope control.Scope) {
	t.Helper()
	done, err := o.setSwitch(t.Context(), control.Switch{Target: target(where), Mode: mode, Scope: scope}, time.Hour)
	put(t, done, err)
}

// A switch is in force at once, whatever was remembered, and so is its end.
func TestSwitch(t *testing.T) {
	onBothStores(t, func(t *testing.T, s *server, global string) {
		global = withStorage(t, global)
		s.load(global, "stripe_ratelimit {\n rate 1/h burst 1\n rate other 1/h burst 2\n}")
		o := operating(t)
		s.want("a", 200, 429, 429)
		for _, scope := range []control.Scope{control.Instance, control.Fleet} {
			for _, where := range []string{"*", "default", "default/rate", "*/rate", "default/rate/rate"} {
				for _, mode := range []control.Mode{control.Off, control.Dark, control.EnforcePercent(0)} {
					weaken(t, o, where, mode, scope)
					key := fmt.Sprint(where, mode, scope)
					s.want(key, 200)
					s.want("a", 200)
					done, err := o.clearSwitch(t.Context(), target(where), scope)
					put(t, done, err)
					_, err = o.reset(t.Context(), "", mustIdentity(t, o, "a"), false, "test", "me")
					if err != nil {
						t.Fatal(err)
					}
					s.want("a", 200, 429, 429)
				}
			}
		}

		// One limit of two.
		weaken(t, o, "default/rate/rate", control.Dark, control.Fleet)
		s.want("b", 200, 200, 429)
		// The weakest of several counts, and each is cleared by itself.
		weaken(t, o, "*", control.Off, control.Instance)
		s.want("b", 200, 200)
		done, err := o.clearSwitches(t.Context(), control.Instance)
		put(t, done, err)
		s.want("b", 429)
		done, err = o.clearSwitch(t.Context(), target("default/rate/rate"), control.Fleet)
		put(t, done, err)
		if view := o.view(); len(view.Switches) != 0 {
			t.Errorf("in force: got %v, want nothing", view.Switches)
		}

		for where, want := range map[string]string{
			"edge":               "there is no target 'edge'; there are default/rate/other, default/rate/rate",
			"default/rate/rates": "there is no target 'default/rate/rates'",
			"default/fleet":      "there is no target 'default/fleet'",
		} {
			_, err := o.setSwitch(t.Context(), control.Switch{Target: target(where), Scope: control.Fleet}, time.Hour)
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("switch %s: got %v, want %q", where, err, want)
			}
		}
	})
}

func mustIdentity(t *testing.T, o *operator, key string) limiters.Identity {
	t.Helper()
	id, err := o.identityOf("api_key", key)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// Switches of an instance survive reloads, also one to another store; those of
// the fleet are where the store is.
func TestSwitch_Reload(t *testing.T) {
	s := newServer(t)
	global := withStorage(t, "")
	site := "stripe_ratelimit {\n rate 1/h burst 1\n}"
	s.load(global, site)
	weaken(t, operating(t), "default", control.Off, control.Instance)
	s.want("a", 200, 200)
	s.load(global, site+"\n")
	s.want("a", 200, 200)
	s.load(strings.Replace(global, "\n", "\n\tstripe_ratelimit {\n\t\tredis 127.0.0.1:1 {\n\t\t\ttimeout 5s\n\t\t}\n\t\tkey_secret x\n\t\ton_store_error closed\n\t}\n", 1), site)
	s.want("a", 200, 200) // off, so nobody asks a Redis that is not there
}

// What gauges show is what is in force, and what decided.
func TestSwitch_Gauges(t *testing.T) {
	s := newServer(t)
	pool := testPool(t)
	s.load(withStorage(t, ""), "stripe_ratelimit "+pool+" {\n critical /x\n rate 1/h burst 1\n concurrency 5 {\n mode dark\n }\n fleet 10 reserve 20%\n workers 10\n}")
	o := operating(t)
	check := func(what string, want ...string) {
		t.Helper()
		got := series(t, newTestRegistry(t), "limit_mode", pool)
		for _, labels := range want {
			labels, value, _ := strings.Cut(labels, ": ")
			if fmt.Sprint(got[labels]) != value {
				t.Errorf("%s: limit_mode{%s}: got %v of %v, want %s", what, labels, got[labels], got, value)
			}
		}
	}
	check("config", "kind=rate limit=rate source=config: 2", "kind=concurrency limit=concurrency source=config: 1", "kind=fleet limit=fleet source=config: 2")
	weaken(t, o, pool, control.EnforcePercent(25), control.Fleet)
	weaken(t, o, pool+"/workers/workers", control.Off, control.Instance)
	check("switched", "kind=rate limit=rate source=switch: 1.25", "kind=concurrency limit=concurrency source=config: 1",
		"kind=fleet limit=fleet source=switch: 1.25", "kind=workers limit=workers source=switch: 0")
	switches := series(t, newTestRegistry(t), "switches", "")
	for labels, want := range map[string]float64{
		"mode=enforce scope=fleet": 1, "mode=off scope=instance": 1, "mode=dark scope=fleet": 0,
	} {
		if switches[labels] != want {
			t.Errorf("switches{%s}: got %v of %v, want %v", labels, switches[labels], switches, want)
		}
	}
}

// An override is for one identity: its numbers, its headers, its message; and
// ends with what was remembered.
func TestOverride(t *testing.T) {
	onBothStores(t, func(t *testing.T, s *server, global string) {
		s.load(withStorage(t, global), "stripe_ratelimit {\n rate 2/h burst 2\n concurrency 1\n}")
		o := operating(t)
		alice := mustIdentity(t, o, "alice")
		s.want("alice", 200, 200, 429)
		s.want("bob", 200)
		give := func(requests, burst int64) {
			t.Helper()
			done, err := o.setOverride(t.Context(), control.Override{
				Target: target("default/rate/rate"), Identity: alice.String(), Requests: requests, Burst: burst,
			}, time.Hour)
			put(t, done, err)
		}
		// A bucket keeps what it holds, and refills as the override says: here by a
		// token each microsecond.
		give(3_600_000_000, 5)
		s.want("alice", 200, 200, 200)
		s.want("bob", 200, 429)
		give(1, 1)
		id := control.Override{}
		for _, v := range o.view().Overrides {
			id = v
		}
		if id.Requests != 1 || id.Identity != alice.String() {
			t.Errorf("in force: got %+v, want 1 request for %s", id, alice)
		}
		s.want("alice", 200, 429)

		slot := control.Override{Target: target("default/concurrency/concurrency"), Identity: alice.String(), Capacity: 2}
		done, err := o.setOverride(t.Context(), slot, time.Hour)
		put(t, done, err)
		give(1, 100)
		_, err = o.reset(t.Context(), "default", alice, false, "", "")
		if err != nil {
			t.Fatal(err)
		}
		release := s.held("override", "alice")
		s.want("alice", 200)
		var all []inspected
		eventually(t, func() bool { // the others' leases have been given back
			var err error
			if all, err = o.inspect(t.Context(), "default", alice); err != nil || len(all) != 2 {
				t.Fatalf("inspect: got %v, %v; want two limits", all, err)
			}
			return all[1].Live <= 1
		})
		if r := all[0]; r.Tokens != 98 || r.Override == nil || r.Override.Burst != 100 || r.Mode != control.Enforce || r.Limit.Capacity != 100 {
			t.Errorf("rate: got %+v, want 98 tokens of the 100 of the override", r)
		}
		if c := all[1]; c.Limit.Capacity != 2 {
			t.Errorf("concurrency: got %+v, want one lease of two", c)
		}
		eventually(t, func() bool { // the second one's release is under way
			all, err := o.inspect(t.Context(), "default", alice)
			return err == nil && all[1].Live == 1 && len(all[1].Leases) == 1
		})
		if status := release(); status != 200 {
			t.Errorf("held: got %d, want 200", status)
		}
		for _, where := range []string{"default/rate/rate", "default/concurrency/concurrency"} {
			done, err := o.clearOverride(t.Context(), target(where), alice)
			put(t, done, err)
		}
		s.want("alice", 200, 200, 429) // what is left is cut to the burst of 2

		for want, bad := range map[string]control.Override{
			"at most":                        {Target: target("default/rate/rate"), Identity: alice.String(), Requests: 1, Burst: 1 << 60},
			"is more than":                   {Target: target("default/rate/rate"), Identity: alice.String(), Requests: 1 << 60, Burst: 1},
			"there is no rate limit 'other'": {Target: target("default/rate/other"), Identity: alice.String(), Requests: 1, Burst: 1},
			"there is no pool 'edge'":        {Target: target("edge/rate/rate"), Identity: alice.String(), Requests: 1, Burst: 1},
			"32 hexadecimal":                 {Target: target("default/rate/rate"), Identity: "alice", Requests: 1, Burst: 1},
		} {
			if _, err := o.setOverride(t.Context(), bad, time.Hour); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("override %+v: got %v, want %q", bad, err, want)
			}
		}
		if _, err := o.clearOverride(t.Context(), target("default/rate/rate"), alice); !control.IsNothing(err) {
			t.Errorf("clear what is not set: got %v, want nothing", err)
		}
	})
}

// A reset is forgotten about by every instance that remembers a denial.
func TestReset(t *testing.T) {
	onBothStores(t, func(t *testing.T, s *server, global string) {
		s.load(withStorage(t, global), "stripe_ratelimit {\n rate 1/h burst 1\n}")
		o := operating(t)
		for range 3 {
			s.want("a", 200, 429, 429)
			done, err := o.reset(t.Context(), "", mustIdentity(t, o, "a"), true, "test", "me")
			put(t, done, err)
		}
		if _, err := o.reset(t.Context(), "edge", mustIdentity(t, o, "a"), true, "", ""); err == nil {
			t.Error("reset in a pool that is not there: no error")
		}
	})
}

func TestIdentityOf(t *testing.T) {
	s := newServer(t)
	if _, err := operate(); err == nil {
		t.Error("operate without a config: no error")
	}
	s.load("", "stripe_ratelimit {\n rate 1/h\n}")
	o := operating(t)
	a, err := o.identityOf("api_key", "a")
	if err != nil || a != o.app.hasher.identity(sourceAPIKey, "a") {
		t.Errorf("API key: got %v, %v", a, err)
	}
	two, err := o.identityOf("{http.request.host}-{http.request.method}", "h", "GET")
	if err != nil || two != o.app.hasher.identity("{http.request.host}-{http.request.method}", "h", "GET") {
		t.Errorf("composite: got %v, %v", two, err)
	}
	for _, args := range [][]string{{"user", "a"}, {"api_key"}, {"api_key", ""}, {"api_key", "a", "b"}, {"{http.request.host}"}} {
		if id, err := o.identityOf(args[0], args[1:]...); err == nil {
			t.Errorf("identityOf%v: got %v, want an error", args, id)
		}
	}
}
