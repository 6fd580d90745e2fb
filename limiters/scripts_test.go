// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/lua"
)

// names returns what a script's header says of one of its lists, in order:
// "ARGV[1] deadline", "ARGV[2] buckets" and so on have the names deadline and
// buckets. The numbers must be in order, too.
func names(t *testing.T, source, list string) (names []string) {
	t.Helper()
	header, _, _ := strings.Cut(source, "\nlocal ")
	for i, m := range regexp.MustCompile(`(?m)^--\s+`+list+`\[(\d+)\]\s+(\S+)`).FindAllStringSubmatch(header, -1) {
		if want := strconv.Itoa(i + 1); m[1] != want {
			t.Errorf("%s[%s] stands at place %s", list, m[1], want)
		}
		names = append(names, m[2])
	}
	return names
}

// named pairs the names of a list with as many values from the front of values.
func named(names []string, values *[]any) map[string]any {
	m := map[string]any{}
	for i, name := range names {
		m[name] = (*values)[i]
	}
	*values = (*values)[len(names):]
	return m
}

// The header of admit.lua says what Go sends and what comes back.
func TestAdmitScript_Header(t *testing.T) {
	srv := redistest.Start(t)
	r := handRedis(t, redisAt(srv.Addr))
	argv, bucket, slot := names(t, lua.Admit, "ARGV"), names(t, lua.Admit, "bucket"), names(t, lua.Admit, "slot")
	asks, turn := names(t, lua.Admit, "ask"), names(t, lua.Admit, "turn")
	reply, answer := names(t, lua.Admit, "reply"), names(t, lua.Admit, "answer")
	second := rate(t, "second", 5, time.Second, 7, 2)
	day := rate(t, "day", 9, 24*time.Hour, 9, 1)
	two := concurrency(t, "two", 2, 10*time.Second)
	checks := []Check{{second, false}, {day, true}, {two, true}}

	for _, leases := range []int{0, 1, 3} {
		for range leases { // which admit.lua will release on its way
			r.Release(Admission{leases: []*lease{{key: two.stateKey(id("b")), id: r.nextID.Add(1), length: two.Lease}}})
		}
		calls := r.calls(time.Now(), checks, id("a"), id("b"))
		args := compose(t, maxExact, calls...)
		got, err := srv.Client().Do(t.Context(), append([]any{"eval", lua.Admit}, args[argKeys:]...)...).Int64Slice()
		if err != nil {
			t.Fatal(err)
		}
		if got, want := len(got), len(reply)+2*3*len(answer); got != want {
			t.Errorf("reply has %d integers, want %d", got, want)
		}

		if got, want := args[argKeys], 6; got != want {
			t.Errorf("keys: got %v, want %v", got, want)
		}
		for i, who := range []string{"a", "b"} {
			for j, l := range []*Limit{second, day, two} {
				if got, want := args[argFirstKey+3*i+j], l.stateKey(id(who)).redis(DefaultKeyPrefix); got != want {
					t.Errorf("key %d of %s: got %v, want %v", j, who, got, want)
				}
			}
		}
		rest := args[argFirstKey+6:]
		sent := []map[string]any{named(argv, &rest), named(bucket, &rest), named(bucket, &rest), named(slot, &rest)}
		for range calls {
			sent = append(sent, named(asks, &rest), named(turn, &rest))
		}
		want := []map[string]any{
			{"identities": 2, "buckets": 2},
			{"refill": int64(5), "capacity": int64(7e6), "cost": int64(2e6), "tick": int64(1), "dark": 0},
			{"refill": int64(9), "capacity": int64(9 * 86400e3), "cost": int64(86400e3), "tick": int64(1000), "dark": 1},
			{"capacity": int64(2), "lease": int64(10e6), "dark": 1},
			{"deadline": int64(maxExact)},
			{"member": r.member(&lease{id: calls[0].id, length: two.Lease}), "ended": 0},
			{"deadline": int64(maxExact)},
			{"member": r.member(&lease{id: calls[1].id, length: two.Lease}), "ended": leases},
		}
		if diff := cmp.Diff(want, sent); diff != "" {
			t.Errorf("arguments (-header +sent):\n%s", diff)
		}
		if len(rest) != leases {
			t.Errorf("%d arguments are left, want the %d leases that have ended", len(rest), leases)
		}
		for _, c := range calls {
			c.read(time.Now(), got, nil)
			r.acknowledge(c)
		}
	}
}

