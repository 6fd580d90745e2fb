// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/lua"
)

const (
	// backgroundTimeout bounds one round of releases or renewals.
	backgroundTimeout = time.Second

	// renewBatch bounds the leases in one renewal script, which blocks Redis
	// while it runs, and renewPipeline the scripts in one round trip.
	renewBatch    = 500
	renewPipeline = 100
)

// flushLoop sends releases: at once, and while that is under way gathers what
// ends meanwhile into the next batch. So a quiet instance releases without
// delay and a busy one in large batches, without any timer.
func (r *Redis) flushLoop() {
	defer r.done.Done()
	again := time.NewTicker(renewEvery)
	defer again.Stop()
	wake := r.leases.wake
	for {
		select {
		case <-wake:
		case <-again.C: // what failed, and what may have been revived
		case <-r.stop:
			r.flush()
			return
		}
		wake = r.leases.wake
		if err := r.flush(); err != nil {
			wake = nil // no hurry any more
		}
	}
}

// flush sends every release that is not under way, once.
func (r *Redis) flush() error {
	start := time.Now()
	batch := r.leases.toSend(start)
	if len(batch) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), backgroundTimeout)
	defer cancel()
	pipe := r.client.Pipeline()
	cmds := make(map[stateKey]*redis.IntCmd, len(batch))
	for key, leases := range batch {
		ids := make([]any, len(leases))
		for i, l := range leases {
			ids[i] = r.leaseID(l.id)
		}
		cmds[key] = pipe.ZRem(ctx, key.redis(r.prefix), ids...)
	}
	_, err := pipe.Exec(ctx)
	r.observe("release", time.Since(start), err)
	for key, leases := range batch {
		r.leases.sent(start, key, leases, cmds[key].Err() == nil)
	}
	return err
}

// renewLoop renews the leases of requests that take longer than a third of
// their lease.
func (r *Redis) renewLoop() {
	defer r.done.Done()
	ticker := time.NewTicker(renewEvery)
	defer ticker.Stop()
	for {
		select {
		case <-r.stop:
			return
		case <-ticker.C:
			r.renew()
		}
	}
}

// renewal is one call of renew.lua.
type renewal struct {
	key    stateKey
	leases []*lease
	clock  *serverClock
	cmd    *scriptCmd
}

// renew renews the leases that are due.
func (r *Redis) renew() {
	var calls []*renewal
	for key, leases := range r.leases.due(time.Now()) {
		for len(leases) > 0 {
			n := min(len(leases), renewBatch)
			calls = append(calls, &renewal{key: key, leases: leases[:n]})
			leases = leases[n:]
		}
	}
	for len(calls) > 0 {
		n := min(len(calls), renewPipeline)
		r.renewCalls(calls[:n])
		calls = calls[n:]
	}
}

func (r *Redis) renewCalls(calls []*renewal) {
	ctx, cancel := context.WithTimeout(context.Background(), backgroundTimeout)
	defer cancel()
	deadline, _ := ctx.Deadline()
	start := time.Now()

	pipe := r.client.Pipeline()
	var failed error
	for _, c := range calls {
		key := c.key.redis(r.prefix)
		var err error
		if c.clock, err = r.nodeClock(ctx, key); err != nil {
			failed = err
			continue
		}
		// The source is sent, not its hash: a pipeline cannot fall back, and
		// renewals are few.
		args := head(renewScript, lua.Renew, true, 1, 6+len(c.leases))
		args = append(args, key, c.clock.at(deadline), c.leases[0].length.Microseconds())
		for _, l := range c.leases {
			args = append(args, r.leaseID(l.id))
		}
		c.cmd = newScriptCmd(ctx, args)
		_ = pipe.Process(ctx, c.cmd)
	}
	if pipe.Len() > 0 {
		if _, err := pipe.Exec(ctx); err != nil {
			failed = err
		}
	}
	now := time.Now()
	for _, c := range calls {
		ok, revives := false, time.Time{}
		if c.cmd != nil {
			if err := c.cmd.Err(); err != nil {
				if mayHaveRun(err) {
					revives = deadline
				}
			} else if reply := c.cmd.Val(); len(reply) > 0 {
				c.clock.set(now, reply[0])
				ok = len(reply) > 1 // else it was late: again at the next tick
			}
		}
		r.leases.renewed(start, c.leases, ok, revives)
	}
	r.observe("renew", now.Sub(start), failed)
	r.leases.kick() // for releases that may not have been the last word
}
