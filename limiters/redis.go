// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// Defaults of RedisOptions.
const (
	DefaultTimeout   = 50 * time.Millisecond
	DefaultKeyPrefix = "stripe_ratelimit:"
)

// RedisOptions says how a Redis store works.
type RedisOptions struct {
	// Universal is how to reach Redis: with a MasterName through Sentinels,
	// with several addresses or IsClusterMode as a Cluster, else one server.
	// What concerns retries, timeouts, routing and the handshake is overruled.
	Universal redis.UniversalOptions

	// Timeout bounds the time that one admission may take, whatever happens
	// (default DefaultTimeout).
	Timeout time.Duration

	// KeyPrefix begins every key (default DefaultKeyPrefix).
	KeyPrefix string

	// Observe, if not nil, is told of every operation (admit, renew, release),
	// how long it took and whether it failed. It must be quick.
	Observe func(operation string, took time.Duration, err error)

	// OnBreaker, if not nil, is told when the breaker of a node (see NodeStatus)
	// opens, with the last failure, and when it closes again. It must be quick.
	OnBreaker func(node string, open bool, err error)
}

// Redis is a Store that every instance of a fleet shares: standalone, behind
// Sentinels, or a Cluster.
//
// Scripts run on the server's clock and carry a deadline in it, so one that is
// delayed beyond the time its caller waits decides nothing. They are never sent
// twice unless the reply proves that nothing has run.
//
// A node that fails (5 calls, and half of all, within a second) is not called any
// more: each call fails at once, with the Reason breaker_open, until a probe in the
// background has found that the node works.
type Redis struct {
	single    target               // zero for a Cluster
	cluster   *redis.ClusterClient // nil otherwise
	slots     *node                // of the Cluster: what it takes to know its slots
	timeout   time.Duration
	probeMost time.Duration // between probes of a node that fails
	prefix    string
	instance  string // what the names of leases start with: random, of this store
	observe   func(string, time.Duration, error)
	onBreaker func(string, bool, error)

	nextID atomic.Uint64
	ahead  atomic.Int64 // ns by which the server's clock is ahead of ours; 0 if not known
	leases *leaseTable

	base  time.Time
	nodes sync.Map // address of a node of the Cluster -> *node

	stop    chan struct{}
	closeBy time.Time // when Close must be done; set before stop is closed
	done    sync.WaitGroup

	mu     sync.Mutex // guards below
	closed bool       // nothing may be added to done
}

// NewRedis returns a store on Redis. It does not connect: the first operation does.
func NewRedis(o RedisOptions) *Redis {
	r := newRedis(o)
	r.done.Go(r.flushLoop)
	r.done.Go(r.renewLoop)
	return r
}

// newRedis returns a store without its background work.
func newRedis(o RedisOptions) *Redis {
	if o.Timeout <= 0 {
		o.Timeout = DefaultTimeout
	}
	if o.KeyPrefix == "" {
		o.KeyPrefix = DefaultKeyPrefix
	}
	if o.Observe == nil {
		o.Observe = func(string, time.Duration, error) {}
	}
	if o.OnBreaker == nil {
		o.OnBreaker = func(string, bool, error) {}
	}
	quietClient()
	u := o.Universal
	u.MaxRetries = -1              // a script is never sent twice
	u.ContextTimeoutEnabled = true // the caller's deadline bounds everything
	u.PoolTimeout = o.Timeout
	// Of work in the background only, which has no caller to be quick for.
	u.ReadTimeout = max(backgroundTimeout, o.Timeout)
	u.WriteTimeout = u.ReadTimeout
	u.DialTimeout = u.ReadTimeout
	u.DialerRetries = 1
	u.PipelinePoolSize = -1  // one pool, of the size that was asked for
	u.Protocol = 2           // no push messages, nothing of RESP3 is used
	u.DisableIdentity = true // ACL users need not be allowed CLIENT SETINFO
	u.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	u.ReadOnly, u.RouteByLatency, u.RouteRandomly = false, false, false

	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	r := &Redis{
		probeMost: probeMost,
		timeout:   o.Timeout,
		prefix:    o.KeyPrefix,
		instance:  base64.RawURLEncoding.EncodeToString(id[:]),
		observe:   o.Observe,
		onBreaker: o.OnBreaker,
		leases:    newLeaseTable(u.ReadTimeout),
		base:      time.Now(),
		stop:      make(chan struct{}),
	}
	switch {
	case u.MasterName != "":
		r.single = target{r.newNode(u.MasterName), redis.NewFailoverClient(u.Failover())}
	case len(u.Addrs) > 1 || u.IsClusterMode:
		c := u.Cluster()
		// For its routing policies go-redis would first ask for a list of all
		// commands, and wait for it longer than our caller does.
		c.DisableRoutingPolicies = true
		r.cluster = redis.NewClusterClient(c)
		r.slots = r.newNode(slotMap)
	default:
		client := redis.NewClient(u.Simple())
		r.single = target{r.newNode(client.Options().Addr), client}
	}
	return r
}

