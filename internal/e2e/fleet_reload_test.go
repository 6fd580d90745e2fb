// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/caddyproc"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// reload gives a Caddy of the fleet another config.
func (f *fleet) reload(t testing.TB, i int, cfg config) {
	t.Helper()
	f.caddys[i] = f.caddys[i].load(t, cfg)
}

// A config that is only checked, or that cannot start, joins no fleet.
func TestFleet_OnlyRunningConfigsJoin(t *testing.T) {
	f := newFleet(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "Caddyfile")
	if err := os.WriteFile(file, []byte(f.config(hundred).caddyfile(caddyproc.FreePort(t))), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := caddyproc.Command(t, dir, "validate", "--config", file, "--adapter", "caddyfile")
	redistest.TieToParent(cmd)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("caddy validate: %v\n%s", err, out)
	}
	c := start(t, config{redis: f.redis.Addr, site: "respond ok"})
	bad := f.config(hundred)
	bad.site += "\n tls no-such-cert.pem no-such-key.pem" // fails late, once handlers are provisioned
	if status, body := c.Load(t, bad.caddyfile(caddyproc.FreePort(t))); status == http.StatusOK {
		t.Fatalf("load of a config that cannot start: got %d %s, want an error", status, body)
	}
	if n := f.redis.Commands(t)["evalsha"]; n != 0 {
		t.Errorf("%d scripts were called before a config ran", n)
	}
	if state := f.state(t); len(state.numbers) != 0 || len(state.entries) != 0 {
		t.Errorf("the fleet has %v, want nothing", state)
	}

	f.start(t, 1, hundred)
	before := f.state(t)
	bad = f.config("fleet 7 reserve 0%")
	bad.site += "\n tls no-such-cert.pem no-such-key.pem"
	if status, body := f.caddys[0].Load(t, bad.caddyfile(caddyproc.FreePort(t))); status == http.StatusOK {
		t.Fatalf("load of a config that cannot start: got %d %s, want an error", status, body)
	}
	state := f.syncs(t, before, 3)
	if err := state.right(f.ids, 0, 0, 0); err != nil {
		t.Error(err)
	}
	if got := state.allocation(); got != allocation {
		t.Errorf("after a config that did not start: %d slots, want %d", got, allocation)
	}
}

// A reload keeps who a Caddy is to the fleet, its claim and what is in progress.
func TestFleet_ReloadKeepsAll(t *testing.T) {
	f := newFleet(t)
	f.start(t, 2, hundred)
	first, _ := f.fill(t, 0, 30, 5)
	charge := new(held)
	if a, ok := charge.begin(t, f.caddys[0], f.critical.call(), "/charges"); !ok {
		t.Fatalf("critical: got status %d, want it in progress", a.status)
	}
	before := f.syncs(t, f.state(t), 1)
	f.reload(t, 0, f.config(hundred+"\n rate 1000/s"))
	after := f.state(t)
	if err := after.right(f.ids, 30, 1, 0); err != nil {
		t.Errorf("right after the reload: %v", err)
	}
	if b, a := before.entries[f.ids[0]], after.entries[f.ids[0]]; a.claim < 30 || a.seq < b.seq {
		t.Errorf("the Caddy was %+v before the reload and is %+v", b, a)
	}
	// What the old config began counts in the new one.
	second, _ := f.fill(t, 0, usable-30, 5)
	for more := true; more; {
		_, more = second.begin(t, f.caddys[0], f.others.call(), "")
	}
	if n := f.others.peak(); n < usable || n > allocation+f.unjudged(t) {
		t.Errorf("%d were in progress at once, want %d to %d", n, usable, allocation)
	}
	first.letGo(t, 30)
	charge.letGo(t, 1)
	if err := f.syncs(t, f.state(t), 2).right(f.ids, len(second.calls), 0, 0); err != nil {
		t.Errorf("after calls of the old config have ended: %v", err)
	}
	second.letGo(t, len(second.calls))
}

// Numbers that one Caddy is given by a reload hold for all.
func TestFleet_ReloadChangesNumbers(t *testing.T) {
	f := newFleet(t)
	f.start(t, 2, "fleet 10 reserve 20%")
	if err := f.syncs(t, f.state(t), 1).allocated(8); err != nil {
		t.Fatal(err)
	}
	f.reload(t, 0, f.config("fleet 50 reserve 40%"))
	if err := f.syncs(t, f.state(t), 2).allocated(30); err != nil {
		t.Error(err)
	}
	calls, _ := f.fill(t, 1, 28, 5)
	for i, c := range f.caddys {
		if got := c.metric(t, "fleet_allocation"); got != 30 {
			t.Errorf("fleet_allocation of Caddy %d: got %v, want 30", i, got)
		}
	}
	// A reload that says nothing new of the fleet does not bring old numbers back.
	f.reload(t, 1, f.config("fleet 10 reserve 20%\n rate 1000/s"))
	if err := f.syncs(t, f.state(t), 2).allocated(30); err != nil {
		t.Errorf("after a reload with the numbers from before: %v", err)
	}
	f.reload(t, 0, f.config("fleet 20 reserve 50%"))
	f.syncs(t, f.state(t), 2)
	for _, c := range f.caddys {
		f.refused(t, c)
		c.get(t, "/charges").want(t, http.StatusOK)
	}
	calls.letGo(t, len(calls.calls))
	if err := f.syncs(t, f.state(t), 2).allocated(10); err != nil {
		t.Error(err)
	}
	calls, _ = f.fill(t, 1, 9, 5)
	for range 20 {
		calls.begin(t, f.caddys[1], f.others.call(), "")
	}
	if n := len(calls.calls); n > 10+f.unjudged(t) {
		t.Errorf("%d are in progress, want at most 10", n)
	}
	calls.letGo(t, len(calls.calls))
}

