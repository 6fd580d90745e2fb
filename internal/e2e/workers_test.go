// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
)

// class is a request of one criticality.
type class struct {
	name, method, path, key string
}

var (
	classTest     = class{"test_mode", http.MethodPost, "/", "sk_test_x"}
	classGet      = class{"get", http.MethodGet, "/", "sk_live_x"}
	classPost     = class{"post", http.MethodPost, "/", "sk_live_x"}
	classCritical = class{"critical", http.MethodPost, "/charges", "sk_live_x"}
)

// sheds sends one request of a class and reports whether it was shed.
func (c *caddy) sheds(t testing.TB, k class) bool {
	t.Helper()
	a := c.do(t, k.method, k.path, bearer(k.key)...)
	if a.status == http.StatusServiceUnavailable {
		if !strings.Contains(a.body, `"code":"overloaded"`) || a.header.Get("Retry-After") == "" {
			t.Errorf("%s: got %v %s, want overloaded and Retry-After", k.name, a.header, a.body)
		}
		return true
	}
	a.want(t, http.StatusOK)
	return false
}

// round sends one request after the other and returns which were shed.
func (c *caddy) round(t testing.TB, classes ...class) (shed []bool) {
	t.Helper()
	for _, k := range classes {
		shed = append(shed, c.sheds(t, k))
	}
	return shed
}

func (c *caddy) shedLevel(t testing.TB) float64 {
	t.Helper()
	return c.metric(t, "worker_shed_level")
}

// A Caddy with too much to do sheds test mode, then GET, then POST, and never
// what is critical; it takes them back in the opposite order. A reload changes
// nothing.
func TestWorkers_Overload(t *testing.T) {
	up := newUpstream(t)
	cfg := config{site: fmt.Sprintf(`
	stripe_ratelimit {
		critical /charges*
		workers 4 grace 0s ramp 3s
	}
	handle_path /charges* {
		reverse_proxy %[1]s
	}
	handle {
		reverse_proxy %[1]s
	}`, up.addr)}
	c := start(t, cfg)
	for i, shed := range c.round(t, classTest, classGet, classPost, classCritical) {
		if shed {
			t.Errorf("request %d is shed by a Caddy that is at rest", i)
		}
	}

	slow := new(held)
	for range 8 {
		if a, ok := slow.begin(t, c, up.call(), "/charges"); !ok {
			t.Fatalf("critical: got status %d, want it in progress", a.status)
		}
	}
	// While the level rises, a class is shed only when those before it are shed
	// altogether.
	for level := 0.0; level < 1; level = c.shedLevel(t) {
		shed := c.round(t, classPost, classGet, classTest, classCritical)
		if shed[0] && !shed[1] || shed[1] && !shed[2] || shed[3] {
			t.Fatalf("level %v and rising: shed of post, get, test_mode, critical: %v", level, shed)
		}
	}
	full := func(when string) {
		t.Helper()
		for range 5 {
			if shed := c.round(t, classTest, classGet, classPost, classCritical); !shed[0] || !shed[1] || !shed[2] || shed[3] {
				t.Fatalf("%s: shed of test_mode, get, post, critical: %v, want all but critical", when, shed)
			}
		}
	}
	full("at level 1")
	counted := func(outcome string) float64 {
		return c.metric(t, "decisions_total", `kind="workers"`, `mode="enforce"`, fmt.Sprintf("outcome=%q", outcome))
	}
	if n := counted("shed"); n < 15 {
		t.Errorf("%v are counted as shed, want at least the last 15", n)
	}

	cfg.site += "\n header X-New 1"
	c = c.load(t, cfg)
	full("after a reload")
	if u := c.metric(t, "worker_utilization"); u < 2 {
		t.Errorf("after a reload: utilization %v, want that of the 8 requests of the old config, 2", u)
	}

	slow.letGo(t, 8)
	for level := 1.0; level > 0; level = c.shedLevel(t) {
		shed := c.round(t, classTest, classGet, classPost, classCritical)
		if shed[2] && !shed[1] || shed[1] && !shed[0] || shed[3] {
			t.Fatalf("level %v and falling: shed of test_mode, get, post, critical: %v", level, shed)
		}
	}
	for i, shed := range c.round(t, classTest, classGet, classPost, classCritical) {
		if shed {
			t.Errorf("request %d is shed by a Caddy that has recovered", i)
		}
	}
}

// gauge is an endpoint that tells how busy somebody is.
type gauge struct {
	url  string
	says atomic.Value // the body of an answer; "" is an error
}

func newGauge(t testing.TB, says string) *gauge {
	g := new(gauge)
	g.says.Store(says)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		body := g.says.Load().(string)
		if body == "" {
			w.WriteHeader(http.StatusInternalServerError)
		}
		fmt.Fprint(w, body)
	}))
	t.Cleanup(server.Close)
	g.url = server.URL
	return g
}

// site is one whose workers listen to the gauge, and are quick.
func (g *gauge) site(options string) string {
	return fmt.Sprintf(`
	stripe_ratelimit {
		critical /charges*
		workers grace 0s ramp 1s utilization probe %s /busy
		%s
	}`, g.url, options)
}

