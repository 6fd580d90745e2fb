// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

var streamsFlag = flag.Int("streams", 2000, "how many streams the client of TestHostile_Streams opens at once")

// A client opens very many streams over a few connections, and as many again that
// it resets at once: its limit is exact, and when it has gone nothing is left of it.
func TestHostile_Streams(t *testing.T) {
	const streams, limit = 250, 20 // as many streams as Caddy lets a connection have
	connections := max(1, *streamsFlag/streams)
	redis := redistest.Start(t)
	up := newUpstream(t)
	c := start(t, config{redis: redis.Addr, site: fmt.Sprintf("stripe_ratelimit {\n concurrency %d lease 10m \n}\n reverse_proxy %s {\n transport http {\n keepalive off \n}\n}", limit, up.addr)})
	c.get(t, "/", bearer("sk_live_before")...).want(t, http.StatusOK)
	before := c.use(t)
	before.ours = map[string]int{"(*Redis).flushLoop": 1, "(*Redis).renewLoop": 1} // whatever was under way

	calls := make([]*call, connections*streams)
	for i := range calls {
		calls[i] = up.call()
	}
	answer := sync.OnceFunc(func() {
		for _, call := range calls {
			close(call.answer)
		}
	})
	begin := time.Now()
	var passed, denied, odd atomic.Int64
	var wg sync.WaitGroup
	var clients []*http.Client
	for i := range connections {
		client := newClient(t, true)
		clients = append(clients, client)
		for _, call := range calls[i*streams:][:streams] {
			wg.Go(func() {
				a, err := c.try(t.Context(), client, http.MethodGet, "/hold", call.header(bearer("sk_live_streams")...)...)
				switch {
				case err == nil && a.status == http.StatusOK:
					passed.Add(1)
				case err == nil && a.status == http.StatusTooManyRequests:
					if denied.Add(1) == int64(len(calls)-limit) {
						answer()
					}
				default:
					if odd.Add(1) == 1 {
						t.Errorf("got %d, %v", a.status, err)
					}
					answer() // nobody needs to wait
				}
			})
		}
	}
	wg.Wait()
	t.Logf("%d streams in %v", len(calls), time.Since(begin))
	if passed.Load() != limit || up.peak() != limit {
		t.Errorf("%d passed, %d denied, %d at once; want %d passed, all at once", passed.Load(), denied.Load(), up.peak(), limit)
	}
	for _, client := range clients {
		client.CloseIdleConnections()
	}

	for range connections {
		wg.Go(func() {
			if err := resetStreams(c.addr(), streams); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	eventually(t, patience, "all leases given back", func() bool { return len(slots(t, redis)) == 0 })
	c.settles(t, before, 30) // connections to Redis
	c.get(t, "/", bearer("sk_live_streams")...).want(t, http.StatusOK)
	c.noStoreErrors(t)
}

// h2 is a connection on which a test writes its own frames.
type h2 struct {
	net.Conn
	*http2.Framer
	text    bytes.Buffer
	encoder *hpack.Encoder
}

func dialH2(addr string) (*h2, error) {
	conn, err := dial(addr)
	if err != nil {
		return nil, err
	}
	c := &h2{Conn: conn, Framer: http2.NewFramer(conn, bufio.NewReader(conn))}
	c.encoder = hpack.NewEncoder(&c.text)
	c.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if _, err = io.WriteString(conn, http2.ClientPreface); err == nil {
		err = c.WriteSettings()
	}
	return c, err
}

// open opens a stream with the fields, names and values in turn.
func (c *h2) open(stream uint32, fields ...string) error {
	c.text.Reset()
	for i := 0; i < len(fields); i += 2 {
		if err := c.encoder.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]}); err != nil {
			return err
		}
	}
	return c.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: c.text.Bytes(), EndHeaders: true, EndStream: fields[1] == "GET"})
}

// resetStreams opens streams and resets each at once. The server may end the
// connection for that.
func resetStreams(addr string, n uint32) error {
	c, err := dialH2(addr)
	if err != nil {
		return err
	}
	defer c.Close()
	go func() { _, _ = io.Copy(io.Discard, c.Conn) }() // so that the server can write
	for i := range n {
		err := c.open(2*i+1, ":method", "GET", ":scheme", "http", ":authority", addr, ":path", "/hold", "authorization", "Bearer sk_live_streams")
		if err == nil {
			err = c.WriteRSTStream(2*i+1, http2.ErrCodeCancel)
		}
		if err != nil {
			return nil
		}
	}
	return nil
}

