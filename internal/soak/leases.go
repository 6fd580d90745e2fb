// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// hold is a time in which Redis surely had a lease, without a gap.
type hold struct {
	Span
	first bool // from its admission on; else it had ended perhaps, and was put back
	of    int  // index of the admission
}

// checkLeases complains of admissions while as many leases as there may be were
// surely held, from before the request was sent until after it was answered; and
// of any moment with more.
func (h *History) checkLeases(l *limiters.Limit, decisions []Decision) (complaints []string) {
	var holds []hold
	var admitted []int
	for i, d := range decisions {
		if d.Taken {
			admitted = append(admitted, i)
			holds = append(holds, h.holds(l, i, d)...)
		}
	}
	slices.SortFunc(holds, func(a, b hold) int { return int(a.From - b.From) })
	slices.SortFunc(admitted, func(a, b int) int { return int(decisions[a].Sent - decisions[b].Sent) })

	wrong, worst := 0, ""
	var active []hold // which began before, and may yet last
	next := 0
	for _, i := range admitted {
		d := decisions[i]
		for ; next < len(holds) && holds[next].From <= d.Sent; next++ {
			active = append(active, holds[next])
		}
		active = slices.DeleteFunc(active, func(o hold) bool { return o.To < d.Sent })
		n := int64(0)
		for _, o := range active {
			if o.To >= d.Received && o.of != i {
				n++
			}
		}
		if n >= l.Capacity {
			wrong++
			worst = fmt.Sprintf("the last one at %d to %d µs, while %d were held", d.Sent, d.Received, n)
		}
	}
	if wrong > 0 {
		complaints = append(complaints, fmt.Sprintf("concurrency %s, identity %d: %d admissions at a full limit of %d, %s",
			l.Name, decisions[0].Identity, wrong, l.Capacity, worst))
	}
	// Of leases that are held without a gap since their admissions the last one
	// was admitted while it was too many, whichever it was.
	if most, at := deepest(holds); most > l.Capacity {
		var who strings.Builder
		for _, o := range holds {
			if d := decisions[o.of]; o.first && o.From <= at && at < o.To {
				fmt.Fprintf(&who, "; of instance %d, sent at %d, answered at %d, given back at %d", d.Instance, d.Sent, d.Received, d.Released)
			}
		}
		complaints = append(complaints, fmt.Sprintf("concurrency %s, identity %d: %d leases held at %d µs, of at most %d%s",
			l.Name, decisions[0].Identity, most, at, l.Capacity, who.String()))
	}
	return complaints
}

// deepest returns the most first holds there are at once, and when.
func deepest(holds []hold) (most, at int64) {
	type edge struct {
		at, by int64
	}
	var edges []edge
	for _, o := range holds {
		if o.first {
			edges = append(edges, edge{o.From, 1}, edge{o.To, -1})
		}
	}
	slices.SortFunc(edges, func(a, b edge) int {
		if a.at != b.at {
			return int(a.at - b.at)
		}
		return int(a.by - b.by) // what ends, ends first
	})
	n := int64(0)
	for _, e := range edges {
		if n += e.by; n > most {
			most, at = n, e.at
		}
	}
	return most, at
}

// holds returns when Redis surely had the lease of an admission.
//
// It has it for as long as it is after the admission, and longer if it is known
// to be renewed. A round of renewals that succeeded has renewed every lease that
// the instance had when the round before it was over, or has found it to be of
// the last third of its length or younger. All of that ends with a loss, with the
// release, and earlier by as much as the server's clock jumps forward.
func (h *History) holds(l *limiters.Limit, i int, d Decision) []hold {
	length := l.Lease.Microseconds()
	released := d.Released
	if released == 0 {
		released = int64(1) << 62
	}
	var all []hold
	add := func(from, to, since int64, first bool) {
		to = h.shortened(since, to)
		for _, loss := range h.Losses {
			if loss.To > since && loss.From < to {
				to = loss.From
			}
		}
		to = min(to, released)
		if last := len(all) - 1; last >= 0 && from <= all[last].To {
			all[last].To = max(all[last].To, to)
		} else if from < to {
			all = append(all, hold{Span{from, to}, first, i})
		}
	}
	add(d.Received, d.Sent+length, d.Sent, true)
	rounds := h.Renewals[d.Instance]
	first, _ := slices.BinarySearch(rounds, d.Received)
	for r := first + 1; r < len(rounds) && rounds[r] < released; r++ {
		if before := rounds[r-1]; !h.lostWithin(before-length/3, rounds[r]) {
			add(rounds[r], before+length*2/3, before, false)
		}
	}
	return all
}

func (h *History) lostWithin(from, to int64) bool {
	return slices.ContainsFunc(h.Losses, func(l Span) bool { return l.overlaps(from, to) })
}

// shortened returns when something ends that was to end at to, told at since or
// later: earlier by what the server's clock jumped forward meanwhile.
func (h *History) shortened(since, to int64) int64 {
	for _, j := range h.Jumps {
		if j.By > 0 && j.To > since && j.From < to {
			to = max(j.From, to-j.By)
		}
	}
	return to
}