// Admit implements Store.
func (r *Redis) Admit(ctx context.Context, asks []Ask) (adm Admission, failed error) {
	// A client that goes away does not cancel the call: its answer is needed
	// to know what was taken, and a cut connection costs more than the reply.
	start := time.Now()
	deadline := start.Add(r.timeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	few := someCalls.Get().(*fewCalls)
	calls, todo := slices.Grow(few.calls[:0], len(asks))[:len(asks)], slices.Grow(few.todo[:0], len(asks))[:len(asks)]
	for i, ask := range asks {
		todo[i] = &calls[i]
		r.prepare(todo[i], start, ask)
	}
	for len(todo) > 0 {
		r.ask(deadline, todo)
		todo = todo[:0]
		now := time.Now()
		for i := range calls {
			c := &calls[i]
			if r.acknowledge(c); c.unfair && now.Before(deadline) {
				r.prepare(c, now, c.ask)
				todo = append(todo, c)
			}
		}
	}

	adm = newAdmission(total(asks))
	done := false
	defer func() {
		if !done { // a bug: nobody else would give back what is taken
			r.Release(adm)
		}
	}()
	for i := range calls {
		if err := r.conclude(start, &calls[i], &adm); err != nil {
			failed = err
		}
	}
	if !adm.Allowed {
		r.Release(adm)
		adm.leases = nil
	}
	r.observe("admit", time.Since(start), failed)
	done = true
	if failed == nil { // else what carries the calls may have them still
		clear(few.calls[:])
		someCalls.Put(few)
	}
	return adm, failed
}

// fewCalls is room for the calls of most admissions.
type fewCalls struct {
	calls [1]admitCall
	todo  [1]*admitCall
}

var someCalls = sync.Pool{New: func() any { return new(fewCalls) }}

// appendMember appends the name of a lease, which is a member of a sorted set in
// Redis: who took it, the id of the admission, and its length in us.
func (r *Redis) appendMember(b []byte, id uint64, length time.Duration) []byte {
	b = append(append(b, r.instance...), ':')
	b = append(strconv.AppendUint(b, id, 36), ':')
	return strconv.AppendInt(b, length.Microseconds(), 10)
}

// render makes the texts of a lease, unless it has them.
func (r *Redis) render(l *lease) {
	if l.name == "" {
		var room [64]byte
		l.name = string(r.appendMember(room[:0], l.id, l.length))
		l.redisKey = l.key.redis(r.prefix)
	}
}

// Release implements Store.
func (r *Redis) Release(adm Admission) {
	r.leases.end(time.Now(), false, adm.leases...)
}

// Close implements Store. It waits for background work: if Redis does not
// answer, a second.
func (r *Redis) Close() error {
	r.mu.Lock()
	r.closed = true
	r.closeBy = time.Now().Add(backgroundTimeout)
	close(r.stop)
	r.mu.Unlock()
	r.done.Wait()
	if r.cluster != nil {
		return r.cluster.Close()
	}
	return r.single.client.Close()
}
