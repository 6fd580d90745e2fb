// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// slack is what scheduling may add to a bound. It hides no bug: what is bounded
// would otherwise take a second at least.
const slack = 500 * ms

// Replies that are lost cost one token each, as nothing is sent twice, and no
// slot.
func TestRedis_ConnectionCutAfterTheScriptRan(t *testing.T) {
	srv := redistest.Start(t)
	proxy := redistest.StartProxy(t, srv.Addr)
	r := handRedis(t, redisAt(proxy.Addr))
	bucket, slots := rate(t, "rate", 1, time.Hour, 10, 1), concurrency(t, "ten", 10, time.Hour)
	adm, err := r.Admit(t.Context(), ask("a", bucket, slots))
	if err != nil || !adm.Allowed {
		t.Fatal(adm, err)
	}
	for i := range 3 {
		proxy.CutReplies(1)
		adm, err := r.Admit(t.Context(), ask("a", bucket, slots))
		if Reason(err) != "connection" || !adm.Allowed || adm.Results[0] != (Result{}) || len(adm.leases) > 0 {
			t.Fatalf("got %v, %v (%s), want a broken connection and the request to pass", adm, err, Reason(err))
		}
		if got, want := leasesOf(t, srv, "a", slots), int64(i+2); got != want {
			t.Fatalf("leases: got %d, want %d: the script ran", got, want)
		}
		// The next one takes one more lease, and releases that of the last.
		adm, err = r.Admit(t.Context(), ask("a", bucket, slots))
		if err != nil || adm.Results[0].Remaining != int64(7-2*i) || adm.Results[1].Remaining != int64(8-i) {
			t.Errorf("got %v, %v, want %d of 10 tokens and %d of 10 slots left", adm, err, 7-2*i, 8-i)
		}
	}
	proxy.CutReplies(1)
	if _, err = r.Admit(t.Context(), ask("a", slots)); Reason(err) != "connection" {
		t.Fatal(err)
	}
	if err := r.flush(time.Now().Add(patience), true); err != nil {
		t.Fatal(err)
	}
	if got, want := leasesOf(t, srv, "a", slots), int64(4); got != want {
		t.Errorf("leases after a flush: got %d, want %d", got, want)
	}
}

// A Cluster client of go-redis sends a command again when its connection broke,
// unless it is one of ours.
func TestScriptCmd_IsNeverSentTwice(t *testing.T) {
	srv := redistest.Start(t)
	proxy := redistest.StartProxy(t, srv.Addr)
	cluster := redis.NewClusterClient(&redis.ClusterOptions{
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
			return []redis.ClusterSlot{{Start: 0, End: 16383, Nodes: []redis.ClusterNode{{Addr: proxy.Addr}}}}, nil
		},
		DisableRoutingPolicies: true,
	})
	defer cluster.Close()
	for _, row := range []struct {
		command func(args ...any) redis.Cmder
		counter string
		want    int64
	}{
		{func(args ...any) redis.Cmder { return redis.NewIntSliceCmd(t.Context(), args...) }, "{a}plain", 2},
		{func(args ...any) redis.Cmder {
			return &scriptCmd{IntSliceCmd: redis.NewIntSliceCmd(t.Context(), args...)}
		}, "{a}script", 1},
	} {
		if err := cluster.Ping(t.Context()).Err(); err != nil { // a connection
			t.Fatal(err)
		}
		proxy.CutReplies(1)
		_ = cluster.Process(t.Context(), row.command("eval", "return {redis.call('INCR', KEYS[1])}", 1, row.counter))
		if got, _ := srv.Client().Get(t.Context(), row.counter).Int64(); got != row.want {
			t.Errorf("%s ran %d times, want %d", row.counter, got, row.want)
		}
	}
}

