// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// The random parts of keys, all their own. They are not random here, so that no
// hash or id looks like a part of one by accident.
const (
	secretBasic  = "Zq7XvK9wPj3LmT5bRn8YcH2d"
	secretBearer = "Wf4GsJ6kUy1NzQ8pVt9DxB3h"
	secretHeader = "Mr5CkL2gXw7TjE4vSb6PnY9z"
	secretTenant = "Hd8VyF3xKp6WqA1sGm4RtJ7c"
	secretUser   = "Tj2BnS5mDz9LfX6yCk3VhW8q"
	// control is a secret that Caddy itself logs.
	control = "Gx6RwZ1tNc8HvD4jFs7KbP5y"
)

// leaks returns what of a secret a text has: six or more characters of it, as
// they are or as hex or base64, as which Basic sends them.
func leaks(text, secret string) (found []string) {
	look := func(form string, window int) {
		for i := 0; i+window <= len(form); i++ {
			if part := form[i : i+window]; strings.Contains(text, part) {
				found = append(found, part)
			}
		}
	}
	look(secret, 6)
	look(hex.EncodeToString([]byte(secret)), 12)
	for shift := range 3 {
		look(base64.RawStdEncoding.EncodeToString([]byte(secret[shift:])), 8)
	}
	return found
}

// No key, nor a part of one, is in what the module writes: Redis, logs at
// level debug, metrics, placeholders and responses. In logs that is promised of
// the module's own lines and fields: Caddy logs the headers of requests, but
// for Authorization and cookies, so whoever has keys in others filters them, as
// here.
func TestSecrets(t *testing.T) {
	redis := redistest.Start(t)
	heard := monitor(t, redis)
	const facts = "{http.stripe_ratelimit.outcome} {http.stripe_ratelimit.pool} {http.stripe_ratelimit.kind} " +
		"{http.stripe_ratelimit.limit} {http.stripe_ratelimit.criticality} {http.stripe_ratelimit.reason} " +
		"{http.stripe_ratelimit.retry_after} {http.stripe_ratelimit.identity} {http.stripe_ratelimit.would_reject}"
	limits := `
		rate 10/h burst 2
		rate endpoint 10/h burst 10 match /json/endpoint
		rate tenant 10/h burst 2 key {http.request.header.X-Tenant}/{http.request.header.X-User}
		rate candidate 10/h burst 1 mode dark
		concurrency 5`
	c := start(t, config{
		redis: redis.Addr,
		global: `log default {
			level DEBUG
			format filter {
				fields {
					request>headers>X-Api-Key delete
					request>headers>X-Tenant delete
					request>headers>X-User delete
				}
			}
		}`,
		site: `log
		header >X-Facts "` + facts + `"
		log_append facts "` + facts + `"
		handle /json* {
			stripe_ratelimit {` + limits + `
			}
			respond "` + facts + `"
		}
		handle /error* {
			stripe_ratelimit errors {` + limits + `
				reject error
			}
			respond "` + facts + `"
		}
		handle_errors {
			@shown path /error/shown
			respond @shown "{err.message} {err.trace} ` + facts + `"
		}`,
	})

	var seen strings.Builder // what clients were sent
	clients := [][]string{
		{"Authorization", "Basic " + base64.StdEncoding.EncodeToString([]byte("sk_live_"+secretBasic+":"))},
		bearer("sk_test_" + secretBearer),
		{"X-Api-Key", "rk_live_" + secretHeader},
		{"X-Tenant", secretTenant, "X-User", secretUser},
	}
	statuses := map[int]int{}
	round := func() {
		for _, header := range clients {
			for _, path := range []string{"/json", "/json/endpoint", "/error", "/error/shown", "/nowhere"} {
				for range 4 {
					a := c.get(t, path, append(header, "X-Control", control)...)
					statuses[a.status]++
					fmt.Fprintln(&seen, a.status, a.header, a.body)
				}
			}
		}
	}
	round()
	c.noStoreErrors(t)
	if statuses[http.StatusOK] == 0 || statuses[http.StatusTooManyRequests] == 0 {
		t.Fatalf("got statuses %v, want 200 and 429 among them", statuses)
	}
	stored := dump(t, redis)
	said := heard()
	redis.Kill() // for what is logged of failures
	clients[0][1] = "Basic " + base64.StdEncoding.EncodeToString([]byte("sk_live_"+secretBasic+":with a password"))
	clients[1][1] += "again" // not denied from memory
	round()
	if c.metric(t, "store_errors_total") == 0 {
		t.Error("the store has not failed")
	}

	logs := c.Logs()
	if len(leaks(logs, control)) == 0 {
		t.Error("the control is not in the logs, so they do not show what they should")
	}
	for where, text := range map[string]string{
		"Redis": stored, "commands to Redis": said, "logs": logs, "metrics": c.Metrics(t), "responses": seen.String(),
	} {
		// An identity, or what stands for it where there must be none.
		word := map[string]string{"Redis": "stripe_ratelimit:default:{", "commands to Redis": `"evalsha"`, "logs": `"ratelimit_identity":"`, "metrics": "requests_total{", "responses": "X-Facts:[denied"}[where]
		if !strings.Contains(text, word) {
			t.Errorf("%s: %q is not in it, so it is not what it should be:\n%.2000s", where, word, text)
		}
		for _, secret := range []string{secretBasic, secretBearer, secretHeader, secretTenant, secretUser, keySecret} {
			if found := leaks(text, secret); len(found) > 0 {
				t.Errorf("%s: parts of %s are in it: %q", where, secret, found)
			}
		}
	}
}

// dump returns all keys of a Redis and what they hold.
func dump(t *testing.T, redis *redistest.Server) string {
	t.Helper()
	rdb := redis.Client()
	var text strings.Builder
	keys := rdb.Scan(t.Context(), 0, "*", 1000).Iterator()
	for keys.Next(t.Context()) {
		key := keys.Val()
		var value any
		var err error
		switch kind := rdb.Type(t.Context(), key).Val(); kind {
		case "string":
			value, err = rdb.Get(t.Context(), key).Result()
		case "zset":
			value, err = rdb.ZRangeWithScores(t.Context(), key, 0, -1).Result()
		case "hash":
			value, err = rdb.HGetAll(t.Context(), key).Result()
		case "none": // a lease that was given back meanwhile
		default:
			t.Errorf("%s is a %s, which this test cannot read", key, kind)
		}
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(&text, key, value)
	}
	if err := keys.Err(); err != nil {
		t.Fatal(err)
	}
	return text.String()
}

// monitor listens to all commands that a Redis executes. What it returns stops
// it and tells what it has heard.
func monitor(t *testing.T, redis *redistest.Server) func() string {
	t.Helper()
	conn, err := dial(redis.Addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if _, err := conn.Write([]byte("MONITOR\r\n")); err != nil {
		t.Fatal(err)
	}
	return func() string {
		const end = "that was all"
		if err := redis.Client().Echo(t.Context(), end).Err(); err != nil {
			t.Fatal(err)
		}
		var text []byte
		buf := make([]byte, 1<<16)
		for !strings.Contains(string(text), end) {
			n, err := conn.Read(buf)
			if err != nil {
				t.Fatalf("monitor: %v", err)
			}
			text = append(text, buf[:n]...)
		}
		return string(text)
	}
}
