// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// errNotRunning is returned where there is nothing to operate.
var errNotRunning = errors.New("the running config limits nothing; add stripe_ratelimit to a site and reload")

// operator acts on what the running config limits by: it is what the admin API
// is made of. Release it with leave.
type operator struct {
	*shared // one of the config's pools, for the store
	app     *App
}

// operate returns the operator of the running config.
func operate() (*operator, error) {
	startedApps.Lock() // so that it does not end meanwhile
	defer startedApps.Unlock()
	if n := len(startedApps.apps); n > 0 {
		app := startedApps.apps[n-1]
		for _, s := range app.running {
			if s.acquire() {
				return &operator{s, app}, nil
			}
		}
	}
	return nil, errNotRunning
}

// store returns that of the config, nil if it limits nothing.
func (a *App) store() *store {
	if a != nil {
		for _, s := range a.running {
			return s.store // all have the same
		}
	}
	return nil
}

// startControl lets the switches of the app's store follow those of the fleet.
// Those of this instance move there from the store of the other config.
func (a *App) startControl(other *App) {
	s, old := a.store(), other.store()
	if s == nil {
		return
	}
	if old != nil && old != s {
		s.control.takeOver(old.control)
	}
	s.control.start(a.storage)
	s.events.start()
}

// applied is what became of a change that is in force on this instance.
type applied struct {
	// Pending says why the others do not know it yet: it will be written as soon
	// as that is over. Nil if they do.
	Pending error
}

// view returns what is in force.
func (o *operator) view() *control.View {
	c := o.store.control
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.view
}

