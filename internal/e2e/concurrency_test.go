// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

func dial(addr string) (net.Conn, error) {
	conn, err := net.Dial("tcp", addr)
	if err == nil {
		_ = conn.SetDeadline(time.Now().Add(patience))
	}
	return conn, err
}

// kinds are the ways in which calls go and end. Each returns the status.
var kinds = []struct {
	name string
	h2c  bool
	run  func(ctx context.Context, c *caddy, client *http.Client, call *call, header []string) (int, error)
}{
	{"plain", false, plain("/work")},
	{"h2 stream", true, plain("/work")},
	{"aborted by the client", false, aborted},
	{"h2 stream, reset by the client", true, aborted},
	{"aborted at any moment", false, hasty},
	{"h2 stream, reset at any moment", true, hasty},
	{"broken off by the upstream", false, brokenOff},
	{"h2 stream, broken off by the upstream", true, brokenOff},
	{"SSE", false, events},
	{"WebSocket", false, func(_ context.Context, c *caddy, _ *http.Client, call *call, header []string) (int, error) {
		return c.socket(call, header)
	}},
}

func plain(path string) func(context.Context, *caddy, *http.Client, *call, []string) (int, error) {
	return func(ctx context.Context, c *caddy, client *http.Client, call *call, header []string) (int, error) {
		a, err := c.try(ctx, client, http.MethodGet, path, call.header(header...)...)
		return a.status, err
	}
}

// aborted goes away while the upstream works.
func aborted(ctx context.Context, c *caddy, client *http.Client, call *call, header []string) (int, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-call.entered:
			<-call.up.opened()
			call.leave()
			cancel()
		case <-ctx.Done():
		}
	}()
	a, err := c.try(ctx, client, http.MethodGet, "/hold", call.header(header...)...)
	if ctx.Err() != nil {
		return http.StatusOK, nil
	}
	return a.status, err
}

// hasty goes away wherever the request may be.
func hasty(ctx context.Context, c *caddy, client *http.Client, call *call, header []string) (int, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	timer := time.AfterFunc(time.Duration(call.number%40)*100*time.Microsecond, func() {
		call.leave()
		cancel()
	})
	defer timer.Stop()
	a, err := c.try(ctx, client, http.MethodGet, "/hold", call.header(header...)...)
	if ctx.Err() != nil {
		return http.StatusOK, nil
	}
	return a.status, err
}

// brokenOff wants half of a body.
func brokenOff(ctx context.Context, c *caddy, client *http.Client, call *call, header []string) (int, error) {
	a, err := c.try(ctx, client, http.MethodGet, "/panic", call.header(header...)...)
	if a.status == http.StatusOK && err == nil {
		return 0, fmt.Errorf("a body that was broken off came as a whole: %q", a.body)
	}
	if a.status == http.StatusOK {
		return a.status, nil
	}
	return a.status, err
}

// events reads some of a stream.
func events(ctx context.Context, c *caddy, client *http.Client, call *call, header []string) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+c.addr()+"/events", nil)
	if err != nil {
		return 0, err
	}
	header = call.header(header...)
	for i := 0; i < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return resp.StatusCode, nil
	}
	lines := bufio.NewScanner(resp.Body)
	for n := 0; n < 3; {
		if !lines.Scan() {
			return 0, fmt.Errorf("the stream ended: %v", lines.Err())
		}
		if strings.HasPrefix(lines.Text(), "data: ") {
			n++
		}
	}
	call.leave()
	return resp.StatusCode, nil
}

