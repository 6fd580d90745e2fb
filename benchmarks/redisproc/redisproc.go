// SPDX-License-Identifier: Apache-2.0

// Package redisproc starts redis-servers for measurements.
package redisproc

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// Start starts a redis-server that keeps nothing on disk, over TCP as in real
// life, and returns once it answers. It ends with stop, or with this process.
func Start() (addr string, stop func(), err error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0") // for a free port
	if err != nil {
		return "", nil, err
	}
	host, port, err := net.SplitHostPort(listener.Addr().String())
	_ = listener.Close()
	if err != nil {
		return "", nil, err
	}
	cmd := exec.Command("redis-server", "--bind", host, "--port", port,
		"--save", "", "--appendonly", "no", "--dir", os.TempDir(), "--loglevel", "warning")
	cmd.Stderr = os.Stderr
	redistest.TieToParent(cmd)
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	stop = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	addr = net.JoinHostPort(host, port)
	rdb := redis.NewClient(&redis.Options{Addr: addr})
	defer rdb.Close()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if err = rdb.Ping(context.Background()).Err(); err == nil {
			return addr, stop, nil
		}
		if time.Now().After(deadline) {
			stop()
			return "", nil, fmt.Errorf("redis-server does not answer: %w", err)
		}
	}
}
