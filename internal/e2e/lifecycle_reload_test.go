// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/caddyproc"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// generation is one of many configs that are loaded in turn. Limits and their
// names, the pool, the Redis and the shedders of one are not those of the next.
type generation struct {
	number   int
	rejected string // how, if it is
	redis    string
	pool     string

	rate, slots   string // names
	burst, places int

	shedders string
	sheds    bool // all that is not critical
}

// The ways in which a config is rejected, and what it may have done by then.
const (
	unknown = "parse error"
	noCert  = "provision error"               // handlers were provisioned
	taken   = "an app that does not start"    // other servers may have served requests
	tooLate = "failure when all have started" // its numbers were in force
)

// manyGenerations makes n configs, every fifth of which is rejected. What a
// rejected one says differs from the running one in numbers alone, so that they
// would be seen.
func manyGenerations(n int, redis ...string) []generation {
	ways := []string{unknown, noCert, taken, tooLate}
	shedders := []string{
		"critical /charges \n workers 500",
		"critical /charges \n fleet 1000 reserve 20%",
		"critical /charges \n fleet 1000 reserve 20% \n workers 500",
		"",
		"critical /charges \n fleet 10 reserve 100%", // sheds
		"critical /charges \n fleet 10 reserve 100% mode dark",
	}
	all := make([]generation, n)
	for i := range all {
		g := generation{
			number: i,
			redis:  redis[i/7%len(redis)],
			pool:   []string{"", "alpha", "beta"}[i/11%3],
			rate:   []string{"rate", "requests"}[i/2%2],
			slots:  []string{"concurrency", "slots"}[i/3%2],
			burst:  3 + i, places: 200 + i,
			shedders: shedders[i%len(shedders)],
			sheds:    i%len(shedders) == 4,
		}
		if i%5 == 4 {
			g = all[i-1]
			g.number, g.burst, g.places, g.rejected = i, 1000+i, 2000+i, ways[i/5%len(ways)]
		}
		all[i] = g
	}
	return all
}

func (g generation) config(up *upstream, port int, takenPort int) config {
	c := config{
		redis:  g.redis,
		global: "grace_period 30s",
		site: fmt.Sprintf(`header X-Generation %d
	stripe_ratelimit %s {
		key api_key
		rate %s %d/d burst %d
		concurrency %s %d lease 10m
		%s
	}
	handle /hold {
		reverse_proxy %s
	}
	handle /socket {
		reverse_proxy %[9]s {
			stream_close_delay 10m
		}
	}
	respond ok`, g.number, g.pool, g.rate, g.burst, g.burst, g.slots, g.places, g.shedders, up.addr),
	}
	switch g.rejected {
	case unknown:
		c.site += "\n no_such_directive"
	case noCert:
		c.site += "\n tls no-such-cert.pem no-such-key.pem"
	case taken:
		c.blocks = fmt.Sprintf("http://127.0.0.1:%d {\n respond taken \n}", takenPort)
	}
	return c
}

// history is what a client may find in force, told by when it asks.
type history struct {
	all         []generation
	begun, done atomic.Int64 // numbers of loads
}

// running returns the last config that was accepted up to a number.
func (h *history) running(number int) int {
	for h.all[number].rejected != "" {
		number--
	}
	return number
}

// between returns what an answer may come from that was asked for when done was
// over and came when begun had begun: the running config, the one before it,
// whose last requests may be served for a moment, and what was loaded meanwhile.
func (h *history) between(done, begun int) []generation {
	first := h.running(done)
	if first > 0 {
		first = h.running(first - 1)
	}
	var may []generation
	for n, g := range h.all[first : begun+1] {
		if g.rejected == "" || first+n > h.running(done) {
			may = append(may, g)
		}
	}
	return may
}

