// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
)

// ask asks about identities in one round trip, within the deadline.
func (r *Redis) ask(deadline time.Time, calls []*admitCall) {
	if r.cluster == nil { // the way of most, without a closure
		r.askSafely(deadline, calls)
		return
	}
	apart(r, calls, func(calls []*admitCall) { r.askSafely(deadline, calls) })
}

// askSafely asks one node, after a bug in which nobody knows what the calls have
// taken, so that it is given back. It sends again what a reply proves not to have
// run.
func (r *Redis) askSafely(deadline time.Time, calls []*admitCall) {
	bug := safely.Do("script", func() {
		todo := calls
		for n := 0; n < maxAttempts && len(todo) > 0 && (n == 0 || time.Now().Before(deadline)); n++ {
			if r.cluster == nil {
				r.askServer(deadline, todo)
			} else {
				r.askCluster(deadline, todo[0])
			}
			if slices.ContainsFunc(todo, (*admitCall).again) {
				todo = slices.DeleteFunc(slices.Clone(todo), func(c *admitCall) bool { return !c.again() })
			} else {
				todo = nil
			}
		}
	})
	if bug != nil {
		for _, c := range calls {
			c.sent, c.err = time.Now(), fmt.Errorf("%w: %w", errPanic, bug)
		}
	}
}

// askServer asks the one server that there is, in a command with others who ask the
// same.
func (r *Redis) askServer(deadline time.Time, calls []*admitCall) {
	to := r.single
	if to.breaker.open.Load() && !r.stopped() {
		for _, c := range calls {
			c.err = to.refusal
		}
		return
	}
	began := time.Now()
	_, received := to.outbox.send(to.client, deadline, calls, nil)
	var failed error
	key := ""
	for _, c := range calls {
		if r.blames(to.node, received.Sub(began), c.err) {
			failed, key = c.err, c.keys[0]
		}
	}
	r.note(to.node, began, received, key, failed)
}

// askCluster asks the node of a Cluster that has the keys of a call.
func (r *Redis) askCluster(deadline time.Time, c *admitCall) {
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	to, err := r.node(ctx, c.keys[0])
	if err != nil {
		c.err = err
		return
	}
	clock := &to.clock
	if c.clock != nil {
		clock = c.clock
	}
	c.deadline = clock.at(deadline)
	a := new(admitCommand)
	a.add(c)
	args := a.compose(ctx, nil)
	args[argFirstKey] = c.keys[0] // by which go-redis finds a node that it redirects to
	sending := &command{Cmder: &a.scriptCmd}
	sent, received := r.share(ctx, to, []*command{sending})
	answer := sending.Cmder.(*scriptCmd) // another one if time was up
	c.read(sent, answer.Val(), answer.Err())
	if sending.redirected { // whose answer it is will be known after a while
		c.clock = &serverClock{base: r.base}
		clock = c.clock
	}
	if reply := answer.Val(); answer.Err() == nil && len(reply) > 0 {
		clock.learn(sent, received, reply[0])
	}
}
