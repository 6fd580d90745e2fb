// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// apiSite is two Caddys of one pool under a small load, with a Prometheus that
// evaluates the rules of examples/prometheus.
type apiSite struct {
	redis    *redistest.Server
	upstream *upstream
	blind    atomic.Bool // the probe does not answer
	config   config
	caddys   [2]*caddy
	metrics  *prometheus
}

func startAPISite(t *testing.T) *apiSite {
	s := &apiSite{redis: redistest.Start(t), upstream: newUpstream(t)}
	probe := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if s.blind.Load() {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		fmt.Fprint(w, "0.5")
	}))
	t.Cleanup(probe.Close)
	s.config = config{redis: s.redis.Addr, site: fmt.Sprintf(`
	stripe_ratelimit api {
		critical /charges
		rate 50/s burst 50
		rate candidate 1/h match /search mode dark
		concurrency 20
		fleet 10 reserve 50%%
		workers utilization probe %s
	}
	reverse_proxy %s`, probe.URL, s.upstream.addr)}
	for i := range s.caddys {
		s.caddys[i] = start(t, s.config)
	}
	s.metrics = startPrometheus(t, s.caddys[0].Admin, s.caddys[1].Admin)
	during(t, func(ctx context.Context, client *http.Client) {
		for n := 0; sleep(ctx, 20*time.Millisecond); n++ {
			// An instance that is dead does not answer.
			_, _ = s.caddys[0].try(ctx, client, http.MethodGet, "/", bearer(fmt.Sprint("sk_live_", n%20))...)
		}
	})
	return s
}

// during runs something in the background until the returned function is called,
// at the latest by the end of the test.
func during(t testing.TB, run func(ctx context.Context, client *http.Client)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	client := newClient(t, false)
	var wg sync.WaitGroup
	wg.Go(func() { run(ctx, client) })
	stop = func() {
		cancel()
		wg.Wait()
	}
	t.Cleanup(stop)
	return stop
}

