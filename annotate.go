// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"net/http"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// verdictVar is the request variable that holds its first verdict.
const verdictVar = "stripe_ratelimit.verdict"

// annotate offers what was decided to the handlers behind this one, as
// placeholders, and to the access log. Both read the verdict only when they are
// used, since on most requests they are not, and follow the verdict that is
// latest when a request passes several pools. One that rejects stays, though,
// whatever the pools of handle_errors say of it.
func (h *Handler) annotate(r *http.Request, vars map[string]any, repl *caddy.Replacer, v *verdict) {
	if first, ok := vars[verdictVar].(*verdict); ok {
		last := first
		for last.next != nil {
			last = last.next
		}
		last.next = v
		return
	}
	if vars != nil {
		vars[verdictVar] = v
	}
	repl.Map(v.placeholder)

	// Without an access log nobody reads the fields, and setting them is the
	// dearest part.
	ctx := r.Context()
	if server, ok := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server); !ok || server == nil || server.Logs == nil {
		return
	}
	if extra, ok := ctx.Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields); ok {
		extra.Add(zap.Inline(v))
	}
}

// requestVars returns the variables of a request, nil if there are none. Each look
// into a context goes through many.
func requestVars(r *http.Request) map[string]any {
	vars, _ := r.Context().Value(caddyhttp.VarsCtxKey).(map[string]any)
	return vars
}

// The names of placeholders and log fields, and what stands before them.
const (
	placeholderPrefix = "http.stripe_ratelimit."
	logFieldPrefix    = "ratelimit_"
)

var annotations = [...]string{
	"outcome", "pool", "kind", "limit", "criticality", "reason", "retry_after", "identity", "would_reject",
}

// placeholder is the caddy.ReplacerFunc for the latest verdict.
func (v *verdict) placeholder(key string) (any, bool) {
	name, ok := strings.CutPrefix(key, placeholderPrefix)
	if !ok {
		return nil, false
	}
	return v.current().annotation(name)
}

// MarshalLogObject adds the latest verdict to a line of the access log.
func (v *verdict) MarshalLogObject(enc zapcore.ObjectEncoder) error {
	for _, name := range annotations {
		switch value, _ := v.current().annotation(name); value := value.(type) {
		case int:
			enc.AddInt(logFieldPrefix+name, value)
		case string:
			if value != "" {
				enc.AddString(logFieldPrefix+name, value)
			}
		}
	}
	return nil
}

// current returns what the verdicts from the first one on come to.
func (v *verdict) current() *verdict {
	current := v
	for v = v.next; v != nil; v = v.next {
		if v.rejects() || !current.rejects() {
			current = v
		}
	}
	return current
}

// of reports whether one of the verdicts from the first one on, which may be
// nil, is of the pool.
func (v *verdict) of(pool string) bool {
	for ; v != nil; v = v.next {
		if v.pool == pool {
			return true
		}
	}
	return false
}

// annotation returns a fact about the request, empty where there is none; false
// if no fact has that name.
func (v *verdict) annotation(name string) (any, bool) {
	switch name {
	case "outcome":
		return v.outcome.String(), true
	case "pool":
		return v.pool, true
	case "kind":
		if v.denied != nil {
			return v.denied.limit.Kind.String(), true
		}
		return v.shedBy.String(), true
	case "limit":
		if v.denied != nil {
			return v.denied.limit.Name, true
		}
	case "criticality":
		if v.criticality != 0 {
			return v.criticality.String(), true
		}
	case "reason":
		return v.reason(), true
	case "retry_after":
		if v.retryAfter != 0 {
			return v.retryAfter, true
		}
	case "identity":
		if !v.identity.IsZero() {
			return v.identity.String(), true
		}
	case "would_reject":
		if v.wouldReject != nil {
			return v.wouldReject.limit.Kind.String() + "/" + v.wouldReject.limit.Name, true
		}
		return v.wouldShed.String(), true
	default:
		return nil, false
	}
	return "", true
}
