// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

func init() {
	caddy.RegisterModule(new(App))
}

// App holds what all stripe_ratelimit handlers of a config share: the store and
// the secret that identities are hashed with.
type App struct {
	// The Redis that the instances of a fleet share. Without it, or with only
	// empty addresses, each process limits by its own memory.
	Redis *RedisConfig `json:"redis,omitempty"`

	// The HMAC key that identities are hashed with, the same on every instance.
	// Placeholders `{env.*}` and `{file.*}` are replaced. Without it identities
	// are hashed with a random key of the process (memory store) or with a
	// fixed, publicly known key (Redis), which is warned about.
	KeySecret string `json:"key_secret,omitempty"`

	// What happens to requests when the store fails: `open` lets them pass,
	// `local` applies each instance's equal share of the limits, `closed` answers
	// all but critical ones with 503 (default `open`).
	OnStoreError string `json:"on_store_error,omitempty"`

	events   *caddyevents.App
	logger   *zap.Logger
	hasher   *hasher
	storeKey string                 // equal for equal stores, in the pool of stores
	options  *limiters.RedisOptions // nil: memory
	place    string                 // equal for stores that hold the same data
	secret   string                 // of the hasher, if others share it
	storage  certmagic.Storage

	mu       sync.Mutex                  // guards below, while handlers are provisioned
	declared map[string][]*declaredLimit // by pool
	shedders map[string]*shedders        // by pool

	running map[string]*shared // by pool: what the config holds since it has started
}

// startedApps are those of the configs that have started and not ended, in that
// order. There are two during a reload, and the numbers of the last are in force.
var startedApps struct {
	sync.Mutex
	apps []*App
}

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "stripe_ratelimit", New: func() caddy.Module { return new(App) }}
}

// Provision prepares the store. It never connects to it.
func (a *App) Provision(ctx caddy.Context) error {
	if err := registerMetrics(ctx.GetMetricsRegistry()); err != nil {
		return err
	}
	a.logger = ctx.Logger()
	a.storage = ctx.Storage()
	a.declared = map[string][]*declaredLimit{}
	a.shedders = map[string]*shedders{}
	if err := a.validateConfig(); err != nil {
		return err
	}
	secret, err := expand(a.KeySecret)
	if err != nil {
		return fmt.Errorf("key_secret: %w", err)
	}
	if err := a.provisionStore(secret); err != nil {
		return err
	}
	app, err := ctx.App("events")
	if err != nil {
		return err
	}
	a.events = app.(*caddyevents.App)
	return a.events.On("started", started{a})
}

// processSecret hashes identities where nobody else needs to agree with us.
var processSecret = sync.OnceValue(func() []byte {
	secret := make([]byte, 32)
	_, _ = rand.Read(secret) // never fails
	return secret
})

// knownSecret hashes identities in a shared store without key_secret: all
// instances must agree, and there is nothing else that they share.
const knownSecret = "stripe_ratelimit without key_secret"

func (a *App) provisionStore(secret string) error {
	config, err := a.Redis.expanded()
	if err != nil {
		return err
	}
	if config == nil {
		if a.Redis != nil {
			a.logger.Warn("redis has no address, so each process limits by its own memory; is an environment variable unset?")
		}
		a.storeKey, a.place = "memory", "memory"
		a.hasher = newHasher(processSecret())
		if secret != "" {
			a.hasher = newHasher([]byte(secret))
		}
		return nil
	}
	if secret == "" {
		a.logger.Warn("redis is used without key_secret: whoever can read Redis can find out which API keys and addresses were seen; set key_secret to the same secret on every instance")
		secret = knownSecret
	}
	a.hasher, a.secret = newHasher([]byte(secret)), secret
	universal, err := config.universal()
	if err != nil {
		return err
	}
	a.options = &limiters.RedisOptions{
		Universal: *universal,
		Timeout:   cmp.Or(time.Duration(config.Timeout), limiters.DefaultTimeout),
		KeyPrefix: config.KeyPrefix,
	}
	key, err := config.key()
	a.storeKey = "redis " + key
	a.place = fmt.Sprintf("redis %q %q %d %q", universal.Addrs, universal.MasterName, universal.DB, config.KeyPrefix)
	return err
}

