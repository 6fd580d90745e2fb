// SPDX-License-Identifier: Apache-2.0

package caddyproc

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
)

// Whatever became of a config, the admin API can be used as soon as Load has
// returned, without a second try.
func TestLoad_AdminIsThere(t *testing.T) {
	if _, err := os.Stat("/proc/net/tcp"); err != nil {
		t.Skip("nothing tells how many sockets listen")
	}
	port := FreePort(t)
	good, url := site(port, "hello")
	p := Start(t, good)
	configs := []struct {
		caddyfile string
		status    int
	}{
		{good, http.StatusOK},
		{"no {\n", http.StatusBadRequest},
		{strings.Replace(good, "{", "{\n\ttls no-such-cert.pem no-such-key.pem", 1), http.StatusBadRequest}, // once the admin API was replaced
		{fmt.Sprintf("{\n\tlog {\n\t\toutput discard\n\t}\n}\n%s", good), http.StatusOK},
	}
	for i := range 10 * len(configs) {
		c := configs[i%len(configs)]
		if status, body := p.Load(t, c.caddyfile); status != c.status {
			t.Fatalf("load %d: got %d %s, want %d", i, status, body, c.status)
		}
		for _, addr := range []string{p.Admin, fmt.Sprintf("127.0.0.1:%d", port)} {
			AwaitHandover(t, addr)
			if n, err := listeners(addr); n != 1 || err != nil {
				t.Errorf("load %d: %d listeners on %s (%v), want 1", i, n, addr, err)
			}
		}
		p.Metrics(t)
		if got := get(t, url); got != "hello" {
			t.Fatalf("load %d: GET: got %q, want hello", i, got)
		}
	}
}
