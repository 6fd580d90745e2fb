// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/lua"
)

// slotMap is the node whose calls load the slots of a Cluster: whoever answers.
const slotMap = "cluster"

// node is what a store knows of one Redis node. In a Cluster it is known by its
// address, because its clients come and go.
type node struct {
	name    string // its address, or the name of the master behind Sentinels
	clock   serverClock
	breaker breaker
	outbox  outbox
	refusal error // what calls get while the breaker is open

	lastKey atomic.Pointer[string] // of the call that failed last
	wait    time.Duration          // between the last two probes; of the one that probes
}

func (r *Redis) newNode(name string) *node {
	n := &node{name: name, clock: serverClock{base: r.base}, refusal: fmt.Errorf("%w: %s", errBreakerOpen, name)}
	n.outbox.clock = &n.clock
	return n
}

// target is a node with a client to reach it.
type target struct {
	*node
	client *redis.Client
}

// node returns the node that has a key.
func (r *Redis) node(ctx context.Context, key string) (target, error) {
	if r.cluster == nil {
		return r.single, nil
	}
	if r.slots.breaker.open.Load() && !r.stopped() {
		return target{}, r.slots.refusal
	}
	client, err := r.cluster.MasterForKey(ctx, key)
	if err != nil { // it answers from memory once it knows the slots
		now := time.Now()
		if r.blames(r.slots, 0, err) {
			r.note(r.slots, now, now, key, err)
		} else {
			r.note(r.slots, now, now, "", nil)
		}
		return target{}, err
	}
	return target{r.known(client.Options().Addr), client}, nil
}

// known returns the node of a Cluster with an address.
func (r *Redis) known(addr string) *node {
	v, ok := r.nodes.Load(addr)
	if !ok {
		v, _ = r.nodes.LoadOrStore(addr, r.newNode(addr))
	}
	return v.(*node)
}

// command is one to be sent.
type command struct {
	redis.Cmder
	redirected bool // to another node of the Cluster
}

// key returns the first key of a command, or "" if it has none.
func (c *command) key() string {
	args, n := c.Args(), 1
	if c.Name() == "evalsha" || c.Name() == "eval" {
		n = argFirstKey
	}
	if n >= len(args) {
		return ""
	}
	key, _ := args[n].(string)
	return key
}

// newCommand returns a command whose first key is the given argument and whose
// reply is integers. It is never sent twice.
func newCommand(ctx context.Context, firstKey int8, args []any) *command {
	c := &struct { // in one piece
		command
		script scriptCmd
	}{script: scriptCmd{IntSliceCmd: redis.NewIntSliceCmd(ctx, args...)}}
	c.script.SetFirstKeyPos(firstKey)
	c.Cmder = &c.script
	return &c.command
}

// shareSafely is share in the background.
func (r *Redis) shareSafely(ctx context.Context, to target, commands []*command) {
	if bug := safely.Do("release", func() { r.share(ctx, to, commands) }); bug != nil {
		for _, c := range commands {
			c.SetErr(fmt.Errorf("%w: %w", errPanic, bug))
		}
	}
}

// exec sends commands to a node in one round trip, unless its breaker is open.
// Each has its own error then. It returns when they were sent, zero if they were
// not, and when the answers had come.
func (r *Redis) exec(ctx context.Context, to target, commands []*command) (sent, received time.Time) {
	return r.execBy(ctx, to, commands, send)
}

// share is exec that sends what others have for the node in the same round trip,
// within the deadline of ctx. The commands must be those of newCommand or have no
// other reply than an error.
func (r *Redis) share(ctx context.Context, to target, commands []*command) (sent, received time.Time) {
	return r.execBy(ctx, to, commands, func(ctx context.Context, client *redis.Client, commands []*command) (sent, received time.Time) {
		deadline, _ := ctx.Deadline()
		return to.outbox.send(client, deadline, nil, commands)
	})
}

func (r *Redis) execBy(ctx context.Context, to target, commands []*command,
	send func(context.Context, *redis.Client, []*command) (sent, received time.Time),
) (sent, received time.Time) {
	if to.breaker.open.Load() && !r.stopped() { // what ends tries once more
		for _, c := range commands {
			c.SetErr(to.refusal)
		}
		return sent, received
	}
	began := time.Now()
	sent, received = send(ctx, to.client, commands)
	r.noteCommands(to.node, began, received, commands...)
	if r.cluster != nil && r.follow(ctx, commands) {
		received = time.Now()
	}
	return sent, received
}

