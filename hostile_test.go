// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/prometheus/common/expfmt"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// A JSON config, of the handler or the app, is refused or means the same once it
// has been written down again; checking it never panics.
func FuzzJSON(f *testing.F) {
	f.Add([]byte(`{"rate":[{"requests":100,"per":"1s","burst":500,"mode":{"state":"enforce","percent":25}}],"concurrency":[{"capacity":20}]}`))
	f.Add([]byte(`{"fleet":{"auto":true,"reserve":20},"workers":{"count":-1,"utilization":{"source":"probe","url":"x"}},"critical":[{}]}`))
	f.Add([]byte(`{"fleet":{"capacity":9223372036854775807,"reserve":null},"workers":{"grace":-1},"mode":{"percent":-1}}`))
	f.Add([]byte(`{"rate":[null],"concurrency":[null],"key":["{","{}","api_key","\u0000"],"ipv6_prefix":-1}`))
	f.Add([]byte(`{"redis":{"addresses":["rediss://u:p@h:1/2","","unix:///x"],"db":1,"tls":{}},"key_secret":"{env.X}","on_store_error":"closed"}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		h, app := new(Handler), new(App)
		again(t, text, h, new(Handler), h.validateConfig)
		again(t, text, app, new(App), app.validateConfig)
	})
}

func again(t *testing.T, text []byte, config, copied any, validate func() error) {
	t.Helper()
	if caddy.StrictUnmarshalJSON(text, config) != nil {
		return
	}
	first, err := json.Marshal(config)
	if err != nil {
		t.Fatalf("%T cannot be written: %v", config, err)
	}
	if err := caddy.StrictUnmarshalJSON(first, copied); err != nil {
		t.Fatalf("%s: what was written cannot be read: %v", first, err)
	}
	if second, err := json.Marshal(copied); err != nil || !bytes.Equal(first, second) {
		t.Errorf("written again (%v):\n%s\n%s", err, first, second)
	}
	_ = validate()
}

// A key source is refused or gives every request the same identity twice, or none,
// whatever the request says.
func FuzzKeySource(f *testing.F) {
	f.Add("api_key", "Bearer sk_live_1", "/a")
	f.Add("{http.request.header.Authorization}|{client_ip}", "\x00\xff{}\r\n", "/")
	f.Add("{http.request.uri.query.a}{http.request.header.X}", "Basic ====", "/?a={http.request.header.Authorization}")
	f.Add("}{", "", "/")
	hasher := newHasher([]byte("s"))
	f.Fuzz(func(t *testing.T, source, authorization, path string) {
		sources, err := parseSources([]string{source})
		if err != nil {
			return
		}
		identify := func() string {
			r, repl := newRequest(http.MethodGet, "/")
			r.URL.Path, r.URL.RawQuery, _ = strings.Cut(path, "?")
			r.Header["Authorization"] = []string{authorization}
			id, _ := sources.identify(r, repl, apiKey(r), hasher, 64)
			return id.String()
		}
		// What changes from one request to the next is the source's own choice.
		if regexp.MustCompile(`time|uuid|random|duration|unix`).MatchString(source) {
			_ = identify()
			return
		}
		if a, b := identify(), identify(); a != b {
			t.Errorf("source %q gives %s, then %s", source, a, b)
		}
	})
}

// hostileKeys are API keys that nobody has.
var hostileKeys = map[string]string{
	"16 KiB":        strings.Repeat("k", 16<<10),
	"NUL":           "sk_live_\x00x",
	"braces":        "sk_{live}_{x}:{y}",
	"newline":       "sk_live\n\"level\":\"error\"",
	"invalid UTF-8": "sk_live_\xff\xfe",
	"spaces":        "sk live 1 \t :",
	"a placeholder": "{http.request.header.Authorization}{env.PATH}",
	"a Redis glob":  "*",
	"an escape":     "\x1b[31msk_live",
}

// Of an identity nothing leaves the door but its hash, however odd it is: it is
// one user, Redis's keys are clean, and so are metrics, placeholders and logs.
func TestHostileIdentities(t *testing.T) {
	redis := redistest.Start(t)
	pool := testPool(t)
	s := newServer(t)
	s.load(app(redis), "\tstripe_ratelimit "+pool+" {\n\t\tkey api_key\n\t\trate 1/h burst 2\n\t\tconcurrency 5\n\t}")
	// Go's client would refuse to send some of them: into the handler itself.
	for name, key := range hostileKeys {
		var statuses [3]int
		for i := range statuses {
			statuses[i] = s.direct(t, pool, key)
		}
		if statuses != [3]int{200, 200, 429} {
			t.Errorf("%s: got %v, want 200, 200, 429", name, statuses)
		}
	}
	keys, err := redis.Client().Keys(t.Context(), "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	clean := regexp.MustCompile(`^stripe_ratelimit:(\{control\}.*|` + pool + `:\{[0-9a-f]{32}\}:[rc]:[a-z0-9:]+)$`)
	buckets := 0
	for _, key := range keys {
		if !clean.MatchString(key) {
			t.Errorf("Redis has the key %q", key)
		}
		if strings.Contains(key, ":r:") {
			buckets++
		}
	}
	if buckets != len(hostileKeys) {
		t.Errorf("%d buckets, want one for each of %d keys", buckets, len(hostileKeys))
	}
	ctx := caddy.ActiveContext()
	families, err := ctx.GetMetricsRegistry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	var page bytes.Buffer
	for _, family := range families {
		if _, err := expfmt.MetricFamilyToText(&page, family); err != nil {
			t.Fatal(err)
		}
	}
	if text := page.String(); !utf8.ValidString(text) || strings.Contains(text, "kkkkkkkk") || strings.Contains(text, "sk_live") {
		t.Error("a key, or a part of it, stands in the metrics")
	}
}

// direct sends a request for the key through the handler of the running config.
func (s *server) direct(t *testing.T, name, key string) int {
	t.Helper()
	p := poolNamed(name)
	var st *store
	stores.Range(func(_, value any) bool { st = value.(*store); return true })
	h := &Handler{
		Pool: name, Key: []string{sourceAPIKey}, IPv6Prefix: 64,
		Rate: []*RateLimit{{Requests: 1, Per: caddy.Duration(3600e9), Burst: 2}}, Concurrency: []*ConcurrencyLimit{{Capacity: 5}},
		app: &App{hasher: newHasher([]byte("test")), declared: map[string][]*declaredLimit{}}, logger: caddy.Log(),
	}
	ctx := caddy.ActiveContext()
	if err := h.provisionLimits(ctx); err != nil {
		t.Fatal(err)
	}
	h.attached = &attachment{shared: &shared{pool: p, store: st}}
	h.attached.refs.Store(2)
	for _, l := range h.limits {
		h.attached.limits = append(h.attached.limits, p.limit(l.numbers.limit))
	}
	w := httptest.NewRecorder()
	r, repl := newRequest(http.MethodGet, "/")
	r.Header["X-Api-Key"] = []string{key}
	if err := h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })); err != nil {
		t.Fatal(err)
	}
	for _, annotation := range annotations {
		value, _ := repl.GetString(placeholderPrefix + annotation)
		if key != "*" && strings.Contains(value, key) {
			t.Errorf("placeholder %s has the key in it", annotation)
		}
	}
	for field, values := range w.Header() {
		if text := fmt.Sprint(values); strings.Contains(text, "\n") || key != "*" && strings.Contains(text, key) {
			t.Errorf("field %s: %q", field, text)
		}
	}
	return w.Code
}
