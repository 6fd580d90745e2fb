// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

var (
	diffSeed  = flag.Uint64("diff.seed", 0, "seed of the differential tests; 0 draws one")
	diffSteps = flag.Int("diff.steps", 2000, "steps of each differential test")
)

// The scripts and the memory model, fed with the same random operations and the
// same clock, agree in every answer and in everything that is stored.
func TestDifferential_ClockFromTheTest(t *testing.T) {
	fake := redistest.StartFakeTime(t)
	now := epoch
	d := newDifferential(t, fake.Server)
	d.operations = append(d.operations,
		func() string { // time passes, a little or much
			now = now.Add(d.someTime())
			fake.SetTime(now)
			return "SetTime " + now.String()
		},
		func() string { // the clock is set
			now = now.Add(d.someTime() - d.someTime())
			fake.SetTime(now)
			return "SetTime " + now.String()
		},
		func() string { // just to where something happens to a lease
			if len(d.held) == 0 {
				return "SetTime not"
			}
			l := d.held[d.rng.IntN(len(d.held))]
			set := d.shard.leases(now.UnixMicro(), l.key)
			if !set.has(d.model[l]) {
				return "SetTime not"
			}
			us := d.model[l].end + d.rng.Int64N(3) - 1
			if d.rng.IntN(2) == 0 {
				us -= l.length.Microseconds()
			}
			now = time.UnixMicro(us)
			fake.SetTime(now)
			return "SetTime " + now.String()
		},
	)
	// Both clocks are the same, so the model knows the time without being told.
	d.now = func(int64) int64 { return now.UnixMicro() }
	d.exact = true
	d.limits = d.manyLimits()
	d.run()
}

// The same on the real clock, which moves between and within commands. Numbers
// stay as they are: when they change, it shows whether a bucket that is full has
// expired, which happens at a moment that no script tells.
func TestDifferential_RealClock(t *testing.T) {
	d := newDifferential(t, redistest.Start(t))
	d.now = func(replied int64) int64 { return replied }
	d.limits = []*Limit{
		rate(t, "a", 700, time.Second, 3, 1),
		rate(t, "b", 30_000, time.Second, 10, 7),
		rate(t, "c", 9_000, 70*time.Second, 2, 1),
		concurrency(t, "a", 2, time.Second),
		concurrency(t, "b", 5, time.Minute),
	}
	d.run()
}

type differential struct {
	t     *testing.T
	rng   *rand.Rand
	redis *Redis
	rdb   *redis.Client

	now   func(replied int64) int64 // us
	exact bool                      // whether expiry is known to the millisecond

	// The model, and the leases that it does not release before Redis does.
	shard   *memoryShard
	pending map[*lease]bool
	model   map[*lease]*lease // the model's of each

	identities []Identity
	limits     []*Limit
	operations []func() string
	held       []*lease
	over       []*lease // released, perhaps long ago
}

func newDifferential(t *testing.T, s *redistest.Server) *differential {
	seed := *diffSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-diff.seed=%d", seed)
	d := &differential{
		t:          t,
		rng:        rand.New(rand.NewPCG(seed, 0)),
		redis:      handRedis(t, redisAt(s.Addr)),
		rdb:        s.Client(),
		shard:      newMemoryShard(1 << 20),
		pending:    map[*lease]bool{},
		model:      map[*lease]*lease{},
		identities: []Identity{id("ann"), id("bob"), id("cy")},
	}
	d.operations = []func() string{d.admit, d.admit, d.admit, d.admit, d.admit, d.release, d.release, d.flush, d.renew, d.forgetScripts}
	return d
}

// manyLimits has, for each name, several numbers, as after reloads.
func (d *differential) manyLimits() (limits []*Limit) {
	for range 5 {
		for _, name := range []string{"a", "b"} {
			for _, period := range []time.Duration{time.Millisecond, time.Second, 7 * time.Second, time.Minute, time.Hour, 24 * time.Hour} {
				capacity := 1 + d.rng.Int64N(6)
				perSecond := 1 + d.rng.Int64N(20)
				n := max(1, perSecond*int64(period/time.Millisecond)/1000)
				if d.rng.IntN(4) == 0 { // as many units as are exact
					capacity = maxExact / rate(d.t, name, n, period, 1, 1).periodTicks
				}
				limits = append(limits, rate(d.t, name, n, period, capacity, 1+d.rng.Int64N(capacity)))
			}
			length := time.Duration(1+d.rng.IntN(20)) * time.Second
			limits = append(limits, concurrency(d.t, name, 1+d.rng.Int64N(4), length))
		}
	}
	return limits
}

