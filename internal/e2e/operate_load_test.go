// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// flips is what a test does to the switches of one Caddy, and when.
type flips struct {
	mu  sync.Mutex
	all map[string][]flip // by kind, the first is the config
}

// flip is one change. The mode may be in force from the time at which it was
// asked for, and is from the answer on, until the next.
type flip struct {
	mode           string
	asked, inForce time.Time
}

// possible are the modes of a kind that may have been in force at some time
// between the sending of a request and its answer.
func (f *flips) possible(kind string, a answer) map[string]bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	modes := map[string]bool{}
	all := f.all[kind]
	for i, now := range all {
		begins, ends := !now.asked.After(a.came), true
		if i+1 < len(all) && !all[i+1].inForce.IsZero() {
			ends = all[i+1].inForce.After(a.sent)
		}
		if begins && ends {
			modes[now.mode] = true
		}
	}
	return modes
}

// flip changes the switch of a kind.
func (f *flips) flip(t testing.TB, c *caddy, kind, mode string) {
	f.mu.Lock()
	i := len(f.all[kind])
	f.all[kind] = append(f.all[kind], flip{mode: mode, asked: time.Now()})
	before := f.all[kind][i-1].mode
	f.mu.Unlock()
	switch {
	case mode != "enforce":
		c.admin(t, "POST", "switches", fmt.Sprintf(`{"kind":%q,"mode":%q,"ttl":"1h","reason":"test"}`, kind, mode), http.StatusOK)
	case before != mode:
		c.admin(t, "DELETE", "switches", fmt.Sprintf(`{"kind":%q}`, kind), http.StatusOK)
	}
	f.mu.Lock()
	f.all[kind][i].inForce = time.Now()
	f.mu.Unlock()
}

