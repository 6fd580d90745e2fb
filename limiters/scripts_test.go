// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"regexp"
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
	r := handRedis(t, redisAt(redistest.Start(t).Addr))
	argv, bucket, slot := names(t, lua.Admit, "ARGV"), names(t, lua.Admit, "bucket"), names(t, lua.Admit, "slot")
	reply, answer := names(t, lua.Admit, "reply"), names(t, lua.Admit, "answer")
	second := rate(t, "second", 5, time.Second, 7, 2)
	day := rate(t, "day", 9, 24*time.Hour, 9, 1)
	two := concurrency(t, "two", 2, 10*time.Second)

	for _, leases := range []int{0, 1, 3} {
		for range leases { // which admit.lua will release on its way
			r.Release(Admission{leases: []*lease{{key: two.stateKey(id("a")), id: r.nextID.Add(1), length: two.Lease}}})
		}
		c := r.admitCall(time.Now(), Ask{id("a"), []Check{{second, false}, {day, true}, {two, true}}})
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		r.run(ctx, &c.scriptCall)
		if c.err != nil {
			t.Fatal(c.err)
		}

		if got, want := c.args[argKeys], 3; got != want {
			t.Errorf("keys: got %v, want %v", got, want)
		}
		rest := c.args[argFirstKey+3:]
		top := named(argv, &rest)
		delete(top, "deadline")
		got := []map[string]any{top, named(bucket, &rest), named(bucket, &rest), named(slot, &rest)}
		want := []map[string]any{
			{"buckets": 2, "id": r.leaseName(c.id)},
			{"refill": int64(5), "capacity": int64(7e6), "cost": int64(2e6), "tick": int64(1), "dark": 0},
			{"refill": int64(9), "capacity": int64(9 * 86400e3), "cost": int64(86400e3), "tick": int64(1000), "dark": 1},
			{"capacity": int64(2), "lease": int64(10e6), "dark": 1, "ended": leases},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("arguments (-header +sent):\n%s", diff)
		}
		if len(rest) != leases {
			t.Errorf("%d arguments are left, want the %d leases that have ended", len(rest), leases)
		}
		if got, want := len(c.reply), len(reply)+3*len(answer); got != want {
			t.Errorf("reply has %d integers, want %d", got, want)
		}
		r.acknowledge(&c)
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
	if diff := cmp.Diff([]any{r.member(leases[0]), r.member(leases[1])}, rest); diff != "" {
		t.Errorf("leases (-want +sent):\n%s", diff)
	}
	if got, want := len(c.reply), len(names(t, lua.Renew, "reply")); got != want {
		t.Errorf("reply has %d integers, want %d", got, want)
	}
}

// A script that starts at its deadline or later writes nothing and returns the
// time alone.
func TestScripts_LateOnesWriteNothing(t *testing.T) {
	fake := redistest.StartFakeTime(t)
	r := handRedis(t, redisAt(fake.Addr))
	two := concurrency(t, "two", 2, 10*time.Second)
	admit := r.admitCall(time.Now(), Ask{id("a"), []Check{{rate(t, "rate", 5, time.Second, 5, 1), false}, {two, false}}}).scriptCall
	renew := r.renewCall(renewalKey{two.stateKey(id("a")), two.Lease}, []*lease{{id: 1, length: two.Lease}})
	rdb := fake.Client()
	for name, c := range map[string]scriptCall{"admit": admit, "renew": renew} {
		for _, row := range []struct {
			deadline time.Duration
			items    int // of the reply
		}{
			{-time.Hour, 1}, {-time.Microsecond, 1}, {0, 1},
			{time.Microsecond, map[string]int{"admit": 5, "renew": 2}[name]},
		} {
			c.args[argCommand], c.args[argScript] = "eval", c.script.source
			c.args[argFirstKey+c.keys] = epoch.Add(row.deadline).UnixMicro()
			got, err := rdb.Do(t.Context(), c.args...).Int64Slice()
			if err != nil || len(got) != row.items || got[0] != epoch.UnixMicro() {
				t.Errorf("%s with a deadline %v from now: got %v, %v, want %d items, the first %d", name, row.deadline, got, err, row.items, epoch.UnixMicro())
			}
			if n := rdb.DBSize(t.Context()).Val(); n > 0 && row.items == 1 {
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