// A server that hangs costs a request its timeout and no more, and what it finds
// when it goes on is too late to take anything.
func TestRedis_ServerHangsAndGoesOn(t *testing.T) {
	srv := redistest.Start(t)
	o := redisAt(srv.Addr)
	o.Timeout = 200 * ms
	r := handRedis(t, o)
	bucket, slots := rate(t, "rate", 1, time.Hour, 10, 1), concurrency(t, "ten", 10, time.Hour)
	asks := append(ask("a", bucket, slots), ask("b", bucket, slots)...)
	var before Admission
	eventually(t, "an answer within the timeout", func() (ok bool) {
		var err error
		before, err = r.Admit(t.Context(), asks)
		return err == nil
	})
	calls := srv.Commands(t)["evalsha"]

	srv.Stop()
	within(t, o.Timeout+slack, "an admission", func() {
		adm, err := r.Admit(t.Context(), asks)
		if Reason(err) != "timeout" || !adm.Allowed {
			t.Errorf("got %v, %v (%s), want a timeout and the request to pass", adm, err, Reason(err))
		}
	})
	srv.Cont()

	eventually(t, "what was sent meanwhile", func() bool { return srv.Commands(t)["evalsha"] > calls })
	rdb := srv.Client()
	for _, who := range []string{"a", "b"} {
		if got, want := leasesOf(t, srv, who, slots), 10-before.Results[1].Remaining; got != want {
			t.Errorf("%s: got %d leases, want %d as before", who, got, want)
		}
		units := rdb.Get(t.Context(), bucket.stateKey(id(who)).redis(DefaultKeyPrefix)).Val()
		var level, at int64
		if _, err := fmt.Sscan(units, &level, &at); err != nil || level/bucket.periodTicks != before.Results[0].Remaining {
			t.Errorf("%s: %d tokens left, want %d as before", who, level/bucket.periodTicks, before.Results[0].Remaining)
		}
	}
}

