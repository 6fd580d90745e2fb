// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/lua"
)

// Defaults of RedisOptions.
const (
	DefaultTimeout   = 50 * time.Millisecond
	DefaultKeyPrefix = "stripe_ratelimit:"
)

// maxPiggyback bounds the releases that one admission applies on its way.
const maxPiggyback = 64

// RedisOptions says how a Redis store works.
type RedisOptions struct {
	// Universal is how to reach Redis. What concerns retries, timeouts and the
	// handshake is overruled.
	Universal redis.UniversalOptions

	// Timeout bounds the time that one admission may take, whatever happens
	// (default DefaultTimeout).
	Timeout time.Duration

	// KeyPrefix begins every key (default DefaultKeyPrefix).
	KeyPrefix string

	// Observe, if not nil, is told of every operation (admit, renew, release),
	// how long it took and whether it failed. It must be quick.
	Observe func(operation string, took time.Duration, err error)
}

// Redis is a Store that every instance of a fleet shares: standalone, behind
// Sentinels, or a Cluster.
//
// Scripts run on the server's clock and carry a deadline in it, so one that is
// delayed beyond the time its caller waits decides nothing. They are never sent
// twice unless the reply proves that nothing has run.
type Redis struct {
	client   redis.UniversalClient
	timeout  time.Duration
	prefix   string
	instance string // what the ids of leases start with: random, of this store
	observe  func(string, time.Duration, error)

	nextID atomic.Uint64
	leases *leaseTable

	base   time.Time
	clocks sync.Map // *redis.Client of a node -> *serverClock; nil key: the only node

	stop chan struct{}
	done sync.WaitGroup
}

// NewRedis returns a store on Redis. It does not connect: the first operation does.
func NewRedis(o RedisOptions) *Redis {
	if o.Timeout <= 0 {
		o.Timeout = DefaultTimeout
	}
	if o.KeyPrefix == "" {
		o.KeyPrefix = DefaultKeyPrefix
	}
	if o.Observe == nil {
		o.Observe = func(string, time.Duration, error) {}
	}
	quietClient()
	u := o.Universal
	u.MaxRetries = -1              // a script is never sent twice
	u.ContextTimeoutEnabled = true // the caller's deadline bounds everything
	u.PoolTimeout = o.Timeout
	// Of work in the background only, which has no caller to be quick for.
	u.ReadTimeout = max(time.Second, o.Timeout)
	u.WriteTimeout = u.ReadTimeout
	u.DialTimeout = u.ReadTimeout
	u.DialerRetries = 1
	u.Protocol = 2           // no push messages, nothing of RESP3 is used
	u.DisableIdentity = true // ACL users need not be allowed CLIENT SETINFO
	u.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}

	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	r := &Redis{
		client:   redis.NewUniversalClient(&u),
		timeout:  o.Timeout,
		prefix:   o.KeyPrefix,
		instance: base64.RawURLEncoding.EncodeToString(id[:]),
		observe:  o.Observe,
		leases:   newLeaseTable(),
		base:     time.Now(),
		stop:     make(chan struct{}),
	}
	r.done.Add(2)
	go r.flushLoop()
	go r.renewLoop()
	return r
}

// call is one script call under way, about one identity.
type call struct {
	ask   Ask
	first int // index of its first result
	id    uint64
	ended [][]*lease // for each concurrency check: releases applied on the way

	cmd   *scriptCmd
	sent  time.Time
	clock *serverClock
	full  bool // send the source: the server does not know the script
	err   error
}

// Admit implements Store.
func (r *Redis) Admit(ctx context.Context, asks []Ask) (Admission, error) {
	// A client that goes away does not cancel the call: its answer is needed
	// to know what was taken, and a cut connection costs more than the reply.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.timeout)
	defer cancel()
	start := time.Now()

	calls := make([]call, len(asks))
	todo := make([]*call, len(asks))
	n := 0
	for i, ask := range asks {
		calls[i] = call{ask: ask, first: n, id: r.nextID.Add(1)}
		todo[i] = &calls[i]
		n += len(ask.Checks)
	}
	adm := Admission{Allowed: true, Results: make([]Result, n)}
	r.run(ctx, todo)

	var failed error
	now := time.Now()
	for i := range calls {
		if err := r.conclude(now, start, &calls[i], &adm); err != nil {
			failed = err
		}
	}
	if !adm.Allowed {
		r.Release(adm)
		adm.leases = nil
	}
	r.observe("admit", time.Since(start), failed)
	return adm, failed
}

// run sends the calls in one round trip, and again those that a reply proves
// not to have run: the script is unknown, or the deadline had passed on the
// server's clock because our estimate of it was off.
func (r *Redis) run(ctx context.Context, todo []*call) {
	const attempts = 4
	for range attempts {
		r.send(ctx, todo)
		again := todo[:0]
		for _, c := range todo {
			switch {
			case redis.HasErrorPrefix(c.err, "NOSCRIPT"):
				c.full = true
				again = append(again, c)
			case c.err == nil && len(c.cmd.Val()) == 1:
				c.err = errLate
				again = append(again, c)
			}
		}
		if todo = again; len(todo) == 0 || ctx.Err() != nil {
			return
		}
	}
}

