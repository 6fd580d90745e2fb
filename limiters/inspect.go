// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// maxInspected bounds the leases that an Inspection lists.
const maxInspected = 1000

// Inspection is what a store holds of one identity and limit.
type Inspection struct {
	Limit *Limit

	// Tokens are the whole tokens of a bucket, and Full the time until it is full.
	Tokens int64
	Full   time.Duration

	// NextAllowed is the time until a request would be allowed: exact for a
	// bucket; for a full concurrency limit at most that, because leases end and
	// are renewed at any time.
	NextAllowed time.Duration

	// Live is the number of leases, of which those that end first are listed.
	Live   int64
	Leases []LeaseInfo
}

// LeaseInfo is one concurrency slot that is taken.
type LeaseInfo struct {
	Instance string        // that holds it; empty: this process, on the memory store
	Age      time.Duration // since it was taken, by the store's clock; 0 if not known
	Ends     time.Duration // from now, unless it is renewed
}

// The id of an admission is the time at which it was asked for, in ms by the
// clock of the store as far as it is known, and a counter: so that a lease tells
// its age.
const leaseCounterBits = 22

func leaseID(now time.Time, ahead time.Duration, n uint64) uint64 {
	return uint64(now.Add(ahead).UnixMilli())<<leaseCounterBits | n&(1<<leaseCounterBits-1)
}

func leaseAge(now int64, id uint64) time.Duration {
	age := time.Duration(now-int64(id>>leaseCounterBits)*1000) * time.Microsecond
	if age < 0 || age > 365*24*time.Hour { // of another version, or of other clocks
		return 0
	}
	return age
}

// inspectBucket fills in what a bucket of so many units is like.
func (i *Inspection) inspectBucket(level int64) {
	i.Tokens = level / i.Limit.periodTicks
	i.Full = i.Limit.until(level, i.Limit.capacityUnits())
	i.NextAllowed = i.Limit.until(level, i.Limit.costUnits())
}

// inspectLeases fills in which leases are live, the first to end first.
func (i *Inspection) inspectLeases(live int64, leases []LeaseInfo) {
	slices.SortFunc(leases, func(a, b LeaseInfo) int {
		return cmp.Or(cmp.Compare(a.Ends, b.Ends), cmp.Compare(a.Instance, b.Instance), cmp.Compare(a.Age, b.Age))
	})
	i.Live, i.Leases = live, leases[:min(len(leases), maxInspected)]
	if over := live - i.Limit.Capacity; over >= 0 && over < int64(len(leases)) {
		i.NextAllowed = leases[over].Ends
	}
}

// Inspect implements Store.
func (r *Redis) Inspect(ctx context.Context, id Identity, limits []*Limit) (inspections []Inspection, err error) {
	if len(limits) == 0 {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, backgroundTimeout)
	defer cancel()
	start := time.Now()
	defer func() { r.observe("inspect", time.Since(start), err) }()

	node, err := r.node(ctx, limits[0].stateKey(id).redis(r.prefix)) // of all, by their hash tag
	if err != nil {
		return nil, fmt.Errorf("inspect: %w", err)
	}
	clock := redis.NewTimeCmd(ctx, "time")
	if r.exec(ctx, node, []*command{{Cmder: clock}}); clock.Err() != nil {
		return nil, fmt.Errorf("inspect: %w", clock.Err())
	}
	now := clock.Val().UnixMicro()

	var commands []*command
	for _, l := range limits {
		key := l.stateKey(id).redis(r.prefix)
		if l.Kind == Rate {
			commands = append(commands, &command{Cmder: redis.NewStringCmd(ctx, "get", key)})
			continue
		}
		commands = append(commands,
			&command{Cmder: redis.NewIntCmd(ctx, "zcount", key, now, "+inf")},
			&command{Cmder: redis.NewZSliceCmd(ctx, "zrangebyscore", key, now, "+inf", "withscores", "limit", 0, maxInspected)})
	}
	r.exec(ctx, node, commands)
	for _, l := range limits {
		inspection := Inspection{Limit: l}
		if l.Kind == Rate {
			text, err := commands[0].Cmder.(*redis.StringCmd).Result()
			if err != nil && err != redis.Nil {
				return nil, fmt.Errorf("inspect: %w", err)
			}
			inspection.inspectBucket(l.storedLevel(text, now))
			commands = commands[1:]
		} else {
			live, err := commands[0].Cmder.(*redis.IntCmd).Result()
			members, membersErr := commands[1].Cmder.(*redis.ZSliceCmd).Result()
			if err := cmp.Or(err, membersErr); err != nil {
				return nil, fmt.Errorf("inspect: %w", err)
			}
			leases := make([]LeaseInfo, len(members))
			for i, m := range members {
				leases[i] = parseMember(m, now)
			}
			inspection.inspectLeases(live, leases)
			commands = commands[2:]
		}
		inspections = append(inspections, inspection)
	}
	return inspections, nil
}

