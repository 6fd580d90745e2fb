// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// sentCommands counts the commands that clients send to Redis while do works.
// The commands that scripts call are in Redis's own statistics, too, so what is
// sent can only be told by watching.
func sentCommands(addr string, do func() error) (sent map[string]float64, err error) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write([]byte("MONITOR\r\n")); err != nil {
		return nil, err
	}
	r := bufio.NewReaderSize(c, 1<<16)
	if line, err := r.ReadString('\n'); err != nil || line != "+OK\r\n" {
		return nil, fmt.Errorf("MONITOR: %q %w", line, err)
	}
	sent = map[string]float64{}
	counted := make(chan struct{})
	go func() {
		defer close(counted)
		for {
			line, err := r.ReadSlice('\n')
			if err == nil {
				switch command := parseMonitor(string(line)); command {
				case "":
				case "echo": // ours, after all others
					return
				default:
					sent[command]++
				}
			} else if err != bufio.ErrBufferFull { // of a line's rest, which says nothing
				return
			}
		}
	}()
	err = do()
	err = errors.Join(err, sendEcho(addr))
	<-counted // or the deadline has passed
	return sent, err
}

func sendEcho(addr string) error {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err = c.Write([]byte("ECHO end\r\n")); err == nil {
		_, err = c.Read(make([]byte, 16))
	}
	return err
}

// parseMonitor returns the command that a client sent, in lower case, or "" if
// the line tells of something else. An example of a line:
//
//	+1700000000.123456 [0 127.0.0.1:50000] "zrem" "key" "member"
func parseMonitor(line string) string {
	at, rest, ok := strings.Cut(line, " [")
	if _, err := strconv.ParseFloat(strings.TrimPrefix(at, "+"), 64); !ok || err != nil {
		return ""
	}
	who, command, ok := strings.Cut(rest, `] "`)
	if !ok || strings.HasSuffix(who, " lua") {
		return ""
	}
	command, _, _ = strings.Cut(command, `"`)
	switch command = strings.ToLower(command); command {
	case "hello", "ping", "client", "info":
		return "" // of connections, not of requests
	}
	return command
}

// failedOpen returns how many requests passed because the store did not answer
// in time.
func (s *server) failedOpen() (n float64, err error) {
	resp, err := apiClient.Get("http://" + s.admin + "/metrics")
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("/metrics: %s", resp.Status)
	}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		line := lines.Text()
		if strings.HasPrefix(line, "caddy_stripe_ratelimit_requests_total{") && strings.Contains(line, `outcome="store_error"`) {
			value, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
			if err != nil {
				return 0, err
			}
			n += value
		}
	}
	return n, lines.Err()
}