// check tells what is wrong with an answer.
func (h *history) check(a answer, done, begun int) error {
	may := h.between(done, begun)
	number, err := strconv.Atoi(a.header.Get("X-Generation"))
	if err != nil {
		return fmt.Errorf("status %d without generation: %v %s", a.status, a.header, a.body)
	}
	served := slices.ContainsFunc(may, func(g generation) bool {
		return g.number == number && (g.rejected == "" || g.rejected == taken || g.rejected == tooLate)
	})
	if !served {
		return fmt.Errorf("an answer of generation %d (%s)", number, h.all[number].rejected)
	}
	switch a.status {
	case http.StatusOK, http.StatusSwitchingProtocols:
	case http.StatusTooManyRequests:
		if a.header.Get("Stripe-Rate-Limited-Reason") != "global-rate" {
			return fmt.Errorf("a 429 for reason %q", a.header.Get("Stripe-Rate-Limited-Reason"))
		}
	case http.StatusServiceUnavailable:
		if !strings.Contains(a.body, `"overloaded"`) || !slices.ContainsFunc(may, func(g generation) bool { return g.sheds }) {
			return fmt.Errorf("a 503 where nothing sheds: %s", a.body)
		}
		return nil
	default:
		return fmt.Errorf("status %d: %s", a.status, a.body)
	}
	policies := strings.Split(a.field("RateLimit-Policy"), ", ")
	if a.status != http.StatusTooManyRequests && len(policies) != 2 {
		return fmt.Errorf("policies %q, want two", policies)
	}
	for _, policy := range policies {
		if !slices.ContainsFunc(may, func(g generation) bool {
			inForce := g.rejected == "" || g.rejected == tooLate
			return inForce && (strings.HasPrefix(policy, fmt.Sprintf(`"%s";q=%d;`, g.rate, g.burst)) ||
				strings.HasPrefix(policy, fmt.Sprintf(`"%s";q=%d;`, g.slots, g.places)))
		}) {
			return fmt.Errorf("policy %s in an answer of generation %d", policy, number)
		}
	}
	return nil
}

// load loads a config, whatever comes of it.
func (h *history) load(t testing.TB, c *caddy, up *upstream, g generation, takenPort int) {
	t.Helper()
	text := g.config(up, c.port, takenPort).caddyfile(c.port)
	h.begun.Store(int64(g.number))
	defer h.done.Store(int64(g.number))
	var status int
	var body string
	if g.rejected == tooLate {
		status, body = c.LoadJSON(t, failingLast(t, c, text))
	} else {
		status, body = c.Load(t, text)
	}
	if (status == http.StatusOK) != (g.rejected == "") {
		t.Fatalf("load %d (%s): got %d %s", g.number, g.rejected, status, body)
	}
	// The next one comes when this one is alone, as check supposes.
	caddyproc.AwaitHandover(t, c.addr())
}

