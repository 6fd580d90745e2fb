// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// talk is what clients have seen.
type talk struct {
	mu      sync.Mutex // guards below
	counts  map[string]int
	wrong   []string
	broken  []broken
	excused []excuse
	keys    map[string]int // number of the identity of an API key
}

// broken is a request that got no response.
type broken struct {
	caddy    int
	from, to int64
	err      error
}

// excuse is a time in which a Caddy may break connections: it ends, or the server
// of a config does.
type excuse struct {
	caddy int
	Span
}

// excuse begins one, which ends some time after it is called.
func (s *soak) excuse(c *caddy) (end func()) {
	from := now()
	return func() {
		s.talk.mu.Lock()
		defer s.talk.mu.Unlock()
		// The grace period of an old config's server, and what it takes to notice.
		s.excused = append(s.excused, excuse{c.number, Span{from, now() + 8*second}})
	}
}

func newClient(h2c bool) *http.Client {
	transport := &http.Transport{DisableCompression: true, Protocols: new(http.Protocols)}
	transport.Protocols.SetHTTP1(!h2c)
	transport.Protocols.SetUnencryptedHTTP2(h2c)
	return &http.Client{Transport: transport, Timeout: patience}
}

// response is what matters of one.
type response struct {
	status        int
	outcome, code string
	header        http.Header
}

// request makes a request with an API key, if there is one.
func (s *soak) request(ctx context.Context, c *caddy, method, path, key string) *http.Request {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+c.addr()+path, nil)
	if err != nil {
		panic(err)
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	return req
}

// get sends a GET and judges the response.
func (s *soak) get(client *http.Client, c *caddy, path, key string) (response, error) {
	return s.do(client, c, s.request(context.Background(), c, http.MethodGet, path, key), key)
}

// do sends a request, reads the response and judges it.
func (s *soak) do(client *http.Client, c *caddy, req *http.Request, key string) (response, error) {
	sent := now()
	resp, err := client.Do(req)
	if err == nil {
		defer resp.Body.Close()
		var body []byte
		received := now()
		if body, err = io.ReadAll(resp.Body); err == nil {
			return s.judge(c, req, resp, body, key, sent, received), nil
		}
	}
	if req.Context().Err() == nil {
		s.broke(c, sent, err)
	} else {
		s.count(req, "aborted")
	}
	return response{}, err
}

func (s *soak) broke(c *caddy, sent int64, err error) {
	s.talk.mu.Lock()
	defer s.talk.mu.Unlock()
	s.broken = append(s.broken, broken{c.number, sent, now(), err})
}

func (s *soak) count(req *http.Request, what string) {
	s.talk.mu.Lock()
	defer s.talk.mu.Unlock()
	s.counts[req.URL.Path+" "+what]++
}

// judge complains of a response that no config gives to the request, and notes
// what it says of the limits.
func (s *soak) judge(c *caddy, req *http.Request, resp *http.Response, body []byte, key string, sent, received int64) response {
	r := response{status: resp.StatusCode, outcome: resp.Header.Get("X-Outcome"), header: resp.Header}
	if bytes.HasPrefix(body, []byte("{")) {
		var e struct{ Error struct{ Code string } }
		_ = json.Unmarshal(body, &e)
		r.code = e.Error.Code
	}
	path := req.URL.Path
	critical := path == "/charges" && strings.HasPrefix(key, "sk_live_")
	right := false
	switch r.status {
	case http.StatusOK, http.StatusSwitchingProtocols:
		right = r.outcome == "allowed" || r.outcome == "store_error" || r.outcome == "exempt" && path == "/health" ||
			r.status == http.StatusSwitchingProtocols
	case http.StatusTooManyRequests:
		right = r.outcome == "denied" && r.code == "rate_limit" && r.header.Get("Retry-After") >= "1" &&
			r.header.Get("Stripe-Rate-Limited-Reason") != "" && path != "/health"
	case http.StatusServiceUnavailable:
		right = r.outcome == "shed" && r.code == "overloaded" && !critical && !strings.HasPrefix(path, "/closed/") && path != "/health" ||
			r.outcome == "store_error" && r.code == "limiter_unavailable" && strings.HasPrefix(path, "/closed/")
	}
	s.count(req, fmt.Sprintf("%d %s", r.status, r.outcome))
	if !right {
		s.talk.mu.Lock()
		s.wrong = append(s.wrong, fmt.Sprintf("%s %s: %d, outcome %q, %v, %.200s", req.Method, path, r.status, r.outcome, r.header, body))
		s.talk.mu.Unlock()
	}
	if key != "" && path != "/health" && !strings.HasPrefix(path, "/closed/") {
		d := Decision{Instance: c.number, Limit: soakRate, Outcome: limiters.NotEvaluated, Sent: sent, Received: received}
		switch r.outcome {
		case "allowed":
			d.Outcome, d.Taken = limiters.Allowed, true
		case "store_error":
			d.Outcome = limiters.Unknown
		}
		s.note(key, d)
	}
	return r
}

