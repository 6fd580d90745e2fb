// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// newTestRegistry returns a registry of the kind that Caddy makes for each
// config, with the metrics in it.
func newTestRegistry(t *testing.T) *prometheus.Registry {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	if err := registerMetrics(reg); err != nil {
		t.Fatalf("registerMetrics: %v", err)
	}
	return reg
}

// testPool returns the name of a pool that has counted nothing yet and whose
// series end with the test.
func testPool(t *testing.T) string {
	pool := strings.ToLower(t.Name())
	t.Cleanup(func() {
		requestsTotal.DeletePartialMatch(prometheus.Labels{"pool": pool})
		decisionsTotal.DeletePartialMatch(prometheus.Labels{"pool": pool})
	})
	return pool
}

// setGauges makes the gauges show a snapshot for the time of the test.
func setGauges(t *testing.T, s gaugeSnapshot) {
	t.Helper()
	before := gauges.snapshot
	gauges.snapshot = func() gaugeSnapshot { return s }
	t.Cleanup(func() { gauges.snapshot = before })
}

// series returns the series of one pool (or all, if pool is empty) that belong
// to a metric, as "label=value …: value".
func series(t *testing.T, reg prometheus.Gatherer, metric, pool string) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatalf("Gather: %v", err)
	}
	got := map[string]float64{}
	for _, f := range families {
		if f.GetName() != "caddy_stripe_ratelimit_"+metric {
			continue
		}
		for _, m := range f.GetMetric() {
			var labels []string
			mine := pool == ""
			for _, l := range m.GetLabel() {
				switch {
				case l.GetName() != "pool":
					labels = append(labels, l.GetName()+"="+l.GetValue())
				case l.GetValue() == pool:
					mine = true
				}
			}
			if mine {
				got[strings.Join(labels, " ")] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return got
}

func TestMetrics_Lint(t *testing.T) {
	reg, pool := newTestRegistry(t), testPool(t)
	limit, err := limiters.NewRate(pool, "rate", 1, time.Second, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	newPoolMetrics(pool)
	newLimitMetrics(pool, limit)
	newStoreObserver()("admit", time.Millisecond, nil)
	utilizationUnknown.WithLabelValues(pool).Inc()
	t.Cleanup(func() { utilizationUnknown.DeleteLabelValues(pool) })
	setGauges(t, gaugeSnapshot{store: "redis", nodes: map[string]bool{"127.0.0.1:6379": false}, control: new(controlGauge), pools: []poolGauges{{
		pool: pool, critical: 1,
		limits:  []limitGauge{{kind: "rate", name: "rate", source: "config", strength: 2}},
		workers: &shedding.WorkersStatus{Utilization: math.NaN()},
		fleet:   &shedding.FleetStatus{Claim: 1},
	}}})

	problems, err := testutil.GatherAndLint(reg)
	if err != nil {
		t.Fatalf("Gather: %v", err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}

	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range families {
		names = append(names, f.GetName())
	}
	want := []string{
		"caddy_stripe_ratelimit_decisions_total",
		"caddy_stripe_ratelimit_fleet_allocation",
		"caddy_stripe_ratelimit_fleet_claims",
		"caddy_stripe_ratelimit_fleet_in_flight",
		"caddy_stripe_ratelimit_fleet_instances",
		"caddy_stripe_ratelimit_in_flight",
		"caddy_stripe_ratelimit_instances",
		"caddy_stripe_ratelimit_limit_mode",
		"caddy_stripe_ratelimit_overrides",
		"caddy_stripe_ratelimit_panics_total",
		"caddy_stripe_ratelimit_requests_total",
		"caddy_stripe_ratelimit_shed_probability",
		"caddy_stripe_ratelimit_store_breaker_open",
		"caddy_stripe_ratelimit_store_duration_seconds",
		"caddy_stripe_ratelimit_store_errors_total",
		"caddy_stripe_ratelimit_store_info",
		"caddy_stripe_ratelimit_switch_changes_total",
		"caddy_stripe_ratelimit_switches",
		"caddy_stripe_ratelimit_worker_shed_level",
		"caddy_stripe_ratelimit_worker_utilization",
		"caddy_stripe_ratelimit_worker_utilization_unknown_total",
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}

// A reload brings a new registry while requests of the old config go on.
func TestMetrics_SurviveReloads(t *testing.T) {
	pool := testPool(t)
	newTestRegistry(t)
	old := newPoolMetrics(pool)
	old.request(shedding.Get, outcomeAllowed)

	reg := newTestRegistry(t)
	if err := registerMetrics(reg); err != nil {
		t.Fatalf("second handler of one config: %v", err)
	}
	newPoolMetrics(pool).request(shedding.Get, outcomeAllowed)
	old.request(shedding.Get, outcomeAllowed)

	got := series(t, reg, "requests_total", pool)["criticality=get outcome=allowed"]
	if got != 3 {
		t.Errorf("allowed after a reload: got %v, want 3", got)
	}
}

func TestMetrics_RegisterReportsClash(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "caddy_stripe_ratelimit_in_flight", Help: "Not ours."}))
	if err := registerMetrics(reg); err == nil {
		t.Error("a metric of the same name and other labels: got no error")
	}
}

func TestPoolMetrics(t *testing.T) {
	reg, pool := newTestRegistry(t), testPool(t)
	m := newPoolMetrics(pool)
	m.request(shedding.Critical, outcomeDenied)
	m.request(0, outcomeExempt)
	m.request(0, outcomeExempt)
	m.request(shedding.Post, outcomePanic)

	want := map[string]float64{
		"criticality=unknown outcome=exempt": 2,
		"criticality=unknown outcome=panic":  0,
	}
	for _, c := range []string{"test_mode", "get", "post", "critical"} {
		for _, o := range []string{"allowed", "denied", "shed", "store_error", "panic"} {
			want["criticality="+c+" outcome="+o] = 0
		}
	}
	want["criticality=critical outcome=denied"] = 1
	want["criticality=post outcome=panic"] = 1
	if diff := cmp.Diff(want, series(t, reg, "requests_total", pool)); diff != "" {
		t.Errorf("requests_total (-want +got):\n%s", diff)
	}

	// A combination that is not expected is counted all the same.
	m.request(shedding.Get, outcomeShed)
	if got := series(t, reg, "requests_total", pool)["criticality=get outcome=shed"]; got != 1 {
		t.Errorf("shed: got %v, want 1", got)
	}
}

func TestLimitMetrics(t *testing.T) {
	reg, pool := newTestRegistry(t), testPool(t)
	limit, err := limiters.NewConcurrency(pool, "uploads", 3, limiters.DefaultLease)
	if err != nil {
		t.Fatal(err)
	}
	m := newLimitMetrics(pool, limit)
	m.decision(false, false, limiters.Allowed)
	m.decision(false, false, limiters.Allowed)
	m.decision(false, false, limiters.Denied)
	m.decision(false, false, limiters.NotEvaluated) // cannot happen; must not panic
	m.decision(true, false, limiters.NotEvaluated)
	m.decision(true, false, limiters.Unknown)
	m.decision(false, true, limiters.Allowed)
	m.decision(false, true, limiters.Denied)
	m.decision(true, true, limiters.Denied)
	m.decision(true, true, limiters.NotEvaluated)
	m.noIdentity(false)

	want := map[string]float64{}
	for labels, v := range map[string]float64{
		"mode=enforce outcome=allowed": 2, "mode=enforce outcome=denied": 1,
		"mode=enforce outcome=store_error": 0, "mode=enforce outcome=no_identity": 1,
		"mode=dark outcome=allowed": 0, "mode=dark outcome=denied": 0, "mode=dark outcome=not_evaluated": 2,
		"mode=enforce outcome=local_allowed": 1, "mode=enforce outcome=local_denied": 1,
		"mode=dark outcome=local_allowed": 0, "mode=dark outcome=local_denied": 1,
		"mode=dark outcome=store_error": 1, "mode=dark outcome=no_identity": 0,
	} {
		want["kind=concurrency limit=uploads "+labels] = v
	}
	if diff := cmp.Diff(want, series(t, reg, "decisions_total", pool)); diff != "" {
		t.Errorf("decisions_total (-want +got):\n%s", diff)
	}
}

func TestGauges(t *testing.T) {
	reg := newTestRegistry(t)
	rate := func(name, source string, strength float64) limitGauge {
		return limitGauge{kind: "rate", name: name, source: source, strength: strength}
	}
	setGauges(t, gaugeSnapshot{store: "memory", pools: []poolGauges{
		{pool: "a", critical: 1, nonCritical: 2, limits: []limitGauge{rate("rate", "config", 1), rate("candidate", "switch", 0)}},
		// The same pool again, as during a reload: a pedantic registry refuses
		// a series that is sent twice.
		{pool: "a", critical: 10, nonCritical: 20, limits: []limitGauge{rate("rate", "config", 1.25)}},
		{pool: "b"},
	}})
	cases := []struct {
		metric, pool string
		want         map[string]float64
	}{
		{"in_flight", "a", map[string]float64{"type=critical": 11, "type=non_critical": 22}},
		{"in_flight", "b", map[string]float64{"type=critical": 0, "type=non_critical": 0}},
		{"limit_mode", "a", map[string]float64{
			"kind=rate limit=rate source=config":      1.25,
			"kind=rate limit=candidate source=switch": 0,
		}},
		{"limit_mode", "b", map[string]float64{}},
		{"store_info", "", map[string]float64{"store=memory": 1}},
	}
	for _, c := range cases {
		if diff := cmp.Diff(c.want, series(t, reg, c.metric, c.pool)); diff != "" {
			t.Errorf("%s of pool %q (-want +got):\n%s", c.metric, c.pool, diff)
		}
	}

	setGauges(t, gaugeSnapshot{})
	for _, metric := range []string{"in_flight", "limit_mode", "store_info"} {
		if got := series(t, reg, metric, ""); len(got) != 0 {
			t.Errorf("%s after the pools are gone: got %v, want nothing", metric, got)
		}
	}
}

func TestMode_Strength(t *testing.T) {
	percent := func(n int) *int { return &n }
	cases := []struct {
		name string
		mode *Mode
		want float64
	}{
		{"no mode is enforced", nil, 2},
		{"off", &Mode{State: "off"}, 0},
		{"dark", &Mode{State: "dark"}, 1},
		{"enforce", &Mode{State: "enforce"}, 2},
		{"enforce 25", &Mode{State: "enforce", Percent: percent(25)}, 1.25},
		{"enforce 0 is dark", &Mode{State: "enforce", Percent: percent(0)}, 1},
		{"enforce 100", &Mode{State: "enforce", Percent: percent(100)}, 2},
	}
	for _, c := range cases {
		if got := c.mode.strength(); got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

func TestStoreObserver(t *testing.T) {
	storeErrorsTotal.Reset()
	storeDuration.Reset()
	reg := newTestRegistry(t)
	observe := newStoreObserver()
	observe("admit", 300*time.Microsecond, nil)
	observe("admit", 50*time.Millisecond, fmt.Errorf("admit: %w", context.DeadlineExceeded))
	observe("admit", time.Millisecond, errors.New("sk_live_123 has no reason of its own"))
	observe("new_operation", time.Millisecond, io.EOF)

	got := series(t, reg, "store_errors_total", "")
	if len(got) != 7*15+1 {
		t.Errorf("store_errors_total: got %d series, want 15 reasons of 7 operations and 1", len(got))
	}
	want := map[string]float64{
		"operation=admit reason=timeout":            1,
		"operation=admit reason=other":              1,
		"operation=new_operation reason=connection": 1,
	}
	maps.DeleteFunc(got, func(_ string, v float64) bool { return v == 0 })
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("store_errors_total (-want +got):\n%s", diff)
	}

	var sample dto.Metric
	if err := storeDuration.WithLabelValues("admit").(prometheus.Metric).Write(&sample); err != nil {
		t.Fatal(err)
	}
	got = map[string]float64{}
	for _, b := range sample.GetHistogram().GetBucket() {
		got[fmt.Sprint(b.GetUpperBound())] = float64(b.GetCumulativeCount())
	}
	want = map[string]float64{
		"0.0001": 0, "0.00025": 0, "0.0005": 1, "0.001": 2, "0.0025": 2,
		"0.005": 2, "0.01": 2, "0.025": 2, "0.05": 3, "0.1": 3,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("store_duration_seconds (-want +got):\n%s", diff)
	}
}

// A request must not cost the metrics more than atomic additions.
func TestMetrics_HotPathDoesNotAllocate(t *testing.T) {
	name := testPool(t)
	pool := newPoolMetrics(name)
	limit, err := limiters.NewRate(name, "rate", 1, time.Second, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	rate := newLimitMetrics(name, limit)
	observe := newStoreObserver()
	n := testing.AllocsPerRun(100, func() {
		pool.request(shedding.Get, outcomeAllowed)
		rate.decision(false, false, limiters.Allowed)
		observe("admit", time.Millisecond, nil)
	})
	if n != 0 {
		t.Errorf("got %v allocations a request, want 0", n)
	}
}
