// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func TestIsUpgrade(t *testing.T) {
	cases := []struct {
		name   string
		major  int
		method string
		proto  string
		header http.Header
		want   bool
	}{
		{"HTTP/1.1", 1, "GET", "HTTP/1.1", nil, false},
		{"HTTP/1.1 with Upgrade", 1, "GET", "HTTP/1.1", http.Header{"Upgrade": {"websocket"}}, true},
		{"HTTP/1.1 CONNECT", 1, "CONNECT", "HTTP/1.1", nil, false},
		{"HTTP/2", 2, "GET", "HTTP/2.0", nil, false},
		{"HTTP/2 with Upgrade, which means nothing there", 2, "GET", "HTTP/2.0", http.Header{"Upgrade": {"websocket"}}, false},
		{"HTTP/2 CONNECT", 2, "CONNECT", "HTTP/2.0", nil, false},
		{"HTTP/2 extended CONNECT", 2, "CONNECT", "HTTP/2.0", http.Header{":protocol": {"websocket"}}, true},
		{"HTTP/3 CONNECT", 3, "CONNECT", "HTTP/3.0", nil, false},
		{"HTTP/3 extended CONNECT", 3, "CONNECT", "websocket", nil, true},
	}
	for _, c := range cases {
		r := &http.Request{ProtoMajor: c.major, Method: c.method, Proto: c.proto, Header: c.header}
		if got := isUpgrade(r); got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

// hijacker is a ResponseWriter whose connection can be taken over.
type hijacker struct {
	*httptest.ResponseRecorder
	err error
}

func (h hijacker) Hijack() (net.Conn, *bufio.ReadWriter, error) { return nil, nil, h.err }

// A request that wants an upgrade is counted until it has got it, and so is one
// that never gets it.
func TestTakeover(t *testing.T) {
	const h1, h2 = 1, 2
	status := func(code int, header ...string) func(w http.ResponseWriter) {
		return func(w http.ResponseWriter) {
			for i := 0; i < len(header); i += 2 {
				w.Header().Set(header[i], header[i+1])
			}
			w.WriteHeader(code)
		}
	}
	hijack := func(w http.ResponseWriter) { _, _, _ = http.NewResponseController(w).Hijack() }
	cases := []struct {
		name     string
		major    int
		do       func(w http.ResponseWriter)
		hijacked error
		free     bool // what the shedders count
	}{
		{"nothing yet", h1, func(http.ResponseWriter) {}, nil, false},
		{"hijacked", h1, hijack, nil, true},
		{"hijacked in vain", h1, hijack, http.ErrNotSupported, false},
		{"announced, not hijacked", h1, status(101), nil, false},
		{"answered", h1, status(200), nil, false},
		{"answered with a body", h1, func(w http.ResponseWriter) { _, _ = io.WriteString(w, "a") }, nil, false},
		{"tunnel", h2, status(200), nil, true},
		{"tunnel after early hints", h2, func(w http.ResponseWriter) { w.WriteHeader(103); w.WriteHeader(200) }, nil, true},
		{"tunnel that writes", h2, func(w http.ResponseWriter) { _, _ = io.WriteString(w, "a") }, nil, true},
		{"tunnel that flushes", h2, func(w http.ResponseWriter) { w.(http.Flusher).Flush() }, nil, true},
		{"tunnel that copies", h2, func(w http.ResponseWriter) { _, _ = io.Copy(w, strings.NewReader("a")) }, nil, true},
		{"early hints alone", h2, status(103), nil, false},
		{"refused", h2, func(w http.ResponseWriter) { w.WriteHeader(403); _, _ = io.WriteString(w, "a") }, nil, false},
		{"a response with a length is no tunnel", h2, status(200, "Content-Length", "5"), nil, false},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			e := newEverything(t)
			w := hijacker{httptest.NewRecorder(), c.hijacked}
			r, _ := newRequest(http.MethodGet, "/", "X-Api-Key", "sk_live_1", "Upgrade", "websocket")
			if c.major == h2 {
				r, _ = newRequest(http.MethodConnect, "/", "X-Api-Key", "sk_live_1")
				r.ProtoMajor, r.Proto, r.Header[":protocol"] = 2, "HTTP/2.0", []string{"websocket"}
			}
			err := e.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
				c.do(w)
				want := int64(1)
				if c.free {
					want = 0
				}
				p := e.attached.pool
				got := [3]int64{p.nonCritical.Load(), p.workers.Status().InFlight, e.fleet.Status().InFlight}
				if got != [3]int64{want, want, want} {
					t.Errorf("in progress, workers, slots of the fleet: got %v, want %d of each", got, want)
				}
				// The lease stays as long as the request.
				other := httptest.NewRecorder()
				if passed, _, _ := e.request(t, other, nil); passed || other.Code != 429 {
					t.Errorf("a second request of the user: got %d, want 429", other.Code)
				}
				return nil
			}))
			if err != nil {
				t.Fatal(err)
			}
			e.nothingTaken(t)
		})
	}
}

// Asking for an upgrade is no way around the shedders.
func TestUpgradeIsShed(t *testing.T) {
	e := newEverything(t)
	var serve func(n int)
	serve = func(n int) { // the nth of those in progress at once
		w := httptest.NewRecorder()
		r, _ := newRequest(http.MethodGet, "/", "Upgrade", "x") // without a key: only the shedders count
		if err := e.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
			if n < 5 {
				serve(n + 1)
			}
			return nil
		})); err != nil {
			t.Error(err)
		}
		if want := map[bool]int{true: 200, false: 503}[n <= 2]; w.Code != want {
			t.Errorf("number %d at once, of two slots: got %d, want %d", n, w.Code, want)
		}
	}
	serve(1)
	e.nothingTaken(t)
}

// What the writer beneath can do, a request that wants an upgrade can use, and
// only such a request has its writer wrapped.
func TestTakeover_Writer(t *testing.T) {
	e := newEverything(t)
	var got http.ResponseWriter
	next := caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		got = w
		return nil
	})
	w := httptest.NewRecorder()
	plain, _ := newRequest(http.MethodGet, "/")
	upgrade, _ := newRequest(http.MethodGet, "/", "Upgrade", "websocket")
	for _, r := range []*http.Request{plain, upgrade} {
		if err := e.ServeHTTP(w, r, next); err != nil {
			t.Fatal(err)
		}
		if r == plain && got != http.ResponseWriter(w) {
			t.Errorf("the writer of a plain request is %T", got)
		}
	}
	if got.(interface{ Unwrap() http.ResponseWriter }).Unwrap() != http.ResponseWriter(w) {
		t.Error("Unwrap does not return the writer beneath")
	}
	if err := http.NewResponseController(got).Flush(); err != nil || !w.Flushed {
		t.Errorf("Flush: %v, flushed: %v", err, w.Flushed)
	}
	if _, _, err := http.NewResponseController(got).Hijack(); !errors.Is(err, http.ErrNotSupported) {
		t.Errorf("Hijack of what cannot be: got %v, want http.ErrNotSupported", err)
	}
}
