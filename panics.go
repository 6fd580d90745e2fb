// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
)

var panicsTotal = prometheus.NewCounterVec(counterOpts("panics_total",
	"Bugs of this module, or of a source of utilization, that were caught where no request can have outcome panic."),
	[]string{"where"})

var bugs everySecond

func init() {
	for _, where := range []string{
		"attach", "beat", "control", "end", "enter", "fleet_sync", "log", "metrics", "probe",
		"release", "renew", "sampler", "script", "upkeep", "utilization",
	} {
		panicsTotal.WithLabelValues(where)
	}
	safely.Report = reportBug
}

// reportBug counts a bug that was caught, and logs at most one a second.
func reportBug(b *safely.Bug) {
	panicsTotal.WithLabelValues(b.Where).Inc()
	if more, ok := bugs.allow(time.Now()); ok {
		// Caddy's own logger, because that of a config ends with it.
		caddy.Log().Named("stripe_ratelimit").Error("bug in stripe_ratelimit; it goes on",
			zap.String("where", b.Where),
			zap.String("panic", b.Value),
			zap.ByteString("stack", b.Stack),
			zap.Int64("bugs_not_logged", more))
	}
}
