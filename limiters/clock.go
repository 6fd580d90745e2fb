// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"sync/atomic"
	"time"
)

// serverClock estimates the TIME of one Redis node from the last reply that
// told it and the monotonic time since. It may be behind by what the reply
// took to arrive, never ahead unless the node's clock is set back. So a
// deadline derived from it errs towards giving up early.
type serverClock struct {
	base  time.Time    // of monotonic time
	ahead atomic.Int64 // us, server time minus time since base; 0 is unknown
}

// set notes that a reply received at now said the server's time, in us.
func (c *serverClock) set(now time.Time, server int64) {
	c.ahead.Store(server - now.Sub(c.base).Microseconds())
}

// known reports whether the server has ever told its time.
func (c *serverClock) known() bool { return c.ahead.Load() != 0 }

// at returns the server's time at a time of ours, in us.
func (c *serverClock) at(t time.Time) int64 {
	return c.ahead.Load() + t.Sub(c.base).Microseconds()
}
