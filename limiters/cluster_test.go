// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// clusterRules is what a Cluster must allow a user beside aclRules.
var clusterRules = []string{"+cluster|slots", "+asking"}

// clusterAt returns the options of a store on a Cluster, of which it is told one
// address only, as a user who may do no more than needed.
func clusterAt(c *redistest.Cluster) RedisOptions {
	for _, s := range c.Nodes() {
		s.AddUser("caddy", "secret", append(slices.Clone(aclRules), clusterRules...)...)
	}
	o := redisAt(c.Masters[0].Addr)
	o.Universal.IsClusterMode = true
	o.Universal.Username, o.Universal.Password = "caddy", "secret"
	return o
}

// oneOn returns an identity whose keys a master has.
func oneOn(c *redistest.Cluster, s *redistest.Server) string {
	for i := 0; ; i++ {
		who := fmt.Sprint("who", i)
		if c.MasterOf("{"+id(who).String()+"}") == s {
			return who
		}
	}
}

func TestCluster(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 3, 0)
	r := handRedis(t, clusterAt(c))
	bucket, slots := rate(t, "rate", 1, time.Hour, 10, 1), concurrency(t, "ten", 10, 10*time.Second)
	a, b := oneOn(c, c.Masters[0]), oneOn(c, c.Masters[1])
	node := map[string]*redistest.Server{a: c.Masters[0], b: c.Masters[1]}
	both := append(ask(a, bucket, slots), ask(b, bucket, slots)...)

	admit := func(t *testing.T, asks []Ask, tokens, free int64) Admission {
		t.Helper()
		adm, err := r.Admit(t.Context(), asks)
		if err != nil || !adm.Allowed {
			t.Fatalf("got %v, %v", adm, err)
		}
		for i := 0; i < len(adm.Results); i += 2 {
			if adm.Results[i].Remaining != tokens || adm.Results[i+1].Remaining != free {
				t.Errorf("got %q, want %d tokens and %d slots left", briefly(adm.Results[i:i+2]), tokens, free)
			}
		}
		return adm
	}
	flush := func(t *testing.T) {
		t.Helper()
		if err := r.flush(time.Now().Add(patience), true); err != nil {
			t.Fatal(err)
		}
	}
	leases := func(t *testing.T, want map[string]int64) {
		t.Helper()
		for who, want := range want {
			if got := leasesOf(t, node[who], who, slots); got != want {
				t.Errorf("leases of %s: got %d, want %d", who, got, want)
			}
		}
	}

	t.Run("identities on two nodes", func(t *testing.T) {
		adm := admit(t, both, 9, 9)
		leases(t, map[string]int64{a: 1, b: 1})
		r.Release(adm)
		flush(t)
		leases(t, map[string]int64{a: 0, b: 0})
	})

	t.Run("lost leases are put back", func(t *testing.T) {
		adm := admit(t, both, 8, 9)
		for _, s := range node {
			s.Client().FlushAll(t.Context())
		}
		for _, l := range adm.leases {
			l.renewAt = time.Now()
		}
		if err := r.renew(); err != nil {
			t.Fatal(err)
		}
		leases(t, map[string]int64{a: 1, b: 1})
		r.Release(adm)
		flush(t)
	})

	t.Run("a slot moves to another node", func(t *testing.T) {
		adm := admit(t, ask(a, bucket, slots), 9, 9)
		finish := migrate(t, c.Masters[0], c.Masters[2], a, bucket, slots)
		// Meanwhile, the old node sends us on for what it does not have.
		r.Release(adm)
		flush(t)
		// The clock of the new one says nothing of the old one's, however far
		// they are apart.
		first, err := r.node(t.Context(), bucket.stateKey(id(a)).redis(DefaultKeyPrefix))
		if err != nil {
			t.Fatal(err)
		}
		clock := &first.clock
		ahead := clock.ahead.Load()
		for i, skew := range []time.Duration{-time.Hour, time.Hour} {
			clock.ahead.Store(ahead + skew.Microseconds())
			other := rate(t, "other", 1, time.Hour, 10, 1)
			if adm, err := r.Admit(t.Context(), ask(a, other)); err != nil || adm.Results[0].Remaining != int64(9-i) {
				t.Errorf("got %v, %v, want %d tokens left", adm, err, 9-i)
			}
			if clock.ahead.Load() != ahead+skew.Microseconds() {
				t.Error("the clock of the old node was set by the new one")
			}
		}
		finish()
		node[a] = c.Masters[2]
		adm = admit(t, both[:1], 8, 9)
		r.Release(adm)
		flush(t)
		leases(t, map[string]int64{a: 0})
	})

	t.Run("a node that is down costs the others nothing", func(t *testing.T) {
		one := rate(t, "one", 1, time.Hour, 1, 1)
		last := oneOn(c, c.Masters[1])
		for _, how := range []string{"hangs", "is dead"} {
			o := clusterAt(c)
			o.Timeout = 2 * time.Second // in which the others surely answer
			r := handRedis(t, o)
			// Also with nothing known of the node that is down.
			eventually(t, "an answer", func() bool {
				_, err := r.Admit(t.Context(), ask(last, bucket))
				return err == nil
			})
			if how == "hangs" {
				c.Masters[2].Stop()
			} else {
				c.Masters[2].Kill()
			}
			asks := append(ask(a, bucket, slots), ask(how, one)...)
			for asks[1].Identity = id(how); c.MasterOf("{"+asks[1].Identity.String()+"}") != c.Masters[1]; {
				asks[1].Identity[15]++
			}
			for i := range 2 {
				adm, err := r.Admit(t.Context(), asks)
				if err == nil || adm.Allowed != (i == 0) || adm.Results[0] != (Result{}) {
					t.Errorf("%s: request %d: got %v, %v, want that one limit decides", how, i, adm, err)
				}
			}
			r.leases.end(time.Now(), false,
				&lease{key: slots.stateKey(asks[0].Identity), id: 1}, &lease{key: slots.stateKey(asks[1].Identity), id: 1})
			if err := r.flush(time.Now().Add(o.Timeout), true); err == nil {
				t.Errorf("%s: no error from releases there", how)
			}
			if some, _ := r.leases.claim(time.Now(), 1, slots.stateKey(asks[1].Identity), 1); len(some) > 0 {
				t.Errorf("%s: the other's release is not done", how)
			}
			if some, _ := r.leases.claim(time.Now(), 1, slots.stateKey(asks[0].Identity), 1); len(some) == 0 {
				t.Errorf("%s: a release there is done", how)
			}
			if how == "hangs" {
				c.Masters[2].Cont()
			}
		}
	})
}

