// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"net"
	"strings"
	"testing"
	"time"
)

func TestQuantile(t *testing.T) {
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[99-i] = time.Duration(i+1) * time.Millisecond
	}
	cases := []struct {
		values []time.Duration
		q      float64
		want   float64
	}{
		{hundred, 0.5, 50},
		{hundred, 0.99, 99},
		{hundred, 0.999, 100},
		{hundred, 0, 1},
		{hundred, 1, 100},
		{hundred[:1], 0.5, 100},
		{[]time.Duration{1500 * time.Microsecond, 500 * time.Microsecond}, 0.5, 0.5},
	}
	for _, c := range cases {
		if got := quantile(milliseconds(c.values), c.q); got != c.want {
			t.Errorf("quantile %v of %d: got %v ms, want %v", c.q, len(c.values), got, c.want)
		}
	}
}

func TestSpreadOf(t *testing.T) {
	cases := []struct {
		values []float64
		want   spread
	}{
		{[]float64{3, 1, 2}, spread{1, 2, 3}},
		{[]float64{4, 1, 2, 3}, spread{1, 2.5, 4}},
		{[]float64{7}, spread{7, 7, 7}},
		{nil, spread{}},
	}
	for _, c := range cases {
		if got := spreadOf(c.values); got != c.want {
			t.Errorf("%v: got %v, want %v", c.values, got, c.want)
		}
	}
}

func TestParseMonitor(t *testing.T) {
	cases := []struct{ line, want string }{
		{`+1700000000.123456 [0 127.0.0.1:50000] "EVALSHA" "abc" "1"` + "\r\n", "evalsha"},
		{`+1700000000.123456 [0 127.0.0.1:50000] "zrem"` + "\r\n", "zrem"},
		{`+1700000000.123456 [0 lua] "zrem" "key"` + "\r\n", ""},
		{`+1700000000.123456 [0 127.0.0.1:50000] "hello" "2"` + "\r\n", ""},
		{`+1700000000.123456 [0 127.0.0.1:50000] "eval" "local x = KEYS[1] "` + "\r\n", "eval"},
		{`the rest of a long line [0 lua] "zrem"`, ""},
		{"", ""},
	}
	for _, c := range cases {
		if got := parseMonitor(c.line); got != c.want {
			t.Errorf("%q: got %q, want %q", c.line, got, c.want)
		}
	}
}

func TestReadResponse(t *testing.T) {
	cases := []struct {
		response string
		status   int
		bad      bool
	}{
		{"HTTP/1.1 200 OK\r\nServer: Caddy\r\ncontent-length: 2\r\n\r\nok", 200, false},
		{"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n", 429, false},
		{"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 0, true},
		{"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\ntoo short", 0, true},
		{"HTTP/1.1 2xx\r\n\r\n", 0, true},
		{"", 0, true},
	}
	for _, c := range cases {
		client, server := net.Pipe()
		go func() {
			_, _ = server.Write([]byte(c.response))
			_ = server.Close()
		}()
		conn := &conn1{client, bufio.NewReader(client)}
		status, err := conn.readResponse()
		if (err != nil) != c.bad || !c.bad && status != c.status {
			t.Errorf("%q: got %d, %v", c.response, status, err)
		}
		_ = client.Close()
	}
}

func TestBars(t *testing.T) {
	rounds := func(points ...point) []point { return points }
	uniform := func(setup, answer string) scenario { return scenario{setup, answer, "h1", "uniform", 0} }
	r := &report{Memory: &memory{Redis: 213, Process: 250}, Series: []*series{
		{scenario: uniform(bare, "respond"), Rounds: rounds(point{Caddy: 20, Allocs: 70}, point{Caddy: 30, Allocs: 70}, point{Caddy: 25, Allocs: 70})},
		{scenario: uniform("memory", "respond"), Rounds: rounds(point{Caddy: 22, Allocs: 75}, point{Caddy: 33, Allocs: 78}, point{Caddy: 27, Allocs: 76})},
		{scenario: uniform("four", "respond"), Rounds: rounds(point{Caddy: 30, Redis: 10}, point{Caddy: 40, Redis: 20}, point{Caddy: 40, Redis: 12}),
			Sent: map[string]float64{"evalsha": 1, "zrem": 1.5}},
		{scenario: uniform("sample", "respond"), Rounds: rounds(point{Caddy: 60, Redis: 40}, point{Caddy: 70, Redis: 40}, point{Caddy: 65, Redis: 60})},
		{scenario: uniform(bare, "proxy"), Rounds: rounds(point{Rate: 1000})},
		{scenario: uniform("four", "proxy"), Rounds: rounds(point{Rate: 800})},
	}}
	want := []string{
		"≤ 25 µs, 27 µs (20 to 30), not met",
		"≤ 33 %, 27 % (25 to 37.5), met",
		"≥ 80 %, 80 %, met",
		"≤ 2.5 µs, 2 µs (2 to 3), met",
		"≤ 6 , 6  (5 to 8), met",
		"≤ 2.01 , 2.5 , not met",
		"≤ 250 B, 213 B, met",
		"≤ 200 B, 250 B, not met",
	}
	var got []string
	for _, b := range r.bars() {
		got = append(got, b.want()+", "+b.got()+", "+b.verdict())
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
