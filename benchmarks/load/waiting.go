// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net/http"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/redis/go-redis/v9"
)

func init() {
	caddy.RegisterModule(&waiting{})
	httpcaddyfile.RegisterHandlerDirective("load_waiting", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		h.Next()
		return &waiting{Addr: h.RemainingArgs()[0]}, nil
	})
}

// waiting limits nothing. A request waits for a PING of Redis, and all that come
// while one is under way share the next: the least that it costs to ask Redis
// anything before each request.
type waiting struct {
	Addr string `json:"addr"`

	rdb *redis.Client

	mu    sync.Mutex // guards below
	queue []chan error
	away  bool
}

func (*waiting) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.load_waiting", New: func() caddy.Module { return new(waiting) }}
}

func (p *waiting) Provision(caddy.Context) error {
	p.rdb = redis.NewClient(&redis.Options{Addr: p.Addr})
	return nil
}

func (p *waiting) Cleanup() error { return p.rdb.Close() }

// ServeHTTP answers 500 if Redis fails, so that the measurement notices.
func (p *waiting) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	answered := make(chan error, 1)
	p.mu.Lock()
	p.queue = append(p.queue, answered)
	if !p.away {
		p.away = true
		go p.ping()
	}
	p.mu.Unlock()
	if err := <-answered; err != nil {
		return err
	}
	return next.ServeHTTP(w, r)
}

// ping asks for all who wait until nobody does.
func (p *waiting) ping() {
	for {
		p.mu.Lock()
		queue := p.queue
		p.queue = nil
		p.away = len(queue) > 0
		p.mu.Unlock()
		if len(queue) == 0 {
			return
		}
		err := p.rdb.Ping(context.Background()).Err()
		for _, answered := range queue {
			answered <- err
		}
	}
}
