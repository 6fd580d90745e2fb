// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"maps"
	"sync/atomic"

	"go.uber.org/zap"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// inForce is the switches and overrides of one moment as requests look them up.
// A nil inForce has none. It is safe for concurrent use.
type inForce struct {
	view *control.View

	// What was looked up already: a few dozen limits at most.
	modes atomic.Pointer[map[control.Target]control.Mode]

	overrides map[limiters.Identity][]*override
	logger    *zap.Logger
}

// override is one with the limit that it makes of the configured one.
type override struct {
	control.Override
	made atomic.Pointer[madeLimit]
}

// madeLimit is what an override makes of a limit.
type madeLimit struct{ from, to *limitNumbers }

// newInForce returns what is in force by a view, nil if nothing is.
func newInForce(view *control.View, logger *zap.Logger) *inForce {
	if len(view.Switches)+len(view.Overrides) == 0 {
		return nil
	}
	f := &inForce{view: view, logger: logger}
	f.modes.Store(&map[control.Target]control.Mode{})
	for _, o := range view.Overrides {
		id, err := parseIdentity(o.Identity)
		if err != nil {
			continue // Validate has seen it
		}
		if f.overrides == nil {
			f.overrides = map[limiters.Identity][]*override{}
		}
		f.overrides[id] = append(f.overrides[id], &override{Override: o})
	}
	return f
}

// mode is the weakest mode that a switch demands of a limit or shedder.
func (f *inForce) mode(pool, kind, limit string) control.Mode {
	if f == nil || len(f.view.Switches) == 0 {
		return control.Enforce
	}
	target := control.Target{Pool: pool, Kind: kind, Limit: limit}
	known := f.modes.Load()
	if mode, ok := (*known)[target]; ok {
		return mode
	}
	mode := f.view.Mode(pool, kind, limit)
	more := maps.Clone(*known)
	more[target] = mode
	f.modes.CompareAndSwap(known, &more) // or it is looked up again
	return mode
}

// numbers returns the numbers of a limit for an identity.
func (f *inForce) numbers(n *limitNumbers, id limiters.Identity) *limitNumbers {
	if f == nil || len(f.overrides) == 0 {
		return n
	}
	for _, o := range f.overrides[id] {
		if o.is(n.limit) {
			return o.of(n, f.logger)
		}
	}
	return n
}

// is reports whether the override is one of the limit.
func (o *override) is(l *limiters.Limit) bool {
	return o.Limit == l.Name && o.Pool == l.Pool && o.Kind == l.Kind.String()
}

// of returns the limit with the numbers of the override. One that the limit
// cannot have, because a reload has raised its cost, leaves it as it is.
func (o *override) of(n *limitNumbers, logger *zap.Logger) *limitNumbers {
	if made := o.made.Load(); made != nil && made.from == n {
		return made.to
	}
	made := &madeLimit{from: n, to: n}
	if l, err := overridden(n.limit, &o.Override); err == nil {
		made.to = newLimitNumbers(l)
	} else {
		logger.Warn("an override does not fit its limit any more and is not in force",
			zap.String("target", o.Target.String()), zap.String("identity", o.Identity), zap.Error(err))
	}
	o.made.Store(made)
	return made.to
}

// overridden returns a limit with the numbers of an override.
func overridden(l *limiters.Limit, o *control.Override) (*limiters.Limit, error) {
	if l.Kind == limiters.Rate {
		return limiters.NewRate(l.Pool, l.Name, o.Requests, l.Period, o.Burst, l.Cost)
	}
	return limiters.NewConcurrency(l.Pool, l.Name, o.Capacity, l.Lease)
}