// What is wrong with one identity is nothing to the others of its command: one that
// comes too late, or has a key of another type, is told so and nothing is written.
func TestAdmitScript_EachForItself(t *testing.T) {
	srv := redistest.Start(t)
	r := handRedis(t, redisAt(srv.Addr))
	rdb := srv.Client()
	bucket, two := rate(t, "rate", 1, time.Hour, 5, 1), concurrency(t, "two", 2, 10*time.Second)
	checks := []Check{{Limit: bucket}, {Limit: two}}
	key := func(who string, l *Limit) string { return l.stateKey(id(who)).redis(DefaultKeyPrefix) }
	rdb.LPush(t.Context(), key("list", bucket), "x")
	rdb.Set(t.Context(), key("text", two), "x", 0)
	r.Release(Admission{leases: []*lease{{key: two.stateKey(id("text")), id: r.nextID.Add(1), length: two.Lease}}})

	who := []string{"first", "list", "late", "text", "last"}
	calls := r.calls(time.Now(), checks, id(who[0]), id(who[1]), id(who[2]), id(who[3]), id(who[4]))
	args := compose(t, maxExact, calls...)
	for i, arg := range args {
		if arg == calls[2].members[0] {
			args[i-1] = 1 // the deadline
		}
	}
	reply, err := rdb.Do(t.Context(), append([]any{"eval", lua.Admit}, args[argKeys:]...)...).Int64Slice()
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []error{nil, errWrongType, errLate, errWrongType, nil} {
		c := calls[i]
		if c.read(time.Now(), reply, nil); c.err != want {
			t.Errorf("%s: got %v, want %v", who[i], c.err, want)
		}
		if got, want := rdb.Exists(t.Context(), key(who[i], bucket)).Val(), map[bool]int64{true: 1}[want == nil || who[i] == "list"]; got != want {
			t.Errorf("%s: %d buckets, want %d", who[i], got, want)
		}
		if got, want := rdb.Exists(t.Context(), key(who[i], two)).Val(), map[bool]int64{true: 1}[want == nil || who[i] == "text"]; got != want {
			t.Errorf("%s: %d sets of leases, want %d", who[i], got, want)
		}
	}
	if got := Reason(errWrongType); got != "wrong_type" || mayHaveRun(errWrongType) {
		t.Errorf("the reason: got %s, may have run: %v", got, mayHaveRun(errWrongType))
	}
}

// Calls about one identity in one command tell of each lease once that it has ended,
// and the script releases it for all of them, even if the one that tells is too late.
func TestAdmitScript_ToldOnce(t *testing.T) {
	srv := redistest.Start(t)
	r := handRedis(t, redisAt(srv.Addr))
	rdb := srv.Client()
	checks := []Check{{Limit: concurrency(t, "four", 4, 10*time.Second)}}
	var held []Admission
	for range 4 {
		adm, err := r.Admit(t.Context(), []Ask{{id("a"), checks}})
		if err != nil || !adm.Allowed {
			t.Fatal(adm, err)
		}
		held = append(held, adm)
	}
	for _, adm := range held[:3] {
		r.Release(adm)
	}
	calls := r.calls(time.Now(), checks, id("a"), id("a"), id("a"))
	args := compose(t, maxExact, calls...)
	told := 0
	for i, arg := range args {
		if arg == calls[0].members[0] {
			args[i-1] = 1 // the deadline
		}
		for _, adm := range held[:3] {
			if arg == adm.leases[0].name {
				told++
			}
		}
	}
	if sum := len(calls[0].ended) + len(calls[1].ended) + len(calls[2].ended); told != 3 || sum <= 3 {
		t.Errorf("%d leases are told of, want each of 3 once; the calls have %d", told, sum)
	}
	reply, err := rdb.Do(t.Context(), append([]any{"eval", lua.Admit}, args[argKeys:]...)...).Int64Slice()
	if want := []int64{replyLate, 0, replyAllowed, 2, replyAllowed, 3}; err != nil || !slices.Equal(reply[1:], want) {
		t.Errorf("got %v, %v, want %v", reply[1:], err, want)
	}
}

