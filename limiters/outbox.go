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
	// A pipeline keeps others from leaving until it has been away for minLag and
	// twice as long as the last one, at most maxLag. It may hang then, and only what
	// is on it shall hang with it. Before that nothing is overtaken: an admission
	// that comes first is decided first.
	minLag = time.Millisecond
	maxLag = 20 * time.Millisecond

	// maxPipeline bounds what callers send together: each waits for the answers to
	// all.
	maxPipeline = 128

	// maxKinds bounds the commands that a call is compared with to be sent in one
	// of them.
	maxKinds = 8
)

// outbox sends what many callers have for a node in few pipelines, since for
// both sides a round trip is dearer than what is in it. It batches by
// back-pressure, never by a timer: what comes while a pipeline is under way leaves
// with the next one, so a quiet instance sends at once and a busy one in batches.
// Calls of admit.lua that are alike leave in one command, unless their keys are in
// several slots of a Cluster.
//
// A caller waits no longer than its deadline. What it leaves behind unsent is
// never sent.
type outbox struct {
	clock *serverClock // of the node

	mu      sync.Mutex // guards below
	waiting []*parcel
	away    []*pipeline // under way, in the order of their leaving
	lag     time.Duration
	spare   *pipeline
	apart   bool // calls are: the server is one of a Cluster, though nobody said so

	timer *time.Timer // lets callers go, for all of them; nil: none has waited yet
	rings time.Time   // when it is to do so; zero: it is not
}

// parcel is what one caller sends.
type parcel struct {
	deadline time.Time
	calls    []*admitCall
	commands []*command

	waits  bool          // the caller does, and does not carry it itself
	landed chan struct{} // has one element when it need not wait any longer

	// Guarded by outbox.mu.
	sent     time.Time // when it left; zero while it waits
	received time.Time
	gone     bool // its caller has left
}

var parcels = sync.Pool{New: func() any { return &parcel{landed: make(chan struct{}, 1)} }}

// pipeline is what leaves together.
type pipeline struct {
	parcels  []*parcel
	deadline time.Time // of the most patient
	sent     time.Time
	apart    bool

	admits []*admitCommand
	cmds   []redis.Cmder // to be sent
	room   [][]any       // for the arguments of each of admits
}

// send sends calls or commands, each of which has its own error then, and returns
// when they left, zero if they never did, and when the answers had come.
func (o *outbox) send(client *redis.Client, deadline time.Time, calls []*admitCall, commands []*command) (sent, received time.Time) {
	p := parcels.Get().(*parcel)
	*p = parcel{deadline: deadline, calls: calls, commands: commands, landed: p.landed}
	now := time.Now()
	o.mu.Lock()
	ready := o.readyLocked(now)
	if p.waits = !ready || len(o.waiting) > 0; p.waits {
		o.waiting = append(o.waiting, p)
		o.ringLocked(now, deadline)
		if ready {
			o.departLocked(client, now)
		}
		o.mu.Unlock()
		<-p.landed
	} else { // the way of most: nobody to wait for, or to carry
		l := o.pipelineLocked()
		l.parcels, l.deadline = append(l.parcels, p), deadline
		o.leaveLocked(l, now)
		o.mu.Unlock()
		o.carry(client, l)
	}
	sent, received = p.sent, p.received
	if !p.gone { // else what carries it has it still
		parcels.Put(p)
	}
	return sent, received
}

// ringLocked sees to it that the timer rings at a deadline at the latest.
func (o *outbox) ringLocked(now, deadline time.Time) {
	if !o.rings.IsZero() && !deadline.Before(o.rings) {
		return
	}
	o.rings = deadline
	if o.timer == nil {
		o.timer = time.AfterFunc(deadline.Sub(now), o.expire)
		return
	}
	o.timer.Reset(deadline.Sub(now))
}

// expire lets the callers go whose deadline has come.
func (o *outbox) expire() {
	now := time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.rings = time.Time{}
	next := time.Time{}
	each := func(p *parcel) {
		switch {
		case p.gone || !p.waits:
		case !p.deadline.After(now):
			p.leaveBehind(now)
		case next.IsZero() || p.deadline.Before(next):
			next = p.deadline
		}
	}
	for _, p := range o.waiting {
		each(p)
	}
	for _, l := range o.away {
		for _, p := range l.parcels {
			each(p)
		}
	}
	if !next.IsZero() {
		o.ringLocked(now, next)
	}
}

// leaveBehind lets the caller of a parcel go. What carries it may yet write to its
// commands, so the caller gets others with an error of their own.
func (p *parcel) leaveBehind(now time.Time) {
	p.gone, p.received = true, now
	for _, c := range p.calls {
		c.sent, c.err = p.sent, context.DeadlineExceeded
	}
	for _, c := range p.commands {
		*c = *newCommand(context.Background(), argFirstKey, c.Args())
		c.SetErr(context.DeadlineExceeded)
	}
	p.landed <- struct{}{}
}

