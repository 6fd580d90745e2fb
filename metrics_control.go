// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
)

var (
	switchChangesTotal = prometheus.NewCounterVec(counterOpts("switch_changes_total",
		"Switches that were set, cleared or have expired, as this instance has noticed."),
		[]string{"action"})

	switchesDesc = gaugeDesc("switches",
		"Run-time switches in force on this instance.", "scope", "mode")

	overridesDesc = gaugeDesc("overrides",
		"Overrides of single identities in force.")

	instancesDesc = gaugeDesc("instances",
		"Live instances that share the store, as last heard; 0 if never.")

	controlGauges = []*prometheus.Desc{switchesDesc, overridesDesc, instancesDesc}
)

func init() {
	for _, action := range []control.Action{control.WasSet, control.WasCleared, control.HasExpired} {
		switchChangesTotal.WithLabelValues(string(action))
	}
}

// controlGauge is what the gauges show of a controller.
type controlGauge struct {
	switches  map[[2]string]int // by scope and mode
	overrides int
	instances int64
}

func (c *controller) gauge() *controlGauge {
	g := &controlGauge{switches: map[[2]string]int{}, instances: c.instances.Load()}
	if f := c.inForce(); f != nil {
		for _, s := range f.view.Switches {
			g.switches[[2]string{string(s.Scope), s.Mode.Word()}]++
		}
		g.overrides = len(f.view.Overrides)
	}
	return g
}

// collectControl sends the gauges of the running store.
func collectControl(g *controlGauge, send func(desc *prometheus.Desc, value float64, labels ...string)) {
	for _, scope := range []control.Scope{control.Instance, control.Fleet} {
		for _, mode := range []control.Mode{control.Off, control.Dark, control.Enforce} {
			send(switchesDesc, float64(g.switches[[2]string{string(scope), mode.Word()}]), string(scope), mode.Word())
		}
	}
	send(overridesDesc, float64(g.overrides))
	send(instancesDesc, float64(g.instances))
}
