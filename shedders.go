// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// FleetShedder keeps a part of the whole fleet's capacity for critical
// requests: no more non-critical ones are in progress than the rest.
type FleetShedder struct {
	// How many requests the whole fleet can serve at once. Required unless
	// `auto` is set.
	Capacity int64 `json:"capacity,omitempty"`

	// Take the sum of the worker counts of all instances as the capacity.
	Auto bool `json:"auto,omitempty"`

	// The percentage of the capacity that is kept for critical requests, 0 to
	// 100. Required.
	Reserve *int `json:"reserve"`

	// How the shedder is applied (default: enforced).
	Mode *Mode `json:"mode,omitempty"`
}

// WorkerShedder sheds requests of an instance that has too much to do, slowly
// and the least critical first.
type WorkerShedder struct {
	// How many requests this instance can serve at once. Required unless there
	// is another source of utilization.
	Count int64 `json:"count,omitempty"`

	// The utilization, in percent, below which the instance recovers (default
	// 70).
	Good int `json:"good,omitempty"`

	// The utilization, in percent, above which it sheds more and more (default
	// 80). Between good and bad nothing changes.
	Bad int `json:"bad,omitempty"`

	// How long full overload must last before the first request is shed
	// (default 28s).
	Grace *caddy.Duration `json:"grace,omitempty"`

	// How long it takes from there to shed everything but critical requests
	// (default 120s).
	Ramp caddy.Duration `json:"ramp,omitempty"`

	// Where the utilization comes from (default: requests in progress of the
	// count).
	UtilizationRaw json.RawMessage `json:"utilization,omitempty" caddy:"namespace=stripe_ratelimit.utilization inline_key=source"`

	// How the shedder is applied (default: enforced).
	Mode *Mode `json:"mode,omitempty"`
}

// validate returns the first mistake in what the shedder says by itself.
func (f *FleetShedder) validate() error {
	switch {
	case f.Auto && f.Capacity != 0:
		return errors.New("fleet has a capacity and auto; choose one")
	case !f.Auto && f.Capacity < 1:
		return fmt.Errorf("fleet %d; at least 1 is needed (or auto)", f.Capacity)
	case f.Reserve == nil:
		return errors.New("fleet has no reserve; write what part of the capacity is kept for critical requests, such as reserve 20%")
	case *f.Reserve < 0 || *f.Reserve > 100:
		return fmt.Errorf("fleet has a reserve of %d, which is not between 0 and 100 percent", *f.Reserve)
	}
	if !f.Auto { // which depends on the workers
		if err := f.settings(nil).Validate(); err != nil {
			return fmt.Errorf("fleet: %w", err)
		}
	}
	return f.Mode.validate()
}

// String says what is in force, as the Caddyfile would.
func (f *FleetShedder) String() string {
	capacity := "auto"
	if !f.Auto {
		capacity = strconv.FormatInt(f.Capacity, 10)
	}
	return fmt.Sprintf("fleet %s reserve %d%%%s", capacity, *f.Reserve, modeSuffix(f.Mode.strength()))
}

// settings returns the numbers of a valid shedder.
func (f *FleetShedder) settings(workers *WorkerShedder) shedding.FleetSettings {
	s := shedding.FleetSettings{Capacity: f.Capacity, Reserve: float64(*f.Reserve)}
	if workers != nil {
		s.Workers = workers.Count
	}
	return s
}

// validateShedders checks the shedders of a handler and what they need of it.
func (h *Handler) validateShedders() error {
	if h.Workers != nil {
		if err := h.Workers.validate(); err != nil {
			return err
		}
	}
	if h.Fleet == nil {
		return nil
	}
	if err := h.Fleet.validate(); err != nil {
		return err
	}
	switch {
	case len(h.CriticalRaw) == 0:
		return errors.New("fleet without critical: nothing would use the reserve; say with critical which requests it is for")
	case h.Fleet.Auto && (h.Workers == nil || h.Workers.Count == 0):
		return errors.New("fleet auto without workers <n> beside it: the capacity is the sum of the instances' workers")
	}
	if err := h.Fleet.settings(h.Workers).Validate(); err != nil {
		return fmt.Errorf("fleet: %w", err)
	}
	return nil
}

// validate returns the first mistake in what the shedder says by itself.
func (w *WorkerShedder) validate() error {
	switch {
	case w.Count < 0:
		return fmt.Errorf("workers %d; at least 1 is needed", w.Count)
	case w.Count == 0 && w.source() == utilizationInFlight:
		return errors.New("workers without a number; write how many requests this instance can serve at once, such as workers 64, or another source of utilization")
	}
	ramp := w.settings().Ramp
	if !(0 < ramp.Good && ramp.Good < ramp.Bad && ramp.Bad < 1) {
		return fmt.Errorf("workers with good %.0f%% and bad %.0f%%; both must be above 0, below 100 and good below bad", ramp.Good*100, ramp.Bad*100)
	}
	if err := ramp.Validate(); err != nil {
		return fmt.Errorf("workers: %w", err)
	}
	return w.Mode.validate()
}

