// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// The events that Caddy's events app is told of.
const (
	eventTriggered     = "limit_triggered"
	eventCleared       = "limit_cleared"
	eventShedLevel     = "shed_level_changed"
	eventStoreDown     = "store_down"
	eventStoreUp       = "store_up"
	eventSwitchChanged = "switch_changed"
)

// quiet is for how long a limit must not have rejected anything to be cleared.
const quiet = time.Minute

// event is what Caddy's events app is told. Its data hold no identities.
type event struct {
	name string
	data map[string]any
}

// events tells Caddy's events app of the running config what happens to limits,
// and watches them for that. It belongs to a store. What handles events may take
// its time, so nobody waits for it: when too many events wait, more are dropped.
type events struct {
	queue   chan event
	watched watched
	begin   sync.Once
	stop    chan struct{}
	stopped sync.WaitGroup
}

func newEvents() *events {
	return &events{queue: make(chan event, 100), stop: make(chan struct{})}
}

// emit lets an event be told. It never blocks.
func (e *events) emit(name string, data map[string]any) {
	select {
	case e.queue <- event{name, data}:
	default:
	}
}

// start begins, with the first config that has started.
func (e *events) start() {
	e.begin.Do(func() {
		e.stopped.Go(e.tellLoop)
		e.stopped.Go(e.watchLoop)
	})
}

// close ends the watching. It does not wait for what handles an event: that may
// be waiting for us.
func (e *events) close() { close(e.stop) }

func (e *events) tellLoop() {
	for {
		select {
		case <-e.stop:
			return
		case told := <-e.queue:
			_ = safely.Do("event", func() { tellCaddy(told) })
		}
	}
}

// tellCaddy hands an event to the running config, if there is one.
func tellCaddy(told event) {
	o, err := operate()
	if err != nil {
		return
	}
	app := o.app
	o.leave() // a handler of the event may reload the config
	// Not with the context that the app was provisioned with: its last ancestor,
	// which would be the event's origin, may be overwritten by that of another
	// module (Caddy 2.11 shares the array).
	ctx := caddy.ActiveContext()
	if ctx.Context == nil {
		return // Caddy is about to stop: it forgets its context before its apps end
	}
	app.events.Emit(ctx, told.name, told.data)
}

func (e *events) watchLoop() {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-e.stop:
			return
		case now := <-ticker.C:
			_ = safely.Do("event", func() { e.watch(now) })
		}
	}
}

// watch looks what has changed since it looked last.
func (e *events) watch(now time.Time) {
	levels := map[string]shedding.Level{}
	for _, p := range allPools() {
		if modes := p.shedders.Load(); modes != nil && modes.workers != nil {
			levels[p.name] = p.workers.Status().Level
		}
	}
	for _, happened := range e.watched.step(now, counts(decisionsTotal), levels) {
		fields := make([]zap.Field, 0, len(happened.data))
		for _, name := range []string{"pool", "kind", "limit", "sheds", "level"} {
			if value, ok := happened.data[name]; ok {
				fields = append(fields, zap.Any(name, value))
			}
		}
		caddyLogger().Info(eventWords[happened.name], fields...)
		e.emit(happened.name, happened.data)
	}
}

// eventWords are what the log says of events that it would not tell of otherwise.
var eventWords = map[string]string{
	eventTriggered: "a limit rejects requests",
	eventCleared:   "a limit has not rejected anything for a minute",
	eventShedLevel: "the shed level has passed a mark",
}

// watched is what was seen of limits so far.
type watched struct {
	rejected map[limitRef]rejections
	sheds    map[string]string // by pool: the class up to which requests are shed
}

type limitRef struct{ pool, kind, limit string }

type rejections struct {
	n    uint64
	last time.Time // zero: it is clear
}

// step takes in the counters of decisions and the shed levels of pools at now, and
// returns what has happened since the last step. The first one only looks.
func (w *watched) step(now time.Time, decisions []counted, levels map[string]shedding.Level) (happened []event) {
	first := w.rejected == nil
	if first {
		w.rejected, w.sheds = map[limitRef]rejections{}, map[string]string{}
	}
	for _, c := range decisions {
		if c.labels["mode"] != "enforce" || c.labels["outcome"] != "denied" && c.labels["outcome"] != "shed" {
			continue
		}
		ref := limitRef{c.labels["pool"], c.labels["kind"], c.labels["limit"]}
		seen := w.rejected[ref]
		about := map[string]any{"pool": ref.pool, "kind": ref.kind, "limit": ref.limit}
		switch {
		case !first && c.n > seen.n:
			if seen.last.IsZero() {
				happened = append(happened, event{eventTriggered, about})
			}
			seen.last = now
		case !seen.last.IsZero() && now.Sub(seen.last) >= quiet:
			happened = append(happened, event{eventCleared, about})
			seen.last = time.Time{}
		}
		seen.n = c.n
		w.rejected[ref] = seen
	}
	for pool, level := range levels {
		sheds := shedClass(level)
		if before, ok := w.sheds[pool]; ok && before != sheds {
			happened = append(happened, event{eventShedLevel, map[string]any{
				"pool": pool, "level": float64(level), "sheds": sheds, "before": before,
			}})
		}
		w.sheds[pool] = sheds
	}
	return happened
}

// shedClass is the most critical class of which a level sheds anything; none if
// it sheds nothing.
func shedClass(level shedding.Level) string {
	for c := shedding.Post; c >= shedding.TestMode; c-- {
		if level.Probability(c) > 0 {
			return c.String()
		}
	}
	return "none"
}
