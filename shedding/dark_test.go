// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"math"
	"testing"
	"time"
)

// A dark shedder sees load that an enforced one would have shed. Until the first
// request would be shed both are the same; from then on the dark one says more.
// The numbers are those of docs/workers.md, for its mix of requests.
func TestRamp_DarkIsAnUpperBound(t *testing.T) {
	share := map[Criticality]float64{TestMode: 0.1, Get: 0.5, Post: 0.3, Critical: 0.1}
	sheds := func(level Level) (sum float64) {
		for class, part := range share {
			sum += part * level.Probability(class)
		}
		return sum
	}
	const rounding = 1e-9
	percent := func(share float64) int { return int(math.Round(100 * share)) }
	cases := []struct {
		load           float64
		enforced, dark int // % of the requests after half an hour
		first, all     int // s after which the dark one sheds anything, and all it can
	}{
		{0.75, 0, 0, -1, -1},
		{0.85, 6, 90, 112, 592},
		{0.90, 11, 90, 56, 296},
		{1.20, 33, 90, 28, 148},
	}
	for _, c := range cases {
		ramp := DefaultRamp()
		var enforced, dark RampState
		first, all := -1, -1
		for second := range 1800 {
			now := epoch.Add(time.Duration(second) * time.Second)
			enforced = ramp.Step(enforced, now, c.load*(1-sheds(enforced.Level)))
			dark = ramp.Step(dark, now, c.load)
			if enforced.Level > dark.Level {
				t.Fatalf("load %v, second %d: enforced at level %v, above the dark %v", c.load, second, enforced.Level, dark.Level)
			}
			if sheds(dark.Level) == 0 && enforced.Level != dark.Level {
				t.Fatalf("load %v, second %d: levels %v and %v before anything was shed", c.load, second, enforced.Level, dark.Level)
			}
			if first < 0 && sheds(dark.Level) > rounding {
				first = second - 1 // it was at 0
			}
			if all < 0 && dark.Level > 1-rounding {
				all = second
			}
		}
		got := []int{percent(sheds(enforced.Level)), percent(sheds(dark.Level)), first, all}
		for i, want := range []int{c.enforced, c.dark, c.first, c.all} {
			if got[i] != want {
				t.Errorf("load %v: got %v, want %v", c.load, got, []int{c.enforced, c.dark, c.first, c.all})
				break
			}
		}
	}
}
