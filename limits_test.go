// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
)

func TestRateLimit_Defaults(t *testing.T) {
	cases := []struct {
		name      string
		json      string
		wantName  string
		wantPer   time.Duration
		wantBurst int64
		wantCost  int64
	}{
		{"per second", `{"requests": 100}`, "rate", time.Second, 500, 1},
		{"explicit second", `{"requests": 100, "per": "1s"}`, "rate", time.Second, 500, 1},
		{"shorter than a second", `{"requests": 3, "per": "250ms"}`, "rate", 250 * time.Millisecond, 15, 1},
		{"just longer than a second", `{"requests": 3, "per": "1001ms"}`, "rate", 1001 * time.Millisecond, 3, 1},
		{"per minute", `{"requests": 600, "per": "1m"}`, "rate", time.Minute, 600, 1},
		{"all given", `{"name": "search", "requests": 100, "per": "1d", "burst": 7, "cost": 7}`, "search", 24 * time.Hour, 7, 7},
		{"fastest", `{"requests": 1000000}`, "rate", time.Second, 5_000_000, 1},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var rl RateLimit
			if err := caddy.StrictUnmarshalJSON([]byte(c.json), &rl); err != nil {
				t.Fatal(err)
			}
			l, err := rl.limit("api")
			if err != nil {
				t.Fatal(err)
			}
			if l.Pool != "api" || l.Name != c.wantName || l.Period != c.wantPer || l.Capacity != c.wantBurst || l.Cost != c.wantCost || l.Requests != rl.Requests {
				t.Errorf("%s: got %+v, want name %s, period %v, capacity %d, cost %d", c.json, l, c.wantName, c.wantPer, c.wantBurst, c.wantCost)
			}
		})
	}
}

func TestConcurrencyLimit_Defaults(t *testing.T) {
	l, err := (&ConcurrencyLimit{Capacity: 20}).limit("api")
	if err != nil {
		t.Fatal(err)
	}
	if l.Pool != "api" || l.Name != "concurrency" || l.Capacity != 20 || l.Lease != 10*time.Second {
		t.Errorf("got %+v, want concurrency of pool api, capacity 20, lease 10s", l)
	}
	l, err = (&ConcurrencyLimit{Name: "slow", Capacity: 2, Lease: caddy.Duration(time.Minute)}).limit("api")
	if err != nil {
		t.Fatal(err)
	}
	if l.Name != "slow" || l.Capacity != 2 || l.Lease != time.Minute {
		t.Errorf("got %+v, want slow, capacity 2, lease 1m", l)
	}
}

