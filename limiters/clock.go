// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"sync/atomic"
	"time"
)

// serverClock estimates the TIME of one Redis node from replies that told it
// and the monotonic time since. It may be behind by what a reply took to
// arrive, and ahead by no more than a round trip unless the node's clock was
// set back since. So a deadline derived from it errs towards giving up early.
type serverClock struct {
	base  time.Time    // of monotonic time
	ahead atomic.Int64 // us, server time minus time since base; 0 at first
}

// learn notes that a command sent at sent, whose reply was read at received,
// told the server's time in us.
//
// The server's clock stood there at some moment between the two. As long as the
// estimate agrees with that it is kept: it is no worse than a new one, and often
// better, because a reply may have waited long for a busy process to read it.
func (c *serverClock) learn(sent, received time.Time, server int64) {
	least := server - received.Sub(c.base).Microseconds()
	most := server - sent.Sub(c.base).Microseconds()
	if old := c.ahead.Load(); old < least || old > most {
		c.ahead.Store(least)
	}
}

// at returns the server's time at a time of ours, in us.
func (c *serverClock) at(t time.Time) int64 {
	return c.ahead.Load() + t.Sub(c.base).Microseconds()
}
