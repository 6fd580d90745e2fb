// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/lua"
)

func beat(t *testing.T, r *Redis, call ControlCall) ControlReply {
	t.Helper()
	reply, err := r.Control(t.Context(), call)
	if err != nil {
		t.Fatalf("control: %v", err)
	}
	return reply
}

// The header of control.lua says what Go sends and what comes back.
func TestControlScript_Header(t *testing.T) {
	call := newControlArgs("p:", "instance", ControlCall{Leave: true, Secret: "s", Known: "k", Stored: "x", ID: "i", State: "{}"})
	keys := 0
	for _, key := range []string{"p:{control}", "p:{control}:instances", "p:{control}:secrets"} {
		if got := call[argFirstKey+keys]; got != key {
			t.Errorf("KEYS[%d]: got %v, want %v", keys+1, got, key)
		}
		if !strings.Contains(lua.Control, "<prefix>"+strings.TrimPrefix(key, "p:")+" ") {
			t.Errorf("the header does not tell of %s", key)
		}
		keys++
	}
	if got := call[argKeys]; got != keys {
		t.Errorf("keys: got %v, want %v", got, keys)
	}
	rest := call[argFirstKey+keys:]
	got := named(names(t, lua.Control, "ARGV"), &rest)
	want := map[string]any{"deadline": nil, "instance": "instance", "leave": 1, "secret": "s", "known": "k", "stored": "x", "id": "i", "state": "{}"}
	if diff := cmp.Diff(want, got); diff != "" || len(rest) > 0 {
		t.Errorf("arguments (-header +sent), %d more:\n%s", len(rest), diff)
	}
	if got := len(names(t, lua.Control, "reply")); got != 6 {
		t.Errorf("the header tells of %d items of the reply, want 6", got)
	}
}

// Instances count each other, and drop who was not heard of for eight beats.
func TestControl_Instances(t *testing.T) {
	fake := redistest.StartFakeTime(t)
	a, b := handRedis(t, redisAt(fake.Addr)), handRedis(t, redisAt(fake.Addr))
	rows := []struct {
		after     time.Duration
		who       *Redis
		call      ControlCall
		instances int64
		secrets   int64
	}{
		{0, a, ControlCall{Secret: "1"}, 1, 1},
		{0, b, ControlCall{Secret: "1"}, 2, 1},
		{time.Second, a, ControlCall{Secret: "1"}, 2, 1},
		{1999 * time.Millisecond, a, ControlCall{Secret: "1"}, 2, 1},
		{2 * time.Second, a, ControlCall{Secret: "1"}, 1, 1}, // eight beats of 250 ms
		{3 * time.Second, b, ControlCall{Secret: "2"}, 2, 2},
		{4 * time.Second, a, ControlCall{Secret: "1"}, 2, 2},
		{4 * time.Second, b, ControlCall{Leave: true}, 1, 2},
		{5 * time.Second, a, ControlCall{Secret: "1"}, 1, 1},
		{4 * time.Second, a, ControlCall{Secret: "1"}, 1, 1}, // the clock was set back
	}
	for _, row := range rows {
		fake.SetTime(epoch.Add(row.after))
		reply := beat(t, row.who, row.call)
		if reply.Instances != row.instances || reply.Secrets != row.secrets || reply.Beat != 250*time.Millisecond {
			t.Errorf("after %v: got %d instances, %d secrets, a beat of %v; want %d, %d, 250ms", row.after, reply.Instances, reply.Secrets, reply.Beat, row.instances, row.secrets)
		}
		if want := epoch.Add(row.after); reply.Now.Sub(want).Abs() > time.Second {
			t.Errorf("after %v: got the time %v, want %v", row.after, reply.Now, want)
		}
	}
}

// As the instances get more, each speaks less often.
func TestControl_Beat(t *testing.T) {
	srv := redistest.Start(t)
	rdb := srv.Client()
	r := handRedis(t, redisAt(srv.Addr))
	key := "stripe_ratelimit:{control}:instances"
	cases := []struct {
		instances int64
		beat      time.Duration
	}{
		{1, 250 * time.Millisecond}, {62, 250 * time.Millisecond}, {63, 252 * time.Millisecond}, {1000, 4 * time.Second},
	}
	for _, c := range cases {
		rdb.Del(t.Context(), key)
		for n := range c.instances - 1 {
			rdb.ZAdd(t.Context(), key, redis.Z{Score: math.MaxInt32 * 1e6, Member: n})
		}
		beat(t, r, ControlCall{})
		got := beat(t, r, ControlCall{})
		if got.Beat != c.beat || got.Instances != c.instances {
			t.Errorf("%d instances: got %d and a beat of %v, want %v", c.instances, got.Instances, got.Beat, c.beat)
		}
		ends := time.UnixMicro(int64(rdb.ZScore(t.Context(), key, r.Instance()).Val()))
		if left := ends.Sub(got.Now); left != 8*c.beat {
			t.Errorf("%d instances: one is dropped after %v, want eight beats of %v", c.instances, left, c.beat)
		}
	}
}

