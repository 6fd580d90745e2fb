// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/lua"
)

// script is a Lua script whose first argument is a deadline in server time and
// whose reply is integers, the server's time first. A reply of the time alone
// says that the deadline had passed and nothing was done.
type script struct {
	source string
	hash   any // a string
}

func newScript(source string) script {
	return script{source, redis.NewScript(source).Hash()}
}

var (
	admitScript = newScript(lua.Admit)
	renewScript = newScript(lua.Renew)
)

// scriptCmd is a command that go-redis must never send twice.
type scriptCmd struct {
	*redis.IntSliceCmd
	answered bool
}

// SetErr overrides that of go-redis, which for a connection that breaks blames
// those commands of a pipeline, too, that were answered before.
func (c *scriptCmd) SetErr(err error) {
	if err == nil {
		c.answered = true
	} else if c.answered {
		return
	}
	c.IntSliceCmd.SetErr(err)
}

// NoRetry overrides the default of go-redis, which in a Cluster resends a
// command whose connection broke.
func (*scriptCmd) NoRetry() bool { return true }

// Where things stand in scriptCall.args.
const (
	argCommand = iota
	argScript
	argKeys
	argFirstKey
)

// scriptCall is one call of a script under way. All its keys have one hash tag.
type scriptCall struct {
	script *script
	args   []any // the whole command
	keys   int

	clock *serverClock // of a node that it was redirected to
	sent  time.Time    // the last time; zero if it was never
	reply []int64
	err   error // errLate if the deadline had always passed
}

// newScriptCall returns a call with room for further keys and arguments, which
// are to be appended to its args: keys, a place for the deadline, arguments.
func newScriptCall(s *script, keys, room int) scriptCall {
	args := make([]any, argFirstKey, argFirstKey+keys+1+room)
	args[argCommand], args[argScript], args[argKeys] = "evalsha", s.hash, keys
	return scriptCall{script: s, args: args, keys: keys}
}

// mayHaveRun reports whether a call that failed may have taken effect, or may
// yet before its deadline.
func (c *scriptCall) mayHaveRun() bool { return !c.sent.IsZero() && mayHaveRun(c.err) }

// run sends the calls in one round trip, all within the deadline of ctx.
func (r *Redis) run(ctx context.Context, calls ...*scriptCall) {
	apart(r, calls, func(calls []*scriptCall) { r.runSafely(ctx, calls) })
}

// apart runs calls together, but in a Cluster each for itself, so that a node which
// fails costs the others nothing.
func apart[C any](r *Redis, calls []C, run func([]C)) {
	if r.cluster == nil || len(calls) == 1 {
		run(calls)
		return
	}
	var wg sync.WaitGroup
	for i := range calls {
		wg.Go(func() { run(calls[i : i+1]) })
	}
	wg.Wait()
}

// runSafely is runTogether, after a bug in which nobody knows what the calls have
// taken, so that it is given back.
func (r *Redis) runSafely(ctx context.Context, calls []*scriptCall) {
	if bug := safely.Do("script", func() { r.runTogether(ctx, calls) }); bug != nil {
		for _, c := range calls {
			c.sent, c.err = time.Now(), fmt.Errorf("%w: %w", errPanic, bug)
		}
	}
}

// runTogether sends calls to one node, and again those that a reply proves not
// to have run: the script was unknown, or the deadline had passed because our
// estimate of the server's clock was off. That of a node which has never
// answered is so far in the past that its first call always comes late.
func (r *Redis) runTogether(ctx context.Context, calls []*scriptCall) {
	deadline, _ := ctx.Deadline()
	for range maxAttempts {
		n, err := r.node(ctx, calls[0].args[argFirstKey].(string))
		if err != nil {
			for _, c := range calls {
				c.err = err
			}
			return
		}
		clock := &n.clock
		commands := make([]*command, len(calls))
		for i, c := range calls {
			if c.clock != nil {
				clock = c.clock
			}
			c.args[argFirstKey+c.keys] = clock.at(deadline)
			commands[i] = newCommand(ctx, argFirstKey, c.args)
		}
		sent, received := r.share(ctx, n, commands)

		var again []*scriptCall
		for i, c := range calls {
			cmd := commands[i]
			c.sent, c.reply, c.err = sent, cmd.Cmder.(*scriptCmd).Val(), cmd.Err()
			if c.err == nil && len(c.reply) == 0 {
				c.err = errShape
			}
			if c.err == nil {
				if cmd.redirected { // whose answer it is will be known after a while
					c.clock = &serverClock{base: r.base}
					clock = c.clock
				}
				clock.learn(sent, received, c.reply[0])
			}
			switch {
			case c.err == nil && len(c.reply) > 1: // as nearly always
			case redis.HasErrorPrefix(c.err, "NOSCRIPT"):
				c.args[argCommand], c.args[argScript] = "eval", c.script.source
				again = append(again, c)
			case c.err == nil && len(c.reply) == 1:
				c.err = errLate
				again = append(again, c)
			}
		}
		if calls = again; len(calls) == 0 || ctx.Err() != nil {
			return
		}
	}
}
