// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap/exp/zapslog"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// What outlives a config lives here. A config holds references to the pools and
// the store of its handlers and to the fleets it has joined, and so does every
// request in progress, because requests outlive their config and may even start
// on it after its Cleanup.
var (
	pools  = caddy.NewUsagePool() // pool name -> *pool
	stores = caddy.NewUsagePool() // App.storeKey -> *store
	fleets = caddy.NewUsagePool() // fleetKey -> *fleet
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

	workers  *shedding.Workers
	shedders atomic.Pointer[shedderModes] // of the running config; nil before it has started

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

	// current has the numbers of the running config; nil before it has started,
	// and if it has no such limit. All handlers go by them, those of a config that is being loaded as well:
	// it may yet be rejected.
	current atomic.Pointer[limitNumbers]
}

// limitNumbers is a limit with what responses say of it.
type limitNumbers struct {
	limit *limiters.Limit
	words *limitWords
	local atomic.Pointer[localShare]
}

func newLimitNumbers(l *limiters.Limit) *limitNumbers {
	return &limitNumbers{limit: l, words: newLimitWords(l)}
}

func newPool(name string) (caddy.Destructor, error) {
	return &pool{
		name:    name,
		metrics: newPoolMetrics(name),
		workers: shedding.NewWorkers(),
		limits:  map[limitKey]*poolLimit{},
	}, nil
}

// slogger returns what the shedders of a pool log to: Caddy's own logger, since
// that of a config ends with it.
func slogger(pool string) *slog.Logger {
	return slog.New(zapslog.NewHandler(caddy.Log().Core(), zapslog.WithName("stripe_ratelimit"))).With("pool", pool)
}

// Destruct implements caddy.Destructor.
func (p *pool) Destruct() error {
	p.workers.Close()
	return nil
}

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

// commit puts the numbers of a config in force, which has started. Limits that it
// does not have are left without, lest they come back with those of long ago.
func (s *shared) commit(declared []*declaredLimit) {
	shown := make([]limitGauge, 0, len(declared))
	inForce := make(map[*poolLimit]bool, len(declared))
	for _, d := range declared {
		pl := s.pool.limit(d.numbers.limit)
		pl.current.Store(d.numbers)
		inForce[pl] = true
		shown = append(shown, limitGauge{
			kind: d.numbers.limit.Kind.String(), name: d.numbers.limit.Name,
			source: "config", strength: d.strength,
		})
	}
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	s.pool.shown = shown
	for _, pl := range s.pool.limits {
		if !inForce[pl] {
			pl.current.Store(nil)
		}
	}
}

// store is a limiters.Store with what goes with it.
type store struct {
	limiters.Store
	denials *limiters.Denials
	local   localLimits
	control *controller
	kind    string // memory, redis, redis_cluster or redis_sentinel
	count   func(operation string, took time.Duration, err error)
	timeout time.Duration // of all store work that one request waits for
	log     storeLog
	events  *events
}

// Destruct implements caddy.Destructor. It comes with the last reference, so
// nobody is left who would take or release.
func (s *store) Destruct() error {
	defer s.log.close()
	s.events.close()
	s.control.close()
	s.local.close()
	return s.Close()
}

// observe counts an operation of the store and logs when it failed.
func (s *store) observe(operation string, took time.Duration, err error) {
	s.count(operation, took, err)
	if err == nil {
		return
	}
	s.log.failed(time.Now(), operation, err)
}

