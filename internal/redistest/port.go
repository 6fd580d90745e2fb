// SPDX-License-Identifier: Apache-2.0

package redistest

import (
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"testing"
)

// Ports are taken from below the range from which systems take the local ports
// of outgoing connections. So nobody's connection can sit on the port of a
// server that is down for a moment, and a dial to a dead server is refused (a
// dial from a port to the very same port would connect to itself). Also, a
// cluster's bus has port + 10000 for itself.
//
// Test binaries run in parallel: each owns whole blocks of ports, and the
// listener on a block's first port is the lock.
const (
	firstPort = 10_000
	lastPort  = 19_999
	blockSize = 100
)

var ports struct {
	sync.Mutex
	locks     []net.Listener // never closed: they end with the process
	next, end int
}

// FreePort returns a TCP port of 127.0.0.1 on which nobody listens and which no
// other test is given.
func FreePort(t testing.TB) int {
	t.Helper()
	ports.Lock()
	defer ports.Unlock()
	for range 10 * blockSize {
		if ports.next == ports.end {
			lockBlock(t)
		}
		port := ports.next
		ports.next++
		if l, err := listen(port); err == nil {
			_ = l.Close()
			return port
		}
	}
	t.Fatal("no free TCP port")
	return 0
}

// lockBlock makes a block of ports that is free at the moment this process's own.
func lockBlock(t testing.TB) {
	t.Helper()
	for _, i := range rand.Perm((lastPort + 1 - firstPort) / blockSize) {
		first := firstPort + i*blockSize
		if l, err := listen(first); err == nil {
			ports.locks = append(ports.locks, l)
			ports.next, ports.end = first+1, first+blockSize
			return
		}
	}
	t.Fatal("no free block of TCP ports")
}

func listen(port int) (net.Listener, error) {
	return net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
}
