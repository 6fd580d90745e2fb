// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// status is what GET status answers: the state of this instance at one moment,
// and what it knows of the fleet. Counts began with the process.
type status struct {
	Time      time.Time        `json:"time"`
	Store     *storeStatus     `json:"store"` // null: no config with stripe_ratelimit has started
	Pools     []poolStatus     `json:"pools"`
	Switches  []control.Switch `json:"switches"`
	Overrides int              `json:"overrides"`
}

// storeStatus is the store of the running config.
type storeStatus struct {
	Store     string   `json:"store"`              // memory, redis, redis_cluster or redis_sentinel
	Instance  string   `json:"instance,omitempty"` // by which others know this one
	Instances int64    `json:"instances"`          // that share it, as last heard
	Error     string   `json:"error,omitempty"`    // why its last call in the background failed
	Failing   []string `json:"failing,omitempty"`  // nodes that are not called until they work again
	Version   int64    `json:"version"`            // of switches and overrides
	Waiting   int      `json:"waiting"`            // changes that are not in the store yet
}

type poolStatus struct {
	Pool     string                       `json:"pool"`
	InFlight inFlightStatus               `json:"in_flight"`
	Requests map[string]map[string]uint64 `json:"requests"` // by criticality and outcome
	Limits   []limitStatus                `json:"limits"`   // shedders included
	Workers  *workersReport               `json:"workers,omitempty"`
	Fleet    *fleetReport                 `json:"fleet,omitempty"`
}

type inFlightStatus struct {
	Critical    int64 `json:"critical"`
	NonCritical int64 `json:"non_critical"`
}

// limitStatus is one limit or shedder.
type limitStatus struct {
	Kind    string `json:"kind"`
	Limit   string `json:"limit"`
	Numbers string `json:"numbers"` // in words
	Mode    string `json:"mode"`    // in force
	Source  string `json:"source"`  // what decided the mode: config or switch

	// Decisions by mode (enforce, dark) and outcome.
	Decisions map[string]map[string]uint64 `json:"decisions"`
}

type workersReport struct {
	Utilization *float64           `json:"utilization"`       // 1 is full; null: not known
	Unknown     int                `json:"unknown,omitempty"` // seconds since it was known
	Level       float64            `json:"level"`
	Probability map[string]float64 `json:"probability"` // of being shed, by criticality
}

type fleetReport struct {
	Claim      int64  `json:"claim"` // of this instance
	Claims     int64  `json:"claims"`
	Allocation int64  `json:"allocation"`
	Capacity   int64  `json:"capacity"`
	InFlight   int64  `json:"in_flight"`
	Critical   int64  `json:"critical"`
	Instances  int64  `json:"instances"`
	Error      string `json:"error,omitempty"` // why the last sync failed
}

func getStatus(context.Context, *http.Request) (any, error) {
	s := &status{Time: time.Now().UTC(), Pools: []poolStatus{}, Switches: []control.Switch{}}
	o, err := operate()
	if err != nil {
		return s, nil
	}
	defer o.leave()
	view := o.view()
	s.Switches, s.Overrides = append(s.Switches, view.Switches...), len(view.Overrides)
	instance, instances, down := o.status()
	s.Store = &storeStatus{
		Store: o.store.kind, Instance: instance, Instances: instances,
		Version: view.Version, Waiting: view.Waiting,
	}
	nodes := map[string]bool{}
	o.store.nodes(nodes)
	for node, open := range nodes {
		if open {
			s.Store.Failing = append(s.Store.Failing, node)
		}
	}
	slices.Sort(s.Store.Failing)
	if down != nil {
		s.Store.Error = limiters.Reason(down)
	}
	for _, p := range allPools() {
		s.Pools = append(s.Pools, p.status(o.store.control.inForce()))
	}
	s.addCounts()
	return s, nil
}

// addCounts fills in what was counted since the process began.
func (s *status) addCounts() {
	requests, decisions := counts(requestsTotal), counts(decisionsTotal)
	for i := range s.Pools {
		p := &s.Pools[i]
		for _, c := range requests {
			if c.labels["pool"] == p.Pool {
				enterCount(&p.Requests, c.labels["criticality"], c.labels["outcome"], c.n)
			}
		}
		for _, c := range decisions {
			if l := p.limit(c.labels["kind"], c.labels["limit"]); l != nil && c.labels["pool"] == p.Pool {
				enterCount(&l.Decisions, c.labels["mode"], c.labels["outcome"], c.n)
			}
		}
	}
}