// slots returns the sorted sets of leases that Redis has.
func slots(t testing.TB, redis *redistest.Server) []string {
	t.Helper()
	rdb := redis.Client()
	defer rdb.Close()
	keys, err := rdb.Keys(t.Context(), "*:c:*").Result()
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

// Through two Caddys, 20 calls of one key are in progress at the upstream and
// never more, however calls end; and none leaves a lease behind.
func TestConcurrency_TwoInstances(t *testing.T) {
	const (
		limit   = 20
		clients = 60
		load    = 3 * time.Second
	)
	redis := redistest.Start(t)
	up := newUpstream(t)
	// A lease longer than the test: none may go by ending.
	cfg := config{redis: redis.Addr, site: fmt.Sprintf("stripe_ratelimit {\n concurrency %d lease 10m \n}\n reverse_proxy %s", limit, up.addr)}
	caddys := []*caddy{start(t, cfg), start(t, cfg)}

	up.fillUp(limit)
	var denied atomic.Int64
	done := make([]atomic.Int64, len(kinds))
	ctx, cancel := context.WithTimeout(t.Context(), load+patience)
	defer cancel()
	begin := time.Now()
	var wg sync.WaitGroup
	for i := range clients {
		kind, c := (i/2)%len(kinds), caddys[i%2]
		client := newClient(t, kinds[kind].h2c)
		wg.Go(func() {
			for ctx.Err() == nil && (time.Since(begin) < load || up.peak() < limit) {
				call := up.call()
				status, err := kinds[kind].run(ctx, c, client, call, bearer("sk_live_shared"))
				switch {
				case ctx.Err() != nil: // the limit was not reached
				case err != nil:
					t.Errorf("%s: %v", kinds[kind].name, err)
					return
				case status == http.StatusTooManyRequests:
					denied.Add(1)
					time.Sleep(5 * time.Millisecond) // leaves the machine to the others
				case status == http.StatusOK, status == http.StatusSwitchingProtocols:
					done[kind].Add(1)
				default:
					t.Errorf("%s: got status %d", kinds[kind].name, status)
					return
				}
			}
		})
	}
	wg.Wait()

	t.Logf("%d in progress at most, %d denied", up.peak(), denied.Load())
	if up.peak() != limit {
		t.Errorf("%d were in progress at once, want %d", up.peak(), limit)
	}
	for kind := range kinds {
		t.Logf("%s: %d", kinds[kind].name, done[kind].Load())
		if done[kind].Load() == 0 {
			t.Errorf("%s: none went through", kinds[kind].name)
		}
	}
	if denied.Load() == 0 {
		t.Error("none was denied, so the limit was not tried")
	}
	eventually(t, patience, "all leases given back", func() bool { return len(slots(t, redis)) == 0 })
	for _, c := range caddys {
		c.noStoreErrors(t)
	}
}

// As many clients as there are slots, each with one request after the other,
// never see a 429: a client that has its answer has its slot back.
func TestConcurrency_ClosedLoop(t *testing.T) {
	const clients, requests = 20, 60
	for _, store := range []string{"redis", "memory"} {
		for _, h2c := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, h2c %v", store, h2c), func(t *testing.T) {
				up := newUpstream(t)
				cfg := config{site: fmt.Sprintf("stripe_ratelimit {\n concurrency %d lease 10m \n}\n reverse_proxy %s", clients, up.addr)}
				if store == "redis" {
					cfg.redis = redistest.Start(t).Addr
				}
				c := start(t, cfg)
				shared := newClient(t, h2c)
				var denied atomic.Int64
				var wg sync.WaitGroup
				for range clients {
					client := shared // 20 streams of one connection
					if !h2c {
						client = newClient(t, h2c) // a connection of its own
					}
					wg.Go(func() {
						for n := range requests {
							path := []string{"/", "/large"}[n%2]
							a, err := c.try(t.Context(), client, http.MethodGet, path, up.call().header(bearer("sk_live_loop")...)...)
							switch {
							case err != nil:
								t.Error(err)
								return
							case a.status == http.StatusTooManyRequests:
								denied.Add(1)
							case a.status != http.StatusOK:
								t.Errorf("got status %d, want 200", a.status)
								return
							}
						}
					})
				}
				wg.Wait()
				if n := denied.Load(); n != 0 {
					t.Errorf("%d of %d requests were denied, want none", n, clients*requests)
				}
				c.noStoreErrors(t)
			})
		}
	}
}
