// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"math"
	"strconv"
)

// Share returns what one of n instances allows by itself while they cannot agree: a
// limit of its own with a bucket of the n-th part of the capacity, rounded up and at
// least the cost, and exactly the n-th part of the rate; or the n-th part of the
// leases, rounded up. Together n instances allow no more than n buckets at once, and
// over time what the limit allows.
func (l *Limit) Share(n int64) *Limit {
	s := *l
	s.Capacity = (l.Capacity + n - 1) / n
	if l.Kind == Concurrency {
		return &s
	}
	s.Capacity = max(s.Capacity, l.Cost)
	// A period n times as long, in the same ticks: exact, and far from overflow for
	// any number of instances that there may be.
	n = min(n, math.MaxInt64/2/(s.Capacity*l.periodTicks))
	s.periodTicks *= n
	s.keys.suffix += ":" + strconv.FormatInt(n, 10) // its level counts other units
	s.state = s.keys.id()
	return &s
}
