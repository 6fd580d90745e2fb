// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// epoch is when tests begin whose time is made up.
var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// patience is a Timeout for tests that are not about it: machines that test are busy.
const patience = 30 * time.Second

// id returns an identity that reads well.
func id(name string) (id Identity) {
	copy(id[:], name)
	return id
}

func rate(t testing.TB, name string, requests int64, period time.Duration, capacity, cost int64) *Limit {
	t.Helper()
	l, err := NewRate("pool", name, requests, period, capacity, cost)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func concurrency(t testing.TB, name string, capacity int64, length time.Duration) *Limit {
	t.Helper()
	l, err := NewConcurrency("pool", name, capacity, length)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// ask asks about enforced limits.
func ask(who string, limits ...*Limit) []Ask {
	a := Ask{Identity: id(who)}
	for _, l := range limits {
		a.Checks = append(a.Checks, Check{Limit: l})
	}
	return []Ask{a}
}

// brief is a Result as tests write it: "allowed 4 next 1s", "denied 0 next 1s
// wait 2s". What is zero is left out, but for what is left.
func (r Result) brief() string {
	s := fmt.Sprintf("%v %d", r.Outcome, r.Remaining)
	if r.NextToken != 0 {
		s += fmt.Sprintf(" next %v", r.NextToken)
	}
	if r.RetryAfter != 0 {
		s += fmt.Sprintf(" wait %v", r.RetryAfter)
	}
	return s
}

func briefly(results []Result) string {
	var all []string
	for _, r := range results {
		all = append(all, r.brief())
	}
	return strings.Join(all, "; ")
}

// redisAt returns the options of a store on a server, which waits with patience.
func redisAt(addr string) RedisOptions {
	return RedisOptions{Universal: redis.UniversalOptions{Addrs: []string{addr}}, Timeout: patience}
}

// startRedis returns a store with its background work, which is closed when the
// test ends.
func startRedis(t testing.TB, o RedisOptions) *Redis {
	t.Helper()
	r := NewRedis(o)
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// handRedis returns a store whose background work is left to the test.
func handRedis(t testing.TB, o RedisOptions) *Redis {
	t.Helper()
	r := newRedis(o)
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// stage is a store on a clock that a test sets.
type stage interface {
	// admit decides at a time after epoch.
	admit(at time.Duration, asks []Ask) Admission
	// release gives back, and Redis has done it on return.
	release(at time.Duration, adm Admission)
}

// stages are the two stores on such clocks.
func stages(t *testing.T) map[string]stage {
	fake := redistest.StartFakeTime(t)
	return map[string]stage{
		"redis":  &redisStage{t, handRedis(t, redisAt(fake.Addr)), fake},
		"memory": &memoryStage{newMemory(0)},
	}
}

type redisStage struct {
	t    *testing.T
	r    *Redis
	fake *redistest.FakeServer
}

func (s *redisStage) admit(at time.Duration, asks []Ask) Admission {
	s.t.Helper()
	s.fake.SetTime(epoch.Add(at))
	adm, err := s.r.Admit(s.t.Context(), asks)
	if err != nil {
		s.t.Fatalf("admit: %v", err)
	}
	s.flush()
	return adm
}

func (s *redisStage) release(at time.Duration, adm Admission) {
	s.t.Helper()
	s.fake.SetTime(epoch.Add(at))
	s.r.Release(adm)
	s.flush()
}

func (s *redisStage) flush() {
	s.t.Helper()
	if err := s.r.flush(time.Now().Add(patience), true); err != nil {
		s.t.Fatalf("flush: %v", err)
	}
}

type memoryStage struct{ m *Memory }

func (s *memoryStage) admit(at time.Duration, asks []Ask) Admission {
	return s.m.admitAt(epoch.Add(at).UnixMicro(), asks)
}

func (s *memoryStage) release(_ time.Duration, adm Admission) { s.m.Release(adm) }

// eventually waits for what happens in the background.
func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not happen within %v", what, patience)
		}
	}
}

// leasesOf counts the leases of an identity that a server stores.
func leasesOf(t testing.TB, s *redistest.Server, who string, l *Limit) int64 {
	t.Helper()
	n, err := s.Client().ZCard(t.Context(), l.stateKey(id(who)).redis(DefaultKeyPrefix)).Result()
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// within checks that something takes no longer than a limit. A busy machine may
// pause at any moment, so one of a few tries must do; a bug fails them all.
func within(t testing.TB, limit time.Duration, what string, do func()) {
	t.Helper()
	least := patience
	for range 5 {
		start := time.Now()
		do()
		if least = min(least, time.Since(start)); least <= limit {
			return
		}
	}
	t.Errorf("%s took %v, want at most %v", what, least, limit)
}

// member is a lease as it stands in Redis.
func (r *Redis) member(l *lease) string {
	r.render(l)
	return l.name
}

// calls are ready to be sent, one for each identity, about the same limits.
func (r *Redis) calls(now time.Time, checks []Check, identities ...Identity) []*admitCall {
	calls := make([]*admitCall, len(identities))
	for i, who := range identities {
		calls[i] = new(admitCall)
		r.prepare(calls[i], now, Ask{who, checks})
	}
	return calls
}

// compose makes one command of calls, all of which are to be decided by a deadline.
func compose(t testing.TB, deadline int64, calls ...*admitCall) (args []any) {
	a := new(admitCommand)
	for _, c := range calls {
		c.deadline = deadline
		a.add(c)
	}
	for _, arg := range a.compose(t.Context(), nil) {
		switch arg := arg.(type) {
		case *string:
			args = append(args, *arg)
		case *int:
			args = append(args, *arg)
		case *int64:
			args = append(args, *arg)
		default:
			args = append(args, arg)
		}
	}
	return args
}