func TestRedis_NoAnswerAtAll(t *testing.T) {
	srv := redistest.Start(t)
	proxy := redistest.StartProxy(t, srv.Addr)
	proxy.Blackhole(true)
	o := redisAt(proxy.Addr)
	o.Timeout = 50 * ms
	r := startRedis(t, o)
	l := concurrency(t, "one", 1, time.Hour)
	within(t, o.Timeout+slack, "an admission", func() {
		adm, err := r.Admit(t.Context(), ask("a", l))
		if Reason(err) != "timeout" || !adm.Allowed {
			t.Errorf("got %v, %v (%s), want a timeout and the request to pass", adm.Allowed, err, Reason(err))
		}
	})
	within(t, backgroundTimeout+slack, "making and closing a store", func() {
		r := NewRedis(o)
		r.Release(Admission{leases: []*lease{{key: l.stateKey(id("a")), id: 1, length: l.Lease}}})
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
}

// While Redis is away releases are tried again at each tick, however many come.
func TestRedis_ReleasesWithoutHurryWhileItIsAway(t *testing.T) {
	srv := redistest.Start(t)
	srv.Kill()
	o := redisAt(srv.Addr)
	var rounds atomic.Int64
	o.Observe = func(string, time.Duration, error) { rounds.Add(1) }
	r := startRedis(t, o)
	l := concurrency(t, "two", 2, time.Hour)
	start := time.Now()
	for n := range uint64(200) {
		r.Release(Admission{leases: []*lease{{key: l.stateKey(id("a")), id: n, length: l.Lease}}})
		time.Sleep(ms) // so that each would be a round of its own
	}
	if got, most := rounds.Load(), int64(time.Since(start)/renewEvery)+2; got > most {
		t.Errorf("%d rounds within %v, want at most %d", got, time.Since(start), most)
	}
}

// Redis is not there at the start, comes, goes and comes again.
func TestRedis_ComesAndGoes(t *testing.T) {
	srv := redistest.Start(t)
	srv.Kill()
	r := startRedis(t, redisAt(srv.Addr))
	bucket, slots := rate(t, "rate", 1, time.Hour, 10, 1), concurrency(t, "ten", 10, MinLease)
	down := func() {
		t.Helper()
		start := time.Now()
		adm, err := r.Admit(t.Context(), ask("a", bucket, slots))
		if reason := Reason(err); reason != "connection" && reason != "breaker_open" || !adm.Allowed || len(adm.leases) > 0 {
			t.Errorf("got %v, %v (%s), want no connection and the request to pass", adm, err, reason)
		}
		if took := time.Since(start); took > patience/2 {
			t.Errorf("took %v, want an answer at once", took)
		}
	}
	up := func() (adm Admission) {
		t.Helper()
		eventually(t, "an answer", func() bool {
			var err error
			adm, err = r.Admit(t.Context(), ask("a", bucket, slots))
			return err == nil
		})
		return adm
	}
	for range 30 { // more than go-redis has connections
		down()
	}
	srv.Restart()
	one, two := up(), up()
	if !one.Allowed || !two.Allowed {
		t.Fatal("denied")
	}
	srv.Kill()
	down()
	srv.Restart()
	// Its data is gone. The leases of requests that go on are put back.
	eventually(t, "two renewals", func() bool { return leasesOf(t, srv, "a", slots) == 2 })
	r.Release(one)
	eventually(t, "a release", func() bool { return leasesOf(t, srv, "a", slots) == 1 })
	r.Release(two)
	eventually(t, "a release", func() bool { return leasesOf(t, srv, "a", slots) == 0 })
}

// A server that was never heard of, or whose clock was set, is asked once more.
func TestRedis_ServerClockIsSet(t *testing.T) {
	fake := redistest.StartFakeTime(t)
	r := handRedis(t, redisAt(fake.Addr))
	l := rate(t, "rate", 1, time.Minute, 100, 1)
	fake.Client().Do(t.Context(), "SCRIPT", "LOAD", admitScript.source)
	rows := []struct {
		at    time.Duration
		calls int64
	}{
		{0, 2}, {0, 1}, {time.Hour, 2}, {time.Hour, 1}, {0, 1}, {0, 1}, {-24 * time.Hour, 1}, {31 * time.Second, 2},
	}
	for i, row := range rows {
		fake.SetTime(epoch.Add(row.at))
		before := fake.Commands(t)["evalsha"]
		if adm, err := r.Admit(t.Context(), ask("a", l)); err != nil || !adm.Allowed {
			t.Fatalf("row %d: %v, %v", i, adm, err)
		}
		if got := fake.Commands(t)["evalsha"] - before; got != row.calls {
			t.Errorf("row %d: got %d calls, want %d", i, got, row.calls)
		}
	}
}

// What others have put at our keys.
func TestRedis_ForeignValues(t *testing.T) {
	srv := redistest.Start(t)
	rdb := srv.Client()
	r := handRedis(t, redisAt(srv.Addr))
	first, second := rate(t, "first", 1, time.Hour, 5, 1), rate(t, "second", 1, time.Hour, 5, 1)
	two := concurrency(t, "two", 2, time.Hour)
	key := func(l *Limit) string { return l.stateKey(id("a")).redis(DefaultKeyPrefix) }

	for _, l := range []*Limit{first, second, two} {
		rdb.FlushAll(t.Context())
		rdb.RPush(t.Context(), key(l), "foreign")
		adm, err := r.Admit(t.Context(), ask("a", first, second, two))
		if Reason(err) != "wrong_type" || !adm.Allowed || len(adm.leases) > 0 {
			t.Errorf("a list at %s: got %v, %v, want the request to pass", l.Name, adm, err)
		}
		if got := rdb.Keys(t.Context(), "*").Val(); len(got) != 1 {
			t.Errorf("a list at %s: got the keys %v, want it alone", l.Name, got)
		}
	}
	// A release there has nothing to release.
	r.Release(Admission{leases: []*lease{{key: two.stateKey(id("a")), id: 1, length: two.Lease}}})
	if err := r.flush(time.Now().Add(patience), true); err != nil || r.leases.nEnded > 0 {
		t.Errorf("flush: got %v, %d left", err, r.leases.nEnded)
	}

	for _, garbage := range []string{"", "x", "5", "-5 1", "1.5 1", "1 2 3", "nan 1", "1 inf", "1e3 1", " 1 1"} {
		rdb.FlushAll(t.Context())
		rdb.Set(t.Context(), key(first), garbage, 0)
		adm, err := r.Admit(t.Context(), ask("a", first))
		if err != nil || adm.Results[0].Remaining != 4 {
			t.Errorf("%q: got %v, %v, want a bucket that was full", garbage, adm, err)
		}
		if ttl := rdb.PTTL(t.Context(), key(first)).Val(); ttl <= 0 {
			t.Errorf("%q: kept for %v", garbage, ttl)
		}
	}
	huge := "99999999999999999999999999999999999 1"
	rdb.Set(t.Context(), key(first), huge, 0)
	if adm, err := r.Admit(t.Context(), ask("a", first)); err != nil || adm.Results[0].Remaining != 4 {
		t.Errorf("%q: got %v, %v, want a bucket that was full", huge, adm, err)
	}
}

// A server that may not write takes nothing, and says why.
func TestRedis_ServerRefuses(t *testing.T) {
	srv := redistest.Start(t)
	rdb := srv.Client()
	r := handRedis(t, redisAt(srv.Addr))
	bucket, two := rate(t, "rate", 1, time.Hour, 5, 1), concurrency(t, "two", 2, time.Hour)
	held, err := r.Admit(t.Context(), ask("a", bucket, two))
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		reason   string
		on, off  []any
		releases bool
	}{
		{"oom", []any{"CONFIG", "SET", "maxmemory", "1"}, []any{"CONFIG", "SET", "maxmemory", "0"}, true},
		{"readonly", []any{"REPLICAOF", "127.0.0.1", "1"}, []any{"REPLICAOF", "NO", "ONE"}, false},
	} {
		rdb.Do(t.Context(), row.on...)
		adm, err := r.Admit(t.Context(), ask("b", bucket, two))
		if Reason(err) != row.reason || !adm.Allowed || len(adm.leases) > 0 {
			t.Errorf("got %v, %v, want the reason %s and the request to pass", adm, err, row.reason)
		}
		if err := r.renew(); err != nil {
			t.Error(err)
		}
		r.Release(held)
		if err := r.flush(time.Now().Add(patience), true); (err == nil) != row.releases {
			t.Errorf("%s: flush: got %v", row.reason, err)
		}
		rdb.Do(t.Context(), row.off...)
		if got := rdb.Exists(t.Context(), bucket.stateKey(id("b")).redis(DefaultKeyPrefix), two.stateKey(id("b")).redis(DefaultKeyPrefix)).Val(); got != 0 {
			t.Errorf("%s: it took something", row.reason)
		}
		if held, err = r.Admit(t.Context(), ask("a", bucket, two)); err != nil {
			t.Fatal(err)
		}
	}
}

// A server that may not write, but is asked by one who is denied anyway, has not
// released what it was told to on the way.
func TestRedis_ServerRefusesToRelease(t *testing.T) {
	srv := redistest.Start(t)
	rdb := srv.Client()
	r := handRedis(t, redisAt(srv.Addr))
	bucket, two := rate(t, "rate", 1, time.Hour, 1, 1), concurrency(t, "two", 2, time.Hour)
	held, err := r.Admit(t.Context(), ask("a", bucket, two))
	if err != nil {
		t.Fatal(err)
	}
	rdb.ConfigSet(t.Context(), "min-replicas-to-write", "1")
	r.Release(held)
	if adm, err := r.Admit(t.Context(), ask("a", bucket, two)); Reason(err) != "readonly" || !adm.Allowed {
		t.Errorf("got %v, %v, want the reason readonly and the request to pass", briefly(adm.Results), err)
	}
	rdb.ConfigSet(t.Context(), "min-replicas-to-write", "0")
	if err := r.flush(time.Now().Add(patience), true); err != nil {
		t.Error(err)
	}
	if got := leasesOf(t, srv, "a", two); got != 0 {
		t.Errorf("%d leases are left", got)
	}
}

// A reply that makes no sense is an error. What it took, if anything, is unknown.
func TestRedis_RepliesOfAnotherShape(t *testing.T) {
	r := handRedis(t, redisAt("127.0.0.1:1"))
	bucket, two := rate(t, "rate", 1, time.Hour, 5, 1), concurrency(t, "two", 2, time.Hour)
	for _, reply := range [][]int64{
		{}, {1}, {1, 1}, {1, 1, 0, 1}, {1, 1, 0, 1, 1, 1}, {1, 1, 0, 1, 1, 1, 0, 1, 1},
		{1, 5, 0, 1, 1}, {1, -1, 0, 1, 1}, {1, 1, 0, 3, 1}, {1, 1, -1, 1, 1}, {1, 1, bucket.capacityUnits() + 1, 1, 1},
	} {
		before := r.leases.nEnded
		c := r.calls(time.Now(), ask("a", bucket, two)[0].Checks, id("a"))[0]
		new(admitCommand).add(c)
		c.read(time.Now(), reply, nil)
		r.acknowledge(c)
		adm := Admission{Allowed: true, Results: make([]Result, 0, 2)}
		err := r.conclude(time.Now(), c, &adm)
		if Reason(err) != "shape" || !adm.Allowed || len(adm.leases) > 0 || adm.Results[0] != (Result{}) || adm.Results[1] != (Result{}) {
			t.Errorf("%v: got %v, %v, want the reason shape and the request to pass", reply, adm, err)
		}
		if got := r.leases.nEnded - before; got != 1 {
			t.Errorf("%v: %d leases to release, want the 1 that may have been taken", reply, got)
		}
	}
}

func TestReason(t *testing.T) {
	answer := func(text string) error { return fmt.Errorf("admit: %w", redisError(text)) }
	dial := &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	read := &net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)}
	slow := &net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}
	cases := []struct {
		err        error
		reason     string
		mayHaveRun bool
	}{
		{fmt.Errorf("admit: %w", errShape), "shape", true},
		{fmt.Errorf("admit: %w", errLate), "late", false},
		{fmt.Errorf("%w in renew", errPanic), "panic", true},
		{redis.ErrClosed, "closed", false},
		{redis.ErrPoolTimeout, "timeout", false},
		{context.DeadlineExceeded, "timeout", true},
		{fmt.Errorf("admit: %w", slow), "timeout", true},
		{fmt.Errorf("admit: %w", read), "connection", true},
		{fmt.Errorf("admit: %w", dial), "connection", false},
		{io.EOF, "connection", true},
		{io.ErrUnexpectedEOF, "connection", true},
		{answer("LOADING Redis is loading the dataset in memory"), "loading", false},
		{answer("READONLY You can't write against a read only replica."), "readonly", false},
		{answer("MASTERDOWN Link with MASTER is down"), "readonly", false},
		{answer("OOM command not allowed when used memory > 'maxmemory'."), "oom", false},
		{answer("NOAUTH Authentication required."), "auth", false},
		{answer("ERR Protocol error: unauthenticated multibulk length"), "auth", false},
		{answer("WRONGPASS invalid username-password pair"), "auth", false},
		{answer("NOPERM this user has no permissions"), "auth", false},
		{answer("ERR The user executing the script can't run this command or subcommand script: e45d"), "auth", false},
		{answer("BUSY Redis is busy running a script."), "busy", false},
		{answer("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE."), "busy", false},
		{answer("ERR Error running script (call to f_ab): Script killed by user with SCRIPT KILL."), "busy", false},
		{answer("MISCONF Redis is configured to save RDB snapshots"), "readonly", false},
		{answer("NOREPLICAS Not enough good replicas to write."), "readonly", false},
		{answer("ERR max number of clients reached"), "connection", false},
		{fmt.Errorf("admit: %w: 127.0.0.1:1", errBreakerOpen), "breaker_open", false},
		{answer("TRYAGAIN Multiple keys request during rehashing of slot"), "cluster", false},
		{answer("CLUSTERDOWN The cluster is down"), "cluster", false},
		{answer("MOVED 1 127.0.0.1:7000"), "cluster", false},
		{answer("WRONGTYPE Operation against a key"), "wrong_type", false},
		{answer("NOSCRIPT No matching script."), "other", false},
		{answer("ERR unknown command"), "other", false},
		{errors.New("something else"), "other", true},
	}
	for _, c := range cases {
		if got := Reason(c.err); got != c.reason {
			t.Errorf("Reason(%v): got %s, want %s", c.err, got, c.reason)
		}
		if got := mayHaveRun(c.err); got != c.mayHaveRun {
			t.Errorf("mayHaveRun(%v): got %v, want %v", c.err, got, c.mayHaveRun)
		}
	}
}

