// SPDX-License-Identifier: Apache-2.0

package redistest

import (
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"
)

func TestStartCluster(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, 3, 1)
	rdb := c.Client()
	used := make(map[*Server]int)
	for i := range 100 {
		key := fmt.Sprintf("{%d}:k", i)
		if err := rdb.Set(t.Context(), key, "v", 0).Err(); err != nil {
			t.Fatalf("SET %s: %v", key, err)
		}
		owner := c.MasterOf(key)
		used[owner]++
		for _, s := range c.Masters {
			err := s.Client().Get(t.Context(), key).Err()
			if moved := redis.HasErrorPrefix(err, "MOVED"); moved != (s != owner) || !moved && err != nil {
				t.Errorf("GET %s on %s: got %v; the owner is %s", key, s.Addr, err, owner.Addr)
			}
		}
	}
	if len(used) != 3 {
		t.Errorf("100 keys lie on %d masters, want 3", len(used))
	}
	for i, s := range c.Replicas {
		if got, want := s.do("CLUSTER", "COUNTKEYSINSLOT", 0), c.Masters[i].do("CLUSTER", "COUNTKEYSINSLOT", 0); got != want {
			t.Errorf("keys in slot 0 on replica %d: got %s, want %s", i, got, want)
		}
	}
}

func TestStartCluster_OneNode(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, 1, 0)
	rdb := c.Client()
	if err := rdb.Set(t.Context(), "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	c.Masters[0].Restart() // nodes.conf is kept, so it knows its slots
	c.Masters[0].wait("cluster_state:ok", func() bool {
		return rdb.Set(t.Context(), "k", "v", 0).Err() == nil
	})
}
