// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// Many clients through several instances: never more than the bucket holds and
// what flows in meanwhile.
func TestRedis_RateIsNeverExceeded(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t)
	l := rate(t, "rate", 1000, time.Second, 50, 1)
	rdb := srv.Client()
	var allowed atomic.Int64
	before := rdb.Time(t.Context()).Val()
	stop := time.Now().Add(time.Second)
	var wg sync.WaitGroup
	for range 2 {
		r := startRedis(t, redisAt(srv.Addr))
		for range 10 {
			wg.Go(func() {
				for time.Now().Before(stop) {
					adm, err := r.Admit(t.Context(), ask("a", l))
					if err != nil {
						t.Error(err)
						return
					}
					if adm.Allowed {
						allowed.Add(1)
					}
				}
			})
		}
	}
	wg.Wait()
	took := rdb.Time(t.Context()).Val().Sub(before)
	if got, most := allowed.Load(), 50+int64(1000*took.Seconds()); got > most || got < 50 {
		t.Errorf("allowed %d within %v, want 50 to %d", got, took, most)
	}
}

// Many clients through several instances: never more at once than the limit, and
// no lease is left when they are done.
func TestRedis_ConcurrencyIsNeverExceeded(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t)
	const limit = 7
	l := concurrency(t, "seven", limit, 10*time.Second)
	var busy, most, served atomic.Int64
	var wg sync.WaitGroup
	for range 2 {
		r := startRedis(t, redisAt(srv.Addr))
		for range 10 {
			wg.Go(func() {
				for range 200 {
					adm, err := r.Admit(t.Context(), ask("a", l))
					if err != nil {
						t.Error(err)
						return
					}
					if !adm.Allowed {
						continue
					}
					served.Add(1)
					n := busy.Add(1)
					for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
					}
					busy.Add(-1)
					r.Release(adm)
				}
			})
		}
	}
	wg.Wait()
	if most.Load() > limit || served.Load() < limit {
		t.Errorf("%d at once of %d, want at most %d", most.Load(), served.Load(), limit)
	}
	eventually(t, "all releases", func() bool { return leasesOf(t, srv, "a", l) == 0 })
}

// As many clients as the limit allows, each of which begins its next request
// when the last has ended, never meet a slot that they have freed themselves.
func TestStore_ClosedLoopClientsSeeNoDenial(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t)
	m := NewMemory(0)
	t.Cleanup(func() { _ = m.Close() })
	for name, s := range map[string]Store{"redis": startRedis(t, redisAt(srv.Addr)), "memory": m} {
		for _, clients := range []int64{1, 20, 500} {
			t.Run(name, func(t *testing.T) {
				l := concurrency(t, "limit", clients, 10*time.Second)
				var wg sync.WaitGroup
				for range clients {
					wg.Go(func() {
						for range max(3, 2000/clients) {
							adm, err := s.Admit(t.Context(), ask("a", l))
							if err != nil || !adm.Allowed {
								t.Errorf("%d clients: got %v, %v", clients, adm.Allowed, err)
								return
							}
							s.Release(adm)
						}
					})
				}
				wg.Wait()
			})
		}
	}
	l := concurrency(t, "limit", 1, 10*time.Second)
	eventually(t, "all releases", func() bool { return leasesOf(t, srv, "a", l) == 0 })
}

