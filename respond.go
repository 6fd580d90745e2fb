// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// outcome is what became of a request.
type outcome string

const (
	outcomeAllowed    outcome = "allowed"
	outcomeDenied     outcome = "denied"      // 429: the user's own share is used up
	outcomeShed       outcome = "shed"        // 503: our health
	outcomeExempt     outcome = "exempt"      // not looked at
	outcomeStoreError outcome = "store_error" // the store failed: passed, or 503 with on_store_error closed
	outcomePanic      outcome = "panic"       // a bug of ours: passed
)

// verdict is all that was decided about a request. It alone feeds the
// response, metrics, logs and placeholders, so they cannot disagree. Once
// annotate has seen it, it must not be reused for another request.
type verdict struct {
	outcome     outcome
	pool        string
	criticality shedding.Criticality // zero if the request was not classified
	identity    limiters.Identity    // of the handler's key; zero if there is none

	// The enforced limit that denied: the one with the longest wait; rate
	// before concurrency.
	denied *limitVerdict

	// The dark limit that would have denied, if any.
	wouldReject *limitVerdict

	// Every enforced limit that applied, for the RateLimit fields.
	limits []limitVerdict

	retryAfter int  // seconds, on rejections: what Retry-After says; reject sets it
	closed     bool // on_store_error closed turned the store error into a 503

	latest *verdict // of a later handler on the request's way; see annotate
}

// limitVerdict is what one limit said.
type limitVerdict struct {
	limit    *limiters.Limit
	words    *limitWords // newLimitWords(limit), made once at Provision
	source   string      // key source word for messages: "API key", "client address", "identity"
	endpoint bool        // the limit has matchers
	dark     bool        // it only counts
	result   limiters.Result
}

// limitWords is what responses say of one limit, rendered once.
type limitWords struct {
	policy    string // its item of RateLimit-Policy
	remaining string // its item of RateLimit, up to the number that remains
	exceeded  string // the message up to the source of the key
	named     string // the message from there to the wait
}

// rejects reports whether the request ends here.
func (v *verdict) rejects() bool {
	return v.outcome == outcomeDenied || v.outcome == outcomeShed || v.closed
}
