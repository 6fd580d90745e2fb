// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	mathrand "math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

const (
	// firstBeat is how often an instance asks until it is told by the store.
	firstBeat = 250 * time.Millisecond

	// storageTimeout bounds how long Caddy's storage is waited for.
	storageTimeout = 2 * time.Second

	// maxConflicts is how often a change is tried that others overtake.
	maxConflicts = 10
)

// controller keeps the switches and overrides that are in force on one store. It
// belongs to the store and is shared over configs.
type controller struct {
	redis   *limiters.Redis // nil: this process is all there is
	denials *limiters.Denials
	secret  string // fingerprint of key_secret
	place   string // equal for equal data, whatever the options of the connection
	logger  *zap.Logger
	emit    func(event string, data map[string]any)

	table     atomic.Pointer[inForce] // what requests go by; nil: nothing is in force
	instances atomic.Int64            // that share the store, as last heard
	beat      atomic.Int64            // ns between rounds with the store, likewise

	mu      sync.Mutex // guards below
	keeper  control.Keeper
	view    *control.View
	skew    time.Duration     // by which the store's clock is ahead
	down    error             // why the last call failed; nil: it did not
	differ  bool              // it was said that secrets differ
	rounds  chan struct{}     // closed and replaced after each round with the store
	storage certmagic.Storage // of the running config
	saved   string

	saving sync.Mutex // held while the snapshot is written

	wake    chan struct{} // capacity 1: there is something to write
	save    chan struct{} // capacity 1: there is something to save
	begin   sync.Once
	stop    chan struct{}
	stopped sync.WaitGroup
}

// newController returns the controller of a store, with what was in force when
// the process ended. It dials nobody.
func newController(redis *limiters.Redis, denials *limiters.Denials, place, secret string, storage certmagic.Storage) *controller {
	c := &controller{
		redis: redis, denials: denials, place: place, secret: fingerprint(secret), storage: storage,
		logger: caddy.Log().Named("stripe_ratelimit"), // that of a config ends with it
		view:   new(control.View),
		emit:   func(string, map[string]any) {},
		rounds: make(chan struct{}),
		wake:   make(chan struct{}, 1),
		save:   make(chan struct{}, 1),
		stop:   make(chan struct{}),
	}
	c.beat.Store(int64(firstBeat))
	if redis == nil {
		c.instances.Store(1)
	}
	c.restore()
	return c
}

// fingerprint tells secrets apart and nothing of them.
func fingerprint(secret string) string {
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write([]byte("stripe_ratelimit fingerprint of key_secret"))
	return hex.EncodeToString(mac.Sum(nil)[:8])
}

// inForce returns what requests go by; nil if nothing is in force.
func (c *controller) inForce() *inForce { return c.table.Load() }

// now is the time by which switches end: the store's, so that they end
// everywhere at once. mu must be held.
func (c *controller) now() time.Time { return time.Now().Add(c.skew) }

// start begins the work in the background, with a config that has started.
func (c *controller) start(storage certmagic.Storage) {
	c.mu.Lock()
	c.storage = storage // that of another config ends with it
	c.mu.Unlock()
	c.begin.Do(func() {
		c.stopped.Go(c.loop)
		c.stopped.Go(c.saveLoop)
	})
}

// soon says within which time a change is in force on every instance: two beats.
func (c *controller) soon() string {
	if within := 2 * time.Duration(c.beat.Load()); within > 2*firstBeat {
		return fmt.Sprint((within + time.Second - 1).Truncate(time.Second))
	}
	return "half a second"
}

// takeOver takes over what another controller of this process knows.
func (c *controller) takeOver(old *controller) {
	old.mu.Lock()
	local, saved := old.keeper.Local(), old.keeper.Save()
	old.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if old.place == c.place {
		_ = c.keeper.Load(saved) // it was just written
	}
	c.keeper.TakeOver(local)
	c.refreshLocked("taken over")
}

// close ends the work in the background and withdraws the instance.
func (c *controller) close() {
	close(c.stop)
	c.stopped.Wait()
	c.mu.Lock()
	known := c.down == nil && c.redis != nil && c.instances.Load() > 0
	c.mu.Unlock()
	if known {
		ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
		defer cancel()
		_, _ = c.redis.Control(ctx, limiters.ControlCall{Leave: true, Known: "-"})
	}
}

// loop agrees with the store, at each beat and when there is something to write,
// and ends what has expired.
func (c *controller) loop() {
	for {
		timer := time.NewTimer(c.round())
		select {
		case <-c.stop:
			timer.Stop()
			return
		case <-c.wake:
			timer.Stop()
		case <-timer.C:
		}
	}
}

