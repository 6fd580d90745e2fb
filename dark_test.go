// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"fmt"
	"maps"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
)

// decided are the decisions of a limit so far, as "mode outcome".
func decided(t *testing.T, pool, kind, limit string) map[string]float64 {
	t.Helper()
	got := map[string]float64{}
	for labels, n := range series(t, newTestRegistry(t), "decisions_total", pool) {
		words := strings.Fields(labels) // kind limit mode outcome
		if n != 0 && words[0] == "kind="+kind && words[1] == "limit="+limit {
			got[strings.TrimPrefix(words[2], "mode=")+" "+strings.TrimPrefix(words[3], "outcome=")] = n
		}
	}
	return got
}

func same(t *testing.T, what string, got, want map[string]float64) {
	t.Helper()
	if !maps.Equal(got, want) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

var shortPools atomic.Int64

// shortPool returns the name of a pool that no other test has.
func shortPool(t *testing.T) string {
	t.Helper()
	return fmt.Sprint("dark", shortPools.Add(1))
}

// A dark limit counts exactly what it would have denied, were it enforced: alone
// it takes what it would take, and nothing of what it would deny.
func TestDark_NumbersOfLimits(t *testing.T) {
	onBothStores(t, func(t *testing.T, s *server, global string) {
		pool := shortPool(t)
		for _, mode := range []string{"dark", "enforce"} {
			s.load(withStorage(t, global), fmt.Sprintf("stripe_ratelimit %s-%s {\n rate 1/h burst 3 mode %s\n concurrency 1 mode %[2]s\n}", pool, mode, mode))
			for i := range 8 { // of two users
				s.get(fmt.Sprint("user", i%2))
			}
			// One more of a third while another request of theirs is in progress.
			release := s.held("dark"+pool+mode, "busy")
			s.get("busy")
			release()
		}
		same(t, "enforced rate", decided(t, pool+"-enforce", "rate", "rate"), map[string]float64{"enforce allowed": 8, "enforce denied": 2})
		same(t, "enforced concurrency", decided(t, pool+"-enforce", "concurrency", "concurrency"),
			map[string]float64{"enforce allowed": 9, "enforce denied": 1})
		// Two dark limits are decided each by itself alone: what the bucket would
		// have denied never reaches the other one when they are enforced.
		same(t, "dark rate", decided(t, pool+"-dark", "rate", "rate"), map[string]float64{"dark allowed": 8, "dark denied": 2})
		same(t, "dark concurrency", decided(t, pool+"-dark", "concurrency", "concurrency"), map[string]float64{"dark allowed": 9, "dark denied": 1})
	})
}

// A candidate beside the live limit counts what it would deny of what the live one
// allows, takes nothing from it, and changes no answer.
func TestDark_Candidate(t *testing.T) {
	onBothStores(t, func(t *testing.T, s *server, global string) {
		pool := shortPool(t)
		s.load(withStorage(t, global), "stripe_ratelimit "+pool+" {\n rate 1/h burst 4\n rate candidate 1/h burst 2 mode dark\n}\nheader >X-Would {http.stripe_ratelimit.would_reject}")
		s.want("a", 200, 200, 200, 200, 429)
		same(t, "live", decided(t, pool, "rate", "rate"), map[string]float64{"enforce allowed": 4, "enforce denied": 1})
		same(t, "candidate", decided(t, pool, "rate", "candidate"), map[string]float64{"dark allowed": 2, "dark denied": 2, "dark not_evaluated": 1})
	})
}

// enforce 25 rejects a stable quarter of the identities, and for the others
// counts what it would.
func TestDark_Percentage(t *testing.T) {
	s := newServer(t)
	pool := shortPool(t)
	s.load(withStorage(t, "\tstripe_ratelimit {\n\t\tkey_secret test\n\t}"), "stripe_ratelimit "+pool+" {\n rate 1/h burst 1 mode enforce 25\n}")
	o := operating(t)
	enforced := 0.0
	const users = 80
	for i := range users {
		key := fmt.Sprint("user", i)
		second := 200
		if inShare(mustIdentity(t, o, key), 25) {
			enforced++
			second = 429
		}
		s.want(key, 200, second, second)
	}
	if enforced < users/8 || enforced > users/2 { // with this secret
		t.Errorf("enforced for %v of %v, want about a quarter", enforced, users)
	}
	same(t, "rate", decided(t, pool, "rate", "rate"), map[string]float64{
		"enforce allowed": enforced, "enforce denied": 2 * enforced,
		"dark allowed": users - enforced, "dark denied": 2 * (users - enforced),
	})
	// A switch narrows the share, and never widens it.
	weaken(t, o, pool, control.EnforcePercent(60), control.Instance)
	for i := range users {
		key := fmt.Sprint("user", i)
		want := 200
		if inShare(mustIdentity(t, o, key), 25) {
			want = 429
		}
		s.want(key, want)
	}
	weaken(t, o, pool, control.EnforcePercent(5), control.Instance)
	for i := range users {
		key := fmt.Sprint("user", i)
		want := 200
		if inShare(mustIdentity(t, o, key), 5) {
			want = 429
		}
		s.want(key, want)
	}
}

// Without an identity nobody is in the share.
func TestDark_NoIdentity(t *testing.T) {
	s := newServer(t)
	pool := shortPool(t)
	s.load(withStorage(t, ""), "stripe_ratelimit "+pool+" {\n key {http.request.header.X-User}\n critical /never\n fleet 1 reserve 100% mode enforce 99\n}")
	s.want("a", 200, 200)
	same(t, "fleet", decided(t, pool, "fleet", "fleet"), map[string]float64{"dark shed": 2})
}

// A dark fleet counts without what it would have shed: it sheds in its mind as
// many as the enforced one does.
func TestDark_NumbersOfTheFleet(t *testing.T) {
	onBothStores(t, func(t *testing.T, s *server, global string) {
		pool := shortPool(t)
		for _, mode := range []string{"dark", "enforce"} {
			// Three slots, of which two are for non-critical requests. Nobody waits
			// for more: the claim is the whole allocation.
			s.load(withStorage(t, global), fmt.Sprintf("stripe_ratelimit %s-%s {\n critical /charges\n fleet 3 {\n reserve 33\n mode %[2]s\n }\n}", pool, mode))
			var releases []func() int
			for i := range 2 {
				releases = append(releases, s.held(fmt.Sprint("fleet", pool, mode, i), "a"))
			}
			for i := range 3 { // too many
				if mode == "enforce" {
					s.want("a", 503)
					continue
				}
				releases = append(releases, s.held(fmt.Sprint("fleet", pool, mode, "more", i), "a"))
			}
			for _, release := range releases {
				release()
			}
			s.want("a", 200)
		}
		same(t, "enforced", decided(t, pool+"-enforce", "fleet", "fleet"), map[string]float64{"enforce allowed": 3, "enforce shed": 3})
		same(t, "dark", decided(t, pool+"-dark", "fleet", "fleet"), map[string]float64{"dark allowed": 3, "dark shed": 3})
	})
}
