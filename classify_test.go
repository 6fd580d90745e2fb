// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"encoding/base64"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/google/go-cmp/cmp"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// newRequest returns a request as Caddy hands it to handlers. A header named
// "peer" is the address it comes from.
func newRequest(method, target string, headers ...string) (*http.Request, *caddy.Replacer) {
	r := httptest.NewRequest(method, target, nil)
	for i := 0; i < len(headers); i += 2 {
		if headers[i] == "peer" {
			r.RemoteAddr = headers[i+1]
			continue
		}
		r.Header.Add(headers[i], headers[i+1])
	}
	repl := caddy.NewReplacer()
	server := &caddyhttp.Server{Logs: new(caddyhttp.ServerLogConfig)}
	return caddyhttp.PrepareRequest(r, repl, httptest.NewRecorder(), server), repl
}

func basic(credentials string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(credentials))
}

func TestParseSources(t *testing.T) {
	notSource := func(word string) string {
		return "key source '" + word + "' is not api_key, client_ip or a text with placeholders such as {http.request.header.X-User}"
	}
	cases := []struct {
		words []string
		want  keySources
		err   string
	}{
		{words: nil, want: keySources{}},
		{words: []string{"api_key", "client_ip"}, want: keySources{{word: "api_key"}, {word: "client_ip"}}},
		{words: []string{"{client_ip}"}, want: keySources{{word: "client_ip"}}},
		{words: []string{"{http.vars.client_ip}"}, want: keySources{{word: "client_ip"}}},
		{words: []string{"{http.auth.user.id}"}, want: keySources{{"{http.auth.user.id}", []string{"http.auth.user.id"}}}},
		{
			words: []string{"a{x}b{client_ip}c"},
			want:  keySources{{"a{x}b{client_ip}c", []string{"x", "http.vars.client_ip"}}},
		},
		{words: []string{"api_key", "ip"}, err: notSource("ip")},
		{words: []string{"API_KEY"}, err: notSource("API_KEY")},
		{words: []string{""}, err: notSource("")},
		{words: []string{"{x"}, err: notSource("{x")},
		{words: []string{"x}"}, err: notSource("x}")},
		{words: []string{"{a}x}{b}"}, err: notSource("{a}x}{b}")},
		{words: []string{"{}"}, err: notSource("{}")},
		{words: []string{"{a{b}}"}, err: notSource("{a{b}}")},
		{words: []string{"{a b}"}, err: notSource("{a b}")},
		{words: []string{`\{a}{b}`}, err: notSource(`\{a}{b}`)},
		{words: []string{"{a}", "api_key", "{a}"}, err: "key source '{a}' is given twice"},
		{words: []string{"client_ip", "{client_ip}"}, err: "key source '{client_ip}' is given twice"},
	}
	for _, c := range cases {
		got, err := parseSources(c.words)
		text := ""
		if err != nil {
			text = err.Error()
		}
		if text != c.err {
			t.Errorf("parseSources(%q): got error %q, want %q", c.words, text, c.err)
		}
		if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(keySource{})); diff != "" {
			t.Errorf("parseSources(%q), -want +got:\n%s", c.words, diff)
		}
	}
}

