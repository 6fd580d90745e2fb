// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
)

const (
	// backgroundTimeout bounds what happens in the background all together when a
	// store ends, and roundTimeout one round of releases or renewals: a node that
	// hangs must not keep those of others waiting for long until its breaker opens.
	backgroundTimeout = time.Second
	roundTimeout      = 250 * time.Millisecond

	// batchSize bounds the leases in one command, because Redis does nothing
	// else meanwhile, and roundSize those in one round trip.
	batchSize = 500
	roundSize = 20 * batchSize
)

// safely runs background work. A bug in it must not end the process.
func (r *Redis) safely(operation string, work func() error) (err error) {
	if bug := safely.Do(operation, func() { err = work() }); bug != nil {
		err = fmt.Errorf("%w: %w", errPanic, bug)
		_ = safely.Do(operation, func() { r.observe(operation, 0, err) })
	}
	return err
}

// flushLoop sends releases: at once, and while that is under way gathers what
// ends meanwhile into the next round. So a quiet instance releases without
// delay and a busy one in large batches, without any timer. What fails is sent
// again at each tick.
func (r *Redis) flushLoop() {
	ticker := time.NewTicker(renewEvery)
	defer ticker.Stop()
	wake := r.leases.wake
	for !r.stopped() {
		all := true
		select {
		case <-wake:
			all = false
		case <-ticker.C:
		case <-r.stop:
			continue
		}
		wake = nil // no hurry any more, unless somebody answers
		_ = r.safely("release", func() error {
			if some, err := r.flushRounds(time.Now().Add(r.roundTimeout()), all); some || err == nil {
				wake = r.leases.wake
			}
			return nil
		})
	}
	_ = r.safely("release", func() error { return r.flush(r.closeBy, true) })
}

func (r *Redis) roundTimeout() time.Duration {
	return min(max(r.timeout, roundTimeout), backgroundTimeout)
}

func (r *Redis) stopped() bool {
	select {
	case <-r.stop:
		return true
	default:
		return false
	}
}

// flush sends the releases of the queue, or with all every one, once.
func (r *Redis) flush(deadline time.Time, all bool) error {
	_, err := r.flushRounds(deadline, all)
	return err
}

// flushRounds is flush, and reports whether a server has answered. It ends when
// none does.
func (r *Redis) flushRounds(deadline time.Time, all bool) (some bool, failed error) {
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	for more := true; more; all = false {
		start := time.Now()
		var leases []*lease
		if leases, more = r.leases.toRelease(start, roundSize, all); len(leases) == 0 {
			continue
		}
		answered, err := r.release(ctx, start, leases)
		r.observe("release", time.Since(start), err)
		if err != nil {
			failed = err
		}
		if some = some || answered; err != nil && !answered {
			break
		}
	}
	return some, failed
}

// release sends the release of leases, at now, and reports whether a server has
// answered. What one does not answer is kept, and costs others nothing but time.
func (r *Redis) release(ctx context.Context, now time.Time, leases []*lease) (some bool, failed error) {
	slices.SortFunc(leases, func(a, b *lease) int { return a.key.compare(b.key) })
	type releases struct {
		commands []*command
		batches  [][]*lease
	}
	byNode := map[target]*releases{}
	room := make([]any, 0, 3*len(leases)) // for the arguments of all
	made := make([]command, 0, len(leases))
	for len(leases) > 0 {
		n := 1
		for n < min(len(leases), batchSize) && leases[n].key == leases[0].key {
			n++
		}
		batch := leases[:n]
		leases = leases[n:]
		for _, l := range batch {
			r.render(l)
		}
		key := batch[0].redisKey
		to, err := r.node(ctx, key)
		if err == nil && to.breaker.open.Load() && !r.stopped() {
			err = to.refusal // sooner than its commands are made
		}
		if err != nil {
			failed = err
			continue
		}
		node := byNode[to]
		if node == nil {
			node = &releases{}
			byNode[to] = node
		}
		args := append(room[len(room):], "zrem", key)
		for _, l := range batch {
			args = append(args, &l.name)
		}
		room = room[:len(room)+len(args)]
		made = append(made, command{Cmder: redis.NewIntCmd(ctx, args...)})
		node.commands = append(node.commands, &made[len(made)-1])
		node.batches = append(node.batches, batch)
	}
	var wg sync.WaitGroup
	for to, node := range byNode {
		send := func() { r.shareSafely(ctx, to, node.commands) }
		if len(byNode) == 1 {
			send()
		} else {
			wg.Go(send)
		}
	}
	wg.Wait()
	for _, node := range byNode {
		for i, c := range node.commands {
			switch err := c.Err(); {
			case err == nil, redis.HasErrorPrefix(err, "WRONGTYPE"): // then no lease is there
				r.leases.acknowledged(now, node.batches[i])
				some = true
			default:
				failed = err
			}
		}
	}
	return some, failed
}

// renewLoop renews the leases of requests that take longer than a third of
// their lease.
func (r *Redis) renewLoop() {
	ticker := time.NewTicker(renewEvery)
	defer ticker.Stop()
	for !r.stopped() {
		select {
		case <-r.stop:
		case <-ticker.C:
			_ = r.safely("renew", r.renew)
		}
	}
}

// renewal is one call of renew.lua.
type renewal struct {
	scriptCall
	leases []*lease
}

func (r *Redis) renewCall(key renewalKey, leases []*lease) scriptCall {
	c := newScriptCall(&renewScript, 1, 1+len(leases))
	c.args = append(c.args, key.redis(r.prefix), nil, key.length.Microseconds())
	for _, l := range leases {
		r.render(l)
		c.args = append(c.args, &l.name)
	}
	return c
}

// renew renews the leases that are due.
func (r *Redis) renew() error {
	var calls []*renewal
	for key, leases := range r.leases.due(time.Now(), renewEvery) {
		for batch := range slices.Chunk(leases, batchSize) {
			calls = append(calls, &renewal{r.renewCall(key, batch), batch})
		}
	}
	for round := range slices.Chunk(calls, roundSize/batchSize) {
		if r.stopped() {
			break
		}
		r.renewRound(round)
	}
	return nil
}

func (r *Redis) renewRound(calls []*renewal) {
	ctx, cancel := context.WithTimeout(context.Background(), r.roundTimeout())
	defer cancel()
	start := time.Now()
	todo := make([]*scriptCall, len(calls))
	for i, c := range calls {
		todo[i] = &c.scriptCall
	}
	r.run(ctx, todo...)

	var failed error
	over := time.Now()
	for _, c := range calls {
		revives := over
		if c.err != nil {
			failed = c.err
			if c.mayHaveRun() {
				revives, _ = ctx.Deadline()
			}
		}
		r.leases.renewed(start, c.err == nil, revives, c.leases)
	}
	r.observe("renew", over.Sub(start), failed)
}
