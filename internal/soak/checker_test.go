// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

const second = int64(1_000_000) // µs

// era is when made-up histories begin, in µs.
const era = 1_800_000_000 * second

// rate and concurrency return limits; their numbers are right.
func rate(name string, requests int64, period time.Duration, capacity, cost int64) *limiters.Limit {
	l, err := limiters.NewRate("pool", name, requests, period, capacity, cost)
	if err != nil {
		panic(err)
	}
	return l
}

func concurrency(name string, capacity int64, length time.Duration) *limiters.Limit {
	l, err := limiters.NewConcurrency("pool", name, capacity, length)
	if err != nil {
		panic(err)
	}
	return l
}

// around returns a decision that was made at a moment, and reached at most so
// long before and after.
func around(rng *rand.Rand, at, slack int64, l *limiters.Limit, outcome limiters.Outcome) Decision {
	return Decision{
		Limit: l, Outcome: outcome, Taken: outcome == limiters.Allowed,
		Sent: at - rng.Int64N(slack+1), Received: at + rng.Int64N(slack+1),
	}
}

// draw makes up requests to a true bucket: eager clients who never stop asking,
// with pauses in which it fills.
func draw(rng *rand.Rand, l *limiters.Limit, slack, every int64, n int) (h History) {
	b := newBucket(l)
	b.level, b.at = b.capacity, era
	for at := era; len(h.Decisions) < n; {
		at += 1 + rng.Int64N(2*every)
		if rng.IntN(n/3) == 0 {
			at += rng.Int64N(2 * b.capacity / b.refill)
		}
		b.advance(at)
		outcome := limiters.Denied
		if b.level >= b.cost {
			b.level -= b.cost
			outcome = limiters.Allowed
		}
		h.Decisions = append(h.Decisions, around(rng, at, slack, l, outcome))
	}
	return h
}

// drained returns the indices of denials.
func drained(h History) (all []int) {
	for i, d := range h.Decisions {
		if d.Outcome == limiters.Denied {
			all = append(all, i)
		}
	}
	return all
}

func complaints(t *testing.T, h History, about string) int {
	t.Helper()
	n := 0
	for _, c := range h.Check() {
		if !strings.HasPrefix(c, about) {
			t.Errorf("an unexpected complaint: %s", c)
		}
		n++
	}
	return n
}

// Of a bucket's history that is true nobody complains, however wide the
// intervals are, and of one with a single admission more, or with one denied that
// had to pass, always where intervals are narrow.
func TestCheck_Buckets(t *testing.T) {
	limits := []*limiters.Limit{
		rate("slow", 7, time.Second, 3, 1), rate("fast", 7000, time.Second, 700, 1),
		rate("dear", 30, 10*time.Second, 20, 5), rate("even", 20, time.Second, 10, 2),
	}
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 1))
		l := limits[seed%uint64(len(limits))]
		token := l.Period.Microseconds() / l.Requests // µs
		slack := []int64{0, token / 20, 3 * token, 100 * token}[rng.IntN(4)]
		n := 2000
		if l.Capacity > 100 {
			n = 3 * int(l.Capacity) // or it is never drained
		}
		h := draw(rng, l, slack, max(1, token/10), n)
		if got := h.Check(); len(got) > 0 {
			t.Fatalf("seed %d, %s: complaints of a true history: %q", seed, l.Name, got)
		}
		if slack > token/20 {
			continue
		}
		denials := drained(h)
		if len(denials) == 0 {
			t.Fatalf("seed %d, %s: nothing was denied", seed, l.Name)
		}
		// Just after something was taken nothing is left but a fraction of the cost.
		i := denials[rng.IntN(len(denials))]
		for i > 0 && !h.Decisions[i-1].Taken {
			i--
		}
		if i == 0 {
			continue
		}
		mutant := h
		mutant.Decisions = slices.Clone(h.Decisions)
		mutant.Decisions[i].Outcome, mutant.Decisions[i].Taken = limiters.Allowed, true
		if l.Cost == 1 && slack == 0 && complaints(t, mutant, "rate") == 0 {
			t.Errorf("seed %d, %s: no complaint of one admission more, at %d", seed, l.Name, i)
		}
		mutant.Decisions = append(mutant.Decisions, mutant.Decisions[i], mutant.Decisions[i])
		if complaints(t, mutant, "rate") == 0 {
			t.Errorf("seed %d, %s: no complaint of three admissions more, at %d", seed, l.Name, i)
		}
		// A bucket that has rested is full.
		rested := Decision{Limit: l, Outcome: limiters.Denied}
		last := h.Decisions[len(h.Decisions)-1].Received
		rested.Sent = last + l.Capacity*token + 10*token
		rested.Received = rested.Sent + slack
		mutant.Decisions = append(slices.Clone(h.Decisions), rested)
		if complaints(t, mutant, "rate") == 0 {
			t.Errorf("seed %d, %s: no complaint of a denial by a full bucket", seed, l.Name)
		}
	}
}

