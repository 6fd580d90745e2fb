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
)

// Defaults of RedisOptions.
const (
	DefaultTimeout   = 50 * time.Millisecond
	DefaultKeyPrefix = "stripe_ratelimit:"
)

const (
	// maxPiggyback bounds the releases that one admission applies on its way.
	maxPiggyback = 64

	// maxOvertaken bounds how often an admission asks again because leases end all
	// the time.
	maxOvertaken = 2
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
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()

	calls := make([]admitCall, len(asks))
	todo := make([]*scriptCall, len(asks))
	for i, ask := range asks {
		calls[i] = r.admitCall(start, ask)
		todo[i] = &calls[i].scriptCall
	}
	for len(todo) > 0 {
		r.run(ctx, todo...)
		todo = todo[:0]
		for i := range calls {
			c := &calls[i]
			if r.acknowledge(c); c.unfair && ctx.Err() == nil {
				overtaken := c.overtaken
				*c = r.admitCall(time.Now(), c.ask)
				c.overtaken = overtaken
				todo = append(todo, &c.scriptCall)
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
	return adm, failed
}

// admitCall is a call of admit.lua about one identity.
type admitCall struct {
	scriptCall
	ask   Ask
	id    uint64   // of the leases to take
	ended []*lease // releases that it applies on its way
	more  bool     // there were too many
	ends  uint32   // how many leases of its keys had ended when it was made

	// It was denied for want of a slot which this very process has freed, but
	// without saying so to Redis: there was too much to say, or the lease ended, and
	// its client came back, on a faster way. Nothing was taken, so it may ask again.
	unfair    bool
	overtaken int // how often that was for the latter reason
}

func (r *Redis) admitCall(now time.Time, ask Ask) admitCall {
	c := admitCall{
		scriptCall: newScriptCall(&admitScript, len(ask.Checks), 2+5*len(ask.Checks)),
		ask:        ask,
		id:         leaseID(now, time.Duration(r.ahead.Load()), r.nextID.Add(1)),
	}
	buckets := 0
	for _, check := range ask.Checks {
		c.args = append(c.args, check.Limit.stateKey(ask.Identity).redis(r.prefix))
		if check.Limit.Kind == Rate {
			buckets++
		}
	}
	c.args = append(c.args, nil, buckets, r.leaseName(c.id))
	for _, check := range ask.Checks {
		l := check.Limit
		c.args = append(c.args, l.args...)
		c.args = append(c.args, bit(check.Dark))
		if l.Kind == Concurrency {
			c.ends += r.leases.endsOf(l.stateKey(ask.Identity)).Load()
			ended, more := r.leases.claim(now, c.id, l.stateKey(ask.Identity), maxPiggyback)
			c.args = append(c.args, len(ended))
			for _, e := range ended {
				c.args = append(c.args, r.argument(e))
			}
			c.ended = append(c.ended, ended...)
			c.more = c.more || more
		}
	}
	return c
}

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}

// leaseName is the name of the leases of one admission in Redis, and member
// that of one of them: a name ends with the length of its lease in us.
func (r *Redis) leaseName(id uint64) string {
	var room [64]byte
	return string(r.appendLeaseName(room[:0], id))
}

func (r *Redis) appendLeaseName(b []byte, id uint64) []byte {
	b = append(append(b, r.instance...), ':')
	return append(strconv.AppendUint(b, id, 36), ':')
}

func (r *Redis) member(l *lease) string {
	var room [64]byte
	return string(strconv.AppendInt(r.appendLeaseName(room[:0], l.id), l.length.Microseconds(), 10))
}

// argument is the member of a lease, for a command.
func (r *Redis) argument(l *lease) any {
	if l.name != nil {
		return l.name
	}
	return r.member(l)
}

// acknowledge notes what a call that is over has released.
func (r *Redis) acknowledge(c *admitCall) {
	c.unfair = false
	if c.err != nil || len(c.reply) != 1+2*len(c.ask.Checks) {
		r.leases.disclaim(c.id, c.ended)
		return
	}
	r.leases.acknowledged(c.sent, c.ended)
	denied, ends := false, uint32(0)
	for i, check := range c.ask.Checks {
		if l := check.Limit; l.Kind == Concurrency {
			denied = denied || c.reply[1+2*i] == replyDenied
			ends += r.leases.endsOf(l.stateKey(c.ask.Identity)).Load()
		}
	}
	if c.unfair = denied && c.more; denied && !c.more && ends != c.ends && c.overtaken < maxOvertaken {
		c.unfair = true
		c.overtaken++
	}
	c.ended, c.more = nil, false
}

// conclude reads the answer of a call, which was made at start, into adm.
func (r *Redis) conclude(start time.Time, c *admitCall, adm *Admission) error {
	results := adm.Results[len(adm.Results):][:len(c.ask.Checks)]
	adm.Results = adm.Results[:len(adm.Results)+len(results)]
	allowed := true
	if c.err == nil && len(c.reply) != 1+2*len(results) {
		c.err = errShape
	}
	for i, check := range c.ask.Checks {
		if c.err == nil {
			results[i], c.err = check.Limit.result(c.reply[1+2*i], c.reply[2+2*i])
			if !check.Dark && results[i].Outcome == NotEvaluated {
				c.err = errShape // which only dark checks are
			}
			allowed = allowed && (check.Dark || results[i].Outcome == Allowed)
		}
	}
	if c.err == nil {
		adm.Allowed = adm.Allowed && allowed
		if !allowed {
			return nil
		}
	}

	held := len(adm.leases)
	for i, check := range c.ask.Checks {
		if l := check.Limit; l.Kind == Concurrency && (c.err != nil || results[i].Outcome == Allowed) {
			taken := adm.take(l.stateKey(c.ask.Identity), c.id, l.Lease)
			taken.name = r.member(taken)
		}
	}
	taken := adm.leases[held:]
	if c.err == nil {
		r.leases.hold(start, taken...)
		return nil
	}
	clear(results)
	if c.mayHaveRun() {
		r.leases.end(time.Now(), true, taken...)
	}
	adm.leases = adm.leases[:held]
	adm.room = nil // its lease may be in use
	return fmt.Errorf("admit: %w", c.err)
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