// newStore makes the store of this config, for the pool of stores.
func (a *App) newStore() (caddy.Destructor, error) {
	s := &store{denials: limiters.NewDenials(), kind: "memory", log: storeLog{logger: caddyLogger}, events: newEvents()}
	if a.options == nil {
		s.Store = limiters.NewMemory(0)
		s.control = newController(nil, s.denials, a.place, "", a.storage)
		s.control.emit = s.events.emit
		return s, nil
	}
	s.kind, s.timeout = "redis", a.options.Timeout
	switch u := &a.options.Universal; {
	case u.MasterName != "":
		s.kind = "redis_sentinel"
	case u.IsClusterMode || len(u.Addrs) > 1:
		s.kind = "redis_cluster"
	}
	s.count = newStoreObserver()
	options := *a.options
	options.Observe, options.OnBreaker = s.observe, s.breaker
	redis := limiters.NewRedis(options)
	s.Store = redis
	s.control = newController(redis, s.denials, a.place, a.secret, a.storage)
	s.control.emit = s.events.emit
	return s, nil
}

// Start implements caddy.App. What is to happen when the config has started
// happens on the event: an app that starts later may still fail.
func (*App) Start() error { return nil }

// Stop implements caddy.App. Nothing hangs on it: requests go on.
func (*App) Stop() error { return nil }

// Cleanup lets go of what the config holds, which withdraws it from the fleets
// that the next one has not joined. A config can still fail once it has started
// (Caddy sets up remote administration and config loaders last): then the one
// before it, which runs on, gets its numbers back.
func (a *App) Cleanup() error {
	startedApps.Lock()
	defer startedApps.Unlock()
	i := slices.Index(startedApps.apps, a)
	if i < 0 {
		return nil
	}
	startedApps.apps = slices.Delete(startedApps.apps, i, i+1)
	var err error
	if i == len(startedApps.apps) {
		var before *App
		if i > 0 {
			before = startedApps.apps[i-1]
		}
		err = before.putInForce(a)
	}
	for _, held := range a.running {
		held.release()
	}
	return err
}

// declaredLimit is a limit as a handler of this config has it.
type declaredLimit struct {
	numbers  *limitNumbers
	scope    string // key and matchers, for comparison
	strength float64
}

// declare notes a limit of a handler, which must be the same in every handler
// of its pool.
func (a *App) declare(d *declaredLimit) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	l := d.numbers.limit
	for _, other := range a.declared[l.Pool] {
		o := other.numbers.limit
		if o.Kind != l.Kind || o.Name != l.Name {
			continue
		}
		if !o.Equal(l) {
			return fmt.Errorf("%s limit %q of pool %q is %s in one handler and %s in another; give them the same numbers, or another name or pool",
				l.Kind, l.Name, l.Pool, describe(o), describe(l))
		}
		if other.scope != d.scope {
			return fmt.Errorf("%s limit %q of pool %q (%s) has other keys, matchers or ipv6_prefix in one handler than in another; make them the same, or choose another name or pool",
				l.Kind, l.Name, l.Pool, describe(l))
		}
		other.strength = max(other.strength, d.strength)
		return nil
	}
	a.declared[l.Pool] = append(a.declared[l.Pool], d)
	return nil
}

// started puts the config of an app in force once it has started.
type started struct{ app *App }

// Handle implements caddyevents.Handler.
func (s started) Handle(context.Context, caddy.Event) error {
	a := s.app
	startedApps.Lock()
	defer startedApps.Unlock()
	var before *App
	if n := len(startedApps.apps); n > 0 {
		before = startedApps.apps[n-1]
	}
	startedApps.apps = append(startedApps.apps, a)
	a.running = map[string]*shared{}
	for name := range a.shedders {
		held, err := a.share(name)
		if err != nil {
			return err
		}
		a.running[name] = held
	}
	return a.putInForce(before)
}