// A breaker opens for what is wrong with a node, and not for what one call, one key
// or one caller ran into.
func TestNodeFailed(t *testing.T) {
	cases := map[string]bool{
		"LOADING x": true, "READONLY x": true, "MISCONF x": true, "NOREPLICAS x": true, "OOM x": true,
		"NOAUTH x": true, "WRONGPASS x": true, "NOPERM x": true, "CLUSTERDOWN x": true,
		"BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.": true,
		"ERR Error running script: Script killed by user with SCRIPT KILL.":                      false,
		"WRONGTYPE x": false, "MOVED 1 127.0.0.1:1": false, "ASK 1 127.0.0.1:1": false, "TRYAGAIN x": false,
		"CROSSSLOT x": false, "NOSCRIPT x": false, "ERR x": false,
	}
	for text, want := range cases {
		if got := nodeFailed(redisError(text)); got != want {
			t.Errorf("%s: got %v, want %v", text, got, want)
		}
	}
	for err, want := range map[error]bool{
		context.DeadlineExceeded: true, redis.ErrPoolTimeout: true, io.EOF: true,
		context.Canceled: false, redis.Nil: false, redis.ErrClosed: false,
		errShape: false, errLate: false, errBreakerOpen: false,
	} {
		if got := nodeFailed(err); got != want {
			t.Errorf("%v: got %v, want %v", err, got, want)
		}
	}
}

// redisError is an error that Redis answers with.
type redisError string

func (e redisError) Error() string { return string(e) }
func (redisError) RedisError()     {}