// One hundred reloads under load lose no answer and give none that is not of the
// config that runs, or of the one before it in the handover; and leave nothing.
func TestLifecycle_HundredReloads(t *testing.T) {
	const reloads, pause = 102, 8 * time.Millisecond
	redises := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
	up := newUpstream(t)
	h := &history{all: manyGenerations(1+reloads, redises[0].Addr, redises[1].Addr)}
	takenPort := occupy(t)
	port := caddyproc.FreePort(t)
	c := &caddy{caddyproc.Start(t, h.all[0].config(up, port, takenPort).caddyfile(port)), port}

	var answers, lost, ok, denied, shed atomic.Int64
	seen := func(a answer, err error, done, begun int64) bool {
		if err != nil {
			lost.Add(1) // before it came to us, or the counts differ in the end
			return true
		}
		answers.Add(1)
		switch a.status {
		case http.StatusTooManyRequests:
			denied.Add(1)
		case http.StatusServiceUnavailable:
			shed.Add(1)
		default:
			ok.Add(1)
		}
		if err := h.check(a, int(done), int(begun)); err != nil {
			t.Errorf("asked when %d was done, answered when %d had begun: %v", done, begun, err)
			return false
		}
		return true
	}
	try := func(client *http.Client, method, path string, header ...string) (answer, bool) {
		done := h.done.Load()
		a, err := c.try(t.Context(), client, method, path, header...)
		return a, seen(a, err, done, h.begun.Load())
	}

	open := func(key string) *socket {
		done := h.done.Load()
		s, err := c.upgrade(up.call(), bearer(key))
		if err != nil {
			t.Fatalf("socket when %d was done: %v", done, err)
		}
		t.Cleanup(func() { _ = s.Close() })
		seen(answer{status: s.status, header: s.header}, nil, done, h.begun.Load())
		if s.status != http.StatusSwitchingProtocols {
			t.Fatalf("socket when %d was done: got status %d", done, s.status)
		}
		return s
	}

	// Calls of the first config that last through all the others.
	calls := hold(t, c, up, 3, bearer("sk_live_long"))
	answers.Add(3)
	sockets := []*socket{open("sk_live_socket")}
	c.inProgress(t, "default", 3)
	before := c.use(t)
	if len(before.ours) == 0 {
		t.Error("no goroutine of ours was found, so none that leaks would be")
	}

	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i, h2c := range []bool{false, false, true, true, true} {
		client := newClient(t, h2c)
		wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					client.CloseIdleConnections()
					return
				case <-time.After(pause):
				}
				method := []string{http.MethodGet, http.MethodPost}[n%2]
				// Ten requests of each key: more than some buckets hold.
				if _, fine := try(client, method, "/", bearer(fmt.Sprintf("sk_live_%d_%d", i, n/10))...); !fine {
					return
				}
			}
		})
	}
	exact := newClient(t, false)
	for _, g := range h.all[1:] {
		h.load(t, c, up, g, takenPort)
		r := h.all[h.running(g.number)]
		if !r.sheds {
			sockets = append(sockets, open(fmt.Sprintf("sk_live_socket_%d", g.number)))
		}
		if len(sockets) > 4 { // it was opened three reloads ago, or more
			s := sockets[1]
			sockets = slices.Delete(sockets, 1, 2)
			if err := s.say("still here?"); err != nil {
				t.Errorf("a socket when %d was done: %v", g.number, err)
			}
			_ = s.Close()
		}
		if r.sheds {
			// The numbers of the fleet come with the next sync.
			eventually(t, patience, "shed", func() bool {
				a, _ := try(exact, http.MethodGet, "/", bearer("sk_live_shed")...)
				return a.status == http.StatusServiceUnavailable
			})
			continue
		}
		if g.number > 20 && g.number%5 != 4 && g.number != reloads {
			continue // counts of many tokens take their time
		}
		key := bearer(fmt.Sprintf("sk_live_exact_%d", g.number))
		for n := 0; n <= r.burst; {
			a, fine := try(exact, http.MethodGet, "/", key...)
			if !fine {
				break
			}
			want := http.StatusOK
			switch {
			case a.status == 0: // the old server's connection
				continue
			case a.status == http.StatusServiceUnavailable: // the fleet has not synced since
				continue
			case n == r.burst:
				want = http.StatusTooManyRequests
			}
			if a.status != want {
				t.Errorf("after load %d, request %d of a key: got %d, want %d of %d tokens", g.number, n+1, a.status, want, r.burst)
				break
			}
			n++
		}
		if t.Failed() {
			break
		}
	}
	close(stop)
	wg.Wait()
	exact.CloseIdleConnections()
	for _, s := range sockets {
		if err := s.say("still here?"); err != nil {
			t.Errorf("a socket in the end: %v", err)
		}
		_ = s.Close()
	}
	t.Logf("%d allowed, %d denied, %d shed, %d connections cut by Caddy", ok.Load(), denied.Load(), shed.Load(), lost.Load())
	if ok.Load() == 0 || denied.Load() == 0 || shed.Load() == 0 {
		t.Error("not everything happened")
	}
	c.inProgress(t, "default", 3) // the last config is as the first
	disconnected(t, redises[1])
	c.settles(t, before, reloads/4)

	calls.letGo(t, 3)
	for _, a := range calls.answers {
		a.want(t, http.StatusOK)
	}
	eventually(t, patience, "all that entered was answered", func() bool {
		return c.metric(t, "requests_total") == float64(answers.Load())
	})
	if n := c.metric(t, "store_errors_total", `operation="admit"`); n != 0 {
		t.Errorf("store_errors_total of admits: got %v, want 0", n)
	}
	c.Stop()
	for _, redis := range redises {
		disconnected(t, redis)
		left(t, redis)
	}
}