// send runs each call once.
func (r *Redis) send(ctx context.Context, calls []*call) {
	deadline, _ := ctx.Deadline()
	var pipe redis.Pipeliner
	if len(calls) > 1 {
		pipe = r.client.Pipeline()
	}
	for _, c := range calls {
		c.cmd = nil
		if c.clock, c.err = r.clockOf(ctx, c); c.err != nil {
			continue
		}
		c.sent = time.Now()
		c.cmd = r.command(ctx, c, c.clock.at(deadline))
		if pipe == nil {
			_ = r.client.Process(ctx, c.cmd)
		} else {
			_ = pipe.Process(ctx, c.cmd)
		}
	}
	if pipe != nil {
		_, _ = pipe.Exec(ctx)
	}
	now := time.Now()
	for _, c := range calls {
		if c.cmd == nil {
			continue
		}
		c.err = c.cmd.Err()
		if reply := c.cmd.Val(); c.err == nil && len(reply) > 0 {
			c.clock.set(now, reply[0])
		}
	}
}

// conclude reads the answer of a call that is over into adm.
func (r *Redis) conclude(now, start time.Time, c *call, adm *Admission) error {
	slot := 0
	var taken []*lease
	err := c.err
	reply := []int64(nil)
	if err == nil {
		if reply = c.cmd.Val(); len(reply) != 1+2*len(c.ask.Checks) {
			err = errShape
		}
	}
	allowed := true
	for i, check := range c.ask.Checks {
		l := check.Limit
		var res Result
		if err == nil {
			if res, err = l.result(reply[1+2*i], reply[2+2*i]); err == nil {
				adm.Results[c.first+i] = res
				allowed = allowed && (check.Dark || res.Outcome == Allowed)
			}
		}
		if l.Kind != Concurrency {
			continue
		}
		key := l.stateKey(c.ask.Identity)
		if c.err == nil {
			r.leases.acknowledged(c.sent, key, c.ended[slot])
		}
		slot++
		if err != nil || res.Outcome == Allowed {
			taken = append(taken, &lease{key: key, id: c.id, length: l.Lease, capacity: l.Capacity})
		}
	}
	switch {
	case err != nil:
		for i := range c.ask.Checks {
			adm.Results[c.first+i] = Result{}
		}
		if mayHaveRun(err) {
			r.leases.end(now, true, taken...)
		}
		return fmt.Errorf("admit: %w", err)
	case !allowed:
		adm.Allowed = false
	default:
		for _, l := range taken {
			r.leases.hold(start, l)
		}
		adm.leases = append(adm.leases, taken...)
	}
	return nil
}

// Release implements Store.
func (r *Redis) Release(adm Admission) {
	r.leases.end(time.Now(), false, adm.leases...)
}

// Close implements Store.
func (r *Redis) Close() error {
	close(r.stop)
	r.leases.kick()
	r.done.Wait()
	return r.client.Close()
}

// clockOf returns the clock of the node that a call goes to, asking the node
// for the time if it never told it.
func (r *Redis) clockOf(ctx context.Context, c *call) (*serverClock, error) {
	return r.nodeClock(ctx, c.ask.Checks[0].Limit.stateKey(c.ask.Identity).redis(r.prefix))
}

func (r *Redis) nodeClock(ctx context.Context, key string) (*serverClock, error) {
	var node *redis.Client
	var client redis.Cmdable = r.client
	if cluster, ok := r.client.(*redis.ClusterClient); ok {
		var err error
		if node, err = cluster.MasterForKey(ctx, key); err != nil {
			return nil, err
		}
		client = node
	}
	v, ok := r.clocks.Load(node)
	if !ok {
		v, _ = r.clocks.LoadOrStore(node, &serverClock{base: r.base})
	}
	clock := v.(*serverClock)
	if clock.known() {
		return clock, nil
	}
	t, err := client.Time(ctx).Result()
	if err != nil {
		return nil, err
	}
	clock.set(time.Now(), t.UnixMicro())
	return clock, nil
}

// scriptCmd is a command that go-redis must never send twice.
type scriptCmd struct{ *redis.IntSliceCmd }

// NoRetry overrides the default of go-redis, which in a Cluster resends a
// command whose connection broke.
func (scriptCmd) NoRetry() bool { return true }

func newScriptCmd(ctx context.Context, args []any) *scriptCmd {
	cmd := &scriptCmd{redis.NewIntSliceCmd(ctx, args...)}
	cmd.SetFirstKeyPos(3)
	return cmd
}

var (
	admitScript = redis.NewScript(lua.Admit)
	renewScript = redis.NewScript(lua.Renew)
)

// head returns the words of a script call up to its keys.
func head(s *redis.Script, source string, full bool, keys, size int) []any {
	args := make([]any, 0, size)
	if full {
		return append(args, "eval", source, keys)
	}
	return append(args, "evalsha", s.Hash(), keys)
}

// command builds the call of admit.lua.
func (r *Redis) command(ctx context.Context, c *call, deadline int64) *scriptCmd {
	args := head(admitScript, lua.Admit, c.full, len(c.ask.Checks), 6+7*len(c.ask.Checks))
	buckets := 0
	for _, check := range c.ask.Checks {
		args = append(args, check.Limit.stateKey(c.ask.Identity).redis(r.prefix))
		if check.Limit.Kind == Rate {
			buckets++
		}
	}
	args = append(args, deadline, buckets, r.leaseID(c.id))
	c.ended = c.ended[:0]
	for _, check := range c.ask.Checks {
		l := check.Limit
		args = append(args, l.args...)
		args = append(args, flag(check.Dark))
		if l.Kind == Concurrency {
			ended := r.leases.endedOf(l.stateKey(c.ask.Identity), maxPiggyback)
			c.ended = append(c.ended, ended)
			args = append(args, len(ended))
			for _, e := range ended {
				args = append(args, r.leaseID(e.id))
			}
		}
	}
	return newScriptCmd(ctx, args)
}

func flag(b bool) string {
	if b {
		return "1"
	}
	return "0"
}

// leaseID is the name of a lease in Redis.
func (r *Redis) leaseID(id uint64) string {
	return r.instance + ":" + strconv.FormatUint(id, 36)
}
