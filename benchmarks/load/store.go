// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// storeUsage is what a redis-server has done since it began.
type storeUsage struct {
	cpu   float64            // us, of all threads, as the operating system counts
	calls map[string]float64 // by command; those of scripts, too

	script float64 // us within scripts, as Redis measures
}

func readStore(ctx context.Context, rdb *redis.Client) (storeUsage, error) {
	if rdb == nil {
		return storeUsage{}, nil
	}
	info, err := rdb.Info(ctx, "cpu", "commandstats").Result()
	if err != nil {
		return storeUsage{}, err
	}
	return parseInfo(info)
}

func parseInfo(info string) (u storeUsage, err error) {
	u.calls = map[string]float64{}
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if name == "used_cpu_user" || name == "used_cpu_sys" {
			seconds, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return u, err
			}
			u.cpu += seconds * 1e6
		}
		if command, ok := strings.CutPrefix(name, "cmdstat_"); ok && command != "info" {
			var calls, us float64
			if _, err := fmt.Sscanf(value, "calls=%f,usec=%f,", &calls, &us); err != nil {
				return u, fmt.Errorf("%s: %w", line, err)
			}
			u.calls[command] = calls
			if command == "evalsha" || command == "eval" {
				u.script += us
			}
		}
	}
	return u, nil
}

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
				if command := parseMonitor(string(line)); command != "" {
					sent[command]++
				}
			} else if err != bufio.ErrBufferFull { // of a line's rest, which says nothing
				return
			}
		}
	}()
	err = do()
	time.Sleep(100 * time.Millisecond) // what is still on its way to us
	_ = c.Close()
	<-counted
	return sent, err
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