func TestAPIKey(t *testing.T) {
	long := strings.Repeat("k", 10_000)
	cases := []struct {
		name    string
		headers []string
		want    string
	}{
		{"none", nil, ""},
		{"bearer", []string{"Authorization", "Bearer sk_1"}, "sk_1"},
		{"the scheme in any case", []string{"Authorization", "bEARER sk_1"}, "sk_1"},
		{"spaces around a token", []string{"Authorization", "  Bearer \t  sk_1 \t"}, "sk_1"},
		{"bearer without token", []string{"Authorization", "Bearer"}, ""},
		{"bearer with only spaces", []string{"Authorization", "Bearer   "}, ""},
		{"a token with a space is odd, but a key", []string{"Authorization", "Bearer a b"}, "a b"},
		{"a long token", []string{"Authorization", "Bearer " + long}, long},
		{"control characters", []string{"Authorization", "Bearer a\x00b"}, "a\x00b"},

		{"basic", []string{"Authorization", basic("sk_1:")}, "sk_1"},
		{"basic in any case", []string{"Authorization", "bAsIc " + basic("sk_1:")[6:]}, "sk_1"},
		{"basic with password", []string{"Authorization", basic("sk_1:secret:more")}, "sk_1"},
		{"basic without colon", []string{"Authorization", basic("sk_1")}, "sk_1"},
		{"basic with spaces around the user", []string{"Authorization", basic(" sk_1 :")}, "sk_1"},
		{"basic without padding", []string{"Authorization", strings.TrimRight(basic("sk_12:"), "=")}, "sk_12"},
		{"basic with junk that lenient APIs skip", []string{"Authorization", "Basic c-2t!f_ MTI6"}, "sk_12"},
		{"basic with text behind the padding", []string{"Authorization", "Basic c2tfMTo=AAAA"}, "sk_1"},
		{"basic with a lone last character", []string{"Authorization", "Basic c2tfMTo6A"}, "sk_1"},
		{"basic with a long user", []string{"Authorization", basic(long + ":")}, long},
		{"basic with an empty user is no key", []string{"Authorization", basic(":secret")}, ""},
		{"basic that is not base64 at all", []string{"Authorization", "Basic !!!"}, ""},
		{"basic with nothing", []string{"Authorization", "Basic"}, ""},

		{"other schemes", []string{"Authorization", "Digest sk_1"}, ""},
		{"no scheme", []string{"Authorization", "sk_1"}, ""},
		{"X-API-Key", []string{"X-API-Key", " sk_1 "}, "sk_1"},
		{"Authorization comes first", []string{"Authorization", "Bearer sk_1", "X-API-Key", "sk_2"}, "sk_1"},
		{"X-API-Key beside an empty user", []string{"Authorization", basic(":x"), "X-API-Key", "sk_2"}, "sk_2"},
		{"X-API-Key beside another scheme", []string{"Authorization", "Digest x", "X-API-Key", "sk_2"}, "sk_2"},
	}
	for _, c := range cases {
		r, _ := newRequest("GET", "/", c.headers...)
		if got := apiKey(r); got != c.want {
			t.Errorf("%s: got %q, want %q", c.name, got, c.want)
		}
	}
}

func FuzzAPIKey(f *testing.F) {
	f.Add("Bearer sk_test_1", "sk_test_1", "!")
	f.Add("Basic c2tfMTo=", "sk_live_2", "-_ =")
	f.Add("basic :", "ключ", "\t")
	f.Fuzz(func(t *testing.T, authorization, key, junk string) {
		with := func(authorization string) *http.Request {
			return &http.Request{Header: http.Header{"Authorization": {authorization}}}
		}
		// Whatever the standard library takes for a user is the key.
		r := with(authorization)
		got := apiKey(r)
		if user, _, ok := r.BasicAuth(); ok && got != strings.TrimSpace(user) {
			t.Errorf("apiKey(%q) = %q, want the user %q", authorization, got, user)
		}
		if got != strings.TrimSpace(got) {
			t.Errorf("apiKey(%q) = %q: not trimmed", authorization, got)
		}

		key = strings.TrimSpace(key)
		if key == "" || strings.Contains(key, ":") {
			return
		}
		if got := apiKey(with("Bearer " + key)); got != key {
			t.Errorf("Bearer %q: got %q", key, got)
		}
		// No way to write Basic makes another key.
		junk = strings.Map(func(c rune) rune {
			if 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '+' || c == '/' {
				return -1
			}
			return c
		}, junk)
		for i, credentials := 0, basic(key + ":")[6:]; i < len(credentials); i++ {
			odd := "Basic " + credentials[:i] + junk + credentials[i:]
			if got := apiKey(with(odd)); got != key {
				t.Errorf("%q: got %q, want %q", odd, got, key)
			}
		}
	})
}

