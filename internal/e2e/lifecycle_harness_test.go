// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// occupy returns a port of 127.0.0.1 that cannot be had.
func occupy(t testing.TB) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().(*net.TCPAddr).Port
}

// failingLast turns a Caddyfile into a config that fails when all its apps have
// started and said so: Caddy looks for the config loader then.
func failingLast(t testing.TB, c *caddy, caddyfile string) string {
	t.Helper()
	status, adapted := c.Ask(t, http.MethodPost, "/adapt", caddyfile, "Content-Type", "text/caddyfile")
	var answer struct {
		Result map[string]any `json:"result"`
	}
	if err := json.Unmarshal([]byte(adapted), &answer); err != nil || status != http.StatusOK {
		t.Fatalf("adapt: got %d %s (%v)", status, adapted, err)
	}
	answer.Result["admin"].(map[string]any)["config"].(map[string]any)["load"] = map[string]any{"module": "no_such_module"}
	out, err := json.Marshal(answer.Result)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// use is what a process uses that it could leak.
type use struct {
	ours            map[string]int // goroutines of this module, by what started them
	goroutines, fds float64
}

var oursRE = regexp.MustCompile(`(?m)^github\.com/(?:stripe-ratelimit/caddy-stripe-ratelimit/(?:limiters|shedding)|redis/go-redis/v9\S*)\.(\S+)\(`)

// use returns what the process uses at the moment.
func (c *caddy) use(t testing.TB) use {
	t.Helper()
	u := use{ours: map[string]int{}}
	_, stacks := c.Ask(t, http.MethodGet, "/debug/pprof/goroutine?debug=2", "")
	for stack := range strings.SplitSeq(stacks, "\n\n") {
		// The last function of ours is where it began. Handlers are on their way.
		frames := oursRE.FindAllStringSubmatch(stack, -1)
		if len(frames) > 0 {
			u.ours[frames[len(frames)-1][1]]++
		}
	}
	for line := range strings.Lines(c.Metrics(t)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch name {
		case "go_goroutines":
			u.goroutines, _ = strconv.ParseFloat(value, 64)
		case "process_open_fds":
			u.fds, _ = strconv.ParseFloat(value, 64)
		}
	}
	return u
}

// settles waits until the process uses what it did before: as many goroutines of
// this module, and no more of what is Caddy's and the connections' than some.
func (c *caddy) settles(t testing.TB, before use, more float64) {
	t.Helper()
	var now use
	defer func() {
		if t.Failed() {
			t.Logf("before: %+v, now: %+v", before, now)
		}
	}()
	eventually(t, patience, "as frugal as before", func() bool {
		now = c.use(t)
		return maps.Equal(now.ours, before.ours) && now.goroutines <= before.goroutines+more && now.fds <= before.fds+more
	})
}

// inProgress waits until so many requests are in progress in one pool, and there
// is no other.
func (c *caddy) inProgress(t testing.TB, pool string, n int) {
	t.Helper()
	eventually(t, patience, fmt.Sprintf("%d in progress in pool %s alone", n, pool), func() bool {
		pools := strings.Count(c.Metrics(t), "\ncaddy_stripe_ratelimit_in_flight{")
		return pools == 2 && c.metric(t, "in_flight", `type="non_critical"`, fmt.Sprintf("pool=%q", pool)) == float64(n)
	})
}

// disconnected waits until nobody but the test is connected to a Redis.
func disconnected(t testing.TB, redis *redistest.Server) {
	t.Helper()
	rdb := redis.Client()
	defer rdb.Close()
	eventually(t, patience, "left by all", func() bool {
		list, err := rdb.ClientList(t.Context()).Result()
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(list, "\n") == 1
	})
}

// left fails the test if a Redis still has leases or instances.
func left(t testing.TB, redis *redistest.Server) {
	t.Helper()
	rdb := redis.Client()
	defer rdb.Close()
	keys, err := rdb.Keys(t.Context(), "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		switch {
		case strings.Contains(key, ":c:"):
			t.Errorf("redis %s still has %s", redis.Addr, key)
		case strings.HasSuffix(key, ":fleet"):
			if fields := rdb.HKeys(t.Context(), key).Val(); len(fields) > 1 {
				t.Errorf("redis %s still has instances in %s: %v", redis.Addr, key, fields)
			}
		}
	}
}
