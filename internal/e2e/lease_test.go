// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// longLease is longer than the shortest possible, which would leave a machine
// that stalls no time to renew.
const longLease = 3 * time.Second

// held are calls that stay in progress.
type held struct {
	calls   []*call
	answers []answer // of calls that ended by themselves, once wait has returned
	wg      sync.WaitGroup
}

// hold lets n calls be in progress until they are let go.
func hold(t testing.TB, c *caddy, up *upstream, n int, header []string) *held {
	t.Helper()
	h := &held{answers: make([]answer, n)}
	for i := range n {
		call, client := up.call(), newClient(t, false)
		h.calls = append(h.calls, call)
		over := make(chan struct{})
		h.wg.Go(func() {
			defer close(over)
			h.answers[i], _ = c.try(t.Context(), client, http.MethodGet, "/hold", call.header(header...)...)
		})
		select {
		case <-call.entered:
		case <-over:
			a := h.answers[i]
			t.Fatalf("call %d of %d: got status %d, want it in progress\n%s", i+1, n, a.status, a.body)
		case <-time.After(patience):
			t.Fatalf("call %d of %d is neither in progress nor over", i+1, n)
		}
	}
	return h
}

// letGo ends n of the calls and waits until their clients have the answers.
func (h *held) letGo(t testing.TB, n int) {
	t.Helper()
	for _, call := range h.calls[:n] {
		close(call.answer)
	}
	rest := h.calls[n:]
	h.calls = rest
	if len(rest) == 0 {
		h.wg.Wait()
	}
}

// A killed process holds its slots for one lease, no longer. Before, its slots
// are taken however long the requests are.
func TestLease_KilledInstance(t *testing.T) {
	const limit, lease = 15, longLease
	redis := redistest.Start(t)
	up := newUpstream(t)
	cfg := config{redis: redis.Addr, site: fmt.Sprintf("stripe_ratelimit {\n concurrency %d lease %s \n}\n reverse_proxy %s", limit, lease, up.addr)}
	victim, other := start(t, cfg), start(t, cfg)
	key := bearer("sk_live_killed")

	calls := hold(t, victim, up, limit, key)
	for full := time.Now(); time.Since(full) < lease+lease/2; time.Sleep(20 * time.Millisecond) {
		other.get(t, "/", key...).want(t, http.StatusTooManyRequests)
	}
	other.noStoreErrors(t)
	victim.Kill()
	// What it had sent is executed before what is sent now.
	if err := redis.Client().Ping(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	for {
		a := other.get(t, "/", key...)
		if a.status == http.StatusOK {
			t.Logf("free %v after the kill, lease %v", a.came.Sub(killed), lease)
			break
		}
		a.want(t, http.StatusTooManyRequests)
		// A refusal is remembered for 10ms.
		if late := a.sent.Sub(killed); late > lease+10*time.Millisecond {
			t.Fatalf("a request %v after the kill is refused, lease %v", late, lease)
		}
		time.Sleep(15 * time.Millisecond)
	}
	calls.wg.Wait()
	// A lease after the kill all of them are free, not one. (Before, some may be
	// that were renewed earlier than others.)
	time.Sleep(time.Until(killed.Add(lease + 10*time.Millisecond)))
	again := hold(t, other, up, limit, key)
	other.get(t, "/", key...).want(t, http.StatusTooManyRequests)
	again.letGo(t, limit)
	other.noStoreErrors(t)
}

// A request of three leases' length is counted from its first moment to its
// last, by its own instance and by others, in memory and on Redis.
func TestLease_LongRequest(t *testing.T) {
	const lease = longLease
	up := newUpstream(t)
	site := fmt.Sprintf("stripe_ratelimit {\n concurrency 1 lease %s \n}\n reverse_proxy %s", lease, up.addr)
	redis := redistest.Start(t)
	shared := config{redis: redis.Addr, site: site}
	a, b, memory := start(t, shared), start(t, shared), start(t, config{site: site})
	key := bearer("sk_live_long")

	first, second := hold(t, a, up, 1, key), hold(t, memory, up, 1, key)
	for begin := time.Now(); time.Since(begin) < 3*lease+lease/2; time.Sleep(20 * time.Millisecond) {
		for _, c := range []*caddy{a, b, memory} {
			c.get(t, "/", key...).want(t, http.StatusTooManyRequests)
		}
	}
	first.letGo(t, 1)
	second.letGo(t, 1)
	for _, answer := range append(first.answers, second.answers...) {
		answer.want(t, http.StatusOK)
	}
	for _, c := range []*caddy{a, memory} {
		c.get(t, "/", key...).want(t, http.StatusOK)
	}
	// b may remember its last refusal for 10ms, and a's release is on its way.
	eventually(t, patience, "free for the other instance", func() bool {
		return b.get(t, "/", key...).status == http.StatusOK
	})
	a.noStoreErrors(t)
	b.noStoreErrors(t)
}
