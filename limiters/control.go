// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/lua"
)

var controlScript = newScript(lua.Control)

// ControlCall is what an instance tells the others and asks of them; see
// lua/control.lua.
type ControlCall struct {
	Leave  bool   // the instance goes
	Secret string // fingerprint of its key_secret
	Known  string // id of the state that needs no telling
	Stored string // id of the state that was seen last
	ID     string // of the state to put in its place; empty: none
	State  string
}

// ControlReply is the answer.
type ControlReply struct {
	Now       time.Time     // of the server
	Beat      time.Duration // between calls
	Instances int64         // that share the store
	Secrets   int64         // that they have: 1 unless they differ
	ID        string        // of the state that is stored now
	State     string        // that it is, unless it is that of the call
}

// Instance returns the id by which this store is known to others: leases begin
// with it.
func (r *Redis) Instance() string { return r.instance }

// Control runs control.lua, within the deadline of ctx or a second. What it did
// not write in time it does not write later.
func (r *Redis) Control(ctx context.Context, call ControlCall) (reply ControlReply, err error) {
	ctx, cancel := context.WithTimeout(ctx, backgroundTimeout)
	defer cancel()
	start := time.Now()
	defer func() { r.observe("control", time.Since(start), err) }()

	values, err := r.runControl(ctx, newControlArgs(r.prefix, r.instance, call))
	if err != nil {
		return reply, fmt.Errorf("control: %w", err)
	}
	numbers := [4]int64{}
	texts := [2]string{}
	ok := len(values) == len(numbers)+len(texts)
	for i := range numbers {
		if ok {
			numbers[i], ok = values[i].(int64)
		}
	}
	for i := range texts {
		if ok {
			texts[i], ok = values[len(numbers)+i].(string)
		}
	}
	if !ok {
		return reply, fmt.Errorf("control: %w", errShape)
	}
	r.ahead.Store(int64(time.Until(time.UnixMicro(numbers[0]))))
	return ControlReply{
		Now:  time.UnixMicro(numbers[0]).UTC(),
		Beat: time.Duration(numbers[1]) * time.Microsecond, Instances: numbers[2], Secrets: numbers[3],
		ID: texts[0], State: texts[1],
	}, nil
}

// newControlArgs returns the whole command, but for the deadline.
func newControlArgs(prefix, instance string, call ControlCall) []any {
	key := prefix + "{control}"
	return []any{
		"evalsha", controlScript.hash, 3, key, key + ":instances", key + ":secrets",
		nil, instance, bit(call.Leave), call.Secret, call.Known, call.Stored, call.ID, call.State,
	}
}

// runControl sends the script, whose place for the deadline follows three keys,
// and again if the reply proves that it has not run; see runTogether.
func (r *Redis) runControl(ctx context.Context, args []any) (values []any, err error) {
	deadline, _ := ctx.Deadline()
	const attempts = 4
	err = errLate
	for range attempts {
		node, nodeErr := r.node(ctx, args[argFirstKey].(string))
		if nodeErr != nil {
			return nil, nodeErr
		}
		clock := &node.clock
		args[argFirstKey+3] = max(1, clock.at(deadline)) // 0 is none
		cmd := controlCmd{redis.NewSliceCmd(ctx, args...)}
		cmd.SetFirstKeyPos(argFirstKey)
		c := &command{Cmder: cmd}
		sent, received := r.exec(ctx, node, []*command{c})
		values, err = cmd.Result()
		switch {
		case redis.HasErrorPrefix(err, "NOSCRIPT"):
			args[argCommand], args[argScript] = "eval", controlScript.source
			continue
		case err != nil:
			return nil, err
		case len(values) == 0:
			return nil, errShape
		}
		server, ok := values[0].(int64)
		if !ok {
			return nil, errShape
		}
		if !c.redirected {
			clock.learn(sent, received, server)
		}
		if len(values) > 1 {
			return values, nil
		}
		if err = errLate; ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(err, ctx.Err())
}

// controlCmd is a command that go-redis must never send twice.
type controlCmd struct{ *redis.SliceCmd }

// NoRetry overrides the default of go-redis.
func (controlCmd) NoRetry() bool { return true }

// ForgetIdentity drops what is remembered of one identity, at now, after its
// limits were reset or its numbers were changed by hand, and what answers to
// earlier questions will yet say.
func (d *Denials) ForgetIdentity(now time.Time, id Identity) {
	shard := d.shard(id)
	shard.mu.Lock()
	defer shard.mu.Unlock()
	for key := range shard.denials {
		if key.state.identity == id {
			delete(shard.denials, key)
		}
	}
	shard.forgotten = now
}
