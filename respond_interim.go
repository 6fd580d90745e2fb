// SPDX-License-Identifier: Apache-2.0

package striperatelimit

// Interim: branch classify replaces this file by respond.go.

import (
	"net/http"

	"github.com/caddyserver/caddy/v2"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

func newLimitWords(*limiters.Limit) *limitWords { return nil }

func (h *Handler) annotate(*http.Request, *caddy.Replacer, *verdict) {}

func setRateLimitFields(http.Header, []limitVerdict) {}

func (h *Handler) reject(w http.ResponseWriter, r *http.Request, v *verdict, u float64) error {
	w.WriteHeader(http.StatusTooManyRequests)
	return nil
}
