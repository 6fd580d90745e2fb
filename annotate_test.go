// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"net/http/httptest"
	"reflect"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap/zapcore"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

func TestAnnotate(t *testing.T) {
	id := limiters.Identity{0xab, 15: 1}
	dark := said(t, "candidate", "50/1s burst 50 cost 1", limitDenied(0, time.Second, time.Second))
	denied := deniedBy(said(t, "search", "1/1s burst 1 cost 1", limitDenied(0, time.Second, time.Second)))
	denied.identity, denied.criticality = id, shedding.Post
	cases := []struct {
		name    string
		verdict *verdict
		want    map[string]any
	}{
		{
			"allowed",
			&verdict{outcome: outcomeAllowed, pool: "api", criticality: shedding.Get, identity: id, wouldReject: &dark},
			map[string]any{
				"outcome": "allowed", "pool": "api", "criticality": "get",
				"identity": "ab000000000000000000000000000001", "would_reject": "rate/candidate",
			},
		},
		{
			"denied", denied,
			map[string]any{
				"outcome": "denied", "pool": "default", "criticality": "post", "identity": "ab000000000000000000000000000001",
				"kind": "rate", "limit": "search", "reason": "global-rate", "retry_after": 1,
			},
		},
		{
			"closed",
			&verdict{outcome: outcomeStoreError, closed: true, pool: "api", criticality: shedding.TestMode},
			map[string]any{
				"outcome": "store_error", "pool": "api", "criticality": "test_mode", "reason": "limiter_unavailable", "retry_after": 1,
			},
		},
		{"exempt", &verdict{outcome: outcomeExempt, pool: "api"}, map[string]any{"outcome": "exempt", "pool": "api"}},
	}
	for _, c := range cases {
		r, repl := newRequest("GET", "/")
		h := new(Handler)
		h.annotate(r, requestVars(r), repl, c.verdict)
		if c.verdict.rejects() {
			// What is decided last is told, too.
			if err := h.reject(httptest.NewRecorder(), r, c.verdict, 0); err != nil {
				t.Fatal(err)
			}
		}
		checkAnnotations(t, c.name, repl, c.verdict, c.want)
	}
}

// checkAnnotations checks the placeholders and the log fields, of which those
// without a value are empty or left out.
func checkAnnotations(t *testing.T, name string, repl *caddy.Replacer, logged *verdict, want map[string]any) {
	t.Helper()
	got := make(map[string]any)
	for _, name := range []string{"outcome", "pool", "kind", "limit", "criticality", "reason", "retry_after", "identity", "would_reject"} {
		value, known := repl.Get("http.stripe_ratelimit." + name)
		if !known {
			t.Errorf("placeholder %s is not known", name)
		}
		if value != "" {
			got[name] = value
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s: placeholders, -want +got:\n%s", name, diff)
	}

	fields := make(map[string]any)
	for name, value := range want {
		fields["ratelimit_"+name] = value
	}
	enc := zapcore.NewMapObjectEncoder()
	if err := logged.MarshalLogObject(enc); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(fields, enc.Fields); diff != "" {
		t.Errorf("%s: log fields, -want +got:\n%s", name, diff)
	}
}

// What became of a request is not what the pool of its error page says.
func TestAnnotate_RejectionStays(t *testing.T) {
	r, repl := newRequest("GET", "/")
	first := &verdict{outcome: outcomeAllowed, pool: "edge"}
	rows := []struct {
		verdict       *verdict
		pool, outcome string
	}{
		{first, "edge", "allowed"},
		{&verdict{outcome: outcomeShed, pool: "api"}, "api", "shed"},
		{&verdict{outcome: outcomeAllowed, pool: "errors"}, "api", "shed"},
		{&verdict{outcome: outcomeExempt, pool: "more"}, "api", "shed"},
		{&verdict{outcome: outcomeShed, pool: "last"}, "last", "shed"}, // its answer is the one
	}
	for _, row := range rows {
		new(Handler).annotate(r, requestVars(r), repl, row.verdict)
		for name, want := range map[string]string{"pool": row.pool, "outcome": row.outcome} {
			if got, _ := repl.Get(placeholderPrefix + name); got != want {
				t.Errorf("after pool %s: %s is %v, want %s", row.verdict.pool, name, got, want)
			}
		}
	}
}

func TestAnnotate_SeveralPools(t *testing.T) {
	r, repl := newRequest("GET", "/")
	first := &verdict{outcome: outcomeAllowed, pool: "edge"}
	for i, v := range []*verdict{first, {outcome: outcomeAllowed, pool: "api"}, {outcome: outcomeExempt, pool: "errors"}} {
		new(Handler).annotate(r, requestVars(r), repl, v)
		checkAnnotations(t, v.pool, repl, first, map[string]any{"outcome": v.outcome.String(), "pool": v.pool})
		if got := len(extraFields(r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey))); got != 1 {
			t.Errorf("after %d pools: got %d extra log fields, want 1", i+1, got)
		}
	}
}

// extraFields returns the types of the fields that go to the access log.
func extraFields(extra any) []zapcore.FieldType {
	fields := reflect.ValueOf(extra).Elem().FieldByName("fields")
	var types []zapcore.FieldType
	for i := range fields.Len() {
		types = append(types, zapcore.FieldType(fields.Index(i).FieldByName("Type").Uint()))
	}
	return types
}

func TestAnnotate_AccessLog(t *testing.T) {
	r, repl := newRequest("GET", "/")
	server := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	extra := r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey)

	server.Logs = nil
	new(Handler).annotate(r, requestVars(r), repl, &verdict{})
	if got := extraFields(extra); got != nil {
		t.Errorf("without access log: got fields %v, want none", got)
	}

	r, repl = newRequest("GET", "/")
	extra = r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey)
	new(Handler).annotate(r, requestVars(r), repl, &verdict{})
	if got := extraFields(extra); len(got) != 1 || got[0] != zapcore.InlineMarshalerType {
		t.Errorf("with access log: got fields %v, want an inline one", got)
	}

	// In a test of somebody's own chain there is no server.
	bare := httptest.NewRequest("GET", "/", nil)
	new(Handler).annotate(bare, requestVars(bare), repl, &verdict{})
}

func TestAnnotate_OtherPlaceholders(t *testing.T) {
	r, repl := newRequest("GET", "/")
	new(Handler).annotate(r, requestVars(r), repl, &verdict{})
	for _, key := range []string{"http.stripe_ratelimit.", "http.stripe_ratelimit.key", "http.stripe_ratelimit", "stripe_ratelimit.outcome"} {
		if value, known := repl.Get(key); known {
			t.Errorf("{%s}: got %v, want it to stay unknown", key, value)
		}
	}
}