// Under full load every tenth of a second a switch of one of four kinds goes on
// or off. No answer is one that none of the modes in force gives; nothing that was
// taken is left in the end, and every request was counted once.
func TestOperate_SwitchesUnderLoad(t *testing.T) {
	redis := redistest.Start(t)
	up := newUpstream(t)
	c := start(t, config{redis: redis.Addr, site: fmt.Sprintf(`
	stripe_ratelimit {
		critical /charges
		rate 1/h burst 1 match /rate
		concurrency 2 match /work /hold
		fleet 5 reserve 20%%
		workers 1000
	}
	handle_path /charges {
		rewrite /work
		reverse_proxy %[1]s
	}
	reverse_proxy %[1]s`, up.addr)})
	f := &flips{all: map[string][]flip{}}
	for _, kind := range []string{"rate", "concurrency", "fleet", "workers"} {
		f.all[kind] = []flip{{mode: "enforce"}}
	}
	c.get(t, "/rate", bearer("drained")...).want(t, http.StatusOK)

	// check tells what is wrong with an answer.
	reasons := map[string]string{"global-rate": "rate", "endpoint-rate": "rate", "global-concurrency": "concurrency", "endpoint-concurrency": "concurrency"}
	check := func(path string, a answer) error {
		certainly := func(kind, mode string) bool {
			modes := f.possible(kind, a)
			return len(modes) == 1 && modes[mode]
		}
		reason := a.header.Get("Stripe-Rate-Limited-Reason")
		kind := reasons[reason]
		switch {
		case a.status == http.StatusServiceUnavailable && strings.Contains(a.body, `"overloaded"`):
			kind = "fleet" // the workers have nothing to do
		case a.status == http.StatusTooManyRequests && kind != "":
		case a.status != http.StatusOK:
			return fmt.Errorf("status %d %s: %s", a.status, reason, a.body)
		}
		switch {
		case kind != "" && !f.possible(kind, a)["enforce"]:
			return fmt.Errorf("status %d by %s while its modes were %v", a.status, kind, f.possible(kind, a))
		case path == "/charges" && kind != "":
			return fmt.Errorf("a critical request was rejected by %s", kind)
		case path == "/rate" && a.status == http.StatusOK && certainly("rate", "enforce"):
			return fmt.Errorf("status 200 without a token while rate was enforced")
		case path == "/work" && a.status == http.StatusOK && certainly("concurrency", "enforce") && a.remaining("concurrency") < 0,
			path == "/work" && !f.possible("concurrency", a)["enforce"] && a.remaining("concurrency") >= 0:
			return fmt.Errorf("RateLimit: %q while the modes of concurrency were %v", a.field("RateLimit"), f.possible("concurrency", a))
		}
		return nil
	}

	const seconds = 10
	began := time.Now()
	var mu sync.Mutex
	seen := map[string]int{"requests": 1, "allowed": 1}
	done := make(chan struct{})
	var clients sync.WaitGroup
	for i := range 12 {
		path := []string{"/rate", "/work", "/work", "/charges"}[i%4]
		client := newClient(t, i%2 == 0)
		key := "busy" + strconv.Itoa(i/4%2)
		if path == "/rate" {
			key = "drained"
		}
		clients.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				a, err := c.try(t.Context(), client, http.MethodGet, path, up.call().header(bearer(key)...)...)
				if err == nil {
					err = check(path, a)
				}
				mu.Lock()
				seen["requests"]++
				switch a.status {
				case http.StatusOK:
					seen["allowed"]++
				case http.StatusServiceUnavailable:
					seen["shed"]++
				default:
					seen["denied"]++
					seen[reasons[a.header.Get("Stripe-Rate-Limited-Reason")]]++
				}
				mu.Unlock()
				if err != nil {
					t.Errorf("%s: %v", path, err)
					return
				}
			}
		})
	}
	rng := rand.New(rand.NewPCG(1, 2))
	kinds, modes := []string{"rate", "concurrency", "fleet", "workers"}, []string{"off", "dark", "enforce", "enforce"}
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for range seconds * 10 {
		<-ticker.C
		f.flip(t, c, kinds[rng.IntN(len(kinds))], modes[rng.IntN(len(modes))])
	}
	for _, kind := range kinds {
		f.flip(t, c, kind, "enforce")
	}
	close(done)
	clients.Wait()
	t.Logf("%v in %v", seen, time.Since(began).Round(time.Millisecond))
	for _, what := range []string{"allowed", "shed", "rate", "concurrency"} {
		if seen[what] < 10 {
			t.Errorf("%d were %s, want some: the test shows nothing", seen[what], what)
		}
	}

	c.noStoreErrors(t)
	outcome := func(name string) float64 { return c.metric(t, "requests_total", fmt.Sprintf("outcome=%q", name)) }
	eventually(t, patience, "all counted", func() bool { return c.metric(t, "requests_total") >= float64(seen["requests"]) })
	got := map[string]float64{"requests": c.metric(t, "requests_total"), "denied": outcome("denied"), "shed": outcome("shed"), "allowed": outcome("allowed") + outcome("store_error")}
	for name, n := range got {
		if n != float64(seen[name]) {
			t.Errorf("%s: counted %v, want %d", name, n, seen[name])
		}
	}
	for kind, want := range map[string]int{"rate": seen["rate"], "concurrency": seen["concurrency"]} {
		if n := c.metric(t, "decisions_total", fmt.Sprintf("kind=%q", kind), `mode="enforce"`, `outcome="denied"`); n != float64(want) {
			t.Errorf("%s denied %v, want %d", kind, n, want)
		}
	}
	eventually(t, patience, "nothing in progress", func() bool {
		return c.metric(t, "in_flight") == 0 && c.metric(t, "fleet_in_flight") == 0
	})
	eventually(t, patience, "free of leases", func() bool { return live(t, redis) == 0 })

	// And the slots are all there: two calls of one user, and not three.
	calls := new(held)
	for i, want := range []bool{true, true, false} {
		a, begun := calls.begin(t, c, up.call(), "", bearer("busy0")...)
		if begun != want {
			t.Fatalf("call %d in progress: got %v, want %v; status %d", i, begun, want, a.status)
		}
	}
	calls.letGo(t, len(calls.calls))
}