func TestIdentify(t *testing.T) {
	h := newHasher([]byte("secret"))
	identify := func(t *testing.T, words []string, headers ...string) (limiters.Identity, string) {
		t.Helper()
		sources, err := parseSources(words)
		if err != nil {
			t.Fatal(err)
		}
		r, repl := newRequest("GET", "/?q=one&z=", headers...)
		id, sender := sources.identify(r, repl, apiKey(r), h, 64)
		return id, sender.String()
	}
	both := []string{"api_key", "client_ip"}
	user := []string{"{http.request.header.User}"}
	pair := []string{"{http.request.header.A}{http.request.header.B}"}

	// The literal identities were computed with Python's hmac: another hash
	// would take every user's state away in an upgrade.
	const (
		keyID  = "2af3cf7cdce2acfdae3645f2313f1fb0"
		addrID = "429d503fa8eb26bc46ed831b9dc5aa54"
		userID = "1cdba4b9b0edaa24caca8d9a57d1c813"
	)

	same := []struct {
		name    string
		words   []string
		headers []string
		want    string
		source  string
	}{
		{"bearer", both, []string{"Authorization", "Bearer sk_live_1"}, keyID, "API key"},
		{"basic", both, []string{"Authorization", basic("sk_live_1:")}, keyID, "API key"},
		{"X-API-Key", both, []string{"X-API-Key", "sk_live_1"}, keyID, "API key"},
		{"IPv6", both, []string{"peer", "[2001:db8:1:2:3::4]:1"}, addrID, "client address"},
		{"another address of the network", both, []string{"peer", "[2001:db8:1:2:ffff::]:1"}, addrID, "client address"},
		{"a user", user, []string{"User", "7"}, userID, "identity"},
		{"the first source that is not empty", append(user, both...), []string{"Authorization", "Bearer sk_live_1"}, keyID, "API key"},
		{"nothing", []string{"api_key"}, nil, limiters.Identity{}.String(), ""},
		{"no address", both, []string{"peer", "@"}, limiters.Identity{}.String(), ""},
		{"no source", nil, []string{"Authorization", "Bearer sk_live_1"}, limiters.Identity{}.String(), ""},
		{"a composite of which a part is empty", pair, []string{"A", "1"}, limiters.Identity{}.String(), ""},
		{"an unknown placeholder", []string{"{http.nonsense}"}, nil, limiters.Identity{}.String(), ""},
	}
	for _, c := range same {
		id, source := identify(t, c.words, c.headers...)
		if id.String() != c.want || source != c.source {
			t.Errorf("%s: got %v %q, want %v %q", c.name, id, source, c.want, c.source)
		}
	}

	// No two of these are one.
	distinct := []struct {
		name    string
		words   []string
		headers []string
	}{
		{"key", both, []string{"X-API-Key", "sk_live_1"}},
		{"another key", both, []string{"X-API-Key", "sk_live_2"}},
		{"a key that looks like an address", both, []string{"X-API-Key", "192.0.2.1"}},
		{"the address", both, []string{"peer", "192.0.2.1:9"}},
		{"a neighbour", both, []string{"peer", "192.0.2.2:9"}},
		{"IPv6", both, []string{"peer", "[2001:db8:1:2::1]:9"}},
		{"another network", both, []string{"peer", "[2001:db8:1:3::1]:9"}},
		{"a user", user, []string{"User", "sk_live_1"}},
		{"the same text from another place", []string{"{http.request.header.Team}"}, []string{"Team", "sk_live_1"}},
		{"a composite", pair, []string{"A", "ab", "B", "c"}},
		{"the same characters, split elsewhere", pair, []string{"A", "a", "B", "bc"}},
		{"a composite with an address", []string{"{client_ip}{http.request.header.A}"}, []string{"A", "1"}},
		{"five placeholders", []string{"{http.request.uri.query.q}{http.request.method}{http.request.host}{http.request.uri.path}{http.request.proto}"}, nil},
	}
	seen := make(map[limiters.Identity]string)
	for _, c := range distinct {
		id, _ := identify(t, c.words, c.headers...)
		if other, ok := seen[id]; ok || id.IsZero() {
			t.Errorf("%s: got %v, that of %q; want one of its own", c.name, id, other)
		}
		seen[id] = c.name
	}
}

