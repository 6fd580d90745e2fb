// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"math"
	"time"
)

// The token bucket, in integers: a bucket's level is counted in units of which
// a token has as many as its period has ticks. So in each tick exactly
// l.Requests units flow in, and nothing is ever rounded.
//
// A bucket that is not stored is full.

// capacityUnits is the level of a full bucket.
func (l *Limit) capacityUnits() int64 { return l.Capacity * l.periodTicks }

// costUnits is what one request takes.
func (l *Limit) costUnits() int64 { return l.Cost * l.periodTicks }

// refill returns the level of a bucket that held level units, elapsed ticks ago.
func (l *Limit) refill(level, elapsed int64) int64 {
	capacity := l.capacityUnits()
	if elapsed <= 0 {
		return min(level, capacity)
	}
	// The division keeps the product from overflowing after a long rest.
	if missing := capacity - level; missing <= 0 || elapsed > missing/l.Requests {
		return capacity
	}
	return level + elapsed*l.Requests
}

// ttl is for how many milliseconds a bucket at level must be kept: until it is
// full, and somewhat longer, because Redis counts them from up to a
// millisecond before the script's own clock.
func (l *Limit) ttl(level int64) int64 {
	ticks := (l.capacityUnits() - level) / l.Requests
	return ticks/int64(time.Millisecond/l.tick) + 2
}

// until is the exact time in which a bucket rises from one level to another,
// rounded up to a tick; 292 years if it is longer.
func (l *Limit) until(level, target int64) time.Duration {
	if level >= target {
		return 0
	}
	ticks := (target - level + l.Requests - 1) / l.Requests
	return time.Duration(min(ticks, math.MaxInt64/int64(l.tick))) * l.tick
}

// Outcomes as the scripts return them.
const (
	replyDenied       = 0
	replyAllowed      = 1
	replyNotEvaluated = 2
	replyLate         = 3
	replyWrongType    = 4
)

// result turns a script's answer about a limit into a Result.
func (l *Limit) result(outcome, level int64) (Result, error) {
	var r Result
	switch outcome {
	case replyAllowed:
		r.Outcome = Allowed
	case replyDenied:
		r.Outcome = Denied
	case replyNotEvaluated:
		r.Outcome = NotEvaluated
	default:
		return r, errShape
	}
	if l.Kind == Concurrency {
		r.Remaining = max(0, l.Capacity-level)
		return r, nil
	}
	if level < 0 || level > l.capacityUnits() {
		return Result{}, errShape
	}
	r.Remaining = level / l.periodTicks
	r.NextToken = l.until(level, min(l.capacityUnits(), (r.Remaining+1)*l.periodTicks))
	if r.Outcome == Denied {
		r.RetryAfter = l.until(level, l.costUnits())
	}
	return r, nil
}