// The header of renew.lua says what Go sends and what comes back.
func TestRenewScript_Header(t *testing.T) {
	r := handRedis(t, redisAt(redistest.Start(t).Addr))
	key := renewalKey{concurrency(t, "two", 2, 10*time.Second).stateKey(id("a")), 10 * time.Second}
	leases := []*lease{{key: key.stateKey, id: 1, length: key.length}, {key: key.stateKey, id: 2, length: key.length}}
	c := r.renewCall(key, leases)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r.run(ctx, &c)
	if c.err != nil {
		t.Fatal(c.err)
	}
	if got, want := c.args[argKeys], 1; got != want {
		t.Errorf("keys: got %v, want %v", got, want)
	}
	rest := c.args[argFirstKey+1:]
	got := named(names(t, lua.Renew, "ARGV"), &rest)
	delete(got, "deadline")
	if diff := cmp.Diff(map[string]any{"lease": int64(10e6)}, got); diff != "" {
		t.Errorf("arguments (-header +sent):\n%s", diff)
	}
	if diff := cmp.Diff([]any{&leases[0].name, &leases[1].name}, rest); diff != "" {
		t.Errorf("leases (-want +sent):\n%s", diff)
	}
	if got, want := len(c.reply), len(names(t, lua.Renew, "reply")); got != want {
		t.Errorf("reply has %d integers, want %d", got, want)
	}
}

// A script that starts at its deadline or later writes nothing.
func TestScripts_LateOnesWriteNothing(t *testing.T) {
	fake := redistest.StartFakeTime(t)
	r := handRedis(t, redisAt(fake.Addr))
	two := concurrency(t, "two", 2, 10*time.Second)
	admit := r.calls(time.Now(), []Check{{rate(t, "rate", 5, time.Second, 5, 1), false}, {two, false}}, id("a"))[0]
	renew := r.renewCall(renewalKey{two.stateKey(id("a")), two.Lease}, []*lease{{id: 1, length: two.Lease}})
	rdb := fake.Client()
	now := epoch.UnixMicro()
	for name, c := range map[string]struct {
		args      func(deadline int64) []any
		late, not []int64
	}{
		"admit": {
			func(deadline int64) []any {
				return append([]any{"eval", lua.Admit}, compose(t, deadline, admit)[argKeys:]...)
			},
			[]int64{now, replyLate, 0, replyLate, 0}, []int64{now, replyAllowed, 4_000_000, replyAllowed, 1},
		},
		"renew": {
			func(deadline int64) []any {
				renew.args[argCommand], renew.args[argScript], renew.args[argFirstKey+1] = "eval", lua.Renew, deadline
				return renew.args
			},
			[]int64{now}, []int64{now, 1},
		},
	} {
		for _, row := range []struct {
			deadline time.Duration
			want     []int64
		}{
			{-time.Hour, c.late}, {-time.Microsecond, c.late}, {0, c.late}, {time.Microsecond, c.not},
		} {
			got, err := rdb.Do(t.Context(), c.args(epoch.Add(row.deadline).UnixMicro())...).Int64Slice()
			if err != nil || !slices.Equal(got, row.want) {
				t.Errorf("%s with a deadline %v from now: got %v, %v, want %v", name, row.deadline, got, err, row.want)
			}
			if n := rdb.DBSize(t.Context()).Val(); n > 0 && row.deadline <= 0 {
				t.Errorf("%s with a deadline %v from now: it wrote %d keys", name, row.deadline, n)
			}
		}
		rdb.FlushAll(t.Context())
	}
}

// What a script is given and what it stores is exact beyond the 14 digits that
// Lua gives a number by itself.
func TestScripts_LargestNumbers(t *testing.T) {
	fake := redistest.StartFakeTime(t)
	r := handRedis(t, redisAt(fake.Addr))
	largest := rate(t, "rate", 1, time.Minute, maxExact/60_000_000, 1)
	if _, err := NewRate("pool", "rate", 1, time.Minute, maxExact/60_000_000+1, 1); err == nil {
		t.Fatal("a larger burst passes")
	}
	adm, err := r.Admit(t.Context(), ask("a", largest))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := adm.Results[0].brief(), "allowed 150119986 next 1m0s"; got != want {
		t.Errorf("admit: got %q, want %q", got, want)
	}
	got := fake.Client().Get(t.Context(), largest.stateKey(id("a")).redis(DefaultKeyPrefix)).Val()
	if want := "9007199160000000 1767225600000000"; got != want {
		t.Errorf("stored: got %q, want %q", got, want)
	}
}