// send sends commands in one round trip.
func send(ctx context.Context, client *redis.Client, commands []*command) (sent, received time.Time) {
	cmds := make([]redis.Cmder, len(commands))
	for i, c := range commands {
		cmds[i] = c.Cmder
	}
	sent = time.Now()
	transmit(ctx, client, cmds)
	return sent, time.Now()
}

// follow sends commands again that a node of the Cluster redirects, which proves
// that they did not run there, and reports whether there were any.
func (r *Redis) follow(ctx context.Context, commands []*command) (redirected bool) {
	for _, c := range commands {
		switch err := c.Err(); {
		case err == nil:
		case redis.HasErrorPrefix(err, "MOVED "), redis.HasErrorPrefix(err, "ASK "):
			c.redirected, redirected = true, true
			r.redirect(ctx, c, err.Error())
		case mayHaveRun(err) || isDial(err):
			// Perhaps a failover: look for the masters anew, in the background.
			// By itself go-redis does so once a minute.
			r.cluster.ReloadState(ctx)
		}
	}
	return redirected
}

// redirect sends a command to where the answer of a node says it belongs.
func (r *Redis) redirect(ctx context.Context, c *command, answer string) {
	v, ok := r.nodes.Load(answer[strings.LastIndexByte(answer, ' ')+1:])
	if !ok { // of a node that is new to us, nothing is known
		_ = r.cluster.Process(ctx, c.Cmder)
		return
	}
	n := v.(*node)
	if n.breaker.open.Load() && !r.stopped() {
		r.cluster.ReloadState(ctx)
		c.SetErr(n.refusal)
		return
	}
	sent := time.Now()
	_ = r.cluster.Process(ctx, c.Cmder)
	r.noteCommands(n, sent, time.Now(), c)
}

// blames reports whether an error is a node's fault. A caller that had hardly any
// time left says nothing about the node.
func (r *Redis) blames(n *node, took time.Duration, err error) bool {
	if err == nil || !nodeFailed(err) {
		return false
	}
	return n == r.slots || Reason(err) != "timeout" || took >= min(r.timeout, roundTimeout)/2
}

// noteCommands takes down how a node has dealt with commands.
func (r *Redis) noteCommands(n *node, began, received time.Time, commands ...*command) {
	var failed error
	key := ""
	for _, c := range commands {
		if err := c.Err(); r.blames(n, received.Sub(began), err) {
			failed, key = err, c.key()
		}
	}
	r.note(n, began, received, key, failed)
}

// note takes down how a node has dealt with a call about a key, if it has one, and
// begins to probe it if that opens its breaker.
func (r *Redis) note(n *node, began, received time.Time, key string, failed error) {
	opens := n.breaker.note(began.Sub(r.base), received.Sub(r.base), failed != nil)
	if failed != nil {
		r.noteFailure(n, key, failed, opens)
	}
}

func (r *Redis) noteFailure(n *node, key string, failed error, opens bool) {
	if key != "" {
		n.lastKey.Store(&key)
	}
	if opens {
		r.background(func() { r.heal(n, failed) })
	}
}

// background runs work that Close waits for.
func (r *Redis) background(work func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		r.done.Go(work)
	}
}

// heal probes a node whose breaker has opened, until it works, is no more or the
// store ends.
func (r *Redis) heal(n *node, cause error) {
	r.tell(n, true, cause)
	for n.wait = n.breaker.patience(time.Since(r.base), n.wait); ; n.wait *= 2 {
		n.wait = min(n.wait, r.probeMost)
		select {
		case <-r.stop:
			return
		case <-time.After(time.Duration((0.8 + 0.4*rand.Float64()) * float64(n.wait))):
		}
		gone := false
		err := r.safely("probe", func() (err error) {
			gone, err = r.probe(n)
			return err
		})
		if gone {
			r.nodes.CompareAndDelete(n.name, n)
		}
		if gone || err == nil {
			break
		}
	}
	r.tell(n, false, nil) // before, because it may open again at once
	n.breaker.close(time.Since(r.base))
}