// sleep waits, and reports whether ctx still stands.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// A Prometheus with the shipped rules sees an API through a bad day: the right
// alerts fire, and clear when it is over. Times of the rules are scaled, see
// scaleRules; their real times are tested in examples/prometheus/rules_test.yml.
func TestAlerts(t *testing.T) {
	s := startAPISite(t)
	incidents := []struct {
		what  string
		begin func() (end func())
		fires []alert
	}{
		{"a client runs wild, and searches too", func() func() {
			return during(t, func(ctx context.Context, client *http.Client) {
				for n := 0; sleep(ctx, 2*time.Millisecond); n++ {
					path := "/"
					if n%10 == 0 {
						path = "/search"
					}
					_, _ = s.caddys[0].try(ctx, client, http.MethodGet, path, bearer("sk_live_wild")...)
				}
			})
		}, []alert{
			`Triggered{kind="rate", limit="rate", pool="api"}`,
			`DeniesMuch{kind="rate", limit="rate", pool="api"}`,
			`WouldReject{kind="rate", limit="candidate", pool="api"}`,
		}},
		{"the fleet is full", func() func() {
			var stops []func()
			for n := range 8 { // of which five are let in
				stops = append(stops, during(t, func(ctx context.Context, client *http.Client) {
					for sleep(ctx, 50*time.Millisecond) {
						_, _ = s.caddys[0].try(ctx, client, http.MethodGet, "/hold",
							s.upstream.call().header(bearer(fmt.Sprint("sk_live_slow", n))...)...)
					}
				}))
			}
			return func() {
				for _, stop := range stops {
					stop()
				}
			}
		}, []alert{
			`Shedding{kind="fleet", pool="api"}`,
			`SheddingForLong{pool="api"}`,
		}},
		{"the probe fails", func() func() {
			s.blind.Store(true)
			return func() { s.blind.Store(false) }
		}, []alert{
			`Blind{pool="api"}`,
		}},
		{"Redis dies", func() func() {
			s.redis.Kill()
			return s.redis.Restart
		}, []alert{
			`FailOpen{kind="rate", pool="api"}`,
			alert(fmt.Sprintf(`BreakerOpen{node="%s"}`, s.redis.Addr)),
		}},
		{"an instance dies", func() func() {
			admin := s.caddys[1].Admin
			s.caddys[1].Kill()
			return func() {
				s.config.global = "admin " + admin
				s.caddys[1] = start(t, s.config)
			}
		}, []alert{
			alert(fmt.Sprintf(`InstanceLost{instance="%s"}`, s.caddys[1].Admin)),
		}},
	}

	// An ordinary day: some scrapes of both, and nothing happens.
	eventually(t, patience, "scraped and evaluated some times", func() bool {
		return len(s.metrics.query(t, `count_over_time(up[1h]) >= 10`)) == len(s.caddys)
	})
	// To a machine that stalls, instances may look lost and a store slow or gone.
	expected := map[string]bool{"InstanceLost": true, "StoreSlow": true, "FailOpen": true, "BreakerOpen": true}
	s.wantOnly(t, expected)

	// Somebody turns something off for the day.
	expected["SwitchOn"] = true
	const change = `{"pool": "api", "kind": "concurrency", "mode": "dark", "ttl": "1h", "reason": "TestAlerts"}`
	switched := time.Now()
	s.switches(t, http.MethodPost, change)

	for _, incident := range incidents {
		t.Run(incident.what, func(t *testing.T) {
			began := time.Now()
			end := incident.begin()
			for _, a := range incident.fires {
				expected[a.name()] = true
				eventually(t, patience, string(a)+" has fired", func() bool { return s.metrics.fired(t, a, began) })
			}
			end()
			for _, a := range incident.fires {
				eventually(t, patience, string(a)+" has cleared", func() bool { return !s.metrics.firing(t, a) })
			}
			s.wantOnly(t, expected)
		})
	}
	eventually(t, patience, "SwitchOn has fired", func() bool {
		return s.metrics.fired(t, `SwitchOn{scope="fleet", mode="dark"}`, switched)
	})
	s.switches(t, http.MethodDelete, `{"pool": "api", "kind": "concurrency"}`)

	eventually(t, patience, "all alerts have cleared", func() bool {
		return len(s.metrics.query(t, `ALERTS{alertstate="firing"}`)) == 0
	})
	s.checkDashboard(t)
}

// switches asks the admin API to change a switch.
func (s *apiSite) switches(t *testing.T, method, change string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method,
		"http://"+s.caddys[0].Admin+"/stripe_ratelimit/switches", strings.NewReader(change))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := newClient(t, false).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("%s switches: got %s, want 200", method, resp.Status)
	}
}

// wantOnly fails the test if other alerts than these have ever fired.
func (s *apiSite) wantOnly(t *testing.T, expected map[string]bool) {
	t.Helper()
	for _, fired := range s.metrics.query(t, `last_over_time(ALERTS{alertstate="firing"}[1h])`) {
		if name := alertName(fired); !expected[name] {
			t.Errorf("%s has fired: %v", name, fired)
		}
	}
}

// checkDashboard fails the test if a panel of the dashboard has nothing to show
// after all that.
func (s *apiSite) checkDashboard(t *testing.T) {
	t.Helper()
	text, err := os.ReadFile("../../examples/grafana/stripe_ratelimit.json")
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	queries := 0
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			queries++
			expr := strings.NewReplacer("$__rate_interval", "10m", "$pool", ".+", "$instance", ".+").Replace(target.Expr)
			if len(s.metrics.query(t, expr)) == 0 {
				t.Errorf("dashboard: %s: no data for %s", panel.Title, expr)
			}
		}
	}
	if queries < 30 {
		t.Errorf("dashboard: got %d queries, want all of them", queries)
	}
}