// note puts a decision into the history.
func (s *soak) note(key string, d Decision) {
	s.talk.mu.Lock()
	n, ok := s.keys[key]
	if !ok {
		n = len(s.keys)
		s.keys[key] = n
	}
	s.talk.mu.Unlock()
	d.Identity = n
	s.ground.mu.Lock()
	s.h.Decisions = append(s.h.Decisions, d)
	s.ground.mu.Unlock()
}

// traffic sends all sorts of requests while something is done.
func (s *soak) traffic(stream uint64, during func()) {
	stop := make(chan struct{})
	var wg sync.WaitGroup
	client := func(n int, pause time.Duration, once func(*http.Client, *caddy, *rand.Rand)) {
		for range n {
			stream++
			rng := rand.New(rand.NewPCG(s.seed, stream))
			client := newClient(stream%2 == 0)
			wg.Go(func() {
				defer client.CloseIdleConnections()
				for {
					select {
					case <-stop:
						return
					case <-time.After(upTo(rng, 2*pause)):
						once(client, s.caddys[rng.IntN(len(s.caddys))], rng)
					}
				}
			})
		}
	}
	const ms = time.Millisecond
	client(8, 10*ms, s.browse)
	client(2, 2*ms, s.abuse)
	client(3, 20*ms, s.abort)
	client(8, 20*ms, s.listen)
	client(8, 20*ms, s.chat)
	client(2, 10*ms, func(client *http.Client, c *caddy, rng *rand.Rand) {
		_, _ = s.get(client, c, "/closed/", fmt.Sprint("sk_live_closed_", rng.IntN(3)))
	})
	during()
	close(stop)
	wg.Wait()
}

// browse is one of very many who ask for this and that.
func (s *soak) browse(client *http.Client, c *caddy, rng *rand.Rand) {
	path := []string{"/", "/", "/", "/slow", "/slow", "/search", "/charges", "/charges", "/health"}[rng.IntN(9)]
	method := http.MethodGet
	if path == "/charges" {
		method = http.MethodPost
	}
	n := int(3000 * rng.Float64() * rng.Float64() * rng.Float64())
	key := fmt.Sprint("sk_live_", n)
	switch rng.IntN(20) {
	case 0:
		key = fmt.Sprint("sk_test_", n)
	case 1:
		key = "" // the client's address
	case 2:
		key = strings.Repeat("long", 1+rng.IntN(4000)) // all of them are one and the same person's, or nobody's
	case 3:
		key = "odd \"}{\\ \x80\xff" + fmt.Sprint(n)
	}
	_, _ = s.do(client, c, s.request(context.Background(), c, method, path, key), key)
}

// abuse is one who never has enough.
func (s *soak) abuse(client *http.Client, c *caddy, _ *rand.Rand) {
	_, _ = s.get(client, c, "/", "sk_live_abuser")
}

// abort does not wait for the answer.
func (s *soak) abort(client *http.Client, c *caddy, rng *rand.Rand) {
	ctx, cancel := context.WithTimeout(context.Background(), upTo(rng, 30*time.Millisecond))
	defer cancel()
	key := fmt.Sprint("sk_live_hasty_", rng.IntN(10))
	_, _ = s.do(client, c, s.request(ctx, c, http.MethodGet, "/slow", key), key)
}

