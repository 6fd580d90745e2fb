// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/google/go-cmp/cmp"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// said returns what a limit of the kind says: rates as "100/1s burst 500 cost
// 1", concurrency as "20".
func said(t testing.TB, name, numbers string, result limiters.Result) limitVerdict {
	t.Helper()
	var l *limiters.Limit
	var err error
	if text, ok := strings.CutPrefix(numbers, "concurrency "); ok {
		var capacity int64
		if _, err := fmt.Sscan(text, &capacity); err != nil {
			t.Fatal(err)
		}
		l, err = limiters.NewConcurrency("default", name, capacity, 10*time.Second)
	} else {
		var requests, burst, cost int64
		var per string
		if _, err := fmt.Sscanf(strings.Replace(numbers, "/", " ", 1), "%d %s burst %d cost %d", &requests, &per, &burst, &cost); err != nil {
			t.Fatal(err)
		}
		period, err := time.ParseDuration(per)
		if err != nil {
			t.Fatal(err)
		}
		if l, err = limiters.NewRate("default", name, requests, period, burst, cost); err != nil {
			t.Fatal(err)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return limitVerdict{limitNumbers: newLimitNumbers(l), sender: senderAPIKey, result: &result}
}

// deniedBy returns the verdict of a request that its first limit denied.
func deniedBy(limits ...limitVerdict) *verdict {
	return &verdict{outcome: outcomeDenied, pool: "default", denied: &limits[0], limits: limits}
}

func limitDenied(remaining int64, retryAfter, nextToken time.Duration) limiters.Result {
	return limiters.Result{Outcome: limiters.Denied, Remaining: remaining, RetryAfter: retryAfter, NextToken: nextToken}
}

func limitAllowed(remaining int64, nextToken time.Duration) limiters.Result {
	return limiters.Result{Outcome: limiters.Allowed, Remaining: remaining, NextToken: nextToken}
}

// flat returns the fields of a response one a line, as they are sent.
func flat(header http.Header) string {
	var b strings.Builder
	if err := header.Write(&b); err != nil {
		panic(err)
	}
	return strings.ReplaceAll(b.String(), "\r\n", "\n")
}

func TestReject(t *testing.T) {
	off := false
	rate := "100/1s burst 500 cost 1"
	short := limitDenied(0, 10*time.Millisecond, 10*time.Millisecond)
	endpoint := func(l limitVerdict) limitVerdict {
		l.endpoint = true
		return l
	}
	from := func(sender senderKind, l limitVerdict) limitVerdict {
		l.sender = sender
		return l
	}
	cases := []struct {
		name    string
		handler *Handler
		verdict *verdict
		u       float64
		status  int
		header  string // besides Cache-Control, Content-Length, Content-Type, Request-Id
		body    string
	}{
		{
			name:    "a rate",
			verdict: deniedBy(said(t, "rate", rate, short)),
			status:  429,
			header: "Ratelimit: \"rate\";r=0;t=1\n" +
				"Ratelimit-Policy: \"rate\";q=500;w=5\n" +
				"Retry-After: 1\n" +
				"Stripe-Rate-Limited-Reason: global-rate\n",
			body: `{"error":{"type":"invalid_request_error","code":"rate_limit","message":"Request rate limit exceeded: 100 requests per second for this API key (limit \"rate\"). Retry after 1 second."}}`,
		},
		{
			name:    "a rate with everything",
			handler: &Handler{ShouldRetry: "auto", DocURL: "https://docs.example/limits?a=1&b=\"<é>"},
			verdict: deniedBy(endpoint(from(senderClientAddress, said(t, "search", "5/10s burst 5 cost 1", limitDenied(0, time.Second, time.Second)))), said(t, "rate", rate, limitAllowed(499, 5*time.Millisecond))),
			u:       0.99,
			status:  429,
			header: "Ratelimit: \"search\";r=0;t=1, \"rate\";r=499\n" +
				"Ratelimit-Policy: \"search\";q=5;w=10, \"rate\";q=500;w=5\n" +
				"Retry-After: 2\n" +
				"Stripe-Rate-Limited-Reason: endpoint-rate\n" +
				"Stripe-Should-Retry: true\n",
			body: `{"error":{"type":"invalid_request_error","code":"rate_limit","message":"Request rate limit exceeded: 5 requests per 10 seconds for this client address (limit \"search\"). Retry after 2 seconds.","doc_url":"https://docs.example/limits?a=1&b=\"<é>"}}`,
		},
		{
			name:    "a longer wait is no matter for automatic retries",
			handler: &Handler{ShouldRetry: "auto"},
			verdict: deniedBy(from(senderIdentity, said(t, "rate", "1000/1h burst 1000 cost 1", limitDenied(0, 1001*time.Millisecond, 1001*time.Millisecond)))),
			status:  429,
			header: "Ratelimit: \"rate\";r=0;t=2\n" +
				"Ratelimit-Policy: \"rate\";q=1000;w=3600\n" +
				"Retry-After: 2\n" +
				"Stripe-Rate-Limited-Reason: global-rate\n",
			body: `{"error":{"type":"invalid_request_error","code":"rate_limit","message":"Request rate limit exceeded: 1000 requests per hour for this identity (limit \"rate\"). Retry after 2 seconds."}}`,
		},
		{
			name:    "should_retry omit",
			handler: &Handler{ShouldRetry: "omit"},
			verdict: deniedBy(said(t, "rate", rate, short)),
			status:  429,
			header: "Ratelimit: \"rate\";r=0;t=1\n" +
				"Ratelimit-Policy: \"rate\";q=500;w=5\n" +
				"Retry-After: 1\n" +
				"Stripe-Rate-Limited-Reason: global-rate\n",
			body: `{"error":{"type":"invalid_request_error","code":"rate_limit","message":"Request rate limit exceeded: 100 requests per second for this API key (limit \"rate\"). Retry after 1 second."}}`,
		},
		{
			name:    "a cost: tokens are left, but too few",
			verdict: deniedBy(said(t, "export", "1/1s burst 10 cost 5", limitDenied(3, 1500*time.Millisecond, 500*time.Millisecond))),
			u:       0.5,
			status:  429,
			header: "Ratelimit: \"export\";r=3;t=1\n" +
				"Ratelimit-Policy: \"export\";q=10;w=10\n" +
				"Retry-After: 3\n" +
				"Stripe-Rate-Limited-Reason: global-rate\n",
			body: `{"error":{"type":"invalid_request_error","code":"rate_limit","message":"Request rate limit exceeded: 1 request per second for this API key (limit \"export\", where this request counts as 5). Retry after 3 seconds."}}`,
		},
		{
			name:    "concurrency",
			handler: &Handler{ShouldRetry: "auto"},
			verdict: deniedBy(said(t, "concurrency", "concurrency 20", limitDenied(0, 0, 0)), said(t, "rate", rate, limitAllowed(7, 3*time.Second))),
			u:       0.5,
			status:  429,
			header: "Ratelimit: \"concurrency\";r=0, \"rate\";r=7\n" +
				"Ratelimit-Policy: \"concurrency\";q=20;qu=\"concurrent-requests\", \"rate\";q=500;w=5\n" +
				"Retry-After: 2\n" +
				"Stripe-Rate-Limited-Reason: global-concurrency\n",
			body: `{"error":{"type":"invalid_request_error","code":"rate_limit","message":"Request concurrency limit exceeded: 20 requests in progress for this API key (limit \"concurrency\"). Retry after 2 seconds."}}`,
		},
		{
			name:    "concurrency of an endpoint, of one",
			verdict: deniedBy(endpoint(said(t, "export", "concurrency 1", limitDenied(0, 0, 0)))),
			status:  429,
			header: "Ratelimit: \"export\";r=0\n" +
				"Ratelimit-Policy: \"export\";q=1;qu=\"concurrent-requests\"\n" +
				"Retry-After: 1\n" +
				"Stripe-Rate-Limited-Reason: endpoint-concurrency\n",
			body: `{"error":{"type":"invalid_request_error","code":"rate_limit","message":"Request concurrency limit exceeded: 1 request in progress for this API key (limit \"export\"). Retry after 1 second."}}`,
		},
		{
			name:    "a denial from the cache knows the wait only",
			verdict: deniedBy(said(t, "rate", rate, limitDenied(0, 1200*time.Millisecond, 0))),
			status:  429,
			header: "Ratelimit: \"rate\";r=0;t=2\n" +
				"Ratelimit-Policy: \"rate\";q=500;w=5\n" +
				"Retry-After: 2\n" +
				"Stripe-Rate-Limited-Reason: global-rate\n",
			body: `{"error":{"type":"invalid_request_error","code":"rate_limit","message":"Request rate limit exceeded: 100 requests per second for this API key (limit \"rate\"). Retry after 2 seconds."}}`,
		},
		{
			name:    "ratelimit_headers off",
			handler: &Handler{RateLimitHeaders: &off},
			verdict: deniedBy(said(t, "rate", rate, short)),
			status:  429,
			header:  "Retry-After: 1\nStripe-Rate-Limited-Reason: global-rate\n",
			body:    `{"error":{"type":"invalid_request_error","code":"rate_limit","message":"Request rate limit exceeded: 100 requests per second for this API key (limit \"rate\"). Retry after 1 second."}}`,
		},
		{
			name:    "closed",
			handler: &Handler{ShouldRetry: "auto", DocURL: "https://docs.example"},
			verdict: &verdict{outcome: outcomeStoreError, closed: true, limits: []limitVerdict{said(t, "rate", rate, limitAllowed(1, 1))}},
			u:       0.7,
			status:  503,
			header:  "Retry-After: 3\n",
			body:    `{"error":{"type":"api_error","code":"limiter_unavailable","message":"The request cannot be checked against its limits at the moment. Retry after 3 seconds.","doc_url":"https://docs.example"}}`,
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if !c.verdict.rejects() {
				t.Error("the verdict does not reject")
			}
			h := c.handler
			if h == nil {
				h = new(Handler)
			}
			for _, method := range []string{"POST", "HEAD"} {
				r, repl := newRequest(method, "/")
				w := httptest.NewRecorder()
				if err := h.reject(w, r, c.verdict, c.u); err != nil {
					t.Fatalf("%s: got error %v", method, err)
				}
				id, _ := repl.GetString("http.request.uuid")
				want := "Cache-Control: no-store\n"
				if method == "HEAD" { // else net/http counts
					want += fmt.Sprintf("Content-Length: %d\n", len(c.body))
				}
				want += "Content-Type: application/json\n"
				rateLimit, rest, _ := strings.Cut(c.header, "Retry-After")
				want += rateLimit + "Request-Id: " + id + "\nRetry-After" + rest
				if diff := cmp.Diff(want, flat(w.Header())); diff != "" || w.Code != c.status {
					t.Errorf("%s: got status %d, want %d; header, -want +got:\n%s", method, w.Code, c.status, diff)
				}
				body := c.body
				if method == "HEAD" {
					body = ""
				}
				if got := w.Body.String(); got != body {
					t.Errorf("%s: body\n got %s\nwant %s", method, got, body)
				}
				if !json.Valid([]byte(c.body)) {
					t.Error("the wanted body is no JSON")
				}
				checkGrammar(t, w.Header())
			}
		})
	}
}

func TestReject_Error(t *testing.T) {
	h := Handler{Reject: "error", ShouldRetry: "auto", DocURL: "https://docs.example"}
	limit := said(t, "rate", "100/1s burst 500 cost 1", limitDenied(0, time.Millisecond, time.Millisecond))
	cases := []struct {
		verdict *verdict
		status  int
		message string
		header  string
	}{
		{
			deniedBy(limit), 429,
			`Request rate limit exceeded: 100 requests per second for this API key (limit "rate"). Retry after 1 second.`,
			"Cache-Control: no-store\nRatelimit: \"rate\";r=0;t=1\nRatelimit-Policy: \"rate\";q=500;w=5\nRequest-Id: req_1\nRetry-After: 1\n" +
				"Stripe-Rate-Limited-Reason: global-rate\nStripe-Should-Retry: true\n",
		},
		{
			&verdict{outcome: outcomeStoreError, closed: true}, 503,
			"The request cannot be checked against its limits at the moment. Retry after 1 second.",
			"Cache-Control: no-store\nRequest-Id: req_1\nRetry-After: 1\n",
		},
	}
	for _, c := range cases {
		r, _ := newRequest("POST", "/")
		w := httptest.NewRecorder()
		w.Header().Set("Request-Id", "req_1") // as an outer handler set it
		err := h.reject(w, r, c.verdict, 0)
		// Not errors.As: Caddy's error routes look at the error itself.
		handlerErr, ok := err.(caddyhttp.HandlerError)
		if !ok || handlerErr.StatusCode != c.status || handlerErr.Err.Error() != c.message {
			t.Errorf("got error %#v, want a bare HandlerError of %d: %s", err, c.status, c.message)
		}
		if diff := cmp.Diff(c.header, flat(w.Header())); diff != "" || w.Body.Len() > 0 {
			t.Errorf("%d: got body %q, want none; header, -want +got:\n%s", c.status, w.Body, diff)
		}
	}
}

// What pools that a request has passed say of themselves does not contradict the
// rejection.
func TestReject_AfterOtherPools(t *testing.T) {
	limit := said(t, "rate", "1/1s burst 1 cost 1", limitDenied(0, time.Millisecond, time.Millisecond))
	cases := []struct {
		name      string
		verdict   *verdict
		rateLimit []string
	}{
		{"denied", deniedBy(limit), []string{`"edge";r=3, "other";r=1`, `"rate";r=0;t=1`}},
		{"closed", &verdict{outcome: outcomeStoreError, closed: true}, nil},
		{"shed", &verdict{outcome: outcomeShed, shedBy: fleetShedder}, nil},
	}
	for _, c := range cases {
		r, _ := newRequest("GET", "/")
		w := httptest.NewRecorder()
		w.Header().Set("RateLimit", `"edge";r=3;t=60, "other";r=1`)
		w.Header().Set("RateLimit-Policy", `"edge";q=5;w=300, "other";q=1;w=60`)
		if err := new(Handler).reject(w, r, c.verdict, 0); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(c.rateLimit, w.Header().Values("RateLimit")); diff != "" {
			t.Errorf("%s: RateLimit, -want +got:\n%s", c.name, diff)
		}
		if got, want := len(w.Header().Values("RateLimit-Policy")), len(c.rateLimit); got != want {
			t.Errorf("%s: got RateLimit-Policy %d times, want %d", c.name, got, want)
		}
	}
}

func TestReject_LogLevel(t *testing.T) {
	limit := said(t, "rate", "1/1s burst 1 cost 1", limitDenied(0, time.Millisecond, time.Millisecond))
	closed := &verdict{outcome: outcomeStoreError, closed: true}
	cases := []struct {
		name    string
		before  any
		verdict *verdict
		want    any
	}{
		{"a 429 is no error anyway", nil, deniedBy(limit), nil},
		{"a 503 is not logged as an error", nil, closed, "INFO"},
		{"unless somebody wants it so", "ERROR", closed, "ERROR"},
	}
	for _, c := range cases {
		r, _ := newRequest("GET", "/")
		caddyhttp.SetVar(r.Context(), caddyhttp.LogLevelVar, c.before)
		if err := new(Handler).reject(httptest.NewRecorder(), r, c.verdict, 0); err != nil {
			t.Fatal(err)
		}
		if got := caddyhttp.GetVar(r.Context(), caddyhttp.LogLevelVar); got != c.want {
			t.Errorf("%s: got log_level %v, want %v", c.name, got, c.want)
		}
	}
}

func TestRetryAfter(t *testing.T) {
	const almost1 = 1 - 1.0/(1<<53)
	cases := []struct {
		wait        time.Duration
		least, most int // with u = 0 and with u almost 1
	}{
		{0, 1, 3},
		{1, 1, 2},
		{time.Second, 1, 2},
		{time.Second + 1, 2, 3},
		{9 * time.Second, 9, 10},
		{9*time.Second + 1, 10, 12},
		{100 * time.Second, 100, 120},
		{24 * time.Hour, 86_400, 103_680},
		{math.MaxInt64, 9_223_372_037, 11_068_046_444},
	}
	for _, c := range cases {
		if got := retryAfter(c.wait, 0); got != c.least {
			t.Errorf("retryAfter(%v, 0): got %d, want %d", c.wait, got, c.least)
		}
		if got := retryAfter(c.wait, almost1); got != c.most {
			t.Errorf("retryAfter(%v, almost 1): got %d, want %d", c.wait, got, c.most)
		}
		// Every second between comes as often as any other.
		seen := make(map[int]int)
		n := c.most - c.least + 1
		if n > 1_000_000 {
			continue
		}
		for i := range n {
			seen[retryAfter(c.wait, (float64(i)+0.5)/float64(n))]++
		}
		if len(seen) != n || seen[c.least] != 1 || seen[c.most] != 1 {
			t.Errorf("retryAfter(%v, …): got %d values, want each from %d to %d once", c.wait, len(seen), c.least, c.most)
		}
	}
}

func TestLimitWords(t *testing.T) {
	cases := []struct {
		numbers  string
		policy   string
		exceeded string
	}{
		{"100/1s burst 500 cost 1", `"x";q=500;w=5`, "100 requests per second"},
		{"1/1s burst 1 cost 1", `"x";q=1;w=1`, "1 request per second"},
		{"1000/1s burst 1 cost 1", `"x";q=1;w=1`, "1000 requests per second"},
		{"3/1s burst 10 cost 1", `"x";q=10;w=4`, "3 requests per second"},
		{"3/1s burst 9 cost 1", `"x";q=9;w=3`, "3 requests per second"},
		{"5/10s burst 5 cost 1", `"x";q=5;w=10`, "5 requests per 10 seconds"},
		{"60/1m burst 60 cost 1", `"x";q=60;w=60`, "60 requests per minute"},
		{"60/90s burst 60 cost 1", `"x";q=60;w=90`, "60 requests per 90 seconds"},
		{"10/90m burst 1 cost 1", `"x";q=1;w=540`, "10 requests per 90 minutes"},
		{"10/24h burst 1 cost 1", `"x";q=1;w=8640`, "10 requests per day"},
		{"10/48h burst 1 cost 1", `"x";q=1;w=17280`, "10 requests per 2 days"},
		{"10/500ms burst 1 cost 1", `"x";q=1;w=1`, "10 requests per 500 milliseconds"},
		{"10/1ms burst 1 cost 1", `"x";q=1;w=1`, "10 requests per millisecond"},
		{"10/1500us burst 1 cost 1", `"x";q=1;w=1`, "10 requests per 1500 microseconds"},
		{"1/8760h burst 285616 cost 1", `"x";q=285616;w=9007186176000`, "1 request per 365 days"},
		{"concurrency 20", `"x";q=20;qu="concurrent-requests"`, "20 requests in progress"},
		{"concurrency 9007199254740992", `"x";q=999999999999999;qu="concurrent-requests"`, "9007199254740992 requests in progress"},
	}
	for _, c := range cases {
		words := said(t, "x", c.numbers, limiters.Result{}).words
		kind, _, _ := strings.Cut(c.numbers, " ")
		if kind != "concurrency" {
			kind = "rate"
		}
		want := "Request " + kind + " limit exceeded: " + c.exceeded + " for this "
		if words.policy != c.policy || words.exceeded != want {
			t.Errorf("%s: got %s and %q, want %s and %q", c.numbers, words.policy, words.exceeded, c.policy, want)
		}
	}
}

// The fields as draft-ietf-httpapi-ratelimit-headers-11 has them, and no other
// way in which RFC 9651 would let one write the same.
var (
	rateLimitItem = regexp.MustCompile(`^"[a-z][a-z0-9_-]*";r=(0|[1-9][0-9]{0,14})(;t=[1-9][0-9]{0,14})?$`)
	policyItem    = regexp.MustCompile(`^"[a-z][a-z0-9_-]*";q=(0|[1-9][0-9]{0,14})(;w=[1-9][0-9]{0,14}|;qu="concurrent-requests")$`)
)

func checkGrammar(t *testing.T, header http.Header) {
	t.Helper()
	for name, item := range map[string]*regexp.Regexp{"RateLimit": rateLimitItem, "RateLimit-Policy": policyItem} {
		for _, line := range header.Values(name) {
			for text := range strings.SplitSeq(line, ", ") {
				if !item.MatchString(text) {
					t.Errorf("%s: %q is not an item", name, text)
				}
			}
		}
	}
}

func TestSetRateLimitFields(t *testing.T) {
	rate := func(result limiters.Result) limitVerdict { return said(t, "rate", "100/1s burst 500 cost 1", result) }
	day := func(result limiters.Result) limitVerdict { return said(t, "day", "1000/24h burst 1000 cost 1", result) }
	concurrency := func(result limiters.Result) limitVerdict { return said(t, "concurrency", "concurrency 20", result) }
	edge := http.Header{"Ratelimit": {`"edge";r=9`}, "Ratelimit-Policy": {`"edge";q=10;w=1`}}
	cases := []struct {
		name   string
		before http.Header
		limits []limitVerdict
		want   string
	}{
		{"no limit", nil, nil, ""},
		{
			"a full bucket", nil,
			[]limitVerdict{rate(limitAllowed(500, 0))},
			"Ratelimit: \"rate\";r=500\nRatelimit-Policy: \"rate\";q=500;w=5\n",
		},
		{
			"everything", nil,
			[]limitVerdict{rate(limitAllowed(12, 1)), day(limitAllowed(0, 86*time.Second+1)), concurrency(limitAllowed(19, 0))},
			"Ratelimit: \"rate\";r=12;t=1, \"day\";r=0;t=87, \"concurrency\";r=19\n" +
				"Ratelimit-Policy: \"rate\";q=500;w=5, \"day\";q=1000;w=86400, \"concurrency\";q=20;qu=\"concurrent-requests\"\n",
		},
		{
			"only limits that denied say when", nil,
			[]limitVerdict{rate(limitAllowed(12, time.Second)), day(limitDenied(0, time.Minute, time.Minute))},
			"Ratelimit: \"rate\";r=12, \"day\";r=0;t=60\n" +
				"Ratelimit-Policy: \"rate\";q=500;w=5, \"day\";q=1000;w=86400\n",
		},
		{
			"a store that did not answer", nil,
			[]limitVerdict{rate(limiters.Result{}), concurrency(limitAllowed(1, 0)), day(limiters.Result{})},
			"Ratelimit: \"concurrency\";r=1\nRatelimit-Policy: \"concurrency\";q=20;qu=\"concurrent-requests\"\n",
		},
		{"only stores that did not answer", nil, []limitVerdict{rate(limiters.Result{})}, ""},
		{
			"another pool came before", edge,
			[]limitVerdict{concurrency(limitAllowed(1, 0))},
			"Ratelimit: \"edge\";r=9\nRatelimit: \"concurrency\";r=1\n" +
				"Ratelimit-Policy: \"edge\";q=10;w=1\nRatelimit-Policy: \"concurrency\";q=20;qu=\"concurrent-requests\"\n",
		},
	}
	for _, c := range cases {
		header := c.before.Clone()
		if header == nil {
			header = make(http.Header)
		}
		(&verdict{limits: c.limits}).setRateLimitFields(header)
		if diff := cmp.Diff(c.want, flat(header)); diff != "" {
			t.Errorf("%s, -want +got:\n%s", c.name, diff)
		}
		checkGrammar(t, header)
		// What a later handler adds to one field stays out of the other.
		policy := header.Clone()["Ratelimit-Policy"]
		header.Add("RateLimit", "x")
		if diff := cmp.Diff(policy, header["Ratelimit-Policy"]); diff != "" {
			t.Errorf("%s: adding to RateLimit changed RateLimit-Policy:\n%s", c.name, diff)
		}
	}
}

func TestAppendJSON(t *testing.T) {
	for _, text := range []string{"", "plain", "a\"b\\c/d", "\x00\x1f\n\t\x7f", "é€😀", "<script>&", "bad\xffbytes"} {
		got := append(appendJSON([]byte(`"`), text), '"')
		var back string
		if err := json.Unmarshal(got, &back); err != nil || back != strings.ToValidUTF8(text, "\uFFFD") {
			t.Errorf("appendJSON(%q) = %s, which reads as %q, %v", text, got, back, err)
		}
	}
}

func BenchmarkAllowed(b *testing.B) {
	limits := []limitVerdict{
		said(b, "rate", "100/1s burst 500 cost 1", limitAllowed(42, time.Millisecond)),
		said(b, "concurrency", "concurrency 20", limitAllowed(19, 0)),
	}
	r, repl := newRequest("GET", "/")
	r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server).Logs = nil
	vars := r.Context().Value(caddyhttp.VarsCtxKey).(map[string]any)
	header := make(http.Header)
	h := new(Handler)
	fresh := *repl
	b.ReportAllocs()
	for b.Loop() {
		*repl = fresh
		delete(vars, verdictVar)
		clear(header)
		v := &verdict{outcome: outcomeAllowed, limits: limits}
		h.annotate(r, requestVars(r), repl, v)
		v.setRateLimitFields(header)
	}
}

func BenchmarkReject(b *testing.B) {
	v := deniedBy(said(b, "rate", "100/1s burst 500 cost 1", limitDenied(0, time.Millisecond, time.Millisecond)))
	r, _ := newRequest("GET", "/")
	h := new(Handler)
	b.ReportAllocs()
	for b.Loop() {
		if err := h.reject(httptest.NewRecorder(), r, v, 0.5); err != nil {
			b.Fatal(err)
		}
	}
}
