// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
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
	mode    control.Mode // the weaker of the handler's and the limit's
}

// endpoint reports whether the limit is for some requests only.
func (l *handlerLimit) endpoint() bool { return len(l.match) > 0 }

// isDark reports whether what has a mode, which is not off, only counts for an
// identity.
func isDark(mode control.Mode, id limiters.Identity) bool {
	return mode < control.Enforce && !inShare(id, mode.Percent())
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
	hl := handlerLimit{numbers: newLimitNumbers(l), mode: min(h.Mode.level(), mode.level())}
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
	if g.byAddress() {
		scope += fmt.Sprintf(" /%d", h.IPv6Prefix) // another one makes other identities
	}
	if err := h.app.declare(&declaredLimit{hl.numbers, scope, hl.mode.Strength()}); err != nil {
		return err
	}
	g.limits = append(g.limits, len(h.limits))
	h.limits = append(h.limits, hl)
	return nil
}

// byAddress reports whether the identity may be a client address.
func (g *keyGroup) byAddress() bool {
	return slices.ContainsFunc(g.sources, func(s keySource) bool { return s.word == sourceClientIP })
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

// decide decides about a request. What it takes is in t from the moment that it
// is taken.
func (h *Handler) decide(a *attachment, r *http.Request, repl *caddy.Replacer, v *verdict, t *taken) {
	exempt, err := anyMatch(h.exempt, r)
	if err == nil && exempt {
		v.outcome = outcomeExempt
		return
	}
	key := apiKey(r)
	if err == nil {
		v.criticality, err = h.ranking.criticality(r, key)
	}
	if err == nil && !isPreflight(r) {
		err = h.applicable(a, r, repl, key, v)
	}
	if err != nil {
		// A matcher that fails is not the client's fault: it is told to nobody
		// but the operator, and the request passes.
		h.complain("matcher failed; the request passes", zap.Error(err))
		v.outcome = outcomePanic
		return
	}
	asks := v.asks()

	// A client that floods is turned away before it can take what others need.
	now := monotonic()
	if denied, ok := a.store.denials.Denied(now, asks); ok {
		h.read(a, v, denied, nil)
		return
	}
	ctx := r.Context()
	if modes := a.pool.shedders.Load(); modes != nil {
		shed, cancel := h.shed(a, modes, &ctx, r, v, t)
		defer cancel()
		if shed {
			return
		}
	}
	if len(asks) == 0 {
		return
	}
	t.admission, err = a.store.Admit(ctx, asks)
	a.store.denials.Learn(now, asks, t.admission)
	failed := outcomeStoreError
	if err != nil {
		// A bug of ours is no reason to refuse anybody.
		if _, bug := errors.AsType[*safely.Bug](err); bug {
			failed = outcomePanic
		} else if h.OnStoreError == onStoreErrorLocal && t.admission.Allowed {
			a.decideLocally(v, asks, t)
		}
	}
	h.read(a, v, t.admission, err)
	if err != nil && v.outcome == outcomeAllowed {
		v.outcome = failed
		v.closed = failed == outcomeStoreError && h.OnStoreError == onStoreErrorClosed &&
			v.criticality != shedding.Critical && v.unanswered()
	}
	if v.rejects() {
		h.giveBack(a, t) // at once, and not when the answer is written
	}
}

// start is when monotonic began.
var start = time.Now()

// monotonic is time.Now at half its cost: it reads one clock of two, and its wall
// clock never steps.
func monotonic() time.Time { return start.Add(time.Since(start)) }

// applicable collects the limits that apply to a request.
func (h *Handler) applicable(a *attachment, r *http.Request, repl *caddy.Replacer, key string, v *verdict) error {
	v.limits = v.few[:0]
	inForce := a.store.control.inForce()
	for i, g := range h.groups {
		id, sender := g.sources.identify(r, repl, key, h.app.hasher, h.IPv6Prefix)
		if i == 0 {
			v.identity = id
		}
		if sender == senderClientAddress {
			h.warnIfForwarded(r)
		}
		for _, n := range g.limits {
			l := &h.limits[n]
			mode := l.mode
			if inForce != nil {
				mode = min(mode, inForce.mode(h.Pool, l.numbers.limit.Kind.String(), l.numbers.limit.Name))
			}
			if mode == control.Off {
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
			dark := isDark(mode, id)
			if id.IsZero() {
				a.limits[n].metrics.noIdentity(dark)
				continue
			}
			numbers := a.limits[n].current.Load()
			if numbers == nil {
				numbers = l.numbers
			}
			if inForce != nil {
				numbers = inForce.numbers(numbers, id)
			}
			v.limits = append(v.limits, limitVerdict{
				limitNumbers: numbers, index: int32(n), identity: id, sender: sender, endpoint: l.endpoint(), dark: dark,
				result: &unanswered,
			})
		}
	}
	if len(h.groups) > 1 {
		// Two keys may have given one identity, about which there is one
		// question: together, and rate limits first.
		slices.SortStableFunc(v.limits, func(a, b limitVerdict) int {
			return cmp.Or(bytes.Compare(a.identity[:], b.identity[:]), cmp.Compare(a.limit.Kind, b.limit.Kind))
		})
	}
	return nil
}

// asks returns what is to be asked about the limits that apply: one Ask for
// each identity, with the checks in the order of the limits.
func (v *verdict) asks() []limiters.Ask {
	asks, checks := v.fewAsks[:0], v.fewChecks[:0]
	if len(v.limits) > cap(checks) {
		checks = make([]limiters.Check, 0, len(v.limits))
	}
	first := 0
	for i := range v.limits {
		l := &v.limits[i]
		checks = append(checks, limiters.Check{Limit: l.limit, Dark: l.dark})
		if last := i+1 == len(v.limits); last || v.limits[i+1].identity != l.identity {
			asks = append(asks, limiters.Ask{Identity: l.identity, Checks: checks[first:]})
			first = i + 1
		}
	}
	return asks
}

// unanswered reports whether the store owes the answer about an enforced limit.
// What is dark rejects nothing, not even for want of an answer.
func (v *verdict) unanswered() bool {
	return slices.ContainsFunc(v.limits, func(l limitVerdict) bool {
		return !l.dark && l.result.Outcome == limiters.Unknown
	})
}

// read turns the store's answer into the verdict.
func (h *Handler) read(a *attachment, v *verdict, adm limiters.Admission, failed error) {
	if !adm.Allowed {
		v.outcome = outcomeDenied
	}
	for i := range v.limits {
		l := &v.limits[i]
		l.result = &adm.Results[i]
		if l.result.Outcome == limiters.Unknown && failed == nil {
			continue // another limit's denial was remembered, so nobody asked
		}
		a.limits[l.index].metrics.decision(l.dark, l.local, l.result.Outcome)
		switch denied := l.result.Outcome == limiters.Denied; {
		case !denied:
		case l.dark && v.wouldReject == nil:
			v.wouldReject = l
		case !l.dark && (v.denied == nil || l.result.RetryAfter > v.denied.result.RetryAfter):
			v.denied = l
		}
	}
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
	h.log().Warn("a private peer sends X-Forwarded-For but no proxy is trusted, so all clients behind it count as one address; "+
		"set trusted_proxies static private_ranges and trusted_proxies_strict in the global option servers",
		zap.String("peer", peer.Addr().String()))
}
