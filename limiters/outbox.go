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

	// maxPipeline bounds the commands that callers send together: each waits for
	// the answers to all.
	maxPipeline = 128
)

// outbox sends what many callers have for a node in few pipelines, since for
// both sides a round trip is dearer than what is in it. It batches by
// back-pressure, never by a timer: what comes while a pipeline is under way leaves
// with the next one, so a quiet instance sends at once and a busy one in batches.
//
// A caller waits no longer than its own context. What it leaves behind unsent is
// never sent.
type outbox struct {
	mu      sync.Mutex // guards below
	waiting []*parcel
	away    int       // pipelines under way
	left    time.Time // when the last of them left
	lag     time.Duration
}

// parcel is what one caller sends.
type parcel struct {
	ctx      context.Context
	commands []*command
	cmds     []redis.Cmder // of commands; their carrier's
	landed   chan struct{} // closed when the answers are there; nil: nobody waits for that
	room     [1]redis.Cmder

	// Guarded by outbox.mu.
	sent     time.Time // when it left; zero while it waits
	received time.Time
	gone     bool // its caller has left
}

// send sends commands, each of which has its own error then, and returns when
// they left, zero if they never did, and when the answers had come.
func (o *outbox) send(ctx context.Context, client *redis.Client, commands []*command) (sent, received time.Time) {
	p := &parcel{ctx: ctx, commands: commands}
	p.cmds = p.room[:0]
	for _, c := range commands {
		p.cmds = append(p.cmds, c.Cmder)
	}
	now := time.Now()
	o.mu.Lock()
	ready := o.readyLocked(now)
	if ready && len(o.waiting) == 0 { // the way of most: nobody to wait for, or to carry
		o.away, o.left, p.sent = o.away+1, now, now
		o.mu.Unlock()
		o.carry(ctx, client, []*parcel{p}, p.cmds)
		return p.sent, p.received
	}
	p.landed = make(chan struct{})
	o.waiting = append(o.waiting, p)
	if ready {
		o.departLocked(client, now)
	}
	o.mu.Unlock()

	select {
	case <-p.landed:
	case <-ctx.Done():
		o.leave(p)
	}
	return p.sent, p.received
}

// leave lets the caller of a parcel go unless it has landed. What carries it may
// yet write to its commands, so the caller gets others with its own error.
func (o *outbox) leave(p *parcel) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !p.received.IsZero() {
		return
	}
	p.gone, p.received = true, time.Now()
	for _, c := range p.commands {
		*c = *newCommand(p.ctx, argFirstKey, c.Args())
		c.SetErr(p.ctx.Err())
	}
}

// readyLocked reports whether a pipeline may leave now.
func (o *outbox) readyLocked(now time.Time) bool {
	return o.away == 0 || now.Sub(o.left) >= o.lag
}

// departLocked sends what waits on its way, as far as anybody still waits for it.
func (o *outbox) departLocked(client *redis.Client, now time.Time) {
	var batch []*parcel
	var cmds []redis.Cmder
	var deadline time.Time // of the most patient
	n := 0
	for _, p := range o.waiting {
		if len(cmds) > 0 && len(cmds)+len(p.cmds) > maxPipeline {
			break
		}
		n++
		if p.gone || p.ctx.Err() != nil {
			continue
		}
		p.sent = now
		batch, cmds = append(batch, p), append(cmds, p.cmds...)
		if d, _ := p.ctx.Deadline(); d.After(deadline) {
			deadline = d
		}
	}
	o.waiting = slices.Delete(o.waiting, 0, n)
	if len(batch) == 0 {
		return
	}
	o.away, o.left = o.away+1, now
	go func() {
		ctx, cancel := context.WithDeadline(context.Background(), deadline)
		defer cancel()
		o.carry(ctx, client, batch, cmds)
	}()
}

// carry brings a batch to the node, and then sends the next one on its way.
func (o *outbox) carry(ctx context.Context, client *redis.Client, batch []*parcel, cmds []redis.Cmder) {
	if bug := safely.Do("script", func() { transmit(ctx, client, cmds) }); bug != nil {
		for _, c := range cmds {
			c.SetErr(fmt.Errorf("%w: %w", errPanic, bug))
		}
	}
	now := time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.away--
	o.lag = min(minLag+2*now.Sub(batch[0].sent), maxLag)
	for _, p := range batch {
		if p.gone {
			continue
		}
		p.received = now
		if p.landed != nil {
			close(p.landed)
		}
	}
	if len(o.waiting) > 0 && o.readyLocked(now) {
		o.departLocked(client, now)
	}
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