// What faults allow is no violation, and no more than that.
func TestCheck_BucketsAndFaults(t *testing.T) {
	l := rate("rate", 1, time.Second, 10, 1)
	rng := rand.New(rand.NewPCG(1, 1))
	burst := func(h *History, at int64, n int) {
		for range n {
			h.Decisions = append(h.Decisions, around(rng, at, 1000, l, limiters.Allowed))
		}
	}
	cases := []struct {
		name  string
		make  func(h *History)
		wrong bool
	}{
		{"a burst", func(h *History) { burst(h, era, 10) }, false},
		{"a burst and one", func(h *History) { burst(h, era, 11) }, true},
		{"what flows in", func(h *History) { burst(h, era, 10); burst(h, era+5*second, 5) }, false},
		{"and one more", func(h *History) { burst(h, era, 10); burst(h, era+5*second, 6) }, true},
		{"a second burst after a loss", func(h *History) {
			burst(h, era, 10)
			h.Losses = []Span{{era + second, era + second + 1000}}
			burst(h, era+2*second, 10)
		}, false},
		{"one more after a loss", func(h *History) {
			burst(h, era, 10)
			h.Losses = []Span{{era + second, era + second + 1000}}
			burst(h, era+2*second, 11)
		}, true},
		{"a clock that jumps forward", func(h *History) {
			burst(h, era, 10)
			h.Jumps = []Jump{{Span{era + second, era + second + 1000}, 5 * second}}
			burst(h, era+2*second, 7)
		}, false},
		{"one more than it jumps", func(h *History) {
			burst(h, era, 10)
			h.Jumps = []Jump{{Span{era + second, era + second + 1000}, 5 * second}}
			burst(h, era+2*second, 8)
		}, true},
		{"a clock that jumps back mints nothing", func(h *History) {
			burst(h, era, 10)
			h.Jumps = []Jump{{Span{era + second, era + second + 1000}, -5 * second}}
			burst(h, era+2*second, 3)
		}, true},
		{"what a failed store took", func(h *History) {
			h.Decisions = append(h.Decisions, Decision{Limit: l, Sent: era, Received: era + 1000})
			burst(h, era, 9)
			h.Decisions = append(h.Decisions, around(rng, era+1000, 100, l, limiters.Denied))
		}, false},
		{"more than it can have taken", func(h *History) {
			h.Decisions = append(h.Decisions, Decision{Limit: l, Sent: era, Received: era + 1000})
			burst(h, era+second, 1)
			burst(h, era+20*second, 8)
			h.Decisions = append(h.Decisions, around(rng, era+20*second+5000, 100, l, limiters.Denied))
		}, true},
		{"an odd denial in times of trouble", func(h *History) {
			h.Troubles = []Span{{era + 19*second, era + 30*second}}
			burst(h, era, 1)
			h.Decisions = append(h.Decisions, around(rng, era+20*second, 100, l, limiters.Denied))
		}, false},
	}
	for _, c := range cases {
		var h History
		c.make(&h)
		if got := complaints(t, h, "rate") > 0; got != c.wrong {
			t.Errorf("%s: got complaints %v, want %v", c.name, h.Check(), c.wrong)
		}
	}
}

