// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// A script that somebody kills is one failed call, and nothing that it could have
// taken is taken.
func TestReason_ScriptKilled(t *testing.T) {
	srv := redistest.Start(t, "--busy-reply-threshold", "1")
	rdb := redis.NewClient(&redis.Options{Addr: srv.Addr, Protocol: 2, ReadTimeout: -1, MaxRetries: -1})
	defer rdb.Close()
	killed := make(chan error)
	go func() { killed <- rdb.Eval(t.Context(), "while true do end", nil).Err() }()
	eventually(t, "SCRIPT KILL", func() bool { return srv.Client().ScriptKill(t.Context()).Err() == nil })
	if err := <-killed; Reason(err) != "busy" || nodeFailed(err) || mayHaveRun(err) {
		t.Errorf("got %v (%s), node failed: %v, may have run: %v; want busy and neither", err, Reason(err), nodeFailed(err), mayHaveRun(err))
	}
}

// A password that is required all of a sudden is met by new connections.
func TestRedis_PasswordRequired(t *testing.T) {
	srv := redistest.Start(t)
	proxy := redistest.StartProxy(t, srv.Addr)
	o := redisAt(proxy.Addr)
	o.Timeout = 200 * ms
	r := startRedis(t, o)
	l := rate(t, "rate", 1, time.Hour, 1000, 1)
	first := works(t, r, ask("a", l))
	if err := srv.Client().ConfigSet(t.Context(), "requirepass", "new").Err(); err != nil {
		t.Fatal(err)
	}
	proxy.CloseAll()
	auth := false
	eventually(t, "an open breaker", func() bool {
		_, err := r.Admit(t.Context(), ask("a", l))
		auth = auth || Reason(err) == "auth"
		return Reason(err) == "breaker_open"
	})
	if !auth {
		t.Error("no call failed for want of a password")
	}
	admin := redis.NewClient(&redis.Options{Addr: srv.Addr, Protocol: 2, Password: "new"})
	defer admin.Close()
	if err := admin.ConfigSet(t.Context(), "requirepass", "").Err(); err != nil {
		t.Fatal(err)
	}
	if adm := works(t, r, ask("a", l)); adm.Results[0].Remaining >= first.Results[0].Remaining {
		t.Errorf("got %v, want fewer tokens than before", briefly(adm.Results))
	}
}

// A server that evicts keys gives their users one burst more, and leases back
// with their next renewal. No call fails.
func TestRedis_KeysAreEvicted(t *testing.T) {
	srv := redistest.Start(t, "--maxmemory-policy", "allkeys-lru")
	r := handRedis(t, redisAt(srv.Addr))
	bucket, slots := rate(t, "rate", 1, time.Hour, 5, 1), concurrency(t, "ten", 10, time.Hour)
	admit := func(l *Limit) Admission {
		t.Helper()
		adm, err := r.Admit(t.Context(), ask("a", l))
		if err != nil {
			t.Fatal(err)
		}
		return adm
	}
	held := admit(slots)
	drain := func() (n int) {
		for admit(bucket).Allowed {
			n++
		}
		return n
	}
	rdb := srv.Client()
	for i := range 3 {
		if n := drain(); n != 5 {
			t.Errorf("round %d: %d requests pass, want a burst of 5", i, n)
		}
		if err := rdb.ConfigSet(t.Context(), "maxmemory", "1").Err(); err != nil { // nothing fits
			t.Fatal(err)
		}
		eventually(t, "eviction", func() bool {
			_ = rdb.Set(t.Context(), "x", "", 0).Err() // which makes it look
			return rdb.Exists(t.Context(), bucket.stateKey(id("a")).redis(DefaultKeyPrefix)).Val() == 0
		})
		if err := rdb.ConfigSet(t.Context(), "maxmemory", "0").Err(); err != nil {
			t.Fatal(err)
		}
		held.leases[0].renewAt = time.Now()
		if err := r.renew(); err != nil {
			t.Fatal(err)
		}
		if n := leasesOf(t, srv, "a", slots); n != 1 {
			t.Errorf("round %d: %d leases after a renewal, want 1", i, n)
		}
	}
	r.Release(held)
}

// A name that is found again, also elsewhere, is one that works again.
func TestRedis_NameComesBack(t *testing.T) {
	servers := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
	var at atomic.Int32 // whom the name stands for; 2: nobody
	o := redisAt("redis.internal:6379")
	o.Timeout = 200 * ms
	o.Universal.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if n := int(at.Load()); n < len(servers) {
			return new(net.Dialer).DialContext(ctx, network, servers[n].Addr)
		}
		host, _, _ := net.SplitHostPort(addr)
		return nil, &net.OpError{Op: "dial", Net: network, Err: &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}}
	}
	at.Store(2)
	r := startRedis(t, o)
	l := rate(t, "rate", 1, time.Hour, 1000, 1)
	if _, err := r.Admit(t.Context(), ask("a", l)); Reason(err) != "connection" {
		t.Errorf("got %v (%s), want the reason connection", err, Reason(err))
	}
	open(t, r, ask("a", l))
	at.Store(0)
	works(t, r, ask("a", l))
	servers[0].Kill()
	open(t, r, ask("a", l))
	at.Store(1)
	works(t, r, ask("a", l))
	if n := servers[1].Client().DBSize(t.Context()).Val(); n == 0 {
		t.Error("nothing is on the server that the name stands for now")
	}
}

