// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"strconv"
	"strings"
	"testing"
	"time"
)

const ms = time.Millisecond

// Both stores play the same stories.
//
// A row asks "who: limit, ~limit & who: limit" (~ is dark) and wants an answer
// for each check; "release n" gives back what row n, counted from 1, took.
func TestStore(t *testing.T) {
	type row struct {
		at   time.Duration
		do   string
		want string
	}
	limits := map[string]*Limit{
		"5/s":    rate(t, "rate", 5, time.Second, 5, 1),
		"burst":  rate(t, "rate", 5, time.Second, 8, 1),
		"small":  rate(t, "rate", 5, time.Second, 2, 1),
		"slower": rate(t, "rate", 1, time.Second, 5, 1),
		"other":  rate(t, "other", 1, time.Second, 2, 1),
		"cost3":  rate(t, "rate", 5, time.Second, 5, 3),
		"3/m":    rate(t, "minute", 3, time.Minute, 3, 1),
		"1/d":    rate(t, "day", 1, 24*time.Hour, 1, 1),
		"7/s":    rate(t, "seven", 7, time.Second, 1, 1),
		"two":    concurrency(t, "two", 2, 10*time.Second),
		"three":  concurrency(t, "two", 3, 10*time.Second),
		"one":    concurrency(t, "two", 1, 10*time.Second),
		"short":  concurrency(t, "two", 2, time.Second),
		"single": concurrency(t, "single", 1, 10*time.Second),
	}
	stories := []struct {
		name string
		rows []row
	}{
		{"a bucket empties, refills to the microsecond and stays full", []row{
			{0, "a: 5/s", "allowed 4 next 200ms"},
			{0, "a: 5/s", "allowed 3 next 200ms"},
			{50 * ms, "a: 5/s", "allowed 2 next 150ms"},
			{50 * ms, "a: 5/s", "allowed 1 next 150ms"},
			{50 * ms, "a: 5/s", "allowed 0 next 150ms"},
			{50 * ms, "a: 5/s", "denied 0 next 150ms wait 150ms"},
			{50 * ms, "b: 5/s", "allowed 4 next 200ms"},
			{200*ms - time.Microsecond, "a: 5/s", "denied 0 next 1µs wait 1µs"},
			{200 * ms, "a: 5/s", "allowed 0 next 200ms"},
			{399 * ms, "a: 5/s", "denied 0 next 1ms wait 1ms"},
			{1400 * ms, "a: 5/s", "allowed 4 next 200ms"},
			{time.Hour, "a: 5/s", "allowed 4 next 200ms"},
		}},
		{"a rate that does not divide the second loses nothing", []row{
			{0, "a: 7/s", "allowed 0 next 142.858ms"},
			{142857 * time.Microsecond, "a: 7/s", "denied 0 next 1µs wait 1µs"},
			{142858 * time.Microsecond, "a: 7/s", "allowed 0 next 142.858ms"},
		}},
		{"a cost above one", []row{
			{0, "a: cost3", "allowed 2 next 200ms"},
			{0, "a: cost3", "denied 2 next 200ms wait 200ms"},
			{0, "a: 5/s", "allowed 1 next 200ms"},
			{0, "a: cost3", "denied 1 next 200ms wait 400ms"},
			{400 * ms, "a: cost3", "allowed 0 next 200ms"},
		}},
		{"long periods, on a coarser clock", []row{
			{0, "a: 3/m", "allowed 2 next 20s"},
			{0, "a: 1/d", "allowed 0 next 24h0m0s"},
			{1500 * time.Microsecond, "a: 1/d", "denied 0 next 23h59m59.999s wait 23h59m59.999s"},
			{24*time.Hour - ms, "a: 1/d", "denied 0 next 1ms wait 1ms"},
			{24 * time.Hour, "a: 1/d", "allowed 0 next 24h0m0s"},
		}},
		{"all limits of an identity take, or none", []row{
			{0, "a: 5/s, other, single", "allowed 4 next 200ms; allowed 1 next 1s; allowed 0"},
			{0, "a: 5/s, other, single", "allowed 4 next 200ms; allowed 1 next 1s; denied 0"},
			{0, "a: 5/s, other", "allowed 3 next 200ms; allowed 0 next 1s"},
			{0, "release 1", ""},
			{0, "a: 5/s, other, single", "allowed 3 next 200ms; denied 0 next 1s wait 1s; allowed 1"},
			{0, "a: 5/s, single", "allowed 2 next 200ms; allowed 0"},
		}},
		{"a dark limit decides beside the enforced ones and takes with them", []row{
			{0, "a: 5/s, ~other", "allowed 4 next 200ms; allowed 1 next 1s"},
			{0, "a: 5/s, ~other", "allowed 3 next 200ms; allowed 0 next 1s"},
			{0, "a: 5/s, ~other", "allowed 2 next 200ms; denied 0 next 1s wait 1s"},
			{0, "a: 5/s, ~single", "allowed 1 next 200ms; allowed 0"},
			{0, "a: 5/s, ~single", "allowed 0 next 200ms; denied 0"},
			{0, "a: 5/s, ~other, ~single", "denied 0 next 200ms wait 200ms; not_evaluated 0 next 1s; not_evaluated 0"},
			{0, "release 4", ""},
			{200 * ms, "a: 5/s, ~single", "allowed 0 next 200ms; allowed 0"},
		}},
		{"dark limits alone deny nobody", []row{
			{0, "a: ~single", "allowed 0"},
			{0, "a: ~single", "denied 0"},
			{0, "a: single", "denied 0"},
		}},
		{"leases are counted until they are given back", []row{
			{0, "a: two", "allowed 1"},
			{0, "a: two", "allowed 0"},
			{0, "a: two", "denied 0"},
			{0, "b: two", "allowed 1"},
			{0, "release 1", ""},
			{0, "release 1", ""},
			{0, "a: two", "allowed 0"},
			{0, "a: two", "denied 0"},
		}},
		{"a lease whose holder is gone ends by itself", []row{
			{0, "a: two", "allowed 1"},
			{3 * time.Second, "a: two", "allowed 0"},
			{10 * time.Second, "a: two", "denied 0"},
			{10*time.Second + time.Microsecond, "a: two", "allowed 0"},
			{13*time.Second + time.Microsecond, "a: two", "allowed 0"},
		}},
		{"numbers change up and down at once", []row{
			{0, "a: small", "allowed 1 next 200ms"},
			{0, "a: small", "allowed 0 next 200ms"},
			{0, "a: small", "denied 0 next 200ms wait 200ms"},
			{200 * ms, "a: burst", "allowed 0 next 200ms"},
			{2200 * ms, "a: burst", "allowed 7 next 200ms"}, // full: it has 8 at most
			{2200 * ms, "a: small", "allowed 1 next 200ms"}, // what is too much is gone
			{2200 * ms, "a: slower", "allowed 0 next 1s"},
			{2400 * ms, "a: slower", "denied 0 next 800ms wait 800ms"},
			{2400 * ms, "a: 5/s", "allowed 0 next 200ms"}, // the new rate counts from when it was last written
			{2400 * ms, "a: two", "allowed 1"},
			{2400 * ms, "a: two", "allowed 0"},
			{2400 * ms, "a: three", "allowed 0"},
			{2400 * ms, "a: one", "denied 0"},
			{2400 * ms, "a: two", "denied 0"},
		}},
		{"a clock set back locks nobody out and mints nothing", []row{
			{time.Hour, "a: small, two", "allowed 1 next 200ms; allowed 1"},
			{time.Hour, "a: small, two", "allowed 0 next 200ms; allowed 0"},
			{0, "a: small", "denied 0 next 200ms wait 200ms"},
			{100 * ms, "a: small", "denied 0 next 100ms wait 100ms"},
			{200 * ms, "a: small", "allowed 0 next 200ms"},
			{200 * ms, "a: two", "denied 0"}, // which cuts the leases back
			{10200 * ms, "a: two", "denied 0"},
			{10201 * ms, "a: two", "allowed 1"},
		}},
		{"a clock set back by a microsecond", []row{
			{ms, "a: single", "allowed 0"},
			{ms - time.Microsecond, "a: single", "denied 0"},
			{10*time.Second + ms, "a: single", "allowed 0"},
		}},
		{"leases of different lengths stand side by side", []row{
			{0, "a: two", "allowed 1"},
			{0, "a: short", "allowed 0"},
			{0, "a: short", "denied 0"}, // the longer one is not cut back
			{1001 * ms, "a: short", "allowed 0"},
			{5 * time.Second, "a: short", "allowed 0"},
			{9 * time.Second, "a: short", "allowed 0"},
			{10 * time.Second, "a: short", "denied 0"},
		}},
		{"identities of one request", []row{
			{0, "a: 5/s, single & b: other, two", "allowed 4 next 200ms; allowed 0; allowed 1 next 1s; allowed 1"},
			{0, "a: 5/s, single & b: other, two", "allowed 4 next 200ms; denied 0; allowed 0 next 1s; allowed 0"},
			{0, "b: two", "allowed 0"}, // what b took was given back
			{0, "release 1", ""},
			{0, "a: 5/s, single & b: other, two", "allowed 3 next 200ms; allowed 0; denied 0 next 1s wait 1s; allowed 1"},
			{0, "a: single", "allowed 0"},
		}},
	}
	for _, story := range stories {
		t.Run(strings.ReplaceAll(story.name, " ", "_"), func(t *testing.T) {
			for name, s := range stages(t) {
				t.Run(name, func(t *testing.T) {
					taken := map[string]Admission{}
					for i, row := range story.rows {
						if n, ok := strings.CutPrefix(row.do, "release "); ok {
							s.release(row.at, taken[n])
							continue
						}
						asks := parseAsks(t, row.do, limits)
						adm := s.admit(row.at, asks)
						taken[strconv.Itoa(i+1)] = adm
						if got := briefly(adm.Results); got != row.want {
							t.Fatalf("row %d, %q at %v:\n got %v\nwant %v", i+1, row.do, row.at, got, row.want)
						}
						if got, want := adm.Allowed, allows(asks, adm.Results); got != want {
							t.Errorf("row %d, %q at %v: allowed is %v, want %v", i+1, row.do, row.at, got, want)
						}
					}
				})
			}
		})
	}
}

// parseAsks reads what a row does.
func parseAsks(t *testing.T, text string, limits map[string]*Limit) (asks []Ask) {
	t.Helper()
	for part := range strings.SplitSeq(text, " & ") {
		who, checks, _ := strings.Cut(part, ": ")
		a := Ask{Identity: id(who)}
		for name := range strings.SplitSeq(checks, ", ") {
			bare, dark := strings.CutPrefix(name, "~")
			if limits[bare] == nil {
				t.Fatalf("no limit %q", bare)
			}
			a.Checks = append(a.Checks, Check{limits[bare], dark})
		}
		asks = append(asks, a)
	}
	return asks
}

// allows tells from the results whether a request is allowed.
func allows(asks []Ask, results []Result) bool {
	for _, a := range asks {
		for _, c := range a.Checks {
			if !c.Dark && results[0].Outcome != Allowed {
				return false
			}
			results = results[1:]
		}
	}
	return true
}
