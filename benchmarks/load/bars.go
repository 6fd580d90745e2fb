// SPDX-License-Identifier: Apache-2.0

package main

import "fmt"

// bar is what a figure has to be at most, or at least.
type bar struct {
	About string  `json:"about"`
	Unit  string  `json:"unit"`
	Bar   float64 `json:"bar"`
	Least bool    `json:"least,omitempty"` // the bar is the least that will do
	Value float64 `json:"value"`
	Low   float64 `json:"low"` // of all rounds
	High  float64 `json:"high"`
	Met   bool    `json:"met"`
}

func (b bar) want() string {
	if b.Least {
		return fmt.Sprintf("≥ %g %s", b.Bar, b.Unit)
	}
	return fmt.Sprintf("≤ %g %s", b.Bar, b.Unit)
}

func (b bar) got() string {
	got := fmt.Sprintf("%.3g %s", b.Value, b.Unit)
	if b.Low != b.High {
		got += fmt.Sprintf(" (%.3g to %.3g)", b.Low, b.High)
	}
	return got
}

func (b bar) verdict() string {
	if b.Met {
		return "met"
	}
	return "not met"
}

// bars returns those for which there are measurements.
func (r *report) bars() (all []bar) {
	add := func(about, unit string, limit float64, least bool, s spread) {
		met := s.median <= limit
		if least {
			met = s.median >= limit
		}
		all = append(all, bar{about, unit, limit, least, s.median, s.low, s.high, met})
	}
	scale := func(s spread, by float64) spread { return spread{s.low * by, s.median * by, s.high * by} }
	pair := func(setup, answer, keys string, rate float64) (s, ref *series) {
		sc := scenario{setup, answer, "h1", keys, rate}
		return r.find(sc), r.find(sc.reference())
	}
	if s, ref := pair("four", "respond", "uniform", 0); s != nil {
		add("all four on Redis: added CPU, Caddy and Redis together", "µs", 25, false, s.against(ref, addedCPU))
		if sample, _ := pair("sample", "respond", "uniform", 0); sample != nil {
			values := make([]float64, len(s.Rounds))
			for i := range values {
				values[i] = addedCPU(s.Rounds[i], ref.Rounds[i]) / addedCPU(sample.Rounds[i], ref.Rounds[i])
			}
			add("the same, as a share of the sample's way", "%", 33, false, scale(spreadOf(values), 100))
		}
	}
	if s, ref := pair("four", "proxy", "uniform", 0); s != nil {
		add("all four on Redis behind reverse_proxy: throughput, of bare", "%", 80, true, scale(s.against(ref, ofRate), 100))
	}
	if s, ref := pair("memory", "respond", "uniform", 0); s != nil {
		add("all four in memory: added CPU", "µs", 2.5, false, s.against(ref, addedCPU))
		add("all four in memory: allocations of a decision", "", 6, false, s.against(ref, addedAllocs))
	}
	if s, ref := pair("flood", "respond", "hot", 0); s != nil {
		add("a flood being denied: throughput, of bare respond", "%", 90, true, scale(s.against(ref, ofRate), 100))
		// Beats of the fleet are not of requests.
		n := s.Sent["evalsha"] + s.Sent["eval"] + s.Sent["zrem"]
		if n < 0.01 {
			n = 0
		}
		add("the same: commands to Redis for each request", "", 0, false, spread{n, n, n})
	}
	if s, ref := pair("four", "respond", "uniform", openRate); s != nil {
		add("all four on Redis, 2,000 requests/s: added latency, p50", "ms", 0.3, false, s.against(ref, addedP50))
		add("the same, p99", "ms", 2, false, s.against(ref, addedP99))
	}
	if s, _ := pair("four", "respond", "uniform", 0); s != nil {
		n := s.sent()
		add("all four on Redis: commands to Redis for each request", "", 2.01, false, spread{n, n, n})
	}
	if m := r.Memory; m != nil {
		add("a bucket in Redis", "B", 250, false, spread{m.Redis, m.Redis, m.Redis})
		add("a bucket in process", "B", 200, false, spread{m.Process, m.Process, m.Process})
	}
	return all
}