var bucketRE = regexp.MustCompile(`^(\d+) (\d+)$`)

// storedLevel reads a bucket as admit.lua does.
func (l *Limit) storedLevel(text string, now int64) int64 {
	m := bucketRE.FindStringSubmatch(text)
	if m == nil {
		return l.capacityUnits()
	}
	level, _ := strconv.ParseInt(m[1], 10, 64)
	at, _ := strconv.ParseInt(m[2], 10, 64)
	return l.refill(level, now/l.tick.Microseconds()-at)
}

// parseMember reads a lease as Redis.member writes it.
func parseMember(m redis.Z, now int64) LeaseInfo {
	name, _ := m.Member.(string)
	info := LeaseInfo{Ends: time.Duration(int64(m.Score)-now) * time.Microsecond}
	parts := strings.Split(name, ":")
	info.Instance = parts[0]
	if len(parts) == 3 {
		if id, err := strconv.ParseUint(parts[1], 36, 64); err == nil {
			info.Age = leaseAge(now, id)
		}
	}
	return info
}

// Reset implements Store.
func (r *Redis) Reset(ctx context.Context, id Identity, limits []*Limit) (err error) {
	if len(limits) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, backgroundTimeout)
	defer cancel()
	start := time.Now()
	defer func() { r.observe("reset", time.Since(start), err) }()
	args := []any{"del"}
	for _, l := range limits {
		args = append(args, l.stateKey(id).redis(r.prefix))
	}
	node, err := r.node(ctx, args[1].(string))
	if err != nil {
		return fmt.Errorf("reset: %w", err)
	}
	del := redis.NewIntCmd(ctx, args...)
	if r.exec(ctx, node, []*command{{Cmder: del}}); del.Err() != nil {
		return fmt.Errorf("reset: %w", del.Err())
	}
	return nil
}

// Inspect implements Store. It never fails.
func (m *Memory) Inspect(_ context.Context, id Identity, limits []*Limit) ([]Inspection, error) {
	return m.inspectAt(m.now(), id, limits), nil
}

func (m *Memory) inspectAt(now int64, id Identity, limits []*Limit) []Inspection {
	shard := m.shard(id)
	shard.mu.Lock()
	defer shard.mu.Unlock()
	inspections := make([]Inspection, 0, len(limits))
	for _, l := range limits {
		inspection, key := Inspection{Limit: l}, l.stateKey(id)
		if l.Kind == Rate {
			level := l.capacityUnits()
			if b, ok := shard.bucket(now, key); ok {
				level = l.refill(b.level, now/l.tick.Microseconds()-b.at)
			}
			inspection.inspectBucket(level)
		} else {
			var leases []LeaseInfo
			if set := shard.leases(now, key); set != nil {
				for _, held := range set.leases {
					if held.end >= now {
						leases = append(leases, LeaseInfo{
							Age:  leaseAge(now, held.id),
							Ends: time.Duration(held.end-now) * time.Microsecond,
						})
					}
				}
			}
			inspection.inspectLeases(int64(len(leases)), leases)
		}
		inspections = append(inspections, inspection)
	}
	return inspections
}

// Reset implements Store. It never fails. Leases stay: each is held by a request
// of this very process that runs, and would be taken again.
func (m *Memory) Reset(_ context.Context, id Identity, limits []*Limit) error {
	shard := m.shard(id)
	shard.mu.Lock()
	defer shard.mu.Unlock()
	for _, l := range limits {
		delete(shard.buckets, l.stateKey(id))
	}
	return nil
}