// source names the module that the utilization comes from.
func (w *WorkerShedder) source() string {
	var module struct{ Source string }
	if w.UtilizationRaw == nil || json.Unmarshal(w.UtilizationRaw, &module) != nil {
		return utilizationInFlight
	}
	return module.Source
}

// String says what is in force, as the Caddyfile would.
func (w *WorkerShedder) String() string {
	text := "workers"
	if w.Count > 0 {
		text += fmt.Sprintf(" %d", w.Count)
	}
	ramp := w.settings().Ramp
	text += fmt.Sprintf(" good %.0f%% bad %.0f%% grace %s ramp %s", ramp.Good*100, ramp.Bad*100, ramp.Grace, ramp.Ramp)
	if w.source() != utilizationInFlight {
		var compact bytes.Buffer // a config may be indented
		_ = json.Compact(&compact, w.UtilizationRaw)
		text += " utilization " + compact.String()
	}
	return text + modeSuffix(w.Mode.strength())
}

// settings returns the numbers with their defaults.
func (w *WorkerShedder) settings() shedding.WorkersSettings {
	ramp := shedding.DefaultRamp()
	if w.Good != 0 {
		ramp.Good = float64(w.Good) / 100
	}
	if w.Bad != 0 {
		ramp.Bad = float64(w.Bad) / 100
	}
	if w.Grace != nil {
		ramp.Grace = time.Duration(*w.Grace)
	}
	if w.Ramp != 0 {
		ramp.Ramp = time.Duration(w.Ramp)
	}
	return shedding.WorkersSettings{Count: w.Count, Ramp: ramp}
}

// shedders are the shedders of one pool, as one config has them.
type shedders struct {
	fleet   *FleetShedder
	workers *WorkerShedder
	source  UtilizationSource // of workers; nil: in flight

	strongest float64 // mode of the handlers; see Mode.strength

	local bool // a handler that has the fleet says on_store_error local

	said map[string]string // String of each, for comparison
}

// declareShedders notes the shedders of a handler, which must be the same in
// every handler of the pool that has them.
func (a *App) declareShedders(ctx caddy.Context, h *Handler) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.shedders[h.Pool]
	if s == nil {
		s = &shedders{said: map[string]string{}}
		a.shedders[h.Pool] = s
	}
	s.strongest = max(s.strongest, h.Mode.strength()) // also of one that inherits
	if h.Fleet != nil {
		if _, err := s.say(h.Pool, "fleet", h.Fleet); err != nil {
			return err
		}
		s.fleet = h.Fleet
		s.local = s.local || h.OnStoreError == onStoreErrorLocal
	}
	if h.Workers == nil {
		return nil
	}
	again, err := s.say(h.Pool, "workers", h.Workers)
	if err != nil || again {
		return err
	}
	s.workers = h.Workers
	if h.Workers.UtilizationRaw == nil {
		return nil
	}
	loaded, err := ctx.LoadModule(h.Workers, "UtilizationRaw")
	if err != nil {
		return fmt.Errorf("utilization: %w", err)
	}
	switch source := loaded.(type) {
	case *InFlight: // what the shedder does by itself
	case UtilizationSource:
		s.source = source
	default:
		return fmt.Errorf("utilization: %T is no source of utilization", loaded)
	}
	return nil
}

// say compares what a handler says of a shedder with what another has said,
// and reports whether one has.
func (s *shedders) say(pool, kind string, config fmt.Stringer) (again bool, err error) {
	text := config.String()
	said, again := s.said[kind]
	if again && said != text {
		return true, fmt.Errorf("pool %q has %s in one handler and %s in another; say it once, the other handlers of the pool inherit it", pool, said, text)
	}
	s.said[kind] = text
	return again, nil
}

// summary says in words what the shedders do.
func (s *shedders) summary() []string {
	var parts []string
	if f := s.fleet; f != nil {
		parts = append(parts, "fleet: "+s.fleetWords()+modeSuffix(s.strength(f.Mode)))
	}
	if w := s.workers; w != nil {
		parts = append(parts, "workers: "+s.workersWords()+modeSuffix(s.strength(w.Mode)))
	}
	return parts
}

func (s *shedders) fleetWords() string {
	f := s.fleet
	if f.Auto {
		return fmt.Sprintf("as many in progress fleet-wide as there are workers, less %d%% for non-critical", *f.Reserve)
	}
	return fmt.Sprintf("%d in progress fleet-wide, %d for non-critical", f.Capacity, f.settings(s.workers).Allocation())
}

func (s *shedders) workersWords() string {
	if s.source != nil {
		return "as many on this instance as its utilization allows"
	}
	return fmt.Sprintf("%d on this instance", s.workers.Count)
}

// strength is that of a shedder with the mode, where it is applied most strongly.
func (s *shedders) strength(mode *Mode) float64 {
	return min(s.strongest, mode.strength())
}