func enterCount(m *map[string]map[string]uint64, key, outcome string, n uint64) {
	if *m == nil {
		*m = map[string]map[string]uint64{}
	}
	if (*m)[key] == nil {
		(*m)[key] = map[string]uint64{}
	}
	(*m)[key][outcome] = n
}

// status is what the pool is like.
func (p *pool) status(inForce *inForce) poolStatus {
	s := poolStatus{
		Pool:     p.name,
		InFlight: inFlightStatus{p.critical.Load(), p.nonCritical.Load()},
		Limits:   []limitStatus{},
	}
	p.mu.Lock()
	shown := slices.Clone(p.shown)
	p.mu.Unlock()
	for _, n := range p.numbers() {
		l := n.limit
		i := slices.IndexFunc(shown, func(g limitGauge) bool { return g.kind == l.Kind.String() && g.name == l.Name })
		if i < 0 {
			continue // a reload has just taken it away
		}
		s.Limits = append(s.Limits, newLimitStatus(p.name, shown[i], numbersOf(l), inForce))
	}
	modes := p.shedders.Load()
	if modes == nil {
		return s
	}
	if m := modes.fleet; m != nil {
		s.Limits = append(s.Limits, newLimitStatus(p.name, m.gauge("fleet"), m.words, inForce))
		s.Fleet = newFleetStatus(modes.of.fleet.Status())
	}
	if m := modes.workers; m != nil {
		s.Limits = append(s.Limits, newLimitStatus(p.name, m.gauge("workers"), m.words, inForce))
		s.Workers = newWorkersStatus(p.workers.Status())
	}
	return s
}

// numbersOf says the numbers of a limit in words.
func numbersOf(l *limiters.Limit) string {
	if l.Kind == limiters.Rate {
		return fmt.Sprintf("%s burst %d", describe(l), l.Capacity)
	}
	return describe(l)
}

func newLimitStatus(pool string, g limitGauge, words string, inForce *inForce) limitStatus {
	s := limitStatus{Kind: g.kind, Limit: g.name, Numbers: words, Mode: modeOf(g.strength), Source: g.source}
	if mode := inForce.mode(pool, g.kind, g.name); mode.Strength() < g.strength {
		s.Mode, s.Source = mode.String(), "switch"
	}
	return s
}

// modeOf is a strength in words.
func modeOf(strength float64) string {
	if strength == 0 {
		return control.Off.String()
	}
	return control.EnforcePercent(int(math.Round((strength - 1) * 100))).String()
}

func newWorkersStatus(w shedding.WorkersStatus) *workersReport {
	s := &workersReport{Unknown: w.Unknown, Level: float64(w.Level), Probability: map[string]float64{}}
	if !math.IsNaN(w.Utilization) && !math.IsInf(w.Utilization, 0) {
		s.Utilization = &w.Utilization
	}
	for c := shedding.TestMode; c <= shedding.Critical; c++ {
		s.Probability[c.String()] = w.Level.Probability(c)
	}
	return s
}

func newFleetStatus(f shedding.FleetStatus) *fleetReport {
	s := &fleetReport{
		Claim: f.Claim, Claims: f.Fleet.Claims, Allocation: f.Fleet.Allocation, Capacity: f.Fleet.Capacity,
		InFlight: f.Fleet.InFlight, Critical: f.Fleet.Critical, Instances: f.Fleet.Instances,
	}
	if s.Instances == 0 { // a lone process, or no sync yet: what it knows itself
		s.InFlight, s.Critical, s.Claims, s.Allocation, s.Instances = f.InFlight, f.Critical, f.Claim, f.Claim, 1
	}
	if f.Err != nil {
		s.Error = limiters.Reason(f.Err)
	}
	return s
}

// counted is one series of a counter.
type counted struct {
	labels map[string]string
	n      uint64
}

// counts reads all series of a counter.
func counts(vec *prometheus.CounterVec) (all []counted) {
	metrics := make(chan prometheus.Metric)
	go func() {
		defer close(metrics)
		vec.Collect(metrics)
	}()
	for m := range metrics {
		var read dto.Metric
		if m.Write(&read) != nil {
			continue
		}
		c := counted{labels: map[string]string{}, n: uint64(read.GetCounter().GetValue())}
		for _, l := range read.GetLabel() {
			c.labels[l.GetName()] = l.GetValue()
		}
		all = append(all, c)
	}
	return all
}
