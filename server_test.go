// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

func init() {
	caddy.RegisterModule(new(failingApp))
	caddy.RegisterModule(new(gate))
	httpcaddyfile.RegisterHandlerDirective("test_gate", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		h.Next()
		return new(gate), nil
	})
}

// failingApp is an app that provisions but does not start.
type failingApp struct{}

func (*failingApp) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "failing_app", New: func() caddy.Module { return new(failingApp) }}
}
func (*failingApp) Start() error { return errors.New("failing_app never starts") }
func (*failingApp) Stop() error  { return nil }

// gate is a handler that holds requests with X-Hold until the test lets them go.
type gate struct{}

var gates sync.Map // X-Hold -> *hold

type hold struct{ entered, leave chan struct{} }

// newHold makes requests with X-Hold: name wait for close(leave).
func newHold(t *testing.T, name string) *hold {
	h := &hold{entered: make(chan struct{}, 1000), leave: make(chan struct{})}
	gates.Store(name, h)
	t.Cleanup(func() { gates.Delete(name) })
	return h
}

func (*gate) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.test_gate", New: func() caddy.Module { return new(gate) }}
}

func (*gate) ServeHTTP(w http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
	if v, ok := gates.Load(r.Header.Get("X-Hold")); ok {
		h := v.(*hold)
		h.entered <- struct{}{}
		<-h.leave
	}
	_, err := io.WriteString(w, "ok")
	return err
}

// server is a Caddy in this process; there is one at a time. Each config listens
// on a port of its own: Caddy does not wait until the server of the last one has
// stopped, so on its port a request may still get an answer of the old config, or
// a connection that is being closed.
type server struct {
	t    *testing.T
	port int    // of the config in force
	data string // Caddy's storage: what one test switches is nothing to another
	hold *http.Client
}

func newServer(t *testing.T) *server {
	t.Helper()
	s := &server{t: t, data: t.TempDir(), hold: &http.Client{}}
	t.Cleanup(func() {
		s.hold.CloseIdleConnections()
		if err := caddy.Stop(); err != nil {
			t.Errorf("caddy.Stop: %v", err)
		}
	})
	return s
}

// config adapts a global option block and what a site has in it, which listens on
// a port of its own.
func (s *server) config(global, site string) []byte {
	s.t.Helper()
	return s.configAt(redistest.FreePort(s.t), global, site)
}

func (s *server) configAt(port int, global, site string) []byte {
	s.t.Helper()
	text := fmt.Sprintf("{\n\tadmin off\n\tpersist_config off\n\tauto_https off\n\tskip_install_trust\n\tstorage file_system %s\n\torder test_gate last\n%s\n}\nhttp://127.0.0.1:%d {\n%s\n\ttest_gate\n}\n", s.data, global, port, site)
	adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		s.t.Fatalf("adapt: %v\n%s", err, text)
	}
	return adapted
}

// load puts a config in force.
func (s *server) load(global, site string) {
	s.t.Helper()
	s.port = redistest.FreePort(s.t)
	s.loadInPlace(global, site)
}

// loadInPlace is load on the port of the last config.
func (s *server) loadInPlace(global, site string) {
	s.t.Helper()
	if err := caddy.Load(s.configAt(s.port, global, site), true); err != nil {
		s.t.Fatalf("caddy.Load: %v", err)
	}
}

// get sends a request for the key and returns the status.
func (s *server) get(key string, header ...string) int {
	s.t.Helper()
	status, err := s.try(key, header...)
	if err != nil {
		s.t.Fatalf("get %s: %v", key, err)
	}
	return status
}

func (s *server) try(key string, header ...string) (int, error) {
	req, err := http.NewRequest(http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/", s.port), nil)
	if err != nil {
		return 0, err
	}
	req.Header.Set("Authorization", "Bearer "+key)
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := s.hold.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	return res.StatusCode, err
}

func (s *server) want(key string, statuses ...int) {
	s.t.Helper()
	for i, want := range statuses {
		if got := s.get(key); got != want {
			s.t.Fatalf("request %d with %s: got status %d, want %d", i+1, key, got, want)
		}
	}
}

// held starts a request that stays in progress until release is called.
func (s *server) held(name, key string) (release func() int) {
	s.t.Helper()
	h := newHold(s.t, name)
	type answer struct {
		status int
		err    error
	}
	ended := make(chan answer, 1)
	go func() {
		status, err := s.try(key, "X-Hold", name)
		ended <- answer{status, err}
	}()
	select {
	case <-h.entered:
	case a := <-ended:
		s.t.Fatalf("request to be held ended with %d, %v", a.status, a.err)
	}
	return func() int { close(h.leave); return (<-ended).status }
}

func app(redis *redistest.Server) string {
	if redis == nil {
		return ""
	}
	return fmt.Sprintf("\tstripe_ratelimit {\n\t\tredis %s {\n\t\t\ttimeout 5s\n\t\t}\n\t\tkey_secret test\n\t}", redis.Addr)
}

// onBothStores runs a test on the memory store and on Redis.
func onBothStores(t *testing.T, test func(t *testing.T, s *server, global string)) {
	t.Run("memory", func(t *testing.T) { test(t, newServer(t), app(nil)) })
	t.Run("redis", func(t *testing.T) {
		redis := redistest.Start(t)
		test(t, newServer(t), app(redis))
	})
}

// eventually waits for what another goroutine is about to do.
func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatal("still not so after 20 s")
		}
		runtime.Gosched()
	}
}