// breaker logs that the breaker of a Redis node opened or closed.
func (s *store) breaker(node string, open bool, err error) {
	s.log.changed(time.Now(), nodeChange{node, open, err})
	if open {
		s.events.emit(eventStoreDown, map[string]any{"node": node, "reason": limiters.Reason(err)})
	} else {
		s.events.emit(eventStoreUp, map[string]any{"node": node})
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

// fleetKey names the state that the instances of a fleet share. A pool that
// moves to another store begins a new one there.
type fleetKey struct{ store, pool string }

// fleet is a pool's part in a fleet.
type fleet struct{ *shedding.Fleet }

// Destruct implements caddy.Destructor: it withdraws the instance.
func (f *fleet) Destruct() error {
	f.Close()
	return nil
}

// syncFleet returns how a pool's fleet reaches its state, nil where this process
// is all there is.
func (s *store) syncFleet(pool string) shedding.SyncFunc {
	redis, ok := s.Store.(*limiters.Redis)
	if !ok {
		return nil
	}
	return func(ctx context.Context, request shedding.SyncRequest) (shedding.SyncReply, error) {
		reply, err := redis.SyncFleet(ctx, pool, request.Args())
		if err != nil {
			return shedding.SyncReply{}, err
		}
		return shedding.ParseSyncReply(reply)
	}
}

// shared is a hold on a pool and its store, and on the pool's part in a fleet if
// that was joined: one reference of the config, and one of each request in
// progress. The last to let go releases it.
type shared struct {
	pool  *pool
	store *store
	fleet *fleet // nil: not joined
	keys  fleetKey
	refs  atomic.Int64
}

// share takes one reference to what the handlers of a pool share, which it makes
// if need be. It does not dial.
func (a *App) share(name string) (*shared, error) {
	s := &shared{keys: fleetKey{a.storeKey, name}}
	p, _, err := pools.LoadOrNew(name, func() (caddy.Destructor, error) { return newPool(name) })
	if err != nil {
		return nil, err
	}
	st, _, err := stores.LoadOrNew(a.storeKey, a.newStore)
	if err != nil {
		_, _ = pools.Delete(name)
		return nil, err
	}
	s.pool, s.store = p.(*pool), st.(*store)
	s.refs.Store(1)
	return s, nil
}

// join makes s a hold on the pool's part in the fleet, too. Only a config that
// has started joins, so that one without the fleet leaves it.
func (s *shared) join() error {
	if s.fleet != nil {
		return nil
	}
	f, _, err := fleets.LoadOrNew(s.keys, func() (caddy.Destructor, error) {
		return &fleet{shedding.NewFleet(s.store.syncFleet(s.keys.pool), slogger(s.keys.pool))}, nil
	})
	if err == nil {
		s.fleet = f.(*fleet)
	}
	return err
}

// acquire takes a reference unless there is none left.
func (s *shared) acquire() bool {
	for n := s.refs.Load(); n > 0; n = s.refs.Load() {
		if s.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
	return false
}

// release lets a reference go.
func (s *shared) release() {
	if s.refs.Add(-1) == 0 {
		s.end()
	}
}

// leave lets the reference of a request go. If it is the last one, the farewell
// to the store, which may be hung, is not what the response waits for; but a
// process that ends does.
func (s *shared) leave() {
	switch {
	case s.refs.Add(-1) > 0:
	case caddy.Exiting():
		s.end()
	default:
		go s.end()
	}
}

// end lets go of all. The fleet ends before the store: it withdraws through it.
func (s *shared) end() {
	if s.fleet != nil {
		_ = safely.Do("end", func() { _, _ = fleets.Delete(s.keys) })
	}
	_ = safely.Do("end", func() { _, _ = stores.Delete(s.keys.store) })
	_ = safely.Do("end", func() { _, _ = pools.Delete(s.keys.pool) })
}

// attachment is a handler's hold on what its pool shares.
type attachment struct {
	*shared
	limits []*poolLimit // of Handler.limits, in their order
}

// attach makes an attachment with one reference.
func (h *Handler) attach() (*attachment, error) {
	s, err := h.app.share(h.Pool)
	if err != nil {
		return nil, err
	}
	a := &attachment{shared: s}
	for _, l := range h.limits {
		a.limits = append(a.limits, a.pool.limit(l.numbers.limit))
	}
	return a, nil
}

// snapshot is what the gauges show.
func snapshot() gaugeSnapshot {
	s := gaugeSnapshot{nodes: map[string]bool{}}
	var inForce *inForce
	stores.Range(func(key, value any) bool {
		value.(*store).nodes(s.nodes)
		// During a reload there may be two: the running config's is shown.
		if s.store == "" || key == runningStore.Load() {
			st := value.(*store)
			s.store, s.control, inForce = st.kind, st.control.gauge(), st.control.inForce()
		}
		return true
	})
	pools.Range(func(_, value any) bool {
		p := value.(*pool)
		p.mu.Lock()
		limits := slices.Clone(p.shown)
		p.mu.Unlock()
		g := poolGauges{pool: p.name, critical: p.critical.Load(), nonCritical: p.nonCritical.Load()}
		if modes := p.shedders.Load(); modes != nil {
			if modes.workers != nil {
				status := p.workers.Status()
				g.workers = &status
				limits = append(limits, modes.workers.gauge("workers"))
			}
			if modes.fleet != nil {
				status := modes.of.fleet.Status()
				g.fleet = &status
				limits = append(limits, modes.fleet.gauge("fleet"))
			}
		}
		for i := range limits {
			l := &limits[i]
			if mode := inForce.mode(p.name, l.kind, l.name).Strength(); mode < l.strength {
				l.strength, l.source = mode, "switch"
			}
		}
		g.limits = limits
		s.pools = append(s.pools, g)
		return true
	})
	slices.SortFunc(s.pools, func(a, b poolGauges) int { return cmp.Compare(a.pool, b.pool) })
	return s
}
