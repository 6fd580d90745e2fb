// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/redis/go-redis/v9"
)

func init() {
	caddy.RegisterModule(&sample{})
	httpcaddyfile.RegisterHandlerDirective("load_sample", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		h.Next()
		args := h.RemainingArgs()
		return &sample{Addr: args[0], Fleet: len(args) > 1}, nil
	})
	// Like respond, with the header fields that a file says.
	httpcaddyfile.RegisterHandlerDirective("load_respond", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		h.Next()
		response := &caddyhttp.StaticResponse{}
		text, err := os.ReadFile(h.RemainingArgs()[0])
		if err == nil {
			err = json.Unmarshal(text, response)
		}
		return response, err
	})
}

// sample limits in the way of the widely copied samples, with the default
// client of go-redis: a token bucket of two keys whose script is sent each time,
// then a sorted set that is purged, added to and removed from, each in a round
// trip of its own. With Fleet, a second sorted set counts everybody's requests.
type sample struct {
	Addr  string `json:"addr"`
	Fleet bool   `json:"fleet,omitempty"`

	rdb *redis.Client
	id  atomic.Int64
}

const (
	sampleRate, sampleCapacity, sampleLeases = 100_000, 500_000, 100_000

	bucketSource = `
local tokens_key, time_key = KEYS[1], KEYS[2]
local rate, capacity = tonumber(ARGV[1]), tonumber(ARGV[2])
local now, requested = tonumber(ARGV[3]), tonumber(ARGV[4])
local ttl = math.floor(capacity / rate * 2)
local tokens = tonumber(redis.call('GET', tokens_key)) or capacity
local last = tonumber(redis.call('GET', time_key)) or 0
tokens = math.min(capacity, tokens + math.max(0, now - last) * rate)
local allowed = tokens >= requested
if allowed then tokens = tokens - requested end
redis.call('SETEX', tokens_key, ttl, tokens)
redis.call('SETEX', time_key, ttl, now)
return {allowed, tokens}
`
	leaseSource = `
local count = redis.call('ZCARD', KEYS[1])
local allowed = count < tonumber(ARGV[1])
if allowed then redis.call('ZADD', KEYS[1], ARGV[2], ARGV[3]) end
return {allowed, count}
`
)

func (*sample) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.load_sample", New: func() caddy.Module { return new(sample) }}
}

func (s *sample) Provision(caddy.Context) error {
	s.rdb = redis.NewClient(&redis.Options{Addr: s.Addr})
	return nil
}

func (s *sample) Cleanup() error { return s.rdb.Close() }

// ServeHTTP answers 500 if Redis fails, so that the measurement notices.
func (s *sample) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	ctx := r.Context()
	user := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
	bucket := []string{"request_rate_limiter." + user + ".tokens", "request_rate_limiter." + user + ".timestamp"}
	reply, err := s.rdb.Eval(ctx, bucketSource, bucket, sampleRate, sampleCapacity, time.Now().Unix(), 1).Slice()
	if err != nil {
		return err
	}
	if reply[0] == nil { // false, as Lua returns it
		return caddyhttp.Error(http.StatusTooManyRequests, nil)
	}
	sets := []string{"concurrent_requests_limiter." + user}
	if s.Fleet {
		sets = append(sets, "concurrent_requests_limiter.fleet")
	}
	for _, key := range sets {
		id := strconv.FormatInt(s.id.Add(1), 36)
		now := time.Now().Unix()
		if err := s.rdb.ZRemRangeByScore(ctx, key, "-inf", strconv.FormatInt(now-60, 10)).Err(); err != nil {
			return err
		}
		reply, err := s.rdb.Eval(ctx, leaseSource, []string{key}, sampleLeases, now, id).Slice()
		if err != nil {
			return err
		}
		if reply[0] == nil {
			return caddyhttp.Error(http.StatusTooManyRequests, nil)
		}
		defer s.rdb.ZRem(ctx, key, id)
	}
	return next.ServeHTTP(w, r)
}
