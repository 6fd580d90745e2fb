// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseRedisAddress(t *testing.T) {
	cases := []struct {
		in   string
		want redisAddress
	}{
		{"localhost:6379", redisAddress{network: "tcp", addr: "localhost:6379"}},
		{":6379", redisAddress{network: "tcp", addr: ":6379"}},
		{"[::1]:6379", redisAddress{network: "tcp", addr: "[::1]:6379"}},
		{"redis://", redisAddress{network: "tcp", addr: "localhost:6379", scheme: "redis"}},
		{"redis://cache", redisAddress{network: "tcp", addr: "cache:6379", scheme: "redis"}},
		{"redis://cache/", redisAddress{network: "tcp", addr: "cache:6379", scheme: "redis"}},
		{"redis://[fd00::1]", redisAddress{network: "tcp", addr: "[fd00::1]:6379", scheme: "redis"}},
		{"rediss://api:s%2Fcret@cache:6380/2", redisAddress{network: "tcp", addr: "cache:6380", scheme: "rediss", username: "api", password: "s/cret", db: new(2)}},
		{"redis://:secret@cache/0", redisAddress{network: "tcp", addr: "cache:6379", scheme: "redis", password: "secret", db: new(0)}},
		{"redis://cache?db=3", redisAddress{network: "tcp", addr: "cache:6379", scheme: "redis", db: new(3)}},
		{"unix:///run/redis.sock", redisAddress{network: "unix", addr: "/run/redis.sock", scheme: "unix"}},
		{"unix://api:secret@/run/redis.sock?db=1", redisAddress{network: "unix", addr: "/run/redis.sock", scheme: "unix", username: "api", password: "secret", db: new(1)}},
	}
	for _, c := range cases {
		got, err := parseRedisAddress(c.in)
		if err != nil {
			t.Errorf("%s: %v", c.in, err)
		}
		if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(redisAddress{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.in, diff)
		}
	}
}

// TestParseRedisAddress_Errors tests that what cannot be parsed is refused
// without showing the password that is often the reason.
func TestParseRedisAddress_Errors(t *testing.T) {
	for _, in := range []string{
		"hunter2@localhost:6379",
		":hunter2@localhost:6379",
		"redis://:hun#ter2@localhost",
		"redis://:hun/ter2@localhost",
		"redis://:hun?ter2@localhost",
		"redis://:hun%ter2@localhost",
		"redis://:hunter2@localhost:port",
		"redis://:hunter2@localhost:66379",
		"redis://:hunter2@localhost/-1",
		"redis://:hunter2@localhost/0/1",
		"redis://:hunter2@localhost/0?db=1",
		"redis://:hunter2@localhost?dial_timeout=1s",
		"redis://:hunter2@localhost#0",
		"unix://hunter2",
		"unix://:hunter2@run/redis.sock",
		"http://:hunter2@localhost",
		"://:hunter2@localhost",
	} {
		got, err := parseRedisAddress(in)
		if err == nil {
			t.Errorf("%s: got %+v, want an error", in, got)
		} else if strings.Contains(err.Error(), "ter2") {
			t.Errorf("%s: the error shows the password: %v", in, err)
		}
	}
}

func TestApp_ValidateConfig(t *testing.T) {
	cases := []struct {
		name string
		app  *App
		want string // part of the error; empty: valid
	}{
		{"nothing", &App{}, ""},
		{"memory", &App{Redis: &RedisConfig{Addresses: []string{""}}, OnStoreError: "closed"}, ""},
		{"placeholders are judged later", &App{Redis: &RedisConfig{Addresses: []string{"{env.REDIS}"}, Username: "a", Password: "b", DB: 1, TLS: &RedisTLS{}}}, ""},
		{"braces in a password", &App{Redis: &RedisConfig{Addresses: []string{"a:1"}, Password: "{x"}}, ""},
		{"rediss with a CA", &App{Redis: &RedisConfig{Addresses: []string{"rediss://a"}, TLS: &RedisTLS{CA: "ca.pem"}}}, ""},
		{"several rediss", &App{Redis: &RedisConfig{Addresses: []string{"rediss://a", "rediss://b"}}}, ""},
		{"sentinels by URL", &App{Redis: &RedisConfig{Addresses: []string{"rediss://a:26379"}, MasterName: "m", DB: 1}}, ""},
		{"cluster in database 0", &App{Redis: &RedisConfig{Addresses: []string{"redis://a/0"}, Cluster: true}}, ""},
		{"certificate without key", &App{Redis: &RedisConfig{TLS: &RedisTLS{Cert: "c.pem"}}}, "without its key"},
		{"key without certificate", &App{Redis: &RedisConfig{TLS: &RedisTLS{Key: "k.pem"}}}, "without certificate"},
		{"sentinel user alone", &App{Redis: &RedisConfig{SentinelUsername: "a"}}, "no master_name"},
		{"password of a replaced URL", &App{Redis: &RedisConfig{Addresses: []string{"redis://:p@a"}, Password: "p"}}, "password is given twice"},
		{"database of one of several", &App{Redis: &RedisConfig{Addresses: []string{"a:1", "redis://b/1"}}}, "several addresses"},
		{"negative timeout", &App{Redis: &RedisConfig{Addresses: []string{"a:1"}, Timeout: -1}}, "below 0"},
		{"negative database", &App{Redis: &RedisConfig{Addresses: []string{"a:1"}, DB: -1}}, "below 0"},
		{"negative pool", &App{Redis: &RedisConfig{Addresses: []string{"a:1"}, PoolSize: -1}}, "below 0"},
		{"braces", &App{Redis: &RedisConfig{KeyPrefix: "{a}:"}}, "braces"},
		{"another placeholder", &App{Redis: &RedisConfig{KeyPrefix: "{system.hostname}:"}}, "braces"},
		{"store error", &App{OnStoreError: "pass"}, "on_store_error 'pass' is not open, local or closed"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) { testValidate(t, c.app, c.want) })
	}
}
