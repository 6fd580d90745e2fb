// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/caddyproc"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// blackHole accepts connections and never says a word.
type blackHole struct {
	addr     string
	accepted chan net.Conn
}

func newBlackHole(t *testing.T) *blackHole {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	hole := &blackHole{l.Addr().String(), make(chan net.Conn)}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			select {
			case hole.accepted <- conn:
			case <-t.Context().Done():
			}
		}
	}()
	return hole
}

// dialed returns how many connections there were: those that come before one
// of its own.
func (b *blackHole) dialed(t *testing.T) (n int) {
	t.Helper()
	own, err := dial(b.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	for {
		select {
		case conn := <-b.accepted:
			_ = conn.Close()
			if conn.RemoteAddr().String() == own.LocalAddr().String() {
				return n
			}
			n++
		case <-time.After(patience):
			t.Fatal("a listener does not accept")
		}
	}
}

// Whoever checks a config needs no Redis and touches none. Nor does a Caddy that
// starts, reloads or rejects a config wait for it; and it touches none of a config
// that never ran.
func TestConfigNeverDials(t *testing.T) {
	cfg := config{site: "stripe_ratelimit {\n rate 10/h \n concurrency 5 \n}\n respond ok"}
	for _, command := range []string{"validate", "adapt", "adapt --validate"} {
		t.Run(command, func(t *testing.T) {
			hole := newBlackHole(t)
			cfg.redis = hole.addr
			dir := t.TempDir()
			file := filepath.Join(dir, "Caddyfile")
			if err := os.WriteFile(file, []byte(cfg.caddyfile(caddyproc.FreePort(t))), 0o600); err != nil {
				t.Fatal(err)
			}
			args := append(strings.Fields(command), "--config", file, "--adapter", "caddyfile")
			cmd := caddyproc.Command(t, dir, args...)
			var out redistest.Output
			cmd.Stdout, cmd.Stderr = &out, &out
			redistest.TieToParent(cmd)
			begin := time.Now()
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			kill := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
			defer kill.Stop()
			if err := cmd.Wait(); err != nil {
				t.Fatalf("caddy %s: %v\n%s", command, err, &out)
			}
			t.Logf("took %v", time.Since(begin))
			if n := hole.dialed(t); n != 0 {
				t.Errorf("caddy %s dialed Redis %d times", command, n)
			}
		})
	}

	t.Run("run and reload", func(t *testing.T) {
		hole := newBlackHole(t)
		cfg.redis = hole.addr
		c := start(t, cfg)
		c = c.load(t, cfg)
		bad, other := cfg, newBlackHole(t)
		bad.redis = other.addr
		bad.blocks = "http://" + hole.addr + " {\n respond taken \n}" // which starts last, and cannot
		if status, body := c.Load(t, bad.caddyfile(c.port)); status == http.StatusOK {
			t.Fatalf("load of a config that cannot start: got %d %s, want an error", status, body)
		}
		if n := other.dialed(t); n != 0 {
			t.Errorf("dialed the Redis of a config that was rejected %d times", n)
		}
	})
}
