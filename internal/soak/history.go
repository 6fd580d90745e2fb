// SPDX-License-Identifier: Apache-2.0

// Package soak looks for what no test of one fault finds: it lets instances of
// the limiters, and whole Caddys, work for a while with random faults, and then
// verifies what may never have happened.
//
// A [History] has every decision with the time when it was asked for and that
// when the answer came. Between the two, nobody knows when, Redis decided. Check
// complains of a history only if there is no moment for each decision at which it
// would have been right; so a slow machine can make it blind, but never make it
// complain. Decisions that the store failed to make are in the history, too: they
// may have taken something, and have let the request pass.
//
//	make soak                                       # real Caddys, ten minutes
//	go test ./internal/soak -exactness.time 10m     # limiters in this process
package soak

import (
	"cmp"
	"slices"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// Decision is the answer to one check of one request. Times are in µs of this
// machine's wall clock, as Redis's TIME is, apart from jumps.
type Decision struct {
	Instance int
	Identity int
	Limit    *limiters.Limit
	Outcome  limiters.Outcome // Unknown: the store failed
	Taken    bool             // tokens, or a lease

	Sent, Received int64

	// Released is when a lease began to be given back: 0 if it never was, because
	// its instance died.
	Released int64
}

// Span is a time.
type Span struct{ From, To int64 }

func (s Span) overlaps(from, to int64) bool { return from < s.To && to > s.From }

// Jump is a time at some moment of which the server's clock was set.
type Jump struct {
	Span
	By int64 // µs
}

// History is what happened.
type History struct {
	Decisions []Decision
	Slots     []Slot // of the fleet
	Sums      []Sum  // of the claims on them
	Losses    []Span // at one moment of which the store lost all it had
	Jumps     []Jump // of the server's clock
	Troubles  []Span // of any kind, these included

	// Renewals tells, by instance and in order, when rounds of renewals of all
	// leases that were due were over and had succeeded.
	Renewals map[int][]int64

	// Allocation is how many slots the fleet has.
	Allocation int64
}

// Check returns what is wrong, in words.
func (h *History) Check() []string {
	slices.SortFunc(h.Losses, func(a, b Span) int { return cmp.Compare(a.From, b.From) })
	slices.SortFunc(h.Jumps, func(a, b Jump) int { return cmp.Compare(a.From, b.From) })
	slices.SortFunc(h.Troubles, func(a, b Span) int { return cmp.Compare(a.From, b.From) })
	type key struct {
		identity int
		limit    *limiters.Limit
	}
	decisions := map[key][]Decision{}
	for _, d := range h.Decisions {
		k := key{d.Identity, d.Limit}
		decisions[k] = append(decisions[k], d)
	}
	var complaints []string
	for k, of := range decisions {
		if k.limit.Kind == limiters.Rate {
			complaints = append(complaints, h.checkTaken(k.limit, of)...)
			complaints = append(complaints, h.checkDenied(k.limit, of)...)
		} else {
			complaints = append(complaints, h.checkLeases(k.limit, of)...)
		}
	}
	complaints = append(complaints, h.checkSlots()...)
	slices.Sort(complaints)
	return complaints
}

// earliest and latest are times of a clock that makes all the jumps forward of
// the server's and none back, at some moment of which something was that was at t
// or later, or earlier. Between any two moments it moves at least as far as the
// server's.
func (h *History) earliest(t int64) int64 {
	at := t
	for _, j := range h.Jumps {
		if j.To <= t {
			at += max(0, j.By)
		}
	}
	return at
}

func (h *History) latest(t int64) int64 {
	at := t
	for _, j := range h.Jumps {
		if j.From <= t {
			at += max(0, j.By)
		}
	}
	return at
}

// stretches returns the times between losses. What happens in one surely happens
// after the loss before it, and before the next.
func (h *History) stretches() []Span {
	const ever = int64(1) << 62
	from := -ever
	var all []Span
	for _, l := range h.Losses {
		all = append(all, Span{from, l.From})
		from = l.To
	}
	return append(all, Span{from, ever})
}
