// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/google/go-cmp/cmp"
	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/lua"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// Every example adapts, is formatted and starts (short of Start): what people
// copy works.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("examples/*Caddyfile")
	if err != nil || len(files) < 5 {
		t.Fatalf("examples: got %q, %v; want at least 5", files, err)
	}
	secrets := writeSecrets(t)
	for _, file := range files {
		for _, addr := range []string{"localhost:6379", ""} {
			if addr == "" && file != "examples/Caddyfile" {
				continue // only this one is meant to do without Redis
			}
			t.Run(fmt.Sprintf("%s with REDIS_ADDR=%q", file, addr), func(t *testing.T) {
				t.Setenv("REDIS_ADDR", addr)
				text := readFile(t, file)
				if formatted := string(caddyfile.Format([]byte(text))); formatted != text {
					t.Errorf("not as caddy fmt has it (-want +got):\n%s", cmp.Diff(formatted, text))
				}
				validate(t, strings.ReplaceAll(text, secretsDir, secrets))
			})
		}
	}
}

// The ACL user of the example may do all that the module needs.
func TestExamples_ACL(t *testing.T) {
	rule := aclRule(t)
	srv := redistest.Start(t)
	srv.AddUser(rule.name, rule.password, rule.rules...)

	seen := make(chan string, 100)
	store := limiters.NewRedis(limiters.RedisOptions{
		Universal: redis.UniversalOptions{Addrs: []string{srv.Addr}, Username: rule.name, Password: rule.password},
		Timeout:   10 * time.Second, // for a busy machine
		Observe: func(operation string, _ time.Duration, err error) {
			if err != nil {
				t.Errorf("%s: %v", operation, err)
			}
			seen <- operation
		},
	})
	rate, err := limiters.NewRate("default", "rate", 1, time.Hour, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	concurrency, err := limiters.NewConcurrency("default", "concurrency", 1, limiters.MinLease)
	if err != nil {
		t.Fatal(err)
	}
	asks := []limiters.Ask{{Identity: limiters.Identity{1}, Checks: []limiters.Check{{Limit: rate}, {Limit: concurrency}}}}
	admission, err := store.Admit(t.Context(), asks)
	if err != nil || !admission.Allowed {
		t.Errorf("first request: got %v, %v; want allowed", admission.Allowed, err)
	}
	if denied, err := store.Admit(t.Context(), asks); err != nil || denied.Allowed {
		t.Errorf("second request: got %v, %v; want denied", denied.Allowed, err)
	}
	for <-seen != "renew" {
	}
	store.Release(admission)
	for <-seen != "release" {
	}
	share := shedding.SyncRequest{Instance: strings.Repeat("a", 32), Sequence: 1, Wanted: 1, Capacity: 10}
	if reply, err := store.SyncFleet(t.Context(), "default", share.Args()); err != nil || len(reply) < 2 || reply[1] != 1 {
		t.Errorf("sync of the fleet: got %v, %v; want a claim of 1", reply, err)
	}
	for _, call := range []limiters.ControlCall{{ID: "1 a", State: "{}"}, {Leave: true}} {
		if _, err := store.Control(t.Context(), call); err != nil {
			t.Error(err)
		}
	}
	limits := []*limiters.Limit{rate, concurrency}
	if _, err := store.Inspect(t.Context(), limiters.Identity{1}, limits); err != nil {
		t.Error(err)
	}
	if err := store.Reset(t.Context(), limiters.Identity{1}, limits); err != nil {
		t.Error(err)
	}
	if err := store.Close(); err != nil {
		t.Error(err)
	}

	// A script may do more in other states.
	for _, script := range []string{lua.Admit, lua.Renew, lua.FleetSync, lua.Control} {
		for _, call := range regexp.MustCompile(`\bcall\('(\w+)'`).FindAllStringSubmatch(script, -1) {
			if !slices.Contains(rule.rules, "+"+strings.ToLower(call[1])) {
				t.Errorf("the user may not %s, which a script does", call[1])
			}
		}
	}

	refused, err := srv.Client().Do(t.Context(), "acl", "log").Slice()
	if err != nil || len(refused) > 0 {
		t.Errorf("acl log: got %v, %v; want nothing refused", refused, err)
	}
}

// acl is the ACL user that the example proposes.
type acl struct {
	name, password string
	rules          []string
}

func aclRule(t *testing.T) acl {
	t.Helper()
	rule := regexp.MustCompile(`(?m)^#\tuser (\S+) on >(\S+) (.*)$`).
		FindStringSubmatch(readFile(t, "examples/redis-tls-acl.Caddyfile"))
	if rule == nil {
		t.Fatal("the example has no ACL rule")
	}
	return acl{rule[1], rule[2], strings.Fields(rule[3])}
}

// Every example for Redis limits requests through a Redis of its kind.
func TestExamples_Redis(t *testing.T) {
	secret := func(line string) string { return `(?m)^\s*` + line + `.*\n` }
	cases := []struct {
		file   string
		limits string // that apply to a request, sorted
		// start starts the Redis and returns what to put in place of which
		// parts of the example.
		start func(t *testing.T) (part, in string, others map[string]string)
	}{
		{"production", "address concurrency rate", func(t *testing.T) (string, string, map[string]string) {
			srv := redistest.Start(t, "--requirepass", "redis password")
			return `\{env\.REDIS_ADDR\}`, srv.Addr, nil
		}},
		{"redis-tls-acl", "concurrency rate", func(t *testing.T) (string, string, map[string]string) {
			srv, user := redistest.StartTLS(t), aclRule(t)
			srv.AddUser(user.name, "redis password", user.rules...)
			return `redis\.internal:6379`, srv.Addr, map[string]string{
				`server_name \S+`:              "server_name localhost",
				`\S+redis_ca\.pem`:             srv.CAFile,
				`cert \S+ \S+redis_client.key`: "cert " + srv.CertFile + " " + srv.KeyFile,
			}
		}},
		{"sentinel", "concurrency rate", func(t *testing.T) (string, string, map[string]string) {
			return `sentinel-1\S+ \S+ \S+`, redistest.StartSentinel(t).Addr, map[string]string{
				secret("password"): "", secret("sentinel_password"): "",
			}
		}},
		{"cluster", "concurrency rate", func(t *testing.T) (string, string, map[string]string) {
			addrs := redistest.StartCluster(t, 2, 0).Addrs()
			return `node-1\S+ \S+ \S+`, strings.Join(addrs, " "), map[string]string{
				secret("username"): "", secret("password"): "",
			}
		}},
	}
	for _, c := range cases {
		t.Run(c.file, func(t *testing.T) {
			s := newServer(t)
			s.port = redistest.FreePort(t)
			text := readFile(t, "examples/"+c.file+".Caddyfile")
			replace := func(part, in string) {
				t.Helper()
				old := text
				if text = regexp.MustCompile(part).ReplaceAllLiteralString(text, in); text == old {
					t.Errorf("the example has no %s any more", part)
				}
			}
			part, in, others := c.start(t)
			replace(part, in)
			for part, in := range others {
				replace(part, in)
			}
			text = strings.ReplaceAll(text, secretsDir, writeSecrets(t))
			// For this process, and patient: machines that test are busy.
			replace(`(?m)^\{\n`, "{\n\tadmin off\n\tpersist_config off\n\tauto_https off\n")
			replace(`(?m)^(:8080|api\.example\.com) \{`, fmt.Sprintf("http://127.0.0.1:%d {", s.port))
			replace(`reverse_proxy .*`, "respond ok")
			text = regexp.MustCompile(`(?m)^\s*timeout .*\n`).ReplaceAllString(text, "")
			text = regexp.MustCompile(`(?m)^\t\tredis .*\{\n`).ReplaceAllString(text, "$0\t\t\ttimeout 10s\n")

			adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), map[string]any{"filename": "Caddyfile"})
			if err != nil {
				t.Fatalf("adapt: %v\n%s", err, text)
			}
			if err := caddy.Load(adapted, true); err != nil {
				t.Fatalf("load: %v\n%s", err, text)
			}
			for i := range 5 { // identities, and so nodes of a cluster
				req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/", s.port), nil)
				if err != nil {
					t.Fatal(err)
				}
				req.SetBasicAuth(fmt.Sprintf("sk_live_%d", i), "")
				res, err := s.hold.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				_, _ = io.Copy(io.Discard, res.Body)
				_ = res.Body.Close()
				// A limit whose store did not answer is not in the field.
				var limits []string
				for item := range strings.SplitSeq(res.Header.Get("RateLimit-Policy"), ", ") {
					name, _, _ := strings.Cut(item, ";")
					limits = append(limits, strings.Trim(name, `"`))
				}
				slices.Sort(limits)
				if got := strings.Join(limits, " "); res.StatusCode != http.StatusOK || got != c.limits {
					t.Errorf("request %d: got %d with limits %q, want 200 with %q", i, res.StatusCode, got, c.limits)
				}
			}
		})
	}
}
