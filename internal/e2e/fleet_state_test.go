// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/lua"
)

const fleetKey = "stripe_ratelimit:{default}:fleet"

// stateNames are the numbers of a fleet's state, in the order in which the header of
// fleet_sync.lua has them.
var stateNames = func() (names []string) {
	for _, m := range regexp.MustCompile(`(?m)^--   state\[\d+\] (\w+)`).FindAllStringSubmatch(lua.FleetSync, -1) {
		names = append(names, m[1])
	}
	return names
}()

// fleetState is what Redis knows of a fleet at one moment.
type fleetState struct {
	now     int64            // us
	ends    map[string]int64 // by instance: when it is dropped, us
	entries map[string]fleetEntry
	totals  fleetEntry // as they are kept, not summed up; seq is the number of instances
	numbers map[string]int64
}

// fleetEntry is what an instance said last.
type fleetEntry struct{ seq, claim, inFlight, critical, workers int64 }

func (f *fleet) state(t testing.TB) fleetState {
	t.Helper()
	ctx := t.Context()
	pipe := f.rdb.TxPipeline()
	now, all := pipe.Time(ctx), pipe.HGetAll(ctx, fleetKey)
	if _, err := pipe.Exec(ctx); err != nil {
		t.Fatal(err)
	}
	s := fleetState{now: now.Val().UnixMicro(), ends: map[string]int64{}, entries: map[string]fleetEntry{}, numbers: map[string]int64{}}
	for i, text := range strings.Fields(all.Val()["state"]) {
		s.numbers[stateNames[i]], _ = strconv.ParseInt(text, 10, 64)
	}
	for id, text := range all.Val() {
		if len(id) != 32 {
			continue
		}
		var e fleetEntry
		var ends int64
		if _, err := fmt.Sscanf(text, "%d %d %d %d %d %d", &e.seq, &e.claim, &e.inFlight, &e.critical, &e.workers, &ends); err != nil {
			t.Fatalf("entry %q: %v", text, err)
		}
		s.entries[id], s.ends[id] = e, ends
	}
	n := s.numbers
	s.totals = fleetEntry{n["instances"], n["claims"], n["all_in_flight"], n["all_critical"], n["all_workers"]}
	return s
}

// sum adds the entries up.
func (s fleetState) sum() fleetEntry {
	sum := fleetEntry{seq: int64(len(s.entries))}
	for _, e := range s.entries {
		sum.claim += e.claim
		sum.inFlight += e.inFlight
		sum.critical += e.critical
		sum.workers += e.workers
	}
	return sum
}

// right tells what is wrong with a fleet that has so much in progress, and at
// most some more.
func (s fleetState) right(ids []string, inFlight, critical, more int) error {
	known := slices.Sorted(maps.Keys(s.entries))
	want := slices.Sorted(slices.Values(ids))
	sum := s.sum()
	switch {
	case !slices.Equal(known, want):
		return fmt.Errorf("instances %v, want %v", known, want)
	case s.totals != sum:
		return fmt.Errorf("totals %+v, sums %+v", s.totals, sum)
	case sum.inFlight < int64(inFlight) || sum.inFlight > int64(inFlight+more):
		return fmt.Errorf("%d in progress, want %d and at most %d more", sum.inFlight, inFlight, more)
	case sum.critical < int64(critical) || sum.critical > int64(critical+more):
		return fmt.Errorf("%d critical in progress, want %d and at most %d more", sum.critical, critical, more)
	case sum.claim > s.allocation():
		return fmt.Errorf("claims on %d slots, want at most %d", sum.claim, s.allocation())
	}
	return nil
}

// allocation is that of the configuration in force, which is not auto.
func (s fleetState) allocation() int64 {
	return s.numbers["fixed"] * (10_000 - s.numbers["kept"]) / 10_000
}

// syncs waits until each Caddy of the fleet has synced so many times since a
// state, and returns the first state in which that is so.
func (f *fleet) syncs(t testing.TB, since fleetState, n int64) (s fleetState) {
	t.Helper()
	eventually(t, patience, fmt.Sprintf("%d syncs of each Caddy", n), func() bool {
		s = f.state(t)
		for _, id := range f.ids {
			if s.entries[id].seq < since.entries[id].seq+n {
				return false
			}
		}
		return true
	})
	return s
}

// forget begins a new count of the most calls at once.
func (up *upstream) forget() {
	up.mu.Lock()
	defer up.mu.Unlock()
	up.most = up.now
}
