// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"encoding/json"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// keyGroup is a list of key sources, and so an identity, that limits share.
type keyGroup struct {
	key     []string
	sources keySources
	limits  []int // in Handler.limits, rate before concurrency
}

// handlerLimit is one limit as this handler applies it.
type handlerLimit struct {
	numbers *limitNumbers // of this config
	match   caddyhttp.MatcherSets
	modes   [2]*Mode // the handler's and the limit's
}

// endpoint reports whether the limit is for some requests only.
func (l *handlerLimit) endpoint() bool { return len(l.match) > 0 }

// strength is that of the weakest mode.
func (l *handlerLimit) strength() float64 {
	return min(l.modes[0].strength(), l.modes[1].strength())
}

// dark reports whether the limit, which is not off, only counts for an identity.
func (l *handlerLimit) dark(id limiters.Identity) bool {
	for _, m := range l.modes {
		if m == nil {
			continue
		}
		if m.State == "dark" || m.Percent != nil && !inShare(id, *m.Percent) {
			return true
		}
	}
	return false
}

// provisionLimits makes the limits and groups them by identity. The first group
// is that of the handler's own key, by which a request is known in logs.
func (h *Handler) provisionLimits(ctx caddy.Context) error {
	if _, err := h.group(h.Key); err != nil {
		return err
	}
	for _, c := range h.Rate {
		l, err := c.limit(h.Pool)
		if err != nil {
			return err
		}
		if err := h.provisionLimit(ctx, l, c, c.Key, c.MatchRaw, c.Mode); err != nil {
			return err
		}
	}
	for _, c := range h.Concurrency {
		l, err := c.limit(h.Pool)
		if err != nil {
			return err
		}
		if err := h.provisionLimit(ctx, l, c, c.Key, c.MatchRaw, c.Mode); err != nil {
			return err
		}
	}
	return nil
}

// provisionLimit adds a limit, whose config has the field MatchRaw.
func (h *Handler) provisionLimit(ctx caddy.Context, l *limiters.Limit, config any, key []string, matchRaw caddyhttp.RawMatcherSets, mode *Mode) error {
	if len(key) == 0 {
		key = h.Key
	}
	g, err := h.group(key)
	if err != nil {
		return err
	}
	hl := handlerLimit{numbers: &limitNumbers{l, newLimitWords(l)}, modes: [2]*Mode{h.Mode, mode}}
	loaded, err := ctx.LoadModule(config, "MatchRaw")
	if err != nil {
		return err
	}
	if err := hl.match.FromInterface(loaded); err != nil {
		return err
	}
	match, err := json.Marshal(matchRaw)
	if err != nil {
		return err
	}
	scope := strings.Join(key, " ") + " " + string(match)
	if err := h.app.declare(&declaredLimit{hl.numbers, scope, hl.strength()}); err != nil {
		return err
	}
	g.limits = append(g.limits, len(h.limits))
	h.limits = append(h.limits, hl)
	return nil
}

// group returns the group of a key, which it makes if there is none.
func (h *Handler) group(key []string) (*keyGroup, error) {
	for _, g := range h.groups {
		if slices.Equal(g.key, key) {
			return g, nil
		}
	}
	sources, err := parseSources(key)
	if err != nil {
		return nil, err
	}
	g := &keyGroup{key: key, sources: sources}
	h.groups = append(h.groups, g)
	return g, nil
}

// asked is what is asked about a request, with what is needed to read the
// answer.
type asked struct {
	asks   []limiters.Ask
	limits []limitVerdict // one a check, in order
	by     []int          // the index in Handler.limits of each
}

