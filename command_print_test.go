// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"math"
	"strings"
	"testing"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

func TestStatus_Alarms(t *testing.T) {
	idle := 0.1
	cases := []struct {
		mode  string
		level float64
		fleet fleetReport
		want  string
	}{
		{"enforce", -0.1, fleetReport{InFlight: 79, Allocation: 80, Capacity: 100}, ""},
		{"enforce", -0.1, fleetReport{Allocation: 0, Capacity: 100}, "pool api SHEDS by fleet: all 0 slots of the fleet are in use"},
		{"enforce", -0.1, fleetReport{}, ""}, // nothing is known yet
		{"enforce", 0.5, fleetReport{InFlight: 80, Allocation: 80, Capacity: 100}, "pool api SHEDS by workers: 50% of get\npool api SHEDS by fleet: all 80 slots of the fleet are in use"},
		{"enforce 5", 0.5, fleetReport{Allocation: 80}, "pool api SHEDS by workers: 50% of get"},
		{"dark", 0.5, fleetReport{Allocation: 80}, "pool api would shed, if workers were not dark: 50% of get"},
		{"off", 0.5, fleetReport{InFlight: 80, Allocation: 80, Capacity: 100}, ""},
		{"enforce", 0, fleetReport{Error: "connection"}, ""}, // which the store says
	}
	for _, c := range cases {
		workers := &workersReport{Utilization: &idle, Level: c.level, Probability: map[string]float64{"get": c.level}}
		p := poolStatus{Pool: "api", Workers: workers, Fleet: &c.fleet, Limits: []limitStatus{
			{Kind: "workers", Limit: "workers", Mode: c.mode}, {Kind: "fleet", Limit: "fleet", Mode: c.mode},
		}}
		if got := strings.Join(p.alarms(), "\n"); got != c.want {
			t.Errorf("%+v: got %q, want %q", c, got, c.want)
		}
	}
}

// That nobody has measured yet is no alarm; that nobody has for seconds is one.
func TestStatus_AlarmOfUnknownUtilization(t *testing.T) {
	const alarm = "pool api: the utilization of the workers is not known, so their level stays"
	for seconds, want := range []string{"", "", "", alarm, alarm} {
		p := poolStatus{Pool: "api", Workers: newWorkersStatus(shedding.WorkersStatus{Utilization: math.NaN(), Unknown: seconds})}
		if got := strings.Join(p.alarms(), "\n"); got != want {
			t.Errorf("not known for %d s: got %q, want %q", seconds, got, want)
		}
	}
}
