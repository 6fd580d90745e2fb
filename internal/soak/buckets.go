// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sort"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// bucket is a token bucket as a limit promises it, in units of which a token has
// as many as its period has µs: each µs exactly Requests flow in.
type bucket struct {
	refill, capacity, cost int64
	level, at              int64
}

func newBucket(l *limiters.Limit) bucket {
	token := l.Period.Microseconds()
	return bucket{refill: l.Requests, capacity: l.Capacity * token, cost: l.Cost * token}
}

// advance refills the bucket until t.
func (b *bucket) advance(t int64) {
	if t <= b.at {
		return
	}
	if elapsed := t - b.at; elapsed > (b.capacity-b.level)/b.refill {
		b.level = b.capacity
	} else {
		b.level += elapsed * b.refill
	}
	b.at = t
}

// checkTaken complains if in any time t more was taken than capacity + rate·t.
//
// What was sent and answered within a time was taken within it. So for every time
// from when something was sent until when something was answered, the sum of what
// lies within must be allowed. Nothing else follows from the intervals for sure:
// a bucket that gave each its share as early as possible, or the one that is
// answered first, would not be right, because what it keeps may be used later.
func (h *History) checkTaken(l *limiters.Limit, decisions []Decision) (complaints []string) {
	b := newBucket(l)
	for _, stretch := range h.stretches() {
		var spans []Span
		for _, d := range decisions {
			if d.Taken && d.Sent >= stretch.From && d.Received <= stretch.To {
				// libfaketime may be off by the last digit.
				spans = append(spans, Span{h.earliest(d.Sent) - 1, h.latest(d.Received) + 1})
			}
		}
		most, in := fullest(spans, b.cost, b.refill)
		if over := most - b.capacity; over > 0 {
			token := l.Period.Microseconds()
			complaints = append(complaints, fmt.Sprintf("rate %s, identity %d: %d tokens more than there were, between %d and %d µs",
				l.Name, decisions[0].Identity, (over+token-1)/token, in.From, in.To))
		}
	}
	return complaints
}

// fullest returns the most that cost·(spans within a time) − refill·(its length)
// can be, and for which time.
func fullest(spans []Span, cost, refill int64) (most int64, in Span) {
	if len(spans) == 0 {
		return 0, in
	}
	// A tree over the spans in the order of their ends. Those that begin late
	// enough have been put in, and each node knows of those below it the sum of
	// their costs, and the most of that sum up to an end less the refill until then.
	type node struct {
		sum, most int64
		end       int64
	}
	slices.SortFunc(spans, func(a, b Span) int { return cmp.Compare(a.To, b.To) })
	origin := spans[0].From
	size := 1
	for size < len(spans) {
		size *= 2
	}
	tree := make([]node, 2*size)
	for i := range tree {
		tree[i].most = math.MinInt64 / 2
	}
	order := make([]int, len(spans))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(spans[b].From, spans[a].From) })
	for _, i := range order {
		s := spans[i]
		at := size + i
		tree[at] = node{cost, cost - refill*(s.To-origin), s.To}
		for at /= 2; at > 0; at /= 2 {
			left, right := tree[2*at], tree[2*at+1]
			n := node{left.sum + right.sum, left.most, left.end}
			if v := left.sum + right.most; v > n.most {
				n.most, n.end = v, right.end
			}
			tree[at] = n
		}
		if v := tree[1].most + refill*(s.From-origin); v > most {
			most, in = v, Span{s.From, tree[1].end}
		}
	}
	return most, in
}

// settle is how long after a fault scripts may still run that nobody waits for,
// and what that takes of clocks that were set.
const settle = 2_500_000

// checkDenied complains of denials by a bucket that must have had the tokens, in
// times without trouble.
//
// A second bucket gives everything as late as it can have been given, also what
// only may have been taken, and starts empty. What it would have left for the
// denial the true one had as well.
func (h *History) checkDenied(l *limiters.Limit, decisions []Decision) (complaints []string) {
	var sent, received []int64 // of what took or may have taken
	var decided []Decision
	for _, d := range decisions {
		switch {
		case d.Outcome == limiters.Unknown:
			sent, received = append(sent, d.Sent), append(received, d.Received+settle)
		case d.Taken:
			sent, received = append(sent, d.Sent), append(received, d.Received)
		}
		if d.Outcome != limiters.Unknown {
			decided = append(decided, d)
		}
	}
	slices.Sort(sent)
	slices.Sort(received)
	slices.SortFunc(decided, func(a, b Decision) int { return int(a.Sent - b.Sent) })
	upTo := func(times []int64, t int64) int64 {
		return int64(sort.Search(len(times), func(i int) bool { return times[i] > t }))
	}
	for _, calm := range h.calm() {
		b := newBucket(l)
		began, next := false, 0
		unjust, first, last := 0, "", ""
		for _, d := range decided {
			if d.Sent < calm.From || d.Received > calm.To {
				continue
			}
			if !began { // which sets right a bucket's time that lay in the future
				began, b.at = true, d.Received
				next = int(upTo(received, b.at))
				continue
			}
			for ; next < len(received) && received[next] <= d.Sent; next++ {
				b.advance(received[next])
				b.level -= b.cost
			}
			b.advance(d.Sent)
			taken := upTo(sent, d.Received) - int64(next)
			if left := b.level - taken*b.cost; d.Outcome == limiters.Denied && left >= b.cost+2*b.refill {
				unjust++
				last = fmt.Sprintf("by instance %d at %d to %d µs, when %d tokens or more were left", d.Instance, d.Sent, d.Received, left/l.Period.Microseconds())
				first = cmp.Or(first, last)
			}
		}
		if unjust > 0 {
			complaints = append(complaints, fmt.Sprintf("rate %s, identity %d: %d denials that cannot be just, the first one %s, the last one %s",
				l.Name, decisions[0].Identity, unjust, first, last))
		}
	}
	return complaints
}

// calm returns the times without trouble.
func (h *History) calm() []Span {
	const ever = int64(1) << 62
	from := -ever
	var all []Span
	for _, t := range h.Troubles {
		if t.From > from {
			all = append(all, Span{from, t.From})
		}
		from = max(from, t.To+settle)
	}
	return append(all, Span{from, ever})
}
