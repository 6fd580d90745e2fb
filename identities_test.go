// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	goredis "github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

var identitiesFlag = flag.Int("identities", 5000, "how many identities TestIdentities tries")

// memoryPerIdentity bounds what this process keeps of an identity in the memory
// store and the denial cache, and redisPerIdentity what Redis does: the bucket.
// docs/failures.md states both.
const (
	memoryPerIdentity = 400 // bytes
	redisPerIdentity  = 256 // bytes
)

// Identities that nobody has seen before, as fast as they come, each of which is
// allowed one request and denied the next: what is kept of each is bounded, by
// memoryPerIdentity, and of all together by what the store and the cache may hold.
//
//	go test -run TestIdentities -v . -identities 1000000
func TestIdentities(t *testing.T) {
	h := runningHandler(t, &RateLimit{Requests: 1, Per: caddy.Duration(24 * time.Hour)})
	next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	n := *identitiesFlag
	before, begin := heap(), time.Now()
	for i := range n {
		key := "Bearer sk_live_" + strconv.Itoa(i)
		for _, want := range []int{http.StatusOK, http.StatusTooManyRequests} {
			r := httptest.NewRequest(http.MethodGet, "/", nil)
			r.Header.Set("Authorization", key)
			w := httptest.NewRecorder()
			if err := h.ServeHTTP(w, caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil), next); err != nil || w.Code != want {
				t.Fatalf("identity %d: got %d, %v, want %d", i, w.Code, err, want)
			}
		}
	}
	took, grown := time.Since(begin), heap()-before
	t.Logf("%d identities in %v: %d KiB, %d bytes each", n, took.Round(time.Millisecond), grown>>10, grown/int64(n))
	if most := int64(n) * memoryPerIdentity; grown > most {
		t.Errorf("%d bytes are kept, want at most %d", grown, most)
	}
	runtime.KeepAlive(h)
}

// What an identity costs Redis. Its leases go with its requests.
func TestIdentities_Redis(t *testing.T) {
	redis := redistest.Start(t)
	pool := testPool(t)
	s := newServer(t)
	s.load(app(redis), "\tstripe_ratelimit "+pool+" {\n\t\tkey api_key\n\t\trate 1/h burst 2\n\t\tconcurrency 5\n\t}")
	client := redis.Client()
	// What each key takes, with its place in the table. Of Redis's memory in all,
	// buffers of connections that come and go are as much as hundreds of buckets.
	used := func() (n int64) {
		t.Helper()
		keys, err := client.Keys(t.Context(), "*").Result()
		if err != nil {
			t.Fatal(err)
		}
		for _, key := range keys {
			size, err := client.MemoryUsage(t.Context(), key).Result()
			if err != nil && !errors.Is(err, goredis.Nil) { // it has just ended
				t.Fatal(err)
			}
			n += size
		}
		return n
	}
	s.want("first", 200)
	n := max(500, *identitiesFlag/10)
	before := used()
	for i := range n {
		s.want(fmt.Sprint("sk_live_", i), 200)
	}
	eventually(t, func() bool {
		keys, err := client.Keys(t.Context(), "*:c:*").Result()
		return err == nil && len(keys) == 0
	})
	grown := used() - before
	t.Logf("%d identities: %d KiB, %d bytes each", n, grown>>10, grown/int64(n))
	if most := int64(n) * redisPerIdentity; grown > most {
		t.Errorf("Redis keeps %d bytes, want at most %d", grown, most)
	}
}