// tell calls OnBreaker and survives it.
func (r *Redis) tell(n *node, open bool, err error) {
	_ = r.safely("probe", func() error {
		r.onBreaker(n.name, open, err)
		return nil
	})
}

// probeArgs are the arguments of admit.lua that take a token from a bucket which
// is full again a few milliseconds later: one identity, one bucket, no deadline and
// no lease.
var probeArgs = func() []any {
	l, err := NewRate("", "probe", 1000, time.Second, 1000, 1)
	if err != nil {
		panic(err)
	}
	return append(append([]any{1, 1}, l.args...), 0, int64(maxExact))
}()

// probe does on a node what requests do, as fast as they want it done: a script
// that writes, over a connection that has to be made. Reading alone would not find
// a server that is read-only or full.
//
// In a Cluster it goes where the call belonged that failed last. If that is another
// node now, this one is gone as far as anybody knows.
func (r *Redis) probe(n *node) (gone bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), min(r.timeout, backgroundTimeout))
	defer cancel()
	key := r.prefix + "{" + n.name + "}"
	if last := n.lastKey.Load(); last != nil {
		key = *last
	}
	client := r.single.client
	if r.cluster != nil {
		if client, err = r.cluster.MasterForKey(ctx, key); err != nil {
			return false, err
		}
		if n == r.slots {
			return false, nil
		}
		if client.Options().Addr != n.name {
			return true, nil
		}
	}
	o := *client.Options()
	o.PoolSize, o.MinIdleConns, o.PipelinePoolSize, o.MaxRetries = 1, 0, -1, -1
	fresh := redis.NewClient(&o)
	defer fresh.Close()

	key = key[:strings.LastIndexByte(key, '}')+1] + ":probe"
	args := append([]any{"eval", lua.Admit, 1, key}, probeArgs...)
	c := newCommand(ctx, argFirstKey, args)
	sent := time.Now()
	send(ctx, fresh, []*command{c})
	reply, err := c.Cmder.(*scriptCmd).Result()
	if err == nil && len(reply) != 3 {
		err = errShape
	}
	if err != nil {
		if r.cluster != nil {
			r.cluster.ReloadState(ctx)
			if redis.HasErrorPrefix(err, "MOVED ") || redis.HasErrorPrefix(err, "ASK ") {
				return true, nil
			}
		}
		return false, err
	}
	n.clock.learn(sent, time.Now(), reply[0])
	return false, weed(client, min(r.timeout, backgroundTimeout))
}

// weed tries all idle connections of a client, so that those which broke without a
// word are gone before requests meet them. The error is that of a client none of
// whose connections works.
func weed(client *redis.Client, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	n := max(1, int(client.PoolStats().IdleConns))
	errs := make([]error, n)
	conns := make([]*redis.Conn, n)
	var wg sync.WaitGroup
	for i := range n {
		conns[i] = client.Conn() // held until all are, so that each is another one
		wg.Go(func() {
			if bug := safely.Do("probe", func() { errs[i] = conns[i].Time(ctx).Err() }); bug != nil {
				errs[i] = bug
			}
		})
	}
	wg.Wait()
	for i := range n {
		_ = conns[i].Close()
	}
	for _, err := range errs {
		if err == nil || !mayHaveRun(err) && !isDial(err) {
			return nil
		}
	}
	return errs[0]
}

// NodeStatus is what is known of one Redis node.
type NodeStatus struct {
	// Node is its address, the name of the master behind Sentinels, or "cluster"
	// for the slots of a Cluster, which any of its nodes tells.
	Node string

	// Open reports that its breaker is open: no call is made.
	Open bool
}

// forgetAfter is when a node of a Cluster is forgotten that nobody calls any more.
const forgetAfter = 10 * time.Minute

// Nodes returns the nodes that are in use.
func (r *Redis) Nodes() []NodeStatus {
	if r.cluster == nil {
		return []NodeStatus{{r.single.name, r.single.breaker.open.Load()}}
	}
	all := []NodeStatus{{r.slots.name, r.slots.breaker.open.Load()}}
	now := time.Since(r.base)
	r.nodes.Range(func(_, v any) bool {
		n := v.(*node)
		open := n.breaker.open.Load()
		if !open && n.breaker.idle(now) > forgetAfter {
			r.nodes.CompareAndDelete(n.name, n)
			return true
		}
		all = append(all, NodeStatus{n.name, open})
		return true
	})
	return all
}