// someTime is nothing, microseconds, or up to hours.
func (d *differential) someTime() time.Duration {
	scale := []time.Duration{1, 10, time.Millisecond, time.Second, 10 * time.Second, time.Minute, 3 * time.Hour}
	return (time.Duration(d.rng.Int64N(int64(scale[d.rng.IntN(len(scale))])))).Round(time.Microsecond)
}

func (d *differential) run() {
	var log []string
	for range *diffSteps {
		log = append(log, d.operations[d.rng.IntN(len(d.operations))]())
		d.compare()
		if d.t.Failed() {
			d.t.Fatalf("after\n\t%s", strings.Join(log[max(0, len(log)-15):], "\n\t"))
		}
	}
}

func (d *differential) admit() string {
	var checks []Check
	used := map[stateID]bool{}
	for range 1 + d.rng.IntN(4) {
		l := d.limits[d.rng.IntN(len(d.limits))]
		if !used[l.state] {
			used[l.state] = true
			checks = append(checks, Check{l, d.rng.IntN(3) == 0})
		}
	}
	slices.SortStableFunc(checks, func(x, y Check) int { return int(x.Limit.Kind) - int(y.Limit.Kind) })
	var who []Identity // all in one command, and some more than once
	for range 1 + d.rng.IntN(4) {
		who = append(who, d.identities[d.rng.IntN(len(d.identities))])
	}

	local := time.Now()
	calls := d.redis.calls(local, checks, who...)
	released := make([][]*lease, len(calls))
	for i, c := range calls {
		released[i] = c.ended
	}
	d.redis.ask(local.Add(patience), calls)
	var log []string
	for i, c := range calls {
		log = append(log, d.admitted(local, c, released[i]))
	}
	return strings.Join(log, "; ")
}

// admitted compares what a call was answered with what the model says.
func (d *differential) admitted(local time.Time, call *admitCall, released []*lease) string {
	a := call.ask
	d.redis.acknowledge(call)
	got := Admission{Allowed: true, Results: make([]Result, 0, len(a.Checks))}
	if err := d.redis.conclude(local, call, &got); err != nil {
		d.t.Fatal(err)
	}
	replied := call.command.Val()[0]
	now := d.now(replied)
	if d.exact && replied != now {
		d.t.Fatalf("the script's time: got %d, want %d", replied, now)
	}

	for _, l := range released {
		d.shard.release(d.model[l])
		delete(d.pending, l)
	}
	want := Admission{Results: make([]Result, 0, len(a.Checks))}
	want.Allowed = d.shard.admit(now, a, call.id, &want)
	if diff := cmp.Diff(want.Results, got.Results); diff != "" || got.Allowed != want.Allowed || len(got.leases) != len(want.leases) {
		d.t.Errorf("admit: got %v with %d leases, want %v with %d (-want +got):\n%s",
			got.Allowed, len(got.leases), want.Allowed, len(want.leases), diff)
	}
	for i, l := range got.leases[:min(len(got.leases), len(want.leases))] {
		d.model[l] = want.leases[i]
	}
	d.held = append(d.held, got.leases...)
	return fmt.Sprintf("admit %v: %s", describe(a), briefly(got.Results))
}

func describe(a Ask) string {
	var b strings.Builder
	b.WriteString(strings.TrimRight(string(a.Identity[:]), "\x00"))
	for _, c := range a.Checks {
		fmt.Fprintf(&b, " %s", c.Limit.state.name().suffix)
		if c.Dark {
			b.WriteString(" dark")
		}
		fmt.Fprintf(&b, "%v", c.Limit.args)
	}
	return b.String()
}

// release gives back a few leases here; Redis learns of it later.
func (d *differential) release() string {
	if len(d.held) == 0 {
		return "release nothing"
	}
	i := d.rng.IntN(len(d.held))
	l := d.held[i]
	d.held = slices.Delete(d.held, i, i+1)
	d.redis.Release(Admission{leases: []*lease{l}})
	d.pending[l] = true
	d.over = append(d.over, l)
	return fmt.Sprintf("release %d", l.id)
}