// round agrees with the store and ends what has expired. It returns how long the
// next may take to come. A bug costs one round: what is in force stays.
func (c *controller) round() time.Duration {
	wait := firstBeat
	_ = safely.Do("control", func() {
		if c.redis != nil {
			c.agree()
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.refreshLocked("")
		close(c.rounds)
		c.rounds = make(chan struct{})
		wait = time.Hour
		if c.redis != nil {
			wait = time.Duration(float64(c.beat.Load()) * (0.8 + 0.4*mathrand.Float64()))
		}
		if ends := c.view.Ends(); !ends.IsZero() {
			wait = min(wait, max(time.Millisecond, ends.Sub(c.now())))
		}
	})
	return wait
}

// agree asks the store what it has and writes what it lacks.
func (c *controller) agree() {
	for range maxConflicts {
		next, changes, call := c.call()
		reply, err := c.redis.Control(context.Background(), call)
		if c.answered(next, changes, call, reply, err) {
			return
		}
	}
}

// call returns what to tell the store and to ask of it: with next, if it is not
// nil, to be written.
func (c *controller) call() (next *control.State, changes int, call limiters.ControlCall) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next, changes = c.keeper.Next(c.now(), tag())
	call = limiters.ControlCall{Secret: c.secret, Known: c.keeper.Known(), Stored: c.keeper.Stored()}
	if next != nil {
		call.ID, call.State = next.ID(), next.Encode()
	}
	return next, changes, call
}

// answered takes down what the store has answered to a call, and reports whether
// nothing is left to be said.
func (c *controller) answered(next *control.State, changes int, call limiters.ControlCall, reply limiters.ControlReply, err error) (done bool) {
	heard := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.down = err; err != nil {
		return true
	}
	c.skew = reply.Now.Sub(heard)
	c.instances.Store(reply.Instances)
	c.beat.Store(int64(reply.Beat))
	c.complainLocked(reply)
	if next != nil && reply.ID == next.ID() {
		if changes == 0 {
			c.logger.Info("switches were written back to the store", zap.Int64("version", next.Version))
		}
		c.keeper.Wrote(next, changes)
	} else {
		var state control.State
		if reply.ID != call.Known {
			var broken error
			if state, broken = control.Decode(reply.State); broken != nil {
				c.logger.Warn("the switches in the store cannot be read; those in force stay and are written back", zap.Error(broken))
				state = control.State{}
			}
		}
		if lost := c.keeper.Heard(reply.ID, state); lost != nil {
			c.logger.Warn("the store has lost switches; those in force stay and are written back",
				zap.Int64("version", lost.Knows), zap.Int64("version_in_store", lost.Had))
		}
	}
	c.refreshLocked("store")
	again, _ := c.keeper.Next(c.now(), "")
	return again == nil
}

func tag() string { return rand.Text()[:8] }

// complainLocked warns of instances that hash identities otherwise; once, until
// they agree again.
func (c *controller) complainLocked(reply limiters.ControlReply) {
	differ := reply.Secrets > 1
	if differ && !c.differ {
		c.logger.Warn("instances that share this store have different key_secrets, so each counts the same clients for itself; give all the same key_secret",
			zap.Int64("secrets", reply.Secrets), zap.Int64("instances", reply.Instances))
	}
	c.differ = differ
}

// refreshLocked puts in force what the keeper knows now, and tells what has
// changed. Via says where it comes from, if not from here; mu must be held.
func (c *controller) refreshLocked(via string) {
	now := c.now()
	old, view := c.view, c.keeper.View(now)
	c.view = view
	events := view.Since(old, now)
	identities, all := view.Stale(old, now)
	if len(events) > 0 {
		c.table.Store(newInForce(view, c.logger))
	}
	if all {
		c.denials.Forget()
	}
	for _, text := range identities {
		if id, err := parseIdentity(text); err == nil {
			c.denials.ForgetIdentity(time.Now(), id)
		}
	}
	for _, e := range events {
		c.tell(e, via)
	}
	select {
	case c.save <- struct{}{}:
	default:
	}
}

// tell logs and counts what has happened to a switch or an override.
func (c *controller) tell(e control.Event, via string) {
	if e.Switch != nil {
		switchChangesTotal.WithLabelValues(string(e.Action)).Inc()
	}
	write := c.logger.Info
	if s := e.Switch; s != nil {
		c.emit(eventSwitchChanged, map[string]any{
			"action": string(e.Action), "target": s.Target.String(), "mode": s.Mode.String(), "scope": string(s.Scope),
			"until": s.Until.Format(time.RFC3339), "reason": s.Reason, "actor": s.Actor,
		})
		write("switch "+string(e.Action), append(noteFields(s.Note, via),
			zap.String("target", s.Target.String()), zap.Stringer("mode", s.Mode), zap.String("scope", string(s.Scope)))...)
		return
	}
	o := e.Override
	fields := append(noteFields(o.Note, via), zap.String("target", o.Target.String()), zap.String("identity", o.Identity))
	if o.Kind == limiters.Rate.String() {
		fields = append(fields, zap.Int64("requests", o.Requests), zap.Int64("burst", o.Burst))
	} else {
		fields = append(fields, zap.Int64("capacity", o.Capacity))
	}
	write("override "+string(e.Action), fields...)
}

