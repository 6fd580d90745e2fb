// SPDX-License-Identifier: Apache-2.0

// Package striperatelimit provides http.handlers.stripe_ratelimit: the four
// limiters of Stripe's post "Scaling your API with rate limiters" in front of
// any HTTP API served by Caddy.
package striperatelimit

import (
	"math/rand/v2"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// Handler limits how many requests each user may make (rate) and have in
// progress (concurrency), exactly, across every instance that shares a store.
// A request over its limit is denied: it is answered with 429 and told when to
// come back. When the fleet or this instance has too much to do, handlers shed
// what is less critical, with 503. A request that the handler cannot judge
// passes.
//
// Handlers that name one pool share its state, across sites, servers and
// config reloads. A request enters a pool once.
//
// These placeholders are set for later handlers, `handle_errors` and logs; the
// access log has the same as fields `ratelimit_outcome` and so on:
//
// Placeholder | Description
// ------------|---------------
// `{http.stripe_ratelimit.outcome}` | `allowed`, `denied` (429), `shed` (503), `exempt`, `store_error` or `panic`
// `{http.stripe_ratelimit.pool}` | The pool
// `{http.stripe_ratelimit.kind}` | What denied or shed: `rate`, `concurrency`, `fleet` or `workers`
// `{http.stripe_ratelimit.limit}` | The name of the limit that denied
// `{http.stripe_ratelimit.criticality}` | `critical`, `post`, `get` or `test_mode`
// `{http.stripe_ratelimit.reason}` | Why: `global-rate`, `endpoint-rate`, `global-concurrency` or `endpoint-concurrency`
// `{http.stripe_ratelimit.retry_after}` | What Retry-After says, in seconds
// `{http.stripe_ratelimit.identity}` | The keyed hash of who sent the request
// `{http.stripe_ratelimit.would_reject}` | The dark limit or shedder that would have rejected, such as `rate/candidate` or `fleet`
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

	// The share of the fleet's capacity that is kept for critical requests
	// (default: what another handler of the pool says, else none). Needs
	// `critical`.
	Fleet *FleetShedder `json:"fleet,omitempty"`

	// What this instance sheds when it has too much to do (default: what
	// another handler of the pool says, else nothing).
	Workers *WorkerShedder `json:"workers,omitempty"`

	// How every limit of this handler is applied (default: enforced).
	Mode *Mode `json:"mode,omitempty"`

	// What happens to requests when the store fails: `open` lets them pass,
	// `local` applies this instance's equal share of the limits, `closed` answers
	// all but critical ones with 503 (default: the app's).
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

	app      *App
	logger   *zap.Logger
	exempt   caddyhttp.MatcherSets
	ranking  ranking
	groups   []*keyGroup
	limits   []handlerLimit
	attached *attachment

	// Whether a private peer that sends X-Forwarded-For is worth a warning:
	// every client behind it would count as one.
	warnForwarded atomic.Bool

	complaints everySecond
	ended      atomic.Bool // by Cleanup: the logs of the config may be closed
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

func init() {
	caddy.RegisterModule(new(Handler))
}

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.stripe_ratelimit", New: func() caddy.Module { return new(Handler) }}
}

// Provision sets up the handler. It never connects to the store.
func (h *Handler) Provision(ctx caddy.Context) error {
	// First, because a config that fails below has replaced the admin endpoint.
	if err := registerMetrics(ctx.GetMetricsRegistry()); err != nil {
		return err
	}
	h.logger = ctx.Logger()
	if h.Pool == "" {
		h.Pool = "default"
	}
	if err := h.validateConfig(); err != nil {
		return err
	}
	app, err := ctx.App("stripe_ratelimit")
	if err != nil {
		return err
	}
	h.app = app.(*App)
	if h.IPv6Prefix == 0 {
		h.IPv6Prefix = 64
	}
	if len(h.Key) == 0 {
		h.Key = []string{sourceAPIKey, sourceClientIP}
	}
	if h.OnStoreError == "" {
		h.OnStoreError = h.app.OnStoreError
	}
	if err := h.provisionMatchers(ctx); err != nil {
		return err
	}
	if err := h.provisionLimits(ctx); err != nil {
		return err
	}
	if err := h.app.declareShedders(ctx, h); err != nil {
		return err
	}
	if h.Workers != nil && len(h.ranking.critical) == 0 {
		h.logger.Warn("workers without critical: under overload every request may be shed; say with critical which ones never are", zap.String("pool", h.Pool))
	}
	h.provisionWarning(ctx)
	h.attached, err = h.attach()
	return err
}

func (h *Handler) provisionMatchers(ctx caddy.Context) error {
	for field, sets := range map[string]*caddyhttp.MatcherSets{
		"ExemptRaw":   &h.exempt,
		"CriticalRaw": &h.ranking.critical,
		"TestModeRaw": &h.ranking.testMode,
	} {
		loaded, err := ctx.LoadModule(h, field)
		if err != nil {
			return err
		}
		if err := sets.FromInterface(loaded); err != nil {
			return err
		}
	}
	h.ranking.testModeOff = h.TestModeOff
	return nil
}

// provisionWarning arms the warning about clients that hide behind a proxy.
func (h *Handler) provisionWarning(ctx caddy.Context) {
	server, ok := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	h.warnForwarded.Store(ok && server.TrustedProxiesRaw == nil && slices.ContainsFunc(h.groups, (*keyGroup).byAddress))
}

// Cleanup lets go of what Provision acquired. Requests that still run keep it.
func (h *Handler) Cleanup() error {
	h.ended.Store(true)
	if h.attached != nil {
		h.attached.release()
	}
	return nil
}