// held notes that a request of a key was in progress, from its admission until a
// time of which is known that it was still.
func (s *soak) held(c *caddy, resp *http.Response, key string, sent, received, until int64) {
	if resp.Header.Get("X-Outcome") == "allowed" {
		s.note(key, Decision{Instance: c.number, Limit: soakHeld, Outcome: limiters.Allowed, Taken: true, Sent: sent, Received: received, Released: until})
	}
}

// listen follows a stream of events, for longer than a lease lasts or not.
func (s *soak) listen(client *http.Client, c *caddy, rng *rand.Rand) {
	const key = "sk_live_listener"
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req := s.request(ctx, c, http.MethodGet, "/events", key)
	sent := now()
	resp, err := client.Do(req)
	if err != nil {
		s.broke(c, sent, err)
		return
	}
	defer resp.Body.Close()
	received := now()
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(resp.Body)
		s.judge(c, req, resp, body, key, sent, received)
		return
	}
	s.judge(c, req, resp, nil, key, sent, received)
	end, told := received+upTo(rng, 3*time.Second).Microseconds(), sent // or until later, as far as it tells
	for lines := bufio.NewReader(resp.Body); now() < end; {
		line, err := lines.ReadString('\n')
		if err != nil {
			s.broke(c, sent, err)
			break
		}
		_, _ = fmt.Sscanf(line, "data: %d", &told)
	}
	s.held(c, resp, key, sent, received, told)
}

// chat holds a WebSocket open.
func (s *soak) chat(_ *http.Client, c *caddy, rng *rand.Rand) {
	const key = "sk_live_chatter"
	req := s.request(context.Background(), c, http.MethodGet, "/socket", key)
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "websocket")
	sent := now()
	conn, err := net.DialTimeout("tcp", c.addr(), patience)
	if err != nil {
		s.broke(c, sent, err)
		return
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	r := bufio.NewReader(conn)
	if err = req.Write(conn); err != nil {
		s.broke(c, sent, err)
		return
	}
	resp, err := http.ReadResponse(r, req)
	if err != nil {
		s.broke(c, sent, err)
		return
	}
	received := now()
	if resp.StatusCode != http.StatusSwitchingProtocols {
		body, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		s.judge(c, req, resp, body, key, sent, received)
		return
	}
	s.judge(c, req, resp, nil, key, sent, received)
	end, told := received+upTo(rng, 5*time.Second).Microseconds(), sent
	for heard := make([]byte, 4); now() < end; time.Sleep(20 * time.Millisecond) {
		said := now()
		if _, err = conn.Write([]byte("ping")); err == nil {
			_, err = io.ReadFull(r, heard)
		}
		if err == nil && string(heard) != "ping" {
			err = errors.New("the server has closed the WebSocket") // with a frame of its own
		}
		if err != nil {
			s.broke(c, sent, err)
			break
		}
		told = said
	}
	s.held(c, resp, key, sent, received, told)
}

// report tells what clients have seen, and complains of what they must not have.
func (s *soak) report() {
	t := s.t
	total := 0
	var lines []string
	for what, n := range s.counts {
		lines = append(lines, fmt.Sprintf("%8d %s", n, what))
		total += n
	}
	slices.Sort(lines)
	slices.Reverse(lines)
	t.Logf("%d requests of %d identities:\n%s", total, len(s.keys), strings.Join(lines, "\n"))
	for _, w := range s.wrong[:min(10, len(s.wrong))] {
		t.Errorf("a wrong response: %s", w)
	}
	if n := len(s.wrong); n > 10 {
		t.Errorf("and %d other wrong responses", n-10)
	}
	excused, told := 0, 0
	for _, b := range s.broken {
		if slices.ContainsFunc(s.excused, func(e excuse) bool { return e.caddy == b.caddy && e.overlaps(b.from, b.to) }) {
			excused++
		} else if told++; told <= 10 {
			t.Errorf("from %d to %d µs Caddy %d left a request without a response, though nothing was done to it: %v", b.from, b.to, b.caddy, b.err)
		}
	}
	t.Logf("%d requests without a response because their Caddy was killed, stopped or reloaded; %d for no reason", excused, told)
	for _, complaint := range s.h.Check() {
		t.Error(complaint)
	}
}
