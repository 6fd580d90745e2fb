// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"container/heap"
	"fmt"
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

// taking is a decision that took its cost at some moment from sent to received.
type taking struct {
	sent, received int64
	missing        int64 // units that it has not been given yet
}

// takings is a heap, with the one that must be served first on top.
type takings []*taking

func (t takings) Len() int           { return len(t) }
func (t takings) Less(i, j int) bool { return t[i].received < t[j].received }
func (t takings) Swap(i, j int)      { t[i], t[j] = t[j], t[i] }
func (t *takings) Push(x any)        { *t = append(*t, x.(*taking)) }
func (t *takings) Pop() any {
	last := (*t)[len(*t)-1]
	*t = (*t)[:len(*t)-1]
	return last
}

// checkTaken complains if more was taken than capacity + rate·t in any time t.
//
// A bucket of the same numbers serves what was taken, as soon as it is allowed to
// (from when it was sent) and what was answered first, first. To serve early is
// never worse for those who come later, and the earliest end first is the best
// order there is. It also may serve a cost by pieces. So if even that bucket
// comes too late for an answer, no other has given it in time.
func (h *History) checkTaken(l *limiters.Limit, decisions []Decision) (complaints []string) {
	for _, stretch := range h.stretches() {
		var all []*taking
		for _, d := range decisions {
			if d.Taken && d.Sent >= stretch.From && d.Received <= stretch.To {
				// libfaketime may be off by the last digit.
				all = append(all, &taking{h.earliest(d.Sent) - 1, h.latest(d.Received) + 1, newBucket(l).cost})
			}
		}
		slices.SortFunc(all, func(a, b *taking) int { return int(a.sent - b.sent) })
		b := newBucket(l)
		b.level = b.capacity
		if len(all) > 0 {
			b.at = all[0].sent
		}
		late, worst := 0, ""
		var waiting takings
		for next := 0; next < len(all) || len(waiting) > 0; {
			if len(waiting) == 0 {
				b.advance(all[next].sent)
			}
			for next < len(all) && all[next].sent <= b.at {
				heap.Push(&waiting, all[next])
				next++
			}
			first := waiting[0]
			given := min(b.level, first.missing)
			b.level -= given
			if first.missing -= given; first.missing > 0 {
				until := b.at + (first.missing+b.refill-1)/b.refill
				if next < len(all) && all[next].sent < until {
					until = all[next].sent
				}
				if until <= first.received {
					b.advance(until)
					continue
				}
				late++
				if worst == "" {
					worst = fmt.Sprintf("the first one %d tokens early, asked for at %d µs and allowed by %d µs",
						(first.missing-(first.received-b.at)*b.refill+l.Period.Microseconds()-1)/l.Period.Microseconds(), first.sent, first.received)
				}
			}
			heap.Pop(&waiting)
		}
		if late > 0 {
			complaints = append(complaints, fmt.Sprintf("rate %s, identity %d: %d of %d requests were allowed that cannot have been; %s",
				l.Name, decisions[0].Identity, late, len(all), worst))
		}
	}
	return complaints
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
		unjust, worst := 0, ""
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
				worst = fmt.Sprintf("the last one at %d to %d µs, when %d tokens or more were left", d.Sent, d.Received, left/l.Period.Microseconds())
			}
		}
		if unjust > 0 {
			complaints = append(complaints, fmt.Sprintf("rate %s, identity %d: %d denials that cannot be just, %s", l.Name, decisions[0].Identity, unjust, worst))
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