// A WebSocket over HTTP/2 (RFC 8441) holds its lease as long as it lasts, and is
// no work in progress once the tunnel stands.
func TestHostile_ExtendedConnect(t *testing.T) {
	redis := redistest.Start(t)
	up := newUpstream(t)
	c := start(t, config{
		redis: redis.Addr,
		env:   []string{"GODEBUG=http2xconnect=1"},
		site:  "stripe_ratelimit {\n concurrency 1 lease 10m \n workers 10 \n}\n reverse_proxy " + up.addr,
	})
	call := up.call()
	conn, err := dialH2(c.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	err = conn.open(1, ":method", "CONNECT", ":protocol", "websocket", ":scheme", "http", ":authority", c.addr(), ":path", "/socket",
		"sec-websocket-version", "13", "x-call", fmt.Sprint(call.number), "authorization", "Bearer sk_live_tunnel")
	if err != nil {
		t.Fatal(err)
	}
	heard := func(until func(http2.Frame) bool) {
		t.Helper()
		for {
			f, err := conn.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			switch f := f.(type) {
			case *http2.SettingsFrame:
				if on, _ := f.Value(http2.SettingEnableConnectProtocol); !f.IsAck() && on != 1 {
					t.Fatal("Caddy does not offer extended CONNECT")
				}
			case *http2.RSTStreamFrame, *http2.GoAwayFrame:
				t.Fatalf("got %v", f)
			}
			if until(f) {
				return
			}
		}
	}
	heard(func(f http2.Frame) bool {
		h, ok := f.(*http2.MetaHeadersFrame)
		if ok && h.PseudoValue("status") != "200" {
			t.Fatalf("got status %s, want 200", h.PseudoValue("status"))
		}
		return ok
	})
	if err := conn.WriteData(1, false, []byte("ping")); err != nil {
		t.Fatal(err)
	}
	said := ""
	heard(func(f http2.Frame) bool {
		if d, ok := f.(*http2.DataFrame); ok {
			said += string(d.Data())
		}
		return said == "ping"
	})
	if n := c.metric(t, "in_flight"); n != 0 {
		t.Errorf("in_flight: got %v, want 0", n)
	}
	c.get(t, "/", bearer("sk_live_tunnel")...).want(t, http.StatusTooManyRequests)
	if err := conn.WriteData(1, true, nil); err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	eventually(t, patience, "the lease given back", func() bool { return len(slots(t, redis)) == 0 })
	eventually(t, patience, "let in again", func() bool {
		return c.get(t, "/", bearer("sk_live_tunnel")...).status == http.StatusOK
	})
	c.noStoreErrors(t)
}

// Clients that send their bodies or read their answers slowly, or not at all, hold
// their own slots and nobody else's, until Caddy's timeouts end them.
func TestHostile_SlowClients(t *testing.T) {
	redis := redistest.Start(t)
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.URL.Path == "/large" {
			for range 512 { // more than fits into all buffers on its way
				if _, err := w.Write(make([]byte, 64<<10)); err != nil {
					return
				}
			}
		}
	}))
	t.Cleanup(func() {
		up.CloseClientConnections()
		up.Close()
	})
	site := "stripe_ratelimit slow {\n concurrency 2 lease 10m \n}\n reverse_proxy " + strings.TrimPrefix(up.URL, "http://")
	ways := map[string]string{
		"sender": "POST / HTTP/1.1\r\nHost: HOST\r\nAuthorization: Bearer sk_live_slow\r\nContent-Length: 1000000\r\n\r\nx",
		"reader": "GET /large HTTP/1.1\r\nHost: HOST\r\nAuthorization: Bearer sk_live_slow\r\n\r\n",
	}
	slow := func(t *testing.T, c *caddy, request string) {
		t.Helper()
		had := c.metric(t, "requests_total", `outcome="allowed"`)
		for range 2 {
			conn, err := dial(c.addr())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = conn.Close() })
			_ = conn.(*net.TCPConn).SetReadBuffer(4 << 10)
			if _, err := io.WriteString(conn, strings.Replace(request, "HOST", c.addr(), 1)); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, patience, "both slots taken", func() bool {
			return c.metric(t, "requests_total", `outcome="allowed"`) == had+2
		})
	}
	for name, request := range ways {
		t.Run(name, func(t *testing.T) {
			t.Run("hold no more than their share", func(t *testing.T) {
				c := start(t, config{redis: redis.Addr, site: site})
				slow(t, c, request)
				for range 20 {
					c.get(t, "/", bearer("sk_live_slow")...).want(t, http.StatusTooManyRequests)
					c.get(t, "/", bearer("sk_live_other")...).want(t, http.StatusOK)
				}
				c.noStoreErrors(t)
				c.Kill()
				rdb := redis.Client()
				defer rdb.Close()
				rdb.FlushAll(t.Context())
			})
			t.Run("are ended by Caddy's timeouts", func(t *testing.T) {
				c := start(t, config{redis: redis.Addr, site: site, servers: "timeouts {\n read_body 1s \n write 1s \n}"})
				slow(t, c, request)
				eventually(t, patience, "all leases given back", func() bool { return len(slots(t, redis)) == 0 })
				c.get(t, "/", bearer("sk_live_slow")...).want(t, http.StatusOK)
				c.noStoreErrors(t)
			})
		})
	}
}
