// SPDX-License-Identifier: Apache-2.0

package redistest

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// Sentinel is a master with one replica and one Sentinel that watches both. The
// Sentinel does nothing by itself within the time of a test: Failover decides.
type Sentinel struct {
	*Server // the Sentinel

	MasterName      string
	Master, Replica *Server // as the last Failover left them
}

// StartSentinel starts the three, with replica and master in sync. The args go to
// these two.
func StartSentinel(t testing.TB, args ...string) *Sentinel {
	t.Helper()
	args = append([]string{"--repl-diskless-sync-delay", "0"}, args...)
	master := Start(t, args...)
	replica := Start(t, args...)
	replica.follow(master)

	s := &Sentinel{Server: newServer(t), MasterName: "mymaster", Master: master, Replica: replica}
	// A Sentinel rewrites its config file and takes no options of a server.
	// Busy machines pause: only a minute without an answer means down.
	file := filepath.Join(t.TempDir(), "sentinel.conf")
	host, port, _ := strings.Cut(master.Addr, ":")
	config := fmt.Sprintf("sentinel monitor %[1]s %[2]s %[3]s 1\nsentinel down-after-milliseconds %[1]s 60000\n",
		s.MasterName, host, port)
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	s.tryPorts(func() error {
		s.Args = []string{file, "--sentinel", "--port", strconv.Itoa(s.port), "--bind", "127.0.0.1"}
		return s.run()
	})
	return s
}

// Failover makes the replica the master, whether the master lives or not, and
// returns once the Sentinel says so. A master that lives becomes the replica.
func (s *Sentinel) Failover() {
	s.t.Helper()
	rdb := s.Client()
	defer rdb.Close()
	old, next := s.Master, s.Replica
	s.wait("failover to "+next.Addr, func() bool {
		state := rdb.Do(s.t.Context(), "SENTINEL", "MASTER", s.MasterName).String()
		if strings.Contains(state, "failover_in_progress") {
			return false
		}
		addr, err := rdb.Do(s.t.Context(), "SENTINEL", "GET-MASTER-ADDR-BY-NAME", s.MasterName).StringSlice()
		if err == nil && strings.Join(addr, ":") == next.Addr {
			return true
		}
		// Not begun, or given up: the Sentinel must know the replica well.
		rdb.Do(s.t.Context(), "SENTINEL", "FAILOVER", s.MasterName)
		return false
	})
	s.Master, s.Replica = next, old
	select {
	case <-old.dead:
	default:
		// The Sentinel would do this, too, ten seconds later.
		old.follow(next)
	}
}

// follow makes the server a replica of another and waits until it is in sync.
func (s *Server) follow(master *Server) {
	s.t.Helper()
	host, port, _ := strings.Cut(master.Addr, ":")
	s.do("REPLICAOF", host, port)
	s.waitForSync()
}