// decide decides about a request. What it takes is in adm from the moment that
// it is taken.
func (h *Handler) decide(a *attachment, r *http.Request, repl *caddy.Replacer, v *verdict, adm *limiters.Admission) {
	exempt, err := anyMatch(h.exempt, r)
	if err == nil && exempt {
		v.outcome = outcomeExempt
		return
	}
	key := apiKey(r)
	if err == nil {
		v.criticality, err = h.ranking.criticality(r, key)
	}
	var q asked
	if err == nil && !isPreflight(r) {
		err = h.ask(a, r, repl, key, v, &q)
	}
	if err != nil {
		// A matcher that fails is not the client's fault: it is told to nobody
		// but the operator, and the request passes.
		h.logger.Error("matcher failed; the request passes", zap.Error(err))
		v.outcome = outcomePanic
		return
	}
	if len(q.asks) == 0 {
		return
	}

	now := time.Now()
	var cached bool
	if *adm, cached = a.store.denials.Denied(now, q.asks); !cached {
		*adm, err = a.store.Admit(r.Context(), q.asks)
		a.store.denials.Learn(now, q.asks, *adm)
	}
	h.read(a, &q, *adm, err, v)
	if err != nil && v.outcome == outcomeAllowed {
		v.outcome = outcomeStoreError
		v.closed = h.OnStoreError == "closed" && v.criticality != shedding.Critical
	}
}

// ask collects what is to be asked about a request.
func (h *Handler) ask(a *attachment, r *http.Request, repl *caddy.Replacer, key string, v *verdict, q *asked) error {
	for i, g := range h.groups {
		id, source := g.sources.identify(r, repl, key, h.app.hasher, h.IPv6Prefix)
		if i == 0 {
			v.identity = id
		}
		if source == "client address" {
			h.warnIfForwarded(r)
		}
		first := len(q.limits)
		for _, n := range g.limits {
			l := &h.limits[n]
			if l.strength() == 0 {
				continue
			}
			if l.endpoint() {
				match, err := l.match.AnyMatchWithError(r)
				if err != nil {
					return err
				}
				if !match {
					continue
				}
			}
			dark := l.dark(id)
			if id.IsZero() {
				a.limits[n].metrics.noIdentity(dark)
				continue
			}
			numbers := a.limits[n].current.Load()
			if numbers == nil {
				numbers = l.numbers
			}
			q.limits = append(q.limits, limitVerdict{
				limit: numbers.limit, words: numbers.words, source: source, endpoint: l.endpoint(), dark: dark,
			})
			q.by = append(q.by, n)
		}
		if len(q.limits) > first {
			checks := make([]limiters.Check, 0, len(q.limits)-first)
			for _, l := range q.limits[first:] {
				checks = append(checks, limiters.Check{Limit: l.limit, Dark: l.dark})
			}
			q.asks = append(q.asks, limiters.Ask{Identity: id, Checks: checks})
		}
	}
	return nil
}

// read turns the store's answer into the verdict.
func (h *Handler) read(a *attachment, q *asked, adm limiters.Admission, failed error, v *verdict) {
	if !adm.Allowed {
		v.outcome = outcomeDenied
	}
	enforced := q.limits[:0]
	for i, l := range q.limits {
		l.result = adm.Results[i]
		if l.result.Outcome == limiters.Unknown && failed == nil {
			continue // another limit's denial was remembered, so nobody asked
		}
		a.limits[q.by[i]].metrics.decision(l.dark, l.result.Outcome)
		denied := l.result.Outcome == limiters.Denied
		switch {
		case l.dark && denied && v.wouldReject == nil:
			v.wouldReject = &l
		case !l.dark && denied && (v.denied == nil || l.result.RetryAfter > v.denied.result.RetryAfter):
			v.denied = &l
		}
		if !l.dark && l.result.Outcome != limiters.Unknown {
			enforced = append(enforced, l)
		}
	}
	v.limits = enforced
}

// warnIfForwarded warns once about what looks like a proxy that is not trusted:
// all its clients would be one.
func (h *Handler) warnIfForwarded(r *http.Request) {
	if !h.warnForwarded.Load() || r.Header.Get("X-Forwarded-For") == "" {
		return
	}
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil || !peer.Addr().IsPrivate() && !peer.Addr().IsLoopback() || !h.warnForwarded.Swap(false) {
		return
	}
	h.logger.Warn("a private peer sends X-Forwarded-For but no proxy is trusted, so all clients behind it count as one address; "+
		"set trusted_proxies static private_ranges and trusted_proxies_strict in the global option servers",
		zap.String("peer", peer.Addr().String()))
}