// A probe moves the level; while it fails, the level stays.
func TestWorkers_Probe(t *testing.T) {
	g := newGauge(t, `{"busy": 0.5}`)
	c := start(t, config{site: g.site("") + "\n respond ok"})
	unknown := func() float64 { return c.metric(t, "worker_utilization_unknown_total") }
	eventually(t, patience, "probed", func() bool { return c.metric(t, "worker_utilization") == 0.5 })
	if c.sheds(t, classTest) {
		t.Error("half busy: a request is shed")
	}
	g.says.Store(`{"busy": 3}`)
	eventually(t, patience, "at level 1", func() bool { return c.shedLevel(t) == 1 })

	before, logged := unknown(), len(c.Logs())
	g.says.Store("")
	eventually(t, patience, "without a reading twice", func() bool { return unknown() >= before+2 })
	if u := c.metric(t, "worker_utilization"); !math.IsNaN(u) {
		t.Errorf("utilization: got %v, want NaN", u)
	}
	if shed := c.round(t, classTest, classGet, classPost, classCritical); !shed[0] || !shed[1] || !shed[2] || shed[3] {
		t.Errorf("while the probe fails: shed of test_mode, get, post, critical: %v, want all but critical", shed)
	}
	if !strings.Contains(c.Logs()[logged:], "probe failed") {
		t.Error("the log does not tell that the probe failed")
	}

	g.says.Store(`{"busy": 0}`)
	eventually(t, patience, "at rest", func() bool { return c.shedLevel(t) == 0 })
	for i, shed := range c.round(t, classTest, classGet, classPost, classCritical) {
		if shed {
			t.Errorf("request %d is shed by a Caddy that is at rest", i)
		}
	}
}

// Dark workers count what they would shed, and shed nothing; those that are off
// do neither.
func TestWorkers_Modes(t *testing.T) {
	g := newGauge(t, `{"busy": 3}`)
	cfg := func(mode string) config {
		return config{site: strings.Replace(g.site("key api_key"), "/busy", "/busy mode "+mode, 1) + "\n respond ok"}
	}
	c := start(t, cfg("enforce"))
	eventually(t, patience, "at level 1", func() bool { return c.shedLevel(t) == 1 })
	cases := []struct {
		mode                    string
		shed                    bool
		enforced, dark, allowed float64 // so many more are counted
	}{
		{"enforce", true, 1, 0, 1},
		{"dark", false, 0, 1, 1},
		{"off", false, 0, 0, 0},
		{"enforce 100", true, 1, 0, 1},
		{"enforce 0", false, 0, 1, 1},
	}
	for _, k := range cases {
		c = c.load(t, cfg(k.mode))
		counted := func(labels ...string) float64 {
			return c.metric(t, "decisions_total", append(labels, `kind="workers"`)...)
		}
		enforced, dark, allowed := counted(`mode="enforce"`, `outcome="shed"`), counted(`mode="dark"`, `outcome="shed"`), counted(`outcome="allowed"`)
		if shed := c.round(t, classPost, classCritical); shed[0] != k.shed || shed[1] {
			t.Errorf("mode %s: shed of post, critical: %v, want %v and never", k.mode, shed, k.shed)
		}
		enforced, dark, allowed = counted(`mode="enforce"`, `outcome="shed"`)-enforced, counted(`mode="dark"`, `outcome="shed"`)-dark, counted(`outcome="allowed"`)-allowed
		if enforced != k.enforced || dark != k.dark || allowed != k.allowed {
			t.Errorf("mode %s: %v are counted as shed, %v as what would be, %v as allowed; want %v, %v, %v", k.mode, enforced, dark, allowed, k.enforced, k.dark, k.allowed)
		}
	}
	c = c.load(t, cfg("enforce 25"))
	const keys = 200
	shed := 0
	for i := range keys {
		k := class{"post", http.MethodPost, "/", fmt.Sprintf("sk_live_%d", i)}
		first, second := c.sheds(t, k), c.sheds(t, k)
		if first != second {
			t.Errorf("key %d is shed once, and once not", i)
		}
		if first {
			shed++
		}
	}
	// The keys and the secret are always the same, so this is no matter of luck.
	if t.Logf("%d of %d keys are shed", shed, keys); shed < keys*15/100 || shed > keys*35/100 {
		t.Errorf("%d of %d keys are shed, want a quarter", shed, keys)
	}
	c.do(t, http.MethodPost, "/").want(t, http.StatusOK) // nobody's
}

// open opens /socket and leaves it open until the test ends.
func (c *caddy) open(t testing.TB, header ...string) (status int) {
	t.Helper()
	conn, err := dial(c.addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+c.addr()+"/socket", nil)
	if err != nil {
		t.Fatal(err)
	}
	header = append(header, "Connection", "Upgrade", "Upgrade", "websocket")
	for i := 0; i < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	if err := req.Write(conn); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	return resp.StatusCode
}

// WebSockets last for days: they hold leases, but no worker and no claim.
func TestUpgrades(t *testing.T) {
	const slots = 2
	f := newFleet(t)
	f.start(t, 1, "fleet 10 reserve 80% \n workers 2 grace 0s ramp 1s \n concurrency 4 lease 10m")
	c := f.caddys[0]
	key := bearer("sk_live_socket")
	for range 4 {
		if status := c.open(t, f.others.call().header(key...)...); status != http.StatusSwitchingProtocols {
			t.Fatalf("got status %d, want 101", status)
		}
	}
	if status := c.open(t, f.others.call().header(key...)...); status != http.StatusTooManyRequests {
		t.Errorf("one socket more than the user may have: got status %d, want 429", status)
	}
	// Two samples later that would be known as overload.
	before := f.state(t)
	eventually(t, patience, "at rest", func() bool { return c.metric(t, "worker_utilization") == 0 })
	if err := f.syncs(t, before, 8).right(f.ids, 0, 0, 0); err != nil {
		t.Errorf("with 4 sockets open: %v", err)
	}
	if u := c.metric(t, "worker_utilization"); u != 0 {
		t.Errorf("with 4 sockets open: utilization %v, want 0", u)
	}
	calls := hold(t, c, f.others, slots, bearer("sk_live_other"))
	f.refused(t, c, bearer("sk_live_third")...)
	calls.letGo(t, slots)
}