// TestHandler_ValidateConfig has the mistakes that only JSON can hold beside
// some that the Caddyfile's golden errors have as well.
func TestHandler_ValidateConfig(t *testing.T) {
	cases := []struct {
		name string
		json string
		want string // part of the error; empty: valid
	}{
		{"least", `{"rate": [{"requests": 1}]}`, ""},
		{"all", `{"pool": "api", "key": ["api_key", "client_ip", "{http.auth.user.id}"], "ipv6_prefix": 48,
			"test_mode": [{"path": ["/a"]}], "rate": [{"requests": 1, "mode": {"state": "enforce", "percent": 0}}],
			"concurrency": [{"capacity": 1}, {"name": "b", "capacity": 1}], "mode": {"state": "dark"},
			"on_store_error": "closed", "should_retry": "auto", "doc_url": "https://a.example/b", "reject": "error"}`, ""},
		{"one name in two kinds", `{"rate": [{"name": "a", "requests": 1}], "concurrency": [{"name": "a", "capacity": 1}]}`, ""},
		{"longest name", `{"pool": "a2345678901234567890123456789_-2", "rate": [{"requests": 1}]}`, ""},
		{"no limit", `{}`, "without any limit"},
		{"pool with a digit first", `{"pool": "1a", "rate": [{"requests": 1}]}`, "pool name '1a'"},
		{"pool with a newline", `{"pool": "a\n", "rate": [{"requests": 1}]}`, "pool name"},
		{"pool that is an option", `{"pool": "rate", "rate": [{"requests": 1}]}`, "'rate' is an option"},
		{"limit with a brace", `{"concurrency": [{"name": "a{b}", "capacity": 1}]}`, "limit name 'a{b}'"},
		{"two default names", `{"concurrency": [{"capacity": 1}, {"name": "concurrency", "capacity": 2}]}`, "second concurrency limit"},
		{"no requests", `{"rate": [{}]}`, "0 requests"},
		{"negative burst", `{"rate": [{"requests": 1, "burst": -1}]}`, "burst -1"},
		{"negative cost", `{"rate": [{"requests": 1, "cost": -1}]}`, "cost -1"},
		{"negative period", `{"rate": [{"requests": 1, "per": "-1s"}]}`, "period -1s"},
		{"negative lease", `{"concurrency": [{"capacity": 1, "lease": "-1s"}]}`, "lease -1s"},
		{"no capacity", `{"concurrency": [{}]}`, "concurrency: 0"},
		{"prefix too short", `{"ipv6_prefix": 47, "rate": [{"requests": 1}]}`, "ipv6_prefix 47"},
		{"prefix too long", `{"ipv6_prefix": 65, "rate": [{"requests": 1}]}`, "ipv6_prefix 65"},
		{"test mode on and off", `{"test_mode": [{"path": ["/a"]}], "test_mode_off": true, "rate": [{"requests": 1}]}`, "choose one"},
		{"everything exempt", `{"exempt": [{"path": ["/a"]}, {}], "rate": [{"requests": 1}]}`, "exempt has a matcher set without matchers"},
		{"everything critical", `{"critical": [null], "rate": [{"requests": 1}]}`, "critical has a matcher set without matchers"},
		{"key of words", `{"key": ["user id"], "rate": [{"requests": 1}]}`, "key source 'user id'"},
		{"key with the address twice", `{"key": ["client_ip", "{client_ip}"], "rate": [{"requests": 1}]}`, "'{client_ip}' is given twice"},
		{"key of a limit", `{"rate": [{"requests": 1, "key": ["user"]}]}`, "key source 'user'"},
		{"key of a concurrency limit", `{"concurrency": [{"capacity": 1, "key": ["{}"]}]}`, "key source '{}'"},
		{"mode without state", `{"rate": [{"requests": 1, "mode": {}}]}`, "mode ''"},
		{"mode of a concurrency limit", `{"concurrency": [{"capacity": 1, "mode": {"state": "on"}}]}`, "mode 'on'"},
		{"percent of dark", `{"mode": {"state": "dark", "percent": 5}, "rate": [{"requests": 1}]}`, "no percentage"},
		{"percent below 0", `{"mode": {"state": "enforce", "percent": -1}, "rate": [{"requests": 1}]}`, "between 0 and 100"},
		{"percent above 100", `{"mode": {"state": "enforce", "percent": 101}, "rate": [{"requests": 1}]}`, "between 0 and 100"},
		{"on_store_error", `{"on_store_error": "close", "rate": [{"requests": 1}]}`, "on_store_error 'close' is not open, local or closed"},
		{"should_retry", `{"should_retry": "true", "rate": [{"requests": 1}]}`, "should_retry 'true' is not omit or auto"},
		{"reject", `{"reject": "html", "rate": [{"requests": 1}]}`, "reject 'html' is not json or error"},
		{"doc_url without host", `{"doc_url": "https:///a", "rate": [{"requests": 1}]}`, "doc_url"},
		{"doc_url of a script", `{"doc_url": "javascript://a/", "rate": [{"requests": 1}]}`, "doc_url"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			h := new(Handler)
			if err := caddy.StrictUnmarshalJSON([]byte(c.json), h); err != nil {
				t.Fatal(err)
			}
			testValidate(t, h, c.want)
		})
	}
}

// testValidate tests that the error of validateConfig contains want, or that
// there is none if want is empty.
func testValidate(t *testing.T, config interface{ validateConfig() error }, want string) {
	t.Helper()
	err := config.validateConfig()
	text, _ := json.Marshal(config)
	switch {
	case err == nil && want != "":
		t.Errorf("%s: got no error, want %q", text, want)
	case err != nil && (want == "" || !strings.Contains(err.Error(), want)):
		t.Errorf("%s: got error %q, want %q", text, err, want)
	}
}
