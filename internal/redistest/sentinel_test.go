// SPDX-License-Identifier: Apache-2.0

package redistest

import (
	"testing"

	"github.com/redis/go-redis/v9"
)

func TestSentinel_Failover(t *testing.T) {
	t.Parallel()
	s := StartSentinel(t)
	a, b := s.Master, s.Replica
	rdb := redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName: s.MasterName, SentinelAddrs: []string{s.Addr},
	})
	defer rdb.Close()
	incr := func(master *Server, want int64) {
		t.Helper()
		if s.Master != master {
			t.Fatalf("master: got %s, want %s", s.Master.Addr, master.Addr)
		}
		if got, err := rdb.Incr(t.Context(), "n").Result(); got != want || err != nil {
			t.Fatalf("INCR through the Sentinel: got %d, %v, want %d", got, err, want)
		}
		if got, err := master.Client().Get(t.Context(), "n").Int64(); got != want || err != nil {
			t.Fatalf("GET on the master: got %d, %v, want %d", got, err, want)
		}
		// The next failover must not lose what this test counts.
		replica := s.Replica.Client()
		s.Replica.wait("replication", func() bool {
			got, err := replica.Get(t.Context(), "n").Int64()
			return got == want && err == nil
		})
	}
	incr(a, 1)
	s.Failover()
	incr(b, 2)
	if err := a.Client().Incr(t.Context(), "n").Err(); !redis.HasErrorPrefix(err, "READONLY") {
		t.Errorf("INCR on the old master: got %v, want READONLY", err)
	}
	s.Failover() // and back
	incr(a, 3)

	a.Kill()
	s.Failover()
	if s.Master != b {
		t.Fatalf("master: got %s, want %s", s.Master.Addr, b.Addr)
	}
	if got, err := rdb.Incr(t.Context(), "n").Result(); got != 4 || err != nil {
		t.Errorf("INCR after a crash: got %d, %v, want 4", got, err)
	}
}