// readyLocked reports whether a pipeline may leave now. The one that left last of all
// may have come back already, before others that hang.
func (o *outbox) readyLocked(now time.Time) bool {
	last := len(o.away) - 1
	return last < 0 || now.Sub(o.away[last].sent) >= o.lag
}

func (o *outbox) pipelineLocked() *pipeline {
	if l := o.spare; l != nil {
		o.spare = nil
		return l
	}
	return new(pipeline)
}

func (o *outbox) leaveLocked(l *pipeline, now time.Time) {
	l.sent, l.apart = now, o.apart
	for _, p := range l.parcels {
		p.sent = now
		for _, c := range p.commands { // now, because a caller that leaves gets others
			l.cmds = append(l.cmds, c.Cmder)
		}
	}
	o.away = append(o.away, l)
}

// departLocked sends what waits on its way, as far as anybody still waits for it.
func (o *outbox) departLocked(client *redis.Client, now time.Time) {
	l := o.pipelineLocked()
	n, size := 0, 0
	for _, p := range o.waiting {
		if !p.gone && !p.deadline.After(now) { // the timer has not come to it yet
			p.leaveBehind(now)
		}
		if !p.gone { // else it takes no room: nobody would come for who is behind many that are
			if size += len(p.calls) + len(p.commands); len(l.parcels) > 0 && size > maxPipeline {
				break
			}
			if l.parcels = append(l.parcels, p); p.deadline.After(l.deadline) {
				l.deadline = p.deadline
			}
		}
		n++
	}
	o.waiting = slices.Delete(o.waiting, 0, n)
	if len(l.parcels) == 0 {
		o.spare = l
		return
	}
	o.leaveLocked(l, now)
	go o.carry(client, l)
}

// carry brings a pipeline to the node and back, and then sends the next one on its
// way.
func (o *outbox) carry(client *redis.Client, l *pipeline) {
	bug := safely.Do("script", func() {
		ctx, cancel := context.WithDeadline(context.Background(), l.deadline)
		defer cancel()
		l.compose(ctx, o.clock)
		transmit(ctx, client, l.cmds)
	})
	now := time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.lag = min(minLag+2*now.Sub(l.sent), maxLag)
	o.away = slices.DeleteFunc(o.away, func(a *pipeline) bool { return a == l })
	for _, p := range l.parcels {
		if !p.gone {
			p.land(now, bug)
		}
	}
	for _, a := range l.admits {
		if bug != nil {
			break // they may not even have been made
		}
		if err := a.Err(); err != nil {
			o.apart = o.apart || redis.HasErrorPrefix(err, "CROSSSLOT")
		} else if len(a.Val()) > 0 {
			o.clock.learn(l.sent, now, a.Val()[0])
		}
	}
	l.clear()
	o.spare = l
	if len(o.waiting) > 0 && o.readyLocked(now) {
		o.departLocked(client, now)
	}
}

// land gives the caller of a parcel its answers, or the bug that was met on the way.
func (p *parcel) land(now time.Time, bug error) {
	p.received = now
	for _, c := range p.calls {
		if bug == nil {
			c.read(p.sent, c.command.Val(), c.command.Err())
		} else {
			c.sent, c.err = p.sent, fmt.Errorf("%w: %w", errPanic, bug)
		}
	}
	if bug != nil {
		for _, c := range p.commands {
			c.SetErr(fmt.Errorf("%w: %w", errPanic, bug))
		}
	}
	if p.waits {
		p.landed <- struct{}{}
	}
}

// compose makes the commands for the calls of a pipeline.
func (l *pipeline) compose(ctx context.Context, clock *serverClock) {
	for _, p := range l.parcels {
		for _, c := range p.calls {
			c.deadline = clock.at(p.deadline)
			l.admit(c)
		}
	}
	for i, a := range l.admits {
		if i == len(l.room) {
			l.room = append(l.room, nil)
		}
		l.room[i] = a.compose(ctx, l.room[i])
		l.cmds = append(l.cmds, &a.scriptCmd)
	}
}

// admit puts a call into a command with others, if there is one.
func (l *pipeline) admit(c *admitCall) {
	for _, a := range l.admits[max(0, len(l.admits)-maxKinds):] {
		if !l.apart && a.calls[0].alike(c) {
			a.add(c)
			return
		}
	}
	a := new(admitCommand)
	a.add(c)
	l.admits = append(l.admits, a)
}

// clear makes a pipeline that has come back ready for others, without what was on it.
func (l *pipeline) clear() {
	for _, args := range l.room {
		clear(args)
	}
	clear(l.parcels)
	clear(l.admits)
	clear(l.cmds)
	*l = pipeline{parcels: l.parcels[:0], admits: l.admits[:0], cmds: l.cmds[:0], room: l.room}
}

// transmit sends commands in one round trip.
func transmit(ctx context.Context, client *redis.Client, cmds []redis.Cmder) {
	if len(cmds) == 1 {
		_ = client.Process(ctx, cmds[0])
		return
	}
	pipe := client.Pipeline()
	_ = pipe.BatchProcess(ctx, cmds...)
	_, _ = pipe.Exec(ctx)
}
