// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"net/http"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

// traceAttributes have the names of the placeholders. The identity is not among
// them: traces go to more places than logs do.
var traceAttributes = [...]string{
	"outcome", "pool", "kind", "limit", "criticality", "reason", "retry_after", "would_reject",
}

// trace notes a verdict on the current span, that of Caddy's tracing directive,
// if there is one and it is recorded.
func (v *verdict) trace(r *http.Request) {
	span := trace.SpanFromContext(r.Context())
	if !span.IsRecording() {
		return
	}
	for _, name := range traceAttributes {
		key := "stripe_ratelimit." + name
		switch value, _ := v.annotation(name); value := value.(type) {
		case int:
			span.SetAttributes(attribute.Int(key, value))
		case string:
			if value != "" {
				span.SetAttributes(attribute.String(key, value))
			}
		}
	}
}
