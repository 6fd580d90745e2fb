// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"context"
	"encoding/json"
	"net/http"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"
)

// nodeResult is what one call of stripe-node came to.
type nodeResult struct {
	OK       bool
	ID       string
	Statuses []int // of its tries
	Error    *struct {
		RateLimitError bool `json:"rate_limit_error"`
		Name           string
		Status         int
		Code           string
		Type           string
		Message        string
		RequestID      string `json:"request_id"`
		Headers        map[string]string
	}
}

// stripeNode makes customers until a try is rejected, and returns what the last
// call came to. Calls before must succeed.
func stripeNode(t *testing.T, site int, key string) nodeResult {
	t.Helper()
	args, err := json.Marshal(map[string]any{"url": siteURLs[site], "key": key, "calls": attempts})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	node := exec.CommandContext(ctx, "node", "stripe_node.cjs", string(args))
	out, err := node.Output()
	if err != nil {
		if exit, ok := err.(*exec.ExitError); ok {
			t.Logf("%s", exit.Stderr)
		}
		t.Fatalf("node (run `npm ci` in compat first): %v", err)
	}
	var results []nodeResult
	if err := json.Unmarshal(out, &results); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	last := results[len(results)-1]
	for _, result := range results[:len(results)-1] {
		if !result.OK {
			t.Fatalf("a call failed that was not rejected: %+v", result.Error)
		}
	}
	if !slices.ContainsFunc(last.Statuses, func(status int) bool { return status >= 400 }) {
		t.Fatalf("none of %d calls was rejected", len(results))
	}
	return last
}

// stripe-node takes a 429 whose body it does not know for a success. It knows ours.
func TestStripeNode_Denied(t *testing.T) {
	cases := []struct {
		name string
		site int
		busy bool // a request is in progress
	}{
		{"as Stripe does it", plain, false},
		{"should_retry auto and a long wait", long, false},
		{"concurrency", busy, true},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			key := keyOf(t)
			if c.busy {
				release := hold(t, c.site, key)
				defer release()
			}
			got := stripeNode(t, c.site, key)
			if got.OK {
				t.Fatalf("a denial became the success %q", got.ID)
			}
			if want := []int{http.StatusTooManyRequests}; !slices.Equal(got.Statuses, want) {
				t.Errorf("got statuses %v, want %v: no retries", got.Statuses, want)
			}
			e := got.Error
			if !e.RateLimitError || e.Status != http.StatusTooManyRequests || e.Code != "rate_limit" || e.Type != "invalid_request_error" {
				t.Errorf("got %+v, want a StripeRateLimitError 429 rate_limit", e)
			}
			if seconds, err := strconv.Atoi(e.Headers["retry-after"]); err != nil || seconds < 1 {
				t.Errorf("Retry-After: %q, want at least 1", e.Headers["retry-after"])
			}
			if e.Message == "" || e.RequestID == "" {
				t.Errorf("got %+v, want a message and a request id", e)
			}
		})
	}
}

func TestStripeNode_ShouldRetryRecovers(t *testing.T) {
	got := stripeNode(t, retried, keyOf(t))
	if !got.OK || got.ID != "cus_1" || len(got.Statuses) < 2 {
		t.Errorf("got %+v, error %+v, want a success after more than one try", got, got.Error)
	}
}

// stripe-node retries a 503, and must not take the last one for a success.
func TestStripeNode_Unavailable(t *testing.T) {
	for site, code := range unavailable {
		t.Run(code, func(t *testing.T) {
			got := stripeNode(t, site, keyOf(t))
			if got.OK {
				t.Fatalf("a 503 became the success %q", got.ID)
			}
			if e := got.Error; e.RateLimitError || e.Status != http.StatusServiceUnavailable || e.Code != code || e.Type != "api_error" {
				t.Errorf("got %+v, want an api_error 503 %s", e, code)
			}
		})
	}
}
