// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"
)

// patience is how long a response may take before a measurement fails.
const patience = 10 * time.Second

// The requests of all users, as they are written.
var requests1 = func() (all [][]byte) {
	for user := range keyCount {
		all = append(all, fmt.Appendf(nil,
			"GET / HTTP/1.1\r\nHost: api.example.com\r\nUser-Agent: load\r\nAuthorization: Bearer %s\r\n\r\n", apiKey(user)))
	}
	return all
}()

// conn1 is a client's connection of HTTP/1.1, and does no more than is needed
// here, because it shares the machine with what it measures.
type conn1 struct {
	net.Conn
	r *bufio.Reader
}

func dial1(addr string) (*conn1, error) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	return &conn1{c, bufio.NewReader(c)}, nil
}

// roundTrip sends a user's request and reads the response.
func (c *conn1) roundTrip(user int) (status int, err error) {
	if _, err := c.Write(requests1[user]); err != nil {
		return 0, err
	}
	return c.readResponse()
}

var contentLength = []byte("content-length:")

// readResponse reads a response and returns its status.
func (c *conn1) readResponse() (status int, err error) {
	line, err := c.r.ReadSlice('\n')
	if err != nil {
		return 0, err
	}
	if len(line) < len("HTTP/1.1 200") {
		return 0, fmt.Errorf("status line %q", line)
	}
	if status, err = strconv.Atoi(string(line[9:12])); err != nil {
		return 0, err
	}
	length := -1
	for {
		if line, err = c.r.ReadSlice('\n'); err != nil {
			return 0, err
		}
		if line = bytes.TrimSpace(line); len(line) == 0 {
			break
		}
		if n := len(contentLength); len(line) > n && bytes.EqualFold(line[:n], contentLength) {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(line[n:]))); err != nil {
				return 0, err
			}
		}
	}
	if length < 0 {
		return 0, errors.New("a response without Content-Length")
	}
	_, err = c.r.Discard(length)
	return status, err
}

// tally is what came back.
type tally struct {
	latencies []time.Duration
	statuses  map[int]int
	late      []time.Duration // how much later than planned requests were sent
	last      time.Time       // when the last response came
}

func newTally() *tally { return &tally{statuses: map[int]int{}} }

func (t *tally) add(status int, latency time.Duration) {
	t.latencies = append(t.latencies, latency)
	t.statuses[status]++
}

func (t *tally) merge(o *tally) {
	t.latencies = append(t.latencies, o.latencies...)
	t.late = append(t.late, o.late...)
	for status, n := range o.statuses {
		t.statuses[status] += n
	}
	if o.last.After(t.last) {
		t.last = o.last
	}
}
