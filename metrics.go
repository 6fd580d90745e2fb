// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"errors"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

const (
	metricsNamespace = "caddy"
	metricsSubsystem = "stripe_ratelimit"
)

// The collectors belong to the process, not to a config: Caddy makes a registry
// for each config, and a counter that started again with every reload, or that
// requests of the last config could no longer reach, would be of no use.
//
// Label values come from the config and from fixed sets, never from a request.
var (
	requestsTotal = prometheus.NewCounterVec(counterOpts("requests_total",
		"Requests by what became of them, once for each pool they entered."),
		[]string{"pool", "criticality", "outcome"})

	decisionsTotal = prometheus.NewCounterVec(counterOpts("decisions_total",
		"Decisions of each limit. In mode dark nothing is rejected, whatever the outcome."),
		[]string{"pool", "kind", "limit", "mode", "outcome"})

	limitMode = gaugeDesc("limit_mode",
		"How each limit is applied: 0 off, 1 dark, 2 enforced, 1.25 enforced for 25 percent of the identities. Of handlers that differ, the strongest.",
		"pool", "kind", "limit", "source")

	inFlight = gaugeDesc("in_flight",
		"Requests in progress on this instance, those of superseded configs included.",
		"pool", "type")
)

// collectors are all that there are.
var collectors = []prometheus.Collector{requestsTotal, decisionsTotal, storeErrorsTotal, storeDuration, utilizationUnknown, switchChangesTotal, panicsTotal, gauges}

func counterOpts(name, help string) prometheus.CounterOpts {
	return prometheus.CounterOpts{Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: name, Help: help}
}

func gaugeDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(metricsNamespace, metricsSubsystem, name), help, labels, nil)
}

// registerMetrics makes the metrics part of a config's registry. It is to be
// called first thing in every Provision: a config that fails later has replaced
// the admin endpoint by then, and /metrics would lack what it did not register.
func registerMetrics(reg *prometheus.Registry) error {
	for _, c := range collectors {
		var already prometheus.AlreadyRegisteredError
		if err := reg.Register(c); err != nil && !errors.As(err, &already) {
			return err
		}
	}
	return nil
}

// poolMetrics counts the requests of one pool. It is safe for concurrent use.
type poolMetrics struct {
	pool     string
	requests [shedding.Critical + 1][len(outcomes)]prometheus.Counter
}

// newPoolMetrics resolves the counters of a pool, so that a request costs no
// lookup by labels and zeros are visible for all that can happen.
func newPoolMetrics(pool string) *poolMetrics {
	m := &poolMetrics{pool: pool}
	for c := range m.requests {
		can := []outcome{outcomeAllowed, outcomeDenied, outcomeShed, outcomeStoreError, outcomePanic}
		if c == 0 { // not classified
			can = []outcome{outcomeExempt, outcomePanic}
		}
		for _, o := range can {
			m.requests[c][o] = m.counter(shedding.Criticality(c), o)
		}
	}
	return m
}

func (m *poolMetrics) counter(c shedding.Criticality, o outcome) prometheus.Counter {
	return requestsTotal.WithLabelValues(m.pool, c.String(), o.String())
}

// request counts one request. c is the zero Criticality for requests that were
// not classified.
func (m *poolMetrics) request(c shedding.Criticality, o outcome) {
	counter := m.requests[c][o]
	if counter == nil {
		counter = m.counter(c, o)
	}
	counter.Inc()
}

// limitMetrics counts the decisions of one limit. It is safe for concurrent use.
type limitMetrics struct {
	enforce, dark struct {
		decisions  [limiters.NotEvaluated + 1]prometheus.Counter
		local      [limiters.Denied + 1]prometheus.Counter
		noIdentity prometheus.Counter
	}
}

// newLimitMetrics resolves the counters of a limit. Both modes are visible from
// the start, because a switch or a reload may change the mode.
func newLimitMetrics(pool string, l *limiters.Limit) *limitMetrics {
	counter := func(mode, outcome string) prometheus.Counter {
		return decisionsTotal.WithLabelValues(pool, l.Kind.String(), l.Name, mode, outcome)
	}
	m := new(limitMetrics)
	for o := limiters.Unknown; o <= limiters.NotEvaluated; o++ {
		m.dark.decisions[o] = counter("dark", o.String())
		if o != limiters.NotEvaluated { // which happens to dark limits alone
			m.enforce.decisions[o] = counter("enforce", o.String())
		}
	}
	for o := limiters.Allowed; o <= limiters.Denied; o++ {
		m.dark.local[o], m.enforce.local[o] = counter("dark", "local_"+o.String()), counter("enforce", "local_"+o.String())
	}
	m.dark.noIdentity = counter("dark", "no_identity")
	m.enforce.noIdentity = counter("enforce", "no_identity")
	return m
}