func noteFields(n control.Note, via string) []zap.Field {
	fields := []zap.Field{zap.Time("until", n.Until), zap.String("reason", n.Reason), zap.String("actor", n.Actor)}
	if via != "" {
		fields = append(fields, zap.String("via", via))
	}
	return fields
}

// change makes a change, which is in force here when it returns, and waits until
// the store has it, too. Otherwise the error says why not, in applied; it will be
// written as soon as the store is back.
func (c *controller) change(ctx context.Context, local bool, ch control.Change) (pending, err error) {
	c.mu.Lock()
	make := c.keeper.Change
	if local {
		make = c.keeper.ClearLocal
	}
	if err := make(c.now(), ch); err != nil {
		c.mu.Unlock()
		return nil, err
	}
	c.refreshLocked("")
	waiting := c.keeper.Waiting() > 0
	if c.redis == nil && waiting {
		next, changes := c.keeper.Next(c.now(), tag())
		c.keeper.Wrote(next, changes)
		c.refreshLocked("")
		waiting = false
	}
	rounds := c.rounds
	c.mu.Unlock()
	select {
	case c.wake <- struct{}{}:
	default:
	}
	for range 2 { // the round under way may have begun before
		if !waiting {
			break
		}
		select {
		case <-rounds:
		case <-ctx.Done():
			pending = ctx.Err()
		case <-c.stop:
			pending = errors.New("the store is being closed")
		}
		c.mu.Lock()
		waiting, rounds = c.keeper.Waiting() > 0, c.rounds
		down := c.down
		c.mu.Unlock()
		if pending != nil {
			break
		}
		if down != nil && waiting {
			pending = down
			break
		}
	}
	c.saveNow()
	if !waiting {
		pending = nil
	} else if pending == nil {
		pending = errors.New("others change it all the time")
	}
	return pending, nil
}

// storageKey is where the snapshot is in Caddy's storage.
func (c *controller) storageKey() string {
	sum := sha256.Sum256([]byte(c.place))
	return "stripe_ratelimit/control-" + hex.EncodeToString(sum[:8]) + ".json"
}

// restore reads the snapshot, if there is one.
func (c *controller) restore() {
	if c.storage == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
	defer cancel()
	text, err := c.storage.Load(ctx, c.storageKey())
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err == nil {
		err = c.keeper.Load(text)
	}
	if err != nil {
		c.logger.Warn("the snapshot of switches and overrides cannot be read; those of the store come with its first answer", zap.Error(err))
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.saved = string(text)
	c.refreshLocked("snapshot")
}

// saveLoop writes the snapshot when it has changed: apart from the beats, which
// must not wait for a storage that hangs.
func (c *controller) saveLoop() {
	for {
		select {
		case <-c.stop:
			c.saveNow()
			return
		case <-c.save:
			c.saveNow()
		}
	}
}

// saveNow writes the snapshot if it has changed. The storage may be a guest.
func (c *controller) saveNow() {
	c.saving.Lock()
	defer c.saving.Unlock()
	text, storage := c.unsaved()
	if storage == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
	defer cancel()
	var err error
	bug := safely.Do("control", func() { err = storage.Store(ctx, c.storageKey(), text) })
	if err = cmp.Or(bug, err); err != nil {
		c.logger.Warn("the snapshot of switches and overrides cannot be written; they would not survive a restart without the store", zap.Error(err))
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.saved = string(text)
}

// unsaved returns the snapshot, and the storage unless that has it.
func (c *controller) unsaved() ([]byte, certmagic.Storage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	text := c.keeper.Save()
	if string(text) == c.saved || c.keeper.Version() == 0 && c.keeper.Waiting() == 0 {
		return nil, nil
	}
	return text, c.storage
}

// parseIdentity reads an identity as logs show it.
func parseIdentity(text string) (id limiters.Identity, err error) {
	raw, err := hex.DecodeString(text)
	if err != nil || len(raw) != len(id) {
		return id, fmt.Errorf("an identity is %d hexadecimal digits, as logs show them", 2*len(id))
	}
	return limiters.Identity(raw), nil
}