// An allowed request costs one script call, whatever its identities, and a release
// that many share.
func TestRedis_CommandsPerRequest(t *testing.T) {
	srv := redistest.Start(t)
	r := startRedis(t, redisAt(srv.Addr))
	limits := []*Limit{rate(t, "rate", 1000, time.Hour, 1000, 1), concurrency(t, "two", 2, 10*time.Second)}
	one := func() {
		adm, err := r.Admit(t.Context(), append(ask("a", limits...), ask("b", limits...)...))
		if err != nil || !adm.Allowed {
			t.Fatal(adm, err)
		}
		r.Release(adm)
	}
	one() // which learns the clock
	eventually(t, "the release", func() bool { return leasesOf(t, srv, "b", limits[1]) == 0 })
	before := srv.Commands(t)
	for range 100 {
		one()
	}
	after := srv.Commands(t)
	if got, want := after["evalsha"]-before["evalsha"], int64(100); got != want {
		t.Errorf("EVALSHA: got %d for 100 requests of 2 identities, want %d", got, want)
	}
	// Those inside the scripts count as well.
	if got, most := after["zrem"]-before["zrem"], int64(400); got > most {
		t.Errorf("ZREM: got %d for 100 requests of 2 identities, want at most %d", got, most)
	}
}

// aclRules is what a server must allow a user. HELLO is not among it: go-redis
// does without where it is refused.
var aclRules = []string{
	"~stripe_ratelimit:*", "+evalsha", "+eval", "+time", "+get", "+set",
	"+zrem", "+zcount", "+zadd", "+zrangebyscore", "+zremrangebyscore", "+pexpire",
}

// The ways to reach a server; each user may do no more than what the store needs.
func TestRedis_WaysToReachIt(t *testing.T) {
	unix := redistest.StartUnix(t)
	secure := redistest.StartTLS(t)
	limited := redistest.Start(t)
	limited.AddUser("caddy", "secret", aclRules...)
	databases := redistest.Start(t)

	pem, err := os.ReadFile(secure.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	pair, err := tls.LoadX509KeyPair(secure.CertFile, secure.KeyFile)
	if err != nil {
		t.Fatal(err)
	}

	for name, u := range map[string]redis.UniversalOptions{
		"unix":     {Addrs: []string{unix.Addr}},
		"tls":      {Addrs: []string{secure.Addr}, TLSConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}}},
		"acl":      {Addrs: []string{limited.Addr}, Username: "caddy", Password: "secret"},
		"database": {Addrs: []string{databases.Addr}, DB: 3},
	} {
		t.Run(name, func(t *testing.T) {
			r := handRedis(t, RedisOptions{Universal: u, Timeout: patience})
			if err := everything(t.Context(), r); err != nil {
				t.Error(err)
			}
		})
	}
	if got := databases.Client().DBSize(t.Context()).Val(); got != 0 {
		t.Errorf("database 0 has %d keys", got)
	}

	for name, u := range map[string]redis.UniversalOptions{
		"auth":       {Addrs: []string{limited.Addr}, Username: "caddy", Password: "wrong"},
		"connection": {Addrs: []string{secure.Addr}},
	} {
		t.Run("refused_"+name, func(t *testing.T) {
			r := startRedis(t, RedisOptions{Universal: u, Timeout: patience})
			adm, err := r.Admit(t.Context(), ask("a", rate(t, "rate", 2, time.Hour, 2, 1)))
			if err == nil || Reason(err) != name || !adm.Allowed || adm.Results[0] != (Result{}) {
				t.Errorf("got %v, %v (%s), want an error for %s and the request to pass", adm, err, Reason(err), name)
			}
		})
	}
}

// everything does all that a store does on a server.
func everything(ctx context.Context, r *Redis) error {
	bucket, _ := NewRate("pool", "rate", 1, time.Hour, 5, 1)
	two, _ := NewConcurrency("pool", "two", 2, 10*time.Second)
	one, _ := NewConcurrency("pool", "two", 1, 10*time.Second)
	first, err := r.Admit(ctx, ask("a", bucket, two))
	if err != nil {
		return err
	}
	second, err := r.Admit(ctx, ask("a", bucket, two))
	if err != nil {
		return err
	}
	for _, l := range first.leases {
		l.renewAt = time.Now()
	}
	if err := r.renew(); err != nil {
		return err
	}
	if left := second.Results[0].Remaining; left != 3 {
		return fmt.Errorf("%d tokens left, want 3", left)
	}
	r.Release(second)
	third, err := r.Admit(ctx, ask("a", one)) // which releases the second
	if err != nil {
		return err
	}
	if third.Allowed {
		return errors.New("a third request is allowed beside the first")
	}
	r.Release(first)
	if err := r.flush(time.Now().Add(patience), true); err != nil {
		return err
	}
	if n := r.leases.nEnded; n > 0 {
		return fmt.Errorf("%d releases are left", n)
	}
	return nil
}