// allocated tells if the slots are not so many.
func (s fleetState) allocated(want int64) error {
	if got := s.allocation(); got != want {
		return fmt.Errorf("%d slots for non-critical requests, want %d", got, want)
	}
	return nil
}

// A config without the fleet withdraws the Caddy, once its last call has ended.
func TestFleet_ReloadWithout(t *testing.T) {
	f := newFleet(t)
	f.start(t, 2, hundred)
	cases := []struct {
		name    string
		without config
	}{
		{"module", config{redis: f.redis.Addr, site: "respond ok"}},
		{"fleet", config{redis: f.redis.Addr, site: "stripe_ratelimit {\n rate 1000/s \n} \n respond ok"}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			f.reload(t, 1, c.without)
			if err := f.state(t).right(f.ids[:1], 0, 0, 0); err != nil {
				t.Errorf("after the reload: %v", err)
			}
			f.rejoin(t)
			calls, _ := f.fill(t, 1, 10, 5)
			before := f.syncs(t, f.state(t), 1)
			f.reload(t, 1, c.without)
			if err := f.syncs(t, before, 2).right(f.ids, 10, 0, 0); err != nil {
				t.Errorf("while calls of the old config are in progress: %v", err)
			}
			calls.letGo(t, 10)
			eventually(t, patience, "withdrawn", func() bool { return f.state(t).right(f.ids[:1], 0, 0, 0) == nil })
			f.rejoin(t)
		})
	}
}

// rejoin gives the second Caddy a config with the fleet, in which it has a new
// name.
func (f *fleet) rejoin(t testing.TB) {
	t.Helper()
	f.reload(t, 1, f.config(hundred))
	eventually(t, patience, "registered again", func() bool {
		s := f.state(t)
		for id := range s.entries {
			if id != f.ids[0] && id != f.ids[1] {
				f.ids[1] = id
			}
		}
		return s.right(f.ids, 0, 0, 0) == nil
	})
}

// A fleet that is dark counts what it would shed, one that is off does nothing,
// and a percentage is that of the keys.
func TestFleet_Modes(t *testing.T) {
	const none = "key api_key \n fleet 10 reserve 100% mode "
	f := newFleet(t)
	cfg := func(mode string) config {
		cfg := f.config(none + mode)
		cfg.redis = "" // a fleet of one, which nobody has to ask
		return cfg
	}
	f.caddys = []*caddy{start(t, cfg("enforce"))}
	counted := func(mode, outcome string) float64 {
		return f.caddys[0].metric(t, "decisions_total", `kind="fleet"`, fmt.Sprintf("mode=%q", mode), fmt.Sprintf("outcome=%q", outcome))
	}
	cases := []struct {
		mode          string
		status        int
		enforce, dark float64 // so many more are counted as shed
	}{
		{"enforce", http.StatusServiceUnavailable, 1, 0},
		{"dark", http.StatusOK, 0, 1},
		{"off", http.StatusOK, 0, 0},
		{"enforce 100", http.StatusServiceUnavailable, 1, 0},
		{"enforce 0", http.StatusOK, 0, 1},
	}
	for _, c := range cases {
		f.reload(t, 0, cfg(c.mode))
		enforce, dark, allowed := counted("enforce", "shed"), counted("dark", "shed"), counted("enforce", "allowed")+counted("dark", "allowed")
		f.caddys[0].get(t, "/", bearer("sk_live_x")...).want(t, c.status)
		f.caddys[0].get(t, "/charges", bearer("sk_live_x")...).want(t, http.StatusOK)
		enforce, dark = counted("enforce", "shed")-enforce, counted("dark", "shed")-dark
		if enforce != c.enforce || dark != c.dark {
			t.Errorf("mode %s: %v are counted as shed, %v as what would be; want %v and %v", c.mode, enforce, dark, c.enforce, c.dark)
		}
		allowed = counted("enforce", "allowed") + counted("dark", "allowed") - allowed
		if want := map[bool]float64{true: 0, false: 1}[c.mode == "off"]; allowed != want {
			t.Errorf("mode %s: %v are counted as allowed, want %v", c.mode, allowed, want)
		}
	}

	f.reload(t, 0, cfg("enforce 25"))
	const keys = 200
	shed := 0
	for i := range keys {
		key := bearer(fmt.Sprintf("sk_live_%d", i))
		status := f.caddys[0].get(t, "/", key...).status
		f.caddys[0].get(t, "/", key...).want(t, status)
		if status == http.StatusServiceUnavailable {
			shed++
		}
	}
	// The keys and the secret are always the same, so this is no matter of luck.
	if t.Logf("%d of %d keys are shed", shed, keys); shed < keys*15/100 || shed > keys*35/100 {
		t.Errorf("%d of %d keys are shed, want a quarter", shed, keys)
	}
	f.caddys[0].get(t, "/").want(t, http.StatusOK) // nobody's
}
