// SPDX-License-Identifier: Apache-2.0

package soak

import "fmt"

// Slot is a non-critical request that the fleet shedder let begin.
type Slot struct {
	Instance       int
	Sent, Received int64
	Released       int64 // when it was about to end; 0: never, its instance died
	Claimed        bool  // in a slot of the fleet, and not because the store failed
}

// Sum is what the fleet's state in Redis said of the claims.
type Sum struct {
	At     int64
	Claims int64 // of all instances
}

const (
	// shortSlot is below a beat. What began so long ago at most, began under a
	// claim that nobody else has been given yet.
	shortSlot = 200_000

	// claimLife is how long claims may outlive what Redis knows of them, after a
	// loss or a jump: eight beats and something.
	claimLife = 3_000_000
)

// checkSlots complains of claims above the allocation, and of moments at which
// more requests were in claimed slots than there are.
func (h *History) checkSlots() (complaints []string) {
	for _, s := range h.Sums {
		if s.Claims > h.Allocation {
			return append(complaints, fmt.Sprintf("fleet: claims on %d slots at %d µs, of %d", s.Claims, s.At, h.Allocation))
		}
	}
	void := make([]Span, 0, len(h.Losses)+len(h.Jumps))
	for _, l := range h.Losses {
		void = append(void, Span{l.From, l.To + claimLife})
	}
	for _, j := range h.Jumps {
		void = append(void, Span{j.From, j.To + claimLife})
	}
	var holds []hold
	for i, s := range h.Slots {
		if !s.Claimed || s.Released == 0 || s.Released-s.Sent > shortSlot {
			continue
		}
		apart := true
		for _, v := range void {
			apart = apart && !v.overlaps(s.Sent, s.Released)
		}
		if apart {
			holds = append(holds, hold{Span{s.Received, s.Released}, true, i})
		}
	}
	if most, at := deepest(holds); most > h.Allocation {
		complaints = append(complaints, fmt.Sprintf("fleet: %d requests in slots at %d µs, of %d", most, at, h.Allocation))
	}
	return complaints
}
