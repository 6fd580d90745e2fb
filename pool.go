// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// What outlives a config lives here. A config holds one reference to the pools
// and the store of its handlers, and so does every request in progress, because
// requests outlive their config and may even start on it after its Cleanup.
var (
	pools  = caddy.NewUsagePool() // pool name -> *pool
	stores = caddy.NewUsagePool() // App.storeKey -> *store
)

// runningStore is the key in stores of the config that started last.
var runningStore atomic.Value

func init() {
	gauges.snapshot = snapshot
}

// pool is the state that handlers of one pool name share.
type pool struct {
	name    string
	metrics *poolMetrics

	critical, nonCritical atomic.Int64 // requests in progress

	mu     sync.Mutex // guards below
	limits map[limitKey]*poolLimit
	shown  []limitGauge // the limits of the running config
}

// limitKey names a limit within its pool.
type limitKey struct {
	kind limiters.Kind
	name string
}

// poolLimit is what a pool knows of one limit.
type poolLimit struct {
	metrics *limitMetrics

	// current has the numbers of the running config; nil before it has started.
	// All handlers go by them, those of a config that is being loaded as well:
	// it may yet be rejected.
	current atomic.Pointer[limitNumbers]
}

// limitNumbers is a limit with what responses say of it.
type limitNumbers struct {
	limit *limiters.Limit
	words *limitWords
}

func newPool(name string) (caddy.Destructor, error) {
	return &pool{name: name, metrics: newPoolMetrics(name), limits: map[limitKey]*poolLimit{}}, nil
}

// Destruct implements caddy.Destructor.
func (*pool) Destruct() error { return nil }

// limit returns the entry of a limit, which it makes if there is none.
func (p *pool) limit(l *limiters.Limit) *poolLimit {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := limitKey{l.Kind, l.Name}
	pl := p.limits[key]
	if pl == nil {
		pl = &poolLimit{metrics: newLimitMetrics(p.name, l)}
		p.limits[key] = pl
	}
	return pl
}

// commit puts the numbers of a config in force, which has started.
func (p *pool) commit(declared []*declaredLimit) {
	shown := make([]limitGauge, 0, len(declared))
	for _, d := range declared {
		p.limit(d.numbers.limit).current.Store(d.numbers)
		shown = append(shown, limitGauge{
			kind: d.numbers.limit.Kind, name: d.numbers.limit.Name,
			source: "config", strength: d.strength,
		})
	}
	p.mu.Lock()
	p.shown = shown
	p.mu.Unlock()
}

// store is a limiters.Store with what goes with it.
type store struct {
	limiters.Store
	denials *limiters.Denials
	kind    string // memory, redis, redis_cluster or redis_sentinel
	log     everySecond
}

// Destruct implements caddy.Destructor. It comes with the last reference, so
// nobody is left who would take or release.
func (s *store) Destruct() error { return s.Close() }

// countStore counts the operations of Redis stores.
var countStore = newStoreObserver()

// observe counts an operation of the store and logs when it failed.
func (s *store) observe(operation string, took time.Duration, err error) {
	countStore(operation, took, err)
	if err == nil {
		return
	}
	if more, ok := s.log.allow(time.Now()); ok {
		// Caddy's own logger, because that of a config ends with it.
		caddy.Log().Named("stripe_ratelimit").Warn("store failed; requests are not limited by it meanwhile",
			zap.String("operation", operation),
			zap.String("reason", limiters.Reason(err)),
			zap.Error(err),
			zap.Int64("failures_not_logged", more))
	}
}

// everySecond lets one event a second be logged and counts the others.
type everySecond struct {
	last    atomic.Int64 // unix ns
	skipped atomic.Int64
}

func (e *everySecond) allow(now time.Time) (skipped int64, ok bool) {
	last := e.last.Load()
	if now.UnixNano()-last < int64(time.Second) || !e.last.CompareAndSwap(last, now.UnixNano()) {
		e.skipped.Add(1)
		return 0, false
	}
	return e.skipped.Swap(0), true
}

// attachment is a handler's hold on its pool and its store: one reference of
// the config, and one of each request in progress. The last to let go releases
// both.
type attachment struct {
	refs     atomic.Int64
	poolName string
	storeKey string

	pool   *pool
	store  *store
	limits []*poolLimit // of Handler.limits, in their order
}

// attach makes an attachment with one reference. It does not dial.
func (h *Handler) attach() (*attachment, error) {
	p, _, err := pools.LoadOrNew(h.Pool, func() (caddy.Destructor, error) { return newPool(h.Pool) })
	if err != nil {
		return nil, err
	}
	s, _, err := stores.LoadOrNew(h.app.storeKey, h.app.newStore)
	if err != nil {
		_, _ = pools.Delete(h.Pool)
		return nil, err
	}
	a := &attachment{poolName: h.Pool, storeKey: h.app.storeKey, pool: p.(*pool), store: s.(*store)}
	a.refs.Store(1)
	for _, l := range h.limits {
		a.limits = append(a.limits, a.pool.limit(l.numbers.limit))
	}
	return a, nil
}

// acquire takes a reference unless there is none left.
func (a *attachment) acquire() bool {
	for n := a.refs.Load(); n > 0; n = a.refs.Load() {
		if a.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
	return false
}

// release lets a reference go.
func (a *attachment) release() {
	if a.refs.Add(-1) == 0 {
		_, _ = pools.Delete(a.poolName)
		_, _ = stores.Delete(a.storeKey)
	}
}

// snapshot is what the gauges show.
func snapshot() gaugeSnapshot {
	var s gaugeSnapshot
	stores.Range(func(key, value any) bool {
		// During a reload there may be two: the running config's is shown.
		if s.store == "" || key == runningStore.Load() {
			s.store = value.(*store).kind
		}
		return true
	})
	pools.Range(func(_, value any) bool {
		p := value.(*pool)
		p.mu.Lock()
		limits := p.shown
		p.mu.Unlock()
		s.pools = append(s.pools, poolGauges{
			pool: p.name, limits: limits,
			critical: p.critical.Load(), nonCritical: p.nonCritical.Load(),
		})
		return true
	})
	slices.SortFunc(s.pools, func(a, b poolGauges) int { return cmp.Compare(a.pool, b.pool) })
	return s
}
