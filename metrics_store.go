// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

var (
	storeErrorsTotal = prometheus.NewCounterVec(counterOpts("store_errors_total",
		"Failed calls of Redis. Those of the reason breaker_open were not made."),
		[]string{"operation", "reason"})

	storeDuration = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: metricsNamespace,
		Subsystem: metricsSubsystem,
		Name:      "store_duration_seconds",
		Help:      "How long calls of Redis took, failed ones included.",
		// 0.1 ms is a Redis in the next rack, 100 ms is twice the default timeout.
		Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1},
	}, []string{"operation"})

	storeInfo = gaugeDesc("store_info",
		"The store in use: memory, redis, redis_cluster or redis_sentinel.",
		"store")

	storeBreakerOpen = gaugeDesc("store_breaker_open",
		"Whether a Redis node fails and is not called until a probe finds that it works again.",
		"node")
)

// newStoreObserver returns what a Redis store reports its operations to. It
// resolves what it counts, as the others do.
func newStoreObserver() func(operation string, took time.Duration, err error) {
	durations := make(map[string]prometheus.Observer)
	for _, operation := range []string{"admit", "release", "renew", "fleet_sync", "control", "inspect", "reset"} {
		durations[operation] = storeDuration.WithLabelValues(operation)
		for _, reason := range []string{
			"timeout", "connection", "late", "loading", "readonly", "oom", "auth",
			"busy", "cluster", "wrong_type", "shape", "closed", "breaker_open", "panic", "other",
		} {
			storeErrorsTotal.WithLabelValues(operation, reason)
		}
	}
	return func(operation string, took time.Duration, err error) {
		if err != nil {
			reason := limiters.Reason(err)
			storeErrorsTotal.WithLabelValues(operation, reason).Inc()
			if reason == "breaker_open" {
				return // it took nothing, and would hide how long calls take
			}
		}
		duration := durations[operation]
		if duration == nil {
			duration = storeDuration.WithLabelValues(operation)
		}
		duration.Observe(took.Seconds())
	}
}

// collectNodes sends whether the breakers of the nodes are open.
func collectNodes(nodes map[string]bool, send func(*prometheus.Desc, float64, ...string)) {
	for name, open := range nodes {
		value := 0.0
		if open {
			value = 1
		}
		send(storeBreakerOpen, value, name)
	}
}

// nodes adds the nodes of a store to those of others. Two stores may reach one
// node; its breaker is open if one of theirs is.
func (s *store) nodes(all map[string]bool) {
	redis, ok := s.Store.(*limiters.Redis)
	if !ok {
		return
	}
	for _, n := range redis.Nodes() {
		all[n.Node] = all[n.Node] || n.Open
	}
}

// storeLog writes what goes wrong with a store, one line a second at most. Single
// failures are left out beyond that; what becomes of a node is said a little later.
type storeLog struct {
	logger func() *zap.Logger

	mu      sync.Mutex // guards below
	last    time.Time
	skipped int64 // failures that were left out
	changes []nodeChange
	timer   *time.Timer // of changes that wait; nil: none
}

// nodeChange is a breaker that opened, with the cause, or closed.
type nodeChange struct {
	node string
	open bool
	err  error
}

// maxChanges bounds the changes that wait to be logged.
const maxChanges = 100

// caddyLogger is Caddy's own logger, because that of a config ends with it.
func caddyLogger() *zap.Logger { return caddy.Log().Named("stripe_ratelimit") }

// failed logs that an operation failed.
func (l *storeLog) failed(now time.Time, operation string, err error) {
	if limiters.Reason(err) == "breaker_open" {
		return // it was said when it opened
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.last) < time.Second {
		l.skipped++
		return
	}
	l.logger().Warn("store failed; on_store_error says what becomes of requests meanwhile",
		zap.String("operation", operation),
		zap.String("reason", limiters.Reason(err)),
		zap.Error(err),
		l.more(now))
}

// more notes a line that is written now, and is its last field.
func (l *storeLog) more(now time.Time) zap.Field {
	skipped := l.skipped
	l.last, l.skipped = now, 0
	return zap.Int64("failures_not_logged", skipped)
}

// changed logs that a breaker opened or closed.
func (l *storeLog) changed(now time.Time, change nodeChange) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.changes) == maxChanges {
		l.changes = l.changes[1:]
	}
	l.changes = append(l.changes, change)
	if l.timer == nil {
		l.changesLocked(now)
	}
}

// changesLocked logs one change if it may, and comes back for the rest.
func (l *storeLog) changesLocked(now time.Time) {
	l.timer = nil
	if len(l.changes) > 0 && now.Sub(l.last) >= time.Second {
		c := l.changes[0]
		l.changes = l.changes[1:]
		node, more := zap.String("node", c.node), l.more(now)
		if c.open {
			l.logger().Warn("Redis node fails; it is not called until it works again, and on_store_error says what becomes of requests meanwhile",
				node, zap.String("reason", limiters.Reason(c.err)), zap.Error(c.err), more)
		} else {
			l.logger().Info("Redis node works again; limits are in force", node, more)
		}
	}
	if len(l.changes) > 0 {
		l.timer = time.AfterFunc(time.Second-now.Sub(l.last), func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.changesLocked(time.Now())
		})
	}
}

// close ends what waits.
func (l *storeLog) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.changes = nil; l.timer != nil {
		l.timer.Stop()
	}
}