// putInForce makes the numbers of the config, nil for one without the app, those
// of its pools. Pools that only the other config has, which was in force, may live
// on for long requests, and come back: they are left without numbers.
func (a *App) putInForce(other *App) error {
	running := map[string]*shared{}
	if a != nil {
		running = a.running
		runningStore.Store(any(a.storeKey))
	}
	if other != nil {
		for name, held := range other.running {
			if running[name] != nil {
				continue
			}
			held.commit(nil)
			if err := held.commitShedders(new(shedders)); err != nil {
				return err
			}
		}
	}
	for name, held := range running {
		config, declared := a.shedders[name], a.declared[name]
		held.commit(declared)
		if err := held.commitShedders(config); err != nil {
			return err
		}
		words := append(summary(declared, a.options != nil), config.summary()...)
		a.logger.Info("limits in force", zap.String("pool", name), zap.String("limits", strings.Join(words, "; ")))
	}
	a.startControl(other)
	return nil
}

// summary says in words what is in force.
func summary(declared []*declaredLimit, shared bool) []string {
	scope := "on this instance alone"
	if shared {
		scope = "over all instances"
	}
	parts := make([]string, len(declared))
	for i, d := range declared {
		l := d.numbers.limit
		if l.Kind == limiters.Rate {
			parts[i] = fmt.Sprintf("%s: %s per key %s, bucket %d", l.Name, describe(l), scope, l.Capacity)
		} else {
			parts[i] = fmt.Sprintf("%s: %s per key %s", l.Name, describe(l), scope)
		}
		parts[i] += modeSuffix(d.strength)
	}
	return parts
}

// modeSuffix says how something is applied, unless it is just enforced.
func modeSuffix(strength float64) string {
	switch {
	case strength == 0:
		return " (off)"
	case strength == 1:
		return " (dark)"
	case strength < 2:
		return fmt.Sprintf(" (enforced for %.0f%% of the keys)", (strength-1)*100)
	}
	return ""
}

// describe says the numbers of a limit: "100/s", "20 in progress".
func describe(l *limiters.Limit) string {
	if l.Kind == limiters.Concurrency {
		text := fmt.Sprintf("%d in progress", l.Capacity)
		if l.Lease != limiters.DefaultLease {
			text += fmt.Sprintf(" (lease %s)", l.Lease)
		}
		return text
	}
	unit := l.Period.String()
	switch l.Period {
	case time.Second:
		unit = "s"
	case time.Minute:
		unit = "m"
	case time.Hour:
		unit = "h"
	case 24 * time.Hour:
		unit = "d"
	}
	text := fmt.Sprintf("%d/%s", l.Requests, unit)
	if l.Cost != 1 {
		text += fmt.Sprintf(" (cost %d)", l.Cost)
	}
	return text
}

// expand replaces {env.*}, {file.*} and the like. A placeholder that is unknown
// or empty is an error: a secret that is missing must not go unnoticed.
func expand(text string) (string, error) {
	if text == "" {
		return "", nil
	}
	repl := caddy.NewReplacer()
	replaced, err := repl.ReplaceOrErr(text, true, true)
	if err == nil {
		return replaced, nil
	}
	// Its error quotes what stands in braces, which may be part of a secret. Only
	// what names a variable or a file is shown.
	for _, name := range placeholderRE.FindAllString(text, -1) {
		if _, err := repl.ReplaceOrErr(name, true, true); err != nil {
			return "", err
		}
	}
	return "", errors.New(`braces that are neither {env.*} nor {file.*}; write \{ and \} where they belong to the text`)
}

var (
	_ caddy.App          = (*App)(nil)
	_ caddy.Provisioner  = (*App)(nil)
	_ caddy.CleanerUpper = (*App)(nil)
)