func TestCheck_Leases(t *testing.T) {
	l := concurrency("two", 2, 3*time.Second)
	type row struct{ sent, received, released int64 } // ms
	cases := []struct {
		name  string
		rows  []row
		make  func(h *History)
		wrong bool
	}{
		{"two", []row{{0, 1, 1000}, {0, 1, 1000}}, nil, false},
		{"three", []row{{0, 1, 1000}, {0, 1, 1000}, {500, 501, 1000}}, nil, true},
		{"three that may have been two", []row{{0, 1, 500}, {0, 1, 1000}, {499, 502, 1000}}, nil, false},
		{"three at once", []row{{0, 5, 1000}, {1, 5, 1000}, {2, 5, 1000}}, nil, true},
		{"the third after a release", []row{{0, 1, 400}, {0, 1, 1000}, {500, 501, 1000}}, nil, false},
		{"after two leases have ended", []row{{0, 1, 0}, {0, 1, 0}, {3001, 3002, 4000}}, nil, false},
		{"before one has ended", []row{{0, 1, 0}, {0, 1, 0}, {2990, 2999, 4000}}, nil, true},
		{"renewed leases", []row{{0, 1, 9000}, {0, 1, 9000}, {3500, 3501, 4000}}, func(h *History) {
			h.Renewals = map[int][]int64{0: {era + second, era + 2*second, era + 3*second}}
		}, true},
		{"leases that were renewed too long ago", []row{{0, 1, 9000}, {0, 1, 9000}, {3500, 3501, 4000}}, func(h *History) {
			h.Renewals = map[int][]int64{0: {era + second}}
		}, false},
		{"renewals of another instance", []row{{0, 1, 9000}, {0, 1, 9000}, {3500, 3501, 4000}}, func(h *History) {
			h.Renewals = map[int][]int64{1: {era + second, era + 2*second}}
		}, false},
		{"leases that were put back after a loss", []row{{0, 1, 9000}, {0, 1, 9000}, {3500, 3501, 4000}}, func(h *History) {
			h.Losses = []Span{{era + 100, era + 200}}
			h.Renewals = map[int][]int64{0: {era + 2*second, era + 3*second}}
		}, true},
		{"a loss", []row{{0, 1, 9000}, {0, 1, 9000}, {500, 501, 4000}}, func(h *History) {
			h.Losses = []Span{{era + second/10, era + second/5}}
		}, false},
		{"a jump to their ends", []row{{0, 1, 9000}, {0, 1, 9000}, {500, 501, 4000}}, func(h *History) {
			h.Jumps = []Jump{{Span{era + second/10, era + second/5}, 3 * second}}
		}, false},
		{"a jump to before their ends", []row{{0, 1, 9000}, {0, 1, 9000}, {500, 501, 4000}}, func(h *History) {
			h.Jumps = []Jump{{Span{era + second/10, era + second/5}, 2 * second}}
		}, true},
		{"a jump back", []row{{0, 1, 9000}, {0, 1, 9000}, {500, 501, 4000}}, func(h *History) {
			h.Jumps = []Jump{{Span{era + second/10, era + second/5}, -3 * second}}
		}, true},
	}
	for _, c := range cases {
		var h History
		for _, r := range c.rows {
			d := Decision{Limit: l, Outcome: limiters.Allowed, Taken: true, Sent: era + r.sent*1000, Received: era + r.received*1000}
			if r.released > 0 {
				d.Released = era + r.released*1000
			}
			h.Decisions = append(h.Decisions, d)
		}
		if c.make != nil {
			c.make(&h)
		}
		if got := complaints(t, h, "concurrency") > 0; got != c.wrong {
			t.Errorf("%s: got complaints %v, want %v", c.name, h.Check(), c.wrong)
		}
	}
}

func TestCheck_Slots(t *testing.T) {
	slot := func(from, to int64, claimed bool) Slot { // ms
		return Slot{Sent: era + from*1000, Received: era + from*1000 + 100, Released: era + to*1000, Claimed: claimed}
	}
	cases := []struct {
		name  string
		h     History
		wrong bool
	}{
		{"all in use", History{Slots: []Slot{slot(0, 100, true), slot(50, 100, true), slot(100, 200, true)}}, false},
		{"one more", History{Slots: []Slot{slot(0, 100, true), slot(50, 100, true), slot(90, 200, true)}}, true},
		{"one that passed for want of a store", History{Slots: []Slot{slot(0, 100, true), slot(50, 100, true), slot(90, 200, false)}}, false},
		{"one that began beats ago", History{Slots: []Slot{slot(0, 1000, true), slot(950, 1000, true), slot(990, 1000, true)}}, false},
		{"after a loss", History{
			Losses: []Span{{era, era + 1000}}, Slots: []Slot{slot(0, 100, true), slot(50, 100, true), slot(90, 200, true)},
		}, false},
		{"long after it", History{
			Losses: []Span{{era, era + 1000}}, Slots: []Slot{slot(4000, 4100, true), slot(4050, 4100, true), slot(4090, 4200, true)},
		}, true},
		{"claims", History{Sums: []Sum{{era, 2}, {era + 1, 1}}}, false},
		{"too many claims", History{Sums: []Sum{{era, 2}, {era + 1, 3}}}, true},
	}
	for _, c := range cases {
		c.h.Allocation = 2
		if got := complaints(t, c.h, "fleet") > 0; got != c.wrong {
			t.Errorf("%s: got complaints %v, want %v", c.name, c.h.Check(), c.wrong)
		}
	}
}
