// SPDX-License-Identifier: Apache-2.0

package caddyproc

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"
)

// AwaitHandover waits until at most one socket listens on a TCP address of
// 127.0.0.1. For a moment of each reload there are two, and Caddy closes the old
// one when it likes, even after its answer to the reload: what the kernel has
// given to that one is lost with it ("connection reset by peer"). The address may
// be that of the admin API, which a config that is rejected has replaced, too.
func AwaitHandover(t testing.TB, addr string) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		n, err := listeners(addr)
		if errors.Is(err, fs.ErrNotExist) {
			return // not Linux
		}
		if err != nil {
			t.Fatal(err)
		}
		if n <= 1 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d sockets listen on %s after %v, want 1", n, addr, patience)
		}
	}
}

// listeners counts the sockets that listen on an address of 127.0.0.1.
func listeners(addr string) (n int, err error) {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return 0, err
	}
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return 0, err
	}
	//   sl  local_address rem_address   st ...
	//    0: 0100007F:0BB8 00000000:0000 0A ...
	// State 0A is LISTEN; the address is in the order of bytes of the machine, so
	// only the port is compared: no test is given another one's.
	port := fmt.Sprintf(":%04X", ap.Port())
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line)
		if len(f) > 3 && f[3] == "0A" && strings.HasSuffix(f[1], port) {
			n++
		}
	}
	return n, nil
}
