// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// taken is what a request has taken and has to give back.
type taken struct {
	admission limiters.Admission
	local     func() // gives back what this instance has decided alone; nil: nothing
	held
}

// held is what the shedders count of a request.
type held struct {
	slot shedding.Criticality // of the fleet; zero: none
	of   *shared              // of whose fleet; nil: it was not asked

	pool  *pool // that it is in progress in; nil: it is not
	class shedding.Criticality
}

// enter counts a request that goes on to the next handler.
func (h *held) enter(p *pool, c shedding.Criticality) {
	p.enter(c)
	h.pool, h.class = p, c
}

// leave gives all back, each part whatever becomes of the others.
func (h *held) leave() {
	had := *h
	*h = held{}
	if had.pool != nil {
		_ = safely.Do("release", func() { had.pool.leave(had.class) })
	}
	if had.of == nil {
		return
	}
	if had.slot != 0 {
		_ = safely.Do("release", func() { had.of.fleet.Release(had.slot) })
	}
	had.of.leave()
}

// isUpgrade reports whether the request wants its connection for another
// protocol, such as WebSocket: by Upgrade, or by extended CONNECT (RFC 8441, RFC
// 9220) its stream. Wanting it is up to the client, and proves nothing.
func isUpgrade(r *http.Request) bool {
	if r.ProtoMajor <= 1 {
		return len(r.Header["Upgrade"]) > 0
	}
	return r.Method == http.MethodConnect && (r.Header.Get(":protocol") != "" || !strings.HasPrefix(r.Proto, "HTTP/"))
}

// takeover is the ResponseWriter of a request that wants an upgrade. Such a
// request is in progress like any other until its connection is taken over: what
// follows may last for days and says nothing about how busy the instance is.
type takeover struct {
	*caddyhttp.ResponseWriterWrapper
	tunnel bool // the stream is taken over with a 2xx, where there is no Hijack
	begun  bool // the header of the response has been written

	once sync.Once
	held held
}

// leave gives back what the shedders count. It may be called from any goroutine.
func (u *takeover) leave() { u.once.Do(u.held.leave) }

// Hijack implements http.Hijacker.
func (u *takeover) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(u.ResponseWriter).Hijack()
	if err == nil {
		u.leave()
	}
	return conn, rw, err
}

// WriteHeader implements http.ResponseWriter. A response with a length is no
// tunnel (RFC 9110, section 9.3.6), whatever its request wanted.
func (u *takeover) WriteHeader(status int) {
	u.ResponseWriter.WriteHeader(status)
	if !u.begun && u.tunnel && status/100 == 2 && u.Header().Get("Content-Length") == "" {
		u.leave()
	}
	u.begun = u.begun || status >= 200
}

func (u *takeover) begin() {
	if !u.begun {
		u.WriteHeader(http.StatusOK)
	}
}

// Write implements http.ResponseWriter.
func (u *takeover) Write(b []byte) (int, error) {
	u.begin()
	return u.ResponseWriter.Write(b)
}

// ReadFrom implements io.ReaderFrom.
func (u *takeover) ReadFrom(r io.Reader) (int64, error) {
	u.begin()
	return u.ResponseWriterWrapper.ReadFrom(r)
}

// FlushError is what http.ResponseController flushes with.
func (u *takeover) FlushError() error {
	u.begin()
	return http.NewResponseController(u.ResponseWriter).Flush()
}

// Flush implements http.Flusher.
func (u *takeover) Flush() { _ = u.FlushError() }

var (
	_ http.Hijacker = (*takeover)(nil)
	_ http.Flusher  = (*takeover)(nil)
	_ io.ReaderFrom = (*takeover)(nil)
)