// A state is told to those who do not know it, and replaced by those who have
// seen it.
func TestControl_State(t *testing.T) {
	srv := redistest.Start(t)
	r := handRedis(t, redisAt(srv.Addr))
	rows := []struct {
		call      ControlCall
		id, state string
	}{
		{ControlCall{}, "", ""},
		{ControlCall{Stored: "0 z", ID: "1 a", State: "A"}, "", ""}, // seen there, but it is not
		{ControlCall{ID: "1 a", State: "A"}, "1 a", ""},
		{ControlCall{}, "1 a", "A"},
		{ControlCall{Known: "1 a"}, "1 a", ""},
		{ControlCall{ID: "1 b", State: "B"}, "1 a", "A"}, // somebody was faster
		{ControlCall{Known: "1 a", Stored: "1 a", ID: "2 b", State: "B"}, "2 b", ""},
		{ControlCall{Known: "1 a"}, "2 b", "B"},
		{ControlCall{Leave: true, Known: "-"}, "2 b", "B"},
	}
	for i, row := range rows {
		reply := beat(t, r, row.call)
		if reply.ID != row.id || reply.State != row.state {
			t.Errorf("call %d: got %q with %q, want %q with %q", i, reply.ID, reply.State, row.id, row.state)
		}
	}
	ctx := t.Context()
	if ttl := srv.Client().PTTL(ctx, "stripe_ratelimit:{control}").Val(); ttl < 399*24*time.Hour {
		t.Errorf("the state is kept for %v, want 400 days", ttl)
	}
	if err := srv.Client().ScriptFlush(ctx).Err(); err != nil {
		t.Fatal(err)
	}
	beat(t, r, ControlCall{})
	if err := srv.Client().Set(ctx, "stripe_ratelimit:{control}", "x", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Control(ctx, ControlCall{}); err == nil || Reason(err) != "wrong_type" {
		t.Errorf("a key of another type: got %v, want an error about it", err)
	}
}

// A call that is delayed writes nothing.
func TestControlScript_Late(t *testing.T) {
	srv := redistest.Start(t)
	args := newControlArgs(DefaultKeyPrefix, "late", ControlCall{ID: "1 a", State: "A"})
	args[argCommand], args[argScript], args[argFirstKey+3] = "eval", lua.Control, 1
	reply, err := srv.Client().Do(t.Context(), args...).Slice()
	if err != nil || len(reply) != 1 {
		t.Errorf("got %v, %v; want the time alone", reply, err)
	}
	if n := srv.Client().DBSize(t.Context()).Val(); n != 0 {
		t.Errorf("wrote %d keys, want none", n)
	}
}

func TestControl_Cluster(t *testing.T) {
	cluster := redistest.StartCluster(t, 3, 0)
	o := RedisOptions{Timeout: patience}
	o.Universal.Addrs, o.Universal.IsClusterMode = cluster.Addrs(), true
	r := handRedis(t, o)
	beat(t, r, ControlCall{ID: "1 a", State: "A"})
	if reply := beat(t, r, ControlCall{}); reply.State != "A" || reply.Instances != 1 {
		t.Errorf("got %+v, want the state A and one instance", reply)
	}
}

// Inspecting tells what both stores hold, and takes nothing. Resetting fills
// buckets up.
func TestInspect(t *testing.T) {
	rps := rate(t, "rps", 2, time.Second, 10, 4)
	day := rate(t, "day", 24, 24*time.Hour, 24, 1)
	slots := concurrency(t, "slots", 2, 10*time.Second)
	limits := []*Limit{rps, day, slots}
	who, ctx := id("a"), t.Context()
	// brief is an Inspection as this test writes it. The age of a lease in Redis
	// is by our clock, which is another one here.
	brief := func(all []Inspection) (texts []string) {
		for _, i := range all {
			text := fmt.Sprintf("%s: %d tokens, full in %v, allowed in %v, %d live", i.Limit.Name, i.Tokens, i.Full, i.NextAllowed, i.Live)
			for _, l := range i.Leases {
				text += fmt.Sprintf(", one ends in %v", l.Ends)
			}
			texts = append(texts, text)
		}
		return texts
	}
	for name, s := range stages(t) {
		t.Run(name, func(t *testing.T) {
			inspect := func(after time.Duration) []Inspection {
				switch s := s.(type) {
				case *memoryStage:
					return s.m.inspectAt(epoch.Add(after).UnixMicro(), who, limits)
				case *redisStage:
					s.fake.SetTime(epoch.Add(after))
					all, err := s.r.Inspect(ctx, who, limits)
					if err != nil {
						t.Fatal(err)
					}
					return all
				}
				panic("unreachable")
			}
			check := func(what string, after time.Duration, want ...string) {
				t.Helper()
				if diff := cmp.Diff(want, brief(inspect(after))); diff != "" {
					t.Errorf("%s (-want +got):\n%s", what, diff)
				}
			}
			check("at first", 0,
				"rps: 10 tokens, full in 0s, allowed in 0s, 0 live",
				"day: 24 tokens, full in 0s, allowed in 0s, 0 live",
				"slots: 0 tokens, full in 0s, allowed in 0s, 0 live")
			first := s.admit(0, ask("a", limits...))
			second := s.admit(time.Second, ask("a", limits...))
			for range 2 {
				check("used twice", time.Second,
					"rps: 4 tokens, full in 3s, allowed in 0s, 0 live",
					"day: 22 tokens, full in 1h59m59s, allowed in 0s, 0 live",
					"slots: 0 tokens, full in 0s, allowed in 9s, 2 live, one ends in 9s, one ends in 10s")
			}
			s.release(time.Second, first)
			s.admit(time.Second, ask("a", rps))
			check("the bucket is empty, a slot free", 1500*time.Millisecond,
				"rps: 1 tokens, full in 4.5s, allowed in 1.5s, 0 live",
				"day: 22 tokens, full in 1h59m58.5s, allowed in 0s, 0 live",
				"slots: 0 tokens, full in 0s, allowed in 0s, 1 live, one ends in 9.5s")
			s.release(time.Second, second)
			if r, ok := s.(*redisStage); ok {
				if err := r.r.Reset(ctx, who, limits); err != nil {
					t.Fatal(err)
				}
			} else {
				_ = s.(*memoryStage).m.Reset(ctx, who, limits)
			}
			check("reset", 2*time.Second,
				"rps: 10 tokens, full in 0s, allowed in 0s, 0 live",
				"day: 24 tokens, full in 0s, allowed in 0s, 0 live",
				"slots: 0 tokens, full in 0s, allowed in 0s, 0 live")
		})
	}
}

// A lease tells which instance holds it, and since when.
func TestInspect_Leases(t *testing.T) {
	now := time.Now()
	ahead := 3 * time.Second
	server := now.Add(ahead)
	cases := []struct {
		name string
		want LeaseInfo
	}{
		{(&Redis{instance: "me"}).member(&lease{id: leaseID(now.Add(-time.Minute), ahead, 7), length: 10 * time.Second}),
			LeaseInfo{"me", time.Minute, 5 * time.Second}},
		{"them:1z:10000000", LeaseInfo{"them", 0, 5 * time.Second}}, // of a version without ages
		{"odd", LeaseInfo{"odd", 0, 5 * time.Second}},
	}
	for _, c := range cases {
		got := parseMember(redis.Z{Member: c.name, Score: float64(server.Add(5 * time.Second).UnixMicro())}, server.UnixMicro())
		got.Age = got.Age.Round(10 * time.Millisecond) // it is in whole ms
		if got != c.want {
			t.Errorf("%s: got %+v, want %+v", c.name, got, c.want)
		}
	}
}

// What is remembered of one identity is forgotten, and not what is remembered of
// others.
func TestDenials_ForgetIdentity(t *testing.T) {
	limit := rate(t, "r", 1, time.Hour, 1, 1)
	denied := Admission{Results: []Result{{Outcome: Denied, RetryAfter: time.Hour}}}
	d := NewDenials()
	d.Learn(epoch, ask("a", limit), denied)
	d.Learn(epoch, ask("b", limit), denied)
	d.ForgetIdentity(epoch.Add(time.Second), id("a"))
	if _, ok := d.Denied(epoch.Add(time.Second), ask("a", limit)); ok {
		t.Error("a is denied from memory, though it was forgotten")
	}
	if _, ok := d.Denied(epoch.Add(time.Second), ask("b", limit)); !ok {
		t.Error("b is not denied from memory")
	}
	d.Learn(epoch, ask("a", limit), denied) // an answer to an earlier question
	if _, ok := d.Denied(epoch.Add(time.Second), ask("a", limit)); ok {
		t.Error("a is denied by an answer to a question before it was forgotten")
	}
}
