// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

func init() { caddy.RegisterModule(testLoad{}) }

// testLoad is a source of utilization that tests set.
type testLoad struct{}

var testUtilization atomic.Int64

func (testLoad) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "stripe_ratelimit.utilization.test_load", New: func() caddy.Module { return new(testLoad) }}
}
func (testLoad) Utilization() float64                             { return float64(testUtilization.Load()) }
func (*testLoad) UnmarshalCaddyfile(d *caddyfile.Dispenser) error { d.Next(); return nil }

// overload makes the workers of a pool, whose ramp is a second, shed all that
// they may, or nothing.
func overload(t *testing.T, name string, on bool) {
	t.Helper()
	testUtilization.Store(0)
	if on {
		testUtilization.Store(3)
	}
	t.Cleanup(func() { testUtilization.Store(0) })
	eventually(t, func() bool {
		time.Sleep(time.Millisecond) // the sampler's second is real
		return poolNamed(name).workers.Level() == shedding.Level(testUtilization.Load()/3)
	})
}

func poolNamed(name string) (p *pool) {
	pools.Range(func(key, value any) bool {
		if key == name {
			p = value.(*pool)
		}
		return true
	})
	return p
}

const allFour = `	stripe_ratelimit {
		critical /charges
		rate 1/h burst 3
		concurrency 5
		fleet 10 reserve 80%
		workers 100 grace 0s ramp 1s utilization test_load
	}`

func TestWorkersShedByClass(t *testing.T) {
	onBothStores(t, func(t *testing.T, s *server, global string) {
		s.load(global, strings.Replace(allFour, "rate 1/h burst 3", "rate 1000/s", 1))
		for _, row := range []struct {
			overload                    bool
			testMode, get, post, charge int
		}{
			{false, 200, 200, 200, 200},
			{true, 503, 503, 503, 200},
			{false, 200, 200, 200, 200},
		} {
			overload(t, "default", row.overload)
			for _, c := range []struct {
				class, method, path, key string
				want                     int
			}{
				{"test_mode", "GET", "/", "sk_test_1", row.testMode},
				{"test_mode over critical", "POST", "/charges", "sk_test_1", row.testMode},
				{"get", "GET", "/", "sk_live_1", row.get},
				{"post", "POST", "/", "sk_live_1", row.post},
				{"critical", "POST", "/charges", "sk_live_1", row.charge},
			} {
				if got := s.send(c.method, c.path, c.key); got.StatusCode != c.want {
					t.Errorf("overload %v, %s: got %d, want %d", row.overload, c.class, got.StatusCode, c.want)
				}
			}
		}
	})
}

// send sends a request and returns the answer, whose body is closed.
func (s *server) send(method, path, key string, header ...string) *http.Response {
	s.t.Helper()
	req, err := http.NewRequest(method, fmt.Sprintf("http://127.0.0.1:%d%s", s.port, path), nil)
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+key)
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := s.hold.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	res.Body.Close()
	return res
}

// What is shed takes nothing of the user's, and what is denied nothing of the
// fleet's.
func TestShedTakesNothing(t *testing.T) {
	onBothStores(t, func(t *testing.T, s *server, global string) {
		s.load(global, allFour)
		overload(t, "default", true)
		for range 10 {
			if got := s.get("sk_live_1"); got != 503 {
				t.Fatalf("at full level: got %d, want 503", got)
			}
		}
		overload(t, "default", false)
		s.want("sk_live_1", 200, 200, 200, 429, 429)

		// The fleet has two slots for others than critical requests.
		first, second := s.held(t.Name()+"1", "sk_a"), s.held(t.Name()+"2", "sk_b")
		for range 5 {
			if got := s.get("sk_c"); got != 503 {
				t.Fatalf("without a slot in the fleet: got %d, want 503", got)
			}
			if got := s.send("POST", "/charges", "sk_charge").StatusCode; got != 200 && got != 429 {
				t.Fatalf("critical without a slot in the fleet: got %d, want 200 or its own 429", got)
			}
		}
		if first() != 200 || second() != 200 {
			t.Fatal("held requests failed")
		}
		eventually(t, func() bool { return s.get("sk_c") == 200 })
		s.want("sk_c", 200, 200, 429) // five 503s took no token
		eventually(t, func() bool {
			f := fleetStatus("default")
			return f.InFlight == 0 && f.Critical == 0
		})
	})
}