// migrate begins to move the slot of an identity, with the keys of its limits,
// and returns what ends it.
func migrate(t *testing.T, from, to *redistest.Server, who string, limits ...*Limit) (finish func()) {
	t.Helper()
	do := func(s *redistest.Server, args ...any) string {
		t.Helper()
		rdb := s.Client()
		defer rdb.Close()
		got, err := rdb.Do(t.Context(), args...).Result()
		if err != nil {
			t.Fatalf("%v: %v", args, err)
		}
		return fmt.Sprint(got)
	}
	slot := do(from, "CLUSTER", "KEYSLOT", "{"+id(who).String()+"}")
	source, target := do(from, "CLUSTER", "MYID"), do(to, "CLUSTER", "MYID")
	do(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", source)
	do(from, "CLUSTER", "SETSLOT", slot, "MIGRATING", target)
	host, port, _ := strings.Cut(to.Addr, ":")
	for _, l := range limits {
		do(from, "MIGRATE", host, port, l.stateKey(id(who)).redis(DefaultKeyPrefix), 0, 5000)
	}
	return func() {
		do(to, "CLUSTER", "SETSLOT", slot, "NODE", target)
		do(from, "CLUSTER", "SETSLOT", slot, "NODE", target)
	}
}

// After a failover the store finds the new master, though nothing tells it.
func TestCluster_Failover(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 3, 1)
	r := startRedis(t, clusterAt(c))
	who := oneOn(c, c.Masters[0])
	l := rate(t, "rate", 1, time.Hour, 1000, 1)
	if _, err := r.Admit(t.Context(), ask(who, l)); err != nil {
		t.Fatal(err)
	}
	master, replica := c.Masters[0], c.Replicas[0]
	replicate(t, master, who)
	master.Kill()
	if err := replica.Client().Do(t.Context(), "CLUSTER", "FAILOVER", "TAKEOVER").Err(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "an answer of the new master", func() bool {
		adm, err := r.Admit(t.Context(), ask(who, l))
		if err == nil && adm.Results[0].Remaining != 998 {
			t.Errorf("got %q, want 998 tokens left", briefly(adm.Results))
		}
		return err == nil
	})
}

// replicate waits until the replica of a master has all that it has, an identity
// among it.
func replicate(t *testing.T, master *redistest.Server, who string) {
	t.Helper()
	rdb := master.Client()
	conn := rdb.Conn() // WAIT is about the writes of its own connection
	defer conn.Close()
	if err := conn.Set(t.Context(), "{"+id(who).String()+"}", "", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if n, err := conn.Wait(t.Context(), 1, patience/10).Result(); n != 1 || err != nil {
		t.Fatalf("WAIT: got %d, %v", n, err)
	}
}

// Behind Sentinels as well.
func TestSentinel_Failover(t *testing.T) {
	t.Parallel()
	s := redistest.StartSentinel(t)
	o := RedisOptions{Timeout: patience, Universal: redis.UniversalOptions{Addrs: []string{s.Addr}, MasterName: s.MasterName}}
	r := startRedis(t, o)
	bucket, slots := rate(t, "rate", 1, time.Hour, 1000, 1), concurrency(t, "ten", 10, MinLease)
	held, err := r.Admit(t.Context(), ask("a", bucket, slots))
	if err != nil {
		t.Fatal(err)
	}
	replicate(t, s.Master, "a")
	s.Failover()
	eventually(t, "an answer of the new master", func() bool {
		adm, err := r.Admit(t.Context(), ask("a", bucket))
		if err == nil && adm.Results[0].Remaining > 998 {
			t.Errorf("got %q, want at most 998 tokens left", briefly(adm.Results))
		}
		return err == nil && s.Master.Client().Exists(t.Context(), bucket.stateKey(id("a")).redis(DefaultKeyPrefix)).Val() == 1
	})
	eventually(t, "a renewal", func() bool { return leasesOf(t, s.Master, "a", slots) == 1 })
	r.Release(held)
	eventually(t, "the release", func() bool { return leasesOf(t, s.Master, "a", slots) == 0 })
}