// decision counts what the limit said to one request. What an instance decided
// alone is told apart: it is not what the limit would have said.
func (m *limitMetrics) decision(dark, local bool, o limiters.Outcome) {
	mode := &m.enforce
	if dark {
		mode = &m.dark
	}
	counter := mode.decisions[o]
	if local && int(o) < len(mode.local) {
		counter = mode.local[o]
	}
	if counter != nil {
		counter.Inc()
	}
}

// noIdentity counts a request that the limit could not be applied to because
// every source of its key was empty.
func (m *limitMetrics) noIdentity(dark bool) {
	if dark {
		m.dark.noIdentity.Inc()
		return
	}
	m.enforce.noIdentity.Inc()
}

// gaugeSnapshot is the state that the gauges show. Two entries of one name are
// allowed: in-flight requests are added up, and the strongest mode is shown.
type gaugeSnapshot struct {
	store   string          // memory, redis, redis_cluster or redis_sentinel; empty: none yet
	nodes   map[string]bool // of Redis: whether the breaker is open
	control *controlGauge
	pools   []poolGauges
}

type poolGauges struct {
	pool        string
	critical    int64 // in progress, all configs
	nonCritical int64
	limits      []limitGauge
	workers     *shedding.WorkersStatus // nil: the running config has none
	fleet       *shedding.FleetStatus   // likewise
}

type limitGauge struct {
	kind     string
	name     string
	source   string  // what decided the mode: config or switch
	strength float64 // of the effective mode; see Mode.strength
}

// strength orders modes: 0 off, 1 dark, 1 to 2 enforced for part of the
// identities, 2 enforced. The effective mode of several is their minimum. No
// mode is the default, enforced.
func (m *Mode) strength() float64 { return m.level().Strength() }

// level is the mode as it is compared with others.
func (m *Mode) level() control.Mode {
	switch {
	case m == nil:
		return control.Enforce
	case m.State == "off":
		return control.Off
	case m.State == "dark":
		return control.Dark
	case m.Percent != nil:
		return control.EnforcePercent(*m.Percent)
	}
	return control.Enforce
}

// gauges reads the state when it is scraped, so that pools and limits that are
// gone leave no series behind. What it reads is set once, before any config.
var gauges = &gaugeCollector{snapshot: func() gaugeSnapshot { return gaugeSnapshot{} }}

type gaugeCollector struct{ snapshot func() gaugeSnapshot }

// Describe implements prometheus.Collector.
func (*gaugeCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- limitMode
	ch <- storeInfo
	ch <- storeBreakerOpen
	ch <- inFlight
	for _, desc := range slices.Concat(shedderGauges, controlGauges) {
		ch <- desc
	}
}

// Collect implements prometheus.Collector. It sends no series twice, because
// one such mistake would turn all of Caddy's /metrics into an error.
func (c *gaugeCollector) Collect(ch chan<- prometheus.Metric) {
	// Prometheus collects in a goroutine of its own, where a panic ends the process.
	_ = safely.Do("metrics", func() { c.collect(ch) })
}

func (c *gaugeCollector) collect(ch chan<- prometheus.Metric) {
	type limitKey struct {
		pool, name string
		kind       string
	}
	var (
		snapshot = c.snapshot()
		running  = make(map[string][2]int64)
		limits   = make(map[limitKey]limitGauge)
	)
	for _, p := range snapshot.pools {
		n := running[p.pool]
		running[p.pool] = [2]int64{n[0] + p.critical, n[1] + p.nonCritical}
		for _, l := range p.limits {
			key := limitKey{p.pool, l.name, l.kind}
			if seen, ok := limits[key]; !ok || l.strength > seen.strength {
				limits[key] = l
			}
		}
	}

	send := func(desc *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	if snapshot.store != "" {
		send(storeInfo, 1, snapshot.store)
	}
	if snapshot.control != nil {
		collectControl(snapshot.control, send)
	}
	collectNodes(snapshot.nodes, send)
	for pool, n := range running {
		send(inFlight, float64(n[0]), pool, "critical")
		send(inFlight, float64(n[1]), pool, "non_critical")
	}
	for _, p := range snapshot.pools {
		collectShedders(p, send)
	}
	for key, l := range limits {
		send(limitMode, l.strength, key.pool, key.kind, key.name, l.source)
	}
}

var _ prometheus.Collector = (*gaugeCollector)(nil)