// Nor may a user be allowed less.
func TestRedis_EveryACLRuleIsNeeded(t *testing.T) {
	srv := redistest.Start(t)
	for i, rule := range aclRules {
		srv.AddUser("caddy", "secret", slices.Delete(slices.Clone(aclRules), i, i+1)...)
		srv.Client().ScriptFlush(t.Context())
		srv.Client().FlushAll(t.Context())
		o := redisAt(srv.Addr)
		o.Universal.Username, o.Universal.Password = "caddy", "secret"
		if err := everything(t.Context(), handRedis(t, o)); Reason(err) != "auth" {
			t.Errorf("without %s: got %v, want the reason auth", rule, err)
		}
	}
}

// Who asks nothing is told at once that nothing denies, as Memory does.
func TestRedis_NothingToAsk(t *testing.T) {
	r := handRedis(t, redisAt("127.0.0.1:1"))
	if adm, err := r.Admit(t.Context(), nil); err != nil || !adm.Allowed {
		t.Errorf("got %+v, %v", adm, err)
	}
}

// Without its client nobody waits for the answer, but what was taken must be known.
func TestRedis_ClientGoesAway(t *testing.T) {
	srv := redistest.Start(t)
	r := startRedis(t, redisAt(srv.Addr))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	l := concurrency(t, "two", 2, 10*time.Second)
	adm, err := r.Admit(ctx, ask("a", l))
	if err != nil || !adm.Allowed {
		t.Fatalf("got %v, %v, want it allowed", adm, err)
	}
	r.Release(adm)
	eventually(t, "the release", func() bool { return leasesOf(t, srv, "a", l) == 0 })
}

func TestRedis_CloseReleases(t *testing.T) {
	srv := redistest.Start(t)
	r := NewRedis(redisAt(srv.Addr))
	l := concurrency(t, "many", 100, 10*time.Second)
	var adms []Admission
	for range 100 {
		adm, err := r.Admit(t.Context(), ask("a", l))
		if err != nil || !adm.Allowed {
			t.Fatal(adm, err)
		}
		adms = append(adms, adm)
	}
	for _, adm := range adms {
		r.Release(adm)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if got := leasesOf(t, srv, "a", l); got != 0 {
		t.Errorf("leases after Close: got %d, want 0", got)
	}
	adm, err := r.Admit(t.Context(), ask("a", l))
	if Reason(err) != "closed" || !adm.Allowed {
		t.Errorf("admit after Close: got %v, %v, want the reason closed", adm.Allowed, err)
	}
	r.Release(adm)
}

// Every operation is told of, those in the background as well.
func TestRedis_Observe(t *testing.T) {
	srv := redistest.Start(t)
	o := redisAt(srv.Addr)
	var mu sync.Mutex
	seen := map[string]bool{}
	o.Observe = func(operation string, took time.Duration, err error) {
		mu.Lock()
		defer mu.Unlock()
		seen[fmt.Sprintf("%s %v %v", operation, took > 0, err)] = true
	}
	r := startRedis(t, o)
	adm, err := r.Admit(t.Context(), ask("a", concurrency(t, "two", 2, MinLease)))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "a renewal", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return seen["renew true <nil>"]
	})
	r.Release(adm)
	eventually(t, "a release", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(seen) == 3
	})
	for _, want := range []string{"admit true <nil>", "renew true <nil>", "release true <nil>"} {
		if !seen[want] {
			t.Errorf("got %v, want %s", seen, want)
		}
	}
}