// status tells how the instance stands with the others.
func (o *operator) status() (instance string, instances int64, down error) {
	c := o.store.control
	if c.redis != nil {
		instance = c.redis.Instance()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return instance, c.instances.Load(), c.down
}

// shedderTarget drops the name of a shedder, of which there is one in a pool.
func shedderTarget(t control.Target) control.Target {
	if (t.Kind == "fleet" || t.Kind == "workers") && t.Limit == t.Kind {
		t.Limit = ""
	}
	return t
}

// setSwitch sets a switch for ttl; Since and Until are filled in. It waits for
// the store until ctx ends at most.
func (o *operator) setSwitch(ctx context.Context, s control.Switch, ttl time.Duration) (applied, error) {
	s.Target = shedderTarget(s.Target)
	if err := o.known(s.Target); err != nil {
		return applied{}, err
	}
	return o.change(ctx, false, control.Change{Set: &s, TTL: ttl})
}

// clearSwitch clears the switch of exactly this target. control.IsNothing tells
// that there is none.
func (o *operator) clearSwitch(ctx context.Context, target control.Target, scope control.Scope) (applied, error) {
	target = shedderTarget(target)
	return o.change(ctx, scope == control.Instance, control.Change{Clear: &target})
}

// clearSwitches clears every switch of a scope.
func (o *operator) clearSwitches(ctx context.Context, scope control.Scope) (applied, error) {
	return o.change(ctx, scope == control.Instance, control.Change{ClearAll: true})
}

// setOverride sets an override for ttl; Since and Until are filled in. The limit
// must be able to have the numbers.
func (o *operator) setOverride(ctx context.Context, n control.Override, ttl time.Duration) (applied, error) {
	n.Since = time.Now()
	n.Until = n.Since.Add(min(max(ttl, control.MinTTL), control.MaxTTL)) // change has the last word
	if err := n.Validate(); err != nil {
		return applied{}, err
	}
	l, err := o.limit(n.Target)
	if err != nil {
		return applied{}, err
	}
	if _, err := overridden(l, &n); err != nil {
		return applied{}, err
	}
	return o.change(ctx, false, control.Change{Override: &n, TTL: ttl})
}

// clearOverride clears the override of an identity in one limit.
// control.IsNothing tells that there is none.
func (o *operator) clearOverride(ctx context.Context, target control.Target, id limiters.Identity) (applied, error) {
	return o.change(ctx, false, control.Change{Drop: &control.Dropped{Target: target, Identity: id.String()}})
}

func (o *operator) change(ctx context.Context, local bool, c control.Change) (applied, error) {
	pending, err := o.store.control.change(ctx, local, c)
	return applied{pending}, err
}

// identityOf returns the identity that requests with these values of a key source
// have: ("api_key", key), ("client_ip", address), or a text with placeholders and
// the value of each.
func (o *operator) identityOf(source string, values ...string) (limiters.Identity, error) {
	sources, err := parseSources([]string{source})
	if err != nil {
		return limiters.Identity{}, err
	}
	if sources[0].word == sourceClientIP && len(values) == 1 {
		addr, err := parseClientAddr(values[0])
		if err != nil {
			return limiters.Identity{}, err
		}
		values = []string{addr.String()}
	}
	if want := max(1, len(sources[0].placeholders)); len(values) != want || slices.Contains(values, "") {
		return limiters.Identity{}, fmt.Errorf("key source '%s' takes %d values, none of them empty", source, want)
	}
	return o.app.hasher.identity(sources[0].word, values...), nil
}

// parseClientAddr reads what requests from an address are counted under: the
// address, and of IPv6 the network, of 64 bits unless it is written with another
// number of them, as ipv6_prefix may have.
func parseClientAddr(text string) (netip.Addr, error) {
	if network, err := netip.ParsePrefix(text); err == nil {
		if network.Addr().Is4() && network.Bits() != 32 {
			return netip.Addr{}, fmt.Errorf("'%s' is a network; each IPv4 address is counted for itself", text)
		}
		return network.Masked().Addr(), nil
	}
	addr, err := netip.ParseAddr(text)
	if err != nil {
		return addr, fmt.Errorf("'%s' is no client address", text)
	}
	if addr = addr.Unmap(); addr.Is4() {
		return addr, nil
	}
	network, err := addr.Prefix(64)
	return network.Addr(), err
}

// inspected is what is known of an identity and a limit.
type inspected struct {
	limiters.Inspection                   // of the limit in force for the identity
	Numbers             string            // of that limit, in words
	Mode                control.Mode      // that switches demand
	Override            *control.Override // nil: none
}

// inspect returns what the store holds of an identity, by all limits of a pool,
// or of all pools if it has no name. It consumes nothing.
//
// With an error, which is why the store does not answer, it is what this instance
// decides by alone meanwhile, or nil where it does not.
func (o *operator) inspect(ctx context.Context, pool string, id limiters.Identity) ([]inspected, error) {
	numbers, err := o.limits(pool)
	if err != nil {
		return nil, err
	}
	inForce := o.store.control.inForce()
	all := make([]inspected, len(numbers))
	limits := make([]*limiters.Limit, len(numbers))
	for i, n := range numbers {
		limits[i] = inForce.numbers(n, id).limit
		all[i].Numbers = numbersOf(limits[i])
		all[i].Mode = inForce.mode(n.limit.Pool, n.limit.Kind.String(), n.limit.Name)
		if inForce == nil {
			continue
		}
		for _, v := range inForce.overrides[id] {
			if v.is(n.limit) {
				all[i].Override = &v.Override
			}
		}
	}
	inspections, err := o.store.Inspect(ctx, id, limits)
	if err != nil {
		memory := o.store.local.made()
		if memory == nil {
			return nil, err
		}
		n := o.store.sharers()
		shares := make([]*limiters.Limit, len(numbers))
		for i := range numbers {
			shares[i] = inForce.numbers(numbers[i], id).share(n)
		}
		inspections, _ = memory.Inspect(ctx, id, shares) // never fails
		for i := range all {
			if n > 1 {
				all[i].Numbers = fmt.Sprintf("1/%d of %s", n, all[i].Numbers)
			}
		}
	}
	for i := range inspections {
		all[i].Inspection = inspections[i]
	}
	return all, err
}

// errLocalReset is returned for a reset of what this instance decides by alone, which
// the store knows nothing of.
var errLocalReset = errors.New("what this instance decides by alone meanwhile is full, but nothing else")

// reset fills the buckets of an identity up, by all limits of a pool or of all
// pools, and with leases frees its concurrency slots, too. Slots of requests that
// still run are taken again when their leases are renewed. What this instance
// decides by alone while the store fails is filled up, too: if it fails now, no more
// than that, and the error is errLocalReset.
func (o *operator) reset(ctx context.Context, pool string, id limiters.Identity, leases bool, reason, actor string) (applied, error) {
	numbers, err := o.limits(pool)
	if err != nil {
		return applied{}, err
	}
	var limits []*limiters.Limit
	for _, n := range numbers {
		if n.limit.Kind == limiters.Rate || leases {
			limits = append(limits, n.limit)
		}
	}
	local := o.store.local.reset(id, limits)
	err = o.store.Reset(ctx, id, limits)
	if err != nil && !local {
		return applied{}, err
	}
	o.store.control.logger.Info("identity reset", zap.String("pool", cmp.Or(pool, "*")), zap.Stringer("identity", id),
		zap.Bool("leases", leases), zap.String("reason", reason), zap.String("actor", actor), zap.NamedError("not_in_the_store", err))
	if err != nil {
		return applied{}, fmt.Errorf("%w: %w", errLocalReset, err)
	}
	return o.change(ctx, false, control.Change{Reset: id.String()})
}

// limits returns the limits of a pool, or of all, in their order.
func (o *operator) limits(name string) (numbers []*limitNumbers, err error) {
	known := false
	for _, p := range allPools() {
		if name != "" && name != p.name {
			continue
		}
		known = true
		numbers = append(numbers, p.numbers()...)
	}
	if !known {
		return nil, unknown("pool", name, poolNames())
	}
	return numbers, nil
}

// limit returns the limit of a target that names one.
func (o *operator) limit(t control.Target) (*limiters.Limit, error) {
	numbers, err := o.limits(t.Pool)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, n := range numbers {
		if n.limit.Kind.String() == t.Kind {
			if names = append(names, n.limit.Name); n.limit.Name == t.Limit {
				return n.limit, nil
			}
		}
	}
	return nil, unknown(t.Kind+" limit", t.Limit, names)
}

// known returns an error if a target stands for nothing that this instance has: a
// name that is mistyped in an incident must not go unnoticed.
func (o *operator) known(t control.Target) error {
	var names []string
	for _, p := range allPools() {
		for _, key := range p.targets() {
			if t.Covers(p.name, key.Kind, key.Limit) {
				return nil
			}
			names = append(names, key.String())
		}
	}
	return unknown("target", t.String(), names)
}

func unknown(what, name string, names []string) error {
	if len(names) == 0 {
		return fmt.Errorf("there is no %s '%s'; there are none at all", what, name)
	}
	const most = 20
	list := strings.Join(names[:min(len(names), most)], ", ")
	if len(names) > most {
		list += ", …"
	}
	return fmt.Errorf("there is no %s '%s'; there are %s", what, name, list)
}

// allPools returns the pools, by name.
func allPools() []*pool {
	var all []*pool
	pools.Range(func(_, value any) bool {
		all = append(all, value.(*pool))
		return true
	})
	slices.SortFunc(all, func(a, b *pool) int { return cmp.Compare(a.name, b.name) })
	return all
}

func poolNames() []string {
	all := allPools()
	names := make([]string, len(all))
	for i, p := range all {
		names[i] = p.name
	}
	return names
}

// numbers returns the limits of the running config, rate before concurrency.
func (p *pool) numbers() (numbers []*limitNumbers) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, l := range p.limits {
		n := l.current.Load()
		if n != nil && slices.ContainsFunc(p.shown, func(g limitGauge) bool { return g.name == key.name && g.kind == key.kind.String() }) {
			numbers = append(numbers, n)
		}
	}
	slices.SortFunc(numbers, func(a, b *limitNumbers) int {
		return cmp.Or(cmp.Compare(a.limit.Kind, b.limit.Kind), cmp.Compare(a.limit.Name, b.limit.Name))
	})
	return numbers
}

// targets returns all that switches may be about in the pool.
func (p *pool) targets() (targets []control.Target) {
	for _, n := range p.numbers() {
		targets = append(targets, control.Target{Pool: p.name, Kind: n.limit.Kind.String(), Limit: n.limit.Name})
	}
	if modes := p.shedders.Load(); modes != nil {
		if modes.fleet != nil {
			targets = append(targets, control.Target{Pool: p.name, Kind: "fleet"})
		}
		if modes.workers != nil {
			targets = append(targets, control.Target{Pool: p.name, Kind: "workers"})
		}
	}
	return targets
}