// The breaker that the old master has opened does not keep requests from the new
// one.
func TestSentinel_BreakerAfterFailover(t *testing.T) {
	t.Parallel()
	s := redistest.StartSentinel(t)
	o := RedisOptions{Timeout: 200 * ms, Universal: redis.UniversalOptions{Addrs: []string{s.Addr}, MasterName: s.MasterName}}
	r := startRedis(t, o)
	l := rate(t, "rate", 1, time.Hour, 1000, 1)
	works(t, r, ask("a", l))
	s.Master.Kill()
	open(t, r, ask("a", l))
	s.Failover()
	chosen := time.Now()
	works(t, r, ask("a", l))
	t.Logf("an answer %v after the failover", time.Since(chosen))
	want := []NodeStatus{{Node: s.MasterName}}
	eventually(t, "a closed breaker", func() bool { return slices.Equal(r.Nodes(), want) })
	if n := s.Master.Client().Exists(t.Context(), l.stateKey(id("a")).redis(DefaultKeyPrefix)).Val(); n != 1 {
		t.Error("the new master has not been asked")
	}
}

// A node of a Cluster that is no more is forgotten, and probed no longer, while its
// slots are served by another one.
func TestCluster_BreakerAfterFailover(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 3, 1)
	o := clusterAt(c)
	o.Timeout = 200 * ms
	type change struct {
		node string
		open bool
	}
	changes := make(chan change, 1000)
	o.OnBreaker = func(node string, open bool, _ error) { changes <- change{node, open} }
	r := startRedis(t, o)
	l := rate(t, "rate", 1, time.Hour, 1000, 1)
	who, other := oneOn(c, c.Masters[2]), oneOn(c, c.Masters[1])
	works(t, r, ask(who, l))
	works(t, r, ask(other, l))
	old, next := c.Masters[2], c.Replicas[2]
	replicate(t, old, who)
	old.Kill()
	open(t, r, ask(who, l))
	works(t, r, ask(other, l)) // its own node goes on
	if err := next.Client().Do(t.Context(), "CLUSTER", "FAILOVER", "TAKEOVER").Err(); err != nil {
		t.Fatal(err)
	}
	chosen := time.Now()
	adm := works(t, r, ask(who, l))
	t.Logf("an answer %v after the failover", time.Since(chosen))
	if n := adm.Results[0].Remaining; n > 998 {
		t.Errorf("%d tokens are left, want what the old master had, and one less", n)
	}
	eventually(t, "the old node forgotten", func() bool {
		return !slices.ContainsFunc(r.Nodes(), func(n NodeStatus) bool { return n.Node == old.Addr })
	})
	eventually(t, "word of it", func() bool {
		select {
		case c := <-changes:
			return c == change{old.Addr, false}
		default:
			return false
		}
	})
}

// While a slot moves, a script with a key on each side is refused by both. That
// opens no breaker, and is over with the move.
func TestCluster_SlotHalfMoved(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 3, 0)
	o := clusterAt(c)
	o.OnBreaker = func(string, bool, error) { t.Error("the breaker opened") }
	r := handRedis(t, o)
	bucket, slots := rate(t, "rate", 1, time.Hour, 10, 1), concurrency(t, "ten", 10, time.Hour)
	who := oneOn(c, c.Masters[0])
	held, err := r.Admit(t.Context(), ask(who, bucket, slots))
	if err != nil {
		t.Fatal(err)
	}
	finish := migrate(t, c.Masters[0], c.Masters[1], who, bucket)
	for range 20 {
		adm, err := r.Admit(t.Context(), ask(who, bucket, slots))
		if !adm.Allowed || len(adm.leases) > 0 || Reason(err) != "cluster" || !redis.HasErrorPrefix(err, "TRYAGAIN") {
			t.Fatalf("got %v, %v (%s); want it to pass and TRYAGAIN", adm, err, Reason(err))
		}
	}
	if adm, err := r.Admit(t.Context(), ask(who, bucket)); err != nil || adm.Results[0].Remaining != 8 {
		t.Errorf("the bucket alone, which has moved: got %v, %v, want 8 tokens left", briefly(adm.Results), err)
	}
	r.Release(held)
	if err := r.flush(time.Now().Add(patience), true); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	finish()
	adm := works(t, r, ask(who, bucket, slots))
	if adm.Results[0].Remaining != 7 || adm.Results[1].Remaining != 9 {
		t.Errorf("when it has moved: got %v, want 7 tokens and 9 slots left", briefly(adm.Results))
	}
	r.Release(adm)
}