func fleetStatus(name string) (status shedding.FleetStatus) {
	fleets.Range(func(key, value any) bool {
		if key.(fleetKey).pool == name {
			status = value.(*fleet).Status()
		}
		return true
	})
	return status
}

func TestDarkShedders(t *testing.T) {
	pool := testPool(t)
	s := newServer(t)
	s.load("", fmt.Sprintf(`	stripe_ratelimit %s {
		critical /charges
		fleet 1 reserve 100%% mode dark
		workers 1 grace 0s ramp 1s utilization test_load mode dark
	}
	header >X-Would {http.stripe_ratelimit.would_reject}`, pool))
	overload(t, pool, true)
	res := s.send("GET", "/", "sk_live_1")
	if res.StatusCode != 200 {
		t.Errorf("dark shedders: got %d, want 200", res.StatusCode)
	}
	if got := res.Header.Get("X-Would"); got != "fleet" && got != "workers" {
		t.Errorf("would_reject: got %q, want a shedder", got)
	}
	ctx := caddy.ActiveContext()
	got := series(t, ctx.GetMetricsRegistry(), "decisions_total", pool)
	for _, name := range []string{"kind=fleet limit=fleet mode=dark outcome=shed", "kind=workers limit=workers mode=dark outcome=shed"} {
		if got[name] != 1 {
			t.Errorf("%s: got %v, want 1; all: %v", name, got[name], got)
		}
	}
}

func TestReloadInMidIncidentKeepsTheLevel(t *testing.T) {
	s := newServer(t)
	s.load("", allFour)
	overload(t, "default", true)
	s.load("", "\theader X-Another thing\n"+allFour)
	if got := poolNamed("default").workers.Level(); got != 1 {
		t.Errorf("level after a reload: got %v, want 1 as before", got)
	}
	s.want("sk_live_1", 503)
}

// A handler inherits the shedders of its pool, and a config without them has
// none.
func TestShedders_InheritedAndRemoved(t *testing.T) {
	s := newServer(t)
	s.load("", "\tstripe_ratelimit /a {\n\t\tworkers 100 grace 0s ramp 1s utilization test_load\n\t}\n\tstripe_ratelimit {\n\t\trate 1000/s\n\t}")
	overload(t, "default", true)
	if got := s.get("sk_live_1"); got != 503 {
		t.Errorf("handler without workers in a pool that has them: got %d, want 503", got)
	}
	s.load("", "\tstripe_ratelimit {\n\t\trate 1000/s\n\t}")
	if got := s.get("sk_live_1"); got != 200 {
		t.Errorf("after workers were removed: got %d, want 200", got)
	}
	// Workers that are configured again later must not begin where these ended.
	eventually(t, func() bool {
		time.Sleep(time.Millisecond)
		return poolNamed("default").workers.Level() < 1
	})
}

func TestOverloadedResponse(t *testing.T) {
	cases := []struct {
		name        string
		shouldRetry string
		criticality shedding.Criticality
		level       shedding.Level
		u           float64
		retryAfter  string
		should      string
	}{
		{"at the start", "", shedding.Get, 0, 0, "1", ""},
		{"at the start, late", "", shedding.Get, 0, 0.999, "2", ""},
		{"at the end", "", shedding.Post, 1, 0.999, "10", ""},
		{"of the fleet, workers at rest", "", shedding.Post, -0.2, 0.999, "2", ""},
		{"test mode", "", shedding.TestMode, 0.5, 0.5, "4", ""},
		{"test mode and auto", "auto", shedding.TestMode, 0.5, 0.5, "", "false"},
		{"get and auto", "auto", shedding.Get, 0.5, 0.5, "4", ""},
	}
	for _, c := range cases {
		h := &Handler{ShouldRetry: c.shouldRetry}
		w := httptest.NewRecorder()
		r := caddyhttp.PrepareRequest(httptest.NewRequest(http.MethodGet, "/", nil), caddy.NewReplacer(), w, nil)
		v := &verdict{outcome: outcomeShed, shedBy: workersShedder, criticality: c.criticality, level: c.level}
		if err := h.reject(w, r, v, c.u); err != nil {
			t.Fatal(err)
		}
		header := w.Header()
		if w.Code != 503 || header.Get("Retry-After") != c.retryAfter || header.Get("Stripe-Should-Retry") != c.should {
			t.Errorf("%s: got %d, Retry-After %q, Stripe-Should-Retry %q; want 503, %q, %q", c.name,
				w.Code, header.Get("Retry-After"), header.Get("Stripe-Should-Retry"), c.retryAfter, c.should)
		}
		for _, name := range []string{"RateLimit", "RateLimit-Policy", "Stripe-Rate-Limited-Reason"} {
			if got := header.Get(name); got != "" {
				t.Errorf("%s: %s is %q, want none", c.name, name, got)
			}
		}
		if body := w.Body.String(); !strings.HasPrefix(body, `{"error":{"type":"api_error","code":"overloaded","message":"`) {
			t.Errorf("%s: body %s", c.name, body)
		}
	}
}

