// SPDX-License-Identifier: Apache-2.0

// Package compat shows that official API clients understand the module's
// responses: they meet a running Caddy, built from this checkout.
package compat

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// The sites of the Caddyfile, in its order, and that of Caddyfile.closed.
const (
	plain   = iota // 1/h, nothing about retries
	retried        // 2/s, should_retry auto
	long           // 1/h, should_retry auto
	second         // 1/s
	busy           // one in progress
	full           // sheds all but critical requests
	closed         // no store, on_store_error closed
	numSites
)

// siteURLs are where the sites answer.
var siteURLs [numSites]string

// upstream answers the requests that Caddy lets pass.
var upstream = &api{holding: make(chan chan struct{})}

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// run builds Caddy, runs it with both files, and runs the tests.
func run(m *testing.M) (code int, err error) {
	dir, err := os.MkdirTemp("", "compat")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)

	program := filepath.Join(dir, "bin", "caddy")
	build := exec.Command("go", "build", "-C", "..", "-o", program, "./cmd/caddy")
	if out, err := build.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("%v: %w\n%s", build, err, out)
	}

	server := httptest.NewServer(upstream)
	defer server.Close()

	var caddies []*caddy
	defer func() {
		for _, c := range caddies {
			if stopErr := c.stop(); stopErr != nil || code != 0 {
				err = errors.Join(err, fmt.Errorf("caddy: %v\n%s", stopErr, &c.log))
			}
		}
	}()
	for config, urls := range map[string][]string{
		"Caddyfile":        siteURLs[:closed],
		"Caddyfile.closed": siteURLs[closed:],
	} {
		c := &caddy{cmd: exec.Command(program, "run", "--adapter", "caddyfile", "--config", config)}
		c.cmd.Env = append(os.Environ(),
			"UPSTREAM="+server.Listener.Addr().String(), "XDG_CONFIG_HOME="+dir, "XDG_DATA_HOME="+dir)
		if err := c.start(urls); err != nil {
			return 0, err
		}
		caddies = append(caddies, c)
		if get(http.DefaultClient, http.MethodGet, urls[0], "sk_live_ready") != nil {
			return 1, nil // Caddy has died: its log says why
		}
	}
	return m.Run(), nil
}

// caddy is a process of Caddy.
type caddy struct {
	cmd *exec.Cmd
	log bytes.Buffer
}

// start starts the process with an open listener for each URL, and sets the URL.
func (c *caddy) start(urls []string) error {
	for i := range urls {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer l.Close() // Caddy's copy stays open
		urls[i] = "http://" + l.Addr().String()
		file, err := l.(*net.TCPListener).File()
		if err != nil {
			return err
		}
		defer file.Close()
		c.cmd.ExtraFiles = append(c.cmd.ExtraFiles, file)
	}
	c.cmd.Stderr = &c.log
	return c.cmd.Start()
}

func (c *caddy) stop() error {
	_ = c.cmd.Process.Signal(os.Interrupt) // no effect if it has died: Wait tells
	return c.cmd.Wait()
}

// api is a small part of Stripe's API.
type api struct {
	holding chan chan struct{} // a request to /v1/hold sends a channel and waits until it is closed
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/v1/hold" {
		done := make(chan struct{})
		a.holding <- done
		<-done
	}
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprint(w, `{"id":"cus_1","object":"customer"}`)
}

// hold keeps one request of the key in progress at the site until the returned
// function is called.
func hold(t *testing.T, site int, key string) (release func()) {
	t.Helper()
	answered := make(chan error, 1)
	go func() {
		r, _ := http.NewRequest(http.MethodGet, siteURLs[site]+"/v1/hold", nil)
		r.Header.Set("Authorization", "Bearer "+key)
		res, err := http.DefaultClient.Do(r)
		if err == nil {
			res.Body.Close()
			if res.StatusCode != http.StatusOK {
				err = fmt.Errorf("GET /v1/hold: %s", res.Status)
			}
		}
		answered <- err
	}()
	select {
	case done := <-upstream.holding:
		return func() {
			close(done)
			if err := <-answered; err != nil {
				t.Error(err)
			}
		}
	case err := <-answered:
		t.Fatalf("the request to hold was not held: %v", err)
		return nil
	}
}

// keyOf returns an API key of the test's own: its buckets are full.
func keyOf(t *testing.T) string {
	return "sk_live_" + strings.Map(func(r rune) rune {
		if r == '/' || r == '_' {
			return 'x'
		}
		return r
	}, t.Name())
}

// exchange is one request and its response.
type exchange struct {
	sent, received time.Time
	status         int
	header         http.Header
	body           string
}

// recorder is an http.RoundTripper that remembers what went through it.
type recorder struct {
	mu        sync.Mutex // guards below
	exchanges []exchange
}

func (rec *recorder) client() *http.Client {
	return &http.Client{Transport: rec, Timeout: time.Minute}
}

func (rec *recorder) RoundTrip(r *http.Request) (*http.Response, error) {
	sent := time.Now()
	res, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	body, err := io.ReadAll(res.Body)
	res.Body.Close()
	if err != nil {
		return nil, err
	}
	res.Body = io.NopCloser(bytes.NewReader(body))

	rec.mu.Lock()
	defer rec.mu.Unlock()
	rec.exchanges = append(rec.exchanges, exchange{sent, time.Now(), res.StatusCode, res.Header, string(body)})
	return res, nil
}

// all returns the exchanges so far.
func (rec *recorder) all() []exchange {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	return rec.exchanges
}

// statuses returns the statuses of the exchanges so far.
func (rec *recorder) statuses() (codes []int) {
	for _, e := range rec.all() {
		codes = append(codes, e.status)
	}
	return codes
}

// attempts bounds the calls that a test makes until one is denied. All but one
// would do, if no machine ever paused for half a second between two calls.
const attempts = 100

// untilDenied calls until Caddy has answered 429 to one of the call's requests,
// and returns the exchanges and the error of that call. Calls before must
// succeed.
func untilDenied(t *testing.T, call func(*http.Client) error) ([]exchange, error) {
	t.Helper()
	for range attempts {
		rec := new(recorder)
		err := call(rec.client())
		for _, e := range rec.all() {
			if e.status == http.StatusTooManyRequests {
				return rec.all(), err
			}
		}
		if err != nil {
			t.Fatalf("a call failed that was not denied: %v, statuses %v", err, rec.statuses())
		}
	}
	t.Fatalf("none of %d calls was denied", attempts)
	return nil, nil
}

// get sends a plain request with the key.
func get(client *http.Client, method, url, key string) error {
	r, err := http.NewRequestWithContext(context.Background(), method, url, nil)
	if err != nil {
		return err
	}
	r.Header.Set("Authorization", "Bearer "+key)
	res, err := client.Do(r)
	if err != nil {
		return err
	}
	return res.Body.Close()
}
