// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// upstream is an API that counts what is in progress in it.
//
// It counts honestly: never what Caddy knows to be over. A call is over here
// before its last byte is written, because Caddy may be done with it from then
// on. And a call that its client aborts is over when the client decides to,
// because Caddy may learn of that before the upstream does. So there are
// never more calls in progress here than leases are held, and less only for
// moments.
type upstream struct {
	addr string

	mu    sync.Mutex       // guards below
	calls map[string]*call // by number
	now   int              // calls in progress
	most  int              // so many at once
	full  int              // see fillUp
	gate  chan struct{}
	last  int
}

// call is one request as client and upstream see it.
type call struct {
	up      *upstream
	number  int
	entered chan struct{} // closed when the upstream has it
	answer  chan struct{} // closed: /hold may answer

	counted, over bool // guarded by up.mu
}

func newUpstream(t testing.TB) *upstream {
	up := &upstream{calls: map[string]*call{}, gate: make(chan struct{})}
	close(up.gate)
	// Reports of what is cut on purpose would only be in the way.
	server := httptest.NewServer(up)
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	up.addr = strings.TrimPrefix(server.URL, "http://")
	return up
}

// fillUp holds all calls that enter from now on until n are in progress.
func (up *upstream) fillUp(n int) {
	up.mu.Lock()
	defer up.mu.Unlock()
	up.full, up.gate = n, make(chan struct{})
}

// opened is closed when calls are held no more.
func (up *upstream) opened() <-chan struct{} {
	up.mu.Lock()
	defer up.mu.Unlock()
	return up.gate
}

// call announces a call, which a client makes by sending header.
func (up *upstream) call() *call {
	up.mu.Lock()
	defer up.mu.Unlock()
	up.last++
	c := &call{up: up, number: up.last, entered: make(chan struct{}), answer: make(chan struct{})}
	up.calls[strconv.Itoa(c.number)] = c
	return c
}

// header is that of a request by which it is known as this call.
func (c *call) header(more ...string) []string { return append(more, "X-Call", strconv.Itoa(c.number)) }

// enter counts the call and waits until it may go on.
func (c *call) enter(r *http.Request) {
	up := c.up
	up.mu.Lock()
	if !c.over && !c.counted {
		c.counted = true
		up.now++
		up.most = max(up.most, up.now)
	}
	close(c.entered)
	gate := up.gate
	if up.full > 0 && up.now >= up.full {
		up.full = 0
		close(gate)
	}
	up.mu.Unlock()
	select {
	case <-gate:
	case <-r.Context().Done():
	}
}

// leave ends the call in the eyes of the upstream. More than once does nothing.
func (c *call) leave() {
	c.up.mu.Lock()
	defer c.up.mu.Unlock()
	if c.counted && !c.over {
		c.up.now--
	}
	c.over = true
}

// peak returns how many calls were in progress at once.
func (up *upstream) peak() int {
	up.mu.Lock()
	defer up.mu.Unlock()
	return up.most
}

// ServeHTTP answers by path, calls and other requests.
func (up *upstream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	up.mu.Lock()
	c := up.calls[r.Header.Get("X-Call")]
	delete(up.calls, r.Header.Get("X-Call"))
	up.mu.Unlock()
	if c == nil {
		fmt.Fprintln(w, "ok")
		return
	}
	c.enter(r)
	defer c.leave()

	switch r.URL.Path {
	case "/work": // takes a moment
		c.wait(r, 10*time.Millisecond)
	case "/hold", "/hold/other": // until the test lets it go
		select {
		case <-c.answer:
		case <-r.Context().Done():
		}
	case "/large":
		c.wait(r, time.Millisecond)
		c.leave()
		_, _ = w.Write(make([]byte, 20_000)) // does not fit buffers on its way
		return
	case "/panic": // in the middle of the body
		c.wait(r, time.Millisecond)
		fmt.Fprintln(w, "half of")
		_ = http.NewResponseController(w).Flush()
		c.leave()
		panic(http.ErrAbortHandler)
	case "/events": // a stream that only its client ends
		w.Header().Set("Content-Type", "text/event-stream")
		for n := 0; r.Context().Err() == nil; n++ {
			fmt.Fprintf(w, "data: %d\n\n", n)
			_ = http.NewResponseController(w).Flush()
			c.wait(r, 2*time.Millisecond)
		}
		return
	case "/socket": // echoes until its client closes it
		c.echo(w)
		return
	}
	c.leave()
	fmt.Fprintln(w, "ok")
}

func (c *call) wait(r *http.Request, d time.Duration) {
	select {
	case <-time.After(d):
	case <-r.Context().Done():
	}
}

// echo is as much of a WebSocket as a proxy sees of it.
func (c *call) echo(w http.ResponseWriter) {
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(err)
	}
	defer conn.Close()
	_, _ = conn.Write([]byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"))
	_, _ = io.Copy(conn, io.MultiReader(io.LimitReader(rw, int64(rw.Reader.Buffered())), conn))
}

// socket opens /socket, says something, hears it and closes.
func (c *caddy) socket(call *call, header []string) (status int, err error) {
	s, err := c.upgrade(call, header)
	if s == nil {
		return 0, err
	}
	defer s.Close()
	if err != nil || s.status != http.StatusSwitchingProtocols {
		return s.status, err
	}
	err = s.say("ping")
	call.leave()
	return s.status, err
}

// socket is a connection that was to be upgraded.
type socket struct {
	net.Conn
	r      *bufio.Reader
	status int
	header http.Header
}

// upgrade asks for /socket; without an answer there is no socket.
func (c *caddy) upgrade(call *call, header []string) (*socket, error) {
	conn, err := dial(c.addr())
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequest(http.MethodGet, "http://"+c.addr()+"/socket", nil)
	if err == nil {
		header = call.header(append(header, "Connection", "Upgrade", "Upgrade", "websocket")...)
		for i := 0; i < len(header); i += 2 {
			req.Header.Add(header[i], header[i+1])
		}
		err = req.Write(conn)
	}
	s := &socket{Conn: conn, r: bufio.NewReader(conn)}
	if err == nil {
		var resp *http.Response
		if resp, err = http.ReadResponse(s.r, req); err == nil {
			s.status, s.header = resp.StatusCode, resp.Header
			return s, nil
		}
	}
	_ = conn.Close()
	return nil, err
}

// say says something and hears it.
func (s *socket) say(text string) error {
	if _, err := io.WriteString(s, text); err != nil {
		return err
	}
	heard := make([]byte, len(text))
	_, err := io.ReadFull(s.r, heard)
	if err == nil && string(heard) != text {
		err = fmt.Errorf("the socket says %q, want %q", heard, text)
	}
	return err
}
