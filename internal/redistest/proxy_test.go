// SPDX-License-Identifier: Apache-2.0

package redistest

import (
	"bufio"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"
)

// client speaks to a proxy without a pool or retries in between.
type client struct {
	net.Conn
	replies *bufio.Reader
}

func dialProxy(t *testing.T, p *Proxy) *client {
	t.Helper()
	conn, err := net.Dial("tcp", p.Addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return &client{conn, bufio.NewReader(conn)}
}

// do sends a command and returns the first line of the reply.
func (c *client) do(command string) (string, error) {
	if _, err := c.Write([]byte(command + "\r\n")); err != nil {
		return "", err
	}
	return c.replies.ReadString('\n')
}

func (c *client) mustDo(t *testing.T, command, want string) {
	t.Helper()
	if got, err := c.do(command); got != want+"\r\n" || err != nil {
		t.Fatalf("%s: got %q, %v, want %s", command, got, err, want)
	}
}

func TestProxy_CutReplies(t *testing.T) {
	p := StartProxy(t, Start(t).Addr)
	a, b := dialProxy(t, p), dialProxy(t, p)
	a.mustDo(t, "INCR n", ":1")
	b.mustDo(t, "INCR n", ":2")
	p.CutReplies(1)
	if got, err := a.do("INCR n"); got != "" || !closed(err) {
		t.Errorf("INCR without reply: got %q, %v, want a closed connection", got, err)
	}
	b.mustDo(t, "GET n", "$1") // one reply was cut, no more
	if got, _ := b.replies.ReadString('\n'); got != "3\r\n" {
		t.Errorf("GET n: got %q, want 3: the command whose reply was cut did run", got)
	}
}

func TestProxy_Blackhole(t *testing.T) {
	p := StartProxy(t, Start(t).Addr)
	a, b := dialProxy(t, p), dialProxy(t, p)
	a.mustDo(t, "INCR n", ":1")
	b.mustDo(t, "INCR n", ":2")
	p.Blackhole(true)
	c := dialProxy(t, p) // accepted all the same
	for _, conn := range []*client{a, c} {
		_ = conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		if got, err := conn.do("INCR n"); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("INCR into the hole: got %q, %v, want %v", got, err, os.ErrDeadlineExceeded)
		}
		_ = conn.SetReadDeadline(time.Time{})
	}
	p.Blackhole(false)
	b.mustDo(t, "INCR n", ":3") // lost nothing
	for _, conn := range []*client{a, c} {
		if got, err := conn.do("INCR n"); !closed(err) {
			t.Errorf("INCR after the hole: got %q, %v, want a closed connection", got, err)
		}
	}
}

func TestProxy_Refuse(t *testing.T) {
	p := StartProxy(t, Start(t).Addr)
	a := dialProxy(t, p)
	a.mustDo(t, "INCR n", ":1")
	p.Refuse(true)
	p.Refuse(true) // does nothing
	if _, err := net.Dial("tcp", p.Addr); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial: got %v, want %v", err, syscall.ECONNREFUSED)
	}
	a.mustDo(t, "INCR n", ":2")
	if got := p.Open(); got != 1 {
		t.Errorf("Open: got %d, want 1", got)
	}
	p.CloseAll()
	if got, err := a.do("INCR n"); !closed(err) {
		t.Errorf("INCR after CloseAll: got %q, %v, want a closed connection", got, err)
	}
	p.Refuse(false)
	dialProxy(t, p).mustDo(t, "INCR n", ":3")
	if got := p.Accepted(); got != 2 {
		t.Errorf("Accepted: got %d, want 2", got)
	}
}

func TestProxy_ServerIsDown(t *testing.T) {
	s := Start(t)
	p := StartProxy(t, s.Addr)
	a := dialProxy(t, p)
	a.mustDo(t, "INCR n", ":1")
	s.Kill()
	if _, err := a.do("INCR n"); !closed(err) {
		t.Errorf("INCR: got %v, want a closed connection", err)
	}
	if _, err := dialProxy(t, p).do("INCR n"); !closed(err) {
		t.Errorf("INCR on a new connection: got %v, want a closed connection", err)
	}
	s.Restart()
	dialProxy(t, p).mustDo(t, "INCR n", ":1")
}

// closed reports whether err is that of a connection which the peer closed.
func closed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