func (d *differential) flush() string {
	if err := d.redis.flush(time.Now().Add(patience), true); err != nil {
		d.t.Fatal(err)
	}
	for l := range d.pending {
		d.shard.release(d.model[l])
	}
	clear(d.pending)
	return "flush"
}

// renew renews a few leases of one key, held or released, as a renewal may do
// that overtakes a release.
func (d *differential) renew() string {
	all := append(slices.Clone(d.held), d.over[max(0, len(d.over)-5):]...)
	if len(all) == 0 {
		return "renew nothing"
	}
	first := all[d.rng.IntN(len(all))]
	c := &renewal{scriptCall: d.redis.renewCall(renewalKey{first.key, first.length}, []*lease{first})}
	ctx, cancel := context.WithTimeout(d.t.Context(), patience)
	defer cancel()
	d.redis.run(ctx, &c.scriptCall)
	if c.err != nil {
		d.t.Fatal(c.err)
	}
	d.shard.renew(d.now(c.reply[0]), d.model[first])
	return fmt.Sprintf("renew %d", first.id)
}

func (d *differential) forgetScripts() string {
	if d.rng.IntN(10) > 0 {
		return "nothing"
	}
	if err := d.rdb.ScriptFlush(d.t.Context()).Err(); err != nil {
		d.t.Fatal(err)
	}
	return "SCRIPT FLUSH"
}

// time is the server's, now.
func (d *differential) time() int64 {
	t, err := d.rdb.Time(d.t.Context()).Result()
	if err != nil {
		d.t.Fatal(err)
	}
	return d.now(t.UnixMicro())
}

// compare compares everything that is stored.
func (d *differential) compare() {
	d.t.Helper()
	ctx := d.t.Context()
	now := d.time()
	got, want := map[string]string{}, map[string]string{}
	for _, who := range d.identities {
		keys := map[stateKey]*Limit{}
		for _, l := range d.limits {
			keys[l.stateKey(who)] = l
		}
		pipe := d.rdb.Pipeline()
		gets, sets, ttls := map[stateKey]*redis.StringCmd{}, map[stateKey]*redis.ZSliceCmd{}, map[stateKey]*redis.DurationCmd{}
		for key, l := range keys {
			ttls[key] = pipe.PTTL(ctx, key.redis(DefaultKeyPrefix))
			if l.Kind == Rate {
				gets[key] = pipe.Get(ctx, key.redis(DefaultKeyPrefix))
			} else {
				sets[key] = pipe.ZRangeWithScores(ctx, key.redis(DefaultKeyPrefix), 0, -1)
			}
		}
		_, _ = pipe.Exec(ctx) // reports every GET of a key that is not there
		for key, l := range keys {
			ttl := func(ms int64) string {
				if !d.exact {
					return ""
				}
				return " for " + strconv.FormatInt(ms, 10) + " ms"
			}
			name := key.redis("")
			left := ttls[key].Val().Milliseconds()
			if l.Kind == Concurrency {
				if members := sets[key].Val(); len(members) > 0 {
					got[name] = d.members(members) + ttl(left)
				}
				if set := d.shard.leases(now, key); set != nil && len(set.leases) > 0 {
					want[name] = d.slots(set) + ttl(set.expires-now/1000)
				}
				continue
			}
			stored, err := gets[key].Result()
			b, ok := d.shard.bucket(now, key)
			if !d.exact && ok != (err == nil) {
				continue // it is full, and has expired on one side
			}
			if err == nil {
				got[name] = stored + ttl(left)
			}
			if ok {
				want[name] = fmt.Sprintf("%d %d", b.level, b.at) + ttl(b.expires-now/1000)
			}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		d.t.Errorf("stored (-want +got):\n%s", diff)
	}
}

func (d *differential) members(zs []redis.Z) string {
	ends := map[string]int64{}
	for _, z := range zs {
		ends[z.Member.(string)] = int64(z.Score)
	}
	return inOrder(ends)
}

func (d *differential) slots(set *slots) string {
	ends := map[string]int64{}
	for _, l := range set.leases {
		ends[d.redis.member(l)] = l.end
	}
	return inOrder(ends)
}

func inOrder(ends map[string]int64) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(ends)) {
		fmt.Fprintf(&b, "%s=%d ", name, ends[name])
	}
	return b.String()
}