func TestIdentify_ClientAddresses(t *testing.T) {
	h := newHasher([]byte("secret"))
	alone, err := parseSources([]string{"client_ip"})
	if err != nil {
		t.Fatal(err)
	}
	composite, err := parseSources([]string{"{client_ip} {http.request.method}"})
	if err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		name   string
		a, b   string // as the client_ip var has them
		prefix int
		same   bool
	}{
		{"IPv4 in IPv6 is IPv4", "192.0.2.1", "::ffff:192.0.2.1", 64, true},
		{"IPv4 is never cut", "192.0.2.1", "192.0.2.2", 48, false},
		{"one /64", "2001:db8:0:1::1", "2001:DB8:0:1:ffff:ffff:ffff:ffff", 64, true},
		{"two /64", "2001:db8:0:1::1", "2001:db8:0:2::1", 64, false},
		{"one /48", "2001:db8:0:1::1", "2001:db8:0:2::1", 48, true},
		{"two /48", "2001:db8:1::1", "2001:db8:2::1", 48, false},
		{"zones do not count", "fe80::1", "fe80::1%eth0", 64, true},
	}
	for _, c := range cases {
		for _, sources := range []keySources{alone, composite} {
			ids := make([]limiters.Identity, 0, 2)
			for _, address := range []string{c.a, c.b} {
				r, repl := newRequest("GET", "/")
				caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, address)
				id, _ := sources.identify(r, repl, "", h, c.prefix)
				if id.IsZero() {
					t.Errorf("%s: %s of %s gives no identity", c.name, sources[0].word, address)
				}
				ids = append(ids, id)
			}
			if got := ids[0] == ids[1]; got != c.same {
				t.Errorf("%s: %s of %s and %s: got same=%v, want %v", c.name, sources[0].word, c.a, c.b, got, c.same)
			}
		}
	}

	for _, address := range []any{"", "@", "unix", nil, 7} {
		r, repl := newRequest("GET", "/")
		caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, address)
		if id, source := alone.identify(r, repl, "", h, 64); !id.IsZero() || source != senderUnknown {
			t.Errorf("client_ip %v: got %v %q, want none", address, id, source)
		}
	}
	// In a composite a socket's "@" is a value like any other.
	r, repl := newRequest("GET", "/")
	caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, "@")
	if id, _ := composite.identify(r, repl, "", h, 64); id.IsZero() {
		t.Error("a composite of \"@\" gives no identity")
	}
}