func TestReadUtilization(t *testing.T) {
	cases := []struct {
		name, answer, pointer string
		want                  float64 // negative: an error
	}{
		{"a number", "0.25\n", "", 0.25},
		{"more than full", "3", "", 3},
		{"in JSON", `{"cpu": [{"busy": 0.5}]}`, "/cpu/0/busy", 0.5},
		{"escaped", `{"a/b": {"c~d": 1}}`, "/a~1b/c~0d", 1},
		{"nothing", "", "", -1},
		{"negative", "-1", "", -1},
		{"not a number", "NaN", "", -1},
		{"infinite", "+Inf", "", -1},
		{"text", "busy", "", -1},
		{"no JSON", "0.5 and more", "/cpu", -1},
		{"not there", `{"cpu": 1}`, "/mem", -1},
		{"beyond the list", `[1]`, "/1", -1},
		{"not a number in JSON", `{"cpu": "1"}`, "/cpu", -1},
	}
	for _, c := range cases {
		got, err := readUtilization([]byte(c.answer), c.pointer)
		if (err != nil) != (c.want < 0) || err == nil && got != c.want {
			t.Errorf("%s: got %v, %v, want %v", c.name, got, err, c.want)
		}
	}
}

func FuzzReadUtilization(f *testing.F) {
	f.Add([]byte(`{"cpu": [{"busy": 0.5}]}`), "/cpu/0/busy")
	f.Add([]byte("0.5"), "")
	f.Fuzz(func(t *testing.T, answer []byte, pointer string) {
		u, err := readUtilization(answer, pointer)
		if err == nil && (math.IsNaN(u) || math.IsInf(u, 0) || u < 0) {
			t.Errorf("readUtilization(%q, %q) = %v, want a finite number of at least 0", answer, pointer, u)
		}
	})
}

func TestProbe(t *testing.T) {
	var status atomic.Int64
	status.Store(200)
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(int(status.Load()))
		fmt.Fprint(w, `{"busy": 0.75}`)
	}))
	defer upstream.Close()
	pool := testPool(t)
	s := newServer(t)
	s.load("", fmt.Sprintf("\tstripe_ratelimit %s {\n\t\tworkers utilization probe %s /busy\n\t}", pool, upstream.URL))
	utilization := func() float64 {
		ctx := caddy.ActiveContext()
		return series(t, prometheus.Gatherer(ctx.GetMetricsRegistry()), "worker_utilization", pool)[""]
	}
	eventually(t, func() bool { return utilization() == 0.75 })
	status.Store(500)
	eventually(t, func() bool { return math.IsNaN(utilization()) })
	status.Store(200)
	eventually(t, func() bool { return utilization() == 0.75 })
}

func TestProbe_Stale(t *testing.T) {
	p := new(Probe)
	now := time.Now()
	if got := p.utilizationAt(now); !math.IsNaN(got) {
		t.Errorf("before the first answer: got %v, want NaN", got)
	}
	p.last.Store(&reading{0.5, now})
	if got := p.utilizationAt(now.Add(probeStale)); got != 0.5 {
		t.Errorf("3 s old: got %v, want 0.5", got)
	}
	if got := p.utilizationAt(now.Add(probeStale + 1)); !math.IsNaN(got) {
		t.Errorf("older: got %v, want NaN", got)
	}
}
