// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"math"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

var (
	utilizationUnknown = prometheus.NewCounterVec(counterOpts("worker_utilization_unknown_total",
		"Seconds in which the source of the utilization did not know it, and the level was held."),
		[]string{"pool"})

	workerUtilization = gaugeDesc("worker_utilization",
		"How busy this instance was in the last second: 1 is full. NaN if not known.", "pool")

	workerShedLevel = gaugeDesc("worker_shed_level",
		"How much this instance sheds: nothing up to 0, test mode up to a third, GET up to two thirds, POST up to 1. Below 0 is grace that is left.", "pool")

	shedProbability = gaugeDesc("shed_probability",
		"The chance that this instance sheds a request, by its level.", "pool", "criticality")

	fleetInFlight = gaugeDesc("fleet_in_flight",
		"Requests in progress over all instances, as of this instance's last sync.", "pool", "type")

	fleetAllocation = gaugeDesc("fleet_allocation",
		"Slots for non-critical requests over all instances.", "pool")

	fleetClaims = gaugeDesc("fleet_claims",
		"Slots that instances own, in sum.", "pool")

	fleetInstances = gaugeDesc("fleet_instances",
		"Instances of the fleet.", "pool")

	shedderGauges = []*prometheus.Desc{
		workerUtilization, workerShedLevel, shedProbability,
		fleetInFlight, fleetAllocation, fleetClaims, fleetInstances,
	}
)

// shedderMetrics counts the decisions of one shedder of a pool. It is safe for
// concurrent use.
type shedderMetrics struct {
	enforce, dark struct{ allowed, shed, failed prometheus.Counter }
}

// newShedderMetrics resolves the counters of a shedder: fleet or workers.
func newShedderMetrics(pool, kind string) *shedderMetrics {
	counter := func(mode, outcome string) prometheus.Counter {
		return decisionsTotal.WithLabelValues(pool, kind, kind, mode, outcome)
	}
	m := new(shedderMetrics)
	m.enforce.allowed, m.enforce.shed = counter("enforce", "allowed"), counter("enforce", "shed")
	m.dark.allowed, m.dark.shed = counter("dark", "allowed"), counter("dark", "shed")
	if kind == "fleet" { // which alone asks the store
		m.enforce.failed, m.dark.failed = counter("enforce", "store_error"), counter("dark", "store_error")
	}
	return m
}

// decision counts what the shedder said to one request.
func (m *shedderMetrics) decision(dark, shed bool) {
	mode := &m.enforce
	if dark {
		mode = &m.dark
	}
	if shed {
		mode.shed.Inc()
	} else {
		mode.allowed.Inc()
	}
}

// failed counts a request that the shedder could not judge, because the store
// failed.
func (m *shedderMetrics) failed(dark bool) {
	if dark {
		m.dark.failed.Inc()
		return
	}
	m.enforce.failed.Inc()
}

// collectShedders sends the gauges of the shedders that a pool has.
func collectShedders(p poolGauges, send func(desc *prometheus.Desc, value float64, labels ...string)) {
	if w := p.workers; w != nil {
		utilization := w.Utilization
		if math.IsInf(utilization, 0) {
			utilization = math.NaN()
		}
		send(workerUtilization, utilization, p.pool)
		send(workerShedLevel, float64(w.Level), p.pool)
		for c := shedding.TestMode; c <= shedding.Critical; c++ {
			send(shedProbability, w.Level.Probability(c), p.pool, c.String())
		}
	}
	if f := p.fleet; f != nil {
		fleet := f.Fleet
		if fleet.Instances == 0 { // a lone process, or no sync yet: what it knows itself
			fleet.InFlight, fleet.Critical = f.InFlight, f.Critical
			fleet.Claims, fleet.Allocation, fleet.Instances = f.Claim, f.Claim, 1
		}
		send(fleetInFlight, float64(fleet.Critical), p.pool, "critical")
		send(fleetInFlight, float64(fleet.InFlight), p.pool, "non_critical")
		send(fleetAllocation, float64(fleet.Allocation), p.pool)
		send(fleetClaims, float64(fleet.Claims), p.pool)
		send(fleetInstances, float64(fleet.Instances), p.pool)
	}
}