func TestHasher(t *testing.T) {
	secret := []byte("secret")
	h := newHasher(secret)
	want := h.identity("api_key", "sk_live_1")
	if got := newHasher([]byte("other")).identity("api_key", "sk_live_1"); got == want {
		t.Error("two secrets give one identity")
	}
	clear(secret)

	// Many at once, and from states that were used before.
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 200 {
				h.identity("api_key", strings.Repeat("x", 300))
				if got := h.identity("api_key", "sk_live_1"); got != want {
					t.Errorf("got %v, want %v", got, want)
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestInShare(t *testing.T) {
	h := newHasher([]byte("secret"))
	counts := make(map[int]int)
	percents := []int{-1, 0, 1, 25, 50, 99, 100, 200}
	for i := range 10_000 {
		id := h.identity("api_key", string(rune('a'+i)))
		before := false
		for _, percent := range percents {
			in := inShare(id, percent)
			if before && !in {
				t.Fatalf("%v is in a smaller share, but not in that of %d %%", id, percent)
			}
			if before = in; in {
				counts[percent]++
			}
		}
	}
	// The hash is fixed, so these are exact.
	want := map[int]int{1: 112, 25: 2_502, 50: 4_978, 99: 9_908, 100: 10_000, 200: 10_000}
	if diff := cmp.Diff(want, counts); diff != "" {
		t.Errorf("of 10,000 identities, -want +got:\n%s", diff)
	}
	if inShare(limiters.Identity{}, 100) {
		t.Error("a request without identity is in a share")
	}
}

func TestIsTestKey(t *testing.T) {
	cases := map[string]bool{
		"sk_test_1": true, "rk_test_1": true, "pk_test_": true, "ek_test_x": true,
		"sk_org_test_1": true, "ek_org_test_": true,
		"": false, "sk_": false, "sk_live_1": false, "sk_test": false, "sk_testing_": false,
		"ck_test_1": false, "SK_TEST_1": false, "sk_org_live_1": false, "sk_org_org_test_": false,
		"org_test_1": false, "xsk_test_1": false, "test_": false, "sk_live_sk_test_": false,
	}
	for key, want := range cases {
		if got := isTestKey(key); got != want {
			t.Errorf("isTestKey(%q): got %v, want %v", key, got, want)
		}
	}
}

// failingMatcher is a matcher like a CEL expression that cannot be evaluated.
type failingMatcher struct{}

var errMatcher = errors.New("matcher failed")

func (failingMatcher) MatchWithError(*http.Request) (bool, error) { return false, errMatcher }

func matchPath(paths ...string) caddyhttp.MatcherSets {
	return caddyhttp.MatcherSets{caddyhttp.MatcherSet{caddyhttp.MatchPath(paths)}}
}

func TestCriticality(t *testing.T) {
	failing := caddyhttp.MatcherSets{caddyhttp.MatcherSet{failingMatcher{}}}
	charges := ranking{critical: matchPath("/charges")}
	cases := []struct {
		name    string
		ranking ranking
		method  string
		path    string
		key     string
		want    shedding.Criticality
		err     error
	}{
		{"get", ranking{}, "GET", "/", "", shedding.Get, nil},
		{"head", ranking{}, "HEAD", "/", "", shedding.Get, nil},
		{"options", ranking{}, "OPTIONS", "/", "", shedding.Get, nil},
		{"post", ranking{}, "POST", "/", "", shedding.Post, nil},
		{"delete", ranking{}, "DELETE", "/", "", shedding.Post, nil},
		{"an unknown method may write", ranking{}, "PURGE", "/", "", shedding.Post, nil},
		{"no matchers match nothing", ranking{critical: caddyhttp.MatcherSets{}}, "POST", "/", "", shedding.Post, nil},
		{"critical post", charges, "POST", "/charges", "", shedding.Critical, nil},
		{"critical get", charges, "GET", "/charges", "sk_live_1", shedding.Critical, nil},
		{"not critical", charges, "POST", "/other", "", shedding.Post, nil},
		{"test mode", ranking{}, "POST", "/", "sk_test_1", shedding.TestMode, nil},
		{"test mode wins over critical", charges, "POST", "/charges", "sk_test_1", shedding.TestMode, nil},
		{"test mode off", ranking{testModeOff: true}, "GET", "/", "sk_test_1", shedding.Get, nil},
		{"matchers replace the prefix", ranking{testMode: matchPath("/sandbox")}, "GET", "/", "sk_test_1", shedding.Get, nil},
		{"matchers of test mode", ranking{testMode: matchPath("/sandbox")}, "GET", "/sandbox", "sk_live_1", shedding.TestMode, nil},
		{"critical fails", ranking{critical: failing}, "GET", "/", "", 0, errMatcher},
		{"test mode fails", ranking{testMode: failing}, "GET", "/", "", 0, errMatcher},
		{"critical is not asked about test mode", ranking{critical: failing}, "GET", "/", "sk_test_1", shedding.TestMode, nil},
	}
	for _, c := range cases {
		r, _ := newRequest(c.method, c.path)
		got, err := c.ranking.criticality(r, c.key)
		if got != c.want || err != c.err {
			t.Errorf("%s: got %v, %v; want %v, %v", c.name, got, err, c.want, c.err)
		}
	}
}

func TestIsPreflight(t *testing.T) {
	cases := []struct {
		method  string
		headers []string
		want    bool
	}{
		{"OPTIONS", []string{"Origin", "https://shop.example", "Access-Control-Request-Method", "POST"}, true},
		{"OPTIONS", []string{"Origin", "https://shop.example"}, false},
		{"OPTIONS", []string{"Access-Control-Request-Method", "POST"}, false},
		{"OPTIONS", nil, false},
		{"POST", []string{"Origin", "https://shop.example", "Access-Control-Request-Method", "POST"}, false},
	}
	for _, c := range cases {
		r, _ := newRequest(c.method, "/", c.headers...)
		if got := isPreflight(r); got != c.want {
			t.Errorf("%s %q: got %v, want %v", c.method, c.headers, got, c.want)
		}
	}
}

func BenchmarkIdentify(b *testing.B) {
	h := newHasher([]byte("secret"))
	cases := []struct {
		name    string
		words   []string
		headers []string
	}{
		{"bearer", []string{"api_key"}, []string{"Authorization", "Bearer sk_live_51HcQzKq8w2RkLmNoPqRsTuVwXyZ0123456789abcdefghij"}},
		{"basic", []string{"api_key"}, []string{"Authorization", basic("sk_live_51HcQzKq8w2RkLmNoPqRsTuVwXyZ0123456789abcdefghij:")}},
		{"ipv6", []string{"api_key", "client_ip"}, []string{"peer", "[2001:db8:1:2:3:4:5:6]:9"}},
		{"composite", []string{"{http.request.header.A}-{http.request.header.B}"}, []string{"A", "team", "B", "user"}},
	}
	for _, c := range cases {
		b.Run(c.name, func(b *testing.B) {
			sources, err := parseSources(c.words)
			if err != nil {
				b.Fatal(err)
			}
			r, repl := newRequest("GET", "/", c.headers...)
			b.ReportAllocs()
			for b.Loop() {
				key := apiKey(r)
				if id, _ := sources.identify(r, repl, key, h, 64); id.IsZero() || isTestKey(key) {
					b.Fatal(id)
				}
			}
		})
	}
}
