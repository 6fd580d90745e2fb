// SPDX-License-Identifier: Apache-2.0

// Package striperatelimit provides http.handlers.stripe_ratelimit: the four
// limiters of Stripe's post "Scaling your API with rate limiters" in front of
// any HTTP API served by Caddy.
package striperatelimit

import (
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Handler limits how many requests each user may make (rate) and have in
// progress (concurrency), exactly, across every instance that shares a store.
// A request over its limit is answered with 429 and told when to come back; a
// request that the limiter itself cannot judge passes.
//
// Handlers that name one pool share its state, across sites, servers and
// config reloads.
//
// TODO(placeholders table)
type Handler struct {
	// The pool whose buckets, leases and counts this handler shares with every
	// other handler that names it (default `default`).
	Pool string `json:"pool,omitempty"`

	// Where the identity of a request comes from; the first source that is not
	// empty wins (default `["api_key", "client_ip"]`). A source is `api_key`
	// (the user of `Authorization: Basic`, the token of `Bearer`, or
	// `X-API-Key`), `client_ip`, or a text with placeholders, which is empty
	// if one of them is empty.
	Key []string `json:"key,omitempty"`

	// How many bits of an IPv6 client address make one identity, 48 to 64
	// (default 64).
	IPv6Prefix int `json:"ipv6_prefix,omitempty"`

	// Requests that no limiter looks at, for example health checks.
	ExemptRaw caddyhttp.RawMatcherSets `json:"exempt,omitempty" caddy:"namespace=http.matchers"`

	// Requests that the business cannot do without. They are never shed.
	CriticalRaw caddyhttp.RawMatcherSets `json:"critical,omitempty" caddy:"namespace=http.matchers"`

	// Requests in test mode, which are shed first (default: the API key starts
	// with `sk_test_`, `rk_test_`, `pk_test_` or `ek_test_`, or the same with
	// `org_` before `test_`).
	TestModeRaw caddyhttp.RawMatcherSets `json:"test_mode,omitempty" caddy:"namespace=http.matchers"`

	// Do not recognize test mode at all.
	TestModeOff bool `json:"test_mode_off,omitempty"`

	// Token buckets: how many requests over time.
	Rate []*RateLimit `json:"rate,omitempty"`

	// Concurrency limits: how many requests in progress.
	Concurrency []*ConcurrencyLimit `json:"concurrency,omitempty"`

	// How every limit of this handler is applied (default: enforced).
	Mode *Mode `json:"mode,omitempty"`

	// What happens to requests when the store fails: `open` lets them pass
	// (default: the app's).
	OnStoreError string `json:"on_store_error,omitempty"`

	// Whether allowed responses carry the RateLimit and RateLimit-Policy
	// fields (default true). Rejections always carry Retry-After.
	RateLimitHeaders *bool `json:"ratelimit_headers,omitempty"`

	// `auto` sets Stripe-Should-Retry: true on rejections whose wait is at
	// most one second, so that Stripe's client libraries retry by themselves;
	// `omit` leaves that to the client, as Stripe's API does (default `omit`).
	ShouldRetry string `json:"should_retry,omitempty"`

	// The address that rejections give as doc_url.
	DocURL string `json:"doc_url,omitempty"`

	// `json` answers rejections itself; `error` returns a Caddy error of the
	// same status with the same headers, for `handle_errors` (default `json`).
	Reject string `json:"reject,omitempty"`
}

// RateLimit is one token bucket for each identity: requests refill it, and a
// request that finds too few tokens is denied.
type RateLimit struct {
	// The name of the limit, unique in its pool among rate limits (default
	// `rate`).
	Name string `json:"name,omitempty"`

	// How many requests each period allows in the long run. Required.
	Requests int64 `json:"requests"`

	// The period (default 1s).
	Per caddy.Duration `json:"per,omitempty"`

	// How many tokens a full bucket holds, so how many requests may come at
	// once (default: five times requests for a period of one second or less,
	// else requests).
	Burst int64 `json:"burst,omitempty"`

	// How many tokens one request takes (default 1).
	Cost int64 `json:"cost,omitempty"`

	// Where the identity comes from, if other than for the rest of the handler.
	Key []string `json:"key,omitempty"`

	// The requests that the limit applies to (default: all). A limit with
	// matchers is reported as an endpoint limit, one without as a global one.
	MatchRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// How the limit is applied (default: enforced).
	Mode *Mode `json:"mode,omitempty"`
}

// ConcurrencyLimit is a number of requests that each identity may have in
// progress.
type ConcurrencyLimit struct {
	// The name of the limit, unique in its pool among concurrency limits
	// (default `concurrency`).
	Name string `json:"name,omitempty"`

	// How many requests may be in progress at once. Required.
	Capacity int64 `json:"capacity"`

	// How long the slots of an instance that died stay taken, 1s to 1h
	// (default 10s). Requests may take any time: their lease is renewed.
	Lease caddy.Duration `json:"lease,omitempty"`

	// Where the identity comes from, if other than for the rest of the handler.
	Key []string `json:"key,omitempty"`

	// The requests that the limit applies to (default: all).
	MatchRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// How the limit is applied (default: enforced).
	Mode *Mode `json:"mode,omitempty"`
}

// Mode is how a limit, or every limit of a handler, is applied. The weakest of
// all that concern a limit is in force.
type Mode struct {
	// `off` does nothing, `dark` decides and counts but never rejects,
	// `enforce` rejects. Required.
	State string `json:"state"`

	// With `enforce`: the share of identities, 0 to 100, for which the limit is
	// enforced; for the others, and for requests without identity, it is dark
	// (default 100). An identity is always on the same side.
	Percent *int `json:"percent,omitempty"`
}