// ServeHTTP applies the limits to a request.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	vars := requestVars(r)
	if first, _ := vars[verdictVar].(*verdict); first.of(h.Pool) {
		return next.ServeHTTP(w, r)
	}

	a := h.attachment()
	if a == nil {
		return next.ServeHTTP(w, r) // cannot happen; a request must not be hurt by it
	}
	defer a.leave()

	var t taken
	v := h.judge(a, w, r, vars, &t)
	defer h.giveBack(a, &t)
	if v.rejects() {
		if ended, err := h.answer(a, w, r, v); ended {
			return err
		}
	}
	_ = safely.Do("enter", func() { t.enter(a.pool, v.criticality) })
	if isUpgrade(r) {
		u := &takeover{ResponseWriterWrapper: &caddyhttp.ResponseWriterWrapper{ResponseWriter: w}, tunnel: r.ProtoMajor > 1, held: t.held}
		t.held = held{}
		defer u.leave()
		w = u
	}
	return next.ServeHTTP(w, r)
}

// attachment returns what the request shall hold while it runs, nil after a bug.
// A request may start after Cleanup: then it attaches anew, for itself.
func (h *Handler) attachment() (a *attachment) {
	if h.attached.acquire() {
		return h.attached
	}
	_ = safely.Do("attach", func() { a, _ = h.attach() })
	return a
}

// judge decides about a request and says so to it, to metrics and to the log. A
// bug in here lets the request pass.
func (h *Handler) judge(a *attachment, w http.ResponseWriter, r *http.Request, vars map[string]any, t *taken) *verdict {
	v := &verdict{outcome: outcomeAllowed, pool: h.Pool}
	repl, _ := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	h.guard(v, func() { h.decide(a, r, repl, v, t) })
	h.guard(v, func() {
		h.annotate(r, vars, repl, v)
		if !v.rejects() { // else Retry-After is not known yet
			v.trace(r)
			if h.RateLimitHeaders == nil || *h.RateLimitHeaders {
				v.setRateLimitFields(w.Header())
			}
		}
		if c := h.log().Check(zap.DebugLevel, "decided"); c != nil {
			c.Write(zap.String("pool", h.Pool), zap.Stringer("outcome", v.outcome),
				zap.Stringer("criticality", v.criticality), zap.Stringer("identity", v.identity))
		}
	})
	if !v.rejects() {
		h.count(a, v)
	}
	return v
}

// count counts the request by what becomes of it.
func (h *Handler) count(a *attachment, v *verdict) {
	h.guard(v, func() { a.pool.metrics.request(v.criticality, v.outcome) })
}

// answer rejects a request and reports whether that has ended it. After a bug
// before the first byte it goes on to the next handler, as if nothing had been
// decided. Of an answer that breaks off the client shall see that it does.
func (h *Handler) answer(a *attachment, w http.ResponseWriter, r *http.Request, v *verdict) (ended bool, err error) {
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		begun := v.begun
		if !begun || p != http.ErrAbortHandler { // which is the writer's, not ours
			h.caught(v, p)
		}
		h.count(a, v)
		if begun {
			panic(http.ErrAbortHandler)
		}
		for _, field := range rejectionFields {
			delete(w.Header(), field)
		}
	}()
	err = h.reject(w, r, v, rand.Float64())
	h.guard(v, func() { v.trace(r) })
	h.count(a, v)
	return true, err
}

// rejectionFields are what reject sets, besides Request-Id, which hurts nobody.
var rejectionFields = []string{
	"Cache-Control", "Content-Length", "Content-Type", "Ratelimit", "Ratelimit-Policy",
	"Retry-After", "Stripe-Rate-Limited-Reason", "Stripe-Should-Retry",
}

// giveBack releases what a request has taken, each part whatever becomes of the
// others.
func (h *Handler) giveBack(a *attachment, t *taken) {
	t.leave()
	admission, local := t.admission, t.local
	t.admission, t.local = limiters.Admission{}, nil
	if local != nil {
		_ = safely.Do("release", local)
	}
	_ = safely.Do("release", func() { a.store.Release(admission) })
	_ = safely.Do("release", func() { a.store.denials.Ended(admission) })
}

// guard runs code of ours. A bug in it becomes a verdict that lets the request
// pass.
func (h *Handler) guard(v *verdict, run func()) {
	defer func() {
		if p := recover(); p != nil {
			h.caught(v, p)
		}
	}()
	run()
}

// caught makes a bug a verdict that lets the request pass, and tells of it.
func (h *Handler) caught(v *verdict, p any) {
	*v = verdict{outcome: outcomePanic, pool: v.pool, criticality: v.criticality, identity: v.identity}
	_ = safely.Do("log", func() {
		h.complain("bug in stripe_ratelimit; requests pass, leases and claims end by themselves",
			zap.String("panic", safely.Describe(p)), zap.Stack("stack"))
	})
}

// log returns where the handler logs to. The logs of a config that has ended are
// closed: a file would be opened anew, for ever, or the line be lost.
func (h *Handler) log() *zap.Logger {
	if h.ended.Load() {
		return caddy.Log().Named("http.handlers.stripe_ratelimit")
	}
	return h.logger
}

// complain logs what is wrong with the handler, at most once a second: it may be
// so for every request.
func (h *Handler) complain(message string, fields ...zap.Field) {
	if more, ok := h.complaints.allow(time.Now()); ok {
		h.log().Error(message, append(fields, zap.Int64("complaints_not_logged", more))...)
	}
}

// Interface guards
var (
	_ caddy.Module                = (*Handler)(nil)
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyfile.Unmarshaler       = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
