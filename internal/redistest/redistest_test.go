// SPDX-License-Identifier: Apache-2.0

package redistest

import (
	"bufio"
	"errors"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/redis/go-redis/v9"
)

func TestStart(t *testing.T) {
	a, b := Start(t), Start(t)
	if a.Addr == b.Addr {
		t.Fatalf("two servers at %s", a.Addr)
	}
	ctx := t.Context()
	if err := a.Client().Set(ctx, "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if err := b.Client().Get(ctx, "k").Err(); !errors.Is(err, redis.Nil) {
		t.Errorf("GET on the other server: got %v, want %v", err, redis.Nil)
	}
}

func TestStart_ArgsWin(t *testing.T) {
	s := Start(t, "--maxmemory", "5mb", "--requirepass", "secret")
	rdb := s.Client()
	if err := rdb.Ping(t.Context()).Err(); err == nil || !strings.Contains(err.Error(), "NOAUTH") {
		t.Errorf("PING without password: got %v, want NOAUTH", err)
	}
	conn := rdb.Conn()
	defer conn.Close()
	if err := conn.Auth(t.Context(), "secret").Err(); err != nil {
		t.Fatal(err)
	}
	got := conn.ConfigGet(t.Context(), "maxmemory").Val()
	if diff := cmp.Diff(map[string]string{"maxmemory": "5242880"}, got); diff != "" {
		t.Errorf("CONFIG GET maxmemory (-want +got):\n%s", diff)
	}
}

func TestServer_Commands(t *testing.T) {
	s := Start(t)
	rdb := s.Client()
	for range 3 {
		rdb.Get(t.Context(), "k")
	}
	rdb.Eval(t.Context(), `return redis.call('INCR', KEYS[1])`, []string{"n"})
	rdb.ConfigGet(t.Context(), "port")
	// hello is the client's one connection, info is Start's look for life.
	want := map[string]int64{"get": 3, "eval": 1, "incr": 1, "config|get": 1, "hello": 1, "info": 1}
	if diff := cmp.Diff(want, s.Commands(t)); diff != "" {
		t.Errorf("Commands (-want +got):\n%s", diff)
	}
}

func TestServer_KillAndRestart(t *testing.T) {
	s := Start(t)
	rdb := s.Client()
	rdb.Set(t.Context(), "k", "v", 0)
	s.Kill()
	s.Kill() // does nothing
	if err := rdb.Ping(t.Context()).Err(); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("PING of a dead server: got %v, want %v", err, syscall.ECONNREFUSED)
	}
	s.Restart()
	if n, err := rdb.Exists(t.Context(), "k").Result(); n != 0 || err != nil {
		t.Errorf("EXISTS after restart: got %d, %v, want 0, nil", n, err)
	}
	s.Restart() // of a running one
	if err := rdb.Ping(t.Context()).Err(); err != nil {
		t.Errorf("PING: %v", err)
	}
}

func TestServer_StopAndCont(t *testing.T) {
	s := Start(t)
	conn, err := net.Dial("tcp", s.Addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	replies := bufio.NewReader(conn)
	exchange := func(command string) (string, error) {
		if _, err := conn.Write([]byte(command)); err != nil {
			t.Fatal(err)
		}
		return replies.ReadString('\n')
	}
	if got, err := exchange("PING\r\n"); got != "+PONG\r\n" {
		t.Fatalf("PING: got %q, %v", got, err)
	}
	s.Stop()
	_ = conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if got, err := exchange("INCR n\r\n"); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("INCR on a stopped server: got %q, %v, want %v", got, err, os.ErrDeadlineExceeded)
	}
	s.Cont()
	_ = conn.SetReadDeadline(time.Time{})
	if got, err := replies.ReadString('\n'); got != ":1\r\n" {
		t.Errorf("INCR after Cont: got %q, %v, want :1", got, err)
	}
	s.Stop() // the cleanup kills a stopped server as well
}

// A server must not outlive a test binary that dies without cleaning up. The
// test runs itself as that binary.
func TestStart_DiesWithItsTest(t *testing.T) {
	if os.Getenv("REDISTEST_VICTIM") != "" {
		s := Start(t)
		os.Stdout.WriteString("addr=" + s.Addr + "\n")
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	need(t, "redis-server")
	if runtime.GOOS != "linux" {
		t.Skip("this system cannot tie a process to its parent")
	}
	victim := exec.Command(os.Args[0], "-test.run=^TestStart_DiesWithItsTest$")
	victim.Env = append(os.Environ(), "REDISTEST_VICTIM=1")
	out, err := victim.Output()
	if err == nil {
		t.Fatalf("the victim lives:\n%s", out)
	}
	_, addr, ok := strings.Cut(string(out), "addr=")
	if !ok {
		t.Fatalf("the victim started no server: %v\n%s", err, out)
	}
	for deadline := time.Now().Add(readyTimeout); ; {
		conn, err := net.Dial("tcp", strings.TrimSpace(addr))
		if errors.Is(err, syscall.ECONNREFUSED) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("dial: got %v, want %v", err, syscall.ECONNREFUSED)
		}
		if err == nil {
			_ = conn.Close()
		}
		time.Sleep(time.Millisecond)
	}
}

func TestFreePort(t *testing.T) {
	seen := make(map[int]bool)
	for range 2 * blockSize {
		port := FreePort(t)
		if seen[port] || port <= firstPort || port > lastPort {
			t.Fatalf("FreePort: got %d, which is taken or out of range", port)
		}
		seen[port] = true
	}
}