// shedderModes are the shedders of a pool in the running config. They are
// immutable.
type shedderModes struct {
	fleet, workers *shedderMode // nil: there is none
	of             *shared      // of which the fleet is; nil without one
}

// shedderMode is how one shedder is applied.
type shedderMode struct {
	mode     control.Mode
	strength float64 // with the handlers' modes, for the gauges
	words    string  // what it does
	metrics  *shedderMetrics
}

// modeOf is how a handler applies the shedder; off if there is none.
func (m *shedderMode) modeOf(h *Handler, inForce *inForce, kind string) control.Mode {
	if m == nil {
		return control.Off
	}
	return min(m.mode, h.Mode.level(), inForce.mode(h.Pool, kind, kind))
}

func (m *shedderMode) gauge(kind string) limitGauge {
	return limitGauge{kind: kind, name: kind, source: "config", strength: m.strength}
}

// commitShedders puts the shedders of a config in force, which has started and
// holds s.
func (s *shared) commitShedders(config *shedders) error {
	modes := new(shedderModes)
	if w := config.workers; w != nil {
		settings := w.settings()
		if config.source != nil {
			unknown := utilizationUnknown.WithLabelValues(s.pool.name)
			settings.Utilization = func() float64 {
				u := config.source.Utilization()
				if math.IsNaN(u) {
					unknown.Inc()
				}
				return u
			}
		}
		s.pool.workers.Set(settings)
		modes.workers = &shedderMode{w.Mode.level(), config.strength(w.Mode), config.workersWords(), newShedderMetrics(s.pool.name, "workers")}
	} else if old := s.pool.shedders.Load(); old != nil && old.workers != nil {
		// Nobody asks them, but they may be configured again. Their source is gone
		// with its config, so they recover as if idle.
		s.pool.workers.Set(shedding.WorkersSettings{Count: math.MaxInt64, Ramp: shedding.DefaultRamp()})
	}
	if f := config.fleet; f != nil {
		if err := s.join(); err != nil {
			return err
		}
		settings := f.settings(config.workers)
		settings.Timeout, settings.ShareOnError = s.store.timeout, config.local
		s.fleet.Set(settings)
		modes.fleet, modes.of = &shedderMode{f.Mode.level(), config.strength(f.Mode), config.fleetWords(), newShedderMetrics(s.pool.name, "fleet")}, s
	}
	s.pool.shedders.Store(modes)
	return nil
}

// shed asks the shedders, first the one that needs nobody, and reports whether
// one sheds the request. If the fleet had to be asked for a slot, ctx ends when
// the time for all store work of the request is over.
func (h *Handler) shed(a *attachment, modes *shedderModes, ctx *context.Context, r *http.Request, v *verdict, t *taken) (shed bool, cancel context.CancelFunc) {
	cancel = func() {}
	inForce := a.store.control.inForce()
	if mode := modes.workers.modeOf(h, inForce, "workers"); mode > control.Off {
		w, dark := modes.workers, isDark(mode, v.identity)
		would := a.pool.workers.Shed(v.criticality, rand.Float64())
		w.metrics.decision(dark, would)
		if would && v.shed(a, workersShedder, dark) {
			return true, cancel
		}
	}
	f, mode := modes.fleet, modes.fleet.modeOf(h, inForce, "fleet")
	if mode == control.Off {
		return false, cancel
	}
	if !modes.of.acquire() { // the last config with the fleet has just gone
		return false, cancel
	}
	t.of = modes.of
	dark := isDark(mode, v.identity)
	got := t.of.fleet.TryAcquire(v.criticality)
	var err error
	if !got {
		*ctx, cancel = context.WithTimeout(*ctx, a.store.timeout)
		got, err = t.of.fleet.Acquire(*ctx, v.criticality)
	}
	if got {
		t.slot = v.criticality
	}
	if err != nil { // the client has gone, or the store has: no reason to shed
		if !errors.Is(err, context.Canceled) {
			f.metrics.failed(dark)
		}
		return false, cancel
	}
	f.metrics.decision(dark, !got)
	return !got && v.shed(a, fleetShedder, dark), cancel
}

// shed notes that a shedder gives the request up, and reports whether that is
// enforced.
func (v *verdict) shed(a *attachment, by shedder, dark bool) bool {
	if dark {
		v.wouldShed = by
		return false
	}
	v.outcome, v.shedBy, v.level = outcomeShed, by, a.pool.workers.Level()
	return true
}

// enter counts a request that goes on to the next handler.
func (p *pool) enter(c shedding.Criticality) {
	p.workers.Enter()
	p.count(c, 1)
}

// leave takes back one enter.
func (p *pool) leave(c shedding.Criticality) {
	p.count(c, -1)
	p.workers.Leave()
}

func (p *pool) count(c shedding.Criticality, n int64) {
	if c == shedding.Critical {
		p.critical.Add(n)
	} else {
		p.nonCritical.Add(n)
	}
}
