// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// span is one that keeps its attributes.
type span struct {
	noop.Span
	recording bool
	got       []string
}

func (s *span) IsRecording() bool { return s.recording }

func (s *span) SetAttributes(attributes ...attribute.KeyValue) {
	for _, a := range attributes {
		s.got = append(s.got, string(a.Key)+"="+a.Value.String())
	}
}

// The span of a request has its verdict, as docs/operating.md lists it, and
// nothing of who sent it.
func TestTrace(t *testing.T) {
	h := runningHandler(t, &RateLimit{Requests: 1, Burst: 1, Per: caddy.Duration(24 * time.Hour)})
	next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })
	serve := func(s *span) {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("Authorization", "Bearer sk_live_1")
		r = r.WithContext(trace.ContextWithSpan(r.Context(), s))
		w := httptest.NewRecorder()
		_ = h.ServeHTTP(w, caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil), next)
	}
	rows := []struct {
		recording bool
		want      []string
	}{
		{true, []string{"criticality=get", "outcome=allowed", "pool=benchmark"}},
		{false, nil},
		{true, []string{"criticality=get", "kind=rate", "limit=rate", "outcome=denied", "pool=benchmark", "reason=global-rate", "retry_after"}},
	}
	documented := readFile(t, "docs/operating.md")
	for i, row := range rows {
		s := &span{recording: row.recording}
		serve(s)
		var got []string
		for _, a := range s.got {
			a, ok := strings.CutPrefix(a, "stripe_ratelimit.")
			if !ok {
				t.Errorf("request %d: got attribute %s, want the prefix stripe_ratelimit.", i, a)
			}
			name, _, _ := strings.Cut(a, "=")
			if !strings.Contains(documented, "`stripe_ratelimit."+name+"`") {
				t.Errorf("docs/operating.md does not say what stripe_ratelimit.%s is", name)
			}
			if name == "retry_after" {
				a = name // which is a matter of chance
			}
			got = append(got, a)
		}
		slices.Sort(got)
		if diff := cmp.Diff(row.want, got); diff != "" {
			t.Errorf("request %d: attributes (-want +got):\n%s", i, diff)
		}
	}
}

// The documentation names every event.
func TestEvents_Documented(t *testing.T) {
	documented := readFile(t, "docs/operating.md")
	for _, name := range []string{eventTriggered, eventCleared, eventShedLevel, eventStoreDown, eventStoreUp, eventSwitchChanged} {
		if !strings.Contains(documented, "\n| `"+name+"` |") {
			t.Errorf("docs/operating.md does not have %s", name)
		}
	}
}
