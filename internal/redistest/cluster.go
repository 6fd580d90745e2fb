// SPDX-License-Identifier: Apache-2.0

package redistest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
)

// slots is the number of slots of a Redis Cluster.
const slots = 16384

// Cluster is a Redis Cluster. The slots are spread evenly: the first master has
// the lowest ones. No node is declared dead within the time of a test.
type Cluster struct {
	Masters  []*Server
	Replicas []*Server // those of the first master, then of the second, …

	t testing.TB
}

// StartCluster starts a Redis Cluster and returns once every node says that it
// works and every replica is in sync. The args go to all nodes.
func StartCluster(t testing.TB, masters, replicasPerMaster int, args ...string) *Cluster {
	t.Helper()
	// The shorter the timeout, the faster nodes spread news. But busy machines
	// pause, so no replica may take over yet.
	args = append([]string{
		"--cluster-enabled", "yes", "--cluster-node-timeout", "2000",
		"--cluster-replica-no-failover", "yes", "--repl-diskless-sync-delay", "0",
	}, args...)
	c := &Cluster{t: t}
	for i := range masters {
		s := Start(t, args...)
		s.do("CLUSTER", "ADDSLOTSRANGE", i*slots/masters, (i+1)*slots/masters-1)
		s.do("CLUSTER", "SET-CONFIG-EPOCH", i+1)
		c.Masters = append(c.Masters, s)
	}
	for range masters * replicasPerMaster {
		c.Replicas = append(c.Replicas, Start(t, args...))
	}
	nodes := c.Nodes()
	for i, s := range nodes {
		s.wait("meeting all nodes", func() bool {
			list := s.do("CLUSTER", "NODES")
			if strings.Contains(list, "handshake") {
				return false
			}
			if strings.Count(list, " connected") == len(nodes) {
				return true
			}
			// The first node introduces all to each other, again if a node was
			// too slow: handshakes time out, and nobody repeats them.
			if i == 0 {
				for _, other := range nodes[1:] {
					host, port, _ := strings.Cut(other.Addr, ":")
					s.do("CLUSTER", "MEET", host, port)
				}
			}
			return false
		})
	}
	for i, s := range c.Replicas {
		s.do("CLUSTER", "REPLICATE", c.Masters[i/replicasPerMaster].do("CLUSTER", "MYID"))
	}
	for _, s := range nodes {
		s.wait("cluster_state:ok", func() bool {
			return strings.Count(s.do("CLUSTER", "NODES"), "slave") == len(c.Replicas) &&
				strings.Contains(s.do("CLUSTER", "INFO"), "cluster_state:ok")
		})
	}
	for _, s := range c.Replicas {
		s.waitForSync()
	}
	for _, s := range nodes {
		s.do("CONFIG", "SET", "cluster-node-timeout", 60_000, "cluster-replica-no-failover", "no")
	}
	return c
}

// Nodes returns the masters, then the replicas.
func (c *Cluster) Nodes() []*Server {
	return append(append([]*Server(nil), c.Masters...), c.Replicas...)
}

// Addrs returns the addresses of all nodes.
func (c *Cluster) Addrs() []string {
	var addrs []string
	for _, s := range c.Nodes() {
		addrs = append(addrs, s.Addr)
	}
	return addrs
}

// Client returns a new client, which is closed when the test ends.
func (c *Cluster) Client() *redis.ClusterClient {
	rdb := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs:                    c.Addrs(),
		Protocol:                 2,
		DisableIdentity:          true,
		MaintNotificationsConfig: noMaintenance,
	})
	c.t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

// MasterOf returns the master that had the key's slot at the start.
func (c *Cluster) MasterOf(key string) *Server {
	c.t.Helper()
	var slot int
	if _, err := fmt.Sscan(c.Masters[0].do("CLUSTER", "KEYSLOT", key), &slot); err != nil {
		c.t.Fatal(err)
	}
	// The inverse of how StartCluster spreads them.
	for i, s := range c.Masters {
		if slot < (i+1)*slots/len(c.Masters) {
			return s
		}
	}
	panic("unreachable")
}
